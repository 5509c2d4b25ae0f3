"""Reflecting on rollouts of a program: what the reflection LM reads, and the new texts that it proposes.

Both are dspy's own GEPA adapter. Around it stands what that has no need for: the metric's feedback is asked for one
example at a time and only where it could say something new (see :mod:`.metric`), and an error of the provider is told
from one of the user's code.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import dspy
from dspy.primitives.module import Module
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from dspy.teleprompt.gepa.gepa_utils import DspyAdapter
from dspy.teleprompt.gepa.instruction_proposal import InstructionProposer
from gepa.core.adapter import EvaluationBatch

from dspy_flashevolve.engine.errors import FlashEvolveError, hook_that_raised
from dspy_flashevolve.engine.loop import LoopPortal, Threads
from dspy_flashevolve.engine.requests import gather
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.programs.faults import is_out_of_context, raise_provider_fault, recording_lm_calls
from dspy_flashevolve.programs.metric import Metric, Question, name_faults, questions_for, text_of, text_with, value_of
from dspy_flashevolve.programs.mistakes import Kind, Mistakes
from dspy_flashevolve.programs.placement import answers_asynchronously, has_own_aforward
from dspy_flashevolve.programs.replies import CutOffReplyError
from dspy_flashevolve.programs.usage import cost_of, counting_for_run, counting_usage, tokens_of

logger = logger_named(__name__)

T = TypeVar("T")
ReflectiveDataset = Mapping[str, Sequence[Mapping[str, Any]]]
Ask = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""Makes a request, in a slot, as often as it needs."""

SHRINK = 0.6
"""Share of the characters that did not fit the reflection LM's context which are shown to it instead: somewhat more
than half, since half of the examples are rarely half of the characters. Not tuned."""


@dataclass(frozen=True, slots=True)
class Reflection:
    """What a reflection proposed."""

    texts: dict[str, str]
    tokens: int
    cost_dollars: float = 0.0


class NothingToReadError(RuntimeError):
    """No rollout of a minibatch called a predictor whose instruction evolves, or no reply could be read."""


class UntracedProgramError(NothingToReadError):
    """A program answered, and dspy's trace has no call of its predictors, so that there is nothing to reflect on."""

    def __init__(self, components: Sequence[str], called: bool) -> None:
        if called:
            super().__init__(
                "the program answers, but all calls in dspy's trace are of predictors that are not its own, so that "
                f"there is nothing to reflect on. Its own are {', '.join(components)}. A predictor that is built in "
                "forward is another one in each call, and its instruction cannot evolve: build it in __init__ "
                "(self.answer = dspy.Predict(...)), and call that one in forward."
            )
        else:
            super().__init__(
                "the program answers, but no call of its predictors is in dspy's trace, so that there is nothing to "
                "reflect on. Threads that a program starts itself (ThreadPoolExecutor) are not traced: use "
                "dspy.Parallel or dspy.asyncify there, and dspy.Predict or a module of dspy's for every call."
            )


class ProposalTypeError(TypeError):
    """A proposer returned something else than a dict from component to text."""


class OversizedReflectionError(ValueError):
    """A reflection that reads a single example does not fit the context of its LM."""

    def __init__(self) -> None:
        super().__init__(
            "a single example, with outputs and feedback, does not fit the context window of the reflection LM. Give "
            "reflection_lm a larger context, or less max_tokens, or let outputs and feedback be shorter."
        )


