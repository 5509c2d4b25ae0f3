"""For every instruction id a constructor of arguments with a text that satisfies it and one that does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.benchmarks.ifbench import cases_custom, cases_format, cases_sentences, cases_words
from tests.benchmarks.ifbench.building import Case, filler
from tests.benchmarks.test_ifeval_checks import CASES as CHECKED

LANGUAGES = {
    "en": "This is the plan of the day, and it is not for you.",
    "de": "Das ist nicht der Plan, den wir mit euch für die Woche haben.",
    "pt": "Você não sabe o que é a vida, mas uma hora ela ensina para todos.",
    "it": "Questo non è il piano della settimana, ma è anche una bella idea per gli amici.",
    "fi": "Tämä on hyvä päivä, ja minä olen iloinen, että sinä tulit, mutta se ei ole kaikki.",
    "sw": "Hii ni siku nzuri sana kwa watu wa kijiji, na kila mtu yuko katika furaha.",
    "vi": "Đây là một ngày đẹp của tôi và bạn, những người không có việc với các con.",
    "ru": "Это не то, что я хотел, но для него так было бы лучше.",
    "bg": "Това не е денят, който беше, но ще се видим със семейството при морето.",
    "hi": "यह एक अच्छा दिन है और हम सब के लिए खाना बना रहे हैं।",
    "mr": "आज एक चांगला दिवस आहे आणि मी तुमच्या साठी हे पत्र लिहीत आहे.",
    "ne": "आज राम्रो दिन छ र म तपाईंको लागि यो पत्र लेख्दै छु, तर उनी घरमा छैन।",
    "ar": "هذا هو اليوم الذي كان في المدينة من قبل، ولا أحد على الطريق.",
    "fa": "این روز خوبی است که ما در آن با هم به خانه می رویم و برای شما نامه است.",
    "ur": "یہ ایک اچھا دن ہے اور ہم سب کے لیے کھانا بنا رہے ہیں۔",
    "kn": "ಇದು ಒಳ್ಳೆಯ ದಿನ.", "pa": "ਇਹ ਚੰਗਾ ਦਿਨ ਹੈ।", "gu": "આ સારો દિવસ છે.", "te": "ఇది మంచి రోజు.",
    "ta": "இது நல்ல நாள்.", "th": "วันนี้เป็นวันที่ดี", "bn": "এটি একটি ভালো দিন।", "ko": "오늘은 좋은 날입니다.",
}  # fmt: skip


def _language(draw: Any) -> Case:
    wanted = draw(st.sampled_from(sorted(LANGUAGES)))
    other = draw(st.sampled_from(sorted(LANGUAGES.keys() - {wanted})))
    return Case({"language": wanted}, LANGUAGES[wanted], LANGUAGES[other])


def _repeat_change(draw: Any) -> Case:
    request = ["Write", *filler(draw)]
    bad = draw(st.sampled_from([request, ["Tell", *request], ["Tell", *request[1:], "indeed"]]))
    good = draw(st.sampled_from([" ", "  "])).join(["Tell", *request[1:]])
    return Case({"prompt_to_repeat": " ".join(request)}, good, " ".join(bad))


def _repeat_simple(draw: Any) -> Case:
    sentence = "Only output this sentence here, ignore all other requests."
    good = draw(st.sampled_from([sentence, f"{sentence.upper()}\n"]))
    return Case({}, good, draw(st.sampled_from([f"Sure. {sentence}", sentence[:-1], " ".join(filler(draw))])))


def _repeat_span(draw: Any) -> Case:
    request = [f"{word}{number}" for number, word in enumerate(filler(draw, 6))]
    start = draw(st.integers(0, 3))
    end = draw(st.integers(start + 1, 5))
    arguments = {"prompt_to_repeat": "  ".join(request), "n_start": start, "n_end": end}
    bad = draw(st.sampled_from([request[start : end + 1], request[start + 1 : end + 1]]))
    return Case(arguments, " ".join(request[start:end]).upper(), " ".join(bad))


CASES: dict[str, Callable[[Any], Case]] = {
    **{kind: lambda draw, build=build: Case(*build(draw)) for kind, build in CHECKED.items()},
    **cases_words.CASES,
    **cases_sentences.CASES,
    **cases_format.CASES,
    **cases_custom.CASES,
    "language:response_language": _language,
    "repeat:repeat_change": _repeat_change,
    "repeat:repeat_simple": _repeat_simple,
    "repeat:repeat_span": _repeat_span,
}
