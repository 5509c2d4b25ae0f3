"""Where candidates come from: the family tree that a run's journal tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dspy_flashevolve.engine.journal import reading

COMMITS = "SELECT candidate_index, step, score, parents FROM commits WHERE candidate_index > 0 ORDER BY candidate_index"
EVENTS = """SELECT session, kind, step, fields FROM events
    WHERE kind IN ('Committed', 'Integrated', 'HeadLanded', 'HeadEnded') ORDER BY id"""


def tree(run_dir: str | Path) -> str:
    """The family tree as text: every candidate under its first parent, with score, gap, step and verdicts.

    Raises:
        RunDirectoryError: there is no journal in ``run_dir``, or it cannot be read.
    """
    gaps: dict[int, int] = {}
    verdicts: dict[int, dict[str, None]] = {}  # step -> what was said of its child; said again in a run that goes on
    heads: list[tuple[int, dict[str, Any]]] = []  # the step that carries a head, and the head
    ends: dict[int, str] = {}  # step that carries a head -> the head's end
    children: dict[int, list[Any]] = {}
    with reading(run_dir) as rows:
        # A head that was under way when its session was killed goes on in the next one, under another handle.
        carriers = {(row["session"], row["head"]): row["step"] for row in rows("SELECT session, head, step FROM heads")}
        for row in rows(EVENTS):
            fields: dict[str, Any] = json.loads(row["fields"])
            if row["kind"] == "Committed":
                gaps[fields["candidate"]] = fields["gap"]
            elif row["kind"] == "Integrated":
                for member, verdict, reason in fields["verdicts"]:
                    verdicts.setdefault(member, {})[f"{verdict}. {reason}"] = None
            elif row["kind"] == "HeadEnded":
                ends[carriers.get((row["session"], fields["head"]), row["step"])] = fields["end"]
            else:
                heads.append((row["step"], fields))
                carriers[row["session"], fields["head"]] = row["step"]
        landed = {step: head for step, head in heads if head["passed"]}
        for row in rows(COMMITS):
            if row["step"] in landed:  # a run that was killed had no time to say so
                ends.setdefault(row["step"], "confirmed")
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
            members: list[Any] = landed[step]["members"] if step in landed else [step]
            lines += [f"{indent}  step {member}: {said}" for member in members for said in verdicts.get(member, ())]
            left += [(child, indent + "  ") for child in reversed(children.get(index, []))]
    gone = [
        _gone(head, ends.get(step, "unfinished") if head["passed"] else "failed its screen")
        for step, head in heads
        if not head["passed"] or (ends.get(step) != "confirmed" and landed[step] is head)
    ]
    return "\n".join([*lines, *(["heads that are no candidates:", *gone] if gone else [])])


def _gone(head: dict[str, Any], fate: str) -> str:
    members = ", ".join(map(str, head["members"]))
    return f"  head {head['head']}, steps {members}: {fate} ({head['before']:g} -> {head['after']:g} on its screen)"
