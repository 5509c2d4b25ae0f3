"""Odd data, odd candidates and odd answers of a provider: none of them ends a search, or is counted wrongly."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import LMAuthError, LMUnsupportedModelError

from dspy_flashevolve import AsyncMetaHarness, ConfigurationError, Harness, RunAbortedError
from dspy_flashevolve.engine.check import check
from dspy_flashevolve.harness.evaluating import task_of
from tests.fakes import fake_lm, reply_for
from tests.harness.child import reply

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
LAYERS = ("user", "namespaces", "landlock", "seccomp")
TRAIN, VAL = (
    [dspy.Example(question=f"{name} {number}", answer=str(number)).with_inputs("question") for number in range(count)]
    for name, count in (("t", 5), ("v", 4))
)
LEARNS_NOTHING = "self.memory = {'lessons': len(batch)}"
NEEDS_MEMORY = """
class NeedsMemory(dspy.Module):
    def learn(self, batch):
        self.memory["seen"] = [lesson["inputs"]["question"] for lesson in batch]
    def forward(self, question):
        return dspy.Prediction(answer=str(len(self.memory["seen"])))
"""


def forward(body: str, learn: str = "") -> str:
    """The source of a candidate with this body of ``forward``, and of ``learn`` where there is one."""
    source = f"class A(dspy.Module):\n    def forward(self, question):\n        {body}\n"
    return source + (f"    def learn(self, batch):\n        {learn}\n" if learn else "")


def answering(answer: str, learn: str = "") -> str:
    """The source of a candidate that gives one answer, without the LM."""
    return forward(f"return dspy.Prediction(answer={answer!r})", learn)


class Proposer:
    """A proposer LM: the tool calls of each proposal, and the modules that it submits."""

    def __init__(self, modules: Callable[[int], str] | str, calls: Sequence[tuple[str, dict[str, Any]]] = ()) -> None:
        self.prompts: list[str] = []
        self._modules, self._calls, self._made, self._proposals = modules, calls, 0, 0

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if "next_tool_name" in prompt:
            name, arguments = (*self._calls, ("finish", {}))[self._made]
            self._made += 1
            return reply(next_thought="t", next_tool_name=name, next_tool_args=json.dumps(arguments))
        self._made, self._proposals = 0, self._proposals + 1
        source = self._modules if isinstance(self._modules, str) else self._modules(self._proposals - 1)
        return reply(reasoning="r", modules=f"```python\n{source}\n```")


def runs_of(source: str, *examples: int) -> list[tuple[str, dict[str, Any]]]:
    """Tool calls that write a draft and run it on these examples."""
    calls: list[tuple[str, dict[str, Any]]] = [("write_draft", {"name": "a", "source": source})]
    return [*calls, *(("run_draft", {"name": "a", "example": example}) for example in examples)]


def exact(gold: Any, pred: Any, trace: Any = None) -> dspy.Prediction:
    return dspy.Prediction(score=float(gold.answer == pred.answer), feedback="it was compared")


def search(
    proposer: Any, *, student: Any = None, train: Any = TRAIN, val: Any = VAL, lm: Any = None, **more: Any
) -> Any:
    """A search in lockstep in the real sandbox; its result."""
    arguments: dict[str, Any] = {"metric": exact, "iterations": 1, "k": 1, "num_threads": 4, **more}
    optimizer = AsyncMetaHarness(
        arguments.pop("metric"),
        proposer_lm=fake_lm(proposer),
        schedule="lockstep",
        accept_missing_protection=LAYERS,
        **arguments,
    )
    with dspy.context(lm=lm or fake_lm(lambda prompt: reply_for(prompt, answer="42"))):
        program = optimizer.compile(student or dspy.Predict("question -> answer"), trainset=train, valset=val)
    return program.detailed_results


def harness(source: str, signature: str = "question -> answer", **arguments: Any) -> Harness:
    return Harness(signature, source, accept_missing_protection=LAYERS, **arguments)


# Texts that UTF-8 cannot have.


BREAKS_TEXTS = r"""
class A(dspy.Module):
    def forward(self, question):
        body = b'{"kind":"failed","reason":"error","message":"\\ud800 was here","printed":"\\udfff"}'
        dspy.settings.lm._connection._socket.sendall(len(body).to_bytes(4, "big") + body)
        import time
        time.sleep(60)
