"""Strict and loose accuracy: the eight readings, the verdict of a response, and the four shares."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads.ifbench import VERIFIERS, Verdict, accuracy, readings, verify
from tests.benchmarks.ifbench.cases import CASES

VERDICTS = st.lists(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=3), min_size=1, max_size=5)


def test_the_readings_drop_the_first_line_the_last_line_both_and_the_asterisks() -> None:
    assert list(readings("a\n*b*\nc")) == ["a\n*b*\nc", "*b*\nc", "a\n*b*", "*b*", "a\nb\nc", "b\nc", "a\nb", "b"]


@pytest.mark.parametrize("text", ["no, comma\nSTART", "Sure, here:\nSTART", "Sure, here:\nSTART\nbye, bye"])
def test_loose_forgives_a_preamble_and_a_postscript(text: str) -> None:
    verdict = verify(text, ["punctuation:no_comma"], [{}])
    assert verdict.loose == (True,)
    assert verdict.strict == (False,)
    assert verdict.met_loosely_only == ("Use no comma.",)


def test_loose_forgives_markdown() -> None:
    verdict = verify("**yes**", ["format:options", "format:no_whitespace"], [{"options": "yes/no"}, {}])
    assert verdict.loose == (True, True)


def test_each_constraint_may_be_met_by_another_reading() -> None:
    verdict = verify("a, b\nx y", ["punctuation:no_comma", "keywords:existence"], [{}, {"keywords": ["a"]}])
    assert verdict.loose == (True, True)


def test_an_empty_reading_meets_nothing() -> None:
    assert verify("one, line", ["punctuation:no_comma"], [{}]).loose == (False,)
    assert verify("", ["punctuation:no_comma"], [{}]).loose == (False,)


@given(data=st.data(), kinds=st.lists(st.sampled_from(sorted(CASES)), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_what_is_met_strictly_is_met_loosely(data: st.DataObject, kinds: list[str]) -> None:
    cases = [CASES[kind](data.draw) for kind in kinds]
    text = data.draw(st.sampled_from([text for case in cases for text in (case.good, case.bad)]))
    verdict = verify(text, kinds, [case.arguments for case in cases])
    assert all(loose >= strict for strict, loose in zip(verdict.strict, verdict.loose, strict=True))
    assert verdict.strict == tuple(
        VERIFIERS[kind](text, **case.arguments) for kind, case in zip(kinds, cases, strict=True)
    )


def test_arguments_and_kinds_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="zip"):
        verify("text", ["punctuation:no_comma"], [])


def _verdict(met: list[tuple[bool, bool]]) -> Verdict:
    return Verdict(
        tuple(strict for strict, _ in met), tuple(strict or loose for strict, loose in met), tuple("c" for _ in met)
    )


@given(given_verdicts=VERDICTS)
def test_prompts_are_met_no_more_often_than_instructions_of_one_constraint_prompts(
    given_verdicts: list[list[tuple[bool, bool]]],
) -> None:
    verdicts = [_verdict(met) for met in given_verdicts]
    found = accuracy(verdicts)
    assert found.prompt_strict <= found.prompt_loose
    assert found.instruction_strict <= found.instruction_loose
    if all(len(met) == 1 for met in given_verdicts):
        assert found.prompt_strict == found.instruction_strict
        assert found.prompt_loose == found.instruction_loose


def test_a_prompt_counts_only_if_all_its_constraints_are_met() -> None:
    found = accuracy([_verdict([(True, True), (False, True)]), _verdict([(False, False)])])
    assert (found.prompt_strict, found.prompt_loose) == (0.0, 0.5)
    assert (found.instruction_strict, found.instruction_loose) == (pytest.approx(1 / 3), pytest.approx(2 / 3))


def test_an_accuracy_needs_a_verdict() -> None:
    with pytest.raises(ValueError, match="at least one"):
        accuracy([])
