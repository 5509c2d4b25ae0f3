"""When do two bullets say the same? By their words, or by an embedding."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from dspy_flashevolve.ace.playbook import Bullet
from dspy_flashevolve.engine.errors import ConfigurationError

Embedder = Callable[[list[str]], Sequence[Sequence[float]]]
"""Texts -> one vector each, all of one length."""
Likeness = Callable[[str, str], float]
"""How much alike two texts are, up to 1."""
FindDuplicate = Callable[[str, Sequence[Bullet]], Bullet | None]
"""The bullet, of those given, that says the same as a text; None where there is none."""
EMBEDDING_MODEL = "all-MiniLM-L6-v2"
"""The sentence-transformers model that embeds bullets, unless an embedder is given."""
LEAST_OVERLAP = 0.7
"""Shared words from which an addition repeats a newer bullet."""
_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_DENIAL = re.compile(r"\b(?:not|no|never|none|without|cannot|avoid|unless|except)\b|n't\b")
_SIGN = re.compile(r"([\w)\]]+)( *)(!=|<=|>=|==|[-+*/=<>^%×÷\u2212≤≥≠±])( *)(?=([\w(\[]+))")
_JOINS = "-*/"
"""Signs that stand between words, too: "right-hand", "input/output", "**bold**"."""


def signs_of(text: str) -> list[tuple[str, str, str]]:
    """The signs of arithmetic in a text with what stands on both sides, in order.

    >>> signs_of("Take a / b - 1, input/output of the right-hand side.")
    [('a', '/', 'b'), ('b', '-', '1')]
    """
    found: list[tuple[str, str, str]] = []
    for sign in _SIGN.finditer(text.lower()):
        left, before, what, after, right = sign.groups()
        short = any(len(one) == 1 or one.isdigit() for one in (left, right))
        if what not in _JOINS or short or (before and after):
            found.append((left, what, right))
    return found


def same_words(content: str, bullets: Sequence[Bullet]) -> Bullet | None:
    """The first bullet with the same words and signs of arithmetic in the same order, whatever stands between them.

    >>> same_words("Round, at the END", [Bullet("str-1", "strategies", "- round at the **end**.")]).id
    'str-1'
    >>> same_words("Take a + b.", [Bullet("str-1", "strategies", "Take a - b.")])
    """
    wanted = _in_order(content)
    return next((one for one in bullets if _in_order(one.content) == wanted), None)


def _in_order(text: str) -> tuple[list[str], list[tuple[str, str, str]]]:
    return _WORD.findall(text.lower()) or [text], signs_of(text)


def overlap(one: str, other: str) -> float:
    """Shared words, as a part of all words of both; 0 to 1.

    >>> overlap("round at the end", "Round in the end.")
    0.6
    """
    ours, theirs = set(_WORD.findall(one.lower())), set(_WORD.findall(other.lower()))
    return len(ours & theirs) / len(ours | theirs) if ours | theirs else float(one == other)


def differs(one: str, other: str) -> bool:
    """Whether two texts hold other numbers, signs of arithmetic or negations.

    They say different things then, however alike they are.

    >>> differs("Always round up.", "Never round up."), differs("Use 2 digits.", "Use two digits.")
    (True, True)
    >>> differs("Do not round.", "Don't round."), differs("Take a / b.", "Take b / a.")
    (False, True)
    """
    return _said(one) != _said(other)


def _said(text: str) -> tuple[set[str], list[tuple[str, str, str]], int]:
    denials = len(_DENIAL.findall(text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")))
    return set(_NUMBER.findall(text)), sorted(signs_of(text)), denials


def closest(
    content: str, bullets: Sequence[Bullet], least: float = LEAST_OVERLAP, likeness: Likeness = overlap
) -> Bullet | None:
    """The bullet that is most alike, of those that are by at least ``least`` and do not differ in a number or a no."""
    near = [(likeness(content, one.content), one) for one in bullets if not differs(content, one.content)]
    best = max(near, key=lambda pair: pair[0], default=(0.0, None))
    return best[1] if best[0] >= least else None


class EmbeddingDuplicates:
    """Finds the bullet that says the same as a text by the cosine of their embeddings.

    Args:
        embedder: embeds texts; called once a text. None for sentence-transformers' :data:`EMBEDDING_MODEL`.
        threshold: cosine from which two texts say the same, above 0 and up to 1.
    """

    def __init__(self, embedder: Embedder | None, threshold: float) -> None:
        if embedder is None:
            transformers: Any = importlib.import_module("sentence_transformers")  # it takes seconds, and is optional
            model = transformers.SentenceTransformer(EMBEDDING_MODEL)
            self._embedder: Embedder = lambda texts: model.encode(texts).tolist()
        else:
            self._embedder = embedder
        self._threshold = threshold
        self._known: dict[str, tuple[float, ...]] = {}

    def prepare(self, texts: Sequence[str]) -> None:
        """Embed what is not known yet; it may take a while, and may be called from one thread at a time."""
        missing = [text for text in dict.fromkeys(texts) if text not in self._known]
        if missing:
            vectors = [tuple(float(number) for number in vector) for vector in self._embedder(missing)]
            lengths = {len(vector) for vector in (*vectors, *list(self._known.values())[:1])}
            is_finite = all(math.isfinite(number) for vector in vectors for number in vector)
            if len(vectors) != len(missing) or len(lengths) > 1 or not is_finite:
                raise ConfigurationError(
                    f"embedder: {len(missing)} texts gave {len(vectors)} vectors of lengths {sorted(lengths)}, "
                    "expected one vector a text, all of one length and of finite numbers."
                )
            self._known |= dict(zip(missing, vectors, strict=True))

    def __call__(self, content: str, bullets: Sequence[Bullet]) -> Bullet | None:
        """The most similar bullet, of those at the threshold or above; the same words are the same text.

        Texts that are not prepared are compared by words only.
        """
        same = same_words(content, bullets)
        if same is not None or content not in self._known:
            return same
        known = [one for one in bullets if one.content in self._known]
        return closest(content, known, self._threshold, self._cosine)

    def _cosine(self, one: str, other: str) -> float:
        ours, theirs = self._known[one], self._known[other]
        lengths = math.hypot(*ours) * math.hypot(*theirs)
        return sum(a * b for a, b in zip(ours, theirs, strict=True)) / lengths if lengths else 0.0
