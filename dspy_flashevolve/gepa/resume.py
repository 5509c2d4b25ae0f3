"""Going on with an interrupted run: what GEPA writes down beside the engine's rows, and how its pool, its heads and its
steps are put back to where journal and gepa's checkpoint say that they were.

What touches the pool runs in its writer; what reads the journal, within :func:`reporting_damage`. Steps without an end
run again (``EvolutionRun._runs_again``), and ``Call.paid_before`` in engine/requests.py finds what was paid for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from gepa.core.data_loader import DataLoader
from gepa.core.state import GEPAState, ValsetEvaluation
from gepa.strategies.proposal_sampling import ProposalTask

from dspy_flashevolve.engine.errors import RunDirectoryError
from dspy_flashevolve.engine.redaction import REDACTED
from dspy_flashevolve.engine.staleness import POLICIES
from dspy_flashevolve.engine.store import BEFORE_STEPS, Store, id_text
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.gepa.iterations import write_commits
from dspy_flashevolve.gepa.options import restore_strategies
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.records import Crossover, Selected
from dspy_flashevolve.gepa.settings import Edits, GepaSettings
from dspy_flashevolve.programs.checkpoint import CHECKPOINT, read_state
from dspy_flashevolve.programs.fingerprints import plain_settings
from dspy_flashevolve.programs.records import output_in

logger = logger_named(__name__)

# gepa's checkpoint.


def checkpoint_in(directory: str, settings: GepaSettings) -> GEPAState[Any, Any] | None:
    """Read gepa's checkpoint in a directory; None where there is none.

    Raises:
        RunDirectoryError: it cannot be read, or was made with another frontier.
    """
    path = Path(directory) / CHECKPOINT
    if not path.exists():
        return None
    try:
        state = read_state(path, settings.use_cloudpickle)
    except RunDirectoryError as error:
        raise RunDirectoryError(
            f"{error} Put a copy of it back, give another log_dir, or move it and journal.sqlite away to begin anew."
        ) from error
    if state.frontier_type != settings.frontier_type:
        raise RunDirectoryError(
            f"frontier_type is {settings.frontier_type!r}, and {path} was made with {state.frontier_type!r}. Pass "
            "that, or give another log_dir."
        )
    return state


def written_out(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Write out the search and the staleness policy among an optimizer's arguments, with their settings."""
    own = {name: arguments[name] for name in ("search", "staleness")}
    return {**arguments, **{name: repr(value) for name, value in own.items() if is_dataclass(value)}}


def tell_changes(store: Store, arguments: Mapping[str, Any]) -> None:
    """Warn where a run goes on with another search or staleness policy than its last session had.

    Args:
        arguments: the optimizer's, by name, :func:`written_out`.
    """
    rows = store.rows("SELECT settings FROM sessions WHERE id < ? ORDER BY id DESC LIMIT 1", [store.session])
    now = plain_settings({name: arguments[name] for name in ("search", "staleness")})
    before: dict[str, Any] = json.loads(rows[0]["settings"]) if rows else now
    if changed := [name for name in now if _meant(before.get(name)) != _meant(now[name])]:
        logger.warning(
            "log_dir=%r was last run with %s; it goes on with %s.",
            str(store.directory),
            " and ".join(f"{name}={before[name]!r}" if name in before else f"no {name}=" for name in changed),
            " and ".join(f"{name}={now[name]!r}" for name in changed),
        )


def _meant(setting: Any) -> Any:
    """Write a search or a policy that is named as the object that its name stands for."""
    return repr({"edits": Edits(), **POLICIES}[setting]) if setting in ("edits", *POLICIES) else setting


# What a step has selected.


def selection_of(store: Store, work: Selected | Crossover) -> Any:
    """Write what a step works on as JSON."""
    if isinstance(work, Crossover):
        return {
            "candidate": store.record_candidate(work.candidate),
            "parents": work.parents,
            "ancestor": work.ancestor,
            "ids": [id_text(example) for example in work.ids],
            "parent_scores": work.parent_scores,
        }
    return [
        {
            "parent": task.parent_idx,
            "candidate": store.record_candidate(task.parent_candidate),
            "ids": [id_text(example) for example in task.minibatch_ids],
            "base": base,
        }
        for task, base in zip(work.tasks, work.bases, strict=True)
    ]


def selected_again(store: Store, pool: Pool, selection: Any) -> Selected | Crossover:
    """Read what an interrupted step had selected."""
    if isinstance(selection, dict):
        record: Mapping[str, Any] = selection
        first, second = record["parents"]
        scores, ids = record["parent_scores"], ids_of(pool.loader)
        return Crossover(
            dict(store.texts[record["candidate"]]),
            (first, second),
            record["ancestor"],
            tuple(ids[text] for text in record["ids"]),
            (tuple(scores[0]), tuple(scores[1])),
        )
    ids = ids_of(pool.trainset)
    tasks: list[ProposalTask[Any, Any]] = []
    bases: list[int | None] = []
    for record in selection:
        candidate = store.texts[record["candidate"]]
        mine = [ids[text] for text in record["ids"]]
        parent = record["parent"]
        if candidate in pool.state.program_candidates:  # a head that was validated since
            parent = pool.state.program_candidates.index(candidate)
        waiting = [entry.key for entry in pool.speculative.entries if entry.candidate == candidate]
        tasks.append(ProposalTask(parent, dict(candidate), mine, list(pool.trainset.fetch(mine))))
        bases.append(waiting[-1] if record["base"] is not None and waiting else None)
    return Selected(tuple(tasks), tuple(bases))


