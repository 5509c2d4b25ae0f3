"""From a parent's traces to a child: reflective dataset, reflection, new texts."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gepa.strategies.proposal_sampling import ProposalTask

from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.errors import FlashEvolveError
from dspy_flashevolve.engine.item import Ticket
from dspy_flashevolve.engine.rollouts import Rollouts
from dspy_flashevolve.gepa import reports
from dspy_flashevolve.gepa.evaluations import gather
from dspy_flashevolve.gepa.payloads import Batch, Child, Counts, EvolvingProgram, Late, RolledOut
from dspy_flashevolve.gepa.pool import Pool

ATTEMPTS = 2
"""gepa asks a reflection that raised once more, then skips the task."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """Why a task has no child.

    Args:
        failed: something raised; otherwise there was nothing to improve.
    """

    text: str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """A task that is ready to be reflected on."""

    index: int
    task: ProposalTask[Any, Any]
    evaluation: Batch
    components: list[str]
    dataset: Any
    base: int | None
    late: Late | None


class Proposer:
    """Writes the children of a ticket."""

    def __init__(
        self, pool: Pool, program: EvolvingProgram, rollouts: Rollouts, counts: Counts, lockstep: bool
    ) -> None:
        self._pool = pool
        self._program = program
        self._rollouts = rollouts
        self._counts = counts
        self._lockstep = lockstep

    async def propose(self, claim: Claim, ticket: Ticket, work: RolledOut) -> tuple[list[Child], list[Skipped]]:
        """A child for each task, or the reason why it has none."""
        prepared: list[Prepared] = []
        skipped: list[Skipped] = []
        for index in range(len(work.tasks)):
            outcome = await self._prepare(claim, ticket, index, work)
            (prepared if isinstance(outcome, Prepared) else skipped).append(outcome)  # pyright: ignore[reportArgumentType]
        if self._lockstep:
            texts = [await self._reflect(claim, one) for one in prepared]
        else:
            texts = await gather([lambda one=one: self._reflect(claim, one) for one in prepared])
        children: list[Child] = []
        for one, outcome in zip(prepared, texts, strict=True):
            if isinstance(outcome, Skipped):
                skipped.append(outcome)
                continue
            await self._pool.write(reports.proposed, self._pool, ticket, outcome)
            self._counts.proposals += 1
            children.append(child_of(one, outcome, ticket.number + 1))
        return children, skipped

    async def _prepare(self, claim: Claim, ticket: Ticket, index: int, work: RolledOut) -> Prepared | Skipped:
        task, evaluation = work.tasks[index], work.evaluations[index]
        reason = await self._pool.write(reports.nothing_to_improve, self._pool, ticket, task, evaluation)
        if reason is not None:
            return Skipped(reason)
        components = await self._pool.write(reports.choose_components, self._pool, ticket, task, evaluation)
        rng = None if self._lockstep else ticket.rng
        try:
            # Feedback comes from the metric, which may ask an LM: it takes a slot.
            dataset = await self._rollouts.request(
                claim,
                lambda: self._program.reflective_dataset(task.parent_candidate, evaluation, components, rng),
            )
        except FlashEvolveError:
            raise
        except Exception as error:
            self._log(f"Iteration {ticket.number + 1}: Exception building reflective dataset: {error}")
            return Skipped(f"no reflective dataset: {error}", failed=True)
        await self._pool.write(reports.reflection_starts, self._pool, ticket, task, components, dataset)
        return Prepared(index, task, evaluation, components, dataset, work.bases[index], work.late[index])

    async def _reflect(self, claim: Claim, one: Prepared) -> dict[str, str] | Skipped:
        async def call() -> Any:
            return await self._program.propose(one.task.parent_candidate, one.dataset, one.components)

        for attempt in range(ATTEMPTS):
            self._counts.reflection_calls += 1
            try:
                proposed = await self._rollouts.request(claim, call)
            except FlashEvolveError:
                raise
            except Exception as error:
                self._log(f"Reflection failed (attempt {attempt + 1} of {ATTEMPTS}): {error}")
                reason = f"reflection failed: {error}"
                continue
            self._counts.reflection_tokens += proposed.tokens
            self._counts.cost_dollars += proposed.cost_dollars
            return proposed.texts or Skipped("reflection returned no text")
        return Skipped(reason, failed=True)  # pyright: ignore[reportPossiblyUnboundVariable]

    def _log(self, message: str) -> None:
        self._pool.logger.log(message)
        self._pool.logger.log(traceback.format_exc())


def child_of(one: Prepared, texts: dict[str, str], iteration: int) -> Child:
    """The parent's candidate with new texts.

    Raises:
        AssertionError: a text for a component that the parent does not have (as gepa).
    """
    candidate = dict(one.task.parent_candidate)
    metadata: dict[str, Any] = {"proposal_id": f"{iteration}-{one.index}"}
    for name, text in texts.items():
        assert name in candidate, f"{name} missing in candidate"
        candidate[name] = text
        metadata[f"prompt:{name}"] = metadata[f"raw_lm_output:{name}"] = ""
    feedback = feedback_in(one.dataset)
    return Child(one.index, one.task, candidate, one.evaluation, metadata, feedback, one.base, one.late)


def feedback_in(dataset: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[str, ...]:
    """What the metric said, one text an example; dspy's adapter keeps it under "Feedback"."""
    texts = [str(record["Feedback"]) for rows in dataset.values() for record in rows if record.get("Feedback")]
    return tuple(dict.fromkeys(texts))
