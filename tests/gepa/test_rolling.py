"""Reflecting before the slowest example of a minibatch has finished, and what becomes of the late ones."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest
from dspy.utils.exceptions import LMAuthError, LMRateLimitError

from dspy_flashevolve import Reflective, RunAbortedError, Speculation
from dspy_flashevolve.engine.errors import RolloutUnresolvedError
from dspy_flashevolve.engine.events import RolloutFinished, TicketClosed
from dspy_flashevolve.gepa.evaluations import as_batch
from dspy_flashevolve.gepa.rolling import LateRollouts
from dspy_flashevolve.sim.virtual import run
from tests.fakes import examples
from tests.gepa.worlds import Callbacks, Outcome, World, play

SLOW = "t 2"
FULL: dict[str, Any] = {"staleness": "full"}


def slow_third(text: str, question: str) -> float:
    return 100.0 if question == SLOW else 1.0


class Failing(World):
    """The slow training example gets no answer, or a refusal."""

    error: Exception = LMRateLimitError("later", model="m")

    async def rollout(self, text: str, question: str) -> None:
        await super().rollout(text, question)
        if question == SLOW:
            raise self.error


def three() -> list[Any]:
    return examples("t", 3)


def shown(outcome: Outcome) -> set[tuple[str, ...]]:
    return {tuple(sorted(questions)) for _, questions in outcome.world.reflected}


# What is reflected on


@pytest.mark.parametrize(("share", "seen"), [(0.34, 1), (0.67, 2), (1.0, 3)])
def test_reflection_starts_on_the_share_that_is_there(share: float, seen: int) -> None:
    seconds = {"t 0": 1.0, "t 1": 10.0, SLOW: 100.0}
    world = World(score=lambda text, question: 0.0, seconds=lambda text, question: seconds.get(question, 1.0))
    outcome = play(world, calls=60, trainset=three(), speculation=Speculation(rollout=share), **FULL)
    outcome.check_budget()
    assert {len(questions) for questions in shown(outcome)} == {seen}
    if seen < 3:
        assert shown(outcome) == {("t 0", "t 1")[:seen]}, "those that have finished"


@pytest.mark.parametrize("options", [{"speculation": None}, {"schedule": "lockstep"}])
def test_without_speculation_reflection_waits_for_all(options: dict[str, Any]) -> None:
    outcome = play(World(score=lambda t, q: 0.0, seconds=slow_third), calls=60, trainset=three(), **FULL, **options)
    assert shown(outcome) == {("t 0", "t 1", SLOW)}


def test_reflection_waits_for_a_score_that_could_be_better() -> None:
    world = World(score=lambda text, question: float(question != SLOW), seconds=slow_third)
    outcome = play(world, calls=60, trainset=three(), **FULL)
    outcome.check_budget()
    assert all(SLOW in questions for questions in shown(outcome))
    assert world.reflected


def test_it_waits_for_no_more_than_that() -> None:
    seconds = {"t 0": 1.0, "t 1": 2.0, "t 2": 10.0, "t 3": 100.0}
    world = World(score=lambda t, q: float(q in ("t 0", "t 1")), seconds=lambda t, q: seconds.get(q, 1.0))
    options = {"speculation": Speculation(rollout=0.5), "reflection_minibatch_size": 4} | FULL
    outcome = play(world, calls=60, trainset=examples("t", 4), **options)
    assert shown(outcome) == {("t 0", "t 1", "t 2")}


def test_where_perfect_scores_are_worth_reflecting_on_it_does_not_wait() -> None:
    world = World(score=lambda text, question: float(question != SLOW), seconds=slow_third)
    outcome = play(world, calls=60, trainset=three(), skip_perfect_score=False, **FULL)
    assert shown(outcome) == {("t 0", "t 1")}


# What the child is compared with


def test_the_child_is_compared_with_the_whole_minibatch_of_its_parent() -> None:
    """On the part that was reflected on every child is better; on the whole it is not."""

    def score(text: str, question: str) -> float:
        seed = text.endswith("seed")
        return float(seed) if question == SLOW else (0.0 if seed else 0.4)

    callbacks = Callbacks()
    world = World(score=score, seconds=slow_third)
    outcome = play(world, calls=80, trainset=three(), gepa_kwargs={"callbacks": [callbacks]}, **FULL)
    outcome.check_budget()
    assert {len(questions) for questions in shown(outcome)} == {2}
    assert outcome.stats.ended["rejected"] > 1
    assert len(outcome.texts) == 1
    assert {event["old_score"] for event in callbacks.of("on_candidate_rejected")} == {1.0}


def test_the_log_has_whole_minibatches_of_both_parent_and_child() -> None:
    world = World(seconds=lambda text, question: 40.0 if int(question.split()[1]) % 3 == 2 else 1.0)
    outcome = play(world, **FULL)
    outcome.check_budget()
    assert min(len(questions) for questions in shown(outcome)) == 2
    tasks = [task for entry in outcome.state.full_program_trace for task in entry.get("tasks", [])]
    screened = [task for task in tasks if "subsample_scores" in task]
    assert len(screened) > 3
    for task in screened:
        questions = [f"t {i}" for i in task["subsample_ids"]]
        assert len(task["subsample_scores"]) == len(task["new_subsample_scores"]) == 3
        candidates = {text for text, _ in world.scored}
        assert task["subsample_scores"] in [[world.score(text, q) for q in questions] for text in candidates]


def test_early_reflection_takes_the_candidates_that_the_whole_minibatch_would_take() -> None:
    outcome = play(**FULL, max_live_tickets=1)
    log = {entry["i"]: entry for entry in outcome.state.full_program_trace}
    committed = {event.ticket for event in outcome.of(TicketClosed) if event.end.kind.value == "committed"}
    assert committed
    for number, entry in log.items():
        if "new_subsample_scores" in entry:
            better = sum(entry["new_subsample_scores"]) > sum(entry["subsample_scores"])
            assert better == (number in committed)


# What becomes of the late ones


def test_late_results_reach_the_cache_and_are_not_paid_twice() -> None:
    world = World(score=lambda text, question: 0.2, seconds=slow_third)
    options = {"valset": None, "gepa_kwargs": {"cache_evaluation": True}} | FULL
    outcome = play(world, calls=60, trainset=three(), **options)
    outcome.check_budget()
    cache = outcome.state.evaluation_cache
    seed = {"step": outcome.texts[0]}
    assert [cache.get(seed, i).score for i in range(3)] == [0.2] * 3
    assert {len(questions) for questions in shown(outcome)} == {2}


def unchanged(world: World) -> World:
    """Reflections that change nothing."""

    async def same(candidate: Any, reflective_dataset: Any, components_to_update: list[str]) -> dict[str, str]:
        return {name: candidate[name] for name in components_to_update}

    world.acall = same  # type: ignore[method-assign]
    return world


def test_late_results_are_known_to_trains_which_do_not_run_their_base_again() -> None:
    world = unchanged(World(score=lambda text, question: 0.5, seconds=slow_third))
    outcome = play(world, calls=60, trainset=three(), staleness=Reflective(batch=2), max_live_tickets=2)
    outcome.check_budget()
    yard = outcome.run._yard
    assert yard is not None
    assert yard.known.of({"step": outcome.texts[0]}) == dict.fromkeys(range(3), 0.5)


@pytest.mark.parametrize("seed", range(4))
def test_late_rollouts_outlive_their_ticket_and_are_counted(seed: int) -> None:
    """Reflections that change nothing end their tickets long before the slow example has finished."""
    world = unchanged(World(seed=seed, score=lambda text, question: 0.5, seconds=slow_third))
    outcome = play(world, calls=90, trainset=three(), staleness=Reflective(batch=4))
    outcome.check_budget()
    closed = {event.ticket: event.seconds for event in outcome.of(TicketClosed)}
    late = [e for e in outcome.of(RolloutFinished) if e.ticket in closed and e.seconds > closed[e.ticket]]
    assert late
    assert outcome.stats.end_reasons["the reflection changed nothing"] > 0
    ticket, head = 9, 12
    assert outcome.stats.metric_calls > 90 - ticket - head, "what the late ones gave back bought further tickets"


def test_a_late_rollout_without_an_answer_fails_its_ticket_and_is_not_scored() -> None:
    world = Failing(score=lambda text, question: 0.2 + 0.1 * (not text.endswith("seed")), seconds=slow_third)
    outcome = play(world, calls=80, trainset=three(), **FULL)
    outcome.check_budget()
    assert shown(outcome) == {("t 0", "t 1")}, "it was reflected on what was there"
    assert outcome.stats.ended["failed"] == outcome.stats.tickets > 0
    assert all("no answer after" in reason for reason in outcome.stats.end_reasons)
    assert not [question for _, question in world.scored if question == SLOW]
    assert len(outcome.texts) == 1


def test_too_few_answers_to_reflect_on_fail_the_ticket_before_it_reflects() -> None:
    class Down(World):
        async def rollout(self, text: str, question: str) -> None:
            await super().rollout(text, question)
            if question in ("t 1", SLOW):
                raise LMRateLimitError("later", model="m")

    outcome = play(Down(score=lambda t, q: 0.0), calls=60, trainset=three(), **FULL)
    outcome.check_budget()
    assert not outcome.world.reflected
    assert outcome.stats.ended["failed"] == outcome.stats.tickets > 0


def test_perfect_scores_beside_one_without_an_answer_are_a_failure_and_not_a_perfect_minibatch() -> None:
    callbacks = Callbacks()
    world = Failing(score=lambda t, q: 1.0 if q.startswith("t") else 0.5, seconds=slow_third)
    outcome = play(world, calls=60, trainset=three(), gepa_kwargs={"callbacks": [callbacks]}, **FULL)
    outcome.check_budget()
    assert outcome.stats.ended["failed"] == outcome.stats.tickets > 0
    assert not callbacks.of("on_evaluation_skipped")


def test_an_answer_that_is_refused_for_good_ends_the_run_from_the_background_too() -> None:
    world = Failing(score=lambda t, q: 0.5 * (not t.endswith("seed")), seconds=slow_third)
    world.error = LMAuthError("the key was revoked", model="m")
    callbacks = Callbacks()
    outcome = play(
        world, 90, RunAbortedError, trainset=three(), gepa_kwargs={"callbacks": [callbacks]}, max_live_tickets=2, **FULL
    )
    assert "the key was revoked" in str(outcome.error)
    outcome.check_budget(ended=False)
    assert isinstance(outcome.error, RunAbortedError)
    best: Any = outcome.error.best_program
    assert best.detailed_results.total_metric_calls == len(world.scored)
    assert best.async_stats.metric_calls == len(world.scored)
    iterations = [{e["iteration"] for e in callbacks.of(name)} for name in ("on_iteration_start", "on_iteration_end")]
    assert iterations[0] == iterations[1]
    assert [str(event["exception"]) for event in callbacks.of("on_error")] == [str(outcome.error)]


@pytest.mark.parametrize("seconds", [2.0, 50.0, 105.0, 400.0])
def test_a_run_that_is_cancelled_leaves_no_late_work_behind(seconds: float) -> None:
    world = World(score=lambda t, q: 0.3, seconds=slow_third)
    outcome = play(world, 500, asyncio.CancelledError, trainset=three(), cancelled_after=seconds, **FULL)
    assert outcome.error is not None
    outcome.check_budget(ended=False)


@pytest.mark.parametrize("seconds", [3, 30, 150])
def test_a_run_whose_time_is_over_waits_for_late_rollouts(seconds: int) -> None:
    world = World(score=lambda t, q: 0.3, seconds=slow_third)
    outcome = play(world, 5000, trainset=three(), max_seconds=seconds, **FULL)
    outcome.check_budget()
    assert outcome.stats.stop_reason == f"max_seconds={seconds} is over"
    begun = {event.ticket for event in outcome.of(TicketClosed)}
    paid = [question for text, question in world.scored if question == SLOW]
    assert len(begun) > 0
    assert paid


def test_a_part_and_the_whole_are_told_to_callbacks_as_one_evaluation() -> None:
    callbacks = Callbacks()
    outcome = play(gepa_kwargs={"callbacks": [callbacks]}, **FULL)
    starts = [e["iteration"] for e in callbacks.of("on_evaluation_start")]
    ends = [e["iteration"] for e in callbacks.of("on_evaluation_end")]
    assert sorted(starts) == sorted(ends)
    parents = [len(e["scores"]) for e in callbacks.of("on_evaluation_end") if e["candidate_idx"] is not None]
    assert set(parents) == {2, 3}
    assert outcome.stats.tickets == len({*starts})
    totals = [e["metric_calls_used"] for e in callbacks.of("on_budget_updated")]
    assert totals == sorted(totals)
    assert totals[-1] == len(outcome.world.scored)


# The rest of a minibatch


def test_whoever_asks_for_the_rest_gets_it_however_late() -> None:
    async def main() -> list[Any]:
        late, batch = LateRollouts(), as_batch([])[0]
        got: list[Any] = []

        async def ask() -> None:
            got.append(await late.complete())

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await asyncio.sleep(5)
            late.end(batch, None)
        return [*got, await late.complete(), batch]

    first, second, batch = run(main)
    assert first is second is batch


def test_the_rest_without_an_answer_says_so_to_everybody() -> None:
    async def main() -> None:
        late = LateRollouts()
        late.end(None, RolloutUnresolvedError("no answer"))
        for _ in range(2):
            with pytest.raises(RolloutUnresolvedError, match="no answer"):
                await late.complete()

    run(main)
