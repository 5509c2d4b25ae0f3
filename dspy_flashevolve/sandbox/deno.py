"""The second sandbox: dspy's own interpreter (Deno and Pyodide), through ``dspy.Flex``.

Candidate code runs as WebAssembly without files, network and processes; the predictors that it makes live in this
process, as data (``dspy.Flex`` says how). It runs a subset of dspy and of Python's libraries, keeps no memory, and has
limits on wall time, LM calls and their tokens, and output only.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import dspy
from dspy.clients.base_lm import BaseLM
from dspy.primitives.code_interpreter import CodeInterpreter, CodeInterpreterError
from pydantic_core import to_jsonable_python

from dspy_flashevolve.engine.errors import ConfigurationError, FlashEvolveError
from dspy_flashevolve.sandbox.contract import CallLm, Failure, Job, Limits, LmAnswer, LmRecord, Outcome, WireError
from dspy_flashevolve.sandbox.conversation import parse_request

T = TypeVar("T")
_FLEX: Any = dspy.Flex


class DenoSandbox:
    """Runs candidates in dspy's interpreter, one session a run. A :class:`CodeSandbox`.

    Args:
        signature: inputs and outputs of the task.
        limits: of each run; those of processor time, memory, scratch files and tasks do not apply.
        interpreter_factory: makes an interpreter. Default: ``dspy.PythonInterpreter``.

    Raises:
        ConfigurationError: Deno is not installed, and no other interpreter is given.
    """

    missing = ("user", "namespaces", "landlock", "seccomp")
    """The process sandbox's layers; this one has Deno's and WebAssembly's in their place."""

    def __init__(
        self, signature: Any, limits: Limits, interpreter_factory: Callable[[], CodeInterpreter] | None = None
    ) -> None:
        if interpreter_factory is None and shutil.which("deno") is None:
            raise ConfigurationError("sandbox='deno' needs Deno, which is not installed: see https://deno.com.")
        self._signature = signature
        self._limits = limits
        self._factory = interpreter_factory or dspy.PythonInterpreter

    async def __aenter__(self) -> DenoSandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def run(self, job: Job, call_lm: CallLm) -> Outcome:
        """See :class:`CodeSandbox`; a job with ``learn`` fails, and memory is not handed over."""
        if job.inputs is None:
            return Outcome({}, failure=Failure("interface", "learn(batch) needs the process sandbox"))
        lm = _HostLM(call_lm, asyncio.get_running_loop(), self._limits)
        session: list[CodeInterpreter] = []

        def interpreter() -> CodeInterpreter:
            session.append(self._factory())
            return session[-1]

        try:
            fields = await lm.within_limits(
                asyncio.ensure_future(asyncio.to_thread(self._predict, job, lm, interpreter))
            )
        except asyncio.TimeoutError as error:
            return Outcome({}, failure=Failure("time", str(error)), calls=tuple(lm.calls))
        except FlashEvolveError:
            raise
        except (CodeInterpreterError, SyntaxError, WireError) as error:
            return Outcome({}, failure=lm.failure or Failure("error", str(error)[:4000]), calls=tuple(lm.calls))
        finally:
            for one in session:
                one.shutdown()
        if len(json.dumps(fields)) > self._limits.output_bytes:
            failure = Failure("output", f"it sent more than {self._limits.output_bytes} bytes")
            return Outcome({}, failure=failure, calls=tuple(lm.calls))
        return Outcome(fields, calls=tuple(lm.calls))

    def _predict(self, job: Job, lm: _HostLM, interpreter: Callable[[], CodeInterpreter]) -> dict[str, Any]:
        flex = _FLEX(self._signature, interpreter_factory=interpreter, max_predictor_calls=self._limits.lm_calls)
        flex.load_state({"module_src": job.source})
        with dspy.context(lm=lm):
            prediction = flex(**(job.inputs or {}))
        return json.loads(json.dumps(to_jsonable_python(dict(prediction.items()), fallback=repr)))


class _HostLM(BaseLM):
    """What a candidate's predictors call: the run's LM, with its limits."""

    def __init__(self, call_lm: CallLm, loop: asyncio.AbstractEventLoop, limits: Limits) -> None:
        super().__init__(model="host", cache=False)
        self._call_lm, self._loop, self._limits = call_lm, loop, limits
        self._call: Future[LmAnswer] | None = None
        self._call_began, self._call_seconds = 0.0, 0.0
        self.calls: list[LmRecord] = []
        self.failure: Failure | None = None

    def __call__(self, prompt: str | None = None, *, messages: Any = None, **kwargs: Any) -> Any:
        given = messages if messages is not None else [{"role": "user", "content": prompt}]
        options = {name: value for name, value in kwargs.items() if value is not None}
        if len(self.calls) >= self._limits.lm_calls:
            self.failure = Failure("lm_calls", f"it asked for more than {self._limits.lm_calls} LM calls")
            raise CodeInterpreterError(str(self.failure))
        if sum(call.tokens for call in self.calls) >= self._limits.lm_tokens:
            self.failure = Failure("lm_tokens", f"its LM calls used its {self._limits.lm_tokens} tokens")
            raise CodeInterpreterError(str(self.failure))
        request = parse_request({"messages": to_jsonable_python(given), "options": options})
        self._call_began = self._loop.time()
        self._call = asyncio.run_coroutine_threadsafe(self._call_lm(request), self._loop)
        try:
            answer = self._call.result()
        finally:
            self._call_seconds, self._call = self._called_for(), None
        if answer.record is None:
            raise CodeInterpreterError(answer.error)
        self.calls.append(answer.record)
        return answer.record.outputs

    def _called_for(self) -> float:
        """Seconds of LM calls, that of the one under way among them."""
        return self._call_seconds + (0.0 if self._call is None else self._loop.time() - self._call_began)

    async def within_limits(self, work: asyncio.Future[T]) -> T:
        """Wait for a run, on the loop.

        Raises:
            TimeoutError: of asyncio; it took too long. Its LM call is cancelled, its thread is left to itself.
        """
        limits, began, over = self._limits, self._loop.time(), ""
        while not work.done() and not over:
            spent, called = self._loop.time() - began, self._called_for()
            own, all_ = limits.seconds - (spent - called), limits.total_seconds - spent
            if own <= 0:
                over = f"it ran for more than {limits.seconds:g} seconds"
            elif all_ <= 0:
                over = f"it ran for more than {limits.total_seconds:g} seconds, its LM calls included"
            else:
                await asyncio.wait([work], timeout=min(own, all_))
        if not over:
            return await work
        if self._call is not None:
            self._call.cancel()
        work.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        raise asyncio.TimeoutError(over)
