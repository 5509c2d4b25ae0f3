"""Edits of prompts as data, and texts with some of the edits in them.

A text is a sequence of parts (``gepa/parts.py``). A ``Weave`` has every part that any text of a run has had, in one
order, as the weave of a version control system (SCCS, Rochkind 1975) has the lines of all versions. An edit says of
which part it is, so it becomes a change (parts that go in, parts that go out) without any comparison of texts, and it
lands in the place where it was made, whichever other changes are there. A text that was written as a whole has no
edits: it stands for itself, and is never taken apart.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal, cast

from pydantic import BaseModel, Field, model_validator

from dspy_flashevolve.gepa.parts import (
    NUMBER,
    Part,
    ends_in_fence,
    is_item,
    level_of,
    normal,
    parts_of,
    said_once,
    sections_of,
    title_of,
    wording_of,
    words_of,
)  # fmt: skip

MOST_PARTS = 8
"""An edit of more parts that makes more than half of a text is the whole text in the form of an edit. Not tuned."""


class Edit(BaseModel):
    """One edit of an instruction whose parts are numbered from 1."""

    action: Literal["add", "replace", "remove"] = Field(
        description="add: put the text behind the part; replace: put it in the part's place; remove: take the part out."
    )
    part: int = Field(description="The number of the part; 0 for an addition at the start.")
    text: str = Field(default="", description="The new part; empty to remove one.")
    reason: str = Field(default="", description="In half a sentence, what in the feedback asks for it.")

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, values: Any) -> Any:
        """Take null for a field that is left out, "Add" for "add", and "[3]" for 3, as parts are shown."""
        if not isinstance(values, dict):
            return values
        fields = {name: value for name, value in cast("dict[str, Any]", values).items() if value is not None}
        action, part = fields.get("action"), fields.get("part")
        return {
            **fields,
            **({"action": action.strip().lower()} if isinstance(action, str) else {}),
            **({"part": part.strip().strip("[]")} if isinstance(part, str) else {}),
        }

    @classmethod
    def in_text(cls, answer: str) -> list[Edit]:
        """Read edits that are written as tags.

        >>> Edit.in_text('Here you are: <replace part="2">- Be brief.</replace>')
        [Edit(action='replace', part=2, text='- Be brief.', reason='')]
        """
        # A tag ends before the next one opens: looked for further, each end would be looked for in all of the rest.
        pieces: Iterator[Any] = iter(_TAG.split(answer)[1:])
        edits: list[Edit] = []
        for action, part, is_empty, inner in zip(pieces, pieces, pieces, pieces, strict=True):
            text, closed, _ = inner.partition(f"</{action}>")
            if closed or is_empty:
                edits.append(cls(action=action, part=int(part), text="" if is_empty else text))
        return edits


_TAG = re.compile(r'<(add|replace|remove)\s+(?:after|part)="?(\d{1,4})"?\s*(/)?>')


class EditedText(str):
    """A text that edits made of another one, together with these edits.

    An instruction proposer returns it for the search by edits: each edit is then tested in many prompts and joined with
    those of other children. To all other code it is the text.

    Args:
        text: the text.
        edits: of the text that it was made from; empty for a text that was written as a whole.

    Example:
        >>> from dspy_flashevolve import EditedText
        >>> text = EditedText.of("Answer.\\n- Be brief.", [{"action": "add", "part": 2, "text": "- Be kind."}])
        >>> text.splitlines(), text.edits[0].part
        (['Answer.', '- Be brief.', '- Be kind.'], 2)
    """

    edits: tuple[Edit, ...]

    def __new__(cls, text: str, edits: Iterable[Edit] = ()) -> EditedText:
        """Make a text with the edits that are known of it."""
        made = super().__new__(cls, text)
        made.edits = tuple(edits)
        return made

    @classmethod
    def of(cls, instruction: str, edits: Iterable[Edit | Mapping[str, Any]]) -> EditedText:
        """Apply edits to an instruction.

        An edit of a part that is not there is left out. Of several replacements of one part the first goes in its
        place, the others behind it. What another part says already, word for word, is not put in. Lists are numbered
        anew.

        Args:
            instruction: its parts are list items, headings, tables, fenced blocks and sentences.
            edits: ``action`` ("add" behind the part, "replace" or "remove"), ``part`` (from 1; 0 to add at the start)
                and ``text`` of each.

        Returns:
            The text with its edits; without them where they leave nothing of the instruction and put one text in its
            place, or one of them is most of the text: that is a text written as a whole.

        Raises:
            pydantic.ValidationError: one is no edit.
        """
        own, weave = [Edit.model_validate(edit) for edit in edits], Weave({"": instruction})
        text = weave.compose(weave.take(frozenset(), {"": own}) or ())[""]
        count = len(parts_of(instruction))
        placed = list(_placed(own, count))
        written = [new for _, _, new in placed if new]
        is_replaced = 0 < count == sum(is_gone for _, is_gone, _ in placed) and len(written) == 1
        is_most = any(len(parts_of(new)) > MOST_PARTS and 2 * len(new) > len(text) for new in written)
        is_whole = is_replaced or is_most or any(map(ends_in_fence, (instruction, *written)))
        return cls(text, () if is_whole else own)


_PART_NUMBER = re.compile(r"\A\s*\[(\d{1,4})\]\s?")
"""A number that a model has copied from the part that it was shown."""


def _placed(edits: Iterable[Edit], count: int) -> Iterator[tuple[int, bool, str]]:
    """Read edits of a text of so many parts: the number of the part, whether it goes, and what is put in; first what
    goes in a part's place, so that a line that the edits move is there."""
    gone, placed = set[int](), list[tuple[int, bool, str]]()
    for edit in edits:
        copied = _PART_NUMBER.match(edit.text)
        text = edit.text[copied.end() :] if copied and int(copied[1]) <= count + 1 else edit.text
        text = "" if edit.action == "remove" else text.strip("\n").rstrip()
        number = min(max(edit.part, 0), count) if edit.action == "add" else edit.part
        if edit.action == "add" or number in gone:
            placed += [(number, False, text)] if text else []
        elif 0 < number <= count and (text or edit.action == "remove"):
            gone.add(number)
            placed.append((number, True, text if edit.action == "replace" else ""))
    yield from sorted(placed, key=lambda edit: (not edit[1], edit[0]))


