"""One measured run: the methods, the count of rollouts, the plain evaluation, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dspy
import pytest

from benchmarks import throughput
from benchmarks.measure import Bench, NoMeter, counter
from benchmarks.methods import Limits, Method, Workload, method
from benchmarks.results import read_results
from benchmarks.trajectory import Recorder
from tests.fakes import examples, hashed, reflection_lm, task_lm

BENCH = Bench("test", "fake", NoMeter())


class NoOp(dspy.Module):
    """Answers with its own instruction, at once, and leaves the trace that a predictor would."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = dspy.Predict(dspy.Signature("question -> text", "Answer."))

    def forward(self, question: str) -> dspy.Prediction:
        prediction = dspy.Prediction(text=self.answer.signature.instructions)
        if dspy.settings.trace is not None:
            dspy.settings.trace.append((self.answer, {"question": question}, prediction))
        return prediction

    async def aforward(self, question: str) -> dspy.Prediction:
        return self.forward(question)


def checksum_score(gold: Any, pred: Any, *_: Any) -> dspy.Prediction:
    """A score below 1 that the instruction and the question decide."""
    return dspy.Prediction(score=hashed(pred.text, gold.question) % 997 / 1000, feedback="None.")


def _workload() -> Workload:
    return Workload(NoOp, examples("t", 6), examples("v", 6), checksum_score, task_lm(), reflection_lm())


@pytest.mark.parametrize("name", ["gepa", "gepa-independent-4", "gepa-pxn-2x2"])
def test_a_run_of_dspy_gepa_ends_with_its_figures(name: str) -> None:
    result = BENCH.run(method(name), _workload(), Limits(slots=4, seed=0, metric_calls=60))
    assert result.error == ""
    assert result.method == name
    assert result.total_metric_calls >= 60
    assert result.scored == result.total_metric_calls
    assert result.overshoot == result.total_metric_calls - 60
    assert result.proposals > 0
    assert result.best_score is not None
    assert result.best_score >= (result.seed_score or 0.0) > 0


def test_what_ended_a_run_stands_in_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    def build(task: Workload, limits: Limits, recorder: Recorder) -> Any:
        raise RuntimeError("no such model")

    result = BENCH.run(Method("broken", build), _workload(), Limits(slots=1, seed=0, seconds=5.0))
    assert result.error == "RuntimeError: no such model"
    assert "Traceback" in capsys.readouterr().err


def test_a_counter_of_prometheus_is_summed_over_its_labels() -> None:
    text = 'a_total{engine="0",reason="stop"} 2.0\na_total{engine="0",reason="length"} 1e1\na_total_x 5\n'
    assert counter(text, "a_total") == 12.0
    assert counter("", "a_total") == 0.0


def test_throughput_spends_a_budget_with_a_program_that_runs_in_threads(tmp_path: Path) -> None:
    out = tmp_path / "runs.jsonl"
    run = ["--seconds", "0", "--calls", "40", "--slots", "8", "--train", "6", "--val", "6", "--time-scale", "50"]
    assert throughput.main([*run, "--sync", "--methods", "gepa", "async", "--out", str(out)]) == 0
    for result in read_results(out):
        assert (result.error, result.settings, result.call_limit) == ("", "program without aforward", 40)
        assert 0 < result.seconds <= result.total_seconds
