"""The user's side of the house rules task: data, program, metric, and the optimum that is known beforehand.

An answer must mention certain words. Which ones, no question tells: only the metric's feedback names the rules that
an answer missed, so an optimizer has to collect them in the instruction. The simulated server obeys each rule that
an instruction states with a known probability, which makes the best possible score known too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import dspy

from dspy_flashevolve.sim.replies import ReplyModel
from dspy_flashevolve.sim.words import WORDS, Choices, Rule, words_present

_TEMPLATES = (
    "What should a beginner know about {topic}?",
    "Why do people enjoy {topic}?",
    "How has {topic} changed over the last fifty years?",
    "What makes {topic} hard to do well?",
    "Which mistakes are common in {topic}?",
    "How would you explain {topic} to a child?",
    "What does a good day of {topic} look like?",
    "Which tools does one need for {topic}?",
)
TOPICS = (
    "baking bread", "keeping bees", "learning to sail", "restoring old chairs", "running a small library",
    "planting trees", "writing letters", "watching birds", "fixing bicycles", "teaching chess", "making cheese",
    "reading maps", "night photography", "mending clothes", "building bridges", "cold water swimming",
    "singing in a choir", "drawing faces", "growing tomatoes", "collecting stamps", "training for a marathon",
    "painting houses", "repairing clocks", "cooking for a crowd",
)  # fmt: skip
OUTPUTS = ("answer", "draft", "outline")
"""Predictors and what they write, in the order in which they get the rules."""


@dataclass(frozen=True)
class HouseRules:
    """A task whose best score is known beforehand.

    Rule i belongs to predictor i modulo the number of predictors, and counts when its word is in that predictor's
    output; with one predictor every rule counts in the answer.

    Attributes:
        rules: How many rules there are, 1 to 128.
        rules_per_example: How many of them the metric asks of one example; at most `rules`.
        seed: Decides which words the rules use, which rules an example asks for, and the order of the questions.
        prompts: Questions to use instead of the built-in 192 (such as IFBench's prompts); used in turn when there
            are fewer than examples.
        seed_rules: How many rules the seed program's instruction already holds.
        reply_model: What the server's replies follow; `optimum` and `true_score` are derived from it.

    Raises:
        ValueError: If a count is out of its range or `prompts` is empty.

    Examples:
        >>> task = HouseRules(rules=24, seed=0, reply_model=ReplyModel())
        >>> task.optimum
        0.9
        >>> example = task.trainset(1)[0]
        >>> len(example.required), sorted(example.inputs().keys())
        (6, ['question'])
    """

    rules: int = 24
    rules_per_example: int = 6
    seed: int = 0
    prompts: Sequence[str] | None = None
    seed_rules: int = 2
    reply_model: ReplyModel = field(default_factory=ReplyModel)

    def __post_init__(self) -> None:
        for name, low, high in (
            ("rules", 1, len(WORDS)),
            ("rules_per_example", 1, self.rules),
            ("seed_rules", 0, self.rules),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be between {low} and {high}, got {getattr(self, name)!r}")
        if self.prompts is not None and not self.prompts:
            raise ValueError("prompts must hold at least one question, got an empty sequence")

    def all_rules(self) -> list[Rule]:
        """Return the rules, numbered from 1."""
        words = random.Random(f"words {self.seed}").sample(WORDS, self.rules)
        return [Rule(number, word) for number, word in enumerate(words, start=1)]

    def trainset(self, n: int) -> list[dspy.Example]:
        """Return the first `n` training examples, with the input `question` and the rules `required` by the metric."""
        return [self._example("train", index) for index in range(n)]

    def valset(self, n: int) -> list[dspy.Example]:
        """Return the first `n` validation examples; no question is in both sets while the questions last."""
        return [self._example("val", index) for index in range(n)]

    def program(self, predictors: Literal[1, 2, 3] = 1) -> dspy.Module:
        """Return a new program with the seed instruction: a chain of `predictors`, the last one writes `answer`."""
        if predictors not in (1, 2, 3):
            raise ValueError(f"predictors must be 1, 2 or 3, got {predictors!r}")
        outputs, rules = OUTPUTS[:predictors], self.all_rules()[: self.seed_rules]
        return _Chain({name: [rule for rule in rules if _owner(rule, outputs) == name] for name in outputs})

    def optimal_instruction(self) -> str:
        """Return the instruction of one predictor that holds the rules that are worth their length."""
        rules = sorted(self.all_rules(), key=lambda rule: self._expected([rule]), reverse=True)
        best = max((rules[:length] for length in range(len(rules) + 1)), key=self._expected)
        return _instruction("answer", sorted(best))

    def _expected(self, rules: Sequence[Rule]) -> float:
        """Return how many of the rules a reply to an instruction that holds them obeys on average."""
        return math.fsum(self.reply_model.obeyed("\n".join(map(str, rules))).values())

    @property
    def optimum(self) -> float:
        """The true score of `optimal_instruction()`."""
        return self.true_score([self.optimal_instruction()])

    def true_score(self, instructions: Sequence[str]) -> float:
        """Return the expected score on an example that neither training nor validation has seen.

        It is exact: an expectation over all examples that there may be, and over the draws of the model. A validation
        score is an estimate of it, and the best of many validation scores is an estimate that is too high.

        Args:
            instructions: One for each predictor, in the order of `OUTPUTS`.
        """
        obeyed = [self.reply_model.obeyed(text) for text in instructions]
        own = ((obeyed[(rule.number - 1) % len(obeyed)], rule.word) for rule in self.all_rules())
        return math.fsum(words.get(word, 0.0) for words, word in own) / self.rules

    def metric(
        self,
        gold: dspy.Example,
        pred: dspy.Prediction,
        trace: Any = None,
        pred_name: str | None = None,
        pred_trace: Any = None,
    ) -> dspy.Prediction:
        """Return score and feedback, in the form that dspy.GEPA asks for; the traces are not used.

        Args:
            gold: An example of `trainset` or `valset`.
            pred: The program's outputs.
            pred_name: The predictor that the feedback is for; None for all of them.

        Returns:
            `score`, the share of the required words that are there (over all predictors, whatever `pred_name`), and
            `feedback`, which names the missed rules of the predictor (`ReplyModel.feedback`).
        """
        required: list[Rule] = list(gold["required"])
        outputs = [name for name in OUTPUTS if name in pred]
        missed = [rule for rule in required if not _kept(rule, outputs, pred)]
        concerned = [rule for rule in missed if pred_name not in outputs or _owner(rule, outputs) == pred_name]
        drawn = f"{gold.question}\0{[str(pred[name]) for name in outputs]}"
        text = self.reply_model.feedback(concerned, Choices(self.seed, drawn))
        return dspy.Prediction(score=1 - len(missed) / len(required), feedback=text)

    def _questions(self) -> list[str]:
        if self.prompts is not None:
            return list(self.prompts)
        questions = [template.format(topic=topic) for template in _TEMPLATES for topic in TOPICS]
        random.Random(f"questions {self.seed}").shuffle(questions)
        return questions

    def _example(self, split: Literal["train", "val"], index: int) -> dspy.Example:
        questions = self._questions()
        question = questions[(2 * index + (split == "val")) % len(questions)]
        rng = random.Random(f"{split} {self.seed} {index}")
        chosen = rng.sample(self.all_rules(), self.rules_per_example)
        return dspy.Example(question=question, required=sorted(chosen)).with_inputs("question")


def _owner(rule: Rule, outputs: Sequence[str]) -> str:
    """Return the output that a rule belongs to, which is also the name of its predictor."""
    return outputs[(rule.number - 1) % len(outputs)]


def _kept(rule: Rule, outputs: Sequence[str], pred: dspy.Prediction) -> bool:
    return bool(outputs) and bool(words_present(str(pred[_owner(rule, outputs)]), [rule.word]))


def _instruction(output: str, rules: Sequence[Rule]) -> str:
    verb = {"answer": "Answer the question.", "draft": "Write a draft.", "outline": "Write an outline."}[output]
    return "\n".join([f"{verb} Follow the house rules.", *map(str, rules)])


class _Chain(dspy.Module):
    """question -> outline -> draft -> answer, or the last one or two of these steps."""

    def __init__(self, rules: dict[str, list[Rule]]) -> None:
        super().__init__()
        self.steps = list(reversed(rules))
        sources = ["question"]
        for name in self.steps:
            signature = dspy.make_signature(f"{', '.join(sources)} -> {name}", _instruction(name, rules[name]))
            setattr(self, name, dspy.Predict(signature))
            sources = ["question", name]

    def forward(self, question: str) -> dspy.Prediction:
        fields: dict[str, Any] = {}
        for name in self.steps:
            previous = dict([*fields.items()][-1:])
            fields[name] = getattr(self, name)(question=question, **previous)[name]
        return dspy.Prediction(**fields)

    async def aforward(self, question: str) -> dspy.Prediction:
        fields: dict[str, Any] = {}
        for name in self.steps:
            previous = dict([*fields.items()][-1:])
            fields[name] = (await getattr(self, name).acall(question=question, **previous))[name]
        return dspy.Prediction(**fields)
