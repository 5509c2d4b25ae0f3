"""A machine that lacks a layer of the sandbox runs no candidate, unless that was accepted by name."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import Any, NoReturn

import dspy
import pytest

from dspy_flashevolve import AsyncMetaHarness, ConfigurationError, Harness
from dspy_flashevolve.sandbox import sandbox as sandboxes
from dspy_flashevolve.sandbox.confinement import LAYERS, Layers
from dspy_flashevolve.sandbox.sandbox import Sandbox
from tests.fakes import fake_lm

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
ALL = Layers(user=True, namespaces=True, landlock=True, seccomp=True)


@pytest.mark.parametrize("name", ["namespaces", "landlock", "seccomp"])
def test_each_layer_is_needed_until_it_is_accepted(name: str) -> None:
    layers = Layers(**{**vars(ALL), name: False})
    assert layers.missing == layers.refused(()) == (name,)
    assert layers.refused([name]) == ()
    assert layers.refused(set(LAYERS) - {name}) == (name,)
    assert ALL.refused(()) == ()


@pytest.mark.parametrize(("user", "refused"), [(0, ("user",)), (1000, ())])
def test_another_user_is_needed_by_root_only(monkeypatch: pytest.MonkeyPatch, user: int, refused: tuple[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert Layers(**{**vars(ALL), "user": False}).refused(()) == refused


@pytest.mark.parametrize("names", ["nothing", ["namespace"], [""]])
def test_names_that_are_no_layers_are_refused(names: Any) -> None:
    for made in (lambda: Sandbox(accept_missing_protection=names),
                 lambda: Harness("question -> answer", accept_missing_protection=names),
                 lambda: AsyncMetaHarness(len, proposer_lm=None, accept_missing_protection=names)):  # fmt: skip
        with pytest.raises(ConfigurationError, match="accept_missing_protection is"):
            made()


def test_a_search_without_a_layer_ends_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(prompt: str) -> NoReturn:
        raise AssertionError("an LM was asked")

    class Lacking(Sandbox):
        def __init__(self, limits: Any, **arguments: Any) -> None:
            super().__init__(limits, without=("seccomp",), **arguments)

    monkeypatch.setattr("dspy_flashevolve.async_meta_harness.Sandbox", Lacking)
    example = dspy.Example(question="?", answer="!").with_inputs("question")
    accepted = set(LAYERS) - {"seccomp"}
    optimizer = AsyncMetaHarness(len, proposer_lm=fake_lm(asked), accept_missing_protection=accepted)
    with dspy.context(lm=fake_lm(asked)), pytest.raises(ConfigurationError, match=r"layers seccomp.*'seccomp'"):
        optimizer.compile(dspy.Predict("question -> answer"), trainset=[example])


def test_what_was_accepted_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async def started() -> None:
        async with Sandbox(accept_missing_protection=LAYERS, without=("seccomp",)) as sandbox:
            assert "seccomp" in sandbox.missing

    with caplog.at_level(logging.WARNING, sandboxes.logger.name):
        asyncio.run(started())
    assert "seccomp" in caplog.text
    assert "as was accepted" in caplog.text
