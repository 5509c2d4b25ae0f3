"""Giving up an evaluation whose outcome is known: the same decisions, fewer calls, and nothing is kept of it."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from typing import Any

import dspy
import pytest
from dspy_flashevolve.gepa.gates import Gate, passes_screen
from gepa.strategies.acceptance import ImprovementOrEqualAcceptance, StrictImprovementAcceptance
from gepa.strategies.proposal_sampling import IndependentSampling
from gepa.utils import MaxCandidateProposalsStopper
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve import AsyncGEPA, Reflective
from dspy_flashevolve.engine.events import HeadLanded, TicketClosed
from dspy_flashevolve.gepa import gates, stages, train_screen
from dspy_flashevolve.programs.program import DspyProgram
from tests.gepa.worlds import TRAIN, VAL, Callbacks, Outcome, World, chance, play

SCORES = st.lists(st.sampled_from([-1.0, 0.0, 0.1, 0.2, 1 / 3, 0.5, 0.7, 1.0]), min_size=1, max_size=9)
CRITERIA = st.sampled_from([StrictImprovementAcceptance(), ImprovementOrEqualAcceptance()])


# The gate


@given(SCORES, SCORES, CRITERIA, st.randoms(use_true_random=False), st.integers(0, 9))
def test_a_gate_closes_only_on_what_the_criterion_refuses_whatever_the_order_of_arrival(
    before: list[float], after: list[float], criterion: Any, shuffler: random.Random, known_after: int
) -> None:
    known: list[float | None] = [None]
    gate = Gate(len(after), passes_screen(criterion, lambda: known[0]), lambda: 1.0)
    accepted = sum(after) > sum(before) or (
        isinstance(criterion, ImprovementOrEqualAcceptance) and sum(after) == sum(before)
    )
    order = list(range(len(after)))
    shuffler.shuffle(order)
    for count, index in enumerate(order):
        if count == known_after:  # the parent's sum may come late
            known[0] = sum(before)
        goes_on = gate(index, after[index])
        assert goes_on == (not gate.closed)
        if accepted or known[0] is None:
            assert goes_on
    if known[0] is not None:
        assert gate.closed == (not accepted), "when everything is there it says what the criterion says"
    assert gate.seen == after


def test_a_gate_closes_at_the_first_score_that_decides() -> None:
    gate = Gate(4, passes_screen(StrictImprovementAcceptance(), lambda: 2.5), lambda: 1.0)
    assert gate(2, 0.5)
    assert gate(0, 1.0)
    assert not gate(3, 0.0)
    assert gate.seen == [1.0, 0.5, 0.0]
    assert not gate(1, 1.0), "closed is closed"


def test_without_a_highest_score_a_gate_stays_open() -> None:
    gate = Gate(2, passes_screen(StrictImprovementAcceptance(), lambda: 2.0), lambda: math.inf)
    assert gate(0, -5.0)


class Strict(StrictImprovementAcceptance):
    """A user's criterion: it may look at anything."""


