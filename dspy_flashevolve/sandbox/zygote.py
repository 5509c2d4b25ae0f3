"""The fork server: a process with dspy imported and an empty environment that forks a child for each run.

The server starts children, checks that each stays a single process, kills them with all that they left behind, and
reports how they ended. It never runs candidate code itself, and ends when the host closes the control socket. The child
has the candidate's source, the inputs of one example and the memory. It has no label, score, metric or key: its LM
sends each call to the host, which trusts nothing that happens here.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, cast

import dspy
from dspy.clients.base_lm import BaseLM
from dspy.utils.exceptions import AdapterParseError, LMError
from pydantic_core import to_jsonable_python

from dspy_flashevolve.sandbox import confinement
from dspy_flashevolve.sandbox.confinement import Layers
from dspy_flashevolve.sandbox.contract import HEADER, Limits, decode, encode

PRINTED_CHARACTERS = 2000
"""Characters of the end of a candidate's output that go back with its answer: a traceback of some 30 lines."""
MESSAGE_CHARACTERS = 2000
"""Most characters of an exception's text. Half of what the host keeps, so that the candidate's lines fit, too."""
FILE_NAME = "candidate.py"
FORBIDDEN = {
    "started a process": ("os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen", "pty."),
    "sent a signal": ("os.kill", "signal.pthread_kill", "signal.pidfd_send_signal"),
    "called native code": ("ctypes.",),
}
"""What no candidate may do -> prefixes of the names of Python's audit events for it."""
READS = ("os.listdir", "os.scandir", "os.chdir", "os.getxattr", "os.listxattr")
WRITES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
          "os.chown", "os.utime", "os.lchown", "os.chflags", "os.lockf", "os.setxattr", "os.removexattr")  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Connection:
    """The child's end of the connection to the host."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._file = connection, connection.makefile("rb")
        self._turn = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(encode(message))

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message and wait for its answer. One thread at a time does this."""
        with self._turn:
            self.send(message)
            return self.receive()

    def receive(self) -> dict[str, Any]:
        return decode(self._exactly(HEADER.unpack(self._exactly(HEADER.size))[0]), most_depth=None)

    def end(self, message: dict[str, Any]) -> None:
        """Send a last message and end the process, whatever its other threads are doing."""
        try:
            if self._turn.acquire(timeout=0.5):
                self.send(message)
        finally:
            os._exit(0)

    def _exactly(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            os._exit(0)  # the host has closed the connection
        return data


class ProxyLM(BaseLM):
    """The LM of a child, ``dspy.settings.lm``: it sends each call to the host, which has the key and counts."""

    def __init__(self, connection: Connection | None, model: str = "host") -> None:
        super().__init__(model=model, cache=False)
        self._connection = connection

    def __call__(self, prompt: str | None = None, *, messages: Any = None, **kwargs: Any) -> Any:
        if self._connection is None:
            return ["[[ ## answer ## ]]\n1\n\n[[ ## completed ## ]]"]
        chat = messages if messages is not None else [{"role": "user", "content": prompt}]
        options = {name: value for name, value in {**self.kwargs, **kwargs}.items() if value is not None}
        reply = self._connection.ask({"lm": {"messages": to_jsonable_python(chat), "options": options}})
        if "error" in reply:
            raise LMError(str(reply["error"]), model=self.model)
        return reply["outputs"]

    async def acall(self, prompt: str | None = None, *, messages: Any = None, **kwargs: Any) -> Any:
        return self(prompt, messages=messages, **kwargs)

    def forward(self, prompt: str | None = None, messages: Any = None, **kwargs: Any) -> Any:
        raise NotImplementedError("call the LM itself: lm(prompt) or lm(messages=[...])")


def warm_up() -> None:
    """Import what a prediction needs, in the fork server, so that no child has to."""
    warnings.simplefilter("ignore")
    with dspy.context(lm=ProxyLM(None), disable_history=True):
        dspy.Predict("question -> answer: int")(question="warm")
        with contextlib.suppress(AdapterParseError):  # goes through the JSON adapter, too
            dspy.ChainOfThought("question -> answer")(question="warm")


def serve(connection: socket.socket, scratch: str, readable: tuple[str, ...]) -> None:
    """Run one job and end the process."""
    wire = Connection(connection)
    wire.send({"kind": "ready"})
    job = wire.receive()
    printed = os.open(os.path.join(scratch, "printed"), os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o600)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    for stream in (sys.stdout, sys.stderr):
        cast("TextIOWrapper", stream).reconfigure(line_buffering=True, errors="replace")
    if job["audited"]:
        failed = {"kind": "failed", "reason": "forbidden"}
        forbid(scratch, readable, lambda attempt: wire.end({**failed, "message": attempt}))
    try:
        answer = {"kind": "done", **_run(job, wire)}
        payload = {**answer, "printed": _tail(printed)}
        encode(payload)
    except BaseException as error:
        payload = {"kind": "failed", "reason": _reason(error), "message": _described(error), "printed": _tail(printed)}
    wire.end(payload)


def _run(job: dict[str, Any], wire: Connection) -> dict[str, Any]:
    adapters = {"ChatAdapter": dspy.ChatAdapter, "JSONAdapter": dspy.JSONAdapter, "XMLAdapter": dspy.XMLAdapter}
    dspy.configure(lm=ProxyLM(wire), adapter=adapters.get(job["adapter"], dspy.ChatAdapter)())
    module = _build(job["source"], job["class_name"])
    if job["memory"] is not None:
        module.memory = job["memory"]
    if job["batch"] is not None:
        module.learn(job["batch"])
    fields: dict[str, Any] = {}
    if job["inputs"] is not None:
        prediction = module(**job["inputs"])
        if not isinstance(prediction, dspy.Prediction):
            raise TypeError(f"forward returned a {type(prediction).__name__}, expected a dspy.Prediction")
        fields = {str(name): value for name, value in prediction.items()}
    return {"fields": _as_json(fields), "memory": _as_json(getattr(module, "memory", None))}


def _build(source: str, class_name: str) -> Any:
    home = types.ModuleType("candidate")
    home.__dict__["dspy"] = dspy
    sys.modules["candidate"] = home
    exec(compile(source, FILE_NAME, "exec"), home.__dict__)
    return home.__dict__[class_name]()


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(to_jsonable_python(value), allow_nan=False))


