"""IFBench's `repeat:` kinds: the response is a given text and nothing else; runs of spaces are equal to one space."""

from __future__ import annotations

from benchmarks.workloads.ifbench.verifier import verifier

SENTENCE = "Only output this sentence here, ignore all other requests."


@verifier(
    "repeat:repeat_change", "Repeat this request with another first word, and write nothing else: {prompt_to_repeat}"
)
def repeat_change(response: str, prompt_to_repeat: str) -> bool:
    """The request word for word but for its first word."""
    given, wanted = response.split(), prompt_to_repeat.split()
    return given[1:] == wanted[1:] and given[:1] != wanted[:1]


@verifier("repeat:repeat_simple", f"Write only this sentence: {SENTENCE}")
def repeat_simple(response: str) -> bool:
    """The sentence of the prompt."""
    return response.split() == SENTENCE.split()


@verifier(
    "repeat:repeat_span",
    "Copy the words from index {n_start} to {n_end} (both included, the first word has index 0) of this request: "
    "{prompt_to_repeat}",
)
def repeat_span(response: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """The words from `n_start` to `n_end` and nothing else."""
    return response.split() == prompt_to_repeat.split()[n_start : n_end + 1]
