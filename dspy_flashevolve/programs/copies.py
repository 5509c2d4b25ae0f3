"""Copies of a program: what a rollout changes is its own, and nothing of the student is changed but what locks guard.

dspy.GEPA runs a candidate on ``student.deepcopy()``, which its threads share; a rollout here has a copy of its own.

=====================================================  ===============================================================
in the program                                         in the copy
=====================================================  ===============================================================
modules, lists, dicts, sets, tuples, objects           copied, at any depth; a module's call history is empty
bound methods, ``partial``, a module's ``lru_cache``   bound to the copy of what they were bound to
``dspy.Tool``, callable objects                        copied, with the function that they call
functions without a closure, classes                   shared: they hold nothing of the program's
functions with a closure, or with defaults             new ones over the copies of what belongs to the program; what
                                                       does not (a counter or a client of the caller's) is shared
an object, a dict, a list or a closure with a lock,    shared whole, with all that it refers to; with a lock of
a semaphore, an event, a queue, a thread pool, a memo  asyncio's or anyio's: copied once a run (``locks.py``)
a module with a lock, or what refers to a module       copied, but the data beside the lock is shared
LMs, dspy callbacks, event loops, tasks, threads       shared, and so is a plain object that holds a thread or a task
objects that cannot be copied (a connection, say), or  shared; one that holds such an object is copied attribute by
have a ``__del__``                                     attribute
more than ``LARGEST`` elements, 64 kB of an array      copied once, shared by the rollouts: the cost of a rollout does
                                                       not grow with the data that a program carries
=====================================================  ===============================================================

An object whose class says itself how it is copied (``__deepcopy__``, ``__reduce__``, ``__slots__`` ...) and that has no
lock is copied as ``copy.deepcopy`` does it.
"""

from __future__ import annotations

import copy
import functools
import io
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from types import BuiltinMethodType, CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any, cast

from dspy.primitives.module import Module

from dspy_flashevolve.programs.locks import ACTIVE, LARGEST, LOOP_LOCKS, SHARED, VALUES, guarded, is_empty, parts_of

BYTES_AN_ELEMENT = 64
"""How many bytes of an array count as one element: about what a dict's entry or an attribute takes."""
SEQUENCES = (list, deque)
MAPPINGS = (dict, defaultdict, OrderedDict, Counter)
RESOURCES = (io.IOBase, Executor)
COPY_HOOKS = ("__slots__", "__copy__", "__deepcopy__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__")
"""What a class defines whose objects are more than their attributes, or say themselves how they are copied."""
CACHED = type(functools.lru_cache(lambda: None))
Copied = tuple[Module, Callable[[Module], Module]]
"""A copy of a program, and what makes further ones of it, in any number of threads: they share large data with it."""


def isolated_copy(program: Module) -> Module:
    """Copy a program; the copy shares with it only what the table above says.

    Args:
        program: any module; it is not changed.

    Returns:
        A module of the same class. Its call history is empty.
    """
    return copied(program)[0]


def copied(program: Module) -> Copied:
    """Copy a program with its data, however large, and return what copies that copy for each rollout."""
    shared: dict[int, Any] = {}

    def copy_again(copy: Module) -> Module:
        return _Copying(shared, first=False).program(copy)

    return _Copying(shared, first=True).program(program), copy_again


class _ActiveError(Exception):
    """An object holds a thread or a task, which knows its owner."""


class _UncopyableError(Exception):
    """An object cannot be copied."""


