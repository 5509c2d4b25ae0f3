"""Runs in virtual time, as a comparison plans them, makes them side by side, writes them down and reads them again."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from multiprocessing import get_context
from pathlib import Path

from benchmarks.methods import Limits, method
from benchmarks.results import Scored, Spread, append_json_lines, commit, middle, shown
from benchmarks.tasks import task_kind
from benchmarks.trajectory import Point
from benchmarks.virtual import Setting, run_virtually

Key = tuple[str | float, ...]
DOLLARS_READ, DOLLARS_WRITTEN = 0.15, 0.60
"""A million tokens at GPT-4o-mini's list price, of the program's calls and of reflections, whatever the profile."""
TOLERANCE = 1e-9
"""Of a comparison with a target: a mean of scores depends on their order."""


@dataclass(frozen=True)
class Row(Scored):
    """One run. Figures are taken at the limit, before the drain, unless their name says otherwise.

    Attributes:
        task: Kind of task, with its changes.
        method: What ran.
        seed: Seed of the task, the model and the optimizer.
        condition: "time" or "calls".
        limit: Virtual seconds, or metric calls.
        profile: The simulated model.
        slots: Requests in flight at most, unless the method says otherwise.
        train: Training examples.
        val: Validation examples.
        model: The simulated model's name; rows that name none were made by the one that is "obliging" now.
        reflection_seconds: Of each request to a reflection LM apart (`virtual.Setting`); 0 where there is none.
        cached: dspy's cache answered what was asked before.
        best_score: Best fully validated score; at "calls" of the candidates that were paid for within the limit.
        seed_score: The seed program's.
        true_score: What the program with the best score is to score on examples that nobody saw (`true_score` of
            `HouseRules`); `None` in rows that are older than it.
        seed_true_score: The seed program's, likewise.
        lm_calls: Requests that were no rollout's: reflections, integrations.
        task_tokens: Tokens read and written for rollouts.
        reflection_tokens: Tokens read and written for the others.
        read_tokens: Of all these tokens, those that were read; 0 in rows that are older than it.
        task_requests: Requests of rollouts that were paid: answered by the model, and not by a cache.
        metric_calls: Counted by the optimizer; at "calls" those within the limit.
        overshoot: Metric calls past the limit, drained.
        proposals: New texts.
        accepted: Candidates that entered the pool.
        landed: Proposals whose work is in these (`VirtualRun.landed`).
        validations: Candidates scored on the whole validation set, the seed included.
        generations: From the seed to the deepest candidate.
        tokens_per_second: Written by the model.
        span: Virtual seconds until the limit, or until the run's end where that came first.
        seconds: Virtual seconds until the run had drained.
        refused: Requests turned away (429).
        refused_share: Of the requests after the first seconds (`virtual.SETTLED_SECONDS`), those refused.
        integrated: Share of what the policy looked at, drained; `None` where it looked at nothing.
        changes: That reflections added to the head, drained.
        error: What ended the run early; empty when nothing did.
        trajectory: Rows of `Point`'s fields where score or depth changed, drained.
        paid: Requests of rollouts, and other requests, that were paid by each row of the trajectory.
        commit: That made the run (`results.commit`); empty where that is not known.
    """

    task: str
    method: str
    seed: int
    condition: str
    limit: float
    profile: str
    slots: int
    train: int = 60
    val: int = 60
    model: str = "obliging"
    reflection_seconds: float = 0.0
    cached: bool = False
    best_score: float | None = None
    seed_score: float | None = None
    true_score: float | None = None
    seed_true_score: float | None = None
    lm_calls: int = 0
    task_tokens: int = 0
    reflection_tokens: int = 0
    read_tokens: int = 0
    task_requests: int = 0
    metric_calls: int = 0
    overshoot: int = 0
    proposals: int = 0
    accepted: int = 0
    landed: int = 0
    validations: int = 0
    generations: int = 0
    tokens_per_second: float = 0.0
    span: float = 0.0
    seconds: float = 0.0
    refused: int = 0
    refused_share: float | None = None
    integrated: float | None = None
    changes: int = 0
    error: str = ""
    trajectory: list[list[float | int | None]] = field(default_factory=list)
    paid: list[list[int]] = field(default_factory=list)
    commit: str = ""

    @property
    def tokens(self) -> int:
        """All tokens, read and written."""
        return self.task_tokens + self.reflection_tokens

    @property
    def dollars(self) -> float | None:
        """What the tokens cost; `None` in a row that does not say how many were read."""
        if not self.read_tokens:
            return None
        return (DOLLARS_READ * self.read_tokens + DOLLARS_WRITTEN * (self.tokens - self.read_tokens)) / 1e6

    @property
    def gain_per_million(self) -> float | None:
        """The gain for a million tokens; `None` without a gain."""
        return self.gain / self.tokens * 1e6 if self.gain is not None and self.tokens else None

    def true_score_at(self, seconds: float) -> float | None:
        """The true score after so many seconds; `None` where the run was shorter, or had none yet."""
        if self.condition == "time" and seconds > self.limit:
            return None
        return next((true for at, true in reversed(self._true_scores) if at <= seconds), None)

    def seconds_to(self, score: float) -> float | None:
        """Seconds, within the limit, until the true score was at least this; `None` if it never was."""
        last = self.limit if self.condition == "time" else math.inf
        reached = (at for at, true in self._true_scores if at <= last and true >= score - TOLERANCE)
        return next(reached, None)

    def paid_to(self, score: float) -> list[int] | None:
        """Requests of rollouts, and other requests, paid until the true score was at least this; `None` if it never
        was."""
        points = [Point(*row) for row in self.trajectory]  # pyright: ignore[reportArgumentType]
        true_scores = [-math.inf if point.true_score is None else point.true_score for point in points]
        reached = (paid for paid, true in zip(self.paid, true_scores, strict=False) if true >= score - TOLERANCE)
        return next(reached, None)

    @property
    def _true_scores(self) -> list[tuple[float, float]]:
        points = [Point(*row) for row in self.trajectory]  # pyright: ignore[reportArgumentType]
        return [(point.seconds, point.true_score) for point in points if point.true_score is not None]

    @property
    def key(self) -> Key:
        """What the run was to be: of two rows with the same key, the later counts."""
        size = (self.profile, self.model, self.reflection_seconds, self.slots, self.train, self.val, self.cached)
        return (self.condition, self.limit, *size, self.task, self.seed, self.method)

    @property
    def where(self) -> str:
        """The task and the limit, for people."""
        return f"{self.task}, at {self.limit:g} {'virtual seconds' if self.condition == 'time' else 'metric calls'}"

    @property
    def title(self) -> str:
        """Which run it is, for people."""
        return f"{self.where} ({self.profile}, {self.model}), seed {self.seed}: {self.method}"


@dataclass(frozen=True)
class Job:
    """A run to be made: its setting, its limits with the seed, the task's name and the method's."""

    setting: Setting
    limits: Limits
    task: str
    method: str

    @property
    def row(self) -> Row:
        """The row without its figures."""
        limits, setting = self.limits, self.setting
        condition, limit = ("calls", limits.metric_calls) if limits.metric_calls else ("time", limits.seconds or 0.0)
        names = (self.task, self.method, limits.seed, condition, float(limit))
        size = (limits.slots, setting.train, setting.val)
        return Row(*names, setting.profile, *size, setting.model, setting.reflection_seconds, setting.cached)


def measure(job: Job) -> Row:
    """One run."""
    task = task_kind(job.task).task(job.limits.seed, job.setting.model)
    run = run_virtually(method(job.method, virtual=True), task, job.limits, job.setting)
    point = run.at()
    return replace(
        job.row,
        best_score=point.best_score,
        seed_score=run.trajectory.seed_score,
        true_score=point.true_score,
        seed_true_score=run.trajectory.seed_true_score,
        **asdict(point.spent),
        metric_calls=point.metric_calls,
        overshoot=run.overshoot,
        proposals=point.proposals,
        accepted=point.accepted,
        landed=run.landed,
        validations=point.validations,
        generations=point.depth,
        tokens_per_second=run.tokens / run.span if run.span else 0.0,
        span=run.span,
        seconds=run.seconds,
        refused=run.reading.refused,
        refused_share=run.refused_share,
        integrated=run.share("integrate"),
        changes=run.changes,
        error=run.error,
        trajectory=run.trajectory.compact(),
        paid=run.trajectory.paid(),
        commit=commit(),
    )


def measured(jobs: Sequence[Job], side_by_side: int) -> Iterator[Row]:
    """Every run, in the order of the jobs."""
    if side_by_side <= 1:
        yield from map(measure, jobs)
        return
    with ProcessPoolExecutor(side_by_side, mp_context=get_context("spawn")) as pool:
        yield from pool.map(measure, jobs)


def make(benchmark: str, jobs: Sequence[Job], side_by_side: int, out: Path) -> Iterator[Row]:
    """Every run, each written down and said as soon as it is there.

    Args:
        benchmark: The command's short name, for the file.
        jobs: The runs.
        side_by_side: Runs at a time.
        out: JSON lines are appended to it.
    """
    commit()  # before the code changes under a long run
    for row in measured(jobs, side_by_side):
        append_json_lines(out, [{"benchmark": benchmark, "gain": row.gain, **asdict(row)}])
        print(f"{row.title}: {shown(row.score, '.3f')} {row.error}".rstrip(), flush=True)
        yield row


def recorded(path: Path) -> list[Row]:
    """The runs of a file that `make` wrote; of the same run measured twice, the later."""
    known = {one.name for one in fields(Row)}
    found: dict[Key, Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = Row(**{name: value for name, value in json.loads(line).items() if name in known})
        found[row.key] = row
    return list(found.values())


def missing(jobs: Sequence[Job], path: Path, fresh: bool = False) -> tuple[list[Row], list[Job]]:
    """What a file has of the runs, without those that failed, and the runs that are to be made.

    Args:
        jobs: All runs.
        path: The file; it need not be there.
        fresh: Whether all are to be made again.
    """
    wanted = {job.row.key for job in jobs}
    rows = [] if fresh or not path.is_file() else recorded(path)
    there = {row.key: row for row in rows if row.key in wanted and not row.error}
    if there:
        commits = ", ".join(sorted({row.commit or "unknown" for row in there.values()}))
        print(f"{path} has {len(there)} of {len(jobs)} runs (commit {commits}); --fresh runs them again", flush=True)
    return list(there.values()), [job for job in jobs if job.row.key not in there]


def median_of(rows: Sequence[Row], name: str | None, figure: Callable[[Row], float | None]) -> float | None:
    """The median over the seeds of one method's figure; `None` without a run that has it."""
    return middle([row for row in rows if row.method == name], figure)


