"""AsyncGEPA on a task without language models: rollouts take virtual time, and scores follow from text and question.

A candidate's text says how good it is. What a test may want to look at afterwards is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import dspy
from dspy.utils.exceptions import LMRateLimitError, LMServerError, LMTimeoutError

from dspy_flashevolve import AsyncGEPA, EditedText
from tests.contract.surface import Sum, evolved
from tests.fakes import examples, hashed

FAULTS = (
    lambda: LMRateLimitError("429"),
    lambda: LMServerError("503"),
    lambda: LMTimeoutError("no answer"),
    lambda: ValueError("an error of the program's own"),
)


def chance(*parts: object) -> float:
    """A number from 0 to 1 that depends on the parts alone."""
    return hashed(*parts) % 10_007 / 10_007


def quality(text: str) -> float:
    """What a text says of itself; an integrated one says nothing, and is as good as it happens to be."""
    first = text.split()[0]
    return float(first) if first[0].isdigit() else 0.2 + 0.7 * chance("q", text)


@dataclass
class World:
    """A task of ``train`` and ``val`` examples.

    Args:
        seed: of everything.
        faults: share of rollouts, and of reflections, that raise something.
        spread: how much slower than the fastest the slowest rollout is.
        score: text, question -> score. Default: 1 with the probability that the text's quality says, else .1: gepa's
            merge cannot draw where all scores are 0.
        improved: quality of the parent, draw -> quality of the child.
    """

    seed: int = 0
    train: int = 9
    val: int = 12
    faults: float = 0.0
    spread: float = 9.0
    predictors: int = 1
    reflection_seconds: float = 5.0
    score: Callable[[str, str], float] = lambda text, question: (
        0.1 + 0.9 * (chance("s", text, question) < quality(text))
    )
    improved: Callable[[float, float], float] = lambda parent, draw: min(0.85, max(0.0, parent + 0.4 * draw - 0.14))
    scored: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Every call of the metric for a score: text, question."""
    reflections: int = 0
    """When it began, in virtual seconds."""
    _attempts: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    running: int = 0
    most_running: int = 0
    """Rollouts and reflections at once."""
    ended: int = 0
    """Rollouts and reflections; what ends in the same moment does not fail alike."""

    def student(self) -> dspy.Module:
        world = self

        class Program(dspy.Module):
            def __init__(self) -> None:
                super().__init__()
                self.steps = [
                    dspy.Predict(dspy.Signature("question -> answer", f"0.3 seed {number}"))
                    for number in range(world.predictors)
                ]

            async def aforward(self, question: str) -> dspy.Prediction:
                texts = [step.signature.instructions for step in self.steps]
                text = min(texts, key=quality)
                await world.busy(world.seconds(text, question))
                prediction = dspy.Prediction(answer=str(world.score(text, question)), text=text)
                dspy.settings.trace.extend((step, {"question": question}, prediction) for step in self.steps)
                return prediction

        return Program()

    def seconds(self, text: str, question: str) -> float:
        """How long this attempt at a rollout takes; most are fast."""
        attempt = self._attempts[text, question] = self._attempts.get((text, question), 0) + 1
        return 1 + self.spread * chance("t", self.seed, text, question, attempt) ** 3

    async def busy(self, seconds: float) -> None:
        """A request: takes its time, and fails now and then."""
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.running -= 1
        self.ended += 1
        draw = chance("f", self.seed, self.ended, asyncio.get_running_loop().time(), seconds)
        if draw < self.faults:
            raise FAULTS[int(draw * 10_007) % len(FAULTS)]()

    def metric(self, gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        if pred_name is None:
            self.scored.append((pred.text, gold.question))
        return dspy.Prediction(score=float(pred.answer), feedback=f"{gold.question}: {pred.answer}")

    async def acall(self, candidate: Any, reflective_dataset: Any, components_to_update: list[str]) -> dict[str, str]:
        """The proposer."""
        self.reflections += 1
        number = self.reflections
        await self.busy(self.reflection_seconds)
        draw = chance("r", self.seed, number)
        return {
            name: f"{self.improved(quality(candidate[name]), draw):.3f} child {number}" for name in components_to_update
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the proposer is awaited")

    def __reduce__(self) -> Any:  # a run with log_dir pickles what it is given
        return World, ()


@dataclass
class Rules(World):
    """A world whose candidates are lists of rules, one a line: each helps or harms. A child has one more than its
    parent, as an edit, and the search is the one by edits.

    Of several predictors the first one's rules count.

    Args:
        rules: how many there are.
        helps: what a rule adds to the probability of a right answer.
        harmful: share of the rules that harm.
        harm: what such a rule takes away.
    """

    rules: int = 40
    helps: float = 0.03
    harmful: float = 0.0
    harm: float = 0.1

    def __post_init__(self) -> None:
        self.score = lambda text, question: 0.1 + 0.9 * (chance("s", text, question) < self.worth(text))

    def effect(self, line: str) -> float:
        """What a line adds to the probability of a right answer."""
        if not line.startswith("- rule"):
            return 0.0
        return -self.harm if chance("h", self.seed, line) < self.harmful else self.helps

    def worth(self, text: str) -> float:
        """The probability of a right answer: of .3, with the text's rules."""
        return 0.3 + sum(map(self.effect, set(text.splitlines())))

    async def acall(self, candidate: Any, reflective_dataset: Any, components_to_update: list[str]) -> dict[str, str]:
        """The proposer: adds one rule that is not there."""
        self.reflections += 1
        number = self.reflections
        await self.busy(self.reflection_seconds)
        made: dict[str, str] = {}
        for name in components_to_update:
            first = hashed("n", self.seed, number) % self.rules
            there = set(candidate[name].splitlines())
            lines = (f"- rule {(first + shift) % self.rules}" for shift in range(self.rules))
            rule = next(line for line in lines if line not in there)
            made[name] = EditedText.of(candidate[name], [{"action": "add", "part": len(there), "text": rule}])
        return made


def play(world: World, calls: int | None = 300, **options: Any) -> Any:
    """The program that AsyncGEPA makes of a world's, in virtual time."""
    settings: dict[str, Any] = {"max_metric_calls": calls, "num_threads": 16, "seed": world.seed, "track_stats": True}
    settings |= {"instruction_proposer": world, "stale_candidate_reflection": Sum()}
    settings |= {"search": "edits"} if isinstance(world, Rules) else {}
    settings |= options
    data = examples("t", world.train), examples("v", world.val)
    return evolved(AsyncGEPA(world.metric, **settings), world.student(), *data, {"lm": None})
