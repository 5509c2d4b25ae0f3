"""What the locks in a program guard, which is shared by all who run the program at once.

A rate limiter, a memo, a pool of connections: who puts a lock into an object means it to be used by several threads, or
tasks, together. A copy of such an object would count for itself under a lock that it shares with the others: a limiter
of 5 would let 5 requests through for each copy, and a memo would be filled once a copy.

An object is therefore shared whole where one of its attributes, or of its class's, is a lock or a memo
(``functools.lru_cache``), and so is what it refers to. A module, and
what refers to one, cannot be: the candidates differ in it. There the data is shared that stands beside a lock which
keeps others away (a ``Lock``, not a ``Semaphore``), as far as no module is in it.

Locks of asyncio and anyio belong to the event loop on which they are first waited for, and each run may have another
one: what they guard is copied once a run, and shared by its rollouts.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import anyio
from dspy.clients.base_lm import BaseLM
from dspy.predict.predict import Predict
from dspy.primitives.module import Module
from dspy.utils.callback import BaseCallback

LARGEST = 1000
"""Elements of what is copied for each rollout; what has more is copied once, and not looked into for locks. A round
number: so many take up to 4 ms to copy, which an LM call hides, and ten times as many would not be hidden."""
VALUES = frozenset({type(None), bool, int, float, complex, str, bytes, type, type(...), type(NotImplemented)})
"""What cannot change."""
MUTEXES = (type(threading.Lock()), type(threading.RLock()))
SHARED = (
    type, Enum, BaseLM, BaseCallback, ModuleType, ContextVar, weakref.ref,
    threading.Semaphore, threading.local, *MUTEXES,
)  # fmt: skip
"""What copies always share."""
ACTIVE = (asyncio.AbstractEventLoop, asyncio.Future, threading.Thread)
"""They work on objects of their owner's, so that a copy of the owner would wait for them in vain."""

GUARDS = (*MUTEXES, threading.Condition)
"""They keep others away from data, which stands beside them."""
LIMITS = (threading.Semaphore, threading.Event, threading.Barrier, queue.Queue, queue.SimpleQueue, Executor)
"""Threads use them together; what stands beside them need not be meant for that."""
LOOP_GUARDS = (asyncio.Lock, asyncio.Condition, anyio.Lock, anyio.Condition)
LOOP_LIMITS = (
    asyncio.Semaphore, asyncio.Event, asyncio.Queue, anyio.Semaphore, anyio.CapacityLimiter, anyio.Event,
)  # fmt: skip
LOOP_LOCKS = LOOP_GUARDS + LOOP_LIMITS
"""They belong to the loop that they are first waited for on, so that runs cannot share them; rollouts do."""
FACTORIES = (
    threading.Lock, threading.RLock, threading.Condition, threading.Semaphore, threading.BoundedSemaphore,
    asyncio.Lock, asyncio.Condition, asyncio.Semaphore, asyncio.BoundedSemaphore,
)  # fmt: skip
"""A ``defaultdict`` of them makes the lock of a key when it is first asked for."""
NAMES = frozenset({"asyncio", "threading", *(factory.__name__ for factory in FACTORIES)})
"""A function that uses no other names, as ``lambda: asyncio.Semaphore(4)``, makes locks as well."""
MEMO = type(lru_cache(lambda: None))
"""It locks what it remembers, and has to be one for all who ask it."""
OF_DSPY = frozenset(vars(Predict("question -> answer")))
"""Attributes that dspy gives to modules and predictors: a lock of the user's does not guard them."""


@dataclass(frozen=True, slots=True)
class _Lock:
    """What kind of lock something is.

    Args:
        guards: it keeps others away from what stands beside it.
        of_loop: it belongs to an event loop.
    """

    guards: bool
    of_loop: bool


def guarded(program: Module, across_loops: bool) -> dict[int, Any]:
    """Find the locks in a program, and what they guard with all that is in it.

    Args:
        program: it is looked through, closures of its functions included; nothing is changed.
        across_loops: for runs on several event loops: without locks of one, and what refers to them.

    Returns:
        The id of each object -> the object.
    """
    shared: dict[int, Any] = {}

    def share(value: Any) -> bool:
        region = _region(value, across_loops, shared)
        shared.update(region or {})
        return region is not None

    for owner in _held_by(program):
        if not isinstance(owner, Module) and _is_of_dspy(owner):
            continue  # an interpreter's, or dspy.Parallel's, are those of one run of the program
        parts = [*_parts(owner), *_locks_of_class(type(owner))]
        locks = [(part, lock) for part in parts if (lock := _as_lock(part)) is not None]
        for part, _ in locks:
            share(part)
        if not locks and not _can_be_acquired(owner):
            continue
        if (isinstance(owner, Module) or not share(owner)) and any(lock.guards for _, lock in locks):
            for part in _data_of(owner) if isinstance(owner, Module) else parts:
                share(part)
    return shared


