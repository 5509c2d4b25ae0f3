"""What gepa's callbacks, its log and its trackers are told of steps.

Names, order and contents are those of gepa 0.1.4 (``ReflectiveMutationProposer.propose``, ``MergeProposer.propose``,
``GEPAEngine``); the iteration is the step's, so that steps may overlap. What gepa's own code tells when it adds or
rejects a candidate is left to it (pool.py). Trackers are told from a thread of their own, in order.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, Literal

from gepa.core.callbacks import notify_callbacks
from gepa.core.data_loader import DataLoader
from gepa.core.state import GEPAState
from gepa.logging.experiment_tracker import ExperimentTracker

from dspy_flashevolve.engine.steps import Step
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.gepa.records import Batch, Task
from dspy_flashevolve.gepa.settings import GepaSettings
from dspy_flashevolve.observe.history import read
from dspy_flashevolve.observe.report import report
from dspy_flashevolve.observe.statistics import REFLECTION_STAGES, RunStats

State = GEPAState[Any, Any]
logger = logger_named(__name__)
gepa_logger = logger_named("dspy.teleprompt.gepa.gepa")
"""dspy.GEPA's: what the run says, and what each iteration does."""
_ITERATION = re.compile(r"Iteration (\d+): ")
_LONG = re.compile(
    r": (Proposed new text|Individual valset scores|New valset pareto front|Updated valset pareto front) "
)
"""Lines with a whole prompt, or with scores of every example. The scores are in ``detailed_results``, too."""
BASE = "Base program full valset score"
"""gepa's words for the seed's validation."""


class IterationLog:
    """gepa's logger protocol for iterations that overlap: the lines of each are logged together, when it has ended.

    Whole prompts, and scores of every example, go to the level DEBUG, since they hide all else. Iterations that have
    ended before the seed is validated wait for its line, as in gepa, where it is the first. Runs in the pool's writer.
    """

    def __init__(self) -> None:
        self._lines: dict[int, list[str]] = {}
        self._ended: list[int] = []
        """Iterations that wait for the seed's line."""
        self._has_base = False

    def log(self, message: str) -> None:
        """See gepa's ``LoggerProtocol``."""
        iteration = _ITERATION.match(message)
        if iteration is None:
            gepa_logger.debug(message)
        elif BASE in message:
            gepa_logger.info(message)
            self._has_base = True
        else:
            self._lines.setdefault(int(iteration[1]), []).append(message)

    def log_first(self, iteration: int, message: str) -> None:
        """Put a line before the others of an iteration, which was known too late."""
        self._lines.setdefault(iteration, []).insert(0, f"Iteration {iteration}: {message}")

    def end(self, iteration: int) -> None:
        """Log the lines of an iteration: it has ended."""
        self._ended.append(iteration)
        if self._has_base:
            self.release()

    def release(self) -> None:
        """Log the lines of all iterations that have ended."""
        for iteration in self._ended:
            for line in self._lines.pop(iteration, []):
                gepa_logger.log(logging.DEBUG if _LONG.search(line) else logging.INFO, line)
        self._ended.clear()


def score_of(state: State, candidate: int) -> float:
    """A candidate's aggregate validation score; gepa's list of all of them costs a pass over the whole pool."""
    return state.get_program_average_val_subset(candidate)[0]


