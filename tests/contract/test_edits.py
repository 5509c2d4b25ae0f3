"""Edits, screens and consolidation through AsyncGEPA: what a run does with a reflection LM that writes edits.

The LM is a fake behind ``dspy.LM``: each rule that stands in a prompt makes the task model better.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import dspy
import pytest
from gepa.strategies.proposal_sampling import SameParentSampling

from dspy_flashevolve import AsyncGEPA
from tests.contract.surface import check_ends, check_winner, evolved, priced
from tests.contract.test_replies import field, reply, rules_in, task_lm
from tests.fakes import AsyncFakeEngine, Chain, FakeEngine, examples, fake_lm

TRAIN, VAL = examples("t", 24), examples("v", 10)


def score(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
    return dspy.Prediction(score=float(pred.answer.split()[0]), feedback="Add rules.")


class Reflection:
    """Adds a new rule with each reflection; ``consolidates`` makes the reply to a grown prompt."""

    def __init__(self, consolidates: Callable[[str], str], adds: Callable[[int], str] = "- rule {}".format) -> None:
        self._rules, self._consolidates, self._adds = itertools.count(1), consolidates, adds
        self.consolidated: list[str] = []

    def __call__(self, prompt: str) -> str:
        if "`consolidated`" in prompt or "<consolidated>" in prompt:
            self.consolidated.append(self._consolidates(field(prompt, "instruction")))
            return reply(prompt, consolidated=self.consolidated[-1])
        return reply(prompt, edits=[{"action": "add", "part": 1, "text": self._adds(next(self._rules)), "reason": ""}])


def compiled(
    reflection: Callable[[str], str],
    calls: int = 79,
    model_name: str = "fake/model",
    predictors: int = 1,
    **options: Any,
) -> Any:
    options = {"reflection_lm": fake_lm(reflection), **options}
    answers = task_lm(0)
    options["reflection_lm"].model = answers.model = model_name
    optimizer = AsyncGEPA(score, max_metric_calls=calls, num_threads=8, track_stats=True, **options)
    program = evolved(optimizer, Chain(predictors), TRAIN, VAL, {"lm": answers})
    check_ends(program.async_stats)
    check_winner(program.detailed_results, len(VAL))
    return program


def text_of(program: Any) -> str:
    return program.named_predictors()[0][1].signature.instructions


def tidy(text: str) -> str:
    return "Answer.\n\n## Rules\n" + "\n".join(f"- {rule}" for rule in sorted(rules_in(text)))


@pytest.mark.parametrize("calls", [79, pytest.param(130, marks=pytest.mark.long)])
def test_a_prompt_that_has_grown_is_written_anew_and_the_clean_text_is_returned_where_both_score_alike(
    calls: int,
) -> None:
    """With 79 calls the budget pays one last validation, else two."""
    reflection = Reflection(tidy)
    program = compiled(reflection, calls)
    assert reflection.consolidated
    assert text_of(program).startswith("Answer.\n\n## Rules\n- rule")
    scores = program.detailed_results.val_aggregate_scores
    assert max(scores) > scores[0]
    alike = [
        made for made in program.detailed_results.candidates if rules_in(text_of(made)) == rules_in(text_of(program))
    ]
    assert len(alike) == 1, "the grown text, which is no better, is no candidate"


def test_children_that_help_join_without_a_screen_and_all_calls_buy_reflections() -> None:
    program = compiled(Reflection(tidy))
    stats = program.async_stats
    unscreened = sum(n for reason, n in stats.end_reasons.items() if reason.startswith("its edits are in the head"))
    assert unscreened > stats.proposals / 3
    assert not [reason for reason in stats.end_reasons if "tested" in reason]


def examples_read(reflects_whole: bool = False, **options: Any) -> list[int]:
    """How many examples each reflection was shown; one that is asked for the whole text adds a rule to it."""
    reflection, shown = Reflection(tidy), list[int]()

    def reflect(prompt: str) -> str:
        if "`edits`" in prompt or reflects_whole:
            shown.append(prompt.count("Add rules."))
        if reflects_whole:
            text = field(prompt, "current_instruction")
            return reply(prompt, new_instruction=f"{text}\n- rule {len(shown)}")
        return reflection(prompt)

    compiled(reflect, **options)
    return shown


@pytest.mark.long
def test_a_reflection_reads_as_many_examples_as_the_budget_pays_twelve_reflections_of() -> None:
    """Beside two validations of ten examples each; a step costs its minibatch twice."""
    assert max(examples_read(calls=20 + 12 * 2 * 5)) == 5  # the last minibatch of an epoch may be smaller
    assert set(examples_read(calls=80)) == {3}, "never fewer than three"
    assert set(examples_read(calls=900, max_reflection_calls=3)) == {12}, "at most half of the 24 training examples"
    assert set(examples_read(calls=900, max_reflection_calls=3, reflection_minibatch_size=4)) == {4}, (
        "what the user says holds"
    )
    sampling = {"sampling_strategy": SameParentSampling(2)}
    assert set(examples_read(calls=120, gepa_kwargs=sampling)) == {3}, "so does a strategy of the user's"
    assert set(examples_read(calls=120, schedule="lockstep", reflects_whole=True)) == {3}


def test_each_of_several_predictors_gets_twelve_reflections_before_one_of_them_reads_more_examples() -> None:
    calls = 20 + 12 * 2 * 6
    assert max(examples_read(calls=calls)) == 6
    assert max(examples_read(calls=calls, predictors=2)) == 3
    assert max(examples_read(calls=calls, predictors=2, component_selector="all")) == 6, "both with every minibatch"


def test_children_that_do_not_help_are_screened_to_the_end() -> None:
    program = compiled(Reflection(tidy, adds="- hint {}".format))
    stats = program.async_stats
    assert stats.proposals > 5
    assert not [reason for reason in stats.end_reasons if reason.startswith("its edits are in the head")]


class SlowEngine(AsyncFakeEngine):
    """Takes a minute for each reply, and notes when it was asked."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        super().__init__(FakeEngine(answer))
        self.asked: list[float] = []

    async def complete(self, request: Any) -> Any:
        self.asked.append(anyio.current_time())
        await anyio.sleep(60)
        return await super().complete(request)


