"""What the history of a run adds up to: totals, the course of the score, the family tree, the origin of each line.

`watch`, `compare` and the report take their figures from here, so that they agree.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

from dspy_flashevolve.engine.events import LmCallCounted, RolloutFinished
from dspy_flashevolve.observe.history import Candidate, History, RolloutOn, StepRecord
from dspy_flashevolve.observe.statistics import ChangeRecord, Paid, Request

FAILURES = ("RolloutTimedOut", "ExampleGivenUp", "EndpointPaused", "LimitChanged", "RequestTurnedAway", "ActorLost")
"""Kinds of events that say that something went wrong, or that a limit was changed because of it."""


@dataclass(frozen=True, slots=True)
class RequestTotals:
    """What the requests of a stage, or a role, added up to.

    Args:
        failed: answers of no use, out of ``requests``.
        cost_dollars: dollars; None where tokens were used and no price is known.
        served_seconds, median_seconds: seconds in slots: their sum, and the median of a request.
        waited_seconds, visits: seconds that steps waited for their first slot in the stage, and steps that came to it.
    """

    name: str
    requests: int
    failed: int
    tokens: int
    cost_dollars: float | None
    served_seconds: float
    median_seconds: float
    waited_seconds: float = 0.0
    visits: int = 0


@dataclass(frozen=True, slots=True)
class RunTotals:
    """A run in numbers; what is not known is None.

    Args:
        calls, max_calls: metric calls made and allowed; None without such a limit.
        steps: how steps ended -> how many did; "at work" for those without an end.
        reasons: reason -> steps that ended without a commit for it.
        best_score, best: validation score and index of the best candidate.
        accepted: candidates beside the seed.
        by_role: totals of the task LM and of those that reflect; empty where nothing tells of requests.
        failures: kind of event -> how many there were.
    """

    seconds: float | None
    calls: int
    max_calls: int | None
    steps: dict[str, int]
    reasons: dict[str, int]
    seed_score: float | None
    best_score: float | None
    best: int | None
    accepted: int
    by_role: dict[str, RequestTotals]
    by_stage: list[RequestTotals]
    tokens: int | None
    cost_dollars: float | None
    failures: dict[str, int]


def totals_of(history: History) -> RunTotals:
    """Add up a run."""
    stages: defaultdict[str, list[Request]] = defaultdict(list)
    task_stages = {request.stage for request in history.requests if isinstance(request, RolloutFinished)}
    waits: defaultdict[str, list[float]] = defaultdict(list)
    for request in history.requests:
        stages[request.stage].append(request)
    for visit in history.visits:
        waits[visit.stage].append(visit.began_seconds - visit.queued_seconds)
    whole, steps = _request_totals("all", history.requests), history.steps.values()
    seed, best = history.seed, history.best
    failures = Counter(event.kind for event in history.events if event.kind in FAILURES)
    failures["RequestFinished"] = whole.failed
    has_journal = bool(history.sessions)
    by_role: dict[str, RequestTotals] = {
        role: _request_totals(
            role, [request for request in history.requests if (request.stage in task_stages) == (role == "task")]
        )
        for role in ("task", "reflection")
        if has_journal
    }
    # Steps may wait in a stage of which no request was answered yet.
    names = [*stages, *(waits.keys() - stages.keys())]
    by_stage = [_request_totals(name, stages[name], waits[name]) for name in names]
    # One stage without a price makes the sum unknown: that of the others would be taken for the whole.
    has_prices = has_journal and all(stage.cost_dollars is not None for stage in by_stage)
    reasons = Counter(step.reason for step in steps if step.way not in ("", "committed"))
    return RunTotals(
        seconds=history.seconds if has_journal else None,
        calls=history.calls,
        max_calls=history.max_calls,
        steps=dict(Counter(step.way or "at work" for step in steps)),
        reasons=dict(reasons.most_common()),
        seed_score=None if seed is None else seed.score,
        best_score=None if best is None else best.score,
        best=None if best is None else best.index,
        accepted=sum(candidate.index > 0 for candidate in history.candidates),
        by_role=by_role,
        by_stage=by_stage,
        tokens=whole.tokens if has_journal else None,
        cost_dollars=whole.cost_dollars if has_prices else None,
        failures={name: count for name, count in failures.items() if count},
    )


def _request_totals(name: str, requests: Sequence[Request], waits: Sequence[float] = ()) -> RequestTotals:
    paid, latencies = Paid(), [one.latency_seconds for one in requests if not isinstance(one, LmCallCounted)]
    for request in requests:
        paid.add(request)
    return RequestTotals(
        name,
        paid.requests,
        paid.failed,
        paid.tokens,
        None if paid.tokens and not paid.dollars else paid.dollars,  # the journal has 0 where a price is not known
        paid.served_seconds,
        median(latencies) if latencies else 0.0,
        math.fsum(waits),
        len(waits),
    )


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate with a score, what the run had spent when it came, and the best score by then."""

    index: int
    score: float
    best: float
    seconds: float
    calls: int
    cost_dollars: float


