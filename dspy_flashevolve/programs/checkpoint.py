"""dspy.GEPA's own run directory as a history: what its checkpoint tells of candidates and scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gepa.core.state import EvaluationCache

from dspy_flashevolve.engine.errors import RunDirectoryError
from dspy_flashevolve.engine.replay import BEFORE_STEPS, id_text
from dspy_flashevolve.observe.history import Candidate, History
from dspy_flashevolve.programs.records import DataUnpickler

FILE = "gepa_state.bin"
HOLDS = (EvaluationCache,)
"""What a checkpoint may hold beside plain data: imported here, since reading one imports nothing by its name."""


def read_checkpoint(run_dir: str | Path) -> History:
    """Read ``gepa_state.bin`` without running what is in it. It holds no times, tokens, steps or failures.

    Raises:
        RunDirectoryError: it cannot be read, or names code.
    """
    path = Path(run_dir) / FILE
    try:
        with path.open("rb") as file:
            state: dict[str, Any] = DataUnpickler(file).load()
        candidates = [
            Candidate(
                index,
                dict(texts),
                sum(scores.values()) / len(scores) if scores else None,
                {id_text(one): float(score) for one, score in scores.items()},
                tuple(parents),
                step=BEFORE_STEPS,
                calls=calls,
                version=index,
            )
            for index, (texts, scores, parents, calls) in enumerate(
                zip(
                    state["program_candidates"],
                    state["prog_candidate_val_subscores"],
                    state["parent_program_for_candidate"],
                    state["num_metric_calls_by_discovery"],
                    strict=True,
                )
            )
        ]
        calls = int(state["total_num_evals"])
    except Exception as error:
        why = str(error) if isinstance(error, RunDirectoryError) else f"{type(error).__name__}: {error}; it is damaged"
        raise RunDirectoryError(f"{path} cannot be read: {why}.") from error
    return History(directory=str(run_dir), optimizer="dspy.GEPA", calls=calls, candidates=tuple(candidates))
