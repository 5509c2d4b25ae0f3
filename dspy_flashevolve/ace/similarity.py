"""Whether bullets say the same or nearly so, judged by their words or by embeddings."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from dspy_flashevolve.ace.playbook import Bullet
from dspy_flashevolve.engine.errors import ConfigurationError

Embedder = Callable[[list[str]], Sequence[Sequence[float]]]
"""A function from texts to one vector each, all of one length."""
Likeness = Callable[[str, str], float]
"""A function from two texts to their similarity, at most 1."""
EMBEDDING_MODEL = "all-MiniLM-L6-v2"
"""The default sentence-transformers model: the library's small general one (384 numbers a text), quick on a CPU."""
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

    They say different things then, however similar their words or embeddings are.

    >>> differs("Always round up.", "Never round up."), differs("Use 2 digits.", "Use two digits.")
    (True, True)
    >>> differs("Do not round.", "Don't round."), differs("Take a / b.", "Take b / a.")
    (False, True)
    """
    return _claims(first) != _claims(second)


def _claims(text: str) -> tuple[set[str], list[tuple[str, str, str]], int]:
    denials = len(_DENIAL.findall(text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")))
    return set(_NUMBER.findall(text)), sorted(signs_of(text)), denials


def closest(
    content: str, bullets: Sequence[Bullet], least: float = LEAST_OVERLAP, likeness: Likeness = overlap
) -> Bullet | None:
    """Return the most similar bullet whose similarity is at least ``least`` and that does not differ (`differs`)."""
    near = [(likeness(content, bullet.content), bullet) for bullet in bullets if not differs(content, bullet.content)]
    best = max(near, key=lambda pair: pair[0], default=(0.0, None))
    return best[1] if best[0] >= least else None


def near_duplicates(
    bullets: Sequence[Bullet],
    compared: Collection[str] = (),
    least: float = LEAST_OVERLAP,
    likeness: Likeness = overlap,
) -> list[list[Bullet]]:
    """Group bullets that nearly say the same: each with all later ones that are so similar to it, and in no group yet.

    Bullets that differ (`differs`) are in no group together.

    Args:
        bullets: those of a playbook, in order.
        compared: texts that were compared with each other before; two of them are not compared again.
        least: least similarity of near-duplicates.
        likeness: the similarity of two texts.

    >>> texts = ["Mind the units of each rate.", "Round late.", "Mind units of each rate."]
    >>> bullets = [Bullet(f"oth-{number}", "other", text) for number, text in enumerate(texts)]
    >>> [[bullet.id for bullet in group] for group in near_duplicates(bullets)]
    [['oth-0', 'oth-2']]
    """
    groups: list[list[Bullet]] = []
    grouped: set[str] = set()
    for place, bullet in enumerate(bullets):
        if bullet.id in grouped:
            continue
        is_known = bullet.content in compared
        others = (
            other
            for other in bullets[place + 1 :]
            if other.id not in grouped and not (is_known and other.content in compared)
        )
        near = [
            other
            for other in others
            if likeness(bullet.content, other.content) >= least and not differs(bullet.content, other.content)
        ]
        if near:
            groups.append([bullet, *near])
            grouped.update(other.id for other in near)
    return groups


class Embeddings:
    """Compares texts by the cosine of their embeddings.

    Args:
        embedder: embeds texts, each once. None for sentence-transformers' `EMBEDDING_MODEL`.
        threshold: cosine from which two texts nearly say the same, above 0 and up to 1.
    """

    def __init__(self, embedder: Embedder | None, threshold: float) -> None:
        if embedder is None:
            transformers: Any = importlib.import_module("sentence_transformers")  # it takes seconds, and is optional
            model = transformers.SentenceTransformer(EMBEDDING_MODEL)
            self._embedder: Embedder = lambda texts: model.encode(texts).tolist()
        else:
            self._embedder = embedder
        self.threshold = threshold
        self._vectors: dict[str, Any] = {}
        """Text -> its embedding, divided by its length."""

    def prepare(self, texts: Sequence[str]) -> None:
        """Embed the texts that have no vector yet. It may take seconds; call it from one thread at a time."""
        missing = [text for text in dict.fromkeys(texts) if text not in self._vectors]
        if not missing:
            return
        vectors = [np.asarray(vector, dtype=float) for vector in self._embedder(missing)]
        lengths = {len(vector) for vector in (*vectors, *list(self._vectors.values())[:1])}
        is_finite = all(np.isfinite(vector).all() for vector in vectors)
        if len(vectors) != len(missing) or len(lengths) > 1 or not is_finite:
            raise ConfigurationError(
                f"embedder: {len(missing)} texts gave {len(vectors)} vectors of lengths {sorted(lengths)}, "
                "expected one vector a text, all of one length and of finite numbers."
            )
        norms = [float(np.linalg.norm(vector)) or 1.0 for vector in vectors]
        self._vectors |= {text: vector / norm for text, vector, norm in zip(missing, vectors, norms, strict=True)}

    def cosine(self, first: str, second: str) -> float:
        """Return the cosine of the embeddings of two texts that were prepared, -1 to 1."""
        # Of equal vectors rounding leaves a little less than 1, which a threshold of 1 would not let pass.
        return round(float(self._vectors[first] @ self._vectors[second]), 9)
