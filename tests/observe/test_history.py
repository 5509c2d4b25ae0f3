"""What a journal is read into: the figures are those of the run itself, also of one that was killed or is at work."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import anyio
import dspy
import litellm
import pytest
from dspy.utils.exceptions import LMServerError

from dspy_flashevolve import AsyncGEPA, Workflow
from dspy_flashevolve.ace.playbook import Bullet, line_of
from dspy_flashevolve.engine.events import RequestFinished, RolloutTimedOut
from dspy_flashevolve.observe.analysis import lines_of, score_course, totals_of
from dspy_flashevolve.observe.history import read
from dspy_flashevolve.observe.report import report
from dspy_flashevolve.observe.terminal import status
from tests.ace import child as ace
from tests.contract import child as gepa
from tests.contract.surface import raising, simulated
from tests.contract.worlds import Rules, play
from tests.fakes import Chain, fake_lm, hashed, reflection_lm, reply_for, task_lm
from tests.harness import child as harness
from tests.killing import calls_made, killed_after
from tests.observe.runs import Session
from tests.observe.test_summary import PRICE

SEED = {"answer": "Answer."}


def check_figures(directory: Path, stats: Any) -> None:
    totals = totals_of(read(directory))
    assert totals.calls == stats.metric_calls
    assert {group.name: group.tokens for group in totals.by_stage if group.requests} == stats.tokens_by_stage
    assert {group.name: group.requests for group in totals.by_stage if group.requests} == stats.requests_by_stage
    ways = {way: count for way, count in stats.ended.items() if count}
    assert {"cancelled" if way == "at work" else way: count for way, count in totals.steps.items()} == ways
    assert totals.best_score == max(commit.score for commit in stats.commits)
    assert totals.cost_dollars == stats.cost_dollars


def test_the_figures_of_a_run_are_those_of_its_statistics(counted: tuple[Path, Any]) -> None:
    directory, program = counted
    stats, details = program.async_stats, program.detailed_results
    check_figures(directory, stats)
    totals = totals_of(read(directory))
    assert totals.by_role["task"].tokens == stats.task_tokens
    assert totals.by_role["reflection"].tokens == stats.reflection_tokens
    assert totals.reasons == stats.end_reasons
    assert totals.best_score == max(details.val_aggregate_scores)
    assert totals.best == details.best_idx
    assert totals.seed_score == pytest.approx(details.val_aggregate_scores[0])
    assert totals.accepted == len(stats.commits)
    assert totals.seconds == pytest.approx(stats.seconds, abs=10), "rows have wall time, and this run took none"
    for name, seconds in stats.busy_seconds_by_stage.items():
        mine = next((group.served_seconds for group in totals.by_stage if group.name == name), 0.0)
        assert mine <= seconds + 1e-6


def test_candidates_have_texts_scores_parents_and_times_of_the_run(counted: tuple[Path, Any]) -> None:
    directory, program = counted
    details, stats = program.detailed_results, program.async_stats
    history = read(directory)
    assert [candidate.texts for candidate in history.candidates] == [
        {name: predictor.signature.instructions for name, predictor in candidate.named_predictors()}
        for candidate in details.candidates
    ]
    assert [candidate.score for candidate in history.candidates] == pytest.approx(details.val_aggregate_scores)
    assert [list(candidate.parents) for candidate in history.candidates[1:]] == details.parents[1:]
    assert [candidate.seconds for candidate in history.candidates[1:]] == pytest.approx(
        [commit.seconds for commit in stats.commits]
    )
    assert [candidate.gap for candidate in history.candidates[1:]] == [commit.gap for commit in stats.commits]
    assert [point.best for point in score_course(history)][-1] == max(details.val_aggregate_scores)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Run directory and program of a playbook run."""
    directory = tmp_path_factory.mktemp("taught")
    program = ace.run(directory, "async", 6)
    return directory / "run", program


def test_the_figures_of_a_playbook_run_and_of_a_search_for_harnesses_are_those_of_their_statistics(
    taught: tuple[Path, Any], tmp_path: Path
) -> None:
    directory, program = taught
    check_figures(directory, program.async_stats)
    check_figures(tmp_path / "run", harness.run(tmp_path, "async", 2).detailed_results.stats)


