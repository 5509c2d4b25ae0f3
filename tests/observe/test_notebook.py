"""The table in a notebook: one output that is drawn again now and then, and at the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import dspy
import nbformat
import pytest
from nbclient import NotebookClient

from dspy_flashevolve.observe import live
from dspy_flashevolve.observe.live import REDRAW_SECONDS, LiveTable, Output
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

with dspy.context(lm=task_lm(), callbacks=[LiveTable()]):
    program = compiled(60)
"""


@pytest.mark.long
def test_a_notebook_that_is_saved_has_one_output_with_the_last_state() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    NotebookClient(notebook, kernel_name="python3").execute()
    outputs = notebook.cells[0].outputs
    shown = [output["data"]["text/plain"] for output in outputs if output.output_type == "display_data"]
    assert ["AsyncGEPA: finished" in text for text in shown] == [True]
    assert not [output for output in outputs if output.output_type == "stream" and "rollouts/s" in output.text]
