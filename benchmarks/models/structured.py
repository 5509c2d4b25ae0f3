"""Texts as GPT-class reflection models write them: headings, lists, lists in lists, and hardly a part that stays.

What such a text states are the statements of `words.py`, rules and useless or harmful sentences, each in a list item of
some 150 characters; the rest of it is advice that changes no answer. What becomes of a text's parts in the next one is
drawn from a `Lineage`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.models.fallible import STATEMENT
from benchmarks.models.lineage import Descent, Lineage, quantile
from dspy_flashevolve.sim.words import WORDINGS, Choices, rules_in

_ADJECTIVES = """
    short/brief main/chief plain/unadorned early/initial last/closing common/usual strict/rigid long/lengthy
    evident/obvious absent/missing related/connected recent/new official/authorized direct/straight open/unsettled
    minor/small doubtful/questionable typical/ordinary separate/distinct useful/helpful
"""
_NOUNS = """
    request/query reader/audience reply/response claim/assertion source/reference figure/number name/label date/day
    reason/cause step/stage doubt/uncertainty format/form unit/measure case/instance limit/bound draft/version
    term/expression line/row fact/point goal/aim mistake/error choice/option purpose/intent message/note
"""
_VERBS = """
    state/give check/verify compare/contrast shorten/condense explain/clarify repeat/restate support/back
    arrange/order mark/flag confirm/ascertain divide/split finish/complete read/study address/cover list/enumerate
    choose/pick explore/examine begin/start quote/cite replace/exchange
