"""The profiles against the published figures that they are calibrated on."""

from __future__ import annotations

import pytest

from dspy_flashevolve.sim.batching import ContinuousBatching
from dspy_flashevolve.sim.profiles import API_GPT_4O_MINI, H100_QWEN3_8B, PROFILES, LengthLaw, profile_named

# Silybench, Qwen3-8B bf16, one H100, vLLM 0.30.0. Median inter-token latency in milliseconds by users and mean context.
PUBLISHED_LATENCY = {
    (1, 640): 6.858,
    (16, 640): 7.530,
    (64, 640): 9.494,
    (128, 640): 12.004,
    (256, 640): 18.084,
    (64, 192): 8.148,
    (256, 192): 12.832,
    (16, 3072): 9.464,
    (64, 3072): 17.053,
}
# Output tokens a second of the whole server, by (prompt tokens, output tokens, users).
PUBLISHED_THROUGHPUT = {
    (128, 1024, 1): 145.7,
    (128, 1024, 64): 6597,
    (128, 1024, 256): 13567,
    (128, 128, 64): 6958,
    (128, 128, 256): 13093,
    (1024, 128, 80): 3018,
    (2048, 2048, 64): 3463,
}


@pytest.mark.parametrize(("case", "milliseconds"), PUBLISHED_LATENCY.items())
def test_the_h100_decodes_within_six_percent_of_the_published_latency(
    case: tuple[int, int], milliseconds: float
) -> None:
    assert 1000 / H100_QWEN3_8B.decode_tokens_per_second(*case) == pytest.approx(milliseconds, rel=0.06)


def throughput(prompt_tokens: int, output_tokens: int, users: int) -> float:
    """Output tokens a second with `users` who each ask again at once, five times each, in virtual time."""
    now, left = 0.0, 5 * users
    batch = ContinuousBatching(H100_QWEN3_8B, clock=lambda: now)
    for _ in range(users):
        batch.submit(prompt_tokens, output_tokens)
    while (change := batch.next_change()) is not None:
        now = max(now, change)
        for _ in (event for event in batch.advance() if event.kind == "finished"):
            left -= 1
            if left >= users:
                batch.submit(prompt_tokens, output_tokens)
    return 5 * users * output_tokens / now


@pytest.mark.parametrize(("case", "tokens_per_second"), PUBLISHED_THROUGHPUT.items())
def test_the_h100_serves_within_twelve_percent_of_the_published_throughput(
    case: tuple[int, int, int], tokens_per_second: float
) -> None:
    assert throughput(*case) == pytest.approx(tokens_per_second, rel=0.12)


@pytest.mark.parametrize(("prompt_tokens", "milliseconds"), [(128, 14.1), (2048, 61.3), (8192, 253.9)])
def test_the_h100_gives_its_first_token_near_the_published_time(prompt_tokens: int, milliseconds: float) -> None:
    profile = H100_QWEN3_8B
    seconds = profile.time_to_first_token_seconds + prompt_tokens / profile.prefill_tokens_per_second
    assert seconds * 1000 == pytest.approx(milliseconds, rel=0.15)


def test_the_api_is_nearly_as_fast_under_load_as_alone() -> None:
    alone, loaded = (API_GPT_4O_MINI.decode_tokens_per_second(running) for running in (1, 100))
    assert alone == pytest.approx(62, rel=0.01)
    assert loaded > 0.95 * alone


def test_lengths_are_long_tailed_around_their_median() -> None:
    law = LengthLaw(median_tokens=250, sigma=0.8)
    assert law.tokens(0.5) == 250
    assert law.tokens(0.99) > 6 * 250
    assert law.tokens(1e-300) == 1
    assert LengthLaw(100, 0).tokens(0.999) == 100


@pytest.mark.parametrize(("median", "sigma"), [(0, 1), (-1, 1), (1, -1), (float("nan"), 1)])
def test_a_length_law_refuses_what_is_no_law(median: float, sigma: float) -> None:
    with pytest.raises(ValueError, match="median_tokens"):
        LengthLaw(median, sigma)


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'h200'.*api-gpt-4o-mini, h100-qwen3-8b"):
        profile_named("h200")
    assert [profile_named(name).name for name in PROFILES] == list(PROFILES)
