"""The budget is never exceeded, and every step ends once: DESIGN section 4, invariants 2 and 3."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import dspy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.models import reply_model_named
from dspy_flashevolve import AsyncGEPA, ConfigurationError, RunAbortedError, Workflow
from dspy_flashevolve.sim import HouseRules
from dspy_flashevolve.sim.virtual import SimulatedModel
from tests.contract.surface import (
    POLICIES,
    SEARCHES,
    TRAIN,
    VAL,
    Scored,
    check_ends,
    check_winner,
    compiled,
    evolved,
    facts,
    on,
    optimizer,
    problems,
    simulated,
    steps_of,
)
from tests.contract.worlds import Rules, World, play
from tests.fakes import Chain, digits, examples, reflection_lm, task_lm

WORLDS = st.builds(
    World,
    seed=st.integers(0, 10**6),
    train=st.integers(1, 9),
    val=st.integers(5, 12),  # of fewer all may fail by an error of the program's own: that ends a run
    faults=st.sampled_from([0.0, 0.05, 0.3]),
    spread=st.sampled_from([0.0, 9.0, 200.0]),
    predictors=st.integers(1, 3),
) | st.builds(Rules, seed=st.integers(0, 3), train=st.just(5), val=st.just(6), harmful=st.floats(0, 1))
"""Children are whole texts, or edits that join."""


@settings(max_examples=12)
@given(
    world=WORLDS,
    beyond_the_seed=st.integers(0, 100),
    slots=st.sampled_from([1, 3, 16, 64]),
    minibatch=st.integers(1, 5),
    search=SEARCHES,
    staleness=POLICIES,
    workflow=st.sampled_from([Workflow(), Workflow(validate=0.3)]),
    options=st.fixed_dictionaries(
        {"use_merge": st.booleans()},
        optional={"gepa_kwargs": st.just({"cache_evaluation": True}), "timeout": st.just(9.5)},
    ),
)
def test_whatever_the_program_the_faults_and_the_schedule_the_budget_holds_and_every_step_ends_once(
    world: World,
    beyond_the_seed: int,
    slots: int,
    minibatch: int,
    search: Any,
    staleness: Any,
    workflow: Workflow,
    options: Any,
) -> None:
    calls = world.val + beyond_the_seed
    a_step = 2 * min(minibatch, world.train) + world.val
    most = calls if calls >= world.val + 2 * a_step else calls + max(2 * minibatch, 5) + world.val  # 5: gepa's merges
    timeout = options.pop("timeout", None)
    options = options | {"workflow": replace(workflow, rollout_timeout_seconds=timeout)}
    try:
        program = play(
            world,
            calls,
            num_threads=slots,
            reflection_minibatch_size=minibatch,
            search=search,
            staleness=staleness,
            failure_score=0.05,
            **options,
        )
    except RunAbortedError as error:  # the seed could not be validated: an example got no answer, again and again
        assert world.faults or world.spread > 9
        assert len(world.scored) <= most
        assert "could not be validated" in str(error)  # noqa: PT017
        return
    details, stats = program.detailed_results, program.async_stats
    assert len(world.scored) <= stats.metric_calls == details.total_metric_calls <= most
    if not world.faults and timeout is None:
        assert len(world.scored) == stats.metric_calls
        assert stats.ended.get("failed", 0) == 0
    check_ends(stats)
    assert stats.ended.get("cancelled", 0) == 0
    check_winner(details, world.val)
    assert len(stats.commits) == len(details.candidates) - 1
    assert all(set(scores) == set(range(world.val)) for scores in details.val_subscores)
    assert world.most_running <= slots
    assert stats.peak_slots <= slots


@settings(max_examples=4)
@given(st.integers(9, 80), st.integers(1, 3), st.integers(0, 3))
def test_the_metric_itself_counts_no_more_calls_than_the_budget_on_real_threads_and_loops(
    calls: int, predictors: int, seed: int
) -> None:
    metric = Scored()
    with dspy.context(lm=task_lm(seed)):
        details = compiled(calls, predictors, seed=seed, metric=metric).detailed_results
    assert len(metric.questions) == details.total_metric_calls <= (calls if calls >= 39 else calls + 15)


@pytest.mark.parametrize("budget", [{"auto": "light"}, {"max_full_evals": 4}])
def test_every_way_to_give_a_budget_means_what_it_means_in_gepa(budget: dict[str, Any]) -> None:
    def proposer(candidate: Any, reflective_dataset: Any, components_to_update: list[str]) -> dict[str, str]:
        return {}

    given = {"instruction_proposer": proposer, "num_threads": 4, "max_reflection_calls": 3, **budget}
    ours = AsyncGEPA(digits, **given)
    ours.compile(Chain(2), trainset=TRAIN, valset=VAL)
    theirs: Any = dspy.GEPA(digits, instruction_proposer=proposer, **budget)
    if "auto" in budget:
        assert ours.max_metric_calls == theirs.auto_budget(num_preds=2, num_candidates=6, valset_size=len(VAL))
    else:
        assert ours.max_metric_calls == 4 * (len(TRAIN) + len(VAL))


SMALL = [
    {"max_metric_calls": 5},
    {"max_full_evals": 1},
    {"max_full_evals": 2},
    {"max_metric_calls": 9},
    {"max_metric_calls": 17},
    {"max_metric_calls": 38},
]
"""Budgets of public tutorials, for seven training and nine validation examples: two steps beside the seed cost 39."""


@pytest.mark.parametrize("predictors", [1, 2])
@pytest.mark.parametrize("budget", SMALL, ids=str)
def test_a_budget_that_pays_no_two_steps_is_spent_as_dspy_gepa_spends_it(
    budget: dict[str, Any], predictors: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Candidate for candidate, its overshoot included; the log says so."""

    def found(kind: Any) -> tuple[Any, ...]:
        settings: dict[str, Any] = {"num_threads": 4, "track_stats": True, **budget}
        with dspy.context(lm=task_lm()):
            program = kind(digits, reflection_lm=reflection_lm(), **settings).compile(
                Chain(predictors), trainset=TRAIN, valset=VAL
            )
        return facts(program.detailed_results)

    with caplog.at_level(logging.INFO, logger="dspy.teleprompt.gepa.gepa"):
        theirs = found(dspy.GEPA)
        assert "too small for steps that overlap" not in caplog.text
        assert found(AsyncGEPA) == theirs
    assert "too small for steps that overlap: it is spent as dspy.GEPA does" in caplog.text
    assert "From 39 metric calls on" in caplog.text


