"""Evoflux beside simpler ways to use tools: `python -m benchmarks.evoflux`.

By default the planner is scripted, no language model: it knows each task's workflow and makes errors at known rates
(wrong tool, missing parameter, wrong reference, wrong value). Told of errors, it mends each faulty node
with a known rate; ``--planner weak`` makes twice as many, and mends few. So the figures say what the search does with
such a planner, and nothing of any model.
``--planner-model openai/NAME --planner-base URL`` asks a real model instead, eight tasks at a time, in real time.

Every method gets the same totals of tokens and tool calls a task. Once the tokens are spent the planner refuses every
request, also that for an answer; only an answer that was given before counts. By default tasks are in memory and time
is virtual: a request of the planner takes four seconds, a tool call one. With ``--servers`` tasks are those of
``benchmarks.tool_tasks.servers``, whose tools are real MCP servers, and time is real.

Methods that are asked one task after the other say so in their rows (``together`` is 1); the others are asked
``together`` tasks at a time, by copies of one Evoflux, which share a scheduler of eight requests in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import dspy
from dspy.lm15 import Message, Request, Response, TextPart, Usage

from benchmarks.backends import NO_KEY
from benchmarks.results import RESULTS, append_json_lines, table
from benchmarks.tool_tasks.servers import ServerTask, server_tasks
from benchmarks.tool_tasks.tasks import ToolTask, tasks
from dspy_flashevolve.engine.requests import gather
from dspy_flashevolve.evoflux import Evoflux, ToolSpec, Workflow
from dspy_flashevolve.evoflux.plans import read_plan
from dspy_flashevolve.evoflux.schemas import properties_of
from dspy_flashevolve.evoflux.tools import as_json
from dspy_flashevolve.sim.virtual import run

Task = ToolTask | ServerTask
PLANNER_SECONDS = 4.0


@dataclass(frozen=True)
class Skill:
    """How good a scripted planner is.

    Attributes:
        errors: kind of error -> its rate a node.
        mends: rate at which a node that the feedback names is written right.
    """

    errors: Mapping[str, float]
    mends: float


SKILLS = {
    "scripted": Skill({"tool": 0.25, "missing": 0.2, "reference": 0.25, "value": 0.2}, mends=0.6),
    "weak": Skill({"tool": 0.5, "missing": 0.4, "reference": 0.5, "value": 0.4}, mends=0.15),
}
"""Scripted planners. The weak one has twice the errors, so that one plan in a hundred runs, which is nearer to the 3 %
that the paper reports of small models."""
ANSWER_TOKENS = 2000
"""Tokens that Evoflux leaves for its answer, which costs 500 to 800 here, and for requests that are cancelled when a
workflow ran, and are paid, too. With 1,000 one answer in ten is refused."""
MODEL_TOKENS = 700
"""Longest reply of a real model."""
TASKS_AT_A_TIME = 8
"""Of the methods that have no scheduler, under a real model."""
WITHOUT = ("static repair", "LM edits")


class _NotAwaited:
    """dspy wants a sync engine beside an async one."""

    def complete(self, request: Request) -> Response:
        """Raise: every method here awaits the planner."""
        raise NotImplementedError("the scripted planner is awaited")


class LimitReachedError(dspy.LMError):
    """The tokens of a task are spent."""


class ScriptedPlanner:
    """Answers as a planner with known error rates would.

    Args:
        task: what it knows.
        seed: of its errors.
        max_tokens: after which it refuses every request.
        seconds: what a request takes.
        skill: its rates of errors.
    """

    def __init__(self, task: Task, seed: int, max_tokens: int, seconds: float, skill: Skill) -> None:
        self.task, self._rng, self._skill = task, random.Random(f"{task.name} {seed}"), skill
        self.max_tokens, self._seconds = max_tokens, seconds
        self.lm = dspy.LM("scripted/planner", engine=_NotAwaited(), async_engine=self, cache=False, num_retries=0)
        self.tokens = 0
        self.has_refused = False

    async def complete(self, request: Request) -> Response:
        """dspy's engine contract."""
        self.has_refused = self.tokens >= self.max_tokens
        if self.has_refused:
            raise LimitReachedError
        prompt = "\n".join([str(request.system or ""), *(message.text or "" for message in request.messages)])
        text = self._reply(prompt)
        read, written = len(prompt) // 4, len(text) // 4
        self.tokens += read + written  # before the answer: a request that is cancelled is paid, too
        await anyio.sleep(self._seconds)
        usage = Usage(input_tokens=read, output_tokens=written, total_tokens=read + written)
        return Response(
            id=None, model="scripted", message=Message.assistant([TextPart(text)]), finish_reason="stop", usage=usage
        )

    def _reply(self, prompt: str) -> str:
        if "[[ ## next_tool_name ## ]]" in prompt:
            return self._react(prompt)
        if "[[ ## workflow ## ]]" in prompt:
            return _format(plan=str(Workflow.from_json(self._edit(prompt))))
        if "[[ ## plan ## ]]" in prompt:
            return _format(plan=str(Workflow.from_json([self._flawed(node) for node in self.task.nodes])))
        return _format(reasoning="-", answer="done", citations="[]")

    def _edit(self, prompt: str) -> list[dict[str, Any]]:
        asked = prompt.rsplit("[[ ## feedback ## ]]", 1)[-1]
        named = set(re.findall(r"^node '(\w+)': DID NOT RUN|check: node '(\w+)'", asked, re.MULTILINE))
        ids = {name for pair in named for name in pair if name}
        shown = prompt.rsplit("[[ ## workflow ## ]]\n", 1)[-1].split("\n\n[[ ## ")[0]
        written = {
            node["id"]: call_of(node) if self._rng.random() < self._skill.mends else self._flawed(node)
            for node in self.task.nodes
            if node["id"] in ids or not ids
        }
        nodes = [written.pop(node["id"], node) for node in read_plan(shown, {}).as_json()["nodes"]]
        return [*nodes, *written.values()]

    def _flawed(self, node: dict[str, Any]) -> dict[str, Any]:
        made = call_of(node)
        rng, parameters, rates = self._rng, made["parameters"], self._skill.errors
        references = [name for name, value in parameters.items() if isinstance(value, dict)]
        if rng.random() < rates["tool"]:
            made["tool"] = rng.choice([f"get_{made['tool']}", made["tool"].split("_")[0], "run_query"])
        if rng.random() < rates["missing"]:
            parameters.pop(rng.choice(list(parameters)))
        for name in references:
            if name in parameters and rng.random() < rates["reference"]:
                source, _, field = parameters[name]["$ref"].partition(".")
                parameters[name] = {
                    "$ref": rng.choice([f"{source}.result", f"{source}.{field}.value", f"step.{field}"])
                }
        if node.get("after"):
            rng.random()  # once drew an error of order, which lines of Python cannot have; later draws stay the same
        literal = [name for name, value in parameters.items() if isinstance(value, int)]
        for name in literal:
            if rng.random() < rates["value"]:
                parameters[name] = str(parameters[name])
        return made

    def _react(self, prompt: str) -> str:
        """Make the next call of the workflow, by the observations in the prompt."""
        seen = re.findall(r"\[\[ ## observation_\d+ ## \]\]\n(.*?)(?=\n\[\[|\Z)", prompt, re.DOTALL)
        outputs: dict[str, Any] = {}
        done = 0
        for text in seen:
            try:
                value, _ = json.JSONDecoder().raw_decode(text.strip())  # the last one is followed by dspy's request
            except ValueError:
                continue
            if done < len(self.task.nodes):
                outputs[self.task.nodes[done]["id"]] = value
                done += 1
        if done >= len(self.task.nodes):
            return _format(next_thought="-", next_tool_name="finish", next_tool_args="{}")
        node = self.task.nodes[done]
        # After an error of its own it mends at the known rate; it names tools of the catalogue only, as ReAct demands.
        fails_before = len(seen) > done
        made = node if fails_before and self._rng.random() < self._skill.mends else self._flawed(node)
        arguments: dict[str, Any] = {}
        for name, value in made["parameters"].items():
            if isinstance(value, dict):
                source, *path = value["$ref"].split(".")
                value = outputs.get(source)
                for part in path:
                    try:
                        value = value[int(part)] if isinstance(value, list) else value[part]
                    except (KeyError, IndexError, TypeError, ValueError):
                        value = "unknown"
            arguments[name] = value
        tool = made["tool"] if made["tool"] == node["tool"] else self.task.nodes[0]["tool"]
        return _format(next_thought="-", next_tool_name=tool, next_tool_args=json.dumps(arguments))


