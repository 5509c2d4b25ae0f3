"""GEPA's stages with controllers, timeouts and duplicates: the run ends, within its budget. Virtual time."""

from __future__ import annotations

from typing import Any

import anyio
import dspy
import pytest

from dspy_flashevolve import AsyncGEPA
from dspy_flashevolve.engine.control import Backlog, Fixed, MedianRate
from dspy_flashevolve.engine.rollouts import Rollouts
from dspy_flashevolve.engine.stragglers import Duplicates
from dspy_flashevolve.sim import HouseRules
from dspy_flashevolve.sim.virtual import SimulatedModel, run

CALLS = 300
LONG = 1e6
"""Virtual seconds that no run takes: one that does is stuck."""


def compiled(scheduled: dict[str, Any], **options: Any) -> tuple[Any, int]:
    """A compiled program and the calls that its metric saw; ``scheduled`` are arguments of its schedule."""
    task, model, calls = HouseRules(rules=12, rules_per_example=4, seed=0), SimulatedModel(seed=0), list[Any]()

    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        if pred_name is None:
            calls.append(gold)
        return task.metric(gold, pred, trace, pred_name, pred_trace)

    async def compile_it() -> Any:
        optimizer = AsyncGEPA(
            metric,
            reflection_lm=model.lm(),
            track_stats=True,
            max_metric_calls=CALLS,
            num_threads=16,
            seed=0,
            **scheduled,
            **options,
        )
        with dspy.context(lm=model.lm(), adapter=None), anyio.fail_after(LONG):
            return await optimizer.acompile(task.program(1), trainset=task.trainset(12), valset=task.valset(12))

    return run(compile_it), len(calls)


CONTROLLERS = [Fixed(1), MedianRate(window_seconds=1.0, start=1), Backlog(window_seconds=1.0)]


@pytest.mark.parametrize("staleness", ["full", "reflective"])
@pytest.mark.parametrize("controller", CONTROLLERS, ids=repr)
def test_a_run_with_a_controller_ends_and_spends_its_budget(controller: Any, staleness: Any) -> None:
    program, calls = compiled({"controller": controller}, staleness=staleness)
    stats = program.detailed_results.async_stats
    assert stats.failed is False
    assert calls == stats.metric_calls <= CALLS
    assert calls > CALLS / 2
    assert sum(stats.ended.values()) == stats.tickets


def test_lockstep_does_not_ask_the_controller() -> None:
    class Never:
        window_seconds = 1.0

        def decide(self, windows: Any) -> dict[str, int]:
            raise AssertionError("asked")

    unchanged, _ = compiled({}, schedule="lockstep")
    scheduled, _ = compiled(
        {"controller": Never(), "duplicate_stragglers": Duplicates(1.1, 1, 1.0)}, schedule="lockstep"
    )
    assert scheduled.detailed_results.val_aggregate_scores == unchanged.detailed_results.val_aggregate_scores


@pytest.mark.parametrize("staleness", ["full", "reflective"])
def test_timeouts_and_duplicates_keep_to_the_budget_and_every_call_is_counted(
    staleness: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Rollouts] = []

    def watched(*args: Any, **options: Any) -> Rollouts:
        made.append(Rollouts(*args, **options))
        return made[-1]

    monkeypatch.setattr("dspy_flashevolve.gepa.run.Rollouts", watched)
    scheduled = {"rollout_timeout_seconds": 6.0, "duplicate_stragglers": Duplicates(factor=1.1, least=5, share=0.3)}
    program, calls = compiled(scheduled, staleness=staleness)
    stats = program.detailed_results.async_stats
    assert made[0].duplicated > 0
    assert made[0].timed_out > 0
    assert calls == stats.metric_calls <= CALLS
    assert program.detailed_results.total_metric_calls == calls, "gepa's count has the duplicates too"
    assert stats.failed is False
