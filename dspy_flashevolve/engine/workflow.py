"""When a stage releases its output before its slowest request has finished, and in which order requests are made.

A stage whose items need n requests may go on with the first ceil(alpha n) that finish; the others run on. What was
decided on a part is confirmed, or taken back, when the rest is there.

Source: FlashEvolve (arXiv 2605.08520) section 3.3.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dspy_flashevolve.engine.endpoints import OUTAGE_SECONDS
from dspy_flashevolve.engine.errors import ConfigurationError

K = TypeVar("K", bound=Hashable)


def released_at(share: float, requests: int) -> int:
    """Requests that have to finish before a stage releases its output: at least one, at most all.

    The product is rounded to a tenth before it is rounded up, so that 0.67 of three are two.

    >>> [released_at(0.67, 3), released_at(0.25, 60), released_at(0.25, 3), released_at(1.0, 7)]
    [2, 15, 1, 7]
    """
    return min(requests, max(1, math.ceil(round(share * requests, 1))))


@dataclass(frozen=True, slots=True)
class Workflow:
    """How steps overlap, and what ends them: how early stages release their output, how many steps there are, whose
    slots they get, how long nobody answers before the run ends, and how long a candidate may be.

    Args:
        rollout: share of a parent's minibatch after which reflection starts, on what is there; above 0, up to 1. The
            others run on: they are paid, remembered, and compared with the child's.
        validate: share of the validation set, the prefix, after which a candidate whose score there is above the pool's
            best on the same examples may be selected; the rest runs on. The default waits for the whole: it made the
            best programs (docs/scheduling.md).
        rounds: an example of the validation set that this many candidates in a row have passed leaves the prefix.
        live_steps: steps at once, counted strictly. Default: as many as keep the slots busy, fewer where the budget of
            metric calls is small, so that steps can build on each other (:func:`~.admission.for_slots`).
        median_seconds: every so many seconds, slots move to the stages that produce less than the others
            (:func:`~.scheduler.median_shares`). None for never: the order of the queues decides, which made the better
            programs.
        max_outage_seconds: a run whose provider answers nothing for so long, and turns away all that it is sent, is
            given up with the best program so far; no Retry-After is waited for longer. None to wait as long as it
            takes; docs/faults.md.
        max_candidate_characters: the most characters of all texts of a candidate together. A longer one ends its step
            before it costs a rollout. None for no limit.

    Raises:
        ConfigurationError: a share outside (0, 1], a count that is no whole number above 0, or seconds that are no
            number above 0.
    """

    rollout: float = 0.67
    validate: float = 1.0
    rounds: int = 3
    live_steps: int | None = None
    median_seconds: float | None = None
    max_outage_seconds: float | None = OUTAGE_SECONDS
    max_candidate_characters: int | None = None

    def __post_init__(self) -> None:
        for name in ("rollout", "validate"):
            share = getattr(self, name)
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
                raise ConfigurationError(f"Workflow: {name} is {share!r}, expected a share above 0 and up to 1.")
        for name in ("rounds", "live_steps", "max_candidate_characters"):
            count = getattr(self, name)
            if count is None and name != "rounds":
                continue
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ConfigurationError(f"Workflow: {name} is {count!r}, expected a whole number of at least 1.")
        for name in ("median_seconds", "max_outage_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and (
                isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf
            ):
                raise ConfigurationError(f"Workflow: {name} is {seconds!r}, expected a number above 0, or None.")


BARRIERS = Workflow(rollout=1.0, validate=1.0)
"""Every stage waits for all of its requests."""


class ValidationOrder:
    """The order in which the examples of a validation are run: those that tell candidates apart come first.

    An example's worth is the variance of its scores over the candidates that were run on it, most first; equals, and
    those that fewer than two candidates were run on, come in an order drawn from the seed. An example that the last
    ``rounds`` candidates passed goes to the end, so that it leaves the prefix; one failure brings it back.

    Every example is still run before a candidate is confirmed: the order changes nothing but what is known sooner.

    Args:
        passing: score from which an example counts as passed.
        rounds: see above.
        seed: of the draw.

    >>> order = ValidationOrder(passing=1.0, rounds=1, seed=0)
    >>> order.record({"told apart": 0.0, "easy": 1.0, "hard": 0.0})
    >>> order.record({"told apart": 1.0, "easy": 1.0, "hard": 0.0})
    >>> order.sort(["easy", "hard", "told apart"])
    ['hard', 'told apart', 'easy']
    >>> order.record({"told apart": 0.0})
    >>> order.sort(["easy", "hard", "told apart"])
    ['told apart', 'hard', 'easy']
    """

    def __init__(self, passing: float, rounds: int, seed: int | None) -> None:
        self._passing = passing
        self._rounds = rounds
        self._seed = seed
        self._sums: dict[Hashable, tuple[int, float, float]] = {}
        self._last: dict[Hashable, deque[bool]] = {}

    def record(self, scores: Mapping[K, float]) -> None:
        """One candidate's scores, on any examples."""
        for example, score in scores.items():
            count, total, squares = self._sums.get(example, (0, 0.0, 0.0))
            self._sums[example] = (count + 1, total + score, squares + score * score)
            self._last.setdefault(example, deque(maxlen=self._rounds)).append(score >= self._passing)

    def sort(self, examples: Sequence[K]) -> list[K]:
        """The examples, those to be run first in front."""
        return sorted(examples, key=self._key)

    def _key(self, example: Hashable) -> tuple[bool, float, float]:
        last = self._last.get(example, ())
        rotated = len(last) == self._rounds and all(last)
        count, total, squares = self._sums.get(example, (0, 0.0, 0.0))
        variance = 0.0 if count < 2 else max(0.0, squares / count - (total / count) ** 2)
        return (rotated, -round(variance, 9), random.Random(f"{self._seed}/prefix/{example}").random())


def at_most(scores: Sequence[float | None], highest: float) -> float:
    """The largest sum that the scores can still come to when none is above ``highest``; None stands for one to come.

    It is exact in floating point as well: added in the same order, larger terms never give a smaller sum. (From Python
    3.12 on ``sum`` compensates; terms under 1e-30 beside large ones may cost it the last bit there.)

    >>> at_most([0.5, None], 1.0)
    1.5
    """
    return sum(highest if score is None else score for score in scores)
