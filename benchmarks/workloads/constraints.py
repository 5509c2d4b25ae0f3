"""Whether a response meets IFEval's and IFBench's constraints, as the package if-verifiable judges it.

A few checkers need nltk's data, which no package index carries by itself. The package downloads it when it is first
used. Where that fails, `can_judge` says so beforehand, so that no constraint is judged without its data.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

Arguments = Mapping[str, Any]

_PUNKT, _STOPWORDS = "tokenizers/punkt_tab", "corpora/stopwords"
_TAGGER = "taggers/averaged_perceptron_tagger_eng"
NLTK_DATA: dict[str, tuple[str, ...]] = {
    "change_case:capital_word_frequency": (_PUNKT,),
    "format:title_case": (_PUNKT,),
    "length_constraints:number_sentences": (_PUNKT,),
    "ratio:stop_words": (_STOPWORDS,),
    "words:keywords_specific_position": (_PUNKT,),
    "words:start_verb": (_PUNKT, _TAGGER),
    "words:words_position": (_PUNKT,),
}
"""What each kind of constraint needs of nltk's data, as paths in its data folder; kinds that need none are absent."""


@dataclass(frozen=True)
class Verdict:
    """How a response stands to the constraints of its prompt, in the row's order.

    Attributes:
        strict: Whether the response as it is meets each constraint.
        loose: Whether it does so as it is, or without its first line, its last line, both, or its asterisks.
        constraints: Each constraint in words.
    """

    strict: tuple[bool, ...]
    loose: tuple[bool, ...]
    constraints: tuple[str, ...]

    @property
    def strict_share(self) -> float:
        """The share of constraints that the response meets as it is; 1 for a prompt without constraints."""
        return _share(self.strict)

    @property
    def loose_share(self) -> float:
        """The share of constraints that the response meets in the loose sense."""
        return _share(self.loose)

    @property
    def feedback(self) -> str:
        """What is wrong with the response, in sentences.

        Example:
            >>> print(Verdict((False, True), (False, True), ("Use no comma.", "Start with a verb.")).feedback)
            Not met: Use no comma.
            Strictly, 1 of 2 constraints are met.
        """
        judged = list(zip(self.constraints, self.strict, self.loose, strict=True))
        lines = [f"Not met: {constraint}" for constraint, _, loose in judged if not loose]
        lines += [
            f"Met only without the first or last line or the asterisks: {constraint}"
            for constraint, strict, loose in judged
            if loose and not strict
        ]
        if not lines:
            return "Every constraint of the prompt is met."
        return "\n".join([*lines, f"Strictly, {sum(self.strict)} of {len(self.strict)} constraints are met."])


def verify(response: str, kinds: Sequence[str], arguments: Sequence[Arguments]) -> Verdict:
    """Judge a response by a row's constraints.

    What a reasoning model writes before `</think>` is no part of the response. An empty response meets no constraint.

    Args:
        response: The text.
        kinds: The row's `instruction_id_list`.
        arguments: The row's `kwargs`, one mapping per constraint, without those that are unset.

    Raises:
        KeyError: There is no checker for a kind.
        LookupError: A checker lacks nltk's data; `can_judge` tells beforehand.
        ModuleNotFoundError: if-verifiable is not installed; the message says how to install it.
        ValueError: There are more kinds than arguments, or fewer.

    Example:
        >>> verify("Sure, here:\\nno comma", ["punctuation:no_comma"], [{}]).loose
        (True,)
    """
    checkers = _checkers()
    outcomes = [_outcome(response, kind, given) for kind, given in zip(kinds, arguments, strict=True)]
    return Verdict(
        strict=tuple(strict for strict, _ in outcomes),
        loose=tuple(loose for _, loose in outcomes),
        constraints=tuple(
            checkers[kind](kind).build_description(**given) for kind, given in zip(kinds, arguments, strict=True)
        ),
    )


def can_judge(kind: str, arguments: Arguments) -> bool:
    """Whether a constraint's verdict can be relied on, on this machine.

    It cannot where nltk's data is missing; the first call warns of that. Nor can it where the checker replaces an
    argument by one that it draws at random: a start index of 0, and a character that is no letter.

    Args:
        kind: One of the row's `instruction_id_list`.
        arguments: What belongs to it in the row's `kwargs`, without those that are unset.
    """
    if kind in kinds_without_data():
        return False
    if kind == "repeat:repeat_span":
        return arguments["n_start"] != 0
    if kind == "keywords:letter_frequency":
        return arguments["letter"].isascii() and arguments["letter"].isalpha()
    return True


