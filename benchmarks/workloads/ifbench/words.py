"""IFBench's `words:` kinds: rules for each word and for neighbours. A lone word meets every rule for neighbours."""

from __future__ import annotations

import re
import string
from collections import Counter
from itertools import pairwise

from benchmarks.workloads.ifbench import lexicon
from benchmarks.workloads.ifbench.text import MARKS, SENTENCE_ENDS, bare_words, sentences, tokens, trimmed
from benchmarks.workloads.ifbench.verifier import verifier

PALINDROMES, PALINDROME_LENGTH, VOWEL_KINDS, LONGEST_PRIME = 10, 5, 3, 97
_ALPHABET = string.ascii_lowercase
_CLUSTER = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}")


@verifier("words:alphabet", "Begin each word with the next letter of the alphabet, with A after Z.")
def alphabet(response: str) -> bool:
    """Any letter may be the first."""
    places = [_ALPHABET.find(word[0].lower()) for word in bare_words(response)]
    return min(places, default=-1) >= 0 and all(after == (before + 1) % 26 for before, after in pairwise(places))


@verifier("words:consonants", "Use only words with a consonant cluster (two or more consonants together).")
def consonants(response: str) -> bool:
    """Two consonant letters, y is one, side by side in all that stands between spaces."""
    return all(_CLUSTER.search(word) for word in response.lower().split())


@verifier(
    "words:keywords_specific_position",
    "Make {keyword!r} word {m} of sentence {n}; punctuation marks count as words.",
    approximate=SENTENCE_ENDS,
)
def keywords_specific_position(response: str, keyword: str, n: int, m: int) -> bool:
    """The `m`-th token of the `n`-th sentence is `keyword`, both counted from 1."""
    found = sentences(response)
    inside = tokens(found[n - 1]) if n <= len(found) else []
    return m <= len(inside) and inside[m - 1].lower() == keyword.strip().lower()


@verifier(
    "words:words_position",
    "Make {keyword!r} the second word and the second to last word; punctuation marks count as words.",
    approximate=SENTENCE_ENDS,
)
def words_position(response: str, keyword: str) -> bool:
    """`keyword` is the second token from both ends."""
    used = [token.lower() for token in tokens(response)]
    return len(used) > 1 and used[1] == used[-2] == keyword.strip().lower()


@verifier(
    "words:last_first",
    "Begin each sentence with the last word of the sentence before.",
    approximate=SENTENCE_ENDS,
)
def last_first(response: str) -> bool:
    """Marks before the first word and after the last one do not count."""
    parts = sentences(response)
    links = ((one.rstrip(MARKS + " ").split(), two.lstrip(MARKS + " ").split()) for one, two in pairwise(parts))
    return all(one and two and one[-1].lower() == two[0].lower() for one, two in links)


@verifier("words:no_consecutive", "Let no two consecutive words begin with the same letter.")
def no_consecutive(response: str) -> bool:
    """Without regard to case."""
    return all(one[0] != two[0] for one, two in pairwise(bare_words(response.lower())))


@verifier(
    "words:odd_even_syllables",
    "Alternate between words with odd and even numbers of syllables.",
    approximate="how many syllables a word has, unless syllapy is installed",
)
def odd_even_syllables(response: str) -> bool:
    """Either parity may be the first."""
    parities = [lexicon.syllables(word) % 2 for word in bare_words(response.lower())]
    return all(one != two for one, two in pairwise(parities))


@verifier("words:palindrome", "Include at least 10 palindromes of one word and at least 5 characters.")
def palindrome(response: str) -> bool:
    """A word that occurs twice counts twice."""
    used = [word for word in bare_words(response.lower()) if len(word) >= PALINDROME_LENGTH]
    return sum(word == word[::-1] for word in used) >= PALINDROMES


@verifier("words:paragraph_last_first", "End each paragraph with the word that it begins with; a line is a paragraph.")
def paragraph_last_first(response: str) -> bool:
    """Every line that has a word ends with its first word."""
    parts = [trimmed(line.strip().lower()).split() for line in response.split("\n")]
    return all(used[0] == used[-1] for used in parts if used)


@verifier("words:prime_lengths", "Use only words whose lengths are prime numbers.")
def prime_lengths(response: str) -> bool:
    """Every word has a prime number of characters below 100 without its punctuation marks."""
    return all(_is_prime(len(word)) for word in bare_words(response))


def _is_prime(number: int) -> bool:
    return 1 < number <= LONGEST_PRIME and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


@verifier("words:repeats", "Repeat no word more than {small_n} times.")
def repeats(response: str, small_n: int) -> bool:
    """No word occurs more than `small_n` times, without regard to case."""
    return max(Counter(bare_words(response.lower())).values(), default=0) <= small_n


@verifier(
    "words:start_verb",
    "Begin with a verb.",
    approximate="which first words are verbs: by a list and by endings, where the evaluator has a tagger",
)
def start_verb(response: str) -> bool:
    """The first token may be a verb, and is no part of a name: a capital letter does not begin the second token too."""
    first, second, *_ = [*tokens(response), "", ""]
    return lexicon.may_be_verb(first) and not (first.istitle() and second.istitle() and len(second) > 1)


@verifier("words:vowel", "Write one paragraph with at most three different vowels.")
def vowel(response: str) -> bool:
    """At most three of the letters a, e, i, o, u, and no line break."""
    text = response.strip().lower()
    return "\n" not in text and len(set("aeiou").intersection(text)) <= VOWEL_KINDS
