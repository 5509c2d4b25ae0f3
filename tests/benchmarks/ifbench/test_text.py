"""Sentences, words, nesting, syllables, verbs and languages, as a reader would see them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads.ifbench.languages import is_in
from benchmarks.workloads.ifbench.lexicon import may_be_verb, syllables
from benchmarks.workloads.ifbench.nesting import bracket_depth, quote_depth
from benchmarks.workloads.ifbench.text import is_emoji, paragraphs, sentences, without_fence, words
from tests.benchmarks.ifbench.cases import LANGUAGES


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two! Three?", 3),
        ("Mr. Fox ate, e.g. eggs, at 3.30.", 1),
        ('"Stop!" she said. "Why?" He left.', 3),
        ("1. First item.\n2. Second item.", 2),
        ("It was 1999. Then came 2000.", 2),
        ("A heading\n\nAnd text without a mark", 2),
        ("Wait... what? Yes!!!", 3),
        ("Fine. 😀 More! 🎉", 2),
        ("", 0),
    ],
)
def test_sentences_are_counted_as_a_reader_would(text: str, count: int) -> None:
    assert len(sentences(text)) == count


@given(st.text(max_size=200))
def test_sentences_lose_no_word(text: str) -> None:
    assert [word for sentence in sentences(text) for word in words(sentence)] == words(text)


def test_a_sentence_keeps_the_emoji_after_its_mark() -> None:
    assert sentences("One. 😀 Two! 👩‍🚀") == ["One. 😀", "Two! 👩‍🚀"]


def test_paragraphs_and_fences() -> None:
    assert paragraphs("a\nb\n \nc\n\n\nd") == ["a\nb", "c", "d"]
    assert without_fence("x ```y```") == "x ```y```"


@given(st.integers(0, 12))
def test_brackets_are_as_deep_as_they_are_nested(depth: int) -> None:
    assert bracket_depth("(" * depth + "x" + ")" * depth) == depth
    assert bracket_depth("(" * depth + "x" + ")" * depth + "[{}]") == max(depth, 2)


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        ("It's the dogs' dinner", 0),
        ("\"one 'two' one\"", 2),
        ("“one ‘two “three” two’ one”", 3),
        ("'one \"two 'three' two\" one'", 3),
        ("\"open 'shut' and \n\n 'new'\"", 1),
        ('"""', 0),
    ],
)
def test_quotes_are_as_deep_as_they_are_nested(text: str, depth: int) -> None:
    assert min(quote_depth(text), 3) == (depth if text != '"""' else quote_depth(text))


@pytest.mark.parametrize(
    ("word", "count"),
    [("a", 1), ("the", 1), ("science", 2), ("beautiful", 3), ("walked", 1), ("boxes", 2), ("makes", 1), ("little", 2),
     ("university", 5), ("I'm", 1), ("7", 1), ("rhythm", 1)],
)  # fmt: skip
def test_syllables_of_common_words(word: str, count: int) -> None:
    assert syllables(word) == count


def test_verbs_are_known_in_their_forms() -> None:
    assert all(map(may_be_verb, ["Consider", "considers", "tried", "stopping", "making", "has", "Don’t"]))
    assert not any(map(may_be_verb, ["the", "sadly", "ring", "nothing", "red"]))


def test_emojis_are_no_letters_or_marks() -> None:
    assert all(map(is_emoji, "😀🎉❤🇫✨⭐⌚✅"))
    assert not any(map(is_emoji, "aé.!1*#日ー—“"))


@pytest.mark.parametrize("language", sorted(LANGUAGES))
def test_a_text_is_in_its_language_only(language: str) -> None:
    assert [other for other in sorted(LANGUAGES) if is_in(LANGUAGES[language], other)] == [language]


def test_names_in_another_script_are_no_harm() -> None:
    assert is_in("मेरा नाम John है और मैं दिल्ली में रहता हूँ।", "hi")


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(ValueError, match="'tlh' is unknown"):
        is_in("nuqneH", "tlh")
