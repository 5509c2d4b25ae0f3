"""What a step works on: parents and minibatches, or a crossover of two parents; after an interruption, what it had
selected before. What a run returns is chosen by ``Best`` in compilation.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from gepa.proposer.merge import MergeProposer

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.steps import Step
from dspy_flashevolve.gepa.iterations import Iterations
from dspy_flashevolve.gepa.options import Chosen
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.records import Crossover, Selected, Task
from dspy_flashevolve.gepa.search import Search, check_texts


class Selection:
    """Selects what steps work on. Everything runs in the pool's writer.

    Args:
        search: says where a step starts.
        unanswerable: a candidate's texts -> training examples that get no answer: its minibatches avoid them.
        most_examples: of a minibatch; None for as many as the sampler draws.
    """

    def __init__(
        self,
        pool: Pool,
        iterations: Iterations,
        search: Search,
        unanswerable: Callable[[dict[str, str]], set[Any]],
        most_examples: Callable[[], int | None],
    ) -> None:
        self._pool, self._iterations, self._search = pool, iterations, search
        self._unanswerable, self._most_examples = unanswerable, most_examples
        self._crossing: set[int] = set()
        """Numbers of the steps that cross two candidates."""

    def select(self, step: Step) -> tuple[int, float, Selected | Crossover]:
        """Select what a step works on.

        Returns:
            The pool's version, the best validation score among the parents, and the work."""
        pool = self._pool
        self._iterations.begin(step)
        draw, rng = 1.0, random.Random()
        if self._search.overlaps:
            pool.parts.rng.seed(step.rng.getrandbits(64))
            draw = step.rng.random()
            rng.seed(step.rng.getrandbits(64))
        work = self._crossover(step) or self._sample(step, draw, rng)
        pool.keep_strategies()
        return pool.version, self.parent_score(work), work

    def parent_score(self, work: Selected | Crossover) -> float:
        """Return the best validation score among the parents; 0 before the seed is confirmed."""
        if isinstance(work, Crossover) or not self._pool.seed_confirmed:
            return 0.0
        return max((self._pool.score_of(task.parent_idx) for task in work.tasks), default=0.0)

    def runs_again(self, step: Step, crossover: bool) -> None:
        """Begin a step of an interrupted run again: draw and count what it drew and counted then."""
        trace = self._iterations.begin(step)
        if self._search.overlaps:
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
        tested = merge.total_merges_tested + len(self._crossing)
        may = not self._search.overlaps or tested < merge.max_merge_invocations
        if merge.last_iter_found_new_program and merge.merges_due > len(self._crossing) and may:
            plan = plan_crossover(self._pool, self._iterations, step, merge)
        merge.last_iter_found_new_program = False
        if plan is not None:
            self._crossing.add(step.number)
        return plan

    def _sample(self, step: Step, draw: float, rng: random.Random) -> Selected:
        pool, parts = self._pool, self._pool.parts
        selector = parts.candidate_selection_strategy if pool.seed_confirmed else _fixed(0)
        self._search.catch_up()
        start = self._search.select(pool.state, rng) if draw >= self._search.frontier_share else None
        if start is not None:
            source, count = f"{type(self._search).__name__}.select", len(pool.state.program_candidates)
            if not 0 <= start.candidate < count:
                raise ConfigurationError(f"{source} gave candidate {start.candidate}, expected 0 to {count - 1}.")
            check_texts(start.texts, pool.state, source)
            selector = _fixed(start.candidate)
        tasks, bases = pool.speculative.sample(
            pool.state,
            lambda state: parts.sampling_strategy.sample_tasks(state, selector, parts.batch_sampler, pool.trainset),
        )
        if start is not None and start.texts is not None:
            for place, task in enumerate(tasks):  # a strategy of the user's may choose parents by itself
                if task.parent_idx == start.candidate and (bases[place] is None or not pool.seed_confirmed):
                    tasks[place] = replace(task, parent_candidate=dict(start.texts))
        most = self._most_examples()
        tasks = [
            replace(task, minibatch_ids=task.minibatch_ids[:most], minibatch=task.minibatch[:most]) for task in tasks
        ]
        if self._search.spares_calls:
            tasks = [self._answerable(task) for task in tasks]
        for task in tasks:
            pool.reports.task_selected(step, task)
        return Selected(tuple(tasks), tuple(bases))

    def _answerable(self, task: Task) -> Task:
        """The task with each example once, and others in the place of those that get no answer, as far as there are.

        gepa fills a minibatch that is larger than the training set with examples that are in it already.
        """
        once, out = list(dict.fromkeys(task.minibatch_ids)), self._unanswerable(task.parent_candidate)
        ids = [example for example in once if example not in out]
        if len(ids) < len(once):
            others = [example for example in self._pool.trainset.all_ids() if example not in out and example not in ids]
            ids = ids + self._pool.parts.rng.sample(others, min(len(once) - len(ids), len(others))) or once
        if ids == list(task.minibatch_ids):
            return task
        return replace(task, minibatch_ids=ids, minibatch=self._pool.trainset.fetch(ids))


def _fixed(index: int) -> Any:
    """gepa's CandidateSelector of one: the seed while there is nothing else, or the parent of what is composed."""
    return SimpleNamespace(select_candidate_idx=lambda state: index)


def plan_crossover(pool: Pool, iterations: Iterations, step: Step, merge: MergeProposer[Any]) -> Crossover | None:
    """Choose two candidates of the frontier and the validation examples that judge their child; None for none.

    gepa's ``MergeProposer.propose`` plans and evaluates in one blocking call: it is left where it would evaluate."""
    trace, subscores = iterations.log_entry(step), pool.state.prog_candidate_val_subscores
    with iterations.acting_for(step):
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
