"""HillClimber: of the instructions that an LM writes for a program, keep each that scores better than the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import dspy
from dspy.utils.exceptions import AdapterParseError

from dspy_flashevolve import DspyRun
from dspy_flashevolve.engine import End, EndKind, LiveSteps, Step, StepEnded

PROPOSE = dspy.make_signature(
    "current_instruction, examples_with_feedback -> new_instruction",
    "Improve the instruction of an assistant, from what was said of its answers.",
)


class HillClimber:
    """Improves the instruction of a program with one predictor.

    Args:
        metric: a function (example, prediction, trace=None) that returns a ``dspy.Prediction(score=, feedback=)``.
        max_metric_calls: never exceeded.
        proposer_lm: writes instructions. Default: the configured LM.
        live: steps that run at once. More of them make more proposals, but fewer that build on each other.
        options: further arguments of :class:`DspyRun`: num_threads, schedule, max_seconds, seed.
    """

    def __init__(
        self, metric: Callable[..., Any], max_metric_calls: int, proposer_lm: Any = None, live: int = 4, **options: Any
    ) -> None:
        self.metric, self.calls, self.proposer_lm, self.live, self.options = (
            metric, max_metric_calls, proposer_lm, live, options,
        )  # fmt: skip
        self.stats: Any = None

    async def acompile(self, student: dspy.Module, *, trainset: Sequence[dspy.Example]) -> dspy.Module:
        """The program with the best instruction found; ``DspyRun.run_sync`` makes a ``compile`` of it."""
        lms = {"propose": [self.proposer_lm], "evaluate": [student]}
        run = DspyRun(name="HillClimber", stages=lms, max_metric_calls=self.calls, **self.options)
        climb = Climb(run, self, student, trainset)
        await run.run_async(lambda: run.evolve(climb.step, LiveSteps(self.live), calls=len(trainset)))
        self.stats = run.statistics()
        program = student.deepcopy()
        _, predictor = program.named_predictors()[0]
        predictor.signature = predictor.signature.with_instructions(climb.best)
        return program


class Climb:
    """One run's state, and its step."""

    def __init__(self, run: DspyRun, of: HillClimber, student: dspy.Module, trainset: Sequence[dspy.Example]) -> None:
        self.run, self.of, self.trainset = run, of, trainset
        self.runner = run.runner(student, of.metric)
        self.component, predictor = student.named_predictors()[0]
        self.best, self.score, self.feedback, self.version = predictor.signature.instructions, -1.0, [""], 0
        self.seeded = anyio.Event()

    async def step(self, step: Step) -> End:
        """The first step scores the program as it is; once it has, the others improve what is best then."""
        if step.number > 0:
            await self.seeded.wait()
        self.run.begin(step, self.version, self.score)
        text = await self.propose(step) if step.number > 0 else self.best
        rollouts = await self.run.evaluate("evaluate", step, self.runner, {self.component: text}, self.trainset, traced=True)
        score = sum(one.score for one in rollouts) / len(rollouts)
        if score <= self.score:
            return End(EndKind.REJECTED, "it does not score better than the best")
        self.best, self.score, self.version = text, score, self.version + 1  # no await: no lock
        self.feedback = [str(one.trajectory["score"].feedback) for one in rollouts if one.trajectory]
        self.run.commit(step, version=self.version, candidate=self.version - 1, score=score)
        self.seeded.set()
        return End(EndKind.COMMITTED)

    async def propose(self, step: Step) -> str:
        """One LM call: a new instruction, from the feedback on three examples."""
        said = "\n".join(step.rng.sample(self.feedback, min(3, len(self.feedback))))
        inputs = {"current_instruction": self.best, "examples_with_feedback": said}
        try:
            reply = await self.run.ask("propose", step, dspy.Predict(PROPOSE), lm=self.of.proposer_lm, **inputs)
        except AdapterParseError as error:
            raise StepEnded(EndKind.FAILED, f"no instruction in the reply: {error}") from error
        return reply.new_instruction