def vars_of(candidate: Any) -> dict[str, Any]:
    return {field.name: getattr(candidate, field.name) for field in fields(candidate)}


@pytest.mark.long
def test_a_run_that_was_killed_loses_none_of_its_figures(tmp_path: Path) -> None:
    def has_committed() -> int:
        return (tmp_path / "run" / "candidates.json").exists()

    assert killed_after(0.3, has_committed, "tests.contract.child", tmp_path, "edits", 5000)
    killed = read(tmp_path / "run")
    assert killed.state == "killed"
    assert calls_made(tmp_path) <= killed.calls <= calls_made(tmp_path) + 8, "calls that had begun count"
    gepa.run(tmp_path, "edits", killed.calls + 60)
    whole = read(tmp_path / "run")
    assert [session.state for session in whole.sessions] == ["killed", "finished"]
    assert whole.requests[: len(killed.requests)] == killed.requests
    for before, after in zip(killed.candidates, whole.candidates, strict=False):  # the last may have had no row yet
        known = {name: value for name, value in vars_of(before).items() if value is not None}
        assert known == {name: vars_of(after)[name] for name in known}
    assert len(killed.candidates) <= len(whole.candidates)
    assert killed.calls < whole.calls <= killed.calls + 60
    seconds = [candidate.seconds for candidate in whole.candidates if candidate.seconds is not None]
    assert seconds == sorted(seconds), "sessions stand one after the other"


def test_a_run_that_is_at_work_can_be_read(tmp_path: Path) -> None:
    with Session(tmp_path) as session:
        session.opens(0, SEED, 3)
        session.ran(0, SEED, 3, 0.5)
        session.store.record_call("rollout", 0)
        session.store.flush_blocking()
        history = read(tmp_path)
        assert (history.state, history.calls) == ("running", 2)
        assert totals_of(history).steps == {"at work": 1}
    assert read(tmp_path).state == "killed"


