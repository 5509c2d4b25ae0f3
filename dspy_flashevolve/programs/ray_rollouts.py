"""Rollouts in actors of Ray: many cores of one machine, or a cluster. Needs the extra ``ray``.

The run stays where it was: its slots, limits, budget, retries, journal and reflection. A rollout is one message to an
actor, which has the program, the metric and the LMs since it was made, and candidates and examples since they were
first asked for; what comes back is the rollout with its trace and what its LMs used. Messages that are due at once for
an actor travel in one call, and so do answers.

.. code-block:: text

    what happens in an actor                 what becomes of the rollout
    ---------------------------------------  --------------------------------------------------------------------
    an LM is turned away (429, 5xx, ...)     comes back; the run waits without the slot, and asks for all of it again
    the provider refuses for good            ends the run
    an error of the program or the metric    a failure, as without Ray
    its process, or its node, is lost        asked for again in another actor; from then on alone in its actor
    its process is lost three times, alone   a failure, ProcessDiedError
    the run is cancelled, or its time is up  cancelled in the actor, too; a metric that runs in a thread is waited for
"""

from __future__ import annotations

import asyncio
import inspect
import io
import logging
import os
import pickle
import re
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from types import FunctionType, MethodType
from typing import Any

import anyio
import cloudpickle
import dspy
from dspy.clients.base_lm import BaseLM
from dspy.clients.cache import Cache
from dspy.primitives.module import Module
from dspy.teleprompt.gepa.gepa_utils import DspyAdapter
from dspy.utils.usage_tracker import UsageTracker

from dspy_flashevolve.engine.endpoints import Endpoint, Sent
from dspy_flashevolve.engine.errors import ConfigurationError, FlashEvolveError, TransientError
from dspy_flashevolve.engine.redaction import without_secrets
from dspy_flashevolve.engine.rollouts import Rollout, metric_begins, metric_not_reached, noted
from dspy_flashevolve.engine.run import EvolutionRun
from dspy_flashevolve.engine.scheduler import current_slot
from dspy_flashevolve.programs.faults import chain_of, is_refusal, is_timeout
from dspy_flashevolve.programs.lm import CACHED_SECONDS, LanguageModels, completion_tokens_of, endpoint_of
from dspy_flashevolve.programs.metric import Metric, name_of
from dspy_flashevolve.programs.records import InexactError, RolloutRecords, kept, name_of_predictor
from dspy_flashevolve.programs.runner import Failure, ProgramRunner, Tried

logger = logging.getLogger(__name__)

DEATHS = 3
"""A rollout whose process has died so often, the last times with nothing else in it, is a failure."""
LOSSES = 10
"""A rollout that was lost so often, whoever's fault it is, waits as one that was turned away."""
CANCEL_SECONDS = 10.0
"""An actor that does not hear for so long that a rollout is cancelled is ended."""
WAIT_SECONDS = 30.0
"""So long a rollout waits for an actor where there is none, before it is turned away."""
POLL_SECONDS = 0.005
"""An actor is asked for answers so long after its last ones, unless it is told something sooner."""
LINGER_SECONDS = 0.001
"""Answers wait so long for others that they may travel with."""
RESTART_SECONDS = 30.0
"""The longest wait before an actor is made again that could not be made."""
OF_THE_CALLER = (
    "callbacks", "caller_modules", "caller_predict", "send_stream", "stream_listeners", "trace", "usage_tracker",
)  # fmt: skip
"""Settings of dspy's that mean something in the caller's process only."""
SHIPPED_VARIABLES = re.compile(r"_(API_KEY|API_BASE|BASE_URL)$")
"""Environment variables that LMs read their keys and addresses from, where their arguments do not say them."""
ITS_OWN = ("SYSTEM_ERROR", "USER_ERROR", "INTENDED_USER_EXIT")
"""Ray's words for the end of a process that what ran in it may have brought about; a node's end, and a process that
Ray ends since memory is short, have others."""
ENDS = re.compile(r"(?:worker process|node) has died.*?(?=Some common causes|$)")
"""What is worth telling of a long message of Ray's."""


class ProcessDiedError(FlashEvolveError):
    """The process in which a rollout ran has died each time that it was tried."""


