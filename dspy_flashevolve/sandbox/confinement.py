"""The layers of protection by which a child confines itself before it reads any candidate code.

This runs in the fork server and in its children, never in the optimizer's process. Layers that a machine does not give
are left out and named in `Layers.missing`. The system calls have no names in Python's standard library, so they are
made by number; each raises ``OSError`` where the kernel refuses.

The seccomp filter says which system calls a child may not make, whatever code makes them. It has no second process, no
socket but the one that it was given, no memory outside its address space's limit, no view of other processes, no mounts
and no name spaces, and changes no mode, owner, time, attribute or lock of a file, which Landlock does not govern.
Threads, files and pairs of stream sockets (asyncio has one) stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import signal
import stat
import struct
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dspy_flashevolve.sandbox.contract import Limits

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
NAMESPACES = 0x10000000 | 0x20000000 | 0x40000000 | 0x00020000 | 0x08000000 | 0x04000000
"""CLONE_NEWUSER, NEWPID, NEWNET, NEWNS, NEWIPC, NEWUTS."""
OWN_MOUNTS, OWN_USERS = 0x00020000, 0x10000000
"""CLONE_NEWNS; CLONE_NEWUSER."""
_SIGCHLD = 17
_AT_FDCWD, _AT_RECURSIVE = ctypes.c_int(-100), ctypes.c_uint(0x8000)
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38

_READ = 1 << 0 | 1 << 2 | 1 << 3
"""Landlock's rights to execute (needed to map libraries), read a file, and list a directory."""
_FILE = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
"""The Landlock rights that a plain file can have; the kernel refuses a rule for a file with others."""
_RIGHTS_OF_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
"""All rights that a version of Landlock knows; a ruleset with others is refused."""
_ALL_RIGHTS = (1 << 16) - 1

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's constants ``AUDIT_ARCH_*``. Calls by another architecture's numbers end the child."""
_COLUMNS = tuple(ARCHITECTURES)
_OLD = {  # name: numbers on x86_64 and aarch64, None where there is no such call
    "accept": (43, 202), "accept4": (288, 242), "acct": (163, 89), "add_key": (248, 217), "bind": (49, 200),
    "bpf": (321, 280), "chmod": (90, None), "chown": (92, None), "chroot": (161, 51), "connect": (42, 203),
    "delete_module": (176, 106), "execve": (59, 221), "execveat": (322, 281), "fanotify_init": (300, 262),
    "fchmod": (91, 52), "fchmodat": (268, 53), "fchown": (93, 55), "fchownat": (260, 54), "finit_module": (313, 273),
    "flock": (73, 32), "fork": (57, None), "fremovexattr": (199, 16), "fsetxattr": (190, 7), "futimesat": (261, None),
    "init_module": (175, 105), "inotify_init": (253, None), "inotify_init1": (294, 26), "io_setup": (206, 0),
    "ioperm": (173, None), "iopl": (172, None), "ioprio_set": (251, 30), "kcmp": (312, 272),
    "kexec_file_load": (320, 294), "kexec_load": (246, 104), "keyctl": (250, 219), "lchown": (94, None),
    "listen": (50, 201), "lremovexattr": (198, 15), "lsetxattr": (189, 6), "memfd_create": (319, 279),
    "migrate_pages": (256, 238), "mknod": (133, None), "mknodat": (259, 33), "mount": (165, 40),
    "move_pages": (279, 239), "mq_open": (240, 180), "msgget": (68, 186), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "perf_event_open": (298, 241), "personality": (135, 92), "pivot_root": (155, 41),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117), "quotactl": (179, 60),
    "reboot": (169, 142), "removexattr": (197, 14), "request_key": (249, 218), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "semget": (64, 190), "setns": (308, 268),
    "setpriority": (141, 140), "setxattr": (188, 5), "shmat": (30, 196), "shmget": (29, 194), "socket": (41, 198),
    "swapoff": (168, 225), "swapon": (167, 224), "syslog": (103, 116), "tkill": (200, 130), "umount2": (166, 39),
    "unshare": (272, 97), "userfaultfd": (323, 282), "utime": (132, None), "utimensat": (280, 88),
    "utimes": (235, None), "vfork": (58, None),
}  # fmt: skip
_NEW = {
    "fchmodat2": 452, "fsconfig": 431, "fsmount": 432, "fsopen": 430, "fspick": 433, "io_uring_enter": 426,
    "io_uring_register": 427, "io_uring_setup": 425, "memfd_secret": 447, "mount_setattr": 442, "move_mount": 429,
    "open_tree": 428, "pidfd_getfd": 438, "pidfd_open": 434, "pidfd_send_signal": 424, "process_madvise": 440,
    "process_mrelease": 448, "quotactl_fd": 443,
}  # fmt: skip
"""Refused calls that have the same number on every architecture."""
_LAST = 456
"""The newest system call that this filter was written for: newer ones are answered as not implemented."""
_CLONE3 = 435
_CHECKED = {
    "clone": (56, 220), "fcntl": (72, 25), "ioctl": (16, 29), "kill": (62, 129), "prctl": (157, 167),
    "prlimit64": (302, 261), "socketpair": (53, 199), "tgkill": (234, 131),
}  # fmt: skip
"""Calls that are allowed with certain arguments only."""

_LOAD, _EQUAL, _GREATER, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x54, 0x06
_NUMBER, _ARCHITECTURE = 0, 4
_FIRST, _SECOND = 16, 24
"""Offsets of the low halves of the first two arguments; these calls take 32-bit values, so the kernel reads no more."""
_ALLOW, _END, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_CLONE_THREAD, _CLONE_NEW = 0x00010000, 0x7E020000
_AF_UNIX, _SOCK_STREAM, _SOCKET_KIND = 1, 1, 0xF
_F_SETFL, _F_DUPFD_CLOEXEC = 4, 1030
_TERMINAL_IOCTLS = 0x5400
"""The ioctls of terminals, which include those of any file (FIOCLEX, FIONBIO, FIONREAD); others set file attributes."""
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2

_libc = ctypes.CDLL(None, use_errno=True)


def _done(result: int, what: str) -> int:
    """Return what a function of libc's has returned; an OSError where it has failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), what)
    return result


