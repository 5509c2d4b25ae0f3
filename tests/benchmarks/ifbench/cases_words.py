"""Cases of the `count:`, `ratio:` (of words) and `words:` kinds."""

from __future__ import annotations

import string
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from tests.benchmarks.ifbench.building import Case, different, filler

CONJUNCTIONS = ["for", "and", "nor", "but", "or", "yet", "so"]
NAMES = ["Emma", "Liam", "Zoe", "Daniel", "Nora", "Jonathan"]
PALINDROMES = ["level", "radar", "civic", "Kayak", "refer", "ROTOR", "madam", "tenet", "solos", "racecar"]


def _some(draw: Any, given: list[str], least: int = 1) -> list[str]:
    return draw(st.lists(st.sampled_from(given), min_size=least, max_size=len(given), unique=True))


def _joined(*parts: list[str]) -> str:
    return " ".join(word for part in parts for word in part)


def conjunctions(draw: Any) -> Case:
    used, text = _some(draw, CONJUNCTIONS), filler(draw)
    good = draw(st.sampled_from([_joined(used), _joined([f"{word}," for word in used[:1]], used[1:])]))
    return Case({"small_n": float(len(used))}, _joined(text, [good]), _joined(text, used[1:], used[1:], ["andes ,"]))


def numbers(draw: Any) -> Case:
    given = draw(st.lists(st.integers(0, 9999).map(str), min_size=1, max_size=5))
    good = ", ".join([*given, "3.14", "1,000", "2020-2021", "x7y", "two"])
    bad = draw(st.sampled_from([good + " and 5", ", ".join(given)]))
    return Case({"N": float(len(given) + 4)}, good, bad)


def person_names(draw: Any) -> Case:
    used, text = _some(draw, NAMES), filler(draw)
    good = _joined(text, [f"{name}'s," for name in used])
    other = draw(st.sampled_from([used[0].lower(), used[0].upper(), f"{used[0]}x"]))
    return Case({"N": float(len(used))}, good, _joined(text, [other], used[1:], used[1:]) + "!")


def pronouns(draw: Any) -> Case:
    used = draw(st.lists(st.sampled_from(["I", "they've", "Her,", "it's", "yours."]), min_size=1, max_size=6))
    text = [*filler(draw), "who", "this", "mines", "everyone"]
    both = [*used, "she/her"]
    return Case({"N": float(len(used) + 2)}, _joined(both, text), _joined(both[1:], text))


def punctuation(draw: Any) -> Case:
    text = filler(draw)[0]
    good = f"{text}: {text}, {text}; {text}. {text}! {text}? {text}" + draw(st.sampled_from(["?!", "!?", "‽"]))
    without = [good.replace(mark, "") for mark in ".,;:!?"]
    bad = draw(st.sampled_from([*without, "a: b, c; d. e! f?", "a: b, c; d. e?! f?", "a: b, c; d. e?!"]))
    return Case({}, good, bad)


def words_japanese(draw: Any) -> Case:
    every = draw(st.integers(2, 4))
    blocks = [[*filler(draw, every - 1), japanese] for japanese in ("日本語、", "「カタカナ」", "xです。", "7", "--")]
    good, worse = _joined(*blocks), _joined(*blocks[:-1], filler(draw, every))
    return Case({"N": float(every)}, good, draw(st.sampled_from([worse, "x " + good])))


def stop_words(draw: Any) -> Case:
    text = filler(draw, 8)
    arguments = {"percentage": 20.0}
    return Case(arguments, _joined(text, ["The", "of"]), _joined(text, ["the", "of", "isn't"]))


def overlap(draw: Any) -> Case:
    reference, other = draw(st.permutations("abcdefghijkl")), draw(st.permutations("mnopqrstuvwx"))
    shared = draw(st.integers(1, 10))
    # 12 characters have 10 trigrams; a copy of the first n keeps n - 2 of them.
    good = "".join([*reference[: shared + 2], *other[: 10 - shared]])
    arguments = {"reference_text": "".join(reference), "percentage": 10.0 * shared}
    bad = draw(st.sampled_from([other, reference[: shared + 1] + other[: 11 - shared], reference[:2]]))
    return Case(arguments, good, "".join(bad))


def alphabet(draw: Any) -> Case:
    start = draw(st.integers(0, 25))
    letters = [string.ascii_lowercase[(start + number) % 26] for number in range(draw(st.integers(1, 30)))]
    good = [draw(st.sampled_from([letter, letter.upper(), f"-{letter}"])) + "xx" for letter in letters]
    return Case({}, _joined(good) + " . .", _joined([*good, good[0]] if len(good) % 26 else [*good, "1"]))


def consonants(draw: Any) -> Case:
    text = filler(draw)
    return Case(
        {}, _joined(text, ["Strong,", "only."]), _joined(text, draw(st.sampled_from([["banana"], ["a"], ["7"], ["-"]])))
    )


