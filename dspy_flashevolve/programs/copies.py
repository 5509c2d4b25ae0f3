"""A program copy for each rollout, cheap enough to be made each time."""

from __future__ import annotations

import copy
from typing import Any, cast

from dspy.primitives.module import Module

LARGEST_CONTAINER = 256
"""Containers with more elements are shared: they hold data (a corpus, an index), not state."""


def isolated_copy(program: Module) -> Module:
    """Copy the tree of modules and their small containers; share everything else.

    What a rollout may change is its own: attributes that are rebound, lists, dicts and sets that are
    changed in place, at any depth of the module tree. Opaque objects (retrievers, clients, LMs) and large
    containers are shared by reference, as dspy.GEPA shares the whole program between its threads. So the
    cost does not depend on the size of the data that a program carries.

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
    if kind not in (list, dict, set, tuple) or len(value) > LARGEST_CONTAINER:
        return value
    if kind is dict:
        result: Any = {}
        seen[id(value)] = result
        result.update({key: _copied(item, seen) for key, item in value.items()})
        return result
    if kind is list:
        result = []
        seen[id(value)] = result
        result.extend(_copied(item, seen) for item in value)
        return result
    if kind is set:
        return set(value)
    items = tuple(_copied(item, seen) for item in value)
    return items if any(new is not old for new, old in zip(items, value, strict=True)) else value


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
