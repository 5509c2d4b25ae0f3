"""Views of a run for a terminal, each a function from the run's history to text; a candidate as a saved program."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.texts import printable
from dspy_flashevolve.observe.analysis import FAILURES, RunTotals, family_tree, totals_of
from dspy_flashevolve.observe.formatting import (
    UNKNOWN,
    candidates_diff,
    format_duration,
    format_number,
    format_score,
    format_standing,
    format_table,
    time_left,
)
from dspy_flashevolve.observe.history import Candidate, History

LATEST = 5
"""Candidates, and problems of each kind, that `watch` shows: with the table above them they fit on 24 lines."""
MOST_NAMED = 20
"""Candidates that an error message names one by one. Of more it names the first and the last."""
MOST_LEVELS = 30
"""Levels of the family tree that are indented, as a terminal has room for; below them generations are named."""
CLIPPED = 200
"""Characters of a problem in `watch`: it has one line, or two in a narrow terminal."""
RETRY = "RequestTurnedAway"
"""Of these events `watch` shows the number alone: a busy provider makes thousands."""


def status(history: History) -> str:
    """Describe how a run stands: what `watch` shows."""
    totals = totals_of(history)
    session = history.sessions[-1] if history.sessions else None
    best, seed = history.best, history.seed
    seed_text = "no seed yet" if seed is None else f"seed {format_standing(seed)}"
    if seed is not None and seed.score is not None:
        seed_text += f" on {len(seed.scores)} examples"
    best_text = "-" if best is None else f"{format_score(best.score)} (candidate {best.index})"
    budget = f" of {totals.max_calls:,}" if totals.max_calls is not None else ""
    in_flight = ", ".join(f"{count} in {stage}" for stage, count in history.in_flight.items())
    retries = f", {totals.failures[RETRY]:,} requests made again" if RETRY in totals.failures else ""
    steps_by_end = ", ".join(f"{count} {end}" for end, count in totals.steps.items()) or "none"
    steps = f"{sum(totals.steps.values())}: {steps_by_end}" if history.sessions else UNKNOWN
    lines = [
        _headline(history, totals),
        *([f"because: {session.reason}"] if session is not None and session.reason else []),
        f"best score {best_text}, {seed_text}, {totals.accepted} candidates accepted",
        f"metric calls {totals.calls:,}{budget}{retries}",
        f"steps {steps}",
        *([f"requests in flight: {in_flight}"] if in_flight else []),
        "",
    ]
    if totals.by_role:
        head = ["", "requests", "no use", "tokens", "dollars", "median s", "waited s"]
        rows = [
            [
                group.name,
                *(format_number(count) for count in (group.requests, group.failed, group.tokens)),
                format_number(group.cost_dollars, 4),
                format_number(group.median_seconds, 2),
                format_number(group.waited_seconds, 1) if group.visits else "",
            ]
            for group in [*totals.by_role.values(), *totals.by_stage]
        ]
        lines += [*format_table(head, rows), ""]
    for candidate in [candidate for candidate in history.candidates if candidate.index > 0][-LATEST:]:
        when = "" if candidate.seconds is None else f" after {format_duration(candidate.seconds)}"
        lines.append(f"candidate {candidate.index}: {format_score(candidate.score)}{when}{_origin(candidate)}")
    return "\n".join([*lines, *_latest_problems(history)])


def _headline(history: History, totals: RunTotals) -> str:
    """Name the run, its state, its time and, where a limit tells, how much longer it may take."""
    session = history.sessions[-1] if history.sessions else None
    state = history.state + (f", session {session.number}" if session is not None and session.number > 1 else "")
    parts = [state, format_duration(totals.seconds)]
    if session is not None and history.state == "running":
        limits = session.settings
        used = {
            "max_metric_calls": totals.calls,
            "max_reflection_calls": totals.by_role["reflection"].requests,
            "max_cost": totals.cost_dollars or 0.0,
        }
        share = max((spent / limits[name] for name, spent in used.items() if limits.get(name)), default=None)
        max_seconds = limits.get("max_seconds")
        if max_seconds is not None:  # unlike the other limits it counts from zero in each session
            max_seconds += history.session_began
        parts.append(time_left(history.seconds, max_seconds, share))
    return f"{history.optimizer} in {history.directory}: {', '.join(filter(None, parts))}"


def _latest_problems(history: History) -> list[str]:
    problems = [event for event in history.events if event.kind in FAILURES and event.kind != RETRY]
    lines: list[str] = []
    # The newest last: in a terminal that is the line above the cursor.
    for event in problems[-LATEST:]:
        fields = json.dumps(event.fields)
        lines.append(f"{event.kind} after {format_duration(event.seconds)}: {fields[:CLIPPED]}")
    for request in history.failed_requests[-LATEST:]:
        when = format_duration(request.seconds)
        lines.append(f"request failed after {when} ({request.stage}): {request.error[:CLIPPED]}")
    failed = [step for step in history.steps.values() if step.way == "failed"]
    return lines + [f"step {step.number} failed: {step.reason[:CLIPPED]}" for step in failed[-LATEST:]]


def watch(
    run_dir: str, look: Callable[[], History | None], show: Callable[[str], None], wait: Callable[[], None]
) -> History:
    """Show how a run stands, again and again until it is over, and return its last history.

    Args:
        look: reads the run; returns None while it has not begun. That is said once.
        wait: returns when it is time to look again.
    """
    is_awaited = False
    while (history := look()) is None or history.state == "running":
        if history is not None:
            show(printable(status(history)))
        elif not is_awaited:
            show(f"waiting for a run in {run_dir}: it has no journal yet (Ctrl-C ends this)")
            is_awaited = True
        wait()
    # Once more: what was shown last is from before the end.
    show(printable(status(history)))
    return history


def _origin(candidate: Candidate) -> str:
    """Name the step that made a candidate; nothing for a playbook, which many steps have made."""
    if candidate.step is None:
        return ", another program"
    return f", step {candidate.step}" if candidate.step >= 0 else ""


COLUMNS = ("run", "optimizer", "state", "seed", "best", "accepted", "steps", "calls", "task tokens",
           "reflection tokens", "dollars", "time")  # fmt: skip


def compare(runs: Sequence[tuple[History, RunTotals]]) -> str:
    """Lay runs side by side, with the settings that all of them have and in which they differ."""
    rows: list[list[str]] = []
    for history, totals in runs:
        rows.append(
            [
                history.directory,
                history.optimizer,
                history.state,
                UNKNOWN if history.seed is None else format_standing(history.seed),
                format_score(totals.best_score),
                format_number(totals.accepted),
                format_number(sum(totals.steps.values()) if history.sessions else None),
                format_number(totals.calls),
                *(
                    format_number(totals.by_role[role].tokens if totals.by_role else None)
                    for role in ("task", "reflection")
                ),
                format_number(totals.cost_dollars, 4),
                format_duration(totals.seconds),
            ]
        )
    lines = format_table(COLUMNS, rows)
    settings = [history.sessions[-1].settings if history.sessions else {} for history, _ in runs]
    for name in settings[0]:
        values = [json.dumps(of_run.get(name)) for of_run in settings]
        # A setting that only some of the optimizers have is no difference between the runs.
        if len(set(values)) > 1 and name != "log_dir" and all(name in of_run for of_run in settings):
            lines.append(f"{name}: {' | '.join(value[:60] for value in values)}")
    return "\n".join(lines)


def diff(history: History, before: str, after: str) -> str:
    """Show what changed in the texts from one candidate to another."""
    lines = candidates_diff(candidate_of(history, before), candidate_of(history, after))
    return "\n".join(lines) or f"candidates {before} and {after} have the same texts"


def candidate_of(history: History, name: str) -> Candidate:
    """Find a candidate by its number, or as "best" or "seed"; a ConfigurationError names those that there are."""
    by_name = {"best": history.best, "seed": history.seed}
    by_name |= {str(candidate.index): candidate for candidate in history.candidates}
    candidate = by_name.get(name)
    if candidate is None:
        if name == "best":
            raise ConfigurationError(f"{history.directory}: no candidate has a score yet, so none is the best.")
        numbers = [str(candidate.index) for candidate in history.candidates] or ["none"]
        names = ", ".join(numbers) if len(numbers) <= MOST_NAMED else f"{numbers[0]} to {numbers[-1]}"
        raise ConfigurationError(f"{history.directory}: candidate {name!r}, expected best, seed or one of {names}.")
    return candidate


def tree(history: History, prompts: bool = False) -> str:
    """Draw the family tree: every candidate under its first parent, with score, gap, step, verdicts, and its diff."""
    verdicts: dict[Any, dict[str, None]] = {}  # step -> verdicts on its child; a resumed run repeats some, so a dict
    members: dict[Any, list[int]] = {}  # step that ends an integration -> steps whose children were read for it
    for event in history.of_kind("Integrated"):
        members[event.step] = event.members
        for member, verdict, reason in event.verdicts:
            verdicts.setdefault(member, {})[f"{verdict}. {reason}"] = None
    lines: list[str] = []
    for depth, candidate, parent in family_tree(history):
        indent = "  " * min(depth, MOST_LEVELS)
        if parent is None:
            standing = f": {format_standing(candidate)} validated" if candidate.scores else ""
            standing = standing if candidate.score is None else f": score {candidate.score:.3f}"
            lines.append(f"candidate 0 (the seed){standing}")
            if prompts:
                lines += [f"  {name}: {line}" for name, text in candidate.texts.items() for line in text.splitlines()]
            continue
        gap = f", gap {candidate.gap}" if candidate.gap is not None else ""
        gap += f", generation {depth}" if depth > MOST_LEVELS else ""
        other_parents = candidate.parents[1:]
        also = f", also from {', '.join(map(str, other_parents))}" if other_parents else ""
        lines.append(f"{indent}candidate {candidate.index}: score {candidate.score:.3f}{gap}{_origin(candidate)}{also}")
        for member in members.get(candidate.step, [candidate.step]):
            lines += [f"{indent}  step {member}: {verdict}" for verdict in verdicts.get(member, ())]
        if prompts:
            lines += [f"{indent}  {line}" for line in candidates_diff(parent, candidate)]
    return "\n".join(lines)


PREDICTOR = "predictor '"
"""How the name of a predictor's fingerprint begins in the journal; see programs/fingerprints.py."""
SAVED = 'expected what student.save("student.json") wrote.'


