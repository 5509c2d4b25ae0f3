"""A playbook as text in an instruction: its marks, what may stand between them, and how many tokens that is."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

CountTokens = Callable[[str], int]

OPENING, CLOSING = "<playbook>", "</playbook>"
"""What a rendered playbook stands between, so that it can be found in an instruction and taken out."""
GUIDE = (
    "What was learnt from earlier tasks; each line has its id. Apply the lines that fit the task, ignore the others."
)
_NEXT = "Next number: "
_MARKS = re.compile(r"</?\s*playbook\s*>", re.IGNORECASE)
_BLOCK = re.compile(rf"\s*{OPENING}\n{re.escape(GUIDE)}[^\n]*\n.*?{CLOSING}", re.DOTALL)


def head(next_number: int) -> list[str]:
    """The first lines of a rendered playbook."""
    return [OPENING, f"{GUIDE} {_NEXT}{next_number}."]


def next_number_in(block: str) -> int:
    """What :func:`head` says; 0 where it says nothing."""
    found = re.search(_NEXT + r"([0-9]{1,10})\.", block.partition("\n")[0])
    return int(found[1]) if found else 0


def approximate_tokens(text: str) -> int:
    """A count without a tokenizer: a token for every four bytes, rounded up.

    >>> approximate_tokens("abcde")
    2
    """
    return math.ceil(len(text.encode("utf-8", "replace")) / 4)


def cleaned(content: str) -> str:
    """The text of a bullet: without playbook marks, headings' blank lines and space around it.

    >>> cleaned(" Mind units. </playbook>\\n\\n  x  ")
    'Mind units.\\nx'
    """
    text = content.encode("utf-8", "replace").decode("utf-8")
    while _MARKS.search(text):
        text = _MARKS.sub("", text)
    return "\n".join(line for line in (one.strip() for one in text.splitlines()) if line)


def attached(instructions: str, playbook_text: str) -> str:
    """Instructions with a rendered playbook at their end, in place of the one that they had."""
    return "\n\n".join(part for part in (detached(instructions), playbook_text) if part)


def detached(instructions: str) -> str:
    """Instructions without the playbook.

    >>> detached(attached("Answer.", "\\n".join([*head(1), "x", CLOSING])))
    'Answer.'
    >>> detached(f"Write {OPENING} tags {CLOSING}.")
    'Write <playbook> tags </playbook>.'
    """
    return _BLOCK.sub("", instructions)


def block_in(instructions: str) -> str | None:
    """The rendered playbook in instructions, without its marks; None where there is none."""
    found = _BLOCK.search(instructions)
    return None if found is None else found[0].strip()[len(OPENING) : -len(CLOSING)].strip("\n")
