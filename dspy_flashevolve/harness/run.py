"""One run of AsyncMetaHarness: the step of a proposal, and how an interrupted run goes on.

.. code-block:: text

    select ------> propose ---------> check ---> evaluate ---> admit (version + 1 a candidate)
    (direction)    (agent, k drafts)  (smoke)    (learn; candidate x example)
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import dspy

from dspy_flashevolve.engine.errors import (
    ConfigurationError,
    DataError,
    RolloutUnresolvedError,
    RunAbortedError,
    attach_best_program,
)  # fmt: skip
from dspy_flashevolve.engine.redaction import REDACTED
from dspy_flashevolve.engine.requests import gather
from dspy_flashevolve.engine.steps import End, EndKind, LiveSteps, NothingToDoError, Step, StepEnded
from dspy_flashevolve.engine.store import reporting_damage
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.harness.archive import CHECKED, Archive, Checked, Draft, Failed, drafts_in, sources_in
from dspy_flashevolve.harness.evaluating import FEW_LESSONS, Evaluations, HarnessSettings, HarnessTask, texts_of
from dspy_flashevolve.harness.program import Harness
from dspy_flashevolve.harness.proposing import ProposerTools, agent_of, interface_for
from dspy_flashevolve.programs.records import ReplyText
from dspy_flashevolve.programs.run import DspyRun
from dspy_flashevolve.programs.usage import COUNTED_BY, tokens_of
from dspy_flashevolve.sandbox.contract import CodeSandbox

logger = logger_named(__name__)
SMOKE_EXAMPLES = 3
"""Examples of a check: enough that one hard example does not fail a candidate, few beside a validation set."""
LIVE_STEPS_A_PROPOSER = 3
"""Live steps for each proposer: while its next proposal is written, two earlier ones are checked or evaluated. More
steps make staler proposals. No other value was measured."""
FAILED = "failed candidate "
"""Prefix of the names under which the journal keeps failed candidates."""


class HarnessRun:
    """One search of `AsyncMetaHarness`, from the student to the best candidate."""

    def __init__(self, settings: HarnessSettings, run: DspyRun, task: HarnessTask, sandbox: CodeSandbox) -> None:
        self.settings, self.run, self.task, self.sandbox = settings, run, task, sandbox
        self.archive = Archive(None if settings.log_dir is None else Path(settings.log_dir))
        self.missing_protection: tuple[str, ...] = ()
        """Names of the sandbox's layers that the machine does not give."""
        self._evaluations = Evaluations(settings, run, task, sandbox)
        self._calls = settings.k * (2 * SMOKE_EXAMPLES + FEW_LESSONS + len(task.lessons) + len(task.valset))
        self._directions: dict[int, str] = {}
        """Number of a live step -> its direction."""
        self._uses = Counter[str]()
        """Direction -> steps that have had it."""
        self._proposers = anyio.Semaphore(settings.proposers)
        self._seeded, self._admitting = anyio.Event(), anyio.Lock()
        self._being_evaluated: dict[int, list[Draft]] = {}
        self._resumed: set[tuple[int, int]] = set()
        """(step, position in its proposal) of the candidates that were in the journal."""
        self._has_warned = False
        self._agent(self._tools(0))  # before anything is asked

    async def search(self) -> None:
        """Search until all iterations are done or the run is stopped.

        Raises DataError: the student does not run in the sandbox; RunAbortedError: the provider refused for good, or
        the student was not evaluated before a stop.
        """
        first = self._resume()
        try:
            async with self.sandbox:
                self.missing_protection = self.sandbox.missing
                live = LiveSteps(LIVE_STEPS_A_PROPOSER * self.settings.proposers)
                await self.run.evolve(self.step, live, calls_per_step=self._calls, first_number=first, min_steps=1)
            if not self.archive.version:
                raise RunAbortedError(
                    f"the student was not evaluated: {self.run.stop_reason}. Let the run go on longer."
                )
        except Exception as error:
            if self.archive.version:
                attach_best_program(error, self.best_program())
            raise

    async def step(self, step: Step) -> End:
        """Take a step from its direction to the admission of its candidates. Step 0 evaluates the student."""
        step.reservation.cover(self._calls)
        try:
            if step.number == 0:
                self.run.begin(step, 0, selection={})
                drafts = [self.task.seed]
            else:
                async with self._proposers:
                    drafts = await self.propose(step, await self.select(step))
            checked = await self.check(step, drafts)
            return await self.admit(step, await self.evaluate(step, checked))
        except RolloutUnresolvedError as error:
            if step.number == 0:  # nothing can begin without it
                raise RunAbortedError(f"the student could not be evaluated: {error}") from error
            raise
        finally:
            self._directions.pop(step.number, None)
            self._being_evaluated.pop(step.number, None)

    async def select(self, step: Step) -> str:
        """Once the student is evaluated, take the direction that the fewest live steps have, of these the one that
        was taken least; a step that runs again has the one that it had."""
        if step.recorded is None and step.number > self.settings.iterations:
            raise NothingToDoError
        await self._seeded.wait()
        live = list(self._directions.values())
        direction = min(self.settings.directions, key=lambda text: (live.count(text), self._uses[text]))
        selection: dict[str, Any] = step.recorded or {"direction": direction, "version": self.archive.version}
        self._directions[step.number] = selection["direction"]
        self._uses[selection["direction"]] += 1
        self.run.begin(step, selection["version"], selection=selection)
        return selection["direction"]

    async def propose(self, step: Step, direction: str) -> list[Draft]:
        """Let an agent read the archive and write drafts."""
        settings, archive, tools = self.settings, self.archive, self._tools(step.number)
        # The journal keeps the archive's version with the reply: a step that runs again reads it as it did before.
        asked = await self.run.call_module(
            "propose",
            step,
            self._agent(tools),
            {
                "task": self.task.description,
                "interface": interface_for(settings.limits),
                "archive_overview": archive.overview,
                "direction": direction,
                "taken": self._reserved(step.number),
                "count": settings.k,
            },
            lm=settings.proposer_lm,
            read=lambda reply: (sources_in(str(reply.modules), tools.drafts), archive.version),
            record=ReplyText("0"),
            is_fresh=True,
        )
        if tools.aborted is not None:
            raise tools.aborted
        if asked.answer is None:
            error = f"{type(asked.error).__name__}: {asked.error}"[:300]
            if not self._has_warned:
                self._has_warned = True
                logger.warning("propose: the reply cannot be used, the run goes on: %s", error)
            raise StepEnded(EndKind.REJECTED, f"the proposer failed: {error}")
        sources, version = asked.answer
        drafts, problems = drafts_in(sources, settings.k, self.task.inputs, archive.candidates[:version], direction)
        if not drafts:
            reason = "; ".join(problems) or "the reply was empty"
            raise StepEnded(EndKind.REJECTED, f"the proposer wrote no module: {reason}")
        self.run.gaps["after_propose"][version - step.version] += 1
        self._being_evaluated[step.number] = drafts
        return drafts

    def _tools(self, step: int) -> ProposerTools:
        most = self.settings.proposer_tokens

        def is_spent() -> bool:
            used = dspy.settings.get(COUNTED_BY)
            return most is not None and used is not None and tokens_of(used) >= most

        examples, runs = len(self.task.smoke_examples), self.settings.proposer_runs
        rehearse = partial(self._evaluations.rehearse, step)
        return ProposerTools(self.archive, self.task.inputs, rehearse, examples, runs, is_spent)

    def _agent(self, tools: ProposerTools) -> dspy.Module:
        """Return the agent of one proposal; ConfigurationError where the user's ``proposer`` made no module."""
        if self.settings.proposer is None:
            return agent_of(tools.tools(), self.settings.proposer_steps)
        agent = self.settings.proposer(tools.tools())
        if not isinstance(agent, dspy.Module):
            raise ConfigurationError(f"proposer(tools) returned {agent!r:.80}, expected a dspy.Module.")
        return agent

    async def check(self, step: Step, drafts: Sequence[Draft]) -> list[Checked]:
        """Run each draft on `SMOKE_EXAMPLES` training examples."""
        available = len(self.task.smoke_examples)
        chosen = step.rng.sample(range(available), min(SMOKE_EXAMPLES, available))
        return await gather([partial(self._evaluations.check, step, draft, chosen) for draft in drafts])

    async def evaluate(self, step: Step, checked: Sequence[Checked]) -> list[Checked]:
        """Let each candidate learn if it can, and run it on the validation set."""
        return await gather([partial(self._evaluations.evaluate, step, candidate) for candidate in checked])

    async def admit(self, step: Step, candidates: Sequence[Checked]) -> End:
        """Write the candidates to the journal, then to the archive. One step at a time does this."""
        async with self._admitting:
            fresh = {
                position: candidate
                for position, candidate in enumerate(candidates)
                if (step.number, position) not in self._resumed
            }
            await self._write(step, fresh)
            for candidate in fresh.values():
                number = self.archive.add(candidate)
                if not isinstance(candidate, Failed):
                    self.run.commit(
                        step,
                        version=self.archive.version,
                        candidate=number,
                        score=candidate.score,
                        best_score=self.archive.candidates[self.archive.best].score,
                        parents=candidate.draft.parents,
                    )
        failed = [candidate for candidate in candidates if isinstance(candidate, Failed)]
        if len(failed) < len(candidates):
            self._seeded.set()
            return End(EndKind.COMMITTED)
        if step.number == 0:
            raise DataError(f"the student does not run in the sandbox: {failed[0].failure}")
        return End(EndKind.REJECTED, f"every candidate failed: {failed[0].failure.reason}")

    def best_program(self) -> Harness:
        """Return the candidate with the best score so far as a program."""
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

    def _reserved(self, step: int) -> str:
        """Return in words what the other live steps look into and have written, for a proposer to leave to them."""
        lines = [f"- {direction}" for number, direction in self._directions.items() if number != step]
        for number, drafts in self._being_evaluated.items():
            if number != step:
                lines += [f"- being evaluated: {draft.name}: {draft.hypothesis}" for draft in drafts]
        return "\n".join(lines) or "nothing"

    # The journal.

    async def _write(self, step: Step, fresh: dict[int, Checked]) -> None:
        """Write candidates to the journal that are about to be admitted."""
        store = self.run.store
        number, failed = self.archive.version, len(self.archive.failed)
        for position, candidate in fresh.items():
            record = {"step": step.number, "place": position, "candidate": asdict(candidate)}
            if isinstance(candidate, Failed):
                store.set_state(f"{FAILED}{failed:06d}", lambda record=record: record)
                failed += 1
            else:
                texts = texts_of(candidate.draft, candidate.memory)
                scores = {str(number): score for number, score in enumerate(candidate.scores)}
                store.record_commit(
                    step.number, number, number + 1, texts, candidate.draft.parents, scores, candidate.score, record
                )
                number += 1
        await store.flush()

    def _resume(self) -> int:
        """Fill the archive from the journal of an interrupted run, and return the number of the next step.

        A step that was interrupted while its candidates were admitted runs again at no cost, since the journal has its
        replies and rollouts, and adds the candidates that are missing.
        """
        with reporting_damage(self.run.store.path):
            rows = self.run.store.rows
            records = rows("SELECT more AS kept FROM commits ORDER BY candidate_index")
            records += rows("SELECT value AS kept FROM state WHERE name LIKE ? ORDER BY name", (f"{FAILED}%",))
            for text in (row["kept"] for row in records):
                record = json.loads(text)
                number = self.archive.add(CHECKED.validate_python(record["candidate"]))
                self._resumed.add((record["step"], record["place"]))
                if REDACTED in text:
                    logger.warning("candidate %04d is not as it was: a secret was taken out of the journal", number)
            for row in rows("SELECT selection FROM steps WHERE number > 0 AND number IN (SELECT step FROM ends)"):
                self._uses[json.loads(row["selection"])["direction"]] += 1
            if self.archive.version:
                self._seeded.set()
            self.run.store.load_unfinished()
        return self.run.store.last_step + 1
