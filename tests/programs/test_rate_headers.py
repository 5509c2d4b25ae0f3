"""Limits in a provider's headers: OpenAI's, Azure's and Anthropic's forms, and whatever else may stand there."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import dspy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.rates import ReportedLimit, limits_in_headers, seconds_in
from dspy_flashevolve.programs.faults import headers_in, headers_of_error
from dspy_flashevolve.programs.servers import account_of, limits_in_options

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)
NAMES = ["limit", "remaining", "reset", "renewalperiod"]


def openai(limit: str, remaining: str, reset: str) -> dict[str, str]:
    values = zip(NAMES, (limit, remaining, reset), strict=False)
    return {f"x-ratelimit-{name}-requests": value for name, value in values}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *{"6m0s": 360.0, "20ms": 0.02, "1.5s": 1.5, "1m30.5s": 90.5, "2h": 7200.0, "59": 59.0, "1d": 86400.0}.items(),
        *((text, 0.0) for text in ("", "soon", "-5s", "5 s", "1e9s", "nan", "inf", "٦s", "9" * 14, "9d", "s", "ms")),
    ],
)
def test_a_duration_is_read_as_the_provider_means_it_and_all_else_is_none(text: str, seconds: float) -> None:
    assert (seconds_in(text) or 0.0) == pytest.approx(seconds)


def test_anthropics_headers_say_a_time_and_azures_a_period() -> None:
    anthropic = {
        "anthropic-ratelimit-tokens-limit": "80000",
        "anthropic-ratelimit-tokens-remaining": "79000",
        "anthropic-ratelimit-tokens-reset": "2026-01-01T00:00:30Z",
    }
    assert limits_in_headers(anthropic, lambda: NOW) == {"tokens": ReportedLimit(80000.0, 79000.0, 30.0)}
    azure = openai("10", "9", "1s") | {"x-ratelimit-renewalperiod-requests": "10"}
    assert limits_in_headers(azure) == {"requests": ReportedLimit(60.0, 9.0, 1.0)}


@pytest.mark.parametrize("limit", ["0", "-1", "1.5", "1e3", "six", "", " 600", "600 ", "６００", "9" * 30, "600, 600"])
def test_a_limit_that_is_no_whole_number_is_no_limit(limit: str) -> None:
    assert limits_in_headers(openai(limit, "1", "1s")) == {}


@pytest.mark.parametrize(("remaining", "reset"), [("601", "1s"), ("x", "1s"), ("1", "later"), ("-1", "1s"), ("1", "")])
def test_a_limit_is_believed_where_what_stands_beside_it_is_not(remaining: str, reset: str) -> None:
    assert limits_in_headers(openai("600", remaining, reset)) == {"requests": ReportedLimit(600.0)}


@given(
    st.dictionaries(st.sampled_from([f"x-ratelimit-{n}-{u}" for n in NAMES for u in ("requests", "tokens")]), st.text())
)
def test_whatever_stands_in_the_headers_a_limit_is_above_zero_and_a_reset_is_finite(headers: dict[str, str]) -> None:
    for heard in limits_in_headers(headers).values():
        assert heard.limit > 0
        assert 0 <= (heard.reset_seconds or 0.0) <= 86400


@given(
    st.recursive(
        st.none() | st.booleans() | st.text() | st.integers(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )
)
def test_whatever_a_reply_carries_its_headers_are_texts(held: Any) -> None:
    assert all(isinstance(value, str) for value in headers_in(held).values())
    error: Any = ValueError()
    error.rate_limit_headers = error.response = held
    assert all(isinstance(value, str) for value in headers_of_error(error).values())


def test_limits_are_said_in_litellms_words() -> None:
    assert limits_in_options(dspy.LM("openai/m", rpm=600, tpm=200_000).kwargs) == {
        "requests": 600.0,
        "tokens": 200_000.0,
    }
    assert limits_in_options({"rpm": 0, "tpm": True}) == {}


def test_an_account_is_of_one_endpoint_model_and_key_and_does_not_tell_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    lm = dspy.LM("openai/m", api_key="sk-secret")
    assert account_of(lm, "openai") == account_of(dspy.LM("openai/m", api_key="sk-secret", temperature=0.5), "openai")
    others = [
        ("openai/m", "sk-other", "openai"),
        ("openai/n", "sk-secret", "openai"),
        ("openai/m", "sk-secret", "azure"),
    ]
    accounts = {account_of(dspy.LM(model, api_key=key), endpoint) for model, key, endpoint in others}
    assert len(accounts | {account_of(lm, "openai")}) == 4
    assert "secret" not in account_of(lm, "openai")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert account_of(dspy.LM("openai/m"), "openai") == account_of(lm, "openai")
