"""Tools as users have them: texts that look like JSON, optional parameters, stuck sessions, writes that cannot end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import dspy
import pytest

from dspy_flashevolve import ConfigurationError
from dspy_flashevolve.evoflux import DirectoryWorld, Evoflux, tools
from dspy_flashevolve.programs.function_lm import lm_of
from dspy_flashevolve.sim.virtual import run
from tests.evoflux.worlds import GOOD, TOOLS, Ledger, ScriptedPlanner, reply_for
from tests.fakes import fake_lm

PACKAGE = '{"name": "app",  "content": "inner"}'
Nodes = list[dict[str, Any]]


def node(id: str, tool: str, *after: str, **parameters: Any) -> dict[str, Any]:
    return {"id": id, "tool": tool, "parameters": parameters, "after": list(after)}


def ask(nodes: Nodes, given: list[Any], effects: Any = "read", edits: list[Nodes] | None = None, **options: Any) -> Any:
    program = Evoflux("question -> answer", tools=given, effects=effects, **options)
    with dspy.context(lm=ScriptedPlanner([{"nodes": nodes}], edits).lm):
        return run(lambda: program.acall(question="?"))


@pytest.mark.parametrize("text", [PACKAGE, "[1, 2]", "['a']", "plain"])
def test_a_text_goes_from_tool_to_tool_as_it_is_even_if_it_looks_like_json(text: str) -> None:
    written: list[str] = []

    def read_file(path: str) -> str:
        return text

    def write_file(content: str) -> str:
        written.append(content)
        return "ok"

    copied = [node("a", "read_file", path="x"), node("b", "write_file", content={"$ref": "a"})]
    assert ask(copied, [read_file, write_file], {"read_file": "read"}).is_complete
    assert written == [text]


def test_what_a_function_or_an_mcp_server_does_not_require_may_be_left_out() -> None:
    calls: list[dict[str, Any]] = []

    def search(query: str, *more: str, limit: int = 3, **filters: str) -> str:
        calls.append({"query": query, **filters})
        return "found"

    async def call(*args: Any, **kwargs: Any) -> str:
        calls.append(kwargs)
        return "a file"

    schema = {"path": {"type": "string"}, "branch": {"type": "string"}}
    described = {"path": "of the file (Required)", "branch": "if not main"}
    get_file = dspy.Tool(call, name="get_file", args=schema, arg_desc=described)
    specs = asyncio.run(tools.catalogue_of([search, get_file]))
    assert specs["search"].input_schema["required"] == ["query"]
    assert set(specs["search"].input_schema["properties"]) == {"query", "limit"}
    assert specs["get_file"].input_schema["required"] == ["path"]
    made = ask([node("a", "search", query="tea"), node("b", "get_file", path="x")], [search, get_file])
    assert made.is_complete
    assert calls == [{"query": "tea"}, {"path": "x"}]


@pytest.mark.parametrize(
    ("content", "output"),
    [
        ([SimpleNamespace(type="text", text="a")], "a"),
        ([SimpleNamespace(type="resource", resource=SimpleNamespace(text="b", mimeType="text/plain"))], "b"),
        (
            [SimpleNamespace(type="image", data="aaaa", mimeType="image/png")],
            {"type": "image", "mimeType": "image/png"},
        ),
        ([], []),
    ],
)
def test_what_a_server_answers_is_never_dropped_in_silence(content: list[Any], output: Any) -> None:
    class Session:
        async def call_tool(self, name: str, arguments: Any) -> Any:
            return SimpleNamespace(content=content, isError=False, structuredContent=None)

    assert asyncio.run(tools.call_mcp(Session(), "x", {})) == output


def test_where_a_check_says_no_nothing_is_written() -> None:
    ledger = Ledger()
    made = ask(
        [node("a", "add", row="x")], [ledger.add, ledger.count], {"count": "read"}, world=ledger,
        checks=[lambda outputs: False], max_candidates=3,
    )  # fmt: skip
    assert not made.is_complete
    assert ledger.rows == []


class Shop:
    """Remembers what was written."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def look(self) -> str:
        return "seen"

    def verify(self) -> str:
        raise ValueError("no")

    def reserve(self) -> str:
        self.done.append("reserve")
        return "ok"

    def charge(self) -> str:
        self.done.append("charge")
        return "ok"


READS = {"look": "read", "verify": "read"}


def test_no_writing_begins_that_the_calls_cannot_end() -> None:
    shop = Shop()
    nodes = [node("r", "look"), node("s", "look", "r"), node("a", "reserve", "s"), node("b", "charge", "a")]
    made = ask(nodes, [shop.look, shop.reserve, shop.charge], READS, max_tool_calls=2)
    assert shop.done == []
    assert not made.is_complete


