"""Every verifier accepts a text that is built to satisfy it, rejects one that is not, and takes any text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads.ifbench import APPROXIMATE, VERIFIERS, read, verify
from benchmarks.workloads.ifeval import FILES, data_folder
from tests.benchmarks.ifbench.cases import CASES

KINDS = sorted(VERIFIERS)
HUGE = (
    "word and Words, again. " * 2_000,
    "\n" * 5_000,
    "*" * 3_000,
    "[" * 3_000,
    "<" * 3_000,
    '"' * 3_000,
    "“" * 3_000,
)
ODD = ("", " ", "\n", "\x00", "\ud800", "你好。", "😀", "’’’", "...", "1.", "a\u2028b", "﷽", "e\u0301")


def rows(source: str) -> list[dict[str, Any]]:
    if not (data_folder() / FILES[source]).exists():
        pytest.skip("needs the data folder; set FLASHEVOLVE_DATA")
    return read(source)


def test_every_verifier_has_a_case() -> None:
    assert CASES.keys() == VERIFIERS.keys()
    assert len(VERIFIERS) == 58 + 25


@pytest.mark.parametrize("source", sorted(FILES))
def test_every_kind_of_the_data_has_a_verifier(source: str) -> None:
    assert {kind for row in rows(source) for kind in row["instruction_id_list"]} <= VERIFIERS.keys()


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_verifier_accepts_what_satisfies_it_and_rejects_what_does_not(kind: str, data: st.DataObject) -> None:
    case = CASES[kind](data.draw)
    assert VERIFIERS[kind](case.good, **case.arguments)
    assert not VERIFIERS[kind](case.bad, **case.arguments)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), text=st.one_of(st.text(max_size=80), st.sampled_from(ODD)))
@settings(max_examples=15, deadline=None)
def test_a_verifier_takes_any_text(kind: str, data: st.DataObject, text: str) -> None:
    arguments = CASES[kind](data.draw).arguments
    assert isinstance(VERIFIERS[kind](text, **arguments), bool)
    assert VERIFIERS[kind].describe(**arguments).strip()


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=1, deadline=None)
def test_a_verifier_takes_a_huge_text(kind: str, data: st.DataObject) -> None:
    arguments = CASES[kind](data.draw).arguments
    assert all(isinstance(VERIFIERS[kind](text, **arguments), bool) for text in HUGE)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=3, deadline=None)
def test_an_empty_response_meets_nothing(kind: str, data: st.DataObject) -> None:
    assert not VERIFIERS[kind](" \n", **CASES[kind](data.draw).arguments)


@pytest.mark.parametrize("source", sorted(FILES))
@given(text=st.one_of(st.text(max_size=60), st.sampled_from(ODD)))
@settings(max_examples=3, deadline=None)
def test_every_row_of_the_data_can_be_verified(source: str, text: str) -> None:
    for row in rows(source):
        verdict = verify(text, row["instruction_id_list"], row["kwargs"])
        assert len(verdict.strict) == len(row["kwargs"])
        assert all(loose >= strict for strict, loose in zip(verdict.strict, verdict.loose, strict=True))
        assert all(verdict.constraints)


def test_what_is_approximate_is_said() -> None:
    assert {"words:odd_even_syllables", "words:start_verb", "sentence:increment"} <= APPROXIMATE.keys()
    assert APPROXIMATE.keys() < VERIFIERS.keys()
