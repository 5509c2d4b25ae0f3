"""AsyncMetaHarness as a whole: in virtual time with a stand-in for the sandbox, and once with the real one."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import LMAuthError, LMRateLimitError

from benchmarks.in_process import InProcessStandIn
from benchmarks.models import REPLY_MODELS
from dspy_flashevolve import (
    AsyncMetaHarness,
    ConfigurationError,
    DataError,
    FlashEvolveError,
    Harness,
    Limits,
    RunAbortedError,
)
from dspy_flashevolve.sim import HouseRules
from dspy_flashevolve.sim.virtual import SimulatedModel
from tests.contract.surface import evolved, left_threads, steps_of
from tests.fakes import fake_lm, reply_for

LAYERS = ("user", "namespaces", "landlock", "seccomp")
"""Of the sandbox; a machine that runs tests may lack some."""
TASK = HouseRules(rules=12, rules_per_example=4, seed=0, reply_model=REPLY_MODELS["obliging"])


def student() -> dspy.Module:
    seed: Any = TASK.program()
    return dspy.Predict(dspy.Signature("question -> answer", seed.answer.signature.instructions))


class Watched(InProcessStandIn):
    """A stand-in that remembers its jobs, and fails those of which ``fails`` says how: a reason and a message."""

    def __init__(self, fails: Callable[[Any], tuple[str, str] | None] = lambda job: None) -> None:
        self.jobs: list[Any] = []
        self.running = self.most = 0
        self._fails = fails

    async def run(self, job: Any, call_lm: Any) -> Any:
        self.jobs.append(job)
        failure = self._fails(job)
        if failure is not None:
            broken = await super().run(replace(job, source="raise ValueError"), call_lm)
            return replace(broken, failure=replace(broken.failure, reason=failure[0], message=failure[1]))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await super().run(job, call_lm)
        finally:
            self.running -= 1


def search(sandbox: Any = None, train: int = 6, val: int = 8, same: bool = False, **arguments: Any) -> Harness:
    """A search in virtual time; with ``same``, candidates are scored on the trainset."""
    given = {"iterations": 4, "k": 2, "proposers": 2, "num_threads": 8, **arguments}
    lm = (given.pop("task_model", None) or SimulatedModel(seed=0, reply_model=TASK.reply_model)).lm()
    made = given.pop("program", None) or student()
    optimizer = AsyncMetaHarness(TASK.metric, sandbox=sandbox or Watched(), **{"proposer_lm": lm, **given})
    return evolved(optimizer, made, TASK.trainset(train), None if same else TASK.valset(val), {"lm": lm})


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_scores_rise_and_the_best_candidate_is_returned(schedule: str) -> None:
    program = search(schedule=schedule, iterations=8)
    found = program.detailed_results
    scores = [candidate.score for candidate in found.candidates]
    assert found.best == max(range(len(scores)), key=lambda number: (scores[number], -found.candidates[number].cost))
    assert scores[found.best] > scores[0] + 0.1
    assert program.module_src == found.candidates[found.best].draft.source
    assert 0 < len(found.candidates) - 1 + len(found.failed) <= 16
    assert all(len(candidate.scores) == 8 and len(candidate.traces) == 3 for candidate in found.candidates)


def test_the_version_is_the_archive_s_size_and_every_admission_is_told() -> None:
    found = search().detailed_results
    commits = found.stats.commits
    assert [commit.candidate for commit in commits] == list(range(len(found.candidates)))
    assert [commit.score for commit in commits] == [candidate.score for candidate in found.candidates]
    assert steps_of(found.stats) == 5
    assert sum(found.stats.ended.values()) == 5


def test_lockstep_proposes_one_at_a_time_and_async_overlaps() -> None:
    lockstep, overlapped = search(schedule="lockstep"), search()
    gaps = [commit.gap for commit in lockstep.detailed_results.stats.commits]
    assert max(gaps) < 2  # the second candidate of a proposal has not seen the first
    assert max(commit.gap for commit in overlapped.detailed_results.stats.commits) >= 2
    assert overlapped.detailed_results.stats.seconds < lockstep.detailed_results.stats.seconds


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_a_proposer_whose_replies_fit_no_format_costs_its_proposals_and_no_more(
    schedule: str, caplog: pytest.LogCaptureFixture
) -> None:
    def reply(prompt: str) -> str:
        return reply_for(prompt, next_thought="x", next_tool_name="read_minds", next_tool_args="{}", answer="3")

    program = search(proposer_lm=fake_lm(reply), schedule=schedule)
    found = program.detailed_results
    assert len(found.candidates) == 1
    assert found.stats.ended["rejected"] == 4
    assert any(reason.startswith("the proposer failed: AdapterParseError") for reason in found.stats.end_reasons)
    warned = [record for record in caplog.records if "the reply cannot be used" in record.message]
    assert len(warned) == 1


def test_never_more_rollouts_than_slots() -> None:
    sandbox = Watched()
    search(sandbox, num_threads=3)
    assert 1 < sandbox.most <= 3


def test_no_label_leaves_the_host_and_no_validation_label_reaches_the_proposer() -> None:
    sandbox, prompts = Watched(), list[str]()
    found = search(sandbox).detailed_results
    assert all(set(job.inputs or {}) == {"question"} and job.batch is None for job in sandbox.jobs)
    for candidate in found.candidates:
        assert all(trace.labels and trace.example.startswith("train") for trace in candidate.traces)
        prompts += [str(vars(candidate.draft))]
    questions = {example.question for example in TASK.valset(8)}
    told = [
        trace for candidate in found.candidates for trace in candidate.traces if trace.inputs["question"] in questions
    ]
    assert not told


def test_a_candidate_that_does_what_none_may_do_is_refused_with_the_reason() -> None:
    def hostile(job: Any) -> tuple[str, str] | None:
        validated = any(example.question == (job.inputs or {}).get("question") for example in TASK.valset(8))
        seed = "house rules" not in job.source[:40]
        return None if seed or not validated else ("forbidden", "it used the network")

    found = search(Watched(hostile)).detailed_results
    assert len(found.candidates) == 1
    assert found.failed
    assert {candidate.failure.reason for candidate in found.failed} <= {"forbidden", "error", "interface"}
    assert any("on validation" in candidate.failure.message for candidate in found.failed)
    assert found.stats.ended["rejected"] == 4


def test_an_error_on_one_example_costs_that_example_only() -> None:
    unlucky = TASK.valset(8)[3].question

    def fails(job: Any) -> tuple[str, str] | None:
        return ("error", "ValueError") if (job.inputs or {}).get("question") == unlucky else None

    found = search(Watched(fails), iterations=1).detailed_results
    assert all(candidate.scores[3] == 0.0 and len(candidate.failures) == 1 for candidate in found.candidates)


def test_a_student_that_does_not_run_is_an_error_that_says_so() -> None:
    with pytest.raises(DataError, match="does not run in the sandbox: error: it is broken"):
        search(Watched(lambda job: ("error", "it is broken")))


def test_a_proposer_that_writes_nothing_is_a_rejected_proposal() -> None:
    lm = fake_lm(lambda prompt: reply_for(prompt, next_thought="t", next_tool_name="finish", next_tool_args="{}",
                                          reasoning="r", modules="nothing to say"))  # fmt: skip
    found = search(proposer_lm=lm, iterations=2).detailed_results
    assert len(found.candidates) == 1
    assert found.stats.ended["rejected"] == 2
    assert any("the proposer wrote no module" in reason for reason in found.stats.end_reasons)


def test_proposers_at_once_have_directions_of_their_own() -> None:
    found = search(proposers=3, iterations=3, directions=["red", "green", "blue"]).detailed_results
    assert {candidate.draft.direction for candidate in found.candidates[1:]} == {"red", "green", "blue"}


def test_the_student_is_evaluated_though_the_time_is_over_before_the_sandbox_has_started() -> None:
    class Late(Watched):
        async def __aenter__(self) -> Any:
            await asyncio.sleep(100)
            return await super().__aenter__()

    found = search(Late(), iterations=1000, max_seconds=60.0).detailed_results
    assert (found.best, len(found.candidates)) == (0, 1)
    assert found.stats.stop_reason == "max_seconds=60 is over"


def test_a_search_that_is_stopped_before_the_student_is_evaluated_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Stopping(Watched):
        async def __aenter__(self) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            while "interrupted by Ctrl-C" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0)
            return await super().__aenter__()

    lm = fake_lm(str)
    optimizer = AsyncMetaHarness(TASK.metric, sandbox=Stopping(), iterations=1, proposer_lm=lm)
    with dspy.context(lm=lm), pytest.raises(RunAbortedError, match="the student was not evaluated: interrupted"):
        optimizer.compile(student(), trainset=TASK.trainset(3), valset=TASK.valset(3))


@pytest.mark.long
def test_the_run_directory_holds_every_candidate_and_is_for_one_run(tmp_path: Path) -> None:
    found = search(log_dir=tmp_path / "run").detailed_results
    sources = sorted((tmp_path / "run" / "candidates").glob("*/source.py"))
    assert [path.read_text() for path in sources] == [candidate.draft.source for candidate in found.candidates]
    again = search(log_dir=tmp_path / "run").detailed_results
    assert (again.candidates, again.failed) == (found.candidates, found.failed)
    with pytest.raises(ConfigurationError, match=r"holds another run.* trainset was 6 examples"):
        search(log_dir=tmp_path / "run", train=5)
    for file in (tmp_path / "run").glob("journal*"):
        file.unlink()
    with pytest.raises(ConfigurationError, match="holds another run"):
        search(log_dir=tmp_path / "run")


@pytest.mark.parametrize(("arguments", "said"), [
    ({"iterations": 0}, "iterations is 0"), ({"k": 0}, "k is 0"), ({"proposers": 1.5}, "proposers is 1.5"),
    ({"schedule": "fast"}, "schedule is 'fast'"),
    ({"sandbox": "docker"}, "sandbox is 'docker'"), ({"cost": 3}, "cost is 3"), ({"directions": []}, "directions is"),
    ({"directions": "words"}, "directions is"), ({"directions": ["", "x"]}, "directions is"),
])  # fmt: skip
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        AsyncMetaHarness(TASK.metric, **{"proposer_lm": None, **arguments}).compile(
            student(), trainset=TASK.trainset(2), valset=TASK.valset(2)
        )


def test_students_and_data_that_cannot_be_used_are_refused() -> None:
    optimizer, data = AsyncMetaHarness(TASK.metric, proposer_lm=None), TASK.trainset(2)
    for bad in (TASK.program(3), 7, dspy.Flex("question -> answer", tools=[len])):
        with pytest.raises(ConfigurationError, match="the student"):
            optimizer.compile(bad, trainset=data)
    for examples in ([], [dspy.Example(question="?")], [dspy.Example(other="?").with_inputs("other")], None):
        with pytest.raises(DataError, match="trainset"):
            optimizer.compile(student(), trainset=examples)  # pyright: ignore[reportArgumentType]


LEARNER = """# name: memory
# hypothesis: remember the answers
class Learner(dspy.Module):
    def __init__(self):
        super().__init__()
        self.predict = dspy.Predict("question -> answer")
    def forward(self, question):
        known = self.memory.get(question.split()[0])
        return dspy.Prediction(answer=known or self.predict(question=question).answer)
    def learn(self, batch):
        for one in batch:
            self.memory[one["inputs"]["question"].split()[0]] = one["labels"]["answer"]
