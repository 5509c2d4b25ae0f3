"""Tools, servers, schemas and candidates that mean harm, or are merely careless: none of them reaches the real state,
holds the question up, or takes the machine's memory."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dspy
import pytest

from dspy_flashevolve import ConfigurationError, Harness, HarnessError, Limits
from dspy_flashevolve.evoflux import DirectoryWorld, Evoflux, ToolSpec, Workflow
from dspy_flashevolve.sim.virtual import run
from tests.evoflux.worlds import ScriptedPlanner
from tests.fakes import fake_lm
from tests.sandbox.worlds import module

SERVER = """
import json, os, subprocess, sys
directory, pages = sys.argv[1], json.load(open(sys.argv[2]))


def call(name, given):
    path = os.path.join(directory, given.get("name", ""))
    if name == "append":
        with open(path, "a") as file:
            return file.write(given["text"])
    if name == "read":
        return open(path).read()
    if name == "refuse":
        raise ValueError("no")
    if name == "leave":
        return subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=-3, stdout=-3, stderr=-3).pid
    if name == "die":
        os._exit(1)
    if name == "answer and die":
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result("said")}), flush=True)
        os._exit(1)
    return given.get("value", "a" * 30 + "!")


def result(output):
    return {"content": [{"type": "text", "text": str(output)}], "structuredContent": {"result": output}}


