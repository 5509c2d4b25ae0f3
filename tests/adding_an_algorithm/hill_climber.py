"""HillClimber: of the instructions that an LM writes for a program, keep each that scores better than the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import dspy
from dspy.utils.exceptions import AdapterParseError

from dspy_flashevolve.engine.admission import LiveTickets
from dspy_flashevolve.engine.flights import Rollout
from dspy_flashevolve.engine.gathering import gather
from dspy_flashevolve.engine.item import End, EndKind, Item, Ticket
from dspy_flashevolve.engine.pipeline import NotNow, Opened
from dspy_flashevolve.engine.stages import Finish, Forward, Outcome
from dspy_flashevolve.observe.statistics import RunStats
from dspy_flashevolve.scheduling import Schedule
from dspy_flashevolve.workbench import Workbench

PROPOSE = dspy.make_signature(
    "current_instruction, examples_with_feedback -> new_instruction",
    "Improve the instruction of an assistant, from what was said of its answers.",
)


@dataclass(frozen=True)
class Scored:
    """An instruction with its mean score, and what the metric said of the answers that it led to."""

    text: str
    score: float
    feedback: tuple[str, ...]


@dataclass
class HillClimber:
    """Improves the instruction of a program with one predictor.

    Args:
        metric: a function (example, prediction, trace=None) that returns a ``dspy.Prediction(score=, feedback=)``.
        max_metric_calls: never exceeded.
        proposer_lm: writes instructions. Default: the configured LM.
        live: steps that run at once. More of them make more proposals, but fewer that build on each other.
        num_threads, schedule, max_seconds, seed: see :class:`Workbench`.
    """

    metric: Callable[..., Any]
    max_metric_calls: int
    proposer_lm: dspy.LM | None = None
    live: int = 4
    num_threads: int | None = None
    schedule: Schedule = "async"
    max_seconds: float | None = None
    seed: int = 0
    stats: RunStats | None = field(default=None, init=False)

    def compile(self, student: dspy.Module, *, trainset: Sequence[dspy.Example]) -> dspy.Module:
        """The program with the best instruction found."""
        climb = Climb(self, student, trainset)
        return climb.bench.run_sync(climb.run)

    async def acompile(self, student: dspy.Module, *, trainset: Sequence[dspy.Example]) -> dspy.Module:
        """The awaitable twin of :meth:`compile`."""
        climb = Climb(self, student, trainset)
        return await climb.bench.run_async(climb.run)


class Climb:
    """One run: its state, its source of tickets, and a handler a stage."""

    def __init__(self, of: HillClimber, student: dspy.Module, trainset: Sequence[dspy.Example]) -> None:
        self.of, self.student, self.trainset = of, student, trainset
        self.bench = Workbench(
            name="HillClimber",
            lms={"propose": [of.proposer_lm], "evaluate": [student]},
            num_threads=of.num_threads,
            budget_calls=of.max_metric_calls,
            schedule=of.schedule,
            max_seconds=of.max_seconds,
            seed=of.seed,
        )
        self.runner = self.bench.runner(student, of.metric)
        self.source = self.bench.source(self.select, calls=len(trainset), admission=LiveTickets(of.live))
        self.component, predictor = predictor_of(student)
        self.best = Scored(predictor.signature.instructions, -1.0, ())
        self.version = 0

    async def run(self) -> dspy.Module:
        """Climb until the budget is spent, and build the best program."""
        stage = self.bench.stage
        stages = [stage("propose", self.propose), stage("evaluate", self.evaluate)]
        await self.bench.evolve([*stages, stage("admit", self.admit, workers=1)], self.source)
        self.of.stats = self.bench.statistics()
        program = self.student.deepcopy()
        _, predictor = predictor_of(program)
        predictor.signature = predictor.signature.with_instructions(self.best.text)
        return program

    async def select(self, ticket: Ticket) -> Opened | NotNow:
        """The first ticket scores the program as it is; once it has, the others improve what is best then."""
        if ticket.number == 0:
            return Opened("evaluate", Item(self.best.text, ticket, self.version))
        return Opened("propose", Item(self.best, ticket, self.version)) if self.version else NotNow.FULL

    async def propose(self, item: Item[Scored]) -> Outcome:
        """One LM call: a new instruction, from the feedback on three examples."""
        feedback = item.ticket.rng.sample(item.payload.feedback, min(3, len(item.payload.feedback)))
        inputs = {"current_instruction": item.payload.text, "examples_with_feedback": "\n".join(feedback)}
        try:
            claim = self.bench.claim(item, "propose")
            reply = await self.bench.ask(claim, dspy.Predict(PROPOSE), lm=self.of.proposer_lm, **inputs)
        except AdapterParseError as error:
            return Finish(End(EndKind.FAILED, f"no instruction in the reply: {error}"))
        return Forward("evaluate", reply.new_instruction)

    async def evaluate(self, item: Item[str]) -> Outcome:
        """The program with the instruction on every example, all at once."""
        claim, pays = self.bench.claim(item, "evaluate"), self.source.reservations[item.ticket.number]

        async def one(index: int) -> Rollout:
            run = self.runner, {self.component: item.payload}, self.trainset[index], index
            return await self.bench.rollout(claim, pays, *run, capture_traces=False)

        rollouts = await gather([lambda index=index: one(index) for index in range(len(self.trainset))])
        feedback = tuple(str(one.trajectory["score"].feedback) for one in rollouts if one.trajectory)
        return Forward("admit", Scored(item.payload, sum(one.score for one in rollouts) / len(rollouts), feedback))

    async def admit(self, item: Item[Scored]) -> Outcome:
        """The one writer: what scores better than the best is the best."""
        new = item.payload
        if new.score <= self.best.score:
            return Finish(End(EndKind.REJECTED, "it does not score better than the best"))
        number, parents = self.version, [item.version - 1] if item.version else []  # candidate n made version n + 1
        self.best, self.version = new, number + 1
        self.bench.commits.add(item, version=number + 1, candidate=number, score=new.score, parents=parents)
        return Finish(End(EndKind.COMMITTED))


def predictor_of(program: dspy.Module) -> tuple[str, Any]:
    """Name and predictor whose instruction evolves."""
    return program.named_predictors()[0]
