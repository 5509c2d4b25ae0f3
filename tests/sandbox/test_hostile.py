"""Candidates that mean harm: each ends as a failure with a reason, within its limits, and the host goes on.

Every attack is made twice: as it is, where the hook in the child ends it with clear words; and with that hook left out
(``unaudited``), where only the kernel is in its way.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import NoReturn

import dspy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspy_flashevolve.sandbox.contract import Job, Limits, LmRecord
from tests.sandbox.worlds import TIGHT, Lab, lab, module

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
LABEL = "label-kept-in-the-host-only"


@pytest.fixture(scope="module")
def audited() -> Generator[Lab]:
    with lab() as box:
        yield box
        assert box.is_well()


@pytest.fixture(scope="module")
def unaudited() -> Generator[Lab]:
    with lab(audited=False) as box:
        yield box
        assert box.is_well()


@pytest.fixture(scope="module")
def unfiltered() -> Generator[Lab]:
    """Without the hook and without the seccomp filter: the layers below these."""
    with lab(audited=False, without=("seccomp",)) as box:
        yield box
        assert box.is_well()


@pytest.fixture(params=["audited", "unaudited"])
def either(request: pytest.FixtureRequest) -> Lab:
    return request.getfixturevalue(request.param)


def failure_of(where: Lab, body: str, *reasons: str) -> str:
    """The words of the failure that a candidate ends with, for one of the given reasons, and nothing else of it.

    The sandbox is well: the next candidate in it is run, and in the end one that does no harm.
    """
    outcome = where.run(module(body))
    assert outcome.failure is not None, f"it ended well, with {outcome.fields}"
    assert outcome.failure.reason in reasons, str(outcome.failure)
    assert outcome.failure.message
    assert not children_of(where), "it left processes behind"
    return outcome.failure.message


@pytest.fixture(scope="module")
def bare() -> Generator[Lab]:
    """As on a machine that has nothing of the kernel's: limits, the group, another user for root, the hook."""
    with lab(without=("namespaces", "landlock", "seccomp")) as box:
        assert set(box.sandbox.missing) >= {"namespaces", "landlock", "seccomp"}
        yield box
        assert box.is_well()


def children_of(where: Lab) -> str:
    pid = where.sandbox.process_id
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()


def wire_code(body: str) -> str:
    """A body that has found the child's socket to the host."""
    return (
        "import os, stat\n"
        "def is_socket(number):\n"
        "    try:\n"
        "        return stat.S_ISSOCK(os.fstat(number).st_mode)\n"
        "    except OSError:\n"
        "        return False\n"
        "wire = next(number for number in range(3, 64) if is_socket(number))\n" + body
    )


@pytest.mark.parametrize(
    ("where", "reason"), [("audited", "forbidden"), ("unaudited", "cpu"), ("unfiltered", "processes")]
)
def test_a_fork_bomb_is_put_out(request: pytest.FixtureRequest, where: str, reason: str) -> None:
    body = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    failure_of(request.getfixturevalue(where), body, reason)


def test_a_daemon_does_not_outlive_its_run(unfiltered: Lab) -> None:
    body = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(10**6)"
    outcome = unfiltered.run(module(body + "\n    os._exit(0)\nfound = 'away'"))
    assert outcome.failure is None or outcome.failure.reason == "processes"
    assert not children_of(unfiltered)


