"""One compile of AsyncGEPA: the student, the data and the arguments, turned into one run, and what it returns; what
that is expected to score on unseen examples; and what a run may cost."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import anyio
import dspy
import numpy as np
from dspy.primitives import Module
from dspy.teleprompt.gepa.gepa import DspyGEPAResult
from dspy.teleprompt.gepa.gepa_flex_utils import enumerate_flex_submodules
from dspy.teleprompt.gepa.gepa_utils import LoggerAdapter
from dspy.teleprompt.gepa.instruction_proposal import InstructionProposer
from dspy.utils.usage_tracker import UsageTracker, track_usage
from gepa.core.data_loader import ensure_loader
from gepa.core.result import GEPAResult

from dspy_flashevolve.engine.errors import (
    FlashEvolveError,
    JournalError,
    RunAbortedError,
    attach_best_program,
    report_hook,
)
from dspy_flashevolve.engine.loop import run_to_end
from dspy_flashevolve.engine.staleness import Full, Reflective, StalenessPolicy, policy_named
from dspy_flashevolve.engine.steps import End, EndKind, Step
from dspy_flashevolve.engine.store import Store, reporting_damage
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.gepa.admission import ReflectionCalls
from dspy_flashevolve.gepa.credit import Credit
from dspy_flashevolve.gepa.edit_search import EditSearch
from dspy_flashevolve.gepa.ending import Ending
from dspy_flashevolve.gepa.evaluate import as_batch
from dspy_flashevolve.gepa.heads import Heads
from dspy_flashevolve.gepa.iterations import Iterations
from dspy_flashevolve.gepa.lockstep import Lockstep
from dspy_flashevolve.gepa.options import adapter_of, build_parts, hooks_of
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.propose import EditProposer, TextProposer
from dspy_flashevolve.gepa.published import Published, PublishedEdits
from dspy_flashevolve.gepa.reports import IterationLog, gepa_logger
from dspy_flashevolve.gepa.resume import checkpoint_in, tell_changes, written_out
from dspy_flashevolve.gepa.search import Search
from dspy_flashevolve.gepa.settings import GepaSettings
from dspy_flashevolve.gepa.step import GepaLoop
from dspy_flashevolve.modules.rewriting import StaleCandidateReflection
from dspy_flashevolve.observe.formatting import texts_diff
from dspy_flashevolve.observe.statistics import AsyncStats, log_summary
from dspy_flashevolve.programs.building import copy_of
from dspy_flashevolve.programs.fingerprints import fingerprints_of, open_store
from dspy_flashevolve.programs.metric import Metric
from dspy_flashevolve.programs.program import ProgramRunner
from dspy_flashevolve.programs.run import DspyRun
from dspy_flashevolve.programs.usage import calls_of, cost_of, rates_of

logger = logger_named(__name__)
"""gepa's own log lines, and what is told of every run, go where ``dspy.GEPA`` sends them: dspy shows them."""
MUCH_DISCARDED = 0.5
"""Share of discarded children above which a run warns: most of its work was for nothing."""


@dataclass(frozen=True)
class AsyncGEPAResult(DspyGEPAResult):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
    """``dspy.GEPA``'s detailed results, with the figures of the asynchronous run beside them.

    Args:
        async_stats: throughput, occupancy, gaps and commits; see :class:`AsyncStats`. None while the run goes on.
        returned: see :attr:`best_idx`.
    """

    async_stats: AsyncStats | None = None
    returned: int = 0

    @property
    def best_idx(self) -> int:
        """The candidate with the best score; of equals one that joins no edits of several reflections, then the first.

        ``dspy.GEPA``'s is the first of equals, as it is here where nothing is joined.
        """
        return self.returned


