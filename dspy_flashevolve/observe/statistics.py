"""The statistics of a run: gathered from its events, as frozen records, and as the summary that is their ``repr``."""

from __future__ import annotations

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
PERFECT_MINIBATCH = "all scores of its minibatch are perfect"
"""Why a step ended before its reflection: there was nothing to improve."""
REFLECTION_STAGES = ("propose", "integrate")
"""GEPA's stages whose requests run no program."""


@dataclass(frozen=True, slots=True)
class ChangeRecord:
    """A change that a reflection made to a prompt, with its estimated effect on scores.

    Args:
        step: the step whose child brought the change.
        component: name of the predictor whose instruction was changed.
        part: the text that the change puts in; empty where it only removes.
        replaces: the text that it takes out; empty where it only adds.
        effect: estimated effect on the score of one rollout.
        error: standard error of that estimate.
    """

    step: int
    component: str
    part: str
    replaces: str
    effect: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunStats:
    """Statistics of a run on the engine, whatever it evolved. All seconds, those of events too, count from its start.

    Args:
        schedule: "async" or "lockstep".
        seconds: from the start of the run to its end, or to now.
        stop_reason: why no further step was started, or what ended the run.
        outcome: how the run ended, in one word:
            "running": it has not yet.
            "finished": there was nothing more to do, or one of its limits was reached (metric calls, seconds, dollars,
            reflections).
            "stopped": somebody asked for it before: Ctrl-C, SIGTERM, a stopper, the file gepa.stop.
            "failed": it was given up, because steps failed one after the other; the best so far was returned.
            "aborted": an exception ended it, the second Ctrl-C and a cancelled ``acompile`` too.
        steps: evolution steps that were started.
        ended: how steps ended (committed, joined, rejected, discarded, failed, cancelled) -> how many did.
        end_reasons: reason -> steps that ended for it; of all steps that did not commit.
        metric_calls: metric calls paid, the seed's validation included.
        max_metric_calls: the budget of metric calls; None without one.
        slots: requests that may be in flight at once, at the end of the run or now.
        peak_slots: the most requests that were in flight at once.
        occupancy: share of all slot-seconds that were in use, 0 to 1. A slot that was still held after a limit had
            fallen counts as one that there was.
        busy_seconds_by_stage: stage -> seconds in slots, summed over its requests.
        gaps: place where the staleness policy looks -> gap (version then less version seen) -> times.
        shared_rollouts: rollouts that joined an equal one in flight, and were not paid.
        retried_requests: times that a request got no answer and was sent again.
        turned_away: reason in the provider's words (first 100 characters) -> times, out of ``retried_requests``;
            the first 1,000 reasons.
        unanswered_examples: examples that got no answer while others did, and score ``failure_score``: for every
            candidate, or for one candidate where they were answered for others.
        timed_out_rollouts: attempts at rollouts that took longer than ``rollout_timeout_seconds``.
        requests_by_stage: stage -> requests answered, rollouts or not, and rollouts that were given up half-way.
        tokens_by_stage: stage -> prompt and completion tokens of all LM calls, as the LMs report them. A call from a
            thread that a program started by itself, without dspy's settings, counts for the busiest stage that asks
            its LM.
        cost_dollars: dollars for all LM calls, by litellm's cost map; None where a model has no price there.
        dollars_by_stage: stage -> dollars for its LM calls; None where a model has no price.
        generations: the most steps from the seed to a candidate, along its parents.
        commits: every change of the pool, in order.
        looks: decision of the staleness policy -> times.
        limit_changes: every change of the slots of an endpoint or a stage, in order; none where slots are fixed.
        pauses: times that an endpoint refused most requests and was sent none for a while.
        stages: each visit of a step to a stage, by the time it ended: the timeline of the run. The first 10,000.
    """

    schedule: str
    seconds: float
    stop_reason: str
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
        """Return the statistics as plain data, ready for JSON."""
        return asdict(self)

    def __repr__(self) -> str:
        return summary_of(self)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AsyncStats(RunStats):
    """Statistics of an AsyncGEPA run, beside ``DspyGEPAResult``: those of :class:`RunStats`, and these.

    Args:
        proposals: children that reflections wrote.
        proposals_per_minute: ``proposals`` over the minutes of the run.
        task_tokens: prompt and completion tokens of rollouts, as the LMs report them.
        reflection_tokens: prompt and completion tokens of reflections and repairs.
        reflection_calls: reflections and repairs asked for.
        integration_calls: LM calls of repairs of stale children.
        unreadable_replies: rollouts that scored ``failure_score`` since a reply did not fit its format.
        verdicts: orthogonal, subsumed or conflicting -> children judged so.
        integrations: every repair, in order, with the verdicts and their reasons, and why a reply could not be used.
        changes: what reflections changed, in order, with the estimated effect of each; of the newest base.
        seed_score: validation score of the program that the run began with; None where it was not validated.
        best_score: validation score of the returned program. The best of many owes a part of it to luck.
        unseen_score: what the returned program is expected to score on examples that no search has seen; None where
            the examples that prompts were written from are the validation examples, or there are fewer than four.
        unseen_error: the standard error of that.
        prompt_change: unified diff from the seed program's texts to those of the returned program; empty where the
            seed is returned.
        unconsolidated: why the returned prompt, which joins edits of several reflections, was not written anew as one
            text; empty where it was, or joins none.
    """

    proposals: int
    proposals_per_minute: float
    task_tokens: int
    reflection_tokens: int
    reflection_calls: int
    integration_calls: int
    unreadable_replies: int = 0
    verdicts: dict[str, int] = field(default_factory=dict[str, int])
    integrations: list[Integrated] = field(default_factory=list[Integrated])
    changes: list[ChangeRecord] = field(default_factory=list[ChangeRecord])
    seed_score: float | None = None
    best_score: float | None = None
    unseen_score: float | None = None
    unseen_error: float | None = None
    prompt_change: str = ""
    unconsolidated: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A playbook that was validated.

    Args:
        seconds: seconds from the start of the run until its score was known.
        version: the playbook's version.
        score: mean score over the validation set.
        bullets: bullets in the playbook.
        tokens: tokens of its text.
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
        window: the window's number, from 0.
        version: version of the playbook that it was scored with.
        examples: examples in the window.
        scored: examples that the provider answered.
        score: mean score of these; None where none was answered.
    """

    window: int
    version: int
    examples: int
    scored: int
    score: float | None


@dataclass(frozen=True, slots=True)
class Problem:
    """A part of a reply that could not be used.

    Args:
        kind: the problem in a few words; problems are counted by kind.
        detail: the beginning of the part, for people.
    """

    kind: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AceStats(RunStats):
    """Statistics of an AsyncACE run: those of :class:`RunStats`, and these.

    Args:
        samples: training examples whose lessons reached the playbook.
        samples_per_minute: ``samples`` over the minutes until the last of them.
        right_at_once: samples whose first attempt was right.
        corrected: samples that became right after a reflection.
        reflections: reflections asked for.
        citations: bullets cited by attempts.
        version: version of the last playbook: how often its texts changed.
        best_version: version of the playbook that is returned.
        operations: add or remove -> operations done.
        tags: helpful, harmful or neutral -> tags counted.
        evicted: bullets removed to keep within the token budget.
        rolled_back: times that the run went on from the best validated playbook, since a later one was worse.
        problems: kind -> times that a reply could not be read, or asked for what cannot be done.
        first_problems: the first of these problems.
        snapshots: every playbook that was validated, in the order in which the scores came.
        unresolved: snapshots without a score, because the provider did not answer their validation.
        windows: the windows of a stream, in order.
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
    evicted: int
    rolled_back: int
    problems: dict[str, int]
    first_problems: list[Problem]
    snapshots: list[SnapshotRecord] = field(default_factory=list[SnapshotRecord])
    unresolved: int = 0
    windows: list[WindowRecord] = field(default_factory=list[WindowRecord])


