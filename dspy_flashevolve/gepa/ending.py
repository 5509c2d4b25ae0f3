"""Validations that belong to no step's child: of the programs that a run begins with, and of the last candidate.

The last candidate is what the search names when the metric calls pay no further step, or ``max_seconds`` leave just the
time for it. How far a run is with it is its :class:`Phase`, which moves in one place, on the loop. The search by edits
validates more than that, and has the last text written anew (heads.py). Which program a run returns is chosen by
``Best`` in compilation.py.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median_low

from dspy_flashevolve.engine.staleness import Texts
from dspy_flashevolve.engine.steps import EndKind, Step, StepEnded
from dspy_flashevolve.gepa.credit import Head
from dspy_flashevolve.gepa.iterations import Iterations
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.records import Child, Commit, Proposal, Screened, Validated
from dspy_flashevolve.gepa.search import Search, check_texts
from dspy_flashevolve.observe.statistics import REFLECTION_STAGES
from dspy_flashevolve.programs.run import DspyRun

LAST_MARGIN, LAST_SHARE = 1.25, 0.25
"""A last head's validation begins so many times what a validation takes before ``max_seconds``, since answers are not
equally fast; and not before their last quarter, so that a large validation set leaves time to search."""
TIMED_VALIDATIONS = 5
"""What a validation takes is the median over so many: one answer that hangs makes none of them long."""


class Phase(Enum):
    """How far a run is with the validation of its last head."""

    SEARCHING = "steps search; a head is validated where it is worth its share of the metric calls"
    CALLS_SPENT = "what is left pays no further step: the next one validates the last head"
    TIME_SPENT = "max_seconds leave just the time for it: the validation of the last head has begun"
    TIME_MISSED = "that validation failed, and there is no time for another: steps search as long as calls are left"
    LAST_TRIED = "the last head has had its step: one more writes the best text anew, if it has grown and that is paid"
    PERFECT = "no text can be better than the best one: no step searches, and one more writes it anew, as above"


@dataclass(frozen=True, slots=True)
class PendingValidation:
    """A candidate that is handed to a step for validation only, or to be written anew.

    Args:
        candidate: its texts: a program to begin from, what the search composes, or the pool's best.
        is_last: no other step runs beside it, and no further one is expected.
        is_timed: its validation has to end before ``max_seconds``.
    """

    candidate: Texts
    is_last: bool = False
    is_timed: bool = False


class ValidationTime:
    """How long a validation takes, and whether ``max_seconds`` leave time for more than the last one."""

    def __init__(self, run: DspyRun, examples: int, rewriting: Callable[[], float | None]) -> None:
        self._run, self._examples, self._rewriting = run, examples, rewriting
        self._durations = deque[float](maxlen=TIMED_VALIDATIONS)
        self._seeded_at = (0, 0.0)
        """Metric calls and their seconds in slots when the seed's scores were there; a cache may have had those."""

    def record(self, seconds: float) -> None:
        """Take note of how long a validation took."""
        self._durations.append(seconds)

    def record_seed(self) -> None:
        """Measure rollouts from now on: the seed is validated."""
        self._seeded_at = (self._run.budget.spent, self._slot_seconds())

    @property
    def expected(self) -> float:
        """Seconds that a validation takes: the median of the last ones, and not less than its rollouts in all slots."""
        (spent, seconds), slots = self._seeded_at, self._run.scheduler.limit
        per_call = (self._slot_seconds() - seconds) / max(1, self._run.budget.spent - spent)
        median = median_low(self._durations) if self._durations else 0.0
        return max(median, per_call * self._examples / max(1, slots))

    @property
    def seconds_left(self) -> float:
        """Seconds until ``max_seconds``; infinity without such a limit."""
        run = self._run
        return math.inf if run.max_seconds is None else run.clock.began + run.max_seconds - run.clock()

    @property
    def is_ending(self) -> bool:
        """Whether the time that is left is just what a last head's validation takes, and writing it anew before."""
        most, rewriting = self._run.max_seconds, self._rewriting()
        needed = self.expected if rewriting is None else 2 * self.expected + rewriting
        return most is not None and self.seconds_left <= min(LAST_MARGIN * needed, LAST_SHARE * most)

    @property
    def pays_rewriting(self) -> bool:
        """Whether the last text may be written anew and validated before ``max_seconds``."""
        return self.seconds_left >= self.expected + (self._rewriting() or 0.0)

    def _slot_seconds(self) -> float:
        """Total seconds during which rollouts have held a slot."""
        stages = self._run.scheduler.statistics().stages
        return sum(stage.served_seconds for name, stage in stages.items() if name not in REFLECTION_STAGES)


