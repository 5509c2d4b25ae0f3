"""Virtual time: the same engine and stages on a loop whose clock jumps, with a language model in the process.

A run that would take hours takes seconds, and the same run gives the same result, whatever the machine is doing.
Nothing sleeps: when the loop has nothing to do, its clock jumps to the next timer. Code that runs in a thread (a
synchronous reflection, gepa's state) has the floor while it runs: the loop waits until it is done or asks for
something on the loop, so that threads and loop never run at once, and order does not depend on the machine.

    lm = SimulatedModel("h100-qwen3-8b").lm()
    program = run(lambda: optimizer.acompile(student, trainset=..., valset=...))
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import selectors
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import dspy
from dspy.lm15 import Message, RateLimitError, Request, Response, TextPart, Usage

from dspy_flashevolve.sim.backend import Batch, Load, Profile, profile_named
from dspy_flashevolve.sim.prompts import ChatRequest, parse_chat_request
from dspy_flashevolve.sim.replies import Repeats, ReplyModel, reply_to

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
    """A selector that never waits: the time that the loop would wait is added to its clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        """Return the events that are ready; when there are none, the clock jumps by ``timeout``."""
        if timeout is None:  # nothing is planned: only another thread can wake the loop
            return super().select(None)
        events = super().select(0)
        if not events and timeout > 0:
            self.now += timeout
        return events


FOREIGN = (
    "a simulated model was called synchronously from a thread that no virtual loop has started: call it "
    "inside run(), from the loop or from a thread that the loop's run_in_executor started."
)
NEVER_WAITS = ("dspy.clients.execution", "dspy.clients.capabilities")
"""Modules whose functions dspy runs in a thread at every LM call, and which never wait for the loop."""
LOOP_OF: dict[int, VirtualLoop] = {}
"""Id of a thread -> the virtual loop that let it run."""


