"""The program that comes back is the one that was validated, however it refers to its own predictors; what a program
holds is a candidate's own, or shared where it is made for that; and how a program is called."""

from __future__ import annotations

import asyncio
import functools
import queue
import socket
import sqlite3
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dspy
import numpy
import pytest
from dspy.predict.flex import bridge
from pydantic import BaseModel, PrivateAttr

from dspy_flashevolve import AsyncGEPA
from tests.contract.surface import TRAIN, VAL, Interpreter, code_lm, compiled
from tests.fakes import Chain, digits, fake_lm, hashed, reply_for

LEARNED = "Say it right."
"""The instruction that makes answers right."""


def task_lm() -> dspy.LM:
    return fake_lm(lambda prompt: reply_for(prompt, answer="right" if LEARNED in prompt else "wrong"))


def is_right(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> float:
    return float(pred.answer == "right")


class Program(dspy.Module):
    """Answers by what it made of itself and keeps in ``held``; ``beside`` is there, and is not used."""

    def __init__(self, make: Callable[[Any], Any], beside: Callable[[], Any]) -> None:
        super().__init__()
        self.look = dspy.Predict("question -> answer")
        self.beside = beside()
        self.held = make(self)

    def search(self, question: str) -> Any:
        """Search."""
        return self.look(question=question)

    def forward(self, question: str) -> Any:
        return call(self.held, question)


def call(held: Any, question: str) -> Any:
    """Call the first thing in containers."""
    while isinstance(held, dict | list):
        held = next(iter(held.values() if isinstance(held, dict) else held))
    return held(question=question)


class Helper:
    """An object that asks what it was given, and is not a module."""

    def __init__(self, asked: Callable[..., Any], **more: Any) -> None:
        self.asked = asked
        vars(self).update(more)

    def __call__(self, question: str) -> Any:
        return self.asked(question=question)


class Child(dspy.Module):
    """A module below the program that asks a predictor of the program's."""

    def __init__(self, asked: Any) -> None:
        super().__init__()
        self.asked = asked

    def forward(self, question: str) -> Any:
        return self.asked(question=question)


def closure(program: Any) -> Any:
    look = program.look

    def tool(question: str) -> Any:
        """Look."""
        return look(question=question)

    return tool


def closure_over_a_list(program: Any) -> Any:
    ways = {"search": [program.search]}
    return lambda question: ways["search"][0](question)


def closure_over_a_closure(program: Any) -> Any:
    inner = closure(program)
    return lambda question: inner(question)


def decorated(program: Any) -> Any:
    @functools.wraps(program.search)
    def tool(question: str) -> Any:
        return program.search(question)

    return tool


def recursive(program: Any) -> Any:
    def tool(question: str, again: bool = True) -> Any:
        return tool(question, again=False) if again else program.look(question=question)

    return tool


def named_twice(program: Any) -> Any:
    program.same = program.look
    return program.same


SHAPES: dict[str, Callable[[Any], Any]] = {
    "the predictor under two names": named_twice,
    "a list of predictors": lambda program: [program.look],
    "a dict of lists": lambda program: {"first": [program.look]},
    "a bound method": lambda program: program.search,
    "a partial": lambda program: functools.partial(program.search),
    "a cached method": lambda program: functools.lru_cache(maxsize=None)(program.search),
    "a closure over a predictor": closure,
    "a closure over a list of methods": closure_over_a_list,
    "a closure over a closure": closure_over_a_closure,
    "a recursive closure": recursive,
    "a lambda over the program": lambda program: lambda question: program.look(question=question),
    "a decorated method": decorated,
    "a cached closure": lambda program: functools.lru_cache(maxsize=None)(closure(program)),
    "a default argument": lambda program: lambda question, look=program.look: look(question=question),
    "a helper object": lambda program: Helper(program.look),
    "a method of a helper object": lambda program: Helper(program.search).__call__,
    "a helper object with a lock": lambda program: Helper(program.look, lock=threading.Lock()),
    "a child module": lambda program: Child(program.look),
    "a child module with a lock": lambda program: Child(Helper(program.search, lock=threading.RLock())),
    "a tool of a method": lambda program: dspy.Tool(program.search),
    "a tool of a closure": lambda program: dspy.Tool(closure(program)),
    "tools in a dict": lambda program: {"tools": [dspy.Tool(decorated(program))]},
}
"""How a program may refer to its predictor -> made of the program."""
BESIDE: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "a lock": threading.Lock,
    "a client with a connection": lambda: SimpleNamespace(connection=sqlite3.connect(":memory:"), notes=[1]),
    "a limiter of the event loop": lambda: SimpleNamespace(limit=asyncio.Semaphore(2)),
    "a generator": lambda: iter(range(3)).__iter__() and (number for number in range(3)),
    "large data": lambda: {number: [number] for number in range(5000)},
}
"""What may stand beside it."""


