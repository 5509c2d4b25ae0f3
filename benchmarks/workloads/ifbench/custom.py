"""IFBench's `custom:` kinds: one prompt each, with its own question."""

from __future__ import annotations

import csv
import io
import re
import string
from itertools import pairwise

from benchmarks.workloads.ifbench.text import SENTENCE_ENDS, bare_words, plain, sentences, trimmed
from benchmarks.workloads.ifbench.verifier import verifier

CITY_COLUMNS = ["ID", "Country", "City", "Year", "Count"]
STUDENT_COLUMNS = ["StudentID", "Subject", "Grade", "Semester", "Score"]
PRODUCT_COLUMNS = ["ProductID", "Category", "Brand", "Price", "Stock"]
MULTIPLES_OF_7 = ["14", "21", "28", "35", "42", "49"]
CAPITALS_NORTH_OF_45 = [
    "Reykjavik", "Helsinki", "Oslo", "Tallinn", "Stockholm", "Riga", "Moscow", "Copenhagen", "Vilnius", "Minsk",
    "Dublin", "Berlin", "Amsterdam", "Warsaw", "London", "Brussels", "Prague", "Luxembourg", "Paris", "Vienna",
    "Bratislava", "Budapest", "Vaduz", "Chisinau", "Bern", "Ljubljana", "Zagreb",
]  # fmt: skip
QUESTIONS, OPTIONS = 4, 5
FEWEST_COUNTRIES = 52
FIRST_YEAR, LAST_YEAR = 1769, 1821
DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_QUESTION = re.compile(r"\n*Question \d+[.|):;]?\s*")
_OPTION = re.compile(r"\s*[A-Ea-e][.|)]\s*\w")
_DATE = re.compile(r"(\d{4})-(\d{2})-(\d{2})")
_SPECIAL_FIELD = re.compile(r"\".*[^\w\s].*\"")


@verifier("custom:multiples", "Print only the multiples of 7 from 10 to 50.")
def multiples(response: str) -> bool:
    """The six numbers in order and no other."""
    return re.findall(r"\d+", response) == MULTIPLES_OF_7


@verifier(
    "custom:character_reverse", "Name the national symbol of the US in a sentence that is reversed letter by letter."
)
def character_reverse(response: str) -> bool:
    """The bald eagle, backwards."""
    return "bald eagle" in response.lower()[::-1]


@verifier("custom:word_reverse", "Name the national symbol of the US in a sentence that is reversed word by word.")
def word_reverse(response: str) -> bool:
    """The bald eagle, with its words in reverse order."""
    return "bald eagle" in " ".join(reversed(bare_words(response.lower())))


@verifier(
    "custom:sentence_alphabet",
    "Write 26 sentences that begin with the letters of the alphabet in order.",
    approximate=SENTENCE_ENDS,
)
def sentence_alphabet(response: str) -> bool:
    """26 sentences from a to z."""
    return "".join(sentence[0].lower() for sentence in sentences(response)) == string.ascii_lowercase


@verifier(
    "custom:date_format_list",
    "List only the start dates of Napoleon's battles as YYYY-MM-DD with commas between them.",
)
def date_format_list(response: str) -> bool:
    """Dates of Napoleon's lifetime with commas between them and nothing else; which days they are is not checked."""
    return all(_is_date(part.strip()) for part in response.split(","))


def _is_date(part: str) -> bool:
    found = _DATE.fullmatch(part)
    year, month, day = map(int, found.groups()) if found else (0, 0, 0)
    return FIRST_YEAR <= year <= LAST_YEAR and month <= 12 and day <= (DAYS[month - 1] if month else 99)


@verifier(
    "custom:european_capitals_sort",
    "List only the 27 European capitals north of 45 degrees, with commas between them, from the north to the south.",
)
def european_capitals_sort(response: str) -> bool:
    """All of the evaluator's table, which has Moscow and not Kyiv, in its order; accents do not matter."""
    return [part.strip() for part in plain(response).split(",") if part.strip()] == CAPITALS_NORTH_OF_45


