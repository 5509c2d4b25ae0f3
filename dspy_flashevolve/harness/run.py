"""One run of AsyncMetaHarness: its step, and what a run that goes on takes up.

.. code-block:: text

    select -> propose --(stale)--> patch -> check -> evaluate -> admit (version + 1 a candidate)
    (direction) (agent, k drafts)           (smoke)  (learn; candidate x example)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import anyio
import dspy

from dspy_flashevolve.engine.errors import DataError, RolloutUnresolvedError, RunAbortedError, hand_over
from dspy_flashevolve.engine.redaction import MARK
from dspy_flashevolve.engine.rollouts import gather
from dspy_flashevolve.engine.staleness import Discard, Integrate, Look
from dspy_flashevolve.engine.steps import End, EndKind, LiveSteps, NothingToDoError, Step, StepEnded
from dspy_flashevolve.harness.archive import CHECKED, Archive, Checked, Draft, Failed, drafts_in
from dspy_flashevolve.harness.evaluating import Evaluations, HarnessTask, texts_of
from dspy_flashevolve.harness.program import Harness
from dspy_flashevolve.harness.proposing import Directions, ReviseHarness, admitted_since, interface_for, proposer_of
from dspy_flashevolve.programs.program import answers_asynchronously
from dspy_flashevolve.programs.records import Asked, ReplyText
from dspy_flashevolve.programs.run import DspyRun
from dspy_flashevolve.sandbox.contract import CodeSandbox

logger = logging.getLogger(__name__)
T = TypeVar("T")
SMOKE_EXAMPLES = 3
LIVE_STEPS_A_PROPOSER = 3
"""One that is being written, and others that are checked and evaluated meanwhile."""
ENDED = -1
"""Stands for the numbers of steps that have ended."""
FAILED = "failed candidate "
"""Begins the names under which the journal keeps them."""


class HarnessRun:
    """One run.

    Args:
        of: the optimizer; its arguments are the run's.
        run: its slots, journal and statistics.
        task: what candidates are to solve.
        sandbox: where they run.

    Raises:
        ConfigurationError: no LM answers the candidates' calls.
    """

    def __init__(self, of: Any, run: DspyRun, task: HarnessTask, sandbox: CodeSandbox) -> None:
        self.of, self.run, self.task, self.sandbox = of, run, task, sandbox
        self.archive = Archive(of.log_dir)
        self.missing_protection: tuple[str, ...] = ()
        """Layers of the sandbox that the machine does not give."""
        self._evaluations = Evaluations(of, run, task, sandbox)
        self._calls = of.k * (SMOKE_EXAMPLES + len(task.lessons) + len(task.valset))
        self._directions = Directions(of.directions)
        self._proposers = anyio.Semaphore(of.proposers)
        self._seeded, self._admitting = anyio.Event(), anyio.Lock()
        self._being_evaluated: dict[int, list[Draft]] = {}
        self._taken_up: set[tuple[int, int]] = set()
        """Candidates that the archive has from before an interruption: step, and place in its proposal."""
        self._warned: set[str] = set()

    async def search(self) -> None:
        """Search until the iterations are used up, or a stop is asked for.

        Raises:
            DataError: the seed does not run.
            RunAbortedError: the provider refused for good, or did not answer the seed; or a stop came before that.
        """
        first = self._take_up()
        try:
            async with self.sandbox:
                self.missing_protection = self.sandbox.missing
                live = LiveSteps(LIVE_STEPS_A_PROPOSER * self.of.proposers)
                await self.run.evolve(self.step, live, calls=self._calls, first=first, at_least=1)
            if not self.archive.version:
                raise RunAbortedError(
                    f"the student was not evaluated: {self.run.stop_reason}. Let the run go on longer."
                )
        except Exception as error:
            if self.archive.version:
                hand_over(error, self.best_program())
            raise

    async def step(self, step: Step) -> End:
        """From a direction to what the archive takes in; the first step evaluates the student."""
        step.reservation.cover(self._calls)
        try:
            if step.number == 0:
                self.run.begin(step, 0, selection={})
                drafts = [self.task.seed]
            else:
                async with self._proposers:
                    direction = await self.select(step)
                    drafts, version = await self.propose(step, direction)
                drafts = await self.patch(step, drafts, version)
            checked = await self.check(step, drafts)
            return await self.admit(step, await self.evaluate(step, checked))
        except RolloutUnresolvedError as error:
            if step.number == 0:  # nothing can begin without it
                raise RunAbortedError(f"the student could not be evaluated: {error}") from error
            raise
        finally:
            self._directions.release(step.number)
            self._being_evaluated.pop(step.number, None)

    async def select(self, step: Step) -> str:
        """Reserve a direction; the student must have been evaluated."""
        if step.recorded is None and step.number > self.of.iterations:
            raise NothingToDoError
        await self._seeded.wait()
        before = step.recorded or {}
        direction = self._directions.reserve(step.number, before.get("direction"))
        version = before.get("version", self.archive.version)
        self.run.begin(step, version, selection={"direction": direction, "version": version})
        return direction

    async def propose(self, step: Step, direction: str) -> tuple[list[Draft], int]:
        """Let an agent read the archive and write modules; returns them, and the version when they were there."""
        of, archive = self.of, self.archive
        on_loop = answers_asynchronously(of.proposer_lm or self.run.settings.get("lm"))
        asked = await self._asked(
            "propose",
            step,
            proposer_of(archive, of.proposer_steps, on_loop),
            {
                "task": self.task.description,
                "interface": interface_for(of.limits),
                "archive_overview": archive.overview,
                "direction": direction,
                "taken": self._taken(step.number),
                "count": of.k,
            },
            lambda reply: (str(reply.modules), archive.version),
        )
        if asked.answer is None:
            raise StepEnded(EndKind.REJECTED, f"the proposer failed: {_told(asked.error)}")
        modules, version = asked.answer
        drafts, problems = drafts_in(modules, of.k, self.task.inputs, range(version), direction)
        if not drafts:
            said = "; ".join(problems) or "the reply was empty"
            raise StepEnded(EndKind.REJECTED, f"the proposer wrote no module: {said}")
        self._being_evaluated[step.number] = drafts
        return drafts, version

    async def patch(self, step: Step, drafts: list[Draft], version: int) -> list[Draft]:
        """Ask about each draft that was written while the archive grew whether it should take something over."""
        behind = version - step.version
        self.run.gaps["after_propose"][behind] += 1
        look = Look("after_propose", step.version)
        decision = self.run.look(step, self.of.staleness, look, version, integrates=behind > 0)
        if isinstance(decision, Discard):
            raise StepEnded(EndKind.DISCARDED, decision.reason)
        if not isinstance(decision, Integrate) or not behind:
            return drafts
        since = admitted_since(self.archive, step.version)

        async def patched(place: int, draft: Draft) -> Draft:
            asked = await self._asked(
                "patch",
                step,
                dspy.ChainOfThought(ReviseHarness),
                {"interface": interface_for(self.of.limits), "stale_module": draft.source, "admitted_since": since},
                lambda reply: str(reply.patched_module or "") if reply.verdict == "patch" else "",
                str(place),
            )
            found, _ = drafts_in(asked.answer or "", 1, self.task.inputs, range(version), draft.direction)
            return found[0] if found else draft  # a stale proposal stays valid

        drafts = await gather([partial(patched, *placed) for placed in enumerate(drafts)])
        step.saw(version)
        self._being_evaluated[step.number] = drafts
        return drafts

    async def check(self, step: Step, drafts: Sequence[Draft]) -> list[Checked]:
        """Run each draft on three training examples."""
        there = len(self.task.smoke_examples)
        chosen = step.rng.sample(range(there), min(SMOKE_EXAMPLES, there))
        return await gather([partial(self._evaluations.checked, step, draft, chosen) for draft in drafts])

    async def evaluate(self, step: Step, checked: Sequence[Checked]) -> list[Checked]:
        """Let each candidate learn where it can, and run it on the validation set."""
        return await gather([partial(self._evaluations.evaluated, step, one) for one in checked])

    async def admit(self, step: Step, candidates: Sequence[Checked]) -> End:
        """The one writer: what was evaluated goes to the archive, what failed beside it; to the journal first."""
        async with self._admitting:
            fresh = {place: one for place, one in enumerate(candidates) if (step.number, place) not in self._taken_up}
            await self._write(step, fresh)
            for one in fresh.values():
                number = self.archive.add(one)
                if not isinstance(one, Failed):
                    self.run.commit(
                        step,
                        version=self.archive.version,
                        candidate=number,
                        score=one.score,
                        best_score=self.archive.candidates[self.archive.best].score,
                        parents=one.draft.parents,
                    )
        failed = [one for one in candidates if isinstance(one, Failed)]
        if len(failed) < len(candidates):
            self._seeded.set()
            return End(EndKind.COMMITTED)
        if step.number == 0:
            raise DataError(f"the student does not run in the sandbox: {failed[0].failure}")
        return End(EndKind.REJECTED, f"every candidate failed: {failed[0].failure.reason}")

    def best_program(self) -> Harness:
        """The candidate with the best score so far, as a program."""
        best = self.archive.candidates[self.archive.best]
        program = Harness(
            self.task.signature,
            best.draft.source,
            memory=best.memory,
            limits=self.of.limits,
            accept_missing_protection=self.of.accept_missing_protection,
        )
        program.lm = self.task.lm
        return program

    def _taken(self, step: int) -> str:
        """What the other live steps look into, and what they have written."""
        lines = [f"- {direction}" for direction in self._directions.others(step)]
        for number, drafts in self._being_evaluated.items():
            if number != step:
                lines += [f"- being evaluated: {one.name}: {one.hypothesis}" for one in drafts]
        return "\n".join(lines) or "nothing"

    async def _asked(
        self,
        stage: str,
        step: Step,
        module: dspy.Module,
        inputs: dict[str, Any],
        read: Callable[[Any], T],
        position: str = "0",
    ) -> Asked[T]:
        """What a module of the proposer LM's answers; a reply that fits no format ends no run."""
        asked = await self.run.asked(
            stage, step, module, inputs, lm=self.of.proposer_lm, read=read, record=ReplyText(position)
        )
        if asked.error is not None and stage not in self._warned:
            self._warned.add(stage)
            logger.warning("%s: the reply cannot be used, the run goes on: %s", stage, _told(asked.error))
        return asked

    # The journal.

    async def _write(self, step: Step, fresh: dict[int, Checked]) -> None:
        """Write candidates down that are about to enter the archive."""
        journal = self.run.journal
        if journal is None:
            return
        number, failed = self.archive.version, len(self.archive.failed)
        for place, one in fresh.items():
            kept = {"step": step.number, "place": place, "candidate": asdict(one)}
            if isinstance(one, Failed):
                journal.journal.keep(f"{FAILED}{failed:06d}", kept)
                failed += 1
            else:
                texts, scores = texts_of(one.draft, one.memory), {str(n): score for n, score in enumerate(one.scores)}
                journal.committed(step.number, number, number + 1, texts, one.draft.parents, scores, one.score, kept)
                number += 1
        await journal.journal.flush()

    def _take_up(self) -> int:
        """Fill the archive with what an interrupted run has left in the journal; returns the next step's number.

        A step that was interrupted while its candidates were admitted runs again, for nothing: it adds those that are
        missing.
        """
        if self.run.journal is None:
            return 0
        rows = self.run.journal.journal.rows
        kept = rows("SELECT more AS kept FROM commits ORDER BY candidate_index")
        kept += rows("SELECT value AS kept FROM state WHERE name LIKE ? ORDER BY name", (f"{FAILED}%",))
        for text in (row["kept"] for row in kept):
            one = json.loads(text)
            number = self.archive.add(CHECKED.validate_python(one["candidate"]))
            self._taken_up.add((one["step"], one["place"]))
            if MARK in text:
                logger.warning("candidate %04d is not as it was: a secret was taken out of the journal", number)
        for row in rows("SELECT selection FROM steps WHERE number > 0 AND number IN (SELECT step FROM ends)"):
            self._directions.reserve(ENDED, json.loads(row["selection"])["direction"])
        self._directions.release(ENDED)
        if self.archive.version:
            self._seeded.set()
        self.run.journal.take_up()
        return self.run.journal.last_step + 1


def _told(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}"[:300]
