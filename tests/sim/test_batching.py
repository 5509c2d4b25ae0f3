"""The batching model: stepped in virtual time, checked against its closed forms and its conservation laws."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_flashevolve.sim.batching import ContinuousBatching, Event
from dspy_flashevolve.sim.profiles import H100_QWEN3_8B, Profile

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


def test_sequences_that_run_together_share_the_rate() -> None:
    clock = Clock()
    batch = ContinuousBatching(PLAIN, clock)
    for _ in range(2):
        batch.submit(prompt_tokens=1, output_tokens=100)
    batch.submit(prompt_tokens=1, output_tokens=200)
    times = finish_times(drain(batch, clock))
    assert times[0] == times[1] == pytest.approx(100 * 0.013)
    assert times[2] == pytest.approx(100 * 0.013 + 100 * 0.011)


def test_an_arrival_slows_only_what_is_still_to_be_written() -> None:
    clock = Clock()
    batch = ContinuousBatching(PLAIN, clock)
    batch.submit(prompt_tokens=1, output_tokens=100)
    clock.now = 50 * 0.011
    batch.submit(prompt_tokens=1, output_tokens=100)
    assert finish_times(drain(batch, clock))[0] == pytest.approx(50 * 0.011 + 50 * 0.012)


def test_a_shared_prefill_is_one_prompt_at_a_time_and_a_long_one_slows_decoding() -> None:
    profile = replace(PLAIN, prefill_tokens_per_second=1000.0, max_batched_tokens=50)
    clock = Clock()
    batch = ContinuousBatching(profile, clock)
    batch.submit(prompt_tokens=1000, output_tokens=1000)
    batch.submit(prompt_tokens=2000, output_tokens=1)
    events = drain(batch, clock)
    assert [event.time for event in events if event.kind == "first_token"] == pytest.approx([1.0, 3.0])
    # For two seconds a step of sequence 0 also reads 50 tokens, in 0.05 s; then one step of both; then it is alone.
    left = 1000 - 2.0 / 0.051 - 1
    assert finish_times(events)[0] == pytest.approx(3.0 + 0.012 + left * 0.011)


def test_a_short_shared_prefill_slows_no_decoding() -> None:
    clock = Clock()
    batch = ContinuousBatching(replace(PLAIN, prefill_tokens_per_second=1000.0), clock)
    batch.submit(prompt_tokens=0, output_tokens=100)
    batch.submit(prompt_tokens=10, output_tokens=1)
    assert finish_times(drain(batch, clock))[0] == pytest.approx(99 * 0.011 + 0.012)


def test_long_contexts_slow_the_whole_batch() -> None:
    clock = Clock()
    batch = ContinuousBatching(replace(PLAIN, step_seconds_per_cached_token=1e-6), clock)
    batch.submit(prompt_tokens=0, output_tokens=100)
    batch.submit(prompt_tokens=10_000, output_tokens=100)
    mean_cached = 10_000 + 2 * 100 / 2
    assert finish_times(drain(batch, clock))[0] == pytest.approx(100 * (0.012 + 1e-6 * mean_cached))


def test_a_prefill_of_its_own_leaves_the_others_alone() -> None:
    profile = replace(PLAIN, prefill_tokens_per_second=1000.0, prefill_is_shared=False)
    clock = Clock()
    batch = ContinuousBatching(profile, clock)
    for prompt_tokens in (1000, 2000):
        batch.submit(prompt_tokens=prompt_tokens, output_tokens=1)
    assert [e.time for e in drain(batch, clock) if e.kind == "first_token"] == pytest.approx([1.0, 2.0])


def test_a_place_that_came_free_during_a_jump_is_given_at_that_moment() -> None:
    clock = Clock()
    batch = ContinuousBatching(replace(PLAIN, max_running=1), clock)
    for _ in range(3):
        batch.submit(prompt_tokens=1, output_tokens=100)
    clock.now = 1000.0
    assert list(finish_times(batch.advance()).values()) == pytest.approx([1.1, 2.2, 3.3])


def test_cancelling_frees_the_place_at_once() -> None:
    clock = Clock()
    batch = ContinuousBatching(replace(PLAIN, max_running=1), clock)
    first, second = (batch.submit(prompt_tokens=1, output_tokens=100) for _ in range(2))
    clock.now = 0.55
    batch.cancel(first)
    load = batch.load()
    assert (load.running, load.waiting) == (1, 0)
    assert load.generated_tokens == pytest.approx(50)
    assert finish_times(drain(batch, clock)) == {second: pytest.approx(0.55 + 1.1)}
    batch.cancel(first)
    batch.cancel(12345)


def test_cancelling_the_prompt_that_is_prefilled_lets_the_next_one_begin() -> None:
    clock = Clock()
    batch = ContinuousBatching(replace(PLAIN, prefill_tokens_per_second=1000.0), clock)
    first, second = (batch.submit(prompt_tokens=1000, output_tokens=1) for _ in range(2))
    clock.now = 0.5
    batch.cancel(first)
    assert [(e.sequence, e.time) for e in drain(batch, clock) if e.kind == "first_token"] == [(second, 1.5)]


def test_running_seconds_are_the_integral_of_running() -> None:
    clock = Clock()
    batch = ContinuousBatching(replace(PLAIN, max_running=1), clock)
    for _ in range(2):
        batch.submit(prompt_tokens=1, output_tokens=100)
    clock.now = 10.0
    assert batch.load().running_seconds == pytest.approx(2.2)


def test_kv_tokens_are_those_of_the_running_sequences() -> None:
    clock = Clock()
    batch = ContinuousBatching(PLAIN, clock)
    batch.submit(prompt_tokens=300, output_tokens=100)
    clock.now = 0.55
    assert batch.load().kv_tokens == pytest.approx(350)
    clock.now = 5.0
    assert batch.load().kv_tokens == pytest.approx(0)


@pytest.mark.parametrize(("prompt_tokens", "output_tokens"), [(-1, 1), (0, 0)])
def test_sequences_without_tokens_are_refused(prompt_tokens: int, output_tokens: int) -> None:
    with pytest.raises(ValueError, match="prompt_tokens"):
        ContinuousBatching(PLAIN, Clock()).submit(prompt_tokens, output_tokens)


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
    profile: Profile, arrivals: list[tuple[float, int, int, bool]]
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
    profile: Profile, arrivals: list[tuple[float, int, int, bool]]
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
