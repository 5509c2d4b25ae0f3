"""The playbook: bullets in sections, which is rendered as text at the end of a program's instructions, and its writer.

A bullet gets its counters from `PlaybookWriter`: `tag` counts what reflectors say of the bullets that an attempt cited
(`learner.py` asks them, `operations.py` reads their tags), and `apply` counts one "helpful" where a curator adds what
a bullet says already. They stand in the rendered text, and decide which bullets make room.

Source: ACE (arXiv 2510.04618) section 3: itemized bullets with identifiers and counters, changed by deltas.
"""

from __future__ import annotations

import json
import math
import os
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.observe.statistics import Problem

Tag = Literal["helpful", "harmful", "neutral"]
TAGS: tuple[Tag, ...] = ("helpful", "harmful", "neutral")
"""The judgements that a reflection can make of a cited bullet."""

SECTIONS = ("strategies", "formulas", "mistakes", "other")
"""The default sections of a playbook."""
MOST_NUMBER = 10**9
"""Bound of the number in a bullet's id: the patterns below read nine digits."""
_SECTION = re.compile(r"[A-Za-z](?:[A-Za-z0-9_ -]{0,58}[A-Za-z0-9_-])?")
_LINE = re.compile(r"\[([a-z]{1,3}-[0-9]{1,9})\] helpful=([0-9]{1,9}) harmful=([0-9]{1,9}) (.*)")
_ID = re.compile(r"\b[a-z]{1,3}-[0-9]{1,9}\b")

CountTokens = Callable[[str], int]
"""A function from a text to its number of tokens."""
OPENING, CLOSING = "<playbook>", "</playbook>"
"""The marks around a rendered playbook, by which it is found in an instruction and taken out again."""
GUIDE = (
    "What was learnt from earlier tasks; each line has its id, and how often it helped and harmed. Apply the lines "
    "that fit the task, ignore the others."
)
_NEXT = "Next number: "
_MARKS = re.compile(r"</?\s*playbook\s*>", re.IGNORECASE)
_BLOCK = re.compile(rf"\s*{OPENING}\n{re.escape(GUIDE)}(?: {_NEXT}([0-9]{{1,10}})\.)?[^\n]*\n.*?{CLOSING}", re.DOTALL)


def approximate_tokens(text: str) -> int:
    """Estimate the tokens of a text without a tokenizer: one for every four bytes, OpenAI's rule of thumb for
    English."""
    return math.ceil(len(text.encode("utf-8", "replace")) / 4)


@dataclass(frozen=True, slots=True)
class Bullet:
    """One lesson, with counters of how often it helped.

    Args:
        id: unique in its playbook; never given to another bullet.
        section: name of one of the playbook's sections.
        content: the text; stripped, not empty.
        helpful, harmful: how often a reflection tagged it so, of the times that it was cited; see `PlaybookWriter`.
        created_version: the version of the playbook that added it.
    """

    id: str
    section: str
    content: str
    helpful: int = 0
    harmful: int = 0
    created_version: int = 0

    @property
    def worth(self) -> int:
        """Times that it helped less times that it harmed."""
        return self.helpful - self.harmful


