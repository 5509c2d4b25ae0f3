"""Copies of programs: what is copied, bound anew and shared; and that nothing of the student is ever changed."""

from __future__ import annotations

import asyncio
import functools
import gc
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
from dspy.primitives.local_interpreter import LocalInterpreter
from dspy.utils.callback import BaseCallback
from pydantic import BaseModel, PrivateAttr

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
    """State behind a lock, as code that is called from threads has it."""

    def __init__(self, lock: Any = None) -> None:
        self.lock = lock or threading.RLock()
        self.notes = [1]


class SlottedGuarded:
    __slots__ = ("__lock", "notes")

    def __init__(self) -> None:
        self.__lock, self.notes = threading.Lock(), [1]


class PickledGuarded(Guarded):
    """It can be pickled, as many classes with locks can: the lock is left out, and made anew."""

    def __getstate__(self) -> Any:
        return {"notes": self.notes}

    def __setstate__(self, state: Any) -> None:
        self.__init__()
        self.notes = state["notes"]


class ModelGuarded(BaseModel):
    notes: list[Any] = [1]
    _lock: Any = PrivateAttr(default_factory=threading.Lock)


class Acquirable:
    """A limiter with a way of its own."""

    def __init__(self) -> None:
        self.free = 5

    def acquire(self) -> None:
        self.free -= 1