def test_in_the_final_run_nothing_is_written_after_a_failure() -> None:
    shop = Shop()
    nodes = [node("a", "reserve"), node("v", "verify", "a"), node("b", "charge")]
    made = ask(nodes, [shop.reserve, shop.verify, shop.charge], READS)
    assert shop.done == ["reserve"]
    assert {each.node: each.status for each in made.execution.runs} == {"a": "ran", "v": "failed", "b": "skipped"}


def test_an_answer_that_cannot_be_read_after_a_write_is_told_and_not_raised() -> None:
    shop = Shop()

    def reply(prompt: str) -> str:
        asked = "[[ ## plan ## ]]" in prompt or "`plan`" in prompt
        return reply_for(prompt, plan=json.dumps([node("a", "charge")])) if asked else "It was charged."

    with dspy.context(lm=fake_lm(reply)):
        made = run(lambda: Evoflux("question -> answer", tools=[shop.charge]).acall(question="?"))
        with pytest.raises(Exception, match="answer"):
            run(lambda: Evoflux("question -> answer", tools=[shop.charge], effects="read").acall(question="?"))
    assert (made.answer, made.is_complete, made.citations) == (None, True, [])
    assert "answer" in made.stats.answer_error


def test_an_lm_error_of_an_edit_ends_the_search_with_what_was_found() -> None:
    shop = Shop()

    def reply(prompt: str) -> str:
        if "[[ ## workflow ## ]]" in prompt:
            raise ConnectionError("429 too many requests")
        if "[[ ## plan ## ]]" in prompt:
            return reply_for(prompt, plan=json.dumps([node("a", "look"), node("b", "verify")]))
        return reply_for(prompt, answer="so far", citations='["a"]')

    program = Evoflux("question -> answer", tools=[shop.look, shop.verify], effects="read")
    with dspy.context(lm=lm_of(reply, "lm")):
        made = program(question="?")
    assert (made.answer, made.citations) == ("so far", ["a"])
    assert "429" in made.stats.stop_reason


def test_a_reply_that_cannot_be_read_is_asked_for_anew_though_dspy_caches_and_with_what_was_wrong(
    tmp_path: Path,
) -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        if "[[ ## plan ## ]]" in prompt or "`plan`" in prompt:
            return reply_for(prompt, plan="for city in cities: weather(city)" if len(prompts) < 3 else json.dumps(GOOD))
        return reply_for(prompt, answer="4 degrees", citations="[]")

    lm = fake_lm(reply)
    lm.cache = True
    with dspy.context(lm=lm):
        made = run(lambda: Evoflux("question -> answer", tools=TOOLS, effects="read").acall(question=str(tmp_path)))
    assert made.answer == "4 degrees"
    assert made.stats.unusable_replies >= 1
    assert any("could not be read" in prompt for prompt in prompts)


@pytest.mark.parametrize("field", ["is_complete", "execution", "stats", "workflow"])
def test_an_output_that_has_a_name_of_evofluxs_own_is_refused(field: str) -> None:
    with pytest.raises(ConfigurationError, match="rename"):
        Evoflux(f"question -> {field}", tools=TOOLS)


class Stuck:
    """A session whose server never lists its tools."""

    async def list_tools(self) -> Any:
        await anyio.sleep_forever()


def test_a_session_that_does_not_list_its_tools_is_an_error_after_a_minute() -> None:
    with pytest.raises(RuntimeError, match="Stuck did not list its tools within 60 seconds"):
        ask([], [Stuck()])


def test_a_session_on_a_running_loop_is_not_called_synchronously() -> None:
    async def main() -> None:
        with pytest.raises(ConfigurationError, match="use await program"):
            Evoflux("question -> answer", tools=[Stuck()])(question="?")

    asyncio.run(main())


def test_a_call_that_is_given_up_leaves_the_other_calls_of_its_server_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    class Session:
        """One server, in memory."""

        async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
            log.append(f"{name} begins")
            await anyio.sleep(5)
            log.append(f"{name} ends")
            return SimpleNamespace(content=[], isError=False, structuredContent={})

    async def own(self: DirectoryWorld, command: Any, ready: asyncio.Future[Any]) -> None:
        ready.set_result(Session())
        try:
            await asyncio.Event().wait()
        finally:
            log.append("server ends")

    monkeypatch.setattr(DirectoryWorld, "_own", own)

    async def main() -> None:
        async with DirectoryWorld(tmp_path, {"s": ["server"]}) as world:
            world._server_of.update(transfer="s", read="s")
            async with anyio.create_task_group() as group:
                group.start_soon(world.call, "transfer", {})
                await anyio.sleep(1)
                with anyio.move_on_after(2):
                    await world.call("read", {})
                log.append("given up")
                await world.call("read", {})

    run(main)
    assert log.index("given up") < log.index("transfer ends") < log.index("server ends")
    assert log.count("server ends") == 2, "the next call had a new one, and none is left"
