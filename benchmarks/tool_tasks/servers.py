"""Tasks over real MCP servers on real state: rows of SQLite and DuckDB, git, cells of a spreadsheet, text files.

The servers come from PyPI and start without network: ``pip install 'mcp<2' mcp-server-sqlite mcp-server-git
mcp-server-time mcp-server-calculator mcp-server-duckdb excel-mcp-server mcp-text-editor``. Each task begins in a fresh
directory. Its oracle compares every row, cell, file, branch and commit message with what there should be, so that what
is unrelated has to be unchanged. A third of the tasks is held out: they work on tools that no other task has, and all
their tools and parameters have other names than the servers give them.

The spreadsheet's and the editor's servers take absolute paths only, which would lead out of a copy of the directory:
here their paths are relative to it. The CSV servers of PyPI keep their tables in memory, which no copy of a directory
has, so that there is none.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio

from dspy_flashevolve.evoflux import DirectoryWorld, ToolSpec
from dspy_flashevolve.evoflux.tools import Effect, Schema, catalogue_of

COMMANDS: dict[str, list[str]] = {
    "sqlite": ["mcp-server-sqlite", "--db-path", "{directory}/shop.db"],
    "git": ["mcp-server-git", "--repository", "{directory}/repo"],
    "time": ["mcp-server-time", "--local-timezone", "UTC"],
    "calculator": ["mcp-server-calculator"],
    "excel": ["excel-mcp-server", "stdio"],
    "editor": ["mcp-text-editor"],
    "duckdb": ["mcp-server-duckdb", "--db-path", "{directory}/sales.duckdb"],
}
EFFECTS: dict[str, Effect] = {
    "read_query": "read", "list_tables": "read", "describe_table": "read", "calculate": "read",
    "read_data_from_excel": "read", "get_text_file_contents": "read",
}  # fmt: skip
"""What the servers' annotations leave out."""
NEW_TOOLS = {
    "query": "warehouse_sql", "calculate": "evaluate", "git_create_branch": "branch_open", "git_log": "history",
    "create_worksheet": "sheet_open",
}  # fmt: skip
NEW_PARAMETERS = {
    "query": "statement", "expression": "formula", "branch_name": "title", "base_branch": "from_title",
    "repo_path": "checkout", "max_count": "most", "filepath": "workbook", "sheet_name": "label",
}  # fmt: skip
"""Name that a server gives -> the one that held-out tasks see."""
ITEMS = ("tea", "coffee", "sugar", "milk", "bread", "rice", "salt", "honey")


def command_of(server: str) -> list[str]:
    """How a server is started: by the script that pip put beside this Python."""
    program, *arguments = COMMANDS[server]
    return [str(Path(sysconfig.get_path("scripts")) / program), *arguments]


def are_installed() -> bool:
    """Whether all servers are there."""
    return all(Path(command_of(server)[0]).exists() for server in COMMANDS)


