"""The figures of a run: frozen records, gathered from its events, and one line at its end."""

from __future__ import annotations

import difflib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from textwrap import shorten
from typing import Any, TypeVar

from dspy_flashevolve.engine.events import (
    Committed,
    EndpointPaused,
    Event,
    ExampleGivenUp,
    Integrated,
    LimitChanged,
    LmCallCounted,
    Looked,
    RequestFinished,
    RequestTurnedAway,
    RolloutFinished,
    SeedValidated,
    StageVisited,
    StepClosed,
    StepOpened,
)
from dspy_flashevolve.engine.loop import LoopClock
from dspy_flashevolve.engine.run import EvolutionRun, Outcome
from dspy_flashevolve.engine.scheduler import StageVisit
from dspy_flashevolve.engine.steps import EndKind

T = TypeVar("T")
MOST_STAGE_RECORDS = 10_000
"""Of a long run the timeline has the beginning only."""
SHOWN_REASON, MOST_REASONS = 100, 1000
"""Characters of what a provider said, and how many different things it said are kept: enough to tell a rate limit from
a dead server, and few enough that messages with a time or a request's number in them fill no memory."""
ONLY_TESTED = "its rollouts tested the changes that there are"
"""Reason of a step that ended before its reflection, since enough changes wait to be tested."""
PERFECT_MINIBATCH = "all scores of its minibatch are perfect"
"""Reason of a step that ended before its reflection, since there was nothing to improve."""
ASKED_FOR_NO_CHILD = {ONLY_TESTED: "tested known changes", PERFECT_MINIBATCH: "found nothing to improve"}
"""Reason -> how a summary counts such steps: nothing of theirs was rejected."""
REFLECTION_STAGES = ("propose", "integrate")
"""GEPA's stages whose requests run no program."""


