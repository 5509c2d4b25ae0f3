"""A program's own limiter and memo hold for the whole run, wherever they hang in the program."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import dspy
import pytest

from tests.contract.surface import TRAIN, VAL, compiled, simulated
from tests.fakes import digits, fake_lm, hashed, reply_for

LIMIT = 5


class Threaded:
    """A limiter that counts under a lock of threads."""

    def __init__(self) -> None:
        self.lock, self.running = threading.Lock(), 0

    async def __aenter__(self) -> None:
        while True:
            with self.lock:
                if self.running < LIMIT:
                    self.running += 1
                    return
            await asyncio.sleep(0.1)

    async def __aexit__(self, *_: object) -> None:
        with self.lock:
            self.running -= 1


class Awaited(Threaded):
    """The same under a lock of the event loop."""

    def __init__(self) -> None:
        self.mutex, self.running = asyncio.Lock(), 0

    async def __aenter__(self) -> None:
        while True:
            async with self.mutex:
                if self.running < LIMIT:
                    self.running += 1
                    return
            await asyncio.sleep(0.1)

    async def __aexit__(self, *_: object) -> None:
        async with self.mutex:
            self.running -= 1


class Memo:
    """Searches once for what it is asked."""

    def __init__(self, search: Callable[[str], str]) -> None:
        self._lock, self._known, self._search = threading.Lock(), dict[str, str](), search

    def get(self, query: str) -> str:
        with self._lock:
            if query not in self._known:
                self._known[query] = self._search(query)
            return self._known[query]


def in_a_closure(it: Any) -> Callable[[], Any]:
    return lambda: it


PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "on the module": (lambda it: it, lambda held: held),
    "in a dict": (lambda it: {"limits": [it]}, lambda held: held["limits"][0]),
    "in a tool's closure": (
        lambda it: {"tool": dspy.Tool(in_a_closure(it), name="search"), "of the program": it},
        lambda held: held["tool"](),
    ),
    "as a bound method's owner": (lambda it: getattr(it, "get", None) or it.__aexit__, lambda held: held.__self__),
}  # fmt: skip
"""Where it hangs -> put there, and taken from there."""
places = pytest.mark.parametrize("place", list(PLACES))


class Program(dspy.Module):
    """Answers by its predictor, and asks ``visit`` of what it holds."""

    def __init__(self, held: Any, visit: Callable[[Any, str], Any]) -> None:
        super().__init__()
        self.steps = [dspy.Predict("question -> answer")]
        self.held, self.visit = held, visit


class Asynchronous(Program):
    async def aforward(self, question: str) -> Any:
        await self.visit(self.held, question)
        return await self.steps[0].acall(question=question)


class Synchronous(Program):
    def forward(self, question: str) -> Any:
        self.visit(self.held, question)
        return self.steps[0](question=question)


def answering() -> dspy.LM:
    return fake_lm(lambda prompt: reply_for(prompt, answer=str(hashed(prompt) % 6)))


@places
@pytest.mark.parametrize("limiter", [Threaded, Awaited])
def test_a_limiter_of_five_is_never_exceeded(place: str, limiter: Callable[[], Any]) -> None:
    put, get = PLACES[place]
    running = most = 0

    async def visit(held: Any, question: str) -> None:
        nonlocal running, most
        async with get(held):
            running += 1
            most = max(most, running)
            await asyncio.sleep(1)
            running -= 1

    with dspy.context(lm=answering()):
        simulated(80, Asynchronous(put(limiter()), visit), metric=digits, num_threads=16)
    assert most == LIMIT


@places
def test_a_memo_is_filled_once(place: str) -> None:
    put, get = PLACES[place]
    searches = Counter[str]()

    def search(query: str) -> str:
        searches[query] += 1
        return query

    with dspy.context(lm=answering()):
        compiled(80, Synchronous(put(Memo(search)), lambda held, question: get(held).get(question)), num_threads=8)
    assert searches == Counter(example.question for example in (*TRAIN, *VAL))


class Guarding(dspy.Module):
    """A program with a lock of its own, and a memo beside it."""

    def __init__(self, search: Callable[[str], None]) -> None:
        super().__init__()
        self.steps = [dspy.Predict("question -> answer")]
        self.lock, self.known, self.search = threading.Lock(), set[str](), search

    def forward(self, question: str) -> Any:
        with self.lock:
            if question not in self.known:
                self.known.add(question)
                self.search(question)
        return self.steps[0](question=question)


def test_a_memo_of_the_program_itself_is_filled_once_and_its_predictors_still_evolve() -> None:
    searches: list[str] = []
    with dspy.context(lm=answering()):
        student = Guarding(searches.append)
        details = compiled(80, student, num_threads=8).detailed_results
    assert sorted(searches) == sorted(example.question for example in (*TRAIN, *VAL))
    texts = {program.steps[0].signature.instructions for program in details.candidates}
    assert len(texts) == len(details.candidates) > 1
    assert student.steps[0].signature.instructions == dspy.Signature("question -> answer").instructions
