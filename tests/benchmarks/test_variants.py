"""Names of variants, and what is read from a run in virtual time."""

from __future__ import annotations

from benchmarks.methods import Limits, async_options
from benchmarks.virtual import Reading, VirtualRun
from dspy_flashevolve import FLASHEVOLVE, Workflow


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


def test_what_was_refused_is_counted_after_the_first_seconds() -> None:
    settled, end = Reading(answered=100, refused=30), Reading(tokens=9.0, answered=295, refused=35)
    run = VirtualRun(Limits(64, 0, seconds=120.0), settled=settled, reading=end, seconds=130.0)
    assert run.refused_share == 5 / 200
    assert run.tokens == 9.0
    assert VirtualRun(Limits(64, 0, seconds=5.0), reading=end).refused_share is None
    assert VirtualRun(Limits(64, 0, seconds=120.0), settled=end, reading=end).refused_share is None
