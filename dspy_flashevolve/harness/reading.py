"""A proposer's tools: list, read and search the archive. They answer with text, never with an error."""

from __future__ import annotations

from collections.abc import Callable

from dspy_flashevolve.harness.files import Library

PAGE_CHARACTERS = 6000
MOST_LINES = 60


def tools_of(library: Library) -> list[Callable[..., str]]:
    """The tools; they may be called in any thread."""

    def list_files(folder: str = "") -> str:
        """List the archive's files under a folder, such as "candidates/0003"; all of them without one."""
        prefix = str(folder).strip("/")
        found = [path for path in sorted(library.files) if path.startswith(prefix)]
        more = f"\n... and {len(found) - MOST_LINES} more: name a folder" if len(found) > MOST_LINES else ""
        return "\n".join(found[:MOST_LINES]) + more or f"There is no file under {prefix!r}."

    def read_file(path: str, page: int = 1) -> str:
        """Read a file of the archive, such as "candidates/0003/source.py"; long ones by page, from 1."""
        text = library.files.get(str(path).strip("/"))
        if text is None:
            return f"There is no file {path!r}; list_files tells which there are."
        pages = max(1, -(-len(text) // PAGE_CHARACTERS))
        number = min(max(1, page), pages) if isinstance(page, int) else 1  # pyright: ignore[reportUnnecessaryIsInstance]
        shown = text[(number - 1) * PAGE_CHARACTERS : number * PAGE_CHARACTERS]
        return shown if pages == 1 else f"(page {number} of {pages})\n{shown}"

    def search_files(text: str, folder: str = "") -> str:
        """Find lines of the archive that hold a text, in any case; under a folder where one is given."""
        wanted, prefix = str(text).lower(), str(folder).strip("/")
        hits = [
            f"{path}:{number}: {line.strip()[:300]}"
            for path in sorted(library.files)
            if path.startswith(prefix)
            for number, line in enumerate(library.files[path].splitlines(), start=1)
            if wanted and wanted in line.lower()
        ]
        more = f"\n... and {len(hits) - MOST_LINES} more" if len(hits) > MOST_LINES else ""
        return "\n".join(hits[:MOST_LINES]) + more or f"No line holds {wanted!r}."

    return [list_files, read_file, search_files]
