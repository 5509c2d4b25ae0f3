"""Files of a run directory, which hold prompts, examples and their labels: nobody but the user may read them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from dspy_flashevolve.engine.errors import JournalError


def open_private(path: str, flags: int) -> int:
    """Open a file that is made for the user alone, from its first moment; an ``opener`` for :func:`open`."""
    return os.open(path, flags, 0o600)


def write_private(path: Path, content: bytes | str) -> None:
    """Write a file of a run directory, whole or not at all. A link in its place is replaced, and not followed.

    Raises:
        JournalError: it cannot be written.
    """
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished.unlink(missing_ok=True)
        with open(unfinished, "xb", opener=open_private) as file:
            file.write(content.encode("utf-8", "replace") if isinstance(content, str) else content)
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise JournalError(
            f"{path} cannot be written ({error.strerror or error}): the run ends. What was paid for is in the journal, "
            "and the file is as it was. Mend that (a full disk, say), then run again with the same log_dir."
        ) from error
