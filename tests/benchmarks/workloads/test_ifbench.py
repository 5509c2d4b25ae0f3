"""IFBench's workload: its splits, its program, its score and feedback; and IFEval's for a small model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import dspy
import pytest

from benchmarks.workloads import constraints, ifbench
from benchmarks.workloads.definition import NamedWorkload
from benchmarks.workloads.registry import workload_named
from dspy_flashevolve import AsyncGEPA
from tests.fakes import fake_lm, reply_for

pytest.importorskip("if_verifiable", reason="if-verifiable judges the constraints, on Python 3.11 or newer")

NO_COMMA = "punctuation:no_comma"


def row(prompt: str, kind: str = NO_COMMA, **arguments: Any) -> dict[str, Any]:
    return {"key": prompt, "prompt": prompt, "instruction_id_list": [kind], "kwargs": [arguments]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with 12 rows of IFEval, two of them alike, and 4 of IFBench; half of them ask for nltk's data."""
    stop_words = {"kind": "ratio:stop_words", "percentage": 30}
    capitals = {"kind": "change_case:capital_word_frequency", "capital_frequency": 2, "capital_relation": "at least"}
    rows = {
        "ifeval": [*(row(f"learn {n}") for n in range(6)), *(row(f"shout {n}", **capitals) for n in range(5))],
        "ifbench": [row("try", **stop_words), row("test", "count:numbers", N=0.0, word=None), row("probe"),
                    row("learn 0")],
    }  # fmt: skip
    for source, lines in rows.items():
        path = tmp_path / ifbench.SOURCES[source].file
        path.parent.mkdir()
        path.write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, lines[-1]]), encoding="utf-8")
    monkeypatch.setenv("FLASHEVOLVE_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without nltk's data."""
    monkeypatch.setattr(constraints, "kinds_without_data", lambda: frozenset(constraints.NLTK_DATA))


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with nltk's data."""
    monkeypatch.setattr(constraints, "kinds_without_data", lambda: frozenset())


def prompts(examples: list[dspy.Example]) -> set[str]:
    return {example.prompt for example in examples}


def test_train_and_val_are_ifevals_rows_and_test_is_all_of_ifbenchs(folder: Path, online: None) -> None:
    workload = workload_named("ifbench", train=6, val=4)
    assert prompts(workload.trainset + workload.valset) == {f"learn {n}" for n in range(1, 6)} | {
        f"shout {n}" for n in range(5)
    }
    assert prompts(workload.testset) == {"try", "test", "probe", "learn 0"}


def test_rows_that_cannot_be_judged_offline_are_left_out(folder: Path, offline: None) -> None:
    workload = workload_named("ifbench", train=3, val=2)
    assert prompts(workload.trainset + workload.valset) == {f"learn {n}" for n in range(1, 6)}
    assert prompts(workload.testset) == {"test", "probe", "learn 0"}
    with pytest.raises(ValueError, match="ifbench has 2 rows left for val, 3 were asked for: ask for fewer"):
        workload_named("ifbench", train=3, val=3)


def test_the_program_answers_and_then_ensures_the_constraints(folder: Path, offline: None) -> None:
    workload = workload_named("ifbench", train=1, val=1)
    assert [name for name, _ in workload.program().named_predictors()] == list(workload.outputs)
    with dspy.context(lm=fake_lm(lambda prompt: reply_for(prompt, draft="First, try", response="Try first"))):
        prediction = workload.program()(prompt="Say something.")
        awaited = asyncio.run(workload.program().acall(prompt="Say something."))
    assert prediction.toDict() == awaited.toDict() == {"draft": "First, try", "response": "Try first"}


GOLD = dspy.Example(
    prompt="Say something.", kinds=[NO_COMMA, "count:numbers", "startend:quotation"], arguments=[{}, {"N": 0}, {}]
).with_inputs("prompt")


def test_the_score_is_loose_and_the_feedback_says_what_is_met_strictly() -> None:
    metric = ifbench.metric
    result = metric(GOLD, dspy.Prediction(response="Sure, 1:\nRun and jump"), None, None, None)
    assert result.score == pytest.approx(2 / 3)
    assert result.feedback.splitlines() == [
        "Not met: Wrap your entire response with double quotation marks.",
        "Met only without the first or last line or the asterisks: In your entire response, refrain from the use of "
        "any commas.",
        "Met only without the first or last line or the asterisks: Include exactly 0 numbers in the response.",
        "Strictly, 0 of 3 constraints are met.",
    ]
    assert metric(GOLD, dspy.Prediction(response='"Run and jump"')).score == 1
    assert metric(GOLD, dspy.Prediction()).score == metric(GOLD, dspy.Prediction(response=None)).score == 0


def test_an_optimizer_finds_an_instruction_that_meets_the_constraint(folder: Path, offline: None) -> None:
    def answer(prompt: str) -> str:
        return reply_for(prompt, draft="yes", response="yes" if "without commas" in prompt else "yes, a comma")

    workload: NamedWorkload = workload_named("ifbench", train=3, val=2)
    reflection_lm = fake_lm(lambda prompt: reply_for(prompt, new_instruction="Write without commas."))
    optimizer = AsyncGEPA(metric=workload.metric, max_metric_calls=30, reflection_lm=reflection_lm, num_threads=2)
    with dspy.context(lm=fake_lm(answer)):
        best = optimizer.compile(workload.program(), trainset=workload.trainset, valset=workload.valset)
        scores = [workload.metric(example, best(prompt=example.prompt)).score for example in workload.testset]
    assert scores == [1, 1, 1]


def test_the_real_rows_fill_the_usual_size_and_no_kind_of_the_test_is_learned(real_rows: Path) -> None:
    workload = workload_named("ifbench")
    assert (workload.size.train, workload.size.val) == (150, 300)
    assert len(workload.testset) >= 270  # 299 with nltk's data
    learned = {kind for example in workload.trainset + workload.valset for kind in example.kinds}
    tested = {kind for example in workload.testset for kind in example.kinds}
    assert not learned & tested
