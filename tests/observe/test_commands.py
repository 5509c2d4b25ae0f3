"""The commands that read a run: watch, compare, export, diff, lineage."""

from __future__ import annotations

import json
import pickle
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import dspy
import pytest

from dspy_flashevolve import Harness, Playbook
from dspy_flashevolve.cli import NO_RUN, WRONG_ARGUMENT, main
from dspy_flashevolve.engine.events import ActorLost, RequestTurnedAway, SeedValidated
from dspy_flashevolve.engine.store import Store
from dspy_flashevolve.observe.history import read
from dspy_flashevolve.observe.report import report
from dspy_flashevolve.observe.terminal import watch
from tests.ace import child as ace
from tests.contract.surface import simulated
from tests.fakes import Chain, digits, examples, reflection_lm, task_lm
from tests.harness import child as harness
from tests.observe.runs import Session

SEED = {"answer": "Answer."}


def output_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that succeeds, and return what it prints."""
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that refuses its arguments or the run, and return its message."""
    assert main([str(argument) for argument in arguments]) in (WRONG_ARGUMENT, NO_RUN)
    return capsys.readouterr().err


# watch


def test_watch_shows_a_run_of_another_process_until_it_is_over(tmp_path: Path) -> None:
    shown: list[str] = []
    with Session(tmp_path) as session:
        left = [
            lambda: session.ran(0, SEED, 1, 0.5, tokens=1234),
            lambda: session.commits(0, 1, [0], 0.75),
            lambda: session.ends("finished", "nothing is left"),
        ]

        def wait() -> None:
            left.pop(0)()
            if left:
                session.store.flush_blocking()

        session.store.flush_blocking()
        history = watch("a run", lambda: read(tmp_path), shown.append, wait)
    assert [len(shown), left, history.state] == [4, [], "finished"]
    assert "running" in shown[0]
    assert "1,234" not in shown[0]
    assert "1,234" in shown[1]
    assert "0.7500 (candidate 1)" in shown[2]
    assert "because: nothing is left" in shown[3]


def test_watch_waits_for_a_run_that_has_not_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    printed: list[str] = []

    sleep, mine = time.sleep, threading.current_thread()

    def begin(seconds: float) -> None:  # in the place of a second's sleep; threads of other tests may sleep, too
        if threading.current_thread() is not mine:
            sleep(seconds)
            return
        printed.append(capsys.readouterr().out)
        if len(printed) == 2:
            run.mkdir()
        elif len(printed) == 3:
            Store(run).close()
            (run / "journal.sqlite").rename(run / "journal.new")
        elif len(printed) == 4:
            (run / "journal.new").rename(run / "journal.sqlite")
            begin.held = Store(run)  # type: ignore[attr-defined]
        elif len(printed) == 5:
            begin.held.close()  # type: ignore[attr-defined]
            with Session(run) as session:
                session.ends("finished", "nothing is left")

    monkeypatch.setattr("dspy_flashevolve.cli.time.sleep", begin)
    assert main(["watch", str(run)]) == 0
    assert printed == [f"waiting for a run in {run}: it has no journal yet (Ctrl-C ends this)\n", *[""] * 4]
    assert "because: nothing is left" in capsys.readouterr().out


def test_watch_says_how_much_longer_a_run_may_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        Session(tmp_path / "time", max_seconds=60) as timed,
        Session(tmp_path / "calls", max_metric_calls=4) as counted,
        Session(tmp_path / "dollars", max_cost=2.0, max_reflection_calls=100) as paid,
    ):
        paid.ran(0, SEED, 1, 0.5, cost_dollars=0.4)
        for session in (timed, counted, paid):
            session.tells(SeedValidated(0.0, 0.5, 0.5), SeedValidated(10.0, 0.5, 0.5))
            session.store.record_call("rollout", 0)
            session.store.flush_blocking()
        assert "running, 10.0 s, about 40.0 s left" in output_of(capsys, "watch", tmp_path / "dollars", "--once")
        assert "running, 10.0 s, about 50.0 s left" in output_of(capsys, "watch", tmp_path / "time", "--once")
        assert "running, 10.0 s, about 30.0 s left" in output_of(capsys, "watch", tmp_path / "calls", "--once")
    assert "left" not in output_of(capsys, "watch", tmp_path / "time", "--once")


def test_watch_counts_what_was_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Session(tmp_path) as session:
        session.tells(*(RequestTurnedAway(1.0, "the server", f"429, number {number}") for number in range(1200)))
    status = output_of(capsys, "watch", tmp_path)
    assert ", 1,200 requests made again" in status
    assert "number" not in status


