"""AsyncGEPA with adaptive slots, in virtual time: real engine, real dspy, a simulated model in the process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import LMRateLimitError

from dspy_flashevolve import AsyncGEPA
from dspy_flashevolve.sim import PROFILES, HouseRules, Profile
from dspy_flashevolve.sim.virtual import SimulatedModel
from tests.contract.surface import evolved

H100 = PROFILES["h100-qwen3-8b"]
API = replace(PROFILES["api-gpt-4o-mini"], concurrency_limit=24)


ADAPTIVE = {"num_threads": None, "max_concurrency": 128}
"""From four slots, dspy's setting, up to 128."""
FIXED = {"num_threads": 128}


def compiled(slots: dict[str, Any], profile: Profile, names: tuple[str, str] = ("a/x", "a/y"), **options: Any) -> Any:
    task = HouseRules(rules=12, rules_per_example=4)
    model = SimulatedModel(profile, reply_model=task.reply_model)
    lms = [model.lm(name) for name in names]
    options = {"max_metric_calls": 300, "seed": 0, "reflection_lm": lms[1], "track_stats": True} | slots | options
    settings = {"lm": lms[0], "num_threads": 4}
    program = evolved(AsyncGEPA(task.metric, **options), task.program(), task.trainset(30), task.valset(60), settings)
    program.model, program.lms = model, lms
    return program


@cache
def turned_away(adaptive: bool) -> Any:
    """A run on an API that refuses what is above its limit."""
    return compiled(ADAPTIVE if adaptive else FIXED, API, max_metric_calls=450)


@pytest.mark.parametrize(("lms", "endpoints"), [(("a/x", "a/y"), {"a"}), (("a/x", "b/y"), {"a", "b"})])
def test_the_limit_starts_low_grows_and_is_that_of_an_endpoint(lms: tuple[str, str], endpoints: set[str]) -> None:
    stats = compiled(ADAPTIVE, H100, lms).async_stats
    assert {change.name for change in stats.limit_changes} == endpoints
    assert stats.limit_changes[0].before == 4
    most = max(change.after for change in stats.limit_changes)
    assert 32 < stats.peak_slots <= most <= 128
    assert 0 < stats.occupancy <= 1


@pytest.mark.parametrize("adaptive", [False, True])
def test_what_a_provider_refuses_is_asked_again_and_costs_no_score(adaptive: bool) -> None:
    program = turned_away(adaptive)
    stats, model = program.async_stats, program.model
    assert stats.ended["failed"] == 0
    refused = len(model.refused)  # a rollout that is given up while it waits is not asked for again
    assert refused - 5 <= stats.retried_requests <= refused
    assert model.refused
    assert [lm.num_retries for lm in program.lms] == [0, 0]
    assert len(program.lms[0].history) + len(program.lms[1].history) == sum(model.requests.values())


def test_adaptive_slots_are_refused_far_less_than_fixed_ones_above_the_endpoints_limit() -> None:
    fixed, adaptive = (turned_away(one).model for one in (False, True))
    refused = [sum(at >= 10 for at in model.refused) / sum(model.requests.values()) for model in (fixed, adaptive)]
    assert 4 * refused[1] < refused[0]


def test_a_predictors_own_lm_is_paced_and_handed_back_as_it_was() -> None:
    left = 20
    model, task = SimulatedModel(), HouseRules(rules=12, rules_per_example=4)
    answer = model.answer

    async def answer_or_refuse(request: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            raise LMRateLimitError("429", retry_after=1.0)
        return await answer(request)

    model.answer = answer_or_refuse  # type: ignore[method-assign]
    student: Any = task.program()
    student.set_lm(model.lm("own/x"))
    optimizer = AsyncGEPA(
        task.metric, max_metric_calls=60, num_threads=8, reflection_lm=SimulatedModel().lm(), track_stats=True
    )
    program = evolved(optimizer, student, task.trainset(9), task.valset(9))
    assert program.async_stats.retried_requests == 20
    assert program.async_stats.ended["failed"] == 0
    for predictor in [*program.predictors(), *student.predictors()]:
        assert type(predictor.lm) is dspy.LM
