"""Candidates that may be selected before their validation has confirmed them: when, and what becomes of them."""

from __future__ import annotations

import asyncio
from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import LMAuthError, LMRateLimitError
from gepa.core.state import GEPAState
from gepa.strategies.proposal_sampling import IndependentSampling

from dspy_flashevolve import Full, Guarded, Reflective, RunAbortedError, Speculation
from dspy_flashevolve.engine.events import (
    Committed,
    Event,
    Looked,
    RolloutFinished,
    Speculated,
    SpeculationEnded,
    TicketClosed,
)
from dspy_flashevolve.engine.staleness import Admit, Discard
from tests.gepa.worlds import VAL, Callbacks, Outcome, World, chance, play, quality

POLICIES: dict[str, Any] = {
    "full": "full",
    "guarded": "guarded",
    "patch": "patch",
    "train": "reflective",
    "train of screened": Reflective(batch=4, take="screened", untaken="alone", frontier_share=0.5),
    "train, children alone": Reflective(batch=3, untaken="alone", frontier_share=0.5),
}
EAGER = Speculation(rollout=0.34, screen=0.34, validate=0.2, rounds=1, racing=0.1)


class Slow(World):
    """Validations take much longer than screens, so that others start from what is not confirmed; steps are small."""

    def __init__(self, **options: Any) -> None:
        own = {"seconds": self.long_validations, "score": self.nearly_quality, "improved": self.small_step}
        super().__init__(**(own | {"reflection_seconds": 1.0} | options))

    @staticmethod
    def nearly_quality(text: str, question: str) -> float:
        return quality(text) * (0.9 + 0.1 * chance(text, question))

    @staticmethod
    def small_step(parent: float, draw: float) -> float:
        return min(0.99, max(0.0, parent + 0.1 * draw - 0.04))

    @staticmethod
    def long_validations(text: str, question: str) -> float:
        return (20 + 200 * chance(text, question)) if question.startswith("v") else 1.0


class Promising(Slow):
    """The children of the seed are perfect on the first examples that they are validated on, and nothing after."""

    def __init__(self, promised: int = 3, **options: Any) -> None:
        super().__init__(score=self.promise, **options)
        self.promised = promised
        self.begun: dict[str, list[str]] = {}

    async def rollout(self, text: str, question: str) -> None:
        if question.startswith("v"):
            self.begun.setdefault(text, []).append(question)
        await super().rollout(text, question)

    def promise(self, text: str, question: str) -> float:
        if text.endswith("seed"):
            return 0.3
        parent = self.children.get(text, "")
        if not question.startswith("v"):
            return min(0.9, 0.4 + 0.2 * len(self.ancestors(text)))
        if not parent.endswith("seed"):
            return 0.5
        return float(question in self.begun[text][: self.promised])

    def ancestors(self, text: str) -> list[str]:
        found = []
        while text in self.children:
            text = self.children[text]
            found.append(text)
        return found


def ended(outcome: Outcome) -> dict[int, SpeculationEnded]:
    return {event.key: event for event in outcome.of(SpeculationEnded)}


def selected_early(outcome: Outcome, callbacks: Callbacks) -> list[str]:
    """Texts that were selected while gepa's pool did not hold them."""
    return [text for text, known in callbacks.selected if text not in known]


