"""The module that reads stale children, as the evolution loop sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspy.primitives.module import Module

from dspy_flashevolve.engine.integration import VERDICTS, Integration, IntegrationRequest, Judgement
from dspy_flashevolve.engine.threads import Threads
from dspy_flashevolve.programs.asking import ask_module
from dspy_flashevolve.programs.copies import isolated_copy
from dspy_flashevolve.programs.lm import LanguageModels
from dspy_flashevolve.programs.replies import checked_texts


class DspyIntegrator:
    """Runs a module with the signature of ``StaleCandidateReflection``.

    Args:
        module: the user's, or the default one; each integration runs a copy.
        lm: what it asks, unless its predictors have LMs of their own.
        code_components: components that hold Python source.
        threads: for modules without a usable ``aforward``.
        priced: work out what the calls cost.
        models: the run's twins of the predictors' own LMs; None to call these as they are.
    """

    def __init__(
        self,
        module: Module,
        lm: Any,
        code_components: Sequence[str],
        threads: Threads,
        priced: bool = False,
        models: LanguageModels | None = None,
    ) -> None:
        self._module = module if models is None else models.replace_in(isolated_copy(module))
        self._lm = lm
        self._code = tuple(code_components)
        self._threads = threads
        self._priced = priced

    async def integrate(self, request: IntegrationRequest) -> Integration:
        """Run the module.

        Raises:
            TransientError: the provider asks to come back later.
            RunAbortedError: the provider refuses for good.
        """
        module = isolated_copy(self._module)
        inputs: dict[str, Any] = {
            "head": dict(request.head),
            "children": list(request.children),
            "commits": list(request.commits),
            "code_components": list(self._code),
        }
        asked = await ask_module(
            module,
            inputs,
            lm=self._lm,
            threads=self._threads,
            priced=self._priced,
            read=lambda answer: _read(answer, request),
        )
        texts, judgements, problem = asked.answer or ({}, (), asked.spent.error)
        return Integration(
            texts,
            judgements,
            max(1, asked.calls),
            asked.spent.tokens,
            asked.spent.cost_dollars if self._priced else None,
            problem[:300],
        )


def _read(answer: Any, request: IntegrationRequest) -> tuple[dict[str, str], tuple[Judgement, ...], str]:
    """What the module said; a component whose text could not be read is left as it is in the head."""
    changed = {name for child in request.children for name in child.texts}
    texts = {name: str(text) for name, text in dict(answer.texts).items() if name in changed and text}
    numbers = {child.number for child in request.children}
    judgements = tuple(
        Judgement(one.child, one.verdict, str(one.reason))
        for one in answer.verdicts
        if one.child in numbers and one.verdict in VERDICTS
    )
    failed = dict(getattr(answer, "failed", None) or {})
    problem = "; ".join(f"{name}: {why}" for name, why in failed.items())  # a part of it would lose the rest
    return (
        checked_texts(texts),
        judgements,
        problem or ("" if texts or judgements else "the module returned neither text nor verdict"),
    )
