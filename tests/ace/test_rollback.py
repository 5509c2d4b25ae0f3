"""After a validation that shows harm a run goes on from the best validated playbook."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import dspy
import pytest

from dspy_flashevolve import AsyncACE
from dspy_flashevolve.sim.virtual import run

EXAMPLES = [dspy.Example(question=str(number), answer="").with_inputs("question") for number in range(8)]


class Student(dspy.Module):
    """Answers with its instructions, so that a metric can read the playbook."""

    def __init__(self) -> None:
        super().__init__()
        self.predict = dspy.Predict(dspy.Signature("question -> answer", "Answer."))

    async def aforward(self, question: str) -> dspy.Prediction:
        await anyio.sleep(1)
        return dspy.Prediction(answer=self.predict.signature.instructions)


class Reflects(dspy.Module):
    async def aforward(self, **inputs: Any) -> dspy.Prediction:
        return dspy.Prediction(insight="an insight", bullet_tags="{}")


def curator(lessons: list[str]) -> dspy.Module:
    """Adds the next lesson of a list, and nothing when there are no more."""
    left = iter(lessons)

    class Curates(dspy.Module):
        async def aforward(self, **inputs: Any) -> dspy.Prediction:
            added = [{"type": "ADD", "section": "other", "content": lesson} for lesson in [next(left, "")] if lesson]
            return dspy.Prediction(operations=json.dumps(added))

    return Curates()


def score(text: str) -> float:
    return 0.5 + 0.1 * text.count("good") - 0.2 * text.count("bad")


def learnt(lessons: list[str], metric: Any = lambda gold, pred: score(pred.answer), **options: Any) -> Any:
    asked: dict[str, Any] = {
        "num_threads": 1, "eval_every": 1, "max_rounds": 1, "reflector": Reflects(), "curator": curator(lessons),
        **options,
    }  # fmt: skip
    optimizer = AsyncACE(metric, **asked)
    made: Any = run(lambda: optimizer.acompile(Student(), trainset=EXAMPLES, valset=EXAMPLES))
    return made


def texts(program: Any) -> list[str]:
    return [bullet.content for bullet in program.playbook.bullets]


LESSONS = ["good one", "bad one", "indifferent", "", "", "good two"]


def test_what_is_learnt_later_builds_on_the_best_validated_playbook() -> None:
    program = learnt(LESSONS)
    assert program.async_stats.rolled_back == 1
    assert texts(program) == ["good one", "good two"]
    assert max(snapshot.score for snapshot in program.async_stats.snapshots) == pytest.approx(0.7)


def test_lockstep_goes_on_from_the_newest_playbook_as_ace_does() -> None:
    program = learnt(LESSONS, schedule="lockstep")
    assert program.async_stats.rolled_back == 0
    assert texts(program) == ["good one"], "the best that was validated; the bad one stands in all later ones"


@pytest.mark.parametrize("losing", [1, 2])
def test_a_loss_within_chance_rolls_nothing_back(losing: int) -> None:
    def metric(gold: Any, pred: Any) -> float:
        return 0.0 if "bad" in pred.answer and int(gold.question) < losing else 0.5

    program = learnt(LESSONS, metric)
    assert program.async_stats.rolled_back == 0


def test_a_run_that_goes_on_compares_with_what_was_validated_before(tmp_path: Path) -> None:
    learnt(["good one"], log_dir=str(tmp_path), max_metric_calls=26)
    program = learnt(["bad one", "indifferent", "good two"], log_dir=str(tmp_path), max_metric_calls=200)
    assert program.async_stats.rolled_back == 1
    assert texts(program) == ["good one", "good two"]
