"""AsyncGEPA beside dspy.GEPA, on code of the user's: the same LM object, the same tools, the same errors."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import re
import threading
import traceback
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, ClassVar

import dspy
import numpy as np
import pytest
from dspy.utils.callback import BaseCallback

from dspy_flashevolve import AsyncGEPA, DataError, RunAbortedError
from tests.contract.surface import TRAIN, VAL, Heard, Interpreter, InThread, completion
from tests.fakes import AsyncFakeEngine, Chain, FakeEngine, digits, examples, fake_lm, hashed, reflection_lm, reply_for

OPTIMIZERS = {
    "dspy.GEPA": (dspy.GEPA, {}),
    "async": (AsyncGEPA, {}),
    "lockstep": (AsyncGEPA, {"schedule": "lockstep"}),
}
"""Name -> class, options."""
NO_LM = object()
ours = pytest.mark.parametrize("name", ["async", "lockstep"])
every = pytest.mark.parametrize("name", list(OPTIMIZERS))


def optimized(name: str, program: dspy.Module, metric: Any = digits, lm: Any = None, **options: Any) -> Any:
    """What one of the optimizers makes of a program."""
    kind, own = OPTIMIZERS[name]
    settings: dict[str, Any] = {"max_metric_calls": 80, "num_threads": 4, "track_stats": True}
    settings |= {"reflection_lm": fake_lm(lambda prompt: reply_for(prompt, new_instruction="Look closely."))} | own
    data = {"trainset": options.pop("trainset", TRAIN), "valset": options.pop("valset", VAL)}
    optimizer = kind(metric, **(settings | options))
    if lm is None:
        return optimizer.compile(program, **data)
    with dspy.context(lm=None if lm is NO_LM else lm):
        return optimizer.compile(program, **data)


# Tools


class Agent(dspy.Module):
    """An agent whose tool asks another predictor of the program, and notes that it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup = dspy.Predict("query -> found")
        self.agent = dspy.ReAct("question -> answer", tools=[self.search], max_iters=2)
        self.asked: list[str] = []

    def search(self, query: str) -> str:
        """Search."""
        self.asked.append(query)
        return str(self.lookup(query=query).found)

    def forward(self, question: str) -> Any:
        answer = self.agent(question=question).answer
        assert len(self.asked) == len(set(self.asked)), "a rollout has its own notes"
        return dspy.Prediction(answer=answer)


def agents_lm() -> dspy.LM:
    """Searches once; what is found depends on the instruction of the one who looks it up."""

    def answer(prompt: str) -> str:
        if "next_tool_name" in prompt and "observation_0" not in prompt:
            arguments = json.dumps({"query": str(hashed(prompt))})
            return reply_for(prompt, next_thought="-", next_tool_name="search", next_tool_args=arguments)
        if "next_tool_name" in prompt:
            return reply_for(prompt, next_thought="-", next_tool_name="finish", next_tool_args="{}")
        if "`found`" in prompt:
            return reply_for(prompt, found="right" if "Look closely." in prompt else "wrong")
        return reply_for(prompt, reasoning="-", answer="right" if "right" in prompt else "wrong")

    return fake_lm(answer)