def call_of(node: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a task's node without what a plan cannot say."""
    return {name: json.loads(json.dumps(node[name])) for name in ("id", "tool", "parameters")}


class ModelPlanner:
    """A real model, which refuses every request once a task's tokens are spent.

    Args:
        model: litellm's name.
        base: a server with OpenAI's API; None where litellm knows the address.
        max_tokens: after which it refuses.
    """

    def __init__(self, model: str, base: str | None, max_tokens: int) -> None:
        self.max_tokens, self.tokens, self.has_refused = max_tokens, 0, False
        address = {} if base is None else {"api_base": base, "api_key": NO_KEY}
        self.lm = _LimitedLM(
            self, model, temperature=0.7, max_tokens=MODEL_TOKENS, cache=False, timeout=3600, num_retries=0, **address
        )


class _LimitedLM(dspy.LM):
    def __init__(self, planner: ModelPlanner, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._planner = planner

    def __deepcopy__(self, memo: dict[int, Any]) -> _LimitedLM:
        return self

    async def aforward(self, *args: Any, **kwargs: Any) -> Any:
        planner = self._planner
        planner.has_refused = planner.tokens >= planner.max_tokens
        if planner.has_refused:
            raise LimitReachedError
        read = sum(len(str(message.get("content"))) for message in kwargs.get("messages") or []) // 4
        planner.tokens += read  # an estimate, which stands where the request is cancelled
        reply = await super().aforward(*args, **kwargs)
        planner.tokens += reply.usage.prompt_tokens + reply.usage.completion_tokens - read
        return reply


Planner = ScriptedPlanner | ModelPlanner


def _format(**fields: str) -> str:
    return "\n\n".join([f"[[ ## {name} ## ]]\n{text}" for name, text in fields.items()] + ["[[ ## completed ## ]]"])


@dataclass(frozen=True)
class Row:
    """One method on all tasks with one seed.

    Attributes:
        planner: the name of a scripted one in `SKILLS`, or that of a model.
        tools: "memory", or "servers" for MCP servers.
        together: tasks that are asked at a time.
        executed: share of tasks whose workflow ran completely and that were answered ("strict execution").
        reached: share of tasks whose oracle is content.
        reached_held_out: the same of the held-out third.
        tokens, tool_calls: of all tasks.
        candidates: workflows run, of all tasks.
        seconds: for all tasks; virtual with tools in memory.
    """

    planner: str
    tools: str
    method: str
    seed: int
    tasks: int
    together: int
    max_tokens: int
    max_tool_calls: int
    executed: float
    reached: float
    reached_held_out: float
    tokens: int
    tool_calls: int
    candidates: int
    seconds: float


@dataclass
class Outcome:
    """One method on one task."""

    executed: bool
    reached: bool
    tokens: int
    calls: int
    candidates: int


@dataclass(frozen=True)
class Limits:
    """What a method may spend on a task, and its planner.

    Attributes:
        seconds: what a request of the scripted planner takes.
        skill: its name in `SKILLS`.
        model, base: of a real one.
    """

    tokens: int
    calls: int
    seconds: float = PLANNER_SECONDS
    skill: str = "scripted"
    model: str | None = None
    base: str | None = None


@dataclass(frozen=True)
class Method:
    """A way to use Evoflux: its options, and how many tasks it is asked at a time."""

    options: Mapping[str, Any]
    is_together: bool = False


METHODS: dict[str, Method] = {
    "one plan": Method({"max_candidates": 1, "without": WITHOUT, "width": 1}),
    "retry with the error": Method({"without": ("static repair",), "width": 1}),
    "static repair only": Method({"max_candidates": 1, "without": WITHOUT[1:], "width": 1}),
    "Evoflux, lockstep": Method({"width": 1}),
    "Evoflux, lockstep, tasks together": Method({"width": 1}, is_together=True),
    "Evoflux, two at once, one task at a time": Method({"width": 2}),
    "Evoflux, async, one task at a time": Method({"width": 4}),
    "Evoflux, six at once, one task at a time": Method({"width": 6}),
    "Evoflux, async, tasks together": Method({"width": 4}, is_together=True),
    **{
        f"Evoflux, async, without {name}": Method({"without": (name,), "width": 4}, is_together=True)
        for name in WITHOUT
    },
}


async def solve(task: Task, name: str, program: Evoflux | None, seed: int, limits: Limits) -> Outcome:
    """Let a method do a task, within its tokens and calls.

    Args:
        program: the Evoflux of which a copy is asked; None for the other methods.
    """
    if limits.model is None:
        planner: Planner = ScriptedPlanner(task, seed, limits.tokens, limits.seconds, SKILLS[limits.skill])
    else:
        planner = ModelPlanner(limits.model, limits.base, limits.tokens)
    async with task.opened() as world:
        with dspy.context(lm=planner.lm):
            if name == "dspy.ReAct":
                return await _react(task, world, planner, limits)
            if name == "best of N":
                return await _best_of(task, world, planner, limits)
            assert program is not None
            return await _ask(task, world, program, planner)


async def _ask(task: Task, world: Any, program: Evoflux, planner: Planner) -> Outcome:
    asked = program.deepcopy()  # shares the scheduler
    asked.tools, asked.world = await world.specs(), world
    try:
        made = await asked.acall(question=task.question)
    except dspy.LMError:  # it came to no answer; what it wrote before stands
        if not planner.has_refused:
            raise
        return Outcome(False, await task.is_reached(world), planner.tokens, 0, 0)
    stats, reached = made.stats, await task.is_reached(world)
    return Outcome(made.is_complete, reached, planner.tokens, stats.tool_calls, stats.candidates)


async def _best_of(task: Task, world: Any, planner: Planner, limits: Limits) -> Outcome:
    """Plan afresh until a plan runs completely in a copy of the state, within the same totals."""
    used = made = 0
    while planner.tokens < limits.tokens and used < limits.calls:
        options = METHODS["one plan"].options
        program = _program({**options, "max_tool_calls": limits.calls - used}, limits)
        program.tools, program.world = await world.specs(), world
        try:
            answer = await program.acall(question=task.question)
        except dspy.LMError:
            if not planner.has_refused:
                raise
            break
        used, made = used + answer.stats.tool_calls, made + 1
        if answer.is_complete:
            return Outcome(True, await task.is_reached(world), planner.tokens, used, made)
    return Outcome(False, await task.is_reached(world), planner.tokens, used, made)


async def _react(task: Task, world: Any, planner: Planner, limits: Limits) -> Outcome:
    """dspy.ReAct on the real state, an iteration at a time until its tokens or calls are spent."""
    count = 0

    def counted(spec: ToolSpec) -> dspy.Tool:
        async def call(**given: Any) -> str:
            nonlocal count
            if count >= limits.calls:
                raise LimitReachedError
            count += 1
            return json.dumps(as_json(await spec.function(**given)))

        made = dspy.Tool(call, name=spec.name, desc=spec.description, args=properties_of(spec.input_schema))
        made.has_kwargs = True
        return made

    tools = [counted(spec) for spec in await world.specs()]
    program = dspy.ReAct("question -> answer", tools=tools, max_iters=limits.calls)
    try:
        answered = bool((await program.acall(question=task.question)).answer)
    except (dspy.LMError, LimitReachedError):
        answered = False
    reached = await task.is_reached(world)
    return Outcome(answered and reached, reached, planner.tokens, count, 1)


def _program(options: Mapping[str, Any], limits: Limits) -> Evoflux:
    most = {"max_seconds": None, "max_tool_calls": limits.calls, "max_tokens": limits.tokens - ANSWER_TOKENS}
    return Evoflux("question -> answer", [], **{**most, **options})


async def run_method(name: str, seed: int, chosen: Sequence[Task], limits: Limits) -> tuple[list[Outcome], float]:
    """Let a method do all tasks; returns their outcomes and the seconds for all."""
    method = METHODS.get(name)
    program = _program(method.options, limits) if method is not None else None
    began = anyio.current_time()
    if method is not None and method.is_together:
        made = await gather([partial(solve, task, name, program, seed, limits) for task in chosen])
    elif limits.model is not None:
        places = anyio.CapacityLimiter(TASKS_AT_A_TIME)

        async def solve_in_place(task: Task) -> Outcome:
            async with places:
                return await solve(task, name, program, seed, limits)

        made = await gather([partial(solve_in_place, task) for task in chosen])
    else:
        made = [await solve(task, name, program, seed, limits) for task in chosen]
    return made, anyio.current_time() - began


def row_of(name: str, seed: int, chosen: Sequence[Task], limits: Limits, tools: str) -> Row:
    """Run a method on tasks; in virtual time, unless their tools are servers or the planner is a model."""
    is_real = tools == "servers" or limits.model is not None

    async def main() -> tuple[list[Outcome], float]:
        return await run_method(name, seed, chosen, limits)

    made, seconds = asyncio.run(main()) if is_real else run(main)
    held_out = [each.reached for task, each in zip(chosen, made, strict=True) if task.is_held_out]
    is_together = name in METHODS and METHODS[name].is_together
    return Row(
        planner=limits.model or limits.skill,
        tools=tools,
        method=name,
        seed=seed,
        tasks=len(chosen),
        together=len(chosen) if is_together else 1 if limits.model is None else TASKS_AT_A_TIME,
        max_tokens=limits.tokens,
        max_tool_calls=limits.calls,
        executed=statistics.mean(each.executed for each in made),
        reached=statistics.mean(each.reached for each in made),
        reached_held_out=statistics.mean(held_out) if held_out else 0.0,
        tokens=sum(each.tokens for each in made),
        tool_calls=sum(each.calls for each in made),
        candidates=sum(each.candidates for each in made),
        seconds=seconds,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the methods, print a table, and write a row a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=60, help="the first so many")
    parser.add_argument("--servers", action="store_true", help="tasks over real MCP servers, in real time")
    parser.add_argument("--planner", choices=list(SKILLS), default="scripted", help="the scripted planner")
    parser.add_argument("--planner-model", help="a real one, by litellm's name; without it the planner is scripted")
    parser.add_argument("--planner-base", help="the address of its server")
    parser.add_argument("--max-tokens", type=int, default=8000, help="a task")
    parser.add_argument("--max-tool-calls", type=int, default=24, help="a task")
    parser.add_argument("--methods", nargs="*", default=[*METHODS, "best of N", "dspy.ReAct"])
    parser.add_argument("--out", default=str(RESULTS / "evoflux.jsonl"))
    asked = parser.parse_args(arguments)
    logging.getLogger("dspy").setLevel(logging.CRITICAL)
    chosen: Sequence[Task] = server_tasks() if asked.servers else tasks()
    chosen = chosen[: asked.tasks]
    limits = Limits(
        asked.max_tokens,
        asked.max_tool_calls,
        0.0 if asked.servers else PLANNER_SECONDS,
        asked.planner,
        asked.planner_model,
        asked.planner_base,
    )
    lines: list[tuple[str, ...]] = []
    for name in asked.methods:
        rows = [
            row_of(name, seed, chosen, limits, "servers" if asked.servers else "memory") for seed in range(asked.seeds)
        ]
        append_json_lines(Path(asked.out), [{"benchmark": "evoflux", **asdict(row)} for row in rows])
        figures = [[getattr(row, field) for row in rows] for field in ("executed", "reached", "reached_held_out")]
        shown = [f"{statistics.mean(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in figures]
        spent = [
            f"{sum(getattr(row, field) for row in rows) / len(rows) / len(chosen):,.0f}"
            for field in ("tokens", "tool_calls")
        ]
        rate = sum(row.candidates for row in rows) / sum(row.seconds for row in rows)
        lines.append((name, *shown, *spent, f"{rate:.3f}"))
        print(lines[-1], flush=True)
    header = ("method", "executed", "reached", "held out", "tokens a task", "calls a task", "candidates a second")
    print(table(header, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
