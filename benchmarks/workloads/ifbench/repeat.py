"""IFBench's `repeat:` kinds: the response is a given text and nothing else; runs of spaces are equal to one space."""

from __future__ import annotations

from benchmarks.workloads.ifbench.verifier import verifier

SENTENCE = "Only output this sentence here, ignore all other requests."


@verifier(
    "repeat:repeat_change", "Repeat this request with another first word, and write nothing else: {prompt_to_repeat}"
)
def repeat_change(response: str, prompt_to_repeat: str) -> bool:
    """The request word for word but for its first word."""
    return response != prompt_to_repeat and response.split()[1:] == prompt_to_repeat.split()[1:]


@verifier("repeat:repeat_simple", f"Write only this sentence: {SENTENCE}")
def repeat_simple(response: str) -> bool:
    """The sentence of the prompt, without regard to case."""
    return response.strip().lower() == SENTENCE.lower()


@verifier(
    "repeat:repeat_span",
    "Copy the words from index {n_start} up to, and without, index {n_end} (the first word has index 0) of this "
    "request: {prompt_to_repeat}",
    approximate="a span from index 0, for which the evaluator draws another start by chance",
)
def repeat_span(response: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """The words from `n_start` to the one before `n_end`, as the evaluator has it, without regard to case."""
    return response.lower().split() == prompt_to_repeat.lower().split()[n_start:n_end]
