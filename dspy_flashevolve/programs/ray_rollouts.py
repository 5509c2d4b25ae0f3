"""Rollouts in actors of Ray: many cores of one machine, or a cluster. Needs the extra ``ray``.

The run stays where it was: its slots, limits, budget, retries, journal and reflection. A rollout is one call of an
actor, which has the program, the metric and the LMs since it was made; what comes back is the rollout with its trace
and what its LMs used. Ray starts an actor again that it has lost.

.. code-block:: text

    what happens in an actor                 what becomes of the rollout
    ---------------------------------------  --------------------------------------------------------------------
    an LM is turned away (429, 5xx, ...)     comes back; the run waits without the slot, and asks for all of it again
    the provider refuses for good            ends the run
    an error of the program or the metric    a failure, as without Ray
    its process, or its node, is lost        asked for again, in an actor that makes one such rollout at a time
    its process is lost three times          a failure, ProcessDiedError
    the run is cancelled, or its time is up  cancelled in the actor, too; a metric that runs in a thread is waited for
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import anyio
import cloudpickle
import dspy

from dspy_flashevolve.engine.errors import ConfigurationError, FlashEvolveError, TransientError, check_counts
from dspy_flashevolve.engine.events import ActorLost
from dspy_flashevolve.engine.provider import Attempts, Provider
from dspy_flashevolve.engine.redaction import without_secrets
from dspy_flashevolve.engine.requests import Rollout, record_metric_call, recording_rollout, retract_metric_call
from dspy_flashevolve.engine.run import EvolutionRun
from dspy_flashevolve.engine.scheduler import SLOT_SETTING, current_slot
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.programs.building import StudentAdapter
from dspy_flashevolve.programs.faults import chain_of, is_refusal, is_timeout
from dspy_flashevolve.programs.lm import CACHED_SECONDS, LanguageModels
from dspy_flashevolve.programs.metric import Metric
from dspy_flashevolve.programs.mistakes import Failure
from dspy_flashevolve.programs.program import Attempt, MakeRollout, ProgramRunner
from dspy_flashevolve.programs.records import RolloutRecords, as_writable
from dspy_flashevolve.programs.servers import endpoint_of
from dspy_flashevolve.programs.usage import COUNTED_BY, Usage, completion_tokens_of, counting_usage

logger = logger_named(__name__)

DEATHS = 3
"""A rollout whose process has died so often is a failure: the first time may be the node's or a neighbour's doing, the
second and third time it ran alone."""
CANCEL_SECONDS = 10.0
"""An actor that takes no cancellation for so long is ended, since the program blocks its loop. A round number: what
else runs in the actor is lost with it, and the run waits for so long."""
WAIT_SECONDS = 30.0
"""Where no actor runs for so long, the log says so. A round number: actors that load large packages need several
seconds, and a user who waits longer without a word looks for a mistake."""
SPARE_CALLS = 8
"""Calls that an actor takes beside those for rollouts: cancellations and ``load``. A round number; others wait."""
MOST_DEPTH = 6
"""Attributes within attributes in which the part that cannot be pickled is looked for. Not tuned."""
SHOWN_CHARACTERS = 500
"""Of Ray's messages, which hold whole tracebacks, so much is shown."""
OF_THE_CALLER = (
    "callbacks", "caller_modules", "caller_predict", "send_stream", "stream_listeners", "trace", "usage_tracker",
    COUNTED_BY, SLOT_SETTING,
)  # fmt: skip
"""Settings of dspy's that mean something in the caller's process only."""
SHIPPED_VARIABLES = re.compile(r"_(API_KEY|API_BASE|BASE_URL)$")
"""Environment variables that LMs read their keys and addresses from, where their arguments do not say them."""


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
        check_counts(actors=self.actors, cpus=self.cpus)
        if find_spec("ray") is None:
            raise ConfigurationError(
                "RayRollouts needs Ray, which is not installed: pip install 'dspy-flashevolve[ray]'."
            )


