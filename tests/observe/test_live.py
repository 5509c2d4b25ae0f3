"""The table that takes the bar's place."""

from __future__ import annotations

import io
import logging
from typing import Any

import dspy
import pytest
from rich.console import Console

from dspy_flashevolve.observe.live import LiveTable
from tests.contract.surface import compiled
from tests.fakes import Chain, task_lm


def terminal() -> tuple[LiveTable, io.StringIO]:
    """A table in a terminal, and what it writes there."""
    written = io.StringIO()
    return LiveTable(0.05, Console(file=written, force_terminal=True, width=120)), written


def rows(written: io.StringIO) -> dict[str, list[str]]:
    """First word -> the others, as they were drawn last."""
    lines = [line.split() for line in Console(file=io.StringIO()).render_str(written.getvalue()).plain.splitlines()]
    return {line[0]: line[1:] for line in lines if line}


def test_its_last_figures_are_those_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    table, written = terminal()
    with dspy.context(lm=task_lm(), callbacks=[table]):
        program = compiled(150)
    stats, drawn = program.async_stats, rows(written)
    for stage, count in stats.requests_by_stage.items():
        assert drawn[stage][:4] == ["0", "0", str(count), str(stats.tokens_by_stage[stage])]
    text = written.getvalue()
    assert f"metric calls {stats.metric_calls} of 150" in text
    assert f"best score {stats.best_score:.4f}, seed {stats.seed_score:.4f}, {len(stats.commits)} candidates" in text
    assert "AsyncGEPA: finished" in text


def test_it_takes_the_place_of_the_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    with dspy.context(lm=task_lm(), callbacks=[terminal()[0]]):
        compiled(40)
    assert "rollouts/s" not in capsys.readouterr().err


def test_what_is_logged_and_printed_stands_above_it() -> None:
    table, written = terminal()

    class Talks(Chain):
        async def aforward(self, question: str) -> Any:
            print("albatross")
            logging.getLogger("dspy").warning("pelican")
            return await super().aforward(question)

    with dspy.context(lm=task_lm(), callbacks=[table]):
        compiled(40, Talks())
    assert "albatross" in written.getvalue()
    assert written.getvalue().rindex("albatross") < written.getvalue().rindex("slot seconds")