def is_right(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> float:
    return float(pred.answer == "right")


@every
def test_a_tool_that_asks_a_predictor_of_the_program_asks_the_candidates(name: str) -> None:
    student = Agent()
    best = optimized(name, student, is_right, agents_lm(), max_metric_calls=60)
    assert max(best.detailed_results.val_aggregate_scores) == 1.0
    assert best.lookup.signature.instructions == "Look closely."
    if name != "dspy.GEPA":
        assert student.asked == []
        assert student.lookup.history == []


def searching_lm(**options: Any) -> dspy.LM:
    """Calls each tool that it is offered once, and answers right where all of them have found something."""

    def answer(prompt: str) -> str:
        names = sorted(set(re.findall(r"\(\d+\) (\w*search\w*)", prompt)))
        if "next_tool_name" in prompt:
            done = prompt.count("[[ ## observation_")
            name = names[done] if done < len(names) else "finish"
            arguments = json.dumps({} if name == "finish" else {"query": "all"})
            return reply_for(prompt, next_thought="-", next_tool_name=name, next_tool_args=arguments)
        asked = [name for name in TOOLS if f"] {name}" in prompt or f"]]\n{name}\n" in prompt]
        return reply_for(prompt, reasoning="-", answer="right" if asked and prompt.count(FOUND) == len(asked) else "no")

    return fake_lm(answer, **options)


FOUND = "the right page"
HOME: list[Any] = []
"""The loops on which the coroutine tool ran."""
THREADS: set[str] = set()
"""The threads in which the sync tool ran."""


async def async_search(query: str) -> str:
    """Search the web."""
    HOME.append(asyncio.get_running_loop())
    await asyncio.sleep(0)
    return FOUND


def sync_search(query: str) -> str:
    """Search the shelf."""
    THREADS.add(threading.current_thread().name)
    return FOUND


async def search_of(place: str, query: str) -> str:
    """Search a place."""
    return await async_search(query)


@functools.wraps(async_search)
def retried(*args: Any, **kwargs: Any) -> Any:
    return async_search(*args, **kwargs)


class Client:
    """An MCP client, as far as dspy asks one."""

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        return SimpleNamespace(content=[], structured_content=await async_search(**arguments))


def mcp_tool() -> dspy.Tool:
    """What ``dspy.Tool.from_mcp_tool`` makes, without the package that reads a server's texts."""
    client = Client()

    async def func(*args: Any, **kwargs: Any) -> Any:
        return (await client.call_tool("search", arguments=kwargs)).structured_content

    return dspy.Tool(func=func, name="mcp_search", desc="Search.", args={"query": {"type": "string"}}, arg_types={})


TOOLS = ("async_search", "sync_search", "partial_search", "mcp_search")
AGENTS: dict[str, Callable[[], list[Any]]] = {
    "function": lambda: [async_search],
    "tool": lambda: [dspy.Tool(async_search)],
    "partial": lambda: [dspy.Tool(functools.partial(search_of, "web"), name="partial_search")],
    "wrapped": lambda: [retried],
    "mcp": lambda: [mcp_tool()],
    "beside a sync tool": lambda: [async_search, sync_search],
    "sync alone": lambda: [sync_search],
}


class ForwardOnly(dspy.Module):
    def __init__(self, tools: list[Any]) -> None:
        super().__init__()
        self.agent = dspy.ReAct("question -> answer", tools=tools)

    def forward(self, question: str) -> Any:
        return self.agent(question=question)


class AwaitedOnly(ForwardOnly):
    forward = None  # type: ignore[assignment]

    async def aforward(self, question: str) -> Any:
        return await self.agent.acall(question=question)


def score_of_agent(name: str, program: dspy.Module, how: str, asynchronous: bool = True) -> float:
    """The seed's score; who calls its tools scores 1, who gets an error in their place 0."""
    HOME.clear()
    THREADS.clear()
    kind, own = OPTIMIZERS[name]
    lm = fake_lm(lambda prompt: reply_for(prompt, new_instruction="Look."))
    optimizer = kind(is_right, max_metric_calls=12, num_threads=2, track_stats=True, reflection_lm=lm, **own)
    with dspy.context(lm=searching_lm(asynchronous=asynchronous)):
        if how == "compile":
            best = optimizer.compile(program, trainset=TRAIN, valset=VAL)
        else:
            best = asyncio.run(acompiled(optimizer, program))
    return best.detailed_results.val_aggregate_scores[0]


async def acompiled(optimizer: Any, program: dspy.Module) -> Any:
    HOME.append(asyncio.get_running_loop())
    return await optimizer.acompile(program, trainset=TRAIN, valset=VAL)


@pytest.mark.parametrize("tools", list(AGENTS))
@pytest.mark.parametrize("how", ["compile", "acompile"])
@ours
def test_an_agents_tools_run_whether_sync_or_async(name: str, how: str, tools: str) -> None:
    assert score_of_agent(name, dspy.ReAct("question -> answer", tools=AGENTS[tools]()), how) == 1.0
    assert len({id(loop) for loop in HOME}) <= 1, "clients live on one loop: that of the run"
    assert threading.main_thread().name not in THREADS


@pytest.mark.parametrize(
    ("kind", "asynchronous"),
    [(dspy.ReAct, True), (dspy.ReAct, False), (ForwardOnly, True), (ForwardOnly, False), (AwaitedOnly, True)],
)
@pytest.mark.parametrize("how", ["compile", "acompile"])
def test_an_async_tool_runs_on_the_runs_loop_however_the_program_is_called(
    kind: Any, how: str, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tools: list[Any] = [async_search, sync_search]
    program = kind("question -> answer", tools=tools) if kind is dspy.ReAct else kind(tools)
    with caplog.at_level(logging.WARNING, logger="dspy_flashevolve"):
        assert score_of_agent("async", program, how, asynchronous) == 1.0
    assert len({id(loop) for loop in HOME}) == 1
    warned = [text for text in caplog.messages if "Tool async_search is a coroutine function" in text]
    assert len(warned) == (kind is ForwardOnly or not asynchronous)


CODE: list[str] = []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # CodeAct's
@ours
def test_code_act_defines_its_async_tool_in_its_interpreter(name: str) -> None:
    def answer(prompt: str) -> str:
        if "`generated_code`" in prompt:
            return reply_for(prompt, generated_code="print(await async_search('all'))", finished="True")
        return reply_for(prompt, reasoning="-", answer="right" if FOUND in prompt else "no")

    CODE.clear()
    agent = dspy.CodeAct(
        "question -> answer", tools=[async_search], interpreter_factory=lambda: Interpreter(FOUND, CODE)
    )
    details = optimized(name, agent, is_right, fake_lm(answer), max_metric_calls=12).detailed_results
    assert details.val_aggregate_scores[0] == 1.0
    assert any(code.startswith("async def async_search") for code in CODE)


# The user's LM


class Counting(dspy.LM):
    """An LM of the user's that keeps things in itself."""

    def __init__(self, **options: Any) -> None:
        engine = FakeEngine(lambda prompt: reply_for(prompt, answer=str(hashed(prompt) % 7)))
        super().__init__("fake/model", engine=engine, async_engine=AsyncFakeEngine(engine), cache=False, **options)
        self.calls = 0
        self.guard = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.guard:
            self.calls += 1
        return super().__call__(*args, **kwargs)

    async def acall(self, *args: Any, **kwargs: Any) -> Any:
        with self.guard:
            self.calls += 1
        return await super().acall(*args, **kwargs)


class Legacy(dspy.LM):
    """One with a ``forward`` of its own, which asks no engine."""

    def __init__(self) -> None:
        super().__init__("fake/model", cache=False)
        self.calls = 0
        self.guard = threading.Lock()

    def forward(self, prompt: Any = None, messages: Any = None, **kwargs: Any) -> Any:
        with self.guard:
            self.calls += 1
        text = "\n".join(message["content"] for message in messages)
        return completion(reply_for(text, answer=str(hashed(text) % 7)))


class Looks(Chain):
    """Notes which LM it sees."""

    seen: ClassVar[list[Any]] = []

    async def aforward(self, question: str) -> dspy.Prediction:
        self.seen.append(dspy.settings.lm)
        return await super().aforward(question)

    def forward(self, question: str) -> dspy.Prediction:
        self.seen.append(dspy.settings.lm)
        return super().forward(question)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dspy's, of LMs with a forward of their own
@pytest.mark.parametrize("kind", [Counting, Legacy])
@every
def test_the_users_own_lm_object_does_the_work(name: str, kind: Any) -> None:
    lm = kind()
    before = {key: value for key, value in vars(lm).items() if key not in ("calls", "history")}
    Looks.seen.clear()
    optimized(name, Looks(), lm=lm)
    assert Looks.seen
    assert all(one is lm for one in Looks.seen)
    if name == "async":  # a rollout whose score can change nothing any more is given up in the middle of its call
        assert lm.calls >= len(lm.history) > 40
    else:
        assert lm.calls == len(lm.history) >= len(Looks.seen)
    assert type(lm) is kind
    assert {key: value for key, value in vars(lm).items() if key not in ("calls", "history")} == before


@ours
def test_the_lm_of_a_predictor_does_the_work_too(name: str) -> None:
    lm, program = Counting(num_retries=2), Chain()
    program.steps[0].lm = lm
    optimized(name, program)
    assert lm.calls > 40
    assert program.steps[0].lm is lm
    assert (type(lm), lm.num_retries) == (Counting, 2)


# Programs that cannot be awaited, though they say so


class NotAsync(Chain):
    async def aforward(self, question: str) -> Any:
        raise NotImplementedError


@every
def test_a_program_without_a_real_aforward_is_called_by_its_forward(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="dspy_flashevolve"):
        optimized(name, NotAsync(), num_threads=16)
    assert "scored as a failure" not in caplog.text
    warned = [one for one in caplog.messages if "NotAsync.aforward raises NotImplementedError" in one]
    assert len(warned) == (name != "dspy.GEPA")


class Blocks(InThread):
    """Asks an LM without awaiting it."""

    async def aforward(self, question: str) -> Any:
        return self.forward(question)


@ours
def test_a_program_that_blocks_the_loop_is_warned_of_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="dspy_flashevolve"):
        details = optimized(name, Blocks()).detailed_results
    assert min(details.val_aggregate_scores) > 0.2
    [said] = [one for one in caplog.messages if "blocks the event loop" in one]
    assert "Blocks.aforward" in said
    assert "predictor.acall" in said


def test_a_program_that_awaits_its_calls_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="dspy_flashevolve"):
        optimized("async", Looks())
    assert "blocks the event loop" not in caplog.text


