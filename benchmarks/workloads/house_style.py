"""A hidden house style that a real model can follow: constraints that IFEval's checkers verify.

They are the same for all answers. No question tells them; only the metric's feedback names those that an answer missed,
or some of them, as an imperfect simulated model's metric does (`ReplyModel.vague`). A scripted reflection model writes
them into instructions (`benchmarks.scripted_reflection`), and what a real model makes of these is real.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dspy

from benchmarks.workloads.definition import Size, text_of
from benchmarks.workloads.ifeval_checks import CHECKS
from dspy_flashevolve.sim import HouseRules
from dspy_flashevolve.sim.reply_model import Choices, ReplyModel
from dspy_flashevolve.sim.task import feedback_on
from dspy_flashevolve.sim.words import WORDS, Rule

INSTRUCTION = "Answer the question in one short sentence."
QUESTIONS = 192
"""There are so many: those of the simulated house rules."""


@dataclass(frozen=True)
class Constraint:
    """A constraint of the style.

    Attributes:
        kind: A key of `ifeval_checks.CHECKS`.
        arguments: What the check is given.
        wordings: Sentences, each of which asks for it; the first is the one that feedback uses. No sentence is part of
            another one, has a quote or needs an escape in JSON.
    """

    kind: str
    arguments: Mapping[str, Any]
    wordings: tuple[str, str, str, str]

    def met(self, answer: str) -> bool:
        """Whether an answer meets it."""
        return CHECKS[self.kind](answer, self.arguments) is None


STYLE = (
    Constraint("punctuation:no_comma", {}, (
        "Use no commas.",
        "Write without any commas.",
        "Leave out all commas.",
        "There must not be a single comma in the answer.",
    )),
    Constraint("startend:quotation", {}, (
        "Wrap the whole answer in double quotation marks.",
        "Put the entire answer inside double quotation marks.",
        "Begin and end with a double quotation mark.",
        "The answer must stand in double quotes from start to end.",
    )),
    Constraint("startend:end_checker", {"end_phrase": "Good luck!"}, (
        "End with the phrase Good luck!",
        "The last words must be Good luck!",
        "Close the answer with exactly Good luck!",
        "Finish by writing Good luck!",
    )),
    Constraint("detectable_format:title", {}, (
        "Begin with a title in double angular brackets such as <<title>>.",
        "Give the answer a title wrapped in double angular brackets like <<title>>.",
        "Put a title in front and write it as <<title>>.",
        "Write a heading in double angular brackets at the top as in <<title>>.",
    )),
    Constraint("keywords:letter_frequency", {"letter": "?", "let_relation": "at least", "let_frequency": 1}, (
        "Use at least one question mark.",
        "Ask at least one question in the answer.",
        "There must be a question mark in the answer.",
        "Add a question that ends with a question mark.",
    )),
    Constraint("detectable_format:number_highlighted_sections", {"num_highlights": 1}, (
        "Highlight at least one phrase with asterisks such as *this phrase*.",
        "Put asterisks around one important phrase like *this phrase*.",
        "At least one phrase must be highlighted as in *this phrase*.",
        "Mark one key phrase with an asterisk on either side like *this phrase*.",
    )),
    Constraint("change_case:english_lowercase", {}, (
        "Write everything in lowercase letters.",
        "Use lowercase letters only.",
        "No capital letters are allowed.",
        "The whole answer must be in lowercase.",
    )),
    Constraint("detectable_content:postscript", {"postscript_marker": "P.S."}, (
        "Add a postscript at the end that begins with P.S.",
        "Put a postscript that starts with P.S. at the end.",
        "The answer needs a final note marked P.S.",
        "Write a short postscript after the answer and mark it P.S.",
    )),
    Constraint("detectable_content:number_placeholders", {"num_placeholders": 1}, (
        "Put one placeholder in square brackets such as [name].",
        "Use at least one placeholder in square brackets like [name].",
        "Include a placeholder written in square brackets as in [name].",
        "Somewhere in the answer leave a placeholder like [name] in square brackets.",
    )),
    Constraint("keywords:existence", {"keywords": ["honest"]}, (
        "Mention the word honest.",
        "Be sure to use the word honest.",
        "The word honest must be in the answer.",
        "Find a place for the word honest.",
    )),
    Constraint("keywords:existence", {"keywords": ["weekend"]}, (
        "Mention the word weekend.",
        "Be sure to use the word weekend.",
        "The word weekend must be in the answer.",
        "Find a place for the word weekend.",
    )),
    Constraint("keywords:existence", {"keywords": ["budget"]}, (
        "Mention the word budget.",
        "Be sure to use the word budget.",
        "The word budget must be in the answer.",
        "Find a place for the word budget.",
    )),
    Constraint("keywords:frequency", {"keyword": "really", "relation": "at least", "frequency": 2}, (
        "Use the word really at least 2 times.",
        "The word really must come at least 2 times.",
        "Say really at least 2 times.",
        "Write the word really 2 times or more.",
    )),
    Constraint("keywords:letter_frequency", {"letter": "!", "let_relation": "at least", "let_frequency": 2}, (
        "Use at least 2 exclamation marks.",
        "There must be at least 2 exclamation marks.",
        "Write 2 exclamation marks or more.",
        "End at least 2 sentences with an exclamation mark.",
    )),
    Constraint("length_constraints:number_words", {"relation": "less than", "num_words": 15}, (
        "Use fewer than 15 words.",
        "Keep the answer under 15 words.",
        "Write less than 15 words in all.",
        "The answer must be shorter than 15 words.",
    )),
    Constraint("detectable_format:constrained_response", {}, (
        "Include the sentence My answer is maybe.",
        "Say My answer is maybe.",
        "One sentence must read My answer is maybe.",
        "Write the words My answer is maybe.",
    )),
)  # fmt: skip
RULES = tuple(Rule(number, word) for number, word in enumerate(WORDS[: len(STYLE)], start=1))
"""What stands for each constraint where the simulated model reads and writes."""


def to_rules(text: str) -> str:
    """The text with a rule of the simulated model in place of each sentence of the style."""
    for rule, sentence in _sentences():
        text = text.replace(sentence, str(rule))
    return text


def from_rules(text: str) -> str:
    """The text with the style's sentences in place of the rules, whose quotes may be escaped as in JSON.

    Example:
        >>> from_rules(f"Missed: {RULES[0]}")
        'Missed: Use no commas.'
    """
    for rule, sentence in _sentences():
        text = text.replace(str(rule), sentence).replace(json.dumps(str(rule))[1:-1], sentence)
    return text


def _sentences() -> list[tuple[Rule, str]]:
    return [
        (rule.reworded(number), sentence)
        for rule, constraint in zip(RULES, STYLE, strict=True)
        for number, sentence in enumerate(constraint.wordings)
    ]


class WholeReply(dspy.Adapter):
    """The instruction as system message, the question as the user's, the whole reply as the answer.

    A model of half a billion parameters spends much of a short reply on the field marks of dspy's own adapters, and
    misses them at times.
    """

    def format(self, signature: Any, demos: Any, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The two messages."""
        return [
            {"role": "system", "content": signature.instructions},
            {"role": "user", "content": str(inputs["question"])},
        ]

    def parse(self, signature: Any, completion: str) -> dict[str, Any]:
        """The reply, as it is."""
        return {"answer": completion.strip()}


