"""One run under faults: the optimizer, the restart in its middle, and what the scores that it left deserve."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import dspy
from gepa.core.callbacks import OptimizationEndEvent

from benchmarks.measure import CountedMetric, silence
from benchmarks.methods import Limits, Workload, gepa_arguments
from benchmarks.trajectory import Recorder
from dspy_flashevolve import AsyncGEPA
from dspy_flashevolve.sim import Faults, HouseRules, SimServer

TOLERANCE = 1e-9
MINIBATCH = 3
"""Training examples a step: the optimizers' default."""
TRUTH_SCALE = 2000.0
"""Model seconds a wall second of the server that scores again: nobody measures its time."""
MARK = "Follow the house rules."
"""In the seed's instruction; no reflection of the simulated model drops it: a text without it came from elsewhere."""


@dataclass(frozen=True)
class Conditions:
    """What a run is made of.

    Attributes:
        profile: The simulated backend.
        time_scale: The server's seconds in a real one.
        slots: Requests in flight at most.
        calls: `max_metric_calls`.
        train: Training examples.
        val: Validation examples.
        rules: House rules to discover.
        timeout_seconds: The LM's own timeout, in real seconds; longer than the longest good answer takes.
        rollout_timeout_seconds: AsyncGEPA's, in real seconds; a rollout's waits between its requests count.
        down_seconds: How long a restart takes, in real seconds.
        faults: What goes wrong in the runs with faults; its seed is the run's.
    """

    profile: str = "h100-qwen3-8b"
    time_scale: float = 20.0
    slots: int = 16
    calls: int = 300
    train: int = 30
    val: int = 30
    rules: int = 24
    timeout_seconds: float = 4.0
    rollout_timeout_seconds: float = 20.0
    down_seconds: float = 2.0
    faults: Faults = field(
        default_factory=lambda: Faults(
            server_error=0.2, hang=0.02, malformed_body=0.02, burst_every_seconds=100.0, burst_seconds=10.0
        )
    )

    @property
    def step_calls(self) -> int:
        """The most that one more step of AsyncGEPA may cost: its screens and one validation."""
        return 3 * MINIBATCH + self.val


@dataclass(frozen=True)
class Job:
    """A run to be made: "gepa" or "async", with faults or without, and the seed of task, server and optimizer."""

    method: str
    faulty: bool
    seed: int
    conditions: Conditions


@dataclass(frozen=True)
class ChaosRow:
    """One run.

    Attributes:
        method: "gepa" or "async".
        faulty: With faults and a restart, or without.
        seed: Of task, server and optimizer.
        limit: `max_metric_calls`.
        step_calls: The most that one more step could have cost.
        spent: Metric calls, by the optimizer's count.
        answered: Metric calls that reached the metric.
        stored: Validation scores that the pool was left with.
        wrong: Those that differ from what the candidate scores on the same example without faults.
        cached: Scores in gepa's evaluation cache; AsyncGEPA only.
        cached_wrong: Those that are not what the metric says of the output beside them.
        foreign: Candidates in the pool whose text no reflection wrote.
        stored_score: The returned candidate's validation score as the optimizer has it.
        best_score: The same candidate's score without faults.
        seed_score: The seed's score without faults.
        candidates: Pool, the seed included.
        seconds: Real seconds.
        injected: Kind of fault -> how often.
        restarts: Of the server.
        failed_tickets: Of AsyncGEPA.
        timed_out: Rollouts that AsyncGEPA gave up and asked for again.
        retried: Requests that AsyncGEPA made again.
        stop_reason: Why AsyncGEPA ended.
        error: What ended the run early; empty when nothing did.
    """

    method: str
    faulty: bool
    seed: int
    limit: int
    step_calls: int
    spent: int = 0
    answered: int = 0
    stored: int = 0
    wrong: int = 0
    cached: int = 0
    cached_wrong: int = 0
    foreign: int = 0
    stored_score: float | None = None
    best_score: float | None = None
    seed_score: float | None = None
    candidates: int = 0
    seconds: float = 0.0
    injected: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    failed_tickets: int = 0
    timed_out: int = 0
    retried: int = 0
    stop_reason: str = ""
    error: str = ""

    @property
    def unanswered(self) -> int:
        """Metric calls that were spent and never reached the metric: the simulated model writes no answer that does
        not parse, so each is an error of the provider that was scored."""
        return max(0, self.spent - self.answered)

    @property
    def title(self) -> str:
        """Which run it is, for people."""
        return f"{self.method}, {'faults' if self.faulty else 'no faults'}, seed {self.seed}"


class Keeper(Recorder):
    """A recorder that keeps gepa's state at the end of the run."""

    state: Any = None

    def on_optimization_end(self, event: OptimizationEndEvent) -> None:
        """Keep the pool."""
        super().on_optimization_end(event)
        self.state = event["final_state"]


