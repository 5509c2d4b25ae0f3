"""Candidates of AsyncMetaHarness on examples: smoke runs, lessons, and the validation set, in the run's slots."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from dspy.primitives import Example

from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.flights import Rollout, Spent
from dspy_flashevolve.engine.gathering import gather
from dspy_flashevolve.engine.item import Item
from dspy_flashevolve.engine.sources import TicketSource
from dspy_flashevolve.harness.archive import Checked, Evaluated, Failed, Trial
from dspy_flashevolve.harness.drafts import Draft
from dspy_flashevolve.harness.evaluating import CandidateRunner
from dspy_flashevolve.harness.task import HarnessTask
from dspy_flashevolve.sandbox.outcomes import Failure
from dspy_flashevolve.workbench import Workbench


class _Hopeless(Exception):
    """A candidate has done on an example what no candidate may do: the rest of its evaluation is given up."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class Evaluations:
    """Evaluates candidates.

    Args:
        bench: of the run.
        task: what they are to solve.
        runner: runs them in the sandbox.
        source: its reservations pay.
        learn_batch: training examples in a batch of ``learn``.
    """

    def __init__(
        self, bench: Workbench, task: HarnessTask, runner: CandidateRunner, source: TicketSource, learn_batch: int
    ) -> None:
        self._bench, self._task, self._runner, self._source = bench, task, runner, source
        self._learn_batch = learn_batch

    async def checked(self, item: Item[Any], draft: Draft, chosen: Sequence[int]) -> Checked:
        """Run a draft on the smoke examples of these numbers: what nobody may do, or failing on all, ends it."""
        claim = self._bench.claim(item, "check")
        examples = [(f"train {number}", self._task.smoke_examples[number]) for number in chosen]
        labelled = bool(self._task.lessons)  # else candidates are scored on these, and nobody may see the labels
        traces = await gather([partial(self._trial, item, claim, draft, one, labelled) for one in examples])
        failures = [one.outcome.failure for one in traces if one.outcome.failure is not None]
        grave = [failure for failure in failures if failure.is_grave]
        if grave or len(failures) == len(traces):
            return Failed(draft, (grave or failures)[0], tuple(traces))
        return Evaluated(draft, (), (), traces=tuple(traces))

    async def evaluated(self, item: Item[Any], one: Checked) -> Checked:
        """Let a candidate that passed its check learn, where it can, and run it on the whole validation set."""
        if isinstance(one, Failed):
            return one
        claim = self._bench.claim(item, "evaluate")
        try:
            memory = await self._learnt(item, claim, one.draft) if one.draft.learns else None
            named = [(f"validation {number}", example) for number, example in enumerate(self._task.valset)]
            trials = await gather([
                partial(self._trial, item, claim, one.draft, example, False, memory, hopeful=True) for example in named
            ])  # fmt: skip
        except _Hopeless as error:
            return Failed(one.draft, error.failure, one.traces)
        scores, costs = tuple(trial.score for trial in trials), tuple(trial.cost for trial in trials)
        failures = tuple(trial.outcome.failure for trial in trials if trial.outcome.failure is not None)
        return Evaluated(one.draft, scores, costs, failures, one.traces, memory)

    async def _learnt(self, item: Item[Any], claim: Claim, draft: Draft) -> Any:
        """What a candidate remembers after one pass over the training examples that nobody is scored on."""
        memory: Any = {}
        size = self._learn_batch
        named = [(f"lesson {number}", example) for number, example in enumerate(self._task.lessons)]
        for start in range(0, len(named), size):
            batch = await gather([
                partial(self._trial, item, claim, draft, one, True, memory, hopeful=True)
                for one in named[start : start + size]
            ])  # fmt: skip
            learn = partial(self._runner.learn, draft, memory, batch)
            outcome = await self._bench.rollouts.request(claim, learn, lambda done: Spent(done.tokens))
            if outcome.failure is not None:
                raise _Hopeless(Failure(outcome.failure.reason, f"in learn: {outcome.failure.message}"))
            memory = outcome.memory
        return memory

    async def _trial(
        self,
        item: Item[Any],
        claim: Claim,
        draft: Draft,
        named: tuple[str, Example],
        labelled: bool,
        memory: Any = None,
        *,
        hopeful: bool = False,
    ) -> Trial:
        """Run a draft on one example in a slot; with ``hopeful``, raise _Hopeless where it does what none may do."""
        name, example = named

        async def call() -> Rollout:
            trial = await self._runner.predict(draft, example, name, memory=memory, labelled=labelled)
            outcome = trial.outcome
            return Rollout(outcome.fields, trial.score, trajectory=trial, tokens=outcome.tokens)

        key = (item.ticket.number, draft.source, name)
        pays = self._source.reservations[item.ticket.number]
        rollout, _ = await self._bench.rollouts.rollout(key, claim, pays, call)
        trial: Trial = rollout.trajectory
        if hopeful and trial.outcome.failure is not None and trial.outcome.failure.is_grave:
            raise _Hopeless(Failure(trial.outcome.failure.reason, f"on {name}: {trial.outcome.failure.message}"))
        return trial
