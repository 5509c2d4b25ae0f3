"""Harness: a program whose source runs in the sandbox; and Deno's place, with a fake interpreter."""

from __future__ import annotations

import asyncio
import copy
import sys
from pathlib import Path
from typing import Any

import dspy
import pytest

from dspy_flashevolve import ConfigurationError, Harness, HarnessError, Limits
from dspy_flashevolve.sandbox.contract import Job
from dspy_flashevolve.sandbox.deno import DenoSandbox
from tests.fakes import fake_lm, reply_for
from tests.sandbox.worlds import GOOD, answered, module

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
REMEMBERS = """
class Remembers(dspy.Module):
    def forward(self, question):
        return dspy.Prediction(answer=self.memory[question])
"""


def answering(**fields: str) -> dspy.LM:
    return fake_lm(lambda prompt: reply_for(prompt, **fields))


def test_its_source_runs_elsewhere_and_its_lm_calls_are_made_here() -> None:
    lm = answering(answer="42")
    with dspy.context(lm=lm):
        assert Harness("question -> answer")(question="?").answer == "42"
        assert asyncio.run(Harness("question -> answer: int").acall(question="?")).answer == 42
    assert len(lm.history) == 2


def test_it_is_saved_loaded_and_copied_with_source_and_memory(tmp_path: Path) -> None:
    program = Harness("question -> answer", REMEMBERS, memory={"?": "kept"})
    program.save(tmp_path / "program.json")
    other = Harness("question -> answer")
    other.load(tmp_path / "program.json")
    with dspy.context(lm=answering(answer="42")):
        for one in (program, other, copy.deepcopy(program)):
            assert one(question="?").answer == "kept"
    assert isinstance(other, dspy.Flex)  # pyright: ignore[reportArgumentType] # its decorator hides the class


def test_what_its_code_raises_is_an_error_with_its_words() -> None:
    with dspy.context(lm=answering(answer="42")), pytest.raises(HarnessError, match="ZeroDivisionError") as caught:
        Harness("question -> answer", module("1 / 0"), limits=Limits(seconds=60))(question="?")
    assert caught.value.failure.reason == "error"


@pytest.mark.parametrize(("arguments", "said"), [
    ({"module_src": "import os"}, "imports os"), ({"module_src": "x"}, "0 subclasses"),
    ({"sandbox": "vm"}, "sandbox is"),
])  # fmt: skip
def test_a_harness_that_cannot_run_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Harness("question -> answer", **arguments)


def test_without_an_lm_it_says_what_to_do() -> None:
    with dspy.context(lm=None), pytest.raises(ConfigurationError, match="no LM is configured"):
        Harness("question -> answer")(question="?")


def test_deno_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigurationError, match="needs Deno"):
        DenoSandbox(dspy.Signature("question -> answer"), Limits())


def test_the_second_sandbox_counts_lm_calls_and_reports_failures() -> None:
    """With dspy's local interpreter in Deno's place."""
    local = getattr(dspy, "LocalInterpreter", None)
    if local is None:
        pytest.skip("this dspy has no LocalInterpreter")
    sandbox = DenoSandbox(dspy.Signature("question -> answer"), Limits(lm_calls=2), interpreter_factory=local)

    def run(source: str, **job: Any) -> Any:
        return asyncio.run(sandbox.run(Job(source, "x", **{"inputs": {"question": "?"}, **job}), answered))

    good = run(GOOD)
    assert (good.failure, good.fields, len(good.calls)) == (None, {"answer": "42"}, 1)
    assert run(GOOD, inputs=None, batch=[]).failure.reason == "interface"
    assert run(module("1 / 0")).failure.reason == "error"
    greedy = module("for _ in range(9): dspy.Predict('question -> answer')(question='again')")
    assert run(greedy).failure.reason == "error"  # dspy.Flex's own limit on calls comes first
    sandbox = DenoSandbox(dspy.Signature("question -> answer"), Limits(lm_tokens=7), interpreter_factory=local)
    assert run(greedy).failure.reason == "lm_tokens"


@pytest.mark.parametrize(
    ("limits", "body", "message"),
    [
        (Limits(seconds=0.3), "import time; time.sleep(1.5)", "it ran for more than 0.3 seconds"),
        (Limits(seconds=3.0), "dspy.Predict('question -> answer')(question='slow')", ""),
        (Limits(total_seconds=0.3), "dspy.Predict('question -> answer')(question='slow')", "its LM calls included"),
    ],
)
def test_the_second_sandbox_bounds_a_runs_own_time_and_all_of_it(limits: Limits, body: str, message: str) -> None:
    """With dspy's local interpreter in Deno's place. The LM takes 4 s, which is not the candidate's own time."""
    local = getattr(dspy, "LocalInterpreter", None)
    if local is None:
        pytest.skip("this dspy has no LocalInterpreter")
    begun, cancelled = list[bool](), list[bool]()

    async def slow(request: Any) -> Any:
        begun.append(True)
        try:
            await asyncio.sleep(4.0)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return await answered(request)

    async def main() -> Any:
        sandbox = DenoSandbox(dspy.Signature("question -> answer"), limits, interpreter_factory=local)
        outcome = await sandbox.run(Job(module(body), "x", {"question": "?"}), slow)
        await asyncio.sleep(0.1)
        return outcome

    outcome = asyncio.run(main())
    assert message in str(outcome.failure)
    assert (outcome.failure is None) == (message == "")
    assert cancelled == ([] if outcome.failure is None else begun)
