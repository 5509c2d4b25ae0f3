"""The figures of an AsyncACE run: frozen records."""

from __future__ import annotations

from dataclasses import dataclass, field

from dspy_flashevolve.observe.records import RunStats


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A playbook that was validated.

    Args:
        seconds: since the run began, when its score was known.
        version: of the playbook.
        score: mean over the validation set.
        bullets: in it.
        tokens: of its text.
    """

    seconds: float
    version: int
    score: float
    bullets: int
    tokens: int


@dataclass(frozen=True, slots=True)
class WindowRecord:
    """A window of a stream, scored before anything was learnt from it.

    Args:
        window: from 0.
        version: of the playbook that it was scored with.
        examples: in it.
        scored: of these, those that the provider answered.
        score: their mean; None where there is none.
    """

    window: int
    version: int
    examples: int
    scored: int
    score: float | None


@dataclass(frozen=True, slots=True)
class ProblemRecord:
    """Something in a reply that could not be used.

    Args:
        kind: problems are counted by it.
        detail: the beginning of what it was.
    """

    kind: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AceStats(RunStats):
    """What an AsyncACE run did; see :class:`RunStats` for the rest.

    Args:
        samples: training examples that came through to the playbook.
        samples_per_minute: the same over the time until the last of them.
        right_at_once: samples whose first attempt was right.
        corrected: samples that became right after a reflection.
        reflections: asked for.
        citations: bullets cited by attempts.
        version: of the last playbook: how often its texts changed.
        best_version: of the playbook that is returned.
        operations: add, update, merge, remove -> operations done.
        tags: helpful, harmful, neutral -> tags counted.
        additions: admitted, merged, dropped -> stale additions.
        evicted: bullets that the token budget drove out.
        problems: kind -> how often a reply asked for what could not be done, or could not be read.
        first_problems: the first of them.
        snapshots: every playbook that was validated, in the order in which their scores came.
        superseded: snapshots that a newer one replaced before their validation began.
        unpaid: snapshots that the budget could not pay.
        unresolved: snapshots whose validation the provider did not answer; they have no score.
        windows: of a stream, in order.
    """

    samples: int
    samples_per_minute: float
    right_at_once: int
    corrected: int
    reflections: int
    citations: int
    version: int
    best_version: int
    operations: dict[str, int]
    tags: dict[str, int]
    additions: dict[str, int]
    evicted: int
    problems: dict[str, int]
    first_problems: list[ProblemRecord]
    snapshots: list[SnapshotRecord] = field(default_factory=list[SnapshotRecord])
    superseded: int = 0
    unpaid: int = 0
    unresolved: int = 0
    windows: list[WindowRecord] = field(default_factory=list[WindowRecord])
