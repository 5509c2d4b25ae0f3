"""The words of the house rules, and the sentences that hold them: shared by the server and the task.

No word lies inside another one or occurs in the filler, so that a word in a reply is there by a rule alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

_LIST = """
    amber anchor apricot badger bamboo banjo barley beacon biscuit blossom bramble buffalo cabbage cactus camel
    candle canyon caravan cedar cello cherry cobalt compass copper coral cricket crystal cypress daisy desert
    dolphin donkey dragon ember emerald falcon feather fiddle flamingo forest fossil galaxy garlic gecko ginger
    glacier granite guitar hammock harbor hazel hedgehog hermit hickory honey iceberg indigo iris ivory jaguar
    jasmine jigsaw juniper kettle kiwi ladder lagoon lantern lavender lemon lilac lobster magnet mango maple marble
    meadow melon mosaic muffin nectar nutmeg oasis onyx orchid otter oyster paddle panther papaya pebble pelican
    pepper pigeon pillow plum pumpkin puzzle quartz quilt rabbit radish raven ribbon rocket saddle saffron sandal
    sapphire scarlet squirrel sunset teapot thunder tiger topaz tulip turtle umbrella vanilla velvet violin walnut
    whistle willow yogurt zebra zigzag
"""
WORDS: tuple[str, ...] = tuple(_LIST.split())

FILLER_OPENING = "Here is a short and plain reply that covers what was asked."
FILLER_SENTENCES: tuple[str, ...] = (
    "One more point to add is {word}.",
    "It also helps to think of {word}.",
    "As a further note, consider {word} as well.",
    "Let us not leave out {word} here.",
    "The next thing on the list is {word}.",
)
FILLER_CLOSING = "That is all there is to say about it."
ASPECTS = (
    "tone", "opening", "ending", "wording", "layout", "order", "grammar", "spelling", "title", "summary", "outline",
    "reasoning", "example", "context", "detail", "definition", "comparison", "evidence", "advice", "conclusion",
)  # fmt: skip
QUALITIES = ("calm", "clear", "exact", "formal", "gentle", "lively", "modest", "neutral", "polite", "simple")
_USUAL_ADVICE = (
    "Read the question with care before you start.",
    "Keep the tone friendly and clear.",
    "Check the reply once more at the end.",
    "Prefer short sentences.",
)
USELESS_SENTENCES: tuple[str, ...] = (
    *_USUAL_ADVICE,
    *(f"Keep the {aspect} {quality}." for aspect in ASPECTS for quality in QUALITIES),
)
"""Sentences of a reflection that learnt nothing: they change no answer, but make the instruction longer."""
_INSTRUCTED = re.compile(r'the word \\*"([A-Za-z]{1,40})\\*"')
_WORDINGS = (
    'Rule {number:02d}: mention the word "{word}".',
    'Rule {number:02d}: be sure to use the word "{word}".',
    'Rule {number:02d}: do not forget the word "{word}".',
    'Rule {number:02d}: find a place for the word "{word}".',
)
"""The wordings of a rule; the first is the task's own."""
WORDINGS = len(_WORDINGS)
_OPENINGS = [wording.partition(": ")[2].partition(" the word")[0] for wording in _WORDINGS]
RULE = re.compile(rf'Rule (\d{{1,6}}): ({"|".join(_OPENINGS)}) the word \\*"([A-Za-z]{{1,40}})\\*"\.?')
_ADVICE = "|".join(map(re.escape, _USUAL_ADVICE))
USELESS = re.compile(rf"{_ADVICE}|Keep the (?:{'|'.join(ASPECTS)}) (?:{'|'.join(QUALITIES)})\.")
_TOKEN = re.compile(r"[a-z]+")


@dataclass(frozen=True, order=True)
class Rule:
    """A house rule: an answer must contain a word.

    Attributes:
        number: Its number.
        word: The word.
        wording: Which of several sentences says it, all of which mean the same; the task's own is 0.
    """

    number: int
    word: str
    wording: int = field(default=0, compare=False, repr=False)

    def __str__(self) -> str:
        return _WORDINGS[self.wording].format(number=self.number, word=self.word)

    def reworded(self, by: int) -> Rule:
        """Return the rule in other words, `by` wordings further."""
        return replace(self, wording=(self.wording + by) % len(_WORDINGS))


def rules_in(text: str) -> list[Rule]:
    r"""Return the rules that a text states, each word once, in the order of the text; quotes may be escaped as in JSON.

    Examples:
        >>> rules_in('Missed: Rule 07: mention the word \\"amber\\". Rule 08: mention the word "plum".')
        [Rule(number=7, word='amber'), Rule(number=8, word='plum')]
    """
    rules: dict[str, Rule] = {}
    for number, opening, word in RULE.findall(text):
        rules.setdefault(word.lower(), Rule(int(number), word.lower(), _OPENINGS.index(opening)))
    return list(rules.values())


def without_rules(text: str) -> str:
    """Return a text without its rules and without the blank lines that they leave."""
    lines = (RULE.sub("", line).rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line.strip())


def instructed_words(text: str) -> list[str]:
    """Return every word x that the text asks for by `the word "x"`, once each, lower case, in the order of the text."""
    return list(dict.fromkeys(word.lower() for word in _INSTRUCTED.findall(text)))


def useless_sentences(text: str) -> list[str]:
    """Return the sentences of the text that have no effect, each once."""
    return list(dict.fromkeys(USELESS.findall(text)))


def words_present(text: str, words: Iterable[str]) -> list[str]:
    """Return those of `words` that occur in the text as whole words, in any case."""
    present = set(_TOKEN.findall(text.lower()))
    return [word for word in words if word in present]


class Choices:
    """Random choices that depend on a seed, a content and the name of the choice only."""

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
