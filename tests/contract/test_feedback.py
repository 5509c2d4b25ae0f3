"""What reflection reads: how often a metric is asked for it, of which answer it speaks, and replies with holes."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable
from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import LMRateLimitError

from dspy_flashevolve import AsyncGEPA, Workflow
from tests.contract.surface import TRAIN, VAL, Heard, InThread, simulated
from tests.fakes import Chain, digits, fake_lm, hashed, reflection_lm, reply_for, task_lm

every = pytest.mark.parametrize("name", ["async", "lockstep", "dspy.GEPA"])
ours = pytest.mark.parametrize("name", ["async", "lockstep"])


def run(name: str, metric: Callable[..., Any], predictors: int = 1, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The result of a run, and all records that reflections read."""
    heard = Heard()
    settings: dict[str, Any] = {"max_metric_calls": 80, "num_threads": 4, "track_stats": True}
    settings |= {"reflection_lm": reflection_lm(), "gepa_kwargs": {"callbacks": [heard]}} | options
    student = settings.pop("program", None) or Chain(predictors)
    more = {"schedule": name} if name != "dspy.GEPA" else {}
    optimizer: Any = (dspy.GEPA if name == "dspy.GEPA" else AsyncGEPA)(metric, **settings, **more)
    details = optimizer.compile(student, trainset=TRAIN, valset=VAL).detailed_results
    return details, records_in(heard)


def records_in(heard: Heard) -> list[dict[str, Any]]:
    datasets = [event["dataset"] for event in heard.of("on_reflective_dataset_built")]
    return [record for dataset in datasets for records in dataset.values() for record in records]