@dataclass(slots=True)
class RolloutAnswer:
    """What became of a rollout, which tells here of its metric's call.

    Args:
        attempt: the rollout; None where there is none.
        error: what was raised; None also where it was cancelled.
        is_refused: a provider asked for fewer requests, or gave no answer in time, which its endpoint's limit follows.
        metric_began: its call counts.
        used: what LMs used, as a UsageTracker has it.
        is_lost: its actor is lost.
    """

    attempt: Attempt | None = None
    error: BaseException | None = None
    is_refused: bool = False
    metric_began: bool = False
    used: dict[str, list[dict[str, Any]]] = field(default_factory=dict[str, "list[dict[str, Any]]"])
    is_lost: bool = False

    async def record_metric_call(self) -> None:
        self.metric_began = True

    def retract_metric_call(self) -> None: ...

    def record_wasted_cost(self, tokens: int, cost_dollars: float) -> None: ...


class RolloutActor:
    """Makes rollouts, in a process of its own, once it has its programs, see :meth:`load`."""

    def __init__(self) -> None:
        self._runners: list[ProgramRunner] = []
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._step: Any = SimpleNamespace(number=0, version=0, value=0.0)  # stands for the one that asks

    async def load(self, programs: list[bytes], settings: bytes, variables: dict[str, str], slots: int) -> str:
        """Load what is sent, unless that is done, and return what went wrong, else nothing."""
        if self._runners:
            return ""
        for name, value in variables.items():
            os.environ.setdefault(name, value)
        run = self._run = EvolutionRun(name="rollouts", stages={"rollout": ["lm"]}, slots=slots)
        run.clock.attach()
        self._models = LanguageModels(run.providers, run.redaction, once=True)
        self._models.attach(asyncio.get_running_loop())
        try:
            dspy.configure(**cloudpickle.loads(settings))
            self._models.pace(dspy.settings.lm)
            for program in programs:
                student, metric, failure_score, lock, finite = cloudpickle.loads(program)
                adapter = StudentAdapter(student, metric, feedback_map={}, failure_score=failure_score)
                scorer = Metric(metric, run.threads, lock)
                self._runners.append(ProgramRunner(adapter, scorer, run.threads, self._models, finite))
        except Exception as error:
            return run.redaction.redact(f"{type(error).__name__}: {error}")
        return ""

    async def rollout(
        self, number: int, program: int, candidate: dict[str, str], example: bytes, traced: bool
    ) -> bytes:
        """Make a rollout on a pickled example, and return a pickled :class:`RolloutAnswer`."""
        if not self._runners:  # begun again, which the caller does not know yet
            return cloudpickle.dumps(RolloutAnswer(is_lost=True))
        runner, answer = self._runners[program], RolloutAnswer()

        async def call() -> None:
            slot = current_slot()
            with anyio.CancelScope() as bound:
                if slot is not None:
                    slot.time_scope = bound
                answer.attempt = await runner.evaluate_once(candidate, cloudpickle.loads(example), traced, usage)
            if bound.cancelled_caught:
                raise TransientError("no answer in time to a request of the program's", of_request=True)

        scope = self._scopes.setdefault(number, anyio.CancelScope())
        with scope, dspy.context(**self._models.settings), counting_usage() as usage, recording_rollout(answer):
            try:
                await self._run.scheduler.run("rollout", self._step, call)
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                answer.is_refused = isinstance(error, TransientError) and any(
                    is_refusal(cause) or is_timeout(cause) for cause in chain_of(error)
                )
                answer.error = _sendable(error)
        del self._scopes[number]
        answer.used = {model: list(entries) for model, entries in usage.usage_data.items()}
        if answer.attempt is not None:
            rollout, failure = answer.attempt.rollout, answer.attempt.failure
            # A trace travels as text where that is the same, since signatures are costly to pickle.
            output, trajectory = rollout.output, runner.records.trace(candidate, rollout)
            if trajectory is None:
                output = as_writable(output, cloudpickle.dumps)
                trajectory = _picklable({**rollout.trajectory, "example": None})
            failure = None if failure is None else replace(failure, error=_sendable(failure.error))
            rollout = replace(rollout, output=output, trajectory=trajectory)
            answer.attempt = replace(answer.attempt, rollout=rollout, failure=failure)
        return cloudpickle.dumps(answer)

    async def cancel(self, number: int) -> None:
        """Cancel a rollout, whose call then returns. One that has not arrived yet is cancelled when it does."""
        self._scopes.setdefault(number, anyio.CancelScope()).cancel()


