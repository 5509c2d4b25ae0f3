"""A task for small budgets, like those of public tutorials: facts to learn, and a language model in the process.

An example asks about one of a dozen topics, and a program answers it nearly always once its instruction has the fact of
that topic. The reflection model reads the facts of the examples that failed out of the feedback, as models do where
feedback has the expected answer. How it writes them down is its style: "bullets" adds them to the text that it reads,
"rewrites" writes the whole text anew, in another order and other words, and "documents" in sections; both forget a fact
now and then where the model is weak.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from dataclasses import dataclass
from typing import Any, Literal

import dspy
from dspy.lm15 import Message, Request, Response, TextPart, Usage

from dspy_flashevolve.sim.reply_model import Choices
from dspy_flashevolve.sim.virtual import Shared

Style = Literal["bullets", "rewrites", "documents"]
STYLES: tuple[Style, ...] = ("bullets", "rewrites", "documents")
KNOWN, UNKNOWN = 0.95, 0.15
"""Probability of a right answer with the topic's fact in the instruction, and without."""
FORGETS, MISREADS = 0.1, 0.25
"""Probability that a weak model's rewrite loses a fact, and that it writes a fact down wrongly, which helps nobody."""
READ_AT_ONCE = 2
"""Facts that one reflection of a weak model writes down at most; a strong one writes down all that it reads."""
ANSWER_SECONDS, REFLECTION_SECONDS = 1.0, 6.0
"""Of replies, in virtual time."""
READS = "[[ ## current_instruction ## ]]\n"
"""What stands before the text that a reflection is to write anew."""
_FACT = re.compile(r"topic (\d+) of step (\d+) means word-(\d+)")
_ASKED = re.compile(r"about topic (\d+)")
_STEP = re.compile(r"You are step (\d+)")


def word_of(topic: int, step: int) -> int:
    """The number of the word that is right for a topic in a step."""
    return 100 * (step + 1) + topic


def facts_in(text: str, step: int) -> set[int]:
    """The topics whose facts a text has, the right ones only."""
    found = ((int(topic), int(number), int(word)) for topic, number, word in _FACT.findall(text))
    return {topic for topic, number, word in found if number == step and word == word_of(topic, step)}


@dataclass(frozen=True)
class Task:
    """Train and validation examples, the student and the models of one seed.

    Attributes:
        topics: How many facts there are to learn, of each predictor.
        strong: The reflection model writes down all that it reads, and makes no mistakes.
    """

    seed: int
    train: int
    val: int
    predictors: int
    style: Style
    topics: int = 12
    strong: bool = False

    def examples(self, split: str, count: int) -> list[dspy.Example]:
        """Examples of topics that are drawn at random."""
        rng = random.Random(f"{self.seed} {split}")
        return [
            dspy.Example(question=f"{split} {number}, about topic {rng.randrange(self.topics)}").with_inputs("question")
            for number in range(count)
        ]

    def student(self) -> dspy.Module:
        """As many predictors in a row as the task has; each learns facts of its own."""
        return Chain(self.predictors)

    def true_score(self, program: Any) -> float:
        """The expected score on examples that nobody saw."""
        known = [
            len(facts_in(one.signature.instructions, step)) / self.topics for step, one in enumerate(program.steps)
        ]
        return sum(KNOWN * share + UNKNOWN * (1 - share) for share in known) / len(known)

    def task_lm(self) -> dspy.LM:
        """Answers by the facts in the instruction."""
        return _lm(self._answer, ANSWER_SECONDS)

    def reflection_lm(self) -> dspy.LM:
        """Writes instructions."""
        return _lm(self._reflect, REFLECTION_SECONDS)

    def _answer(self, request: Request, asked: int) -> str:
        del asked
        prompt = _text(request)
        topic, step = int(_ASKED.findall(prompt)[-1]), int(_STEP.findall(prompt)[0])
        knows = topic in facts_in(prompt, step)
        right = Choices(self.seed, prompt).uniform("right") < (KNOWN if knows else UNKNOWN)
        return f"[[ ## answer ## ]]\nword-{word_of(topic, step) if right else 0}\n\n[[ ## completed ## ]]"

    def _reflect(self, request: Request, asked: int) -> str:
        prompt = _text(request)
        rng = random.Random(f"{self.seed} {asked} {prompt}")
        if READS not in prompt:
            return "Nothing to say."  # an integration: its children go on alone
        before, _, shown = prompt.rpartition(READS)[2].partition("\n\n[[ ##")
        wanted = sorted({match.group(0) for match in _FACT.finditer(shown)})
        step = int(_STEP.findall(before)[0])
        known = facts_in(before, step)
        new = [one for one in wanted if f"of step {step} " in one and int(_FACT.findall(one)[0][0]) not in known]
        forgets, misreads = (0, 0) if self.strong else (FORGETS, MISREADS)
        if not self.strong:
            new = rng.sample(new, min(READ_AT_ONCE, len(new)))
        new = [re.sub(r"word-\d+", "word-0", one) if rng.random() < misreads else one for one in new]
        if self.style == "bullets":
            text = "\n".join([before, *(f"- Remember: {one}." for one in new)])
        else:
            kept = [one.group(0) for one in _FACT.finditer(before) if rng.random() >= forgets] + new
            rng.shuffle(kept)
            if self.style == "rewrites":
                text = f"You are step {step}. Version {rng.randrange(10**6)} of these notes. " + " and ".join(kept)
            else:
                text = _document(step, kept, rng)
        return json.dumps({"new_instruction": text})  # dspy asks for JSON first