@functools.cache
def kinds_without_data() -> frozenset[str]:
    """The kinds that cannot be judged here because nltk's data is missing; warns of them, once a process."""
    _checkers()  # downloads what is missing, where there is internet
    missing = {path for paths in NLTK_DATA.values() for path in paths if not _is_there(path)}
    kinds = sorted(kind for kind, paths in NLTK_DATA.items() if missing & set(paths))
    if kinds:
        names = " ".join(sorted(path.rpartition("/")[2] for path in missing))
        warnings.warn(
            f"Rows with these constraints are left out, since nltk lacks data to judge them: {', '.join(kinds)}. "
            f"Run `python -m nltk.downloader {names}` where there is internet, and set NLTK_DATA to the folder if it "
            "is not in your home directory. From a package index alone, `pip install --no-deps llama-index-core` "
            "brings punkt_tab and stopwords.",
            stacklevel=3,  # who asks `can_judge`
        )
    return frozenset(kinds)


@functools.cache
def _checkers() -> dict[str, Any]:
    """The checkers' classes by kind; no kind of one benchmark occurs in the other."""
    try:
        import langdetect
        import nltk

        nltk.data.path.extend(_data_in_packages())
        # The import downloads what nltk lacks. Offline, nltk prints an error for each file: `kinds_without_data` tells
        # of all of them at once.
        with mock.patch.object(nltk, "download", functools.partial(nltk.download, print_error_to=io.StringIO())):
            ifeval, ifbench = (importlib.import_module(f"if_verifiable.{name}") for name in ("ifeval", "ifbench"))
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}: the constraints of IFEval and IFBench are judged by the package if-verifiable, which needs "
            "Python 3.11 or newer. Install the extra: pip install -e '.[benchmarks]'",
            name=error.name,
        ) from error
    # langdetect draws at random, so that without a seed the same response could get two verdicts. The first call loads
    # its profiles and is not safe beside another one, which threads that score examples would make.
    langdetect.DetectorFactory.seed = 0
    langdetect.detect("The first call loads the languages.")
    return {**ifeval.INSTRUCTION_DICT, **ifbench.INSTRUCTION_DICT}


def _data_in_packages() -> list[str]:
    """Folders of nltk's data that installed packages carry: llama-index-core has punkt_tab and stopwords."""
    package = importlib.util.find_spec("llama_index")  # a namespace: finding it imports nothing
    roots = () if package is None else package.submodule_search_locations or ()
    folders = [Path(root) / "core/_static/nltk_cache" for root in roots]
    return [str(folder) for folder in folders if folder.is_dir()]


def _is_there(path: str) -> bool:
    import nltk

    try:
        nltk.data.find(path)
    except LookupError:
        return False
    return True


def _outcome(response: str, kind: str, arguments: Arguments) -> tuple[bool, bool]:
    """Whether a constraint is met strictly and loosely."""
    from if_verifiable.common import evaluate_instructions

    checkers = _checkers()
    if kind not in checkers:  # the package would skip it without a word
        raise KeyError(f"no checker for the constraint {kind!r}: IFEval and IFBench have {', '.join(sorted(checkers))}")
    try:
        results, _ = evaluate_instructions(
            response=response,
            instruction_id_list=[kind],
            kwargs_list=[dict(arguments)],
            prompt="",  # no checker of the two benchmarks asks for it
            instruction_registry=checkers,
        )
    except Exception as error:
        # Some checkers fail on odd responses: format:quote_unquote with an IndexError on one that is all punctuation,
        # detectable_format:json_format with a RecursionError on deep brackets. Those responses do not meet the
        # constraint. nltk's complaint about missing data is a plain LookupError and says nothing of the response.
        if type(error) is LookupError:
            raise
        return False, False
    return (results[0].strict_pass, results[0].loose_pass) if results else (False, False)  # no result: an empty text


def _share(met: Sequence[bool]) -> float:
    return sum(met) / len(met) if met else 1.0
