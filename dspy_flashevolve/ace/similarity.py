"""Whether bullets say the same or nearly so, judged by their words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from dspy_flashevolve.ace.playbook import Bullet

LEAST_OVERLAP = 0.7
"""Least share of common words at which two bullets nearly say the same.

Where one of n words is replaced, (n - 1) of n + 1 words are shared. 0.7 lets that pass from six words on (5 / 7); in
shorter texts the one word is most of the meaning. No other value was measured.
"""
_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_DENIAL = re.compile(r"\b(?:not|no|never|none|without|cannot|avoid|unless|except)\b|n't\b")
_SIGN = re.compile(r"([\w)\]]+)( *)(!=|<=|>=|==|[-+*/=<>^%×÷\u2212≤≥≠±])( *)(?=([\w(\[]+))")
_JOINS = "-*/"
"""Signs of arithmetic that also stand between words: "right-hand", "input/output", "**bold**"."""


def signs_of(text: str) -> list[tuple[str, str, str]]:
    """Return the signs of arithmetic in a text with their operands, in order.

    >>> signs_of("Take a / b - 1, input/output of the right-hand side.")
    [('a', '/', 'b'), ('b', '-', '1')]
    """
    signs: list[tuple[str, str, str]] = []
    for match in _SIGN.finditer(text.lower()):
        left, before, sign, after, right = match.groups()
        short = any(len(operand) == 1 or operand.isdigit() for operand in (left, right))
        if sign not in _JOINS or short or (before and after):
            signs.append((left, sign, right))
    return signs


def same_words(content: str, bullets: Sequence[Bullet]) -> Bullet | None:
    """Return the first bullet with the same words and signs of arithmetic in the same order, punctuation aside.

    >>> same_words("Round, at the END", [Bullet("str-1", "strategies", "- round at the **end**.")]).id
    'str-1'
    >>> same_words("Take a + b.", [Bullet("str-1", "strategies", "Take a - b.")])
    """
    wanted = _in_order(content)
    return next((bullet for bullet in bullets if _in_order(bullet.content) == wanted), None)


def _in_order(text: str) -> tuple[list[str], list[tuple[str, str, str]]]:
    return _WORD.findall(text.lower()) or [text], signs_of(text)


def overlap(first: str, second: str) -> float:
    """Return the share of common words among all words of two texts (the Jaccard index), 0 to 1.

    >>> overlap("round at the end", "Round in the end.")
    0.6
    """
    first_words, second_words = _words(first), _words(second)
    all_words = first_words | second_words
    return len(first_words & second_words) / len(all_words) if all_words else float(first == second)


@lru_cache(maxsize=4096)
def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text.lower()))


def differs(first: str, second: str) -> bool:
    """Return whether two texts differ in a number, a sign of arithmetic or a negation.

    They say different things then, however similar their words are.

    >>> differs("Always round up.", "Never round up."), differs("Use 2 digits.", "Use two digits.")
    (True, True)
    >>> differs("Do not round.", "Don't round."), differs("Take a / b.", "Take b / a.")
    (False, True)
    """
    return _claims(first) != _claims(second)


def _claims(text: str) -> tuple[set[str], list[tuple[str, str, str]], int]:
    denials = len(_DENIAL.findall(text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")))
    return set(_NUMBER.findall(text)), sorted(signs_of(text)), denials


def closest(content: str, bullets: Sequence[Bullet]) -> Bullet | None:
    """Return the bullet with the largest `overlap`, at least `LEAST_OVERLAP`, that does not differ (`differs`)."""
    near = [(overlap(content, bullet.content), bullet) for bullet in bullets if not differs(content, bullet.content)]
    best = max(near, key=lambda pair: pair[0], default=(0.0, None))
    return best[1] if best[0] >= LEAST_OVERLAP else None
