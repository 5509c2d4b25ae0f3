"""The report: one file with the figures of the journal, which needs no network and which a browser opens as it is."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dspy_flashevolve.engine.events import (
    ActorLost,
    Integrated,
    RequestFinished,
    RequestTurnedAway,
    RolloutTimedOut,
    StageVisited,
)
from dspy_flashevolve.observe.analysis import example_scores, totals_of
from dspy_flashevolve.observe.history import read
from dspy_flashevolve.observe.report import report
from tests.observe.runs import Session

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "</code><script>alert('x')</script><img src=x onerror=alert(1)>&amp;"


class Page(HTMLParser):
    """What a test reads of the page: elements, links, cards and tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: set[str] = set()
        self.targets: list[str] = []
        self.attributes: set[str] = set()
        self.feed(text)
        self.cards = {
            unescape(name): unescape(value) for name, value in re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text)
        }
        self.rows = [
            re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)
        ]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        attributes = dict(attrs)
        self.attributes |= attributes.keys()
        self.ids |= {attributes["id"]} if attributes.get("id") else set()
        self.targets += [str(attributes[name]) for name in ("href", "src") if name in attributes]


def of(directory: Path) -> tuple[str, Page]:
    text = report(read(directory, replies=True))
    return text, Page(text)


def test_the_figures_of_the_page_are_those_of_the_run(counted: tuple[Path, Any]) -> None:
    directory, program = counted
    stats, details = program.async_stats, program.detailed_results
    _, page = of(directory)
    assert page.cards["seed"] == f"{details.val_aggregate_scores[0]:.4f}"
    assert page.cards[f"best (candidate {details.best_idx})"] == f"{max(details.val_aggregate_scores):.4f}"
    assert page.cards["candidates accepted"] == str(len(stats.commits))
    assert page.cards["metric calls of 90"] == f"{stats.metric_calls:,}"
    assert page.cards["steps"] == f"{stats.steps:,}"
    assert page.cards["tokens"] == f"{sum(stats.tokens_by_stage.values()):,}"
    assert page.cards["dollars"] == "unknown"
    by_name = {row[0]: row for row in page.rows if len(row) == 8}
    assert by_name["task"][3] == f"{stats.task_tokens:,}"
    assert by_name["reflection"][3] == f"{stats.reflection_tokens:,}"
    for name, requests in stats.requests_by_stage.items():
        assert by_name[name][1] == f"{requests:,}"
        assert by_name[name][3] == f"{stats.tokens_by_stage[name]:,}"
    reasons = {unescape(row[0]): int(row[1]) for row in page.rows if len(row) == 2}
    assert reasons == stats.end_reasons


def test_a_line_of_the_best_prompt_leads_to_its_step_with_its_effect(changed: tuple[Path, Any]) -> None:
    directory, program = changed
    text, page = of(directory)
    told = {change.part.strip(): change for change in program.async_stats.changes}
    best = program.predictors()[0].signature.instructions
    lines = [line for line in best.splitlines() if line in told]
    assert lines
    for line in lines:
        change = told[line]
        assert f"step {change.step}</a> {change.effect:+.3f} ± {change.error:.3f}" in text
        assert f"step-{change.step}" in page.ids


def test_the_page_needs_nothing_else_and_all_its_links_lead_somewhere(counted: tuple[Path, Any]) -> None:
    text, page = of(counted[0])
    assert "script" not in page.tags
    assert [target for target in page.targets if not target.startswith("#")] == ["data:,"]
    assert {target[1:] for target in page.targets if target.startswith("#")} <= page.ids
    assert "http" not in re.sub(r"<meta http-equiv[^>]*>", "", text)
    assert "url(" not in text


def hostile(directory: Path) -> None:
    """A run all of whose texts try to be markup."""
    with Session(directory) as session:
        texts = {HOSTILE: f"{HOSTILE}\nmore"}
        session.store.record_commit(0, 0, 0, {HOSTILE: f"gone {HOSTILE}\nmore"}, [], {HOSTILE: 0.25}, 0.25)
        session.opens(1, texts, 1)
        session.ran(1, texts, 1, 0.5, stage=HOSTILE)
        session.tells(
            RequestFinished(1.0, 1, "propose", 0.5, 5, 0.1, HOSTILE),
            RolloutTimedOut(1.0, 1, HOSTILE, 1.0, 1),
            RequestTurnedAway(1.0, HOSTILE, HOSTILE),
            ActorLost(1.0, HOSTILE),
            Integrated(1.0, 1, 0, (1,), ((1, HOSTILE, HOSTILE),)),
        )
        child = {HOSTILE: f"{HOSTILE}\nmore\nnew {HOSTILE}"}
        session.store.record_reply(1, "propose", "0", json.dumps({"texts": child, "feedback": [HOSTILE]}), 1, 0.0)
        session.store.record_commit(1, 1, 1, child, [0], {HOSTILE: 0.75}, 0.75)
        session.store.record_end(1, "rejected", HOSTILE)
        session.ends("failed", HOSTILE)


