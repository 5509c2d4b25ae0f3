"""Validation of the head, the text that joins what many children add: when it is worth one, and the last one.

A head follows from all rollouts so far (credit.py). It is validated again where it is better by some margin, and within
a share of the metric calls. The last one is what the run returns: calls are kept for it, it begins while
``max_seconds`` still leave time, and the reflection LM writes its text anew; both are validated. A best text that is
validated already, a perfect one too, is written anew as well before calls or reflections end. How far a run is with the
last one is a matter of ending.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import stdev
from typing import Any

import anyio

from dspy_flashevolve.engine.errors import RolloutUnresolvedError
from dspy_flashevolve.engine.staleness import Texts
from dspy_flashevolve.engine.steps import Step
from dspy_flashevolve.engine.store import hash_of
from dspy_flashevolve.gepa.admission import ReflectionCalls
from dspy_flashevolve.gepa.credit import Head
from dspy_flashevolve.gepa.edit_search import EditSearch
from dspy_flashevolve.gepa.edits import is_too_long
from dspy_flashevolve.gepa.ending import Ending, PendingValidation
from dspy_flashevolve.gepa.iterations import Iterations
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.records import Child, Commit, Proposal, Screened, Validated
from dspy_flashevolve.gepa.repair import SPARE_CHARACTERS
from dspy_flashevolve.modules.rewriting import Consolidation
from dspy_flashevolve.programs.records import ReplyText
from dspy_flashevolve.programs.reflection import checked_texts
from dspy_flashevolve.programs.run import DspyRun

CONSOLIDATION = "consolidation"
"""Tag of proposals that are written anew."""


COMPARED = 0.25
"""Share of a validation on which a head and the same text written anew are compared where both cannot be paid whole.
Under a model that rewrites whole texts (``rewriting``) runs of 120 metric calls gain .168 that way, .096 with the head
alone, which is one of many rewrites; runs of 250 calls .230 and .128. Elsewhere they are level."""
ROOM_FOR_TWO = 8
"""A budget of so many validations keeps two of them for the end, a quarter of it: of the head, and of the same text
written anew. A smaller one would have too little left to search: it compares the two on the first examples."""
DOUBTED, PATIENCE, ALONE_EVERY = 0.5, 8, 3
"""Heads are doubted where half of the metric calls, and at least what four steps cost that validate their child, were
spent since the pool's best candidate became better. Then every third step validates its own child, though its changes
are in the head: where changes do not add up, that is what dspy.GEPA does (``test_where_changes_do_not_add_up_...``)."""
HEADS_SHARE = 0.2
"""Share of the metric calls spent that validations of heads may cost, before the last one: nobody reflects on them, so
that most calls are for rollouts that teach. Not tuned."""
LEAST_GAIN = 0.01
"""What a head has to gain before another validation, as a share of the range of scores; the last one takes any gain.
Not tuned."""
FEWEST_COMPARED, SURELY_BETTER = 20, 3.0
"""Standard errors by which the head has to beat the same text written anew to be kept. Of six such pairs on a real task
heads and clean texts score the same on test (.41, .40), so that a difference of two errors is mostly luck: one head was
validated at .41 and its clean text at .22, and on test they have .40 and .44. A text that lost what was learnt is
further behind. With fewer examples than the first number the higher score decides."""


class Heads(Ending):
    """Says when the head is validated, has it written anew, and puts changes on what the validations confirm.

    Args:
        search: its credit composes heads.
        calls: counts consolidations.
        initial, ends_with_perfect: see :class:`Ending`.
        asks_for_edits: children are edits, so that their parts can be consolidated.
    """

    def __init__(
        self,
        run: DspyRun,
        pool: Pool,
        iterations: Iterations,
        search: EditSearch,
        calls: ReflectionCalls,
        initial: Sequence[Texts],
        asks_for_edits: bool,
        ends_with_perfect: bool = False,
    ) -> None:
        super().__init__(run, pool, iterations, search, initial, ends_with_perfect)
        self._credit, self._calls, self._settings = search.credit, calls, pool.settings
        self._consolidates = asks_for_edits
        self._tried: dict[int, frozenset[int]] = {}
        """Step that validates a head, or has -> the patches in it, the newest last."""
        self._asked_anew = set[str]()
        """Texts, as hashes, that the reflection LM was asked to write anew."""
        self._validation_calls = 0
        """Metric calls that validations of heads have cost at most."""
        self._improved_at = 0, 0
        """When the pool's best candidate became better last: metric calls spent, and those for validations of heads."""

    @property
    def has_last(self) -> bool:
        """See :attr:`Ending.has_last`."""
        return True

    @property
    def joins(self) -> bool | None:
        """Whether what steps find comes together in one head; None where that is not known yet."""
        joins = self._credit.outlook.joins
        return joins if joins is not None or not self._consolidates else True

    @property
    def calls_aside(self) -> tuple[int, ...]:
        """Metric calls to keep for the end: where there is something to write anew, more than one validation."""
        validation, limit = len(self._pool.loader), self._run.budget.limit
        if not self.joins:
            return ()
        if not (self._consolidates and not self._calls.are_spent and self._credit.outlook.is_grown):
            return (validation,)
        has_room = limit is not None and limit >= ROOM_FOR_TWO * validation
        return validation + (validation if has_room else math.ceil(COMPARED * validation)), validation

    @property
    def may_validate(self) -> bool:
        """Whether another head's validation keeps to its share of the metric calls."""
        return self._validation_calls + len(self._pool.loader) <= HEADS_SHARE * self._run.budget.spent

    def is_doubted(self, step: Step) -> bool:
        """Whether a step validates its own child, though its changes are in the head: heads bring nothing of late, or
        are worth no validation."""
        spent, (improved_at, heads_before) = self._run.budget.spent, self._improved_at
        calls_alone = len(self._pool.loader) + 2 * self._settings.minibatch_size
        is_long = spent - improved_at > DOUBTED * max(spent, PATIENCE * calls_alone)
        is_tried = self._validation_calls > heads_before or self.may_validate
        doubts = is_long and is_tried and step.number % ALONE_EVERY == 0
        stages = self._run.scheduler.statistics().stages
        requests = sum(stages[name].waiting + stages[name].running for name in ("prefix", "validate") if name in stages)
        validations = 2 + requests / len(self._pool.loader)  # its own, the last head's, and what shares the slots
        return doubts and self.time.seconds_left > validations * self.time.expected

    def rewriting_seconds(self) -> float | None:
        """Seconds that writing the last text anew takes, as a reflection on average; None where it has not grown."""
        if not (self._consolidates and self._credit.outlook.is_grown) or self._calls.are_spent:
            return None
        served = self._run.scheduler.statistics().stages["propose"].served_seconds
        return served / max(1, self._calls.reflections)

    @property
    def obstacle(self) -> str:
        """Why the best text cannot be written anew and validated any more; empty where it can."""
        calls_left = self._run.budget.left
        if spent := [limit for limit, share in self._calls.used_shares.items() if share >= 1]:
            return f"{spent[0]} is spent"
        if calls_left is not None and calls_left < len(self._pool.loader):
            return f"the {calls_left} metric calls left do not pay its validation"
        is_late = self.time.is_ending or not self.time.pays_rewriting
        return f"max_seconds={self._run.max_seconds:g} leave no time for it" if is_late else ""

    @property
    def why_grown(self) -> str:
        """Why the best text has grown and was not written anew; empty where it has not grown."""
        pool = self._pool
        if pool.best_index not in pool.grown:
            return ""
        is_written = hash_of(pool.state.program_candidates[pool.best_index]) in self._asked_anew
        return "the new text is worse, or of no use" if is_written else self.obstacle or "the run ended before"

    # What a step validates. Runs in the pool's writer.

    def begin(self, step: Step, pending: PendingValidation) -> Screened:
        """See :meth:`Ending.begin`."""
        if pending.candidate not in self._initial:
            self.keep()
            self._validation_calls += len(self._pool.loader)
        return super().begin(step, pending)

    @property
    def _parent(self) -> int:
        return self._credit.parent

    def _due(self, is_pressing: bool) -> Head | None:
        """Compose the head; None where it gains too little, or validations have had their share of the metric calls.

        Where it ``is_pressing`` any gain is enough.
        """
        credit, pool, least = self._credit, self._pool, 0.0 if is_pressing else LEAST_GAIN
        if not pool.seed_confirmed or not (is_pressing or self.may_validate):
            return None
        head = credit.head(self._last_tried)
        is_new = head.candidate not in pool.state.program_candidates
        return head if is_new and head.gain > least * credit.scale else None

    def _last(self) -> Head | None:
        """Find what the last validation of a run is for: the head, or the best text of the pool, written anew."""
        head = None if self.only_rewrites else self._due(is_pressing=True)
        if head is not None or not self._consolidates:
            return head
        best = self._pool.best_index
        texts = self._pool.state.program_candidates[best]
        is_spent = self._calls.are_spent or hash_of(texts) in self._asked_anew
        is_due = best in self._pool.grown and not is_spent
        return Head(texts, self._credit.composition_of(texts) or frozenset(), 0.0) if is_due else None

    def _validating(self, step: Step, head: Head | None, is_last: bool, is_timed: bool) -> PendingValidation | None:
        """Hand a head to a step, and mark it at once, so that no other step is handed it, too."""
        if head is not None:
            self._tried[step.number] = head.patches
        return super()._validating(step, head, is_last, is_timed)

    def _cancel(self, step: Step) -> None:
        if self._tried.pop(step.number, None) is not None:
            self._validation_calls -= len(self._pool.loader)
            self.keep()

    async def rewritten(self, step: Step, found: Screened, pending: PendingValidation) -> list[Screened]:
        """Let the reflection LM write the last head anew where it has grown, and return what is to be validated.

        Nothing is returned where the text is validated already, and no new one came of it.
        """
        as_it_is = await super().rewritten(step, found, pending)
        is_over = pending.is_last or pending.is_timed
        if not (self._consolidates and is_over and self.time.pays_rewriting):
            return as_it_is
        anew = None
        with anyio.move_on_after(self.time.seconds_left - self.time.expected):  # the head has to be validated in time
            anew = await self._written_anew(step, found.proposal)
        return as_it_is if anew is None else [*as_it_is, anew]

    async def _written_anew(self, step: Step, head: Proposal) -> Screened | None:
        """Let the reflection LM write anew the components of a head that have grown.

        Returns:
            The new candidate; None where there is nothing to write anew, and where no reply came or one that is of no
            use: it changes nothing, is a candidate of the pool already, or is much longer than all that it was made of.
        """
        texts, settings, credit = head.candidate, self._settings, self._credit
        effects = await self._pool.write(credit.effects_in_grown, texts)
        self._asked_anew.add(hash_of(texts))
        if not effects or self._calls.are_spent:
            return None
        inputs: dict[str, dict[str, Any]] = {"texts": {name: texts[name] for name in effects}, "effects": effects}
        record = ReplyText(hash_of({"consolidate": json.dumps(inputs["texts"], sort_keys=True)}))
        try:
            asked = await self._run.call_module(
                "integrate", step, Consolidation(), inputs, lm=settings.reflection_lm,
                read=lambda answer: checked_texts(dict(answer.texts)), record=record,
            )  # fmt: skip
        except RolloutUnresolvedError:
            return None
        self._calls.record(reflections=asked.calls)
        clean = {**texts, **(asked.answer or {})}
        limits = settings.workflow.max_candidate_characters, settings.max_text_characters
        has_strayed = any(len(clean[name]) > len(texts[name]) + SPARE_CHARACTERS for name in effects)
        if has_strayed or is_too_long(clean, *limits, texts) or clean == texts:
            return None
        if await self._pool.write(lambda: clean in self._pool.state.program_candidates):
            return None
        return Screened(replace(head, candidate=clean, tag=CONSOLIDATION))

    # What validations tell. Runs in the pool's writer.

    def preferred(self, step: Step, done: list[Validated]) -> list[Validated]:
        """Leave out the head where the same text, written anew, is as good as far as their validations can tell.

        A person would rather ship the clean text. It has to be the best of the pool then, and the head not better by
        more than :data:`SURELY_BETTER` standard errors of the difference; both were run on the same examples.
        """
        done = sorted(done, key=lambda one: one.proposal.tag != CONSOLIDATION)  # gepa returns the first of equals
        if len(done) != 2 or done[0].proposal.tag != CONSOLIDATION or self._settings.frontier_type != "instance":
            return done
        clean, head = (one.evaluation.scores_by_val_id for one in done)
        gains = [score - clean[i] for i, score in head.items() if i in clean]
        best = self._pool.best_score
        if len(gains) < max(len(head), len(clean)) or (best is not None and sum(clean.values()) < best * len(clean)):
            return done
        if is_surely_better(gains, len(gains)):
            return done
        self._pool.speculative.withdraw([done[1].key])
        self._iterations.reject(step, done[1].proposal, reason="the same text, written anew, is as good")
        return done[:1]

    def restored(self) -> None:
        """Go on with a pool that holds the candidates of earlier sessions."""
        self._improved_at = self._run.budget.spent, 0
        saved = self._run.store.get_state("heads")
        if saved is not None:
            self._tried = {step: frozenset(patches) for step, patches in saved["tried"]}
            self._asked_anew.update(saved["asked_anew"])

    async def record_children(self, step: Step, children: Sequence[Child]) -> list[Child]:
        """Take note of how a step's children were written, and return those that change something."""
        changed = [child for child in children if child.candidate != child.source]

        def record() -> None:
            self._credit.record_children(step.number, [child.is_whole for child in changed])
            self.keep()

        await self._pool.write(record)
        return changed

    def learn(self, commits: Sequence[Commit]) -> None:
        """Put patches on the best candidate there is: the head that was validated, or one that beats it."""
        credit, pool = self._credit, self._pool
        for commit in commits:
            texts, best = pool.state.program_candidates[commit.candidate], pool.score_of(credit.parent)
            if commit.score >= commit.best_score:
                self._improved_at = self._run.budget.spent, self._validation_calls
            if credit.composition_of(texts) is not None:
                if commit.score >= best:
                    credit.set_parent(commit.candidate)
            elif commit.score > best + max(0.0, credit.head(self._last_tried).gain):
                credit.stand_on(texts, commit.candidate)
                self._tried.clear()
        self.keep()

    def keep(self) -> None:
        """Write the patches into the journal, what they stand on, and which heads were tried."""
        self._run.store.set_state("credit", self._credit.to_json)
        self._run.store.set_state("heads", self._tried_heads)

    def _tried_heads(self) -> dict[str, Any]:
        tried = [[step, sorted(patches)] for step, patches in self._tried.items()]
        return {"tried": tried, "asked_anew": sorted(self._asked_anew)}

    @property
    def _last_tried(self) -> frozenset[int]:
        return next(reversed(self._tried.values()), frozenset())


def is_surely_better(gains: Sequence[float], examples: int) -> bool:
    """Whether a head is better than the same text written anew by more than chance.

    Args:
        gains: the head's score less the other's, for each example that both were run on.
        examples: of a whole validation, so that on a part of it the same difference is enough.

    >>> is_surely_better([0.1] * 5, 20), is_surely_better([1.0, 0.0] * 15, 30), is_surely_better([0.5, -0.5] * 15, 30)
    (True, True, False)
    """
    error = stdev(gains) / math.sqrt(examples) if len(gains) >= FEWEST_COMPARED else 0.0
    return sum(gains) / len(gains) > SURELY_BETTER * error