def _held_by(program: Module) -> Iterable[Any]:
    """Yield everything that can be reached from a program, itself included."""
    waiting: list[Any] = [program]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) not in seen and not _is_leaf(value):
            seen.add(id(value))
            yield value
            parts = _parts(value)
            is_dspys = not isinstance(value, Module) and _is_of_dspy(value)
            waiting += [part for part in parts if _as_lock(part) is None] if is_dspys else parts


def _region(value: Any, across_loops: bool, known: dict[int, Any]) -> dict[int, Any] | None:
    """Collect a value and all that it refers to; None where copies cannot share it: a module or a loop's lock is in it.

    Args:
        known: what can be shared, and is not looked through again.
    """
    region: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if id(part) in region or id(part) in known or _is_leaf(part):
            continue
        if isinstance(part, Module) or (across_loops and _is_of_loop(part)):
            return None
        region[id(part)] = part
        waiting += _parts(part)
    return region


def _is_leaf(value: Any) -> bool:
    return type(value) in VALUES or isinstance(value, SHARED)


def _is_of_dspy(value: Any) -> bool:
    """Whether dspy defines an object's class, or one that it inherits from."""
    return any(kind.__module__.partition(".")[0] == "dspy" for kind in type(value).__mro__)


def _is_of_loop(value: Any) -> bool:
    return isinstance(value, LOOP_LOCKS) or inspect.iscoroutinefunction(getattr(type(value), "acquire", None))


def _can_be_acquired(value: Any) -> bool:
    """Whether an object is a lock or a limiter by what it can do, whoever wrote it."""
    return callable(getattr(type(value), "acquire", None))


def _as_lock(value: Any) -> _Lock | None:
    """Return what kind of lock a value is; a container of nothing but locks is one, and None stands for no lock."""
    if isinstance(value, (*GUARDS, *LIMITS, MEMO)):
        return _Lock(isinstance(value, GUARDS), of_loop=False)
    if isinstance(value, LOOP_LOCKS):
        return _Lock(isinstance(value, LOOP_GUARDS), of_loop=True)
    if isinstance(value, defaultdict) and _makes_locks(cast(Any, value).default_factory):
        return _as_lock(cast(Any, value).default_factory())
    if _can_be_acquired(value):  # of another library: one of files, of processes, of a data base
        return _Lock(guards=False, of_loop=_is_of_loop(value))
    if isinstance(value, (dict, list, tuple, set, frozenset, deque)) and 0 < len(value) <= LARGEST:  # pyright: ignore[reportUnknownArgumentType]
        items = [_as_lock(part) for part in parts_of(value)]
        return items[0] if all(items) else None
    return None


def _makes_locks(factory: Any) -> bool:
    code: Any = getattr(factory, "__code__", None)
    made = factory.func if isinstance(factory, partial) else factory
    return made in FACTORIES or (code is not None and code.co_names and NAMES.issuperset(code.co_names))


@lru_cache(maxsize=256)
def _locks_of_class(kind: type) -> list[Any]:
    """The locks in the body of a class, which its objects share, and the memos of its methods."""
    bodies = [vars(base) for base in kind.__mro__ if not base.__module__.startswith("dspy.")]
    return [value for body in bodies for value in body.values() if _as_lock(value) is not None]


def _data_of(module: Module) -> list[Any]:
    return [value for name, value in vars(module).items() if name not in OF_DSPY]


def _parts(value: Any) -> Sequence[Any]:
    """As :func:`parts_of`; nothing of a large container, which is copied once a run as it is."""
    is_large = isinstance(value, (dict, list, tuple, set, frozenset, deque)) and len(value) > LARGEST  # pyright: ignore[reportUnknownArgumentType]
    return [] if is_large else parts_of(value)


def parts_of(value: Any) -> list[Any]:
    """List what a value holds directly: elements, attributes, or the variables of a function's closure."""
    if isinstance(value, (MethodType, BuiltinMethodType)):
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if not is_empty(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()]
    if isinstance(value, (ModuleType, *ACTIVE)) or inspect.isclass(value):
        return []
    parts: list[Any] = []
    if isinstance(value, dict):
        parts += cast("dict[Any, Any]", value).values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        parts += cast("Iterable[Any]", value)
    parts += getattr(value, "__dict__", {}).values()
    for name in _slots_of(type(value)):
        held = getattr(value, name, None)
        # pydantic keeps private attributes, and fields that a model does not know, in a dict each
        parts += held.values() if name in ("__pydantic_private__", "__pydantic_extra__") and held else [held]
    return parts


@lru_cache(maxsize=256)
def _slots_of(kind: type) -> list[str]:
    """Name the attributes that objects of a class have outside of their ``__dict__``."""
    names: list[str] = []
    for base in kind.__mro__:
        slots: Any = vars(base).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            is_mangled = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if is_mangled else name)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def is_empty(cell: CellType) -> bool:
    """Whether a variable of a closure has no value (yet)."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False
