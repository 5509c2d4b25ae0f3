"""AsyncGEPA with every staleness policy, in virtual time: real engine, real dspy, a simulated model in the process."""

from __future__ import annotations

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
    LiveTickets,
    Reflective,
    StaleCandidateReflection,
)
from dspy_flashevolve.engine.errors import RunAbortedError
from dspy_flashevolve.engine.staleness import Admit, Discard, Integrate
from dspy_flashevolve.sim import HouseRules, ReplyModel, SimServer
from dspy_flashevolve.sim.virtual import SimulatedModel, run

TRAIN, VAL = 12, 12


def compiled(
    calls: int = 300, predictors: Any = 1, seed: int = 0, reply_model: ReplyModel | None = None, **options: Any
) -> Any:
    """A compiled program; ``metric_calls`` counts what the metric saw."""
    name = options.pop("model_name", "simulated")
    task = HouseRules(rules=12, rules_per_example=4, seed=seed, reply_model=reply_model or ReplyModel())
    model = SimulatedModel(seed=seed, reply_model=task.reply_model)
    scored: list[Any] = []

    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        if pred_name is None:
            scored.append(gold)
        return task.metric(gold, pred, trace, pred_name, pred_trace)

    async def compile_it() -> Any:
        optimizer = AsyncGEPA(
            metric,
            reflection_lm=model.lm(name),
            track_stats=True,
            **({"max_metric_calls": calls, "num_threads": 16, "seed": seed} | options),
        )
        with dspy.context(lm=model.lm(name), adapter=None):
            return await optimizer.acompile(
                task.program(predictors), trainset=task.trainset(TRAIN), valset=task.valset(VAL)
            )

    program = run(compile_it)
    program.metric_calls, program.model = len(scored), model
    return program


def state_of(program: Any) -> tuple[Any, ...]:
    details = program.detailed_results
    texts = [tuple(c.answer.signature.instructions for _ in (0,)) for c in details.candidates]
    return texts, details.parents, details.val_aggregate_scores


# Every policy


POLICIES: list[Any] = [
    "full",
    "guarded",
    "patch",
    "reflective",
    Guarded(0),
    Reflective(batch=4, take="screened"),
    Reflective(batch=1, take="proposals", heads=True),
    Reflective(batch=4, integrators=3, untaken="alone", frontier_share=0.5),
    Reflective(batch=6, untaken="drop"),
]


@pytest.mark.parametrize("staleness", POLICIES, ids=repr)
@pytest.mark.parametrize("calls", [60, 300])
def test_the_budget_holds_every_ticket_ends_and_the_winner_is_fully_validated(staleness: Any, calls: int) -> None:
    program = compiled(calls, staleness=staleness)
    details, stats = program.detailed_results, program.async_stats
    assert program.metric_calls == stats.metric_calls <= calls
    assert sum(stats.ended.values()) == stats.tickets
    assert stats.ended["cancelled"] == stats.ended["failed"] == 0
    best = details.best_idx
    assert len(details.val_subscores[best]) == VAL
    assert details.val_aggregate_scores[best] >= details.val_aggregate_scores[0]
    assert all(head.end != "unfinished" for head in stats.heads)


@pytest.mark.parametrize("staleness", ["reflective", "patch", Reflective(batch=3, take="screened")], ids=repr)
@pytest.mark.parametrize("predictors", [2, 3])
def test_programs_with_several_predictors_lose_no_update(staleness: Any, predictors: int) -> None:
    program = compiled(500, predictors, staleness=staleness)
    heads = program.async_stats.heads
    details = program.detailed_results
    names = {name for name, _ in program.named_predictors()}
    assert len(names) == predictors
    assert program.async_stats.metric_calls <= 500
    assert details.val_aggregate_scores[details.best_idx] > details.val_aggregate_scores[0]
    for head in heads:  # a head is built on the one before it, or on a validated candidate
        assert head.base is None or head.base < head.head