def _picklable(value: Any) -> Any:
    """Replace the parts of a value that cannot be pickled by texts."""
    if type(value) is dict:
        return {key: _picklable(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_picklable, value))
    return as_writable(value, cloudpickle.dumps)


def _sendable(error: BaseException) -> Any:
    """An error that arrives: itself, or one that says the same."""
    with suppress(Exception):
        arrived = cloudpickle.loads(cloudpickle.dumps(error))
        if type(arrived) is type(error) and str(arrived) == str(error):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _pickled(value: Any, name: str) -> bytes:
    """Pickle what actors need.

    Raises:
        ConfigurationError: it cannot be; the message names the part of it that is the reason, as far as attributes,
            items and closures lead to it.
    """
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        parts: Any = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        if inspect.isfunction(value):
            read = inspect.getclosurevars(value)
            parts = {**read.nonlocals, **read.globals}
        for key, part in parts.items() if name.count(".") < MOST_DEPTH else ():
            _pickled(part, f"{name}.{key}")
        raise ConfigurationError(
            f"{name} cannot be pickled ({type(error).__name__}: {error}), which rollouts in other processes need. Make "
            "it where it is used, or leave it out of the pickle (define __getstate__ and __setstate__)."
        ) from error


@dataclass(eq=False, slots=True)
class _Actor:
    """An actor: Ray's handle, what it answers when it is ready (what went wrong, else nothing), the rollouts in it."""

    handle: Any
    ready: asyncio.Future[str]
    running: int = 0


