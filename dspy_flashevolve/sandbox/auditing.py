"""A hook inside a child that ends it, with a reason, at the first thing that no candidate may do.

It gives clear reasons and stops what a careless candidate does. It is no wall: native code gets around it, and so does
Python that changes the library functions that it uses. The kernel's layers
(:mod:`~dspy_flashevolve.sandbox.confinement`) are the wall.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any, cast

PROCESSES = (
    "os.fork",
    "os.forkpty",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "subprocess.Popen",
    "pty.spawn",
)
SIGNALS = ("os.kill", "os.killpg", "signal.pthread_kill", "signal.pidfd_send_signal")
READS = ("os.listdir", "os.scandir", "os.chdir", "os.getxattr", "os.listxattr")
WRITES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
          "os.chown", "os.utime", "os.lchown", "os.chflags", "os.lockf", "os.setxattr", "os.removexattr")  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def forbid(scratch: str, readable: tuple[str, ...], end: Callable[[str], None]) -> None:
    """Watch this process from here on; it cannot be undone.

    Args:
        scratch: the directory where it may write.
        readable: directories where it may read.
        end: called with what was tried, in words; does not return.
    """
    places = tuple(os.path.join(os.path.realpath(path), "") for path in readable)
    own = os.path.join(os.path.realpath(scratch), "")
    judge, spent = _forbidden, (RecursionError, MemoryError)  # names that no candidate can put another value to

    def hook(event: str, args: tuple[Any, ...]) -> None:
        try:
            tried = judge(event, args, own, places)
        except spent:
            tried = f"it left no room to see what it did ({event})"
        if tried is not None:
            end(tried)

    sys.addaudithook(hook)


def _forbidden(event: str, args: tuple[Any, ...], own: str, places: tuple[str, ...]) -> str | None:
    if event == "open":
        return _opening(args, own, places)
    if event in PROCESSES:
        return f"it started a process ({event})"
    if event in SIGNALS:
        return f"it sent a signal ({event})"
    if event.startswith("ctypes."):
        return f"it called native code ({event})"
    if event.startswith("socket."):
        local = event == "socket.__new__" and len(args) > 1 and args[1] == socket.AF_UNIX
        return None if local or event == "socket.gethostname" else f"it used the network ({event})"
    if event in READS and not _inside(args[0] if args else None, (own, *places)):
        return f"it looked outside its scratch directory ({event} {args[0]!r})"
    if event in WRITES and not all(_inside(path, (own,)) for path in _paths(event, args)):
        return f"it wrote outside its scratch directory ({event} {args[0]!r})"
    return None


def _opening(args: tuple[Any, ...], own: str, places: tuple[str, ...]) -> str | None:
    path, mode, flags = args
    if mode is None and not isinstance(path, int) and os.path.isdir(path):
        return f"it opened a directory, from which other paths could start ({path!r})"
    writes = bool(flags & WRITING) or any(letter in "wax+" for letter in mode or "")
    if path == os.devnull or _inside(path, (own,) if writes else (own, *places)):
        return None
    if writes:
        return f"it wrote outside its scratch directory ({path!r})"
    return f"it read outside its scratch directory ({path!r})" if os.path.lexists(path) else None


def _paths(event: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args[:2] if event in ("os.rename", "os.link", "os.symlink") else args[:1]


def _inside(path: Any, places: tuple[str, ...]) -> bool:
    if path is None or isinstance(path, int):
        return True
    name = os.path.realpath(os.fsdecode(cast("str | bytes", path)))
    return any(name == place[:-1] or name.startswith(place) for place in places)
