"""An actor of Ray's that makes rollouts, and what it answers. Caller and actor both know this module."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import anyio
import cloudpickle
import dspy

from dspy_flashevolve.engine.errors import TransientError
from dspy_flashevolve.engine.rollouts import recording_rollout
from dspy_flashevolve.engine.run import EvolutionRun
from dspy_flashevolve.engine.scheduler import current_slot
from dspy_flashevolve.programs.building import StudentAdapter
from dspy_flashevolve.programs.faults import chain_of, is_refusal, is_timeout
from dspy_flashevolve.programs.lm import LanguageModels
from dspy_flashevolve.programs.metric import Metric
from dspy_flashevolve.programs.program import Attempt, ProgramRunner
from dspy_flashevolve.programs.records import RolloutRecords, as_writable
from dspy_flashevolve.programs.usage import counting_usage

SWITCH_SECONDS = 0.0005
"""How long an actor's loop may keep Ray's threads waiting, which each call needs. Python's default is ten times that,
more than a short rollout takes; with less, the threads take turns oftener than they work."""


class Signal(Enum):
    """What a provider said that the limits of its endpoint follow."""

    REFUSED = auto()
    """It asked for fewer requests."""
    LATE = auto()
    """It gave no answer in time."""


@dataclass(slots=True)
class RolloutAnswer:
    """What became of a rollout, which tells here of its metric's call.

    Args:
        attempt: the rollout; None where there is none.
        error: what was raised; None also where it was cancelled.
        signal: of a provider, which says that it has too much to do.
        metric_began: its call counts.
        used: what LMs used, as a UsageTracker has it.
        is_lost: its actor is lost.
    """

    attempt: Attempt | None = None
    error: BaseException | None = None
    signal: Signal | None = None
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
        sys.setswitchinterval(SWITCH_SECONDS)
        self._runners: list[ProgramRunner] = []
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._step: Any = SimpleNamespace(number=0, version=0, value=0.0)  # stands for the one that asks

    async def load(
        self, programs: list[bytes], settings: bytes, variables: dict[str, str], cache: dict[str, Any], slots: int
    ) -> str:
        """Load what is sent, unless that is done.

        Args:
            programs: of each, pickled, the arguments of :meth:`_runner`.
            settings: of dspy's, pickled.
            variables: of the environment, unless they are there.
            cache: arguments of ``dspy.configure_cache``.
            slots: rollouts at once, at most.

        Returns:
            What went wrong, else nothing.
        """
        if self._runners:
            return ""
        for name, value in variables.items():
            os.environ.setdefault(name, value)
        with suppress(Exception):  # a folder that cannot be written here: then dspy's own
            dspy.configure_cache(**cache)
        self._run = EvolutionRun(name="rollouts", stages={"rollout": ["lm"]}, slots=slots)
        self._run.clock.attach()
        self._models = LanguageModels(self._run.endpoints, self._run.redaction, once=True)
        self._models.attach(asyncio.get_running_loop())
        try:
            dspy.configure(**cloudpickle.loads(settings))
            self._models.pace(dspy.settings.lm)
            self._runners = [self._runner(**cloudpickle.loads(program)) for program in programs]
        except Exception as error:
            return self._run.redaction.redact(f"{type(error).__name__}: {error}")
        return ""

    def _runner(self, student: Any, metric: Any, lock: bool, failure_score: float, finite: bool) -> ProgramRunner:
        adapter = StudentAdapter(student, metric, feedback_map={}, failure_score=failure_score)
        scorer = Metric(metric, self._run.threads, lock)
        return ProgramRunner(adapter, scorer, self._run.threads, self._models, finite)

    async def rollout(
        self, number: int, program: int, candidate: dict[str, str], example: bytes, traced: bool
    ) -> bytes:
        """Make a rollout.

        Args:
            number: of the call, for :meth:`cancel`.
            example: pickled.

        Returns:
            A pickled :class:`RolloutAnswer`.
        """
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
                errors = list(chain_of(error)) if isinstance(error, TransientError) else []
                is_late, is_refused = any(map(is_timeout, errors)), any(map(is_refusal, errors))
                answer.signal = Signal.REFUSED if is_refused else Signal.LATE if is_late else None
                answer.error = _sendable(error)
        del self._scopes[number]
        answer.used = {model: list(entries) for model, entries in usage.usage_data.items()}
        return _packed(answer, runner.records, candidate)

    async def cancel(self, number: int) -> None:
        """Cancel a rollout, whose call then returns. One that has not arrived yet is cancelled when it does."""
        self._scopes.setdefault(number, anyio.CancelScope()).cancel()


def _packed(answer: RolloutAnswer, records: RolloutRecords, candidate: dict[str, str]) -> bytes:
    """An answer, pickled: its trace as text, where that is the same, since signatures are costly to pickle."""
    if answer.attempt is not None:
        rollout, failure = answer.attempt.rollout, answer.attempt.failure
        output, trajectory = rollout.output, records.trace(candidate, rollout)
        if trajectory is None:
            output = as_writable(output, cloudpickle.dumps)
            trajectory = _readable({**rollout.trajectory, "example": None})
        failure = None if failure is None else replace(failure, error=_sendable(failure.error))
        rollout = replace(rollout, output=output, trajectory=trajectory)
        answer.attempt = replace(answer.attempt, rollout=rollout, failure=failure)
    return cloudpickle.dumps(answer)


def _readable(value: Any) -> Any:
    """A value, as far as it can be pickled."""
    if type(value) is dict:
        return {key: _readable(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_readable, value))
    return as_writable(value, cloudpickle.dumps)


def _sendable(error: BaseException) -> Any:
    """An error that arrives: itself, or one that says the same."""
    with suppress(Exception):
        arrived = cloudpickle.loads(cloudpickle.dumps(error))
        if type(arrived) is type(error) and str(arrived) == str(error):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")