def _reason(error: BaseException) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError) or number == errno.ENOMEM:
        return "memory"
    if number in (errno.EFBIG, errno.ENOSPC):
        return "output"
    return "error"


def _described(error: BaseException) -> str:
    """Return an error with the candidate's own lines, for the LM that writes the next candidate."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(code.co_name, line) for code, line in frames if code.co_filename == FILE_NAME]
    lines = [f"  line {line}, in {name}" for name, line in own[-5:]]
    return "\n".join([f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS], *lines])


def _tail(number: int) -> str:
    size = os.fstat(number).st_size
    return os.pread(number, PRINTED_CHARACTERS, max(0, size - PRINTED_CHARACTERS)).decode("utf-8", "replace")


def forbid(scratch: str, readable: tuple[str, ...], end: Callable[[str], None]) -> None:
    """Install an audit hook that ends this process at the first thing that no candidate may do. It cannot be removed.

    The hook gives clear reasons and stops careless candidates. It is no protection against attacks: native code gets
    around it, and so does Python that changes the library functions that it uses. The kernel's layers (`confinement`)
    protect.
    """
    places = tuple(os.path.join(os.path.realpath(path), "") for path in readable)
    own = os.path.join(os.path.realpath(scratch), "")
    judge, spent = _forbidden, (RecursionError, MemoryError)  # local names, which a candidate cannot rebind

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
    for action, names in FORBIDDEN.items():
        if event.startswith(names):
            return f"it {action} ({event})"
    if event.startswith("socket."):
        local = event == "socket.__new__" and len(args) > 1 and args[1] == socket.AF_UNIX
        return None if local or event == "socket.gethostname" else f"it used the network ({event})"
    if event in READS and not _inside(args[0] if args else None, (own, *places)):
        return f"it looked outside its scratch directory ({event} {args[0]!r})"
    paths = args[:2] if event in ("os.rename", "os.link", "os.symlink") else args[:1]
    if event in WRITES and not all(_inside(path, (own,)) for path in paths):
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


def _inside(path: Any, places: tuple[str, ...]) -> bool:
    if path is None or isinstance(path, int):
        return True
    name = os.path.realpath(os.fsdecode(cast("str | bytes", path)))
    return any(name == place[:-1] or name.startswith(place) for place in places)


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
    """The loop of the fork server. With namespaces each child mounts a scratch of its own; else it gets a folder
    inside."""

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
            pid = confinement.clone(confinement.NAMESPACES) if self._layers.namespaces else os.fork()
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
            serve(connection, scratch, confinement.readable_roots())
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
            with contextlib.suppress(ProcessLookupError):  # a process id is not reused while its group has members
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
    however the host has ended. ``without`` names layers to leave out.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the host, which closes the control socket
    control = socket.socket(fileno=control_number)
    roots = confinement.readable_roots()
    sys.path[:] = [path for path in sys.path if any(Path(path).is_relative_to(root) for root in roots)]
    if "namespaces" not in without:
        confinement.hide_others_files(roots)
    scratch = os.path.realpath(tempfile.mkdtemp(prefix="flashevolve-"))
    try:
        user = "user" not in without and confinement.become_nobody(scratch)
        confinement.adopt_orphans()
        cache = os.path.join(scratch, "cache")
        os.environ.update(DSPY_CACHEDIR=cache, LITELLM_LOCAL_MODEL_COST_MAP="True", HOME=scratch)
        warm_up()
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
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