def _document(step: int, facts: list[str], rng: random.Random) -> str:
    """A prompt with sections, as large models write: its first line stays, its prose is another each time."""
    sections = {
        "Task": [f"{verb} the question with {what}." for verb, what in zip(rng.sample(VERBS, 2), WHATS, strict=True)],
        "Facts": [f"- {fact}" for fact in facts],
        "Output": [f"- {rng.choice(VERBS)} one word only.", "- No explanation."],
    }
    texts = [f"## {name}\n" + "\n".join(lines) for name, lines in sections.items()]
    return "\n\n".join([f"You are step {step}. Answer the question.", *texts])


VERBS, WHATS = ("Answer", "Return", "Give", "Reply to", "Solve", "Write down"), ("a word", "care")


class Chain(dspy.Module):
    """Predictors in a row, each answering the same question by its own facts; sync and async."""

    def __init__(self, predictors: int) -> None:
        super().__init__()
        self.steps = [
            dspy.Predict(dspy.Signature("question -> answer", f"You are step {step}. Answer the question."))
            for step in range(predictors)
        ]

    def forward(self, question: str) -> dspy.Prediction:
        return dspy.Prediction(answer=" ".join(step(question=question).answer for step in self.steps))

    async def aforward(self, question: str) -> dspy.Prediction:
        answers = [(await step.acall(question=question)).answer for step in self.steps]
        return dspy.Prediction(answer=" ".join(answers))


def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> dspy.Prediction:
    """The share of the steps that were right, with the facts of the others as feedback."""
    del trace, pred_name, pred_trace
    topic, answers = int(_ASKED.findall(gold.question)[0]), pred.answer.split()
    wrong = [step for step, answer in enumerate(answers) if answer != f"word-{word_of(topic, step)}"]
    facts = " ".join(f"topic {topic} of step {step} means word-{word_of(topic, step)}." for step in wrong)
    return dspy.Prediction(score=1 - len(wrong) / len(answers), feedback=facts or "Right.")


class _Model(Shared):
    """Both of dspy's engine contracts: answers at once in threads, after a while on a virtual loop."""

    def __init__(self, answer: Any, seconds: float) -> None:
        self._answer, self._seconds, self._asked = answer, seconds, 0

    def _respond(self, request: Request) -> Response:
        self._asked += 1
        message = Message.assistant([TextPart(self._answer(request, self._asked))])
        usage = Usage(input_tokens=100, output_tokens=20, total_tokens=120)
        return Response(id=None, model="facts", message=message, finish_reason="stop", usage=usage)


class _Engine(_Model):
    def complete(self, request: Request) -> Response:
        return self._respond(request)


class _AsyncEngine(_Model):
    async def complete(self, request: Request) -> Response:
        await asyncio.sleep(self._seconds)
        return self._respond(request)


def _lm(answer: Any, seconds: float) -> dspy.LM:
    engines = {"engine": _Engine(answer, seconds), "async_engine": _AsyncEngine(answer, seconds)}
    return dspy.LM("facts", cache=False, num_retries=0, **engines)  # pyright: ignore[reportArgumentType]


def _text(request: Request) -> str:
    return f"{request.system}\n" + "\n".join(message.text or "" for message in request.messages)
