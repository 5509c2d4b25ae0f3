"""What an integration reads and what it returns: frozen records, whatever evolves.

A stale child is a change to texts that have moved on since. To integrate it is to say how it stands to what was
committed meanwhile, and to write the texts that hold both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Texts = dict[str, str]
"""Component -> text."""

Verdict = Literal["orthogonal", "subsumed", "conflicting"]
VERDICTS: tuple[Verdict, ...] = ("orthogonal", "subsumed", "conflicting")
"""A child changes something else, brings nothing that the head has not, or contradicts the head or another child."""


@dataclass(frozen=True, slots=True)
class StaleChild:
    """A change that waits to be integrated.

    Args:
        number: names the child in verdicts; its step's number.
        texts: the components that it changed, as it wants them.
        parent_texts: the same components before the change.
        score_before: mean score of its parent on its minibatch.
        score_after: mean score of the child there; None when it was not screened.
        feedback: what the metric said of its parent's rollouts, one text an example.
        behind: commits that it has not seen.
    """

    number: int
    texts: Texts
    parent_texts: Texts
    score_before: float
    score_after: float | None = None
    feedback: tuple[str, ...] = ()
    behind: int = 0


@dataclass(frozen=True, slots=True)
class PastCommit:
    """What was committed since the oldest of the children looked.

    Args:
        texts: the components that it changed.
        parent_texts: the same components before.
        score_change: of the validation score, against its best parent.
    """

    texts: Texts
    parent_texts: Texts
    score_change: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """How a child stands to the head.

    Args:
        child: its number.
        verdict: only orthogonal children are in the new texts.
        reason: a sentence for people.
    """

    child: int
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Integration:
    """The outcome of one integration.

    Args:
        texts: new texts of the components that changed; empty when nothing is worth a change.
        judgements: one a child.
        calls: LM calls that it took.
        failed: no reply could be read: the texts are empty and the judgements mean nothing.
    """

    texts: Texts
    judgements: tuple[Judgement, ...]
    calls: int = 0
    failed: str = ""


@dataclass(frozen=True, slots=True)
class IntegrationRequest:
    """What is to be integrated.

    Args:
        head: all components of the candidate that the result stands on.
        children: at least one.
        commits: since the oldest child looked, oldest first.
    """

    head: Texts
    children: Sequence[StaleChild]
    commits: Sequence[PastCommit] = field(default_factory=tuple)
