"""Playbooks and operations for property tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hypothesis import strategies as st

from dspy_flashevolve.ace.playbook import (
    MOST_EXAMPLES,
    SECTIONS,
    Add,
    Operation,
    Playbook,
    PlaybookWriter,
    Remove,
    approximate_tokens,
)
from dspy_flashevolve.observe.statistics import Problem

TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)
CONTENTS = st.sampled_from([f"Insight {number} holds." for number in range(12)])
IDS = st.builds("{}-{}".format, st.sampled_from(["str", "for", "mis", "oth"]), st.integers(0, 14))
SECTION_NAMES = st.sampled_from([*SECTIONS, "nowhere", ""])
OPERATIONS: st.SearchStrategy[Operation] = st.one_of(
    st.builds(Add, SECTION_NAMES, CONTENTS),
    st.builds(Remove, IDS),
)
TAGS = st.lists(st.tuples(IDS, st.sampled_from(["helpful", "harmful", "neutral"])), max_size=8)


def book_of(contents: list[tuple[str, str]]) -> Playbook:
    """A playbook with these (section, content) bullets."""
    playbook = Playbook()
    for section, content in contents:
        playbook = playbook.adding(section, content)
    return playbook


PLAYBOOKS = st.lists(st.tuples(st.sampled_from(SECTIONS), CONTENTS), max_size=8).map(book_of)


@dataclass
class Applied:
    """What became of a list of operations: the playbook, those that were done, why others were not, what made room."""

    playbook: Playbook
    done: list[Operation]
    problems: list[Problem]
    evicted: list[str]


def apply_operations(playbook: Playbook, operations: Iterable[Operation], token_budget: int = 10**9) -> Applied:
    """What a new writer makes of operations."""
    writer = PlaybookWriter(playbook, token_budget, approximate_tokens)
    done, problems = writer.apply(operations), writer.counts.first_problems
    evicted = [problem.detail for problem in problems if problem.kind == "over the token budget"]
    assert len(evicted) == writer.counts.evicted or len(problems) == MOST_EXAMPLES
    return Applied(writer.playbook, done, problems, evicted)
