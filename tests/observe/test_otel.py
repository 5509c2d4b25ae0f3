"""What OpenTelemetry is told of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import dspy
import pytest

from dspy_flashevolve import RunAbortedError
from dspy_flashevolve.sim.virtual import run
from tests.adding_an_algorithm.hill_climber import HillClimber
from tests.contract.surface import compiled, raising, simulated, text_of
from tests.fakes import Chain, digits, examples, fake_lm, hashed, reply_for, task_lm

BARE = """
import sys
import dspy
from tests.contract.surface import simulated
from tests.fakes import task_lm

with dspy.context(lm=task_lm()):
    simulated(60)
print({name.split(".")[0] for name in sys.modules} & {"mlflow", "opentelemetry", "wandb"})
"""


@pytest.mark.long
def test_nothing_of_a_tracker_is_imported_unless_it_is_asked_for() -> None:
    ran = subprocess.run([sys.executable, "-c", BARE], env=os.environ, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


@pytest.fixture
def told() -> Any:
    """A callback for dspy; the spans that have ended; the metrics by name, when they are asked for."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from dspy_flashevolve.observe.otel import OpenTelemetry

    spans, reader, tracers = InMemorySpanExporter(), InMemoryMetricReader(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))

    def points(name: str) -> list[Any]:
        data: Any = reader.get_metrics_data()
        metrics = [metric for of in data.resource_metrics for scope in of.scope_metrics for metric in scope.metrics]
        return [point for metric in metrics if metric.name == name for point in metric.data.data_points]

    return SimpleNamespace(
        callback=OpenTelemetry(tracers, MeterProvider([reader])),
        tracer=tracers.get_tracer("the test's"),
        spans=spans.get_finished_spans,
        points=points,
    )


def parent_of(span: Any) -> Any:
    return None if span.parent is None else span.parent.span_id


def test_a_run_is_a_span_with_its_steps_and_they_have_their_stages(told: Any) -> None:
    with dspy.context(lm=task_lm(), callbacks=[told.callback]):
        stats = simulated(150).async_stats
    spans = told.spans()
    [run] = [span for span in spans if parent_of(span) is None]
    assert run.name == "evolve AsyncGEPA"
    assert run.attributes["flashevolve.end"] == stats.outcome
    assert run.attributes["flashevolve.reason"] == stats.stop_reason
    assert run.attributes["flashevolve.metric_calls"] == stats.metric_calls
    assert run.attributes["flashevolve.best_score"] == stats.best_score
    steps = {span.context.span_id: span for span in spans if span.name == "step"}
    assert {parent_of(step) for step in steps.values()} == {run.context.span_id}
    assert Counter(step.attributes["flashevolve.end"] for step in steps.values()) == +Counter(stats.ended)
    gaps = [commit.gap for commit in stats.commits]
    assert sorted(
        step.attributes["flashevolve.gap"] for step in steps.values() if "flashevolve.gap" in step.attributes
    ) == sorted(gaps)
    stages = [span for span in spans if span is not run and span.context.span_id not in steps]
    of_steps = [
        (steps[parent_of(stage)].attributes["flashevolve.step"], stage.name)
        for stage in stages
        if parent_of(stage) in steps
    ]
    assert Counter(of_steps) == Counter((visit.step, visit.stage) for visit in stats.stages if visit.step >= 0)
    assert {stage.name for stage in stages if parent_of(stage) == run.context.span_id} == {"validate"}, "the seed's"
    seconds = sum(stage.end_time - stage.start_time for stage in stages) / 1e9
    assert seconds == pytest.approx(sum(visit.ended - visit.queued for visit in stats.stages), abs=1e-3)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_tokens_are_those_of_the_stages_whether_calls_are_awaited_or_made_in_threads(
    told: Any, asynchronous: bool
) -> None:
    class Both(dspy.Module):
        """Two calls at once in one rollout."""

        def __init__(self) -> None:
            super().__init__()
            self.steps = [dspy.Predict("question -> answer")]

        def forward(self, question: str) -> dspy.Prediction:
            pairs = [(self.steps[0], {"question": f"{question} {number}"}) for number in range(2)]
            answers: Any = dspy.Parallel(num_threads=2, disable_progress_bar=True)(pairs)
            return dspy.Prediction(answer=" ".join(answer.answer for answer in answers))

    with dspy.context(lm=task_lm(asynchronous=asynchronous), callbacks=[told.callback]):
        stats = compiled(80, Chain() if asynchronous else Both()).async_stats
    by_stage: Counter[str] = Counter()
    for span in told.spans():
        used = {name: span.attributes.get(f"gen_ai.usage.{name}_tokens", 0) for name in ("input", "output")}
        by_stage[span.name] += sum(used.values())
        assert used["input"] * 4 == used["output"] * 3, "every call of the fake reads 3 tokens and writes 4"
        assert bool(used["input"]) == (span.attributes.get("gen_ai.request.model") == "model")
    assert +by_stage == +Counter(stats.tokens_by_stage)


