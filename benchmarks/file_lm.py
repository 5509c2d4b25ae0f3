"""A language model whose replies are files: whoever can read a prompt and write a file is the model.

`python -m benchmarks.run --reflection-model file:FOLDER` makes a request `FOLDER/RUN/NNNN.request.txt` and answers it
with what `NNNN.reply.txt` holds, once it is there. Whoever answers uses these commands, any number of them at once:

    python -m benchmarks.file_lm next FOLDER          claim an open request and print it; waits up to nine minutes
    python -m benchmarks.file_lm answer FOLDER NAME   take standard input as the reply, then do as `next`
    python -m benchmarks.file_lm end FOLDER           tell all who wait that there are no further requests

`next` takes the oldest open request of all runs, so that those who answer get the requests of several runs in turn.
Whoever answers is to treat each request as the first that he sees.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from pathlib import Path

POLL_SECONDS = 0.3
"""How often a folder is looked at; a reply takes ten seconds and more."""
WAIT_SECONDS = 540.0
"""How long `next` waits; many shells end a command after ten minutes."""


class FileModel:
    """Answers requests with files.

    Args:
        folder: Where the files of one run lie.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._numbers = itertools.count(len(list(folder.glob("*.request.txt"))) + 1)

    async def reply(self, messages: list[tuple[str, str]]) -> str:
        """The reply of whoever answers."""
        name = f"{next(self._numbers):04d}"
        prompt = "\n\n".join(f"[{role}]\n{text}" for role, text in messages)
        write(self.folder / f"{name}.request.txt", prompt)
        file, asked = self.folder / f"{name}.reply.txt", time.time()
        while not file.exists():  # noqa: ASYNC110  # a file tells nobody that it is there
            await asyncio.sleep(POLL_SECONDS)
        text = file.read_text(encoding="utf-8").strip()
        row = {"name": name, "asked": asked, "seconds": time.time() - asked, "prompt": len(prompt), "reply": len(text)}
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")
        return text


def write(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    draft = path.with_suffix(".draft")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def open_requests(folder: Path) -> list[Path]:
    """Requests without a reply that nobody has claimed, the oldest first."""
    requests = sorted(folder.rglob("*.request.txt"), key=lambda path: path.stat().st_mtime)
    return [path for path in requests if not reply_path(path).exists() and not claim_path(path).exists()]


def reply_path(request: Path) -> Path:
    """Where the reply to a request goes."""
    return request.with_name(request.name.replace(".request.", ".reply."))


def claim_path(request: Path) -> Path:
    """What says that somebody is about to answer a request."""
    return request.with_name(request.name.replace(".request.txt", ".claim"))


def claim(folder: Path) -> Path | None:
    """Claim the oldest open request; None where there is none."""
    for request in open_requests(folder):
        try:
            claim_path(request).mkdir()
        except FileExistsError:
            continue
        return request
    return None


def take_next(folder: Path) -> str:
    """What `next` prints."""
    ends = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < ends:
        request = claim(folder)
        if request is not None:
            name = str(request.relative_to(folder)).replace(".request.txt", "")
            return f"REQUEST {name}\n{request.read_text(encoding='utf-8')}"
        if (folder / "END").exists():
            return "FINISHED: there are no further requests."
        time.sleep(POLL_SECONDS)
    return "NOTHING yet: ask again."


def main(arguments: list[str]) -> int:
    """Run a command; 2 where it is none."""
    match arguments:
        case ["next", folder]:
            print(take_next(Path(folder)))
        case ["answer", folder, name]:
            write(Path(folder) / f"{name}.reply.txt", sys.stdin.read())
            print(take_next(Path(folder)))
        case ["end", folder]:
            (Path(folder) / "END").touch()
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
