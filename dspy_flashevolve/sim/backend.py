"""Simulated backends: how fast they read and write, how many requests they serve at once, and when a reply is done.

Each request waits for a place in order of arrival, and is then written at the profile's rate, whatever runs beside it.
The rates are those of one NVIDIA H100 with Qwen3-8B under vLLM with 32 requests in flight (silybench run
`20260924T125045Z_h100-80gbx1_qwen3-8b_bf16`, github.com/tgarg01/silybench-data) and of an API (observations of third
parties: community.openai.com/t/1307310, apikeyhealth.com, newmen.ai). A server whose batch slows every request down,
fitted to the same figures, is in the repository's `benchmarks/batching.py`.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from statistics import NormalDist

_NORMAL = NormalDist()


@dataclass(frozen=True)
class LengthLaw:
    """A lognormal law of output lengths, in tokens.

    Attributes:
        median_tokens: Half of the outputs are shorter; above 0.
        sigma: Standard deviation of the logarithm; 0 gives a constant, 0.8 a long tail (p99 = 6.4 medians).

    Raises:
        ValueError: If `median_tokens` is not positive or `sigma` is negative.
    """

    median_tokens: float
    sigma: float

    def __post_init__(self) -> None:
        if not (self.median_tokens > 0 and self.sigma >= 0):
            raise ValueError(
                "a length law needs median_tokens > 0 and sigma >= 0, "
                f"got median_tokens={self.median_tokens!r} and sigma={self.sigma!r}"
            )

    def tokens(self, quantile: float) -> int:
        """Return the length, at least 1 token, below which a share `quantile` (0 < quantile < 1) of outputs lies."""
        return max(1, round(self.median_tokens * math.exp(self.sigma * _NORMAL.inv_cdf(quantile))))


@dataclass(frozen=True)
class Profile:
    """One simulated backend. Times are model seconds: a server with a `time_scale` lets them pass faster.

    Attributes:
        name: What `--profile` says.
        model: The model's name in `/v1/models`.
        max_running: Requests that are served at a time; further ones wait in order of arrival.
        concurrency_limit: Requests in flight above which a request is refused with status 429; None for no limit.
        retry_after_seconds: What a refusal says in Retry-After.
        time_to_first_token_seconds: Fixed delay from the start of a request to its first prompt token.
        prefill_tokens_per_second: Prompt tokens that are read a second, for each request.
        step_seconds: Time to write one token.
        task_length: Law of the output lengths of task replies (and of replies to unknown prompts).
        reflection_length: Law of the output lengths of reflection replies.
        max_output_tokens: Where outputs are cut when the request names no limit.
    """

    name: str
    model: str
    max_running: int
    concurrency_limit: int | None
    retry_after_seconds: float
    time_to_first_token_seconds: float
    prefill_tokens_per_second: float
    step_seconds: float
    task_length: LengthLaw = LengthLaw(median_tokens=250, sigma=0.8)
    reflection_length: LengthLaw = LengthLaw(median_tokens=900, sigma=0.5)
    max_output_tokens: int = 8192

    def batch(self, time_scale: float) -> Batch:
        """Return what serves requests at these rates, on the running event loop."""
        return Batch(self, time_scale)


@dataclass(frozen=True)
class Load:
    """The requests that run and wait at one moment, with the totals since the beginning: tokens written, pro rata for
    replies that are not finished, and the integral of `running` over time in model seconds."""

    running: int
    waiting: int
    generated_tokens: float
    running_seconds: float


@dataclass(eq=False)
class Generation:
    """A reply that is being written: from `writes_from`, in model seconds, until the timer of its last token, whose
    model time is the result of `finished`."""

    prompt_tokens: int
    output_tokens: int
    finished: asyncio.Future[float]
    writes_from: float = math.inf
    timer: asyncio.TimerHandle | None = None


class Batch:
    """The requests that a backend serves; for the thread of the running event loop only."""

    def __init__(self, profile: Profile, time_scale: float) -> None:
        self._profile, self._time_scale = profile, time_scale
        self._loop = asyncio.get_running_loop()
        self._origin = self._loop.time()
        self._waiting: dict[Generation, None] = {}
        self._running: dict[Generation, None] = {}
        self._written_tokens = self._running_seconds = self._counted_until = 0.0

    def now(self) -> float:
        """Model seconds since the batch was made."""
        return (self._loop.time() - self._origin) * self._time_scale

    @property
    def in_flight(self) -> int:
        """Requests that run or wait."""
        return len(self._running) + len(self._waiting)

    def load(self) -> Load:
        """State and totals of the batch."""
        self._count_running()
        return Load(
            running=len(self._running),
            waiting=len(self._waiting),
            generated_tokens=self._written_tokens + sum(map(self._written, self._running)),
            running_seconds=self._running_seconds,
        )

    def submit(self, prompt_tokens: int, output_tokens: int) -> Generation:
        """Start a reply; the caller must `release` it in the end, finished or not."""
        generation = Generation(prompt_tokens, output_tokens, self._loop.create_future())
        self._waiting[generation] = None
        self._fill_places()
        return generation

    def release(self, generation: Generation) -> bool:
        """Free the reply's place; True if it was not finished. A second call does nothing and returns False."""
        if generation in self._waiting:
            del self._waiting[generation]
            return True
        if generation in self._running:
            self._leave(generation)
            return True
        return False

    def _fill_places(self) -> None:
        self._count_running()
        while self._waiting and len(self._running) < self._profile.max_running:
            generation = next(iter(self._waiting))
            del self._waiting[generation]
            self._running[generation] = None
            first = self._profile.time_to_first_token_seconds
            first += generation.prompt_tokens / self._profile.prefill_tokens_per_second
            last = first + generation.output_tokens * self._profile.step_seconds
            generation.writes_from = self.now() + first
            generation.timer = self._loop.call_later(last / self._time_scale, self._finish, generation)

    def _finish(self, generation: Generation) -> None:
        self._leave(generation)
        # A client that went away has cancelled the future it waited for, and not yet released its place.
        if not generation.finished.done():
            generation.finished.set_result(self.now())

    def _leave(self, generation: Generation) -> None:
        self._count_running()
        self._written_tokens += self._written(generation)
        if generation.timer is not None:
            generation.timer.cancel()
        del self._running[generation]
        self._fill_places()

    def _written(self, generation: Generation) -> float:
        """Return how many tokens of a reply are written by now."""
        tokens = (self.now() - generation.writes_from) / self._profile.step_seconds
        return min(max(0.0, tokens), generation.output_tokens)

    def _count_running(self) -> None:
        now = self.now()
        self._running_seconds += (now - self._counted_until) * len(self._running)
        self._counted_until = now


H100_QWEN3_8B = Profile(
    name="h100-qwen3-8b",
    model="Qwen/Qwen3-8B",
    max_running=256,
    concurrency_limit=None,
    retry_after_seconds=1.0,
    time_to_first_token_seconds=0.010,
    prefill_tokens_per_second=35_000.0,
    step_seconds=0.0082,
)
API_GPT_4O_MINI = Profile(
    name="api-gpt-4o-mini",
    model="gpt-4o-mini",
    max_running=10_000,
    concurrency_limit=100,
    retry_after_seconds=1.0,
    time_to_first_token_seconds=0.45,
    prefill_tokens_per_second=20_000.0,
    step_seconds=1 / 62,
)
PROFILES: dict[str, Profile] = {profile.name: profile for profile in (H100_QWEN3_8B, API_GPT_4O_MINI)}


def profile_named(name: str) -> Profile:
    """Return the profile with a name; a ValueError where there is none lists the names there are."""
    try:
        return PROFILES[name]
    except KeyError:
        raise ValueError(f"unknown profile {name!r}: choose one of {', '.join(sorted(PROFILES))}") from None