def test_texts_of_a_run_are_no_markup(tmp_path: Path) -> None:
    hostile(tmp_path)
    text, page = of(tmp_path)
    assert not {"script", "img"} & set(page.tags)
    for part in ("The best prompt", "<svg", 'class="scores"', "It worked on these"):
        assert part in text
    assert text.count("&lt;script&gt;") > 15
    assert not {name for name in page.attributes if name.startswith("on")}


def test_the_best_prompt_stands_there_as_a_whole(changed: tuple[Path, Any]) -> None:
    directory, program = changed
    text, _ = of(directory)
    [shown] = re.findall(r'<pre class="whole">(.*?)</pre>', text, re.DOTALL)
    assert unescape(shown) == program.predictors()[0].signature.instructions


def test_scores_by_example_mark_the_pareto_front_and_leave_out_who_is_not_on_it(tmp_path: Path) -> None:
    scores = [(0.2, 0.9, 0.1), (0.8, 0.1, 0.1), (0.1, 0.1, 0.2), (0.7, 0.8, 0.15)]
    with Session(tmp_path) as session:
        for index, values in enumerate(scores):
            by_example = {f"{example}": value for example, value in enumerate(values)}
            parents = [0] if index else []
            session.store.record_commit(
                index, index, index, {"answer": f"{index}"}, parents, by_example, sum(values) / 3
            )
    history = read(tmp_path, replies=True)
    text = report(history)
    marked = re.findall(r'<td class="win" title="candidate (\d), example (\d)">([\d.]+)<', text)
    assert marked == [("0", "1", "0.9"), ("1", "0", "0.8"), ("2", "2", "0.2")]
    short = example_scores(history, 3, 2)
    assert [(candidate.index, wins) for candidate, _, wins in short.rows] == [(0, 1), (1, 1), (3, 0)], (
        "the best, and the front"
    )
    assert short.left_out == (1, 1)


@pytest.fixture(scope="module")
def large_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """5,000 rollouts, 300 steps with long feedback, 120 candidates with long prompts."""
    rng, directory = random.Random(0), tmp_path_factory.mktemp("large")
    texts = {"answer": "\n".join(f"- rule {line}: {rng.random()}" for line in range(60))}
    with Session(directory) as session:
        session.store.record_commit(0, 0, 0, texts, [], {}, 0.1)
        for step in range(300):
            session.opens(step, texts, *range(10))
            for example in range(16):
                session.ran(step, texts, example, rng.random(), tokens=900, cost_dollars=0.001)
            session.tells(
                StageVisited(3.0 * step + 2, step, "rollout", 3.0 * step, 3.0 * step + 0.5),
                RequestFinished(
                    3.0 * step + 3, step, "propose", 1.0, 4000, 0.01, "no JSON " * 50 if step % 9 == 0 else ""
                ),
            )
            lines = texts["answer"].splitlines()
            child = {"answer": "\n".join([*lines[:150], f"- rule of step {step}: {rng.random()} " + "so that " * 10])}
            session.store.record_reply(
                step, "propose", "0", json.dumps({"texts": child, "feedback": ["too short " * 100] * 8}), 1, 0.0
            )
            if step % 5 < 2:
                texts = child
                index = len([earlier for earlier in range(step + 1) if earlier % 5 < 2])
                session.store.record_commit(step, index, index, texts, [index - 1], {}, 0.1 + step / 1000)
            session.store.record_end(step, "committed" if step % 5 < 2 else "rejected", f"reason {step % 7}")
        for example in range(200):
            session.ran(299, texts, example, 0.5, stage="validate", split="val", tokens=900, cost_dollars=0.001)
        session.ends("finished")
    return directory


@pytest.mark.long
def test_the_report_of_a_run_with_5000_rollouts_is_smaller_than_5_mb(large_run: Path) -> None:
    history = read(large_run)
    assert totals_of(history).by_role["task"].requests == 5000
    text, page = of(large_run)
    assert len(text.encode()) < 5_000_000
    assert page.cards["metric calls"] == "5,000"
    assert page.cards["dollars"] == "8.0000"


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.parametrize("width", [390, 1300])
def test_a_browser_opens_the_page_without_a_console_error(width: int, large_run: Path, tmp_path: Path) -> None:
    hostile(tmp_path / "hostile")
    for name, directory in (("large", large_run), ("hostile", tmp_path / "hostile")):
        page, profile = tmp_path / f"{name}.html", tmp_path / f"profile of {name}"
        page.write_text(of(directory)[0], encoding="utf-8")
        opened = subprocess.run(
            [
                str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
                f"--user-data-dir={profile}", f"--window-size={width},900", "--enable-logging=stderr", "--dump-dom",
                page.as_uri(),
            ],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "Failures and retries" in opened.stdout
        assert "CONSOLE" not in opened.stderr
        assert "<script" not in opened.stdout