class Restart:
    """Restarts a server once, when a metric has been called so often.

    Args:
        server: To be restarted.
        at_call: The call of the metric.
        down_seconds: How long it stays down.
    """

    def __init__(self, server: SimServer, at_call: int, down_seconds: float) -> None:
        self._server = server
        self._at_call = at_call
        self._down_seconds = down_seconds
        self._due = threading.Event()
        self._calls = 0
        self._cancelled = False
        self._thread = threading.Thread(target=self._run, name="restart", daemon=True)
        self.injected: dict[str, int] = {}
        """Faults that the server had injected when it went down."""
        self.count = 0
        """Restarts that have been made."""

    def watched(self, metric: Callable[..., Any]) -> Callable[..., Any]:
        """The metric, whose calls are counted."""

        def counted(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
            self._calls += pred_name is None
            if self._calls >= self._at_call:
                self._due.set()
            return metric(gold, pred, trace, pred_name, pred_trace)

        return counted

    @contextmanager
    def armed(self) -> Iterator[None]:
        """The restart may happen within the block; one that has begun is waited for."""
        self._thread.start()
        try:
            yield
        finally:
            self._cancelled = not self._due.is_set()
            self._due.set()
            self._thread.join()

    def _run(self) -> None:
        self._due.wait()
        if self._cancelled:
            return
        with self._server.down() as before:
            self.injected = dict(before.faults)
            time.sleep(self._down_seconds)
        self.count += 1


@dataclass(frozen=True)
class Ended:
    """What a run leaves: the state, the program, and how it went."""

    keeper: Keeper
    program: Any
    answered: int
    seconds: float
    error: str


def optimizer(method: str, workload: Workload, limits: Limits, keeper: Keeper, rollout_timeout_seconds: float) -> Any:
    """The optimizer of that name; raises `ValueError` for one that is none."""
    arguments = gepa_arguments(workload, limits, keeper)
    if method == "gepa":
        return dspy.GEPA(**arguments, track_stats=True)
    if method != "async":
        raise ValueError(f"unknown method {method!r}: choose gepa or async")
    arguments["gepa_kwargs"]["cache_evaluation"] = True
    return AsyncGEPA(**arguments, track_stats=True, rollout_timeout_seconds=rollout_timeout_seconds)


def language_model(server: SimServer, timeout_seconds: float) -> dspy.LM:
    """An LM that asks the server; dspy's own retries are those that a user has by default."""
    return dspy.LM("openai/simulated", api_base=server.api_base, api_key="none", cache=False, timeout=timeout_seconds)


def workload_of(task: HouseRules, conditions: Conditions, lm: dspy.LM, metric: Callable[..., Any]) -> Workload:
    """House rules with the LM; an answer that does not parse is a failure, with no second try as JSON."""
    return Workload(
        program=task.program,
        trainset=task.trainset(conditions.train),
        valset=task.valset(conditions.val),
        metric=metric,
        task_lm=lm,
        reflection_lm=lm.copy(),
        adapter=dspy.ChatAdapter(use_json_adapter_fallback=False),
    )


def compiled(job: Job, workload: Workload, metric: CountedMetric) -> Ended:
    """Run the optimizer to its end; an exception ends up in `error`, with its traceback on stderr."""
    conditions, keeper = job.conditions, Keeper(job.conditions.time_scale)
    limits = Limits(conditions.slots, job.seed, metric_calls=conditions.calls, time_scale=conditions.time_scale)
    began, program, error = time.monotonic(), None, ""
    try:
        chosen = optimizer(job.method, workload, limits, keeper, conditions.rollout_timeout_seconds)
        with silence(), dspy.context(lm=workload.task_lm, adapter=workload.adapter):
            program = chosen.compile(workload.program(), trainset=workload.trainset, valset=workload.valset)
    except Exception as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    return Ended(keeper, program, metric.count, time.monotonic() - began, error)


def deserved(
    task: HouseRules, conditions: Conditions, seed: int, candidates: Sequence[Mapping[str, str]]
) -> list[list[float]]:
    """What each candidate scores on each validation example, on a server without faults.

    Args:
        task: The run's task.
        conditions: The run's.
        seed: The run's: the replies depend on it.
        candidates: Component to text.
    """
    scores: list[list[float]] = []
    with SimServer(profile=conditions.profile, seed=seed, time_scale=TRUTH_SCALE) as server:
        workload = workload_of(task, conditions, language_model(server, 60.0), task.metric)
        with silence(), dspy.context(lm=workload.task_lm, adapter=workload.adapter):
            for candidate in candidates:
                program = workload.program()
                for name, predictor in program.named_predictors():
                    predictor.signature = predictor.signature.with_instructions(candidate[name])
                evaluate = dspy.Evaluate(
                    devset=workload.valset, metric=task.metric, num_threads=conditions.slots, max_errors=1
                )
                scores.append([float(score.score) for _, _, score in evaluate(program).results])
    return scores


def wrong_scores(stored: Sequence[Mapping[Any, float]], truth: Sequence[Sequence[float]]) -> int:
    """How many stored validation scores are not what the candidate deserves.

    Example:
        >>> wrong_scores([{0: 0.5, 1: 0.0}, {1: 0.25}], [[0.5, 1.0], [0.75, 0.25]])
        1
    """
    return sum(
        abs(score - deserves[example]) > TOLERANCE
        for scores, deserves in zip(stored, truth, strict=True)
        for example, score in scores.items()
    )


def wrong_entries(entries: Sequence[tuple[int, Any, float]], valset: Sequence[Any], metric: Callable[..., Any]) -> int:
    """How many entries of an evaluation cache hold a score that is not the metric's of the output beside it.

    Args:
        entries: (index of the validation example, output, score).
        valset: The validation examples.
        metric: Scores an output.
    """
    return sum(
        not isinstance(output, dspy.Prediction)
        or "answer" not in output
        or abs(float(metric(valset[example], output).score) - score) > TOLERANCE
        for example, output, score in entries
    )


def foreign_texts(candidates: Sequence[Mapping[str, str]]) -> int:
    """How many candidates hold a text that the simulated model did not write.

    Example:
        >>> foreign_texts([{"answer": "Answer the question. Follow the house rules."}, {"answer": "<html></html>"}])
        1
    """
    return sum(any(MARK not in (text or "") for text in candidate.values()) for candidate in candidates)


def audited(row: dict[str, Any], state: Any, task: HouseRules, conditions: Conditions, seed: int) -> dict[str, Any]:
    """The row with what its scores deserve."""
    candidates: list[dict[str, str]] = state.program_candidates
    stored: list[dict[int, float]] = state.prog_candidate_val_subscores
    truth = deserved(task, conditions, seed, candidates)
    full = [index for index, scores in enumerate(stored) if len(scores) == conditions.val]
    means = {index: sum(stored[index].values()) / conditions.val for index in full}
    best = max(full, key=lambda index: means[index])
    cache = getattr(state, "evaluation_cache", None)
    kept = [] if cache is None else [(key[1], one.output, one.score) for key, one in cache._cache.items()]
    return row | {
        "stored": sum(map(len, stored)),
        "wrong": wrong_scores(stored, truth),
        "cached": len(kept),
        "cached_wrong": wrong_entries(kept, task.valset(conditions.val), task.metric),
        "foreign": foreign_texts(candidates),
        "stored_score": means[best],
        "best_score": sum(truth[best]) / conditions.val,
        "seed_score": sum(truth[0]) / conditions.val,
        "candidates": len(candidates),
    }


def run_job(job: Job) -> ChaosRow:
    """One run, with its audit."""
    logging.getLogger("dspy").setLevel(logging.CRITICAL)
    logging.getLogger("dspy_flashevolve").setLevel(logging.CRITICAL)
    conditions, task = job.conditions, HouseRules(rules=job.conditions.rules, seed=job.seed)
    faults = Faults(**{**vars(conditions.faults), "seed": job.seed}) if job.faulty else None
    with SimServer(
        profile=conditions.profile, seed=job.seed, time_scale=conditions.time_scale, faults=faults
    ) as server:
        restart = Restart(server, conditions.calls // 2, conditions.down_seconds)
        metric = CountedMetric(restart.watched(task.metric) if job.faulty else task.metric)
        workload = workload_of(task, conditions, language_model(server, conditions.timeout_seconds), metric)
        with restart.armed():
            ended = compiled(job, workload, metric)
        injected = dict(server.stats().faults)
    for kind, count in restart.injected.items():
        injected[kind] = injected.get(kind, 0) + count
    stats = getattr(ended.program, "async_stats", None)
    state = ended.keeper.state
    row: dict[str, Any] = {
        "spent": ended.keeper.trajectory.end.metric_calls,
        "answered": ended.answered,
        "seconds": ended.seconds,
        "injected": dict(sorted(injected.items())),
        "restarts": restart.count,
        "error": ended.error,
    }
    if stats is not None:
        row |= {
            "failed_tickets": stats.ended["failed"],
            "timed_out": stats.timed_out_rollouts,
            "retried": stats.retried_requests,
            "stop_reason": stats.stop_reason,
        }
    if state is not None:
        row = audited(row, state, task, conditions, job.seed)
    return ChaosRow(job.method, job.faulty, job.seed, conditions.calls, conditions.step_calls, **row)