class ReflectionRunner:
    """Reflects on the rollouts of one student program."""

    def __init__(self, adapter: DspyAdapter, metric: Metric, threads: Threads, mistakes: Mistakes) -> None:
        self._adapter, self._metric, self._threads, self._mistakes = adapter, metric, threads, mistakes
        asker = copy.copy(adapter)
        asker.custom_instruction_proposer = self._checking("instruction_proposer", adapter.custom_instruction_proposer)
        if adapter.custom_code_proposer is not None:
            asker.custom_code_proposer = self._checking("code_proposer", adapter.custom_code_proposer)
        self._asker = asker
        """The adapter, with proposers whose answers are checked."""
        self._hooks = {
            "instruction_proposer": _unless_ours(adapter.custom_instruction_proposer),
            "code_proposer": _unless_ours(adapter.custom_code_proposer),
            "metric": adapter.metric_fn,
        }
        """The user's objects that an error may come from; what dspy's proposers raise is about the LM's reply."""
        self._judges_anew = False
        """Whether the metric has given another score, and so another judgement, when it was asked for feedback."""
        self._warns_on_mismatch = adapter.warn_on_score_mismatch
        self._most_characters = math.inf
        """Characters of the examples of one component that a reflection reads."""

    async def readable(self, candidate: Mapping[str, str], evaluation: EvaluationBatch[Any, Any]) -> set[str]:
        """Find the components of which a reflection can read something in rollouts: the predictors that were called
        and whose replies dspy's adapter takes, and code where there is any rollout.

        Predictors of one signature and one instruction are told apart no better than by dspy's adapter.
        """
        adapter, trajectories = self._adapter, evaluation.trajectories or []
        calls = [
            predictor.signature
            for each in trajectories
            for predictor, _, output in each["trace"]
            if (
                adapter.add_format_failure_as_feedback
                if isinstance(output, FailedPrediction)
                else not isinstance(each["prediction"], FailedPrediction)
            )
        ]
        code = adapter._flex_paths if trajectories else ()  # pyright: ignore[reportPrivateUsage]
        found = {*await self._threads.run(self._own_calls, candidate, calls), *code}
        if not found:
            self._raise_untraced(candidate, trajectories)
            raise NothingToReadError("no reply in its minibatch could be read")
        return found

    def _own_calls(self, candidate: Mapping[str, str], signatures: Sequence[Any]) -> list[str]:
        """Find the names of the student's predictors that were called, by the signatures of the calls, as dspy does."""
        called = list({id(signature): signature for signature in signatures}.values())
        predictors: list[tuple[str, Any]] = self._adapter.student.named_predictors()
        own = {
            name: each.signature.with_instructions(candidate[name]) for name, each in predictors if name in candidate
        }
        return [name for name, mine in own.items() if any(signature.equals(mine) for signature in called)]

    async def dataset(
        self,
        candidate: dict[str, str],
        evaluation: EvaluationBatch[Any, Any],
        components: list[str],
        rng: random.Random | None,
        ask: Ask,
    ) -> ReflectiveDataset:
        """Return the records that a reflection reads, one list a component.

        Args:
            rng: picks one of several calls of a predictor. None to do as dspy.GEPA: by the adapter's own, shared one,
                and with one question to the metric after the other.
            ask: makes a request to the metric for feedback, and makes it again where the provider of a judge asks for
                that: so one example is asked for again, and not its minibatch.

        Raises:
            FlashEvolveError: of ``ask``, where the provider of a judge gave no answer, or refuses for good.
            UntracedProgramError: no call of the program's predictors was seen.
            Exception: what the metric raised while it gave feedback, in lockstep on one example and else on all of
                them, or that there was nothing to reflect on.
        """
        adapter, trajectories = copy.copy(self._adapter), evaluation.trajectories or []
        adapter.rng = adapter.rng if rng is None else rng
        adapter.feedback_map = questions_for(adapter.student.named_predictors(), trajectories)
        # It waits its turn among the reflections, one of which reads it next: made earlier, it would only lie there.
        try:
            dataset: Any = await self._guarded(
                lambda: ask(
                    lambda: self._threads.run(adapter.make_reflective_dataset, candidate, evaluation, components)
                )
            )
        except FlashEvolveError:
            raise
        except Exception as error:
            self._raise_untraced(candidate, trajectories, error)
            raise
        self._mistakes.record(Kind.TRACES, None)
        records: list[dict[str, Any]] = [record for records in dataset.values() for record in records]
        name_faults(records, trajectories)
        open_records = [record for record in records if isinstance(record.get("Feedback"), Question)]
        if rng is None:
            for record in open_records:
                record["Feedback"] = await self._feedback(record["Feedback"], ask, as_gepa=True)
            return dataset
        # One example of twelve without feedback is no reason to lose the other eleven.
        texts = await gather([partial(self._feedback_or_error, record["Feedback"], ask) for record in open_records])
        for record, text in zip(open_records, texts, strict=True):
            record["Feedback"] = text
        with_feedback = {
            name: [record for record in rows if not isinstance(record.get("Feedback"), Exception)]
            for name, rows in dataset.items()
        }
        if not any(with_feedback.values()) and (failed := [text for text in texts if isinstance(text, Exception)]):
            raise failed[0]
        return {name: rows for name, rows in with_feedback.items() if rows or not dataset[name]}

    def _raise_untraced(
        self, candidate: Mapping[str, str], trajectories: Sequence[Mapping[str, Any]], error: Exception | None = None
    ) -> None:
        """Say of a minibatch in which there is nothing to read that no call of the program's predictors was seen."""
        answered = [each for each in trajectories if not isinstance(each["prediction"], FailedPrediction)]
        calls = [predictor.signature for each in trajectories for predictor, _, _ in each["trace"]]
        if answered and not self._own_calls(candidate, calls):
            untraced = UntracedProgramError(list(candidate), bool(calls))
            self._mistakes.record(Kind.TRACES, self._mistakes.failure(untraced, ()))
            raise untraced from error

    async def _feedback_or_error(self, question: Question, ask: Ask) -> Any:
        """Return the feedback that a question is for, or what the metric raised on that example."""
        try:
            return await self._feedback(question, ask, as_gepa=False)
        except FlashEvolveError:
            raise
        except Exception as error:
            if error is self._mistakes.error:
                raise
            return error

    async def _feedback(self, question: Question, ask: Ask, as_gepa: bool) -> Any:
        """Return the feedback that a question is for: what came with the score, or the metric's answer."""
        with_score, is_alone = text_with(question.score), len(self._adapter.student.predictors()) == 1
        looks = False if self._judges_anew else self._metric.looks_at_the_call
        if with_score is not None and (looks is False or (looks is None and is_alone and not as_gepa)):
            return with_score

        async def call() -> Any:
            with counting_for_run():
                return await self._guarded(lambda: self._metric.feedback(*question.arguments))

        answer = await ask(call)
        self._mistakes.record(Kind.FEEDBACK, None)
        counted, now = value_of(question.score), value_of(answer)
        if now == counted:
            return text_of(answer)
        self._judges_anew = with_score is not None and is_alone and not as_gepa
        if self._warns_on_mismatch:
            self._warns_on_mismatch = False  # once a run
            logger.warning(
                "Metric %s scored an answer %s, and %s when it was asked for feedback on it: it judges anew, or scores "
                "single predictors. The first score counts%s. warn_on_score_mismatch=False leaves this warning out.",
                self._metric.name, counted, now, ", and the feedback that came with it" if self._judges_anew else "",
            )  # fmt: skip
        return with_score if self._judges_anew else text_of(answer)

    async def propose(
        self, candidate: dict[str, str], dataset: ReflectiveDataset, components: list[str], *, shrinks: bool = True
    ) -> Reflection:
        """Ask the reflection LM, or the user's proposer, for new texts; a proposer with an async ``acall`` is awaited.

        Args:
            shrinks: ask again with half of the examples where they do not fit the LM's context, down to one.
        """
        self._mistakes.raise_known()
        acall = self._awaitable_proposer(components)

        async def call() -> dict[str, str]:
            while True:
                examples = {name: _fitting(rows, self._most_characters) for name, rows in dataset.items()}
                try:
                    if acall is None:
                        propose: Any = self._asker.propose_new_texts
                        return checked_texts(await self._threads.run(propose, candidate, examples, components))
                    with dspy.context(lm=self._adapter.reflection_lm or dspy.settings.lm):
                        answer = await acall(
                            candidate=candidate, reflective_dataset=examples, components_to_update=components
                        )
                    proposer = self._adapter.custom_instruction_proposer
                    return checked_texts(checked_proposal(answer, "instruction_proposer", proposer))
                except Exception as error:
                    if not shrinks or not is_out_of_context(error):
                        raise
                    count = max(map(len, examples.values()), default=0)
                    if count < 2:
                        raise OversizedReflectionError from error
                    if self._most_characters == math.inf:
                        logger.warning(
                            "A reflection on %d examples does not fit the context window of the reflection LM: it is "
                            "asked for again with half of them, and later ones begin with fewer characters. Set "
                            "reflection_minibatch_size below %d, or give reflection_lm a larger context. It said: "
                            "%.300s", count, count, error,
                        )  # fmt: skip
                    characters = max(sum(len(str(record)) for record in rows) for rows in examples.values())
                    self._most_characters = min(self._most_characters, SHRINK * characters)

        with counting_usage() as usage:
            texts = await self._guarded(call, Kind.REFLECTIONS)
        self._mistakes.record_useful_reflection()
        return Reflection(texts, tokens_of(usage), cost_of(usage))

    def _checking(self, hook: str, proposer: Any) -> Callable[..., Any]:
        """Make a proposer, for calls in threads, of which a coroutine that it returns runs on the run's loop, and whose
        answer is checked (:func:`checked_proposal`)."""

        def propose(**arguments: Any) -> Mapping[str, Any]:
            answer = proposer(**arguments)
            if inspect.iscoroutine(answer):
                answer = LoopPortal(self._threads.loop).run(answer)
            return checked_proposal(answer, hook, proposer)

        return propose

    def _awaitable_proposer(self, components: list[str]) -> Callable[..., Awaitable[Any]] | None:
        proposer = self._adapter.custom_instruction_proposer
        acall = getattr(proposer, "acall", None)
        if isinstance(proposer, Module) and not has_own_aforward(proposer):
            return None  # every module has an ``acall``; not every one can be awaited
        lm = self._adapter.reflection_lm or dspy.settings.lm
        built_in: Any = InstructionProposer  # a user's own proposer knows best what its LM can do
        if isinstance(proposer, built_in) and lm is not None and not answers_asynchronously(lm):
            return None  # its LM overrides ``forward`` alone: awaited, it would send the request elsewhere
        has_code = any(name in self._adapter._flex_paths for name in components)  # pyright: ignore[reportPrivateUsage]
        return acall if inspect.iscoroutinefunction(acall) and not has_code else None

    async def _guarded(self, call: Callable[[], Awaitable[T]], kind: Kind = Kind.FEEDBACK) -> T:
        """Tell the provider's faults from what the user's code raised, and name that code."""
        with recording_lm_calls() as calls:
            try:
                return await call()
            except Exception as error:
                raise_provider_fault(error, calls.errors)
                hook = hook_that_raised(error, self._hooks)
                if hook is not None:
                    logger.warning("%s raised %s: %.300s", hook, type(error).__name__, error)
                    if hook.startswith("metric"):
                        kind = Kind.FEEDBACK
                if kind is Kind.REFLECTIONS:
                    self._mistakes.warn_of_useless_reflections(error)
                if kind is Kind.REFLECTIONS or hook is not None:
                    failure = self._mistakes.failure(error, calls.errors)
                    is_of_provider = failure is not None and failure.refused and kind is Kind.FEEDBACK
                    # What dspy cannot use was written by the LM; that replies are cut off is a matter of its settings.
                    is_of_reply = hook is None and calls.has_answer and not calls.errors
                    is_of_reply = is_of_reply and not isinstance(error, CutOffReplyError | ProposalTypeError)
                    self._mistakes.record(kind, None if is_of_provider or is_of_reply else failure)
                raise


