"""IFBench's `custom:` kinds: one prompt each, with its own question."""

from __future__ import annotations

import csv
import re
from datetime import date
from itertools import pairwise

from benchmarks.workloads.ifbench import places
from benchmarks.workloads.ifbench.text import lines, lower_words, sentences, without_fence
from benchmarks.workloads.ifbench.verifier import verifier
from benchmarks.workloads.ifbench.words import follow_the_alphabet

CITY_COLUMNS = ["ID", "Country", "City", "Year", "Count"]
STUDENT_COLUMNS = ["StudentID", "Subject", "Grade", "Semester", "Score"]
PRODUCT_COLUMNS = ["ProductID", "Category", "Brand", "Price", "Stock"]
MULTIPLES_OF_7 = [14, 21, 28, 35, 42, 49]
QUESTIONS, OPTIONS = 4, 5
FEWEST_COUNTRIES = 50
FIRST_BATTLE, LAST_BATTLE = date(1793, 1, 1), date(1815, 12, 31)
_QUESTION = re.compile(r"^[ \t#*]*Question\b\s*\d*\s*[:.)-]*", re.MULTILINE)
_OPTION = re.compile(r"\s*(?:[-*•]\s|\(?[A-Ea-e1-5][.):]|\(?[A-Ea-e1-5]\))")
_LIST_MARK = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+")


@verifier("custom:multiples", "Print only the multiples of 7 from 10 to 50.")
def multiples(response: str) -> bool:
    """The six numbers in order, and no letters."""
    found = [int(number) for number in re.findall(r"[0-9]{1,9}", response)]
    return found == MULTIPLES_OF_7 and not any(character.isalpha() for character in response)


@verifier(
    "custom:character_reverse",
    "Name the national symbol of the US in a sentence that is reversed letter by letter.",
    approximate='"eagle" occurs reversed and not as it is; the rest of the sentence is not checked',
)
def character_reverse(response: str) -> bool:
    """The eagle, backwards."""
    lower = response.casefold()
    return "eagle" in lower[::-1] and "eagle" not in lower


@verifier(
    "custom:word_reverse",
    "Name the national symbol of the US in a sentence that is reversed word by word.",
    approximate='"eagle bald" occurs; the rest of the sentence is not checked',
)
def word_reverse(response: str) -> bool:
    """The bald eagle, with its words in reverse order."""
    used = lower_words(response)
    return ("eagle", "bald") in pairwise(used) and ("bald", "eagle") not in pairwise(used)


@verifier("custom:sentence_alphabet", "Write 26 sentences that begin with the letters of the alphabet in order.")
def sentence_alphabet(response: str) -> bool:
    """26 sentences from a to z."""
    initials = [lower_words(sentence)[0][0] for sentence in sentences(response)]
    return len(initials) == 26 and initials[0] == "a" and follow_the_alphabet(initials)


@verifier(
    "custom:date_format_list",
    "List only the start dates of Napoleon's battles as YYYY-MM-DD with commas between them.",
    approximate="two or more real dates from 1793 to 1815; which battles they are is not checked",
)
def date_format_list(response: str) -> bool:
    """Dates with commas between them and nothing else."""
    parts = [part.strip() for part in response.split(",")]
    return len(parts) > 1 and all(map(_is_battle_date, parts))


def _is_battle_date(part: str) -> bool:
    if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", part):
        return False
    try:
        return FIRST_BATTLE <= date.fromisoformat(part) <= LAST_BATTLE
    except ValueError:
        return False


@verifier(
    "custom:european_capitals_sort",
    "List only the 28 European capitals north of 45 degrees, with commas between them, from the north to the south.",
    approximate="by our own table of the cities and their latitudes; Moscow is one of them",
)
def european_capitals_sort(response: str) -> bool:
    """All of the table and in its order; accents and case do not matter."""
    given = [places.plain(part.strip().rstrip(".")) for part in response.split(",")]
    named = [places.CAPITAL_NAMES.get(name, name) for name in given]
    return named == [name for name, _ in places.CAPITALS_NORTH_OF_45]


