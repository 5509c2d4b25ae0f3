"""What a run that goes on finds in its journal: what is spent, what is not finished, and what was paid for it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.flights import Rollout
from dspy_flashevolve.engine.redaction import MARK
from dspy_flashevolve.gepa.payloads import SEED_TICKET, Candidate
from dspy_flashevolve.gepa.run_journal import RunJournal, hash_of, id_text


@dataclass(frozen=True, slots=True)
class UnfinishedHead:
    """A head whose validation was under way.

    Args:
        session, head: its handle, in the session that made it.
        base: handle of the head under it, in the same session or restored in it; None for a confirmed candidate.
    """

    session: int
    head: int
    candidate: Candidate
    base: int | None
    parents: list[int]
    generation: int
    examples: list[Any]
    before: list[float]
    after: list[float]


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A ticket that had no end: it goes on with what it had selected.

    Args:
        selection: as it stands in the journal.
        head: the head that it carries; None where it has not made one yet.
    """

    number: int
    kind: str
    version: int
    selection: Any
    head: UnfinishedHead | None = None


@dataclass
class Past:
    """See the module; made by :func:`past_of`.

    Args:
        spent: metric calls.
        tickets: unfinished ones, those with heads first.
        last_ticket: the highest number that was given; -1 for none.
        texts: candidate's hash -> its texts.
    """

    run_journal: RunJournal
    spent: int = 0
    tickets: list[Unfinished] = field(default_factory=list[Unfinished])
    last_ticket: int = -1
    texts: dict[str, Candidate] = field(default_factory=dict[str, Candidate])
    rollouts: dict[tuple[str, str, str, int], list[int]] = field(
        default_factory=dict[tuple[str, str, str, int], list[int]]
    )
    untraced: set[int] = field(default_factory=set[int])
    """Rollouts whose trace could not be kept."""
    paid: Counter[int] = field(default_factory=Counter[int])
    """Ticket that goes on -> its finished rollouts."""
    proposals: dict[tuple[int, int], Any] = field(default_factory=dict[tuple[int, int], Any])
    reflection_calls: int = 0
    cost_dollars: float = 0.0
    """Spent besides metric calls, by all sessions."""
    numbers: set[int] = field(default_factory=set[int])
    """Of the tickets that go on, and the seed's while it is not validated."""
    each_once: bool = False
    """An example that stands twice in a minibatch is run twice, as in lockstep; else the two share a rollout."""
    paid_for_seed: int = 0
    """Rollouts of the seed's validation that need not be paid again; 0 once it is in gepa's checkpoint."""
    restored: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """Handle of a head in an earlier session -> its handle now."""

    def rollout(
        self, claim: Claim, candidate: Candidate, split: str, example_id: Any, example: Any, traced: bool
    ) -> Rollout | None:
        """A rollout that was paid for work which goes on now; None where there is none."""
        if not self.rollouts or claim.ticket not in self.numbers:
            return None  # what a new ticket needs is paid anew, as in a run that was never interrupted
        found = self.rollouts.get((hash_of(candidate), split, id_text(example_id), int(traced)))
        if not found:
            return None
        row = found.pop(0) if self.each_once else found[-1]
        journal, records = self.run_journal.journal, self.run_journal.records
        [kept] = journal.rows("SELECT * FROM rollouts WHERE id = ?", (row,))
        trajectory = None
        reflects = claim.stage == "rollout" and not self.has_proposals(claim.ticket)
        if traced and (kept["trace"] is not None or reflects):
            if kept["trace"] is None:
                return None  # what reflection needs could not be kept
            try:
                trajectory = records.read_trace(candidate, example, kept["trace"])
            except Exception:
                if reflects:
                    return None
        return Rollout(
            read(records, kept["output"]),
            float(kept["score"]),
            json.loads(kept["objective_scores"]),
            trajectory,
        )

    def missing(
        self, ticket: int, candidate: Candidate, split: str, ids: Sequence[Any], *, traced: bool = True,
        reflected: bool = False,
    ) -> int:  # fmt: skip
        """How many of a candidate's rollouts are still to be paid for a ticket.

        Args:
            reflected: they are about to be reflected on, which takes traces that could be kept.
        """
        if ticket not in self.numbers or not self.rollouts:
            return len(ids)
        name, reflected = hash_of(candidate), reflected and not self.has_proposals(ticket)
        found = (self.rollouts.get((name, split, id_text(one), int(traced))) for one in ids)
        return sum(not rows or (reflected and rows[-1] in self.untraced) for rows in found)

    def proposal(self, ticket: int, position: int) -> tuple[dict[str, str], tuple[str, ...]] | None:
        """What a reflection had proposed for a ticket that goes on now: texts and feedback."""
        row = self.proposals.get((ticket, position))
        return None if row is None else (json.loads(row["texts"]), tuple(json.loads(row["feedback"])))

    def has_proposals(self, ticket: int) -> bool:
        """Whether its reflections were done."""
        return (ticket, 0) in self.proposals


def read(records: Any, text: str | None) -> Any:
    try:
        return records.read_output(text)
    except Exception:  # a model that is no longer there: an output is only shown
        return None