def test_reflections_that_fail_are_of_no_use_and_have_their_reason_in_watch_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, failed = count(), list[int]()

    class Proposer:
        def __call__(self, candidate: Any, *_: Any, **__: Any) -> dict[str, str]:
            if (number := next(calls)) % 5 > 1:  # three in a row: some steps ask twice in vain
                failed.append(number)
                raise ValueError("out of ideas")
            return dict.fromkeys(candidate, f"text {number}")

    run = tmp_path / "run"
    with dspy.context(lm=task_lm()):
        simulated(80, instruction_proposer=Proposer(), log_dir=str(run))
    status = output_of(capsys, "watch", run)
    rows = {line.split()[0]: line.split()[1:] for line in status.splitlines() if line}
    assert rows["reflection"][1] == str(len(failed)) != "0"
    assert "failed: reflection failed: out of ideas" in status
    assert "request failed after 0.0 s (propose): ValueError: out of ideas" in status
    output_of(capsys, "report", run, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert f"{len(failed)} times in propose: ValueError: out of ideas" in page
    steps = [step for step in read(run).steps.values() if step.way == "failed"]
    assert f"Steps that failed ({len(steps)})" in page


def test_watch_and_report_tell_of_processes_that_were_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Session(tmp_path) as session:
        session.tells(ActorLost(1.0, "its node has died"))
        session.ends("finished")
    assert 'ActorLost after 0.0 s: {"reason": "its node has died"}' in output_of(capsys, "watch", tmp_path)
    page = report(read(tmp_path))
    assert "Processes that ran rollouts and were lost" in page
    assert "reason its node has died" in page


def test_what_is_known_of_the_seed_while_it_is_validated_is_not_its_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Session(tmp_path) as session:
        for example in (0, 1):
            session.ran(-1, SEED, example, 1.0, stage="validate", split="val")
        session.store.flush_blocking()
        assert "best score -, seed 2 examples, " in output_of(capsys, "watch", tmp_path, "--once")
        prints = {"optimizer": "AsyncGEPA", "valset": "3 examples, 33222d6df30d"}
        session.store.append("sessions", id=2, pid=1, settings={}, fingerprints=prints)
        session.store.flush_blocking()
        assert "best score -, seed 2 of 3 examples, " in output_of(capsys, "watch", tmp_path, "--once")
        assert output_of(capsys, "lineage", tmp_path) == "candidate 0 (the seed): 2 of 3 examples validated\n"
        assert "2 of 3 examples" in output_of(capsys, "compare", tmp_path)
        assert "<dt>seed</dt><dd>2 of 3 examples</dd>" in report(read(tmp_path))
        session.ran(-1, SEED, 2, 0.25, stage="validate", split="val")
        session.store.flush_blocking()
        assert "seed 0.7500 on 3 examples" in output_of(capsys, "watch", tmp_path, "--once")


def test_the_last_figures_of_watch_are_those_of_the_run(
    counted: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, program = counted
    stats = program.async_stats
    lines = output_of(capsys, "watch", directory, "--once").splitlines()
    words = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert words["task"][2] == f"{stats.task_tokens:,}"
    assert words["reflection"][2] == f"{stats.reflection_tokens:,}"
    assert f"metric calls {stats.metric_calls:,} of {stats.max_metric_calls:,}" in lines
    assert any(line.startswith(f"steps {stats.steps}: ") for line in lines)


def test_a_terminal_gets_no_control_characters_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Session(tmp_path) as session:
        session.store.record_commit(0, 1, 1, {"answer": "red \x1b[31m"}, [0], {}, 0.5)
        session.ends("failed", "because \x1b[2J\x07")
    for command in (["watch"], ["lineage", "--prompts"]):
        assert "\x1b" not in output_of(capsys, command[0], tmp_path, *command[1:])


# compare, diff, lineage


def test_compare_puts_runs_side_by_side_with_the_settings_in_which_they_differ(
    counted: tuple[Path, Any], changed: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = output_of(capsys, "compare", counted[0], changed[0]).splitlines()
    for line, (directory, program) in zip(lines[1:3], (counted, changed), strict=True):
        assert line.startswith(str(directory))
        assert f"{max(program.detailed_results.val_aggregate_scores):.4f}" in line
    assert "max_metric_calls: 90 | 250" in lines
    figures = json.loads(output_of(capsys, "compare", "--json", counted[0]))
    assert figures[0]["calls"] == counted[1].async_stats.metric_calls


def test_diff_shows_what_changed_from_one_candidate_to_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Session(tmp_path) as session:
        session.store.record_commit(0, 0, 1, {"a": "one\ntwo", "b": "same"}, [], {}, 0.1)
        session.store.record_commit(1, 1, 2, {"a": "one\nthree", "b": "same"}, [0], {}, 0.9)
    lines = output_of(capsys, "diff", tmp_path, "seed", "best").splitlines()
    assert lines == ["--- a of candidate 0", "+++ a of candidate 1", "@@ -1,2 +1,2 @@", " one", "-two", "+three"]
    assert "have the same texts" in output_of(capsys, "diff", tmp_path, "1", "best")
    assert "+three" in output_of(capsys, "lineage", tmp_path, "--prompts")


# export


def test_the_best_program_is_exported_as_a_file_that_load_reads(
    counted: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, program = counted
    output_of(capsys, "export", directory, "--best", tmp_path / "program.json")
    loaded = Chain(2)
    loaded.steps[0].demos = [dspy.Example(question="q", answer="a")]
    loaded.load(tmp_path / "program.json")
    assert instructions(loaded) == instructions(program)
    assert len(loaded.steps[0].demos) == 1, "demos are the loading program's own"
    output_of(capsys, "export", directory, "--candidate", "0", tmp_path / "seed.json")
    loaded.load(tmp_path / "seed.json")
    assert instructions(loaded) == instructions(Chain(2))


def test_an_export_onto_a_saved_program_has_its_demos_and_fields(
    counted: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, program = counted
    student, base, out = Chain(2), tmp_path / "student.json", tmp_path / "program.json"
    student.steps[1].demos = [dspy.Example(question="q", answer="a")]
    student.save(base)
    output_of(capsys, "export", directory, "--program", base, out)
    loaded = Chain(2)
    loaded.load(out)
    assert instructions(loaded) == instructions(program)
    assert [len(step.demos) for step in loaded.steps] == [0, 1]
    Chain(1).save(base)
    assert "says nothing of steps[1]" in error_of(capsys, "export", directory, "--program", base, out)


def instructions(program: Any) -> list[str]:
    return [predictor.signature.instructions for predictor in program.predictors()]


def test_a_playbook_is_exported_in_the_instructions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = ace.run(tmp_path, "async", 8)
    output_of(capsys, "export", tmp_path / "run", "--best", tmp_path / "program.json")
    loaded = ace.SlowChain()
    loaded.load(tmp_path / "program.json")
    assert instructions(loaded) == instructions(program)
    last = read(tmp_path / "run").candidates[-1]
    output_of(capsys, "export", tmp_path / "run", "--candidate", last.index, tmp_path / "program.json")
    loaded.load(tmp_path / "program.json")
    playbook = Playbook.from_instructions(instructions(loaded)[0])
    assert playbook is not None
    assert [bullet.content for bullet in playbook.bullets] == [
        bullet["content"] for bullet in last.more["playbook"]["bullets"]
    ]


def test_a_harness_is_exported_with_its_source_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = harness.run(tmp_path, "async", 4)
    output_of(capsys, "export", tmp_path / "run", "--best", tmp_path / "harness.json")
    loaded = Harness("question -> answer")
    loaded.load(tmp_path / "harness.json")
    assert (loaded.module_src, loaded.memory) == (best.module_src, best.memory)


def test_an_export_that_needs_the_saved_student_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Session(tmp_path) as session:
        prints = {"optimizer": "AsyncACE", "predictor 'first'": "x", "predictor 'second'": "y"}
        session.store.append("sessions", id=2, pid=1, settings={}, fingerprints=prints)
        session.store.record_commit(-1, 0, 0, {"first": "text"}, [], {}, 0.5)
    told = error_of(capsys, "export", tmp_path, tmp_path / "out.json")
    assert "it says nothing of second" in told
    assert "--program student.json" in told


# dspy.GEPA's own run directories, and what is none


def test_a_run_directory_of_dspy_gepa_is_read_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    student, sets = Chain(1), {"trainset": examples("t", 7), "valset": examples("v", 9)}
    optimizer = dspy.GEPA(
        digits, max_metric_calls=80, reflection_lm=reflection_lm(), log_dir=str(run), track_stats=True, num_threads=2
    )
    program: Any = optimizer.compile(student, **sets)
    details = program.detailed_results
    capsys.readouterr()
    lines = output_of(capsys, "lineage", run).splitlines()
    assert len(lines) == len(details.candidates)
    assert lines[0] == f"candidate 0 (the seed): score {details.val_aggregate_scores[0]:.3f}"
    output_of(capsys, "export", run, "--best", tmp_path / "program.json")
    loaded = Chain(1)
    loaded.load(tmp_path / "program.json")
    assert instructions(loaded) == instructions(program)
    output_of(capsys, "report", run, "-o", tmp_path / "report.html")
    assert "There is no journal" in (tmp_path / "report.html").read_text()
    assert "+Instruction" in output_of(capsys, "diff", run, "seed", "best")
    assert "dspy.GEPA" in output_of(capsys, "compare", run)


def test_what_a_checkpoint_does_not_tell_is_unknown_and_not_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {
        "program_candidates": [SEED],
        "prog_candidate_val_subscores": [{0: 0.5}],
        "parent_program_for_candidate": [[None]],
        "num_metric_calls_by_discovery": [1],
        "total_num_evals": 1,
    }
    (tmp_path / "gepa_state.bin").write_bytes(pickle.dumps(state))
    _, row = output_of(capsys, "compare", tmp_path).splitlines()
    assert row.split()[1:] == ["dspy.GEPA", "unknown", "0.5000", "0.5000", "0", "unknown", "1", *["unknown"] * 4]
    status = output_of(capsys, "watch", tmp_path)
    assert "unknown, unknown" in status
    assert "steps unknown" in status
    assert "dollars" not in status
    page = tmp_path / "report.html"
    output_of(capsys, "report", tmp_path, "-o", page)
    assert "0.0000" not in page.read_text()
    assert "None." not in page.read_text()


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip().count(".") == 2
