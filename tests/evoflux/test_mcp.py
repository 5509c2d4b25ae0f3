"""Real MCP servers over stdio and HTTP: their schemas, copies of their state, and what is left behind."""

from __future__ import annotations

import asyncio
import importlib
import socket
import sqlite3
import subprocess
import sys
import sysconfig
from contextlib import closing
from pathlib import Path
from typing import Any

import dspy
import pytest

from dspy_flashevolve import ConfigurationError
from dspy_flashevolve.evoflux import DirectoryWorld, Evoflux
from dspy_flashevolve.evoflux.tools import catalogue_of
from tests.evoflux.worlds import ScriptedPlanner

SERVER = str(Path(__file__).with_name("server.py"))


@pytest.fixture
def sdk() -> None:
    pytest.importorskip("mcp", reason="needs the extra evoflux")


def children() -> set[str]:
    """The processes that this one has started and that live."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        found |= set((task / "children").read_text().split())
    return found


def world(directory: Path) -> DirectoryWorld:
    return DirectoryWorld(directory, {"notes": [sys.executable, SERVER, "{directory}"]})


async def answered(notes: Any, planner: ScriptedPlanner, **options: object) -> dspy.Prediction:
    program = Evoflux("question -> answer", tools=[notes], **options)  # type: ignore[arg-type]
    with dspy.context(lm=planner.lm):
        return await program.acall(question="?")


@pytest.mark.usefixtures("sdk")
def test_the_catalogue_has_the_servers_own_schemas_and_annotations(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as notes:
            tools = await catalogue_of([notes])
        assert {name: spec.effect for name, spec in tools.items()} == {
            "list_notes": "read", "write_note": "write", "hang": "read", "die": "read", "fail": "read",
        }  # fmt: skip
        assert tools["write_note"].input_schema["required"] == ["name", "text"]
        assert tools["list_notes"].output_schema is not None

    asyncio.run(main())


@pytest.mark.usefixtures("sdk")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_candidates_change_copies_the_winner_the_directory_and_no_process_is_left(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    before = children()
    write = "w = write_note(name='new', text='hello')\nh = "
    planner = ScriptedPlanner([f"{write}fail()"], [f"{write}list_notes()"])

    async def main() -> dspy.Prediction:
        async with world(tmp_path) as notes:
            return await answered(notes, planner, width=1)

    made = asyncio.run(main())
    assert made.is_complete
    assert made.execution.outputs["h"] == {"result": ["new", "old"]}
    assert (tmp_path / "new").read_text() == "hello"
    assert children() == before


@pytest.mark.usefixtures("sdk")
def test_a_session_over_http_is_a_tool(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def main() -> dspy.Prediction:
        mcp, client = importlib.import_module("mcp"), importlib.import_module("mcp.client.streamable_http")
        async with (
            client.streamablehttp_client(f"http://127.0.0.1:{port}/mcp") as (reads, writes, _),
            mcp.ClientSession(reads, writes) as session,
        ):
            await session.initialize()
            return await answered(session, ScriptedPlanner(["write_note('new', 'hello')\nnotes = list_notes()"]))

    process = subprocess.Popen(
        [sys.executable, SERVER, str(tmp_path), str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        assert any("Uvicorn running" in line for line in process.stderr)
        made = asyncio.run(main())
    finally:
        process.kill()
        process.communicate()
    assert made.is_complete
    assert made.execution.outputs["notes"] == {"result": ["new", "old"]}


@pytest.mark.long
@pytest.mark.usefixtures("sdk")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_a_server_that_hangs_is_an_error_of_its_node_and_no_process_is_left(tmp_path: Path) -> None:
    before = children()

    async def main() -> dspy.Prediction:
        async with world(tmp_path) as notes:
            planner = ScriptedPlanner(["hang()"])
            return await answered(notes, planner, max_candidates=1, tool_timeout_seconds=0.1)

    made = asyncio.run(main())
    assert made.execution.runs[0].fault == "timeout"
    assert children() == before


def test_without_the_sdk_the_error_says_which_extra_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = importlib.import_module

    def without(name: str) -> object:
        if name.startswith("mcp"):
            raise ImportError("No module named 'mcp'")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(ConfigurationError, match=r"dspy-flashevolve\[evoflux\]"):
        asyncio.run(world(tmp_path).list_tools())


@pytest.mark.usefixtures("sdk")
def test_a_server_that_does_not_start_in_time_is_reported_with_the_time_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspy_flashevolve.evoflux.mcp.START_SECONDS", 0.2)
    slow = DirectoryWorld(tmp_path, {"slow": [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]})
    with pytest.raises(RuntimeError, match=r"'slow' did not start within 0\.2 seconds"):
        asyncio.run(catalogue_of([slow]))


PROGRAM = Path(sysconfig.get_path("scripts")) / "mcp-server-sqlite"


def rows(database: Path) -> list[tuple[str, int]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute("SELECT name, count FROM stock").fetchall()


@pytest.mark.skipif(not PROGRAM.exists(), reason="needs mcp-server-sqlite")
def test_a_search_over_sqlite_changes_the_rows_of_the_question_once_and_no_others(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection, connection:
        connection.execute("CREATE TABLE stock (name TEXT, count INTEGER)")
        connection.executemany("INSERT INTO stock VALUES (?, ?)", [("tea", 1), ("salt", 5)])
    change = "UPDATE stock SET count = count + 1 WHERE name = 'tea'"
    plan = (
        f"write_query(query={change!r})\ndescribe_table(table='stock')\nout = read_querys(query='SELECT * FROM stock')"
    )

    async def main() -> dspy.Prediction:
        command = [str(PROGRAM), "--db-path", "{directory}/shop.db"]
        async with DirectoryWorld(tmp_path, {"sqlite": command}) as world:
            program = Evoflux(
                "question -> answer", [world], effects={"read_query": "read", "describe_table": "read"}
            )  # the server has no annotations
            with dspy.context(lm=ScriptedPlanner([plan]).lm):
                return await program.acall(question="?")

    made = asyncio.run(main())
    assert made.is_complete
    assert made.execution.outputs["out"] == [{"name": "tea", "count": 2}, {"name": "salt", "count": 5}]
    assert rows(tmp_path / "shop.db") == [("tea", 2), ("salt", 5)]
