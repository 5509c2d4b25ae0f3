"""Edits of prompts as data: what a reply says, the patches that follow, and the texts that are rendered from them.

An :class:`Edit` of a reply names a part of the text that its author has read. :class:`Patches` makes a :class:`Patch`
of it: parts that go in, parts that go out, and the part behind which they stand. Each part has an identity for the
whole run, its patch and its place there (the base is patch 0). So a patch lands where it was made in whatever other
text, a part that occurs twice is told apart, and no two texts are ever compared. A text is rendered from the base and a
set of patches: parts are visited depth first, each followed by what patches put behind it, as in a replicated growable
array (Roh et al. 2011). A part that is taken out keeps its place there, for what stands behind it.

A text that was written as a whole has no edits: it stands for itself, and becomes the base of later patches or nothing.

A reply is read by ``modules/reading.py``, for ``EditProposer`` in propose.py; :meth:`Edit.in_text` finds edits in one
that is neither JSON nor has the fields of the request.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, cast

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
    title_of,
    wording_of,
)  # fmt: skip


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
        edited = super().__new__(cls, text)
        edited.edits = tuple(edits)
        return edited

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
            The text with its edits; without them where they put one text in the place of the whole instruction, or
            leave a fence open: that is a text written as a whole.

        Raises:
            pydantic.ValidationError: one is no edit.
        """
        own, patches = [Edit.model_validate(edit) for edit in edits], Patches({"": instruction})
        text = patches.render(patches.take(0, frozenset(), {"": own}) or ())[""]
        count = len(parts_of(instruction))
        placed = list(_placed(own, count))
        written = [new for _, _, new in placed if new]
        is_replaced = 0 < count == sum(is_gone for _, is_gone, _ in placed) and len(written) == 1
        is_whole = is_replaced or any(map(ends_in_fence, (instruction, *written)))
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


def _units(parts: Sequence[Part], is_gone: bool) -> list[list[Part]]:
    """Take what an edit puts in apart into what can be tested alone: its lines, or all of it where a line leads others.

    Two children that replace the same line in this way both keep what they add beside it.
    """
    if not parts:
        return [[]] if is_gone else []
    units = [[parts[0]]]
    leads = any(level_of(part) < 9 for part in parts)
    for part in parts[1:]:
        if "\n" in part.before and not leads:
            units.append([])
        units[-1].append(part)
    return units


def is_too_long(
    texts: Mapping[str, str], most_characters: int | None, most_each: int | None = None, base: Mapping[str, str] = {}
) -> bool:
    """Return whether a candidate's texts have more characters than they may have; None for no limit.

    Args:
        texts: component -> text.
        most_characters: of all of them.
        most_each: of each that is made of others' parts, with the space around it stripped, as dspy's
            ``InstructionProposer`` counts.
        base: texts that are as they were written, and may be longer.

    >>> is_too_long({"self": "Answer."}, 7), is_too_long({"self": "Answer."}, 6), is_too_long({"self": "Answer."}, None)
    (False, True, False)
    """
    changed = [text.strip() for name, text in texts.items() if text != base.get(name)]
    if most_each is not None and any(len(text) > most_each for text in changed):
        return True
    return most_characters is not None and sum(map(len, texts.values())) > most_characters


BASE = 0
"""Number of the base, as if it were a patch."""


class Key(NamedTuple):
    """Identity of a part in its component: the patch that puts it in, and its place among that patch's parts."""

    patch: int
    place: int


START = Key(BASE, -1)
"""Stands before the first part of a text."""


@dataclass(frozen=True, slots=True)
class Patch:
    """Parts that are put into a component's text and parts that are taken out of it, together or not at all.

    Args:
        number: from 1, in the order in which a run has found them.
        step: the step whose child brought it.
        component: the component's name.
        after: the part behind which it stands.
        parts: those that go in.
        removes: those that go out.
        section: the heading above it, or the line that leads in the list in which it stands.
        instead: numbers of the patches that its author had taken out for it.
    """

    number: int
    step: int
    component: str
    after: Key
    parts: tuple[Part, ...]
    removes: tuple[Key, ...]
    section: Key
    instead: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """What it puts in; empty where it only takes something out."""
        return "".join(part.before + part.text for part in self.parts).strip("\n")

    @property
    def keys(self) -> tuple[Key, ...]:
        """Identities of the parts that it puts in."""
        return tuple(Key(self.number, place) for place in range(len(self.parts)))

    @property
    def needs(self) -> set[int]:
        """Numbers of the patches without which it makes no sense: it stands under what they put in, or takes it out."""
        opens = bool(self.parts) and level_of(self.parts[0]) < 8
        return {key.patch for key in (*self.removes, *([] if opens else [self.section]))} - {BASE}

    @property
    def claims(self) -> set[Hashable]:
        """What one patch of a text may have: to take a part out, to stand in a patch's place, a title in a section."""
        titles = [(self.section, title) for part in self.parts if (title := title_of(part))]
        return {self.number, *self.instead, *((self.component, claim) for claim in (*self.removes, *titles))}

    @property
    def identity(self) -> tuple[Hashable, ...]:
        """Equal for patches that do the same in the same section, however they are numbered, marked or spaced."""
        return self.component, self.section, tuple(normal(part.text) for part in self.parts), self.removes


