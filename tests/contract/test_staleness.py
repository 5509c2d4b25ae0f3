"""Searches and staleness policies, on the simulated model, in virtual time: budget, ends, winner, limits, lineage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import LMAuthError, LMRateLimitError

from dspy_flashevolve import (
    FLASHEVOLVE,
    AsyncGEPA,
    ConfigurationError,
    Edits,
    Full,
    Guarded,
    Reflective,
    RunAbortedError,
    StaleCandidateReflection,
    Workflow,
)
from dspy_flashevolve.sim import HouseRules, ReplyModel
from dspy_flashevolve.sim.virtual import SimulatedModel
from tests.contract.surface import Scored, check_ends, check_winner, command, evolved, journal_of, priced, sql
from tests.contract.worlds import Rules, World, play, quality
from tests.fakes import fake_lm

TRAIN, VAL = 12, 12


def compiled(calls: int = 300, predictors: Any = 1, seed: int = 0, **options: Any) -> Any:
    """A compiled program; ``scored`` counts what the metric saw, ``model`` has answered everything."""
    name = options.pop("model_name", "simulated")
    task = HouseRules(rules=12, rules_per_example=4, seed=seed, reply_model=ReplyModel())
    model, metric = SimulatedModel(seed=seed, reply_model=task.reply_model), Scored(task.metric)
    settings = {"max_metric_calls": calls, "num_threads": 16, "seed": seed, "track_stats": True} | options
    optimizer = AsyncGEPA(metric, reflection_lm=model.lm(name), **settings)
    lms = {"lm": model.lm(name), "adapter": None}
    program = evolved(optimizer, task.program(predictors), task.trainset(TRAIN), task.valset(VAL), lms)
    program.scored, program.model = len(metric.questions), model
    return program


EACH = Reflective(min_gap=0)
"""Every child is read by the reflection LM before its screen."""


@pytest.mark.long
def test_in_equal_time_the_default_makes_a_better_program_than_lockstep() -> None:
    best = {}
    for schedule in ("async", "lockstep"):
        details = compiled(100_000, schedule=schedule, max_seconds=40, num_threads=32).detailed_results
        best[schedule] = max(details.val_aggregate_scores)
    assert best["async"] > best["lockstep"]


@pytest.mark.parametrize("seconds", [120, 180])
def test_with_little_time_for_a_large_validation_set_the_last_head_is_validated_all_the_same(seconds: int) -> None:
    world = Rules(train=30, val=50, helps=0.1)
    program = play(world, None, max_seconds=seconds, num_threads=4)  # a validation takes about forty seconds
    stats, details = program.async_stats, program.detailed_results
    check_ends(stats)
    check_winner(details, 50)
    assert len(details.candidates) == 2, "no head was worth a validation before"
    assert max(details.val_aggregate_scores) > details.val_aggregate_scores[0] + 0.2
    assert world.worth(program.steps[0].signature.instructions) > 0.5


@pytest.mark.long
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


@pytest.mark.parametrize(("seconds", "val"), [(60, 75), (90, 100)])
def test_a_seed_that_a_cache_validates_does_not_hide_what_a_validation_takes(seconds: int, val: int) -> None:
    world = Cached(train=30, val=val, helps=0.1)
    program = play(world, None, max_seconds=seconds, num_threads=4)
    check_ends(program.async_stats)
    check_winner(program.detailed_results, val)
    assert world.worth(program.steps[0].signature.instructions) > 0.5


def test_each_session_of_a_run_that_goes_on_validates_its_last_head_in_time(tmp_path: Path) -> None:
    worth: list[float] = []
    for _ in range(3):
        world = Rules(train=30, val=100, helps=0.04)
        program = play(world, None, max_seconds=60, num_threads=4, log_dir=str(tmp_path))
        check_winner(program.detailed_results, 100)
        worth.append(world.worth(program.steps[0].signature.instructions))
    assert 0.3 < worth[1] < worth[2], worth


@pytest.mark.long
def test_children_that_stand_for_themselves_leave_the_last_head_its_time(tmp_path: Path) -> None:
    runs = [play(Rules(train=30, val=200), None, max_seconds=240).async_stats]
    runs += [play(Rules(train=30, val=200), None, max_seconds=120, log_dir=str(tmp_path)).async_stats for _ in range(2)]
    for stats, most in zip(runs, (240, 120, 120), strict=True):
        check_ends(stats)
        assert stats.seconds < most + 60, "a validation takes about forty seconds"


@pytest.mark.long
def test_steps_whose_child_would_come_after_the_last_head_end_before_they_ask_for_more() -> None:
    stats = play(Rules(train=30, val=60), None, max_seconds=60, num_threads=32).async_stats
    check_ends(stats)
    assert sum(n for reason, n in stats.end_reasons.items() if "the last head is being validated" in reason) > 5
    assert stats.seconds < 75, "sixteen steps at once took up to ninety"


@pytest.mark.parametrize("calls", [195, *(pytest.param(calls, marks=pytest.mark.long) for calls in (215, 230, 245))])
def test_the_last_head_is_paid_where_metric_calls_and_time_end_at_once(calls: int) -> None:
    program = play(Rules(seed=1, train=30, val=50, helps=0.1), calls, max_seconds=180, num_threads=4)
    stats, details = program.async_stats, program.detailed_results
    check_ends(stats)
    check_winner(details, 50)
    assert stats.metric_calls <= calls
    assert len(details.candidates) == 2, "no head was worth a validation before"
    assert max(details.val_aggregate_scores) > 0.8
    assert stats.seconds < 200


class Hanging(Rules):
    """One answer of a child's validation hangs, once, after half of the time."""

    hung = False

    def seconds(self, text: str, question: str) -> float:
        is_late = asyncio.get_running_loop().time() >= 150  # virtual time begins with the run
        if not self.hung and is_late and question.startswith("v") and "rule" in text:
            self.hung = True
            return 65.0
        return super().seconds(text, question)


