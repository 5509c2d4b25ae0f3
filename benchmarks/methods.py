"""The methods that are compared, by name: how to build each optimizer for a workload and its limits.

The methods of AsyncGEPA are `benchmarks.variants`. It is imported when it is first built, so that the other methods run
without it.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import dspy
from gepa.strategies.proposal_sampling import IndependentSampling, PxNSampling
from gepa.utils import TimeoutStopCondition

from benchmarks.trajectory import Recorder
from benchmarks.variants import variant

UNLIMITED_CALLS = 10**9


@dataclass(frozen=True)
class Workload:
    """What is optimized and the language models that serve it; every model must have its cache off.

    `true_score` gives a candidate's score on examples that nobody saw, by its texts; `None` where nobody knows it.
    """

    program: Callable[[], dspy.Module]
    trainset: list[dspy.Example]
    valset: list[dspy.Example]
    metric: Callable[..., Any]
    task_lm: dspy.LM
    reflection_lm: dspy.LM
    adapter: dspy.Adapter | None = None
    true_score: Callable[[Mapping[str, str]], float] | None = None


@dataclass(frozen=True)
class Limits:
    """When a run ends and how wide it may be.

    Attributes:
        slots: Requests in flight at most.
        seed: Seed of the optimizer.
        seconds: Time limit in the server's time, or `None`.
        metric_calls: Budget, or `None` for no budget.
        time_scale: Seconds of the server's clock that pass in one real second.
    """

    slots: int
    seed: int
    seconds: float | None = None
    metric_calls: int | None = None
    time_scale: float = 1.0

    @property
    def wall_seconds(self) -> float | None:
        """The time limit in real seconds."""
        return None if self.seconds is None else self.seconds / self.time_scale


class Optimizer(Protocol):
    """What dspy.GEPA, AsyncGEPA and `PlainEvaluation` have in common."""

    def compile(self, student: dspy.Module, *, trainset: list[Any], valset: list[Any]) -> dspy.Module:
        """Run until a limit; give back the best program."""
        ...


Build = Callable[[Workload, Limits, Recorder], Optimizer]


@dataclass(frozen=True)
class Method:
    """A name for the tables and how to build the optimizer; `build` is called when its clock may start."""

    name: str
    build: Build


class _Gate(dspy.Module):
    """Runs a program until the gate is shut, and then answers at once without it."""

    def __init__(self, program: dspy.Module, is_open: Callable[[], bool]) -> None:
        super().__init__()
        self.program = program
        self._is_open = is_open

    def forward(self, **inputs: Any) -> dspy.Prediction:
        """The program's answer, or an empty one."""
        return self.program(**inputs) if self._is_open() else dspy.Prediction()


@dataclass(frozen=True)
class PlainEvaluation:
    """dspy.Evaluate over the validation set, again and again: as fast as this backend answers with these threads.

    The rounds are joined into long lists, so that there is a barrier only every 100 waves, and the gate drops what
    is left of a list when the time is over.
    """

    metric: Callable[..., Any]
    limits: Limits

    def compile(self, student: dspy.Module, *, trainset: list[Any], valset: list[Any]) -> dspy.Module:
        """Evaluate until the limit; gives the student back as it was."""
        wall = self.limits.wall_seconds
        deadline = None if wall is None else time.monotonic() + wall
        left = UNLIMITED_CALLS if self.limits.metric_calls is None else self.limits.metric_calls
        examples = itertools.cycle(valset)

        def is_open() -> bool:
            return deadline is None or time.monotonic() < deadline

        def score(gold: Any, pred: Any, trace: Any = None) -> float:
            return float(self.metric(gold, pred, trace)) if len(pred.keys()) else 0.0

        gate = _Gate(student, is_open)
        while left > 0 and is_open():
            share = list(itertools.islice(examples, min(left, 100 * self.limits.slots)))
            dspy.Evaluate(devset=share, metric=score, num_threads=self.limits.slots, max_errors=len(share) + 1)(gate)
            left -= len(share)
        return student


def gepa_arguments(workload: Workload, limits: Limits, recorder: Recorder) -> dict[str, Any]:
    """The constructor's arguments that dspy.GEPA and AsyncGEPA share."""
    return {
        "metric": workload.metric,
        "max_metric_calls": limits.metric_calls or UNLIMITED_CALLS,
        "reflection_lm": workload.reflection_lm,
        "num_threads": limits.slots,
        "seed": limits.seed,
        "track_stats": True,
        "gepa_kwargs": {"callbacks": [recorder]},
    }


def _gepa(sampling: Callable[[], Any] | None, virtual: bool) -> Build:
    def build(workload: Workload, limits: Limits, recorder: Recorder) -> Optimizer:
        arguments = gepa_arguments(workload, limits, recorder)
        if sampling is not None:
            arguments["gepa_kwargs"]["sampling_strategy"] = sampling()
        if virtual:
            from dspy_flashevolve import AsyncGEPA

            return AsyncGEPA(**arguments, schedule="lockstep", max_seconds=limits.seconds)
        if limits.wall_seconds is not None:
            arguments["gepa_kwargs"]["stop_callbacks"] = [TimeoutStopCondition(limits.wall_seconds)]
        return dspy.GEPA(**arguments)

    return build


def async_options(name: str, seed: int = 0, slots: int = 64) -> dict[str, Any]:
    """AsyncGEPA's own arguments of a method, fresh for each run; raises `ValueError` for a name that is none.

    Example:
        >>> async_options("async-full")
        {'search': 'pareto', 'staleness': 'full'}
    """
    return variant(name).options(seed, slots)


def _async(name: str) -> Build:
    def build(workload: Workload, limits: Limits, recorder: Recorder) -> Optimizer:
        from dspy_flashevolve import AsyncGEPA

        own = async_options(name, limits.seed, limits.slots)
        arguments = {**gepa_arguments(workload, limits, recorder), **own}
        return AsyncGEPA(**arguments, max_seconds=limits.wall_seconds)

    return build


def _evaluate(workload: Workload, limits: Limits, recorder: Recorder) -> Optimizer:
    return PlainEvaluation(workload.metric, limits)


def method(name: str, virtual: bool = False) -> Method:
    """The method of that name; raises `ValueError` for a name that is none.

    Args:
        name: As in benchmarks/README.md.
        virtual: For a run in virtual time, where AsyncGEPA's lockstep, which takes the same steps one after another
            with the same barriers, stands for dspy.GEPA, whose threads no virtual clock knows.

    Example:
        >>> method("gepa-independent-10").name
        'gepa-independent-10'
    """
    plain: dict[str, Build] = {"evaluate": _evaluate, "gepa": _gepa(None, virtual)}
    if name in plain:
        return Method(name, plain[name])
    if found := re.fullmatch(r"gepa-independent-([1-9]\d*)", name):
        return Method(name, _gepa(lambda: IndependentSampling(int(found[1])), virtual))
    if found := re.fullmatch(r"gepa-pxn-([1-9]\d*)x([1-9]\d*)", name):
        return Method(name, _gepa(lambda: PxNSampling(int(found[1]), int(found[2])), virtual))
    try:
        variant(name)
    except ValueError as error:
        others = ", ".join([*plain, "gepa-independent-N", "gepa-pxn-PxN"])
        raise ValueError(f"{error}; and, not of AsyncGEPA, {others}") from None
    return Method(name, _async(name))