class Selections(Callbacks):
    """Also keeps what the pool held at each selection."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None
        self.selected: list[tuple[str, list[str]]] = []

    def on_iteration_start(self, event: Any) -> None:
        self.state = event["state"]

    def on_candidate_selected(self, event: Any) -> None:
        known = [candidate["step"] for candidate in self.state.program_candidates]
        self.selected.append((event["candidate"]["step"], known))


# Selection before confirmation


def early(world: World | None = None, **options: Any) -> tuple[Outcome, list[str]]:
    callbacks = Selections()
    settings: dict[str, Any] = {"calls": 1500, "max_live_tickets": 24, "num_threads": 48, "staleness": "full"}
    settings |= {"candidate_selection_strategy": "current_best", "speculation": Speculation(validate=0.25)}
    settings |= {"slot_order": "deepest"}  # validations one after the other: children are made from those under way
    gepa_kwargs = {"callbacks": [callbacks]} | options.pop("gepa_kwargs", {})
    outcome = play(world or Slow(), **(settings | options | {"gepa_kwargs": gepa_kwargs}))
    return outcome, selected_early(outcome, callbacks)


def test_an_ordinary_child_is_selected_before_its_validation_is_done() -> None:
    outcome, texts = early()
    outcome.check_budget()
    assert texts
    assert outcome.of(Speculated)
    by_key = {event.key: event for event in outcome.of(Speculated)}
    assert set(ended(outcome)) == set(by_key), "each one ends once"
    assert len(outcome.of(SpeculationEnded)) == len(by_key)
    for key, end in ended(outcome).items():
        assert end.seconds >= by_key[key].seconds
        assert by_key[key].score > by_key[key].best


def nearest_confirmed(outcome: Outcome, index: int) -> int:
    """The nearest true ancestor that stood in the pool when candidate ``index`` came in."""
    text = outcome.texts[index]
    while True:
        text = outcome.world.children[text]
        if text in outcome.texts[:index]:
            return outcome.texts.index(text)


@pytest.mark.parametrize("seed", range(5))
def test_descendants_of_speculative_candidates_get_their_true_parents(seed: int) -> None:
    outcome, texts = early(Slow(seed=seed), speculation=Speculation(validate=0.1))
    assert len(set(outcome.texts)) == len(outcome.texts)
    for index in range(1, len(outcome.texts)):
        assert outcome.details.parents[index] == [nearest_confirmed(outcome, index)]
    later = [text for text in outcome.texts if outcome.world.children.get(text) in texts]
    assert later, "no descendant of one that was selected early was committed: this run shows nothing"
    generations = {event.candidate: event.generation for event in outcome.of(Committed)}
    for index, generation in generations.items():
        parents = outcome.details.parents[index]
        assert generation == 1 + max(generations.get(parent, 0) for parent in parents)


NEVER: list[dict[str, Any]] = [
    {"speculation": None},
    {"schedule": "lockstep", "max_live_tickets": None},
    {"speculation": Speculation(validate=1)},
]


@pytest.mark.parametrize("options", NEVER, ids=str)
def test_without_speculation_nothing_is_selected_before_it_is_confirmed(options: dict[str, Any]) -> None:
    outcome, texts = early(**options)
    outcome.check_budget()
    assert not texts
    assert not outcome.of(Speculated, SpeculationEnded)
    assert "prefix" not in {event.stage for event in outcome.of(RolloutFinished)}
    assert len(outcome.texts) > 2


def test_selectors_of_the_users_see_the_candidates_that_wait() -> None:
    seen: list[tuple[int, list[int]]] = []

    class Newest:
        def select_candidate_idx(self, state: Any) -> int:
            assert state.is_consistent()
            coverage = [len(scores) for scores in state.prog_candidate_val_subscores]
            seen.append((len(state.program_candidates), coverage))
            return len(state.program_candidates) - 1

    outcome, texts = early(candidate_selection_strategy=Newest())
    assert texts
    assert any(coverage[-1] < len(VAL) for _, coverage in seen), "scores of a prefix"
    for _, coverage in seen:
        confirmed = coverage.count(len(VAL))
        assert coverage[:confirmed] == [len(VAL)] * confirmed, "they stand behind the confirmed ones"
    assert all(len(scores) == len(VAL) for scores in outcome.state.prog_candidate_val_subscores)


def test_strategies_that_take_several_parents_at_once_see_them_too() -> None:
    outcome, texts = early(gepa_kwargs={"sampling_strategy": IndependentSampling(3)})
    outcome.check_budget()
    assert texts


# GEPA's own state


@pytest.mark.parametrize("name", POLICIES)
def test_gepas_state_only_ever_holds_confirmed_candidates_and_its_checkpoint_is_read_by_gepa(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspy_flashevolve.compilation.CHECKPOINT_SECONDS", 0.0)
    held: list[int] = []
    runs: list[Any] = []

    class Look:
        def on_state_saved(self, event: Any) -> None:
            state: Any = GEPAState.load(str(tmp_path))
            assert state.is_consistent()
            assert all(len(scores) == len(VAL) for scores in state.prog_candidate_val_subscores)
            held.append(len(state.program_candidates))

        def on_iteration_start(self, event: Any) -> None:
            state = event["state"]
            runs.append(state)
            assert state.is_consistent()
            if state.prog_candidate_val_subscores[0]:
                assert all(len(scores) == len(VAL) for scores in state.prog_candidate_val_subscores)

    outcome = play(
        Slow(),
        700,
        staleness=POLICIES[name],
        log_dir=str(tmp_path),
        gepa_kwargs={"callbacks": [Look()]},
        num_threads=48,
    )
    outcome.check_budget()
    assert len({id(state) for state in runs}) == 1, "callbacks may hold it"
    assert held == sorted(held)
    assert held
    assert len(outcome.texts) > 1
    loaded: Any = GEPAState.load(str(tmp_path))
    assert [one["step"] for one in loaded.program_candidates] == outcome.texts
    if outcome.of(Speculated):
        first = min(event.seconds for event in outcome.of(Speculated))
        assert first < max(event.seconds for event in outcome.of(Committed))


# Orphans


ORPHANS: dict[str, tuple[Any, str]] = {
    "full": (Full(), "admit"),
    "guarded": (Guarded(100), "discard"),
    "reflective": (Reflective(batch=1, min_gap=100), "integrate"),
}


@pytest.mark.parametrize("name", ORPHANS)
def test_what_becomes_of_a_child_whose_parent_fell_behind_is_the_policys_word(name: str) -> None:
    policy, decision = ORPHANS[name]
    world = Promising(reflection_seconds=400.0)
    outcome, texts = early(world, staleness=policy, calls=600)
    outcome.check_budget()
    behind = [event for event in outcome.of(SpeculationEnded) if event.end == "fell behind"]
    assert behind, "nothing fell behind: this run shows nothing"
    assert texts
    for event in behind:
        assert outcome.details.val_aggregate_scores[event.candidate] == pytest.approx(0.25)
        assert event.score == pytest.approx(0.25)
    looked = [event for event in outcome.of(Looked) if event.place == "after_screen"]
    assert decision in {event.decision for event in looked}
    if name == "full":
        assert {event.decision for event in looked} == {"admit"}
        orphans = [text for text in outcome.texts if world.children.get(text) in texts]
        assert orphans, "they are in the pool"
    if name == "guarded":
        reasons = {event.reason for event in looked if event.decision == "discard"}
        assert reasons == {"its parent was speculative and did not last"}
    if name == "reflective":
        assert outcome.stats.integrations


def test_one_that_fell_behind_is_in_the_pool_with_its_whole_score_and_its_children_have_it_as_a_parent() -> None:
    world = Promising(reflection_seconds=400.0)
    outcome, _ = early(world, calls=600)
    fallen = {event.candidate for event in outcome.of(SpeculationEnded) if event.end == "fell behind"}
    assert fallen
    assert any(parents[0] in fallen for parents in outcome.details.parents[1:])
    for index in range(1, len(outcome.texts)):
        assert outcome.details.parents[index] == [nearest_confirmed(outcome, index)]


# What is removed


def test_a_policy_that_turns_a_child_away_at_the_pools_door_takes_it_back_from_selection() -> None:
    class Doorkeeper:
        looks = ("before_commit",)

        def decide(self, look: Any, history: Any) -> Any:
            return Discard("not today") if history.discarded < 12 else Admit()

    outcome, _ = early(staleness=Doorkeeper())
    outcome.check_budget()
    removed = [event for event in outcome.of(SpeculationEnded) if event.end.startswith("removed")]
    assert {event.end for event in removed} <= {"removed: not today"}
    assert removed
    assert len(outcome.run.pool.speculative) == 0


def test_a_validation_without_an_answer_takes_the_candidate_back() -> None:
    class Deaf(Slow):
        async def rollout(self, text: str, question: str) -> None:
            await super().rollout(text, question)
            if question.startswith("v") and not text.endswith("seed") and chance("deaf", text, question) < 0.06:
                raise LMRateLimitError("later", model="m")

    outcome, _ = early(Deaf())
    outcome.check_budget()
    removed = [event for event in outcome.of(SpeculationEnded) if event.end.startswith("removed: no answer")]
    assert removed
    assert outcome.stats.ended["failed"] > 0
    assert all(len(scores) == len(VAL) for scores in outcome.state.prog_candidate_val_subscores)
    assert {event.key for event in outcome.of(Speculated)} == set(ended(outcome))


# The budget


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("speculation", [Speculation(), Speculation(validate=0.25), EAGER], ids=str)
def test_the_budget_is_kept_and_spent_with_every_policy(name: str, speculation: Any) -> None:
    for seed, calls in ((0, 61), (1, 250)):
        outcome = play(World(seed=seed), calls, staleness=POLICIES[name], speculation=speculation)
        outcome.check_budget()
        assert outcome.stats.metric_calls == len(outcome.world.scored)
        assert sum(outcome.stats.ended.values()) == outcome.stats.tickets
        assert outcome.stats.ended["cancelled"] == outcome.stats.ended["failed"] == 0
        assert len(outcome.run.pool.speculative) == 0
        assert outcome.details.total_metric_calls == len(outcome.world.scored)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seconds", [3, 25, 90])
def test_a_run_that_is_stopped_by_time_drains_with_its_budget_in_order(name: str, seconds: int) -> None:
    outcome = play(Slow(), 5000, staleness=POLICIES[name], speculation=EAGER, max_seconds=seconds)
    outcome.check_budget()
    assert outcome.stats.stop_reason == f"max_seconds={seconds} is over"
    assert len(outcome.run.pool.speculative) == 0


class Revoked(Slow):
    """The provider refuses for good after so many rollouts."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    async def rollout(self, text: str, question: str) -> None:
        self.left -= 1
        refused = self.left < 0
        await super().rollout(text, question)
        if refused:
            raise LMAuthError("revoked", model="m")


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("after", [5, 40, 110])
def test_a_run_that_is_aborted_counts_what_it_has_paid_and_keeps_what_it_has(name: str, after: int) -> None:
    outcome = play(Revoked(after), 800, RunAbortedError, staleness=POLICIES[name], speculation=EAGER)
    assert isinstance(outcome.error, RunAbortedError)
    outcome.check_budget(ended=False)
    if outcome.run.pool.seed_confirmed:
        best: Any = outcome.error.best_program
        assert best.async_stats.metric_calls == len(outcome.world.scored)
        assert all(len(scores) == len(VAL) for scores in outcome.state.prog_candidate_val_subscores)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seconds", [2.0, 45.0, 133.7])