def score_course(history: History) -> list[Point]:
    """Follow the score through the run, in the order in which candidates came."""
    best, dollars, counted = -math.inf, 0.0, 0
    points: list[Point] = []
    for candidate in sorted(history.candidates, key=lambda candidate: (candidate.seconds or 0.0, candidate.index)):
        if candidate.score is None or candidate.calls is None:
            continue
        seconds = candidate.seconds or 0.0
        while counted < len(history.requests) and history.requests[counted].seconds <= seconds:
            dollars += history.requests[counted].cost_dollars
            counted += 1
        best = max(best, candidate.score)
        points.append(Point(candidate.index, candidate.score, best, seconds, candidate.calls, dollars))
    return points


@dataclass(frozen=True, slots=True)
class ExampleScores:
    """Scores of candidates by example of the validation set.

    Args:
        rows: candidate, its score on each example (None where it was not run on it), and on how many examples no
            candidate is better. With 0 of these it is not on the Pareto front.
        best: the best score of any candidate on each example.
        left_out: candidates without a row, and examples without a column.
    """

    examples: list[str]
    rows: list[tuple[Candidate, list[float | None], int]]
    best: list[float]
    left_out: tuple[int, int]


def example_scores(history: History, most_rows: int, most_columns: int) -> ExampleScores:
    """Tabulate scores by example, in the order of the candidates.

    Where there are more candidates than rows, the seed, the best and those that win most examples are kept.
    """
    scored = [candidate for candidate in history.candidates if candidate.scores and candidate.score is not None]
    examples = sorted({example for one in scored for example in one.scores}, key=lambda one: (len(one), one))
    best = {
        example: max(candidate.scores[example] for candidate in scored if example in candidate.scores)
        for example in examples  # ids are texts: "9" before "10"
    }
    wins = {one.index: sum(value >= best[example] for example, value in one.scores.items()) for one in scored}
    shown = history.best, history.seed
    scored.sort(key=lambda one: (one is not shown[0], one is not shown[1], -wins[one.index], one.index))
    rows, columns = sorted(scored[:most_rows], key=lambda one: one.index), examples[:most_columns]
    return ExampleScores(
        columns,
        [(one, [one.scores.get(example) for example in columns], wins[one.index]) for one in rows],
        [best[example] for example in columns],
        (len(scored) - len(rows), len(examples) - len(columns)),
    )


def open_intervals(intervals: Iterable[tuple[str, float, float]], end: float, bins: int) -> dict[str, list[float]]:
    """Average how many intervals (stage, begin, end) of each stage are open, in equal bins from 0 to ``end``."""
    width = end / bins or 1.0
    averages: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * bins)
    for stage, begin, until in intervals:
        for number in range(max(0, int(begin / width)), min(bins - 1, int(until / width)) + 1):
            overlap = min(until, (number + 1) * width) - max(begin, number * width)
            averages[stage][number] += max(0.0, overlap) / width
    return dict(averages)


