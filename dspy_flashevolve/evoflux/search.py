"""The search for a workflow that runs: plan, check, execute, repair, admit; several candidates of a question at once.

.. code-block:: text

    plan -> check -> execute -> admit            (the first candidates)
    repair -> check -> execute -> admit          (every other, of the best: by what its run said, else by an LM)

Source: Evoflux (arXiv 2606.12674). Of its search only this is here. Edits without an LM, and parents other than the
best, reach fewer goals in the benchmark; redesign and diversity pruning hardly ever fire.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import anyio
import anyio.lowlevel
import dspy
from dspy.utils.exceptions import AdapterParseError
from pydantic_core import to_jsonable_python

from dspy_flashevolve.engine.rollouts import gather
from dspy_flashevolve.evoflux.execution import Execution, Executor
from dspy_flashevolve.evoflux.plans import PlanError, as_python, read_plan
from dspy_flashevolve.evoflux.repair import Repairer
from dspy_flashevolve.evoflux.schemas import TooMuchWorkError, limited_work
from dspy_flashevolve.evoflux.stubs import python_names, stub_of
from dspy_flashevolve.evoflux.workflow import REFERENCE, TEXT, Workflow

FEEDBACK_CHARACTERS = 600
"""Characters of one output that a planner sees: what fields there are, not all that is in them. A round number."""
FUTILE_STEPS = 12
"""Steps in a row that find nothing new to try, after which the search ends. A round number."""

Origin = Literal["plan", "repair", "LM edit"]
"""How a candidate was made: planned; repaired by what its run said; edited by an LM."""
Mechanism = Literal["static repair", "LM edits"]
GoalCheck = Callable[[Mapping[str, Any]], "bool | float | Awaitable[bool | float]"]
"""Node -> output, of a workflow that ran completely, to whether the goal is reached, or how far, from 0 to 1."""


@dataclass(frozen=True)
class QueryStep:
    """A candidate on its way: its parent's score, and a number. A version is what the scheduler asks of every step."""

    version: int = 0
    value: float = 0.0
    number: int = field(default_factory=itertools.count(1).__next__)