"""
HOSTILE = """# name: hostile
class Hostile(dspy.Module):
    def forward(self, question):
        import time
        dspy.evaluate.answer_exact_match = lambda *_: True
        while True: pass
"""


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
def test_with_the_real_sandbox_a_harness_learns_and_a_hostile_one_fails() -> None:
    """The learner knows by memory what the LM does not; the metric judges in this process."""
    modules = f"```python\n{LEARNER}\n```\n```python\n{HOSTILE}\n```"
    lm = fake_lm(lambda prompt: reply_for(prompt, answer="no idea", next_thought="t", next_tool_name="finish",
                                          next_tool_args="{}", reasoning="r", modules=modules))  # fmt: skip
    train = [dspy.Example(question=f"{word} train", answer=word.upper()).with_inputs("question") for word in "abcd"]
    val = [dspy.Example(question=f"{word} val", answer=word.upper()).with_inputs("question") for word in "abc"]

    def metric(gold: Any, pred: Any, trace: Any = None) -> float:
        return float(gold.answer == pred.answer)

    limits = Limits(seconds=60.0, cpu_seconds=2)
    optimizer = AsyncMetaHarness(
        metric, proposer_lm=lm, iterations=1, num_threads=4, limits=limits, accept_missing_protection=LAYERS
    )
    with dspy.context(lm=lm):
        program = optimizer.compile(dspy.Predict("question -> answer"), trainset=train, valset=val)
        assert program(question="d again").answer == "D"
    found = program.detailed_results
    assert [candidate.score for candidate in found.candidates] == [0.0, 1.0]
    assert program.memory == {"a": "A", "b": "B", "c": "C", "d": "D"}
    assert [candidate.draft.name for candidate in found.failed] == ["hostile"]
    assert found.failed[0].failure.reason in ("cpu", "time")
    assert found.front == (1,)


# Faults and stops


@pytest.mark.long
def test_a_provider_s_error_is_no_score_of_a_candidate() -> None:
    asked = 0
    task_lm = SimulatedModel(seed=0, reply_model=TASK.reply_model)
    answer = task_lm.answer

    async def answer_or_refuse(request: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked % 3 == 0:
            raise LMRateLimitError("429")
        return await answer(request)

    task_lm.answer = answer_or_refuse  # type: ignore[method-assign]
    plain = search().detailed_results
    faulty = search(proposer_lm=SimulatedModel(seed=0, reply_model=TASK.reply_model).lm(), task_model=task_lm)
    found = faulty.detailed_results
    assert found.candidates[0].scores == plain.candidates[0].scores, "the student has the scores that it has"
    assert found.stats.retried_requests > 0
    assert sum(found.stats.ended.values()) == steps_of(found.stats)


def test_a_rejected_key_ends_the_search_with_the_best_so_far() -> None:
    def rejected(prompt: str) -> str:
        raise LMAuthError("no such key")

    with pytest.raises(RunAbortedError, match=r"API key|no such key") as caught:
        search(proposer_lm=fake_lm(rejected))
    assert isinstance(caught.value.best_program, Harness)


def test_a_harness_is_saved_and_loaded_with_its_source_and_the_student_is_not_changed(tmp_path: Path) -> None:
    given = student()
    before = given.dump_state()
    program = search(iterations=3, program=given)
    assert given.dump_state() == before
    program.save(tmp_path / "program.json")
    other = Harness("question -> answer")
    other.load(tmp_path / "program.json")
    assert other.module_src == program.module_src


def test_ctrl_c_ends_a_search_with_the_best_candidate_so_far_and_leaves_no_thread() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    written = 0

    def answer(prompt: str) -> str:
        nonlocal written
        written += 1
        if written == 40:
            os.kill(os.getpid(), signal.SIGINT)
        source = LEARNER.replace('"memory"', f'"memory {written}"').replace(
            "# name: memory", f"# name: memory {written}"
        )
        return reply_for(
            prompt, answer="A", next_thought="t", next_tool_name="finish", next_tool_args="{}", reasoning="r",
            modules=f"```python\n{source}\n```",
        )  # fmt: skip

    lm = fake_lm(answer)
    data = [dspy.Example(question=f"{word} ?", answer=word.upper()).with_inputs("question") for word in "abc"]
    optimizer = AsyncMetaHarness(
        lambda gold, pred, trace=None: float(gold.answer == pred.answer),
        proposer_lm=lm, iterations=1000, k=1, proposers=2, num_threads=4, sandbox=Watched(),
    )  # fmt: skip
    with dspy.context(lm=lm):
        program: Any = optimizer.compile(dspy.Predict("question -> answer"), trainset=data, valset=data)
    stats = program.detailed_results.stats
    assert (stats.outcome, stats.stop_reason) == ("stopped", "interrupted by Ctrl-C")
    assert 0 < steps_of(stats) < 1000
    assert sum(stats.ended.values()) == steps_of(stats)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert left_threads() == []


# Proposers that run their drafts.

BROKEN = """# name: looks up
# hypothesis: a draft that is run first
class Answerer(dspy.Module):
    def __init__(self):
        super().__init__()
        self.predict = dspy.Predikt("question -> answer")

    def forward(self, question):
        print("it was asked")
        return dspy.Prediction(answer=self.predict(question=question).answer)
