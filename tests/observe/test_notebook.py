"""The bar and the table in a notebook: one output that is drawn again now and then, and at the end."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import dspy
import nbformat
import pytest
from nbclient import NotebookClient
from tqdm.std import tqdm

from dspy_flashevolve.observe import live, progress
from dspy_flashevolve.observe.live import LiveTable
from dspy_flashevolve.observe.progress import REDRAW_SECONDS, Output
from tests.contract.surface import compiled
from tests.fakes import task_lm


class FakeDisplay:
    """IPython's ``display``, and the handle that it gives: keeps what it was to show."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.outputs = 0

    def __call__(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        self.outputs += 1
        self.update(data, raw=True)
        return SimpleNamespace(update=self.update)

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        self.shown.append(data["text/plain"])


class Clock:
    """Goes on by a step each time that it is read."""

    def __init__(self, step: float) -> None:
        self.now, self.step, self.read = 0.0, step, 0

    def __call__(self) -> float:
        self.read += 1
        self.now += self.step
        return self.now


def test_an_output_is_drawn_again_no_sooner_than_after_two_seconds_and_at_the_end() -> None:
    display, clock = FakeDisplay(), Clock(0.125)
    output = Output(display, clock)
    for number in range(64):  # as many as there were in 8 seconds
        output.draw(lambda number=number: f"drawing {number}")
    assert display.shown == ["drawing 0", "drawing 16", "drawing 32", "drawing 48"]
    output.draw(lambda: "the end", is_last=True)
    assert display.shown[-1] == "the end"
    assert display.outputs == 1


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeDisplay, Clock]:
    """A notebook, whose clock goes on by a twentieth of a second with each event."""
    display, clock = FakeDisplay(), Clock(0.05)
    monkeypatch.setattr(live, "kernel_display", lambda: display)
    monkeypatch.setattr(live, "Output", lambda shows: Output(shows, clock))
    return display, clock


def test_the_bar_of_a_notebook_without_widgets_is_one_output_that_ends_with_the_last_state(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display, clock = FakeDisplay(), Clock(0.05)
    bar = progress.notebook_bar()(
        output=Output(display, clock), total=400, desc="AsyncGEPA", unit="rollouts", mininterval=0, disable=False
    )
    for _ in range(300):
        bar.update()
    bar.set_postfix_str("best 0.925", refresh=False)
    bar.end()
    assert display.outputs == 1
    assert clock.read > 300, "it was to be drawn each time"
    assert len(display.shown) <= clock.now / REDRAW_SECONDS + 2
    assert display.shown[-1].startswith("AsyncGEPA: 100%")
    assert "300/300" in display.shown[-1]
    assert "best 0.925" in display.shown[-1]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("columns", [110, 119, 130])
def test_what_stands_beside_the_bar_leaves_it_room_and_keeps_the_best_score(columns: int) -> None:
    parts = {
        "phase": "about 2 min 24 s left",
        "best": "best 0.925 (seed 0.250), 12 accepted",
        "slots": "16/16 in flight",
        "tokens": "1634k tokens",
        "dollars": "$ unknown",
    }
    bar: Any = tqdm(
        total=500, desc="AsyncGEPA", unit="rollouts", ncols=columns, file=io.StringIO(), disable=False, initial=1
    )
    bar.set_postfix_str(", ".join(parts.values()))
    crowded = str(bar).split("|")[1]
    bar.set_postfix_str(progress.beside_bar(parts, bar.format_dict))
    drawn = str(bar)
    assert len(drawn) <= columns
    assert "best 0.925 (seed 0.250), 12 accepted" in drawn
    assert len(drawn.split("|")[1]) >= 10 > len(crowded)
    bar.close()


def test_without_columns_all_stands_beside_the_bar() -> None:
    assert (
        progress.beside_bar({"phase": "", "best": "best", "tokens": "9k tokens"}, {"ncols": None}) == "best, 9k tokens"
    )


def test_the_table_of_a_notebook_is_one_output_that_ends_with_the_last_state(
    notebook: tuple[FakeDisplay, Clock],
) -> None:
    display, clock = notebook
    with dspy.context(lm=task_lm(), callbacks=[LiveTable()]):
        stats = compiled(100).async_stats
    assert display.outputs == 1
    assert clock.read > 100
    assert 1 < len(display.shown) <= clock.now / REDRAW_SECONDS + 2
    assert "running" in display.shown[0]
    last = display.shown[-1]
    assert last.startswith("AsyncGEPA: finished")
    assert f"metric calls {stats.metric_calls} of 100" in last


def test_what_ends_a_run_with_an_error_is_the_last_state_too(notebook: tuple[FakeDisplay, Clock]) -> None:
    def broken(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> float:
        return float("nan")

    with dspy.context(lm=task_lm(), callbacks=[LiveTable()]), pytest.raises(Exception, match="nan"):
        compiled(metric=broken)
    assert notebook[0].shown[-1].startswith("AsyncGEPA: aborted")


CELL = """
import dspy
from dspy_flashevolve.observe.live import LiveTable
from tests.contract.surface import compiled
from tests.fakes import task_lm

with dspy.context(lm=task_lm(), callbacks=[LiveTable()] if {table} else []):
    program = compiled(60)
"""


@pytest.mark.long
@pytest.mark.parametrize(("table", "ends"), [(True, "AsyncGEPA: finished"), (False, "100%")])
def test_a_notebook_that_is_saved_has_one_output_with_the_last_state(
    table: bool, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL.format(table=table))])
    NotebookClient(notebook, kernel_name="python3").execute()
    outputs = notebook.cells[0].outputs
    shown = [output["data"]["text/plain"] for output in outputs if output.output_type == "display_data"]
    assert [ends in text for text in shown] == [True]
    assert not [output for output in outputs if output.output_type == "stream" and "rollouts/s" in output.text]
