"""Putting a run back to where its journal and gepa's checkpoint say that it was.

Everything runs in the pool's writer.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import Any

from gepa.core.data_loader import DataLoader
from gepa.core.state import ValsetEvaluation
from gepa.proposer.base import CandidateProposal
from gepa.strategies.proposal_sampling import ProposalTask

from dspy_flashevolve.engine.errors import RunDirectoryError
from dspy_flashevolve.engine.item import Item, Ticket
from dspy_flashevolve.engine.pipeline import Opened
from dspy_flashevolve.engine.redaction import MARK
from dspy_flashevolve.gepa.heads import Heads
from dspy_flashevolve.gepa.past import Past, Unfinished, UnfinishedHead, past_of, read
from dspy_flashevolve.gepa.payloads import Head, MergePlan, Selected
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.run_journal import RunJournal, id_text
from dspy_flashevolve.gepa.strategies import restore_strategies


def take_up(run_journal: RunJournal, pool: Pool, seeded: bool, lockstep: bool) -> Past:
    """Let the pool write into the journal from now on, and put it where the journal says that it was.

    Args:
        seeded: gepa's checkpoint was there.

    Raises:
        RunDirectoryError: the journal knows of candidates, and gepa's checkpoint is gone.
    """
    journal = run_journal.journal
    try:
        past = past_of(run_journal, seeded)
    except (sqlite3.Error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunDirectoryError(
            f"{journal.path} cannot be read ({error}): it is damaged. Give another log_dir, or move it away "
            "to begin anew."
        ) from error
    past.each_once = lockstep
    if not seeded and journal.rows("SELECT 1 FROM commits LIMIT 1"):
        raise RunDirectoryError(
            f"{journal.directory / 'gepa_state.bin'} is missing, but the journal beside it knows of candidates that "
            "were in it. Put it back, or give another log_dir."
        )
    pool.journal, pool.shares_randomness = run_journal, lockstep
    kept = journal.kept("strategies")
    if kept is not None:
        restore_strategies(kept, pool.parts, pool.adapter, pool.state, ids_of(pool.trainset))
    if seeded:
        reconcile(past, pool)
    else:
        pool.state.total_num_evals += past.spent - past.paid_for_seed
    return past


class GoingOn:
    """The unfinished tickets of an interrupted run, one after the other.

    Args:
        past: what the journal says.
        pool: gepa's state and strategies.
        heads: the line of heads; None where the policy makes none.
    """

    def __init__(self, past: Past, pool: Pool, heads: Heads | None) -> None:
        self._past = past
        self._pool = pool
        self._heads = heads
        self._waiting = list(past.tickets)
        self.last_ticket = past.last_ticket

    @property
    def left(self) -> int:
        """How many have not gone on yet."""
        return len(self._waiting)

    def paid(self, one: Unfinished) -> int:
        """Its rollouts that need not be paid again."""
        return self._past.paid[one.number]

    def next(self) -> Unfinished:
        """The next one, once."""
        return self._waiting.pop(0)

    def open(self, ticket: Ticket, one: Unfinished) -> Opened:
        """What it goes on with, and where."""
        pool, past = self._pool, self._past
        trace = pool.begin_ticket(ticket)
        if not pool.shares_randomness:
            pool.parts.rng.seed(ticket.number)
        if one.head is not None and self._heads is not None:
            proposal = head_proposal(pool, one.head)
            key = self._restored(ticket.number, one.head, proposal)
            return Opened("validate", Item(Head(key, proposal), ticket, one.version, sum(one.head.after)))
        if one.kind == "merge":
            trace["invoked_merge"] = True
            return Opened("screen", Item(merge_plan(past, pool, one), ticket, one.version))
        work = selected(past, pool, one)
        parents = [task.parent_idx for task in work.tasks]
        value = max((pool.score_of(parent) for parent in parents), default=0.0) if pool.seed_confirmed else 0.0
        return Opened("rollout", Item(work, ticket, one.version, 0.0 if pool.shares_randomness else value))

    def _restored(self, ticket: int, head: UnfinishedHead, proposal: CandidateProposal[Any]) -> int:
        """Put a head back on the line; its handle now."""
        assert self._heads is not None
        past = self._past
        base = None if head.base is None else past.restored.get((head.session, head.base))
        key = past.restored[head.session, head.head] = self._heads.restore(proposal, base, head.generation)
        past.run_journal.landed_again(ticket, key, base, head.generation, proposal)
        past.run_journal.head_ended(head.session, head.head, "restored")
        return key


def ids_of(loader: DataLoader[Any, Any]) -> dict[str, Any]:
    """Text of an id -> the id."""
    return {id_text(one): one for one in loader.all_ids()}


def selected(past: Past, pool: Pool, one: Unfinished) -> Selected:
    """What an unfinished ticket had selected."""
    ids = ids_of(pool.trainset)
    tasks: list[ProposalTask[Any, Any]] = []
    bases: list[int | None] = []
    for kept in one.selection:
        candidate = past.texts[kept["candidate"]]
        mine = [ids[text] for text in kept["ids"]]
        parent = kept["parent"]
        if candidate in pool.state.program_candidates:  # a head that was confirmed since
            parent = pool.state.program_candidates.index(candidate)
        waiting = [entry.key for entry in pool.speculative.all() if entry.candidate == candidate and entry.visible]
        tasks.append(ProposalTask(parent, dict(candidate), mine, list(pool.trainset.fetch(mine))))
        bases.append(waiting[-1] if kept["base"] is not None and waiting else None)
    return Selected(tuple(tasks), tuple(bases))


def merge_plan(past: Past, pool: Pool, one: Unfinished) -> MergePlan:
    """The merge that an unfinished ticket had planned."""
    ids, kept = ids_of(pool.loader), one.selection
    first, second = kept["parents"]
    scores = kept["parent_scores"]
    return MergePlan(
        dict(past.texts[kept["candidate"]]),
        (first, second),
        kept["ancestor"],
        tuple(ids[text] for text in kept["ids"]),
        (tuple(scores[0]), tuple(scores[1])),
    )


def head_proposal(pool: Pool, head: UnfinishedHead) -> CandidateProposal[Any]:
    """A head as gepa's proposal."""
    ids = ids_of(pool.trainset)
    return CandidateProposal(
        candidate=dict(head.candidate),
        parent_program_ids=list(head.parents),
        subsample_indices=[ids[text] for text in head.examples],
        subsample_scores_before=list(head.before),
        subsample_scores_after=list(head.after),
        tag="train",
    )


