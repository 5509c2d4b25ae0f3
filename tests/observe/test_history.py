"""What a journal is read into: the figures are those of the run itself, also of one that was killed or is at work."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import dspy
import litellm
import pytest
from dspy.utils.exceptions import LMServerError

from dspy_flashevolve import Workflow
from dspy_flashevolve.engine.events import RequestFinished, RolloutTimedOut
from dspy_flashevolve.engine.journal import Journal
from dspy_flashevolve.observe.figures import course, figures, use_of_slots
from dspy_flashevolve.observe.history import read
from dspy_flashevolve.observe.origins import origins
from dspy_flashevolve.observe.report import report
from tests.ace import child as ace
from tests.contract import child as gepa
from tests.contract.surface import raising, simulated
from tests.contract.worlds import Rules, play
from tests.fakes import Chain, fake_lm, hashed, reflection_lm, reply_for, task_lm
from tests.harness import child as harness
from tests.killing import killed_after
from tests.observe.runs import Session
from tests.observe.test_summary import PRICE

SEED = {"answer": "Answer."}


def check_figures(directory: Path, stats: Any) -> None:
    found = figures(read(directory))
    assert found.calls == stats.metric_calls
    assert {one.name: one.tokens for one in found.by_stage if one.requests} == stats.tokens_by_stage
    assert {one.name: one.requests for one in found.by_stage if one.requests} == stats.requests_by_stage
    ways = {way: count for way, count in stats.ended.items() if count}
    assert {"cancelled" if way == "at work" else way: count for way, count in found.steps.items()} == ways
    assert found.best_score == max(one.score for one in stats.commits)
    assert found.cost_dollars == stats.cost_dollars


def test_the_figures_of_a_run_are_those_of_its_statistics(counted: tuple[Path, Any]) -> None:
    directory, program = counted
    stats, details = program.async_stats, program.detailed_results
    found = figures(read(directory))
    assert found.calls == stats.metric_calls
    assert {one.name: one.tokens for one in found.by_stage if one.requests} == stats.tokens_by_stage
    assert {one.name: one.requests for one in found.by_stage if one.requests} == stats.requests_by_stage
    assert found.cost_dollars == stats.cost_dollars
    assert found.by_role["task"].tokens == stats.task_tokens
    assert found.by_role["reflection"].tokens == stats.reflection_tokens
    assert found.steps == {way: count for way, count in stats.ended.items() if count}
    assert found.reasons == stats.end_reasons
    assert found.best_score == max(details.val_aggregate_scores)
    assert found.best == details.best_idx
    assert found.seed_score == pytest.approx(details.val_aggregate_scores[0])
    assert found.accepted == len(stats.commits)
    assert found.seconds == pytest.approx(stats.seconds, abs=0.5)
    for name, seconds in stats.busy_seconds_by_stage.items():
        mine = next((one.served_seconds for one in found.by_stage if one.name == name), 0.0)
        assert mine <= seconds + 1e-6


def test_candidates_have_texts_scores_parents_and_times_of_the_run(counted: tuple[Path, Any]) -> None:
    directory, program = counted
    details, stats = program.detailed_results, program.async_stats
    history = read(directory)
    assert [one.texts for one in history.candidates] == [
        {name: one.signature.instructions for name, one in candidate.named_predictors()}
        for candidate in details.candidates
    ]
    assert [one.score for one in history.candidates] == pytest.approx(details.val_aggregate_scores)
    assert [list(one.parents) for one in history.candidates[1:]] == details.parents[1:]
    assert [one.seconds for one in history.candidates[1:]] == pytest.approx([one.seconds for one in stats.commits])
    assert [one.gap for one in history.candidates[1:]] == [one.gap for one in stats.commits]
    assert [one.best for one in course(history)][-1] == max(details.val_aggregate_scores)


def test_the_figures_of_a_playbook_run_and_of_a_search_for_harnesses_are_those_of_their_statistics(
    tmp_path: Path,
) -> None:
    for name in ("ace", "harness"):
        (tmp_path / name).mkdir()
    check_figures(tmp_path / "ace" / "run", ace.run(tmp_path / "ace", "guarded", 10).async_stats)
    check_figures(tmp_path / "harness" / "run", harness.run(tmp_path / "harness", "guarded", 3).detailed_results.stats)


def test_a_run_that_was_killed_loses_none_of_its_figures(tmp_path: Path) -> None:
    def made() -> int:
        path = tmp_path / "calls.txt"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    assert killed_after(0.3, made, "tests.contract.child", tmp_path, "reflective", 5000)
    killed = read(tmp_path / "run")
    assert killed.state == "killed"
    assert made() <= killed.calls <= made() + 8, "calls that had begun count"
    gepa.run(tmp_path, "reflective", killed.calls + 60)
    whole = read(tmp_path / "run")
    assert [one.state for one in whole.sessions] == ["killed", "finished"]
    assert whole.requests[: len(killed.requests)] == killed.requests
    assert whole.candidates[: len(killed.candidates)] == killed.candidates
    assert killed.calls < whole.calls <= killed.calls + 60
    seconds = [one.seconds for one in whole.candidates if one.seconds is not None]
    assert seconds == sorted(seconds), "sessions stand one after the other"


def test_a_run_that_is_at_work_can_be_read(tmp_path: Path) -> None:
    with Session(tmp_path) as session:
        session.opens(0, SEED, 3)
        session.ran(0, SEED, 3, 0.5)
        session.written.call("rollout", 0)
        session.journal.flush_here()
        history = read(tmp_path)
        assert (history.state, history.calls, history.under_way) == ("running", 2, 1)
        assert figures(history).steps == {"at work": 1}
    assert read(tmp_path).state == "killed"


def test_a_journal_without_a_session_has_no_figures_and_no_error(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)):
        history = read(tmp_path)
    assert (history.state, history.best, figures(history).calls) == ("unknown", None, 0)


def test_what_models_cost_is_unknown_where_tokens_have_no_price(tmp_path: Path) -> None:
    with Session(tmp_path) as session:
        session.ran(0, SEED, 1, 0.5, tokens=10)
        session.tells(RequestFinished(2.0, 0, "propose", 1.0, 100, 0.25), RolloutTimedOut(2.0, 0, "rollout", 9.0, 1))
        session.tells(RequestFinished(3.0, 0, "propose", 1.0, 0, 0.0, "no JSON"))
    found = figures(read(tmp_path))
    assert (found.by_role["task"].cost_dollars, found.by_role["reflection"].cost_dollars) == (None, 0.25)
    assert found.by_role["reflection"].failed == 1
    assert found.failures == {"RolloutTimedOut": 1, "RequestFinished": 1}


def test_dollars_by_stage_are_those_of_the_run(tmp_path: Path) -> None:
    litellm.register_model({"cheap": PRICE})
    task, unknown = task_lm(), reflection_lm()
    task.model, unknown.model = "cheap", "nobody-has-a-price-for-this"
    for name, reflects in (("known", task), ("unknown", unknown)):
        with dspy.context(lm=task):
            stats = simulated(60, reflection_lm=reflects, log_dir=str(tmp_path / name)).async_stats
        found = figures(read(tmp_path / name))
        assert found.cost_dollars == (None if name == "unknown" else pytest.approx(stats.cost_dollars))
        dollars = {one.name: one.cost_dollars for one in found.by_stage if one.requests}
        assert dollars == pytest.approx(stats.dollars_by_stage)
        assert found.by_role["task"].cost_dollars is not None


def test_requests_that_were_made_again_are_in_the_journal_and_the_report(tmp_path: Path) -> None:
    busy = raising(lambda number: dspy.LMRateLimitError("slow down") if number % 7 == 0 else None)
    with dspy.context(lm=busy):
        stats = simulated(60, log_dir=str(tmp_path)).async_stats
    history = read(tmp_path, replies=True)
    assert figures(history).failures["RequestTurnedAway"] == stats.retried_requests > 0
    page = report(history)
    assert f"made again ({stats.retried_requests:,})" in page
    assert "slow down" in page


@pytest.mark.parametrize("ends", ["cancelled", "too late", "turned away"])
def test_what_lms_answered_in_rollouts_that_came_to_nothing_is_counted(tmp_path: Path, ends: str) -> None:
    answered = 0

    def counted(prompt: str) -> str:
        nonlocal answered
        answered += 1
        return reply_for(prompt, answer=str(hashed(prompt) % 7), new_instruction=f"Instruction {hashed(prompt)}")

    class Halting(Chain):
        async def aforward(self, question: str) -> dspy.Prediction:
            answer = await super().aforward(question)
            fifth = answered % 5 == 0
            await anyio.sleep(1000 if fifth and ends == "too late" else hashed(answered) % 60)
            if fifth and ends == "turned away":
                raise LMServerError("another server than the one that answered")
            return answer

    lm = fake_lm(counted)
    workflow = Workflow(rollout_timeout_seconds=60, live_steps=4)
    with dspy.context(lm=lm):
        stats = simulated(200, Halting(), reflection_lm=lm, log_dir=str(tmp_path), workflow=workflow).async_stats
    assert sum(stats.tokens_by_stage.values()) == 7 * answered
    given_up = [one for one in read(tmp_path).requests if one.error == "given up"]
    assert len(given_up) > (0 if ends == "cancelled" else 20)
    assert all(one.tokens == 7 for one in given_up)
    check_figures(tmp_path, stats)


def test_slots_over_time_keep_every_second_of_every_interval() -> None:
    used = use_of_slots([("a", 0.0, 10.0), ("a", 2.5, 5.0), ("b", 9.0, 12.0)], 12.0, 7)
    assert sum(used["a"]) * 12 / 7 == pytest.approx(12.5)
    assert sum(used["b"]) * 12 / 7 == pytest.approx(3.0)
    assert used["a"][2] == pytest.approx((1.5 * 12 / 7 + 5.0 - 2 * 12 / 7 - 0.5 * 12 / 7) / (12 / 7))


def test_changes_have_the_effects_that_the_run_told_at_its_end(changed: tuple[Path, Any]) -> None:
    directory, program = changed
    told = program.async_stats.changes
    assert told
    assert list(read(directory).changes) == told


def test_each_line_of_the_best_prompt_comes_from_the_step_whose_reflection_wrote_it(changed: tuple[Path, Any]) -> None:
    directory, _ = changed
    history = read(directory, replies=True)
    assert history.best is not None
    lines = origins(history, history.best)
    assert [one.line for one in lines] == [line for text in history.best.texts.values() for line in text.splitlines()]
    new = [one for one in lines if not one.is_seed]
    assert new
    for one in new:
        assert one.step is not None
        step = history.steps[one.step]
        assert any(one.line in json.loads(reply)["texts"][one.component] for _, reply in step.replies)
        assert list(one.examples or {}) == [example for task in step.selection for example in task["ids"]]
        assert one.change is not None
        assert one.change.step == one.step


def test_without_credit_assignment_a_line_comes_from_the_ancestor_that_had_it_first(tmp_path: Path) -> None:
    play(Rules(), 300, log_dir=str(tmp_path), staleness="full")
    history = read(tmp_path, replies=True)
    assert not history.changes
    assert history.best is not None
    new = [one for one in origins(history, history.best) if not one.is_seed]
    assert new
    by_index = {one.index: one for one in history.candidates}
    for one in new:
        assert one.candidate is not None
        first = by_index[one.candidate]
        assert one.line in first.texts[one.component].splitlines()
        for parent in first.parents:
            assert parent is None or one.line not in by_index[parent].texts[one.component].splitlines()
        assert one.step is not None
        assert any(
            one.line in json.loads(reply)["texts"][one.component] for _, reply in history.steps[one.step].replies
        )


def test_a_line_of_a_playbook_comes_from_the_sample_that_taught_it(tmp_path: Path) -> None:
    ace.run(tmp_path, "guarded", 10)
    history = read(tmp_path / "run", replies=True)
    last = history.candidates[-1]
    bullets = last.more["playbook"]["bullets"]
    assert bullets
    found = {one.line: one for one in origins(history, last) if one.step is not None}
    assert found.keys() == {f"[{one['id']}] {one['content']}" for one in bullets}
    for bullet in bullets:
        origin = found[f"[{bullet['id']}] {bullet['content']}"]
        assert origin.step is not None
        step = history.steps[origin.step]
        assert any(bullet["content"] in reply for _, reply in step.replies)
        [(example, scores)] = (origin.examples or {}).items()
        assert example == str(step.selection["example"])
        assert scores
