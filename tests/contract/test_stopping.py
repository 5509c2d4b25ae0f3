"""Every way to end a run early, what is left then, and the best program while a run goes on."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import LMAuthError, LMRateLimitError
from gepa.core.state import GEPAState
from gepa.utils import CompositeStopper, MaxCandidateProposalsStopper, NoImprovementStopper

from dspy_flashevolve import AsyncGEPA, RunAbortedError
from tests.contract.surface import (
    ENDLESS,
    TRAIN,
    VAL,
    InThread,
    check_ends,
    left_threads,
    listening,
    on,
    optimizer,
    priced,
    raising,
    simulated,
    steps_of,
    text_of,
)
from tests.fakes import Chain, digits, fake_lm, hashed, reflection_lm, reply_for, task_lm


def compiled(one: AsyncGEPA | dspy.GEPA) -> Any:
    return one.compile(Chain(), trainset=TRAIN, valset=VAL)


def press(number: signal.Signals) -> Callable[[dict[str, Any]], None]:
    """A callback that sends this process a signal, once: as a person does it."""
    pressed: list[int] = []

    def once(event: dict[str, Any]) -> None:
        if not pressed:
            pressed.append(1)
            os.kill(os.getpid(), number)

    return once


# Ways to end a run


ENDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "max_metric_calls": ({"calls": 60}, "max_metric_calls=60", "finished"),
    "max_seconds": ({"max_seconds": 0.2}, "max_seconds=0.2 is over", "finished"),
    "max_reflection_calls": ({"max_reflection_calls": 4}, "max_reflection_calls=4 is spent", "finished"),
    "max_cost": ({"max_cost": 5e-4}, "max_cost=0.0005 dollars is spent", "finished"),
    "max_seconds alone": ({"calls": None, "max_seconds": 0.2}, "max_seconds=0.2 is over", "finished"),
    "max_cost alone": ({"calls": None, "max_cost": 5e-4}, "max_cost=0.0005 dollars is spent", "finished"),
    "a stopper": (
        {"gepa_kwargs": {"stop_callbacks": MaxCandidateProposalsStopper(4)}},
        "a stopper said stop",
        "stopped",
    ),
    "gepa.stop": ({}, "gepa.stop is there", "stopped"),
}


WAYS = [(way, "async") for way in ENDS] + [
    (way, "lockstep") for way in ("max_seconds", "max_seconds alone", "a stopper", "gepa.stop")
]


@pytest.mark.parametrize(("way", "schedule"), WAYS)
def test_every_end_drains_and_returns_the_best(way: str, schedule: Any, tmp_path: Path) -> None:
    options, reason, outcome = ENDS[way]
    options = {"calls": ENDLESS, "schedule": schedule} | options
    if way == "gepa.stop":
        options |= {
            "log_dir": str(tmp_path),
            "gepa_kwargs": on("on_iteration_end", lambda _: (tmp_path / "gepa.stop").touch()),
        }
    lms = [priced(lm) if "max_cost" in options else lm for lm in (task_lm(), reflection_lm())]
    with dspy.context(lm=lms[0]):
        program = compiled(optimizer(reflection_lm=lms[1], **options))
    details, stats = program.detailed_results, program.async_stats
    assert reason in stats.stop_reason
    assert stats.outcome == outcome
    assert stats.ended["cancelled"] == 0, "what ran was finished"
    check_ends(stats)
    assert text_of(program) == text_of(details.candidates[details.best_idx])
    assert details.val_aggregate_scores[details.best_idx] == max(details.val_aggregate_scores)


def test_a_stopper_is_asked_once_a_finished_step_in_lockstep() -> None:
    asked: list[int] = []

    def stopper(state: Any) -> bool:
        asked.append(state.total_num_evals)
        return len(asked) > 5

    stats = compiled(optimizer(ENDLESS, schedule="lockstep", gepa_kwargs={"stop_callbacks": stopper})).async_stats
    assert steps_of(stats) == len(asked) - 1 == 5


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "itself": lambda stopper: stopper,
    "in a composite": lambda stopper: CompositeStopper(stopper, MaxCandidateProposalsStopper(ENDLESS)),
    "in a composite of all": lambda stopper: CompositeStopper(stopper, lambda state: True, mode="all"),
}


@cache
def calls_without_improvement(wrapped: str | None) -> list[int]:
    """Metric calls of runs of several seeds that NoImprovementStopper ends; None for dspy.GEPA's."""
    spent: list[int] = []
    for seed in range(3):
        stopper = WRAPPED[wrapped or "itself"](NoImprovementStopper(5))
        options: dict[str, Any] = {"max_metric_calls": 1000, "track_stats": True, "seed": seed}
        options |= {"reflection_lm": reflection_lm(seed), "gepa_kwargs": {"stop_callbacks": [stopper]}}
        with dspy.context(lm=task_lm(seed)):
            if wrapped is None:
                details = compiled(dspy.GEPA(digits, num_threads=1, **options)).detailed_results
            else:
                details = simulated(options.pop("max_metric_calls"), num_threads=16, **options).detailed_results
                assert details.async_stats.stop_reason == "a stopper said stop"
        spent.append(details.total_metric_calls)
    return spent


