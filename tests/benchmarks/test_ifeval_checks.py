"""Every verifier accepts a text that is built to satisfy it and rejects one that is built not to."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import dspy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads import ifeval
from benchmarks.workloads.ifeval_checks import CHECKS, checkable, sentences, verify, words

WORD = st.text("abcdefghijklmnoprstuvw", min_size=2, max_size=8)
SMALL = st.integers(1, 6)
# Letters that WORD never uses make words that occur only where a case puts them.
RARE = st.sampled_from(["xyz", "zyx", "qyx", "xqz"])


class Case(NamedTuple):
    """A constraint's arguments with a text that satisfies it and one that does not."""

    arguments: dict[str, Any]
    good: str
    bad: str


CASES: dict[str, Callable[[Any], Case]] = {}


def _case(kind: str) -> Callable[[Callable[[Any], Case]], Callable[[Any], Case]]:
    def register(build: Callable[[Any], Case]) -> Callable[[Any], Case]:
        CASES[kind] = build
        return build

    return register


def _filler(draw: Any, count: int | None = None) -> list[str]:
    size = draw(SMALL) if count is None else count
    return draw(st.lists(WORD, min_size=size, max_size=size))


def _counted(draw: Any, name: str, limit: str, unit: Callable[[int], str], extra: dict[str, Any]) -> Case:
    """At least, or fewer than, `wanted` units."""
    wanted = draw(st.integers(2, 6))
    enough, scarce = unit(wanted), unit(wanted - 1)
    relation = draw(st.sampled_from(["at least", "less than"]))
    good, bad = (enough, scarce) if relation == "at least" else (scarce, enough)
    return Case({name: relation, limit: wanted, **extra}, good, bad)


@_case("keywords:existence")
def _existence(draw: Any) -> Case:
    text = _filler(draw)
    return Case({"keywords": ["xyz", "Zyx"]}, " ".join([*text, "Xyz,", "zyx."]), " ".join([*text, "xyz"]))


@_case("keywords:frequency")
def _frequency(draw: Any) -> Case:
    text = _filler(draw)
    return _counted(draw, "relation", "frequency", lambda n: " ".join([*text, *["xyz"] * n]), {"keyword": "xyz"})


@_case("keywords:forbidden_words")
def _forbidden(draw: Any) -> Case:
    text, rare = " ".join(_filler(draw)), draw(RARE)
    return Case({"forbidden_words": [rare, "qqq"]}, f"{text} {rare}ish", f"{text} {rare.upper()}, {text}")


@_case("keywords:letter_frequency")
def _letters(draw: Any) -> Case:
    text, letter = " ".join(_filler(draw)), draw(st.sampled_from("xyz!#"))
    return _counted(draw, "let_relation", "let_frequency", lambda n: text + " " + letter * n, {"letter": letter})


@_case("change_case:english_lowercase")
def _lower(draw: Any) -> Case:
    text = " ".join(_filler(draw))
    return Case({}, f"{text}, 1 of 2.", text.capitalize())


@_case("change_case:english_capital")
def _upper(draw: Any) -> Case:
    text = " ".join(_filler(draw))
    return Case({}, f"{text.upper()}, 1 OF 2.", f"{text.upper()} x")


@_case("change_case:capital_word_frequency")
def _capital_words(draw: Any) -> Case:
    text = _filler(draw)
    return _counted(draw, "capital_relation", "capital_frequency", lambda n: " ".join([*text, *["YES"] * n]), {})


@_case("length_constraints:number_words")
def _number_words(draw: Any) -> Case:
    return _counted(draw, "relation", "num_words", lambda n: ", ".join(_filler(draw, n)), {})


@_case("length_constraints:number_sentences")
def _number_sentences(draw: Any) -> Case:
    mark = draw(st.sampled_from(".!?"))
    return _counted(draw, "relation", "num_sentences", lambda n: " ".join(w + mark for w in _filler(draw, n)), {})


@_case("length_constraints:number_paragraphs")
def _paragraphs(draw: Any) -> Case:
    wanted = draw(st.integers(2, 5))
    good = "\n***\n".join(_filler(draw, wanted))
    return Case({"num_paragraphs": wanted}, good, f"{good}\n***\nmore")


@_case("length_constraints:nth_paragraph_first_word")
def _nth_paragraph(draw: Any) -> Case:
    parts = _filler(draw, 4)
    nth = draw(st.integers(1, 4))
    good = [f"Xyz {part}" if number == nth else part for number, part in enumerate(parts, start=1)]
    arguments = {"num_paragraphs": 4, "nth_paragraph": nth, "first_word": "xyz"}
    return Case(arguments, "\n\n".join(good), draw(st.sampled_from(["\n\n".join(parts), "\n\n".join([*good, "end"])])))


