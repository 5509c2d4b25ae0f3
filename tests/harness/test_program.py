"""Harness: a program whose source runs in the sandbox."""

from __future__ import annotations

import asyncio
import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import dspy
import pytest

from dspy_flashevolve import ConfigurationError, Harness, HarnessError, Limits
from tests.fakes import fake_lm, reply_for
from tests.sandbox.worlds import module

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


PARALLEL = """
import sys
import dspy
from dspy_flashevolve import Harness
from tests.fakes import fake_lm, reply_for

sys.setswitchinterval(1e-5)
rows = [dspy.Example(question=str(number), answer="42").with_inputs("question") for number in range(32)]
evaluate = dspy.Evaluate(devset=rows, metric=lambda gold, pred, trace=None: gold.answer == pred.answer, num_threads=16)
with dspy.context(lm=fake_lm(lambda prompt: reply_for(prompt, answer="42"))):
    print("score", evaluate(Harness("question -> answer", accept_missing_protection=LAYERS)).score)
"""
"""In a process of its own: only the first calls of a process can meet."""


@pytest.mark.long
def test_its_first_calls_may_come_from_many_threads_at_once() -> None:
    layers = ("user", "namespaces", "landlock", "seccomp")
    for _ in range(3):
        code = PARALLEL.replace("LAYERS", repr(layers))
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
        assert "score 100.0" in ran.stdout, ran.stderr[-2000:]


def test_it_is_saved_loaded_and_copied_with_source_and_memory(tmp_path: Path) -> None:
    program = Harness("question -> answer", REMEMBERS, memory={"?": "kept"})
    program.save(tmp_path / "program.json")
    other = Harness("question -> answer")
    other.load(tmp_path / "program.json")
    with dspy.context(lm=answering(answer="42")):
        for variant in (program, other, copy.deepcopy(program)):
            assert variant(question="?").answer == "kept"
    assert isinstance(other, dspy.Flex)  # pyright: ignore[reportArgumentType] # its decorator hides the class


def test_what_its_code_raises_is_an_error_with_its_words() -> None:
    with dspy.context(lm=answering(answer="42")), pytest.raises(HarnessError, match="ZeroDivisionError") as caught:
        Harness("question -> answer", module("1 / 0"), limits=Limits(seconds=60))(question="?")
    assert caught.value.failure.reason == "error"


@pytest.mark.parametrize(("arguments", "message"), [
    ({"module_src": "import os"}, "imports os"), ({"module_src": "x"}, "0 subclasses"),
])  # fmt: skip
def test_a_harness_that_cannot_run_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Harness("question -> answer", **arguments)


def test_without_an_lm_it_says_what_to_do() -> None:
    with dspy.context(lm=None), pytest.raises(ConfigurationError, match="no LM is configured"):
        Harness("question -> answer")(question="?")
