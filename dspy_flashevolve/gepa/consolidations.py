"""Texts written anew: the reflection LM writes a head, which has grown by many separate edits, as one clean text."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from dspy_flashevolve.engine.errors import RolloutUnresolvedError
from dspy_flashevolve.engine.replay import hash_of
from dspy_flashevolve.engine.staleness import Texts
from dspy_flashevolve.engine.steps import Step
from dspy_flashevolve.gepa.changes import is_too_long
from dspy_flashevolve.gepa.credit import Credit
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.propose import ReflectionCalls
from dspy_flashevolve.gepa.records import Proposal, Screened
from dspy_flashevolve.gepa.repair import SPARE_CHARACTERS
from dspy_flashevolve.gepa.settings import GepaSettings
from dspy_flashevolve.modules.consolidate import Consolidation
from dspy_flashevolve.programs.records import ReplyText
from dspy_flashevolve.programs.reflection import checked_texts
from dspy_flashevolve.programs.run import DspyRun

CONSOLIDATION = "consolidation"
"""Tag of proposals that are written anew."""


class Consolidations:
    """Has heads written anew.

    Args:
        run: slots, journal.
        pool: gepa's state.
        credit: knows the changes in a head, and their effects.
        calls: counts the requests.
        settings: the LM that is asked, and how long texts may be.
    """

    def __init__(
        self, run: DspyRun, pool: Pool, credit: Credit, calls: ReflectionCalls, settings: GepaSettings
    ) -> None:
        self._run, self._pool, self._credit, self._calls, self._settings = run, pool, credit, calls, settings

    def may_write(self, texts: Texts) -> bool:
        """Whether a candidate that has grown may still be written anew: once each. Runs in the pool's writer."""
        return not (self._calls.are_spent or self._credit.is_written_anew(texts))

    async def written(self, step: Step, head: Proposal, least_edits: int) -> Screened | None:
        """Let the reflection LM write anew the components of a head that have grown.

        Args:
            step: that pays the request.
            head: what was composed.
            least_edits: a text with fewer is left as it is.

        Returns:
            The new candidate; None where there is nothing to write anew, and where no reply came or one that is of no
            use: it changes nothing, is a candidate of the pool already, or is much longer than all that it was made of.
        """
        texts = head.candidate
        effects = await self._pool.write(self._credit.effects_in_grown, texts, least_edits)
        if not effects or self._calls.are_spent:
            return None
        await self._pool.write(self._credit.mark_written_anew, texts)
        inputs: dict[str, dict[str, Any]] = {"texts": {name: texts[name] for name in effects}, "effects": effects}
        record = ReplyText(hash_of({"consolidate": json.dumps(inputs["texts"], sort_keys=True)}))
        lm = self._settings.reflection_lm
        try:
            asked = await self._run.call_module(
                "integrate", step, Consolidation(), inputs, lm=lm, read=_clean_texts, record=record
            )
        except RolloutUnresolvedError:
            return None
        self._calls.record_reflections(asked.calls)
        clean = {**texts, **(asked.answer or {})}
        most, each = self._settings.workflow.max_candidate_characters, self._settings.max_text_characters
        if is_too_long(clean, most, each, texts) or any(
            len(clean[name]) > len(texts[name]) + SPARE_CHARACTERS for name in effects
        ):
            return None
        if clean == texts or await self._pool.write(lambda: clean in self._pool.state.program_candidates):
            return None
        return Screened(replace(head, candidate=clean, tag=CONSOLIDATION))


def _clean_texts(answer: Any) -> dict[str, str]:
    """Read the texts that a consolidation wrote."""
    return checked_texts(dict(answer.texts))
