"""The one builder of programs with a candidate's texts: what rollouts run, and what the user gets back.

As in dspy.GEPA a candidate is one copy of the student, which its rollouts share: what a program writes on itself during
a call is seen by the calls beside it, as in ``dspy.Evaluate``.

=========================================================  ============================================================
in the student                                             in a copy
=========================================================  ============================================================
modules, and what leads to one: lists, dicts, objects,     copied, and bound to the copy's modules: a tool that asks a
bound methods, ``partial``, closures, ``dspy.Tool``        predictor asks the candidate's
data                                                       copied by ``copy.deepcopy``
an object, a dict or a list that holds a lock, a queue, a  shared with the student, with all that it refers to; a module
thread, a socket or a file, itself or in its class         cannot be: the data beside its lock is
the same with a lock of asyncio or anyio                   shared by the rollouts of one run; elsewhere copied
LMs, callbacks, what cannot be copied or has ``__del__``   shared with the student
what takes more than ``LARGE_BYTES``                       shared by the copies
variables of a closure that lead to none of these          the caller's, who may count in them
=========================================================  ============================================================
"""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import inspect
import io
import logging
import queue
import socket
import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable
from concurrent.futures import Executor
from contextvars import Context, ContextVar
from enum import Enum
from types import (
    AsyncGeneratorType,
    BuiltinMethodType,
    CellType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    TracebackType,
)  # fmt: skip
from typing import Any, cast

import anyio
from dspy.clients.base_lm import BaseLM
from dspy.predict.predict import Predict
from dspy.primitives.module import Module
from dspy.teleprompt.gepa.gepa_flex_utils import rebind_flex_code
from dspy.teleprompt.gepa.gepa_utils import DspyAdapter
from dspy.utils.callback import BaseCallback

LARGE_BYTES = 65_536
"""A list of 8,000 elements, or an array of that size, is copied once. Not tuned: a candidate copies less in
milliseconds."""
BUILDS = 10
"""How often a program is built, and a rollout made, where Python's parser fails. Not tuned: the second time has been
enough."""
PARSER_ERROR = "AST constructor recursion depth mismatch"
"""What Python 3.11's parser says where another thread parses, too, while objects with finalizers are collected."""
MUTEXES = (
    type(threading.Lock()), type(threading.RLock()), threading.Condition,
    asyncio.Lock, asyncio.Condition, anyio.Lock, anyio.Condition,
)  # fmt: skip
"""They keep others away from the data beside them, which is therefore meant to be shared."""
LOOP_LOCKS = (
    asyncio.Lock, asyncio.Condition, asyncio.Semaphore, asyncio.Event, asyncio.Queue,
    anyio.Lock, anyio.Condition, anyio.Semaphore, anyio.Event, anyio.CapacityLimiter,
)  # fmt: skip
"""They work on the event loop on which they were first waited for, and on no other."""
MEMO = type(functools.lru_cache(lambda: None))
LOCKS = (
    *MUTEXES, *LOOP_LOCKS, MEMO, threading.Semaphore, threading.Event, threading.Barrier, threading.local,
    threading.Thread, Executor, queue.Queue, queue.SimpleQueue, socket.socket,
    io.FileIO, io.BufferedReader, io.BufferedWriter, io.TextIOWrapper,
)  # fmt: skip
"""A copy of what holds one would count for itself, or wait for a thread that works for the original."""
LEAVES = (
    *(kind for kind in LOCKS if kind not in (*LOOP_LOCKS, MEMO)), BaseLM, BaseCallback, Enum, Context, ContextVar,
    weakref.ref, ModuleType, BuiltinMethodType, GeneratorType, CoroutineType, AsyncGeneratorType, FrameType,
    TracebackType, asyncio.AbstractEventLoop, asyncio.Future, logging.Logger,
)  # fmt: skip
"""Copies share them, and nothing is looked for in them."""
VALUES = (type(None), bool, int, float, complex, str, bytes, type)
OF_DSPY = frozenset(vars(Predict("question -> answer")))
"""Attributes that dspy gives to modules and predictors: a lock of the user's does not guard them."""
COPY_HOOKS = frozenset({"__deepcopy__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__"})
"""By them a class says itself how its objects are copied."""


