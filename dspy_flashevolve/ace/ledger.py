"""The one writer's side: the playbook as it is, what changed it, and what was counted on the way.

Everything here is called on the run's loop, by one stage with one worker or between two awaits; nothing in it waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from dspy_flashevolve.ace.applying import Merged, Twin, changes, merge, newer_than
from dspy_flashevolve.ace.operations import Operation, Problem
from dspy_flashevolve.ace.payloads import Tags
from dspy_flashevolve.ace.playbook import Bullet, Playbook
from dspy_flashevolve.ace.similarity import same_words
from dspy_flashevolve.ace.text import CountTokens, approximate_tokens

MOST_EXAMPLES = 50
"""Problems that are kept as they are; the others are only counted."""


class Ledger:
    """The playbook of a run.

    Args:
        playbook: the first one.
        token_budget: tokens of the rendered playbook at most.
        count_tokens: counts them.
        twin: finds a bullet that says the same as a new one.
    """

    def __init__(
        self,
        playbook: Playbook,
        token_budget: int | None,
        count_tokens: CountTokens = approximate_tokens,
        twin: Twin = same_words,
    ) -> None:
        self.playbook = playbook
        self.token_budget = token_budget
        self.count_tokens = count_tokens
        self._twin = twin
        self._changed: dict[str, int] = {}
        self.operations: Counter[str] = Counter()
        """Add, Update, Merge, Remove -> done."""
        self.tags: Counter[str] = Counter()
        """helpful, harmful, neutral -> counted."""
        self.problems: Counter[str] = Counter()
        """Kind -> how many."""
        self.examples: list[Problem] = []
        """The first problems, as they are."""
        self.evicted = 0
        """Bullets that made room."""

    def tag(self, tags: Tags) -> None:
        """Count tags; those of bullets that are gone count nothing."""
        living: Tags = tuple((bullet_id, tag) for bullet_id, tag in tags if bullet_id in self.playbook)
        self.playbook = self.playbook.tagged(living)
        self.tags.update(tag for _, tag in living)
        self.note(Problem("tag of a gone bullet", one) for one, _ in tags if one not in self.playbook)

    def apply(self, operations: Sequence[Operation], seen: int) -> Merged:
        """Do what a curator asks for who saw version ``seen``."""
        before = self.playbook
        merged = merge(
            before,
            operations,
            token_budget=self.token_budget,
            count_tokens=self.count_tokens,
            changed=self._changed,
            seen=seen,
            twin=self._twin,
        )
        self.playbook = merged.playbook
        self._changed |= changes(before, merged.playbook)
        self.operations.update(type(one).__name__.lower() for one in merged.applied)
        self.evicted += len(merged.evicted)
        self.note(merged.problems)
        return merged

    def newer_than(self, seen: int) -> list[Bullet]:
        """Bullets that were written, or written anew, after a version."""
        return newer_than(self.playbook, seen, self._changed)

    def note(self, problems: Iterable[Problem]) -> None:
        """Count problems, and keep the first ones."""
        for problem in problems:
            self.problems[problem.kind] += 1
            if len(self.examples) < MOST_EXAMPLES:
                self.examples.append(problem)
