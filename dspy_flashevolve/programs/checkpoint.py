"""gepa's checkpoint in a run directory, read as data: nothing that the pickle names is called.

A pickle is a program for a machine with a stack. :class:`DataUnpickler` has those instructions of that machine which
build data. An object of a data class is made by ``__new__`` alone and filled with its state, as in :mod:`.records`;
of functions there are those in :data:`MAKERS`.
"""

from __future__ import annotations

import io
import pickle
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from inspect import getattr_static
from pathlib import Path
from typing import Annotated, Any, ClassVar
from uuid import UUID, SafeUUID

import dspy
import numpy
from dspy.primitives.prediction import Completions
from gepa.core.state import CachedEvaluation, EvaluationCache, GEPAState
from pydantic import BaseModel, InstanceOf, PlainValidator

from dspy_flashevolve.engine.errors import RunDirectoryError
from dspy_flashevolve.engine.store import BEFORE_STEPS, id_text
from dspy_flashevolve.observe.history import Candidate, History
from dspy_flashevolve.programs.records import MODEL_STATE, fill, imported

MOST_KEY_PARTS = 1000
"""Parts of a key, at any depth: Python hashes nested tuples without a look at its stack, which some 100,000 end."""


class NotDataError(RunDirectoryError):
    """A pickle does what data does not."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"it {what}, and is not run. Import what defines it, or, if you trust the file, allow code in it by "
            "gepa_kwargs={'use_cloudpickle': True}"
        )


def plain(value: Any, *kinds: type) -> Any:
    """Return a value of one of these types, and of none that inherits from them, which may have code of its own."""
    if type(value) not in kinds:
        raise NotDataError(f"has a {type(value).__name__} where data has a {kinds[0].__name__}")
    return value


class Maker:
    """A function that a pickle may have called. No data class, so that no pickle makes one."""

    def __init__(self, make: Callable[..., Any], *kinds: type) -> None:
        self.make, self.kinds = make, kinds


class _NumberType:
    """The type of one of numpy's numbers, as a pickle describes it."""

    def __init__(self, code: str, *_: bool) -> None:
        self.code, self.order = code, "="

    def number(self, content: bytes) -> Any:
        if self.code not in ("b1", "f2", "f4", "f8", *(f"{sign}{size}" for sign in "iu" for size in (1, 2, 4, 8))):
            raise NotDataError(f"names numpy's type {self.code!r}, which is none of numbers")
        [number] = numpy.frombuffer(content, numpy.dtype(self.order + self.code))
        return number


FACTORIES = (list, dict, set, int, float, str, bool, tuple)
"""What a defaultdict may make."""
NUMBER = Maker(_NumberType.number, _NumberType, bytes)
TYPE_ARGUMENTS = Maker(lambda: None)
"""Says of what types a generic class is, ``EvaluationCache[RolloutOutput, DataId]``, which is left out."""
MAKERS = {
    "collections.OrderedDict": Maker(OrderedDict),
    "collections.defaultdict": Maker(lambda factory: defaultdict(FACTORIES[FACTORIES.index(factory)]), type),
    "collections.Counter": Maker(Counter, dict),
    "collections.deque": Maker(deque, tuple, int),
    "datetime.date": Maker(date, bytes),
    "datetime.datetime": Maker(datetime, bytes, timezone),
    "datetime.time": Maker(time, bytes, timezone),
    "datetime.timedelta": Maker(timedelta, int),
    "datetime.timezone": Maker(timezone, timedelta, str),
    "decimal.Decimal": Maker(Decimal, str),
    "fractions.Fraction": Maker(lambda *parts: Fraction(*map(int, "/".join(map(str, parts)).split("/"))), int, str),
    "numpy.dtype": Maker(_NumberType, str, bool),
    "numpy.core.multiarray.scalar": NUMBER,
    "numpy._core.multiarray.scalar": NUMBER,
    "_operator.getitem": TYPE_ARGUMENTS,
    "typing.Any": TYPE_ARGUMENTS,
    "gepa.core.adapter.RolloutOutput": TYPE_ARGUMENTS,
    "gepa.core.data_loader.DataId": TYPE_ARGUMENTS,
    **{f"builtins.{kind.__name__}": kind for kind in FACTORIES},
}
"""What a pickle names -> what stands for it; a class of Python's own only for a defaultdict."""
KEYS = (str, int, float, bool, type(None), bytes, date, datetime, time, timedelta, timezone, Decimal, Fraction, UUID)
RESTORED = ("pydantic.main", "pydantic.root_model", "dataclasses", "uuid")
"""Modules whose ``__setstate__`` does what :func:`_fill` does."""


def _is_data(value: Any) -> bool:
    """Say whether a value is a class whose objects are data, and none of whose code runs when one is made or gone."""
    if not isinstance(value, type) or getattr_static(value, "__del__", None) is not None:
        return False
    if getattr(getattr_static(value, "__setstate__", None), "__module__", "dataclasses") not in RESTORED:
        return False
    has_known_base = issubclass(value, BaseModel | dspy.Example | Completions | Enum | UUID) or is_dataclass(value)
    return has_known_base or (issubclass(value, tuple) and hasattr(value, "_fields"))


