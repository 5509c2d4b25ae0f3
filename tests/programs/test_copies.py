"""Copies of programs: what is copied, bound anew and shared; and that nothing of the student is ever changed."""

from __future__ import annotations

import asyncio
import functools
import queue
import sqlite3
import sys
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import anyio
import dspy
import numpy
import pytest
from dspy.utils.callback import BaseCallback

from dspy_flashevolve.programs.copies import LARGEST, copied, isolated_copy
from tests.fakes import Chain, fake_lm

LM, GLOBAL_LIST = fake_lm(lambda prompt: ""), list[str]()
FLAG: ContextVar[int] = ContextVar("flag", default=0)


class Heard(BaseCallback):
    def __init__(self) -> None:
        self.count = 0


@dataclass
class Memory:
    notes: list[Any] = field(default_factory=list[Any])
    count: int = 0


class Slotted:
    __slots__ = ("notes",)

    def __init__(self) -> None:
        self.notes = [1]


class Guarded:
    """State behind locks, as code that is called from threads has it."""

    def __init__(self) -> None:
        self.lock, self.changed, self.todo = threading.RLock(), threading.Condition(), queue.Queue[int]()
        self.notes = [1]


class Client:
    """It has a connection, which cannot be copied, and data."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:", check_same_thread=False)
        self.lock = threading.Lock()
        self.notes = [1]


class Worker:
    """Its thread works on its queue: a copy of the queue would be read by nobody."""

    def __init__(self) -> None:
        self.todo = queue.Queue[int]()
        self.thread = threading.Thread(target=print)


class Closes:
    """Its end closes what it has, as many clients do."""

    closed = 0

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:")

    def __del__(self) -> None:
        Closes.closed += 1


class Callable_:
    def __init__(self, program: Any) -> None:
        self.program, self.calls = program, 0

    def __call__(self, query: str) -> Any:
        self.calls += 1
        return self.program


class Holder(dspy.Module):
    """A program with one thing in ``it``."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.step = dspy.Predict("question -> answer")
        self.notes = [1]
        self.it = make(self)

    def search(self, query: str) -> Any:
        """Search."""
        return self


def shared_function(query: str) -> str:
    return query


def closure(program: Any) -> Callable[[str], Any]:
    def tool(query: str) -> Any:
        return program

    return tool


def through_containers(program: Any) -> Callable[[str], Any]:
    handlers = {"search": [program.search]}
    return lambda query: handlers["search"][0](query)


def over_a_list(program: Any) -> Callable[[str], Any]:
    notes = program.notes
    return lambda query: notes


def decorated(program: Any) -> Callable[[str], Any]:
    @functools.wraps(program.search)
    def tool(query: str) -> Any:
        return program.search(query)

    return tool


# Data


def with_cycle() -> Memory:
    memory = Memory(notes=[{"deep": [1]}])
    memory.notes.append(memory)
    return memory


COPIED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [[1]], lambda it: it[0].append(2), repr),
    "dict": (lambda: {"a": [1]}, lambda it: it["a"].append(2), repr),
    "set": (lambda: {1}, lambda it: it.add(2), repr),
    "tuple": (lambda: ([1],), lambda it: it[0].append(2), repr),
    "deque": (lambda: deque([1], maxlen=2), lambda it: it.append(2), repr),
    "defaultdict": (lambda: defaultdict(list, a=[1]), lambda it: it["b"].append(2), repr),
    "Counter": (lambda: Counter("aab"), lambda it: it.update("b"), repr),
    "dataclass": (with_cycle, lambda it: it.notes[0]["deep"].append(2), lambda it: repr(it.notes[0])),
    "namespace": (lambda: SimpleNamespace(seen=[1]), lambda it: it.seen.append(2), repr),
    "object with slots": (Slotted, lambda it: it.notes.append(2), lambda it: it.notes),
    "History": (
        lambda: dspy.History(messages=[{"question": "q", "answer": "a"}]),
        lambda it: it.messages.append({"question": "r", "answer": "b"}),
        repr,
    ),
    "examples": (lambda: [dspy.Example(question="q", answer="2")], lambda it: setattr(it[0], "answer", "3"), repr),
    "object with locks": (Guarded, lambda it: (it.notes.append(2), it.todo.put(1)), lambda it: it.todo.qsize()),
    "object with a connection": (Client, lambda it: it.notes.append(2), lambda it: list(it.notes)),
    "large list": (lambda: list(range(LARGEST + 1)), lambda it: it.append(2), len),
    "large dict of lists": (lambda: {n: [n] for n in range(LARGEST)}, lambda it: it[0].append(2), repr),
    "predictor": (
        lambda: dspy.Predict("a -> b"), lambda it: it.demos.append(1), lambda it: list(it.demos),
    ),
    "module in a container": (
        lambda: {"list": [("tuple", dspy.Predict("a -> b"))]},
        lambda it: setattr(it["list"][0][1], "signature", dspy.Signature("x -> y")),
        repr,
    ),
}  # fmt: skip
"""What a program holds -> made, changed as a rollout may, and looked at."""