class StudentAdapter(DspyAdapter):
    """dspy's GEPA adapter, with one way to build programs; any thread may ask for one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._building = threading.Lock()
        self._copiers: dict[bool, Copier] = {}

    def build_program(self, candidate: dict[str, str]) -> Module:
        """Return a new program with a candidate's texts, for the user.

        Raises:
            SyntaxError, CodeInterpreterError: the candidate's code cannot be read.
        """
        return self._build(candidate, for_rollouts=False)

    def build_for_rollouts(self, candidate: dict[str, str]) -> Module:
        """Return the same program for this run's rollouts, which share their limiters; see :meth:`build_program`."""
        return self._build(candidate, for_rollouts=True)

    def _build(self, candidate: dict[str, str], for_rollouts: bool) -> Module:
        for _ in range(BUILDS - 1):
            try:
                return self._build_once(candidate, for_rollouts)
            except SystemError:  # PARSER_ERROR
                continue
        return self._build_once(candidate, for_rollouts)

    def _build_once(self, candidate: dict[str, str], for_rollouts: bool) -> Module:
        with self._building:
            if for_rollouts not in self._copiers:
                self._copiers[for_rollouts] = Copier(
                    copy_of(self.student) if for_rollouts else self.student, is_of_run=for_rollouts
                )
            program = self._copiers[for_rollouts].copy()
            rebind_flex_code(program, candidate)
        predictors: list[tuple[str, Any]] = program.named_predictors()
        for name, predictor in predictors:
            if name in candidate:
                predictor.signature = predictor.signature.with_instructions(candidate[name])
        return program


def copy_of(program: Module) -> Module:
    """Copy a program as a builder does."""
    return Copier(program).copy()