@settings(max_examples=8, deadline=None)
@given(st.integers(40, 260), st.integers(0, 3), st.sampled_from([2, 5, 12]), st.sampled_from([4, 32]))
def test_no_budget_batch_or_width_loses_a_ticket_or_a_call(calls: int, seed: int, batch: int, slots: int) -> None:
    program = compiled(calls, seed=seed, staleness=Reflective(batch=batch), num_threads=slots)
    stats = program.async_stats
    assert program.metric_calls == stats.metric_calls <= calls
    assert sum(stats.ended.values()) == stats.tickets
    assert all(head.end != "unfinished" for head in stats.heads)


def test_the_same_run_in_virtual_time_is_the_same_run() -> None:
    assert state_of(compiled(staleness="reflective")) == state_of(compiled(staleness="reflective"))


@pytest.mark.parametrize(
    "options",
    [
        {"calls": 200, "staleness": "reflective", "max_seconds": 40},
        {"calls": 200, "staleness": Reflective(batch=4), "max_reflection_calls": 20},
        {"calls": 300, "staleness": Reflective(batch=4, heads=False, take="proposals", min_gap=0)},
        {"calls": 122, "staleness": Reflective(batch=8, untaken="alone"), "max_live_tickets": 30},
        {"calls": 60, "staleness": Reflective(batch=3), "num_threads": 1},
        {"calls": 80, "staleness": "reflective", "max_live_tickets": 1},
        {"calls": 80, "staleness": "reflective", "reflection_minibatch_size": 1},
        {"calls": 200, "staleness": Reflective(batch=2, unreadable="drop"), "max_live_tickets": 2},
    ],
    ids=repr,
)
def test_narrow_runs_and_runs_that_are_stopped_come_to_their_end(options: dict[str, Any]) -> None:
    program = compiled(**options)
    stats = program.async_stats
    assert program.metric_calls == stats.metric_calls <= options["calls"]
    assert sum(stats.ended.values()) == stats.tickets
    assert all(head.end != "unfinished" for head in stats.heads)


def test_a_child_is_taken_where_one_of_its_components_is() -> None:
    class Half(dspy.Module):
        async def aforward(self, head: Any, children: Any, commits: Any = (), code_components: Any = ()) -> Any:
            verdicts = [
                SimpleNamespace(child=child.number, verdict=verdict, reason=verdict)
                for child in children
                for verdict in ("orthogonal", "subsumed")
            ]
            texts = {name: f"{children[0].texts[name]} {len(children)}" for name in children[0].texts}
            return dspy.Prediction(texts=texts, verdicts=verdicts)

    options = {"component_selector": "all", "stale_candidate_reflection": Half(), "staleness": Reflective(batch=4)}
    stats = compiled(400, 2, **options).async_stats
    assert stats.heads
    assert not [reason for reason in stats.end_reasons if reason.startswith("subsumed")]


def test_a_child_that_nobody_judged_is_not_in_the_head() -> None:
    module = StaleCandidateReflection(max_children=2)
    stats = compiled(
        600, staleness=Reflective(batch=8, untaken="drop"), num_threads=64, stale_candidate_reflection=module
    ).async_stats
    judged = {ticket for record in stats.integrations for ticket, _, _ in record.verdicts}
    assert stats.end_reasons["the integration did not judge it"] > 0
    assert {ticket for head in stats.heads for ticket in head.members} <= judged


def test_a_rejected_key_during_an_integration_ends_the_run_with_the_best_so_far() -> None:
    class Rejected(dspy.Module):
        async def aforward(self, **_: Any) -> Any:
            raise LMAuthError("no such key", model="simulated")

    with pytest.raises(RunAbortedError, match="no such key") as raised:
        compiled(400, staleness="reflective", stale_candidate_reflection=Rejected())
    assert raised.value.best_program is not None


def test_a_criterion_of_the_users_judges_trains_too() -> None:
    seen: list[Any] = []

    class Criterion:
        def should_accept(self, proposal: Any, state: Any) -> bool:
            seen.append((proposal.tag, proposal.eval_after.objective_scores, state.full_program_trace[-1]["i"]))
            return sum(proposal.subsample_scores_after) > sum(proposal.subsample_scores_before)

    stats = compiled(300, staleness=Reflective(batch=4), gepa_kwargs={"acceptance_criterion": Criterion()}).async_stats
    assert stats.heads
    assert any(tag == "train" for tag, _, _ in seen)