@verifier(
    "custom:reverse_newline",
    "List the countries of Africa in reverse alphabetical order, each on a new line.",
    approximate="at least 50 of 54 countries by their English names and common variants",
)
def reverse_newline(response: str) -> bool:
    """Only African countries, none twice, each line before the next in reverse order."""
    given = [places.plain(_LIST_MARK.sub("", line).rstrip(".,;")) for line in lines(response)]
    countries = [places.COUNTRY_NAMES.get(name, name) for name in given]
    known = set(countries) <= places.AFRICAN_COUNTRIES and len(set(countries)) == len(countries)
    return known and len(countries) >= FEWEST_COUNTRIES and all(one > two for one, two in pairwise(given))


@verifier(
    "custom:mcq_count_length",
    'Write only 4 multiple choice questions with 5 options each, labelled "Question", each longer than the one before.',
    approximate="options are lines that begin with a letter, a number or a bullet",
)
def mcq_count_length(response: str) -> bool:
    """Nothing before the first question, and questions whose text grows."""
    before, *blocks = _QUESTION.split(response)
    split = [_question(block) for block in blocks]
    sizes = [len(question) for question, _ in split]
    counts = [count for _, count in split]
    grows = all(0 < one < two for one, two in pairwise(sizes))
    return not before.strip() and counts == [OPTIONS] * QUESTIONS and grows


def _question(block: str) -> tuple[str, int]:
    """The question's text and the number of its options."""
    given = lines(block)
    options = [line for line in given if _OPTION.match(line)]
    return " ".join(line.strip(" *") for line in given if not _OPTION.match(line)), len(options)


@verifier("custom:csv_city", "Write 7 comma-delimited CSV rows below the header ID, Country, City, Year, Count.")
def csv_city(response: str) -> bool:
    """The header and 7 rows of five fields."""
    return _holds(_table(response, ","), CITY_COLUMNS, 7)


@verifier(
    "custom:csv_special_character",
    "Write 14 comma-delimited CSV rows below the header ProductID, Category, Brand, Price, Stock, with a field in "
    "double quotes that contains a special character.",
    approximate="a special character is neither a letter, a digit nor a space; a further column is accepted",
)
def csv_special_character(response: str) -> bool:
    """The header and 14 rows, and a quoted field with a special character below the header."""
    rows = without_fence(response).split("\n", 1)[-1]
    special = any(
        re.search(r"[^\w\s]", field) for field in re.findall(r"(?:^|,)[ \t]*\"([^\"\n]+)\"", rows, re.MULTILINE)
    )
    return special and _holds(_table(response, ","), PRODUCT_COLUMNS, 14, further=1)


@verifier(
    "custom:csv_quotes",
    "Write 3 tab-delimited rows below the header StudentID, Subject, Grade, Semester, Score, all in double quotes.",
)
def csv_quotes(response: str) -> bool:
    """Every field is quoted, those of the header too."""
    fields = [field for line in lines(without_fence(response)) for field in line.strip(" ").split("\t")]
    quoted = all(len(field) > 1 and field[0] == field[-1] == '"' for field in fields)
    return quoted and _holds(_table(response, "\t"), STUDENT_COLUMNS, 3)


def _table(response: str, delimiter: str) -> list[list[str]]:
    """The rows of a CSV text; none if the text is no CSV."""
    given = [line.strip(" ") for line in without_fence(response).splitlines() if line.strip()]
    try:
        return [
            [field.strip() for field in row] for row in csv.reader(given, delimiter=delimiter, skipinitialspace=True)
        ]
    except csv.Error:
        return []


def _holds(table: list[list[str]], columns: list[str], size: int, further: int = 0) -> bool:
    """Whether the table has these columns (and `further` ones at most) and `size` rows without an empty field."""
    if len(table) != size + 1 or table[0][: len(columns)] != columns:
        return False
    width = len(table[0])
    fits = width <= len(columns) + further and all(len(row) == width for row in table)
    return fits and all(field for row in table for field in row)
