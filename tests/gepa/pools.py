"""A real pool of gepa's, without a run around it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from gepa.core.data_loader import ListDataLoader
from gepa.core.state import ValsetEvaluation
from gepa.proposer.base import CandidateProposal

from dspy_flashevolve.engine.steps import Budget, Reservation, Step, step_rng
from dspy_flashevolve.engine.store import Store
from dspy_flashevolve.gepa.iterations import Iterations
from dspy_flashevolve.gepa.options import build_parts
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.records import Commit
from dspy_flashevolve.gepa.search import Search
from dspy_flashevolve.gepa.settings import GepaSettings

EXAMPLES = 4


def configured(**arguments: Any) -> GepaSettings:
    """Settings with these arguments, as they are: the optimizer would refuse some."""

    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> float:
        return 0.0

    settings: dict[str, Any] = {"metric_fn": metric, "max_metric_calls": 1000} | arguments
    return GepaSettings(**settings)


def iterations_of(callbacks: Sequence[Any] = (), **texts: str) -> Iterations:
    """A pool whose seed is validated: .5 on each of four examples. Its candidates have one component, p, by default."""
    loader = ListDataLoader(list(range(EXAMPLES)))
    settings, quiet = configured(gepa_kwargs={"callbacks": callbacks}), SimpleNamespace(log=lambda message: None)
    run: Any = SimpleNamespace(store=Store(), budget=Budget(None))
    parts = build_parts(settings, loader, quiet)
    seed = texts or {"p": "seed"}
    pool = Pool(run, settings, Search(), parts, object(), seed, loader, loader, quiet, best=None)
    pool.confirm_seed(evaluation([0.5] * EXAMPLES))
    return Iterations(pool, caches_minibatches=False)


def pool_of(callbacks: Sequence[Any] = (), **texts: str) -> Pool:
    """The pool of :func:`iterations_of`."""
    return iterations_of(callbacks, **texts).pool


def evaluation(scores: list[float]) -> ValsetEvaluation[Any, Any]:
    """Of the validation set."""
    by_id = dict(enumerate(scores))
    return ValsetEvaluation(dict.fromkeys(by_id), by_id, None)


def commit(iterations: Iterations, number: int, scores: list[float], **texts: str) -> Commit:
    """Commit a child of the seed in a step of its own."""
    step = Step(number, step_rng(number, seed=0), Reservation(Budget(None), 0))
    iterations.begin(step)
    candidate = {**iterations.pool.seed_candidate, **texts}
    return iterations.add(step, CandidateProposal(candidate, [0]), evaluation(scores), EXAMPLES)


def frontier(pool: Pool) -> tuple[dict[int, float], dict[int, set[str]]]:
    """Best score and best texts, for each validation example."""
    texts = [candidate["p"] for candidate in pool.state.program_candidates]
    fronts = pool.state.program_at_pareto_front_valset
    return dict(pool.state.pareto_front_valset), {i: {texts[c] for c in front} for i, front in fronts.items()}
