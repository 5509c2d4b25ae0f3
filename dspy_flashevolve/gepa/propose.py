"""Reflection: the reflection LM reads what a parent did on its minibatch, and writes a child.

The order of callbacks and log entries is that of gepa 0.1.4 (``ReflectiveMutationProposer.propose``).
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import dspy
from dspy.teleprompt.gepa.instruction_proposal import (
    InstructionProposer,
    _render_skill,  # pyright: ignore[reportPrivateUsage]
)
from dspy.utils.exceptions import AdapterParseError
from pydantic import ValidationError

from dspy_flashevolve.engine.errors import FlashEvolveError
from dspy_flashevolve.engine.requests import Call, RequestCost
from dspy_flashevolve.engine.steps import End, EndKind, Step, StepEnded
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.gepa.admission import ReflectionCalls
from dspy_flashevolve.gepa.edits import Edit, EditedText
from dspy_flashevolve.gepa.iterations import Iterations
from dspy_flashevolve.gepa.parts import is_json, parts_of
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.records import Child, Parent
from dspy_flashevolve.gepa.reports import gepa_logger
from dspy_flashevolve.gepa.search import Search
from dspy_flashevolve.modules.reading import asked, past_cache, result_of, text_in
from dspy_flashevolve.observe.statistics import PERFECT_MINIBATCH
from dspy_flashevolve.programs.program import ProgramRunner
from dspy_flashevolve.programs.reflection import NothingToReadError, OversizedReflectionError, Reflection
from dspy_flashevolve.programs.replies import CutOffReplyError, recording_cut_off_replies
from dspy_flashevolve.programs.run import DspyRun

logger = logger_named(__name__)

NOTHING = {
    "no_trajectories": "no example of its minibatch could be run",
    "all_scores_perfect": PERFECT_MINIBATCH,
}
"""gepa's words for why there is nothing to reflect on -> ours."""
SHOWN_CHARACTERS = 300
"""Of an error in the log and in a step's reason: whole replies made 2,848 lines of 13 failed steps."""
ATTEMPTS = 2
"""gepa asks a reflection that raised once more, then skips the task."""


