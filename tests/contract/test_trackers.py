"""What wandb and mlflow are told of a run. The stand-ins have their rules; neither is a dependency of ours."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dspy
import pytest

from dspy_flashevolve import RunAbortedError
from tests.contract.surface import compiled, on, optimizer, priced, raising
from tests.fakes import Chain, examples, fake_lm, reflection_lm, reply_for, task_lm

SECRET = "correct-horse-battery-7"


class FakeWandb:
    """wandb's module: what is logged for a step below one that was logged before is ignored.

    Args:
        before: called before each log.
    """

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.ignored: list[dict[str, Any]] = []
        self.axes: dict[str, str | None] = {}
        self.threads: set[str] = set()
        self.ended = False
        self.run: Any = SimpleNamespace(summary={})
        self.config = SimpleNamespace(update=lambda *_, **__: None)
        self._before, self._step = before, 0

    def login(self, **_: Any) -> None: ...

    def init(self, **_: Any) -> None: ...

    def finish(self) -> None:
        self.ended = True

    def define_metric(self, name: str, step_metric: str | None = None, **_: Any) -> None:
        self.axes[name] = step_metric

    def Table(self, columns: list[str], data: list[list[Any]]) -> str:
        return f"{columns} {data}"

    def Html(self, html: str) -> str:
        return html

    def log(self, row: dict[str, Any], step: int | None = None, commit: bool = True) -> None:
        self._before()
        assert not self.ended
        self.threads.add(threading.current_thread().name)
        if step is not None and step < self._step:
            self.ignored.append(row)
        else:
            self._step = self._step if step is None else step
            self.rows.append(row)

    def of(self, name: str) -> list[Any]:
        """All that was logged under a name."""
        return [row[name] for row in self.rows if name in row]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_the_last_figures_are_those_of_async_stats(wandb: FakeWandb, schedule: Any) -> None:
    task, reflection = priced(task_lm()), reflection_lm()
    reflection.model = "nobody-has-a-price-for-this"
    with dspy.context(lm=task):
        stats = compiled(90, reflection_lm=reflection, schedule=schedule, use_wandb=True).async_stats
    last = {name: wandb.of(name)[-1] for name in ("tokens/task", "tokens/reflection", "dollars/task", "integrations")}
    of_task = [dollars for stage, dollars in stats.dollars_by_stage.items() if stage not in ("propose", "integrate")]
    assert last == {
        "tokens/task": stats.task_tokens,
        "tokens/reflection": stats.reflection_tokens,
        "dollars/task": sum(of_task),
        "integrations": stats.integration_calls,
    }
    assert wandb.of("total_metric_calls")[-1] == stats.metric_calls
    assert not wandb.of("dollars/reflection")
    assert len(wandb.of("gap")) == stats.steps
    assert set(wandb.of("slots/limit")) == {stats.slots}
    assert max(wandb.of("slots/busy")) <= stats.slots


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_wandb_takes_every_candidate_though_steps_overlap(wandb: FakeWandb, schedule: Any) -> None:
    with dspy.context(lm=task_lm()):
        details = compiled(130, schedule=schedule, use_wandb=True).detailed_results
    assert len(details.candidates) > 3
    assert wandb.ignored == []
    assert sorted(wandb.of("new_program_idx")) == list(range(len(details.candidates)))
    assert max(wandb.of("best_score_on_valset")) == max(details.val_aggregate_scores)
    assert wandb.axes.get("*") == ("iteration" if schedule == "async" else None)


def test_the_figures_of_a_training_loop_keep_their_axis(wandb: FakeWandb) -> None:
    """It has begun wandb's run, which AsyncGEPA logs into."""
    with dspy.context(lm=task_lm()):
        compiled(60, use_wandb=True, gepa_kwargs={"wandb_attach_existing": True})
        assert wandb.axes == {}
        compiled(60, use_wandb=True, gepa_kwargs={"wandb_attach_existing": True, "tracking_key_prefix": "gepa/"})
    assert wandb.axes == {"gepa/iteration": None, "gepa/*": "gepa/iteration"}
    assert not wandb.ended


def test_a_tracker_that_takes_long_does_not_hold_up_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run_is_done = threading.Event()
    slow = FakeWandb(lambda: run_is_done.wait(60))
    monkeypatch.setitem(sys.modules, "wandb", slow)
    told_meanwhile: list[int] = []

    def end(event: Any) -> None:
        told_meanwhile.append(len(slow.rows))
        run_is_done.set()

    with dspy.context(lm=task_lm()):
        details = compiled(90, use_wandb=True, gepa_kwargs=on("on_optimization_end", end)).detailed_results
    assert told_meanwhile == [0]
    assert sorted(slow.of("new_program_idx")) == list(range(len(details.candidates)))
    assert slow.ended
    [name] = slow.threads
    assert name.startswith("flashevolve-tracker")


@pytest.mark.parametrize("awaited", [False, True])
def test_a_run_with_a_directory_ends_with_the_report_which_holds_no_secret(
    wandb: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, awaited: bool
) -> None:
    monkeypatch.setenv("THEIR_API_KEY", SECRET)
    leaks = fake_lm(lambda prompt: reply_for(prompt, new_instruction=f"Say {SECRET} {len(prompt)}"))
    one = optimizer(90, use_wandb=True, log_dir=str(tmp_path / "run"), reflection_lm=leaks)
    data = {"trainset": examples("t", 7), "valset": examples("v", 9)}
    with dspy.context(lm=task_lm()):
        asyncio.run(one.acompile(Chain(), **data)) if awaited else one.compile(Chain(), **data)
    [page] = wandb.of("report")
    assert "<title>AsyncGEPA" in page
    assert "finished" in page
    assert "Say [redacted]" in page
    assert SECRET not in f"{wandb.rows} {wandb.run.summary}"


def test_a_run_that_an_error_ends_has_its_report_too(wandb: FakeWandb, tmp_path: Path) -> None:
    refuses = raising(lambda number: dspy.LMAuthError("no such key") if number > 40 else None)
    with dspy.context(lm=refuses), pytest.raises(RunAbortedError):
        compiled(90, use_wandb=True, log_dir=str(tmp_path))
    [page] = wandb.of("report")
    assert "aborted" in page
    assert wandb.ended


def test_mlflow_has_the_figures_the_tables_and_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gepa's tables come to mlflow only from a thread whose active run is the run."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)  # it makes a directory for runs without an experiment
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.sqlite")
    experiment = mlflow.create_experiment("runs", artifact_location=(tmp_path / "artifacts").as_uri())
    mlflow.set_experiment("runs")
    with dspy.context(lm=task_lm()):
        stats = compiled(100, use_mlflow=True, log_dir=str(tmp_path / "run")).async_stats
    client = mlflow.MlflowClient()
    [run] = client.search_runs([experiment])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["tokens/task"] == stats.task_tokens
    names = {one.path for one in client.list_artifacts(run.info.run_id)}
    assert names >= {"report", "candidate_tree", "valset_scores.json"}
    [page] = client.list_artifacts(run.info.run_id, "report")
    assert "<title>AsyncGEPA" in Path(client.download_artifacts(run.info.run_id, page.path)).read_text("utf-8")
