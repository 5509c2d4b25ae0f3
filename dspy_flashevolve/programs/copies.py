"""A program copy for each rollout, cheap enough to be made each time."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from enum import Enum
from types import SimpleNamespace
from typing import Any, cast

from dspy.clients.base_lm import BaseLM
from dspy.primitives.module import Module
from dspy.utils.callback import BaseCallback

LARGEST_CONTAINER = 256
"""Containers with more elements are shared: they hold data (a corpus, an index), not state."""
SEQUENCES = (list, deque)
MAPPINGS = (dict, defaultdict, OrderedDict, Counter)
OWN_WAYS = ("__slots__", "__copy__", "__deepcopy__", "__getstate__", "__setstate__", "__reduce__", "__del__")
"""What a class has whose objects are more than their attributes."""
VALUES = (type(None), bool, int, float, complex, str, bytes, Enum, type)
"""What cannot change."""


def isolated_copy(program: Module) -> Module:
    """Copy the tree of modules, their small containers and plain objects; share everything else.

    What a rollout may change is its own: attributes that are rebound, containers (of the standard kinds, with up to
    ``LARGEST_CONTAINER`` elements) that are changed in place, and objects that hold nothing but values, containers,
    modules and further such objects, as many in all, at any depth of the module tree. What holds anything else (a lock,
    a socket, a function), LMs, callbacks, and large containers are shared by reference, as dspy.GEPA shares the whole
    program between its threads. So the cost does not depend on the size of the data that a program carries.

    Args:
        program: any module; it is not changed.

    Returns:
        A module of the same class. Its call history is empty.
    """
    return cast(Module, _copied(program, {}))


def _copied(value: Any, seen: dict[int, Any]) -> Any:
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, Module):
        return _copied_module(value, seen)
    kind = type(value)
    if kind in SEQUENCES or kind in MAPPINGS:
        return value if len(value) > LARGEST_CONTAINER else _copied_container(value, seen)
    if kind is set:
        return value if len(value) > LARGEST_CONTAINER else set(value)
    if kind is tuple:
        if len(value) > LARGEST_CONTAINER:
            return value
        items = tuple(_copied(item, seen) for item in value)
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return _copied_object(value, seen) if _is_plain(value, {id(value)}) else value


def _copied_container(value: Any, seen: dict[int, Any]) -> Any:
    result = copy.copy(value)  # keeps a deque's length and a defaultdict's factory
    result.clear()
    seen[id(value)] = result
    if isinstance(value, dict):
        mapping = cast("dict[Any, Any]", value)
        result.update({key: _copied(item, seen) for key, item in mapping.items()})
    else:
        result.extend(_copied(item, seen) for item in value)
    return result


def _copied_object(value: Any, seen: dict[int, Any]) -> Any:
    result = copy.copy(value)
    seen[id(value)] = result
    vars(result).update({name: _copied(item, seen) for name, item in vars(value).items()})
    return result


def _is_plain(value: Any, seen: set[int]) -> bool:
    """Whether an object is nothing but its attributes, and these are data."""
    kind = type(value)
    if isinstance(value, (*VALUES, BaseLM, BaseCallback)) or not hasattr(value, "__dict__"):
        return False
    if not _is_record(kind) and kind is not SimpleNamespace:
        own = any(name in vars(base) for base in kind.__mro__[:-1] for name in OWN_WAYS)
        if own or kind.__new__ is not object.__new__:
            return False
    return all(_is_data(item, seen) for item in vars(value).values())


def _is_record(kind: type[Any]) -> bool:
    """A class of pydantic's, such as ``dspy.History``."""
    return hasattr(kind, "model_fields") and hasattr(kind, "__pydantic_validator__")


def _is_data(value: Any, seen: set[int]) -> bool:
    if isinstance(value, (*VALUES, Module)) or id(value) in seen:
        return True
    seen.add(id(value))
    if len(seen) > LARGEST_CONTAINER:
        return False
    kind = type(value)
    if kind in SEQUENCES or kind in MAPPINGS or kind in (set, tuple, frozenset):
        items: Iterable[Any] = value.values() if isinstance(value, dict) else value
        return len(value) > LARGEST_CONTAINER or all(_is_data(item, seen) for item in items)
    return _is_plain(value, seen)


def _copied_module(module: Module, seen: dict[int, Any]) -> Module:
    result = copy.copy(module)
    seen[id(module)] = result
    # copy.copy goes through __getstate__, which drops history and callbacks, and __setstate__, which renews them.
    for name, value in vars(module).items():
        if name == "history":
            result.history = []
        else:
            setattr(result, name, _copied(value, seen))
    return result
