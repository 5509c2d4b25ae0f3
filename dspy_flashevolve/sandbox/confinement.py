"""The layers of protection by which a child confines itself before it reads any candidate code.

This runs in the fork server and in its children, never in the optimizer's process. Layers that a machine does not give
are left out and named in `Layers.missing`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dspy_flashevolve.sandbox import linux
from dspy_flashevolve.sandbox.contract import Limits

NOBODY = 64207
"""Id of the user that the fork server becomes where it is root. It is above the ids that distributions give out and is
not 65534, to which files of unmapped users belong, so that nothing on the machine belongs to it."""
SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/localtime", "/etc/mime.types",
          "/etc/ssl", "/usr/share/ca-certificates")  # fmt: skip
"""Paths that Python's own modules read when they are imported in a child."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
"""Devices that a child may read and write: they hold nothing of anybody's."""
HIDDEN = ("/run", "/tmp", "/home", "/root", "/var", "/mnt", "/media", "/srv", "/opt", "/dev/shm", "/sys")
"""Directories that the fork server and its children see empty, but for Python where it is installed in one of them."""
OPEN_FILES = 64
"""Open files of a child: its connection, imports and scratch files need a few; the limit bounds the kernel's memory."""
LAYERS = ("user", "namespaces", "landlock", "seccomp")
"""Names of the layers: the fields of `Layers`."""


