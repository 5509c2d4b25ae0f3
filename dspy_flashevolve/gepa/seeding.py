"""The seed's validation: nothing can be compared before it."""

from __future__ import annotations

import math
from typing import Any

from dspy_flashevolve.engine.budget import Reservation
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


async def validated_seed(
    pool: Pool,
    evaluations: Evaluations,
    order: ValidationOrder,
    ids: list[Any],
    reservation: Reservation | None,
    limit: int | None,
    paid_before: int = 0,
) -> None:
    """Run the seed on its examples, before every other validation, and confirm it.

    Args:
        reservation: pays; None where the budget has no room for it.
        limit: the budget.
        paid_before: examples that an interrupted run has paid.

    Raises:
        RunAbortedError: there is no room, or the provider gave no answer.
    """
    if reservation is None:
        raise RunAbortedError(
            f"The budget of {limit} metric calls cannot hold the seed's validation of {len(ids)} examples."
        )
    claim = Claim(SEED_TICKET, "validate", DEPTHS["validate"], value=math.inf)
    try:
        evaluation, _ = await evaluations.validation(claim, reservation, pool.seed_candidate, ids, capture_traces=False)
    except RolloutUnresolvedError as error:
        raise RunAbortedError(f"The seed program could not be validated: {error}") from error
    reservation.refund()
    await pool.write(pool.confirm_seed, evaluation)
    order.record(evaluation.scores_by_val_id)
    beyond = reservation.settled + paid_before - len(ids)  # duplicates, and metrics that were given up
    if beyond > 0:
        await pool.write(pool.count_calls, beyond)
