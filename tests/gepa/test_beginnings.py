"""What a search begins from, and how long its candidates may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dspy
import pytest

from dspy_flashevolve import AsyncGEPA, DataError, Workflow
from dspy_flashevolve.sim import HouseRules
from dspy_flashevolve.sim.virtual import SimulatedModel, run

TASK = HouseRules()
TRAIN, VAL = TASK.trainset(12), TASK.valset(12)
SEED = len(TASK.program().predictors()[0].signature.instructions)
BOTH = pytest.mark.parametrize("schedule", ["async", "lockstep"])


def optimizer(calls: int = 120, **options: Any) -> tuple[AsyncGEPA, dspy.LM]:
    lm = SimulatedModel(reply_model=TASK.reply_model).lm()
    settings: dict[str, Any] = {"max_metric_calls": calls, "num_threads": 16, "track_stats": True} | options
    return AsyncGEPA(TASK.metric, reflection_lm=lm, **settings), lm


def compiled(calls: int = 120, initial: Any = (), **options: Any) -> Any:
    one, lm = optimizer(calls, **options)
    with dspy.context(lm=lm):
        return run(lambda: one.acompile(TASK.program(), trainset=TRAIN, valset=VAL, initial_candidates=initial))


def program(text: str) -> dspy.Module:
    made = TASK.program()
    predictor: Any = made.predictors()[0]
    predictor.signature = predictor.signature.with_instructions(text)
    return made


def texts(candidates: Any) -> list[str]:
    return [one.predictors()[0].signature.instructions for one in candidates]


@BOTH
def test_no_candidate_is_longer_than_the_limit_and_a_longer_one_costs_no_rollout(schedule: Any) -> None:
    heard: list[Any] = []

    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        for predictor, _, _ in pred_trace or ():
            heard.append(len(predictor.signature.instructions))
        return TASK.metric(gold, pred, trace, pred_name, pred_trace)

    limit = SEED + 60
    one, lm = optimizer(schedule=schedule, workflow=Workflow(max_candidate_characters=limit))
    one.metric_fn = metric
    with dspy.context(lm=lm):
        done: Any = run(lambda: one.acompile(TASK.program(), trainset=TRAIN, valset=VAL))
    lengths = [len(text) for text in texts(done.detailed_results.candidates)]
    assert SEED < max(lengths) <= limit, "some were longer than the seed, none than the limit"
    assert max(heard) <= limit
    reasons = done.async_stats.end_reasons
    assert sum(count for reason, count in reasons.items() if "max_candidate_characters" in reason) > 0
    free = compiled(schedule=schedule)
    assert max(map(len, texts(free.detailed_results.candidates))) > limit, "without it they are longer"


def test_a_seed_above_the_limit_is_refused_with_both_lengths() -> None:
    with pytest.raises(DataError, match=rf"student have {SEED} characters, above max_candidate_characters=20"):
        compiled(workflow=Workflow(max_candidate_characters=20))


@BOTH
def test_a_search_begins_from_initial_candidates_beside_the_student(schedule: Any) -> None:
    rules = TASK.all_rules()
    good = "Answer the question. Follow the house rules.\n" + "\n".join(map(str, rules[:12]))
    poor = "Answer."
    done = compiled(150, [program(good), program(poor), TASK.program()], schedule=schedule)
    details = done.detailed_results
    candidates = texts(details.candidates)
    assert {good, poor} <= set(candidates)
    assert candidates.count(candidates[0]) == 1, "the student is there already"
    assert details.parents[candidates.index(good)] == [0]
    assert max(details.val_aggregate_scores) >= details.val_aggregate_scores[candidates.index(good)]
    assert details.val_aggregate_scores[candidates.index(good)] > details.val_aggregate_scores[0] + 0.2
    children = [one for one in details.parents[1:] if one != [0]]
    assert children, "later candidates are made from them"
    if schedule == "async":
        assert details.total_metric_calls <= 150


def test_initial_candidates_are_validated_once_by_a_run_that_goes_on(tmp_path: Path) -> None:
    first = compiled(60, [program("Answer.")], log_dir=str(tmp_path))
    again = compiled(100, [program("Answer.")], log_dir=str(tmp_path))
    assert texts(first.detailed_results.candidates).count("Answer.") == 1
    assert texts(again.detailed_results.candidates).count("Answer.") == 1


def test_a_run_that_was_cut_off_while_it_validated_one_goes_on_with_it(tmp_path: Path) -> None:
    class Cut(Exception):
        pass

    calls = 0

    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        nonlocal calls
        calls += 1
        if calls == len(VAL) + 6:
            raise KeyboardInterrupt
        return TASK.metric(gold, pred, trace, pred_name, pred_trace)

    metric.__qualname__ = TASK.metric.__qualname__
    one, lm = optimizer(100, log_dir=str(tmp_path))
    one.metric_fn = metric
    with dspy.context(lm=lm), pytest.raises(BaseException):  # noqa: B017, PT011
        run(lambda: one.acompile(TASK.program(), trainset=TRAIN, valset=VAL, initial_candidates=[program("Answer.")]))
    done = compiled(100, [program("Answer.")], log_dir=str(tmp_path))
    assert texts(done.detailed_results.candidates).count("Answer.") == 1
    assert done.detailed_results.total_metric_calls <= 100


@pytest.mark.parametrize(
    ("initial", "said"),
    [
        ([dspy.Predict("question -> answer")], r"initial_candidates\[0\] has the predictors \['self'\], expected"),
        (["Answer."], r"initial_candidates\[0\] is 'Answer.', expected a dspy.Module"),
        ("Answer.", "expected a list of programs"),
    ],
)
def test_what_is_no_program_of_the_students_make_is_refused(initial: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        compiled(initial=initial)


def test_a_budget_that_cannot_validate_them_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected at least 36.*and so are 2 initial candidates"):
        compiled(30, [program("One."), program("Two.")])
