"""Proposals: the directions of proposers, what they are asked, and the agent that reads the archive and writes."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any, Literal

import dspy

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.harness.archive import IMPORTABLE, Archive, tools_of
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


class Directions:
    """Gives each live step a direction of its own while there are enough: the one that was used least so far.

    Args:
        directions: one or more texts.

    Raises:
        ConfigurationError: there is no direction, or an empty one.

    >>> board = Directions(["prompts", "memory"])
    >>> board.reserve(0), board.reserve(1), board.others(0)
    ('prompts', 'memory', ['memory'])
    """

    def __init__(self, directions: Sequence[str] = DIRECTIONS) -> None:
        if isinstance(directions, str) or not directions or not all(directions):
            raise ConfigurationError(f"directions is {directions!r}, expected one or more texts.")
        self._uses = dict.fromkeys(directions, 0)
        self._held: dict[int, str] = {}

    def reserve(self, step: int, direction: str | None = None) -> str:
        """Return a direction for a step and reserve it until `release`; a step that runs again names the one it had."""
        held = list(self._held.values())
        direction = direction or min(self._uses, key=lambda text: (held.count(text), self._uses[text]))
        if direction in self._uses:
            self._uses[direction] += 1
        self._held[step] = direction
        return direction

    def release(self, step: int) -> None:
        """Give a step's direction back, if it has one."""
        self._held.pop(step, None)

    def others(self, step: int) -> list[str]:
        """Return the directions of the other live steps."""
        return [direction for number, direction in self._held.items() if number != step]


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
    """Return the description of how a module must look, with these limits."""
    imports = ", ".join(sorted(IMPORTABLE - {"dspy", "__future__"}))
    return INTERFACE.format(imports=imports, megabytes=limits.memory_bytes >> 20, **asdict(limits))


def proposer_of(archive: Archive, max_steps: int, on_loop: bool) -> dspy.Module:
    """Return the agent that reads the archive and writes modules.

    Args:
        max_steps: most tool calls of the agent.
        on_loop: whether the agent is awaited on the event loop; its tools are coroutine functions then.
    """
    tools = tools_of(archive)
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


def admitted_since(archive: Archive, version: int) -> str:
    """Return the archive's overview, and at most four of the sources admitted since it had ``version`` candidates."""
    lines = [archive.overview, ""]
    for number, candidate in list(enumerate(archive.candidates))[version:][-4:]:
        lines += [f"Candidate {number:04d}, score {candidate.score:.4f}:", candidate.draft.source, ""]
    return "\n".join(lines)
