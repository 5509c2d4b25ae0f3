"""AsyncGEPA beside dspy.GEPA at small budgets of metric calls: `python -m benchmarks.small_budgets [--seeds 9]`.

House rules on the simulated model without faults, in virtual time; true score on examples that nobody saw. dspy.GEPA is
AsyncGEPA's lockstep, which takes the same steps; what it validates beyond the budget does not count.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import warnings
from collections.abc import Sequence

from benchmarks.measure import silence
from benchmarks.results import commit, table
from benchmarks.stress import compiled, rival
from benchmarks.stress_cases import Case, Watch, student, texts_of, true_score

EXAMPLES = 10
"""Training and validation examples, each; a rule stands in a third of them."""


def pair(case: Case) -> tuple[float, float]:
    """The true scores of AsyncGEPA's program and of dspy.GEPA's."""
    with silence():
        watch = Watch(case)
        ours = true_score(case.task(), texts_of(compiled(case, watch, student(case, watch), "")))
        theirs = rival(case)
    assert theirs is not None, "the budget pays the seed's validation"
    return ours, theirs


def row(calls: int, predictors: int, model: str, seeds: int) -> list[str]:
    """One cell of the table: medians, the median of the differences, and how many seeds were better and worse."""
    sizes = {"train": EXAMPLES, "val": EXAMPLES, "rules": 12, "slots": 8}
    options = {"program": "async", "predictors": predictors, "model": model, "calls": calls}
    pairs = [pair(Case(seed=seed, **options, **sizes)) for seed in range(seeds)]  # pyright: ignore[reportArgumentType]
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    apart = [a - b for a, b in pairs]
    counts = f"{sum(one > 0 for one in apart)} / {sum(one < 0 for one in apart)}"
    median = f"{statistics.median(apart):+.3f}"
    return [str(calls), str(predictors), model, f"{ours:.3f}", f"{theirs:.3f}", median, counts]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.small_budgets", description=__doc__)
    parser.add_argument("--calls", type=int, nargs="+", default=[30, 60, 120, 250, 500])
    parser.add_argument("--predictors", type=int, nargs="+", default=[1, 2, 3], choices=[1, 2, 3])
    parser.add_argument("--models", nargs="+", default=["plain"], help="of the simulated model")
    parser.add_argument("--seeds", type=int, default=9)
    options = parser.parse_args(arguments)
    for name in ("dspy", "dspy_flashevolve"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    rows: list[list[str]] = []
    for calls in options.calls:
        for predictors in options.predictors:
            for model in options.models:
                rows.append(row(calls, predictors, model, options.seeds))
                print("  ".join(rows[-1]), flush=True)
    print(f"\n{options.seeds} seeds; commit {commit()}")
    print(table(("calls", "predictors", "model", "AsyncGEPA", "dspy.GEPA", "difference", "better / worse"), rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
