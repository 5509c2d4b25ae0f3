"""The seccomp filter: what native code may not ask of the kernel, and what ordinary code still may."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from dspy_flashevolve.sandbox import confinement
from tests.sandbox.worlds import Lab, lab, module

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
ROOT = Path(__file__).parents[2]
ORDINARY_USER = 1234
AS_ORDINARY_USER: Any = {"user": ORDINARY_USER, "group": ORDINARY_USER, "extra_groups": []} if os.geteuid() == 0 else {}
"""How a test that root runs starts a process without root's rights."""


@pytest.fixture(scope="module", params=[(), ("namespaces", "landlock")], ids=["all layers", "seccomp alone"])
def filtered(request: pytest.FixtureRequest) -> Generator[Lab]:
    with lab(audited=False, without=request.param) as box:
        if "seccomp" in box.sandbox.missing:
            pytest.skip("the kernel has no seccomp filters, or the architecture is not known")
        yield box
        assert box.is_well()


@pytest.mark.parametrize("body", [
    "import os; os.fork()", "import os; os.posix_spawn('/bin/true', ['true'], {})", "import os; os.memfd_create('x')",
    "import os; os.execv('/bin/true', ['true'])", "import socket; socket.socket()", "import os; os.pidfd_open(1)",
    "import socket; socket.socket(socket.AF_UNIX)", "import os; os.kill(os.getppid(), 9)", "import os; os.kill(-1, 9)",
    "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)", "import os; os.mkfifo('pipe')",
    "import os, resource; resource.prlimit(os.getpid() + 1, resource.RLIMIT_CPU)",
    "import os; os.chmod('printed', 0)", "import os; os.utime('printed')", "import os; os.fchown(1, -1, -1)",
    "import os; os.setxattr('printed', 'user.note', b'x')", "import os; os.removexattr('printed', 'user.note')",
    "import fcntl, os; fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())", "import fcntl; fcntl.fcntl(1, fcntl.F_SETSIG, 9)",
    "import fcntl; fcntl.flock(1, fcntl.LOCK_SH)", "import fcntl; fcntl.lockf(1, fcntl.LOCK_EX)",
    "import fcntl; fcntl.ioctl(1, 0x8901, bytes(4))", "import fcntl; fcntl.ioctl(1, 0x40086602, bytes(8))",
    "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)", "import os; os.sched_setaffinity(1, {0})",
])  # fmt: skip
def test_what_python_asks_of_the_kernel_is_refused(filtered: Lab, body: str) -> None:
    outcome = filtered.run(module(body))
    assert outcome.failure is not None
    assert "PermissionError: [Errno 1]" in outcome.failure.message


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")
@pytest.mark.parametrize("call", ["272, 0x10000000", "56, 0x10000000 | 17, 0, 0, 0, 0", "56, 0x10010000, 0, 0, 0, 0",
                                  "29, 0, 4096, 0o1600", "425, 1, 0", "447, 0", "101, 0, 0, 0, 0", "321, 0, 0, 0",
                                  "165, 0, 0, 0, 0, 0", "157, 1, 0, 0, 0, 0", "57", "58", "1073741863",
                                  "435, 0, 0"])  # fmt: skip
def test_what_native_code_asks_of_the_kernel_is_refused(filtered: Lab, call: str) -> None:
    body = (
        f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfound = [libc.syscall({call}), ctypes.get_errno()]"
    )
    assert filtered.run(module(body)).fields["answer"] in ([-1, 1], [-1, 38])


