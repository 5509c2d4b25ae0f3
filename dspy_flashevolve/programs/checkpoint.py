"""gepa's checkpoint in a run directory, read as data (:mod:`~.data_pickle`)."""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import numpy
from gepa.core.state import CachedEvaluation, EvaluationCache, GEPAState
from pydantic import BaseModel, InstanceOf, PlainValidator

from dspy_flashevolve.engine.errors import RunDirectoryError
from dspy_flashevolve.engine.journal import BEFORE_STEPS, id_text
from dspy_flashevolve.observe.history import Candidate, History
from dspy_flashevolve.programs.data_pickle import DataUnpickler, NotDataError

CHECKPOINT = "gepa_state.bin"
SHOWN_CHARACTERS = 300
"""Of an error in a message: its first lines say what is wrong, and a file may hold millions of wrong parts."""


def _score(value: Any) -> float:
    if not isinstance(value, int | float | Decimal | Fraction | numpy.generic):
        raise ValueError("a score that is no number")
    return float(value)


_Scores = dict[Any, Annotated[Any, PlainValidator(_score)]]


class _Candidates(BaseModel):
    """The part of gepa's state that people are shown."""

    program_candidates: list[dict[str, str]]
    parent_program_for_candidate: list[list[int | None]]
    prog_candidate_val_subscores: list[_Scores]
    num_metric_calls_by_discovery: list[int]
    total_num_evals: int


class _State(_Candidates):
    """The attributes of gepa 0.1.4's ``GEPAState``. Others of a file are left out: they might stand for methods."""

    frontier_type: str = "instance"
    validation_schema_version: int = 0
    prog_candidate_objective_scores: list[_Scores]
    pareto_front_valset: _Scores
    program_at_pareto_front_valset: dict[Any, set[int]]
    objective_pareto_front: _Scores
    program_at_pareto_front_objectives: dict[str, set[int]]
    pareto_front_cartesian: _Scores
    program_at_pareto_front_cartesian: dict[Any, set[int]]
    list_of_named_predictors: list[str]
    named_predictor_id_to_update_next_for_program_candidate: list[int]
    i: int
    num_full_ds_evals: int
    full_program_trace: list[dict[str, Any]]
    best_outputs_valset: dict[Any, list[tuple[int, Any]]] | None
    evaluation_cache: InstanceOf[EvaluationCache[Any, Any]] | None
    adapter_state: dict[str, Any]


def _read(path: Path, runs_code: bool, take: Callable[[dict[str, Any]], Any]) -> Any:
    try:
        content = path.read_bytes()
        state = pickle.loads(content) if runs_code else DataUnpickler(io.BytesIO(content)).load()
        if type(state) is not dict:
            raise TypeError(f"a {type(state).__name__} is no state of gepa's")
        if not runs_code:
            _check_size(state, len(content))
        return take(state)
    except Exception as error:
        is_told = isinstance(error, NotDataError | OSError)
        why = str(error) if is_told else f"{type(error).__name__}: {error}; it is damaged"
        raise RunDirectoryError(f"{path} cannot be read: {' '.join(why.split())[:SHOWN_CHARACTERS]}.") from error


def _check_size(state: Any, most: int) -> None:
    """Count the parts of what was read, those that are shared each time that they are named.

    Raises:
        NotDataError: there are more than the file has bytes: a few bytes name the same long list again and again.
    """
    count, left = 0, [state]
    while left:
        value = left.pop()
        parts: Any = (
            value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
        )
        count += 1 + len(parts)
        if count > most:
            raise NotDataError("holds more parts than bytes")
        left += [part for part in parts if isinstance(part, dict | list | tuple | set)]


def read_state(path: Path, runs_code: bool = False) -> GEPAState[Any, Any]:
    """Read gepa's checkpoint as gepa's state, as ``GEPAState.load`` does.

    Args:
        runs_code: what it holds may run, as it must where cloudpickle wrote classes or functions into it.

    Raises:
        RunDirectoryError: it cannot be read, holds what is no data, or no state of gepa's.
    """
    return _read(path, runs_code, _state_of)


def _state_of(data: dict[str, Any]) -> GEPAState[Any, Any]:
    if (data.get("validation_schema_version") or 0) < 2:
        GEPAState._migrate_from_legacy_state_v0(data)  # pyright: ignore[reportPrivateUsage]
    GEPAState._upgrade_state_dict(data)  # pyright: ignore[reportPrivateUsage]
    _State.model_validate(data, strict=True)
    state = GEPAState[Any, Any].__new__(GEPAState)
    vars(state).update({name: value for name, value in data.items() if name in _State.model_fields})
    candidates, names = state.program_candidates, state.list_of_named_predictors
    cache = state.evaluation_cache
    entries: list[Any] = [] if cache is None else list(cache._cache.values())  # pyright: ignore[reportPrivateUsage]
    fits = (
        state.is_consistent(),
        all(set(names) == texts.keys() for texts in candidates),
        all(0 <= turn < len(names) for turn in state.named_predictor_id_to_update_next_for_program_candidate),
        all(
            parent is None or 0 <= parent < index
            for index, parents in enumerate(state.parent_program_for_candidate)
            for parent in parents
        ),
        all(type(entry["i"]) is int for entry in state.full_program_trace),
        all(type(entry) is CachedEvaluation and type(_score(entry.score)) is float for entry in entries),
    )
    if not all(fits):
        raise ValueError("its parts do not fit together")
    if "rng_state" in state.adapter_state:  # dspy's adapter takes it up
        random.Random().setstate(state.adapter_state["rng_state"])
    return state


def read_checkpoint(run_dir: str | Path) -> History:
    """Read ``gepa_state.bin`` for people. It holds no times, tokens, steps or failures.

    Raises:
        RunDirectoryError: it cannot be read, or holds what is no data.
    """
    candidates, calls = _read(Path(run_dir) / CHECKPOINT, False, _candidates_of)
    return History(directory=str(run_dir), optimizer="dspy.GEPA", calls=calls, candidates=candidates)


def _candidates_of(data: dict[str, Any]) -> tuple[tuple[Candidate, ...], int]:
    state = _Candidates.model_validate(data, strict=True)
    columns = (
        state.program_candidates,
        state.prog_candidate_val_subscores,
        state.parent_program_for_candidate,
        state.num_metric_calls_by_discovery,
    )
    candidates = (
        Candidate(
            index,
            texts,
            sum(scores.values()) / len(scores) if scores else None,
            {id_text(example_id): score for example_id, score in scores.items()},
            tuple(parents),
            step=BEFORE_STEPS,
            calls=calls,
            version=index,
        )
        for index, (texts, scores, parents, calls) in enumerate(zip(*columns, strict=True))
    )
    return tuple(candidates), state.total_num_evals
