"""A stand-in for the sandbox: candidate code in this process, for the simulated model's candidates only.

It protects from nothing. It is there for runs in virtual time, where no process of the operating system can live, and
takes no virtual time itself.
"""

from __future__ import annotations

import types
from typing import Any

import dspy
from dspy.clients.base_lm import BaseLM

from dspy_flashevolve.sandbox.contract import CallLm, Failure, Job, LmRecord, Outcome
from dspy_flashevolve.sandbox.sandbox import parse_request


class InProcessStandIn:
    """Runs modules whose ``forward`` is one call of ``self.predict``, as the simulated model writes them."""

    missing = ("process", "user", "namespaces", "landlock")

    async def __aenter__(self) -> InProcessStandIn:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def run(self, job: Job, call_lm: CallLm) -> Outcome:
        """See `CodeSandbox`."""
        home = types.ModuleType("candidate")
        home.__dict__["dspy"] = dspy
        lm = _Caller(call_lm)
        try:
            exec(compile(job.source, "candidate.py", "exec"), home.__dict__)
            module: Any = home.__dict__[job.class_name]()
            with dspy.context(lm=lm):
                prediction = await module.predict.acall(**(job.inputs or {}))
        except (AttributeError, NameError, TypeError, ValueError) as error:
            return Outcome({}, failure=Failure("error", f"{type(error).__name__}: {error}"), calls=tuple(lm.calls))
        return Outcome(dict(prediction.items()), calls=tuple(lm.calls))


class _Caller(BaseLM):
    def __init__(self, call_lm: CallLm) -> None:
        super().__init__(model="stand-in", cache=False)
        self._call_lm = call_lm
        self.calls: list[LmRecord] = []

    async def acall(self, prompt: str | None = None, *, messages: Any = None, **kwargs: Any) -> Any:
        answer = await self._call_lm(parse_request({"messages": messages, "options": {}}))
        if isinstance(answer, str):
            raise ValueError(answer)
        self.calls.append(answer)
        return answer.outputs