@dataclass(frozen=True)
class Layers:
    """The layers that confine a child, beside its process group, limits, empty environment and audit hook.

    Args:
        user: another user than the optimizer's (only where the optimizer is root).
        namespaces: a user, process, network, mount, IPC and host name space of its own, without capabilities.
        landlock: the kernel forbids files outside its scratch directory, and signals to others.
        seccomp: the kernel forbids the system calls that make processes, sockets, mounts and hidden memory.
    """

    user: bool
    namespaces: bool
    landlock: bool
    seccomp: bool

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the layers that this machine does not give."""
        return tuple(name for name, is_given in asdict(self).items() if not is_given)

    def refused(self, accepted: Iterable[str]) -> tuple[str, ...]:
        """Return the missing layers that the user has not accepted. Only root needs the layer ``user``."""
        needed = set(LAYERS) - set(accepted) - (set() if os.geteuid() == 0 else {"user"})
        return tuple(name for name in self.missing if name in needed)


def readable_roots() -> tuple[str, ...]:
    """Return the directories of Python and its libraries: all that a child may read beside its scratch directory."""
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {os.path.join(sys.base_prefix, "lib"), str(Path(__file__).parents[1])}
    paths |= {str(Path(path).resolve()) for path in paths}
    return tuple(sorted(paths)) + SYSTEM


def private_folders(paths: Iterable[str]) -> tuple[str, ...]:
    """Return, for each path, the outermost folder above it that other users may not enter; sorted, without repeats."""
    private: set[str] = set()
    for path in paths:
        for folder in list(reversed(Path(path).parents))[1:]:  # the root directory is no folder to cover
            if folder.is_dir() and not folder.stat().st_mode & stat.S_IXOTH:
                private.add(str(folder))
                break
    return tuple(sorted(private))


def hide_others_files(kept: Iterable[str]) -> bool:
    """Enter a new mount namespace in which private directories are empty but for the paths ``kept``.

    Emptied are the `HIDDEN` directories, that of temporary files and, for root, the private ones above ``kept``.

    Returns:
        Whether the kernel allows it.
    """
    user, group = os.getuid(), os.getgid()
    try:
        linux.unshare(linux.OWN_MOUNTS if user == 0 else linux.OWN_MOUNTS | linux.OWN_USERS)
        if user != 0:
            linux.map_identity(user, group)
        linux.make_mounts_private()
    except OSError:
        return False
    kept = tuple(kept)
    # Root's fork server becomes another user, who cannot enter a folder of mode 0700: Python below it would be lost.
    private = private_folders(kept) if user == 0 else ()
    places = dict.fromkeys((*HIDDEN, os.path.realpath(tempfile.gettempdir()), *private))
    hidden = [path for path in places if os.path.isdir(path) and not os.path.islink(path)]
    inside = [
        path for path in kept if os.path.isdir(path) and any(Path(path).is_relative_to(folder) for folder in hidden)
    ]
    held = [(path, os.open(path, os.O_PATH | os.O_DIRECTORY)) for path in inside]
    for path in hidden:
        os.makedirs(path, exist_ok=True)
        linux.cover(path, 64 << 20)
    for path, number in held:
        os.makedirs(path, exist_ok=True)
        linux.bind(number, path)
        os.close(number)
    return True


def become_nobody(scratch: str) -> bool:
    """As root, become a user to whom nothing but ``scratch`` belongs.

    Returns:
        False where this process is not root, or where that user could not read Python's libraries.
    """
    if os.geteuid() != 0:
        return False
    probe = os.fork()
    if probe == 0:
        try:
            _change_user()
            os._exit(0 if all(os.access(path, os.R_OK) for path in (os.__file__, signal.__file__)) else 1)
        finally:
            os._exit(1)
    if os.waitpid(probe, 0)[1] != 0:
        return False
    os.chown(scratch, NOBODY, NOBODY)
    _change_user()
    return True


def _change_user() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    linux.make_dumpable()


def probe_layers(user: bool, scratch: str, without: Iterable[str] = ()) -> Layers:
    """Return the layers that this machine gives, found by trying each in a child that ends at once."""
    layers = Layers(user, namespaces=False, landlock=False, seccomp=False)
    for name in ("namespaces", "landlock", "seccomp"):
        candidate = replace(layers, **{name: True})
        layers = candidate if name not in without and _works(candidate, scratch) else layers
    return layers


def _works(layers: Layers, scratch: str) -> bool:
    owner = os.getuid(), os.getgid()
    try:
        pid = linux.clone(linux.NAMESPACES) if layers.namespaces else os.fork()
    except OSError:
        return False
    if pid == 0:
        try:
            confine(layers, Limits(), scratch, owner, own_tasks=0)
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def confine(layers: Layers, limits: Limits, scratch: str, owner: tuple[int, int], own_tasks: int) -> None:
    """Confine this process. It cannot be undone.

    Args:
        layers: the layers to apply. With namespaces, the process must have been made by ``clone(NAMESPACES)``.
        limits: limits of the process.
        scratch: an existing directory, which becomes its working directory and its only writable place.
        owner: user and group of the process that made this one.
        own_tasks: number of tasks that its user has already; without namespaces they count against the limit.

    Raises:
        OSError: the kernel refused a layer; the process must end.
    """
    with open("/proc/self/statm") as file:
        mapped_bytes = int(file.read().split()[0]) * resource.getpagesize()
    os.setsid()
    linux.end_with_parent(signal.SIGKILL)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where the whole machine runs out of memory, the kernel ends this process and no other
    if layers.namespaces:
        linux.map_identity(*owner)
        linux.make_mounts_private()
        with contextlib.suppress(OSError):  # an older kernel: seccomp refuses the changes, too
            linux.make_mounts_read_only()
        linux.cover("/proc", 4096)
        linux.cover(scratch, limits.scratch_bytes, 0o700)
    os.chdir(scratch)
    _limit(limits, mapped_bytes, 0 if layers.namespaces else own_tasks)
    if layers.landlock:
        linux.landlock(readable_roots(), (scratch,), DEVICES)
    linux.no_new_privileges()
    linux.drop_capabilities()
    os.environ.clear()
    if layers.seccomp:
        linux.refuse_system_calls()


def _limit(limits: Limits, mapped_bytes: int, own_tasks: int) -> None:
    wanted = {
        resource.RLIMIT_CPU: limits.cpu_seconds,
        resource.RLIMIT_AS: mapped_bytes + limits.memory_bytes,
        resource.RLIMIT_FSIZE: limits.scratch_bytes,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_NPROC: own_tasks + limits.tasks,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def close_all_but(*kept: int) -> None:
    """Close every file descriptor of this process but ``kept``, and connect input and output to /dev/null."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    edges = sorted({2, *kept})
    for low, high in zip(edges, [*edges[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)
