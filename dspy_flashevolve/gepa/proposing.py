"""From a parent's traces to a child: reflective dataset, reflection, new texts."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gepa.strategies.proposal_sampling import ProposalTask

from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.errors import FlashEvolveError
from dspy_flashevolve.engine.flights import Spent
from dspy_flashevolve.engine.gathering import gather
from dspy_flashevolve.engine.item import Ticket
from dspy_flashevolve.gepa import reports
from dspy_flashevolve.gepa.past import Past
from dspy_flashevolve.gepa.payloads import Batch, Child, Late, Proposed, RolledOut
from dspy_flashevolve.gepa.services import Services

ATTEMPTS = 2
"""gepa asks a reflection that raised once more, then skips the task."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """Why a task has no child.

    Args:
        failed: something raised; otherwise there was nothing to improve.
    """

    text: str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """A task that is ready to be reflected on."""

    index: int
    task: ProposalTask[Any, Any]
    evaluation: Batch
    components: list[str]
    dataset: Any
    base: int | None
    late: Late | None


class Proposer:
    """Writes the children of a ticket."""

    def __init__(self, services: Services) -> None:
        self._pool = services.pool
        self._program = services.program
        self._rollouts = services.rollouts
        self._counts = services.counts
        self._lockstep = services.lockstep
        self._journal = services.journal
        self._past = services.past

    async def propose(self, claim: Claim, ticket: Ticket, work: RolledOut) -> tuple[list[Child], list[Skipped]]:
        """A child for each task, or the reason why it has none."""
        prepared: list[Prepared] = []
        skipped: list[Skipped] = []
        if self._past is not None and self._past.has_proposals(ticket.number):
            return await self._recalled(self._past, ticket, work), []
        for index in range(len(work.tasks)):
            outcome = await self._prepare(claim, ticket, index, work)
            (prepared if isinstance(outcome, Prepared) else skipped).append(outcome)  # pyright: ignore[reportArgumentType]
        if self._lockstep:
            texts = [await self._reflect(claim, one) for one in prepared]
        else:
            texts = await gather([lambda one=one: self._reflect(claim, one) for one in prepared])
        children: list[Child] = []
        written: list[tuple[Child, Proposed]] = []
        for one, outcome in zip(prepared, texts, strict=True):
            if isinstance(outcome, Skipped):
                skipped.append(outcome)
                continue
            await self._pool.write(reports.proposed, self._pool, ticket, outcome.texts)
            self._counts.proposals += 1
            child = child_of(one, outcome.texts, ticket.number + 1)
            children.append(child)
            written.append((child, outcome))
        if self._journal is not None:
            for child, outcome in written:
                self._journal.proposed(ticket.number, child, outcome)
            await self._pool.write(self._pool.keep_strategies)
        return children, skipped

    async def _recalled(self, past: Past, ticket: Ticket, work: RolledOut) -> list[Child]:
        """What was proposed before the run was interrupted."""
        children: list[Child] = []
        for index, task in enumerate(work.tasks):
            proposed = past.proposal(ticket.number, index)
            if proposed is None:
                continue
            texts, feedback = proposed
            await self._pool.write(reports.proposed, self._pool, ticket, texts)
            one = Prepared(index, task, work.evaluations[index], [], {}, work.bases[index], work.late[index])
            children.append(replace(child_of(one, texts, ticket.number + 1), feedback=feedback))
        return children

    async def _prepare(self, claim: Claim, ticket: Ticket, index: int, work: RolledOut) -> Prepared | Skipped:
        task, evaluation = work.tasks[index], work.evaluations[index]
        reason = await self._pool.write(reports.nothing_to_improve, self._pool, ticket, task, evaluation)
        if reason is not None:
            return Skipped(reason)
        components = await self._pool.write(reports.choose_components, self._pool, ticket, task, evaluation)
        rng = None if self._lockstep else ticket.rng
        try:
            # Feedback comes from the metric, which may ask an LM: it takes a slot.
            dataset = await self._rollouts.request(
                claim,
                lambda: self._program.reflective_dataset(task.parent_candidate, evaluation, components, rng),
            )
        except FlashEvolveError:
            raise
        except Exception as error:
            self._log(f"Iteration {ticket.number + 1}: Exception building reflective dataset: {error}")
            return Skipped(f"no reflective dataset: {error}", failed=True)
        await self._pool.write(reports.reflection_starts, self._pool, ticket, task, components, dataset)
        return Prepared(index, task, evaluation, components, dataset, work.bases[index], work.late[index])

    async def _reflect(self, claim: Claim, one: Prepared) -> Proposed | Skipped:
        async def call() -> Any:
            return await self._program.propose(one.task.parent_candidate, one.dataset, one.components)

        for attempt in range(ATTEMPTS):
            self._counts.reflection_calls += 1
            try:
                proposed = await self._rollouts.request(claim, call, lambda made: Spent(made.tokens, made.cost_dollars))
            except FlashEvolveError:
                raise
            except Exception as error:
                self._log(f"Reflection failed (attempt {attempt + 1} of {ATTEMPTS}): {error}")
                reason = f"reflection failed: {error}"
                continue
            self._counts.reflection_tokens += proposed.tokens
            self._counts.cost_dollars += proposed.cost_dollars
            return proposed if proposed.texts else Skipped("reflection returned no text")
        return Skipped(reason, failed=True)  # pyright: ignore[reportPossiblyUnboundVariable]

    def _log(self, message: str) -> None:
        self._pool.logger.log(message)
        self._pool.logger.log(traceback.format_exc())


def child_of(one: Prepared, texts: dict[str, str], iteration: int) -> Child:
    """The parent's candidate with new texts.

    Raises:
        AssertionError: a text for a component that the parent does not have (as gepa).
    """
    candidate = dict(one.task.parent_candidate)
    metadata: dict[str, Any] = {"proposal_id": f"{iteration}-{one.index}"}
    for name, text in texts.items():
        assert name in candidate, f"{name} missing in candidate"
        candidate[name] = text
        metadata[f"prompt:{name}"] = metadata[f"raw_lm_output:{name}"] = ""
    feedback = feedback_in(one.dataset)
    return Child(one.index, one.task, candidate, one.evaluation, metadata, feedback, one.base, one.late)


def feedback_in(dataset: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[str, ...]:
    """What the metric said, one text an example; dspy's adapter keeps it under "Feedback"."""
    texts = [str(record["Feedback"]) for rows in dataset.values() for record in rows if record.get("Feedback")]
    return tuple(dict.fromkeys(texts))
