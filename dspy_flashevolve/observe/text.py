"""Views of a run for a terminal, each a function from its history to text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.observe.figures import Figures, Spent, family, figures, prompts_diff
from dspy_flashevolve.observe.history import Candidate, History

LATEST = 5
"""Candidates, and problems, that `watch` shows."""
UNKNOWN = "unknown"
MOST_NAMED = 20
"""Candidates that a message names one by one; of more it names the first and the last."""
RETRY = "RequestTurnedAway"
"""Of these `watch` tells the number alone: a busy provider makes many."""


def plain(text: str) -> str:
    """A text without control characters: what a run has written may hold any, and a terminal obeys them."""
    return "".join(one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns; all but the first to the right."""
    widths = [max(len(row[place]) for row in [head, *rows]) for place in range(len(head))]
    return [
        "  ".join(
            one.rjust(width) if place else one.ljust(width)
            for place, (one, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *rows]
    ]


def number(value: float | None, places: int = 0) -> str:
    """A number for people; None is unknown.

    >>> number(1234567), number(0.5, 3), number(None)
    ('1,234,567', '0.500', 'unknown')
    """
    return UNKNOWN if value is None else f"{value:,.{places}f}"


def duration(seconds: float | None) -> str:
    """Seconds for people; None is unknown.

    >>> duration(7.25), duration(3725), duration(None)
    ('7.2 s', '1 h 02 min', 'unknown')
    """
    if seconds is None:
        return UNKNOWN
    minutes = int(seconds // 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {int(seconds % 60):02d} s" if minutes else f"{seconds:.1f} s"


def left(seconds: float, most_seconds: float | None, share: float | None) -> str:
    """How much longer a run may take, by the limit that it reaches first; empty where no limit tells.

    Args:
        seconds: that it has taken.
        most_seconds: the limit.
        share: of its metric calls, dollars or reflections that is used, from 0 to 1.

    >>> left(30, 100, None), left(30, 100, 0.5), left(30, None, None)
    ('about 1 min 10 s left', 'about 30.0 s left', '')
    """
    by_limits = [most_seconds - seconds] if most_seconds is not None else []
    by_limits += [seconds / share - seconds] if share else []
    return f"about {duration(max(0.0, min(by_limits)))} left" if by_limits else ""


def score(value: float | None) -> str:
    """A score."""
    return UNKNOWN if value is None else f"{value:.4f}"


def standing(candidate: Candidate) -> str:
    """A candidate's score; of a seed that is being validated, how far that is."""
    if candidate.score is None and candidate.scores:
        of = "" if candidate.examples is None else f" of {candidate.examples}"
        return f"{len(candidate.scores)}{of} examples"
    return score(candidate.score)


def status(history: History) -> str:
    """How a run stands: what `watch` shows."""
    all_of = figures(history)
    session = history.sessions[-1] if history.sessions else None
    state = history.state + (f", session {session.number}" if session is not None and session.number > 1 else "")
    budget = f" of {all_of.max_calls:,}" if all_of.max_calls is not None else ""
    times = [state, duration(all_of.seconds)]
    if session is not None and history.state == "running":
        limits = session.settings
        used = {
            "max_metric_calls": all_of.calls,
            "max_reflection_calls": all_of.by_role["reflection"].requests,
            "max_cost": all_of.cost_dollars or 0.0,
        }
        share = max((spent / limits[name] for name, spent in used.items() if limits.get(name)), default=None)
        most = limits.get("max_seconds")  # it counts from zero in each session
        times.append(left(history.seconds, None if most is None else history.session_began + most, share))
    best, seed = history.best, history.seed
    seed_text = "no seed yet" if seed is None else f"seed {standing(seed)}"
    if seed is not None and seed.score is not None:
        seed_text += f" on {len(seed.scores)} examples"
    best_text = "-" if best is None else f"{score(best.score)} (candidate {best.index})"
    ways = ", ".join(f"{count} {way}" for way, count in all_of.steps.items()) or "none"
    again = f", {all_of.failures[RETRY]:,} requests made again" if RETRY in all_of.failures else ""
    # A metric call is written down just before the metric begins: what asks the task's LM is not counted here.
    under_way = f", {history.under_way} under way" if history.under_way else ""
    steps = f"{sum(all_of.steps.values())}: {ways}" if history.sessions else UNKNOWN
    lines = [
        f"{history.optimizer} in {history.directory}: {', '.join(filter(None, times))}",
        *([f"because: {session.reason}"] if session is not None and session.reason else []),
        f"best score {best_text}, {seed_text}, {all_of.accepted} candidates accepted",
        f"metric calls {all_of.calls:,}{budget}{under_way}{again}",
        f"steps {steps}",
        "",
    ]
    if all_of.by_role:
        head = ["", "requests", "no use", "tokens", "dollars", "median s", "waited s"]
        lines += [*table(head, [_row(one) for one in [*all_of.by_role.values(), *all_of.by_stage]]), ""]
    for one in [one for one in history.candidates if one.index > 0][-LATEST:]:
        when = "" if one.seconds is None else f" after {duration(one.seconds)}"
        lines.append(f"candidate {one.index}: {score(one.score)}{when}{_maker(one)}")
    for one in [one for one in history.events if one.kind in all_of.failures and one.kind != RETRY][-LATEST:]:
        said = json.dumps({name: value for name, value in one.fields.items() if name != "shift"})
        lines.append(f"{one.kind} after {duration(one.seconds)}: {said[:200]}")
    lines += [f"request failed after {duration(one.seconds)} ({one.stage}): {one.error[:200]}" for one in [
        one for one in history.requests if one.error][-LATEST:]]  # fmt: skip
    failed = [step for step in history.steps.values() if step.way == "failed"]
    lines += [f"step {step.number} failed: {step.reason[:200]}" for step in failed[-LATEST:]]
    return "\n".join(lines)


def watch(
    run_dir: str, look: Callable[[], History | None], show: Callable[[str], None], wait: Callable[[], None]
) -> History:
    """Show how a run stands, again and again until it is over; returns it as it was then.

    Args:
        run_dir: its name.
        look: reads the run; None while it has not begun, which is told once and waited for.
        show: takes a text for people.
        wait: returns when it is time to look again.
    """
    is_awaited = False
    while (history := look()) is None or history.state == "running":
        if history is not None:
            show(plain(status(history)))
        elif not is_awaited:
            show(f"waiting for a run in {run_dir}: it has no journal yet (Ctrl-C ends this)")
            is_awaited = True
        wait()
    show(plain(status(history)))
    return history


def _row(one: Spent) -> list[str]:
    waited = number(one.waited_seconds, 1) if one.visits else ""
    return [
        one.name, number(one.requests), number(one.failed), number(one.tokens), number(one.cost_dollars, 4),
        number(one.median_seconds, 2), waited,
    ]  # fmt: skip


def _maker(one: Candidate) -> str:
    """The step that made it; a playbook is of many, and of a candidate that dspy.GEPA has made nothing tells."""
    return ", another program" if one.step is None else f", step {one.step}" if one.step >= 0 else ""


COLUMNS = ("run", "optimizer", "state", "seed", "best", "accepted", "steps", "calls", "task tokens",
           "reflection tokens", "dollars", "time")  # fmt: skip


def compare(runs: Sequence[tuple[History, Figures]]) -> str:
    """Runs side by side, and the settings that all have and in which they differ."""
    rows: list[list[str]] = []
    for one, found in runs:
        seed_standing = UNKNOWN if one.seed is None else standing(one.seed)
        rows.append([
            one.directory, one.optimizer, one.state, seed_standing, score(found.best_score),
            number(found.accepted), number(sum(found.steps.values()) if one.sessions else None), number(found.calls),
            *(number(found.by_role[role].tokens if found.by_role else None) for role in ("task", "reflection")),
            number(found.cost_dollars, 4), duration(found.seconds),
        ])  # fmt: skip
    lines = table(COLUMNS, rows)
    settings = [one.sessions[-1].settings if one.sessions else {} for one, _ in runs]
    for name in settings[0]:
        values = [json.dumps(one.get(name)) for one in settings]
        if len(set(values)) > 1 and name != "log_dir" and all(name in one for one in settings):
            lines.append(f"{name}: {' | '.join(value[:60] for value in values)}")
    return "\n".join(lines)


def diff(history: History, before: str, after: str) -> str:
    """What changed in the texts from one candidate to another."""
    found = prompts_diff(candidate_of(history, before), candidate_of(history, after))
    return "\n".join(found) or f"candidates {before} and {after} have the same texts"


def candidate_of(history: History, name: str) -> Candidate:
    """A candidate by its number, or as "best" or "seed".

    Raises:
        ConfigurationError: there is none.
    """
    special = {"best": history.best, "seed": history.seed}
    found = special.get(name) or next((one for one in history.candidates if str(one.index) == name), None)
    if found is None:
        if name == "best":
            raise ConfigurationError(f"{history.directory}: no candidate has a score yet, so none is the best.")
        there = ", ".join(str(one.index) for one in history.candidates) or "none"
        if len(history.candidates) > MOST_NAMED:
            there = f"{history.candidates[0].index} to {history.candidates[-1].index}"
        raise ConfigurationError(f"{history.directory}: candidate {name!r}, expected best, seed or one of {there}.")
    return found


def _seed_told(seed: Candidate) -> str:
    if seed.score is None:
        return f": {standing(seed)} validated" if seed.scores else ""
    return f": score {seed.score:.3f}"


def tree(history: History, prompts: bool = False) -> str:
    """The family tree: every candidate under its first parent, with score, gap, step and verdicts.

    Args:
        prompts: show what each candidate changed in its first parent's texts.
    """
    verdicts: dict[Any, dict[str, None]] = {}  # step -> what was said of its child; said again in a run that goes on
    members: dict[Any, list[int]] = {}  # step that brings an integration to its end -> steps whose children were read
    for event in history.of_kind("Integrated"):
        members[event.step] = event.fields["members"]
        for member, verdict, reason in event.fields["verdicts"]:
            verdicts.setdefault(member, {})[f"{verdict}. {reason}"] = None
    lines: list[str] = []
    for depth, one, parent in family(history):
        indent = "  " * depth
        if parent is None:
            lines.append("candidate 0 (the seed)" + _seed_told(one))
            if prompts:
                lines += [f"  {name}: {line}" for name, text in one.texts.items() for line in text.splitlines()]
            continue
        gap = f", gap {one.gap}" if one.gap is not None else ""
        others = one.parents[1:]
        also = f", also from {', '.join(map(str, others))}" if others else ""
        lines.append(f"{indent}candidate {one.index}: score {one.score:.3f}{gap}{_maker(one)}{also}")
        read = members.get(one.step, [one.step])
        lines += [f"{indent}  step {member}: {said}" for member in read for said in verdicts.get(member, ())]
        if prompts:
            lines += [f"{indent}  {line}" for line in prompts_diff(parent, one)]
    return "\n".join(lines)
