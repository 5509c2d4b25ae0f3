"""AsyncGEPA's variants by name: a base, and changes after plus signs, as in `async-full+prefix=0.5+slots=32`.

A name is checked as soon as it is read; what a controller needs is imported when its run is built.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

ADAPTIVE_START = 8
"""Slots that an adaptive run begins with (`dspy.settings.num_threads`)."""
ADAPTIVE_MOST = 256
"""Slots that an adaptive run may come to (`max_concurrency`)."""

Options = dict[str, Any]
"""AsyncGEPA's own arguments."""
Change = Callable[[Options, int], None]
"""Changes the arguments of a run with a number of slots."""


def _guarded(number: int, seed: int) -> Options:
    from dspy_flashevolve import Guarded

    return {"staleness": Guarded(max_gap=number)}


def _train(number: int, seed: int) -> Options:
    from dspy_flashevolve import Reflective

    return {"staleness": Reflective(batch=number, take="proposals", heads=True)}


def _combee(number: int, seed: int) -> Options:
    from dspy_flashevolve import CombeeReflection

    proposer = CombeeReflection(seed=seed)
    return {"schedule": "lockstep", "reflection_minibatch_size": number, "instruction_proposer": proposer}


PLAIN: dict[str, Options] = {
    "async": {},
    "async-full": {"staleness": "full"},
    "async-patch": {"staleness": "patch"},
    "async-lockstep": {"schedule": "lockstep"},
    "lockstep": {"schedule": "lockstep"},
}
"""Base -> AsyncGEPA's own arguments."""
NUMBERED: dict[str, tuple[int, Callable[[int, int], Options]]] = {
    "async-live": (1, lambda number, seed: {"max_live_tickets": number}),
    "async-guarded": (0, _guarded),
    "async-train": (1, _train),
    "combee": (1, _combee),
}
"""Base before the number -> the least number, and AsyncGEPA's own arguments for a number and a seed."""


def _slots(text: str) -> Change:
    if text == "adaptive":
        return lambda options, slots: options.update(num_threads=None, max_concurrency=ADAPTIVE_MOST)
    number = _whole(text, 1)
    return lambda options, slots: options.update(num_threads=number)


def _speculation(text: str) -> Change:
    from dspy_flashevolve.scheduling import DEFAULT_SPECULATION

    value = {"on": DEFAULT_SPECULATION, "off": None}[text]
    return lambda options, slots: options.update(speculation=value)


def _speculating(field: str, off: float | None) -> Callable[[str], Change]:
    """One field of `Speculation`; beside `speculation=off` every other one stays off."""

    def read(text: str) -> Change:
        from dspy_flashevolve.engine.speculation import NOT_SPECULATIVE
        from dspy_flashevolve.scheduling import DEFAULT_SPECULATION

        value = off if text == "off" else float(text)
        replace(NOT_SPECULATIVE, **{field: value})  # raises for what cannot be

        def change(options: Options, slots: int) -> None:
            before = options.get("speculation", DEFAULT_SPECULATION) or NOT_SPECULATIVE
            options["speculation"] = replace(before, **{field: value})

        return change

    return read


def _order(text: str) -> Change:
    if text not in ("value", "deepest"):
        raise ValueError(text)
    return lambda options, slots: options.update(slot_order=text)


def _admission(text: str) -> Change:
    kind, _, digits = text.partition(":")
    number = _whole(digits, {"gap": 0, "live": 1}[kind])

    def change(options: Options, slots: int) -> None:
        from dspy_flashevolve import GapBound, LiveTickets
        from dspy_flashevolve.engine.admission import for_slots

        width = options.get("max_concurrency") or options.get("num_threads") or slots
        bound = GapBound(number, for_slots(width, generations=0.0)) if kind == "gap" else LiveTickets(number)
        options["admission"] = bound

    return change


def _controller(text: str) -> Change:
    kind, _, digits = text.partition(":")
    if text not in ("none", "median", "backlog") and kind != "fixed":
        raise ValueError(text)
    number = _whole(digits, 1) if kind == "fixed" else 0

    def change(options: Options, slots: int) -> None:
        options["controller"] = None
        if kind != "none":
            from dspy_flashevolve.engine import control

            rules = {"median": control.MedianRate, "backlog": control.Backlog, "fixed": lambda: control.Fixed(number)}
            options["controller"] = rules[kind]()

    return change