def test_from_two_steps_on_steps_overlap_and_the_budget_is_never_exceeded(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dspy.teleprompt.gepa.gepa"):
        stats = compiled(39).async_stats
    assert stats.schedule == "async"
    assert stats.metric_calls <= 39
    assert "too small" not in caplog.text


def test_a_run_of_a_small_budget_goes_on_with_a_larger_one(tmp_path: Path) -> None:
    small = compiled(20, log_dir=str(tmp_path)).async_stats
    large = compiled(100, log_dir=str(tmp_path)).async_stats
    assert (small.schedule, large.schedule) == ("lockstep", "async")
    assert 20 <= small.metric_calls < large.metric_calls <= 100
    assert problems(tmp_path) == []


def test_equal_runs_in_virtual_time_are_equal() -> None:
    one, other = (simulated(110, 2).detailed_results for _ in range(2))
    assert one.to_dict() == other.to_dict()


@pytest.mark.parametrize("predictors", [1, 3])
@pytest.mark.parametrize("minibatch", [3, 20])
@pytest.mark.parametrize("calls", [75, 120, 250])
def test_a_run_goes_on_until_its_budget_pays_no_further_step(calls: int, minibatch: int, predictors: int) -> None:
    """One step of one reflection may cost two minibatches and a validation (and its base's minibatch)."""
    world = World(predictors=predictors)
    stats = play(world, calls, reflection_minibatch_size=minibatch, skip_perfect_score=False).async_stats
    step = 3 * minibatch + world.val
    assert calls - step <= stats.metric_calls <= calls
    assert steps_of(stats) >= (calls - world.val) // step


def unspent(calls: int, model: str, predictors: Literal[1, 2] = 1, seed: int = 0) -> int:
    """Metric calls that a run leaves, with ten training and ten validation examples and minibatches of three."""
    task = HouseRules(rules=12, seed=seed, reply_model=reply_model_named(model))
    lm = SimulatedModel("h100-qwen3-8b", seed=seed, reply_model=task.reply_model).lm()
    one = optimizer(calls, metric=task.metric, reflection_lm=lm, num_threads=8, seed=seed)

    made = evolved(one, task.program(predictors), task.trainset(10), task.valset(10), {"lm": lm})
    return calls - made.async_stats.metric_calls


STEP, VALIDATION = 2 * 3, 10


@pytest.mark.parametrize(
    ("calls", "model", "predictors", "seed", "most"),
    [
        *((60, model, 1, 0, STEP) for model in ("obliging", "plain", "strong")),
        (60, "rewriting", 1, 0, STEP + VALIDATION),  # a whole text that is better is validated for itself
        *((110, *run, VALIDATION) for run in (("obliging", 1, 1), ("plain", 2, 0), ("plain", 1, 2))),
    ],
)
def test_no_validation_leaves_calls_that_pay_neither_a_step_nor_another_validation(
    calls: int, model: str, predictors: Literal[1, 2], seed: int, most: int
) -> None:
    """With 110 calls two more validations do not fit: what was kept for the second one pays steps."""
    assert unspent(calls, model, predictors, seed) < most


class NothingNew(World):
    """Its reflections change nothing, so that steps end before the late part of their minibatch does."""

    async def acall(self, candidate: Any, reflective_dataset: Any, components_to_update: Any) -> dict[str, str]:
        await self.busy(self.reflection_seconds)
        return {name: candidate[name] for name in components_to_update}


@pytest.mark.parametrize("seed", range(2))
def test_every_metric_call_is_told_even_one_that_ends_after_the_last_step(seed: int) -> None:
    world = NothingNew(seed=seed, spread=60.0, reflection_seconds=0.1)
    program = play(world, calls=60 + seed)
    assert program.async_stats.metric_calls == program.detailed_results.total_metric_calls == len(world.scored)


@pytest.mark.parametrize("calls", [64, 80, 100])
def test_a_minibatch_that_is_larger_than_the_training_set_costs_each_example_once(calls: int) -> None:
    """gepa fills it with examples that are in it already; dspy.GEPA runs these again."""
    large, whole = (
        evolved(
            optimizer(calls, reflection_minibatch_size=size), Chain(), examples("t", 9), examples("v", 9)
        ).async_stats
        for size in (20, 9)
    )
    assert large.metric_calls <= calls
    assert sum(large.ended.values()) >= sum(whole.ended.values()) > 0
    assert large.metric_calls > calls - 27, "nine of a parent, nine of its child, nine to validate it"


class RuleThenRewrites(Rules):
    """Its first child adds a rule; every other child is the whole text in other words, and no better."""

    async def acall(self, candidate: Any, reflective_dataset: Any, components_to_update: list[str]) -> dict[str, str]:
        if not self.reflections:
            return await super().acall(candidate, reflective_dataset, components_to_update)
        self.reflections += 1
        await self.busy(self.reflection_seconds)
        return dict.fromkeys(components_to_update, f"0.000 rewrite {self.reflections}. Nothing is as it was.")


def test_what_was_set_aside_for_a_head_pays_steps_again_where_children_are_rewrites() -> None:
    world = RuleThenRewrites(val=50, helps=-0.2)
    calls = 200
    stats = play(world, calls).async_stats
    a_step = 2 * 3 + world.val
    assert calls - stats.metric_calls < a_step, stats.stop_reason


@pytest.mark.parametrize("minibatch", [2, 8])
def test_a_screen_that_cannot_pass_is_given_up_after_its_first_example(minibatch: int) -> None:
    """The seed has .8 on both examples, every child 0: after one of them a child has half of the sum at most."""
    world = World(train=2, val=5, score=lambda text, question: 0.8 if "seed" in text else 0.0)
    rejected: list[str] = []
    reasons = on("on_candidate_rejected", lambda event: rejected.append(event["reason"]))
    play(world, 60, num_threads=1, reflection_minibatch_size=minibatch, search="pareto", gepa_kwargs=reasons)
    children = {text for text, _ in world.scored if "child" in text}
    assert children
    assert len([text for text, _ in world.scored if text in children]) == len(children), rejected[0]


@pytest.mark.parametrize(
    ("world", "most_seconds"),
    [(NothingNew(), 220), (World(score=lambda text, question: 1.0 if question.startswith("t") else 0.5), 150)],
    ids=["reflections change nothing", "minibatches are perfect"],
)
def test_steps_without_a_child_do_not_keep_a_run_at_one_step(world: World, most_seconds: int) -> None:
    """64 slots, 200 calls: 157 and 102 virtual seconds; 318 and 200 in the 3 slots of one step's minibatch."""
    assert play(world, 200, num_threads=64, search="edits").async_stats.seconds < most_seconds


# `Workflow`


def test_worker_pools_bound_what_the_stages_of_a_run_have_in_flight() -> None:
    stages = "rollout", "propose", "integrate", "screen", "prefix", "validate"
    pools = Workflow(workers=dict.fromkeys(stages, 1))
    narrow, wide = (
        play(World(), 200, num_threads=16, workflow=workflow).detailed_results for workflow in (pools, Workflow())
    )
    for details in (narrow, wide):
        check_ends(details.async_stats)
        check_winner(details, 12)
    assert narrow.async_stats.peak_slots <= len(stages) < wide.async_stats.peak_slots


@pytest.mark.parametrize("arguments", [{"validate": 0.0}, {"validate": 1.5}, {"validate": -1.0}, {"rounds": 0}])
def test_a_share_that_is_none_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(arguments))):
        play(World(), 60, workflow=Workflow(**arguments))
