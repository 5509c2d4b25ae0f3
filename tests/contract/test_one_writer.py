"""One writer: callbacks, selectors and stoppers run one at a time, in one thread, in commit order.

DESIGN section 4, invariant 1.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from gepa.strategies.acceptance import StrictImprovementAcceptance
from gepa.strategies.batch_sampler import EpochShuffledBatchSampler
from gepa.strategies.candidate_selector import ParetoCandidateSelector
from gepa.strategies.component_selector import RoundRobinReflectionComponentSelector
from gepa.strategies.eval_policy import FullEvaluationPolicy
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.surface import POLICIES, SEARCHES, VAL, Heard, compiled
from tests.contract.worlds import World, play


class Alone:
    """Notes who is inside, and who else comes."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.overlaps: list[str] = []
        self.seen: set[str] = set()
        self._inside: list[str] = []

    @contextmanager
    def enter(self, name: str) -> Iterator[None]:
        if self._inside:  # gepa swallows what a callback raises
            self.overlaps.append(f"{name} during {self._inside}")
        self._inside.append(name)
        self.seen.add(name)
        self.threads.add(threading.get_ident())
        try:
            yield
        finally:
            self._inside.remove(name)

    def around(self, base: type, method: str, *arguments: Any) -> Any:
        """One of gepa's strategies that nobody may enter at the same time."""
        alone = self

        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            with alone.enter(method):
                return getattr(base, method)(self, *args, **kwargs)

        return type("Watched", (base,), {method: watched})(*arguments)


class Watch(Heard):
    """A callback that nobody may enter at the same time, and the sizes of the pool that it saw."""

    def __init__(self, alone: Alone) -> None:
        super().__init__(self._look_at)
        self.alone, self.sizes = alone, list[int]()

    def _look_at(self, name: str, event: Any) -> None:
        with self.alone.enter(name):
            if event.get("state") is not None:
                self.sizes.append(len(event["state"].program_candidates))

    def numbers(self, event: str, name: str) -> list[int]:
        return [one[name] for one in self.of(event)]

    def check(self, details: Any) -> None:
        """Every iteration begins and ends once; candidates come in order of their index; the pool only grows."""
        assert not self.alone.overlaps
        assert len(self.alone.threads) == 1
        starts = self.numbers("on_iteration_start", "iteration")
        assert starts == list(range(1, len(starts) + 1))
        assert sorted(self.numbers("on_iteration_end", "iteration")) == starts
        assert self.numbers("on_candidate_accepted", "new_candidate_idx") == list(range(1, len(details.candidates)))
        assert self.numbers("on_valset_evaluated", "candidate_idx") == list(range(len(details.candidates)))
        assert self.sizes == sorted(self.sizes)


def watched_by(alone: Alone, watch: Watch) -> dict[str, Any]:
    """Options by which everything of the user's that acts on the pool is watched."""

    def stopper(state: Any) -> bool:
        with alone.enter("stopper"):
            return False

    return {
        "candidate_selection_strategy": alone.around(ParetoCandidateSelector, "select_candidate_idx", random.Random(0)),
        "component_selector": alone.around(RoundRobinReflectionComponentSelector, "__call__"),
        "reflection_minibatch_size": None,
        "gepa_kwargs": {
            "callbacks": [watch],
            "stop_callbacks": [stopper],
            "batch_sampler": alone.around(EpochShuffledBatchSampler, "next_minibatch_ids", 3),
            "acceptance_criterion": alone.around(StrictImprovementAcceptance, "should_accept"),
            "val_evaluation_policy": alone.around(FullEvaluationPolicy, "get_eval_batch"),
        },
    }


@pytest.mark.long
@settings(max_examples=8)
@given(
    world=st.builds(World, seed=st.integers(0, 10**6), faults=st.sampled_from([0.0, 0.1])),
    slots=st.sampled_from([1, 8, 64]),
    search=SEARCHES,
    staleness=POLICIES,
)
def test_everything_that_acts_on_the_pool_is_called_one_at_a_time_in_one_thread_in_commit_order(
    world: World, slots: int, search: Any, staleness: Any
) -> None:
    alone = Alone()
    watch = Watch(alone)
    options = watched_by(alone, watch)
    details = play(world, 100, num_threads=slots, search=search, staleness=staleness, **options).detailed_results
    watch.check(details)
    accepted = watch.numbers("on_candidate_accepted", "new_candidate_idx")
    assert [commit.candidate for commit in details.async_stats.commits] == accepted
    seconds = [commit.seconds for commit in details.async_stats.commits]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_the_same_on_a_real_loop_with_real_threads(schedule: Any) -> None:
    alone = Alone()
    watch = Watch(alone)
    options = watched_by(alone, watch)
    details = compiled(130, 2, schedule=schedule, use_merge=False, num_threads=16, **options).detailed_results
    assert len(details.candidates) > 3
    watch.check(details)
    assert alone.seen >= {"stopper", "select_candidate_idx", "__call__", "next_minibatch_ids", "should_accept"}
    assert set(details.val_subscores[details.best_idx]) == set(range(len(VAL)))


def test_the_experiment_tracker_is_entered_in_the_callers_thread_and_hears_of_one_thing_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """mlflow's active run belongs to a thread. A stand-in for its module: mlflow itself is no dependency of ours."""
    import sys
    from unittest.mock import MagicMock

    alone = Alone()
    mlflow = MagicMock()
    mlflow.active_run.return_value = None
    entered: list[int] = []
    mlflow.start_run.side_effect = lambda *args, **kwargs: entered.append(threading.get_ident())

    def log(*args: Any, **kwargs: Any) -> None:
        with alone.enter("log"):
            pass

    for name in ("log_metric", "log_metrics", "log_param", "log_params", "log_text", "log_table", "log_artifact"):
        getattr(mlflow, name).side_effect = log
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    compiled(use_mlflow=True)
    assert entered == [threading.get_ident()]
    assert alone.seen == {"log"}
    assert not alone.overlaps
