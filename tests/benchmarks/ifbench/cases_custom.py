"""Cases of the `custom:` kinds."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from benchmarks.workloads.ifbench.custom import CAPITALS_NORTH_OF_45
from tests.benchmarks.ifbench.building import Case, different, filler


def multiples(draw: Any) -> Case:
    mark = draw(st.sampled_from([", ", "\n", " ", ","]))
    right = [14, 21, 28, 35, 42, 49]
    wrong = draw(st.sampled_from([right[1:], [7, *right], right[::-1], [*right, 56], list(range(10, 51))]))
    said = draw(st.sampled_from(["", "Here: "]))
    return Case({}, said + mark.join(map(str, right)), mark.join(map(str, wrong)))


def character_reverse(draw: Any) -> Case:
    sentence = f"The Bald Eagle {' '.join(filler(draw))}."
    return Case({}, sentence[::-1], draw(st.sampled_from([sentence, "elgae", "nosib eht"])))


def word_reverse(draw: Any) -> Case:
    sentence = ["The", "bald", "Eagle", *filler(draw)]
    return Case({}, " ".join(sentence[::-1]) + ".", " ".join(draw(st.sampled_from([sentence, sentence[:1:-1]]))))


def sentence_alphabet(draw: Any) -> Case:
    good = [f"{letter}x {' '.join(filler(draw, 2))}." for letter in string.ascii_uppercase]
    bad = [good[:-1], good[1:], good[::-1], [*good, "A b."], [*good[:-1], f'"{good[-1]}"']]
    return Case({}, " ".join(good), " ".join(draw(st.sampled_from(bad))))


def date_format_list(draw: Any) -> Case:
    days = draw(st.lists(st.integers(1, 28), min_size=1, max_size=5))
    good = [f"1805-02-{day:02d}" for day in [*days, 29]]
    worse = ["2 December 1805", "1805-13-02", "1805-02-30", "1805-04-31", "1999-12-02", "1768-01-01", "Austerlitz"]
    bad = draw(st.sampled_from([", ".join([*good, draw(st.sampled_from(worse))]), " ".join(good), f"{good[0]}."]))
    return Case({}, ", ".join(good), bad)


def european_capitals_sort(draw: Any) -> Case:
    right = CAPITALS_NORTH_OF_45
    wrong = draw(st.sampled_from([right[1:], right[::-1], [*right, "Rome"], [right[1], right[0], *right[2:]]]))
    return Case({}, ", ".join(right).replace("Chisinau", "Chișinău"), ", ".join(wrong))


def reverse_newline(draw: Any) -> Case:
    names = sorted(set(different(draw, 52)), reverse=True)
    right = ["Sure:", "* Zimbabwe", *(f"* {name.capitalize()}" for name in names[:51]), ""]
    wrong = draw(st.sampled_from([right[:1] + right[2:], [right[1], *right[:1:-1]], right[:52], right[::-1]]))
    return Case({}, "\n".join(right), draw(st.sampled_from(["\n".join(wrong), ", ".join(right)])))


def mcq_count_length(draw: Any) -> Case:
    mark = draw(st.sampled_from([")", "."]))

    def question(number: int, options: int = 5) -> str:
        rows = [f"{letter}{mark} {word}" for letter, word in zip("ABCDE", filler(draw, options), strict=False)]
        return "\n".join([f"Question {number}: {'what ' * number}is it?", "", *rows])

    good = [question(number) for number in (1, 2, 3, 4)]
    bad = [good[:3], good[::-1], [*good[:3], question(4, options=4)], ["Here you are:", *good], [good[0], *good[:3]]]
    return Case({}, "\n\n".join(good), "\n\n".join(draw(st.sampled_from(bad))))


def csv_city(draw: Any) -> Case:
    header = "ID,Country,City,Year,Count"
    rows = [f'{number},"{", ".join(filler(draw, 2))}",Town,2020,{number}' for number in range(7)]
    good = "\n".join([header, *rows])
    worse = ["\n".join([header, *rows[1:]]), "\n".join(rows), f"{good}\n8,a,b,2020,1", f"```csv\n{good}\n```"]
    bad = [good.replace(",", ";"), good.replace(",", ", "), "\n".join([header, *rows[1:], "8,a,b,2020"]), *worse]
    return Case({}, good, draw(st.sampled_from(bad)))


def csv_special_character(draw: Any) -> Case:
    header = "ProductID, Category, Brand, Price, Stock"
    rows = [f"{number},{','.join(filler(draw, 2))},9.99,{number}" for number in range(13)]
    special = draw(st.sampled_from(['"a & b"', '"x, y"', '"100%"']))
    good = [header, *rows, f"13,{special},b,1,2"]
    bad = [[header, *rows, "13,a & b,b,1,2"], [header, *rows], [header, *rows, '13,"plain",b,1,2'], good[1:]]
    bad += [[*good, "14,a,b,1,2"], [*good[:1], "0,1", *good[2:]], ["```csv", *good, "```"]]
    return Case({}, "\n".join(good), "\n".join(draw(st.sampled_from(bad))))


def csv_quotes(draw: Any) -> Case:
    columns = ["StudentID", "Subject", "Grade", "Semester", "Score"]
    table = [columns, *(filler(draw, 5) for _ in range(3))]
    good = "\n".join("\t".join(f'"{field}"' for field in row) for row in table)
    first = good.split("\n")[0]
    bad = [
        good.replace('"', ""),
        good.replace("\t", ","),
        good.replace(first, first.replace('"', "")),
        f"{good}\n{good}",
        f"```\n{good}\n```",
    ]
    return Case({}, good, draw(st.sampled_from(bad)))


CASES: dict[str, Callable[[Any], Case]] = {
    f"custom:{build.__name__}": build
    for build in (
        character_reverse, csv_city, csv_quotes, csv_special_character, date_format_list, european_capitals_sort,
        mcq_count_length, multiples, reverse_newline, sentence_alphabet, word_reverse,
    )
}  # fmt: skip
