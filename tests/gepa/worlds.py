"""AsyncGEPA on a task without language models: rollouts take virtual time, and scores follow from text and question.

A candidate's text says how good it is. Everything that a test may want to look at afterwards is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import dspy
import pytest

from dspy_flashevolve import AsyncGEPA, compilation
from dspy_flashevolve.engine.events import Event
from dspy_flashevolve.gepa.run import GepaRun
from dspy_flashevolve.sim.virtual import run
from tests.fakes import examples, hashed

TRAIN, VAL = examples("t", 9), examples("v", 12)


def chance(*parts: object) -> float:
    """A number from 0 to 1 that depends on the parts alone."""
    return hashed(*parts) % 10_007 / 10_007


def quality(text: str) -> float:
    """What a text says of itself."""
    return float(text.split()[0])


@dataclass
class World:
    """A task. Each of the functions may be replaced.

    Args:
        seed: of everything.
        score: text, question -> score.
        seconds: text, question -> how long a rollout takes.
        improved: quality of the parent, draw -> quality of the child.
    """

    seed: int = 0
    score: Callable[[str, str], float] = lambda text, question: float(chance("s", text, question) < quality(text))
    seconds: Callable[[str, str], float] = lambda text, question: 1 + 9 * chance("t", text, question) ** 3
    improved: Callable[[float, float], float] = lambda parent, draw: min(0.85, max(0.0, parent + 0.4 * draw - 0.14))
    reflection_seconds: float = 5.0
    scored: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Every call of the metric for a score: text, question."""
    reflected: list[tuple[str, list[str]]] = field(default_factory=list[tuple[str, list[str]]])
    """Every reflection: the parent's text, the questions that it was shown."""
    children: dict[str, str] = field(default_factory=dict[str, str])
    """Proposed text -> its parent's."""
    integrated: dict[str, tuple[float, str, list[str]]] = field(default_factory=dict[str, tuple[float, str, list[str]]])
    """Integrated text -> when, what it was integrated onto, and the parents of the children in it."""

    def student(self) -> dspy.Module:
        world = self

        class Program(dspy.Module):
            def __init__(self) -> None:
                super().__init__()
                self.step = dspy.Predict(dspy.Signature("question -> answer", "0.3 seed"))

            async def aforward(self, question: str) -> dspy.Prediction:
                text = self.step.signature.instructions
                await world.rollout(text, question)
                prediction = dspy.Prediction(answer=str(world.score(text, question)), text=text)
                dspy.settings.trace.append((self.step, {"question": question}, prediction))
                return prediction

        return Program()

    async def rollout(self, text: str, question: str) -> None:
        """What a rollout does besides its answer."""
        await asyncio.sleep(self.seconds(text, question))

    def metric(self, gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        if pred_name is None:
            self.scored.append((pred.text, gold.question))
        return dspy.Prediction(score=float(pred.answer), feedback=f"{gold.question}: {pred.answer}")

    async def acall(self, candidate: Any, reflective_dataset: Any, components_to_update: list[str]) -> dict[str, str]:
        """The proposer."""
        await asyncio.sleep(self.reflection_seconds)
        texts: dict[str, str] = {}
        for name in components_to_update:
            shown = [record["Inputs"]["question"] for record in reflective_dataset[name]]
            self.reflected.append((candidate[name], shown))
            draw = chance("p", self.seed, candidate[name], sorted(shown), len(self.reflected))
            texts[name] = f"{self.improved(quality(candidate[name]), draw):.3f} child {len(self.reflected)}"
            self.children.setdefault(texts[name], candidate[name])
        return texts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the proposer is awaited")

    def integrator(self) -> dspy.Module:
        world = self

        class Sum(dspy.Module):
            async def aforward(self, head: Any, children: Any, commits: Any = (), code_components: Any = ()) -> Any:
                await asyncio.sleep(5)
                [name] = head
                gain = sum(max(0.0, quality(c.texts[name]) - quality(c.parent_texts[name])) for c in children)
                number = hashed(head, [child.texts for child in children]) % 10**6
                text = f"{min(0.85, quality(head[name]) + gain / len(children)):.3f} {number}"
                parents = [child.parent_texts[name] for child in children]
                world.integrated[text] = (asyncio.get_running_loop().time(), head[name], parents)
                judged = [SimpleNamespace(child=c.number, verdict="orthogonal", reason="sum") for c in children]
                return dspy.Prediction(texts={name: text}, verdicts=judged)

        return Sum()


@dataclass
class Outcome:
    """A run that came to its end, or not."""

    world: World
    run: GepaRun
    events: list[Event]
    program: Any = None
    error: BaseException | None = None

    @property
    def details(self) -> Any:
        return self.program.detailed_results

    @property
    def stats(self) -> Any:
        return self.program.async_stats

    @property
    def state(self) -> Any:
        return self.run.pool.state

    @property
    def texts(self) -> list[str]:
        """The candidates of gepa's state."""
        return [candidate["step"] for candidate in self.state.program_candidates]

    def of(self, *kinds: type) -> list[Any]:
        """The events of these kinds."""
        return [event for event in self.events if isinstance(event, kinds)]

    def check_budget(self, ended: bool = True) -> None:
        """Every call of the metric is counted, once, and nothing stays reserved where the run came to its end."""
        budget, counted = self.run.budget, len(self.world.scored)
        assert counted == budget.spent == self.state.total_num_evals
        assert budget.limit is None or counted <= budget.limit
        assert not ended or budget.reserved == 0


def play(
    world: World | None = None, calls: int | None = 400, raises: type[BaseException] | None = None, **options: Any
) -> Outcome:
    """Compile in virtual time, and look at the budget at every event."""
    world = world or World()
    runs: list[GepaRun] = []
    events: list[Event] = []

    class Watched(GepaRun):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            runs.append(self)
            self.bus.subscribe(self.look)

        def look(self, event: Event) -> None:
            events.append(event)
            limit = self.budget.limit
            if limit is not None and self.budget.spent + self.budget.reserved > limit:
                overdrawn.append(event)

    overdrawn: list[Event] = []
    during = options.pop("during", None)
    cancelled_after = options.pop("cancelled_after", None)
    sets = {"trainset": options.pop("trainset", TRAIN), "valset": options.pop("valset", VAL)}
    settings: dict[str, Any] = {"max_metric_calls": calls, "num_threads": 16, "seed": world.seed, "track_stats": True}
    settings |= {"instruction_proposer": world, "stale_candidate_reflection": world.integrator(), "use_merge": False}

    async def compile_it() -> Any:
        optimizer = AsyncGEPA(options.pop("metric", world.metric), **(settings | options))
        with dspy.context(lm=None):
            task = asyncio.ensure_future(optimizer.acompile(world.student(), **sets))
            if during is not None:
                asyncio.get_running_loop().create_task(during())
            if cancelled_after is not None:
                await asyncio.sleep(cancelled_after)
                task.cancel()
            return await task

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "GepaRun", Watched)
        try:
            program, error = run(compile_it), None
        except BaseException as raised:
            if raises is None or not isinstance(raised, raises):
                raise
            program, error = None, raised
    assert not overdrawn
    return Outcome(world, runs[0], events, program, error)


class Callbacks:
    """Keeps what gepa's callbacks hear: method, event."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda event: self.heard.append((name, event))

    def of(self, *names: str) -> Iterable[Any]:
        """The events of these methods."""
        return [event for name, event in self.heard if name in names]
