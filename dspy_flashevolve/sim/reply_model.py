"""The simulated model: how well it obeys, reflects and integrates, and its random choices.

Every random choice is a hash of (seed, content, what is decided): equal requests get equal replies in any order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dspy_flashevolve.sim.lineage import GPT_CLASS, QWEN3_8B, Lineage
from dspy_flashevolve.sim.words import (
    HARMFUL_SENTENCES,
    RECURRING_HARM,
    USELESS_SENTENCES,
    Rule,
    harmful_sentences,
    instructed_words,
    useless_sentences,
)


class Choices:
    """Random choices that depend on a seed, a content and the name of the choice only.

    Examples:
        >>> Choices(0, "abc").uniform("x") == Choices(0, "abc").uniform("x")
        True
    """

    def __init__(self, seed: int, content: str) -> None:
        text = f"{seed}\0{content}".encode("utf-8", "surrogatepass")
        self._state = hashlib.blake2b(text, digest_size=16).digest()

    def uniform(self, name: str) -> float:
        """Return a number strictly between 0 and 1."""
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), key=self._state, digest_size=8).digest()
        # 52 bits and a half fit a float's 53 exactly, so that 0 and 1 cannot come out by rounding.
        return ((int.from_bytes(digest, "big") >> 12) + 0.5) / 2.0**52

    def index(self, name: str, size: int) -> int:
        """Return a whole number from 0 to size - 1; `size` is at least 1."""
        return min(size - 1, int(self.uniform(name) * size))


def useless_sentence(choices: Choices) -> str:
    """Return a sentence that has no effect on answers."""
    return USELESS_SENTENCES[choices.index("useless which", len(USELESS_SENTENCES))]


@dataclass(frozen=True)
class ReplyModel:
    """How well the simulated model obeys, reflects and integrates; `ReplyModel()` is the obliging one.

    All are probabilities, between 0 and 1, where nothing else is said.

    Attributes:
        obedience: Probability that a reply follows a rule of its instruction, drawn for each rule and request.
        unevenness: How obedience differs from rule to rule: that of a rule is multiplied by u to this power, u being
            drawn once for the rule's word, evenly between 0 and 1. 0 means not at all; at 1 it is half on average.
        ignored: Share of the rules that are never obeyed.
        crowding: How obedience falls with the length n of an instruction, in rules and in sentences that a reflection
            has added: it is multiplied by exp(-crowding * n). 0 means never.
        rules_added: The most rules that one reflection adds, equally likely from 1 to this many; `None` for all that
            it reads.
        reads: Probability that a reflection writes a rule that the feedback names.
        vague: Probability that the feedback does not name a rule that was missed (`HouseRules` writes the feedback).
        forgets: Probability that a reflection, or an integration, drops one of the rules it had.
        useless: Share of the reflections that add no rule, only a sentence that does nothing.
        harmful: Share of the reflections that add no rule, only a sentence that does harm. One that reads no rule in
            its feedback adds a sentence that does nothing.
        harm: What each harmful sentence of an instruction multiplies the obedience to every rule by.
        recurring: Share of the harmful sentences that are one of a few that come again and again; others are rare.
        rivals: True when rules 1 and 2, 3 and 4, ... contradict each other: of two that an instruction holds both, a
            reply follows one at most, either as likely.
        spots_conflicts: Probability that an integration sees that a child contradicts the head or another child.
        overload: How integrations lose in a crowd: of n rules to be added each is lost with probability
            1 - exp(-overload * n).
        keeps: Probability that an integration puts in a rule or sentence that a child adds.
        loses: Probability that an integration drops a rule or added sentence of the head.
        rewords: Probability that an integration puts a rule in other words, which mean the same.
        rewrites: Probability that a reflection puts all that it writes in other words, in one paragraph.
        sloppy: Probability that a reply to a reflection or an integration is in a form that was not asked for
            (`dspy_flashevolve.sim.sloppy`).
        lineage: How a reflection writes structured texts and edits (`structured.py`): what it keeps, rewords and drops
            follows from that, and `forgets` counts for edits and integrations alone. None for a text of single lines.
        resamples: True when a request that comes again is answered anew, as at a temperature above 0; else equal
            requests get equal replies.

    Raises:
        ValueError: If a probability is outside [0, 1], `useless` and `harmful` are more than 1 together, `crowding`,
            `overload` or `unevenness` is negative, or `rules_added` is below 1.

    Examples:
        >>> ReplyModel().obedience_with(24)
        0.9
        >>> round(ReplyModel(crowding=0.01).obedience_with(24), 3)
        0.708
    """

    obedience: float = 0.9
    unevenness: float = 0.0
    ignored: float = 0.0
    crowding: float = 0.0
    rules_added: int | None = 2
    reads: float = 1.0
    vague: float = 0.0
    forgets: float = 0.1
    useless: float = 0.15
    harmful: float = 0.0
    harm: float = 0.9
    recurring: float = 0.25
    rivals: bool = False
    spots_conflicts: float = 0.8
    overload: float = 0.01
    keeps: float = 1.0
    loses: float = 0.0
    rewords: float = 0.0
    rewrites: float = 0.0
    sloppy: float = 0.0
    lineage: Lineage | None = None
    resamples: bool = False

    def __post_init__(self) -> None:
        for name in _PROBABILITIES:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)!r}")
        if self.useless + self.harmful > 1:
            raise ValueError(
                f"useless and harmful must be at most 1 together, got {self.useless!r} and {self.harmful!r}"
            )
        for name in ("crowding", "overload", "unevenness"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)!r}")
        if self.rules_added is not None and self.rules_added < 1:
            raise ValueError(f"rules_added must be at least 1 or None, got {self.rules_added!r}")

    def obedience_with(self, length: int) -> float:
        """Return the probability that a rule is followed in an instruction of that length, if all are obeyed alike."""
        return self.obedience * math.exp(-self.crowding * length)

    def obedience_to(self, word: str) -> float:
        """Return the factor by which obedience to the rule of this word differs from the usual one."""
        luck = Choices(0, word)
        if luck.uniform("ignored") < self.ignored:
            return 0.0
        return luck.uniform("obeyed") ** self.unevenness

    def obeyed(self, instruction: str) -> dict[str, float]:
        """Return, for each word of an instruction in order, the probability that a reply to it holds the word.

        For two rules that contradict each other, each probability is that without the other rule.
        """
        words, harmful = instructed_words(instruction), harmful_sentences(instruction)
        length = len(words) + len(harmful) + len(useless_sentences(instruction))
        usual = self.obedience_with(length) * self.harm ** len(harmful)
        return {word: usual * self.obedience_to(word) for word in words}

    def sentence(self, choices: Choices) -> str | None:
        """Return the sentence that a reflection writes instead of rules; None where it writes rules."""
        drawn = choices.uniform("useless")
        if drawn < self.useless:
            return useless_sentence(choices)
        if drawn >= self.useless + self.harmful:
            return None
        pool = RECURRING_HARM if choices.uniform("recurring") < self.recurring else HARMFUL_SENTENCES
        return pool[choices.index("harmful which", len(pool))]

    def read(self, named: Sequence[Rule], choices: Choices) -> list[Rule]:
        """Return the rules that a reflection writes, of those that its feedback names."""
        read_rules = [rule for rule in named if choices.uniform(f"read {rule.word}") < self.reads]
        read_rules.sort(key=lambda rule: choices.uniform(f"add {rule.word}"))
        return read_rules if self.rules_added is None else read_rules[: 1 + choices.index("how many", self.rules_added)]


_PROBABILITIES = (
    "obedience", "ignored", "reads", "vague", "forgets", "useless", "harmful", "harm", "recurring", "spots_conflicts",
    "keeps", "loses", "rewords", "rewrites", "sloppy",
)  # fmt: skip

_PLAIN = ReplyModel(
    obedience=0.98,
    unevenness=0.25,
    ignored=0.05,
    crowding=0.02,
    rules_added=None,
    reads=0.3,
    vague=0.4,
    useless=0.15,
    harmful=0.3,
    keeps=0.8,
    loses=0.03,
    rewords=0.1,
    sloppy=0.05,
    resamples=True,
)
REPLY_MODELS: dict[str, ReplyModel] = {
    "obliging": ReplyModel(),
    "plain": _PLAIN,
    "harsh": replace(
        _PLAIN,
        obedience=0.95,
        unevenness=0.4,
        ignored=0.15,
        crowding=0.03,
        reads=0.2,
        vague=0.5,
        useless=0.2,
        harmful=0.45,
        harm=0.88,
        keeps=0.7,
        loses=0.05,
        rewords=0.2,
        sloppy=0.1,
    ),
    "vague": replace(_PLAIN, vague=0.7, useless=0.5, harmful=0.15),
    "sloppy": replace(_PLAIN, sloppy=0.5, rewords=0.3),
    "rewriting": replace(_PLAIN, rewrites=1.0),
}
REPLY_MODELS["strong"] = replace(_PLAIN, lineage=GPT_CLASS)
REPLY_MODELS["strong-small"] = replace(REPLY_MODELS["harsh"], lineage=QWEN3_8B)
"""The named models.