def test_rollouts_are_in_flight_from_their_first_request_on_and_not_only_in_their_metric(tmp_path: Path) -> None:
    together = threading.Barrier(4, timeout=60)
    views: list[tuple[int, str]] = []

    class Held(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.answer = dspy.Predict("question -> answer")

        def forward(self, question: str) -> Any:
            """Answer when all four rollouts are here and one of them has seen them in the journal."""
            if together.wait() == 0:
                while sum((history := read(tmp_path)).in_flight.values()) < 4:
                    time.sleep(0.05)  # the journal has them within a second
                views.append((len(history.requests), status(history)))
            together.wait()
            return self.answer(question=question)

    examples = [dspy.Example(question=f"q{number}", answer="a").with_inputs("question") for number in range(4)]
    optimizer = AsyncGEPA(
        lambda gold, pred, trace=None, pred_name=None, pred_trace=None: 1.0,
        max_metric_calls=4,
        num_threads=4,
        reflection_lm=reflection_lm(),
        log_dir=str(tmp_path),
    )
    with dspy.context(lm=task_lm()):
        optimizer.compile(Held(), trainset=examples, valset=examples)
    [(answered, shown)] = views
    assert answered == 0
    assert "requests in flight: 4 in validate" in shown
    assert read(tmp_path).in_flight == {}


def test_what_models_cost_is_unknown_where_tokens_have_no_price(tmp_path: Path) -> None:
    with Session(tmp_path) as session:
        session.ran(0, SEED, 1, 0.5, tokens=10)
        session.tells(RequestFinished(2.0, 0, "propose", 1.0, 100, 0.25), RolloutTimedOut(2.0, 0, "rollout", 9.0, 1))
        session.tells(RequestFinished(3.0, 0, "propose", 1.0, 0, 0.0, "no JSON"))
    totals = totals_of(read(tmp_path))
    assert (totals.by_role["task"].cost_dollars, totals.by_role["reflection"].cost_dollars) == (None, 0.25)
    assert totals.by_role["reflection"].failed == 1
    assert totals.failures == {"RolloutTimedOut": 1, "RequestFinished": 1}


def test_dollars_by_stage_are_those_of_the_run(tmp_path: Path) -> None:
    litellm.register_model({"cheap": PRICE})
    task, unknown = task_lm(), reflection_lm()
    task.model, unknown.model = "cheap", "nobody-has-a-price-for-this"
    for name, reflects in (("known", task), ("unknown", unknown)):
        with dspy.context(lm=task):
            stats = simulated(30, reflection_lm=reflects, log_dir=str(tmp_path / name)).async_stats
        totals = totals_of(read(tmp_path / name))
        assert totals.cost_dollars == (None if name == "unknown" else pytest.approx(stats.cost_dollars))
        dollars = {group.name: group.cost_dollars for group in totals.by_stage if group.requests}
        assert dollars == pytest.approx(stats.dollars_by_stage)
        assert totals.by_role["task"].cost_dollars is not None


def test_requests_that_were_made_again_are_in_the_journal_and_the_report(tmp_path: Path) -> None:
    busy = raising(lambda number: dspy.LMRateLimitError("slow down") if number % 7 == 0 else None)
    with dspy.context(lm=busy):
        stats = simulated(30, log_dir=str(tmp_path)).async_stats
    history = read(tmp_path, replies=True)
    assert totals_of(history).failures["RequestTurnedAway"] == stats.retried_requests > 0
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
        stats = simulated(120, Halting(), reflection_lm=lm, log_dir=str(tmp_path), workflow=workflow).async_stats
    assert sum(stats.tokens_by_stage.values()) == 7 * answered
    given_up = [request for request in read(tmp_path).failed_requests if request.error == "given up"]
    assert len(given_up) > (0 if ends == "cancelled" else 10)
    assert all(request.tokens == 7 for request in given_up)
    check_figures(tmp_path, stats)


def test_changes_have_the_effects_that_the_run_told_at_its_end(changed: tuple[Path, Any]) -> None:
    directory, program = changed
    told = program.async_stats.changes
    assert told
    assert list(read(directory).changes) == told


def test_each_line_of_the_best_prompt_comes_from_the_step_whose_reflection_wrote_it(changed: tuple[Path, Any]) -> None:
    directory, _ = changed
    history = read(directory, replies=True)
    assert history.best is not None
    lines = lines_of(history, history.best)
    assert [line.line for line in lines] == [line for text in history.best.texts.values() for line in text.splitlines()]
    new = [line for line in lines if not line.is_seed]
    assert new
    for line in new:
        assert line.step is not None
        step = history.steps[line.step]
        assert any(line.line in json.loads(reply)["texts"][line.component] for _, reply in step.replies)
        assert list(line.examples or {}) == [example for task in step.selection for example in task["ids"]]
        assert line.change is not None
        assert line.change.step == line.step


@pytest.mark.long
def test_without_credit_assignment_a_line_comes_from_the_ancestor_that_had_it_first(tmp_path: Path) -> None:
    play(Rules(), 300, log_dir=str(tmp_path), search="pareto")
    history = read(tmp_path, replies=True)
    assert not history.changes
    assert history.best is not None
    new = [line for line in lines_of(history, history.best) if not line.is_seed]
    assert new
    by_index = {candidate.index: candidate for candidate in history.candidates}
    for line in new:
        assert line.candidate is not None
        first = by_index[line.candidate]
        assert line.line in first.texts[line.component].splitlines()
        for parent in first.parents:
            assert parent is None or line.line not in by_index[parent].texts[line.component].splitlines()
        assert line.step is not None
        assert any(
            line.line in json.loads(reply)["texts"][line.component] for _, reply in history.steps[line.step].replies
        )


def test_a_line_of_a_playbook_comes_from_the_sample_that_taught_it(taught: tuple[Path, Any]) -> None:
    history = read(taught[0], replies=True)
    last = history.candidates[-1]
    bullets = last.more["playbook"]["bullets"]
    assert bullets
    learnt = {line.line: line for line in lines_of(history, last) if line.step is not None}
    lines = {line_of(Bullet(**bullet)): bullet for bullet in bullets}
    assert learnt.keys() == lines.keys()
    for line, bullet in lines.items():
        origin = learnt[line]
        assert origin.step is not None
        step = history.steps[origin.step]
        assert any(bullet["content"] in reply for _, reply in step.replies)
        [(example, scores)] = (origin.examples or {}).items()
        assert example == str(step.selection["example"])
        assert scores
