"""HillClimber: of the instructions that an LM writes for a program, keep each that scores better than the best so far.

The third loop of docs/adding-an-algorithm.md: propose -> evaluate -> admit, with a budget, async and in lockstep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import dspy

from dspy_flashevolve.engine.admission import LiveTickets
from dspy_flashevolve.engine.flights import Rollout
from dspy_flashevolve.engine.gathering import gather
from dspy_flashevolve.engine.item import End, EndKind, Item, Ticket
from dspy_flashevolve.engine.pipeline import NotNow, Opened
from dspy_flashevolve.engine.stages import Finish, Forward, Outcome
from dspy_flashevolve.observe.records import RunStats
from dspy_flashevolve.scheduling import Schedule
from dspy_flashevolve.workbench import Workbench


class WriteInstruction(dspy.Signature):
    """Improve the instruction of an assistant, from what was said of its answers."""

    current_instruction: str = dspy.InputField()
    examples_with_feedback: str = dspy.InputField()
    new_instruction: str = dspy.OutputField()


@dataclass(frozen=True)
class Scored:
    """An instruction, what it scores on average, and what the metric said of its answers."""

    text: str
    score: float
    feedback: tuple[str, ...]


@dataclass
class HillClimber:
    """Improves the instruction of a program with one predictor.

    Args:
        metric: a function (example, prediction, trace=None) of a ``dspy.Prediction`` with ``score`` and ``feedback``.
        max_metric_calls: never exceeded.
        proposer_lm: writes instructions. Default: the configured LM.
        live: steps that run at once: more of them make more proposals, and fewer that build on each other.
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
        climb = _Climb(self, student, trainset)
        return climb.bench.run_sync(climb.run)

    async def acompile(self, student: dspy.Module, *, trainset: Sequence[dspy.Example]) -> dspy.Module:
        """The awaitable twin of :meth:`compile`."""
        climb = _Climb(self, student, trainset)
        return await climb.bench.run_async(climb.run)


class _Climb:
    """One run."""

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
        self.component = next(iter(dict(student.named_predictors())))
        self.best = Scored(self.predictor_of(student).signature.instructions, -1.0, ())
        self.source = self.bench.source(self.select, calls=len(trainset), admission=LiveTickets(of.live))
        self.version = 0

    async def run(self) -> dspy.Module:
        """Climb until the budget is spent."""
        stage = self.bench.stage
        await self.bench.evolve(
            [stage("propose", self.propose), stage("evaluate", self.evaluate), stage("admit", self.admit, workers=1)],
            self.source,
        )
        self.of.stats = self.bench.statistics()
        program = self.student.deepcopy()
        predictor = self.predictor_of(program)
        predictor.signature = predictor.signature.with_instructions(self.best.text)
        return program

    def predictor_of(self, program: dspy.Module) -> Any:
        """The predictor whose instruction evolves."""
        return dict(program.named_predictors())[self.component]

    async def select(self, ticket: Ticket) -> Opened | NotNow:
        """The first ticket evaluates the program as it is; the others wait for it, and improve the best."""
        if ticket.number == 0:
            return Opened("evaluate", Item(self.best.text, ticket, self.version))
        return Opened("propose", Item(self.best, ticket, self.version)) if self.version else NotNow.FULL

    async def propose(self, item: Item[Scored]) -> Outcome:
        """Ask for a new instruction, with the feedback on three examples."""
        feedback = item.ticket.rng.sample(item.payload.feedback, min(3, len(item.payload.feedback)))
        reply = await self.bench.ask(
            self.bench.claim(item, "propose"),
            dspy.Predict(WriteInstruction),
            lm=self.of.proposer_lm,
            current_instruction=item.payload.text,
            examples_with_feedback="\n".join(feedback),
        )
        return Forward("evaluate", reply.new_instruction)

    async def evaluate(self, item: Item[str]) -> Outcome:
        """Run the program with the instruction on every example."""
        claim, pays = self.bench.claim(item, "evaluate"), self.source.reservations[item.ticket.number]
        candidate = {self.component: item.payload}

        async def one(index: int) -> Rollout:
            return await self.bench.rollout(claim, pays, self.runner, candidate, self.trainset[index], index)

        rollouts = await gather([lambda index=index: one(index) for index in range(len(self.trainset))])
        said = [str(rollout.trajectory["score"].feedback) for rollout in rollouts if rollout.trajectory]
        score = sum(rollout.score for rollout in rollouts) / len(rollouts)
        return Forward("admit", Scored(item.payload, score, tuple(said)))

    async def admit(self, item: Item[Scored]) -> Outcome:
        """The one writer: keep what is better than the best."""
        if item.payload.score <= self.best.score:
            return Finish(End(EndKind.REJECTED, "it does not score better than the best"))
        self.best, self.version, score = item.payload, self.version + 1, item.payload.score
        parents = [item.version - 1] if item.version else []
        self.bench.commits.add(
            item, version=self.version, candidate=self.version - 1, score=score, best_score=score, parents=parents
        )
        return Finish(End(EndKind.COMMITTED))