class Actors:
    """The actors of one run."""

    def __init__(self, options: RayRollouts, run: EvolutionRun, settings: Mapping[str, Any]) -> None:
        self._options, self._run, self._lm = options, run, settings.get("lm")
        shipped = {name: setting for name, setting in settings.items() if name not in OF_THE_CALLER}
        self._settings = _pickled(shipped, "dspy.settings")
        self._programs: list[bytes] = []
        self._actors: list[_Actor] = []
        self._suspects: list[_Actor] = []
        """At most one: it makes one rollout at a time, of those that may have ended the process in which they ran."""
        self._suspects_turn = anyio.Lock()
        self._calls = 0
        self._ray: Any = None
        self._create: Any = None
        self._shipped: list[Any] = []

    def rollout_maker(self, adapter: StudentAdapter, metric_lock: bool, finite: bool = False) -> MakeRollout:
        """Return what makes the rollouts of a program; before :meth:`opened`."""
        parts = {"student": adapter.student, "metric": adapter.metric_fn}
        for name, part in parts.items():
            _pickled(part, f"program.{name}")  # an error names the part
        program = *parts.values(), adapter.failure_score, metric_lock, finite
        self._programs.append(_pickled(program, "program"))
        lms = [getattr(predictor, "lm", None) or self._lm for predictor in adapter.student.predictors()]
        names = sorted({endpoint_of(lm) for lm in lms if lm is not None}) or ["rollouts"]
        provider = self._run.providers.provider(names[0], as_one=True)
        return partial(self._attempt, len(self._programs) - 1, adapter, RolloutRecords(adapter.student), provider)

    # Beginning and end.

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None, None]:
        """The actors are there inside; after it, none is."""
        import ray  # pyright: ignore[reportMissingImports]

        threads, self._ray = self._run.threads, ray
        is_ours = not ray.is_initialized()
        try:
            with anyio.CancelScope(shield=True):  # what has begun there would not be ended
                if is_ours:
                    await threads.run(self._connect)
            for _ in range(await threads.run(self._ship)):
                self._start(self._actors, self._options.cpus)
            await self._free(self._actors)  # the others come when they come
            yield
        finally:
            actors = [*self._actors, *self._suspects]
            for actor in actors:
                actor.ready.cancel()
            with anyio.CancelScope(shield=True):
                for actor in actors:
                    with suppress(Exception):  # it is gone already
                        await threads.run(ray.kill, actor.handle, no_restart=True)
                if is_ours:
                    await threads.run(ray.shutdown)

    def _connect(self) -> None:
        address = self._options.address or "local"
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        dashboard = None if self._options.address else False
        init = partial(self._ray.init, address, include_dashboard=dashboard, logging_level=logging.ERROR)
        try:
            try:
                init()
            except ConnectionAbortedError:  # a busy head has not begun its server for this client in time
                init()
        except Exception as error:
            at = without_secrets(address)
            raise ConfigurationError(f"RayRollouts: Ray could not be reached at address={at!r}: {error}") from error

    def _ship(self) -> int:
        """Send what actors need, and say how many there are to be."""
        cpus, there = self._options.cpus, int(self._ray.cluster_resources().get("CPU", 0))
        count = self._options.actors or there // cpus
        if not count or count * cpus > there:
            raise ConfigurationError(
                f"RayRollouts: actors={self._options.actors} with cpus={cpus} each, but there are {there} CPUs: they "
                "would wait for ever. Give fewer actors or cpus, or ray.init(num_cpus=...) before."
            )
        variables = {name: value for name, value in os.environ.items() if SHIPPED_VARIABLES.search(name)}
        self._shipped = list(map(self._ray.put, (self._programs, self._settings, variables, self._run.slots)))
        calls = self._run.slots + SPARE_CALLS
        actor = self._ray.remote(max_restarts=-1, max_concurrency=calls, scheduling_strategy="SPREAD")(RolloutActor)
        self._create = lambda cpus: actor.options(num_cpus=cpus).remote()
        return count

    def _start(self, actors: list[_Actor], cpus: int) -> None:
        handle = self._create(cpus)
        actors.append(_Actor(handle, self._ready(handle)))

    def _ready(self, handle: Any) -> asyncio.Future[str]:
        """What an actor answers when it is ready; where it is lost before, Ray starts it and asks again."""
        return _reply_of(handle.load.options(max_task_retries=-1).remote(*self._shipped))

    async def all_ready(self) -> None:
        """Wait until every actor has begun; rollouts do not need that."""
        await asyncio.wait([actor.ready for actor in self._actors])

    async def _free(self, actors: list[_Actor]) -> _Actor:
        """The actor that has the least to do, as soon as one is ready."""
        while True:
            begun = [actor for actor in actors if actor.ready.done()]
            problems = {actor: actor.ready.exception() or actor.ready.result() for actor in begun}
            if ready := [actor for actor in begun if not problems[actor]]:
                return min(ready, key=lambda actor: actor.running)
            if not (beginning := [actor.ready for actor in actors if actor not in problems]):
                problem = self._shortened(problems[actors[0]])
                raise ConfigurationError(
                    f"The actors cannot load the program, its metric or its LMs: {problem}. "
                    "Their modules must be importable in the actors: run where they lie, or pass them by "
                    "ray.init(runtime_env=...)."
                )
            if not (await asyncio.wait(beginning, timeout=WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED))[0]:
                logger.warning("No actor runs yet: the cluster may have no free CPUs. Waiting for them.")

    def _shortened(self, error: Any) -> str:
        return self._run.redaction.redact(" ".join(str(error).split()))[:SHOWN_CHARACTERS]

    # A rollout.

    async def _attempt(
        self,
        program: int,
        adapter: StudentAdapter,
        records: RolloutRecords,
        provider: Provider,
        candidate: dict[str, str],
        example: dspy.Example,
        capture_traces: bool,
        usage: Usage,
    ) -> Attempt:
        """See :data:`~.program.MakeRollout`."""
        request = program, candidate, _pickled(example, "example"), capture_traces
        await record_metric_call()
        answer = RolloutAnswer()
        try:
            answer = await self._request(provider, request)
            for _ in range(DEATHS - 1):
                if answer.is_lost:
                    async with self._suspects_turn:
                        answer = await self._request(provider, request, is_suspect=True)
            if answer.is_lost:
                failure = ProcessDiedError(f"the process that ran the program and its metric has died {DEATHS} times")
                message = f"{type(failure).__name__}: {failure}"
                logger.warning("Example scored as a failure: %s", message)
                output = None if capture_traces else dspy.Prediction()
                rollout = Rollout(output, adapter.failure_score, error=f"The program failed: {message}")
                return Attempt(rollout, Failure(failure, (type(failure).__qualname__,), refused=False))
            for model, entries in answer.used.items():
                usage.add(model, entries)
            if answer.error is not None:
                raise answer.error
        except asyncio.CancelledError:
            if not answer.metric_began:
                retract_metric_call()
            raise
        assert answer.attempt is not None
        trajectory: Any = answer.attempt.rollout.trajectory
        if isinstance(trajectory, str):
            trajectory = records.read_trace(candidate, example, trajectory)
        elif trajectory is not None:
            trajectory = {**trajectory, "example": example}
        return replace(answer.attempt, rollout=replace(answer.attempt.rollout, trajectory=trajectory))

    async def _request(self, provider: Provider, request: tuple[Any, ...], is_suspect: bool = False) -> RolloutAnswer:
        """Make a rollout as a request at its endpoint, whose limit is told what became of it."""
        attempts = Attempts(provider, current_slot())
        try:
            await attempts.begin()
            attempts.send()
            began = anyio.current_time()
            if is_suspect and not self._suspects:
                self._start(self._suspects, cpus=0)
            actor = await self._free(self._suspects if is_suspect else self._actors)
            answer = await self._call_actor(actor, request)
        finally:
            attempts.leave()
        if answer.is_refused:
            retry_after_seconds = getattr(answer.error, "retry_after_seconds", None)
            attempts.server.record_failure(attempts, "refused", retry_after_seconds)
        elif answer.attempt is not None:
            is_cached = not completion_tokens_of(answer.used) and anyio.current_time() - began <= CACHED_SECONDS
            if not is_cached:
                attempts.answered()
        return answer

    async def _call_actor(self, actor: _Actor, request: tuple[Any, ...]) -> RolloutAnswer:
        """Have an actor make a rollout; where that is cancelled, in the actor, too, and wait for its end."""
        answer, reason, cancelled = RolloutAnswer(is_lost=True), "it has begun again", None
        self._calls += 1
        number, actor.running = self._calls, actor.running + 1
        errors = self._ray.exceptions
        try:
            reply = _reply_of(actor.handle.rollout.remote(number, *request))
            try:
                answer = cloudpickle.loads(await asyncio.shield(reply))
            except asyncio.CancelledError as error:
                cancelled = error
                with anyio.CancelScope(shield=True):
                    with anyio.move_on_after(CANCEL_SECONDS) as waited:
                        await _reply_of(actor.handle.cancel.remote(number))
                    if waited.cancelled_caught:
                        self._ray.kill(actor.handle, no_restart=False)
                    answer = cloudpickle.loads(await reply)
        except (errors.RayActorError, errors.NodeDiedError, errors.ObjectLostError, errors.OutOfMemoryError) as error:
            reason = self._shortened(error)
        finally:
            actor.running -= 1
        if answer.is_lost and actor.ready.done():  # else it is known
            logger.warning("An actor is lost, its rollouts are asked for again: %s", reason)
            self._run.bus.emit(ActorLost(self._run.clock(), reason))
            actor.ready = self._ready(actor.handle)
        if cancelled is not None and answer.attempt is None:
            answer.error, answer.is_lost = cancelled, False
        return answer


def _reply_of(call: Any) -> asyncio.Future[Any]:
    """Await a call of Ray's. Its own future is never cancelled: Ray's client logs an error where it is."""
    return asyncio.shield(asyncio.wrap_future(call.future()))
