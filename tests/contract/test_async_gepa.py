"""AsyncGEPA as a user meets it: data, programs, contexts, budgets, stops, faults, results."""

from __future__ import annotations

import asyncio
import importlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dspy
import pytest
from dspy.primitives.local_interpreter import LocalInterpreter
from dspy.teleprompt.gepa.gepa import DspyGEPAResult
from gepa.strategies.proposal_sampling import IndependentSampling

from dspy_flashevolve import AsyncGEPA, ConfigurationError, Guarded
from tests.contract.surface import (
    TRAIN,
    VAL,
    Interpreter,
    check_ends,
    check_winner,
    code_lm,
    compiled,
    on,
    optimizer,
    steps_of,
)
from tests.fakes import Chain, digits, examples, fake_lm, reflection_lm, reply_for, task_lm

# What comes back


def test_the_result_is_dspys_with_async_stats_beside_it() -> None:
    program = compiled(90, 2)
    details = program.detailed_results
    assert isinstance(details, DspyGEPAResult)
    assert details.async_stats is program.async_stats
    assert details.async_stats.metric_calls == details.total_metric_calls
    assert details.async_stats.to_dict()["schedule"] == "async"
    assert {"candidates", "parents", "best_idx"} <= details.to_dict().keys()


def test_the_returned_program_is_the_best_candidate_and_the_student_is_unchanged() -> None:
    student = Chain()
    state, before = student.dump_state(), student.steps[0].signature.instructions
    program: Any = optimizer(130).compile(student, trainset=TRAIN, valset=VAL)
    best = program.detailed_results.best_candidate
    assert program.steps[0].signature.instructions == best.steps[0].signature.instructions != before
    assert student.dump_state() == state
    check_winner(program.detailed_results)


def test_the_program_is_saved_and_loaded_as_any_other(tmp_path: Any) -> None:
    program = compiled(130, 2)
    program.save(tmp_path / "program.json")
    loaded = Chain(2)
    loaded.load(tmp_path / "program.json")
    assert [step.signature.instructions for step in loaded.steps] == [
        step.signature.instructions for step in program.steps
    ]
    assert loaded(question="q").answer == program(question="q").answer


def test_without_track_stats_the_program_comes_back_alone() -> None:
    assert not hasattr(compiled(track_stats=False), "detailed_results")


def test_stats_account_for_every_step_and_every_commit() -> None:
    details = compiled(130).detailed_results
    stats = details.async_stats
    check_ends(stats)
    assert len(stats.commits) == len(details.candidates) - 1 > 0
    assert [commit.candidate for commit in stats.commits] == list(range(1, len(details.candidates)))
    assert [commit.score for commit in stats.commits] == details.val_aggregate_scores[1:]
    assert [commit.best_score for commit in stats.commits] == [
        max(details.val_aggregate_scores[: commit.candidate + 1]) for commit in stats.commits
    ]
    assert sum(stats.gaps["before_commit"].values()) == len(stats.commits)
    assert 0 < stats.occupancy <= 1
    assert stats.peak_slots <= stats.slots == 4
    rollouts = {
        stage: calls for stage, calls in stats.requests_by_stage.items() if stage not in ("propose", "integrate")
    }
    assert stats.task_tokens == 7 * sum(rollouts.values()) >= 7 * stats.metric_calls, "what was given up is in both"
    assert stats.reflection_tokens == 7 * (stats.proposals + stats.integration_calls)
    assert stats.proposals_per_minute == pytest.approx(60 * stats.proposals / stats.seconds)


# Programs and metrics


def test_programs_without_a_usable_aforward_run_in_threads_with_the_same_result() -> None:
    class Overridden(dspy.Predict):
        def forward(self, **inputs: Any) -> Any:
            return super().forward(**inputs)

    results = []
    for student in (dspy.Predict("question -> answer"), Overridden("question -> answer")):
        program: Any = optimizer(schedule="lockstep").compile(student, trainset=TRAIN, valset=VAL)
        results.append(program.detailed_results.val_aggregate_scores)
    assert results[0] == results[1]


