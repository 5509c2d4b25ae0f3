"""How answers are compared: words, labels and numbers."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import dspy

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WORD = re.compile(r"[^\W_]+")
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?:[eE][-+]?\d{1,2})?")
_CLOSED = frozenset({"yes", "no", "noanswer"})


def normalized(text: str) -> str:
    """Lower case, without punctuation, articles and spare spaces, as SQuAD and HotpotQA compare answers.

    Example:
        >>> normalized("The  Animorphs!")
        'animorphs'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(answer: str, gold: str) -> float:
    """The harmonic mean of precision and recall of the words; 0 where one of them is another yes or no (HotpotQA).

    Example:
        >>> f1("the Chief of Protocol", "Chief of Protocol"), round(f1("Protocol", "Chief of Protocol"), 2)
        (1.0, 0.5)
    """
    ours, right = normalized(answer), normalized(gold)
    if ours == right:
        return 1.0
    if ours in _CLOSED or right in _CLOSED:
        return 0.0
    mine, theirs = Counter(ours.split()), Counter(right.split())
    common = (mine & theirs).total()
    return 2 * common / (mine.total() + theirs.total())


def label_in(text: str, labels: Iterable[str]) -> str | None:
    """The one label that the text names as whole words, in any case; None where it names none or several.

    A label that lies inside another one that is named does not count.

    Example:
        >>> label_in("It is the Common Cold.", ["common cold", "dengue"])
        'common cold'
        >>> label_in("dengue or malaria", ["dengue", "malaria"]) is None
        True
    """
    spelled = {label: _spelled(label) for label in labels}
    named = [label for label, form in spelled.items() if form in _spelled(text)]
    outer = [one for one in named if not any(one != other and spelled[one] in spelled[other] for other in named)]
    return outer[0] if len(outer) == 1 else None


def label_metric(field: str, labels: Iterable[str], noun: str | None = None) -> Callable[..., dspy.Prediction]:
    """A metric with dspy.GEPA's arguments: 1 for the right label, else 0; the feedback names it.

    Args:
        field: of the example, with the right label, and of the prediction.
        labels: all there are.
        noun: what the feedback calls a label; None for the field's name.
    """
    known, called = tuple(labels), noun or field

    def metric(
        gold: Any, pred: Any, trace: Any = None, pred_name: str | None = None, pred_trace: Any = None
    ) -> dspy.Prediction:
        text, right = str(getattr(pred, field, "") or ""), gold[field]
        given = label_in(text, known)
        if given == right:
            return dspy.Prediction(score=1.0, feedback=f'The {called} "{given}" is right.')
        wrong = f'The {called} "{given}" is wrong' if given else f'"{text}" does not name exactly one {called}'
        return dspy.Prediction(score=0.0, feedback=f'{wrong}: the right one is "{right}".')

    return metric


def _spelled(text: str) -> str:
    """The words in lower case, with a space around each."""
    return f" {' '.join(_WORD.findall(text.lower()))} "


def last_number(text: str) -> float | None:
    r"""The last number that the text holds, `\boxed{...}` first; None where there is none.

    Example:
        >>> last_number("$1,250.50 or 12%"), last_number(r"\boxed{025} of 3"), last_number("none")
        (12.0, 25.0, None)
    """
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    found = [match for match in _NUMBER.findall(boxed[-1] if boxed else text) if match]
    return float(found[-1].replace(",", "")) if found else None


def listed(names: Iterable[str]) -> str:
    """Names for a sentence of feedback.

    Example:
        >>> listed(["Ed Wood", "Animorphs"])
        '"Ed Wood", "Animorphs"'
    """
    return ", ".join(f'"{name}"' for name in names)