def test_a_socket_of_the_machine_s_is_out_of_reach_wherever_it_lies(filtered: Lab) -> None:
    """Its directory is one that every layer but the filter leaves open: that of this test."""
    path = Path(__file__).with_suffix(f".{os.getpid()}.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        try:
            server.listen()
            server.settimeout(0.0)
            path.chmod(0o777)
            outcome = filtered.run(
                module(f"import socket\nsocket.socket(socket.AF_UNIX).connect({str(path)!r})\nfound = 'connected'")
            )
            assert outcome.failure is not None
            with pytest.raises(BlockingIOError):
                server.accept()
        finally:
            path.unlink()


@pytest.mark.parametrize("body", [
    "import threading\nfound = []\nt = threading.Thread(target=found.append, args=('42',)); t.start(); t.join()",
    "import asyncio; found = [asyncio.run(asyncio.sleep(0, '42'))]",
    "import random, os, time; found = ['42'] if os.urandom(2) and random.random() < time.time() else []",
    "open('file', 'w').write('42'); found = [open('file').read()]",
    "import os; os.kill(os.getpid(), 0); found = ['42']",
    "found = [dspy.Predict('question -> answer')(question='?').answer]",
])  # fmt: skip
def test_ordinary_code_still_runs(filtered: Lab, body: str) -> None:
    outcome = filtered.run(module(body))
    assert outcome.failure is None, str(outcome.failure)
    assert outcome.fields["answer"] == ["42"]


@pytest.mark.parametrize("machine", sorted(confinement.ARCHITECTURES))
def test_every_step_of_a_filter_leads_to_a_later_one(machine: str) -> None:
    code = list(struct.iter_unpack("=HBBI", confinement._program(machine, 7)))
    for place, (kind, if_true, if_false, _) in enumerate(code):
        assert kind == confinement._RETURN or place + 1 + max(if_true, if_false) < len(code)
    assert code[-1] == (confinement._RETURN, 0, 0, confinement._ALLOW)


def test_a_machine_that_is_not_known_has_no_filter() -> None:
    with pytest.raises(OSError, match="riscv64"):
        confinement._program("riscv64", 7)


def test_the_layer_is_named_where_it_is_missing() -> None:
    with lab(without=("seccomp",)) as box:
        assert "seccomp" in box.sandbox.missing
        assert box.is_well()


def python_of_an_ordinary_user(home: Path) -> list[str]:
    """A Python with this one's libraries that an ordinary user may run; this one may lie in root's own directory."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (os.path.realpath(sys.executable), shutil.which(version, path="/usr/local/bin:/usr/bin")):
        if python is None:
            continue
        try:
            subprocess.run([python, "-c", ""], check=True, **AS_ORDINARY_USER)
        except (OSError, subprocess.CalledProcessError):
            continue
        subprocess.run([python, "-m", "venv", "--without-pip", home], check=True)
        libraries = home / "lib" / version / "site-packages"
        libraries.rmdir()
        libraries.symlink_to(os.path.realpath(sysconfig.get_path("purelib")))
        able = [str(home / "bin" / "python")]
        if not subprocess.run([*able, "-c", "import anyio"], capture_output=True, **AS_ORDINARY_USER).returncode:
            return able
    pytest.skip("no Python, or no libraries, that an ordinary user may read")


@pytest.fixture
def home_of_another() -> Generator[Path]:
    """A directory of an ordinary user's, with copies of this package and its tests: that user may not be able to enter
    the folder in which the clone lies."""
    with tempfile.TemporaryDirectory() as home:
        for folder in ("dspy_flashevolve", "tests/sandbox"):
            shutil.copytree(ROOT / folder, Path(home, folder))
        shutil.copy(ROOT / "tests" / "__init__.py", Path(home, "tests"))
        if os.geteuid() == 0:
            for path in (Path(home), *Path(home).rglob("*")):
                os.chown(path, ORDINARY_USER, ORDINARY_USER)
        yield Path(home)


@pytest.mark.long
def test_a_candidate_changes_nothing_of_what_belongs_to_the_user_who_runs_it(home_of_another: Path) -> None:
    """No mode, owner, time or attribute of the host's library: it would not import, or keep notes for later runs."""
    target = home_of_another / "dspy_flashevolve" / "engine" / "loop.py"

    def state() -> list[object]:
        told = target.stat()
        return [told.st_mode, told.st_uid, told.st_gid, told.st_mtime_ns, told.st_ctime_ns, os.listxattr(target)]

    before = state()
    ended = subprocess.run(
        [*python_of_an_ordinary_user(home_of_another / "python"), "-m", "tests.sandbox.ordinary_user", str(target)],
        cwd=home_of_another,
        env={"PYTHONPATH": str(home_of_another), "HOME": str(home_of_another)},
        capture_output=True,
        text=True,
        **AS_ORDINARY_USER,
    )
    assert ended.returncode == 0, ended.stderr
    for missing, results in map(json.loads, ended.stdout.splitlines()):
        if not {"namespaces", "seccomp"} <= set(missing):
            assert not {name: told for name, told in results.items() if told[0] == 0}, f"without {missing}"
    assert state() == before


HIDING = """
import os, sys
from dspy_flashevolve.sandbox import confinement
confinement.HIDDEN = ()  # the private folder of this test lies in one of these
if not confinement.hide_others_files([sys.argv[1]]):
    sys.exit("no mounts")
os.setresuid(confinement.NOBODY, confinement.NOBODY, confinement.NOBODY)
print(sorted(os.listdir(sys.argv[1])), os.listdir(os.path.dirname(sys.argv[1])))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandbox becomes another user")
def test_libraries_below_a_folder_of_roots_alone_are_found_in_the_sandbox_and_nothing_else_of_it(
    tmp_path: Path,
) -> None:
    private, other = tmp_path / "private", tmp_path / "other"
    (private / "libraries").mkdir(parents=True)
    (private / "libraries" / "numbers.py").touch()
    (private / "secret").touch()
    private.chmod(0o700)
    other.mkdir()
    command = [sys.executable, "-c", HIDING, str(private / "libraries")]
    ended = subprocess.run(command, env={"PYTHONPATH": str(ROOT), "TMPDIR": str(other)}, capture_output=True, text=True)
    if "no mounts" in ended.stderr:
        pytest.skip("this machine lets nothing be mounted")
    assert ended.stdout == "['numbers.py'] ['libraries']\n", ended.stderr
