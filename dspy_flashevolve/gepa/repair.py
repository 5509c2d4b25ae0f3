"""Repair of stale children: the reflection LM reads one beside what was committed meanwhile, and patches or drops it.

    propose -> (stale) -> repair -> screen -> ...

Where nobody answers, or the reply cannot be used, the child goes on as it was. A run whose repairs cannot be used, or
make nothing better, stops asking for them.

Source: FlashEvolve (arXiv 2605.08520) section 3.2, the reflective policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from dspy.primitives import Module
from pydantic import BaseModel

from dspy_flashevolve.engine.errors import RolloutUnresolvedError
from dspy_flashevolve.engine.events import Integrated
from dspy_flashevolve.engine.requests import gather
from dspy_flashevolve.engine.staleness import Discard, PastCommit, StaleChild, Texts
from dspy_flashevolve.engine.steps import EndKind, Step, StepEnded
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.gepa.admission import ReflectionCalls
from dspy_flashevolve.gepa.edits import is_too_long
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.records import Base, Child
from dspy_flashevolve.modules.rewriting import VERDICTS, ChildVerdict
from dspy_flashevolve.programs.records import ReplyText
from dspy_flashevolve.programs.reflection import checked_texts
from dspy_flashevolve.programs.run import DspyRun

logger = logger_named(__name__)

KNOWN = "the patched text is a candidate of the pool"
MOST_MISSES = 8
"""Repairs in a row that could not be used, or whose child was no better than what it was patched onto, after which a
run asks for no more: an LM that repairs one in five would fail so often once in six runs (.8 ** 8 = .17), one that
repairs half of them once in 256."""
SPARE_CHARACTERS = 1000
"""Characters by which a patched text may be longer than the pool's best and the child's together. What only joins them
is never longer; a reply that is has gone astray, mostly by repeating itself."""


class Repair(BaseModel):
    """What the reflection LM made of one stale child.

    Args:
        base: index in the pool of the candidate that the new texts stand on.
        texts: component -> new text, for those that the child changed; empty where nothing is to be taken over.
        verdicts: how the child stands to what was committed meanwhile, one for each component that it changed.
        failed: why the reply could not be used; empty where it was.
    """

    base: int
    texts: Texts = {}
    verdicts: list[ChildVerdict] = []
    failed: str = ""


class Repairs:
    """Has stale children repaired by a dspy module with the signature of ``StaleCandidateReflection``."""

    def __init__(
        self, run: DspyRun, pool: Pool, module: Module, code_components: Sequence[str], calls: ReflectionCalls
    ) -> None:
        self._run, self._pool, self._module, self._settings = run, pool, module, pool.settings
        self._code, self._calls, self._misses = list(code_components), calls, 0
        self.dropped = 0
        """Steps all of whose children were dropped."""

    async def repaired(self, step: Step, children: Sequence[Child]) -> list[Child]:
        """Have a step's children patched onto the pool's best candidate, as far as they have something to add to it.

        Returns:
            The children that go on: patched, or as they were where no reply could be used.

        Raises:
            StepEnded: each of them is subsumed by what was committed meanwhile, or in conflict with it.
        """
        pool = self._pool

        def read_pool() -> tuple[Base, int, list[PastCommit]]:
            best = pool.best_index
            return Base(best, pool.state.program_candidates[best]), pool.version, pool.commits_since(step.version)

        base, version, commits = await pool.write(read_pool)
        outcomes = await gather([partial(self._repaired, step, child, base, version, commits) for child in children])
        survivors = [outcome for outcome in outcomes if isinstance(outcome, Child)]
        if not survivors:
            self.dropped += 1
            reasons = dict.fromkeys(outcome.reason for outcome in outcomes if isinstance(outcome, Discard))
            raise StepEnded(EndKind.DISCARDED, f"stale: {'; '.join(reasons)}")
        if all(child.patched for child in survivors):
            step.record_version(version)  # they have read what was committed until then
        return survivors

    async def _repaired(
        self, step: Step, child: Child, base: Base, version: int, commits: list[PastCommit]
    ) -> Child | Discard:
        stale, is_spent = (
            stale_child(child, version - step.version),
            self._misses >= MOST_MISSES or self._calls.are_spent,
        )
        if not stale.texts or (is_spent and not self.are_paid(step, [child])):
            return child
        is_answered = True
        try:
            repair = await self._ask(step, child, base, stale, commits)
        except RolloutUnresolvedError as error:
            repair, is_answered = Repair(base=base.index, failed=str(error)), False
        if repair.base != base.index:  # an interrupted run has it of a candidate that was the best then
            base = Base(repair.base, await self._pool.write(lambda: self._pool.state.program_candidates[repair.base]))
        outcome = outcome_of(repair, stale, base.texts)
        if isinstance(outcome, dict):
            patched = Child(child.parent, outcome, child.feedback, base)
            outcome = await self._pool.write(self._problem_of, patched) or patched
        failed = outcome if isinstance(outcome, str) else ""
        verdicts = tuple((step.number, verdict.verdict, verdict.reason) for verdict in repair.verdicts)
        self._run.bus.emit(Integrated(self._run.clock(), step.number, base.index, (step.number,), verdicts, failed))
        if failed and is_answered and failed != KNOWN:
            self.record_use(False)
        return child if isinstance(outcome, str) else outcome

    def are_paid(self, step: Step, children: Sequence[Child]) -> bool:
        """Whether an interrupted run had a repair of one of these children."""
        store = self._run.store
        positions = [str(child.parent.index) for child in children]
        return any(store.find_reply(step.number, "integrate", position) is not None for position in positions)

    async def _ask(self, step: Step, child: Child, base: Base, stale: StaleChild, commits: list[PastCommit]) -> Repair:
        """Ask for a repair; one that an interrupted run has paid for is read again, with what it stands on.

        Raises:
            RolloutUnresolvedError: nobody answers.
        """
        inputs = {
            "head": dict(base.texts), "children": [stale], "commits": commits, "code_components": self._code,
        }  # fmt: skip
        asked = await self._run.call_module(
            "integrate", step, self._module, inputs, lm=self._settings.reflection_lm,
            read=lambda answer: read_answer(answer, stale, base.index), record=ReplyText(str(child.parent.index)),
        )  # fmt: skip
        self._calls.record(integrations=asked.calls)
        return asked.answer or Repair(base=base.index, failed=asked.spent.error or "no answer")

    def _problem_of(self, child: Child) -> str:
        """Say why a patched child cannot go on; empty where it can. Runs in the pool's writer."""
        candidate, workflow = child.candidate, self._settings.workflow
        as_written = {name: text for name, text in candidate.items() if name not in child.texts or name in self._code}
        if is_too_long(candidate, workflow.max_candidate_characters, self._settings.max_text_characters, as_written):
            return "the patched text is longer than a text may be"
        waiting = [entry.candidate for entry in self._pool.speculative.entries]
        return KNOWN if candidate in [*self._pool.state.program_candidates, *waiting] else ""

    def record_use(self, is_better: bool) -> None:
        """Take note of whether a repair made a child that is better than what it was patched onto."""
        self._misses = 0 if is_better else self._misses + 1
        if self._misses == MOST_MISSES:
            logger.warning(
                "%d repairs of stale candidates in a row could not be used, or made nothing better: stale candidates "
                "are admitted as they are from now on, as with staleness='full'. A stronger reflection_lm may do "
                "better.",
                MOST_MISSES,
            )


