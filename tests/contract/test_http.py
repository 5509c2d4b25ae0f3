"""AsyncACE over HTTP, on the simulated server."""

from __future__ import annotations

from typing import Any

import dspy
import pytest

from dspy_flashevolve import AsyncACE
from dspy_flashevolve.sim import Faults, HouseRules, SimServer


@pytest.mark.parametrize("faults", [None, Faults(server_error=0.1, malformed_body=0.05, seed=0)])
def test_a_playbook_is_learnt_from_a_server_whatever_its_faults(faults: Faults | None) -> None:
    task = HouseRules(rules=12, rules_per_example=4, seed=0)
    with SimServer(seed=0, time_scale=200, faults=faults or Faults()) as server:
        lm = dspy.LM("openai/simulated", api_base=server.api_base, api_key="none", cache=False)
        optimizer = AsyncACE(task.metric, reflector_lm=lm, curator_lm=lm, num_threads=16, max_rounds=2, eval_every=4)
        with dspy.context(lm=lm):
            program: Any = optimizer.compile(task.program(), trainset=task.trainset(12), valset=task.valset(8))
        kinds = {kind: stats.requests for kind, stats in server.stats().by_kind.items()}
    scores = [one.score for one in program.async_stats.snapshots]
    assert scores[0] > 0
    assert max(scores) > scores[0] + 0.2
    assert kinds["sample_reflection"] >= 12
    assert kinds["curation"] >= 10
    assert kinds["reflection"] == kinds["integration"] == 0