def reconcile(past: Past, pool: Pool) -> None:
    """Bring gepa's checkpoint and the journal to the same commits and the same count.

    Commits that gepa's checkpoint had not got yet are made again; those that another program made are written down.
    """
    journal, state = past.run_journal, pool.state
    known = int(journal.journal.rows("SELECT COALESCE(MAX(candidate_index), 0) AS last FROM commits")[0]["last"])
    have = len(state.program_candidates) - 1
    for row in journal.journal.rows(
        "SELECT candidate_index, candidate FROM commits WHERE candidate_index <= ?", (have,)
    ):
        texts = past.texts[row["candidate"]]
        if texts != state.program_candidates[row["candidate_index"]] and MARK not in "".join(texts.values()):
            raise RunDirectoryError(
                f"{journal.journal.path} and the gepa_state.bin beside it disagree about candidate "
                f"{row['candidate_index']}: another program has continued from a checkpoint without it. Move the "
                "journal away to go on from the checkpoint, or give another log_dir."
            )
    elsewhere = [
        (
            state.program_candidates[index],
            state.parent_program_for_candidate[index],
            ValsetEvaluation[Any, Any]({}, dict(state.prog_candidate_val_subscores[index]), None),
        )
        for index in range(known + 1, have + 1)
    ]
    if elsewhere:
        journal.commits(None, known + 1, known, elsewhere)
    ids = ids_of(pool.loader)
    for row in journal.journal.rows(
        "SELECT * FROM commits WHERE candidate_index > ? ORDER BY candidate_index", (have,)
    ):
        _commit_again(past, pool, row, ids)
    if state.total_num_evals > past.spent:
        journal.calls_elsewhere(state.total_num_evals - past.spent)
        past.spent = state.total_num_evals
    elif past.spent > state.total_num_evals:
        pool.count_calls(past.spent - state.total_num_evals)


def _commit_again(past: Past, pool: Pool, row: Any, ids: Mapping[str, Any]) -> None:
    scores = {ids[text]: score for text, score in json.loads(row["scores"]).items()}
    kept = None if row["objective_scores"] is None else json.loads(row["objective_scores"])
    objectives = None if kept is None else {ids[text]: scores for text, scores in kept.items()}
    candidate = past.texts[row["candidate"]]
    outputs = {one: _output(past, row["candidate"], one) for one in scores}
    evaluation = ValsetEvaluation[Any, Any](outputs, scores, objectives)
    parents: list[int] = json.loads(row["parents"])
    pool.state.update_state_with_new_program(
        list(parents), dict(candidate), evaluation, pool.run_dir, pool.state.total_num_evals
    )
    pool.version += 1
    pool.generations.append(1 + max(pool.generations[parent] for parent in parents))
    pool.standing.on_valset_evaluated({"candidate_idx": len(pool.state.program_candidates) - 1})


def _output(past: Past, candidate: str, example: Any) -> Any:
    found = past.run_journal.journal.rows(
        "SELECT output FROM rollouts WHERE candidate = ? AND split = 'val' AND example = ? ORDER BY id DESC LIMIT 1",
        (candidate, id_text(example)),
    )
    return read(past.run_journal.records, found[0]["output"]) if found else None
