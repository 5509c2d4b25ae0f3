"""IFBench's `sentence:` kinds and the ratios of sentences. A lone sentence meets every rule for neighbours."""

from __future__ import annotations

import re
from itertools import groupby, pairwise

from benchmarks.workloads.ifbench.text import MARKS, SENTENCE_ENDS, bare_words, sentences
from benchmarks.workloads.ifbench.verifier import verifier

DECLARATIVE_TO_INTERROGATIVE = 2
EQUAL_SENTENCES = 3


@verifier(
    "sentence:alliteration_increment",
    "Give each sentence more consecutive words with the same first letter than the one before.",
    approximate=SENTENCE_ENDS,
)
def alliteration_increment(response: str) -> bool:
    """The number of words that have a neighbour with the same initial grows from sentence to sentence."""
    sizes = [_alliterative(sentence) for sentence in sentences(response)]
    return all(before < after for before, after in pairwise(sizes))


def _alliterative(sentence: str) -> int:
    words = [word.lstrip(MARKS) for word in sentence.lower().split()]
    runs = [len(list(run)) for _, run in groupby(word[0] for word in words if word)]
    return sum(run for run in runs if run > 1)


@verifier(
    "sentence:increment",
    "Give each sentence exactly {small_n} more words than the one before.",
    approximate=SENTENCE_ENDS,
)
def increment(response: str, small_n: int) -> bool:
    """The number of words grows by `small_n` from sentence to sentence."""
    sizes = [len(bare_words(sentence)) for sentence in sentences(response)]
    return all(after - before == small_n for before, after in pairwise(sizes))


@verifier("sentence:keyword", "Use the word {word!r} in sentence {N}.", approximate=SENTENCE_ENDS)
def keyword(response: str, N: int, word: str) -> bool:
    """Sentence `N`, counted from 1, has the word, without regard to case."""
    found = sentences(response)
    return len(found) >= N and re.search(rf"\b{re.escape(word)}\b", found[N - 1], re.IGNORECASE) is not None


@verifier(
    "ratio:sentence_balance",
    "Write as many declarative as interrogative and as exclamatory sentences.",
    approximate=SENTENCE_ENDS,
)
def sentence_balance(response: str) -> bool:
    """As many sentences end with a period as with a question mark and with an exclamation mark; quoted ones do not."""
    return _ending(response, ".") == _ending(response, "?") == _ending(response, "!")


@verifier(
    "ratio:sentence_type", "Write two declarative sentences for each interrogative one.", approximate=SENTENCE_ENDS
)
def sentence_type(response: str) -> bool:
    """Twice as many sentences end with a period as with a question mark; none of both is well too."""
    return _ending(response, ".") == DECLARATIVE_TO_INTERROGATIVE * _ending(response, "?")


def _ending(response: str, mark: str) -> int:
    return sum(sentence.endswith(mark) for sentence in sentences(response))


@verifier(
    "ratio:sentence_words",
    "Write three sentences with the same number of characters and with all different words.",
    approximate=SENTENCE_ENDS,
)
def sentence_words(response: str) -> bool:
    """Exactly three sentences of one length; the evaluator does not compare their words."""
    lengths = [len(sentence) for sentence in sentences(response)]
    return len(lengths) == EQUAL_SENTENCES and len(set(lengths)) == 1
