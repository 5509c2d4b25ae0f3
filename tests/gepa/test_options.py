"""What may be passed on to gepa, and gepa's own parts put together."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from gepa.core.data_loader import ListDataLoader
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.gepa.options import (
    ARGUMENTS,
    REFUSED,
    Parts,
    build_parts,
    check_options,
    restore_strategies,
    strategies_of,
)
from tests.gepa.pools import configured, pool_of

LOADER: Any = ListDataLoader(list(range(9)))


def parts_of(**options: Any) -> Parts:
    return build_parts(configured(**options), LOADER, SimpleNamespace(log=lambda message: None))


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_what_is_an_argument_is_not_passed_on_and_the_argument_is_named(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name!r}: pass it as the argument {ARGUMENTS[name]}="):
        check_options(configured(gepa_kwargs={name: 1}))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_passed_on_is_refused_with_the_reason_unless_it_is_gepas_default(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name!r}, which cannot be passed through"):
        check_options(configured(gepa_kwargs={name: 1}))
    check_options(configured(gepa_kwargs={name: None}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gepa_kwargs": {"frontier": "x"}}, "'frontier', which gepa does not know. It knows: .*frontier_type"),
        ({"candidate_selection_strategy": object()}, "or a CandidateSelector"),
        ({"component_selector": 3}, "expected one of round_robin, all, or a callable"),
        ({"gepa_kwargs": {"acceptance_criterion": "any"}}, "expected one of strict_improvement, improvement_or_equal"),
        ({"gepa_kwargs": {"val_evaluation_policy": "half"}}, "expected one of full_eval"),
        ({"gepa_kwargs": {"frontier_type": "mean"}}, "expected one of instance, objective, hybrid, cartesian"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_options(configured(**options))


@given(st.integers(1, 40), st.integers(1, 5), st.booleans())
def test_strategies_go_on_where_they_stood_also_through_json(draws: int, size: int, shared: bool) -> None:
    def minibatches(parts: Parts, first: int, count: int) -> list[Any]:
        state: Any = SimpleNamespace(i=first)
        found = []
        for state.i in range(first, first + count):
            found.append(list(parts.batch_sampler.next_minibatch_ids(LOADER, state)))
        return found

    pool = pool_of()
    adapter = SimpleNamespace()
    one, other = parts_of(reflection_minibatch_size=size), parts_of(reflection_minibatch_size=size, seed=7)
    minibatches(one, 0, draws)
    assert one.merge is not None
    one.merge.merges_due, one.merge.total_merges_tested = 2, 1
    one.merge.merges_performed[0].append((1, 2, 0))
    kept = json.loads(json.dumps(strategies_of(one, adapter, pool.state, shared, str)))
    restore_strategies(kept, other, adapter, pool.state, {str(one): one for one in range(9)})
    assert other.merge is not None
    assert (other.merge.merges_due, other.merge.total_merges_tested) == (2, 1)
    assert other.merge.merges_performed[0] == [(1, 2, 0)]
    epoch = -(-9 // size) - draws % -(-9 // size)
    rest = 20 if shared else epoch % -(-9 // size)  # a new epoch is drawn from the randomness
    assert minibatches(one, draws, rest) == minibatches(other, draws, rest)
    pool.close()
