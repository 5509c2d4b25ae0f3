"""The requests of one run: LM calls and rollouts, in its slots, retried outside of them, counted."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dspy.primitives.module import Module

from dspy_flashevolve.engine.budget import Reservation
from dspy_flashevolve.engine.claims import Claim, SlotOrder
from dspy_flashevolve.engine.endpoints import Endpoints
from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.events import EventBus
from dspy_flashevolve.engine.flights import Rollout
from dspy_flashevolve.engine.item import Item
from dspy_flashevolve.engine.limits import AdaptiveLimit
from dspy_flashevolve.engine.loop import LoopClock
from dspy_flashevolve.engine.retries import RetryPolicy
from dspy_flashevolve.engine.rollouts import Rollouts
from dspy_flashevolve.engine.slots import Slots
from dspy_flashevolve.engine.stragglers import Duplicates
from dspy_flashevolve.engine.threads import Threads
from dspy_flashevolve.programs.asking import Asked, ask_module
from dspy_flashevolve.programs.copies import isolated_copy
from dspy_flashevolve.programs.lm import LanguageModels, endpoints_of
from dspy_flashevolve.programs.metric import Metric
from dspy_flashevolve.programs.runner import ProgramRunner, plain_adapter, settings_snapshot
from dspy_flashevolve.programs.vllm_metrics import watchers

SPARE_THREADS = 16
"""Threads beside those of the slots, for what a loop does without one."""


class Requests:
    """Makes the requests of one run. It needs the run's loop; see :class:`dspy_flashevolve.workbench.Workbench`.

    Args:
        lms: stage -> what its requests ask: LMs, modules (the LMs of their predictors), or None for the configured LM.
        width: slots at most.
        adaptive: how the endpoints' limits adapt below it; None for no limit but that.
        order: who gets the next free slot.
        lockstep: equal rollouts do not share a flight, and none is begun twice.
        seed: of jitter.
        priced: work out what LM calls cost, in dollars.
        retry: how often a request is made that the provider turns away, and when.
        timeout_seconds, duplicates: of rollouts; see :class:`Rollouts`.
        depths: stage -> how much goes before others where slots are scarce. Default: by the order of ``lms``, from 1.

    Raises:
        ConfigurationError: ``depths`` that are no numbers above 0, or of stages that ``lms`` does not have.
    """

    def __init__(
        self,
        *,
        lms: Mapping[str, Sequence[Any]],
        width: int,
        adaptive: AdaptiveLimit | None,
        order: SlotOrder,
        lockstep: bool,
        seed: int | None,
        priced: bool,
        retry: RetryPolicy | None,
        timeout_seconds: float | None,
        duplicates: Duplicates | None,
        depths: Mapping[str, int] | None,
    ) -> None:
        self._depths = _depths(lms, depths)
        self.width = width
        self.priced = priced
        self.clock = LoopClock()
        self.bus = EventBus()
        self.slots = Slots(width, order, self.clock)
        self.threads = Threads(width + SPARE_THREADS, "work")
        self.settings = settings_snapshot()
        """dspy's settings for the length of the run."""
        self.endpoints = Endpoints(adaptive, retry, random.Random(seed))
        self.endpoints.assign({stage: _addresses(listed, self.settings.get("lm")) for stage, listed in lms.items()})
        if adaptive is not None:
            self.endpoints.watchers += watchers(self.endpoints)
        self.models = LanguageModels(self.endpoints)
        self.settings["lm"] = self.models.paced(self.settings.get("lm"))
        self.rollouts = Rollouts(
            self.slots,
            self.bus,
            self.clock,
            retry,
            single_flight=not lockstep,
            rng=random.Random(seed),
            timeout_seconds=timeout_seconds,
            duplicates=None if lockstep else duplicates,
        )
        self.rollouts.on_retry = self.endpoints.heard_retry

    def claim(
        self, item: Item[Any], stage: str, *, value: float | None = None, rank: float = 0.0, endpoint: str = ""
    ) -> Claim:
        """Who asks: the ticket of an item, in a stage.

        Args:
            stage: one of ``lms``.
            value: what finishing it is thought to be worth; None for the item's own.
            rank, endpoint: see :class:`Claim`.

        Raises:
            ConfigurationError: no such stage.
        """
        if stage not in self._depths:
            raise ConfigurationError(f"stage {stage!r} is not in lms, expected one of {sorted(self._depths)}.")
        worth = item.value if value is None else value
        return Claim(item.ticket.number, stage, self._depths[stage], worth, item.version, rank, endpoint)

    async def ask(self, claim: Claim, module: Module, /, lm: Any = None, **inputs: Any) -> Any:
        """Call a module in a slot: on the loop where it can be awaited, else in a thread; asked again where need be.

        Args:
            module: is not changed; a copy is called.
            lm: what it asks, unless its predictors have LMs of their own. None for the configured LM.
            inputs: the module's keyword arguments.

        Returns:
            What the module returns.

        Raises:
            RolloutUnresolvedError: the provider gave no answer.
            RunAbortedError: the provider refused for good.
            Exception: what the module raised; ``AdapterParseError`` where a reply did not fit its format.
        """

        async def call() -> Asked[Any]:
            return await ask_module(
                self.models.replace_in(isolated_copy(module)),
                inputs,
                lm=self.settings.get("lm") if lm is None else self.models.paced(lm),
                threads=self.threads,
                priced=self.priced,
                read=lambda answer: answer,
            )

        asked = await self.rollouts.request(claim, call, lambda one: one.spent)
        if asked.error is not None:
            raise asked.error
        return asked.answer

    def runner(
        self, student: Module, metric: Callable[..., Any], *, failure_score: float = 0.0, metric_lock: bool = False
    ) -> ProgramRunner:
        """Runs candidates (component -> text) of a program on examples; ``{}`` is the program as it is.

        Args:
            student: is not changed.
            metric: a function (example, prediction, ...), sync or coroutine, that returns a score, or a
                ``dspy.Prediction`` with ``score`` and ``feedback``; further arguments that it needs are None.
            failure_score: of an example on which the program or the metric raises, or the score is no finite number.
            metric_lock: call the metric once at a time.
        """
        adapter = plain_adapter(student, metric, failure_score)
        scorer = Metric(metric, self.threads, metric_lock)
        return ProgramRunner(adapter, scorer, self.threads, self.priced, self.models, finite=True)

    async def rollout(
        self,
        claim: Claim,
        reservation: Reservation,
        runner: ProgramRunner,
        candidate: dict[str, str],
        example: Any,
        key: Any,
        *,
        capture_traces: bool = True,
    ) -> Rollout:
        """Run a candidate on one example in a slot; an equal rollout in flight is joined, and costs nothing.

        Args:
            reservation: pays for it.
            key: tells examples apart; hashable, such as ("val", 3).

        Raises:
            RolloutUnresolvedError: the provider gave no answer.
            RunAbortedError: the provider refused for good.
        """
        rollout, _ = await self.rollouts.rollout(
            (id(runner), frozenset(candidate.items()), key, capture_traces),
            claim,
            reservation,
            lambda: runner.rollout(candidate, example, capture_traces=capture_traces),
        )
        return rollout


