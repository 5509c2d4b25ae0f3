"""DESIGN section 4, invariant 5: lockstep is dspy.GEPA again."""

from __future__ import annotations

from typing import Any

import dspy
import pytest
from dspy.clients import Cache
from gepa.strategies.acceptance import ImprovementOrEqualAcceptance
from gepa.strategies.proposal_sampling import IndependentSampling, PxNSampling
from gepa.strategies.proposal_selection import BestImprovement, TopKImprovements

from dspy_flashevolve import AsyncGEPA
from tests.contract.surface import Heard
from tests.fakes import Chain, digits, examples, fake_lm, hashed, reflection_lm, reply_for, task_lm

NEVER_SAME = ("log_dir",)


def log_to(events: list[tuple[Any, ...]]) -> Heard:
    """A callback that keeps the names, iterations and payloads of everything that gepa tells."""

    def record(name: str, event: dict[str, Any]) -> None:
        scores = event.get("scores"), event.get("new_score"), event.get("metric_calls_used")
        texts = event.get("candidate"), event.get("new_instructions"), event.get("new_candidate_idx")
        events.append((name, event.get("iteration"), *scores, *texts, event.get("parent_ids")))

    return Heard(record)


def result_of(
    kind: Any, seed: int, predictors: int = 1, calls: int = 110, lm: Any = None, **options: Any
) -> tuple[Any, Any]:
    """Compile with ``kind``; the detailed results as data, and what its callbacks heard."""
    events: list[tuple[Any, ...]] = []
    settings: dict[str, Any] = {"max_metric_calls": calls, "num_threads": 4, "track_stats": True, "seed": seed}
    settings |= options | {"gepa_kwargs": {"callbacks": [log_to(events)], **options.get("gepa_kwargs", {})}}
    optimizer = kind(digits, reflection_lm=reflection_lm(seed), **settings)
    with dspy.context(lm=lm or task_lm(seed)):
        program = optimizer.compile(Chain(predictors), trainset=examples("t", 7), valset=examples("v", 9))
    result = program.detailed_results.to_dict()
    return {name: value for name, value in result.items() if name not in NEVER_SAME}, events


def assert_same(seed: int, predictors: int = 1, **options: Any) -> tuple[dict[str, Any], set[str]]:
    """Results and callbacks are gepa's; returns the results, and the names of the callbacks that were called."""
    expected, heard = result_of(dspy.GEPA, seed, predictors, **options)
    found, heard_too = result_of(AsyncGEPA, seed, predictors, schedule="lockstep", **options)
    assert found == expected
    assert heard_too == heard
    return expected, {name for name, *_ in heard}


@pytest.mark.parametrize(
    ("seed", "predictors"),
    [(0, 1), (1, 2), *(pytest.param(*case, marks=pytest.mark.long) for case in ((2, 1), (3, 2), (4, 2)))],
)
def test_lockstep_gives_the_candidates_parents_scores_calls_and_callbacks_of_gepa(seed: int, predictors: int) -> None:
    """Candidate for candidate: texts, parents, every validation score, metric calls at discovery, all calls."""
    expected, heard = assert_same(seed, predictors, use_merge=True)
    assert len(expected["candidates"]) > 2, "the comparison must see accepted candidates"
    assert expected.keys() >= {"candidates", "parents", "val_subscores", "discovery_eval_counts", "total_metric_calls"}
    assert heard >= {"on_candidate_accepted", "on_candidate_rejected"}


@pytest.mark.parametrize(("merge", "cached"), [(True, True), (False, False)])
def test_lockstep_equals_gepa_with_a_cache_and_without_merges(merge: bool, cached: bool) -> None:
    assert_same(1, 3, use_merge=merge, gepa_kwargs={"cache_evaluation": cached})


def test_lockstep_equals_gepa_where_a_merge_was_accepted() -> None:
    expected, heard = assert_same(7, 3, calls=400, use_merge=True)
    assert any(len(parents) == 2 for parents in expected["parents"]), "this seed is here because it merges"
    assert "on_merge_attempted" in heard


@pytest.mark.parametrize(
    "options",
    [
        {"gepa_kwargs": {"sampling_strategy": IndependentSampling(3)}, "reflection_minibatch_size": 4},
        {"gepa_kwargs": {"sampling_strategy": PxNSampling(2, 2), "selection_strategy": BestImprovement()}},
        {"gepa_kwargs": {"sampling_strategy": IndependentSampling(4), "selection_strategy": TopKImprovements(2)}},
        {"gepa_kwargs": {"acceptance_criterion": "improvement_or_equal"},
         "candidate_selection_strategy": "current_best"},
        {"gepa_kwargs": {"acceptance_criterion": ImprovementOrEqualAcceptance()},
         "candidate_selection_strategy": "epsilon_greedy"},
        {"component_selector": "all", "skip_perfect_score": False, "perfect_score": 0.5},
        {"max_full_evals": 8, "max_metric_calls": None},
    ],
)  # fmt: skip
def test_lockstep_equals_gepa_with_each_strategy_that_a_user_can_pass(options: dict[str, Any]) -> None:
    assert_same(1, 2, calls=80, **options)


def test_lockstep_equals_gepa_on_data_whose_replies_fail_to_parse() -> None:
    def answer(prompt: str) -> str:
        number = hashed(prompt) % 10
        return "no format at all" if number < 3 else reply_for(prompt, answer=str(number % 7))

    expected, _ = assert_same(0, calls=80, num_threads=1, add_format_failure_as_feedback=True, lm=fake_lm(answer))
    assert 0.0 in expected["val_subscores"][0].values(), "some replies must have failed"


@pytest.mark.parametrize("kind", [dspy.GEPA, AsyncGEPA])
def test_a_second_run_with_cached_lms_asks_nothing_new(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(enable_disk_cache=False, enable_memory_cache=True, disk_cache_dir="")
    monkeypatch.setattr(dspy, "cache", cache)
    lms = [task_lm(), reflection_lm()]
    for lm in lms:
        lm.cache = True
    found: list[Any] = []
    asked: list[int] = []
    for _ in range(2):
        more = {"schedule": "lockstep"} if kind is AsyncGEPA else {}
        optimizer = kind(digits, max_metric_calls=60, num_threads=4, track_stats=True, reflection_lm=lms[1], **more)
        with dspy.context(lm=lms[0]):
            program = optimizer.compile(Chain(), trainset=examples("t", 7), valset=examples("v", 9))
        found.append(program.detailed_results.val_subscores)
        asked.append(sum(lm.engine.calls for lm in lms))
    assert found[0] == found[1]
    assert asked[0] == asked[1] > len(found[0][0]), "answers came from the cache"
