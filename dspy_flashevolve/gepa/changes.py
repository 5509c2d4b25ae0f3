"""Taking prompts apart: what a child changes in the text it was made from, and texts with some of the changes in them.

A text is a sequence of parts (``gepa/parts.py``). A ``Weave`` has every part that any text of a run has had, in one
order, as the weave of a version control system (SCCS, Rochkind 1975) has the lines of all versions. A change puts some
of these parts in and takes others out. So a part is told apart by its place, never by its words alone, and a change
lands where it was made.

What is composed of a child's changes is that child, character for character but for space at the ends of lines; a child
for which this does not hold is not taken apart.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from dspy_flashevolve.gepa.parts import (
    NUMBER,
    Part,
    ends_in_fence,
    face_of,
    is_item,
    is_json,
    is_worded_as,
    level_of,
    likeness,
    normal,
    parts_of,
    said_once,
    same_text,
    sections_of,
    title_of,
    wording_of,
    words_of,
)  # fmt: skip

KEPT = 0.5
"""Share of its parent's parts that a child has to keep or reword, one of them word for word; else it is a rewrite
that stands for itself."""
MOST_CHANGES = 8
"""A whole text that comes apart into more changes is taken apart less finely: by differing hunks, by sections, not at
all. Reflection models add 30 lines at a time; effects of so many are never told apart within a budget. Edits are
changes each, however many: each is right on its own."""


@dataclass(frozen=True, slots=True)
class Change:
    """Parts that are put into a component's text and parts that are taken out of it, together or not at all.

    Args:
        component: the component's name.
        part: the text that is put in; empty where the change only takes something out.
        replaces: the text that goes out for it; empty for none.
        adds, removes: the same as parts of the weave.
        needs: numbers of changes without which it makes no sense: it stands under what they put in.
        claims: of changes that claim the same, one is in a text: they take out the same part, say the same in the same
            section, or are most of a text.
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


MOST_PARTS = 400
"""A longer text is not taken apart: comparing thousands of equal sentences takes minutes. Real ones have 30 to 100."""

IsEdited = Callable[[str], bool]


def never_edited(text: str) -> bool:
    """For texts that were written as a whole."""
    del text
    return False


def changes_between(
    parent: Mapping[str, str], child: Mapping[str, str], code: Collection[str], is_edited: IsEdited = never_edited
) -> list[Change] | None:
    """What a child changes in its parent; None where it stands for itself.

    Args:
        parent, child: component -> text.
        code: components that hold code, which is not taken apart.
        is_edited: see `Weave`.
    """
    weave = Weave(parent, code, is_edited)
    return weave.changes if weave.take(frozenset(), child) is not None and weave.changes else None


@dataclass
class _Unit:
    """Some of a child's differences to its parent: the positions of its new parts, and the old parts that go."""

    hunk: int
    section: int
    new: list[int] = field(default_factory=list[int])
    old: list[int] = field(default_factory=list[int])
    is_reworded: bool = False


_FINENESS: tuple[Callable[[int, _Unit], int], ...] = (
    lambda number, unit: number, lambda _, unit: unit.hunk, lambda _, unit: unit.section, lambda *_: 0,
)  # fmt: skip
"""What differences are put together by, from the finest way of taking a child apart to the coarsest."""


