"""The archive of all candidates with their scores and costs, and the drafts that become candidates.

Proposers read the archive as text files. The files are entries of a dictionary whose keys we make of numbers, so that
no path leads out of the archive, whatever a proposer asks for, and no text of a proposer becomes a path.

A draft is a candidate before it is run: a source that was read out of a reply and checked without being executed.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from dspy_flashevolve.engine.store import write_private
from dspy_flashevolve.engine.texts import without_surrogates
from dspy_flashevolve.sandbox.contract import Failure, Outcome

Cost = Callable[[Outcome], float]
"""A function from the outcome of one run on one example to its cost. Lower is better; it must be finite."""
PAGE_CHARACTERS = 6000
"""Characters of a file that one tool call returns, some 1,500 tokens: all pages that an agent reads stay in its prompt.
"""
MESSAGE_CHARACTERS = PAGE_CHARACTERS // 2
"""Most characters of one LM message in a trace; the rest is cut off, so that a page has room for a call with its reply.
"""
OVERVIEW_CANDIDATES = 10
"""Candidates of each kind in the overview: of the Pareto front, the best, the newest. It is in every call of a
proposer's agent, with some 2,500 tokens at most; naming all 427 candidates of half an hour took 65,000."""
OVERVIEW_CHARACTERS = 300
"""Most characters of a line of the overview: numbers, name and a hypothesis of a sentence or two."""


def context_tokens(outcome: Outcome) -> float:
    """Return the tokens of all prompts that a harness sent for one example, as the host counted them."""
    return float(sum(call.prompt_tokens for call in outcome.calls))


@dataclass(frozen=True)
class Trial:
    """One run of a candidate on one example.

    Args:
        example: split and number of the example, such as "train 3".
        inputs: inputs of the example, as JSON.
        outcome: what the sandbox returned.
        score: of the metric; the failure score where the run failed.
        feedback: of the metric; empty where it gave none.
        cost: cost of the run.
        labels: labels of the example, as JSON; empty for validation examples.
    """

    example: str
    inputs: dict[str, Any]
    outcome: Outcome
    score: float
    feedback: str = ""
    cost: float = 0.0
    labels: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Evaluated:
    """A candidate with its scores on the whole validation set.

    Args:
        draft: the candidate.
        scores, costs: one for each validation example, in order; empty until they have been run.
        failures: why runs on validation examples failed, without their labels.
        traces: runs on training examples, with feedback.
        memory: the memory after ``learn``; None where the candidate does not learn.
    """

    draft: Draft
    scores: tuple[float, ...]
    costs: tuple[float, ...]
    failures: tuple[Failure, ...] = ()
    traces: tuple[Trial, ...] = ()
    memory: Any = None

    @property
    def score(self) -> float:
        """Mean score over the validation set."""
        return sum(self.scores) / len(self.scores)

    @property
    def cost(self) -> float:
        """Mean cost over the validation set."""
        return sum(self.costs) / len(self.costs)


@dataclass(frozen=True)
class Failed:
    """A candidate that failed its check or its evaluation.

    Args:
        draft: the candidate.
        failure: the reason.
        traces: runs on training examples, with feedback.
    """

    draft: Draft
    failure: Failure
    traces: tuple[Trial, ...] = ()


Checked = Evaluated | Failed
"""A candidate that passed or failed its check or its evaluation."""


def pareto_front(points: Mapping[int, tuple[float, float]]) -> tuple[int, ...]:
    """Return the numbers of the points (score, cost) on the Pareto front, best score first.

    A point is on the front if no other has as high a score at as low a cost; of equal points the lowest number is.

    >>> pareto_front({0: (0.5, 10), 1: (0.9, 30), 2: (0.4, 20), 3: (0.9, 30)})
    (1, 0)
    """
    front: list[int] = []
    cheapest = float("inf")
    for number in sorted(points, key=lambda number: (-points[number][0], points[number][1], number)):
        if points[number][1] < cheapest:
            front.append(number)
            cheapest = points[number][1]
    return tuple(front)


