"""Run a copy of a program with a candidate on one example: output, score, trace.

What counts as a failure, and what it scores, is what ``dspy.teleprompt.bootstrap_trace_data`` and
``dspy.Evaluate`` make of it inside dspy.GEPA, one example at a time. The one difference: an error of the
provider is not a score (see :mod:`dspy_flashevolve.programs.faults`).
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from types import SimpleNamespace
from typing import Any, cast

import anyio
import dspy
from dspy.adapters.types.tool import Tool
from dspy.clients.base_lm import BaseLM
from dspy.primitives.code_interpreter import CodeInterpreterError
from dspy.primitives.module import Module
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from dspy.teleprompt.gepa.gepa_utils import DspyAdapter
from dspy.utils.callback import BaseCallback
from dspy.utils.dummies import DummyLM
from dspy.utils.exceptions import AdapterParseError
from dspy.utils.usage_tracker import track_usage

from dspy_flashevolve.engine.errors import FlashEvolveError
from dspy_flashevolve.engine.loop import Threads
from dspy_flashevolve.engine.rollouts import Rollout
from dspy_flashevolve.programs.faults import LmCalls, heard_lm_calls, raise_provider_fault
from dspy_flashevolve.programs.lm import LanguageModels, cost_of, tokens_of
from dspy_flashevolve.programs.metric import Metric
from dspy_flashevolve.programs.records import RolloutRecords

logger = logging.getLogger(__name__)

PROTOTYPES = 64
"""Programs that are kept ready; older ones are built again when they are needed."""
BLOCKING = ("CodeAct", "Flex", "ProgramOfThought", "RLM")
"""dspy's modules that run code in an interpreter and wait for it."""


def settings_snapshot() -> dict[str, Any]:
    """Every dspy setting as it is now, so that a later ``dspy.configure`` does not reach a run."""
    return dict(dspy.settings.copy())


def plain_adapter(student: Module, metric: Callable[..., Any], failure_score: float = 0.0) -> DspyAdapter:
    """dspy's adapter, for what builds and runs candidates of ``student`` and reflects on nothing."""
    return DspyAdapter(student_module=student, metric_fn=metric, feedback_map={}, failure_score=failure_score)


@dataclass(frozen=True, slots=True)
class _Run:
    """A finished run: the prediction and its trace, or the error that ended it."""

    prediction: Any
    trace: list[Any]
    error: Exception | None = None