def program_state(history: History, candidate: Candidate, base: str | Path | None = None) -> dict[str, Any]:
    """Return the student's state with a candidate's texts in it, as ``load`` takes it.

    The journal holds the texts of candidates, and of a harness all there is. Demos, field descriptions and LMs of
    predictors belong to the student. Without ``base`` the state has none of them: the program that loads it keeps its
    own, except an LM that is set on a predictor.

    Args:
        base: the file that ``student.save("student.json")`` wrote. Default: the smallest state that ``load`` takes.

    Raises:
        ConfigurationError: ``base`` is no such file, or of another program, or it is needed and missing.
    """
    if not candidate.texts:
        raise ConfigurationError(f"{history.directory}: the texts of candidate {candidate.index} are not there.")
    metadata: Any = {"dependency_versions": {}}  # without it ``load`` refuses a state
    if history.optimizer == "AsyncMetaHarness":
        memory = candidate.more["candidate"].get("memory")
        return {"module_src": candidate.texts["source"], "memory": memory, "lm": None, "metadata": metadata}
    state = {} if base is None else _read_state(Path(base))
    fingerprints = history.sessions[-1].fingerprints if history.sessions else {}
    predictors = {name[len(PREDICTOR) : -1] for name in fingerprints if name.startswith(PREDICTOR)}
    missing = predictors - candidate.texts.keys() - state.keys()
    unknown = candidate.texts.keys() - state.keys() if base is not None else set[str]()
    if missing or unknown:
        raise ConfigurationError(
            f"{base or history.directory}: it says nothing of {', '.join(sorted(missing or unknown))}. Give what "
            'student.save("student.json") wrote for the program that was optimized, by --program student.json.'
        )
    for name, text in candidate.texts.items():
        part = state.setdefault(name, {"lm": None})  # load reads this key of every predictor
        if not isinstance(part, dict) or not isinstance(part.get("signature", {}), dict):
            raise ConfigurationError(f"{base}: {name} is no predictor's state, {SAVED}")
        if "module_src" in part or (name not in predictors and predictors):  # a dspy.Flex
            part["module_src"] = text
        else:
            part.setdefault("signature", {"fields": []})["instructions"] = text
    return {"metadata": metadata, **state}


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read ({error.strerror}), {SAVED}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is no JSON ({error}), {SAVED}") from error
    if not isinstance(state, dict) or "metadata" not in state:
        raise ConfigurationError(f"{path} holds no program, {SAVED}")
    return state
