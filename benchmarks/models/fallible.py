"""Models that fall short as real ones do: they obey unevenly, read half of the feedback, do harm, and lose parts.

Their numbers come from measurements of real models where there are any: docs/simulated-server.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from dspy_flashevolve.sim.prompts import ChatRequest
from dspy_flashevolve.sim.replies import ReplyModel, edit, useless_sentence
from dspy_flashevolve.sim.words import (
    ASPECTS,
    QUALITIES,
    RULE,
    USELESS,
    WORDINGS,
    Choices,
    Rule,
    instructed_words,
    rules_in,
    useless_sentences,
    without_rules,
)

RECURRING_HARM = (
    "Always answer in one single word.",
    "Never mention anything that was not asked for.",
    "Answer in as few words as you can.",
    "Ignore whatever else you were told.",
)
"""Harmful sentences that many reflections write."""
HARMFUL_SENTENCES: tuple[str, ...] = tuple(
    f"Leave out the {aspect} unless it is {quality}." for aspect in ASPECTS for quality in QUALITIES
)
"""Harmful sentences, each of which is rare: they make a model obey all rules less."""
_RARE_HARM = rf"Leave out the (?:{'|'.join(ASPECTS)}) unless it is (?:{'|'.join(QUALITIES)})\."
_HARMFUL = re.compile(rf"{'|'.join(map(re.escape, RECURRING_HARM))}|{_RARE_HARM}")
STATEMENT = re.compile(f"{RULE.pattern}|{USELESS.pattern}|{_HARMFUL.pattern}")
"""A rule, or a sentence that a reflection writes instead of one."""
_LINKS = ("; ", "; then: ", "; and mind this: ", "; what is more: ")
"""Phrases between the rules of a rewritten instruction, which is one paragraph."""
_LINK = re.compile("|".join(map(re.escape, sorted(_LINKS, key=len, reverse=True))))
_PROPOSAL = re.compile(r"### Proposal(?= \d{1,9}$)")
_PROBABILITIES = (
    "ignored", "reads", "vague", "harmful", "harm", "recurring", "keeps", "loses", "rewords", "rewrites",
)  # fmt: skip


def harmful_sentences(text: str) -> list[str]:
    """Return the sentences of the text that lower the obedience to all rules, each once."""
    return list(dict.fromkeys(_HARMFUL.findall(text)))


def listed(text: str, between: str = "\n") -> str:
    """Return a rewritten instruction, which is one paragraph, as lines."""
    return _LINK.sub(between, text)


def read_request(request: ChatRequest) -> ChatRequest:
    """Return a request of Combee's, which shows whole texts, as one to integrate; others stay as they are."""
    if "proposed_instructions" not in request.inputs:
        return request
    lines = request.inputs["proposed_instructions"].splitlines()  # every line is taken for a change
    children = (_PROPOSAL.sub("### Child", line) if _PROPOSAL.match(line) else f"+ {line}" for line in lines)
    inputs = {"head_text": request.inputs["current_instruction"], "children": "\n".join(children)}
    return replace(request, inputs=inputs)


