"""What ``compile`` returns, and what there is of it while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspy.primitives import Module
from dspy.teleprompt.gepa.gepa import DspyGEPAResult
from gepa.core.result import GEPAResult

from dspy_flashevolve.gepa.standing import Standing
from dspy_flashevolve.observe.statistics import AsyncStats


@dataclass(frozen=True)
class AsyncGEPAResult(DspyGEPAResult):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
    """``dspy.GEPA``'s detailed results, with the figures of the asynchronous run beside them.

    Args:
        async_stats: throughput, occupancy, gaps and commits; see :class:`AsyncStats`. None while the run goes on.
    """

    async_stats: AsyncStats | None = None


class Best:
    """The best program of one run, for any thread at any time; it waits for nobody.

    Copies and pickles of it are empty: a run belongs to the optimizer that began it.

    Args:
        adapter: builds programs.
        track_stats: whether programs carry detailed results.
    """

    def __init__(self, adapter: Any = None, track_stats: bool = False) -> None:
        self._adapter = adapter
        self._track_stats = track_stats
        self._standing: Standing | None = None
        self._end: tuple[GEPAResult[Any, Any] | None, AsyncStats] | None = None

    def __reduce__(self) -> Any:
        return (Best, ())

    def begin(self, standing: Standing) -> None:
        """The run has begun; ``standing`` says where it stands."""
        self._standing = standing

    def end(self, result: GEPAResult[Any, Any] | None, stats: AsyncStats) -> None:
        """The run has ended with ``result``, None where the seed was not validated."""
        self._end = (result, stats)
        self._standing = None

    def program(self) -> Module | None:
        """A new program each time; None before the seed is validated."""
        standing, end = self._standing, self._end  # in this order: the end is set before the standing goes
        result, stats = end or (None if standing is None else standing.result, None)
        if result is None:
            return None
        program: Any = self._adapter.build_program(result.best_candidate)
        if self._track_stats:
            detailed = AsyncGEPAResult.from_gepa_result(result, self._adapter)
            program.detailed_results = AsyncGEPAResult(**vars(detailed), async_stats=stats)
            program.async_stats = stats
        return program
