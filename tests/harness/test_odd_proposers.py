"""What a proposer does that nobody asked for: odd arguments, odd replies, half emojis, many calls at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import dspy
import pytest

from dspy_flashevolve import RunAbortedError
from dspy_flashevolve.engine.errors import RolloutUnresolvedError, TransientError
from dspy_flashevolve.harness.archive import (
    Archive,
    Draft,
    DraftError,
    Evaluated,
    Trial,
    drafts_in,
    sources_in,
    trace_text,
)
from dspy_flashevolve.harness.proposing import Drafts, agent_of
from dspy_flashevolve.sandbox.contract import LmRecord, Outcome
from tests.fakes import fake_lm
from tests.harness.child import SOURCE, Learner, reply, run
from tests.sandbox.worlds import GOOD

OTHER = GOOD.replace("Good", "Other")
HALF_EMOJI = "\ud83d"


async def scored(draft: Draft, number: int) -> Trial:
    call = LmRecord([{"role": "user", "content": "x"}], [f"cut off {HALF_EMOJI}"], 1, 1)
    return Trial(f"train {number}", {"question": "?"}, Outcome({"answer": "a"}, calls=(call,)), 1.0)


def drafts_with(sources: Mapping[str, str], run: Callable[[Draft, int], Awaitable[Trial]] = scored) -> Drafts:
    drafts = Drafts(["question"], run, 3, 6)
    drafts.files.update({f"drafts/{name}.py": source for name, source in sources.items()})
    return drafts


def archive_of(count: int, log_dir: Path | None = None) -> Archive:
    archive = Archive(log_dir)
    for number in range(count):
        draft = Draft(f"# {number}", "A", name=f"name {number}", hypothesis="because " * 60)
        trace = Trial("train 0", {}, Outcome({}, calls=(LmRecord([], [HALF_EMOJI], 1, 1),)), 0.5)
        archive.add(Evaluated(draft, (number * 7 % count / count,), (float(number),), traces=(trace,)))
    return archive


def is_valid(text: str) -> bool:
    return text.encode("utf-8", "replace").decode() == text


# Submitting.


def submitted(text: str, **sources: str) -> list[str]:
    drafts, _ = drafts_in(sources_in(text, drafts_with(sources).files), 2, ["question"], [], "")
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


def called(drafts: Drafts, archive: Archive, *calls: tuple[str, dict[str, Any]], thought: str = "t") -> list[str]:
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
        result = asyncio.run(agent_of(drafts.tools(archive), 12).acall(**inputs))
    assert result.modules == "draft: a"
    return [result.trajectory[f"observation_{number}"] for number in range(len(calls) + 1)] + prompts[-1:]


@pytest.mark.parametrize(("name", "given", "expected"), [
    ("write_draft", {"name": None, "source": None}, "source"),
    ("run_draft", {"name": "a", "example": "0"}, "score: 1"), ("run_draft", {"name": "a", "example": 0}, "score: 1"),
    ("run_draft", {"name": "drafts/a.py", "example": 1}, "score: 1"),
    ("run_draft", {"name": "a", "example": None}, "0 to 2"), ("run_draft", {"name": "a", "example": -1}, "0 to 2"),
    ("run_draft", {"name": "a", "example": [1]}, "0 to 2"),
    ("list_files", {"folder": None}, "candidates/0000/about.txt"),
    ("read_file", {"path": "candidates/0000/source.py", "page": None}, "# 0"),
    ("read_file", {"path": "candidates/0000/source.py", "page": "2"}, "# 0"),
    ("search_files", {"text": "name", "folder": None}, "about.txt"), ("search_files", {"text": None}, "No line"),
])  # fmt: skip
def test_the_default_agent_is_told_what_was_expected(name: str, given: dict[str, Any], expected: str) -> None:
    told, _, _ = called(drafts_with({"a": GOOD}), archive_of(2), (name, given))
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
    *shown, prompt = called(drafts_with({"a": GOOD}), archive_of(1), *calls, thought=HALF_EMOJI)
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
        drafts = drafts_with({"a": GOOD}, failing)
        return [await drafts.run_draft("a", 0) for _ in range(9)]

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
