"""The named staleness policies, on the simulated model and in virtual time: budget, ends, winner, limits, lineage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dspy
import litellm
import pytest
from dspy.utils.exceptions import LMAuthError, LMRateLimitError
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_flashevolve import (
    AsyncGEPA,
    ConfigurationError,
    Full,
    Guarded,
    Reflective,
    RunAbortedError,
    StaleCandidateReflection,
    Workflow,
)
from dspy_flashevolve.sim import HouseRules, ReplyModel
from dspy_flashevolve.sim.virtual import SimulatedModel, run
from tests.contract.surface import check_ends, check_winner, command, facts, journal_of
from tests.contract.worlds import Rules, World, play
from tests.fakes import fake_lm

TRAIN, VAL = 12, 12


def compiled(
    calls: int = 300, predictors: Any = 1, seed: int = 0, reply_model: ReplyModel | None = None, **options: Any
) -> Any:
    """A compiled program; ``scored`` counts what the metric saw, ``model`` has answered everything."""
    name = options.pop("model_name", "simulated")
    task = HouseRules(rules=12, rules_per_example=4, seed=seed, reply_model=reply_model or ReplyModel())
    model = SimulatedModel(seed=seed, reply_model=task.reply_model)
    scored: list[Any] = []

    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        if pred_name is None:
            scored.append(gold)
        return task.metric(gold, pred, trace, pred_name, pred_trace)

    async def compile_it() -> Any:
        settings = {"max_metric_calls": calls, "num_threads": 16, "seed": seed, "track_stats": True} | options
        optimizer = AsyncGEPA(metric, reflection_lm=model.lm(name), **settings)
        with dspy.context(lm=model.lm(name), adapter=None):
            return await optimizer.acompile(
                task.program(predictors), trainset=task.trainset(TRAIN), valset=task.valset(VAL)
            )

    program = run(compile_it)
    program.scored, program.model = len(scored), model
    return program


JOINED = Reflective(batch=12, min_gap=0, changes=False)
"""Every child that passes its screen is integrated, up to twelve at once."""
POLICIES: list[Any] = ["full", "guarded", "patch", "reflective", Guarded(0), Reflective(batch=4), JOINED]


@pytest.mark.parametrize(
    ("staleness", "predictors"), [*((one, 2) for one in POLICIES), ("reflective", 1), (JOINED, 1)], ids=repr
)
def test_the_budget_holds_every_step_ends_and_the_winner_is_fully_validated(staleness: Any, predictors: int) -> None:
    program = compiled(110, predictors, staleness=staleness)
    details, stats = program.detailed_results, program.async_stats
    assert program.scored == stats.metric_calls <= 110
    check_ends(stats)
    assert stats.ended.get("cancelled", 0) == stats.ended.get("failed", 0) == 0
    check_winner(details, VAL)
    assert len({name for name, _ in program.named_predictors()}) == predictors


def test_the_same_run_in_virtual_time_is_the_same_run() -> None:
    assert facts(compiled(150).detailed_results) == facts(compiled(150).detailed_results)


@pytest.mark.parametrize("staleness", ["reflective", JOINED], ids=["changes", "integrations"])
def test_one_candidate_has_what_the_children_of_many_steps_learnt(staleness: Any) -> None:
    program = compiled(400, staleness=staleness)
    stats, details = program.async_stats, program.detailed_results
    assert stats.ended["integrated"] > 0
    assert stats.integration_calls == program.model.requests.get("integration", 0)
    if staleness == JOINED:
        assert max(len(record.members) for record in stats.integrations) > 1
        assert not stats.changes
    else:
        assert len(stats.changes) > 3
        assert not stats.integrations, "what a child adds needs no LM to be put in"
    assert details.val_aggregate_scores[details.best_idx] > details.val_aggregate_scores[0] + 0.3
    for parents in details.parents[1:]:
        assert parents
        assert all(parent is not None and 0 <= parent < len(details.candidates) for parent in parents)


def test_in_equal_time_the_default_makes_a_better_program_than_lockstep() -> None:
    best = {}
    for schedule in ("async", "lockstep"):
        details = compiled(100_000, schedule=schedule, max_seconds=40, num_threads=32).detailed_results
        best[schedule] = max(details.val_aggregate_scores)
    assert best["async"] > best["lockstep"]


@pytest.mark.parametrize("seconds", [5, 45])
def test_a_run_that_is_stopped_by_time_ends_with_everything_settled(seconds: int) -> None:
    stats = compiled(100_000, max_seconds=seconds).async_stats
    check_ends(stats)
    assert stats.stop_reason == f"max_seconds={seconds} is over"
    assert stats.outcome == "finished"


@pytest.mark.parametrize("seconds", [120, 180])
def test_with_little_time_for_a_large_validation_set_the_last_head_is_validated_all_the_same(seconds: int) -> None:
    world = Rules(train=30, val=200)  # a validation takes about forty seconds
    program = play(world, None, max_seconds=seconds)
    stats, details = program.async_stats, program.detailed_results
    check_ends(stats)
    check_winner(details, 200)
    assert len(details.candidates) == 2, "no head was worth a validation before"
    assert max(details.val_aggregate_scores) > details.val_aggregate_scores[0] + 0.2
    assert world.worth(program.steps[0].signature.instructions) > 0.5


def test_after_the_last_validation_no_time_is_spent_on_what_could_not_be_validated() -> None:
    stats = play(Rules(seed=2, train=30, val=200), None, max_seconds=400, skip_perfect_score=False).async_stats
    check_ends(stats)
    assert (stats.outcome, stats.stop_reason) == (
        "finished",
        "max_seconds=400 is nearly over, and the last head is validated",
    )
    assert stats.seconds < 400


class Cached(Rules):
    """A cache answers the seed's validation, as where a program is compiled a second time."""

    def seconds(self, text: str, question: str) -> float:
        return super().seconds(text, question) if "rule" in text else 0.001


