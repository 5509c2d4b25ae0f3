"""README and documentation: their Python blocks run, and the messages that they explain are those of the package."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dspy_flashevolve
from tests.docs.run_page import blocks

ROOT = Path(__file__).resolve().parents[2]
ON_RAY = ROOT / "docs" / "guide" / "backends.md"
GUIDE = [page for page in sorted((ROOT / "docs" / "guide").glob("*.md")) if page != ON_RAY]
OTHERS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGE = Path(dspy_flashevolve.__file__).parent


@pytest.mark.parametrize(
    "pages",
    [
        pytest.param(GUIDE, id="guide", marks=pytest.mark.pages),
        pytest.param([ON_RAY], id="backends", marks=pytest.mark.ray),
        pytest.param(OTHERS, id="others", marks=pytest.mark.pages),
    ],
)
def test_every_python_block_runs_as_it_is_written(pages: list[Path], tmp_path: Path) -> None:
    with_blocks = [str(page) for page in pages if blocks(page)]
    assert with_blocks
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.run_page", *with_blocks],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("\n--- ") + done.stdout.startswith("--- ") == sum(len(blocks(page)) for page in pages)


def texts_in(node: ast.AST) -> Iterator[str]:
    """The strings in a piece of source; what is put into them is "…"."""
    if isinstance(node, ast.JoinedStr):
        parts = [one.value if isinstance(one, ast.Constant) else "…" for one in node.values]
        yield "".join(map(str, parts))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield re.sub(r"%(?:\.\d+)?[rsdgf]", "…", node.value).replace("%%", "%")
    elif isinstance(node, ast.IfExp):
        yield from (*texts_in(node.body), *texts_in(node.orelse))
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts_in(child)


def test_every_message_that_troubleshooting_explains_is_one_of_the_package() -> None:
    sources = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    said = {text for source in sources for text in texts_in(ast.parse(source))}
    page = (
        (ROOT / "docs" / "guide" / "troubleshooting.md").read_text(encoding="utf-8").split("## There is no message")[0]
    )
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) > 30
    assert [one for one in messages if not any(one.strip("… ") in text for text in said)] == []


def test_every_commit_and_file_of_results_that_a_page_names_has_rows() -> None:
    results = ROOT / "benchmarks" / "results"
    rows = "".join(path.read_text(encoding="utf-8") for path in results.glob("*.jsonl")).replace('": "', '":"')
    pages = "".join(page.read_text(encoding="utf-8") for page in [*GUIDE, ON_RAY, *OTHERS])
    commits = set(re.findall(r"\b(?=[a-f]*[0-9])(?=[0-9]*[a-f])[0-9a-f]{7}\b", pages))
    commits.remove("ba78d34")  # of ACE's reference code
    assert len(commits) > 10
    assert [commit for commit in sorted(commits) if f'"commit":"{commit}' not in rows] == []
    assert [name for name in re.findall(r"[\w/]+\.jsonl", pages) if not (results / Path(name).name).exists()] == []


def test_the_readme_is_read_in_ninety_seconds() -> None:
    """At most 120 lines and 700 words outside of its code blocks and links' addresses."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"\]\([^)]*\)", "]", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    assert len(text.splitlines()) <= 120
    assert len(prose.split()) <= 700
