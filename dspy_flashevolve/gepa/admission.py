"""Whether a further step of GEPA's starts: how many run at once (:class:`SearchWidth`), whether ``max_metric_calls``,
``max_reflection_calls`` and ``max_cost`` pay it (:class:`Spending`), and the metric calls that are set aside for it.

``EvolutionRun._opened`` (engine/run.py) asks whenever something has changed. ``why_none_opens`` changes nothing;
``reserve`` and ``release`` set calls aside and hand them back.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dspy_flashevolve.engine.steps import LiveSteps, Load, Reservation
from dspy_flashevolve.gepa.ending import Ending, Phase
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.search import Search
from dspy_flashevolve.gepa.settings import Workflow
from dspy_flashevolve.programs.run import DspyRun

GENERATIONS, GENERATIONS_OF_CHANGES = 12.0, 3.0
"""A limited budget is spread over at least this many generations (:class:`LiveSteps`), since steps that run at once
cannot build on each other; fewer where the work of many steps comes together in one head. Under the simulated model
``strong`` three, four and six come to the same score, and three take a third less time than six."""
NARROW = 4
"""Examples of a minibatch up to which all live steps find slots; with larger ones fewer run, unless slots are idle. In
120 seconds and 32 slots eight to twelve steps of twelve examples came to more than 24, half of which ended late."""
PERFECT = "the best candidate has the perfect score on every validation example"


class ReflectionCalls:
    """Counts what was asked of the reflection LM, and says whether ``max_reflection_calls`` and ``max_cost``, in
    dollars for all LM calls, allow more; earlier sessions count."""

    def __init__(self, run: DspyRun, limit: int | None, max_cost: float | None) -> None:
        self._run, self._limit, self._max_cost = run, limit, max_cost
        self.reflections = 0
        """Calls for proposals and consolidations."""
        self.integrations = 0
        """Calls for repairs."""

    def record(self, reflections: int = 0, integrations: int = 0) -> None:
        """Count calls."""
        self.reflections += reflections
        self.integrations += integrations

    @property
    def total(self) -> int:
        """Calls of this session."""
        return self.reflections + self.integrations

    @property
    def used_shares(self) -> dict[str, float]:
        """What bounds the run beside time and metric calls -> the share that is used, earlier sessions included."""
        store, shares = self._run.store, dict[str, float]()
        if self._limit is not None:
            shares[f"max_reflection_calls={self._limit}"] = (self.total + store.requests_before) / self._limit
        if self._max_cost is not None:
            cost = self._run.dollars + store.dollars_before
            shares[f"max_cost={self._max_cost:g} dollars"] = cost / self._max_cost
        return shares

    @property
    def used_share(self) -> float:
        """The largest of them; 0 without a limit."""
        return max(self.used_shares.values(), default=0.0)

    @property
    def are_spent(self) -> bool:
        """Whether no further call is to be begun."""
        return self.used_share >= 1


class Spending:
    """Decides when GEPA's steps start, and pays them.

    Args:
        search: whether the budget is never exceeded.
        ending: says what is kept for the end.
        set_aside: pays the last validation; nothing else may spend it.
        minibatch: training examples of a task.
        minibatch_alone: of one whose child stands for itself.
    """

    def __init__(
        self,
        run: DspyRun,
        pool: Pool,
        search: Search,
        ending: Ending,
        calls: ReflectionCalls,
        set_aside: Reservation,
        minibatch: int,
        minibatch_alone: int,
    ) -> None:
        self._run, self._pool, self._search, self._ending, self._calls = run, pool, search, ending, calls
        self._set_aside, self._minibatch, self._minibatch_alone = set_aside, minibatch, minibatch_alone
        run.used_shares.append(lambda: calls.used_share)

    # Questions.

    @property
    def calls_per_task(self) -> int:
        """Metric calls that are set aside for one task: the most that it can cost.

        Where what steps find comes together, validations are paid apart.
        """
        return self.calls_alone if self._ending.joins is False else 2 * self._minibatch

    @property
    def calls_alone(self) -> int:
        """The most that a step costs whose child stands for itself."""
        return 2 * self._minibatch_alone + len(self._pool.loader)

    def why_none_opens(self) -> str | None:
        """Why no further step may start; None while one may, or the last head is to be validated."""
        if self._ending.is_perfect:
            is_due = self._ending.pending is not None and not self._ending.obstacle
            return None if self._run.is_busy or is_due else f"{PERFECT}: nothing can be better"
        reason = self._spent_up()
        awaits_last = self._ending.phase is not Phase.CALLS_SPENT and self._ending.pending is not None
        waits = self._ending.has_last and (self._run.live or awaits_last)
        return None if reason is None or waits else reason

    def _spent_up(self) -> str | None:
        """The limit that is used up; None where there is none."""
        run, budget = self._run, self._run.budget
        if self._ending.has_ended:
            return f"max_seconds={run.max_seconds:g} is nearly over, and the last head is validated"
        if self._pool.seed_confirmed and not (run.is_busy or not self._search.keeps_budget or self._pays_alone):
            return (
                f"max_metric_calls={budget.limit}: the {budget.left} calls left cannot pay a step, which may cost "
                f"{self.calls_alone}"
            )
        return next((f"{limit} is spent" for limit, share in self._calls.used_shares.items() if share >= 1), None)

    @property
    def _pays_alone(self) -> bool:
        """Whether what is left pays a step with a validation of its own, where its child may need one."""
        calls_left = self._run.budget.left
        if calls_left is not None and not self._run.live and self._ending.pending is None:
            calls_left += self._set_aside.open  # nothing was found that is worth a last validation
        return bool(self._ending.joins) or calls_left is None or calls_left >= self.calls_alone

    @property
    def pays_beyond_validation(self) -> bool:
        """Whether a validation leaves what a further step, and the last head's validation after it, cost.

        Where it does not, steps are the better use of what is left: the last head has what they find, too.
        """
        calls_left, validation = self._run.budget.left, len(self._pool.loader)
        return calls_left is None or calls_left + self._set_aside.open >= 2 * validation + self.calls_per_task

    # Setting aside, and handing back. On the loop.

    def reserve(self) -> Reservation | None:
        """Set a step's calls aside, and beside them a validation for the last head where changes come together."""
        if not self._ending.is_perfect:
            reservation = self._reserve_search() if self._spent_up() is None else None
            if reservation is not None:
                self._ending.resume_search()
            if reservation is not None or self._run.live:
                return reservation
            if self._ending.begin_last():
                return self._run.budget.reserve(0)
        return self._reserve_rewriting() if self._ending.only_rewrites else None

    def _reserve_rewriting(self) -> Reservation | None:
        """Set the validation of the best text, written anew, aside, where that is due; other steps have ended then."""
        if self._run.is_busy or self._ending.pending is None:
            return None
        self._set_aside.refund()
        return None if self._ending.obstacle else self._run.budget.reserve(len(self._pool.loader))

    def _reserve_search(self) -> Reservation | None:
        """Set aside what a step that searches costs at most."""
        aside, budget, reservation = self._set_aside, self._run.budget, None
        for_the_end = self._ending.calls_aside
        if not for_the_end or any(aside.extend(max(0, calls - aside.open)) for calls in for_the_end):
            reservation = budget.reserve(self.calls_per_task) if self._pays_alone else None
        if reservation is None and not self._run.live and aside.open and self._ending.pending is None:
            aside.refund()  # nothing was found that is worth a last validation: its calls pay further steps
            reservation = budget.reserve(self.calls_per_task) if self._pays_alone else None
        return reservation

    async def release(self) -> None:
        """Hand back what is kept for the last head where children stand for themselves, and no head is to come; and
        where no text can be better, since nothing else is paid then."""
        if self._ending.is_perfect:
            self._set_aside.refund()
        elif not self._ending.calls_aside and self._set_aside.open:
            await self._ending.refresh()
            if self._ending.pending is None:
                self._set_aside.refund()

    def widen(self, minibatch: int) -> None:
        """Expect tasks of so many training examples: a sampler of the user's may draw more than it was asked for."""
        if minibatch > self._minibatch:
            self._minibatch = self._minibatch_alone = minibatch


