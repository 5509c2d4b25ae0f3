"""What AsyncMetaHarness makes of its student, its data and the settings of dspy: one task for candidates to solve."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import dspy
from dspy.predict.flex.ctx import FlexContext
from dspy.primitives import Example, Module

from dspy_flashevolve.engine.errors import ConfigurationError, DataError, FlashEvolveError
from dspy_flashevolve.engine.threads import Threads
from dspy_flashevolve.harness.calling import call_in_thread, call_on_loop
from dspy_flashevolve.harness.drafts import Draft, DraftError, draft_of
from dspy_flashevolve.harness.evaluating import Score, Scored, as_json
from dspy_flashevolve.programs.asynchrony import answers_asynchronously
from dspy_flashevolve.programs.faults import raise_provider_fault
from dspy_flashevolve.programs.lm_calls import heard_lm_calls
from dspy_flashevolve.programs.metric import Metric
from dspy_flashevolve.sandbox.contract import CallLm, LmAnswer
from dspy_flashevolve.sandbox.lm_requests import LmRequest

FLEX: Any = dspy.Flex
"""Its decorator hides from type checkers that it is a class."""
MESSAGE_CHARACTERS = 1000


@dataclass(frozen=True)
class HarnessTask:
    """What candidates are to solve.

    Args:
        signature: inputs and outputs.
        seed: the first candidate.
        lm: the student's own LM; None for the configured one.
        trainset: examples whose labels a proposer, and ``learn``, may see.
        valset: examples that candidates are scored on; their labels stay with the metric.
        lessons: the training examples that are not in the valset: those that ``learn`` is given.
    """

    signature: Any
    seed: Draft
    lm: Any
    trainset: Sequence[Example]
    valset: Sequence[Example]
    lessons: Sequence[Example]

    @property
    def smoke_examples(self) -> Sequence[Example]:
        """What new candidates are tried on, and proposers see the traces of: lessons, where there are any."""
        return self.lessons or self.trainset

    @property
    def inputs(self) -> list[str]:
        """Names of the input fields."""
        return list(self.signature.input_fields)

    @property
    def outputs(self) -> dict[str, Any]:
        """Output field -> type."""
        return {name: field.annotation for name, field in self.signature.output_fields.items()}

    @property
    def description(self) -> str:
        """For the proposer."""
        return FlexContext(signature_cls=self.signature).render_signature_spec()


def task_of(student: Any, trainset: Any, valset: Any) -> HarnessTask:
    """The task that a student and its data are.

    Raises:
        ConfigurationError: the student is not one whose source is known.
        DataError: no data, or data that do not fit the student.
    """
    signature, source, lm = _source_of(student)
    train = _examples("trainset", trainset, signature)
    val = train if valset is None else _examples("valset", valset, signature)
    scored = {_key(example) for example in val}
    lessons = [example for example in train if _key(example) not in scored]
    try:
        seed = draft_of(source, list(signature.input_fields))
    except DraftError as error:
        raise DataError(f"the student's source is no harness: {error}.") from error
    return HarnessTask(signature, seed, lm, train, val, lessons)


def _source_of(student: Any) -> tuple[Any, str, Any]:
    """Signature, source and LM of a student."""
    if isinstance(student, FLEX):
        if student._flex_ctx.tools:  # pyright: ignore[reportPrivateUsage]
            raise ConfigurationError(
                "the student has tools, and these would have to run in the sandbox: leave them out, or write them "
                "into its module_src."
            )
        return student.signature, student.module_src or "", student.lm
    predictor = student.predict if isinstance(student, dspy.ChainOfThought) else student
    if not isinstance(predictor, dspy.Predict):
        kind = f"a {type(student).__name__}" if isinstance(student, Module) else repr(student)
        raise ConfigurationError(
            f"the student is {kind}, expected a dspy.Predict or dspy.ChainOfThought; for any other program write its "
            "source into a Harness(signature, module_src), and give that."
        )
    signature: Any = predictor.signature
    if isinstance(student, dspy.ChainOfThought):
        signature = signature.delete("reasoning")
    source = FLEX(signature).module_src or ""
    if isinstance(student, dspy.ChainOfThought):
        source = source.replace("dspy.Predict(", "dspy.ChainOfThought(", 1)
    return signature, source, predictor.lm


def _examples(name: str, data: Any, signature: Any) -> list[Example]:
    examples = [] if data is None else list(data)
    if not examples:
        raise DataError(f"{name} is empty, expected at least one dspy.Example.")
    for number, example in enumerate(examples):
        if not isinstance(example, Example) or example._input_keys is None:  # pyright: ignore[reportPrivateUsage]
            raise DataError(
                f"{name}[{number}] is {example!r:.80}, expected a dspy.Example(...).with_inputs(...), which says what "
                "the inputs are."
            )
        missing = set(signature.input_fields) - set(example.inputs().keys())
        if missing:
            raise DataError(f"{name}[{number}] lacks the student's inputs {sorted(missing)}.")
    return examples


def _key(example: Example) -> str:
    return json.dumps(as_json(dict(example.inputs())), sort_keys=True)


def lm_caller(lm: Any, threads: Threads) -> CallLm:
    """Makes candidates' LM calls: on the loop where the LM can, else in a thread.

    Args:
        lm: the run's twin of it.
        threads: the run's.
    """

    on_loop = answers_asynchronously(lm)

    async def call(request: LmRequest) -> LmAnswer:
        with heard_lm_calls() as calls:
            try:
                if on_loop:
                    return await call_on_loop(lm, request)
                return await threads.run(call_in_thread, lm, request)
            except Exception as error:
                raise_provider_fault(error, calls.errors)
                return LmAnswer(None, f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS])

    return call


def scorer(metric: Metric, failure_score: float) -> Score:
    """Scores what came back, as dspy.GEPA reads a metric: a number, or a prediction with ``score`` and ``feedback``.

    An error of the metric's is ``failure_score``; one of the provider's (an LM that judges) is none.
    """

    async def score(example: Any, fields: dict[str, Any]) -> Scored:
        with heard_lm_calls() as calls:
            try:
                raw = await metric.score(example, dspy.Prediction(**fields))
                found = float(raw.score if isinstance(raw, dspy.Prediction) else raw)
            except FlashEvolveError:
                raise
            except Exception as error:
                raise_provider_fault(error, calls.errors)
                said = f"the metric raised {type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]
                return Scored(failure_score, said)
        feedback = raw.get("feedback", "") if isinstance(raw, dspy.Prediction) else ""
        return Scored(found if math.isfinite(found) else failure_score, str(feedback or ""))

    return score
