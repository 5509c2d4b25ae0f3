"""Where candidates come from: the family tree that a run's journal tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dspy_flashevolve.engine.journal import reading

COMMITS = "SELECT candidate_index, step, score, parents FROM commits WHERE candidate_index > 0 ORDER BY candidate_index"
EVENTS = """SELECT kind, step, fields FROM events
    WHERE kind IN ('Committed', 'Integrated') ORDER BY id"""


def tree(run_dir: str | Path) -> str:
    """The family tree as text: every candidate under its first parent, with score, gap, step and verdicts.

    Raises:
        RunDirectoryError: there is no journal in ``run_dir``, or it cannot be read.
    """
    gaps: dict[int, int] = {}
    verdicts: dict[Any, dict[str, None]] = {}  # step -> what was said of its child; said again in a run that goes on
    members: dict[Any, list[int]] = {}  # step that brings an integration to its end -> steps whose children were read
    children: dict[int, list[Any]] = {}
    with reading(run_dir) as rows:
        for row in rows(EVENTS):
            fields: dict[str, Any] = json.loads(row["fields"])
            if row["kind"] == "Committed":
                gaps[fields["candidate"]] = fields["gap"]
            else:
                members[row["step"]] = fields["members"]
                for member, verdict, reason in fields["verdicts"]:
                    verdicts.setdefault(member, {})[f"{verdict}. {reason}"] = None
        for row in rows(COMMITS):
            children.setdefault((json.loads(row["parents"]) or [0])[0] or 0, []).append(row)
        lines = ["candidate 0 (the seed)"]
        left = [(row, "  ") for row in reversed(children.get(0, []))]
        while left:
            row, indent = left.pop()
            index, step, others = row["candidate_index"], row["step"], json.loads(row["parents"])[1:]
            gap = f", gap {gaps[index]}" if index in gaps else ""
            maker = ", another program" if step is None else f", step {step}" if step >= 0 else ""
            also = f", also from {', '.join(map(str, others))}" if others else ""
            lines.append(f"{indent}candidate {index}: score {float(row['score']):.3f}{gap}{maker}{also}")
            read = members.get(step, [step])
            lines += [f"{indent}  step {member}: {said}" for member in read for said in verdicts.get(member, ())]
            left += [(child, indent + "  ") for child in reversed(children.get(index, []))]
    return "\n".join(lines)
