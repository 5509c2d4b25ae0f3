"""Where gepa's strategies stand, as JSON, so that a run can go on from there.

What gepa's own checkpoint does not hold: the sampler's epoch, the merges tried, and in lockstep the shared randomness.
Strategies of the user's own begin anew when a run goes on.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from gepa.core.state import GEPAState
from gepa.strategies.batch_sampler import EpochShuffledBatchSampler

from dspy_flashevolve.gepa.parts import Parts


def strategies_of(
    parts: Parts, adapter: Any, state: GEPAState[Any, Any], shared_randomness: bool, text_of: Callable[[Any], str]
) -> dict[str, Any]:
    """Where the strategies stand now. Runs in the pool's writer.

    Args:
        adapter: has a source of randomness of its own.
        state: gepa's; it holds whose turn it is among the components.
        shared_randomness: tickets draw from the run's, not from their own.
        text_of: training example's id -> its text.
    """
    kept: dict[str, Any] = {}
    sampler, merge = parts.batch_sampler, parts.merge
    if type(sampler) is EpochShuffledBatchSampler:
        kept["sampler"] = {
            "epoch": sampler.epoch,
            "shuffled_ids": [text_of(one) for one in sampler.shuffled_ids],
            "trainset_size": sampler.last_trainset_size,
            "iteration": sampler._current_iteration,  # pyright: ignore[reportPrivateUsage]
            "calls": sampler._calls_in_iteration,  # pyright: ignore[reportPrivateUsage]
        }
    if merge is not None:
        kept["merge"] = {
            "due": merge.merges_due,
            "tested": merge.total_merges_tested,
            "performed": merge.merges_performed,
            "found_new": merge.last_iter_found_new_program,
        }
    if shared_randomness:
        kept["rng"] = parts.rng.getstate()
        kept["next_components"] = state.named_predictor_id_to_update_next_for_program_candidate
        if isinstance(getattr(adapter, "rng", None), random.Random):
            kept["adapter_rng"] = adapter.rng.getstate()
    return kept


def restore_strategies(
    kept: dict[str, Any], parts: Parts, adapter: Any, state: GEPAState[Any, Any], ids: dict[str, Any]
) -> None:
    """Put the strategies where they stood.

    Args:
        kept: by :func:`strategies_of`, through JSON.
        ids: text of a training example's id -> the id.
    """
    sampler, merge = parts.batch_sampler, parts.merge
    if type(sampler) is EpochShuffledBatchSampler and (there := kept.get("sampler")):
        names: list[str] = there["shuffled_ids"]
        if all(name in ids for name in names):
            sampler.epoch = there["epoch"]
            sampler.shuffled_ids = [ids[name] for name in names]
            sampler.id_freqs = Counter(sampler.shuffled_ids)
            sampler.last_trainset_size = there["trainset_size"]
            sampler._current_iteration = there["iteration"]  # pyright: ignore[reportPrivateUsage]
            sampler._calls_in_iteration = there["calls"]  # pyright: ignore[reportPrivateUsage]
    if merge is not None and (there := kept.get("merge")):
        merge.merges_due = there["due"]
        merge.total_merges_tested = there["tested"]
        first, second = there["performed"]
        merge.merges_performed = ([_tuples(one) for one in first], [_tuples(one) for one in second])
        merge.last_iter_found_new_program = there["found_new"]
    if "rng" in kept:
        turns: list[int] = kept["next_components"]
        state.named_predictor_id_to_update_next_for_program_candidate[: len(turns)] = turns
        parts.rng.setstate(_tuples(kept["rng"]))
    if "adapter_rng" in kept:
        adapter.rng.setstate(_tuples(kept["adapter_rng"]))


def _tuples(value: Any) -> Any:
    """Lists, at any depth, as the tuples that they were before JSON."""
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType]
