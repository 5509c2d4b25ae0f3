"""A server from PyPI, if it is installed: ``pip install mcp-server-sqlite``."""

from __future__ import annotations

import asyncio
import sqlite3
import sysconfig
from contextlib import closing
from pathlib import Path

import dspy
import pytest

from dspy_flashevolve.evoflux import DirectoryWorld, Evoflux
from tests.evoflux.worlds import ScriptedPlanner

PROGRAM = Path(sysconfig.get_path("scripts")) / "mcp-server-sqlite"


def rows(database: Path) -> list[tuple[str, int]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute("SELECT name, count FROM stock").fetchall()


@pytest.mark.skipif(not PROGRAM.exists(), reason="needs mcp-server-sqlite")
def test_a_search_over_sqlite_changes_the_rows_of_the_question_once_and_no_others(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection, connection:
        connection.execute("CREATE TABLE stock (name TEXT, count INTEGER)")
        connection.executemany("INSERT INTO stock VALUES (?, ?)", [("tea", 1), ("salt", 5)])
    change = {"query": "UPDATE stock SET count = count + 1 WHERE name = 'tea'"}
    nodes = [
        {"id": "set", "tool": "write_query", "parameters": change},
        {"id": "see", "tool": "describe_table", "parameters": {"table": "stock"}, "after": ["set"]},
        {"id": "out", "tool": "read_querys", "parameters": {"query": "SELECT * FROM stock"}, "after": ["set"]},
    ]

    async def main() -> dspy.Prediction:
        command = [str(PROGRAM), "--db-path", "{directory}/shop.db"]
        async with DirectoryWorld(tmp_path, {"sqlite": command}) as world:
            program = Evoflux(
                "question -> answer", [world], effects={"read_query": "read", "describe_table": "read"}
            )  # the server has no annotations
            with dspy.context(lm=ScriptedPlanner([{"nodes": nodes}]).lm):
                return await program.acall(question="?")

    made = asyncio.run(main())
    assert made.is_complete
    assert made.execution.outputs["out"] == [{"name": "tea", "count": 2}, {"name": "salt", "count": 5}]
    assert rows(tmp_path / "shop.db") == [("tea", 2), ("salt", 5)]