def _fitting(records: Sequence[Mapping[str, Any]], most_characters: float) -> Sequence[Mapping[str, Any]]:
    """Return the shortest records, in their order, that have so many characters together; at least one.

    An example that never fits keeps no other out.
    """
    if most_characters == math.inf:
        return records
    lengths = [len(str(record)) for record in records]
    shortest = sorted(range(len(records)), key=lengths.__getitem__)
    count = sum(total <= most_characters for total in accumulate(lengths[index] for index in shortest))
    return [records[index] for index in sorted(shortest[: max(1, count)])]


def _unless_ours(proposer: Any) -> Any:
    """A proposer; None where it is dspy's or this package's."""
    return None if type(proposer).__module__.startswith(("dspy.", "dspy_flashevolve.")) else proposer


def checked_proposal(answer: Any, hook: str, proposer: Any) -> Mapping[str, Any]:
    """Return what a proposer returned, if it is a mapping."""
    if isinstance(answer, Mapping):
        return answer
    name = getattr(proposer, "__qualname__", type(proposer).__qualname__)
    raise ProposalTypeError(
        f"{hook} {name} returned {answer!r:.80}, expected a dict from component to its new text, as in "
        "{'self': 'Answer in one word.'}. Leave a component out that is to stay as it is."
    )


def checked_texts(texts: Mapping[str, Any]) -> dict[str, str]:
    """Return new texts of components, if a program can be built with them."""
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ProposalTypeError(f"the proposal for {name!r} is {text!r:.80}, expected a text.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the proposal for {name!r} is not valid Unicode: {error.reason}.") from None
    return dict(texts)