@dataclass(frozen=True, slots=True)
class ChangeRecord:
    """A part that a reflection added to a prompt, or took out of it, and what it is estimated to be worth.

    Args:
        step: whose child brought it.
        component: the predictor's name.
        part: the text that it puts in; empty where it only takes something out.
        replaces: the text that goes out for it; empty for none.
        effect: on a rollout's score.
        error: standard error of the effect.
    """

    step: int
    component: str
    part: str
    replaces: str
    effect: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunStats:
    """What a run on the engine did, whatever it evolved. Seconds, also those of events, are since the run began.

    Args:
        schedule: "async" or "lockstep".
        seconds: from the start of the run to its end, or to now.
        stop_reason: why no more steps were admitted, or what ended the run.
        failed: the run was given up, because steps failed one after the other.
        outcome: how the run ended, in one word:
            "running": it has not yet.
            "finished": there was nothing more to do, or one of its limits was reached (metric calls, seconds, dollars,
            reflections).
            "stopped": somebody asked for it before: Ctrl-C, SIGTERM, a stopper, the file gepa.stop.
            "failed": it was given up, the best so far was returned.
            "aborted": an exception ended it, the second Ctrl-C and a cancelled ``acompile`` too.
        steps: evolution steps that began.
        ended: way -> steps (committed, integrated, rejected, discarded, failed, cancelled).
        end_reasons: reason -> steps, for all that did not commit.
        metric_calls: paid rollouts, the seed's validation included.
        max_metric_calls: the budget; None without one.
        slots: slots there are, at most this many requests in flight.
        peak_slots: the most that were in use at once.
        occupancy: share of slot-seconds in use, 0 to 1, of the slots that there were by the limits of their time, and
            those that were held beyond a limit which had just fallen.
        busy_seconds_by_stage: slot-seconds.
        gaps: place -> gap (version now less version seen) -> looks.
        shared_rollouts: rollouts that joined one in flight instead of being paid.
        retried_requests: times that a request got no answer and was made again.
        turned_away: why -> the same times, as the provider said it (its first 100 characters); the first 1,000 reasons.
        unanswered_examples: those that got no answer while others did, and score ``failure_score``: for every
            candidate, or for one alone where they were answered for others.
        timed_out_rollouts: runs of rollouts that took longer than rollout_timeout_seconds.
        requests_by_stage: rollouts and other requests that were answered, and rollouts that were given up half-way.
        tokens_by_stage: prompt and completion tokens of all LM calls, as the LMs report them. A call of a thread that
            a program has started by itself, without dspy's settings, counts for the busiest stage that asks its LM.
        cost_dollars: of all LM calls, by litellm's cost map; None where the price of a model is not known.
        dollars_by_stage: the same of the LM calls of each stage.
        generations: the most steps from the seed to a candidate, along its parents.
        commits: every change of the pool, in order.
        looks: decision -> items that the staleness policy looked at.
        limit_changes: every change of an endpoint's or a stage's slots, in order; none with a fixed number of slots.
        pauses: times that an endpoint refused most of what it was sent, and was left alone for a while.
        stages: what each step did when, by end: the run's timeline. Of a long run the first 10,000 records.
    """

    schedule: str
    seconds: float
    stop_reason: str
    failed: bool
    outcome: Outcome
    steps: int
    ended: dict[str, int]
    end_reasons: dict[str, int]
    metric_calls: int
    max_metric_calls: int | None
    slots: int
    peak_slots: int
    occupancy: float
    busy_seconds_by_stage: dict[str, float]
    gaps: dict[str, dict[int, int]]
    shared_rollouts: int
    retried_requests: int
    timed_out_rollouts: int
    unanswered_examples: int
    requests_by_stage: dict[str, int]
    tokens_by_stage: dict[str, int]
    cost_dollars: float | None
    dollars_by_stage: dict[str, float | None]
    generations: int
    commits: list[Committed] = field(default_factory=list[Committed])
    looks: dict[str, int] = field(default_factory=dict[str, int])
    limit_changes: list[LimitChanged] = field(default_factory=list[LimitChanged])
    pauses: int = 0
    stages: list[StageVisit] = field(default_factory=list[StageVisit])
    turned_away: dict[str, int] = field(default_factory=dict[str, int])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)

    def __repr__(self) -> str:
        return summary_of(self)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AsyncStats(RunStats):
    """What an AsyncGEPA run did, beside ``DspyGEPAResult``; see :class:`RunStats` for the rest.

    Args:
        proposals: children that the reflection wrote.
        proposals_per_minute: the same over time.
        task_tokens: prompt and completion tokens of rollouts, as the LMs report them.
        reflection_tokens: the same of reflections and integrations.
        reflection_calls: reflections and integrations asked for.
        integration_calls: LM calls of integrations.
        verdicts: orthogonal, subsumed, conflicting -> children judged so.
        integrations: every integration, in order, with the verdicts and their reasons.
        changes: what reflections added to the head, in order, with what it is estimated to be worth; of the newest
            base.
        seed_score: of the program that the run began with, on the validation set; None where it was not validated.
        best_score: of the returned program.
        prompt_change: a unified diff from the seed program's texts to those of the returned one; empty where it is the
            seed.
    """

    proposals: int
    proposals_per_minute: float
    task_tokens: int
    reflection_tokens: int
    reflection_calls: int
    integration_calls: int
    verdicts: dict[str, int] = field(default_factory=dict[str, int])
    integrations: list[Integrated] = field(default_factory=list[Integrated])
    changes: list[ChangeRecord] = field(default_factory=list[ChangeRecord])
    seed_score: float | None = None
    best_score: float | None = None
    prompt_change: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A playbook that was validated.

    Args:
        seconds: since the run began, when its score was known.
        version: of the playbook.
        score: mean over the validation set.
        bullets: in it.
        tokens: of its text.
    """

    seconds: float
    version: int
    score: float
    bullets: int
    tokens: int


@dataclass(frozen=True, slots=True)
class WindowRecord:
    """A window of a stream, scored before anything was learnt from it.

    Args:
        window: from 0.
        version: of the playbook that it was scored with.
        examples: in it.
        scored: of these, those that the provider answered.
        score: their mean; None where there is none.
    """

    window: int
    version: int
    examples: int
    scored: int
    score: float | None


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a reply that could not be used.

    Args:
        kind: a few words; problems are counted by it.
        detail: the beginning of what it was, for people.
    """

    kind: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AceStats(RunStats):
    """What an AsyncACE run did; see :class:`RunStats` for the rest.

    Args:
        samples: training examples that came through to the playbook.
        samples_per_minute: the same over the time until the last of them.
        right_at_once: samples whose first attempt was right.
        corrected: samples that became right after a reflection.
        reflections: asked for.
        citations: bullets cited by attempts.
        version: of the last playbook: how often its texts changed.
        best_version: of the playbook that is returned.
        operations: add, update, merge, remove -> operations done.
        tags: helpful, harmful, neutral -> tags counted.
        additions: admitted, merged, dropped -> stale additions.
        evicted: bullets that the token budget drove out.
        problems: kind -> how often a reply asked for what could not be done, or could not be read.
        first_problems: the first of them.
        snapshots: every playbook that was validated, in the order in which their scores came.
        superseded: snapshots that a newer one replaced before their validation began.
        unpaid: snapshots that the budget could not pay.
        unresolved: snapshots whose validation the provider did not answer; they have no score.
        windows: of a stream, in order.
    """

    samples: int
    samples_per_minute: float
    right_at_once: int
    corrected: int
    reflections: int
    citations: int
    version: int
    best_version: int
    operations: dict[str, int]
    tags: dict[str, int]
    additions: dict[str, int]
    evicted: int
    problems: dict[str, int]
    first_problems: list[Problem]
    snapshots: list[SnapshotRecord] = field(default_factory=list[SnapshotRecord])
    superseded: int = 0
    unpaid: int = 0
    unresolved: int = 0
    windows: list[WindowRecord] = field(default_factory=list[WindowRecord])


