"""AsyncACE with a log_dir: stopped, refused, aborted or killed, it goes on; nothing is lost, applied or paid twice."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import LMAuthError

from dspy_flashevolve import AsyncACE, ConfigurationError, Playbook, RunAbortedError
from dspy_flashevolve.engine.check import check
from dspy_flashevolve.engine.errors import RunDirectoryError
from dspy_flashevolve.engine.store import FILE
from tests.ace.child import SLOTS, VAL, SlowChain, facts, replies, run
from tests.contract.surface import sql
from tests.fakes import digits, examples, fake_lm
from tests.killing import calls_made, killed_after

TRAIN = examples("t", 10)
SPAN_SECONDS = 0.35
"""Longest time from the first metric call of a process to its end."""


def rows(directory: Path, query: str) -> list[Any]:
    return sql(directory / "run", query)


def wrongs(directory: Path) -> Iterator[str]:
    """What the journal says that must not be; tags are only counted where each operation adds a bullet."""
    yield from check(directory / "run").problems
    [(twice,)] = rows(directory, "SELECT COUNT(*) - COUNT(DISTINCT candidate || split || example) FROM rollouts")
    if twice:
        yield f"{twice} rollouts were paid twice"
    for (text,) in rows(directory, "SELECT value FROM state WHERE name = 'playbook'"):
        kept = json.loads(text)
        book, counts = Playbook.from_dict(kept["playbook"]), kept["counts"]
        tagged = sum(bullet.helpful + bullet.harmful for bullet in book.bullets)
        is_mixed = "said already" in counts["problems"] or "remove" in counts["operations"] or counts["rolled_back"]
        if not is_mixed and tagged != sum(counts["tags"].values()):
            yield f"the bullets have {tagged} tags, {counts['tags']} were counted"
        [(ended,)] = rows(directory, "SELECT COUNT(*) FROM ends WHERE way IN ('committed', 'rejected')")
        if not counts["samples"] - len(kept["applied"]) <= ended <= counts["samples"]:
            yield f"{counts['samples']} samples were applied, {ended} have ended so"


# In this process


class Refusing:
    """Answers, but refuses the key from a given call on; a named fake."""

    def __init__(self, at: int | None, reply: Callable[[str], str]) -> None:
        self.calls, self._at, self._reply = 0, at, reply

    def __call__(self, prompt: str) -> str:
        self.calls += 1
        if self._at is not None and self.calls >= self._at:
            raise LMAuthError("the key is rejected", model="fake/model", provider="fake")
        return self._reply(prompt)


def compiled(log_dir: Path | None, at: int | None = None, metric: Any = digits, **options: Any) -> tuple[Any, Refusing]:
    reply = options.pop("reply", partial(replies, mixed=options.get("schedule") == "lockstep"))
    answer = Refusing(at, reply)
    settings = {"max_rounds": 2, "eval_every": 5, "num_threads": 8, "token_budget": 10**6, **options}
    student, trainset = settings.pop("student", None) or SlowChain(), settings.pop("trainset", TRAIN)
    with dspy.context(lm=fake_lm(answer)):
        optimizer = AsyncACE(metric, log_dir=log_dir, **settings)
        return optimizer.compile(student, trainset=trainset, valset=VAL), answer


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[Any, Refusing]:
    """A run in lockstep that nothing interrupts."""
    return compiled(None, schedule="lockstep")


@pytest.mark.parametrize("at", [1, 12, 40])
def test_lockstep_aborted_anywhere_goes_on_as_if_it_had_not_been(
    tmp_path: Path, at: int, uninterrupted: tuple[Any, Refusing]
) -> None:
    whole, asked = uninterrupted
    with pytest.raises(RunAbortedError):
        compiled(tmp_path / "run", at, schedule="lockstep")
    program, again = compiled(tmp_path / "run", schedule="lockstep")
    assert facts(program) == facts(whole)
    assert program.async_stats.metric_calls == whole.async_stats.metric_calls
    assert again.calls <= asked.calls - (at - 1) + SLOTS, "what was answered is not asked again"
    assert list(wrongs(tmp_path)) == []


def test_aborted_samples_run_again_with_what_was_paid_for_them(tmp_path: Path) -> None:
    for at in (15, 20):
        with pytest.raises(RunAbortedError):
            compiled(tmp_path / "run", at)
        assert list(wrongs(tmp_path)) == []
    program, _ = compiled(tmp_path / "run")
    stats = program.async_stats
    assert stats.samples == stats.operations["add"] == len(TRAIN)
    assert "said already" not in stats.problems
    assert list(wrongs(tmp_path)) == []


def test_a_run_that_is_over_pays_nothing_more_and_goes_on_with_more_epochs(tmp_path: Path) -> None:
    first, _ = compiled(tmp_path / "run")
    again, asked = compiled(tmp_path / "run")
    assert facts(again) == facts(first)
    assert asked.calls == 0
    more, asked = compiled(tmp_path / "run", epochs=2)
    assert (first.async_stats.samples, more.async_stats.samples) == (10, 20)
    assert asked.calls > 0
    assert [snapshot.version for snapshot in more.async_stats.snapshots][: len(first.async_stats.snapshots)] == [
        snapshot.version for snapshot in first.async_stats.snapshots
    ]


def test_a_run_at_the_end_of_its_budget_goes_on_with_a_larger_one(tmp_path: Path) -> None:
    small, _ = compiled(tmp_path / "run", max_metric_calls=25)
    assert small.async_stats.metric_calls <= 25
    larger, _ = compiled(tmp_path / "run", max_metric_calls=50)
    assert small.async_stats.metric_calls < larger.async_stats.metric_calls <= 50
    assert larger.async_stats.samples > small.async_stats.samples
    assert list(wrongs(tmp_path)) == []


def test_a_playbook_in_which_a_secret_was_written_goes_on_without_it(tmp_path: Path) -> None:
    def answer(prompt: str) -> str:
        return replies(prompt).replace("Insight ", "Use key sk-abcdefgh12345678ijkl ")

    for epochs in (1, 2):
        with dspy.context(lm=fake_lm(answer)):
            optimizer = AsyncACE(digits, log_dir=tmp_path / "run", epochs=epochs, num_threads=4, max_rounds=1)
            program: Any = optimizer.compile(SlowChain(), trainset=TRAIN, valset=VAL)
        assert program.async_stats.samples == len(TRAIN) * epochs
    assert b"sk-abcdefgh12345678ijkl" not in (tmp_path / "run" / FILE).read_bytes()


class Other(SlowChain):
    """Another program."""


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"student": Other()}, "program was SlowChain, is Other"),
        ({"trainset": examples("x", 24)}, "trainset was 10 examples"),
        ({"metric": lambda gold, pred: 0.5}, "metric was digits"),
        ({"seed": 7}, "seed has changed"),
        ({"schedule": "lockstep", "num_threads": None}, r"order of the samples \(by schedule\) has changed"),
        ({"playbook": Playbook().adding("other", "x")}, "seed text of .* has changed"),
    ],
)
def test_another_run_is_refused_by_name_before_anything_is_paid(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    compiled(tmp_path, max_seconds=0.05)
    playbook = change.pop("playbook", None)
    if playbook is None:
        with pytest.raises(RunDirectoryError, match=named):
            compiled(tmp_path, **change)
        return
    with dspy.context(lm=fake_lm(replies)), pytest.raises(RunDirectoryError, match=named):
        AsyncACE(digits, log_dir=tmp_path).compile(SlowChain(), trainset=TRAIN, valset=VAL, playbook=playbook)


def test_a_stream_is_not_resumed_and_a_log_dir_for_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="a stream cannot be read again"):
        AsyncACE(digits, log_dir=tmp_path).adapt(SlowChain(), TRAIN)


# kill -9


def survives(directory: Path, schedule: str, samples: int, kills: int, seed: int) -> Iterator[str]:
    """Kill and go on; yields what is wrong."""
    rng, done, applied, scored = random.Random(seed), 0, 0, 0
    module = "tests.ace.child", directory, schedule, samples
    for _ in range(kills):
        if not killed_after(rng.random() * SPAN_SECONDS, partial(calls_made, directory), *module):
            break
        done += 1
        yield from (f"kill {done}: {problem}" for problem in wrongs(directory))
        [(ended,)] = rows(directory, "SELECT COUNT(*) FROM ends WHERE way IN ('committed', 'rejected')")
        [(snapshots,)] = rows(directory, "SELECT COUNT(*) FROM commits")
        if ended < applied or snapshots < scored:
            yield f"kill {done} lost what had been applied or scored"
        applied, scored = ended, snapshots
    program = run(directory, schedule, samples)
    result = json.loads(json.dumps({**facts(program), "calls": program.async_stats.metric_calls}))
    yield from wrongs(directory)
    if result["samples"] != samples:
        yield f"{result['samples']} samples were applied, {samples} there were"
    changes = {"add": samples}, samples + result["rolled_back"]
    if schedule != "lockstep" and (result["operations"], result["version"]) != changes:
        yield f"each sample adds one bullet: {result['operations']}, {result['problems']}, {result['additions']}"
    [(spent,)] = rows(directory, "SELECT SUM(calls) FROM calls")
    [(kept,)] = rows(directory, "SELECT COUNT(*) FROM rollouts")
    if not kept <= calls_made(directory) <= spent == result["calls"] or spent - kept > done * SLOTS:
        yield f"{calls_made(directory)} made, {kept} of use, {spent} counted, {result['calls']} told, {done} kills"
    [(unfinished,)] = rows(directory, "SELECT COUNT(*) FROM steps WHERE number NOT IN (SELECT step FROM ends)")
    if unfinished:
        yield f"{unfinished} steps have no end"
    if schedule == "lockstep":
        (whole := directory / "whole").mkdir()
        never = json.loads(json.dumps(facts(run(whole, schedule, samples, log_dir=None))))
        if never != {name: value for name, value in result.items() if name != "calls"}:
            yield "it came to something else than a run that was never killed"
    if done < min(kills, 2):
        yield f"the run was killed {done} times only: the test says nothing"


@pytest.mark.parametrize(
    ("schedule", "kills"),
    [
        ("async", 1),
        pytest.param("async", 2, marks=pytest.mark.long),
        pytest.param("lockstep", 1, marks=pytest.mark.long),
    ],
)
def test_a_killed_run_goes_on_and_applies_every_sample_once_and_pays_nothing_twice(
    tmp_path: Path, schedule: str, kills: int
) -> None:
    assert list(survives(tmp_path, schedule, samples=24, kills=kills, seed=1)) == []


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_thirty_kills_apply_every_sample_once_and_pay_nothing_twice(tmp_path: Path, schedule: str) -> None:
    assert list(survives(tmp_path, schedule, samples=250, kills=30, seed=30)) == []
