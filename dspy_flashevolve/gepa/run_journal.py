"""What a run writes into its journal, and what it reads there when it goes on.

Everything that is paid or decided becomes a row: metric calls before they are made, rollouts, proposals, verdicts,
heads, commits before gepa's state gets them, and the ends of tickets. The rest are the bus's events.
"""

from __future__ import annotations

import json
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from gepa.core.state import ValsetEvaluation
from gepa.proposer.base import CandidateProposal

from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.events import Event, HeadEnded, Integrated, RolloutFinished, TicketClosed
from dspy_flashevolve.engine.flights import Rollout
from dspy_flashevolve.engine.item import EndKind, Ticket
from dspy_flashevolve.engine.journal import Journal
from dspy_flashevolve.engine.journal_check import name_of
from dspy_flashevolve.gepa.payloads import Candidate, Child, Counts, MergePlan, Proposed, Selected, Train

Evaluation = ValsetEvaluation[Any, Any]


class RolloutRecords(Protocol):
    """Rollouts as text, and back; what a program returns is the program's business."""

    def output(self, rollout: Rollout) -> str: ...
    def trace(self, candidate: Candidate, rollout: Rollout) -> str | None: ...
    def read_output(self, text: str | None) -> Any: ...
    def read_trace(self, candidate: Candidate, example: Any, text: str) -> Any: ...


def id_text(example_id: Any) -> str:
    """An example's id as text; ids of lists are numbers, other loaders have what they like."""
    return json.dumps(example_id, default=repr)


def hash_of(candidate: Mapping[str, str]) -> str:
    """A candidate's name in the journal: a hash of its texts."""
    return name_of(dict(candidate))


