"""What the proposer LM is asked: for new harnesses, and whether a stale one should change."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any, Literal

import dspy

from dspy_flashevolve.harness.archive import Archive
from dspy_flashevolve.harness.drafts import IMPORTABLE, Draft, DraftError, blocks_in, draft_of
from dspy_flashevolve.harness.files import Library, overview
from dspy_flashevolve.harness.reading import tools_of
from dspy_flashevolve.sandbox.limits import Limits

INTERFACE = """\
Each module is the whole source of one subclass of dspy.Module, in a Python code block of its own that begins with the
comments `# name: ...`, `# hypothesis: ...` and `# based on: ...` (numbers of the archive's candidates).
- `__init__(self)` takes no arguments. `forward` takes the input fields by name, or as **inputs, and returns
  dspy.Prediction(...) with every output field.
- `dspy` is there: dspy.Predict, dspy.ChainOfThought, dspy.Signature, dspy.settings.lm and so on. Besides, it may import
  {imports}.
- It may define `learn(self, batch)`: called with training examples before it is evaluated, each a dictionary with
  inputs, labels, prediction, score and feedback. It may change `self.memory`, which is JSON ({{}} at first) and is
  there in `forward`. Nothing else is kept from one call to the next.
- Limits of one call: {seconds:g} seconds besides LM calls, {lm_calls} LM calls with {lm_tokens} tokens in all,
  {megabytes} MB of memory. No network, no files, no processes."""


class ProposeHarness(dspy.Signature):
    """Write new versions of a program (a "harness": the code around a language model) that score higher, or score as
    high with fewer prompt tokens. Read the archive first: the sources, scores and traces of earlier candidates, with
    the feedback on their answers. Say in a hypothesis why yours will be better, and test one idea a module."""

    task: str = dspy.InputField(desc="what the program is for: its inputs and outputs")
    interface: str = dspy.InputField(desc="how a module must look")
    archive_overview: str = dspy.InputField(desc="the candidates so far, best first")
    direction: str = dspy.InputField(desc="what to look into; it is reserved for you")
    taken: str = dspy.InputField(desc="what others are looking into at this moment: leave it to them")
    count: int = dspy.InputField(desc="how many modules to write")
    modules: str = dspy.OutputField(desc="the modules, each in a Python code block of its own")


class ReviseHarness(dspy.Signature):
    """A module was written from an archive that has grown since. See what was admitted meanwhile, and whether the
    module should take something of it over before it is evaluated. Keep it where nothing is to be gained."""

    interface: str = dspy.InputField(desc="how a module must look")
    stale_module: str = dspy.InputField()
    admitted_since: str = dspy.InputField(desc="the candidates that came in since, with scores and sources")
    verdict: Literal["keep", "patch"] = dspy.OutputField()
    patched_module: str = dspy.OutputField(desc="the whole new module in a Python code block; empty to keep it")


def interface_for(limits: Limits) -> str:
    """How a module must look, in words."""
    imports = ", ".join(sorted(IMPORTABLE - {"dspy", "__future__"}))
    return INTERFACE.format(imports=imports, megabytes=limits.memory_bytes >> 20, **asdict(limits))


def proposer_of(library: Library, max_steps: int, on_loop: bool) -> dspy.Module:
    """The agent that reads the archive and writes modules.

    Args:
        max_steps: tool calls at most.
        on_loop: make it one that can be awaited: its tools are coroutine functions.
    """
    tools = tools_of(library)
    if not on_loop:
        return dspy.ReAct(ProposeHarness, tools=list(tools), max_iters=max_steps)
    agent: Any = dspy.ReAct(ProposeHarness, tools=[_awaitable(tool) for tool in tools], max_iters=max_steps)
    agent.tools["finish"] = dspy.Tool(_finish, name="finish", desc=agent.tools["finish"].desc, args={})
    return agent


def _awaitable(tool: Callable[..., str]) -> Callable[..., Awaitable[str]]:
    @functools.wraps(tool)
    async def awaitable(*args: Any, **kwargs: Any) -> str:
        return tool(*args, **kwargs)

    return awaitable


async def _finish() -> str:
    return "Completed."


def drafts_in(
    reply: str, count: int, inputs: Sequence[str], known: Sequence[int], direction: str
) -> tuple[list[Draft], list[str]]:
    """The modules in a proposer's reply, at most ``count``, and why others are none.

    Args:
        inputs: the program's input fields.
        known: numbers of the archive's candidates.
    """
    drafts: list[Draft] = []
    problems: list[str] = []
    for block in blocks_in(reply)[: 2 * count]:
        try:
            draft = draft_of(block, inputs, known, direction)
        except DraftError as error:
            problems.append(str(error))
            continue
        if len(drafts) < count and draft.source not in [one.source for one in drafts]:
            drafts.append(draft)
    return drafts, problems


def admitted_since(archive: Archive, version: int) -> str:
    """What came in since the archive had ``version`` candidates."""
    lines = [overview(archive), ""]
    for number, one in list(enumerate(archive.candidates))[version:][-4:]:
        lines += [f"Candidate {number:04d}, score {one.score:.4f}:", one.draft.source, ""]
    return "\n".join(lines)
