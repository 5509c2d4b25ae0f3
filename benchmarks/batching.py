"""Continuous batching as arithmetic: which sequences run, how fast, and when each one ends.

A sequence goes through these states; nothing here sleeps, and time comes from an injected clock:

    submit -> waiting -> starting -> prefilling -> decoding -> finished
              (FIFO,     (fixed      (one at a     (all at the same rate,
              no place)  delay)      time, FIFO)   processor sharing)

`DecodingPool` is the arithmetic of decoding, `BatchDriver` runs the model on an event loop; an event is O(log n).
This is the processor-sharing view of iteration-level scheduling (Orca, Yu et al., OSDI 2022; vLLM, Kwon et al.,
SOSP 2023).
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from dspy_flashevolve.sim import backend
from dspy_flashevolve.sim.backend import Load, Profile


class DecodingPool:
    """The sequences that decode now, as processor sharing in closed form. It is told how many seconds pass.

    All sequences advance at one common rate, so one number, the tokens that a sequence would have written had it
    decoded from the beginning (`progress`), says when each of them ends: a sequence that joins at progress p with n
    tokens to write ends at the mark p + n. A heap over the marks makes joining and ending O(log n).

    A step, one token for each of n sequences, takes base + c * (tokens in the KV cache), and adds n tokens to the
    cache. So x steps take (base + c * cached) * x + c * n * x^2 / 2, which can be inverted.

    Args:
        profile: Gives the time of a step.

    Examples:
        >>> from benchmarks.batching import PROFILES
        >>> pool = DecodingPool(PROFILES["api-gpt-4o-mini"])
        >>> pool.join(number=0, prompt_tokens=350, output_tokens=620)
        >>> round(pool.seconds_to_next_end(), 2)
        10.0
        >>> pool.pass_seconds(5.0)
        >>> round(pool.written_tokens)
        310
    """

    def __init__(self, profile: SharedProfile) -> None:
        self._profile = profile
        self._joined: dict[int, tuple[int, float]] = {}
        self._marks: list[tuple[float, int]] = []
        self._progress = 0.0
        self._prompt_tokens = 0
        self._sum_of_joins = 0.0
        self._queued_prompt_tokens = 0
        self._written = 0.0

    def __len__(self) -> int:
        return len(self._joined)

    @property
    def written_tokens(self) -> float:
        """Tokens written since the beginning, also by sequences that left."""
        return self._written

    @property
    def cached_tokens(self) -> float:
        """Prompt and output tokens of the sequences that decode now."""
        return self._prompt_tokens + len(self) * self._progress - self._sum_of_joins

    def set_queued_prompt_tokens(self, tokens: int) -> None:
        """Say how many prompt tokens wait for a shared prefill or are in it: they make steps longer."""
        self._queued_prompt_tokens = tokens

    def join(self, number: int, prompt_tokens: int, output_tokens: int) -> None:
        """Add a sequence whose prefill is over."""
        self._joined[number] = (prompt_tokens, self._progress)
        self._prompt_tokens += prompt_tokens
        self._sum_of_joins += self._progress
        heapq.heappush(self._marks, (self._progress + output_tokens, number))

    def leave(self, number: int) -> None:
        """Take a sequence out before its end."""
        prompt_tokens, join = self._joined.pop(number)
        self._prompt_tokens -= prompt_tokens
        self._sum_of_joins -= join
        if not self._joined:
            # Rounding errors would otherwise grow over the life of a server.
            self._progress = self._sum_of_joins = 0.0
            self._marks.clear()

    def seconds_to_next_end(self) -> float:
        """Seconds until a sequence has written its last token; infinite when none decodes."""
        while self._marks and self._marks[0][1] not in self._joined:
            heapq.heappop(self._marks)
        if not self._marks:
            return math.inf
        tokens = max(0.0, self._marks[0][0] - self._progress)
        step, growth = self._step()
        return step * tokens + growth * tokens * tokens / 2

    def pass_seconds(self, seconds: float) -> None:
        """Let time pass, at most `seconds_to_next_end()`."""
        if not self._joined:
            return
        step, growth = self._step()
        tokens_each = 2 * seconds / (step + math.sqrt(step * step + 2 * growth * seconds))
        self._progress += tokens_each
        self._written += tokens_each * len(self)

    def end_next(self) -> int:
        """Take out the sequence that has written its last token, and return its number."""
        mark, number = heapq.heappop(self._marks)
        self._written += mark - self._progress
        self.leave(number)
        return number

    def _step(self) -> tuple[float, float]:
        """Seconds of a step now, and seconds that each step adds to the next one."""
        each = self._profile.step_seconds_per_cached_token
        base = self._profile.step_without_cache_seconds(len(self), self._queued_prompt_tokens)
        return base + each * self.cached_tokens, each * len(self)


EventKind = Literal["first_token", "finished"]


@dataclass(frozen=True)
class Event:
    """Something that happened to a sequence: its prefill is over, or its last token is written.

    Attributes:
        kind: "first_token" or "finished"; every sequence that is not cancelled has one of each, in this order.
        sequence: The number that `submit` gave.
        time: When, in model seconds on the injected clock.
    """

    kind: EventKind
    sequence: int
    time: float


@dataclass
class _Sequence:
    number: int
    prompt_tokens: int
    output_tokens: int
    state: Literal["waiting", "starting", "prefilling", "decoding"] = "waiting"


class ContinuousBatching:
    """A batch of sequences under one profile.

    `submit`, `cancel` and `advance` first bring the model up to the clock's time. The clock may jump any distance:
    places that come free in between are given at the moment they came free.

    Args:
        profile: Rates and limits.
        clock: Returns the model time in seconds; must not go back.

    Examples:
        >>> from benchmarks.batching import PROFILES
        >>> now = 0.0
        >>> batch = ContinuousBatching(PROFILES["h100-qwen3-8b"], clock=lambda: now)
        >>> batch.submit(prompt_tokens=350, output_tokens=1000)
        0
        >>> now = 60.0
        >>> [(event.kind, round(event.time, 2)) for event in batch.advance()]
        [('first_token', 0.02), ('finished', 6.88)]
    """

    def __init__(self, profile: SharedProfile, clock: Callable[[], float]) -> None:
        self._profile = profile
        self._clock = clock
        self._now = clock()
        self._next_number = 0
        self._sequences: dict[int, _Sequence] = {}
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._starting: list[tuple[float, int]] = []
        self._prefills: deque[int] = deque()
        self._queued_prompt_tokens = 0
        self._prefill_left_seconds = 0.0
        self._pool = DecodingPool(profile)
        self._running_seconds = 0.0
        self._events: list[Event] = []

    def submit(self, prompt_tokens: int, output_tokens: int) -> int:
        """Add a sequence now and return its number (0, 1, 2, ... in order of arrival).

        Args:
            prompt_tokens: Tokens to prefill, at least 0.
            output_tokens: Tokens to write, at least 1.

        Raises:
            ValueError: If either is below its minimum.
        """
        if prompt_tokens < 0 or output_tokens < 1:
            raise ValueError(
                f"a sequence needs prompt_tokens >= 0 and output_tokens >= 1, got {prompt_tokens} and {output_tokens}"
            )
        self._catch_up(self._clock())
        sequence = _Sequence(self._next_number, prompt_tokens, output_tokens)
        self._next_number += 1
        self._sequences[sequence.number] = sequence
        self._waiting[sequence.number] = None
        self._fill_places()
        return sequence.number

    def cancel(self, number: int) -> None:
        """Take a sequence out now and give its place to the next one; a finished or unknown number does nothing."""
        self._catch_up(self._clock())
        sequence = self._sequences.pop(number, None)
        if sequence is None:
            return
        if sequence.state == "waiting":
            del self._waiting[number]
            return
        if sequence.state == "decoding":
            self._pool.leave(number)
        if sequence.state == "prefilling":
            self._leave_prefills(sequence)
        self._fill_places()

    def advance(self) -> list[Event]:
        """Bring the model up to the clock's time; return what happened since the last call, in order of time."""
        self._catch_up(self._clock())
        events, self._events = self._events, []
        return events

    def next_change(self) -> float | None:
        """When, in model seconds, the next thing happens by itself; None when nothing is under way."""
        time = min(self._start_time(), self._prefill_time(), self._finish_time())
        return None if math.isinf(time) else time

    def load(self) -> Load:
        """State and totals at the clock's time."""
        self._catch_up(self._clock())
        return Load(
            running=self._running,
            waiting=len(self._waiting),
            generated_tokens=self._pool.written_tokens,
            running_seconds=self._running_seconds,
        )

    @property
    def in_flight(self) -> int:
        """Sequences that run or wait."""
        return len(self._sequences)

    @property
    def _running(self) -> int:
        return len(self._sequences) - len(self._waiting)

    def _start_time(self) -> float:
        while self._starting and self._starting[0][1] not in self._sequences:
            heapq.heappop(self._starting)
        return self._starting[0][0] if self._starting else math.inf

    def _prefill_time(self) -> float:
        return self._now + self._prefill_left_seconds if self._prefills else math.inf

    def _finish_time(self) -> float:
        return self._now + self._pool.seconds_to_next_end()

    def _catch_up(self, target: float) -> None:
        while True:
            finish, prefill, start = self._finish_time(), self._prefill_time(), self._start_time()
            soonest = min(finish, prefill, start)
            if soonest > target:
                break
            self._pass_time(soonest)
            if soonest == finish:
                self._finish_one()
            elif soonest == prefill:
                self._join_decoding(self._leave_prefills(self._sequences[self._prefills[0]]))
            else:
                self._leave_starting()
        self._pass_time(target)

    def _pass_time(self, target: float) -> None:
        elapsed = target - self._now
        if elapsed <= 0:
            return
        self._pool.pass_seconds(elapsed)
        self._running_seconds += elapsed * self._running
        self._prefill_left_seconds = max(0.0, self._prefill_left_seconds - elapsed)
        self._now = target

    def _fill_places(self) -> None:
        while self._waiting and self._running < self._profile.max_running:
            number, _ = self._waiting.popitem(last=False)
            sequence = self._sequences[number]
            sequence.state = "starting"
            delay = self._profile.time_to_first_token_seconds
            if not self._profile.prefill_is_shared:
                delay += sequence.prompt_tokens / self._profile.prefill_tokens_per_second
            heapq.heappush(self._starting, (self._now + delay, number))

    def _leave_starting(self) -> None:
        _, number = heapq.heappop(self._starting)
        sequence = self._sequences[number]
        if not self._profile.prefill_is_shared:
            self._join_decoding(sequence)
            return
        sequence.state = "prefilling"
        self._prefills.append(number)
        self._queue_prompt_tokens(sequence.prompt_tokens)
        if len(self._prefills) == 1:
            self._begin_prefill()

    def _leave_prefills(self, sequence: _Sequence) -> _Sequence:
        was_first = self._prefills[0] == sequence.number
        self._prefills.remove(sequence.number)
        self._queue_prompt_tokens(-sequence.prompt_tokens)
        if was_first and self._prefills:
            self._begin_prefill()
        return sequence

    def _begin_prefill(self) -> None:
        prompt_tokens = self._sequences[self._prefills[0]].prompt_tokens
        self._prefill_left_seconds = prompt_tokens / self._profile.prefill_tokens_per_second

    def _queue_prompt_tokens(self, change: int) -> None:
        self._queued_prompt_tokens += change
        self._pool.set_queued_prompt_tokens(self._queued_prompt_tokens)

    def _join_decoding(self, sequence: _Sequence) -> None:
        sequence.state = "decoding"
        self._pool.join(sequence.number, sequence.prompt_tokens, sequence.output_tokens)
        self._events.append(Event("first_token", sequence.number, self._now))

    def _finish_one(self) -> None:
        number = self._pool.end_next()
        del self._sequences[number]
        self._events.append(Event("finished", number, self._now))
        self._fill_places()