@pytest.mark.parametrize(("seconds", "val"), [(60, 300), (90, 400)])
def test_a_seed_that_a_cache_validates_does_not_hide_what_a_validation_takes(seconds: int, val: int) -> None:
    world = Cached(train=30, val=val)
    program = play(world, None, max_seconds=seconds)
    check_ends(program.async_stats)
    check_winner(program.detailed_results, val)
    assert world.worth(program.steps[0].signature.instructions) > 0.5


def test_each_session_of_a_run_that_goes_on_validates_its_last_head_in_time(tmp_path: Path) -> None:
    worth: list[float] = []
    for _ in range(3):
        world = Rules(train=30, val=400)
        program = play(world, None, max_seconds=60, log_dir=str(tmp_path))
        check_winner(program.detailed_results, 400)
        worth.append(world.worth(program.steps[0].signature.instructions))
    assert 0.3 < worth[1] < worth[2], worth


def test_children_that_stand_for_themselves_leave_the_last_head_its_time(tmp_path: Path) -> None:
    runs = [play(Rules(train=30, val=200), None, max_seconds=240).async_stats]
    runs += [play(Rules(train=30, val=200), None, max_seconds=120, log_dir=str(tmp_path)).async_stats for _ in range(3)]
    for stats, most in zip(runs, (240, 120, 120, 120), strict=True):
        check_ends(stats)
        assert stats.seconds < most + 60, "a validation takes about forty seconds"


@pytest.mark.parametrize("calls", [780, 860, 920, 980])
def test_the_last_head_is_paid_where_metric_calls_and_time_end_at_once(calls: int) -> None:
    program = play(Rules(seed=1, train=30, val=200), calls, max_seconds=180)
    stats, details = program.async_stats, program.detailed_results
    check_ends(stats)
    check_winner(details, 200)
    assert stats.metric_calls <= calls
    assert len(details.candidates) == 2, "no head was worth a validation before"
    assert max(details.val_aggregate_scores) > 0.8
    assert stats.seconds < 200


class Hanging(Rules):
    """One answer of a child's validation hangs, once, after half of the time."""

    hung = False

    def seconds(self, text: str, question: str) -> float:
        is_late = asyncio.get_running_loop().time() >= 300  # virtual time begins with the run
        if not self.hung and is_late and question.startswith("v") and "rule" in text:
            self.hung = True
            return 130.0
        return super().seconds(text, question)


def test_one_answer_that_hangs_in_a_validation_does_not_end_the_run_a_fifth_too_early() -> None:
    world = Hanging(train=30, val=20, rules=400, helps=0.002)
    stats = play(world, None, max_seconds=600).async_stats
    check_ends(stats)
    assert world.hung
    assert stats.seconds > 550


