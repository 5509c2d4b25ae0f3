"""What children of real reflection models look like: `python -m benchmarks.lineages`.

Pairs of parent and child from public runs of dspy.GEPA and gepa (`lineages/pairs.jsonl.gz` of the data folder): what a
child keeps of its parent, and how large it is. By model; with `--fit` for the classes of models that the simulated
models `strong` and `strong-small` stand for, on the two thirds of the runs that these are fitted to and on the rest.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise

from benchmarks.models import reply_model_named
from benchmarks.results import shown, table
from benchmarks.workloads.rows import VARIABLE, data_folder
from dspy_flashevolve.gepa.parts import NUMBER, Part, is_item, level_of, normal, parts_of
from dspy_flashevolve.sim import HouseRules
from dspy_flashevolve.sim.words import Choices

FILE = "lineages/pairs.jsonl.gz"
CLASSES: dict[str, Callable[[str], bool]] = {
    "strong": lambda model: model.startswith("gpt-") or model == "o3",
    "strong-small": lambda model: model == "qwen3-8b",
}
"""Simulated model -> which reflection models of the pairs it stands for."""
FITTED_SHARE = 2 / 3
"""Of the runs of a class; the rest tests the fit. By run, since the children of one run resemble each other."""
QUANTILES = (10, 25, 50, 75, 90)
REWORDED = 0.6
"""Share of their words that two parts have in common, from which one is taken for the other in other words. Of later
children by real reflection models .65, .63, .61 and .55 come apart with .5, .6, .7 and .8; below .6 other rules are
taken for it."""
_SPECIFIC = re.compile(r'"([^"\n]{2,40})"|`([^`\n]{2,40})`|\b(\d{2,}(?:\.\d+)?)\b')
_NESTED = re.compile(r"^[ \t]+(?:[-*+•]|\d{1,3}[.)])\s", re.MULTILINE)
FEW_WORDS = 3
"""Lines of at most so many words, as "Example:", may repeat in any text."""


@dataclass(frozen=True)
class Pair:
    """A text and what a reflection model made of it.

    Attributes:
        model: The reflection model.
        run: The run that both belong to.
        parent: The text that the model was to improve.
        child: Its new text.
        is_first: Whether the parent is the run's seed.
    """

    model: str
    run: str
    parent: str
    child: str
    is_first: bool

    @cached_property
    def fate(self) -> Fate:
        """What became of the parent's parts."""
        return fate_of(self.parent, self.child)


@dataclass(frozen=True)
class Fate:
    """What became of a text's parts in its child.

    Attributes:
        kept: Share of the parent's parts that stand in the child word for word.
        reworded: Share of them that stand there in other words (`parts.REWORDED`).
        dropped: Share of them that are not there.
        added: New parts of the child, for each part of the parent.
        kept_specifics: Of the parent's quoted strings, code and numbers in parts that were dropped, the share that
            stands elsewhere in the child; None where there is none.
        reworded_specifics: The same for parts that were reworded.
        all_specifics: The same for all parts.
        characters: Of the child.
        parts: Of the child.
        headings: Of the child.
        nested: Lines of the child in nested lists.
        repeats: Whether a line of the child stands in it twice.
    """

    kept: float
    reworded: float
    dropped: float
    added: float
    kept_specifics: float | None
    reworded_specifics: float | None
    all_specifics: float | None
    characters: int
    parts: int
    headings: int
    nested: int
    repeats: bool


def likeness(part: Part, other: Part) -> float:
    """Share of their words that two parts have in common, from 0 to 1 (the Dice coefficient)."""
    mine, words = (set(re.findall(r"\w+", normal(one.text))) for one in (part, other))
    return 2 * len(mine & words) / max(1, len(mine) + len(words))


def face_of(text: str) -> str:
    """What makes two parts the same: all but their numbers in a list, and space at the ends of lines."""
    return NUMBER.sub(r"\1#", "\n".join(line.rstrip() for line in text.splitlines()).rstrip())


def is_worded_as(part: Part, other: Part) -> bool:
    """Whether two parts have most of their words in common."""
    return likeness(part, other) >= REWORDED


def fate_of(parent: str, child: str) -> Fate:
    """Compare the parts of a text with those of its child, wherever they stand."""
    old, new = parts_of(parent), parts_of(child)
    faces = Counter(face_of(part.text) for part in new)
    dropped, reworded, kept_faces = list[Part](), list[Part](), Counter[str]()
    for part in old:
        face = face_of(part.text)
        if kept_faces[face] < faces[face]:
            kept_faces[face] += 1
        elif any(is_worded_as(part, other) for other in new):
            reworded.append(part)
        else:
            dropped.append(part)
    added = [
        part for part in new if face_of(part.text) not in kept_faces and not any(is_worded_as(part, o) for o in old)
    ]
    lines = Counter(line.strip() for line in child.splitlines() if len(line.split()) > FEW_WORDS)
    size = max(1, len(old))
    return Fate(
        kept=kept_faces.total() / size,
        reworded=len(reworded) / size,
        dropped=len(dropped) / size,
        added=len(added) / size,
        kept_specifics=_surviving(dropped, child),
        reworded_specifics=_surviving(reworded, child),
        all_specifics=_surviving(old, child),
        characters=len(child),
        parts=len(new),
        headings=_headings(new),
        nested=len(_NESTED.findall(child)),
        repeats=any(count > 1 for count in lines.values()),
    )