def optimizer(metric: Any = is_right, kind: Any = AsyncGEPA, **options: Any) -> Any:
    reflecting = fake_lm(lambda prompt: reply_for(prompt, new_instruction=LEARNED))
    settings: dict[str, Any] = {"max_metric_calls": 60, "num_threads": 4, "track_stats": True}
    return kind(metric, **{**settings, "reflection_lm": reflecting, **options})


def score_of(program: dspy.Module) -> float:
    """The score that a user measures."""
    result: Any = dspy.Evaluate(devset=VAL, metric=is_right, num_threads=2, display_progress=False)(program)
    return result.score / 100


def check_that_the_validated_comes_back(
    make: Callable[[Any], Any], beside: Callable[[], Any], folder: Path | None = None
) -> None:
    """Compare what was validated with what comes back, and with what a fresh program is that loads it in ``folder``."""
    student: Any = Program(make, beside)
    seed_text = student.look.signature.instructions
    one = optimizer()
    with dspy.context(lm=task_lm()):
        optimized: Any = one.compile(student, trainset=TRAIN, valset=VAL)
        details = optimized.detailed_results
        validated = details.val_aggregate_scores
        assert validated[details.best_idx] == score_of(optimized) == 1.0
        assert [score_of(candidate) for candidate in details.candidates] == validated
        best = one.best_so_far()
        assert best is not None
        assert score_of(best) == 1.0
        if folder is not None:
            optimized.save(folder / "program.json")
            fresh = Program(make, lambda: None)  # dspy cannot load into a program that has two names and a lock
            fresh.load(folder / "program.json")
            assert score_of(fresh) == 1.0
        assert score_of(student) == validated[0] == 0.0, "the student is as it was"
    assert student.look.signature.instructions == seed_text


def every_shape(program: Any) -> Any:
    """Asks in all of the ways, a ninth of them an example, and is right where these are."""
    ways = program.ways = [make(program) for make in SHAPES.values()]

    def tool(question: str) -> Any:
        answers = {call(way, question).answer for way in ways[int(question.split()[1]) :: len(VAL)]}
        return dspy.Prediction(answer=" and ".join(sorted(answers)))

    return tool


def test_all_shapes_beside_all_things_come_back_as_they_were_validated() -> None:
    check_that_the_validated_comes_back(every_shape, lambda: [make() for make in BESIDE.values()])


FEW = ("a bound method", "a closure over a predictor", "a helper object")


@pytest.mark.parametrize(
    ("shape", "beside"),
    [pair for pair in product(SHAPES, BESIDE) if pair[0] in FEW or pair[1] in ("nothing", "a lock")],
)
def test_the_returned_program_scores_as_it_was_validated_whatever_refers_to_its_predictor_or_stands_beside_it(
    shape: str, beside: str, tmp_path: Path
) -> None:
    check_that_the_validated_comes_back(SHAPES[shape], BESIDE[beside], tmp_path)


# What a candidate has for itself


@dataclass
class Memory:
    notes: list[Any] = field(default_factory=list[Any])
    itself: Any = None


def memory_in_a_cycle() -> Memory:
    memory = Memory([{"deep": [1]}])
    memory.itself = memory
    return memory