def _made(kind: Any, arguments: Any, options: Any = None) -> Any:
    """Make an object of a data class, by ``__new__`` alone."""
    if _is_data(kind) and not options:
        if issubclass(kind, tuple) and len(plain(arguments, tuple)) == len(getattr(kind, "_fields", ())):
            return tuple.__new__(kind, arguments)
        if not arguments and not issubclass(kind, Enum | tuple):
            return object.__new__(kind)
    raise NotDataError("makes an object otherwise than by its class and its state")


def _called(function: Any, arguments: Any) -> Any:
    """Return what a function makes of arguments, where it makes data."""
    if function is TYPE_ARGUMENTS:
        return None
    if type(function) is Maker:
        return function.make(*(plain(argument, *function.kinds) for argument in plain(arguments, tuple)))
    if isinstance(function, type) and issubclass(function, Enum):
        [value] = plain(arguments, tuple)
        for member in function.__members__.values():
            if type(member._value_) is type(value) and member._value_ == value:
                return member
    raise NotDataError("calls what makes no data")


def _fill(target: Any, state: Any) -> None:
    """Give an object its state."""
    kind = type(target)
    if issubclass(kind, Enum):
        raise NotDataError("changes a member of an Enum, of which there is one in the process")
    if kind is _NumberType:
        target.order = plain(plain(state, tuple)[1], str)
    elif kind is UUID:
        object.__setattr__(target, "int", plain(plain(state, dict)["int"], int))
        object.__setattr__(target, "is_safe", SafeUUID.unknown)
    elif issubclass(kind, BaseModel):
        values = _attributes(plain(state, dict)["__dict__"])
        parts = {name: plain(state.get(name), dict, set, type(None)) for name in MODEL_STATE}
        fill(target, {"__dict__": values, **parts})
    elif issubclass(kind, dspy.Example | Completions):
        fill(target, _attributes(state))
    elif is_dataclass(kind):
        if type(state) is list:  # of a frozen class with slots
            state = dict(zip((field.name for field in fields(kind)), state, strict=True))
        held, slots = state if type(state) is tuple else (state, None)
        fill(target, _attributes(held or {}) | _attributes(slots or {}))
    else:
        raise NotDataError("gives a state to what is no object of a class for data")


def _attributes(values: Any) -> dict[str, Any]:
    """Return attributes by name, but for the one that says of what types a generic class is."""
    return {plain(name, str): value for name, value in plain(values, dict).items() if name != "__orig_class__"}


def _key(key: Any) -> Any:
    """Return a key whose hash runs no code of a class, and does not go deep."""
    parts = [key]
    for part in parts:  # which grows
        kind = type(part)
        if kind is frozenset or (issubclass(kind, tuple) and kind.__hash__ is tuple.__hash__):
            if len(parts) + len(part) > MOST_KEY_PARTS:
                raise NotDataError(f"has a key of more than {MOST_KEY_PARTS} parts")
            parts += part if kind is frozenset else tuple.__iter__(part)
        elif not issubclass(kind, Enum | numpy.generic):
            plain(part, *KEYS)
    return key


def _extend(target: Any, items: list[Any]) -> None:
    plain(target, list, deque).extend(items)


def _add(target: Any, items: list[Any]) -> None:
    plain(target, set).update(map(_key, items))


def _update(target: Any, items: list[Any]) -> None:
    for key, value in zip(items[::2], items[1::2], strict=True):
        plain(target, dict, OrderedDict, defaultdict, Counter)[_key(key)] = value


_Unpickler: Any = pickle._Unpickler  # pyright: ignore[reportPrivateUsage]
"""Python's reader in Python. The one in C calls what a class has, and a number in a file makes it fill the memory."""


UNCHANGED = """PROTO FRAME STOP MARK POP POP_MARK MEMOIZE BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT BININT1
    BININT2 LONG1 LONG4 BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 EMPTY_TUPLE
    TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST EMPTY_DICT EMPTY_SET STACK_GLOBAL"""
"""Instructions that call nothing but :meth:`DataUnpickler.find_class`."""
OURS: dict[str, Callable[[Any], None]] = {
    "APPEND": lambda machine: machine.put(_extend, [machine.stack.pop()]),
    "APPENDS": lambda machine: machine.put(_extend, machine.pop_mark()),
    "ADDITEMS": lambda machine: machine.put(_add, machine.pop_mark()),
    "SETITEM": lambda machine: machine.put(_update, [machine.stack.pop(), machine.stack.pop()][::-1]),
    "SETITEMS": lambda machine: machine.put(_update, machine.pop_mark()),
    "BUILD": lambda machine: machine.put(_fill, machine.stack.pop()),
    "FROZENSET": lambda machine: machine.push(frozenset(map(_key, machine.pop_mark()))),
    "REDUCE": lambda machine: machine.replace(_called, 2),
    "NEWOBJ": lambda machine: machine.replace(_made, 2),
    "NEWOBJ_EX": lambda machine: machine.replace(_made, 3),
}
"""Instructions that would call, write or hash."""


