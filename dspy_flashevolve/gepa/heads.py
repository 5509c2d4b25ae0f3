"""Validation of the head, the text that joins what many children add: when it is worth one, and the last one.

A head follows from all rollouts so far (credit.py). It is validated again where it is better by some margin, and within
a share of the metric calls. The last one is what the run returns: calls are kept for it, it begins while
``max_seconds`` still leave time, and the reflection LM writes its text anew beside it. A best text that is validated
already, a perfect one too, is written anew as well before the run ends. How far a run is with that is its
:class:`Phase`, which moves in one place, on the loop.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import median_low, stdev
from typing import Any

from dspy_flashevolve.engine.errors import RolloutUnresolvedError
from dspy_flashevolve.engine.journal import hash_of
from dspy_flashevolve.engine.staleness import Texts
from dspy_flashevolve.engine.steps import EndKind, Step, StepEnded
from dspy_flashevolve.gepa.credit import Credit, Head
from dspy_flashevolve.gepa.edits import is_too_long
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.propose import ReflectionCalls
from dspy_flashevolve.gepa.records import Child, Commit, Proposal, Screened, Validated
from dspy_flashevolve.gepa.repair import SPARE_CHARACTERS
from dspy_flashevolve.gepa.select import Selection
from dspy_flashevolve.gepa.settings import GepaSettings
from dspy_flashevolve.modules.rewriting import Consolidation
from dspy_flashevolve.observe.statistics import REFLECTION_STAGES
from dspy_flashevolve.programs.records import ReplyText
from dspy_flashevolve.programs.reflection import checked_texts
from dspy_flashevolve.programs.run import DspyRun

CONSOLIDATION = "consolidation"
"""Tag of proposals that are written anew."""


DOUBTED, PATIENCE, ALONE_EVERY = 0.5, 8, 3
"""Heads are doubted where half of the metric calls, and at least what four steps cost that validate their child, were
spent since the pool's best candidate became better. Then every third step validates its own child, though its changes
are in the head: where changes do not add up, that is what dspy.GEPA does (``test_where_changes_do_not_add_up_...``)."""
HEADS_SHARE = 0.2
"""Share of the metric calls spent that validations of heads may cost, before the last one: nobody reflects on them, so
that most calls are for rollouts that teach."""
LEAST_GAIN = 0.01
"""What a head has to gain before another validation, as a share of the range of scores; the last one takes any gain."""
LAST_MARGIN, LAST_SHARE = 1.25, 0.25
"""A last head's validation begins so many times what a validation takes before ``max_seconds``, since answers are not
equally fast; and not before their last quarter, so that a large validation set leaves time to search."""
TIMED_VALIDATIONS = 5
"""What a validation takes is the median over so many: one answer that hangs makes none of them long."""
GROWN_EDITS = 20
"""So many edits in one text have it written anew before a validation that is not the last. A text of 24 unconsolidated
reflections scored .29, the same written anew .50."""
FEWEST_COMPARED, SURELY_BETTER = 20, 3.0
"""Standard errors by which the head has to beat the same text written anew to be kept. Of six such pairs on a real task
heads and clean texts score the same on test (.41, .40), so that a difference of two errors is mostly luck: one head was
validated at .41 and its clean text at .22, and on test they have .40 and .44. A text that lost what was learnt is
further behind. With fewer examples than the first number the higher score decides."""
LEAST_KEPT = 0.5
"""Share of what the head is expected to gain that the same text, written anew, has to have to become the base. Where
one lost most of it, and was still better than the seed, all changes were lost with it."""


class Phase(Enum):
    """How far a run is with the validation of its last head."""

    SEARCHING = "steps search; a head is validated where it is worth its share of the metric calls"
    CALLS_SPENT = "what is left pays no further step: the next one validates the last head"
    TIME_SPENT = "max_seconds leave just the time for it: the validation of the last head has begun"
    TIME_MISSED = "that validation failed, and there is no time for another: steps search as long as calls are left"
    LAST_TRIED = "the last head has had its step: one more writes the best text anew, if it has grown and that is paid"
    PERFECT = "no text can be better than the best one: no step searches, and one more writes it anew, as above"


@dataclass(frozen=True, slots=True)
class Given:
    """A candidate that a step validates without having made it, or writes anew.

    Args:
        candidate: a head, the pool's best text, or a candidate to begin from.
        is_last: no other step runs beside it, and no further head is expected.
        is_timed: its validation has to end before ``max_seconds``.
    """

    candidate: Texts
    is_last: bool = False
    is_timed: bool = False


class ValidationTime:
    """How long a validation takes, and whether ``max_seconds`` leave time for more than the last one."""

    def __init__(self, run: DspyRun, examples: int) -> None:
        self._run, self._examples = run, examples
        self._durations = deque[float](maxlen=TIMED_VALIDATIONS)
        self._seeded_at = (0, 0.0)
        """Metric calls and their seconds in slots when the seed's scores were there; a cache may have had those."""

    def record(self, seconds: float) -> None:
        """Take note of how long a validation took."""
        self._durations.append(seconds)

    def record_seed(self) -> None:
        """Measure rollouts from now on: the seed is validated."""
        self._seeded_at = (self._run.budget.spent, self._slot_seconds())

    @property
    def expected(self) -> float:
        """Seconds that a validation takes: the median of the last ones, and not less than its rollouts in all slots."""
        (spent, seconds), slots = self._seeded_at, self._run.scheduler.limit
        per_call = (self._slot_seconds() - seconds) / max(1, self._run.budget.spent - spent)
        median = median_low(self._durations) if self._durations else 0.0
        return max(median, per_call * self._examples / max(1, slots))

    @property
    def left(self) -> float:
        """Seconds until ``max_seconds``; infinity without such a limit."""
        run = self._run
        return math.inf if run.max_seconds is None else run.clock.began + run.max_seconds - run.clock()

    @property
    def is_ending(self) -> bool:
        """Whether the time that is left is just what a last head's validation takes."""
        most = self._run.max_seconds
        return most is not None and self.left <= min(LAST_MARGIN * self.expected, LAST_SHARE * most)

    def _slot_seconds(self) -> float:
        """Total seconds during which rollouts have held a slot."""
        stages = self._run.scheduler.statistics().stages
        return sum(stage.served_seconds for name, stage in stages.items() if name not in REFLECTION_STAGES)


