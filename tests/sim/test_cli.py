"""The command line: `sim-server` serves, it ends on a signal, and it says what is wrong."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import dspy_flashevolve
from dspy_flashevolve.cli import main


@pytest.mark.skipif(sys.platform == "win32", reason="ends by signal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_server_serves_injects_faults_and_a_signal_ends_it_cleanly(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "dspy_flashevolve.cli", "sim-server", "--profile", "api-gpt-4o-mini"]
    command += ["--port", "0", "--seed", "3", "--time-scale", "50"]
    command += ["--fault", "server_error=0.5", "--fault", "unauthorized=0.5"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("api-gpt-4o-mini at http://127.0.0.1:")
    base = line.split()[2]
    body = b'{"messages": [{"role": "user", "content": "x"}]}'
    for _ in range(20):
        with pytest.raises(urllib.error.HTTPError, match=r"503|401") as caught:
            urllib.request.urlopen(f"{base}/chat/completions", data=body)
        caught.value.close()
    with urllib.request.urlopen(f"{base.removesuffix('/v1')}/stats") as response:
        stats = json.load(response)
    assert (stats["profile"], stats["seed"], stats["time_scale"]) == ("api-gpt-4o-mini", 3, 50)
    assert set(stats["faults"]) == {"server_error", "unauthorized"}
    assert sum(stats["faults"].values()) == 20
    process.send_signal(number)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--profile", "h200", "invalid choice: 'h200'"),
        ("--port", "70000", "between 0 and 65535, got 70000"),
        ("--port", "x", "invalid int value: 'x'"),
        ("--time-scale", "0", "must be a positive number, got 0.0"),
        ("--time-scale", "nan", "must be a positive number, got nan"),
        ("--seed", "x", "invalid int value: 'x'"),
        ("--fault", "flood=0.1", "unknown fault 'flood': choose one of server_error, hang"),
        ("--fault", "hang", "a fault and its rate, such as hang=0.02, got 'hang'"),
        ("--fault", "hang=2", "hang must be between 0 and 1, got 2.0"),
        ("--burst", "60", "two numbers of seconds, such as 60:5, got '60'"),
        ("--burst", "5:60", "burst_seconds must be less than burst_every_seconds, got 60.0 and 5.0"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["sim-server", option, value])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_port_in_use_is_a_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["sim-server", "--port", str(port)]) == 1
    assert str(port) in capsys.readouterr().err


def test_a_missing_aiohttp_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "aiohttp" else find(name))
    assert main(["sim-server"]) == 1
    assert "pip install 'dspy-flashevolve[sim]'" in capsys.readouterr().err


def test_the_package_imports_no_benchmarks_and_the_command_line_alone_imports_the_simulation() -> None:
    root = Path(dspy_flashevolve.__file__).parent
    for path in root.rglob("*.py"):
        imported = re.findall(
            r"""(?:^\s*(?:from|import) |import_module\(["'])(benchmarks|dspy_flashevolve\.sim)\b""",
            path.read_text(encoding="utf-8"),
            re.MULTILINE,
        )
        may = {"dspy_flashevolve.sim"} if path.name == "cli.py" or path.parent.name == "sim" else set[str]()
        assert set(imported) <= may, path


@pytest.mark.parametrize("given", [["bench"], []])
def test_what_is_no_command_is_refused_with_those_that_there_are(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(given)
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert all(command in errors for command in ("sim-server", "lineage", "check"))