@_case("punctuation:no_comma")
def _no_comma(draw: Any) -> Case:
    text = " ".join(_filler(draw))
    return Case({}, f"{text}; {text}.", f"{text}, {text}.")


@_case("startend:end_checker")
def _end(draw: Any) -> Case:
    text = " ".join(_filler(draw))
    return Case({"end_phrase": "Is there more?"}, f'"{text} Is there more?" \n', f"{text} Is there more? Yes.")


@_case("startend:quotation")
def _quotation(draw: Any) -> Case:
    text = " ".join(_filler(draw))
    return Case({}, f' "{text}"\n', draw(st.sampled_from([text, f'"{text}', f'{text}"', '"'])))


@_case("detectable_format:title")
def _title(draw: Any) -> Case:
    text = " ".join(_filler(draw))
    return Case({}, f"<<{text}>>\n{text}", draw(st.sampled_from([text, f"<{text}>", "<< >>", f"<<{text}\n>>"])))


@_case("detectable_format:number_bullet_lists")
def _bullets(draw: Any) -> Case:
    wanted, mark = draw(SMALL), draw(st.sampled_from(["* ", "- ", "  * "]))
    good = "Here:\n" + "\n".join(mark + word for word in _filler(draw, wanted))
    return Case({"num_bullets": wanted}, good, draw(st.sampled_from([f"{good}\n{mark}more", "Here:"])))


@_case("detectable_format:number_highlighted_sections")
def _highlights(draw: Any) -> Case:
    wanted, star = draw(SMALL), draw(st.sampled_from(["*", "**"]))
    marked = [f"{star}{word}{star}" for word in _filler(draw, wanted)]
    return Case({"num_highlights": wanted}, " and ".join(marked), " and ".join([*marked[1:], "** **"]))


@_case("detectable_format:json_format")
def _json(draw: Any) -> Case:
    text = json.dumps({word: index for index, word in enumerate(_filler(draw))})
    return Case({}, draw(st.sampled_from([text, f"```json\n{text}\n```"])), text[:-1])


@_case("detectable_format:multiple_sections")
def _sections(draw: Any) -> Case:
    wanted, mark = draw(st.integers(2, 5)), draw(st.sampled_from(["SECTION", "Day"]))
    parts = [f"{mark} {number}\n{word}\n" for number, word in enumerate(_filler(draw, wanted), start=1)]
    return Case({"section_spliter": mark, "num_sections": wanted}, "".join(parts), "".join(parts[1:]))


@_case("detectable_format:constrained_response")
def _constrained(draw: Any) -> Case:
    return Case({}, f"My answer is {draw(st.sampled_from(['yes', 'no', 'maybe']))}.", "Yes, my answer is that.")


@_case("detectable_content:number_placeholders")
def _placeholders(draw: Any) -> Case:
    wanted = draw(SMALL)
    marked = [f"[{word}]" for word in _filler(draw, wanted)]
    return Case({"num_placeholders": wanted}, " ".join(marked), " ".join([*marked[1:], "[open"]))


@_case("detectable_content:postscript")
def _postscript(draw: Any) -> Case:
    text, marker = " ".join(_filler(draw)), draw(st.sampled_from(["P.S.", "P.P.S"]))
    return Case({"postscript_marker": marker}, f"{text}\n\n{marker} {text}", f"{text}\n\n{text}")


@_case("combination:repeat_prompt")
def _repeat(draw: Any) -> Case:
    request, text = " ".join(_filler(draw)) + " xyz", " ".join(_filler(draw))
    return Case({"prompt_to_repeat": request}, f"{request}\n{text}", f"Sure! {request}\n{text}")


@_case("combination:two_responses")
def _two(draw: Any) -> Case:
    text = " ".join(_filler(draw))
    bad = draw(st.sampled_from([text, f"{text}\n******\n{text}", f"{text}******x******y"]))
    return Case({}, f"{text}\n******\n{text} xyz", bad)


@_case("count:word_count_range")
def _word_range(draw: Any) -> Case:
    low = draw(st.integers(2, 6))
    arguments = {"min_words": float(low), "max_words": float(low + 2)}
    bad = draw(st.sampled_from([low - 1, low + 3]))
    return Case(arguments, " ".join(_filler(draw, low + 1)), " ".join(_filler(draw, bad)))