class Heads:
    """Says when the head is validated, and puts changes on what the validations confirm.

    Methods that say so run in the pool's writer; the others, and all moves of :attr:`phase`, on the loop.

    Args:
        credit: composes heads; None where each child stands for itself.
        selection: is told of steps that select nothing.
        calls: counts consolidations.
        settings: the LM that consolidates, and how long texts may be.
        initial: candidates to begin from beside the seed; each has a step that validates it.
        asks_for_edits: children are edits, so that their parts can be consolidated.
        ends_with_perfect: a candidate that cannot be beaten ends the search.
    """

    def __init__(
        self,
        run: DspyRun,
        pool: Pool,
        credit: Credit | None,
        selection: Selection,
        calls: ReflectionCalls,
        settings: GepaSettings,
        initial: Sequence[Texts],
        asks_for_edits: bool,
        ends_with_perfect: bool = False,
    ) -> None:
        self._run, self._pool, self._credit, self._selection, self._calls = run, pool, credit, selection, calls
        self._settings, self._initial, self._ends_with_perfect = settings, list(initial), ends_with_perfect
        self._consolidates = credit is not None and asks_for_edits
        self.time = ValidationTime(run, len(pool.loader))
        self.phase = Phase.SEARCHING
        self._pending: Head | None = None
        """The head, as of :meth:`refresh`, where it is better than what was validated."""
        self._tried: dict[int, frozenset[int]] = {}
        """Step that validates a head, or has -> the patches in it, the newest last."""
        self._asked_anew = set[str]()
        """Texts, as hashes, that the reflection LM was asked to write anew."""
        self._validation_calls = 0
        """Metric calls that validations of heads have cost at most."""
        self._improved_at = 0, 0
        """When the pool's best candidate became better last: metric calls spent, and those for validations of heads."""

    # What admission reads, on the loop. Nothing here changes anything.

    @property
    def has_changes(self) -> bool:
        """Whether heads are made of the edits of children."""
        return self._credit is not None

    @property
    def has_ended(self) -> bool:
        """Whether the last validation before ``max_seconds`` has begun, and has not failed."""
        return self.phase is Phase.TIME_SPENT

    @property
    def joins(self) -> bool | None:
        """Whether what steps find comes together in one head; None where that is not known yet."""
        if self._credit is None:
            return False
        joins = self._credit.outlook.joins
        return joins if joins is not None or not self._consolidates else True

    @property
    def is_grown(self) -> bool:
        """Whether there is so much in the head that it is written anew before its last validation."""
        if self._credit is None or not self._consolidates or self._calls.are_spent:
            return False
        return self._credit.outlook.is_grown

    @property
    def pending(self) -> Head | None:
        """The head whose last validation is still to come; None where none is, or time has begun it."""
        return None if self.has_ended else self._pending

    @property
    def awaits_last(self) -> bool:
        """Whether a run whose metric calls are spent has its last head still to validate."""
        return self.phase is not Phase.CALLS_SPENT and self.pending is not None

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
        return doubts and self.time.left > validations * self.time.expected

    @property
    def only_rewrites(self) -> bool:
        """Whether all that is left to do is to write the best text anew."""
        return self.phase in (Phase.LAST_TRIED, Phase.PERFECT)

    @property
    def obstacle(self) -> str:
        """Why the best text cannot be written anew and validated any more; empty where it can."""
        left = self._run.budget.left
        if spent := [limit for limit, share in self._calls.used_shares.items() if share >= 1]:
            return f"{spent[0]} is spent"
        if left is not None and left < len(self._pool.loader):
            return f"the {left} metric calls left do not pay its validation"
        return f"max_seconds={self._run.max_seconds:g} leave no time for it" if self.time.is_ending else ""

    @property
    def why_grown(self) -> str:
        """Why the best text has grown and was not written anew; empty where it has not grown."""
        pool, credit = self._pool, self._credit
        if credit is None or pool.best_index not in pool.grown:
            return ""
        is_written = hash_of(pool.state.program_candidates[pool.best_index]) in self._asked_anew
        return "the new text is worse, or of no use" if is_written else self.obstacle or "the run ended before"

    # How the phase moves.

    def _move(self, phase: Phase) -> None:
        if self.phase is not Phase.PERFECT:
            self.phase = phase

    async def look_for_perfect(self, highest: float) -> None:
        """End the search where the best candidate has ``highest``, the best possible score, on every example."""
        if self._ends_with_perfect and await self._pool.write(self._pool.is_perfect, highest):
            self._move(Phase.PERFECT)
            await self.refresh()

    def begin_last(self) -> bool:
        """Let the next step validate the last head, where no step runs and there is one; once for each try."""
        if self.phase is Phase.CALLS_SPENT:
            self._move(Phase.LAST_TRIED)
        if self.phase is Phase.LAST_TRIED or self._run.live or self.pending is None:
            return False
        self._move(Phase.CALLS_SPENT)
        return True

    def resume_search(self) -> None:
        """Go back to searching, since calls were handed back that pay a step."""
        if self.phase in (Phase.CALLS_SPENT, Phase.LAST_TRIED):
            self._move(Phase.SEARCHING)

    async def refresh(self) -> None:
        """Look at the head as it is now: what admission reads until the next time."""
        self._pending = await self._pool.write(self._last)

    async def take(self, step: Step) -> Given | None:
        """Find what a step validates without having made it: the last head, the next candidate to begin from or, where
        the step runs again, what it was about to validate. None for a step that searches.

        Raises:
            StepEnded: the last head is worth no validation any more.
        """
        if step.recorded is not None:
            return await self._pool.write(self._given_again, step)
        is_last = self.phase in (Phase.CALLS_SPENT, Phase.LAST_TRIED, Phase.PERFECT)
        given = await self._pool.write(self._given, step, is_last, self._is_timed)
        if given is not None and given.is_timed:
            self._move(Phase.TIME_SPENT)
        return given

    async def due(self, step: Step, pays: bool) -> Given | None:
        """Find the head, where it is worth a validation by a step that has found nothing else; else None.

        ``pays``: the metric calls pay one beside the last.
        """
        is_timed = self._is_timed
        if self.phase in (Phase.TIME_SPENT, Phase.PERFECT) or not (pays or is_timed):
            return None
        least = 0.0 if is_timed else LEAST_GAIN
        given = await self._pool.write(lambda: self._given_head(step, self._due(least, is_timed), False, is_timed))
        if given is not None and is_timed:
            self._move(Phase.TIME_SPENT)
        return given

    @property
    def _is_timed(self) -> bool:
        """Whether a head's validation that begins now is the last one before ``max_seconds``."""
        return self.phase is Phase.SEARCHING and self.time.is_ending and not self._run.lockstep

    async def cancel_validation(self, step: Step, is_timed: bool) -> None:
        """Let a head be validated again whose validation by this step came to nothing; other steps are no matter."""
        await self._pool.write(self._cancel, step)
        if is_timed:
            self._move(Phase.TIME_MISSED)

    # What a step validates. Runs in the pool's writer.

    def begin(self, step: Step, given: Given) -> Screened:
        """Begin the validation of what a step was given."""
        texts, journal, parent, tag = given.candidate, self._run.journal, 0, "initial"
        if texts in self._initial:
            self._initial.remove(texts)
        else:
            assert self._credit is not None
            self.keep_credit()
            self._validation_calls += len(self._pool.loader)
            candidates, tag = self._pool.state.program_candidates, "head"
            parent = candidates.index(texts) if texts in candidates else self._credit.parent
        if journal is not None:
            journal.journal.set_state(_kept_head(step), [journal.record_candidate(texts), given.is_last])
        step.record_version(self._pool.version, math.inf)  # every later step builds on what it finds: it goes first
        proposal = Proposal(
            candidate=dict(texts), parent_program_ids=[parent], subsample_indices=[], subsample_scores_before=[],
            subsample_scores_after=[], tag=tag, metadata={},
        )  # fmt: skip
        return Screened(proposal)

    def _due(self, least: float, is_pressing: bool = False) -> Head | None:
        """Compose the head; None where it gains no more than ``least``, a share of the range of scores, or validations
        have had their share of the metric calls, unless it ``is_pressing``."""
        credit, pool = self._credit, self._pool
        if credit is None or not pool.seed_confirmed or not (is_pressing or self.may_validate):
            return None
        head = credit.head(self._last_tried)
        is_new = head.candidate not in pool.state.program_candidates
        return head if is_new and head.gain > least * credit.scale else None

    def _last(self) -> Head | None:
        """Find what the last validation of a run is for: the head, or the best text of the pool, written anew."""
        head = None if self.only_rewrites else self._due(0.0, is_pressing=True)
        if head is not None or self._credit is None or not self._consolidates:
            return head
        best = self._pool.best_index
        texts = self._pool.state.program_candidates[best]
        is_spent = self._calls.are_spent or hash_of(texts) in self._asked_anew
        is_due = best in self._pool.grown and not is_spent
        return Head(texts, self._credit.composition_of(texts) or frozenset(), 0.0) if is_due else None

    def _given_head(self, step: Step, head: Head | None, is_last: bool, is_timed: bool) -> Given | None:
        """Give a step a head, and mark it at once, so that no other step is given it, too."""
        if head is None or self._credit is None:
            return None
        self._tried[step.number] = head.patches
        return Given(head.candidate, is_last, is_timed)

    def _given(self, step: Step, is_last: bool, is_timed: bool) -> Given | None:
        head = self._last() if is_last else self._due(0.0, is_pressing=True) if is_timed else None
        given = self._given_head(step, head, is_last, is_timed and not is_last)
        if given is None and is_last:
            raise StepEnded(EndKind.REJECTED, "the last head is worth no validation any more")
        if given is None and (left := self._initial_left()):
            given = Given(left[0])
        if given is not None:
            self._pool.begin_step(step)
        return given

    def _given_again(self, step: Step) -> Given | None:
        """Find what a step of an interrupted run was about to validate."""
        journal = self._run.journal
        name, is_last = (journal and journal.journal.get_state(_kept_head(step))) or (None, False)
        candidate = None if journal is None or name is None else dict(journal.texts[name])
        if candidate is None or (self._credit is None and candidate not in self._initial_left()):
            return None
        self._selection.runs_again(step, False)
        return Given(candidate, is_last=is_last)

    def _initial_left(self) -> list[Texts]:
        return [texts for texts in self._initial if texts not in self._pool.state.program_candidates]

    def _cancel(self, step: Step) -> None:
        if self._tried.pop(step.number, None) is not None:
            self._validation_calls -= len(self._pool.loader)
            self.keep_credit()

    async def consolidated(self, step: Step, head: Screened, given: Given) -> list[Screened]:
        """Let the reflection LM write a head anew that has grown, and return what is to be validated.

        In the last validation the new text stands beside the head; before, it takes the head's place, and further edits
        are put on it, if its validation is good enough. Nothing is returned where the text is validated already, and no
        new one came of it.
        """
        is_last, texts = given.is_last, head.proposal.candidate
        left = [] if await self._pool.write(lambda: texts in self._pool.state.program_candidates) else [head]
        if not self._consolidates or given.is_timed or (is_last and self.time.is_ending):
            return left
        anew = await self._written_anew(step, head.proposal, 0 if is_last else GROWN_EDITS)
        if anew is None:
            return left
        return [*left, anew] if is_last else [anew]

    async def _written_anew(self, step: Step, head: Proposal, least_edits: int) -> Screened | None:
        """Let the reflection LM write anew the components of a head that have grown, and have so many edits.

        Returns:
            The new candidate; None where there is nothing to write anew, and where no reply came or one that is of no
            use: it changes nothing, is a candidate of the pool already, or is much longer than all that it was made of.
        """
        texts, settings, credit = head.candidate, self._settings, self._credit
        assert credit is not None
        effects = await self._pool.write(credit.effects_in_grown, texts, least_edits)
        if not effects or self._calls.are_spent:
            return None
        self._asked_anew.add(hash_of(texts))
        inputs: dict[str, dict[str, Any]] = {"texts": {name: texts[name] for name in effects}, "effects": effects}
        record = ReplyText(hash_of({"consolidate": json.dumps(inputs["texts"], sort_keys=True)}))
        try:
            asked = await self._run.call_module(
                "integrate", step, Consolidation(), inputs, lm=settings.reflection_lm,
                read=lambda answer: checked_texts(dict(answer.texts)), record=record,
            )  # fmt: skip
        except RolloutUnresolvedError:
            return None
        self._calls.record_reflections(asked.calls)
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
        done = sorted(done, key=lambda made: made.proposal.tag != CONSOLIDATION)  # gepa returns the first of equals
        if len(done) != 2 or done[0].proposal.tag != CONSOLIDATION or self._pool.frontier_type != "instance":
            return done
        clean, head = (made.evaluation.scores_by_val_id for made in done)
        gains = [score - clean[i] for i, score in head.items() if i in clean]
        best = self._pool.best_score()
        if len(gains) < max(len(head), len(clean)) or (best is not None and sum(clean.values()) < best * len(clean)):
            return done
        if is_surely_better(gains, len(gains)):
            return done
        self._pool.speculative.withdraw([done[1].key])
        self._pool.reject(step, done[1].proposal, reason="the same text, written anew, is as good")
        return done[:1]

    def restored(self) -> None:
        """Go on with a pool that holds the candidates of earlier sessions."""
        self._improved_at = self._run.budget.spent, 0

    def record_children(self, step: Step, children: Sequence[Child]) -> None:
        """Take note of how a step's children were written."""
        if self._credit is not None:
            are_whole = [child.is_whole for child in children if child.candidate != child.source]
            self._credit.record_children(step.number, are_whole)
            self.keep_credit()

    def learn(self, commits: Sequence[Commit], clean: Collection[int] = ()) -> None:
        """Put changes on the best candidate there is: the head that was validated, or one that beats it.

        ``clean``: indices of the candidates that are heads written anew.
        """
        credit, pool = self._credit, self._pool
        if credit is None:
            return
        for commit in sorted(commits, key=lambda commit: commit.candidate in clean):  # after the head it was made of
            texts, best = pool.state.program_candidates[commit.candidate], pool.score_of(credit.parent)
            if commit.score >= commit.best_score:
                self._improved_at = self._run.budget.spent, self._validation_calls
            if credit.composition_of(texts) is not None:
                if commit.score >= best:
                    credit.set_parent(commit.candidate)
                continue
            gain, is_clean = max(0.0, credit.head(self._last_tried).gain), commit.candidate in clean
            if commit.score >= best + LEAST_KEPT * gain if is_clean else commit.score > best + gain:
                credit.stand_on(texts, commit.candidate)
                self._tried.clear()
        self.keep_credit()

    def keep_credit(self) -> None:
        """Write the changes into the journal, and what they stand on."""
        if self._credit is not None and self._run.journal is not None:
            tried = [[step, sorted(patches)] for step, patches in self._tried.items()]
            state = {**self._credit.to_json(), "tried": tried, "written_anew": sorted(self._asked_anew)}
            self._run.journal.journal.set_state("credit", state)

    def restore_credit(self, saved: Mapping[str, Any], rollouts: Iterable[tuple[str, str, str, float]]) -> None:
        """Put the changes, and what they stand on, back as an interrupted run had written them down."""
        assert self._credit is not None
        self._credit.restore(saved, rollouts)
        self._tried = {step: frozenset(patches) for step, patches in saved["tried"]}
        self._asked_anew.update(saved["written_anew"])

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


def _kept_head(step: Step) -> str:
    """Name under which the journal keeps the head, or the candidate to begin from, that a step validates."""
    return f"head of step {step.number}"
