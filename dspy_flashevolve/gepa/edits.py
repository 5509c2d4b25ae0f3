"""Proposals as edits: the reflection LM sees an instruction as numbered parts and says what to add, replace or remove.

A reply is a fifth as long as a whole new instruction, and what it changes is known exactly: a part that no edit names
stays as it is, word for word.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal

import dspy
from dspy.clients.errors import LMError
from dspy.teleprompt.gepa.instruction_proposal import InstructionProposer
from pydantic import BaseModel, Field, ValidationError

from dspy_flashevolve.gepa.changes import Change
from dspy_flashevolve.gepa.parts import REWORDED, Part, is_json, likeness, parts_of, said_once, wording_of

logger = logging.getLogger(__name__)

MOST_MISSES = 100
"""Brackets at which no JSON begins, after which no further one of a reply is tried: each try may read all of it."""
MOST_UNREADABLE = 3
"""Replies in a row that held no edit, after which whole texts are asked for at once. One unreadable reply costs one
request more; a model that cannot write edits would pay for two requests a reflection to the end of the run."""

TASK = """\
An assistant performs a task with the instruction below, whose parts are numbered. You are given inputs of the task, the
assistant's response to each, and feedback on how the response could be better.

Improve the instruction. Read all inputs, responses and feedback. Record what they reveal about the task: the format of
input and output, rules, facts that the assistant cannot know by itself, and strategies that work beyond these examples.
Leave out what helps only with these very inputs."""
FORM = """\
Reply with one to twelve edits of the numbered parts. Each edit must be right on its own: it may be kept while the
others are dropped, so two edits never depend on each other. Leave parts alone that are not wrong, and do not reword
them. Others edit the same instruction at the same time: what is new on a subject that a part treats already, such as
another case or another example, goes behind that part as a short part of its own. Replace a part only where it is
wrong, and remove it where it misleads. After a mistake, write what tells the two cases apart, and not that one is never
the other. A new part says one thing, is understood without its neighbours (it names again what it is about), and has
their form: an item in a list, a heading where a section begins, else a sentence. Write no part numbers in a text."""


Proposing = Generator[tuple[dspy.Predict, dict[str, Any]], Any, str]
"""Yields a predictor with its inputs, is sent the reply (or the error that it raised), and returns a text."""


class Edit(BaseModel):
    """One edit of an instruction whose parts are numbered from 1."""

    action: Literal["add", "replace", "remove"] = Field(
        description="add: put the text behind the part; replace: put it in the part's place; remove: take the part out."
    )
    part: int = Field(description="The number of the part; 0 for an addition at the start.")
    text: str = Field(default="", description="The new part; empty to remove one.")
    reason: str = Field(default="", description="In half a sentence, what in the feedback asks for it.")


class EditProposer(InstructionProposer):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
    """Asks the reflection LM for edits; an instruction proposer for gepa and dspy.GEPA, with an awaitable ``acall``.

    What dspy's ``InstructionProposer`` can be told (skills, further instructions, a limit on characters, ...) holds
    here, too. A reply that holds no edit is asked for once more, as a whole text.

    Args:
        settings: an `InstructionProposer`, whose settings are taken over.
    """

    def __init__(self, settings: Any) -> None:
        self.__dict__.update(vars(settings))
        self._unreadable = 0
        self._edited = set[str]()
        signature = self.propose.signature.delete("new_instruction")
        description = "The instruction; each part begins with its number in brackets, which is no part of it."
        signature = signature.with_updated_fields("current_instruction", desc=description)
        signature = signature.append("edits", dspy.OutputField(desc="The edits."), list[Edit])
        self.propose_edits = dspy.Predict(signature.with_instructions(f"{self.base_instructions or TASK}\n\n{FORM}"))

    def __call__(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """The new instruction of each component; one that is in neither argument is left out.

        Raises:
            ValueError: a reply held neither edits nor a text.
        """
        texts: dict[str, str] = {}
        with dspy.context(adapter=self.adapter):
            for name in self._known(candidate, reflective_dataset, components_to_update):
                proposing = self._proposing(candidate[name], reflective_dataset[name])
                request, text = _advanced(proposing)
                while request is not None:
                    predictor, inputs = request
                    try:
                        outcome = predictor(**inputs)
                    except Exception as error:
                        outcome = error
                    request, text = _advanced(proposing, outcome)
                texts[name] = text
        return texts

    async def acall(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """As a call, awaitable."""
        texts: dict[str, str] = {}
        with dspy.context(adapter=self.adapter):
            for name in self._known(candidate, reflective_dataset, components_to_update):
                proposing = self._proposing(candidate[name], reflective_dataset[name])
                request, text = _advanced(proposing)
                while request is not None:
                    predictor, inputs = request
                    try:
                        outcome = await predictor.acall(**inputs)
                    except Exception as error:
                        outcome = error
                    request, text = _advanced(proposing, outcome)
                texts[name] = text
        return texts

    @staticmethod
    def _known(candidate: Mapping[str, str], dataset: Mapping[str, Any], names: Sequence[str]) -> list[str]:
        return [name for name in names if name in candidate and name in dataset]

    def _proposing(self, instruction: str, examples: Sequence[Mapping[str, Any]]) -> Proposing:
        """The requests for one component, each with the reply or the error that is sent back; returns the new text."""
        inputs = self._settings() | {"examples_with_feedback": self._prepare_examples(examples)}
        if self._unreadable < MOST_UNREADABLE and not is_json(instruction):
            text = yield from self._improving(instruction, inputs)
            if text:
                self._unreadable = 0
                return (yield from self._shortening(text))
            self._unreadable += 1
        reply = yield self.propose, {**inputs, "current_instruction": instruction}
        return (yield from self._shortening(reply.new_instruction))

    def _settings(self) -> dict[str, Any]:
        """The inputs that all requests share. They stand first, so that a provider can cache that part."""
        settings: dict[str, Any] = {}
        if self.skills:
            settings["reference_skills"] = "\n\n".join(map(render_skill, self.skills))
        if self.additional_instructions:
            settings["additional_instructions"] = self.additional_instructions
        if self.compress is not None:
            settings["length_limit"] = self._length_limit_text()
        return settings

    def _improving(self, instruction: str, inputs: Mapping[str, Any]) -> Proposing:
        """The instruction with the edits of a reply, or the whole text that came in their place; empty for neither."""
        try:
            reply = yield self.propose_edits, {**inputs, "current_instruction": numbered(instruction)}
            return self._noted(edited(instruction, reply.edits or []))
        except LMError:
            raise
        except Exception as error:
            written = str(getattr(error, "lm_response", None) or "")
            edits = edits_in(written)
            if not edits:
                logger.info("A reflection's reply held no edits: %.200s", error)
            return self._noted(edited(instruction, edits)) if edits else unnumbered(whole_text_in(written), instruction)

    def _noted(self, text: str) -> str:
        self._edited.add(text.strip())
        return text

    def is_edited(self, text: str) -> bool:
        """Whether a text was made here by edits, and not written as a whole."""
        return text.strip() in self._edited

    def _shortening(self, text: str) -> Proposing:
        """The text, within the proposer's limit; shortened by one request where it is too long.

        Raises:
            ValidationError: it is empty, or was too long after that, too.
        """
        try:
            return self._instruction_validator.validate_python(text)
        except ValidationError:
            if self.compress is None or not text.strip():
                raise
        shortened = yield self.compress, {"instruction": text, "length_limit": self._length_limit_text()}
        return self._instruction_validator.validate_python(shortened.shortened_instruction)


def _advanced(proposing: Proposing, outcome: Any = None) -> tuple[tuple[dspy.Predict, dict[str, Any]] | None, str]:
    """Send a reply, or the error in its place; the next request, or None and the text that is returned."""
    try:
        if isinstance(outcome, Exception):
            return proposing.throw(outcome), ""
        return proposing.send(outcome), ""
    except StopIteration as end:
        return None, end.value


def numbered(instruction: str) -> str:
    """An instruction as the reflection LM sees it.

    >>> print(numbered("Answer.\\n- Be brief."))
    [1] Answer.
    [2] - Be brief.
    """
    return "\n".join(f"[{number}] {part.text}" for number, part in enumerate(parts_of(instruction), start=1))


_NUMBER = re.compile(r"\A\s*\[\d{1,4}\]\s?")


def unnumbered(text: str, instruction: str) -> str:
    """A whole text without the numbers that a model has copied from the parts that it was shown.

    >>> unnumbered("[1] Answer. Think.", "Answer."), unnumbered("[1] A. Smith", "See:\\n[1] A. Smith, 2001")
    ('Answer. Think.', '[1] A. Smith')
    """
    return text if _LINE_NUMBER.search(instruction) else _LINE_NUMBER.sub("", text)


_LINE_NUMBER = re.compile(r"^[ \t]*\[\d{1,4}\] ?", re.MULTILINE)


def edited(instruction: str, edits: Sequence[Edit]) -> str:
    """The instruction that edits make of one.

    An edit of a part that is not there is left out. Of several replacements of one part the first goes in its place,
    the others behind it. An item that is put behind the last one of a list joins the list. What another part says
    already, word for word, is not put in.

    >>> edited("Answer.\\n- Be brief.\\n\\nThanks.", [Edit(action="add", part=2, text="- Be kind.")])
    'Answer.\\n- Be brief.\\n- Be kind.\\n\\nThanks.'
    """
    parts = parts_of(instruction)
    kept: dict[int, str | None] = {number: part.text for number, part in enumerate(parts, start=1)}
    added: dict[int, list[str]] = {}
    changed: set[int] = set()
    said = Counter(map(wording_of, parts))
    for edit in edits:
        number = min(max(edit.part, 0), len(parts)) if edit.action == "add" else edit.part
        if edit.action != "add" and number in kept:
            said[wording_of(parts[number - 1])] -= 1
        new = parts_of(_NUMBER.sub("", edit.text).strip("\n").rstrip())
        text = "".join(new[at].before + new[at].text for at in said_once(new, +said)).strip("\n")
        said.update(map(wording_of, new))
        if edit.action == "add" or number in changed:
            added.setdefault(number, []).extend([text] if text else [])
        elif number in kept and (text or new or edit.action == "remove"):
            changed.add(number)
            kept[number] = text or None if edit.action == "replace" else None
    written = ""
    gap = _BLANK
    for number, own in [(0, None), *kept.items()]:
        after = parts[number - 1].after if number else "\n"
        block = [*([own] if own else []), *added.get(number, [])]
        for position, text in enumerate(block):
            is_own = own is not None and position == 0
            written += (gap if is_own else _gap(written, text, after)) if written else ""
            written += text
        gap = after if block else max(gap, after, key=len)
    return written


RELATED = 0.3
"""Share of their words that a part and a change have in common, from which the change belongs behind the part; else it
goes to the end. Lines on one label of `symptom2disease` share more, lines on two share less."""


def put_into(instruction: str, change: Change) -> str:
    """An instruction with a change in it that was made in another text: in the place of the part that it replaces, as
    far as that is there, else behind the part that is most like it.

    >>> change = Change("self", "- Be kind.", "", (), (), (), frozenset(), "")
    >>> put_into("Answer.\\n- Be brief.\\n\\nThanks.", change)
    'Answer.\\n- Be brief.\\n- Be kind.\\n\\nThanks.'
    """
    parts = parts_of(instruction)

    def nearest(part: Part, least: float) -> int:
        alike = [likeness(part, other) for other in parts]
        return alike.index(max(alike)) + 1 if alike and max(alike) >= least else 0

    gone = list(dict.fromkeys(place for part in parts_of(change.replaces) if (place := nearest(part, REWORDED))))
    edits = [Edit(action="remove", part=place) for place in gone]
    new = parts_of(change.part)
    if new and gone:
        edits[0] = Edit(action="replace", part=gone[0], text=change.part)
    elif new:
        edits = [Edit(action="add", part=nearest(new[0], RELATED) or len(parts), text=change.part)]
    return edited(instruction, edits)


_BLANK = "\n\n"
_ITEM = re.compile(r"\A[ \t]*(?:[-*+•]|\d{1,3}[.)])\s")
_STARTS_LINE = re.compile(r"\A(?:#|\*\*|<|```|\|)")


def _gap(above: str, text: str, after: str) -> str:
    """The space before a new part: none that is blank inside a list, one line before a section, else as behind the part
    above it."""
    if _ITEM.match(text) and _ITEM.match(above.rpartition("\n")[2] if "\n" in above else above):
        return "\n"
    if _STARTS_LINE.match(text):
        return _BLANK
    if _ITEM.match(text) or "\n" in text:
        return "\n"
    return after or "\n"


def edits_in(reply: str) -> list[Edit]:
    """The edits in a reply that is not in the form that was asked for: tags, or JSON with words around it.

    >>> edits_in('Here you are: <replace part="2">- Be brief.</replace>')
    [Edit(action='replace', part=2, text='- Be brief.', reason='')]
    """
    edits = [
        Edit(action=action, part=int(number), text=text)  # pyright: ignore[reportArgumentType]
        for action, number, text in _TAG.findall(reply)
    ]
    return edits or [edit for value in _json_values(reply) for edit in _edits_of(value)]


_TAG = re.compile(r'<(add|replace|remove)\s+(?:after|part)="?(\d{1,4})"?\s*(?:/>|>(.*?)</\1>)', re.DOTALL)


def _json_values(reply: str) -> list[Any]:
    """The outermost JSON objects and lists in a text."""
    decoder, values, at, misses = json.JSONDecoder(strict=False), list[Any](), 0, 0
    while (
        misses < MOST_MISSES
        and (start := min((place for mark in "{[" if (place := reply.find(mark, at)) >= 0), default=-1)) >= 0
    ):
        try:
            value, at = decoder.raw_decode(reply, start)
            values.append(value)
        except (ValueError, RecursionError):
            at, misses = start + 1, misses + 1
    return values


def _edits_of(value: Any) -> list[Edit]:
    """The edits in a JSON value: a list of them, or an object that is one or holds such a list."""
    if isinstance(value, list):
        return [edit for item in value for edit in _edits_of(item)]
    if not isinstance(value, dict):
        return []
    try:
        return [Edit.model_validate(value)]
    except ValidationError:
        return [edit for item in value.values() if isinstance(item, list) for edit in _edits_of(item)]


_SECTION = re.compile(r"\[\[ ## new_instruction ## \]\]\s*(.*?)\s*(?=\[\[ ## |\Z)", re.DOTALL)


def whole_text_in(reply: str) -> str:
    """The new instruction in a reply that gives one where edits were asked for; empty where there is none.

    >>> whole_text_in('{"new_instruction": "Be brief."}')
    'Be brief.'
    """
    values = [value.get("new_instruction") for value in _json_values(reply) if isinstance(value, dict)]
    texts = [*(value for value in values if isinstance(value, str)), *_SECTION.findall(reply)]
    return texts[-1].strip() if texts else ""


def render_skill(skill: Any) -> str:
    """Reference material as dspy's own proposer shows it."""
    from dspy.teleprompt.gepa.instruction_proposal import _render_skill  # pyright: ignore[reportPrivateUsage]

    return _render_skill(skill)
