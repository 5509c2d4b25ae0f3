"""What GEPA's stages share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from dspy_flashevolve.engine.background import Background
from dspy_flashevolve.engine.events import EventBus
from dspy_flashevolve.engine.rollouts import Rollouts
from dspy_flashevolve.engine.speculation import Speculation, ValidationOrder
from dspy_flashevolve.engine.staleness import GapHistogram, StalenessPolicy
from dspy_flashevolve.gepa.accounts import Account
from dspy_flashevolve.gepa.evaluations import Evaluations
from dspy_flashevolve.gepa.past import Past
from dspy_flashevolve.gepa.payloads import Candidate, Counts, EvolvingProgram
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.run_journal import RunJournal

DEPTHS = {"rollout": 1, "propose": 2, "integrate": 3, "validate": 4, "screen": 5, "prefix": 6, "commit": 7}
"""What goes first among requests of equal size: what is nearer to a commit, but the long rest of a validation, on which
nobody waits, after the screen and the prefix of a head, on which every later ticket waits."""


@dataclass(frozen=True, slots=True)
class Services:
    """What the stages share.

    Args:
        accounts: ticket number -> its budget; the source keeps it.
        working: tickets that have no child to be validated yet.
        wake: asks the source whether a ticket may start.
        lockstep: one ticket at a time, exactly as gepa.
        staleness: looks at every child where it says.
        seeded: set when the seed is confirmed.
        saves_calls: whether metric calls are scarcer than slots, so that none is spent which a later head may make
            needless.
        speculation: how early stages release their output.
        order: of the examples of a validation.
        background: runs what may outlive its ticket.
        journal: gets what is paid and decided; None where nobody keeps it.
        past: what a run that goes on has paid already; None where it is new.
    """

    pool: Pool
    program: EvolvingProgram
    evaluations: Evaluations
    rollouts: Rollouts
    accounts: dict[int, Account]
    working: set[int]
    wake: Callable[[], None]
    bus: EventBus
    gaps: GapHistogram
    counts: Counts
    seeded: anyio.Event
    lockstep: bool
    staleness: StalenessPolicy
    saves_calls: Callable[[], bool]
    speculation: Speculation
    order: ValidationOrder
    background: Background
    clock: Callable[[], float] = anyio.current_time
    journal: RunJournal | None = None
    past: Past | None = None

    async def count_all_but(self, ticket: int, calls: int) -> None:
        """As :meth:`count`, but ``calls`` of them, which gepa counts itself when a candidate is added."""
        account = self.accounts[ticket]
        account.counted += calls
        await self.count(ticket)
        account.counted -= calls

    async def count(self, ticket: int) -> None:
        """Let gepa count the metric calls that a ticket has paid since it was last counted."""
        account = self.accounts[ticket]
        calls = account.reservation.settled - account.counted
        if calls:
            account.counted += calls
            await self.pool.write(self.pool.count_calls, calls)

    def unpaid(self, ticket: int, candidate: Candidate, split: str, ids: Sequence[Any], *, traced: bool = True) -> int:
        """How many metric calls a ticket's evaluation may cost: of an interrupted run's, some are paid already."""
        return len(ids) if self.past is None else self.past.missing(ticket, candidate, split, ids, traced=traced)
