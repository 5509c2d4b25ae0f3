"""What gepa does within an iteration, which here is a step: choosing components, judging children, adding candidates.

Names, order and contents of what callbacks, log and tracker are told are those of gepa 0.1.4
(``ReflectiveMutationProposer.propose``, ``MergeProposer.propose``, ``GEPAEngine``); the iteration is the step's, so
that steps may overlap. Where gepa's engine has code for it, that is called; its loop is not.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gepa.core.adapter import EvaluationBatch
from gepa.core.engine import GEPAEngine
from gepa.core.state import ValsetEvaluation
from gepa.proposer.base import CandidateProposal
from gepa.visualization import candidate_tree_html_from_data

from dspy_flashevolve.engine.steps import Step
from dspy_flashevolve.engine.store import Store, id_text, write_private
from dspy_flashevolve.gepa.options import Chosen
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.records import Batch, Candidate, Child, Commit, Crossover, Proposal, Task, Validated, scored
from dspy_flashevolve.gepa.reports import State

LESS_THAN = "\ue000"
"""Stands for "<" in a page of gepa's: a character of Unicode's that means nothing."""


class Engine(GEPAEngine[Any, Any, Any, Any]):
    """gepa's engine, left where it would evaluate candidates; it draws a tree of them only where that is seen."""

    def __init__(self, pool: Pool) -> None:
        settings, parts = pool.settings, pool.parts
        super().__init__(
            adapter=pool.adapter,
            run_dir=None,  # what gepa writes everybody may read: see `RunFiles`
            valset=pool.loader,
            seed_candidate=pool.seed_candidate,
            perfect_score=settings.perfect_score,  # pyright: ignore[reportArgumentType]  # None is no bound
            seed=settings.seed,  # pyright: ignore[reportArgumentType]  # as dspy.GEPA: None draws another each time
            reflective_proposer=SimpleNamespace(trainset=pool.trainset),  # pyright: ignore[reportArgumentType]
            merge_proposer=parts.merge,
            frontier_type=settings.frontier_type,
            logger=pool.logger,
            experiment_tracker=parts.tracker,
            callbacks=pool.callbacks,
            track_best_outputs=settings.track_best_outputs,
            val_evaluation_policy=parts.val_evaluation_policy,
            acceptance_criterion=parts.acceptance_criterion,
            selection_strategy=parts.selection_strategy,
        )
        self._settings = settings

    def _evaluate_programs_on_valset(self, programs: list[Candidate], state: State) -> Any:
        raise Chosen(*programs)

    def _log_candidate_tree(self, state: State) -> None:
        """Draw gepa's tree of candidates, which takes long at every commit, only where somebody gets to see it.

        gepa writes texts into a script as they are, where `</script>` would end it. Here no text has a "<" until the
        script runs: there it reads a character of ours as the escape of one.
        """
        settings = self._settings
        if settings.log_dir is None and not (settings.use_wandb or settings.use_mlflow):
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
        if settings.log_dir is not None:
            write_private(Path(settings.log_dir) / "candidate_tree.html", page)


