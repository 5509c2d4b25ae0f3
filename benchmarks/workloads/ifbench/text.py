"""Words, sentences, paragraphs and lines of a response, as the verifiers read them."""

from __future__ import annotations

import re
from itertools import groupby, pairwise

from benchmarks.workloads.ifbench.lexicon import word_set

_WORD = re.compile(r"[^\W_]+(?:['’\-][^\W_]+)*")
_END = re.compile(r"[.!?…。！？]+([\"'”’)\]*_]*)")
_EMPTY_LINE = re.compile(r"\n[^\S\n]*\n")
_ABBREVIATIONS = word_set("dr mr mrs ms prof st vs e.g i.e cf vol fig approx")
_NEEDS_NO_SPACE = "。！？"
_EMOJI_RANGES = (
    (0x1F000, 0x1FAFF), (0x2600, 0x27BF), (0x2B05, 0x2B55), (0x231A, 0x231B), (0x23E9, 0x23FA), (0x25AA, 0x25FE),
    (0x2194, 0x21AA), (0xE0020, 0xE007F),
)  # fmt: skip
_EMOJI_SINGLES = frozenset((0x200D, 0xFE0F, 0x20E3, 0x203C, 0x2049, 0x2122, 0x2139, 0x3030, 0x303D, 0x3297, 0x3299))


def words(text: str) -> list[str]:
    """The words: letters and digits, with apostrophes and hyphens inside.

    Example:
        >>> words("It's well-known: 3 o'clock!")
        ["It's", 'well-known', '3', "o'clock"]
    """
    return _WORD.findall(text)


def lower_words(text: str) -> list[str]:
    """The words without regard to case, with straight apostrophes."""
    return [word.casefold().replace("’", "'") for word in words(text)]


def letters_and_digits(word: str) -> str:
    """The word without its apostrophes and hyphens."""
    return re.sub(r"['’\-]", "", word)


def sentence_ends(text: str) -> list[tuple[int, int]]:
    """Where sentences end: the spans of their marks with the quotes and brackets that close after them.

    Not an end: the period of a common abbreviation or of a list's number, a mark inside a word, and a mark that closes
    a quotation when the next word is in lower case.
    """
    return [found.span() for found in _END.finditer(text) if _is_end(text, found)]


def _is_end(text: str, found: re.Match[str]) -> bool:
    following = text[found.end() : found.end() + 2]
    if found[0][0] in _NEEDS_NO_SPACE:
        return True
    if following and not following[0].isspace() and not is_emoji(following[0]):
        return False
    if found[1] and following[1:].islower():
        return False
    if found[0] != ".":
        return True
    before = text[max(0, found.start() - 12) : found.start()]
    last = re.split(r"[\s(\"']", before)[-1]
    numbers_an_item = last.isdigit() and len(last) < 3 and not before[: -len(last)].split("\n")[-1].strip()
    return last.casefold() not in _ABBREVIATIONS and not numbers_an_item


def sentences(text: str) -> list[str]:
    """The sentences: up to a `.`, `!` or `?` before a space, or up to an empty line; those without a word are left out.

    Example:
        >>> sentences('Dr. Who? "Yes!" he said at 3.30.\\n\\n1. The end')
        ['Dr. Who?', '"Yes!" he said at 3.30.', '1. The end']
    """
    return [part.strip() for block in _EMPTY_LINE.split(text) for part in _parts(block) if _WORD.search(part)]


def _parts(block: str) -> list[str]:
    ends = [0, *(_after_emojis(block, end) for _, end in sentence_ends(block)), len(block)]
    return [block[start:end] for start, end in pairwise(ends)]


def _after_emojis(block: str, end: int) -> int:
    """Where the emojis end that stand after a sentence's mark."""
    place = end + (block[end : end + 1] == " ")
    if not is_emoji(block[place : place + 1] or " "):
        return end
    return next((other for other in range(place, len(block)) if not is_emoji(block[other])), len(block))


def lines(text: str) -> list[str]:
    """The lines that are not blank, with their indentation."""
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def paragraphs(text: str) -> list[str]:
    """The parts between empty lines."""
    return [block.strip() for block in _EMPTY_LINE.split(text) if block.strip()]


def without_fence(text: str) -> str:
    """The text inside a code fence that encloses all of it, else the text.

    Example:
        >>> without_fence("```csv\\na,b\\n```")
        'a,b'
    """
    given = text.strip().splitlines()
    fenced = len(given) > 1 and given[0].startswith("```") and given[-1].strip() == "```"
    return "\n".join(given[1:-1]) if fenced else text.strip("\n")


def longest_run(values: list[str]) -> int:
    """The length of the longest run of equal neighbours.

    Example:
        >>> longest_run(["a", "b", "b", "a"])
        2
    """
    return max((sum(1 for _ in run) for _, run in groupby(values)), default=0)


def is_emoji(character: str) -> bool:
    """Whether it is an emoji or joins emojis, by the main Unicode blocks (a few plain symbols of these count too)."""
    code = ord(character)
    return code in _EMOJI_SINGLES or any(low <= code <= high for low, high in _EMOJI_RANGES)
