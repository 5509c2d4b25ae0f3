"""Debian's packages: which of four sections has a package of this description? A substitute for AGNews of its form.

Short English texts with one of four topics, by which people sorted them; the rows are read from the lists of packages
of a machine with Debian, so that they differ a little from release to release. A file `debian/packages.jsonl` in the
data folder, with `question` and `answer`, takes their place.
"""

from __future__ import annotations

import re
import shutil
import subprocess

import dspy

from benchmarks.workloads.answers import label_metric
from benchmarks.workloads.definition import Definition, Pools, Size
from benchmarks.workloads.rows import Row, RowsMissing, Source, load_rows
from dspy_flashevolve.sim import LengthLaw

SECTIONS = ("games", "science", "sound", "web")
FILE = Source("debian/packages.jsonl", ("question", "answer"), None, "descriptions of Debian's packages, 4 sections")
_FIELD = re.compile(r"^(Package|Section|Description): (.+)$", re.MULTILINE)
_PART = re.compile(r"-(data|common|dev|doc|dbg|examples|plugins?|l10n|modules?|tools)$|^lib|^task-")
"""Packages that only belong to others, and say so."""


def rows_of(available: str) -> list[Row]:
    """The rows in what `apt-cache dumpavail` prints: the description of each package of the four sections.

    Example:
        >>> rows_of("Package: chess\\nDescription: a game of kings\\nSection: games\\n")
        [{'question': 'a game of kings', 'answer': 'games'}]
    """
    found = [dict(_FIELD.findall(part)) for part in available.split("\n\n")]
    return [
        {"question": fields["Description"], "answer": fields["Section"]}
        for fields in found
        if len(fields) == 3 and fields["Section"] in SECTIONS and not _PART.search(fields["Package"])
    ]


def load() -> list[Row]:
    """The rows of the data folder, else of this machine's lists of packages.

    Raises:
        RowsMissing: There are neither.
    """
    try:
        return load_rows(FILE)
    except RowsMissing as error:
        program = shutil.which("apt-cache")
        if program is None:
            raise RowsMissing(f"{error} Nor is there apt-cache, which lists Debian's packages.") from error
        ran = subprocess.run(
            [program, "dumpavail"], capture_output=True, encoding="utf-8", errors="replace", check=True
        )
        return rows_of(ran.stdout)


def example(row: Row) -> dspy.Example:
    """A row as an example: the description, with its section."""
    return dspy.Example(description=row["question"], section=row["answer"]).with_inputs("description")


class Sort(dspy.Signature):
    """Name the section of the package."""

    description: str = dspy.InputField()
    section: str = dspy.OutputField(desc=f"one of: {', '.join(SECTIONS)}")


def program() -> dspy.Module:
    """One predictor."""
    return dspy.Predict(Sort)


DEFINITION = Definition(
    name="debian",
    size=Size(train=200, val=50, test=200),
    pools=lambda: Pools([example(row) for row in load()]),
    question="description",
    program=program,
    metric=label_metric("section", SECTIONS),
    outputs={"self": "section"},
    reply_length=LengthLaw(median_tokens=12, sigma=0.3),
)