"""
_PHRASES = (
    "When the {noun} is {adjective}, {verb} the {noun} before the {adjective} {noun}.",
    "{Verb} every {adjective} {noun}, and {verb} its {noun} in {adjective} terms.",
    "If a {noun} has no {noun}, {verb} it as {adjective} and {verb} what remains.",
    "A {adjective} {noun} needs a {noun} of its own; {verb} both with one {noun}.",
    "Before you {verb} a {noun}, {verb} whether its {noun} is {adjective}.",
    "{Verb} first, then {verb}: no {noun} may hide behind a {adjective} {noun}.",
    "Do not {verb} any {noun} whose {noun} seems {adjective} to the {noun}.",
    "Unless told otherwise, {verb} {adjective} {noun}s together with their {noun}s.",
)
_HEADINGS = (
    ("Task", "What this is about"), ("Input format", "What comes in"), ("Key rules", "Requirements"),
    ("Edge cases", "Unusual situations"), ("Strategy", "How to proceed"), ("Output format", "What goes out"),
)  # fmt: skip
"""The two names of each section, in the order in which sections stand."""
_STATED = _HEADINGS[2:5]
"""Sections in which statements stand."""
SYNONYM_SHARE = 0.3
"""Share of the words with a synonym that a reworded line exchanges: reworded parts then share .8 of their words with
those that they were made of, as in the pairs (`benchmarks.lineages`: a median of .82)."""
MOST_ADDED = 4
"""Edits of one reply that add statements; where a reflection has learnt more, an edit holds several."""
FRAGMENT = 60
"""Characters under which a text may stay below its drawn size: less than half a list item."""
_MARK = re.compile(r"\A\s*(?:[-*+•]|\d{1,3}[.)])\s+")
_NUMBER = re.compile(r"\A\d{1,3}(?=[.)]\s)")
_HEADING = re.compile(r"\A(?:#{1,6}\s|\*\*[^*\n]+\*\*:?\Z)")


def _pairs(banks: str) -> dict[str, str]:
    words = [pair.split("/") for pair in banks.split()]
    return {word: other for first, second in words for word, other in ((first, second), (second, first))}


_SYNONYMS = _pairs(_ADJECTIVES + _NOUNS + _VERBS)
_BANKS = {"adjective": sorted(_pairs(_ADJECTIVES)), "noun": sorted(_pairs(_NOUNS)), "verb": sorted(_pairs(_VERBS))}
_WORD = re.compile(r"[A-Za-z]+")
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass
class _Section:
    """A heading, empty for the text above the first, and the blocks under it: a line and all that is indented below."""

    heading: str = ""
    blocks: list[str] = field(default_factory=list[str])


def rewritten(current: str, added: Sequence[str], lineage: Lineage, choices: Choices) -> str:
    """Write a text anew: its parts kept, reworded or dropped as in real lineages, and statements added."""
    sections = _sections(current)
    is_seed = not any(_MARK.match(block) for section in sections for block in section.blocks)
    lost = _descend(sections, lineage.first if is_seed else lineage.later, lineage, choices)
    stated = set(statements(_text(sections)))
    carried = [statement for statement in dict.fromkeys(lost) if statement not in stated]
    writer = _Writer(sections, lineage, choices)
    writer.state([*carried, *(statement for statement in dict.fromkeys(added) if statement not in stated)])
    writer.fill(lineage.characters(len(current), choices.uniform("size")))
    items = [block for section in sections for block in section.blocks if _MARK.match(block)]
    if items and choices.uniform("repeats") < lineage.repeats:
        sections[choices.index("repeat where", len(sections))].blocks.append(
            items[choices.index("repeat which", len(items))]
        )
    return _text(sections)


def consolidated(current: str, lineage: Lineage, choices: Choices) -> str:
    """Write a text anew so that it says each thing once: most statements, and advice as far as there is room."""
    kept = [statement for statement in statements(current)
            if choices.uniform(f"lose {_key(statement)}") >= lineage.consolidation_loses]  # fmt: skip
    room = lineage.characters(len(current), 0.5) / max(1, len(current))
    sections = _sections(current)
    for section in sections:
        advice = [block for block in dict.fromkeys(section.blocks) if not STATEMENT.search(block)]
        section.blocks = [block for block in advice if choices.uniform(f"room for {block}") < room]
    _Writer(sections, lineage, choices).state(kept, has_advice=False)
    return _text(section for section in sections if section.blocks)


def patched(current: str, removed: Iterable[str], added: Sequence[str], lineage: Lineage, choices: Choices) -> str:
    """Take statements out of a text and put others in; all else stays."""
    gone, sections = set(removed), _sections(current)
    for section in sections:
        section.blocks = [block for block in section.blocks if not gone.intersection(statements(block))]
    _Writer(sections, lineage, choices).state(added)
    return _text(sections)


def statements(text: str) -> list[str]:
    """Return the rules, in the task's own wording, and the sentences that a text states, each once, in its order.

    Examples:
        >>> statements('1. Rule 07: be sure to use the word "amber". Check each line.\\n- Keep the tone calm.')
        ['Rule 07: mention the word "amber".', 'Keep the tone calm.']
    """
    stated: dict[str, None] = {}
    for match in STATEMENT.finditer(text):
        rules = rules_in(match[0])
        stated[str(rules[0].reworded(-rules[0].wording)) if rules else match[0]] = None
    return list(stated)


def reworded(text: str, choices: Choices) -> str:
    """Put a text in other words that mean the same: its rules in another wording, some words as their synonyms."""
    pieces, end = list[str](), 0
    for match in STATEMENT.finditer(text):
        pieces += [_exchanged(text[end : match.start()], choices), _otherwise(match[0], choices)]
        end = match.end()
    other = "".join([*pieces, _exchanged(text[end:], choices)])
    return other if other != text else f"{text} This holds in every case."


def edits(
    parts: Sequence[str], added: Sequence[str], forgets: bool, lineage: Lineage, choices: Choices
) -> list[object]:
    """Return one to six edits of a text's numbered parts, as JSON values; some are not as they were asked for."""
    stating = [number for number, part in enumerate(parts, start=1) if STATEMENT.search(part)]
    others = [number for number, part in enumerate(parts, start=1) if _MARK.match(part) and number not in stating]
    stated = {statement for part in parts for statement in statements(part)}
    fresh = [statement for statement in dict.fromkeys(added) if statement not in stated]
    place = stating[-1] if stating else len(parts)
    count = min(MOST_ADDED, len(fresh))
    texts = [_item(fresh[number::count], f"edit {number}", choices) for number in range(count)]
    drafts = [_edit("add", place, text, "the feedback on several examples says that this was missed") for text in texts]
    if forgets and stating:
        drafts.append(
            _edit(
                "remove",
                stating[choices.index("forget which", len(stating))],
                "",
                "nothing in the feedback shows that it is of any use here",
            )
        )
    if others and choices.uniform("refine") < 0.8:
        number = others[choices.index("refine which", len(others))]
        drafts.append(
            _edit(
                "replace",
                number,
                reworded(parts[number - 1], choices),
                "the responses show that it was not understood as it was meant",
            )
        )
    if not drafts or choices.uniform("advise") < 0.7:
        drafts.append(
            _edit(
                "add",
                len(parts),
                _item((), "advice", choices),
                "the responses lack this step, as the feedback on them shows",
            )
        )
    wrong = ({"part": len(parts) + 7}, {"action": "insert"}, {"part": None})  # no such part, no such verb, no place
    return [
        draft if choices.uniform(f"well-formed {number}") < lineage.well_formed
        else draft | wrong[choices.index(f"malformed {number}", len(wrong))]
        for number, draft in enumerate(drafts[:6])
    ]  # fmt: skip


