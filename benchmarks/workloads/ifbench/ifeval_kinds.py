"""IFEval's 25 kinds in the same registry: the rules of `ifeval_checks`, and the language of the response."""

from __future__ import annotations

from typing import Any

from benchmarks.workloads.ifbench.languages import is_in
from benchmarks.workloads.ifbench.verifier import Accepts, verifier
from benchmarks.workloads.ifeval_checks import CHECKS

WANTED = {
    "keywords:existence": "Include the keywords {keywords}.",
    "keywords:frequency": "Use the word {keyword!r} {relation} {frequency} times.",
    "keywords:forbidden_words": "Do not use the words {forbidden_words}.",
    "keywords:letter_frequency": "Use the character {letter!r} {let_relation} {let_frequency} times.",
    "change_case:english_lowercase": "Write everything in lowercase letters.",
    "change_case:english_capital": "Write everything in CAPITAL letters.",
    "change_case:capital_word_frequency": "Use {capital_relation} {capital_frequency} words in all capital letters.",
    "length_constraints:number_words": "Use {relation} {num_words} words.",
    "length_constraints:number_sentences": "Write {relation} {num_sentences} sentences.",
    "length_constraints:number_paragraphs": "Write {num_paragraphs} paragraphs with *** between them.",
    "length_constraints:nth_paragraph_first_word": (
        "Write {num_paragraphs} paragraphs with an empty line between them, and begin number {nth_paragraph} with "
        "{first_word!r}."
    ),
    "punctuation:no_comma": "Use no comma.",
    "startend:end_checker": "End with exactly this: {end_phrase}",
    "startend:quotation": "Wrap the whole response in double quotation marks.",
    "detectable_format:title": "Write a title in double angular brackets: <<title>>.",
    "detectable_format:number_bullet_lists": "Write exactly {num_bullets} bullet points that begin with '* '.",
    "detectable_format:number_highlighted_sections": (
        "Highlight at least {num_highlights} sections with asterisks, such as *this one*."
    ),
    "detectable_format:json_format": "Write nothing but valid JSON.",
    "detectable_format:multiple_sections": (
        "Write at least {num_sections} sections that begin with {section_spliter!r} and a number."
    ),
    "detectable_format:constrained_response": (
        "Answer with one of: My answer is yes. My answer is no. My answer is maybe."
    ),
    "detectable_content:number_placeholders": (
        "Use at least {num_placeholders} placeholders in square brackets, such as [name]."
    ),
    "detectable_content:postscript": "Add a postscript that begins with {postscript_marker}",
    "combination:repeat_prompt": "Begin by repeating the request word for word: {prompt_to_repeat}",
    "combination:two_responses": "Give two different responses with ****** between them and nowhere else.",
}


def _rule(kind: str) -> Accepts:
    def accepts(response: str, **given: Any) -> bool:
        return CHECKS[kind](response, given) is None

    return accepts


for _kind, _wanted in WANTED.items():
    verifier(_kind, _wanted)(_rule(_kind))


@verifier(
    "language:response_language",
    "Write everything in the language with the code {language!r}.",
    approximate="by the script of the letters, and by frequent words where languages share a script",
)
def response_language(response: str, language: str) -> bool:
    """The response is in the language of the ISO 639-1 code."""
    return is_in(response, language)