def _units(text: str, is_gone: bool) -> list[list[Part]]:
    """Take what an edit puts in apart into what can be tested alone: its lines, or all of it where a line leads others.

    Two children that replace the same line in this way both keep what they add beside it.
    """
    parts = parts_of(text)
    if not parts:
        return [[]] if is_gone else []
    units = [[parts[0]]]
    leads = any(level_of(part) < 9 for part in parts)
    for part in parts[1:]:
        if "\n" in part.before and not leads:
            units.append([])
        units[-1].append(part)
    return units


@dataclass(frozen=True, slots=True)
class Change:
    """Parts that are put into a component's text and parts that are taken out of it, together or not at all.

    Args:
        component: the component's name.
        part: the text that is put in; empty where the change only takes something out.
        replaces: the text that goes out for it; empty for none.
        adds, removes: the same as parts of the weave.
        needs: numbers of changes without which it makes no sense: it stands under what they put in.
        claims: of changes that claim the same, one is in a text: they take out the same part, or say the same in the
            same section.
        identity: equal for changes that do the same in the same section, however they are numbered or spaced.
    """

    component: str
    part: str
    replaces: str
    adds: tuple[int, ...]
    removes: tuple[int, ...]
    needs: tuple[int, ...]
    claims: frozenset[str]
    identity: str


