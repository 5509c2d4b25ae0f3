"""Candidate code through the public ``Harness``: it runs in a process of its own, whatever it tries.

What each layer of the sandbox does alone is tested beside the sandbox; here is what a user relies on.
"""

from __future__ import annotations

import asyncio
import copy
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dspy
import pytest

from dspy_flashevolve import AsyncMetaHarness, ConfigurationError, Harness, HarnessError, Limits
from tests.fakes import fake_lm, reply_for
from tests.sandbox import worlds
from tests.sandbox.worlds import GOOD, TIGHT

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
LAYERS = ("user", "namespaces", "landlock", "seccomp")


def module(body: str) -> str:
    """A candidate whose ``forward`` runs ``body``, and answers with ``found`` where it comes to its end.

    A harness may not say ``import os``; whoever means harm finds another way to say it.
    """
    body = re.sub(r"import ([\w.]+(?:, [\w.]+)*)", lambda found: "; ".join(
        f"{name.split('.')[0]} = __import__({name!r})" for name in found[1].split(", ")
    ), body)  # fmt: skip
    return worlds.module(f"{body}\nfound = str(found)")


def harness(source: str, limits: Limits = TIGHT, **options: Any) -> Harness:
    return Harness("question -> answer", source, limits=limits, accept_missing_protection=LAYERS, **options)


@pytest.fixture(autouse=True)
def lm() -> Iterator[dspy.LM]:
    model = fake_lm(lambda prompt: reply_for(prompt, answer="42"))
    with dspy.context(lm=model):
        yield model


def answer_of(body: str) -> str:
    return harness(module(body))(question="?").answer


def failure_of(body: str, *reasons: str, limits: Limits = TIGHT) -> str:
    """The words of the failure that a candidate ends with, for one of the given reasons; others run as before."""
    with pytest.raises(HarnessError) as caught:
        harness(module(body), limits)(question="?")
    assert caught.value.failure.reason in reasons, str(caught.value.failure)
    assert caught.value.failure.message
    assert harness(GOOD, limits)(question="?").answer == "42"
    return caught.value.failure.message


def test_what_does_no_harm_runs_and_its_lm_calls_are_made_here(lm: Any) -> None:
    assert harness(GOOD)(question="?").answer == "42"
    assert asyncio.run(harness(GOOD).acall(question="?")).answer == "42"
    assert len(lm.history) == 2


@pytest.mark.parametrize(("body", "reasons"), [
    ("while True: pass", {"cpu"}),
    ("import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
     {"forbidden", "cpu", "processes"}),
    ("import threading, time\nfor _ in range(10**6): threading.Thread(target=time.sleep, args=(60,)).start()",
     {"error", "memory"}),
    ("found = len(bytearray(10 * 2**30))", {"memory"}),
    ("found = []\nwhile True: found.append(bytearray(2**24))", {"memory"}),
    ("while True: print('x' * 2**16)", {"output"}),
    ("found = 'x' * 2**25", {"output"}),
    ("open('file', 'wb').write(bytes(2**24))", {"output"}),
    ("while True: dspy.settings.lm('again')", {"lm_calls"}),
    ("dspy.settings.lm('x', n=4)", {"lm_calls"}),
    ("import os; os._exit(0)", {"died"}),
    ("import os; os.abort()", {"died"}),
    ("import os, signal; os.kill(os.getppid(), signal.SIGKILL)", {"forbidden", "error"}),
    ("raise SystemExit", {"error"}),
    ("def f(): f()\nf()", {"error"}),
    ("return 3", {"error"}),
    ("return dspy.Prediction(answer=object())", {"error"}),
])  # fmt: skip
def test_each_attack_ends_as_a_failure_with_its_reason(body: str, reasons: set[str]) -> None:
    failure_of(body, *reasons)


def test_an_endless_wait_ends_with_its_time() -> None:
    limits = Limits(seconds=0.5, cpu_seconds=5)
    assert "more than 0.5 seconds" in failure_of("import time; time.sleep(10**6)", "time", limits=limits)