NOTED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [[1]], lambda it: it[0].append(2), repr),
    "dict": (lambda: {"a": [1]}, lambda it: it["a"].append(2), repr),
    "set": (lambda: {1}, lambda it: it.add(2), repr),
    "tuple": (lambda: ([1],), lambda it: it[0].append(2), repr),
    "deque": (lambda: deque([1], maxlen=9), lambda it: it.append(2), repr),
    "defaultdict": (lambda: defaultdict(list, a=[1]), lambda it: it["b"].append(2), repr),
    "Counter": (lambda: Counter("aab"), lambda it: it.update("b"), repr),
    "object": (memory_in_a_cycle, lambda it: it.itself.notes[0]["deep"].append(2), lambda it: repr(it.notes)),
    "History": (
        lambda: dspy.History(messages=[{"question": "q", "answer": "a"}]),
        lambda it: it.messages.append({"question": "r", "answer": "b"}),
        repr,
    ),
    "examples": (lambda: [dspy.Example(question="q", answer="2")], lambda it: setattr(it[0], "answer", "3"), repr),
    "large": (lambda: [[1], *range(20_000)], lambda it: it[0].append(2), lambda it: repr(it[0])),
    "retriever": (
        lambda: dspy.retrievers.Embeddings(["apple", "pear", "plum"], embedded, k=1),
        lambda it: it("plu"),
        lambda it: it("pea").passages,
    ),
    "predictor": (lambda: dspy.Predict("a -> b"), lambda it: it.demos.append(1), lambda it: list(it.demos)),
}
"""What a program may hold -> made, written on, and looked at."""


def embedded(texts: list[str]) -> Any:
    return numpy.array([[float(ord(letter) == code) for code in range(97, 123)] for letter, *_ in texts])


class Notes(dspy.Module):
    """Writes on everything that it holds, and on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.look = dspy.Predict("question -> answer")
        self.count = 0
        self.noted = {name: make() for name, (make, _, _) in NOTED.items()}
        self.same = self.noted["object"]

    def forward(self, question: str) -> Any:
        assert self.same is self.noted["object"]
        self.count += 1
        self.new = question
        for name, (_, write, _) in NOTED.items():
            write(self.noted[name])
        return self.look(question=question)


def contents(program: Any) -> dict[str, Any]:
    return {"count": program.count, **{name: look(program.noted[name]) for name, (_, _, look) in NOTED.items()}}


def test_what_rollouts_write_reaches_neither_the_student_nor_what_comes_back() -> None:
    student: Any = Notes()
    before = contents(student)
    with dspy.context(lm=task_lm()):
        optimized: Any = optimizer().compile(student, trainset=TRAIN, valset=VAL)
    for program in (student, optimized, *optimized.detailed_results.candidates):
        assert contents(program) == before
        assert not hasattr(program, "new")


class Counted:
    """Data that counts its copies."""

    copies = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def __sizeof__(self) -> int:
        return self.size

    def __deepcopy__(self, memo: Any) -> Counted:
        type(self).copies += 1
        return Counted(self.size)


def copies_in_a_run(calls: int, size: int) -> tuple[int, int]:
    """How often data of a size is copied in a run of so many metric calls, and the candidates of that run."""
    Counted.copies = 0
    with dspy.context(lm=fake_lm(lambda prompt: reply_for(prompt, answer=str(hashed(prompt) % 7)))):
        student = Program(lambda program: program.search, lambda: Counted(size))
        details = compiled(calls, student).detailed_results
        return Counted.copies, len(details.candidates)


def test_large_data_is_copied_for_a_run_and_not_for_a_candidate_or_a_rollout() -> None:
    copies, candidates = copies_in_a_run(240, 10**6)
    assert candidates > 2
    assert copies == copies_in_a_run(60, 10**6)[0] <= 3


def test_small_data_is_copied_for_a_candidate_and_not_for_a_rollout() -> None:
    copies, _ = copies_in_a_run(240, 100)
    assert 3 < copies < 120


# What is made for sharing


class Acquirable:
    """A limiter with a way of its own, as those of files and of data bases are."""

    def acquire(self) -> None: ...


class Slotted:
    __slots__ = ("__lock",)

    def __init__(self) -> None:
        self.__lock = threading.Lock()


class PickledWithout:
    """It leaves its lock out of its pickle, and of its copies."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __getstate__(self) -> Any:
        return {}

    def __setstate__(self, state: Any) -> None:
        self.__init__()


