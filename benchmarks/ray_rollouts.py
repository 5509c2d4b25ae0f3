"""Rollouts in this process and in actors of Ray: `python -m benchmarks.ray_rollouts`.

Rollouts a second of programs that cost nothing, of programs that call an LM which answers at once (dspy's own work a
call), and of a metric that works for 50 ms; then a run on a cluster of two nodes of which one is killed in the middle.
Every part is a run of its own, and is timed after its actors are there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sqlite3
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import dspy
from dspy.lm15 import Message, Request, Response, TextPart, Usage
from dspy.utils.callback import BaseCallback

from benchmarks.results import RESULTS, Spread, append_json_lines, table
from dspy_flashevolve import AsyncGEPA, DspyRun
from dspy_flashevolve.engine.steps import End, EndKind, LiveSteps, Step
from dspy_flashevolve.programs.ray_rollouts import RayRollouts
from dspy_flashevolve.programs.settings import RunSettings

WORK_SECONDS = 0.05
PLACES = (0, 1, 2)
"""Actors; 0 for this process."""
CORES = (16, 64)


@dataclass(frozen=True)
class Pace:
    """One run.

    Attributes:
        part: "nothing", "one LM call", "50 ms of work" or "a bare call".
        actors: 0 for this process.
        rollouts: Timed.
        seconds: That they took.
        driver_seconds: Of processor time, in this process.
        niceness: Of the actors' processes.
    """

    part: str
    actors: int
    rollouts: int
    seconds: float
    driver_seconds: float
    niceness: str = field(default_factory=lambda: os.environ.get("RAY_worker_niceness", "15"))  # noqa: SIM112

    @property
    def rate(self) -> float:
        """Rollouts a second."""
        return self.rollouts / self.seconds


class Nothing(dspy.Module):
    """Answers at once."""

    async def aforward(self, question: str) -> dspy.Prediction:
        return dspy.Prediction(answer="1")


class Engine:
    """An LM that answers at once: a function of the prompt.

    Args:
        name: Of the field that it answers.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def complete(self, request: Request) -> Response:
        prompt = f"{request.system}\n" + "\n".join(message.text or "" for message in request.messages)
        number = sum(map(ord, prompt)) % 7
        said = f"[[ ## {self.name} ## ]]\n{number} {sum(map(ord, prompt)) % 997}\n\n[[ ## completed ## ]]"
        message = Message.assistant([TextPart(said)])
        usage = Usage(input_tokens=3, output_tokens=4, total_tokens=7)
        return Response(id=None, model="at once", message=message, finish_reason="stop", usage=usage)


class AsyncEngine(Engine):
    """The same, awaited."""

    async def complete(self, request: Request) -> Response:  # type: ignore[override]
        return super().complete(request)


def at_once(name: str = "answer") -> dspy.LM:
    """An LM without a wait and without a cache."""
    return dspy.LM("at/once", engine=Engine(name), async_engine=AsyncEngine(name), cache=False, num_retries=0)


def one(gold: Any, pred: Any, *_: Any) -> float:
    """A metric that costs nothing."""
    return 1.0


def works(gold: Any, pred: Any, *_: Any) -> float:
    """A metric that needs 50 ms of a processor."""
    began = time.thread_time()
    while time.thread_time() - began < WORK_SECONDS:
        sum(range(1000))
    return 1.0


def examples(name: str, count: int) -> list[dspy.Example]:
    """Questions that differ."""
    return [dspy.Example(question=f"{name} {number}").with_inputs("question") for number in range(count)]


def paced(part: str, program: dspy.Module, metric: Any, actors: int, count: int, slots: int) -> Pace:
    """Time rollouts of one program, after a first few that nobody times."""
    rollouts = RayRollouts(actors=actors) if actors else None
    data, found = examples("t", count), list[Pace]()
    with dspy.context(lm=at_once()):
        run = DspyRun(name=part, stages={"work": [None]}, settings=RunSettings(num_threads=slots, rollouts=rollouts))
    runner = run.runner(program, metric)

    async def step(step: Step) -> End:
        run.begin(step, 0)
        if run.actors is not None:
            await run.actors.all_ready()
        await run.evaluate("work", step, runner, {}, data[: 4 * slots], split="first")
        began, worked = time.perf_counter(), time.process_time()
        await run.evaluate("work", step, runner, {}, data)
        found.append(Pace(part, actors, count, time.perf_counter() - began, time.process_time() - worked))
        run.stop("all is done", "finished")
        return End(EndKind.COMMITTED)

    run.run_sync(lambda: run.evolve(step, LiveSteps(1, strict=True), calls_per_step=count + 4 * slots))
    return found[0]


