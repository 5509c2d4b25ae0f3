"""Calling a metric as dspy.GEPA calls it, on the loop or off it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import anyio

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.loop import Threads
from dspy_flashevolve.engine.rollouts import record_metric_call
from dspy_flashevolve.engine.scheduler import shielded
from dspy_flashevolve.programs.feedback import looks_at_the_call

MetricFn = Callable[..., Any]


def check_metric(metric: MetricFn) -> None:
    """Refuse what can never score an example.

    Raises:
        ConfigurationError: not callable.
        TypeError: it does not take (gold, pred, trace, pred_name, pred_trace), as dspy.GEPA asks.
    """
    if not callable(metric):
        raise ConfigurationError(
            f"metric is {metric!r}, expected a function (gold, pred, trace=None, pred_name=None, pred_trace=None)."
        )
    try:
        inspect.signature(metric).bind(None, None, None, None, None)
    except TypeError as error:
        raise TypeError(
            "GEPA metric must accept five arguments: (gold, pred, trace, pred_name, pred_trace). "
            f"{name_of(metric)}{inspect.signature(metric)} does not: {error}."
        ) from error


def no_score(metric: str, returned: Any, example: Any) -> Exception:
    """Make the error to raise for what is no score.

    Args:
        metric: its name.
        returned: by the metric, for ``example``.

    >>> no_score("exact_match", None, "the example")
    TypeError("metric exact_match returned None for the example 'the example', expected a finite number, or a \
dspy.Prediction with a score that is one.")
    """
    kind = ValueError if isinstance(returned, float) else TypeError
    return kind(
        f"metric {metric} returned {returned!r:.200} for the example {example!r:.500}, expected a finite number, or a "
        "dspy.Prediction with a score that is one."
    )


def is_coroutine_metric(metric: MetricFn) -> bool:
    """Whether a metric is an ``async def`` function, or an object whose ``__call__`` is one."""
    return inspect.iscoroutinefunction(metric) or inspect.iscoroutinefunction(getattr(metric, "__call__", None))  # noqa: B004


def name_of(code: Any) -> str:
    """Name a user's function, or the class of a callable object, for a message.

    >>> name_of(is_coroutine_metric), name_of(nullcontext())
    ('is_coroutine_metric', 'nullcontext')
    """
    return str(getattr(code, "__qualname__", None) or type(code).__qualname__)


class Metric:
    """A user's metric, sync or coroutine.

    Args:
        function: the metric.
        threads: where a sync metric runs, so that a slow one does not hold up the loop.
        lock: call it once at a time.
    """

    def __init__(self, function: MetricFn, threads: Threads, lock: bool = False) -> None:
        self.name = name_of(function)
        """How to call the user's function in a message."""
        self.looks_at_the_call = looks_at_the_call(function)
        """Whether it may answer differently when it is asked for feedback; None where that cannot be known."""
        self._lock = lock
        self._turn = anyio.Lock() if lock else nullcontext()
        self._function = function
        self._threads = threads
        self._coroutine = is_coroutine_metric(function)
        self._declared, self._padding = _arguments_of(function)

    async def score(self, example: Any, prediction: Any, *, scoring_trace: Any = None, flex: bool = False) -> Any:
        """Call the metric for a score, and return what it returns; the user's errors pass through.

        Args:
            scoring_trace: handed over as ``program_trace`` where the metric declares it.
            flex: score as dspy.GEPA does with a dspy.Flex submodule, by the declared names.
        """
        if flex:
            values = {"trace": None, "pred_name": None, "pred_trace": None, "program_trace": scoring_trace}
            kwargs = {name: value for name, value in values.items() if name in self._declared}
            args: tuple[Any, ...] = (example, prediction)
        else:
            kwargs, args = {}, (example, prediction, *[None] * self._padding)
        async with self._turn:
            await record_metric_call()
            # One that has begun in a thread cannot be called back: its rollout is paid, and must be counted.
            return await self._call(not self._coroutine, *args, **kwargs)

    async def feedback(self, example: Any, prediction: Any, trace: Any, pred_name: str, pred_trace: Any) -> Any:
        """Call the metric for feedback on one predictor, and return what it returns; the user's errors pass through."""
        async with self._turn:
            # With a lock it is not cancelled: a thread would go on with it after its turn.
            return await self._call(self._lock, example, prediction, trace, pred_name, pred_trace)

    async def _call(self, to_its_end: bool, *args: Any, **kwargs: Any) -> Any:
        result: Any = None
        with shielded() if to_its_end else nullcontext():
            if self._coroutine:
                return await self._function(*args, **kwargs)
            result = await self._threads.run(self._function, *args, **kwargs)
        return await result if inspect.isawaitable(result) else result


def _arguments_of(function: MetricFn) -> tuple[frozenset[str], int]:
    """Return the names that a metric declares, and how many it needs beyond example and prediction: these get None."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset(), 0
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty]
    return frozenset(p.name for p in parameters), max(0, len(required) - 2)
