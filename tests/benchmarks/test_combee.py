"""Combee: how records are dealt, what is called how often, and that dspy.GEPA takes it."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import dspy
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.combee import CombeeReflection
from tests.fakes import Chain, digits, examples, fake_lm, hashed, reply_for, task_lm


def records(count: int) -> list[dict[str, Any]]:
    return [{"Inputs": f"record <{number}>", "Feedback": f"feedback <{number}>"} for number in range(count)]


@given(st.integers(1, 40), st.integers(1, 3), st.none() | st.integers(1, 50))
def test_each_record_is_dealt_as_often_as_asked_over_groups_of_about_equal_size(
    count: int, copies: int, groups: int | None
) -> None:
    dealt_out = CombeeReflection(copies=copies, groups=groups)._deal(records(count))  # type: ignore[arg-type]
    groups = groups or math.isqrt(count)
    times = copies if groups > 1 else 1
    assert Counter(str(record) for group in dealt_out for record in group) == {str(r): times for r in records(count)}
    assert len(dealt_out) == min(count * times, groups)
    sizes = {len(group) for group in dealt_out}
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


def test_dspy_gepa_takes_it_as_its_instruction_proposer() -> None:
    asked = Counter[str]()

    def answer(prompt: str) -> str:
        asked["reduce" if "proposed_instructions" in prompt else "map"] += 1
        return reply_for(prompt, new_instruction=f"Instruction {hashed(prompt) % 10**6}")

    settings: dict[str, Any] = {"max_metric_calls": 40, "reflection_minibatch_size": 4, "num_threads": 1}
    proposer = CombeeReflection()
    optimizer = dspy.GEPA(digits, instruction_proposer=proposer, reflection_lm=fake_lm(answer), **settings)
    with dspy.context(lm=task_lm()):
        best = optimizer.compile(Chain(), trainset=examples("train", 6), valset=examples("val", 4))
    assert isinstance(best, Chain)
    assert asked["map"] == 2 * asked["reduce"] > 0
    assert json.dumps(best.dump_state())