def test_metrics_have_the_names_of_the_conventions_and_the_runs_figures(told: Any) -> None:
    seen: list[Any] = []

    class Looks(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = [dspy.Predict("question -> answer")]

        async def aforward(self, question: str) -> Any:
            seen.extend(told.points("flashevolve.slots.busy"))
            return await self.steps[0].acall(question=question)

    with dspy.context(lm=task_lm(), callbacks=[told.callback]):
        stats = simulated(80, Looks()).async_stats
    calls = sum(stats.tokens_by_stage.values()) // 7
    of_model = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "fake", "gen_ai.request.model": "model"}
    tokens = {point.attributes["gen_ai.token.type"]: point for point in told.points("gen_ai.client.token.usage")}
    assert {kind: (point.count, point.sum) for kind, point in tokens.items()} == {
        "input": (calls, 3 * calls),
        "output": (calls, 4 * calls),
    }
    assert tokens["input"].attributes == {**of_model, "gen_ai.token.type": "input"}
    [duration] = told.points("gen_ai.client.operation.duration")
    assert (duration.count, duration.attributes) == (calls, of_model)
    assert sum(point.value for point in told.points("flashevolve.metric_calls")) == stats.metric_calls
    assert {point.attributes["flashevolve.optimizer"] for point in seen} == {"AsyncGEPA"}
    assert max(point.value for point in seen) == stats.peak_slots
    assert told.points("flashevolve.slots.busy") == [], "the run is over"


def test_what_ends_a_run_is_told_without_secrets(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "correct-horse-battery-7"
    monkeypatch.setenv("THEIR_API_KEY", secret)
    refuses = raising(
        lambda number: dspy.LMAuthError(f"{secret} and sk-abcdefghijkl1234 are wrong") if number > 40 else None
    )
    with dspy.context(lm=refuses, callbacks=[told.callback]), pytest.raises(RunAbortedError):
        simulated(150)
    [run] = [span for span in told.spans() if parent_of(span) is None]
    assert run.status.status_code.name == "ERROR"
    assert run.attributes["flashevolve.end"] == "aborted"
    assert run.status.description.count("[redacted]") == 2
    written = " ".join(span.to_json() for span in told.spans())
    assert secret not in written
    assert "sk-abcdefghijkl1234" not in written
    errors = [point.attributes.get("error.type") for point in told.points("gen_ai.client.operation.duration")]
    assert "LMAuthError" in errors


def test_no_prompt_and_no_reply_is_told(told: Any) -> None:
    says = fake_lm(lambda prompt: reply_for(prompt, new_instruction=f"Say albatross {hashed(prompt)}"))
    with dspy.context(lm=task_lm(), callbacks=[told.callback]):
        program = simulated(150, reflection_lm=says)
    assert "albatross" in text_of(program)
    assert "albatross" not in " ".join(span.to_json() for span in told.spans())


def test_what_others_trace_is_in_the_runs_span_and_that_is_in_the_callers(told: Any) -> None:
    class Traced(Chain):
        async def aforward(self, question: str) -> dspy.Prediction:
            with told.tracer.start_as_current_span("theirs"):
                return await super().aforward(question)

    with (
        dspy.context(lm=task_lm(), callbacks=[told.callback]),
        told.tracer.start_as_current_span("the caller's") as caller,
    ):
        compiled(60, Traced())
    [run] = [span for span in told.spans() if span.name == "evolve AsyncGEPA"]
    assert parent_of(run) == caller.context.span_id
    assert {parent_of(span) for span in told.spans() if span.name == "theirs"} == {run.context.span_id}


def test_two_runs_at_once_keep_their_tokens_apart(told: Any) -> None:
    def run_with(calls: int) -> Any:
        with dspy.context(lm=task_lm(), callbacks=[told.callback]):
            return compiled(calls).async_stats

    with ThreadPoolExecutor(2) as threads:
        stats = list(threads.map(run_with, [60, 90]))
    tokens_by_run: Counter[int] = Counter()
    for span in told.spans():
        tokens_by_run[span.context.trace_id] += sum(
            span.attributes.get(f"gen_ai.usage.{name}_tokens", 0) for name in ("input", "output")
        )
    assert sorted(tokens_by_run.values()) == sorted(sum(of_run.tokens_by_stage.values()) for of_run in stats)


def test_a_loop_of_ones_own_is_told_alike(told: Any) -> None:
    lm = fake_lm(lambda prompt: reply_for(prompt, answer="5", new_instruction=f"Instruction {hashed(prompt)}"))
    with dspy.context(lm=lm, callbacks=[told.callback]):
        climber = HillClimber(digits, lm, max_metric_calls=20)
        stats: Any = run(lambda: climber.acompile(Chain(), trainset=examples("t", 4))).stats  # type: ignore[attr-defined]
    names = Counter(span.name for span in told.spans())
    assert names["evolve HillClimber"] == 1
    assert names["step"] == stats.steps
    assert set(names) == {"evolve HillClimber", "step", "propose", "evaluate"}
