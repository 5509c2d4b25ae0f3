"""Who answers the requests of a bench: the simulated server, or a real model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import dspy

from benchmarks.measure import Bench, NoMeter, VllmMeter
from benchmarks.methods import Workload
from benchmarks.models import DEFAULT_MODEL, reply_model_named
from benchmarks.workloads.registry import workload_named
from benchmarks.workloads.simulated import served, simulated
from dspy_flashevolve.sim import HouseRules

NO_KEY = "none"
"""litellm wants a key even where the endpoint does not."""


def endpoint(api_base: str) -> dict[str, str]:
    """Where `dspy.LM` finds a real endpoint; the key is `OPENAI_API_KEY` of the environment, if there is one."""
    return {"api_base": api_base, "api_key": os.environ.get("OPENAI_API_KEY", NO_KEY)}


@dataclass(frozen=True)
class Backend:
    """Who answers.

    Attributes:
        profile: Of the simulated server; unused with a `model`.
        api_base: Of a server with OpenAI's API; None for the one that litellm knows by the model's name.
        model: The real model: by its name on that server, or by litellm's name for it; None for a simulated one.
        simulated: The simulated model's name (`benchmarks.models.REPLY_MODELS`); unused with a `model`.
        time_scale: The simulated server's seconds in a real one.
        max_tokens: Longest reply of a real model to the task.
        reflection_tokens: Longest reply of a real model to a reflection.
        is_vllm: Whether the server has vLLM's `/metrics`.
        json_fallback: Whether a reply of a real model that does not parse is asked for again as JSON, as dspy does.
    """

    profile: str = "h100-qwen3-8b"
    api_base: str | None = None
    model: str | None = None
    time_scale: float = 1.0
    max_tokens: int = 1024
    reflection_tokens: int = 4096
    is_vllm: bool = False
    json_fallback: bool = True
    simulated: str = DEFAULT_MODEL

    @property
    def name(self) -> str:
        """For the results."""
        return self.profile if self.model is None else self.model

    @property
    def settings(self) -> str:
        """What else tells its runs apart, for the results."""
        if self.model is None:
            scale = "" if self.time_scale == 1.0 else f", time scale {self.time_scale:g}"
            return f"{self.simulated} model{scale}"
        lengths = f"replies up to {self.max_tokens} tokens, reflections {self.reflection_tokens}"
        return lengths if self.json_fallback else f"{lengths}, no second try as JSON"

    @contextmanager
    def serving(
        self, benchmark: str, name: str, train: int | None, val: int | None, seed: int
    ) -> Iterator[tuple[Bench, Workload]]:
        """The bench, and the workload with its language models.

        Raises:
            RowsMissing: The workload's rows are nowhere.
            ValueError: There is no such workload, or it has fewer rows.
        """
        chosen = workload_named(name, train=train, val=val, test=0, seed=seed)
        if self.model is None:
            task = HouseRules(seed=seed, reply_model=reply_model_named(self.simulated))
            asked = simulated(chosen, task)
            with served(benchmark, asked, self.profile, seed, self.time_scale, task.reply_model) as (bench, workload):
                yield replace(bench, settings=self.settings), workload
            return
        task_lm, reflection_lm = self.lms(self.model)
        meter = VllmMeter(self.api_base) if self.is_vllm and self.api_base else NoMeter()
        adapter = dspy.ChatAdapter(use_json_adapter_fallback=self.json_fallback)
        yield Bench(benchmark, self.model, meter, self.settings), chosen.served(task_lm, reflection_lm, adapter)

    def lms(self, model: str) -> tuple[dspy.LM, dspy.LM]:
        """The real model for the task and for reflections; the key is the environment's, as litellm reads it."""
        where: dict[str, Any] = {"cache": False}
        if self.api_base is not None:
            where |= endpoint(self.api_base)
            model = f"openai/{model}"
        task_lm = dspy.LM(model, max_tokens=self.max_tokens, **where)
        return task_lm, dspy.LM(model, max_tokens=self.reflection_tokens, temperature=1.0, **where)
