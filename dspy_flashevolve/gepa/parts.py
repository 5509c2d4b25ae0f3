"""Parts of a text: list items with all that is indented under them, headings, tables, fenced code, sentences."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

WRAPPED = 60
"""A line of so many characters that does not end like a sentence is taken for hard-wrapped: the next one goes on. Not
tuned."""

FEW_WORDS = 3
"""Two parts of more words that say the same are never both in a text. "Answer briefly." may stand in two sections. Not
tuned."""

OPENING = 500
"""Characters of a block that tell what it is: longer than any heading or mark of a list. Not tuned."""
_SENTENCE = re.compile(r"(?<=[.!?])(?<!\b[A-Z]\.)(?<!\be\.g\.)(?<!\bi\.e\.)(\s+)(?=[A-Z\"'(\[*_`])")
_MARK = re.compile(r"\A\s*(?:[-*+•]|\d{1,3}[.)])\s+")
NUMBER = re.compile(r"\A(\s*)(\d{1,3})(?=[.)]\s)")
_ROW = re.compile(r"\A\s*([|>])")
_HEADING = re.compile(r"\A(?:(#{1,6})\s|\*\*[^*\n]+\*\*:?\Z|<[\w-]+>\Z)")
_TITLE = re.compile(r"\A\s*(?:[-*+•]|\d{1,3}[.)])\s+\*\*([^*\n]+)\*\*")
_LABEL = re.compile(r"\A\W{0,3}([^\W\d][^\W\d ]*(?: [^\W\d]+){0,2})\W{0,3}:")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a text.

    Args:
        text: without the space around it.
        before, after: the space around it in the text that it comes from.
    """

    text: str
    before: str = ""
    after: str = ""


def parts_of(text: str) -> list[Part]:
    """Take a text apart. Joined, with the space around them, the parts are the text again.

    >>> [part.text for part in parts_of("Answer. Think.\\n- Be brief:\\n  - two lines\\n\\n- Be kind")]
    ['Answer.', 'Think.', '- Be brief:\\n  - two lines', '- Be kind']
    """
    spans = [span for start, end, is_prose in _blocks(text) for span in _sentences(text, start, end, is_prose)]
    ends = [0, *(end for _, end in spans)]
    starts = [*(start for start, _ in spans), len(text)]
    spaces = [text[end:start] for end, start in zip(ends, starts, strict=True)]
    return [Part(text[start:end], *spaces[at : at + 2]) for at, (start, end) in enumerate(spans)]


def _blocks(text: str) -> list[tuple[int, int, bool]]:
    """Start and end of each block of lines that belong together, and whether it is prose."""
    blocks: list[tuple[int, int, bool]] = []
    position, fenced, above = 0, False, ""
    labels: set[str] | None = set()  # of the lines of the block, while all of them have one
    for line in text.splitlines(keepends=True):
        start, position = position, position + len(line)
        if line.strip():
            begin, _, is_prose = blocks[-1] if blocks else (0, 0, False)
            label = _LABEL.match(line)
            opening = text[begin : min(start, begin + OPENING)]  # a look at the whole block would make this quadratic
            goes_on = False if fenced else _goes_on(opening, labels, is_prose, above, line)
            if blocks and (fenced or goes_on is not None):
                labels = {*labels, label[1]} if labels is not None and label else None
                blocks[-1] = (begin, start + len(line.rstrip()), not fenced and is_prose and goes_on is True)
            else:
                is_prose = not (_MARK.match(line) or _ROW.match(line) or _turns_fence(line) or _HEADING.match(line))
                blocks.append((start, start + len(line.rstrip()), is_prose))
                labels = {label[1]} if label else None
            if _turns_fence(line):
                fenced = not fenced
        else:
            labels = None
        above = line
    return blocks