@pytest.mark.parametrize(("body", "reasons"), [
    ("import threading, time\nfor _ in range(10**6): threading.Thread(target=time.sleep, args=(60,)).start()",
     {"error", "memory"}),
    ("found = len(bytearray(10 * 2**30))", {"memory"}),
    ("import mmap; found = len(mmap.mmap(-1, 10 * 2**30))", {"memory"}),
    ("found = []\nwhile True: found.append(bytearray(2**24))", {"memory"}),
    (f"open({str(Path(dspy.__file__))!r}, 'a').write('import os')", {"forbidden", "error"}),
    ("while True: print('x' * 2**16)", {"output"}),
    ("import os\nwhile True: os.write(1, b'x' * 2**16)", {"output"}),
    ("found = 'x' * 2**25", {"output"}),
    ("found = ['x'] * 2**19", {"output"}),
    ("open('file', 'wb').write(bytes(2**24))", {"output"}),
    ("for n in range(100): open(f'file{n}', 'wb').write(bytes(2**20))", {"output"}),
    (wire_code("while True: os.write(wire, b'\\xff' * 2**16)"), {"output", "protocol"}),
    (wire_code("while True: os.write(wire, b'\\0' * 2**16)"), {"output", "protocol"}),
    (wire_code("while True: os.write(wire, (2).to_bytes(4, 'big') + b'{}')"), {"output", "protocol"}),
    ("dspy.settings.lm('x', n=4)", {"lm_calls"}),
    *((body, {"died"}) for body in ("import os; os._exit(0)", "import os; os._exit(7)", "import os; os.abort()")),
    *((body, {"error"}) for body in (
        "raise SystemExit", "raise KeyboardInterrupt", "1 / 0", "def f(): f()\nf()", "return 3",
        "return dspy.Prediction(answer=float('nan'))", "return dspy.Prediction(answer=object())",
    )),
])  # fmt: skip
def test_each_attack_ends_as_a_failure_with_its_reason(either: Lab, body: str, reasons: set[str]) -> None:
    failure_of(either, body, *reasons)


def test_an_endless_loop_has_no_more_of_the_machine_than_the_limits_say(either: Lab) -> None:
    outcome = either.run(module("while True: pass"))
    assert outcome.failure is not None
    assert outcome.failure.reason == "cpu"
    assert "processor time" in outcome.failure.message
    assert outcome.cpu_seconds <= 2 * TIGHT.cpu_seconds


@pytest.mark.parametrize("how", ["open({path!r}, 'w').write('owned')", "import os; os.remove({path!r})",
                                 "import os; os.rename({path!r}, {path!r} + '.moved')",
                                 "import os; os.chmod({path!r}, 0)", "import os; os.mkdir({path!r} + '.d')",
                                 "import os; os.symlink({path!r}, 'link'); open('link', 'w')",
                                 "open('../../../../../../..' + {path!r}, 'a').write('owned')"])  # fmt: skip
def test_nothing_outside_its_scratch_directory_is_written(either: Lab, tmp_path: Path, how: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    victim.chmod(0o666)
    tmp_path.chmod(0o777)
    failure_of(either, how.format(path=str(victim)), "forbidden", "error")
    assert victim.read_text() == "as it was"
    assert victim.stat().st_mode & 0o777 == 0o666
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]


