"""dspy.GEPA and AsyncGEPA on a real vLLM server: `python -m benchmarks.vllm_cpu`.

The same number of metric calls for each, on IFEval prompts with short answers, with one small model as task and
reflection model; beside them a plain parallel evaluation of the same prompts with the same slots.
"""

from __future__ import annotations

import argparse
import re
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import dspy

from benchmarks.measure import Bench, Figures
from benchmarks.methods import Limits, Workload, method
from benchmarks.results import RESULTS, Result, ratio, shown, table, write_result
from benchmarks.workloads import ifbench, ifeval

METHODS = ("evaluate", "gepa", "async")
TARGET_SPEEDUP = 2.0
TARGET_CEILING_SHARE = 0.85
HEADER = (
    "method", "seconds", "metric calls", "s/100 calls", "tokens/s", "proposals", "seed score", "best score",
    "x faster a call", "of plain tokens/s", "overshoot",
)  # fmt: skip
_COUNTERS = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "completion_tokens": "vllm:generation_tokens_total",
    "requests": "vllm:request_success_total",
}
_QUIET_SECONDS = 120.0


def counter(metrics: str, name: str) -> float:
    """The sum of a counter over its labels in Prometheus' text.

    Example:
        >>> counter('a_total{x="1"} 2.0\\na_total{x="2"} 3.0\\na_total_b 9', "a_total")
        5.0
    """
    found = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)", metrics, re.MULTILINE)
    return sum((float(value) for value in found), 0.0)


class VllmMeter:
    """Reads the totals of a vLLM server, as differences from the last reset."""

    def __init__(self, api_base: str) -> None:
        parts = urlsplit(api_base)
        self._url = f"{parts.scheme}://{parts.netloc}/metrics"
        self._before: dict[str, float] = {}

    def reset(self) -> None:
        """Wait until nothing is in flight, and count from here."""
        deadline = time.monotonic() + _QUIET_SECONDS
        while counter(self._text(), "vllm:num_requests_running") + counter(self._text(), "vllm:num_requests_waiting"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._url} shows requests in flight for {_QUIET_SECONDS:.0f} s: is it shared?")
            time.sleep(0.2)
        self._before = self._totals()

    def read(self) -> Figures:
        """What was counted since."""
        now = {name: value - self._before.get(name, 0.0) for name, value in self._totals().items()}
        return Figures(now["prompt_tokens"], now["completion_tokens"], int(now["requests"]))

    def _totals(self) -> dict[str, float]:
        text = self._text()
        return {name: counter(text, metric) for name, metric in _COUNTERS.items()}

    def _text(self) -> str:
        with urllib.request.urlopen(self._url, timeout=30) as reply:
            return reply.read().decode()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_cpu", description=__doc__)
    parser.add_argument("--api-base", default="http://127.0.0.1:8111/v1")
    parser.add_argument("--model", default="qwen05", help="the model's name on the server")
    parser.add_argument("--calls", type=int, default=200, help="metric calls of each method")
    parser.add_argument("--seconds", type=float, help="a time limit instead: the pace while the run is in full swing")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--train", type=int, default=20)
    parser.add_argument("--val", type=int, default=20)
    parser.add_argument("--source", choices=sorted(ifbench.SOURCES), default="ifeval")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=160, help="longest reply of the task model")
    parser.add_argument("--reflection-tokens", type=int, default=512, help="longest reply of the reflection model")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--out", type=Path, default=RESULTS / "vllm_cpu.jsonl")
    return parser.parse_args(arguments)


def workload(options: argparse.Namespace) -> Workload:
    """IFEval with the served model; an answer that does not parse is a failure, with no second try as JSON."""
    trainset, valset = ifeval.examples(options.train, options.val, options.seed, options.max_tokens, options.source)
    model, served = f"openai/{options.model}", {"api_base": options.api_base, "api_key": "none", "cache": False}
    return Workload(
        program=ifeval.program,
        trainset=trainset,
        valset=valset,
        metric=ifeval.metric,
        task_lm=dspy.LM(model, max_tokens=options.max_tokens, temperature=0.0, **served),
        reflection_lm=dspy.LM(model, max_tokens=options.reflection_tokens, temperature=1.0, **served),
        adapter=dspy.ChatAdapter(use_json_adapter_fallback=False),
    )


def seconds_per_call(result: Result) -> float | None:
    """Elapsed seconds a metric call, which is fair where dspy.GEPA spends more calls than it was given."""
    return result.total_seconds / result.total_metric_calls if result.total_metric_calls else None


def rows(results: Sequence[Result]) -> list[list[str]]:
    """The table's cells, a row a run."""
    by_name = {result.method: result for result in results}
    gepa = seconds_per_call(by_name["gepa"]) if "gepa" in by_name else None
    plain = by_name["evaluate"].tokens_per_second if "evaluate" in by_name else None
    cells: list[list[str]] = []
    for result in results:
        each = seconds_per_call(result)
        cells.append([
            result.method,
            f"{result.total_seconds:.1f}",
            str(result.total_metric_calls),
            shown(None if each is None else 100 * each, ".1f"),
            f"{result.tokens_per_second:.0f}",
            str(result.proposals),
            shown(result.seed_score, ".3f"),
            shown(result.best_score, ".3f"),
            shown(ratio(gepa, each), ".2f"),
            shown(ratio(result.tokens_per_second, plain), ".0%"),
            str(result.overshoot),
        ])  # fmt: skip
    return cells


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a run ended in an error."""
    options = parse(arguments)
    calls = None if options.seconds else options.calls
    task, limits = workload(options), Limits(options.slots, options.seed, options.seconds, calls)
    bench = Bench("vllm_cpu", options.model, VllmMeter(options.api_base))
    results: list[Result] = []
    for name in options.methods:
        result = bench.run(method(name), task, limits)
        write_result(options.out, result)
        results.append(result)
        print(
            f"{name}: {result.total_seconds:.1f} s, {result.tokens_per_second:.0f} tokens/s {result.error}", flush=True
        )
    print()
    print(table(HEADER, rows(results)))
    print(
        f"targets for async: {TARGET_SPEEDUP}x faster than gepa for the same metric calls, "
        f"{TARGET_CEILING_SHARE:.0%} of the plain evaluation's tokens/s"
    )
    return int(any(result.error for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
