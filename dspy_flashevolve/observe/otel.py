"""Runs as OpenTelemetry spans and metrics, after its conventions for generative AI. Needs the extra ``otel``."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import dspy
from dspy.utils.callback import BaseCallback
from dspy.utils.usage_tracker import track_usage
from opentelemetry import context, metrics, trace  # pyright: ignore[reportMissingImports]

from dspy_flashevolve.engine.events import Committed, Event, RolloutFinished, StageVisited, StepClosed, StepOpened
from dspy_flashevolve.engine.run import EvolutionRun
from dspy_flashevolve.engine.scheduler import SLOT_SETTING, current_slot
from dspy_flashevolve.engine.steps import EndKind

NAME = "dspy_flashevolve"
TOKEN_BUCKETS = [4**power for power in range(14)]
SECOND_BUCKETS = [0.01 * 2**power for power in range(14)]
"""Bounds of the histograms' buckets, as the conventions advise them."""


class OpenTelemetry(BaseCallback):
    """A callback of dspy's that reports runs to OpenTelemetry: ``dspy.configure(callbacks=[OpenTelemetry()])``.

    Spans: one for each run, inside it one for each step, and inside that one for each stage that the step went through.
    A stage's span has the tokens and models of its LM calls: ``gen_ai.usage.input_tokens``,
    ``gen_ai.usage.output_tokens``, ``gen_ai.request.model`` (several are joined by ", "). What other libraries trace
    during a run is inside the run's span.

    Metrics of every LM call, inside of runs and elsewhere: ``gen_ai.client.operation.duration`` (seconds, with the
    waits for a provider that turned the call away) and ``gen_ai.client.token.usage``. Metrics of runs:
    ``flashevolve.metric_calls``, ``flashevolve.slots.busy``, ``flashevolve.slots.limit``,
    ``flashevolve.requests.waiting`` and ``flashevolve.best_score``.

    Prompts and replies are not reported, except where the reason of an end quotes them, and secrets never are.

    Args:
        tracer_provider, meter_provider: OpenTelemetry's providers. Default: those that the process has set; where it
            has set none, nothing is sent anywhere.
    """

    def __init__(self, tracer_provider: Any = None, meter_provider: Any = None) -> None:
        self._tracer = trace.get_tracer(NAME, tracer_provider=tracer_provider)
        meter = metrics.get_meter(NAME, meter_provider=meter_provider)
        self._duration = meter.create_histogram(
            "gen_ai.client.operation.duration", "s", explicit_bucket_boundaries_advisory=SECOND_BUCKETS
        )
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage", "{token}", explicit_bucket_boundaries_advisory=TOKEN_BUCKETS
        )
        self._metric_calls = meter.create_counter("flashevolve.metric_calls", "{call}")
        self._calls: dict[str, tuple[Any, Any, str, str, float]] = {}
        self._runs: list[_RunSpans] = []
        units = {"slots.busy": "{slot}", "slots.limit": "{slot}", "requests.waiting": "{request}", "best_score": "1"}
        for name, unit in units.items():
            meter.create_observable_gauge(f"flashevolve.{name}", [partial(self._observe, name)], unit)

    def _observe(self, name: str, _: Any) -> Iterator[Any]:
        for run in [spans.run for spans in self._runs]:
            slots, of_run = run.scheduler.statistics(), {"flashevolve.optimizer": run.name}
            if name == "requests.waiting":
                for stage, state in slots.stages.items():
                    yield metrics.Observation(state.waiting, {**of_run, "flashevolve.stage": stage})
                continue
            values = {"slots.busy": slots.busy, "slots.limit": slots.limit, "best_score": run.recorder.best_score}
            if values[name] is not None:
                yield metrics.Observation(values[name], of_run)

    @contextmanager
    def observing(self, run: EvolutionRun) -> Generator[None, None, None]:
        """Report the run while it goes on; see :class:`~dspy_flashevolve.engine.run.Observer`."""
        spans = _RunSpans(run, self._tracer, self._metric_calls)
        self._runs.append(spans)
        run.bus.subscribe(spans)
        # What other libraries trace during the run becomes part of its span.
        attached, token = context.attach(trace.set_span_in_context(spans.span)), _CURRENT.set(spans)
        try:
            yield
        finally:
            _CURRENT.reset(token)
            context.detach(attached)
            self._runs.remove(spans)
            spans.end()

    def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        """Begin to count an LM call: its tokens alone, since a program may have several calls in flight."""
        counting = track_usage()
        kind = "text_completion" if instance.model_type == "text" else "chat"
        self._calls[call_id] = counting, counting.__enter__(), kind, str(instance.model), time.perf_counter()

    def on_lm_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        """Report an LM call that was answered or failed, and add its tokens to the stage that made it."""
        counting, tracker, kind, model, began = self._calls.pop(call_id)
        counting.__exit__(None, None, None)
        provider, slash, name = model.partition("/")
        attributes = {
            "gen_ai.operation.name": kind,
            "gen_ai.provider.name": provider if slash else "_OTHER",
            "gen_ai.request.model": name or model,
        }
        error = {} if exception is None else {"error.type": type(exception).__qualname__}
        self._duration.record(time.perf_counter() - began, attributes | error)
        used = tracker.get_total_tokens().get(model)
        if used is not None:
            tokens = {"input": used.get("prompt_tokens") or 0, "output": used.get("completion_tokens") or 0}
            for way, count in tokens.items():
                self._tokens.record(count, {**attributes, "gen_ai.token.type": way})
            slot = current_slot() or dspy.settings.get(SLOT_SETTING)
            # A thread of dspy.Parallel has dspy's settings but no context variables: with several runs, any may be its.
            spans = _CURRENT.get() or (self._runs[0] if len(self._runs) == 1 else None)
            if spans is not None and slot is not None:
                spans.add_usage(slot.step_and_stage, name or model, tokens)