def test_the_environment_is_empty(either: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert either.run(module("import os; found = dict(os.environ)")).fields["answer"] == {}


@pytest.mark.parametrize("path", ["/proc/self/environ", f"/proc/{os.getpid()}/environ", "/proc/1/environ"],
                         ids=["own", "host", "first"])  # fmt: skip
def test_the_host_s_environment_cannot_be_read(either: Lab, path: str) -> None:
    failure_of(either, f"found = open({path!r}).read()", "forbidden", "error")


def test_what_a_candidate_prints_is_cut(audited: Lab) -> None:
    outcome = audited.run(module("print('start' + 'x' * 10000 + 'end'); found = 'printed'"))
    assert outcome.failure is None
    assert len(outcome.printed) == 2000
    assert outcome.printed.endswith("end\n")


def test_no_label_is_in_the_child() -> None:
    example = dspy.Example(question="?", answer=LABEL).with_inputs("question")
    half = len(LABEL) // 2
    body = (
        f"import gc, sys\nneedle = {LABEL[:half]!r} + {LABEL[half:]!r}\n"
        "def text(one):\n    try:\n        return repr(one)\n    except BaseException:\n        return ''\n"
        "frame = sys._getframe()\nheld = []\nwhile frame:\n    held.append(frame.f_locals)\n    frame = frame.f_back\n"
        "seen = [one for one in gc.get_objects() if type(one) in (dict, list, tuple) and len(one) < 50]\n"
        "found = any(needle in value for one in seen for value in "
        "(one.values() if type(one) is dict else one) if type(value) is str and value is not needle)"
    )
    with lab(Limits(cpu_seconds=60, seconds=600.0), audited=False) as box:
        outcome = box.run(module(body), inputs=dict(example.inputs()))
    assert outcome.fields == {"answer": False}


def test_a_file_of_labels_cannot_be_read(either: Lab, tmp_path: Path) -> None:
    labels = tmp_path / "labels.json"
    labels.write_text(LABEL)
    tmp_path.chmod(0o777)
    message = failure_of(either, f"found = open({str(labels)!r}).read()", "forbidden", "error")
    assert LABEL not in message


def test_one_run_leaves_nothing_for_the_next(either: Lab) -> None:
    body = (
        "import os, sys\nfound = [sorted(os.listdir('.')), getattr(dspy, 'left', None), hasattr(sys, 'left')]\n"
        "open('left', 'w').write('answer')\ndspy.left = sys.left = 'answer'"
    )
    for _ in range(2):
        assert either.run(module(body)).fields["answer"] == [["printed"], None, False]


@pytest.mark.parametrize("target", ["os.getppid()", "0", "-1", "{host}", "{server}"])
def test_nobody_else_is_killed(either: Lab, target: str) -> None:
    who = target.format(host=os.getpid(), server=either.sandbox.process_id)
    server = either.sandbox.process_id
    outcome = either.run(module(f"import os, signal\nos.kill({who}, signal.SIGKILL)\nfound = 'killed'"))
    assert outcome.failure is not None
    assert either.sandbox.process_id == server
    assert either.is_well()


@pytest.mark.parametrize("payload", [
    b"not json", b"[]", b"{}", b"[" * 100_000, b'{"kind": "done"}', b'{"kind": "done", "fields": 3}',
    b'{"kind": "done", "fields": {"answer": NaN}}', b'{"kind": "failed", "reason": "nonsense", "message": "x"}',
    b'{"kind": "done", "fields": {"a": ' + b"9" * 5000 + b"}}", b"\xff\xfe", b'{"kind": ["done"]}',
    b'{"kind": "failed", "reason": ["died"], "message": "x"}',
    b'{"lm":{"messages":[{"role":["user"],"content":"x"}]}}', b'{"kind":"done","fields":{},"memory":1e999}',
    b'{"kind":"done","fields":{},"memory":' + b"[" * 500 + b"]" * 500 + b"}",
])  # fmt: skip
def test_a_malformed_reply_is_a_failure(either: Lab, payload: bytes) -> None:
    body = f"os.write(wire, ({len(payload)}).to_bytes(4, 'big') + {payload!r})\nimport time; time.sleep(60)"
    failure_of(either, wire_code(body), "protocol")


@pytest.mark.parametrize("request_", [
    {"messages": [{"role": "user", "content": "x"}], "options": {"api_base": "http://evil"}},
    {"messages": [{"role": "user", "content": "x"}], "options": {"api_key": "k"}},
    {"messages": [{"role": "user", "content": "x"}], "options": {"n": 10**9}},
    {"messages": [{"role": "user", "content": "x"}], "options": {"max_tokens": 2**15 + 1}},
    {"messages": [{"role": "user", "content": "x"}], "options": {"temperature": "hot"}},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "file", "file": {"path": "/etc/passwd"}}]}]},
    {"messages": []}, {"messages": "x"}, {"messages": [3]}, {"messages": [{"role": "root", "content": "x"}]}, [], 7,
])  # fmt: skip
def test_an_lm_call_that_no_candidate_may_make_is_not_made(audited: Lab, request_: object) -> None:
    calls: list[object] = []

    async def counted(request: object) -> object:
        calls.append(request)
        raise AssertionError("the host made the call")

    body = (
        f"import json\npayload = json.dumps({{'lm': {request_!r}}}).encode()\n"
        "os.write(wire, len(payload).to_bytes(4, 'big') + payload)\nimport time; time.sleep(60)"
    )
    outcome = audited.run(module(wire_code(body)), call_lm=counted)
    assert outcome.failure is not None
    assert outcome.failure.reason == "protocol"
    assert not calls


