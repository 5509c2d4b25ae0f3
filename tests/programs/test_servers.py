"""BalancedLM as the LM that it is: outside of a run, copied, saved, cached."""

from __future__ import annotations

import asyncio
import copy
import pickle
from pathlib import Path
from typing import Any

import dspy
import pytest
from dspy.clients.base_lm import BaseLM
from dspy.utils.exceptions import LMAuthError

from dspy_flashevolve import ConfigurationError
from dspy_flashevolve.engine.redaction import secrets_held_by
from dspy_flashevolve.programs.servers import BalancedLM, endpoint_of
from tests.broken_server import REPLY, BrokenServer


def balanced(server: BrokenServer, *names: str, **options: Any) -> BalancedLM:
    places = [f"{server.address}/{name}/v1" for name in names]
    return BalancedLM("openai/m", api_base=places, **({"api_key": "key", "cache": False, "num_retries": 0} | options))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_outside_of_a_run_servers_are_asked_in_turn_and_the_next_where_one_fails(asynchronous: bool) -> None:
    with BrokenServer() as server:
        lm = balanced(server, "one", "two", "503", "reset")
        said = [asyncio.run(lm.acall("?")) if asynchronous else lm("?") for _ in range(8)]
        assert {text for (text,) in said} == {"one", "two"}
        assert len(lm.history) == 8


def test_where_none_answers_the_error_is_raised_and_a_rejected_key_is_not_taken_elsewhere() -> None:
    with BrokenServer() as server:
        with pytest.raises(dspy.utils.exceptions.LMError):
            balanced(server, "503", "500")("?")
        refused = balanced(server, "401", "another/401")
        with pytest.raises(LMAuthError):
            refused("?")


def test_callbacks_hear_of_a_call_once_however_many_servers_are_asked() -> None:
    heard: list[str] = []

    class Heard(dspy.utils.callback.BaseCallback):
        def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
            heard.append(call_id)

    with BrokenServer() as server:
        lm = balanced(server, "503", "good", callbacks=[Heard()])
        assert [lm("?"), lm("?")] == [[REPLY], [REPLY]]
    assert len(heard) == 2


def test_a_reply_is_in_the_cache_whichever_server_gave_it(tmp_path: Path) -> None:
    with BrokenServer() as server:
        lm = balanced(server, "one", "two", cache=True)
        question = f"said {tmp_path}"
        assert len({lm(question)[0] for _ in range(6)}) == 1
        other = dspy.LM("openai/m", api_base="http://127.0.0.1:1/v1", api_key="other", num_retries=0)
        assert other(question) == lm(question)


def test_a_copy_a_pickle_and_a_saved_state_have_the_same_servers() -> None:
    lm = BalancedLM("openai/m", api_base=["http://a/v1", {"api_base": "http://b/v1", "api_key": "secret", "rpm": 60}])
    for other in (copy.deepcopy(lm), pickle.loads(pickle.dumps(lm)), lm.copy(temperature=0.5)):
        assert type(other) is BalancedLM
        assert other.deployments == lm.deployments
    state = lm.dump_state()
    assert "secret" not in repr(state)
    loaded: Any = BaseLM.load_state(state, allow_custom_lm_class=True)
    assert [one["api_base"] for one in loaded.deployments] == ["http://a/v1", "http://b/v1"]


def test_its_keys_are_secrets_and_its_endpoints_have_names_of_their_own() -> None:
    servers = [{"api_base": "http://a/v1", "api_key": key} for key in ("sk-first-secret", "sk-second-secret")]
    lm = BalancedLM("openai/m", api_base=[*servers, "https://user:hidden-word@b/v1"])
    assert {"sk-first-secret", "sk-second-secret", "hidden-word"} <= secrets_held_by(lm)
    assert endpoint_of(lm) == "http://a/v1 | http://a/v1 #2 | https://b/v1"


@pytest.mark.parametrize(
    "servers",
    [[], ["http://a/v1", "http://a/v1/"], [""], [{"api_key": "k"}], [{"api_base": "http://a/v1", "model": "other"}]],
)
def test_servers_that_cannot_be_asked_are_refused_and_no_key_is_shown(servers: Any) -> None:
    with pytest.raises(ConfigurationError, match="api_base") as error:
        BalancedLM("openai/m", api_base=[*servers, *({**one, "api_key": "sk-x"} for one in servers if "model" in one)])
    assert "sk-x" not in str(error.value)
