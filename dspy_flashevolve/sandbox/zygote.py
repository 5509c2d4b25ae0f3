"""The fork server: a process that has dspy imported, has an empty environment, and forks one child a run.

It never runs candidate code itself. It starts children, watches that each stays one process, kills them with all that
they left behind, and says how they ended. It ends, with all its children, when the host closes the control socket.
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dspy_flashevolve.sandbox import confinement, guest, linux
from dspy_flashevolve.sandbox.confinement import Layers
from dspy_flashevolve.sandbox.contract import Limits, encode

WATCH_SECONDS = 0.05
"""How often children are counted."""
MESSAGE_BYTES = 4096


class Zygote:
    """The fork server's loop.

    Args:
        control: a SOCK_SEQPACKET socket to the host.
        layers: those that every child applies.
        scratch: a directory; with namespaces every child mounts its own over it, else each gets one inside.
    """

    def __init__(self, control: socket.socket, layers: Layers, scratch: str) -> None:
        self._control = control
        self._layers = layers
        self._scratch = scratch
        self._owner = os.getuid(), os.getgid()
        self._children: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}
        self._reasons: dict[int, str] = {}

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
                    pidfd = self._obey(json.loads(data), fds)
                    if pidfd is not None:
                        poll.register(pidfd, select.POLLIN)
                else:
                    poll.unregister(number)
                    self._ended(number)
            self._watch()

    def close(self) -> None:
        """Kill every child."""
        for pid in self._children:
            self._kill(pid)
        for pidfd in list(self._pidfds):
            self._ended(pidfd, tell=False)

    def _obey(self, order: dict[str, Any], fds: list[int]) -> int | None:
        if "kill" in order:
            for pid in [pid for pid, job in self._children.items() if job == order["kill"]]:
                self._kill(pid)
            return None
        job = order["start"]
        try:
            pid = linux.clone(linux.NAMESPACES) if self._layers.namespaces else os.fork()
        except OSError as error:
            os.close(fds[0])
            self._tell(ended=job, status=-1, cpu_seconds=0.0, why=f"no process could be started: {error}")
            return None
        if pid == 0:
            self._child(job, Limits(**order["limits"]), fds[0])
        os.close(fds[0])
        self._children[pid] = job
        pidfd = os.pidfd_open(pid)
        self._pidfds[pidfd] = pid
        return pidfd

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
        """One process a child: threads are its own affair, processes are not."""
        for pid in self._children:
            if pid not in self._reasons and _children_of(pid):
                self._reasons[pid] = "processes"
                self._kill(pid)
        for stray in _children_of(os.getpid()) - set(self._children):
            os.kill(stray, signal.SIGKILL)
            os.waitpid(stray, 0)

    def _kill(self, pid: int) -> None:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)

    def _ended(self, pidfd: int, tell: bool = True) -> None:
        pid = self._pidfds.pop(pidfd)
        os.close(pidfd)
        _, status, usage = os.wait4(pid, 0)
        job, why = self._children.pop(pid), self._reasons.pop(pid, "")
        if not self._layers.namespaces:
            with contextlib.suppress(ProcessLookupError):  # its number is taken while its group has members
                os.killpg(pid, signal.SIGKILL)
            shutil.rmtree(os.path.join(self._scratch, str(job)), ignore_errors=True)
        if tell:
            self._tell(ended=job, status=status, cpu_seconds=usage.ru_utime + usage.ru_stime, why=why)

    def _tell(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # where the host is gone, the loop will see it
            self._control.send(json.dumps(message).encode())


def _children_of(pid: int) -> set[int]:
    found: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found |= {int(child) for child in file.read().split()}
    return found


def _tasks_of(uid: int) -> int:
    """How many tasks count against a user's limit."""
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def main(control_number: int, *without: str) -> None:
    """Be the fork server. Started by the host with nothing but ``TMPDIR`` in its environment, as ``python -I -c``.

    Its directory lies in a file system of its own where it can have one, and is removed when it ends, however the host
    has ended.

    Args:
        control_number: the file number of the control socket.
        without: layers to leave out.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the host to hear, which closes the control socket
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