def test_lm_calls_are_counted(either: Lab) -> None:
    body = "while True: dspy.settings.lm('again')"
    assert f"more than {TIGHT.lm_calls} LM calls" in failure_of(either, body, "lm_calls")
    assert len(either.run(module(body)).calls) == TIGHT.lm_calls


def test_a_candidate_that_pretends_to_have_failed_is_believed(either: Lab) -> None:
    """The reason is the candidate's word then; it can only harm itself by it."""
    payload = b'{"kind": "failed", "reason": "time", "message": "' + b"x" * 10_000 + b'"}'
    body = f"os.write(wire, ({len(payload)}).to_bytes(4, 'big') + {payload!r})"
    assert len(failure_of(either, wire_code(body), "time")) <= 4000


@pytest.mark.long
def test_a_child_that_does_not_read_is_ended() -> None:
    """The host's answers fill the socket; the time is the candidate's."""
    message = b'{"lm":{"messages":[{"role":"user","content":"x"}]}}'

    async def long(request: object) -> LmRecord:
        return LmRecord([], ["x" * 4_000_000], 1, 1)

    body = f"for _ in range(3): os.write(wire, ({len(message)}).to_bytes(4, 'big') + {message!r})\nwhile True: pass"
    with lab(Limits(seconds=2.0, cpu_seconds=60, lm_calls=5)) as box:
        outcome = box.run(module(wire_code(body)), call_lm=long)
    assert outcome.failure is not None
    assert outcome.failure.reason == "time"


def test_what_the_call_of_the_lm_raises_passes_through_and_leaves_no_child(audited: Lab) -> None:
    class OutOfOrderError(Exception):
        pass

    async def broken(request: object) -> object:
        raise OutOfOrderError

    with pytest.raises(OutOfOrderError):
        audited.run(module("dspy.settings.lm('x')"), call_lm=broken)
    assert not children_of(audited)
    assert audited.is_well()


def test_a_fork_server_that_is_killed_is_started_again() -> None:
    with lab() as box:
        server = box.sandbox.process_id
        assert server is not None
        os.kill(server, signal.SIGKILL)
        assert box.is_well()
        assert box.sandbox.process_id != server


def test_a_run_that_is_cancelled_and_a_sandbox_that_is_closed_leave_nothing() -> None:
    with lab(Limits(seconds=600.0)) as box:
        server = box.sandbox.process_id
        box.await_(_cancelled_meanwhile(box))
        assert not children_of(box)
    assert not Path(f"/proc/{server}").exists()


async def _cancelled_meanwhile(box: Lab) -> None:
    running = asyncio.Event()

    async def never_answered(request: object) -> NoReturn:
        running.set()
        await asyncio.Event().wait()
        raise AssertionError

    job = Job(module("dspy.settings.lm('x')"), "Candidate", {"question": "?"})
    run = asyncio.ensure_future(box.sandbox.run(job, never_answered))
    await running.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.binary(min_size=1, max_size=200))
def test_no_bytes_on_the_wire_harm_the_host(audited: Lab, noise: bytes) -> None:
    outcome = audited.run(module(wire_code(f"os.write(wire, {noise!r})\nos._exit(0)")))
    assert outcome.failure is not None


@pytest.mark.long
@pytest.mark.parametrize("body", [
    "while True: pass", "import os\nwhile True: os.fork()", "found = bytearray(10 * 2**30)", "import os; os.kill(1, 9)",
    "while True: print('x' * 2**16)", "import os; os.system('true')", "import ctypes; ctypes.CDLL(None)",
    "open('/etc/passwd').read()", "import socket; socket.create_connection(('127.0.0.1', 1))", "open('/tmp/x', 'w')",
    "import os; os.listdir('/')", "raise ValueError",
])  # fmt: skip
def test_what_holds_without_the_kernel_s_layers(bare: Lab, body: str) -> None:
    failure_of(bare, body, "forbidden", "cpu", "memory", "output", "error")


def test_without_the_kernel_s_layers_a_run_leaves_no_files(bare: Lab) -> None:
    for _ in range(2):
        outcome = bare.run(module("import os\nfound = sorted(os.listdir('.'))\nopen('left', 'w').write('x')"))
        assert outcome.fields["answer"] == ["printed"]
