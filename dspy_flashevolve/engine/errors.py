"""The errors that this package raises, as a tree; and which of the user's objects raised one.

.. code-block:: text

    FlashEvolveError
    ├── ConfigurationError (also a ValueError)   a bad argument, found before any LM call
    │   ├── DataError (also an AssertionError)   data that compile() cannot use, as dspy.GEPA asserts
    │   └── RunDirectoryError                    a log_dir that cannot be written, or not be continued by this run
    ├── BudgetError                              more settled than was reserved: a bug of the caller
    ├── StepEnded, NothingToDoError              what ends one step, and no run (engine/steps.py)
    ├── TransientError                           the provider asks to come back later; retried
    ├── ProcessDiedError                         a rollout ends its process each time (programs/ray_rollouts.py)
    ├── RolloutUnresolvedError                   the provider gave no answer; never a score
    ├── NoLongerWantedError                      an evaluation that nobody needs any more; never a score
    └── RunAbortedError                          the run could not go on (a rejected API key, say)
        └── JournalError                         what it does cannot be written down any more (a full disk, say)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from types import CodeType
from typing import Any

from dspy_flashevolve.engine.texts import logger_named


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
    """A request failed in a way that a later one may not: a rate limit, a timeout, a 5xx; the fault may well be this
    request's alone (``of_request``). ``attempts`` is its :class:`~.provider.Attempts` if it was made as
    often as makes sense already."""

    def __init__(
        self, message: str, retry_after_seconds: float | None = None, of_request: bool = False, attempts: Any = None
    ) -> None:
        super().__init__(message)
        self.retry_after_seconds, self.of_request, self.attempts = retry_after_seconds, of_request, attempts


class RolloutUnresolvedError(FlashEvolveError):
    """The provider gave no answer to a request after every retry, or (``unanswerable``) to this one alone. It says
    nothing of the candidate: the step ends as failed, and nothing is scored, cached or pooled."""

    def __init__(self, message: str, unanswerable: bool = False) -> None:
        super().__init__(message)
        self.unanswerable = unanswerable


class NoLongerWantedError(FlashEvolveError):
    """An evaluation was given up before its next rollout began, since nobody needs it any more."""


class RunAbortedError(FlashEvolveError):
    """The provider refused in a way that no retry mends; every further request would fail the same.

    Attributes:
        best_program: the best program so far, as ``compile`` would have returned it; None when the seed was not
            validated yet.
    """

    best_program: Any = None


class JournalError(RunAbortedError):
    """The journal cannot be written any more. What was committed before is safe."""


def check_counts(**counts: object) -> None:
    """Raise ConfigurationError for an argument, by its name, that is neither a whole number above 0 nor None."""
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise ConfigurationError(f"{name} is {count!r}, expected a whole number of at least 1, or None.")


def check_limits(**limits: object) -> None:
    """Raise ConfigurationError for an argument, by its name, that is neither a number above 0 nor None."""
    for name, limit in limits.items():
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0):
            raise ConfigurationError(f"{name} is {limit!r}, expected a number above 0, or None.")


logger = logger_named(__name__)


def hook_that_raised(error: BaseException, hooks: Mapping[str, Any]) -> str | None:
    """Name the hook that an exception came through, the innermost, as "hook: Class.method" or "hook: function".

    Args:
        hooks: name of a hook -> a callable, an object with methods or with several in ``stoppers``, or None.

    >>> def broken(): raise LookupError
    >>> try: broken()
    ... except LookupError as error: print(hook_that_raised(error, {"component_selector": broken}))
    component_selector: broken
    """
    members = [(hook, member, _code_of(member)) for hook, held in hooks.items() for member in _members(held)]
    found: str | None = None
    trace = error.__traceback__
    while trace is not None:
        code, owner = trace.tb_frame.f_code, trace.tb_frame.f_locals.get("self")
        for hook, member, own_code in members:
            if own_code is code:
                name: str = getattr(code, "co_qualname", code.co_name)  # Python 3.11
                found = f"{hook}: {name.rpartition('<locals>.')[2]}"
            elif owner is member:
                found = f"{hook}: {type(owner).__qualname__}.{code.co_name}"
        trace = trace.tb_next
    return found


def report_hook(error: Exception, hooks: Mapping[str, Any]) -> None:
    """Say which of the user's objects ended the run, in the log and, from Python 3.11 on, in the error's notes."""
    if (hook := hook_that_raised(error, hooks)) is not None:
        logger.error("The run has ended: %s raised %s: %s", hook, type(error).__name__, error)
        note = getattr(error, "add_note", None)
        if note is not None:
            note(f"raised by {hook}")


def attach_best_program(error: Exception, program: Any) -> None:
    """Let the one who catches ``error`` have the best program so far, as ``error.best_program``."""
    with contextlib.suppress(AttributeError, TypeError):  # an exception class may refuse attributes
        setattr(error, "best_program", program)  # noqa: B010


def _members(hook: Any) -> list[Any]:
    """A strategy, and those that it is put together from (stoppers of a composite), inner ones last."""
    if hook is None:
        return []
    return [hook, *(member for stopper in getattr(hook, "stoppers", None) or () for member in _members(stopper))]


def _code_of(hook: Any) -> CodeType | None:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(getattr(hook, "__func__", hook), "__code__", None)