@pytest.mark.parametrize("name", list(COPIED))
def test_what_a_rollout_does_to_what_a_program_holds_never_reaches_the_student(name: str) -> None:
    make, change, look = COPIED[name]
    student: Any = Holder(lambda program: make())
    before = look(student.it)
    first, again = copied(student)
    rollout: Any = again(first)
    assert look(rollout.it) == before
    change(rollout.it)
    rollout.notes.append("a rollout's")
    rollout.new = True
    assert look(rollout.it) != before
    assert look(student.it) == before
    assert student.notes == [1]
    assert not hasattr(student, "new")
    other: Any = again(first)
    assert other.notes == [1]
    assert (look(other.it) == before) == (not name.startswith("large")), "large data is shared by the rollouts alone"


SHARED: dict[str, Callable[[], Any]] = {
    "function": lambda: shared_function,
    "class": lambda: Memory,
    "signature": lambda: dspy.Signature("a -> b"),
    "lm": lambda: LM,
    "callback": Heard,
    "thread pool": lambda: ThreadPoolExecutor(1),
    "context variable": lambda: FLAG,
    "connection": lambda: sqlite3.connect(":memory:"),
    "object with a thread": Worker,
    "object with an end": Closes,
}


@pytest.mark.parametrize("name", list(SHARED))
def test_what_cannot_be_copied_or_is_nobodys_own_is_shared(name: str) -> None:
    student: Any = Holder(lambda program: SHARED[name]())
    first, again = copied(student)
    rollout: Any = again(first)
    assert rollout.it is student.it
    assert Closes.closed == 0
    assert rollout.step.callbacks == student.step.callbacks


def test_of_an_object_with_a_connection_the_connection_is_shared_and_a_lock_beside_it_too() -> None:
    student: Any = Holder(lambda program: Client())
    rollout: Any = isolated_copy(student)
    assert rollout.it is not student.it
    assert rollout.it.connection is student.it.connection
    assert rollout.it.lock is student.it.lock


def test_what_limits_how_many_work_at_once_limits_all_rollouts() -> None:
    locks = {
        "lock": threading.RLock(), "semaphore": threading.Semaphore(2), "asyncio": asyncio.Semaphore(2),
        "anyio": anyio.CapacityLimiter(2), "in an object": SimpleNamespace(lock=threading.Lock(), count=0),
    }  # fmt: skip
    student: Any = Holder(lambda program: locks)
    first, again = copied(student)
    one, other = cast(Any, again(first)), cast(Any, again(first))
    for name in ("lock", "semaphore", "asyncio", "anyio"):
        assert one.it[name] is other.it[name]
        assert (one.it[name] is student.it[name]) == (name != "asyncio"), "loops are a run's own"
    assert one.it["in an object"] is not other.it["in an object"]
    assert one.it["in an object"].lock is other.it["in an object"].lock


def test_a_queue_of_a_copy_is_its_own_and_works() -> None:
    student: Any = Holder(lambda program: Guarded())
    rollout: Any = isolated_copy(student)
    rollout.it.todo.put(1)
    with rollout.it.changed:
        rollout.it.changed.notify_all()
    assert rollout.it.todo.get(timeout=1) == 1
    assert student.it.todo.empty()


def places(value: Any, path: str = "program", within: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """What modules, containers and objects hold, by the way to it; not twice where it holds itself."""
    if id(value) in within or isinstance(value, (type, str, int, float)):
        return
    yield path, value
    parts: Any = getattr(value, "__dict__", {})
    parts = parts | value if isinstance(value, dict) else parts
    parts = dict(enumerate(value)) if isinstance(value, (list, tuple, deque)) else parts
    for name, part in parts.items():
        yield from places(part, f"{path}.{name}", (*within, id(value)))


@pytest.mark.parametrize("name", list(COPIED))
def test_what_dspy_gepa_copies_for_a_candidate_is_copied_here(name: str) -> None:
    student: Any = Holder(lambda program: COPIED[name][0]())
    own, theirs, ours = (dict(places(one)) for one in (student, student.deepcopy(), copied(student)[0]))
    copies = [path for path, value in theirs.items() if value is not own[path]]
    assert len(copies) > 3
    assert [path for path in copies if ours[path] is own[path]] == []


# What is called


CALLED: dict[str, Callable[[Any], Any]] = {
    "bound method": lambda program: program.search,
    "partial": lambda program: functools.partial(program.search),
    "partial with the program": lambda program: functools.partial(lambda mine, query: mine, program),
    "lru_cache": lambda program: functools.lru_cache(maxsize=8)(program.search),
    "closure": closure,
    "closure over a container of methods": through_containers,
    "wrapper": decorated,
    "default argument": lambda program: lambda query, mine=program: mine,
    "keyword default": lambda program: eval("lambda query, *, mine=program: mine", {"program": program}),
    "callable object": Callable_,
    "method of an object": lambda program: Callable_(program).__call__,
    "dspy.Tool of a method": lambda program: dspy.Tool(program.search),
    "dspy.Tool of a closure": lambda program: dspy.Tool(closure(program), name="tool"),
}
"""What may be a tool, and gives the program that it works on."""
PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "itself": (lambda it: it, lambda held: held),
    "in a list": (lambda it: [it], lambda held: held[0]),
    "in a dict": (lambda it: {"tool": it}, lambda held: held["tool"]),
    "in an object": (lambda it: SimpleNamespace(tool=it), lambda held: held.tool),
    "beside a connection": (lambda it: SimpleNamespace(tool=it, client=Client()), lambda held: held.tool),
    "in a large list": (lambda it: [it, *range(LARGEST)], lambda held: held[0]),
}


