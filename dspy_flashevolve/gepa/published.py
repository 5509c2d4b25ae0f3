"""What FlashEvolve publishes beyond overlapping steps (arXiv 2605.08520): release on a part of a validation, the order
of its examples (section 3.3) and the median rule (section 3.4).

A run has it where ``Workflow(validate=..., rounds=..., median_seconds=..., workers=...)`` asks for it, as
:data:`FLASHEVOLVE` does.
"""

from __future__ import annotations

import copy
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, TypeVar

import anyio
from gepa.core.state import GEPAState, ValsetEvaluation

from dspy_flashevolve.engine.events import Event, LimitChanged, StageVisited
from dspy_flashevolve.engine.requests import gather
from dspy_flashevolve.engine.run import EvolutionRun, Work
from dspy_flashevolve.engine.store import Rollout
from dspy_flashevolve.gepa.edit_search import EditSearch
from dspy_flashevolve.gepa.records import Candidate, Screened, Task
from dspy_flashevolve.gepa.search import Release, RunPart, Search
from dspy_flashevolve.gepa.settings import Workflow

K = TypeVar("K", bound=Hashable)
State = GEPAState[Any, Any]


class PartialRelease:
    """Decides on which validation examples a candidate is run first, so that it may be selected before the rest ends.

    The examples that tell candidates apart come first: those with the largest variance of scores over the candidates
    that were run on them, equals in an order drawn from the seed. An example that the last ``rounds`` candidates passed
    goes to the end; one failure brings it back. Every example is still run before a candidate is confirmed.

    Args:
        share: of the examples, the prefix, after which a candidate may be selected.
        rounds: see above.
        passing: score from which an example counts as passed.
        seed: of the draw.

    >>> release = PartialRelease(0.5, 1, passing=1.0, seed=0)
    >>> release.record({"told apart": 0.0, "easy": 1.0})
    >>> release.record({"told apart": 1.0, "easy": 1.0})
    >>> release.record({"told apart": 0.0})
    >>> release.split(["easy", "told apart"])
    (['told apart'], ['easy'])
    """

    def __init__(self, share: float, rounds: int, *, passing: float, seed: int | None) -> None:
        self._share, self._rounds, self._passing, self._seed = share, rounds, passing, seed
        self._sums: dict[Hashable, tuple[int, float, float]] = {}
        self._last: dict[Hashable, deque[bool]] = {}

    def record(self, scores: Mapping[K, float]) -> None:
        """Take in one candidate's scores, on any examples."""
        for example, score in scores.items():
            count, total, squares = self._sums.get(example, (0, 0.0, 0.0))
            self._sums[example] = (count + 1, total + score, squares + score * score)
            self._last.setdefault(example, deque(maxlen=self._rounds)).append(score >= self._passing)

    def split(self, examples: Sequence[K]) -> tuple[list[K], list[K]]:
        """Sort examples, and split them into the prefix, at least one and at most all, and the rest.

        The product of share and count is rounded to a tenth before it is rounded up: 0.67 of three are two.
        """
        size = max(1, math.ceil(round(self._share * len(examples), 1)))
        ordered = sorted(examples, key=self._key)
        return ordered[:size], ordered[size:]

    def _key(self, example: Hashable) -> tuple[bool, float, float]:
        last = self._last.get(example, ())
        rotated = len(last) == self._rounds and all(last)
        count, total, squares = self._sums.get(example, (0, 0.0, 0.0))
        variance = 0.0 if count < 2 else max(0.0, squares / count - (total / count) ** 2)
        return (rotated, -round(variance, 9), random.Random(f"{self._seed}/prefix/{example}").random())


@dataclass(eq=False, slots=True)
class Speculative:
    """A candidate that waits for its validation, of which something may be known, or has done so.

    Args:
        parents: handles of speculative parents; none once it is confirmed.
        indices: confirmed parents, as indices of gepa's pool; its own once it is confirmed.
    """

    key: int
    candidate: Candidate
    parents: tuple[int, ...] = ()
    indices: tuple[int, ...] = ()
    evaluation: ValsetEvaluation[Any, Any] | None = None
    waits: bool = True


