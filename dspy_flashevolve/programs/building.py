"""The one builder of programs with a candidate's texts: what rollouts run, and what the user gets back.

As in dspy.GEPA a candidate is one copy of the student, which its rollouts share: what a program writes on itself during
a call is seen by the calls beside it, as in ``dspy.Evaluate``.

=========================================================  ============================================================
in the student                                             in a copy
=========================================================  ============================================================
modules, and what leads to one: lists, dicts, objects,     copied, and bound to the copy's modules: a tool that asks a
bound methods, closures, ``dspy.Tool``                     predictor asks the candidate's
data                                                       copied by ``copy.deepcopy``
what holds a lock, a queue, a thread, a socket or a file   shared with the student, with all that it refers to
the same with a lock of asyncio or anyio                   shared by the rollouts of one run; elsewhere copied
a module that holds a lock (not a semaphore)               copied, but the data beside the lock is shared
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
import types
from collections.abc import Iterable
from concurrent.futures import Executor
from contextvars import Context, ContextVar
from enum import Enum
from typing import Any

import anyio
from dspy.clients.base_lm import BaseLM
from dspy.predict.predict import Predict
from dspy.primitives.module import Module
from dspy.teleprompt.gepa.gepa_flex_utils import rebind_flex_code
from dspy.teleprompt.gepa.gepa_utils import DspyAdapter
from dspy.utils.callback import BaseCallback

LARGE_BYTES = 65_536
"""A list of 8,000 elements, or an array of that size. Not tuned: a candidate copies less in milliseconds."""
TRIES = 10
"""How often a program is built, and a rollout made, where Python's parser fails. Not tuned: twice has been enough."""
PARSER_ERROR = "AST constructor recursion depth mismatch"
"""What Python 3.11's parser says where another thread parses, too, while objects with finalizers are collected."""
THREAD_MUTEXES = (type(threading.Lock()), type(threading.RLock()), threading.Condition)
LOOP_MUTEXES = (asyncio.Lock, asyncio.Condition, anyio.Lock, anyio.Condition)
LOOP_LOCKS = (
    *LOOP_MUTEXES, asyncio.Semaphore, asyncio.Event, asyncio.Queue, anyio.Semaphore, anyio.Event, anyio.CapacityLimiter,
)  # fmt: skip
"""They work on the event loop on which they were first waited for, and on no other."""
LOCKS = (
    *THREAD_MUTEXES, threading.Semaphore, threading.Event, threading.Barrier, threading.local, threading.Thread,
    queue.Queue, queue.SimpleQueue, Executor, socket.socket, io.FileIO, io.BufferedIOBase, io.TextIOWrapper,
)  # fmt: skip
"""A copy of what holds one would count for itself, or wait for a thread that works for the original."""
LEAVES = (
    *LOCKS, BaseLM, BaseCallback, Enum, Context, ContextVar, asyncio.AbstractEventLoop, asyncio.Future, logging.Logger,
    types.ModuleType, types.BuiltinMethodType, types.FrameType, types.TracebackType, types.GeneratorType,
    types.CoroutineType, types.AsyncGeneratorType,
)  # fmt: skip
"""Copies share them, and nothing is looked for in them: they lead everywhere."""
VALUES = (type(None), bool, int, float, complex, str, bytes, type)
CACHED = type(functools.lru_cache(lambda: None))
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

    def build_program(self, candidate: dict[str, str], for_rollouts: bool = False, tries: int = TRIES) -> Module:
        """Return a new program with a candidate's texts.

        Raises:
            SyntaxError, CodeInterpreterError: the candidate's code cannot be read.
        """
        try:
            with self._building:
                if for_rollouts not in self._copiers:
                    original = copy_of(self.student) if for_rollouts else self.student
                    self._copiers[for_rollouts] = Copier(original, is_of_run=for_rollouts)
                program = self._copiers[for_rollouts].copy()
                rebind_flex_code(program, candidate)
        except SystemError:  # PARSER_ERROR
            if tries == 1:
                raise
            return self.build_program(candidate, for_rollouts, tries - 1)
        predictors: list[tuple[str, Any]] = program.named_predictors()
        for name, predictor in predictors:
            if name in candidate:
                predictor.signature = predictor.signature.with_instructions(candidate[name])
        return program