def check_lms(lms: Mapping[str, Sequence[Any]]) -> None:
    """Raise ConfigurationError where ``lms`` is no mapping of lists; see :class:`Requests`."""
    listed: Any = lms.values() if isinstance(lms, Mapping) else [None]  # pyright: ignore[reportUnnecessaryIsInstance]
    if not all(isinstance(one, list | tuple) and one for one in listed):
        raise ConfigurationError(
            f"lms is {lms!r}, expected stage -> a list of what it asks: LMs, modules, or None for the configured LM."
        )


def _depths(lms: Mapping[str, Sequence[Any]], depths: Mapping[str, int] | None) -> dict[str, int]:
    found = {stage: place for place, stage in enumerate(lms, start=1)} | dict(depths or {})
    if set(found) != set(lms) or not all(depth > 0 for depth in found.values()):
        raise ConfigurationError(f"depths is {depths!r}, expected a number above 0 for stages of lms: {list(lms)}.")
    return found


def _addresses(listed: Sequence[Any], default: Any) -> set[str]:
    """The endpoints that LMs, and modules, ask."""
    modules = [one for one in listed if isinstance(one, Module)]
    lms = [one for one in listed if not isinstance(one, Module)]
    asked = endpoints_of([predictor for module in modules for predictor in module.predictors()], default)
    return asked | {name for lm in lms for name in endpoints_of([None], lm or default)}