class Weave:
    """All parts of a base and of the changes on it, in one order, and the texts that follow.

    Args:
        base: component -> text, on which changes are put.
        code: components that hold code, which is not taken apart.
        is_edited: whether a text was made by edits of its parent. Such a child is a change even if it keeps hardly
            anything: one that goes with no other of its kind. The first edits mostly replace the one line of the seed.
    """

    def __init__(self, base: Mapping[str, str], code: Collection[str], is_edited: IsEdited = never_edited) -> None:
        self.base, self._code, self._is_edited = dict(base), frozenset(code), is_edited
        self.changes: list[Change] = []
        self._parts: list[Part] = []
        self._adders: list[int | None] = []
        """The change that puts each part in; None for the base's own."""
        self._orders: dict[str, list[int]] = {}
        self._spaces: dict[tuple[int, int], str] = {}
        """Part, next part (-1 at the start) -> the space between them, where it is not the usual one."""
        for component, text in self.base.items():
            self._orders[component] = [self._new(part, None) for part in parts_of(text)]

    @staticmethod
    def renumbered(text: str) -> str:
        """A text with its lists numbered as those of composed texts are.

        >>> Weave.renumbered("1. Read.\\n1. Think.\\n2. Answer.")
        '1. Read.\\n2. Think.\\n3. Answer.'
        """
        weave = Weave({"": text}, ())
        return weave._joined(weave._orders[""])

    def compose(self, chosen: Collection[int]) -> dict[str, str]:
        """The base with changes in it.

        Args:
            chosen: their numbers.
        """
        touched = {self.changes[number].component for number in chosen}
        texts = {name: self._joined(self._visible(name, chosen)) for name in touched}
        return {name: texts.get(name, text) for name, text in self.base.items()}

    def take(
        self, chosen: frozenset[int], child: Mapping[str, str], is_edited: bool = False
    ) -> tuple[frozenset[int], bool] | None:
        """Take a child apart into changes, and keep those that are new.

        Args:
            chosen: the changes in its parent.
            child: component -> text.
            is_edited: it was made by edits, whatever is known of its texts.

        Returns:
            The changes in the child, and whether composed they are its text; they are not only where all that it
            adds is known already, and stands elsewhere. None where the child stands for itself.
        """
        changes, parts = len(self.changes), len(self._parts)
        orders, spaces = {name: list(order) for name, order in self._orders.items()}, dict(self._spaces)
        for reuses in (True, False):  # first with changes that others have made already
            numbers = self._taken(chosen, child, reuses, is_edited)
            if numbers is not None and self._is(child, numbers):
                return numbers, True
            if numbers is not None and reuses and len(self.changes) == changes:
                return numbers, False
            del self.changes[changes:], self._parts[parts:], self._adders[parts:]
            self._orders, self._spaces = {name: list(order) for name, order in orders.items()}, dict(spaces)
        return None

    def _is(self, texts: Mapping[str, str], numbers: Collection[int]) -> bool:
        """Whether that is what the base is with these changes."""
        return all(same_text(text) == same_text(texts[name]) for name, text in self.compose(numbers).items())

    def numbers_in(self, texts: Mapping[str, str]) -> frozenset[int] | None:
        """The changes of which a candidate is composed; None where it is not."""
        there: set[int] = set()
        for component, text in texts.items():
            order, parts = self._orders[component], parts_of(text)
            faces = [face_of(self._parts[key].text) for key in order], [face_of(part.text) for part in parts]
            for block in difflib.SequenceMatcher(None, *faces, autojunk=False).get_matching_blocks():
                there.update(order[block.a : block.a + block.size])
            said = {wording_of(self._parts[key]) for key in there if self._adders[key] is None} - {""}
            for key in order:  # what another part says may be there as well: it is not seen
                if key in there:
                    said |= {wording_of(self._parts[key])} - {""}
                elif wording_of(self._parts[key]) in said:
                    there.add(key)
        numbers = frozenset(
            number
            for number, change in enumerate(self.changes)
            if (there.issuperset(change.adds) if change.adds else there.isdisjoint(change.removes))
        )
        return numbers if self._is(texts, numbers) else None

    def stand_on(self, texts: Mapping[str, str]) -> list[int]:
        """Put changes on another base; those of components that are different there are gone.

        Returns:
            The old numbers of the changes that are left.
        """
        kept = [at for at, change in enumerate(self.changes) if texts[change.component] == self.base[change.component]]
        numbers = {old: new for new, old in enumerate(kept)}
        for component in [name for name, text in texts.items() if text != self.base[name]]:
            self._orders[component] = [self._new(part, None) for part in parts_of(texts[component])]
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
            "orders": self._orders,
            "spaces": [[*pair, space] for pair, space in self._spaces.items()],
        }

    @classmethod
    def restored(cls, kept: Mapping[str, Any], code: Collection[str], is_edited: IsEdited = never_edited) -> Weave:
        """The weave that was kept."""
        weave = cls({}, code, is_edited)
        weave.base, weave._orders = dict(kept["base"]), {name: list(order) for name, order in kept["orders"].items()}
        weave._parts, weave._adders = [Part(*fields) for fields in kept["parts"]], list(kept["adders"])
        weave._spaces = {(left, right): space for left, right, space in kept["spaces"]}
        for record in kept["changes"]:
            fields: dict[str, Any] = {**record, "claims": frozenset(record["claims"])}
            for name in ("adds", "removes", "needs"):
                fields[name] = tuple(record[name])
            weave.changes.append(Change(**fields))
        return weave

    def _new(self, part: Part, adder: int | None) -> int:
        self._parts.append(part)
        self._adders.append(adder)
        return len(self._parts) - 1

    def _visible(self, component: str, chosen: Collection[int]) -> list[int]:
        gone = {part for number in chosen for part in self.changes[number].removes}
        adders = {None, *chosen}
        ids = [key for key in self._orders[component] if self._adders[key] in adders and key not in gone]
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
        known = self._spaces.get((left, right))
        return self._usual_space(left, right) if known is None else known

    def _usual_space(self, left: int, right: int) -> str:
        """Between parts that come from different places: no blank line between the items of a list, else the larger."""
        if left < 0:
            return ""
        before, after = self._parts[left], self._parts[right]
        spaces = [space for space in (before.after, after.before) if space] or ["\n"]
        if is_item(before) and is_item(after):
            return min([space for space in spaces if "\n" in space] or ["\n"], key=_size)
        space = max(spaces, key=_size)
        is_prose = not any(is_item(part) or level_of(part) < 8 or "\n" in part.text for part in (before, after))
        return space if "\n" in space or is_prose else "\n"

    def _taken(
        self, chosen: frozenset[int], child: Mapping[str, str], reuses: bool, edits: bool
    ) -> frozenset[int] | None:
        """The changes in a child, of which new ones are woven in; None for a rewrite."""
        numbers, parent = set(chosen), self.compose(chosen)
        for component, text in child.items():
            before = parent[component]
            if text == before:
                continue
            if component in self._code or any(is_json(source) or ends_in_fence(source) for source in (before, text)):
                return None
            old, new = self._visible(component, chosen), parts_of(text)
            if max(len(old), len(new)) > MOST_PARTS:
                return None
            is_edited = edits or self._is_edited(text)
            units, pairs = self._units(old, new, is_edited)
            reworded = sum(unit.is_reworded for unit in units)
            is_rewrite = (old and not pairs) or len(pairs) + reworded < KEPT * len(old)
            if not new or (is_rewrite and not is_edited):
                return None
            ways = (_grouped(units, key) for key in _FINENESS)
            groups = next(groups for groups in ways if is_edited or len(groups) <= MOST_CHANGES)
            self._weave_in(component, numbers, new, pairs, groups, reuses)
        return frozenset(numbers)

    def _units(self, old: Sequence[int], new: Sequence[Part], is_edited: bool) -> tuple[list[_Unit], dict[int, int]]:
        """How a child's parts differ from its parent's, as finely as makes sense.

        Returns:
            The differences in the order of the text, and position in the child -> part that it keeps.
        """
        old_parts = [self._parts[key] for key in old]
        faces = [face_of(part.text) for part in old_parts], [face_of(part.text) for part in new]
        sections, section = list[int](), 0
        for part in new:
            section += level_of(part) < 8
            sections.append(section)
        pairs: dict[int, int] = {}
        units: list[_Unit] = []
        opcodes = difflib.SequenceMatcher(None, *faces, autojunk=False).get_opcodes()
        for kind, start, end, new_start, new_end in opcodes:
            if kind == "equal":
                pairs |= dict(zip(range(new_start, new_end), old[start:end], strict=True))
        beside = set(pairwise([-1, *old]))
        for at in range(len(new)):
            left, right = pairs.get(at - 1, -1 if at == 0 else None), pairs.get(at)
            if left is None or right is None or (left, right) not in beside:
                continue
            if same_text(f"|{self._space(left, right)}|") != same_text(f"|{new[at].before}|"):
                units.append(_Unit(-at - 1, sections[at], [at], [pairs.pop(at)], is_reworded=True))
        for hunk, (kind, start, end, new_start, new_end) in enumerate(opcodes):
            if kind == "equal":
                continue
            if kind == "insert":
                new_start, new_end = _slid(new, pairs, new_start, new_end)
            here = sections[new_start] if new_start < len(new) else section
            at = start
            run = _Unit(hunk, here)
            for position in range(new_start, new_end):
                place = next(
                    (
                        candidate
                        for candidate in range(at, end)
                        if _rewords(new[position], old_parts[candidate], [*old_parts, *new])
                    ),
                    None,
                )
                if place is None:
                    run.new.append(position)
                    continue
                run.old += old[at:place]
                units += self._split(run, new, is_edited)
                units.append(_Unit(hunk, here, [position], [old[place]], is_reworded=True))
                at, run = place + 1, _Unit(hunk, here)
            run.old += old[at:end]
            units += self._split(run, new, is_edited)
        gone = {face_of(self._parts[key].text): unit for unit in units if not unit.new for key in unit.old}
        for unit in [unit for unit in units if not unit.old]:
            source = next((gone[face] for at in unit.new if (face := face_of(new[at].text)) in gone), None)
            if source is not None and source.old:  # the part has moved: it is not to stand in both places, or in none
                unit.old, source.old = source.old, []
        return sorted((unit for unit in units if unit.new or unit.old), key=lambda unit: unit.new[:1]), pairs

    def _split(self, run: _Unit, new: Sequence[Part], is_edited: bool) -> list[_Unit]:
        """What of a run of differences makes sense alone: all that goes in another's place, but for rules of one form;
        sections with what is under them; else each part. Of edits, which are right each on its own, a line goes in each
        old part's place, and the others are additions."""
        if not run.new:
            return [run] if run.old else []
        old, leads = [self._parts[key] for key in run.old], any(level_of(new[at]) < 9 for at in run.new)
        if is_edited and old and not leads and all(level_of(other) > 8 for other in old):
            lines = list[list[int]]()
            for at in run.new:
                lines += [[]] if not lines or "\n" in new[at].before else []
                lines[-1].append(at)
            if len(old) in (1, len(lines)):
                replaced = [_Unit(run.hunk, run.section, at, [key]) for at, key in zip(lines, run.old, strict=False)]
                return replaced + [_Unit(run.hunk, run.section, at) for at in lines[len(old) :]]
        has_form = any(is_worded_as(new[at], other) for at in run.new for other in old)
        if old and (leads or not has_form or any(level_of(other) < 9 for other in old)):
            return [run]
        units = [_Unit(run.hunk, run.section, [], [key]) for key in run.old]
        level = 9
        for at in run.new:
            mine = level_of(new[at])
            begins = mine <= level and (mine < 8 or new[at].before.count("\n") > 1) if leads else True
            if at == run.new[0] or begins:
                units.append(_Unit(run.hunk, run.section))
                level = mine
            units[-1].new.append(at)
        return units

    def _weave_in(
        self,
        component: str,
        numbers: set[int],
        new: Sequence[Part],
        pairs: Mapping[int, int],
        groups: Sequence[_Unit],
        reuses: bool,
    ) -> None:
        """Put a child's differences into the weave as changes, and have ``numbers`` be the changes in the child."""
        kept = set(pairs.values())
        lost = {
            number
            for number in numbers
            if self.changes[number].component == component and self.changes[number].adds
            and kept.isdisjoint(self.changes[number].adds)
        }  # fmt: skip
        numbers -= lost
        surplus = set(self._visible(component, numbers)) - kept
        order, sections = self._orders[component], sections_of(new)
        known = {change.identity: at for at, change in enumerate(self.changes) if at not in numbers}
        ids, size = dict(pairs), sum(len(part.text) for part in new)
        for group in groups:
            dropped = lost.intersection(self._adders[key] for key in group.old)
            back = {part for number in dropped for part in self.changes[number].removes}
            said = {wording_of(self._parts[key]) for key in group.old} - {""}
            removes = tuple(
                key
                for key in order
                if key in surplus and (key in group.old or key in back or wording_of(self._parts[key]) in said)
            )
            parts = [new[at] for at in group.new]
            if not parts and not removes:
                continue
            section = sections[group.new[0]] if parts else ""
            identity = repr((component, section, [normal(part.text) for part in parts], removes))
            if reuses and identity in known:
                numbers.add(known[identity])
                continue
            number, needs = len(self.changes), set[int | None]()
            needs |= {self._adders[key] for key in removes}
            claims = {f"-{key}" for key in removes} | {f"+{key}" for key in group.old if self._adders[key] in dropped}
            if len(parts) > MOST_CHANGES and 2 * sum(len(part.text) for part in parts) > size:
                claims.add(f"most of {component}")
            adds: list[int] = []
            for at in sorted(group.new):
                left = next((ids[position] for position in range(at - 1, -1, -1) if position in ids), None)
                right = next((ids[position] for position in range(at + 1, len(new)) if position in pairs), None)
                place = self._place(order, left, right, removes, new[at], follows=at - 1 in group.new)
                ids[at] = self._new(new[at], number)
                order.insert(place, ids[at])
                adds.append(ids[at])
                adder = self._adders[left] if left is not None and at - 1 in pairs else None
                if adder is not None and len(self.changes[adder].adds) > 1 and level_of(new[at]) > 7:
                    needs.add(adder)
                if len(words_of(new[at].text)) > 2 or level_of(new[at]) < 8:
                    claims.add(f"{component} {sections[at]}: {title_of(new[at])}")
            claims |= {f"+{key}" for key in adds}
            text = self._joined(adds)
            replaces = self._joined(removes)
            self.changes.append(
                Change(
                    component, text, replaces, tuple(adds), removes,
                    tuple(sorted(need for need in needs if need is not None)), frozenset(claims), identity,
                )
            )  # fmt: skip
            numbers.add(number)
        for at, (left, right) in enumerate(pairwise([-1, *(ids.get(at, -1) for at in range(len(new)))])):
            if right >= 0 and (left >= 0 or at == 0) and self._space(left, right) != new[at].before:
                self._spaces.setdefault((left, right), new[at].before)

    def _place(
        self, order: Sequence[int], left: int | None, right: int | None, removes: Collection[int], part: Part,
        *, follows: bool,
    ) -> int:  # fmt: skip
        """Where a new part goes between its neighbours: to what it replaces, else by its words among what others put
        there, so that it does not matter which child came first."""
        at = 0 if left is None else order.index(left) + 1
        end = len(order) if right is None else order.index(right)
        if follows:
            return at
        gone = [place for place in range(at, end) if order[place] in removes]
        if gone:
            return gone[-1] + 1
        mine = _rank(part)
        while at < end and (
            _rank(self._parts[order[at]]) <= mine
            or (
                at > 0
                and self._adders[order[at]] is not None
                and self._adders[order[at]] == self._adders[order[at - 1]]
            )
        ):
            at += 1
        return at


