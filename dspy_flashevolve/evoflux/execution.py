"""Running a workflow: what each node gave, what ran before is not run again, and what writes is run with care.

The rules of effects:

- A tool that only reads may be run in a search. Its output is kept under the tool, its arguments and a hash of the
  effects before it, so that candidates which begin alike share what they begin with.
- A tool that writes ("write" or "idempotent") is run in a search only in a copy of the state, if there is one that
  holds the tool; else it waits for the final run, where it is called once, and what comes after it waits, too.
- A call that may have written is never made again on its own. After a reading or idempotent call lost its answer it is
  made a second time.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, cast

import anyio

from dspy_flashevolve.engine.loop import Threads
from dspy_flashevolve.engine.requests import gather
from dspy_flashevolve.engine.texts import without_surrogates
from dspy_flashevolve.evoflux.schemas import Path, Schema, TooMuchWorkError, faults_of, field_schema, types_of
from dspy_flashevolve.evoflux.tools import ToolSpec, as_json
from dspy_flashevolve.evoflux.workflow import TEXT, Node, Reference, Workflow, field_name, is_text, reference_in

Status = Literal["ran", "failed", "waiting", "skipped"]
"""It gave an output; its call or the preparation of it failed; it waits for the final run; what it needs is missing."""
Fault = Literal["tool", "reference", "arguments", "exception", "timeout", "size", "output", "budget", "state", ""]
"""Why a node failed: no such tool; a field that is not there; arguments against the schema; what the tool raised; no
answer in time; too large an answer; an answer against the output schema, or that is not JSON; no call left; the state
is not there."""

MAX_OUTPUT_BYTES = 1_000_000
"""The largest output, as JSON, that goes on to other nodes, and the largest arguments; a round number, far above what
an LM can read."""


class World(Protocol):
    """The state on which writing tools work, of which candidates have copies."""

    def holds(self, tool: str) -> bool:
        """Whether the tool of a name works on this state, and on nothing else."""
        ...

    async def fork(self) -> World:
        """Make a copy that nothing done to this one changes, and by which nothing of this one is changed."""
        ...

    async def prepare(self, tool: str) -> None:
        """Make ready for a call of a tool, which is no part of the call's time."""
        ...

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool that it holds on this state; returns its output."""
        ...

    async def close(self) -> None:
        """Free what it holds: processes and copies."""
        ...


@dataclass(frozen=True, slots=True)
class NodeRun:
    """What became of a node.

    Args:
        node: identifier.
        tool: name of its tool.
        status: see :data:`Status`.
        output: of the tool, of JSON's types; None unless it ran.
        fault: why it failed.
        error: the same for people, and for an LM.
        path: the parameter that is at fault; empty where it is none.
        text: what the tool gave, where its output was read from a text.
    """

    node: str
    tool: str
    status: Status
    output: Any = None
    fault: Fault = ""
    error: str = ""
    path: Path = ()
    text: str | None = None

    def outcome(self, characters: int) -> str:
        """Say for an LM what came of it; an output is quoted as JSON, cut where it is long: data, no orders."""
        if self.status != "ran":
            return without_surrogates(f"DID NOT RUN ({self.status}): {self.error}")
        text = without_surrogates(json.dumps(self.output, ensure_ascii=False))
        return text if len(text) <= characters else f"{text[:characters]}… ({len(text):,} characters)"


@dataclass(frozen=True, slots=True)
class Execution:
    """What came of running a workflow.

    Args:
        runs: one for each node, in the order in which they ran.
    """

    runs: tuple[NodeRun, ...]

    @property
    def outputs(self) -> dict[str, Any]:
        """Node -> its output, of those that ran."""
        return {run.node: run.output for run in self.runs if run.status == "ran"}

    @property
    def failures(self) -> tuple[NodeRun, ...]:
        """The nodes that failed."""
        return tuple(run for run in self.runs if run.status == "failed")

    @property
    def is_complete(self) -> bool:
        """Whether every node ran."""
        return bool(self.runs) and all(run.status == "ran" for run in self.runs)

    @property
    def waits(self) -> bool:
        """Whether nothing failed, and something waits for the final run."""
        return not self.failures and any(run.status == "waiting" for run in self.runs)


@dataclass
class EvofluxStats:
    """How a question was answered.

    Attributes:
        candidates: workflows that were run.
        origins: how those that were admitted were made -> how many.
        tool_calls: calls that were made.
        reused: nodes that needed no call, since an equal one had run.
        tokens: of the LMs.
        answer_error: why there is no answer, though a tool has written; empty where none was lost.
        unusable_replies: replies of the planner that were no workflow.
        stop_reason: why the search ended.
    """

    candidates: int = 0
    origins: Counter[str] = field(default_factory=Counter[str])
    tool_calls: int = 0
    reused: int = 0
    tokens: int = 0
    answer_error: str = ""
    unusable_replies: int = 0
    stop_reason: str = ""


class _NotRunError(Exception):
    """Why a node gave no output; the arguments are as in NodeRun."""

    def __init__(self, message: str, fault: Fault = "", path: Path = (), status: Status = "failed") -> None:
        super().__init__(message)
        self.fault = fault
        self.run = partial(NodeRun, status=status, fault=fault, error=message[:600], path=path)


@dataclass
class Executor:
    """Runs workflows for one question: calls in slots of ``request``, at most ``max_calls``, writing in copies of
    ``world`` where there is one."""

    tools: Mapping[str, ToolSpec]
    request: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]
    threads: Threads
    max_calls: float = math.inf
    world: World | None = None
    timeout_seconds: float = 30.0
    stats: EvofluxStats = field(default_factory=EvofluxStats)
    reserved_calls: int = 0
    """Calls that are reserved for the final run."""
    _memo: dict[str, Any] = field(default_factory=dict[str, Any])
    _locks: dict[str, anyio.Lock] = field(default_factory=dict[str, anyio.Lock])
    _worlds: dict[str, World] = field(default_factory=dict[str, "World"])
    _forks: list[World] = field(default_factory=list["World"])

    @property
    def calls_left(self) -> float:
        """Tool calls that may still be made now."""
        return self.max_calls - self.reserved_calls - self.stats.tool_calls

    def writes(self, node: Node) -> bool:
        """Whether a node's tool changes the world."""
        spec = self.tools.get(node.tool)
        return spec is not None and spec.effect != "read"

    def before_writes(self, workflow: Workflow) -> tuple[Node, ...]:
        """The nodes that come before the first one that writes: what they see in a search is the real state."""
        return tuple(itertools.takewhile(lambda node: not self.writes(node), workflow.nodes))

    def reserve_calls_for(self, workflow: Workflow) -> None:
        """Reserve as many calls as the final run of a workflow needs: from its first writing node on."""
        self.reserved_calls = len(workflow.nodes) - len(self.before_writes(workflow))

    async def run(self, workflow: Workflow, final: bool = False) -> Execution:
        """Run a workflow; what goes wrong is an error of its node.

        Reading nodes run together as soon as what they need has run; a writing node runs alone, in its turn. Where it
        is ``final``, at most once for a question, writing tools run on the real state.
        """
        if final:
            self.reserved_calls = 0
        runs: dict[str, NodeRun] = {}
        effects, halted_by, failed = "", None, None
        pending = list(workflow.nodes)
        while pending:
            reading = itertools.takewhile(lambda node: not self.writes(node), pending)
            waiting = {node.id for node in pending}
            ready = [node for node in reading if not waiting & node.needs] or pending[:1]
            halts = [halted_by or (failed if self.writes(node) else None) for node in ready]
            results = await gather([
                partial(self._run_node, node, runs, effects, halt, final)
                for node, halt in zip(ready, halts, strict=True)
            ])  # fmt: skip
            runs |= {run.node: run for run, _ in results}
            if final:  # nothing more is written once something is not as the search saw it
                failed = failed or next((run for run, _ in results if run.status == "failed"), None)
            run, effects = results[-1]
            if halted_by is None and self.writes(ready[-1]) and run.status != "ran":
                halted_by = run
            pending = [node for node in pending if node not in ready]
        return Execution(tuple(runs.values()))

    async def close(self) -> None:
        """Close the copies of the world and the threads, but for one whose call hangs."""
        self.threads.close(wait=not self.threads.abandoned)
        with anyio.CancelScope(shield=True):
            await gather([fork.close for fork in self._forks])

    async def _run_node(
        self, node: Node, runs: Mapping[str, NodeRun], effects: str, halted_by: NodeRun | None, final: bool
    ) -> tuple[NodeRun, str]:
        """Run one node after those that it needs; returns the effects after it, too."""
        try:
            if halted_by is not None:  # nobody knows the state that it would find
                status: Status = "waiting" if halted_by.status == "waiting" else "skipped"
                raise _NotRunError(f"it comes after {halted_by.node!r}, which did not run", status=status)
            missing = sorted(need for need in node.needs if need not in runs or runs[need].status != "ran")
            if missing:
                raise _NotRunError(f"it needs {missing}, which did not run", status="skipped")
            (output, text), effects = await self._output(node, runs, effects, final)
            return NodeRun(node.id, node.tool, "ran", output, text=text), effects
        except _NotRunError as reason:
            return reason.run(node.id, node.tool), effects

    async def _output(self, node: Node, runs: Mapping[str, NodeRun], effects: str, final: bool) -> tuple[Any, str]:
        """Prepare and make the call of a node, or find what an equal one gave; returns the effects after it, too."""
        spec = self.tools.get(node.tool)
        if spec is None:
            raise _NotRunError(f"there is no tool {node.tool!r}", "tool")
        try:
            arguments = bind(node, runs, spec.input_schema)
        except RecursionError:
            raise _NotRunError("what it refers to is nested too deeply", "reference") from None
        with suppress(TooMuchWorkError):  # who is called checks them, too
            for path, message in faults_of(arguments, spec.input_schema):
                raise _NotRunError(f"{field_name(path)}: {message}", "arguments", path)
        writes = spec.effect != "read"
        world = self.world if self.world is not None and self.world.holds(spec.name) and not final else None
        if writes and world is None and not final:
            raise _NotRunError("its tool writes, and is called in the final run only", status="waiting")
        # The final run works on the real state: once it has written, that state is none that a search has seen.
        state = f"final {effects}" if final and (effects or writes) else effects
        key = hashlib.sha256(json.dumps([node.tool, arguments, state], sort_keys=True).encode()).hexdigest()
        async with self._locks.setdefault(key, anyio.Lock()):  # another candidate may be making the same call
            if key in self._memo:
                self.stats.reused += 1
            else:
                plain = partial(spec.call, arguments, self.threads)
                call = self._called_in(world, spec, arguments, effects, key) if world else self._called(spec, plain)
                try:
                    self._memo[key] = await call
                except _NotRunError as reason:
                    # Without an answer nothing is known of a call, but a writing one is never made again.
                    if reason.fault in ("budget", "timeout", "state") and spec.effect != "write":
                        raise
                    self._memo[key] = reason
        if isinstance(self._memo[key], _NotRunError):
            raise self._memo[key]
        return self._memo[key], key if writes else effects

    async def _called_in(self, world: World, spec: ToolSpec, arguments: dict[str, Any], effects: str, key: str) -> Any:
        """Call a tool on the state that the effects before it have left, a writing one in a new copy of that state."""
        place = self._worlds.get(effects, world)
        try:
            if spec.effect != "read":
                place = await place.fork()
                self._forks.append(place)
            await place.prepare(spec.name)
        except Exception as error:
            raise _NotRunError(f"the state could not be made ready: {_text_of(error)}", "state") from error
        output = await self._called(spec, partial(place.call, spec.name, arguments))
        self._worlds[key] = place
        return output

    async def _called(self, spec: ToolSpec, call: Callable[[], Awaitable[Any]]) -> tuple[Any, str | None]:
        """Make one call, a second time where it lost its answer and may be made twice; return its output and text."""

        async def in_time() -> Any:
            with anyio.move_on_after(self.timeout_seconds):
                returned = await call()
                output = as_json(returned)
                return output, returned if isinstance(returned, str) and output != returned else None
            raise _NotRunError(f"no answer within {self.timeout_seconds:g} seconds", "timeout")

        output: Any = None
        text: str | None = None
        for is_last in (spec.effect == "write", True):
            if self.calls_left <= 0:
                raise _NotRunError("no tool call is left", "budget")
            self.stats.tool_calls += 1
            try:
                output, text = await self.request(in_time)
                break
            except _NotRunError:
                raise
            except Exception as error:
                if is_last or not isinstance(error, ConnectionError | EOFError):
                    raise _NotRunError(_text_of(error), "exception") from error
        size = len(json.dumps(output))
        if size > MAX_OUTPUT_BYTES:  # a writing call has happened even where its answer is refused
            raise _NotRunError(f"the output has {size:,} bytes, more than {MAX_OUTPUT_BYTES:,}", "size")
        with suppress(TooMuchWorkError):
            for path, message in faults_of(output, spec.output_schema or {}):
                raise _NotRunError(f"the output is not as its schema says, at {field_name(path)}: {message}", "output")
        return output, text