def _call(number: int, *args: object) -> int:
    return _done(int(_libc.syscall(ctypes.c_long(number), *args)), f"system call {number}")


def _prctl(option: int, value: int) -> None:
    _done(_libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)), "prctl")


def clone(flags: int) -> int:
    """Fork into new namespaces; 0 in the child. Call it in a process with one thread only."""
    number = _CHECKED["clone"][_column(platform.machine())]
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(_libc.syscall(ctypes.c_long(number), ctypes.c_long(flags | _SIGCHLD), None, None, None, None))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    error = ctypes.get_errno()
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, os.strerror(error))
    return pid


def map_identity(uid: int, gid: int) -> None:
    """In a new user namespace, keep the user and group ids of outside."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def cover(path: str, size_bytes: int, mode: int = 0o755) -> None:
    """Mount an empty private memory file system over a directory."""
    options = f"size={size_bytes},mode={mode:o},nr_inodes=4096".encode()
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _done(_libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", flags, options), f"mount over {path}")


def make_mounts_private() -> None:
    """Keep later mounts of this process from being seen by the rest of the machine."""
    _done(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "mount --make-rprivate /")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def landlock(readable: Iterable[str], writable: Iterable[str], devices: Iterable[str]) -> None:
    """Forbid this process and its descendants every file but those beneath the given paths; missing ones are left out.

    Where the kernel can, TCP, signals to others and abstract sockets of others are forbidden, too. An OSError is raised
    where it has no Landlock.
    """
    version = _call(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    rights = _RIGHTS_OF_ABI.get(version, _ALL_RIGHTS)
    parts = [rights] + ([3] if version >= 4 else []) + ([3] if version >= 6 else [])
    attributes = struct.pack(f"={len(parts)}Q", *parts)
    ruleset = _call(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    for paths, allowed in ((readable, _READ), (writable, rights), (devices, _FILE & ~1)):
        for path in paths:
            try:
                beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except (FileNotFoundError, PermissionError):  # what cannot be opened cannot be allowed, either
                continue
            try:
                of_path = allowed & rights & (_ALL_RIGHTS if os.path.isdir(path) else _FILE)
                rule = struct.pack("=Qi", of_path, beneath)
                _call(_LANDLOCK_ADD, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint32(0))
            finally:
                os.close(beneath)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _call(_LANDLOCK_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


def _column(machine: str) -> int:
    """Return the position of an architecture's numbers in the tables of system calls."""
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system calls are known for {machine}")
    return _COLUMNS.index(machine)


