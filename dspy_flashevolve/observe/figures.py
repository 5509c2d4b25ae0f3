"""The figures of a run, from its history: what `watch`, `compare` and the report all show, so that they agree."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from dspy_flashevolve.observe.history import Candidate, History, Request, Role
from dspy_flashevolve.observe.statistics import texts_diff

FAILURES = ("RolloutTimedOut", "ExampleGivenUp", "EndpointPaused", "LimitChanged", "RequestTurnedAway", "ActorLost")
"""Kinds of events that tell of something that went wrong, or of a limit that followed from it."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What a group of requests took.

    Args:
        name: a stage or a role.
        requests: answered.
        failed: of these, answers of no use.
        cost_dollars: None where tokens were used and no price is known.
        served_seconds: in slots, summed.
        median_seconds: of one request.
        waited_seconds: of steps for their first slot in the stage, summed.
        visits: of steps to the stage.
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
class Figures:
    """A run in numbers.

    Args:
        seconds, tokens: None where there is no journal, only another program's checkpoint: it tells neither.
        steps: way -> steps that ended so; "at work" for those without an end.
        reasons: reason -> steps that came to no commit.
        cost_dollars: None where the price of a stage's model, or what was used, is not known.
        by_role: empty where nothing tells of requests.
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
    by_role: dict[Role, Spent]
    by_stage: list[Spent]
    tokens: int | None
    cost_dollars: float | None
    failures: dict[str, int]


def figures(history: History) -> Figures:
    """Count a run."""
    roles: defaultdict[Role, list[Request]] = defaultdict(list)
    stages: defaultdict[str, list[Request]] = defaultdict(list)
    waits: defaultdict[str, list[float]] = defaultdict(list)
    for one in history.requests:
        roles[one.role].append(one)
        stages[one.stage].append(one)
    for visit in history.visits:
        waits[visit.stage].append(visit.began - visit.queued)
    whole, ended = _spent("all", history.requests), history.steps.values()
    seed, best = history.seed, history.best
    failures = Counter(one.kind for one in history.events if one.kind in FAILURES)
    failures["RequestFinished"] = whole.failed
    is_told = bool(history.sessions)
    by_role: dict[Role, Spent] = {role: _spent(role, roles[role]) for role in ("task", "reflection") if is_told}
    by_stage = [_spent(name, stages[name], waits[name]) for name in [*stages, *(waits.keys() - stages.keys())]]
    is_known = is_told and all(one.cost_dollars is not None for one in by_stage)
    return Figures(
        seconds=history.seconds if is_told else None,
        calls=history.calls,
        max_calls=history.max_calls,
        steps=dict(Counter(one.way or "at work" for one in ended)),
        reasons=dict(Counter(one.reason for one in ended if one.way not in ("", "committed")).most_common()),
        seed_score=None if seed is None else seed.score,
        best_score=None if best is None else best.score,
        best=None if best is None else best.index,
        accepted=sum(one.index > 0 for one in history.candidates),
        by_role=by_role,
        by_stage=by_stage,
        tokens=whole.tokens if is_told else None,
        cost_dollars=whole.cost_dollars if is_known else None,
        failures={name: count for name, count in failures.items() if count},
    )


def _spent(name: str, requests: Sequence[Request], waits: Sequence[float] = ()) -> Spent:
    tokens, dollars = sum(one.tokens for one in requests), math.fsum(one.cost_dollars for one in requests)
    latencies = [one.latency_seconds for one in requests if not one.is_lm_call]
    return Spent(
        name,
        len(latencies),
        sum(bool(one.error) for one in requests),
        tokens,
        None if tokens and not dollars else dollars,
        math.fsum(latencies),
        median(latencies) if latencies else 0.0,
        math.fsum(waits),
        len(waits),
    )


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate with a score, what had been spent when it came, and the best score so far."""

    index: int
    score: float
    best: float
    seconds: float
    calls: int
    cost_dollars: float


def course(history: History) -> list[Point]:
    """How the score went, in the order in which candidates came."""
    best, dollars, place = -math.inf, 0.0, 0
    found: list[Point] = []
    for one in sorted(history.candidates, key=lambda one: (one.seconds or 0.0, one.index)):
        if one.score is None or one.calls is None:
            continue
        seconds = one.seconds or 0.0
        while place < len(history.requests) and history.requests[place].seconds <= seconds:
            dollars += history.requests[place].cost_dollars
            place += 1
        best = max(best, one.score)
        found.append(Point(one.index, one.score, best, seconds, one.calls, dollars))
    return found


