"""gepa's stoppers, asked as gepa asks them, with a memory of which one said stop."""

from __future__ import annotations

import os
from typing import Any

from gepa.utils import CompositeStopper, FileStopper, MaxMetricCallsStopper

from dspy_flashevolve.gepa.options import GepaOptions


class Stoppers(CompositeStopper):
    """Stops when one of the stoppers says so; the rest is not asked that time.

    Args:
        stoppers: gepa's, or the user's own.
    """

    def __init__(self, *stoppers: Any) -> None:
        super().__init__(*stoppers)
        self.said = ""
        """Why to stop; empty until a stopper has said so."""
        self.budget_spent = False
        """It was the budget of metric calls that said so."""

    def __call__(self, gepa_state: Any) -> bool:
        """Ask them in order."""
        says = next((stopper for stopper in self.stoppers if stopper(gepa_state)), None)
        if says is not None and not self.said:
            self.said = _reason(says)
            self.budget_spent = isinstance(says, MaxMetricCallsStopper)
        return says is not None


def stoppers_of(options: GepaOptions) -> Stoppers:
    """The stoppers that ``options`` asks for: the user's, the file ``gepa.stop`` in the run directory, the budget."""
    given = options.get("stop_callbacks")
    stoppers: list[Any] = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    if options.run_dir is not None:
        stoppers.append(FileStopper(os.path.join(options.run_dir, "gepa.stop")))
    if options.max_metric_calls is not None:
        stoppers.append(MaxMetricCallsStopper(options.max_metric_calls))
    return Stoppers(*stoppers)


def _reason(stopper: Any) -> str:
    if isinstance(stopper, FileStopper):
        return f"the file {stopper.stop_file_path} is there"
    if isinstance(stopper, MaxMetricCallsStopper):
        return f"max_metric_calls={stopper.max_metric_calls} is spent"
    return "a stopper said stop"