class Best:
    """The best program of one run, for any thread at any time; it waits for nobody.

    A gepa callback, the first one: it is told of every validated candidate in the pool's writer, where the state may be
    read, and copies what it needs. What it has is replaced, never changed, so that nobody waits: not for the writer,
    which may be inside a callback that waits in turn. Copies and pickles are empty: a run belongs to the optimizer that
    began it."""

    def __init__(
        self, settings: GepaSettings | None = None, adapter: Any = None, pool: Callable[[], Pool] | None = None
    ) -> None:
        self._settings, self._adapter, self._pool = settings, adapter, pool
        self._best: tuple[GEPAResult[Any, Any] | None, int, AsyncStats | None] = None, 0, None
        self.score: float | None = None
        """The best aggregate validation score; None before the seed is validated."""

    def __reduce__(self) -> Any:
        return (Best, ())

    @property
    def result(self) -> GEPAResult[Any, Any] | None:
        """gepa's result as of the moment when another candidate became the best one; None before the seed is
        validated."""
        return self._best[0]

    @property
    def texts(self) -> dict[str, str]:
        """Component -> text of the best candidate."""
        result, index, _ = self._best
        assert result is not None
        return result.candidates[index]

    def on_valset_evaluated(self, event: Any) -> None:
        """Take in a validated candidate; gepa calls this for each new one, and once at the beginning."""
        assert self._pool is not None
        score: float = self._pool().state.get_program_average_val_subset(event["candidate_idx"])[0]
        if self.score is None or score >= self.score:
            self.look()

    def look(self) -> None:
        """Copy the state where another candidate is the best one than before."""
        result, index = self._now()
        if self._best[0] is None or index != self._best[1]:
            self._best, self.score = (result, index, None), result.val_aggregate_scores[index]

    def _now(self) -> tuple[GEPAResult[Any, Any], int]:
        """gepa's result, and the candidate that is returned."""
        assert self._settings is not None
        assert self._pool is not None
        pool = self._pool()
        result = GEPAResult[Any, Any].from_state(pool.state, run_dir=self._settings.log_dir, seed=self._settings.seed)
        return result, pool.preferred(result.best_idx)

    def end(self, stats: AsyncStats, is_whole: bool = False) -> None:
        """Take in that the run has ended; ``is_whole``: the pool can still be read."""
        result, index, _ = (*self._now(), None) if is_whole else self._best
        self._best = result, index, stats

    def program(self) -> Module | None:
        """Build the best program, a new one each time; None before the seed is validated."""
        result, index, stats = self._best
        if result is None:
            return None
        program: Any = self._adapter.build_program(result.candidates[index])
        if self._settings is not None and self._settings.track_stats:
            detailed = AsyncGEPAResult.from_gepa_result(result, self._adapter)
            program.detailed_results = AsyncGEPAResult(**vars(detailed), async_stats=stats, returned=index)
            program.async_stats = stats
        return program


