"""Opening tickets: what is set aside for them, when there are none, when a provider is given up."""

from __future__ import annotations

from typing import Any

import pytest

from dspy_flashevolve.engine.admission import LiveTickets, Load
from dspy_flashevolve.engine.budget import Budget
from dspy_flashevolve.engine.item import End, EndKind, Item, Ticket
from dspy_flashevolve.engine.pipeline import NotNow, Opened
from dspy_flashevolve.engine.slots import Slots
from dspy_flashevolve.engine.sources import OneAtATime, TicketSource
from dspy_flashevolve.sim.virtual import run


class Seen:
    """An admission that keeps the loads it was asked about."""

    limit = 3

    def __init__(self) -> None:
        self.loads: list[Load] = []

    def admits(self, load: Load) -> bool:
        self.loads.append(load)
        return load.live < 3

    def is_narrowed(self, load: Load) -> bool:
        del load
        return False


async def opens(ticket: Ticket) -> Opened | NotNow:
    return Opened("work", Item(None, ticket, 0))


async def opens_none(ticket: Ticket) -> Opened | NotNow:
    del ticket
    return NotNow.FULL


def source(select: Any = opens, limit: int | None = 20, **options: Any) -> TicketSource:
    defaults: dict[str, Any] = {"calls": 6, "admission": LiveTickets(2), "slots": Slots(4)}
    return TicketSource(select, Budget(limit), **(defaults | options))


def test_a_ticket_that_is_not_opened_costs_nothing() -> None:
    one = source(opens_none)
    assert run(lambda: one.open(0, 0)) is NotNow.FULL
    assert not one.reservations
    assert one._budget.reserved == 0  # pyright: ignore[reportPrivateUsage]


def test_what_a_ticket_has_not_spent_comes_back_at_its_end() -> None:
    one = source()
    budget = one._budget  # pyright: ignore[reportPrivateUsage]
    ended: list[tuple[int, EndKind]] = []
    one.on_end = lambda ticket, end: ended.append((ticket.number, end.kind))

    async def main() -> None:
        opened = await one.open(0, 0)
        assert isinstance(opened, Opened)
        assert (budget.spent, budget.reserved, one.working) == (0, 6, {0})
        one.reservations[0].settle(2)
        await one.close(opened.item.ticket, End(EndKind.COMMITTED))

    run(main)
    assert (budget.spent, budget.reserved, one.working, one.reservations) == (2, 0, set(), {})
    assert ended == [(0, EndKind.COMMITTED)]


@pytest.mark.parametrize(
    ("live", "pending", "answer"),
    [(1, False, NotNow.FULL), (1, True, NotNow.FULL), (0, True, NotNow.WAITING), (0, False, NotNow.EXHAUSTED)],
)
def test_a_budget_that_cannot_pay_ends_the_run_only_where_nothing_may_give_some_back(
    live: int, pending: bool, answer: NotNow
) -> None:
    one, reasons = source(limit=5), list[str]()
    one.pending = lambda: pending
    one.on_limit = reasons.append
    assert run(lambda: one.open(0, live)) is answer
    said = ["the budget of 5 calls: the 5 left cannot pay a ticket, which may cost 6"]
    assert reasons == (said if answer is NotNow.EXHAUSTED else [])


def test_as_many_tickets_live_as_admission_says() -> None:
    one = source(admission=LiveTickets(1))
    assert isinstance(run(lambda: one.open(0, 0)), Opened)
    assert run(lambda: one.open(1, 1)) is NotNow.FULL


def test_failures_in_a_row_give_the_run_up_and_one_success_between_them_does_not() -> None:
    def given_up(kinds: list[EndKind]) -> list[str]:
        one, reasons = source(limit=None, most_failures=3), list[str]()
        one.on_failure = reasons.append

        async def main() -> None:
            for number, kind in enumerate(kinds):
                opened = await one.open(number, 0)
                assert isinstance(opened, Opened)
                await one.close(opened.item.ticket, End(kind, "no answer"))

        run(main)
        return reasons

    failed, rejected = EndKind.FAILED, EndKind.REJECTED
    assert given_up([failed, failed, rejected, failed, failed]) == []
    assert given_up([rejected, failed, failed, failed]) == ["3 tickets in a row failed; the last: no answer"]


def test_admission_sees_the_load() -> None:
    rule = Seen()
    one = source(admission=rule)
    one.mean_gap = lambda: 1.5

    async def main() -> None:
        first, second = await one.open(0, 0), await one.open(1, 1)
        assert isinstance(first, Opened)
        assert isinstance(second, Opened)
        one.reservations[0].settle(2)
        await one.close(first.item.ticket, End(EndKind.COMMITTED))
        await one.open(2, 1)

    run(main)
    seen = rule.loads[-1]
    assert (seen.live, seen.working, seen.calls_left, seen.calls_reserved) == (1, 1, 12, 6)
    assert (seen.ended, seen.commits, seen.mean_gap, seen.slots, seen.idle_slots) == (1, 1, 1.5, 4, 4)
    assert seen.calls_per_ticket == pytest.approx((4 * 6 + 2) / 5)


def test_one_at_a_time_asks_only_while_no_ticket_lives() -> None:
    one = OneAtATime(source())
    assert run(lambda: one.open(0, 1)) is NotNow.FULL
    opened = run(lambda: one.open(0, 0))
    assert isinstance(opened, Opened)
    assert run(lambda: one.open(1, 1)) is NotNow.FULL
    run(lambda: one.close(opened.item.ticket, End(EndKind.REJECTED)))
    assert isinstance(run(lambda: one.open(1, 0)), Opened)
