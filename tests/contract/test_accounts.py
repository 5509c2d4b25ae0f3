"""What a run says that it has used, and what ``max_cost`` stops at: every LM call, whatever thread makes it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dspy
import pytest

from dspy_flashevolve import Workflow
from dspy_flashevolve.sim.virtual import run
from tests.contract.surface import InThread, optimizer, priced
from tests.fakes import digits, examples, fake_lm, hashed, reply_for

TRAIN, VAL = examples("t", 4), examples("v", 4)
LANES = 3
"""LM calls of one rollout."""
TOKENS, DOLLARS = 7, 3e-6 + 2 * 4e-6
"""Of one LM call: what tests/fakes.py reports, at the price of ``priced``."""
WAYS = ["compile", "acompile"]


def answer(prompt: str) -> str:
    number = hashed(prompt)
    return reply_for(prompt, answer=str(number % 7), new_instruction=f"Instruction {number % 100_000}")


class Lanes(InThread):
    """Asks :data:`LANES` questions of one example."""

    def asked(self, inputs: list[dict[str, str]]) -> list[Any]:
        return [self.steps[0](**one) for one in inputs]

    def forward(self, question: str) -> dspy.Prediction:
        answers = self.asked([{"question": f"{question} {lane}"} for lane in range(LANES)])
        return dspy.Prediction(answer=" ".join(one.answer for one in answers))


class ByParallel(Lanes):
    def asked(self, inputs: list[dict[str, str]]) -> list[Any]:
        pairs = [(self.steps[0], dspy.Example(**one).with_inputs("question")) for one in inputs]
        return dspy.Parallel(num_threads=3, disable_progress_bar=True)(pairs)


class InTracker(ByParallel):
    """The same, inside of a usage tracker of the program's own."""

    def asked(self, inputs: list[dict[str, str]]) -> list[Any]:
        with dspy.track_usage():
            return super().asked(inputs)


class ByBatch(Lanes):
    def asked(self, inputs: list[dict[str, str]]) -> list[Any]:
        examples = [dspy.Example(**one).with_inputs("question") for one in inputs]
        return self.steps[0].batch(examples, num_threads=3, disable_progress_bar=True)


class InContext(Lanes):
    """Threads that carry the context variables of who starts them."""

    def asked(self, inputs: list[dict[str, str]]) -> list[Any]:
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(contextvars.copy_context().run, self.steps[0], **one) for one in inputs]
            return [call.result() for call in calls]


class ByExecutor(Lanes):
    """Threads that know nothing of who starts them."""

    def asked(self, inputs: list[dict[str, str]]) -> list[Any]:
        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(lambda one: self.steps[0](**one), inputs))


class Compiled:
    """What a program was made of with one LM, and what that LM was asked."""

    def __init__(self, program: Lanes, way: str = "compile", metric: Any = digits, **options: Any) -> None:
        self.lm = priced(fake_lm(answer))
        program.set_lm(self.lm)
        settings = {"calls": 150, "reflection_lm": self.lm, "schedule": "lockstep", "metric": metric} | options
        made = optimizer(**settings)
        with dspy.context(lm=self.lm):
            if way == "compile":
                best = made.compile(program, trainset=TRAIN, valset=VAL)
            else:
                best = run(lambda: made.acompile(program, trainset=TRAIN, valset=VAL))
        self.stats: Any = best.async_stats

    @property
    def answered(self) -> int:
        return self.lm.engine.calls

    def check_all_is_counted(self) -> None:
        assert sum(self.stats.tokens_by_stage.values()) == TOKENS * self.answered
        assert self.stats.cost_dollars == pytest.approx(DOLLARS * self.answered)


STEP = LANES * (3 + 3 + len(VAL)) + 2
"""The most LM calls of a step in lockstep: a minibatch, a screen, a validation, and two attempts at a reflection."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", [Lanes, ByParallel, InTracker, ByBatch, InContext, ByExecutor])
def test_max_cost_ends_a_run_after_the_step_that_spends_it_whatever_threads_its_program_asks_in(
    program: Callable[[], Lanes], way: str
) -> None:
    most = 60
    made = Compiled(program(), way, max_cost=(most - 0.5) * DOLLARS)
    assert most <= made.answered < most + STEP
    made.check_all_is_counted()
    assert made.stats.stop_reason.startswith("max_cost=")


@pytest.mark.parametrize("program", [Lanes, ByParallel, InTracker, ByBatch, InContext])
def test_what_threads_that_know_their_run_have_used_counts_for_the_stage_that_they_work_for(
    program: Callable[[], Lanes],
) -> None:
    stats = Compiled(program(), calls=30).stats
    requests = {stage: count for stage, count in stats.requests_by_stage.items() if stage != "propose"}
    assert {"rollout", "screen", "validate"} & set(requests)
    assert {stage: stats.tokens_by_stage[stage] for stage in requests} == {
        stage: TOKENS * LANES * count for stage, count in requests.items()
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", [ByParallel, ByExecutor])
def test_max_cost_ends_an_asynchronous_run_whose_program_asks_in_threads(
    program: Callable[[], Lanes], way: str
) -> None:
    most = 40  # spent before eight minibatches without a trace end the run
    options = {"schedule": "async", "workflow": Workflow(live_steps=2)}
    made = Compiled(program(), way, max_cost=(most - 0.5) * DOLLARS, **options)
    made.check_all_is_counted()
    assert made.stats.stop_reason.startswith("max_cost=")
    assert made.answered >= most


def test_a_judge_that_gives_feedback_and_one_whose_reflection_fails_count(tmp_path: Path) -> None:
    """Neither is a rollout, nor a request that is answered; a run that goes on knows what they have cost."""

    def judge(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        dspy.settings.lm(f"Is it right? {pred_name}")
        return digits(gold, pred)

    def fails(candidate: Any, reflective_dataset: Any, components_to_update: Any) -> dict[str, str]:
        dspy.settings.lm("What is wrong?")
        raise ValueError("nothing can be read")

    options = {"metric": judge, "instruction_proposer": fails, "log_dir": str(tmp_path)}
    made = Compiled(Lanes(), calls=20, **options)
    made.check_all_is_counted()
    assert made.stats.tokens_by_stage["propose"] > 0
    went_on = Compiled(Lanes(), calls=40, max_cost=(made.answered - 0.5) * DOLLARS, **options)
    assert went_on.stats.stop_reason.startswith("max_cost=")
    assert went_on.answered == 0


def test_a_call_of_the_users_own_beside_the_run_is_not_counted() -> None:
    """On the loop that ``acompile`` shares with other tasks."""
    lm, asked = priced(fake_lm(answer)), 0
    program = Lanes()
    program.set_lm(lm)

    async def beside() -> Any:
        nonlocal asked
        run_of_it = asyncio.ensure_future(
            optimizer(40, reflection_lm=lm, schedule="lockstep").acompile(program, trainset=TRAIN, valset=VAL)
        )
        while not run_of_it.done():
            await lm.acall("What time is it?")
            asked += 1
            await asyncio.sleep(0)
        return await run_of_it

    with dspy.context(lm=lm):
        stats = run(beside).async_stats
    assert asked > 1
    assert sum(stats.tokens_by_stage.values()) == TOKENS * (lm.engine.calls - asked)


def test_a_tracker_around_the_run_is_told_of_each_call_once() -> None:
    with dspy.track_usage() as usage:
        made = Compiled(InTracker(), calls=30)
    assert usage.get_total_tokens()["priced"]["total_tokens"] == TOKENS * made.answered
