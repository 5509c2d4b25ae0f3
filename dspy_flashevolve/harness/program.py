"""`Harness`, a ``dspy.Flex`` whose source runs in the sandbox with the memory that it has learnt.

Also the host's part in a run of any harness: making its LM calls, and reading the fields that it returns.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import json
import os
import threading
from collections.abc import Coroutine, Iterable, Mapping
from enum import EnumMeta
from functools import lru_cache
from typing import Any, TypeVar

import dspy
from dspy.adapters.base import Adapter
from dspy.adapters.utils import find_enum_member
from dspy.predict.flex.flex import Flex
from dspy.signatures import make_signature
from dspy.utils.exceptions import DSPyError
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json, to_jsonable_python

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.texts import without_surrogates
from dspy_flashevolve.harness.archive import DraftError, draft_of
from dspy_flashevolve.programs.usage import counting_usage
from dspy_flashevolve.sandbox.contract import MOST_VALUES, Failure, Job, Limits, LmRecord, LmRequest, has_many_values
from dspy_flashevolve.sandbox.sandbox import Sandbox, accepted_layers

T = TypeVar("T")
CHARACTERS_A_TOKEN = 4
"""Estimates tokens where a provider reports none; OpenAI's rule of thumb for English."""
_SIGNATURE = make_signature("request -> text")


class HarnessError(DSPyError, RuntimeError):
    """The code of a harness failed on an input; ``failure`` has the reason."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class Harness(Flex):  # pyright: ignore[reportGeneralTypeIssues,reportUntypedBaseClass] # hidden by its decorator
    """A program whose implementation is a source, run in a sandbox: a process for each call, with limits.

    As with every ``dspy.Flex``, the source is saved and loaded with the program's state, and never runs in this
    process. What it does is in its source, so that it has no predictors to be optimized.

    Args:
        signature: inputs and outputs, as of ``dspy.Predict``.
        module_src: the source of one subclass of ``dspy.Module``. Default: that of ``dspy.Flex``, one ``dspy.Predict``.
        memory: JSON that is the module's ``memory``; None leaves it as its constructor makes it.
        limits: of each call.
        accept_missing_protection: layers of the process sandbox that this machine may lack, as of
            `AsyncMetaHarness`.

    Raises:
        ConfigurationError: the source is no module, or an argument is wrong.

    >>> Harness("question -> answer").module_src.splitlines()[0]
    'class StringSignatureModule(dspy.Module):'
    """

    def __init__(
        self,
        signature: Any,
        module_src: str | None = None,
        *,
        memory: Any = None,
        limits: Limits | None = None,
        accept_missing_protection: Iterable[str] = (),
    ) -> None:
        self.limits = limits or Limits()
        self.accept_missing_protection = accepted_layers(accept_missing_protection)
        self.memory = as_json(memory)
        super().__init__(signature, max_predictor_calls=self.limits.lm_calls)
        if module_src is not None:
            self._bind_code(module_src)

    def _bind_code(self, module_src: str) -> None:
        try:
            self._class = draft_of(module_src, list(self._signature_cls.input_fields)).class_name
        except DraftError as error:
            raise ConfigurationError(f"module_src is no harness: {error}.") from error
        super()._bind_code(module_src)

    def dump_state(self, json_mode: bool = True) -> dict[str, Any]:
        return {**super().dump_state(json_mode), "memory": self.memory}

    def load_state(self, state: dict[str, Any], *, allow_unsafe_lm_state: bool = False) -> None:
        super().load_state(state, allow_unsafe_lm_state=allow_unsafe_lm_state)
        self.memory = as_json(state.get("memory"))

    def forward(self, *args: Any, **kwargs: Any) -> dspy.Prediction:
        """Run the source on one input.

        Raises:
            HarnessError: it failed, or went past a limit.
        """
        if args:
            raise TypeError("a Harness takes its inputs by name")
        return _service().run(self._predict(kwargs, contextvars.copy_context())).result()

    async def aforward(self, **kwargs: Any) -> dspy.Prediction:
        """Do what `forward` does without blocking the event loop."""
        return await asyncio.wrap_future(_service().run(self._predict(kwargs, contextvars.copy_context())))

    async def _predict(self, inputs: dict[str, Any], context: contextvars.Context) -> dspy.Prediction:
        lm = self.lm or context.run(lambda: dspy.settings.lm)
        adapter = context.run(lambda: dspy.settings.adapter)
        if lm is None:
            raise ConfigurationError("no LM is configured: dspy.configure(lm=...), or set_lm() of the Harness.")

        async def call_lm(request: LmRequest) -> LmRecord:
            call = context.copy()  # a context runs once at a time
            return await asyncio.to_thread(call.run, call_in_thread, lm, request)

        plain = {name: as_json(inputs[name]) for name in self._signature_cls.input_fields if name in inputs}
        job = Job(self.module_src or "", self._class, plain, self.memory, adapter=type(adapter).__name__)
        outcome = await _service().sandbox(self.limits, self.accept_missing_protection).run(job, call_lm)
        outputs = {name: field.annotation for name, field in self._signature_cls.output_fields.items()}
        fields, failure = ({}, outcome.failure) if outcome.failure else typed_fields(outcome.fields, outputs)
        if failure is not None:
            raise HarnessError(failure)
        return prediction_of(fields)


class _Service:
    """The sandboxes of all `Harness` programs of this process, on an event loop in a thread of its own.

    A program may be called from any thread or loop, while a sandbox belongs to one loop.
    """

    def __init__(self, process_id: int) -> None:
        self._process_id = process_id
        self._loop = asyncio.new_event_loop()
        self._sandboxes: dict[tuple[Limits, tuple[str, ...]], Sandbox] = {}
        threading.Thread(target=self._loop.run_forever, name="harness-sandboxes", daemon=True).start()
        atexit.register(self._close)

    def run(self, work: Coroutine[Any, Any, T]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def sandbox(self, limits: Limits, accepted: tuple[str, ...]) -> Sandbox:
        sandbox = Sandbox(limits, accept_missing_protection=accepted)
        return self._sandboxes.setdefault((limits, accepted), sandbox)

    def _close(self) -> None:
        if os.getpid() != self._process_id:  # a forked process has this object, and none of its thread
            return
        for sandbox in self._sandboxes.values():
            self.run(sandbox.__aexit__()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)


_making = threading.Lock()


def _service() -> _Service:
    with _making:  # threads that ask at the same time, as dspy.Evaluate's do, must not make two
        return _service_of(os.getpid())


@lru_cache(maxsize=1)
def _service_of(process_id: int) -> _Service:
    return _Service(process_id)


def as_json(value: Any) -> Any:
    """Return a value as JSON data: NaN and infinity become None, other parts that have no JSON form their ``repr``.

    A value that is circular or has bytes that are not UTF-8 becomes its ``repr`` as a whole.
    """
    try:
        plain = to_jsonable_python(value, fallback=repr, inf_nan_mode="null")
    except ValueError:
        plain = repr(value)
    return json.loads(without_surrogates(json.dumps(plain, ensure_ascii=False)))


def prediction_of(fields: Mapping[str, Any]) -> dspy.Prediction:
    """Make a prediction of fields that may have any name: ``dspy.Prediction(**fields)`` refuses ``self``."""
    prediction = dspy.Prediction()
    for name, value in fields.items():
        prediction[name] = value
    return prediction


def typed_fields(fields: Mapping[str, Any], outputs: Mapping[str, Any]) -> tuple[dict[str, Any], Failure | None]:
    """Convert the fields that a candidate returned to the types of the output fields, or return a failure.

    A text that is the JSON of a value is parsed. Broken JSON is not repaired: the time that takes would be up to the
    candidate.
    """
    typed: dict[str, Any] = {}
    for name, kind in outputs.items():
        if name not in fields:
            return {}, Failure("interface", f"forward returned no output field {name!r}")
        try:
            typed[name] = _typed(fields[name], kind)
        except Exception as error:  # pydantic's errors, and those of a user's own validator
            message = f"{type(error).__name__}: {error}"[:300]
            return {}, Failure("interface", f"forward returned {fields[name]!r:.100} as {name!r} ({message})")
    return typed, None


def _typed(value: Any, kind: Any) -> Any:
    if kind is str:
        return str(value)
    if isinstance(kind, EnumMeta):
        return find_enum_member(kind, value)
    _check_size(value)
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    try:
        return adapter.validate_python(value)
    except ValidationError:
        if not isinstance(value, str):
            raise
        _check_size(from_json(value))
        return adapter.validate_json(value)


def _check_size(value: Any) -> None:
    if has_many_values(value):
        raise ValueError(f"more than {MOST_VALUES:,} values")


class _AsItIs(Adapter):
    """An adapter that sends the messages of a candidate unchanged and returns the text of each reply."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        super().__init__()
        self._messages = messages

    def format(self, signature: Any, demos: Any, inputs: Any) -> list[dict[str, Any]]:
        return self._messages

    def parse(self, signature: Any, completion: str) -> dict[str, Any]:
        return {"text": completion}


