"""A response as the official evaluator reads it: bare words, tokens, sentences and emojis.

Words are split as IFBench splits them. Tokens and sentences are what NLTK's `word_tokenize` and `sent_tokenize` find,
without NLTK and the data that it downloads: Penn Treebank tokens, and sentences after Kiss and Strunk, "Unsupervised
Multilingual Sentence Boundary Detection" (Computational Linguistics 32:4, 2006), with our own list of abbreviations
where NLTK has a trained model.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Iterator
from itertools import pairwise

from benchmarks.workloads.ifbench import lexicon

MARKS = string.punctuation
SENTENCE_ENDS = "where a sentence ends after an abbreviation, an initial or an ellipsis"
"""What is approximate of every verifier that reads sentences."""
_NO_MARKS = str.maketrans("", "", MARKS)

_OUTSIDE_WORDS = r"[)\";}\]*:@'({\[?!]"
_RUN = r"-{2,}|\.{2,}|(?:\.\s){2,}\."
_PIECE = re.compile(
    rf"{_RUN}|[^\s(\"`{{\[:;&#*@)}}\]\-,](?:(?!{_OUTSIDE_WORDS}|{_RUN}|,(?:$|\s|{_OUTSIDE_WORDS}|{_RUN}))\S)*|\S"
)
_MARK_INSIDE = re.compile(rf"[.?!](?={_OUTSIDE_WORDS})")
_CLOSING = re.compile(r"[\"')\]}]+?(?:\s+|(?=--)|$)", re.MULTILINE)
_NUMBER = re.compile(r"-?[.,]?\d[\d,.-]*")

_FINAL_PERIOD = re.compile(r"(?<!\.)\.(?=[\])}>\"'»”’ ]*$)")
_SEPARATE = re.compile(
    r"\.{2,}|--|`+|''|[;@#$%&?!*\[\](){}<>\"«»“”‘’„\u2012-\u2015]|[:,](?!\d)"
    r"|(?<!\w)'(?!(?:re|ve|ll|m|t|s|d|n)\b)(?=\w)",
    re.IGNORECASE,
)
_ENDING = re.compile(r"(?<=[^'])(?:'(?:s|m|d|ll|re|ve)?|n't)$", re.IGNORECASE)

_JOINED = {"cannot": 3, "gonna": 3, "gotta": 3, "wanna": 3, "gimme": 3, "lemme": 3}


def bare(text: str) -> str:
    """The text without the 32 punctuation marks of ASCII.

    Example:
        >>> bare("It's 3.5, well-known!")
        'Its 35 wellknown'
    """
    return text.translate(_NO_MARKS)


def bare_words(text: str) -> list[str]:
    """The words between spaces, without the punctuation marks around them and in them.

    Example:
        >>> bare_words("Wait - it's here.")
        ['Wait', 'its', 'here']
    """
    return bare(text).split()


def trimmed(text: str) -> str:
    """The text without the punctuation marks and spaces around it."""
    return text.strip(MARKS + " ")


def plain(text: str) -> str:
    """The text without accents and without what has no counterpart in ASCII.

    Example:
        >>> plain("Chișinău")
        'Chisinau'
    """
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode("ascii")


def sentences(text: str) -> list[str]:
    """The sentences: up to a `.`, `?` or `!` before a space, with the quotes and brackets that close after it.

    A line break is a space like any other. After an abbreviation, an ellipsis or an initial a sentence begins only with
    the capital letter of a word that is often written small; after a number, not with a small letter.

    Example:
        >>> sentences('Dr. Bell? "Yes!" he said at 3.30.\\nThe end')
        ['Dr. Bell?', '"Yes!"', 'he said at 3.30.', 'The end']
    """
    text = text.strip()
    found: list[str] = []
    start = 0
    for end, following in [*_ends(text), (len(text), len(text))]:
        closing = _CLOSING.match(text, following)
        found.append(text[start : following + len(closing[0].rstrip()) if closing else end])
        start = closing.end() if closing else following
    return [sentence for sentence in found if sentence]


def _ends(text: str) -> Iterator[tuple[int, int]]:
    """Where each sentence but the last ends and the next one begins.

    Of the marks between two spaces the last one counts, and the first one too if nothing stands before it.
    """
    for part, later in pairwise([*re.finditer(r"\S+", text), None]):
        if part is None:
            return
        start, end = part.span()
        marks = [mark.end() for mark in _MARK_INSIDE.finditer(text, start, end)]
        if later and text[end - 1] in ".?!":
            context, following = text[start : later.end()], later.start()
            marks.append(end)
        elif marks:
            following = marks[-1]
            context = text[start : following + 1]
        else:
            continue
        if marks[0] == start + 1 < marks[-1]:
            yield start + 1, start + 1
        if any(_breaks(one, two) for one, two in pairwise(_PIECE.findall(context))):
            yield marks[-1], following


def _breaks(piece: str, following: str) -> bool:
    """Whether a sentence ends with a piece, given the piece after it."""
    if piece in {".", "?", "!"}:
        return True
    if not piece.endswith("."):
        return False
    word, begins = piece[:-1].casefold(), following[0]
    often_small = begins.isupper() and following.rstrip(".").casefold() in lexicon.STOP_WORDS
    goes_on = begins.islower() or following in {";", ":", ",", ".", "!", "?"}
    if len(word) == 1 and word.isalpha():
        return often_small or not (goes_on or begins.isupper())
    if piece.endswith("..") or not lexicon.ABBREVIATIONS.isdisjoint((word, word.split("-")[-1])):
        return often_small
    return not (goes_on and _NUMBER.fullmatch(word))


def tokens(text: str) -> list[str]:
    """The Penn Treebank tokens: words, clitics and punctuation marks, one after the other.

    Example:
        >>> tokens("Don't: it's at 3:30, Mr. X (no).")
        ['Do', "n't", ':', 'it', "'s", 'at', '3:30', ',', 'Mr.', 'X', '(', 'no', ')', '.']
    """
    return [token for sentence in sentences(text) for token in _sentence_tokens(sentence)]


def _sentence_tokens(sentence: str) -> Iterator[str]:
    apart = _SEPARATE.sub(r" \g<0> ", _FINAL_PERIOD.sub(" . ", sentence))
    for part in apart.split():
        ending = _ENDING.search(part)
        word, clitic = (part[: ending.start()], ending[0]) if ending else (part, "")
        first = _JOINED.get(word.casefold(), len(word))
        yield from filter(None, (word[:first], word[first:], clitic))


def is_emoji(character: str) -> bool:
    """Whether it is an emoji by itself, as by the package `emoji`: no joiner, no half of a flag.

    Example:
        >>> [is_emoji(character) for character in "😀❤1©"]
        [True, True, False, True]
    """
    return character in lexicon.EMOJIS
