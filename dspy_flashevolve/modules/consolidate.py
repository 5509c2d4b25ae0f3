"""Consolidation: the reflection LM writes a prompt that has grown by separate edits anew, as one clean text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import dspy

from dspy_flashevolve.modules.integrate import without_fence


class ConsolidateInstruction(dspy.Signature):
    """An assistant performs a task with the instruction below. It has grown by separate edits of many authors, who did
    not see each other's. Write it anew as one clean text that a person would be glad to maintain.

    Say all about one subject in one place, and once. Where statements contradict each other, keep the one with the
    larger estimated effect; where nothing is known of that, the more specific one. Keep every other rule and fact,
    and names, labels and formats word for word. Order the text: the task, the form of the answer, then rules and
    facts, under headings where there are many. Keep lists flat, and let each item name what it is about, so that
    others can edit it on its own. Leave out what can only help with one single input, such as the words of one
    example, or that one thing is never another with which it is hardly ever confused. Add nothing that does not stand
    in it. Read the result once more: no rule may exclude what another one includes, or name what is explained
    nowhere."""

    evidence: str = dspy.InputField(
        desc="What some edits are estimated to add to the assistant's score, with the standard error; of the others "
        "nothing is known."
    )
    instruction: str = dspy.InputField(desc="The instruction as it has grown.")
    limit: str = dspy.InputField(desc="How long the new text may be.")
    consolidated: str = dspy.OutputField(desc="The whole new instruction, and nothing else.")


class Consolidation(dspy.Module):
    """Writes the texts of a candidate anew, one request a component.

    Example:
        >>> Consolidation()(texts={}, effects={}).texts
        {}
    """

    def __init__(self) -> None:
        super().__init__()
        self.consolidate = dspy.Predict(ConsolidateInstruction)

    def forward(
        self, texts: Mapping[str, str], effects: Mapping[str, Sequence[tuple[str, float, float]]]
    ) -> dspy.Prediction:
        """Consolidate texts.

        Args:
            texts: component -> text as it has grown.
            effects: component -> the part that an edit put in, its estimated effect on the score, its standard error.

        Returns:
            ``texts``: component -> new text; without those whose reply was empty.
        """
        replies = {name: self.consolidate(**inputs(text, effects.get(name, ()))) for name, text in texts.items()}
        return dspy.Prediction(texts=_texts_of(replies))

    async def aforward(
        self, texts: Mapping[str, str], effects: Mapping[str, Sequence[tuple[str, float, float]]]
    ) -> dspy.Prediction:
        """As :meth:`forward`, awaitable."""
        replies = {
            name: await self.consolidate.acall(**inputs(text, effects.get(name, ()))) for name, text in texts.items()
        }
        return dspy.Prediction(texts=_texts_of(replies))


def inputs(text: str, effects: Sequence[tuple[str, float, float]]) -> dict[str, str]:
    """Return what the reflection LM reads of one text: the edits in it whose effect exceeds its standard error, the
    largest first. What is not told apart would only repeat the text.

    >>> inputs("- A\\n- B", [("- A", 0.05, 0.02), ("- B", 0.01, 0.02)])["evidence"]
    '+0.050 (0.020): - A'
    """
    rows = sorted((row for row in effects if abs(row[1]) > row[2]), key=lambda row: -row[1])
    evidence = "\n".join(f"{effect:+.3f} ({error:.3f}): {part.strip()}" for part, effect, error in rows)
    return {"evidence": evidence or "None.", "instruction": text, "limit": f"At most {len(text)} characters."}


def _texts_of(replies: Mapping[str, dspy.Prediction]) -> dict[str, str]:
    texts = {name: str(reply.consolidated or "").strip() for name, reply in replies.items()}
    return {name: without_fence(text) for name, text in texts.items() if text}
