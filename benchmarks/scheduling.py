"""Which schedule makes the better program in the same time: `python -m benchmarks.scheduling`.

What each mechanism of AsyncGEPA adds to lockstep (dspy.GEPA, barrier for barrier), how much of a validation is its
prefix, the median rule, and how many slots there are.

Everything runs in virtual time (`benchmarks.virtual`): it needs no server, and the same command gives the same figures
on any machine. An interrupted command goes on where it stopped: what its file has is not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from benchmarks.methods import Limits
from benchmarks.results import RESULTS
from benchmarks.runs import Job, carry_out, recorded
from benchmarks.scheduling_tables import EXPERIMENTS, report
from benchmarks.tasks import task_kind
from benchmarks.variants import variant
from benchmarks.virtual import Setting
from dspy_flashevolve.sim.profiles import PROFILES, profile_named
from dspy_flashevolve.sim.reply_model import REPLY_MODELS

COMPARED = tuple(dict.fromkeys(name for named in EXPERIMENTS.values() for name in named))
SECONDS = 120.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options; `seconds` becomes profile -> seconds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduling", description=__doc__)
    common = Setting()
    parser.add_argument("--profiles", nargs="+", default=list(PROFILES), help="the simulated models")
    parser.add_argument("--model", choices=REPLY_MODELS, default=common.model, help="how well it obeys and reflects")
    parser.add_argument("--tasks", nargs="+", default=["many"], help="kinds of task, as few or many:rules=96")
    parser.add_argument("--methods", nargs="+", default=list(COMPARED), help="variants, as async+prefix=0.5")
    parser.add_argument("--seconds", nargs="+", default=[], help="the fixed virtual time: 120, or PROFILE=120 for one")
    parser.add_argument("--slots", type=int, default=64, help="requests in flight at most, unless the variant says it")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds")
    parser.add_argument("--train", type=int, default=common.train, help="training examples")
    parser.add_argument("--val", type=int, default=common.val, help="validation examples")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--fresh", action="store_true", help="run again what the file has")
    parser.add_argument("--report", type=Path, help="print the tables of an earlier file; run nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "scheduling.jsonl")
    options = parser.parse_args(arguments)
    options.methods = list(dict.fromkeys(options.methods))
    try:
        for name in options.profiles:
            profile_named(name)
        for name in options.tasks:
            task_kind(name)
        for name in options.methods:
            variant(name)
        options.seconds = _seconds(options.seconds, options.profiles)
    except ValueError as error:
        parser.error(str(error))
    return options


def planned(options: argparse.Namespace) -> list[Job]:
    """Every run, in the order of profiles, tasks, seeds and variants."""
    return [
        Job(
            Setting(profile, options.train, options.val, options.model),
            Limits(options.slots, seed, seconds=options.seconds[profile]),
            task,
            name,
        )
        for profile, task, seed, name in product(options.profiles, options.tasks, range(options.seeds), options.methods)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a run ended in an error, whatever became of the targets."""
    options = parse(arguments)
    if options.report is not None:
        print(report([row for row in recorded(options.report) if row.method in COMPARED]))
        return 0
    return carry_out("scheduling", planned(options), options, report)


def _seconds(written: Sequence[str], profiles: Sequence[str]) -> dict[str, float]:
    """Profile -> seconds; raises `ValueError` for what is not above 0, or no profile of the command."""
    seconds = dict.fromkeys(profiles, SECONDS)
    for one in written:
        profile, equals, number = one.rpartition("=")
        if equals and profile not in seconds:
            raise ValueError(f"--seconds {one}: there is no run on {profile!r}")
        if not float(number) > 0:
            raise ValueError(f"--seconds {one}: expected more than 0")
        seconds.update(dict.fromkeys([profile] if equals else profiles, float(number)))
    return seconds


if __name__ == "__main__":
    raise SystemExit(main())
