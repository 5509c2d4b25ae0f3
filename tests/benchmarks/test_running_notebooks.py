"""The notebooks run in a real kernel from top to bottom, and what is saved in them is whole."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nbconvert import HTMLExporter

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS = 600
"""A notebook takes less than a minute; a machine that is busy with other tests takes longer."""
SHOWN = {
    "01_quickstart.ipynb": [r"dspy\.GEPA +[\d.]+ +\d+", r"AsyncGEPA +[\d.]+ +\d+", r"--- (answer|draft)\n", "scores"],
    "02_staleness_policies.ipynb": [
        r"full +0\.\d+",
        r"guarded +0\.\d+",
        r"patch +0\.\d+",
        r"changes, \d+ expected to help",
    ],
    "03_vllm_and_api.ipynb": [
        "slots: it binds",
        "max_reflection_calls=4 is spent",
        "max_seconds=0.5 is over",
        "2 sessions, 0 of them without an end",
        "no problems",
    ],
}
"""Notebook -> patterns that its output holds."""
NUMBERED = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path) -> list[dict[str, Any]]:
    """The code cells."""
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def outputs(path: Path) -> list[dict[str, Any]]:
    return [output for cell in cells(path) for output in cell["outputs"]]


def printed(path: Path) -> str:
    return "".join("".join(output.get("text", "")) for output in outputs(path))


def pictures(path: Path) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs(path))


def run(path: Path, folder: Path) -> Path:
    """A copy of a notebook with the outputs of a run by nbmake, which fails where a cell does."""
    import matplotlib.font_manager  # noqa: F401  # a kernel that has to find the fonts first says so

    copy = folder / path.name
    shutil.copy(path, copy)
    command = [sys.executable, "-m", "pytest", "--nbmake", "--overwrite", f"--nbmake-timeout={SECONDS}"]
    command += ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder), str(copy)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no network
        "TQDM_DISABLE": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * SECONDS, check=False)
    assert done.returncode == 0, done.stdout
    return copy


def test_every_notebook_has_its_patterns() -> None:
    assert [path.name for path in NOTEBOOKS] == list(SHOWN)


@NUMBERED
def test_it_runs_top_to_bottom_on_the_embedded_backend(path: Path, tmp_path: Path) -> None:
    done = run(path, tmp_path)
    assert [pattern for pattern in SHOWN[path.name] if not re.search(pattern, printed(done))] == []
    assert pictures(done) == pictures(path)
    assert [output for output in outputs(done) if output.get("name") == "stderr"] == []
    if path.name.startswith("02"):  # in virtual time, so that no machine is too slow for it
        scores = {name: float(score) for name, score in re.findall(r"^(\w+) +(0\.\d+) ", printed(done), re.MULTILINE)}
        assert max(scores, key=scores.__getitem__) == "reflective"


@NUMBERED
def test_one_variable_in_the_first_code_cell_chooses_the_backend(path: Path) -> None:
    first, *others = ("".join(cell["source"]) for cell in cells(path))
    assert first.startswith("API_BASE = None")
    assert re.findall(r"^(\w+) =", first, re.MULTILINE) == ["API_BASE", "MODEL"]
    assert not [source for source in others if re.search(r"^API_BASE =", source, re.MULTILINE)]


@NUMBERED
def test_it_needs_only_the_package_and_its_extra(path: Path) -> None:
    names = re.findall(
        r"^(?:from|import) (\w+)", "\n".join("".join(cell["source"]) for cell in cells(path)), re.MULTILINE
    )
    allowed = {"dspy", "dspy_flashevolve", "gepa", "litellm", "matplotlib"}
    assert set(names) - set(sys.stdlib_module_names) <= allowed


@NUMBERED
def test_its_saved_outputs_are_those_of_one_whole_run(path: Path) -> None:
    counts = [cell["execution_count"] for cell in cells(path)]
    assert counts == list(range(1, len(counts) + 1))
    assert pictures(path) >= 1
    assert [pattern for pattern in SHOWN[path.name] if not re.search(pattern, printed(path))] == []


@NUMBERED
def test_its_saved_outputs_show_no_error_no_noise_and_no_path_of_a_machine(path: Path) -> None:
    assert {output["output_type"] for output in outputs(path)} <= {"stream", "display_data", "execute_result"}
    noise = ["".join(output["text"]) for output in outputs(path) if output.get("name") == "stderr"]
    assert all(re.fullmatch(r"AsyncGEPA: 100%.*tokens\]\n", one) for one in noise), "a bar at its end, no more"
    assert not re.search(r"Traceback|Warning|(?:^|[\s'\"(=:])(?:/\w+/|[A-Z]:\\)", printed(path))


@NUMBERED
def test_the_optimizer_and_its_compile_stand_in_the_notebook(path: Path) -> None:
    sources = "\n".join("".join(cell["source"]) for cell in cells(path))
    assert "AsyncGEPA(" in sources
    assert re.search(r"optimizer\.a?compile\(", sources)


def test_notebook_1_as_html_shows_one_bar_the_summary_the_plot_and_the_change_of_the_prompt() -> None:
    page, _ = HTMLExporter().from_filename(str(ROOT / "notebooks/01_quickstart.ipynb"))
    shown = re.sub(r"<[^>]+>", "", page)
    assert re.findall(r"AsyncGEPA: +\d+%", shown) == ["AsyncGEPA: 100%"]
    assert page.count('data-mime-type="application/vnd.jupyter.stderr"') == 1
    assert page.count("<img") == 1
    assert "(the program given) -&gt; 0." in shown
    assert "--- draft, before\n+++ draft, after\n" in shown
