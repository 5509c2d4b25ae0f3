"""Which screened proposals go on to their validation: gepa's criterion and selection, applied once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gepa.proposer.base import CandidateProposal

from dspy_flashevolve.engine.item import Ticket
from dspy_flashevolve.gepa.pool import Pool

Proposal = CandidateProposal[Any]


class JudgedOnce:
    """An acceptance criterion that is asked once a proposal, however often it is consulted.

    The selection strategy and the report of the rejected both want the verdict; a criterion that draws
    lots, or counts, must give them the same one.
    """

    def __init__(self, criterion: Any) -> None:
        self._criterion = criterion
        self._verdicts: dict[int, bool] = {}

    def should_accept(self, proposal: Proposal, state: Any) -> bool:
        """The criterion's verdict, remembered."""
        if id(proposal) not in self._verdicts:
            self._verdicts[id(proposal)] = self._criterion.should_accept(proposal, state)
        return self._verdicts[id(proposal)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._criterion, name)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which proposals go on, and which are copies of one that does."""

    kept: list[Proposal]
    copies: list[Proposal]


def choose(pool: Pool, ticket: Ticket, proposals: list[Proposal]) -> list[Proposal]:
    """Ask the selection strategy, report what it left, and return what goes on. Runs in the pool's writer."""
    with pool.acting_for(ticket):
        criterion = JudgedOnce(pool.acceptance_criterion)
        picked = pool.selection_strategy.select(list(proposals), pool.state, criterion)  # pyright: ignore[reportArgumentType]
        choice = _without_copies([one for one in picked if any(one is known for known in proposals)])
        for proposal in proposals:
            if any(proposal is kept for kept in choice.kept):
                continue
            if any(proposal is copy for copy in choice.copies):
                pool.reject(ticket, proposal, reason="Duplicate of another candidate selected this iteration")
            else:
                pool.reject(ticket, proposal, passed=criterion.should_accept(proposal, pool.state))
    return choice.kept


def _without_copies(picked: list[Proposal]) -> Choice:
    seen: set[tuple[tuple[str, str], ...]] = set()
    choice = Choice([], [])
    for proposal in picked:
        content = tuple(sorted(proposal.candidate.items()))
        (choice.copies if content in seen else choice.kept).append(proposal)
        seen.add(content)
    return choice