def alone_width(workflow: Workflow, slots: int, burst: int) -> LiveSteps:
    """Bound the steps that run at once where each child stands for itself.

    Steps that ran at once have made siblings of which one is used, and each that passes its screen costs a validation:
    three in sixteen of the slots are at work, and a limited budget is spread over more generations.

    Args:
        burst: requests that a step begins with.
    """
    if workflow.live_steps is not None:
        return LiveSteps(workflow.live_steps, strict=True)
    working = max(2, math.ceil(3 * slots / 16))
    return LiveSteps(max(2, math.ceil(3 * slots / 4)), working, GENERATIONS, burst, slots)


class SearchWidth:
    """Admission: how many steps may run at once, by whether what they find comes together.

    Three quarters of the slots live, or as many as the workflow says. Where children come together all steps are short,
    and each does one step's work; where each child stands for itself, see :func:`alone_width`. Until a child shows
    which it is, a run with a budget has one step more than have ended; where edits are expected, as many as leave
    :data:`GENERATIONS` steps to GEPA's search: 120 calls with whole texts scored .22 where six steps started at once,
    dspy.GEPA .37.

    Args:
        burst: requests that a step begins with.
        search: whether what children add comes together.
        spending: what a step costs at least whose child stands for itself.
    """

    def __init__(
        self, workflow: Workflow, slots: int, burst: int, search: Search, spending: Spending, expects_edits: bool
    ) -> None:
        self._alone = self._joined = alone_width(workflow, slots, burst)
        if workflow.live_steps is None:
            live = self._alone.limit
            fitting = max(2, math.ceil(live * min(1.0, NARROW / burst)))
            self._joined = LiveSteps(live, fitting, GENERATIONS_OF_CHANGES, burst, slots)
        self._search, self._spending, self._expects_edits = search, spending, expects_edits

    def admits(self, load: Load) -> bool:
        """See :meth:`Admission.admits`."""
        joins, calls_alone = self._search.come_together, self._spending.calls_alone
        if joins is False:
            return self._alone.admits(replace(load, calls_per_step=max(load.calls_per_step, calls_alone)))
        if load.calls_left is None:
            return self._joined.admits(load)
        most = 1 + load.ended
        if self._expects_edits:
            most = max(most, (load.calls_left + load.calls_reserved) // calls_alone - round(GENERATIONS))
        # As wide to the end as at the beginning: the last few steps, one after the other, would take longest.
        load = replace(load, calls_left=load.calls_left + round(load.ended * load.calls_per_step))
        if joins is None and not self._joined.strict:
            return replace(self._joined, limit=min(self._joined.limit, most)).admits(load)
        return self._joined.admits(load)
