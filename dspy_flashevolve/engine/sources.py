"""Sources of tickets for any loop: pay first, bound what lives, give up on a provider that is down."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from dspy_flashevolve.engine.admission import Admission, Load
from dspy_flashevolve.engine.budget import Budget, Reservation
from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.item import End, EndKind, Ticket
from dspy_flashevolve.engine.pipeline import NotNow, Opened, Source
from dspy_flashevolve.engine.slots import Slots

PRIOR_TICKETS = 4
"""The estimate of a ticket's cost begins as if this many had cost the most that one can."""

Select = Callable[[Ticket], Awaitable[Opened | NotNow]]
"""Decides what a ticket works on, and in which stage it begins; or why there is none now."""


class TicketSource:
    """Opens tickets while admission and budget allow.

    Args:
        select: what a ticket works on. A ticket that it does not open costs nothing.
        budget: pays for each ticket before it starts; what a ticket has not spent at its end comes back.
        calls: what a ticket may cost at most; 0 or more.
        admission: when one more ticket may start.
        slots: the run's.
        seed: of the tickets' randomness.
        most_failures: tickets that may fail in a row before the run is given up: they cost no budget, and a provider
            that is down must not be asked for ever. Default: 10, or twice the live tickets where that is more.

    Raises:
        ConfigurationError: negative calls.
    """

    def __init__(
        self,
        select: Select,
        budget: Budget,
        calls: int,
        admission: Admission,
        slots: Slots,
        seed: int | None = 0,
        most_failures: int | None = None,
    ) -> None:
        if calls < 0:
            raise ConfigurationError(f"tickets: calls is {calls}, expected 0 or more.")
        self._select = select
        self._budget = budget
        self._calls = calls
        self._admission = admission
        self._slots = slots
        self._seed = seed
        self._most_failures = max(10, 2 * admission.limit) if most_failures is None else most_failures
        self._failures = self._ended = self._commits = self._calls_of_ended = 0
        self.reservations: dict[int, Reservation] = {}
        """Number of a live ticket -> what pays for it."""
        self.working: set[int] = set()
        """Tickets that work towards a child; a stage takes a ticket out when it only waits for its evaluation."""
        self.on_end: Callable[[Ticket, End], None] = lambda ticket, end: None
        """Called at each ticket's end."""
        self.on_limit: Callable[[str], None] = lambda reason: None
        """Called with the reason when the budget cannot pay another ticket."""
        self.on_failure: Callable[[str], None] = lambda reason: None
        """Called with the reason when too many tickets in a row have failed."""
        self.pending: Callable[[], bool] = lambda: False
        """Whether work of no live ticket is under way, which may give back some of what it reserved."""
        self.mean_gap: Callable[[], float | None] = lambda: None
        """Commits that tickets had not seen when they were about to be committed, lately; for :class:`GapBound`."""

    async def open(self, number: int, live: int) -> Opened | NotNow:
        """See :class:`dspy_flashevolve.engine.pipeline.Source`."""
        if not self._admission.admits(self._load(live)):
            return NotNow.FULL
        reservation = self._budget.reserve(self._calls)
        if reservation is None:
            return self._cannot_pay(live)
        self.reservations[number] = reservation
        answer: Opened | NotNow = NotNow.FULL
        try:
            answer = await self._select(Ticket.create(number, self._seed))
        finally:
            if isinstance(answer, NotNow):
                self.reservations.pop(number).refund()
        if isinstance(answer, Opened):
            self.working.add(number)
        return answer

    async def close(self, ticket: Ticket, end: End) -> None:
        """See :class:`dspy_flashevolve.engine.pipeline.Source`."""
        reservation = self.reservations.pop(ticket.number)
        reservation.refund()
        self.working.discard(ticket.number)
        self._ended += 1
        self._commits += end.kind is EndKind.COMMITTED
        self._calls_of_ended += reservation.settled
        self._failures = self._failures + 1 if end.kind is EndKind.FAILED else 0
        if self._failures >= self._most_failures:
            self.on_failure(f"{self._failures} tickets in a row failed; the last: {end.reason}")
        self.on_end(ticket, end)

    def _cannot_pay(self, live: int) -> NotNow:
        if live:
            return NotNow.FULL
        if self.pending():
            return NotNow.WAITING
        self.on_limit(
            f"the budget of {self._budget.limit} calls: the {self._budget.left} left cannot pay a ticket, which may "
            f"cost {self._calls}"
        )
        return NotNow.EXHAUSTED

    def _load(self, live: int) -> Load:
        return Load(
            live=live,
            working=len(self.working),
            idle_slots=self._slots.idle,
            calls_left=self._budget.left,
            calls_reserved=self._budget.reserved,
            calls_per_ticket=(PRIOR_TICKETS * self._calls + self._calls_of_ended) / (PRIOR_TICKETS + self._ended),
            ended=self._ended,
            commits=self._commits,
            mean_gap=self.mean_gap(),
            slots=self._slots.limit,
        )


class OneAtATime:
    """A source whose next ticket waits for the end of the one before.

    Args:
        source: asked only while no ticket lives.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    async def open(self, number: int, live: int) -> Opened | NotNow:
        """See :class:`dspy_flashevolve.engine.pipeline.Source`."""
        return NotNow.FULL if live else await self._source.open(number, live)

    async def close(self, ticket: Ticket, end: End) -> None:
        """See :class:`dspy_flashevolve.engine.pipeline.Source`."""
        await self._source.close(ticket, end)