def _edit(action: str, part: int, text: str, reason: str) -> dict[str, object]:
    return {"action": action, "part": part, "text": text, "reason": reason}


class _Writer:
    """Puts items into the sections of a text."""

    def __init__(self, sections: list[_Section], lineage: Lineage, choices: Choices) -> None:
        self._sections, self._lineage, self._choices = sections, lineage, choices
        headings = [section.heading for section in sections if section.heading]
        marked = any(heading.startswith("#") for heading in headings)
        self._is_marked = marked if headings else choices.uniform("marked") < lineage.marked

    def state(self, added: Iterable[str], has_advice: bool = True) -> None:
        """Put statements in, each as an item under one of the headings for them, with or without advice behind it."""
        for statement in added:
            names = _STATED[self._choices.index(f"where {_key(statement)}", len(_STATED))]
            self._add(names, (statement,), _key(statement), has_advice)

    def fill(self, characters: int) -> None:
        """Put advice in until the text has so many characters; all of it, where it is longer, stays."""
        number = 0
        while len(_text(self._sections)) + FRAGMENT < characters:
            self._add(_HEADINGS[self._choices.index(f"fill {number}", len(_HEADINGS))], (), f"fill {number}")
            number += 1

    def _section(self, names: tuple[str, str]) -> _Section:
        known = next((section for section in self._sections if _names(section) == names), None)
        if known is None:
            name = names[self._choices.index(f"name {names[0]}", 2)]
            known = _Section(f"## {name}" if self._is_marked else f"{name}:")
            self._sections.append(known)
            self._sections.sort(key=lambda section: _HEADINGS.index(own) if (own := _names(section)) else -1)
        return known

    def _add(self, names: tuple[str, str], stated: Sequence[str], name: str, has_advice: bool = True) -> None:
        blocks = self._section(names).blocks
        items = [block for block in blocks if _MARK.match(block)]
        is_numbered = _NUMBER.match(items[0]) if items else self._choices.uniform(f"numbered {names}") < 0.3
        item = _item(stated, name, self._choices, has_advice)
        if has_advice and self._choices.uniform(f"nested {name}") < self._lineage.nested:
            item += "".join(f"\n  - {_phrase(f'{name} under {number}', self._choices)}" for number in range(2))
        blocks.append(re.sub(r"\A- ", "1. ", item) if is_numbered else item)


def _names(section: _Section) -> tuple[str, str] | None:
    """The names of a section; None for one that no other heading stands for."""
    heading = section.heading.strip("#*: ")
    return next((names for names in _HEADINGS if heading in names), None)


def _renamed(section: _Section) -> str:
    """The heading with the section's other name; a heading of somebody else's as it is."""
    first, second = _names(section) or (section.heading, section.heading)
    name, other = (first, second) if first in section.heading else (second, first)
    return section.heading.replace(name, other)