class ServerWorld:
    """A directory with servers, whose tools have other names for held-out tasks."""

    def __init__(self, inner: DirectoryWorld, tools: frozenset[str], is_renamed: bool) -> None:
        self.inner, self._tools, self._is_renamed = inner, tools, is_renamed
        self._new_tools, self._new_parameters = (NEW_TOOLS, NEW_PARAMETERS) if is_renamed else ({}, {})
        self._old_tools = {new: old for old, new in self._new_tools.items()}
        self._old_parameters = {new: old for old, new in self._new_parameters.items()}

    async def specs(self) -> list[ToolSpec]:
        """The tools of the task, from the servers' own lists."""
        listed = await catalogue_of([self.inner], EFFECTS)
        return [self._renamed(spec) for name, spec in listed.items() if name in self._tools]

    def _renamed(self, spec: ToolSpec) -> ToolSpec:
        def schema(given: Schema) -> Schema:
            properties = {
                self._new_parameters.get(name, name): each for name, each in given.get("properties", {}).items()
            }
            required = [self._new_parameters.get(name, name) for name in given.get("required", [])]
            return {**given, "properties": properties, "required": required, "additionalProperties": False}

        name = self._new_tools.get(spec.name, spec.name)

        async def call(**arguments: Any) -> Any:
            return await self.call(name, arguments)

        return replace(spec, name=name, input_schema=schema(spec.input_schema), function=call)

    def holds(self, tool: str) -> bool:
        """Whether a tool is one of the servers'."""
        return self.inner.holds(self._old_tools.get(tool, tool))

    async def fork(self) -> ServerWorld:
        """Copy the directory."""
        return ServerWorld(await self.inner.fork(), self._tools, self._is_renamed)

    async def prepare(self, tool: str) -> None:
        """Start the tool's server."""
        await self.inner.prepare(self._old_tools.get(tool, tool))

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool by its own name."""
        given = {self._old_parameters.get(name, name): value for name, value in arguments.items()}
        return await self.inner.call(self._old_tools.get(tool, tool), _within(self.inner.directory, given))

    async def close(self) -> None:
        """End the servers."""
        await self.inner.close()


def _within(directory: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of the spreadsheet's and the editor's servers with their paths in a directory.

    Args:
        given: arguments; other servers' are returned as they are.
    """

    def path(value: Any) -> Any:
        return str(directory / value.lstrip("/")) if isinstance(value, str) and ".." not in value else value

    made = {name: path(value) if name == "filepath" else value for name, value in given.items()}
    if isinstance(made.get("files"), list):
        made["files"] = [
            {**each, "path": path(each.get("path"))} if isinstance(each, dict) else each for each in made["files"]
        ]
    return made


@dataclass(frozen=True)
class ServerTask:
    """A task.

    Args:
        name: of it.
        question: what is to be done.
        nodes: a workflow that does it, in JSON.
        servers: on which it works.
        tools: that it may use, by the servers' names.
        is_held_out: its tools have other names, and no other task has them.
        stock: item -> count, where it changes.
        notes: rows that are new.
        sales: rows of the DuckDB that are new.
        branches: branches that are new.
        message: of the new commit; None for none.
        cells: row and column, from 0, of the sheet Prices -> value, where it changes.
        sheets: empty sheets that are new.
        memos: name of a new text file -> its text.
    """

    name: str
    question: str
    nodes: tuple[dict[str, Any], ...]
    servers: tuple[str, ...]
    tools: frozenset[str]
    is_held_out: bool = False
    stock: Mapping[str, int] = field(default_factory=dict[str, int])
    notes: tuple[str, ...] = ()
    sales: tuple[tuple[str, int], ...] = ()
    branches: tuple[str, ...] = ()
    message: str | None = None
    cells: Mapping[tuple[int, int], Any] = field(default_factory=dict[tuple[int, int], Any])
    sheets: tuple[str, ...] = ()
    memos: Mapping[str, str] = field(default_factory=dict[str, str])

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[ServerWorld, None]:
        """Give a fresh directory with its servers for the block."""
        with tempfile.TemporaryDirectory(prefix="tool-task-") as place:
            directory = Path(place) / "world"
            await anyio.to_thread.run_sync(make_state, directory)
            async with DirectoryWorld(directory, {name: command_of(name) for name in self.servers}) as inner:
                yield ServerWorld(inner, self.tools, self.is_held_out)

    async def is_reached(self, world: ServerWorld) -> bool:
        """The oracle: whether the state is the one that the task wants, and nothing else has changed."""
        wanted = first_state()
        wanted["stock"].update(self.stock)
        wanted["notes"] += self.notes
        wanted["sales"] += self.sales
        wanted["branches"] = sorted([*wanted["branches"], *self.branches])
        if self.message is not None:
            wanted["commits"].insert(0, self.message)
            wanted["dirty"] = []
        for (row, column), value in self.cells.items():
            wanted["sheets"]["Prices"][row][column] = value
        wanted["sheets"].update({name: [] for name in self.sheets})
        wanted["memos"].update({name: f"{text}\n" for name, text in self.memos.items()})  # the editor ends a line
        await world.close()  # DuckDB lets one process in
        return await anyio.to_thread.run_sync(state_of, world.inner.directory) == wanted


