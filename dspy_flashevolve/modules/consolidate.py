"""Consolidation: the reflection LM writes a prompt that has grown by separate edits anew, as one clean text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dspy

from dspy_flashevolve.modules.reading import asked, result_of


class ConsolidateInstruction(dspy.Signature):
    """An assistant performs a task with the instruction below. It has grown by separate edits of many authors, who did
    not see each other's. Write it anew as one clean text that a person would be glad to maintain.

    Say all about one subject in one place, what is typical of it first, and once. Where statements contradict each
    other, keep the one with the larger estimated effect; where nothing is known of that, the more specific one. Where
    two subjects share a sign, let the entry of each say what tells it apart. Keep every other rule and fact, and names,
    labels and formats word for word. Order the text: the task, the form of the answer, then rules and facts, under
    headings where there are many. Keep lists flat, and let each item name what it is about, so that others can edit it
    on its own. Leave out what can only help with one single input, such as the words of one example, that one thing is
    never another with which it is hardly ever confused, and doubts of the authors. Add nothing. Read the result once
    more: no rule may exclude what another one includes, or name what is explained nowhere."""

    evidence: str = dspy.InputField(
        desc="What some edits are estimated to add to the assistant's score, with the standard error; of the others "
        "nothing is known."
    )
    instruction: str = dspy.InputField(desc="The instruction as it has grown.")
    limit: str = dspy.InputField(desc="How long the new text may be.")
    consolidated: str = dspy.OutputField(desc="The whole new instruction, and nothing else.")


Effects = Sequence[tuple[str, float, float]]
"""Of edits in a text: the part that one puts in, its estimated effect on the score, its standard error."""


class Consolidation(dspy.Module):
    """Writes the texts of a candidate anew, one request a component.

    Example:
        >>> Consolidation()(texts={}, effects={}).texts
        {}
    """

    def __init__(self) -> None:
        super().__init__()
        self.consolidate = dspy.Predict(ConsolidateInstruction)

    def forward(self, texts: Mapping[str, str], effects: Mapping[str, Effects]) -> dspy.Prediction:
        """Consolidate texts.

        Args:
            texts: component -> text as it has grown.
            effects: component -> what is known of the edits in it.

        Returns:
            ``texts``: component -> new text; without those whose reply was empty.
        """
        return result_of(self._consolidated(texts, effects, is_sync=True))

    async def aforward(self, texts: Mapping[str, str], effects: Mapping[str, Effects]) -> dspy.Prediction:
        """As :meth:`forward`, awaitable."""
        return await self._consolidated(texts, effects, is_sync=False)

    async def _consolidated(self, texts: Any, effects: Any, is_sync: bool) -> dspy.Prediction:
        clean: dict[str, str] = {}
        for name, text in texts.items():
            if written := (await asked(self.consolidate, inputs(text, effects.get(name, ())), is_sync)).consolidated:
                clean[name] = written
        return dspy.Prediction(texts=clean)


def inputs(text: str, effects: Effects) -> dict[str, str]:
    """Return what the reflection LM reads of one text: the edits in it whose effect exceeds its standard error, the
    largest first (what is not told apart would only repeat the text).

    >>> inputs("- A\\n- B", [("- A", 0.05, 0.02), ("- B", 0.01, 0.02)])["evidence"]
    '+0.050 (0.020): - A'
    """
    rows = sorted((row for row in effects if abs(row[1]) > row[2]), key=lambda row: -row[1])
    evidence = "\n".join(f"{effect:+.3f} ({error:.3f}): {part.strip()}" for part, effect, error in rows)
    return {"evidence": evidence or "None.", "instruction": text, "limit": f"At most {len(text)} characters."}