@pytest.mark.long
@pytest.mark.parametrize("wrapped", list(WRAPPED))
def test_a_run_without_improvement_goes_on_for_no_less_than_with_dspy_gepa(wrapped: str) -> None:
    ours, theirs = calls_without_improvement(wrapped), calls_without_improvement(None)
    assert 30 < median(theirs) <= median(ours), (ours, theirs)


def test_the_first_reason_stays_when_ctrl_c_comes_after_it() -> None:
    stats = compiled(optimizer(60, gepa_kwargs=on("on_optimization_end", press(signal.SIGINT)))).async_stats
    assert "max_metric_calls=60" in stats.stop_reason
    assert stats.outcome == "finished"


# Signals: a process of its own


SCRIPT = """
import asyncio, json, logging, signal, sys, threading
import dspy
from gepa.core.state import GEPAState
from tests.fakes import FakeEngine
from tests.contract.surface import *
from tests.fakes import *
from dspy.utils.exceptions import LMRateLimitError, LMServerError
from dspy_flashevolve import Workflow

mode, kind, folder = sys.argv[1:]
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
accepted = []

class Paced(AsyncFakeEngine):
    async def complete(self, request):
        if mode == "hangs" and accepted:
            await asyncio.Event().wait()
        await asyncio.sleep(0.005)
        return await super().complete(request)

class Tell:
    def on_candidate_accepted(self, event):
        if not accepted:
            print("a candidate was accepted", flush=True)
        accepted.append(event["new_candidate_idx"])

waiting = set()

def answer(prompt):
    if mode == "outage" and accepted:
        raise LMServerError("503", status=503)
    if mode == "an hour" and accepted and (prompt in waiting or len(waiting) < 2):
        waiting.add(prompt)
        print(f"told to wait {len(waiting)}\\n", end="", flush=True)  # in one piece: other threads print, too
        raise LMRateLimitError("429", retry_after=3600.0)
    if "new_instruction" in prompt:
        return reply_for(prompt, new_instruction=f"Instruction {hashed(prompt) % 100_000}")
    return reply_for(prompt, answer=str(hashed(prompt) % 7))

engine = FakeEngine(answer)
lm = dspy.LM("fake/model", engine=engine, async_engine=Paced(engine), cache=False, num_retries=0)
options = {"search": "pareto", "workflow": Workflow(max_outage_seconds=7200)}
one = optimizer(ENDLESS, log_dir=folder, reflection_lm=lm, gepa_kwargs={"callbacks": [Tell()]}, **options)
student = InThread() if kind == "thread" else Chain()
texts_of = lambda program: [one.signature.instructions for one in program.predictors()]
before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
with dspy.context(lm=lm):
    try:
        program, end = one.compile(student, trainset=TRAIN, valset=VAL), "returned"
    except KeyboardInterrupt:
        program, end = None, "KeyboardInterrupt"
best = one.best_so_far()
after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
print(json.dumps({
    "end": end,
    "outcome": best.async_stats.outcome,
    "stop_reason": best.async_stats.stop_reason,
    "ended": best.async_stats.ended,
    "accepted": accepted,
    "saved": len(GEPAState.load(folder).program_candidates),
    "same": program is None or texts_of(program) == texts_of(best),
    "score": max(best.detailed_results.val_aggregate_scores),
    "handlers are back": before == after,
    "threads": left_threads(),
}), flush=True)
sys.stdin.readline()
"""


