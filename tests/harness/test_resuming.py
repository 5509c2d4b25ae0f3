"""A search with `log_dir` goes on where it was interrupted: by an error, a limit, or `kill -9` at random moments."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import LMAuthError

from dspy_flashevolve import AsyncMetaHarness, RunAbortedError
from dspy_flashevolve.engine import RunDirectoryError
from dspy_flashevolve.engine.check import check
from dspy_flashevolve.engine.store import FILE
from dspy_flashevolve.harness.archive import context_tokens
from dspy_flashevolve.sandbox.contract import Failure, Job, Outcome, SandboxError
from tests.contract.surface import sql
from tests.fakes import fake_lm
from tests.harness.child import SLOTS, TRAIN, VAL, Learner, answers, proposes, run
from tests.killing import killed_after

SPAN_SECONDS = 0.3
"""Longest time from the first metric call of a process to its end."""


def lines(directory: Path, name: str) -> list[str]:
    """What was counted outside of the search: "scored", "learnt" or "proposed"."""
    path = directory / f"{name}.txt"
    return path.read_text().splitlines() if path.exists() else []


def rows(directory: Path, query: str) -> list[Any]:
    return sql(directory / "run", query)


def results_of(program: Any) -> list[Any]:
    """The archive, without what time makes of it."""
    details = program.detailed_results
    return [
        *(
            (candidate.draft, candidate.scores, candidate.costs, candidate.failures, candidate.memory)
            for candidate in details.candidates
        ),
        *((candidate.draft, candidate.failure) for candidate in details.failed),
        *([trial.outcome.fields, trial.score] for candidate in details.candidates for trial in candidate.traces),
        details.front,
    ]


class Ends:
    """Answers until the call with this number, and then rejects the key; a named fake."""

    def __init__(self, answer: Any, calls: int) -> None:
        self._answer, self._calls = answer, calls

    def __call__(self, prompt: str) -> str:
        self._calls -= 1
        if self._calls < 0:
            raise LMAuthError("the key is rejected")
        return self._answer(prompt)


def nothing_is_asked(prompt: str) -> str:
    raise LMAuthError(f"asked for something: {prompt[:100]}")


@pytest.mark.parametrize("kind", ["lockstep", "async"])
def test_a_finished_search_that_is_taken_up_again_has_the_same_archive_for_nothing(tmp_path: Path, kind: str) -> None:
    first = run(tmp_path, kind, 3)
    asked = len(lines(tmp_path, "scored"))
    nobody = fake_lm(nothing_is_asked)
    again = run(tmp_path, kind, 3, proposer_lm=nobody, lm=nobody)
    assert again.detailed_results.candidates == first.detailed_results.candidates
    assert again.detailed_results.failed == first.detailed_results.failed
    assert again.module_src == first.module_src
    assert again.memory == first.memory
    assert len(lines(tmp_path, "scored")) == asked
    more = run(tmp_path, kind, 4).detailed_results
    assert more.candidates[: len(first.detailed_results.candidates)] == first.detailed_results.candidates
    assert len(more.candidates) + len(more.failed) == 2 + found_so_far(first)


def found_so_far(program: Any) -> int:
    return len(program.detailed_results.candidates) + len(program.detailed_results.failed)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A search in lockstep, in one slot, that nothing interrupts."""
    directory = tmp_path_factory.mktemp("whole")
    return directory, run(directory, "lockstep", 3, num_threads=1)


@pytest.mark.parametrize("calls", [3, 14, 70])
def test_a_search_that_an_error_ended_goes_on_as_if_it_had_not_been(
    tmp_path: Path, calls: int, uninterrupted: tuple[Path, Any]
) -> None:
    """In lockstep, in one slot: it is ended in the student's check, in learning, in evaluations."""
    directory, whole = uninterrupted
    with pytest.raises(RunAbortedError):
        run(tmp_path, "lockstep", 3, num_threads=1, lm=fake_lm(Ends(answers, calls)))
    assert results_of(run(tmp_path, "lockstep", 3, num_threads=1)) == results_of(whole)
    for name in ("scored", "learnt", "proposed"):
        assert lines(tmp_path, name) == lines(directory, name)
    assert check(tmp_path / "run").problems == []