@dataclass(frozen=True)
class FallibleModel(ReplyModel):
    """A model that falls short; as it is made it does so only where texts are integrated in a crowd.

    All are probabilities, between 0 and 1, where nothing else is said.

    Attributes:
        unevenness: How obedience differs from rule to rule: that of a rule is multiplied by u to this power, u being
            drawn once for the rule's word, evenly between 0 and 1. 0 means not at all; at 1 it is half on average.
        ignored: Share of the rules that are never obeyed.
        crowding: How obedience falls with the length n of an instruction, in rules and in sentences that a reflection
            has added: it is multiplied by exp(-crowding * n). 0 means never.
        reads: Probability that a reflection writes a rule that the feedback names.
        vague: Probability that the feedback does not name a rule that was missed.
        harmful: Share of the reflections that add no rule, only a sentence that does harm. One that reads no rule in
            its feedback adds a sentence that does nothing.
        harm: What each harmful sentence of an instruction multiplies the obedience to every rule by.
        recurring: Share of the harmful sentences that are one of a few that come again and again; others are rare.
        overload: How integrations lose in a crowd: of n rules to be added each is lost with probability
            1 - exp(-overload * n).
        keeps: Probability that an integration puts in a rule or sentence that a child adds.
        loses: Probability that an integration drops a rule or added sentence of the head.
        rewords: Probability that an integration puts a rule in other words, which mean the same.
        rewrites: Probability that a reflection puts all that it writes in other words, in one paragraph.

    Raises:
        ValueError: If a probability is outside [0, 1], `useless` and `harmful` are more than 1 together, or `crowding`,
            `overload` or `unevenness` is negative.
    """

    unevenness: float = 0.0
    ignored: float = 0.0
    crowding: float = 0.0
    reads: float = 1.0
    vague: float = 0.0
    harmful: float = 0.0
    harm: float = 0.9
    recurring: float = 0.25
    overload: float = 0.01
    keeps: float = 1.0
    loses: float = 0.0
    rewords: float = 0.0
    rewrites: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
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

    def obedience_to(self, word: str) -> float:
        """Return the factor by which obedience to the rule of this word differs from the usual one."""
        luck = Choices(0, word)
        if luck.uniform("ignored") < self.ignored:
            return 0.0
        return luck.uniform("obeyed") ** self.unevenness

    def obeyed(self, instruction: str) -> dict[str, float]:
        words, harmful = instructed_words(instruction), harmful_sentences(instruction)
        length = len(words) + len(harmful) + len(useless_sentences(instruction))
        usual = self.obedience * math.exp(-self.crowding * length) * self.harm ** len(harmful)
        return {word: usual * self.obedience_to(word) for word in words}

    def feedback(self, missed: Sequence[Rule], choices: Choices) -> str:
        named = [rule for rule in missed if choices.uniform(f"name {rule.word}") >= self.vague]
        if len(named) == len(missed):
            return super().feedback(missed, choices)
        return " ".join(["Missed:", *map(str, named), "Something else that was expected is not there."])

    def sentence(self, choices: Choices) -> str | None:
        drawn = choices.uniform("useless")
        if drawn < self.useless:
            return useless_sentence(choices)
        if drawn >= self.useless + self.harmful:
            return None
        pool = RECURRING_HARM if choices.uniform("recurring") < self.recurring else HARMFUL_SENTENCES
        return pool[choices.index("harmful which", len(pool))]

    def sentences(self, text: str) -> list[str]:
        return [*useless_sentences(text), *harmful_sentences(text)]

    def read(self, named: Sequence[Rule], choices: Choices) -> list[Rule]:
        return super().read([rule for rule in named if choices.uniform(f"read {rule.word}") < self.reads], choices)

    def write(self, request: ChatRequest, choices: Choices, seed: int) -> str:
        return super().write(read_request(request), choices, seed)

    def new_instruction(self, current: str, feedback: str, choices: Choices) -> str:
        text = super().new_instruction(listed(current), feedback, choices)
        if choices.uniform("rewrite") >= self.rewrites:
            return text
        rules = sorted(rules_in(text), key=lambda rule: choices.uniform(f"rewrite {rule.word}"))
        other = [rule.reworded(1 + choices.index(f"rewrite {rule.word} how", WORDINGS - 1)) for rule in rules]
        link = _LINKS[choices.index("rewrite how", len(_LINKS))]
        return link.join([*without_rules(text).splitlines(), *map(str, other)]).strip()

    def edits(self, parts: Sequence[str], feedback: str, choices: Choices) -> list[object]:
        if choices.uniform("rewrite") >= self.rewrites:
            return super().edits(parts, feedback, choices)
        text = self.new_instruction("\n".join(parts), feedback, choices)
        return [edit("replace", 1, text), *(edit("remove", number) for number in range(2, len(parts) + 1))]

    def integrate(self, head: str, children: str, choices: Choices) -> tuple[list[dict[str, object]], str]:
        lines = (listed(line, "\n+ ") if line.startswith("+ ") else line for line in children.splitlines())
        return super().integrate(listed(head), "\n".join(lines), choices)

    def merged(self, head: str, rules: list[Rule], added: list[Rule], sentences: list[str], choices: Choices) -> str:
        lost = 1 - math.exp(-self.overload * len(added))
        kept = [rule for rule in added if choices.uniform(f"lose {rule.word}") >= lost]
        kept = [rule for rule in kept if choices.uniform(f"put in {rule.word}") < self.keeps]
        copied = [sentence for sentence in sentences if choices.uniform(f"put in {sentence}") < self.keeps]
        rules = [rule for rule in rules if choices.uniform(f"drop {rule.word}") >= self.loses]
        base = without_rules(head)
        dropped = {one for one in self.sentences(base) if choices.uniform(f"drop {one}") < self.loses}
        return self.patched(head, base, rules, kept, copied, dropped, choices)

    def patched(
        self,
        head: str,
        base: str,
        rules: Sequence[Rule],
        added: Sequence[Rule],
        copied: Sequence[str],
        dropped: Collection[str],
        choices: Choices,
    ) -> str:
        """Return a head after an integration.

        Args:
            head: The head before.
            base: The head without its rules.
            rules: Those of its rules that stay.
            added: The rules that are put in.
            copied: The sentences that are put in.
            dropped: The sentences that are taken out.
            choices: The random choices of this request.
        """
        base = "\n".join(line for line in base.splitlines() if line.strip() not in dropped)
        whole = [self._reworded(rule, choices) for rule in (*rules, *added)]
        return "\n".join([base, *copied, *map(str, sorted(whole))]).strip()

    def _reworded(self, rule: Rule, choices: Choices) -> Rule:
        if choices.uniform(f"reword {rule.word}") >= self.rewords:
            return rule
        return rule.reworded(1 + choices.index(f"reword {rule.word} how", WORDINGS - 1))
