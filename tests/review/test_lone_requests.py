"""Prompts that are always refused, a few of all, are told from an outage: also with a short Retry-After."""

from __future__ import annotations

import dspy
import pytest
from dspy.utils.exceptions import LMRateLimitError, LMServerError

from tests.contract.surface import simulated
from tests.contract.test_unanswered import Slow, answer
from tests.fakes import fake_lm, hashed


def refusing(share: float, error: Exception, salt: int) -> dspy.LM:
    def choose(prompt: str) -> str:
        if hashed("share", salt, prompt) % 1000 < 1000 * share:
            raise error
        return answer(prompt)

    return fake_lm(choose)


@pytest.mark.parametrize("retry_after", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("salt", range(12))
def test_one_prompt_in_twenty_that_is_refused_again_and_again_ends_no_run(salt: int, retry_after: float) -> None:
    """Each attempt's wait is shorter than PROBE_SECONDS, and all of them together are not."""
    with dspy.context(lm=refusing(0.05, LMRateLimitError("429", retry_after=retry_after), salt)):
        stats = simulated(200, Slow()).async_stats
    assert stats.outcome == "finished" or stats.metric_calls > 180, (stats.metric_calls, stats.stop_reason)


@pytest.mark.parametrize("salt", range(12))
def test_a_third_of_all_prompts_without_an_answer_ends_no_run_as_an_outage(salt: int) -> None:
    """So CHANGELOG.md says, and tests/contract/test_unanswered.py for one draw of the prompts."""
    with dspy.context(lm=refusing(1 / 3, LMServerError("503", status=503), salt)):
        stats = simulated(200, Slow()).async_stats
    assert stats.outcome == "finished" or stats.metric_calls > 180, (stats.metric_calls, stats.stop_reason)
