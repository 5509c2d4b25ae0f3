"""Opens tickets: reserves their budget, selects parents and minibatches, or plans a merge."""

from __future__ import annotations

import math
from collections.abc import Callable

import anyio

from dspy_flashevolve.engine.admission import Admission, Load
from dspy_flashevolve.engine.budget import Budget, Reservation
from dspy_flashevolve.engine.item import End, EndKind, Item, Ticket
from dspy_flashevolve.engine.pipeline import NotNow, Opened
from dspy_flashevolve.engine.slots import Slots
from dspy_flashevolve.gepa.accounts import Account
from dspy_flashevolve.gepa.heads import Heads
from dspy_flashevolve.gepa.past import Unfinished
from dspy_flashevolve.gepa.payloads import MergePlan, Selected
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.resuming import GoingOn
from dspy_flashevolve.gepa.selecting import Selecting

DEMAND = 1.5
"""Tickets are admitted for this many times the slots there are now, up to the most there may be: only where requests
wait can an endpoint's limit be seen to bind, and grow."""
PRIOR_TICKETS = 4
"""The estimate of a ticket's cost begins as if this many had cost the most that one can."""


class GepaSource:
    """The pipeline's source of tickets.

    Args:
        pool: selects.
        budget: pays.
        admission: bounds the live tickets.
        minibatch: training examples a task, for the estimate of a ticket's cost.
        most_failures: tickets that may fail in a row before the run is given up.
        slots: the run's; one more ticket may start where they are idle.
        heads: where tickets start from besides the Pareto frontier; None where there are no heads.
        frontier_share: share of the tickets that start from the Pareto frontier all the same.
        lockstep: draw from the strategies' shared randomness, as gepa does, instead of the ticket's.
    """

    def __init__(
        self,
        pool: Pool,
        budget: Budget,
        admission: Admission,
        minibatch: int,
        lockstep: bool,
        most_failures: int,
        slots: Slots,
        heads: Heads | None = None,
        frontier_share: float = 1.0,
    ) -> None:
        self._pool = pool
        self._budget = budget
        self._admission = admission
        self._minibatch = minibatch
        self._lockstep = lockstep
        self._most_failures = most_failures
        self._slots = slots
        self.heads = heads
        self._purse: Reservation | None = None
        self.resting: Callable[[], int] = lambda: 0
        """Tickets that wait for nothing but the end: they make no room scarce."""
        self.mean_gap: Callable[[], float | None] = lambda: None
        """Commits that tickets had not seen when they were about to be committed, lately."""
        self.pending: Callable[[], bool] = lambda: False
        """Whether work of no live ticket is under way, which may give back some of what it reserved."""
        self._first_version = pool.version
        self.starved = False
        """The last ticket that asked was not let in."""
        self.spent_up: Callable[[], str | None] = lambda: None
        """Why no further ticket may start, besides metric calls; None while one may."""
        self.closed: Callable[[], None] = lambda: None
        """Called after each ticket's end, and where none may start."""
        self.working: set[int] = set()
        """Tickets that have no child to be validated yet; a stage takes a ticket out when it has."""
        self._ended = self._calls_of_ended = 0
        self._selecting = Selecting(pool, lockstep, heads, frontier_share)
        self.going_on: GoingOn | None = None
        """Tickets of an interrupted run, which go first; None where the run is new."""
        self._failures = 0
        self.accounts: dict[int, Account] = {}
        self.stop_requested: str | None = None
        self.failed: str | None = None
        """Why the run was given up; None while it was not."""

    @property
    def most_calls(self) -> int:
        """Metric calls that are set aside for one task.

        The most that it can cost: its rollouts, its screen and its validation. Where children ride in trains, a
        ticket sets aside its rollouts and its share of a screen, of the base too; validations are paid apart.
        """
        return 3 * self._minibatch if self._purse is not None else 2 * self._minibatch + len(self._pool.loader)

    def keep_purse(self) -> Reservation:
        """Set a validation aside for the last head, for as long as tickets are opened."""
        self._purse = Reservation(self._budget, 0)
        return self._purse

    def end(self) -> None:
        """No ticket will be opened, and none is live: nothing need be set aside any more."""
        if self._purse is not None:
            self._purse.refund()

    def _purse_is_full(self) -> bool:
        return self._purse is None or self._purse.extend(max(0, len(self._pool.loader) - self._purse.open))

    async def open(self, number: int, live: int) -> Opened | NotNow:
        """See :class:`dspy_flashevolve.engine.pipeline.Source`."""
        del number  # tickets that go on have their own
        if self.stop_requested is not None and not self._is_paid_for():
            return NotNow.EXHAUSTED
        if self.going_on is not None and self.going_on.left:
            return NotNow.FULL if self._lockstep and live else await self._go_on(self.going_on.next())
        if (reason := self.spent_up()) is not None:
            self.stop_requested = reason
            self.closed()
            return NotNow.EXHAUSTED
        if not self._admission.admits(self._load(live)):
            self.starved = True
            self.closed()
            return NotNow.FULL
        reservation = self._budget.reserve(self.most_calls) if self._purse_is_full() else None
        self.starved = reservation is None
        if reservation is None:
            self.closed()
            if live:
                return NotNow.FULL
            return NotNow.WAITING if self.pending() else self._out_of_budget()
        ticket = self._selecting.next_ticket(-1 if self.going_on is None else self.going_on.last_ticket)
        self.accounts[ticket.number] = account = Account(reservation)
        self.working.add(ticket.number)
        version, payload = await self._pool.write(self._selecting.select, ticket)
        if isinstance(payload, MergePlan):
            account.merge = True
            return Opened("screen", Item(payload, ticket, version))
        value = 0.0 if self._lockstep else await self._pool.write(self._selecting.parent_score, payload)
        return Opened("rollout", Item(self._within_budget(payload, account), ticket, version, value))

    def _is_paid_for(self) -> bool:
        """Whether the run stops since its budget is spent, and it was spent on tickets that have not gone on yet."""
        left = self.going_on is not None and self.going_on.left > 0
        return left and not self._lockstep and self._pool.parts.stopper.budget_spent

    async def _go_on(self, one: Unfinished) -> Opened:
        """A ticket that was interrupted, with what it had selected then."""
        assert self.going_on is not None
        ticket = self._selecting.ticket(one.number)
        # What it needs at most and has not paid: others that go on must find theirs.
        tasks = 1 if one.kind == "merge" else max(1, len(one.selection))
        left, needed = self._budget.left, max(0, tasks * self.most_calls - self.going_on.paid(one))
        reservation = self._budget.reserve(needed if left is None else min(left, needed))
        reservation = reservation or Reservation(self._budget, 0)  # the budget may be smaller than it was
        self.accounts[ticket.number] = Account(reservation, merge=one.kind == "merge")
        if one.head is None:
            self.working.add(ticket.number)
        opened = await self._pool.write(self._selecting.go_on, self.going_on, ticket, one)
        if isinstance(opened.item.payload, Selected):
            self._see_minibatches(opened.item.payload)
        return opened

    async def close(self, ticket: Ticket, end: End) -> None:
        """See :class:`dspy_flashevolve.engine.pipeline.Source`."""
        with anyio.CancelScope(shield=True):  # a ticket ends once, whatever else comes to its end
            await self._close(ticket, end)

    async def _close(self, ticket: Ticket, end: End) -> None:
        account = self.accounts.pop(ticket.number)
        self._selecting.forget(ticket)
        self.working.discard(ticket.number)
        account.reservation.refund()
        self._ended += 1
        self._calls_of_ended += account.reservation.settled + account.elsewhere
        if account.merge:
            await self._pool.write(self._selecting.merge_ended)
        self._count_failure(end)
        uncounted = account.reservation.settled - account.counted
        if uncounted:
            await self._pool.write(self._pool.count_calls, uncounted)
        if await self._pool.write(self._pool.end_ticket, ticket, end.kind is EndKind.COMMITTED):
            self.stop_requested = self.stop_requested or self._pool.parts.stopper.said
        self.closed()

    def _count_failure(self, end: End) -> None:
        """A provider that is down must not be asked for ever: tickets that fail cost no budget."""
        self._failures = self._failures + 1 if end.kind is EndKind.FAILED else 0
        if self._failures >= self._most_failures and self.stop_requested is None:
            self.failed = f"{self._failures} tickets in a row failed; the last: {end.reason}"
            self.stop_requested = self.failed

    def _out_of_budget(self) -> NotNow:
        aside = 0 if self._purse is None else len(self._pool.loader) - self._purse.open
        validation = f" and the validation of what comes of it, another {aside}" if aside > 0 else ""
        self.stop_requested = (
            f"max_metric_calls={self._budget.limit}: the {self._budget.left} calls left cannot pay a ticket, which may "
            f"cost {self.most_calls}{validation}"
        )
        return NotNow.EXHAUSTED

    def saves_calls(self) -> bool:
        """Whether the budget of metric calls, not the slots, bounds the live tickets."""
        return self._admission.is_narrowed(self._load(len(self.accounts)))

    def _load(self, live: int) -> Load:
        # Tickets without a good child end first and cost least: alone they would make every ticket look cheap.
        prior = PRIOR_TICKETS * self.most_calls
        return Load(
            live=live - self.resting(),
            working=len(self.working),
            idle_slots=self._slots.idle - self._minibatch * sum(not one.started for one in self.accounts.values()),
            slots=math.ceil(DEMAND * self._slots.limit),
            calls_left=self._budget.left,
            calls_reserved=self._budget.reserved,
            ended=self._ended,
            commits=self._pool.version - self._first_version,
            mean_gap=self.mean_gap(),
            calls_per_ticket=(prior + self._calls_of_ended) / (PRIOR_TICKETS + self._ended),
        )

    def _see_minibatches(self, selected: Selected) -> None:
        self._minibatch = max([self._minibatch, *(len(task.minibatch_ids) for task in selected.tasks)])

    def _within_budget(self, selected: Selected, account: Account) -> Selected:
        """Drop tasks of a sampling strategy that asked for more than the budget holds."""
        self._see_minibatches(selected)
        tasks = list(selected.tasks)
        while tasks and not account.cover(len(tasks) * self.most_calls):
            tasks.pop()
        return Selected(tuple(tasks), selected.bases[: len(tasks)])
