"""``acompile`` tells dspy's callbacks of a compile as ``compile`` does: each event once, with the same content."""

from __future__ import annotations

import asyncio
from typing import Any

import dspy
import pytest
from dspy.utils.callback import BaseCallback

from benchmarks.in_process import InProcessStandIn
from dspy_flashevolve import AsyncACE, AsyncGEPA, AsyncMetaHarness, ConfigurationError
from tests.fakes import Chain, digits, examples, fake_lm, reflection_lm, reply_for, task_lm

TRAIN, VAL = examples("t", 3), examples("v", 4)


class CompileEvents(BaseCallback):
    """Keeps what it is told of compiles."""

    def __init__(self) -> None:
        self.starts: list[tuple[str, Any, dict[str, Any]]] = []
        self.ends: list[tuple[str, Any, BaseException | None]] = []

    def on_compile_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        self.starts.append((call_id, instance, inputs))

    def on_compile_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        self.ends.append((call_id, outputs, exception))


def gepa() -> tuple[Any, dspy.Module]:
    return AsyncGEPA(digits, max_metric_calls=20, reflection_lm=reflection_lm()), Chain(1)


def ace() -> tuple[Any, dspy.Module]:
    lm = fake_lm(lambda prompt: reply_for(prompt, answer="3", reasoning="-"))
    return AsyncACE(digits, reflector_lm=lm, curator_lm=lm, num_threads=2), Chain(1)


def harness() -> tuple[Any, dspy.Module]:
    lm = fake_lm(lambda prompt: "no code")
    optimizer = AsyncMetaHarness(digits, proposer_lm=lm, sandbox=InProcessStandIn(), iterations=1, k=1, proposers=1)
    return optimizer, dspy.Predict("question -> answer")


OPTIMIZERS = {"AsyncGEPA": gepa, "AsyncACE": ace, "AsyncMetaHarness": harness}
every = pytest.mark.parametrize("name", list(OPTIMIZERS))


def compiled(name: str, awaited: bool) -> tuple[CompileEvents, Any, Any, Any]:
    optimizer, student = OPTIMIZERS[name]()
    events = CompileEvents()
    with dspy.context(lm=task_lm(), callbacks=[events]):
        if awaited:
            program = asyncio.run(optimizer.acompile(student, trainset=TRAIN, valset=VAL))
        else:
            program = optimizer.compile(student, trainset=TRAIN, valset=VAL)
    return events, optimizer, student, program


@every
def test_a_compile_is_told_once_with_its_arguments_and_its_program_in_both_ways(name: str) -> None:
    told: list[dict[str, Any]] = []
    for awaited in (False, True):
        events, optimizer, student, program = compiled(name, awaited)
        [(begun, instance, inputs)], [(ended, outputs, exception)] = events.starts, events.ends
        assert begun == ended
        assert instance is optimizer
        assert outputs is program
        assert exception is None
        assert inputs["student"] is student
        assert (inputs["trainset"], inputs["valset"]) == (TRAIN, VAL)
        told.append({key: value for key, value in inputs.items() if key != "student"})
    assert list(told[0].items()) == list(told[1].items())


@every
def test_a_refused_compile_is_told_with_its_error(name: str) -> None:
    optimizer, student = OPTIMIZERS[name]()
    events = CompileEvents()
    with dspy.context(lm=task_lm(), callbacks=[events]), pytest.raises(ConfigurationError) as refused:
        asyncio.run(optimizer.acompile(student, trainset=[], valset=[]))
    [(_, outputs, exception)] = events.ends
    assert (outputs, exception) == (None, refused.value)