def ids_of(loader: DataLoader[Any, Any]) -> dict[str, Any]:
    """Map the texts of ids to the ids."""
    return {id_text(example): example for example in loader.all_ids()}


# The run.


def take_up(store: Store, pool: Pool, seeded: bool) -> None:
    """Put the pool where the journal says that it was, and find the steps that had no end.

    Args:
        seeded: gepa's checkpoint was there.

    Raises:
        RunDirectoryError: the journal is damaged, or knows of candidates while gepa's checkpoint is gone.
    """
    is_open = "NOT IN (SELECT step FROM ends)"  # killed after its commit, before its end was written
    for row in store.rows(f"SELECT DISTINCT step FROM commits WHERE step IS NOT NULL AND step {is_open}"):
        store.record_end(row["step"], "committed", "the run was killed after the commit", before=True)
    store.flush_blocking()
    store.load_unfinished(seeded)
    if not seeded and store.rows("SELECT 1 FROM commits LIMIT 1"):
        raise RunDirectoryError(
            f"{store.path.with_name(CHECKPOINT)} is missing, but the journal beside it knows of candidates "
            "that were in it. Put it back, or give another log_dir."
        )
    record = store.get_state("gepa strategies")
    if record is not None:
        restore_strategies(record, pool.parts, pool.adapter, pool.state, ids_of(pool.trainset))
    if seeded:
        _reconcile(store, pool)
        grown, committed = store.get_state("grown") or {}, len(pool.state.program_candidates)
        pool.grown.update({int(index): names for index, names in grown.items() if int(index) < committed})
        pool.best.look()


def _reconcile(store: Store, pool: Pool) -> None:
    """Bring gepa's checkpoint and the journal to the same commits and the same count.

    Commits that gepa's checkpoint had not got yet are made again; those that another program made are written down.
    """
    rows, state = store.rows, pool.state
    last_index = int(rows("SELECT COALESCE(MAX(candidate_index), 0) AS last FROM commits")[0]["last"])
    have = len(state.program_candidates) - 1
    for row in rows("SELECT candidate_index, candidate FROM commits WHERE candidate_index <= ?", (have,)):
        texts = store.texts[row["candidate"]]
        if texts != state.program_candidates[row["candidate_index"]] and REDACTED not in "".join(texts.values()):
            raise RunDirectoryError(
                f"{store.path} and the gepa_state.bin beside it disagree about candidate "
                f"{row['candidate_index']}: another program has continued from a checkpoint without it. Move the "
                "journal away to go on from the checkpoint, or give another log_dir."
            )
    elsewhere = [
        (
            state.program_candidates[index],
            state.parent_program_for_candidate[index],
            ValsetEvaluation[Any, Any]({}, dict(state.prog_candidate_val_subscores[index]), None),
        )
        for index in range(last_index + 1, have + 1)
    ]
    if elsewhere and not store.is_new:
        logger.warning(
            "gepa_state.bin in %s has %d candidates that journal.sqlite beside it does not have. Another program went "
            "on from it; or the journal was copied without journal.sqlite-wal, which has what a run that was killed "
            "wrote last. The run goes on from gepa_state.bin: what the journal has lost may be paid again.",
            store.directory, len(elsewhere),
        )  # fmt: skip
    if elsewhere:
        write_commits(store, None, last_index + 1, last_index, elsewhere)
    ids = ids_of(pool.loader)
    for row in rows("SELECT * FROM commits WHERE candidate_index > ? ORDER BY candidate_index", (have,)):
        _commit_again(store, pool, row, ids)
    if state.total_num_evals > store.spent:
        store.record_call("elsewhere", BEFORE_STEPS, state.total_num_evals - store.spent)
        store.spent = state.total_num_evals
    elif store.spent > state.total_num_evals:
        state.increment_evals(store.spent - state.total_num_evals)


def _commit_again(store: Store, pool: Pool, row: Any, ids: Mapping[str, Any]) -> None:
    scores = {ids[text]: score for text, score in json.loads(row["scores"]).items()}
    by_text = None if row["more"] is None else json.loads(row["more"])
    objectives = None if by_text is None else {ids[text]: scores for text, scores in by_text.items()}
    outputs: dict[Any, Any] = {}
    for example in scores:
        rollouts = store.rows(
            "SELECT output FROM rollouts WHERE candidate = ? AND split = 'val' AND example = ? ORDER BY id DESC",
            (row["candidate"], id_text(example)),
        )
        outputs[example] = output_in(rollouts[0]["output"]) if rollouts else None
    parents: list[int] = json.loads(row["parents"])
    pool.state.update_state_with_new_program(
        list(parents),
        dict(store.texts[row["candidate"]]),
        ValsetEvaluation[Any, Any](outputs, scores, objectives),
        None,
        pool.state.total_num_evals,
    )
    pool.write_best_outputs()
