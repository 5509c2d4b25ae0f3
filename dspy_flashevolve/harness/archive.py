"""Every candidate so far, with what it scored and cost: what proposers read, and what the winner is taken from; and
a candidate before it is run: its source, read out of a reply and checked without being executed.

Proposers read it as text files. A path is a key of a dictionary, made of numbers only: there is no path that leads
anywhere else, whatever a proposer asks for, and no name of a proposer's becomes a path.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from dspy_flashevolve.sandbox.contract import Failure, Outcome

Cost = Callable[[Outcome], float]
"""A function from one run on one example to its cost; lower is better, and it must be finite."""
MESSAGE_CHARACTERS = 3000
"""Of a message in a trace."""
PAGE_CHARACTERS = 6000
MOST_LINES = 60
"""What a proposer is shown at once."""


def context_tokens(outcome: Outcome) -> float:
    """Tokens of all the prompts that a harness sent for one example, as counted by the host.

    >>> context_tokens(Outcome(fields={}))
    0.0
    """
    return float(sum(call.prompt_tokens for call in outcome.calls))


@dataclass(frozen=True)
class Trial:
    """One run of a candidate on one example.

    Args:
        example: which one, such as "train 3".
        inputs: of the example, as JSON.
        outcome: what the sandbox gave.
        score: the metric's; the failure score where the run failed.
        feedback: the metric's words; empty where it gave none.
        cost: of the run.
        labels: of the example, as JSON; only of training examples.
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
        scores, costs: one a validation example, in order; at least one.
        failures: why runs on validation examples failed, without their labels.
        traces: runs on training examples, with feedback.
        memory: what ``learn`` has left; None where it does not learn.
    """

    draft: Draft
    scores: tuple[float, ...]
    costs: tuple[float, ...]
    failures: tuple[Failure, ...] = ()
    traces: tuple[Trial, ...] = ()
    memory: Any = None

    @property
    def score(self) -> float:
        """Mean over the validation set."""
        return sum(self.scores) / len(self.scores)

    @property
    def cost(self) -> float:
        """Mean over the validation set."""
        return sum(self.costs) / len(self.costs)


@dataclass(frozen=True)
class Failed:
    """A candidate that failed its check or its evaluation.

    Args:
        draft: the candidate.
        failure: why.
        traces: runs on training examples, with feedback.
    """

    draft: Draft
    failure: Failure
    traces: tuple[Trial, ...] = ()


Checked = Evaluated | Failed
"""A candidate whose check, or whose evaluation, is done."""


def pareto_front(points: Mapping[int, tuple[float, float]]) -> tuple[int, ...]:
    """The numbers of the points (score, cost) that no other beats, best score first; of equal points the lowest number.

    >>> pareto_front({0: (0.5, 10), 1: (0.9, 30), 2: (0.4, 20), 3: (0.9, 30)})
    (1, 0)
    """
    front: list[int] = []
    cheapest = float("inf")
    for number in sorted(points, key=lambda one: (-points[one][0], points[one][1], one)):
        if points[number][1] < cheapest:
            front.append(number)
            cheapest = points[number][1]
    return tuple(front)


class Archive:
    """Candidates by number, in the order of their admission, and their files. One writer changes it.

    Args:
        log_dir: where the files are written, too; None for nowhere.
    """

    def __init__(self, log_dir: Path | None = None) -> None:
        self.candidates: list[Evaluated] = []
        self.failed: list[Failed] = []
        self.files: Mapping[str, str] = {}
        """Path -> text; another mapping after each change, since proposers read in threads."""
        self._log_dir = log_dir

    @property
    def version(self) -> int:
        """How many candidates have been admitted."""
        return len(self.candidates)

    @property
    def front(self) -> tuple[int, ...]:
        """Numbers of the candidates that no other beats in score and cost, best score first."""
        return pareto_front({number: (one.score, one.cost) for number, one in enumerate(self.candidates)})

    @property
    def best(self) -> int:
        """Number of the candidate with the best score; of equals the cheapest, then the first.

        Raises:
            IndexError: the archive is empty.
        """
        return self.front[0]

    @property
    def overview(self) -> str:
        """One line a candidate, best score first, and the latest failures."""
        lines: list[str] = []
        front = self.front
        for number, one in sorted(enumerate(self.candidates), key=lambda pair: (-pair[1].score, pair[0])):
            star = " (Pareto front)" if number in front else ""
            said = _one_line(f"{one.draft.name}: {one.draft.hypothesis}")
            lines.append(f"{number:04d}: score {one.score:.4f}, cost {one.cost:.0f}{star}: {said}")
        for number, one in list(enumerate(self.failed))[-5:]:
            lines.append(_one_line(f"failed {number:04d}: {one.draft.name}: {one.failure}")[:300])
        return "\n".join(lines) or "The archive is empty."

    def add(self, one: Checked) -> int:
        """Admit a candidate, or keep one that failed, so that nobody makes the same mistake again.

        Returns:
            Its number among the admitted, or among those that failed.

        Raises:
            OSError: the run directory cannot be written.
        """
        if isinstance(one, Failed):
            folder, number = "failed", len(self.failed)
            self.failed.append(one)
        else:
            folder, number = "candidates", self.version
            self.candidates.append(one)
        fresh = _files_of(f"{folder}/{number:04d}", one)
        self.files = {**self.files, **fresh}
        if self._log_dir is not None:
            for path, text in {**fresh, "overview.txt": self.overview}.items():
                place = self._log_dir / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text, encoding="utf-8", errors="replace")
        return number


def _files_of(home: str, one: Checked) -> dict[str, str]:
    draft = one.draft
    about = [
        f"name: {_one_line(draft.name)}",
        f"direction: {draft.direction}",
        f"hypothesis: {_one_line(draft.hypothesis)}",
        f"based on: {', '.join(map(str, draft.parents)) or 'nothing'}",
    ]
    files = {f"{home}/source.py": draft.source}
    files |= {f"{home}/traces/{number}.txt": _trace(trial) for number, trial in enumerate(one.traces)}
    if isinstance(one, Failed):
        about.append(f"failed: {_one_line(one.failure)}")
    else:
        about += [f"score: {one.score:.4f}", f"cost: {one.cost:.1f}"]
        about += [f"failed run: {_one_line(failure)}" for failure in one.failures[:5]]
        rows = enumerate(zip(one.scores, one.costs, strict=True))
        files[f"{home}/scores.txt"] = "\n".join(
            f"validation {number}: score {score:.4g}, cost {cost:.6g}" for number, (score, cost) in rows
        )
        if one.memory is not None:
            files[f"{home}/memory.json"] = json.dumps(one.memory, indent=1)
    return files | {f"{home}/about.txt": "\n".join(about)}


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


def tools_of(archive: Archive) -> list[Callable[..., str]]:
    """A proposer's tools. They answer with text, never with an error, in any thread."""

    def list_files(folder: str = "") -> str:
        """List the archive's files under a folder, such as "candidates/0003"; all of them without one."""
        prefix = str(folder).strip("/")
        found = [path for path in sorted(archive.files) if path.startswith(prefix)]
        more = f"\n... and {len(found) - MOST_LINES} more: name a folder" if len(found) > MOST_LINES else ""
        return "\n".join(found[:MOST_LINES]) + more or f"There is no file under {prefix!r}."

    def read_file(path: str, page: int = 1) -> str:
        """Read a file of the archive, such as "candidates/0003/source.py"; long ones by page, from 1."""
        text = archive.files.get(str(path).strip("/"))
        if text is None:
            return f"There is no file {path!r}; list_files tells which there are."
        pages = max(1, -(-len(text) // PAGE_CHARACTERS))
        number = min(max(1, page), pages) if isinstance(page, int) else 1  # pyright: ignore[reportUnnecessaryIsInstance]
        shown = text[(number - 1) * PAGE_CHARACTERS : number * PAGE_CHARACTERS]
        return shown if pages == 1 else f"(page {number} of {pages})\n{shown}"

    def search_files(text: str, folder: str = "") -> str:
        """Find lines of the archive that hold a text, in any case; under a folder where one is given."""
        wanted, prefix = str(text).lower(), str(folder).strip("/")
        hits = [
            f"{path}:{number}: {line.strip()[:300]}"
            for path in sorted(archive.files)
            if path.startswith(prefix)
            for number, line in enumerate(archive.files[path].splitlines(), start=1)
            if wanted and wanted in line.lower()
        ]
        more = f"\n... and {len(hits) - MOST_LINES} more" if len(hits) > MOST_LINES else ""
        return "\n".join(hits[:MOST_LINES]) + more or f"No line holds {wanted!r}."

    return [list_files, read_file, search_files]


IMPORTABLE = frozenset({
    "__future__", "abc", "ast", "base64", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal",
    "difflib", "dspy", "enum", "fractions", "functools", "hashlib", "heapq", "itertools", "json", "math", "numbers",
    "numpy", "operator", "pydantic", "random", "re", "statistics", "string", "textwrap", "time", "typing",
    "typing_extensions", "unicodedata", "zlib",
})  # fmt: skip
"""Modules that a harness may import. This tells a proposer early; it is the sandbox that holds a candidate."""
MOST_CHARACTERS = 100_000
MOST_REPLY_CHARACTERS = 10 * MOST_CHARACTERS
"""What is read of a reply; more is no list of modules any more."""
_LANGUAGES = frozenset({"", "python", "py"})
_HEADER = re.compile(r"^#[ \t]*(name|hypothesis|based on)[ \t]*:[ \t]*(.*)$", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class Draft:
    """A candidate that was not run yet.

    Args:
        source: of one ``dspy.Module`` subclass, with its imports and helpers.
        class_name: the class.
        learns: it has a ``learn`` method.
        name, hypothesis: the proposer's words; shown, never used as a path.
        parents: numbers of the archive's candidates that it is based on.
        direction: what its proposer had been told to look into.
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
"""They read again what ``asdict`` gave."""


class DraftError(ValueError):
    """A source is no harness."""


def blocks_in(reply: str) -> list[str]:
    """The Python code blocks of a reply; the whole reply where there are none.

    >>> blocks_in("First\\n```python\\nx = 1\\n```\\nthen\\n```\\ny = 2\\n```")
    ['x = 1\\n', 'y = 2\\n']
    """
    read = reply[:MOST_REPLY_CHARACTERS]
    blocks: list[str] = []
    block: list[str] | None = None
    for line in read.split("\n"):
        if block is None:
            block = [] if line[:3] == "```" and line[3:].strip().lower() in _LANGUAGES else None
        elif line[:3] == "```":
            blocks.append("".join(block))
            block = None
        else:
            block.append(line + "\n")
    return blocks or ([read] if read.strip() else [])


def draft_of(source: str, inputs: Iterable[str] = (), parents: Sequence[int] = (), direction: str = "") -> Draft:
    """Read a candidate out of its source.

    Args:
        source: Python; comments ``# name:``, ``# hypothesis:`` and ``# based on:`` say what it is.
        inputs: the names that ``forward`` must accept.
        parents: whose numbers ``# based on:`` may name; numbers of others are left out.
        direction: see :class:`Draft`.

    Raises:
        DraftError: it is not Python, not one module, or imports what is not there for it.
    """
    if len(source) > MOST_CHARACTERS:
        raise DraftError(f"the source has {len(source)} characters, at most {MOST_CHARACTERS} are read")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DraftError(f"the source is not Python ({type(error).__name__}: {error})") from error
    _check_imports(tree)
    module = _module_class(tree)
    methods = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    if "forward" not in methods:
        raise DraftError(f"class {module.name} has no method forward")
    _check_inputs(methods["forward"].args, inputs)
    said = {key.lower(): text.strip() for key, text in _HEADER.findall(source)}
    based = {int(number) for number in re.findall(r"\d{1,6}", said.get("based on", ""))}
    return Draft(
        source=source,
        class_name=module.name,
        learns="learn" in methods,
        name=said.get("name", module.name)[:80],
        hypothesis=said.get("hypothesis", "")[:500],
        parents=tuple(sorted(based & set(parents))),
        direction=direction,
    )


def drafts_in(
    reply: str, count: int, inputs: Sequence[str], known: Sequence[int], direction: str
) -> tuple[list[Draft], list[str]]:
    """The modules in a proposer's reply, at most ``count``, and why others are none.

    Args:
        inputs: the program's input fields.
        known: numbers of the archive's candidates.
    """
    drafts: list[Draft] = []
    problems: list[str] = []
    for block in blocks_in(reply)[: 2 * count]:
        try:
            draft = draft_of(block, inputs, known, direction)
        except DraftError as error:
            problems.append(str(error))
            continue
        if len(drafts) < count and draft.source not in [one.source for one in drafts]:
            drafts.append(draft)
    return drafts, problems


def _module_class(tree: ast.Module) -> ast.ClassDef:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    modules = [one for one in classes if any(_is_module(base) for base in one.bases)]
    if len(modules) != 1:
        raise DraftError(f"the source has {len(modules)} subclasses of dspy.Module, expected one")
    return modules[0]


def _is_module(base: ast.expr) -> bool:
    """It is ``Module`` or ``dspy.Module``. Not ``ast.unparse``: a source may be deeper than Python's stack."""
    if isinstance(base, ast.Attribute):
        return base.attr == "Module" and isinstance(base.value, ast.Name) and base.value.id == "dspy"
    return isinstance(base, ast.Name) and base.id == "Module"


def _check_inputs(arguments: ast.arguments, inputs: Iterable[str]) -> None:
    named = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    missing = [] if arguments.kwarg else [name for name in inputs if name not in named]
    if missing:
        raise DraftError(f"forward does not accept the inputs {', '.join(missing)}: name them, or take **inputs")


def _check_imports(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = ["a relative import" if node.level else node.module or ""]
        for name in names:
            if name.split(".")[0] not in IMPORTABLE:
                raise DraftError(f"it imports {name}; a harness may import {', '.join(sorted(IMPORTABLE))}")