def keywords_specific_position(draw: Any) -> Case:
    size, place = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    before = [_joined(filler(draw)) + "." for _ in range(size - 1)]
    last = [*filler(draw, place - 1), "Zest", *filler(draw)]
    good = _joined(before, last) + "!"
    worse = [_joined(before, ["x", *last]), _joined(before, [f"({last[0]}", *last[1:]]), _joined(before, ["yy."], last)]
    bad = draw(st.sampled_from([*worse, _joined(before) + "."]))
    return Case({"keyword": "zest", "n": size, "m": place}, good, bad)


def words_position(draw: Any) -> Case:
    text = filler(draw, 3)
    good = _joined(["So", "zest"], text, draw(st.sampled_from([["Zest", "end"], ["zest!"]])))
    worse = [_joined(text, ["zest"]), _joined(["zest"], text, ["zest"]), _joined(["a", "zest"], text)]
    bad = draw(st.sampled_from([*worse, _joined(["So", "zest"], text, ["zest", "end."])]))
    return Case({"keyword": "zest"}, good, bad)


def last_first(draw: Any) -> Case:
    links = different(draw, draw(st.integers(3, 5)))
    good = [f'"{one.capitalize()} so {two}."' for one, two in pairwise(links)]
    bad = [good[1], good[0], f'"{links[0]} so."']
    return Case({}, draw(st.sampled_from([_joined(good), good[0], " so ".join(links)])), _joined(bad))


def no_consecutive(draw: Any) -> Case:
    initials = draw(st.lists(st.sampled_from("abcd"), min_size=2, max_size=8))
    good = [letter + "xy"[number % 2] for number, letter in enumerate(initials)]
    good = [word for number, word in enumerate(good) if number == 0 or word[0] != good[number - 1][0]]
    return Case({}, _joined(good) + ".", _joined([*good, "-", good[-1].upper()]))


def odd_even_syllables(draw: Any) -> Case:
    odd, even = st.sampled_from(["cat", "banana", "strength"]), st.sampled_from(["table", "window", "wanted"])
    good = [draw(kind) for _ in range(draw(st.integers(1, 4))) for kind in (odd, even)]
    good = good[: draw(st.integers(1, len(good)))]
    return Case({}, _joined(good), _joined([*good, good[-1]]))


def palindrome(draw: Any) -> Case:
    text, used = filler(draw), draw(st.permutations(PALINDROMES))
    text = [f"{word}xz" for word in text]
    return Case({}, _joined(text, used) + ".", _joined(text, used[1:], ["noon", "levels"]))


def paragraph_last_first(draw: Any) -> Case:
    good = [f"{word.capitalize()} {_joined(filler(draw))}, {word}." for word in filler(draw)]
    return Case({}, "\n".join([*good, "", "..."]), "\n".join([*good, "One is not two."]))


def prime_lengths(draw: Any) -> Case:
    lengths = draw(st.lists(st.sampled_from([2, 3, 5, 7, 11]), min_size=1, max_size=6))
    good = ["k" * length for length in lengths]
    return Case({}, _joined(good) + ".", _joined([*good, draw(st.sampled_from(["a", "four", "sixsix", "ninenines"]))]))


def repeats(draw: Any) -> Case:
    limit, text = draw(st.integers(1, 4)), different(draw, 3)
    good = [word for word in text for _ in range(limit)]
    return Case({"small_n": float(limit)}, _joined(good), _joined([*good, text[0].upper()]))


def start_verb(draw: Any) -> Case:
    text = _joined(filler(draw))
    good = draw(st.sampled_from(["Imagine", "Whirring", "went", "Is", "Let's", "Don't", "Studies", "Nestled"]))
    worse = ["The", "Bird", "However,", "Sure!", "7", "Can", "**Imagine**", '"Imagine"', "Nothing", "Imagine London"]
    return Case({}, f"{good} {text}", f"{draw(st.sampled_from(worse))} imagine {text}")


def vowel(draw: Any) -> Case:
    used = draw(st.lists(st.sampled_from("aeiou"), max_size=3, unique=True))
    text = _joined(filler(draw))
    bad = draw(st.sampled_from(["Aei o", "uoie", "aEiOu", "a\nb"]))
    return Case({}, f"{text} {''.join(used)}", f"{text} {bad}")


CASES: dict[str, Callable[[Any], Case]] = {
    **{f"count:{build.__name__}": build for build in (conjunctions, numbers, person_names, pronouns, punctuation)},
    "count:words_japanese": words_japanese,
    "ratio:stop_words": stop_words,
    "ratio:overlap": overlap,
    **{
        f"words:{build.__name__}": build
        for build in (
            alphabet, consonants, keywords_specific_position, last_first, no_consecutive, odd_even_syllables,
            palindrome, paragraph_last_first, prime_lengths, repeats, start_verb, vowel, words_position,
        )
    },
}  # fmt: skip
