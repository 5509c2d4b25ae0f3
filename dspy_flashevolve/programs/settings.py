"""The arguments that all optimizers have, checked and frozen for the length of a run; and their data, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

from dspy.primitives import Example, Module, Prediction

from dspy_flashevolve.engine.errors import ConfigurationError, DataError, check_counts
from dspy_flashevolve.engine.run import RunLimits
from dspy_flashevolve.programs.ray_rollouts import RayRollouts

S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class RunSettings(RunLimits):
    """What any run over DSPy programs is told to do, whichever optimizer makes it.

    Args:
        num_threads: requests in flight at most, over all stages. Default: found out while the run goes on, up to
            ``max_concurrency``; ``dspy.settings.num_threads`` in lockstep, and where a program runs in threads unless
            ``max_concurrency`` is given.
        max_concurrency: the most requests in flight when ``num_threads`` is None. Default: 256.
        rollouts: makes the rollouts in other processes; None to make them in this one.

    Raises:
        ConfigurationError: an argument that cannot work, with the reason.

    >>> RunSettings(num_threads=0)
    Traceback (most recent call last):
    dspy_flashevolve.engine.errors.ConfigurationError: num_threads is 0, expected a whole number of at least 1, or None.
    """

    num_threads: int | None = None
    max_concurrency: int | None = None
    rollouts: RayRollouts | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(num_threads=self.num_threads, max_concurrency=self.max_concurrency)
        if self.num_threads and self.max_concurrency and self.num_threads > self.max_concurrency:
            raise ConfigurationError(
                f"num_threads is {self.num_threads}, above max_concurrency={self.max_concurrency}. Give one of them."
            )
        if self.rollouts is not None and not isinstance(self.rollouts, RayRollouts):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"rollouts is {self.rollouts!r}, expected a RayRollouts, or None.")


def settings_of(kind: type[S], *sources: Any, **own: Any) -> S:
    """Freeze arguments, which are attributes of an optimizer (and its Workflow), as ``kind``; ``own`` has the rest."""
    names = {setting.name for setting in fields(cast(Any, kind))} - own.keys()
    return kind(**{name: getattr(source, name) for source in sources for name in names if hasattr(source, name)} | own)


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
