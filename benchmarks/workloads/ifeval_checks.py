"""Verifiers for the constraints of IFEval and IFBench that a few lines can check; our own, after their definitions.

A check takes the response and the constraint's arguments and gives back `None` when the constraint is met, or one
sentence that says what is wanted and what was found. `verify` checks a whole row. IFEval: arXiv 2311.07911.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Arguments = Mapping[str, Any]
Check = Callable[[str, Arguments], str | None]
CHECKS: dict[str, Check] = {}


def _check(kind: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS[kind] = check
        return check

    return register


@dataclass(frozen=True)
class Verdict:
    """How a response stands to its constraints.

    Attributes:
        met: How many constraints are met.
        asked: How many there are, at least 1.
        complaints: A sentence for each that is not met.
    """

    met: int
    asked: int
    complaints: tuple[str, ...]

    @property
    def score(self) -> float:
        """The share of constraints that are met."""
        return self.met / self.asked


def checkable(kinds: Sequence[str]) -> bool:
    """Whether there is a check for every kind."""
    return all(kind in CHECKS for kind in kinds)


def verify(response: str, kinds: Sequence[str], arguments: Sequence[Arguments]) -> Verdict:
    """Check a response against a row's constraints.

    Args:
        response: The text.
        kinds: The row's `instruction_id_list`, all of them checkable.
        arguments: The row's `kwargs`, one a constraint; unset ones may be missing or `None`.

    Example:
        >>> verify("No, thanks", ["punctuation:no_comma"], [{}])
        Verdict(met=0, asked=1, complaints=('Use no comma: found 1.',))
    """
    found = [CHECKS[kind](response, given) for kind, given in zip(kinds, arguments, strict=True)]
    complaints = tuple(complaint for complaint in found if complaint is not None)
    return Verdict(len(found) - len(complaints), len(found), complaints)


def words(text: str) -> list[str]:
    """The runs of letters, digits and underscores."""
    return re.findall(r"\w+", text)


def sentences(text: str) -> list[str]:
    """The parts that end in `.`, `!` or `?` before a space or the end."""
    return [part for part in re.split(r"(?<=[.!?])[\"')\]]*\s+", text.strip()) if words(part)]


def _compared(count: int, relation: str | None, limit: float, what: str) -> str | None:
    fits = count < limit if relation == "less than" else count >= limit
    wanted = "fewer than" if relation == "less than" else "at least"
    return None if fits else f"Use {wanted} {int(limit)} {what}: found {count}."


def _occurrences(word: str, text: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


@_check("keywords:existence")
def _existence(text: str, given: Arguments) -> str | None:
    missing = [word for word in given["keywords"] if word.lower() not in text.lower()]
    return f"Include the keywords {', '.join(missing)}." if missing else None


@_check("keywords:frequency")
def _frequency(text: str, given: Arguments) -> str | None:
    count = text.lower().count(given["keyword"].lower())
    return _compared(count, given["relation"], given["frequency"], f"times the word {given['keyword']!r}")


@_check("keywords:forbidden_words")
def _forbidden(text: str, given: Arguments) -> str | None:
    used = [word for word in given["forbidden_words"] if _occurrences(word, text)]
    return f"Do not use the words {', '.join(used)}." if used else None


@_check("keywords:letter_frequency")
def _letter_frequency(text: str, given: Arguments) -> str | None:
    count = text.lower().count(given["letter"].lower())
    return _compared(count, given["let_relation"], given["let_frequency"], f"times the character {given['letter']!r}")


@_check("change_case:english_lowercase")
def _lowercase(text: str, given: Arguments) -> str | None:
    return None if text.islower() else "Write everything in lowercase letters."


@_check("change_case:english_capital")
def _uppercase(text: str, given: Arguments) -> str | None:
    return None if text.isupper() else "Write everything in CAPITAL letters."


@_check("change_case:capital_word_frequency")
def _capital_words(text: str, given: Arguments) -> str | None:
    count = sum(word.isupper() for word in words(text))
    return _compared(count, given["capital_relation"], given["capital_frequency"], "words in all capital letters")


@_check("length_constraints:number_words")
def _number_words(text: str, given: Arguments) -> str | None:
    return _compared(len(words(text)), given["relation"], given["num_words"], "words")


@_check("length_constraints:number_sentences")
def _number_sentences(text: str, given: Arguments) -> str | None:
    return _compared(len(sentences(text)), given["relation"], given["num_sentences"], "sentences")


@_check("length_constraints:number_paragraphs")
def _number_paragraphs(text: str, given: Arguments) -> str | None:
    parts = [part.strip() for part in text.strip().removeprefix("***").removesuffix("***").split("***")]
    count = len(parts) if all(parts) else 0
    wanted = int(given["num_paragraphs"])
    return None if count == wanted else f"Write {wanted} paragraphs with *** between them: found {count}."


@_check("length_constraints:nth_paragraph_first_word")
def _nth_paragraph(text: str, given: Arguments) -> str | None:
    parts = [part for part in re.split(r"\n\n+", text) if part.strip()]
    number, nth, first = int(given["num_paragraphs"]), int(given["nth_paragraph"]), given["first_word"]
    begins = words(parts[nth - 1])[:1] if 0 < nth <= len(parts) else []
    if len(parts) == number and begins and begins[0].lower() == first.lower():
        return None
    return f"Write {number} paragraphs with an empty line between them, and begin number {nth} with {first!r}."


@_check("punctuation:no_comma")
def _no_comma(text: str, given: Arguments) -> str | None:
    return f"Use no comma: found {text.count(',')}." if "," in text else None


@_check("startend:end_checker")
def _end(text: str, given: Arguments) -> str | None:
    phrase = given["end_phrase"].strip()
    ends = text.strip().strip('"').lower().endswith(phrase.lower().strip('"'))
    return None if ends else f"End with exactly this: {phrase}"


@_check("startend:quotation")
def _quotation(text: str, given: Arguments) -> str | None:
    bare = text.strip()
    quoted = len(bare) > 1 and bare.startswith('"') and bare.endswith('"')
    return None if quoted else "Wrap the whole response in double quotation marks."


@_check("detectable_format:title")
def _title(text: str, given: Arguments) -> str | None:
    titles = re.findall(r"<<([^\n]+?)>>", text)
    return (
        None if any(title.strip("<> ") for title in titles) else "Write a title in double angular brackets: <<title>>."
    )


@_check("detectable_format:number_bullet_lists")
def _bullets(text: str, given: Arguments) -> str | None:
    count = len(re.findall(r"^[^\S\n]*(?:\*[^*\n]|-).*$", text, re.MULTILINE))
    wanted = int(given["num_bullets"])
    return None if count == wanted else f"Write exactly {wanted} bullet points that begin with '* ': found {count}."


@_check("detectable_format:number_highlighted_sections")
def _highlights(text: str, given: Arguments) -> str | None:
    found = re.findall(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*", text)
    count = sum(bool(double.strip() or single.strip()) for double, single in found)
    return _compared(count, "at least", given["num_highlights"], "highlighted sections, such as *this one*")


@_check("detectable_format:json_format")
def _json(text: str, given: Arguments) -> str | None:
    try:
        json.loads(re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE).strip())
    except (ValueError, RecursionError):
        return "Write nothing but valid JSON."
    return None


@_check("detectable_format:multiple_sections")
def _sections(text: str, given: Arguments) -> str | None:
    mark = given["section_spliter"].strip()
    count = len(re.findall(rf"\b{re.escape(mark)}\s?\d+", text))
    return _compared(count, "at least", given["num_sections"], f"sections that begin with {mark!r} and a number")


@_check("detectable_format:constrained_response")
def _constrained(text: str, given: Arguments) -> str | None:
    options = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
    return None if any(option in text for option in options) else f"Answer with one of: {' '.join(options)}"


@_check("detectable_content:number_placeholders")
def _placeholders(text: str, given: Arguments) -> str | None:
    count = len(re.findall(r"\[[^\]\n]*\]", text))
    return _compared(count, "at least", given["num_placeholders"], "placeholders in square brackets, such as [name]")


@_check("detectable_content:postscript")
def _postscript(text: str, given: Arguments) -> str | None:
    letters = [re.escape(letter) for letter in given["postscript_marker"].lower() if letter.isalpha()]
    found = re.search(r"(?:^|\s)" + r"\.\s?".join(letters) + r"(?:\.|\b)", text.lower())
    return None if found else f"Add a postscript that begins with {given['postscript_marker']}"


@_check("combination:repeat_prompt")
def _repeat(text: str, given: Arguments) -> str | None:
    request = given["prompt_to_repeat"].strip()
    repeated = text.strip().lower().startswith(request.lower())
    return None if repeated else f"Begin by repeating the request word for word: {request}"


@_check("combination:two_responses")
def _two_responses(text: str, given: Arguments) -> str | None:
    parts = [part.strip() for part in text.strip().removeprefix("******").removesuffix("******").split("******")]
    good = len(parts) == 2 and all(parts) and parts[0] != parts[1]
    return None if good else "Give two different responses with ****** between them and nowhere else."


@_check("count:word_count_range")
def _word_range(text: str, given: Arguments) -> str | None:
    count, low, high = len(words(text)), int(given["min_words"]), int(given["max_words"])
    return None if low <= count <= high else f"Use between {low} and {high} words: found {count}."


@_check("count:unique_word_count")
def _unique_words(text: str, given: Arguments) -> str | None:
    used = {word.strip(string.punctuation) for word in text.lower().split()}
    return _compared(len(used), "at least", given["N"], "different words")


@_check("count:keywords_multiple")
def _keywords_multiple(text: str, given: Arguments) -> str | None:
    wanted = {given[f"keyword{number}"]: times for number, times in enumerate((1, 2, 3, 5, 7), start=1)}
    counts = {word: text.lower().count(word.strip().lower()) for word in wanted}
    wrong = [f"{word!r} {times} times" for word, times in wanted.items() if counts[word] != times]
    return f"Use {', '.join(wrong)}, no more and no less." if wrong else None