class Model(BaseModel):
    _lock: Any = PrivateAttr(default_factory=threading.Lock)


class Worker:
    """Its thread works for it, and for no copy."""

    def __init__(self) -> None:
        self.thread = threading.Thread(target=print)


class Closes:
    """Its end closes what it has, as many clients do."""

    closed = 0

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:")

    def __del__(self) -> None:
        Closes.closed += 1


SHARED: dict[str, Callable[[], Any]] = {
    "a lock": lambda: SimpleNamespace(it=threading.Lock()),
    "a semaphore": lambda: SimpleNamespace(it=threading.BoundedSemaphore(2)),
    "a condition": lambda: SimpleNamespace(it=threading.Condition()),
    "an event": lambda: SimpleNamespace(it=threading.Event()),
    "a queue": lambda: SimpleNamespace(it=queue.Queue()),
    "a thread pool": lambda: SimpleNamespace(it=ThreadPoolExecutor(1)),
    "a socket": lambda: SimpleNamespace(it=socket.socket()),
    "a lock in a dict": lambda: {"lock": threading.Lock(), "answers": {}},
    "a lock in a slot": Slotted,
    "a lock that is not pickled": PickledWithout,
    "a lock of a model": Model,
    "a limiter": Acquirable,
    "a thread": Worker,
    "an end": Closes,
    "a connection": lambda: sqlite3.connect(":memory:"),
    "a generator": lambda: (number for number in range(3)),
}
"""What an object may have that is made for one owner, or for several threads."""
SHARED_BY_A_RUN: dict[str, Callable[[], Any]] = {
    "a lock": lambda: SimpleNamespace(it=asyncio.Lock()),
    "a semaphore": lambda: SimpleNamespace(it=asyncio.Semaphore(2)),
    "a queue": lambda: SimpleNamespace(it=asyncio.Queue()),
}


class Holds(dspy.Module):
    """Notes what objects it sees."""

    def __init__(self, seen: set[int]) -> None:
        super().__init__()
        self.look = dspy.Predict("question -> answer")
        self.shared = {name: make() for name, make in SHARED.items()}
        self.of_run = {name: make() for name, make in SHARED_BY_A_RUN.items()}
        self.see = lambda it: seen.add(id(it))

    def forward(self, question: str) -> Any:
        for it in (*self.shared.values(), *self.of_run.values()):
            self.see(it)
        return self.look(question=question)


def test_what_holds_a_lock_a_thread_or_a_connection_is_the_same_object_everywhere_and_a_loops_lock_in_a_run() -> None:
    closed, seen = Closes.closed, set[int]()
    student: Any = Holds(seen)
    with dspy.context(lm=task_lm()):
        optimized: Any = optimizer().compile(student, trainset=TRAIN, valset=VAL)
    assert len(seen) == len(SHARED) + len(SHARED_BY_A_RUN)
    for name, it in student.shared.items():
        assert optimized.shared[name] is it, name
        assert id(it) in seen, name
    for name, it in student.of_run.items():
        assert optimized.of_run[name] is not it, name
        assert not {id(it), id(optimized.of_run[name])} & seen, name
    assert Closes.closed == closed


async def contend(program: Any) -> None:
    """Use a semaphore of the program's on a new loop, with waiters."""
    limit = program.beside.limit

    async def visit() -> None:
        async with limit:
            await asyncio.sleep(0)

    await asyncio.gather(*(visit() for _ in range(5)))


