"""Replies in a form that was not asked for, as small models write them: in prose, in fences, cut, without verdicts.

The content of a reply is drawn first; its form only changes how much of it arrives. Observed on models of 0.5B to 8B
parameters that were asked for a list of verdicts and a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspy_flashevolve.sim.words import Choices

TEXT_FORMS = ("prose", "fences", "unchanged", "cut", "empty", "refusal")
"""Forms of any reply: words around the text, code fences around it, the old text as it was, the reply's first half,
no reply, a refusal."""
VERDICT_FORMS = (
    "no verdicts", "some verdicts", "other numbers", "unknown verdicts", "python list", "one for all",
)  # fmt: skip
"""Forms of an integration's verdicts; its text is good."""
REFUSAL = "I'm sorry, but I can't help with that."


def sloppy_form(share: float, choices: Choices, verdicts: bool) -> str | None:
    """Draw the form of a reply; `None` for the form that was asked for.

    Args:
        share: Probability that the form is not the one that was asked for.
        choices: The random choices of this request.
        verdicts: Whether the reply has any.
    """
    if choices.uniform("sloppy") >= share:
        return None
    forms = TEXT_FORMS + VERDICT_FORMS if verdicts else TEXT_FORMS
    return forms[choices.index("sloppy form", len(forms))]


def formed(form: str, text: str, current: str) -> str:
    """Return the text of a reply in a form.

    Args:
        form: One of `TEXT_FORMS`, or any other for the text as it is.
        text: The new text.
        current: The text that it was to improve.
    """
    if form == "prose":
        return f"Certainly! Here is the improved text:\n\n{text}\n\nLet me know if there is anything else."
    if form == "fences":
        return f"```\n{text}\n```"
    return current if form == "unchanged" else text


def formed_verdicts(form: str, verdicts: list[dict[str, object]]) -> Any:
    """Return the verdicts of an integration in a form; `None` for no verdicts."""
    if form == "no verdicts":
        return None
    if form == "some verdicts":
        return verdicts[::2]
    if form == "other numbers":
        return [{**verdict, "child": number} for number, verdict in enumerate(verdicts, start=1000)]
    if form == "unknown verdicts":
        return [{**verdict, "verdict": "good"} for verdict in verdicts]
    if form == "python list":
        return repr(verdicts)
    return "orthogonal" if form == "one for all" else verdicts


def formed_reply(form: str, written: str) -> str:
    """Return the whole reply in a form."""
    whole: Mapping[str, str] = {"cut": written[: len(written) // 2], "empty": "", "refusal": REFUSAL}
    return whole.get(form, written)