class Compilation:
    """One run of one optimizer: everything that belongs to it and to no other.

    Args:
        optimizer: the name of its class, for the Store.
        arguments: the optimizer's, by name, as the Store shows them.
        trainset, valset: examples or gepa's loaders; valset None means the trainset.
        initial: programs of the student's make to begin from beside it.

    Raises:
        RunDirectoryError: ``log_dir`` cannot be written, is in use, or holds another run.
    """

    def __init__(
        self,
        settings: GepaSettings,
        optimizer: str,
        arguments: Mapping[str, Any],
        student: Module,
        trainset: Any,
        valset: Any,
        initial: Sequence[Module] = (),
    ) -> None:
        self._student = student
        self._trainset: Any = ensure_loader(trainset)
        are_lists = isinstance(trainset, list) and isinstance(valset, list)  # of the same examples: one set, too
        same_data = valset is None or trainset is valset
        same_data |= are_lists and list(map(id, cast(Any, trainset))) == list(map(id, cast(Any, valset)))
        self._valset: Any = self._trainset if same_data else ensure_loader(cast(Any, valset))
        self._repairing: Module = settings.stale_candidate_reflection or StaleCandidateReflection()
        self._seed = texts_of(student)
        settings = self._settings = settings.sized_for(len(self._trainset), len(self._valset), len(self._seed))
        self._initial = [texts_of(program) for program in initial]
        self._checkpoint = None if settings.log_dir is None else checkpoint_in(settings.log_dir, settings)
        data = self._trainset, self._valset
        parts = {} if settings.log_dir is None else fingerprints_of(student, self._seed, *data, settings.metric_fn)
        lms = [dspy.settings.lm, settings.reflection_lm, *(predictor.lm for predictor in student.predictors())]
        each_once, arguments = settings.is_lockstep, written_out(arguments)
        with open_store(settings.log_dir, optimizer, arguments, parts, lms, each_once=each_once) as store:
            with reporting_damage(store.path):
                tell_changes(store, arguments)
            self._build(store)

    def _build(self, store: Store) -> None:
        settings, search = self._settings, self._search()
        run = self._run = DspyRun(
            name="AsyncGEPA",
            stages=self._stages(),
            # One that keeps to no budget spends it as dspy.GEPA does: gepa's stopper ends the run.
            settings=settings if search.keeps_budget else replace(settings, max_metric_calls=None),
            store=store,
            shown_calls=settings.max_metric_calls,
        )
        self._metric = Metric(settings.metric_fn, run.threads, settings.metric_lock)
        reflection_lm = run.pace(settings.reflection_lm)
        adapter = adapter_of(settings, self._student, reflection_lm)
        if search.overlaps and type(adapter.custom_instruction_proposer) is InstructionProposer:
            proposer = TextProposer if settings.edits is None else EditProposer
            adapter.custom_instruction_proposer = proposer(adapter.custom_instruction_proposer)
        log = IterationLog() if search.overlaps else LoggerAdapter(gepa_logger)
        self._parts = build_parts(settings, self._valset, log)
        self.best = Best(settings, adapter, lambda: self._pool)
        data = self._seed, self._trainset, self._valset
        pool = self._pool = Pool(run, settings, search, self._parts, adapter, *data, log, self.best, self._checkpoint)
        iterations = Iterations(pool, search.caches_minibatches)
        elsewhere = None if run.actors is None else run.actors.rollout_maker(adapter, settings.metric_lock)
        program = self._program = ProgramRunner(adapter, self._metric, run.threads, run.models, elsewhere=elsewhere)
        calls = ReflectionCalls(run, settings.max_reflection_calls, settings.max_cost)
        # A candidate with the perfect score on every validation example ends the run; dspy.GEPA goes on, and asks its
        # LM's cache, since all of its steps start from that candidate. Ours start from variants, which are paid.
        ends_with_perfect = (
            search.spares_calls
            and settings.skip_perfect_score
            and settings.frontier_type == "instance"  # a frontier of objectives can still grow
            and not settings.gepa_kwargs.get("stop_callbacks")  # whoever gives stoppers says when a run ends
        )
        if isinstance(search, EditSearch):
            asks_for_edits = isinstance(adapter.custom_instruction_proposer, EditProposer)
            more = self._initial, asks_for_edits, ends_with_perfect
            ending = Heads(run, pool, iterations, search, calls, *more)
        else:
            ending = Ending(run, pool, iterations, search, self._initial, ends_with_perfect)
        policy = self._usable_policy() if search.overlaps else Full()
        self._loop = GepaLoop(run, pool, iterations, program, search, ending, calls, policy, self._repairing)

    def _search(self) -> Search:
        """Build the search of this run."""
        settings, edits, workflow = self._settings, self._settings.edits, self._settings.workflow
        if settings.is_lockstep:
            return Lockstep()
        if isinstance(settings.search, Search):
            return deepcopy(settings.search)
        published = workflow, settings.perfect_score, settings.seed
        if edits is None:
            return Published(*published) if workflow.is_published else Search()
        limits = workflow.max_candidate_characters, settings.max_text_characters
        credit = Credit(self._seed, abs(settings.perfect_score or 1.0), *limits)
        own = credit, edits.frontier_share, "val" if self._valset is self._trainset else "train"
        return PublishedEdits(*published, *own) if workflow.is_published else EditSearch(*own)

    def run_sync(self) -> Module:
        """Run to the end on a loop of its own, and build the best program; see :func:`run_to_end` for signals."""
        with self._tracked():  # in the caller's thread: mlflow's active run belongs to a thread
            return run_to_end(self._run_to_result, self._run.stop)

    async def run_async(self) -> Module:
        """Run to the end on the caller's loop, and build the best program."""
        with self._tracked():
            return await self._run_to_result()

    @contextmanager
    def _tracked(self) -> Generator[None, None, None]:
        """Enter gepa's tracker around the run, and close the Store after it, so that others may have it."""
        try:
            with self._parts.tracker:
                yield
        finally:
            self._run.store.close()

    async def _run_to_result(self) -> Module:
        run, pool = self._run, self._pool
        try:
            async with run.opened():
                await self._evolved()
        except BaseException as error:
            stats = self._stats()
            self.best.end(stats)
            if isinstance(error, Exception):
                await self._track_end()
                report_hook(error, hooks_of(self._parts, self._settings.staleness))
                if pool.seed_confirmed:
                    attach_best_program(error, self._result(stats))
            log_summary(logger, stats, isinstance(error, Exception))
            raise
        await self._track_end()
        stats = self._stats()
        if self._loop.discarded_share > MUCH_DISCARDED:
            logger.warning(
                "The staleness policy discarded %.0f%% of the children that it looked at: their work was for nothing. "
                "Use staleness='full', lower Workflow.live_steps, or let more be stale (max_gap, min_gap).",
                100 * self._loop.discarded_share,
            )
        log_summary(logger if stats.outcome == "failed" else gepa_logger, stats)
        return self._result(stats)

    async def _evolved(self) -> None:
        run, pool = self._run, self._pool
        try:
            await self._loop.evolve()
            await pool.write(pool.finish)
            await run.store.flush()
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                try:
                    await pool.write(pool.fail, error)
                except JournalError as also:  # the first error is the one to tell
                    logger.error("%s", also)
            raise
        finally:
            pool.close()

    async def _track_end(self) -> None:
        """Send the tracker the last figures and the report, and wait until it has all that it was sent."""
        tracker = self._parts.tracker
        if tracker.thread is not None:
            state = self._pool.state
            self._loop.track(state.i + 1, total_metric_calls=state.total_num_evals)
            send = tracker.log_report, self._settings.log_dir
            await asyncio.get_running_loop().run_in_executor(tracker.thread, *send)

    def _stages(self) -> dict[str, Sequence[Any]]:
        """Stage -> what its requests ask, in the order in which the stages go before others where slots are scarce:
        what is nearer to a commit, but the long rest of a validation, on which nobody waits, after the screen and a
        validation's prefix."""
        reflection = self._settings.reflection_lm
        repairing = [getattr(predictor, "lm", None) or reflection for predictor in self._repairing.predictors()]
        student = [self._student]
        return {
            "rollout": student,
            "propose": [reflection],
            "integrate": repairing or [reflection],
            "validate": student,
            "screen": student,
            "prefix": student,
        }

    def _usable_policy(self) -> StalenessPolicy:
        """Return the staleness policy; where an LM is to repair and there is none, one that admits everything."""
        policy = policy_named(self._settings.staleness)
        silent = [predictor for predictor in self._repairing.predictors() if getattr(predictor, "lm", None) is None]
        has_lm = self._settings.reflection_lm is not None or dspy.settings.lm is not None
        if isinstance(policy, Reflective) and silent and not has_lm:
            logger.warning("There is no LM that could repair stale candidates: they are admitted as they are.")
            return Full()
        return policy

    def _stats(self) -> AsyncStats:
        of_run = self._run.statistics(metric_calls=self._pool.state.total_num_evals)
        result, pool = self.best.result, self._pool
        unseen = None
        if result is not None and pool.trainset is not pool.loader:
            scores = enumerate(pool.state.prog_candidate_val_subscores)
            unseen = expected_on_unseen([one for _, one in sorted(scores, key=lambda pair: pair[0] in pool.grown)])
        return self._run.recorder.async_stats(
            of_run,
            **self._loop.statistics(),
            unreadable_replies=self._program.unreadable,
            seed_score=None if result is None else result.val_aggregate_scores[0],
            best_score=self.best.score,
            unseen_score=unseen and unseen[0],
            unseen_error=unseen and unseen[1],
            prompt_change=""
            if result is None
            else "\n".join(texts_diff(self._seed, self.best.texts, ", before", ", after", 1)),
        )

    def _result(self, stats: AsyncStats) -> Module:
        self.best.end(stats, is_whole=True)
        program = self.best.program()
        assert program is not None, "a run that comes to its end has validated its seed"
        return program


