"""What a run says of itself: in its bar, at its end, in its statistics."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import dspy
import litellm
import pytest

from dspy_flashevolve.engine.events import LimitChanged
from tests.contract.surface import simulated
from tests.contract.worlds import World, play
from tests.fakes import Chain, fake_lm, hashed, reflection_lm, reply_for, task_lm

PRICE = {"input_cost_per_token": 1e-6, "output_cost_per_token": 2e-6, "litellm_provider": "openai", "mode": "chat"}


@pytest.fixture(scope="module")
def stats() -> Any:
    with dspy.context(lm=task_lm()):
        return simulated(90).async_stats


def test_a_summary_says_what_held_a_run_back(stats: Any) -> None:
    assert "more slots (num_threads)" in repr(replace(stats, occupancy=0.95))
    assert "turned requests away" in repr(replace(stats, occupancy=0.95, pauses=3))
    busy = {"rollout": 10.0, "propose": 30.0}
    assert "reflections took most" in repr(replace(stats, occupancy=0.5, busy_seconds_by_stage=busy))
    busy = {"rollout": 30.0, "propose": 10.0}
    assert "waited for each other" in repr(replace(stats, occupancy=0.5, busy_seconds_by_stage=busy))


@pytest.mark.parametrize(
    "error", [dspy.LMRateLimitError("429, slow down"), dspy.LMTransportError("refused by 10.0.0.1")]
)
def test_a_summary_says_what_the_provider_said_and_takes_no_dead_server_for_a_rate_limit(error: Exception) -> None:
    calls = count()

    def answer(prompt: str) -> str:
        if 20 <= next(calls) < 25:
            raise error
        return reply_for(prompt, answer=str(hashed(prompt) % 7))

    with dspy.context(lm=fake_lm(answer)):
        stats = simulated(100).async_stats
    again = stats.retried_requests
    assert sum(stats.turned_away.values()) == again == 5
    held_back = repr(replace(stats, pauses=1))
    assert f"{again} requests were made again, {again} of them since: {error}" in held_back
    assert "rate limit" not in held_back


def test_a_summary_without_a_proposal_says_why_and_slots_are_those_that_the_limits_allowed(stats: Any) -> None:
    ended = {"it rained": 2, "all scores of its minibatch are perfect": 5}
    assert "0 proposals; 5 ended since: all scores of its minibatch are perfect\n" in repr(
        replace(stats, proposals=0, end_reasons=ended)
    )
    long = repr(replace(stats, proposals=0, end_reasons={"a reply\n" * 500: 1}))
    assert max(map(len, long.splitlines())) < 250
    assert len(long.splitlines()) < 25
    changes = [LimitChanged(0.0, "lm", 4, 6, "it binds"), LimitChanged(0.0, "lm", 6, 3, "refused")]
    adaptive = repr(replace(stats, slots=256, peak_slots=5, limit_changes=changes))
    assert "slots: as many as the endpoints took, at most 5 of 256 at once, " in adaptive


def test_a_run_with_nothing_to_improve_says_so() -> None:
    stats = play(World(score=lambda text, question: 1.0 if question.startswith("t") else 0.5), 60).async_stats
    assert "0 proposals; " in repr(stats)
    assert "ended since: all scores of its minibatch are perfect" in repr(stats)


def test_steps_that_asked_for_no_child_are_not_called_rejected(stats: Any) -> None:
    reasons = {"all scores of its minibatch are perfect": 3, "no child passed its screen": 2}
    shown = repr(replace(stats, steps=6, ended={"committed": 1, "rejected": 5}, end_reasons=reasons, proposals=3))
    assert "6 (1 committed, 2 rejected, 3 found nothing to improve), 3 proposals" in shown


def test_where_no_model_has_a_price_one_line_says_so_once() -> None:
    assert repr(simulated(60).async_stats).count("unknown (litellm has no price for the models)") == 1
    assert repr(simulated(60).async_stats).count("unknown") == 1


def test_a_long_change_of_the_prompt_is_shown_in_part(stats: Any) -> None:
    shown = repr(replace(stats, prompt_change="\n".join(f"+line {number}" for number in range(40))))
    assert "+line 11" in shown
    assert "+line 12" not in shown
    assert shown.endswith("... and 28 lines more")


def test_dollars_are_counted_without_being_asked_for_and_unknown_prices_say_so() -> None:
    litellm.register_model({"cheap": PRICE})
    task, unknown = task_lm(), reflection_lm()
    task.model, unknown.model = "cheap", "nobody-has-a-price-for-this"
    with dspy.context(lm=task):
        stats = simulated(60, Chain(), reflection_lm=task).async_stats
        unpriced = simulated(60, Chain(), reflection_lm=unknown).async_stats
    assert stats.cost_dollars == pytest.approx(sum(stats.dollars_by_stage.values()))
    assert stats.cost_dollars > 0
    assert unpriced.cost_dollars is None
    assert unpriced.dollars_by_stage["propose"] is None
    assert unpriced.dollars_by_stage["validate"] > 0
    [dollars] = [line for line in repr(unpriced).splitlines() if "dollars" in line]
    assert re.search(r"; unknown for propose(, integrate)? \(litellm has no price for the model\)$", dollars)
    assert dollars.count("unknown") == 1


def shown_by(code: str, *arguments: str) -> str:
    """What a script writes to stderr, its bars included."""
    env = os.environ | {"TQDM_DISABLE": "", "TQDM_MININTERVAL": "0"}
    command = [sys.executable, "-c", code, *arguments]
    ran = subprocess.run(command, cwd=Path(__file__).parents[2], env=env, capture_output=True, text=True, check=True)
    return ran.stderr


BAR = """
import logging
from tests.contract.worlds import World, play
from tests.contract.surface import on

