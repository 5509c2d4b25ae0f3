"""Resume as replay: what was paid for a step that had no end is answered, everything else is paid anew."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspy_flashevolve.engine.check import check
from dspy_flashevolve.engine.events import RequestFinished, StepClosed
from dspy_flashevolve.engine.redaction import REDACTED, Redaction
from dspy_flashevolve.engine.requests import (
    Call,
    RequestCost,
    Rollout,
    RolloutCall,
    RolloutKey,
    gather,
    record_metric_call,
)
from dspy_flashevolve.engine.run import EvolutionRun, RunLimits
from dspy_flashevolve.engine.steps import End, EndKind, LiveSteps, NothingToDoError, Step
from dspy_flashevolve.engine.store import Store, hash_of
from dspy_flashevolve.sim.virtual import run as in_virtual_time

KEY = RolloutKey(hash_of({"p": "text"}), "train", 3)


class Kept:
    """A rollout as the journal has it: only its score."""

    def __init__(self, traced: bool = True) -> None:
        self.traced = traced

    def write(self, rollout: Rollout) -> tuple[str, str | None]:
        return json.dumps(rollout.output), "trace" if self.traced else None

    def read(self, row: Any) -> Rollout | None:
        return Rollout(json.loads(row["output"]), row["score"])


class Words:
    """A reply as text."""

    def __init__(self, position: str) -> None:
        self.position = position

    def write(self, answer: str) -> str | None:
        return answer or None

    def read(self, text: str) -> str | None:
        return text


def session(directory: Path, *secrets: str) -> Store:
    store = Store(directory, Redaction(secrets))
    store.append(
        "sessions", id=store.session, began_at=0.0, pid=1, fingerprints={},
        settings={"max_metric_calls": 10**6, "schedule": "async"},
    )  # fmt: skip
    return store


def write(store: Store, step: int, score: float = 0.5, key: RolloutKey = KEY, trace: str | None = "t") -> None:
    store.record_rollout(
        key, "rollout", step, Rollout("out", score), ('"out"', trace), 1.0, store.record_call("r", step)
    )


def closed(store: Store) -> None:
    store.record_session_end("aborted", "")


def found(store: Store, step: int, key: RolloutKey = KEY) -> float | None:
    rollout = store.find_rollout(key, step, Kept().read)
    return None if rollout is None else rollout.score


def test_a_rollout_that_was_paid_answers_only_steps_that_run_again(tmp_path: Path) -> None:
    store = session(tmp_path)
    store.record_selection(0, 0, None)
    store.record_selection(1, 0, None)
    write(store, 0)
    write(store, 1, 0.9, RolloutKey(KEY.candidate, "train", 4))
    store.record_end(1, "rejected", "")
    assert found(store, 0) is None, "nothing is taken up"
    closed(store)
    store = session(tmp_path)
    store.load_unfinished()
    assert found(store, 0) == 0.5
    assert found(store, 0, RolloutKey(KEY.candidate, "train", 4)) is None, "of a step that has ended"
    assert found(store, 0, RolloutKey(KEY.candidate, "val", 3)) is None
    assert found(store, 0, RolloutKey(KEY.candidate, "train", 3, traced=False)) is None
    assert found(store, 7) is None, "a new step pays"
    assert (store.spent, store.paid[0], store.paid[1]) == (2, 1, 0)
    closed(store)


def test_requests_and_dollars_of_a_session_that_was_killed_count_to_the_last_one(tmp_path: Path) -> None:
    """Also those whose answer was of no use, after the last end of a step, and all of earlier sessions; a rollout that
    was given up costs dollars, but is no request of a reflection."""
    for before in (0, 1):
        store = session(tmp_path)
        assert (store.requests_before, store.dollars_before) == (3 * before, pytest.approx(0.875 * before))
        store(RequestFinished(1.0, 0, "propose", 1.0, 10, 0.25))
        store.record_reply(0, "propose", "0", "an answer", 10, 0.25)
        store(StepClosed(2.0, 2 * before, End(EndKind.REJECTED, ""), 0))
        store(RequestFinished(3.0, 1, "propose", 1.0, 10, 0.125, error="unreadable"))
        store(RequestFinished(4.0, 1, "integrate", 1.0, 10, 0.125))
        store(RequestFinished(5.0, 1, "rollout", 1.0, 10, 0.125, error="given up"))
        store.record_rollout(KEY, "rollout", 1, Rollout("out", 0.5, cost_dollars=0.25), ("", None), 1.0, 1)
        store.close()  # no end of the session is written
    killed = session(tmp_path)
    assert (killed.requests_before, killed.dollars_before) == (6, pytest.approx(1.75))
    killed.close()


def test_a_step_whose_texts_had_a_secret_taken_out_fails_and_runs_no_more(tmp_path: Path) -> None:
    store = session(tmp_path, "swordfish-42")
    name = store.record_candidate({"p": "say swordfish-42"})
    store.record_selection(0, 0, {"candidate": name})
    store.record_selection(1, 0, {"question": "is it swordfish-42?"})
    store.record_selection(2, 0, {})
    store.record_reply(2, "propose", "0", "swordfish-42", 0, 0.0)
    store.record_reply(2, "propose", "1", "a plain word", 0, 0.0)
    closed(store)
    store = session(tmp_path)
    assert [one.number for one in store.load_unfinished()] == [2]
    assert REDACTED in store.texts[name]["p"]
    assert (store.find_reply(2, "propose", "0"), store.find_reply(2, "propose", "1")) == (None, "a plain word")
    closed(store)
    store = session(tmp_path)
    assert {row["step"]: row["way"] for row in store.rows("SELECT * FROM ends")} == dict.fromkeys((0, 1), "failed")
    closed(store)


# Whole runs


class Loop:
    """Steps of two evaluations and a question; counts what is paid. Killed at a moment, it goes on."""

    def __init__(self, directory: Path, seed: int, paid: Counter[Any], steps: int = 12, selects: bool = True) -> None:
        self.seed, self.paid, self.steps, self.selects = seed, paid, steps, selects
        self.run = EvolutionRun(
            name="a loop",
            stages={"rollout": ["e"], "propose": ["e"]},
            slots=3,
            store=session(directory),
            limits=RunLimits(seed=seed),
        )

    async def step(self, step: Step) -> End:
        if step.number >= self.steps:
            raise NothingToDoError
        rng, run = random.Random(f"{self.seed}/{step.number}"), self.run
        self.run.begin(step, 0, 0.0, {"texts": f"text {step.number}"} if self.selects else None)
        if step.recorded is not None:
            assert step.recorded == {"texts": f"text {step.number}"}

        async def one(text: str, example: int) -> float:
            async def call() -> Rollout:
                await anyio.sleep(1.0 + rng.random())
                await record_metric_call()
                await anyio.sleep(0.1)
                self.paid["rollout", step.number, text, example] += 1
                return Rollout(f"{text} {example}", example / 10)

            key = RolloutKey(hash_of({"p": text}), "train", example)
            rollout = await run.requests.answer(
                RolloutCall(
                    key=key, stage="rollout", step=step, reservation=step.reservation, make=call, written=Kept()
                )
            )
            assert rollout.output == f"{text} {example}"
            return rollout.score

        async def ask() -> str:
            await anyio.sleep(2.0)
            self.paid["ask", step.number] += 1
            return f"child of {step.number}"

        await gather([lambda e=example: one(f"parent of {step.number}", e) for example in range(3)])
        child = await run.requests.answer(
            Call(stage="propose", step=step, make=ask, cost_of=lambda _: RequestCost(1, 0.5), record=Words("0"))
        )
        await gather([lambda e=example: one(child, e) for example in range(3)])
        return End(EndKind.COMMITTED)

    def play(self, seconds: float) -> None:
        async def main() -> None:
            store = self.run.store
            store.load_unfinished()
            with anyio.move_on_after(seconds):
                await self.run.evolve(self.step, LiveSteps(4), calls_per_step=6, first_number=store.last_step + 1)

        in_virtual_time(lambda: self.run.run_async(main))


@pytest.mark.long
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**16), st.lists(st.floats(0, 30), max_size=4), st.booleans())
def test_however_often_it_is_interrupted_nothing_that_was_paid_is_paid_again_and_every_step_ends_once(
    tmp_path_factory: pytest.TempPathFactory, seed: int, interruptions: list[float], selects: bool
) -> None:
    directory, paid = tmp_path_factory.mktemp("run"), Counter[Any]()
    for seconds in (*interruptions, 10_000.0):
        Loop(directory, seed, paid, selects=selects).play(seconds)
    assert set(paid.values()) == {1}
    assert len(paid) == 12 * 7
    store = Store(directory)
    ends = [row["step"] for row in store.rows("SELECT step FROM ends ORDER BY step")]
    spent = store.rows("SELECT SUM(calls) AS spent FROM calls")[0]["spent"]
    store.close()
    assert ends == list(range(12))
    assert 72 <= spent <= 72 + 3 * len(interruptions), "a metric that had begun when it was interrupted counts"
    assert check(directory).problems == []