@dataclass(frozen=True, slots=True)
class RayRollouts:
    """Run the rollouts, program and metric, in actors of Ray: ``AsyncGEPA(..., rollouts=RayRollouts(actors=8))``.

    Program, metric, LMs and ``dspy.settings`` are pickled and sent to each actor once. What they change in their
    process (a counter of the metric's, an LM's history) stays there, and dspy's callbacks hear nothing of rollouts;
    traces, scores, feedback, tokens and dollars come back. Reflection, and the metric's feedback for it, stay in the
    caller's process.

    If Ray is initialised already, it is used as it is; else it is started, and shut down after the run. Nodes need
    this package and the user's modules; a cluster gets them by ``ray.init(runtime_env=...)``.

    Args:
        address: "auto", "ray://host:port" or another address of a cluster, as ``ray.init`` takes it. None for this
            machine.
        actors: processes. Default: as many as there are CPUs for.
        cpus: CPUs that Ray sets aside for each.

    Raises:
        ConfigurationError: Ray is not installed, or an argument cannot work.
    """

    address: str | None = None
    actors: int | None = None
    cpus: int = 1

    def __post_init__(self) -> None:
        if self.address is not None and not isinstance(self.address, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"RayRollouts: address is {self.address!r}, expected a text, or None.")
        for name in ("actors", "cpus"):
            count = getattr(self, name)
            if count is None and name == "actors":
                continue
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ConfigurationError(f"RayRollouts: {name} is {count!r}, expected a whole number of at least 1.")
        if find_spec("ray") is None:
            raise ConfigurationError(
                "RayRollouts needs Ray, which is not installed: pip install 'dspy-flashevolve[ray]'."
            )


# What is sent.


@dataclass(frozen=True, slots=True)
class _Shipped:
    """What an actor gets when it is made.

    Args:
        programs: of each, what makes its runner; pickled one by one.
        settings: of dspy's.
        variables: of the environment, unless the actor has them.
        cache: arguments of ``dspy.configure_cache``.
        slots: rollouts at once, at most.
    """

    programs: list[bytes]
    settings: bytes
    variables: dict[str, str]
    cache: dict[str, Any]
    slots: int


@dataclass(frozen=True, slots=True)
class _Program:
    """A program with its metric; the fields are the arguments of the same names of ProgramRunner, Metric and
    DspyAdapter."""

    student: Module
    metric: Callable[..., Any]
    lock: bool
    failure_score: float
    finite: bool


@dataclass(slots=True)
class _Message:
    """What an actor is told.

    Args:
        requests: id, number of the program, of the candidate and of the example, and whether a trace is taken.
        candidates, examples: those that it does not have yet, by their numbers; examples are pickled.
        forgotten: numbers of examples that are not asked for any more.
        cancelled: ids of requests.
    """

    requests: list[tuple[int, int, int, int, bool]] = field(default_factory=list["tuple[int, int, int, int, bool]"])
    candidates: dict[int, dict[str, str]] = field(default_factory=dict[int, dict[str, str]])
    examples: dict[int, bytes] = field(default_factory=dict[int, bytes])
    forgotten: list[int] = field(default_factory=list[int])
    cancelled: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class _Answer:
    """What became of a request.

    Args:
        tried: the rollout; None where there is none.
        error: what was raised; None also where it was cancelled.
        signal: "refused" or "late", of a provider.
        metric_began: its call counts.
        used: what LMs used, as a UsageTracker has it.
    """

    tried: Tried | None = None
    error: BaseException | None = None
    signal: str = ""
    metric_began: bool = False
    used: dict[str, list[dict[str, Any]]] = field(default_factory=dict[str, "list[dict[str, Any]]"])


