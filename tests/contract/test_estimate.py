"""What a run may cost, before it."""

from __future__ import annotations

from typing import Any

import dspy
import pytest

from dspy_flashevolve import AsyncGEPA, DataError, RunAbortedError
from tests.contract.surface import TRAIN, VAL, optimizer, priced, raising
from tests.fakes import Chain, digits, examples, fake_lm, reflection_lm, reply_for, task_lm


def estimated(calls: int | None = 150, student: Any = None, **options: Any) -> Any:
    return optimizer(calls, **options).estimate(student or Chain(), trainset=TRAIN, valset=VAL)


def test_an_estimate_has_the_calls_tokens_and_dollars_of_the_program_and_of_reflections() -> None:
    reflection = priced(reflection_lm())
    with dspy.context(lm=priced(task_lm())):
        found = estimated(150, Chain(2), reflection_lm=reflection)
    assert found.metric_calls == 150
    assert (found.metric_call.calls, found.metric_call.prompt_tokens, found.metric_call.completion_tokens) == (2, 6, 8)
    assert found.metric_call.dollars == pytest.approx(22e-6)
    assert found.task.prompt_tokens == pytest.approx(900)
    assert found.task.dollars == pytest.approx(150 * 22e-6)
    assert found.reflections == (150 - len(VAL)) // 3
    assert found.reflection.calls == 1
    assert found.reflecting.completion_tokens == 4 * found.reflections


def test_a_run_makes_no_more_calls_than_was_estimated() -> None:
    """The fakes' calls have the same tokens each, however long the prompt."""
    with dspy.context(lm=priced(task_lm())):
        one = optimizer(90, reflection_lm=priced(reflection_lm()))
        found = one.estimate(Chain(), trainset=TRAIN, valset=VAL)
        stats = one.compile(Chain(), trainset=TRAIN, valset=VAL).async_stats
    assert stats.task_tokens <= found.task.prompt_tokens + found.task.completion_tokens
    assert stats.reflection_calls <= found.reflections
    assert stats.cost_dollars <= found.task.dollars + found.reflecting.dollars


def test_it_costs_a_minibatch_and_a_reflection_and_changes_nothing() -> None:
    task, reflection = task_lm(), reflection_lm()
    with dspy.context(lm=task):
        one = AsyncGEPA(digits, auto="light", reflection_lm=reflection, reflection_minibatch_size=2)
        student = Chain()
        student.steps[0].lm = own = task_lm()
        found = one.estimate(student, trainset=TRAIN, valset=VAL)
    assert found.measured == 2
    assert (task.engine.calls, own.engine.calls, reflection.engine.calls) == (0, 2, 1)
    assert one.max_metric_calls is None, "auto counts them when compile begins"
    assert found.metric_calls > 100
    assert student.steps[0].lm is own


def test_without_a_number_it_measures_as_many_examples_as_a_reflection_of_the_run_reads() -> None:
    trainset = examples("t", 40)
    with dspy.context(lm=task_lm()):
        asks = AsyncGEPA(digits, max_metric_calls=2 * len(VAL) + 24 * 7, reflection_lm=reflection_lm())
        assert asks.estimate(Chain(), trainset=trainset, valset=VAL).measured == 7
        asks = AsyncGEPA(digits, max_seconds=60, reflection_lm=reflection_lm())
        assert asks.estimate(Chain(), trainset=trainset, valset=VAL).measured == 12


def test_what_dspys_cache_has_is_asked_for_again() -> None:
    task = task_lm()
    task.cache = True
    with dspy.context(lm=task):
        for example in TRAIN:
            Chain()(**example.inputs())
        asked = task.engine.calls
        Chain()(**TRAIN[0].inputs())
        assert task.engine.calls == asked
        found = estimated()
    assert found.metric_call.calls == 1
    assert found.metric_call.prompt_tokens == 3


def test_an_unknown_price_and_an_open_end_say_unknown() -> None:
    reflection = reflection_lm()
    reflection.model = "nobody-has-a-price-for-this"
    with dspy.context(lm=priced(task_lm())):
        found = estimated(None, max_seconds=60, reflection_lm=reflection)
    assert (found.metric_calls, found.task, found.reflections, found.reflecting) == (None, None, None, None)
    assert found.metric_call.dollars == pytest.approx(11e-6)
    assert found.reflection.dollars is None
    said = repr(found)
    assert "what nobody-has-a-price-for-this costs" in said
    assert said.count("unknown") == 9
    with dspy.context(lm=priced(task_lm())):
        assert estimated(150, max_reflection_calls=5).reflections == 5


def test_what_ends_a_run_ends_an_estimate() -> None:
    with dspy.context(lm=raising(lambda number: dspy.LMAuthError("no such key"))), pytest.raises(RunAbortedError):
        estimated()
    with dspy.context(lm=task_lm()), pytest.raises(DataError, match="trainset"):
        optimizer().estimate(Chain(), trainset=[])


def test_a_reflection_that_cannot_be_read_is_paid_for_and_counts() -> None:
    gibberish = fake_lm(lambda prompt: reply_for(prompt, nothing="of use"))
    with dspy.context(lm=task_lm()):
        assert estimated(reflection_lm=gibberish).reflection.calls >= 1
