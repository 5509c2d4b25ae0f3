"""A run of any loop over DSPy programs: modules that are asked, rollouts, settings, stops, statistics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import dspy
import pytest
from dspy.utils.exceptions import AdapterParseError

from dspy_flashevolve import DspyRun
from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.events import Event, RequestFinished
from dspy_flashevolve.engine.provider import RetryPolicy
from dspy_flashevolve.engine.steps import End, EndKind, LiveSteps, NothingToDoError, Step
from dspy_flashevolve.observe.statistics import RunStats
from dspy_flashevolve.programs.settings import RunSettings
from dspy_flashevolve.sim.virtual import run
from tests.contract.surface import InThread
from tests.fakes import Chain, examples, fake_lm, reply_for, task_lm

PREDICT = dspy.Predict("question -> answer")
TRAIN = examples("t", 5)


def made(stages: Any = None, retry: RetryPolicy | None = None, **options: Any) -> DspyRun:
    settings = RunSettings(**{"num_threads": 4, **options})
    return DspyRun(name="a loop", stages={"work": [None]} if stages is None else stages, settings=settings, retry=retry)


class Loop:
    """So many steps of one piece of work."""

    def __init__(self, run: DspyRun, work: Callable[[Step], Awaitable[Any]], steps: int = 3) -> None:
        self.run, self.work, self.steps = run, work, steps

    async def step(self, step: Step) -> End:
        if step.number >= self.steps:
            raise NothingToDoError
        self.run.begin(step, 0)
        await self.work(step)
        return End(EndKind.REJECTED, "done")

    async def main(self) -> RunStats:
        await self.run.evolve(
            self.step, LiveSteps(4), calls_per_step=0 if self.run.settings.max_metric_calls is None else 4
        )
        return self.run.statistics()

    def play(self) -> RunStats:
        """In virtual time."""
        return run(lambda: self.run.run_async(self.main))


def asking(run: DspyRun, module: dspy.Module = PREDICT, lm: Any = None) -> Callable[[Step], Awaitable[Any]]:
    return lambda step: run.ask("work", step, module, lm=lm, question=f"question {step.number}")


# Arguments


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"schedule": "sync"}, "schedule is 'sync', expected 'async' or 'lockstep'"),
    ({"num_threads": 0}, "num_threads is 0, expected a whole number of at least 1, or None"),
    ({"num_threads": True}, "num_threads is True"),
    ({"num_threads": 9, "max_concurrency": 8}, "num_threads is 9, above max_concurrency=8"),
    ({"max_metric_calls": 0}, "max_metric_calls is 0, expected a whole number"),
    ({"max_metric_calls": 2.5}, "max_metric_calls is 2.5"),
    ({"max_seconds": 0}, "max_seconds is 0, expected a number above 0, or None"),
    ({"rollout_timeout_seconds": -1}, "rollout_timeout_seconds is -1"),
    ({"stages": {"work": None}}, "expected stage -> a list of what it asks"),
    ({"stages": {"work": []}}, "expected stage -> a list of what it asks"),
    ({"stages": {}}, "has no stages"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_arguments_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        made(**options)


def test_slots_adapt_where_nobody_says_how_many_and_modules_can_be_awaited() -> None:
    assert made(num_threads=None).slots == 256
    assert made(num_threads=None, max_concurrency=32).slots == 32
    assert made(num_threads=None, stages={"work": [InThread()]}).slots == dspy.settings.num_threads
    assert made(num_threads=None, schedule="lockstep").slots == dspy.settings.num_threads


# Where it runs


def test_it_runs_in_a_script_on_a_running_loop_and_awaited() -> None:
    def played() -> RunStats:
        one = made()
        return one.run_sync(Loop(one, asking(one)).main)

    async def nested() -> RunStats:
        return played()

    async def awaited() -> RunStats:
        one = made()
        return await one.run_async(Loop(one, asking(one)).main)

    for stats in (played(), asyncio.run(nested()), asyncio.run(awaited())):
        assert (stats.steps, stats.ended["rejected"], stats.outcome) == (3, 3, "finished")


def test_what_main_returns_and_raises_reaches_the_caller() -> None:
    async def returns() -> int:
        return 7

    async def raises() -> None:
        raise ZeroDivisionError("boom")

    assert made().run_sync(returns) == 7
    one = made()
    with pytest.raises(ZeroDivisionError, match="boom"):
        one.run_sync(raises)
    stats = one.statistics()
    assert (stats.outcome, stats.stop_reason) == ("aborted", "ZeroDivisionError: boom")


def test_a_run_keeps_the_settings_that_it_was_made_with() -> None:
    lm = task_lm(3)
    with dspy.context(lm=lm):
        one = made()
    with dspy.context(lm=fake_lm(lambda prompt: "nobody may ask this one")):
        stats = Loop(one, asking(one)).play()
    assert stats.ended["rejected"] == len(lm.history) == 3


# Modules


@pytest.mark.parametrize("module", [PREDICT, InThread(), Chain(2)], ids=["awaited", "in a thread", "two calls"])
def test_a_module_is_asked_and_what_it_costs_is_counted(module: dspy.Module) -> None:
    one, heard = made(), list[Event]()
    one.bus.subscribe(heard.append)
    stats = Loop(one, asking(one, module)).play()
    calls = 2 if isinstance(module, Chain) else 1
    assert stats.requests_by_stage == {"work": 3}
    assert stats.tokens_by_stage == {"work": 3 * 7 * calls}
    assert [event.error for event in heard if isinstance(event, RequestFinished)] == ["", "", ""]


def test_a_module_is_not_changed_and_its_own_lm_is_asked() -> None:
    mine = fake_lm(lambda prompt: reply_for(prompt, answer="mine"))
    module = dspy.Predict("question -> answer")
    module.lm = mine
    one, replies = made(stages={"work": [module]}), list[str]()

    async def work(step: Step) -> None:
        for asked, lm in ((module, None), (PREDICT, mine), (PREDICT, None)):
            replies.append((await one.ask("work", step, asked, lm=lm, question="q")).answer)

    Loop(one, work, steps=1).play()
    assert replies[:2] == ["mine", "mine"]
    assert replies[2] != "mine"
    assert module.lm is mine
    assert not module.history


def test_a_reply_that_does_not_fit_its_format_is_the_callers_and_is_paid() -> None:
    one = made()

    async def work(step: Step) -> None:
        with pytest.raises(AdapterParseError):
            await one.ask("work", step, PREDICT, lm=fake_lm(lambda prompt: "no fields at all"), question="q")

    stats = Loop(one, work, steps=1).play()
    assert stats.tokens_by_stage["work"] >= 7
    assert stats.retried_requests == 0


def test_a_module_that_cancels_itself_has_failed_and_the_run_goes_on() -> None:
    class Cancelled(dspy.Module):
        async def aforward(self, question: str) -> dspy.Prediction:
            raise asyncio.CancelledError("by itself")

        def forward(self, question: str) -> dspy.Prediction:
            raise AssertionError("it is awaited")

    one = made()

    async def work(step: Step) -> None:
        with pytest.raises(RuntimeError, match="cancelled: by itself"):
            await one.ask("work", step, Cancelled(), question="q")

    assert Loop(one, work).play().ended["rejected"] == 3


# Rollouts


def test_a_runner_takes_any_metric_and_scores_failures_as_it_is_told() -> None:
    def short(gold: Any, pred: Any) -> float:
        return 1.0 / int(pred.answer)

    async def coroutine(gold: Any, pred: Any, trace: Any) -> float:
        await anyio.sleep(1)
        return 0.5

    one, scores = made(max_metric_calls=99), list[float]()

    async def work(step: Step) -> None:
        for number, metric in enumerate((short, coroutine)):
            runner = one.runner(Chain(), metric, failure_score=-1.0)
            for lm in ("0", "4"):
                with dspy.context(lm=fake_lm(lambda prompt, lm=lm: reply_for(prompt, answer=lm))):
                    rollout = await one.rollout("work", step, runner, {}, TRAIN[0], (number, lm))
                scores.append(rollout.score)

    Loop(one, work, steps=1).play()
    assert scores == [-1.0, 0.25, 0.5, 0.5]