# Trains


def test_a_train_brings_the_work_of_many_tickets_into_one_candidate() -> None:
    program = compiled(max_metric_calls=None, max_full_evals=None, auto="light", staleness="reflective")
    stats, details = program.async_stats, program.detailed_results
    landed = [head for head in stats.heads if head.end != "failed its screen"]
    assert max(len(head.members) for head in landed) > 1
    assert stats.ended["integrated"] > 0
    assert details.val_aggregate_scores[details.best_idx] > 0.7 > 0.3 > details.val_aggregate_scores[0]


def test_heads_reach_gepas_pool_only_when_confirmed_and_lead_back_to_their_children() -> None:
    program = compiled(600, staleness=Reflective(batch=4), num_threads=32)
    stats, details = program.async_stats, program.detailed_results
    confirmed = [head for head in stats.heads if head.end == "confirmed"]
    assert confirmed
    assert {head.candidate for head in confirmed} <= set(range(1, len(details.candidates)))
    taken = {
        ticket for record in stats.integrations for ticket, verdict, _ in record.verdicts if verdict == "orthogonal"
    }
    for head in stats.heads:
        assert set(head.members) <= taken
        assert head.after > head.before or head.end == "failed its screen"
    for parents in details.parents[1:]:
        assert parents
        assert all(parent is not None and 0 <= parent < len(details.candidates) for parent in parents)


def test_a_superseded_head_costs_no_full_validation_where_calls_are_scarce() -> None:
    program = compiled(400, staleness=Reflective(batch=4), num_threads=64)
    stats = program.async_stats
    superseded = [head for head in stats.heads if head.end == "superseded"]
    assert superseded
    validated = len(program.detailed_results.candidates) - 1
    assert (
        validated < len(superseded) + validated == len([h for h in stats.heads if h.end in ("superseded", "confirmed")])
    )
    assert stats.commits[-1].best_score == max(program.detailed_results.val_aggregate_scores)


def test_tickets_start_from_a_head_before_it_is_validated() -> None:
    seen: list[tuple[str, int]] = []

    class Watch:
        def on_candidate_selected(self, event: Any) -> None:
            seen.append((next(iter(event["candidate"].values())), event["candidate_idx"]))

    program = compiled(
        600, staleness=Reflective(batch=4, frontier_share=0.0), num_threads=32, gepa_kwargs={"callbacks": [Watch()]}
    )
    texts = [candidate.answer.signature.instructions for candidate in program.detailed_results.candidates]
    assert any(text != texts[index] for text, index in seen)


def test_a_share_of_the_tickets_starts_from_the_frontier() -> None:
    def selected(share: float) -> int:
        calls: list[int] = []

        class Selector:
            def select_candidate_idx(self, state: Any) -> int:
                calls.append(1)
                return 0

        compiled(
            300,
            staleness=Reflective(batch=4, frontier_share=share),
            candidate_selection_strategy=Selector(),
            use_merge=False,
        )
        return len(calls)

    none, some, every = selected(0.0), selected(0.5), selected(1.0)
    assert none == 0
    assert 0 < some < every


def test_a_reply_that_cannot_be_read_leaves_the_children_to_gepas_own_way() -> None:
    class Mute(dspy.Module):
        async def aforward(self, **_: Any) -> Any:
            raise ValueError("no idea")

    program = compiled(400, staleness="reflective", stale_candidate_reflection=Mute())
    stats = program.async_stats
    assert all("no idea" in record.failed for record in stats.integrations)
    assert stats.integrations
    assert stats.ended["committed"] > 0
    assert not stats.heads


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


def test_a_module_of_the_users_decides_what_is_integrated() -> None:
    seen: list[int] = []

    class Longest(dspy.Module):
        def forward(self, head: Any, children: Any, commits: Any = (), code_components: Any = ()) -> Any:
            seen.append(len(children))
            texts = {name: max((c.texts[name] for c in children), key=len) for name in children[0].texts}
            verdicts = [SimpleNamespace(child=c.number, verdict="orthogonal", reason="mine") for c in children]
            return dspy.Prediction(texts=texts, verdicts=verdicts)

    stats = compiled(300, staleness=Reflective(batch=3), stale_candidate_reflection=Longest()).async_stats
    assert max(seen) <= 3
    assert {reason for record in stats.integrations for _, _, reason in record.verdicts} == {"mine"}
    assert stats.heads


