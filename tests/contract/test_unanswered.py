"""One example, or everything, that a provider does not answer: the run goes on, or ends soon, and always ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import LMRateLimitError, LMServerError, LMTimeoutError
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_flashevolve import RunAbortedError, Workflow
from dspy_flashevolve.sim.virtual import run
from tests.broken_server import BrokenServer
from tests.contract.surface import (
    ENDLESS,
    TRAIN,
    VAL,
    check_ends,
    check_winner,
    compiled,
    optimizer,
    problems,
    simulated,
)
from tests.fakes import Chain, digits, fake_lm, hashed, reflection_lm, reply_for


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
        details = simulated(200, Slow()).detailed_results
    stats = details.async_stats
    assert (stats.outcome, stats.unanswered_examples, stats.ended["failed"]) == ("finished", 1, 0)
    assert len(stats.commits) > 2
    places = [place for place, prompt in enumerate(asked) if "\nt 3" in prompt]
    if name in ("500", "no message"):
        assert places[-1] < len(asked) / 2, "it is not asked for any more"
    assert len(places) < 50, "of one rollout's attempts: 429 and 503 say later, for a minute; nobody else waits for it"


def test_an_example_that_another_candidate_was_answered_fails_for_one_candidate_alone() -> None:
    def choose(prompt: str) -> str:
        if "\nv 3" in prompt and "Instruction" in prompt and hashed(prompt) % 2:
            raise LMServerError("500", status=500)
        return answer(prompt)

    with dspy.context(lm=fake_lm(choose)):
        details = simulated(300).detailed_results
    third = [scores[3] for scores in details.val_subscores]
    assert third[0] > 0
    assert min(third) == 0
    assert max(third[1:]) > 0, "others are asked all the same"


# Everything


def gone_after(requests: int, back_after: float = float("inf")) -> tuple[dspy.LM, list[float]]:
    """Answers so many requests; then refuses connections, for so many seconds. The times of the answers."""
    answered: list[float] = []

    def choose(prompt: str) -> str:
        now = asyncio.get_running_loop().time()
        if len(answered) >= requests and now < answered[requests - 1] + back_after:
            raise ConnectionRefusedError("connection refused")
        answered.append(now)
        return answer(prompt)

    return fake_lm(choose), answered


class Said(logging.Handler):
    """Keeps when something was logged, in seconds of the loop."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((asyncio.get_running_loop().time(), record.getMessage()))


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_a_provider_that_is_gone_is_told_at_once_and_given_up_within_a_minute(schedule: Any) -> None:
    (lm, answered), said = gone_after(60), Said()
    log = logging.getLogger("dspy_flashevolve")
    log.addHandler(said)
    try:
        with dspy.context(lm=lm):
            details = simulated(ENDLESS, Slow(), schedule=schedule, reflection_lm=lm).detailed_results
    finally:
        log.removeHandler(said)
    stats = details.async_stats
    assert stats.outcome == "failed"
    assert "has answered nothing for" in stats.stop_reason
    if schedule == "async":
        first = min(seconds for seconds, line in said.lines if "does not answer" in line)
        assert first <= answered[-1] + 1 + 2, "a second of the program, and two"
    assert stats.seconds <= answered[-1] + 1 + 62
    check_winner(details)
    check_ends(stats)


def test_a_seed_that_nobody_answers_ends_the_run_within_a_minute() -> None:
    lm, _ = gone_after(0)
    times: list[float] = []

    class Timed(Chain):
        async def aforward(self, question: str) -> dspy.Prediction:
            times.append(asyncio.get_running_loop().time())
            return await super().aforward(question)

    with dspy.context(lm=lm), pytest.raises(RunAbortedError, match="seed program"):
        simulated(100, Timed())
    assert max(times) < 65


def test_an_outage_that_is_shorter_than_max_outage_seconds_costs_nothing_but_time() -> None:
    lm, _ = gone_after(30, back_after=500)
    with dspy.context(lm=lm):
        details = simulated(150, workflow=Workflow(max_outage_seconds=600)).detailed_results
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
        stats = simulated(ENDLESS, student, max_seconds=20, max_reflection_calls=60).async_stats
    assert stats.outcome == "finished"
    assert stats.seconds < 40


@pytest.mark.parametrize("kind", ["loop", "thread"])
def test_a_training_example_that_is_told_to_wait_for_an_hour_does_not_idle_the_run(kind: str) -> None:
    """Minibatches avoid it meanwhile: else step after step would come to wait for it, until all do."""
    with dspy.context(lm=except_for("t 1", lambda: LMRateLimitError("429", retry_after=3600.0))):
        student = InThread() if kind == "thread" else Chain()
        stats = simulated(ENDLESS, student, max_seconds=20, max_reflection_calls=30).async_stats
    assert stats.reflection_calls >= 30
    assert stats.metric_calls > 100


