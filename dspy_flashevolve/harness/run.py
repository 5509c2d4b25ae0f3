"""One run of AsyncMetaHarness: its stages, on the workbench.

.. code-block:: text

    select -> [q] -> propose --(stale)--> patch -> check -> [q] -> evaluate -> [q] -> admit (version + 1 a candidate)
    (direction)      (agent, k drafts)             (smoke)         (learn; candidate x example)
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import dspy

from dspy_flashevolve.engine.admission import LiveTickets
from dspy_flashevolve.engine.blame import hand_over
from dspy_flashevolve.engine.errors import ConfigurationError, DataError, FlashEvolveError
from dspy_flashevolve.engine.gathering import gather
from dspy_flashevolve.engine.item import End, EndKind, Item, Ticket
from dspy_flashevolve.engine.pipeline import NotNow, Opened
from dspy_flashevolve.engine.stages import Finish, Forward, Outcome
from dspy_flashevolve.engine.staleness import Discard, History, Integrate, Look
from dspy_flashevolve.harness.archive import Archive, Checked, Failed
from dspy_flashevolve.harness.drafts import Draft, drafts_in
from dspy_flashevolve.harness.evaluating import Evaluations, HarnessTask, RunSettings
from dspy_flashevolve.harness.program import Harness
from dspy_flashevolve.harness.proposing import Directions, ReviseHarness, admitted_since, interface_for, proposer_of
from dspy_flashevolve.programs.runner import answers_asynchronously
from dspy_flashevolve.sandbox.contract import CodeSandbox
from dspy_flashevolve.workbench import Workbench

logger = logging.getLogger(__name__)
SMOKE_EXAMPLES = 3
LIVE_TICKETS_A_PROPOSER = 3
"""One that is being written, and others that are checked and evaluated meanwhile."""


class HarnessRun:
    """One run.

    Args:
        bench: of this run.
        task: what candidates are to solve.
        sandbox: where they run.
        settings: the rest.
    """

    def __init__(self, bench: Workbench, task: HarnessTask, sandbox: CodeSandbox, settings: RunSettings) -> None:
        self.bench, self.task, self.sandbox, self.settings = bench, task, sandbox, settings
        self.archive = Archive(settings.log_dir)
        self.missing_protection: tuple[str, ...] = ()
        """Layers of the sandbox that the machine does not give."""
        self._directions = Directions(settings.directions)
        self._writing: dict[int, tuple[Draft, ...]] = {}
        self._warned: set[str] = set()
        lm = bench.settings.get("lm") if task.lm is None else bench.models.paced(task.lm)
        if lm is None:
            raise ConfigurationError("no LM is configured: dspy.configure(lm=...), or an LM of the student's own.")
        rollouts = SMOKE_EXAMPLES + len(task.lessons) + len(task.valset)
        admission = LiveTickets(LIVE_TICKETS_A_PROPOSER * settings.proposers)
        self.source = bench.source(self.select, calls=settings.k * rollouts, admission=admission)
        self.source.on_end = self._forget
        self.evaluations = Evaluations(bench, self.source, task, sandbox, lm, settings)

    async def run(self) -> None:
        """Search until the iterations are used up, or a stop is asked for.

        Raises:
            DataError: the seed does not run.
        """
        stage = self.bench.stage
        stages = [
            stage("propose", self.propose, workers=self.settings.proposers),
            stage("patch", self.patch),
            stage("check", self.check),
            stage("evaluate", self.evaluate),
            stage("admit", self.admit, workers=1),
        ]
        try:
            async with self.sandbox:
                self.missing_protection = self.sandbox.missing
                await self.bench.evolve(stages, self.source)
        except Exception as error:
            if self.archive.version:
                hand_over(error, self.best_program())
            raise

    def best_program(self) -> Harness:
        """The candidate with the best score so far, as a program."""
        best = self.archive.candidates[self.archive.best]
        program = Harness(
            self.task.signature,
            best.draft.source,
            memory=best.memory,
            limits=self.settings.limits,
            accept_missing_protection=self.settings.accept_missing_protection,
        )
        program.lm = self.task.lm
        return program

    async def select(self, ticket: Ticket) -> Opened | NotNow:
        """The first ticket evaluates the student; each of the others reserves a direction."""
        if ticket.number == 0:
            return Opened("check", Item((self.task.seed,), ticket, 0))
        if ticket.number > self.settings.iterations:
            return NotNow.EXHAUSTED
        if not self.archive.version:
            return NotNow.FULL
        return Opened("propose", Item(self._directions.reserve(ticket.number), ticket, self.archive.version))

    async def propose(self, item: Item[str]) -> Outcome:
        """Let an agent read the archive and write modules."""
        settings = self.settings
        on_loop = answers_asynchronously(settings.proposer_lm or self.bench.settings.get("lm"))
        reply = await self._asked(
            item,
            "propose",
            proposer_of(self.archive, settings.proposer_steps, on_loop),
            task=self.task.description,
            interface=interface_for(settings.limits),
            archive_overview=self.archive.overview,
            direction=item.payload,
            taken=self._taken(item.ticket.number),
            count=settings.k,
        )
        if isinstance(reply, Exception):
            return Finish(End(EndKind.REJECTED, f"the proposer failed: {_told(reply)}"))
        known = range(self.archive.version)
        drafts, problems = drafts_in(str(reply.modules), settings.k, self.task.inputs, known, item.payload)
        if not drafts:
            said = "; ".join(problems) or "the reply was empty"
            return Finish(End(EndKind.REJECTED, f"the proposer wrote no module: {said}"))
        self._writing[item.ticket.number] = tuple(drafts)
        return self._aged(item, tuple(drafts))

    async def _asked(self, item: Item[Any], stage: str, module: dspy.Module, **inputs: Any) -> Any:
        """What a module of the proposer LM's answers, or what it raised: a reply that fits no format ends no run."""
        try:
            claim = self.bench.claim(item, stage)
            return await self.bench.ask(claim, module, lm=self.settings.proposer_lm, **inputs)
        except FlashEvolveError:
            raise
        except Exception as error:
            if stage not in self._warned:
                self._warned.add(stage)
                logger.warning("%s: the reply cannot be used, the run goes on: %s", stage, _told(error))
            return error

    def _aged(self, item: Item[Any], drafts: tuple[Draft, ...]) -> Outcome:
        """Where drafts go that were written while the archive grew."""
        look = Look("after_propose", item.version)
        decision = self.settings.staleness.decide(look, History(self.archive.version))
        if isinstance(decision, Discard):
            return Finish(End(EndKind.DISCARDED, decision.reason))
        return Forward("patch" if isinstance(decision, Integrate) else "check", drafts)

    async def patch(self, item: Item[tuple[Draft, ...]]) -> Outcome:
        """Ask about each stale draft whether it should take over something of what was admitted meanwhile."""
        version = self.archive.version
        drafts = await gather([partial(self._patched, item, draft) for draft in item.payload])
        self._writing[item.ticket.number] = tuple(drafts)
        return Forward("check", tuple(drafts), version=version)

    async def _patched(self, item: Item[Any], draft: Draft) -> Draft:
        reply = await self._asked(
            item,
            "patch",
            dspy.ChainOfThought(ReviseHarness),
            interface=interface_for(self.settings.limits),
            stale_module=draft.source,
            admitted_since=admitted_since(self.archive, item.version),
        )
        if isinstance(reply, Exception):
            return draft  # a stale proposal stays valid
        known = range(self.archive.version)
        found, _ = drafts_in(str(reply.patched_module or ""), 1, self.task.inputs, known, draft.direction)
        return found[0] if reply.verdict == "patch" and found else draft

    async def check(self, item: Item[tuple[Draft, ...]]) -> Outcome:
        """Run each draft on three training examples."""
        there = len(self.task.smoke_examples)
        chosen = item.ticket.rng.sample(range(there), min(SMOKE_EXAMPLES, there))
        checked = await gather([partial(self.evaluations.checked, item, draft, chosen) for draft in item.payload])
        return Forward("evaluate", tuple(checked))

    async def evaluate(self, item: Item[tuple[Checked, ...]]) -> Outcome:
        """Let each candidate learn where it can, and run it on the validation set."""
        done = await gather([partial(self.evaluations.evaluated, item, one) for one in item.payload])
        return Forward("admit", tuple(done))

    async def admit(self, item: Item[tuple[Checked, ...]]) -> Outcome:
        """The one writer: what was evaluated goes to the archive, what failed beside it."""
        failed = [one for one in item.payload if isinstance(one, Failed)]
        for one in failed:
            self.archive.refuse(one)
        for one in item.payload:
            if not isinstance(one, Failed):
                number = self.archive.add(one)
                self.bench.commits.add(
                    item,
                    version=self.archive.version,
                    candidate=number,
                    score=one.score,
                    best_score=self.archive.candidates[self.archive.best].score,
                    parents=one.draft.parents if number else (),
                )
        if len(failed) < len(item.payload):
            return Finish(End(EndKind.COMMITTED))
        if item.ticket.number == 0:
            raise DataError(f"the student does not run in the sandbox: {failed[0].failure}")
        return Finish(End(EndKind.REJECTED, f"every candidate failed: {failed[0].failure.reason}"))

    def _taken(self, ticket: int) -> str:
        """What the other live tickets look into, and what they have written."""
        lines = [f"- {direction}" for direction in self._directions.others(ticket)]
        for number, drafts in self._writing.items():
            if number != ticket:
                lines += [f"- being evaluated: {one.name}: {one.hypothesis}" for one in drafts]
        return "\n".join(lines) or "nothing"

    def _forget(self, ticket: Ticket, end: End) -> None:
        self._directions.release(ticket.number)
        self._writing.pop(ticket.number, None)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]
