"""What a run may still spend: whether a further step starts, and the metric calls that are set aside for it.

``may_open`` is a question, asked whenever something has changed; it changes nothing. ``reserve`` and
``release`` set calls aside and hand them back. Whether children are tested on their parent's minibatch before their
edits join the prompt (:class:`Screening`) follows from how many of the last children beat their parents.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace

import anyio

from dspy_flashevolve.engine.steps import LiveSteps, Load, Reservation
from dspy_flashevolve.gepa.evaluate import COMPARED
from dspy_flashevolve.gepa.heads import Heads, Phase
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.propose import ReflectionCalls
from dspy_flashevolve.gepa.settings import Workflow
from dspy_flashevolve.programs.run import DspyRun

SCREENS = 16
"""So many of the last screens count: a reflection LM that helps at first may harm once the prompt is good."""
HELPFUL = 0.8
"""Expected share of children that pass, from which on they join without a screen. On a real task with coded labels 25
of 25 children passed. Under the simulated model ``plain``, which harms in a third of its reflections, half of them
pass, three quarters where there is much to find; joining all of those without a screen halved the score."""
CHECKED_EVERY = 4
"""Every so many steps screen their child all the same, so that a change for the worse is noticed."""
FIRST_SCREENS, ENOUGH = 4, 3
"""So many of the first children are screened at once, and the others wait until so many of these screens have ended.
Three that pass are enough for the others to join without a screen, and nobody waits for the slowest of the four."""


class Screening:
    """Counts which children beat their parents, and says whether the next ones have to show that they do.

    A screen costs as many metric calls as the rollouts that a reflection reads. Where nearly all children pass, these
    calls teach more if they are the next parent's.

    >>> screening = Screening()
    >>> screening.is_needed(step=1)
    True
    >>> for _ in range(4):
    ...     screening.record(passed=True)
    >>> screening.is_needed(step=1), screening.is_needed(step=4)
    (False, True)
    """

    def __init__(self) -> None:
        self._passed = deque[bool](maxlen=SCREENS)
        self._running = 0
        self._ended = anyio.Event()
        """Set, and replaced, whenever a screen ends."""

    def record(self, passed: bool) -> None:
        """Take note of a screen."""
        self._passed.append(passed)

    def is_needed(self, step: int) -> bool:
        """Whether the child of a step is to be screened."""
        helpful = (sum(self._passed) + 1) / (len(self._passed) + 2)  # mean of its posterior, from a uniform prior
        return helpful < HELPFUL or step % CHECKED_EVERY == 0

    async def wait_for_first(self) -> None:
        """Wait while the first screens run, where one more would only tell what they tell."""
        while len(self._passed) < ENOUGH and len(self._passed) + self._running >= FIRST_SCREENS:
            await self._ended.wait()

    @contextmanager
    def running(self) -> Generator[None, None, None]:
        """Count a screen as running, however it ends."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._ended.set()
            self._ended = anyio.Event()


GENERATIONS, GENERATIONS_OF_CHANGES = 12.0, 3.0
"""A limited budget is spread over at least this many generations (:class:`LiveSteps`), since steps that run at once
cannot build on each other; fewer where the work of many steps comes together in one head. Under the simulated model
``strong`` three, four and six come to the same score, and three take a third less time than six."""
NARROW = 4
"""Examples of a minibatch up to which all live steps find slots; with larger ones fewer run, unless slots are idle. In
120 seconds and 32 slots eight to twelve steps of twelve examples came to more than 24, half of which ended late."""
ROOM_FOR_TWO = 8
"""A budget of so many validations keeps two of them for the end, a quarter of it: of the head, and of the same text
written anew. A smaller one would have too little left to search: it compares the two on the first examples."""
PERFECT = "the best candidate has the perfect score on every validation example"