def texts_of(program: Module) -> dict[str, str]:
    """Return what evolves of a program by component: predictors' instructions, sources of dspy.Flex submodules."""
    predictors: list[tuple[str, Any]] = program.named_predictors()
    sources: dict[str, str] = {path: flex.module_src for path, flex in enumerate_flex_submodules(program).items()}
    return {name: predictor.signature.instructions for name, predictor in predictors} | sources


# What the returned program is expected to score on examples that no search has seen.
#
# The best of many candidates by validation owes a part of its lead to luck: with ten equally good candidates and fifty
# validation examples, the best one's validation score is .09 too high on average. Bootstrap bias correction
# (Tsamardinos, Greasidou and Borboudakis, "Bootstrapping the out-of-sample predictions for efficient and accurate
# cross-validation", 2018) repeats the choice on examples drawn with replacement, and scores what it chooses on the
# examples that were not drawn. In simulations of 2 to 20 candidates and 12 to 200 examples its mean error was at most
# .012.

DRAWS = 1000
"""Bootstrap samples: the chance in them is a thirtieth of the spread between them, far below that of the scores."""
LEAST_EXAMPLES = 4
"""With fewer validation examples there is nothing to draw from."""


def expected_on_unseen(subscores: Sequence[Mapping[Hashable, float]], seed: int = 0) -> tuple[float, float] | None:
    """Estimate what the candidate with the best mean score has on unseen examples.

    Args:
        subscores: for each candidate, validation example -> score, in the order in which equals are preferred.
        seed: of the bootstrap's draws.

    Returns:
        The estimate and its standard error. The error is that of the returned program's scores and of one more example
        with the lowest and one with the highest score of any candidate: without these two, ten right answers of ten
        would leave no doubt (as in Agresti and Coull's interval for proportions). None where fewer than
        `LEAST_EXAMPLES` examples were run by every candidate.

    Example:
        >>> score, error = expected_on_unseen([dict.fromkeys(range(32), 0.25), dict.fromkeys(range(32), 0.5)])
        >>> score, round(error, 4)
        (0.5, 0.0074)
    """
    if not subscores:
        return None
    examples = [example for example in subscores[0] if all(example in scores for scores in subscores)]
    if len(examples) < LEAST_EXAMPLES:
        return None
    table = np.array([[scores[example] for example in examples] for scores in subscores], dtype=float)
    if not np.isfinite(table).all():
        return None
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(len(examples), np.full(len(examples), 1 / len(examples)), size=DRAWS)
    chosen = (drawn @ table.T).argmax(axis=1)
    left_out = drawn == 0
    is_usable = left_out.any(axis=1)
    scores = (table[chosen] * left_out).sum(axis=1)[is_usable] / left_out.sum(axis=1)[is_usable]
    best = np.append(table[table.mean(axis=1).argmax()], [table.min(), table.max()])
    return float(scores.mean()), float(best.std(ddof=1)) / math.sqrt(len(best))