class _Copying:
    """The making of one copy of one program.

    Args:
        shared: id -> what copies share; the first copy fills it.
        first: copy large data, too, and say that further copies share it.
    """

    def __init__(self, shared: dict[int, Any], first: bool) -> None:
        self._shared, self._first = shared, first
        self._memo: dict[int, Any] = {}
        self._own: set[int] = set()
        self._cells: list[tuple[CellType, CellType]] = []
        self._whole = False  # raise for what cannot be copied
        self._elements = 0
        self._modules = 0

    def program(self, program: Module) -> Module:
        self._memo.update(
            {id(lm): lm for predictor in program.predictors() if (lm := getattr(predictor, "lm", None)) is not None}
        )
        if self._first:
            self._walk(program)
            self._shared.update(guarded(program, across_loops=True))
        self._memo.update(self._shared)  # copy.deepcopy, which copies classes with ways of their own, looks there
        result = self.copy(program)
        while self._cells:  # last: a closure may refer to the module that holds its function
            new, old = self._cells.pop()
            new.cell_contents = self.copy(old.cell_contents)
        if self._first:
            self._shared.update(guarded(result, across_loops=False))
        return cast(Module, result)

    def _walk(self, program: Module) -> None:
        """Collect what belongs to the program: all that it holds, but not what functions have in their closures."""
        waiting: list[Any] = [program]
        while waiting:
            value = waiting.pop()
            if type(value) not in VALUES and not isinstance(value, SHARED) and id(value) not in self._own:
                self._own.add(id(value))
                if not isinstance(value, FunctionType):
                    waiting += parts_of(value)

    def copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in VALUES or isinstance(value, SHARED):
            return value
        if isinstance(value, Module) or (kind is FunctionType and _holds(value)):
            self._modules += 1
        if id(value) in self._memo:
            return self._memo[id(value)]
        if id(value) in self._shared:
            return value
        elements, modules = self._elements, self._modules
        result = self._copy_by_kind(value, kind)
        large = self._elements - elements > LARGEST and self._modules == modules
        if large or isinstance(value, LOOP_LOCKS):
            self._elements = elements
            if self._first and result is not value:
                self._shared[id(result)] = result
        return result

    def _copy_by_kind(self, value: Any, kind: type) -> Any:
        if isinstance(value, Module):
            return self._module(value)
        if kind in SEQUENCES or kind in MAPPINGS:
            return self._container(value)
        if kind in (tuple, set, frozenset):
            self._elements += len(value)
            items = [self.copy(item) for item in value]
            same = kind is not set and all(new is old for new, old in zip(items, value, strict=True))
            return self._keep(value, value if same else kind(items))
        if kind in (MethodType, BuiltinMethodType):
            return self._method(value)
        if kind is functools.partial:
            arguments = [self.copy(part) for part in (value.func, value.args, value.keywords)]
            return self._keep(value, functools.partial(arguments[0], *arguments[1], **arguments[2]))
        if kind is CACHED:
            called = self.copy(value.__wrapped__)
            same = called is value.__wrapped__
            return self._keep(value, value if same else functools.lru_cache(**value.cache_parameters())(called))
        if kind is FunctionType:
            return self._function(value) if _holds(value) else value
        return self._object(value)

    def _keep(self, value: Any, result: Any) -> Any:
        self._memo[id(value)] = result
        return result

    def _module(self, module: Module) -> Module:
        result = self._keep(module, copy.copy(module))
        whole, self._whole = self._whole, False
        # copy.copy goes through __getstate__, which drops history and callbacks, and __setstate__, which renews them.
        for name, value in vars(module).items():
            if name == "history":
                result.history = []
            else:
                vars(result)[name] = list(value) if name == "callbacks" else self.copy(value)
        self._whole = whole
        return result

    def _container(self, value: Any) -> Any:
        result = self._keep(value, copy.copy(value))  # keeps a deque's length and a defaultdict's factory
        self._elements += len(value)
        result.clear()
        if isinstance(value, dict):
            mapping = cast("dict[Any, Any]", value)
            result.update({self.copy(key): self.copy(item) for key, item in mapping.items()})
            if isinstance(value, defaultdict):
                result.default_factory = self.copy(cast(Any, value).default_factory)
        else:
            result.extend(self.copy(item) for item in value)
        return result

    def _method(self, value: Any) -> Any:
        owner = value.__self__
        bound = self.copy(owner)
        if bound is owner:
            return value
        return MethodType(value.__func__, bound) if isinstance(value, MethodType) else getattr(bound, value.__name__)

    # Functions

    def _function(self, value: FunctionType) -> FunctionType:
        cells = tuple(map(self._cell, value.__closure__ or ()))
        result = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        self._keep(value, result)
        for name in ("__annotations__", "__doc__", "__module__", "__qualname__"):
            setattr(result, name, getattr(value, name))
        if value.__defaults__:
            result.__defaults__ = tuple(map(self._of_closure, value.__defaults__))
        if value.__kwdefaults__:
            result.__kwdefaults__ = {name: self._of_closure(default) for name, default in value.__kwdefaults__.items()}
        vars(result).update({name: self._of_closure(attribute) for name, attribute in vars(value).items()})
        return result

    def _cell(self, cell: CellType) -> CellType:
        """Copy a variable of a closure; what is not the program's stays the caller's, who may read it, or assign."""
        if id(cell) in self._shared:
            return cell
        if id(cell) in self._memo:
            return self._memo[id(cell)]
        if self._first and (is_empty(cell) or not self._reaches(cell.cell_contents, set(), self._own)):
            return self._share(cell)
        new = CellType()
        self._cells.append((new, cell))
        return self._keep(cell, new)

    def _of_closure(self, value: Any) -> Any:
        reached = not self._first or self._reaches(value, set(), self._own)
        return self.copy(value) if reached else self._share(value)

    def _reaches(self, value: Any, seen: set[int], own: Collection[int] = ()) -> bool:
        """Whether a module, or one of the objects ``own``, can be reached from a value."""
        if isinstance(value, Module) or id(value) in own:
            return True
        if type(value) in VALUES or isinstance(value, SHARED) or id(value) in seen or len(seen) > LARGEST:
            return False
        seen.add(id(value))
        return any(self._reaches(part, seen, own) for part in parts_of(value))

    # Objects

    def _object(self, value: Any) -> Any:
        if self._whole:
            return self._whole_object(value)
        result, error = self._attempt(self._whole_object, value)
        if error is None:
            return result
        if isinstance(value, RESOURCES + ACTIVE) or not _is_plain(value) or hasattr(value, "__del__"):
            return self._share(value)
        opens = error is not _ActiveError
        return (
            self._copy_attributes(value)
            if opens or not self._first or self._reaches(value, set())
            else self._share(value)
        )

    def _whole_object(self, value: Any) -> Any:
        """Copy an object and all that is in it.

        Raises:
            Exception: something in it cannot be copied.
        """
        if isinstance(value, ACTIVE):
            raise _ActiveError
        if isinstance(value, RESOURCES) or hasattr(value, "__del__"):  # the end of a copy must close nothing
            raise _UncopyableError
        if not _is_plain(value):
            size = len(self._memo)
            result = copy.deepcopy(value, self._memo)
            self._elements += len(self._memo) - size + sys.getsizeof(result) // BYTES_AN_ELEMENT
            return result
        result = self._keep(value, copy.copy(value))
        self._elements += len(vars(value))
        vars(result).update({name: self.copy(item) for name, item in vars(value).items()})
        return result

    def _copy_attributes(self, value: Any) -> Any:
        """Copy an object attribute by attribute, and share those that cannot be copied."""
        result = self._keep(value, copy.copy(value))
        for name, item in vars(value).items():
            part, error = self._attempt(self.copy, item)
            if error is not None:
                reached = not self._first or self._reaches(item, set())
                part = self.copy(item) if reached else self._share(item)
            vars(result)[name] = part
        return result

    def _attempt(self, copying: Callable[[Any], Any], value: Any) -> tuple[Any, type[Exception] | None]:
        """Copy a value with all that is in it; the type of the error where that fails."""
        size, self._whole = len(self._memo), True
        try:
            return copying(value), None
        except Exception as error:
            while len(self._memo) > size:  # what was copied for it was for nothing
                self._memo.popitem()
            return None, type(error)
        finally:
            self._whole = False

    def _share(self, value: Any) -> Any:
        if self._first and type(value) not in VALUES:
            self._shared[id(value)] = value
        return value


def _is_plain(value: Any) -> bool:
    """Whether an object is nothing but its attributes."""
    return hasattr(value, "__dict__") and _has_plain_objects(type(value))


@functools.lru_cache(maxsize=256)
def _has_plain_objects(kind: type) -> bool:
    if kind is SimpleNamespace or (hasattr(kind, "model_fields") and hasattr(kind, "__pydantic_validator__")):
        return True  # pydantic's, such as dspy.History and dspy.Tool
    own = any(name in vars(base) for base in kind.__mro__[:-1] for name in COPY_HOOKS)
    return not own and kind.__new__ is object.__new__


def _holds(function: FunctionType) -> bool:
    """Whether a function holds something that can change."""
    return any(type(part) not in VALUES for part in parts_of(function))