class Archive:
    """Candidates by number, in the order of their admission, and their files, which are written to ``log_dir``, too.

    Only `HarnessRun.admit` changes it.
    """

    def __init__(self, log_dir: Path | None = None) -> None:
        self.candidates: list[Evaluated] = []
        self.failed: list[Failed] = []
        self.files: Mapping[str, str] = {}
        """Path -> text. A change makes a new mapping, since proposers read the old one in threads."""
        self._log_dir = log_dir

    @property
    def version(self) -> int:
        """Number of candidates that have been admitted."""
        return len(self.candidates)

    @property
    def front(self) -> tuple[int, ...]:
        """Numbers of the candidates on the Pareto front of score and cost, best score first."""
        return pareto_front(
            {number: (candidate.score, candidate.cost) for number, candidate in enumerate(self.candidates)}
        )

    @property
    def best(self) -> int:
        """Number of the candidate with the best score; of equal scores the cheapest one, then the first."""
        return self.front[0]

    @property
    def overview(self) -> str:
        """A line for each candidate of the front, the best and the newest, best first, and for the latest failures."""
        return self._overview(OVERVIEW_CANDIDATES)

    def _overview(self, most: int) -> str:
        """Return the overview with at most so many candidates of each kind."""
        front = self.front
        ranked = sorted(range(self.version), key=lambda number: (-self.candidates[number].score, number))
        shown = {*front[:most], *ranked[:most], *range(self.version)[-most:]}
        lines: list[str] = []
        for number in filter(shown.__contains__, ranked):
            candidate = self.candidates[number]
            front_note = " (Pareto front)" if number in front else ""
            summary = f"{candidate.draft.name}: {candidate.draft.hypothesis}"
            lines.append(f"{number:04d}: score {candidate.score:.4f}, cost {candidate.cost:.0f}{front_note}: {summary}")
        if others := self.version - len(shown):
            lines.append(f"... and {others} others, which list_files and read_file show")
        for number, failed in list(enumerate(self.failed))[-5:]:
            lines.append(f"failed {number:04d}: {failed.draft.name}: {failed.failure}")
        cut = [_one_line(line)[:OVERVIEW_CHARACTERS] for line in lines]
        return without_surrogates("\n".join(cut) or "The archive is empty.")

    def add(self, candidate: Checked) -> int:
        """Admit a candidate, or keep one that failed, so that proposers do not repeat its mistake. Return its number
        among these.

        Raises JournalError: ``log_dir`` cannot be written.
        """
        if isinstance(candidate, Failed):
            folder, number = "failed", len(self.failed)
            self.failed.append(candidate)
        else:
            folder, number = "candidates", self.version
            self.candidates.append(candidate)
        fresh = _files_of(f"{folder}/{number:04d}", candidate)
        self.files = {**self.files, **fresh}
        if self._log_dir is not None:
            for path, text in {**fresh, "overview.txt": self._overview(self.version)}.items():
                write_private(self._log_dir / path, text)
        return number


def _files_of(home: str, candidate: Checked) -> dict[str, str]:
    draft = candidate.draft
    about = [
        f"name: {_one_line(draft.name)}",
        f"direction: {draft.direction}",
        f"hypothesis: {_one_line(draft.hypothesis)}",
        f"based on: {', '.join(map(str, draft.parents)) or 'nothing'}",
    ]
    files = {f"{home}/source.py": draft.source}
    files |= {f"{home}/traces/{number}.txt": trace_text(trial) for number, trial in enumerate(candidate.traces)}
    if isinstance(candidate, Failed):
        about.append(f"failed: {_one_line(candidate.failure)}")
    else:
        about += [f"score: {candidate.score:.4f}", f"cost: {candidate.cost:.1f}"]
        about += [f"failed run: {_one_line(failure)}" for failure in candidate.failures[:5]]
        rows = enumerate(zip(candidate.scores, candidate.costs, strict=True))
        files[f"{home}/scores.txt"] = "\n".join(
            f"validation {number}: score {score:.4g}, cost {cost:.6g}" for number, (score, cost) in rows
        )
        if candidate.memory is not None:
            files[f"{home}/memory.json"] = json.dumps(candidate.memory, indent=1)
    return files | {f"{home}/about.txt": "\n".join(about)}


def trace_text(trial: Trial) -> str:
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


def _one_line(text: object) -> str:
    """Return a text of a candidate or proposer in one line, so that it cannot forge further lines of a file."""
    return " ".join(str(text).split())


def _cut(text: str) -> str:
    return text if len(text) <= MESSAGE_CHARACTERS else text[: MESSAGE_CHARACTERS - 4] + " ..."


