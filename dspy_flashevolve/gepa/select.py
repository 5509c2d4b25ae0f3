"""What a step works on: parents and minibatches, or a crossover of two parents; after an interruption, what it had
selected before."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from gepa.proposer.merge import MergeProposer

from dspy_flashevolve.engine.steps import Step
from dspy_flashevolve.gepa.credit import Credit
from dspy_flashevolve.gepa.options import Chosen
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.records import Crossover, Selected, Task


class Selection:
    """Selects what steps work on. Everything runs in the pool's writer.

    Args:
        frontier_share: share of the steps that start from the Pareto frontier, not from what ``credit`` composes.
        unanswerable: a candidate's texts -> training examples that get no answer: its minibatches avoid them.
        most_examples: of a minibatch; None for as many as the sampler draws.
    """

    def __init__(
        self,
        pool: Pool,
        credit: Credit | None,
        frontier_share: float,
        unanswerable: Callable[[dict[str, str]], set[Any]],
        most_examples: Callable[[], int | None],
    ) -> None:
        self._pool, self._credit, self._frontier_share = pool, credit, frontier_share
        self._unanswerable, self._most_examples = unanswerable, most_examples
        self._crossing: set[int] = set()
        """Numbers of the steps that cross two candidates."""

    def select(self, step: Step) -> tuple[int, float, Selected | Crossover]:
        """Select what a step works on.

        Returns:
            The pool's version, the best validation score among the parents, and the work."""
        pool = self._pool
        pool.begin_step(step)
        draw, rng = 1.0, random.Random()
        if not pool.shares_randomness:
            pool.parts.rng.seed(step.rng.getrandbits(64))
            draw = step.rng.random()
            rng.seed(step.rng.getrandbits(64))
        work = self._crossover(step) or self._sample(step, draw, rng)
        pool.keep_strategies()
        return pool.version, 0.0 if pool.shares_randomness else self.parent_score(work), work

    def parent_score(self, work: Selected | Crossover) -> float:
        """Return the best validation score among the parents; 0 before the seed is confirmed."""
        if isinstance(work, Crossover) or not self._pool.seed_confirmed:
            return 0.0
        return max((self._pool.score_of(task.parent_idx) for task in work.tasks), default=0.0)

    def runs_again(self, step: Step, crossover: bool) -> None:
        """Begin a step of an interrupted run again: draw and count what it drew and counted then."""
        trace = self._pool.begin_step(step)
        if not self._pool.shares_randomness:
            step.rng.getrandbits(64)
            step.rng.random()
            step.rng.getrandbits(64)
            self._pool.parts.rng.seed(step.number)
        if crossover:
            trace["invoked_merge"] = True
            self._crossing.add(step.number)

    def ended(self, step: Step) -> None:
        """Forget a step, which has ended."""
        self._crossing.discard(step.number)

    def _crossover(self, step: Step) -> Crossover | None:
        merge = self._pool.parts.merge
        if merge is None or not self._pool.seed_confirmed:
            return None
        plan = None
        # gepa checks max_merge_invocations only when it schedules; with several in flight that is too early.
        may = (
            self._pool.shares_randomness
            or merge.total_merges_tested + len(self._crossing) < merge.max_merge_invocations
        )
        if merge.last_iter_found_new_program and merge.merges_due > len(self._crossing) and may:
            plan = plan_crossover(self._pool, step, merge)
        merge.last_iter_found_new_program = False
        if plan is not None:
            self._crossing.add(step.number)
        return plan

    def _sample(self, step: Step, draw: float, rng: random.Random) -> Selected:
        pool, parts = self._pool, self._pool.parts
        selector = parts.candidate_selection_strategy if pool.seed_confirmed else _fixed(0)
        credit, variant = self._credit, None
        if credit is not None and credit.outlook.joins is not False and draw >= self._frontier_share:
            variant = credit.variant(rng)
            selector = _fixed(credit.parent)
        tasks, bases = pool.speculative.sample(
            pool.state,
            lambda state: parts.sampling_strategy.sample_tasks(state, selector, parts.batch_sampler, pool.trainset),
        )
        if credit is not None and variant is not None:
            for place, task in enumerate(tasks):  # a strategy of the user's may choose parents by itself
                if task.parent_idx == credit.parent and (bases[place] is None or not pool.seed_confirmed):
                    tasks[place] = replace(task, parent_candidate=dict(variant))
        most = self._most_examples()
        tasks = [
            replace(task, minibatch_ids=task.minibatch_ids[:most], minibatch=task.minibatch[:most]) for task in tasks
        ]
        tasks = [self._once(task) for task in tasks]
        tasks = [self._answerable(task, self._unanswerable(task.parent_candidate)) for task in tasks]
        for task in tasks:
            pool.reports.task_selected(step, task)
        return Selected(tuple(tasks), tuple(bases))

    def _once(self, task: Task) -> Task:
        """The task with each example once: gepa fills a minibatch that is larger than the training set with examples
        that are in it already. dspy.GEPA, and lockstep, run them again."""
        ids = list(dict.fromkeys(task.minibatch_ids))
        if self._pool.shares_randomness or len(ids) == len(task.minibatch_ids):
            return task
        return replace(task, minibatch_ids=ids, minibatch=self._pool.trainset.fetch(ids))

    def _answerable(self, task: Task, out: set[Any]) -> Task:
        """The task with other training examples in the place of those that get no answer, as far as there are any."""
        kept = [example for example in task.minibatch_ids if example not in out]
        left = [example for example in self._pool.trainset.all_ids() if example not in out and example not in kept]
        missing = len(task.minibatch_ids) - len(kept)
        ids = kept + self._pool.parts.rng.sample(left, min(missing, len(left))) or list(task.minibatch_ids)
        return replace(task, minibatch_ids=ids, minibatch=self._pool.trainset.fetch(ids)) if missing else task


def _fixed(index: int) -> Any:
    """gepa's CandidateSelector of one: the seed while there is nothing else, or the parent of what is composed."""
    return SimpleNamespace(select_candidate_idx=lambda state: index)


def plan_crossover(pool: Pool, step: Step, merge: MergeProposer[Any]) -> Crossover | None:
    """Choose two candidates of the frontier and the validation examples that judge their child; None for none.

    gepa's ``MergeProposer.propose`` plans and evaluates in one blocking call: it is left where it would evaluate."""
    trace, subscores = pool.log_entry(step), pool.state.prog_candidate_val_subscores
    with pool.acting_for(step):
        try:
            proposal = merge.propose(pool.state)  # to its end where gepa's cache has all scores
            candidate = None if proposal is None else proposal.candidate
        except Chosen as chosen:
            [candidate] = chosen.candidates
        except ValueError:  # gepa draws ancestors by their scores, and fails where these are all 0
            candidate = None
    if candidate is None:
        return None
    first, second, ancestor = trace["merged_entities"]
    ids = tuple(trace["subsample_ids"])
    scores = tuple(subscores[first][i] for i in ids), tuple(subscores[second][i] for i in ids)
    return Crossover(candidate, (first, second), ancestor, ids, scores)
