"""Giving up an evaluation whose outcome is known: the same decisions, fewer calls, and nothing is kept of it."""

from __future__ import annotations

import random
from typing import Any

import dspy
import pytest
from gepa.strategies.acceptance import ImprovementOrEqualAcceptance, StrictImprovementAcceptance
from gepa.strategies.proposal_sampling import IndependentSampling
from gepa.utils import MaxCandidateProposalsStopper
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve import AsyncGEPA, Reflective, Workflow
from dspy_flashevolve.engine.store import Rollout
from dspy_flashevolve.gepa import evaluate
from dspy_flashevolve.gepa.evaluate import Gate
from dspy_flashevolve.sim.virtual import run
from tests.contract.surface import Heard
from tests.contract.worlds import World, chance, play
from tests.fakes import examples

WHOLE = Workflow(validate=1, live_steps=1)
"""Steps one after the other, and nothing is released early."""

SCORES = st.lists(st.sampled_from([-1.0, 0.0, 0.1, 0.2, 1 / 3, 0.5, 0.7, 1.0]), min_size=1, max_size=9)
CRITERIA = st.sampled_from([StrictImprovementAcceptance(), ImprovementOrEqualAcceptance()])


def scored(score: float) -> Rollout:
    return Rollout(None, score)


# The gate


@given(SCORES, SCORES, CRITERIA, st.randoms(use_true_random=False), st.integers(0, 9))
def test_a_gate_closes_only_on_what_the_criterion_refuses_whatever_the_order_of_arrival(
    before: list[float], after: list[float], criterion: Any, shuffler: random.Random, known_after: int
) -> None:
    known: list[float | None] = [None]
    gate = Gate(len(after), criterion, lambda: known[0], lambda: 1.0)
    accepted = sum(after) > sum(before) or (
        isinstance(criterion, ImprovementOrEqualAcceptance) and sum(after) == sum(before)
    )
    order = list(range(len(after)))
    shuffler.shuffle(order)
    for count, index in enumerate(order):
        if count == known_after:  # the parent's sum may come late
            known[0] = sum(before)
        goes_on = gate(index, scored(after[index]))
        assert goes_on == (not gate.closed)
        if accepted or known[0] is None:
            assert goes_on
    if known[0] is not None:
        assert gate.closed == (not accepted), "when everything is there it says what the criterion says"
    assert gate.seen == after


class Strict(StrictImprovementAcceptance):
    """A user's criterion: it may look at anything."""


# Runs with it and without it


def given_up(program: Any) -> int:
    return sum(n for reason, n in program.async_stats.end_reasons.items() if "could pass" in reason)


def twice(monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[tuple[Any, list[tuple[str, str]]]]:
    """The same steps, one after the other, with gates and without: what was decided, and the metric calls for it."""
    outcomes: list[Any] = []
    for gated in (True, False):
        world, heard = World(seed=3), Heard()
        gepa_kwargs = {"stop_callbacks": MaxCandidateProposalsStopper(25), "callbacks": [heard]}
        settings = {"max_full_evals": 100, "workflow": WHOLE, "use_merge": False} | options
        settings["gepa_kwargs"] = gepa_kwargs | options.get("gepa_kwargs", {})
        with monkeypatch.context() as patch:
            if not gated:
                patch.setattr(evaluate, "rejects_by_sum", lambda parts: False)
            program = play(world, None, **settings)
        details, stats = program.detailed_results, program.async_stats
        texts = [one.steps[0].signature.instructions for one in details.candidates]
        ended = [(event["iteration"], event["proposal_accepted"]) for event in heard.of("on_iteration_end")]
        read = [record.members for record in stats.integrations]
        decided = ended, stats.ended, read, texts, details.parents, details.val_subscores
        assert len(world.scored) == stats.metric_calls
        outcomes.append((decided, world.scored))
    return outcomes


@pytest.mark.parametrize(
    "options",
    [
        {"search": "pareto"},
        {"search": "pareto", "gepa_kwargs": {"acceptance_criterion": "improvement_or_equal"}},
        {"search": "pareto", "gepa_kwargs": {"sampling_strategy": IndependentSampling(3)}},
        {"search": "pareto", "reflection_minibatch_size": 6},
        {"search": "pareto", "staleness": Reflective(min_gap=0)},
    ],
    ids=["full", "equal", "several", "large minibatches", "repaired"],
)
def test_the_same_candidates_are_taken_and_refused_with_fewer_calls(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (gated, fewer), (whole, more) = twice(monkeypatch, **options)
    assert gated == whole
    assert len(fewer) < len(more)
    assert set(fewer) <= set(more)


def above(text: str, question: str) -> float:
    """Scores of which some are above the perfect one."""
    return 1.25 if question == "v 0" else float(chance(text, question) < 0.5)


OFF: dict[str, dict[str, Any]] = {
    "lockstep": {"schedule": "lockstep"},
    "a criterion of the user's": {"gepa_kwargs": {"acceptance_criterion": Strict()}},
    "a score above the perfect one": {"world": World(score=above)},
    "no perfect score": {"perfect_score": None, "skip_perfect_score": False},
}


@pytest.mark.parametrize("name", OFF)
def test_it_is_off_where_it_is_not_exact(name: str) -> None:
    options = {"search": "pareto", "workflow": WHOLE, "world": World(), "gepa_kwargs": {}} | OFF[name]
    heard = Heard()
    options["gepa_kwargs"] = {"callbacks": [heard]} | options["gepa_kwargs"]
    assert not given_up(play(options.pop("world"), **options))
    screened = [event["batch_size"] for event in heard.of("on_evaluation_start") if event["candidate_idx"] is None]
    ended = [len(event["scores"]) for event in heard.of("on_evaluation_end") if event["candidate_idx"] is None]
    assert ended == screened
    assert len(ended) > 5


def test_a_selection_strategy_of_the_users_may_take_what_the_criterion_refuses() -> None:
    class All:
        def select(self, proposals: list[Any], state: Any, acceptance_criterion: Any) -> list[Any]:
            return proposals

    program = play(World(), search="pareto", workflow=WHOLE, gepa_kwargs={"selection_strategy": All()})
    assert not [reason for reason in program.async_stats.end_reasons if "screen" in reason]


def test_nothing_of_a_child_that_was_given_up_is_kept() -> None:
    heard, world, train = Heard(), World(), examples("t", 9)
    optimizer = AsyncGEPA(
        world.metric, max_metric_calls=400, instruction_proposer=world, search="pareto", use_merge=False,
        gepa_kwargs={"callbacks": [heard], "cache_evaluation": True},
    )  # fmt: skip
    with dspy.context(lm=None):
        run(lambda: optimizer.acompile(world.student(), trainset=train))
    [state] = [event["final_state"] for event in heard.of("on_optimization_end")]
    proposed = {e["iteration"]: e["new_instructions"]["steps[0]"] for e in heard.of("on_proposal_end")}
    rejected = [e["iteration"] for e in heard.of("on_candidate_rejected") if "cannot pass" in e["reason"]]
    texts = {proposed[iteration] for iteration in rejected} - {c["steps[0]"] for c in state.program_candidates}
    ran = {text: [question for one, question in world.scored if one == text] for text in texts}
    assert any(0 < len(questions) < 3 for questions in ran.values())
    for text in texts:
        known = [i for i in range(len(train)) if state.evaluation_cache.get({"steps[0]": text}, i) is not None]
        assert not known or len(ran[text]) >= 3, "another step may have screened the same text to its end"
    screened = {entry["i"] + 1 for entry in state.full_program_trace if "new_subsample_scores" in entry}
    assert not screened & set(rejected)