def test_coroutine_metrics_are_awaited_for_scores_and_feedback() -> None:
    feedback: list[str] = []

    async def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        await asyncio.sleep(0)
        if pred_name:
            feedback.append(pred_name)
        return digits(gold, pred)

    assert compiled(metric=metric, schedule="lockstep").detailed_results.val_subscores == (
        compiled(schedule="lockstep").detailed_results.val_subscores
    )
    assert feedback


def test_flex_code_evolves_as_in_gepa() -> None:
    results = []
    for kind, options in ((dspy.GEPA, {}), (AsyncGEPA, {"schedule": "lockstep"}), (AsyncGEPA, {})):
        student = dspy.Flex("question -> answer", interpreter_factory=Interpreter)
        one = kind(
            digits, max_metric_calls=24, num_threads=2, reflection_lm=code_lm(), track_stats=True,
            gepa_kwargs={"acceptance_criterion": "improvement_or_equal"}, **options,
        )  # fmt: skip
        with dspy.context(lm=fake_lm(lambda prompt: reply_for(prompt, answer="3"))):
            results.append(one.compile(student, trainset=TRAIN[:3], valset=VAL[:3]).detailed_results.to_dict())
    assert results[1] == results[0]
    assert len(results[2]["candidates"]) > 1
    assert all(
        "module_src" not in name and "class" in text for c in results[2]["candidates"] for name, text in c.items()
    )


@pytest.mark.long
def test_flex_code_that_asks_no_predictor_is_reflected_on() -> None:
    """Nothing of it is in dspy's trace, and dspy reads its inputs and outputs all the same."""
    source = """class Plain(dspy.Module):
    def forward(self, **inputs):
        return dspy.Prediction(answer='3')"""
    student = dspy.Flex("question -> answer", interpreter_factory=LocalInterpreter)
    student._module_src = source
    optimizer = AsyncGEPA(digits, max_metric_calls=40, num_threads=2, reflection_lm=code_lm(), track_stats=True)
    with dspy.context(lm=fake_lm(lambda prompt: reply_for(prompt, answer="3"))):
        stats = optimizer.compile(student, trainset=TRAIN[:3], valset=VAL[:3]).async_stats
    assert stats.proposals > 2
    assert not [reason for reason in stats.end_reasons if "trace" in reason]