IMPORTABLE = frozenset({
    "__future__", "abc", "ast", "base64", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal",
    "difflib", "dspy", "enum", "fractions", "functools", "hashlib", "heapq", "itertools", "json", "math", "numbers",
    "numpy", "operator", "pydantic", "random", "re", "statistics", "string", "textwrap", "time", "typing",
    "typing_extensions", "unicodedata", "zlib",
})  # fmt: skip
"""Modules that a harness may import. The check only tells a proposer early; it is the sandbox that confines code."""
MOST_CHARACTERS = 100_000
"""Most characters of a source: some 25,000 tokens, more than proposers are shown or write. It bounds `ast.parse`."""
MOST_REPLY_CHARACTERS = 10 * MOST_CHARACTERS
"""Characters of a reply that are read; enough for ten modules of the longest kind."""
_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})([^`]*)")
"""The first or last line of a code block: its indentation, its fence and its language."""
_PYTHON = re.compile(r"\s*((py|python)[\d.]*(\s.*)?)?", re.IGNORECASE)
"""The languages of code blocks that are read: Python, or none."""
_SUBMITS = re.compile(r"(?:[-+]|\d+[.)])?\s*drafts?\s*:(.*)", re.IGNORECASE)
_DRAFT = re.compile(r"(drafts/)?\w{1,40}(\.py)?")
_HEADER = re.compile(r"^#[ \t]*(name|hypothesis|based on)[ \t]*:[ \t]*(.*)$", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class Draft:
    """A candidate before it is run.

    Args:
        source: Python source of one ``dspy.Module`` subclass, with its imports and helpers.
        class_name: name of that class.
        learns: whether it has a method ``learn``.
        name, hypothesis: texts of the proposer; shown, never used as a path.
        parents: numbers of the candidates that it is based on.
        direction: the direction that its proposer was given.
    """

    source: str
    class_name: str
    learns: bool = False
    name: str = ""
    hypothesis: str = ""
    parents: tuple[int, ...] = ()
    direction: str = ""


TRIAL: TypeAdapter[Trial] = TypeAdapter(Trial)
CHECKED: TypeAdapter[Checked] = TypeAdapter(Checked)
"""Read a trial or a checked candidate from the dictionary that ``asdict`` made of it."""


class DraftError(ValueError):
    """The source is no harness."""


def draft_path(name: object) -> str:
    """Return the path of a draft, whose name may be given as that path."""
    return f"drafts/{str(name).strip().removeprefix('drafts/').removesuffix('.py')}.py"


def unknown_draft(name: object, drafts: Iterable[str]) -> str:
    """Say that there is no draft of this name, and which there are."""
    names = ", ".join(sorted(path[len("drafts/") : -len(".py")] for path in drafts)) or "none yet"
    return f"There is no draft {str(name)[:60]!r}; there are: {names}."


def sources_in(reply: str, drafts: Mapping[str, str] | None = None) -> list[str]:
    """Return the sources that a reply submits, in its order and each once; the whole reply where it submits none.

    They are its Python code blocks, and the drafts that its lines ``draft: NAME`` outside of code blocks name.

    Args:
        drafts: path -> source of the drafts.

    Raises:
        DraftError: all that it submits are drafts that do not exist.

    >>> sources_in("First\\n```python\\nx = 1\\n```\\ndraft: b\\n", {"drafts/b.py": "y = 2"})
    ['x = 1\\n', 'y = 2']
    """
    read, by_path = reply[:MOST_REPLY_CHARACTERS], drafts or {}
    sources: list[str] = []
    unknown: list[str] = []
    for language, text in _parts_of(read):
        if language is None:
            for name in _drafts_named_in(text):
                source = by_path.get(draft_path(name))
                unknown.append(name) if source is None else sources.append(source)
        elif _PYTHON.fullmatch(language):
            sources.append(text)
    if unknown and not sources:
        raise DraftError(unknown_draft(unknown[0], by_path))
    return list(dict.fromkeys(sources)) or ([read] if read.strip() else [])


def _parts_of(reply: str) -> Iterator[tuple[str | None, str]]:
    """Yield each code block of a reply with its language, and each line outside of them with None.

    As in CommonMark, a fence is closed by one of its kind that is as long or longer, and not indented by four columns
    more. It may be indented itself, as in a list. A block that is not closed is dropped: the reply was cut off.
    """
    opening: re.Match[str] | None = None
    block: list[str] = []
    for line in reply.split("\n"):
        fence = _FENCE.fullmatch(line)
        if opening is None:
            opening, block = fence, []
            if fence is None:
                yield None, line
        elif (
            fence is not None
            and fence[2].startswith(opening[2])
            and not fence[3].strip()
            and len(fence[1]) < len(opening[1]) + 4
        ):
            yield opening[3], "".join(block)
            opening = None
        else:
            block.append(line.removeprefix(opening[1]) + "\n")


def _drafts_named_in(line: str) -> list[str]:
    """Return the drafts that a line submits; none where it is no list of names."""
    match = _SUBMITS.fullmatch(re.sub(r"[*`\"'>]", "", line).strip())
    parts = re.split(r"[,;]|\band\b|\bdrafts?\s*:", match[1], flags=re.IGNORECASE) if match else []
    names = [name for part in parts if (name := part.strip().rstrip("."))]
    return names if all(map(_DRAFT.fullmatch, names)) else []


