"""Taking prompts apart: what a child adds to the text it was made from, and texts with some of the changes in them.

A text is a list of parts: a line of a list, a table or a heading with what is indented under it, a block of fenced
code, or a sentence of any other line. A change is a part that a child has and its parent has not. It needs no LM to be
put into a text or to be left out again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

KEPT = 0.5
"""Share of its parent's parts that a child has to keep; else it is a rewrite, which cannot be taken apart."""
REWORDED = 0.8
"""Share of a part's words that another holds, from which that is taken for the part in other words."""

_SENTENCE = re.compile(r"(?<=[.!?])(?<!\b[A-Z]\.)(?<!\be\.g\.)(?<!\bi\.e\.)(\s+)(?=[A-Z\"'(\[*_`])")
_WORD = re.compile(r"\w+")
_MARK = re.compile(r"\A\s*(?:[-*+•]|\d{1,3}[.)])\s+")
_ROW = re.compile(r"\A\s*[|#>]")


@dataclass(frozen=True, slots=True)
class Change:
    """A part that is put into a component's text, or taken out of it.

    Args:
        component: the component's name.
        part: the text that is put in; empty where the change only takes something out.
        after: the part that stood before it in the child; None for the start. Where the text has no such part, it goes
            to the end.
        replaces: the part of the text that goes out for it; empty for none.
    """

    component: str
    part: str
    after: str | None = None
    replaces: str = ""

    @property
    def identity(self) -> tuple[str, str, str]:
        """Equal for changes that do the same, wherever they stand and however they are numbered or spaced."""
        return self.component, normal(self.part), normal(self.replaces)


def parts_of(text: str) -> list[str]:
    """Take a text apart. Joined, the parts are the text again.

    >>> parts_of("Answer. Think.\\n- Be brief:\\n  two lines\\n\\n- Be kind")
    ['Answer. ', 'Think.\\n', '- Be brief:\\n  two lines\\n\\n', '- Be kind']
    """
    parts: list[str] = []
    fenced = False
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        goes_on = fenced or not bare or (line[0] in " \t" and not _MARK.match(line))
        if parts and goes_on:
            parts[-1] += line
        else:
            parts += _sentences(line)
        if _turns_fence(line):
            fenced = not fenced
    return parts


def _turns_fence(line: str) -> bool:
    return line.strip().startswith("```") and line.count("```") % 2 == 1


def _stands_alone(part: str) -> bool:
    """Whether a part is one wherever it is put, as code whose fence is never closed is not."""
    return parts_of(part) == [part] and sum(map(_turns_fence, part.splitlines())) % 2 == 0


def _sentences(line: str) -> list[str]:
    if _MARK.match(line) or _ROW.match(line):
        return [line]
    pieces = _SENTENCE.split(line)
    return [first + space for first, space in zip(pieces[::2], [*pieces[1::2], ""], strict=True)]


@lru_cache(maxsize=2**16)
def normal(part: str) -> str:
    """A part without its bullet or number, in lower case, with single spaces: what tells parts apart."""
    return " ".join(_MARK.sub("", part).lower().split())


def changes_between(parent: Mapping[str, str], child: Mapping[str, str], code: Collection[str]) -> list[Change] | None:
    """What a child adds to its parent; None for a rewrite.

    What a child leaves out is no change while it adds something: reflections forget, and whether a part is worth its
    place is found out anyway. A part in other words goes in for the one that it rewords; not one of several of the same
    wording (rules of one form, each with a word of its own), which may be another rule.

    Args:
        parent, child: component -> text.
        code: components that hold code, which is not taken apart.
    """
    found: list[Change] = []
    for component, text in child.items():
        before = parent[component]
        if text == before:
            continue
        if component in code or is_json(before) or is_json(text):
            return None
        old, new = parts_of(before), parts_of(text)
        had, has = {normal(one) for one in old}, {normal(one) for one in new}
        gone = [one for one in old if normal(one) and normal(one) not in has]
        if len(had & has) < KEPT * len(had) or not all(map(_stands_alone, [*old[-1:], *new])):
            return None
        stays = [one for one in old if normal(one) in has] + [one for one in new if normal(one) not in had]
        added: list[Change] = []
        last: str | None = None
        for part in new:
            if not normal(part):
                continue
            if normal(part) not in had:
                replaced = next((one for one in gone if _rewords(part, one)), "")
                if _is_worded_as(part, replaced) and any(
                    normal(one) != normal(part) and _is_worded_as(part, one) for one in stays
                ):
                    replaced = ""
                if replaced:
                    gone.remove(replaced)
                added.append(Change(component, part, last, replaced))
            last = part
        found += added or [Change(component, "", None, one) for one in gone]
    return found or None


