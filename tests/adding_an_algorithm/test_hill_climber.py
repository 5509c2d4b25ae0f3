"""docs/adding-an-algorithm.md: its example is this directory's hill_climber.py, and works."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import LMRateLimitError
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_flashevolve.observe.statistics import RunStats
from dspy_flashevolve.sim import HouseRules, SimServer
from dspy_flashevolve.sim.virtual import SimulatedModel, run
from tests.adding_an_algorithm.hill_climber import HillClimber
from tests.fakes import Chain, digits, examples, fake_lm, reply_for

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "adding-an-algorithm.md"
TASK = HouseRules()
TRAIN = TASK.trainset(16)


def climb(calls: int, schedule: Any, lm: dspy.LM, **options: Any) -> tuple[dspy.Module, RunStats]:
    """In virtual time."""
    climber = HillClimber(TASK.metric, lm, max_metric_calls=calls, num_threads=16, schedule=schedule, **options)
    with dspy.context(lm=lm):
        program: Any = run(lambda: climber.acompile(TASK.program(), trainset=TRAIN))
    return program, program.stats


def score(program: dspy.Module, lm: dspy.LM) -> float:
    """On questions that nobody has trained on."""

    async def evaluated() -> float:
        unseen = TASK.valset(60)
        made = await asyncio.gather(*(program.acall(question=one.question) for one in unseen))
        return sum(TASK.metric(one, prediction).score for one, prediction in zip(unseen, made, strict=True)) / 60

    with dspy.context(lm=lm):
        return run(evaluated)


def test_the_page_shows_the_example_as_it_is_and_it_has_fewer_than_80_lines() -> None:
    source = (HERE / "hill_climber.py").read_text(encoding="utf-8")
    assert f"```python\n{source}```\n" in PAGE.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 80


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_it_improves_the_program_within_its_budget(schedule: str) -> None:
    lm = SimulatedModel(reply_model=TASK.reply_model).lm()
    program, stats = climb(240, schedule, lm)
    assert stats.metric_calls <= 240
    assert score(program, lm) > score(TASK.program(), lm) + 0.2
    assert stats.commits[-1].best_score > stats.commits[0].score + 0.2
    assert sum(stats.ended.values()) == stats.steps == 240 // 16
    assert "cannot pay a step" in stats.stop_reason


def test_it_does_more_than_twice_as_much_in_the_same_time() -> None:
    steps = {
        schedule: climb(10_000, schedule, SimulatedModel(reply_model=TASK.reply_model).lm(), max_seconds=60.0)[1]
        for schedule in ("async", "lockstep")
    }
    assert all(one.stop_reason == "max_seconds=60 is over" for one in steps.values())
    assert steps["async"].steps > 2 * steps["lockstep"].steps
    assert steps["async"].commits[-1].best_score > steps["lockstep"].commits[-1].best_score


@settings(max_examples=6)
@given(calls=st.integers(1, 80), live=st.integers(1, 6), schedule=st.sampled_from(["async", "lockstep"]))
def test_the_budget_is_never_exceeded(calls: int, live: int, schedule: str) -> None:
    _, stats = climb(calls, schedule, SimulatedModel(reply_model=TASK.reply_model).lm(), live=live)
    assert stats.metric_calls <= calls
    assert stats.steps == calls // 16


def test_a_provider_that_refuses_now_and_then_and_replies_that_make_no_sense_cost_steps_and_no_more() -> None:
    asked = reflections = 0

    def answer(prompt: str) -> str:
        nonlocal asked, reflections
        asked += 1
        if asked % 7 == 0:
            raise LMRateLimitError("later", retry_after=1.0)
        if "new_instruction" in prompt:
            reflections += 1  # one that cannot be read is asked for again in another format: several in a row
            return "no fields" if reflections % 8 < 4 else reply_for(prompt, new_instruction=f"Instruction {asked}")
        return reply_for(prompt, answer=str(asked % 7))

    lm = fake_lm(answer)
    with dspy.context(lm=lm):
        climber = HillClimber(digits, lm, max_metric_calls=60, num_threads=4)
        program: Any = run(lambda: climber.acompile(Chain(), trainset=examples("t", 4)))
    assert program.stats.retried_requests > 0
    assert program.stats.ended["failed"] > 0
    assert program.stats.metric_calls <= 60
    assert program.stats.outcome == "finished"


@pytest.fixture(scope="module")
def server() -> Iterator[SimServer]:
    with SimServer(seed=0, time_scale=100, reply_model=TASK.reply_model) as server:
        yield server


@pytest.mark.long
def test_it_works_over_http_in_a_plain_script(server: SimServer) -> None:
    lm = dspy.LM("openai/sim", api_base=server.api_base, api_key="none", cache=False)
    with dspy.context(lm=lm):
        climber = HillClimber(TASK.metric, lm, max_metric_calls=120, num_threads=16)
        program: Any = climber.compile(TASK.program(), trainset=TRAIN)
    assert program.stats.metric_calls <= 120
    assert program.stats.commits[-1].best_score > program.stats.commits[0].score
    assert server.stats().finished >= program.stats.metric_calls
    programs: list[Any] = [TASK.program(), program]
    before, after = (one.predictors()[0].signature.instructions for one in programs)
    assert after != before