class SpeculativeCandidates:
    """Candidates that steps may build on before their validation has confirmed them.

    They stand beside gepa's state, which only ever holds confirmed candidates, and stays readable by gepa.

    >>> waiting = SpeculativeCandidates()
    >>> head = waiting.add({"p": "text"})
    >>> child = waiting.add({"p": "longer text"}, parents=(head.key,))
    >>> waiting.withdraw([head.key])
    >>> waiting.entries
    ()
    """

    def __init__(self) -> None:
        self._all: list[Speculative] = []
        """All that there ever were, by their handles; children come after their parents."""
        self.entries: tuple[Speculative, ...] = ()
        """All that wait, oldest first. Replaced, never changed, so that the loop may read it."""
        self.fallen = frozenset[int]()
        """Those that did not hold what they promised: what was made from them is stale. Replaced, never changed, so
        that the loop may read it."""

    def release(self, child: Screened, evaluation: ValsetEvaluation[Any, Any], state: State, best: int) -> int | None:
        """Let selection pick a child whose prefix is above that of gepa's best candidate; its handle, or None where it
        is not."""
        mine, theirs = evaluation.scores_by_val_id, state.prog_candidate_val_subscores[best]
        common = [i for i in mine if i in theirs]
        if not common or sum(mine[i] for i in common) / len(common) <= sum(theirs[i] for i in common) / len(common):
            return None
        if state.frontier_type != "instance" and not evaluation.objective_scores_by_val_id:
            return None  # gepa could not place it in the frontier yet
        parents = () if child.base is None or not self._all[child.base].waits else (child.base,)
        return self.add(child.proposal.candidate, parents, tuple(child.proposal.parent_program_ids), evaluation).key

    def add(
        self,
        candidate: Candidate,
        parents: tuple[int, ...] = (),
        indices: tuple[int, ...] = (),
        evaluation: ValsetEvaluation[Any, Any] | None = None,
    ) -> Speculative:
        """Put a candidate up for speculation; its speculative ``parents`` wait, too."""
        entry = Speculative(len(self._all), dict(candidate), parents, indices, evaluation)
        self._all.append(entry)
        self.entries += (entry,)
        return entry

    def confirm(self, key: int, index: int, *, has_fallen: bool = False) -> None:
        """Make it an ordinary candidate, at an index of gepa's pool, since its validation is done: its children stand
        on firm ground, unless it was worse than its prefix (``has_fallen``). It may have been withdrawn with one
        under it: its own validation has the last word."""
        entry = self._all[key]
        self._end_waiting({key})
        entry.parents, entry.indices = (), (index,)
        self.fallen = self.fallen | {key} if has_fallen else self.fallen - {key}

    def withdraw(self, keys: Iterable[int | None]) -> None:
        """Take some that wait back, and their descendants, as if they had never been there; what was made from them is
        stale."""
        gone = {key for key in keys if key is not None and self._all[key].waits}  # else it went with one under it
        for entry in self.entries:
            if gone & set(entry.parents):
                gone.add(entry.key)
        self._end_waiting(gone)
        self.fallen |= gone

    def _end_waiting(self, keys: Collection[int]) -> None:
        for key in keys:
            self._all[key].waits, self._all[key].evaluation = False, None
        self.entries = tuple(entry for entry in self.entries if entry.waits)

    def resolve(self, keys: tuple[int, ...]) -> tuple[int, ...]:
        """Return the confirmed candidates that stand for ``keys``: these or, where they did not last, their parents."""
        entries = [self._all[key] for key in keys]
        ancestors = (index for entry in entries for index in (*self.resolve(entry.parents), *entry.indices))
        return tuple(dict.fromkeys(ancestors))

    def sample(self, state: State, choose: Callable[[State], Sequence[Task]]) -> tuple[list[Task], list[int | None]]:
        """Let ``choose`` pick tasks, and name for each the speculative candidate that it starts from.

        A task's ``parent_idx`` is an index of gepa's pool again: of the nearest confirmed ancestor.
        """
        view, keys = self.selectable(state)
        confirmed = len(state.program_candidates)
        tasks: list[Task] = []
        bases: list[int | None] = []
        for task in choose(view):
            base = keys[task.parent_idx - confirmed] if task.parent_idx >= confirmed else None
            if base is not None:
                task = replace(task, parent_idx=(self.resolve((base,)) or (0,))[0])
            tasks.append(task)
            bases.append(base)
        return tasks, bases

    def selectable(self, state: State) -> tuple[State, list[int]]:
        """Return the state to select from, and the handles of the candidates that it has beyond gepa's.

        gepa's selectors read a GEPAState. While candidates are speculative they get a copy of it in which these stand
        behind the confirmed ones, with the scores of their prefix.
        """
        waiting = [(entry, entry.evaluation) for entry in self.entries if entry.evaluation is not None]
        if not waiting:
            return state, []
        view = copy.copy(state)
        for name, value in vars(view).items():  # what gepa changes when a candidate is added
            if isinstance(value, list):
                setattr(view, name, list(value))  # pyright: ignore[reportUnknownArgumentType]
            elif isinstance(value, dict):
                fronts: dict[Any, Any] = value
                copied = {key: set(front) if isinstance(front, set) else front for key, front in fronts.items()}
                setattr(view, name, copied)
        view.best_outputs_valset = None
        for entry, evaluation in waiting:
            parents = list(self.resolve((entry.key,))) or [0]
            view.update_state_with_new_program(parents, entry.candidate, evaluation, None, state.total_num_evals)
        return view, [entry.key for entry, _ in waiting]