CHANGES: dict[str, tuple[str, Callable[[str], Change]]] = {
    "slots": ("adaptive or a number", _slots),
    "speculation": ("on or off", _speculation),
    "prefix": ("off or a share", _speculating("validate", 1.0)),
    "rollout": ("off or a share", _speculating("rollout", 1.0)),
    "screen": ("off or a share", _speculating("screen", 1.0)),
    "racing": ("off or a margin", _speculating("racing", None)),
    "order": ("value or deepest", _order),
    "admission": ("gap:N or live:N", _admission),
    "controller": ("none, median, backlog or fixed:N", _controller),
}
"""Name of a change -> what it may be, and its reader; they are made in this order, however they are written."""


@dataclass(frozen=True)
class Variant:
    """What a name stands for.

    Attributes:
        name: The name.
        base: AsyncGEPA's own arguments for a seed, before the changes.
        changes: In the order in which they are made.
    """

    name: str
    base: Callable[[int], Options]
    changes: tuple[Change, ...] = ()

    def options(self, seed: int = 0, slots: int = 64) -> Options:
        """AsyncGEPA's own arguments, fresh for each run."""
        options = self.base(seed)
        for change in self.changes:
            change(options, slots)
        return options


def variant(name: str) -> Variant:
    """The variant of that name; raises `ValueError` for a name that is none, with what is wrong.

    Example:
        >>> variant("async-full+order=value+slots=32").options()
        {'staleness': 'full', 'num_threads': 32, 'slot_order': 'value'}
    """
    first, *others = name.split("+")
    base = _base(first)
    if base is None:
        numbered = [f"{prefix}-N (N >= {least})" for prefix, (least, _) in NUMBERED.items()]
        changes = ", ".join(f"{key}={spelling}" for key, (spelling, _) in CHANGES.items())
        raise ValueError(
            f"unknown method {name!r}; there are {', '.join([*PLAIN, *numbered])}, and with changes, as in "
            f"async+prefix=0.5+order=value: {changes}"
        )
    written: dict[str, str] = {}
    for other in others:
        key, equals, text = other.partition("=")
        if not equals or key not in CHANGES:
            raise ValueError(f"unknown method {name!r}: {other!r} is no change; there are {', '.join(CHANGES)}")
        if key in written:
            raise ValueError(f"unknown method {name!r}: {key} stands there twice")
        written[key] = text
    _check_combination(name, base(0), written)
    return Variant(name, base, tuple(_read(name, key, written[key]) for key in CHANGES if key in written))


def _base(name: str) -> Callable[[int], Options] | None:
    """Gives AsyncGEPA's own arguments for a seed; `None` for a name that is no base."""
    if name in PLAIN:
        return lambda seed: dict(PLAIN[name])
    found = re.fullmatch(r"(.+)-(0|[1-9]\d*)", name)
    if found is None or found[1] not in NUMBERED:
        return None
    (least, options), number = NUMBERED[found[1]], int(found[2])
    return None if number < least else lambda seed: options(number, seed)


def _read(name: str, key: str, text: str) -> Change:
    spelling, read = CHANGES[key]
    try:
        return read(text)
    except (KeyError, ValueError) as error:
        raise ValueError(f"unknown method {name!r}: {key} is {text!r}, expected {spelling}") from error


def _check_combination(name: str, base: Options, written: dict[str, str]) -> None:
    if base.get("schedule") == "lockstep" and (wrong := [key for key in written if key != "slots"]):
        raise ValueError(f"unknown method {name!r}: lockstep takes one step at a time, without {', '.join(wrong)}")
    if "max_live_tickets" in base and "admission" in written:
        raise ValueError(f"unknown method {name!r}: it bounds its live tickets already, without admission")


def _whole(text: str, least: int) -> int:
    if not re.fullmatch(r"\d+", text) or int(text) < least:
        raise ValueError(f"{text!r} is no whole number of at least {least}")
    return int(text)
