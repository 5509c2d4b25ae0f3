"""Sentences, tokens, words, syllables, verbs, emojis and languages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads.ifbench import lexicon
from benchmarks.workloads.ifbench.languages import is_in
from benchmarks.workloads.ifbench.lexicon import may_be_verb, syllables
from benchmarks.workloads.ifbench.text import bare_words, is_emoji, plain, sentences, tokens
from tests.benchmarks.ifbench.cases import LANGUAGES

PIECES = st.sampled_from(
    ["a", "The", "it", ". ", "... ", "? ", "! ", " ", "\n", '"', "'", ")", "(", "*", "1", "23", "Dr", "U.S", "Bob", "J",
     ",", "-", "--", ";", ":", ". ", "can't", "It's"]
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("Mr. Fox met Dr. X. Bell at 3.30 p.m. today.", ["Mr. Fox met Dr. X. Bell at 3.30 p.m. today."]),
        ("They left the U.S. The end.", ["They left the U.S.", "The end."]),
        ('"Stop!" she said. (He left.)', ['"Stop!"', "she said.", "(He left.)"]),
        ("1. First item.\n2. Second item.", ["1.", "First item.", "2.", "Second item."]),
        ("It was no. 1. then 2000", ["It was no.", "1. then 2000"]),
        ("A heading\n\nAnd text", ["A heading\n\nAnd text"]),
        ("Wait... what? Well... The end!!! So ", ["Wait... what?", "Well...", "The end!!!", "So"]),
        ("Fine. 😀 More! 🎉", ["Fine.", "😀 More!", "🎉"]),
        ("**Bold.** Plain.", ["**Bold.", "** Plain."]),
        ("", []),
    ],
)
def test_sentences_end_at_a_mark_before_a_space_and_not_after_an_abbreviation(text: str, found: list[str]) -> None:
    assert sentences(text) == found


@given(st.one_of(st.text(max_size=200), st.lists(PIECES, max_size=30).map("".join)))
def test_sentences_lose_nothing_but_spaces(text: str) -> None:
    assert "".join("".join(sentences(text)).split()) == "".join(text.split())


@given(st.lists(PIECES, max_size=30).map("".join))
def test_sentences_are_those_of_nltk_with_our_abbreviations(text: str) -> None:
    punkt = pytest.importorskip("nltk.tokenize.punkt")
    parameters = punkt.PunktParameters()
    parameters.abbrev_types = set(lexicon.ABBREVIATIONS)
    parameters.ortho_context.update(dict.fromkeys(lexicon.STOP_WORDS, punkt._ORTHO_BEG_UC + punkt._ORTHO_MID_LC))
    expected = punkt.PunktSentenceTokenizer(parameters).tokenize(text.strip())  # it keeps the spaces before the first
    assert sentences(text) == [sentence for sentence in expected if sentence]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It's Bob's: don't!", ["It", "'s", "Bob", "'s", ":", "do", "n't", "!"]),
        ("You cannot say 'tis 3,000 at 3:30.", ["You", "can", "not", "say", "'", "tis", "3,000", "at", "3:30", "."]),
        ("One. Two (2.5%)...", ["One", ".", "Two", "(", "2.5", "%", ")", "..."]),
        ("well-known — “quoted”", ["well-known", "—", "“", "quoted", "”"]),
    ],
)
def test_tokens_are_words_clitics_and_marks(text: str, found: list[str]) -> None:
    assert tokens(text) == found


def test_bare_words_have_no_marks_and_plain_text_no_accents() -> None:
    assert bare_words("It's - well-known, 3.5%!") == ["Its", "wellknown", "35"]
    assert plain("São Tomé “x”") == "Sao Tome x"


@pytest.mark.parametrize(
    ("word", "count"),
    [("a", 1), ("the", 1), ("science", 2), ("beautiful", 3), ("boxes", 2), ("makes", 1), ("little", 2),
     ("university", 5), ("7", 0), ("rhythm", 1)],
)  # fmt: skip
def test_syllables_of_common_words(word: str, count: int) -> None:
    assert syllables(word) == count


def test_verbs_are_known_in_their_forms() -> None:
    assert all(map(may_be_verb, ["Consider", "considers", "tried", "stopping", "making", "has", "Whirring", "Nestled"]))
    assert not any(map(may_be_verb, ["the", "sadly", "ring", "nothing", "red", "should"]))


def test_emojis_are_no_letters_marks_joiners_or_halves_of_flags() -> None:
    assert all(map(is_emoji, "😀🎉❤✨⭐⌚✅©"))
    assert not any(map(is_emoji, "aé.!1*#日ー—“🇫\u200d\ufe0f"))


def test_emojis_are_those_of_the_package() -> None:
    emoji = pytest.importorskip("emoji")
    assert {character for character in emoji.EMOJI_DATA if len(character) == 1} <= lexicon.EMOJIS


@pytest.mark.parametrize("language", sorted(LANGUAGES))
def test_a_text_is_in_its_language_only(language: str) -> None:
    assert [other for other in sorted(LANGUAGES) if is_in(LANGUAGES[language], other)] == [language]


def test_names_in_another_script_are_no_harm() -> None:
    assert is_in("मेरा नाम John है और मैं दिल्ली में रहता हूँ।", "hi")


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(ValueError, match="'tlh' is unknown"):
        is_in("nuqneH", "tlh")
