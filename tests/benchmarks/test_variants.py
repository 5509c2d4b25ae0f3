"""Names of variants, and what is read from a run in virtual time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.methods import Limits, Method, async_options, method
from benchmarks.tasks import TASKS
from benchmarks.trajectory import Point, Recorder, Trajectory
from benchmarks.virtual import Reading, Setting, VirtualRun, run_virtually
from dspy_flashevolve import FLASHEVOLVE, Workflow
from dspy_flashevolve.engine.events import Committed
from dspy_flashevolve.sim.backend import Load


def test_a_change_of_a_name_is_an_argument() -> None:
    assert async_options("async-full+prefix=0.5") == {
        "search": "pareto",
        "staleness": "full",
        "workflow": Workflow(validate=0.5),
    }
    assert async_options("async+prefix=0.1") == {"workflow": Workflow(validate=0.1)}
    assert async_options("async+admission=live:20") == {"workflow": Workflow(live_steps=20)}
    assert async_options("async+controller=median") == {"workflow": Workflow(median_seconds=10.0)}
    assert async_options("async+workers=rollout:8,propose:4") == {
        "workflow": Workflow(workers={"rollout": 8, "propose": 4})
    }
    assert async_options("flashevolve") == FLASHEVOLVE
    changed = async_options("flashevolve+staleness=guarded+prefix=1+controller=none")
    assert changed == {"search": "pareto", "staleness": "guarded", "workflow": Workflow(rounds=3)}
    assert async_options("lockstep+slots=32") == {"schedule": "lockstep", "num_threads": 32}
    assert async_options("async+slots=adaptive") == {"num_threads": None, "max_concurrency": 256}


def test_changes_are_made_in_one_order_however_they_are_written() -> None:
    both = {"workflow": Workflow(validate=0.25, live_steps=3)}
    for name in ("async+admission=live:3+prefix=0.25", "async+prefix=0.25+admission=live:3"):
        assert async_options(name) == both
    bounded = {"search": "pareto", "staleness": "full", "num_threads": 128, "workflow": Workflow(live_steps=8)}
    assert async_options("async-full+admission=live:8+slots=128") == bounded


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("async-x+prefix=0.5", "there are async,"),
        ("async+colour=red", "'colour=red' is no change; there are slots,"),
        ("async+prefix", "'prefix' is no change"),
        ("async+prefix=0.5+prefix=0.25", "prefix stands there twice"),
        ("async+prefix=2", "prefix is '2', expected a share"),
        ("async+prefix=half", "prefix is 'half', expected a share"),
        ("async+workers=rollout", "workers is 'rollout', expected STAGE:N"),
        ("async+workers=rollout:0", "workers is 'rollout:0', expected STAGE:N"),
        ("async+staleness=late", "staleness is 'late', expected full, guarded or reflective"),
        ("async+racing=0.1", "'racing=0.1' is no change"),
        ("async+admission=gap:8", "admission is 'gap:8', expected live:N"),
        ("async+admission=live:0", "admission is 'live:0'"),
        ("async+controller=fixed:4", "controller is 'fixed:4', expected median"),
        ("async+slots=0", "slots is '0', expected adaptive or a number"),
        ("lockstep+prefix=0.5", "lockstep takes one step at a time, without prefix"),
    ],
)
def test_a_name_that_is_none_says_what_is_wrong(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match="unknown method") as raised:
        method(name)
    assert reason in str(raised.value)


def test_an_argument_that_does_not_work_ends_its_run_and_no_other() -> None:
    def build(*_: Any) -> Any:
        raise TypeError("no such argument")

    run = run_virtually(
        Method("broken", build), TASKS["few"].task(0), Limits(4, 0, seconds=5.0), Setting(train=6, val=6)
    )
    assert run.error == "TypeError: no such argument"


def test_what_was_refused_is_counted_after_the_first_seconds() -> None:
    settled, end = Reading(answered=100, refused=30), Reading(tokens=9.0, answered=295, refused=35)
    run = VirtualRun(Limits(64, 0, seconds=120.0), settled=settled, reading=end, seconds=130.0)
    assert run.refused_share == 5 / 200
    assert run.tokens == 9.0
    assert VirtualRun(Limits(64, 0, seconds=5.0), reading=end).refused_share is None
    assert VirtualRun(Limits(64, 0, seconds=120.0), settled=end, reading=end).refused_share is None


def test_a_reading_has_the_models_counters() -> None:
    load = Load(running=3, waiting=0, generated_tokens=7.5, running_seconds=9.0, kv_tokens=1.0)
    model: Any = SimpleNamespace(
        refused=[0.5, 3.0], requests={"task": 4, "reflection": 1}, prompt_tokens=40, load=lambda: load
    )
    assert Reading.of(model) == Reading(7.5, prompt_tokens=40, answered=5, refused=2, reflections=1, running_seconds=9)


def test_candidates_of_the_pool_by_the_limit_have_landed() -> None:
    commits = [Committed(seconds, i, i, 0, i, 0.5, 0.5, 1) for i, seconds in ((1, 6.0), (2, 8.0), (3, 11.0))]
    stats: Any = SimpleNamespace(changes=[], commits=commits)
    assert VirtualRun(Limits(64, 0, seconds=10.0), Trajectory(), seconds=12.0, stats=stats).landed == 2
    assert VirtualRun(Limits(64, 0)).landed == 0


def test_only_whole_validations_are_counted() -> None:
    recorder = Recorder(clock=lambda: 0.0)
    for candidate, examples in enumerate([60, 15, 60]):
        event: Any = {
            "candidate_idx": candidate,
            "parent_ids": [],
            "average_score": 0.5,
            "num_examples_evaluated": examples,
            "total_valset_size": 60,
        }
        recorder.on_valset_evaluated(event)
    assert recorder.trajectory.end == Point(metric_calls=60, best_score=0.5, validations=2)
