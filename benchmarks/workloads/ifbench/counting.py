"""IFBench's `count:` and `ratio:stop_words`, `ratio:overlap` kinds: how many of something the response holds."""

from __future__ import annotations

import re
from collections.abc import Callable

from benchmarks.workloads.ifbench import lexicon
from benchmarks.workloads.ifbench.text import bare, tokens, trimmed
from benchmarks.workloads.ifbench.verifier import verifier
from benchmarks.workloads.ifeval_checks import CHECKS

OVERLAP_TOLERANCE = 2
_JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")


@verifier("count:conjunctions", "Use at least {small_n} different coordinating conjunctions.")
def conjunctions(response: str, small_n: int) -> bool:
    """At least `small_n` of for, and, nor, but, or, yet, so; to the evaluator "and", "And" and "and," are three."""
    return len({word for word in response.split() if trimmed(word).lower() in lexicon.CONJUNCTIONS}) >= small_n


@verifier("count:numbers", "Include exactly {N} numbers, in digits.")
def numbers(response: str, N: int) -> bool:
    """Exactly `N` runs of digits once the punctuation is gone: 3.14 and 1,000 are one number each, 2020-2021 too."""
    return len(re.findall(r"\d+", bare(response))) == N


@verifier("count:person_names", "Mention at least {N} different person names of the list in the prompt.")
def person_names(response: str, N: int) -> bool:
    """At least `N` different names of IFBench's list, written as there."""
    return len(lexicon.PERSON_NAMES.intersection(re.findall(r"\w+", response))) >= N


@verifier("count:pronouns", "Include at least {N} personal or possessive pronouns.")
def pronouns(response: str, N: int) -> bool:
    """At least `N` personal, possessive or reflexive pronouns; "they've" holds one, "she/her" two."""
    return sum(token in lexicon.PRONOUNS for token in tokens(response.lower().replace("/", " "))) >= N


@verifier(
    "count:punctuation", "Use every standard punctuation mark (. , ; : ! ?) and the interrobang (?!) at least once."
)
def punctuation(response: str) -> bool:
    """An interrobang (?!, !? or its own sign), and each of the six marks besides one of its pairs."""
    if not any(bang in response for bang in ("?!", "!?", "‽")):
        return False
    pair = "?!" if "?!" in response else "!?"
    return set(".,;:!?") <= set(response.replace(pair, "", 1))


@verifier("count:words_japanese", "Write every {N}th word in Japanese.")
def words_japanese(response: str, N: int) -> bool:
    """Word `N`, 2`N` and so on have a kana or Han character, or are numbers or marks; words stand between spaces."""
    chosen = (trimmed(word) for word in response.split()[N - 1 :: N])
    return all(_JAPANESE.search(word) for word in chosen if word and not word.isdigit())


@verifier("ratio:stop_words", "Use so few stop words that they are at most {percentage}% of the words.")
def stop_words(response: str, percentage: float) -> bool:
    """Stop words of NLTK's English list are at most `percentage` percent of the words."""
    used = re.findall(r"\w+", response.lower())
    return bool(used) and sum(word in lexicon.STOP_WORDS for word in used) / len(used) * 100 <= percentage


@verifier(
    "ratio:overlap",
    "Keep a trigram overlap of {percentage}% (±2%) with the reference text; the trigrams are of characters.",
)
def overlap(response: str, reference_text: str, percentage: float) -> bool:
    """The share of the response's different runs of 3 characters that the reference has, within 2 points."""
    own, reference = _trigrams(response), _trigrams(reference_text)
    share = len(own & reference) / len(own) * 100 if own else float("nan")
    return percentage - OVERLAP_TOLERANCE <= share <= percentage + OVERLAP_TOLERANCE


def _trigrams(text: str) -> set[str]:
    return {text[start : start + 3] for start in range(len(text) - 2)}


def _checked(kind: str) -> Callable[..., bool]:
    return lambda response, **given: CHECKS[kind](response, given) is None


verifier("count:unique_word_count", "Use at least {N} different words.")(_checked("count:unique_word_count"))
verifier("count:word_count_range", "Use between {min_words} and {max_words} words.")(_checked("count:word_count_range"))
verifier(
    "count:keywords_multiple",
    "Use {keyword1!r} once, {keyword2!r} twice, {keyword3!r} three, {keyword4!r} five and {keyword5!r} seven times.",
)(_checked("count:keywords_multiple"))
