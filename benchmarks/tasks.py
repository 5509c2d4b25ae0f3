"""The kinds of house rules task that schedules and policies are compared on, by name."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from benchmarks.models import DEFAULT_MODEL, reply_model_named
from dspy_flashevolve.sim import HouseRules


@dataclass(frozen=True)
class TaskKind:
    """A kind of house rules task; see `HouseRules` and `ReplyModel` for the fields.

    A model whose own `crowding` is higher keeps it.
    """

    rules: int = 24
    rules_per_example: int = 6
    crowding: float = 0.0

    def task(self, seed: int, model: str = DEFAULT_MODEL) -> HouseRules:
        """The task of that seed, for the simulated model of that name."""
        named = reply_model_named(model)
        own = replace(named, crowding=max(named.crowding, self.crowding))
        return HouseRules(rules=self.rules, rules_per_example=self.rules_per_example, seed=seed, reply_model=own)


TASKS = {
    "few": TaskKind(),
    "many": TaskKind(rules=72, rules_per_example=8),
}
"""Few improvements that add up; many of them."""


def task_kind(name: str) -> TaskKind:
    """A kind by its name, with changes after a colon; raises `ValueError` for what is none.

    Example:
        >>> task_kind("many:rules=96,crowding=0.02")
        TaskKind(rules=96, rules_per_example=8, crowding=0.02)
    """
    base, _, changes = name.partition(":")
    numbers = {one.name: int if one.type == "int" else float for one in fields(TaskKind)}
    try:
        pairs = [change.split("=") for change in changes.split(",") if change]
        return replace(TASKS[base], **{key: numbers[key](value) for key, value in pairs})
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"unknown task {name!r}; there are {', '.join(TASKS)}, each alone or with changes of {', '.join(numbers)}, "
            "as in many:rules=96,crowding=0.02"
        ) from error
