"""The parts that need no process: the wire, the front, drafts, directions, the archive as files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve import ConfigurationError, Limits
from dspy_flashevolve.harness.archive import (
    Archive,
    Draft,
    DraftError,
    Evaluated,
    Failed,
    Trial,
    draft_of,
    pareto_front,
    sources_in,
    tools_of,
)
from dspy_flashevolve.harness.proposing import Drafts
from dspy_flashevolve.sandbox.contract import Failure, LmRecord, Outcome, WireError, decode
from tests.sandbox.worlds import GOOD

POINTS = st.dictionaries(
    st.integers(0, 30), st.tuples(st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.sampled_from([1.0, 2.0, 5.0])), min_size=1
)


@given(st.binary())
def test_no_bytes_make_the_reader_raise_anything_but_its_own_error(payload: bytes) -> None:
    try:
        assert isinstance(decode(payload), dict)
    except WireError:
        return


def dominates(first: tuple[float, float], other: tuple[float, float]) -> bool:
    """At least as good in score and cost, and better in one."""
    return first[0] >= other[0] and first[1] <= other[1] and first != other


@given(POINTS)
def test_nothing_dominates_the_front_and_something_on_it_is_as_good_as_anything(points: dict[int, Any]) -> None:
    front = pareto_front(points)
    assert not any(dominates(point, points[number]) for number in front for point in points.values())
    on_it = [points[number] for number in front]
    assert all(any(dominates(other, point) or other == point for other in on_it) for point in points.values())
    assert len(set(on_it)) == len(on_it)
    assert points[front[0]][0] == max(score for score, _ in points.values())


@pytest.mark.parametrize(("source", "message"), [
    ("def f(:", "not Python"), ("x = 1", "0 subclasses"), (GOOD + GOOD.replace("Good", "Other"), "2 subclasses"),
    ("class A(dspy.Module):\n    pass", "no method forward"), ("import os\n" + GOOD, "imports os"),
    ("from . import x\n" + GOOD, "relative import"), ("import os.path as json\n" + GOOD, "imports os.path"),
    ("class A(dspy.Module):\n    def forward(self, other): ...", "inputs question"), ("#" * 200_000, "characters"),
    ("(" * 5000, "not Python"), ("x = '\0'", "not Python"),
])  # fmt: skip
def test_what_is_no_harness_is_refused_with_the_reason(source: str, message: str) -> None:
    with pytest.raises(DraftError, match=message):
        draft_of(source, ["question"])


def test_a_draft_says_what_it_is_and_names_only_parents_that_there_are() -> None:
    source = f"# name: votes\n# hypothesis: three votes beat one\n# based on: 1, 7 and 99\n{GOOD}"
    draft = draft_of(source, ["question"], range(8), "votes")
    assert (draft.name, draft.hypothesis, draft.parents) == ("votes", "three votes beat one", (1, 7))
    assert (draft.class_name, draft.learns, draft.direction) == ("Good", False, "votes")
    assert draft_of(GOOD + "\n    def learn(self, batch): ...", ["question"]).learns


@pytest.mark.parametrize("limits", [{"seconds": 0}, {"cpu_seconds": 1.5}, {"lm_calls": -1}, {"memory_bytes": True},
                                    {"seconds": float("nan")}, {"tasks": "8"}])  # fmt: skip
def test_limits_that_cannot_work_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"Limits\\({next(iter(limits))}="):
        Limits(**limits)


def call(tokens: int) -> LmRecord:
    return LmRecord([{"role": "user", "content": "x"}], ["y"], tokens, 1)


def candidate(name: str, score: float, cost: float = 1.0) -> Evaluated:
    trace = Trial("train 0", {"question": "?"}, Outcome({"answer": "a"}, calls=(call(3),)), 0.5, "Missed: Rule 01", 1.0)
    return Evaluated(Draft(GOOD, "Good", name=name, hypothesis="because"), (score,), (cost,), traces=(trace,))


def archive_of(log_dir: Path | None = None) -> Archive:
    archive = Archive(log_dir)
    archive.add(candidate("../../../etc/cron.d/evil", 0.2))
    archive.add(candidate("better", 0.8, 3.0))
    archive.add(Failed(Draft(GOOD, "Good", name="/etc/passwd"), Failure("time", "too slow")))
    return archive


def test_a_proposer_lists_reads_and_searches() -> None:
    list_files, read_file, search_files = tools_of(archive_of())
    assert "candidates/0001/source.py" in list_files("candidates/0001")
    assert "failed/0000/about.txt" in list_files()
    assert "class Good" in read_file("candidates/0001/source.py")
    assert "candidates/0000/traces/0.txt" in search_files("missed: rule")
    assert "failed: time: too slow" in read_file("failed/0000/about.txt")


@pytest.mark.parametrize(
    "path", ["../secret", "/etc/passwd", "candidates/../../x", "", "\0", "candidates/0000", 7, None]
)
def test_no_path_leads_out_of_the_archive(path: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("outside")
    list_files, read_file, search_files = tools_of(archive_of(tmp_path / "log"))
    assert "There is no file" in read_file(path)
    assert "outside" not in read_file(path) + list_files(path)
    assert search_files("outside", path).startswith("No line holds")


ANY = st.one_of(st.none(), st.integers(), st.text(max_size=30), st.lists(st.text(max_size=5), max_size=2), st.floats())
SOURCES = st.one_of(ANY, st.sampled_from([GOOD, "class X(dspy.Module):\n    pass", "import os\n" + GOOD]))


@given(st.lists(st.tuples(st.sampled_from(["write", "edit", "run"]), ANY, SOURCES, SOURCES), max_size=8), st.text())
def test_no_arguments_make_a_proposers_tools_raise_and_no_draft_runs_that_cannot(calls: list[Any], reply: str) -> None:
    ran: list[Draft] = []

    async def run(draft: Draft, number: int) -> Trial:
        ran.append(draft)
        return Trial(f"train {number}", {}, Outcome({}), 1.0)

    async def main() -> None:
        drafts = Drafts(["question"], run, 3, 4)
        tools = {tool.__name__: tool for tool in drafts.tools(archive_of())}
        for kind, name, first, second in calls:
            name = name if isinstance(name, str) and name else "a"
            given = (name, first, second) if kind == "edit" else (name, first)
            assert isinstance(await tools[f"{kind}_draft"](*given), str)
        assert isinstance(await tools["read_file"]("drafts/a.py"), str)
        assert all(path.startswith("drafts/") and path.count("/") == 1 and ".." not in path for path in drafts.files)
        assert sources_in(reply, drafts.files) == ([reply] if reply.strip() else [])

    asyncio.run(main())
    assert len(ran) <= 4
    assert all(draft.class_name for draft in ran)
