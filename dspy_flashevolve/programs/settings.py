"""The arguments that all optimizers have, checked and frozen for the length of a run; and their data, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, cast

from dspy.primitives import Example, Module, Prediction

from dspy_flashevolve.engine.errors import ConfigurationError, DataError
from dspy_flashevolve.engine.retries import OUTAGE_SECONDS
from dspy_flashevolve.programs.ray_rollouts import RayRollouts

Schedule = Literal["async", "lockstep"]
S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What any run over DSPy programs is told to do, whichever optimizer makes it.

    Args:
        num_threads: requests in flight at most, over all stages. Default: found out while the run goes on, up to
            ``max_concurrency``; ``dspy.settings.num_threads`` in lockstep, and where a program runs in threads unless
            ``max_concurrency`` is given.
        max_concurrency: the most requests in flight when ``num_threads`` is None. Default: 256.
        max_metric_calls: never exceeded; None for no limit.
        max_seconds: no step starts after it; what runs is finished. None for no limit.
        schedule: "async", or "lockstep": one step at a time, nothing beside it, the same slots.
        rollout_timeout_seconds: a rollout that takes longer is given up and asked for again; None for no bound.
        max_outage_seconds: when a provider that answers nothing is given up, and the longest Retry-After; None for
            never.
        rollouts: makes the rollouts in other processes; None to make them in this one.
        seed: of the steps' randomness, and of jitter.

    Raises:
        ConfigurationError: an argument that cannot work, with the reason.

    >>> RunSettings(num_threads=0)
    Traceback (most recent call last):
    dspy_flashevolve.engine.errors.ConfigurationError: num_threads is 0, expected a whole number of at least 1, or None.
    """

    num_threads: int | None = None
    max_concurrency: int | None = None
    max_metric_calls: int | None = None
    max_seconds: float | None = None
    schedule: Schedule = "async"
    rollout_timeout_seconds: float | None = None
    max_outage_seconds: float | None = OUTAGE_SECONDS
    rollouts: RayRollouts | None = None
    seed: int | None = 0

    def __post_init__(self) -> None:
        schedule: Any = self.schedule
        if schedule not in ("async", "lockstep"):
            raise ConfigurationError(f"schedule is {schedule!r}, expected 'async' or 'lockstep'.")
        check_counts(num_threads=self.num_threads, max_concurrency=self.max_concurrency)
        if self.num_threads and self.max_concurrency and self.num_threads > self.max_concurrency:
            raise ConfigurationError(
                f"num_threads is {self.num_threads}, above max_concurrency={self.max_concurrency}. Give one of them."
            )
        check_counts(max_metric_calls=self.max_metric_calls)
        check_limits(
            max_seconds=self.max_seconds,
            max_outage_seconds=self.max_outage_seconds,
            rollout_timeout_seconds=self.rollout_timeout_seconds,
        )
        if self.rollouts is not None and not isinstance(self.rollouts, RayRollouts):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"rollouts is {self.rollouts!r}, expected a RayRollouts, or None.")


def settings_of(kind: type[S], optimizer: Any, **own: Any) -> S:
    """Freeze an optimizer's arguments, which are its attributes, as the record ``kind``; ``own`` has what differs."""
    names = {setting.name for setting in fields(cast(Any, kind))} & vars(optimizer).keys()
    return kind(**{name: getattr(optimizer, name) for name in names} | own)


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


def check_data(student: Module, trainset: Any, teacher: Module | None, valset: Any) -> None:
    """Raise DataError for a student or for data that cannot be used: each example says which fields are inputs.

    Args:
        student: a program.
        trainset, valset: lists of examples, or gepa's loaders; valset None means the trainset.
        teacher: None, for these loops have no use for one.
    """
    if not isinstance(student, Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DataError(f"student is {student!r}, expected a dspy.Module.")
    if teacher is not None:
        raise DataError("teacher is given, but GEPA has no use for one: leave it out.")
    for name, data in (("trainset", trainset), ("valset", valset)):
        if data is None and name == "valset":
            continue
        if data is not None and not hasattr(data, "__len__"):
            raise DataError(f"{name} is a {type(data).__name__}, expected a list of dspy.Example: pass list({name}).")
        if data is None or len(data) < 1:
            raise DataError(f"{name} is empty, expected at least one dspy.Example.")
        examples = cast("Sequence[Any]", data) if isinstance(data, list | tuple) else ()  # a loader may load each time
        for number, example in enumerate(examples):
            if not hasattr(example, "inputs"):
                raise DataError(
                    f"{name}[{number}] is a {type(example).__name__}, expected a dspy.Example: build it by "
                    "dspy.Example(...).with_inputs(...)."
                )
            needs_inputs = isinstance(example, Example) and not isinstance(example, Prediction)
            if needs_inputs and example._input_keys is None:  # pyright: ignore[reportPrivateUsage]
                raise DataError(
                    f"{name}[{number}] does not say which fields are inputs: build it by "
                    "dspy.Example(...).with_inputs(...)."
                )