class Iterations:
    """Does what gepa does within iterations, for steps that overlap. Everything runs in the pool's writer.

    Args:
        caches_minibatches: gepa's evaluation cache, which does not tell training from validation examples, takes the
            scores of minibatches.
    """

    def __init__(self, pool: Pool, caches_minibatches: bool) -> None:
        self.pool, self._reports, self._parts = pool, pool.reports, pool.parts
        self._engine, self._caches_minibatches = Engine(pool), caches_minibatches or pool.loader is pool.trainset

    # Beginning and end.

    def begin(self, step: Step) -> dict[str, Any]:
        """Advance the iteration; returns the step's entry of the run log. One that goes on may have one already."""
        pool = self.pool
        if pool.save():
            self._reports.notify("on_state_saved", pool.state.i + 1, run_dir=pool.settings.log_dir)
        pool.state.i = max(pool.state.i, step.number)
        trace = self.log_entry(step)
        self._reports.step_begins(step)
        return trace

    def end(self, step: Step, accepted: bool, counts: bool = True, has_joined: bool = False) -> bool:
        """Report a step's end and ask the stoppers, those that count iterations only where it ``counts``; True to
        stop."""
        self.pool.count_calls()
        self._reports.step_ended(step, accepted, has_joined)
        self.pool.keep_strategies()
        return self.pool.should_stop(counts)

    def log_entry(self, step: Step) -> dict[str, Any]:
        """Return the step's entry of gepa's run log, a new one where there is none."""
        log = self.pool.state.full_program_trace
        entry = next((entry for entry in reversed(log) if entry["i"] == step.number), None)
        if entry is None:
            entry = {"i": step.number}
            log.append(entry)
        return entry

    @contextmanager
    def acting_for(self, step: Step) -> Generator[None, None, None]:
        """Let gepa's code, which reads the iteration and the newest log entry from the state, act for ``step``."""
        state = self.pool.state
        newest, log = state.i, state.full_program_trace
        state.i, state.full_program_trace = step.number, [self.log_entry(step)]
        try:
            yield
        finally:
            state.i, state.full_program_trace = newest, log

    # Parents.

    def record_parents(self, step: Step, tasks: Sequence[Task], evaluations: Sequence[Batch]) -> None:
        """Take in what the parents scored on their minibatches.

        Where the seed has no score yet, the log line of the selection waits for it.
        """
        for task, batch in zip(tasks, evaluations, strict=True):
            self._reports.evaluation_ended(step, batch, [], task.parent_idx)
        self.pool.count_calls()
        for task, batch in zip(tasks, evaluations, strict=True):
            self._cache_minibatch(task.parent_candidate, task, batch)
        first = tasks[0]
        self.log_entry(step).update(
            selected_program_candidate=first.parent_idx,
            subsample_ids=first.minibatch_ids,
            n_tasks=len(tasks),
            tasks=[{"parent_idx": task.parent_idx, "subsample_ids": list(task.minibatch_ids)} for task in tasks],
        )
        self._reports.parent_counted(step, first.parent_idx, self.pool.seed_confirmed)

    def nothing_to_improve(self, step: Step, task: Task, evaluation: Batch) -> str | None:
        """Why a parent's minibatch is not reflected on, in a word of gepa's; None when it is."""
        settings, parent, scores = self.pool.settings, task.parent_idx, evaluation.scores
        perfect = settings.perfect_score if settings.skip_perfect_score else None
        if not evaluation.trajectories:
            reason, words = "no_trajectories", "No trajectories"
        elif perfect is not None and all(score >= perfect for score in scores):
            reason, words = "all_scores_perfect", "All subsample scores perfect"
        else:
            return None
        self._reports.log(step, f"{words} for parent {parent}. Skipping.")
        skipped = {"candidate_idx": parent, "reason": reason, "scores": scores, "is_seed_candidate": parent == 0}
        self._reports.notify("on_evaluation_skipped", step.number + 1, **skipped)
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
                chosen = self._parts.component_selector(
                    self.pool.state, evaluation.trajectories, evaluation.scores, task.parent_idx, task.parent_candidate
                )
            if not readable:
                return chosen, []
            own = [name for name in chosen if name in readable or name not in task.parent_candidate]
            unread |= dict.fromkeys(name for name in chosen if name not in own)
            if own:
                return own, list(unread)
        return [name for name in task.parent_candidate if name in (readable or ())][:1], list(unread)

    # Children.

    def judge_children(self, step: Step, screened: Sequence[tuple[Child, Batch]]) -> list[tuple[Child, Proposal]]:
        """Let gepa choose among children with their screens; those that go on, with gepa's proposals for them."""
        for child, batch in screened:
            self._reports.evaluation_ended(step, batch, [child.parent.task.parent_idx])
        self.pool.count_calls()
        trace = self.log_entry(step)
        for child, batch in screened:
            self._cache_minibatch(child.candidate, child.parent.task, batch)
            trace["tasks"][child.parent.index]["subsample_scores"] = list(child.parent.evaluation.scores)
            trace["tasks"][child.parent.index]["new_subsample_scores"] = list(batch.scores)
        before, after = screened[0][0].parent.evaluation.scores, screened[0][1].scores
        trace["subsample_scores"], trace["new_subsample_scores"] = before, after
        old, new = sum(before), sum(after)
        figures = {"subsample_score": old, "new_subsample_score": new, "subsample/before": old, "subsample/after": new}
        self._reports.track(step, **figures)
        children = {id(proposal := child.proposal(step, batch)): (child, proposal) for child, batch in screened}
        proposals = [proposal for _, proposal in children.values()]
        try:  # gepa's engine chooses, reports what it left, and then evaluates, in one call: it is left there
            with self.acting_for(step):
                self._engine._run_reflective_batch(proposals, self.pool.state)  # pyright: ignore[reportPrivateUsage]
        except Chosen as chosen:  # a selection strategy may change the order
            return [children[id(one)] for texts in chosen.candidates for one in proposals if one.candidate is texts]
        return []

    def _cache_minibatch(self, candidate: Candidate, task: Task, batch: Batch) -> None:
        cache = self.pool.state.evaluation_cache
        if cache is not None and self._caches_minibatches and len(batch.scores) == len(task.minibatch_ids):
            objectives = list(batch.objective_scores) if batch.objective_scores else None
            cache.put_batch(candidate, task.minibatch_ids, batch.outputs, batch.scores, objectives)

    def expected_score(self, proposals: Sequence[Proposal]) -> float:
        """Estimate what the best proposal reaches in validation: its parent's score plus its gain on the screen.

        It orders validations: the child that is likely to be the next parent is validated first.
        """
        reach: list[float] = []
        for proposal in proposals:
            after, before = proposal.subsample_scores_after or [], proposal.subsample_scores_before or []
            parent = self.pool.score_of(proposal.parent_program_ids[0]) if self.pool.seed_confirmed else 0.0
            reach.append(parent + (sum(after) - sum(before)) / max(1, len(after)))
        return max(reach)

    def give_up(self, step: Step, proposal: Proposal, scores: list[float], examples: int) -> None:
        """Report a proposal that could not pass its screen any more, with the scores so far; none is stored."""
        self._reports.evaluation_ended(step, scored(scores), proposal.parent_program_ids)
        reason = f"it cannot pass its screen any more, after {len(scores)} of {examples} examples"
        self.reject(step, replace(proposal, subsample_scores_after=scores), reason)

    def reject(self, step: Step, proposal: Proposal, reason: str) -> None:
        """Report a proposal that goes no further."""
        report = self._engine._report_rejected_proposal  # pyright: ignore[reportPrivateUsage]
        report(proposal, step.number + 1, self.pool.state, reason_override=reason)

    def judge_crossover(self, step: Step, plan: Crossover, result: ValsetEvaluation[Any, Any]) -> Proposal | None:
        """Judge a crossover as gepa does: not worse than the better of its parents. None when it is."""
        objectives, scores = result.objective_scores_by_val_id, [result.scores_by_val_id[i] for i in plan.ids]
        parents, number, total = list(plan.parents), step.number + 1, sum(scores)
        batch: Batch = EvaluationBatch(
            outputs=[result.outputs_by_val_id[i] for i in plan.ids],
            scores=scores,
            objective_scores=[objectives[i] for i in plan.ids] if objectives else None,
        )
        self._reports.evaluation_ended(step, batch, parents)
        self.log_entry(step).update(
            id1_subsample_scores=list(plan.parent_scores[0]),
            id2_subsample_scores=list(plan.parent_scores[1]),
            new_program_subsample_scores=scores,
        )
        self.pool.count_calls()
        sums = [sum(scores_of_parent) for scores_of_parent in plan.parent_scores]
        self._reports.notify("on_merge_attempted", number, parent_ids=parents, merged_candidate=plan.candidate)
        if total < max(sums):
            worse = f"worse than both parents {sums}"
            self._reports.log(step, f"New program subsample score {total} is {worse}, skipping merge")
            self._reports.notify(
                "on_merge_rejected", number, parent_ids=parents, reason=f"Merged score {total} {worse}"
            )
            return None
        return CandidateProposal(
            candidate=plan.candidate,
            parent_program_ids=parents,
            subsample_indices=list(plan.ids),
            subsample_scores_before=[float(total) for total in sums],
            subsample_scores_after=scores,
            tag="merge",
            metadata={"ancestor": plan.ancestor},
        )

    # Candidates that come in.

    def commit(self, step: Step, work: Sequence[Validated]) -> list[Commit]:
        """Add validated proposals, in order; one that fell behind its prefix leaves what was made from it stale."""
        pool, merge, proposals = self.pool, self._parts.merge, list[Proposal]()
        for validated in work:  # confirmed parents in the place of the speculative one that a proposal was made from
            stands_for = () if validated.base is None else pool.speculative.resolve((validated.base,))
            proposal = validated.proposal
            proposals.append(replace(proposal, parent_program_ids=list(stands_for)) if stands_for else proposal)
        entries = [
            (proposal.candidate, proposal.parent_program_ids, validated.evaluation)
            for proposal, validated in zip(proposals, work, strict=True)
        ]
        write_commits(pool.store, step.number, pool.version + 1, pool.version, entries)
        commits, best, number = list[Commit](), pool.best_score, step.number + 1
        for validated, proposal in zip(work, proposals, strict=True):
            before, after = sum(proposal.subsample_scores_before or []), sum(proposal.subsample_scores_after or [])
            if proposal.tag == "reflective_mutation":
                accepted = f"Accepted candidate (subsample score {before} -> {after}); running full eval."
                self._reports.log(step, accepted)
            commit = self.add(step, proposal, validated.evaluation, validated.calls)
            event = {"new_candidate_idx": commit.candidate, "parent_ids": proposal.parent_program_ids}
            if proposal.tag != "merge":
                log_calls = self._engine._log_proposal_lm_calls  # pyright: ignore[reportPrivateUsage]
                log_calls(number, proposal, candidate_idx=commit.candidate)
            else:
                if merge is not None:  # else the run goes on without merges, and this one was planned before
                    merge.merges_due -= 1
                    merge.total_merges_tested += 1
                self._reports.notify("on_merge_accepted", number, **event)
            score = after if proposal.subsample_scores_after else commit.score
            self._reports.notify("on_candidate_accepted", number, new_score=score, **event)
            if proposal.tag != "merge" and merge is not None:
                merge.last_iter_found_new_program = True
                merge.schedule_if_needed()
            if validated.key is not None:
                has_fallen = best is not None and commit.score < best
                pool.speculative.confirm(validated.key, commit.candidate, has_fallen=has_fallen)
            commits.append(commit)
        pool.save(force=True)
        return commits

    def add(self, step: Step, proposal: Proposal, evaluation: ValsetEvaluation[Any, Any], calls: int) -> Commit:
        """Add a validated candidate, whose validation cost ``calls`` at most."""
        pool = self.pool
        with self.acting_for(step):
            index, best = self._engine._add_evaluated_program(  # pyright: ignore[reportPrivateUsage]
                new_program=proposal.candidate,
                state=pool.state,
                parent_program_idx=proposal.parent_program_ids,
                valset_evaluation=evaluation,
                num_actual_evals=min(calls, pool.uncounted),
            )
            pool.write_best_outputs()
        generations: list[int] = []
        for line in pool.state.parent_program_for_candidate:  # steps from the seed along the longest line of parents
            generations.append(max((1 + generations[parent] for parent in line if parent is not None), default=0))
        score, parents = self._parts.val_evaluation_policy.get_valset_score, tuple(proposal.parent_program_ids)
        scores = score(index, pool.state), score(best, pool.state)
        return Commit(index, pool.version, *scores, generations[index], parents)


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
