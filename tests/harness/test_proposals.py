"""Proposals, from the tools of a proposer to what it submits: odd arguments, odd replies, half emojis, no harness."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import dspy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve import ConfigurationError, Limits, RunAbortedError
from dspy_flashevolve.engine.errors import RolloutUnresolvedError, TransientError
from dspy_flashevolve.harness.archive import (
    Archive,
    Draft,
    DraftError,
    Evaluated,
    Failed,
    Trial,
    draft_of,
    drafts_in,
    pareto_front,
    sources_in,
    trace_text,
)
from dspy_flashevolve.harness.proposing import ProposerTools, agent_of
from dspy_flashevolve.sandbox.contract import Failure, LmRecord, Outcome
from tests.fakes import fake_lm
from tests.harness.child import SOURCE, Learner, reply, run
from tests.sandbox.worlds import GOOD

OTHER = GOOD.replace("Good", "Other")
HALF_EMOJI = "\ud83d"


async def scored(draft: Draft, number: int) -> Trial:
    call = LmRecord([{"role": "user", "content": "x"}], [f"cut off {HALF_EMOJI}"], 1, 1)
    return Trial(f"train {number}", {"question": "?"}, Outcome({"answer": "a"}, calls=(call,)), 1.0)


def archive_of(log_dir: Path | None = None) -> Archive:
    """Two candidates and one that failed, with names that mean harm."""
    archive = Archive(log_dir)
    for number, name in enumerate(["../../../etc/cron.d/evil", "better"]):
        call = LmRecord([{"role": "user", "content": "x"}], [HALF_EMOJI], 3, 1)
        trace = Trial(
            "train 0", {"question": "?"}, Outcome({"answer": "a"}, calls=(call,)), 0.5, "Missed: Rule 01", 1.0
        )
        draft = Draft(GOOD, "Good", name=name, hypothesis="because " * 60)
        archive.add(Evaluated(draft, (0.2 + number / 2,), (1.0,), traces=(trace,)))
    archive.add(Failed(Draft(GOOD, "Good", name="/etc/passwd"), Failure("time", "too slow")))
    return archive


def tools_with(
    sources: Mapping[str, str],
    run: Callable[[Draft, int], Awaitable[Trial]] = scored,
    log_dir: Path | None = None,
    most: int = 6,
) -> ProposerTools:
    tools = ProposerTools(archive_of(log_dir), ["question"], run, 3, most)
    tools.drafts.update({f"drafts/{name}.py": source for name, source in sources.items()})
    return tools


def is_valid(text: str) -> bool:
    return text.encode("utf-8", "replace").decode() == text


# Submitting.


def submitted(text: str, **sources: str) -> list[str]:
    drafts, _ = drafts_in(sources_in(text, tools_with(sources).drafts), 2, ["question"], [], "")
    return [draft.source for draft in drafts]


@pytest.mark.parametrize("line", [
    "draft: b", "draft: drafts/b.py", "draft: b.py", "**draft: b**", "**Draft:** b", "draft: b\r", 'draft: "b"',
    "1. draft: b", "2) `draft: b`", "Draft: b.", "- draft : 'b'", "> draft: b", "+ Drafts: b", "draft:b\r\n",
])  # fmt: skip
def test_a_line_submits_a_draft_however_it_is_dressed_up(line: str) -> None:
    assert submitted(f"The better one:\n{line}\nIt votes.", a=OTHER, b=GOOD) == [GOOD]


def test_a_draft_may_hold_fences_and_a_module_a_line_that_looks_like_a_submission() -> None:
    fenced = GOOD.replace("class", 'PROMPT = """Answer as\n```json\n{}\n```\n"""\nclass')
    assert submitted("draft: a", a=fenced) == [fenced]
    own = GOOD.replace("class", 'PROMPT = """Say\ndraft: a\n"""\nclass')
    assert submitted(f"```python\n{own}```", a=OTHER) == [own]


@pytest.mark.parametrize("text", ["draft: c", "I submit it.\n- Draft: `c`.", "drafts: c, d"])
def test_a_reply_that_names_only_drafts_that_do_not_exist_is_told_which_there_are(text: str) -> None:
    with pytest.raises(DraftError, match="There is no draft 'c'; there are: a, b"):
        submitted(text, a=GOOD, b=OTHER)
    assert submitted(f"{text}\ndraft: b", a=GOOD, b=OTHER) == [OTHER]


@pytest.mark.parametrize("text", [
    "```json\n{}\n```\nNow\n```python\nx\n```", "```sh\nls\n```\n```\nx\n```", "~~~python\nx\n~~~",
    "```python3\nx\n```", "```Py\nx\n```", "``` python title=a\nx\n```", "````python\nx\n````",
    "```python\r\nx\n```\r\n", "1. This:\n   ```python\n   x\n   ```", "```py3\nx\n`````",
    "```text\n~~~\n```\n```python\nx\n```",
    "~~~text\n```python\n~~~\n```python3.11\nx\n```",
])  # fmt: skip
def test_the_python_blocks_of_a_reply_are_found_among_others(text: str) -> None:
    assert sources_in(text) == ["x\n"]


def test_a_fence_inside_of_a_block_does_not_close_it() -> None:
    for inner in ("```", "    ````", "~~~~", "```json"):
        assert sources_in(f"````python\nx\n{inner}\ny\n````") == [f"x\n{inner}\ny\n"]


# Tools.


def called(tools: ProposerTools, *calls: tuple[str, dict[str, Any]], thought: str = "t") -> list[str]:
    """What the default agent is shown of its calls, and last the prompt of its answer."""
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        done = prompt.count("[[ ## tool_name_")
        if "next_tool_name" not in prompt:
            return reply(reasoning="r", modules="draft: a")
        name, given = calls[done] if done < len(calls) else ("finish", {})
        return reply(next_thought=thought, next_tool_name=name, next_tool_args=json.dumps(given))

    inputs = dict.fromkeys(("task", "interface", "archive_overview", "direction", "taken", "count"), "1")
    with dspy.context(lm=fake_lm(answer)):
        result = asyncio.run(agent_of(tools.tools(), 12).acall(**inputs))
    assert result.modules == "draft: a"
    return [result.trajectory[f"observation_{number}"] for number in range(len(calls) + 1)] + prompts[-1:]


@pytest.mark.parametrize(("name", "given", "expected"), [
    ("write_draft", {"name": None, "source": None}, "source"),
    ("run_draft", {"name": "a", "example": "0"}, "score: 1"), ("run_draft", {"name": "a", "example": 0}, "score: 1"),
    ("run_draft", {"name": "drafts/a.py", "example": 1}, "score: 1"),
    ("run_draft", {"name": "a", "example": None}, "0 to 2"), ("run_draft", {"name": "a", "example": -1}, "0 to 2"),
    ("run_draft", {"name": "a", "example": [1]}, "0 to 2"),
    ("list_files", {"folder": None}, "candidates/0000/about.txt"),
    ("read_file", {"path": "candidates/0000/source.py", "page": None}, "class Good"),
    ("read_file", {"path": "candidates/0000/source.py", "page": "2"}, "class Good"),
    ("list_files", {}, "failed/0000/about.txt"),
    ("read_file", {"path": "failed/0000/about.txt"}, "failed: time: too slow"),
    ("search_files", {"text": "missed: rule"}, "candidates/0000/traces/0.txt"),
    ("search_files", {"text": "name", "folder": None}, "about.txt"), ("search_files", {"text": None}, "No line"),
])  # fmt: skip
def test_the_default_agent_is_told_what_was_expected(name: str, given: dict[str, Any], expected: str) -> None:
    told, _, _ = called(tools_with({"a": GOOD}), (name, given))
    assert expected in told
    assert "Traceback" not in told
    assert str(Path(__file__).parents[2]) not in told
    assert len(told) < 600


def test_whatever_half_of_an_emoji_comes_from_the_prompts_of_an_agent_are_valid() -> None:
    calls = (
        ("list_files", {"folder": HALF_EMOJI}),
        ("run_draft", {"name": "a", "example": 0}),
        ("read_file", {"path": "candidates/0000/traces/0.txt"}),
        ("write_draft", {"name": "b", "source": f"x = '{HALF_EMOJI}'"}),
        ("read_file", {"path": "drafts/b.py"}),
        ("search_files", {"text": HALF_EMOJI}),
    )
    *shown, prompt = called(tools_with({"a": GOOD}), *calls, thought=HALF_EMOJI)
    assert all(map(is_valid, [*shown, prompt]))
    assert "cut off ?" in shown[1]
    assert not is_valid(trace_text(asyncio.run(scored(Draft("", ""), 0))))


# Runs of drafts.


@pytest.mark.parametrize("fault", [TransientError("503"), RolloutUnresolvedError("no answer")])
def test_a_run_that_the_providers_fault_prevented_is_not_used_up(fault: Exception) -> None:
    faults = [fault] * 8

    async def failing(draft: Draft, number: int) -> Trial:
        if faults:
            raise faults.pop()
        return await scored(draft, number)

    async def main() -> list[str]:
        tools = tools_with({"a": GOOD}, failing)
        return [await tools.run_draft("a", 0) for _ in range(9)]

    told = asyncio.run(main())
    assert all("It was not run" in text for text in told[:8])
    assert "(5 runs left)" in told[8]


def test_a_provider_that_refuses_for_good_while_a_draft_runs_ends_the_search(tmp_path: Path) -> None:
    source = SOURCE.format(number=12345)

    class Refused(Learner):
        async def run(self, job: Any, call_lm: Any) -> Outcome:
            if job.source == source:
                raise RunAbortedError("the key was refused")
            return await super().run(job, call_lm)

    calls = iter([("write_draft", {"name": "a", "source": source}), ("run_draft", {"name": "a", "example": 0})])

    def proposes(prompt: str) -> str:
        if "next_tool_name" not in prompt:
            return reply(reasoning="r", modules=f"```python\n{SOURCE.format(number=1)}```")
        name, given = next(calls, ("finish", {}))
        return reply(next_thought="t", next_tool_name=name, next_tool_args=json.dumps(given))

    with pytest.raises(RunAbortedError, match="the key was refused") as caught:
        run(tmp_path, "lockstep", 3, proposer_lm=fake_lm(proposes), sandbox=Refused(lambda name, entry: None))
    assert caught.value.best_program is not None


# What is no harness, and the front.

POINTS = st.dictionaries(
    st.integers(0, 30), st.tuples(st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.sampled_from([1.0, 2.0, 5.0])), min_size=1
)


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


@pytest.mark.parametrize(
    "path", ["../secret", "/etc/passwd", "candidates/../../x", "", "\0", "candidates/0000", 7, None]
)
def test_no_path_leads_out_of_the_archive(path: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("outside")

    async def main() -> None:
        tools = tools_with({}, log_dir=tmp_path / "log")
        assert "There is no file" in await tools.read_file(path)
        assert "outside" not in await tools.read_file(path) + await tools.list_files(path)
        assert (await tools.search_files("outside", path)).startswith("No line holds")

    asyncio.run(main())


ANY = st.one_of(st.none(), st.integers(), st.text(max_size=30), st.lists(st.text(max_size=5), max_size=2), st.floats())
SOURCES = st.one_of(ANY, st.sampled_from([GOOD, "class X(dspy.Module):\n    pass", "import os\n" + GOOD]))


@given(st.lists(st.tuples(st.sampled_from(["write", "edit", "run"]), ANY, SOURCES, SOURCES), max_size=8), st.text())
def test_no_arguments_make_a_proposers_tools_raise_and_no_draft_runs_that_cannot(calls: list[Any], reply: str) -> None:
    ran: list[Draft] = []

    async def run(draft: Draft, number: int) -> Trial:
        ran.append(draft)
        return Trial(f"train {number}", {}, Outcome({}), 1.0)

    async def main() -> None:
        own = tools_with({}, run, most=4)
        tools = {tool.__name__: tool for tool in own.tools()}
        for kind, name, first, second in calls:
            name = name if isinstance(name, str) and name else "a"
            given = (name, first, second) if kind == "edit" else (name, first)
            assert isinstance(await tools[f"{kind}_draft"](*given), str)
        assert isinstance(await tools["read_file"]("drafts/a.py"), str)
        assert all(path.startswith("drafts/") and path.count("/") == 1 and ".." not in path for path in own.drafts)
        assert sources_in(reply, own.drafts) == ([reply] if reply.strip() else [])

    asyncio.run(main())
    assert len(ran) <= 4
    assert all(draft.class_name for draft in ran)
