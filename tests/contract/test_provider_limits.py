"""AsyncGEPA on a provider with limits a minute, and on several servers of one model: over HTTP, in real time."""

from __future__ import annotations

import json
from typing import Any

import dspy
import pytest

from benchmarks.quota import Quota
from dspy_flashevolve import AsyncGEPA
from dspy_flashevolve.sim import HouseRules, SimServer
from tests.broken_server import BrokenServer
from tests.contract.surface import check_ends, check_winner

TASK = HouseRules(rules=12, rules_per_example=4, seed=0)
QUOTA = {"requests": 3000, "tokens": 10**8, "holds_seconds": 2.0}
"""50 requests a second: more than a run makes within seconds, fewer than it could make."""


def compiled(lm: dspy.LM, calls: int = 200, **options: Any) -> Any:
    optimizer = AsyncGEPA(
        TASK.metric, max_metric_calls=calls, reflection_lm=lm, track_stats=True, **({"num_threads": 64} | options)
    )
    with dspy.context(lm=lm, adapter=None):
        return optimizer.compile(TASK.program(), trainset=TASK.trainset(12), valset=TASK.valset(24))


def server(quota: Quota | None = None) -> SimServer:
    return SimServer(seed=0, time_scale=300, reply_model=TASK.reply_model, quota=quota)


@pytest.mark.long
@pytest.mark.parametrize("known", ["headers", "arguments"])
def test_under_one_in_two_hundred_requests_is_refused_where_the_limits_are_known(known: str) -> None:
    said = {} if known == "headers" else {"rpm": 3000, "tpm": 10**8}
    with server(Quota(**QUOTA, sends_headers=known == "headers")) as one:
        lm = dspy.LM("openai/sim", api_base=one.api_base, api_key="sk-a-key", cache=False, engine="litellm", **said)
        program = compiled(lm)
        counted = one.stats()
    assert counted.requests > 150, "half as many again as the provider's bucket holds"
    assert counted.refused <= 0.005 * counted.requests
    check_ends(program.async_stats)
    check_winner(program.detailed_results, 24)


@pytest.mark.parametrize("engine", ["auto", "litellm"])
def test_limits_as_arguments_are_not_sent_to_the_provider(engine: str) -> None:
    seen: list[dict[str, Any]] = []

    def look(body: str) -> str:
        seen.append(json.loads(body))
        return "good"

    with BrokenServer(look) as one:
        lm = one.lm("chosen", engine, rpm=600, tpm=200_000)
        assert lm("?")
        optimizer = AsyncGEPA(lambda *_: 0.5, max_metric_calls=4, reflection_lm=lm)
        with dspy.context(lm=lm):
            rows = [dspy.Example(question=str(n), answer="5").with_inputs("question") for n in range(2)]
            optimizer.compile(dspy.Predict("question -> answer"), trainset=rows, valset=rows)
    assert len(seen) > 2
    assert all(not {"rpm", "tpm"} & set(body) for body in seen)
