"""Our rules for IFEval's kinds agree with lm-eval's, where that package and what it imports are installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads.ifbench import VERIFIERS
from benchmarks.workloads.ifbench.ifeval_kinds import WANTED
from tests.benchmarks.ifbench.cases import CASES

# Theirs need nltk's downloaded data, guess a language by chance, or draw a letter of their own for a mark.
LEFT_OUT = {
    "length_constraints:number_sentences", "change_case:capital_word_frequency", "change_case:english_lowercase",
    "change_case:english_capital", "keywords:letter_frequency",
}  # fmt: skip


@pytest.fixture(scope="module")
def theirs() -> Callable[[str, str, dict[str, Any]], bool]:
    """lm-eval's verdict of a kind, a response and arguments."""
    nltk = pytest.importorskip("nltk")
    pytest.importorskip("lm_eval")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nltk, "download", lambda *_, **__: True)
        registry = pytest.importorskip("lm_eval.tasks.ifeval.instructions_registry")

    def follows(kind: str, response: str, arguments: dict[str, Any]) -> bool:
        instruction = registry.INSTRUCTION_DICT[kind](kind)
        instruction.build_description(**arguments)
        return bool(response.strip()) and bool(instruction.check_following(response))

    return follows


@pytest.mark.parametrize("kind", sorted(WANTED.keys() - LEFT_OUT))
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_ours_agree_with_theirs(
    theirs: Callable[[str, str, dict[str, Any]], bool], kind: str, data: st.DataObject
) -> None:
    case = CASES[kind](data.draw)
    text = data.draw(st.sampled_from([case.good, case.bad, f"{case.good}\n{case.bad}", f"Sure!\n\n{case.good}"]))
    assert VERIFIERS[kind](text, **case.arguments) == theirs(kind, text, case.arguments)
