"""No key of an LM leaves the process, whatever a server echoes: not by files, log lines or exceptions."""

from __future__ import annotations

import logging
import stat
import traceback
from pathlib import Path
from typing import Any

import dspy
import pytest

from dspy_flashevolve import RunAbortedError, Workflow
from tests.broken_server import BrokenServer
from tests.contract.surface import command, compiled, completion, journal_of
from tests.fakes import Chain, hashed, reflection_lm, reply_for

KEY, HEADER = "correct-horse-battery-staple", "let-me-into-the-gateway"
PASSWORD, IN_PATH = "open-sesame-please", "a-key-within-the-path"
SECRETS = (KEY, HEADER, IN_PATH)
"""None has a digit, or looks like a key."""


def lm_of(server: BrokenServer) -> dspy.LM:
    address = f"{server.address}/{IN_PATH}/chosen/v1"
    return server.lm("", "litellm", api_base=address, api_key=KEY, extra_headers={"X-Gateway-Pass": HEADER})


def written_in(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


def check_private(directory: Path) -> None:
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*") if path.is_file()}
    assert set(modes.values()) == {0o600}, modes


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_what_a_server_echoes_stands_in_no_file_and_no_log_line(
    tmp_path: Path, schedule: Any, caplog: pytest.LogCaptureFixture
) -> None:
    asked = 0

    def echo(prompt: str) -> str:
        nonlocal asked
        asked += 1
        if asked % 40 == 0:
            return f"503-{' '.join(SECRETS)}"
        return reply_for("JSON", answer=str(1 + hashed(prompt) % 6), new_instruction=f"{asked} {' '.join(SECRETS)}")

    directory = tmp_path / "run"
    with BrokenServer(echo) as server, caplog.at_level(logging.DEBUG, "dspy_flashevolve"):
        lm = lm_of(server)
        with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
            details = compiled(  # the scores are a lottery: so many calls that some child is better
                200, log_dir=str(directory), reflection_lm=lm, schedule=schedule, track_best_outputs=True
            ).detailed_results
    assert len(details.candidates) > 1
    written = written_in(directory)
    assert b"[redacted]" in written
    for secret in SECRETS:
        assert secret.encode() not in written, secret
        assert secret not in caplog.text, secret
    check_private(directory)


def test_an_error_that_repeats_a_key_is_told_without_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "run"
    with (
        BrokenServer(lambda prompt: f"401-{' '.join(SECRETS)}") as server,
        dspy.context(lm=lm_of(server)),
        pytest.raises(RunAbortedError) as caught,
    ):
        compiled(60, log_dir=str(directory), reflection_lm=reflection_lm())
    told = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert "API key" in told
    for secret in SECRETS:
        assert secret not in told, secret
        assert secret.encode() not in written_in(directory), secret


def test_a_key_of_the_environment_that_a_proposers_error_repeats_stands_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error's words stand in the ends of steps."""
    key = "sk-live-0123456789abcdef"
    monkeypatch.setenv("SOME_API_KEY", key)

    def refuse(candidate: Any, reflective_dataset: Any, components_to_update: Any) -> Any:
        raise ValueError(f"the key {key} is over its quota")

    with pytest.raises(ValueError, match="over its quota"):
        compiled(100, instruction_proposer=refuse, log_dir=str(tmp_path), workflow=Workflow(live_steps=2))
    assert b"is over its quota" in journal_of(tmp_path).read_bytes()
    assert key.encode() not in written_in(tmp_path)


def test_a_password_in_an_address_is_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """dspy's own engine takes it for a part of the host's name, and repeats it in its error."""
    with BrokenServer() as server:
        address = server.address.replace("http://", f"http://me:{PASSWORD}@")
        with dspy.context(lm=server.lm("", api_base=f"{address}/good/v1")), pytest.raises(RunAbortedError) as caught:
            compiled(30, log_dir=str(tmp_path / "run"), workflow=Workflow(max_outage_seconds=0.5))
    told = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert "failed to connect" in told
    assert PASSWORD not in told
    assert PASSWORD.encode() not in written_in(tmp_path / "run")


class Own(dspy.LM):
    """One with a ``forward`` of its own, to which such an address may mean something; its replies repeat it."""

    def forward(self, prompt: Any = None, messages: Any = None, **kwargs: Any) -> Any:
        asked = "\n".join(message["content"] for message in messages)
        number = hashed(asked)
        told = f"{number} of me:{PASSWORD}@localhost"
        return completion(reply_for(asked, answer=f"{1 + number % 6}", new_instruction=told))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dspy's, of LMs with a forward of their own
def test_a_finished_run_tells_a_password_in_an_address_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, lm = tmp_path / "run", Own("openai/m", api_base=f"http://me:{PASSWORD}@localhost:1/v1", cache=False)
    with dspy.context(lm=lm), caplog.at_level(logging.DEBUG, "dspy_flashevolve"):
        details = compiled(100, log_dir=str(directory), reflection_lm=lm).detailed_results
    assert len(details.candidates) > 1
    page = directory / "report.html"
    told = [command("lineage", str(directory), "--prompts"), command("report", str(directory), "-o", str(page))]
    assert [status for status, _, _ in told] == [0, 0]
    assert page.exists()
    assert PASSWORD.encode() not in written_in(directory)
    assert PASSWORD not in caplog.text + str(told)


def test_a_placeholder_for_a_key_is_no_secret() -> None:
    def answer(prompt: str) -> str:
        return reply_for("JSON", answer="5 is not-needed")

    with BrokenServer(answer) as server:
        lm = server.lm("chosen", api_key="not-needed")
        with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
            program: Any = Chain()
            details = compiled(30, program, metric=lambda *_: 0.5, track_best_outputs=True).detailed_results
    assert "not-needed" in str(details.best_outputs_valset)
