"""The fork server: a process with dspy imported and an empty environment that forks a child for each run.

It never runs candidate code itself. It starts children, checks that each stays a single process, kills them with all
that they left behind, and reports how they ended. It ends with its children when the host closes the control socket.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspy_flashevolve.sandbox import confinement, guest, linux
from dspy_flashevolve.sandbox.confinement import Layers
from dspy_flashevolve.sandbox.contract import Limits, encode

WATCH_SECONDS = 0.05
"""Seconds between two checks for processes that children started: where no layer forbids a second process, it lives at
most that long (docs/meta-harness.md)."""
MESSAGE_BYTES = 4096
"""Longest order of the host. An order is a run's number and its limits, some 300 bytes."""


@dataclass
class _Child:
    """A running child: its process id, the number of its job, and why the fork server killed it."""

    pid: int
    job: int
    why: str = ""


class Zygote:
    """The loop of the fork server.

    Args:
        control: a SOCK_SEQPACKET socket to the host.
        layers: the layers that every child applies.
        scratch: a directory. With namespaces each child mounts its own over it; otherwise each gets a folder inside.
    """

    def __init__(self, control: socket.socket, layers: Layers, scratch: str) -> None:
        self._control = control
        self._layers = layers
        self._scratch = scratch
        self._owner = os.getuid(), os.getgid()
        self._children: dict[int, _Child] = {}
        """The running children by their pidfds."""

    def serve(self) -> None:
        """Serve until the host closes the control socket."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        while True:
            for number, _ in poll.poll(1000 * WATCH_SECONDS if self._children else None):
                if number == self._control.fileno():
                    data, fds, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 1)
                    if not data:
                        return
                    order = json.loads(data)
                    if "start" in order:
                        self._start(order["start"], Limits(**order["limits"]), fds[0], poll)
                    else:
                        for child in self._children.values():
                            if child.job == order["kill"]:
                                _kill(child.pid)
                else:
                    poll.unregister(number)
                    self._reap(number)
            self._watch()

    def close(self) -> None:
        """Kill every child."""
        for child in self._children.values():
            _kill(child.pid)
        for pidfd in list(self._children):
            self._reap(pidfd)

    def _start(self, job: int, limits: Limits, connection: int, poll: select.poll) -> None:
        try:
            pid = linux.clone(linux.NAMESPACES) if self._layers.namespaces else os.fork()
        except OSError as error:
            self._report(ended=job, status=-1, cpu_seconds=0.0, why=f"no process could be started: {error}")
        else:
            if pid == 0:
                self._child(job, limits, connection)
            pidfd = os.pidfd_open(pid)
            self._children[pidfd] = _Child(pid, job)
            poll.register(pidfd, select.POLLIN)
        finally:
            os.close(connection)

    def _child(self, job: int, limits: Limits, number: int) -> None:
        try:
            own = 0 if self._layers.namespaces else _tasks_of(self._owner[0])
            confinement.close_all_but(number)
            connection = socket.socket(fileno=number)
            try:
                scratch = self._scratch  # over which the child mounts its own, where it can
                if not self._layers.namespaces:
                    scratch = os.path.join(scratch, str(job))
                    os.mkdir(scratch, 0o700)
                confinement.confine(self._layers, limits, scratch, self._owner, own)
            except OSError as error:
                connection.sendall(encode({"kind": "open", "message": f"{type(error).__name__}: {error}"}))
                return
            guest.serve(connection, scratch, confinement.readable_roots())
        finally:
            os._exit(0)

    def _watch(self) -> None:
        """Kill children that have a second process, and processes whose child has ended. Threads are allowed."""
        for child in self._children.values():
            if not child.why and _children_of(child.pid):
                child.why = "processes"
                _kill(child.pid)
        for stray in _children_of(os.getpid()) - {child.pid for child in self._children.values()}:
            os.kill(stray, signal.SIGKILL)
            os.waitpid(stray, 0)

    def _reap(self, pidfd: int) -> None:
        child = self._children.pop(pidfd)
        os.close(pidfd)
        _, status, usage = os.wait4(child.pid, 0)
        if not self._layers.namespaces:
            with contextlib.suppress(
                ProcessLookupError
            ):  # safe: a process id is not reused while its group has members
                os.killpg(child.pid, signal.SIGKILL)
            shutil.rmtree(os.path.join(self._scratch, str(child.job)), ignore_errors=True)
        self._report(ended=child.job, status=status, cpu_seconds=usage.ru_utime + usage.ru_stime, why=child.why)

    def _report(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # the host has closed the socket, which ends the loop
            self._control.send(json.dumps(message).encode())


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _children_of(pid: int) -> set[int]:
    children: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                children |= {int(child) for child in file.read().split()}
    return children


def _tasks_of(uid: int) -> int:
    """Return how many tasks count against a user's limit."""
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def main(control_number: int, *without: str) -> None:
    """Run as the fork server. The host starts it as ``python -I -c`` with nothing but ``TMPDIR`` in its environment.

    Its directory is in a file system of its own where the machine allows that, and is removed when the server ends,
    however the host has ended.

    Args:
        control_number: the file number of the control socket.
        without: layers to leave out.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the host, which closes the control socket
    control = socket.socket(fileno=control_number)
    roots = confinement.readable_roots()
    sys.path[:] = [path for path in sys.path if any(Path(path).is_relative_to(root) for root in roots)]
    if "namespaces" not in without:
        confinement.hide_others_files(roots)
    scratch = os.path.realpath(tempfile.mkdtemp(prefix="flashevolve-"))
    try:
        _serve(control, scratch, without)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _serve(control: socket.socket, scratch: str, without: tuple[str, ...]) -> None:
    user = "user" not in without and confinement.become_nobody(scratch)
    linux.adopt_orphans()
    os.environ.update(DSPY_CACHEDIR=os.path.join(scratch, "cache"), LITELLM_LOCAL_MODEL_COST_MAP="True", HOME=scratch)
    guest.warm_up()
    os.environ.clear()
    gc.collect()
    gc.freeze()
    layers = confinement.probe_layers(user, scratch, without)
    zygote = Zygote(control, layers, scratch)
    with contextlib.suppress(BrokenPipeError):  # the host has gone already
        control.send(json.dumps({"ready": {"layers": asdict(layers)}}).encode())
    try:
        zygote.serve()
    finally:
        zygote.close()
