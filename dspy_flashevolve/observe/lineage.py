"""Where candidates come from: a file of events beside the checkpoint, and the family tree that it tells.

``lineage.jsonl`` in the run directory has one JSON object a line, append-only: ``kind`` (the event's name, in lower
case), ``run`` (counted up each time that the directory is resumed; tickets and heads are numbered within it) and the
event's fields (:mod:`dspy_flashevolve.engine.events`). It holds no prompts, no data and no keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from dspy_flashevolve.engine.errors import DataError
from dspy_flashevolve.engine.events import Committed, Event, HeadEnded, HeadLanded, Integrated, Looked, TicketClosed
from dspy_flashevolve.engine.redaction import Redaction

FILE = "lineage.jsonl"
KINDS = (Committed, HeadEnded, HeadLanded, Integrated, Looked, TicketClosed)


class LineageWriter:
    """A subscriber that appends a run's lineage to its directory.

    Args:
        run_dir: made when it is not there.
        redaction: takes secrets out of what is written: a ticket's end may have the words of a provider.
    """

    def __init__(self, run_dir: str, redaction: Redaction | None = None) -> None:
        self._redaction = redaction or Redaction()
        path = Path(run_dir) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        earlier = read(run_dir) if path.is_file() and path.stat().st_size else []
        self._run = 1 + max((int(record.get("run", 0)) for record in earlier), default=0)
        cut_off = path.is_file() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
        self._file: TextIO = path.open("a", encoding="utf-8")
        if cut_off:  # a crash left half a line
            self._file.write("\n")

    def __call__(self, event: Event) -> None:
        """Write the event, if it is part of the lineage."""
        if isinstance(event, KINDS):
            record = {"kind": type(event).__name__.lower(), "run": self._run, **asdict(event)}
            self._file.write(self._redaction.of(json.dumps(record, default=str)) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(run_dir: str | Path) -> list[dict[str, Any]]:
    """The records of a run, in order; lines that were cut off by a crash are left out.

    Raises:
        DataError: no such file, or a line that is no record.
    """
    path = Path(run_dir) / FILE
    if not path.is_file():
        raise DataError(f"{path} is missing: AsyncGEPA writes it for runs with log_dir.")
    lines = path.read_text(encoding="utf-8").splitlines()
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            record["kind"]
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines) or line.startswith('{"kind"'):
                continue  # cut off by a crash
            raise DataError(f"{path}, line {number}, is no record of a lineage: {error}.") from error
        records.append(record)
    return records


Key = tuple[int, int]
"""A run of the directory, and a head or a ticket in it."""


def _key(record: dict[str, Any], name: str) -> Key:
    return (record.get("run", 1), record[name])


def tree(records: Iterable[dict[str, Any]]) -> str:
    """The family tree as text: every candidate under its first parent, with score, gap, tickets and verdicts."""
    records = list(records)
    commits = {record["candidate"]: record for record in records if record["kind"] == "committed"}
    heads = {_key(record, "head"): record for record in records if record["kind"] == "headlanded"}
    ends = {_key(record, "head"): record for record in records if record["kind"] == "headended"}
    head_of = {end["candidate"]: key for key, end in ends.items() if end["candidate"] is not None}
    verdicts: dict[Key, list[tuple[str, str]]] = {}
    for record in records:
        for ticket, verdict, reason in record.get("verdicts", ()):
            verdicts.setdefault((record.get("run", 1), ticket), []).append((verdict, reason))
    children: dict[int, list[dict[str, Any]]] = {}
    for commit in sorted(commits.values(), key=lambda one: one["candidate"]):
        children.setdefault(commit["parents"][0] if commit["parents"] else 0, []).append(commit)
    lines: list[str] = ["candidate 0 (the seed)"]

    def grow(parent: int, indent: str) -> None:
        for commit in children.get(parent, ()):
            index, ticket, others = commit["candidate"], commit["ticket"], commit["parents"][1:]
            text = f"candidate {index}: score {commit['score']:.3f}, gap {commit['gap']}, ticket {ticket}"
            also = f", also from {', '.join(map(str, others))}" if others else ""
            lines.append(f"{indent}{text}{also}")
            head = heads[head_of[index]] if head_of.get(index) in heads else None
            for member in [ticket] if head is None else head["members"]:
                for verdict, reason in verdicts.get((commit.get("run", 1), member), ()):
                    lines.append(f"{indent}  ticket {member}: {verdict}. {reason}")
            grow(index, indent + "  ")

    grow(0, "  ")
    gone = [key for key in sorted(heads) if ends.get(key, {}).get("end") != "confirmed"]
    if gone:
        lines.append("heads that are no candidates:")
        lines += [f"  {_gone(heads[key], ends.get(key))}" for key in gone]
    return "\n".join(lines)


def _gone(head: dict[str, Any], end: dict[str, Any] | None) -> str:
    members = ", ".join(str(ticket) for ticket in head["members"])
    fate = "failed its screen" if not head["passed"] else "unfinished" if end is None else end["end"]
    return f"head {head['head']}, tickets {members}: {fate} ({head['before']:g} -> {head['after']:g} on its screen)"
