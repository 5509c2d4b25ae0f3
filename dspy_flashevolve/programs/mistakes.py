"""Mistakes in the user's code: a run in which everything fails alike from its beginning on ends with that error.

dspy.GEPA scores such failures as 0 to the end of the budget. But nothing is learnt from more of them, and each costs a
metric call. Once an attempt of a kind has succeeded, what fails later is a matter of its example, and is scored.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from dspy.utils.exceptions import AdapterParseError

from dspy_flashevolve.engine.errors import RunAbortedError
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.programs.faults import chain_of, fault_of

logger = logger_named(__name__)


class Kind(Enum):
    """What may fail alike from its beginning on. The value stands in messages, in the plural."""

    ROLLOUTS = "rollouts"
    TRAINING_ROLLOUTS = "rollouts on training examples"
    FEEDBACK = "requests for the metric's feedback"
    REFLECTIONS = "reflections"
    TRACES = "minibatches, of which no predictor's call was seen,"


ALIKE = 8
"""Failures with one message that end a run: what fails every second time does so by chance in 1 of 256 runs."""
ATTEMPTS = {
    Kind.TRAINING_ROLLOUTS: 3 * ALIKE,
    Kind.FEEDBACK: 2 * ALIKE,
    Kind.REFLECTIONS: 3 * ALIKE,
    Kind.TRACES: ALIKE,
}
"""Failures that end a run whatever their messages, since examples come by lot.

What fails three times in four does so in 24 attempts in 1 of 1,000 runs, in 12 in 3 of 100. 24 reflections are 12
steps, each of which tries twice; 16 ended a run whose proposer failed four times in five
(tests/contract/test_unanswered.py).
"""
USELESS = 4
"""After so many reflections without one that is of use the log says so: two steps, each of which tries twice."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of the user's code, which every other attempt may have, too."""

    error: Exception
    at: tuple[Any, ...]
    """The type of the error, and the line of code that raised it."""
    refused: bool
    """The provider refused the request."""


@dataclass(slots=True)
class _FirstAttempts:
    """The failures of the first attempts of a kind: with one message ``enough_alike`` end the run, else ``enough``,
    since what differs may depend on the data."""

    enough: int
    enough_alike: int
    failures: list[Failure] = field(default_factory=list[Failure])

    def are_alike(self) -> bool:
        """Say whether as many as end a run have failed, all of them with errors of one type, raised in one line."""
        messages = {str(failure.error) for failure in self.failures}
        enough = self.enough_alike if len(messages) == 1 else self.enough
        return len({failure.at for failure in self.failures}) == 1 and len(self.failures) == enough


class Mistakes:
    """Watches the first attempts of each kind, and ends the run where they all fail alike."""

    def __init__(self, of_code: bool = False) -> None:
        self.error: Exception | None = None
        """What ends the run; nothing is attempted any more."""
        self._of_code = of_code
        self._watched: dict[Kind, _FirstAttempts] = {}
        self._failed_at = set[tuple[Any, ...]]()
        """Where rollouts on other than training examples failed, while rollouts on these are watched."""
        self._useless_reflections: float = 0
        """How many of the first reflections were of no use; infinite when one was, or the warning has been given."""

    def watch_rollouts(self, count: int, traced: bool = False) -> None:
        """Take the next ``count`` rollouts as the first ones; those with a trace are on training examples."""
        kind = Kind.TRAINING_ROLLOUTS if traced else Kind.ROLLOUTS
        self._watched[kind] = _FirstAttempts(count, min(ALIKE, count))

    def watch_steps(self) -> None:
        """Watch the first rollouts on training examples, requests for feedback, and reflections."""
        self._watched |= {kind: _FirstAttempts(count, count) for kind, count in ATTEMPTS.items()}

    def raise_known(self) -> None:
        """Raise the error that ends the run, if there is one."""
        if self.error is not None:
            raise self.error

    def failure(self, error: Exception, lm_errors: Sequence[BaseException]) -> Failure | None:
        """Return an error as a failure; None where it cannot be a mistake in code."""
        if self._of_code or any(isinstance(link, AdapterParseError) for link in chain_of(error)):
            return None  # a reply that cannot be read, whatever its parser ran into, is the LM's
        places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        at = type(error).__module__, type(error).__qualname__, *places[-1:]
        return Failure(error, at, fault_of(error, lm_errors) is not None)

    def record(self, kind: Kind, failure: Failure | None) -> None:
        """Record how an attempt ended.

        Args:
            failure: None for one that did not fail, or not by a mistake: it ends the watch over its kind.

        Raises:
            Exception: the error of the failure, where it was the last that it needed.
            RunAbortedError: the same, where the provider refused these requests.
        """
        if kind is Kind.ROLLOUTS and failure is not None and Kind.TRAINING_ROLLOUTS in self._watched:
            self._failed_at.add(failure.at)
        first = self._watched.get(kind)
        # What fails in the same way on other examples, too, though not on all, is no matter of the training examples.
        is_elsewhere = kind is Kind.TRAINING_ROLLOUTS and failure is not None and failure.at in self._failed_at
        if first is None or failure is None or is_elsewhere:
            self._watched.pop(kind, None)
            return
        first.failures.append(failure)
        if not first.are_alike():
            return
        message = f"All of the first {len(first.failures)} {kind.value} failed alike"
        error = self.error = failure.error
        logger.error("%s: %s", message, error_text(error))
        if failure.refused:
            self.error = RunAbortedError(f"{message}: {error_text(error)}")
            raise self.error from error
        if add_note := getattr(error, "add_note", None):  # Python 3.11
            add_note(message)
        raise error

    def record_useful_reflection(self) -> None:
        """Record a reflection that proposed something."""
        self._useless_reflections = math.inf
        self.record(Kind.REFLECTIONS, None)

    def warn_of_useless_reflections(self, error: Exception) -> None:
        """Say once that no reflection was of use, before the run ends with the program that it was given."""
        self._useless_reflections += 1
        if self._useless_reflections == USELESS:
            logger.warning("None of the first %d reflections was of use; the last: %.500s", USELESS, error_text(error))


def error_text(error: BaseException) -> str:
    """An error as messages show it."""
    return f"{type(error).__name__}: {error}"
