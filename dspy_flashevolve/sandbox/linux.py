"""What Linux gives an unprivileged process to lock itself up with: namespaces, Landlock, capabilities.

Python's standard library has no names for these system calls, so they are made by number. Everything here raises
``OSError`` where the kernel refuses, and is only called in the sandbox's own processes.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterable

_NUMBERS = {"x86_64": {"clone": 56, "capset": 126}, "aarch64": {"clone": 220, "capset": 91}}
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
NAMESPACES = 0x10000000 | 0x20000000 | 0x40000000 | 0x00020000 | 0x08000000 | 0x04000000
"""CLONE_NEWUSER, NEWPID, NEWNET, NEWNS, NEWIPC, NEWUTS."""
OWN_MOUNTS, OWN_USERS = 0x00020000, 0x10000000
"""CLONE_NEWNS; CLONE_NEWUSER."""
_SIGCHLD = 17
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38

_READ = 1 << 0 | 1 << 2 | 1 << 3
"""Landlock: execute (libraries are mapped so), read a file, list a directory."""
_FILE = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
"""Landlock: the rights that a plain file can have."""
_RIGHTS_OF_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_ALL_RIGHTS = (1 << 16) - 1

_libc = ctypes.CDLL(None, use_errno=True)


def _call(number: int, *args: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *args))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)):
        raise OSError(ctypes.get_errno(), "prctl")


def clone(flags: int) -> int:
    """Fork into new namespaces; 0 in the child. Call it in a process with one thread only."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(_libc.syscall(ctypes.c_long(_number("clone")), ctypes.c_long(flags | _SIGCHLD), None, None, None, None))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    error = ctypes.get_errno()
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, os.strerror(error))
    return pid


def unshare(flags: int) -> None:
    """Move this process into new namespaces. Call it in a process with one thread only."""
    if _libc.unshare(ctypes.c_int(flags)):
        raise OSError(ctypes.get_errno(), "unshare")


def map_identity(uid: int, gid: int) -> None:
    """In a new user namespace, be who one was outside."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def cover(path: str, size_bytes: int, mode: int = 0o755) -> None:
    """Mount an empty memory file system of one's own over a directory."""
    options = f"size={size_bytes},mode={mode:o},nr_inodes=4096".encode()
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    if _libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", flags, options):
        raise OSError(ctypes.get_errno(), f"mount over {path}")


def bind(open_directory: int, path: str) -> None:
    """Let an open directory be found at ``path``, too."""
    source = f"/proc/self/fd/{open_directory}".encode()
    if _libc.mount(source, os.fsencode(path), None, ctypes.c_ulong(_MS_BIND | _MS_REC), None):
        raise OSError(ctypes.get_errno(), f"bind {path}")


def keep_mounts_to_oneself() -> None:
    """What is mounted from here on is not seen by the rest of the machine."""
    if _libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None):
        raise OSError(ctypes.get_errno(), "mount --make-rprivate /")


def drop_capabilities() -> None:
    """Give up every capability, those in a user namespace of one's own included."""
    header, data = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    _call(_number("capset"), header, data)


def no_new_privileges() -> None:
    """No program that is executed from here on gains anything by it."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def end_with_parent(signal_number: int) -> None:
    """Get a signal when the parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def own_one_s_proc_files() -> None:
    """After a change of user, /proc/self belongs to root until this is called."""
    _prctl(_PR_SET_DUMPABLE, 1)


def landlock_version() -> int:
    """The version of Landlock that the kernel has; 0 without it."""
    try:
        return _call(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    except OSError:
        return 0


def landlock(readable: Iterable[str], writable: Iterable[str], devices: Iterable[str]) -> None:
    """Forbid this process and its descendants every file but those beneath the given paths.

    Where the kernel can, TCP, signals to others and abstract sockets of others are forbidden, too.

    Args:
        readable: directories to read; missing ones are left out.
        writable: directories to read and write.
        devices: files to read and write.
    """
    version = landlock_version()
    rights = _RIGHTS_OF_ABI.get(version, _ALL_RIGHTS)
    parts = [rights] + ([3] if version >= 4 else []) + ([3] if version >= 6 else [])
    attributes = struct.pack(f"={len(parts)}Q", *parts)
    ruleset = _call(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    for paths, allowed in ((readable, _READ), (writable, rights), (devices, _FILE & ~1)):
        for path in paths:
            _allow(ruleset, path, allowed & rights)
    no_new_privileges()
    _call(_LANDLOCK_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):  # what cannot be opened cannot be allowed, either
        return
    try:
        allowed = rights if os.path.isdir(path) else rights & _FILE
        rule = struct.pack("=Qi", allowed, beneath)
        _call(_LANDLOCK_ADD, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint32(0))
    finally:
        os.close(beneath)


def _number(name: str) -> int:
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        raise OSError(f"no number is known for the system call {name} on {platform.machine()}")
    return numbers[name]
