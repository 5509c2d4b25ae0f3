"""Profiles of simulated backends: rates, limits and output lengths, from published figures.

`h100-qwen3-8b` is one NVIDIA H100 80 GB with Qwen3-8B in bfloat16 under vLLM. Its constants are fitted to
silybench run `20260924T125045Z_h100-80gbx1_qwen3-8b_bf16` (github.com/tgarg01/silybench-data,
`derived/csv/perf_points.csv`, vLLM 0.30.0, thinking off): the inter-token latency for 1 to 256 users and for mean
contexts of 192, 640 and 3072 tokens, the time to first token for prompts of 128 to 8192 tokens, and the room in
the KV cache. `api-gpt-4o-mini` takes its speed from
community.openai.com/t/1307310 and its time to first token from apikeyhealth.com and newmen.ai.
`docs/simulated-server.md` puts the figures and the fit side by side.
"""

from __future__ import annotations

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

    Examples:
        >>> LengthLaw(median_tokens=250, sigma=0.8).tokens(0.5)
        250
        >>> LengthLaw(median_tokens=250, sigma=0.8).tokens(0.99)
        1608
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
        model: The model's name in `/v1/models` and in the labels of `/metrics`.
        max_running: Sequences that run at a time; further ones wait in order of arrival (vLLM's `max_num_seqs`).
        concurrency_limit: Requests in flight above which a request is refused with status 429; None for no limit.
        retry_after_seconds: What a refusal says in Retry-After.
        time_to_first_token_seconds: Fixed delay from the start of a sequence to its prefill.
        prefill_tokens_per_second: Prompt tokens read a second.
        prefill_is_shared: True when all sequences share one prefill rate, first come first served, and prefill
            slows decoding (one GPU); False when each sequence has its own (a fleet behind an API).
        max_batched_tokens: Most prompt tokens in one step of a shared prefill (vLLM's `max_num_batched_tokens`).
        step_seconds: Decoding time a token of a sequence that runs alone with an empty context.
        step_seconds_per_sequence: What each sequence adds to that time.
        step_seconds_per_cached_token: What each token in the KV cache of a decoding sequence adds to that time.
        kv_cache_tokens: Tokens that the KV cache holds; for the gauge in `/metrics` only.
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
    prefill_is_shared: bool
    max_batched_tokens: int
    step_seconds: float
    step_seconds_per_sequence: float
    step_seconds_per_cached_token: float
    kv_cache_tokens: int
    task_length: LengthLaw = LengthLaw(median_tokens=250, sigma=0.8)
    reflection_length: LengthLaw = LengthLaw(median_tokens=900, sigma=0.5)
    max_output_tokens: int = 8192

    def step_without_cache_seconds(self, running: int, queued_prompt_tokens: int = 0) -> float:
        """Time of one decoding step (one token of each sequence) less the time to read the KV cache.

        A step that also reads prompt tokens takes the longer of loading the weights and computing those tokens:
        loading is bound by memory and prefill by arithmetic, so that a short prompt is free and a long one holds
        up everybody (chunked prefill, Agrawal et al., arXiv 2403.02310).

        Args:
            running: Sequences that decode, at least 1.
            queued_prompt_tokens: Tokens of the prompts that wait for a shared prefill or are in it.
        """
        prefill_seconds = min(queued_prompt_tokens, self.max_batched_tokens) / self.prefill_tokens_per_second
        return max(self.step_seconds, prefill_seconds) + self.step_seconds_per_sequence * running

    def decode_tokens_per_second(self, running: int, context_tokens: float = 640) -> float:
        """Tokens a second of each sequence when `running` (at least 1) sequences decode together.

        Args:
            running: Sequences that decode, at least 1.
            context_tokens: Mean tokens, prompt and output so far, of a sequence.

        Examples:
            >>> round(PROFILES["h100-qwen3-8b"].decode_tokens_per_second(64), 1)
            104.5
        """
        cache_seconds = self.step_seconds_per_cached_token * context_tokens * running
        return 1.0 / (self.step_without_cache_seconds(running) + cache_seconds)


H100_QWEN3_8B = Profile(
    name="h100-qwen3-8b",
    model="Qwen/Qwen3-8B",
    max_running=256,
    concurrency_limit=None,
    retry_after_seconds=1.0,
    time_to_first_token_seconds=0.010,
    prefill_tokens_per_second=35_000.0,
    prefill_is_shared=True,
    max_batched_tokens=8192,
    step_seconds=0.00681,
    step_seconds_per_sequence=12.1e-6,
    step_seconds_per_cached_token=48.5e-9,
    kv_cache_tokens=377_024,
)

API_GPT_4O_MINI = Profile(
    name="api-gpt-4o-mini",
    model="gpt-4o-mini",
    max_running=10_000,
    concurrency_limit=100,
    retry_after_seconds=1.0,
    time_to_first_token_seconds=0.45,
    prefill_tokens_per_second=20_000.0,
    prefill_is_shared=False,
    max_batched_tokens=8192,
    step_seconds=1 / 62,
    step_seconds_per_sequence=5e-6,
    step_seconds_per_cached_token=0.0,
    kv_cache_tokens=128_000 * 10_000,
)

PROFILES: dict[str, Profile] = {profile.name: profile for profile in (H100_QWEN3_8B, API_GPT_4O_MINI)}


def profile_named(name: str) -> Profile:
    """Return the profile with a name.

    Raises:
        ValueError: If there is none; the message lists the names there are.

    Examples:
        >>> profile_named("h100-qwen3-8b").max_running
        256
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise ValueError(f"unknown profile {name!r}: choose one of {', '.join(sorted(PROFILES))}") from None
