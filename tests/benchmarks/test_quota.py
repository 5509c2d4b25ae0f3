"""Requests and tokens a minute of the simulated server: counted in three ways, told in OpenAI's headers."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

from benchmarks.quota import Counting, Quota, QuotaCounter
from dspy_flashevolve.sim import SimServer


@pytest.mark.parametrize("counting", ["bucket", "fixed", "sliding"])
def test_a_minutes_worth_is_let_in_and_the_next_is_told_when_to_come(counting: Counting) -> None:
    counter = QuotaCounter(Quota(6, 10_000, counting))
    assert [counter.admit(1.0, 10) for _ in range(6)] == [None] * 6
    wait = counter.admit(1.0, 10)
    assert wait is not None
    assert counter.admit(1.0 + 0.9 * wait, 10) is not None
    assert counter.admit(1.0 + wait, 10) is None


def test_windows_differ_where_a_minute_ends() -> None:
    late = {counting: QuotaCounter(Quota(2, 100, counting)) for counting in ("fixed", "sliding", "bucket")}
    for counter in late.values():
        assert [counter.admit(59.0, 1) for _ in range(2)] == [None, None]
    assert {name: counter.admit(61.0, 1) is None for name, counter in late.items()} == {
        "fixed": True,
        "sliding": False,
        "bucket": False,
    }


def test_a_bucket_may_hold_less_than_a_minute() -> None:
    counter = QuotaCounter(Quota(60, 10_000, holds_seconds=5.0))
    assert [counter.admit(0.0, 1) for _ in range(6)] == [None] * 5 + [1.0]


def test_over_http_answers_and_refusals_have_openais_headers() -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "?"}]}).encode()
    with SimServer(time_scale=1e4, quota=Quota(2, 10**6)) as server:
        request = urllib.request.Request(
            f"{server.api_base}/chat/completions", body, {"Content-Type": "application/json"}
        )
        answered = urllib.request.urlopen(request, timeout=30)
        assert answered.headers["x-ratelimit-limit-requests"] == "2"
        assert int(answered.headers["x-ratelimit-remaining-tokens"]) < 10**6
        urllib.request.urlopen(request, timeout=30)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        assert refused.value.code == 429
        assert refused.value.headers["x-ratelimit-remaining-requests"] == "0"
        assert 0 < int(refused.value.headers["Retry-After"]) <= 30
        assert (server.stats().requests, server.stats().refused) == (2, 1)
