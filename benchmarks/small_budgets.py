"""AsyncGEPA beside dspy.GEPA at small budgets of metric calls: `python -m benchmarks.small_budgets [--seeds 9]`.

House rules on the simulated model without faults, in virtual time; true score on examples that nobody saw. dspy.GEPA is
AsyncGEPA's lockstep, which takes the same steps; what it validates beyond the budget does not count.

With ``--tutorials``: the budgets of public tutorials on a task of facts to learn (`small_budgets_task`), beside
dspy.GEPA itself; what it spends beyond the budget counts.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import warnings
from collections.abc import Sequence
from typing import Any

import dspy

from benchmarks.measure import silence
from benchmarks.results import commit, table
from benchmarks.small_budgets_task import STYLES, Style, Task, metric
from benchmarks.stress import compiled, rival
from benchmarks.stress_cases import Case, Watch, student, texts_of, true_score
from dspy_flashevolve import AsyncGEPA
from dspy_flashevolve.sim.virtual import run

EXAMPLES = 10
"""Training and validation examples, each; a rule stands in a third of them."""


TUTORIALS: dict[str, tuple[int, int, dict[str, int]]] = {
    "max_metric_calls=5": (10, 1, {"max_metric_calls": 5}),
    "max_full_evals=1": (10, 1, {"max_full_evals": 1}),
    "30 calls": (10, 1, {"max_metric_calls": 30}),
    "max_full_evals=2": (10, 1, {"max_full_evals": 2}),
    "48 calls": (12, 1, {"max_metric_calls": 48}),
    "60 calls": (10, 1, {"max_metric_calls": 60}),
    "120 calls, two predictors": (10, 2, {"max_metric_calls": 120}),
    "401 calls": (60, 1, {"max_metric_calls": 401}),
}
"""Name -> training and validation examples, each; predictors; the budget."""
Outcome = tuple[float, int]
"""The true score of a program and the metric calls that it took."""


def learnt(task: Task, budget: dict[str, int], theirs: bool) -> Outcome:
    """What dspy.GEPA, or AsyncGEPA in virtual time, makes of a task's program."""
    settings = {"reflection_lm": task.reflection_lm(), "track_stats": True, "seed": task.seed, **budget}
    data = {"trainset": task.examples("train", task.train), "valset": task.examples("val", task.val)}
    with silence(), dspy.context(lm=task.task_lm()):
        if theirs:
            program = dspy.GEPA(metric, num_threads=1, **settings).compile(task.student(), **data)  # pyright: ignore[reportArgumentType]
        else:
            optimizer = AsyncGEPA(metric, num_threads=8, **settings)  # pyright: ignore[reportArgumentType]
            program = run(lambda: optimizer.acompile(task.student(), **data))
    details: Any = program.detailed_results
    return task.true_score(program), details.total_metric_calls


def tutorial(name: str, style: Style, strong: bool, seeds: int) -> list[str]:
    """One row: means over the seeds with their standard errors, and mean metric calls."""
    size, predictors, budget = TUTORIALS[name]
    cells = [name, f"{'strong' if strong else 'weak'}, {style}"]
    for theirs in (False, True):
        tasks = [Task(seed, size, size, predictors, style, 4 if strong else 12, strong) for seed in range(seeds)]
        scores, calls = zip(*(learnt(task, budget, theirs) for task in tasks), strict=True)
        error = statistics.stdev(scores) / seeds**0.5 if seeds > 1 else 0.0
        cells += [f"{statistics.mean(scores):.3f} +- {error:.3f}", f"{statistics.mean(calls):.0f}"]
    return cells


def tutorials(names: Sequence[str], seeds: int) -> None:
    """Print the table of the tutorials' budgets."""
    rows: list[list[str]] = []
    for name in names:
        for strong in (True, False):
            for style in STYLES:
                rows.append(tutorial(name, style, strong, seeds))
                print("  ".join(rows[-1]), flush=True)
    print(f"\n{seeds} seeds; commit {commit()}")
    print(table(("budget", "reflection", "AsyncGEPA", "calls", "dspy.GEPA", "calls"), rows))


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
    parser.add_argument("--tutorials", nargs="*", choices=list(TUTORIALS), help="budgets of tutorials; default: all")
    options = parser.parse_args(arguments)
    for name in ("dspy", "dspy_flashevolve"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if options.tutorials is not None:
        tutorials(options.tutorials or list(TUTORIALS), options.seeds)
        return 0
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