def median_gain(rows: Sequence[Row], name: str | None) -> float | None:
    """The median over the seeds of one method's gain; `None` without a run that has one."""
    return median_of(rows, name, lambda row: row.gain)


def best_combee(rows: Sequence[Row]) -> str | None:
    """The Combee with the highest median gain, which a user would pick; `None` without one."""
    names = sorted({row.method for row in rows if row.method.startswith("combee")})
    return max(names, key=lambda name: median_gain(rows, name) or 0.0, default=None)


def verdict(met: bool) -> str:
    """The last word of a line about a target."""
    return "met" if met else "MISSED"


def score_spread(rows: Sequence[Scored]) -> str:
    """The median of the scores (`Scored.score`) and their range, for a table."""
    scores = [row.score for row in rows if row.score is not None]
    if not scores:
        return "-"
    spread = Spread.of(scores)
    return f"{spread.median:.3f} ({spread.low:.3f}-{spread.high:.3f})"


def carry_out(
    benchmark: str, jobs: Sequence[Job], options: argparse.Namespace, report: Callable[[Sequence[Row]], str]
) -> int:
    """Make the runs that the file has not, print the tables of all; 1 when one ended in an error.

    Args:
        options: of the command: `out`, `fresh` and `jobs`.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")
    there, left = missing(jobs, options.out, options.fresh)
    rows = {row.key: row for row in [*there, *make(benchmark, left, options.jobs, options.out)]}
    every_row = [rows[job.row.key] for job in jobs]
    problems = [f"{row.title}: {row.error}" for row in every_row if row.error]
    print("\n".join(["", report(every_row), *problems]))
    return int(bool(problems))
