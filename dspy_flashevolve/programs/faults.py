"""Whose fault was it: the provider's, or the program's?"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from dspy.utils.exceptions import LMAuthError, LMBillingError, LMError, LMNotConfiguredError, is_retryable_lm_error

from dspy_flashevolve.engine.errors import RunAbortedError, TransientError

ATTEMPTS = "flashevolve_attempts"


def mark_attempts(error: LMError, attempts: int) -> None:
    """Note on an error how often the request was made, so that it is not repeated as often again."""
    setattr(error, ATTEMPTS, attempts)


def retry_after_of(error: BaseException) -> float | None:
    """When the provider wants to be asked again, in seconds; None where it did not say.

    dspy reads it from the reply itself. Behind litellm it is lost on the way, and found in the headers that an error
    further down the chain has kept.
    """
    cause: BaseException | None = error
    for _ in range(10):
        if cause is None:
            return None
        said = getattr(cause, "retry_after", None)
        if isinstance(said, int | float) and not isinstance(said, bool):
            return float(said)
        reply = getattr(cause, "response", None)
        for headers in (getattr(cause, "litellm_response_headers", None), getattr(reply, "headers", None)):
            if isinstance(headers, Mapping) and (seconds := _seconds_in(headers)) is not None:
                return seconds
        cause = cause.__cause__ or cause.__context__
    return None


def _seconds_in(headers: Mapping[Any, Any]) -> float | None:
    """Seconds or a date, as HTTP has it; None for anything else.

    >>> _seconds_in({"Retry-After": "3"}), _seconds_in({"retry-after": "soon"})
    (3.0, None)
    """
    value = next((str(value) for name, value in headers.items() if str(name).lower() == "retry-after"), None)
    if value is None:
        return None
    try:
        return max(0.0, float(value)) if "." in value or value.strip().isdigit() else _until(value)
    except (TypeError, ValueError):
        return None


def _until(date: str) -> float:
    when = parsedate_to_datetime(date)
    when = when if when.tzinfo is not None else when.replace(tzinfo=timezone.utc)
    return max(0.0, (when - datetime.now(timezone.utc)).total_seconds())


def raise_provider_fault(error: Exception) -> None:
    """Raise for what says nothing of the candidate; return for errors of the program or of its prompt.

    Raises:
        TransientError: a rate limit, a timeout, a 5xx: it is tried again, outside the score.
        RunAbortedError: no key, a rejected key, or no credit: nothing that follows could succeed.
    """
    if not isinstance(error, LMError):
        return
    if isinstance(error, LMAuthError | LMBillingError | LMNotConfiguredError):
        raise RunAbortedError(
            f"The LM provider refused: {error}. Check the API key and the account, then run again."
        ) from error
    if is_retryable_lm_error(error):
        raise TransientError(str(error), retry_after_of(error), attempts=getattr(error, ATTEMPTS, 1)) from error
