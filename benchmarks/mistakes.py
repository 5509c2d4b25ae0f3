"""A beginner's mistakes under AsyncGEPA and dspy.GEPA: `python -m benchmarks.mistakes`.

What each spends and says before it ends: a program of one predictor, 30 training and 30 validation examples, a budget
of 150 metric calls, a model in this process that answers at once; for the endpoint that is down, a port where nobody
listens and 40 calls. Seconds are real.
"""

from __future__ import annotations

import argparse
import logging
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import dspy
from dspy.utils.dummies import DummyLM

from benchmarks.measure import silence
from benchmarks.results import commit, table
from dspy_flashevolve import AsyncGEPA

CALLS = 150
COLUMNS = ("mistake", "optimizer", "calls", "seconds", "ends with")
WIDTH = 150
"""Characters of a message that are shown."""


class Count:
    """Program runs and metric calls so far, the larger of the two."""

    def __init__(self) -> None:
        self.runs = self.scored = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Count:
        return self

    @property
    def spent(self) -> int:
        """Of the budget."""
        return max(self.runs, self.scored)


class Program(dspy.Module):
    """One predictor; counts its runs, and does `first` in each.

    Args:
        count: gets the runs.
        first: what is done before the predictor is called.
    """

    def __init__(self, count: Count, first: Callable[[Any], Any] = lambda program: None) -> None:
        super().__init__()
        self.answer = dspy.Predict("question -> answer")
        self._first, self._count = first, count

    def forward(self, question: str) -> Any:
        """Answer."""
        self._count.runs += 1
        self._first(self)
        return self.answer(question=question)


def examples(name: str) -> list[Any]:
    """Thirty questions."""
    return [dspy.Example(question=f"{name} {number}").with_inputs("question") for number in range(30)]


@dataclass(frozen=True)
class Mistake:
    """What a beginner did.

    Attributes:
        name: For the table.
        score: What the metric makes of a prediction.
        feedback: What it says of one when it is asked for feedback; `None` for nothing.
        first: What the program does first.
        data: Makes the examples.
        options: Of the optimizer.
        lm: Makes the task LM.
    """

    name: str
    score: Callable[[Any, Any], Any] = lambda gold, pred: 0.5
    feedback: Callable[[Any], str] | None = None
    first: Callable[[Any], Any] = lambda program: None
    data: Callable[[str], list[Any]] = examples
    options: dict[str, Any] = field(default_factory=lambda: {"max_metric_calls": CALLS})
    lm: Callable[[], Any] = lambda: DummyLM([{"answer": "1"} for _ in range(20 * CALLS)])


def unreachable() -> Any:
    """An LM at a port where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return dspy.LM("openai/model", api_base=f"http://127.0.0.1:{port}/v1", api_key="none", cache=False)


def unknown_example(gold: Any, pred: Any) -> float:
    """A metric that knows none of the examples."""
    raise LookupError(f"nothing known of {gold.question}")


MISTAKES = (
    Mistake("metric returns None", score=lambda gold, pred: None),
    Mistake("metric returns a string", score=lambda gold, pred: "0.5"),
    Mistake("metric returns NaN", score=lambda gold, pred: float("nan")),
    Mistake("metric returns a list", score=lambda gold, pred: [0.5]),
    Mistake("metric has a typo", score=lambda gold, pred: float(pred.answr == "1")),
    Mistake("metric raises, a message an example", score=unknown_example),
    Mistake("feedback has a typo", feedback=lambda pred: pred.answr),
    Mistake("training examples lack a field", score=lambda gold, pred: 0.5 if "v" in gold.question else gold.answer),
    Mistake("program has a typo", first=lambda program: program.anser),
    Mistake("no LM is configured", lm=lambda: None),
    Mistake("examples are dicts", data=lambda name: [{"question": f"{name} {one}"} for one in range(30)]),
    Mistake("a model that does not exist", lm=lambda: dspy.LM("nonsense-model", num_retries=0)),
    Mistake("reflection_lm is a string", options={"max_metric_calls": CALLS, "reflection_lm": "nonsense-model"}),
    Mistake('auto="lite"', options={"auto": "lite"}),
    Mistake("only max_seconds", options={"max_seconds": 2}),
    Mistake("only max_cost, of a model without a price", options={"max_cost": 0.01}),
    Mistake("an older name: max_steps", options={"max_metric_calls": CALLS, "max_steps": 5}),
    Mistake("the endpoint is down", options={"max_metric_calls": 40}, lm=unreachable),
)


def row(mistake: Mistake, optimizer: Any) -> list[str]:
    """One optimizer makes the mistake."""
    count = Count()

    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        count.scored += 1
        score = mistake.score(gold, pred)
        if mistake.feedback is None or pred_name is None:
            return score
        return dspy.Prediction(score=score, feedback=mistake.feedback(pred))

    began, says = time.monotonic(), "no error"
    replies = [{"improved_instruction": f"Answer well, {number}."} for number in range(20 * CALLS)]
    options = {"reflection_lm": DummyLM(replies), "num_threads": 4, **mistake.options}
    try:
        with silence(), dspy.context(lm=mistake.lm()):
            program = Program(count, mistake.first)
            optimizer(metric, **options).compile(program, trainset=mistake.data("t"), valset=mistake.data("v"))
    except Exception as error:
        says = f"{type(error).__name__}: {error}".replace("\n", " ")
    seconds = f"{time.monotonic() - began:.1f}"
    name = "AsyncGEPA" if optimizer is AsyncGEPA else "dspy.GEPA"
    return [mistake.name, name, str(count.spent), seconds, says[:WIDTH] + "..." * (len(says) > WIDTH)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mistakes", description=__doc__)
    parser.add_argument("--only", nargs="+", help="mistakes whose names begin so")
    options = parser.parse_args(arguments)
    for name in ("dspy", "dspy_flashevolve", "LiteLLM"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    chosen = [one for one in MISTAKES if not options.only or one.name.startswith(tuple(options.only))]
    rows = [row(one, optimizer) for one in chosen for optimizer in (dspy.GEPA, AsyncGEPA)]
    print(f"commit {commit()}\n{table(COLUMNS, rows)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