def is_too_long(
    texts: Mapping[str, str], most_characters: int | None, most_each: int | None = None, base: Mapping[str, str] = {}
) -> bool:
    """Whether a candidate's texts together have more characters than it may have; None for no limit.

    Args:
        texts: component -> text.
        most_characters: of all of them.
        most_each: of each that is made of others' parts, with the space around it stripped, as dspy's
            ``InstructionProposer`` counts.
        base: texts that are as they were written, and may be longer.

    >>> is_too_long({"self": "Answer."}, 7), is_too_long({"self": "Answer."}, 6), is_too_long({"self": "Answer."}, None)
    (False, True, False)
    """
    made = [text.strip() for name, text in texts.items() if text != base.get(name)]
    if most_each is not None and any(len(text) > most_each for text in made):
        return True
    return most_characters is not None and sum(map(len, texts.values())) > most_characters


class Weave:
    """All parts of a base and of the changes on it, in one order, and the texts that follow.

    Args:
        base: component -> text, on which changes are put.
    """

    def __init__(self, base: Mapping[str, str]) -> None:
        self.base = dict(base)
        self.changes: list[Change] = []
        self._parts: list[Part] = []
        self._adders: list[int | None] = []
        """The change that puts each part in; None for the base's own."""
        self._follows: list[int] = []
        """The part that each one follows in the text that it comes from; -1 for the first part there."""
        self._orders: dict[str, list[int]] = {}
        for component, text in self.base.items():
            self._orders[component] = self._new(parts_of(text), None)

    def compose(self, chosen: Collection[int]) -> dict[str, str]:
        """The base with changes in it.

        Args:
            chosen: their numbers.
        """
        touched = {self.changes[number].component for number in chosen}
        texts = {name: self._joined(self._visible(name, chosen)) for name in touched}
        return {name: texts.get(name, text) for name, text in self.base.items()}

    def take(self, chosen: frozenset[int], edits: Mapping[str, Iterable[Edit]]) -> frozenset[int] | None:
        """Make changes of the edits of a text that is composed of changes.

        Args:
            chosen: the changes in that text.
            edits: component -> edits of its parts.

        Returns:
            The changes in the text that the edits made; None where two parts of an edited text read as one, so that its
            reader's numbers are not those of the weave.
        """
        shown = {name: self._visible(name, chosen) for name in edits}
        texts = self.compose(chosen)
        if any(len(parts_of(texts[name])) != len(keys) for name, keys in shown.items()):
            return None
        numbers = set(chosen)
        for component, own in edits.items():
            keys, last = shown[component], dict[int, int]()
            placed = list(_placed(own, len(keys)))
            gone = {keys[number - 1] for number, is_gone, _ in placed if is_gone}
            said = {wording_of(self._parts[key]) for key in keys if key not in gone}
            for number, is_gone, text in placed:
                new = parts_of(text)
                text = "".join(new[at].before + new[at].text for at in said_once(new, said)).strip("\n")
                said.update(map(wording_of, new))
                # An edit is one change or several.
                place, follows = keys[number - 1] if number else -1, -1
                for position, unit in enumerate(_units(text, is_gone)):
                    is_removed = is_gone and position == 0
                    follows = self._put(component, numbers, chosen, place, last.get(number), is_removed, unit, follows)
                    if not is_removed:
                        last[number] = follows
        return frozenset(numbers)

    def stand_on(self, texts: Mapping[str, str]) -> list[int]:
        """Put changes on another base; those of components that are different there are gone.

        Returns:
            The old numbers of the changes that are left.
        """
        kept = [at for at, change in enumerate(self.changes) if texts[change.component] == self.base[change.component]]
        numbers = {old: new for new, old in enumerate(kept)}
        for component in [name for name, text in texts.items() if text != self.base[name]]:
            self._orders[component] = self._new(parts_of(texts[component]), None)
        self._adders = [numbers.get(-1 if adder is None else adder) for adder in self._adders]
        left = [self.changes[old] for old in kept]
        self.changes = [replace(change, needs=tuple(numbers[need] for need in change.needs)) for change in left]
        self.base = dict(texts)
        return kept

    def kept(self) -> dict[str, Any]:
        """What :meth:`restored` needs; JSON."""
        return {
            "base": self.base,
            "changes": [{**asdict(change), "claims": sorted(change.claims)} for change in self.changes],
            "parts": [[part.text, part.before, part.after] for part in self._parts],
            "adders": self._adders,
            "follows": self._follows,
            "orders": self._orders,
        }

    @classmethod
    def restored(cls, kept: Mapping[str, Any]) -> Weave:
        """The weave that was kept."""
        weave = cls({})
        weave.base, weave._orders = dict(kept["base"]), {name: list(order) for name, order in kept["orders"].items()}
        weave._parts = [Part(*fields) for fields in kept["parts"]]
        weave._adders, weave._follows = list(kept["adders"]), list(kept["follows"])
        for record in kept["changes"]:
            fields: dict[str, Any] = {**record, "claims": frozenset(record["claims"])}
            for name in ("adds", "removes", "needs"):
                fields[name] = tuple(record[name])
            weave.changes.append(Change(**fields))
        return weave

    def _new(self, parts: Sequence[Part], adder: int | None, follows: int = -1) -> list[int]:
        """Take in parts that follow one another in a text."""
        ids: list[int] = []
        for part in parts:
            self._parts.append(part)
            self._adders.append(adder)
            self._follows.append(ids[-1] if ids else follows)
            ids.append(len(self._parts) - 1)
        return ids

    def _there(self, component: str, chosen: Collection[int]) -> list[int]:
        """The parts that the base and changes put in and none of them takes out."""
        gone = {part for number in chosen for part in self.changes[number].removes}
        adders = {None, *chosen}
        return [key for key in self._orders[component] if self._adders[key] in adders and key not in gone]

    def _visible(self, component: str, chosen: Collection[int]) -> list[int]:
        """The same without what changes put in though another part says it."""
        ids = self._there(component, chosen)
        parts, base = [self._parts[key] for key in ids], {at for at, key in enumerate(ids) if self._adders[key] is None}
        return [ids[at] for at in said_once(parts, {wording_of(parts[at]) for at in base}, base)]

    def _joined(self, ids: Sequence[int]) -> str:
        """The text of some parts; their lists are numbered anew."""
        pieces: list[str] = []
        last = own_last = 0
        interrupted = True
        for left, right in pairwise([-1, *ids]):
            part = self._parts[right]
            text, number = part.text, NUMBER.match(part.text)
            if number:
                own = int(number[2])
                goes_on = not interrupted or own > max(own_last, 1)
                last = last + 1 if last and goes_on else min(own, 1)
                own_last, interrupted = own, False
                text = f"{number[1]}{last}{text[number.end() :]}"
            elif not is_item(part) and not text.startswith((" ", "\t", "```", "|")):
                interrupted = True
            pieces += self._space(left, right), text
        return "".join(pieces)

    def _space(self, left: int, right: int) -> str:
        """The space between two parts: as in their text or, where they come from different places, no blank line
        between the items of a list, one before a section, else the larger of what stood beside them."""
        if left < 0:
            return ""
        before, after, home = self._parts[left], self._parts[right], self._follows[right]
        if home == left:
            return after.before
        is_in_list = home >= 0 and is_item(self._parts[home])
        if is_item(before) and is_item(after) and not is_in_list:
            return "\n"
        is_prose = not any(is_item(part) or level_of(part) < 8 or "\n" in part.text for part in (before, after))
        least = "\n\n" if level_of(after) < 8 and self._adders[right] is not None else "" if is_prose else "\n"
        return max((before.after, after.before, least), key=_size) or "\n"

    def _put(
        self, component: str, numbers: set[int], chosen: Collection[int], part: int, last: int | None,
        is_removed: bool, new: Sequence[Part], follows: int,
    ) -> int:  # fmt: skip
        """Put a change in, or find the one that does the same, and have ``numbers`` be the changes that are there then.

        Args:
            chosen: the changes in the text that was edited.
            part: of that text, behind or in the place of which the new parts go; -1 for the start.
            last: the last part that an edit before added behind it; None for none.
            is_removed: the part goes.
            new: parts that come.
            follows: the part that they follow in the edit.

        Returns:
            The last of the new parts; where there are none, the one that they would follow.
        """
        old = (part,) if is_removed else ()
        order, anchor = self._orders[component], part if last is None or old else last
        dropped = {adder for key in old if (adder := self._adders[key]) in numbers and self.changes[adder].adds == old}
        numbers -= dropped  # what takes the whole of a change out is the text without it, and no change of its own
        back = {key for number in dropped for key in self.changes[number].removes}
        before, said = self._visible(component, chosen), {wording_of(self._parts[key]) for key in old} - {""}
        unseen = {key for key in self._there(component, chosen) if wording_of(self._parts[key]) in said} - set(before)
        goes = {*old, *back, *unseen}  # what says the same as a part that is taken out does not come in its place
        removes = tuple(key for key in self._there(component, numbers) if key in goes)
        if not new and not removes:
            return anchor
        until = before[: before.index(part) + 1] if part in before else []
        left = [self._parts[key] for key in until if key not in old]
        sections = sections_of([*left, *new])[len(left) :]
        identity = repr((component, sections[:1], [normal(one.text) for one in new], removes))
        same = next((at for at, change in enumerate(self.changes) if change.identity == identity), None)
        if same is not None:
            numbers.add(same)
            return (self.changes[same].adds or (anchor,))[-1]
        number, needs = len(self.changes), {self._adders[key] for key in removes}
        adder = self._adders[anchor] if anchor == part >= 0 and not old else None
        if adder is not None and len(self.changes[adder].adds) > 1 and level_of(new[0]) > 7:
            needs.add(adder)
        claims = {f"-{key}" for key in removes} | {f"+{key}" for key in old if self._adders[key] in dropped}
        for own, one in zip(sections, new, strict=True):
            if len(words_of(one.text)) > 2 or level_of(one) < 8:
                claims.add(f"{component} {own}: {title_of(one)}")
        place = order.index(anchor) + 1 if anchor >= 0 else 0
        if new and not old and last is None:
            following = before[len(until)] if len(until) < len(before) else None
            end = len(order) if following is None else order.index(following)
            place = self._place(order, place, end, anchor, new[0])
        adds = self._new(new, number, follows)
        order[place:place] = adds
        claims |= {f"+{key}" for key in adds}
        self.changes.append(
            Change(
                component, self._joined(adds), self._joined(removes), tuple(adds), removes,
                tuple(sorted(need for need in needs if need is not None)), frozenset(claims), identity,
            )
        )  # fmt: skip
        numbers.add(number)
        return adds[-1] if adds else anchor

    def _place(self, order: Sequence[int], at: int, end: int, anchor: int, part: Part) -> int:
        """Where an addition goes among what others put in the same place: behind what replaces the part, and then by
        its words, so that it does not matter which child came first."""
        mine = _rank(part)
        while at < end:
            adder, above = self._adders[order[at]], self._adders[order[at - 1]] if at else None
            is_one = adder is not None and (adder == above or anchor in self.changes[adder].removes)
            if not is_one and _rank(self._parts[order[at]]) > mine:
                break
            at += 1
        return at


def _size(space: str) -> tuple[int, int]:
    return space.count("\n"), len(space)


def _rank(part: Part) -> tuple[int, str]:
    """Parts that stand in the same place: what goes on with a section before a heading, then by their words."""
    return (0 if level_of(part) > 7 else 1), normal(part.text)