def refuse_system_calls() -> None:
    """Install the filter in this process, which must have one thread. It cannot be removed, and new threads inherit
    it."""
    program = _program(platform.machine(), os.getpid())
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    memory = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("@HP", len(program) // 8, ctypes.addressof(memory))
    mode, nothing = ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.c_ulong(0)
    _done(_libc.prctl(_PR_SET_SECCOMP, mode, head, nothing, nothing), "seccomp")


def _program(machine: str, own_pid: int) -> bytes:
    """Return the filter for a process as a program of the kernel's BPF."""
    column = _column(machine)
    code = [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, ARCHITECTURES[machine], 1, 0), _end(_END)]
    code += [_step(_LOAD, _NUMBER), _step(_GREATER, _LAST, 0, 1), _refuse(errno.ENOSYS)]
    code += _if_number(_CLONE3, [_refuse(errno.ENOSYS)])  # libc makes do with clone, whose flags can be seen
    refused = [numbers[column] for numbers in _OLD.values()] + list(_NEW.values())
    for number in refused:
        code += [] if number is None else _if_number(number, [_refuse()])
    for name, check in _checks(own_pid).items():
        code += _if_number(_CHECKED[name][column], check)
    return b"".join([*code, _end(_ALLOW)])


def _checks(own_pid: int) -> dict[str, list[bytes]]:
    """Return the checks of the arguments of some calls; each ends with a decision."""
    itself = _if_first(own_pid, [_end(_ALLOW)])
    thread = [_step(_LOAD, _FIRST), _step(_ANY_BIT, _CLONE_NEW, 0, 1), _refuse()]
    thread += [_step(_ANY_BIT, _CLONE_THREAD, 1, 0), _refuse(), _end(_ALLOW)]
    plain = [_step(_LOAD, _SECOND), _step(_EQUAL, _F_DUPFD_CLOEXEC, 1, 0), _step(_GREATER, _F_SETFL, 1, 0)]
    flags = [_step(_LOAD, _SECOND), _step(_AND, 0xFFFFFF00), _step(_EQUAL, _TERMINAL_IOCTLS, 1, 0), _refuse()]
    stream = [_step(_LOAD, _SECOND), _step(_AND, _SOCKET_KIND), _step(_EQUAL, _SOCK_STREAM, 1, 0), _refuse()]
    return {
        "clone": thread,
        "fcntl": [*plain, _end(_ALLOW), _refuse()],
        "ioctl": [*flags, _end(_ALLOW)],
        "kill": [*itself, _refuse()],
        "tgkill": [*itself, _refuse()],
        "prlimit64": [*itself, *_if_first(0, [_end(_ALLOW)]), _refuse()],
        "prctl": [*_if_first(_PR_SET_PDEATHSIG, [_refuse()]), _end(_ALLOW)],
        "socketpair": [*stream, *_if_first(_AF_UNIX, [_end(_ALLOW)]), _refuse()],
    }


def _if_number(number: int, then: list[bytes]) -> list[bytes]:
    return [_step(_EQUAL, number, 0, len(then)), *then]


def _if_first(value: int, then: list[bytes]) -> list[bytes]:
    return [_step(_LOAD, _FIRST), _step(_EQUAL, value, 0, len(then)), *then]


def _end(decision: int) -> bytes:
    return _step(_RETURN, decision)


def _refuse(error: int = errno.EPERM) -> bytes:
    return _end(_ERROR | error)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


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


