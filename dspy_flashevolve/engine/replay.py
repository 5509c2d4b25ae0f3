"""What a run writes into its journal, and what the journal answers when the run goes on.

Everything that is paid or decided becomes a row: metric calls before they are made, rollouts, replies, selections,
commits before the pool has them, and the ends of steps. The rest are the bus's events. A run that goes on runs again,
from their selection, the steps that had no end; what was paid for these is found here, by candidate and example or by
stage and position, and costs nothing. Other steps find nothing here: what they need is paid anew, as in a run that was
never interrupted.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dspy_flashevolve.engine.events import Event, RolloutFinished, StepClosed
from dspy_flashevolve.engine.journal import Journal, reporting_damage
from dspy_flashevolve.engine.redaction import REDACTED
from dspy_flashevolve.engine.steps import EndKind

BEFORE_STEPS = -1
"""Stands for the number of a step in what belongs to none: the seed's validation, say."""

TRACE_UNREADABLE = "TraceUnreadable"
"""Kind of the event that says that a rollout's trace was kept, and cannot be read any more."""


def id_text(example_id: Any) -> str:
    """An example's id as text; ids of lists are numbers, other loaders have what they like."""
    return json.dumps(example_id, default=repr)


def hash_of(texts: Mapping[str, str]) -> str:
    """A candidate's name: a hash of its texts, component -> text."""
    return hashlib.sha256(json.dumps(sorted(texts.items())).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One run of a program with a candidate on one example.

    Args:
        output: what the program returned.
        score: higher is better.
        objective_scores: objective name -> score; empty when the metric has one objective.
        trajectory: what reflection reads; None when no trace was asked for or none could be taken.
        tokens: prompt and completion tokens that the LMs reported.
        cost_dollars: of these tokens; 0 where a price is not known.
        error: what the program or its metric raised, as a sentence; empty where neither did.
    """

    output: Any
    score: float
    objective_scores: dict[str, float] = field(default_factory=dict[str, float])
    trajectory: Any = None
    tokens: int = 0
    cost_dollars: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class RolloutKey:
    """Equal keys mean the same rollout.

    Args:
        candidate: its name, by :func:`hash_of`, or another text that tells candidates apart.
        split: "train", "val", or another set of examples.
        example: tells the examples of the set apart.
        traced: whether a trace is taken.
    """

    candidate: str
    split: str
    example: Hashable
    traced: bool = True


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A step that had no end: it runs again from its selection.

    Args:
        number: of the step.
        version: the pool's, that it saw.
        selection: what it had selected, as the loop wrote it down.
    """

    number: int
    version: int
    selection: Any


class RunJournal:
    """One run's view of its journal.

    Args:
        journal: where to write, and what was written before.
        each_once: a rollout that is kept answers one request; else all that are equal (equal ones in flight are one).
        is_readable: whether a trace, as it stands in the journal, can still be read. Default: each can.
    """

    def __init__(
        self, journal: Journal, each_once: bool = False, is_readable: Callable[[str], bool] = lambda trace: True
    ) -> None:
        self.journal = journal
        self._each_once, self._is_readable = each_once, is_readable
        with reporting_damage(journal.path):
            self._read(journal.rows)
        self.unfinished: list[Unfinished] = []
        self._numbers: set[int] = set()
        self._rollouts: dict[tuple[str, str, str, int], list[int]] = {}
        self._untraced: set[int] = set()
        self._replies: dict[tuple[int, str, str], str] = {}
        self.paid: Counter[int] = Counter()
        """Step that runs again -> its rollouts that are paid."""

    def _read(self, rows: Callable[[str], Sequence[Any]]) -> None:
        self.spent = int(rows("SELECT COALESCE(SUM(calls), 0) AS spent FROM calls")[0]["spent"])
        """Metric calls of all sessions before."""
        [asked] = rows(
            "SELECT COALESCE(SUM(kind = 'RequestFinished' AND json_extract(fields, '$.stage') NOT IN "
            "(SELECT stage FROM rollouts)), 0) AS calls, "
            "COALESCE(SUM(json_extract(fields, '$.cost_dollars')), 0) AS dollars FROM events "
            "WHERE kind IN ('RequestFinished', 'LmCallCounted') AND json_valid(fields)"
        )
        [ran] = rows("SELECT COALESCE(SUM(cost_dollars), 0) AS dollars FROM rollouts")
        self.requests_before: int = asked["calls"]
        """Requests that were no rollouts, of all sessions before."""
        self.dollars_before: float = asked["dollars"] + ran["dollars"]
        """What these, the rollouts, and LM calls that belong to neither have cost."""
        self.last_step = int(rows("SELECT COALESCE(MAX(number), -1) AS last FROM steps")[0]["last"])
        """The highest number that a step had; -1 for none."""
        self.texts: dict[str, dict[str, str]] = {
            row["hash"]: dict(json.loads(row["texts"]).items()) for row in rows("SELECT hash, texts FROM candidates")
        }
        """Candidate's hash -> its texts."""

    def load_unfinished(self, seeded: bool = True) -> list[Unfinished]:
        """Find the steps that had no end, and what was paid for them. Call it once, when ends that were not written
        are.

        Args:
            seeded: what belongs to no step is done; else it is found, too.
        """
        rows = self.journal.rows
        for row in rows("SELECT * FROM steps WHERE number NOT IN (SELECT step FROM ends) ORDER BY number"):
            selection = row["selection"]
            texts = [text for name, parts in self.texts.items() if name in selection for text in parts.values()]
            if any(REDACTED in text for text in (selection, *texts)):
                self.record_end(
                    row["number"], "failed", "a secret was taken out of its texts: they are not what they were"
                )
                continue
            self.unfinished.append(Unfinished(int(row["number"]), int(row["version"]), json.loads(selection)))
        self._numbers = {step.number for step in self.unfinished} | (set[int]() if seeded else {BEFORE_STEPS})
        for row in rows("SELECT id, step, candidate, split, example, traced FROM rollouts"):
            if row["step"] in self._numbers:
                key = row["candidate"], row["split"], row["example"], row["traced"]
                self._rollouts.setdefault(key, []).append(row["id"])
                self.paid[row["step"]] += 1
                if row["traced"] and not self._has_trace(row["id"], row["step"]):
                    self._untraced.add(row["id"])
        for row in rows("SELECT step, stage, position, reply FROM replies"):
            if row["step"] in self._numbers and REDACTED not in row["reply"]:
                self._replies[row["step"], row["stage"], row["position"]] = row["reply"]
        return self.unfinished

    def _has_trace(self, rollout: int, step: int) -> bool:
        """Whether the trace of a rollout was kept, and can still be read; if not, that is written down, since the
        rollout may be paid again."""
        [row] = self.journal.rows("SELECT trace FROM rollouts WHERE id = ?", (rollout,))
        if row["trace"] is None:
            return False
        if self._is_readable(row["trace"]):
            return True
        fields = json.dumps({"rollout": rollout})
        self.journal.append("events", seconds=0.0, kind=TRACE_UNREADABLE, step=step, fields=fields)
        return False

    # What is answered.

    def find_rollout(self, key: RolloutKey, step: int, read: Callable[[Any], Rollout | None]) -> Rollout | None:
        """A rollout that was paid for work which runs again now; None where there is none, or it cannot be read."""
        if step not in self._numbers or not self._rollouts:
            return None
        found = self._rollouts.get((key.candidate, key.split, id_text(key.example), int(key.traced)))
        if not found:
            return None
        row = found.pop(0) if self._each_once else found[-1]
        with reporting_damage(self.journal.path):
            return read(self.journal.rows("SELECT * FROM rollouts WHERE id = ?", (row,))[0])

    def count_missing(
        self,
        step: int,
        candidate: str,
        split: str,
        ids: Iterable[Any],
        *,
        traced: bool = True,
        needs_trace: bool = False,
    ) -> int:
        """How many of a candidate's rollouts are still to be paid for a step.

        Args:
            needs_trace: those whose trace could not be kept are to be paid again.
        """
        ids = list(ids)
        if step not in self._numbers or not self._rollouts:
            return len(ids)
        found = (self._rollouts.get((candidate, split, id_text(example), int(traced))) for example in ids)
        return sum(not rows or (needs_trace and rows[-1] in self._untraced) for rows in found)

    def find_reply(self, step: int, stage: str, position: str) -> str | None:
        """What a request of a step that runs again now was answered; None where there is nothing."""
        return self._replies.get((step, stage, position))

    # What is written.

    def record_candidate(self, texts: Mapping[str, str]) -> str:
        """Write a candidate's texts, once; returns its hash."""
        name = hash_of(texts)
        if name not in self.texts:
            self.texts[name] = dict(texts)
            self.journal.append("candidates", hash=name, texts=dict(texts))
        return name

    def record_call(self, stage: str, step: int, calls: int = 1) -> int:
        """Write a metric call that counts, and return its number; wait with :meth:`Journal.flush` before it is made.

        Args:
            stage: "elsewhere" for what another program, dspy.GEPA say, made on the same run directory.
            calls: -1 takes one back that had begun and is not counted after all.
        """
        number = self.journal.next_id("calls")
        self.journal.append("calls", id=number, step=step, stage=stage, calls=calls)
        return number

    def record_rollout(
        self,
        key: RolloutKey,
        stage: str,
        step: int,
        rollout: Rollout,
        written: tuple[str, str | None],
        seconds: float,
        call: int,
    ) -> None:
        """Write what a rollout gave; ``written`` is its output and its trace as text."""
        self.journal.append(
            "rollouts",
            call=call,
            step=step,
            stage=stage,
            candidate=key.candidate,
            split=key.split,
            example=id_text(key.example),
            traced=int(key.traced),
            score=float(rollout.score),
            objective_scores=dict(rollout.objective_scores),
            output=written[0],
            trace=written[1] if key.traced else None,
            tokens=rollout.tokens,
            cost_dollars=rollout.cost_dollars,
            latency_seconds=seconds,
        )

    def record_reply(self, step: int, stage: str, position: str, reply: str, tokens: int, cost_dollars: float) -> None:
        """Write what a request that is no rollout was answered."""
        self.journal.append(
            "replies",
            step=step,
            stage=stage,
            position=position,
            reply=reply,
            tokens=tokens,
            cost_dollars=cost_dollars,
        )

    def record_selection(self, step: int, version: int, selection: Any) -> None:
        """Write what a step has selected, unless it runs again; it must be JSON."""
        if step in self._numbers:
            return
        self.journal.append("steps", number=step, version=version, selection=json.dumps(selection))

    def record_end(self, step: int, way: str, reason: str, before: bool = False) -> None:
        """Write a step's end.

        Args:
            before: it had ended in the session before, which did not come to write it.
        """
        session = self.journal.session - before
        self.journal.append("ends", step=step, session=session, way=way, reason=reason)

    def record_commit(
        self,
        step: int | None,
        candidate_index: int,
        version: int,
        texts: Mapping[str, str],
        parents: Sequence[int | None],
        scores: Mapping[str, float],
        score: float | None = None,
        more: Any = None,
    ) -> None:
        """Write a candidate that is about to enter the pool; wait for it with :meth:`Journal.flush`.

        Args:
            step: that made it; None for another program's.
            scores: example's id as text -> score.
            score: default: the mean of ``scores``.
            more: what the loop needs to put it there again; JSON.
        """
        self.journal.append(
            "commits",
            candidate_index=candidate_index,
            step=step,
            version=version,
            candidate=self.record_candidate(texts),
            parents=list(parents),
            score=sum(scores.values()) / max(1, len(scores)) if score is None else score,
            scores=dict(scores),
            more=None if more is None else json.dumps(more),
        )

    def record_session_end(self, state: str, reason: str) -> None:
        """Write how the run ended, and close the journal."""
        self.journal.append("session_ends", id=self.journal.session, state=state, reason=reason)
        self.journal.close()

    def __call__(self, event: Event) -> None:
        """A subscriber of the run's bus."""
        if isinstance(event, RolloutFinished):
            return  # it is a row of its own
        if isinstance(event, StepClosed):
            if event.end.kind is not EndKind.CANCELLED:  # a run that goes on runs it again
                self.record_end(event.step, event.end.kind.value, event.end.reason)
            return
        fields = {name: value for name, value in asdict(event).items() if name not in ("seconds", "step")}
        self.journal.append(
            "events",
            seconds=event.seconds,
            kind=type(event).__name__,
            step=getattr(event, "step", None),
            fields=json.dumps(fields, default=str),
        )
