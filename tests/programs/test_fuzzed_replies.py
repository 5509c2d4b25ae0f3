"""Whatever an LM replies, through dspy's real adapters: a run goes on, and every outcome has a type and is counted."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from types import SimpleNamespace
from typing import Any

import dspy
import pytest
from dspy.clients.base_lm import BaseLM
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dspy_flashevolve import AsyncGEPA
from dspy_flashevolve.engine.errors import TransientError
from dspy_flashevolve.engine.loop import Threads
from dspy_flashevolve.engine.requests import Rollout
from dspy_flashevolve.programs.metric import Metric
from dspy_flashevolve.programs.program import ProgramRunner
from dspy_flashevolve.programs.reflection import Reflection
from tests.fakes import Chain, digits, examples, fake_lm
from tests.programs.test_programs import adapter_for

ADAPTERS = [dspy.ChatAdapter(), dspy.JSONAdapter()]
FIELDS = ("answer", "new_instruction", "new_text", "verdicts", "completed", "nonsense", "")
HEAD = {"steps[0]": "Answer the question."}

anything = st.text(st.characters(codec=None, exclude_categories=()), max_size=40)
"""Any text at all, lone surrogates and control characters included."""
markup = st.lists(
    st.one_of(
        st.sampled_from(FIELDS).map(lambda name: f"[[ ## {name} ## ]]"),
        st.sampled_from(
            ["[[ ##", "## ]]", "{", "}", "```json", "```", '"answer":', "null", "\x00", "\ud800", "\n", "5"]
        ),
        anything,
    ),
    max_size=8,
).map("\n".join)
value = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | anything,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS) | anything, inner, max_size=3),
    max_leaves=6,
)
wrong_json = value.map(json.dumps)
half_json = st.tuples(wrong_json, st.integers(0, 30)).map(lambda pair: pair[0][: pair[1]])
filled = st.dictionaries(st.sampled_from(FIELDS), value, max_size=4).map(
    lambda fields: "\n".join(f"[[ ## {name} ## ]]\n{text}" for name, text in fields.items())
)
huge = st.sampled_from(["x", "[[ ## answer ## ]]\n", "{", "\n"]).map(lambda text: text * 1000)
binary = st.binary(max_size=60).map(lambda data: data.decode("latin-1"))
replies = st.one_of(anything, markup, wrong_json, half_json, filled, huge, binary, st.just(""))


class FuzzedLM(BaseLM):
    """A hand-written LM whose replies are given, one after the other, again and again; None is null content."""

    def __init__(self, given_replies: list[str | None]) -> None:
        super().__init__("fuzzed", cache=False)
        self.replies = itertools.cycle(given_replies)

    def forward(self, prompt: Any = None, messages: Any = None, **kwargs: Any) -> Any:
        message = SimpleNamespace(content=next(self.replies), tool_calls=None)
        choice = SimpleNamespace(message=message, finish_reason="stop", logprobs=None)
        return SimpleNamespace(choices=[choice], usage={}, model="fuzzed")

    async def aforward(self, prompt: Any = None, messages: Any = None, **kwargs: Any) -> Any:
        return self.forward(prompt, messages, **kwargs)


def lms(given_replies: list[Any]) -> list[Any]:
    """The replies from a hand-written LM, and from a ``dspy.LM``, whose engine takes no None."""
    texts = itertools.cycle([text or "" for text in given_replies])
    return [FuzzedLM(given_replies), fake_lm(lambda prompt: next(texts))]


class World:
    """A program of one predictor, its metric, and threads."""

    def __init__(self) -> None:
        self.threads = Threads(2, "fuzz")
        self.program = ProgramRunner(adapter_for(Chain(), digits), Metric(digits, self.threads), self.threads)


def in_world(body: Any) -> Any:
    async def main() -> Any:
        world = World()
        try:
            return await body(world)
        finally:
            world.threads.close()

    return asyncio.run(main())


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda one: type(one).__name__)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(replies | st.none(), min_size=1, max_size=3))
def test_no_reply_of_the_task_model_is_anything_but_a_score_or_a_transient_fault(
    adapter: Any, given_replies: list[Any]
) -> None:
    async def body(world: World) -> None:
        for lm in lms(given_replies):
            with dspy.context(lm=lm, adapter=adapter):
                try:
                    rollout = await world.program.rollout(HEAD, examples("q", 1)[0], capture_traces=True)
                except TransientError:
                    continue  # counted, tried again
                assert isinstance(rollout, Rollout)
                assert isinstance(rollout.score, float)

    in_world(body)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda one: type(one).__name__)
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(replies | st.none(), min_size=1, max_size=3))
def test_no_reply_of_the_reflection_model_is_anything_but_texts_or_an_error_that_fails_the_step(
    adapter: Any, given_replies: list[Any]
) -> None:
    dataset = {"steps[0]": [{"Inputs": {"question": "q"}, "Generated Outputs": {"answer": "5"}, "Feedback": "wrong"}]}

    async def body(world: World) -> None:
        for lm in lms(given_replies):
            world.program.adapter.reflection_lm = lm
            with dspy.context(adapter=adapter):
                try:
                    proposed = await world.program.reflection.propose(HEAD, dataset, ["steps[0]"])
                except Exception:
                    continue  # the proposer asks once more, and fails the step (gepa/propose.py)
                assert isinstance(proposed, Reflection)
                assert all(isinstance(text, str) for text in proposed.texts.values())

    in_world(body)


def scored(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
    """A metric that raises for no answer: one that raises for all of them ends the run."""
    try:
        return digits(gold, pred, trace, pred_name, pred_trace)
    except (ArithmeticError, TypeError, ValueError):
        return 0.0


@pytest.mark.long
@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(replies, min_size=1, max_size=4), st.lists(replies, min_size=1, max_size=4))
@example(["{" * 1000], ["{" * 1000])  # dspy's JSON parser recurses so deep that it raises what is no parse error
def test_no_replies_end_a_run_with_anything_but_counted_steps(task: list[str], reflection: list[str]) -> None:
    tasks, reflections = itertools.cycle(task), itertools.cycle(reflection)
    with tempfile.TemporaryDirectory() as folder, dspy.context(lm=fake_lm(lambda prompt: next(tasks)), num_threads=4):
        optimizer = AsyncGEPA(
            scored,
            max_metric_calls=24,
            num_threads=4,
            track_stats=True,
            reflection_lm=fake_lm(lambda prompt: next(reflections)),
            log_dir=folder,
        )
        program: Any = optimizer.compile(Chain(), trainset=examples("t", 4), valset=examples("v", 4))
    stats = program.async_stats
    assert sum(stats.ended.values()) == stats.steps
    assert stats.metric_calls <= 24
    assert len(program.detailed_results.val_subscores[0]) == 4
