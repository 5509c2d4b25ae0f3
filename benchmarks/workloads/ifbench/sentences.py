"""IFBench's `sentence:` kinds and the ratios of sentences. A rule for neighbours needs at least two sentences."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from benchmarks.workloads.ifbench.text import longest_run, lower_words, sentences, words
from benchmarks.workloads.ifbench.verifier import verifier

DECLARATIVE_TO_INTERROGATIVE = 2
EQUAL_SENTENCES = 3


@verifier(
    "sentence:alliteration_increment",
    "Give each sentence a longer run of consecutive alliterative words than the one before.",
    approximate="alliteration is the same first letter, not the same sound",
)
def alliteration_increment(response: str) -> bool:
    """The longest run of words with one initial grows from sentence to sentence; a lone word is a run of 1."""
    runs = [longest_run([word[0] for word in lower_words(sentence)]) for sentence in sentences(response)]
    return len(runs) > 1 and all(before < after for before, after in pairwise(runs))


@verifier("sentence:increment", "Give each sentence exactly {small_n} more words than the one before.")
def increment(response: str, small_n: int) -> bool:
    """The number of words grows by `small_n` from sentence to sentence."""
    sizes = [len(words(sentence)) for sentence in sentences(response)]
    return len(sizes) > 1 and all(after - before == small_n for before, after in pairwise(sizes))


@verifier("sentence:keyword", "Use the word {word!r} in sentence {N}.")
def keyword(response: str, N: int, word: str) -> bool:
    """Sentence `N`, counted from 1, has the word, without regard to case."""
    found = sentences(response)
    return 0 < N <= len(found) and word.casefold() in lower_words(found[N - 1])


@verifier(
    "ratio:sentence_balance",
    "Write as many declarative as interrogative and as exclamatory sentences.",
    approximate="a sentence's type is its last mark; one without a mark is declarative",
)
def sentence_balance(response: str) -> bool:
    """The same number of each type, at least one."""
    types = _types(response)
    return types["?"] == types["!"] == types["."] > 0


@verifier(
    "ratio:sentence_type",
    "Write two declarative sentences for each interrogative one.",
    approximate="a sentence's type is its last mark; one without a mark is declarative",
)
def sentence_type(response: str) -> bool:
    """A ratio of 2 to 1, with at least one question."""
    types = _types(response)
    return types["."] == DECLARATIVE_TO_INTERROGATIVE * types["?"] > 0


def _types(response: str) -> Counter[str]:
    return Counter(_type(sentence) for sentence in sentences(response))


def _type(sentence: str) -> str:
    last = sentence.rstrip("\"'”’)]*_ \n")[-2:]
    return "?" if "?" in last else "!" if "!" in last else "."


@verifier(
    "ratio:sentence_words",
    "Write three sentences with the same number of characters and with all different words.",
    approximate="spaces and punctuation inside a sentence count as characters",
)
def sentence_words(response: str) -> bool:
    """Exactly three sentences of one length; no word occurs twice in the response."""
    found = sentences(response)
    used = lower_words(response)
    equal = len({len(sentence) for sentence in found}) == 1
    return len(found) == EQUAL_SENTENCES and equal and len(set(used)) == len(used)