for line in sys.stdin:
    message = json.loads(line)
    given = message.get("params") or {}
    if message["method"] == "initialize":
        answer = {"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}}}
        answer["serverInfo"] = {"name": "raw", "version": "1"}
    elif message["method"] == "tools/list":
        number = int(given.get("cursor") or 0)
        answer = {"tools": pages[min(number, len(pages) - 1)]}
        if number + 1 < len(pages) or pages[-1] == []:
            answer["nextCursor"] = str(number + 1)
    elif message["method"] == "tools/call":
        try:
            answer = result(call(given["name"], given.get("arguments") or {}))
        except Exception as error:
            answer = {"content": [{"type": "text", "text": str(error)}], "isError": True}
    else:
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": answer}), flush=True)
"""
"""An MCP server without the SDK, which starts in an instant: its pages of tools are in a file."""
TEXT = {"type": "string"}
REDOS = {"type": "string", "pattern": "^(a+)+$"}
LETTERS = "a" * 30 + "!"


def listed(tool: str, /, reads: bool = True, output: Any = None, **properties: Any) -> dict[str, Any]:
    """A tool as a server lists it."""
    made = {"name": tool, "inputSchema": {"type": "object", "properties": properties}}
    made |= {"annotations": {"readOnlyHint": reads}}
    return made | ({"outputSchema": {"type": "object", "properties": {"result": output}}} if output else {})


@pytest.fixture
def served(tmp_path: Path) -> Any:
    """A world with a server of some pages of tools."""
    pytest.importorskip("mcp", reason="needs the extra evoflux")
    (tmp_path / "data").mkdir()
    (tmp_path / "server.py").write_text(SERVER)

    def world(*pages: list[dict[str, Any]]) -> DirectoryWorld:
        (tmp_path / "pages.json").write_text(json.dumps(pages))
        command = [sys.executable, "-S", str(tmp_path / "server.py"), "{directory}", str(tmp_path / "pages.json")]
        return DirectoryWorld(tmp_path / "data", {"raw": command})

    return world


def ask(world: DirectoryWorld, planner: ScriptedPlanner, **options: Any) -> dspy.Prediction:
    """Ask an Evoflux over a world, which is closed after it."""

    async def main() -> dspy.Prediction:
        async with world:
            with dspy.context(lm=planner.lm):
                return await Evoflux("question -> answer", [world], **options).acall(question="?")

    return asyncio.run(main())


def errors_of(made: dspy.Prediction) -> dict[str, str]:
    return {each.node: each.error for each in made.execution.runs}


# Links of a directory that is copied


@pytest.mark.parametrize("kind", ["file", "folder", "nothing", "chain", "pipe"])
def test_what_leads_out_of_a_directory_or_cannot_be_copied_is_refused_before_a_plan_is_paid(
    kind: str, tmp_path: Path, served: Any
) -> None:
    (tmp_path / "orders").write_text("none")
    place = tmp_path / "data" / "deep" / "place"
    place.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "chain":
        (tmp_path / "data" / "more").symlink_to(tmp_path)
        place.symlink_to("../more/orders")
    else:
        place.symlink_to({"file": "../../orders", "folder": tmp_path, "nothing": tmp_path / "new"}[kind])
    planner = ScriptedPlanner(["read(name='x')"])
    with pytest.raises(ConfigurationError, match=r"data/(deep/place|more) is"):
        ask(served([listed("read", name=TEXT)]), planner)
    assert planner.prompts == []


@pytest.mark.parametrize("kind", ["absolute", "relative", "hard", "through a folder"])
def test_no_candidate_writes_through_a_link_on_the_real_state(kind: str, tmp_path: Path, served: Any) -> None:
    tools = [listed("append", reads=False, name=TEXT, text=TEXT), listed("read", name=TEXT), listed("refuse")]
    world = served(tools)
    orders = tmp_path / "data" / "orders"
    orders.write_text("none. ")
    alias = tmp_path / "data" / "alias"
    if kind == "hard":
        alias.hardlink_to(orders)
    elif kind == "through a folder":
        (tmp_path / "data" / "folder").symlink_to(tmp_path / "data")
        alias = tmp_path / "data" / "folder" / "orders"
    else:
        alias.symlink_to(orders if kind == "absolute" else "orders")
    name = str(alias.relative_to(tmp_path / "data"))
    plan = f"a = append(name={name!r}, text='one.')\nb = read(name='orders')\nc = read(name={name!r})\nd = refuse()"
    planner = ScriptedPlanner([plan])
    made = ask(world, planner, max_candidates=2)
    assert not made.is_complete
    assert orders.read_text() == "none. "
    assert planner.prompts[1].count("none. one.") == (1 if kind == "hard" else 2), "both names are of one file"


# Requests and answers of candidates in the sandbox


@pytest.fixture
def lm() -> Iterator[None]:
    with dspy.context(lm=fake_lm(lambda prompt: "42")):
        yield


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
@pytest.mark.usefixtures("lm")
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("dspy.settings.lm(messages=[{'role': 'user', 'content': [1] * 450_000}])", "protocol"),
        ("dspy.settings.lm(messages=[1] * 450_000)", "protocol"),
        ("dspy.settings.lm('?', stop=[1] * 450_000)", "protocol"),
        ("dspy.settings.lm('?', **{str(number): 1 for number in range(90_000)})", "protocol"),
        ("found = ['x'] * 200_000", "interface"),
        ("found = '[' + ','.join(['\"x\"'] * 120_000) + ']'", "interface"),
    ],
)
def test_a_candidate_cannot_fill_the_hosts_memory_by_what_it_sends(body: str, reason: str) -> None:
    limits = Limits(output_bytes=1 << 20, memory_bytes=256 << 20)
    layers = ("user", "namespaces", "landlock", "seccomp")
    program = Harness("question -> answer: list[int]", module(body), limits=limits, accept_missing_protection=layers)
    with pytest.raises(HarnessError):  # what the sandbox itself needs is there before the peak is measured
        Harness("question -> answer", module("1 / 0"), limits=limits, accept_missing_protection=layers)(question="?")
    before = peak_megabytes(anew=True)
    with pytest.raises(HarnessError) as caught:
        program(question="?")
    assert caught.value.failure.reason == reason
    assert "more than 10,000 values" in str(caught.value)
    assert peak_megabytes() - before < 150


def peak_megabytes(anew: bool = False) -> int:
    """The most memory that this process has had, since the last time that it was measured anew."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) // 1024


# Schemas that are no end of work


def test_a_pattern_that_backtracks_without_end_is_tested_at_once(served: Any) -> None:
    world = served([listed("take", value=REDOS), listed("give", output=REDOS), listed("fine", output=TEXT)])
    plan = f"a = take(value={LETTERS!r})\nb = give()\nc = fine()"
    made = ask(world, ScriptedPlanner([plan]), max_candidates=1)
    errors = errors_of(made)
    assert {node for node, error in errors.items() if "does not match '^(a+)+$'" in error} == {"a", "b"}
    assert errors["c"] == ""


@pytest.mark.parametrize(
    ("pattern", "text", "is_error"),
    [
        (r"^\d{4}-\d{2}-\d{2}$", "2024-05-01", False),
        (r"^\d{4}-\d{2}-\d{2}$", "5 May", True),
        ("(?:[ab]{1,300}){1,300}[^ab]{2}", "ab" * 5000, False),
        ("[ab]{300}{300}[^ab]{2}", "ab" * 5000, False),
        ("[ab]*a[ab]{9000}[^ab]{2}", "ab" * 5000, False),
        ("^(?!x)y", "x", False),
    ],
    ids=["fits", "does not", "group", "twice", "too long", "no linear time"],
)
def test_a_pattern_is_tested_where_that_takes_little_work(pattern: str, text: str, is_error: bool) -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string", "pattern": pattern}}}
    flow = Workflow.from_json([{"id": "a", "tool": "t", "parameters": {"text": text}}])
    complaints = flow.check({"t": ToolSpec("t", "", schema, None, "read", print)})
    assert ["does not match" in each.message for each in complaints] == [True] * is_error


def doubled(levels: int) -> dict[str, Any]:
    """A schema that takes two ways at each level."""
    parts = {"p0": {"type": "string"}}
    parts |= {f"p{level}": {"anyOf": [{"$ref": f"#/$defs/p{level - 1}"}] * 2} for level in range(1, levels + 1)}
    return {"type": "object", "properties": {"value": {"$ref": f"#/$defs/p{levels}"}}, "$defs": parts}


@pytest.mark.parametrize("place", ["input", "output"])
def test_a_schema_with_a_million_ways_ends_no_question(place: str) -> None:
    schema = doubled(24)
    free = {"type": "object", "properties": {}, "additionalProperties": True}
    tool = ToolSpec(
        "t", "", schema if place == "input" else free, schema if place == "output" else None, "read",
        lambda **given: {"value": 5},
    )  # fmt: skip
    with dspy.context(lm=ScriptedPlanner(["a = t(value=5)"]).lm):
        program = Evoflux("question -> answer", [tool], max_candidates=2)
        made = run(lambda: program.acall(question="?"))
    assert made.is_complete, "a server checks its arguments itself"


def test_a_value_with_thousands_of_faults_is_complained_of_by_the_first() -> None:
    schema = {"type": "object", "properties": {"ids": {"type": "array", "items": {"type": "integer"}}}}
    calls: list[Any] = []
    tool = ToolSpec("t", "", schema, None, "read", lambda **given: calls.append(given))
    flow = Workflow.from_json([{"id": "a", "tool": "t", "parameters": {"ids": ["x"] * 4000}}])
    assert 0 < len(flow.check({"t": tool})) <= 20
    program = Evoflux("question, ids: list -> answer", [tool], max_candidates=2)
    with dspy.context(lm=ScriptedPlanner(["t(ids=ids)"]).lm):
        made = run(lambda: program.acall(question="?", ids=["x"] * 4000))
    assert (calls, made.is_complete) == ([], False)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("schema", [nested(300), nested(60), {"enum": ["x" * 200_000]}], ids=["300", "60", "large"])
@pytest.mark.parametrize("place", ["input", "output"])
def test_a_tool_whose_schema_is_too_deep_or_too_large_is_left_out_by_name(
    schema: dict[str, Any], place: str, caplog: pytest.LogCaptureFixture
) -> None:
    free = {"type": "object", "properties": {}}
    given, returned = (schema, None) if place == "input" else (free, schema)
    tools = [ToolSpec("bad", "", given, returned, "read", print), ToolSpec("fine", "", free, None, "read", lambda: 1)]
    planner = ScriptedPlanner(["a = fine()"])
    with dspy.context(lm=planner.lm), caplog.at_level(logging.WARNING):
        assert run(lambda: Evoflux("question -> answer", tools).acall(question="?")).is_complete
    assert "bad" not in planner.prompts[0].split("[[ ## tools ## ]]")[-1]
    assert "'bad'" in caplog.text


def test_a_stub_of_a_schema_that_holds_itself_a_thousand_times_is_short(served: Any) -> None:
    wide = {"anyOf": [{"$ref": "#/$defs/w"}, *({"properties": {f"f{n}": {"$ref": "#/$defs/w"}}} for n in range(1000))]}
    tool = listed("wide", value={"$ref": "#/$defs/w"})
    tool["inputSchema"]["$defs"] = {"w": wide}
    planner = ScriptedPlanner(["a = fine()"])
    assert ask(served([tool, listed("fine")]), planner).is_complete
    assert len(planner.prompts[0]) < 20_000


# Servers


@pytest.mark.parametrize("last", ["die", "answer and die"])
def test_a_server_that_died_is_started_again_for_the_next_call(last: str, served: Any) -> None:
    async def main() -> list[Any]:
        async with served([listed("die"), listed("answer and die"), listed("say", value=TEXT)]) as world:
            await world.list_tools()
            calls = [(last, {}), ("say", {"value": "x"})]
            with pytest.raises(ConnectionError, match="'raw' has ended"):
                [await world.call(*each) for each in calls]
            return [await world.call("say", {"value": text}) for text in "yz"]

    assert asyncio.run(main()) == [{"result": "y"}, {"result": "z"}]


@pytest.mark.parametrize("argument", ["f'{}'".format("{n}" * 30), f"[{'n, ' * 30}]"], ids=["text", "list"])
def test_an_argument_that_would_grow_without_end_is_no_call_and_the_planner_is_told(argument: str) -> None:
    calls: list[Any] = []
    text = {"type": "object", "properties": {"text": {}}}
    page = ToolSpec("page", "", {"type": "object"}, None, "read", lambda: "x" * 500_000)
    send = ToolSpec("send", "", text, None, "read", lambda **given: calls.append(given))
    planner = ScriptedPlanner([f"n = page()\nsend(text={argument})"])
    with dspy.context(lm=planner.lm):
        made = run(lambda: Evoflux("question -> answer", [page, send], max_candidates=2).acall(question="?"))
    assert (calls, made.is_complete) == ([], False)
    assert "more than 1,000,000 characters" in planner.prompts[1]


def test_tools_of_all_pages_are_there_and_pages_without_end_are_an_error(served: Any) -> None:
    names = ["one", "two", "three"]
    planner = ScriptedPlanner(["\n".join(f"{name}()" for name in names)])
    assert ask(served(*([listed(name)] for name in names)), planner).is_complete
    with pytest.raises(RuntimeError, match="more than 100 pages"):
        ask(served([listed("one")], []), planner)


def test_a_description_of_megabytes_is_cut_with_a_mark(served: Any) -> None:
    tool = listed("big") | {"description": "word " * 800_000}
    planner = ScriptedPlanner(["a = fine()"])
    assert ask(served([tool, listed("fine") | {"description": "the small one"}]), planner).is_complete
    assert len(planner.prompts[0]) < 30_000
    assert "…" in planner.prompts[0]
    assert "the small one" in planner.prompts[0]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
def test_no_process_that_a_server_started_in_a_session_of_its_own_outlives_it(served: Any) -> None:
    made = ask(served([listed("leave")]), ScriptedPlanner(["a = leave()"]))
    process = Path(f"/proc/{made.execution.outputs['a']['result']}/stat")
    assert not process.exists() or process.read_text().rsplit(")", 1)[1].split()[0] == "Z"