class ProgramRunner:
    """Runs candidates of one student program.

    Args:
        adapter: builds programs from candidates.
        metric: scores predictions.
        threads: where programs without a usable ``aforward`` run.
        priced: work out what the calls cost.
        models: pace the predictors' own LMs; None to call these as they are.
        finite: a score that is no finite number is a failure, with a warning; else it is passed on, as dspy.GEPA does.
    """

    def __init__(
        self,
        adapter: DspyAdapter,
        metric: Metric,
        threads: Threads,
        priced: bool = False,
        models: LanguageModels | None = None,
        finite: bool = False,
    ) -> None:
        self._adapter = adapter
        self._metric = metric
        self._threads = threads
        self._priced = priced
        self._models = models
        self._finite = finite
        self._flex = bool(adapter._flex_paths)  # pyright: ignore[reportPrivateUsage]
        self.records = RolloutRecords(adapter.student, code=self._flex)
        """How its rollouts are written down."""
        self._prototypes: OrderedDict[tuple[tuple[str, str], ...], Module | Exception] = OrderedDict()
        self._building = anyio.Lock()
        self._on_loop: bool | None = None

    @property
    def on_loop(self) -> bool:
        """Whether rollouts run on the loop; False before the first one."""
        return bool(self._on_loop)

    async def rollout(self, candidate: dict[str, str], example: dspy.Example, *, capture_traces: bool) -> Rollout:
        """Run ``candidate`` on ``example``.

        Raises:
            TransientError: the provider asks to come back later.
            RunAbortedError: the provider refuses for good.
        """
        prototype = await self._prototype(candidate)
        if isinstance(prototype, Exception):
            return Rollout(None, self._adapter.failure_score)
        with track_usage() as usage, heard_lm_calls() as calls:
            run = await self._run(isolated_copy(prototype), example, calls)
            if dspy.settings.track_usage and isinstance(run.prediction, dspy.Prediction):
                run.prediction.set_lm_usage(usage.get_total_tokens())
            rollout = await self._scored(example, run, capture_traces, calls)
        return replace(rollout, tokens=tokens_of(usage), cost_dollars=cost_of(usage) if self._priced else 0.0)

    async def _prototype(self, candidate: dict[str, str]) -> Module | Exception:
        """The program of a candidate; rollouts run copies of it. One is built at a time, each once."""
        key = tuple(sorted(candidate.items()))
        if key not in self._prototypes:
            async with self._building:
                if key not in self._prototypes:
                    self._prototypes[key] = await self._threads.run(self._built, candidate)
                while len(self._prototypes) > PROTOTYPES:
                    self._prototypes.popitem(last=False)
        self._prototypes.move_to_end(key)
        return self._prototypes[key]

    def _built(self, candidate: dict[str, str]) -> Module | Exception:
        if self._flex:
            try:
                program: Module = self._adapter.build_program(candidate)
            except (SyntaxError, CodeInterpreterError) as error:
                logger.warning("Candidate failed to build (%s); its rollouts score as failures.", error)
                return error
        else:  # as dspy's adapter, but the data that a student carries is shared, not copied a candidate
            program = isolated_copy(self._adapter.student)
            for name, predictor in program.named_predictors():
                if name in candidate:
                    signature: Any = predictor.signature
                    predictor.signature = signature.with_instructions(candidate[name])
        return program if self._models is None else self._models.replace_in(program)

    async def _run(self, program: Module, example: dspy.Example, calls: LmCalls) -> _Run:
        if self._on_loop is None:
            self._on_loop = runs_on_loop(program)
        inputs: dict[str, Any] = {}
        trace: list[Any] = []
        with dspy.context(trace=trace):
            try:
                inputs = dict(example.inputs())
                if self._on_loop:
                    prediction = await program.acall(**inputs)
                else:
                    prediction = await self._threads.run(program, **inputs)
            except asyncio.CancelledError as error:
                if anyio.current_effective_deadline() == -math.inf:
                    raise  # the run is being cancelled, not the program by itself
                return self._crash(trace, RuntimeError(f"the program was cancelled: {error}"), calls)
            except AdapterParseError as error:
                return self._parse_failure(program, inputs, trace, error)
            except Exception as error:
                return self._crash(trace, error, calls)
        return _Run(prediction, list(trace))

    def _parse_failure(
        self, program: Module, inputs: dict[str, Any], trace: list[Any], error: AdapterParseError
    ) -> _Run:
        """A reply that did not fit the format is worth reflecting on; dspy.GEPA drops half-parsed ones."""
        predictor = next((p for p in program.predictors() if p.signature == error.signature), None)
        if error.parsed_result or predictor is None:
            return _Run(None, [], error)
        failed = FailedPrediction(error.lm_response or "", format_reward=self._adapter.failure_score)
        return _Run(failed, [*trace, (predictor, inputs, failed)])

    def _crash(self, trace: list[Any], error: Exception, calls: LmCalls) -> _Run:
        raise_provider_fault(error, calls.errors)
        if not self._flex:
            return _Run(None, [], error)
        logger.warning("Program raised on an example: %s", _said(error))
        return _Run(FailedPrediction(_said(error)), list(trace))

    async def _scored(self, example: Any, run: _Run, capture_traces: bool, calls: LmCalls) -> Rollout:
        failure = self._adapter.failure_score
        if run.error is not None:
            logger.warning("Example scored as a failure: %s", _said(run.error))
            return self.failed(f"The program failed: {_said(run.error)}", capture_traces)
        if isinstance(run.prediction, FailedPrediction):
            if not (capture_traces or self._flex):
                return self.failed("The program's reply could not be read.", capture_traces)
            return self._rollout(example, run, failure)
        try:
            raw = await self._metric.score(example, run.prediction, scoring_trace=run.trace, flex=self._flex)
        except FlashEvolveError:
            raise  # ours, not the metric's: the journal that could not note the call, say
        except Exception as error:
            raise_provider_fault(error, calls.errors)
            logger.warning("Metric %s raised on an example: %s", self._metric.name, _said(error))
            if self._flex:
                return self._rollout(example, run, failure)
            return self.failed(f"The program answered, but the metric failed: {_said(error)}", capture_traces)
        return self._rollout(example, run, raw)

    def failed(self, error: str, capture_traces: bool) -> Rollout:
        """A rollout that failed, with the reason."""
        return Rollout(None if capture_traces else dspy.Prediction(), self._adapter.failure_score, error=error)

    def _rollout(self, example: Any, run: _Run, raw: Any) -> Rollout:
        score, objectives = raw, dict[str, float]()
        if isinstance(raw, dspy.Prediction):
            score, objectives = raw.score, dict(raw.get("objective_scores") or {})
        if self._finite and score is not None and not _is_number(score):
            logger.warning("Metric %s gave %r, expected a finite number: a failure.", self._metric.name, score)
            score = None
        return Rollout(
            output=run.prediction,
            score=self._adapter.failure_score if score is None else score,
            objective_scores=objectives,
            trajectory={"example": example, "prediction": run.prediction, "trace": run.trace, "score": raw},
        )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _is_number(score: Any) -> bool:
    try:
        return not isinstance(score, str) and math.isfinite(score)
    except (TypeError, ValueError):
        return False


