"""Proposals as edits: the reflection LM sees an instruction as numbered parts and says what to add, replace or remove.

A reply is a fifth as long as a whole new instruction, and what it changes is known exactly: a part that no edit names
stays as it is, word for word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import dspy
from dspy.teleprompt.gepa.instruction_proposal import (
    InstructionProposer,
    _render_skill,  # pyright: ignore[reportPrivateUsage]
)
from dspy.utils.exceptions import AdapterParseError
from pydantic import ValidationError

from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.gepa.changes import Edit, EditedText
from dspy_flashevolve.gepa.parts import is_json, parts_of
from dspy_flashevolve.modules.reading import asked, result_of, text_in
from dspy_flashevolve.programs.replies import CutOffReplyError, recording_cut_off_replies

logger = logger_named(__name__)

MOST_UNREADABLE = 3
"""Replies in a row that held no edit, after which whole texts are asked for at once. One unreadable reply costs one
request more; a model that cannot write edits would pay for two requests a reflection to the end of the run."""

MOST_EDITS = 100
"""Edits of one reply that are read. It is asked for twelve at most, and their time grows with their square."""

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


class TextProposer(InstructionProposer):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
    """dspy's own instruction proposer, awaitable, which takes no text from a reply that was cut off.

    What ``InstructionProposer`` can be told (skills, further instructions, a limit on characters, ...) holds here, too.

    Args:
        settings: an `InstructionProposer`, whose settings are taken over.
    """

    def __init__(self, settings: Any) -> None:
        self.__dict__.update(vars(settings))

    def __call__(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """The new instruction of each component; one that is in neither argument is left out.

        Raises:
            CutOffReplyError: a text ends where the LM's tokens were used up.
            AdapterParseError: no reply held a text.
            ValidationError: a text is empty, or too long.
        """
        return result_of(self._texts(candidate, reflective_dataset, components_to_update, is_sync=True))

    async def acall(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """As a call, awaitable."""
        return await self._texts(candidate, reflective_dataset, components_to_update, is_sync=False)

    async def _texts(self, candidate: Any, dataset: Any, names: Sequence[str], is_sync: bool) -> dict[str, str]:
        texts: dict[str, str] = {}
        for name in names:
            if name in candidate and name in dataset:
                inputs = self._settings() | {"examples_with_feedback": self._prepare_examples(dataset[name])}
                text = await self._proposed(candidate[name], inputs, is_sync)
                texts[name] = await self._shortened(text, is_sync)
        return texts

    async def _reply(self, predictor: dspy.Predict, inputs: Mapping[str, Any], is_sync: bool) -> Any:
        """Ask a predictor.

        Raises:
            CutOffReplyError: the reply was cut off at its longest length, unless whole edits stand in it.
        """
        with recording_cut_off_replies() as cut_off:
            try:
                reply = await asked(predictor, inputs, is_sync, self.adapter)
            except AdapterParseError:
                if cut_off:  # which is what to tell, and a matter of the LM's settings
                    raise CutOffReplyError(cut_off[0]) from None
                raise
        if cut_off and not getattr(reply, "edits", None):
            raise CutOffReplyError(cut_off[0])
        return reply

    def _settings(self) -> dict[str, Any]:
        """The inputs that all requests share. They stand first, so that a provider can cache that part."""
        settings: dict[str, Any] = {}
        if self.skills:
            settings["reference_skills"] = "\n\n".join(map(_render_skill, self.skills))
        if self.additional_instructions:
            settings["additional_instructions"] = self.additional_instructions
        if self.compress is not None:
            settings["length_limit"] = self._length_limit_text()
        return settings

    async def _proposed(self, instruction: str, inputs: Mapping[str, Any], is_sync: bool) -> str:
        """The new text of a component."""
        reply = await self._reply(self.propose, {**inputs, "current_instruction": instruction}, is_sync)
        return reply.new_instruction

    async def _shortened(self, text: str, is_sync: bool) -> str:
        """The text, within the proposer's limit; shortened by one request where it is too long.

        Raises:
            ValidationError: it is empty, or was too long after that, too.
        """
        try:
            valid = self._instruction_validator.validate_python(text)
            return EditedText(valid, text.edits) if isinstance(text, EditedText) else valid
        except ValidationError:
            if self.compress is None or not text.strip():
                raise
        inputs = {"instruction": text, "length_limit": self._length_limit_text()}
        reply = await self._reply(self.compress, inputs, is_sync)
        return self._instruction_validator.validate_python(reply.shortened_instruction)


class EditProposer(TextProposer):
    """Asks the reflection LM for edits; an instruction proposer for gepa and dspy.GEPA, with an awaitable ``acall``.

    Of a reply that was cut off those edits count that it closes. A reply that holds none is asked for once more, as a
    whole text.

    Args:
        settings: an `InstructionProposer`, whose settings are taken over.
    """

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._unreadable = 0
        signature = self.propose.signature.delete("new_instruction")
        description = "The instruction; each part begins with its number in brackets, which is no part of it."
        signature = signature.with_updated_fields("current_instruction", desc=description)
        signature = signature.append("edits", dspy.OutputField(desc="The edits."), list[Edit])
        self.propose_edits = dspy.Predict(signature.with_instructions(f"{self.base_instructions or TASK}\n\n{FORM}"))

    async def _proposed(self, instruction: str, inputs: Mapping[str, Any], is_sync: bool) -> str:
        if self._unreadable < MOST_UNREADABLE and not is_json(instruction):
            text = await self._improved(instruction, inputs, is_sync)
            if text:
                self._unreadable = 0
                return text
            self._unreadable += 1
        return await super()._proposed(instruction, inputs, is_sync)

    async def _improved(self, instruction: str, inputs: Mapping[str, Any], is_sync: bool) -> str:
        """The instruction with the edits of a reply, or the whole text that came in their place; empty for neither."""
        inputs = {**inputs, "current_instruction": numbered(instruction)}
        try:
            reply = await self._reply(self.propose_edits, inputs, is_sync)
        except (AdapterParseError, ValueError) as error:
            logger.info("A reflection's reply held no edits: %.200s", error)
            return unnumbered(text_in(getattr(error, "lm_response", ""), "new_instruction") or "", instruction)
        return EditedText.of(instruction, (reply.edits or ())[:MOST_EDITS])


def numbered(instruction: str) -> str:
    """An instruction as the reflection LM sees it.

    >>> print(numbered("Answer.\\n- Be brief."))
    [1] Answer.
    [2] - Be brief.
    """
    return "\n".join(f"[{number}] {part.text}" for number, part in enumerate(parts_of(instruction), start=1))


def unnumbered(text: str, instruction: str) -> str:
    """A whole text without the numbers that a model has copied from the parts that it was shown.

    >>> unnumbered("[1] Answer. Think.", "Answer."), unnumbered("[1] A. Smith", "See:\\n[1] A. Smith, 2001")
    ('Answer. Think.', '[1] A. Smith')
    """
    return text if _LINE_NUMBER.search(instruction) else _LINE_NUMBER.sub("", text)


_LINE_NUMBER = re.compile(r"^[ \t]*\[\d{1,4}\] ?", re.MULTILINE)
