"""How far the pool has moved on since a step looked, and what to do about it.

The pool's version counts its commits; a step remembers the version that it saw; the difference is its
gap. A policy looks at an item at the places that it names and says what becomes of it; it is a pure
function of the look and of the history, so that the same history gives the same decision whatever the
order in which items arrive. ``GepaLoop._look`` (gepa/step.py) asks it; what is to be repaired goes to gepa/repair.py.

Source: FlashEvolve (arXiv 2605.08520) section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from dspy_flashevolve.engine.errors import ConfigurationError

Place = Literal["before_propose", "after_propose", "after_screen", "before_commit"]
"""Where a policy may look: before a proposal is paid; when it is there, before its screen (the gate); when it beat its
parent, or needs no screen; at the pool's door."""
PLACES: tuple[Place, ...] = ("before_propose", "after_propose", "after_screen", "before_commit")


@dataclass(frozen=True, slots=True)
class Admit:
    """The item goes on as it is."""


@dataclass(frozen=True, slots=True)
class Discard:
    """The item's step ends here.

    Args:
        reason: a sentence for people.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Integrate:
    """The item is read beside what was committed meanwhile, and repaired."""


Decision = Admit | Discard | Integrate


@dataclass(frozen=True, slots=True)
class Look:
    """One item at one place.

    Args:
        place: where.
        seen: the version that its step saw.
        orphaned: it was made from a speculative candidate that did not last.
    """

    place: Place
    seen: int
    orphaned: bool = False


@dataclass(frozen=True, slots=True)
class History:
    """What has happened to the pool: its version, the count of commits so far."""

    version: int


class StalenessPolicy(Protocol):
    """Decides what becomes of an item.

    Attributes:
        looks: the places where it is asked.
    """

    @property
    def looks(self) -> tuple[Place, ...]: ...

    def decide(self, look: Look, history: History) -> Decision:
        """A pure function of its arguments."""
        ...


def check_looks(looks: tuple[Place, ...], policy: str) -> None:
    """Raise ConfigurationError unless ``looks`` names at least one place, each once."""
    if not looks or len(set(looks)) != len(looks) or not set(looks) <= set(PLACES):
        raise ConfigurationError(f"{policy}: looks is {looks!r}, expected one or more of {PLACES}, each once.")


@dataclass(frozen=True, slots=True)
class Full:
    """Admit everything: the most proposals, and the widest pool. Gaps are recorded and reported.

    Args:
        looks: where gaps are recorded.
    """

    looks: tuple[Place, ...] = ("after_screen", "before_commit")

    def __post_init__(self) -> None:
        check_looks(self.looks, "Full")

    def decide(self, look: Look, history: History) -> Decision:
        """See :meth:`StalenessPolicy.decide`."""
        del look, history
        return Admit()


@dataclass(frozen=True, slots=True)
class Guarded:
    """Discard what is more than ``max_gap`` commits behind, or was made from a speculative candidate that did not last.

    A discard cannot stall the run for ever: the version moves by commits only, so once everything that is
    too old is gone, what starts next has a gap of 0. ``max_gap`` under the number of steps that live at
    once discards much; where more than half is discarded the run says so.

    Args:
        max_gap: commits, at least 0.
        looks: where it is asked. The default is before the gate: what is too old costs no screen.

    Raises:
        ConfigurationError: a negative gap, or a place that does not exist.

    >>> Guarded(2).decide(Look("after_propose", seen=3), History(version=6))
    Discard(reason='3 commits behind, more than max_gap=2')
    """

    max_gap: int
    looks: tuple[Place, ...] = ("after_propose",)

    def __post_init__(self) -> None:
        if self.max_gap < 0:
            raise ConfigurationError(f"Guarded: max_gap is {self.max_gap}, expected 0 or more.")
        check_looks(self.looks, "Guarded")

    def decide(self, look: Look, history: History) -> Decision:
        """See :meth:`StalenessPolicy.decide`."""
        if look.orphaned:
            return Discard("its parent was speculative and did not last")
        behind = history.version - look.seen
        if behind > self.max_gap:
            return Discard(f"{behind} commits behind, more than max_gap={self.max_gap}")
        return Admit()


@dataclass(frozen=True, slots=True)
class Reflective:
    """Let a language model read a stale item beside what was committed meanwhile; it patches the item, or drops it.

    It is asked before the gate, so that what is dropped costs no screen, and what is patched has to pass one.

    Args:
        min_gap: commits behind from which an item is stale, at least 0.

    Raises:
        ConfigurationError: a negative gap.

    >>> Reflective().decide(Look("after_propose", seen=3), History(version=4))
    Integrate()
    """

    min_gap: int = 1

    def __post_init__(self) -> None:
        gap: Any = self.min_gap
        if isinstance(gap, bool) or not isinstance(gap, int) or gap < 0:
            raise ConfigurationError(f"Reflective: min_gap is {gap!r}, expected a whole number of at least 0.")

    @property
    def looks(self) -> tuple[Place, ...]:
        """Where it is asked: before the gate."""
        return ("after_propose",)

    def decide(self, look: Look, history: History) -> Decision:
        """See :meth:`StalenessPolicy.decide`."""
        stale = look.orphaned or history.version - look.seen >= self.min_gap
        return Integrate() if stale else Admit()


POLICIES: dict[str, StalenessPolicy] = {"full": Full(), "guarded": Guarded(max_gap=8), "reflective": Reflective()}
"""What the names of policies stand for."""


def policy_named(staleness: Any) -> StalenessPolicy:
    """The policy that a name stands for, or the policy itself.

    Raises:
        ConfigurationError: no such name, or no policy.
    """
    if isinstance(staleness, str):
        if staleness in POLICIES:
            return POLICIES[staleness]
    elif callable(getattr(staleness, "decide", None)) and isinstance(getattr(staleness, "looks", None), tuple):
        check_looks(staleness.looks, type(staleness).__name__)
        return staleness
    names = ", ".join(repr(name) for name in POLICIES)
    raise ConfigurationError(
        f"staleness is {staleness!r}, expected one of {names}, or a policy: an object with looks, a tuple of places, "
        "and decide(look, history)."
    )


Texts = dict[str, str]
"""Component -> text."""


@dataclass(frozen=True, slots=True)
class StaleChild:
    """A child that is behind by so many commits, as whoever repairs it reads it: the components that it changed and the
    same before, its parent's mean score on its minibatch, what the metric said of each example. ``number`` names it
    in verdicts."""

    number: int
    texts: Texts
    parent_texts: Texts
    score_before: float
    feedback: tuple[str, ...] = ()
    behind: int = 0


@dataclass(frozen=True, slots=True)
class PastCommit:
    """What was committed since a child's step looked: the components that it changed, the same before, and the change
    of the validation score against its best parent."""

    texts: Texts
    parent_texts: Texts
    score_change: float
