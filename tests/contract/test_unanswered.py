"""One example, or everything, that a provider does not answer: the run goes on, or ends soon, and always ends."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import dspy
import httpx
import pytest
from dspy.lm15 import Message, Request, Response, TextPart, Usage
from dspy.utils.exceptions import LMRateLimitError, LMServerError, LMTimeoutError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dspy_flashevolve import Reflective, RunAbortedError, Workflow
from dspy_flashevolve.sim.virtual import LOOP_OF, run
from tests.broken_server import BrokenServer
from tests.contract.surface import (
    ENDLESS,
    TRAIN,
    VAL,
    InThread,
    check_ends,
    check_winner,
    compiled,
    listening,
    on,
    optimizer,
    problems,
    simulated,
)
from tests.fakes import Chain, digits, fake_lm, hashed, prompt_of, reflection_lm, reply_for


def answer(prompt: str) -> str:
    """A reply whose score is above 0."""
    return reply_for(prompt, answer=str(1 + hashed(prompt) % 6), new_instruction=f"Instruction {hashed(prompt)}")


def except_for(question: str, error: Callable[[], Exception], asked: list[str] | None = None) -> dspy.LM:
    """Answers everything but one question, and keeps what it was asked."""

    def choose(prompt: str) -> str:
        if asked is not None:
            asked.append(prompt)
        if f"\n{question}" in prompt:
            raise error()
        return answer(prompt)

    return fake_lm(choose)


ALWAYS: dict[str, Callable[[], Exception]] = {
    "500": lambda: LMServerError("500", status=500),
    "no message": lambda: KeyError("choices"),
    "503": lambda: LMServerError("503", status=503),
    "429": lambda: LMRateLimitError("429"),
}


def now() -> float:
    """Seconds of the run's loop, also in its threads."""
    return (LOOP_OF.get(threading.get_ident()) or asyncio.get_running_loop()).time()


class Slow(Chain):
    async def aforward(self, question: str) -> dspy.Prediction:
        await asyncio.sleep(1)
        return await super().aforward(question)


# One example


