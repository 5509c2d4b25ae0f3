"""The archive as text files: what proposers list, read and search, and what a run directory holds.

A path is a key of a dictionary, made of numbers only. So there is no path that leads anywhere else, whatever a
proposer asks for, and no name of a proposer's becomes a path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from dspy_flashevolve.harness.archive import Archive, Evaluated, Failed, Trial
from dspy_flashevolve.harness.drafts import Draft

MESSAGE_CHARACTERS = 3000


def files_of(number: int, candidate: Evaluated) -> dict[str, str]:
    """Path -> text of a candidate in the archive."""
    home = f"candidates/{number:04d}"
    rows = zip(candidate.scores, candidate.costs, strict=True)
    scores = "\n".join(f"validation {n}: score {score:.4g}, cost {cost:.6g}" for n, (score, cost) in enumerate(rows))
    return {
        f"{home}/source.py": candidate.draft.source,
        f"{home}/about.txt": "\n".join([
            *_about(candidate.draft),
            f"score: {candidate.score:.4f}",
            f"cost: {candidate.cost:.1f}",
            *(f"failed run: {_one_line(failure)}" for failure in candidate.failures[:5]),
        ]),
        f"{home}/scores.txt": scores,
        **_traces(home, candidate.traces),
        **({} if candidate.memory is None else {f"{home}/memory.json": json.dumps(candidate.memory, indent=1)}),
    }  # fmt: skip


def files_of_failed(number: int, failed: Failed) -> dict[str, str]:
    """Path -> text of a candidate that failed."""
    home = f"failed/{number:04d}"
    return {
        f"{home}/source.py": failed.draft.source,
        f"{home}/about.txt": "\n".join([*_about(failed.draft), f"failed: {_one_line(failed.failure)}"]),
        **_traces(home, failed.traces),
    }


def overview(archive: Archive) -> str:
    """One line a candidate, best score first, and the latest failures."""
    front = set(archive.front)
    order = sorted(range(archive.version), key=lambda one: (-archive.candidates[one].score, one))
    lines = [_line(number, archive.candidates[number], number in front) for number in order]
    lines += [_one_line(f"failed {n:04d}: {one.draft.name}: {one.failure}")[:300] for n, one in _latest(archive)]
    return "\n".join(lines) or "The archive is empty."


class Library:
    """The files of an archive, made as it grows.

    Args:
        archive: read only.
        log_dir: where they are written, too; None for nowhere.
    """

    def __init__(self, archive: Archive, log_dir: Path | None = None) -> None:
        self._archive = archive
        self._log_dir = log_dir
        self._files: dict[str, str] = {}
        self._candidates = self._failed = 0

    @property
    def files(self) -> Mapping[str, str]:
        """Path -> text, of everything that was admitted up to the last :meth:`update`."""
        return self._files

    def update(self) -> None:
        """Take in what was admitted since the last one.

        Raises:
            OSError: the run directory cannot be written.
        """
        fresh: dict[str, str] = {}
        for number in range(self._candidates, len(self._archive.candidates)):
            fresh |= files_of(number, self._archive.candidates[number])
        for number in range(self._failed, len(self._archive.failed)):
            fresh |= files_of_failed(number, self._archive.failed[number])
        self._candidates, self._failed = len(self._archive.candidates), len(self._archive.failed)
        if fresh:
            self._files = {**self._files, **fresh}  # another mapping: proposers read in threads
            self._write(fresh | {"overview.txt": overview(self._archive)})

    def _write(self, fresh: dict[str, str]) -> None:
        for path, text in fresh.items() if self._log_dir is not None else ():
            assert self._log_dir is not None
            place = self._log_dir / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8", errors="replace")


def _about(draft: Draft) -> list[str]:
    based = ", ".join(map(str, draft.parents)) or "nothing"
    return [
        f"name: {_one_line(draft.name)}",
        f"direction: {draft.direction}",
        f"hypothesis: {_one_line(draft.hypothesis)}",
        f"based on: {based}",
    ]


def _line(number: int, one: Evaluated, in_front: bool) -> str:
    star = " (Pareto front)" if in_front else ""
    said = _one_line(f"{one.draft.name}: {one.draft.hypothesis}")
    return f"{number:04d}: score {one.score:.4f}, cost {one.cost:.0f}{star}: {said}"


def _latest(archive: Archive) -> list[tuple[int, Failed]]:
    return list(enumerate(archive.failed))[-5:]


def _traces(home: str, traces: tuple[Trial, ...]) -> dict[str, str]:
    return {f"{home}/traces/{number}.txt": _trace(trial) for number, trial in enumerate(traces)}


def _trace(trial: Trial) -> str:
    parts = [f"example: {trial.example}", f"inputs: {json.dumps(trial.inputs)}", f"labels: {json.dumps(trial.labels)}"]
    for number, call in enumerate(trial.outcome.calls):
        parts += [f"LM call {number}, {call.prompt_tokens} prompt tokens:", _cut(json.dumps(call.messages, indent=1))]
        parts += [f"LM reply {number}:", _cut("\n".join(map(str, call.outputs)))]
    if trial.outcome.printed:
        parts += ["printed:", _cut(trial.outcome.printed)]
    if trial.outcome.failure is not None:
        parts.append(f"failed: {_one_line(trial.outcome.failure)}")
    parts += [f"prediction: {_cut(json.dumps(trial.outcome.fields))}", f"score: {trial.score:.4g}"]
    return "\n".join([*parts, f"cost: {trial.cost:.6g}", f"feedback: {trial.feedback}"])


def _one_line(said: object) -> str:
    """A candidate's or a proposer's words, so that they cannot look like a line of ours."""
    return " ".join(str(said).split())


def _cut(text: str) -> str:
    return text if len(text) <= MESSAGE_CHARACTERS else text[: MESSAGE_CHARACTERS - 4] + " ..."
