"""How a child locks itself up before it reads any candidate code, layer by layer, and which layers there are.

Runs in the fork server and in its children, never in the optimizer's process. Layers that a machine does not have are
left out and named: :attr:`Layers.missing`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dspy_flashevolve.sandbox import linux
from dspy_flashevolve.sandbox.contract import Limits

NOBODY = 64207
"""The user that the fork server becomes where it is root; nobody's number, so that nothing else belongs to it."""
SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/localtime", "/etc/mime.types",
          "/etc/ssl", "/usr/share/ca-certificates")  # fmt: skip
"""What Python's own modules read when they are imported late."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
HIDDEN = ("/run", "/tmp", "/home", "/root", "/var", "/mnt", "/media", "/srv", "/opt", "/dev/shm", "/sys")
"""Directories in which the fork server and its children find nothing but Python, where it lies there."""
OPEN_FILES = 64
LAYERS = ("user", "namespaces", "landlock", "seccomp")
"""Names of the fields of :class:`Layers`."""


@dataclass(frozen=True)
class Layers:
    """What holds a child in, beside its own process group, limits, empty environment and audit hook.

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
        return tuple(name for name, there in asdict(self).items() if not there)

    def refused(self, accepted: Iterable[str]) -> tuple[str, ...]:
        """Missing layers without which nothing is run: nobody accepted that, and only root needs another user."""
        needed = set(LAYERS) - set(accepted) - (set() if os.geteuid() == 0 else {"user"})
        return tuple(name for name in self.missing if name in needed)


def readable_roots() -> tuple[str, ...]:
    """Where Python and its libraries lie, this one too: all that a child may read beside its scratch directory."""
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {os.path.join(sys.base_prefix, "lib"), str(Path(__file__).parents[1])}
    paths |= {str(Path(path).resolve()) for path in paths}
    return tuple(sorted(paths)) + SYSTEM


def hide_others_files(kept: Iterable[str]) -> bool:
    """In a mount namespace of one's own, empty the :data:`HIDDEN` directories, and that of temporary files, of all but
    ``kept``.

    Returns:
        Whether the kernel allows it.
    """
    user, group = os.getuid(), os.getgid()
    try:
        linux.unshare(linux.OWN_MOUNTS if user == 0 else linux.OWN_MOUNTS | linux.OWN_USERS)
        if user != 0:
            linux.map_identity(user, group)
        linux.keep_mounts_to_oneself()
    except OSError:
        return False
    places = dict.fromkeys((*HIDDEN, os.path.realpath(tempfile.gettempdir())))
    hidden = [path for path in places if os.path.isdir(path) and not os.path.islink(path)]
    inside = [path for path in kept if os.path.isdir(path) and any(Path(path).is_relative_to(one) for one in hidden)]
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
        False where one is not root, or where that user could not read Python's libraries.
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
    linux.own_one_s_proc_files()


def probe_layers(user: bool, scratch: str, without: Iterable[str] = ()) -> Layers:
    """Find out what this machine gives, by trying it in a child that ends at once."""
    found = Layers(user, namespaces=False, landlock=False, seccomp=False)
    for name in ("namespaces", "landlock", "seccomp"):
        more = replace(found, **{name: True})
        found = more if name not in without and _works(more, scratch) else found
    return found


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
    """Lock up this process, for good.

    Args:
        layers: those to apply. With namespaces, the process was made by ``clone(NAMESPACES)``.
        limits: its limits.
        scratch: an existing directory; becomes its working directory and its only writable place.
        owner: user and group of the process that made this one.
        own_tasks: tasks that its user has already, where others count against the limit.

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
        linux.keep_mounts_to_oneself()
        with contextlib.suppress(OSError):  # an older kernel: seccomp refuses the changes, too
            linux.let_nothing_be_changed()
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
    """Close every file of this process but ``kept``, and put /dev/null where its input and output were."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    edges = sorted({2, *kept})
    for low, high in zip(edges, [*edges[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)
