"""What AsyncGEPA's arguments of its own mean: checked when they are given, and turned into the schedule of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal

import dspy
from dspy.primitives import Module

from dspy_flashevolve.engine.admission import Admission, GapBound, LiveTickets, for_slots
from dspy_flashevolve.engine.claims import DeepestFirst, SlotOrder
from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.limits import AdaptiveLimit
from dspy_flashevolve.engine.orders import ValueFirst
from dspy_flashevolve.engine.speculation import Speculation
from dspy_flashevolve.engine.staleness import PLACES, Full, Guarded, Reflective, StalenessPolicy, check_looks
from dspy_flashevolve.engine.stragglers import Duplicates
from dspy_flashevolve.gepa.settings import RunSettings
from dspy_flashevolve.modules.integrate import StaleCandidateReflection
from dspy_flashevolve.programs.lm import rates_of
from dspy_flashevolve.programs.runner import runs_on_loop

logger = logging.getLogger(__name__)

Schedule = Literal["async", "lockstep"]
GENERATIONS, GENERATIONS_BY_TRAIN = 12.0, 6.0
"""A limited budget is spread over at least this many generations (``engine.admission.LiveTickets``); fewer where trains
bring the work of many tickets together."""
POLICIES: dict[str, StalenessPolicy] = {
    "full": Full(),
    "guarded": Guarded(max_gap=8),
    "patch": Reflective(batch=1),
    "reflective": Reflective(batch=12),
}
"""What the names of ``staleness`` stand for."""
ORDERS: dict[str, Callable[[int | None], SlotOrder]] = {
    "deepest": lambda slots: DeepestFirst(),
    "value": lambda slots: ValueFirst() if slots is None else ValueFirst(first=max(1, slots // 2)),
}
"""What the names of ``slot_order`` stand for."""
DEFAULT_SPECULATION = Speculation()
MAX_CONCURRENCY = 256
"""Requests in flight at most where the slots adapt and ``max_concurrency`` is not given."""


def policy_named(staleness: Any) -> StalenessPolicy:
    """The policy that a name stands for, or the policy itself.

    Raises:
        ConfigurationError: no such name, or no policy.
    """
    if isinstance(staleness, str):
        if staleness in POLICIES:
            return POLICIES[staleness]
    elif callable(getattr(staleness, "decide", None)) and isinstance(getattr(staleness, "looks", None), tuple):
        check_looks(staleness.looks, PLACES, type(staleness).__name__)
        return staleness
    names = ", ".join(repr(name) for name in POLICIES)
    raise ConfigurationError(
        f"staleness is {staleness!r}, expected one of {names}, or a policy: an object with looks, a tuple of places, "
        "and decide(look, history)."
    )


def order_named(order: Any, slots: int | None = None) -> SlotOrder:
    """The order of slots that a name stands for, or the order itself.

    Args:
        order: the name, or the order.
        slots: how many there are; None where they adapt.

    Raises:
        ConfigurationError: no such name, or no order.
    """
    if isinstance(order, str) and order in ORDERS:
        return ORDERS[order](slots)
    if not isinstance(order, str | type) and callable(getattr(order, "key", None)):
        return order
    names = ", ".join(repr(name) for name in ORDERS)
    raise ConfigurationError(
        f"slot_order is {order!r}, expected one of {names}, or an object with key(claim, held, waiting)."
    )


def check_run(run: Any) -> None:
    """Raise ConfigurationError for an argument that cannot work, of those that every run on the engine has.

    Args:
        run: an optimizer, or a :class:`~dspy_flashevolve.workbench.Workbench`, with the attributes ``schedule``,
            ``slot_order``, ``num_threads``, ``max_concurrency``, ``max_seconds``, ``rollout_timeout_seconds`` and
            ``duplicate_stragglers``.
    """
    if run.schedule not in ("async", "lockstep"):
        raise ConfigurationError(f"schedule is {run.schedule!r}, expected 'async' or 'lockstep'.")
    order_named(run.slot_order)
    check_counts(run, "num_threads", "max_concurrency")
    if run.num_threads and run.max_concurrency and run.num_threads > run.max_concurrency:
        raise ConfigurationError(
            f"num_threads is {run.num_threads}, above max_concurrency={run.max_concurrency}. Give one of them."
        )
    if run.duplicate_stragglers is not None and not isinstance(run.duplicate_stragglers, Duplicates):
        raise ConfigurationError(
            f"duplicate_stragglers is {run.duplicate_stragglers!r}, expected a Duplicates, or None."
        )
    check_limits(run, "max_seconds", "rollout_timeout_seconds")


def check_counts(run: Any, *names: str) -> None:
    """Raise ConfigurationError for an attribute of ``run`` that is neither a whole number above 0 nor None."""
    for name in names:
        value = getattr(run, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigurationError(f"{name} is {value!r}, expected a whole number of at least 1, or None.")


def check_limits(run: Any, *names: str) -> None:
    """Raise ConfigurationError for an attribute of ``run`` that is neither a number above 0 nor None."""
    for name in names:
        limit = getattr(run, name)
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0):
            raise ConfigurationError(f"{name} is {limit!r}, expected a number above 0, or None.")


def check_schedule(optimizer: Any) -> None:
    """Raise ConfigurationError for an argument of AsyncGEPA's own that cannot work."""
    check_run(optimizer)
    policy_named(optimizer.staleness)
    module = optimizer.stale_candidate_reflection
    if module is not None and not isinstance(module, Module):
        raise ConfigurationError(f"stale_candidate_reflection is {module!r}, expected a dspy.Module.")
    if optimizer.speculation is not None and not isinstance(optimizer.speculation, Speculation):
        raise ConfigurationError(f"speculation is {optimizer.speculation!r}, expected a Speculation, or None.")
    check_counts(optimizer, "max_live_tickets", "max_reflection_calls")
    if optimizer.controller is not None and not callable(getattr(optimizer.controller, "decide", None)):
        raise ConfigurationError(
            f"controller is {optimizer.controller!r}, expected MedianRate(), Backlog(), Fixed(n), an object with "
            "window_seconds and decide(windows), or None."
        )
    if not isinstance(optimizer.metric_lock, bool):
        raise ConfigurationError(f"metric_lock is {optimizer.metric_lock!r}, expected True or False.")
    check_limits(optimizer, "max_cost")
    _check_width(optimizer)