def test_a_proposer_that_was_interrupted_is_asked_again_in_its_direction(tmp_path: Path) -> None:
    def log(name: str, entry: object) -> None:
        pass

    directions = ["red", "green", "blue"]
    proposer = fake_lm(Ends(lambda prompt: proposes(log, prompt), 3))
    with pytest.raises(RunAbortedError):
        run(tmp_path, "lockstep", 3, proposer_lm=proposer, directions=directions)
    assert rows(tmp_path, "SELECT COUNT(*) FROM steps") == [(3,)]
    details = run(tmp_path, "lockstep", 3, directions=directions).detailed_results
    written = [candidate.draft for candidate in (*details.candidates[1:], *details.failed)]
    assert {draft.direction for draft in written} == set(directions)
    assert details.stats.steps == 2


@pytest.mark.long
def test_of_a_step_that_was_interrupted_at_its_admission_the_rest_is_admitted(tmp_path: Path) -> None:
    whole = results_of(run(tmp_path, "lockstep", 8))
    scored = lines(tmp_path, "scored")
    step, last = rows(
        tmp_path, "SELECT step, MAX(candidate_index) FROM commits GROUP BY step HAVING COUNT(*) = 2 ORDER BY step"
    )[-1]
    with closing(sqlite3.connect(tmp_path / "run" / FILE)) as connection:
        connection.execute("DELETE FROM commits WHERE candidate_index >= ?", (last,))
        connection.execute("DELETE FROM ends WHERE step >= ?", (step,))
        connection.execute("DELETE FROM state WHERE json_extract(value, '$.step') >= ?", (step,))
        connection.commit()
    nobody = fake_lm(nothing_is_asked)
    assert results_of(run(tmp_path, "lockstep", 8, proposer_lm=nobody, lm=nobody)) == whole
    assert lines(tmp_path, "scored") == scored
    assert check(tmp_path / "run").problems == []


class Broken(Learner):
    """A sandbox that fails, or in which no student runs."""

    def __init__(self, failure: Failure | None) -> None:
        super().__init__(lambda name, entry: None)
        self._failure = failure

    async def run(self, job: Job, call_lm: Any) -> Outcome:
        if self._failure is None:
            raise SandboxError("no process can be made")
        return Outcome({}, failure=self._failure)


def test_a_student_that_could_not_be_evaluated_is_evaluated_when_the_search_goes_on(tmp_path: Path) -> None:
    with pytest.raises(RunAbortedError, match="the student could not be evaluated: the sandbox failed"):
        run(tmp_path, "async", 2, sandbox=Broken(None))
    assert found_so_far(run(tmp_path, "async", 2)) == 5


def constant_metric(gold: Any, pred: Any, trace: Any = None) -> float:
    return 0.5


def constant_cost(outcome: Outcome) -> float:
    return 1.0


def test_a_directory_of_another_search_is_refused_and_the_error_says_what_differs(tmp_path: Path) -> None:
    def compiled(
        student: Any = None,
        train: Any = TRAIN,
        val: Any = VAL,
        metric: Any = constant_metric,
        cost: Any = context_tokens,
    ) -> None:
        nobody, sandbox = fake_lm(nothing_is_asked), Learner(lambda name, entry: None)
        with dspy.context(lm=nobody):
            AsyncMetaHarness(metric, proposer_lm=nobody, log_dir=tmp_path / "run", cost=cost, sandbox=sandbox).compile(
                student or dspy.Predict("question -> answer"), trainset=train, valset=val
            )

    run(tmp_path, "async", 1, metric=constant_metric)
    for arguments, message in (
        ({"student": dspy.ChainOfThought("question -> answer")}, "seed text of 'source' has changed"),
        ({"student": dspy.Predict("question -> answer: int")}, "predictor 'self' has changed"),
        ({"train": TRAIN[1:]}, "trainset was 7 examples, .* is 6 examples"),
        ({"val": VAL[1:]}, "valset was 8 examples, .* is 7 examples"),
        ({"metric": answers}, "metric was constant_metric, is answers"),
        ({"cost": constant_cost}, "cost has changed"),
    ):
        with pytest.raises(RunDirectoryError, match=message):
            compiled(**arguments)
    with pytest.raises(RunAbortedError):
        compiled()  # it is free for what it was begun with