# dspy's callbacks


class Traces(BaseCallback):
    """Hears of evaluations and of the calls inside, as a tracer does."""

    def __init__(self) -> None:
        self.begun: dict[str, dict[str, Any]] = {}
        self.ended: dict[str, Any] = {}
        self.inside: dict[str | None, int] = {}

    def on_evaluate_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        assert isinstance(instance, dspy.Evaluate)
        if not (inputs.get("callback_metadata") or {}).get("disable_logging"):
            self.begun[call_id] = {**inputs, "devset": instance.devset}

    def on_evaluate_end(self, call_id: str, outputs: Any, exception: Any = None) -> None:
        if call_id in self.begun:
            self.ended[call_id] = outputs if exception is None else exception

    def on_module_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        parent = dspy.utils.callback.ACTIVE_CALL_ID.get()
        self.inside[parent] = self.inside.get(parent, 0) + isinstance(instance, Chain)


@pytest.mark.parametrize(
    ("name", "more"), [(name, {}) for name in OPTIMIZERS] + [("async", {"search": "pareto"})], ids=str
)
def test_every_full_validation_is_told_to_dspys_callbacks(name: str, more: dict[str, Any]) -> None:
    traces, heard = Traces(), Heard()
    with dspy.context(callbacks=[traces]):
        more = {"max_metric_calls": 200, "gepa_kwargs": {"callbacks": [heard]}} | more
        details = optimized(name, Chain(), reflection_lm=reflection_lm(), **more).detailed_results
    scores = [outputs.score for outputs in traces.ended.values() if not isinstance(outputs, Exception)]
    full = [one for one in traces.begun.values() if len(one["devset"]) == len(VAL)]
    assert traces.begun.keys() == traces.ended.keys()
    assert all(isinstance(one["program"], Chain) for one in full)
    found = sorted(round(100 * score, 2) for score in details.val_aggregate_scores)
    assert all(any(abs(score - one) < 0.02 for one in scores) for score in found)
    assert len(full) == len(heard.of("on_valset_evaluated")) == len(found) > 1
    assert sum(traces.inside.get(call_id, 0) for call_id in traces.begun) >= len(found) * len(VAL)