def call_in_thread(lm: Any, request: LmRequest) -> LmRecord:
    """Make an LM call and wait for it; blocks the thread."""
    with counting_usage() as usage:
        replies = _AsItIs(request.messages)(lm, dict(request.options), _SIGNATURE, [], {})
    return _record(request, replies, usage.usage_data)


async def call_on_loop(lm: Any, request: LmRequest) -> LmRecord:
    """Make a call of an LM that can be awaited."""
    with counting_usage() as usage:
        replies = await _AsItIs(request.messages).acall(lm, dict(request.options), _SIGNATURE, [], {})
    return _record(request, replies, usage.usage_data)


def _record(request: LmRequest, replies: list[dict[str, Any]], usage: dict[str, list[dict[str, Any]]]) -> LmRecord:
    texts = [without_surrogates(str(reply.get("text") or "")) for reply in replies]
    entries = [entry for entries in usage.values() for entry in entries]
    counts = [sum(int(entry.get(name) or 0) for entry in entries) for name in ("prompt_tokens", "completion_tokens")]
    guesses = [sum(len(str(message["content"])) for message in request.messages), sum(map(len, texts))]
    prompt, completion = (n or -(-guess // CHARACTERS_A_TOKEN) for n, guess in zip(counts, guesses, strict=True))
    return LmRecord(request.messages, texts, prompt, completion)