def first_state() -> dict[str, Any]:
    """The state in which every task begins, as :func:`state_of` tells it."""
    return {
        "stock": {name: 10 + number for number, name in enumerate(ITEMS)},
        "notes": ["first note"],
        "sales": [("tea", 3), ("rice", 5)],
        "branches": ["main"],
        "commits": ["begin"],
        "dirty": ["A  plan.txt"],
        "files": {"plan.txt": "buy tea\n", "readme.txt": "the shop\n"},
        "sheets": {"Prices": [["item", "price"], *([name, 2 + number] for number, name in enumerate(ITEMS))]},
        "memos": {"call.txt": "call Ann\n"},
    }


def make_state(directory: Path) -> None:
    """Fill a directory: two databases, a git repository with one file that is staged, a spreadsheet and a memo."""
    import duckdb  # pyright: ignore[reportMissingImports]
    import openpyxl  # pyright: ignore[reportMissingImports]

    first, repository = first_state(), directory / "repo"
    repository.mkdir(parents=True)
    with closing(sqlite3.connect(directory / "shop.db")) as database, database:
        database.execute("CREATE TABLE stock (name TEXT PRIMARY KEY, count INTEGER)")
        database.execute("CREATE TABLE notes (text TEXT)")
        database.executemany("INSERT INTO stock VALUES (?, ?)", first["stock"].items())
        database.execute("INSERT INTO notes VALUES (?)", first["notes"])
    with duckdb.connect(str(directory / "sales.duckdb")) as warehouse:
        warehouse.execute("CREATE TABLE sales (item TEXT, amount INTEGER)")
        warehouse.executemany("INSERT INTO sales VALUES (?, ?)", first["sales"])
    book = openpyxl.Workbook()
    book.active.title = "Prices"
    for row in first["sheets"]["Prices"]:
        book.active.append(row)
    book.save(directory / "shop.xlsx")
    for name, text in first["memos"].items():
        (directory / name).write_text(text, encoding="utf-8")
    _git(repository, "init", "-q", "-b", "main")
    _git(repository, "config", "user.name", "shop")
    _git(repository, "config", "user.email", "shop@example.org")
    (repository / "readme.txt").write_text(first["files"]["readme.txt"], encoding="utf-8")
    _git(repository, "add", "readme.txt")
    _git(repository, "commit", "-q", "-m", "begin")
    (repository / "plan.txt").write_text(first["files"]["plan.txt"], encoding="utf-8")
    _git(repository, "add", "plan.txt")


def state_of(directory: Path) -> dict[str, Any]:
    """Read all that tasks may change in a directory."""
    import duckdb  # pyright: ignore[reportMissingImports]
    import openpyxl  # pyright: ignore[reportMissingImports]

    repository = directory / "repo"
    with closing(sqlite3.connect(directory / "shop.db")) as database:
        stock = dict(database.execute("SELECT name, count FROM stock"))
        notes = [text for (text,) in database.execute("SELECT text FROM notes ORDER BY rowid")]
    with duckdb.connect(str(directory / "sales.duckdb")) as warehouse:
        sales = warehouse.execute("SELECT item, amount FROM sales").fetchall()
    with closing(openpyxl.load_workbook(directory / "shop.xlsx")) as book:
        sheets = {
            sheet.title: [
                list(row) for row in sheet.iter_rows(values_only=True) if any(cell is not None for cell in row)
            ]
            for sheet in book
        }
    return {
        "sheets": sheets,
        "memos": {path.name: path.read_text(encoding="utf-8") for path in sorted(directory.glob("*.txt"))},
        "stock": stock,
        "notes": notes,
        "sales": sales,
        "branches": sorted(_git(repository, "branch", "--format", "%(refname:short)").split()),
        "commits": [line.strip() for line in _git(repository, "log", "--format=%s", "--all").splitlines()],
        "dirty": _git(repository, "status", "--porcelain").splitlines(),
        "files": {path.name: path.read_text(encoding="utf-8") for path in sorted(repository.glob("*.txt"))},
    }


