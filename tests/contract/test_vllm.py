"""AsyncGEPA on a real vLLM, in small: `python -m benchmarks.run WORKLOAD --task-base ADDRESS` is the same at length.

Runs where a server answers at FLASHEVOLVE_VLLM_BASE, e.g. http://127.0.0.1:8111/v1 (`make test-slow`).
"""

from __future__ import annotations

import json
import os
import re
import urllib.request
from typing import Any

import dspy
import pytest

from dspy_flashevolve import AsyncGEPA

BASE = os.environ.get("FLASHEVOLVE_VLLM_BASE", "").rstrip("/")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not BASE, reason="FLASHEVOLVE_VLLM_BASE names no server, e.g. http://127.0.0.1:8111/v1"),
]
WORDS = ("river", "stone", "cloud", "maple", "lantern", "harbor")


def read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as reply:
        return reply.read().decode()


def generated_tokens() -> float:
    """What the server says it has written."""
    metrics = read(BASE.removesuffix("/v1") + "/metrics")
    return sum(
        float(number) for number in re.findall(r"^vllm:generation_tokens_total(?:\{.*\})? (\S+)$", metrics, re.M)
    )


def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> dspy.Prediction:
    answer = (pred.answer or "").lower()
    met = [gold.word in answer, answer.strip().endswith(".")]
    wanted = [f'the word "{gold.word}"', "a full stop at the end"]
    missed = [name for name, ok in zip(wanted, met, strict=True) if not ok]
    return dspy.Prediction(score=sum(met) / 2, feedback=f"Missed: {', '.join(missed) or 'nothing'}.")


def test_a_run_on_a_real_vllm_stays_in_its_budget_and_validates_its_winner() -> None:
    model = json.loads(read(f"{BASE}/models"))["data"][0]["id"]
    served: dict[str, Any] = {"api_base": BASE, "api_key": "none", "cache": False}
    data = [dspy.Example(topic=f"a {word}", word=word).with_inputs("topic") for word in WORDS]
    before = generated_tokens()
    reflecting = dspy.LM(f"openai/{model}", max_tokens=200, temperature=1.0, **served)
    settings: dict[str, Any] = {"max_metric_calls": 30, "reflection_minibatch_size": 2, "num_threads": 8}
    optimizer = AsyncGEPA(metric, reflection_lm=reflecting, track_stats=True, **settings)
    task, adapter = dspy.LM(f"openai/{model}", max_tokens=60, temperature=0.0, **served), dspy.ChatAdapter
    with dspy.context(lm=task, adapter=adapter(use_json_adapter_fallback=False)):
        program: Any = optimizer.compile(dspy.Predict("topic -> answer"), trainset=data[:3], valset=data[3:])
    stats, details = program.async_stats, program.detailed_results
    assert 3 < stats.metric_calls <= 30
    assert stats.proposals > 0
    assert set(details.val_subscores[details.best_idx]) == {0, 1, 2}
    assert generated_tokens() - before > 0
