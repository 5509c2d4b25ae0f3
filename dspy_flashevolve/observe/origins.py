"""The origin of each line of a prompt: the step that brought it, the examples that this step saw, its effect.

The search by edits keeps every change with its step, and a playbook's bullets have the version that brought them.
For anything else, the first candidate on the way from the seed that has the line names its step; of an integration it
is the member whose reply has the line.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspy_flashevolve.observe.history import Candidate, History, StepRecord
from dspy_flashevolve.observe.statistics import ChangeRecord

_ESCAPES = re.compile(r"\\+[nrt\"]")
_WORDS = re.compile(r"\w+")
_COUNTERS = re.compile(r"(?<=\] )helpful=\d+ harmful=\d+ ")
NO_STEP = StepRecord(-1, None)


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A line of a candidate's text, with its origin.

    Args:
        component: name of the component.
        line: the line.
        step: the step that brought it; None for the seed's own lines, and where nothing tells.
        is_seed: whether the seed has it.
        candidate: index of the first candidate on the way that has it.
        examples: id as text -> scores of each example that the step worked on: the parent's, then the child's.
        feedback: what the reflection read of these examples.
        change: the change that put it in, with its estimated effect; None where there is none.
        verdicts: what repairs said of it, and how a playbook's users judged it.
    """

    component: str
    line: str
    step: int | None = None
    is_seed: bool = False
    candidate: int | None = None
    examples: Mapping[str, tuple[float, ...]] | None = None
    feedback: tuple[str, ...] = ()
    change: ChangeRecord | None = None
    verdicts: tuple[str, ...] = ()


def lines_of(history: History, candidate: Candidate) -> list[PromptLine]:
    """Return every line of a candidate's texts with its origin; the history must have been read with replies."""
    ancestors = _ancestors(history, candidate)
    scores = _scores(history)
    members = {event.step: event.fields["members"] for event in history.of_kind("Integrated")}
    integration_verdicts: defaultdict[int, dict[str, None]] = defaultdict(dict)
    for event in history.of_kind("Integrated"):
        for step, verdict, reason in event.fields["verdicts"]:
            integration_verdicts[step][f"{verdict}: {reason}"] = None
    replies = {number: [_words(reply) for _, reply in step.replies] for number, step in history.steps.items()}
    changes = _changes(history, "part")
    first_with = {
        (name, words): ancestor
        for name, text in candidate.texts.items()
        for ancestor, held in reversed(_held(ancestors, name, text))
        for words in held
    }
    bullets = _bullets(candidate)
    step_of_version = {step.reason: number for number, step in history.steps.items() if step.way == "committed"}
    seed_texts = {} if history.seed is None else history.seed.texts

    def with_origin(component: str, line: str) -> PromptLine:
        words = _words(line)
        if not words.strip() or words in map(_words, seed_texts.get(component, "").splitlines()):
            return PromptLine(component, line, is_seed=True)
        bullet = next((bullet for bullet in bullets if words in _words(f"[{bullet['id']}] {bullet['content']}")), None)
        if bullets and bullet is None:
            return PromptLine(component, line)  # the frame in which a playbook stands
        change = next((change for change, part in changes if change.component == component and words in part), None)
        first = first_with.get((component, words), candidate)
        verdicts: tuple[str, ...] = ()
        if bullet is not None:
            step = step_of_version.get(f"version {bullet['created_version']}")
            verdicts = (f"cited as helpful {bullet['helpful']} times, as harmful {bullet['harmful']} times",)
        elif change is not None:
            step = change.step
        else:
            near = [*members.get(first.step, ()), *([] if first.step is None or first.step < 0 else [first.step])]
            wrote = (step for step in [*near, *replies] if any(words in reply for reply in replies.get(step, ())))
            step = next(wrote, near[-1] if near else None)
        if step is None:
            return PromptLine(component, line, candidate=first.index)
        record = history.steps.get(step, NO_STEP)
        return PromptLine(
            component,
            line,
            step,
            candidate=first.index,
            examples={example: tuple(scores.get((step, example), ())) for example in _examples(record.selection)},
            feedback=tuple(_feedback(record)),
            change=change,
            verdicts=(*verdicts, *integration_verdicts[step]),
        )

    return [with_origin(name, line) for name, text in candidate.texts.items() for line in text.splitlines()]


@dataclass(frozen=True, slots=True)
class RemovedLine:
    """A line of the seed that a candidate does not have.

    Args:
        component: name of the component.
        line: the line.
        step: the step that took it out; None where nothing tells.
        candidate: index of the first candidate on the way that does not have it.
    """

    component: str
    line: str
    step: int | None
    candidate: int