@dataclass(frozen=True)
class Playbook:
    """Bullets in sections. A playbook is immutable: each change returns a new one.

    The version counts changes of the bullets' texts. Counters do not change it.

    Args:
        sections: their names, in order; bullets belong to one of them.
        bullets: in the order in which they came.
        next_number: of the next bullet's id; numbers only grow, so that no id is used twice.
        version: changes so far.

    Raises:
        ConfigurationError: no section, a name that cannot be one, an id twice, a bullet without content, of no section
            or from a later version.

    Examples:
        >>> playbook = Playbook(sections=("strategies",)).adding("strategies", "Round at the end.")
        >>> playbook.render().splitlines()[2:]
        ['## strategies', '[str-1] helpful=0 harmful=0 Round at the end.', '</playbook>']
    """

    sections: tuple[str, ...] = SECTIONS
    bullets: tuple[Bullet, ...] = ()
    next_number: int = 1
    version: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "sections", checked_sections(self.sections))
        object.__setattr__(self, "bullets", tuple(self.bullets))
        numbers = {bullet.id.rpartition("-")[2].lstrip("0") for bullet in self.bullets}
        if len(numbers) != len(self.bullets):
            raise ConfigurationError("playbook: two bullets have the same id, or ids with the same number.")
        if not 1 <= self.next_number <= MOST_NUMBER:
            raise ConfigurationError(f"playbook: next_number is {self.next_number!r:.80}, expected 1 to {MOST_NUMBER}.")
        if self.version < 0:
            raise ConfigurationError(f"playbook: version is {self.version}, expected at least 0.")
        for bullet in self.bullets:
            self._check(bullet)

    def _check(self, bullet: Bullet) -> None:
        problem = ""
        if bullet.section not in self.sections:
            problem = f"is of section {bullet.section!r}, expected one of {list(self.sections)}"
        elif cleaned(bullet.content) != bullet.content or not bullet.content:
            problem = f"has content {bullet.content!r:.80}, expected stripped text without playbook marks"
        elif not _ID.fullmatch(bullet.id) or int(bullet.id.rpartition("-")[2]) >= self.next_number:
            problem = f"expected an id like 'str-1', numbered under next_number={self.next_number}"
        elif min(bullet.helpful, bullet.harmful) < 0 or not 0 <= bullet.created_version <= self.version:
            problem = f"has a negative counter, or a created_version outside of 0 to {self.version}"
        if problem:
            raise ConfigurationError(f"playbook: bullet {bullet.id!r} {problem}.")

    def __len__(self) -> int:
        return len(self.bullets)

    def __contains__(self, bullet_id: object) -> bool:
        return any(bullet.id == bullet_id for bullet in self.bullets)

    def get(self, bullet_id: str) -> Bullet | None:
        """Return the bullet with an id; None where there is none."""
        return next((bullet for bullet in self.bullets if bullet.id == bullet_id), None)

    def adding(self, section: str, content: str, *, version: int | None = None) -> Playbook:
        """Return a playbook with one more bullet at the end, whose content is `cleaned`; its version is one more, or
        the given one."""
        version = self.version + 1 if version is None else version
        prefix = "".join(letter for letter in section.lower() if "a" <= letter <= "z")[:3]
        bullet = Bullet(f"{prefix}-{self.next_number}", section, cleaned(content), created_version=version)
        return replace(self, bullets=(*self.bullets, bullet), next_number=self.next_number + 1, version=version)

    def replacing(self, bullets: Iterable[Bullet]) -> Playbook:
        """Return a playbook with other bullets. The version stays, and ids that were used are not used again."""
        return replace(self, bullets=tuple(bullets))

    def tagged(self, tags: Iterable[tuple[str, Tag]]) -> Playbook:
        """Return a playbook in which tags are counted. Tags of unknown ids are ignored; the version stays."""
        count = Counter[tuple[str, str]]()
        for bullet_id, tag in tags:
            if tag not in TAGS:
                raise ConfigurationError(f"playbook: tag {tag!r:.80} of {bullet_id!r:.80}, expected one of {TAGS}.")
            count[bullet_id, tag] += 1
        return self.replacing(
            replace(
                bullet,
                helpful=bullet.helpful + count[bullet.id, "helpful"],
                harmful=bullet.harmful + count[bullet.id, "harmful"],
            )
            for bullet in self.bullets
        )

    def render(self) -> str:
        """Return the text that is put into instructions, with every bullet's counters; empty without bullets."""
        if not self.bullets:
            return ""
        lines = [line for section, own in self._by_section() for line in (f"## {section}", *map(line_of, own))]
        return "\n".join([OPENING, f"{GUIDE} {_NEXT}{self.next_number}.", *lines, CLOSING])

    def to_markdown(self) -> str:
        """Return the playbook as a Markdown document for people, a heading a section.

        >>> print(Playbook().adding("other", "Mind units.").tagged([("oth-1", "helpful")]).to_markdown(), end="")
        # Playbook
        <BLANKLINE>
        ## Other
        <BLANKLINE>
        - Mind units. *(oth-1: helped 1, harmed 0)*
        """
        parts = ["# Playbook"]
        for section, own in self._by_section():
            items = [f"- {b.content} *({b.id}: helped {b.helpful}, harmed {b.harmful})*" for b in own]
            parts += [f"## {section[0].upper()}{section[1:]}", "\n".join(item.replace("\n", "\n  ") for item in items)]
        return "\n\n".join(parts) + "\n"

    def _by_section(self) -> list[tuple[str, list[Bullet]]]:
        """Return the sections that have bullets, each with its own."""
        own = {section: [bullet for bullet in self.bullets if bullet.section == section] for section in self.sections}
        return [(section, bullets) for section, bullets in own.items() if bullets]

    def tokens(self, count_tokens: CountTokens = approximate_tokens) -> int:
        """Return the number of tokens of the rendered playbook."""
        return count_tokens(self.render()) if self.bullets else 0

    def cited(self, text: str) -> tuple[str, ...]:
        """Return the ids of this playbook that a text names, each once, in the order of the text."""
        return tuple(dict.fromkeys(bullet_id for bullet_id in _ID.findall(text.lower()) if bullet_id in self))

    def to_dict(self) -> dict[str, Any]:
        """Return the playbook as plain data, ready for JSON."""
        return {**asdict(self), "sections": list(self.sections), "bullets": [asdict(bullet) for bullet in self.bullets]}

    @classmethod
    def from_dict(cls, data: object) -> Playbook:
        """Build a playbook from the data that `to_dict` returned.

        Raises:
            ConfigurationError: the data are something else; the message says what.
        """
        try:
            playbook = TypeAdapter(cls).validate_python(data)
        except (ValidationError, RecursionError) as error:
            raise ConfigurationError(f"playbook: {error}") from None
        if playbook.to_dict() != data:
            raise ConfigurationError(f"playbook: expected {list(playbook.to_dict())} and no more, got {data!r:.80}.")
        return playbook

    @classmethod
    def from_instructions(cls, instructions: str, sections: Sequence[str] = SECTIONS) -> Playbook | None:
        """Read the playbook that instructions hold, as `render` wrote it; None where they hold none that can be read.

        Its ids are not used again. The version is lost; `save` and `load` keep it. ``sections`` are added to those of
        its bullets.
        """
        block = _BLOCK.search(instructions)
        if block is None:
            return None
        bullets, section = list[Bullet](), ""
        for line in block[0].splitlines():
            match = _LINE.fullmatch(line)
            if line.startswith("## "):
                section = line[3:]
            elif match is not None:
                bullets.append(Bullet(match[1], section, match[4], int(match[2]), int(match[3])))
            elif line.startswith("  ") and bullets:
                bullets[-1] = replace(bullets[-1], content=f"{bullets[-1].content}\n{line[2:]}")
        numbers = {int(bullet.id.rpartition("-")[2]): bullet for bullet in bullets}
        if not bullets:
            return None
        try:
            in_order = tuple(numbers[number] for number in sorted(numbers))
            named = tuple(dict.fromkeys([*sections, *(bullet.section for bullet in bullets)]))
            next_number = max(max(numbers) + 1, int(block[1] or 0))
            return cls(named, in_order, next_number)
        except ConfigurationError:
            return None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the playbook to a file as JSON. An existing file is replaced as a whole or not at all."""
        target = Path(path)
        draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        try:
            draft.write_text(json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Playbook:
        """Read a playbook that `save` wrote.

        Raises:
            ConfigurationError: the file holds no playbook.
            OSError: the file cannot be read.
        """
        try:
            data: object = json.loads(Path(path).read_bytes())
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"playbook: {os.fspath(path)} holds no JSON: {error}.") from error
        return cls.from_dict(data)


def checked_sections(sections: Sequence[str]) -> tuple[str, ...]:
    """Return the names of sections as a tuple, or raise ConfigurationError: none, one twice, or a text that cannot be a
    name."""
    for name in sections:
        if not isinstance(name, str) or not _SECTION.fullmatch(name):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(
                f"playbook: section {name!r:.80}, expected a letter and up to 59 letters, digits, spaces, '-' or '_'."
            )
    if isinstance(sections, str) or not sections or len({name.lower() for name in sections}) != len(sections):
        raise ConfigurationError(f"playbook: sections is {sections!r:.80}, expected one or more names, each once.")
    return tuple(sections)


def line_of(bullet: Bullet) -> str:
    """Return a bullet as an LM is shown it: id, counters, text."""
    text = bullet.content.replace("\n", "\n  ")
    return f"[{bullet.id}] helpful={bullet.helpful} harmful={bullet.harmful} {text}"


def cleaned(content: str) -> str:
    """Return a text without blank lines, surrounding space and playbook marks, which would end the playbook early where
    it is read back from instructions."""
    text = content.encode("utf-8", "replace").decode("utf-8")
    while _MARKS.search(text):
        text = _MARKS.sub("", text)
    return "\n".join(line for line in (line.strip() for line in text.splitlines()) if line)


def attached(instructions: str, playbook_text: str) -> str:
    """Return instructions with a rendered playbook at their end, in place of the one that they had."""
    return "\n\n".join(part for part in (_BLOCK.sub("", instructions), playbook_text) if part)


NEWEST = 4
"""The newest of every four bullets is protected when bullets make room: it has had no chance to be cited yet, and a
full playbook would evict each addition at once."""
LARGEST = 4
"""A bullet may take one fourth of the token budget: a longer one would replace what all samples before have taught."""
MOST_EXAMPLES = 50
"""Problems that are kept with their details, for the statistics; all others are only counted. A run of thousands of
samples would otherwise keep megabytes of broken replies."""
_SAID = re.compile(r"\w+|[+/=<>^%\u00d7\u00f7\u2264\u2265\u2260]|(?<=\w )[-*](?= \w)|-(?=\d)|(?<=\w)\*(?=\w)")
"""The words of a text and its signs of arithmetic; a hyphen and a bullet of a list are none."""


@dataclass(frozen=True, slots=True)
class Add:
    """A curator's operation: add a bullet to a section."""

    section: str
    content: str