def bare(count: int, at_once: int) -> Pace:
    """Calls of an actor that does nothing, one by one, so many under way: what Ray itself costs."""
    import ray

    ray.init("local", include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)

    class Bare:
        async def call(self, given: bytes) -> bytes:
            return given

    remote: Any = ray.remote
    actor = remote(Bare).options(max_concurrency=100).remote()

    async def some(number: int) -> None:
        for _ in range(number):
            await actor.call.remote(b"x" * 300)

    async def all_of(number: int) -> None:
        await asyncio.gather(*(some(number // at_once) for _ in range(at_once)))

    asyncio.run(all_of(4 * at_once))
    began, worked = time.perf_counter(), time.process_time()
    asyncio.run(all_of(count))
    found = Pace("a bare call", 1, count, time.perf_counter() - began, time.process_time() - worked)
    ray.shutdown()
    return found


# Two nodes.


class Judged(dspy.Module):
    """One predictor, and some time."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    async def aforward(self, question: str) -> dspy.Prediction:
        await asyncio.sleep(0.1)
        return await self.answer.acall(question=question)


def judged(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> dspy.Prediction:
    """The first digit of the answer."""
    score = 0.1 + int(pred.answer.split()[0]) / 10  # never the score of a failure
    return dspy.Prediction(score=score, feedback=f"{gold.question} got {score}")


@dataclass(frozen=True)
class Killed:
    """A run of which one node of two was killed in the middle.

    Attributes:
        budget, spent: Metric calls.
        rows: Rollouts in the journal; paid: the metric calls there; twice: rollouts that stand for the same one.
        wrong: Rollouts whose score is not what the same candidate gets on the same example in this process.
        calls_when_killed: Rollouts that had been answered when the node was killed.
    """

    budget: int
    spent: int
    rows: int
    paid: int
    twice: int
    wrong: int
    calls_when_killed: int
    seconds: float
    nodes: tuple[int, int]


def killed(budget: int, slots: int) -> Killed:
    """AsyncGEPA on a cluster of two nodes, one CPU each; one of them is killed after a third of the budget."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 * 2**20},
    )
    node = cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
    ray.init(cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    before = sum(one["Alive"] for one in ray.nodes())
    calls = at = after = 0

    class Killing(BaseCallback):
        def observing(self, run: Any) -> Any:
            run.bus.subscribe(self)
            return contextlib.nullcontext()

        def __call__(self, event: Any) -> None:
            nonlocal calls, at
            if type(event).__name__ == "RolloutFinished":
                calls += 1
                if calls == budget // 3:
                    at = calls
                    cluster.remove_node(node, allow_graceful=False)

    with tempfile.TemporaryDirectory() as folder:
        with dspy.context(lm=at_once(), callbacks=[Killing()]):
            optimizer = AsyncGEPA(
                judged,
                max_metric_calls=budget,
                num_threads=slots,
                reflection_lm=at_once("new_instruction"),
                track_stats=True,
                log_dir=folder,
                rollouts=RayRollouts(actors=2),
            )
            began = time.perf_counter()
            program: Any = optimizer.compile(Judged(), trainset=examples("t", 20), valset=examples("v", 10))
            seconds = time.perf_counter() - began
        for _ in range(600):  # Ray takes its time to find out
            if (after := sum(one["Alive"] for one in ray.nodes())) < before:
                break
            time.sleep(0.1)
        with contextlib.closing(sqlite3.connect(Path(folder) / "journal.sqlite")) as journal:
            rows = journal.execute("SELECT candidate, split, example, score, call FROM rollouts").fetchall()
            texts = dict(journal.execute("SELECT hash, texts FROM candidates").fetchall())
            [(paid,)] = journal.execute("SELECT SUM(calls) FROM calls").fetchall()
    ray.shutdown()
    cluster.shutdown()
    return Killed(
        budget=budget,
        spent=program.async_stats.metric_calls,
        rows=len(rows),
        paid=paid,
        twice=len(rows) - len({row[-1] for row in rows}),
        wrong=asyncio.run(wrong_scores(rows, texts)),
        calls_when_killed=at,
        seconds=seconds,
        nodes=(before, after),
    )


async def wrong_scores(rows: list[Any], texts: dict[str, str]) -> int:
    """How many rollouts have another score than the same one has here."""
    wrong, student = 0, Judged()
    with dspy.context(lm=at_once()):
        for candidate, split, example, score, _ in rows:
            instructions = json.loads(texts[candidate])["answer"]
            signature: Any = student.answer.signature
            student.answer.signature = signature.with_instructions(instructions)
            gold = examples("v" if split == "val" else "t", int(example) + 1)[-1]
            wrong += abs(judged(gold, await student.answer.acall(question=gold.question)).score - score) > 1e-9
    return wrong


# What is printed.


def report(paces: list[Pace]) -> str:
    """Tables of medians, with ratios to this process, and the arithmetic for many cores."""
    parts = {(pace.part, pace.actors): [one for one in paces if (one.part, one.actors) == (pace.part, pace.actors)]
             for pace in paces}  # fmt: skip
    rates = {key: Spread.of([one.rate for one in found]) for key, found in parts.items()}
    lines: list[list[str]] = []
    for (part, actors), found in parts.items():
        driver = Spread.of([1000 * one.driver_seconds / one.rollouts for one in found]).median
        here = rates.get((part, 0))
        lines.append([
            part,
            "this process" if not actors else f"{actors} actor{'s' * (actors > 1)}",
            str(rates[part, actors]),
            f"{rates[part, actors].median / here.median:.2f}" if here else "",
            f"{driver:.2f}",
        ])  # fmt: skip
    shown = table(["rollouts that cost", "in", "a second", "x", "ms of this process"], lines)
    return "\n".join([shown, "", *arithmetic(parts)])


def arithmetic(parts: dict[tuple[str, int], list[Pace]]) -> list[str]:
    """What 16 and 64 cores would do: the actors' pace, up to what one process can hand out."""
    said: list[str] = []
    most = max(actors for _, actors in parts)
    for part in dict.fromkeys(part for part, actors in parts if actors == most):
        found = parts[part, most]
        each = Spread.of([one.rate for one in parts.get((part, 1), found)]).median
        driver = Spread.of([one.driver_seconds / one.rollouts for one in found]).median
        most_of_all = 1 / driver
        paces = [
            f"{cores} cores: min({cores - 1} x {each:.0f}, {most_of_all:.0f}) = "
            f"{min((cores - 1) * each, most_of_all):.0f}"
            for cores in CORES
        ]
        said.append(f"{part}: rollouts a second with {', '.join(paces)}")
    return said


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and write the rows down."""
    parser = argparse.ArgumentParser(prog="benchmarks.ray_rollouts", description=__doc__)
    parser.add_argument("--parts", nargs="+", default=["nothing", "lm", "work", "bare", "nodes"])
    parser.add_argument("--rollouts", type=int, default=1000, help="of those that cost little; a tenth of the others")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--budget", type=int, default=150, help="metric calls of the run on two nodes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "ray_rollouts.jsonl")
    options = parser.parse_args(arguments)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: what else runs would go before the actors
    logging.getLogger("dspy_flashevolve").setLevel(logging.ERROR)
    paces: list[Pace] = []
    kinds: dict[str, tuple[str, Any, Any, int]] = {
        "nothing": ("nothing", Nothing(), one, options.rollouts),
        "lm": ("one LM call", dspy.Predict("question -> answer"), one, options.rollouts),
        "work": ("50 ms of work", Nothing(), works, options.rollouts // 5),
    }
    for _ in range(options.repeats):
        for name in options.parts:
            if name in kinds:
                part, program, metric, count = kinds[name]
                for actors in PLACES:
                    paces.append(paced(part, program, metric, actors, count, options.slots))
                    print(paces[-1], file=sys.stderr, flush=True)
            elif name == "bare":
                paces.append(bare(options.rollouts, options.slots))
    append_json_lines(
        options.out, [{"benchmark": "ray_rollouts", "slots": options.slots, **asdict(pace)} for pace in paces]
    )
    if paces:
        print(report(paces))
    if "nodes" in options.parts:
        found = killed(options.budget, min(8, options.slots))
        append_json_lines(options.out, [{"benchmark": "ray_rollouts", "part": "two nodes", **asdict(found)}])
        print(f"\nTwo nodes, one killed: {found}")
        return int(bool(found.wrong or found.twice or found.paid > found.budget or found.nodes != (2, 1)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
