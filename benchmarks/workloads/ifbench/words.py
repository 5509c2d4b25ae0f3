"""IFBench's `words:` kinds: rules for each word and for neighbours. A rule for neighbours needs at least two words."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

from benchmarks.workloads.ifbench import lexicon
from benchmarks.workloads.ifbench.text import letters_and_digits, lines, lower_words, sentences, words
from benchmarks.workloads.ifbench.verifier import verifier

PALINDROMES, PALINDROME_LENGTH, VOWEL_KINDS = 10, 5, 3
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
_CLUSTER = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}", re.IGNORECASE)


def follow_the_alphabet(letters: list[str]) -> bool:
    """Whether each letter is the next of the alphabet after the one before, with a after z.

    Example:
        >>> follow_the_alphabet(["y", "z", "a"]), follow_the_alphabet(["a", "c"])
        (True, False)
    """
    places = [_ALPHABET.find(letter) for letter in letters]
    return min(places, default=-1) >= 0 and all(after == (before + 1) % 26 for before, after in pairwise(places))


@verifier("words:alphabet", "Begin each word with the next letter of the alphabet, with A after Z.")
def alphabet(response: str) -> bool:
    """Any letter may be the first."""
    initials = [word[0] for word in lower_words(response)]
    return len(initials) > 1 and follow_the_alphabet(initials)


@verifier(
    "words:consonants",
    "Use only words with a consonant cluster (two or more consonants together).",
    approximate="by letters, not sounds; y is a consonant",
)
def consonants(response: str) -> bool:
    """Two consonant letters side by side in every word."""
    used = words(response)
    return bool(used) and all(_CLUSTER.search(word) for word in used)


@verifier("words:keywords_specific_position", "Make {keyword!r} word {m} of sentence {n}.")
def keywords_specific_position(response: str, keyword: str, n: int, m: int) -> bool:
    """The `m`-th word of the `n`-th sentence is `keyword`, both counted from 1."""
    found = sentences(response)
    inside = lower_words(found[n - 1]) if 0 < n <= len(found) else []
    return 0 < m <= len(inside) and inside[m - 1] == keyword.casefold()


@verifier("words:words_position", "Make {keyword!r} the second word and the second to last word.")
def words_position(response: str, keyword: str) -> bool:
    """`keyword` is the second word from both ends of at least three."""
    used = lower_words(response)
    return len(used) > 2 and used[1] == used[-2] == keyword.casefold()


@verifier("words:last_first", "Begin each sentence with the last word of the sentence before.")
def last_first(response: str) -> bool:
    """At least two sentences."""
    parts = [lower_words(sentence) for sentence in sentences(response)]
    return len(parts) > 1 and all(before[-1] == after[0] for before, after in pairwise(parts))


@verifier("words:no_consecutive", "Let no two consecutive words begin with the same letter.")
def no_consecutive(response: str) -> bool:
    """Without regard to case."""
    initials = [word[0] for word in lower_words(response)]
    return bool(initials) and all(one != two for one, two in pairwise(initials))


@verifier(
    "words:odd_even_syllables",
    "Alternate between words with odd and even numbers of syllables.",
    approximate="syllables are estimated from groups of vowels and a short list of exceptions",
)
def odd_even_syllables(response: str) -> bool:
    """At least two words; either parity may be the first."""
    parities = [lexicon.syllables(word) % 2 for word in words(response)]
    return len(parities) > 1 and all(one != two for one, two in pairwise(parities))


@verifier("words:palindrome", "Include at least 10 palindromes of one word and at least 5 characters.")
def palindrome(response: str) -> bool:
    """A word that occurs twice counts twice."""
    used = [word for word in lower_words(response) if len(word) >= PALINDROME_LENGTH]
    return sum(word == word[::-1] for word in used) >= PALINDROMES


@verifier("words:paragraph_last_first", "End each paragraph with the word that it begins with; a line is a paragraph.")
def paragraph_last_first(response: str) -> bool:
    """Every line that has a word ends with its first word."""
    parts = [used for used in map(lower_words, lines(response)) if used]
    return bool(parts) and all(used[0] == used[-1] for used in parts)


@verifier(
    "words:prime_lengths",
    "Use only words whose lengths are prime numbers.",
    approximate="apostrophes and hyphens are not counted in a word's length",
)
def prime_lengths(response: str) -> bool:
    """Every word has a prime number of letters and digits."""
    lengths = {len(letters_and_digits(word)) for word in words(response)}
    return bool(lengths) and all(_is_prime(length) for length in lengths)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


@verifier("words:repeats", "Repeat no word more than {small_n} times.")
def repeats(response: str, small_n: int) -> bool:
    """No word occurs more than `small_n` times, without regard to case."""
    counts = Counter(lower_words(response))
    return bool(counts) and max(counts.values()) <= small_n


@verifier(
    "words:start_verb",
    "Begin with a verb.",
    approximate="by a list of about 480 common verbs and their forms; a word that may also be a noun counts",
)
def start_verb(response: str) -> bool:
    """The first word may be a verb."""
    used = words(response)
    return bool(used) and lexicon.may_be_verb(used[0])


@verifier(
    "words:vowel",
    "Write with at most three different vowels.",
    approximate="the vowels are the letters a, e, i, o, u; fewer than three kinds are accepted too",
)
def vowel(response: str) -> bool:
    """One to three different vowels in the whole response."""
    return 1 <= len(set("aeiou").intersection(response.casefold())) <= VOWEL_KINDS
