"""What a named workload is: a DSPy program, a metric with feedback, where its rows come from, and its size."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dspy

from benchmarks.batching import profile_named
from benchmarks.methods import Workload
from dspy_flashevolve.sim import LengthLaw, Profile

Metric = Callable[..., dspy.Prediction]


@dataclass(frozen=True)
class Size:
    """How many examples each split has, none below 0; None for all that its pool has left."""

    train: int | None
    val: int | None
    test: int | None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative, got {value!r}")


@dataclass(frozen=True)
class Pools:
    """The examples that the splits are drawn from.

    Attributes:
        train: Of the training set, and of every split that has no pool of its own.
        val: Of the validation set alone, or None.
        test: Of the test set alone, or None.
    """

    train: Sequence[dspy.Example]
    val: Sequence[dspy.Example] | None = None
    test: Sequence[dspy.Example] | None = None


@dataclass(frozen=True)
class Definition:
    """A workload without its language models and rows.

    Attributes:
        name: What `workload_named` is asked for.
        size: The splits' default sizes.
        pools: Reads the rows; raises `RowsMissing` where there are none.
        question: The input by which two examples are the same.
        program: Makes a fresh program with the seed instructions.
        metric: dspy.GEPA's five arguments; gives back score, from 0 to 1, and feedback.
        outputs: Each predictor's name, as `named_predictors` has it, and the field of the program's prediction that
            holds what this predictor wrote.
        reply_length: How long a simulated backend's replies to this program are. With `reflection_length` it is
            fitted to a published pace of GEPA (docs/benchmarks.md, "Beside the papers"), else a choice of ours, after
            the kind of answer.
        reflection_length: How long its reflections are; None for the profile's own law.
    """

    name: str
    size: Size
    pools: Callable[[], Pools]
    question: str
    program: Callable[[], dspy.Module]
    metric: Metric
    outputs: Mapping[str, str]
    reply_length: LengthLaw
    reflection_length: LengthLaw | None = None

    def drawn(self, size: Size, seed: int) -> NamedWorkload:
        """The workload with its rows.

        Raises:
            RowsMissing: If the rows are nowhere to be found.
            ValueError: If there are fewer rows than `size` asks for.
        """
        pools = _without_repeats(self.pools(), self.question)
        rest = _shuffled(pools.train, seed, "train")
        train, rest = _take(rest, size.train, self.name, "train")
        if pools.val is not None:
            val, _ = _take(_shuffled(pools.val, seed, "val"), size.val, self.name, "val")
        else:
            val, rest = _take(rest, size.val, self.name, "val")
        own = rest if pools.test is None else _shuffled(pools.test, seed, "test")
        test, _ = _take(own, size.test, self.name, "test")
        lengths = (self.reply_length, self.reflection_length)
        return NamedWorkload(self.name, self.program, self.metric, train, val, test, dict(self.outputs), *lengths)


@dataclass(frozen=True)
class NamedWorkload:
    """A workload with its rows; `served` adds the language models. See `Definition` for the attributes.

    `true_score` is `methods.Workload`'s.
    """

    name: str
    program: Callable[[], dspy.Module]
    metric: Metric
    trainset: list[dspy.Example]
    valset: list[dspy.Example]
    testset: list[dspy.Example]
    outputs: Mapping[str, str]
    reply_length: LengthLaw
    reflection_length: LengthLaw | None = None
    true_score: Callable[[Mapping[str, str]], float] | None = None

    @property
    def size(self) -> Size:
        """How many examples there are."""
        return Size(len(self.trainset), len(self.valset), len(self.testset))

    def served(
        self, task_lm: dspy.LM, reflection_lm: dspy.LM | None = None, adapter: dspy.Adapter | None = None
    ) -> Workload:
        """What the benchmarks' methods run; `reflection_lm` is a copy of `task_lm` where none is given."""
        return Workload(
            program=self.program,
            trainset=self.trainset,
            valset=self.valset,
            metric=self.metric,
            task_lm=task_lm,
            reflection_lm=reflection_lm or task_lm.copy(),
            adapter=adapter,
            true_score=self.true_score,
        )

    def profile(self, base: str | Profile) -> Profile:
        """The simulated backend with the lengths of this workload's replies and reflections."""
        known = profile_named(base) if isinstance(base, str) else base
        reflection_length = self.reflection_length or known.reflection_length
        return replace(known, task_length=self.reply_length, reflection_length=reflection_length)


def _without_repeats(pools: Pools, question: str) -> Pools:
    """Each question once: a test pool keeps all of its own, train gives way to it, and val to both."""
    seen: set[str] = set()

    def fresh(examples: Sequence[dspy.Example]) -> list[dspy.Example]:
        kept: list[dspy.Example] = []
        for example in examples:
            key = " ".join(str(example[question]).split())
            if key not in seen:
                seen.add(key)
                kept.append(example)
        return kept

    test = None if pools.test is None else fresh(pools.test)
    train = fresh(pools.train)
    return Pools(train, None if pools.val is None else fresh(pools.val), test)


def _shuffled(examples: Sequence[dspy.Example], seed: int, pool: str) -> list[dspy.Example]:
    order = list(examples)
    random.Random(f"{pool} {seed}").shuffle(order)
    return order


def _take(
    examples: list[dspy.Example], count: int | None, name: str, split: str
) -> tuple[list[dspy.Example], list[dspy.Example]]:
    if count is not None and count > len(examples):
        raise ValueError(f"{name} has {len(examples)} rows left for {split}, {count} were asked for: ask for fewer")
    return (examples, []) if count is None else (examples[:count], examples[count:])


def text_of(prediction: Any, field: str) -> str:
    """A field of a prediction as text; empty where a program that failed left none."""
    value = prediction.get(field)
    return "" if value is None else str(value)