class _RunSpans:
    """The spans of one run, a DspyRun, made from its events."""

    def __init__(self, run: Any, tracer: Any, metric_calls: Any) -> None:
        self.run, self._tracer, self._metric_calls = run, tracer, metric_calls
        # The engine's clock counts from anywhere, and a span needs the time of day.
        self._epoch = time.time_ns() - round(run.clock() * 1e9)
        self.span = self._begin(f"evolve {run.name}", None, run.clock(), **{"flashevolve.optimizer": run.name})
        self._steps: dict[int, Any] = {}
        self._lock = threading.Lock()  # LM calls may end in threads
        self._used: defaultdict[tuple[int, str], Counter[str]] = defaultdict(Counter)

    def __call__(self, event: Event) -> None:
        """Begin or end a span, or count, by what an event says."""
        if isinstance(event, RolloutFinished):
            self._metric_calls.add(1, {"flashevolve.optimizer": self.run.name, "flashevolve.stage": event.stage})
        elif isinstance(event, StepOpened):
            attributes = {"flashevolve.step": event.step, "flashevolve.version": event.version}
            self._steps[event.step] = self._begin("step", self.span, event.seconds, **attributes)
        elif isinstance(event, StageVisited):
            self._add_stage(event)
        elif isinstance(event, Committed):
            if event.step in self._steps:
                fields = {"candidate": event.candidate, "score": event.score, "gap": event.gap}
                self._steps[event.step].set_attributes({f"flashevolve.{name}": value for name, value in fields.items()})
        elif isinstance(event, StepClosed):
            failed = event.end.kind is EndKind.FAILED
            self._end(self._steps.pop(event.step), event.seconds, event.end.kind.value, event.end.reason, failed)

    def add_usage(self, place: tuple[int, str], model: str, tokens: dict[str, int]) -> None:
        """Add the tokens of an LM call to its step and stage."""
        counts = {f"gen_ai.usage.{way}_tokens": count for way, count in tokens.items()}
        with self._lock:
            self._used[place].update({**counts, f"model {model}": 1})

    def end(self) -> None:
        """End the span of the run."""
        results = {"metric_calls": self.run.budget.spent, "best_score": self.run.recorder.best_score}
        attributes = {f"flashevolve.{name}": value for name, value in results.items() if value is not None}
        self.span.set_attributes(attributes)
        failed = self.run.outcome in ("failed", "aborted")
        self._end(self.span, self.run.clock(), self.run.outcome, self.run.end_reason, failed)

    def _add_stage(self, event: StageVisited) -> None:
        with self._lock:
            usage = self._used.pop((event.step, event.stage), Counter[str]())
        models = sorted(name.removeprefix("model ") for name in usage if name.startswith("model "))
        attributes: dict[str, Any] = {name: count for name, count in usage.items() if name.startswith("gen_ai.")}
        attributes |= {"gen_ai.request.model": ", ".join(models)} if models else {}
        attributes |= {"flashevolve.waited_seconds": event.began_seconds - event.queued_seconds}
        parent = self._steps.get(event.step, self.span)  # what belongs to no step belongs to the run
        self._begin(event.stage, parent, event.queued_seconds, **attributes).end(self._at(event.seconds))

    def _begin(self, name: str, parent: Any, seconds: float, **attributes: Any) -> Any:
        inside = None if parent is None else trace.set_span_in_context(parent)
        return self._tracer.start_span(name, inside, attributes=attributes, start_time=self._at(seconds))

    def _end(self, span: Any, seconds: float, way: str, reason: str, failed: bool) -> None:
        reason = self.run.redaction.redact(reason)
        span.set_attributes({"flashevolve.end": way, "flashevolve.reason": reason})
        if failed:
            span.set_status(trace.StatusCode.ERROR, reason)
        span.end(self._at(seconds))

    def _at(self, seconds: float) -> int:
        return self._epoch + round(seconds * 1e9)


_CURRENT: ContextVar[_RunSpans | None] = ContextVar("flashevolve_observed_run", default=None)
"""The run that an LM call belongs to."""
