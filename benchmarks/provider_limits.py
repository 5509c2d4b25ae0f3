"""What a provider's refusals and limits cost: `python -m benchmarks.provider_limits`.

In virtual time, with a simulated model in the process that answers a rollout in about one second and a reflection in
about four:

- `storm`: 429 for a random share of the requests, within every limit, with and without Retry-After. `gepa` is dspy.GEPA
  in the same world, in real time that `--scale` makes shorter.
- `servers`: a fast server with 32 places, one that is four times slower with 8, and both as one `BalancedLM`.
- `key`: one run, or two, on a key with 600 requests a minute, for five minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import dspy
from dspy.lm15 import Message, RateLimitError, Request, Response, TextPart, Usage

from benchmarks.measure import silence
from benchmarks.quota import Quota, QuotaCounter
from benchmarks.results import RESULTS, append_json_lines, table
from dspy_flashevolve import AsyncGEPA
from dspy_flashevolve.programs.servers import BalancedLM
from dspy_flashevolve.sim import PROFILES, HouseRules
from dspy_flashevolve.sim.replies import reply_to
from dspy_flashevolve.sim.virtual import chat_request, run
from dspy_flashevolve.sim.words import Choices

HEADER = ("case", "optimizer", "seconds", "answered", "refused", "most in 10 s", "least in 10 s", "warnings")
FAST, SLOW = "http://fast/v1", "http://slow/v1"
PLACES = {FAST: 32, SLOW: 8}
REFUSAL_SECONDS = 0.05
ADDRESS: ContextVar[str] = ContextVar("address", default=FAST)
TASK = HouseRules(rules=12, rules_per_example=4, seed=0)


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        name: For the table.
        share: Of the requests that are refused at random.
        retry_after: Seconds that a refusal names; None for none.
        quota: Of the key; None for any number.
        limits: Arguments of the LM.
        places: Address -> the requests that this server works on at once; empty for one server that takes any number.
        runs: Runs at once on the key.
        calls: Budget of metric calls; None for five minutes.
    """

    name: str
    share: float = 0.0
    retry_after: float | None = None
    quota: Quota | None = None
    limits: dict[str, int] = field(default_factory=dict[str, int])
    places: dict[str, int] = field(default_factory=dict[str, int])
    runs: int = 1
    calls: int | None = 400


def storms() -> Iterator[Case]:
    """429 at random."""
    yield Case("no fault")
    for share in (0.02, 0.05, 0.2):
        for retry_after in (None, 1.0):
            yield Case(f"429 for {share:.0%}, Retry-After {retry_after}", share, retry_after)


def servers() -> Iterator[Case]:
    """One that is slow beside one that is fast."""
    for name, addresses in {"fast": [FAST], "slow": [SLOW], "both": [FAST, SLOW]}.items():
        yield Case(name, places={address: PLACES[address] for address in addresses}, calls=2000)


def keys() -> Iterator[Case]:
    """A key that runs share."""
    for counting in ("bucket", "fixed"):
        for runs in (1, 2):
            for known in ("headers", "arguments", "refusals", "refusals, Retry-After"):
                quota = Quota(600, 10**9, counting, sends_headers=known == "headers")  # type: ignore[arg-type]
                limits = {"rpm": 600} if known == "arguments" else {}
                retry_after = 1.0 if known.endswith("Retry-After") else None
                name = f"{counting}, {runs} run{'s' * (runs > 1)}, {known}"
                yield Case(name, 0.0, retry_after, quota, limits, runs=runs, calls=None)


CASES: dict[str, Callable[[], Iterator[Case]]] = {"storm": storms, "servers": servers, "key": keys}


class HeadedResponse(Response):
    """A reply whose headers litellm has kept."""


