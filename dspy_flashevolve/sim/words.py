"""The words of the house rules, and the sentences that hold them: shared by the server and the task.

No word lies inside another one or occurs in the filler, so that a word in a reply is there by a rule alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

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
USELESS_SENTENCES: tuple[str, ...] = (
    "Read the question with care before you start.",
    "Keep the tone friendly and clear.",
    "Check the reply once more at the end.",
    "Prefer short sentences.",
)
"""What a reflection says that learnt nothing."""

_INSTRUCTED = re.compile(r'the word \\*"([A-Za-z]{1,40})\\*"')
_RULE = re.compile(r'Rule (\d{1,6}): mention the word \\*"([A-Za-z]{1,40})\\*"\.?')
_TOKEN = re.compile(r"[a-z]+")


@dataclass(frozen=True, order=True)
class Rule:
    """A house rule: an answer must hold a word.

    Example:
        >>> str(Rule(7, "amber"))
        'Rule 07: mention the word "amber".'
    """

    number: int
    word: str

    def __str__(self) -> str:
        return f'Rule {self.number:02d}: mention the word "{self.word}".'


def rules_in(text: str) -> list[Rule]:
    r"""The rules that a text states, each word once, in the order of the text; quotes may be escaped as in JSON.

    Example:
        >>> rules_in('Missed: Rule 07: mention the word \\"amber\\". Rule 08: mention the word "plum".')
        [Rule(number=7, word='amber'), Rule(number=8, word='plum')]
    """
    found: dict[str, Rule] = {}
    for number, word in _RULE.findall(text):
        found.setdefault(word.lower(), Rule(int(number), word.lower()))
    return list(found.values())


def without_rules(text: str) -> str:
    """The text with its rules taken out and the blank lines they leave closed."""
    lines = (_RULE.sub("", line).rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line.strip())


def instructed_words(text: str) -> list[str]:
    """Every word x that the text asks for by `the word "x"`, once each, lower case, in the order of the text.

    Example:
        >>> instructed_words('Mention the word "amber" and the word "plum".')
        ['amber', 'plum']
    """
    return list(dict.fromkeys(word.lower() for word in _INSTRUCTED.findall(text)))


def words_present(text: str, wanted: Iterable[str]) -> list[str]:
    """Those of `wanted` that occur in the text as whole words, in any case."""
    present = set(_TOKEN.findall(text.lower()))
    return [word for word in wanted if word in present]
