"""AsyncACE from end to end: in virtual time over the simulated model, and over fakes."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import dspy
import pytest
from dspy.utils.exceptions import LMAuthError
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.models import REPLY_MODELS
from dspy_flashevolve import AsyncACE, ConfigurationError, DataError, Playbook, RunAbortedError
from dspy_flashevolve.sim import PROFILES, HouseRules
from dspy_flashevolve.sim.virtual import SimulatedModel, run
from tests.contract.surface import InThread, left_threads, steps_of
from tests.fakes import Chain, digits, examples, fake_lm, hashed, reply_for

TASK = HouseRules(rules=12, rules_per_example=4, seed=0, reply_model=REPLY_MODELS["obliging"])
TRAIN, VAL = TASK.trainset(24), TASK.valset(16)


def compiled(student: dspy.Module | None = None, model: SimulatedModel | None = None, **options: Any) -> Any:
    """A program that AsyncACE has compiled in virtual time."""
    answering = model or SimulatedModel(seed=0, reply_model=TASK.reply_model)
    playbook, metric = options.pop("playbook", None), options.pop("metric", TASK.metric)

    optimizer = AsyncACE(metric, **{"num_threads": 16, **options})
    with dspy.context(lm=answering.lm()):
        program = student or TASK.program()
        return run(lambda: optimizer.acompile(program, trainset=TRAIN, valset=VAL, playbook=playbook))


@pytest.fixture(scope="module")
def learnt() -> Any:
    """A program that has learnt from two epochs; it is not to be changed."""
    return compiled(epochs=2)


def test_the_playbook_makes_the_program_better_and_the_best_validated_one_is_returned(learnt: Any) -> None:
    stats: Any = learnt.async_stats
    assert stats.snapshots[0].version == 0, "the initial playbook is scored too"
    best = max(stats.snapshots, key=lambda snapshot: snapshot.score)
    assert best.score > stats.snapshots[0].score + 0.4
    assert learnt.playbook.version == stats.best_version == best.version
    assert learnt.answer.signature.instructions.startswith(TASK.program().answer.signature.instructions)
    assert learnt.playbook.render() in learnt.answer.signature.instructions


def test_every_sample_comes_through_and_is_counted(learnt: Any) -> None:
    stats: Any = learnt.async_stats
    assert stats.samples == steps_of(stats) == 48
    assert stats.operations["add"] >= len(learnt.playbook) > 0
    assert stats.tags["helpful"] > 0
    assert stats.citations > 0
    assert stats.requests_by_stage["reflect"] == stats.reflections
    assert stats.outcome == "finished"


def test_the_student_is_not_changed_and_the_program_cites_nothing() -> None:
    student = TASK.program()
    before = student.dump_state()
    program = compiled(student, max_seconds=60)
    assert student.dump_state() == before
    assert list(program.answer.signature.output_fields) == ["answer"]


def test_saving_and_loading_the_program_keeps_the_playbook(learnt: Any, tmp_path: Path) -> None:
    learnt.save(tmp_path / "program.json")
    loaded = TASK.program()
    loaded.load(tmp_path / "program.json")
    assert loaded.answer.signature.instructions == learnt.answer.signature.instructions
    again = compiled(loaded, max_seconds=60)
    instructions, own = again.answer.signature.instructions, TASK.program().answer.signature.instructions
    assert (instructions.count("<playbook>"), instructions.count(own), instructions.startswith(own)) == (1, 1, True)
    first, *_ = again.async_stats.snapshots
    assert (first.bullets, first.tokens) == (len(learnt.playbook), learnt.playbook.tokens())
    assert first.score > learnt.async_stats.snapshots[0].score, "it goes on from what it has learnt"


def holding(book: Playbook | None, program: Any = None) -> Any:
    """A program that has this playbook, or its own, after a run that learnt nothing."""
    lm = fake_lm(lambda prompt: reply_for(prompt, answer="3", insight="x", operations="[]"))
    with dspy.context(lm=lm):
        optimizer = AsyncACE(digits, max_rounds=1)
        return optimizer.compile(program or TASK.program(), trainset=examples("t", 1), playbook=book)


def test_ids_are_not_used_again_after_save_and_load(tmp_path: Path) -> None:
    book = Playbook().adding("other", "a").adding("other", "b")
    book = book.replacing(bullet for bullet in book.bullets if bullet.id == "oth-1")
    holding(book).save(tmp_path / "program.json")
    loaded = TASK.program()
    loaded.load(tmp_path / "program.json")
    first = holding(None, loaded).playbook
    assert [bullet.id for bullet in first.adding("other", "c").bullets] == ["oth-1", "oth-3"]


def test_a_program_goes_on_from_its_instructions_with_their_counters_and_not_from_an_older_attribute() -> None:
    old, new = Playbook().adding("other", "old"), Playbook().adding("other", "new").tagged([("oth-1", "helpful")])
    program = holding(new)
    program.playbook = old
    [bullet] = holding(None, program).playbook.bullets
    assert (bullet.content, bullet.helpful) == ("new", 1)


@pytest.mark.long
def test_equal_runs_are_equal_and_other_seeds_are_not() -> None:
    first, same, other = (compiled(seed=seed, max_seconds=60) for seed in (1, 1, 2))
    assert first.playbook == same.playbook
    assert first.playbook != other.playbook


@pytest.mark.long
def test_the_playbook_is_attached_to_the_chosen_predictors_only() -> None:
    student = TASK.program(predictors=2)
    name = student.named_predictors()[0][0]
    program = compiled(student, attach=[name], max_seconds=60)
    held = {name for name, predictor in program.named_predictors() if "<playbook>" in predictor.signature.instructions}
    assert held == {name}
    assert len(program.playbook) > 0


def test_in_lockstep_one_sample_is_under_way_at_a_time() -> None:
    program = compiled(schedule="lockstep", max_seconds=100, eval_every=100)
    stats: Any = program.async_stats
    working = sum(stats.busy_seconds_by_stage[name] for name in ("rollout", "reflect", "curate"))
    assert working <= stats.seconds
    assert stats.gaps["before_commit"] == {0: stats.samples}


def test_the_asynchronous_form_learns_from_more_samples_in_the_same_time() -> None:
    counts = {name: compiled(schedule=name, max_seconds=60).async_stats.samples for name in ("lockstep", "async")}
    assert counts["async"] >= 2.5 * counts["lockstep"] > 0


@pytest.mark.parametrize(
    ("limit", "schedule", "slots"), [(36, "async", 24), (50, "async", 1), (100, "async", 24), (61, "lockstep", 8)]
)
def test_metric_calls_never_exceed_the_budget_and_what_is_returned_is_validated(
    limit: int, schedule: str, slots: int
) -> None:
    calls = 0

    def metric(gold: Any, pred: Any, trace: Any = None) -> Any:
        nonlocal calls
        calls += 1
        return TASK.metric(gold, pred)

    program = compiled(
        metric=metric, max_metric_calls=limit, schedule=schedule, num_threads=slots, eval_every=2, epochs=2
    )
    stats: Any = program.async_stats
    assert calls == stats.metric_calls <= limit
    assert stats.best_version in [snapshot.version for snapshot in stats.snapshots]
    assert 0 in [snapshot.version for snapshot in stats.snapshots], "the initial playbook is scored too"
    assert all(snapshot.score >= 0 for snapshot in stats.snapshots)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_metric_calls": 35}, "max_metric_calls is 35, expected at least 36"),
        ({"attach": ["nobody"]}, r"\['nobody'\].*\['answer'\]"),
        ({"playbook": Playbook().adding("other", "x" * 100), "token_budget": 10}, "above token_budget=10"),
    ],
)
def test_what_does_not_go_with_the_data_or_the_program_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        compiled(**options)


def test_the_token_budget_holds_and_what_it_drove_out_is_counted() -> None:
    stats: Any = compiled(token_budget=90).async_stats
    assert all(snapshot.tokens <= 90 for snapshot in stats.snapshots)
    assert stats.evicted > 0
    assert stats.problems["over the token budget"] == stats.evicted


def test_an_empty_playbook_with_sections_of_its_own_is_not_replaced() -> None:
    program = compiled(playbook=Playbook(sections=("lessons",)), max_seconds=60)
    assert program.playbook.sections == ("lessons",)
    assert {bullet.section for bullet in program.playbook.bullets} == {"lessons"}


def test_rate_limits_are_retried_and_are_no_scores() -> None:
    tight = replace(PROFILES["h100-qwen3-8b"], concurrency_limit=4, retry_after_seconds=0.5)
    seen: list[int] = []

    def metric(gold: Any, pred: Any, trace: Any = None) -> Any:
        seen.append(len(pred.answer))
        return TASK.metric(gold, pred)

    # Whether any validation gets all of its answers is chance with so low a limit; with this seed one does.
    model = SimulatedModel(tight, seed=1, reply_model=TASK.reply_model)
    stats: Any = compiled(model=model, metric=metric, max_seconds=60).async_stats
    assert model.refused
    assert min(seen) > 0, "no score of a request that was refused"
    assert stats.ended["failed"] > 0, "some samples found no answer at all"
    assert stats.samples == stats.ended["committed"] + stats.ended["rejected"] > 0
    assert all(snapshot.score > 0 for snapshot in stats.snapshots)


@pytest.mark.long
def test_a_provider_that_is_down_ends_the_run_without_a_score() -> None:
    model = SimulatedModel(replace(PROFILES["h100-qwen3-8b"], concurrency_limit=0), seed=0)
    with pytest.raises(RunAbortedError, match="No playbook could be validated") as raised:
        compiled(model=model, num_threads=4)
    assert raised.value.best_program is None
    assert not model.requests


# Fakes: what language models may write


def learning(
    metric: Any = digits, student: Any = None, train: int = 2, val: int = 0,
    answer: Callable[[str], str] = lambda prompt: reply_for(prompt, answer="3", insight="x", operations="[]"),
    **options: Any,
) -> Any:  # fmt: skip
    """A program compiled over one LM; by default each answer is 3, and nothing is learnt."""
    optimizer = AsyncACE(metric, **{"num_threads": 2, "max_rounds": 1, **options})
    data = {"trainset": examples("t", train), "valset": examples("v", val) or None}
    with dspy.context(lm=fake_lm(answer)):
        return optimizer.compile(student or Chain(), **data)


def answered_by(reply: Callable[[str], str], **options: Any) -> Any:
    """A program compiled over an LM that answers tasks well enough and everything else by ``reply``."""

    def answer(prompt: str) -> str:
        if ("feedback" in prompt and "attempt" in prompt) or "operations" in prompt:
            return reply(prompt)
        return reply_for(prompt, answer=str(hashed(prompt) % 7), cited_bullets="oth-1, nonsense")

    optimizer = AsyncACE(digits, **{"num_threads": 8, "max_rounds": 2, "epochs": 2, **options})
    with dspy.context(lm=fake_lm(answer)):
        return optimizer.compile(Chain(2), trainset=examples("train", 6), valset=examples("val", 4))


@pytest.mark.parametrize(
    "reply", ["", "I cannot do that.", "[[ ## insight ## ]]\n\n[[ ## operations ## ]]\n[{]", "{" * 300, "{}"]
)
def test_replies_that_cannot_be_read_are_counted_and_never_fatal(reply: str) -> None:
    stats: Any = answered_by(lambda prompt: reply).async_stats
    assert stats.samples == 12
    assert sum(stats.problems.values()) > 0
    assert stats.first_problems
    assert stats.version == 0


def test_what_can_be_read_of_a_bad_reply_is_used() -> None:
    operations = '[{"type": "ADD", "section": "other", "content": "Add digits."}, {"type": "HUG"}, 7, {"type": "ADD"'

    def reply(prompt: str) -> str:
        return reply_for(prompt, insight="x", operations=operations, bullet_tags='{"oth-1": "helpful", "x": "bad"}')

    program = answered_by(reply)
    stats: Any = program.async_stats
    assert [bullet.content for bullet in program.playbook.bullets] in ([], ["Add digits."])
    assert stats.operations["add"] == 1
    assert stats.problems["unknown operation"] >= 1
    assert stats.problems["said already"] >= 1
    assert stats.tags.get("helpful", 0) > 0


@pytest.mark.long
@settings(max_examples=5, deadline=None)
@given(st.integers(0, 10**6))
def test_arbitrary_replies_end_in_a_program(seed: int) -> None:
    pieces = [
        '[{"type": "ADD", "section": "other", "content": "a"}]', '{"type": "REMOVE", "id": "oth-1"}', "[[ ##", "null",
        '{"oth-1": "harmful"}', "[[ ## operations ## ]]\n", "[[ ## insight ## ]]\nyes", "\x00", "{}", "```json", "]]",
    ]  # fmt: skip

    def reply(prompt: str) -> str:
        number = hashed(seed, prompt)
        return " ".join(pieces[(number >> shift) % len(pieces)] for shift in range(0, number % 24, 4))

    program = answered_by(reply, epochs=1)
    assert program.async_stats.samples == 6
    assert isinstance(program.playbook, Playbook)


def test_a_synchronous_program_and_a_metric_without_feedback_are_served() -> None:
    shown: list[str] = []

    def answer(prompt: str) -> str:
        if "[[ ## attempt ## ]]" in prompt:
            shown.append(prompt)
            return reply_for(prompt, insight="x")
        return reply_for(prompt, answer="7", operations="[]")

    data = [dspy.Example(question=f"q{n}", answer="8").with_inputs("question") for n in range(3)]
    optimizer = AsyncACE(lambda gold, pred: gold.answer == pred.answer, max_rounds=1, num_threads=2)
    with dspy.context(lm=fake_lm(answer, asynchronous=False)):
        program: Any = optimizer.compile(InThread(), trainset=data)
    assert program.async_stats.samples == 3
    assert all("answer: 7" in prompt and "Expected:\nanswer: 8" in prompt for prompt in shown)


def test_a_program_that_fails_is_reflected_on_and_scores_the_failure_score() -> None:
    class Broken(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.predict = dspy.Predict("question -> answer")

        async def aforward(self, question: str) -> Any:
            raise ValueError("broken")

    seen: list[str] = []

    def answer(prompt: str) -> str:
        seen.append(prompt)
        return reply_for(prompt, insight="x", operations="[]")

    program = learning(student=Broken(), answer=answer, failure_score=-1.0)
    assert {snapshot.score for snapshot in program.async_stats.snapshots} == {-1.0}
    assert any("The program failed" in prompt for prompt in seen)


def test_a_key_that_is_refused_ends_the_run_with_the_best_program_so_far() -> None:
    def answer(prompt: str) -> str:
        if "[[ ## attempt ## ]]" in prompt:
            raise LMAuthError("no such key", model="fake/model", provider="fake")
        return reply_for(prompt, answer="3")

    optimizer = AsyncACE(digits, num_threads=1, schedule="lockstep")
    with dspy.context(lm=fake_lm(answer)), pytest.raises(RunAbortedError) as raised:
        optimizer.compile(Chain(), trainset=examples("t", 3))
    stats = raised.value.best_program.async_stats
    assert (stats.best_version, stats.outcome) == (0, "aborted")
    assert "no such key" in stats.stop_reason
    assert optimizer.best_so_far() is not None


def test_a_reflector_that_always_raises_is_told_once_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(dspy.Module):
        def forward(self, **inputs: Any) -> Any:
            raise ValueError("wrong fields")

    stats: Any = answered_by(lambda prompt: "", reflector=Broken()).async_stats
    assert stats.problems["reflect failed"] == 12
    assert caplog.text.count("reflect failed, which") == 1
    assert caplog.text.count("no sample changed the playbook") == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "0.9", [1]])
def test_a_score_that_is_no_finite_number_is_a_failure(bad: Any, caplog: pytest.LogCaptureFixture) -> None:
    program = learning(lambda gold, pred: bad, failure_score=-1.0)
    assert {snapshot.score for snapshot in program.async_stats.snapshots} == {-1.0}
    assert "expected a finite number" in caplog.text


def test_the_reflector_is_told_that_the_metric_raised_and_not_the_program() -> None:
    seen: list[str] = []

    def answer(prompt: str) -> str:
        seen.append(prompt)
        return reply_for(prompt, answer="3", insight="x", operations="[]")

    def metric(gold: Any, pred: Any) -> float:
        raise KeyError("unit")

    learning(metric, answer=answer)
    told = [prompt for prompt in seen if "[[ ## attempt ## ]]" in prompt]
    assert any("the metric failed: KeyError: 'unit'" in prompt for prompt in told)
    assert not any("The program failed" in prompt for prompt in told)


class Occupied(dspy.Module):
    """Has a use of its own for the names that the optimizer would like."""

    def __init__(self) -> None:
        super().__init__()
        self.playbook = "the coach's"
        self.predict = dspy.Predict("question, cited_bullets_2 -> answer, cited_bullets")

    async def aforward(self, question: str) -> dspy.Prediction:
        return await self.predict.acall(question=question, cited_bullets_2="")


def test_a_program_keeps_fields_and_attributes_that_the_optimizer_would_like() -> None:
    seen: list[str] = []

    def answer(prompt: str) -> str:
        seen.append(prompt)
        fields = {"cited_bullets": "mine", "cited_bullets_3": "oth-1"}
        operations = '[{"type": "ADD", "section": "other", "content": "Add digits."}]'
        if "operations" in prompt or "attempt" in prompt:
            return reply_for(prompt, insight="x", operations=operations)
        return reply_for(prompt, answer="3", **fields)

    program = learning(student=Occupied(), answer=answer, num_threads=1, epochs=2)
    assert program.playbook == "the coach's"
    assert isinstance(program.ace_playbook, Playbook)
    told = [prompt for prompt in seen if "[[ ## attempt ## ]]" in prompt]
    assert all("cited_bullets: mine" in prompt and "cited_bullets_3" not in prompt for prompt in told)
    assert program.async_stats.citations > 0


def look(place: str) -> str:
    """A tool of an agent."""
    return f"nothing at {place}"


def agent() -> dspy.Module:
    return dspy.ReAct("question -> answer", tools=[look], max_iters=2)


@pytest.mark.parametrize("adapter", [None, dspy.JSONAdapter(), dspy.XMLAdapter()])
@pytest.mark.parametrize("make", [lambda: dspy.ChainOfThought("question -> answer"), agent])
def test_other_students_and_adapters_learn_and_are_saved(make: Any, adapter: Any, tmp_path: Path) -> None:
    operations = '[{"type": "ADD", "section": "other", "content": "Add digits."}]'
    fields = {
        "reasoning": "r", "answer": "3", "insight": "x", "operations": operations, "cited_bullets": "oth-1",
        "what_went_wrong": "", "right_approach": "", "bullet_tags": '{"oth-1": "helpful"}', "next_thought": "t",
        "next_tool_name": "finish", "next_tool_args": "{}",
    }  # fmt: skip

    def answer(prompt: str) -> str:
        if isinstance(adapter, dspy.JSONAdapter):
            return json.dumps({**fields, "next_tool_args": {}})
        if isinstance(adapter, dspy.XMLAdapter):
            return "".join(f"<{name}>{text}</{name}>" for name, text in fields.items())
        return reply_for("", **fields)

    optimizer = AsyncACE(digits, num_threads=2, max_rounds=1, epochs=3, perfect_score=0.5)
    with dspy.context(lm=fake_lm(answer), adapter=adapter, track_usage=True):
        program: Any = optimizer.compile(make(), trainset=examples("t", 2))
        assert program(question="q").answer == "3"
    stats: Any = program.async_stats
    assert (stats.samples, stats.operations["add"]) == (6, 1)
    assert stats.tags["helpful"] > 0
    assert {snapshot.score for snapshot in stats.snapshots} == {0.5}
    program.save(tmp_path / "program.json")
    make().load(tmp_path / "program.json")


def test_two_runs_at_once_do_not_mix() -> None:
    model = SimulatedModel(seed=0, reply_model=TASK.reply_model)

    async def learn(seed: int, into: dict[int, Any]) -> None:
        optimizer = AsyncACE(TASK.metric, num_threads=8, seed=seed)
        into[seed] = await optimizer.acompile(TASK.program(), trainset=TRAIN[:12], valset=VAL[:4])

    async def main() -> dict[int, Any]:
        programs: dict[int, Any] = {}
        with dspy.context(lm=model.lm()):
            async with anyio.create_task_group() as group:
                for seed in (1, 2):
                    group.start_soon(learn, seed, programs)
        return programs

    programs = run(main)
    assert [programs[seed].async_stats.samples for seed in (1, 2)] == [12, 12]
    for program in programs.values():
        assert program.playbook.render() in program.answer.signature.instructions


def test_the_initial_playbook_is_returned_where_learning_only_does_harm() -> None:
    reply = reply_for("", insight="x", operations='[{"type": "ADD", "section": "other", "content": "Harm."}]')

    def answer(prompt: str) -> str:
        if "[[ ## attempt ## ]]" in prompt or "[[ ## operations ## ]]" in prompt:
            return reply
        return reply_for(prompt, answer="0" if "Harm." in prompt else "5")

    program = learning(train=4, answer=answer, eval_every=1)
    assert (len(program.playbook), program.async_stats.best_version) == (0, 0)
    assert program.async_stats.version >= 1


def test_modules_of_the_users_own_reflect_and_curate() -> None:
    class Curates(dspy.Module):
        async def aforward(self, **inputs: Any) -> Any:
            assert inputs.keys() == {"playbook", "sections", "progress", "task", "reflection"}
            return dspy.Prediction(operations=[{"type": "ADD", "section": "other", "content": inputs["reflection"]}])

    class Reflects(dspy.Module):
        def forward(self, **inputs: Any) -> Any:
            assert inputs.keys() == {"task", "attempt", "feedback", "cited_bullets"}
            return dspy.Prediction(insight="Own words.")

    program = answered_by(lambda prompt: "", reflector=Reflects(), curator=Curates(), perfect_score=0.0)
    assert program.async_stats.operations == {"add": 1}
    assert program.async_stats.first_problems[0].detail == "oth-1: Insight: Own words."


# A stream


def adapted(stream: Any, **options: Any) -> Any:
    optimizer = AsyncACE(TASK.metric, **{"num_threads": 16, **options})
    with dspy.context(lm=SimulatedModel(seed=0, reply_model=TASK.reply_model).lm()):
        return run(lambda: optimizer.aadapt(TASK.program(), stream, window=12))


async def from_afar(count: int) -> AsyncIterator[dspy.Example]:
    for example in TASK.trainset(count):
        yield example


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_each_window_of_a_stream_is_scored_before_anything_is_learnt_from_it(schedule: Any) -> None:
    program = adapted(iter(TASK.trainset(30)), schedule=schedule)
    windows = program.async_stats.windows
    assert [(window.window, window.examples, window.scored) for window in windows] == [
        (0, 12, 12),
        (1, 12, 12),
        (2, 6, 6),
    ]
    assert windows[0].version == 0
    assert windows[0].version < windows[1].version < windows[2].version <= program.playbook.version
    assert windows[2].score > windows[0].score + 0.3
    assert program.playbook.version == program.async_stats.version, "the newest playbook is returned"


def test_an_asynchronous_stream_is_the_same() -> None:
    scores = [
        [window.score for window in adapted(make).async_stats.windows] for make in (TASK.trainset(24), from_afar(24))
    ]
    assert scores[0] == scores[1]


def test_a_stream_ends_at_the_budget_and_an_empty_one_at_once() -> None:
    assert adapted(TASK.trainset(48), max_metric_calls=40).async_stats.metric_calls <= 40
    empty = adapted([])
    assert (empty.async_stats.windows, len(empty.playbook)) == ([], 0)


def test_a_stream_whose_first_examples_all_fail_goes_on() -> None:
    def metric(gold: Any, pred: Any, *_: Any, **__: Any) -> float:
        if int(gold.question.split()[-1]) < 40:
            raise LookupError("it has no label")
        return digits(gold, pred)

    optimizer = AsyncACE(metric, num_threads=2, max_rounds=1)
    with dspy.context(lm=fake_lm(lambda prompt: reply_for(prompt, answer="3", insight="x", operations="[]"))):
        program: Any = optimizer.adapt(Chain(), iter(examples("s", 60)), window=20)
    assert [window.score > 0 for window in program.async_stats.windows] == [False, False, True]


@pytest.mark.parametrize("window", [0, -1, 1.5, True])
def test_a_window_that_is_none_is_refused(window: Any) -> None:
    with pytest.raises(ConfigurationError, match="window"):
        AsyncACE(digits).adapt(Chain(), [], window=window)


def test_a_quiet_stream_holds_up_no_limit_of_time() -> None:
    async def quiet() -> AsyncIterator[dspy.Example]:
        for example in TASK.trainset(15):
            yield example
        await anyio.sleep(10_000)

    stats: Any = adapted(quiet(), max_seconds=300).async_stats
    assert stats.seconds < 400
    assert [(window.examples, window.scored) for window in stats.windows] == [(12, 12)]
    assert stats.stop_reason == "max_seconds=300 is over"


def test_a_stream_that_raises_ends_the_run_with_what_was_learnt_from_all_before() -> None:
    async def broken() -> AsyncIterator[dspy.Example]:
        for example in TASK.trainset(15):
            yield example
        raise ConnectionError("the line is dead")

    with pytest.raises(RunAbortedError, match="ConnectionError: the line is dead") as raised:
        adapted(broken())
    assert isinstance(raised.value.__cause__, ConnectionError)
    program = raised.value.best_program
    assert [(window.examples, window.scored) for window in program.async_stats.windows] == [(12, 12), (3, 3)]
    assert len(program.playbook) > 0


def test_a_cancelled_run_waits_for_no_validation() -> None:
    model = SimulatedModel(seed=0, reply_model=TASK.reply_model)

    questions, validated = {example.question for example in VAL}, 0

    async def main() -> float:
        is_validating = anyio.Event()

        async def metric(gold: Any, pred: Any, trace: Any = None) -> Any:
            nonlocal validated
            validated += gold.question in questions
            if validated > len(VAL):  # the second playbook's
                is_validating.set()
                await anyio.sleep_forever()
            return TASK.metric(gold, pred)

        optimizer = AsyncACE(metric, num_threads=4, schedule="lockstep", eval_every=1)
        with dspy.context(lm=model.lm()):
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: optimizer.acompile(TASK.program(), trainset=TRAIN, valset=VAL))
                await is_validating.wait()
                began = anyio.current_time()
                group.cancel_scope.cancel()
        return anyio.current_time() - began

    assert run(main) < 10


# Arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": None}, "metric is None"),
        ({"max_rounds": 0}, "max_rounds is 0"),
        ({"epochs": None}, "epochs is None"),
        ({"token_budget": -1}, "token_budget is -1"),
        ({"eval_every": 1.5}, "eval_every is 1.5"),
        ({"attach": "answer"}, "attach is 'answer'"),
        ({"attach": []}, r"attach is \[\]"),
        ({"schedule": "later"}, "schedule is 'later'"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"max_metric_calls": 0}, "max_metric_calls is 0"),
        ({"max_seconds": -1.0}, "max_seconds is -1.0"),
        ({"sections": []}, "sections is"),
        ({"sections": "abc"}, "sections is"),
        ({"perfect_score": "high"}, "perfect_score is 'high'"),
        ({"reflector": object()}, "reflector is"),
        ({"count_tokens": 3}, "count_tokens is 3"),
        ({"metric_lock": 1}, "metric_lock is 1"),
        ({"curator_frequency": 0}, "curator_frequency is 0"),
        ({"no_ground_truth": "no"}, "no_ground_truth is 'no'"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AsyncACE(**{"metric": digits, **options})


def test_data_that_cannot_be_used_is_refused() -> None:
    optimizer = AsyncACE(digits)
    with pytest.raises(DataError, match="student"):
        optimizer.compile(object(), trainset=examples("t", 1))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="trainset is empty"):
        optimizer.compile(Chain(), trainset=[])
    with pytest.raises(DataError, match="stream is 3"):
        optimizer.adapt(Chain(), 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="expected a Playbook"):
        optimizer.compile(Chain(), trainset=examples("t", 1), playbook={})  # type: ignore[arg-type]


def test_what_there_is_so_far_can_be_asked_from_any_thread_while_it_runs() -> None:
    told: list[tuple[Any, Any]] = []

    def watched(example: dspy.Example, prediction: dspy.Prediction, *more: Any) -> float:
        ask = threading.Thread(target=lambda: told.append((optimizer.stats_so_far(), optimizer.best_so_far())))
        ask.start()
        ask.join()
        return digits(example, prediction)

    optimizer = AsyncACE(watched, num_threads=2, max_rounds=1)
    with dspy.context(lm=fake_lm(lambda prompt: reply_for(prompt, answer="3", insight="x", operations="[]"))):
        optimizer.compile(Chain(), trainset=examples("t", 4), valset=examples("v", 2))
    counts = [stats.metric_calls for stats, _ in told if stats is not None]
    assert len(counts) == len(told) >= 6
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]
    assert all(stats.seconds >= 0 and 0 <= stats.occupancy <= 1 for stats, _ in told if stats is not None)
    assert any(program is not None for _, program in told)
    assert all(stats.outcome == "running" and "is under way after" in repr(stats) for stats, _ in told if stats)
    assert all(program.async_stats.outcome == "running" for _, program in told if program is not None)
    after = optimizer.stats_so_far()
    assert after is not None
    assert (after.outcome, repr(after).startswith("finished after")) == ("finished", True)


def test_an_optimizer_can_be_pickled_after_a_run() -> None:
    optimizer = AsyncACE(digits, num_threads=2, max_rounds=1)
    with dspy.context(lm=fake_lm(lambda prompt: reply_for(prompt, answer="3", insight="x", operations="[]"))):
        program: Any = optimizer.compile(Chain(), trainset=examples("t", 2))
    assert optimizer.best_so_far() is not None
    stats = optimizer.stats_so_far()
    assert stats is not None
    assert stats.samples == 2
    copied = pickle.loads(pickle.dumps(optimizer))
    assert copied.best_so_far() is copied.stats_so_far() is None
    assert pickle.loads(pickle.dumps(program.playbook)) == program.playbook


def test_ctrl_c_ends_a_run_with_the_best_program_so_far_and_leaves_no_thread() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    pressed: list[int] = []

    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        pressed.append(1)
        if len(pressed) == 10:
            os.kill(os.getpid(), signal.SIGINT)
        return digits(gold, pred)

    program = learning(metric, train=4, val=2, epochs=1000)
    stats: Any = program.async_stats
    assert (stats.outcome, stats.stop_reason) == ("stopped", "interrupted by Ctrl-C")
    assert 0 < stats.samples < 4000
    assert isinstance(program.playbook, Playbook)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert left_threads() == []
