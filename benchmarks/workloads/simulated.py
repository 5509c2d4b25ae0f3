"""A named workload for a simulated model: real rows and the real program, with house rules in place of the metric.

A simulated model knows no answers, so that the real metric would stay at its floor. Here the examples ask for house
rules as well (`HouseRules`), which the feedback names when a predictor's output misses them: prompts are as long, and
calls as many, as with a real model, and the best possible score is `HouseRules.optimum`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import dspy

from benchmarks.measure import Bench
from benchmarks.methods import Workload
from benchmarks.workloads.definition import NamedWorkload, text_of
from benchmarks.workloads.house_rules import SimMeter
from dspy_flashevolve.sim import HouseRules, ReplyModel, SimServer
from dspy_flashevolve.sim.words import Choices, Rule, words_present


def simulated(workload: NamedWorkload, task: HouseRules) -> NamedWorkload:
    """The workload with house rules as its hidden optimum.

    Rule i belongs to predictor i modulo the number of predictors, as in `HouseRules`.

    Args:
        workload: Its rows become the questions, its program keeps its shape and gets the seed rules.
        task: Decides the rules and which of them an example asks for.
    """
    held_out = task.valset(len(workload.valset) + len(workload.testset))
    return replace(
        workload,
        program=functools.partial(_seeded, workload.program, workload.outputs, task.all_rules()[: task.seed_rules]),
        metric=HouseMetric(dict(workload.outputs), task.reply_model),
        true_score=lambda texts: task.true_score([texts[name] for name in workload.outputs]),
        trainset=_asking(workload.trainset, task.trainset(len(workload.trainset))),
        valset=_asking(workload.valset, held_out[: len(workload.valset)]),
        testset=_asking(workload.testset, held_out[len(workload.valset) :]),
    )


@dataclass(frozen=True)
class HouseMetric:
    """dspy.GEPA's metric: the share of the required rules whose word stands in the output of its predictor.

    Attributes:
        outputs: The predictors' names, and the field of the prediction that each wrote.
        reply_model: How many of the missed rules the feedback does not name.
    """

    outputs: Mapping[str, str]
    reply_model: ReplyModel

    def __call__(
        self, gold: Any, pred: Any, trace: Any = None, pred_name: str | None = None, pred_trace: Any = None
    ) -> dspy.Prediction:
        """Score over all predictors, and feedback that names the rules that `pred_name` missed (None for all)."""
        required: Sequence[Rule] = gold.required
        owners = {rule: _owner(rule, self.outputs) for rule in required}
        missed = [
            rule for rule, owner in owners.items() if not words_present(text_of(pred, self.outputs[owner]), [rule.word])
        ]
        concerned = [rule for rule in missed if pred_name not in self.outputs or owners[rule] == pred_name]
        drawn = [[str(rule) for rule in required], [text_of(pred, field) for field in self.outputs.values()]]
        feedback = self.reply_model.feedback(concerned, Choices(0, str(drawn)))
        return dspy.Prediction(score=1 - len(missed) / len(required), feedback=feedback)


@dataclass(frozen=True)
class Data:
    """What a run works on, whatever answers it."""

    program: dspy.Module
    metric: Callable[..., Any]
    trainset: list[dspy.Example]
    valset: list[dspy.Example]

    @classmethod
    def of(cls, workload: NamedWorkload) -> Data:
        """A workload's, with a fresh program."""
        return cls(workload.program(), workload.metric, workload.trainset, workload.valset)


@contextmanager
def served(
    benchmark: str,
    workload: NamedWorkload,
    profile: str,
    seed: int = 0,
    time_scale: float = 1.0,
    reply_model: ReplyModel | None = None,
) -> Iterator[tuple[Bench, Workload]]:
    """A running simulated server with the bench and the workload for it.

    Args:
        benchmark: The benchmark's name, for the results.
        workload: What `simulated` made.
        profile: The name of a profile; its task replies get the workload's lengths.
        seed: The server's.
        time_scale: The server's seconds that pass in a real one.
        reply_model: How well the simulated model answers; that of the task; `None` for the default.
    """
    backend = workload.profile(profile)
    with SimServer(backend, seed=seed, time_scale=time_scale, reply_model=reply_model) as server:
        language_model = dspy.LM("openai/simulated", api_base=server.api_base, api_key="none", cache=False)
        yield Bench(benchmark, profile, SimMeter(server)), workload.served(language_model)


def _owner(rule: Rule, outputs: Mapping[str, str]) -> str:
    return list(outputs)[(rule.number - 1) % len(outputs)]


def _seeded(program: Callable[[], dspy.Module], outputs: Mapping[str, str], rules: Sequence[Rule]) -> dspy.Module:
    """A fresh program whose instructions hold the seed rules of their predictors."""
    made = program()
    for name, predictor in made.named_predictors():
        own = [str(rule) for rule in rules if _owner(rule, outputs) == name]
        text = "\n".join([f"{predictor.signature.instructions} Follow the house rules.", *own])
        predictor.signature = predictor.signature.with_instructions(text)
    return made


def _asking(examples: Sequence[dspy.Example], asked: Sequence[dspy.Example]) -> list[dspy.Example]:
    """The examples with the rules that those of the task ask for."""
    return [
        example.copy(required=task["required"]).with_inputs(*example.inputs().keys())
        for example, task in zip(examples, asked, strict=True)
    ]
