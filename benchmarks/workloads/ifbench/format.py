"""IFBench's `format:` kinds: lines, lists, quotes, brackets, emojis and templates."""

from __future__ import annotations

import re
import string
from itertools import pairwise

from benchmarks.workloads.ifbench.text import (
    MARKS,
    SENTENCE_ENDS,
    bare,
    is_emoji,
    sentences,
    tokens,
    trimmed,
)
from benchmarks.workloads.ifbench.verifier import verifier

TEMPLATE = ("My Answer:", "My Conclusion:", "Future Outlook:")
BRACKET_DEPTH, QUOTE_DEPTH = 5, 3
_BRACKETS = {")": "(", "]": "[", "}": "{"}
_LETTERED = re.compile(r"\W*a\W*b\W*c", re.IGNORECASE)


@verifier("format:emoji", "End every sentence with an emoji.", approximate=SENTENCE_ENDS)
def emoji(response: str) -> bool:
    """Each sentence has an emoji among its last two characters, punctuation aside, or as the first after it."""
    parts = [bare(sentence).strip() for sentence in sentences(response)]
    return all(
        any(map(is_emoji, part[-2:])) or (part and is_emoji(following[:1]))
        for part, following in pairwise([*parts, ""])
    )


@verifier("format:line_indent", "Indent each new line by more spaces than the line before, like stairs.")
def line_indent(response: str) -> bool:
    """Single blank lines do not count; of several in a row every second one does, as the evaluator has it."""
    widths = [len(line) - len(line.lstrip(" ")) for line in _without_blanks(response.split("\n"))]
    return all(before < after for before, after in pairwise(widths))


def _without_blanks(lines: list[str]) -> list[str]:
    """The lines without blank ones; like the evaluator, it does not look at the line after one that it takes out."""
    left = list(lines)
    place = 0
    while place < len(left):
        if not left[place].strip():
            left.remove(left[place])
        place += 1
    return left


@verifier("format:list", "Answer with a list of items, and use {sep} in place of bullet points.")
def item_list(response: str, sep: str) -> bool:
    """At least two times the mark `sep`, wherever it stands."""
    return response.count(sep) >= 2


@verifier("format:newline", "Write each word on a new line.")
def newline(response: str) -> bool:
    """As many lines as words; lines that are empty without their punctuation do not count."""
    text = bare(response).strip()
    return sum(line != "" for line in text.split("\n")) == len(text.split())


@verifier(
    "format:no_bullets_bullets",
    "Write at least two sentences without an empty line between them, and after them, after one empty line at most, at "
    "least two bullet points denoted by * without an empty line between them, and nothing else.",
    approximate=SENTENCE_ENDS,
)
def no_bullets_bullets(response: str) -> bool:
    """Lines with two sentences or more, at most one empty line, then two or more lines that begin with `*`."""
    given = [line.strip() for line in response.split("\n")]
    bulleted = [line.startswith("*") for line in given]
    first = bulleted.index(True) if True in bulleted else len(given)
    before = given[: first - 1] if first and not given[first - 1] else given[:first]
    written = sum(len(sentences(line)) for line in before)
    return all(before) and written >= 2 and all(bulleted[first:]) and len(given) - first >= 2


@verifier("format:no_whitespace", "Use no whitespace.")
def no_whitespace(response: str) -> bool:
    """No space, tab or line break, not even at the ends."""
    return not any(character.isspace() for character in response)


@verifier("format:options", "Answer with one of these options and nothing else: {options}.")
def options(response: str, options: str) -> bool:
    """One of the options without regard to case and marks around it; if they are a, b, c, exactly one of them."""
    mark = next((mark for mark in ("/", "or") if mark in options), ",")
    given = [option.strip() for option in options.split(mark)]
    if _LETTERED.match(options):
        return response in given
    return trimmed(response).lower() in {trimmed(option).lower() for option in given}


@verifier(
    "format:output_template",
    "Use exactly this template: My Answer: [answer] My Conclusion: [conclusion] Future Outlook: [outlook]",
)
def output_template(response: str) -> bool:
    """The three labels, wherever they stand."""
    return all(label in response for label in TEMPLATE)


@verifier("format:parentheses", "Nest brackets at least 5 levels deep.")
def parentheses(response: str) -> bool:
    """Round, square and curly brackets; of five or more open ones the last is closed by its own kind."""
    still_open: list[str] = []
    for character in response:
        if character in "([{":
            still_open.append(character)
        elif character in _BRACKETS:
            if not still_open or still_open[-1] != _BRACKETS[character]:
                still_open.clear()
            elif len(still_open) >= BRACKET_DEPTH:
                return True
            else:
                still_open.pop()
    return False


@verifier("format:quotes", "Nest quotes at least 3 levels deep, alternating between double and single quotes.")
def quotes(response: str) -> bool:
    """Straight quotes and apostrophes alike: each closes the last open one if that is its like, else it opens one."""
    still_open: list[str] = []
    deepest = 0
    for character in response:
        if character not in "\"'":
            continue
        if still_open and still_open[-1] == character:
            still_open.pop()
            if deepest - len(still_open) >= QUOTE_DEPTH:
                return True
        else:
            still_open.append(character)
            deepest = max(deepest, len(still_open))
    return False


@verifier("format:quote_unquote", "Follow every quoted phrase with an explanation that is not quoted.")
def quote_unquote(response: str) -> bool:
    """No two straight double quotes side by side, spaces aside, and none at the end, other marks and digits aside."""
    text = "".join(response.replace("'\"'", "").split())
    return '""' not in text and not text.strip(string.digits + MARKS.replace('"', "")).endswith('"')


@verifier(
    "format:sub-bullets",
    "Use bullet points denoted by * and at least one sub-bullet point denoted by - for each of them.",
)
def sub_bullets(response: str) -> bool:
    """A hyphen after every asterisk and before the next one; a text without asterisks is well too."""
    return all("-" in part for part in response.split("*")[1:])


@verifier("format:thesis", "Begin each section with a thesis statement in HTML italics (<i> or <em>).")
def thesis(response: str) -> bool:
    """Text in the first italics and text after them; of <em> and </em> the evaluator asks for no more than the tags."""
    _, begun, rest = response.partition("<i>" if "<i>" in response else "<em>")
    inside, ended, after = rest.partition("</i>" if "</i>" in rest else "</em>")
    return bool(begun and ended and (begun == "<em>" or inside.strip()) and (ended == "</em>" or after.strip()))


@verifier("format:title_case", "Write everything in title case: a capital first letter for every word.")
def title_case(response: str) -> bool:
    """No token begins with a small letter, unless the rest of it has both small and capital letters."""
    begun = [token for token in tokens(response) if token[0].isalpha() and token[0].islower()]
    return all(token[1:] and not token[1:].islower() and not token[1:].isupper() for token in begun)
