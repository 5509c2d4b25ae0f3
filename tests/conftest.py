"""Settings of dspy must not leak from one test into the next."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from collections.abc import Iterator

import dspy
import hypothesis
import pytest

from tests.fakes import task_lm

os.environ["TQDM_DISABLE"] = "1"  # read by tqdm when a bar is made
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # litellm is imported when it is needed; no test needs the network
hypothesis.settings.register_profile("untimed", deadline=None)  # no test is a measurement of time
hypothesis.settings.load_profile("untimed")

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
