"""The pool and its one writer.

Everything that reads or changes gepa's state, and every callback, selector and stopper, runs in one thread,
one call at a time, in the order in which the calls were made (docs/architecture.md).
The pool is gepa's engine without its loop: how a candidate is added, reported and logged is gepa's code.
"""

from __future__ import annotations

import json
import math
import pickle
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar
from urllib.parse import quote

import cloudpickle
from gepa.core.adapter import EvaluationBatch
from gepa.core.data_loader import DataLoader
from gepa.core.engine import GEPAEngine
from gepa.core.state import EvaluationCache, GEPAState, ValsetEvaluation, initialize_gepa_state
from gepa.gepa_utils import json_default
from gepa.proposer.base import CandidateProposal
from gepa.visualization import candidate_tree_html_from_data

from dspy_flashevolve.engine.loop import Threads
from dspy_flashevolve.engine.run import EvolutionRun
from dspy_flashevolve.engine.staleness import PastCommit
from dspy_flashevolve.engine.steps import Step
from dspy_flashevolve.engine.store import Rollout, Store, id_text, write_private
from dspy_flashevolve.gepa.options import Chosen, Parts, strategies_of
from dspy_flashevolve.gepa.published import SpeculativeCandidates
from dspy_flashevolve.gepa.records import (
    Batch,
    Candidate,
    Child,
    Commit,
    Crossover,
    Proposal,
    Screened,
    Task,
    Validated,
    ValidationPlan,
    evaluation_of,
    scored,
)
from dspy_flashevolve.gepa.reports import Reports, State, score_of
from dspy_flashevolve.gepa.settings import GepaSettings
from dspy_flashevolve.programs.checkpoint import CHECKPOINT
from dspy_flashevolve.programs.records import as_writable

A = ParamSpec("A")
T = TypeVar("T")
LESS_THAN = "\ue000"
"""Stands for "<" in a page of gepa's: a character of Unicode's that means nothing."""
CHECKPOINT_SECONDS = 5.0
"""With ``log_dir``, the least time between two checkpoints of an asynchronous run; in lockstep every step is one."""


