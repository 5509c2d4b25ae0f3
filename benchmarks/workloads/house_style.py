"""A hidden house style that a real model can follow: constraints in the manner of IFEval.

They are the same for all texts. No request tells them; only the metric's feedback names those that a text missed, or
some of them, as an imperfect simulated model's metric does (`ReplyModel.vague`). A scripted reflection model writes
them into instructions (`benchmarks.scripted_reflection`), and what a real model makes of these is real.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import dspy

from benchmarks.workloads.definition import Size, text_of
from dspy_flashevolve.sim.reply_model import Choices, ReplyModel
from dspy_flashevolve.sim.task import TOPICS, feedback_on
from dspy_flashevolve.sim.words import WORDS, Rule

INSTRUCTION = "Write what is asked for."
_FORMS = (
    "Write a short message to a friend about {topic}.",
    "Write a short note to a neighbour about {topic}.",
    "Write a short advertisement for a course on {topic}.",
    "Write a short diary entry about {topic}.",
    "Write a short greeting card for someone who likes {topic}.",
    "Write a short review of a book on {topic}.",
    "Write a short text for a poster about {topic}.",
    "Write a short speech about {topic}.",
)
REQUESTS = tuple(form.format(topic=topic) for topic in TOPICS for form in _FORMS)


@dataclass(frozen=True)
class Constraint:
    """A constraint of the style.

    Attributes:
        kind: IFEval's name for constraints like it, for the tables.
        met: Whether a text meets it. IFEval's own checkers would not do: they count letters but no punctuation marks,
            and guess whether a text in capitals is English.
        wordings: Sentences, each of which asks for it; the first is the one that feedback uses. No sentence is part of
            another one, has a quote or needs an escape in JSON.
    """

    kind: str
    met: Callable[[str], bool]
    wordings: tuple[str, str, str, str]


def _has(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


def _has_title(text: str) -> bool:
    return any(title.strip("<> ") for title in re.findall(r"<<([^\n]+?)>>", text))


STYLE = (
    Constraint("punctuation:no_comma", lambda text: "," not in text, (
        "Use no commas.",
        "Write without any commas.",
        "Leave out all commas.",
        "There must not be a single comma in the text.",
    )),
    Constraint("keywords:existence", lambda text: "weekend" in text.lower(), (
        "Mention the word weekend.",
        "Be sure to use the word weekend.",
        "The word weekend must be in the text.",
        "Find a place for the word weekend.",
    )),
    Constraint("keywords:existence", lambda text: "honest" in text.lower(), (
        "Mention the word honest.",
        "Be sure to use the word honest.",
        "The word honest must be in the text.",
        "Find a place for the word honest.",
    )),
    Constraint("keywords:existence", lambda text: "coffee" in text.lower(), (
        "Mention the word coffee.",
        "Be sure to use the word coffee.",
        "The word coffee must be in the text.",
        "Find a place for the word coffee.",
    )),
    Constraint("keywords:letter_frequency", lambda text: text.count("!") >= 3, (
        "Use at least 3 exclamation marks.",
        "There must be at least 3 exclamation marks.",
        "Write 3 exclamation marks or more.",
        "End at least 3 sentences with an exclamation mark.",
    )),
    Constraint("keywords:letter_frequency", lambda text: "?" in text, (
        "Begin with a question.",
        "Ask a question first.",
        "Start by asking the reader a question.",
        "The first sentence must be a question.",
    )),
    Constraint("change_case:english_capital", str.isupper, (
        "Write everything in CAPITAL letters.",
        "Use CAPITAL letters only.",
        "No lowercase letters are allowed.",
        "The whole text must be in CAPITAL letters.",
    )),
    Constraint("startend:end_checker", lambda text: text.strip().strip('"').lower().endswith("good luck!"), (
        "End with the phrase Good luck!",
        "The last words must be Good luck!",
        "Close the text with exactly Good luck!",
        "Finish by writing Good luck!",
    )),
    Constraint("detectable_content:number_placeholders", lambda text: _has(r"\[[^\]\n]*\]", text), (
        "Put a placeholder such as [name] in square brackets.",
        "Use at least one placeholder in square brackets like [name].",
        "Include a placeholder written in square brackets as in [name].",
        "Somewhere in the text leave a placeholder like [name] in square brackets.",
    )),
    Constraint("detectable_content:postscript", lambda text: _has(r"(?:^|\s)p\.\s?s(?:\.|\b)", text.lower()), (
        "Add a postscript that begins with P.S.",
        "Put a postscript that starts with P.S. at the end.",
        "The text needs a final note marked P.S.",
        "Write a short postscript after the text and mark it P.S.",
    )),
    Constraint("detectable_format:title", _has_title, (
        "Begin with a title in double angular brackets such as <<Hello>>.",
        "Give the text a title wrapped in double angular brackets like <<Hello>>.",
        "Put a title in front and write it as <<Hello>>.",
        "Write a heading in double angular brackets at the top as in <<Hello>>.",
    )),
    Constraint("length_constraints:number_words", lambda text: len(re.findall(r"\w+", text)) < 20, (
        "Use fewer than 20 words.",
        "Keep the text under 20 words.",
        "Write less than 20 words in all.",
        "The text must be shorter than 20 words.",
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
    """The instruction and the request in one message, the whole reply as the text.

    A model of half a billion parameters spends much of a short reply on the field marks of dspy's own adapters, misses
    them at times, and heeds a system message less.
    """

    def format(self, signature: Any, demos: Any, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The message."""
        return [{"role": "user", "content": f"{signature.instructions}\n\n{inputs['request']}"}]

    def parse(self, signature: Any, completion: str) -> dict[str, Any]:
        """The reply, as it is."""
        return {"text": completion.strip()}


class Writer(dspy.Module):
    """One predictor."""

    def __init__(self, instruction: str = INSTRUCTION) -> None:
        super().__init__()
        self.write = dspy.Predict(dspy.make_signature("request -> text", instruction))

    def forward(self, request: str) -> dspy.Prediction:
        """Ask."""
        with dspy.context(adapter=WholeReply()):
            return self.write(request=request)

    async def aforward(self, request: str) -> dspy.Prediction:
        """Ask, awaited."""
        with dspy.context(adapter=WholeReply()):
            return await self.write.acall(request=request)


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
        text = text_of(pred, "text")
        missed = [rule for rule, one in zip(RULES, STYLE, strict=True) if not one.met(text)]
        choices = Choices(0, f"{gold.request}\0{text}")
        feedback = from_rules(feedback_on(missed, self.reply_model, choices))
        return dspy.Prediction(score=1 - len(missed) / len(STYLE), feedback=feedback)


def examples(size: Size, seed: int) -> tuple[list[dspy.Example], list[dspy.Example], list[dspy.Example]]:
    """Training, validation and test examples; the test examples are the same for all seeds.

    Raises:
        ValueError: More examples than there are requests.
    """
    asked = size.train + size.val + size.test
    if asked > len(REQUESTS):
        raise ValueError(f"there are {len(REQUESTS)} requests, {asked} were asked for")
    requests = random.Random("order").sample(REQUESTS, len(REQUESTS))
    rest = requests[size.test :]
    random.Random(seed).shuffle(rest)
    parts = (rest[: size.train], rest[size.train : size.train + size.val], requests[: size.test])
    train, val, test = ([dspy.Example(request=one).with_inputs("request") for one in part] for part in parts)
    return train, val, test