def draft_of(source: str, inputs: Iterable[str] = (), parents: Sequence[int] = (), direction: str = "") -> Draft:
    """Check a source without running it, and return it as a draft.

    Its comments are ``# name:``, ``# hypothesis:`` and ``# based on:``, which may name ``parents``. Raises DraftError:
    it is not Python, has not exactly one module whose ``forward`` accepts the inputs, or imports what a harness may not
    import.
    """
    if len(source) > MOST_CHARACTERS:
        raise DraftError(f"the source has {len(source)} characters, at most {MOST_CHARACTERS} are read")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DraftError(f"the source is not Python ({type(error).__name__}: {error})") from error
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = ["a relative import" if node.level else node.module or ""]
        for name in names:
            if name.split(".")[0] not in IMPORTABLE:
                raise DraftError(f"it imports {name}; a harness may import {', '.join(sorted(IMPORTABLE))}")
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    modules = [node for node in classes if any(_is_module(base) for base in node.bases)]
    if len(modules) != 1:
        raise DraftError(f"the source has {len(modules)} subclasses of dspy.Module, expected one")
    module = modules[0]
    methods = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    if "forward" not in methods:
        raise DraftError(f"class {module.name} has no method forward")
    accepted = methods["forward"].args
    named = [argument.arg for argument in (*accepted.posonlyargs, *accepted.args, *accepted.kwonlyargs)]
    missing = [] if accepted.kwarg else [name for name in inputs if name not in named]
    if missing:
        raise DraftError(f"forward does not accept the inputs {', '.join(missing)}: name them, or take **inputs")
    header = {key.lower(): text.strip() for key, text in _HEADER.findall(source)}
    based = {int(number) for number in re.findall(r"\d{1,6}", header.get("based on", ""))}
    return Draft(
        source=source,
        class_name=module.name,
        learns="learn" in methods,
        name=header.get("name", module.name)[:80],
        hypothesis=header.get("hypothesis", "")[:500],
        parents=tuple(sorted(based & set(parents))),
        direction=direction,
    )


def _is_module(base: ast.expr) -> bool:
    """Return whether a base class is ``Module`` or ``dspy.Module``; `ast.unparse` would exhaust the stack on some."""
    if isinstance(base, ast.Attribute):
        return base.attr == "Module" and isinstance(base.value, ast.Name) and base.value.id == "dspy"
    return isinstance(base, ast.Name) and base.id == "Module"


def drafts_in(
    sources: Sequence[str], count: int, inputs: Sequence[str], admitted: Sequence[Evaluated], direction: str
) -> tuple[list[Draft], list[str]]:
    """Return the drafts among the sources of a reply, at most ``count``, and the problems of the others.

    At most twice ``count`` are looked at. What was admitted when the reply came is not evaluated again.
    """
    numbers = {candidate.draft.source.strip(): number for number, candidate in enumerate(admitted)}
    drafts: list[Draft] = []
    problems: list[str] = []
    for source in sources[: 2 * count]:
        try:
            if source.strip() in numbers:
                raise DraftError(f"the source is that of candidate {numbers[source.strip()]:04d}")
            drafts.append(draft_of(source, inputs, range(len(admitted)), direction))
        except DraftError as error:
            problems.append(str(error))
    return drafts[:count], problems