def family_tree(history: History) -> Iterator[tuple[int, Candidate, Candidate | None]]:
    """Walk through the candidates, each under its first parent, the seed first: depth, candidate, parent."""
    children: defaultdict[int, list[Candidate]] = defaultdict(list)
    for candidate in history.candidates:
        if candidate.index > 0:
            children[(candidate.parents or (0,))[0] or 0].append(candidate)
    # A stack and no recursion: a line of descent may be longer than Python's calls may be deep.
    stack: list[tuple[int, Candidate, Candidate | None]] = [] if history.seed is None else [(0, history.seed, None)]
    while stack:
        depth, candidate, parent = stack.pop()
        yield depth, candidate, parent
        stack += [(depth + 1, child, candidate) for child in reversed(children[candidate.index])]


# Where each line of a prompt comes from

_WORDS = re.compile(r"\w+")
_COUNTERS = re.compile(r"(?<=\] )helpful=\d+ harmful=\d+ ")


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
        verdict: how a playbook's users judged it; empty for other lines.
    """

    component: str
    line: str
    step: int | None = None
    is_seed: bool = False
    candidate: int | None = None
    examples: Mapping[str, tuple[float, ...]] | None = None
    feedback: tuple[str, ...] = ()
    change: ChangeRecord | None = None
    verdict: str = ""


def lines_of(history: History, candidate: Candidate) -> list[PromptLine]:
    """Return every line of a candidate's texts with its origin; the history must have been read with replies.

    The search by edits keeps every change with its step, and a playbook's bullets have the version that brought them.
    Any other line is of the step that made the first candidate on the way from the seed that has it.
    """
    ancestors, scores = _ancestors(history, candidate), _scores(history)
    held_by = {name: _held(ancestors, name) for name in candidate.texts}
    changes = [(change, _words(change.part)) for change in history.changes]
    bullets = {_words(f"[{bullet['id']}] {bullet['content']}"): bullet for bullet in _bullets(candidate)}
    step_of_version = {step.reason: number for number, step in history.steps.items() if step.way == "committed"}

    def with_origin(component: str, line: str) -> PromptLine:
        words = _words(line)
        first = next((ancestor for ancestor, held in held_by[component] if words in held), candidate)
        if not words.strip() or first.index == 0:
            return PromptLine(component, line, is_seed=True)
        if bullets and words not in bullets:
            return PromptLine(component, line)  # the frame in which a playbook stands
        change = next((change for change, part in changes if change.component == component and words in part), None)
        step, verdict = first.step if change is None else change.step, ""
        if words in bullets:
            bullet = bullets[words]
            step = step_of_version.get(f"version {bullet['created_version']}")
            verdict = f"cited as helpful {bullet['helpful']} times, as harmful {bullet['harmful']} times"
        if step is None or step not in history.steps:
            return PromptLine(component, line, candidate=first.index)
        record = history.steps[step]
        examples = {example: tuple(scores.get((step, example), ())) for example in _examples(record.selection)}
        return PromptLine(
            component, line, step, False, first.index, examples, tuple(_feedback(record)), change, verdict
        )

    return [with_origin(name, line) for name, text in candidate.texts.items() for line in text.splitlines()]


def _held(ancestors: Sequence[Candidate], component: str) -> list[tuple[Candidate, set[str]]]:
    """Return for each ancestor the words of each of its lines."""
    words_of = cache(_words)  # a run may have thousands of ancestors, which share most of their lines
    return [(ancestor, set(map(words_of, ancestor.texts.get(component, "").splitlines()))) for ancestor in ancestors]


def _words(text: str) -> str:
    """Return the words of a text with spaces around: lines are compared by them.

    Numbering, quotes and bullets may change from one candidate to the next, and so do the counters of a playbook.
    """
    return f" {' '.join(_WORDS.findall(_COUNTERS.sub('', text).lower()))} "


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
        if isinstance(request, RolloutOn):
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
    examples: dict[str, None] = {}
    for task in selection if isinstance(selection, list) else [selection]:
        if isinstance(task, dict):
            examples |= dict.fromkeys(task.get("ids", ()))
            if "example" in task:
                examples[json.dumps(task["example"])] = None
    return list(examples)


def _feedback(step: StepRecord) -> Iterator[str]:
    """Yield what a step's reflections read, or what they say went wrong."""
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