class Reports:
    """Tells gepa's callbacks, its logger and its tracker of steps. Everything runs in the pool's writer."""

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

    def notify(self, method: str, iteration: int | None = None, **event: Any) -> None:
        """Tell gepa's callbacks of an event of an iteration; None where the event has none."""
        if iteration is not None:
            event = {"iteration": iteration, **event}
        notify_callbacks(self._callbacks, method, event)

    def log(self, step: Step, message: str) -> None:
        """Log a line of a step's iteration."""
        self._logger.log(f"Iteration {step.number + 1}: {message}")

    def track(self, step: Step, **figures: Any) -> None:
        """Send figures of a step to the tracker."""
        self._tracker.log_metrics({**figures, "total_metric_calls": self._state.total_num_evals}, step=step.number + 1)

    # The run.

    def seed_validated(self, config: Mapping[str, Any]) -> None:
        """The seed is validated, or a checkpoint's candidates are loaded (gepa 0.1.4, ``GEPAEngine.run``)."""
        state, tracker, valset_size = self._state, self._tracker, len(self._valset)
        average, coverage = state.get_program_average_val_subset(0)
        front = list(state.pareto_front_valset.values())
        tracker.log_config(config)
        tracker.log_metrics(
            {
                "val_program_average": average,
                "best_score_on_valset": average,
                "val_evaluated_count_new_program": coverage,
                "val_total_count": valset_size,
                "total_metric_calls": state.total_num_evals,
                "valset_pareto_front_agg": sum(front) / len(front) if front else average,
                "new_program_idx": 0,
                "linear_pareto_front_program_idx": 0,
                "best_program_as_per_agg_score_valset": 0,
            },
            step=0,
        )
        iteration = 0 if self._begun else state.i + 1  # steps may have begun before the seed was validated
        self._logger.log(f"Iteration {iteration}: {BASE}: {average} over {coverage} / {valset_size} examples")
        self.notify(
            "on_valset_evaluated", 0, candidate_idx=0, candidate=state.program_candidates[0],
            scores_by_val_id=dict(state.prog_candidate_val_subscores[0]), average_score=average,
            num_examples_evaluated=coverage, total_valset_size=valset_size, parent_ids=[], is_best_program=True,
            outputs_by_val_id=None,
        )  # fmt: skip
        if isinstance(self._logger, IterationLog):
            for number, candidate in self._early.items():
                score = score_of(state, candidate)
                self._logger.log_first(number + 1, f"Selected program {candidate} score: {score}")
            self._logger.release()

    def run_ended(self, best: int, best_score: float) -> None:
        """The run came to its end."""
        state = self._state
        self.notify(
            "on_optimization_end", best_candidate_idx=best, total_iterations=state.i,
            total_metric_calls=state.total_num_evals, final_state=state,
        )  # fmt: skip
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

    # A step's beginning and end.

    def step_begins(self, step: Step) -> None:
        """A step begins with its selection."""
        self._begun.add(step.number)
        self.notify("on_iteration_start", step.number + 1, state=self._state, trainset_loader=self._trainset)

    def step_ended(self, step: Step, accepted: bool, has_joined: bool = False) -> None:
        """A step has ended; ``has_joined``: its changes are in the text that is validated next."""
        self._begun.discard(step.number)
        if step.number in self._without_proposal:
            self._without_proposal.discard(step.number)
            without = "Reflective mutation did not propose a new candidate"
            self.log(step, "Its changes go into the next candidate" if has_joined else without)
        self._iteration_ended(step.number, accepted)

    def end_steps(self) -> None:
        """The steps that were told to begin, and that nothing brought to an end, are over."""
        for number in sorted(self._begun):
            self._iteration_ended(number, accepted=False)
        self._begun.clear()

    def _iteration_ended(self, number: int, accepted: bool) -> None:
        self.notify("on_iteration_end", number + 1, state=self._state, proposal_accepted=accepted)
        if isinstance(self._logger, IterationLog):  # its lines had to wait for this
            self._logger.end(number + 1)

    # Parents.

    def task_selected(self, step: Step, task: Task) -> None:
        """A parent and a minibatch are selected."""
        parent, iteration = task.parent_idx, step.number + 1
        texts, score = task.parent_candidate, score_of(self._state, parent)
        self.notify("on_candidate_selected", iteration, candidate_idx=parent, candidate=texts, score=score)
        sizes = {"minibatch_ids": task.minibatch_ids, "trainset_size": len(self._trainset)}
        self.notify("on_minibatch_sampled", iteration, **sizes)

    def parent_counted(self, step: Step, parent: int, is_seed_scored: bool) -> None:
        """The metric calls of the parents are counted.

        Where the seed has no score yet, the log line of the selection waits for it.
        """
        self._without_proposal.add(step.number)
        if is_seed_scored:
            self.log(step, f"Selected program {parent} score: {score_of(self._state, parent)}")
        else:
            self._early[step.number] = parent
        self.track(step, iteration=step.number + 1, selected_program_candidate=parent)

    # Children.

    def reflection_begins(
        self, step: Step, task: Task, components: list[str], dataset: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> None:
        """The reflective dataset is there."""
        records = {name: [dict(record) for record in rows] for name, rows in dataset.items()}
        built = {"candidate_idx": task.parent_idx, "components": components, "dataset": records}
        self.notify("on_reflective_dataset_built", step.number + 1, **built)
        asked = {"parent_candidate": task.parent_candidate, "components": components, "reflective_dataset": records}
        self.notify("on_proposal_start", step.number + 1, **asked)

    def proposed(self, step: Step, texts: dict[str, str]) -> None:
        """The reflection has written new texts."""
        self.notify("on_proposal_end", step.number + 1, new_instructions=texts, prompts={}, raw_lm_outputs={})
        for name, text in texts.items():
            self.log(step, f"Proposed new text for {name}: {text}")

    # Any evaluation of a minibatch.

    def evaluation_begins(
        self, step: Step, inputs: list[Any], parents: list[int], index: int | None = None, traced: bool = True
    ) -> None:
        """A candidate is about to be evaluated; ``index``: its place in gepa's pool, where it has one, and parents."""
        parents = parents if index is None else self._parents_of(index)
        self.notify(
            "on_evaluation_start", step.number + 1, candidate_idx=index, batch_size=len(inputs), capture_traces=traced,
            parent_ids=parents, inputs=inputs, is_seed_candidate=index == 0,
        )  # fmt: skip

    def evaluation_ended(self, step: Step, batch: Batch, parents: list[int], index: int | None = None) -> None:
        """A candidate is evaluated, or could not pass its screen any more; ``index``: as when it began."""
        if index is None:
            self._without_proposal.discard(step.number)
        parents = parents if index is None else self._parents_of(index)
        self.notify(
            "on_evaluation_end", step.number + 1, candidate_idx=index, scores=batch.scores,
            has_trajectories=bool(batch.trajectories), parent_ids=parents, outputs=batch.outputs,
            trajectories=batch.trajectories, objective_scores=batch.objective_scores, is_seed_candidate=index == 0,
        )  # fmt: skip

    def _parents_of(self, candidate: int) -> list[int]:
        parents = self._state.parent_program_for_candidate[candidate]
        return [parent for parent in parents if parent is not None]


def _sent(log: Callable[..., None]) -> Callable[..., None]:
    """Leave a call to the tracker's thread; do nothing where no tracker is asked for."""

    @wraps(log)
    def send(self: Tracker, *args: Any, **kwargs: Any) -> None:
        if self.thread is not None:
            self.thread.submit(log, self, *args, **kwargs)

    return send


class Tracker(ExperimentTracker):
    """Sends figures to wandb and mlflow as gepa does, from a thread of its own.

    A tracking server may take a tenth of a second for each figure, and gepa sends them one by one: the run does not
    wait for it, but for what is left at its end."""

    def __init__(self, settings: GepaSettings) -> None:
        passed_on = ("wandb_attach_existing", "mlflow_tracking_uri", "mlflow_experiment_name", "mlflow_attach_existing")
        more = settings.gepa_kwargs
        prefix = more.get("tracking_key_prefix", "")
        # wandb ignores a step that is below one that it was told before. Without a prefix the axis would be that of all
        # figures of a run, those of the training loop that AsyncGEPA may be a part of included.
        overlaps = not settings.is_lockstep and (prefix or not more.get("wandb_attach_existing"))
        super().__init__(
            use_wandb=settings.use_wandb,
            wandb_api_key=settings.wandb_api_key,
            wandb_init_kwargs=settings.wandb_init_kwargs,
            use_mlflow=settings.use_mlflow,
            key_prefix=prefix,
            wandb_step_metric=f"{prefix}iteration" if overlaps else None,
            **{name: more[name] for name in passed_on if name in more},
        )
        self.thread: ThreadPoolExecutor | None = None
        """None where no tracker is asked for, and before it begins."""

    log_config = _sent(ExperimentTracker.log_config)
    log_metrics = _sent(ExperimentTracker.log_metrics)
    log_summary = _sent(ExperimentTracker.log_summary)
    log_table = _sent(ExperimentTracker.log_table)
    log_html = _sent(ExperimentTracker.log_html)

    def __enter__(self) -> Tracker:
        """Begin in the caller's thread: mlflow's active run belongs to it."""
        super().__enter__()
        if self.use_wandb or self.use_mlflow:
            self.thread = ThreadPoolExecutor(1, "flashevolve-tracker", self._attach)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> Literal[False]:
        """End after what was sent; where the run was cancelled, without what waits to be."""
        if self.thread is not None:
            self.thread.shutdown(cancel_futures=kind is not None and not issubclass(kind, Exception))
        return super().__exit__(kind, *error)

    def _attach(self) -> None:
        """Make mlflow's active run the thread's, too, since gepa logs tables to the active run."""
        if self._mlflow_run_id is not None:
            import mlflow  # pyright: ignore[reportMissingImports]

            mlflow.start_run(run_id=self._mlflow_run_id)

    def log_report(self, run_dir: str | None) -> None:
        """Send the report of `flashevolve report`, of a run with a directory. Call it in ``thread``."""
        if run_dir is not None:
            try:
                ExperimentTracker.log_html(self, report(read(run_dir, replies=True)), "report")
            except Exception as error:
                logger.warning("The tracker gets no report of %s: %s", run_dir, error)


def figures(stats: RunStats, busy: int, integrations: int) -> dict[str, float]:
    """Sum up a run so far for trackers, beside gepa's figures: tokens, dollars, slots that are ``busy``, repairs."""
    values: dict[str, float] = {"slots/busy": busy, "slots/limit": stats.slots, "integrations": integrations}
    for role, reflects in (("task", False), ("reflection", True)):
        stages = [stage for stage in stats.tokens_by_stage if (stage in REFLECTION_STAGES) == reflects]
        values[f"tokens/{role}"] = sum(stats.tokens_by_stage[stage] for stage in stages)
        dollars = [stats.dollars_by_stage[stage] for stage in stages]
        if dollars and None not in dollars:  # else nobody was asked yet, or a price is not known
            values[f"dollars/{role}"] = sum(filter(None, dollars))
    return values
