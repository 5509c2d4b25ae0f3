"""What a provider's faults do to a run: `python -m benchmarks.chaos`.

AsyncGEPA and dspy.GEPA on a simulated server, each without faults and with them: server errors, bursts of rate limits,
hangs, malformed bodies, and one restart in the middle of the run. What a candidate deserves is known: the same program
is scored again on a server without faults, whose replies are a function of seed and request. The command fails when
AsyncGEPA scored, cached or pooled an error of the provider, left budget unspent, or lost score.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields
from multiprocessing import get_context
from pathlib import Path

from benchmarks.chaos_audit import Conditions
from benchmarks.chaos_run import ChaosRow, Job, run_job
from benchmarks.results import RESULTS, append_json_lines, shown, table

METHODS = ("async", "gepa")
INJECTED = ("server_error", "rate_limit", "hang", "malformed_body")
"""Faults that a run must have met for the claims to say anything."""
HEADER = (
    "optimizer", "server", "calls spent", "provider errors scored", "wrong scores in the pool", "wrong in the cache",
    "foreign texts", "best score (min-max)", "as stored", "faults", "seconds",
)  # fmt: skip
NAMES = {"gepa": "dspy.GEPA", "async": "AsyncGEPA"}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    usual = Conditions()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, each on a server of its own")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--calls", type=int, default=usual.calls, help="metric calls of each run")
    parser.add_argument("--slots", type=int, default=usual.slots, help="requests in flight at most")
    parser.add_argument("--train", type=int, default=usual.train, help="training examples")
    parser.add_argument("--val", type=int, default=usual.val, help="validation examples")
    parser.add_argument("--time-scale", type=float, default=usual.time_scale, help="the server's seconds in a real one")
    parser.add_argument("--timeout", type=float, default=usual.timeout_seconds, help="the LM's own, in real seconds")
    parser.add_argument(
        "--rollout-timeout", type=float, default=usual.rollout_timeout_seconds, help="AsyncGEPA's, in real seconds"
    )
    parser.add_argument("--report", type=Path, help="print the table of an earlier file; run nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "chaos.jsonl")
    return parser.parse_args(arguments)


def conditions_of(options: argparse.Namespace) -> Conditions:
    """What the options ask for."""
    return Conditions(
        time_scale=options.time_scale,
        slots=options.slots,
        calls=options.calls,
        train=options.train,
        val=options.val,
        timeout_seconds=options.timeout,
        rollout_timeout_seconds=options.rollout_timeout,
    )


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Every run: of each seed both optimizers, without faults and with them."""
    conditions = conditions_of(options)
    return [
        Job(method, faulty, seed, conditions)
        for seed in range(options.seeds)
        for method in options.methods
        for faulty in (False, True)
    ]


def made(jobs: Sequence[Job], side_by_side: int) -> Iterator[ChaosRow]:
    """Every run, in the order of the jobs."""
    if side_by_side <= 1:
        yield from map(run_job, jobs)
        return
    with ProcessPoolExecutor(side_by_side, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_job, jobs)


def recorded(path: Path) -> list[ChaosRow]:
    """The runs of a file that this command wrote; of the same run made twice, the later."""
    known = {one.name for one in fields(ChaosRow)}
    found: dict[tuple[str, bool, int], ChaosRow] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = ChaosRow(**{name: value for name, value in json.loads(line).items() if name in known})
        found[row.method, row.faulty, row.seed] = row
    return list(found.values())