class DataUnpickler(_Unpickler):
    """Reads a pickle of protocol 4 or 5 that holds data."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: OURS.get(name) or _Unpickler.dispatch[code]
        for name in (*UNCHANGED.split(), *OURS)
        for code in getattr(pickle, name)
    }

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        name = f"{module_name}.{global_name}"
        value = MAKERS[name] if name in MAKERS else imported(module_name, global_name)
        if name in MAKERS or _is_data(value):
            return value
        raise NotDataError(f"names {name[:100]}, which is no class for data that this process has imported")

    def put(self, write: Callable[[Any, Any], object], content: Any) -> None:
        """Write what was on the stack into the object below it."""
        write(self.stack[-1], content)

    def replace(self, make: Callable[..., Any], count: int) -> None:
        """Make one object of those on top of the stack."""
        values = [self.stack.pop() for _ in range(count)]
        self.push(make(*reversed(values)))

    def push(self, value: Any) -> None:
        """Put an object onto the stack, which is another one than before where what it is made of was marked."""
        self.stack.append(value)


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


@contextmanager
def _reading(path: Path, runs_code: bool = False) -> Generator[dict[str, Any], None, None]:
    """Read the dict in a checkpoint; whatever is wrong with that, or with what the block makes of it, is damage."""
    try:
        content = path.read_bytes()
        state = pickle.loads(content) if runs_code else DataUnpickler(io.BytesIO(content)).load()
        if type(state) is not dict:
            raise TypeError(f"a {type(state).__name__} is no state of gepa's")
        if not runs_code:
            _check_size(state, len(content))
        yield state
    except Exception as error:
        is_told = isinstance(error, NotDataError | OSError)
        why = str(error) if is_told else f"{type(error).__name__}: {error}; it is damaged"
        raise RunDirectoryError(f"{path} cannot be read: {' '.join(why.split())[:SHOWN_CHARACTERS]}.") from error


def _check_size(state: Any, most: int) -> None:
    """Count the parts of what was read, those that are shared each time that they are named."""
    count, pending = 0, [state]
    while pending:
        value = pending.pop()
        count += 1 + len(value)
        if count > most:
            raise NotDataError("holds more parts than bytes")
        parts: Any = value.values() if isinstance(value, dict) else value
        pending += [part for part in parts if isinstance(part, dict | list | tuple | set)]


def read_state(path: Path, runs_code: bool = False) -> GEPAState[Any, Any]:
    """Read gepa's checkpoint as gepa's state, as ``GEPAState.load`` does.

    Args:
        runs_code: what it holds may run, as it must where cloudpickle wrote classes or functions into it.
    """
    with _reading(path, runs_code) as data:
        if (data.get("validation_schema_version") or 0) < 2:
            GEPAState._migrate_from_legacy_state_v0(data)  # pyright: ignore[reportPrivateUsage]
        GEPAState._upgrade_state_dict(data)  # pyright: ignore[reportPrivateUsage]
        _State.model_validate(data, strict=True)
        state = GEPAState[Any, Any].__new__(GEPAState)
        vars(state).update({name: value for name, value in data.items() if name in _State.model_fields})
        candidates, names = state.program_candidates, state.list_of_named_predictors
        cache = state.evaluation_cache
        entries: list[Any] = [] if cache is None else list(cache._cache.values())  # pyright: ignore[reportPrivateUsage]
        older = [(parent, index) for index, held in enumerate(state.parent_program_for_candidate) for parent in held]
        fits = (
            state.is_consistent(),
            all(set(names) == texts.keys() for texts in candidates),
            all(0 <= turn < len(names) for turn in state.named_predictor_id_to_update_next_for_program_candidate),
            all(parent is None or 0 <= parent < index for parent, index in older),
            all(type(entry["i"]) is int for entry in state.full_program_trace),
            all(type(entry) is CachedEvaluation and type(_score(entry.score)) is float for entry in entries),
        )
        if not all(fits):
            raise ValueError("its parts do not fit together")
        if "rng_state" in state.adapter_state:  # dspy's adapter takes it up
            random.Random().setstate(state.adapter_state["rng_state"])
        return state


def read_checkpoint(run_dir: str | Path) -> History:
    """Read ``gepa_state.bin`` for people. It holds no times, tokens, steps or failures."""
    candidates: list[Candidate] = []
    with _reading(Path(run_dir) / CHECKPOINT) as data:
        state = _Candidates.model_validate(data, strict=True)
        columns = (
            state.program_candidates,
            state.prog_candidate_val_subscores,
            state.parent_program_for_candidate,
            state.num_metric_calls_by_discovery,
        )
        for index, (texts, scores, parents, calls) in enumerate(zip(*columns, strict=True)):
            mean = sum(scores.values()) / len(scores) if scores else None
            by_example = {id_text(example_id): score for example_id, score in scores.items()}
            one = Candidate(
                index, texts, mean, by_example, tuple(parents), step=BEFORE_STEPS, calls=calls, version=index
            )
            candidates.append(one)
    calls = state.total_num_evals
    return History(directory=str(run_dir), optimizer="dspy.GEPA", calls=calls, candidates=tuple(candidates))