"""


class Agent:
    """Replies of an agent that makes these tool calls in turn, and then submits these modules; keeps its prompts."""

    def __init__(self, *calls: tuple[str, dict[str, Any]], modules: str = "draft: mine") -> None:
        self.calls, self.modules, self.prompts = calls, modules, list[str]()

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        fields = {"reasoning": "-", "modules": self.modules}
        if "`next_tool_name`" in prompt or "`[[ ## next_tool_name ## ]]`" in prompt:
            done = len(set(re.findall(r"\[\[ ## tool_name_(\d+) ## \]\]", prompt)))
            name, given = self.calls[done] if done < len(self.calls) else ("finish", {})
            fields = {"next_thought": "-", "next_tool_name": name, "next_tool_args": json.dumps(given)}
        return reply_for("", **fields)


MENDING = (
    ("write_draft", {"name": "mine", "source": BROKEN}),
    ("run_draft", {"name": "mine", "example": 0}),
    ("edit_draft", {"name": "mine", "old": "Predikt", "new": "Predict"}),
    ("run_draft", {"name": "mine", "example": 1}),
)


@pytest.mark.parametrize("in_thread", [False, True], ids=["on the loop", "in a thread"])
def test_a_proposer_runs_its_draft_sees_the_error_mends_it_and_submits_it(in_thread: bool) -> None:
    agent, sandbox = Agent(*MENDING), Watched()
    lm = fake_lm(agent, asynchronous=not in_thread)
    found = search(sandbox, proposer_lm=lm, iterations=1, k=1).detailed_results
    assert [candidate.draft.name for candidate in found.candidates[1:]] == ["looks up"]
    assert found.candidates[1].draft.source.strip() == BROKEN.replace("Predikt", "Predict").strip()
    assert "no attribute 'Predikt'" in agent.prompts[-1]
    assert re.search(r"score: [\d.]+", agent.prompts[-1])
    drafts = [job for job in sandbox.jobs if "Predikt" in job.source]
    assert len(drafts) == 1
    assert {str(job.inputs) for job in drafts} <= {str(dict(row.inputs())) for row in TASK.trainset(6)}


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
def test_with_the_real_sandbox_a_draft_runs_prints_and_a_hostile_one_is_told_why_it_failed() -> None:
    calls = (
        ("write_draft", {"name": "mine", "source": BROKEN.replace("Predikt", "Predict")}),
        ("run_draft", {"name": "mine", "example": 0}),
        ("write_draft", {"name": "bad", "source": HOSTILE}),
        ("run_draft", {"name": "bad", "example": 1}),
    )
    agent = Agent(*calls)

    def reply(prompt: str) -> str:
        return agent(prompt) if "archive_overview" in prompt else reply_for(prompt, answer="A")

    rows = [dspy.Example(question=f"{word} row", answer=word.upper()).with_inputs("question") for word in "abcd"]
    optimizer = AsyncMetaHarness(
        lambda gold, pred, trace=None: float(gold.answer == pred.answer), proposer_lm=fake_lm(reply), iterations=1, k=1,
        num_threads=1, limits=Limits(seconds=60.0, cpu_seconds=4), accept_missing_protection=LAYERS,
    )  # fmt: skip
    with dspy.context(lm=fake_lm(reply)):
        found = optimizer.compile(dspy.Predict("question -> answer"), trainset=rows[:2], valset=rows[2:])
    seen = agent.prompts[-1]
    assert "printed:\nit was asked" in seen
    assert re.search(r"failed: (cpu|time): ", seen)
    assert found.detailed_results.candidates[1].draft.name == "looks up"


def test_drafts_are_run_so_often_and_no_more_and_tools_say_so() -> None:
    agent, sandbox = Agent(MENDING[0], *[MENDING[1]] * 6), Watched()
    search(sandbox, proposer_lm=fake_lm(agent), iterations=1, k=1, proposer_runs=2)
    asked = [job for job in sandbox.jobs if "Predikt" in job.source]
    assert len(asked) == 2 + 3, "two runs of the draft, and the check"
    assert "All runs of this proposal are used up" in agent.prompts[-1]


def test_once_its_tokens_are_spent_a_proposer_is_only_asked_to_finish() -> None:
    agent, sandbox = Agent(*MENDING), Watched()
    found = search(sandbox, proposer_lm=fake_lm(agent), iterations=1, k=1, proposer_tokens=1).detailed_results
    assert agent.prompts[-1].count("The tokens of this proposal are spent") == len(MENDING)
    assert len(found.candidates) == 1


class OwnAgent(dspy.Module):
    """An agent of a user's own: no LM, one draft, which is run before it is submitted."""

    def __init__(self, tools: list[Any]) -> None:
        super().__init__()
        self.named = {tool.__name__: tool for tool in tools}

    async def aforward(self, **inputs: Any) -> dspy.Prediction:
        await self.named["write_draft"](name="own", source=BROKEN.replace("Predikt", "Predict"))
        self.seen = await self.named["run_draft"](name="own", example=0)
        assert "score: " in self.seen
        assert "question" in inputs["task"]
        return dspy.Prediction(modules="- draft: own")


