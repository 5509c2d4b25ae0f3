"""gepa's experiment tracker for steps that overlap: what it is told is sent from a thread of its own, in order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, Literal

from gepa.logging.experiment_tracker import ExperimentTracker

from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.gepa.settings import GepaSettings
from dspy_flashevolve.observe.history import read
from dspy_flashevolve.observe.report import report
from dspy_flashevolve.observe.statistics import REFLECTION_STAGES, RunStats

logger = logger_named(__name__)


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
    wait for it, but for what is left at its end.

    Args:
        settings: what is tracked, and how.
    """

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
    """Sum up a run so far for trackers, beside gepa's figures: tokens, dollars, slots, repairs.

    Args:
        busy: slots in use now.
        integrations: calls for repairs so far.
    """
    values: dict[str, float] = {"slots/busy": busy, "slots/limit": stats.slots, "integrations": integrations}
    for role, reflects in (("task", False), ("reflection", True)):
        stages = [stage for stage in stats.tokens_by_stage if (stage in REFLECTION_STAGES) == reflects]
        values[f"tokens/{role}"] = sum(stats.tokens_by_stage[stage] for stage in stages)
        dollars = [stats.dollars_by_stage[stage] for stage in stages]
        if dollars and None not in dollars:  # else nobody was asked yet, or a price is not known
            values[f"dollars/{role}"] = sum(filter(None, dollars))
    return values