class Recorder:
    """Gathers events while a run goes on.

    Args:
        clock: the run's.
    """

    def __init__(self, clock: LoopClock) -> None:
        self.clock = clock
        self.steps = self.pauses = 0
        self.end_reasons, self.looks = Counter[str](), Counter[str]()
        self.requests, self.tokens = Counter[str](), Counter[str]()
        self.dollars = defaultdict[str, float](float)
        """Of stages, where prices are known."""
        self.turned_away = Counter[str]()
        """What a provider said -> requests that were made again."""
        self.unanswered_examples = 0
        self.seed_score: float | None = None
        """Of the program that the run began with; None until it is known."""
        self._best_before: float | None = None
        self.commits: list[Committed] = []
        self.integrations: list[Integrated] = []
        self.limit_changes: list[LimitChanged] = []
        self.stages: list[StageVisit] = []

    def __call__(self, event: Event) -> None:
        """Take one event."""
        event = replace(event, seconds=event.seconds - self.clock.began)
        if isinstance(event, RolloutFinished | RequestFinished | LmCallCounted):
            self.requests[event.stage] += not isinstance(event, LmCallCounted)
            self.tokens[event.stage] += event.tokens
            self.dollars[event.stage] += event.cost_dollars
        elif isinstance(event, StepOpened):
            self.steps += 1
        elif isinstance(event, StageVisited):
            if len(self.stages) < MOST_STAGE_RECORDS:
                queued, began = event.queued_seconds - self.clock.began, event.began_seconds - self.clock.began
                self.stages.append(StageVisit(event.step, event.stage, queued, began, ended=event.seconds))
        elif isinstance(event, StepClosed):
            if event.end.kind is not EndKind.COMMITTED:
                self.end_reasons[event.end.reason] += 1
        elif isinstance(event, SeedValidated):
            self.seed_score, self._best_before = event.score, event.best_score
        elif isinstance(event, Committed):
            self.commits.append(event)
        elif isinstance(event, LimitChanged):
            self.limit_changes.append(event)
        elif isinstance(event, ExampleGivenUp):
            self.unanswered_examples += 1
        elif isinstance(event, RequestTurnedAway):
            reason = shorten(event.reason, SHOWN_REASON, placeholder=" ...")
            if reason in self.turned_away or len(self.turned_away) < MOST_REASONS:
                self.turned_away[reason] += 1
        elif isinstance(event, EndpointPaused):
            self.pauses += 1
        elif isinstance(event, Looked):
            self.looks[event.decision] += 1
        elif isinstance(event, Integrated):
            self.integrations.append(event)

    @property
    def best_score(self) -> float | None:
        """The best so far; None until there is one."""
        return self.commits[-1].best_score if self.commits else self._best_before

    def stats(self, run: EvolutionRun, unpriced: Collection[str], **figures: Any) -> RunStats:
        """The record of the run so far.

        Args:
            unpriced: stages that ask a model whose price is not known.
            figures: those of :class:`RunStats` that neither an event nor the run tells.
        """
        slots = run.scheduler.statistics()
        return RunStats(
            outcome=run.outcome,
            failed=run.outcome == "failed",
            steps=self.steps,
            ended=dict(run.ended),
            end_reasons=dict(self.end_reasons),
            slots=slots.limit,
            peak_slots=slots.peak,
            occupancy=slots.busy_seconds / slots.limit_seconds if slots.limit_seconds else 0.0,
            busy_seconds_by_stage={name: one.served_seconds for name, one in slots.stages.items()},
            gaps={place: dict(sorted(counts.items())) for place, counts in list(run.gaps.items())},
            shared_rollouts=run.rollouts.shared,
            retried_requests=run.endpoints.retried,
            unanswered_examples=self.unanswered_examples,
            timed_out_rollouts=run.rollouts.timed_out,
            requests_by_stage=dict(self.requests),
            tokens_by_stage=dict(self.tokens),
            cost_dollars=None if any(stage in unpriced for stage in self.requests) else sum(self.dollars.values()),
            dollars_by_stage={stage: None if stage in unpriced else self.dollars[stage] for stage in self.requests},
            generations=max((commit.generation for commit in self.commits), default=0),
            commits=list(self.commits),
            looks=dict(self.looks),
            limit_changes=list(self.limit_changes),
            pauses=self.pauses,
            stages=list(self.stages),
            turned_away=dict(self.turned_away),
            **figures,
        )

    def async_stats(self, of_run: RunStats, **figures: Any) -> AsyncStats:
        """The same with what is GEPA's own.

        Args:
            of_run: what :meth:`stats` says.
            figures: those of :class:`AsyncStats` that no event tells.
        """
        minutes = of_run.seconds / 60
        reflection = sum(self.tokens[stage] for stage in REFLECTION_STAGES)
        return AsyncStats(
            **{one.name: getattr(of_run, one.name) for one in fields(of_run)},
            **figures,
            proposals_per_minute=figures["proposals"] / minutes if minutes else 0.0,
            task_tokens=sum(self.tokens.values()) - reflection,
            reflection_tokens=reflection,
            verdicts=dict(Counter(verdict for one in self.integrations for _, verdict, _ in one.verdicts)),
            integrations=list(self.integrations),
        )