def objectives(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
    result = digits(gold, pred)
    parts = {"digits": result.score, "even": float(int(pred.answer.split()[0]) % 2 == 0)}
    return dspy.Prediction(score=result.score, feedback=result.feedback, objective_scores=parts)


@pytest.mark.parametrize(
    ("frontier", "schedule"),
    [("hybrid", "async"), *((one, "lockstep") for one in ("instance", "objective", "hybrid", "cartesian"))],
)
def test_multi_objective_scores_and_all_four_frontiers(frontier: str, schedule: Any) -> None:
    gepa_kwargs = {"frontier_type": frontier}
    details = compiled(metric=objectives, gepa_kwargs=gepa_kwargs, schedule=schedule).detailed_results
    assert set(details.objective_pareto_front) == {"digits", "even"}
    assert len(details.candidates) > 1
    if schedule == "lockstep":
        same = {"max_metric_calls": 60, "num_threads": 4, "track_stats": True, "gepa_kwargs": gepa_kwargs}
        theirs = dspy.GEPA(objectives, reflection_lm=reflection_lm(), **same).compile(
            Chain(), trainset=TRAIN, valset=VAL
        )
        assert details.to_dict() == theirs.detailed_results.to_dict()


def test_a_custom_proposer_needs_no_reflection_lm() -> None:
    def proposer(candidate: Any, reflective_dataset: Any, components_to_update: list[str]) -> dict[str, str]:
        return {name: f"{candidate[name]} {len(reflective_dataset[name])}" for name in components_to_update}

    details = compiled(reflection_lm=None, instruction_proposer=proposer).detailed_results
    assert details.async_stats.proposals > 0


# Contexts


def test_it_runs_in_a_thread_under_the_threads_own_context() -> None:
    def work() -> Any:
        with dspy.context(lm=task_lm(5)):
            return compiled(schedule="lockstep")

    with ThreadPoolExecutor(1) as pool:
        inside = pool.submit(work).result()
    assert inside.detailed_results.val_subscores == work().detailed_results.val_subscores


def test_acompile_is_awaited_on_the_callers_loop_and_others_run_beside_it() -> None:
    async def main() -> tuple[Any, int, bool]:
        ticks, done, seen = 0, asyncio.Event(), set[int]()

        async def tick() -> None:
            nonlocal ticks
            while not done.is_set():
                ticks += 1
                await asyncio.sleep(0)

        class Where(Chain):
            async def aforward(self, question: str) -> dspy.Prediction:
                seen.add(threading.get_ident())
                return await super().aforward(question)

        ticking = asyncio.create_task(tick())
        program = await optimizer().acompile(Where(), trainset=TRAIN, valset=VAL)
        done.set()
        await ticking
        return program, ticks, seen == {threading.get_ident()}

    program, ticks, on_my_loop = asyncio.run(main())
    assert program.detailed_results.total_metric_calls > 9
    assert ticks > 10
    assert on_my_loop


def test_two_compiles_at_once_do_not_mix() -> None:
    def work(seed: int) -> Any:
        with dspy.context(lm=task_lm(seed)):
            return compiled(
                seed=seed, reflection_lm=reflection_lm(seed), schedule="lockstep"
            ).detailed_results.to_dict()

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(work, range(2)))
    assert together == [work(seed) for seed in range(2)]


# The asynchronous schedule


def test_the_first_steps_do_not_wait_for_the_seeds_validation() -> None:
    asked: list[str] = []

    class Order(Chain):
        async def aforward(self, question: str) -> dspy.Prediction:
            asked.append(question)
            await asyncio.sleep(0)
            return await super().aforward(question)

    optimizer(300).compile(Order(), trainset=TRAIN, valset=examples("v", 60))
    seed_validation = [n for n, question in enumerate(asked) if question.startswith("v")][:60]
    assert min(n for n, question in enumerate(asked) if question.startswith("t")) < seed_validation[-1]


@pytest.mark.parametrize("valset", [VAL, None], ids=["another valset", "one set for both"])
def test_no_minibatch_score_is_taken_for_a_validation_score(valset: Any) -> None:
    """Training example 3 and validation example 3 share an id in gepa's cache; only lockstep repeats that."""
    one = optimizer(160, gepa_kwargs={"cache_evaluation": True})
    details: Any = one.compile(Chain(), trainset=TRAIN, valset=valset).detailed_results  # type: ignore[attr-defined]
    for candidate, scores in zip(details.candidates, details.val_subscores, strict=True):
        for number, score in scores.items():
            example = (valset or TRAIN)[number]
            assert digits(example, candidate(question=example.question)).score == score
    assert details.total_metric_calls <= 160