@pytest.mark.long
def test_one_answer_that_hangs_in_a_validation_does_not_end_the_run_a_fifth_too_early() -> None:
    world = Hanging(train=30, val=20, rules=400, helps=0.002)
    stats = play(world, None, max_seconds=300).async_stats
    check_ends(stats)
    assert world.hung
    assert stats.seconds > 275


# Repairs


class Saying(dspy.Module):
    """A named fake of a repair: says, or raises, one and the same."""

    def __init__(self, reply: Callable[[dict[str, str], Any], Any]) -> None:
        super().__init__()
        self.reply = reply

    async def aforward(self, head: Any, children: Any, **_: Any) -> Any:
        reply = self.reply(head, children)
        if isinstance(reply, Exception):
            raise reply
        return reply


def saying(word: str, text: str | None = None) -> dspy.Module:
    """Gives every child a verdict, and every component of it a text."""

    def reply(head: dict[str, str], children: Any) -> Any:
        verdicts = [SimpleNamespace(child=one.number, verdict=word, reason="so") for one in children]
        return dspy.Prediction(texts={} if text is None else dict.fromkeys(children[0].texts, text), verdicts=verdicts)

    return Saying(reply)


def worse(head: dict[str, str], children: Any) -> Any:
    """A repair that makes the best candidate much worse, and still better than the seed."""
    texts = {
        name: f"{max(0.0, quality(head[name]) - 0.12):.3f} patched {len(text)}"
        for name, text in children[0].texts.items()
    }
    return dspy.Prediction(texts=texts, verdicts=[SimpleNamespace(child=1, verdict="orthogonal", reason="so")])