@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("name", list(CALLED))
def test_what_a_rollout_calls_works_on_the_rollouts_program(name: str, place: str) -> None:
    put, get = PLACES[place]
    student: Any = Holder(lambda program: put(CALLED[name](program)))
    first, again = copied(student)
    for program in (first, again(first), again(again(first))):
        assert get(program.it)(query="q") is program
    assert get(student.it)(query="q") is student


def test_a_function_over_data_of_the_program_gets_the_copys_and_over_the_callers_the_callers() -> None:
    student: Any = Holder(over_a_list)
    first, again = copied(student)
    rollout: Any = again(first)
    assert rollout.it("q") is rollout.notes
    assert rollout.notes is not student.notes
    counts = 0

    def count(query: str) -> None:
        nonlocal counts
        counts += 1

    first, again = copied(Holder(lambda program: count))
    cast(Any, again(first)).it("q")
    assert counts == 1
    calls: list[str] = []
    counted: Any = copied(Holder(lambda program: lambda query: calls.append(query)))[0]
    counted.it("q")
    assert calls == ["q"], "as in dspy.GEPA: a caller counts what tools are asked"


def test_the_tools_of_an_agent_call_the_copys_predictors() -> None:
    class Agent(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.look = dspy.Predict("query -> found")
            self.agent = dspy.ReAct("question -> answer", tools=[self.search])

        def search(self, query: str) -> Any:
            """Search."""
            return self.look

    first, again = copied(Agent())
    rollout: Any = again(first)
    assert rollout.agent.tools["search"](query="q") is rollout.look


class Session:
    """An MCP client's session, as far as dspy uses one: it belongs to the loop on which it was opened."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.stream = anyio.Lock()

    async def call_tool(self, name: str, arguments: Any) -> Any:
        async with self.stream:
            self.asked.append((name, arguments))
        return SimpleNamespace(content=[SimpleNamespace(text=f"{name} found it")], isError=False)


def test_an_mcp_tool_of_a_copy_asks_the_callers_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.types", SimpleNamespace(TextContent=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "mcp", SimpleNamespace())
    session = Session()
    schema = {"type": "object", "properties": {"query": {"type": "string"}}}
    told = SimpleNamespace(name="search", description="Searches.", inputSchema=schema)
    student: Any = Holder(lambda program: [dspy.Tool.from_mcp_tool(session, cast(Any, told))])
    first, again = copied(student)
    for number, program in enumerate([first, again(first), again(again(first))]):
        [tool] = cast(Any, program).it
        assert tool is not student.it[0]
        assert (tool.name, tool.desc, list(tool.args)) == ("search", "Searches.", ["query"])
        assert asyncio.run(tool.acall(query=str(number))) == "search found it"
    assert session.asked == [("search", {"query": str(number)}) for number in range(3)]


def embedded(texts: list[str]) -> Any:
    return numpy.array([[float(ord(letter) == code) for code in range(97, 123)] for letter, *_ in texts])


def test_a_retriever_of_a_copy_finds_what_the_students_finds() -> None:
    student: Any = Holder(lambda program: dspy.retrievers.Embeddings(["apple", "pear", "plum"], embedded, k=1))
    first, again = copied(student)
    for program in (first, again(first), student):
        assert cast(Any, program).it("pea").passages == ["pear"]


# A copy is the same program


def test_a_copy_keeps_what_is_shared_within_the_program_shared() -> None:
    class Shares(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = dspy.Predict("question -> answer")
            self.again = self.step
            self.memory = with_cycle()
            self.same = self.memory

    rollout: Any = isolated_copy(Shares())
    assert rollout.step is rollout.again
    assert rollout.memory is rollout.same is rollout.memory.notes[-1]
    assert [name for name, _ in rollout.named_predictors()] == ["step"]


def test_a_copy_keeps_kinds_and_callbacks_and_starts_without_a_history() -> None:
    student: Any = Holder(lambda program: (deque([1], maxlen=2), defaultdict(list)))
    heard = Heard()
    student.step.callbacks.append(heard)
    student.history.append("call")
    rollout: Any = isolated_copy(student)
    assert (rollout.it[0].maxlen, rollout.it[1].default_factory) == (2, list)
    assert rollout.step.callbacks == [heard]
    assert rollout.step.callbacks is not student.step.callbacks
    assert (rollout.history, student.history) == ([], ["call"])


def test_a_copy_answers_as_the_original_does() -> None:
    program = Chain(3)
    assert isolated_copy(program)(question="q").answer == program(question="q").answer