def test_conflicting_and_subsumed_children_are_left_out_with_their_reasons() -> None:
    rivals = ReplyModel(rivals=True, spots_conflicts=1.0)
    stats = compiled(600, reply_model=rivals, staleness=Reflective(batch=6, untaken="drop")).async_stats
    assert stats.verdicts["conflicting"] > 0
    assert stats.verdicts["subsumed"] > 0
    reasons = [
        reason for record in stats.integrations for _, verdict, reason in record.verdicts if verdict == "conflicting"
    ]
    assert all(reason.startswith("Contradicts") for reason in reasons)
    left_out = {t for record in stats.integrations for t, verdict, _ in record.verdicts if verdict == "conflicting"}
    assert not left_out & {ticket for head in stats.heads for ticket in head.members}


@pytest.mark.parametrize("staleness", ["patch", "reflective"])
def test_a_provider_that_fails_during_an_integration_costs_no_score(staleness: str) -> None:
    class Limited(dspy.Module):
        async def aforward(self, **_: Any) -> Any:
            raise LMRateLimitError("slow down", model="simulated")

    program = compiled(400, staleness=staleness, num_threads=32, stale_candidate_reflection=Limited())
    stats = program.async_stats
    assert stats.ended["failed"] > 0
    assert any("no answer after" in reason for reason in stats.end_reasons)
    assert program.metric_calls == stats.metric_calls <= 400
    assert not stats.heads


def test_a_run_that_is_stopped_by_time_ends_with_its_heads_settled() -> None:
    for seconds in (5, 20, 45):
        stats = compiled(100_000, staleness="reflective", max_seconds=seconds).async_stats
        assert all(head.end != "unfinished" for head in stats.heads)
        assert stats.stop_reason == f"max_seconds={seconds} is over"


def test_trains_run_over_http_too() -> None:
    task = HouseRules(rules=12, rules_per_example=4)
    with SimServer(time_scale=100.0) as server:
        lm = dspy.LM("openai/simulated", api_base=server.api_base, api_key="none", cache=False)
        optimizer = AsyncGEPA(
            task.metric, max_metric_calls=200, reflection_lm=lm.copy(), num_threads=16, track_stats=True
        )
        with dspy.context(lm=lm, adapter=None):
            stats = optimizer.compile(
                task.program(), trainset=task.trainset(TRAIN), valset=task.valset(VAL)
            ).async_stats
        answered = server.stats().by_kind["integration"].requests
    assert answered == stats.integration_calls > 0
    assert stats.heads


# Patches


def test_a_patch_keeps_both_parents_and_passes_a_screen() -> None:
    program = compiled(1500, staleness="patch", num_threads=64, use_merge=False)
    stats, details = program.async_stats, program.detailed_results
    assert stats.looks["integrate"] > 0
    assert not stats.heads
    patched = [parents for parents in details.parents[1:] if len(parents) > 1]
    assert patched
    assert all(parent < index for index, parents in enumerate(details.parents[1:], start=1) for parent in parents)


def test_fresh_children_are_not_patched() -> None:
    stats = compiled(200, staleness="patch", max_live_tickets=1).async_stats
    assert "integrate" not in stats.looks
    assert stats.integration_calls == 0


# Guarded, and policies of the user's


def test_guarded_discards_what_is_too_old_and_says_when_that_is_much(caplog: pytest.LogCaptureFixture) -> None:
    stats = compiled(1500, staleness=Guarded(0), num_threads=64, admission=LiveTickets(48)).async_stats
    assert stats.looks["discard"] > 0
    assert any("behind, more than max_gap=0" in reason for reason in stats.end_reasons)
    assert stats.ended["committed"] > 0
    share = stats.looks["discard"] / sum(stats.looks.values())
    assert ("policy discarded" in caplog.text) == (share > 0.5)