class _Pickler(cloudpickle.Pickler):
    """Leaves the histories of LMs behind."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, BaseLM) and getattr(obj, "history", None) and not hasattr(type(obj), "original_class"):
            state = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            if len(state) > 2 and isinstance(state[2], dict):
                return (*state[:2], {**state[2], "history": []}, *state[3:])
        return super().reducer_override(obj)


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _shippable(value: Any, name: str) -> bytes:
    """A pickle of what actors need.

    Raises:
        ConfigurationError: it has none; the message names the part of it that cannot be pickled.
    """
    try:
        return _pickled(value)
    except Exception as error:
        place, reason = _culprit(value, name, set()) or (name, error)
        raise ConfigurationError(
            f"{place} cannot be pickled ({type(reason).__name__}: {reason}), which rollouts in other processes need. "
            "Make it where it is used, or leave it out of the pickle (define __getstate__ and __setstate__)."
        ) from error


def _culprit(value: Any, name: str, seen: set[int]) -> tuple[str, Exception] | None:
    """The innermost part that cannot be pickled, and why; None where all of it can."""
    if id(value) in seen:
        return None
    seen.add(id(value))
    try:
        _pickled(value)
        return None
    except Exception as error:
        for part, one in _parts_of(value, name):
            if found := _culprit(one, part, seen):
                return found
        return name, error


def _parts_of(value: Any, name: str) -> Generator[tuple[str, Any], None, None]:
    if isinstance(value, _Program):
        yield "student", value.student
        yield f"metric {name_of(value.metric)}", value.metric
    elif isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", one) for key, one in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{name}[{number}]", one) for number, one in enumerate(value))
    elif isinstance(value, MethodType):
        yield from _parts_of(value.__self__, name)
    elif isinstance(value, partial):
        yield from ((f"{name}'s argument {number}", one) for number, one in enumerate([value.func, *value.args]))
        yield from ((f"{name}'s argument {key}", one) for key, one in value.keywords.items())
    elif isinstance(value, FunctionType):
        read = inspect.getclosurevars(value)
        for key, one in {**read.nonlocals, **read.globals}.items():
            yield f"{name}'s variable {key}", one
        for number, one in enumerate(value.__defaults__ or ()):
            yield f"{name}'s default {number}", one
    else:
        yield from ((f"{name}.{key}", one) for key, one in getattr(value, "__dict__", {}).items())


# In an actor.


@dataclass(frozen=True, slots=True)
class _Requester:
    """Stands for the step that asks, in an actor."""

    number: int
    version: int = 0
    value: float = 0.0


class _Noted:
    """Hears whether the metric was reached."""

    def __init__(self) -> None:
        self.metric_began = False

    async def metric_begins(self) -> None:
        self.metric_began = True

    def metric_not_reached(self) -> None: ...

    def given_up(self, tokens: int, cost_dollars: float) -> None: ...


class RolloutActor:
    """Makes rollouts, in a process of its own.

    Args:
        shipped: a pickled :class:`_Shipped`.
    """

    def __init__(self, shipped: bytes) -> None:
        self._runners: list[ProgramRunner] = []
        self._candidates: dict[int, dict[str, str]] = {}
        self._examples: dict[int, Any] = {}
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._done: list[tuple[int, bytes | None]] = []
        self._calls = 0
        self._given: _Shipped = cloudpickle.loads(shipped)

    async def begin(self) -> str:
        """Load what was sent; what went wrong, else nothing."""
        given = self._given
        for name, value in given.variables.items():
            os.environ.setdefault(name, value)
        with suppress(Exception):  # a folder that cannot be written here: then dspy's own
            dspy.configure_cache(**given.cache)
        self._more = asyncio.Event()
        self._run = EvolutionRun(name="rollouts", stages={"rollout": ["lm"]}, slots=given.slots)
        self._run.clock.attach()
        self._models = LanguageModels(self._run.endpoints, self._run.redaction, once=True)
        self._models.attach(asyncio.get_running_loop())
        try:
            dspy.configure(**cloudpickle.loads(given.settings))
            self._models.paced(dspy.settings.lm)
            self._runners += [self._runner_of(cloudpickle.loads(one)) for one in given.programs]
        except Exception as error:
            return self._run.redaction.of(f"{type(error).__name__}: {error}")
        return ""

    def _runner_of(self, program: _Program) -> ProgramRunner:
        adapter = DspyAdapter(program.student, program.metric, feedback_map={}, failure_score=program.failure_score)
        metric = Metric(program.metric, self._run.threads, program.lock)
        return ProgramRunner(adapter, metric, self._run.threads, self._models, program.finite)

    async def exchange(self, message: bytes) -> list[tuple[int, bytes | None]]:
        """Take requests, and wait for answers, or for the next call of this.

        Returns:
            Id of a request and its pickled :class:`_Answer`; None where it is known to be cancelled soon.
        """
        told: _Message = cloudpickle.loads(message)
        self._candidates.update(told.candidates)
        for number, example in told.examples.items():
            self._examples[number] = cloudpickle.loads(example)
        for number in told.forgotten:
            self._examples.pop(number, None)
        for request in told.requests:
            self._scopes[request[0]] = anyio.CancelScope()
            task = asyncio.create_task(self._made(*request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        for number in told.cancelled:
            if number in self._scopes:
                self._scopes[number].cancel()
                self._done.append((number, None))
        self._calls += 1
        mine = self._calls
        self._more.set()  # who waits here since an earlier call goes home
        while not self._done and mine == self._calls:
            self._more.clear()
            await self._more.wait()
        if self._done:
            await asyncio.sleep(LINGER_SECONDS)
        done, self._done = self._done, []
        return done

    async def _made(self, number: int, program: int, candidate: int, example: int, traced: bool) -> None:
        runner, texts, notes, answer = self._runners[program], self._candidates[candidate], _Noted(), _Answer()
        usage = UsageTracker()

        async def call() -> None:
            slot = current_slot()
            with anyio.CancelScope() as bound:
                if slot is not None:
                    slot.bound = bound
                answer.tried = await runner.tried(texts, self._examples[example], traced, usage)
            if bound.cancelled_caught:
                raise TransientError("no answer in time to a request of the program's", of_request=True)

        with self._scopes[number], dspy.context(**self._models.settings, usage_tracker=usage), noted(notes):
            try:
                await self._run.scheduler.run("rollout", _Requester(number), call)
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                errors = list(chain_of(error)) if isinstance(error, TransientError) else []
                answer.signal = "refused" if any(map(is_refusal, errors)) else ""
                answer.signal = answer.signal or ("late" if any(map(is_timeout, errors)) else "")
                answer.error = _sendable(error)
        del self._scopes[number]
        answer.metric_began, answer.used = notes.metric_began, dict(usage.usage_data)
        try:
            packed = _packed(answer, runner.records.predictors(texts))
        except Exception as error:
            said = RuntimeError(f"what came of a rollout cannot be sent: {type(error).__name__}: {error}")
            packed = cloudpickle.dumps(_Answer(error=said, metric_began=answer.metric_began, used=answer.used))
        self._done.append((number, packed))
        self._more.set()


def _packed(answer: _Answer, known: dict[str, Any]) -> bytes:
    """An answer, pickled: the predictors of its trace by their names, the example left out."""
    tried = answer.tried
    if tried is None:
        return cloudpickle.dumps(answer)
    rollout, failure = tried.rollout, tried.failure
    trajectory: Any = rollout.trajectory
    if trajectory is not None:
        steps = [(_named(predictor, known), inputs, output) for predictor, inputs, output in trajectory["trace"]]
        trajectory = {**trajectory, "example": None, "trace": steps}
    failure = None if failure is None else replace(failure, error=_sendable(failure.error))
    try:
        sent = Tried(replace(rollout, trajectory=trajectory), failure)
        return cloudpickle.dumps(replace(answer, tried=sent))
    except Exception as error:
        logger.warning("An output or a trace cannot be pickled (%s): what is text of it is kept.", error)
    output = kept(rollout.output, cloudpickle.dumps)
    if trajectory is not None:
        trajectory = {
            "example": None,
            "prediction": output if trajectory["prediction"] is rollout.output else None,
            "trace": [
                (name, {key: kept(one, cloudpickle.dumps) for key, one in inputs.items()}, kept(out, cloudpickle.dumps))
                for name, inputs, out in trajectory["trace"]
                if isinstance(name, str)
            ],
            "score": kept(trajectory["score"], cloudpickle.dumps),
        }
    rollout = replace(rollout, output=output, trajectory=trajectory)
    return cloudpickle.dumps(replace(answer, tried=Tried(rollout, failure)))


def _named(predictor: Any, known: dict[str, Any]) -> Any:
    """The name of a predictor; itself where the student has none like it."""
    try:
        return name_of_predictor(predictor, known)
    except InexactError:
        return predictor


def _sendable(error: BaseException) -> Any:
    """An error that arrives: itself, or one that says the same."""
    try:
        arrived = cloudpickle.loads(cloudpickle.dumps(error))
        if type(arrived) is type(error) and str(arrived) == str(error):
            return error
    except Exception:
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")


# In the caller's process.


class _LostError(Exception):
    """The actor is lost.

    Args:
        its_own: what ran in it may be the reason.
    """

    def __init__(self, said: str, its_own: bool) -> None:
        super().__init__(said)
        self.its_own = its_own


@dataclass(eq=False, slots=True)
class _Pending:
    """A request that an actor has."""

    answer: _Answer | None = None
    lost: _LostError | None = None
    heard: anyio.Event = field(default_factory=anyio.Event)
    done: anyio.Event = field(default_factory=anyio.Event)

    def end(self) -> None:
        self.heard.set()
        self.done.set()


@dataclass(eq=False, slots=True)
class _Actor:
    """An actor.

    Args:
        load: rollouts that have their place in it.
        reserved: it takes no more of them, since one is to run alone.
        calls: of ``exchange``, that have not come back.
        has: numbers of candidates and of examples that it was sent.
    """

    handle: Any
    ready: bool = False
    is_lost: bool = False
    load: int = 0
    reserved: bool = False
    calls: int = 0
    is_due: bool = False
    next: _Message = field(default_factory=_Message)
    pending: dict[int, _Pending] = field(default_factory=dict[int, _Pending])
    candidates: set[int] = field(default_factory=set[int])
    examples: set[int] = field(default_factory=set[int])


class Actors:
    """The actors of one run.

    Args:
        options: what the user asks for.
        run: whose rollouts they make.
        settings: dspy's, in which they are made.

    Raises:
        ConfigurationError: dspy's settings cannot be pickled.
    """

    def __init__(self, options: RayRollouts, run: EvolutionRun, settings: Mapping[str, Any]) -> None:
        self._options, self._run, self._lm = options, run, settings.get("lm")
        sent = {name: one for name, one in settings.items() if name not in OF_THE_CALLER}
        self._settings = _shippable(sent, "dspy.settings")
        self._programs: list[bytes] = []
        self._ray: Any = None
        self._made: Any = None
        self._shipped: Any = None
        self._actors: list[_Actor] = []
        self._failed_starts = 0
        self._broken = ""
        self._closed = False
        self._changed = anyio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._requests = self._numbers = 0
        self._candidates: dict[tuple[tuple[str, str], ...], int] = {}
        self._examples: dict[int, tuple[weakref.ref[Any], int, bytes]] = {}

    def program(self, adapter: DspyAdapter, metric_lock: bool, finite: bool = False) -> InActors:
        """Where the rollouts of a program are made; before :meth:`opened`.

        Raises:
            ConfigurationError: program or metric cannot be pickled.
        """
        program = _Program(adapter.student, adapter.metric_fn, metric_lock, adapter.failure_score, finite)
        self._programs.append(_shippable(program, "program"))
        lms = [getattr(one, "lm", None) or self._lm for one in adapter.student.predictors()]
        names = sorted({endpoint_of(lm) for lm in lms if lm is not None}) or ["rollouts"]
        return InActors(self, len(self._programs) - 1, adapter, names[0])

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None, None]:
        """The actors are there inside; after it, none is.

        Raises:
            ConfigurationError: there are fewer CPUs than actors need, or they cannot load what they are sent.
        """
        self._loop = asyncio.get_running_loop()
        threads = self._run.threads
        self._ray = await threads.run(_import_ray)
        with anyio.CancelScope(shield=True):  # what has begun there would not be ended
            await threads.run(_connect, self._ray, self._options.address)
        try:
            count = self._count(int((await threads.run(self._ray.cluster_resources)).get("CPU", 0)))
            await threads.run(self._ship)
            for _ in range(count):
                self._begin()
            await self._first_is_ready()
            yield
        finally:
            self._closed = True
            with anyio.CancelScope(shield=True):
                await threads.run(self._end)

    def _count(self, there: int) -> int:
        options = self._options
        count = options.actors or there // options.cpus
        if not count or count * options.cpus > there:
            raise ConfigurationError(
                f"RayRollouts: actors={options.actors} with cpus={options.cpus} each, but there are {there} CPUs: "
                "they would wait for ever. Give fewer actors or cpus, or ray.init(num_cpus=...) before."
            )
        if count > self._run.slots:
            logger.warning(
                "There are %d actors, but at most %d rollouts at once: give num_threads=%d or more.",
                count, self._run.slots, count,
            )  # fmt: skip
        return count

    def _ship(self) -> None:
        cache: Any = dspy.cache
        kept_by = ("enable_disk_cache", "enable_memory_cache", "disk_cache_dir")
        shipped = _Shipped(
            programs=self._programs,
            settings=self._settings,
            variables={name: value for name, value in os.environ.items() if SHIPPED_VARIABLES.search(name)},
            cache={name: getattr(cache, name) for name in kept_by} if type(cache) is Cache else {},
            slots=self._run.slots,
        )
        self._shipped = self._ray.put(cloudpickle.dumps(shipped))
        options = {"num_cpus": self._options.cpus, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        self._made = self._ray.remote(**options)(RolloutActor)

    def _end(self) -> None:
        for actor in list(self._actors):
            actor.is_lost = True
            self._kill(actor)
        _disconnect(self._ray)

    def _kill(self, actor: _Actor) -> None:
        with suppress(Exception):  # it is gone already
            self._ray.kill(actor.handle, no_restart=True)

    # Beginnings and ends of actors. On the loop.

    def _begin(self) -> None:
        if self._closed:
            return
        try:
            actor = _Actor(self._made.remote(self._shipped))
            self._when_done(actor.handle.begin.remote(), partial(self._has_begun, actor))
        except Exception as error:  # the connection to the cluster is lost
            self._failed_starts += 1
            logger.warning("No actor could be made: %s", self._said(error))
            self._begin_again()
        else:
            self._actors.append(actor)

    def _begin_again(self) -> None:
        assert self._loop is not None
        self._loop.call_later(min(RESTART_SECONDS, 2.0**self._failed_starts - 1), self._begin)

    def _when_done(self, ref: Any, call: Callable[[Any], None]) -> None:
        """Call on the loop when an object is there, with its future."""
        loop = self._loop
        assert loop is not None

        def done(future: Any) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(call, future)

        ref.future().add_done_callback(done)

    def _has_begun(self, actor: _Actor, future: Any) -> None:
        error = future.exception() or future.result()
        if not error:
            actor.ready, self._failed_starts = True, 0
            self._tell()
            return
        if isinstance(error, str) or getattr(error, "actor_init_failed", False):
            self._broken = self._said(error)
        self._failed_starts += 1
        if not self._closed:
            logger.warning("An actor could not begin: %s", self._said(error))
        self._lose(actor, error)

    async def _first_is_ready(self) -> None:
        """Wait for an actor; the others come when they come."""
        while not any(actor.ready for actor in self._actors):
            if self._broken:
                raise ConfigurationError(
                    f"The actors cannot load the program, its metric or its LMs: {self._broken}. Their modules must be "
                    "importable in the actors: run where they lie, or pass them by ray.init(runtime_env=...)."
                )
            changed = self._changed
            with anyio.move_on_after(WAIT_SECONDS) as waited:
                await changed.wait()
            if waited.cancelled_caught:
                logger.warning("No actor has begun yet: the cluster may have no free CPUs. Waiting for them.")

    async def all_ready(self) -> None:
        """Wait until every actor has begun; rollouts do not need that."""
        while not all(actor.ready for actor in self._actors):
            await self._changed.wait()

    def _lose(self, actor: _Actor, error: Any, killed: bool = False) -> None:
        """An actor is no more: what was in it is to be asked for again, and another is made in its place."""
        if actor.is_lost:
            return
        actor.is_lost = True
        self._actors.remove(actor)
        self._kill(actor)
        if self._closed:
            said = "the run has ended"
        else:
            said = self._said(error)
            if actor.pending:
                logger.warning(
                    "An actor is lost with %d rollouts, which are asked for again: %s", len(actor.pending), said
                )
            self._begin_again()
        its_own = not killed and actor.ready and any(word in str(error) for word in ITS_OWN)
        for pending in actor.pending.values():
            pending.lost = _LostError(said, its_own)
            pending.end()
        actor.pending.clear()
        self._tell()

    def _said(self, error: Any) -> str:
        said = " ".join(str(error).split())
        ends = ENDS.search(said)
        return self._run.redaction.of((said if ends is None else ends[0].strip())[:500])

    def endpoint(self, name: str) -> Endpoint:
        """Who answers the LMs' requests, as the run knows it."""
        return self._run.endpoints.endpoint(name)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # A rollout's place.

    @asynccontextmanager
    async def place(self, alone: bool) -> AsyncGenerator[_Actor, None]:
        """The actor that has the least to do; with ``alone`` one that has nothing else to do.

        Raises:
            TransientError: there has been no actor for long.
        """
        actor = await self._free(alone)
        actor.load += 1
        actor.reserved = alone
        try:
            while alone and actor.load > 1 and not actor.is_lost:
                await self._changed.wait()
            yield actor
        finally:
            actor.load -= 1
            actor.reserved = actor.reserved and not alone
            self._tell()

    async def _free(self, alone: bool) -> _Actor:
        while True:
            changed, ready = self._changed, [actor for actor in self._actors if actor.ready]
            free = [actor for actor in ready if not actor.reserved]
            if free and (not alone or len(free) > 1 or len(ready) == 1):
                return min(free, key=lambda actor: actor.load)
            with anyio.move_on_after(WAIT_SECONDS) as waited:
                await changed.wait()
            if waited.cancelled_caught and not any(actor.ready for actor in self._actors):
                raise TransientError("there is no actor of Ray's to run rollouts in")

    # A rollout's way to its actor and back.

    async def ask(self, actor: _Actor, program: int, candidate: dict[str, str], example: Any, traced: bool) -> _Answer:
        """Have a rollout made.

        Raises:
            _LostError: the actor is lost.
        """
        texts, (number, pickled) = self._number_of(candidate), self._sent(example)
        self._requests += 1
        mine, pending, told = self._requests, _Pending(), actor.next
        if actor.is_lost:
            raise _LostError("it was lost before it was asked", its_own=False)
        if texts not in actor.candidates:
            actor.candidates.add(texts)
            told.candidates[texts] = candidate
        if number not in actor.examples:
            actor.examples.add(number)
            told.examples[number] = pickled
        actor.pending[mine] = pending
        told.requests.append((mine, program, texts, number, traced))
        self._send_soon(actor)
        cancelled: BaseException | None = None
        try:
            await pending.done.wait()
        except anyio.get_cancelled_exc_class() as error:
            cancelled = error
            with anyio.CancelScope(shield=True):
                await self._cancel(actor, mine, pending)
        if pending.answer is None:
            raise cancelled or pending.lost or AssertionError("a request has ended without an answer")
        if cancelled is not None and pending.answer.tried is None:
            pending.answer.error = cancelled
        return pending.answer

    async def _cancel(self, actor: _Actor, number: int, pending: _Pending) -> None:
        """Give a rollout up, and wait for its end: a metric that has begun in a thread goes on to its own."""
        actor.next.cancelled.append(number)
        self._send_soon(actor)
        with anyio.move_on_after(CANCEL_SECONDS):
            await pending.heard.wait()
        if not pending.heard.is_set():
            self._lose(actor, "it did not hear of a cancellation", killed=True)
        await pending.done.wait()

    def _send_soon(self, actor: _Actor) -> None:
        if not actor.is_due and self._loop is not None:
            actor.is_due = True
            self._loop.call_soon(self._send, actor)

    def _send(self, actor: _Actor) -> None:
        """All that is due for an actor goes in one call."""
        actor.is_due = False
        if actor.is_lost:
            return
        message, actor.next = actor.next, _Message()
        actor.calls += 1
        try:
            self._when_done(actor.handle.exchange.remote(cloudpickle.dumps(message)), partial(self._hear, actor))
        except Exception as error:  # the connection to the cluster is lost
            self._lose(actor, error)

    def _hear(self, actor: _Actor, future: Any) -> None:
        actor.calls -= 1
        if actor.is_lost:
            return
        error = future.exception()
        if error is not None:
            self._lose(actor, error)
            return
        for number, packed in future.result():
            pending = actor.pending.get(number)
            if pending is None:
                continue
            if packed is None:
                pending.heard.set()
                continue
            del actor.pending[number]
            try:
                pending.answer = cloudpickle.loads(packed)
            except Exception as error:
                pending.answer = _Answer(error=error, metric_began=True)
            pending.end()
        if actor.pending and not actor.calls:
            assert self._loop is not None
            self._loop.call_later(POLL_SECONDS, self._poll, actor)

    def _poll(self, actor: _Actor) -> None:
        if actor.pending and not actor.calls:
            self._send_soon(actor)

    def _number_of(self, candidate: dict[str, str]) -> int:
        key = tuple(sorted(candidate.items()))
        if key not in self._candidates:
            self._candidates[key] = len(self._candidates)
        return self._candidates[key]

    def _sent(self, example: Any) -> tuple[int, bytes]:
        """Number and pickle of an example."""
        known = self._examples.get(id(example))
        if known is not None and known[0]() is example:
            return known[1:]
        self._numbers += 1
        number, pickled = self._numbers, _shippable(example, "example")
        self._examples[id(example)] = weakref.ref(example, partial(self._forget, id(example), number)), number, pickled
        return number, pickled

    def _forget(self, key: int, number: int, _: Any) -> None:
        """An example is no more; that is heard in any thread."""
        with suppress(RuntimeError):  # the loop has ended
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._forget_here, key, number)

    def _forget_here(self, key: int, number: int) -> None:
        if (known := self._examples.get(key)) is not None and known[1] == number:
            del self._examples[key]
        for actor in list(self._actors):
            if number in actor.examples:
                actor.examples.discard(number)
                actor.next.forgotten.append(number)