@pytest.mark.parametrize("seed", range(3))
def test_a_patched_child_has_to_beat_what_it_was_patched_onto_and_repairs_that_help_nothing_end(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(seed=seed, score=lambda text, question: quality(text))
    details = play(
        world, 200, search="pareto", staleness=EACH, use_merge=False, stale_candidate_reflection=Saying(worse)
    ).detailed_results
    texts = [candidate.steps[0].signature.instructions for candidate in details.candidates]
    assert not [text for text in texts if "patched" in text]
    assert len([repair for repair in details.async_stats.integrations if not repair.failed]) < 16
    assert "could not be used, or made nothing better" in caplog.text
    assert max(details.val_aggregate_scores) > details.val_aggregate_scores[0] + 0.1


@pytest.mark.long
def test_while_a_provider_does_not_answer_repairs_are_left_out_and_asked_for_again_afterwards() -> None:
    asked: list[float] = []

    def away(head: dict[str, str], children: Any) -> Any:
        asked.append(asyncio.get_running_loop().time())
        if 30 < asked[-1] < 170:
            return LMRateLimitError("slow down", model="simulated")
        best = min(0.85, quality(head[next(iter(children[0].texts))]) + 0.02)
        return dspy.Prediction(texts=dict.fromkeys(children[0].texts, f"{best:.3f} patched {len(asked)}"), verdicts=[])

    world = World(train=30, val=30, score=lambda text, question: quality(text))
    options = {"search": "pareto", "staleness": EACH, "stale_candidate_reflection": Saying(away)}
    play(world, None, max_seconds=300, num_threads=32, **options)
    assert [second for second in asked if second <= 30]
    assert [second for second in asked if second >= 170]


class Timed(Rules):
    """Remembers when each text's first validation rollout began, in virtual seconds."""

    began: dict[str, float]

    def seconds(self, text: str, question: str) -> float:
        if question.startswith("v"):
            self.began.setdefault(text, asyncio.get_running_loop().time())
        return super().seconds(text, question)


class EverySecond:
    """A policy of the user's own: every second child is repaired. A patched text is whole and stands for itself; the
    edits of the others make heads."""

    looks = ("after_propose",)

    def __init__(self) -> None:
        self._count = 0

    def decide(self, look: Any, history: Any) -> Any:
        self._count += 1
        return (Reflective(min_gap=0) if self._count % 2 else Full()).decide(look, history)


def test_no_repair_is_asked_for_once_the_last_head_is_being_validated() -> None:
    asked: list[float] = []

    def adding(head: dict[str, str], children: Any) -> Any:
        asked.append(asyncio.get_running_loop().time())
        [child] = children
        added = {name: set(text.splitlines()) - set(head[name].splitlines()) for name, text in child.texts.items()}
        texts = {name: "\n".join([head[name], *sorted(lines)]) for name, lines in added.items()}
        return dspy.Prediction(texts=texts, verdicts=[SimpleNamespace(child=1, verdict="orthogonal", reason="so")])

    world = Timed(train=30, val=40, reflection_seconds=15.0, helps=0.05, seed=1)
    world.began = {}
    options = {"staleness": EverySecond(), "stale_candidate_reflection": Saying(adding)}
    program = play(world, None, max_seconds=60, num_threads=20, **options)
    check_ends(program.async_stats)
    last = program.detailed_results.candidates[-1].steps[0].signature.instructions
    assert len(asked) > 5
    assert max(asked) <= world.began[last]
    assert any("the last head is being validated" in reason for reason in program.async_stats.end_reasons)


def test_a_repair_that_was_paid_is_read_again_when_the_run_goes_on_though_its_child_is_not_stale_any_more(
    tmp_path: Path,
) -> None:
    class Refused(World):
        """Whoever runs a patched text finds that the key is refused."""

        def seconds(self, text: str, question: str) -> float:
            if "patched" in text:
                raise LMAuthError("no such key", model="simulated")
            return super().seconds(text, question)

    asked: list[str] = []

    def patching_counted(head: dict[str, str], children: Any) -> Any:
        asked.extend(children[0].texts.values())
        return patching(head, children)

    saying_so = {"stale_candidate_reflection": Saying(patching_counted)}
    options: dict[str, Any] = {"search": "pareto", "log_dir": str(tmp_path), **saying_so}
    with pytest.raises(RunAbortedError, match="no such key"):
        play(Refused(), 100, staleness=EACH, **options)
    [(paid,)] = sql(tmp_path, "SELECT COUNT(*) FROM replies WHERE stage = 'integrate'")
    world = World()
    play(world, 100, staleness="full", **options)
    assert len({text for text, _ in world.scored if "patched" in text}) == paid == len(asked) > 0


def test_no_repair_is_begun_once_max_cost_is_spent() -> None:
    priced(fake_lm(str))
    limits = {"max_cost": 1e-9, "model_name": "priced", "search": "pareto"}  # spent by the first rollouts
    stats = compiled(3000, staleness=EACH, **limits).async_stats
    assert stats.proposals > 0
    assert stats.integration_calls == 0
    assert compiled(60, staleness=EACH, **limits | {"max_cost": 1.0}).async_stats.integration_calls > 0


def unread() -> dspy.Module:
    """The real module, with an LM that answers beside the point."""
    module = StaleCandidateReflection()
    module.set_lm(fake_lm(lambda prompt: "As a language model I have no opinion."))
    return module


USELESS: dict[str, tuple[Any, str]] = {
    "no format": (unread, "steps[0]: AdapterParseError"),
    "it raises": (lambda: Saying(lambda head, _: ValueError("no idea")), "no idea"),
    "nothing": (lambda: Saying(lambda head, _: None), "AttributeError"),
    "half a character": (lambda: saying("orthogonal", "\ud800"), "not valid Unicode"),
    "the seed's text": (lambda: saying("orthogonal", "0.3 seed 0"), ""),
    "no answer": (lambda: Saying(lambda head, _: LMRateLimitError("slow down", model="simulated")), "slow down"),
}  # fmt: skip


@pytest.mark.parametrize("search", ["edits", "pareto"])
@pytest.mark.parametrize("name", USELESS)
def test_no_reply_to_a_repair_costs_more_than_itself(name: str, search: Any) -> None:
    """The child goes on as it was: it ends by its own scores."""
    module, failed = USELESS[name]
    options = {"search": search, "staleness": EACH, "workflow": Workflow(live_steps=4)}
    stats = play(World(), 150, stale_candidate_reflection=module(), **options).async_stats
    check_ends(stats)
    assert stats.integrations, "none was asked for: this run shows nothing"
    assert all(record.failed and failed in record.failed for record in stats.integrations)
    assert stats.ended["committed"] > 3
    assert stats.ended["failed"] == 0
    assert not [reason for reason in stats.end_reasons if "stale" in reason]


@pytest.mark.parametrize("search", ["edits", "pareto"])
@pytest.mark.parametrize(("word", "reason"), [("subsumed", "subsumed by"), ("conflicting", "in conflict with")])
def test_a_child_that_is_dropped_costs_no_screen_and_its_step_says_why(word: str, reason: str, search: Any) -> None:
    world = World()
    stats = play(world, 80, search=search, staleness=EACH, stale_candidate_reflection=saying(word)).async_stats
    check_ends(stats)
    assert stats.ended["discarded"] == stats.end_reasons[f"stale: {reason} what was committed meanwhile"] > 3
    assert {text for text, _ in world.scored} == {"0.3 seed 0"}, "no child was run"
    assert stats.verdicts == {word: stats.ended["discarded"]}


def patching(head: dict[str, str], children: Any) -> Any:
    """Reconciles each child with the head: it says 0.9, and which of the two it was made from."""
    [child] = children
    origins = {name: (text.split()[-1], head[name].split()[-1]) for name, text in child.texts.items()}
    texts = {name: f"0.9 patched: {mine} onto {base}" for name, (mine, base) in origins.items()}
    return dspy.Prediction(texts=texts, verdicts=[SimpleNamespace(child=1, verdict="conflicting", reason="so")])


@pytest.mark.parametrize("search", ["edits", "pareto"])
def test_a_patched_child_is_what_is_screened_and_stands_on_the_pools_best_candidate(search: Any) -> None:
    world = World()
    program = play(world, 300, search=search, staleness="reflective", stale_candidate_reflection=Saying(patching))
    stats, details = program.async_stats, program.detailed_results
    check_ends(stats)
    check_winner(details, 12)
    assert stats.integrations, "none was stale: this run shows nothing"
    texts = [one.steps[0].signature.instructions for one in details.candidates]
    patched = [index for index, text in enumerate(texts) if "patched" in text]
    assert patched
    for index in patched:
        base = next(record.base for record in stats.integrations if record.step == stats.commits[index - 1].step)
        assert details.parents[index][0] == base < index
        assert texts[index].endswith(f"onto {texts[base].split()[-1]}")
    repaired = {record.step for record in stats.integrations}
    assert len({text for text, _ in world.scored if "patched" in text}) <= len(repaired)
    assert not [commit for commit in stats.commits if commit.step in repaired and commit.candidate not in patched]


def test_repairs_count_against_the_limit_of_reflections_and_none_begins_after_it() -> None:
    options = {"search": "pareto", "staleness": EACH, "max_reflection_calls": 6}
    stats = compiled(2000, num_threads=1, **options).async_stats
    assert stats.integration_calls > 0
    assert stats.stop_reason == "max_reflection_calls=6 is spent"
    assert 6 <= stats.reflection_calls <= 8, "what ran was finished"


def test_a_rejected_key_during_a_repair_ends_the_run_with_the_best_so_far() -> None:
    rejected = Saying(lambda head, _: LMAuthError("no such key", model="simulated"))
    with pytest.raises(RunAbortedError, match="no such key") as raised:
        compiled(400, staleness=EACH, stale_candidate_reflection=rejected)
    assert raised.value.best_program is not None


def test_without_an_lm_that_could_repair_children_are_admitted(caplog: pytest.LogCaptureFixture) -> None:
    stats = play(World(), 100, staleness=EACH, stale_candidate_reflection=None).async_stats
    assert stats.ended["committed"] > 0
    assert not stats.integrations
    assert "no LM that could repair stale candidates" in caplog.text


@pytest.mark.parametrize("place", ["after_propose", "after_screen"])
@pytest.mark.parametrize(("search", "world", "calls"), [("edits", Rules, 160), ("pareto", World, 450)])
def test_guarded_discards_what_is_behind_where_it_looks_and_full_discards_nothing(
    search: Any, world: Any, calls: int, place: Any
) -> None:
    """Another width bounds the gap beforehand, so that there may be nothing to discard."""
    guarded, full = (
        play(world(), calls, num_threads=64, search=search, staleness=one, use_merge=False).async_stats
        for one in (Guarded(0, looks=(place,)), "full")
    )
    behind = sum(count for gap, count in guarded.gaps[place].items() if gap > 0)
    assert guarded.looks["discard"] == behind > 0
    discarded = sum(count for reason, count in guarded.end_reasons.items() if "more than max_gap=0" in reason)
    assert 0 < discarded <= behind, "with edits, some of these steps validate the head instead"
    assert "discard" not in full.looks
    assert not [reason for reason in full.end_reasons if "behind" in reason]
    assert max(full.gaps[place]) > 0


@pytest.mark.long
@pytest.mark.parametrize("place", ["after_propose", "after_screen"])
def test_with_edits_a_child_that_guarded_discards_is_not_taken_apart(tmp_path: Path, place: Any) -> None:
    policy = Guarded(0, looks=(place,))
    stats = play(Rules(), 450, num_threads=32, staleness=policy, log_dir=str(tmp_path)).async_stats
    stale = {step for (step,) in sql(tmp_path, "SELECT step FROM ends WHERE reason LIKE '%more than max_gap=0'")}
    assert stale
    assert not stale & {change.step for change in stats.changes}


def test_lockstep_knows_no_staleness() -> None:
    stats = compiled(50, schedule="lockstep").async_stats
    assert stats.integration_calls == 0
    assert set(stats.gaps["before_commit"]) <= {0}


# Limits on reflection and on dollars


@pytest.mark.parametrize("search", ["edits", "pareto"])
def test_reflection_calls_are_limited(search: Any) -> None:
    stats = compiled(2000, search=search, max_reflection_calls=3, num_threads=1).async_stats
    assert stats.stop_reason == "max_reflection_calls=3 is spent"
    assert 3 <= stats.reflection_calls <= 3 + stats.slots + 10, "what ran was finished"
    lockstep = compiled(2000, max_reflection_calls=3, schedule="lockstep").async_stats
    assert lockstep.reflection_calls in (3, 4), "the last step finishes"


def test_a_limit_in_dollars_without_a_price_is_refused_before_any_call() -> None:
    task = HouseRules()
    model = SimulatedModel()
    optimizer = AsyncGEPA(task.metric, auto="light", reflection_lm=model.lm(), max_cost=1.0)
    with dspy.context(lm=model.lm()), pytest.raises(ConfigurationError, match="no price for simulated"):
        optimizer.compile(task.program(), trainset=task.trainset(3), valset=task.valset(3))
    assert not model.requests


# The lineage


def test_the_lineage_of_a_run_that_went_on_is_printed(tmp_path: Path) -> None:
    for calls in (50, 90):
        program = compiled(calls, log_dir=str(tmp_path), search="pareto", staleness=EACH)
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


def test_any_policy_goes_with_any_search_and_by_default_no_child_is_too_stale() -> None:
    assert isinstance(StaleCandidateReflection().named_predictors()[0][1], dspy.Predict)
    options: dict[str, Any] = {"auto": "light", "reflection_lm": dspy.LM("openai/x")}
    default = AsyncGEPA(HouseRules().metric, **options)
    assert (default.search, default.staleness) == (None, "full")
    for policy in (Full(), Guarded(3), Reflective()):
        for search in ("edits", "pareto", Edits(frontier_share=1.0)):
            AsyncGEPA(HouseRules().metric, search=search, staleness=policy, **options)


@pytest.mark.long
def test_the_preset_of_the_paper_repairs_what_is_stale_speculates_and_has_nothing_of_ours_in_its_search() -> None:
    program = compiled(400, **FLASHEVOLVE)
    stats = program.detailed_results.async_stats
    assert stats.metric_calls <= 400
    assert stats.integrations
    assert not stats.changes
    assert stats.busy_seconds_by_stage["prefix"] > 0
    assert len(program.detailed_results.candidates) > 1


@pytest.mark.parametrize("share", [1.5, -0.1, float("nan"), "half", True, None])
def test_a_share_of_the_frontier_that_is_none_is_refused(share: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Edits: frontier_share is .*, expected 0 to 1"):
        Edits(frontier_share=share)


# Credit assignment


def best_text(program: Any) -> str:
    details = program.detailed_results
    return details.candidates[details.best_idx].steps[0].signature.instructions


@pytest.mark.long
def test_changes_are_told_as_they_were_proposed() -> None:
    world = Rules()
    stats = play(world, 600).async_stats
    assert len(stats.changes) > 5
    assert stats.integration_calls == 0, "what a child adds needs no LM to be put in"
    assert {change.part for change in stats.changes} <= {f"- rule {number}" for number in range(world.rules)}
    assert len({change.part for change in stats.changes}) == len(stats.changes), "equal changes are one"
    for change in stats.changes:
        assert (change.component, change.replaces) == ("steps[0]", "")
        assert 0 <= change.step < stats.steps
        assert change.error > 0
    check_ends(stats)


@pytest.mark.long
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


@pytest.mark.parametrize("scale", [0.001, 1.0, 100.0])
def test_heads_are_validated_during_the_run_whatever_the_scale_of_scores(scale: float) -> None:
    world = Rules()
    plain = world.score
    world.score = lambda text, question: scale * plain(text, question)
    program = play(world, 200, perfect_score=scale)
    assert program.async_stats.ended["committed"] >= 3
    assert program.async_stats.ended["joined"] > 3
    assert max(program.detailed_results.val_aggregate_scores) > 0.6 * scale


def test_a_perfect_score_below_zero_ends_no_run() -> None:
    world = Rules()
    plain = world.score
    world.score = lambda text, question: plain(text, question) - 5
    program = play(world, 90, perfect_score=-4.0)
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
    play(LaterValidated(), 50, log_dir=str(tmp_path), num_threads=4)
    details = play(LaterValidated(turns_away=False), 50, log_dir=str(tmp_path), num_threads=4).detailed_results
    assert "- rule 0" in details.candidates[details.best_idx].steps[0].signature.instructions


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_where_changes_do_not_add_up_children_are_validated_by_themselves_as_in_gepa(seed: int) -> None:
    class OneOnly(Rules):
        """One rule helps much; with two of them nothing works."""

        def worth(self, text: str) -> float:
            return [0.3, 0.8][text.count("- rule")] if text.count("- rule") < 2 else 0.1

    world = OneOnly(seed=seed, train=30, val=30, rules=400)
    assert world.worth(best_text(play(world, 1500))) == 0.8
