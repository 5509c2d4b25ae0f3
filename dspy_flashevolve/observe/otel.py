"""Runs as OpenTelemetry spans and metrics, by its conventions for generative AI. Needs the extra ``otel``."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import dspy
from dspy.utils.callback import BaseCallback
from dspy.utils.usage_tracker import track_usage
from opentelemetry import context, metrics, trace  # pyright: ignore[reportMissingImports]

from dspy_flashevolve.engine.events import (
    Committed,
    Event,
    RolloutFinished,
    StageVisited,
    StepClosed,
    StepOpened,
)
from dspy_flashevolve.engine.run import EvolutionRun
from dspy_flashevolve.engine.scheduler import SLOT, current_slot
from dspy_flashevolve.engine.steps import EndKind

NAME = "dspy_flashevolve"
TOKEN_BUCKETS = [4**power for power in range(14)]
SECOND_BUCKETS = [0.01 * 2**power for power in range(14)]
"""Those that the conventions advise."""


class OpenTelemetry(BaseCallback):
    """A callback of dspy's that tells OpenTelemetry what runs do: ``dspy.configure(callbacks=[OpenTelemetry()])``.

    A span for each run, in it one for each step, and in that one for each stage that the step went through, with the
    tokens and models (several are joined by ", ") of its LM calls: ``gen_ai.usage.input_tokens``,
    ``gen_ai.usage.output_tokens``, ``gen_ai.request.model``. What other libraries trace during a run is in the run's
    span. Of every LM call, inside of runs and elsewhere, ``gen_ai.client.operation.duration`` (seconds, with the waits
    for a provider that turned it away) and ``gen_ai.client.token.usage``; of runs ``flashevolve.metric_calls``,
    ``flashevolve.slots.busy``, ``flashevolve.slots.limit``, ``flashevolve.requests.waiting`` and
    ``flashevolve.best_score``. Prompts and replies are not told, but for what the reason of an end quotes of them; no
    secret is.

    Args:
        tracer_provider, meter_provider: of OpenTelemetry. Default: those that the process has set; where it has set
            none, nothing is sent anywhere.
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
        self._runs: list[_Run] = []
        for name, unit, look in (
            ("slots.busy", "{slot}", lambda run: [(run.of.scheduler.statistics().busy, {})]),
            ("slots.limit", "{slot}", lambda run: [(run.of.scheduler.statistics().limit, {})]),
            ("requests.waiting", "{request}", _Run.waiting),
            ("best_score", "1", _Run.scored),
        ):
            meter.create_observable_gauge(f"flashevolve.{name}", [self._observed(look)], unit)

    def _observed(self, look: Any) -> Any:
        def observe(_: Any) -> Iterator[Any]:
            for run in list(self._runs):
                for value, attributes in look(run):
                    yield metrics.Observation(value, {"flashevolve.optimizer": run.of.name, **attributes})

        return observe

    @contextmanager
    def observing(self, run: EvolutionRun) -> Generator[None, None, None]:
        """See :class:`~dspy_flashevolve.engine.run.Observer`."""
        one = _Run(run, self._tracer, self._metric_calls)
        self._runs.append(one)
        run.bus.subscribe(one)
        attached, token = context.attach(trace.set_span_in_context(one.span)), _RUN.set(one)
        try:
            yield
        finally:
            _RUN.reset(token)
            context.detach(attached)
            self._runs.remove(one)
            one.end()

    def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        """The call's tokens are counted by themselves, since a program may have several calls under way."""
        counting = track_usage()
        kind = "text_completion" if instance.model_type == "text" else "chat"
        self._calls[call_id] = counting, counting.__enter__(), kind, str(instance.model), time.perf_counter()

    def on_lm_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        """The call is answered, or failed."""
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
            slot = current_slot() or dspy.settings.get(SLOT)
            # A thread of dspy.Parallel knows dspy's settings and no context variable: of several runs it may be any.
            run = _RUN.get() or (self._runs[0] if len(self._runs) == 1 else None)
            if run is not None and slot is not None:
                run.used(slot.place, name or model, tokens)


