"""A candidate before it is run: its source, read out of an LM's reply and checked without being executed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dspy_flashevolve.sandbox.contract import Failure

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


class DraftError(ValueError):
    """A source is no harness; :attr:`failure` says why."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.failure = Failure("interface", message)


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