def cells(rows: Sequence[ChaosRow]) -> list[list[str]]:
    """The table's cells, a row for each optimizer and server: sums over the seeds, medians where it says so."""
    lines: list[list[str]] = []
    for method, faulty in dict.fromkeys((row.method, row.faulty) for row in rows):
        mine = [row for row in rows if (row.method, row.faulty) == (method, faulty)]
        best = [row.best_score for row in mine if row.best_score is not None]
        stored = [row.stored_score for row in mine if row.stored_score is not None]
        lines.append([
            NAMES[method],
            "faults and a restart" if faulty else "no faults",
            " ".join(f"{row.spent}/{row.limit}" for row in mine),
            str(sum(row.unanswered for row in mine)),
            f"{sum(row.wrong for row in mine)} of {sum(row.stored for row in mine)}",
            "-" if method == "gepa" else f"{sum(r.cached_wrong for r in mine)} of {sum(r.cached for r in mine)}",
            str(sum(row.foreign for row in mine)),
            f"{statistics.median(best):.3f} ({min(best):.3f}-{max(best):.3f})" if best else "-",
            shown(statistics.median(stored) if stored else None, ".3f"),
            str(sum(sum(row.injected.values()) for row in mine)),
            f"{statistics.median(row.seconds for row in mine):.0f}",
        ])  # fmt: skip
    return lines


def problems(rows: Sequence[ChaosRow]) -> list[str]:
    """Every claim about AsyncGEPA that does not hold, and every reason why the runs could not have shown it."""
    found = [f"{row.title}: {row.error}" for row in rows if row.error]
    for row in rows:
        if row.error:
            continue
        if row.method == "async":
            found += [f"{row.title}: {problem}" for problem in _of_run(row)]
        elif not row.faulty and (row.unanswered or row.wrong or row.foreign):
            found.append(f"{row.title}: the audit finds errors where there were no faults: it cannot be trusted")
    return found + _of_scores(rows)


def _of_run(row: ChaosRow) -> list[str]:
    counts = {
        f"{row.unanswered} provider errors were scored": row.unanswered,
        f"{row.wrong} of {row.stored} validation scores in the pool are not deserved": row.wrong,
        f"{row.cached_wrong} of {row.cached} cached scores are not the metric's": row.cached_wrong,
        f"{row.foreign} candidates hold a text that no reflection wrote": row.foreign,
        f"{row.spent - row.limit} metric calls more than {row.limit} were spent": max(0, row.spent - row.limit),
        f"{row.limit - row.spent} metric calls were left, and a step costs {row.step_calls} at most; it ended because "
        f"{row.stop_reason or 'of nothing that it says'}": row.limit - row.spent >= row.step_calls,
    }
    found = [words for words, count in counts.items() if count]
    if row.faulty:
        found += [
            f"no {kind} was injected: the run shows nothing of it" for kind in INJECTED if not row.injected.get(kind)
        ]
        if row.restarts != 1:
            found.append(f"the server was restarted {row.restarts} times, expected once")
    return found


def _of_scores(rows: Sequence[ChaosRow]) -> list[str]:
    """The median best score with faults lies within the spread of the runs without, or above it."""
    ours = [row for row in rows if row.method == "async" and row.best_score is not None]
    calm = [row.best_score for row in ours if not row.faulty and row.best_score is not None]
    rough = [row.best_score for row in ours if row.faulty and row.best_score is not None]
    if not calm or not rough or statistics.median(rough) >= min(calm):
        return []
    return [f"the median best score with faults is {statistics.median(rough):.3f}, under {min(calm):.3f} without"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a claim about AsyncGEPA does not hold or a run ended in an error."""
    options = parse(arguments)
    rows = recorded(options.report) if options.report is not None else []
    for row in () if options.report is not None else made(jobs_of(options), options.jobs):
        append_json_lines(options.out, [{"benchmark": "chaos", "unanswered": row.unanswered, **asdict(row)}])
        score = shown(row.best_score, ".3f")
        print(f"{row.title}: {score} after {row.spent} calls, {row.seconds:.0f} s {row.error}".rstrip(), flush=True)
        rows.append(row)
    print()
    print(table(HEADER, cells(rows)))
    found = problems(rows)
    ours = any(row.method == "async" for row in rows)
    held = "every claim holds: no provider error was scored, cached or pooled" if ours else "AsyncGEPA did not run"
    print("\n".join(["", *(found or [held])]))
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
