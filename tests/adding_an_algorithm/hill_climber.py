"""HillClimber: of the instructions that an LM writes for a program, keep each that scores better than the best."""

from collections.abc import Callable, Sequence
from typing import Any

import dspy

from dspy_flashevolve import DspyRun
from dspy_flashevolve.engine import End, EndKind, Load, Step
from dspy_flashevolve.programs.settings import RunSettings

FIELDS = "current_instruction, examples_with_feedback -> new_instruction"
PROPOSE = dspy.Predict(dspy.make_signature(FIELDS, "Improve an assistant's instruction by the feedback it got."))


class HillClimber:
    """Improves the instruction of a program with one predictor.

    Args:
        metric: a function (example, prediction, trace=None) that returns a ``dspy.Prediction(score=, feedback=)``.
        proposer_lm: writes instructions. Default: the configured LM.
        live: steps that run at once. More of them make more proposals, but fewer that build on each other.
        options: arguments of :class:`RunSettings`: max_metric_calls, max_seconds, num_threads, schedule, seed.
    """

    def __init__(self, metric: Callable[..., Any], proposer_lm: Any = None, live: int = 4, **options: Any) -> None:
        self.metric, self.proposer_lm, self.live, self.options = metric, proposer_lm, live, options

    def compile(self, student: Any, *, trainset: Sequence[dspy.Example]) -> dspy.Module:
        """The program with the best instruction found; its ``stats`` say how the run went."""
        climb = Climb(self, student, trainset)
        return climb.run.run_sync(climb.main)

    async def acompile(self, student: Any, *, trainset: Sequence[dspy.Example]) -> dspy.Module:
        climb = Climb(self, student, trainset)
        return await climb.run.run_async(climb.main)


class Climb:
    """One run: its state, when a step may start, and the step."""

    def __init__(self, of: HillClimber, student: Any, trainset: Sequence[dspy.Example]) -> None:
        stages = {"propose": [of.proposer_lm], "evaluate": [student]}
        self.run = DspyRun(name="HillClimber", stages=stages, settings=RunSettings(**of.options))
        self.of, self.trainset, self.runner = of, trainset, self.run.runner(student, of.metric)
        self.component, predictor = student.named_predictors()[0]
        self.best, self.score, self.feedback, self.version = predictor.signature.instructions, -1.0, [""], 0

    async def main(self) -> dspy.Module:
        await self.run.evolve(self.step, self, calls_per_step=len(self.trainset))
        program = self.runner.program({self.component: self.best})
        program.stats = self.run.statistics()
        return program

    def admits(self, load: Load) -> bool:
        """The program is scored as it is before others improve on it."""
        return load.live < (self.of.live if self.version else 1)

    async def step(self, step: Step) -> End:
        """From selection to end."""
        self.run.begin(step, self.version, self.score)
        text = await self.propose(step) if self.version else self.best
        candidate = {self.component: text}
        rollouts = await self.run.evaluate("evaluate", step, self.runner, candidate, self.trainset, traced=True)
        score = sum(rollout.score for rollout in rollouts) / len(rollouts)
        if score <= self.score:
            return End(EndKind.REJECTED, "it does not score better than the best")
        self.best, self.score, self.version = text, score, self.version + 1  # without an await, nobody comes between
        self.feedback = [str(made.trajectory["score"].feedback) for made in rollouts if made.trajectory]
        self.run.commit(step, version=self.version, candidate=self.version - 1, score=score)
        return End(EndKind.COMMITTED)

    async def propose(self, step: Step) -> str:
        """One LM call: a new instruction, from the feedback on three examples."""
        feedback = "\n".join(step.rng.sample(self.feedback, min(3, len(self.feedback))))
        inputs = {"current_instruction": self.best, "examples_with_feedback": feedback}
        return (await self.run.ask("propose", step, PROPOSE, self.of.proposer_lm, **inputs)).new_instruction
