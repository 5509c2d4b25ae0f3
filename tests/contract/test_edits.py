"""Edits, screens and consolidation through AsyncGEPA: what a run does with a reflection LM that writes edits.

The LM is a fake behind ``dspy.LM``: each rule that stands in a prompt makes the task model better.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import anyio
import dspy
import pytest
from gepa.strategies.proposal_sampling import SameParentSampling

from dspy_flashevolve import AsyncGEPA
from dspy_flashevolve.sim.virtual import run
from tests.contract.surface import check_ends, check_winner
from tests.contract.test_replies import field, reply, rules_in, task_lm
from tests.fakes import CUT_OFF, AsyncFakeEngine, Chain, FakeEngine, examples, fake_lm

TRAIN, VAL = examples("t", 24), examples("v", 10)


def score(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
    return dspy.Prediction(score=float(pred.answer), feedback="Add rules.")


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


def compiled(reflection: Callable[[str], str], calls: int = 130, **options: Any) -> Any:
    options = {"reflection_lm": fake_lm(reflection), **options}
    optimizer = AsyncGEPA(score, max_metric_calls=calls, num_threads=8, track_stats=True, **options)

    async def main() -> Any:
        with dspy.context(lm=task_lm(0)):
            return await optimizer.acompile(Chain(1), trainset=TRAIN, valset=VAL)

    program = run(main)
    check_ends(program.async_stats)
    check_winner(program.detailed_results, len(VAL))
    return program


def text_of(program: Any) -> str:
    return program.named_predictors()[0][1].signature.instructions


def tidy(text: str) -> str:
    return "Answer.\n\n## Rules\n" + "\n".join(f"- {rule}" for rule in sorted(rules_in(text)))


def test_a_prompt_that_has_grown_is_written_anew_and_the_clean_text_is_returned_where_both_score_alike() -> None:
    reflection = Reflection(tidy)
    program = compiled(reflection)
    assert reflection.consolidated
    assert text_of(program).startswith("Answer.\n\n## Rules\n- rule")
    scores = program.detailed_results.val_aggregate_scores
    assert max(scores) > scores[0]
    alike = [
        made for made in program.detailed_results.candidates if rules_in(text_of(made)) == rules_in(text_of(program))
    ]
    assert len(alike) == 1, "the grown text, which is no better, is no candidate"


@pytest.mark.parametrize("consolidates", [lambda text: "Answer.", lambda text: "", lambda text: "rule " * 9999])
@pytest.mark.parametrize("calls", [79, 130])
def test_a_consolidation_that_loses_what_was_learnt_is_not_returned(
    consolidates: Callable[[str], str], calls: int
) -> None:
    """With 79 calls the budget pays one last validation, else two."""
    reflection = Reflection(consolidates)
    program = compiled(reflection, calls)
    assert reflection.consolidated
    assert len(rules_in(text_of(program))) > 3
    assert text_of(program) not in map(str.strip, reflection.consolidated)


def test_children_that_help_join_without_a_screen_and_all_calls_buy_reflections() -> None:
    program = compiled(Reflection(tidy), calls=300)
    stats = program.async_stats
    unscreened = sum(n for reason, n in stats.end_reasons.items() if reason.startswith("its edits are in the head"))
    assert unscreened > 5
    assert not [reason for reason in stats.end_reasons if "tested" in reason]


def examples_read(**options: Any) -> list[int]:
    """How many examples each reflection was shown."""
    reflection, shown = Reflection(tidy), list[int]()

    def reflect(prompt: str) -> str:
        if "`edits`" in prompt:
            shown.append(prompt.count("Add rules."))
        return reflection(prompt)

    compiled(reflect, **options)
    return shown


def test_where_nearly_all_children_help_a_reflection_reads_eight_examples_and_else_three() -> None:
    shown = examples_read()
    assert shown[0] == 3
    assert set(shown) == {3, 8}
    assert set(examples_read(reflection_minibatch_size=4)) == {4}, "what the user says holds"
    sampling = {"sampling_strategy": SameParentSampling(2)}
    assert set(examples_read(calls=200, gepa_kwargs=sampling)) == {3}, "so does a strategy of the user's"


def test_children_that_do_not_help_are_screened_to_the_end() -> None:
    program = compiled(Reflection(tidy, adds="- hint {}".format), calls=150)
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
    """60 seconds a reflection, 32 slots, 600 metric calls; rollouts take no time here."""
    engine, answer = SlowEngine(Reflection(tidy)), Reflection(tidy)
    lm = dspy.LM("fake/slow", engine=FakeEngine(answer), async_engine=engine, cache=False, num_retries=0)
    optimizer = AsyncGEPA(score, max_metric_calls=600, reflection_lm=lm, num_threads=32, seed=0)
    began: list[float] = []

    async def main() -> Any:
        began.append(anyio.current_time())
        with dspy.context(lm=task_lm(0)):
            return await optimizer.acompile(Chain(1), trainset=TRAIN, valset=VAL)

    run(main)
    assert sum(seconds - began[0] < 10 for seconds in engine.asked) >= 8


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_reflection_that_was_cut_off_is_no_candidate_and_the_reason_says_what_to_do(asynchronous: bool) -> None:
    numbers = itertools.count(1)

    def half(prompt: str) -> str:
        return reply(prompt, edits=[], new_instruction=f"- rule {next(numbers)}. And a rule that en") + CUT_OFF

    program = compiled(half, reflection_lm=fake_lm(half, asynchronous=asynchronous))
    assert len(program.detailed_results.candidates) == 1
    reasons = " ".join(program.async_stats.end_reasons)
    assert "was cut off at its longest length. Give that LM more max_tokens" in reasons


def test_a_few_replies_that_are_cut_off_cost_their_steps_and_nothing_else() -> None:
    writes, numbers = Reflection(lambda text: text), itertools.count(1)
    program = compiled(lambda prompt: writes(prompt) + (CUT_OFF if next(numbers) % 4 == 0 else ""))
    assert program.async_stats.outcome == "finished"
    assert len(rules_in(text_of(program))) > 2


def test_a_prompt_written_anew_that_was_cut_off_is_not_validated() -> None:
    reflection = Reflection(lambda text: f"Half of {text[:20]}")
    program = compiled(lambda prompt: reflection(prompt) + (CUT_OFF if "consolidated" in prompt else ""))
    assert reflection.consolidated
    assert not any("Half of" in text_of(candidate) for candidate in program.detailed_results.candidates)
