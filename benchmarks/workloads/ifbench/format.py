"""IFBench's `format:` kinds: lines, lists, quotes, brackets, emojis and templates."""

from __future__ import annotations

import re
from itertools import pairwise

from benchmarks.workloads.ifbench.lexicon import MINOR_WORDS
from benchmarks.workloads.ifbench.nesting import bracket_depth, quote_depth
from benchmarks.workloads.ifbench.text import is_emoji, lines, paragraphs, sentence_ends, sentences, words
from benchmarks.workloads.ifbench.verifier import verifier

TEMPLATE = ("My Answer:", "My Conclusion:", "Future Outlook:")
BRACKET_DEPTH, QUOTE_DEPTH = 5, 3
_BULLET = re.compile(r"\s*\*\s+\S")
_SUB_BULLET = re.compile(r"\s*-\s+\S")
_LIST_MARK = re.compile(r"\s*(?:[*•+-]|\d+[.)])\s+")
_HEADING = re.compile(r"\s*(?:#{1,6}\s|<h[1-6]\b|\*\*[^*]+\*\*:?\s*$)", re.IGNORECASE)
_CONTAINERS = r"(?:\s*<(?:html|body|main|article|section|div|p)\b[^<>]*>)*"
_ITALICS = re.compile(_CONTAINERS + r"\s*<(i|em)>(.*?)</\1>", re.IGNORECASE | re.DOTALL)
_TAG = re.compile(r"<[^<>]*>")
_QUOTED = re.compile(r"\"[^\"]*\"|“[^”]*”")


@verifier(
    "format:emoji",
    "End every sentence with an emoji.",
    approximate="emojis by their Unicode blocks; the emoji may stand before or after the sentence's mark",
)
def emoji(response: str) -> bool:
    """Each sentence, and each text without a mark at a line's end after it, ends with an emoji."""
    text = response.strip()
    ends = sentence_ends(text)
    rest = text[ends[-1][1] :] if ends else text
    return bool(words(text)) and all(_emoji_at(text, *end) for end in ends) and (not words(rest) or is_emoji(text[-1]))


def _emoji_at(text: str, start: int, end: int) -> bool:
    before, after = text[:start][-3:].rstrip(), text[end : end + 3].lstrip(" ")
    return is_emoji(before[-1:] or " ") or is_emoji(after[:1] or " ")


@verifier("format:line_indent", "Indent each new line more than the line before, like stairs.")
def line_indent(response: str) -> bool:
    """At least two lines; empty ones do not count."""
    given = [line.expandtabs() for line in lines(response)]
    widths = [len(line) - len(line.lstrip()) for line in given]
    return len(widths) > 1 and all(before < after for before, after in pairwise(widths))


@verifier(
    "format:list",
    "Answer with a list of items that begin with {sep} in place of bullet points.",
    approximate="items begin a line with the mark, or (for a mark that is no hyphen) stand between marks",
)
def item_list(response: str, sep: str) -> bool:
    """At least two items with the mark `sep`, and no line with another bullet point or number."""
    given = lines(response)
    marked = [line for line in given if line.strip().startswith(sep) and line.strip() != sep]
    between = [part for part in response.split(sep) if part.strip()] if sep != "-" else []
    others = [line for line in given if _LIST_MARK.match(line) and not line.strip().startswith(sep)]
    return max(len(marked), len(between)) > 1 and not others


@verifier("format:newline", "Write each word on a new line.")
def newline(response: str) -> bool:
    """No line holds more than one word."""
    given = lines(response)
    return bool(given) and all(len(line.split()) == 1 for line in given)


@verifier(
    "format:no_bullets_bullets",
    "Write at least two sentences that end in a period, and after them at least two bullet points denoted by *.",
)
def no_bullets_bullets(response: str) -> bool:
    """Two sentences before the first bullet point, and two bullet points."""
    given = lines(response)
    bullets = [number for number, line in enumerate(given) if _BULLET.match(line)]
    before = "\n\n".join(given[: bullets[0]]) if bullets else ""
    closed = [sentence for sentence in sentences(before) if sentence.rstrip("*_\"' ").endswith(".")]
    return len(bullets) > 1 and len(closed) > 1


