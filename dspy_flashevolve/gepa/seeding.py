"""The seed's validation: nothing can be compared before it."""

from __future__ import annotations

import math
from typing import Any

import anyio

from dspy_flashevolve.engine.budget import Budget
from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.errors import RolloutUnresolvedError, RunAbortedError
from dspy_flashevolve.engine.speculation import ValidationOrder
from dspy_flashevolve.gepa.evaluations import Evaluations
from dspy_flashevolve.gepa.payloads import SEED_TICKET
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.services import DEPTHS


def seed_examples(pool: Pool) -> list[Any]:
    """The validation examples of the seed: all, unless the evaluation policy wants fewer."""
    narrow = getattr(pool.val_evaluation_policy, "get_seed_eval_batch", None)
    return list(pool.loader.all_ids() if narrow is None else narrow(pool.loader))


class SeedValidation:
    """The seed on its examples, before every other validation; its budget is set aside at once.

    Args:
        pool: gets the seed.
        evaluations: runs it.
        order: learns from its scores.
        budget: pays.
        seeded: set when the seed is confirmed; from the beginning where a run goes on with a seed that was.
    """

    def __init__(
        self, pool: Pool, evaluations: Evaluations, order: ValidationOrder, budget: Budget, seeded: anyio.Event
    ) -> None:
        self._pool = pool
        self._evaluations = evaluations
        self._order = order
        self._budget = budget
        self._seeded = seeded
        self._ids = seed_examples(pool)
        self._paid_before = 0 if evaluations.past is None else evaluations.past.paid_for_seed
        self._reservation = None if seeded.is_set() else budget.reserve(len(self._ids) - self._paid_before)

    async def run(self) -> bool:
        """Validate the seed and confirm it; True when a stopper says stop then.

        Raises:
            RunAbortedError: there is no room in the budget, or the provider gave no answer.
        """
        pool, ids, reservation = self._pool, self._ids, self._reservation
        if reservation is None:
            raise RunAbortedError(
                f"The budget of {self._budget.limit} metric calls cannot hold the seed's validation of {len(ids)} "
                "examples."
            )
        claim = Claim(SEED_TICKET, "validate", DEPTHS["validate"], value=math.inf)
        try:
            evaluation, _ = await self._evaluations.validation(
                claim, reservation, pool.seed_candidate, ids, capture_traces=False
            )
        except RolloutUnresolvedError as error:
            raise RunAbortedError(f"The seed program could not be validated: {error}") from error
        reservation.refund()
        await pool.write(pool.confirm_seed, evaluation)
        self._order.record(evaluation.scores_by_val_id)
        beyond = reservation.settled + self._paid_before - len(ids)  # duplicates, and metrics that were given up
        if beyond > 0:
            await pool.write(pool.count_calls, beyond)
        stop = await pool.write(pool.should_stop)
        self._seeded.set()
        return stop
