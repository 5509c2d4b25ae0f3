"""What selection may pick from: gepa's pool, and beside it the candidates whose validation is under way.

gepa's selectors read a GEPAState. They get a copy of it in which the speculative candidates stand behind the
confirmed ones, with the scores of their validation prefix; the state itself never holds them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gepa.core.state import GEPAState
from gepa.strategies.proposal_sampling import ProposalTask

from dspy_flashevolve.gepa.pool import Pool

State = GEPAState[Any, Any]
CONTAINERS = (
    "program_candidates",
    "num_metric_calls_by_discovery",
    "named_predictor_id_to_update_next_for_program_candidate",
    "parent_program_for_candidate",
    "prog_candidate_val_subscores",
    "prog_candidate_objective_scores",
    "pareto_front_valset",
    "objective_pareto_front",
    "pareto_front_cartesian",
)
FRONTS = (
    "program_at_pareto_front_valset",
    "program_at_pareto_front_objectives",
    "program_at_pareto_front_cartesian",
)
"""What gepa 0.1.4 changes when a candidate is added (``GEPAState.update_state_with_new_program``)."""


def selectable(pool: Pool) -> tuple[State, list[int]]:
    """The state to select from, and the handles of the candidates that it has beyond gepa's.

    Runs in the pool's writer.
    """
    waiting = [one for one in pool.speculative.all() if one.visible and one.evaluation is not None]
    if not waiting:
        return pool.state, []
    view = copy.copy(pool.state)
    for name in CONTAINERS:
        setattr(view, name, copy.copy(getattr(view, name)))
    for name in FRONTS:
        setattr(view, name, {key: set(front) for key, front in getattr(view, name).items()})
    view.best_outputs_valset = None
    for one in waiting:
        assert one.evaluation is not None
        parents = list(pool.speculative.resolve((one.key,))) or [0]
        view.update_state_with_new_program(parents, one.candidate, one.evaluation, None, pool.state.total_num_evals)
    return view, [one.key for one in waiting]


def sample(
    pool: Pool, choose: Callable[[State], Sequence[ProposalTask[Any, Any]]]
) -> tuple[list[ProposalTask[Any, Any]], list[int | None]]:
    """Let ``choose`` pick tasks, and name for each the speculative candidate that it starts from.

    A task's ``parent_idx`` is an index of gepa's pool again: of the nearest confirmed ancestor.
    """
    state, keys = selectable(pool)
    confirmed = len(pool.state.program_candidates)
    tasks: list[ProposalTask[Any, Any]] = []
    bases: list[int | None] = []
    for task in choose(state):
        base = keys[task.parent_idx - confirmed] if task.parent_idx >= confirmed else None
        if base is not None:
            nearest = (pool.speculative.resolve((base,)) or (0,))[0]
            task = replace(task, parent_idx=nearest)
        tasks.append(task)
        bases.append(base)
    return tasks, bases


class Fixed:
    """Selects one candidate: the seed while there is nothing else, or the one that stands for a head."""

    def __init__(self, index: int) -> None:
        self._index = index

    def select_candidate_idx(self, state: State) -> int:
        """gepa's CandidateSelector."""
        del state
        return self._index