def _git(repository: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def server_tasks() -> list[ServerTask]:
    """All sixty: twenty each over one, two and three servers; every third is held out.

    The first 24 are on databases, git, a clock and a calculator, the others on a spreadsheet and text files, too.
    """
    first = [_held_out(number) if number % 3 == 2 else _seen(number) for number in range(24)]
    return first + [_sheet_held_out(number) if number % 3 == 2 else _sheet_seen(number) for number in range(24, 60)]


def _seen(number: int) -> ServerTask:
    """Stock and notes in SQLite; the staged plan is committed with a time as its message."""
    count, item, amount = number // 3 % 3 + 1, ITEMS[number % len(ITEMS)], 20 + number
    hour = f"{number % 24:02d}:30"
    rows: list[dict[str, Any]] = [
        {"id": "old", "tool": "read_query", "parameters": {"query": f"SELECT count FROM stock WHERE name = '{item}'"}},
        {
            "id": "set",
            "tool": "write_query",
            "parameters": {"query": f"UPDATE stock SET count = {amount} WHERE name = '{item}'"},
            "after": ["old"],
        },
    ]
    question = f"Look up the count of {item} in the table stock, then set it to {amount}"
    if count == 1:
        note = {"query": f"INSERT INTO notes VALUES ('{item} is counted')"}
        rows.append({"id": "note", "tool": "write_query", "parameters": note, "after": ["set"]})
        question += f", and add the note '{item} is counted'"
        tools = frozenset({"read_query", "write_query", "list_tables"})
        return ServerTask(
            f"servers-{number}", question + ".", tuple(rows), ("sqlite",), tools, stock={item: amount},
            notes=(f"{item} is counted",),
        )  # fmt: skip
    tools = {"read_query", "write_query", "git_commit", "git_status"}
    message: Any = f"{item} is {amount}"
    if count == 3:
        given = {"source_timezone": "UTC", "time": hour, "target_timezone": "Asia/Tokyo"}
        rows.append({"id": "clock", "tool": "convert_time", "parameters": given})
        message = {"$ref": "clock.time_difference"}
        question += f"; convert {hour} UTC to Asia/Tokyo"
        tools.add("convert_time")
    commit = {"repo_path": "repo", "message": message}
    rows.append({"id": "commit", "tool": "git_commit", "parameters": commit, "after": ["set"]})
    told = "the time difference" if count == 3 else f"'{message}'"
    question += f", and commit what is staged in repo with {told} as the message"
    servers = ("sqlite", "git", "time")[:count]
    wanted = "+9.0h" if count == 3 else message
    return ServerTask(
        f"servers-{number}", question + ".", tuple(rows), servers, frozenset(tools), stock={item: amount},
        message=wanted,
    )  # fmt: skip


def _held_out(number: int) -> ServerTask:
    """Sales in DuckDB, sums by a calculator, and branches; all under other names."""
    count, item, amount = number // 3 % 3 + 1, ITEMS[number % len(ITEMS)], 1 + number
    insert = {"statement": f"INSERT INTO sales VALUES ('{item}', {amount})"}
    rows: list[dict[str, Any]] = [{"id": "sale", "tool": "warehouse_sql", "parameters": insert}]
    question, tools = f"Enter a sale of {amount} {item} into the table sales", {"query"}
    title: Any = f"sold-{item}"
    branches: tuple[str, ...] = ()
    if count == 3:
        rows.append({"id": "sum", "tool": "evaluate", "parameters": {"formula": f"{amount} * 7"}})
        title = {"$ref": "sum.result"}
        question += f", evaluate {amount} * 7"
        tools.add("calculate")
    if count >= 2:
        branch = {"checkout": "repo", "title": title}
        rows.append({"id": "branch", "tool": "branch_open", "parameters": branch, "after": ["sale"]})
        branches = (str(amount * 7),) if count == 3 else (f"sold-{item}",)
        question += f", and open a branch in repo named {'by the result' if count == 3 else title}"
        tools |= {"git_create_branch", "git_log"}
    servers = ("duckdb", "git", "calculator")[:count]
    return ServerTask(
        f"servers-{number}", question + ".", tuple(rows), servers, frozenset(tools), is_held_out=True,
        sales=((item, amount),), branches=branches,
    )  # fmt: skip


def _sheet_seen(number: int) -> ServerTask:
    """A price in the spreadsheet, then a memo in a text file, whose text is a time in the third kind."""
    count, row, price = number // 3 % 3 + 1, number % len(ITEMS), 30 + number
    item, cell = ITEMS[row], f"B{row + 2}"
    book = {"filepath": "shop.xlsx", "sheet_name": "Prices"}
    rows: list[dict[str, Any]] = [
        {"id": "old", "tool": "read_data_from_excel", "parameters": {**book, "start_cell": cell, "end_cell": cell}},
        {
            "id": "set",
            "tool": "write_data_to_excel",
            "parameters": {**book, "data": [[price]], "start_cell": cell},
            "after": ["old"],
        },
    ]
    question = f"In shop.xlsx, sheet Prices, look up the price of {item} in cell {cell}, then set it to {price}"
    tools, memos, hour = {"read_data_from_excel", "write_data_to_excel"}, dict[str, str](), f"{number % 24:02d}:15"
    if count == 3:
        given = {"source_timezone": "UTC", "time": hour, "target_timezone": "Asia/Kolkata"}
        rows.append({"id": "clock", "tool": "convert_time", "parameters": given})
        question += f"; convert {hour} UTC to Asia/Kolkata"
        tools.add("convert_time")
    if count >= 2:
        text: Any = {"$ref": "clock.time_difference"} if count == 3 else f"{item} costs {price}"
        memo = {"path": f"{item}.txt", "file_hash": "", "patches": [{"contents": text}]}
        rows.append(
            {"id": "memo", "tool": "edit_text_file_contents", "parameters": {"files": [memo]}, "after": ["set"]}
        )
        told = "the time difference" if count == 3 else f"'{text}'"
        question += f", and write a new text file {item}.txt (its file_hash is empty) with {told} as its contents"
        memos = {f"{item}.txt": "+5.5h" if count == 3 else f"{item} costs {price}"}
        tools |= {"get_text_file_contents", "edit_text_file_contents"}
    return ServerTask(
        f"servers-{number}", question + ".", tuple(rows), ("excel", "editor", "time")[:count], frozenset(tools),
        cells={(row + 1, 1): price}, memos=memos,
    )  # fmt: skip


def _sheet_held_out(number: int) -> ServerTask:
    """A new sheet, a sale in DuckDB, and a sum that names the sheet; all under other names."""
    count, item, amount = number // 3 % 3 + 1, ITEMS[number % len(ITEMS)], 1 + number
    rows: list[dict[str, Any]] = []
    tools, label, question = {"create_worksheet"}, f"{item} {amount}", ""
    named: Any = label
    if count == 3:
        rows.append({"id": "sum", "tool": "evaluate", "parameters": {"formula": f"{amount} * 11"}})
        named, label = {"$ref": "sum.result"}, str(amount * 11)
        question = f"Evaluate {amount} * 11. "
        tools.add("calculate")
    rows.append({"id": "sheet", "tool": "sheet_open", "parameters": {"workbook": "shop.xlsx", "label": named}})
    question += f"Open a new sheet in shop.xlsx named {'by the result' if count == 3 else repr(label)}"
    sales: tuple[tuple[str, int], ...] = ()
    if count >= 2:
        insert = {"statement": f"INSERT INTO sales VALUES ('{item}', {amount})"}
        rows.append({"id": "sale", "tool": "warehouse_sql", "parameters": insert, "after": ["sheet"]})
        question += f", and enter a sale of {amount} {item} into the table sales"
        sales = ((item, amount),)
        tools.add("query")
    return ServerTask(
        f"servers-{number}", question + ".", tuple(rows), ("excel", "duckdb", "calculator")[:count], frozenset(tools),
        is_held_out=True, sales=sales, sheets=(label,),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(0 if are_installed() else 1)
