"""Texts written anew: when the reflection LM writes a head as one clean text, and what it is told of it.

A head that has grown by many separate edits is a list without order. And of children that wrote the whole text anew at
the same time one is in the head: what the others know, its alternatives, comes together by being read beside it.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from itertools import islice
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

LEAST_ALTERNATIVES, MOST_ALTERNATIVES = 2, 8
"""So many alternatives have a text written anew, and so many are read at most. Of rewrites that were made at the same
time one is in the head; what the others know is lost without that."""
CONSOLIDATION, JOINED = "consolidation", "joined alternatives"
"""Tags of proposals that are written anew: of the head alone, and of what its alternatives know as well."""


class Consolidations:
    """Has heads written anew.

    Args:
        run: slots, journal.
        pool: gepa's state.
        credit: knows the changes in a head, their effects, and the alternatives.
        calls: counts the requests.
        settings: the LM that is asked, and how long texts may be.
    """

    def __init__(
        self, run: DspyRun, pool: Pool, credit: Credit, calls: ReflectionCalls, settings: GepaSettings
    ) -> None:
        self._run, self._pool, self._credit, self._calls, self._settings = run, pool, credit, calls, settings

    def alternatives(self, chosen: Collection[int]) -> dict[str, dict[int, str]]:
        """Find the components of a candidate that have enough alternatives. Runs in the pool's writer.

        Args:
            chosen: the changes in the candidate.

        Returns:
            Component -> step that made an alternative -> its text, the best first; nothing where no LM may be asked.
        """
        if self._calls.are_spent:
            return {}
        return {
            name: dict(islice(children.items(), MOST_ALTERNATIVES))
            for name, children in self._credit.alternatives(chosen).items()
            if len(children) >= LEAST_ALTERNATIVES
        }

    def may_write(self, texts: Texts) -> bool:
        """Whether a candidate that has grown may still be written anew: once each. Runs in the pool's writer."""
        return not (self._calls.are_spent or self._credit.is_written_anew(texts))

    async def written(self, step: Step, head: Proposal, least_edits: int, joins: bool) -> Screened | None:
        """Let the reflection LM write anew the components of a head that have grown, or have alternatives.

        Args:
            step: that pays the request.
            head: what was composed.
            least_edits: a text with fewer is left as it is.
            joins: whether alternatives are read.

        Returns:
            The new candidate; None where there is nothing to write anew, and where no reply came or one that is of no
            use: it changes nothing, is a candidate of the pool already, or is much longer than all that it was made of.
        """
        texts = head.candidate
        effects, others = await self._pool.write(self._inputs, texts, least_edits, joins)
        names = {**effects, **others}
        if not names or self._calls.are_spent:
            return None
        inputs: dict[str, dict[str, Any]] = {
            "texts": {name: texts[name] for name in names},
            "effects": effects,
            "alternatives": {name: list(children.values()) for name, children in others.items()},
        }
        record = ReplyText(hash_of({"consolidate": json.dumps(inputs["texts"], sort_keys=True)}))
        lm = self._settings.reflection_lm
        if effects:
            await self._pool.write(self._credit.mark_written_anew, texts)
        try:
            asked = await self._run.call_module(
                "integrate", step, Consolidation(), inputs, lm=lm, read=_clean_texts, record=record
            )
        except RolloutUnresolvedError:
            return None
        self._calls.record_reflections(asked.calls)
        await self._pool.write(self._credit.mark_read, [number for children in others.values() for number in children])
        clean = {**texts, **(asked.answer or {})}
        most, each = self._settings.workflow.max_candidate_characters, self._settings.max_text_characters
        if is_too_long(clean, most, each, texts) or any(
            len(clean[name]) > len(texts[name]) + sum(map(len, others.get(name, {}).values())) + SPARE_CHARACTERS
            for name in names
        ):
            return None
        if clean == texts or await self._pool.write(lambda: clean in self._pool.state.program_candidates):
            return None
        return Screened(replace(head, candidate=clean, tag=CONSOLIDATION if effects else JOINED))

    def _inputs(self, texts: Texts, least_edits: int, joins: bool) -> tuple[dict[str, Any], dict[str, dict[int, str]]]:
        """The effects of edits and the alternatives, of the components that are written anew."""
        others = self.alternatives(self._credit.changes_in(texts)) if joins else {}
        effects = self._credit.effects_in(texts)
        grown = {name: effects.get(name, []) for name in self._credit.grown_in(texts)}
        return {name: rows for name, rows in grown.items() if len(rows) >= least_edits}, others


def _clean_texts(answer: Any) -> dict[str, str]:
    """Read the texts that a consolidation wrote."""
    return checked_texts(dict(answer.texts))
