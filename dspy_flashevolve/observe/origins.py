"""Where each line of a prompt came from: the step that brought it, the examples that this step saw, what it is worth.

GEPA's default policy keeps every change with its step; a playbook's bullets have the version that brought them. Else
the first candidate on the way from the seed that has the line tells its step, and of an integration the member whose
reply has the line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dspy_flashevolve.observe.history import Candidate, History, StepRecord
from dspy_flashevolve.observe.statistics import ChangeRecord

_ESCAPES = re.compile(r"\\+[nrt\"]")
_WORDS = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Origin:
    """One line of a candidate.

    Args:
        step: that brought it; None for the seed's own lines, and where nothing tells.
        is_seed: the seed has it.
        candidate: index of the first candidate on the way that has it.
        examples: that the step worked on, as text -> its scores there, in order: the parent's, then the child's.
        feedback: what the reflection read of them.
        change: with its estimated effect, where there is one.
        said: what integrations said of it, and how a playbook's users judged it.
    """

    component: str
    line: str
    step: int | None = None
    is_seed: bool = False
    candidate: int | None = None
    examples: Mapping[str, tuple[float, ...]] | None = None
    feedback: tuple[str, ...] = ()
    change: ChangeRecord | None = None
    said: tuple[str, ...] = ()


def origins(history: History, candidate: Candidate) -> list[Origin]:
    """Every line of a candidate's texts, with where it came from; `history` has to have its replies."""
    way = _way(history, candidate)
    scores = _scores(history)
    members = {one.step: one.fields["members"] for one in history.of_kind("Integrated")}
    verdicts: dict[int, dict[str, None]] = {}
    for event in history.of_kind("Integrated"):
        for step, verdict, reason in event.fields["verdicts"]:
            verdicts.setdefault(step, {})[f"{verdict}: {reason}"] = None
    replies = {number: [words(reply) for _, reply in step.replies] for number, step in history.steps.items()}
    bullets = _bullets(candidate)
    learnt = {step.reason: number for number, step in history.steps.items() if step.way == "committed"}
    seed = {} if history.seed is None else history.seed.texts

    def origin(component: str, line: str) -> Origin:
        meant = words(line)
        if not meant.strip() or meant in {words(one) for one in seed.get(component, "").splitlines()}:
            return Origin(component, line, is_seed=True)
        bullet = next((one for one in bullets if _has(f"[{one['id']}] {one['content']}", meant)), None)
        if bullets and bullet is None:
            return Origin(component, line)  # the frame in which a playbook stands
        change = next((one for one in history.changes if one.component == component and _has(one.part, meant)), None)
        first = next((one for one in way if _has(one.texts.get(component, ""), meant)), candidate)
        said: tuple[str, ...] = ()
        if bullet is not None:
            step = learnt.get(f"version {bullet['created_version']}")
            said = (f"cited as helpful {bullet['helpful']} times, as harmful {bullet['harmful']} times",)
        elif change is not None:
            step = change.step
        else:
            near = [*members.get(first.step, ()), *([] if first.step is None or first.step < 0 else [first.step])]
            step = next((one for one in [*near, *replies] if any(meant in text for text in replies.get(one, ()))), None)
            step = step if step is not None else near[-1] if near else None
        if step is None:
            return Origin(component, line, candidate=first.index)
        record = history.steps.get(step, StepRecord(step, None))
        examples = {one: tuple(scores.get((step, one), ())) for one in _examples(record.selection)}
        said += tuple(verdicts.get(step, ()))
        return Origin(component, line, step, False, first.index, examples, tuple(_feedback(record)), change, said)

    return [origin(name, line) for name, text in candidate.texts.items() for line in text.splitlines()]


@dataclass(frozen=True, slots=True)
class Gone:
    """A line of the seed that a candidate has not.

    Args:
        step: that took it out; None where nothing tells.
        candidate: index of the first candidate on the way that has it no more.
    """

    component: str
    line: str
    step: int | None
    candidate: int


def gone(history: History, candidate: Candidate) -> list[Gone]:
    """The lines of the seed that a candidate has not, in the seed's order."""
    seed, way = history.seed, _way(history, candidate)
    found: list[Gone] = []
    for component, text in {} if seed is None else seed.texts.items():
        for line in text.splitlines():
            meant = words(line)
            if not meant.strip() or _has(candidate.texts.get(component, ""), meant):
                continue
            without = [one for one in way if one.index and not _has(one.texts.get(component, ""), meant)]
            first = without[0] if without else candidate
            change = next(
                (one for one in history.changes if one.component == component and _has(one.replaces, meant)), None
            )
            step = first.step if first.step is not None and first.step >= 0 else None
            found.append(Gone(component, line, step if change is None else change.step, first.index))
    return found


def words(text: str) -> str:
    """The words of a text, or of JSON that holds it, with spaces around: what tells lines apart."""
    return f" {' '.join(_WORDS.findall(_ESCAPES.sub(' ', text).lower()))} "


def _has(text: str, meant: str) -> bool:
    return meant in words(text)


def _way(history: History, candidate: Candidate) -> list[Candidate]:
    """A candidate's ancestors and itself, by index; of a playbook, which has no parents, those before it."""
    by_index = {one.index: one for one in history.candidates}
    if _bullets(candidate):
        return [one for one in history.candidates if one.index <= candidate.index]
    found: set[int] = set()
    left: list[int | None] = [candidate.index]
    while left:
        index = left.pop()
        if index is not None and index in by_index and index not in found:
            found.add(index)
            left += by_index[index].parents
    return [by_index[index] for index in sorted(found)]


def _scores(history: History) -> dict[tuple[int, str], list[float]]:
    found: dict[tuple[int, str], list[float]] = {}
    for one in history.requests:
        if one.example is not None and one.score is not None:
            sample = one.example[1:].partition(",")[0] if one.example.startswith("[") else one.example  # ACE's attempts
            found.setdefault((one.step, sample), []).append(one.score)
    return found


def _bullets(candidate: Candidate) -> list[Any]:
    kept = candidate.more.get("playbook", {}) if isinstance(candidate.more, dict) else {}
    return kept.get("bullets", [])


def _examples(selection: Any) -> list[str]:
    """Ids as text of the training examples that a step selected: GEPA's minibatches, ACE's sample."""
    tasks = selection if isinstance(selection, list) else [selection]
    found: dict[str, None] = {}
    for task in tasks:
        if isinstance(task, dict):
            found |= dict.fromkeys(task.get("ids", ()))
            if "example" in task:
                found[json.dumps(task["example"])] = None
    return list(found)


def _feedback(step: StepRecord) -> Iterator[str]:
    for _, reply in step.replies:
        said = json.loads(reply)
        if isinstance(said, dict) and isinstance(said.get("feedback"), list):
            yield from map(str, said["feedback"])
        elif isinstance(said, list | dict):  # what was answered by fields, as a reflection of ACE is
            yield from (text for name, text in _fields(said) if name in ("what_went_wrong", "insight") and text)


def _fields(value: Any) -> Iterator[tuple[str, str]]:
    for name, one in value.items() if isinstance(value, dict) else (("", one) for one in value):
        if isinstance(one, str):
            yield name, one
        elif isinstance(one, dict | list):
            yield from _fields(one)
