"""Random runs of AsyncGEPA under random trouble: `python -m benchmarks.stress --minutes 5 [--seed 0] [--case SEED]`.

A case is a program, a budget, faults of the provider and a way to end, all drawn from its seed. It runs in virtual
time, where a hang of hours takes no time; runs that are ended by Ctrl-C or SIGTERM, and those that ask a server over
HTTP, take real time. A run that is killed is one of another process, and goes on in this one. What must hold of each
run is checked: it ends, spends what it may and says so, ends every step once, commits no wrong score, loses nothing
and pays nothing twice by its journal, changes nothing of the student and leaves no thread behind. Over all cases the
program must be no worse than dspy.GEPA's for as many metric calls: AsyncGEPA's lockstep, which takes dspy.GEPA's steps,
without faults and without what it overshoots the budget.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import dspy
from dspy.utils.exceptions import AdapterParseError

from benchmarks.chaos_run import Restart
from benchmarks.measure import silence
from benchmarks.results import commit, table
from benchmarks.stress_cases import (
    TIME_SCALE,
    Backend,
    Build,
    Case,
    Trouble,
    Watch,
    at_once,
    state_of,
    student,
    texts_of,
    true_score,
)
from benchmarks.trajectory import Recorder
from dspy_flashevolve import AsyncGEPA, RunAbortedError, Workflow
from dspy_flashevolve.engine.check import check
from dspy_flashevolve.sim import SimServer
from dspy_flashevolve.sim.virtual import run

VIRTUAL_SECONDS = 100_000.0
"""A run in virtual time that takes longer hangs: a thousand times what one takes."""
WALL_SECONDS = 600
"""The same in real time: a generous limit, for what waits for nothing that is planned."""
CUT = ("cancelled", "SIGKILL")
"""Endings in which a call that was written down may not have been made."""
JOURNALED = ("stopped", *CUT)
KILLED_AT = "killed_at"


@dataclass
class Found:
    """What a case left.

    Attributes:
        case: Which.
        problems: What did not hold.
        outcome: How the run ended.
        counts: Figures for the table: metric calls, steps, scores, retried requests, unanswered examples.
        true_score: Of the program that came out, on examples that nobody saw; `None` where none came.
        rival: The same of dspy.GEPA's program for as many calls; `None` where it is not compared.
    """

    case: Case
    problems: list[str] = field(default_factory=list[str])
    outcome: str = ""
    counts: Counter[str] = field(default_factory=Counter[str])
    true_score: float | None = None
    rival: float | None = None


def deserved(case: Case, candidates: Sequence[dspy.Module]) -> list[list[float]]:
    """What each candidate scores on each validation example, without faults."""
    task = case.task()
    backend = Backend(case, Trouble(empty=case.trouble.empty))

    async def score(texts: dict[str, str], example: dspy.Example) -> float:
        program = task.program(case.predictors)
        for name, predictor in program.named_predictors():
            predictor.signature = predictor.signature.with_instructions(texts[name])  # pyright: ignore[reportOptionalMemberAccess]
        try:
            prediction = await program.acall(**example.inputs())
        except AdapterParseError:
            return 0.0
        return float(task.metric(example, prediction).score)

    async def scores() -> list[list[float]]:
        with dspy.context(lm=backend.lm()):
            return [
                await asyncio.gather(*(score(texts_of(one), example) for example in task.valset(case.val)))
                for one in candidates
            ]

    return run(scores)


def compiled(case: Case, watch: Watch, program: dspy.Module, directory: str, **options: Any) -> Any:
    """The program that AsyncGEPA makes of it, in virtual time, or in real time where a signal ends it or over HTTP.

    A run that was cancelled goes on from its directory.

    Raises:
        TimeoutError: It did not end.
    """
    if case.http:
        return _served(case, watch, program, options)
    real = case.ending in ("SIGINT", "SIGTERM")
    task_model = Backend(case, case.trouble, instant=real)
    reflection = Backend(case, case.trouble, reflects=True, instant=real)
    task = case.task()
    sets: Any = {"trainset": task.trainset(case.train), "valset": task.valset(case.val)}

    def optimizer() -> AsyncGEPA:
        settings: dict[str, Any] = {
            "max_metric_calls": case.calls, "num_threads": case.slots, "seed": case.seed, "track_stats": True,
            "reflection_lm": at_once(reflection) if real else reflection.lm(), "search": case.search,
            "staleness": case.staleness,
            "workflow": Workflow(rollout_timeout_seconds=case.rollout_timeout),
        }  # fmt: skip
        if case.ending in JOURNALED:
            settings["log_dir"] = directory
        return AsyncGEPA(watch.metric, **(settings | options))

    async def once() -> Any:
        loop = asyncio.get_running_loop()
        with dspy.context(lm=task_model.lm()):
            running = asyncio.ensure_future(optimizer().acompile(program, **sets))
            if case.ending == "cancelled":
                watch.at_call = lambda: loop.call_soon_threadsafe(running.cancel)
            try:
                return await asyncio.wait_for(running, VIRTUAL_SECONDS)
            except asyncio.CancelledError:
                return None

    if real:
        watch.at_call = lambda: os.kill(os.getpid(), signal.Signals[case.ending])
        with dspy.context(lm=task_model.lm()):
            return optimizer().compile(program, **sets)
    if case.ending == "stopped":
        watch.at_call = lambda: open(os.path.join(directory, "gepa.stop"), "w").close()
    return run(once) or run(once)


def _served(case: Case, watch: Watch, program: dspy.Module, options: dict[str, Any]) -> Any:
    """The same over HTTP, with a restart of the server."""
    task = case.task()
    server = SimServer(seed=case.seed, time_scale=TIME_SCALE, reply_model=task.reply_model, faults=case.faults())
    restart = Restart(server, case.at_call, down_seconds=0.5)
    with server:
        lm = dspy.LM("openai/simulated", api_base=server.api_base, api_key="none", cache=False, timeout=5.0)
        with dspy.context(lm=lm), restart.armed():
            optimizer = AsyncGEPA(
                restart.watched(watch.metric), max_metric_calls=case.calls, num_threads=case.slots, seed=case.seed,
                track_stats=True, reflection_lm=lm, search=case.search, staleness=case.staleness, **options,
            )  # fmt: skip
            return optimizer.compile(program, trainset=task.trainset(case.train), valset=task.valset(case.val))


def killed(case: Case, directory: str) -> None:
    """Run a case until it is killed at its metric call; in a process of its own."""
    watch = Watch(case)

    def kill() -> None:
        Path(directory, KILLED_AT).write_text(str(watch.scored))
        os.kill(os.getpid(), signal.SIGKILL)

    watch.at_call = kill
    with silence():
        compiled(case, watch, student(case, watch), directory)


def _after_a_kill(case: Case, watch: Watch, directory: str) -> None:
    """Run a case in another process until it is killed; what was counted there counts here."""
    process = multiprocessing.get_context("spawn").Process(target=killed, args=(case, directory))
    process.start()
    process.join()
    at = Path(directory, KILLED_AT)
    watch.scored += int(at.read_text()) if at.exists() else 0


def rival(case: Case) -> float | None:
    """The true score of dspy.GEPA's program of a case without faults: of those validated within the budget."""
    plain = replace(case, trouble=Trouble(empty=case.trouble.empty), search="edits", staleness="full", ending="budget")
    watch, points = Watch(plain), Recorder(clock=time.monotonic, true_score=lambda it: true_score(case.task(), it))
    compiled(plain, watch, student(plain, watch), "", schedule="lockstep", gepa_kwargs={"callbacks": [points]})
    paid = [point for point in points.trajectory.points if point.metric_calls <= case.calls]
    return paid[-1].true_score if paid else None