class Copier:
    """Makes copies of one program, one at a time.

    Args:
        program: is looked through once, and not changed.
        is_of_run: it belongs to a run: the copies share its loop's locks, and its large data, with it.
    """

    def __init__(self, program: Module, is_of_run: bool = False) -> None:
        self._program, self._is_of_run = program, is_of_run
        self._parts: dict[int, Any] = {}
        """All that can be reached from the program, by id."""
        holders = self._look_through()
        self._to_modules = _leading_to([key for key, part in self._parts.items() if isinstance(part, Module)], holders)
        self._loop_locks = [part for part in self._parts.values() if _is_of_loop(part)]
        self._to_loop_locks = _leading_to(map(id, self._loop_locks), holders)
        self._memo: dict[int, Any] = {}
        """What the copies share: id -> what stands there in a copy."""
        self._open_cells: list[tuple[CellType, CellType]] = []
        self._share(shared for part in self._parts.values() for shared in self._shared_with(part))
        for key, part in self._parts.items():
            if not self._is_skeleton(key) and key not in self._memo and sys.getsizeof(part) > LARGE_BYTES:
                if is_of_run:
                    self._share([part])
                else:
                    self._data(part, self._memo)

    def copy(self) -> Module:
        """Return a new copy."""
        memo = dict(self._memo)
        self._open_cells.clear()
        try:
            for lock in self._loop_locks:  # first, for a class with copies of its own would keep a lock on its loop
                self._copy(lock, memo)
            result = self._copy(self._program, memo)
            while self._open_cells:  # last, since a function may be in its own closure
                new, old = self._open_cells.pop()
                new.cell_contents = self._copy(old.cell_contents, memo)
        except SystemError:
            raise
        except Exception:  # of a class with copies of its own, say
            result = self._program.deepcopy()
        return cast(Module, result)

    # What there is

    def _look_through(self) -> dict[int, list[int]]:
        """Fill ``_parts``, and return who holds each of them, by id."""
        holders: dict[int, list[int]] = {}
        self._parts[id(self._program)] = self._program
        waiting: list[Any] = [self._program]
        while waiting:
            holder = waiting.pop()
            for part in _parts_of(holder):
                holders.setdefault(id(part), []).append(id(holder))
                if id(part) not in self._parts:
                    self._parts[id(part)] = part
                    waiting.append(part)
        return holders

    def _is_skeleton(self, key: int) -> bool:
        """Tell what has to be bound to the copy's modules and locks from data."""
        return key in self._to_modules or key in self._to_loop_locks

    def _shared_with(self, part: Any) -> Iterable[Any]:
        """Return what copies share since it is of a kind that is shared, or holds a lock."""
        held = _parts_of(part)
        is_shared = isinstance(part, LEAVES) or hasattr(type(part), "__del__") or any(map(_is_lock, [part, *held]))
        if id(part) not in self._to_modules:
            return [part] if is_shared else []
        if not any(isinstance(lock, MUTEXES) for lock in held):
            return []
        if isinstance(part, Module):
            held = [data for name, data in vars(part).items() if name not in OF_DSPY]
        return [data for data in held if id(data) not in self._to_modules]

    def _share(self, parts: Iterable[Any]) -> None:
        """Let copies share these parts with all that they refer to, but no loop's locks beyond its run."""
        waiting = [part for part in parts if self._is_of_run or id(part) not in self._to_loop_locks]
        while waiting:
            part = waiting.pop()
            if id(part) in self._parts and id(part) not in self._memo:
                self._memo[id(part)] = part
                waiting += _parts_of(part)

    # What is copied

    def _copy(self, value: Any, memo: dict[int, Any]) -> Any:
        if id(value) in memo:
            return memo[id(value)]
        if not self._is_skeleton(id(value)):
            return self._data(value, memo)
        kind = type(value)
        if isinstance(value, Module) and not hasattr(kind, "__deepcopy__"):
            return self._with_attributes(value, object.__new__(kind), memo)  # Flex would parse its code in __setstate__
        if isinstance(value, dict | list | deque) and kind.__module__ in ("builtins", "collections"):
            return self._container(value, memo)
        if kind is FunctionType:
            return self._function(value, memo)
        if kind in (tuple, set, frozenset):
            result = kind([self._copy(item, memo) for item in value])
        elif kind is MethodType:
            result = MethodType(value.__func__, self._copy(value.__self__, memo))
        elif kind is functools.partial:
            func, args, options = (self._copy(part, memo) for part in (value.func, value.args, value.keywords))
            result = functools.partial(func, *args, **options)
        elif kind is MEMO:
            result = functools.lru_cache(**value.cache_parameters())(self._copy(value.__wrapped__, memo))
        elif _is_plain(kind):
            return self._with_attributes(value, copy.copy(value), memo)
        else:
            return self._data(value, memo)
        memo[id(value)] = result
        return result

    def _data(self, value: Any, memo: dict[int, Any]) -> Any:
        size = len(memo)
        try:
            result = memo[id(value)] = copy.deepcopy(value, memo)
            return result
        except Exception as error:
            while len(memo) > size:  # what was copied for it was for nothing
                memo.popitem()
            if isinstance(error, SystemError) or id(value) in self._to_modules:
                raise
            self._memo[id(value)] = memo[id(value)] = value
            return value

    def _with_attributes(self, value: Any, result: Any, memo: dict[int, Any]) -> Any:
        memo[id(value)] = result
        fresh = {"history": []} if isinstance(value, Module) else {"_loop": None} if _is_of_loop(value) else {}
        for name, part in vars(value).items():
            vars(result)[name] = fresh[name] if name in fresh else self._copy(part, memo)
        return result

    def _container(self, value: Any, memo: dict[int, Any]) -> Any:
        result = memo[id(value)] = copy.copy(value)  # keeps a deque's length and a defaultdict's factory
        result.clear()
        if isinstance(value, dict):
            result.update({key: self._copy(item, memo) for key, item in cast("dict[Any, Any]", value).items()})
        else:
            result.extend(self._copy(item, memo) for item in value)
        return result

    def _function(self, value: FunctionType, memo: dict[int, Any]) -> FunctionType:
        cells = value.__closure__ or ()
        for cell in cells:
            if self._is_skeleton(id(cell)) and id(cell) not in memo:
                memo[id(cell)] = CellType()
                self._open_cells.append((memo[id(cell)], cell))
        own_cells = tuple(memo.get(id(cell), cell) for cell in cells)
        result = memo[id(value)] = FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, own_cells
        )
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(value, name):
                setattr(result, name, getattr(value, name))
        for name in ("__defaults__", "__kwdefaults__", "__dict__"):
            setattr(result, name, self._copy(getattr(value, name), memo))
        return result


