"""The counters of the simulated server, and `/stats`, which shows them over a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from dspy_flashevolve.sim.faults import FaultKind
from dspy_flashevolve.sim.prompts import PromptKind

KINDS: tuple[PromptKind, ...] = get_args(PromptKind)


@dataclass(frozen=True)
class KindStats:
    """Finished requests of one kind of prompt, and their tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class ServerStats:
    """The statistics of `/stats`, since the start or the last reset.

    Attributes:
        profile: The profile's name.
        seed: The server's seed.
        time_scale: Model seconds a wall second.
        seconds: Wall seconds of the window.
        model_seconds: Model seconds of the window.
        requests: Requests accepted; a request that a fault refuses or hangs is not.
        finished: Requests whose reply was written to its end; a fault may have damaged its body.
        cancelled: Requests whose client went away.
        refused: Requests answered with status 429.
        running: Sequences that run now.
        waiting: Sequences that wait now.
        prompt_tokens: Prompt tokens of the finished requests.
        completion_tokens: Completion tokens of the finished requests.
        generated_tokens: Tokens written in the window, pro rata for requests that are not finished.
        mean_running: Mean number of running sequences over the window.
        by_kind: Finished requests by kind of prompt (`prompts.PromptKind`).
        faults: Faults injected, by kind (`faults.FaultKind`); kinds that did not occur are left out.
    """

    profile: str
    seed: int
    time_scale: float
    seconds: float
    model_seconds: float
    requests: int
    finished: int
    cancelled: int
    refused: int
    running: int
    waiting: int
    prompt_tokens: int
    completion_tokens: int
    generated_tokens: float
    mean_running: float
    by_kind: Mapping[str, KindStats]
    faults: Mapping[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def from_json(cls, payload: Mapping[str, Any]) -> ServerStats:
        """Read the object that `/stats` sent."""
        values = dict(payload)
        values["by_kind"] = {kind: KindStats(**stats) for kind, stats in payload["by_kind"].items()}
        return cls(**values)


@dataclass
class Counters:
    """Running totals of requests; `of_kind` holds requests, prompt tokens and completion tokens for each kind."""

    requests: int = 0
    refused: int = 0
    cancelled: int = 0
    of_kind: dict[PromptKind, list[int]] = field(default_factory=lambda: {kind: [0, 0, 0] for kind in KINDS})
    faults: dict[str, int] = field(default_factory=dict[str, int])

    def finish(self, kind: PromptKind, prompt_tokens: int, completion_tokens: int) -> None:
        """Count an answered request."""
        for column, count in enumerate((1, prompt_tokens, completion_tokens)):
            self.of_kind[kind][column] += count

    def inject(self, kind: FaultKind) -> None:
        """Count a fault; a rate limit is a refusal too."""
        self.faults[kind] = self.faults.get(kind, 0) + 1
        self.refused += kind == "rate_limit"

    def total(self, column: Literal[0, 1, 2]) -> int:
        """The sum over the kinds of requests (0), prompt tokens (1) or completion tokens (2)."""
        return sum(totals[column] for totals in self.of_kind.values())

    def kind_stats(self) -> dict[str, KindStats]:
        """Return `by_kind` of `/stats`."""
        return {kind: KindStats(*totals) for kind, totals in self.of_kind.items()}