def audited(found: Found, program: Any, watch: Watch, directory: str) -> None:
    """What must hold of a run that has given a program back."""
    case, details, stats = found.case, program.detailed_results, program.async_stats
    found.outcome, best = stats.outcome, details.best_idx
    if case.ending in JOURNALED:
        found.problems += check(directory).problems
    found.true_score = true_score(case.task(), texts_of(program))
    counted, spent = watch.scored + watch.unread, stats.metric_calls
    ended, reasons = sum(stats.ended.values()), sum(stats.end_reasons.values())
    truth = deserved(case, details.candidates)
    wrong = [
        (candidate, example, score, truth[candidate][example])
        for candidate, scores in enumerate(details.val_subscores)
        for example, score in scores.items()
        if abs(score - truth[candidate][example]) > 1e-9 and not (stats.unanswered_examples and score == 0)
    ]
    holds = {
        f"outcome {stats.outcome!r}: {stats.stop_reason}": stats.outcome in ("finished", "stopped"),
        f"spent {spent} of {case.calls}": spent <= case.calls or stats.schedule == "lockstep",  # too small to overlap
        f"spent {spent}, counted {counted}": counted == spent or (case.ending in CUT and watch.scored <= spent),
        f"total_metric_calls {details.total_metric_calls}, spent {spent}": details.total_metric_calls == spent,
        f"{stats.steps} steps, {ended} ended: {stats.ended}": stats.steps == ended,
        f"{stats.steps} steps, {reasons} reasons": reasons == stats.steps - stats.ended.get("committed", 0),
        f"wrong scores (candidate, example, stored, true): {wrong[:3]}": not wrong,
        "the winner is not fully validated": len(details.val_subscores[best]) == case.val,
        "the winner is not the best": details.val_aggregate_scores[best] == max(details.val_aggregate_scores),
        "the program is not the winner": texts_of(program) == texts_of(details.candidates[best]),
    }
    found.problems += [problem for problem, good in holds.items() if not good]
    found.counts.update(
        {"metric calls": spent, "steps": stats.steps, "retried requests": stats.retried_requests},
        **{"timed out": stats.timed_out_rollouts, "unanswered examples": stats.unanswered_examples},
        **{"committed scores": sum(map(len, details.val_subscores)), "candidates": len(details.candidates)},
    )