@pytest.mark.parametrize("how", ["open({path!r}, 'w').write('owned')", "import os; os.remove({path!r})",
                                 "import os; os.chmod({path!r}, 0)", "import os; os.mkdir({path!r} + '.d')",
                                 "import os; os.symlink({path!r}, 'link'); open('link', 'w')",
                                 "open('../../../../../../..' + {path!r}, 'a').write('owned')"])  # fmt: skip
def test_nothing_outside_its_scratch_directory_is_written(tmp_path: Path, how: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    victim.chmod(0o666)
    tmp_path.chmod(0o777)
    failure_of(how.format(path=str(victim)), "forbidden", "error")
    assert victim.read_text() == "as it was"
    assert victim.stat().st_mode & 0o777 == 0o666
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]


def test_no_file_with_labels_is_read(tmp_path: Path) -> None:
    labels = tmp_path / "labels.json"
    labels.write_text("label-kept-in-the-host-only")
    tmp_path.chmod(0o777)
    assert "label-kept" not in failure_of(f"found = open({str(labels)!r}).read()", "forbidden", "error")


def test_the_environment_is_empty_and_the_hosts_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert answer_of("import os; found = dict(os.environ)") == "{}"
    for path in ("/proc/self/environ", f"/proc/{os.getpid()}/environ", "/proc/1/environ"):
        failure_of(f"found = open({path!r}).read()", "forbidden", "error")


def test_there_is_no_network(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        port = server.getsockname()[1]
        failure_of(f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)", "forbidden", "error")
        with pytest.raises(BlockingIOError):
            server.accept()
    path = str(tmp_path / "daemon.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        server.settimeout(0.0)
        os.chmod(path, 0o777)
        failure_of(f"import socket; socket.socket(socket.AF_UNIX).connect({path!r})", "forbidden", "error")
        with pytest.raises(BlockingIOError):
            server.accept()


def test_one_run_leaves_nothing_for_the_next() -> None:
    body = (
        "import os, sys\nfound = [sorted(os.listdir('.')), getattr(dspy, 'left', None), hasattr(sys, 'left')]\n"
        "open('left', 'w').write('answer')\ndspy.left = sys.left = 'answer'"
    )
    assert answer_of(body) == answer_of(body)


def test_the_hosts_metric_is_out_of_reach() -> None:
    body = "import dspy.evaluate\ndspy.evaluate.answer_exact_match = lambda *_: True\nfound = 'wrong'"
    assert answer_of(body) == "wrong"
    assert not dspy.evaluate.answer_exact_match(dspy.Example(answer="right"), dspy.Prediction(answer="wrong"))


def test_memory_is_saved_loaded_and_copied_with_the_source(tmp_path: Path) -> None:
    source = (
        "class Remembers(dspy.Module):\n    def forward(self, question):\n"
        "        return dspy.Prediction(answer=self.memory[question])\n"
    )
    program = harness(source, memory={"?": "kept"})
    program.save(tmp_path / "program.json")
    other = harness(GOOD)
    other.load(tmp_path / "program.json")
    for variant in (program, other, copy.deepcopy(program)):
        assert variant(question="?").answer == "kept"


@pytest.mark.parametrize(("arguments", "said"), [
    ({"module_src": "import os"}, "imports os"), ({"module_src": "x"}, "0 subclasses"),
    ({"accept_missing_protection": ["nothing"]}, "accept_missing_protection is"),
])  # fmt: skip
def test_a_harness_that_cannot_run_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Harness("question -> answer", **arguments)


def test_a_search_refuses_layers_that_do_not_exist() -> None:
    with pytest.raises(ConfigurationError, match="accept_missing_protection is"):
        AsyncMetaHarness(len, proposer_lm=None, accept_missing_protection=["namespace"])


def test_without_an_lm_it_says_what_to_do() -> None:
    with dspy.context(lm=None), pytest.raises(ConfigurationError, match="no LM is configured"):
        harness(GOOD)(question="?")
