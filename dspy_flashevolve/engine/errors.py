"""The errors that this package raises, as a tree.

.. code-block:: text

    FlashEvolveError
    ├── ConfigurationError (also a ValueError)   a bad argument, found before any LM call
    │   ├── DataError (also an AssertionError)   data that compile() cannot use, as dspy.GEPA asserts
    │   └── RunDirectoryError                    a log_dir that cannot be written, or not be continued by this run
    ├── BudgetError                              more settled than was reserved: a bug of the caller
    ├── StepEnded, NothingToDoError              what ends one step, and no run (engine/steps.py)
    ├── TransientError                           the provider asks to come back later; retried
    ├── RolloutUnresolvedError                   the provider gave no answer; never a score
    └── RunAbortedError                          the run could not go on (a rejected API key, say)
        └── JournalError                         what it does cannot be written down any more (a full disk, say)
"""

from __future__ import annotations

from typing import Any


class FlashEvolveError(Exception):
    """Base class of every error that dspy-flashevolve raises on purpose."""


class ConfigurationError(FlashEvolveError, ValueError):
    """An argument is wrong. Raised before any LM call, with what was given and what was expected."""


class DataError(ConfigurationError, AssertionError):
    """What ``compile`` was given cannot be used. An AssertionError too, since ``dspy.GEPA`` asserts it."""


class RunDirectoryError(ConfigurationError):
    """``log_dir`` cannot be written, is in use, is damaged, or belongs to another program or other data."""


class BudgetError(FlashEvolveError):
    """A reservation was settled beyond its size."""


class TransientError(FlashEvolveError):
    """A request failed in a way that a later one may not: a rate limit, a timeout, a 5xx.

    Args:
        message: what the provider said.
        retry_after_seconds: when the provider wants to be asked again; None when it did not say.
        attempts: how often the request was made, if it was repeated already.
    """

    def __init__(self, message: str, retry_after_seconds: float | None = None, attempts: int = 1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.attempts = attempts


class RolloutUnresolvedError(FlashEvolveError):
    """The provider gave no answer to a request after every retry.

    It says nothing of the candidate: the step ends as failed, and nothing is scored, cached or pooled.
    """


class RunAbortedError(FlashEvolveError):
    """The provider refused in a way that no retry mends; every further request would fail the same.

    Attributes:
        best_program: the best program so far, as ``compile`` would have returned it; None when the seed was not
            validated yet.
    """

    best_program: Any = None


class JournalError(RunAbortedError):
    """The journal cannot be written any more. What was committed before is safe."""
