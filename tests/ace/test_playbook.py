"""The playbook as data: ids, sections, counters, text and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.ace.playbook import CLOSING, OPENING, Bullet, Playbook, attached, cleaned
from dspy_flashevolve.engine.errors import ConfigurationError
from tests.ace.books import PLAYBOOKS, TAGS, TEXTS

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["sections", "bullets", "next_number", "version", "id", "section", "content"]), inner
        ),
    ),
    max_leaves=12,
)


@given(PLAYBOOKS, TAGS)
def test_what_is_saved_is_loaded(playbook: Playbook, tags: list[tuple[str, str]]) -> None:
    tagged = playbook.tagged(tags)  # pyright: ignore[reportArgumentType]
    assert Playbook.from_dict(json.loads(json.dumps(tagged.to_dict()))) == tagged


def test_a_file_holds_the_playbook_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    playbook = Playbook(sections=("a b", "c")).adding("c", "Grüße\nzwei").tagged([("c-1", "harmful")])
    playbook.save(tmp_path / "book.json")
    playbook.save(tmp_path / "book.json")
    assert Playbook.load(tmp_path / "book.json") == playbook
    assert [path.name for path in tmp_path.iterdir()] == ["book.json"]


@given(st.one_of(JSON, st.builds(dict, bullets=st.lists(JSON), sections=JSON, next_number=JSON, version=JSON)))
def test_whatever_else_a_file_holds_is_refused_by_name(data: object) -> None:
    try:
        playbook = Playbook.from_dict(data)
    except ConfigurationError:
        return
    assert playbook.to_dict() == data


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_json_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "book.json").write_bytes(text)
    with pytest.raises(ConfigurationError, match="holds no JSON"):
        Playbook.load(tmp_path / "book.json")


@pytest.mark.parametrize(
    "sections", [(), ("",), ("a", "A"), ("1st",), ("x" * 61,), ("a\nb",), "strategies", (3,), ("a ",)]
)
def test_sections_that_cannot_be_names_are_refused(sections: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="section"):
        Playbook(sections=sections)


@pytest.mark.parametrize(
    "bullet",
    [
        Bullet("oth-1", "nowhere", "x"),
        Bullet("oth-2", "other", "x"),
        Bullet("other", "other", "x"),
        Bullet("oth-1", "other", ""),
        Bullet("oth-1", "other", " x"),
        Bullet("oth-1", "other", f"x{CLOSING}"),
        Bullet("oth-1", "other", "x", helpful=-1),
        Bullet("oth-1", "other", "x", created_version=4),
    ],
)
def test_a_bullet_that_cannot_be_is_refused(bullet: Bullet) -> None:
    with pytest.raises(ConfigurationError, match="bullet"):
        Playbook(bullets=(bullet,), next_number=2, version=3)


def test_a_text_of_the_users_that_speaks_of_playbooks_is_left_alone() -> None:
    text = f"Write {OPENING} tags {CLOSING}."
    assert attached(text, "") == text
    assert Playbook.from_instructions(text) is None


@given(PLAYBOOKS.map(lambda book: book.tagged([("oth-2", "helpful"), ("str-1", "harmful")])))
def test_instructions_keep_ids_counters_texts_and_the_next_number(playbook: Playbook) -> None:
    read = Playbook.from_instructions(attached("Answer.", playbook.render()))
    assert read is None or (read.next_number, read.render()) == (playbook.next_number, playbook.render())
    assert (read is None) == (not playbook.bullets)


LEARNT = Playbook().adding("formulas", "a = b").adding("strategies", "Think.\nTwice.").tagged([("for-1", "harmful")])


def test_markdown_has_a_heading_a_section_and_an_item_a_bullet() -> None:
    assert LEARNT.to_markdown().splitlines() == [
        "# Playbook",
        "",
        "## Strategies",
        "",
        "- Think.",
        "  Twice. *(str-2: helped 0, harmed 0)*",
        "",
        "## Formulas",
        "",
        "- a = b *(for-1: helped 0, harmed 1)*",
    ]
    assert Playbook().to_markdown() == "# Playbook\n"


@given(TEXTS)
def test_no_content_can_close_the_playbook_or_open_another(text: str) -> None:
    for trick in (text, f"<play{CLOSING}book>{text}", f"</ PLAYBOOK >{text}", f"{text}<{OPENING}/playbook>"):
        content = cleaned(trick)
        assert cleaned(content) == content
        if content:
            rendered = Playbook().adding("other", content).render()
            assert rendered.count(OPENING) == rendered.count(CLOSING) == 1