def test_with_a_slow_reflection_lm_eight_reflections_are_under_way_within_seconds() -> None:
    """60 seconds a reflection, 32 slots, a budget for 600 metric calls; rollouts take no time here."""
    engine, answer = SlowEngine(Reflection(tidy)), Reflection(tidy)
    lm = dspy.LM("fake/slow", engine=FakeEngine(answer), async_engine=engine, cache=False, num_retries=0)
    optimizer = AsyncGEPA(score, max_metric_calls=600, max_seconds=10, reflection_lm=lm, num_threads=32, seed=0)
    evolved(optimizer, Chain(1), TRAIN, VAL, {"lm": task_lm(0)})
    assert sum(seconds < 10 for seconds in engine.asked) >= 8, "virtual time begins with the run"


def test_no_text_is_written_anew_once_max_cost_is_spent() -> None:
    priced(fake_lm(str))
    asked: dict[float, list[str]] = {}
    for dollars in (6e-4, 1.0):
        reflection = Reflection(tidy)
        program = compiled(reflection, model_name="priced", max_cost=dollars)
        assert len(rules_in(text_of(program))) > 3, "the last head has grown"
        asked[dollars] = reflection.consolidated
    assert not asked[6e-4]
    assert asked[1.0]


def test_a_run_that_was_left_while_its_last_head_is_written_anew_validates_that_head_when_it_goes_on(
    tmp_path: Path,
) -> None:
    """The new text loses all that was learnt, so that only the head is worth anything."""
    leaves = [True]

    def rewrites(text: str) -> str:
        if leaves.pop() if leaves else False:
            raise SystemExit
        return "Answer."

    reflection = Reflection(rewrites)
    with pytest.raises(SystemExit):
        compiled(reflection, calls=79, log_dir=str(tmp_path))
    program = compiled(reflection, calls=79, log_dir=str(tmp_path))
    assert reflection.consolidated, "it was asked for again"
    assert len(rules_in(text_of(program))) > 3


def test_where_one_predictor_gets_no_feedback_the_others_are_reflected_on() -> None:
    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        if pred_name == "steps[1]":
            raise LookupError("no feedback on this predictor")
        return dspy.Prediction(score=float(pred.answer.split()[-1]), feedback="Add rules.")

    optimizer = AsyncGEPA(
        metric, max_metric_calls=60, reflection_lm=fake_lm(Reflection(tidy)), num_threads=8,
        component_selector="all", track_stats=True,
    )  # fmt: skip
    program = evolved(optimizer, Chain(2), TRAIN, VAL, {"lm": task_lm(0)})
    assert program.async_stats.proposals > 3