class RunJournal:
    """One run's view of its journal; it is a :class:`~dspy_flashevolve.engine.flights.RolloutLog`.

    Args:
        journal: where to write.
        records: rollouts as text.
    """

    def __init__(self, journal: Journal, records: RolloutRecords) -> None:
        self.journal = journal
        self.records = records
        self._known: set[str] = {row["hash"] for row in journal.rows("SELECT hash FROM candidates")}
        self._session = journal.session
        self.counts = Counts()
        """What the run has spent besides metric calls; the run writes it."""
        self.spent_before: tuple[int, float] = (0, 0.0)
        """Reflections and dollars of the sessions before."""

    def session_ended(self, state: str, reason: str) -> None:
        """Write how the run ended, and close the journal."""
        self.journal.append("session_ends", id=self._session, ended_at=time.time(), state=state, reason=reason)
        self.journal.close()

    def candidate(self, texts: Mapping[str, str]) -> str:
        """Write a candidate's texts, once; returns its hash."""
        name = hash_of(texts)
        if name not in self._known:
            self._known.add(name)
            self.journal.append("candidates", hash=name, texts=dict(texts))
        return name

    async def call_begins(self, claim: Claim) -> int:
        """See :class:`~dspy_flashevolve.engine.flights.RolloutLog`."""
        number = self._call(claim, 1)
        await self.journal.flush()
        return number

    def call_counts(self, claim: Claim) -> int:
        """See :class:`~dspy_flashevolve.engine.flights.RolloutLog`."""
        return self._call(claim, 1)

    def call_returned(self, claim: Claim) -> None:
        """See :class:`~dspy_flashevolve.engine.flights.RolloutLog`."""
        self._call(claim, -1)

    def calls_elsewhere(self, calls: int) -> None:
        """Metric calls that another program, dspy.GEPA say, made on the same run directory."""
        self._call(Claim(-1, "elsewhere", 0), calls)

    def _call(self, claim: Claim, calls: int) -> int:
        number = self.journal.next_id("calls")
        self.journal.append(
            "calls",
            id=number,
            session=self._session,
            ticket=claim.ticket,
            stage=claim.stage,
            at=time.time(),
            calls=calls,
        )
        return number

    def finished(self, key: Hashable, claim: Claim, rollout: Rollout, seconds: float, call: int) -> None:
        """See :class:`~dspy_flashevolve.engine.flights.RolloutLog`."""
        content, split, example, traced = key  # pyright: ignore[reportGeneralTypeIssues]  # made by Evaluations
        candidate = dict(content)
        self.journal.append(
            "rollouts",
            call=call,
            session=self._session,
            ticket=claim.ticket,
            stage=claim.stage,
            candidate=self.candidate(candidate),
            split=split,
            example=id_text(example),
            traced=int(traced),
            score=float(rollout.score),
            objective_scores=dict(rollout.objective_scores),
            output=self.records.output(rollout),
            trace=self.records.trace(candidate, rollout) if traced else None,
            tokens=rollout.tokens,
            cost_dollars=rollout.cost_dollars,
            latency_seconds=seconds,
            at=time.time(),
        )

    def opened(self, ticket: Ticket, seed: object, version: int, work: Selected | MergePlan) -> None:
        """Write what a ticket has selected; its randomness follows from ``rng``, which is its source's seed."""
        merges = isinstance(work, MergePlan)
        self.journal.append(
            "tickets",
            number=ticket.number,
            session=self._session,
            opened_at=time.time(),
            kind="merge" if merges else "mutation",
            version=version,
            rng=f"{seed}/{ticket.number}",
            selection=self._merge(work) if merges else self._selected(work),
        )

    def _merge(self, plan: MergePlan) -> dict[str, Any]:
        return {
            "candidate": self.candidate(plan.candidate),
            "parents": plan.parents,
            "ancestor": plan.ancestor,
            "ids": [id_text(one) for one in plan.ids],
            "parent_scores": plan.parent_scores,
        }

    def _selected(self, work: Selected) -> list[dict[str, Any]]:
        return [
            {
                "parent": task.parent_idx,
                "candidate": self.candidate(task.parent_candidate),
                "ids": [id_text(one) for one in task.minibatch_ids],
                "base": base,
            }
            for task, base in zip(work.tasks, work.bases, strict=True)
        ]

    def proposed(self, ticket: int, child: Child, proposed: Proposed) -> None:
        """Write what a reflection proposed."""
        self.journal.append(
            "proposals",
            ticket=ticket,
            position=child.index,
            session=self._session,
            at=time.time(),
            texts=dict(proposed.texts),
            feedback=list(child.feedback),
            tokens=proposed.tokens,
            cost_dollars=proposed.cost_dollars,
        )

    def landed(self, ticket: int, train: Train, proposal: CandidateProposal[Any]) -> None:
        """Write that an integrated candidate is a head: it passed its screen."""
        assert train.key is not None
        members = [one.ticket.number for one in train.members]
        self.landed_again(ticket, train.key, train.base.key, train.base.generation + 1, proposal, members)

    def landed_again(
        self,
        ticket: int,
        key: int,
        base: int | None,
        generation: int,
        proposal: CandidateProposal[Any],
        members: Sequence[int] = (),
    ) -> None:
        """As :meth:`landed`, for one of an interrupted run; its members have ended long since."""
        self.journal.append(
            "heads",
            session=self._session,
            head=key,
            ticket=ticket,
            at=time.time(),
            candidate=self.candidate(proposal.candidate),
            base=base,
            parents=list(proposal.parent_program_ids),
            generation=generation,
            examples=[id_text(one) for one in proposal.subsample_indices or []],
            before=list(proposal.subsample_scores_before or []),
            after=list(proposal.subsample_scores_after or []),
            members=list(members),
        )

    def commits(
        self,
        ticket: int | None,
        first: int,
        version: int,
        work: Sequence[tuple[Candidate, Sequence[int | None], Evaluation]],
    ) -> None:
        """Write candidates that are about to enter gepa's pool, and wait until that is safe.

        Args:
            ticket: that made them; None for another program's.
            first: the first one's index in the pool.
            version: the pool's, before them.

        Raises:
            JournalError: it is not.
        """
        for offset, (candidate, parents, evaluation) in enumerate(work):
            scores = evaluation.scores_by_val_id
            objectives = evaluation.objective_scores_by_val_id
            self.journal.append(
                "commits",
                candidate_index=first + offset,
                session=self._session,
                ticket=ticket,
                at=time.time(),
                version=version + offset + 1,
                candidate=self.candidate(candidate),
                parents=list(parents),
                score=sum(scores.values()) / max(1, len(scores)),
                scores={id_text(one): score for one, score in scores.items()},
                objective_scores=None if objectives is None else {id_text(i): dict(o) for i, o in objectives.items()},
            )
        self.journal.flush_here()

    def ended(self, ticket: int, way: str, reason: str, before: bool = False) -> None:
        """Write a ticket's end.

        Args:
            before: it had ended in the session before, which did not come to write it.
        """
        session = self._session - before
        self.journal.append("ends", ticket=ticket, session=session, ended_at=time.time(), way=way, reason=reason)

    def head_ended(self, session: int, head: int, way: str) -> None:
        """Write a head's end."""
        self.journal.append("head_ends", session=session, head=head, way=way, at=time.time())

    def __call__(self, event: Event) -> None:
        """A subscriber of the run's bus."""
        if isinstance(event, RolloutFinished):
            return  # it is a row of its own
        if isinstance(event, TicketClosed):
            calls, dollars = self.spent_before
            calls, dollars = calls + self.counts.reflection_calls, dollars + self.counts.cost_dollars
            self.journal.keep("spent", {"reflection_calls": calls, "cost_dollars": dollars})
            if event.end.kind is not EndKind.CANCELLED:  # a run that goes on takes it up again
                self.ended(event.ticket, event.end.kind.value, event.end.reason)
            return
        if isinstance(event, HeadEnded):
            self.head_ended(self._session, event.head, event.end)
        if isinstance(event, Integrated):
            self._judged(event)
        fields = {name: value for name, value in asdict(event).items() if name not in ("seconds", "ticket")}
        self.journal.append(
            "events",
            session=self._session,
            at=time.time(),
            seconds=event.seconds,
            kind=type(event).__name__,
            ticket=getattr(event, "ticket", None),
            fields=json.dumps(fields, default=str),
        )

    def _judged(self, event: Integrated) -> None:
        for child, verdict, reason in event.verdicts:
            self.journal.append(
                "verdicts",
                session=self._session,
                ticket=event.ticket,
                child=child,
                verdict=verdict,
                reason=reason,
                at=time.time(),
            )
