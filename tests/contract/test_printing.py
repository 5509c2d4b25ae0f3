"""What a run prints when nobody has asked for more or less: no more than dspy.GEPA, and how it ended."""

from __future__ import annotations

import functools
import itertools
import logging
import re
import threading
from typing import Any

import dspy
import pytest

from dspy_flashevolve import AsyncGEPA
from tests.contract.surface import TRAIN, VAL, compiled, listening, simulated
from tests.fakes import Chain, digits, fake_lm, reflection_lm, task_lm


class Shown:
    """Keeps what reaches the console: of dspy from INFO on, of others from WARNING on."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def hear(self, record: logging.LogRecord) -> None:
        if record.levelno >= (logging.INFO if record.name.startswith("dspy.") else logging.WARNING):
            self.lines.append(record.getMessage())


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(logging.getLogger("dspy"), "level", logging.INFO)  # as dspy sets it
    console = Shown()
    with listening(console.hear, "dspy", "dspy_flashevolve"):
        yield console


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("compile_ours", [compiled, simulated], ids=["in real time", "in virtual time"])
def test_at_equal_metric_calls_a_run_prints_no_more_than_dspy_gepa(
    shown: Shown, capsys: pytest.CaptureFixture[str], compile_ours: Any, seed: int
) -> None:
    with dspy.context(lm=task_lm()):
        theirs = dspy.GEPA(digits, max_metric_calls=50, num_threads=4, reflection_lm=reflection_lm(), seed=seed)
        theirs.compile(Chain(), trainset=TRAIN, valset=VAL)
        printed, lines = capsys.readouterr(), shown.lines
        shown.lines = []
        compile_ours(50, seed=seed)
    ours = capsys.readouterr()
    assert ours.out == ""
    assert len(ours.out + ours.err) < len(printed.out + printed.err)
    assert len("\n".join(shown.lines)) <= len("\n".join(lines))


def test_the_bars_of_all_runs_share_one_thread() -> None:
    before = {one for one in threading.enumerate() if one.name == "tqdm_monitor"}
    for _ in range(3):
        compiled(12)
    assert len({one for one in threading.enumerate() if one.name == "tqdm_monitor"} - before) <= 1


LINE = re.compile(r"Iteration (\d+): ")
SCORES = {
    "selected": re.compile(r"Iteration (\d+): Selected program (\d+) score: ([\d.]+)$"),
    "rejected": re.compile(
        r"Iteration (\d+): New subsample score ([\d.]+) is not better than old score ([\d.]+), skip"
    ),
    "best": re.compile(r"Iteration (\d+): Best score on valset: ([\d.]+)$"),
}
"""What people read out of the log of dspy.GEPA."""


@functools.cache
def lines_of(kind: Any, **options: Any) -> list[str]:
    """The lines of iterations that a run logs, which is made once."""
    console, name = Shown(), "dspy.teleprompt.gepa.gepa"
    logging.getLogger(name).setLevel(logging.INFO)
    settings: dict[str, Any] = {"max_metric_calls": 100, "num_threads": 4, "reflection_lm": reflection_lm()}
    with listening(console.hear, name), dspy.context(lm=task_lm()):
        kind(digits, **settings, **options).compile(Chain(2), trainset=TRAIN, valset=VAL)
    return [line for line in console.lines if LINE.match(line)]


def test_lockstep_logs_the_lines_of_dspy_gepa() -> None:
    theirs, ours = lines_of(dspy.GEPA), lines_of(AsyncGEPA, schedule="lockstep")
    assert ours == theirs
    assert any("Accepted candidate" in line for line in theirs)
    assert any("skipping" in line for line in theirs)


@pytest.mark.long
def test_what_people_read_out_of_the_log_of_dspy_gepa_is_there_in_the_log_of_a_run_that_overlaps() -> None:
    theirs, ours = lines_of(dspy.GEPA), lines_of(AsyncGEPA)
    for name, pattern in SCORES.items():
        assert any(map(pattern.match, theirs)), name
        assert any(map(pattern.match, ours)), name
    assert ours[0].startswith("Iteration 0: Base program full valset score: ")
    best = [float(found[2]) for line in ours if (found := SCORES["best"].match(line))]
    assert best == sorted(best)


def test_the_lines_of_an_iteration_that_overlaps_with_others_stand_together() -> None:
    numbers = [int(found[1]) for line in lines_of(AsyncGEPA) if (found := LINE.match(line))]
    blocks = [number for number, _ in itertools.groupby(numbers)]
    assert len(blocks) > 5
    assert len(blocks) == len(set(blocks))


def test_every_iteration_that_ran_its_parent_logs_which_it_was() -> None:
    """Those too that began before the seed was validated, whose score came later."""
    ours = lines_of(AsyncGEPA)
    first = [next(block) for _, block in itertools.groupby(ours, lambda line: line.partition(":")[0])]
    assert any("Iteration 1: Selected program 0 score: " in line for line in first[1:])
    for line in first[1:]:
        assert SCORES["selected"].match(line) or "erge" in line or "Found a better" in line or "Valset" in line, line


def test_lines_of_iterations_with_their_prompts_are_shown_where_they_are_asked_for_and_in_lockstep(
    shown: Shown, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole prompts, and scores of every example, of steps that overlap, are of no use beside a bar, and fill
    notebooks."""

    long = [
        "Proposed new text for",
        "Individual valset scores for",
        "New valset pareto front scores:",
        "Updated valset pareto front programs:",
    ]

    def long_lines(**options: Any) -> set[str]:
        shown.lines.clear()
        caplog.clear()
        compiled(60, **options)
        return {text for text in long if any(text in line for line in shown.lines)}

    with dspy.context(lm=task_lm()):
        assert long_lines() == set()
        assert long_lines(schedule="lockstep") == set(long)
        with caplog.at_level(logging.DEBUG, "dspy.teleprompt.gepa.gepa"):
            assert long_lines() == set()
            assert all(any(text in line for line in caplog.messages) for text in long)


def test_a_run_that_comes_to_its_end_says_so_last_and_guesses_no_scores(shown: Shown) -> None:
    with dspy.context(lm=task_lm()):
        compiled(40)
    [end] = [line for line in shown.lines if line.startswith("AsyncGEPA finished")]
    assert shown.lines[-1] == end
    assert "of 40" in end
    assert "inf" not in "".join(shown.lines)
    assert "subsample score 0 -> 0" not in "".join(shown.lines)


def test_a_reply_that_is_no_instruction_is_told_without_a_traceback_and_a_fault_of_a_proposer_with_it(
    shown: Shown,
) -> None:
    def broken(*_: Any, **__: Any) -> dict[str, str]:
        raise ZeroDivisionError("by the proposer")

    with dspy.context(lm=task_lm()):
        compiled(30, reflection_lm=fake_lm(lambda _: "I'm sorry, but I can't help with that."))
        said, shown.lines = "\n".join(shown.lines), []
        with pytest.raises(ZeroDivisionError):
            compiled(60, instruction_proposer=broken)
    assert "Reflection failed (attempt 1 of 2)" in said
    assert "Traceback" not in said
    assert "in broken" in "\n".join(shown.lines)