class Patches:
    """The patches of a run on a base, and the texts that are rendered from them.

    Args:
        base: component -> text.
    """

    def __init__(self, base: Mapping[str, str]) -> None:
        self.base = dict(base)
        self.by_number: dict[int, Patch] = {}
        """In the order of their numbers."""
        self._last = BASE
        self._base_parts = {name: tuple(parts_of(text)) for name, text in self.base.items()}

    def render(self, chosen: Collection[int]) -> dict[str, str]:
        """The base with patches in it.

        Args:
            chosen: their numbers.
        """
        touched = {self.by_number[number].component for number in chosen}
        return {
            name: self._joined(name, self._visible(name, chosen)) if name in touched else text
            for name, text in self.base.items()
        }

    def take(self, step: int, chosen: frozenset[int], edits: Mapping[str, Iterable[Edit]]) -> frozenset[int] | None:
        """Make patches of the edits of a text.

        Args:
            step: that made them.
            chosen: the patches in that text.
            edits: component -> edits of its parts.

        Returns:
            The patches in the text that the edits made; None where two parts of an edited text read as one, so that its
            reader's numbers are not those of the parts.
        """
        shown = {name: self._visible(name, chosen) for name in edits}
        if any(len(parts_of(self._joined(name, keys))) != len(keys) for name, keys in shown.items()):
            return None
        numbers = set(chosen)
        for component, own in edits.items():
            keys, last = shown[component], dict[int, Key]()
            placed = list(_placed(own, len(keys)))
            gone = {keys[number - 1] for number, is_gone, _ in placed if is_gone}
            said = {self._wording(component, key) for key in keys if key not in gone}
            for number, is_gone, text in placed:
                new = parts_of(text)
                new_only = [new[at] for at in said_once(new, said)]
                said.update(map(wording_of, new))
                place = keys[number - 1] if number else START
                above = reversed(keys[: number - is_gone])
                section = next((key for key in above if level_of(self._part(component, key)) < 9), START)
                after = last.get(number, place)
                for position, unit in enumerate(_units(new_only, is_gone)):
                    removed = place if is_gone and position == 0 else None
                    end = self._put(step, component, numbers, keys, after, section, removed, tuple(unit))
                    after = end if removed is None else place  # whichever replacement is chosen, it comes before
                last[number] = after
        return frozenset(numbers)

    def that_fit(
        self, numbers: Iterable[int], most_characters: int | None = None, most_each: int | None = None
    ) -> list[int]:
        """Keep patches that make sense together, in the given order, as many as there is room for.

        Of patches that claim the same the first is kept; see :func:`is_too_long` for the limits.
        """
        fitting, claimed = list[int](), set[Hashable]()
        for number in numbers:
            claims = self.by_number[number].claims
            if claimed.isdisjoint(claims):
                fitting.append(number)
                claimed |= claims
        while True:
            supported = [number for number in fitting if self.by_number[number].needs <= set(fitting)]
            if len(supported) < len(fitting):
                fitting = supported
            elif fitting and is_too_long(self.render(fitting), most_characters, most_each, self.base):
                fitting.pop()
            else:
                return fitting

    def replaced(self, patch: Patch) -> str:
        """The text that a patch takes out; empty for none."""
        return "\n".join(self._part(patch.component, key).text for key in patch.removes)

    def rebase(self, texts: Mapping[str, str]) -> list[Patch]:
        """Put the patches on another base.

        Returns:
            Those of components that are different there, which are gone.
        """
        gone = [patch for patch in self.by_number.values() if texts[patch.component] != self.base[patch.component]]
        for patch in gone:
            del self.by_number[patch.number]
        self.base = dict(texts)
        self._base_parts = {name: tuple(parts_of(text)) for name, text in self.base.items()}
        return gone

    def to_json(self) -> dict[str, Any]:
        """What :meth:`from_json` needs."""
        return {"base": self.base, "patches": [asdict(patch) for patch in self.by_number.values()]}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Patches:
        """The patches that were written down."""
        patches = cls(saved["base"])
        for row in saved["patches"]:
            fields: dict[str, Any] = {**row, **{name: Key(*row[name]) for name in ("after", "section")}}
            fields["parts"] = tuple(Part(**part) for part in row["parts"])
            fields["removes"], fields["instead"] = tuple(Key(*key) for key in row["removes"]), tuple(row["instead"])
            patch = Patch(**fields)
            patches.by_number[patch.number], patches._last = patch, patch.number
        return patches

    def _part(self, component: str, key: Key) -> Part:
        return (self._base_parts[component] if key.patch == BASE else self.by_number[key.patch].parts)[key.place]

    def _wording(self, component: str, key: Key) -> str:
        return wording_of(self._part(component, key))

    def _order(self, component: str) -> list[Key]:
        """All parts that there are, depth first. What replaces a part comes before what is added behind it, and
        additions by their words, so that it does not matter which came first; a section ends before a heading."""
        behind: defaultdict[Key, list[Patch]] = defaultdict(list)
        for patch in self.by_number.values():
            if patch.component == component and patch.parts:
                behind[patch.after].append(patch)
        order: list[Key] = []
        ahead = [Key(BASE, place) for place in reversed(range(-1, len(self._base_parts[component])))]
        while ahead:
            order.append(ahead.pop())
            for patch in sorted(behind[order[-1]], key=_rank, reverse=True):
                ahead += reversed(patch.keys)
        return order[1:]

    def _present(self, component: str, chosen: Collection[int]) -> list[Key]:
        """The parts that the base and patches put in and none of them takes out."""
        mine = [patch for number in chosen if (patch := self.by_number[number]).component == component]
        gone, there = {key for patch in mine for key in patch.removes}, {BASE, *chosen}
        return [key for key in self._order(component) if key.patch in there and key not in gone]

    def _visible(self, component: str, chosen: Collection[int]) -> list[Key]:
        """The same without what patches put in though another part says it."""
        keys = self._present(component, chosen)
        parts, base = [self._part(component, key) for key in keys], {at for at, key in enumerate(keys) if not key.patch}
        return [keys[at] for at in said_once(parts, {wording_of(parts[at]) for at in base}, base)]

    def _put(
        self, step: int, component: str, numbers: set[int], shown: Sequence[Key], after: Key, section: Key,
        removed: Key | None, parts: tuple[Part, ...],
    ) -> Key:  # fmt: skip
        """Add a patch, or find the one that does the same, and have ``numbers`` be the patches that are there then.

        Args:
            shown: the parts of the text that was edited.
            removed: the part in whose place the new ones go; None for none.

        Returns:
            The last of the new parts; where there are none, the one that they would follow.
        """
        goes, instead = set[Key](), set[int]()
        if removed is not None:
            # What says the same as a part that is taken out, and was left out for that, does not come in its place.
            says = self._wording(component, removed)
            hidden = set(self._present(component, numbers)) - set(shown)
            goes = {removed, *(key for key in hidden if says and self._wording(component, key) == says)}
            # What takes a whole patch out is the text without it.
            instead = {key.patch for key in goes if key.patch in numbers and len(self.by_number[key.patch].parts) == 1}
            numbers -= instead
            goes.update(key for number in instead for key in self.by_number[number].removes)
        removes = tuple(key for key in self._present(component, numbers) if key in goes)
        if not parts and not removes:
            return after
        lineage = {*instead, *(older for number in instead for older in self.by_number[number].instead)}
        patch = Patch(self._last + 1, step, component, after, parts, removes, section, tuple(sorted(lineage)))
        same = next((one for one in self.by_number.values() if one.identity == patch.identity), patch)
        if same is patch:
            self._last += 1
            self.by_number[patch.number] = patch
        numbers.add(same.number)
        return (after, *same.keys)[-1]

    def _joined(self, component: str, keys: Sequence[Key]) -> str:
        """The text of some parts; their lists are numbered anew."""
        pieces: list[str] = []
        last = own_last = 0
        interrupted = True
        for previous, key in pairwise([START, *keys]):
            part = self._part(component, key)
            text, number = part.text, NUMBER.match(part.text)
            if number:
                own = int(number[2])
                goes_on = not interrupted or own > max(own_last, 1)
                last = last + 1 if last and goes_on else min(own, 1)
                own_last, interrupted = own, False
                text = f"{number[1]}{last}{text[number.end() :]}"
            elif not is_item(part) and not text.startswith((" ", "\t", "```", "|")):
                interrupted = True
            pieces += "" if previous == START else self._space(component, previous, key), text
        return "".join(pieces)

    def _space(self, component: str, previous: Key, key: Key) -> str:
        """The space between two parts: as in their text or, where they come from different places, no blank line
        between the items of a list, one before a section, else the larger of what stood beside them."""
        before, after = self._part(component, previous), self._part(component, key)
        home = Key(key.patch, key.place - 1) if key.place else START
        if home == START and after.before and key.patch != BASE:
            home = self.by_number[key.patch].after  # a further line of an edit
        if home == previous:
            return after.before
        is_in_list = home != START and is_item(self._part(component, home))
        if is_item(before) and is_item(after) and not is_in_list:
            return "\n"
        is_prose = not any(is_item(part) or level_of(part) < 8 or "\n" in part.text for part in (before, after))
        least = "\n\n" if level_of(after) < 8 and key.patch != BASE else "" if is_prose else "\n"
        spaces = (before.after, after.before, least)
        return max(spaces, key=lambda space: (space.count("\n"), len(space))) or "\n"


def _rank(patch: Patch) -> tuple[bool, bool, str, int]:
    """Where a patch comes among those that stand behind the same part."""
    first = patch.parts[0]
    return patch.after not in patch.removes, level_of(first) < 8, normal(first.text), patch.number