@dataclass(frozen=True, slots=True)
class StageWindow:
    """Steps whose requests a stage has finished in the last window, its requests now, and its slots."""

    finished: int
    waiting: int
    running: int
    share: int


def median_shares(windows: Mapping[str, StageWindow], bounds: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return the slots that each stage may have next, by FlashEvolve's rule.

    The median of finished steps is taken over the stages that had work. A stage that finished less than half of it, has
    requests waiting and all of its share in use, gets a slot more; one that finished more than twice the median gets a
    slot fewer; each within its bounds.

    Args:
        windows: stage -> what it did.
        bounds: stage -> the fewest and the most slots.

    >>> slow, even, fast = StageWindow(2, 9, 4, 4), StageWindow(6, 0, 1, 8), StageWindow(13, 0, 4, 8)
    >>> windows = {"propose": slow, "screen": even, "rollout": fast}
    >>> median_shares(windows, dict.fromkeys(windows, (1, 8)))
    {'propose': 5, 'screen': 8, 'rollout': 7}
    """
    finished = [window.finished for window in windows.values() if window.finished or window.running or window.waiting]
    middle = median(finished) if finished else 0
    shares: dict[str, int] = {}
    for stage, window in windows.items():
        is_starved = 2 * window.finished < middle and window.waiting > 0 and window.running >= window.share
        change = 1 if is_starved else -1 if window.finished > 2 * middle else 0
        least, most = bounds[stage]
        shares[stage] = max(least, min(most, window.share + change))
    return shares


class Published(Search):
    """The search of FlashEvolve: GEPA's, with partial release, reordering and the median rule.

    Args:
        workflow: see :class:`~.settings.Workflow`.
        passing: score from which an example counts as passed; None where no score does.
        seed: of the order of examples that tell candidates apart equally well.
    """

    def __init__(self, workflow: Workflow, passing: float | None, seed: int | None) -> None:
        self._workflow, passing = workflow, math.inf if passing is None else passing
        self._prefix = PartialRelease(workflow.validate, workflow.rounds, passing=passing, seed=seed)

    def record_validation(self, scores: Mapping[Any, float]) -> None:
        """Take in which examples tell candidates apart."""
        self._prefix.record(scores)

    async def validated(self, ids: Sequence[Any], part: RunPart, release: Release) -> dict[Any, Rollout]:
        """Run a candidate on the prefix, which ``release`` is told of, and on the rest beside it."""
        if self._workflow.validate == 1:
            return await super().validated(ids, part, release)
        first, rest = self._prefix.split(ids)
        if not rest:
            return await part("validate", first)

        async def prefix() -> dict[Any, Rollout]:
            rollouts = await part("prefix", first)
            await release(rollouts)
            return rollouts

        of_prefix, of_rest = await gather([prefix, lambda: part("validate", rest)])
        return of_prefix | of_rest

    def watchers(self, run: EvolutionRun) -> list[Work]:
        """Bound the stages that have workers, each to its most; return what moves slots between stages."""
        pools = self._workflow.workers or {}
        bounds = {stage: (pool, pool) if isinstance(pool, int) else pool for stage, pool in pools.items()}
        run.scheduler.set_shares({stage: most for stage, (_, most) in bounds.items()})
        if self._workflow.median_seconds is None:
            return []
        every = dict.fromkeys(run.scheduler.statistics().stages, (1, run.slots))
        return [partial(_move_slots, run, self._workflow.median_seconds, every | bounds)]


class PublishedEdits(Published, EditSearch):
    """The search by edits with FlashEvolve's partial release, reordering and median rule."""

    def __init__(self, workflow: Workflow, passing: float | None, seed: int | None, *edits: Any) -> None:
        Published.__init__(self, workflow, passing, seed)
        EditSearch.__init__(self, *edits)


async def _move_slots(run: EvolutionRun, seconds: float, bounds: Mapping[str, tuple[int, int]]) -> None:
    """Apply the median rule every so many seconds."""
    shares = {stage: most for stage, (_, most) in bounds.items()}
    finished = Counter[str]()

    def count(event: Event) -> None:
        if isinstance(event, StageVisited):
            finished[event.stage] += 1

    run.bus.subscribe(count)
    while True:
        await anyio.sleep(seconds)
        stages = run.scheduler.statistics().stages
        windows = {
            name: StageWindow(finished[name], stages[name].waiting, stages[name].running, share)
            for name, share in shares.items()
        }
        finished.clear()
        shares = median_shares(windows, bounds)
        for name, share in shares.items():
            if share != windows[name].share:
                run.bus.emit(LimitChanged(run.clock(), name, windows[name].share, share, "the median rule"))
        run.scheduler.set_shares(shares)
