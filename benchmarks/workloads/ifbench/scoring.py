"""Strict and loose accuracy over prompts and over instructions (IFEval, arXiv 2311.07911, section 2; IFBench alike)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.workloads.ifbench.registry import VERIFIERS


def readings(response: str) -> Iterator[str]:
    """The eight texts of which one must meet a constraint in the loose sense.

    The response as it is, without its first line, without its last line and without both, each with and without `*`.

    Example:
        >>> list(readings("Sure:\\n*yes*"))
        ['Sure:\\n*yes*', '*yes*', 'Sure:', '', 'Sure:\\nyes', 'yes', 'Sure:', '']
    """
    given = response.split("\n")
    cuts = [response, *("\n".join(part).strip() for part in (given[1:], given[:-1], given[1:-1]))]
    yield from cuts
    yield from (cut.replace("*", "") for cut in cuts)


@dataclass(frozen=True)
class Verdict:
    """How a response stands to the constraints of its prompt, in the row's order.

    Attributes:
        strict: Whether the response as it is meets each constraint.
        loose: Whether one of its readings meets each constraint; where strict is met, loose is too.
        constraints: Each constraint as one sentence.
    """

    strict: tuple[bool, ...]
    loose: tuple[bool, ...]
    constraints: tuple[str, ...]

    @property
    def score(self) -> float:
        """The share of constraints that are met in the loose sense; 1 for a prompt without constraints."""
        return sum(self.loose) / len(self.loose) if self.loose else 1.0

    @property
    def not_met(self) -> tuple[str, ...]:
        """The constraints that no reading meets."""
        return tuple(text for text, met in zip(self.constraints, self.loose, strict=True) if not met)

    @property
    def met_loosely_only(self) -> tuple[str, ...]:
        """The constraints that a reading meets, but not the response as it is."""
        both = zip(self.constraints, self.strict, self.loose, strict=True)
        return tuple(text for text, strict, loose in both if loose and not strict)


def verify(response: str, kinds: Sequence[str], arguments: Sequence[Mapping[str, Any]]) -> Verdict:
    """Check a response against a row's constraints.

    Args:
        response: The text.
        kinds: The row's `instruction_id_list`.
        arguments: The row's `kwargs`, one a constraint; unset ones may be missing or `None`.

    Raises:
        KeyError: If a kind has no verifier.
        ValueError: If there are more kinds than arguments, or fewer.

    Example:
        >>> verify("Sure, here:\\nno comma", ["punctuation:no_comma"], [{}])
        Verdict(strict=(False,), loose=(True,), constraints=('Use no comma.',))
    """
    texts = tuple(readings(response))
    asked = [(VERIFIERS[kind], given) for kind, given in zip(kinds, arguments, strict=True)]
    return Verdict(
        strict=tuple(rule(response, **given) for rule, given in asked),
        loose=tuple(any(rule(text, **given) for text in texts) for rule, given in asked),
        constraints=tuple(rule.describe(**given) for rule, given in asked),
    )


@dataclass(frozen=True)
class Accuracy:
    """Shares from 0 to 1.

    Attributes:
        prompt_strict: Prompts whose constraints are all met by the response as it is.
        instruction_strict: Constraints, over all prompts, that are met by the response as it is.
        prompt_loose: Prompts whose constraints are all met in the loose sense.
        instruction_loose: Constraints, over all prompts, that are met in the loose sense.
    """

    prompt_strict: float
    instruction_strict: float
    prompt_loose: float
    instruction_loose: float


def accuracy(verdicts: Sequence[Verdict]) -> Accuracy:
    """The four accuracies of the papers.

    Raises:
        ValueError: If there is no verdict.

    Example:
        >>> accuracy([Verdict((True, False), (True, True), ("a", "b")), Verdict((True,), (True,), ("c",))])
        Accuracy(prompt_strict=0.5, instruction_strict=0.6666666666666666, prompt_loose=1.0, instruction_loose=1.0)
    """
    if not verdicts:
        raise ValueError("there are no verdicts: an accuracy needs at least one")
    strict, loose = [verdict.strict for verdict in verdicts], [verdict.loose for verdict in verdicts]
    return Accuracy(_prompts(strict), _instructions(strict), _prompts(loose), _instructions(loose))


def _prompts(met: Sequence[tuple[bool, ...]]) -> float:
    return sum(map(all, met)) / len(met)


def _instructions(met: Sequence[tuple[bool, ...]]) -> float:
    every = [one for prompt in met for one in prompt]
    return sum(every) / len(every) if every else 1.0
