"""Settings of dspy must not leak from one test into the next."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
import signal
import threading
import zlib
from collections.abc import Iterator
from types import FunctionType
from typing import Any

os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # read when litellm is imported; no test needs the network

import dspy
import dspy.adapters.utils
import hypothesis
import pytest

from tests.fakes import task_lm

hypothesis.settings.register_profile("untimed", deadline=None)  # no test is a measurement of time
hypothesis.settings.load_profile("untimed")

# dspy finds out anew at every call of an LM what a type or the signature of one of its functions is: a seventh of what
# the tests cost. The answers are the same.
type_adapter, argspec = dspy.adapters.utils.TypeAdapter, inspect.getfullargspec
type_adapter_of = functools.lru_cache(type_adapter)
argspec_of = functools.lru_cache(argspec)


def type_adapter_once(kind: Any) -> Any:
    return type_adapter_of(kind) if kind in (str, int, float, bool, list, dict) else type_adapter(kind)


def argspec_once(function: Any) -> Any:
    ours = isinstance(function, FunctionType) and function.__module__.startswith("dspy")
    return argspec_of(function) if ours else argspec(function)


dspy.adapters.utils.TypeAdapter = type_adapter_once  # type: ignore[assignment, misc]
inspect.getfullargspec = argspec_once


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: some tests wait for servers, processes and signals."""
    return (os.cpu_count() or 1) + 1


WHERE_ALL_RUN = ("ray", "pages", "vllm", "slow", "long")
"""Marks of tests that are chosen by them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test with several cases `make test` takes one, drawn by the test's name; `make test-long` takes the others.

    A case that is named on the command line runs.
    """
    if any("::" in argument for argument in config.args):
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        is_chosen = any(item.get_closest_marker(name) for name in WHERE_ALL_RUN) or "benchmarks" in item.path.parts
        if hasattr(item, "callspec") and not is_chosen:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, own in cases.items():
        drawn = own[zlib.crc32(name.encode()) % len(own)]
        for item in own:
            if item is not drawn:
                item.add_marker(pytest.mark.long)


gc.disable()  # until the tests are collected: what is made until then stays


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """The garbage collector need not look again and again at a million objects of modules and of tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def ctrl_c() -> None:
    """Whoever runs the tests in the background may have them ignore Ctrl-C; they press it."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Every test runs under its own dspy context, with a task LM that needs no network."""
    logging.getLogger("dspy").setLevel(logging.ERROR)
    logging.getLogger("dspy_flashevolve").setLevel(logging.NOTSET)  # a benchmark may have silenced it
    with dspy.context(lm=task_lm(), num_threads=4):
        yield