def removed_seed_lines(history: History, candidate: Candidate) -> list[RemovedLine]:
    """Return the lines of the seed that a candidate does not have, in the seed's order."""
    seed, ancestors = history.seed, _ancestors(history, candidate)
    changes = _changes(history, "replaces")
    removed: list[RemovedLine] = []
    for component, text in {} if seed is None else seed.texts.items():
        there, held_by = _words(candidate.texts.get(component, "")), _held(ancestors, component, text)
        for line in text.splitlines():
            words = _words(line)
            if not words.strip() or words in there:
                continue
            first = next((other for other, held in held_by if other.index and words not in held), candidate)
            step = first.step if first.step is not None and first.step >= 0 else None
            by_change = (one.step for one, part in changes if one.component == component and words in part)
            removed.append(RemovedLine(component, line, next(by_change, step), first.index))
    return removed


def _held(ancestors: Sequence[Candidate], component: str, text: str) -> list[tuple[Candidate, set[str]]]:
    """Return for each ancestor which lines of a text stand in lines of its own, by their words.

    Each line is compared once, however many ancestors have it: a run may have thousands of them.
    """
    sought = [_words(line) for line in text.splitlines()]
    compared: dict[str, list[str]] = {}
    held_by: list[tuple[Candidate, set[str]]] = []
    for ancestor in ancestors:
        held: set[str] = set()
        for line in ancestor.texts.get(component, "").splitlines():
            if line not in compared:
                there = _words(line)
                compared[line] = [words for words in sought if words in there]
            held.update(compared[line])
        held_by.append((ancestor, held))
    return held_by


def _words(text: str) -> str:
    """Return the words of a text, or of JSON that holds it, with spaces around: lines are compared by them."""
    # Numbering, quotes, bullets and JSON's escapes differ between a reply and the text that was made of it, and the
    # counters of a playbook's bullets between its versions.
    return f" {' '.join(_WORDS.findall(_ESCAPES.sub(' ', _COUNTERS.sub('', text)).lower()))} "


def _changes(history: History, field: str) -> list[tuple[ChangeRecord, str]]:
    """Return the changes with the words that they put in, or take out."""
    return [(change, _words(getattr(change, field))) for change in history.changes]


def _ancestors(history: History, candidate: Candidate) -> list[Candidate]:
    """Return a candidate's ancestors and itself, by index. A playbook has no parents: those before it are its own."""
    by_index = {other.index: other for other in history.candidates}
    if _bullets(candidate):
        return [other for other in history.candidates if other.index <= candidate.index]
    ancestors: set[int] = set()
    stack: list[int | None] = [candidate.index]
    while stack:
        index = stack.pop()
        if index is not None and index in by_index and index not in ancestors:
            ancestors.add(index)
            stack += by_index[index].parents
    return [by_index[index] for index in sorted(ancestors)]


def _scores(history: History) -> dict[tuple[int, str], list[float]]:
    """Return step and example -> scores of the step's rollouts on it, in order."""
    scores: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for request in history.requests:
        if request.example is not None and request.score is not None:
            # ACE tries a sample several times: its examples are pairs of sample and attempt.
            is_attempt = request.example.startswith("[")
            example = request.example[1:].partition(",")[0] if is_attempt else request.example
            scores[request.step, example].append(request.score)
    return scores


def _bullets(candidate: Candidate) -> list[Any]:
    playbook = candidate.more.get("playbook", {}) if isinstance(candidate.more, dict) else {}
    return playbook.get("bullets", [])


def _examples(selection: Any) -> list[str]:
    """Return the ids, as text, of the training examples that a step selected: GEPA's minibatches, ACE's sample."""
    tasks = selection if isinstance(selection, list) else [selection]
    examples: dict[str, None] = {}
    for task in tasks:
        if isinstance(task, dict):
            examples |= dict.fromkeys(task.get("ids", ()))
            if "example" in task:
                examples[json.dumps(task["example"])] = None
    return list(examples)


def _feedback(step: StepRecord) -> Iterator[str]:
    for _, text in step.replies:
        reply = json.loads(text)
        if isinstance(reply, dict) and isinstance(reply.get("feedback"), list):
            yield from map(str, reply["feedback"])
        elif isinstance(reply, list | dict):  # an answer by fields, as a reflection of ACE is
            yield from (value for name, value in _fields(reply) if name in ("what_went_wrong", "insight") and value)


def _fields(value: Any) -> Iterator[tuple[str, str]]:
    for name, part in value.items() if isinstance(value, dict) else (("", part) for part in value):
        if isinstance(part, str):
            yield name, part
        elif isinstance(part, dict | list):
            yield from _fields(part)