class Spending:
    """Decides when GEPA's steps start, and pays them.

    Args:
        set_aside: pays the last head's validation; nothing else may spend it.
        minibatch: training examples of a task.
        minibatch_alone: of one whose child stands for itself.
    """

    def __init__(
        self,
        run: DspyRun,
        pool: Pool,
        heads: Heads,
        calls: ReflectionCalls,
        set_aside: Reservation,
        minibatch: int,
        minibatch_alone: int,
    ) -> None:
        self._run, self._pool, self._heads, self._calls = run, pool, heads, calls
        self._set_aside, self._minibatch, self._minibatch_alone = set_aside, minibatch, minibatch_alone
        run.used_shares.append(lambda: calls.used_share)

    # Questions.

    @property
    def calls_per_task(self) -> int:
        """Metric calls that are set aside for one task: the most that it can cost.

        Where what steps find comes together, validations are paid apart.
        """
        return self.calls_alone if self._heads.joins is False else 2 * self._minibatch

    @property
    def calls_alone(self) -> int:
        """The most that a step costs whose child stands for itself."""
        return 2 * self._minibatch_alone + len(self._pool.loader)

    def may_open(self) -> str | None:
        """Why no further step may start; None while one may, or the last head is to be validated."""
        if self._heads.phase is Phase.PERFECT:
            is_due = self._heads.pending is not None and not self._heads.obstacle
            return None if self._run.is_busy or is_due else f"{PERFECT}: nothing can be better"
        reason = self._spent_up()
        waits = self._heads.has_changes and (self._run.live or self._heads.awaits_last)
        return None if reason is None or waits else reason

    def _spent_up(self) -> str | None:
        """The limit that is used up; None where there is none."""
        run, budget = self._run, self._run.budget
        if self._heads.has_ended:
            return f"max_seconds={run.max_seconds:g} is nearly over, and the last head is validated"
        if self._pool.seed_confirmed and not (run.is_busy or run.lockstep or self._pays_alone):
            return (
                f"max_metric_calls={budget.limit}: the {budget.left} calls left cannot pay a step, which may cost "
                f"{self.calls_alone}"
            )
        return next((f"{limit} is spent" for limit, share in self._calls.used_shares.items() if share >= 1), None)

    @property
    def _pays_alone(self) -> bool:
        """Whether what is left pays a step with a validation of its own, where its child may need one."""
        left = self._run.budget.left
        return bool(self._heads.joins) or left is None or left >= self.calls_alone

    @property
    def _kept_aside(self) -> int:
        """Metric calls that are kept for the end: where there is something to write anew, more than one validation."""
        validation, limit = len(self._pool.loader), self._run.budget.limit
        if not self._heads.is_grown:
            return validation
        has_room = limit is not None and limit >= ROOM_FOR_TWO * validation
        return validation + (validation if has_room else math.ceil(COMPARED * validation))

    @property
    def pays_beyond_validation(self) -> bool:
        """Whether a validation leaves what a further step, and the last head's validation after it, cost.

        Where it does not, steps are the better use of what is left: the last head has what they find, too.
        """
        left, validation = self._run.budget.left, len(self._pool.loader)
        return left is None or left + self._set_aside.open >= 2 * validation + self.calls_per_task

    # Setting aside, and handing back. On the loop.

    def reserve(self) -> Reservation | None:
        """Set a step's calls aside, and beside them a validation for the last head where changes come together."""
        if self._heads.phase is not Phase.PERFECT:
            pays = self._reserve_search() if self._spent_up() is None else None
            if pays is not None:
                self._heads.resume_search()
            if pays is not None or self._run.live:
                return pays
            if self._heads.begin_last():
                return self._run.budget.reserve(0)
        return self._reserve_rewriting() if self._heads.only_rewrites else None

    def _reserve_rewriting(self) -> Reservation | None:
        """Set the validation of the best text, written anew, aside, where that is due; other steps have ended then."""
        if self._run.is_busy or self._heads.pending is None:
            return None
        self._set_aside.refund()
        return None if self._heads.obstacle else self._run.budget.reserve(len(self._pool.loader))

    def _reserve_search(self) -> Reservation | None:
        """Set aside what a step that searches costs at most."""
        aside, budget, pays = self._set_aside, self._run.budget, None
        kept = self._kept_aside, len(self._pool.loader)  # where two validations do not fit any more, one is kept
        if not self._heads.joins or any(aside.extend(max(0, calls - aside.open)) for calls in kept):
            pays = budget.reserve(self.calls_per_task) if self._pays_alone else None
        if pays is None and not self._run.live and aside.open and self._heads.pending is None:
            aside.refund()  # nothing was found that is worth a last validation: its calls pay further steps
            pays = budget.reserve(self.calls_per_task) if self._pays_alone else None
        return pays

    async def release(self) -> None:
        """Hand back what is kept for the last head where children stand for themselves, and no head is to come; and
        where no text can be better, since nothing else is paid then."""
        if self._heads.phase is Phase.PERFECT:
            self._set_aside.refund()
        elif self._heads.joins is False and self._set_aside.open:
            await self._heads.refresh()
            if self._heads.pending is None:
                self._set_aside.refund()

    def widen(self, minibatch: int) -> None:
        """Expect tasks of so many training examples: a sampler of the user's may draw more than it was asked for."""
        if minibatch > self._minibatch:
            self._minibatch = self._minibatch_alone = minibatch


class SearchWidth:
    """Admission: how many steps may run at once, by whether what they find comes together.

    Three quarters of the slots live, or as many as the workflow says. Where children come together all steps are short,
    and each does one step's work. Where each child stands for itself, steps that ran at once have made siblings of
    which one is used, and each that passes its screen costs a validation: three in sixteen of the slots are at work
    then, and a limited budget is spread over more generations. Until a child shows which it is, a run with a budget has
    one step more than have ended; where edits are expected, as many as leave :data:`GENERATIONS` steps to GEPA's
    search: 120 calls with whole texts scored .22 where six steps started at once, dspy.GEPA .37.

    Args:
        burst: requests that a step begins with.
        calls_alone: what a step costs at least whose child stands for itself.
    """

    def __init__(
        self,
        workflow: Workflow,
        slots: int,
        burst: int,
        joins: Callable[[], bool | None],
        calls_alone: Callable[[], int],
        expects_edits: bool,
    ) -> None:
        live, working = max(2, math.ceil(3 * slots / 4)), max(2, math.ceil(3 * slots / 16))
        given = None if workflow.live_steps is None else LiveSteps(workflow.live_steps, strict=True)
        fitting = max(2, math.ceil(live * min(1.0, NARROW / burst)))
        self._joined = given or LiveSteps(live, fitting, GENERATIONS_OF_CHANGES, burst, slots)
        self._alone = given or LiveSteps(live, working, GENERATIONS, burst, slots)
        self._joins, self._calls_alone, self._expects_edits = joins, calls_alone, expects_edits

    def admits(self, load: Load) -> bool:
        """See :meth:`Admission.admits`."""
        joins = self._joins()
        if joins is False:
            return self._alone.admits(replace(load, calls_per_step=max(load.calls_per_step, self._calls_alone())))
        if load.calls_left is None:
            return self._joined.admits(load)
        most = 1 + load.ended
        if self._expects_edits:
            most = max(most, (load.calls_left + load.calls_reserved) // self._calls_alone() - round(GENERATIONS))
        # As wide to the end as at the beginning: the last few steps, one after the other, would take longest.
        load = replace(load, calls_left=load.calls_left + round(load.ended * load.calls_per_step))
        if joins is None and not self._joined.strict:
            return replace(self._joined, limit=min(self._joined.limit, most)).admits(load)
        return self._joined.admits(load)
