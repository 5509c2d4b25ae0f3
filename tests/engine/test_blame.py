"""An exception is traced to the user's object that raised it."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from dspy_flashevolve.engine.errors import hook_that_raised, report_hook


class Selector:
    def select(self) -> None:
        raise LookupError("broken")

    __call__ = select


class Composite:
    def __init__(self, *stoppers: Any) -> None:
        self.stoppers = stoppers

    def __call__(self) -> None:
        for one in self.stoppers:
            one()


def function(*_: Any) -> None:
    raise LookupError("broken")


def raised_by(call: Any) -> Exception:
    with pytest.raises(LookupError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (Selector(), "hook: Selector.select"),
        (function, "hook: function"),
        (functools.partial(function, 1), "hook: function"),
        (Composite(lambda: None, Selector()), "hook: Selector.select"),
    ],
)
def test_objects_functions_and_parts_of_composites_are_named(given: Any, named: str) -> None:
    assert hook_that_raised(raised_by(given), {"other": print, "hook": given, "none": None}) == named


def test_the_innermost_of_the_users_objects_is_named() -> None:
    inner = Selector()

    def outer() -> None:
        inner.select()

    assert hook_that_raised(raised_by(outer), {"outer": outer, "inner": inner}) == "inner: Selector.select"


def test_an_error_of_nobodys_is_not_named() -> None:
    error = raised_by(function)
    assert hook_that_raised(error, {"hook": Selector()}) is None
    report_hook(error, {"hook": Selector()})
    assert not getattr(error, "__notes__", None)
