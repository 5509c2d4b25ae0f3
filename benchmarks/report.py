"""One self-contained HTML page of a bench's runs: tables with ratios and spread, and pictures, which are PNG files too.

`python -m benchmarks.report RESULTS.jsonl --out report.html` reads the lines that the benchmarks over a server write
(`benchmarks.results.Result`, as of `throughput`, `score`, `demo`, `vllm_cpu`). Matplotlib draws; it is in the extra
`notebooks`.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks import pictures
from benchmarks.results import Result, Spread, middle, ratio, shown

BASELINE = "gepa"
COLUMNS = (
    "method", "seeds", "score", "gain", "validated", f"x {BASELINE}'s gain", "proposals a minute", f"x {BASELINE}'s",
    "metric calls", "tokens/s", "slots busy", "generations", "overshoot", "failed",
)  # fmt: skip
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0 2rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1rem 0 2rem; } img { max-width: 100%; height: auto; } code { background: #f4f4f4; }
"""


def read(path: Path) -> list[tuple[Result, dict[str, Any]]]:
    """The runs of a file, each with its whole line; of equal runs (`Result.key`) the last.

    Raises:
        ValueError: a line is no JSON, or no run of a benchmark over a server; with its number.
    """
    known = {field.name for field in fields(Result)}
    needed = {"benchmark", "method", "backend", "seed", "slots", "seconds", "total_seconds"}
    runs: dict[object, tuple[Result, dict[str, Any]]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: no JSON ({error})") from None
        if not isinstance(row, dict) or not needed <= row.keys():
            raise ValueError(f"{path}, line {number}: expected the fields {', '.join(sorted(needed))} of a run.")
        result = Result(**{name: value for name, value in row.items() if name in known})
        runs[result.key] = result, row
    return list(runs.values())


def named(result: Result) -> str:
    """What the runs that are compared have in common, for people."""
    limit = "" if result.call_limit is None else f", {result.call_limit} metric calls"
    settings = f", {result.settings}" if result.settings else ""
    return f"{result.benchmark} on {result.backend}, {result.slots} slots{limit}{settings}"


def cells(results: Sequence[Result]) -> list[list[str]]:
    """A line a method, in the order in which they came; medians over the seeds, failed runs left out.

    The score is the true one where it is known (`Result.score`), and validated is what the validation set says of it.
    """
    lines: list[list[str]] = []
    sound = [result for result in results if not result.error]
    base = [result for result in sound if result.method == BASELINE]
    for name in dict.fromkeys(result.method for result in results):
        mine = [result for result in sound if result.method == name]
        scores = [result.score for result in mine if result.score is not None]
        gained, pace = middle(mine, lambda result: result.gain), middle(mine, lambda result: result.pace)
        lines.append([
            name,
            str(len({result.seed for result in mine})),
            str(Spread.of(scores)) if scores else "-",
            shown(gained, "+.3f"),
            shown(middle(mine, lambda result: result.best_score), ".2f"),
            shown(ratio(gained, middle(base, lambda result: result.gain)), ".2f"),
            shown(pace, ".1f"),
            shown(ratio(pace, middle(base, lambda result: result.pace)), ".1f"),
            shown(middle(mine, lambda result: result.metric_calls), ".0f"),
            shown(middle(mine, lambda result: result.tokens_per_second), ".0f"),
            shown(middle(mine, lambda result: result.mean_running), ".1f"),
            shown(middle(mine, lambda result: result.depth), ".0f"),
            str(max((result.overshoot for result in mine), default=0)),
            str(sum(bool(result.error) for result in results if result.method == name)),
        ])  # fmt: skip
    return lines


def drawn(results: Sequence[Result]) -> Iterator[tuple[str, str, bytes]]:
    """The pictures of one benchmark on one backend: name of the file, what it shows, PNG."""
    yield "seconds", "best score over seconds", pictures.scores(results, "seconds", "seconds")
    yield "metric_calls", "best score over metric calls", pictures.scores(results, "metric_calls", "metric calls")
    busy = pictures.slots(results)
    if busy is not None:
        yield "slots", "slots busy over seconds", busy
    for name in (BASELINE, pictures.OURS):
        timed = [result for result in results if result.method == name and result.stages]
        if timed:
            yield f"stages-{name}", f"timeline of the stages of {name}", pictures.stages(timed[0])


def page(runs: Sequence[tuple[Result, dict[str, Any]]], folder: Path | None = None) -> str:
    """The HTML; a part for each benchmark and backend.

    Args:
        runs: By `read`.
        folder: Where the PNG files go besides; `None` for nowhere.
    """
    groups: dict[object, list[Result]] = {}
    for result, _ in runs:
        groups.setdefault(result.setting, []).append(result)
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>Bench</title><style>{STYLE}</style>"]
    parts.append("<h1>Bench</h1><p>Medians over the seeds (lowest - highest); bands are the seeds' range.</p>")
    for number, results in enumerate(groups.values()):
        benchmark = re.sub(r"[^\w.+-]", "_", results[0].benchmark)
        parts.append(f"<h2>{html.escape(named(results[0]))}</h2>")
        parts.append(_table(COLUMNS, cells(results)))
        for name, alt, picture in drawn(results):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{number}-{benchmark}-{name}.png").write_bytes(picture)
            data = base64.b64encode(picture).decode()
            parts.append(f'<figure><img alt="{html.escape(alt)}" src="data:image/png;base64,{data}"></figure>')
        for result in results:
            if result.error:
                parts.append(f"<p>{html.escape(f'{result.method}, seed {result.seed}: {result.error}')}</p>")
    parts.append("<h2>Made by</h2>")
    made = {(str(row.get("command")), str(row.get("date"))[:10], str(row.get("machine"))) for _, row in runs}
    parts.append(_table(("command", "date", "machine"), [list(one) for one in sorted(made)]))
    return "\n".join(parts) + "\n</html>\n"


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="files of JSON lines")
    parser.add_argument("--out", type=Path, default=Path("report.html"))
    parser.add_argument("--pictures", type=Path, help="a folder for the PNG files")
    options = parser.parse_args(arguments)
    try:
        runs = [run for path in options.results for run in read(path)]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    options.out.write_text(page(runs, options.pictures), encoding="utf-8")
    print(f"{options.out}: {len(runs)} runs")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
