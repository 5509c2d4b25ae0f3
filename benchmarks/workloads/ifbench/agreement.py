"""How often our verdicts are those of IFBench's official evaluator, by kind of constraint.

`python -m benchmarks.workloads.ifbench.agreement` prints the table. The official verdicts stand in the data folder;
`../shared/data` from the project's root, or the folder that `FLASHEVOLVE_DATA` names.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.workloads.ifbench.registry import APPROXIMATE
from benchmarks.workloads.ifbench.scoring import verify
from benchmarks.workloads.rows import data_folder

VERDICTS = "ifbench/official_verdicts.jsonl"


@dataclass(frozen=True)
class Agreement:
    """How many verdicts there are, and how many of ours are the same.

    Attributes:
        strict: Verdicts of responses as they are.
        strict_same: Those where ours is the same.
        loose: Verdicts in the loose sense.
        loose_same: Those where ours is the same.
    """

    strict: int = 0
    strict_same: int = 0
    loose: int = 0
    loose_same: int = 0

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(
            self.strict + other.strict,
            self.strict_same + other.strict_same,
            self.loose + other.loose,
            self.loose_same + other.loose_same,
        )

    @property
    def share(self) -> float:
        """The share of all verdicts, strict and loose, that are the same; 1 if there are none."""
        given = self.strict + self.loose
        return (self.strict_same + self.loose_same) / given if given else 1.0


def official_verdicts(path: Path | None = None) -> list[dict[str, Any]]:
    """The rows with `instruction_id_list`, `kwargs`, `response`, `strict` and, for some, `loose`.

    Args:
        path: A file of JSON lines; `None` for the one in the data folder.

    Raises:
        FileNotFoundError: If there is no such file.
    """
    given = path or data_folder() / VERDICTS
    if not given.exists():
        raise FileNotFoundError(f"{given} is missing: set FLASHEVOLVE_DATA to the folder that holds {VERDICTS}")
    return [json.loads(line) for line in given.read_text(encoding="utf-8").splitlines()]


def agreement(rows: Iterable[Mapping[str, Any]]) -> dict[str, Agreement]:
    """The agreement by instruction id, in alphabetical order.

    Args:
        rows: From `official_verdicts`.

    Example:
        >>> row = {"instruction_id_list": ["format:no_whitespace"], "kwargs": [{}], "response": "a b"}
        >>> agreement([row | {"strict": [False], "loose": [True]}])
        {'format:no_whitespace': Agreement(strict=1, strict_same=1, loose=1, loose_same=0)}
    """
    found: defaultdict[str, Agreement] = defaultdict(Agreement)
    for row in rows:
        ours = verify(row["response"], row["instruction_id_list"], row["kwargs"])
        for place, kind in enumerate(row["instruction_id_list"]):
            found[kind] += Agreement(1, int(ours.strict[place] == row["strict"][place]))
            if row.get("loose") is not None:
                found[kind] += Agreement(loose=1, loose_same=int(ours.loose[place] == row["loose"][place]))
    return dict(sorted(found.items()))


def table(found: Mapping[str, Agreement]) -> str:
    """A Markdown table of the agreement, with the sum in its last row and with what is approximate of each kind."""
    lines = ["| kind | strict | loose | approximate |", "|---|---|---|---|"]
    for kind, one in [*found.items(), ("all", sum(found.values(), Agreement()))]:
        strict, loose = f"{one.strict_same} of {one.strict}", f"{one.loose_same} of {one.loose}"
        lines.append(f"| {kind} | {strict} | {loose} | {APPROXIMATE.get(kind, '')} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(agreement(official_verdicts())))
