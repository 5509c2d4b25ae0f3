"""ACE's stages: rollout, reflect (and back, while the answer is wrong), curate, merge, and reconcile where it is due.

.. code-block:: text

    sample -> rollout -> reflect -> curate -> merge (the one writer) -> end
                 ^          |                  |   ^
                 +- wrong --+                  +---+ reconcile: stale additions, where the policy says so

Source: ACE (arXiv 2510.04618) section 3; the queue of operations and staleness follow FlashEvolve (arXiv 2605.08520).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dspy_flashevolve.ace.ledger import Ledger
from dspy_flashevolve.ace.operations import Add, Operation, Problem, Remove
from dspy_flashevolve.ace.payloads import Learner, Sample
from dspy_flashevolve.ace.reconciling import without_repeats
from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.events import Event, Looked
from dspy_flashevolve.engine.item import End, EndKind, Item
from dspy_flashevolve.engine.stages import Finish, Forward, Outcome
from dspy_flashevolve.engine.staleness import (
    Admit,
    Discard,
    Full,
    GapHistogram,
    History,
    Integrate,
    Look,
    StalenessPolicy,
    gap,
)

STAGES = ("rollout", "reflect", "curate", "reconcile", "merge")
"""In the order of the way; ``merge`` has one worker."""


@dataclass
class Counts:
    """What happened to samples.

    Args:
        merged: samples whose operations came to the playbook.
        right: samples that were right at the first attempt.
        corrected: samples that became right after a reflection.
        reflections: asked for.
        citations: bullets cited by attempts.
        additions: "admitted", "merged", "dropped" -> stale additions.
    """

    merged: int = 0
    right: int = 0
    corrected: int = 0
    reflections: int = 0
    citations: int = 0
    additions: Counter[str] = field(default_factory=Counter[str])


@dataclass(frozen=True)
class Services:
    """What the stages work with.

    Args:
        learner: the program and the language models.
        ledger: the playbook.
        policy: what becomes of stale additions.
        perfect_score: from which an attempt is right.
        max_rounds: reflections a sample, at least 1; each of a wrong attempt is followed by another attempt.
        claim: (item, stage) -> who asks.
        attempted: called with each sample and its first attempt.
        merged: awaited after each merge.
        emit: takes events.
        clock: seconds.
        gaps: where gaps are counted.
    """

    learner: Learner
    ledger: Ledger
    policy: StalenessPolicy
    perfect_score: float
    max_rounds: int
    claim: Callable[[Item[Any], str], Claim]
    attempted: Callable[[Sample], None]
    merged: Callable[[], Awaitable[None]]
    emit: Callable[[Event], None]
    clock: Callable[[], float]
    gaps: GapHistogram


class AceStages:
    """The handlers of the stages."""

    def __init__(self, services: Services) -> None:
        self._on = services
        self._ledger = services.ledger
        self.counts = Counts()
        self._discarded = self._passed = 0

    def handlers(self) -> dict[str, Callable[[Any], Awaitable[Outcome]]]:
        """Stage -> handler."""
        return {name: getattr(self, name) for name in STAGES}

    async def rollout(self, item: Item[Sample]) -> Outcome:
        """Run the program with the playbook; after a reflection with that too."""
        sample = item.payload
        advice = sample.reflections[-1].text if sample.reflections else ""
        attempt = await self._on.learner.attempt(self._on.claim(item, "rollout"), sample, advice)
        sample = replace(sample, attempts=(*sample.attempts, attempt))
        self.counts.citations += len(attempt.cited)
        is_right = attempt.score >= self._on.perfect_score
        if len(sample.attempts) == 1:
            self._on.attempted(sample)
            self.counts.right += is_right
            return Forward("reflect", sample)
        self.counts.corrected += is_right
        done = is_right or len(sample.reflections) >= self._on.max_rounds
        return Forward("curate" if done else "reflect", sample)

    async def reflect(self, item: Item[Sample]) -> Outcome:
        """What went wrong, the right approach, the insight; a tag for each cited bullet."""
        sample = item.payload
        reflection = await self._on.learner.reflect(self._on.claim(item, "reflect"), sample)
        self.counts.reflections += 1
        self._ledger.note(reflection.problems)
        tags = tuple({**dict(sample.tags), **dict(reflection.tags)}.items())
        sample = replace(sample, reflections=(*sample.reflections, reflection), tags=tags)
        is_wrong = sample.attempts[-1].score < self._on.perfect_score
        if not reflection.text:  # tags still count; there is nothing to try again with, or to curate
            self._ledger.note([Problem("empty reflection")])
            return Forward("merge", sample)
        return Forward("rollout" if is_wrong else "curate", sample)

    async def curate(self, item: Item[Sample]) -> Outcome:
        """Operations, for the playbook as it is now; they stand for what the curator saw."""
        playbook = self._ledger.playbook
        curated = await self._on.learner.curate(self._on.claim(item, "curate"), item.payload, playbook)
        self._ledger.note(curated.problems)
        return Forward("merge", replace(item.payload, operations=curated.operations), version=playbook.version)

    async def merge(self, item: Item[Sample]) -> Outcome:
        """The one writer: count the tags, settle what is stale, do the rest."""
        sample = item.payload
        self._on.gaps.record("before_commit", gap(self._ledger.playbook.version, item.version))
        operations = self._settled(item)
        self._ledger.tag(sample.tags)
        if operations is None:  # what is no addition need not wait
            additions = tuple(one for one in sample.operations if isinstance(one, Add))
            self._ledger.apply([one for one in sample.operations if not isinstance(one, Add)], item.version)
            return Forward("reconcile", replace(sample, tags=(), operations=additions))
        if any(isinstance(one, Add) for one in operations):
            texts = [one.content for one in operations if not isinstance(one, Remove)]
            texts += [one.content for one in self._ledger.playbook.bullets]
            self._ledger.note(await self._on.learner.prepare(texts))
        before = self._ledger.playbook.version
        merged = self._ledger.apply(operations, item.version)
        self.counts.merged += 1
        await self._on.merged()
        if merged.playbook.version > before:
            return Finish(End(EndKind.COMMITTED, f"version {merged.playbook.version}"))
        return Finish(End(EndKind.REJECTED, "the playbook stays as it is"))

    async def reconcile(self, item: Item[Sample]) -> Outcome:
        """Read stale additions together with the bullets that came between."""
        sample, version = item.payload, self._ledger.playbook.version
        additions = [one for one in sample.operations if isinstance(one, Add)]  # all that came here
        newer = self._ledger.newer_than(item.version)
        curated = await self._on.learner.reconcile(self._on.claim(item, "reconcile"), additions, newer)
        self._ledger.note(curated.problems)
        admitted = sum(isinstance(one, Add) for one in curated.operations)
        changed = len(curated.operations) - admitted
        self._count(admitted=admitted, merged=changed, dropped=len(additions) - admitted - changed)
        settled = replace(sample, operations=curated.operations, is_reconciled=True)
        return Forward("merge", settled, version=version)

    def _settled(self, item: Item[Sample]) -> Sequence[Operation] | None:
        """The operations without stale additions that do not stay; None where a language model has to read them."""
        sample, operations = item.payload, item.payload.operations
        newer = self._ledger.newer_than(item.version)
        additions = sum(isinstance(one, Add) for one in operations)
        if not newer or not additions:
            return operations
        if not sample.is_reconciled:
            decision = self._decide(item)
            if isinstance(decision, Integrate):
                return None
            if isinstance(decision, Discard):
                self._count(dropped=additions)
                self._ledger.note([Problem("stale addition", decision.reason)] * additions)
                return [one for one in operations if not isinstance(one, Add)]
            if isinstance(self._on.policy, Full):
                self._count(admitted=additions)
                return operations
        kept, problems, repeated = without_repeats(operations, newer)
        self._ledger.note(problems)
        self._ledger.tag(tuple((bullet_id, "helpful") for bullet_id in repeated))
        if not sample.is_reconciled:
            self._count(admitted=additions - len(repeated), merged=len(repeated))
        return kept

    def _decide(self, item: Item[Sample]) -> Admit | Discard | Integrate:
        version = self._ledger.playbook.version
        history = History(version, self._discarded, self._passed)
        decision = self._on.policy.decide(Look("before_commit", item.version), history)
        is_discard = isinstance(decision, Discard)
        self._discarded += is_discard
        self._passed += not is_discard
        word = "discard" if is_discard else "integrate" if isinstance(decision, Integrate) else "admit"
        reason = decision.reason if isinstance(decision, Discard) else ""
        number, behind = item.ticket.number, gap(version, item.version)
        self._on.emit(Looked(self._on.clock(), number, "before_commit", behind, word, reason))
        return decision

    def _count(self, **additions: int) -> None:
        self.counts.additions.update(additions)