def test_a_run_that_is_cancelled_counts_what_it_has_paid(name: str, seconds: float) -> None:
    outcome = play(Slow(), 3000, asyncio.CancelledError, staleness=POLICIES[name], cancelled_after=seconds)
    assert outcome.error is not None
    outcome.check_budget(ended=False)


def test_what_an_interrupted_run_has_paid_is_in_its_checkpoint(tmp_path: Any) -> None:
    outcome = play(Slow(), 3000, asyncio.CancelledError, staleness="full", cancelled_after=250.0, log_dir=str(tmp_path))
    state: Any = GEPAState.load(str(tmp_path))
    assert state.total_num_evals == len(outcome.world.scored)
    assert all(len(scores) == len(VAL) for scores in state.prog_candidate_val_subscores)


# The same scores in any order


class Half:
    """Validates on every other example."""

    def get_eval_batch(self, loader: Any, state: Any, target_program_idx: Any = None) -> list[Any]:
        return list(loader.all_ids())[::2]

    def get_best_program(self, state: Any) -> int:
        return max(range(len(state.program_candidates)), key=lambda i: self.get_valset_score(i, state))

    def get_valset_score(self, program_idx: int, state: Any) -> float:
        scores = state.prog_candidate_val_subscores[program_idx]
        halves = [scores[i] for i in list(scores)[:6]]
        return sum(halves) / len(halves)