# What a run may cost, from a few of its rollouts and one reflection on them.


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
        """Return ``factor`` times as much."""
        dollars = None if self.dollars is None else factor * self.dollars
        tokens = factor * self.prompt_tokens, factor * self.completion_tokens
        return Use(factor * self.calls, *tokens, dollars, self.unpriced)


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
    limits = {"num_threads": size, "max_concurrency": None, "max_metric_calls": size, "max_seconds": None}
    own = replace(settings, schedule="async", rollouts=None, **limits)
    with dspy.context(lm=_uncached(dspy.settings.lm)):
        stages = {"rollout": [student], "propose": [reflection_lm]}
        run = DspyRun(name="AsyncGEPA.estimate", stages=stages, settings=own)
    metric = Metric(settings.metric_fn, run.threads, settings.metric_lock)
    program = ProgramRunner(adapter_of(settings, student, run.pace(reflection_lm)), metric, run.threads, run.models)
    texts, used = texts_of(student), list[UsageTracker]()

    async def step(step: Step) -> End:
        run.begin(step, 0)
        program.mistakes.watch_rollouts(size, traced=True)
        with track_usage() as usage:
            rollouts = await run.evaluate("rollout", step, program, texts, examples, split="train", traced=True)
        used.append(usage)
        components = list(texts)[:1]
        ask = partial(run.requests.ask, "propose", step)
        with track_usage() as usage:
            dataset = await program.reflection.dataset(texts, as_batch(rollouts), components, step.rng, ask)
            try:
                await ask(lambda: program.reflection.propose(texts, dataset, components))
            except FlashEvolveError:
                raise
            except Exception as error:  # it was paid for; in a run it would end its step
                logger.warning("The reflection came to nothing (%s); what it used counts.", type(error).__name__)
        used.append(usage)
        return End(EndKind.COMMITTED)

    run.run_sync(lambda: run.evolve(step, calls_per_step=size))
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
