"""Integration: one LM call reads stale children and joins what they learnt on the pool's best candidate.

    screened children of many steps -> batch -> integrate -> screen (union of minibatches, beside the base) -> validate

The new text decides; verdicts are a bonus. An integration costs its own request and screen, never the children that it
was about: those go on by themselves where its reply cannot be read, changes nothing, is longer than it can need, leaves
them out, or does not pass its screen. A run whose integrations do not land stops asking for them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
from dspy.primitives import Module
from gepa.proposer.base import SubsampleEvaluation

from dspy_flashevolve.engine.batcher import Batcher
from dspy_flashevolve.engine.batches import gather
from dspy_flashevolve.engine.errors import NoLongerWantedError, RolloutUnresolvedError
from dspy_flashevolve.engine.events import Integrated
from dspy_flashevolve.engine.replay import hash_of
from dspy_flashevolve.engine.rollouts import Rollout
from dspy_flashevolve.engine.staleness import PastCommit, Reflective, StaleChild, Texts
from dspy_flashevolve.engine.steps import EndKind, Step, StepEnded
from dspy_flashevolve.gepa.changes import is_too_long
from dspy_flashevolve.gepa.evaluate import Evaluations
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.propose import ReflectionCalls
from dspy_flashevolve.gepa.records import Candidate, Child, Proposal, Screened, scored
from dspy_flashevolve.gepa.settings import GepaSettings
from dspy_flashevolve.modules.integrate import VERDICTS, ChildVerdict, Integration
from dspy_flashevolve.programs.records import ReplyText
from dspy_flashevolve.programs.reflection import checked_texts
from dspy_flashevolve.programs.run import DspyRun

logger = logging.getLogger(__name__)

MOST_MISSES = 8
"""Integrations in a row that came to nothing, after which a run asks for no more: an LM that joins one in five would
fail so often once in six runs (.8 ** 8 = .17), one that joins half of them once in 256."""
SPARE_CHARACTERS = 1000
"""Characters by which a new text may be longer than the base and the children's texts together. What only joins them is
never longer; a reply that is has gone astray, mostly by repeating itself."""


Waiting = Sequence[tuple[Child, Proposal]]
"""Children of one step that passed their screen and wait to be integrated, and their proposals."""


@dataclass(eq=False)
class _Landing:
    """An integrated candidate on its way through its screen; its first member brings it there, the others wait.

    Args:
        base: what it was made from, and its index in the pool.
        version: the pool's, that the integration read.
        has_landed: it passed its screen, once it is done.
    """

    candidate: Candidate
    base: Candidate
    base_index: int
    version: int
    members: list[tuple[Step, Waiting]]
    done: anyio.Event = field(default_factory=anyio.Event)
    has_landed: bool = False


class Integrations:
    """Integrates what steps hand in.

    Args:
        run: slots, budget, events.
        pool: gepa's state.
        evaluations: runs candidates.
        policy: how many at once.
        module: a dspy module with the signature of ``StaleCandidateReflection``.
        settings: the LM that it asks, unless its predictors have LMs of their own, and how long texts may be.
        code_components: components that hold Python source.
        calls: counts the LM calls of integrations.
    """

    def __init__(
        self,
        run: DspyRun,
        pool: Pool,
        evaluations: Evaluations,
        policy: Reflective,
        module: Module,
        settings: GepaSettings,
        code_components: Sequence[str],
        calls: ReflectionCalls,
    ) -> None:
        self._run, self._pool, self._evaluations = run, pool, evaluations
        self._module, self._settings, self._code = module, settings, list(code_components)
        self._batcher = Batcher[Waiting, _Landing | None](run, policy.batch, policy.integrators, self._integrate)
        self._misses, self._calls = 0, calls

    async def watch(self) -> None:
        """Begin integrations as they become due; runs beside the steps."""
        await self._batcher.watch()

    async def take_in(self, step: Step, waiting: Waiting) -> Screened | None:
        """Have a step's children integrated.

        Returns:
            An integrated candidate that passed its screen, which the step is to bring to its end; None where the
            children go on by themselves.

        Raises:
            StepEnded: the children are in a candidate that another step brings to its end.
        """
        if self._misses >= MOST_MISSES:
            return None
        landing = await self._batcher.submit(step, waiting)
        if landing is None:
            return None
        first = landing.members[0][0]
        if first is step:
            return await self._screen(step, landing)
        await landing.done.wait()
        if not landing.has_landed:
            return None
        raise StepEnded(EndKind.INTEGRATED, f"in the candidate of step {first.number}")

    def _landed(self, has_landed: bool) -> None:
        """Count an integration that came to something, or to nothing."""
        if self._misses >= MOST_MISSES:
            return
        self._misses = 0 if has_landed else self._misses + 1
        if self._misses >= MOST_MISSES:
            logger.warning(
                "%d integrations in a row came to nothing: stale candidates are admitted as they are from now on, as "
                "with staleness='full'. A stronger reflection_lm may do better.",
                MOST_MISSES,
            )

    async def _integrate(self, batch: Sequence[tuple[Step, Waiting]]) -> list[_Landing | None]:
        """Integrate a batch: one call for each set of components that its children changed."""
        groups: dict[tuple[str, ...], list[tuple[Step, Waiting]]] = {}
        for step, waiting in batch:
            groups.setdefault(changed_components([child for child, _ in waiting]), []).append((step, waiting))
        landings = await gather([lambda group=group: self._group(group) for group in groups.values()])
        landing_of = {
            step.number: landing for landing in landings if landing is not None for step, _ in landing.members
        }
        return [landing_of.get(step.number) for step, _ in batch]

    async def _group(self, group: list[tuple[Step, Waiting]]) -> _Landing | None:
        base, index, version = await self._pool.write(self._base)
        numbered = [(step, *pair) for step, waiting in group for pair in waiting]
        children = [
            stale_child(number, child, proposal, version - step.version)
            for number, (step, child, proposal) in enumerate(numbered, start=1)
        ]
        commits = await self._pool.write(self._pool.commits_since, min(step.version for step, _ in group))
        lead = group[0][0]
        try:
            made = await self._asked(lead, base, children, commits)
        except RolloutUnresolvedError as error:
            made = Integration(failed=str(error))
        verdicts = tuple(
            (numbered[verdict.child - 1][0].number, verdict.verdict, verdict.reason) for verdict in made.verdicts
        )
        self._run.bus.emit(
            Integrated(
                self._run.clock(), lead.number, index, tuple(step.number for step, _ in group), verdicts, made.failed
            )
        )
        texts = {name: text for name, text in made.texts.items() if text.strip() != base[name].strip()}
        candidate = {**base, **texts}
        as_written = {name: text for name, text in candidate.items() if name not in texts or name in self._code}
        longer = too_long(texts, base, children) or is_too_long(
            candidate, self._settings.workflow.max_candidate_characters, self._settings.max_text_characters, as_written
        )
        if not texts or longer or await self._pool.write(self._is_known, candidate):
            self._landed(False)
            return None
        # A child that contradicts what was kept is in no text; where that is said of all of them, the text decides.
        left = {step for step, verdict, _ in verdicts if verdict == "conflicting"}
        left -= {step for step, verdict, _ in verdicts if verdict != "conflicting"}
        members = [(step, waiting) for step, waiting in group if step.number not in left] or group
        return _Landing(candidate, base, index, version, members)

    def _base(self) -> tuple[Candidate, int, int]:
        """The pool's best candidate, its index, and the version that is read; the seed before it is validated."""
        pool = self._pool
        index = pool.val_evaluation_policy.get_best_program(pool.state) if pool.seed_confirmed else 0
        return pool.state.program_candidates[index], index, pool.version

    def _is_known(self, candidate: Candidate) -> bool:
        waiting = (entry.candidate for entry in self._pool.speculative.entries)
        return any(candidate == other for other in (*self._pool.state.program_candidates, *waiting))

    async def _asked(
        self, lead: Step, head: Candidate, children: list[StaleChild], commits: list[PastCommit]
    ) -> Integration:
        inputs = {"head": dict(head), "children": children, "commits": commits, "code_components": self._code}
        question = {
            "head": json.dumps(head, sort_keys=True),
            "children": json.dumps([child.texts for child in children]),
        }
        asked = await self._run.call_module(
            "integrate",
            lead,
            self._module,
            inputs,
            lm=self._settings.reflection_lm,
            read=lambda answer: read_answer(answer, children),
            record=ReplyText(hash_of(question)),
        )
        self._calls.record_integrations(asked.calls)
        return asked.answer or Integration(failed=asked.spent.error or "no answer")

    # Screening what was integrated.

    async def _screen(self, step: Step, landing: _Landing) -> Screened | None:
        """Run an integrated candidate on the union of its children's minibatches, beside its base."""
        step.record_version(landing.version)  # it has read what was committed until then
        try:
            proposal = await self._compared(step, landing)
            landing.has_landed = proposal is not None
            self._landed(landing.has_landed)
        except RolloutUnresolvedError:
            return None
        finally:
            landing.done.set()
        if proposal is None:
            return None
        for other, _ in landing.members[1:]:
            other.reservation.refund()
        step.record_version(step.version, await self._pool.write(self._pool.expected_score, [proposal]))
        return Screened(proposal)

    async def _compared(self, step: Step, landing: _Landing) -> Proposal | None:
        """Run the candidate and its base on the same examples; the proposal, where it passes."""
        base = landing.base
        examples = {
            i: example
            for _, waiting in landing.members
            for child, _ in waiting
            for i, example in zip(child.parent.task.minibatch_ids, child.parent.task.minibatch, strict=True)
        }
        before = {i: score for i, score in self._evaluations.known(base).items() if i in examples}
        missing = [i for i in examples if i not in before]
        if not step.reservation.cover(len(examples) + len(missing)):
            # What the budget cannot pay twice is compared where the base was run already.
            examples, missing = {i: examples[i] for i in before}, []
            if not step.reservation.cover(len(examples)):
                examples = {}
        ids, after = list(examples), dict[Any, float]()
        before = {i: before[i] for i in ids if i in before}
        await self._pool.write(
            self._pool.reports.evaluation_begins, step, list(examples.values()), [landing.base_index]
        )
        gate = self._evaluations.gate(
            len(ids), lambda: sum(before[i] for i in ids) if len(before) == len(ids) else None
        )

        def base_scored(index: int, rollout: Rollout) -> bool:
            before[missing[index]] = rollout.score
            return True

        def scored(index: int, rollout: Rollout) -> bool:
            after[ids[index]] = rollout.score
            return gate is None or gate(index, rollout)

        async def evaluate(candidate: Candidate, wanted: list[Any], watch: Any) -> None:
            if wanted:
                rows = [examples[i] for i in wanted]
                await self._evaluations.minibatch("screen", step, candidate, wanted, rows, watch=watch)

        with suppress(NoLongerWantedError):
            await gather([
                lambda: evaluate(base, missing, base_scored), lambda: evaluate(landing.candidate, ids, scored)
            ])  # fmt: skip
        if gate is not None and gate.closed:
            await self._pool.write(self._given_up, step, landing, gate.seen, len(ids))
            return None
        return await self._pool.write(
            self._judged, step, landing, ids, [before[i] for i in ids], [after[i] for i in ids]
        )

    def _given_up(self, step: Step, landing: _Landing, scores: list[float], examples: int) -> None:
        """Report that it could not pass its screen any more. Runs in the pool's writer."""
        self._pool.count_calls()
        proposal = Proposal(landing.candidate, [landing.base_index], tag="integration")
        self._pool.give_up(step, proposal, scores, examples)

    def _judged(
        self, step: Step, landing: _Landing, ids: list[Any], before: list[float], after: list[float]
    ) -> Proposal | None:
        """Ask gepa's criterion for the proposal; None where it refuses. Runs in the pool's writer."""
        pool, parents = self._pool, self._parents(landing)
        members = [member.number for member, _ in landing.members]
        pool.count_calls()
        pool.reports.evaluation_ended(step, scored(after), parents)
        pool.log_entry(step).update(
            integrated_steps=members, subsample_scores=before, new_subsample_scores=after, subsample_ids=ids
        )
        proposal = Proposal(
            candidate=landing.candidate,
            parent_program_ids=parents,
            subsample_indices=ids,
            subsample_scores_before=before,
            subsample_scores_after=after,
            eval_before=SubsampleEvaluation(scores=before),
            eval_after=SubsampleEvaluation(scores=after),
            tag="integration",
            metadata={"steps": members},
        )
        with pool.acting_for(step):
            passes = bool(ids) and pool.acceptance_criterion.should_accept(proposal, pool.state)
        if passes:
            return proposal
        pool.reject(step, proposal)
        return None

    def _parents(self, landing: _Landing) -> list[int]:
        """The base first, then the children's parents, as far as they are in gepa's pool."""
        parents_of_children = [
            (*self._pool.speculative.resolve(() if child.parent.base is None else (child.parent.base,)),
             child.parent.task.parent_idx)[0]
            for _, waiting in landing.members for child, _ in waiting
        ]  # fmt: skip
        return list(dict.fromkeys([landing.base_index, *parents_of_children]))