# Mistakes that every rollout has


def typo(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> float:
    CALLS.append(1)
    return float(pred.answr == gold.question)


def says_the_example(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> float:
    CALLS.append(1)
    raise LookupError(f"nothing known of {gold.question}")


class Typo(InThread):
    def forward(self, question: str) -> Any:
        CALLS.append(1)
        return self.stp(question=question)


class AsyncTypo(Typo):
    async def aforward(self, question: str) -> Any:
        return self.forward(question)


CALLS: list[int] = []
MISTAKES: dict[str, tuple[Any, Any, Any, str]] = {
    "metric": (Chain, typo, AttributeError, "typo"),
    "metric with the example": (Chain, says_the_example, LookupError, "says_the_example"),
    "program": (Typo, digits, AttributeError, "forward"),
    "program on the loop": (AsyncTypo, digits, AttributeError, "forward"),
}
"""What is wrong -> program, metric, error, the function that raises it."""


@pytest.mark.parametrize("mistake", list(MISTAKES))
@ours
def test_a_mistake_that_every_first_rollout_has_ends_the_run_with_it(name: str, mistake: str) -> None:
    program, metric, kind, function = MISTAKES[mistake]
    CALLS.clear()
    with pytest.raises(kind) as caught:
        optimized(name, program(), metric, valset=examples("v", 30), max_metric_calls=300)
    assert function in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    first = 30 if "example" in mistake else 8
    # Steps run beside the seed's validation from the first second on, so that their rollouts come between its own.
    assert len(CALLS) <= 1.5 * first + 8, "the first, what was in the four slots, and what came into them meanwhile"


@ours
@pytest.mark.parametrize("data", ["trainset", "valset"])
def test_examples_that_are_dicts_are_refused_before_the_run(name: str, data: str) -> None:
    with pytest.raises(DataError, match=rf"{data}\[0\] is a dict, expected a dspy.Example"):
        optimized(name, Chain(), **{data: [{"question": "q"} for _ in range(9)]})


def typo_in_feedback(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
    CALLS.append(1)
    return dspy.Prediction(score=0.0, feedback=pred.answr) if pred_name else 0.0


def knows_validation_alone(
    gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None
) -> float:
    CALLS.append(1)
    return 0.0 if gold.question.startswith("v") else float(gold.answer == pred.answer)


@pytest.mark.parametrize("metric", [typo_in_feedback, knows_validation_alone])
@ours
def test_a_mistake_that_shows_on_training_examples_alone_ends_the_run_with_it(name: str, metric: Any) -> None:
    CALLS.clear()
    with pytest.raises(AttributeError) as caught:
        optimized(name, Chain(), metric, valset=examples("v", 10), max_metric_calls=600)
    assert metric.__name__ in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert len(CALLS) < 150


@ours
def test_feedback_that_fails_on_some_examples_ends_no_run(name: str) -> None:
    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        score = digits(gold, pred)
        if pred_name and hashed("unlucky", gold.question) % 3:
            raise LookupError("no feedback for this one")
        return score

    trainset = examples("t", 60)
    options = {"max_metric_calls": 150, "reflection_minibatch_size": 3 if name == "lockstep" else 6}
    stats = optimized(name, Chain(), metric, trainset=trainset, **options).async_stats
    assert stats.outcome == "finished"
    assert stats.proposals > 0
    if name == "lockstep":
        assert stats.ended["failed"] > 4, "one example without feedback costs the step, as in dspy.GEPA"
    else:
        assert stats.ended["failed"] == 0, "the reflection reads the others"


@ours
def test_no_lm_at_all_is_told_at_once(name: str) -> None:
    with pytest.raises(ValueError, match="No LM is loaded"):
        optimized(name, Chain(), lm=NO_LM)


@pytest.mark.parametrize("scored", [("v 6", "t 6"), ("v 3", "v 6")], ids=["of both", "of validation alone"])
@ours
def test_a_program_that_fails_on_some_of_the_first_examples_goes_on(name: str, scored: tuple[str, str]) -> None:
    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        if gold.question not in scored:
            raise LookupError("most examples are not scored")
        return digits(gold, pred)

    details = optimized(name, Chain(), metric, num_threads=1, max_metric_calls=90).detailed_results
    assert details.val_aggregate_scores[0] > 0
    assert details.total_metric_calls > 60


@pytest.mark.parametrize("argument", ["lm", "reflection_lm"])
@ours
def test_a_model_that_does_not_exist_is_told_at_once(name: str, argument: str) -> None:
    lm = dspy.LM("nonsense-model", num_retries=0)
    with pytest.raises(RunAbortedError, match=r"(?s)nonsense-model.*Check the model's name") as caught:
        optimized(name, Chain(), **{argument: lm})
    assert (caught.value.best_program is not None) == (argument == "reflection_lm")


# What is no score


@pytest.mark.parametrize(
    ("returned", "kind"),
    [
        (None, TypeError), ("0.5", TypeError), ([0.5], TypeError), ({"score": 0.5}, TypeError),
        (float("nan"), ValueError), (float("inf"), ValueError),
        (dspy.Prediction(score=None, feedback="-"), TypeError), (dspy.Prediction(feedback="-"), TypeError),
    ],
)  # fmt: skip
@ours
def test_what_is_no_score_is_told_at_the_first_call(name: str, returned: Any, kind: Any) -> None:
    calls: list[int] = []

    def my_metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        calls.append(1)
        return returned

    with pytest.raises(kind, match=r"(?s)my_metric returned .* for the example .*question.*, expected a finite number"):
        optimized(name, Chain(), my_metric)
    assert len(calls) <= 8, "what was in the four slots, and what came into them meanwhile"


@pytest.mark.parametrize("number", [Decimal, Fraction, np.float32, np.bool_])
@every
def test_a_score_may_be_any_kind_of_number(name: str, number: Callable[[Any], Any]) -> None:
    def half(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        return dspy.Prediction(score=number(int(pred.answer) > 2), feedback="-")

    details = optimized(name, Chain(), half, max_metric_calls=40).detailed_results
    scores = [score for scores in details.val_subscores for score in scores.values()]
    assert {float(score) for score in scores} == {0.0, 1.0}


# No validation set


@every
def test_an_empty_valset_is_none_and_it_is_said_where_dspy_gepa_says_it(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    logger = "dspy.teleprompt.gepa.gepa"
    with caplog.at_level(logging.WARNING, logger=logger):
        details = optimized(name, Chain(), valset=[]).detailed_results
        optimized(name, Chain(), valset=None)
    assert set(details.val_subscores[0]) == set(range(len(TRAIN)))
    warnings = [record for record in caplog.records if "overfit" in record.getMessage()]
    assert {record.name for record in warnings} == {logger}
    assert len(warnings) == (1 if name == "dspy.GEPA" else 2)
