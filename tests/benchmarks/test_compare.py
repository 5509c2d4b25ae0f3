"""The comparison of optimizers: names, runs in virtual time, tables, targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dspy
import pytest

from benchmarks import compare
from benchmarks.combee import CombeeReflection
from benchmarks.methods import Limits, async_options, method
from benchmarks.results import commit
from benchmarks.runs import Row
from benchmarks.tasks import TASKS, task_kind
from benchmarks.trajectory import Point, Trajectory
from benchmarks.virtual import Setting, VirtualRun, run_virtually
from dspy_flashevolve import Guarded
from dspy_flashevolve.sim.task import OUTPUTS

SMALL = Setting(train=12, val=12)


def _row(name: str, gain: float, task: str = "few", condition: str = "time", seed: int = 0, **more: Any) -> Row:
    return Row(task, name, seed, condition, 120.0, "simulated", 64, best_score=0.1 + gain, seed_score=0.1, **more)


def test_a_name_says_what_asyncgepa_is_given() -> None:
    assert async_options("async") == {}
    assert async_options("lockstep") == {"schedule": "lockstep"}
    assert async_options("async-full") == {"search": "pareto", "staleness": "full"}
    assert async_options("async-reflective") == {"search": "pareto", "staleness": "reflective"}
    assert async_options("async-reflective+search=edits") == {"search": "edits", "staleness": "reflective"}
    assert async_options("async-guarded-8") == {"search": "pareto", "staleness": Guarded(8)}
    combee, again = async_options("combee-9"), async_options("combee-9")
    assert (combee["schedule"], combee["reflection_minibatch_size"]) == ("lockstep", 9)
    assert isinstance(combee["instruction_proposer"], CombeeReflection)
    assert combee["instruction_proposer"] is not again["instruction_proposer"], "it shuffles: a run needs its own"


def test_a_task_is_a_kind_with_changes() -> None:
    assert task_kind("many") is not None
    changed = task_kind("few:rules=30,crowding=0.5")
    assert (changed.rules, changed.rules_per_example, changed.crowding) == (30, 6, 0.5)
    assert changed.task(3).reply_model.crowding == 0.5
    for wrong in ("none", "few:rules", "few:colour=3", "few:rules=many", "few:predictors=4", "few:decides=none"):
        with pytest.raises(ValueError, match="unknown task"):
            task_kind(wrong)


@pytest.mark.parametrize(("decides", "name"), [("first", "outline"), ("last", "answer")])
def test_where_one_predictor_decides_only_its_rules_count_and_all_get_the_same_feedback(
    decides: str, name: str
) -> None:
    task = task_kind(f"few:predictors=3,decides={decides}").task(0)
    texts = {output: predictor.signature.instructions for output, predictor in task.program().named_predictors()}
    rules = "\n".join(map(str, task.all_rules()))
    seed = task.true_score([texts[output] for output in OUTPUTS])
    for output in OUTPUTS:
        changed = [texts[each] + rules * (each == output) for each in OUTPUTS]
        assert (task.true_score(changed) > seed) == (output == name)
    example = task.trainset(1)[0]
    words = " ".join(rule.word for rule in example.required)
    for output in OUTPUTS:
        pred = dspy.Prediction(**{each: words * (each == output) for each in OUTPUTS})
        judged = [task.metric(example, pred, pred_name=predictor) for predictor in (None, *OUTPUTS)]
        assert {one.score for one in judged} == {float(output == name)}
        assert len({one.feedback for one in judged}) == 1


@pytest.mark.parametrize("arguments", [["--methods", "magic"], ["--tasks", "none"], ["--model", "kind"]])
def test_what_cannot_run_is_refused_before_anything_runs(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare.parse(arguments)
    assert arguments[1] in capsys.readouterr().err


@pytest.mark.parametrize("name", ["async", "combee-4"])
@pytest.mark.parametrize("limits", [Limits(8, 1, seconds=40.0), Limits(8, 1, metric_calls=80)], ids=["time", "calls"])
def test_the_same_run_gives_the_same_trajectory(name: str, limits: Limits) -> None:
    first, second = (run_virtually(method(name), TASKS["few"].task(1), limits, SMALL) for _ in range(2))
    assert first.error == ""
    assert first.trajectory == second.trajectory
    assert (first.tokens, first.seconds, first.changes) == (second.tokens, second.seconds, second.changes)
    assert first.at().best_score is not None
    assert first.at().proposals > 0


def test_only_what_was_paid_within_the_limit_counts() -> None:
    points = (
        Point(1.0, 60, best_score=0.1),
        Point(9.0, 590, proposals=4, best_score=0.4, depth=1),
        Point(9.0, 590, proposals=4, best_score=0.5, depth=2),
        Point(12.0, 630, proposals=5, best_score=0.9, depth=3),
    )
    run = VirtualRun(Limits(64, 0, metric_calls=600), Trajectory(points), seconds=12.0)
    assert run.at() == points[2], "the last of what happened at one moment"
    assert run.at(0.5) == points[0]
    assert run.overshoot == 30
    timed = VirtualRun(Limits(64, 0, seconds=10.0), Trajectory(points), seconds=12.0)
    assert (timed.at(), timed.at(0.5), timed.span, timed.overshoot) == (points[2], points[0], 10.0, 0)


def test_a_table_compares_medians_and_leaves_failed_runs_out() -> None:
    rows = [
        *(_row("lockstep", gain, seed=seed) for seed, gain in enumerate([0.1, 0.2, 0.3])),
        _row("combee-9", 0.3),
        _row("combee-25", 0.4),
        _row(
            "async",
            0.6,
            metric_calls=600,
            proposals=40,
            lm_calls=50,
            task_tokens=700_000,
            reflection_tokens=90_000,
            read_tokens=590_000,
            integrated=1.0,
            changes=7,
        ),
        _row("async", 9.0, seed=1, error="RuntimeError: no"),
    ]
    lines = {line[0]: line[1:] for line in compare.cells(rows)}
    assert lines["lockstep"][:6] == ["3", "0.300 (0.200-0.400)", "0.300", "+0.200", "1.00", "0.50"]
    assert lines["async"] == [
        "1", "0.700 (0.700-0.700)", "0.700", "+0.600", "3.00", "1.50", "-", "600", "50", "700000", "90000", "0.759",
        "0.21", "-", "-", "-", "40", "100%", "7",
    ]  # fmt: skip
    assert lines["combee-9"][-2:] == ["-", "0"]
    assert "few, at 120 virtual seconds" in compare.report(rows)


def test_the_targets_at_a_fixed_time() -> None:
    rivals = {"lockstep": 0.1, "combee-9": 0.3, "combee-25": 0.2, "async-full": 0.5}
    for task, words in (
        ("many", ["lockstep's +0.100, target 3 x: met", "combee-9's +0.300, target 1.5 x: MISSED"]),
        (
            "few",
            [
                "lockstep's +0.100, target 1 x: met",
                "combee-9's +0.300, target 1 x: met",
                "async-full's +0.500, target 1 x: MISSED",
            ],
        ),
    ):
        rows = [_row(name, gain, task) for name, gain in {**rivals, "async": 0.4}.items()]
        lines = compare.verdicts(rows)
        assert [line.endswith(word) for line, word in zip(lines, words, strict=True)] == [True] * len(words)
    assert compare.verdicts([_row("lockstep", 0.1)]) == []


@pytest.mark.parametrize(("ours", "verdict"), [(0.35, "met"), (0.25, "MISSED")])
def test_at_equal_calls_the_spread_between_seeds_is_allowed(ours: float, verdict: str) -> None:
    rows = [
        *(_row("combee-9", gain, condition="calls", seed=seed) for seed, gain in enumerate([0.35, 0.4, 0.45])),
        _row("lockstep", 0.1, condition="calls"),
        _row("async", ours, condition="calls"),
    ]
    where = "few, at 120 metric calls (obliging)"
    assert compare.verdicts(rows) == [
        f"{where}: async {ours:+.3f} against combee-9 +0.400, less its spread of 0.100: {verdict}"
    ]


def recorded(folder: Path, *runs: list[str], method: str = "lockstep", seconds: int = 0, calls: int = 60) -> list[Row]:
    """The rows of small runs of the command, one with each of these further options, in one file."""
    out = folder / "runs.jsonl"
    limits = ["--seconds", str(seconds), "--calls", str(calls), "--train", "6", "--val", "6", "--out", str(out)]
    for more in runs:
        asked = ["--jobs", "1", "--seeds", "1", "--tasks", "few", "--methods", method, *limits, *more]
        assert compare.main(asked) == 0
    return compare.recorded(out)


def scored(method: str, seed: int, *scores: tuple[float, float], **more: Any) -> Row:
    """A row whose best program had these true scores from these seconds on."""
    points: list[list[float | int | None]] = [[at, 60, 1, 1, 0, 0.9, 1, true] for at, true in scores]
    more = {"true_score": scores[-1][1], "seed_true_score": 0.05, "best_score": 0.9, **more}
    return Row("few", method, seed, "time", 900.0, "simulated", 64, trajectory=points, **more)


def test_a_table_has_true_scores_their_time_and_the_time_until_locksteps_last() -> None:
    rows = [
        scored("lockstep", 0, (50.0, 0.1), (700.0, 0.2)),
        scored("lockstep", 1, (50.0, 0.1), (700.0, 0.3)),
        scored("async", 0, (20.0, 0.15), (130.0, 0.4), (950.0, 0.1), true_score=0.4),
        scored("async", 1, (20.0, 0.15), (130.0, 0.2)),
    ]
    header = (*compare.HEADER, "at 120", "at 600")
    lines = {line[0]: dict(zip(header, line, strict=True)) for line in compare.cells(rows)}
    ours = lines["async"]
    assert ours["true score (min-max)"] == "0.300 (0.200-0.400)"
    assert ours["validated"] == "0.900"
    assert ours["gain"] == "+0.250"
    assert ours["seconds to lockstep's score"] == "130 (1/2)"
    assert (ours["at 120"], ours["at 600"]) == ("0.150", "0.300")
    assert lines["lockstep"]["seconds to lockstep's score"] == "700 (2/2)"
    assert "at 600 s" in compare.report(rows)


def test_with_dspys_cache_a_table_has_the_requests_and_reflections_paid_until_locksteps_score(tmp_path: Path) -> None:
    cached, other = recorded(tmp_path, ["--cached", "--val", "0"], ["--val", "0"])
    assert cached.task_requests < cached.metric_calls
    assert other.task_requests == other.metric_calls
    assert cached.true_score is not None
    requests, reflections = cached.paid_to(cached.true_score) or (0, 0)
    assert 0 < requests <= cached.task_requests
    assert 0 < reflections <= cached.lm_calls
    (line,) = [dict(zip(compare.HEADER, line, strict=True)) for line in compare.cells([cached])]
    assert line["requests paid to it"] == f"{requests} (1/1)"
    assert line["reflections to it"] == f"{reflections} (1/1)"
    assert "dspy's cache" in compare.report([cached])


def test_a_run_under_a_named_model_has_its_true_score_its_cost_and_its_commit(tmp_path: Path) -> None:
    obliging, plain = recorded(tmp_path, ["--model", "obliging", "plain"], method="async", seconds=40, calls=0)
    assert (obliging.model, plain.model) == ("obliging", "plain")
    assert obliging.seed_true_score == pytest.approx(0.9 * 2 / 24)
    assert plain.seed_true_score not in (None, obliging.seed_true_score)
    for row in (obliging, plain):
        assert min(row.lm_calls, row.reflection_tokens, row.task_tokens) > 0
        assert row.true_score is not None
        assert row.trajectory[-1][-1] is not None
        assert row.commit == commit()


def test_a_slow_reflection_model_delays_a_run_by_each_of_its_reflections_and_has_a_row_of_its_own(
    tmp_path: Path,
) -> None:
    quick, slow = recorded(tmp_path, [], ["--reflection-seconds", "60"])
    assert (quick.reflection_seconds, slow.reflection_seconds) == (0.0, 60.0)
    assert quick.seconds < 60 * slow.lm_calls < slow.seconds
    assert quick.tokens == slow.tokens, "the same run, but for its time"
    assert "60 s a reflection" in compare.report([slow])


def test_a_command_goes_on_where_it_stopped_and_of_two_runs_the_later_counts(tmp_path: Path) -> None:
    (row,) = recorded(tmp_path, [], [], ["--fresh"], seconds=20, calls=0)
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 2
    assert (row.task, row.method, row.limit) == ("few", "lockstep", 20.0)
