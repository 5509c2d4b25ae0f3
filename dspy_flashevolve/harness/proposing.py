"""Proposals: the directions of proposers, what they are asked, the tools that they have, and the default agent."""

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
    trace_text,
    unknown_draft,
)  # fmt: skip
from dspy_flashevolve.sandbox.contract import Limits

MOST_LINES = 60
"""Most lines that a listing or a search returns, if they fit on a page."""
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


class ProposerTools:
    """The tools of one proposal: its proposer reads the archive, and writes, edits and runs drafts before it submits.

    Drafts are texts by name, never files. They run in the sandbox, as candidates do, one after another, since all of
    them share the slot of their proposal; ``max_runs`` together, and none once the proposal's tokens are spent. Each
    tool works in any thread, and returns text where it is misused.
    """

    def __init__(
        self,
        archive: Archive,
        inputs: Sequence[str],
        run: Callable[[Draft, int], Awaitable[Trial]],
        examples: int,
        max_runs: int,
        is_spent: Callable[[], bool] = lambda: False,
    ) -> None:
        self.drafts: dict[str, str] = {}
        """Path -> source, as `sources_in` reads them."""
        self.aborted: RunAbortedError | None = None
        """What ends the run: raised in the run of a draft, where an agent may have caught it, as `dspy.ReAct` does."""
        self._archive, self._inputs, self._run, self._examples = archive, list(inputs), run, examples
        self._runs_left, self._is_spent, self._running = max_runs, is_spent, anyio.Lock()

    def tools(self) -> list[Callable[..., Awaitable[str]]]:
        """Return the tools as coroutine functions."""
        reading = self.list_files, self.read_file, self.search_files
        return [self._guarded(tool) for tool in (*reading, self.write_draft, self.edit_draft, self.run_draft)]

    def _guarded(self, tool: Callable[..., Awaitable[str]]) -> Callable[..., Awaitable[str]]:
        """Return a tool that answers spent tokens with a text, and always with valid Unicode."""

        @functools.wraps(tool)
        async def guarded(*args: Any, **kwargs: Any) -> str:
            if self._is_spent():
                return "The tokens of this proposal are spent: finish, and submit what you have."
            return without_surrogates(await tool(*args, **kwargs))

        return guarded

    def _files_under(self, folder: Any) -> list[tuple[str, str]]:
        """Return the files under a folder in order, as (path, text)."""
        prefix = str(folder or "").strip("/")
        return sorted(item for item in {**self._archive.files, **self.drafts}.items() if item[0].startswith(prefix))

    async def list_files(self, folder: Any = "") -> str:
        """List the archive's files under a folder, such as "candidates/0003"; all of them without one."""
        paths = [path for path, _ in self._files_under(folder)]
        return _page_of(paths, ": name a folder") or f"There is no file under {str(folder)[:200]!r}."

    async def read_file(self, path: Any, page: Any = 1) -> str:
        """Read a file of the archive, such as "candidates/0003/source.py"; long ones by page, from 1."""
        text = {**self._archive.files, **self.drafts}.get(str(path).strip("/"))
        if text is None:
            return f"There is no file {str(path)[:200]!r}; list_files tells which there are."
        pages = max(1, -(-len(text) // PAGE_CHARACTERS))
        number = min(max(1, _whole_number(page) or 1), pages)
        shown = text[(number - 1) * PAGE_CHARACTERS : number * PAGE_CHARACTERS]
        return shown if pages == 1 else f"(page {number} of {pages})\n{shown}"

    async def search_files(self, text: Any, folder: Any = "") -> str:
        """Find lines of the archive that hold a text, in any case; under a folder where one is given."""
        sought = str(text).lower()
        hits = [
            f"{path}:{number}: {line.strip()[:300]}"
            for path, content in self._files_under(folder)
            for number, line in enumerate(content.splitlines(), start=1)
            if sought and sought in line.lower()
        ]
        return _page_of(hits) or f"No line holds {sought[:200]!r}."

    async def write_draft(self, name: Any, source: Any) -> str:
        """Write a module as a draft, the whole source; a draft of that name is replaced. Says whether it can be run."""
        path = draft_path(name)
        if not re.fullmatch(r"drafts/\w{1,40}\.py", path):
            return f"The name {str(name)[:60]!r} is no name of a draft: up to 40 letters, digits and underscores."
        if not isinstance(source, str) or len(source) > MOST_CHARACTERS:
            return f"The source must be a text of at most {MOST_CHARACTERS} characters."
        self.drafts[path] = source
        try:
            draft_of(source, self._inputs)
        except DraftError as error:
            return f"Written as {path}, but it cannot be run: {error}."
        return f"Written as {path}; it can be run."

    async def edit_draft(self, name: Any, old: Any, new: Any) -> str:
        """Replace a text of a draft, which must occur in it exactly once, by another."""
        source = self.drafts.get(draft_path(name))
        if source is None:
            return unknown_draft(name, self.drafts)
        if not isinstance(old, str) or not isinstance(new, str) or not old:
            return "old and new must be texts, and old not an empty one."
        if (count := source.count(old)) != 1:
            return f"The text to be replaced occurs {count} times in {str(name)!r}, expected once: name more of it."
        return await self.write_draft(name, source.replace(old, new))

    async def run_draft(self, name: Any, example: Any) -> str:
        """Run a draft on a training example, by its number from 0. Returns its LM calls, what it printed, prediction,
        score and feedback."""
        source, number = self.drafts.get(draft_path(name)), _whole_number(example)
        if source is None:
            return unknown_draft(name, self.drafts)
        if number is None or number >= self._examples:
            return f"There is no example {str(example)[:60]!r}: they are 0 to {self._examples - 1}."
        try:
            draft = draft_of(source, self._inputs)
        except DraftError as error:
            return f"It cannot be run: {error}."
        async with self._running:
            if self._runs_left < 1:
                return "All runs of this proposal are used up: finish, and submit what you have."
            try:
                trial = await self._run(draft, number)
            except RunAbortedError as error:
                self.aborted = error
                raise
            except FlashEvolveError as error:
                return f"It was not run ({type(error).__name__}), which says nothing about the draft."
            self._runs_left -= 1
            return f"{trace_text(trial)[-PAGE_CHARACTERS:]}\n({self._runs_left} runs left)"


def _whole_number(value: object) -> int | None:
    """Return a whole number of 0 or above, which may be written as a text; None for anything else."""
    return int(str(value)) if re.fullmatch(r"\d{1,9}", str(value)) else None


def _page_of(lines: Sequence[str], advice: str = "") -> str:
    """Return the first lines, at most a page of them, and say how many more there are."""
    page = "\n".join(lines[:MOST_LINES])
    if len(page) > PAGE_CHARACTERS:
        page = page[:PAGE_CHARACTERS].rpartition("\n")[0]
    more = len(lines) - page.count("\n") - 1
    return f"{page}\n... and {more} more{advice}" if more > 0 else page


class _Agent(dspy.ReAct):
    """A `dspy.ReAct` whose prompts are valid Unicode, also where thoughts or arguments of its LM are not."""

    def _format_trajectory(self, trajectory: dict[str, Any]) -> str:
        return without_surrogates(super()._format_trajectory(trajectory))


def agent_of(tools: Sequence[Callable[..., Awaitable[str]]], max_steps: int) -> dspy.Module:
    """Return the agent that reads the archive, writes drafts and runs them, with at most so many calls of its tools."""
    return _Agent(ProposeHarness, tools=list(tools), max_iters=max_steps)