def copy_of(program: Module) -> Module:
    """Copy a program as a builder does."""
    return Copier(program).copy()


class Copier:
    """Makes copies of one program, one at a time."""

    def __init__(self, program: Module, is_of_run: bool = False) -> None:
        self._program, self._is_of_run = program, is_of_run
        self._parts: dict[int, Any] = {id(program): program}
        """All that can be reached from the program, by id."""
        holders: dict[int, list[int]] = {}
        waiting: list[Any] = [program]
        while waiting:
            holder = waiting.pop()
            for part in _parts_of(holder):
                holders.setdefault(id(part), []).append(id(holder))
                if id(part) not in self._parts:
                    self._parts[id(part)] = part
                    waiting.append(part)
        self._loop_locks = [part for part in self._parts.values() if _is_of_loop(type(part))]
        modules = [part for part in self._parts.values() if isinstance(part, Module)]
        self._to_modules, self._to_loop_locks = _leading_to(modules, holders), _leading_to(self._loop_locks, holders)
        self._skeleton = self._to_modules | self._to_loop_locks
        """What is bound to the copy's modules and locks; the rest is data."""
        self._memo: dict[int, Any] = {}
        """What the copies share: id -> what stands there in a copy."""
        self._open_cells: list[tuple[types.CellType, types.CellType]] = []
        for key, part in self._parts.items():
            if _is_leaf(type(part)) or hasattr(type(part), "__del__"):
                self._share(part)
            if _is_lock(type(part)):
                self._share(part)
                for holder in holders[key]:
                    self._share_holder(self._parts[holder], part)
        for key, part in self._parts.items():
            if key not in self._skeleton and key not in self._memo and sys.getsizeof(part) > LARGE_BYTES:
                self._memo[key] = part if is_of_run else self._data(part, self._memo)

    def copy(self) -> Module:
        """Return a new copy."""
        memo = dict(self._memo)
        self._open_cells.clear()
        try:
            for lock in self._loop_locks:  # first: a class with copies of its own would keep a lock on its loop
                self._copy(lock, memo)
            result = self._copy(self._program, memo)
            while self._open_cells:  # last: a function may be in its own closure
                new, old = self._open_cells.pop()
                new.cell_contents = self._copy(old.cell_contents, memo)
        except Exception:  # of a class with copies of its own, say
            return self._program.deepcopy()
        return result

    def _share_holder(self, holder: Any, lock: Any) -> None:
        """Let copies share what holds a lock; of what leads to a module the data beside a lock that guards it."""
        if id(holder) not in self._to_modules:
            self._share(holder)
        elif isinstance(lock, THREAD_MUTEXES + LOOP_MUTEXES):
            parts = _parts_of(holder)
            if isinstance(holder, Module):
                parts = [part for name, part in vars(holder).items() if name not in OF_DSPY]
            for part in parts:
                self._share(part)

    def _share(self, value: Any) -> None:
        """Let copies share a value with all that it refers to, but nothing of a loop beyond its run."""
        waiting = [value]
        while waiting:
            part = waiting.pop()
            is_open = id(part) in self._parts and id(part) not in self._memo and id(part) not in self._to_modules
            if is_open and (self._is_of_run or id(part) not in self._to_loop_locks):
                self._memo[id(part)] = part
                waiting += _parts_of(part)

    def _copy(self, value: Any, memo: dict[int, Any]) -> Any:
        if id(value) in memo:
            return memo[id(value)]
        kind = type(value)
        if id(value) not in self._skeleton:
            return self._data(value, memo)
        if kind is types.FunctionType:
            return self._function(value, memo)
        if kind is dict:
            result = {key: self._copy(item, memo) for key, item in value.items()}
        elif kind in (list, tuple, set, frozenset):
            result = kind([self._copy(item, memo) for item in value])
        elif kind is types.MethodType:
            result = types.MethodType(value.__func__, self._copy(value.__self__, memo))
        elif kind is CACHED:
            result = functools.lru_cache(**value.cache_parameters())(self._copy(value.__wrapped__, memo))
        elif isinstance(value, Module) and not hasattr(kind, "__deepcopy__"):
            return self._with_attributes(value, object.__new__(kind), memo)  # Flex would parse its code in __setstate__
        elif _is_plain(kind):
            return self._with_attributes(value, copy.copy(value), memo)
        else:
            return self._data(value, memo)
        memo[id(value)] = result
        return result

    def _data(self, value: Any, memo: dict[int, Any]) -> Any:
        size = len(memo)
        try:
            result = copy.deepcopy(value, memo)
        except Exception:
            if id(value) in self._to_modules:
                raise
            while len(memo) > size:  # what was copied for it was for nothing
                memo.popitem()
            result = self._memo[id(value)] = value
        memo[id(value)] = result
        return result

    def _with_attributes(self, value: Any, result: Any, memo: dict[int, Any]) -> Any:
        memo[id(value)] = result
        kind = type(value)
        fresh = {"history": []} if isinstance(value, Module) else {"_loop": None} if _is_of_loop(kind) else {}
        for name, part in vars(value).items():
            vars(result)[name] = fresh[name] if name in fresh else self._copy(part, memo)
        return result

    def _function(self, value: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
        cells = value.__closure__ or ()
        for cell in cells:
            if id(cell) in self._skeleton and id(cell) not in memo:
                memo[id(cell)] = types.CellType()
                self._open_cells.append((memo[id(cell)], cell))
        own_cells = tuple(memo.get(id(cell), cell) for cell in cells)
        result = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, own_cells)
        memo[id(value)] = result
        for name in (*functools.WRAPPER_ASSIGNMENTS, "__defaults__", "__kwdefaults__", "__dict__"):
            if (part := getattr(value, name, None)) is not None:
                setattr(result, name, self._copy(part, memo))
        return result