class Provider:
    """The simulated model: refuses by the case, and counts."""

    def __init__(self, case: Case, clock: Callable[[], float]) -> None:
        self.case, self.clock, self.began = case, clock, clock()
        self.counter = None if case.quota is None else QuotaCounter(case.quota)
        self.places = {address: anyio.Semaphore(places) for address, places in case.places.items()}
        self.sent, self.refused = 0, 0
        self.answered: list[float] = []

    def refuse(self) -> float:
        """Raise where the request is refused; return the seconds that its answer takes."""
        self.sent += 1
        choices = Choices(0, f"request {self.sent}")
        wait = None if self.counter is None else self.counter.admit(self.clock() - self.began, 1)
        if choices.uniform("refused") >= self.case.share and wait is None:
            return 0.5 + choices.uniform("seconds")
        self.refused += 1
        error = RateLimitError("Rate limit reached", status=429, retry_after=self.case.retry_after)
        error.rate_limit_headers = self.headers()  # type: ignore[attr-defined]
        raise error

    def headers(self) -> dict[str, str]:
        """What it says of its limits."""
        return {} if self.counter is None else self.counter.headers(self.clock() - self.began)

    def answer(self, request: Request) -> tuple[Response, float]:
        """The reply to a request, and how many times longer than a rollout's it takes."""
        chat = chat_request(request)
        reply = reply_to(chat, PROFILES["api-gpt-4o-mini"], TASK.reply_model, 0)
        usage = Usage(input_tokens=100, output_tokens=100, total_tokens=200)
        message = Message("assistant", (TextPart(reply.text),))
        response = HeadedResponse(id=None, model="x", message=message, finish_reason="stop", usage=usage)
        return response, 1.0 if chat.kind in ("task", "other") else 4.0

    async def complete(self, request: Request) -> Response:
        """Answer, as dspy's engines do."""
        try:
            seconds = self.refuse()
        except RateLimitError:
            await anyio.sleep(REFUSAL_SECONDS)
            raise
        response, factor = self.answer(request)
        async with self.places.get(ADDRESS.get(), nullcontext()):
            await anyio.sleep(seconds * factor * (4.0 if self.places and ADDRESS.get() == SLOW else 1.0))
        self.answered.append(self.clock() - self.began)
        object.__setattr__(response, "_hidden_params", {"additional_headers": self.headers()})
        return response

    def lm(self, engine: Any) -> dspy.LM:
        """An LM of this provider."""
        options: dict[str, Any] = {"engine": engine, "async_engine": self, "cache": False}
        if self.places:
            return Addressed("api/x", api_base=list(self.places), **options)
        lm = dspy.LM("api/x", num_retries=0, **options)
        return Limited(lm, **options, **self.case.limits) if self.case.limits else lm

    def __deepcopy__(self, memo: Any) -> Provider:
        return self

    async def aclose(self) -> None:
        """Nothing to close."""


