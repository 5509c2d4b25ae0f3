"""What gepa's callbacks, its log and its trackers are told of steps.

Names, order and contents are those of gepa 0.1.4 (``ReflectiveMutationProposer.propose``, ``MergeProposer.propose``,
``GEPAEngine``); the iteration is the step's, so that steps may overlap. What gepa's own code tells when it adds or
rejects a candidate is left to it (pool.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gepa.core.callbacks import notify_callbacks
from gepa.core.data_loader import DataLoader
from gepa.core.state import GEPAState

from dspy_flashevolve.engine.steps import Step
from dspy_flashevolve.gepa.options import BASE, IterationLog
from dspy_flashevolve.gepa.records import Batch, Candidate, Child, Commit, Crossover, Proposal, Task

State = GEPAState[Any, Any]


def score_of(state: State, candidate: int) -> float:
    """A candidate's aggregate validation score; gepa's list of all of them costs a pass over the whole pool."""
    return state.get_program_average_val_subset(candidate)[0]


class Reports:
    """Tells of steps. Everything runs in the pool's writer.

    Args:
        state: gepa's; the same object as long as the run lasts.
        callbacks: gepa's; each is told what it has a method for.
        logger: gepa's logger protocol.
        tracker: gepa's experiment tracker.
        trainset, valset: gepa's loaders.
    """

    def __init__(
        self,
        state: State,
        callbacks: Sequence[Any],
        logger: Any,
        tracker: Any,
        trainset: DataLoader[Any, Any],
        valset: DataLoader[Any, Any],
    ) -> None:
        self._state, self._callbacks, self._logger, self._tracker = state, list(callbacks), logger, tracker
        self._trainset, self._valset = trainset, valset
        self._begun = set[int]()
        """Steps whose beginning was told, and not their end."""
        self._without_proposal = set[int]()
        """Steps that work on parents, and have no proposal that was evaluated yet."""
        self._early: dict[int, int] = {}
        """Step that selected before the seed was validated -> the candidate, whose score its log line waits for."""

    def _notify(self, method: str, **event: Any) -> None:
        notify_callbacks(self._callbacks, method, event)

    def _log(self, step: Step, message: str) -> None:
        self._logger.log(f"Iteration {step.number + 1}: {message}")

    # The run.

    def run_begins(self, seed: Candidate, config: Mapping[str, Any]) -> None:
        """The run begins; nothing is validated."""
        sizes = {"trainset_size": len(self._trainset), "valset_size": len(self._valset)}
        self._notify("on_optimization_start", seed_candidate=seed, **sizes, config=config)

    def seed_validated(self, config: Mapping[str, Any]) -> None:
        """The seed is validated, or a checkpoint's candidates are loaded (gepa 0.1.4, ``GEPAEngine.run``)."""
        state, tracker = self._state, self._tracker
        average, coverage = state.get_program_average_val_subset(0)
        front = list(state.pareto_front_valset.values())
        tracker.log_config(config)
        tracker.log_metrics(
            {
                "val_program_average": average,
                "best_score_on_valset": average,
                "val_evaluated_count_new_program": coverage,
                "val_total_count": len(self._valset),
                "total_metric_calls": state.total_num_evals,
                "valset_pareto_front_agg": sum(front) / len(front) if front else average,
                "new_program_idx": 0,
                "linear_pareto_front_program_idx": 0,
                "best_program_as_per_agg_score_valset": 0,
            },
            step=0,
        )
        iteration = 0 if self._begun else state.i + 1  # steps may have begun before the seed was validated
        self._logger.log(f"Iteration {iteration}: {BASE}: {average} over {coverage} / {len(self._valset)} examples")
        self._notify(
            "on_valset_evaluated",
            iteration=0,
            candidate_idx=0,
            candidate=state.program_candidates[0],
            scores_by_val_id=dict(state.prog_candidate_val_subscores[0]),
            average_score=average,
            num_examples_evaluated=coverage,
            total_valset_size=len(self._valset),
            parent_ids=[],
            is_best_program=True,
            outputs_by_val_id=None,
        )
        if isinstance(self._logger, IterationLog):
            for number, candidate in self._early.items():
                score = score_of(state, candidate)
                self._logger.log_first(number + 1, f"Selected program {candidate} score: {score}")
            self._logger.release()

    def calls_counted(self, total: int, delta: int, left: int | None) -> None:
        """Metric calls were made: ``delta`` of them since the last time."""
        self._notify(
            "on_budget_updated",
            iteration=self._state.i + 1,
            metric_calls_used=total,
            metric_calls_delta=delta,
            metric_calls_remaining=left,
        )

    def checkpoint_saved(self, run_dir: str | None) -> None:
        """gepa's checkpoint is written."""
        self._notify("on_state_saved", iteration=self._state.i + 1, run_dir=run_dir)

    def run_ended(self, best: int, best_score: float) -> None:
        """The run came to its end."""
        state = self._state
        self._notify(
            "on_optimization_end",
            best_candidate_idx=best,
            total_iterations=state.i,
            total_metric_calls=state.total_num_evals,
            final_state=state,
        )
        seed, texts = state.program_candidates[0], state.program_candidates[best]
        summary: dict[str, Any] = {
            "best_candidate_idx": best,
            "best_valset_score": best_score,
            "total_iterations": state.i,
            "total_candidates": len(state.program_candidates),
        }
        for name in sorted(seed):
            summary[f"seed/{name}"] = seed[name]
            summary[f"best/{name}"] = texts[name]
        self._tracker.log_summary(summary)

    def run_failed(self, error: Exception) -> None:
        """An error ends the run."""
        self._notify("on_error", iteration=self._state.i + 1, exception=error, will_continue=False)

    # A step's beginning and end.

    def step_begins(self, step: Step) -> None:
        """A step begins with its selection."""
        self._begun.add(step.number)
        self._notify("on_iteration_start", iteration=step.number + 1, state=self._state, trainset_loader=self._trainset)

    def step_ended(self, step: Step, accepted: bool, is_integrated: bool = False) -> None:
        """A step has ended; ``is_integrated``: its changes are in the text that is validated next."""
        self._begun.discard(step.number)
        if step.number in self._without_proposal:
            self._without_proposal.discard(step.number)
            without = "Reflective mutation did not propose a new candidate"
            self._log(step, "Its changes go into the next candidate" if is_integrated else without)
        self._iteration_ended(step.number, accepted)

    def end_steps(self) -> None:
        """The steps that were told to begin, and that nothing brought to an end, are over."""
        for number in sorted(self._begun):
            self._iteration_ended(number, accepted=False)
        self._begun.clear()

    def _iteration_ended(self, number: int, accepted: bool) -> None:
        self._notify("on_iteration_end", iteration=number + 1, state=self._state, proposal_accepted=accepted)
        if isinstance(self._logger, IterationLog):  # its lines had to wait for this
            self._logger.end(number + 1)

    # Parents.

    def task_selected(self, step: Step, task: Task) -> None:
        """A parent and a minibatch are selected."""
        self._notify(
            "on_candidate_selected",
            iteration=step.number + 1,
            candidate_idx=task.parent_idx,
            candidate=task.parent_candidate,
            score=score_of(self._state, task.parent_idx),
        )
        self._notify(
            "on_minibatch_sampled",
            iteration=step.number + 1,
            minibatch_ids=task.minibatch_ids,
            trainset_size=len(self._trainset),
        )

    def parents_begin(self, step: Step, tasks: Sequence[Task]) -> None:
        """The parents are about to be evaluated."""
        for task in tasks:
            self.evaluation_begins(step, task.minibatch, self._parents_of(task), task.parent_idx)

    def parents_evaluated(self, step: Step, tasks: Sequence[Task], evaluations: Sequence[Batch]) -> None:
        """The parents are evaluated."""
        for task, batch in zip(tasks, evaluations, strict=True):
            self.evaluation_ended(step, batch, self._parents_of(task), task.parent_idx)

    def parents_counted(self, step: Step, task: Task, is_seed_scored: bool) -> None:
        """The parents' metric calls are counted.

        Args:
            task: the first one.
            is_seed_scored: the parent has a score to show; else its log line waits for the seed's.
        """
        self._without_proposal.add(step.number)
        if is_seed_scored:
            self._log(step, f"Selected program {task.parent_idx} score: {score_of(self._state, task.parent_idx)}")
        else:
            self._early[step.number] = task.parent_idx
        self._tracker.log_metrics(
            {
                "iteration": step.number + 1,
                "selected_program_candidate": task.parent_idx,
                "total_metric_calls": self._state.total_num_evals,
            },
            step=step.number + 1,
        )

    def reflection_skipped(self, step: Step, task: Task, reason: str, scores: list[float]) -> None:
        """A parent's minibatch is not reflected on."""
        what = "No trajectories" if reason == "no_trajectories" else "All subsample scores perfect"
        self._log(step, f"{what} for parent {task.parent_idx}. Skipping.")
        self._notify(
            "on_evaluation_skipped",
            iteration=step.number + 1,
            candidate_idx=task.parent_idx,
            reason=reason,
            scores=scores,
            is_seed_candidate=task.parent_idx == 0,
        )

    def _parents_of(self, task: Task) -> list[int]:
        parents = self._state.parent_program_for_candidate[task.parent_idx]
        return [parent for parent in parents if parent is not None]

    # Children.

    def reflection_begins(
        self, step: Step, task: Task, components: list[str], dataset: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> None:
        """The reflective dataset is there."""
        records = {name: [dict(record) for record in rows] for name, rows in dataset.items()}
        self._notify(
            "on_reflective_dataset_built",
            iteration=step.number + 1,
            candidate_idx=task.parent_idx,
            components=components,
            dataset=records,
        )
        self._notify(
            "on_proposal_start",
            iteration=step.number + 1,
            parent_candidate=task.parent_candidate,
            components=components,
            reflective_dataset=records,
        )

    def proposed(self, step: Step, texts: dict[str, str]) -> None:
        """The reflection has written new texts."""
        self._notify(
            "on_proposal_end", iteration=step.number + 1, new_instructions=texts, prompts={}, raw_lm_outputs={}
        )
        for name, text in texts.items():
            self._log(step, f"Proposed new text for {name}: {text}")

    def children_begin(self, step: Step, children: Sequence[Child]) -> None:
        """The children are about to be screened."""
        for child in children:
            self.evaluation_begins(step, child.parent.task.minibatch, [child.parent.task.parent_idx])

    def children_evaluated(self, step: Step, screened: Sequence[tuple[Child, Batch]]) -> None:
        """The children are screened."""
        self._without_proposal.discard(step.number)
        for child, batch in screened:
            self.evaluation_ended(step, batch, [child.parent.task.parent_idx])

    def children_counted(self, step: Step, before: list[float], after: list[float]) -> None:
        """The children's metric calls are counted.

        Args:
            before, after: scores of the first child's parent, and its own.
        """
        self._tracker.log_metrics(
            {
                "subsample_score": sum(before),
                "new_subsample_score": sum(after),
                "subsample/before": sum(before),
                "subsample/after": sum(after),
                "total_metric_calls": self._state.total_num_evals,
            },
            step=step.number + 1,
        )

    def screen_given_up(self, step: Step, batch: Batch, parents: list[int]) -> None:
        """A child could not pass its screen any more."""
        self._without_proposal.discard(step.number)
        self.evaluation_ended(step, batch, parents)

    # Crossovers.

    def crossover_begins(self, step: Step, plan: Crossover) -> None:
        """A crossover is about to be screened."""
        self.evaluation_begins(step, self._valset.fetch(list(plan.ids)), list(plan.parents), traced=False)

    def crossover_attempted(self, step: Step, plan: Crossover) -> None:
        """A crossover is screened, and its metric calls are counted."""
        self._notify(
            "on_merge_attempted",
            iteration=step.number + 1,
            parent_ids=list(plan.parents),
            merged_candidate=plan.candidate,
        )

    def crossover_rejected(self, step: Step, plan: Crossover, score: float, parent_scores: list[float]) -> None:
        """A crossover is worse than the better of its parents."""
        reason = f"Merged score {score} worse than both parents {parent_scores}"
        self._log(
            step, f"New program subsample score {score} is worse than both parents {parent_scores}, skipping merge"
        )
        self._notify("on_merge_rejected", iteration=step.number + 1, parent_ids=list(plan.parents), reason=reason)

    # Candidates that come in.

    def candidate_enters(self, step: Step, proposal: Proposal) -> None:
        """A validated candidate is about to be added to the pool."""
        if proposal.tag == "reflective_mutation":
            before, after = sum(proposal.subsample_scores_before or []), sum(proposal.subsample_scores_after or [])
            self._log(step, f"Accepted candidate (subsample score {before} -> {after}); running full eval.")

    def candidate_added(self, step: Step, proposal: Proposal, commit: Commit) -> None:
        """A candidate is in the pool."""
        event = {"new_candidate_idx": commit.candidate, "parent_ids": proposal.parent_program_ids}
        if proposal.tag == "merge":
            self._notify("on_merge_accepted", iteration=step.number + 1, **event)
        score = sum(proposal.subsample_scores_after) if proposal.subsample_scores_after else commit.score
        self._notify("on_candidate_accepted", iteration=step.number + 1, new_score=score, **event)

    # Any evaluation of a minibatch.

    def evaluation_begins(
        self, step: Step, inputs: list[Any], parents: list[int], index: int | None = None, traced: bool = True
    ) -> None:
        """A candidate is about to be evaluated; ``index``: its place in gepa's pool, where it has one."""
        self._notify(
            "on_evaluation_start",
            iteration=step.number + 1,
            candidate_idx=index,
            batch_size=len(inputs),
            capture_traces=traced,
            parent_ids=parents,
            inputs=inputs,
            is_seed_candidate=index == 0,
        )

    def evaluation_ended(self, step: Step, batch: Batch, parents: list[int], index: int | None = None) -> None:
        """A candidate is evaluated."""
        self._notify(
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
