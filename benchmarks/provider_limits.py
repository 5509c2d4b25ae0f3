"""How much of a provider's limits is used, and how much is refused: `python -m benchmarks.provider_limits`.

A simulated API of 600 requests and 200,000 tokens a minute, with OpenAI's headers, over real HTTP and in real minutes:
AsyncGEPA in one process, and in two processes on the same key, which share the limits through a file. Long replies use
up the tokens, short ones the requests. `blind` is the same AsyncGEPA where the provider says nothing of its limits and
nobody else does: it learns by refusals.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.results import RESULTS, append_json_lines, table
from dspy_flashevolve.sim import PROFILES, LengthLaw, Profile, Quota, SimServer
from dspy_flashevolve.sim.counters import ServerStats
from dspy_flashevolve.sim.quota import Counting

REQUESTS, TOKENS = 600, 200_000
TARGET_USED, TARGET_REFUSED = 0.9, 0.005
FIRST_REQUEST_SECONDS = 120.0
HEADER = ("limits from", "counted by", "replies", "runs", "minutes", "requests", "tokens", "refused")


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        known: Where the limits are known from: "headers", "arguments", or "blind" for nowhere.
        counting: How the provider counts.
        replies: "long": the tokens bind, or "short": the requests do.
        runs: Processes on the same key.
    """

    known: str = "headers"
    counting: Counting = "bucket"
    replies: str = "long"
    runs: int = 1


CASES = (
    Case(),
    Case(runs=2),
    Case(replies="short"),
    Case(replies="short", runs=2),
    Case(counting="fixed"),
    Case(known="arguments", counting="sliding", replies="short"),
    Case(known="blind"),
)


@dataclass(frozen=True)
class Use:
    """What a provider has seen.

    Attributes:
        seconds: Measured.
        requests: Let in.
        tokens: Of those that were answered.
        refused: Requests.
    """

    seconds: float
    requests: int
    tokens: int
    refused: int

    @property
    def shares(self) -> tuple[float, float]:
        """Of the limits of requests and of tokens that was used."""
        minutes = self.seconds / 60
        return self.requests / (REQUESTS * minutes), self.tokens / (TOKENS * minutes)

    @property
    def refused_share(self) -> float:
        """Of all requests."""
        return self.refused / max(1, self.requests + self.refused)


def profile(replies: str) -> Profile:
    """An API that is quick, so that nothing but its limits binds."""
    api = replace(PROFILES["api-gpt-4o-mini"], concurrency_limit=None)
    if replies == "long":
        return api
    return replace(api, task_length=LengthLaw(30, 0.5), reflection_length=LengthLaw(200, 0.3))


def measure(case: Case, minutes: float, warm_up: float) -> Use:
    """Run AsyncGEPA against a provider with the limits, as often at once as the case says."""
    quota = Quota(REQUESTS, TOKENS, case.counting, sends_headers=case.known == "headers")
    with tempfile.TemporaryDirectory() as cache, SimServer(profile(case.replies), quota=quota) as server:
        command = [sys.executable, "-m", "benchmarks.provider_limits", "--child", server.api_base]
        command += ["--known", case.known]
        environment = {**os.environ, "XDG_CACHE_HOME": cache, "TQDM_DISABLE": "1"}
        seeds = range(case.runs)
        children = [
            subprocess.Popen([*command, "--seed", str(seed)], env=environment, stdout=subprocess.DEVNULL)
            for seed in seeds
        ]
        try:
            started = time.monotonic()
            while not server.stats().requests:
                if time.monotonic() > started + FIRST_REQUEST_SECONDS or any(
                    one.poll() is not None for one in children
                ):
                    raise RuntimeError("no request has come")
                time.sleep(0.1)
            time.sleep(warm_up)  # tokens count when a reply ends: as many are under way then as at the end
            before, began = server.stats(), time.monotonic()
            time.sleep(60 * minutes)
            return used(before, server.stats(), time.monotonic() - began)
        finally:
            for child in children:
                child.kill()
                child.wait()


def used(before: ServerStats, after: ServerStats, seconds: float) -> Use:
    """What came between two readings."""
    tokens = [one.prompt_tokens + one.completion_tokens for one in (before, after)]
    return Use(seconds, after.requests - before.requests, tokens[1] - tokens[0], after.refused - before.refused)


def child(options: argparse.Namespace) -> int:
    """A run that goes on until it is ended."""
    import dspy

    from dspy_flashevolve import AsyncGEPA
    from dspy_flashevolve.sim import HouseRules

    said = {"rpm": REQUESTS, "tpm": TOKENS} if options.known == "arguments" else {}
    lm = dspy.LM("openai/sim", api_base=options.child, api_key="key", engine="litellm", cache=False, **said)
    dspy.configure(lm=lm)
    task = HouseRules(seed=options.seed)
    AsyncGEPA(task.metric, max_metric_calls=10**6, reflection_lm=lm, seed=options.seed).compile(
        task.program(), trainset=task.trainset(100), valset=task.valset(100)
    )
    return 0


def row(case: Case, use: Use) -> list[str]:
    """The table's cells."""
    requests, tokens = use.shares
    return [
        case.known, case.counting, case.replies, str(case.runs), f"{use.seconds / 60:.1f}",
        f"{requests:.1%}", f"{tokens:.1%}", f"{use.refused_share:.2%} ({use.refused})",
    ]  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.provider_limits", description=__doc__)
    parser.add_argument("--minutes", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--warm-up", type=float, default=30.0, help="seconds from the first request to a measurement")
    parser.add_argument("--cases", type=int, nargs="*", default=list(range(len(CASES))), help="numbers of the cases")
    parser.add_argument("--out", type=Path, default=RESULTS / "provider_limits.jsonl")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--known", default="headers", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = parse(arguments)
    if options.child:
        return child(options)
    rows: list[list[str]] = []
    for case in (CASES[number] for number in options.cases):
        use = measure(case, options.minutes, options.warm_up)
        append_json_lines(options.out, [{"benchmark": "provider_limits", **asdict(case), **asdict(use)}])
        rows.append(row(case, use))
        print(*rows[-1], flush=True)
    print()
    print(table(HEADER, rows))
    print(f"target: {TARGET_USED:.0%} of what binds, under {TARGET_REFUSED:.1%} refused")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