OUTCOMES = {
    "running": "is under way",
    "finished": "finished",
    "stopped": "was stopped",
    "failed": "gave up, and returns the best program so far",
    "aborted": "was aborted",
}
BUSY = 0.8
"""From this share of the slots in use on, more of them would have been used."""
SHOWN_LINES = 12
"""Lines of a prompt's change that a summary shows; :attr:`AsyncStats.prompt_change` has all."""


def summary_of(stats: RunStats) -> str:
    """A run in about ten lines: how it ended, what it found, what it cost, and what held it back."""
    steps = ", ".join(f"{count} {way}" for way, count in ways_of(stats).items() if count) or "none ended"
    calls = "" if stats.max_metric_calls is None else f" of {stats.max_metric_calls}"
    reason = stats.stop_reason.rstrip(".") or ("steps may start" if stats.outcome == "running" else "nothing was left")
    lines = [
        f"{OUTCOMES[stats.outcome]} after {stats.seconds:.1f} s: {reason}",
        f"steps: {stats.steps} ({steps})",
        f"metric calls: {stats.metric_calls}{calls}",
        f"tokens: {_parts(stats.tokens_by_stage, lambda count: f'{count:,}')}",
        f"dollars: {_dollars_line(stats.dollars_by_stage)}",
        f"slots: {_slots(stats)}; {limited_by(stats)}",
    ]
    if isinstance(stats, AsyncStats):
        before, after = (_score(score) for score in (stats.seed_score, stats.best_score))
        lines.insert(1, f"validation score: {before} (the program given) -> {after} (the program returned)")
        lines[2] += f", {stats.proposals} proposals"
        if not stats.proposals and stats.end_reasons:
            reason, count = Counter(stats.end_reasons).most_common(1)[0]
            lines[2] += f"; {count} ended since: {shorten(reason, 120, placeholder=' ...')}"
        change = stats.prompt_change.splitlines()
        more = [f"... and {len(change) - SHOWN_LINES} lines more"] if len(change) > SHOWN_LINES else []
        lines += change[:SHOWN_LINES] + more
    return "\n".join(lines)


