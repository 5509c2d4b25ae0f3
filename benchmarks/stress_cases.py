"""What a stress case is made of: everything that is drawn from its seed, the provider in trouble, the program.

The replies of the simulated model are a function of the case's seed and the request, so that a candidate has one true
score on an example, whatever went wrong on the way to it.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import dspy
from dspy import lm15
from dspy.utils.exceptions import AdapterParseError

from dspy_flashevolve.sim import Faults, HouseRules
from dspy_flashevolve.sim.profiles import PROFILES
from dspy_flashevolve.sim.reply_model import REPLY_MODELS, Choices, reply_model_named
from dspy_flashevolve.sim.task import OUTPUTS
from dspy_flashevolve.sim.virtual import SimulatedModel

PROGRAMS = ("sync", "async", "both", "tool", "async tool")
"""As they are drawn; some of them become "mixed": awaited, with a metric that asks an LM from a thread."""
Ending = Literal["budget", "stopped", "cancelled", "SIGINT", "SIGTERM", "SIGKILL"]
TIME_SCALE = 50.0
"""Of a server: model seconds a second."""
GARBLED = (
    "",
    "I'm sorry, but I can't help with that.",
    "[[ ## new",
    '{"new_instruction": ',
    "```\n```",
    "\ud83d\ude00",
)


@dataclass(frozen=True)
class Trouble:
    """What goes wrong with the provider; shares of requests, virtual seconds.

    Attributes:
        failing: Answered with a status of its own, or not in time.
        hanging: Never answered.
        slow: Answered a minute late.
        empty: Prompts that get a message without content, whenever they are asked.
        garbled: Reflections and integrations whose reply cannot be read.
        bursts: From, to: everything is refused with 429.
        outages: From, to: nothing can be reached; shorter than the run's `max_outage_seconds`.
        retry_after: Whether a 429 says when to come back: never, truly, or too soon.
    """

    failing: float = 0.0
    hanging: float = 0.0
    slow: float = 0.0
    empty: float = 0.0
    garbled: float = 0.0
    bursts: tuple[tuple[float, float], ...] = ()
    outages: tuple[tuple[float, float], ...] = ()
    retry_after: Literal["never", "true", "too soon"] = "never"


@dataclass(frozen=True)
class Case:
    """A run; see `HouseRules` and `AsyncGEPA` for what is not said here.

    Attributes:
        seed: Of everything; the others are drawn from it (`drawn`).
        program: One of `PROGRAMS`: which ways to call it there are, and whether it calls itself by a bound tool.
        ending: What ends it; at the metric call number `at_call`, unless it is the budget.
        http: Over HTTP, in real time, from a server that restarts at the metric call number `at_call`.
    """

    seed: int
    program: str = "both"
    predictors: Literal[1, 2, 3] = 1
    model: str = "plain"
    rules: int = 12
    train: int = 8
    val: int = 8
    calls: int = 100
    slots: int = 8
    search: Literal["edits", "pareto"] = "edits"
    staleness: Literal["full", "guarded", "reflective"] = "full"
    rollout_timeout: float | None = None
    trouble: Trouble = Trouble()
    ending: Ending = "budget"
    at_call: int = 0
    http: bool = False

    @classmethod
    def drawn(cls, seed: int) -> Case:
        """The case of that seed."""
        rng = random.Random(f"stress {seed}")
        val = rng.randint(4, 25)
        ending = rng.choices(("budget", "stopped", "cancelled", "SIGINT", "SIGTERM"), (70, 8, 12, 5, 5))[0]
        calls = max(val, round(30 * (500 / 30) ** rng.random()))
        on_signal = ending in ("SIGINT", "SIGTERM")

        def share(most: float) -> float:
            return rng.choice((0.0, rng.uniform(0, most)))

        spans: list[tuple[float, float]] = []
        for _ in range(rng.choice((0, 1, 3))):  # with time between them, so that no two are one long outage
            begin = rng.uniform(0, 150) + (spans[-1][1] + 120 if spans else 0)
            spans.append((begin, begin + rng.uniform(1, 50)))
        trouble = Trouble(
            share(0.15), share(0.01), share(0.1), share(0.03), share(0.6), tuple(spans[::2]), tuple(spans[1::2]),
            rng.choice(("never", "true", "too soon")),
        )  # fmt: skip
        search, staleness = rng.choice((
            ("edits", "full"), ("edits", "full"), ("edits", "full"), ("edits", "reflective"),
            ("pareto", "full"), ("pareto", "guarded"), ("pareto", "reflective"),
        ))  # fmt: skip
        drawn = cls(
            seed=seed,
            program=rng.choice(("async", "both") if on_signal else PROGRAMS),
            predictors=rng.choice((1, 1, 2, 3)),
            model=rng.choice(list(REPLY_MODELS)),
            rules=rng.randint(6, 24),
            train=rng.randint(3, 20),
            val=val,
            calls=calls,
            slots=rng.choice((1, 2, 4, 8, 16, 64)),
            search=search,
            staleness=staleness,
            rollout_timeout=rng.choice((None, None, 300.0)),
            trouble=Trouble(empty=trouble.empty, garbled=trouble.garbled) if on_signal else trouble,
            ending=ending,
            at_call=rng.randint(1, calls),
        )
        if on_signal:
            return drawn
        if rng.random() < 0.15:
            drawn = replace(drawn, program="mixed")
        if rng.random() < 0.1:
            drawn = replace(drawn, ending="SIGKILL")
        elif rng.random() < 0.1:
            trouble = replace(trouble, failing=min(trouble.failing, 0.1), empty=0.0)
            return replace(drawn, http=True, ending="budget", calls=max(val, min(calls, 150)), trouble=trouble)
        return drawn

    def faults(self) -> Faults:
        """Of its server, as far as a server has them: bodies that break off, drips, hangs, and bursts."""
        trouble = self.trouble
        failing, bursts = trouble.failing / 4, trouble.bursts[:1]
        return Faults(
            server_error=failing, server_error_statuses=(500, 502, 503), malformed_body=failing, truncated_body=failing,
            empty_choices=failing, hang=trouble.hanging, slow_drip=trouble.slow / 10, drip_seconds=20 * TIME_SCALE,
            burst_every_seconds=300.0 if bursts else 0.0, burst_seconds=sum(end - begin for begin, end in bursts),
            seed=self.seed,
        )  # fmt: skip

    def task(self) -> HouseRules:
        """Its task; the model answers equal requests alike, so that a candidate has one true score on an example."""
        model = replace(reply_model_named(self.model), resamples=False)
        return HouseRules(rules=self.rules, rules_per_example=min(4, self.rules), seed=self.seed, reply_model=model)


class Backend(SimulatedModel):
    """The simulated model of a case with its trouble; `reflects`: it is asked for texts, not for rollouts."""

    def __init__(self, case: Case, trouble: Trouble, reflects: bool = False, instant: bool = False) -> None:
        profile = PROFILES["h100-qwen3-8b"]
        if instant:
            quick = {"time_to_first_token_seconds": 1e-4, "step_seconds": 1e-6, "prefill_tokens_per_second": 1e9}
            quick |= {"step_seconds_per_sequence": 0.0, "step_seconds_per_cached_token": 0.0}
            profile = replace(profile, **quick)
        super().__init__(profile, case.seed, case.task().reply_model)
        self.trouble, self._reflects, self._asked = trouble, reflects, 0

    async def answer(self, request: lm15.Request) -> lm15.Response:
        """The reply, unless something goes wrong."""
        self._asked += 1
        trouble, draw = self.trouble, Choices(self.seed, f"{self._reflects} {self._asked}")
        now = asyncio.get_running_loop().time()
        if any(begin <= now < end for begin, end in trouble.outages):
            raise lm15.TransportError("connection refused")
        if left := max((end - now for begin, end in trouble.bursts if begin <= now < end), default=0.0):
            said = {"never": None, "true": left, "too soon": 0.1}[trouble.retry_after]
            raise lm15.RateLimitError("slow down", status=429, retry_after=said)
        if draw.uniform("fails") < trouble.failing:
            kind = draw.index("how", 4)
            await asyncio.sleep((0.1, 0.1, 0.1, 20.0)[kind])
            raise (
                lm15.RateLimitError("slow down", status=429),
                lm15.ServerError("internal error", status=500),
                lm15.ServerError("overloaded", status=503),
                lm15.TimeoutError("no answer"),
            )[kind]
        if draw.uniform("hangs") < trouble.hanging:
            await asyncio.Event().wait()
        if draw.uniform("slow") < trouble.slow:
            await asyncio.sleep(60)
        response = await super().answer(request)
        if Choices(self.seed, repr((request.system, request.messages))).uniform("empty") < trouble.empty:
            return replace(response, message=lm15.Message.assistant([lm15.TextPart("")]))
        if self._reflects and draw.uniform("garbled") < trouble.garbled:
            text = GARBLED[draw.index("as", len(GARBLED))]
            return replace(response, message=lm15.Message.assistant([lm15.TextPart(text)]))
        return response


class Watch:
    """Counts what the optimizer must account for: calls of the metric for a score, replies that no adapter read."""

    def __init__(self, case: Case) -> None:
        self.scored = self.unread = 0
        self.at_call: Callable[[], Any] = lambda: None
        self._case, self._metric, self._lock = case, case.task().metric, threading.Lock()

    def metric(self, gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        """The task's."""
        if pred_name is None:
            if self._case.program == "mixed":
                dspy.settings.lm("Is it right?")
            with self._lock:
                self.scored += 1
                number = self.scored
            if number == self._case.at_call:
                self.at_call()
        return self._metric(gold, pred, trace, pred_name, pred_trace)

    @contextmanager
    def reading(self) -> Generator[None]:
        """Counts an answer that no adapter can read: it is a metric call, and no metric sees it."""
        try:
            yield
        except AdapterParseError:
            with self._lock:
                self.unread += 1
            raise


