"""IFBench's `count:` and `ratio:stop_words`, `ratio:overlap` kinds: how many of something the response holds."""

from __future__ import annotations

import re
from collections.abc import Callable

from benchmarks.workloads.ifbench import lexicon
from benchmarks.workloads.ifbench.text import lower_words, words
from benchmarks.workloads.ifbench.verifier import verifier
from benchmarks.workloads.ifeval_checks import CHECKS

OVERLAP_TOLERANCE = 2.0
STANDARD_MARKS = ".,;:!?"
_NUMBER = re.compile(r"\b\d+(?:[.,]\d+)*\b")
_JAPANESE = re.compile(r"[\u3041-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uff66-\uff9d々〆〇ー]+")


@verifier(
    "count:conjunctions",
    "Use at least {small_n} different coordinating conjunctions.",
    approximate='"for", "so" and "yet" count in every role',
)
def conjunctions(response: str, small_n: int) -> bool:
    """At least `small_n` different ones of for, and, nor, but, or, yet, so."""
    return len(lexicon.COORDINATING_CONJUNCTIONS.intersection(lower_words(response))) >= small_n


@verifier(
    "count:numbers",
    "Include exactly {N} numbers.",
    approximate='numbers in digits only: "two" and "3rd" do not count, "3.14" is one',
)
def numbers(response: str, N: int) -> bool:
    """Exactly `N` numbers written in digits."""
    return len(_NUMBER.findall(response)) == N


@verifier("count:person_names", "Mention at least {N} different person names of the list in the prompt.")
def person_names(response: str, N: int) -> bool:
    """At least `N` different names of IFBench's list, with a capital first letter."""
    found = {word.capitalize() if word.isupper() else word for word in re.findall(r"[^\W\d_]+", response)}
    return len(lexicon.PERSON_NAMES & found) >= N


@verifier(
    "count:pronouns",
    "Include at least {N} pronouns.",
    approximate='by a list of words; those with other roles too ("that", "her") count in every role',
)
def pronouns(response: str, N: int) -> bool:
    """At least `N` pronouns; "they've" holds one."""
    return sum(word.split("'")[0] in lexicon.PRONOUNS for word in lower_words(response)) >= N


@verifier(
    "count:punctuation",
    "Use every standard punctuation mark (. , ; : ! ?) and the interrobang (?!) at least once.",
    approximate="the standard marks are . , ; : ! ? and the interrobang (?!, !? or its own sign)",
)
def punctuation(response: str) -> bool:
    """Each of the standard marks and an interrobang."""
    return all(mark in response for mark in STANDARD_MARKS) and any(bang in response for bang in ("?!", "!?", "‽"))


@verifier(
    "count:words_japanese",
    "Write every {N}th word in Japanese.",
    approximate="words are what stands between spaces; a word is Japanese if its letters are kana or Han characters",
)
def words_japanese(response: str, N: int) -> bool:
    """Word `N`, 2`N` and so on are Japanese, and there is at least one of them."""
    chosen = [part for part in response.split() if words(part)][N - 1 :: N]
    return bool(chosen) and all(
        _JAPANESE.fullmatch("".join(character for character in part if character.isalnum())) for part in chosen
    )


@verifier(
    "ratio:stop_words",
    "Use so few stop words that they are at most {percentage}% of the words.",
    approximate="by our own list of about 160 stop words",
)
def stop_words(response: str, percentage: float) -> bool:
    """Stop words are at most `percentage` percent of the words."""
    used = lower_words(response)
    return bool(used) and 100 * sum(word in lexicon.STOP_WORDS for word in used) <= percentage * len(used)


@verifier(
    "ratio:overlap",
    "Keep a trigram overlap of {percentage}% (±2%) with the reference text.",
    approximate="the share of the response's different word trigrams that occur in the reference",
)
def overlap(response: str, reference_text: str, percentage: float) -> bool:
    """The share of the response's trigrams of words that the reference has, within 2 points of `percentage`."""
    own, reference = _trigrams(response), _trigrams(reference_text)
    return bool(own) and abs(100 * len(own & reference) / len(own) - percentage) <= OVERLAP_TOLERANCE


def _trigrams(text: str) -> set[tuple[str, ...]]:
    given = lower_words(text)
    return set(zip(given, given[1:], given[2:], strict=False))


def _checked(kind: str) -> Callable[..., bool]:
    return lambda response, **given: CHECKS[kind](response, given) is None


verifier("count:unique_word_count", "Use at least {N} different words.")(_checked("count:unique_word_count"))
verifier("count:word_count_range", "Use between {min_words} and {max_words} words.")(_checked("count:word_count_range"))
verifier(
    "count:keywords_multiple",
    "Use {keyword1!r} once, {keyword2!r} twice, {keyword3!r} three, {keyword4!r} five and {keyword5!r} seven times.",
)(_checked("count:keywords_multiple"))