class Addressed(BalancedLM):
    """Tells the engine in this process which server is asked."""

    async def acall(self, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        ADDRESS.set(kwargs.pop("api_base", FAST))
        return await dspy.LM.acall(self, prompt, messages=messages, **kwargs)


class Limited(dspy.LM):
    """Keeps `rpm` to itself, which an engine in this process does not take."""

    def __init__(self, plain: dspy.LM, **options: Any) -> None:
        super().__init__("api/x", **options)
        self.plain = plain

    async def acall(self, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        return await self.plain.acall(prompt, messages=messages, **kwargs)


class Scaled:
    """The provider for dspy.GEPA's threads, in scaled real time."""

    def __init__(self, provider: Provider) -> None:
        self.provider = provider

    def __deepcopy__(self, memo: Any) -> Scaled:
        return self

    def complete(self, request: Request) -> Response:
        """Answer, as dspy's engines do."""
        try:
            seconds = self.provider.refuse()
        except RateLimitError:
            time.sleep(REFUSAL_SECONDS)
            raise
        response, factor = self.provider.answer(request)
        time.sleep(seconds * factor)
        self.provider.answered.append(self.provider.clock() - self.provider.began)
        return response

    def close(self) -> None:
        """Nothing to close."""


class Warnings(logging.Handler):
    """Counts what is logged of a provider that does not answer."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "does not answer" in record.getMessage()


def asynchronous(case: Case, num_threads: int | None) -> tuple[Provider, float]:
    """AsyncGEPA in virtual time; the provider, and the seconds."""

    async def main() -> tuple[Provider, float]:
        clock = asyncio.get_running_loop().time
        provider = Provider(case, clock)

        async def one(seed: int) -> None:
            lm = provider.lm(_Nobody())
            limits: dict[str, Any] = {"max_seconds": 300} if case.calls is None else {}
            limits["max_metric_calls"] = case.calls or 10**6
            optimizer = AsyncGEPA(TASK.metric, reflection_lm=lm, num_threads=num_threads, seed=seed, **limits)
            with dspy.context(lm=lm, num_threads=8):
                await optimizer.acompile(TASK.program(), trainset=TASK.trainset(60), valset=TASK.valset(60))

        await asyncio.gather(*map(one, range(case.runs)))
        return provider, clock()

    return run(main)


class _Nobody:
    """No thread asks."""

    def complete(self, request: Request) -> Response:
        raise AssertionError("asked from a thread")

    def __deepcopy__(self, memo: Any) -> _Nobody:
        return self

    def close(self) -> None:
        """Nothing to close."""


def synchronous(case: Case, scale: float) -> tuple[Provider, float]:
    """dspy.GEPA in real time that is `scale` times shorter; the provider, and the seconds."""
    sleep, began = time.sleep, time.monotonic()

    def clock() -> float:
        return (time.monotonic() - began) * scale

    provider = Provider(case, clock)
    lm = provider.lm(Scaled(provider))
    with mock.patch("time.sleep", lambda seconds: sleep(seconds / scale)), silence(), dspy.context(lm=lm):
        optimizer = dspy.GEPA(TASK.metric, reflection_lm=lm, max_metric_calls=case.calls, num_threads=16, seed=0)
        optimizer.compile(TASK.program(), trainset=TASK.trainset(60), valset=TASK.valset(60))
    return provider, clock()


@contextmanager
def counted_warnings() -> Iterator[Warnings]:
    """Warnings that are logged inside."""
    warnings, log = Warnings(), logging.getLogger("dspy_flashevolve")
    log.addHandler(warnings)
    try:
        yield warnings
    finally:
        log.removeHandler(warnings)


def measure(case: Case, optimizer: str, scale: float) -> dict[str, Any]:
    """One case with one optimizer."""
    with counted_warnings() as warnings, silence():
        if optimizer == "gepa":
            provider, seconds = synchronous(case, scale)
        else:
            provider, seconds = asynchronous(case, 16 if optimizer == "16 slots" else None)
    tens = [0] * max(1, int(seconds // 10))
    for moment in provider.answered:
        if moment // 10 < len(tens):
            tens[int(moment // 10)] += 1
    return {
        "case": case.name, "optimizer": optimizer, "seconds": round(seconds, 1), "answered": len(provider.answered),
        "refused": provider.refused, "most": max(tens), "least": min(tens), "warnings": warnings.count,
    }  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.provider_limits", description=__doc__)
    parser.add_argument("--kinds", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--optimizers", nargs="*", default=["default", "16 slots"], help="and gepa, of a storm alone")
    parser.add_argument("--only", default="", help="a part of the cases' names")
    parser.add_argument("--scale", type=float, default=4.0, help="how much shorter dspy.GEPA's seconds are")
    parser.add_argument("--out", type=Path, default=RESULTS / "provider_limits.jsonl")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = parse(arguments)
    rows: list[list[str]] = []
    for kind in options.kinds:
        for case in CASES[kind]():
            for optimizer in options.optimizers:
                if options.only in case.name and (optimizer != "gepa" or kind == "storm"):
                    row = measure(case, optimizer, options.scale)
                    append_json_lines(options.out, [{"benchmark": "provider_limits", **asdict(case), **row}])
                    rows.append([str(value) for value in row.values()])
                    print(*rows[-1], sep=" | ", flush=True)
    print()
    print(table(HEADER, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