class _AtOnce:
    """dspy's engine contract in a thread of no virtual loop: one request at a time."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._lock = backend, threading.Lock()

    def complete(self, request: lm15.Request) -> lm15.Response:
        """The reply."""
        with self._lock:
            return asyncio.run(self._backend.answer(request))

    def close(self) -> None:
        """Nothing to close."""


def at_once(backend: Backend) -> dspy.LM:
    """An LM that may be asked in any thread, in real time."""
    return dspy.LM("at-once", engine=_AtOnce(backend), cache=False, num_retries=0)


Build = Callable[[Case, Watch], dspy.Module]


def student(case: Case, watch: Watch) -> dspy.Module:
    """The case's program: the task's chain, with state of its own that every call changes."""

    class Base(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = case.task().program(case.predictors)
            self.notes = list[str]()
            self.tool, self.async_tool = dspy.Tool(self.ask), dspy.Tool(self.ask_async)

        def ask(self, question: str) -> Any:
            """The chain's answer, by whatever program this is bound to."""
            self.notes.append(question)
            return self.inner(question=question)

        async def ask_async(self, question: str) -> Any:
            """The same, awaited."""
            self.notes.append(question)
            return await self.inner.acall(question=question)

    class Sync(Base):
        def forward(self, question: str) -> Any:
            self.notes.append(question)
            with watch.reading():
                return self.inner(question=question)

    class Tool(Base):
        def forward(self, question: str) -> Any:
            with watch.reading():
                return self.tool(question=question)

    class Async(Base):
        async def aforward(self, question: str) -> Any:
            self.notes.append(question)
            with watch.reading():
                return await self.inner.acall(question=question)

    class Both(Async, Sync):
        pass

    class AsyncTool(Base):
        async def aforward(self, question: str) -> Any:
            with watch.reading():
                return await self.async_tool.acall(question=question)

    programs = {"sync": Sync, "async": Async, "both": Both, "mixed": Async, "tool": Tool, "async tool": AsyncTool}
    return programs[case.program]()


def state_of(program: Any) -> str:
    """Texts, demos and attributes of a student, to be compared."""
    return repr((program.dump_state(), program.notes, sorted(vars(program)), sorted(vars(program.inner))))


def texts_of(program: dspy.Module) -> dict[str, str]:
    """Output -> instruction."""
    named: Any = program.named_predictors()
    return {name.rpartition(".")[2]: predictor.signature.instructions for name, predictor in named}


def true_score(task: HouseRules, texts: Mapping[str, str]) -> float:
    """Of texts by the names of predictors, on examples that nobody saw."""
    own = {name.rpartition(".")[2]: text for name, text in texts.items()}
    return task.true_score([own[name] for name in OUTPUTS if name in own])
