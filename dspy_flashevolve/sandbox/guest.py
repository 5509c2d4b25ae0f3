"""The child's side: read a job, run the candidate's code on it, answer. The host trusts nothing that happens here.

The child has the candidate's source, the inputs of one example and the memory. It has no label, score, metric or key:
its LM sends each call to the host.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable
from io import TextIOWrapper
from typing import Any, cast

import dspy
from dspy.clients.base_lm import BaseLM
from dspy.utils.exceptions import AdapterParseError, LMError
from pydantic_core import to_jsonable_python

from dspy_flashevolve.sandbox.contract import HEADER, decode, encode

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
        forbid(
            scratch, readable, lambda attempt: wire.end({"kind": "failed", "reason": "forbidden", "message": attempt})
        )
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

    Args:
        scratch: the directory where it may write.
        readable: directories where it may read.
        end: called with a description of what was tried; does not return.
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