class Saying(dspy.Module):
    """A named fake of an integration: says, or raises, one and the same."""

    asked = 0

    def __init__(self, reply: Callable[[dict[str, str], Any], Any]) -> None:
        super().__init__()
        self.reply = reply

    async def aforward(self, head: Any, children: Any, **_: Any) -> Any:
        Saying.asked += 1
        reply = self.reply(head, children)
        if isinstance(reply, Exception):
            raise reply
        return reply


def verdicts(word: str, children: Any) -> list[Any]:
    return [SimpleNamespace(child=one.number, verdict=word, reason="so") for one in children]


def unread() -> dspy.Module:
    """The real module, with an LM that answers beside the point."""
    module = StaleCandidateReflection()
    module.set_lm(fake_lm(lambda prompt: "As a language model I have no opinion."))
    return module


USELESS: dict[str, tuple[Any, str]] = {
    "no format": (unread, "steps[0]: AdapterParseError"),
    "it raises": (lambda: Saying(lambda head, _: ValueError("no idea")), "no idea"),
    "nothing": (lambda: Saying(lambda head, _: None), "AttributeError"),
    "neither text nor verdict": (lambda: Saying(lambda head, _: dspy.Prediction(texts={}, verdicts=[])), "neither"),
    "the head's text, and no verdicts": (
        lambda: Saying(lambda head, _: dspy.Prediction(texts=dict(head), verdicts=[])), ""
    ),
    "the head's text, and verdicts that say otherwise": (
        lambda: Saying(lambda head, found: dspy.Prediction(texts=dict(head), verdicts=verdicts("orthogonal", found))),
        "",
    ),
    "no answer": (lambda: Saying(lambda head, _: LMRateLimitError("slow down", model="simulated")), "slow down"),
}  # fmt: skip
PATCHES = ("no format", "nothing", "the head's text, and no verdicts", "no answer")
"""Of these: what a patch treats in ways of its own."""


@pytest.mark.parametrize(
    ("name", "staleness"),
    [*((name, "reflective") for name in USELESS), *((name, "patch") for name in PATCHES)],
)
def test_no_reply_to_an_integration_costs_more_than_itself(name: str, staleness: str) -> None:
    """Children that are in no text, for no reason that holds, go on as in ``full``: they end by their own scores."""
    module, failed = USELESS[name]
    Saying.asked = 0
    overlap = Workflow(live_steps=4) if staleness == "patch" else Workflow()
    stats = play(World(), 280, staleness=staleness, stale_candidate_reflection=module(), workflow=overlap).async_stats
    check_ends(stats)
    assert all(failed in record.failed and bool(record.failed) == bool(failed) for record in stats.integrations)
    assert stats.integrations, "none was asked for: this run shows nothing"
    assert stats.ended["committed"] > 5
    assert stats.ended["integrated"] == stats.ended["failed"] == 0
    assert not [reason for reason in stats.end_reasons if "integrat" in reason or "head" in reason]


def test_a_provider_that_fails_during_an_integration_costs_no_score() -> None:
    class Limited(dspy.Module):
        async def aforward(self, **_: Any) -> Any:
            raise LMRateLimitError("slow down", model="simulated")

    program = compiled(300, num_threads=32, staleness=JOINED, stale_candidate_reflection=Limited())
    stats = program.async_stats
    check_ends(stats)
    assert program.scored == stats.metric_calls <= 300
    assert min(score for one in program.detailed_results.val_subscores for score in one.values()) >= 0


def test_a_rejected_key_during_an_integration_ends_the_run_with_the_best_so_far() -> None:
    class Rejected(dspy.Module):
        async def aforward(self, **_: Any) -> Any:
            raise LMAuthError("no such key", model="simulated")

    with pytest.raises(RunAbortedError, match="no such key") as raised:
        compiled(400, staleness=JOINED, stale_candidate_reflection=Rejected())
    assert raised.value.best_program is not None


def test_without_an_lm_that_could_integrate_children_are_admitted(caplog: pytest.LogCaptureFixture) -> None:
    task = HouseRules(rules=12, rules_per_example=4)
    model = SimulatedModel()

    def propose(candidate: dict[str, str], reflective_dataset: Any, components_to_update: list[str]) -> dict[str, str]:
        return {name: candidate[name] + "\n" + str(task.all_rules()[len(candidate[name]) % 12]) for name in candidate}

    async def compile_it() -> Any:
        student = task.program()
        student.set_lm(model.lm())
        optimizer = AsyncGEPA(task.metric, max_metric_calls=100, instruction_proposer=propose, track_stats=True)
        with dspy.context(lm=None, adapter=None):
            return await optimizer.acompile(student, trainset=task.trainset(TRAIN), valset=task.valset(VAL))

    stats = run(compile_it).async_stats
    assert stats.ended["committed"] > 0
    assert not stats.integrations
    assert "no LM that could integrate stale candidates" in caplog.text


