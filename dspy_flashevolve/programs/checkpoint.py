"""Reading dspy.GEPA's checkpoint, a pickle, without running what is in it."""

from __future__ import annotations

import pickle
import sys
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import dspy
from gepa.core.state import EvaluationCache
from pydantic import BaseModel

from dspy_flashevolve.engine.errors import RunDirectoryError
from dspy_flashevolve.engine.replay import BEFORE_STEPS, id_text
from dspy_flashevolve.observe.history import Candidate, History

CHECKPOINT = "gepa_state.bin"
HOLDS = (EvaluationCache,)
"""What a checkpoint may hold beside plain data: imported here, since reading one imports nothing by its name."""
DATA = {
    "builtins": {"set", "frozenset", "bytearray", "complex", "list", "dict", "tuple", "int", "float", "str", "bool"},
    "collections": {"OrderedDict", "defaultdict", "Counter", "deque"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "uuid": {"UUID"},
    "dspy.primitives.prediction": {"Completions"},
    "numpy": {"dtype", "ndarray"},
    "numpy.core.multiarray": {"scalar", "_reconstruct"},
    "numpy._core.multiarray": {"scalar", "_reconstruct"},
    # gepa's cache says of what types it is: EvaluationCache[RolloutOutput, DataId]
    "_operator": {"getitem"},
    "typing": {"Any"},
    "gepa.core.adapter": {"RolloutOutput"},
    "gepa.core.data_loader": {"DataId"},
}
"""Module -> what a checkpoint may name of it, beside classes of which :func:`_holds_data` says yes."""


class DataUnpickler(pickle.Unpickler):
    """Reads a pickle that names nothing but classes that hold data, all of them imported already.

    Raises:
        RunDirectoryError: it names something else.
    """

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name in DATA.get(module_name, ()):
            return super().find_class(module_name, global_name)
        value: Any = sys.modules.get(module_name)
        for part in global_name.split("."):
            value = getattr(value, part, None)
        if _holds_data(value):
            return value
        raise RunDirectoryError(
            f"it names {module_name}.{global_name}, which is no class for data that this process has imported, and is "
            "not run. Import what defines it, or, if you trust the file, allow code in it by "
            "gepa_kwargs={'use_cloudpickle': True}"
        )


def _holds_data(value: Any) -> bool:
    if not isinstance(value, type):
        return False
    if issubclass(value, BaseModel | dspy.Example | Enum) or (issubclass(value, tuple) and hasattr(value, "_fields")):
        return True
    return is_dataclass(value) and not hasattr(value, "__post_init__")


def read_checkpoint(run_dir: str | Path) -> History:
    """Read ``gepa_state.bin`` without running what is in it. It holds no times, tokens, steps or failures.

    Raises:
        RunDirectoryError: it cannot be read, or names code.
    """
    path = Path(run_dir) / CHECKPOINT
    try:
        with path.open("rb") as file:
            state: dict[str, Any] = DataUnpickler(file).load()
        candidates = [
            Candidate(
                index,
                dict(texts),
                sum(scores.values()) / len(scores) if scores else None,
                {id_text(example_id): float(score) for example_id, score in scores.items()},
                tuple(parents),
                step=BEFORE_STEPS,
                calls=calls,
                version=index,
            )
            for index, (texts, scores, parents, calls) in enumerate(
                zip(
                    state["program_candidates"],
                    state["prog_candidate_val_subscores"],
                    state["parent_program_for_candidate"],
                    state["num_metric_calls_by_discovery"],
                    strict=True,
                )
            )
        ]
        calls = int(state["total_num_evals"])
    except Exception as error:
        why = str(error) if isinstance(error, RunDirectoryError) else f"{type(error).__name__}: {error}; it is damaged"
        raise RunDirectoryError(f"{path} cannot be read: {why}.") from error
    return History(directory=str(run_dir), optimizer="dspy.GEPA", calls=calls, candidates=tuple(candidates))
