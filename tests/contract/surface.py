"""What the tests of the contract share: how a run is made, in real and in virtual time, and what is read from it.

Nothing here, and nothing in this folder, imports a module inside ``dspy_flashevolve`` but those of ``sim``, and those
that users import by name.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dspy
from hypothesis import strategies as st

from dspy_flashevolve import AsyncGEPA, Edits, Guarded, Reflective
from dspy_flashevolve.sim.virtual import run
from tests.fakes import Chain, digits, examples, fake_lm, hashed, reflection_lm, reply_for

TRAIN, VAL = examples("t", 7), examples("v", 9)
ENDLESS = 10**6
"""A budget of metric calls that no test spends."""
SEARCHES = st.sampled_from(["edits", "pareto", Edits(frontier_share=1.0)])
POLICIES = st.sampled_from(["full", "guarded", "reflective", Guarded(0), Reflective(min_gap=0)])
"""Any search goes with any policy."""


# Runs


def optimizer(calls: int | None = 60, **options: Any) -> AsyncGEPA:
    """An AsyncGEPA on ``digits``, four slots wide."""
    settings: dict[str, Any] = {"max_metric_calls": calls, "num_threads": 4, "track_stats": True}
    settings |= {"reflection_lm": reflection_lm()} | options
    return AsyncGEPA(settings.pop("metric", digits), **settings)


def compiled(calls: int | None = 60, program: dspy.Module | int = 1, **options: Any) -> Any:
    """What AsyncGEPA makes of a program, or of a ``Chain`` of so many predictors, as a script does it."""
    student = Chain(program) if isinstance(program, int) else program
    return optimizer(calls, **options).compile(student, trainset=TRAIN, valset=VAL)


def simulated(calls: int | None = 60, program: dspy.Module | int = 1, **options: Any) -> Any:
    """The same in virtual time: what waits (retries, timeouts) costs nothing, and equal runs are equal."""
    return evolved(optimizer(calls, **options), Chain(program) if isinstance(program, int) else program)


def evolved(
    one: Any, student: Any = None, trainset: Any = TRAIN, valset: Any = VAL, settings: dict[str, Any] | None = None
) -> Any:
    """What an optimizer makes of a student (default: a ``Chain``) in virtual time, under settings of dspy."""
    with dspy.context(**(settings or {})):
        return run(lambda: one.acompile(student or Chain(), trainset=trainset, valset=valset))


class InThread(dspy.Module):
    """As a ``Chain`` of one predictor, but nothing of it is awaited."""

    def __init__(self, signature: str = "question -> answer") -> None:
        super().__init__()
        self.steps = [dspy.Predict(signature)]

    def forward(self, question: str) -> Any:
        return self.steps[0](question=question)


class Scored:
    """A metric that keeps the questions that it has scored; feedback on a predictor is no score."""

    def __init__(self, metric: Callable[..., Any] = digits) -> None:
        self.metric, self.questions = metric, list[str]()

    def __call__(self, gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        if pred_name is None:
            self.questions.append(gold.question)
        return self.metric(gold, pred, trace, pred_name, pred_trace)


class On:
    """A gepa callback: calls a function at one kind of event."""

    def __init__(self, event: str, call: Callable[[dict[str, Any]], Any]) -> None:
        setattr(self, event, call)


def on(event: str, call: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """``gepa_kwargs`` with one callback."""
    return {"callbacks": [On(event, call)]}


class Heard:
    """A gepa callback that keeps what it hears: method, event."""

    def __init__(self, look: Callable[[str, Any], None] = lambda name, event: None) -> None:
        self.events: list[tuple[str, Any]] = []
        self._look = look

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)

        def hear(event: Any) -> None:
            self.events.append((name, event))
            self._look(name, event)

        return hear

    def of(self, name: str) -> list[Any]:
        return [event for heard, event in self.events if heard == name]


@contextlib.contextmanager
def listening(hear: Callable[[logging.LogRecord], Any], *names: str) -> Iterator[None]:
    """Call a function with what is logged under these names (default: ours)."""
    handler = logging.Handler()
    handler.emit = hear  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in names or ("dspy_flashevolve",)]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


class Sum(dspy.Module):
    """A named fake of a repair: takes every child in."""

    async def aforward(self, head: Any, children: Any, **_: Any) -> Any:
        texts = {name: f"Instruction {hashed(head, [c.texts for c in children]) % 100_000}" for name in head}
        judged = [SimpleNamespace(child=c.number, verdict="orthogonal", reason="sum") for c in children]
        return dspy.Prediction(texts={name: texts[name] for c in children for name in c.texts}, verdicts=judged)


# What came of them


def text_of(program: Any) -> str:
    return program.steps[0].signature.instructions


def steps_of(stats: Any) -> int:
    """Evolution steps of a run."""
    return stats.steps if hasattr(stats, "steps") else stats.tickets


def facts(details: Any) -> tuple[Any, ...]:
    """Of a search: texts, parents, scores, metric calls."""
    candidates = [
        {name: predictor.signature.instructions for name, predictor in program.named_predictors()}
        for program in details.candidates
    ]
    return candidates, details.parents, details.val_aggregate_scores, details.val_subscores, details.total_metric_calls


def check_ends(stats: Any) -> None:
    """Every step has ended once, in one of the six ways, and with a reason unless it was committed."""
    assert set(stats.ended) <= {"committed", "joined", "rejected", "discarded", "failed", "cancelled"}
    assert sum(stats.ended.values()) == steps_of(stats)
    assert stats.ended.get("committed", 0) == len({commit.step for commit in stats.commits})
    assert sum(stats.end_reasons.values()) == steps_of(stats) - stats.ended.get("committed", 0)


def check_winner(details: Any, valset_size: int = len(VAL)) -> None:
    """The best was validated on everything, and is no worse than the seed."""
    best = details.best_idx
    assert set(details.val_subscores[best]) == set(range(valset_size))
    assert details.val_aggregate_scores[best] == max(details.val_aggregate_scores) >= details.val_aggregate_scores[0]


def left_threads() -> list[str]:
    """Names of threads of ours that live though a moment has passed."""
    ours = [one for one in threading.enumerate() if one.name.startswith(("flashevolve", "asyncio-portal"))]
    for thread in ours:
        thread.join(timeout=10)
    return [one.name for one in ours if one.is_alive()]


# The command line and the run directory


def command(*arguments: str) -> tuple[int, str, str]:
    """The command ``flashevolve`` in this process: its status, what it printed, and what it complained of."""
    [entry] = {point.value: point for point in entry_points(group="console_scripts", name="flashevolve")}.values()
    main = entry.load()
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(list(arguments))
    return status, out.getvalue(), err.getvalue()


def problems(directory: Path) -> list[str]:
    """What ``flashevolve check`` finds wrong in a run directory."""
    status, said, complaint = command("check", str(directory))
    found = [line for line in said.splitlines() if line.startswith("problem: ")] + complaint.splitlines()
    assert bool(status) == bool(found)
    return found


def journal_of(directory: Path) -> Path:
    return directory / "journal.sqlite"


def sql(directory: Path, query: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(journal_of(directory))) as connection:
        return connection.execute(query).fetchall()


# Language models


def priced(lm: Any) -> Any:
    """The LM, which costs a dollar for a million tokens of a prompt, and two for a million that it writes."""
    import litellm  # it takes seconds, and processes of tests import this module

    price = {"input_cost_per_token": 1e-6, "output_cost_per_token": 2e-6, "litellm_provider": "openai", "mode": "chat"}
    litellm.register_model({"priced": price})
    lm.model = "priced"
    return lm


def completion(text: str) -> Any:
    """What an LM with a ``forward`` of its own returns."""
    dotdict = dspy.dsp.utils.utils.dotdict
    choice = dotdict(message=dotdict(content=text, role="assistant"), finish_reason="stop")
    return dotdict(choices=[choice], usage={}, model="own")


class Interpreter:
    """Runs no code, and answers the same to each; ``taken`` gets the code."""

    def __init__(self, said: str = '{"answer": "3"}', taken: list[str] | None = None) -> None:
        self.tools: dict[str, Any] = {}
        self._said, self._taken = said, [] if taken is None else taken

    def start(self) -> None: ...

    def shutdown(self) -> None: ...

    def execute(self, code: str, variables: Any = None) -> str:
        self._taken.append(code)
        return self._said


def code_lm() -> dspy.LM:
    """Rewrites code by a harmless comment, so that every proposal is a new candidate."""

    def answer(prompt: str) -> str:
        source = prompt.split("[[ ## current_source ## ]]")[-1].split("[[ ##")[0].strip()
        return reply_for(prompt, revised_source=f"# {hashed(prompt) % 1000}\n{source}")

    return fake_lm(answer)


def raising(choose: Callable[[int], Exception | None], lowest: int = 1) -> dspy.LM:
    """Answers digits from ``lowest`` to 6, or raises what ``choose`` gives for the number of the request."""
    count = 0

    def answer(prompt: str) -> str:
        nonlocal count
        count += 1
        error = choose(count)
        if error is not None:
            raise error
        number = hashed(prompt)
        return reply_for(prompt, answer=str(lowest + number % (7 - lowest)), new_instruction=f"Instruction {number}")

    return fake_lm(answer)
