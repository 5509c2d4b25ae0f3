"""What a run may cost, from a few of its rollouts and one reflection on them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import dspy
from dspy.primitives import Module
from dspy.utils.usage_tracker import UsageTracker, track_usage

from dspy_flashevolve.engine.errors import FlashEvolveError, RunAbortedError
from dspy_flashevolve.engine.steps import End, EndKind, Step
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.gepa.compilation import texts_of
from dspy_flashevolve.gepa.evaluate import as_batch
from dspy_flashevolve.gepa.options import adapter_of
from dspy_flashevolve.gepa.settings import GepaSettings
from dspy_flashevolve.programs.building import copy_of
from dspy_flashevolve.programs.metric import Metric
from dspy_flashevolve.programs.program import ProgramRunner
from dspy_flashevolve.programs.run import DspyRun
from dspy_flashevolve.programs.usage import calls_of, cost_of, rates_of

logger = logger_named(__name__)


@dataclass(frozen=True, slots=True)
class Use:
    """What LM calls use, on average or in all.

    Args:
        calls: LM calls.
        prompt_tokens, completion_tokens: as the LMs report them.
        dollars: by litellm's cost map; None where the price of a model is not known.
        unpriced: these models.
    """

    calls: float
    prompt_tokens: float
    completion_tokens: float
    dollars: float | None
    unpriced: tuple[str, ...] = ()

    def times(self, factor: float) -> Use:
        """So many times as much."""
        return replace(
            self,
            calls=factor * self.calls,
            prompt_tokens=factor * self.prompt_tokens,
            completion_tokens=factor * self.completion_tokens,
            dollars=None if self.dollars is None else factor * self.dollars,
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Estimate:
    """What ``compile`` may cost; ``print`` it. Made by :meth:`AsyncGEPA.estimate`.

    Args:
        metric_calls: the budget; None where the run is bounded by seconds or dollars alone.
        reflections: reflections and integrations at most: one a minibatch of rollouts, and no more than
            ``max_reflection_calls``. None where neither bounds them.
        metric_call, reflection: what one was measured to use.
        measured: rollouts that were made to find out.
    """

    metric_calls: int | None
    reflections: int | None
    metric_call: Use
    reflection: Use
    measured: int

    @property
    def task(self) -> Use | None:
        """The program's LM calls in all; None where there is no budget of metric calls."""
        return None if self.metric_calls is None else self.metric_call.times(self.metric_calls)

    @property
    def reflecting(self) -> Use | None:
        """The reflection LM's calls in all, at most; None where nothing bounds them."""
        return None if self.reflections is None else self.reflection.times(self.reflections)

    def __repr__(self) -> str:
        rows = (
            ("a metric call", self.metric_call),
            ("a reflection", self.reflection),
            ("the run: task" if self.metric_calls is None else f"{self.metric_calls:,} metric calls", self.task),
            ("the run: reflections" if self.reflections is None else f"at most {self.reflections:,} reflections",
             self.reflecting),
        )  # fmt: skip
        unpriced = sorted({*self.metric_call.unpriced, *self.reflection.unpriced})
        prices = f", what {', '.join(unpriced)} costs (litellm's map has no price)" if unpriced else ""
        return "\n".join(
            [
                f"{'':<24}{'LM calls':>10}{'tokens in':>13}{'tokens out':>13}{'dollars':>10}",
                *(f"{name:<24}{_cells(use)}" for name, use in rows),
                f"measured: {self.measured} rollouts and a reflection on them, which were paid for",
                "assumed: the rest is like them, and every minibatch of rollouts is reflected on, which most are not",
                f"not known: how much longer prompts get (to 1.5 times the tokens, on the simulated server){prices}",
            ]
        )


def _cells(use: Use | None) -> str:
    if use is None:
        return f"{'unknown':>10}{'unknown':>13}{'unknown':>13}{'unknown':>10}"
    dollars = "unknown" if use.dollars is None else f"{use.dollars:.4g}"
    return f"{use.calls:>10,.0f}{use.prompt_tokens:>13,.0f}{use.completion_tokens:>13,.0f}{dollars:>10}"


def estimate(
    settings: GepaSettings, student: Module, trainset: Sequence[Any], most_calls: int | None, first: int
) -> Estimate:
    """Run a minibatch of training examples, and reflect on it; past dspy's cache.

    Args:
        settings: what the run would be told.
        most_calls: the budget of metric calls.
        first: of these, those of the first validation.
    """
    size = min(settings.minibatch_size, len(trainset))
    examples = random.Random(settings.seed).sample(list(trainset), size)
    student, reflection_lm = copy_of(student), _uncached(settings.reflection_lm)
    for predictor in student.predictors():
        predictor.set_lm(_uncached(predictor.lm))
    with dspy.context(lm=_uncached(dspy.settings.lm)):
        run = DspyRun(
            name="AsyncGEPA.estimate",
            stages={"rollout": [student], "propose": [reflection_lm]},
            settings=replace(
                settings,
                num_threads=size,
                max_concurrency=None,
                max_metric_calls=size,
                max_seconds=None,
                schedule="async",
                rollouts=None,
            ),
        )
    metric = Metric(settings.metric_fn, run.threads, settings.metric_lock)
    adapter = adapter_of(settings, student, run.pace(reflection_lm))
    program = ProgramRunner(adapter, metric, run.threads, run.models)
    texts, used = texts_of(student), list[UsageTracker]()

    async def step(step: Step) -> End:
        run.begin(step, 0)
        program.mistakes.watch_rollouts(size, traced=True)
        with track_usage() as usage:
            rollouts = await run.evaluate("rollout", step, program, texts, examples, split="train", traced=True)
        used.append(usage)
        evaluation = as_batch(rollouts)
        components = list(texts)[:1]

        async def reflect() -> None:
            try:
                await program.reflection.propose(texts, dataset, components)
            except FlashEvolveError:
                raise
            except Exception as error:  # it was paid for; in a run it would end its step
                logger.warning("The reflection came to nothing (%s); what it used counts.", type(error).__name__)

        with track_usage() as usage:
            ask = partial(run.rollouts.request, "propose", step)
            dataset = await program.reflection.dataset(texts, evaluation, components, step.rng, ask)
            await ask(reflect)
        used.append(usage)
        return End(EndKind.COMMITTED)

    async def main() -> None:
        await run.evolve(step, calls_per_step=size)

    run.run_sync(main)
    if len(used) < 2:  # it was stopped, or the provider gave no answer
        raise RunAbortedError(f"There is no estimate: {run.stop_reason}")
    most = None if most_calls is None else max(0, most_calls - first) // size
    bounds = [bound for bound in (most, settings.max_reflection_calls) if bound is not None]
    return Estimate(
        metric_calls=most_calls,
        reflections=min(bounds, default=None),
        metric_call=_use_of(used[0]).times(1 / size),
        reflection=_use_of(used[1]),
        measured=size,
    )


def _use_of(tracker: UsageTracker) -> Use:
    tokens = tracker.get_total_tokens()
    unpriced = tuple(sorted(model for model in tokens if rates_of(model) is None))
    prompt, completion = (
        sum(usage.get(kind) or 0 for usage in tokens.values()) for kind in ("prompt_tokens", "completion_tokens")
    )
    return Use(calls_of(tracker), prompt, completion, None if unpriced else cost_of(tracker), unpriced)


def _uncached(lm: Any) -> Any:
    """A copy that asks its provider each time; what is no ``dspy.LM`` is as it is."""
    return lm.copy(cache=False) if isinstance(lm, dspy.LM) else lm
