"""What LM calls raise, heard while a program runs: so that a timeout of an LM is told from one of a program's tool."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import dspy
from dspy.utils.callback import BaseCallback
from dspy.utils.exceptions import LMServerError

REMEMBERED = 32
"""Errors that are kept; a program that goes on after so many has been answered by other calls."""


class LmCalls(BaseCallback):
    """Hears of every LM call in its context, of any ``dspy.BaseLM``, on the loop and in threads."""

    def __init__(self) -> None:
        self.errors: deque[Exception] = deque(maxlen=REMEMBERED)
        """What calls raised, in order; a reply without a choice counts as such an error."""

    def on_lm_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        """See ``dspy.utils.callback.BaseCallback``."""
        if isinstance(exception, Exception):
            self.errors.append(exception)
        elif exception is None and isinstance(outputs, list) and not outputs:
            self.errors.append(LMServerError("the reply holds no choice"))


@contextmanager
def heard_lm_calls() -> Generator[LmCalls, None, None]:
    """Hear the LM calls that are made inside, beside the callbacks that the user has configured.

    Their trace is a list of its own, which ends with them: a long run does not fill the user's.
    """
    calls = LmCalls()
    with dspy.context(callbacks=[*dspy.settings.callbacks, calls], trace=[]):
        yield calls