def _goes_on(block: str, labels: set[str] | None, is_prose: bool, above: str, line: str) -> bool | None:
    """Whether a line belongs to the block above, whose beginning is given: None where it does not, True where it is the
    same prose."""
    is_item = _MARK.match(line) is not None
    if _indent(line) > _indent(block) and (not is_item or _MARK.match(block)) and not _HEADING.match(block):
        return False
    if not above.strip() or is_item or _HEADING.match(line.strip()) or _turns_fence(line) or _turns_fence(above):
        return None
    row, row_above, label = _ROW.match(line), _ROW.match(above), _LABEL.match(line)
    if row or row_above:
        return False if row and row_above and row[1] == row_above[1] else None
    if label and labels is not None:  # "Input: ..." with the "Output: ..." under it
        return False if label[1] not in labels else None
    is_open = above.rstrip()[-1] not in ".!?:;" and not _HEADING.match(above.strip())
    return is_prose if is_open and (line.lstrip()[0].islower() or (is_prose and len(above) > WRAPPED)) else None


def _sentences(text: str, start: int, end: int, is_prose: bool) -> list[tuple[int, int]]:
    gaps = [gap.span(1) for gap in _SENTENCE.finditer(text, start, end)] if is_prose else []
    return list(zip([start, *(stop for _, stop in gaps)], [*(begin for begin, _ in gaps), end], strict=True))


def _indent(text: str) -> int:
    first = text.expandtabs(4)
    return len(first) - len(first.lstrip(" "))


def _turns_fence(line: str) -> bool:
    return line.strip().startswith("```") and line.count("```") % 2 == 1


def is_item(part: Part) -> bool:
    return _MARK.match(part.text) is not None


def level_of(part: Part) -> int:
    """Of a heading from 1 to 7; 8 for a line that leads in a list; 9 for any other part."""
    heading = _HEADING.match(part.text)
    if heading:
        return len(heading[1]) if heading[1] else 7
    is_lead = part.text.rstrip("*_ ").endswith(":") and not is_item(part) and "\n" not in part.text
    return 8 if is_lead else 9


@lru_cache(maxsize=2**16)
def normal(part: str) -> str:
    """A part without its bullet or number, in lower case, with single spaces."""
    return " ".join(_MARK.sub("", part).lower().split())


@lru_cache(maxsize=2**16)
def wording_of(part: Part) -> str:
    """What a part says, however it is marked, spaced and punctuated; empty for headings and for :data:`FEW_WORDS`."""
    wording = normal(part.text).strip(" .!?:;,*_")
    return wording if level_of(part) > 8 and len(wording.split()) > FEW_WORDS else ""


def said_once(parts: Sequence[Part], said: Iterable[str], fixed: Collection[int] = ()) -> list[int]:
    """Leave out of a text what says again what is said already, and headings that lead to nothing but that.

    Args:
        said: wordings of parts that stand elsewhere.
        fixed: positions of parts that stay.

    Returns:
        The positions of the others.

    >>> parts = parts_of("## Codes\\n- Use K7 for rust.\\n\\n## Form\\n- Answer briefly.")
    >>> [parts[at].text for at in said_once(parts, ["use k7 for rust"])]
    ['## Form', '- Answer briefly.']
    """
    levels, unsaid, wordings = [*map(level_of, parts), 0], list[int](), set(said) - {""}
    for at, part in enumerate(parts):
        is_value = levels[at - 1] == 8 and not is_item(part)  # "Output:" and its value belong to one example
        if at in fixed or is_value or wording_of(part) not in wordings:
            unsaid.append(at)
        wordings |= {wording_of(part)} - {""}
    positions = [len(parts)]
    for at in reversed(unsaid):
        if at in fixed or levels[at] >= levels[at + 1] or levels[at] < levels[positions[-1]]:
            positions.append(at)
    return positions[:0:-1]


def title_of(part: Part) -> str:
    """What a heading, or an item such as "- **Dates:** ...", says that it is about; empty for any other part."""
    title = _TITLE.match(part.text)
    return normal(title[1] if title else part.text if level_of(part) < 8 else "")


def ends_in_fence(text: str) -> bool:
    return sum(map(_turns_fence, text.splitlines())) % 2 == 1


def is_json(text: str) -> bool:
    """Whether a text is an object or a list of JSON, which its lines would break out of.

    >>> is_json('{"rules": ["Be brief."]}'), is_json('Reply as {"answer": 1}.'), is_json("[1]: a note")
    (True, False, False)
    """
    if text.strip()[:1] not in ("{", "["):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