def read_answer(answer: Any, children: Sequence[StaleChild]) -> Integration:
    """Read a module's answer; a component whose text could not be read is left as it is in the head."""
    changed = {name for child in children for name in child.texts}
    texts = {name: str(text) for name, text in dict(answer.texts).items() if name in changed and text}
    numbers = {child.number for child in children}
    verdicts = [
        ChildVerdict(child=verdict.child, verdict=verdict.verdict, reason=str(verdict.reason))
        for verdict in answer.verdicts
        if verdict.child in numbers and verdict.verdict in VERDICTS
    ]
    failed = dict(getattr(answer, "failed", None) or {})
    problem = "; ".join(f"{name}: {why}" for name, why in failed.items())  # a part of it would lose the rest
    if not problem and not texts and not verdicts:
        problem = "the module returned neither text nor verdict"
    return Integration(texts=checked_texts(texts), verdicts=verdicts, failed=problem[:300])


def stale_child(number: int, child: Child, proposal: Proposal, behind: int) -> StaleChild:
    """Describe a child that passed its screen to an integration.

    Args:
        number: names it in verdicts.
        behind: commits that it has not seen.
    """
    parent = child.parent.task.parent_candidate
    names = [name for name, text in child.candidate.items() if text != parent[name]]
    before, after = child.parent.evaluation.scores, proposal.subsample_scores_after or []
    return StaleChild(
        number=number,
        texts={name: child.candidate[name] for name in names},
        parent_texts={name: parent[name] for name in names},
        score_before=sum(before) / max(1, len(before)),
        score_after=sum(after) / max(1, len(after)),
        feedback=child.feedback,
        behind=behind,
    )


def too_long(texts: Texts, head: Texts, children: Sequence[StaleChild]) -> bool:
    """Say whether a new text exceeds all that it was made from by more than `SPARE_CHARACTERS`."""
    sources = [head, *(child.texts for child in children)]
    most = {name: SPARE_CHARACTERS + sum(len(source.get(name, "")) for source in sources) for name in texts}
    return any(len(text) > most[name] for name, text in texts.items())


def changed_components(children: Sequence[Child]) -> tuple[str, ...]:
    """List the components that children changed, sorted."""
    pairs = [(child.candidate, child.parent.task.parent_candidate) for child in children]
    return tuple(sorted({name for texts, before in pairs for name, text in texts.items() if text != before[name]}))