class InActors:
    """Makes the rollouts of one program in the actors of a run; a :class:`~.runner.Elsewhere`.

    Args:
        actors: of the run.
        number: of the program.
        adapter: of the program.
        endpoint: whom its LMs ask: a rollout counts as one request there.
    """

    def __init__(self, actors: Actors, number: int, adapter: DspyAdapter, endpoint: str) -> None:
        self._actors, self._number, self._adapter, self._endpoint = actors, number, adapter, endpoint
        self._records = RolloutRecords(adapter.student)

    async def tried(
        self, candidate: dict[str, str], example: dspy.Example, capture_traces: bool, usage: UsageTracker
    ) -> Tried:
        """See :class:`~.runner.Elsewhere`.

        Raises:
            TransientError: the provider asks to come back later, or there is no actor.
            RunAbortedError: the provider refuses for good.
            Exception: what the metric returned is no score.
        """
        await metric_begins()
        deaths = losses = 0
        reached = False
        try:
            while True:
                try:
                    async with self._actors.place(alone=deaths > 0) as actor:
                        reached = True  # as long as nobody says otherwise
                        answer = await self._asked(actor, candidate, example, capture_traces)
                    break
                except _LostError as error:
                    reached, losses, deaths = False, losses + 1, deaths + error.its_own
                    if deaths >= DEATHS:
                        return self._died(error, capture_traces)
                    if losses >= LOSSES:
                        raise TransientError(f"the actor was lost {losses} times: {error}", of_request=True) from error
            reached = answer.metric_began
            for model, entries in answer.used.items():
                usage.usage_data[model].extend(entries)
            if answer.error is not None:
                raise answer.error
        except anyio.get_cancelled_exc_class():
            if not reached:
                metric_not_reached()
            raise
        assert answer.tried is not None
        return self._read(answer.tried, candidate, example)

    async def _asked(self, actor: _Actor, candidate: dict[str, str], example: Any, traced: bool) -> _Answer:
        """A rollout is a request at its endpoint, whose limit hears what became of it."""
        endpoint, sent = self._actors.endpoint(self._endpoint), Sent()
        await endpoint.admit(current_slot())
        endpoint.send(sent)
        began = anyio.current_time()
        try:
            answer = await self._actors.ask(actor, self._number, candidate, example, traced)
        finally:
            endpoint.leave(sent)
        if answer.signal == "refused":
            endpoint.refused(sent, getattr(answer.error, "retry_after_seconds", None))
        elif answer.signal == "late":
            endpoint.timed_out(sent)
        elif answer.tried is not None:
            written = completion_tokens_of(answer.used)
            if written or anyio.current_time() - began > CACHED_SECONDS:
                endpoint.finished(sent, written)
        return answer

    def _died(self, error: _LostError, traced: bool) -> Tried:
        failure = ProcessDiedError(f"the process that ran the program and its metric has died {DEATHS} times")
        logger.warning("Example scored as a failure: %s: %s (%s)", type(failure).__name__, failure, error)
        rollout = Rollout(
            None if traced else dspy.Prediction(),
            self._adapter.failure_score,
            error=f"The program failed: {type(failure).__name__}: {failure}",
        )
        return Tried(rollout, Failure(failure, (type(failure).__qualname__,), refused=False))

    def _read(self, tried: Tried, candidate: dict[str, str], example: Any) -> Tried:
        trajectory: Any = tried.rollout.trajectory
        if trajectory is None:
            return tried
        known = self._records.predictors(candidate)
        steps = [
            (known[step] if isinstance(step, str) else step, inputs, output)
            for step, inputs, output in trajectory["trace"]
        ]
        trajectory = {**trajectory, "example": example, "trace": steps}
        return replace(tried, rollout=replace(tried.rollout, trajectory=trajectory))


_CONNECTING = threading.Lock()
_CONNECTED = {"runs": 0, "ours": False}
"""Runs that use Ray, and whether it was started for them."""


def _import_ray() -> Any:
    import ray  # pyright: ignore[reportMissingImports]

    return ray


def _connect(ray: Any, address: str | None) -> None:
    with _CONNECTING:
        if not _CONNECTED["runs"] and not ray.is_initialized():
            if address is None:
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                ray.init("local", include_dashboard=False, logging_level=logging.ERROR)
            else:
                try:
                    ray.init(address, logging_level=logging.ERROR)
                except Exception as error:
                    raise ConfigurationError(
                        f"RayRollouts: no cluster could be reached at address={without_secrets(address)!r}: {error}"
                    ) from error
            _CONNECTED["ours"] = True
        _CONNECTED["runs"] += 1


def _disconnect(ray: Any) -> None:
    with _CONNECTING:
        _CONNECTED["runs"] -= 1
        if _CONNECTED["ours"] and not _CONNECTED["runs"]:
            _CONNECTED["ours"] = False
            ray.shutdown()