def test_a_limiter_of_an_event_loop_works_before_a_run_in_it_and_after_it() -> None:
    student: Any = Program(lambda program: program.search, BESIDE["a limiter of the event loop"])
    asyncio.run(contend(student))

    class Limited(Program):
        async def aforward(self, question: str) -> Any:
            await contend(self)
            return await self.look.acall(question=question)

    student.__class__ = Limited
    with dspy.context(lm=task_lm()):
        optimized: Any = optimizer().compile(student, trainset=TRAIN, valset=VAL)
    assert max(optimized.detailed_results.val_aggregate_scores) == 1.0
    asyncio.run(contend(optimized))


def test_a_tool_that_counts_in_its_closure_counts_for_its_caller() -> None:
    asked: list[str] = []

    def counting(program: Any) -> Any:
        def tool(question: str) -> Any:
            asked.append(question)
            return program.look(question=question)

        return tool

    with dspy.context(lm=task_lm()):
        optimized: Any = optimizer().compile(Program(counting, lambda: None), trainset=TRAIN, valset=VAL)
    assert len(asked) >= optimized.detailed_results.total_metric_calls


# How a program is called


class CalledInItsOwnWay(Chain):
    """Inherits ``forward`` and ``aforward``, and does more where it is called."""

    def __call__(self, question: str) -> Any:
        super().__call__(question=question)
        return dspy.Prediction(answer="right")


class CalledAndAwaitedInItsOwnWay(CalledInItsOwnWay):
    async def acall(self, question: str) -> Any:
        await super().acall(question=question)
        return dspy.Prediction(answer="right")


@pytest.mark.parametrize("program", [CalledInItsOwnWay, CalledAndAwaitedInItsOwnWay])
@pytest.mark.parametrize("kind", [dspy.GEPA, AsyncGEPA])
def test_a_call_of_the_programs_own_is_what_runs(kind: Any, program: Any) -> None:
    with dspy.context(lm=task_lm()):
        optimized = optimizer(kind=kind, max_metric_calls=20).compile(program(), trainset=TRAIN, valset=VAL)
        assert optimized.detailed_results.val_aggregate_scores[0] == score_of(program()) == 1.0


# Python's parser in several threads


PARSER_ERROR = "AST constructor recursion depth mismatch (before=63, after=66)"


def flex_run(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> tuple[Any, Counter[str]]:
    """Optimize code, with a parser that fails at some of its calls; the program, and how often each text was parsed."""
    parse, parsed = bridge.parse_module_class_name, Counter[str]()

    def parse_or_fail(source: str) -> str:
        parsed[source] += 1
        if fails(parsed.total()):
            raise SystemError(PARSER_ERROR)
        return parse(source)

    student = dspy.Flex("question -> answer", interpreter_factory=Interpreter)
    monkeypatch.setattr(bridge, "parse_module_class_name", parse_or_fail)
    one = optimizer(digits, reflection_lm=code_lm(), gepa_kwargs={"acceptance_criterion": "improvement_or_equal"})
    with dspy.context(lm=task_lm()):
        return one.compile(student, trainset=TRAIN, valset=VAL), parsed


def test_a_parser_that_fails_now_and_then_costs_no_candidate_and_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    program, _ = flex_run(monkeypatch, lambda count: count % 3 > 0)
    details = program.detailed_results
    assert len(details.candidates) > 1
    assert set(details.val_aggregate_scores) == {0.5}


def test_code_is_parsed_for_a_candidate_and_not_for_a_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    program, parsed = flex_run(monkeypatch, lambda count: False)
    assert program.detailed_results.total_metric_calls > 40
    assert max(parsed.values()) < 15


def test_a_rollout_in_which_the_parser_fails_is_made_again() -> None:
    failed = set[str]()

    class Parses(Program):
        def forward(self, question: str) -> Any:
            if question not in failed:
                failed.add(question)
                raise RuntimeError(f"SystemError: {PARSER_ERROR}")
            return self.look(question=question)

    with dspy.context(lm=fake_lm(lambda prompt: reply_for(prompt, answer="right"))):
        optimized: Any = optimizer().compile(Parses(lambda program: None, lambda: None), trainset=TRAIN, valset=VAL)
    assert failed
    assert set(optimized.detailed_results.val_aggregate_scores) == {1.0}
