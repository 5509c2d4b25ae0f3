"""The kinds of house rules task that schedules and policies are compared on, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import dspy

from benchmarks.models import DEFAULT_MODEL, reply_model_named
from dspy_flashevolve.sim import HouseRules
from dspy_flashevolve.sim.task import OUTPUTS

DECIDES = ("each", "first", "last")
"""Which predictors of a program the metric looks at."""


@dataclass(frozen=True)
class ProgramRules(HouseRules):
    """House rules for a program of several predictors.

    Attributes:
        predictors: How many there are, 1 to 3, one after the other.
        decides: "each": the rules are shared out, and the feedback of a predictor names its own. "first" or "last":
            that one's output is all that counts, and the metric, as most do, gives every predictor the same feedback.
    """

    predictors: int = 1
    decides: str = "each"

    @property
    def _deciding(self) -> str | None:
        """The one output that counts; None where each does."""
        return {"each": None, "first": OUTPUTS[self.predictors - 1], "last": OUTPUTS[0]}[self.decides]

    def program(self, predictors: int | None = None) -> dspy.Module:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See `HouseRules`; by default with the task's own number of predictors."""
        count: Any = predictors or self.predictors
        program = super().program(count)
        if self._deciding is not None:
            single = super().program(1)
            for name, predictor in program.named_predictors():
                predictor.signature = predictor.signature.with_instructions(
                    f"Write the {name}. Follow the house rules."
                )
            held = single.named_predictors()[0][1].signature.instructions  # the seed's rules
            deciding: Any = getattr(program, self._deciding)
            deciding.signature = deciding.signature.with_instructions(held)
        return program

    def true_score(self, instructions: Sequence[str]) -> float:
        """See `HouseRules`."""
        if self._deciding is None or len(instructions) == 1:
            return super().true_score(instructions)
        return super().true_score([instructions[OUTPUTS.index(self._deciding)]])

    def metric(
        self,
        gold: dspy.Example,
        pred: dspy.Prediction,
        trace: Any = None,
        pred_name: str | None = None,
        pred_trace: Any = None,
    ) -> dspy.Prediction:
        """See `HouseRules`."""
        if self._deciding is None:
            return super().metric(gold, pred, trace, pred_name, pred_trace)
        return super().metric(gold, dspy.Prediction(answer=pred[self._deciding]))


@dataclass(frozen=True)
class TaskKind:
    """A kind of house rules task; see `ProgramRules`, `HouseRules` and `ReplyModel` for the fields.

    A model whose own `crowding` is higher keeps it.
    """

    rules: int = 24
    rules_per_example: int = 6
    crowding: float = 0.0
    predictors: int = 1
    decides: str = "each"

    def __post_init__(self) -> None:
        if self.predictors not in (1, 2, 3) or self.decides not in DECIDES:
            raise ValueError(
                f"expected predictors=1, 2 or 3 and decides one of {', '.join(DECIDES)}, got {self.predictors!r} and "
                f"{self.decides!r}"
            )

    def task(self, seed: int, model: str = DEFAULT_MODEL) -> HouseRules:
        """The task of that seed, for the simulated model of that name."""
        named = reply_model_named(model)
        own = replace(named, crowding=max(named.crowding, self.crowding))
        return ProgramRules(
            rules=self.rules,
            rules_per_example=self.rules_per_example,
            seed=seed,
            reply_model=own,
            predictors=self.predictors,
            decides=self.decides,
        )


TASKS = {
    "few": TaskKind(),
    "many": TaskKind(rules=72, rules_per_example=8),
}
"""Few improvements that add up; many of them. Each has one predictor; `few:predictors=3,decides=last` has three."""


def task_kind(name: str) -> TaskKind:
    """A kind by its name, with changes after a colon; raises `ValueError` for what is none.

    Example:
        >>> task_kind("many:rules=96,crowding=0.02")
        TaskKind(rules=96, rules_per_example=8, crowding=0.02, predictors=1, decides='each')
    """
    base, _, changes = name.partition(":")
    kinds = {"int": int, "float": float, "str": str}
    numbers = {one.name: kinds[str(one.type)] for one in fields(TaskKind)}
    try:
        pairs = [change.split("=") for change in changes.split(",") if change]
        return replace(TASKS[base], **{key: numbers[key](value) for key, value in pairs})
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"unknown task {name!r}; there are {', '.join(TASKS)}, each alone or with changes of {', '.join(numbers)}, "
            "as in many:rules=96,crowding=0.02"
        ) from error
