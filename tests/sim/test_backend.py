"""The backends: places, rates and lengths."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from dspy_flashevolve.sim.backend import H100_QWEN3_8B, PROFILES, LengthLaw, profile_named
from dspy_flashevolve.sim.virtual import run

NARROW = replace(
    H100_QWEN3_8B,
    max_running=1,
    time_to_first_token_seconds=1.0,
    prefill_tokens_per_second=100.0,
    step_seconds=0.1,
)


def test_a_reply_takes_its_delay_its_prompt_and_its_tokens_and_the_next_one_waits_for_its_place() -> None:
    async def main() -> None:
        batch = NARROW.batch(time_scale=1.0)
        first, second = batch.submit(200, 50), batch.submit(0, 10)
        await asyncio.sleep(5.0)
        load = batch.load()
        assert (load.running, load.waiting, batch.in_flight) == (1, 1, 2)
        assert load.generated_tokens == pytest.approx(20.0)
        assert await first.finished == pytest.approx(8.0)
        assert await second.finished == pytest.approx(10.0)
        load = batch.load()
        assert (load.running, load.generated_tokens, load.running_seconds) == (0, pytest.approx(60), pytest.approx(10))

    run(main)


def test_a_reply_that_is_given_up_frees_its_place_at_once() -> None:
    async def main() -> None:
        batch = NARROW.batch(time_scale=2.0)
        first, second, third = (batch.submit(0, 10) for _ in range(3))
        assert batch.release(second)
        await asyncio.sleep(0.75)
        assert batch.release(first)
        assert not batch.release(first)
        assert await third.finished == pytest.approx(1.5 + 2.0)
        assert not batch.release(third)
        assert batch.load().generated_tokens == pytest.approx(15)

    run(main)


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