@pytest.mark.parametrize("name", list(ALWAYS))
def test_a_validation_example_without_an_answer_fails_for_every_candidate_alike(
    name: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with dspy.context(lm=except_for("v 3", ALWAYS[name])), caplog.at_level(logging.WARNING, "dspy_flashevolve"):
        details = simulated(110, failure_score=-0.5, log_dir=str(tmp_path)).detailed_results
    stats = details.async_stats
    assert stats.outcome == "finished"
    assert len(details.val_subscores) > 1
    for scores in details.val_subscores:
        assert scores[3] == -0.5
        assert min(score for number, score in scores.items() if number != 3) > 0
    assert stats.unanswered_examples == 1
    assert sum("v 3" in line or "Example 3 of val" in line for line in caplog.messages) == 1, "it is said once"
    assert stats.ended["failed"] == 0
    check_winner(details)
    assert problems(tmp_path) == []


def test_the_seed_scores_as_in_gepa_where_one_validation_example_gets_no_answer() -> None:
    theirs = dspy.GEPA(digits, max_metric_calls=10, reflection_lm=reflection_lm(), track_stats=True)
    with dspy.context(lm=except_for("v 3", ALWAYS["500"])):
        expected = theirs.compile(Chain(), trainset=TRAIN, valset=VAL).detailed_results.val_subscores[0]
        for schedule in ("async", "lockstep"):
            details = simulated(60, schedule=schedule).detailed_results
            assert list(details.val_subscores[0].values()) == list(expected.values())
            assert details.async_stats.seconds < 60, "of virtual time, for the attempts at one example"


@pytest.mark.parametrize("name", list(ALWAYS))
def test_minibatches_avoid_a_training_example_without_an_answer(name: str) -> None:
    asked: list[str] = []
    with dspy.context(lm=except_for("t 3", ALWAYS[name], asked)):
        details = simulated(110, Slow()).detailed_results
    stats = details.async_stats
    assert (stats.outcome, stats.unanswered_examples, stats.ended["failed"]) == ("finished", 1, 0)
    assert len(stats.commits) > 2
    places = [place for place, prompt in enumerate(asked) if "\nt 3" in prompt]
    if name in ("500", "no message"):
        assert places[-1] < 3 * len(asked) / 4, "it is not asked for any more"
    assert len(places) < 50, "of one rollout's attempts: 429 and 503 say later, for a minute; nobody else waits for it"


def test_an_example_that_another_candidate_was_answered_fails_for_one_candidate_alone() -> None:
    def choose(prompt: str) -> str:
        if "\nv 3" in prompt and "Instruction" in prompt and hashed(prompt) % 2:
            raise LMServerError("500", status=500)
        return answer(prompt)

    with dspy.context(lm=fake_lm(choose)):
        details = simulated(130).detailed_results
    third = [scores[3] for scores in details.val_subscores]
    assert third[0] > 0
    assert min(third) == 0
    assert max(third[1:]) > 0, "others are asked all the same"


# A share of everything


def except_for_a_share(
    share: float, error: Callable[[], Exception], of: str = r"\n([tv] \d+)", draw: str = "share"
) -> dspy.LM:
    """Never answers a share of the questions, or of what else an expression finds in a prompt."""

    def choose(prompt: str) -> str:
        if hashed(draw, re.findall(of, prompt, re.DOTALL)[-1:]) % 1000 < 1000 * share:
            raise error()
        return answer(prompt)

    return fake_lm(choose)


@pytest.mark.parametrize(("name", "kind"), [("500", "loop"), ("500", "thread"), ("503", "loop"), ("429", "loop")])
def test_a_run_goes_on_though_a_third_of_the_examples_is_never_answered(name: str, kind: str) -> None:
    with dspy.context(lm=except_for_a_share(1 / 3, ALWAYS[name])):
        details = simulated(130, SlowInThread() if kind == "thread" else Slow()).detailed_results
    stats = details.async_stats
    assert (stats.outcome, stats.ended["failed"]) == ("finished", 0)
    assert stats.metric_calls >= 116
    assert stats.unanswered_examples == 5
    check_winner(details)


@pytest.mark.parametrize("name", ["500", "503", "429"])
@pytest.mark.parametrize("kind", ["loop", "thread"])
def test_a_run_goes_on_though_a_third_of_all_prompts_is_never_answered(name: str, kind: str) -> None:
    """Of what a program is asked, and of reflections: another candidate, or another minibatch, may be answered. Steps
    without an answered rollout cost nothing and take no time, and do not go on for ever."""
    with dspy.context(lm=except_for_a_share(1 / 3, ALWAYS[name], of=".*")):
        details = simulated(130, SlowInThread() if kind == "thread" else Slow()).detailed_results
    stats = details.async_stats
    assert stats.outcome == "finished"
    assert stats.metric_calls > 97
    check_winner(details)
    check_ends(stats)
    assert sum(stats.ended.values()) < 100


@pytest.mark.parametrize("draw", ["a", *(pytest.param(draw, marks=pytest.mark.long) for draw in "bcdef")])
@pytest.mark.parametrize("retry_after", [1.0, 2.0])
def test_a_run_goes_on_though_one_prompt_in_twenty_is_refused_again_and_again(draw: str, retry_after: float) -> None:
    """Each wait between two attempts is shorter than the run's patience with one, and all of them together are not."""
    refused = except_for_a_share(0.05, lambda: LMRateLimitError("429", retry_after=retry_after), ".*", draw)
    with dspy.context(lm=refused):
        stats = simulated(200, Slow()).async_stats
    assert stats.metric_calls > 180, (stats.metric_calls, stats.stop_reason)


@pytest.mark.parametrize("name", ["500", "503"])
@pytest.mark.parametrize("kind", ["loop", "thread"])
def test_a_run_is_aborted_where_nine_of_ten_prompts_are_never_answered(name: str, kind: str) -> None:
    with (
        dspy.context(lm=except_for_a_share(0.9, ALWAYS[name], of=".*")),
        pytest.raises(RunAbortedError, match="seed program could not be validated"),
    ):
        simulated(110, SlowInThread() if kind == "thread" else Slow())


# Everything


def gone_after(requests: int, back_after: float = float("inf")) -> tuple[dspy.LM, list[float]]:
    """Answers so many requests; then refuses connections, for so many seconds. The times of the answers."""
    answered: list[float] = []

    def choose(prompt: str) -> str:
        if len(answered) >= requests and now() < answered[requests - 1] + back_after:
            raise ConnectionRefusedError("connection refused")
        answered.append(now())
        return answer(prompt)

    return fake_lm(choose), answered


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_a_provider_that_is_gone_is_told_at_once_and_given_up_within_a_minute(schedule: Any) -> None:
    (lm, answered), said = gone_after(60), list[float]()

    def hear(record: logging.LogRecord) -> None:
        if "does not answer" in record.getMessage():
            said.append(now())

    with dspy.context(lm=lm), listening(hear):
        details = simulated(ENDLESS, Slow(), schedule=schedule, reflection_lm=lm).detailed_results
    stats = details.async_stats
    assert stats.outcome == "failed"
    assert "has answered nothing for" in stats.stop_reason
    if schedule == "async":
        assert said[0] <= answered[-1] + 1 + 2, "a second of the program, and two"
    assert stats.seconds <= answered[-1] + 1 + 62
    check_winner(details)
    check_ends(stats)


def test_a_seed_that_nobody_answers_ends_the_run_within_a_minute() -> None:
    lm, _ = gone_after(0)
    times: list[float] = []

    class Timed(Chain):
        async def aforward(self, question: str) -> dspy.Prediction:
            times.append(now())
            return await super().aforward(question)

    with dspy.context(lm=lm), pytest.raises(RunAbortedError, match="seed program") as caught:
        simulated(100, Timed())
    assert caught.value.best_program is None
    assert max(times) < 65


def test_an_outage_that_is_shorter_than_max_outage_seconds_costs_nothing_but_time() -> None:
    lm, _ = gone_after(30, back_after=500)
    with dspy.context(lm=lm):
        details = simulated(90, workflow=Workflow(max_outage_seconds=600)).detailed_results
    stats = details.async_stats
    assert (stats.outcome, stats.ended["failed"], stats.unanswered_examples) == ("finished", 0, 0)
    assert stats.seconds > 500
    assert min(score for scores in details.val_subscores for score in scores.values()) > 0


# Waiting


def told_to_wait(*numbers: int) -> dspy.LM:
    """Lets the requests of these numbers wait for an hour, whenever they are asked."""
    seen: dict[str, int] = {}

    def choose(prompt: str) -> str:
        number = seen.setdefault(prompt, len(seen))
        if number in numbers:
            raise LMRateLimitError("429", retry_after=3600.0)
        return answer(prompt)

    return fake_lm(choose)


@pytest.mark.parametrize("kind", ["loop", "thread"])
def test_a_long_retry_after_does_not_outlive_the_deadline(kind: str) -> None:
    with dspy.context(lm=told_to_wait(4, 20)):
        student = InThread() if kind == "thread" else Chain()
        stats = simulated(ENDLESS, student, max_seconds=20, max_reflection_calls=30).async_stats
    assert stats.outcome == "finished"
    assert stats.seconds < 40


@dataclass
class Told:
    """Lets some questions wait for an hour, so many times each, and keeps when anything was asked."""

    questions: list[str]
    times: int
    asked: list[float] = field(default_factory=list[float])
    refused: Counter[str] = field(default_factory=Counter[str])

    def choose(self, prompt: str) -> str:
        self.asked.append(now())
        found = next((question for question in self.questions if f"\n{question}" in prompt), "")
        if found and self.refused[found] < self.times:
            self.refused[found] += 1
            raise LMRateLimitError("429", retry_after=3600.0)
        return answer(prompt)

    def compiled(self, calls: int, student: dspy.Module, **options: Any) -> Any:
        lm = fake_lm(self.choose)
        with dspy.context(lm=lm):
            return simulated(calls, student, reflection_lm=lm, **options).detailed_results

    def longest_gap(self) -> float:
        """The longest time in which nothing was asked, in seconds."""
        return max(after - before for before, after in pairwise(self.asked))


@pytest.mark.parametrize("questions", [["t 3", "t 5"], ["v 3", "v 5"], ["t 3", "v 5"]], ids=" and ".join)
@pytest.mark.parametrize("times", [1, 1000], ids=["once", "always"])
def test_work_goes_on_around_two_examples_that_are_told_to_wait_for_an_hour(questions: list[str], times: int) -> None:
    """Three steps are alive at a time, each of them comes to wait, and nothing is committed before the seed."""
    told = Told(questions, times)
    stats = told.compiled(250, Slow()).async_stats
    assert (stats.outcome, stats.ended["failed"]) == ("finished", 0)
    assert stats.unanswered_examples == (2 if times > 1 else 0)
    assert stats.metric_calls > 230
    assert told.longest_gap() < 10, "while a minute is waited"


@cache
def seconds_where_all_is_answered(kind: str, calls: int) -> float:
    return Told([], 0).compiled(calls, KINDS[kind]()).async_stats.seconds


@pytest.mark.parametrize("questions", [["t 3", "t 5"], ["v 3", "v 5"], ["t 3", "v 5"]], ids=" and ".join)
@pytest.mark.parametrize(("kind", "calls"), [("loop", 60), ("loop", 150), ("thread", 60), ("fast thread", 150)])
def test_two_examples_without_an_answer_cost_a_small_run_two_waits_at_most_and_not_its_end(
    kind: str, calls: int, questions: list[str]
) -> None:
    """What is told to wait for longer than it is waited for is soon given up then, for all candidates at once; though
    all slots are held by threads that wait."""
    stats = Told(questions, 1000).compiled(calls, KINDS[kind]()).async_stats
    assert (stats.outcome, stats.ended["failed"]) == ("finished", 0)
    assert 60 < stats.seconds < 140 + seconds_where_all_is_answered(kind, calls), "two waits and a little"
    assert stats.metric_calls > calls - 15
    assert stats.unanswered_examples == 2


def test_few_further_steps_begin_where_nobody_is_answered() -> None:
    """They find out whether others are answered; more would only wait, for as long as the outage takes."""
    begun: list[float] = []
    lm, answered = gone_after(60, back_after=50)
    with dspy.context(lm=lm):
        selected = on("on_candidate_selected", lambda event: begun.append(now()))
        stats = simulated(160, Slow(), gepa_kwargs=selected).async_stats
    assert stats.outcome == "finished"
    gone = answered[59]
    assert min(seconds for seconds in answered if seconds > gone) >= gone + 50
    assert 0 < sum(gone + 2 < seconds < gone + 50 for seconds in begun) <= 8


def test_a_stop_ends_every_wait() -> None:
    """A stopper of the user's, as a first Ctrl-C: what waits is asked for once more, and not for an hour."""

    stop = {"stop_callbacks": [lambda state: state.total_num_evals > 30]}
    patient = Workflow(max_outage_seconds=7200)
    with dspy.context(lm=told_to_wait(*range(25, ENDLESS // 100))):
        stats = simulated(ENDLESS, gepa_kwargs=stop, workflow=patient, max_seconds=100).async_stats
    assert stats.seconds < 130


class SlowInThread(InThread):
    def forward(self, question: str) -> Any:
        LOOP_OF[threading.get_ident()].wait_from_thread(asyncio.sleep(1))
        return super().forward(question)


KINDS: dict[str, type[dspy.Module]] = {"loop": Slow, "thread": SlowInThread, "fast thread": InThread}
FAULTS: dict[str, Callable[[], Exception]] = ALWAYS | {
    "an hour": lambda: LMRateLimitError("429", retry_after=3600.0),
    "refused": lambda: ConnectionRefusedError("connection refused"),
    "timeout": lambda: LMTimeoutError("no answer"),
}


@pytest.mark.long
@settings(max_examples=9)
@given(
    faults=st.lists(
        st.tuples(st.floats(0, 150), st.floats(0.1, 100), st.sampled_from(list(FAULTS)), st.floats(0.1, 1)), max_size=5
    ),
    kind=st.sampled_from(["async", "sync", "mixed"]),
    slots=st.sampled_from([1, 3, 8]),
    more=st.sampled_from(
        [{}, {"schedule": "lockstep"}, {"max_seconds": 60}, {"workflow": Workflow(rollout_timeout_seconds=5.0)}]
    ),
)
@example(faults=[(0.0, 2.0, "an hour", 0.5)], kind="mixed", slots=8, more={})
def test_no_schedule_of_faults_leaves_a_run_that_waits_for_nothing(
    faults: list[tuple[float, float, str, float]], kind: str, slots: int, more: dict[str, Any]
) -> None:
    """Faults of a share of the requests, from a time on, for a time; a metric that asks a judge in a thread."""
    asked = 0

    def choose(prompt: str) -> str:
        nonlocal asked
        asked += 1
        for begin, length, name, share in faults:
            if begin <= now() < begin + length and hashed(asked, name) % 1000 < 1000 * share:
                raise FAULTS[name]()
        return answer(prompt)

    lm = fake_lm(choose)

    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        if kind == "mixed" and pred_name is None:
            dspy.settings.lm(f"Is {pred.answer} right?")
        return digits(gold, pred)

    one = optimizer(80, metric=metric, num_threads=slots, reflection_lm=lm, **more)

    async def compile_it() -> Any:
        with dspy.context(lm=lm), anyio.fail_after(100_000):  # else a run that waits for nothing hangs this test, too
            student = InThread() if kind == "sync" else Slow()
            return await one.acompile(student, trainset=TRAIN, valset=VAL)

    try:
        stats = run(compile_it).async_stats
    except RunAbortedError as error:
        assert "seed program" in str(error)  # noqa: PT017
        return
    check_ends(stats)
    assert stats.outcome in ("finished", "failed")
    assert stats.seconds < 3000, "in virtual time; the faults are over after 250 seconds"


# Reflections


def test_unreadable_reflections_end_their_steps_and_not_the_run() -> None:
    def reflect(prompt: str) -> str:
        if hashed("unreadable", prompt) % 10 < 8:
            raise ValueError("no instruction in the reply")
        return reply_for(prompt, new_instruction=f"Instruction {hashed(prompt) % 100_000}")

    def proposer(candidate: Any, reflective_dataset: Any, components_to_update: list[str]) -> dict[str, str]:
        return {name: reflect(repr((candidate, reflective_dataset, name))) for name in components_to_update}

    theirs = dspy.GEPA(
        digits, max_metric_calls=120, reflection_lm=reflection_lm(), track_stats=True, instruction_proposer=proposer
    ).compile(Chain(), trainset=TRAIN, valset=VAL)
    assert theirs.detailed_results.total_metric_calls >= 120
    for schedule in ("async", "lockstep"):
        stats = simulated(120, schedule=schedule, instruction_proposer=proposer).async_stats
        assert stats.outcome == "finished"
        assert stats.ended["failed"] > 10
        assert stats.metric_calls > 100


def dripping_first(word: str = "") -> Callable[[str], str]:
    """A byte now and then resets the LM's timeout: the whole of the first reply would take half a minute.

    Args:
        word: it is the first reply to a prompt with this word in it.
    """
    asked: list[str] = []

    def choose(prompt: str) -> str:
        if word not in prompt:
            return reply_for("JSON", new_instruction=f"Look {hashed(prompt)}")
        asked.append(prompt)
        return "drip" if len(asked) == 1 else reply_for("JSON", new_instruction=f"Look {len(asked)}", answer="3")

    return choose


@pytest.mark.parametrize(
    ("word", "options"),
    [("", {}), ("", {"schedule": "lockstep"}), ("head_text", {"staleness": Reflective(min_gap=0)})],
    ids=["reflection", "in lockstep", "repair"],
)
def test_a_reflection_or_a_repair_that_drips_is_given_up_and_asked_again(word: str, options: dict[str, Any]) -> None:
    with BrokenServer(dripping_first(word)) as server:
        stats = compiled(90, reflection_lm=server.lm("chosen", timeout=2.0), **options).async_stats
    assert stats.retried_requests >= 1
    assert stats.ended["failed"] == 0
    assert stats.proposals > 0
    assert bool(word) == (stats.integration_calls > 0)


class ByParallel(Chain):
    def forward(self, question: str) -> dspy.Prediction:
        pairs = [(self.steps[0], {"question": f"{question} {number}"}) for number in range(2)]
        answers: Any = dspy.Parallel(num_threads=2, disable_progress_bar=True)(pairs)
        return dspy.Prediction(answer=" ".join(one.answer for one in answers))


class OnItsOwnLoop(Chain):
    def forward(self, question: str) -> dspy.Prediction:
        return dspy.Prediction(answer=asyncio.run(self.steps[0].acall(question=question)).answer)


TIMEOUTS = {"seconds": {"timeout": 2.0}, "httpx": {"timeout": httpx.Timeout(2.0), "engine": "litellm"}}


@pytest.mark.parametrize("timeout", TIMEOUTS)
@pytest.mark.parametrize("schedule", ["async", "lockstep"])
@pytest.mark.parametrize("program", [Chain, InThread, ByParallel, OnItsOwnLoop])
def test_a_rollout_that_drips_is_given_up_and_asked_again(program: Any, schedule: str, timeout: str) -> None:
    """In threads and on loops of the program's own, too."""
    with BrokenServer(dripping_first()) as server, dspy.context(lm=server.lm("chosen", **TIMEOUTS[timeout])):
        details = compiled(30, program(), metric=lambda *_: 0.5, schedule=schedule).detailed_results
    assert details.async_stats.retried_requests >= 1
    assert list(details.val_subscores[0].values()) == [0.5] * len(VAL)


@pytest.mark.long
def test_an_lm_call_of_a_metric_that_drips_is_given_up_with_the_metric_and_the_rollout_made_again() -> None:
    judged: list[str] = []

    def choose(prompt: str) -> str:
        if "Is it right?" not in prompt:
            return answer(prompt)
        judged.append(prompt)
        return "drip" if len(judged) == 1 else "yes"

    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        if pred_name is None:
            dspy.settings.lm("Is it right?")
        return digits(gold, pred)

    with BrokenServer(choose) as server, dspy.context(lm=server.lm("chosen", timeout=2.0)):
        stats = compiled(30, metric=metric).async_stats
    assert (stats.outcome, stats.ended["failed"]) == ("finished", 0)
    assert len(judged) == stats.metric_calls + 1


# What is left behind in a thread


class Late:
    """dspy's engine contract, from a thread in virtual time: each request takes 20 seconds, one of them far longer.

    Args:
        late: a word of the request that comes late, when it is made first.
        seconds: how late it comes.
        error: what it then raises; None for an answer.
    """

    def __init__(self, late: str, seconds: float, error: Callable[[], Exception] | None) -> None:
        self.late, self.seconds, self.error = late, seconds, error
        self.asked: list[str] = []

    def complete(self, request: Request) -> Response:
        prompt = prompt_of(request)
        comes_late = self.late in prompt and not any(self.late in one for one in self.asked)
        self.asked.append(prompt)
        LOOP_OF[threading.get_ident()].wait_from_thread(asyncio.sleep(self.seconds if comes_late else 20.0))
        if comes_late and self.error is not None:
            raise self.error()
        usage = Usage(input_tokens=3, output_tokens=4, total_tokens=7)
        message = Message.assistant([TextPart(answer(prompt))])
        return Response(id=None, model="fake", message=message, finish_reason="stop", usage=usage)

    def lm(self) -> dspy.LM:
        """Without a timeout of its own: the run gives a request 10 minutes."""
        return dspy.LM("fake/model", engine=self, cache=False, num_retries=0)


class Judging:
    """A metric that asks an LM twice in its thread, and may be careless about its errors."""

    def __init__(self, careless: bool = False) -> None:
        self.ignored = (Exception,) if careless else ()
        self.begun: list[str] = []
        self.ended: list[str] = []

    def __call__(self, gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        if pred_name is None:
            self.begun.append(gold.question)
            for turn in ("first", "second"):
                with suppress(*self.ignored):
                    dspy.settings.lm(f"{turn} look at {gold.question}.")
            self.ended.append(gold.question)
        return digits(gold, pred)


LATE = {"an answer": None, "an error": lambda: LMRateLimitError("429"), "a hollow reply": lambda: KeyError("choices")}


@pytest.mark.parametrize("turn", ["first", "second"])
@pytest.mark.parametrize("comes", list(LATE))
def test_a_metric_that_was_left_behind_in_its_thread_asks_no_more_and_is_not_counted(comes: str, turn: str) -> None:
    engine, metric = Late(f"{turn} look at v 3.", 630.0, LATE[comes]), Judging()
    with dspy.context(lm=engine.lm()):
        stats = simulated(60, metric=metric).async_stats
    assert stats.seconds > 650, "the thread came back in the run"
    assert (stats.outcome, stats.ended["failed"], stats.timed_out_rollouts) == ("finished", 0, 0)
    assert len(metric.begun) == stats.metric_calls + 1, "it began once more than it was paid"
    assert len(metric.ended) == stats.metric_calls
    second = sum("second look at" in prompt for prompt in engine.asked)
    assert sum("first look at" in prompt for prompt in engine.asked) == stats.metric_calls + 1
    assert second == stats.metric_calls + (turn == "second")


def test_a_metric_that_was_left_behind_and_ignores_the_error_asks_no_more() -> None:
    engine, metric = Late("first look at v 3.", 630.0, None), Judging(careless=True)
    with dspy.context(lm=engine.lm()):
        stats = simulated(60, metric=metric).async_stats
    assert len(metric.ended) == stats.metric_calls + 1, "the thread came to its end"
    assert sum("second look at" in prompt for prompt in engine.asked) == stats.metric_calls


class Twice(InThread):
    """Asks two times in its thread."""

    def forward(self, question: str) -> Any:
        with suppress(Exception):  # as careless code does
            self.steps[0](question=f"first look at {question}.")
        return self.steps[0](question=f"second look at {question}.")


@pytest.mark.parametrize("comes", list(LATE))
@pytest.mark.parametrize("bound", ["of the LM call", "of the rollout"])
def test_a_program_that_was_left_behind_in_its_thread_asks_no_more(bound: str, comes: str) -> None:
    engine = Late("first look at v 3.", 630.0, LATE[comes])
    with dspy.context(lm=engine.lm()):
        timeout = 500.0 if bound == "of the rollout" else None
        stats = simulated(90, Twice(), workflow=Workflow(rollout_timeout_seconds=timeout)).async_stats
    assert stats.timed_out_rollouts == 1
    assert stats.seconds > 650, "the thread came back in the run"
    assert (stats.outcome, stats.ended["failed"]) == ("finished", 0)
    looks = {turn: sum(f"{turn} look at" in prompt for prompt in engine.asked) for turn in ("first", "second")}
    assert looks == {"first": stats.metric_calls + 1, "second": stats.metric_calls}


def test_an_lm_that_keeps_its_own_timeout_leaves_no_thread_behind() -> None:
    metric = Judging()
    engine = Late("first look at v 3.", 600.0, lambda: LMTimeoutError("no answer within 600 seconds"))
    with dspy.context(lm=engine.lm()):
        stats = simulated(60, metric=metric).async_stats
    assert stats.outcome == "finished"
    assert len(metric.begun) == len(metric.ended) == stats.metric_calls
    assert sum("first look at" in prompt for prompt in engine.asked) == stats.metric_calls + 1, "it is asked again"