class Proposing:
    """Lets the reflection LM write children; ``check`` raises StepEnded where none is of use any more."""

    def __init__(
        self,
        run: DspyRun,
        pool: Pool,
        iterations: Iterations,
        program: ProgramRunner,
        search: Search,
        calls: ReflectionCalls,
        check: Callable[[], None],
    ) -> None:
        self._check, self._search = check, search
        self._run, self._pool, self._iterations = run, pool, iterations
        self._program, self._calls = program, calls
        self.proposals = 0
        """Children that the reflection LM wrote."""
        self._unread = set[str]()
        """Components that some minibatch did not call."""

    async def propose(self, step: Step, parents: Sequence[Parent]) -> list[Child]:
        """Have a child written for each parent that leaves something to improve.

        Raises:
            StepEnded: none was written.
            AssertionError: a text for a component that the parent does not have (as gepa).
        """
        prepared = [await self._prepare(step, parent) for parent in parents]
        outcomes = await self._search.together([lambda task=task: self._reflect(step, task) for task in prepared])
        children = [outcome for outcome in outcomes if isinstance(outcome, Child)]
        for child in children:
            await self._pool.write(self._pool.reports.proposed, step, child.texts)
            self.proposals += 1
        if not children:
            await self._pool.write(self._pool.keep_strategies)
            ends = [outcome for outcome in outcomes if isinstance(outcome, End)]
            kind = EndKind.FAILED if any(end.kind is EndKind.FAILED for end in ends) else EndKind.REJECTED
            raise StepEnded(kind, "; ".join(dict.fromkeys(end.reason for end in ends)))
        return children

    async def _prepare(self, step: Step, parent: Parent) -> _Prepared | End:
        """Build what reflection reads of a parent; or say why there is nothing to reflect on."""
        pool, task, evaluation = self._pool, parent.task, parent.evaluation
        if self._run.store.find_reply(step.number, "propose", str(parent.index)) is not None:
            return _Prepared(parent, [], {}, is_paid=True)
        reason = await pool.write(self._iterations.nothing_to_improve, step, task, evaluation)
        if reason is not None:  # without a trajectory nothing was paid, and such steps must not go on for ever
            return End(EndKind.REJECTED if evaluation.trajectories else EndKind.FAILED, NOTHING.get(reason, reason))
        reflection, rng, readable = self._program.reflection, None, None
        if self._search.overlaps:
            rng = step.rng
            try:
                readable = await reflection.readable(task.parent_candidate, evaluation)
            except NothingToReadError as error:
                return self._unprepared(step, error)
        components, unread = await pool.write(self._iterations.choose_components, step, task, evaluation, readable)
        self._tell_unread(step, unread, components)
        try:
            # Feedback comes from the metric, which may ask an LM: it takes a slot.
            ask = partial(self._run.requests.ask, "propose", step)
            dataset = await reflection.dataset(task.parent_candidate, evaluation, components, rng, ask)
        except FlashEvolveError:
            raise
        except Exception as error:
            return self._unprepared(step, error)
        components = [name for name in components if name in dataset] or components
        await pool.write(pool.reports.reflection_begins, step, task, components, dataset)
        return _Prepared(parent, components, dataset)

    def _unprepared(self, step: Step, error: Exception) -> End:
        """Say that a reflection has nothing to read; where every first one has the same error, the run ends with it.

        Raises:
            Exception: that error.
        """
        if error is self._program.mistakes.error:
            raise error
        _log(f"Iteration {step.number + 1}: Exception building reflective dataset: {shortened(error)}", error)
        return End(EndKind.FAILED, f"no reflective dataset: {shortened(error)}")

    def _tell_unread(self, step: Step, unread: Sequence[str], components: Sequence[str]) -> None:
        """Say once of a component that no rollout called it, so that another one is reflected on."""
        new = [name for name in unread if name not in self._unread]
        self._unread.update(new)
        if new and components:
            gepa_logger.info(
                f"Iteration {step.number + 1}: No rollout of the minibatch called {', '.join(new)}: "
                f"{', '.join(components)} is reflected on. It is said once of each predictor."
            )

    async def _reflect(self, step: Step, task: _Prepared | End) -> Child | End:
        """Ask the reflection LM for a child; or say why there is none."""
        if isinstance(task, End):
            return task
        parent_texts, record, reason = task.parent.task.parent_candidate, _ProposalRecord(task), ""
        for attempt in range(ATTEMPTS):
            self._check()
            self._calls.record(reflections=int(not task.is_paid))
            try:
                call = Call(
                    stage="propose",
                    step=step,
                    make=lambda: self._program.reflection.propose(
                        parent_texts, task.dataset, task.components, shrinks=self._search.spares_calls
                    ),
                    cost_of=lambda reflection: RequestCost(reflection.tokens, reflection.cost_dollars),
                    record=record,
                )
                reflection = await self._run.requests.answer(call)
            except FlashEvolveError:
                raise
            except Exception as error:
                if error is self._program.mistakes.error:
                    raise
                _log(f"Reflection failed (attempt {attempt + 1} of {ATTEMPTS}): {shortened(error)}", error)
                reason = f"reflection failed: {shortened(error)}"
                if isinstance(error, OversizedReflectionError):
                    break  # the same request would be refused again
                continue
            if not reflection.texts:
                return End(EndKind.REJECTED, "reflection returned no text")
            for name in reflection.texts:
                assert name in parent_texts, f"{name} missing in candidate"
            texts = {name: str(text) for name, text in reflection.texts.items()}
            edits = {name: text.edits for name, text in reflection.texts.items() if isinstance(text, EditedText)}
            edits = {name: own for name, own in edits.items() if own}
            return Child(task.parent, texts, record.feedback, edits=edits)
        return End(EndKind.FAILED, reason)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A task that is ready to be reflected on; one whose child was written before an interruption is paid."""

    parent: Parent
    components: list[str]
    dataset: Any
    is_paid: bool = False


class _ProposalRecord:
    """How a proposal is written down and read again, with the feedback that it was made from."""

    def __init__(self, task: _Prepared) -> None:
        self.position = str(task.parent.index)
        rows = [record for records in task.dataset.values() for record in records]
        # What the metric said, one text an example; dspy's adapter keeps it under "Feedback".
        self.feedback = tuple(dict.fromkeys(str(record["Feedback"]) for record in rows if record.get("Feedback")))

    def write(self, answer: Reflection) -> str | None:
        if not answer.texts:
            return None
        edits = {
            name: [edit.model_dump() for edit in text.edits]
            for name, text in answer.texts.items()
            if isinstance(text, EditedText)
        }
        return json.dumps({"texts": answer.texts, "feedback": self.feedback, "edits": edits})

    def read(self, text: str) -> Reflection:
        record = json.loads(text)
        self.feedback = tuple(record["feedback"])
        texts: dict[str, str] = record["texts"]
        for name, edits in record["edits"].items():
            texts[name] = EditedText(texts[name], [Edit(**edit) for edit in edits])
        return Reflection(texts, 0)


def shortened(error: Exception) -> str:
    """Show an error in one line of at most `SHOWN_CHARACTERS`; those of dspy's adapters hold the whole reply.

    >>> shortened(ValueError("no\\nfield"))
    'no field'
    """
    line = " ".join(str(error).split())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]}..."


def _log(message: str, error: Exception) -> None:
    gepa_logger.info(message)
    # A reply that cannot be read, or a minibatch that cannot, is no fault of a line of code.
    if not isinstance(error, AdapterParseError | NothingToReadError | OversizedReflectionError):
        gepa_logger.info(traceback.format_exc())


# Proposals as edits: the reflection LM sees an instruction as numbered parts and says what to add, replace or remove. A
# reply is a fifth as long as a whole new instruction, and what it changes is known exactly: a part that no edit names
# stays as it is, word for word.

MOST_UNREADABLE = 3
"""Replies in a row that held no edit while the same LM wrote a whole text, after which whole texts are asked for at
once. A model that cannot write edits would pay for two requests a reflection to the end of the run. Not tuned."""

MOST_EDITS = 100
"""Edits of one reply that are read. It is asked for twelve at most, and their time grows with their square. Not
tuned."""

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

    Of a reply that was cut off those edits count that it closes. A reply that holds none is asked for once more from an
    LM that has written some, and then as a whole text.

    Args:
        settings: an `InstructionProposer`, whose settings are taken over.
    """

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._unreadable, self._writes_edits = 0, False
        signature = self.propose.signature.delete("new_instruction")
        description = "The instruction; each part begins with its number in brackets, which is no part of it."
        signature = signature.with_updated_fields("current_instruction", desc=description)
        signature = signature.append("edits", dspy.OutputField(desc="The edits."), list[Edit])
        self.propose_edits = dspy.Predict(signature.with_instructions(f"{self.base_instructions or TASK}\n\n{FORM}"))

    async def _proposed(self, instruction: str, inputs: Mapping[str, Any], is_sync: bool) -> str:
        asks_for_edits = self._unreadable < MOST_UNREADABLE and not is_json(instruction)
        for attempt in range(asks_for_edits * (1 + self._writes_edits)):
            if text := await self._improved(instruction, inputs, is_sync, attempt):
                self._unreadable = 0
                self._writes_edits |= isinstance(text, EditedText)
                return text
        text = await super()._proposed(instruction, inputs, is_sync)
        self._unreadable += 1  # an LM that refuses both writes whole texts no better than edits
        return text

    async def _improved(self, instruction: str, inputs: Mapping[str, Any], is_sync: bool, attempt: int) -> str:
        """The instruction with the edits of a reply, or the whole text that came in their place; empty for neither."""
        inputs = {**inputs, "current_instruction": numbered(instruction), **past_cache(attempt)}
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
