"""FlashEvolve's evaluation (arXiv 2605.08520), one command each: `python -m benchmarks.paper table1`, in a checkout.

Each command names runs of `benchmarks.bench`, which makes them, writes them down and goes on where it was interrupted.
Then it prints the paper's numbers beside ours. Runs are in virtual time, unless `--model` names a model. Every option
of `bench` may follow, as in `python -m benchmarks.paper figure4 --seeds 1 --seconds 1800 --workload ifbench`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks import bench
from benchmarks.results import RESULTS, Result, middle, ratio, shown, table

WORKLOADS = ("ifbench", "hotpotqa", "hover", "aime")
"""Those of the paper; its numbers below are in this order."""
SYSTEMS = ("gepa", "combee-10", "combee-40", "flashevolve")
ADAPTIVE = "flashevolve+prefix=1"
"""The preset without speculative completion: its slots move by the median rule."""
FIXED = "flashevolve+prefix=1+controller=none+workers=rollout:{},propose:{},screen:{},validate:{}"
FEW, MANY = FIXED.format(3, 1, 3, 8), FIXED.format(48, 16, 48, 64)
"""The paper's pools: one worker a stage, and 16 for rollouts with 8 for validations. What one of its workers has in
flight is not published. Here it is a minibatch of 3 requests, one reflection, or an eighth of the 64 slots for
validations."""
LABELS = {FEW: "K1 = 1, K3 = 1", MANY: "K1 = 16, K3 = 8"}
ABOUT = "Why ours differ from the paper's: docs/benchmarks.md, beside the papers. Simulated models learn house rules."


@dataclass(frozen=True)
class Figure:
    """A column of ours and one of the paper's.

    Attributes:
        name: Of our column.
        of: Reads it from a run; `None` where the run does not have it.
        paper: Method -> the paper's number for each of `WORKLOADS`, or the first of them; empty where it has none.
        form: How a number is shown.
        has_ratio: Whether a column says how many times GEPA's the number is, ours / the paper's.
    """

    name: str
    of: Callable[[Result], float | None]
    paper: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    form: str = ".1f"
    has_ratio: bool = False

    def published(self, workload: str, method: str) -> float | None:
        """The paper's number."""
        numbers = self.paper.get(method, ())
        place = WORKLOADS.index(workload) if workload in WORKLOADS else len(numbers)
        return numbers[place] if place < len(numbers) else None

    def header(self) -> list[str]:
        """Names of the columns."""
        ratios = ["x GEPA's / paper's"] if self.has_ratio else []
        return [self.name, *(["paper's"] if self.paper else []), *ratios]

    def cells(self, workload: str, method: str, mine: Sequence[Result], base: Sequence[Result]) -> list[str]:
        """The columns for a method's runs on a workload, beside GEPA's runs there."""
        known = sorted(value for result in mine if (value := self.of(result)) is not None)
        spread = f" ({known[0]:{self.form}}-{known[-1]:{self.form}})" if len(known) > 1 else ""
        cells = [shown(middle(mine, self.of), self.form) + spread]
        published, gepa = self.published(workload, method), self.published(workload, bench.BASELINE)
        if self.paper:
            cells.append(shown(published, "g"))
        if self.has_ratio:
            ours_times = ratio(middle(mine, self.of), middle(base, self.of))
            cells.append(f"{shown(ours_times, '.1f')} / {shown(ratio(published, gepa), '.1f')}")
        return cells


def score_at(minutes: float) -> Callable[[Result], float | None]:
    """Read the best validation score after so many minutes, in percent; `None` where the window is shorter."""

    def read(result: Result) -> float | None:
        points = [point for point in result.trajectory if (point[0] or 0.0) <= 60 * minutes]
        score = points[-1][5] if points and result.seconds >= 60 * minutes - 1e-6 else None
        return None if score is None else 100 * score

    return read


def _a_minute(count: Callable[[Result], int]) -> Callable[[Result], float | None]:
    return lambda result: 60 * count(result) / result.seconds if result.seconds else None


