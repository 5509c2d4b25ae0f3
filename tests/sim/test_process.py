"""The server in its own process, used as a user would: by dspy, over real HTTP."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import dspy
import pytest

from dspy_flashevolve.sim import HouseRules, SimServer

PARENT = """
import os, time
from dspy_flashevolve.sim import SimServer
server = SimServer().__enter__()
print(server.pid, server.url, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[SimServer]:
    with SimServer(profile="h100-qwen3-8b", seed=0, time_scale=200) as server:
        yield server


def lm(server: SimServer) -> dspy.LM:
    return dspy.LM("openai/sim", api_base=server.api_base, api_key="none", cache=False)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("adapter", [dspy.ChatAdapter(), dspy.JSONAdapter()])
def test_the_seed_scores_low_and_all_the_rules_score_the_optimum(server: SimServer, adapter: dspy.ChatAdapter) -> None:
    task = HouseRules()
    evaluate = dspy.Evaluate(devset=task.valset(40), metric=task.metric, num_threads=16)
    with dspy.context(lm=lm(server), adapter=adapter):
        assert evaluate(task.program()).score / 100 == pytest.approx(0.9 * 2 / 24, abs=0.04)
        assert evaluate(replace(task, seed_rules=24).program()).score / 100 == pytest.approx(task.optimum, abs=0.04)
        assert evaluate(replace(task, seed_rules=24).program(3)).score / 100 == pytest.approx(task.optimum, abs=0.06)


def test_the_process_is_gone_when_the_block_ends() -> None:
    with SimServer() as server:
        pid = server.pid
        assert is_alive(pid)
    assert not is_alive(pid)
    with pytest.raises(RuntimeError, match="with"):
        _ = server.api_base


@pytest.mark.skipif(sys.platform == "win32", reason="kills by signal")
def test_a_server_that_was_started_without_a_block_ends_with_the_process() -> None:
    code = "from dspy_flashevolve.sim import SimServer as S; one = S().start(); print(one.stats().requests, one.pid)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    requests, pid = done.stdout.split()
    assert (requests, done.stderr) == ("0", "")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_the_process_ends_when_its_parent_is_killed() -> None:
    pipe = subprocess.PIPE
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=pipe, stderr=pipe, text=True)
    assert parent.stdout is not None
    assert parent.stderr is not None
    _, url = parent.stdout.readline().split()
    urllib.request.urlopen(f"{url}/health").close()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    # The server has inherited stderr, so that this pipe ends when the server does.
    assert parent.stderr.read() == ""
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/health")
    parent.stdout.close()
    parent.stderr.close()


def test_ctrl_c_does_not_reach_the_server() -> None:
    with SimServer() as server:
        assert os.getpgid(server.pid) != os.getpgid(0)


def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=str(port)), SimServer(port=port):
            pass


def test_bad_arguments_are_refused_before_or_on_entry() -> None:
    with pytest.raises(ValueError, match="unknown profile"):
        SimServer("h200")
    with pytest.raises(RuntimeError, match="time_scale"), SimServer(time_scale=-1):
        pass
