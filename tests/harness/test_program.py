"""Harness: a program whose source runs in the sandbox."""

from __future__ import annotations

import subprocess
import sys

import dspy
import pytest

from dspy_flashevolve import Harness, HarnessError, Limits
from tests.fakes import fake_lm, reply_for
from tests.sandbox.worlds import module

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")


def answering(**fields: str) -> dspy.LM:
    return fake_lm(lambda prompt: reply_for(prompt, **fields))


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


def test_what_its_code_raises_is_an_error_with_its_words() -> None:
    with dspy.context(lm=answering(answer="42")), pytest.raises(HarnessError, match="ZeroDivisionError") as caught:
        Harness("question -> answer", module("1 / 0"), limits=Limits(seconds=60))(question="?")
    assert caught.value.failure.reason == "error"