FRACTIONS = World(score=lambda text, question: quality(text) * (0.3 + 0.7 * chance(text, question)))


@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("name", POLICIES)
def test_the_order_of_a_validation_does_not_change_a_confirmed_score(name: str, part: bool) -> None:
    world = Slow(score=FRACTIONS.score)
    gepa_kwargs = {"val_evaluation_policy": Half()} if part else {}
    outcome = play(world, 500, staleness=POLICIES[name], gepa_kwargs=gepa_kwargs, num_threads=32)
    outcome.check_budget()
    assert len(outcome.texts) > 1
    wanted = list(range(0, len(VAL), 2 if part else 1))
    for index, text in enumerate(outcome.texts):
        ids = list(range(len(VAL))) if index == 0 else wanted
        there = {i: world.score(text, f"v {i}") for i in ids}
        known = outcome.state.prog_candidate_val_subscores[index]
        assert known == there
        assert list(known) == ids, "not even in the order of the sum"
        assert outcome.state.program_full_scores_val_set[index] == sum(there.values()) / len(ids)
    orders = {tuple(range(12))} | {
        tuple(q for t, q in world.scored if t == text and q.startswith("v")) for text in outcome.texts[1:]
    }
    assert len(orders) > 1


def test_a_cache_that_knows_some_of_the_examples_changes_no_score() -> None:
    gepa_kwargs = {"cache_evaluation": True}
    world = Slow(score=FRACTIONS.score)
    outcome = play(world, 400, staleness="full", use_merge=True, gepa_kwargs=gepa_kwargs, valset=None)
    outcome.check_budget()
    assert len(outcome.texts) > 2
    for index, text in enumerate(outcome.texts):
        known = outcome.state.prog_candidate_val_subscores[index]
        assert known == {i: world.score(text, f"t {i}") for i in range(9)}


