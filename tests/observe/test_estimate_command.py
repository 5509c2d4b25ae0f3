"""`flashevolve estimate`: what a run may cost, from the file that makes its parts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dspy_flashevolve.cli import FAILED, WRONG_ARGUMENT, main

SCRIPT = """
from dspy_flashevolve import AsyncGEPA
from tests.contract.surface import TRAIN, VAL
from tests.fakes import Chain, digits, reflection_lm, task_lm

program, trainset, valset = Chain(2), TRAIN, VAL
program.set_lm(task_lm())
optimizer = AsyncGEPA(digits, max_metric_calls=150, reflection_lm=reflection_lm())
nothing = 3

if __name__ == "__main__":
    raise SystemExit("the run itself began")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, in the folder of the command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "experiment_to_estimate.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("source", ["experiment_to_estimate.py", "experiment_to_estimate"])
def test_an_estimate_of_a_file_or_a_module_is_that_of_its_optimizer(
    source: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", source]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["a", "metric", "call", "2", "6", "8", "unknown"]
    assert lines[3].split()[:3] == ["150", "metric", "calls"]
    assert lines[4].split()[:4] == ["at", "most", "47", "reflections"], "of what the validation of the seed leaves"
    assert any("which were paid for" in line for line in lines)


def test_without_a_valset_the_trainset_is_validated_on(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(SCRIPT.replace("valset = Chain(2), TRAIN, VAL", "unused = Chain(2), TRAIN, VAL"))
    assert main(["estimate", script.name]) == 0
    assert "at most 47 reflections" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["gone.py"], "gone.py: there is no such file"),
        (["gone.module"], "gone.module: there is no such file or module"),
        ([".."], "there is no such file"),
        (["SCRIPT", "--program", "student"], "Give the name of a Module in it by --program: there are program."),
        (["SCRIPT", "--optimizer", "nothing"], "'nothing' is a int in SCRIPT. Give the name of a AsyncGEPA in it by"),
        (["SCRIPT", "--valset", "held_out"], "'held_out' is not there in SCRIPT. Give the name of a list in it"),
    ],
)  # fmt: skip
def test_a_name_that_is_not_there_is_refused_with_those_that_are(
    given: list[str], message: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", *(part.replace("SCRIPT", script.name) for part in given)]) == WRONG_ARGUMENT
    assert message.replace("SCRIPT", script.name) in capsys.readouterr().err


def test_an_error_of_the_file_comes_with_its_lines(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("import nothing_of_that_name\n")
    assert main(["estimate", script.name]) == FAILED
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert "nothing_of_that_name" in printed