class _Run:
    """The spans of one run.

    Args:
        of: the run, a DspyRun: others have no callbacks of dspy's.
        calls: counts metric calls.
    """

    def __init__(self, of: Any, tracer: Any, calls: Any) -> None:
        self.of, self._tracer, self._calls = of, tracer, calls
        self._zero = time.time_ns() - self._nanoseconds(of.clock())
        self.span = self._begin(f"evolve {of.name}", None, of.clock(), **{"flashevolve.optimizer": of.name})
        self._steps: dict[int, Any] = {}
        self._lock = threading.Lock()  # LM calls may end in threads
        self._used: defaultdict[tuple[int, str], Counter[str]] = defaultdict(Counter)

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, RolloutFinished):
            self._calls.add(1, {"flashevolve.optimizer": self.of.name, "flashevolve.stage": event.stage})
        elif isinstance(event, StepOpened):
            told = {"flashevolve.step": event.step, "flashevolve.version": event.version}
            self._steps[event.step] = self._begin("step", self.span, event.seconds, **told)
        elif isinstance(event, StageVisited):
            self._visited(event)
        elif isinstance(event, Committed):
            if event.step in self._steps:
                told = {"candidate": event.candidate, "score": event.score, "gap": event.gap}
                self._steps[event.step].set_attributes({f"flashevolve.{name}": value for name, value in told.items()})
        elif isinstance(event, StepClosed):
            failed = event.end.kind is EndKind.FAILED
            self._end(self._steps.pop(event.step), event.seconds, event.end.kind.value, event.end.reason, failed)

    def used(self, place: tuple[int, str], model: str, tokens: dict[str, int]) -> None:
        """An LM call of a step in a stage was answered."""
        counts = {f"gen_ai.usage.{way}_tokens": count for way, count in tokens.items()}
        with self._lock:
            self._used[place].update({**counts, f"model {model}": 1})

    def waiting(self) -> list[tuple[int, dict[str, str]]]:
        """Requests that wait for a slot, by stage."""
        stages = self.of.scheduler.statistics().stages
        return [(one.waiting, {"flashevolve.stage": stage}) for stage, one in stages.items()]

    def scored(self) -> list[tuple[float, dict[str, str]]]:
        """The best score, where there is one."""
        best = self.of.recorder.best_score
        return [] if best is None else [(best, {})]

    def end(self) -> None:
        """The run has ended."""
        told = {"metric_calls": self.of.budget.spent, "best_score": self.of.recorder.best_score}
        self.span.set_attributes({f"flashevolve.{name}": one for name, one in told.items() if one is not None})
        failed = self.of.outcome in ("failed", "aborted")
        self._end(self.span, self.of.clock(), self.of.outcome, self.of.said, failed)

    def _visited(self, event: StageVisited) -> None:
        with self._lock:
            used = self._used.pop((event.step, event.stage), Counter[str]())
        models = sorted(name.removeprefix("model ") for name in used if name.startswith("model "))
        told: dict[str, Any] = {name: count for name, count in used.items() if name.startswith("gen_ai.")}
        told |= {"gen_ai.request.model": ", ".join(models)} if models else {}
        told |= {"flashevolve.waited_seconds": event.began_seconds - event.queued_seconds}
        parent = self._steps.get(event.step, self.span)  # what belongs to no step is the run's
        self._begin(event.stage, parent, event.queued_seconds, **told).end(self._at(event.seconds))

    def _begin(self, name: str, parent: Any, seconds: float, **attributes: Any) -> Any:
        inside = None if parent is None else trace.set_span_in_context(parent)
        return self._tracer.start_span(name, inside, attributes=attributes, start_time=self._at(seconds))

    def _end(self, span: Any, seconds: float, way: str, reason: str, failed: bool) -> None:
        said = self.of.redaction.of(reason)
        span.set_attributes({"flashevolve.end": way, "flashevolve.reason": said})
        if failed:
            span.set_status(trace.StatusCode.ERROR, said)
        span.end(self._at(seconds))

    def _at(self, seconds: float) -> int:
        return self._zero + self._nanoseconds(seconds)

    @staticmethod
    def _nanoseconds(seconds: float) -> int:
        return round(seconds * 1e9)


_RUN: ContextVar[_Run | None] = ContextVar("flashevolve_observed_run", default=None)
