"""What the notebooks are given: a task that is there in any checkout, an endpoint, and virtual time inside a cell."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

import dspy
import pytest

from benchmarks import notebooks
from benchmarks.notebooks import ifbench, in_virtual_time, served, virtual_lm
from benchmarks.workloads.ifbench import metric
from benchmarks.workloads.rows import VARIABLE

REAL = "http://127.0.0.1:9/v1"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder, and no hub behind it."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", None)
    return tmp_path


@pytest.fixture
def rows(folder: Path) -> None:
    """Six rows of each kind."""
    for file in ("ifeval/input_data.jsonl", "ifbench/test.jsonl"):
        row = {"key": 1, "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
        lines = [json.dumps(row | {"prompt": f"{file} {number}"}) for number in range(6)]
        (folder / file).parent.mkdir()
        (folder / file).write_text("\n".join(lines), encoding="utf-8")


@pytest.mark.parametrize("api_base", [None, REAL])
def test_without_rows_the_task_is_house_rules_in_two_stages_and_says_so(
    api_base: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    task = ifbench(api_base, train=3, val=4)
    assert "not at hand" in capsys.readouterr().out
    assert (len(task.trainset), len(task.valset)) == (3, 4)
    assert {name for name, _ in task.program().named_predictors()} == set(task.outputs)
    kept = dspy.Prediction(**{field: " ".join(map(str, task.valset[0].required)) for field in task.outputs.values()})
    assert task.metric(task.valset[0], kept).score == 1


@pytest.mark.usefixtures("rows")
def test_a_real_endpoint_gets_the_real_metric_and_a_simulated_one_house_rules_on_the_same_prompts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    real, embedded = ifbench(REAL, train=2, val=3), ifbench(None, train=2, val=3)
    assert "constraints" in capsys.readouterr().out.splitlines()[0]
    assert real.metric is metric
    assert embedded.metric is not metric
    assert [one.prompt for one in embedded.valset] == [one.prompt for one in real.valset]
    assert "house rules" in embedded.program().predictors()[0].signature.instructions


def test_a_real_endpoint_is_taken_as_it_is_with_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    task = ifbench(None, train=1, val=1)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert served(REAL, task) == {"api_base": REAL, "api_key": "none"}
    monkeypatch.setenv("OPENAI_API_KEY", "from the environment")
    assert served(REAL, task) == {"api_base": REAL, "api_key": "from the environment"}


def test_the_embedded_server_refuses_above_its_limit_sees_no_key_and_ends_with_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = []
    monkeypatch.setattr(notebooks.atexit, "register", lambda *given: ends.append(given))
    monkeypatch.setenv("OPENAI_API_KEY", "from the environment")
    endpoint = served(None, ifbench(None, train=1, val=1), time_scale=50, concurrency_limit=0)
    [(end, *arguments)] = ends
    try:
        assert endpoint["api_key"] == "none"
        lm = dspy.LM("openai/any", **endpoint, cache=False, num_retries=0)
        with pytest.raises(Exception, match="Rate limit reached: 0 requests"):
            lm("hello")
    finally:
        end(*arguments)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(endpoint["api_base"].replace("/v1", "/health"), timeout=5)


def test_virtual_time_passes_at_once_where_a_loop_is_running() -> None:
    async def cell() -> str:
        return in_virtual_time(lambda: asyncio.sleep(1e6, "done"))

    assert asyncio.run(cell()) == "done"


def test_virtual_time_has_the_settings_of_the_cell_and_its_errors_arrive_there() -> None:
    lm = virtual_lm(ifbench(None, train=1, val=1))

    async def answer() -> str:
        return (await dspy.Predict("question -> answer").acall(question="Why?")).answer

    with dspy.context(lm=lm):
        assert in_virtual_time(answer)

    async def fails() -> None:
        raise ValueError("told")

    with pytest.raises(ValueError, match="told"):
        in_virtual_time(fails)