LATE_SECONDS = 1e-6
"""The timer is set this much after a change, so that rounding never makes it fire before the change is due. It is far
below the shortest step of a profile, 7 milliseconds."""


@dataclass(frozen=True)
class Generation:
    """A sequence that is being generated.

    Attributes:
        number: The model's number of the sequence.
        started: When it was submitted, in model seconds.
        first_token: Done when the prefill is over.
        finished: Done when the last token is written; its result is the model time of that.
    """

    number: int
    started: float
    first_token: asyncio.Future[None]
    finished: asyncio.Future[float]


class BatchDriver:
    """Lets a `ContinuousBatching` run in real time. Use it in the thread of the running event loop only.

    Args:
        profile: Rates and limits.
        time_scale: Model seconds a wall second, above 0.
    """

    def __init__(self, profile: SharedProfile, time_scale: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._time_scale = time_scale
        self._origin = self._loop.time()
        self._model = ContinuousBatching(profile, clock=self.now)
        self._generations: dict[int, Generation] = {}
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        """Model seconds since the driver was made."""
        return (self._loop.time() - self._origin) * self._time_scale

    @property
    def in_flight(self) -> int:
        """Sequences that run or wait."""
        return self._model.in_flight

    def load(self) -> Load:
        """State and totals of the batch."""
        return self._model.load()

    def submit(self, prompt_tokens: int, output_tokens: int) -> Generation:
        """Start a sequence; the caller must `release` it in the end, finished or not."""
        number = self._model.submit(prompt_tokens, output_tokens)
        generation = Generation(number, self.now(), self._loop.create_future(), self._loop.create_future())
        self._generations[number] = generation
        self._pump()
        return generation

    def release(self, generation: Generation) -> bool:
        """Free the sequence's place; True if it was not finished. A second call does nothing and returns False."""
        if self._generations.pop(generation.number, None) is None:
            return False
        self._model.cancel(generation.number)
        self._pump()
        return True

    def _pump(self) -> None:
        for event in self._model.advance():
            generation = self._generations.get(event.sequence)
            if generation is None:
                continue
            # A client that went away has cancelled the future it waited for, and not yet released its place.
            if event.kind == "first_token":
                if not generation.first_token.done():
                    generation.first_token.set_result(None)
                continue
            del self._generations[event.sequence]
            if not generation.finished.done():
                generation.finished.set_result(event.time)
        if self._timer is not None:
            self._timer.cancel()
        change = self._model.next_change()
        due = None if change is None else self._origin + change / self._time_scale + LATE_SECONDS
        self._timer = None if due is None else self._loop.call_at(due, self._pump)


@dataclass(frozen=True)
class SharedProfile(Profile):
    """A backend whose requests share its rates: a full batch slows each of them down.

    The constants of `h100-qwen3-8b` are fitted to silybench run `20260924T125045Z_h100-80gbx1_qwen3-8b_bf16`
    (`derived/csv/perf_points.csv`, vLLM 0.30.0, thinking off): the inter-token latency for 1 to 256 users and for mean
    contexts of 192, 640 and 3072 tokens, the time to first token for prompts of 128 to 8192 tokens, and the room in the
    KV cache. `docs/simulated-server.md` puts the figures and the fit side by side.

    Attributes:
        prefill_is_shared: True when all sequences share one prefill rate, first come first served, and prefill
            slows decoding (one GPU); False when each sequence has its own (a fleet behind an API).
        max_batched_tokens: Most prompt tokens in one step of a shared prefill (vLLM's `max_num_batched_tokens`).
        step_seconds_per_sequence: What each sequence adds to the decoding time of a token; `step_seconds` is that of
            a sequence that runs alone with an empty context.
        step_seconds_per_cached_token: What each token in the KV cache of a decoding sequence adds to that time.
    """

    prefill_is_shared: bool = True
    max_batched_tokens: int = 8192
    step_seconds_per_sequence: float = 0.0
    step_seconds_per_cached_token: float = 0.0

    def batch(self, time_scale: float) -> BatchDriver:  # type: ignore[override]
        return BatchDriver(self, time_scale)

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
        """
        cache_seconds = self.step_seconds_per_cached_token * context_tokens * running
        return 1.0 / (self.step_without_cache_seconds(running) + cache_seconds)


def _shared(profile: Profile, **options: Any) -> SharedProfile:
    return SharedProfile(**{one.name: getattr(profile, one.name) for one in fields(profile)} | options)


H100_QWEN3_8B = _shared(
    backend.H100_QWEN3_8B,
    step_seconds=0.00681,
    step_seconds_per_sequence=12.1e-6,
    step_seconds_per_cached_token=48.5e-9,
)
API_GPT_4O_MINI = _shared(backend.API_GPT_4O_MINI, prefill_is_shared=False, step_seconds_per_sequence=5e-6)
PROFILES = {profile.name: profile for profile in (H100_QWEN3_8B, API_GPT_4O_MINI)}


def profile_named(name: str) -> SharedProfile:
    """Return the profile with a name.

    Raises:
        ValueError: If there is none; the message lists the names there are.
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise ValueError(f"unknown profile {name!r}: choose one of {', '.join(sorted(PROFILES))}") from None