@_case("count:unique_word_count")
def _unique(draw: Any) -> Case:
    different = draw(st.lists(WORD, min_size=2, max_size=6, unique=True))
    return Case({"N": float(len(different))}, " ".join(different), " ".join([*different[1:], different[1].upper()]))


@_case("count:keywords_multiple")
def _keywords(draw: Any) -> Case:
    arguments = {f"keyword{number}": word for number, word in enumerate(("xq", "yq", "zq", "xy", "xz"), start=1)}
    good = [word for word, times in zip(arguments.values(), (1, 2, 3, 5, 7), strict=True) for _ in range(times)]
    changed = draw(st.sampled_from([good[1:], [*good, "axqa"]]))
    return Case(arguments, " ".join([*_filler(draw), *good]), " ".join(changed))


def test_every_check_has_a_case() -> None:
    assert CASES.keys() == CHECKS.keys()


@pytest.mark.parametrize("kind", sorted(CHECKS))
@given(data=st.data())
def test_a_check_accepts_what_satisfies_it_and_rejects_what_does_not(kind: str, data: st.DataObject) -> None:
    case = CASES[kind](data.draw)
    assert CHECKS[kind](case.good, case.arguments) is None
    complaint = CHECKS[kind](case.bad, case.arguments)
    assert complaint is not None
    assert complaint.strip()


@pytest.mark.parametrize("kind", sorted(CHECKS))
@given(data=st.data(), text=st.text(max_size=60))
def test_a_check_takes_any_text(kind: str, data: st.DataObject, text: str) -> None:
    assert isinstance(CHECKS[kind](text, CASES[kind](data.draw).arguments), str | None)


@given(data=st.data(), kinds=st.lists(st.sampled_from(sorted(CASES)), min_size=1, max_size=4))
def test_the_score_is_the_share_of_constraints_that_are_met(data: st.DataObject, kinds: list[str]) -> None:
    cases = [CASES[kind](data.draw) for kind in kinds]
    text = data.draw(st.sampled_from([text for case in cases for text in (case.good, case.bad)]))
    verdict = verify(text, kinds, [case.arguments for case in cases])
    alone = [CHECKS[kind](text, case.arguments) is None for kind, case in zip(kinds, cases, strict=True)]
    assert verdict.score == pytest.approx(sum(alone) / len(alone))
    assert len(verdict.complaints) == alone.count(False)


def test_the_metric_names_each_constraint_that_was_not_met() -> None:
    gold = dspy.Example(
        kinds=["punctuation:no_comma", "change_case:english_lowercase", "startend:quotation"], arguments=[{}, {}, {}]
    )
    result = ifeval.metric(gold, dspy.Prediction(response='"Well, yes"'))
    assert result.score == pytest.approx(1 / 3)
    assert "comma" in result.feedback
    assert "lowercase" in result.feedback
    assert "quotation" not in result.feedback


def test_kinds_without_a_check_are_not_checkable() -> None:
    assert checkable(["punctuation:no_comma", "startend:quotation"])
    assert not checkable(["punctuation:no_comma", "language:response_language"])


def test_rows_that_ask_for_more_words_than_fit_are_left_out() -> None:
    assert ifeval.words_demanded([{"relation": "at least", "num_words": 300}]) == 300
    assert ifeval.words_demanded([{"relation": "less than", "num_words": 300}, {"num_sentences": 2}]) == 24
    assert ifeval.words_demanded([{}]) == 0


@pytest.mark.parametrize("source", sorted(ifeval.FILES))
def test_samples_of_the_data_are_checkable_disjoint_and_repeatable(source: str) -> None:
    if not (ifeval.data_folder() / ifeval.FILES[source]).exists():
        pytest.skip("needs the data folder; set FLASHEVOLVE_DATA")
    trainset, valset = ifeval.examples(5, 5, seed=1, max_tokens=160, source=source)
    assert all(checkable(example.kinds) for example in [*trainset, *valset])
    assert not {example.prompt for example in trainset} & {example.prompt for example in valset}
    assert (trainset, valset) == ifeval.examples(5, 5, seed=1, max_tokens=160, source=source)


def test_words_and_sentences_are_counted_as_a_reader_would() -> None:
    assert words("It's 3 o'clock - now.") == ["It", "s", "3", "o", "clock", "now"]
    assert sentences('Really? "Yes." He left at 3.30 sharp! Good') == [
        "Really?", '"Yes.', "He left at 3.30 sharp!", "Good",
    ]  # fmt: skip
