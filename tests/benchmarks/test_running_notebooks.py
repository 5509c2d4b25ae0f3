"""The notebooks run in a real kernel from top to bottom, and what is saved in them is whole.

Here a simulated server answers, in the right form and without sense; what is saved is of real models. The notebook of
Evoflux has a scripted model and starts an MCP server itself, and says so.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from nbconvert import HTMLExporter

from dspy_flashevolve.sim import SimServer

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS = 600
"""A notebook takes less than a minute; a machine that is busy with other tests takes longer."""
SIMULATED = "simulated-model"
SHOWN = {
    "01_quickstart.ipynb": [
        r"\nas given +[\d.]+ \([\d.]+\)",
        r"\ndspy\.GEPA +[\d.]+ \([\d.]+\) +[\d.]+ +\d+ +\d+ +\d+\n",
        r"\nAsyncGEPA +[\d.]+ \([\d.]+\) +[\d.]+ +\d+ +\d+ +\d+\n",
        r"===== dspy\.GEPA\n.+",
        r"===== AsyncGEPA\n.+",
    ],
    "02_staleness_policies.ipynb": [r"\nfull +[\d.]+", r"\nguarded +[\d.]+", r"\nreflective +[\d.]+"],
    "03_vllm_and_api.ipynb": [
        r"a reflection +1 ",
        "metric calls, ",
        r"\d dollars in the last session",
        "2 sessions, 0 of them without an end",
        "no problems",
    ],
    "04_evoflux.ipynb": [
        r"complete:  True after \d+ workflow",
        r"\nnow = weather\(city_id=city\['id'\]\)",
        r"again read_note ran \{'text': 'tea'\}",
        r"\{'new.txt': 'tea', 'old.txt': 'tea'\}",
        "the search ended since a workflow ran completely",
    ],
}
"""Notebook -> patterns that its output holds."""
PICTURES = {
    "01_quickstart.ipynb": 1,
    "02_staleness_policies.ipynb": 2,
    "03_vllm_and_api.ipynb": 0,
    "04_evoflux.ipynb": 0,
}
EVOFLUX = ROOT / "notebooks/04_evoflux.ipynb"


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


def sample(kinds: dict[str, tuple[str, dict[str, Any]]], topics: int) -> str:
    """Rows in the form of IFEval and IFBench: each topic with each kind of constraint, given as words and arguments."""
    arguments = {name: None for _, given in kinds.values() for name in given}
    rows = [
        {
            "key": number,
            "prompt": f"Write about topic {topic}. {words}",
            "instruction_id_list": [kind],
            "kwargs": [arguments | given],
        }
        for number, (topic, (kind, (words, given))) in enumerate(product(range(topics), kinds.items()))
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows of our own."""
    folder = tmp_path_factory.mktemp("data")
    ifeval = {
        "punctuation:no_comma": ("Use no comma.", {}),
        "keywords:existence": ("Name the harbor.", {"keywords": ["harbor"]}),
        "detectable_format:number_bullet_lists": ("Write three bullets.", {"num_bullets": 3.0}),
    }
    ifbench = {
        "count:numbers": ("Use exactly three numbers.", {"N": 3.0}),
        "words:palindrome": ("Use a palindrome.", {}),
    }
    for path, text in {
        "ifeval/input_data.jsonl": sample(ifeval, 40),
        "ifbench/test.jsonl": sample(ifbench, 40),
    }.items():
        (folder / path).parent.mkdir()
        (folder / path).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def api_base() -> Iterator[str]:
    with SimServer(time_scale=50) as server:
        yield server.api_base


def run(path: Path, folder: Path, api_base: str, data: Path) -> Path:
    """A copy of a notebook with the outputs of a run by nbmake, which fails where a cell does."""
    import matplotlib.font_manager  # noqa: F401  # a kernel that has to find the fonts first says so

    copy = folder / path.name
    shutil.copy(path, copy)
    command = [sys.executable, "-m", "pytest", "--nbmake", "--overwrite", f"--nbmake-timeout={SECONDS}"]
    command += ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder), str(copy)]
    chosen = {"API_BASE": api_base, "MODEL": SIMULATED, "FLASHEVOLVE_DATA": str(data)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REFLECTION_")} | {
        **chosen,
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
def test_it_runs_top_to_bottom_against_a_server_with_openais_api(
    path: Path, tmp_path: Path, api_base: str, data: Path
) -> None:
    if path == EVOFLUX:
        pytest.importorskip("mcp", reason="needs the extra evoflux")
    done = run(path, tmp_path, api_base, data)
    assert [pattern for pattern in SHOWN[path.name] if not re.search(pattern, printed(done))] == []
    assert path == EVOFLUX or "120 rows of IFEval, 80 of IFBench" in printed(done)
    assert pictures(done) == PICTURES[path.name]
    assert [output for output in outputs(done) if output.get("name") == "stderr"] == []


@NUMBERED
def test_it_needs_only_the_package_and_its_extra(path: Path) -> None:
    names = re.findall(
        r"^ *(?:from|import) (\w+)", "\n".join("".join(cell["source"]) for cell in cells(path)), re.MULTILINE
    )
    allowed = {"datasets", "dspy", "dspy_flashevolve", "if_verifiable", "litellm", "matplotlib"}
    allowed |= {"mcp"} if path == EVOFLUX else set()
    assert set(names) - set(sys.stdlib_module_names) <= allowed


@NUMBERED
def test_its_saved_outputs_are_those_of_one_whole_run(path: Path) -> None:
    counts = [cell["execution_count"] for cell in cells(path)]
    assert counts == list(range(1, len(counts) + 1))
    assert pictures(path) == PICTURES[path.name]
    assert SIMULATED not in printed(path), "what is saved is of real models"
    assert [pattern for pattern in SHOWN[path.name] if not re.search(pattern, printed(path))] == []


@NUMBERED
def test_its_saved_outputs_show_no_error_no_noise_and_no_path_of_a_machine(path: Path) -> None:
    assert {output["output_type"] for output in outputs(path)} <= {"stream", "display_data", "execute_result"}
    assert [output for output in outputs(path) if output.get("name") == "stderr"] == []
    assert not re.search(r"Traceback|Warning|(?:^|[\s'\"(=:])(?:/\w+/|[A-Z]:\\)", printed(path))


def test_notebook_1_as_html_shows_one_bar_the_summary_the_table_the_plot_and_the_prompts() -> None:
    page, _ = HTMLExporter().from_filename(str(ROOT / "notebooks/01_quickstart.ipynb"))
    shown = re.sub(r"<[^>]+>", "", page)
    assert re.findall(r"AsyncGEPA: +\d+%", shown) == ["AsyncGEPA: 100%"]
    assert page.count('data-mime-type="application/vnd.jupyter.stderr"') == 0
    assert page.count("<img") == 1
    assert "(the program given) -&gt; 0." in shown
    assert "===== AsyncGEPA\n" in shown