# On the event loop, or in a thread?


def runs_on_loop(program: Module) -> bool:
    """True when ``program`` can be awaited and does the same as when it is called.

    It needs an ``aforward`` that is at least as specific as its ``forward``: a subclass that overrides
    only ``forward`` inherits an ``aforward`` that would skip its code. Every LM that it may call (its
    predictors' own, else the configured one) must answer asynchronously. And what is known to block must
    not be in it: dspy calls a tool that is no coroutine function on the loop, and code interpreters wait.
    """
    return (
        has_own_aforward(program)
        and all(answers_asynchronously(lm) for lm in _language_models(program))
        and not any(_blocks(module) for _, module in program.named_sub_modules())
    )


def _blocks(module: Any) -> bool:
    if any(kind.__name__ in BLOCKING and kind.__module__.startswith("dspy.") for kind in type(module).__mro__):
        return True
    tools = getattr(module, "tools", None)
    listed = list(tools.values()) if isinstance(tools, dict) else tools if isinstance(tools, list | tuple) else []
    return any(_blocking_tool(tool) for tool in listed)


def _blocking_tool(tool: Any) -> bool:
    function = tool.func if isinstance(tool, Tool) else tool
    call = getattr(function, "__call__", None)  # noqa: B004
    return callable(function) and not (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call))


def has_own_aforward(program: Module) -> bool:
    """Whether a module's ``aforward`` is at least as specific as its ``forward``."""
    if "forward" in vars(program) and "aforward" not in vars(program):
        return False
    for kind in type(program).__mro__:
        if "aforward" in vars(kind):
            return True
        if "forward" in vars(kind):
            return False
    return False


def _language_models(program: Module) -> list[Any]:
    own = [getattr(predictor, "lm", None) for predictor in program.predictors()]
    return [lm for lm in [*own, dspy.settings.lm] if lm is not None]


def answers_asynchronously(lm: Any) -> bool:
    """True when ``await lm.acall(...)`` works and does not block the loop for the length of a request."""
    if isinstance(lm, DummyLM):
        return True
    if not isinstance(lm, BaseLM):
        return inspect.iscoroutinefunction(getattr(lm, "acall", None))
    engine = getattr(lm, "_engine_spec", "auto")
    if not isinstance(engine, str) and getattr(lm, "_async_engine_spec", None) is None:
        return False
    return _overrides_aforward_last(getattr(type(lm), "original_class", type(lm)))


def _overrides_aforward_last(kind: type) -> bool:
    """Whether ``aforward`` is real, and no subclass changed ``forward`` or ``__call__`` alone."""
    for base in kind.__mro__:
        if base is BaseLM:
            return False
        names = vars(base)
        if "aforward" in names or "acall" in names:
            return True
        if "forward" in names or "__call__" in names:
            return False
    return False