def test_an_agent_of_the_users_own_takes_the_proposers_place(tmp_path: Path) -> None:
    found = search(proposer=OwnAgent, iterations=1, k=1, log_dir=tmp_path).detailed_results
    assert [candidate.draft.name for candidate in found.candidates[1:]] == ["looks up"]
    a_run = sum(trace.outcome.tokens for trace in found.candidates[1].traces) / 3
    assert 0.5 * a_run < found.stats.tokens_by_stage["propose"] < 2 * a_run, (
        "the run of its draft, and no LM of its own"
    )


def test_a_proposer_that_is_no_module_is_refused_before_anything_is_asked() -> None:
    sandbox = Watched()
    with pytest.raises(ConfigurationError, match=r"expected a dspy\.Module"):
        search(sandbox, proposer=lambda tools: "agent")
    with pytest.raises(ConfigurationError, match="expected a function"):
        search(sandbox, proposer="agent")
    assert not sandbox.jobs


def test_a_providers_fault_in_the_run_of_a_draft_is_told_and_is_no_score() -> None:
    agent = Agent(MENDING[0], MENDING[2], *[MENDING[3]] * 2)

    class Limited(Watched):
        async def run(self, job: Any, call_lm: Any) -> Any:
            if "self.predict(question=question)" in job.source and not any(
                "self.predict(question=question)" in each.source for each in self.jobs
            ):
                self.jobs.append(job)

                async def limited(request: Any) -> Any:
                    raise FlashEvolveError("too many requests")

                call_lm = limited
            return await super().run(job, call_lm)

    found = search(Limited(), proposer_lm=fake_lm(agent), iterations=1, k=1).detailed_results
    assert "It was not run (FlashEvolveError)" in agent.prompts[-1]
    assert len(found.candidates) == 2
