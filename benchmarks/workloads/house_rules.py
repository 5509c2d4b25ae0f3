"""The simulated workload: house rules on a simulated server, as a bench, a workload and a meter."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import dspy

from benchmarks.batching import profile_named
from benchmarks.measure import Bench, Figures
from benchmarks.methods import Workload
from benchmarks.models import DEFAULT_MODEL, REPLY_MODELS
from dspy_flashevolve.sim import HouseRules, SimServer

MODEL = replace(REPLY_MODELS[DEFAULT_MODEL], sloppy=0.0)


@dataclass(frozen=True)
class SimMeter:
    """Reads the counters of a `SimServer`, whose seconds are the server's own."""

    server: SimServer

    def reset(self) -> None:
        """Set the counters to zero."""
        self.server.reset_stats()

    def read(self) -> Figures:
        """What was counted since; tokens pro rata for replies that are being written."""
        stats = self.server.stats()
        return Figures(
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=stats.generated_tokens,
            requests=stats.requests,
            refused=stats.refused,
            mean_running=stats.mean_running,
            reflections=stats.by_kind["reflection"].requests,
        )


@dataclass(frozen=True)
class Setting:
    """What a simulated run is made of; see `add_arguments` for the options that fill it."""

    profile: str
    time_scale: float
    train: int
    val: int
    rules: int
    has_aforward: bool = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that the simulated benchmarks share."""
    parser.add_argument("--profile", default="h100-qwen3-8b", help="the simulated backend")
    parser.add_argument("--slots", type=int, default=64, help="requests in flight at most")
    parser.add_argument("--train", type=int, default=60, help="training examples")
    parser.add_argument("--val", type=int, default=60, help="validation examples")
    parser.add_argument(
        "--sync", action="store_true", help="a program with forward alone, whose rollouts run in threads"
    )
    parser.add_argument("--rules", type=int, default=24, help="house rules to discover")
    parser.add_argument(
        "--time-scale",
        type=float,
        default=1.0,
        help="the server's seconds that pass in a real one; above 1 only for smoke runs: the client is no faster",
    )


def setting(options: argparse.Namespace) -> Setting:
    """The setting that the options ask for."""
    size = (options.train, options.val, options.rules)
    return Setting(options.profile, options.time_scale, *size, has_aforward=not options.sync)


def without_aforward(program: dspy.Module) -> dspy.Module:
    """The same program, of a class whose own method is `forward` alone: a caller must not await what it inherits."""
    kind: Any = type(program)
    program.__class__ = type(kind.__name__, (kind,), {"forward": kind.forward})
    return program


@contextmanager
def simulated(
    benchmark: str, chosen: Setting, seed: int, prompts: Sequence[str] | None = None
) -> Iterator[tuple[Bench, Workload]]:
    """A running server with its bench and workload, both of the same seed.

    Args:
        prompts: The questions of the examples; None for the task's own.
    """
    task = HouseRules(rules=chosen.rules, seed=seed, prompts=prompts, reply_model=MODEL)
    profile, scale = profile_named(chosen.profile), chosen.time_scale
    with SimServer(profile, seed=seed, time_scale=scale, reply_model=task.reply_model) as server:
        language_model = dspy.LM("openai/simulated", api_base=server.api_base, api_key="none", cache=False)
        workload = Workload(
            program=task.program if chosen.has_aforward else lambda: without_aforward(task.program()),
            trainset=task.trainset(chosen.train),
            valset=task.valset(chosen.val),
            metric=task.metric,
            task_lm=language_model,
            reflection_lm=language_model.copy(),
        )
        settings = "" if chosen.has_aforward else "program without aforward"
        yield Bench(benchmark, chosen.profile, SimMeter(server), settings), workload
