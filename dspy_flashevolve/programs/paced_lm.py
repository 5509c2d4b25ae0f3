"""The subclass that a ``dspy.LM`` is of while runs pace it: its calls inside of a run are made by that run.

It is the user's object that programs see and call, with its attributes and its history. Whoever calls it from outside a
run notices nothing, several runs may share it, and after the last of them its class is what it was. Deep copies and
pickles of it are of the user's class.
"""

from __future__ import annotations

import copy
import threading
from functools import lru_cache
from typing import Any, Protocol

import dspy
from dspy.utils.callback import with_callbacks

from dspy_flashevolve.engine.loop import LoopPortal
from dspy_flashevolve.programs.faults import DSPYS_ACALL, DSPYS_CALL, is_paced, recording_paced_call
from dspy_flashevolve.programs.replies import INSPECTION
from dspy_flashevolve.programs.servers import BalancedLM
from dspy_flashevolve.programs.usage import CountLate, counted_call

PACED_BY = "flashevolve_models"
"""The setting of dspy's that says which run a call is made in: it reaches the threads that dspy starts."""


class CallMaker(Protocol):
    """A run, as the LMs that it paces see it; a :class:`~.lm.LanguageModels`.

    Args:
        portal: reaches the run's loop; None while it is not open.
        count: see :func:`~.usage.counted_call`.
    """

    portal: LoopPortal | None
    count: CountLate | None

    def pace_of(self, lm: Any) -> Any:
        """Return what makes the calls of an LM, by ``call`` and ``acall``."""
        ...


_RUNS: dict[int, list[CallMaker]] = {}
"""LM (its id) -> the runs that pace it now."""
_CLASSES = threading.Lock()


def begin_pacing(lm: Any, models: CallMaker) -> None:
    """Let a run make an LM's calls; the first one gives the LM its subclass."""
    with _CLASSES:
        _RUNS.setdefault(id(lm), []).append(models)
        if not is_paced(lm):
            object.__setattr__(lm, "__class__", _paced_class(type(lm)))


def end_pacing(lm: Any, models: CallMaker) -> None:
    """Let a run make an LM's calls no more; the last one gives the LM its class back."""
    with _CLASSES:
        _RUNS[id(lm)].remove(models)
        if not _RUNS[id(lm)]:
            del _RUNS[id(lm)]
            object.__setattr__(lm, "__class__", type(lm).original_class)


def _counters_of_stray_call(lm: Any) -> list[CountLate]:
    """Return who counts a call that knows no run: every run that paces its LM, where a program of it may make the call.

    A thread that a program starts has none of the settings that say which run it works for. The main thread, and the
    one of a run's loop, are no such threads.
    """
    if threading.current_thread() is threading.main_thread():
        return []
    runs = [models for models in _RUNS.get(id(lm), ()) if models.portal is not None and not models.portal.is_on_loop()]
    return [models.count for models in runs if models.count is not None]


@lru_cache(maxsize=64)
def _paced_class(kind: type[Any]) -> type[Any]:
    """Make a subclass whose calls a run makes; callbacks are told of a call once, however often it is made."""

    def paced_call(self: Any, call: Any, args: Any, kwargs: Any) -> Any:
        models: CallMaker | None = dspy.settings.get(PACED_BY)
        if models is None:
            with counted_call(_counters_of_stray_call(self)):
                return call(self, *args, **kwargs)
        with recording_paced_call() as calls, counted_call():
            result = models.pace_of(self).call(self, lambda lm, **more: call(lm, *args, **{**kwargs, **more}))
            calls.on_lm_end("", result)
            return result

    async def paced_acall(self: Any, acall: Any, args: Any, kwargs: Any) -> Any:
        models: CallMaker | None = dspy.settings.get(PACED_BY)
        if models is None:
            with counted_call(_counters_of_stray_call(self)):
                return await acall(self, *args, **kwargs)
        with recording_paced_call() as calls, counted_call():
            result = await models.pace_of(self).acall(self, lambda lm, **more: acall(lm, *args, **{**kwargs, **more}))
            calls.on_lm_end("", result)
            return result

    # dspy gives callbacks a call's arguments by the names in its signature.
    @with_callbacks
    def named_call(self: Any, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        return paced_call(self, DSPYS_CALL, (prompt,), {"messages": messages, **kwargs})

    @with_callbacks
    async def named_acall(self: Any, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        return await paced_acall(self, DSPYS_ACALL, (prompt,), {"messages": messages, **kwargs})

    # Looked up at each call, since instrumentation wraps and unwraps the calls of dspy's classes at any time.
    def call_now(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = dspy.LM.__call__ if kind.__call__ is BalancedLM.__call__ else kind.__call__
        return named_call(self, *args, **kwargs) if _is_dspys(call) else paced_call(self, call, args, kwargs)

    async def acall_now(self: Any, *args: Any, **kwargs: Any) -> Any:
        acall = dspy.LM.acall if kind.acall is BalancedLM.acall else kind.acall
        calling = named_acall(self, *args, **kwargs) if _is_dspys(acall) else paced_acall(self, acall, args, kwargs)
        return await calling

    def update_history(self: Any, entry: dict[str, Any]) -> None:
        inspection = INSPECTION.get()
        if inspection is not None:
            inspection.inspect(entry)
        if inspection is None or inspection.kept:
            kind.update_history(self, entry)

    # dspy would retry inside the slot, and tell nobody.
    def num_retries(self: Any) -> int:
        return vars(self)["num_retries"] if INSPECTION.get() is None else 0

    def set_num_retries(self: Any, value: int) -> None:
        vars(self)["num_retries"] = value

    members: dict[str, Any] = {
        "__call__": call_now,
        "acall": acall_now,
        "update_history": update_history,
        "__reduce_ex__": lambda self, protocol: (_unchanged, (_plain(self),)),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "num_retries": property(num_retries, set_num_retries),
        "original_class": kind,
    }
    return type(kind.__name__, (kind,), members)


def _is_dspys(call: Any) -> bool:
    """Whether a call is dspy's own, with nothing around it but dspy's callbacks."""
    return getattr(call, "__wrapped__", None) in (DSPYS_CALL, DSPYS_ACALL)


def _plain(paced: Any) -> Any:
    """A shallow copy, of the user's class."""
    lm = copy.copy(paced)
    object.__setattr__(lm, "__class__", type(paced).original_class)
    return lm


def _unchanged(value: Any) -> Any:
    return value