def removals_between(
    base: Mapping[str, str], parent: Mapping[str, str], child: Mapping[str, str], changes: Collection[Change]
) -> list[Change]:
    """What a child leaves out of the base, where none of its ``changes`` goes in for it: each is a change as well."""
    found: list[Change] = []
    for component in child:
        replaced = {normal(one.replaces) for one in changes if one.component == component}
        had, has = ({normal(one) for one in parts_of(texts[component])} for texts in (parent, child))
        for part in parts_of(base[component]) if had != has else ():
            if normal(part) in had - has - replaced and normal(part):
                found.append(Change(component, "", None, part))
    return found


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


def _rewords(part: str, other: str) -> bool:
    mine, words = set(_WORD.findall(normal(part))), set(_WORD.findall(normal(other)))
    return bool(words) and len(words & mine) >= REWORDED * len(words)


def _is_worded_as(part: str, other: str) -> bool:
    return _rewords(part, other) and _rewords(other, part)


def is_too_long(texts: Mapping[str, str], most_characters: int | None) -> bool:
    """Whether a candidate's texts together have more characters than it may have; None for no limit.

    >>> is_too_long({"self": "Answer."}, 7), is_too_long({"self": "Answer."}, 6), is_too_long({"self": "Answer."}, None)
    (False, True, False)
    """
    return most_characters is not None and sum(map(len, texts.values())) > most_characters


def apply(base: Mapping[str, str], changes: Iterable[Change]) -> dict[str, str]:
    """The base with changes in it.

    >>> apply({"answer": "Answer.\\nThanks."}, [Change("answer", "Be brief.", after="Answer.\\n")])
    {'answer': 'Answer.\\nBe brief.\\nThanks.'}
    """
    parts = {name: parts_of(text) for name, text in base.items()}
    touched: set[str] = set()
    for change in changes:
        text = parts[change.component]
        place = _place(text, change)
        for at in reversed(_places(text, change.replaces) if change.replaces else []):
            _end_line(text, at)  # what stands behind it does not join what stands before it
            del text[at]
            place = at
        if change.part and _find(text, change.part) is None:
            place = max(place, 1) if text and _is_indented(text[0]) else place
            _end_line(text, place)
            text.insert(place, change.part.lstrip() if _is_indented(change.part) else change.part)
            _end_line(text, place + 1)
        touched.add(change.component)
    return {name: "".join(parts[name]).rstrip("\n") if name in touched else text for name, text in base.items()}


def _end_line(text: list[str], place: int) -> None:
    """Have what stands before a place end with its line."""
    if place > 0 and not text[place - 1].endswith("\n"):
        text[place - 1] += "\n"


def _is_indented(part: str) -> bool:
    return part[:1] in (" ", "\t") and not _MARK.match(part)


def changes_in(base: Mapping[str, str], texts: Mapping[str, str], changes: Sequence[Change]) -> frozenset[int] | None:
    """Which of the changes a candidate has; None where it is not the base with changes in it."""
    parts = {name: parts_of(text) for name, text in texts.items()}
    found = frozenset(
        number
        for number, one in enumerate(changes)
        if (_find(parts[one.component], one.part) is not None if one.part
            else _find(parts[one.component], one.replaces) is None)
    )  # fmt: skip
    made = apply(base, (changes[number] for number in sorted(found)))
    same = all({normal(one) for one in parts_of(made[name])} == {normal(one) for one in parts[name]} for name in texts)
    return found if same else None


def _place(text: Sequence[str], change: Change) -> int:
    if change.after is None:
        return 0
    at = _find(text, change.after)
    return len(text) if at is None else at + 1


def _find(text: Sequence[str], part: str) -> int | None:
    return next(iter(_places(text, part)), None)


def _places(text: Sequence[str], part: str) -> list[int]:
    wanted = normal(part)
    return [at for at, one in enumerate(text) if normal(one) == wanted]