# Several objectives


def objectives(world: World, told: Any) -> Any:
    """A metric that tells of objectives only where ``told`` says so."""

    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        result = world.metric(gold, pred, trace, pred_name, pred_trace)
        if told(pred.text, gold.question):
            return dspy.Prediction(**dict(result), objective_scores={"one": result.score, "two": 0.5})
        return result

    return metric


@pytest.mark.parametrize("frontier", ["instance", "objective", "hybrid", "cartesian"])
@pytest.mark.parametrize("name", ["full", "train"])
def test_examples_without_objectives_do_not_end_the_run(name: str, frontier: str) -> None:
    for told in (
        lambda text, question: question in ("v 0", "v 1"),
        lambda text, question: text.endswith("seed") or question == "v 3",
        lambda text, question: question != "v 5",
    ):
        world = Slow()
        outcome = play(
            world,
            300,
            staleness=POLICIES[name],
            metric=objectives(world, told),
            gepa_kwargs={"frontier_type": frontier},
            num_threads=48,
        )
        outcome.check_budget()
        assert len(outcome.texts) > 1


# What is told


def test_speculation_leaves_every_ticket_and_callback_in_pairs() -> None:
    callbacks = Callbacks()
    outcome = play(Slow(), staleness="full", speculation=EAGER, gepa_kwargs={"callbacks": [callbacks]})
    starts = sorted(event["iteration"] for event in callbacks.of("on_evaluation_start"))
    assert starts == sorted(event["iteration"] for event in callbacks.of("on_evaluation_end"))
    accepted = [event["new_candidate_idx"] for event in callbacks.of("on_candidate_accepted")]
    assert accepted == list(range(1, len(outcome.texts)))
    assert [event["parent_ids"] for event in callbacks.of("on_candidate_accepted")] == outcome.details.parents[1:]
    closed: list[Event] = outcome.of(TicketClosed)
    assert len(closed) == outcome.stats.tickets
