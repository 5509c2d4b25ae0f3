"""How deep brackets and quotes are nested, for two of IFBench's `format:` kinds."""

from __future__ import annotations

from benchmarks.workloads.ifbench.text import paragraphs

_OPENING = {")": "(", "]": "[", "}": "{"}
_CURLY = {"“": '"', "”": '"', "‘": "'", "’": "'"}


def bracket_depth(text: str) -> int:
    """The depth of the deepest group of brackets that are closed in the right order.

    Example:
        >>> bracket_depth("(a [b {c}])"), bracket_depth("((("), bracket_depth("([)]")
        (3, 0, 0)
    """
    # Each open bracket has the depth of what was closed inside it.
    open_brackets: list[tuple[str, int]] = []
    deepest = 0
    for character in text:
        if character in "([{":
            open_brackets.append((character, 0))
        elif character in _OPENING:
            if not open_brackets or open_brackets[-1][0] != _OPENING[character]:
                open_brackets.clear()
                continue
            deepest = max(deepest, _close(open_brackets))
    return deepest


def quote_depth(text: str) -> int:
    """The depth of the deepest closed quotation, alternating between double and single quotes.

    An apostrophe inside or after a word is none of them. Quotations end with their paragraph.

    Example:
        >>> quote_depth('''"He said 'she's "gone" now'," I said.'''), quote_depth('"No" and \\'yes\\'')
        (3, 1)
    """
    return max((_quote_depth(f" {paragraph} ") for paragraph in paragraphs(text)), default=0)


def _quote_depth(text: str) -> int:
    open_quotes: list[tuple[str, int]] = []
    deepest = 0
    for before, given, after in zip(text, text[1:], text[2:], strict=False):
        mark = _CURLY.get(given, given)
        if mark not in "\"'" or (before.isalnum() and after.isalnum()):
            continue
        if open_quotes and open_quotes[-1][0] == mark and not before.isspace():
            deepest = max(deepest, _close(open_quotes))
        elif not before.isalnum() and not after.isspace():
            open_quotes.append((mark, 0))
    return deepest


def _close(open_groups: list[tuple[str, int]]) -> int:
    """Close the innermost group, tell its parent, and give back its depth."""
    depth = open_groups.pop()[1] + 1
    if open_groups:
        mark, inside = open_groups[-1]
        open_groups[-1] = (mark, max(inside, depth))
    return depth
