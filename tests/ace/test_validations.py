"""Which playbooks are validated beside the samples, and that a run goes on from the best after one that shows harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import dspy
import pytest

from dspy_flashevolve import AsyncACE
from dspy_flashevolve.engine.errors import RolloutUnresolvedError
from dspy_flashevolve.sim.virtual import run

TRAIN, VAL = (
    [dspy.Example(question=f"{name} {number}", answer="").with_inputs("question") for number in range(8)]
    for name in ("train", "val")
)


class Student(dspy.Module):
    """Answers with its instructions, so that a metric can read the playbook; takes longer to be validated."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.predict = dspy.Predict(dspy.Signature("question -> answer", "Answer."))

    async def aforward(self, question: str) -> dspy.Prediction:
        await anyio.sleep(self.seconds if question.startswith("val") else 1)
        return dspy.Prediction(answer=self.predict.signature.instructions)


class Reflects(dspy.Module):
    async def aforward(self, **inputs: Any) -> dspy.Prediction:
        return dspy.Prediction(insight="an insight", bullet_tags="{}")


class Curates(dspy.Module):
    """Adds the next lesson of a list, and nothing when there are no more."""

    def __init__(self, lessons: list[str]) -> None:
        super().__init__()
        self.lessons = list(lessons)

    def __deepcopy__(self, memo: Any) -> Curates:
        return self

    async def aforward(self, **inputs: Any) -> dspy.Prediction:
        lesson = self.lessons.pop(0) if self.lessons else ""
        added = [{"type": "ADD", "section": "other", "content": lesson}] if lesson else []
        return dspy.Prediction(operations=json.dumps(added))


def score(gold: Any, pred: Any) -> float:
    return 0.5 + 0.1 * pred.answer.count("good") - 0.2 * pred.answer.count("bad")


def learnt(lessons: list[str], metric: Any = score, seconds: float = 1, **options: Any) -> Any:
    asked: dict[str, Any] = {
        "num_threads": 1, "eval_every": 1, "max_rounds": 1, "reflector": Reflects(), "curator": Curates(lessons),
        **options,
    }  # fmt: skip
    optimizer = AsyncACE(metric, **asked)
    made: Any = run(lambda: optimizer.acompile(Student(seconds), trainset=TRAIN, valset=VAL))
    return made


def texts(program: Any) -> list[str]:
    return [bullet.content for bullet in program.playbook.bullets]


def validated(program: Any) -> list[int]:
    return [snapshot.version for snapshot in program.async_stats.snapshots]


def test_of_the_playbooks_that_wait_the_newest_is_validated() -> None:
    """A validation takes as long as three samples of two rollouts each."""
    program = learnt([f"lesson {number}" for number in range(8)], seconds=6, num_threads=16, epochs=3)
    assert validated(program)[0] == 0
    assert validated(program)[-1] == program.async_stats.version == 8
    assert validated(program) == sorted(set(validated(program)))
    assert len(validated(program)) < 9


@pytest.mark.parametrize("limit", [18, 30, 60])
def test_the_first_and_the_last_playbook_are_validated_whatever_samples_take(limit: int) -> None:
    program = learnt([f"lesson {number}" for number in range(8)], num_threads=8, max_metric_calls=limit)
    assert {0, program.async_stats.version} <= set(validated(program))
    assert program.async_stats.metric_calls <= limit


def test_a_first_playbook_whose_validation_got_no_answer_is_validated_later() -> None:
    samples = 0

    def metric(gold: Any, pred: Any) -> float:
        nonlocal samples
        samples += gold.question.startswith("train")
        if gold.question == "val 3" and samples < 60:
            raise RolloutUnresolvedError("no answer")
        return score(gold, pred)

    program = learnt(["good one"], metric, num_threads=4, epochs=20)
    assert program.async_stats.unresolved > 0
    assert set(validated(program)) == {0, 1}


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
        return 0.0 if "bad" in pred.answer and int(gold.question.split()[1]) < losing else 0.5

    assert learnt(LESSONS, metric).async_stats.rolled_back == 0


def test_a_run_that_goes_on_compares_with_what_was_validated_before(tmp_path: Path) -> None:
    learnt(["good one"], log_dir=str(tmp_path), max_metric_calls=26)
    program = learnt(["bad one", "indifferent", "good two"], log_dir=str(tmp_path), max_metric_calls=200)
    assert program.async_stats.rolled_back == 1
    assert texts(program) == ["good one", "good two"]