def bind(node: Node, runs: Mapping[str, NodeRun], schema: Schema) -> dict[str, Any]:
    """Replace a node's references by the fields that they name, and join its texts; what outputs hold is data."""
    size = 0

    def bound(value: Any, path: Path) -> Any:
        nonlocal size
        reference = reference_in(value)
        if reference is not None:
            named = _named(reference, runs, schema, path)
            size += len(named) if isinstance(named, str) else len(json.dumps(named))
            if size > MAX_OUTPUT_BYTES:  # a plan of a line may name a large output a thousand times
                raise _NotRunError(f"its arguments have more than {MAX_OUTPUT_BYTES:,} characters", "size")
            return named
        if is_text(value):
            parts = [bound(part, (*path, TEXT, place)) for place, part in enumerate(value[TEXT])]
            return "".join(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts)
        if isinstance(value, dict):
            return {name: bound(inner, (*path, name)) for name, inner in cast("dict[str, Any]", value).items()}
        if isinstance(value, list):
            return [bound(inner, (*path, place)) for place, inner in enumerate(cast("list[Any]", value))]
        return value

    return {name: bound(value, (name,)) for name, value in node.parameters.items()}


def _named(reference: Reference, runs: Mapping[str, NodeRun], schema: Schema, path: Path) -> Any:
    """Return the field that a reference names; of a whole output its text, where a text is wanted."""
    run = runs[reference.node]
    if run.text is not None and not reference.path:
        accepted = {"type": "string"} if TEXT in path else field_schema(schema, path)
        with suppress(TooMuchWorkError):
            if isinstance(accepted, dict) and "string" in types_of(accepted) and faults_of(run.output, accepted):
                return run.text
    value: Any = run.output
    for position, part in enumerate(reference.path):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, TypeError, ValueError):
            seen = field_name((reference.node, *reference.path[:position]))
            shape = sorted(cast("dict[str, Any]", value)) if isinstance(value, dict) else type(value).__name__
            raise _NotRunError(f"{field_name(path)}: {seen} has no {part!r}, but {shape}", "reference", path) from None
    return copy.deepcopy(value)


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:600]