def test_guarded_discards_what_is_behind_where_it_looks_and_full_discards_nothing() -> None:
    """Another width bounds the gap beforehand, so that there may be nothing to discard."""
    guarded, full = (play(World(), 500, num_threads=64, staleness=one, use_merge=False) for one in (Guarded(0), "full"))
    behind = sum(count for gap, count in guarded.async_stats.gaps["after_screen"].items() if gap > 0)
    assert guarded.async_stats.ended.get("discarded", 0) == behind
    assert full.async_stats.ended.get("discarded", 0) == 0
    assert max(commit.gap for commit in full.async_stats.commits) > 1


def test_lockstep_knows_no_staleness() -> None:
    stats = compiled(200, schedule="lockstep").async_stats
    assert stats.integration_calls == 0
    assert set(stats.gaps["before_commit"]) <= {0}


# Limits on reflection and on dollars


@pytest.mark.parametrize("staleness", ["full", "reflective"])
def test_reflection_calls_are_limited(staleness: str) -> None:
    stats = compiled(2000, staleness=staleness, max_reflection_calls=10, num_threads=1).async_stats
    assert stats.stop_reason == "max_reflection_calls=10 is spent"
    assert 10 <= stats.reflection_calls <= 10 + stats.slots + 20, "what ran was finished"
    lockstep = compiled(2000, max_reflection_calls=10, schedule="lockstep").async_stats
    assert lockstep.reflection_calls in (10, 11), "the last step finishes"


def test_dollars_are_limited_where_prices_are_known() -> None:
    price = {"input_cost_per_token": 1e-6, "output_cost_per_token": 2e-6, "litellm_provider": "openai", "mode": "chat"}
    litellm.register_model({"priced": price})
    stats = compiled(2000, max_cost=0.05, schedule="lockstep", model_name="priced").async_stats
    assert 0.05 <= stats.cost_dollars < 0.15
    assert stats.stop_reason == "max_cost=0.05 dollars is spent"


def test_a_limit_in_dollars_without_a_price_is_refused_before_any_call() -> None:
    task = HouseRules()
    model = SimulatedModel()
    optimizer = AsyncGEPA(task.metric, auto="light", reflection_lm=model.lm(), max_cost=1.0)
    with dspy.context(lm=model.lm()), pytest.raises(ConfigurationError, match="no price for simulated"):
        optimizer.compile(task.program(), trainset=task.trainset(3), valset=task.valset(3))
    assert not model.requests


# The lineage


def test_the_lineage_of_a_run_that_went_on_is_printed(tmp_path: Path) -> None:
    for calls in (150, 400):
        program = compiled(calls, log_dir=str(tmp_path), staleness=JOINED)
    status, printed, _ = command("lineage", str(tmp_path))
    assert status == 0
    assert "orthogonal. Adds" in printed
    for index, score in enumerate(program.detailed_results.val_aggregate_scores[1:], start=1):
        assert f"candidate {index}: score {score:.3f}, gap" in printed


def test_a_lineage_without_a_journal_or_with_a_damaged_one_is_named(tmp_path: Path) -> None:
    status, _, complaint = command("lineage", str(tmp_path))
    assert (status, f"{journal_of(tmp_path)} is missing" in complaint) == (3, True)
    journal_of(tmp_path).write_text("notes of mine, that are longer than a header of SQLite's is, and no database")
    status, _, complaint = command("lineage", str(tmp_path))
    assert (status, "is no journal" in complaint) == (3, True)


def test_the_policies_have_names_and_the_default_is_reflective() -> None:
    assert isinstance(StaleCandidateReflection().named_predictors()[0][1], dspy.Predict)
    assert AsyncGEPA(HouseRules().metric, auto="light", reflection_lm=dspy.LM("openai/x")).staleness == "reflective"
    for policy in (Full(), Guarded(3), Reflective()):
        AsyncGEPA(HouseRules().metric, auto="light", reflection_lm=dspy.LM("openai/x"), staleness=policy)


# Credit assignment