class Judge:
    """Scores anew at each call, and says in its feedback which call it was."""

    def __init__(self) -> None:
        self.calls = itertools.count()
        self.names: dict[int, str | None] = {}
        """Number of a call -> the predictor that it was asked about; threads may come at once."""

    def judge(self, gold: Any, pred: Any, name: str | None = None) -> Any:
        number = next(self.calls)
        self.names[number] = name
        return dspy.Prediction(score=hashed(number, gold.question) % 97 / 100, feedback=f"call {number}")

    def plain(self, gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        return self.judge(gold, pred)

    async def awaited(
        self, gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None
    ) -> Any:
        return self.judge(gold, pred)

    def named(self, gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        return self.judge(gold, pred, pred_name)

    def passed_on(self, *arguments: Any) -> Any:
        return self.named(*arguments)

    def partial(self, way: str, gold: Any, pred: Any, trace: Any, pred_name: Any, pred_trace: Any) -> Any:
        return self.judge(gold, pred)

    @property
    def asked(self) -> list[str]:
        """For which predictors it was asked for feedback."""
        return [name for name in self.names.values() if name is not None]

    def speaks_of(self, records: list[dict[str, Any]]) -> list[bool]:
        """Of each record, whether its feedback came with a score that counted."""
        return [self.names[int(record["Feedback"].removeprefix("call "))] is None for record in records]


@pytest.mark.parametrize("predictors", [1, 2])
@pytest.mark.parametrize("way", ["plain", "awaited", "partial"])
@ours
def test_a_judge_that_scores_anew_is_paid_once_and_reflection_reads_the_feedback_of_the_score(
    name: str, way: str, predictors: int
) -> None:
    judge = Judge()
    metric = functools.partial(judge.partial, "fair") if way == "partial" else getattr(judge, way)
    details, records = run(name, metric, predictors)
    assert len(records) >= 9
    assert next(judge.calls) <= details.total_metric_calls
    assert len({record["Feedback"] for record in records}) > 3


def test_of_one_predictor_a_judge_that_is_seen_to_judge_anew_is_asked_no_more() -> None:
    judge = Judge()
    _, records = run("async", judge.named)
    assert len(records) >= 9
    assert all(judge.speaks_of(records))
    assert 0 < len(judge.asked) <= 4 * 3, "by the steps that had begun, three examples each"


@pytest.mark.parametrize("predictors", [1, 2])
def test_a_metric_whose_code_cannot_be_read_is_asked_again_only_for_several_predictors(predictors: int) -> None:
    judge = Judge()
    _, records = run("async", judge.passed_on, predictors)
    assert len(records) >= 9
    assert all(judge.speaks_of(records)) == (predictors == 1)
    assert bool(judge.asked) == (predictors == 2)


def by_name(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
    result = digits(gold, pred)
    calls = len(trace) if trace else 0
    return dspy.Prediction(score=result.score, feedback=f"{pred_name} of {calls}: {gold.question}")


@pytest.mark.parametrize("predictors", [1, 2])
@every
def test_feedback_on_a_predictor_is_what_the_metric_says_of_it(name: str, predictors: int) -> None:
    _, records = run(name, by_name, predictors)
    texts = [record["Feedback"].partition(":")[0] for record in records]
    assert set(texts) == {f"steps[{number}] of {predictors}" for number in range(predictors)}


def score_alone(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
    return digits(gold, pred).score if pred_name is None else digits(gold, pred)


@every
def test_a_metric_that_gives_a_score_alone_is_asked_for_feedback(name: str) -> None:
    _, records = run(name, score_alone)
    assert records
    assert all(" got " in record["Feedback"] for record in records)


# A judge that is turned away


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_of_a_judge_that_is_turned_away_one_example_is_asked_again_not_the_minibatch(schedule: str) -> None:
    requests, answered, heard = itertools.count(1), list[str](), Heard()

    def judge(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        if pred_name is not None:
            if next(requests) % 3 == 0:
                raise LMRateLimitError("429")
            answered.append(gold.question)
        return digits(gold, pred)

    options = {"reflection_minibatch_size": 6, "gepa_kwargs": {"callbacks": [heard]}, "schedule": schedule}
    with dspy.context(lm=fake_lm(lambda prompt: reply_for(prompt, answer=str(hashed(prompt) % 6)))):
        stats = simulated(90, metric=judge, **options).async_stats
    assert stats.outcome == "finished"
    assert stats.ended.get("failed", 0) == 0
    assert len(answered) == len(records_in(heard)) >= 12, "what was answered was not asked for again"
    assert next(requests) - 1 <= 1.5 * len(answered)


# Replies that lack a field

TWO_FIELDS, ONE_OF_THREE = "question -> answer, reason", "question -> answer: Literal['1', '2', '3'], reason"


def incomplete(prompt: str) -> str:
    """Every second question is answered without a reason, whatever the format."""
    answer = str(hashed(prompt) % 6)
    question = prompt.rpartition("question ## ]]")[2].strip().split("\n")[0]
    if hashed(question) % 2:
        return reply_for(prompt, answer=answer)
    return reply_for(prompt, answer=answer, reason="-")


@pytest.mark.parametrize("log_dir", [True, False])
@every
def test_a_reply_that_lacks_a_field_is_shown_to_reflection_with_the_name_of_the_field(
    name: str, log_dir: bool, tmp_path: Any
) -> None:
    options = {"log_dir": str(tmp_path)} if log_dir else {}
    with dspy.context(lm=fake_lm(incomplete)):
        details, records = run(
            name,
            digits,
            program=InThread(TWO_FIELDS),
            add_format_failure_as_feedback=True,
            failure_score=0.1,
            **options,
        )
    shown = [record for record in records if isinstance(record["Generated Outputs"], str)]
    assert 0.1 in details.val_subscores[0].values(), "some replies were incomplete"
    assert bool(shown) == (name != "dspy.GEPA"), "which fails over such a reply, and drops the example"
    for record in shown:
        assert "lacks the field `reason`" in record["Feedback"]
        assert "Follow this structure" in record["Feedback"]
        assert "answer" in record["Generated Outputs"]
        assert record["Inputs"]["question"]


def invalid(prompt: str) -> str:
    """Every second question is answered by what is none of the three, whatever the format."""
    question = prompt.rpartition("question ## ]]")[2].strip().split("\n")[0]
    return reply_for(prompt, answer="seven" if hashed(question) % 2 else "3", reason="-")


@ours
def test_a_reply_with_a_value_of_another_type_is_shown_to_reflection_with_what_is_wrong(name: str) -> None:
    with dspy.context(lm=fake_lm(invalid)):
        _, records = run(
            name,
            digits,
            program=InThread(ONE_OF_THREE),
            add_format_failure_as_feedback=True,
        )
    shown = [record["Feedback"] for record in records if isinstance(record["Generated Outputs"], str)]
    assert shown
    for feedback in shown:
        assert "Failed to parse field answer" in feedback
        assert "Input should be '1', '2' or '3'" in feedback
        assert "Follow this structure" in feedback
        assert "lacks" not in feedback


@every
def test_unless_it_is_asked_for_a_reply_that_lacks_a_field_is_not_shown(name: str) -> None:
    with dspy.context(lm=fake_lm(incomplete)):
        _, records = run(name, digits, program=InThread(TWO_FIELDS))
    assert records
    assert not any(isinstance(record["Generated Outputs"], str) for record in records)


def test_lockstep_equals_gepa_where_replies_lack_a_field() -> None:
    with dspy.context(lm=fake_lm(incomplete)):
        results = [
            run(name, digits, program=InThread(TWO_FIELDS))[0].val_subscores for name in ("lockstep", "dspy.GEPA")
        ]
    assert results[0] == results[1]


def test_feedback_on_the_examples_of_a_minibatch_is_asked_for_side_by_side() -> None:
    inside, most = 0, 0

    async def judge(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        nonlocal inside, most
        if pred_name is not None:
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(1)
            inside -= 1
        return digits(gold, pred)

    with dspy.context(lm=task_lm()):
        simulated(60, metric=judge, workflow=Workflow(live_steps=1))
    assert most == 3
