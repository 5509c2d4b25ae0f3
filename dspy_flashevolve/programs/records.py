"""Rollouts as JSON, and back: what the journal keeps of an output and of a trace.

Outputs are kept for people and for gepa's best outputs; what JSON does not have is kept as text. Traces are kept to be
reflected on after a crash, so they come back equal or not at all: a trace is read again when it is written, and is not
kept where that gives another one. Its rollout is then made anew, if an interrupted run still has to reflect on it.
dspy.GEPA's own checkpoint is read here, too.
"""

from __future__ import annotations

import copy
import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import dspy
from gepa.core.state import EvaluationCache
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from dspy_flashevolve.engine.errors import RunDirectoryError
from dspy_flashevolve.engine.replay import BEFORE_STEPS, id_text
from dspy_flashevolve.engine.rollouts import RequestCost, Rollout
from dspy_flashevolve.observe.history import Candidate, History
from dspy_flashevolve.programs.values import InexactError, decoded, encoded, read, written

CHECKPOINT = "gepa_state.bin"
HOLDS = (EvaluationCache,)
"""What a checkpoint may hold beside plain data: imported here, since reading one imports nothing by its name."""
REMEMBERED = 64
"""Candidates whose predictors are kept ready."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModuleReply(Generic[T]):
    """What became of a question. It has cost what it has cost, whether or not there is an answer.

    Args:
        answer: what was read; None when there is an error.
        error: what the module, or the reading of its answer, raised; a reply that did not fit the format, say.
        calls: LM calls that reported their usage, and at least one where any were made; 0 of what was read again.
        spent: tokens that the LMs reported, and dollars, 0 where no price is known or none was asked for.
    """

    answer: T | None
    error: Exception | None = None
    calls: int = 0
    spent: RequestCost = field(default_factory=lambda: RequestCost(0))


class RolloutRecords:
    """Writes the rollouts of one student down, and reads them.

    Args:
        student: the program; its predictors are the steps of traces.
        code: whether candidates change code, whose predictors are not known by name. Their traces are not kept.
    """

    def __init__(self, student: dspy.Module, code: bool = False) -> None:
        self._student = student
        self._code = code
        self._predictors = lru_cache(REMEMBERED)(self._predictors_with)

    def trace(self, candidate: dict[str, str], rollout: Rollout) -> str | None:
        """What reflection reads of a rollout, "null" where there is nothing to read; None where it cannot be kept."""
        if rollout.trajectory is None:
            return "null"
        if self._code:
            return None
        known = self._predictors(frozenset(candidate.items()))
        try:
            steps = ", ".join(
                f"[{json.dumps(_name_of(predictor, known))}, {written(inputs)}, {written(output)}]"
                for predictor, inputs, output in rollout.trajectory["trace"]
            )
            prediction, score = written(rollout.trajectory["prediction"]), written(rollout.trajectory["score"])
            return f'{{"prediction": {prediction}, "score": {score}, "trace": [{steps}]}}'
        except Exception:
            return None

    def read_trace(self, candidate: dict[str, str], example: Any, text: str) -> Any:
        """A trajectory, as reflection reads it.

        Raises:
            InexactError: it was kept of a program that had other predictors or models than this one.
        """
        record = json.loads(text)
        if record is None:
            return None
        known = self._predictors(frozenset(candidate.items()))
        try:
            steps = [(known[name], decoded(inputs), decoded(output)) for name, inputs, output in record["trace"]]
        except KeyError as error:
            raise InexactError(f"no predictor {error}") from error
        return {
            "example": example,
            "prediction": decoded(record["prediction"]),
            "trace": steps,
            "score": decoded(record["score"]),
        }

    def _predictors_with(self, candidate: frozenset[tuple[str, str]]) -> dict[str, Any]:
        """The student's predictors with a candidate's instructions."""
        texts, predictors_by_name = dict(candidate), dict[str, Any]()
        predictors: list[tuple[str, Any]] = self._student.named_predictors()
        for name, predictor in predictors:
            predictors_by_name[name] = copy.copy(predictor)
            if name in texts:
                predictors_by_name[name].signature = predictor.signature.with_instructions(texts[name])
        return predictors_by_name


class ProgramRecord:
    """How one rollout of a program is written down and read again; a :class:`~.rollouts.RolloutRecord`.

    Args:
        records: of the program.
        candidate, example: of the rollout.
        traced: it has a trace.
        needs_trace: a trace that could not be kept is needed: the rollout has to be made again.
    """

    def __init__(
        self,
        records: RolloutRecords,
        candidate: dict[str, str],
        example: Any,
        traced: bool = True,
        needs_trace: bool = True,
    ) -> None:
        self._records, self._candidate, self._example = records, candidate, example
        self._traced, self._needs_trace = traced, traced and needs_trace

    def write(self, rollout: Rollout) -> tuple[str, str | None]:
        """Output and trace as text."""
        trace = self._records.trace(self._candidate, rollout) if self._traced else None
        return output_text(rollout.output), trace

    def read(self, row: Any) -> Rollout | None:
        """The rollout in a row; None where its trace is needed, and could not be kept."""
        trajectory = None
        if self._traced:
            try:
                if row["trace"] is None:
                    raise InexactError("the trace could not be kept")
                trajectory = self._records.read_trace(self._candidate, self._example, row["trace"])
            except Exception:
                if self._needs_trace:
                    return None
        output = output_in(row["output"])
        return Rollout(output, float(row["score"]), json.loads(row["objective_scores"]), trajectory)


class ReplyText:
    """How what a module answered is written down and read again; a :class:`~.rollouts.ReplyRecord`.

    Args:
        position: tells the questions of a step in a stage apart.
    """

    def __init__(self, position: str) -> None:
        self.position = position

    def write(self, answer: Any) -> str | None:
        """The answer as text; None for an error, and for what would not come back as it is."""
        if answer.error is not None:
            return None
        try:
            return written(answer.answer)
        except Exception:
            return None

    def read(self, text: str) -> Any:
        """The answer, which has cost nothing now."""
        try:
            return ModuleReply(read(text))
        except Exception:  # whatever a class of the user's raises: the question is asked again
            return None


def output_text(output: Any) -> str:
    """What a program returned, as text; whatever it is, since it is only shown."""
    try:
        return json.dumps(encoded(output))
    except Exception:
        return _plain_text(output)


def _plain_text(output: Any) -> str:
    """What a program returned, as values of JSON; what is none is replaced by its ``repr``."""
    try:
        fields = dict(output.items()) if isinstance(output, dspy.Prediction) else {"text": str(output)}
        plain: dict[str, Any] = to_jsonable_python(fields, fallback=repr, inf_nan_mode="strings")
        return json.dumps({"p": {name: encoded(item) for name, item in plain.items()}})
    except Exception as error:  # bytes that are no text, a cycle, a repr that raises
        message = f"a {type(output).__name__} that cannot be written down: {type(error).__name__}"
        return json.dumps({"p": {"text": message}})


def output_in(text: str | None) -> Any:
    """An output, as far as :func:`output_text` could keep it."""
    try:
        return None if text is None else read(text)
    except Exception:  # whatever a class of the user's raises: an output is only shown
        return None


def as_writable(output: Any, write: Callable[[Any], object]) -> Any:
    """An output, where ``write`` can write it; else as far as :func:`output_text` can keep it, or as plain values."""
    text = output_text(output)
    for form in (output, output_in(text)):
        try:
            write(form)
        except Exception:  # whatever a class of the user's raises
            continue
        return form
    return output_in(_plain_text(output))


def _name_of(predictor: Any, known: dict[str, Any]) -> str:
    for name, other in known.items():
        if predictor.signature.equals(other.signature):
            return name
    raise InexactError("a predictor that the student does not have")


# gepa's checkpoint is a pickle: what somebody else put there must not run.

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
