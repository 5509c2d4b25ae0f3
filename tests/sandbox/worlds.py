"""Sandboxes and candidates for the tests."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from dspy_flashevolve.sandbox.confinement import LAYERS
from dspy_flashevolve.sandbox.contract import Job, Limits, LmRecord, LmRequest, Outcome
from dspy_flashevolve.sandbox.sandbox import Sandbox

TIGHT = Limits(
    seconds=60.0,
    cpu_seconds=4,
    memory_bytes=256 << 20,
    output_bytes=1 << 20,
    scratch_bytes=4 << 20,
    lm_calls=3,
    tasks=8,
)
"""Limits under which a test machine survives whatever a candidate does."""
GOOD = """
class Good(dspy.Module):
    def __init__(self):
        super().__init__()
        self.predict = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.predict(question=question)
"""


def module(body: str, name: str = "Candidate") -> str:
    """A candidate whose ``forward`` runs ``body``, and answers with ``found`` where it comes to its end."""
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    return f"class {name}(dspy.Module):\n    def forward(self, question):\n        found = ''\n{lines}\n" + (
        "        return dspy.Prediction(answer=found)\n"
    )


async def answered(request: LmRequest) -> LmRecord:
    """An LM that always answers "42"."""
    outputs = ["[[ ## answer ## ]]\n42\n\n[[ ## completed ## ]]"] * request.replies
    return LmRecord(request.messages, outputs, prompt_tokens=3, completion_tokens=4)


class Lab:
    """One sandbox on a loop of its own, run from plain tests."""

    def __init__(self, sandbox: Sandbox, loop: asyncio.AbstractEventLoop) -> None:
        self.sandbox = sandbox
        self._loop = loop

    def run(self, source: str, name: str = "Candidate", call_lm: Any = answered, **job: Any) -> Outcome:
        job = {"inputs": {"question": "?"}, **job}
        return self._loop.run_until_complete(self.sandbox.run(Job(source, name, **job), call_lm))

    def is_well(self) -> bool:
        """The sandbox still runs a candidate that does no harm."""
        outcome = self.run(GOOD, "Good")
        return outcome.failure is None and outcome.fields == {"answer": "42"}

    def await_(self, coroutine: Any) -> Any:
        return self._loop.run_until_complete(coroutine)


@contextmanager
def lab(limits: Limits = TIGHT, audited: bool = True, without: tuple[str, ...] = ()) -> Generator[Lab]:
    """A lab whose sandbox is started, and closed in the end."""
    loop = asyncio.new_event_loop()
    sandbox = Sandbox(limits, accept_missing_protection=LAYERS, audited=audited, without=without)
    try:
        loop.run_until_complete(sandbox.__aenter__())
        yield Lab(sandbox, loop)
    finally:
        loop.run_until_complete(sandbox.__aexit__())
        loop.close()