class Client:
    """It has a connection, which cannot be copied, and data."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:", check_same_thread=False)
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
    "queue": queue.Queue,
    "event": threading.Event,
    "object with a lock": Guarded,
    "object with a semaphore": lambda: Guarded(threading.BoundedSemaphore(2)),
    "object with a condition": lambda: Guarded(threading.Condition()),
    "object with a queue": lambda: Guarded(queue.SimpleQueue()),
    "object with a thread pool": lambda: Guarded(ThreadPoolExecutor(1)),
    "object with a lock for each key": lambda: Guarded(defaultdict(threading.Lock)),
    "object with striped locks": lambda: Guarded([threading.Lock(), threading.Lock()]),
    "object with a lock and a connection": lambda: SimpleNamespace(lock=threading.Lock(), client=Client()),
    "object with slots and a lock": SlottedGuarded,
    "object with a lock that can be pickled": PickledGuarded,
    "model with a lock": ModelGuarded,
    "limiter that is acquired": Acquirable,
    "dict with a lock and data": lambda: {"lock": threading.Lock(), "answers": {}},
}


@pytest.mark.parametrize("name", list(SHARED))
def test_what_cannot_be_copied_or_is_nobodys_own_is_shared(name: str) -> None:
    gc.collect()  # what tests before have left
    closed = Closes.closed
    student: Any = Holder(lambda program: SHARED[name]())
    first, again = copied(student)
    rollout: Any = again(first)
    assert rollout.it is student.it
    assert Closes.closed == closed
    assert rollout.step.callbacks == student.step.callbacks


def test_of_an_object_with_a_connection_the_connection_is_shared() -> None:
    student: Any = Holder(lambda program: Client())
    rollout: Any = isolated_copy(student)
    assert rollout.it is not student.it
    assert rollout.it.connection is student.it.connection


WITHIN: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "in a dict": (lambda it: {"deep": [it]}, lambda held: held["deep"][0]),
    "in an object": (lambda it: SimpleNamespace(it=it, notes=[1]), lambda held: held.it),
    "in an object with ways of its own": (lambda it: dspy.Example(it=it), lambda held: held.it),
    "in a closure": (lambda it: lambda: it, lambda held: held()),
    "in a tool": (lambda it: dspy.Tool(lambda query: it, name="t"), lambda held: held(query="q")),
    "in a default": (lambda it: lambda query, mine=it: mine, lambda held: held("q")),
    "in a partial": (lambda it: functools.partial(lambda mine: mine, it), lambda held: held()),
    "as a method's owner": (lambda it: Callable_(it).__call__, lambda held: held("q")),
}


@pytest.mark.parametrize("within", list(WITHIN))
@pytest.mark.parametrize("lock", [threading.Lock, asyncio.Lock, anyio.Lock, asyncio.Queue])
def test_what_holds_a_lock_is_shared_by_rollouts_wherever_it_hangs(within: str, lock: Callable[[], Any]) -> None:
    put, get = WITHIN[within]
    guarded = Guarded(lock())
    student: Any = Holder(lambda program: SimpleNamespace(held=put(guarded), same=guarded, notes=guarded.notes))
    first, again = copied(student)
    one, other = cast(Any, again(first)), cast(Any, again(first))
    assert get(one.it.held) is get(other.it.held) is one.it.same
    assert one.it.notes is other.it.notes is one.it.same.notes, "what it refers to is the same elsewhere"
    assert one.notes is not other.notes
    assert (one.it.same is guarded) == (lock is threading.Lock), "loops are a run's own"


def test_what_limits_how_many_work_at_once_limits_all_rollouts() -> None:
    locks = {"asyncio": asyncio.Semaphore(2), "anyio": anyio.CapacityLimiter(2), "thread": threading.Semaphore(2)}
    student: Any = Holder(lambda program: SimpleNamespace(**locks))
    first, again = copied(student)
    one, other = cast(Any, again(first)), cast(Any, again(first))
    assert one.it is other.it
    for name in locks:
        assert getattr(one.it, name) is getattr(other.it, name)
        assert (getattr(one.it, name) is locks[name]) == (name != "asyncio"), "loops are a run's own"


class UnderItsClassesLock:
    lock = threading.Lock()

    def __init__(self) -> None:
        self.notes: list[int] = []


class Remembering(UnderItsClassesLock):
    lock = None  # pyright: ignore[reportAssignmentType]

    @functools.lru_cache  # noqa: B019
    def search(self, query: str) -> str:
        self.notes.append(1)
        return query


class RememberingByItself(Remembering):
    def __init__(self) -> None:
        super().__init__()
        self.search = functools.lru_cache(super().search)


class OfAnotherLibrary:
    """As locks of files and of data bases are: it can be acquired."""

    def acquire(self) -> None: ...


MADE_FOR_SHARING: dict[str, Callable[[], Any]] = {
    "a lock in the body of its class": UnderItsClassesLock,
    "a method with a memo": Remembering,
    "a memo of a method": RememberingByItself,
    "locks made by a function": lambda: SimpleNamespace(locks=defaultdict(lambda: asyncio.Semaphore(4)), notes=[]),
    "locks made with a limit": lambda: SimpleNamespace(
        locks=defaultdict(functools.partial(threading.Semaphore, 4)), notes=[]
    ),
    "a lock of another library": lambda: SimpleNamespace(lock=OfAnotherLibrary(), notes=[]),
}


@pytest.mark.parametrize("name", MADE_FOR_SHARING)
def test_what_is_made_for_sharing_in_another_way_than_by_a_lock_of_its_own_is_shared_too(name: str) -> None:
    student: Any = Holder(lambda program: {"it": MADE_FOR_SHARING[name]()})
    first, again = copied(student)
    one, other = cast(Any, again(first)), cast(Any, again(first))
    assert one.it["it"] is other.it["it"]
    assert one.it["it"].notes is other.it["it"].notes
    assert one.it is not other.it


def test_of_a_module_with_a_lock_the_data_is_shared_and_the_predictors_are_copied() -> None:
    class Searcher(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step, self.lock, self.answers = dspy.Predict("question -> answer"), threading.Lock(), {"q": ["a"]}
            self.steps = {"first": self.step}
            self.tool = self.search

        def search(self, query: str) -> Any:
            return self

    student: Any = Holder(lambda program: Searcher())
    first, again = copied(student)
    rollout: Any = again(first)
    assert rollout.it is not student.it
    assert rollout.it.answers is student.it.answers
    assert rollout.it.step is rollout.it.steps["first"] is not student.it.step
    assert rollout.it.step.demos is not student.it.step.demos
    assert rollout.it.tool("q") is rollout.it
    assert rollout.notes is not student.notes, "the lock is another module's"


def test_beside_a_semaphore_a_modules_data_stays_a_rollouts_own() -> None:
    student: Any = Holder(lambda program: threading.Semaphore(2))
    rollout: Any = isolated_copy(student)
    assert rollout.it is student.it
    assert rollout.notes is not student.notes


def test_what_holds_a_lock_and_a_predictor_works_on_the_rollouts_predictor_and_shares_its_data() -> None:
    def made(program: Any) -> Any:
        return SimpleNamespace(lock=threading.Lock(), answers={"q": 1}, step=program.step, ask=program.search)

    student: Any = Holder(made)
    rollout: Any = isolated_copy(student)
    assert rollout.it.step is rollout.step
    assert rollout.it.ask("q") is rollout
    assert rollout.it.answers is student.it.answers


def test_a_tool_with_a_lock_in_its_closure_shares_what_it_guards() -> None:
    def made(program: Any) -> Any:
        lock, notes = threading.Lock(), program.notes

        def search(query: str) -> Any:
            with lock:
                return notes

        return search

    student: Any = Holder(made)
    rollout: Any = isolated_copy(student)
    assert rollout.it("q") is rollout.notes is student.notes


def test_an_interpreter_of_dspys_with_its_locks_is_a_rollouts_own() -> None:
    student: Any = Holder(lambda program: [dspy.Parallel(num_threads=2), LocalInterpreter()])
    parallel, interpreter = cast(Any, isolated_copy(student)).it
    assert parallel is not student.it[0]
    assert parallel.cancel_jobs is not student.it[0].cancel_jobs
    assert interpreter is not student.it[1]
    assert interpreter._responses is not student.it[1]._responses


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