def test_a_stop_ends_every_wait() -> None:
    """A stopper of the user's, as a first Ctrl-C: what waits is asked for once more, and not for an hour."""

    def stop(state: Any) -> bool:
        return state.total_num_evals > 30

    with dspy.context(lm=told_to_wait(*range(25, ENDLESS // 100))):
        stats = simulated(
            ENDLESS,
            gepa_kwargs={"stop_callbacks": [stop]},
            workflow=Workflow(max_outage_seconds=7200),
            max_seconds=100,
        ).async_stats
    assert stats.seconds < 130


class InThread(dspy.Module):
    """As Chain, but nothing of it is awaited."""

    def __init__(self) -> None:
        super().__init__()
        self.step = dspy.Predict("question -> answer")

    def forward(self, question: str) -> Any:
        return self.step(question=question)


FAULTS: dict[str, Callable[[], Exception]] = ALWAYS | {
    "an hour": lambda: LMRateLimitError("429", retry_after=3600.0),
    "refused": lambda: ConnectionRefusedError("connection refused"),
    "timeout": lambda: LMTimeoutError("no answer"),
}


@settings(max_examples=18)
@given(
    faults=st.lists(
        st.tuples(st.floats(0, 150), st.floats(0.1, 100), st.sampled_from(list(FAULTS)), st.floats(0.1, 1)), max_size=5
    ),
    kind=st.sampled_from(["async", "sync", "mixed"]),
    slots=st.sampled_from([1, 3, 8]),
    more=st.sampled_from([{}, {"schedule": "lockstep"}, {"max_seconds": 60}, {"rollout_timeout_seconds": 5.0}]),
)
def test_no_schedule_of_faults_leaves_a_run_that_waits_for_nothing(
    faults: list[tuple[float, float, str, float]], kind: str, slots: int, more: dict[str, Any]
) -> None:
    """Faults of a share of the requests, from a time on, for a time; a metric that asks a judge in a thread."""
    asked = 0

    def choose(prompt: str) -> str:
        nonlocal asked
        asked += 1
        now = LOOP[0].time()
        for begin, length, name, share in faults:
            if begin <= now < begin + length and hashed(asked, name) % 1000 < 1000 * share:
                raise FAULTS[name]()
        return answer(prompt)

    lm = fake_lm(choose)

    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        if kind == "mixed" and pred_name is None:
            dspy.settings.lm(f"Is {pred.answer} right?")
        return digits(gold, pred)

    one = optimizer(80, metric=metric, num_threads=slots, reflection_lm=lm, **more)

    async def compile_it() -> Any:
        LOOP[:] = [asyncio.get_running_loop()]
        with dspy.context(lm=lm):
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


LOOP: list[Any] = []


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


def dripping_first() -> Callable[[str], str]:
    """A byte now and then resets the LM's timeout: the whole of the first reply would take half a minute."""
    asked: list[str] = []

    def choose(prompt: str) -> str:
        asked.append(prompt)
        return "drip" if len(asked) == 1 else reply_for("JSON", new_instruction=f"Look {len(asked)}", answer="3")

    return choose


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_a_reflection_that_drips_is_given_up_and_asked_again(schedule: str) -> None:
    with BrokenServer(dripping_first()) as server:
        stats = compiled(60, reflection_lm=server.lm("chosen", timeout=3.0), schedule=schedule).async_stats
    assert stats.retried_requests >= 1
    assert stats.ended["failed"] == 0
    assert stats.proposals > 0


@pytest.mark.parametrize("program", [Chain, InThread])
def test_a_rollout_that_drips_in_lockstep_is_given_up_and_asked_again(program: Any) -> None:
    with BrokenServer(dripping_first()) as server, dspy.context(lm=server.lm("chosen", timeout=3.0)):
        details = compiled(30, program(), metric=lambda *_: 0.5, schedule="lockstep").detailed_results
    assert details.async_stats.retried_requests >= 1
    assert list(details.val_subscores[0].values()) == [0.5] * len(VAL)


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

    with BrokenServer(choose) as server, dspy.context(lm=server.lm("chosen", timeout=3.0)):
        stats = compiled(30, metric=metric).async_stats
    assert (stats.outcome, stats.ended["failed"]) == ("finished", 0)
    assert len(judged) == stats.metric_calls + 1
