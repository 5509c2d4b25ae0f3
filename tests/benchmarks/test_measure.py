"""One measured run: the methods, the count of rollouts, the plain evaluation, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dspy
import pytest

from benchmarks import throughput
from benchmarks.measure import Bench, CountedMetric, Figures, NoMeter, counter
from benchmarks.methods import UNLIMITED_CALLS, Limits, Method, PlainEvaluation, Workload, method
from benchmarks.results import read_results
from benchmarks.trajectory import Recorder
from benchmarks.workloads.house_rules import without_aforward
from dspy_flashevolve.programs.placement import runs_on_loop
from dspy_flashevolve.sim import HouseRules
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


def test_a_run_of_async_gepa_never_overshoots() -> None:
    result = BENCH.run(method("async"), _workload(), Limits(slots=4, seed=0, metric_calls=60))
    assert result.error == ""
    assert 0 < result.scored <= result.total_metric_calls <= 60
    assert result.overshoot == 0
    assert result.proposals > 0


def test_the_plain_evaluation_runs_as_many_rollouts_as_it_was_given() -> None:
    result = BENCH.run(method("evaluate"), _workload(), Limits(slots=4, seed=0, metric_calls=23))
    assert (result.error, result.scored, result.metric_calls) == ("", 23, 23)


def test_the_plain_evaluation_stops_at_its_time_and_runs_nothing_after_it() -> None:
    metric = CountedMetric(checksum_score)
    limits = Limits(slots=2, seed=0, seconds=0.0)
    task = _workload()
    PlainEvaluation(metric, limits).compile(NoOp(), trainset=task.trainset, valset=task.valset)
    assert metric.count == 0


def test_parallel_sampling_is_gepas_own() -> None:
    pxn: Any = method("gepa-pxn-2x5").build(_workload(), Limits(4, 0), Recorder())
    sampling = pxn.gepa_kwargs["sampling_strategy"]
    assert (type(sampling).__name__, sampling.p, sampling.n) == ("PxNSampling", 2, 5)


def test_a_time_limit_replaces_the_budget() -> None:
    optimizer: Any = method("gepa").build(_workload(), Limits(4, 0, seconds=30.0, time_scale=10.0), Recorder())
    assert optimizer.max_metric_calls == UNLIMITED_CALLS
    assert [stopper.timeout_seconds for stopper in optimizer.gepa_kwargs["stop_callbacks"]] == [3.0]


def test_an_unknown_method_is_named_in_the_error() -> None:
    with pytest.raises(ValueError, match="'gepa-independent-0'"):
        method("gepa-independent-0")


def test_a_call_for_a_predictors_feedback_is_not_a_rollout() -> None:
    metric = CountedMetric(lambda gold, pred, trace, pred_name, pred_trace: 1.0)
    metric(None, None)
    metric(None, None, [], "answer", [])
    assert metric.count == 1


def test_what_ended_a_run_stands_in_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    def build(task: Workload, limits: Limits, recorder: Recorder) -> Any:
        raise RuntimeError("no such model")

    result = BENCH.run(Method("broken", build), _workload(), Limits(slots=1, seed=0, seconds=5.0))
    assert result.error == "RuntimeError: no such model"
    assert "Traceback" in capsys.readouterr().err


def test_the_servers_figures_are_read_once() -> None:
    class Meter(NoMeter):
        reads = 0

        def read(self) -> Figures:
            self.reads += 1
            return Figures(completion_tokens=12.0, requests=3)

    meter = Meter()
    result = Bench("test", "fake", meter).run(method("evaluate"), _workload(), Limits(2, 0, seconds=5, metric_calls=8))
    assert (meter.reads, result.completion_tokens, result.requests) == (1, 12.0, 3)


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


def test_throughput_needs_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        throughput.parse(["--seconds", "0"])
    assert "--calls" in capsys.readouterr().err


def test_a_program_without_aforward_runs_in_threads_and_keeps_its_predictors() -> None:
    program = HouseRules().program(2)
    threaded = without_aforward(HouseRules().program(2)).deepcopy()
    assert (runs_on_loop(program), runs_on_loop(threaded)) == (True, False)
    assert [name for name, _ in threaded.named_predictors()] == [name for name, _ in program.named_predictors()]
