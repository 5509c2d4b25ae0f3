"""The pool and its one writer.

Everything that reads or changes gepa's state, and every callback, selector and stopper, runs in one thread,
one call at a time, in the order in which the calls were made (docs/architecture.md).
The pool is gepa's engine without its loop: how a candidate is added, reported and logged is gepa's code.
What each part of a step tells callbacks, caches, counts, logs and trackers is that of gepa 0.1.4, in names, order and
contents (``ReflectiveMutationProposer.propose``, ``MergeProposer.propose``, ``GEPAEngine``); the iteration is the
step's, so that steps may overlap.

Here are also the frozen records that flow from stage to stage of a step, and the candidates that steps may build on
before their validation has confirmed them. These stand beside gepa's state, which only ever holds confirmed candidates
and stays readable by gepa. Steps start from the seed, too, while it is being validated.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

from gepa.core.adapter import EvaluationBatch
from gepa.core.callbacks import notify_callbacks
from gepa.core.data_loader import DataLoader
from gepa.core.engine import GEPAEngine
from gepa.core.state import CachedEvaluation, EvaluationCache, GEPAState, ValsetEvaluation, initialize_gepa_state
from gepa.gepa_utils import json_default
from gepa.proposer.base import CandidateProposal, SubsampleEvaluation
from gepa.strategies.proposal_sampling import ProposalTask

from dspy_flashevolve.engine.loop import Threads
from dspy_flashevolve.engine.redaction import make_private
from dspy_flashevolve.engine.replay import Rollout, RunJournal, id_text
from dspy_flashevolve.engine.run import EvolutionRun
from dspy_flashevolve.engine.staleness import PastCommit
from dspy_flashevolve.engine.steps import Step
from dspy_flashevolve.gepa.options import BASE, Chosen, IterationLog, Parts, strategies_of
from dspy_flashevolve.gepa.settings import GepaSettings
from dspy_flashevolve.programs.records import as_writable

Candidate = dict[str, str]
Batch = EvaluationBatch[Any, Any]
Task = ProposalTask[Any, Any]
Proposal = CandidateProposal[Any]


@dataclass(frozen=True, slots=True)
class Selected:
    """One or more (parent, minibatch) pairs; more than one where the user's sampling strategy says so.

    Args:
        bases: for each task the handle of the speculative candidate that it starts from; None where it starts from
            gepa's pool. Its ``parent_idx`` is the nearest confirmed ancestor then.
    """

    tasks: tuple[Task, ...]
    bases: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Parent:
    """A task's parent on its minibatch.

    Args:
        index: position of the task in the step.
        evaluation: on the part of the minibatch that has finished.
        late: waits for the evaluation on all of it; None where nothing is missing.
        base: see :class:`Selected`.
    """

    index: int
    task: Task
    evaluation: Batch
    late: Callable[[], Awaitable[Batch]] | None
    base: int | None


@dataclass(frozen=True, slots=True)
class Child:
    """A proposed candidate, before its screen.

    Args:
        parent: what it was made from, on its minibatch.
        texts: the components that the reflection wrote.
        feedback: what the metric said of the parent's rollouts.
    """

    parent: Parent
    texts: Candidate
    feedback: tuple[str, ...] = ()

    @property
    def candidate(self) -> Candidate:
        """The parent with the new texts."""
        return {**self.parent.task.parent_candidate, **self.texts}

    def proposal(self, step: Step, batch: Batch | None = None) -> Proposal:
        """As gepa has it, with what the child had on its screen."""
        task, before = self.parent.task, self.parent.evaluation
        nothing_to_show = {f"{what}:{name}": "" for name in self.texts for what in ("prompt", "raw_lm_output")}
        return CandidateProposal(
            candidate=self.candidate,
            parent_program_ids=[task.parent_idx],
            subsample_indices=task.minibatch_ids,
            subsample_scores_before=before.scores,
            subsample_scores_after=None if batch is None else batch.scores,
            eval_before=_subsample(before),
            eval_after=None if batch is None else _subsample(batch),
            tag="reflective_mutation",
            metadata={"proposal_id": f"{step.number + 1}-{self.parent.index}", **nothing_to_show},
        )


@dataclass(frozen=True, slots=True)
class Crossover:
    """Two parents of the frontier and what their child is screened on (gepa's merge).

    Args:
        parents: indices in the pool.
        parent_scores: of each parent on the subsample, in the order of ``ids``.
    """

    candidate: Candidate
    parents: tuple[int, int]
    ancestor: int
    ids: tuple[Any, ...]
    parent_scores: tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Screened:
    """A proposal that passed its screen, to be validated.

    Args:
        base: handle of the speculative candidate that its parent is; see :class:`Selected`.
    """

    proposal: Proposal
    base: int | None = None


@dataclass(frozen=True, slots=True)
class Validated:
    """A proposal with its validation, to be committed.

    Args:
        calls: metric calls that the validation cost at most (cached examples cost none).
        base: see :class:`Screened`.
        key: the handle under which it could be selected while it was validated; None where it could not.
    """

    proposal: Proposal
    evaluation: ValsetEvaluation[Any, Any]
    calls: int
    base: int | None
    key: int | None


@dataclass(frozen=True, slots=True)
class ValidationPlan:
    """Which validation examples are to be run for a candidate, and what the cache has of the others."""

    candidate: Candidate
    cached: dict[Any, CachedEvaluation[Any]]
    missing: list[Any]


@dataclass(frozen=True, slots=True)
class Commit:
    """One change of the pool."""

    candidate: int
    version: int
    score: float
    best_score: float
    generation: int
    parents: tuple[int, ...] = ()


@dataclass(eq=False, slots=True)
class Speculative:
    """A candidate that waits for its validation, or has done so.

    Args:
        key: its handle.
        candidate: component -> text.
        parents: handles of speculative parents; none once it is confirmed.
        indices: confirmed parents, as indices of gepa's pool; its own once it is confirmed.
        evaluation: what is known of its validation.
        waits: its validation is under way.
    """

    key: int
    candidate: Candidate
    parents: tuple[int, ...] = ()
    indices: tuple[int, ...] = ()
    evaluation: ValsetEvaluation[Any, Any] | None = None
    waits: bool = True

    def leaves(self) -> None:
        """It waits no more."""
        self.waits, self.evaluation = False, None


class SpeculativeCandidates:
    """The speculative part of the pool.

    >>> waiting = SpeculativeCandidates()
    >>> head = waiting.add({"p": "text"})
    >>> child = waiting.add({"p": "longer text"}, parents=(head.key,))
    >>> waiting.remove(head.key)
    >>> waiting.all()
    []
    """

    def __init__(self) -> None:
        self._entries: list[Speculative] = []
        """All that there ever were, by their handles; children come after their parents."""
        self.fallen: set[int] = set()
        """Those that did not hold what they promised: what was made from them is stale."""

    def __contains__(self, key: int) -> bool:
        return self._entries[key].waits

    def all(self) -> list[Speculative]:
        """All that wait, oldest first."""
        return [entry for entry in self._entries if entry.waits]

    def add(
        self,
        candidate: Candidate,
        parents: tuple[int, ...] = (),
        indices: tuple[int, ...] = (),
        evaluation: ValsetEvaluation[Any, Any] | None = None,
    ) -> Speculative:
        """Put a candidate up for speculation; its speculative ``parents`` wait, too."""
        self._entries.append(Speculative(len(self._entries), dict(candidate), parents, indices, evaluation))
        return self._entries[-1]

    def confirm(self, key: int, index: int) -> None:
        """Its validation is done: it is an ordinary candidate now, and its children stand on firm ground.

        It may have gone with one under it: its own validation has the last word.

        Args:
            index: its place in gepa's pool.
        """
        entry = self._entries[key]
        entry.leaves()
        entry.parents, entry.indices = (), (index,)
        self.fallen.discard(key)

    def remove(self, key: int) -> None:
        """Take one that waits back with its descendants, as if they had never been there."""
        gone = {key}
        for entry in self.all():
            if entry.key in gone or gone & set(entry.parents):
                gone.add(entry.key)
                entry.leaves()
        self.fallen |= gone

    def resolve(self, keys: tuple[int, ...]) -> tuple[int, ...]:
        """The confirmed candidates that stand for ``keys``: themselves, or where they did not last their parents."""
        entries = [self._entries[key] for key in keys]
        return tuple(dict.fromkeys(one for entry in entries for one in (*self.resolve(entry.parents), *entry.indices)))


A = ParamSpec("A")
T = TypeVar("T")
State = GEPAState[Any, Any]
CHECKPOINT_SECONDS = 5.0
"""With ``log_dir``, the least time between two checkpoints of an asynchronous run; in lockstep every step is one."""


class Pool(GEPAEngine[Any, Any, Any, Any]):
    """gepa's state, its version, the speculative candidates, and the thread that writes them.

    Args:
        run: whose pool it is: its journal, metric calls and schedule.
        settings: what gepa's engine is told.
        parts: gepa's strategies.
        adapter: keeps state of its own that is saved with the pool's.
        seed_candidate: component -> text.
        trainset, valset: gepa's loaders; equal where there is one set of examples.
        logger: gepa's logger protocol.
        best: a gepa callback that hears of candidates before all others.
    """

    def __init__(
        self,
        run: EvolutionRun,
        settings: GepaSettings,
        parts: Parts,
        adapter: Any,
        seed_candidate: Candidate,
        trainset: DataLoader[Any, Any],
        valset: DataLoader[Any, Any],
        logger: Any,
        best: Any,
    ) -> None:
        super().__init__(
            adapter=adapter,
            run_dir=settings.log_dir,
            valset=valset,
            seed_candidate=seed_candidate,
            perfect_score=settings.perfect_score,  # pyright: ignore[reportArgumentType]  # None is no bound
            seed=settings.seed,  # pyright: ignore[reportArgumentType]  # as dspy.GEPA: None draws another each time
            reflective_proposer=SimpleNamespace(trainset=trainset),  # pyright: ignore[reportArgumentType]
            merge_proposer=parts.merge,
            frontier_type=settings.frontier_type,
            logger=logger,
            experiment_tracker=parts.tracker,
            callbacks=[best, *(parts.callbacks or [])],  # pyright: ignore[reportArgumentType]  # gepa asks hasattr
            track_best_outputs=settings.track_best_outputs,
            use_cloudpickle=settings.use_cloudpickle,
            stop_callback=parts.stopper,
            val_evaluation_policy=parts.val_evaluation_policy,
            acceptance_criterion=parts.acceptance_criterion,
            selection_strategy=parts.selection_strategy,
            evaluation_cache=parts.cache,
        )
        self.parts, self.best = parts, best
        self.skips_perfect = settings.skip_perfect_score
        """A parent's minibatch with perfect scores alone is not reflected on."""
        self._draws_tree = self.run_dir is not None or settings.use_wandb or settings.use_mlflow
        self.trainset = trainset
        self.loader: DataLoader[Any, Any] = valset
        self.shares_randomness = run.lockstep
        """Steps draw from the strategies' randomness, not from their own."""
        self.caches_minibatches = run.lockstep or valset is trainset
        """gepa's evaluation cache does not tell training from validation examples, so minibatch scores go into it only
        where both are the same data, and where gepa is to be equalled."""
        self.seed_confirmed = False
        self.speculative = SpeculativeCandidates()
        self.state: State = self._provisional_state()
        self._checkpoint_seconds = 0.0 if run.lockstep else CHECKPOINT_SECONDS
        self._saved_at = float("-inf")
        self._begun = set[int]()
        self._without_proposal = set[int]()
        """Steps that work on parents, and have no proposal that was evaluated yet."""
        self._early: dict[int, int] = {}
        """Step that selected before the seed was validated -> the candidate, whose score its log line waits for."""
        self._budget, self.journal = run.budget, run.journal
        self._writer = Threads(1, "pool")

    async def write(self, call: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
        """Run ``call`` in the writer's thread, after all calls made before."""
        return await self._writer.run(call, *args, **kwargs)

    @property
    def version(self) -> int:
        """The count of commits."""
        return len(self.state.program_candidates) - 1

    def close(self) -> None:
        """End the writer's thread, after the calls made before."""
        self._writer.close()

    # The methods below run in the writer's thread.

    def notify(self, method: str, **event: Any) -> None:
        """Tell every gepa callback that has ``method``."""
        notify_callbacks(self.callbacks, method, event)

    def start(self) -> bool:
        """Begin the run; True when a checkpoint in the run directory was loaded, so that the seed is confirmed."""
        if self.run_dir is not None:
            os.makedirs(self.run_dir, exist_ok=True)
        config = {
            "perfect_score": self.perfect_score,
            "seed": self.seed,
            "track_best_outputs": self.track_best_outputs,
        }
        sizes = {"trainset_size": len(self.trainset), "valset_size": len(self.loader)}
        self.notify("on_optimization_start", seed_candidate=self.seed_candidate, **sizes, config=config)
        if self.run_dir is None or not os.path.exists(os.path.join(self.run_dir, "gepa_state.bin")):
            return False
        self.confirm_seed(ValsetEvaluation[Any, Any]({}, {}, None))
        return True

    def confirm_seed(self, evaluation: ValsetEvaluation[Any, Any]) -> None:
        """Put the validated seed, or the checkpoint's candidates, where the provisional state was.

        The state stays the same object, since callbacks may hold it; what steps have already done to it stays.
        """
        early = self.state
        real: State = initialize_gepa_state(
            run_dir=self.run_dir,
            logger=self.logger,
            seed_candidate=self.seed_candidate,
            seed_valset_evaluation=self._writable(evaluation),
            track_best_outputs=self.track_best_outputs,
            frontier_type=self.frontier_type,
            evaluation_cache=self._initial_evaluation_cache,
        )
        if early.full_program_trace:
            real.i = early.i
            real.full_program_trace = early.full_program_trace
            real.named_predictor_id_to_update_next_for_program_candidate = (
                early.named_predictor_id_to_update_next_for_program_candidate
            )
        early.__dict__.update(real.__dict__)
        self._sync_state_to_adapter(early)
        self.seed_confirmed = True
        self._report_seed()
        if isinstance(self.logger, IterationLog):
            for number, candidate in self._early.items():
                self.logger.log_first(number + 1, f"Selected program {candidate} score: {self.score_of(candidate)}")
            self.logger.release()
        early.add_budget_hook(self._on_calls)

    def save(self, *, force: bool = False) -> bool:
        """Write gepa's checkpoint, unless the last one is fresh enough; whether it was written."""
        if not self.seed_confirmed or (not force and time.monotonic() - self._saved_at < self._checkpoint_seconds):
            return False
        self._sync_adapter_state_to_state(self.state)
        counted = self.state.total_num_evals
        # What live steps have spent is spent, even if the run is killed before they end.
        self.state.total_num_evals = max(counted, self._budget.spent)
        try:
            self._write_checkpoint()
        finally:
            self.state.total_num_evals = counted
            if self.run_dir is not None:
                make_private(self.run_dir)
        self._saved_at = time.monotonic()
        return True

    def _write_checkpoint(self) -> None:
        """As gepa does; outputs that cannot be pickled are written as the journal has them.

        That of a predictor whose signature was made from a string is one.
        """
        state = self.state
        best, cache = state.best_outputs_valset, state.evaluation_cache
        try:
            state.save(self.run_dir, use_cloudpickle=self.use_cloudpickle)
        except OSError:
            raise
        except Exception:
            if best is not None:
                state.best_outputs_valset = {
                    i: [(one, as_writable(output, pickle.dumps)) for one, output in of] for i, of in best.items()
                }
            if cache is not None:
                known = cache._cache  # pyright: ignore[reportPrivateUsage]
                entries = {
                    key: replace(one, output=as_writable(one.output, pickle.dumps)) for key, one in known.items()
                }
                state.evaluation_cache = EvaluationCache(entries)
            state.save(self.run_dir, use_cloudpickle=self.use_cloudpickle)
        finally:
            state.best_outputs_valset, state.evaluation_cache = best, cache

    def begin_step(self, step: Step) -> dict[str, Any]:
        """Advance the iteration; returns the step's entry of the run log. One that goes on may have one already."""
        if self.save():
            self.notify("on_state_saved", iteration=self.state.i + 1, run_dir=self.run_dir)
        self.state.i = max(self.state.i, step.number)
        trace = self.log_entry(step)
        self._begun.add(step.number)
        self.notify("on_iteration_start", iteration=step.number + 1, state=self.state, trainset_loader=self.trainset)
        return trace

    def end_step(self, step: Step, accepted: bool, counts: bool = True) -> bool:
        """Report a step's end and ask the stoppers; True when one of them says stop.

        Args:
            counts: the step is an iteration to stoppers that count those without improvement.
        """
        self.count_calls()
        self._begun.discard(step.number)
        if step.number in self._without_proposal:
            self._without_proposal.discard(step.number)
            self.logger.log(f"Iteration {step.number + 1}: Reflective mutation did not propose a new candidate")
        self.notify("on_iteration_end", iteration=step.number + 1, state=self.state, proposal_accepted=accepted)
        self._log_lines_of(step.number)
        self.keep_strategies()
        return self.should_stop(counts)

    def should_stop(self, counts: bool = True) -> bool:
        """Ask the stoppers; before the seed is confirmed there is nothing to ask them about."""
        return self.seed_confirmed and self.parts.stopper(self.state, counts)

    def keep_strategies(self) -> None:
        """Let the journal know where the strategies stand."""
        if self.journal is not None:
            self.journal.journal.set_state(
                "strategies", strategies_of(self.parts, self.adapter, self.state, self.shares_randomness, id_text)
            )

    # The parts of a step.

    def expected_score(self, proposals: Sequence[Proposal]) -> float:
        """What the best of the proposals may reach in validation: its parent's score and its gain on the screen.

        It orders validations: the child that is likely to be the next parent is validated first.
        """

        def reach(one: Proposal) -> float:
            after, before = one.subsample_scores_after or [], one.subsample_scores_before or []
            parent = self.score_of(one.parent_program_ids[0]) if self.seed_confirmed else 0.0
            return parent + (sum(after) - sum(before)) / max(1, len(after))

        return max(map(reach, proposals))

    def parents_start(self, step: Step, tasks: Sequence[Task]) -> None:
        """The parents are about to be evaluated."""
        for task in tasks:
            self.evaluation_start(step, task.minibatch, self._parents_of(task), task.parent_idx)

    def parents_end(self, step: Step, tasks: Sequence[Task], evaluations: Sequence[Batch]) -> None:
        """The parents are evaluated."""
        for task, batch in zip(tasks, evaluations, strict=True):
            self.evaluation_end(step, batch, self._parents_of(task), task.parent_idx)
        self.count_calls()
        for task, batch in zip(tasks, evaluations, strict=True):
            self.remember(task.parent_candidate, task, batch)
        first, iteration = tasks[0], step.number + 1
        self.log_entry(step).update(
            selected_program_candidate=first.parent_idx,
            subsample_ids=first.minibatch_ids,
            n_tasks=len(tasks),
            tasks=[{"parent_idx": task.parent_idx, "subsample_ids": list(task.minibatch_ids)} for task in tasks],
        )
        self._without_proposal.add(step.number)
        if self.seed_confirmed:
            score = self.score_of(first.parent_idx)
            self.logger.log(f"Iteration {iteration}: Selected program {first.parent_idx} score: {score}")
        else:
            self._early[step.number] = first.parent_idx
        self.experiment_tracker.log_metrics(
            {
                "iteration": iteration,
                "selected_program_candidate": first.parent_idx,
                "total_metric_calls": self.state.total_num_evals,
            },
            step=iteration,
        )

    def nothing_in(self, evaluation: Batch) -> str | None:
        """Why a parent's evaluation is not worth a reflection; None when it is."""
        if not evaluation.trajectories:
            return "no_trajectories"
        perfect = self.perfect_score
        if self.skips_perfect and perfect is not None and all(one >= perfect for one in evaluation.scores):
            return "all_scores_perfect"
        return None

    def nothing_to_improve(self, step: Step, task: Task, evaluation: Batch) -> str | None:
        """Why a parent's minibatch is not reflected on; None when it is."""
        reason = self.nothing_in(evaluation)
        if reason is not None:
            what = "No trajectories" if reason == "no_trajectories" else "All subsample scores perfect"
            self.logger.log(f"Iteration {step.number + 1}: {what} for parent {task.parent_idx}. Skipping.")
            self.notify(
                "on_evaluation_skipped",
                iteration=step.number + 1,
                candidate_idx=task.parent_idx,
                reason=reason,
                scores=evaluation.scores,
                is_seed_candidate=task.parent_idx == 0,
            )
        return reason

    def choose_components(self, step: Step, task: Task, evaluation: Batch) -> list[str]:
        """Ask the component selector which texts to rewrite."""
        with self.acting_for(step):
            return self.parts.component_selector(
                self.state, evaluation.trajectories, evaluation.scores, task.parent_idx, task.parent_candidate
            )

    def reflection_starts(
        self,
        step: Step,
        task: Task,
        components: list[str],
        dataset: Mapping[str, Sequence[Mapping[str, Any]]],
    ) -> None:
        """The reflective dataset is there."""
        records = {name: [dict(record) for record in rows] for name, rows in dataset.items()}
        iteration = step.number + 1
        self.notify(
            "on_reflective_dataset_built",
            iteration=iteration,
            candidate_idx=task.parent_idx,
            components=components,
            dataset=records,
        )
        self.notify(
            "on_proposal_start",
            iteration=iteration,
            parent_candidate=task.parent_candidate,
            components=components,
            reflective_dataset=records,
        )

    def proposed(self, step: Step, texts: dict[str, str]) -> None:
        """The reflection has written new texts."""
        iteration = step.number + 1
        self.notify("on_proposal_end", iteration=iteration, new_instructions=texts, prompts={}, raw_lm_outputs={})
        for name, text in texts.items():
            self.logger.log(f"Iteration {iteration}: Proposed new text for {name}: {text}")

    def children_start(self, step: Step, children: Sequence[Child]) -> None:
        """The children are about to be screened."""
        for child in children:
            self.evaluation_start(step, child.parent.task.minibatch, [child.parent.task.parent_idx])

    def children_end(self, step: Step, screened: Sequence[tuple[Child, Batch]]) -> list[tuple[Child, Proposal]]:
        """The children are screened; those that go on, with gepa's proposals for them."""
        self._without_proposal.discard(step.number)
        for child, batch in screened:
            self.evaluation_end(step, batch, [child.parent.task.parent_idx])
        self.count_calls()
        trace = self.log_entry(step)
        for child, batch in screened:
            self.remember(child.candidate, child.parent.task, batch)
            trace["tasks"][child.parent.index]["subsample_scores"] = list(child.parent.evaluation.scores)
            trace["tasks"][child.parent.index]["new_subsample_scores"] = list(batch.scores)
        before, after = screened[0][0].parent.evaluation.scores, screened[0][1].scores
        trace["subsample_scores"], trace["new_subsample_scores"] = before, after
        self.experiment_tracker.log_metrics(
            {
                "subsample_score": sum(before),
                "new_subsample_score": sum(after),
                "subsample/before": sum(before),
                "subsample/after": sum(after),
                "total_metric_calls": self.state.total_num_evals,
            },
            step=step.number + 1,
        )
        children = {id(made := child.proposal(step, batch)): (child, made) for child, batch in screened}
        kept = self._choose(step, [proposal for _, proposal in children.values()])
        return [children[id(one)] for one in kept]  # a selection strategy may change the order

    def _choose(self, step: Step, proposals: list[Proposal]) -> list[Proposal]:
        """Ask the selection strategy, report what it left, and return what goes on.

        gepa's engine does so and then evaluates, in one call: it is left where it would evaluate.
        """
        try:
            with self.acting_for(step):
                self._run_reflective_batch(proposals, self.state)
        except Chosen as chosen:
            return [one for candidate in chosen.candidates for one in proposals if one.candidate is candidate]
        return []

    def _evaluate_programs_on_valset(self, programs: list[Candidate], state: State) -> Any:
        raise Chosen(*programs)

    def lookup(self, candidate: Candidate, ids: Sequence[Any] | None = None) -> ValidationPlan:
        """Ask the cache for what is known of a candidate on validation examples; on those that the policy names."""
        cache = self.state.evaluation_cache
        wanted = list(self.val_evaluation_policy.get_eval_batch(self.loader, self.state) if ids is None else ids)
        cached, missing = ({}, wanted) if cache is None else cache.get_batch(candidate, wanted)
        return ValidationPlan(candidate, cached, missing)

    def complete_validation(self, plan: ValidationPlan, rollouts: Mapping[Any, Rollout]) -> ValsetEvaluation[Any, Any]:
        """Put fresh results into the cache, and together with the cached ones; their order leaves no trace."""
        cache, fresh = self.state.evaluation_cache, evaluation_of({i: rollouts[i] for i in plan.missing})
        objectives = fresh.objective_scores_by_val_id
        if cache is not None and plan.missing:
            cache.put_batch(
                plan.candidate,
                plan.missing,
                [fresh.outputs_by_val_id[i] for i in plan.missing],
                [fresh.scores_by_val_id[i] for i in plan.missing],
                None if objectives is None else [objectives[i] for i in plan.missing],
            )
        known = {i: entry.objective_scores for i, entry in plan.cached.items() if entry.objective_scores is not None}
        return ValsetEvaluation(
            outputs_by_val_id={**{i: e.output for i, e in plan.cached.items()}, **fresh.outputs_by_val_id},
            scores_by_val_id={**{i: e.score for i, e in plan.cached.items()}, **fresh.scores_by_val_id},
            objective_scores_by_val_id={**known, **(objectives or {})} or None,
        )

    # Crossovers.

    def crossover_starts(self, step: Step, plan: Crossover) -> None:
        """A crossover is about to be screened."""
        self.evaluation_start(step, self.loader.fetch(list(plan.ids)), list(plan.parents), traced=False)

    def crossover_ended(
        self,
        step: Step,
        plan: Crossover,
        lookup: ValidationPlan,
        fresh: Mapping[Any, Rollout],
    ) -> Proposal | None:
        """Judge a crossover as gepa does: not worse than the better of its parents. None when it is."""
        result = self.complete_validation(lookup, fresh)
        objectives, scores = result.objective_scores_by_val_id, [result.scores_by_val_id[i] for i in plan.ids]
        iteration = step.number + 1
        batch: Batch = EvaluationBatch(
            outputs=[result.outputs_by_val_id[i] for i in plan.ids],
            scores=scores,
            objective_scores=[objectives[i] for i in plan.ids] if objectives else None,
        )
        self.evaluation_end(step, batch, list(plan.parents))
        self.log_entry(step).update(
            id1_subsample_scores=list(plan.parent_scores[0]),
            id2_subsample_scores=list(plan.parent_scores[1]),
            new_program_subsample_scores=scores,
        )
        self.count_calls()
        self.notify(
            "on_merge_attempted", iteration=iteration, parent_ids=list(plan.parents), merged_candidate=plan.candidate
        )
        sums = [sum(of_parent) for of_parent in plan.parent_scores]
        if sum(scores) < max(sums):
            reason = f"Merged score {sum(scores)} worse than both parents {sums}"
            self.logger.log(
                f"Iteration {iteration}: New program subsample score {sum(scores)} is worse than both parents {sums}, "
                "skipping merge"
            )
            self.notify("on_merge_rejected", iteration=iteration, parent_ids=list(plan.parents), reason=reason)
            return None
        return CandidateProposal(
            candidate=plan.candidate,
            parent_program_ids=list(plan.parents),
            subsample_indices=list(plan.ids),
            subsample_scores_before=[float(one) for one in sums],
            subsample_scores_after=scores,
            tag="merge",
            metadata={"ancestor": plan.ancestor},
        )

    def remember(self, candidate: Candidate, task: Task, batch: Batch) -> None:
        """gepa's cache has one key for a training and a validation example of equal id; only lockstep keeps that."""
        cache = self.state.evaluation_cache
        if cache is not None and self.caches_minibatches and len(batch.scores) == len(task.minibatch_ids):
            objectives = list(batch.objective_scores) if batch.objective_scores else None
            cache.put_batch(candidate, task.minibatch_ids, batch.outputs, batch.scores, objectives)

    def _parents_of(self, task: Task) -> list[int]:
        return [parent for parent in self.state.parent_program_for_candidate[task.parent_idx] if parent is not None]

    def evaluation_start(
        self, step: Step, inputs: list[Any], parents: list[int], index: int | None = None, traced: bool = True
    ) -> None:
        """A candidate is about to be evaluated; ``index``: its place in gepa's pool, where it has one."""
        self.notify(
            "on_evaluation_start",
            iteration=step.number + 1,
            candidate_idx=index,
            batch_size=len(inputs),
            capture_traces=traced,
            parent_ids=parents,
            inputs=inputs,
            is_seed_candidate=index == 0,
        )

    def evaluation_end(self, step: Step, batch: Batch, parents: list[int], index: int | None = None) -> None:
        """A candidate is evaluated."""
        self.notify(
            "on_evaluation_end",
            iteration=step.number + 1,
            candidate_idx=index,
            scores=batch.scores,
            has_trajectories=bool(batch.trajectories),
            parent_ids=parents,
            outputs=batch.outputs,
            trajectories=batch.trajectories,
            objective_scores=batch.objective_scores,
            is_seed_candidate=index == 0,
        )

    # Candidates that come in, or go.

    def release(self, child: Screened, plan: ValidationPlan, found: Mapping[Any, Rollout]) -> int | None:
        """Let selection pick a child whose prefix is above the pool's best; its handle, or None where it is not.

        Args:
            plan: of the prefix.
        """
        known = self.complete_validation(plan, found)
        mine = known.scores_by_val_id
        best = self.state.prog_candidate_val_subscores[self.val_evaluation_policy.get_best_program(self.state)]
        common = [i for i in mine if i in best]
        if not common or sum(mine[i] for i in common) / len(common) <= sum(best[i] for i in common) / len(common):
            return None
        if self.state.frontier_type != "instance" and not known.objective_scores_by_val_id:
            return None  # gepa could not place it in the frontier yet
        parents = () if child.base is None or child.base not in self.speculative else (child.base,)
        indices = tuple(child.proposal.parent_program_ids)
        return self.speculative.add(child.proposal.candidate, parents, indices, known).key

    def withdraw(self, keys: Iterable[int | None]) -> None:
        """Take speculative candidates back, as if they had never been there; what was made from them is stale."""
        for key in keys:
            if key is not None and key in self.speculative:  # else it went with one under it
                self.speculative.remove(key)

    def commit(self, step: Step, work: Sequence[Validated]) -> list[Commit]:
        """Add validated proposals, in order; one that fell behind its prefix leaves what was made from it stale."""
        proposals = [self._on_firm_ground(one) for one in work]
        if self.journal is not None:
            entries = [
                (one.candidate, one.parent_program_ids, its.evaluation)
                for one, its in zip(proposals, work, strict=True)
            ]
            write_commits(self.journal, step.number, len(self.state.program_candidates), self.version, entries)
        commits: list[Commit] = []
        merge, best = self.parts.merge, self.best_score()
        for its, proposal in zip(work, proposals, strict=True):
            before, after = sum(proposal.subsample_scores_before or []), sum(proposal.subsample_scores_after or [])
            if proposal.tag == "reflective_mutation":
                screened = f"subsample score {before} -> {after}"
                self.logger.log(f"Iteration {step.number + 1}: Accepted candidate ({screened}); running full eval.")
            done = self.add(step, proposal, its.evaluation, its.calls)
            of_it = {"new_candidate_idx": done.candidate, "parent_ids": proposal.parent_program_ids}
            if proposal.tag == "merge":
                if merge is not None:  # else the run goes on without merges, and this one was planned before
                    merge.merges_due -= 1
                    merge.total_merges_tested += 1
                self.notify("on_merge_accepted", iteration=step.number + 1, **of_it)
            else:
                self._log_proposal_lm_calls(step.number + 1, proposal, candidate_idx=done.candidate)
            self.notify("on_candidate_accepted", iteration=step.number + 1, new_score=after, **of_it)
            if proposal.tag != "merge" and merge is not None:
                merge.last_iter_found_new_program = True
                merge.schedule_if_needed()
            if its.key is not None:
                self.speculative.confirm(its.key, done.candidate)
                if best is not None and done.score < best:
                    self.speculative.fallen.add(its.key)
            commits.append(done)
        self.save(force=True)
        return commits

    def _on_firm_ground(self, one: Validated) -> Proposal:
        """The proposal, with confirmed parents in the place of the speculative one that it was made from."""
        proposal = one.proposal
        stands_for = () if one.base is None else self.speculative.resolve((one.base,))
        return replace(proposal, parent_program_ids=list(stands_for)) if stands_for else proposal

    def count_calls(self) -> None:
        """Bring gepa's count of metric calls to what was made by now."""
        if (calls := self._uncounted()) > 0:
            self.state.increment_evals(calls)

    def _uncounted(self) -> int:
        return max(0, self._budget.spent - self.state.total_num_evals) if self.seed_confirmed else 0

    def add(self, step: Step, proposal: Proposal, evaluation: ValsetEvaluation[Any, Any], calls: int) -> Commit:
        """Add a validated candidate, whose validation cost ``calls`` at most; resume.py adds an interrupted run's."""
        with self.acting_for(step):
            index, best = self._add_evaluated_program(
                new_program=proposal.candidate,
                state=self.state,
                parent_program_idx=proposal.parent_program_ids,
                valset_evaluation=self._writable(evaluation),
                num_actual_evals=min(calls, self._uncounted()),
            )
        score = self.val_evaluation_policy.get_valset_score
        return Commit(
            index,
            self.version,
            score(index, self.state),
            score(best, self.state),
            _generations(self.state.parent_program_for_candidate)[index],
            tuple(proposal.parent_program_ids),
        )

    def commits_since(self, version: int) -> list[PastCommit]:
        """What was committed after ``version``, oldest first."""
        state, found = self.state, list[PastCommit]()
        for index in range(version + 1, len(state.program_candidates)):
            parents = [one for one in state.parent_program_for_candidate[index] if one is not None]
            parent = max(parents, key=self.score_of)
            texts, before = state.program_candidates[index], state.program_candidates[parent]
            names = [name for name in texts if texts[name] != before[name]]
            found.append(
                PastCommit(
                    {name: texts[name] for name in names},
                    {name: before[name] for name in names},
                    self.score_of(index) - self.score_of(parent),
                )
            )
        return found

    def reject(self, step: Step, proposal: Proposal, reason: str | None = None) -> None:
        """Report a proposal that goes no further."""
        self._report_rejected_proposal(proposal, step.number + 1, self.state, reason_override=reason)

    def give_up(self, step: Step, proposal: Proposal, scores: list[float], examples: int) -> None:
        """Report one that could not pass its screen any more, with the scores that there are; none is stored."""
        self._without_proposal.discard(step.number)
        self.evaluation_end(step, scored(scores), proposal.parent_program_ids)
        proposal = replace(proposal, subsample_scores_after=scores)
        self.reject(
            step, proposal, reason=f"it cannot pass its screen any more, after {len(scores)} of {examples} examples"
        )

    def score_of(self, candidate: int) -> float:
        """A candidate's aggregate validation score; gepa's list of all of them costs a pass over the whole pool."""
        return self.state.get_program_average_val_subset(candidate)[0]

    def is_perfect(self, highest: float) -> bool:
        """Whether the best candidate has ``highest``, the best score that there can be, on every validation example.

        No later one can take its place then: of equals the first is returned.
        """
        if not self.seed_confirmed:
            return False
        scores = self.state.prog_candidate_val_subscores[self.val_evaluation_policy.get_best_program(self.state)]
        return all(scores.get(i, -math.inf) >= highest for i in self.loader.all_ids())

    def best_score(self) -> float | None:
        """The best aggregate validation score; None before the seed is confirmed."""
        if not self.seed_confirmed:
            return None
        policy = self.val_evaluation_policy
        return policy.get_valset_score(policy.get_best_program(self.state), self.state)

    def finish(self) -> None:
        """Save and tell the callbacks: the run came to its end."""
        self._end_iterations()  # a stop came while a step was selecting
        self.count_calls()  # the late part of a minibatch may end after its step
        if self.seed_confirmed:
            self.save(force=True)
            self._report_end()

    def fail(self, error: BaseException) -> None:
        """Save and tell the callbacks: the run ended by ``error``, and with it the steps that were on their way."""
        if isinstance(error, Exception):
            self.notify("on_error", iteration=self.state.i + 1, exception=error, will_continue=False)
        self._end_iterations()
        self.state.total_num_evals = max(self.state.total_num_evals, self._budget.spent)
        self.save(force=True)

    def _end_iterations(self) -> None:
        """Tell the callbacks that what they heard begin, and no step brought to an end, is over."""
        for number in sorted(self._begun):
            self.notify("on_iteration_end", iteration=number + 1, state=self.state, proposal_accepted=False)
            self._log_lines_of(number)
        self._begun.clear()

    def _log_lines_of(self, number: int) -> None:
        """The step has ended: where its lines had to wait for that, they are logged."""
        if isinstance(self.logger, IterationLog):
            self.logger.end(number + 1)

    def log_entry(self, step: Step) -> dict[str, Any]:
        """The step's entry of gepa's run log, made where there is none."""
        log = self.state.full_program_trace
        entry = next((one for one in reversed(log) if one["i"] == step.number), None)
        if entry is None:
            entry = {"i": step.number}
            log.append(entry)
        return entry

    @contextmanager
    def acting_for(self, step: Step) -> Generator[None, None, None]:
        """Let gepa's code, which reads the iteration and the newest log entry from the state, act for ``step``."""
        state = self.state
        newest, log = state.i, state.full_program_trace
        state.i, state.full_program_trace = step.number, [self.log_entry(step)]
        try:
            yield
        finally:
            state.i, state.full_program_trace = newest, log

    def _writable(self, evaluation: ValsetEvaluation[Any, Any]) -> ValsetEvaluation[Any, Any]:
        """The same; gepa writes outputs into the run directory, and ends the run where JSON does not have one."""
        if self.run_dir is None:
            return evaluation
        write = partial(json.dumps, default=json_default)
        outputs = {i: as_writable(output, write) for i, output in evaluation.outputs_by_val_id.items()}
        return replace(evaluation, outputs_by_val_id=outputs)

    def _report_seed(self) -> None:
        """What gepa logs of the seed (gepa 0.1.4, ``GEPAEngine.run``)."""
        state, tracker = self.state, self.experiment_tracker
        average, coverage = state.get_program_average_val_subset(0)
        front = list(state.pareto_front_valset.values())
        tracker.log_config(self._config())
        tracker.log_metrics(
            {
                "val_program_average": average,
                "best_score_on_valset": average,
                "val_evaluated_count_new_program": coverage,
                "val_total_count": len(self.loader),
                "total_metric_calls": state.total_num_evals,
                "valset_pareto_front_agg": sum(front) / len(front) if front else average,
                "new_program_idx": 0,
                "linear_pareto_front_program_idx": 0,
                "best_program_as_per_agg_score_valset": 0,
            },
            step=0,
        )
        iteration = 0 if self._begun else state.i + 1  # steps may have begun before the seed was validated
        examples = f"{coverage} / {len(self.loader)} examples"
        self.logger.log(f"Iteration {iteration}: {BASE}: {average} over {examples}")
        self.notify(
            "on_valset_evaluated",
            iteration=0,
            candidate_idx=0,
            candidate=self.seed_candidate,
            scores_by_val_id=dict(state.prog_candidate_val_subscores[0]),
            average_score=average,
            num_examples_evaluated=coverage,
            total_valset_size=len(self.loader),
            parent_ids=[],
            is_best_program=True,
            outputs_by_val_id=None,
        )

    def _report_end(self) -> None:
        """What gepa tells the callbacks and logs at the end of a run."""
        state, policy = self.state, self.val_evaluation_policy
        best = policy.get_best_program(state)
        self.notify(
            "on_optimization_end",
            best_candidate_idx=best,
            total_iterations=state.i,
            total_metric_calls=state.total_num_evals,
            final_state=state,
        )
        summary: dict[str, Any] = {
            "best_candidate_idx": best,
            "best_valset_score": policy.get_valset_score(best, state),
            "total_iterations": state.i,
            "total_candidates": len(state.program_candidates),
        }
        for name in sorted(self.seed_candidate):
            summary[f"seed/{name}"] = self.seed_candidate[name]
            summary[f"best/{name}"] = state.program_candidates[best][name]
        self.experiment_tracker.log_summary(summary)

    def _config(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "perfect_score": self.perfect_score,
            "frontier_type": self.frontier_type,
            "track_best_outputs": self.track_best_outputs,
            "use_cloudpickle": self.use_cloudpickle,
            "raise_on_exception": self.raise_on_exception,
            "trainset_size": len(self.trainset),
            "valset_size": len(self.loader),
            "seed_candidate_components": sorted(self.seed_candidate),
            "val_evaluation_policy": type(self.val_evaluation_policy).__name__,
            "has_merge_proposer": self.merge_proposer is not None,
            "run_dir": self.run_dir,
        }

    def _log_candidate_tree(self, state: State) -> None:
        """gepa draws the whole tree at every commit; only where somebody gets to see it."""
        if self._draws_tree:
            super()._log_candidate_tree(state)

    def _provisional_state(self) -> State:
        """A state in which the seed has no scores yet: steps may start, nothing can be compared."""
        state: State = GEPAState(self.seed_candidate, ValsetEvaluation[Any, Any]({}, {}, None))
        state.num_full_ds_evals = state.total_num_evals = 0
        state.evaluation_cache = self._initial_evaluation_cache
        return state

    def _on_calls(self, total: int, delta: int) -> None:
        remaining = self._get_remaining_budget(self.state)
        self.notify(
            "on_budget_updated",
            iteration=self.state.i + 1,
            metric_calls_used=total,
            metric_calls_delta=delta,
            metric_calls_remaining=remaining,
        )


def task_key(task: Task) -> tuple[Any, ...]:
    """Equal keys mean the same parent on the same minibatch."""
    return (tuple(sorted(task.parent_candidate.items())), tuple(task.minibatch_ids))


def evaluation_of(rollouts: Mapping[Any, Rollout]) -> ValsetEvaluation[Any, Any]:
    """Rollouts on validation examples as gepa has them."""
    objectives = {i: dict(one.objective_scores) for i, one in rollouts.items()}
    return ValsetEvaluation(
        outputs_by_val_id={i: one.output for i, one in rollouts.items()},
        scores_by_val_id={i: one.score for i, one in rollouts.items()},
        objective_scores_by_val_id=objectives if any(objectives.values()) else None,
    )


def scored(scores: list[float]) -> Batch:
    """An evaluation of which nobody needs more than the scores."""
    return EvaluationBatch([None] * len(scores), scores)


def _subsample(batch: Batch) -> SubsampleEvaluation:
    return SubsampleEvaluation(
        scores=batch.scores,
        outputs=batch.outputs,
        objective_scores=list(batch.objective_scores) if batch.objective_scores else None,
        trajectories=batch.trajectories,
    )


def _generations(parents: list[list[int | None]]) -> list[int]:
    """Steps from the seed along the longest line of parents, for each candidate."""
    steps: list[int] = []
    for line in parents:
        known = [steps[parent] for parent in line if parent is not None]
        steps.append(1 + max(known) if known else 0)
    return steps


def write_commits(
    journal: RunJournal,
    step: int | None,
    first: int,
    version: int,
    work: Sequence[tuple[Candidate, Sequence[int | None], ValsetEvaluation[Any, Any]]],
) -> None:
    """Write candidates that are about to enter gepa's pool, and wait until that is safe. Runs in the pool's writer.

    Args:
        step: that made them; None for another program's.
        first: the first one's index in the pool.
        version: the pool's, before them.

    Raises:
        JournalError: it is not.
    """
    for offset, (candidate, parents, evaluation) in enumerate(work):
        objectives = evaluation.objective_scores_by_val_id
        journal.record_commit(
            step,
            first + offset,
            version + offset + 1,
            candidate,
            parents,
            {id_text(one): score for one, score in evaluation.scores_by_val_id.items()},
            more=None if objectives is None else {id_text(i): dict(o) for i, o in objectives.items()},
        )
    journal.journal.flush_blocking()
