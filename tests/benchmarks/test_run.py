"""Optimizers judged on a test set: the task model that reads its prompt, and the model whose replies are files."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dspy
import pytest

from benchmarks import file_lm
from benchmarks.methods import Limits, Method, Workload
from benchmarks.models import reply_model_named
from benchmarks.run import main, standard_error
from benchmarks.trajectory import Recorder
from benchmarks.workloads.aime import metric
from benchmarks.workloads.registry import workload_names
from dspy_flashevolve.sim import SimServer
from tests.benchmarks.workloads.samples import write_samples

SYMPTOMS = {
    "allergy": "sneezing eyes water pollen", "migraine": "throbbing headache bright light",
    "dengue": "mosquito joints fever", "malaria": "shivering sweating chills",
}  # fmt: skip


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with made-up rows in the form of Symptom2Disease."""
    folder = tmp_path / "data" / "symptom2disease"
    folder.mkdir(parents=True)
    for split, count in {"train": 6, "val": 2, "test": 3}.items():
        lines = [
            json.dumps({"question": f"I have {words}, {split} {n}.", "answer": disease})
            for disease, words in SYMPTOMS.items()
            for n in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv("FLASHEVOLVE_DATA", str(tmp_path / "data"))
    return tmp_path


# The model whose replies are files


def test_a_request_becomes_a_file_and_its_reply_file_the_answer(tmp_path: Path) -> None:
    async def ask() -> str:
        asked = asyncio.create_task(
            file_lm.FileModel(tmp_path / "run").reply([("system", "Be brief."), ("user", "Hi")])
        )
        while not (request := tmp_path / "run" / "0001.request.txt").exists():  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert request.read_text() == "[system]\nBe brief.\n\n[user]\nHi"
        file_lm.write(tmp_path / "run" / "0001.reply.txt", "Hello.\n")
        return await asked

    assert asyncio.run(ask()) == "Hello."
    [row] = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert json.loads(row)["reply"] == len("Hello.")


# The command


def answering(folder: Path, stop: threading.Event) -> None:
    """Plays a reflection LM: writes down the examples that a request shows, as edits or as a whole text."""
    while not stop.wait(0.01):
        request = file_lm.claim(folder) if folder.exists() else None
        if request is None:
            continue
        lines = [f"- K{n}: {words}" for n, words in _shown(request.read_text())]
        reply = {"edits": [{"action": "add", "part": 1, "text": line} for line in lines]}
        whole = {"new_instruction": "\n".join(["Answer with the exact code.", *lines])}
        text = json.dumps(reply if "`edits`" in request.read_text() else whole)
        file_lm.write(file_lm.reply_path(request), text)


def _shown(prompt: str) -> list[tuple[str, str]]:
    """The codes that feedback names, each with the words of its question."""
    found = re.findall(r"I have ([a-z ]+), train[^}]*\}.*?expected answer is 'K(\d+)'", prompt, re.DOTALL)
    return [(code, words) for words, code in found]


@pytest.fixture
def answered(rows: Path) -> Any:
    stop, folder = threading.Event(), rows / "files"
    thread = threading.Thread(target=answering, args=(folder, stop), daemon=True)
    thread.start()
    yield f"file:{folder}"
    stop.set()
    thread.join()


def test_the_command_writes_a_row_a_run_and_goes_on_where_it_stopped(
    rows: Path, answered: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = rows / "rows.jsonl"
    sizes = ["--train", "20", "--val", "6", "--test", "10", "--reply-seconds", "0", "--calls", "60", "--seeds", "0"]
    command = ["symptom2disease-coded", "--reflection-model", answered, *sizes, "--out", str(out)]
    assert main([*command, "--methods", "gepa", "async"]) == 0
    first = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["method"] for row in first} == {"gepa", "async"}
    for row in first:
        assert 0 <= row["test"] <= 1
        assert row["reflections"] > 0
        assert row["candidates"][0]["texts"] == {"self": "Give the class of the text."}
        assert row["returned"]["self"] in [candidate["texts"]["self"] for candidate in row["candidates"]]
        assert "commit" in row
    assert main([*command, "--methods", "gepa", "async"]) == 0
    assert len(out.read_text().splitlines()) == 2, "what the file has is not run again"
    assert "gepa " in capsys.readouterr().out
    assert main([*command, "--report", "--picture", str(rows / "scores.svg")]) == 0
    drawn = (rows / "scores.svg").read_text()
    assert "dspy.GEPA" in drawn
    assert "AsyncGEPA" in drawn
    assert "Combee" not in drawn, "there is no run of it"


@pytest.fixture(scope="module")
def server() -> Iterator[SimServer]:
    with SimServer(seed=0, time_scale=1000, reply_model=reply_model_named("plain")) as running:
        yield running


def command(workload: str, server: SimServer, folder: Path) -> list[str]:
    """A small run of a workload on sample rows, both models on a server; rows go to `rows.jsonl` in the folder."""
    write_samples(folder / "data")
    models = [part for kind in ("task", "reflection") for part in (f"--{kind}-model", "openai/simulated")]
    bases = [part for kind in ("task", "reflection") for part in (f"--{kind}-base", server.api_base)]
    sizes = ["--train", "6", "--val", "6", "--test", "4", "--seeds", "0", "--out", str(folder / "rows.jsonl")]
    return [workload, *models, *bases, *sizes]


@pytest.mark.parametrize("workload", workload_names())
def test_every_workload_runs_by_its_name(
    workload: str,
    server: SimServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for package in {"hotpotqa": ["bm25s"], "ifbench": ["if_verifiable"]}.get(workload, []):
        pytest.importorskip(package)
    monkeypatch.setenv("FLASHEVOLVE_DATA", str(tmp_path / "data"))
    asked = [*command(workload, server, tmp_path), "--calls", "40", "--methods"]
    assert main([*asked, "gepa"]) == 0
    assert main([*asked, "gepa", "combee", "async"]) == 0, "goes on with the methods that are missing"
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["method"] for row in rows] == ["gepa", "combee-9", "async"]
    for row in rows:
        assert row["error"] == ""
        assert 0 <= row["test"] <= 1
        assert row["test_error"] >= 0
        assert row["seconds"] > 0
        for counted in (
            "task_tokens_read",
            "task_tokens_written",
            "reflection_tokens_read",
            "reflection_tokens_written",
        ):
            assert row[counted] > 0
    printed = capsys.readouterr().out
    assert f"test {rows[2]['test']:.3f} (standard error {rows[2]['test_error']:.3f})" in printed
    assert f"{rows[2]['task_tokens_read']}/{rows[2]['task_tokens_written']}" in printed.splitlines()[-2]


def test_a_run_without_limits_has_the_budget_of_gepas_light_mode(
    server: SimServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHEVOLVE_DATA", str(tmp_path / "data"))
    given: list[int | None] = []

    def build(workload: Workload, limits: Limits, recorder: Recorder) -> Any:
        given.append(limits.metric_calls)
        raise RuntimeError("not run")

    monkeypatch.setattr("benchmarks.run.chosen", lambda name: Method(name, build))
    assert main([*command("aime", server, tmp_path), "--methods", "gepa", "async"]) == 1
    light = dspy.GEPA(metric, auto="light", reflection_lm=dspy.LM("openai/x")).auto_budget(1, 6, valset_size=6)
    assert given == [light, light]


def test_the_search_alone_is_counted(server: SimServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHEVOLVE_DATA", str(tmp_path / "data"))
    for test in ("1", "20"):
        assert main([*command("aime", server, tmp_path), "--calls", "20", "--methods", "gepa", "--test", test]) == 0
    few, many = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    read = few["task_tokens_read"]  # of 24 rollouts; the server's replies are not the same in both runs
    assert many["task_tokens_read"] == pytest.approx(read, rel=0.2), "20 more rollouts would add 80%"


def test_ace_and_its_lockstep_are_judged_as_the_others_are(
    server: SimServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHEVOLVE_DATA", str(tmp_path / "data"))
    assert main([*command("aime", server, tmp_path), "--calls", "30", "--methods", "ace", "ace-lockstep"]) == 0
    for row in [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]:
        assert 20 < row["calls"] <= 30
        assert 0 <= row["test"] <= 1
        assert row["reflections"] > 0
        assert len(row["candidates"]) > 1
        assert row["validated"] == max(candidate["validated"] for candidate in row["candidates"])


def test_rows_without_tokens_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["symptom2disease-coded", "--reflection-model", "file:REPLIES", "--calls", "400", "--report"]
    assert main(asked) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("async")]
    assert "0.259 (0.030)" in line
    assert "-/-" in line


def test_the_standard_error_is_that_of_a_mean() -> None:
    assert standard_error([0.0, 1.0, 0.0, 1.0]) == pytest.approx((1 / 3) ** 0.5 / 2)
