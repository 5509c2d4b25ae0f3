"""The dspy modules of AsyncACE: one reflects on a sample, one curates the playbook.

Source: ACE (arXiv 2510.04618) section 3, Reflector and Curator. Each can be replaced by a module that takes the same
inputs and returns the same fields, and optimized like any other DSPy program.
"""

from __future__ import annotations

from typing import Any

import dspy
from dspy.utils.exceptions import AdapterParseError

from dspy_flashevolve.modules.reading import ATTEMPTS, asked, past_cache, result_of


class ReflectOnSample(dspy.Signature):
    """An AI program that is given a playbook worked on one task. Find out what can be learnt from it.

    Compare the attempt with the feedback. Say what went wrong and where, what the right approach is, and one insight
    that helps with other tasks of this kind, as concrete as the feedback allows: name the rule, formula or step. Where
    the attempt is right, say what made it right. Then judge each bullet of the playbook that the program cited:
    helpful, harmful or neutral."""

    task: str = dspy.InputField(desc="What the program was given.")
    attempt: str = dspy.InputField(desc="What it did, step by step.")
    feedback: str = dspy.InputField(desc="The score, and what is known of the right result.")
    cited_bullets: str = dspy.InputField(
        desc="The bullets of the playbook that it cited: id, how often it helped and harmed, text."
    )
    what_went_wrong: str = dspy.OutputField(desc="Empty if nothing did.", default="")
    right_approach: str = dspy.OutputField(default="")
    insight: str = dspy.OutputField(desc="What to remember for other tasks.")
    bullet_tags: str = dspy.OutputField(
        desc='JSON: an object of each cited id to "helpful", "harmful" or "neutral"; {} if none was cited.', default=""
    )


class CuratePlaybook(dspy.Signature):
    """A playbook holds what was learnt about a kind of task, one bullet an insight. Say how it is to be changed, given
    what was learnt from one more task.

    Add only what is new, true of other tasks too, and concrete. REMOVE what proved harmful, and what a
    better bullet that you add says. Mind the token budget: beyond it, the bullets that are worth least are dropped.
    Change nothing that need not change: an empty list is a good answer."""

    playbook: str = dspy.InputField(desc="As it is now: id, how often it helped and harmed, text.")
    sections: str = dspy.InputField(desc="The sections that a bullet may be in.")
    progress: str = dspy.InputField(desc="How far learning is, and how full the playbook.")
    task: str = dspy.InputField(desc="The task.")
    reflection: str = dspy.InputField(desc="What was learnt from it.")
    operations: str = dspy.OutputField(
        desc='JSON: a list of {"type": "ADD", "section": ..., "content": ...} and {"type": "REMOVE", "id": ...}.'
    )


class _RetryingPredict(dspy.Module):
    """A predictor that is asked again when its reply cannot be parsed.

    Where the second reply has no format either, its text is returned as the main field, and the parser's error as
    ``unreadable``: a weak model's insight is worth more than its format.
    """

    def __init__(self, signature: type[dspy.Signature], main: str) -> None:
        super().__init__()
        self.ask = dspy.Predict(signature)
        self.main = main

    def forward(self, **inputs: Any) -> dspy.Prediction:
        """Ask the predictor, twice where the first reply cannot be parsed, with the inputs of its signature."""
        return result_of(self._asked(inputs, is_sync=True))

    async def aforward(self, **inputs: Any) -> dspy.Prediction:
        """Do what `forward` does on the event loop."""
        return await self._asked(inputs, is_sync=False)

    async def _asked(self, inputs: dict[str, Any], is_sync: bool) -> dspy.Prediction:
        reply = dspy.Prediction()
        for attempt in range(ATTEMPTS):
            try:
                return await asked(self.ask, inputs | past_cache(attempt), is_sync)
            except AdapterParseError as error:
                reply = self._as_main_field(error)
        return reply

    def _as_main_field(self, error: AdapterParseError) -> dspy.Prediction:
        signature: Any = self.ask.signature
        empty = dict.fromkeys(signature.output_fields, "")
        reply = str(error.lm_response or "").strip()
        return dspy.Prediction(**{**empty, self.main: reply}, unreadable=str(error)[:200])


class SampleReflection(_RetryingPredict):
    """Reflects on one attempt: what went wrong, the right approach, an insight, and a tag for each cited bullet.

    Inputs: ``task``, ``attempt``, ``feedback``, ``cited_bullets``. Outputs: ``what_went_wrong``, ``right_approach``,
    ``insight``, ``bullet_tags`` (JSON of id to helpful, harmful or neutral), all text.
    """

    def __init__(self) -> None:
        super().__init__(ReflectOnSample, "insight")


class PlaybookCuration(_RetryingPredict):
    """Writes the operations on the playbook that a reflection calls for.

    Inputs: ``playbook``, ``sections``, ``progress``, ``task``, ``reflection``. Output: ``operations``, text with
    a JSON list, or the list itself.
    """

    def __init__(self) -> None:
        super().__init__(CuratePlaybook, "operations")