def ways_of(stats: RunStats) -> dict[str, int]:
    """Way -> steps that ended so, with words of their own for those that asked for no child."""
    counts = dict(stats.ended)
    for reason, words in ASKED_FOR_NO_CHILD.items():
        if steps := stats.end_reasons.get(reason, 0):
            counts[words] = steps
            counts["rejected"] = max(0, counts.get("rejected", 0) - steps)
    return counts


def texts_diff(before: Mapping[str, str], after: Mapping[str, str], old: str, new: str, context: int) -> list[str]:
    """A unified diff of the texts of two candidates, component by component.

    Args:
        old, new: what follows a component's name in the two lines above its change.
        context: lines around each change.
    """
    found: list[str] = []
    for name in dict.fromkeys([*before, *after]):
        lines = before.get(name, "").splitlines(), after.get(name, "").splitlines()
        found += difflib.unified_diff(*lines, name + old, name + new, lineterm="", n=context)
    return found


def limited_by(stats: RunStats) -> str:
    """What kept a run from doing more in its time."""
    reflecting = sum(stats.busy_seconds_by_stage.get(stage, 0.0) for stage in REFLECTION_STAGES)
    busy = sum(stats.busy_seconds_by_stage.values())
    if stats.pauses or any(one.after < one.before and one.reason == "refused" for one in stats.limit_changes):
        again = f"{stats.retried_requests} requests were made again"
        if stats.turned_away:  # a rate limit, a server that refuses connections, a timeout: it says so itself
            reason, count = Counter(stats.turned_away).most_common(1)[0]
            again += f", {count} of them since: {reason}"
        return f"the provider turned requests away and held it back ({again})"
    if stats.occupancy >= BUSY:
        return "more slots (num_threads) would have been used"
    if busy and reflecting > busy / 2:
        return "reflections took most of it"
    return "steps waited for each other more than for slots"


def _slots(stats: RunStats) -> str:
    busy = f"{100 * stats.occupancy:.0f}% of their time in use"
    if all(one.reason == "the median rule" for one in stats.limit_changes):
        return f"{stats.slots}, {busy}"
    return f"as many as the endpoints took, at most {stats.peak_slots} of {stats.slots} at once, {busy}"


def _parts(by_stage: Mapping[str, T], shown: Callable[[T], str]) -> str:
    return ", ".join(f"{stage} {shown(value)}" for stage, value in by_stage.items() if value != 0) or "none"


def _dollars_line(by_stage: Mapping[str, float | None]) -> str:
    """The dollars of the stages whose models have a price, and which have none."""
    priced = {stage: cost for stage, cost in by_stage.items() if cost is not None}
    unpriced = [stage for stage, cost in by_stage.items() if cost is None]
    known = _parts(priced, lambda cost: f"{cost:.4f}")
    if not unpriced:
        return known
    if not priced:
        return "unknown (litellm has no price for the models)"
    return f"{known}; unknown for {', '.join(unpriced)} (litellm has no price for the model)"


def _score(score: float | None) -> str:
    return "unknown" if score is None else f"{score:.4g}"


def log_summary(logger: logging.Logger, stats: AsyncStats, error: bool = False) -> None:
    """Say how a run ended: INFO where it came to its end, WARNING where it was cancelled, ERROR where it failed.

    Args:
        error: what aborted the run was an error.
    """
    level = logging.ERROR if stats.failed or error else logging.INFO
    level = logging.WARNING if stats.outcome == "aborted" and not error else level
    logger.log(level, "AsyncGEPA %s", summary_of(stats))