def best_text(program: Any) -> str:
    details = program.detailed_results
    return details.candidates[details.best_idx].steps[0].signature.instructions


def test_changes_are_told_as_they_were_proposed() -> None:
    world = Rules()
    stats = play(world, 600).async_stats
    assert len(stats.changes) > 5
    assert {change.part for change in stats.changes} <= {f"- rule {number}" for number in range(world.rules)}
    assert len({change.part for change in stats.changes}) == len(stats.changes), "equal changes are one"
    for change in stats.changes:
        assert (change.component, change.replaces) == ("steps[0]", "")
        assert 0 <= change.step < stats.steps
        assert change.error > 0
    check_ends(stats)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_harm_does_not_stay_in_the_best_program(seed: int) -> None:
    """Half of what the reflection writes takes three times what the other half brings."""
    world = Rules(seed=seed, helps=0.06, harmful=0.5, harm=0.18, train=30, val=30)
    program = play(world, 1800, use_merge=False)
    effects = [world.effect(line) for line in best_text(program).splitlines()]
    helpful, harmful = sum(one > 0 for one in effects), sum(one < 0 for one in effects)
    assert helpful > 2 * harmful
    assert world.worth(best_text(program)) > world.worth("0.3 seed 0")
    told = {change.part: change.effect for change in program.async_stats.changes}
    known = [(told[part] < 0) == (world.effect(part) < 0) for part in told]
    assert sum(known) > 0.6 * len(known), "most effects have the right sign"


@settings(max_examples=12)
@given(st.integers(30, 250), st.integers(0, 3), st.floats(0, 1), st.sampled_from([1, 4, 16]), st.integers(1, 20))
def test_no_budget_that_pays_two_steps_is_exceeded_and_every_step_ends_once(
    calls: int, seed: int, harmful: float, threads: int, undecided: int
) -> None:
    world = Rules(seed=seed, harmful=harmful, train=5, val=6)
    program = play(world, calls, num_threads=threads, staleness=Reflective(undecided=undecided))
    assert len(world.scored) == program.async_stats.metric_calls <= calls
    check_ends(program.async_stats)
    check_winner(program.detailed_results, 6)


@pytest.mark.parametrize("scale", [0.001, 1.0, 100.0])
def test_heads_are_validated_during_the_run_whatever_the_scale_of_scores(scale: float) -> None:
    world = Rules()
    plain = world.score
    world.score = lambda text, question: scale * plain(text, question)
    program = play(world, 300, perfect_score=scale)
    assert program.async_stats.ended["committed"] > 3
    assert program.async_stats.ended["integrated"] > 3
    assert max(program.detailed_results.val_aggregate_scores) > 0.6 * scale


def test_a_perfect_score_below_zero_ends_no_run() -> None:
    world = Rules()
    plain = world.score
    world.score = lambda text, question: plain(text, question) - 5
    program = play(world, 300, perfect_score=-4.0)
    assert program.async_stats.changes
    check_ends(program.async_stats)


@dataclass
class LaterValidated(Rules):
    """One rule, and a provider that turns away the validation of what has it until further notice."""

    turns_away: bool = True
    rules: int = 1
    helps: float = 0.3

    def student(self) -> dspy.Module:
        program: Any = super().student()
        forward = program.aforward

        async def aforward(question: str) -> dspy.Prediction:
            if self.turns_away and question.startswith("v") and "rule" in program.steps[0].signature.instructions:
                raise LMRateLimitError("later", model="m")
            return await forward(question)

        program.aforward = aforward
        return program


def test_a_head_that_could_not_be_validated_is_validated_when_the_run_goes_on(tmp_path: Path) -> None:
    play(LaterValidated(), 100, log_dir=str(tmp_path), num_threads=4)
    details = play(LaterValidated(turns_away=False), 100, log_dir=str(tmp_path), num_threads=4).detailed_results
    assert "- rule 0" in details.candidates[details.best_idx].steps[0].signature.instructions


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_where_changes_do_not_add_up_children_are_validated_by_themselves_as_in_gepa(seed: int) -> None:
    class OneOnly(Rules):
        """One rule helps much; with two of them nothing works."""

        def worth(self, text: str) -> float:
            return [0.3, 0.8][text.count("- rule")] if text.count("- rule") < 2 else 0.1

    world = OneOnly(seed=seed, train=30, val=30, rules=400)
    assert world.worth(best_text(play(world, 1500))) == 0.8
