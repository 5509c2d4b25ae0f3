"""Running a parent on its minibatch, and going on before its slowest example has finished."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
from gepa.strategies.proposal_sampling import ProposalTask

from dspy_flashevolve.engine.budget import Reservation
from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.errors import RolloutUnresolvedError
from dspy_flashevolve.engine.flights import Rollout
from dspy_flashevolve.engine.gathering import gather
from dspy_flashevolve.engine.item import Item
from dspy_flashevolve.engine.speculation import released_at
from dspy_flashevolve.gepa import reports
from dspy_flashevolve.gepa.evaluations import as_batch
from dspy_flashevolve.gepa.payloads import Batch, Selected
from dspy_flashevolve.gepa.services import Services

Results = dict[int, tuple[Rollout, bool]]


class LateRollouts:
    """The rest of a minibatch whose evaluation was released early; a :class:`~.payloads.Late`."""

    def __init__(self) -> None:
        self._ended = anyio.Event()
        self._batch: Batch | None = None
        self._error: RolloutUnresolvedError | None = None

    async def complete(self) -> Batch:
        """See :class:`~.payloads.Late`."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error
        assert self._batch is not None
        return self._batch

    def end(self, batch: Batch | None, error: RolloutUnresolvedError | None) -> None:
        """Everything has finished."""
        self._batch, self._error = batch, error
        self._ended.set()


class ParentRollouts:
    """Runs parents on their minibatches.

    Args:
        services: shared with the stages.
        remember: told of every whole evaluation that was released early.
    """

    def __init__(self, services: Services, remember: Callable[[ProposalTask[Any, Any], Batch], Any]) -> None:
        self._on = services
        self._remember = remember

    def affords(self, item: Item[Selected]) -> bool:
        """Whether the budget pays the minibatches; a ticket of an interrupted run may need less than the whole."""
        past, split = self._on.past, self._on.evaluations.train_split
        if past is None:
            return True  # it has been set aside
        tasks = item.payload.tasks
        number = item.ticket.number
        missing = sum(
            past.missing(number, task.parent_candidate, split, task.minibatch_ids, reflected=True) for task in tasks
        )
        return self._on.accounts[number].cover(missing)

    def releases(self, task: ProposalTask[Any, Any]) -> bool:
        """Whether reflection may start before the minibatch is done."""
        size = len(task.minibatch_ids)
        return not self._on.lockstep and released_at(self._on.speculation.rollout, size) < size

    async def run(self, claim: Claim, task: ProposalTask[Any, Any]) -> tuple[Batch, LateRollouts]:
        """Run the minibatch until enough of it has finished to reflect on; the rest runs on in the background.

        The rest has a budget of its own, so that the ticket may end before it does.

        Returns:
            The evaluation of the part that is there, in the order of the minibatch, and the rest.

        Raises:
            RolloutUnresolvedError: the provider gave no answer, and what is there is not enough.
        """
        account = self._on.accounts[claim.ticket]
        purse = account.reservation.split(len(task.minibatch_ids))
        account.elsewhere += len(task.minibatch_ids)
        needed = released_at(self._on.speculation.rollout, len(task.minibatch_ids))
        results: Results = {}
        enough, late = anyio.Event(), LateRollouts()

        def finished(index: int, rollout: Rollout, paid: bool) -> None:
            results[index] = (rollout, paid)
            if len(results) >= needed and self._worth_reflecting(results):
                enough.set()

        self._on.background.start(lambda: self._all(claim, task, purse, finished, enough, late))
        await enough.wait()
        if len(results) < needed or not self._worth_reflecting(results):
            await late.complete()  # raises where the others had no answer
        batch, _ = as_batch([results[index] for index in sorted(results)])
        return batch, late

    async def _all(
        self,
        claim: Claim,
        task: ProposalTask[Any, Any],
        purse: Reservation,
        finished: Callable[[int, Rollout, bool], None],
        enough: anyio.Event,
        late: LateRollouts,
    ) -> None:
        async def one(index: int) -> tuple[Rollout, bool]:
            ids, examples = task.minibatch_ids[index : index + 1], task.minibatch[index : index + 1]
            [(rollout, paid)] = await self._on.evaluations.training(claim, purse, task.parent_candidate, ids, examples)
            finished(index, rollout, paid)
            return rollout, paid

        batch, error = None, None
        try:
            batch, _ = as_batch(await gather([lambda i=i: one(i) for i in range(len(task.minibatch_ids))]))
            self._remember(task, batch)
            await self._on.pool.write(reports.remember, self._on.pool, task.parent_candidate, task, batch)
        except RolloutUnresolvedError as unresolved:
            error = unresolved
        finally:
            purse.refund()
            late.end(batch, error)
            enough.set()
        await self._on.pool.write(self._on.pool.count_calls, purse.settled)

    def _worth_reflecting(self, results: Results) -> bool:
        """Whether there is a trace, and a score that could be better where perfect ones are skipped."""
        options = self._on.pool.options
        perfect = options.perfect_score if options.skip_perfect_score else None
        there = [rollout for rollout, _ in results.values()]
        traced = any(rollout.trajectory is not None for rollout in there)
        return traced and (perfect is None or any(rollout.score < perfect for rollout in there))