"""


def test_no_text_of_a_candidate_keeps_proposers_from_reading_the_archive(tmp_path: Path) -> None:
    proposer = Proposer(lambda number: BREAKS_TEXTS if number == 0 else answering(str(number)))
    results = search(proposer, iterations=3, log_dir=tmp_path)
    assert [failed.failure.message for failed in results.failed] == ["? was here"]
    assert len(results.candidates) == 3
    "".join(proposer.prompts).encode()


# Data that JSON does not have.


@pytest.mark.parametrize("label", [float("nan"), b"\xff"])
def test_odd_labels_and_inputs_end_no_search(label: Any, tmp_path: Path) -> None:
    rows = [dspy.Example(question=label, answer=label).with_inputs("question"), *TRAIN[1:]]
    results = search(Proposer(answering("0", LEARNS_NOTHING)), train=rows, log_dir=tmp_path)
    assert [candidate.score for candidate in results.candidates] == [0.0, 0.25]
    assert search(Proposer(answering("0")), train=TRAIN, val=rows).candidates[1].score == 0.0


# What a provider refuses.

ASKS = forward("return dspy.Prediction(answer=dspy.settings.lm('refuse')[0])")


def refusing(error: Exception, *, always: bool = False) -> Any:
    def answer(prompt: str) -> str:
        if always or "refuse" in prompt:
            raise error
        return reply_for(prompt, answer="42")

    return fake_lm(answer)


REFUSALS = [
    LMAuthError(message="this picture is moderated", model="m", status=403),
    LMUnsupportedModelError(message="No endpoints found that support image input", model="m", status=404),
]


@pytest.mark.parametrize("error", REFUSALS, ids=["403", "404"])
def test_a_refusal_of_a_candidates_own_request_is_told_to_the_candidate(error: Exception) -> None:
    proposer = Proposer(lambda number: ASKS if number == 0 else answering("0"))
    results = search(proposer, iterations=2, lm=refusing(error))
    assert [failed.failure.reason for failed in results.failed] == ["error"]
    assert str(error.args[0] if error.args else error)[:20] in results.failed[0].failure.message
    assert len(results.candidates) == 2


def test_a_refused_key_ends_the_run_at_any_time() -> None:
    with pytest.raises(RunAbortedError, match="Check the API key"):
        search(Proposer(ASKS), lm=refusing(LMAuthError(message="no such key", model="m", status=401)))


# The user's cost.


def tokens_a_call(outcome: Any) -> float:
    return outcome.tokens / len(outcome.calls)


def endless(outcome: Any) -> float:
    return float("inf")


@pytest.mark.parametrize(("cost", "message"), [
    (tokens_a_call, "cost tokens_a_call raised ZeroDivisionError"), (endless, "cost endless returned inf"),
    (lambda outcome: None, "cost .*lambda.* returned None"),
])  # fmt: skip
def test_a_cost_that_is_no_number_is_an_error_that_names_it(cost: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        search(Proposer(answering("0")), cost=cost)


# A harness as a program.


def test_a_harness_runs_in_a_forked_process() -> None:
    program = harness(answering("7"))

    def run(queue: Any) -> None:
        queue.put(program(question="?").answer)

    with dspy.context(lm=fake_lm(str)):
        assert program(question="?").answer == "7"
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=run, args=(queue,), daemon=True)
        child.start()
        try:
            assert queue.get(timeout=60) == "7"
        finally:
            child.kill()
            child.join()


PARALLEL = """
import sys
import dspy
from dspy_flashevolve import Harness
from tests.fakes import fake_lm, reply_for

