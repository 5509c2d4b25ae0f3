"""Rollouts as JSON, and back: what the journal keeps of an output and of a trace.

Outputs are kept for people and for gepa's best outputs; what JSON does not have is kept as text. Traces are kept to be
reflected on after a crash, so they come back equal or not at all: a trace is read again when it is written, and is not
kept where that gives another one. Its rollout is then made anew, if an interrupted run still has to reflect on it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, TypeVar

import dspy
from pydantic_core import to_jsonable_python

from dspy_flashevolve.engine.rollouts import RequestCost, Rollout
from dspy_flashevolve.programs.values import InexactError, decode, encode, from_json, to_json

MAX_READY = 64
"""Candidates whose predictors are kept ready, as many as programs are (``program.MAX_READY``)."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModuleReply(Generic[T]):
    """What calling a module came to, and what it has cost, whether or not there is an answer.

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
        self._predictors = lru_cache(MAX_READY)(self._predictors_with)

    def trace(self, candidate: dict[str, str], rollout: Rollout) -> str | None:
        """Write what reflection reads of a rollout: "null" for nothing, None where it cannot be kept."""
        if rollout.trajectory is None:
            return "null"
        if self._code:
            return None
        known = self._predictors(frozenset(candidate.items()))
        try:
            steps = ", ".join(
                f"[{json.dumps(_name_of(predictor, known))}, {to_json(inputs)}, {to_json(output)}]"
                for predictor, inputs, output in rollout.trajectory["trace"]
            )
            prediction, score = to_json(rollout.trajectory["prediction"]), to_json(rollout.trajectory["score"])
            return f'{{"prediction": {prediction}, "score": {score}, "trace": [{steps}]}}'
        except Exception:
            return None

    def read_trace(self, candidate: dict[str, str], example: Any, text: str) -> Any:
        """Read a trajectory as reflection needs it.

        Raises:
            InexactError: it was kept of a program that had other predictors or models than this one.
        """
        record = json.loads(text)
        if record is None:
            return None
        known = self._predictors(frozenset(candidate.items()))
        try:
            steps = [(known[name], decode(inputs), decode(output)) for name, inputs, output in record["trace"]]
        except KeyError as error:
            raise InexactError(f"no predictor {error}") from error
        return {
            "example": example,
            "prediction": decode(record["prediction"]),
            "trace": steps,
            "score": decode(record["score"]),
        }

    def _predictors_with(self, candidate: frozenset[tuple[str, str]]) -> dict[str, Any]:
        """Copy the student's predictors with a candidate's instructions, by their names."""
        texts, copies = dict(candidate), dict[str, Any]()
        predictors: list[tuple[str, Any]] = self._student.named_predictors()
        for name, original in predictors:
            predictor = copies[name] = copy.copy(original)
            if name in texts:
                predictor.signature = original.signature.with_instructions(texts[name])
        return copies


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
        """Write output and trace as text."""
        trace = self._records.trace(self._candidate, rollout) if self._traced else None
        return output_text(rollout.output), trace

    def read(self, row: Any) -> Rollout | None:
        """Read the rollout in a row; None where its trace is needed, and could not be kept."""
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
    """How the answer of a module is written down and read again; a :class:`~.rollouts.ReplyRecord`.

    Args:
        position: tells the questions of a step in a stage apart.
    """

    def __init__(self, position: str) -> None:
        self.position = position

    def write(self, answer: Any) -> str | None:
        """Write the answer as text; None for an error, and for what would not come back as it is."""
        if answer.error is not None:
            return None
        try:
            return to_json(answer.answer)
        except Exception:
            return None

    def read(self, text: str) -> Any:
        """Read the answer, which costs nothing now."""
        try:
            return ModuleReply(from_json(text))
        except Exception:  # whatever a class of the user's raises: the question is asked again
            return None


def output_text(output: Any) -> str:
    """Write what a program returned as text; whatever it is, since it is only shown."""
    try:
        return json.dumps(encode(output))
    except Exception:
        return _plain_text(output)


def _plain_text(output: Any) -> str:
    """Write what a program returned as values of JSON; what is none is replaced by its ``repr``."""
    try:
        fields = dict(output.items()) if isinstance(output, dspy.Prediction) else {"text": str(output)}
        plain: dict[str, Any] = to_jsonable_python(fields, fallback=repr, inf_nan_mode="strings")
        return json.dumps({"p": {name: encode(item) for name, item in plain.items()}})
    except Exception as error:  # bytes that are no text, a cycle, a repr that raises
        message = f"a {type(output).__name__} that cannot be written down: {type(error).__name__}"
        return json.dumps({"p": {"text": message}})


def output_in(text: str | None) -> Any:
    """Read an output, as far as :func:`output_text` could keep it."""
    try:
        return None if text is None else from_json(text)
    except Exception:  # whatever a class of the user's raises: an output is only shown
        return None


def as_writable(output: Any, write: Callable[[Any], object]) -> Any:
    """Return an output as it is where ``write`` can write it, else what :func:`output_text` keeps of it."""
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
