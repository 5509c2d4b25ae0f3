"""The optimizers over HTTP, on the simulated server: real sockets, real retries, real time (sped up)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dspy
import pytest

from benchmarks.models import REPLY_MODELS
from dspy_flashevolve import AsyncACE, AsyncGEPA, Reflective
from dspy_flashevolve.sim import Faults, HouseRules, SimServer
from tests.contract.surface import check_ends, check_winner

TASK = HouseRules(rules=12, rules_per_example=4, seed=0, reply_model=REPLY_MODELS["obliging"])


@pytest.fixture(
    scope="module", params=[None, Faults(server_error=0.05, malformed_body=0.05, seed=0)], ids=["", "faults"]
)
def server(request: pytest.FixtureRequest) -> Iterator[SimServer]:
    with SimServer(seed=0, time_scale=300, reply_model=TASK.reply_model, faults=request.param or Faults()) as one:
        yield one


def lm_of(server: SimServer) -> dspy.LM:
    return dspy.LM("openai/simulated", api_base=server.api_base, api_key="none", cache=False)


@pytest.mark.parametrize("search", ["edits", "pareto"])
def test_prompts_are_evolved_and_stale_ones_repaired(server: SimServer, search: Any) -> None:
    server.reset_stats()
    lm = lm_of(server)
    optimizer = AsyncGEPA(
        TASK.metric, max_metric_calls=100, reflection_lm=lm.copy(), num_threads=16, track_stats=True,
        search=search, staleness=Reflective(min_gap=0),
    )  # fmt: skip
    with dspy.context(lm=lm, adapter=None):
        program: Any = optimizer.compile(TASK.program(), trainset=TASK.trainset(12), valset=TASK.valset(12))
    details, stats = program.detailed_results, program.async_stats
    assert stats.metric_calls <= 100
    check_ends(stats)
    check_winner(details, 12)
    assert details.val_aggregate_scores[0] > 0, "an error of the server's is no score"
    kinds = server.stats().by_kind
    assert kinds["reflection"].requests >= stats.proposals > 0
    assert kinds["integration"].requests >= stats.integration_calls > 0
    assert not stats.changes or search == "edits", "a repaired child stands for itself"


def test_a_playbook_is_learnt(server: SimServer) -> None:
    server.reset_stats()
    lm = lm_of(server)
    optimizer = AsyncACE(TASK.metric, reflector_lm=lm, curator_lm=lm, num_threads=16, max_rounds=2, eval_every=4)
    with dspy.context(lm=lm):
        program: Any = optimizer.compile(TASK.program(), trainset=TASK.trainset(12), valset=TASK.valset(8))
    kinds = {kind: stats.requests for kind, stats in server.stats().by_kind.items()}
    scores = [one.score for one in program.async_stats.snapshots]
    assert scores[0] > 0
    assert max(scores) > scores[0] + 0.2
    assert kinds["sample_reflection"] >= 12
    assert kinds["curation"] >= 10
    assert kinds["reflection"] == kinds["integration"] == 0
