"""Evaluating candidates example by example, in the run's slots."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import anyio
from gepa.core.adapter import EvaluationBatch
from gepa.core.data_loader import DataLoader
from gepa.core.state import ValsetEvaluation

from dspy_flashevolve.engine.budget import Reservation
from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.flights import Rollout
from dspy_flashevolve.engine.gathering import NoLongerWantedError, gather
from dspy_flashevolve.engine.rollouts import Rollouts
from dspy_flashevolve.gepa.past import Past
from dspy_flashevolve.gepa.payloads import Batch, Candidate, EvolvingProgram

Watch = Callable[[int, float], bool]


class Evaluations:
    """Runs candidates on minibatches and on the validation set.

    Args:
        program: runs a candidate on one example.
        rollouts: slots, retries, single flight.
        valset: gepa's loader.
        same_data: the training set is the validation set, so that equal ids mean equal examples.
        highest: the highest score of an example.
        past: has rollouts that are paid already; None where the run is new.
    """

    def __init__(
        self,
        program: EvolvingProgram,
        rollouts: Rollouts,
        valset: DataLoader[Any, Any],
        same_data: bool,
        highest: float = math.inf,
        past: Past | None = None,
    ) -> None:
        self.highest = highest
        """No score above it was seen."""
        self._program = program
        self._rollouts = rollouts
        self._valset = valset
        self.past = past
        self.train_split = "val" if same_data else "train"

    def saw(self, score: float) -> None:
        """Take note of a score: a metric that does not keep to its bound lets nothing be told early."""
        if score > self.highest:
            self.highest = math.inf

    async def minibatch(
        self,
        claim: Claim,
        reservation: Reservation,
        candidate: Candidate,
        ids: Sequence[Any],
        examples: Sequence[Any],
        watch: Watch | None = None,
    ) -> tuple[Batch, int]:
        """Evaluate on training examples, with traces.

        Args:
            watch: told the position and the score of each example that has finished; False gives up the others.

        Returns:
            gepa's batch, and the metric calls that it cost.

        Raises:
            NoLongerWantedError: ``watch`` said no.
            RolloutUnresolvedError: the provider gave no answer for an example.
        """
        return as_batch(await self.training(claim, reservation, candidate, ids, examples, watch))

    async def training(
        self,
        claim: Claim,
        reservation: Reservation,
        candidate: Candidate,
        ids: Sequence[Any],
        examples: Sequence[Any],
        watch: Watch | None = None,
    ) -> list[tuple[Rollout, bool]]:
        """As :meth:`minibatch`: each rollout, and whether it was paid here."""
        return await self._run(claim, reservation, candidate, self.train_split, ids, examples, True, watch=watch)

    async def validation(
        self,
        claim: Claim,
        reservation: Reservation,
        candidate: Candidate,
        ids: Sequence[Any],
        *,
        capture_traces: bool = True,
        wanted: Callable[[], bool] | None = None,
        watch: Watch | None = None,
    ) -> tuple[ValsetEvaluation[Any, Any], int]:
        """Evaluate on validation examples. The traces are dropped: a validation may be long, and nobody reads them.

        Args:
            capture_traces: as dspy.GEPA does: False for the seed and for merges, where a failed example's output is
                an empty prediction instead of None.
            wanted: asked before each rollout; False gives up those that have not begun.
            watch: see :meth:`minibatch`.

        Raises:
            NoLongerWantedError: ``wanted`` or ``watch`` said no.
            RolloutUnresolvedError: the provider gave no answer for an example.
        """
        examples = self._valset.fetch(list(ids))
        results = await self._run(claim, reservation, candidate, "val", ids, examples, capture_traces, wanted, watch)
        batch, paid = as_batch(results)
        objectives = batch.objective_scores
        evaluation = ValsetEvaluation[Any, Any](
            outputs_by_val_id=dict(zip(ids, batch.outputs, strict=True)),
            scores_by_val_id=dict(zip(ids, batch.scores, strict=True)),
            objective_scores_by_val_id=None if objectives is None else dict(zip(ids, objectives, strict=True)),
        )
        return evaluation, paid

    async def _run(
        self,
        claim: Claim,
        reservation: Reservation,
        candidate: Candidate,
        split: str,
        ids: Sequence[Any],
        examples: Sequence[Any],
        capture_traces: bool,
        wanted: Callable[[], bool] | None = None,
        watch: Watch | None = None,
    ) -> list[tuple[Rollout, bool]]:
        content = tuple(sorted(candidate.items()))
        keep_trace = split != "val" or self.train_split == "val"

        scope, left, decided = anyio.CancelScope(), len(ids), False

        async def one(index: int, example_id: Any, example: Any) -> tuple[Rollout, bool]:
            nonlocal left, decided

            async def call() -> Rollout:
                if decided or (wanted is not None and not wanted()):
                    raise NoLongerWantedError("its outcome is known, or nobody wants it any more")
                rollout = await self._program.rollout(candidate, example, capture_traces=capture_traces)
                return rollout if keep_trace else replace(rollout, trajectory=None)

            key = (content, split, example_id, capture_traces)
            kept = None
            if self.past is not None:
                kept = self.past.rollout(claim, candidate, split, example_id, example, capture_traces)
            if kept is not None:
                result = (kept if keep_trace else replace(kept, trajectory=None), False)
            else:
                result = await self._rollouts.rollout(key, claim, reservation, call)
            self.saw(result[0].score)
            left -= 1
            if watch is not None and not watch(index, result[0].score) and left:
                decided = True
                if self._program.interruptible:
                    scope.cancel()
            return result

        with scope:
            pairs = list(zip(ids, examples, strict=True))
            return await gather([lambda n=n, i=i, e=e: one(n, i, e) for n, (i, e) in enumerate(pairs)])
        raise NoLongerWantedError("its outcome is known")


def as_batch(results: Sequence[tuple[Rollout, bool]]) -> tuple[Batch, int]:
    """Put rollouts together as dspy's adapter does, and count those that were paid here."""
    rollouts = [rollout for rollout, _ in results]
    trajectories = [
        {**rollout.trajectory, "example_ind": index}
        for index, rollout in enumerate(rollouts)
        if rollout.trajectory is not None
    ]
    objectives = [dict(rollout.objective_scores) for rollout in rollouts]
    batch: Batch = EvaluationBatch(
        outputs=[rollout.output for rollout in rollouts],
        scores=[rollout.score for rollout in rollouts],
        trajectories=trajectories,
        objective_scores=objectives if any(objectives) else None,
    )
    return batch, sum(paid for _, paid in results)