@verifier(
    "custom:reverse_newline",
    "List the countries of Africa in reverse alphabetical order, each on a new line.",
)
def reverse_newline(response: str) -> bool:
    """From the line with Zimbabwe on, at least 52 lines in reverse order; which countries they name is not checked."""
    given = [line for line in map(trimmed, response.split("\n")) if line]
    start = next((number for number, line in enumerate(given) if "Zimbabwe" in line), len(given))
    listed = [plain(line) for line in given[start:]]
    return len(listed) >= FEWEST_COUNTRIES and all(one >= two for one, two in pairwise(listed))


@verifier(
    "custom:mcq_count_length",
    'Write only 4 multiple choice questions with 5 options each (A to E), labelled "Question" and a number, each '
    "longer than the one before.",
)
def mcq_count_length(response: str) -> bool:
    """Nothing before the first question, and questions whose text grows."""
    split = [_question(block) for block in _QUESTION.split(response) if block.strip()]
    sizes, counts = [size for size, _ in split], [count for _, count in split]
    grows = all(one < two for one, two in pairwise(sizes))
    return response.startswith("Question") and counts == [OPTIONS] * QUESTIONS and grows


def _question(block: str) -> tuple[int, int]:
    """The length of the text before the first option, and the number of options."""
    given = block.strip().split("\n")
    options = [number for number, line in enumerate(given) if _OPTION.match(line)]
    text = " ".join(line.strip() for line in given[: options[0]]) if options else block
    return len(text.strip()), len(options)


@verifier("custom:csv_city", "Write 7 comma-delimited CSV rows below the header ID,Country,City,Year,Count.")
def csv_city(response: str) -> bool:
    """The header and 7 rows of five fields, and nothing else."""
    table = _table(response, ",")
    return table[:1] == [CITY_COLUMNS] and len(table) == 8 and all(len(row) == len(CITY_COLUMNS) for row in table)


@verifier(
    "custom:csv_special_character",
    "Write 14 comma-delimited CSV rows below the header ProductID,Category,Brand,Price,Stock, with a field in "
    "double quotes that contains a special character.",
)
def csv_special_character(response: str) -> bool:
    """The header and 14 rows, the first of which have five fields up to one with a special character in quotes."""
    _, *rows = _table(_with_quotes_kept(response), ",") or [[]]
    special = [any(map(_SPECIAL_FIELD.match, row)) for row in rows]
    checked = rows[: special.index(True) + 1] if True in special else []
    fits = bool(checked) and all(len(row) == len(PRODUCT_COLUMNS) for row in checked)
    return _has_header(response, PRODUCT_COLUMNS, r",[ \t]*") and len(rows) == 14 and fits


@verifier(
    "custom:csv_quotes",
    "Write 3 tab-delimited rows below the header StudentID, Subject, Grade, Semester, Score, all in double quotes.",
)
def csv_quotes(response: str) -> bool:
    """Every field is quoted, those of the header too."""
    table = _table(_with_quotes_kept(response), "\t")
    fits = len(table) == 4 and all(len(row) == len(STUDENT_COLUMNS) for row in table)
    quoted = all(field.strip()[:1] == field.strip()[-1:] == '"' for row in table for field in row)
    return _has_header(response, STUDENT_COLUMNS, r"\t *") and fits and quoted


def _has_header(response: str, columns: list[str], delimiter: str) -> bool:
    header = delimiter.join(f'(?:{name}|"{name}")' for name in columns)
    return re.fullmatch(header, response.split("\n")[0].strip()) is not None


def _with_quotes_kept(text: str) -> str:
    """The text with its double quotes escaped inside quotes, so that a CSV reader leaves them in the fields."""
    return text.replace('"', '"""')


def _table(text: str, delimiter: str) -> list[list[str]]:
    """The rows of a CSV text, an empty line is one without fields; none if the text is no CSV."""
    try:
        return list(csv.reader(io.StringIO(text), delimiter=delimiter))
    except csv.Error:
        return []
