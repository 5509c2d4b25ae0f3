"""`python -m benchmarks.evoflux`: its tasks' oracles, and what a run leaves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import evoflux
from benchmarks.tool_tasks.servers import ServerTask, are_installed, server_tasks
from benchmarks.tool_tasks.tasks import ToolTask, tasks
from dspy_flashevolve.evoflux import Workflow
from dspy_flashevolve.evoflux.tools import as_json
from dspy_flashevolve.sim.virtual import run


def test_there_are_sixty_tasks_over_one_two_and_three_servers_and_a_third_is_held_out() -> None:
    made = tasks()
    assert len({task.question for task in made}) == len(made) >= 60
    assert {task.servers for task in made} == {1, 2, 3}
    assert 0.3 <= sum(task.is_held_out for task in made) / len(made) <= 0.34
    names = {
        held: {node["tool"] for task in made if task.is_held_out == held for node in task.nodes} for held in (0, 1)
    }
    assert not names[0] & names[1]


@pytest.mark.parametrize("task", tasks()[::7], ids=lambda task: task.name)
def test_an_oracle_accepts_the_tasks_own_workflow_and_no_unrelated_change(task: ToolTask) -> None:
    async def main() -> None:
        async with task.opened() as world:
            assert not await task.is_reached(world)
            await carry_out(task, world)
            assert await task.is_reached(world)
            world.state["stock"]["sku-9"]["count"] += 1
            assert not await task.is_reached(world)

    run(main)


async def carry_out(task: ToolTask | ServerTask, world: Any) -> None:
    """Make the calls of a task's own workflow."""
    outputs: dict[str, Any] = {}
    for node in Workflow.from_json([evoflux.call_of(node) for node in task.nodes]).nodes:
        given = json.loads(json.dumps(node.parameters))
        for path, reference in node.references:
            place = given
            for part in path[:-1]:
                place = place[part]
            place[path[-1]] = outputs[reference.node][reference.path[0]]
        outputs[node.id] = as_json(await world.call(node.tool, given))


def test_the_tasks_over_servers_are_on_one_two_and_three_and_a_third_is_held_out() -> None:
    made = server_tasks()
    assert len({task.question for task in made}) == len(made) == 60
    assert {len(task.servers) for task in made} == {1, 2, 3}
    assert sum(task.is_held_out for task in made) * 3 == len(made)
    tools = {held: set[str]() for held in (False, True)}
    for task in made:
        tools[task.is_held_out] |= {node["tool"] for node in task.nodes}
        assert all(len(task.nodes) >= 1 and node["tool"] for node in task.nodes)
    assert not tools[False] & tools[True]


@pytest.mark.skipif(not are_installed(), reason="needs the servers of benchmarks.tool_tasks.servers")
@pytest.mark.parametrize(
    "task", [server_tasks()[number] for number in (4, 8, 27, 31, 32, 35)], ids=lambda task: task.name
)
def test_an_oracle_over_servers_accepts_the_tasks_own_workflow_and_no_unrelated_change(task: ServerTask) -> None:
    async def main() -> None:
        async with task.opened() as world:
            await world.specs()
            await carry_out(task, world)
            assert await task.is_reached(world)
            (world.inner.directory / "repo" / "more.txt").write_text("unrelated", encoding="utf-8")
            assert not await task.is_reached(world)

    asyncio.run(main())


def test_a_planner_refuses_every_request_once_its_tokens_are_spent() -> None:
    outcomes, _ = run(lambda: evoflux.run_method("dspy.ReAct", 0, tasks()[:3], evoflux.Limits(3000, 24)))
    assert all(outcome.tokens < 3000 + 2500 for outcome in outcomes), "the last request may exceed them, no other"
    assert not any(outcome.executed and not outcome.reached for outcome in outcomes)


def test_a_run_leaves_a_row_a_method_and_seed_within_its_limits(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["--seeds", "1", "--tasks", "2", "--methods", "one plan", "Evoflux, lockstep", "--out", str(out)]
    assert evoflux.main(arguments) == 0
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["method"] for row in rows] == ["one plan", "Evoflux, lockstep"]
    assert all(row["planner"] == "scripted" and row["tool_calls"] <= 2 * row["max_tool_calls"] for row in rows)