LARGEST_CONTAINER = 256
"""Containers with more elements are shared: they hold data (a corpus, an index), not state."""
SEQUENCES = (list, deque)
MAPPINGS = (dict, defaultdict, OrderedDict, Counter)
OWN_WAYS = ("__slots__", "__copy__", "__deepcopy__", "__getstate__", "__setstate__", "__reduce__", "__del__")
"""What a class has whose objects are more than their attributes."""
VALUES = (type(None), bool, int, float, complex, str, bytes, Enum, type)
"""What cannot change."""


def isolated_copy(program: Module) -> Module:
    """Copy the tree of modules, their small containers and plain objects; share everything else.

    What a rollout may change is its own: attributes that are rebound, containers (of the standard kinds, with up to
    ``LARGEST_CONTAINER`` elements) that are changed in place, and objects that hold nothing but values, containers,
    modules and further such objects, as many in all, at any depth of the module tree. What holds anything else (a lock,
    a socket, a function), LMs, callbacks, and large containers are shared by reference, as dspy.GEPA shares the whole
    program between its threads. So the cost does not depend on the size of the data that a program carries.

    Args:
        program: any module; it is not changed.

    Returns:
        A module of the same class. Its call history is empty.
    """
    return cast(Module, _copied(program, {}))


def _copied(value: Any, seen: dict[int, Any]) -> Any:
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, Module):
        return _copied_module(value, seen)
    kind = type(value)
    if kind in SEQUENCES or kind in MAPPINGS:
        return value if len(value) > LARGEST_CONTAINER else _copied_container(value, seen)
    if kind is set:
        return value if len(value) > LARGEST_CONTAINER else set(value)
    if kind is tuple:
        if len(value) > LARGEST_CONTAINER:
            return value
        items = tuple(_copied(item, seen) for item in value)
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return _copied_object(value, seen) if _is_plain(value, {id(value)}) else value


def _copied_container(value: Any, seen: dict[int, Any]) -> Any:
    result = copy.copy(value)  # keeps a deque's length and a defaultdict's factory
    result.clear()
    seen[id(value)] = result
    if isinstance(value, dict):
        mapping = cast("dict[Any, Any]", value)
        result.update({key: _copied(item, seen) for key, item in mapping.items()})
    else:
        result.extend(_copied(item, seen) for item in value)
    return result


def _copied_object(value: Any, seen: dict[int, Any]) -> Any:
    result = copy.copy(value)
    seen[id(value)] = result
    vars(result).update({name: _copied(item, seen) for name, item in vars(value).items()})
    return result


def _is_plain(value: Any, seen: set[int]) -> bool:
    """Whether an object is nothing but its attributes, and these are data."""
    kind = type(value)
    if isinstance(value, (*VALUES, BaseLM, BaseCallback)) or not hasattr(value, "__dict__"):
        return False
    if not _is_record(kind) and kind is not SimpleNamespace:
        own = any(name in vars(base) for base in kind.__mro__[:-1] for name in OWN_WAYS)
        if own or kind.__new__ is not object.__new__:
            return False
    return all(_is_data(item, seen) for item in vars(value).values())


def _is_record(kind: type[Any]) -> bool:
    """A class of pydantic's, such as ``dspy.History``."""
    return hasattr(kind, "model_fields") and hasattr(kind, "__pydantic_validator__")


def _is_data(value: Any, seen: set[int]) -> bool:
    if isinstance(value, (*VALUES, Module)) or id(value) in seen:
        return True
    seen.add(id(value))
    if len(seen) > LARGEST_CONTAINER:
        return False
    kind = type(value)
    if kind in SEQUENCES or kind in MAPPINGS or kind in (set, tuple, frozenset):
        items: Iterable[Any] = value.values() if isinstance(value, dict) else value
        return len(value) > LARGEST_CONTAINER or all(_is_data(item, seen) for item in items)
    return _is_plain(value, seen)


def _copied_module(module: Module, seen: dict[int, Any]) -> Module:
    result = copy.copy(module)
    seen[id(module)] = result
    # copy.copy goes through __getstate__, which drops history and callbacks, and __setstate__, which renews them.
    for name, value in vars(module).items():
        if name == "history":
            result.history = []
        else:
            setattr(result, name, _copied(value, seen))
    return result