def _item(stated: Sequence[str], name: str, choices: Choices, has_advice: bool = True) -> str:
    """A list item with statements in it and advice behind them."""
    spoken = [_otherwise(statement, choices) for statement in stated]
    advice = [_phrase(f"{name} {number}", choices) for number in range(2 * has_advice)]
    return f"- {' '.join([*spoken, *advice])}"


def _phrase(name: str, choices: Choices) -> str:
    """A sentence that changes no answer."""
    text = _PHRASES[choices.index(f"phrase {name}", len(_PHRASES))]

    def word(match: re.Match[str]) -> str:
        bank = _BANKS[match[1].lower()]
        chosen = bank[choices.index(f"word {name} {match.start()}", len(bank))]
        return chosen.capitalize() if match[1][0].isupper() else chosen

    return _SLOT.sub(word, text)


def _descend(sections: list[_Section], descent: Descent, lineage: Lineage, choices: Choices) -> list[str]:
    """Keep, reword or drop each block, in place. Returns the statements of dropped ones that stand elsewhere."""
    luck = choices.uniform("kept")
    kept = quantile(descent.kept, luck)
    # Children that keep more also reword more of the rest (a correlation of .48 in the pairs).
    changed = quantile(descent.reworded, luck if choices.uniform("tied") < 0.5 else choices.uniform("reworded"))
    carried: list[str] = []
    for place, section in enumerate(sections):
        left: list[str] = []
        for number, block in enumerate(section.blocks):
            own = Choices(0, f"{choices.uniform(f'block {place} {number}')}")
            if own.uniform("kept") < kept:
                left.append(block)
                continue
            is_reworded = own.uniform("reworded") < changed
            share = lineage.reworded_keeps if is_reworded else descent.carried
            facts = [statement for statement in statements(block) if own.uniform(f"keep {_key(statement)}") < share]
            if is_reworded and len(facts) == len(statements(block)):
                left.append(reworded(block, own))
            else:
                carried += facts
        section.blocks = left
        if choices.uniform(f"heading {place}") >= math.sqrt(kept):  # steadier than items: .61 stay where .25 of them do
            section.heading = _renamed(section)
    sections[:] = [section for section in sections if section.blocks]
    return carried


def _exchanged(text: str, choices: Choices) -> str:
    """Exchange some words for their synonyms."""

    def word(match: re.Match[str]) -> str:
        other = _SYNONYMS.get(match[0].lower())
        if other is None or choices.uniform(f"exchange {match[0]} {match.start()} {len(text)}") >= SYNONYM_SHARE:
            return match[0]
        return other.capitalize() if match[0][0].isupper() else other

    return _WORD.sub(word, text)


def _otherwise(statement: str, choices: Choices) -> str:
    """A rule in one of its wordings; any other statement as it is."""
    return next((str(rule.reworded(choices.index(f"wording {rule.word}", WORDINGS))) for rule in rules_in(statement)),
                statement)  # fmt: skip


def _key(statement: str) -> str:
    """What a statement is about, in whatever wording."""
    return next((rule.word for rule in rules_in(statement)), statement)


def _sections(text: str) -> list[_Section]:
    """Take a text apart, however it is written."""
    sections = [_Section()]
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        is_item = _MARK.match(line) is not None
        leads = bool(_MARK.match(below)) and not is_item and not line.startswith(" ") and not STATEMENT.search(line)
        if _HEADING.match(line) or leads:
            sections.append(_Section(line))
        elif line.startswith((" ", "\t")) and sections[-1].blocks:
            sections[-1].blocks[-1] += f"\n{line}"
        else:
            sections[-1].blocks.append(line)
    return [section for section in sections if section.heading or section.blocks]


def _text(sections: Iterable[_Section]) -> str:
    """The text: a blank line before each heading, numbered lists numbered from 1."""
    written: list[str] = []
    for section in sections:
        number, lines = 0, [section.heading] if section.heading else []
        for block in section.blocks:
            number = number + 1 if _NUMBER.match(block) else 0
            lines.append(_NUMBER.sub(str(number), block) if number else block)
        written.append("\n".join(lines))
    return "\n\n".join(written)