def outcome_of(repair: Repair, child: StaleChild, head: Texts) -> Texts | Discard | str:
    """Decide what becomes of a stale child.

    The verdict says whether it is dropped, the text what it is patched to: a conflict that the reply reconciles has a
    text, one that it does not has none. Verdicts that are missing or misnamed change nothing.

    Args:
        head: the texts that the repair stands on.

    Returns:
        The patched texts; a discard; or why the reply cannot be used, so that the child goes on as it was.
    """
    if repair.failed:
        return repair.failed
    verdicts = {verdict.verdict for verdict in repair.verdicts}
    texts = {name: text for name, text in repair.texts.items() if text.strip() != head[name].strip()}
    if verdicts == {"subsumed"}:
        return Discard("subsumed by what was committed meanwhile")
    most = {name: SPARE_CHARACTERS + len(head[name]) + len(child.texts.get(name, "")) for name in texts}
    if any(len(text) > most[name] for name, text in texts.items()):
        return "the patched text is longer than all that it was made from"
    if texts:
        return texts
    if verdicts and "orthogonal" not in verdicts:
        return Discard("in conflict with what was committed meanwhile")
    return "the reply changes nothing, and does not say that there is nothing to change"


def read_answer(answer: Any, child: StaleChild, base: int) -> Repair:
    """Read a module's answer about a child; ``base`` is the index in the pool of the candidate that it was shown."""
    texts = {name: str(text) for name, text in dict(answer.texts).items() if name in child.texts and text}
    verdicts = [
        ChildVerdict(child=verdict.child, verdict=verdict.verdict, reason=str(verdict.reason))
        for verdict in answer.verdicts
        if verdict.child == child.number and verdict.verdict in VERDICTS
    ]
    failed = dict(getattr(answer, "failed", None) or {})
    problem = "; ".join(f"{name}: {why}" for name, why in failed.items())  # a part of it would lose the rest
    return Repair(base=base, texts=checked_texts(texts), verdicts=verdicts, failed=problem[:300])


def stale_child(child: Child, behind: int) -> StaleChild:
    """Describe a child that is ``behind`` so many commits to whoever repairs it."""
    names = [name for name, text in child.candidate.items() if text != child.source[name]]
    scores = child.parent.evaluation.scores
    return StaleChild(
        number=1,
        texts={name: child.candidate[name] for name in names},
        parent_texts={name: child.source[name] for name in names},
        score_before=sum(scores) / max(1, len(scores)),
        feedback=child.feedback,
        behind=behind,
    )