class Child:
    """A script that optimizes, in a process of its own."""

    def __init__(self, mode: str, kind: str, folder: Path) -> None:
        command = [sys.executable, "-c", SCRIPT, mode, kind, str(folder)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        self.watchdog = threading.Timer(60, self.process.kill)  # a script that hangs is a failure, not a hang
        self.watchdog.start()

    def wait_for(self, words: str) -> str:
        """The next line with these words."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if words in line:
                return line
        raise AssertionError(f"the script ended without {words!r}: {self.process.wait()}")

    def result(self) -> dict[str, Any]:
        return json.loads(self.wait_for('"end"'))


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    begun: list[Child] = []

    def begin(mode: str, kind: str = "loop") -> Child:
        begun.append(Child(mode, kind, tmp_path))
        begun[-1].wait_for("a candidate was accepted")
        return begun[-1]

    yield begin
    for one in begun:
        one.watchdog.cancel()
        one.process.kill()
        one.process.communicate()


REASONS = {signal.SIGINT: "interrupted by Ctrl-C", signal.SIGTERM: "terminated by SIGTERM"}


@pytest.mark.parametrize("number", list(REASONS))
def test_the_first_ctrl_c_or_sigterm_drains_saves_and_returns_the_best(number: signal.Signals, child: Any) -> None:
    script = child("drains")
    script.process.send_signal(number)
    result = script.result()
    assert result["end"] == "returned"
    assert (result["outcome"], result["stop_reason"]) == ("stopped", REASONS[number])
    assert result["ended"]["cancelled"] == 0
    assert result["ended"]["committed"] == len(result["accepted"]) == result["saved"] - 1 > 0
    assert result["same"]
    assert result["handlers are back"]
    assert result["threads"] == []
    script.process.send_signal(signal.SIGTERM)
    assert script.process.wait(30) == -signal.SIGTERM, "after the run, a signal does what it did before"


@pytest.mark.parametrize("number", list(REASONS))
def test_the_second_one_saves_every_commit_and_raises_keyboard_interrupt(number: signal.Signals, child: Any) -> None:
    """No request is answered any more: the run cannot drain, so that the second signal finds it there."""
    script = child("hangs")
    script.process.send_signal(number)
    script.wait_for("A second time cancels")
    script.process.send_signal(number)
    result = script.result()
    assert result["end"] == "KeyboardInterrupt"
    assert (result["outcome"], result["stop_reason"]) == ("aborted", REASONS[number])
    assert result["ended"]["cancelled"] > 0
    assert result["ended"]["committed"] == len(result["accepted"]) == result["saved"] - 1 > 0
    assert result["score"] > 0
    assert result["handlers are back"]
    assert result["threads"] == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "kind", "number", "sign"),
    [
        ("outage", "thread", signal.SIGINT, "does not answer"),
        ("an hour", "loop", signal.SIGTERM, "told to wait 2"),
        ("an hour", "thread", signal.SIGTERM, "told to wait 2"),
    ],
)
def test_the_first_one_ends_a_wait_for_the_provider(
    mode: str, kind: str, number: signal.Signals, sign: str, child: Any
) -> None:
    """Of an hour, where the script is killed after a minute; and a thread cannot be cancelled."""
    script = child(mode, kind)
    script.wait_for(sign)
    script.process.send_signal(number)
    result = script.result()
    assert (result["end"], result["outcome"], result["stop_reason"]) == ("returned", "stopped", REASONS[number])
    assert result["ended"]["committed"] == len(result["accepted"]) == result["saved"] - 1 > 0
    assert result["same"]
    assert result["threads"] == []


# Signals: in this process


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in REASONS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def now() -> list[Any]:
    return [signal.getsignal(number) for number in REASONS]


def test_handlers_are_set_while_compile_runs_in_the_main_thread_and_put_back() -> None:
    before, during = now(), list[Any]()
    compiled(optimizer(40, gepa_kwargs=on("on_iteration_start", lambda _: during.append(now()))))
    assert during
    assert all(mine != theirs for one in during for mine, theirs in zip(one, before, strict=True))
    assert now() == before


def test_handlers_are_put_back_after_an_error() -> None:
    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> float:
        raise LMAuthError("invalid key")

    before = now()
    with pytest.raises(RunAbortedError):
        compiled(optimizer(metric=metric))
    assert now() == before


@pytest.mark.parametrize("way", ["another thread", "acompile"])
def test_no_handler_is_touched_in_another_thread_or_by_acompile(way: str) -> None:
    before, during = now(), list[Any]()
    one = optimizer(40, gepa_kwargs=on("on_iteration_start", lambda _: during.append(now())))
    if way == "acompile":
        loop = asyncio.new_event_loop()
        loop.run_until_complete(one.acompile(Chain(), trainset=TRAIN, valset=VAL))
        loop.close()
    else:
        with ThreadPoolExecutor(1) as pool:
            settings = dict(dspy.settings.config)
            pool.submit(lambda: run_in(settings, one)).result()
    assert during
    assert all(one == before for one in during)
    assert now() == before


def run_in(settings: dict[str, Any], one: AsyncGEPA) -> Any:
    with dspy.context(lm=settings["lm"]):
        return compiled(one)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", list(REASONS))
def test_a_handler_of_the_users_is_left_alone(number: signal.Signals) -> None:
    heard: list[int] = []

    def mine(got: int, frame: Any) -> None:
        heard.append(got)

    signal.signal(number, mine)
    stats = compiled(optimizer(60, gepa_kwargs=on("on_iteration_start", press(number)))).async_stats
    assert heard == [number]
    assert stats.outcome == "finished"
    assert signal.getsignal(number) is mine


@pytest.mark.usefixtures("handlers")
def test_a_handler_of_the_users_that_raises_keyboard_interrupt_counts_as_ctrl_c() -> None:
    def mine(got: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, mine)
    stats = compiled(optimizer(ENDLESS, gepa_kwargs=on("on_iteration_end", press(signal.SIGTERM)))).async_stats
    assert (stats.outcome, stats.stop_reason) == ("stopped", "interrupted by Ctrl-C")


@pytest.mark.usefixtures("handlers")
def test_sys_exit_in_a_handler_of_the_users_cancels_the_run_and_saves_it(tmp_path: Path) -> None:
    def mine(got: int, frame: Any) -> None:
        sys.exit(3)

    signal.signal(signal.SIGTERM, mine)
    one = optimizer(ENDLESS, log_dir=str(tmp_path), search="pareto")
    one.gepa_kwargs = on("on_candidate_accepted", press(signal.SIGTERM))
    with pytest.raises(SystemExit):
        compiled(one)
    best: Any = one.best_so_far()
    assert best.async_stats.outcome == "aborted"
    saved = len(GEPAState.load(str(tmp_path)).program_candidates)
    assert saved == best.async_stats.ended["committed"] + 1 > 1
    assert left_threads() == []


def test_the_second_ctrl_c_does_not_wait_for_a_program_that_blocks_its_thread() -> None:
    calls, released, pressing = [], threading.Event(), press(signal.SIGINT)

    class Blocks(InThread):
        def forward(self, question: str) -> dspy.Prediction:
            calls.append(1)
            if len(calls) > 40:
                pressing({})
                released.wait(60)
            return super().forward(question)

    def press_again(record: logging.LogRecord) -> None:
        if "A second time cancels" in record.getMessage():
            os.kill(os.getpid(), signal.SIGINT)

    one = optimizer(ENDLESS)
    try:
        with listening(press_again), pytest.raises(KeyboardInterrupt, match="Ctrl-C"):
            one.compile(Blocks(), trainset=TRAIN, valset=VAL)
        assert not released.is_set()
        best: Any = one.best_so_far()
        assert best.async_stats.outcome == "aborted"
    finally:
        released.set()
    assert left_threads() == [], "the thread ends with the call that blocked it"


# A notebook: a loop runs in the main thread


def in_a_cell(one: AsyncGEPA) -> Any:
    """As ipykernel runs a cell without ``await``: the main thread's loop stands still while it runs."""

    async def cell() -> Any:
        return compiled(one)

    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(cell())
    finally:
        loop.close()


def test_max_seconds_ends_a_run_in_a_notebook_cell() -> None:
    stats = in_a_cell(optimizer(ENDLESS, max_seconds=0.2)).async_stats
    assert (stats.outcome, stats.stop_reason) == ("finished", "max_seconds=0.2 is over")


def test_interrupt_kernel_ends_the_cell_with_the_best_program() -> None:
    """The button sends the kernel SIGINT; ipykernel has Python's own handler set while a cell runs."""
    one = optimizer(ENDLESS, gepa_kwargs=on("on_candidate_accepted", press(signal.SIGINT)), search="pareto")
    program = in_a_cell(one)
    assert program.async_stats.stop_reason == "interrupted by Ctrl-C"
    assert program.async_stats.ended["cancelled"] == 0
    assert len(program.detailed_results.candidates) > 1


# The best so far


@pytest.mark.parametrize("awaited", [False, True], ids=["in a thread", "on the run's own loop"])
def test_best_so_far_is_none_before_the_seed_is_validated_and_the_runs_best_after_it(awaited: bool) -> None:
    early: list[Any] = []

    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        early.append(one.best_so_far())
        return digits(gold, pred)

    async def coroutine(gold: Any, pred: Any, trace: Any, pred_name: Any, pred_trace: Any) -> Any:
        return metric(gold, pred)

    one = optimizer(80, metric=coroutine if awaited else metric)
    assert one.best_so_far() is None
    program = compiled(one)
    best: Any = one.best_so_far()
    assert early[:9] == [None] * 9
    assert any(early)
    assert text_of(best) == text_of(program)
    assert best is not program
    assert best.detailed_results.to_dict() == program.detailed_results.to_dict()
    assert best.async_stats is program.async_stats


def test_best_so_far_in_a_callback_knows_the_candidate_that_was_just_validated() -> None:
    known: list[tuple[float, float]] = []
    scores: list[float] = []

    def validated(event: Any) -> None:
        scores.append(event["average_score"])
        details = one.best_so_far().detailed_results
        assert details.async_stats is None
        known.append((max(scores), details.val_aggregate_scores[details.best_idx]))

    one = optimizer(110)
    one.gepa_kwargs = on("on_valset_evaluated", validated)
    compiled(one)
    assert len(known) > 2
    assert all(told == mine for told, mine in known)


def test_best_so_far_waits_for_nobody_not_even_for_a_callback_that_waits_for_it() -> None:
    seen: list[Any] = []
    with ThreadPoolExecutor(1) as other:

        def ask(event: Any) -> None:
            seen.append(other.submit(one.best_so_far).result(timeout=30))

        one = optimizer(100)
        one.gepa_kwargs = on("on_iteration_end", ask)
        compiled(one)
    assert seen
    assert all(isinstance(program, Chain) for program in seen)


def test_best_so_far_can_be_asked_all_the_time_from_many_threads_until_after_the_end() -> None:
    over, scores = threading.Event(), list[list[float]]()

    def ask() -> None:
        mine: list[float] = []
        scores.append(mine)
        while True:
            last = over.is_set()
            program: Any = one.best_so_far()
            if program is not None:
                details = program.detailed_results
                assert text_of(program) == text_of(details.candidates[details.best_idx])
                mine.append(details.val_aggregate_scores[details.best_idx])
            if last:
                return

    one = optimizer(50)
    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        try:
            program = compiled(one)
        finally:
            over.set()
        for future in asking:
            future.result()
    best = max(program.detailed_results.val_aggregate_scores)
    assert all(mine == sorted(mine) and mine[-1] == best for mine in scores)


def test_best_so_far_is_a_bare_program_without_track_stats() -> None:
    one = optimizer(100, track_stats=False)
    program = compiled(one)
    assert text_of(one.best_so_far()) == text_of(program)
    assert not hasattr(one.best_so_far(), "detailed_results")


def test_best_so_far_is_that_of_the_compile_that_began_last() -> None:
    """The inner compile begins while the outer one runs, and ends before it."""
    inner: list[Any] = []

    def begin(event: Any) -> None:
        if not inner:
            inner.append(None)
            with ThreadPoolExecutor(1) as pool:
                inner[0] = pool.submit(run_in, settings, one).result()
            assert text_of(one.best_so_far()) == text_of(inner[0])

    settings = {"lm": fake_lm(lambda prompt: reply_for(prompt, answer=str(hashed("inner", prompt) % 7)))}
    one = optimizer(90)
    one.gepa_kwargs = on("on_candidate_accepted", begin)
    compiled(one)
    best: Any = one.best_so_far()
    assert best.async_stats is inner[0].async_stats


def test_best_so_far_of_a_run_that_goes_on_from_a_checkpoint_is_the_checkpoints_best(tmp_path: Path) -> None:
    first = compiled(optimizer(90, log_dir=str(tmp_path)))
    known: list[Any] = []
    one = optimizer(110, log_dir=str(tmp_path))
    one.gepa_kwargs = on("on_iteration_start", lambda _: known.append(one.best_so_far()))
    compiled(one)
    assert len(first.detailed_results.candidates) > 1
    assert text_of(known[0]) == text_of(first)


# How it ended


def summary(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    """What is said at the end of a run."""
    (line,) = [record for record in caplog.records if "\nmetric calls: " in record.getMessage()]
    return line


def test_the_end_of_a_run_is_told_once_and_as_its_statistics_tell_it(caplog: pytest.LogCaptureFixture) -> None:
    dspys = logging.getLogger("dspy.teleprompt.gepa.gepa")  # what dspy shows by itself
    with caplog.at_level(logging.INFO, logger=dspys.name):
        program = compiled(optimizer(90))
    stats, said = program.async_stats, summary(caplog)
    assert said.levelno == logging.INFO
    assert said.getMessage() == f"AsyncGEPA {stats!r}"
    scores = program.detailed_results.val_aggregate_scores
    assert (stats.seed_score, stats.best_score) == (scores[0], max(scores))
    assert f"{stats.seed_score:.4g} (the program given) -> {stats.best_score:.4g} (the program returned)" in repr(stats)
    assert f"metric calls: {stats.metric_calls} of 90" in repr(stats)
    assert str(stats) == repr(stats)
    assert len(repr(stats)) < 2000
    added = [line[1:] for line in stats.prompt_change.splitlines() if line.startswith("+") and line[:3] != "+++"]
    assert added
    assert set(added) <= {
        line for _, one in program.named_predictors() for line in one.signature.instructions.split("\n")
    }


def failing_after(count: int, error: Exception) -> dspy.LM:
    return raising(lambda number: error if number > count else None)


def test_a_run_that_gives_up_says_failed_in_the_result_and_in_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with dspy.context(lm=failing_after(60, LMRateLimitError("503 for good"))):
        stats = simulated(ENDLESS).async_stats
    assert stats.outcome == "failed"
    assert summary(caplog).levelno == logging.ERROR
    assert "gave up" in summary(caplog).getMessage()


def test_an_aborted_run_says_so_in_its_best_program_and_in_an_error(caplog: pytest.LogCaptureFixture) -> None:
    one = optimizer(ENDLESS)
    with (
        dspy.context(lm=failing_after(60, LMAuthError("the key was revoked"))),
        pytest.raises(RunAbortedError) as error,
    ):
        compiled(one)
    stats = error.value.best_program.async_stats
    best: Any = one.best_so_far()
    assert stats.outcome == best.async_stats.outcome == "aborted"
    assert stats.stop_reason.startswith("RunAbortedError: ")
    assert stats.outcome != "failed"
    assert summary(caplog).levelno == logging.ERROR


def test_a_cancelled_acompile_leaves_the_best_so_far_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        one.gepa_kwargs = on("on_candidate_accepted", lambda _: loop.call_soon_threadsafe(task.cancel))
        await one.acompile(Chain(), trainset=TRAIN, valset=VAL)

    one = optimizer(ENDLESS, search="pareto")
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    best: Any = one.best_so_far()
    assert (best.async_stats.outcome, best.async_stats.stop_reason) == ("aborted", "cancelled")
    assert summary(caplog).levelno == logging.WARNING
    assert left_threads() == []


IN_A_THREAD = """
import threading
import dspy
from tests.contract.surface import ENDLESS, compiled, on
from tests.fakes import task_lm

accepted = threading.Event()

def optimize():
    with dspy.context(lm=task_lm()):
        try:
            compiled(ENDLESS, gepa_kwargs=on("on_candidate_accepted", lambda _: accepted.set()))
        except BaseException as error:
            best = error.best_program.detailed_results
            print(type(error).__name__, len(best.candidates) > 1, error, flush=True)

threading.Thread(target=optimize).start()
accepted.wait()
"""


@pytest.mark.long
def test_a_run_in_a_thread_says_so_when_the_main_thread_ends_before_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_A_THREAD], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120
    )
    assert done.stdout.startswith("RunAbortedError True The main thread has ended"), done.stdout + done.stderr
    assert "thread.join()" in done.stdout


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["score", "feedback"])
@pytest.mark.parametrize(
    ("optimized_by", "awaited"),
    [("async", False), ("async", True), ("lockstep", False), ("lockstep", True), ("dspy.GEPA", False)],
)
def test_what_a_metric_raises_to_leave_ends_the_run_as_it_is(
    error: type[BaseException], call: str, optimized_by: str, awaited: bool
) -> None:
    calls: list[Any] = []

    def leaving(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> float:
        calls.append(gold)
        if len(calls) > 12 and (pred_name is not None) == (call == "feedback"):
            raise error("enough")
        return 0.5

    async def coroutine(gold: Any, pred: Any, trace: Any, pred_name: Any, pred_trace: Any) -> float:
        return leaving(gold, pred, trace, pred_name, pred_trace)

    if optimized_by == "dspy.GEPA":
        one: Any = dspy.GEPA(leaving, max_metric_calls=100, num_threads=4, reflection_lm=reflection_lm())
    else:
        one = optimizer(ENDLESS, metric=coroutine if awaited else leaving, schedule=optimized_by)
    with pytest.raises(error, match="enough") as raised:
        compiled(one)
    assert type(raised.value) is error
    assert left_threads() == []