def _leading_to(targets: Iterable[int], holders: dict[int, list[int]]) -> set[int]:
    reached, waiting = set[int](), list(targets)
    while waiting:
        key = waiting.pop()
        if key not in reached:
            reached.add(key)
            waiting += holders.get(key, ())
    return reached


def _parts_of(value: Any) -> list[Any]:
    """List what a value holds directly, but what cannot change; what a class holds that guards its objects, too."""
    if isinstance(value, LEAVES):
        return []
    if isinstance(value, MethodType):
        parts = [value.__self__]
    elif isinstance(value, FunctionType):
        parts = [*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__, vars(value)]
    else:
        attributes: Any = getattr(value, "__dict__", None)
        parts = [part for part in gc.get_referents(value) if part is not attributes]
        parts += [] if attributes is None else attributes.values()
        parts += _locks_of_class(type(value))
    return [part for part in parts if not isinstance(part, VALUES)]


@functools.lru_cache(maxsize=256)
def _locks_of_class(kind: type) -> list[Any]:
    """List the locks in the body of a class, which its objects share, and the memos of its methods."""
    bodies = [vars(base) for base in kind.__mro__ if not base.__module__.startswith("dspy.")]
    return [value for body in bodies for value in body.values() if _is_lock(value)]


def _is_lock(value: Any) -> bool:
    """Whether a value is a lock, or a container of nothing but locks."""
    if isinstance(value, LOCKS):
        return True
    if _factory_of(value) in (threading.Lock, threading.RLock, *LOCKS):
        return True
    if isinstance(value, dict | list | tuple | set | frozenset):
        items = cast("Iterable[Any]", value.values() if isinstance(value, dict) else value)
        return bool(value) and all(map(_is_lock, items))
    # A lock or a limiter of another library: of files, of processes, of a data base.
    return callable(getattr(type(value), "acquire", None)) and not isinstance(value, Module)


def _is_of_loop(value: Any) -> bool:
    has_acquire = inspect.iscoroutinefunction(getattr(type(value), "acquire", None))
    return isinstance(value, LOOP_LOCKS) or has_acquire or _factory_of(value) in LOOP_LOCKS


def _factory_of(value: Any) -> Any:
    """Return what makes the lock of a key when it is first asked for, in a ``defaultdict``."""
    return cast(Any, value).default_factory if isinstance(value, defaultdict) else None


@functools.lru_cache(maxsize=256)
def _is_plain(kind: type) -> bool:
    """Whether objects of a class are nothing but their attributes; pydantic's, such as ``dspy.Tool``, are."""
    if kind is SimpleNamespace or hasattr(kind, "__pydantic_validator__"):
        return True
    bodies = [vars(base) for base in kind.__mro__[:-1]]
    return "__dict__" in dir(kind) and not any(COPY_HOOKS & body.keys() or body.get("__slots__") for body in bodies)