talking = logging.getLogger("dspy")
play(World(seed=3), 120, num_threads=8, gepa_kwargs=on("on_candidate_accepted", lambda _: talking.info("SAID THIS")))
"""


@pytest.mark.long
def test_the_bar_has_the_seed_the_best_and_its_end_and_lines_of_the_log_stand_alone() -> None:
    shown = shown_by(BAR)
    bars = [part for part in re.split(r"[\r\n]", shown) if "rollouts/s" in part or "s/rollouts" in part]
    assert re.search(r"best 0\.\d+ \(seed 0\.250\), \d+ accepted", bars[-1])
    assert "100%" in bars[-1]
    assert "validating the seed" in shown
    logged = [line for line in re.split(r"[\r\n]", shown) if "SAID THIS" in line]
    assert logged
    assert not [line for line in logged if "rollouts/s" in line or not line.endswith("SAID THIS")]


RESUMED = """
import sys
from tests.contract.worlds import World, play

for calls in (60, 120):
    print("SESSION", file=sys.stderr)
    play(World(seed=3), calls, num_threads=8, log_dir=sys.argv[1])
"""


@pytest.mark.long
def test_the_bar_of_a_run_that_goes_on_begins_where_that_was(tmp_path: Path) -> None:
    shown = shown_by(RESUMED, str(tmp_path / "run"))
    first, second = (
        [line for line in re.split(r"[\r\n]", part) if "rollouts/s" in line] for part in shown.split("SESSION")[1:]
    )
    ends = [int(re.findall(r"(\d+)/\d+ \[", lines[-1])[0]) for lines in (first, second)]
    begins = [int(re.findall(r"(\d+)/\d+ \[", lines[0])[0]) for lines in (first, second)]
    assert begins == [0, ends[0]]
    assert ends[0] < ends[1] <= 120
    best = [
        [float(score) for line in lines for score in re.findall(r"best (0\.\d+)", line)] for lines in (first, second)
    ]
    assert best[1][0] == best[0][-1]
    assert not [line for line in second if "validating the seed" in line]


TIMED = """
import dspy, litellm
from tests.contract.worlds import World, play
from tests.contract.surface import simulated
from tests.fakes import reflection_lm, task_lm

play(World(seed=3), None, num_threads=8, max_seconds=100)
print("PRICES", file=__import__("sys").stderr)
play(World(seed=3), 5000, num_threads=8, max_reflection_calls=12)
print("PRICES", file=__import__("sys").stderr)
litellm.register_model({"cheap": %r})
task, unknown = task_lm(), reflection_lm()
task.model, unknown.model = "cheap", "nobody-has-a-price-for-this"
with dspy.context(lm=task):
    simulated(60, reflection_lm=unknown)
"""


@pytest.mark.long
def test_the_bar_has_the_time_that_is_left_and_names_no_dollars_where_a_price_is_unknown() -> None:
    shown = shown_by(TIMED % PRICE)
    timed, counted, priced = (re.split(r"[\r\n]", part) for part in shown.split("PRICES"))
    assert [line for line in timed if re.search(r"about \d+ min \d\d s left, best 0\.\d+ \(seed", line)]
    assert [line for line in timed if "finishing, best" in line]
    assert [line for line in counted if re.search(r"about \d+(\.\d)? .*left, best 0\.\d+ \(seed", line)]
    last = [line for line in timed if "rollouts" in line][-1]
    assert "left" not in last
    assert "finishing" not in last
    assert "$" not in [line for line in priced if "rollouts" in line][-1]
    assert not [line for line in timed if "$" in line], "nothing asked an LM"
