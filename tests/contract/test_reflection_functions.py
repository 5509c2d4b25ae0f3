"""A function as ``reflection_lm``, as gepa takes it; and an error that every reflection has, which ends the run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import dspy
import pytest
from dspy.teleprompt.gepa import InstructionProposer

from dspy_flashevolve import AsyncGEPA, ConfigurationError, RunAbortedError
from tests.contract.surface import compiled, facts, simulated
from tests.fakes import Chain, digits, fake_lm, hashed, reflection_lm, reply_for


def written_for(prompt: str) -> str:
    return reply_for(prompt, new_instruction=f"Instruction {hashed(prompt) % 100_000}")


async def awaited(prompt: str) -> str:
    return written_for(prompt)


class Method:
    def __call__(self, prompt: str) -> str:
        return written_for(prompt)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "function": written_for,
    "lambda": lambda prompt: written_for(prompt),
    "coroutine function": awaited,
    "object": Method(),
    "partial": functools.partial(lambda text, prompt: written_for(prompt), ""),
    "with options": lambda prompt, **options: written_for(prompt),
    "of messages": lambda messages: written_for(messages[0]["content"]),
    "as dspy calls an LM": lambda prompt=None, messages=None, **options: [
        written_for(prompt or messages[0]["content"])
    ],
}


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_as_reflection_lm_writes_the_instructions_that_an_lm_writes_with_the_same_texts(
    name: str, schedule: Any
) -> None:
    made = simulated(80, reflection_lm=FUNCTIONS[name], schedule=schedule)
    assert made.async_stats.proposals > 0
    assert made.async_stats.ended["failed"] == 0
    again = simulated(80, reflection_lm=written_for, schedule=schedule)
    assert facts(made.detailed_results) == facts(again.detailed_results)


def test_a_function_is_called_in_compile_as_it_is_in_acompile() -> None:
    assert compiled(60, reflection_lm=written_for).async_stats.proposals > 0


@pytest.mark.parametrize("given", [5, lambda: "no prompt", lambda prompt, answer: "two", object()])
def test_what_is_no_lm_and_no_function_of_a_prompt_is_refused_at_construction(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"reflection_lm is .* expected a dspy\.LM, the name of a model, or a"):
        AsyncGEPA(digits, auto="light", reflection_lm=given)


def test_what_dspys_predictors_ask_as_an_lm_is_left_as_it_is() -> None:
    lms = [reflection_lm(), dspy.utils.DummyLM([{"answer": "3"}])]
    assert [AsyncGEPA(digits, auto="light", reflection_lm=lm).reflection_lm for lm in lms] == lms


# An error that every reflection has

FIRST, SLOTS = 24, 4
"""Reflections that fail alike before a run ends, and how many more may be under way."""


class Calls:
    """A function whose calls are counted."""

    def __init__(self, call: Callable[[str], Any]) -> None:
        self.call, self.count = call, 0

    def __call__(self, prompt: str) -> Any:
        self.count += 1
        return self.call(prompt)


def misspelt(prompt: str) -> str:
    return promt  # type: ignore[name-defined] # noqa: F821


MISTAKES: dict[str, tuple[Callable[[str], Any], str]] = {
    "returns nothing": (lambda prompt: None, "returned None, expected the reply as text"),
    "has a misspelt name": (misspelt, "name 'promt' is not defined"),
}


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_function_ends_the_run_with_its_error(name: str, schedule: Any) -> None:
    mistaken, says = MISTAKES[name]
    function = Calls(mistaken)
    with pytest.raises(Exception, match=says):
        simulated(2000, reflection_lm=function, schedule=schedule)
    assert function.count <= 2 * (FIRST + SLOTS), "dspy asks again in JSON where a reply cannot be used"


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_an_error_that_every_reflection_has_ends_the_run_with_it(schedule: Any) -> None:
    asked = 0

    def proposer(candidate: Any, reflective_dataset: Any, components_to_update: list[str]) -> dict[str, str]:
        nonlocal asked
        asked += 1
        raise KeyError(f"no idea {asked}")

    with pytest.raises(KeyError, match="no idea") as caught:
        simulated(2000, instruction_proposer=proposer, schedule=schedule)
    assert any("All of the first 24 reflections failed alike" in note for note in caught.value.__notes__)
    assert asked <= FIRST + SLOTS


class Unwritable(dspy.ChatAdapter):
    def format(self, signature: Any, demos: Any, inputs: Any) -> Any:
        raise KeyError("no such form")


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_an_error_before_the_reflection_lm_is_asked_ends_the_run_with_it(schedule: Any) -> None:
    proposer = InstructionProposer(adapter=Unwritable())
    with pytest.raises(KeyError, match="no such form"):
        simulated(2000, instruction_proposer=proposer, schedule=schedule)


def test_a_reflection_lm_that_refuses_every_request_ends_the_run() -> None:
    from dspy.utils.exceptions import LMUnsupportedFeatureError

    def refuses(prompt: str) -> str:
        raise LMUnsupportedFeatureError("no such option")

    with pytest.raises(RunAbortedError, match="no such option"):
        simulated(2000, Chain(), reflection_lm=fake_lm(refuses))