class Ending:
    """Hands candidates to steps for validation, and says how far the run is with the last one.

    Methods that do so run in the pool's writer; the others, and all moves of :attr:`phase`, on the loop.

    Args:
        search: names the last candidate.
        initial: candidates to begin from beside the seed; each has a step that validates it.
        ends_with_perfect: a candidate that cannot be beaten ends the search.
    """

    def __init__(
        self,
        run: DspyRun,
        pool: Pool,
        iterations: Iterations,
        search: Search,
        initial: Sequence[Texts],
        ends_with_perfect: bool,
    ) -> None:
        self._run, self._pool, self._iterations, self._initial = run, pool, iterations, list(initial)
        self._search, self._ends_with_perfect = search, ends_with_perfect
        self.time = ValidationTime(run, len(pool.loader), self.rewriting_seconds)
        self.phase = Phase.SEARCHING
        self._pending: Head | None = None
        """The last candidate, as of :meth:`refresh`."""

    # What admission reads, on the loop. Nothing here changes anything.

    @property
    def has_last(self) -> bool:
        """Whether a candidate may be validated last that no step has made as its child."""
        return type(self._search).last is not Search.last

    @property
    def joins(self) -> bool | None:
        """Whether what steps find comes together, so that a step costs no validation; None where that is unknown."""
        return False

    @property
    def calls_aside(self) -> tuple[int, ...]:
        """Metric calls to keep for the last validation; where they do not fit, the next number. Empty for none."""
        return (len(self._pool.loader),) if self.has_last else ()

    @property
    def has_ended(self) -> bool:
        """Whether the last validation before ``max_seconds`` has begun, and has not failed."""
        return self.phase is Phase.TIME_SPENT

    @property
    def pending(self) -> Head | None:
        """The candidate whose last validation is still to come; None where none is, or time has begun it."""
        return None if self.has_ended else self._pending

    @property
    def is_perfect(self) -> bool:
        """Whether the best candidate has the perfect score on every validation example, which ends the search."""
        return self.phase is Phase.PERFECT

    @property
    def only_rewrites(self) -> bool:
        """Whether all that is left to do is to validate what is still pending, or to write it anew."""
        return self.phase in (Phase.LAST_TRIED, Phase.PERFECT)

    @property
    def obstacle(self) -> str:
        """Why the best text cannot be written anew and validated any more; empty where it can."""
        return ""

    @property
    def why_grown(self) -> str:
        """Why the best text joins edits of several reflections and was not written anew; empty where it does not."""
        return ""

    @property
    def may_validate(self) -> bool:
        """Whether a candidate that no step has made may be validated before the end, as far as calls go."""
        return True

    def is_doubted(self, step: Step) -> bool:
        """Whether a step validates its own child, though the search has joined it."""
        del step
        return False

    def rewriting_seconds(self) -> float | None:
        """Seconds that writing the last text anew takes; None where it is validated as it is."""
        return None

    # How the phase moves.

    def _move(self, phase: Phase) -> None:
        if self.phase is not Phase.PERFECT:
            self.phase = phase

    async def look_for_perfect(self, highest: float) -> None:
        """End the search where the best candidate has ``highest``, the best possible score, on every example."""
        if self._ends_with_perfect and await self._pool.write(self._is_perfect, highest):
            self._move(Phase.PERFECT)
            await self.refresh()

    def _is_perfect(self, highest: float) -> bool:
        """Whether no later candidate can be better than the best one. Runs in the pool's writer."""
        pool = self._pool
        if not pool.seed_confirmed:
            return False
        scores = pool.state.prog_candidate_val_subscores[pool.best_index]
        return all(scores.get(i, -math.inf) >= highest for i in pool.loader.all_ids())

    def begin_last(self) -> bool:
        """Let the next step validate the last candidate, where no step runs and there is one; once for each try."""
        if self.phase is Phase.CALLS_SPENT:
            self._move(Phase.LAST_TRIED)
        if self.phase is Phase.LAST_TRIED or self._run.live or self.pending is None:
            return False
        self._move(Phase.CALLS_SPENT)
        return True

    def resume_search(self) -> None:
        """Go back to searching, since calls were handed back that pay a step."""
        if self.phase in (Phase.CALLS_SPENT, Phase.LAST_TRIED):
            self._move(Phase.SEARCHING)

    async def refresh(self) -> None:
        """Look at the last candidate as it is now: what admission reads until the next time."""
        self._pending = await self._pool.write(self._last)

    async def take(self, step: Step) -> PendingValidation | None:
        """Find what a step validates without having made it: the last candidate, the next one to begin from or, where
        the step runs again, what it was about to validate. None for a step that searches.

        Raises:
            StepEnded: the last candidate is worth no validation any more.
        """
        if step.recorded is not None:
            return await self._pool.write(self._again, step)
        is_last = self.phase in (Phase.CALLS_SPENT, Phase.LAST_TRIED, Phase.PERFECT)
        pending = await self._pool.write(self._next, step, is_last, self._is_timed)
        if pending is not None and pending.is_timed:
            self._move(Phase.TIME_SPENT)
        return pending

    async def due(self, step: Step, is_paid: bool) -> PendingValidation | None:
        """Find the candidate that is worth a validation by a step that has found nothing else; None for none.

        ``is_paid``: the metric calls pay one beside the last.
        """
        is_timed = self._is_timed
        if self.phase in (Phase.TIME_SPENT, Phase.PERFECT) or not (is_paid or is_timed):
            return None
        pending = await self._pool.write(lambda: self._validating(step, self._due(is_timed), False, is_timed))
        if pending is not None and is_timed:
            self._move(Phase.TIME_SPENT)
        return pending

    @property
    def _is_timed(self) -> bool:
        """Whether a validation that begins now is the last one before ``max_seconds``."""
        return self.phase is Phase.SEARCHING and self.time.is_ending

    async def cancel_validation(self, step: Step, is_timed: bool) -> None:
        """Let a candidate be validated again whose validation by this step came to nothing; others are no matter."""
        await self._pool.write(self._cancel, step)
        if is_timed:
            self._move(Phase.TIME_MISSED)

    # What a step validates. Runs in the pool's writer.

    def begin(self, step: Step, pending: PendingValidation) -> Screened:
        """Begin the validation of what a step was handed."""
        texts, store, candidates = pending.candidate, self._run.store, self._pool.state.program_candidates
        is_initial = texts in self._initial
        if is_initial:
            self._initial.remove(texts)
        parent = 0 if is_initial else candidates.index(texts) if texts in candidates else self._parent
        store.set_state(_state_name(step), lambda: [store.record_candidate(texts), pending.is_last])
        step.record_version(self._pool.version, math.inf)  # every later step builds on what it finds: it goes first
        proposal = Proposal(
            candidate=dict(texts), parent_program_ids=[parent], subsample_indices=[], subsample_scores_before=[],
            subsample_scores_after=[], tag="initial" if is_initial else "head", metadata={},
        )  # fmt: skip
        return Screened(proposal)

    @property
    def _parent(self) -> int:
        """Index in the pool of what the last candidate is said to come from."""
        return self._pool.best_index

    def _due(self, is_pressing: bool) -> Head | None:
        """Find a candidate that is worth a validation now; ``is_pressing``: before ``max_seconds``, or the end."""
        return self._last() if is_pressing else None

    def _last(self) -> Head | None:
        """Find what the last validation of a run is for."""
        self._search.catch_up()
        texts = self._search.last()
        check_texts(texts, self._pool.state, f"{type(self._search).__name__}.last")
        if texts is None or texts in self._pool.state.program_candidates:
            return None
        return Head(texts, frozenset(), 0.0)

    def _validating(self, step: Step, head: Head | None, is_last: bool, is_timed: bool) -> PendingValidation | None:
        """Hand a candidate to a step; None where there is none."""
        del step
        return None if head is None else PendingValidation(head.candidate, is_last, is_timed)

    def _next(self, step: Step, is_last: bool, is_timed: bool) -> PendingValidation | None:
        head = self._last() if is_last else self._due(is_pressing=True) if is_timed else None
        pending = self._validating(step, head, is_last, is_timed and not is_last)
        if pending is None and is_last:
            raise StepEnded(EndKind.REJECTED, "the last head is worth no validation any more")
        if pending is None and (initial := self._initial_left()):
            pending = PendingValidation(initial[0])
        if pending is not None:
            self._iterations.begin(step)
        return pending

    def _again(self, step: Step) -> PendingValidation | None:
        """Find what a step of an interrupted run was about to validate."""
        store = self._run.store
        name, is_last = store.get_state(_state_name(step)) or (None, False)
        candidate = None if name is None else dict(store.texts[name])
        if candidate is None or not (self.has_last or candidate in self._initial_left()):
            return None
        self._iterations.begin(step)
        return PendingValidation(candidate, is_last=is_last)

    def _initial_left(self) -> list[Texts]:
        return [texts for texts in self._initial if texts not in self._pool.state.program_candidates]

    def _cancel(self, step: Step) -> None:
        """Take note that what a step was handed was not validated after all."""

    async def rewritten(self, step: Step, found: Screened, pending: PendingValidation) -> list[Screened]:
        """Return what is to be validated of a candidate that a step was handed: itself, unless it is in the pool."""
        del step, pending
        texts = found.proposal.candidate
        return [] if await self._pool.write(lambda: texts in self._pool.state.program_candidates) else [found]

    # What children and validations tell. Runs in the pool's writer.

    def preferred(self, step: Step, done: list[Validated]) -> list[Validated]:
        """Leave out what was validated and is not to be committed."""
        del step
        return done

    def restored(self) -> None:
        """Go on with a pool that holds the candidates of earlier sessions."""

    async def record_children(self, step: Step, children: Sequence[Child]) -> list[Child]:
        """Take note of how a step's children were written, and return those that change something."""
        del step
        return list(children)

    def learn(self, commits: Sequence[Commit]) -> None:
        """Take in what was committed."""

    def keep(self) -> None:
        """Write what the search knows into the journal."""


def _state_name(step: Step) -> str:
    """Name under which the journal keeps the candidate that a step was handed."""
    return f"head of step {step.number}"
