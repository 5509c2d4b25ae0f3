"""Proposals: the directions of proposers, what they are asked, and the agent that reads, writes and runs drafts."""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any

import anyio
import dspy

from dspy_flashevolve.engine.errors import FlashEvolveError, RunAbortedError
from dspy_flashevolve.engine.texts import without_surrogates
from dspy_flashevolve.harness.archive import (
    IMPORTABLE,
    MOST_CHARACTERS,
    PAGE_CHARACTERS,
    Archive,
    Draft,
    DraftError,
    Trial,
    draft_of,
    draft_path,
    tools_of,
    trace_text,
    unknown_draft,
    whole_number,
)  # fmt: skip
from dspy_flashevolve.sandbox.contract import Limits

DIRECTIONS = (
    "the words of the prompts: what the traces show that the instructions do not say yet",
    "what goes into the context: worked examples, retrieved or chosen for the input, and their order",
    "fewer tokens at the same score: a shorter context, fewer calls",
    "checking an answer and asking again when it fails the check",
    "several calls: a plan, a draft, a critique, a vote",
    "plain Python before and after the LM: parsing, normalizing, deciding easy cases without a call",
    "memory: what learn(batch) should keep of the training examples, and how forward uses it",
    "joining what the best candidates of the archive do differently",
)
"""The default directions: one idea each, so that proposers at work at the same time write different modules."""
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
    the feedback on their answers. Write a draft, run it on training examples, and mend it before you submit it. Say in
    a hypothesis why yours will be better, and test one idea a module."""

    task: str = dspy.InputField(desc="what the program is for: its inputs and outputs")
    interface: str = dspy.InputField(desc="how a module must look")
    archive_overview: str = dspy.InputField(desc="the candidates so far, best first")
    direction: str = dspy.InputField(desc="what to look into; it is reserved for you")
    taken: str = dspy.InputField(desc="what others are looking into at this moment: leave it to them")
    count: int = dspy.InputField(desc="how many modules to write")
    modules: str = dspy.OutputField(
        desc="for each module a line `draft: NAME`, which submits that draft, or a Python code block of its own"
    )


def interface_for(limits: Limits) -> str:
    """Return the description of how a module must look, with these limits."""
    imports = ", ".join(sorted(IMPORTABLE - {"dspy", "__future__"}))
    return INTERFACE.format(imports=imports, megabytes=limits.memory_bytes >> 20, **asdict(limits))


class Drafts:
    """The drafts of one proposal: its proposer writes, edits and runs them before it submits.

    They are texts by name, never files. They run in the sandbox, as candidates do, one after another, since all of them
    share the slot of their proposal; ``max_runs`` together, and none once the proposal's tokens are spent.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        run: Callable[[Draft, int], Awaitable[Trial]],
        examples: int,
        max_runs: int,
        is_spent: Callable[[], bool] = lambda: False,
    ) -> None:
        self.files: dict[str, str] = {}
        """Path -> source, as `tools_of` and `sources_in` read them."""
        self.aborted: RunAbortedError | None = None
        """What ends the run: raised in the run of a draft, where an agent may have caught it, as `dspy.ReAct` does."""
        self._inputs, self._run, self._examples, self._left = list(inputs), run, examples, max_runs
        self._is_spent, self._running = is_spent, anyio.Lock()

    def tools(self, archive: Archive) -> list[Callable[..., Awaitable[str]]]:
        """Return the proposer's tools, coroutine functions that return text where they are misused."""
        reading = tools_of(archive, self.files)
        return [self._guarded(tool) for tool in (*reading, self.write_draft, self.edit_draft, self.run_draft)]

    def _guarded(self, tool: Callable[..., str | Awaitable[str]]) -> Callable[..., Awaitable[str]]:
        """Return a tool that answers spent tokens with a text, and always with valid Unicode."""

        @functools.wraps(tool)
        async def guarded(*args: Any, **kwargs: Any) -> str:
            if self._is_spent():
                return "The tokens of this proposal are spent: finish, and submit what you have."
            answer = tool(*args, **kwargs)
            return without_surrogates(answer if isinstance(answer, str) else await answer)

        return guarded

    async def write_draft(self, name: Any, source: Any) -> str:
        """Write a module as a draft, the whole source; a draft of that name is replaced. Says whether it can be run."""
        path = draft_path(name)
        if not re.fullmatch(r"drafts/\w{1,40}\.py", path):
            return f"The name {str(name)[:60]!r} is no name of a draft: up to 40 letters, digits and underscores."
        if not isinstance(source, str) or len(source) > MOST_CHARACTERS:
            return f"The source must be a text of at most {MOST_CHARACTERS} characters."
        self.files[path] = source
        try:
            draft_of(source, self._inputs)
        except DraftError as error:
            return f"Written as {path}, but it cannot be run: {error}."
        return f"Written as {path}; it can be run."

    async def edit_draft(self, name: Any, old: Any, new: Any) -> str:
        """Replace a text of a draft, which must occur in it exactly once, by another."""
        source = self.files.get(draft_path(name))
        if source is None:
            return unknown_draft(name, self.files)
        if not isinstance(old, str) or not isinstance(new, str) or not old:
            return "old and new must be texts, and old not an empty one."
        if (count := source.count(old)) != 1:
            return f"The text to be replaced occurs {count} times in {str(name)!r}, expected once: name more of it."
        return await self.write_draft(name, source.replace(old, new))

    async def run_draft(self, name: Any, example: Any) -> str:
        """Run a draft on a training example, by its number from 0. Returns its LM calls, what it printed, prediction,
        score and feedback."""
        source, number = self.files.get(draft_path(name)), whole_number(example)
        if source is None:
            return unknown_draft(name, self.files)
        if number is None or number >= self._examples:
            return f"There is no example {str(example)[:60]!r}: they are 0 to {self._examples - 1}."
        try:
            draft = draft_of(source, self._inputs)
        except DraftError as error:
            return f"It cannot be run: {error}."
        async with self._running:
            if self._left < 1:
                return "All runs of this proposal are used up: finish, and submit what you have."
            try:
                trial = await self._run(draft, number)
            except RunAbortedError as error:
                self.aborted = error
                raise
            except FlashEvolveError as error:
                return f"It was not run ({type(error).__name__}), which says nothing about the draft."
            self._left -= 1
            return f"{trace_text(trial)[-PAGE_CHARACTERS:]}\n({self._left} runs left)"


class _Agent(dspy.ReAct):
    """A `dspy.ReAct` whose prompts are valid Unicode, also where thoughts or arguments of its LM are not."""

    def _format_trajectory(self, trajectory: dict[str, Any]) -> str:
        return without_surrogates(super()._format_trajectory(trajectory))


def agent_of(tools: Sequence[Callable[..., Awaitable[str]]], max_steps: int) -> dspy.Module:
    """Return the agent that reads the archive, writes drafts and runs them, with at most so many calls of its tools."""
    return _Agent(ProposeHarness, tools=list(tools), max_iters=max_steps)
