"""Virtual time: the same engine and stages on a loop whose clock jumps, with a language model in the process.

A run that would take hours takes seconds, and the same run gives the same result, whatever the machine is doing.
Nothing sleeps: when the loop has nothing to do, its clock jumps to the next timer. Code that runs in a thread (a
synchronous reflection, gepa's state) has the floor while it runs: the loop waits until it is done or asks a
simulated model, so that threads and loop never run at once, and order does not depend on the machine.

    lm = SimulatedLM("h100-qwen3-8b")
    program = run(lambda: optimizer.acompile(student, trainset=..., valset=...))
"""

from __future__ import annotations

import asyncio
import json
import selectors
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import dspy
from dspy.lm15 import Message, Request, Response, TextPart, Usage

from dspy_flashevolve.sim.driver import BatchDriver
from dspy_flashevolve.sim.profiles import Profile, profile_named
from dspy_flashevolve.sim.prompts import ChatRequest, parse_chat_request
from dspy_flashevolve.sim.replies import ReplyModel, reply_to

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
    """Waits for nothing: the time that the loop would wait for is added to its clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        """Events that are there; the clock jumps by ``timeout`` when there is none."""
        if timeout is None:  # nothing is planned: only another thread can wake the loop
            return super().select(None)
        events = super().select(0)
        if not events and timeout > 0:
            self.now += timeout
        return events


_loop_of: dict[int, VirtualLoop] = {}
"""Thread -> the virtual loop that gave it the floor."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose ``time()`` starts at 0 and jumps from timer to timer."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._floor = threading.Condition()
        self._threads = ThreadPoolExecutor(max_workers=10_000, thread_name_prefix="virtual")
        self._working = 0
        self._waits: set[Future[Any]] = set()

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run ``func`` in a thread, now, before anything else happens on the loop.

        The executor is not used: calls that were made one after the other run one after the other.
        """
        del executor
        result: asyncio.Future[T] = self.create_future()

        def call() -> None:
            _loop_of[threading.get_ident()] = self
            try:
                value = func(*args)
            except BaseException as error:
                self._tell(_fail, result, error)
            else:
                self._tell(_succeed, result, value)
            finally:
                _loop_of.pop(threading.get_ident(), None)
                self._leave_floor()

        self._give_floor(lambda: self._threads.submit(call))
        return result

    def wait_from_thread(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop from one of its threads, which gives up the floor until it is done."""
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
        self._threads.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _tell(self, call: Callable[..., None], *args: Any) -> None:
        """Call on the loop, unless it has closed."""
        if not self.is_closed():
            self.call_soon_threadsafe(call, *args)

    def _give_floor(self, begin: Callable[[], Any]) -> None:
        """Let a thread work, and wait on the loop's thread until it has the floor no more."""
        with self._floor:
            self._working += 1
            begin()
            while self._working:
                self._floor.wait()

    def _leave_floor(self) -> None:
        with self._floor:
            self._working -= 1
            self._floor.notify_all()


def _succeed(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def run(main: Callable[[], Awaitable[T]]) -> T:
    """Run ``main`` to its end in virtual time.

    Args:
        main: an async function without arguments; ``asyncio.get_running_loop().time()`` is its clock.

    Example:
        >>> async def main() -> float:
        ...     await asyncio.sleep(3600)
        ...     return asyncio.get_running_loop().time()
        >>> run(main)
        3600.0
    """

    async def awaited() -> T:
        return await main()

    loop = VirtualLoop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(awaited())
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(_ended(left))
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()


class SimulatedModel:
    """The simulated server without its HTTP: one batch of sequences, shared by all the LMs that it serves.

    Args:
        profile: rates and output lengths, or the name of a calibrated profile.
        seed: of the replies.
        reply_model: how well it obeys and reflects.
    """

    def __init__(
        self, profile: Profile | str = "h100-qwen3-8b", seed: int = 0, reply_model: ReplyModel | None = None
    ) -> None:
        self.profile = profile_named(profile) if isinstance(profile, str) else profile
        self.seed = seed
        self.reply_model = reply_model or ReplyModel()
        self.requests: dict[str, int] = {}
        """Kind of prompt -> requests answered."""
        self.completion_tokens = 0
        self._driver: BatchDriver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def lm(self, name: str = "simulated") -> dspy.LM:
        """An LM that this model serves; use it inside :func:`run` only."""
        return dspy.LM(name, engine=_Engine(self), async_engine=_AsyncEngine(self), cache=False, num_retries=0)

    def generated_tokens(self) -> float:
        """Tokens written so far, pro rata for replies under way."""
        return 0.0 if self._driver is None else self._driver.load().generated_tokens

    async def answer(self, request: Request) -> Response:
        """The reply, after the time that it takes."""
        chat = _chat(request)
        reply = reply_to(chat, self.profile, self.reply_model, self.seed)
        loop = asyncio.get_running_loop()
        if self._driver is None or self._loop is not loop:  # of a run before
            self._loop = loop
            self._driver = BatchDriver(self.profile, time_scale=1.0)
        generation = self._driver.submit(chat.prompt_tokens, reply.completion_tokens)
        try:
            await generation.finished
        finally:
            self._driver.release(generation)
        self.requests[chat.kind] = self.requests.get(chat.kind, 0) + 1
        self.completion_tokens += reply.completion_tokens
        return Response(
            id=None,
            model="simulated",
            message=Message("assistant", (TextPart(reply.text),)),
            finish_reason="length" if reply.finish_reason == "length" else "stop",
            usage=Usage(
                input_tokens=chat.prompt_tokens,
                output_tokens=reply.completion_tokens,
                total_tokens=chat.prompt_tokens + reply.completion_tokens,
            ),
        )


class _Shared:
    """Copies of an LM ask the same model: a loop and a batch cannot be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class _AsyncEngine(_Shared):
    """dspy's engine contract, on the loop."""

    def __init__(self, model: SimulatedModel) -> None:
        self._model = model

    async def complete(self, request: Request) -> Response:
        return await self._model.answer(request)

    async def aclose(self) -> None:
        """Nothing to close."""


class _Engine(_Shared):
    """dspy's engine contract, from a thread of the virtual loop."""

    def __init__(self, model: SimulatedModel) -> None:
        self._model = model

    def complete(self, request: Request) -> Response:
        loop = _loop_of.get(threading.get_ident())
        if loop is None:
            raise RuntimeError(
                "a simulated model was called synchronously from a thread that no virtual loop has started: call it "
                "inside run(), from the loop or from a thread that the loop's run_in_executor started."
            )
        return loop.wait_from_thread(self._model.answer(request))

    def close(self) -> None:
        """Nothing to close."""


def _chat(request: Request) -> ChatRequest:
    """The request as the server would read it."""
    messages = [{"role": "system", "content": _text(request.system)}] if request.system else []
    messages += [{"role": message.role, "content": _text(message.parts)} for message in request.messages]
    body: dict[str, Any] = {"model": request.model, "messages": messages}
    return parse_chat_request(json.dumps(body).encode())


def _text(parts: Any) -> str:
    if parts is None or isinstance(parts, str):
        return parts or ""
    return "\n".join(part.text for part in parts if isinstance(part, TextPart))