MOST_STAGE_VISITS = 10_000
"""Visits of steps to stages that are kept: about a megabyte."""
SHOWN_REASON, MOST_REASONS = 100, 1000
"""Characters of a provider's reason, and different reasons, that are kept: few enough that messages with a time in them
do not fill the memory."""


Request = RolloutFinished | RequestFinished | LmCallCounted
"""What tells of tokens and dollars; an LM call outside of any request had no slot, and is no request itself."""


@dataclass(slots=True)
class Paid:
    """What some requests have cost: those of a stage, say.

    Args:
        requests, failed: requests that were answered, and answers of no use.
        dollars: as far as prices are known.
        served_seconds: seconds in slots.
    """

    requests: int = 0
    failed: int = 0
    tokens: int = 0
    dollars: float = 0.0
    served_seconds: float = 0.0

    def add(self, request: Request) -> None:
        """Count a request."""
        self.tokens += request.tokens
        self.dollars += request.cost_dollars
        if not isinstance(request, LmCallCounted):
            self.requests += 1
            self.served_seconds += request.latency_seconds
            self.failed += isinstance(request, RequestFinished) and bool(request.error)


class Recorder:
    """A subscriber of the run's events that counts them while the run goes on.

    Args:
        clock: the clock of the run.
    """

    def __init__(self, clock: LoopClock) -> None:
        self.clock = clock
        self.counts = Counter[type[Event]]()
        """Kind of event -> how many there were."""
        self.end_reasons = Counter[str]()
        self.paid = defaultdict[str, Paid](Paid)
        """Stage -> what its requests have cost."""
        self.turned_away = Counter[str]()
        """Reason in the provider's words -> requests that were sent again."""
        self.seed_score: float | None = None
        """Validation score of the program that the run began with; None until it is known."""
        self.best_score: float | None = None
        """The best validation score so far; None until there is one."""
        self.commits: list[Committed] = []
        self.integrations: list[Integrated] = []
        self.limit_changes: list[LimitChanged] = []
        self.stages: list[StageVisit] = []

    def __call__(self, event: Event) -> None:
        """Count an event."""
        self.counts[type(event)] += 1
        # The engine's clock counts from anywhere; users count from the start of the run.
        began, seconds = self.clock.began, event.seconds - self.clock.began
        match event:
            case RolloutFinished() | RequestFinished() | LmCallCounted():
                self.paid[event.stage].add(event)
            case StageVisited() if len(self.stages) < MOST_STAGE_VISITS:
                waited = event.queued_seconds - began, event.began_seconds - began
                self.stages.append(StageVisit(event.step, event.stage, *waited, ended=seconds))
            case StepClosed() if event.end.kind is not EndKind.COMMITTED:
                self.end_reasons[event.end.reason] += 1
            case SeedValidated():
                self.seed_score, self.best_score = event.score, event.best_score
            case Committed():
                self.commits.append(replace(event, seconds=seconds))
                self.best_score = event.best_score
            case Integrated():
                self.integrations.append(replace(event, seconds=seconds))
            case LimitChanged():
                self.limit_changes.append(replace(event, seconds=seconds))
            case RequestTurnedAway():
                # In the provider's words: whether it is a limit, a dead server or a bad request, it says best itself.
                reason = shorten(event.reason, SHOWN_REASON, placeholder=" ...")
                if reason in self.turned_away or len(self.turned_away) < MOST_REASONS:
                    self.turned_away[reason] += 1
            case _:
                pass

    @property
    def dollars(self) -> float:
        """Dollars of all requests, as far as prices are known."""
        return sum(of_stage.dollars for of_stage in list(self.paid.values()))

    def stats(self, run: EvolutionRun, unpriced: Collection[str], **figures: Any) -> RunStats:
        """Return the statistics of the run so far; ``figures`` are those that follow neither from events nor from it.

        Args:
            unpriced: stages that ask a model whose price is not known.
        """
        slots, paid = run.scheduler.statistics(), dict(self.paid)
        return RunStats(
            outcome=run.outcome,
            steps=self.counts[StepOpened],
            ended=dict(run.ended),
            end_reasons=dict(self.end_reasons),
            slots=slots.limit,
            peak_slots=slots.peak,
            occupancy=slots.busy_seconds / slots.limit_seconds if slots.limit_seconds else 0.0,
            busy_seconds_by_stage={name: stage.served_seconds for name, stage in slots.stages.items()},
            gaps={place: dict(sorted(counts.items())) for place, counts in list(run.gaps.items())},
            shared_rollouts=run.requests.joined,
            retried_requests=run.providers.retried,
            unanswered_examples=self.counts[ExampleGivenUp],
            timed_out_rollouts=run.requests.timed_out,
            requests_by_stage={stage: of_stage.requests for stage, of_stage in paid.items()},
            tokens_by_stage={stage: of_stage.tokens for stage, of_stage in paid.items()},
            # Where one stage has no price the sum of the others would be taken for the whole: it is unknown.
            cost_dollars=None if any(stage in unpriced for stage in paid) else self.dollars,
            dollars_by_stage={stage: None if stage in unpriced else paid[stage].dollars for stage in paid},
            generations=max((commit.generation for commit in self.commits), default=0),
            commits=list(self.commits),
            looks=dict(run.policy_decisions),
            limit_changes=list(self.limit_changes),
            pauses=self.counts[EndpointPaused],
            stages=list(self.stages),
            turned_away=dict(self.turned_away),
            **figures,
        )

    def async_stats(self, of_run: RunStats, **figures: Any) -> AsyncStats:
        """Add to the result of :meth:`stats` what only AsyncGEPA has; ``figures`` are those that no event tells."""
        minutes = of_run.seconds / 60
        reflection = sum(of_run.tokens_by_stage.get(stage, 0) for stage in REFLECTION_STAGES)
        return AsyncStats(
            **{field.name: getattr(of_run, field.name) for field in fields(of_run)},
            **figures,
            proposals_per_minute=figures["proposals"] / minutes if minutes else 0.0,
            task_tokens=sum(of_run.tokens_by_stage.values()) - reflection,
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
UNKNOWN = "unknown"
BUSY = 0.8
"""From this occupancy on a summary says that more slots would have been used. A step has waits between its stages, so
that even runs with far too few slots stay below 1; nothing but one sentence depends on it."""
SHOWN_LINES = 12
SHOWN_CHARACTERS = 500
"""Lines of a prompt's change in a summary, which has to fit on a screen; `AsyncStats.prompt_change` has all."""


def summary_of(stats: RunStats) -> str:
    """Sum a run up in about ten lines: how it ended, what it achieved, what it cost, and what limited it."""
    steps = ", ".join(f"{count} {way}" for way, count in steps_by_end(stats).items() if count) or "none ended"
    calls = "" if stats.max_metric_calls is None else f" of {stats.max_metric_calls}"
    reason = stats.stop_reason.rstrip(".") or ("steps may start" if stats.outcome == "running" else "nothing was left")
    of_gepa = isinstance(stats, AsyncStats)
    return "\n".join([
        f"{OUTCOMES[stats.outcome]} after {stats.seconds:.1f} s: {reason}",
        *(_score_lines(stats) if of_gepa else []),
        f"steps: {stats.steps} ({steps}){_proposals(stats) if of_gepa else ''}",
        f"metric calls: {stats.metric_calls}{calls}",
        *(_unreadable_lines(stats) if of_gepa else []),
        f"tokens: {_parts(stats.tokens_by_stage, lambda count: f'{count:,}')}",
        f"dollars: {_dollars_line(stats.dollars_by_stage)}",
        f"slots: {_slots(stats)}; {limited_by(stats)}",
        *(_change_lines(stats) if of_gepa else []),
    ])  # fmt: skip


def _score_lines(stats: AsyncStats) -> list[str]:
    before, after = (UNKNOWN if score is None else f"{score:.4g}" for score in (stats.seed_score, stats.best_score))
    lines = [f"validation score: {before} (the program given) -> {after} (the program returned)"]
    if stats.unseen_score is not None and stats.best_score != stats.seed_score:
        error = f" +- {stats.unseen_error:.2g}" if stats.unseen_error is not None else ""
        lines.append(f"on unseen examples: about {stats.unseen_score:.4g}{error}")
    if stats.unconsolidated:
        lines.append(f"its prompt joins edits of several reflections, and was not written anew: {stats.unconsolidated}")
    return lines


def _proposals(stats: AsyncStats) -> str:
    counted = f", {stats.proposals} proposals"
    if stats.proposals or not stats.end_reasons:
        return counted
    reason, steps = Counter(stats.end_reasons).most_common(1)[0]
    return f"{counted}; {steps} ended since: {shorten(reason, 120, placeholder=' ...')}"


def _unreadable_lines(stats: AsyncStats) -> list[str]:
    count = stats.unreadable_replies
    rollouts = sum(number for stage, number in stats.requests_by_stage.items() if stage not in REFLECTION_STAGES)
    shown = f"{count} of {rollouts} rollouts ({count / max(rollouts, 1):.0%})"
    return [f"replies that do not fit their format: {shown}; see add_format_failure_as_feedback"] if count else []


def _change_lines(stats: AsyncStats) -> list[str]:
    change = stats.prompt_change.splitlines()
    more = [f"... and {len(change) - SHOWN_LINES} lines more"] if len(change) > SHOWN_LINES else []
    return [line[:SHOWN_CHARACTERS] + "..." * (len(line) > SHOWN_CHARACTERS) for line in change[:SHOWN_LINES]] + more


def steps_by_end(stats: RunStats) -> dict[str, int]:
    """Count steps by how they ended; those that asked for no child are not among the rejected ones."""
    counts = dict(stats.ended)
    if steps := stats.end_reasons.get(PERFECT_MINIBATCH, 0):
        counts["found nothing to improve"] = steps
        counts["rejected"] = max(0, counts.get("rejected", 0) - steps)
    return counts


def limited_by(stats: RunStats) -> str:
    """Say what kept a run from doing more in its time."""
    reflecting = sum(stats.busy_seconds_by_stage.get(stage, 0.0) for stage in REFLECTION_STAGES)
    busy = sum(stats.busy_seconds_by_stage.values())
    # Refusals come first: where a provider turns requests away, more slots would only bring more refusals.
    if stats.pauses or any(one.after < one.before and one.reason == "refused" for one in stats.limit_changes):
        retries = f"{stats.retried_requests} requests were made again"
        if stats.turned_away:  # quoted, not interpreted: it may be a rate limit, a refused connection or a timeout
            reason, count = Counter(stats.turned_away).most_common(1)[0]
            retries += f", {count} of them since: {reason}"
        return f"the provider turned requests away and held it back ({retries})"
    if stats.occupancy >= BUSY:
        return "more slots (num_threads) would have been used"
    if busy and reflecting > busy / 2:
        return "reflections took most of it"
    return "steps waited for each other more than for slots"


def _slots(stats: RunStats) -> str:
    busy = f"{100 * stats.occupancy:.0f}% of their time in use"
    # The median rule moves slots between stages and leaves their number as it is.
    if all(change.reason == "the median rule" for change in stats.limit_changes):
        return f"{stats.slots}, {busy}"
    return f"as many as the endpoints took, at most {stats.peak_slots} of {stats.slots} at once, {busy}"


def _parts(by_stage: Mapping[str, T], shown: Callable[[T], str]) -> str:
    return ", ".join(f"{stage} {shown(value)}" for stage, value in by_stage.items() if value != 0) or "none"


def _dollars_line(by_stage: Mapping[str, float | None]) -> str:
    """List the dollars of each stage, and name the stages whose models have no price."""
    priced = {stage: cost for stage, cost in by_stage.items() if cost is not None}
    if not priced and by_stage:
        return "unknown (litellm has no price for the models)"
    unpriced = ", ".join(stage for stage in by_stage if stage not in priced)
    more = f"; unknown for {unpriced} (litellm has no price for the model)" if unpriced else ""
    return _parts(priced, lambda cost: f"{cost:.4f}") + more


def log_summary(logger: logging.Logger, stats: AsyncStats, error: bool = False) -> None:
    """Log the summary: INFO where the run ended, WARNING where it was cancelled, ERROR where it failed."""
    levels = {"aborted": logging.WARNING, "failed": logging.ERROR}
    logger.log(logging.ERROR if error else levels.get(stats.outcome, logging.INFO), "AsyncGEPA %s", summary_of(stats))
