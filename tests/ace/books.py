"""Playbooks and operations for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from dspy_flashevolve.ace.operations import Add, Merge, Operation, Remove, Update
from dspy_flashevolve.ace.playbook import SECTIONS, Playbook

TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)
CONTENTS = st.sampled_from([f"Insight {number} holds." for number in range(12)])
IDS = st.builds("{}-{}".format, st.sampled_from(["str", "for", "mis", "oth"]), st.integers(0, 14))
SECTION_NAMES = st.sampled_from([*SECTIONS, "nowhere", ""])
OPERATIONS: st.SearchStrategy[Operation] = st.one_of(
    st.builds(Add, SECTION_NAMES, CONTENTS),
    st.builds(Update, IDS, CONTENTS),
    st.builds(Merge, st.lists(IDS, min_size=2, max_size=4, unique=True).map(tuple), CONTENTS),
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
