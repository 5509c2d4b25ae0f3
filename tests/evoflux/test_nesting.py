"""Evoflux inside another run: its slot is given back, and every request counts against the outer limits."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import dspy
import pytest

from dspy_flashevolve import AsyncGEPA
from dspy_flashevolve.engine.scheduler import Scheduler
from dspy_flashevolve.evoflux import Evoflux
from dspy_flashevolve.evoflux.program import QueryStep
from dspy_flashevolve.programs.function_lm import lm_of
from dspy_flashevolve.sim.virtual import run
from tests.evoflux.worlds import GOOD, READS, TOOLS, ScriptedPlanner, reply_for
from tests.fakes import reflection_lm

PARALLEL = "\n".join(f"wait(number={number})" for number in range(6))


def nested(outer_slots: int, questions: int) -> tuple[int, int, list[Any]]:
    """Ask questions inside an outer scheduler's slots; (outer peak, most tool calls at once, predictions)."""
    now = most = 0

    async def wait(number: int) -> int:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await anyio.sleep(1)
        now -= 1
        return number

    program = Evoflux("question -> answer", tools=[wait], effects="read", num_threads=32)

    async def main() -> Any:
        outer = Scheduler(outer_slots, ["rollout"], clock=asyncio.get_running_loop().time)

        async def ask(number: int) -> Any:
            return await outer.run("rollout", QueryStep(), lambda: program.acall(question=f"{number}"))

        made = await asyncio.gather(*map(ask, range(questions)))
        return outer.statistics(), made

    with dspy.context(lm=ScriptedPlanner([PARALLEL]).lm):
        statistics, made = run(main)
    assert statistics.busy == 0
    return statistics.peak, most, made


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_the_requests_of_nested_runs_stay_within_the_outer_slots(slots: int) -> None:
    peak, most, made = nested(slots, questions=3)
    assert peak <= slots
    assert most <= slots
    assert all(each.is_complete for each in made)


def test_questions_at_the_same_time_share_the_slots() -> None:
    now = most = 0

    async def wait(number: int) -> int:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await anyio.sleep(1)
        now -= 1
        return number

    program = Evoflux("question -> answer", tools=[wait], effects="read", num_threads=4)

    async def main() -> Any:
        return await asyncio.gather(*(program.acall(question=str(number)) for number in range(5)))

    with dspy.context(lm=ScriptedPlanner([PARALLEL]).lm):
        made = run(main)
    assert most == 4
    assert all(each.is_complete for each in made)


@pytest.mark.parametrize("is_sync", [False, True])
@pytest.mark.parametrize("fails", ["workflow", "evidence"])
def test_inside_another_run_an_error_of_the_provider_is_that_runs(is_sync: bool, fails: str) -> None:
    """Alone the search ends with what was found, and an answer after a write is None; here both would be scored."""

    def reply(prompt: str) -> str:
        if f"[[ ## {fails} ## ]]" in prompt:
            raise ConnectionError("429 too many requests")
        if "[[ ## plan ## ]]" in prompt:
            return reply_for(prompt, plan="fail()" if fails == "workflow" else "write()")
        return reply_for(prompt, answer="done", citations="[]")

    def write() -> str:
        return "written"

    def fail() -> str:
        raise ValueError("no")

    program = Evoflux("question -> answer", tools=[write, fail], effects={"fail": "read"})

    async def main() -> Any:
        outer = Scheduler(1, ["rollout"], clock=asyncio.get_running_loop().time)

        async def ask() -> Any:
            if is_sync:
                return await asyncio.to_thread(program, question="?")
            return await program.acall(question="?")

        return await outer.run("rollout", QueryStep(), ask)

    with dspy.context(lm=lm_of(reply, "lm")), pytest.raises(dspy.LMError, match="429"):
        asyncio.run(main())


def test_gepa_optimizes_its_predictors() -> None:
    planner = ScriptedPlanner([GOOD])
    program = Evoflux("question -> answer", tools=TOOLS, effects=READS)
    examples = [dspy.Example(question=f"q{number}", answer="5").with_inputs("question") for number in range(4)]

    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        return dspy.Prediction(score=0.5 * float(pred.is_complete), feedback="be brief")

    optimizer = AsyncGEPA(metric, max_metric_calls=30, num_threads=3, reflection_lm=reflection_lm(), track_stats=True)
    with dspy.context(lm=planner.lm):
        best = run(lambda: optimizer.acompile(program, trainset=examples, valset=examples))
    assert isinstance(best, Evoflux)
    details: Any = best.detailed_results
    assert details.val_aggregate_scores[0] == 0.5
    assert details.total_metric_calls <= 30
    assert set(planner.asked) == {"plan", "answer"}