SCORE = Figure("validation score at the end", lambda run: run.best_score and 100 * run.best_score)
TRUE_SCORE = Figure("true score", lambda run: run.true_score and 100 * run.true_score)


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper: what is run for how many minutes, and what is read from it."""

    minutes: float
    workloads: tuple[str, ...]
    methods: tuple[str, ...]
    figures: tuple[Figure, ...]


EXPERIMENTS = {
    "table1": Experiment(30, WORKLOADS, SYSTEMS, (
        Figure("tokens a second", lambda run: run.tokens_per_second, {"gepa": (963, 304, 612, 200)}, ".0f", True),
        Figure("proposals a minute", lambda run: run.pace, {
            "gepa": (1.9, 4.6, 2.5, 2.2), "combee-10": (1.2, 2.7, 2.0, 6.2), "combee-40": (0.7, 4.5, 2.0, 1.6),
            "flashevolve": (8.9, 8.8, 5.9, 11.4),
        }, has_ratio=True),
    )),
    "table2": Experiment(30, WORKLOADS, SYSTEMS, (
        replace(SCORE, paper={
            "gepa": (87.6, 63.3, 39.8, 10.0), "combee-10": (88.5, 62.5, 41.2, 10.0),
            "combee-40": (86.5, 58.6, 40.5, 10.0), "flashevolve": (90.6, 61.7, 42.0, 15.0),
        }),
        Figure("seed's", lambda run: run.seed_score and 100 * run.seed_score),
        TRUE_SCORE,
    )),
    # Figures 4 and 5 are curves: what they show at these minutes was read off them, to about .2.
    "figure4": Experiment(180, WORKLOADS[:2], SYSTEMS, (
        Figure("score at 30 min", score_at(30), {
            "gepa": (87.6, 63.3), "combee-10": (88.5, 62.5), "combee-40": (86.5, 58.6), "flashevolve": (90.6, 61.7),
        }),
        Figure("at 90 min", score_at(90), {
            "gepa": (88.2, 63.3), "combee-10": (90.0, 63.2), "combee-40": (87.8, 63.3), "flashevolve": (91.1, 66.3),
        }),
        Figure("at 180 min", score_at(180), {
            "gepa": (89.1, 64.9), "combee-10": (90.0, 63.2), "combee-40": (91.5, 64.9), "flashevolve": (91.3, 66.3),
        }),
        SCORE, TRUE_SCORE,
    )),
    "figure5": Experiment(30, WORKLOADS[:1], (
        "gepa", "flashevolve+staleness=full", "flashevolve+staleness=guarded", "flashevolve",
    ), (
        Figure("score at 10 min", score_at(10), {
            "gepa": (86.4,), "flashevolve+staleness=full": (88.6,), "flashevolve+staleness=guarded": (88.8,),
            "flashevolve": (90.2,),
        }),
        Figure("at 30 min", score_at(30), {
            "gepa": (87.6,), "flashevolve+staleness=full": (90.3,), "flashevolve+staleness=guarded": (89.5,),
            "flashevolve": (94.3,),
        }),
        SCORE, TRUE_SCORE,
    )),
    "figure6": Experiment(30, WORKLOADS[:1], (
        "gepa", FEW, MANY, ADAPTIVE, "flashevolve+prefix=0.75", "flashevolve+prefix=0.5", "flashevolve+prefix=0.25",
    ), (
        Figure("a: proposals a minute", lambda run: run.pace, {
            "gepa": (7,), FEW: (11,), MANY: (99,), ADAPTIVE: (140,),
        }),
        Figure("a, c: validations a minute", _a_minute(lambda run: run.validations), {
            "gepa": (0.26,), FEW: (0.99,), MANY: (4.22,), ADAPTIVE: (2.62,), "flashevolve+prefix=0.5": (0.5,),
            "flashevolve+prefix=0.25": (3.15,),
        }, ".2f"),
        Figure("b: accepted a minute", _a_minute(lambda run: run.accepted), {
            "gepa": (0.033,), FEW: (0.14,), MANY: (0.239,), ADAPTIVE: (0.31,),
        }, ".2f"),
        TRUE_SCORE,
    )),
}  # fmt: skip
"""Command -> what it runs and reads."""


def report(experiment: Experiment, options: argparse.Namespace, results: Iterable[Result]) -> str:
    """Tables of the rows that these options name, one for each backend, the paper's numbers beside ours."""
    names = {
        bench.title(workload, *bench.sizes(workload, options), seconds): workload
        for (workload, _), seconds in options.seconds.items()
    }
    header = ["workload", "method", "seeds", *(name for figure in experiment.figures for name in figure.header())]
    tables: dict[str, list[list[str]]] = {}
    sound = [result for result in results if result.benchmark in names and not result.error]
    for setting in dict.fromkeys(result.setting for result in sound):
        group, workload = [result for result in sound if result.setting == setting], names[setting.benchmark]
        base = [result for result in group if result.method == bench.BASELINE]
        for method in map(str, options.methods):
            mine = [result for result in group if result.method == method]
            cells = [cell for figure in experiment.figures for cell in figure.cells(workload, method, mine, base)]
            where = f"{setting.backend}, {setting.settings}, {setting.slots} slots, {group[0].seconds:.0f} s"
            tables.setdefault(where, []).append([workload, LABELS.get(method, method), str(len(mine)), *cells])
    return "\n\n".join([*(f"{where}\n{table(header, rows)}" for where, rows in tables.items()), ABOUT])


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs, print the table; as `bench.main`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=__doc__, add_help=False)
    parser.add_argument("what", choices=list(EXPERIMENTS))
    given = list(sys.argv[1:] if arguments is None else arguments)
    experiment = EXPERIMENTS[parser.parse_args(given[:1]).what]
    usual = ["--workload", *experiment.workloads, "--methods", *experiment.methods, "--most", "60"]
    usual += ["--seconds", f"{60 * experiment.minutes:g}", "--out", str(RESULTS / "paper.jsonl")]
    options = bench.parse([*usual, *([] if "--model" in given else ["--virtual"]), *given[1:]])
    return bench.carry_out(options, lambda results: report(experiment, options, results))


if __name__ == "__main__":
    raise SystemExit(main())