Request = Callable[[str, QueryStep, Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""Makes a request in a stage, for a step, in a slot of the Evoflux and of the run around it."""


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """What the search may do: the arguments of :class:`~.program.Evoflux` of the same names."""

    max_seconds: float | None
    max_tool_calls: int | None
    max_tokens: int | None
    max_candidates: int
    width: int
    checks: Sequence[GoalCheck]
    without: frozenset[Mechanism]


@dataclass(frozen=True)
class Candidate:
    """A workflow, and what came of running it.

    Args:
        workflow: its nodes.
        origin: how it was made.
        planned: nodes of the LM's workflow that it goes back to: leaving one out is no evidence.
        number: in the order in which they came; 0 until it is run.
        execution: what ran.
        score: executed evidence, from 0 to 1, and the goal where that was checked.
        goal: how far it is reached, from 0 to 1; None where it was not checked.
    """

    workflow: Workflow
    origin: Origin
    planned: int
    number: int = 0
    execution: Execution = field(default_factory=lambda: Execution(()))
    score: float = 0.0
    goal: float | None = None

    @property
    def rank(self) -> tuple[float, bool, int]:
        """The best has the highest."""
        return self.score, self.execution.is_complete, -self.number


def evidence(execution: Execution, planned: int) -> float:
    """Score what ran: the share of nodes with a valid output; half for one whose output is against its schema.

    A writing node that waits for the final run counts as one that ran: nothing is known against it.
    """
    worth = {"ran": 1.0, "waiting": 1.0}
    points = sum(worth.get(run.status, 0.5 if run.fault == "output" else 0.0) for run in execution.runs)
    return points / max(planned, len(execution.runs), 1)


def _plain(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs that may be a parameter's value, of JSON's types, without what would be read as a reference."""
    made: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, str | int | float | list | dict):
            with suppress(ValueError, TypeError, RecursionError):
                text = json.dumps(to_jsonable_python(value), allow_nan=False)
                made |= {name: json.loads(text)} if not any(f'"{key}"' in text for key in (REFERENCE, TEXT)) else {}
    return made


class Search:
    """The search for one question.

    Args:
        planning, editing: predictors of nodes, and of those that an edit puts in and takes out.
        executor, request: run workflows, and make requests of LMs.
        tokens: returns the LM tokens spent so far.
        is_alone: an error of an LM ends the search with what was found, not the question. Inside of another run it is
            that run's.
    """

    def __init__(
        self,
        settings: SearchSettings,
        planning: dspy.Predict,
        editing: dspy.Predict,
        inputs: Mapping[str, Any],
        executor: Executor,
        request: Request,
        tokens: Callable[[], int],
        is_alone: bool = True,
    ) -> None:
        self.settings, self.executor, self.stats = settings, executor, executor.stats
        self._planning, self._editing, self._request, self._tokens = planning, editing, request, tokens
        self._names = python_names(executor.tools)
        shown = [stub_of(spec, self._names[name]) for name, spec in executor.tools.items()]
        self._asked = {**inputs, "tools": "\n".join(shown)}
        self._repairer, self._is_alone = Repairer(executor.tools, _plain(inputs)), is_alone
        self._last_reply = ""
        self.best: Candidate | None = None
        """The candidate with the most evidence; of equals one that ran completely, and the earliest."""
        self._repair: Workflow | None = None
        """The best, repaired by what its run observed; None where that changes nothing, or was tried."""
        self._seen: set[str] = set()
        self._futile = self._asking = self._replies = 0
        self._others = anyio.CancelScope()

    async def run(self) -> Candidate | None:
        """Search until a workflow runs completely, or a limit is reached; return the best, None where there is none."""
        with anyio.move_on_after(self.settings.max_seconds) as scope, self._others:
            await gather([self.step] * self.settings.width)
            # What costs no tokens goes first, before several steps ask the LM about the same fault.
            while self._goes_on() and (self.best is None or self._repair is not None):
                await self.step()
            await gather([self._work] * self.settings.width)
        if scope.cancelled_caught:
            self.stats.stop_reason = f"max_seconds={self.settings.max_seconds:g}"
        return self.best

    async def _work(self) -> None:
        while self._goes_on():
            await self.step()

    def _goes_on(self) -> bool:
        """Whether another step may begin; says why not."""
        limits, stats, best = self.settings, self.stats, self.best
        tokens = self._tokens() * (1 + self._asking / max(1, self._replies))  # who is asked now costs as those before
        reasons = {
            "a workflow ran completely": best is not None and best.score >= 1,
            f"max_tokens={limits.max_tokens}": tokens >= (limits.max_tokens or math.inf),
            f"max_tool_calls={limits.max_tool_calls}": self.executor.calls_left <= 0,
            f"max_candidates={limits.max_candidates}": stats.candidates + self._asking >= limits.max_candidates,
            "nothing new was found to try": self._futile >= FUTILE_STEPS,
        }
        stats.stop_reason = stats.stop_reason or next((reason for reason, holds in reasons.items() if holds), "")
        return not stats.stop_reason

    async def step(self) -> None:
        """Take one candidate from its making to its admission."""
        step = QueryStep(value=self.best.score if self.best else 0.0)
        try:
            made = await self._propose(step)
        except (AdapterParseError, PlanError) as error:  # the reply is no workflow
            self.stats.unusable_replies += 1
            self._last_reply = f"The last reply could not be read. {error}"[:FEEDBACK_CHARACTERS]
            made = None
        except dspy.LMError as error:
            if self.best is None or not self._is_alone:
                raise
            self.stats.stop_reason = f"the planner's LM failed: {error}"[:FEEDBACK_CHARACTERS]
            return
        if made is None or str(made.workflow) in self._seen:
            if made is not None and made.origin == "LM edit":
                self._last_reply = "The last reply was tried before: write others."
            self._futile += 1
            await anyio.lowlevel.checkpoint()
            return
        self._futile = 0
        self._seen.add(str(made.workflow))
        self.stats.candidates += 1
        made = replace(made, number=self.stats.candidates)
        execution = await self.executor.run(made.workflow)
        score, goal = evidence(execution, made.planned), None
        if self.settings.checks and not execution.waits:
            goal = await self._goal(execution)
            score = (score + goal) / 2
        self._admit(replace(made, execution=execution, score=score, goal=goal))

    def _admit(self, candidate: Candidate) -> None:
        self.stats.origins[candidate.origin] += 1
        if self.best is None or candidate.rank > self.best.rank:
            self.best, self._repair = candidate, self._repaired(candidate)
            self.executor.keep_calls_for(candidate.workflow)
        if candidate.score >= 1:  # what the other steps are about cannot be better
            self.stats.stop_reason = "a workflow ran completely"
            self._others.cancel()

    async def _goal(self, execution: Execution) -> float:
        if not execution.is_complete:
            return 0.0
        results = [check(execution.outputs) for check in self.settings.checks]
        return statistics.mean([float(await each if inspect.isawaitable(each) else each) for each in results])

    async def _propose(self, step: QueryStep) -> Candidate | None:
        """Make a workflow; None where nothing was found."""
        best = self.best
        if best is None:
            feedback = self._last_reply or "none yet"
            return self._written("plan", await self._reply("plan", step, self._planning, feedback=feedback))
        if self._repair is not None:
            repaired, self._repair = self._repair, None
            return Candidate(repaired, "repair", best.planned)
        if "LM edits" in self.settings.without:
            return None
        feedback = f"{self._feedback_on(best)}\n{self._last_reply}".rstrip()
        edited = await self._reply("repair", step, self._editing, workflow=self._shown(best), feedback=feedback)
        made = self._written("LM edit", edited, best.execution.outputs)
        return replace(made, planned=max(best.planned, made.planned))

    async def _reply(self, stage: str, step: QueryStep, predictor: dspy.Predict, **fields: str) -> Workflow:
        """Ask for a plan, and read it."""
        again = self._replies + self._asking
        # dspy's cache would give the same reply to the same prompt.
        lm = getattr(predictor, "lm", None) or dspy.settings.lm  # a program may have another module in its place
        own = getattr(predictor, "config", {}).get("temperature") or getattr(lm, "kwargs", {}).get("temperature")
        config = {"config": {"rollout_id": again, "temperature": own or 1.0}} if again else {}
        self._asking += 1
        try:
            reply = await self._request(stage, step, partial(predictor.acall, **self._asked, **fields, **config))
        finally:
            self._asking, self._replies = self._asking - 1, self._replies + 1
        read = read_plan(str(reply.plan or ""), self.executor.tools, self._repairer.inputs)
        self._last_reply = ""
        return read

    def _shown(self, candidate: Candidate) -> str:
        """Write a candidate's workflow for an LM."""
        return as_python(candidate.workflow, self._names)

    def _feedback_on(self, candidate: Candidate) -> str:
        """Say for an LM what the check and the run had against a workflow."""
        lines = [
            f"check: {complaint}"[:FEEDBACK_CHARACTERS] for complaint in candidate.workflow.check(self.executor.tools)
        ]
        lines += [f"node {run.node!r}: {run.outcome(FEEDBACK_CHARACTERS)}" for run in candidate.execution.runs]
        return "\n".join([*lines, "The goal was not reached."] if candidate.execution.is_complete else lines)

    def _repaired(self, candidate: Candidate) -> Workflow | None:
        """Repair a candidate by what its run observed; None where that changes nothing, or was tried."""
        with suppress(TooMuchWorkError), limited_work():
            if "static repair" not in self.settings.without:
                repaired = self._repairer.repaired_run(candidate.workflow, candidate.execution)
                return None if str(repaired) in self._seen else repaired
        return None

    def _written(self, origin: Origin, workflow: Workflow, outputs: Mapping[str, Any] | None = None) -> Candidate:
        """Repair a new workflow by its schemas, before any call."""
        planned = len(workflow.nodes)
        with suppress(TooMuchWorkError), limited_work():
            if "static repair" not in self.settings.without:
                workflow = replace(self._repairer, outputs=outputs or {}).repaired(workflow)
        return Candidate(workflow, origin, planned)
