"""AsyncGEPA's variants by name: a base, and changes after plus signs, as in `async-full+prefix=0.5+slots=32`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dspy_flashevolve import FLASHEVOLVE, ConfigurationError, Workflow

ADAPTIVE_START = 8
"""Slots that an adaptive run begins with (`dspy.settings.num_threads`)."""
ADAPTIVE_MOST = 256
"""Slots that an adaptive run may come to (`max_concurrency`)."""
MEDIAN_SECONDS = 10.0
"""How often the median rule moves slots."""

Options = dict[str, Any]
"""AsyncGEPA's own arguments."""
Change = Callable[[Options, int], None]
"""Changes the arguments of a run with a number of slots."""


def _guarded(number: int, seed: int) -> Options:
    from dspy_flashevolve import Guarded

    return {"search": "pareto", "staleness": Guarded(max_gap=number)}


def _combee(number: int, seed: int) -> Options:
    from benchmarks.combee import CombeeReflection

    proposer = CombeeReflection(seed=seed)
    return {"schedule": "lockstep", "reflection_minibatch_size": number, "instruction_proposer": proposer}


PLAIN: dict[str, Options] = {
    "async": {},
    "async-full": {"search": "pareto", "staleness": "full"},
    "async-reflective": {"search": "pareto", "staleness": "reflective"},
    "flashevolve": dict(FLASHEVOLVE),
    "lockstep": {"schedule": "lockstep"},
}
"""Base -> AsyncGEPA's own arguments."""
NUMBERED: dict[str, tuple[int, Callable[[int, int], Options]]] = {
    "async-guarded": (0, _guarded),
    "combee": (1, _combee),
}
"""Base before the number -> the least number, and AsyncGEPA's own arguments for a number and a seed."""


def _slots(text: str) -> Change:
    if text == "adaptive":
        return lambda options, slots: options.update(num_threads=None, max_concurrency=ADAPTIVE_MOST)
    number = _whole(text, 1)
    return lambda options, slots: options.update(num_threads=number)


def _workflow(**changed: Any) -> Change:
    """Other fields of the workflow; raises `ConfigurationError` for what cannot be."""
    replace(Workflow(), **changed)

    def change(options: Options, slots: int) -> None:
        options["workflow"] = replace(options.get("workflow", Workflow()), **changed)

    return change


def _share(field: str) -> Callable[[str], Change]:
    return lambda text: _workflow(**{field: float(text)})


def _admission(text: str) -> Change:
    kind, _, digits = text.partition(":")
    if kind != "live":
        raise ValueError(text)
    return _workflow(live_steps=_whole(digits, 1))


def _controller(text: str) -> Change:
    return _workflow(median_seconds={"median": MEDIAN_SECONDS, "none": None}[text])


def _workers(text: str) -> Change:
    """Bound the requests that stages may have in flight, as in rollout:8,propose:4."""
    pools = (pool.partition(":") for pool in text.split(","))
    return _workflow(workers={stage: _whole(number, 1) for stage, _, number in pools})


def _minibatch(text: str) -> Change:
    number = _whole(text, 1)
    return lambda options, slots: options.update(reflection_minibatch_size=number)


def _named(argument: str, *values: str) -> Callable[[str], Change]:
    def read(text: str) -> Change:
        if text not in values:
            raise ValueError(text)
        return lambda options, slots: options.update({argument: text})

    return read


CHANGES: dict[str, tuple[str, Callable[[str], Change]]] = {
    "slots": ("adaptive or a number", _slots),
    "search": ("edits or pareto", _named("search", "edits", "pareto")),
    "staleness": ("full, guarded or reflective", _named("staleness", "full", "guarded", "reflective")),
    "minibatch": ("a number", _minibatch),
    "prefix": ("a share", _share("validate")),
    "admission": ("live:N", _admission),
    "controller": ("median or none", _controller),
    "workers": ("STAGE:N,...", _workers),
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
        >>> variant("async-full+slots=32").options()
        {'search': 'pareto', 'staleness': 'full', 'num_threads': 32}
    """
    first, *others = name.split("+")
    base = _base(first)
    if base is None:
        numbered = [f"{prefix}-N (N >= {least})" for prefix, (least, _) in NUMBERED.items()]
        changes = ", ".join(f"{key}={spelling}" for key, (spelling, _) in CHANGES.items())
        raise ValueError(
            f"unknown method {name!r}; there are {', '.join([*PLAIN, *numbered])}, and with changes, as in "
            f"async+prefix=0.5+slots=32: {changes}"
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
    except (KeyError, ValueError, ConfigurationError) as error:
        raise ValueError(f"unknown method {name!r}: {key} is {text!r}, expected {spelling}") from error


def _check_combination(name: str, base: Options, written: dict[str, str]) -> None:
    if base.get("schedule") == "lockstep" and (wrong := [key for key in written if key != "slots"]):
        raise ValueError(f"unknown method {name!r}: lockstep takes one step at a time, without {', '.join(wrong)}")


def _whole(text: str, least: int) -> int:
    if not re.fullmatch(r"\d+", text) or int(text) < least:
        raise ValueError(f"{text!r} is no whole number of at least {least}")
    return int(text)