def _leading_to(targets: Iterable[Any], holders: dict[int, list[int]]) -> set[int]:
    reached, waiting = set[int](), [id(target) for target in targets]
    while waiting:
        key = waiting.pop()
        if key not in reached:
            reached.add(key)
            waiting += holders.get(key, ())
    return reached


def _parts_of(value: Any) -> list[Any]:
    """List what a value holds directly, but what cannot change."""
    if isinstance(value, types.MethodType):
        parts = [value.__self__]
    elif isinstance(value, types.FunctionType):
        parts = [*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__, vars(value)]
    elif _is_leaf(type(value)):
        return []
    else:
        attributes: Any = getattr(value, "__dict__", None)
        parts = [part for part in gc.get_referents(value) if part is not attributes]
        parts += [] if attributes is None else attributes.values()
    return [part for part in parts if not isinstance(part, VALUES)]


_by_kind = functools.lru_cache(maxsize=1024)  # parts may be a million


@_by_kind
def _is_leaf(kind: type) -> bool:
    return issubclass(kind, LEAVES)


@_by_kind
def _is_lock(kind: type) -> bool:
    """Whether objects of a class are locks or limiters, whoever wrote it."""
    return issubclass(kind, LOCKS + LOOP_LOCKS) or (hasattr(kind, "acquire") and not issubclass(kind, Module))


@_by_kind
def _is_of_loop(kind: type) -> bool:
    return issubclass(kind, LOOP_LOCKS) or inspect.iscoroutinefunction(getattr(kind, "acquire", None))


@_by_kind
def _is_plain(kind: type) -> bool:
    """Whether objects of a class are nothing but their attributes; pydantic's, such as ``dspy.Tool``, are."""
    if kind is types.SimpleNamespace or hasattr(kind, "__pydantic_validator__"):
        return True
    bodies = [vars(base) for base in kind.__mro__[:-1]]
    return "__dict__" in dir(kind) and not any(COPY_HOOKS & body.keys() or body.get("__slots__") for body in bodies)
