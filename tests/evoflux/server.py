"""A tiny MCP server for the tests: notes in a directory, its argument, and tools that misbehave.

It answers over stdio, or over HTTP where a second argument names a port.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from mcp.server.fastmcp import FastMCP
from mcp.types import ToolAnnotations

DIRECTORY = Path(sys.argv[1])
server = FastMCP("notes", port=int(sys.argv[2]) if len(sys.argv) > 2 else 8000)


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
def list_notes() -> list[str]:
    """List the names of the notes."""
    return sorted(path.name for path in DIRECTORY.iterdir())


@server.tool()
def write_note(name: str, text: str) -> str:
    """Write a note."""
    (DIRECTORY / name).write_text(text, encoding="utf-8")
    return f"wrote {name}"


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
def hang() -> str:
    """Never answer."""
    time.sleep(3600)
    return ""


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
def die() -> str:
    """End the server."""
    os._exit(1)


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
def fail() -> str:
    """Report an error."""
    raise ValueError("there is nothing to see")


if __name__ == "__main__":
    server.run("streamable-http" if len(sys.argv) > 2 else "stdio")
    os._exit(0)  # the interpreter would take a second to end