sys.setswitchinterval(1e-5)
rows = [dspy.Example(question=str(number), answer="42").with_inputs("question") for number in range(32)]
evaluate = dspy.Evaluate(devset=rows, metric=lambda gold, pred, trace=None: gold.answer == pred.answer, num_threads=16)
with dspy.context(lm=fake_lm(lambda prompt: reply_for(prompt, answer="42"))):
    print("score", evaluate(Harness("question -> answer", accept_missing_protection=LAYERS)).score)
"""
"""In a process of its own: only the first calls of a process can meet."""


@pytest.mark.long
def test_its_first_calls_may_come_from_many_threads_at_once() -> None:

    for _ in range(3):
        code = PARALLEL.replace("LAYERS", repr(LAYERS))
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
        assert "score 100.0" in ran.stdout, ran.stderr[-2000:]


# Inputs that the signature does not have.


def rows_with_id(name: str, first: int) -> list[Any]:
    return [
        dspy.Example(question=f"{name} {number}", id=first + number, answer=str(number)).with_inputs("question", "id")
        for number in range(4)
    ]


def test_candidates_get_the_inputs_of_the_signature_and_no_others() -> None:
    results = search(Proposer(answering("0")), train=rows_with_id("t", 0), val=rows_with_id("v", 0))
    assert [candidate.score for candidate in results.candidates] == [0.0, 0.25]


def test_nobody_learns_from_a_question_that_it_is_scored_on_whatever_its_other_inputs() -> None:
    rows = rows_with_id("q", 0)
    task = task_of(dspy.Predict("question -> answer"), [*rows_with_id("q", 100)[:3], *rows_with_id("t", 200)], rows)
    assert [example.question for example in task.lessons] == ["t 0", "t 1", "t 2", "t 3"]


# The student.


def test_a_harness_as_the_student_keeps_its_memory() -> None:
    source = answering("?").replace("'?'", "self.memory['answer']")
    results = search(Proposer(answering("x")), student=harness(source, memory={"answer": "1"}))
    assert results.candidates[0].score == 0.25
    assert results.candidates[0].memory == {"answer": "1"}


def test_a_run_does_not_go_on_with_a_student_of_another_memory(tmp_path: Path) -> None:
    source = answering("?").replace("'?'", "self.memory['answer']")
    search(Proposer(answering("x")), student=harness(source, memory={"answer": "1"}), log_dir=str(tmp_path))
    with pytest.raises(ConfigurationError, match="memory"):
        search(Proposer(answering("x")), student=harness(source, memory={"answer": "2"}), log_dir=str(tmp_path))


# Candidates that learn, and the runs of their drafts.


def test_a_candidate_that_needs_its_memory_is_checked_with_one() -> None:
    proposer = Proposer(NEEDS_MEMORY, runs_of(NEEDS_MEMORY, 0))
    results = search(proposer)
    assert 'prediction: {"answer": "4"}' in proposer.prompts[-1]
    assert results.failed == ()
    assert {trace.outcome.fields["answer"] for trace in results.candidates[1].traces} == {"2"}
    assert results.candidates[1].memory == {"seen": [example.question for example in TRAIN]}


ASKS_MUCH = answering("0", "[dspy.settings.lm(str(number)) for number in range(10)]")


def test_what_the_run_of_a_draft_costs_is_counted(tmp_path: Path) -> None:
    calls: list[str] = []

    def counted(gold: Any, pred: Any, trace: Any = None) -> float:
        calls.append(gold.question)
        return 1.0

    proposer = Proposer(answering("0"), runs_of(ASKS_MUCH, 0))
    results = search(proposer, metric=counted, log_dir=tmp_path)
    proposals = 7 * len(proposer.prompts)  # a call of a fake has 7 tokens
    assert results.stats.tokens_by_stage["propose"] == proposals + 10 * 7
    assert results.stats.metric_calls == len(calls)
    assert check(tmp_path).problems == []
    again = search(proposer, metric=counted, log_dir=tmp_path)
    assert again.stats.metric_calls == len(calls), "nothing is paid twice"