@dataclass(frozen=True, slots=True)
class ExampleScores:
    """Scores of candidates by example of the validation set.

    Args:
        examples: ids as text.
        rows: candidate, its score on each example (None where it was not run on it), and on how many examples no
            candidate is better: of 0 it is not on the Pareto front.
        best: the best score of all candidates on each example.
        left_out: candidates without a row, none of which is on the front or the best, and examples without a column.
    """

    examples: list[str]
    rows: list[tuple[Candidate, list[float | None], int]]
    best: list[float]
    left_out: tuple[int, int]


def example_scores(history: History, most_rows: int, most_columns: int) -> ExampleScores:
    """Scores by example: of the seed, the best and the Pareto front first, in the order of the candidates."""
    scored = [one for one in history.candidates if one.scores and one.score is not None]
    every = list(dict.fromkeys(example for one in scored for example in one.scores))
    every.sort(key=lambda example: (len(example), example))
    best = {example: max(one.scores[example] for one in scored if example in one.scores) for example in every}
    wins = {one.index: sum(one.scores.get(example, -math.inf) >= best[example] for example in every) for one in scored}
    top, seed = history.best, history.seed
    first = sorted(scored, key=lambda one: (one is not top, one is not seed, -wins[one.index], one.index))
    rows, columns = sorted(first[:most_rows], key=lambda one: one.index), every[:most_columns]
    return ExampleScores(
        columns,
        [(one, [one.scores.get(example) for example in columns], wins[one.index]) for one in rows],
        [best[example] for example in columns],
        (len(scored) - len(rows), len(every) - len(columns)),
    )


@dataclass(frozen=True, slots=True)
class EndpointUse:
    """What became of requests to an endpoint.

    Args:
        answered: requests; None where the run was killed before it wrote them down.
        turned_away: times that a request got no answer and was made again.
        pauses: times that it was left alone for a while.
        limit: requests in flight that it was last allowed; None where that did not change.
    """

    name: str
    answered: int | None
    turned_away: int
    pauses: int
    limit: int | None


def by_endpoint(history: History) -> list[EndpointUse]:
    """Endpoints, in the order in which the journal names them."""
    answered, away, pauses, limits = Counter[str](), Counter[str](), Counter[str](), dict[str, int]()
    for event in history.events:
        if event.kind == "EndpointAsked":
            answered[event.fields["endpoint"]] += event.fields["answered"]
        elif event.kind == "RequestTurnedAway":
            away[event.fields["endpoint"]] += 1
        elif event.kind == "EndpointPaused":
            pauses[event.fields["endpoint"]] += 1
        elif event.kind == "LimitChanged" and event.fields["reason"] != "the median rule":  # else it is a stage
            limits[event.fields["name"]] = event.fields["after"]
    names = dict.fromkeys([*answered, *away, *pauses, *limits])
    return [EndpointUse(name, answered.get(name), away[name], pauses[name], limits.get(name)) for name in names]


def use_of_slots(intervals: Iterable[tuple[str, float, float]], end: float, bins: int) -> dict[str, list[float]]:
    """Stage -> how many of its intervals (stage, begin, end) were open, on average, in each of so many equal times."""
    width = end / bins or 1.0
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * bins)
    for stage, begin, until in intervals:
        for place in range(max(0, int(begin / width)), min(bins - 1, int(until / width)) + 1):
            share = min(until, (place + 1) * width) - max(begin, place * width)
            found[stage][place] += max(0.0, share) / width
    return dict(found)


def family(history: History) -> Iterator[tuple[int, Candidate, Candidate | None]]:
    """Every candidate under its first parent, the seed first: depth, candidate, parent."""
    children: defaultdict[int, list[Candidate]] = defaultdict(list)
    for one in history.candidates:
        if one.index > 0:
            children[(one.parents or (0,))[0] or 0].append(one)
    left: list[tuple[int, Candidate, Candidate | None]] = [] if history.seed is None else [(0, history.seed, None)]
    while left:
        depth, one, parent = left.pop()
        yield depth, one, parent
        left += [(depth + 1, child, one) for child in reversed(children[one.index])]


def prompts_diff(before: Candidate, after: Candidate) -> list[str]:
    """The change from one candidate's texts to another's, component by component, as a unified diff."""
    old, new = (f" of candidate {one.index}" for one in (before, after))
    return texts_diff(before.texts, after.texts, old, new, 2)