def test_no_stale_item_enters_the_pool_unseen_by_the_policy() -> None:
    looked: list[Any] = []

    class Watching:
        looks = ("after_screen", "before_commit")

        def decide(self, look: Any, history: Any) -> Any:
            looked.append((look.place, history.version - look.seen))
            return Admit()

    stats = compiled(600, staleness=Watching(), num_threads=32).async_stats
    at_the_door = [behind for place, behind in looked if place == "before_commit"]
    assert sorted(at_the_door) == sorted(commit.gap for commit in stats.commits)


@pytest.mark.parametrize("place", ["before_propose", "after_propose", "after_screen", "before_commit"])
def test_a_policy_is_asked_where_it_says_and_a_discard_ends_the_ticket_there(place: str) -> None:
    places: list[str] = []

    class Never:
        looks = (place,)

        def decide(self, look: Any, history: Any) -> Any:
            places.append(look.place)
            return Discard("never")

    stats = compiled(120, staleness=Never()).async_stats
    assert set(places) == {place}
    assert stats.ended["committed"] == 0
    assert stats.end_reasons["stale: never"] == len(places)


def test_a_policy_that_integrates_where_nothing_can_be_is_told_so() -> None:
    class Wrong:
        looks = ("before_commit",)

        def decide(self, look: Any, history: Any) -> Any:
            return Integrate()

    with pytest.raises(ConfigurationError, match="wants to integrate before_commit"):
        compiled(200, staleness=Wrong())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"staleness": 5}, "staleness is 5, expected one of 'full'"),
        ({"staleness": SimpleNamespace(looks=("nowhere",), decide=len)}, "looks is .*expected one or more of"),
        ({"stale_candidate_reflection": "x"}, "expected a dspy.Module"),
        ({"max_reflection_calls": 0}, "max_reflection_calls is 0"),
        ({"max_cost": -1.0}, "max_cost is -1.0"),
        ({"max_cost": True}, "max_cost is True"),
    ],
)
def test_arguments_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AsyncGEPA(HouseRules().metric, auto="light", reflection_lm=dspy.LM("openai/x"), **options)


def test_lockstep_knows_no_staleness() -> None:
    assert compiled(200, schedule="lockstep").async_stats.looks.get("integrate", 0) == 0


# Limits on reflection and on dollars


@pytest.mark.parametrize("staleness", ["full", "reflective"])
def test_reflection_calls_are_limited(staleness: str) -> None:
    stats = compiled(2000, staleness=staleness, max_reflection_calls=10, max_live_tickets=1).async_stats
    assert stats.reflection_calls in (10, 11, 12)  # the last step may reflect once and be integrated twice
    assert stats.stop_reason == "max_reflection_calls=10 is spent"


def test_dollars_are_limited_where_prices_are_known() -> None:
    price = {"input_cost_per_token": 1e-6, "output_cost_per_token": 2e-6, "litellm_provider": "openai", "mode": "chat"}
    litellm.register_model({"priced": price})
    stats = compiled(2000, max_cost=0.05, max_live_tickets=1, staleness="full", model_name="priced").async_stats
    assert 0.05 <= stats.cost_dollars < 0.15
    assert stats.stop_reason == "max_cost=0.05 dollars is spent"


def test_a_limit_in_dollars_without_a_price_is_refused_before_any_call() -> None:
    task = HouseRules()
    model = SimulatedModel()
    optimizer = AsyncGEPA(task.metric, auto="light", reflection_lm=model.lm(), max_cost=1.0)
    with dspy.context(lm=model.lm()), pytest.raises(ConfigurationError, match="no price for simulated"):
        optimizer.compile(task.program(), trainset=task.trainset(3), valset=task.valset(3))
    assert not model.requests


def test_the_default_module_and_policies_are_what_the_documents_say() -> None:
    assert isinstance(StaleCandidateReflection().named_predictors()[0][1], dspy.Predict)
    assert Full().looks == ("after_screen", "before_commit")
    assert AsyncGEPA(HouseRules().metric, auto="light", reflection_lm=dspy.LM("openai/x")).staleness == "reflective"
