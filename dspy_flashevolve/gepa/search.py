"""A search: where steps start, what it learns from their rollouts, which children join others, what is validated last.

:class:`Search` asks these four questions and answers them as GEPA does, for steps that overlap: this is
``search="pareto"``. The other searches are ``edit_search.py`` (the default), ``lockstep.py`` (gepa's own order) and
``published.py`` (FlashEvolve's). A search of the user's own overrides what it does otherwise (docs/staleness.md).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gepa.core.state import GEPAState

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.requests import Rollout, gather
from dspy_flashevolve.engine.run import EvolutionRun, Work
from dspy_flashevolve.engine.staleness import Texts
from dspy_flashevolve.engine.steps import Step
from dspy_flashevolve.engine.store import Store
from dspy_flashevolve.gepa.records import Child
from dspy_flashevolve.gepa.screening import Screening
from dspy_flashevolve.observe.statistics import ChangeRecord

T = TypeVar("T")
RunPart = Callable[[str, list[Any]], Awaitable[dict[Any, Rollout]]]
Release = Callable[[dict[Any, Rollout]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Start:
    """Where a step starts.

    Args:
        candidate: index in the pool of the candidate that the child is said to come from.
        texts: component -> text that is run, and reflected on; None for that candidate's own.
    """

    candidate: int
    texts: Texts | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """One rollout that was answered.

    Args:
        texts: component -> text of the candidate that was run.
        name: a hash of these texts.
        split: "train" or "val"; always "val" where the same examples are used for both.
        example: the id of the example, as text.
        score: what the metric gave.
    """

    texts: Texts
    name: str
    split: str
    example: str
    score: float


def check_texts(texts: Texts | None, state: GEPAState[Any, Any], source: str) -> None:
    """Raise ConfigurationError unless texts that a search gave have the program's components, each a str."""
    names = state.program_candidates[0].keys()
    said: Any = texts
    if said is not None and not (
        isinstance(said, Mapping) and said.keys() == names and all(isinstance(text, str) for text in said.values())  # pyright: ignore[reportUnknownVariableType]
    ):
        raise ConfigurationError(f"{source} gave {said!r:.200}, expected a str for each of {sorted(names)}.")


class Search:
    """Say where steps start, learn from their rollouts, join children, and name the last candidate.

    Pass an object of a subclass as ``AsyncGEPA(search=...)``. Each run works on a deep copy of it. The four methods are
    called one at a time, in one thread; :meth:`learn` is called for all that was run before any other one is. A run
    that goes on in its ``log_dir`` calls :meth:`learn` again for the rollouts of its earlier sessions.

    Attributes:
        frontier_share: share of the steps, 0 to 1, for which :meth:`select` is not asked: they start from the Pareto
            frontier. Default 0.

    >>> class Latest(Search):
    ...     def select(self, state, rng):
    ...         return Start(len(state.program_candidates) - 1)
    """

    frontier_share: float = 0.0

    def select(self, state: GEPAState[Any, Any], rng: random.Random) -> Start | None:
        """Choose where a step starts.

        Args:
            state: gepa's, to be read only. Before the seed is validated it has the seed without scores.
            rng: the step's randomness; with no other is a run repeatable.

        Returns:
            The start; None to let ``candidate_selection_strategy`` choose, by default from the Pareto frontier.
        """
        del state, rng
        return None

    def learn(self, observation: Observation) -> None:
        """Take in the score of a rollout. Rollouts are told in the order in which they were answered."""

    def joins(self, step: int, child: Child, scores: Mapping[str, float]) -> bool:
        """Say whether a child that has passed its screen goes into a later candidate of :meth:`select` or :meth:`last`.

        Args:
            step: number of the step that made it.
            child: ``child.candidate`` has its texts, ``child.source`` those that it was made from.
            scores: the child's on its screen, by the id of the example as text.

        Returns:
            True to end the step here. False, the default, to validate the child by itself.
        """
        del step, child, scores
        return False

    def last(self) -> Texts | None:
        """Name the texts that are validated when the budget pays no further step; None, the default, for none.

        A run whose search overrides this keeps the metric calls of one validation for it.
        """
        return None

    # The rest of a run that depends on the search. What follows is for overlapping steps, each of whose children stands
    # for itself; searches of users leave it alone.

    overlaps: bool = True
    """Steps overlap: each draws from randomness of its own, and starts before the seed has its scores."""
    keeps_budget: bool = True
    """The budget is never exceeded, so that the run has to see that it pays a whole step."""
    spares_calls: bool = True
    """What cannot change an outcome is not run: an example that stands twice in a minibatch or gets no answer, the rest
    of a screen that cannot pass any more, steps after a candidate with the perfect score."""
    caches_minibatches: bool = False
    """Minibatch scores go into gepa's evaluation cache, which takes a training example for the validation example of
    the same id, also where training and validation examples differ."""
    checkpoint_seconds: float = 5.0
    """With ``log_dir``, the least time between two checkpoints. Not tuned."""
    come_together: bool | None = False
    """What children add comes together in one candidate; None where that has still to be seen."""

    async def together(self, calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
        """Make calls of one step at once."""
        return await gather(calls)

    async def needs_screen(self, step: Step, screening: Screening) -> bool:
        """Say whether the children of a step are run on their parents' minibatches before they join or are validated.

        Waits until that can be said of the screens so far.
        """
        del step, screening
        return True

    async def validated(self, ids: Sequence[Any], part: RunPart, release: Release) -> dict[Any, Rollout]:
        """Run a candidate on validation examples by ``part``, which is given a stage and the examples to run there.

        ``release`` lets other steps start from the candidate, by the rollouts so far.
        """
        del release
        return await part("validate", list(ids))

    def record_validation(self, scores: Mapping[Any, float]) -> None:
        """Take in a candidate's scores on the validation set."""

    def watchers(self, run: EvolutionRun) -> list[Work]:
        """Return what runs beside the steps."""
        del run
        return []

    def observe(self, observation: Observation) -> None:
        """Take an observation on the run's loop, for :meth:`catch_up`."""
        vars(self).setdefault("_observed", deque()).append(observation)  # a subclass may call no other __init__

    def catch_up(self) -> None:
        """Learn what was observed since the last time. Runs in the pool's writer, before each question."""
        observed: deque[Observation] = vars(self).get("_observed", deque())
        while observed:
            self.learn(observed.popleft())

    def grown_in(self, texts: Texts) -> list[str]:
        """Name the components of a candidate that join what several children added."""
        del texts
        return []

    def restore(self, store: Store, grown: Iterable[tuple[Texts, list[str]]]) -> None:
        """Learn again what the steps of earlier sessions that have ended had run.

        ``grown``: committed candidates, each with what :meth:`grown_in` named of it.
        """
        del grown
        for row in store.rows(ENDED_ROLLOUTS):
            texts = dict(store.texts[row["candidate"]])
            self.learn(Observation(texts, row["candidate"], row["split"], row["example"], row["score"]))

    def changes(self) -> list[ChangeRecord]:
        """List the changes whose effects were estimated, for the statistics."""
        return []


ENDED_ROLLOUTS = (
    "SELECT candidate, split, example, score FROM rollouts WHERE step < 0 OR step IN (SELECT step FROM ends)"
)
"""Rows of the journal: what was run by the seed's validation, and by steps that run no more."""
