"""A sample's way, from its first attempt to the playbook, with a program and modules that say what they are told to."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import anyio
import dspy

from dspy_flashevolve import AsyncACE, Playbook
from dspy_flashevolve.observe.statistics import AceStats
from dspy_flashevolve.sim.virtual import run
from tests.ace.books import book_of
from tests.fakes import Chain, fake_lm, reply_for

BOOK = book_of([("other", "Mind units."), ("other", "Round late.")])
Operations = list[dict[str, Any]]


def add(content: str, section: str = "other") -> dict[str, Any]:
    return {"type": "ADD", "section": section, "content": content}


@dataclass
class Script:
    """What is said of one sample, and after how many seconds.

    Args:
        scores: of its attempts, in order; the last one for ever.
        insight, tags, operations: of each reflection, and of the curator.
        before, curating: seconds that its first reflection, and its curator, take.
    """

    scores: tuple[float, ...] = (0.0,)
    insight: str = "an insight"
    tags: dict[str, str] = field(default_factory=dict)
    operations: Operations = field(default_factory=list)
    before: float = 0.0
    curating: float = 0.0


@dataclass
class Learnt:
    """What came of it: the newest playbook, statistics, who was asked what, in order, and what LMs were told.

    Attributes:
        prompts: those of the program.
    """

    program: Any
    asked: list[tuple[str, ...]]
    prompts: list[str]

    @property
    def stats(self) -> AceStats:
        return self.program.async_stats

    @property
    def texts(self) -> list[str]:
        return [bullet.content for bullet in self.program.playbook.bullets]

    def way(self, sample: int = 0) -> list[str]:
        return [request[0] for request in self.asked if request[1] == f"question: {sample}"]


def learnt(
    *scripts: Script,
    playbook: Playbook = BOOK,
    **options: Any,
) -> Learnt:
    """A stream of one window, a sample a script, all at once in virtual time."""
    asked: list[tuple[str, ...]] = []
    prompts: list[str] = []
    attempts = [0] * len(scripts)

    def metric(gold: Any, pred: Any) -> dspy.Prediction:
        sample = int(gold.question)
        scores, number = scripts[sample].scores, attempts[sample]
        attempts[sample] += 1
        asked.append(("attempt", f"question: {sample}"))
        return dspy.Prediction(score=scores[min(number, len(scores) - 1)], feedback="feedback")

    def of(task: str) -> Script:
        return scripts[int(task.removeprefix("question: "))]

    class Reflects(dspy.Module):
        async def aforward(self, task: str, **inputs: Any) -> Any:
            script, first = of(task), ("reflect", task) not in asked
            asked.append(("reflect", task))
            await anyio.sleep(script.before if first else 0)
            return dspy.Prediction(insight=script.insight, bullet_tags=json.dumps({**script.tags, "x": "splendid"}))

    class Curates(dspy.Module):
        async def aforward(self, task: str, **inputs: Any) -> Any:
            asked.append(("curate", task))
            await anyio.sleep(of(task).curating)
            return dspy.Prediction(operations=[*of(task).operations, {"type": "HUG"}])

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return reply_for(prompt, answer="1", cited_bullets="oth-1, oth-2, oth-9")

    modules = {"reflector": Reflects(), "curator": Curates()}
    optimizer = AsyncACE(metric, **{"num_threads": 16, "token_budget": 10_000, **modules, **options})
    stream = [dspy.Example(question=str(number)).with_inputs("question") for number in range(len(scripts))]

    async def main() -> Any:
        with dspy.context(lm=fake_lm(answer)):
            return await optimizer.aadapt(Chain(), stream, window=len(stream), playbook=playbook)

    return Learnt(run(main), asked, prompts)


RIGHT = (1.0,)


def test_a_wrong_answer_is_tried_again_with_the_reflection_until_it_is_right() -> None:
    run = learnt(Script((0.0, 0.0, 1.0)))
    assert run.way() == ["attempt", "reflect", "attempt", "reflect", "attempt", "curate"]
    advised = ["What was learnt from an earlier attempt at this task:" in prompt for prompt in run.prompts]
    assert advised == [False, True, True]
    assert all(("Insight: an insight" in prompt) == told for prompt, told in zip(run.prompts, advised, strict=True))
    assert (run.stats.right_at_once, run.stats.corrected) == (0, 1)
    assert run.stats.windows[0].scored == 1


def test_a_reflection_that_says_nothing_ends_the_rounds_and_its_tags_still_count() -> None:
    run = learnt(Script(insight="", tags={"oth-1": "harmful"}))
    assert run.way() == ["attempt", "reflect"]
    assert run.stats.ended["rejected"] == 1
    assert run.stats.problems["empty reflection"] == 1
    assert run.program.playbook.bullets[0].harmful == 1


def test_tags_count_once_a_reflection_leave_the_version_and_pass_by_what_was_not_cited() -> None:
    run = learnt(Script(tags={"oth-1": "helpful", "oth-9": "harmful"}))
    assert run.program.playbook.bullets[0].helpful == 3
    assert (run.program.playbook.version, run.stats.ended["rejected"]) == (BOOK.version, 1)
    assert run.stats.problems["tag of an uncited bullet"] == 3


def test_tags_of_what_went_meanwhile_count_nothing() -> None:
    late = Script(RIGHT, tags={"oth-1": "helpful"}, curating=10)
    run = learnt(late, Script(RIGHT, operations=[{"type": "REMOVE", "id": "oth-1"}]))
    assert run.stats.problems["tag of a gone bullet"] == 1
    assert run.stats.tags == {}
