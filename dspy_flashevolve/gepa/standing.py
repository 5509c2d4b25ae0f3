"""Where the pool stands, for whoever asks from another thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gepa.core.result import GEPAResult
from gepa.core.state import GEPAState


class Standing:
    """gepa's result as of the last candidate that was better than all before it.

    A gepa callback, the first one: it is told of every validated candidate in the pool's writer, where the state may
    be read, and copies what it needs. ``result`` is replaced, never changed, so any thread may read it at any time and
    waits for nobody: not for the writer, which may be inside a callback that waits in turn.

    Args:
        state: the pool's.
        run_dir, seed: what gepa's result carries.
    """

    def __init__(self, state: Callable[[], GEPAState[Any, Any]], run_dir: str | None, seed: int | None) -> None:
        self._state = state
        self._run_dir = run_dir
        self._seed = seed
        self._best = float("-inf")
        self.result: GEPAResult[Any, Any] | None = None
        """None before the seed is validated."""

    def on_valset_evaluated(self, event: Any) -> None:
        """Called by gepa's code for each new candidate, and once for the seed or a checkpoint's candidates."""
        state = self._state()
        score = state.get_program_average_val_subset(event["candidate_idx"])[0]
        if self.result is None or score > self._best:  # as gepa's result decides between equals: the first
            self.result = GEPAResult[Any, Any].from_state(state, run_dir=self._run_dir, seed=self._seed)
            self._best = self.result.val_aggregate_scores[self.result.best_idx]

    @property
    def score(self) -> float | None:
        """The best aggregate validation score; None before the seed is validated."""
        return None if self.result is None else self._best
