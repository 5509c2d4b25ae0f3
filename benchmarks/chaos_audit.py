"""What a run under faults is made of, and what the scores that it left deserve.

The replies of the simulated model are a function of its seed and the request, so a candidate has one true score on an
example: what a server without faults gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dspy

from benchmarks.measure import silence
from benchmarks.methods import Workload
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
    time_scale: float = 30.0
    slots: int = 16
    calls: int = 400
    train: int = 25
    val: int = 25
    rules: int = 24
    timeout_seconds: float = 3.0
    rollout_timeout_seconds: float = 15.0
    down_seconds: float = 2.0
    faults: Faults = field(
        default_factory=lambda: Faults(
            server_error=0.2, hang=0.02, malformed_body=0.02, burst_every_seconds=150.0, burst_seconds=15.0
        )
    )

    @property
    def step_calls(self) -> int:
        """The most that one more step of AsyncGEPA may cost: its screens and one validation."""
        return 3 * MINIBATCH + self.val


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
