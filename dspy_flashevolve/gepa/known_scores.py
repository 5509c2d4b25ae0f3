"""Scores on training examples that were run for whatever reason."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from dspy_flashevolve.gepa.payloads import Candidate

REMEMBERED = 32
"""Candidates whose scores on training examples are kept, so that a base is not run again on what it was run on."""


class KnownScores:
    """Scores of candidates on training examples that were run for whatever reason."""

    def __init__(self) -> None:
        self._scores: OrderedDict[tuple[tuple[str, str], ...], dict[Any, float]] = OrderedDict()

    def put(self, candidate: Candidate, ids: Sequence[Any], scores: Sequence[float]) -> None:
        """Remember scores."""
        key = tuple(sorted(candidate.items()))
        self._scores.setdefault(key, {}).update(zip(ids, scores, strict=True))
        self._scores.move_to_end(key)
        while len(self._scores) > REMEMBERED:
            self._scores.popitem(last=False)

    def of(self, candidate: Candidate) -> dict[Any, float]:
        """Training id -> score, as far as known."""
        return self._scores.get(tuple(sorted(candidate.items())), {})