def _headings(parts: Sequence[Part]) -> int:
    """Marked headings, and lines above a list that are no item, as "Output format" is."""
    leads = (is_item(below) and not is_item(part) and "\n" not in part.text for part, below in pairwise(parts))
    return sum(level_of(part) < 8 or lead for part, lead in zip(parts, [*leads, False], strict=True)) if parts else 0


def _surviving(parts: Iterable[Part], child: str) -> float | None:
    text = child.lower()
    specifics = {next(filter(None, match)).lower() for part in parts for match in _SPECIFIC.findall(part.text)}
    return sum(specific in text for specific in specifics) / len(specifics) if specifics else None


def load_pairs() -> list[Pair]:
    """All pairs of the data folder.

    Raises:
        FileNotFoundError: If the folder has none; the message says how to name another.
    """
    path = data_folder() / FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: set {VARIABLE} to the folder that holds {FILE}")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [Pair(row["model"], f"{row['source']} {row['run']}", row["parent"], row["child"], row["first"])
            for row in rows]  # fmt: skip


def split_by_run(pairs: Collection[Pair], seed: int) -> tuple[list[Pair], list[Pair]]:
    """Those pairs that a model is fitted to, and those that test the fit."""
    runs = sorted({pair.run for pair in pairs})
    random.Random(seed).shuffle(runs)
    fitted = set(runs[: round(FITTED_SHARE * len(runs))])
    return [pair for pair in pairs if pair.run in fitted], [pair for pair in pairs if pair.run not in fitted]


HEADER = (
    "model", "pairs", "kept", "reworded", "dropped", "added", "specifics kept", "characters", "parts", "headings",
    "with nested", "with repeats",
)  # fmt: skip


def cells(name: str, pairs: Sequence[Pair]) -> list[str]:
    """The table's line of one model.

    What is kept, reworded, dropped and added are means over later children, which have a parent that a model wrote;
    sizes are medians, first / later.
    """
    first, later = [pair for pair in pairs if pair.is_first], [pair for pair in pairs if not pair.is_first]

    def both(field: str) -> str:
        sizes = (_median([getattr(pair.fate, field) for pair in some]) for some in (first, later))
        return " / ".join(shown(size, ".0f") for size in sizes)

    shares = [shown(_mean([getattr(pair.fate, field) for pair in later]), ".2f")
              for field in ("kept", "reworded", "dropped", "added", "all_specifics")]  # fmt: skip
    return [
        name, f"{len(first)} + {len(later)}", *shares, both("characters"), both("parts"), both("headings"),
        shown(_mean([pair.fate.nested > 0 for pair in pairs]), ".2f"),
        shown(_mean([pair.fate.repeats for pair in pairs]), ".2f"),
    ]  # fmt: skip


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def simulated_pairs(name: str, runs: int = 20, generations: int = 5) -> list[Pair]:
    """What a simulated reflection model makes of a task's seed, of its own text, and so on."""
    model, pairs = reply_model_named(name), list[Pair]()
    for run in range(runs):
        task = HouseRules(seed=run, reply_model=model)
        parent = str(task.program().answer.signature.instructions)  # pyright: ignore
        for generation in range(generations):
            missed = random.Random(f"{run} {generation}").sample(task.all_rules(), 8)
            choices = Choices(run, f"generation {generation}")
            child = model.new_instruction(parent, " ".join(["Missed:", *map(str, missed)]), choices)
            pairs.append(Pair(name, str(run), parent, child, generation == 0))
            parent = child
    return pairs


def fit(pairs: Sequence[Pair], seed: int) -> str:
    """For each class every figure's quantiles: of the runs that the model is fitted to, of the rest, and its own."""
    lines: list[list[str]] = []
    for name, stands_for in CLASSES.items():
        own = [pair for pair in pairs if stands_for(pair.model)]
        parts = (*split_by_run(own, seed), simulated_pairs(name))
        for third, some in zip(("fit", "test", "simulated"), parts, strict=True):
            for kind in ("first", "later"):
                fates = [pair.fate for pair in some if pair.is_first == (kind == "first")]
                for field in fields(Fate):
                    known = [float(value) for fate in fates if (value := getattr(fate, field.name)) is not None]
                    if len(known) > 1:
                        ends = statistics.quantiles(known, n=100, method="inclusive")
                        lines.append(
                            [name, third, kind, field.name, str(len(known)), f"{statistics.fmean(known):.3g}",
                             *(f"{ends[quantile - 1]:.3g}" for quantile in QUANTILES)]
                        )  # fmt: skip
    return table(("class", "part", "children", "figure", "pairs", "mean", *map(str, QUANTILES)), lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when there are no pairs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lineages", description=__doc__)
    parser.add_argument("--fit", action="store_true", help="print what strong and strong-small are fitted to instead")
    parser.add_argument("--seed", type=int, default=0, help="of the split by runs")
    options = parser.parse_args(arguments)
    try:
        pairs = load_pairs()
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    if options.fit:
        print(fit(pairs, options.seed))
    else:
        counts = Counter(pair.model for pair in pairs)
        print(table(HEADER, [cells(model, [pair for pair in pairs if pair.model == model])
                             for model, _ in counts.most_common()]))  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
