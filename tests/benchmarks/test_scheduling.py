"""The comparison of schedules: names of variants, plans, tables, targets, and going on where a command stopped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import runs, scheduling, scheduling_tables
from benchmarks.methods import Limits, Method, async_options, method
from benchmarks.runs import Job, Row
from benchmarks.scheduling_tables import EXPERIMENTS, experiment_verdicts
from benchmarks.tasks import TASKS
from benchmarks.trajectory import Point, Recorder, Trajectory
from benchmarks.variants import variant
from benchmarks.virtual import Reading, Setting, VirtualRun, run_virtually
from dspy_flashevolve import FLASHEVOLVE, Workflow
from dspy_flashevolve.engine.events import Committed
from dspy_flashevolve.sim.batching import Load

SMALL = Setting(train=6, val=6)
TINY = ["--jobs", "1", "--seeds", "1", "--tasks", "few", "--profiles", "h100-qwen3-8b", "--train", "6", "--val", "6"]


def _row(name: str, gain: float = 0.0, task: str = "many", seed: int = 0, **more: Any) -> Row:
    scores = {"best_score": 0.1 + gain, "seed_score": 0.1, "span": 120.0}
    return Row(task, name, seed, "time", 120.0, "simulated", 64, **{**scores, **more})


@pytest.mark.parametrize("name", scheduling.COMPARED)
def test_every_variant_of_the_comparison_is_one(name: str) -> None:
    assert method(name).name == variant(name).name == name


def test_a_change_of_a_name_is_an_argument() -> None:
    assert async_options("async-full+prefix=0.5") == {
        "search": "pareto",
        "staleness": "full",
        "workflow": Workflow(validate=0.5),
    }
    assert async_options("async+prefix=0.1+rollout=1") == {"workflow": Workflow(rollout=1.0, validate=0.1)}
    assert async_options("async+admission=live:20") == {"workflow": Workflow(live_steps=20)}
    assert async_options("async+controller=median") == {"workflow": Workflow(median_seconds=10.0)}
    assert async_options("async+workers=rollout:8,propose:4") == {
        "workflow": Workflow(workers={"rollout": 8, "propose": 4})
    }
    assert async_options("flashevolve") == FLASHEVOLVE
    changed = async_options("flashevolve+staleness=guarded+prefix=1+controller=none")
    assert changed == {"search": "pareto", "staleness": "guarded", "workflow": Workflow(rounds=3)}
    assert async_options("lockstep+slots=32") == {"schedule": "lockstep", "num_threads": 32}
    assert async_options("async+slots=adaptive") == {"num_threads": None, "max_concurrency": 256}


def test_changes_are_made_in_one_order_however_they_are_written() -> None:
    both = {"workflow": Workflow(rollout=0.5, validate=0.25)}
    assert async_options("async+rollout=0.5+prefix=0.25") == both == async_options("async+prefix=0.25+rollout=0.5")
    bounded = {"search": "pareto", "staleness": "full", "num_threads": 128, "workflow": Workflow(live_steps=8)}
    assert async_options("async-full+admission=live:8+slots=128") == bounded


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("async-x+prefix=0.5", "there are async,"),
        ("async+colour=red", "'colour=red' is no change; there are slots,"),
        ("async+prefix", "'prefix' is no change"),
        ("async+prefix=0.5+prefix=0.25", "prefix stands there twice"),
        ("async+prefix=2", "prefix is '2', expected a share"),
        ("async+prefix=half", "prefix is 'half', expected a share"),
        ("async+workers=rollout", "workers is 'rollout', expected STAGE:N"),
        ("async+workers=rollout:0", "workers is 'rollout:0', expected STAGE:N"),
        ("async+staleness=late", "staleness is 'late', expected full, guarded or reflective"),
        ("async+racing=0.1", "'racing=0.1' is no change"),
        ("async+admission=gap:8", "admission is 'gap:8', expected live:N"),
        ("async+admission=live:0", "admission is 'live:0'"),
        ("async+controller=fixed:4", "controller is 'fixed:4', expected median"),
        ("async+slots=0", "slots is '0', expected adaptive or a number"),
        ("lockstep+prefix=0.5", "lockstep takes one step at a time, without prefix"),
    ],
)
def test_a_name_that_is_none_says_what_is_wrong(name: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="unknown method") as raised:
        method(name)
    assert reason in str(raised.value)
    with pytest.raises(SystemExit):
        scheduling.parse(["--methods", name])
    assert name in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--profiles", "none"], ["--tasks", "none"], ["--seconds", "none=3"], ["--seconds", "0"], ["--seconds", "soon"]],
)
def test_what_cannot_run_is_refused_before_anything_runs(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        scheduling.parse(arguments)
    assert arguments[1] in capsys.readouterr().err


def test_a_plan_has_every_profile_task_seed_and_variant_with_its_seconds() -> None:
    options = scheduling.parse(["--tasks", *TASKS, "--seeds", "2", "--seconds", "60", "api-gpt-4o-mini=180"])
    jobs = scheduling.planned(options)
    assert len(jobs) == 2 * len(TASKS) * 2 * len(scheduling.COMPARED) == len({job.row.key for job in jobs})
    assert {(job.setting.profile, job.limits.seconds) for job in jobs} == {
        ("h100-qwen3-8b", 60.0),
        ("api-gpt-4o-mini", 180.0),
    }
    jobs = scheduling.planned(scheduling.parse(["--seeds", "1"]))
    assert {job.task for job in jobs} == {"many"}
    assert [job.method for job in jobs[: len(scheduling.COMPARED)]] == list(scheduling.COMPARED)


def test_what_a_file_has_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []

    def measure(job: Job) -> Row:
        made.append(job.method)
        return replace(job.row, best_score=0.5, seed_score=0.1, error="no" if job.method == broken else "")

    monkeypatch.setattr(runs, "measure", measure)
    out = tmp_path / "runs.jsonl"
    command = [*TINY, "--out", str(out), "--methods"]
    broken = "lockstep"
    assert scheduling.main([*command, "async", "lockstep"]) == 1
    broken = ""
    assert scheduling.main([*command, "async", "lockstep", "async-full"]) == 0
    assert made == ["async", "lockstep", "lockstep", "async-full"], "a run that failed is made again"
    assert "has 1 of 3 runs" in capsys.readouterr().out
    assert scheduling.main([*command, "async", "--seconds", "60"]) == 0
    assert scheduling.main([*command, "async", "--slots", "32"]) == 0
    assert scheduling.main([*command, "async", "--val", "7"]) == 0
    assert scheduling.main([*command, "async", "--fresh"]) == 0
    assert made[4:] == ["async"] * 4, "another limit, other slots, other examples, or asked for"
    assert len(out.read_text().splitlines()) == len(made)


def test_a_command_leaves_rows_that_its_report_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs.jsonl"
    names = ["async", "async+rollout=0.5", "async-full+prefix=0.5+controller=median+slots=4"]
    assert scheduling.main([*TINY, "--seconds", "20", "--methods", *names, "--out", str(out)]) == 0
    assert "others" in capsys.readouterr().out
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["method"] for line in lines] == names
    assert {line["benchmark"] for line in lines} == {"scheduling"}
    assert [line["error"] for line in lines] == [""] * 3
    assert all(line["validations"] >= 1 and line["span"] == 20.0 for line in lines)
    assert scheduling.main(["--report", str(out)]) == 0
    assert "the default" in capsys.readouterr().out


def test_an_argument_that_does_not_work_ends_its_run_and_no_other() -> None:
    def build(*_: Any) -> Any:
        raise TypeError("no such argument")

    run = run_virtually(Method("broken", build), TASKS["few"].task(0), Limits(4, 0, seconds=5.0), SMALL)
    assert run.error == "TypeError: no such argument"


def test_a_table_has_the_medians_of_what_did_not_fail() -> None:
    rows = [
        *(_row("async", gain, seed=seed, accepted=count) for seed, (gain, count) in enumerate([(0.2, 4), (0.4, 8)])),
        _row("async", 9.0, seed=2, accepted=99, error="RuntimeError: no"),
        _row("lockstep", 0.1, validations=3),
        _row("mine", 0.1, refused=5, refused_share=0.025),
    ]
    text = scheduling_tables.report(rows)
    assert "many, at 120 virtual seconds (simulated), 64 slots, 60 + 60 examples" in text
    assert "others" in text
    columns = ("validations a minute", "accepted a minute")
    lines = {line[0]: line[1:] for line in scheduling_tables.cells(rows, EXPERIMENTS["mechanisms"], columns)}
    assert list(lines) == ["lockstep", "async"]
    assert lines["async"] == ["the default", "0.400 (0.300-0.500)", "+0.300", "3.00", "0.00", "3.00"]
    assert lines["lockstep"][2:] == ["+0.100", "1.00", "1.50", "0.00"]
    (mine,) = scheduling_tables.cells(rows, {"mine": ""}, ("429s", "refused after 10 s"))
    assert mine == ["mine", "", "0.200 (0.200-0.200)", "+0.100", "1.00", "5", "2.50%"]


@pytest.mark.parametrize(("better", "word"), [(True, "met"), (False, "MISSED")])
def test_the_targets_of_the_experiments(better: bool, word: str) -> None:
    ahead, refused = (1, 0.009) if better else (0, 0.011)
    rows = [
        _row("async+prefix=0.25", validations=20 + ahead),
        _row("async", validations=20, landed=20 + ahead),
        _row("async+controller=median", landed=21),
        _row("async+slots=8", accepted=5, validations=6, tokens_per_second=100.0),
        _row("async+slots=128", accepted=20, validations=20, tokens_per_second=1000.0),
        *(
            _row(
                "async+slots=adaptive",
                seed=seed,
                accepted=17 + ahead,
                validations=17 + ahead,
                tokens_per_second=899.0 + ahead,
                refused_share=share,
            )
            for seed, share in enumerate([0.0, 0.0, refused])
        ),
    ]
    lines = experiment_verdicts(rows)
    assert len(lines) == 6
    assert [line for line in lines if not line.endswith(word)] == []
    assert "the median rule 10.50" in lines[1]
    assert "of async+slots=128's 1000.00" in lines[2]
    assert f"at most {refused:.2%} refused" in lines[5]
    assert experiment_verdicts([_row("lockstep", 0.1)]) == []


def test_every_variant_of_a_verdict_is_in_the_comparison() -> None:
    assert {"async", "async+prefix=0.25"} <= EXPERIMENTS["prefix"].keys()
    assert next(iter(EXPERIMENTS["slots"])) == "async+slots=adaptive"


def test_what_was_refused_is_counted_after_the_first_seconds() -> None:
    settled, end = Reading(answered=100, refused=30), Reading(tokens=9.0, answered=295, refused=35)
    run = VirtualRun(Limits(64, 0, seconds=120.0), settled=settled, reading=end, seconds=130.0)
    assert run.refused_share == 5 / 200
    assert run.tokens == 9.0
    assert VirtualRun(Limits(64, 0, seconds=5.0), reading=end).refused_share is None
    assert VirtualRun(Limits(64, 0, seconds=120.0), settled=end, reading=end).refused_share is None


def test_a_reading_has_the_models_counters() -> None:
    load = Load(running=3, waiting=0, generated_tokens=7.5, running_seconds=9.0, kv_tokens=1.0)
    model: Any = SimpleNamespace(
        refused=[0.5, 3.0], requests={"task": 4, "reflection": 1}, prompt_tokens=40, load=lambda: load
    )
    assert Reading.of(model) == Reading(7.5, prompt_tokens=40, answered=5, refused=2, reflections=1, running_seconds=9)


def test_candidates_of_the_pool_by_the_limit_have_landed() -> None:
    commits = [Committed(seconds, i, i, 0, i, 0.5, 0.5, 1) for i, seconds in ((1, 6.0), (2, 8.0), (3, 11.0))]
    stats: Any = SimpleNamespace(changes=[], commits=commits)
    assert VirtualRun(Limits(64, 0, seconds=10.0), Trajectory(), seconds=12.0, stats=stats).landed == 2
    assert VirtualRun(Limits(64, 0)).landed == 0


def test_only_whole_validations_are_counted() -> None:
    recorder = Recorder(clock=lambda: 0.0)
    for candidate, examples in enumerate([60, 15, 60]):
        event: Any = {
            "candidate_idx": candidate,
            "parent_ids": [],
            "average_score": 0.5,
            "num_examples_evaluated": examples,
            "total_valset_size": 60,
        }
        recorder.on_valset_evaluated(event)
    assert recorder.trajectory.end == Point(metric_calls=60, best_score=0.5, validations=2)