class Pool(GEPAEngine[Any, Any, Any, Any]):
    """gepa's state, its version, the speculative candidates, and the thread that writes them.

    Args:
        trainset, valset: gepa's loaders; equal where there is one set of examples.
        best: a gepa callback that hears of candidates before all others.
        checkpoint: gepa's state, as an earlier run on the directory has left it; None where there was none.
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
        checkpoint: State | None = None,
    ) -> None:
        told: list[Any] = [best, *(parts.callbacks or [])]
        super().__init__(
            adapter=adapter,
            run_dir=None,  # what gepa writes everybody may read: see `save` and `write_best_outputs`
            valset=valset,
            seed_candidate=seed_candidate,
            perfect_score=settings.perfect_score,  # pyright: ignore[reportArgumentType]  # None is no bound
            seed=settings.seed,  # pyright: ignore[reportArgumentType]  # as dspy.GEPA: None draws another each time
            reflective_proposer=SimpleNamespace(trainset=trainset),  # pyright: ignore[reportArgumentType]
            merge_proposer=parts.merge,
            frontier_type=settings.frontier_type,
            logger=logger,
            experiment_tracker=parts.tracker,
            callbacks=told,
            track_best_outputs=settings.track_best_outputs,
            use_cloudpickle=settings.use_cloudpickle,
            stop_callback=parts.stopper,
            val_evaluation_policy=parts.val_evaluation_policy,
            acceptance_criterion=parts.acceptance_criterion,
            selection_strategy=parts.selection_strategy,
            evaluation_cache=parts.cache,
        )
        self.parts, self.best, self._checkpoint = parts, best, checkpoint
        self._directory = None if settings.log_dir is None else Path(settings.log_dir)
        self.skips_perfect = settings.skip_perfect_score
        """A parent's minibatch with perfect scores alone is not reflected on."""
        self._draws_tree = self._directory is not None or settings.use_wandb or settings.use_mlflow
        self.trainset = trainset
        self.loader: DataLoader[Any, Any] = valset
        self.shares_randomness = run.lockstep
        """Steps draw from the strategies' randomness, not from their own."""
        self.caches_minibatches = run.lockstep or valset is trainset
        """gepa's evaluation cache does not tell training from validation examples, so minibatch scores go into it only
        where both are the same data, and where gepa is to be equalled."""
        self.seed_confirmed = False
        self.grown: dict[int, list[str]] = {}
        """Candidate -> its components that join what several children added: of equals, one without is returned."""
        self.speculative = SpeculativeCandidates()
        # The seed has no scores yet: steps may start, nothing can be compared.
        self.state: State = GEPAState(seed_candidate, ValsetEvaluation[Any, Any]({}, {}, None))
        self.state.num_full_ds_evals = self.state.total_num_evals = 0
        self.state.evaluation_cache = parts.cache
        self._checkpoint_seconds = 0.0 if run.lockstep else CHECKPOINT_SECONDS
        self._saved_at = float("-inf")
        self.reports = Reports(self.state, told, logger, parts.tracker, trainset, valset)
        """Tells callbacks, log and tracker; to be used in the writer."""
        self._budget, self.store = run.budget, run.store
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

    def start(self) -> bool:
        """Begin the run; True when it goes on from a checkpoint, so that the seed is confirmed."""
        self.reports.notify(
            "on_optimization_start", seed_candidate=self.seed_candidate, trainset_size=len(self.trainset),
            valset_size=len(self.loader),
            config={name: getattr(self, name) for name in ("perfect_score", "seed", "track_best_outputs")},
        )  # fmt: skip
        if self._checkpoint is None:
            return False
        self.confirm_seed(ValsetEvaluation[Any, Any]({}, {}, None))
        return True

    def confirm_seed(self, evaluation: ValsetEvaluation[Any, Any]) -> None:
        """Put the validated seed, or the checkpoint's candidates, where the provisional state was.

        The state stays the same object, since callbacks may hold it; what steps have already done to it stays.
        """
        early = self.state
        if (real := self._checkpoint) is None:
            real = initialize_gepa_state(
                run_dir=None,
                logger=self.logger,
                seed_candidate=self.seed_candidate,
                seed_valset_evaluation=evaluation,
                track_best_outputs=self.track_best_outputs,
                frontier_type=self.frontier_type,
                evaluation_cache=self._initial_evaluation_cache,
            )
        elif self._initial_evaluation_cache is None or real.evaluation_cache is None:
            real.evaluation_cache = self._initial_evaluation_cache
        if early.full_program_trace:
            real.i = early.i
            real.full_program_trace = early.full_program_trace
            real.named_predictor_id_to_update_next_for_program_candidate = (
                early.named_predictor_id_to_update_next_for_program_candidate
            )
        early.__dict__.update(real.__dict__)
        self._sync_state_to_adapter(early)
        self.seed_confirmed = True
        self.reports.seed_validated(self._config())
        early.add_budget_hook(self._on_calls)
        for example, output in evaluation.outputs_by_val_id.items():
            self._write_output(example, 0, 0, output)

    def save(self, *, force: bool = False) -> bool:
        """Write gepa's checkpoint, unless the last one is fresh enough; whether it was written."""
        if not self.seed_confirmed or (not force and time.monotonic() - self._saved_at < self._checkpoint_seconds):
            return False
        self._sync_adapter_state_to_state(self.state)
        if self._directory is not None:
            self._write_checkpoint(self._directory)
        self._saved_at = time.monotonic()
        return True

    def _write_checkpoint(self, directory: Path) -> None:
        """Write what ``GEPAState.save`` writes.

        Outputs that cannot be pickled are written as the journal has them: those of a predictor whose signature was
        made from a string, say.
        """
        state, write = self.state, cloudpickle.dumps if self.use_cloudpickle else pickle.dumps
        left_out = state._EXCLUDED_FROM_SERIALIZATION  # pyright: ignore[reportPrivateUsage]
        held = {name: value for name, value in vars(state).items() if name not in left_out}
        # What live steps have spent is spent, even if the run is killed before they end.
        held["total_num_evals"] = max(state.total_num_evals, self._budget.spent)
        try:
            content = write(held)
        except Exception:
            kept = partial(as_writable, write=pickle.dumps)
            if (best := state.best_outputs_valset) is not None:
                held["best_outputs_valset"] = {
                    example: [(index, kept(output)) for index, output in outputs] for example, outputs in best.items()
                }
            if (cache := state.evaluation_cache) is not None:
                known = cache._cache  # pyright: ignore[reportPrivateUsage]
                entries = {key: replace(entry, output=kept(entry.output)) for key, entry in known.items()}
                held["evaluation_cache"] = EvaluationCache(entries)
            content = write(held)
        write_private(directory / CHECKPOINT, content)
        if state.full_program_trace:
            write_private(directory / "run_log.json", _json(state.full_program_trace))
        write_private(directory / "candidates.json", _json(state.program_candidates))

    def write_best_outputs(self) -> None:
        """Write the outputs of the newest candidate that are better than all before, as gepa does."""
        newest = len(self.state.program_candidates) - 1
        for example, outputs in (self.state.best_outputs_valset or {}).items():
            if outputs[0][0] == newest:
                self._write_output(example, self.state.i + 1, newest, outputs[0][1])

    def _write_output(self, example: Any, iteration: int, candidate: int, output: Any) -> None:
        if self._directory is not None:
            folder = self._directory / "generated_best_outputs_valset" / f"task_{quote(str(example), safe='')}"
            write_private(folder / f"iter_{iteration}_prog_{candidate}.json", _json(as_writable(output, _json)))

    def begin_step(self, step: Step) -> dict[str, Any]:
        """Advance the iteration; returns the step's entry of the run log. One that goes on may have one already."""
        if self.save():
            directory = None if self._directory is None else str(self._directory)
            self.reports.notify("on_state_saved", self.state.i + 1, run_dir=directory)
        self.state.i = max(self.state.i, step.number)
        trace = self.log_entry(step)
        self.reports.step_begins(step)
        return trace

    def end_step(self, step: Step, accepted: bool, counts: bool = True, is_integrated: bool = False) -> bool:
        """Report a step's end and ask the stoppers, those that count iterations only where it ``counts``; True to
        stop."""
        self.count_calls()
        self.reports.step_ended(step, accepted, is_integrated)
        self.keep_strategies()
        return self.should_stop(counts)

    def should_stop(self, counts: bool = True) -> bool:
        """Ask the stoppers; before the seed is confirmed there is nothing to ask them about."""
        return self.seed_confirmed and self.parts.stopper(self.state, counts)

    def keep_strategies(self) -> None:
        """Write down where the strategies stand."""
        self.store.set_state(
            "gepa strategies",
            lambda: strategies_of(self.parts, self.adapter, self.state, self.shares_randomness, id_text),
        )

    # The parts of a step.

    def expected_score(self, proposals: Sequence[Proposal]) -> float:
        """Estimate what the best proposal reaches in validation: its parent's score plus its gain on the screen.

        It orders validations: the child that is likely to be the next parent is validated first.
        """
        reach: list[float] = []
        for proposal in proposals:
            after, before = proposal.subsample_scores_after or [], proposal.subsample_scores_before or []
            parent = self.score_of(proposal.parent_program_ids[0]) if self.seed_confirmed else 0.0
            reach.append(parent + (sum(after) - sum(before)) / max(1, len(after)))
        return max(reach)

    def record_parents(self, step: Step, tasks: Sequence[Task], evaluations: Sequence[Batch]) -> None:
        """Take in what the parents scored on their minibatches."""
        for task, batch in zip(tasks, evaluations, strict=True):
            self.reports.evaluation_ended(step, batch, self.reports.parents_of(task), task.parent_idx)
        self.count_calls()
        for task, batch in zip(tasks, evaluations, strict=True):
            self._cache_minibatch(task.parent_candidate, task, batch)
        first = tasks[0]
        self.log_entry(step).update(
            selected_program_candidate=first.parent_idx,
            subsample_ids=first.minibatch_ids,
            n_tasks=len(tasks),
            tasks=[{"parent_idx": task.parent_idx, "subsample_ids": list(task.minibatch_ids)} for task in tasks],
        )
        self.reports.parents_counted(step, first, self.seed_confirmed)

    def nothing_to_improve(self, step: Step, task: Task, evaluation: Batch) -> str | None:
        """Why a parent's minibatch is not reflected on; None when it is."""
        perfect, reason = self.perfect_score if self.skips_perfect else None, None
        if not evaluation.trajectories:
            reason = "no_trajectories"
        elif perfect is not None and all(score >= perfect for score in evaluation.scores):
            reason = "all_scores_perfect"
        if reason is not None:
            self.reports.reflection_skipped(step, task, reason, evaluation.scores)
        return reason

    def choose_components(
        self, step: Step, task: Task, evaluation: Batch, readable: Collection[str] | None = None
    ) -> tuple[list[str], list[str]]:
        """Ask the component selector which texts to rewrite, again where a reflection can read nothing of those that it
        names.

        Returns:
            The components, and those that it named and a reflection can read nothing of.
        """
        chosen, unread = list[str](), dict[str, None]()
        for _ in task.parent_candidate:
            with self.acting_for(step):
                chosen = self.parts.component_selector(
                    self.state, evaluation.trajectories, evaluation.scores, task.parent_idx, task.parent_candidate
                )
            if not readable:
                return chosen, []
            own = [name for name in chosen if name in readable or name not in task.parent_candidate]
            unread |= dict.fromkeys(name for name in chosen if name not in own)
            if own:
                return own, list(unread)
        return [name for name in task.parent_candidate if name in (readable or ())][:1], list(unread)

    def judge_children(self, step: Step, screened: Sequence[tuple[Child, Batch]]) -> list[tuple[Child, Proposal]]:
        """Let gepa choose among children with their screens; those that go on, with gepa's proposals for them."""
        for child, batch in screened:
            self.reports.child_evaluated(step, batch, [child.parent.task.parent_idx])
        self.count_calls()
        trace = self.log_entry(step)
        for child, batch in screened:
            self._cache_minibatch(child.candidate, child.parent.task, batch)
            trace["tasks"][child.parent.index]["subsample_scores"] = list(child.parent.evaluation.scores)
            trace["tasks"][child.parent.index]["new_subsample_scores"] = list(batch.scores)
        before, after = screened[0][0].parent.evaluation.scores, screened[0][1].scores
        trace["subsample_scores"], trace["new_subsample_scores"] = before, after
        old, new = sum(before), sum(after)
        figures = {"subsample_score": old, "new_subsample_score": new, "subsample/before": old, "subsample/after": new}
        self.reports.track(step, **figures)
        children = {id(made := child.proposal(step, batch)): (child, made) for child, batch in screened}
        proposals = [proposal for _, proposal in children.values()]
        try:  # gepa's engine chooses, reports what it left, and then evaluates, in one call: it is left there
            with self.acting_for(step):
                self._run_reflective_batch(proposals, self.state)
        except Chosen as chosen:  # a selection strategy may change the order
            return [children[id(one)] for texts in chosen.candidates for one in proposals if one.candidate is texts]
        return []

    def _evaluate_programs_on_valset(self, programs: list[Candidate], state: State) -> Any:
        raise Chosen(*programs)

    def lookup(self, candidate: Candidate, ids: Sequence[Any] | None = None) -> ValidationPlan:
        """Plan a validation on the examples that the policy names: what the cache has, and what is to be run."""
        cache = self.state.evaluation_cache
        wanted = list(self.val_evaluation_policy.get_eval_batch(self.loader, self.state) if ids is None else ids)
        cached, missing = ({}, wanted) if cache is None else cache.get_batch(candidate, wanted)
        return ValidationPlan(candidate, cached, missing)

    def complete_validation(self, plan: ValidationPlan, rollouts: Mapping[Any, Rollout]) -> ValsetEvaluation[Any, Any]:
        """Join fresh results with the cached ones, and cache them; the order in which they came leaves no trace."""
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

    def judge_crossover(
        self, step: Step, plan: Crossover, lookup: ValidationPlan, fresh: Mapping[Any, Rollout]
    ) -> Proposal | None:
        """Judge a crossover as gepa does: not worse than the better of its parents. None when it is."""
        result = self.complete_validation(lookup, fresh)
        objectives, scores = result.objective_scores_by_val_id, [result.scores_by_val_id[i] for i in plan.ids]
        batch: Batch = EvaluationBatch(
            outputs=[result.outputs_by_val_id[i] for i in plan.ids],
            scores=scores,
            objective_scores=[objectives[i] for i in plan.ids] if objectives else None,
        )
        self.reports.evaluation_ended(step, batch, list(plan.parents))
        self.log_entry(step).update(
            id1_subsample_scores=list(plan.parent_scores[0]),
            id2_subsample_scores=list(plan.parent_scores[1]),
            new_program_subsample_scores=scores,
        )
        self.count_calls()
        sums = [sum(scores_of_parent) for scores_of_parent in plan.parent_scores]
        self.reports.crossover_judged(step, plan, sum(scores), sums)
        if sum(scores) < max(sums):
            return None
        return CandidateProposal(
            candidate=plan.candidate,
            parent_program_ids=list(plan.parents),
            subsample_indices=list(plan.ids),
            subsample_scores_before=[float(total) for total in sums],
            subsample_scores_after=scores,
            tag="merge",
            metadata={"ancestor": plan.ancestor},
        )

    def _cache_minibatch(self, candidate: Candidate, task: Task, batch: Batch) -> None:
        """Put a minibatch's scores into gepa's cache, where :attr:`caches_minibatches` says so."""
        cache = self.state.evaluation_cache
        if cache is not None and self.caches_minibatches and len(batch.scores) == len(task.minibatch_ids):
            objectives = list(batch.objective_scores) if batch.objective_scores else None
            cache.put_batch(candidate, task.minibatch_ids, batch.outputs, batch.scores, objectives)

    # Candidates that come in, or go.

    def release(self, child: Screened, plan: ValidationPlan, rollouts: Mapping[Any, Rollout]) -> int | None:
        """Let selection pick a child whose validation is there in part; see :meth:`SpeculativeCandidates.release`."""
        known = self.complete_validation(plan, rollouts)
        return self.speculative.release(child, known, self.state, self.best_index)

    def mark_grown(self, names: Sequence[list[str]]) -> None:
        """Take note which components of the candidates that are committed next have grown."""
        first = len(self.state.program_candidates)
        self.grown = {index: grown for index, grown in self.grown.items() if index < first}  # a kill may leave more
        self.grown |= {index: grown for index, grown in enumerate(names, start=first) if grown}
        self.store.set_state("grown", lambda: self.grown)

    def commit(self, step: Step, work: Sequence[Validated]) -> list[Commit]:
        """Add validated proposals, in order; one that fell behind its prefix leaves what was made from it stale."""
        proposals = [self._on_firm_ground(validated) for validated in work]
        entries = [
            (proposal.candidate, proposal.parent_program_ids, validated.evaluation)
            for proposal, validated in zip(proposals, work, strict=True)
        ]
        write_commits(self.store, step.number, len(self.state.program_candidates), self.version, entries)
        commits: list[Commit] = []
        merge, best = self.parts.merge, self.best_score()
        for validated, proposal in zip(work, proposals, strict=True):
            self.reports.candidate_enters(step, proposal)
            commit = self.add(step, proposal, validated.evaluation, validated.calls)
            if proposal.tag != "merge":
                self._log_proposal_lm_calls(step.number + 1, proposal, candidate_idx=commit.candidate)
            elif merge is not None:  # else the run goes on without merges, and this one was planned before
                merge.merges_due -= 1
                merge.total_merges_tested += 1
            self.reports.candidate_added(step, proposal, commit)
            if proposal.tag != "merge" and merge is not None:
                merge.last_iter_found_new_program = True
                merge.schedule_if_needed()
            if validated.key is not None:
                has_fallen = best is not None and commit.score < best
                self.speculative.confirm(validated.key, commit.candidate, has_fallen=has_fallen)
            commits.append(commit)
        self.save(force=True)
        return commits

    def _on_firm_ground(self, validated: Validated) -> Proposal:
        """Put confirmed parents in the place of the speculative one that a proposal was made from."""
        proposal = validated.proposal
        stands_for = () if validated.base is None else self.speculative.resolve((validated.base,))
        return replace(proposal, parent_program_ids=list(stands_for)) if stands_for else proposal

    def count_calls(self) -> None:
        """Bring gepa's count of metric calls to what was made by now."""
        if (calls := self._uncounted) > 0:
            self.state.increment_evals(calls)

    @property
    def _uncounted(self) -> int:
        return max(0, self._budget.spent - self.state.total_num_evals) if self.seed_confirmed else 0

    def add(self, step: Step, proposal: Proposal, evaluation: ValsetEvaluation[Any, Any], calls: int) -> Commit:
        """Add a validated candidate, whose validation cost ``calls`` at most; resume.py adds an interrupted run's."""
        with self.acting_for(step):
            index, best = self._add_evaluated_program(
                new_program=proposal.candidate,
                state=self.state,
                parent_program_idx=proposal.parent_program_ids,
                valset_evaluation=evaluation,
                num_actual_evals=min(calls, self._uncounted),
            )
            self.write_best_outputs()
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
        """List what was committed after ``version``, oldest first."""
        state, commits = self.state, list[PastCommit]()
        for index in range(version + 1, len(state.program_candidates)):
            parents = [parent for parent in state.parent_program_for_candidate[index] if parent is not None]
            parent = max(parents, key=self.score_of)
            texts, before = state.program_candidates[index], state.program_candidates[parent]
            new = {name: text for name, text in texts.items() if text != before[name]}
            gain = self.score_of(index) - self.score_of(parent)
            commits.append(PastCommit(new, {name: before[name] for name in new}, gain))
        return commits

    def reject(self, step: Step, proposal: Proposal, reason: str | None = None) -> None:
        """Report a proposal that goes no further."""
        self._report_rejected_proposal(proposal, step.number + 1, self.state, reason_override=reason)

    def give_up(self, step: Step, proposal: Proposal, scores: list[float], examples: int) -> None:
        """Report a proposal that could not pass its screen any more, with the scores so far; none is stored."""
        self.reports.child_evaluated(step, scored(scores), proposal.parent_program_ids)
        reason = f"it cannot pass its screen any more, after {len(scores)} of {examples} examples"
        self.reject(step, replace(proposal, subsample_scores_after=scores), reason)

    def score_of(self, candidate: int) -> float:
        """A candidate's aggregate validation score."""
        return score_of(self.state, candidate)

    def is_perfect(self, highest: float) -> bool:
        """Whether the best candidate has ``highest``, the best score that there can be, on every validation example.

        No later one can be better then.
        """
        if not self.seed_confirmed:
            return False
        scores = self.state.prog_candidate_val_subscores[self.best_index]
        return all(scores.get(i, -math.inf) >= highest for i in self.loader.all_ids())

    @property
    def best_index(self) -> int:
        """Index of the best candidate; the seed's before it is confirmed."""
        return self.preferred(self.val_evaluation_policy.get_best_program(self.state)) if self.seed_confirmed else 0

    def preferred(self, best: int) -> int:
        """Choose between candidates that score as ``best`` does: the first that has not grown, else ``best``."""
        if best not in self.grown:
            return best
        score = self.state.get_program_average_val_subset
        indices = range(len(self.state.program_candidates))
        return next((index for index in indices if index not in self.grown and score(index) == score(best)), best)

    def best_score(self) -> float | None:
        """The best aggregate validation score; None before the seed is confirmed."""
        if not self.seed_confirmed:
            return None
        return self.val_evaluation_policy.get_valset_score(self.best_index, self.state)

    def finish(self) -> None:
        """Write the checkpoint and report that the run came to its end."""
        self.reports.end_steps()  # a stop came while a step was selecting
        self.count_calls()
        if self.seed_confirmed:
            self.save(force=True)
            best = self.best_index
            self.reports.run_ended(best, self.val_evaluation_policy.get_valset_score(best, self.state))

    def fail(self, error: BaseException) -> None:
        """Write the checkpoint and report that ``error`` ended the run, and with it the steps on their way."""
        if isinstance(error, Exception):
            self.reports.notify("on_error", self.state.i + 1, exception=error, will_continue=False)
        self.reports.end_steps()
        self.state.total_num_evals = max(self.state.total_num_evals, self._budget.spent)
        self.save(force=True)

    def log_entry(self, step: Step) -> dict[str, Any]:
        """Return the step's entry of gepa's run log, a new one where there is none."""
        log = self.state.full_program_trace
        entry = next((entry for entry in reversed(log) if entry["i"] == step.number), None)
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
            "run_dir": None if self._directory is None else str(self._directory),
        }

    def _log_candidate_tree(self, state: State) -> None:
        """Draw gepa's tree of candidates, which takes long at every commit, only where somebody gets to see it.

        gepa writes texts into a script as they are, where `</script>` would end it. Here no text has a "<" until the
        script runs: there it reads a character of ours as the escape of one.
        """
        if not self._draws_tree:
            return
        page = candidate_tree_html_from_data(
            [
                {escape(name): text.replace("<", LESS_THAN) for name, text in texts.items()}
                for texts in state.program_candidates
            ],
            state.parent_program_for_candidate,
            state.program_full_scores_val_set,
            state.program_at_pareto_front_valset,
        ).replace(json.dumps(LESS_THAN)[1:-1], "\\u003c")
        self.experiment_tracker.log_html(page, key="candidate_tree")
        if self._directory is not None:
            write_private(self._directory / "candidate_tree.html", page)

    def _on_calls(self, total: int, delta: int) -> None:
        self.reports.notify(
            "on_budget_updated", self.state.i + 1, metric_calls_used=total, metric_calls_delta=delta,
            metric_calls_remaining=self._get_remaining_budget(self.state),
        )  # fmt: skip


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, default=json_default)


def _generations(parents: list[list[int | None]]) -> list[int]:
    """Count, for each candidate, the steps from the seed along the longest line of parents."""
    steps: list[int] = []
    for line in parents:
        steps.append(max((1 + steps[parent] for parent in line if parent is not None), default=0))
    return steps


def write_commits(
    store: Store,
    step: int | None,
    first: int,
    version: int,
    work: Sequence[tuple[Candidate, Sequence[int | None], ValsetEvaluation[Any, Any]]],
) -> None:
    """Write candidates that are about to enter gepa's pool at index ``first``, and wait until that is safe.

    ``step`` made them, None for another program; ``version`` is the pool's, before them. Runs in the pool's writer.

    Raises:
        JournalError: it is not.
    """
    for offset, (candidate, parents, evaluation) in enumerate(work):
        objectives = evaluation.objective_scores_by_val_id
        more = None if objectives is None else {id_text(i): dict(scores) for i, scores in objectives.items()}
        scores = {id_text(i): score for i, score in evaluation.scores_by_val_id.items()}
        store.record_commit(step, first + offset, version + offset + 1, candidate, parents, scores, more=more)
    store.flush_blocking()