def past_of(run_journal: RunJournal, seeded: bool) -> Past:
    """Read the journal.

    Args:
        seeded: the seed's validation is in gepa's checkpoint.
    """
    rows = run_journal.journal.rows
    past = Past(run_journal)
    past.spent = int(rows("SELECT COALESCE(SUM(calls), 0) AS spent FROM calls")[0]["spent"])
    kept = run_journal.journal.kept("spent") or {}
    # What is kept is of the last ticket's end; what was spent after it stands in the rows.
    [made] = rows("SELECT COUNT(*) AS calls, COALESCE(SUM(cost_dollars), 0) AS dollars FROM proposals")
    [ran] = rows("SELECT COALESCE(SUM(cost_dollars), 0) AS dollars FROM rollouts")
    past.reflection_calls = max(kept.get("reflection_calls", 0), made["calls"])
    past.cost_dollars = max(kept.get("cost_dollars", 0.0), made["dollars"] + ran["dollars"])
    run_journal.spent_before = past.reflection_calls, past.cost_dollars
    past.last_ticket = int(rows("SELECT COALESCE(MAX(number), -1) AS last FROM tickets")[0]["last"])
    past.texts = {row["hash"]: json.loads(row["texts"]) for row in rows("SELECT hash, texts FROM candidates")}
    _close_what_is_done(run_journal)
    heads = _heads(past)
    for row in rows("SELECT * FROM tickets WHERE number NOT IN (SELECT ticket FROM ends) ORDER BY number"):
        number = int(row["number"])
        if any(MARK in text for text in _texts_of(past, row)):
            run_journal.ended(number, "failed", "a secret was taken out of its texts: they are not what they were")
            continue
        past.tickets.append(
            Unfinished(number, row["kind"], row["version"], json.loads(row["selection"]), heads.get(number))
        )
    past.tickets.sort(key=lambda one: (one.head is None, one.number))
    past.numbers = {one.number for one in past.tickets} | (set[int]() if seeded else {SEED_TICKET})
    for row in rows("SELECT id, ticket, candidate, split, example, traced, trace IS NULL AS bare FROM rollouts"):
        if row["ticket"] in past.numbers:
            key = row["candidate"], row["split"], row["example"], row["traced"]
            past.rollouts.setdefault(key, []).append(row["id"])
            past.paid[row["ticket"]] += 1
            if row["bare"]:
                past.untraced.add(row["id"])
            past.paid_for_seed += row["ticket"] == SEED_TICKET
    for row in rows("SELECT ticket, position, texts, feedback FROM proposals"):
        if row["ticket"] in past.numbers:
            past.proposals[row["ticket"], row["position"]] = row
    return past


def _texts_of(past: Past, row: Any) -> list[str]:
    """The texts of all candidates that a ticket's selection names."""
    kept = json.loads(row["selection"])
    names = [kept["candidate"]] if row["kind"] == "merge" else [task["candidate"] for task in kept]
    return [text for name in names for text in past.texts[name].values()]


def _close_what_is_done(run_journal: RunJournal) -> None:
    """Tickets whose work was done when the run was killed, before their end was written."""
    rows = run_journal.journal.rows
    open_ones = "NOT IN (SELECT ticket FROM ends)"
    for row in rows(f"SELECT DISTINCT ticket FROM commits WHERE ticket IS NOT NULL AND ticket {open_ones}"):
        run_journal.ended(row["ticket"], "committed", "the run was killed after the commit", before=True)
    for row in rows(
        "SELECT h.*, e.way FROM heads h LEFT JOIN head_ends e ON e.session = h.session AND e.head = h.head "
        f"WHERE h.ticket {open_ones} AND h.ticket NOT IN (SELECT ticket FROM commits WHERE ticket IS NOT NULL) "
        "ORDER BY h.id"
    ):
        if row["way"] is not None and not _newer_head(rows, row):
            run_journal.ended(row["ticket"], "integrated", f"head {row['head']} was {row['way']}", before=True)
    ended = {row["ticket"] for row in rows("SELECT ticket FROM ends")}
    for row in rows("SELECT members, ticket, head FROM heads ORDER BY id"):
        for member in set(json.loads(row["members"])) - {row["ticket"]} - ended:
            ended.add(member)
            reason = f"in head {row['head']}, carried by ticket {row['ticket']}"
            run_journal.ended(member, "integrated", reason, before=True)
    run_journal.journal.flush_here()
    for row in rows(
        "SELECT h.session, h.head, t.way FROM heads h JOIN ends t ON t.ticket = h.ticket LEFT JOIN head_ends e "
        "ON e.session = h.session AND e.head = h.head WHERE e.id IS NULL"
    ):
        run_journal.head_ended(row["session"], row["head"], row["way"])
    run_journal.journal.flush_here()


def _newer_head(rows: Any, row: Any) -> bool:
    """Whether the ticket carried a further head, in a later session."""
    return bool(rows("SELECT 1 FROM heads WHERE ticket = ? AND id > ?", (row["ticket"], row["id"])))


def _heads(past: Past) -> dict[int, UnfinishedHead]:
    """Carrier -> the head whose validation was under way; the newest row counts."""
    found: dict[int, UnfinishedHead] = {}
    for row in past.run_journal.journal.rows(
        "SELECT h.* FROM heads h LEFT JOIN head_ends e ON e.session = h.session AND e.head = h.head "
        "WHERE e.id IS NULL AND h.ticket NOT IN (SELECT ticket FROM ends) ORDER BY h.id"
    ):
        found[row["ticket"]] = UnfinishedHead(
            row["session"],
            row["head"],
            past.texts[row["candidate"]],
            row["base"],
            json.loads(row["parents"]),
            row["generation"],
            json.loads(row["examples"]),
            json.loads(row["before"]),
            json.loads(row["after"]),
        )
    return found
