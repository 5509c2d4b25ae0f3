"""Whose fault was it: the provider's, or the program's?"""

from __future__ import annotations

from dspy.utils.exceptions import LMAuthError, LMBillingError, LMError, LMNotConfiguredError, is_retryable_lm_error

from dspy_flashevolve.engine.errors import RunAbortedError, TransientError

ATTEMPTS = "flashevolve_attempts"


def mark_attempts(error: LMError, attempts: int) -> None:
    """Note on an error how often the request was made, so that it is not repeated as often again."""
    setattr(error, ATTEMPTS, attempts)


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
        raise TransientError(
            str(error), getattr(error, "retry_after", None), attempts=getattr(error, ATTEMPTS, 1)
        ) from error
