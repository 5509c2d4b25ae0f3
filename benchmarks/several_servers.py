"""One model on two servers of unequal speed: `python -m benchmarks.several_servers`.

Two simulated servers over real HTTP, one of which takes half as many requests at once and writes half as fast.
AsyncGEPA on each alone says what it can do; AsyncGEPA on both, through `BalancedLM`, is compared with the sum. Then the
faster one is ended for a while, and comes back.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.results import RESULTS, append_json_lines, table
from dspy_flashevolve.sim import PROFILES, Profile, SimServer

TARGET_SHARE = 0.95
HEADER = ("servers", "phase", "seconds", "fast, tokens/s", "slow, tokens/s", "of the sum alone")


def profiles() -> dict[str, Profile]:
    """Name -> server."""
    fast = replace(PROFILES["h100-qwen3-8b"], max_running=32)
    slow = replace(
        fast,
        max_running=16,
        step_seconds=2 * fast.step_seconds,
        step_seconds_per_sequence=2 * fast.step_seconds_per_sequence,
        step_seconds_per_cached_token=2 * fast.step_seconds_per_cached_token,
    )
    return {"fast": fast, "slow": slow}


@dataclass(frozen=True)
class Phase:
    """What servers have written in a part of a run.

    Attributes:
        servers: Their names, joined.
        phase: "steady", "fast is down" or "fast is back".
        seconds: Of the part.
        tokens_per_second: Server -> tokens written a second.
    """

    servers: str
    phase: str
    seconds: float
    tokens_per_second: dict[str, float]

    @property
    def total(self) -> float:
        """Of all servers, tokens a second."""
        return sum(self.tokens_per_second.values())


def watched(servers: dict[str, SimServer], up: Sequence[str], phase: str, seconds: float) -> Phase:
    """Count what the servers write for so long."""
    before = {name: servers[name].stats() for name in up}
    time.sleep(seconds)
    rates: dict[str, float] = {}
    for name in up:
        after = servers[name].stats()
        written = after.generated_tokens - before[name].generated_tokens
        rates[name] = written / (after.seconds - before[name].seconds)
    return Phase(" + ".join(servers), phase, seconds, rates)


@contextmanager
def running(servers: dict[str, SimServer], options: argparse.Namespace) -> Iterator[None]:
    """AsyncGEPA in a process of its own for the length of the block."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.several_servers",
        "--child",
        *(one.api_base for one in servers.values()),
    ]
    command += ["--high", str(options.high)]
    child = subprocess.Popen(command, env={**os.environ, "TQDM_DISABLE": "1"}, stdout=subprocess.DEVNULL)
    try:
        while not any(one.stats().requests for one in servers.values()):
            if child.poll() is not None:
                raise RuntimeError("no request has come")
            time.sleep(0.1)
        time.sleep(options.warm_up)
        yield
    finally:
        child.kill()
        child.wait()


def measure(names: Sequence[str], options: argparse.Namespace) -> Iterator[Phase]:
    """The phases of one run; the faster of two servers is ended for a while."""
    with ExitStack() as stack:
        servers = {name: stack.enter_context(SimServer(profiles()[name])) for name in names}
        with running(servers, options):
            yield watched(servers, names, "steady", options.seconds)
            if len(names) == 1:
                return
            with servers["fast"].down():
                time.sleep(options.settle)
                yield watched(servers, ["slow"], "fast is down", options.seconds / 2)
            time.sleep(options.settle)
            yield watched(servers, names, "fast is back", options.seconds / 2)


def child(options: argparse.Namespace) -> int:
    """A run that goes on until it is ended."""
    import dspy

    from dspy_flashevolve import AsyncGEPA
    from dspy_flashevolve.programs.servers import BalancedLM
    from dspy_flashevolve.sim import HouseRules

    lm = BalancedLM("openai/sim", api_base=options.child, api_key="none", cache=False)
    dspy.configure(lm=lm)
    task = HouseRules(seed=0)
    AsyncGEPA(task.metric, max_metric_calls=10**6, reflection_lm=lm, max_concurrency=options.high).compile(
        task.program(), trainset=task.trainset(100), valset=task.valset(100)
    )
    return 0


def rows(phases: Sequence[Phase]) -> list[list[str]]:
    """The table's cells."""
    alone = {phase.servers: phase.total for phase in phases if "+" not in phase.servers}
    found: list[list[str]] = []
    for phase in phases:
        sums = sum(alone.get(name, 0.0) for name in phase.tokens_per_second)
        share = f"{phase.total / sums:.1%}" if sums and "+" in phase.servers else "-"
        rates = [
            f"{phase.tokens_per_second[name]:.0f}" if name in phase.tokens_per_second else "-" for name in profiles()
        ]
        found.append([phase.servers, phase.phase, f"{phase.seconds:.0f}", *rates, share])
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.several_servers", description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0, help="of each measurement")
    parser.add_argument("--warm-up", type=float, default=30.0, help="seconds from the first request to a measurement")
    parser.add_argument("--settle", type=float, default=15.0, help="seconds after a server has gone or come back")
    parser.add_argument("--high", type=int, default=128, help="requests in flight at most")
    parser.add_argument("--out", type=Path, default=RESULTS / "several_servers.jsonl")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = parse(arguments)
    if options.child:
        return child(options)
    phases: list[Phase] = []
    for names in (["fast"], ["slow"], ["fast", "slow"]):
        for phase in measure(names, options):
            phases.append(phase)
            append_json_lines(options.out, [{"benchmark": "several_servers", **vars(phase)}])
            print(*rows(phases)[-1], flush=True)
    print()
    print(table(HEADER, rows(phases)))
    print(f"target: {TARGET_SHARE:.0%} of the sum")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
