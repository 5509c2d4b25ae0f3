"""Running a candidate on examples: in the sandbox, scored by the host on what came back."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import EnumMeta
from typing import Any

from dspy.adapters.utils import find_enum_member
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from dspy_flashevolve.engine.errors import RolloutUnresolvedError
from dspy_flashevolve.harness.archive import Trial
from dspy_flashevolve.harness.costs import Cost
from dspy_flashevolve.harness.drafts import Draft
from dspy_flashevolve.sandbox.contract import CallLm, CodeSandbox, Job
from dspy_flashevolve.sandbox.outcomes import Failure, Outcome, SandboxError

Score = Callable[[Any, dict[str, Any]], Awaitable["Scored"]]
"""Scores an example and the fields of a prediction, in the host."""


@dataclass(frozen=True)
class Scored:
    """A metric's answer.

    Args:
        score: higher is better.
        feedback: its words; empty where it has none.
    """

    score: float
    feedback: str = ""


class CandidateRunner:
    """Runs candidates of one task.

    Args:
        sandbox: where their code runs.
        outputs: output field -> its type.
        call_lm: makes their LM calls.
        score: scores what came back.
        cost: of a run.
        adapter: the class name of dspy's adapter.
        failure_score: of a run that failed.
    """

    def __init__(
        self,
        sandbox: CodeSandbox,
        outputs: Mapping[str, Any],
        call_lm: CallLm,
        score: Score,
        cost: Cost,
        adapter: str = "ChatAdapter",
        failure_score: float = 0.0,
    ) -> None:
        self._sandbox = sandbox
        self._outputs = outputs
        self._call_lm = call_lm
        self._score = score
        self._cost = cost
        self._adapter = adapter
        self._failure_score = failure_score

    async def predict(self, draft: Draft, example: Any, name: str, *, memory: Any = None, labelled: bool) -> Trial:
        """Run a candidate on one example and score what it answers.

        Args:
            example: only its inputs go to the candidate.
            name: of the example, for people.
            memory: what the candidate has learnt.
            labelled: keep the example's labels and the metric's words: for training examples.

        Raises:
            RolloutUnresolvedError: the sandbox failed, not the candidate.
            TransientError: the provider asks to come back later.
            RunAbortedError: the provider refuses for good.
        """
        inputs = as_json(dict(example.inputs()))
        outcome = await self._run(self._job(draft, memory, inputs=inputs))
        fields: dict[str, Any] = {}
        if outcome.failure is None:
            fields, failure = typed_fields(outcome.fields, self._outputs)
            outcome = replace(outcome, failure=failure)
        scored = Scored(self._failure_score)
        if outcome.failure is None:
            scored = await self._score(example, fields)
        return Trial(
            example=name,
            inputs=inputs,
            outcome=outcome,
            score=scored.score,
            feedback=scored.feedback if labelled else "",
            cost=self._cost(outcome),
            labels=as_json(dict(example.labels())) if labelled else {},
        )

    async def learn(self, draft: Draft, memory: Any, batch: Sequence[Trial]) -> Outcome:
        """Let a candidate learn from its runs on training examples.

        Raises:
            RolloutUnresolvedError: the sandbox failed, not the candidate.
        """
        told = [
            {
                "inputs": one.inputs,
                "labels": one.labels,
                "prediction": one.outcome.fields,
                "score": one.score,
                "feedback": one.feedback,
            }
            for one in batch
        ]
        return await self._run(self._job(draft, memory, batch=told))

    def _job(self, draft: Draft, memory: Any, **what: Any) -> Job:
        remembered = {} if memory is None and draft.learns else memory
        return Job(draft.source, draft.class_name, memory=remembered, adapter=self._adapter, **what)

    async def _run(self, job: Job) -> Outcome:
        try:
            return await self._sandbox.run(job, self._call_lm)
        except SandboxError as error:
            raise RolloutUnresolvedError(f"the sandbox failed: {error}") from error


def as_json(value: Any) -> Any:
    """A value as JSON: what is no JSON by itself is written as its text.

    >>> as_json({"when": {1, }, "what": object})
    {'when': [1], 'what': "<class 'object'>"}
    """
    return json.loads(json.dumps(to_jsonable_python(value, fallback=repr)))


def typed_fields(fields: Mapping[str, Any], outputs: Mapping[str, Any]) -> tuple[dict[str, Any], Failure | None]:
    """The fields that a candidate returned, as the types of the output fields.

    Texts that are the JSON of a value are read; nothing is repaired here: that takes any time that a candidate likes.

    Returns:
        The fields, and a failure where one is missing or is no such type.

    >>> typed_fields({"n": "3"}, {"n": int})
    ({'n': 3}, None)
    >>> print(typed_fields({}, {"n": int})[1])
    interface: forward returned no output field 'n'
    """
    typed: dict[str, Any] = dict(fields)
    for name, kind in outputs.items():
        if name not in fields:
            return {}, Failure("interface", f"forward returned no output field {name!r}")
        try:
            typed[name] = _typed(fields[name], kind)
        except Exception as error:  # pydantic's errors, and those of a user's own validator
            said = f"{type(error).__name__}: {error}"[:300]
            return {}, Failure("interface", f"forward returned {fields[name]!r:.100} as {name!r} ({said})")
    return typed, None


def _typed(value: Any, kind: Any) -> Any:
    if kind is str:
        return str(value)
    if isinstance(kind, EnumMeta):
        return find_enum_member(kind, value)
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    try:
        return adapter.validate_python(value)
    except ValidationError:
        if not isinstance(value, str):
            raise
        return adapter.validate_json(value)
