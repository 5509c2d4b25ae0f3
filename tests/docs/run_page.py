"""Run the Python blocks of pages, each page's in one namespace, as a reader would who copies them into one script.

What a page takes for granted is there: a task (``program``, ``student``, ``metric``, ``trainset``, ``valset``, and the
short names ``train`` and ``val``) and language models (``lm``, ``reflection_lm``, ``strong_lm``). Every ``dspy.LM``,
whatever its name, is answered by the simulated server, which runs 1000 times as fast as it says. A budget is a small
one: ``auto`` is one of few candidates, no search has more than 150 metric calls, and one for code has few iterations.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import dspy
from dspy.teleprompt.gepa.gepa import AUTO_RUN_SETTINGS

import dspy_flashevolve
import dspy_flashevolve.sim as sim
from benchmarks.models import REPLY_MODELS
from dspy_flashevolve import AsyncACE, AsyncGEPA, AsyncMetaHarness, Edits
from dspy_flashevolve.programs.servers import BalancedLM
from dspy_flashevolve.sim import HouseRules, SimServer
from tests.adding_an_algorithm.hill_climber import HillClimber

BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPEED = 1000.0
CANDIDATES = 2
ITERATIONS = 3
CALLS = 150
"""Two validations on the largest validation set of a page, and some steps."""


def blocks(path: Path) -> list[tuple[int, str]]:
    """The line where each Python block begins, and its text."""
    text = path.read_text(encoding="utf-8")
    return [(text.count("\n", 0, found.start(1)), found[1]) for found in BLOCK.finditer(text)]


def redirect(api_base: str) -> None:
    """Have every ``dspy.LM`` ask the simulated server, whatever its name and address, but for simulated ones."""
    begin = dspy.LM.__init__

    def init(self: dspy.LM, model: str, *args: Any, **options: Any) -> None:
        if "engine" not in options and not str(options.get("api_base", "")).startswith("http://127.0.0.1:"):
            options |= {"api_base": api_base, "api_key": "none", "cache": False}
            model = model if model.startswith("openai/") else f"openai/{model}"
        begin(self, model, *args, **options)

    dspy.LM.__init__ = init  # type: ignore[method-assign]
    balance = BalancedLM.__init__

    def balanced(self: BalancedLM, *args: Any, **options: Any) -> None:
        balance(self, *args, **options)
        self.deployments = ({"api_base": api_base},)

    BalancedLM.__init__ = balanced  # type: ignore[method-assign]


def spend_little() -> None:
    """Have every search of dspy.GEPA's and of AsyncGEPA's make few metric calls, whatever it is told."""
    for settings in AUTO_RUN_SETTINGS.values():
        settings["n"] = CANDIDATES
    for kind in (dspy.GEPA, AsyncGEPA):
        begin = kind.__init__

        def init(self: Any, *args: Any, begin: Any = begin, **options: Any) -> None:
            if options.get("max_metric_calls") is not None:
                options["max_metric_calls"] = min(options["max_metric_calls"], CALLS)
            begin(self, *args, **options)

        kind.__init__ = init  # type: ignore[method-assign]


def fast_server(*args: Any, **options: Any) -> SimServer:
    """As written, but fast."""
    return SimServer(*args, **options | {"time_scale": SPEED})


def few_iterations(*args: Any, iterations: int = ITERATIONS, **options: Any) -> AsyncMetaHarness:
    """As written, but with few iterations."""
    return AsyncMetaHarness(*args, iterations=min(iterations, ITERATIONS), **options)


def main(paths: list[Path]) -> None:
    """Run the blocks of pages."""
    task = HouseRules(reply_model=REPLY_MODELS["obliging"])
    with SimServer(time_scale=SPEED, reply_model=task.reply_model) as server:
        redirect(server.api_base)
        dspy_flashevolve.AsyncMetaHarness = few_iterations  # type: ignore[misc, assignment]
        sim.SimServer = fast_server  # type: ignore[misc, assignment]
        spend_little()
        for path in paths:
            lm = dspy.LM("openai/gpt-5-nano")  # its price is known without litellm, which takes seconds to import
            dspy.configure(lm=lm, track_usage=False)
            train, val = task.trainset(9), task.valset(9)
            namespace: dict[str, Any] = {
                "__name__": "__main__", "dspy": dspy,
                "AsyncACE": AsyncACE, "AsyncGEPA": AsyncGEPA, "HillClimber": HillClimber, "Edits": Edits,
                "program": task.program(), "student": task.program(), "metric": task.metric, "stream": list(train),
                "trainset": train, "valset": val, "train": train, "val": val,
                "lm": lm, "reflection_lm": lm, "strong_lm": lm,
            }  # fmt: skip
            for line, block in blocks(path):
                print(f"--- {path.name}:{line}", flush=True)
                # Lines of a traceback are those of the page.
                exec(compile("\n" * line + block, str(path), "exec"), namespace)


if __name__ == "__main__":
    main([Path(one) for one in sys.argv[1:]])