def _grouped(units: Iterable[_Unit], key: Callable[[int, _Unit], int]) -> list[_Unit]:
    groups: dict[int, _Unit] = {}
    for number, unit in enumerate(units):
        group = groups.setdefault(key(number, unit), _Unit(unit.hunk, unit.section))
        group.new += unit.new
        group.old += unit.old
    return list(groups.values())


def _size(space: str) -> tuple[int, int]:
    return space.count("\n"), len(space)


def _rank(part: Part) -> tuple[int, str]:
    """Parts that stand in the same place: what goes on with a section before a heading, then by their words."""
    return (0 if level_of(part) > 7 else 1), normal(part.text)


def _rewords(part: Part, other: Part, all_parts: Iterable[Part]) -> bool:
    """Whether a part is another one in other words; not where others are as much like it (rules of one form, each with
    a word of its own), so that it may be another rule."""
    if level_of(part) < 8 and level_of(other) == level_of(part):
        return True  # in the same hunk: the section has another name
    if level_of(part) != level_of(other) or not is_worded_as(part, other):
        return False
    faces = {face_of(part.text), face_of(other.text)}
    return not any(
        is_worded_as(other, third) and likeness(part, third) >= likeness(part, other)
        for third in all_parts
        if face_of(third.text) not in faces
    )


def _slid(new: Sequence[Part], pairs: dict[int, int], start: int, end: int) -> tuple[int, int]:
    """Of the places where the same insertion may be said to begin, the one with most space before it.

    After "Input: ... Output: ..." another such record is what was put in, not the end of one and the start of the next.
    """
    best = start
    at, stop = start, end
    while at > 0 and at - 1 in pairs and face_of(new[at - 1].text) == face_of(new[stop - 1].text):
        at, stop = at - 1, stop - 1
        if (-level_of(new[at]), _size(new[at].before)) > (-level_of(new[best]), _size(new[best].before)):
            best = at
    for _ in range(start - best):
        start, end = start - 1, end - 1
        pairs[end] = pairs.pop(start)
    return start, end