obliging    writes good rules only, obeys all alike, integrates without loss: what a search finds easy
plain       the default: a third of its reflections do harm, rules are obeyed unevenly, length costs, parts get lost
harsh       more harm than help, a good part of the rules never obeyed, length costs more, more gets lost
vague       as plain, but feedback seldom says what was missed, and most reflections do nothing
sloppy      as plain, but every second reflection and integration comes in a form that was not asked for
rewriting   as plain, but every reflection puts the whole instruction in other words
strong      learns as plain, and writes structured texts, or edits, as GPT-class models do (`lineage.py`)
strong-small  learns as harsh, and writes as Qwen3-8B does
"""


def reply_model_named(name: str) -> ReplyModel:
    """Return the model with a name.

    Raises:
        ValueError: If there is none; the message has the names.

    Examples:
        >>> reply_model_named("obliging") == ReplyModel()
        True
    """
    if name not in REPLY_MODELS:
        raise ValueError(f"unknown model {name!r}: choose one of {', '.join(REPLY_MODELS)}")
    return REPLY_MODELS[name]


DEFAULT_MODEL = "plain"
"""Its numbers come from measurements of real models: docs/simulated-server.md, "Where the numbers come from"."""


def default_reply_model() -> ReplyModel:
    """Return the model of servers, tasks and runs that name none."""
    return REPLY_MODELS[DEFAULT_MODEL]