class _Worker:
    """A thread that makes calls one after another, until None is submitted."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.submit = self._calls.put
        threading.Thread(target=self._work, name="virtual", daemon=True).start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose ``time()`` starts at 0 and jumps from timer to timer."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._floor = threading.Condition()
        self._idle: dict[int, list[_Worker]] = {}
        self._working = 0
        self._waits: set[Future[Any]] = set()

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run ``func`` in a thread, now, before anything else happens on the loop.

        An executor whose calls follow one another gets one thread, as in reality. A function that never waits for the
        loop runs on the loop's own thread, which gives the same result without two switches of threads.
        """
        result: asyncio.Future[T] = self.create_future()
        if isinstance(func, partial) and any(
            getattr(argument, "__module__", "") in NEVER_WAITS for argument in func.args[:1]
        ):
            try:
                value = func(*args)
            except Exception as error:
                self.call_soon(_fail, result, error)
            else:
                self.call_soon(_succeed, result, value)
            return result

        idle = self._idle.setdefault(id(executor), [])
        worker = idle.pop() if idle else _Worker()

        def call() -> None:
            LOOP_OF[threading.get_ident()] = self
            try:
                value = func(*args)
            except BaseException as error:
                self._call_if_open(_fail, result, error)
            else:
                self._call_if_open(_succeed, result, value)
            finally:
                LOOP_OF.pop(threading.get_ident(), None)
                if self.is_closed():
                    worker.submit(None)
                else:
                    idle.append(worker)  # before the loop goes on: its next call finds it
                self._leave_floor()

        self._give_floor(lambda: worker.submit(call))
        return result

    def wait_from_thread(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop from one of its threads, which gives up the floor until it is done. Raises
        RuntimeError where no virtual loop has started this thread."""
        if LOOP_OF.get(threading.get_ident()) is not self:
            work.close()
            raise RuntimeError(FOREIGN)
        done: Future[T] = Future()
        self._waits.add(done)

        async def on_loop() -> None:
            try:
                value = await work
            except BaseException as error:
                if done.done():  # the loop has closed
                    raise
                self._give_floor(partial(done.set_exception, error))
            else:
                self._give_floor(partial(done.set_result, value))

        self.call_soon_threadsafe(lambda: self.create_task(on_loop()))
        self._leave_floor()
        try:
            return done.result()
        finally:
            self._waits.discard(done)

    def close(self) -> None:
        """Close the loop and end its threads; one that still waits for the loop gets a CancelledError."""
        for wait in list(self._waits):
            if not wait.done():
                wait.set_exception(CancelledError())
        super().close()
        for worker in [worker for idle in self._idle.values() for worker in idle]:
            worker.submit(None)

    def _call_if_open(self, call: Callable[..., None], *args: Any) -> None:
        """Schedule a call on the loop, unless that has been closed."""
        if not self.is_closed():
            self.call_soon_threadsafe(call, *args)

    def _give_floor(self, begin: Callable[[], Any]) -> None:
        """Let a thread work, and block the loop's thread until it is done or waits for the loop."""
        with self._floor:
            self._working += 1
            begin()
            while self._working:
                self._floor.wait()

    def _leave_floor(self) -> None:
        """Give control back from a thread to the loop."""
        with self._floor:
            self._working -= 1
            self._floor.notify_all()


def _succeed(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def run(main: Callable[[], Awaitable[T]]) -> T:
    """Run ``main`` to its end in virtual time. Where a loop runs already, as in a notebook, that happens in a thread.

    Args:
        main: an async function without arguments; ``asyncio.get_running_loop().time()`` is its clock.

    Examples:
        >>> async def main() -> float:
        ...     await asyncio.sleep(3600)
        ...     return asyncio.get_running_loop().time()
        >>> run(main)
        3600.0
    """

    if asyncio._get_running_loop() is not None:  # pyright: ignore[reportPrivateUsage]
        with ThreadPoolExecutor(max_workers=1) as thread:  # dspy keeps its settings in context variables
            return thread.submit(contextvars.copy_context().run, run, main).result()

    async def awaited() -> T:
        return await main()

    loop = VirtualLoop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(awaited())
    finally:
        unfinished = asyncio.all_tasks(loop)
        for task in unfinished:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*unfinished, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()


class SimulatedModel:
    """The simulated server without its HTTP: one batch of sequences, shared by all the LMs that it serves.

    Args:
        profile: rates and output lengths, or the name of a profile.
        seed: seed of the replies.
        reply_model: how well the model obeys and reflects; None for `ReplyModel()`.
        reflection_seconds: what each request that is no rollout's takes, as from another, slow model: it holds no place
            in this one's batch and counts for no limit. 0 where this model answers all requests.
    """

    def __init__(
        self,
        profile: Profile | str = "h100-qwen3-8b",
        seed: int = 0,
        reply_model: ReplyModel | None = None,
        reflection_seconds: float = 0.0,
    ) -> None:
        self.profile = profile_named(profile) if isinstance(profile, str) else profile
        self.seed = seed
        self.reply_model = reply_model or ReplyModel()
        self.reflection_seconds = reflection_seconds
        self.requests: dict[str, int] = {}
        """Kind of prompt -> requests answered."""
        self.tokens: dict[str, int] = {}
        """Kind of prompt -> tokens read and written for it, of requests answered."""
        self.prompt_tokens = 0
        """Prompt tokens of the requests answered."""
        self.completion_tokens = 0
        """Completion tokens of the requests answered."""
        self.refused: list[float] = []
        """When each refused request came, in virtual seconds."""
        self._repeats = Repeats()
        self._batch: Batch | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def lm(self, name: str = "simulated") -> dspy.LM:
        """Return an LM that this model serves; use it inside `run` only."""
        return dspy.LM(name, engine=_Engine(self), async_engine=_AsyncEngine(self), cache=False, num_retries=0)

    def load(self) -> Load:
        """Return the state and the totals of the batch."""
        return Load(0, 0, 0.0, 0.0) if self._batch is None else self._batch.load()

    async def answer(self, request: Request) -> Response:
        """Return the reply, after the time that it takes; lm15's RateLimitError if too many requests are in flight."""
        chat = chat_request(request)
        loop = asyncio.get_running_loop()
        if self._batch is None or self._loop is not loop:  # the batch of an earlier run
            self._loop = loop
            self._batch = self.profile.batch(time_scale=1.0)
        is_elsewhere = self.reflection_seconds > 0 and chat.kind not in ("task", "other")
        limit = self.profile.concurrency_limit
        if not is_elsewhere and limit is not None and self._batch.in_flight >= limit:
            self.refused.append(loop.time())
            message, wait = f"Rate limit reached: {limit} requests in flight.", self.profile.retry_after_seconds
            raise RateLimitError(message, status=429, retry_after=wait)
        reply = reply_to(chat, self.profile, self.reply_model, self.seed, self._repeats.count(chat))
        if is_elsewhere:
            await asyncio.sleep(self.reflection_seconds)
        else:
            generation = self._batch.submit(chat.prompt_tokens, reply.completion_tokens)
            try:
                await generation.finished
            finally:
                self._batch.release(generation)
        self.requests[chat.kind] = self.requests.get(chat.kind, 0) + 1
        tokens = chat.prompt_tokens + reply.completion_tokens
        self.tokens[chat.kind] = self.tokens.get(chat.kind, 0) + tokens
        self.prompt_tokens += chat.prompt_tokens
        self.completion_tokens += reply.completion_tokens
        return Response(
            id=None,
            model="simulated",
            message=Message("assistant", (TextPart(reply.text),)),
            finish_reason=reply.finish_reason,
            usage=Usage(input_tokens=chat.prompt_tokens, output_tokens=reply.completion_tokens, total_tokens=tokens),
        )


class _Engine:
    """An engine in the sense of dspy, asked from a thread of the virtual loop.

    An LM's copies share it: an event loop and a batch cannot be copied.
    """

    def __init__(self, model: SimulatedModel) -> None:
        self._model = model

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def complete(self, request: Request) -> Response:
        loop = LOOP_OF.get(threading.get_ident())
        if loop is None:
            raise RuntimeError(FOREIGN)
        return loop.wait_from_thread(self._model.answer(request))

    def close(self) -> None:
        """Nothing to close."""


class _AsyncEngine(_Engine):
    """An engine in the sense of dspy, asked on the event loop."""

    async def complete(self, request: Request) -> Response:  # type: ignore[override]
        return await self._model.answer(request)

    async def aclose(self) -> None:
        """Nothing to close."""


def chat_request(request: Request) -> ChatRequest:
    """Return a request as the server would read it."""
    messages = [{"role": "system", "content": _text(request.system)}] if request.system else []
    messages += [{"role": message.role, "content": _text(message.parts)} for message in request.messages]
    body: dict[str, Any] = {"model": request.model, "messages": messages}
    return parse_chat_request(json.dumps(body).encode())


def _text(parts: Any) -> str:
    if parts is None or isinstance(parts, str):
        return parts or ""
    return "\n".join(part.text for part in parts if isinstance(part, TextPart))
