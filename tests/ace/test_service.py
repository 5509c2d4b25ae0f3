"""The service of docs/ace.md, as it stands there, on a real HTTP server: it answers, learns, and is started again."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import dspy
import httpx
import pytest

from dspy_flashevolve import Playbook
from tests.fakes import Chain, fake_lm, reply_for

pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")

PAGE = Path(__file__).parents[2] / "docs" / "ace.md"
SECONDS = 60
"""Longest wait for what the service does in the background."""


def service(folder: Path, held: str = "") -> Any:
    """The application of the page, made anew as a new process would, with its file in a folder.

    Args:
        held: question whose metric never comes to an end.
    """

    async def metric(gold: Any, pred: Any) -> float:
        if gold.question == held:
            await anyio.sleep_forever()
        return float(gold.answer == pred.answer)

    [code] = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    code = code.replace('Path("playbook.json")', f"Path({str(folder / 'playbook.json')!r})")
    names: dict[str, Any] = {"student": Chain(), "metric": metric}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["app"]


@contextmanager
def served(app: Any) -> Iterator[httpx.Client]:
    """The application on a port of this machine until the block is left."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=SECONDS) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join(SECONDS)
    assert not thread.is_alive()


class Model:
    """Answers 1, but 2 where the playbook says so; its curator writes down what the feedback expected."""

    def __init__(self) -> None:
        self.began = {question: threading.Event() for question in ("first", "second", "third", "fourth")}
        """Question -> whether the program has tried it in training."""

    def __call__(self, prompt: str) -> str:
        if "[[ ## operations ## ]]" in prompt:
            content = f"Say 2. Learnt from {prompt.rpartition('question: ')[2].split()[0]}."
            return reply_for("", operations=json.dumps([{"type": "ADD", "section": "other", "content": content}]))
        if "[[ ## attempt ## ]]" in prompt:
            return reply_for("", what_went_wrong="", right_approach="", insight="Say 2.", bullet_tags="{}")
        question = prompt.rpartition("[[ ## question ## ]]\n")[2].split()[0]
        if "cited_bullets" in prompt and question in self.began:
            self.began[question].set()
        return reply_for("", answer="2" if "Say 2." in prompt else "1", cited_bullets="")


@pytest.fixture
def model() -> Iterator[Model]:
    """The configured model; settings are shared by threads that are not dspy's own."""
    model = Model()
    before = dspy.settings.lm
    dspy.configure(lm=fake_lm(model))
    yield model
    dspy.configure(lm=before)


def ask(client: httpx.Client) -> str:
    return client.post("/answer", params={"question": "asked"}).raise_for_status().json()["answer"]


def teach(client: httpx.Client, model: Model, question: str) -> None:
    """Give feedback, and wait until the service has begun to learn from it."""
    client.post("/feedback", params={"question": question, "answer": "2"}).raise_for_status()
    assert model.began[question].wait(SECONDS)


def test_the_service_learns_from_feedback_and_goes_on_from_what_it_had_learnt(model: Model, tmp_path: Path) -> None:
    with served(service(tmp_path)) as client:
        assert ask(client) == "1"
        teach(client, model, "first")
        teach(client, model, "second")  # it has begun, so that the first one has been learnt from and saved
        assert ask(client) == "2"
    with served(service(tmp_path)) as client:
        assert ask(client) == "2"
        teach(client, model, "third")
        teach(client, model, "fourth")
        learnt = Playbook.load(tmp_path / "playbook.json").bullets
    assert {"first", "third"} <= {bullet.content.split()[-1].rstrip(".") for bullet in learnt}


def test_what_is_being_learnt_at_a_stop_is_lost_and_the_file_is_whole(model: Model, tmp_path: Path) -> None:
    with served(service(tmp_path, held="second")) as client:
        teach(client, model, "first")
        teach(client, model, "second")
    [bullet] = Playbook.load(tmp_path / "playbook.json").bullets
    assert bullet.content == "Say 2. Learnt from first."
    assert [path.name for path in tmp_path.iterdir()] == ["playbook.json"]