# Killed.


def archive_of(directory: Path) -> list[str]:
    """Candidates and failures, as the journal has them."""
    query = "SELECT more FROM commits ORDER BY candidate_index"
    failed = "SELECT value FROM state WHERE name LIKE 'failed%' ORDER BY name"
    return [text for (text,) in (*rows(directory, query), *rows(directory, failed))]


def survives(directory: Path, kind: str, iterations: int, kills: int, seed: int) -> Iterator[str]:
    """Kill and go on; yields what is wrong."""
    module, rng = ("tests.harness.child", directory, kind, iterations), random.Random(seed)

    def scored() -> int:
        return len(lines(directory, "scored"))

    archive: list[str] = []
    done = 0
    while done < kills and killed_after(rng.random() * SPAN_SECONDS, scored, *module):
        done += 1
        if not set(archive) <= set(archive_of(directory)):
            yield f"kill {done} lost a candidate"
        archive = archive_of(directory)
        yield from (f"kill {done}: {problem}" for problem in check(directory / "run").problems)
    if done < kills:
        yield f"the search was killed {done} times only: it is too short"
    program = run(directory, kind, iterations)
    details = program.detailed_results
    if not set(archive) <= set(archive_of(directory)):
        yield "the end lost a candidate"
    yield from check(directory / "run").problems
    if rows(directory, "SELECT COUNT(*) FROM steps WHERE number NOT IN (SELECT step FROM ends)") != [(0,)]:
        yield "steps have no end"
    if len(archive_of(directory)) != found_so_far(program):
        yield f"the archive has {found_so_far(program)} candidates, the journal {len(archive_of(directory))}"
    yield from paid_twice(
        directory, done, sum("on validation" in candidate.failure.message for candidate in details.failed)
    )
    if kind == "lockstep" and results_of(program) != results_of(run(directory / "whole", kind, iterations)):
        yield "the archive is not that of a search which was not interrupted"
    written = sorted((directory / "run" / "candidates").glob("*/source.py"))
    if [path.read_text() for path in written] != [candidate.draft.source for candidate in details.candidates]:
        yield "the files are not those of the archive"


def paid_twice(directory: Path, kills: int, hopeless: int) -> Iterator[str]:
    """What was counted outside, against what the journal has: more of it only where it was under way."""
    calls = len(lines(directory, "scored"))
    [(kept,)] = rows(directory, "SELECT COUNT(*) FROM rollouts WHERE json_extract(output, '$.outcome.failure') IS NULL")
    [(spent,)] = rows(directory, "SELECT SUM(calls) FROM calls")
    if not kept <= calls <= spent:
        yield f"{calls} metric calls were made, {spent} are counted, {kept} are kept"
    if calls - kept > SLOTS * (kills + hopeless):
        yield f"{calls - kept} metric calls were lost in {kills} kills"
    twice = rows(
        directory,
        "SELECT step, split, example FROM rollouts GROUP BY step, candidate, split, example HAVING COUNT(*) > 1",
    )
    if twice:
        yield f"paid twice: {twice}"
    for name, stage, position, live in (
        ("proposed", "propose", "0", 2), ("learnt", "evaluate", "learn %", 12),
    ):  # fmt: skip
        [(kept,)] = rows(
            directory, f"SELECT COUNT(*) FROM replies WHERE stage = '{stage}' AND position LIKE '{position}'"
        )
        [(different,)] = rows(
            directory, f"SELECT COUNT(DISTINCT step || ' ' || position) FROM replies WHERE stage = '{stage}'"
        )
        if kept != different:
            yield f"{name} twice: {kept} replies, {different} of them different"
        if not kept <= len(lines(directory, name)) <= kept + kills * live:
            yield f"{name} {len(lines(directory, name))} times, {kept} of them kept"


@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_killed_search_goes_on_and_loses_nothing_and_pays_nothing_twice(tmp_path: Path, kills: int) -> None:
    assert list(survives(tmp_path, "async", iterations=4 * kills, kills=kills, seed=1)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["async", "lockstep"])
def test_thirty_kills_lose_nothing_and_pay_nothing_twice(tmp_path: Path, kind: str) -> None:
    assert list(survives(tmp_path, kind, iterations=100, kills=30, seed=30)) == []