# Bad input


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"schedule": "later"}, ConfigurationError, "schedule is 'later', expected 'async' or 'lockstep'"),
        ({"staleness": "stale"}, ConfigurationError, "staleness is 'stale', expected one of 'full', 'guarded'"),
        ({"num_threads": 0}, ConfigurationError, "num_threads is 0"),
        ({"num_threads": 8, "max_concurrency": 4}, ConfigurationError, "above max_concurrency=4"),
        ({"max_concurrency": True}, ConfigurationError, "max_concurrency is True"),
        ({"max_seconds": 0}, ConfigurationError, "max_seconds is 0"),
        ({"staleness": 5}, ConfigurationError, "staleness is 5, expected one of 'full'"),
        ({"staleness": "patch"}, ConfigurationError, "staleness is 'patch', expected one of 'full', 'guarded', 'refl"),
        ({"staleness": "edits"}, ConfigurationError, "staleness is 'edits', expected one of 'full'"),
        ({"search": "full"}, ConfigurationError, "search is 'full', expected 'edits', 'pareto', an Edits"),
        ({"search": Guarded(2)}, ConfigurationError, "search is Guarded.*expected 'edits', 'pareto', an Edits"),
        ({"stale_candidate_reflection": "x"}, ConfigurationError, "expected a dspy.Module"),
        ({"max_reflection_calls": 0}, ConfigurationError, "max_reflection_calls is 0"),
        ({"max_cost": -1.0}, ConfigurationError, "max_cost is -1.0"),
        ({"metric_lock": 1}, ConfigurationError, "metric_lock is 1, expected True or False"),
        ({"gepa_kwargs": {"raise_on_exception": False}}, ConfigurationError, "raise_on_exception"),
        ({"reflection_minibatch_size": 0}, ConfigurationError, "reflection_minibatch_size is 0"),
        ({"candidate_selection_strategy": "best"}, ConfigurationError, "candidate_selection_strategy is 'best'"),
        ({"component_selector": "some"}, ConfigurationError, "component_selector is 'some'"),
        ({"gepa_kwargs": {"frontier_type": "flat"}}, ConfigurationError, "frontier_type is 'flat'"),
        ({"gepa_kwargs": {"seed": 1}}, ConfigurationError, "pass it as the argument seed="),
        ({"gepa_kwargs": {"module_selector": "all"}}, ConfigurationError, "argument component_selector="),
        ({"gepa_kwargs": {"reflection_strategy": object()}}, ConfigurationError, "cannot be passed through"),
        ({"gepa_kwargs": {"sampling": 3}}, ConfigurationError, "which gepa does not know"),
        ({"gepa_kwargs": {"callbacks": object()}}, ConfigurationError, "expected a list of callback objects"),
        ({"gepa_kwargs": {"batch_sampler": ...}, "reflection_minibatch_size": 3}, ConfigurationError, "of its own"),
        ({"gepa_kwargs": {"reflection_prompt_template": "x"}}, ValueError, "reflection_prompt_template"),
        ({"gepa_kwargs": {"max_reflection_cost": 1.0}}, ValueError, "max_reflection_cost"),
        ({"perfect_score": None}, ConfigurationError, "perfect_score is None"),
        ({"reflection_lm": None}, AssertionError, "reflection language model"),
        ({"auto": "light"}, AssertionError, "Exactly one of max_metric_calls"),
        ({"auto": "lite"}, ConfigurationError, "auto is 'lite', expected one of 'light', 'medium', 'heavy'"),
        ({"max_metric_calls": None}, AssertionError, "Exactly one of max_metric_calls"),
        ({"max_iterations": 8}, TypeError, "'max_iterations', as other optimizers do: use max_metric_calls.*Stopper"),
        ({"optimize_tool_descriptions": True}, TypeError, "instructions evolve, descriptions of tools do not"),
        ({"max_steps": 8}, TypeError, "'max_steps', as other optimizers do: use max_metric_calls"),
        ({"breadth": 10}, TypeError, "'breadth', as other optimizers do: use gepa_kwargs"),
        ({"max_full_eval": 4}, TypeError, "unexpected keyword argument 'max_full_eval'"),
        ({"metric": lambda gold, pred: 1}, TypeError, "must accept five arguments"),
        ({"metric": 5}, ConfigurationError, "metric is 5"),
        ({"track_best_outputs": True, "track_stats": False}, AssertionError, "track_stats must be True"),
    ],
)
def test_an_argument_that_cannot_work_is_refused_at_construction(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        optimizer(**options)


def test_a_model_may_be_named_where_it_reflects() -> None:
    assert isinstance(optimizer(reflection_lm="openai/gpt-5").reflection_lm, dspy.LM)
    assert optimizer(reflection_lm="openai/gpt-5").reflection_lm.model == "openai/gpt-5"


class NoPredictor(dspy.Module):
    def forward(self, question: str) -> dspy.Prediction:
        return dspy.Prediction(answer="1")


@pytest.mark.parametrize(
    ("student", "data", "message"),
    [
        (Chain(), {"trainset": []}, "trainset is empty"),
        (Chain(), {"trainset": None}, "trainset is empty"),
        (Chain(), {"trainset": [dspy.Example(question="q")]}, "with_inputs"),
        (Chain(), {"trainset": [*TRAIN, dspy.Example(question="q")]}, rf"trainset\[{len(TRAIN)}\] does not say"),
        (Chain(), {"trainset": iter(TRAIN)}, r"trainset is a list_iterator, .* pass list\(trainset\)"),
        (Chain(), {"trainset": TRAIN, "teacher": Chain()}, "teacher"),
        (NoPredictor(), {"trainset": TRAIN}, "NoPredictor has no predictor"),
        ("program", {"trainset": TRAIN}, "student is 'program', expected a dspy.Module"),
    ],
)
def test_data_that_cannot_work_is_refused_before_any_lm_call(student: Any, data: dict[str, Any], message: str) -> None:
    task, reflection = task_lm(), reflection_lm()
    with dspy.context(lm=task), pytest.raises(ConfigurationError, match=message) as refused:
        optimizer(reflection_lm=reflection).compile(student, **data)
    assert task._engine_spec.calls == reflection._engine_spec.calls == 0
    assert isinstance(refused.value, AssertionError) or "empty" not in message, "as in gepa"


class Unpicklable:
    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_an_unpicklable_callback_is_refused_where_the_run_is_checkpointed(tmp_path: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot be pickled"):
        optimizer(log_dir=str(tmp_path), gepa_kwargs={"callbacks": [Unpicklable()]})
    optimizer(gepa_kwargs={"callbacks": [Unpicklable()]})


def test_settings_of_dspy_changed_during_a_run_do_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread without a dspy.context of its own, settings are the process's; a run keeps those it began with."""
    settings = importlib.import_module("dspy.dsp.utils.settings")
    mine, other = task_lm(3), task_lm(4)
    monkeypatch.setitem(settings.main_thread_config, "lm", mine)

    def change(event: Any) -> None:
        settings.main_thread_config["lm"] = other

    with ThreadPoolExecutor(1) as pool:  # a fresh thread has no override
        stats = pool.submit(compiled, 60, gepa_kwargs=on("on_iteration_start", change)).result().async_stats
    assert settings.main_thread_config["lm"] is other
    assert steps_of(stats) > 1
    assert other._engine_spec.calls == 0


def test_none_in_gepa_kwargs_asks_for_nothing() -> None:
    optimizer(gepa_kwargs={"max_reflection_cost": None, "reflection_strategy": None})


# What a user may pass


def test_tools_of_an_agent_run_side_by_side_though_they_block() -> None:
    inside = most = 0
    lock, two = threading.Lock(), threading.Event()

    def look_up(topic: str) -> str:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
            if inside > 1:
                two.set()
        two.wait(2)
        with lock:
            inside -= 1
        return "found"

    def answer(prompt: str) -> str:
        if "next_tool_name" in prompt:
            done = "observation_0" in prompt
            args = {"next_thought": "t", "next_tool_name": "finish" if done else "look_up"}
            return reply_for(prompt, **args, next_tool_args="{}" if done else '{"topic": "x"}')
        return reply_for(prompt, reasoning="r", answer="3")

    with dspy.context(lm=fake_lm(answer)):
        optimizer(12).compile(dspy.ReAct("question -> answer", tools=[look_up]), trainset=TRAIN, valset=VAL)
    assert most > 1


class TwoExamples:
    """Validates on two examples, the seed too; picks the best average."""

    def get_seed_eval_batch(self, loader: Any) -> list[int]:
        return [0, 1]

    def get_eval_batch(self, loader: Any, state: Any, target_program_idx: Any = None) -> list[int]:
        assert max(state.program_full_scores_val_set) > float("-inf"), "a policy sees a validated seed"
        return [0, 1]

    def get_best_program(self, state: Any) -> int:
        scores = state.program_full_scores_val_set
        return scores.index(max(scores))

    def get_valset_score(self, program_idx: int, state: Any) -> float:
        return state.get_program_average_val_subset(program_idx)[0]


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_an_evaluation_policy_of_the_users_decides_what_is_validated(schedule: Any) -> None:
    details = compiled(80, gepa_kwargs={"val_evaluation_policy": TwoExamples()}, schedule=schedule).detailed_results
    assert len(details.candidates) > 1
    assert all(set(scores) == {0, 1} for scores in details.val_subscores)
    assert details.total_metric_calls >= 60, "a policy that needs few examples leaves budget for many steps"


def test_a_budget_below_the_valset_is_fine_where_the_policy_validates_the_seed_on_less() -> None:
    details = compiled(8, gepa_kwargs={"val_evaluation_policy": TwoExamples()}).detailed_results
    assert 2 <= details.total_metric_calls <= 8


def test_a_batch_sampler_of_the_users_decides_what_is_reflected_on() -> None:
    class First:
        def next_minibatch_ids(self, loader: Any, state: Any) -> list[int]:
            assert state.program_full_scores_val_set[0] > float("-inf"), "a sampler sees a validated seed"
            return [0, 1]

    seen: list[list[int]] = []
    watch = on("on_minibatch_sampled", lambda event: seen.append(event["minibatch_ids"]))
    compiled(100, reflection_minibatch_size=None, gepa_kwargs={"batch_sampler": First(), **watch})
    assert seen
    assert all(ids == [0, 1] for ids in seen)


def test_a_component_selector_of_the_users_sees_a_validated_pool() -> None:
    def selector(state: Any, trajectories: Any, scores: Any, index: int, candidate: dict[str, str]) -> list[str]:
        assert max(state.pareto_front_valset.values()) >= 0
        return list(candidate)[-1:]

    details = compiled(90, 2, component_selector=selector).detailed_results
    first = {candidate.steps[0].signature.instructions for candidate in details.candidates}
    assert len(first) == 1
    assert len(details.candidates) > 1


@pytest.mark.parametrize("tasks", [2, 10])
def test_several_proposals_a_step_spend_the_budget_too(tasks: int) -> None:
    gepa_kwargs = {"sampling_strategy": IndependentSampling(tasks)}
    stats = compiled(110, gepa_kwargs=gepa_kwargs).async_stats
    assert stats.metric_calls <= 110
    assert stats.proposals > steps_of(stats)


@pytest.mark.parametrize(
    "options", [{"num_threads": 1}, {"reflection_minibatch_size": 20}, {"seed": None}, {"max_concurrency": 2}]
)
def test_unusual_sizes_work(options: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"num_threads": None} if "max_concurrency" in options else {}
    stats = compiled(100, **(settings | options)).async_stats
    assert steps_of(stats) > 1
    assert stats.metric_calls <= 100


def test_without_a_seed_no_two_runs_sample_the_same() -> None:
    runs: list[list[Any]] = [[], [], []]
    for seen in runs:
        compiled(
            100, seed=None, gepa_kwargs=on("on_minibatch_sampled", lambda e, to=seen: to.append(e["minibatch_ids"]))
        )
    assert len({str(seen) for seen in runs}) == 3


def test_code_of_the_users_may_run_a_loop_of_its_own() -> None:
    import anyio

    async def judged() -> float:
        await anyio.lowlevel.checkpoint()
        return 0.5

    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> float:
        return anyio.run(judged)

    assert compiled(40, metric=metric).detailed_results.val_aggregate_scores == [0.5]
