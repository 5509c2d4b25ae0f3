"""What the notebooks need beside AsyncGEPA: IFBench as a task, and a language model that answers without a network.

A notebook gives `api_base=None` for the embedded backend: the simulated server in a process of its own, or a simulated
model in virtual time, where minutes take seconds. The simulated model knows no answers, so that the task then asks for
house rules on top of IFBench's prompts and program (`benchmarks.workloads.simulated`).
"""

from __future__ import annotations

import atexit
import contextvars
import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import dspy

from benchmarks.backends import NO_KEY, endpoint
from benchmarks.workloads.definition import NamedWorkload
from benchmarks.workloads.registry import definition_named, workload_named
from benchmarks.workloads.rows import RowsMissing
from benchmarks.workloads.simulated import simulated
from dspy_flashevolve.sim import REPLY_MODELS, HouseRules, SimServer
from dspy_flashevolve.sim.virtual import SimulatedModel, run

MODEL = REPLY_MODELS["obliging"]
"""The embedded backend's: with it, what the notebooks show is there to be seen within their minutes."""
T = TypeVar("T")


def ifbench(api_base: str | None, *, train: int, val: int) -> NamedWorkload:
    """IFBench, with what there is to learn; prints a line that says which.

    Without IFBench's rows it is `HouseRules` on questions of our own, with a program of two stages as well.

    Args:
        api_base: Of a real endpoint, which gets IFBench's own metric; None for a simulated model.
        train: Training examples, from IFEval as in the benchmarks.
        val: Validation examples.
    """
    rows = f"{train} training and {val} validation prompts"
    house = HouseRules(reply_model=MODEL)
    try:
        real = workload_named("ifbench", train=train, val=val, test=0)
    except RowsMissing:
        print(f"IFBench's rows are not at hand: {rows} of our own, with {house.rules} house rules")
        return _house_rules(house, train, val)
    if api_base is not None:
        print(f"IFBench: {rows}, scored by the share of their constraints that are met")
        return real
    print(f"IFBench: {rows}, scored by the share of {house.rules} house rules that are kept (the model is simulated)")
    return simulated(real, house)


def _house_rules(house: HouseRules, train: int, val: int) -> NamedWorkload:
    return NamedWorkload(
        name="house rules",
        program=functools.partial(house.program, 2),
        metric=house.metric,
        trainset=house.trainset(train),
        valset=house.valset(val),
        testset=[],
        outputs={"draft": "draft", "answer": "answer"},
        reply_length=definition_named("ifbench").reply_length,
    )


def served(
    api_base: str | None,
    task: NamedWorkload,
    *,
    profile: str = "h100-qwen3-8b",
    time_scale: float = 1.0,
    **changes: int,
) -> dict[str, str]:
    """Where `dspy.LM` finds the endpoint, as its arguments `api_base` and `api_key`.

    Args:
        api_base: Of a real endpoint, whose key is `OPENAI_API_KEY` of the environment, if there is one; None for a
            simulated server, which runs until this process ends.
        task: Decides how long the simulated replies are.
        profile: The simulated backend.
        time_scale: Its seconds that pass in a real one.
        changes: Fields of the profile that differ, such as `concurrency_limit=24`.
    """
    if api_base is not None:
        return endpoint(api_base)
    server = SimServer(replace(task.profile(profile), **changes), time_scale=time_scale, reply_model=MODEL)
    atexit.register(server.__enter__().__exit__, None, None, None)
    return {"api_base": server.api_base, "api_key": NO_KEY}


def virtual_lm(task: NamedWorkload) -> dspy.LM:
    """A fresh simulated Qwen3-8B on an H100, in this process, for `in_virtual_time` only."""
    return SimulatedModel(task.profile("h100-qwen3-8b"), reply_model=MODEL).lm()


def in_virtual_time(main: Callable[[], Awaitable[T]]) -> T:
    """Run an async function on a clock that jumps from event to event, and give back what it returns.

    It has a thread of its own, since a notebook's main thread runs a loop already, and dspy's settings of the caller.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(contextvars.copy_context().run, run, main).result()