@dataclass(frozen=True, slots=True)
class Remove:
    """A curator's operation: remove a bullet."""

    id: str


Operation = Add | Remove


@dataclass
class Counts:
    """Counts of samples and of what became of their operations; `AceStats` explains each field."""

    samples: int = 0
    right_at_once: int = 0
    corrected: int = 0
    reflections: int = 0
    citations: int = 0
    evicted: int = 0
    rolled_back: int = 0
    operations: Counter[str] = field(default_factory=Counter[str])
    tags: Counter[str] = field(default_factory=Counter[str])
    problems: Counter[str] = field(default_factory=Counter[str])
    first_problems: list[Problem] = field(default_factory=list[Problem])


class PlaybookWriter:
    """The one writer of a run: it holds the newest playbook and counts what changed it.

    It is called on the run's event loop only, and awaits nothing, so that a lesson is applied as a whole.
    """

    def __init__(self, playbook: Playbook, token_budget: int, count_tokens: CountTokens) -> None:
        self.playbook, self.counts = playbook, Counts()
        self._token_budget, self._count_tokens = token_budget, count_tokens
        self.rolled_back_version: int | None = None
        """Version that the last rollback made; None before the first."""

    def tag(self, tags: Iterable[tuple[str, Tag]]) -> None:
        """Count tags; a tag of a bullet that has been removed is a problem."""
        for bullet_id, tag in tags:
            if bullet_id in self.playbook:
                self.playbook = self.playbook.tagged([(bullet_id, tag)])
                self.counts.tags[tag] += 1
            else:
                self.note([Problem("tag of a gone bullet", bullet_id)])

    def apply(self, operations: Iterable[Operation]) -> list[Operation]:
        """Apply operations in order, in one new version; return those that were applied.

        An ADD of what a bullet says already raises that bullet's helpful counter instead. Beyond the token budget,
        bullets make room: those that are worth least first, of these the oldest; the newest quarter goes last unless it
        has done harm.
        """
        before = self.playbook
        self.playbook = replace(before, version=before.version + 1)
        applied: list[Operation] = []
        for operation in operations:
            problem = self._add(operation) if isinstance(operation, Add) else self._remove(operation.id)
            if problem is None:
                applied.append(operation)
                self.counts.operations[type(operation).__name__.lower()] += 1
            else:
                self.note([problem])
        while not self._fits(self.playbook):
            by_age = sorted(self.playbook.bullets, key=lambda bullet: bullet.created_version)
            new = {bullet.id for bullet in by_age[-max(1, len(by_age) // NEWEST) :] if bullet.worth >= 0}
            least = min(by_age, key=lambda bullet: (bullet.id in new, bullet.worth))
            self._remove(least.id)
            self.counts.evicted += 1
            self.note([Problem("over the token budget", least.id)])
        if [bullet.id for bullet in self.playbook.bullets] == [bullet.id for bullet in before.bullets]:
            self.playbook = replace(self.playbook, version=before.version, next_number=before.next_number)
        return applied

    def _remove(self, bullet_id: str) -> Problem | None:
        if bullet_id not in self.playbook:
            return Problem("unknown id", bullet_id[:80])
        self.playbook = self.playbook.replacing(bullet for bullet in self.playbook.bullets if bullet.id != bullet_id)
        return None

    def _add(self, operation: Add) -> Problem | None:
        """Add a bullet, or return why not."""
        playbook, detail = self.playbook, operation.content[:200]
        section = next((name for name in playbook.sections if name.lower() == operation.section.lower()), None)
        if section is None:
            return Problem("unknown section", operation.section[:80])
        said = _SAID.findall(operation.content.lower()) or [operation.content]
        for bullet in playbook.bullets:
            if (_SAID.findall(bullet.content.lower()) or [bullet.content]) == said:  # the sample has confirmed it
                self.playbook = playbook.tagged([(bullet.id, "helpful")])
                return Problem("said already", f"{bullet.id}: {detail}"[:200])
        grown = playbook.adding(section, operation.content, version=playbook.version)
        bullet = grown.bullets[-1]
        tokens = self._count_tokens(line_of(bullet))
        if tokens * LARGEST > self._token_budget or not self._fits(grown.replacing([bullet])):
            return Problem("takes too much room", detail)
        self.playbook = grown
        return None

    def roll_back(self, playbook: Playbook) -> None:
        """Go on from an earlier playbook, in a new version, with the counters that its bullets have by now."""
        newest, self.rolled_back_version = self.playbook, self.playbook.version + 1
        bullets = [newest.get(bullet.id) or bullet for bullet in playbook.bullets]
        self.playbook = replace(newest.replacing(bullets), version=self.rolled_back_version)
        self.counts.rolled_back += 1

    def _fits(self, playbook: Playbook) -> bool:
        return playbook.tokens(self._count_tokens) <= self._token_budget

    def note(self, problems: Iterable[Problem]) -> None:
        """Count problems, and keep the first ones."""
        for problem in problems:
            self.counts.problems[problem.kind] += 1
            if len(self.counts.first_problems) < MOST_EXAMPLES:
                self.counts.first_problems.append(problem)

    def to_dict(self) -> dict[str, Any]:
        """Return the state of the writer as plain data, from which `restore` goes on."""
        counts = TypeAdapter(Counts).dump_python(self.counts)
        return {"playbook": self.playbook.to_dict(), "counts": counts, "rolled_back_version": self.rolled_back_version}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Go on from the state that `to_dict` returned."""
        self.playbook = Playbook.from_dict(data["playbook"])
        self.counts = TypeAdapter(Counts).validate_python(data["counts"])
        self.rolled_back_version = data["rolled_back_version"]