class Answer(dspy.Module):
    """One predictor."""

    def __init__(self, instruction: str = INSTRUCTION) -> None:
        super().__init__()
        self.answer = dspy.Predict(dspy.make_signature("question -> answer", instruction))

    def forward(self, question: str) -> dspy.Prediction:
        """Ask."""
        with dspy.context(adapter=WholeReply()):
            return self.answer(question=question)

    async def aforward(self, question: str) -> dspy.Prediction:
        """Ask, awaited."""
        with dspy.context(adapter=WholeReply()):
            return await self.answer.acall(question=question)


@dataclass(frozen=True)
class Metric:
    """dspy.GEPA's metric: the share of the constraints that hold.

    Attributes:
        reply_model: How many of the missed constraints the feedback does not name.
    """

    reply_model: ReplyModel

    def __call__(
        self, gold: Any, pred: Any, trace: Any = None, pred_name: str | None = None, pred_trace: Any = None
    ) -> dspy.Prediction:
        """Score, and feedback that names some of what was missed."""
        answer = text_of(pred, "answer")
        missed = [rule for rule, one in zip(RULES, STYLE, strict=True) if not one.met(answer)]
        choices = Choices(0, f"{gold.question}\0{answer}")
        feedback = from_rules(feedback_on(missed, self.reply_model, choices))
        return dspy.Prediction(score=1 - len(missed) / len(STYLE), feedback=feedback)


def examples(size: Size, seed: int) -> tuple[list[dspy.Example], list[dspy.Example], list[dspy.Example]]:
    """Training, validation and test examples; the test examples are the same for all seeds.

    Raises:
        ValueError: More examples than there are questions.
    """
    if size.train + size.val + size.test > QUESTIONS:
        raise ValueError(f"there are {QUESTIONS} questions, {size.train + size.val + size.test} were asked for")
    questions = [example.question for example in HouseRules(seed=0).trainset(QUESTIONS // 2)]
    questions += [example.question for example in HouseRules(seed=0).valset(QUESTIONS // 2)]
    rest = questions[size.test :]
    random.Random(seed).shuffle(rest)
    parts = (rest[: size.train], rest[size.train : size.train + size.val], questions[: size.test])
    train, val, test = ([dspy.Example(question=one).with_inputs("question") for one in part] for part in parts)
    return train, val, test