def _check_width(optimizer: Any) -> None:
    live, admission = optimizer.max_live_tickets, optimizer.admission
    if optimizer.schedule == "lockstep" and live not in (None, 1):
        raise ConfigurationError(f"max_live_tickets is {live}, but schedule='lockstep' runs one step at a time.")
    if admission is None:
        return
    asked = [getattr(admission, name, None) for name in ("admits", "is_narrowed")]
    if not all(map(callable, asked)) or not isinstance(getattr(admission, "limit", None), int):
        raise ConfigurationError(
            f"admission is {admission!r}, expected LiveTickets, GapBound, or an object with limit, admits(load) and "
            "is_narrowed(load)."
        )
    if live is not None or optimizer.schedule == "lockstep":
        raise ConfigurationError("admission is given beside max_live_tickets or schedule='lockstep': give one of them.")


def check_prices(optimizer: Any, student: Module) -> None:
    """A limit in dollars needs a price for every LM that the run may ask.

    Raises:
        ConfigurationError: litellm's cost map does not have one.
    """
    if optimizer.max_cost is None:
        return
    own = [getattr(predictor, "lm", None) for predictor in student.predictors()]
    lms: list[Any] = [*own, dspy.settings.lm, optimizer.reflection_lm]
    models = {str(lm.model) for lm in lms if hasattr(lm, "model")}
    unknown = sorted(model for model in models if rates_of(model) is None)
    if unknown:
        raise ConfigurationError(
            f"max_cost is {optimizer.max_cost:g}, but litellm's cost map has no price for {', '.join(unknown)}. "
            "Register one by litellm.register_model({...}), or bound the run by max_metric_calls, "
            "max_reflection_calls or max_seconds."
        )


def settings_of(optimizer: Any, same_data: bool, student: Module | None = None) -> RunSettings:
    """The schedule of a run.

    Args:
        same_data: the training set is the validation set.
        student: the program; one that runs in threads gets no more of them than dspy is configured for.
    """
    lockstep = optimizer.schedule == "lockstep"
    slots, adaptive = width_of(optimizer, () if student is None else (student,))
    minibatch = optimizer.reflection_minibatch_size or 3
    fixed = 1 if lockstep else optimizer.max_live_tickets
    policy = Full() if lockstep else _usable_policy(optimizer)
    rule = LiveTickets(fixed) if fixed is not None else _admission(optimizer, policy, slots, min(minibatch, slots))
    return RunSettings(
        slots=slots,
        adaptive=adaptive,
        live_limit=rule.limit,
        admission=rule,
        budget_calls=None if lockstep else optimizer.max_metric_calls,
        minibatch=minibatch,
        lockstep=lockstep,
        staleness=policy,
        max_seconds=optimizer.max_seconds,
        speculation=optimizer.speculation,
        same_data=same_data,
        strict_live=fixed is not None,
        max_reflection_calls=optimizer.max_reflection_calls,
        max_cost=optimizer.max_cost,
        controller=optimizer.controller,
        rollout_timeout_seconds=optimizer.rollout_timeout_seconds,
        duplicates=optimizer.duplicate_stragglers,
        order=None if lockstep else order_named(optimizer.slot_order, slots if adaptive is None else None),
    )


def width_of(run: Any, programs: Iterable[Module]) -> tuple[int, AdaptiveLimit | None]:
    """The slots of a run, and how its endpoints' limits adapt below them; None where they do not.

    They adapt from dspy's number of threads up to ``max_concurrency``, unless ``num_threads`` is given, the run is in
    lockstep, or a program runs in threads and nobody said how many.

    Args:
        run: see :func:`check_run`.
        programs: what the run calls.
    """
    adapts = run.schedule != "lockstep" and run.num_threads is None
    if not adapts or (run.max_concurrency is None and not all(runs_on_loop(program) for program in programs)):
        return run.num_threads or dspy.settings.num_threads, None
    high: int = run.max_concurrency or MAX_CONCURRENCY
    return high, AdaptiveLimit(start=min(dspy.settings.num_threads, high), high=high)


def _admission(optimizer: Any, policy: StalenessPolicy, slots: int, burst: int) -> Admission:
    if optimizer.admission is not None:
        return optimizer.admission
    trains = isinstance(policy, Reflective) and policy.train
    width = for_slots(slots, GENERATIONS_BY_TRAIN if trains else GENERATIONS, burst=burst)
    return GapBound(policy.max_gap, width) if isinstance(policy, Guarded) else width


def _usable_policy(optimizer: Any) -> StalenessPolicy:
    """The policy; one that integrates needs an LM to do it."""
    policy = policy_named(optimizer.staleness)
    module = optimizer.stale_candidate_reflection or StaleCandidateReflection()
    silent = [one for one in module.predictors() if getattr(one, "lm", None) is None]
    if isinstance(policy, Reflective) and silent and optimizer.reflection_lm is None and dspy.settings.lm is None:
        logger.warning("There is no LM that could integrate stale candidates: they are admitted as they are.")
        return Full()
    return policy