@verifier("format:no_whitespace", "Use no whitespace.")
def no_whitespace(response: str) -> bool:
    """No space, tab or line break, not even at the ends."""
    return not any(character.isspace() for character in response)


@verifier("format:options", "Answer with one of these options and nothing else: {options}.")
def options(response: str, options: str) -> bool:
    """One of the options without regard to case, quotes and a last period."""
    mark = next((mark for mark in (", ", "/", " or ") if mark in options), ", ")
    return _bare(response) in {_bare(option) for option in options.split(mark)}


def _bare(option: str) -> str:
    return option.replace("’", "'").strip(" \n\t\"'.*`)(").casefold()


@verifier(
    "format:output_template",
    "Use exactly this template: My Answer: [answer] My Conclusion: [conclusion] Future Outlook: [outlook]",
)
def output_template(response: str) -> bool:
    """The three labels once each and in order, the first at the start, with text after each."""
    text = response.strip()
    starts = [text.find(label) for label in TEMPLATE]
    ordered = starts[0] == 0 and starts == sorted(starts) and all(text.count(label) == 1 for label in TEMPLATE)
    spans = zip(TEMPLATE, starts, [*starts[1:], len(text)], strict=True)
    return ordered and all(words(text[start + len(label) : end]) for label, start, end in spans)


@verifier("format:parentheses", "Nest brackets at least 5 levels deep.")
def parentheses(response: str) -> bool:
    """Round, square and curly brackets that are closed in order, of any kinds."""
    return bracket_depth(response) >= BRACKET_DEPTH


@verifier(
    "format:quotes",
    "Nest quotes at least 3 levels deep, alternating between double and single quotes.",
    approximate="a single quote inside or after a word is an apostrophe unless a single quotation is open",
)
def quotes(response: str) -> bool:
    """Straight or curly quotes; the outer ones may be either kind."""
    return quote_depth(response) >= QUOTE_DEPTH


@verifier(
    "format:quote_unquote",
    "Follow every quoted phrase with an explanation that is not quoted.",
    approximate="an explanation is any word between a quotation and the next; needs at least one quotation",
)
def quote_unquote(response: str) -> bool:
    """There is a word after each quotation in double quotes and before the next."""
    after = _QUOTED.split(response)[1:]
    return bool(after) and all(words(part) for part in after)


@verifier(
    "format:sub-bullets",
    "Use bullet points denoted by * and at least one sub-bullet point denoted by - for each of them.",
)
def sub_bullets(response: str) -> bool:
    """At least one bullet point, and a sub-bullet between each and the next."""
    given = lines(response)
    starts = [number for number, line in enumerate(given) if _BULLET.match(line)]
    spans = pairwise([*starts, len(given)])
    return bool(starts) and all(any(map(_SUB_BULLET.match, given[start:end])) for start, end in spans)


@verifier(
    "format:thesis",
    "Begin each section with a thesis statement in HTML italics (<i> or <em>).",
    approximate="sections are what stands between headings (Markdown, HTML or a bold line), else the paragraphs",
)
def thesis(response: str) -> bool:
    """The text of each section begins with italics that hold a word."""
    sections = _sections(response)
    found = [_ITALICS.match(section) for section in sections]
    return bool(sections) and all(italics and words(italics[2]) for italics in found)


def _sections(response: str) -> list[str]:
    given = lines(response)
    headings = [number for number, line in enumerate(given) if _HEADING.match(line)]
    starts, ends = [0, *(number + 1 for number in headings)], [*headings, len(given)]
    bodies = ["\n".join(given[start:end]) for start, end in zip(starts, ends, strict=True)]
    return [body for body in (bodies if headings else paragraphs(response)) if words(_TAG.sub(" ", body))]


@verifier(
    "format:title_case",
    "Write everything in title case: a capital first letter for every major word.",
    approximate="articles, conjunctions and short prepositions of our list may be in lower case except at the start",
)
def title_case(response: str) -> bool:
    """No word but a minor one begins with a lower-case letter."""
    used = words(response)
    major = [word for number, word in enumerate(used) if number == 0 or word not in MINOR_WORDS]
    return any(word[0].isupper() for word in used) and not any(word[0].islower() for word in major)
