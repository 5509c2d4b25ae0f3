"""The batching model: stepped in virtual time, checked against its closed forms and its conservation laws."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.batching import H100_QWEN3_8B, ContinuousBatching, Event, SharedProfile

PLAIN = replace(
    H100_QWEN3_8B,
    time_to_first_token_seconds=0.0,
    prefill_tokens_per_second=math.inf,
    step_seconds=0.01,
    step_seconds_per_sequence=0.001,
    step_seconds_per_cached_token=0.0,
)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def drain(batch: ContinuousBatching, clock: Clock) -> list[Event]:
    """Step from change to change until nothing is under way."""
    events = batch.advance()
    while (change := batch.next_change()) is not None:
        clock.now = max(clock.now, change)
        events += batch.advance()
    return events


def finish_times(events: list[Event]) -> dict[int, float]:
    return {event.sequence: event.time for event in events if event.kind == "finished"}


def test_a_lone_sequence_takes_its_delay_its_prefill_and_its_tokens() -> None:
    clock = Clock()
    batch = ContinuousBatching(H100_QWEN3_8B, clock)
    batch.submit(prompt_tokens=3500, output_tokens=1000)
    first, finished = drain(batch, clock)
    assert first.time == pytest.approx(0.010 + 3500 / 35_000)
    mean_context = 3500 + 1000 / 2
    assert finished.time - first.time == pytest.approx(1000 * (0.00681 + 12.1e-6 + 48.5e-9 * mean_context))


arrivals = st.lists(
    st.tuples(st.floats(0, 2), st.integers(0, 5000), st.integers(1, 400), st.booleans()), min_size=1, max_size=40
)
profiles = st.builds(
    lambda max_running, shared, chunk, delay: replace(
        H100_QWEN3_8B,
        max_running=max_running,
        prefill_is_shared=shared,
        max_batched_tokens=chunk,
        time_to_first_token_seconds=delay,
    ),
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from([1, 512, 8192]),
    st.sampled_from([0.0, 0.01]),
)


@settings(max_examples=150, deadline=None)
@given(profile=profiles, arrivals=arrivals)
def test_every_sequence_ends_all_tokens_are_written_and_the_limits_hold(
    profile: SharedProfile, arrivals: list[tuple[float, int, int, bool]]
) -> None:
    clock = Clock()
    batch = ContinuousBatching(profile, clock)
    events: list[Event] = []
    for gap, prompt_tokens, output_tokens, _ in arrivals:
        clock.now += gap
        batch.submit(prompt_tokens, output_tokens)
        events += batch.advance()
        load = batch.load()
        assert load.running <= profile.max_running
        # Work conservation: nobody waits while there is a place.
        assert load.waiting == 0 or load.running == profile.max_running
    events += drain(batch, clock)
    assert sorted(finish_times(events)) == list(range(len(arrivals)))
    assert [event.time for event in events] == sorted(event.time for event in events)
    load = batch.load()
    assert load.generated_tokens == pytest.approx(sum(tokens for _, _, tokens, _ in arrivals))
    assert (load.running, load.waiting, batch.in_flight) == (0, 0, 0)
    if profile.prefill_is_shared:
        firsts = [event.sequence for event in events if event.kind == "first_token"]
        assert firsts == sorted(firsts), "places and prefills are first come, first served"


@settings(max_examples=100, deadline=None)
@given(profile=profiles, arrivals=arrivals)
def test_the_size_of_the_clocks_steps_changes_nothing(
    profile: SharedProfile, arrivals: list[tuple[float, int, int, bool]]
) -> None:
    def run(stepwise: bool) -> dict[int, float]:
        clock = Clock()
        batch = ContinuousBatching(profile, clock)
        events: list[Event] = []
        for gap, prompt_tokens, output_tokens, cancelled in arrivals:
            target = clock.now + gap
            while stepwise and (change := batch.next_change()) is not None and change < target:
                clock.now = max(clock.now, change)
                events += batch.advance()
            clock.now = target
            number = batch.submit(prompt_tokens, output_tokens)
            if cancelled:
                batch.cancel(number)
        return finish_times(events + drain(batch, clock))

    stepped, jumped = run(True), run(False)
    assert stepped == pytest.approx(jumped, abs=1e-6)
    assert len(stepped) == sum(not cancelled for *_, cancelled in arrivals)


# The profile against the published figures that it is calibrated on

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