class Generous:
    """Takes whatever it sees."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def should_accept(self, proposal: Any, state: Any) -> bool:
        self.asked.append(proposal)
        return True


# Runs with it and without it


def twice(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Outcome, Outcome]:
    """The same tickets, one after the other, with gates and without."""
    outcomes = []
    for gated in (True, False):
        with monkeypatch.context() as patch:
            if not gated:
                for module in (stages, train_screen):
                    patch.setattr(module, "rejects_by_sum", lambda parts: False)
            gepa_kwargs = {"stop_callbacks": MaxCandidateProposalsStopper(40)} | options.get("gepa_kwargs", {})
            settings = {"calls": None, "max_full_evals": 100, "max_live_tickets": 1, "speculation": None}
            outcomes.append(play(World(seed=3), **(settings | options | {"gepa_kwargs": gepa_kwargs})))
        outcomes[-1].check_budget()
    return outcomes[0], outcomes[1]


def decisions(outcome: Outcome) -> Any:
    ended = [(event.ticket, event.end.kind.value) for event in outcome.of(TicketClosed)]
    heads = [(event.members, event.passed) for event in outcome.of(HeadLanded)]
    details = outcome.details
    return ended, heads, outcome.texts, details.parents, details.val_subscores


def given_up(outcome: Outcome) -> list[str]:
    return [reason for reason in outcome.stats.end_reasons if "could pass" in reason]


OPTIONS = {
    "full": {"staleness": "full"},
    "equal": {"staleness": "full", "gepa_kwargs": {"acceptance_criterion": "improvement_or_equal"}},
    "several": {"staleness": "full", "gepa_kwargs": {"sampling_strategy": IndependentSampling(3)}},
    "large minibatches": {"staleness": "full", "reflection_minibatch_size": 6},
    "train": {"staleness": Reflective(batch=3, untaken="alone")},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_candidates_are_taken_and_refused_with_fewer_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gated, whole = twice(monkeypatch, **OPTIONS[name])
    assert decisions(gated) == decisions(whole)
    assert len(gated.world.scored) < len(whole.world.scored)
    assert set(gated.world.scored) <= set(whole.world.scored)


def test_it_is_on_without_speculation_and_says_so() -> None:
    callbacks = Callbacks()
    outcome = play(speculation=None, staleness="full", gepa_kwargs={"callbacks": [callbacks]})
    assert given_up(outcome)
    reasons = [event["reason"] for event in callbacks.of("on_candidate_rejected")]
    assert any("it cannot pass its screen any more, after" in reason for reason in reasons)


OFF: dict[str, dict[str, Any]] = {
    "lockstep": {"schedule": "lockstep"},
    "a criterion of the user's": {"gepa_kwargs": {"acceptance_criterion": Strict()}},
    "a score above the perfect one": {
        "world": World(score=lambda t, q: 1.5 if q == "v 0" else float(chance(t, q) < 0.5))
    },
    "no perfect score": {"perfect_score": None, "skip_perfect_score": False},
}


@pytest.mark.parametrize("name", OFF)
def test_it_is_off_where_it_is_not_exact(name: str) -> None:
    options = {"staleness": "full"} | OFF[name]
    world = options.pop("world", None) or World()
    callbacks = Callbacks()
    options["gepa_kwargs"] = {"callbacks": [callbacks]} | options.get("gepa_kwargs", {})
    outcome = play(world, max_live_tickets=1, **options)
    outcome.check_budget()
    assert not given_up(outcome)
    screened = [event["batch_size"] for event in callbacks.of("on_evaluation_start") if event["candidate_idx"] is None]
    ended = [len(event["scores"]) for event in callbacks.of("on_evaluation_end") if event["candidate_idx"] is None]
    assert ended == screened
    assert len(ended) > 5


def test_a_selection_strategy_of_the_users_may_take_what_the_criterion_refuses() -> None:
    class All:
        def select(self, proposals: list[Any], state: Any, acceptance_criterion: Any) -> list[Any]:
            return proposals

    outcome = play(staleness="full", gepa_kwargs={"selection_strategy": All()}, max_live_tickets=1)
    assert not given_up(outcome)
    assert not [reason for reason in outcome.stats.end_reasons if "screen" in reason]


@pytest.mark.parametrize("staleness", [Reflective(batch=3), Reflective(batch=1, min_gap=0)], ids=["train", "patch"])
def test_a_criterion_of_the_users_decides_on_trains_that_are_worse_than_their_base(staleness: Any) -> None:
    criterion = Generous()
    world = World(score=lambda text, question: chance(text, question))
    outcome = play(world, staleness=staleness, gepa_kwargs={"acceptance_criterion": criterion})
    asked = [one for one in criterion.asked if one.tag in ("train", "patch")]
    worse = [one for one in asked if sum(one.subsample_scores_after) < sum(one.subsample_scores_before)]
    assert worse, "none was worse: this run shows nothing"
    assert len(asked) >= len(outcome.of(HeadLanded))
    assert not [reason for reason in outcome.stats.end_reasons if "its screen" in reason]


def test_nothing_of_a_child_that_was_given_up_is_kept() -> None:
    callbacks = Callbacks()
    outcome = play(staleness="full", valset=None, gepa_kwargs={"callbacks": [callbacks], "cache_evaluation": True})
    outcome.check_budget()
    proposed = {e["iteration"]: e["new_instructions"]["step"] for e in callbacks.of("on_proposal_end")}
    rejected = [e for e in callbacks.of("on_candidate_rejected") if "cannot pass" in e["reason"]]
    texts = {proposed[event["iteration"]] for event in rejected} - set(outcome.texts)
    run = {text: [q for one, q in outcome.world.scored if one == text] for text in texts}
    assert any(0 < len(questions) < 3 for questions in run.values())
    cache = outcome.state.evaluation_cache
    assert cache is not None
    for text in texts:
        known = [i for i in range(len(TRAIN)) if cache.get({"step": text}, i) is not None]
        assert not known or len(run[text]) >= 3, "another ticket may have screened the same text to its end"
    for entry in outcome.state.full_program_trace:
        for task in entry.get("tasks", []):
            if "new_subsample_scores" in task:
                assert len(task["new_subsample_scores"]) == len(task["subsample_ids"])
                assert len(task["subsample_scores"]) == len(task["subsample_ids"])
    for event in rejected:
        assert event["iteration"] - 1 not in {
            e["i"] for e in outcome.state.full_program_trace if "new_subsample_scores" in e
        }


def test_what_is_said_of_a_child_that_was_given_up_compares_with_its_whole_parent() -> None:
    callbacks = Callbacks()
    world = World(seconds=lambda text, question: 30.0 if question in ("t 0", "t 1", "t 2") else 1.0)
    world.score = lambda text, question: chance(text, question)
    outcome = play(world, staleness="full", gepa_kwargs={"callbacks": [callbacks]})
    log = {entry["i"] + 1: entry for entry in outcome.state.full_program_trace}
    parents = {event["iteration"]: event["parent_candidate"]["step"] for event in callbacks.of("on_proposal_start")}
    rejected = [event for event in callbacks.of("on_candidate_rejected") if "cannot pass" in event["reason"]]
    assert rejected
    for event in rejected:
        questions = [f"t {i}" for i in log[event["iteration"]]["subsample_ids"]]
        assert event["old_score"] == sum(world.score(parents[event["iteration"]], q) for q in questions)


def test_a_run_that_goes_on_knows_that_scores_were_above_the_perfect_one(tmp_path: Any) -> None:
    world = World(score=lambda text, question: 1.25 if question == "v 0" else chance(text, question))
    play(world, calls=60, staleness="full", log_dir=str(tmp_path))
    outcome = play(World(score=world.score), calls=200, staleness="full", log_dir=str(tmp_path))
    assert not given_up(outcome)
    assert outcome.run._evaluations.highest == math.inf


def test_gates_know_only_gepas_own_parts() -> None:
    assert {one.__name__ for one in gates.SELECTIONS} == {"AllImprovements", "BestImprovement", "TopKImprovements"}
    assert len(VAL) == 12


def test_a_metric_that_has_begun_is_counted_where_its_rollout_is_given_up() -> None:
    world = World()

    def judged(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        async def later() -> Any:
            await asyncio.sleep(1.0)
            return result

        result = world.metric(gold, pred, trace, pred_name, pred_trace)
        return later() if pred_name is None else result

    outcome = play(world, staleness="full", metric=judged)
    outcome.check_budget()
    assert given_up(outcome)


def test_programs_that_run_in_threads_never_hold_more_than_the_slots() -> None:
    """A thread cannot be called back: what has begun goes on, and keeps its slot; what has not is given up."""
    live, most, lock, world = 0, 0, threading.Lock(), World(reflection_seconds=0.0)

    class Program(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = dspy.Predict(dspy.Signature("question -> answer", "0.3 seed"))

        def forward(self, question: str) -> dspy.Prediction:
            nonlocal live, most
            text = self.step.signature.instructions
            with lock:
                live += 1
                most = max(most, live)
            released.wait(0.002 + 0.03 * chance(question, text))  # never set: a rollout takes real time
            with lock:
                live -= 1
            prediction = dspy.Prediction(answer=str(world.score(text, question)), text=text)
            dspy.settings.trace.append((self.step, {"question": question}, prediction))
            return prediction

    released = threading.Event()
    optimizer = AsyncGEPA(
        world.metric,
        max_metric_calls=300,
        num_threads=3,
        reflection_minibatch_size=9,
        instruction_proposer=world,
        staleness="full",
        track_stats=True,
        use_merge=False,
    )
    with dspy.context(lm=None):
        stats: Any = optimizer.compile(Program(), trainset=TRAIN, valset=VAL).async_stats
    assert most <= 3
    assert stats.metric_calls == len(world.scored) <= 300


def test_what_cannot_be_interrupted_is_finished_and_paid_and_what_has_not_begun_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DspyProgram, "interruptible", property(lambda program: False))
    begun: list[tuple[str, str]] = []

    class Counted(World):
        async def rollout(self, text: str, question: str) -> None:
            begun.append((text, question))
            await super().rollout(text, question)

    outcome = play(Counted(), staleness="full", num_threads=2, reflection_minibatch_size=6)
    outcome.check_budget()
    assert given_up(outcome)
    assert sorted(begun) == sorted(outcome.world.scored)
