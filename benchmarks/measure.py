"""Measuring one run: the server's meter, the reading at the limit, and the result.

Every method gets the same workload, slots, seed and limits, and a run of its own on the same server, whose counters
are set to zero before it. dspy.GEPA looks at the time between its iterations and AsyncGEPA drains what it has
admitted, so figures of a run with a time limit are read by a timer at the limit, not when `compile` returns.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from urllib.parse import urlsplit

import dspy

from benchmarks.methods import Limits, Method, Workload
from benchmarks.results import Result
from benchmarks.trajectory import Recorder

_COUNTERS = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "completion_tokens": "vllm:generation_tokens_total",
    "requests": "vllm:request_success_total",
}
_QUIET_SECONDS = 120.0


@dataclass(frozen=True)
class Figures:
    """A server's counters since they were set to zero; see `Result` for the fields."""

    prompt_tokens: float = 0.0
    completion_tokens: float = 0.0
    requests: int = 0
    refused: int = 0
    mean_running: float | None = None
    reflections: int | None = None
    reflection_tokens: int | None = None


class Meter(Protocol):
    """Reads a server's counters."""

    def reset(self) -> None:
        """Set the counters to zero; called when no request is in flight."""

    def read(self) -> Figures:
        """What was counted since."""
        ...


class NoMeter:
    """For programs that call no server."""

    def reset(self) -> None:
        """Nothing to set."""

    def read(self) -> Figures:
        """Nothing counted."""
        return Figures()


def counter(metrics: str, name: str) -> float:
    """The sum of a counter over its labels in Prometheus' text.

    Example:
        >>> counter('a_total{x="1"} 2.0\\na_total{x="2"} 3.0\\na_total_b 9', "a_total")
        5.0
    """
    found = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)", metrics, re.MULTILINE)
    return sum((float(value) for value in found), 0.0)


class VllmMeter:
    """Reads the totals of a vLLM server, as differences from the last reset."""

    def __init__(self, api_base: str) -> None:
        parts = urlsplit(api_base)
        self._url = f"{parts.scheme}://{parts.netloc}/metrics"
        self._before: dict[str, float] = {}

    def reset(self) -> None:
        """Wait until nothing is in flight, and count from here."""
        deadline = time.monotonic() + _QUIET_SECONDS
        while counter(self._text(), "vllm:num_requests_running") + counter(self._text(), "vllm:num_requests_waiting"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._url} shows requests in flight for {_QUIET_SECONDS:.0f} s: is it shared?")
            time.sleep(0.2)
        self._before = self._totals()

    def read(self) -> Figures:
        """What was counted since."""
        now = {name: value - self._before.get(name, 0.0) for name, value in self._totals().items()}
        return Figures(now["prompt_tokens"], now["completion_tokens"], int(now["requests"]))

    def _totals(self) -> dict[str, float]:
        text = self._text()
        return {name: counter(text, metric) for name, metric in _COUNTERS.items()}

    def _text(self) -> str:
        with urllib.request.urlopen(self._url, timeout=30) as reply:
            return reply.read().decode()


class CountedMetric:
    """Counts the rollouts that reach a metric; a call for one predictor's feedback is not one."""

    def __init__(self, metric: Callable[..., Any]) -> None:
        self._metric = metric
        self._counter = itertools.count()
        self.count = 0

    def __call__(
        self, gold: Any, pred: Any, trace: Any = None, pred_name: str | None = None, pred_trace: Any = None
    ) -> Any:
        """The metric's own answer."""
        if pred_name is None:
            self.count = next(self._counter) + 1
        return self._metric(gold, pred, trace, pred_name, pred_trace)


@contextmanager
def silence() -> Iterator[None]:
    """Drop what is printed: dspy.GEPA draws a progress bar a minibatch and cannot be told not to."""
    with open(os.devnull, "w", encoding="utf-8") as nothing, redirect_stdout(nothing):
        yield


@dataclass
class _Reading:
    """The server's figures at the limit, taken once by whichever comes first: the timer or the run's end."""

    meter: Meter
    recorder: Recorder
    figures: Figures = field(default_factory=Figures)
    seconds: float | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> None:
        """Read the meter, unless it was read before."""
        with self.lock:
            if self.seconds is None:
                self.seconds = self.recorder.seconds
                self.figures = self.meter.read()


@dataclass(frozen=True)
class Bench:
    """Where runs take place: the benchmark's name for the results, the backend, its meter and its settings."""

    name: str
    backend: str
    meter: Meter
    settings: str = ""

    def run(self, chosen: Method, workload: Workload, limits: Limits) -> Result:
        """One method, measured; an exception ends up in the result's `error`, with its traceback on stderr."""
        logging.getLogger("dspy").setLevel(logging.CRITICAL)
        metric = CountedMetric(workload.metric)
        counted = replace(workload, metric=metric)
        recorder = Recorder(limits.time_scale, true_score=workload.true_score)
        reading = _Reading(self.meter, recorder)
        timer = threading.Timer(limits.wall_seconds or threading.TIMEOUT_MAX, reading.take)
        timer.daemon = True
        error = ""
        self.meter.reset()
        recorder.start()
        timer.start()
        try:
            optimizer = chosen.build(counted, limits, recorder)
            with silence(), dspy.context(lm=workload.task_lm, adapter=workload.adapter):
                optimizer.compile(workload.program(), trainset=workload.trainset, valset=workload.valset)
        except Exception as raised:
            traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}"
        finally:
            timer.cancel()
            reading.take()
        return self._result(chosen, limits, reading, metric.count, error)

    def _result(self, chosen: Method, limits: Limits, reading: _Reading, scored: int, error: str) -> Result:
        total_seconds, trajectory = reading.recorder.seconds, reading.recorder.trajectory
        seconds = total_seconds if reading.seconds is None else reading.seconds
        point = trajectory.at(seconds)
        plain = chosen.name == "evaluate"
        return Result(
            benchmark=self.name,
            method=chosen.name,
            backend=self.backend,
            seed=limits.seed,
            slots=limits.slots,
            seconds=seconds,
            total_seconds=total_seconds,
            proposals=point.proposals,
            metric_calls=scored if plain else point.metric_calls,
            total_metric_calls=scored if plain else trajectory.end.metric_calls,
            scored=scored,
            call_limit=limits.metric_calls,
            best_score=point.best_score,
            seed_score=trajectory.seed_score,
            true_score=point.true_score,
            seed_true_score=trajectory.seed_true_score,
            depth=point.depth,
            accepted=point.accepted,
            validations=point.validations,
            error=error,
            trajectory=trajectory.compact(),
            settings=self.settings,
            **vars(reading.figures),
        )
