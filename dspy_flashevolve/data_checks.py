"""What a run is given, checked before any request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from dspy.primitives import Example, Module, Prediction

from dspy_flashevolve.engine.errors import DataError


def check_data(student: Module, trainset: Any, teacher: Module | None, valset: Any) -> None:
    """Raise DataError for a student or for data that cannot be used: each example says which fields are inputs.

    Args:
        student: a program.
        trainset, valset: lists of examples, or gepa's loaders; valset None means the trainset.
        teacher: None, for GEPA has no use for one.
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
        for number, one in enumerate(cast("Sequence[Any]", data) if isinstance(data, list | tuple) else ()):
            if isinstance(one, Example) and not isinstance(one, Prediction) and one._input_keys is None:  # pyright: ignore[reportPrivateUsage]
                raise DataError(
                    f"{name}[{number}] does not say which fields are inputs: build it by "
                    "dspy.Example(...).with_inputs(...)."
                )