def hide_others_files(paths: Iterable[str]) -> bool:
    """Enter a new mount namespace in which private directories are empty but for ``paths``; False where the
    kernel refuses.

    Emptied are the `HIDDEN` directories, that of temporary files and, for root, the private ones above ``paths``.
    """
    user, group = os.getuid(), os.getgid()
    try:
        flags = OWN_MOUNTS if user == 0 else OWN_MOUNTS | OWN_USERS
        _done(_libc.unshare(ctypes.c_int(flags)), "unshare")
        if user != 0:
            map_identity(user, group)
        make_mounts_private()
    except OSError:
        return False
    paths = tuple(paths)
    # Root's fork server becomes another user, who cannot enter a folder of mode 0700: Python below it would be lost.
    private = private_folders(paths) if user == 0 else ()
    places = dict.fromkeys((*HIDDEN, os.path.realpath(tempfile.gettempdir()), *private))
    hidden = [path for path in places if os.path.isdir(path) and not os.path.islink(path)]
    inside = [path for path in paths if any(Path(path).is_relative_to(folder) for folder in hidden)]
    held = [(path, os.open(path, os.O_PATH | os.O_DIRECTORY)) for path in inside if os.path.isdir(path)]
    for path in hidden:
        os.makedirs(path, exist_ok=True)
        cover(path, 64 << 20)
    for path, number in held:
        os.makedirs(path, exist_ok=True)
        source, flags = f"/proc/self/fd/{number}".encode(), ctypes.c_ulong(_MS_BIND | _MS_REC)
        _done(_libc.mount(source, os.fsencode(path), None, flags, None), f"bind {path}")
        os.close(number)
    return True


def become_nobody(scratch: str) -> bool:
    """As root, become a user to whom nothing but ``scratch`` belongs; False where that user could not read Python's
    libraries."""
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
    _prctl(_PR_SET_DUMPABLE, 1)  # the change of user has given /proc/self to root


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
        pid = clone(NAMESPACES) if layers.namespaces else os.fork()
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
    """Confine this process, which cannot be undone; an OSError must end it.

    With namespaces, it must have been made by ``clone(NAMESPACES)``, by a process of the user and group ``owner``.
    ``scratch`` becomes its working directory and its only writable place. Without namespaces, the ``own_tasks`` that
    its user has already count against the limit.
    """
    with open("/proc/self/statm") as file:
        mapped_bytes = int(file.read().split()[0]) * resource.getpagesize()
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with its parent
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where the whole machine runs out of memory, the kernel ends this process and no other
    if layers.namespaces:
        map_identity(*owner)
        make_mounts_private()
        read_only = struct.pack("=4Q", 1, 0, 0, 0)  # MOUNT_ATTR_RDONLY, for every mount of this namespace
        with contextlib.suppress(OSError):  # before Linux 5.12: seccomp refuses the changes, too
            _call(_NEW["mount_setattr"], _AT_FDCWD, b"/", _AT_RECURSIVE, read_only, ctypes.c_size_t(len(read_only)))
        cover("/proc", 4096)
        cover(scratch, limits.scratch_bytes, 0o700)
    os.chdir(scratch)
    for kind, value in {
        resource.RLIMIT_CPU: limits.cpu_seconds,
        resource.RLIMIT_AS: mapped_bytes + limits.memory_bytes,
        resource.RLIMIT_FSIZE: limits.scratch_bytes,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_NPROC: limits.tasks + (0 if layers.namespaces else own_tasks),
        resource.RLIMIT_CORE: 0,
    }.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    if layers.landlock:
        landlock(readable_roots(), (scratch,), DEVICES)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)  # nor gains any that is executed later
    # It gives up every capability, those in a new user namespace included.
    _done(_libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)), "capset")
    os.environ.clear()
    if layers.seccomp:
        refuse_system_calls()


def close_all_but(*descriptors: int) -> None:
    """Close every file descriptor of this process but ``descriptors``, and connect input and output to /dev/null."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    edges = sorted({2, *descriptors})
    for low, high in zip(edges, [*edges[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)