@contextmanager
def wall_limit(seconds: int) -> Generator[None]:
    """Raises TimeoutError in the main thread after so long; elsewhere there is no limit."""

    def over(number: int, frame: Any) -> None:
        raise TimeoutError(f"no end after {seconds} s of real time")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def examine(case: Case, build: Build = student, watch: Watch | None = None, compare: bool = True) -> Found:
    """Run a case and check it.

    Args:
        case: The run.
        build: Makes its program.
        watch: Has its metric; `None` for the case's.
        compare: Run dspy.GEPA's steps beside it, where the default policy spends the budget.
    """
    found, watch = Found(case), watch or Watch(case)
    program = build(case, watch)
    before, threads = state_of(program), set(threading.enumerate())
    try:
        with tempfile.TemporaryDirectory() as directory, wall_limit(WALL_SECONDS), silence():
            if case.ending == "SIGKILL":
                _after_a_kill(case, watch, directory)
            audited(found, compiled(case, watch, program, directory), watch, directory)
            if compare and (case.search, case.staleness, case.ending, case.http) == ("edits", "full", "budget", False):
                found.rival = rival(case)
    except RunAbortedError as error:
        found.problems.append(f"aborted: {error}")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and case.ending != "SIGINT":
            raise
        traceback.print_exception(error)
        found.problems.append(f"{type(error).__name__}: {error}")
    if state_of(program) != before:
        found.problems.append("the student has changed")
    left = [one for one in threading.enumerate() if one not in threads]
    for thread in left:
        thread.join(timeout=5)
    if alive := [one.name for one in left if one.is_alive() and not one.daemon]:
        found.problems.append(f"threads are left: {alive}")
    return found


def behind(found: Sequence[Found]) -> tuple[str, bool]:
    """How the program stands beside dspy.GEPA's, and whether it is behind by more than the spread.

    The spread is twice the standard error of the median of the cases' differences.
    """
    pairs = [(one.true_score, one.rival) for one in found if one.true_score is not None and one.rival is not None]
    if len(pairs) < 2:
        return "too few runs to compare with dspy.GEPA", False
    apart = [ours - theirs for ours, theirs in pairs]
    spread = 2 * 1.2533 * statistics.stdev(apart) / len(apart) ** 0.5
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    said = f"true score, median of {len(pairs)}: {ours:.3f}, dspy.GEPA's {theirs:.3f} for as many calls; "
    won = f"better in {sum(one > 0 for one in apart)}, equal in {sum(one == 0 for one in apart)}"
    middle = statistics.median(apart)
    words = f"{said}difference, median {middle:+.3f} +- {spread:.3f}, mean {statistics.mean(apart):+.3f}; {won}"
    return words, middle < -spread


def report(found: Sequence[Found]) -> bool:
    """Print the tables; whether anything failed."""
    rows = [
        [name, str(value), str(sum(getattr(one.case, name) == value for one in found)), str(sum(
            getattr(one.case, name) == value and bool(one.problems) for one in found
        ))]
        for name in ("program", "ending", "http", "search", "staleness", "model")
        for value in sorted({getattr(one.case, name) for one in found})
    ]  # fmt: skip
    print(table(("of", "value", "cases", "failed"), rows))
    totals = sum((one.counts for one in found), Counter[str]())
    print("\n" + ", ".join(f"{count} {name}" for name, count in totals.items()))
    print("outcomes: " + ", ".join(f"{count} {name}" for name, count in Counter(one.outcome for one in found).items()))
    words, is_behind = behind(found)
    print(words)
    failed = [one for one in found if one.problems]
    print(f"{len(found)} cases, {len(failed)} failed; commit {commit()}")
    for one in failed:
        print(f"  --case {one.case.seed}: {'; '.join(one.problems)}")
    return bool(failed) or is_behind


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases for so long; 1 where any failed, or where dspy.GEPA is better."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stress", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="no case begins after them")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--case", type=int, help="run this case alone, and say what it is")
    options = parser.parse_args(arguments)
    for name in ("dspy", "dspy_flashevolve"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if options.case is not None:
        print(case := Case.drawn(options.case))
        return int(report([examine(case)]))
    found, end, seed = list[Found](), time.monotonic() + 60 * options.minutes, options.seed
    while time.monotonic() < end:
        found.append(examine(Case.drawn(seed)))
        problems = "; ".join(found[-1].problems)
        print(f"case {seed}: {f'FAILED: {problems}' if problems else 'good'}", flush=True)
        seed += 1
    return int(report(found))


if __name__ == "__main__":
    raise SystemExit(main())
