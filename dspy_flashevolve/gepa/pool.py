"""The pool and its one writer.

Everything that reads or changes gepa's state, and every callback, selector, stopper and tracker, runs in
one thread, one call at a time, in the order in which the calls were made (docs/architecture.md).
The pool is gepa's engine without its loop: how a candidate is added, reported and logged is gepa's code.

Here are also the frozen records that flow from stage to stage of a step, and the candidates that steps may build on
before their validation has confirmed them. These stand beside gepa's state, which only ever holds confirmed candidates
and stays readable by gepa. The first is the seed itself: steps start from it while it is being validated.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import anyio
from gepa.core.adapter import EvaluationBatch
from gepa.core.callbacks import notify_callbacks
from gepa.core.data_loader import DataLoader
from gepa.core.engine import GEPAEngine
from gepa.core.result import GEPAResult
from gepa.core.state import EvaluationCache, GEPAState, ValsetEvaluation, initialize_gepa_state
from gepa.gepa_utils import json_default
from gepa.proposer.base import CandidateProposal
from gepa.strategies.proposal_sampling import ProposalTask

from dspy_flashevolve.engine.errors import ConfigurationError, RolloutUnresolvedError
from dspy_flashevolve.engine.loop import Threads
from dspy_flashevolve.engine.redaction import make_private
from dspy_flashevolve.engine.replay import RunJournal, id_text
from dspy_flashevolve.engine.staleness import PastCommit
from dspy_flashevolve.engine.steps import Step
from dspy_flashevolve.gepa.options import GepaOptions, Parts, strategies_of
from dspy_flashevolve.programs.records import kept

Candidate = dict[str, str]
Batch = EvaluationBatch[Any, Any]


@dataclass(frozen=True, slots=True)
class Selected:
    """One or more (parent, minibatch) pairs; more than one where the user's sampling strategy says so.

    Args:
        bases: for each task the handle of the speculative candidate that it starts from; None where it starts from
            gepa's pool. Its ``parent_idx`` is the nearest confirmed ancestor then.
    """

    tasks: tuple[ProposalTask[Any, Any], ...]
    bases: tuple[int | None, ...]


class LateRollouts:
    """The rest of a minibatch whose evaluation was released early."""

    def __init__(self) -> None:
        self._ended = anyio.Event()
        self._batch: Batch | None = None
        self._error: Exception | None = None

    async def complete(self) -> Batch:
        """The evaluation on the whole minibatch, when it is there.

        Raises:
            RolloutUnresolvedError: the provider gave no answer for a part of it.
        """
        await self._ended.wait()
        if self._batch is None:
            raise self._error or RolloutUnresolvedError("the run ended before the rest of the minibatch did")
        return self._batch

    def end(self, batch: Batch | None, error: Exception | None = None) -> None:
        """Everything has finished."""
        self._batch, self._error = batch, error
        self._ended.set()


@dataclass(frozen=True, slots=True)
class Parent:
    """A task's parent on its minibatch.

    Args:
        index: position of the task in the step.
        evaluation: on the part of the minibatch that has finished.
        late: the evaluation on all of it; None where nothing is missing.
        base: see :class:`Selected`.
    """

    index: int
    task: ProposalTask[Any, Any]
    evaluation: Batch
    late: LateRollouts | None
    base: int | None


@dataclass(frozen=True, slots=True)
class Child:
    """A proposed candidate, before its screen.

    Args:
        parent: what it was made from, on its minibatch.
        feedback: what the metric said of the parent's rollouts.
    """

    parent: Parent
    candidate: Candidate
    metadata: dict[str, Any]
    feedback: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Crossover:
    """Two parents of the frontier and what their child is screened on (gepa's merge).

    Args:
        parents: indices in the pool.
        parent_scores: of each parent on the subsample, in the order of ``ids``.
    """

    candidate: Candidate
    parents: tuple[int, int]
    ancestor: int
    ids: tuple[Any, ...]
    parent_scores: tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Screened:
    """Proposals that passed their screen, to be validated.

    Args:
        bases: handles of the speculative candidates that their parents are; see :class:`Selected`.
    """

    proposals: tuple[CandidateProposal[Any], ...]
    bases: tuple[int | None, ...]
    merge: bool = False


@dataclass(frozen=True, slots=True)
class Validated:
    """Proposals with their validations, to be committed.

    Args:
        calls: metric calls that each validation cost at most (cached examples cost none).
        bases: see :class:`Screened`.
        keys: for each the handle under which it could be selected while it was validated; None where it could not.
    """

    proposals: tuple[CandidateProposal[Any], ...]
    evaluations: tuple[ValsetEvaluation[Any, Any], ...]
    calls: tuple[int, ...]
    bases: tuple[int | None, ...] = ()
    keys: tuple[int | None, ...] = ()
    merge: bool = False


@dataclass(frozen=True, slots=True)
class Commit:
    """One change of the pool."""

    candidate: int
    version: int
    score: float
    best_score: float
    generation: int
    parents: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Speculative:
    """A candidate that waits for its validation.

    Args:
        key: its handle.
        candidate: component -> text.
        parents: handles of speculative parents.
        indices: confirmed parents, as indices of gepa's pool.
        generation: steps from the seed.
        evaluation: what is known of its validation; None for the seed, which selection picks while it is alone.
    """

    key: int
    candidate: Candidate
    parents: tuple[int, ...] = ()
    indices: tuple[int, ...] = ()
    generation: int = 0
    evaluation: ValsetEvaluation[Any, Any] | None = None


class SpeculativeCandidates:
    """The speculative part of the pool.

    >>> waiting = SpeculativeCandidates()
    >>> head = waiting.add({"p": "text"})
    >>> child = waiting.add({"p": "longer text"}, parents=(head.key,))
    >>> [gone.candidate["p"] for gone in waiting.remove(head.key)]
    ['text', 'longer text']
    >>> len(waiting)
    0
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Speculative] = {}
        self._settled: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """Key of one that left -> confirmed indices, and parents, that stand for it."""
        self._next = 0
        self.fallen: set[int] = set()
        """Those that did not hold what they promised: what was made from them is stale."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: int) -> bool:
        return key in self._waiting

    def __getitem__(self, key: int) -> Speculative:
        return self._waiting[key]

    def all(self) -> list[Speculative]:
        """All that wait, oldest first."""
        return list(self._waiting.values())

    def add(
        self,
        candidate: Candidate,
        parents: tuple[int, ...] = (),
        indices: tuple[int, ...] = (),
        generation: int = 0,
        evaluation: ValsetEvaluation[Any, Any] | None = None,
    ) -> Speculative:
        """Put a candidate up for speculation.

        Raises:
            ConfigurationError: a parent that does not wait.
        """
        unknown = [parent for parent in parents if parent not in self._waiting]
        if unknown:
            raise ConfigurationError(f"speculative parents {unknown} are not waiting; waiting: {list(self._waiting)}.")
        entry = Speculative(self._next, dict(candidate), parents, indices, generation, evaluation)
        self._waiting[entry.key] = entry
        self._next += 1
        return entry

    def confirm(self, key: int, index: int | None = None) -> Speculative:
        """Its validation is done: it is an ordinary candidate now, and its children stand on firm ground.

        Args:
            index: its place in gepa's pool; None leaves its children without it as a parent.

        Raises:
            ConfigurationError: it does not wait.
        """
        entry = self._known(key)
        self._leave(entry, () if index is None else (index,))
        return entry

    def confirm_late(self, key: int, index: int) -> None:
        """As :meth:`confirm`, for one that may have gone with one under it: its own validation has the last word."""
        if key in self._waiting:
            self.confirm(key, index)
        self._settled[key] = (index,), ()
        self.fallen.discard(key)

    def remove(self, key: int) -> list[Speculative]:
        """Take it back with its descendants, as if they had never been there; returns them, it first.

        Raises:
            ConfigurationError: it does not wait.
        """
        gone = [self._known(key)]
        for entry in list(self._waiting.values()):  # children always come after their parents
            if any(parent.key in entry.parents for parent in gone):
                gone.append(entry)
        for before in gone:
            entry = self._waiting[before.key]  # as it is now: the one under it has left
            self._leave(entry, entry.indices, heirs=entry.parents)
            self._settled[entry.key] = before.indices, before.parents  # one of these may be confirmed after all
            self.fallen.add(entry.key)
        return gone

    def resolve(self, keys: tuple[int, ...]) -> tuple[int, ...]:
        """The confirmed candidates that stand for ``keys``: themselves, or where they did not last their parents."""
        found: list[int] = []
        for key in keys:
            entry = self._waiting.get(key)
            indices, parents = self._settled.get(key, ((), ())) if entry is None else (entry.indices, entry.parents)
            found += [*self.resolve(parents), *indices]
        return tuple(dict.fromkeys(found))

    def _known(self, key: int) -> Speculative:
        if key not in self._waiting:
            raise ConfigurationError(f"candidate {key} is not speculative; waiting: {list(self._waiting)}.")
        return self._waiting[key]

    def _leave(self, entry: Speculative, indices: tuple[int, ...], heirs: tuple[int, ...] = ()) -> None:
        """Take it out; its children get ``indices`` and ``heirs`` for parents in its place."""
        self._settled[entry.key] = indices, heirs
        del self._waiting[entry.key]
        for child in [other for other in self._waiting.values() if entry.key in other.parents]:
            parents = [parent for parent in child.parents if parent != entry.key]
            parents += [heir for heir in heirs if heir not in parents and heir in self._waiting]
            firm = tuple(dict.fromkeys((*indices, *child.indices)))
            self._waiting[child.key] = replace(child, parents=tuple(parents), indices=firm)


A = ParamSpec("A")
T = TypeVar("T")
State = GEPAState[Any, Any]


class Pool(GEPAEngine[Any, Any, Any, Any]):
    """gepa's state, its version, the speculative candidates, and the thread that writes them.

    Args:
        parts: gepa's strategies.
        options: the run's configuration.
        adapter: keeps state of its own that is saved with the pool's.
        seed_candidate: component -> text.
        trainset, valset: gepa's loaders.
        logger: gepa's logger protocol.
        checkpoint_seconds: with a run directory, the least time between two checkpoints; 0 saves at every step.
        calls_made: metric calls made so far, those of live steps included.
        journal: gets what is about to enter the pool, first; None for nowhere.
        shares_randomness: steps draw from the strategies' randomness, not from their own.
        caches_minibatches: put minibatch scores into gepa's evaluation cache. Its keys do not tell training from
            validation examples, so this is right only where both are the same data, and where gepa is to be equalled.
    """

    def __init__(
        self,
        parts: Parts,
        options: GepaOptions,
        adapter: Any,
        seed_candidate: Candidate,
        trainset: DataLoader[Any, Any],
        valset: DataLoader[Any, Any],
        logger: Any,
        checkpoint_seconds: float,
        caches_minibatches: bool,
        calls_made: Callable[[], int],
        journal: RunJournal | None = None,
        shares_randomness: bool = False,
    ) -> None:
        self.best = BestResult(lambda: self.state, options.run_dir, options.seed)
        super().__init__(
            adapter=adapter,
            run_dir=options.run_dir,
            valset=valset,
            seed_candidate=seed_candidate,
            perfect_score=options.perfect_score,
            seed=options.seed,  # pyright: ignore[reportArgumentType]  # dspy.GEPA allows None too
            reflective_proposer=SimpleNamespace(trainset=trainset),  # pyright: ignore[reportArgumentType]
            merge_proposer=parts.merge,
            frontier_type=options.get("frontier_type", "instance"),
            logger=logger,
            experiment_tracker=parts.tracker,
            callbacks=[self.best, *(parts.callbacks or [])],  # pyright: ignore[reportArgumentType]  # gepa asks hasattr
            track_best_outputs=options.track_best_outputs,
            use_cloudpickle=options.get("use_cloudpickle", False),
            stop_callback=parts.stopper,
            val_evaluation_policy=parts.evaluation_policy,
            acceptance_criterion=parts.acceptance,
            selection_strategy=parts.selection_strategy,
            evaluation_cache=parts.cache,
        )
        self.parts = parts
        self.options = options
        self.trainset = trainset
        self.loader: DataLoader[Any, Any] = valset
        self.caches_minibatches = caches_minibatches
        self.version = 0
        self.seed_confirmed = False
        self.speculative = SpeculativeCandidates()
        self.generations: list[int] = [0]
        self.state: State = self._provisional_state()
        self._seed_key = self.speculative.add(seed_candidate).key
        self._checkpoint_seconds = checkpoint_seconds
        self._saved_at = float("-inf")
        self._begun = set[int]()
        self._calls_made = calls_made
        self.journal = journal
        self.shares_randomness = shares_randomness
        self._writer = Threads(1, "pool")

    async def write(self, call: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
        """Run ``call`` in the writer's thread, after all calls made before."""
        return await self._writer.run(call, *args, **kwargs)

    def close(self) -> None:
        """End the writer's thread, after the calls made before."""
        self._writer.close()

    # The methods below run in the writer's thread.

    def notify(self, method: str, **event: Any) -> None:
        """Tell every gepa callback that has ``method``."""
        notify_callbacks(self.callbacks, method, event)

    def start(self) -> bool:
        """Begin the run; True when a checkpoint in the run directory was loaded, so that the seed is confirmed."""
        if self.run_dir is not None:
            os.makedirs(self.run_dir, exist_ok=True)
        config = {
            "perfect_score": self.perfect_score,
            "seed": self.seed,
            "track_best_outputs": self.track_best_outputs,
        }
        sizes = {"trainset_size": len(self.trainset), "valset_size": len(self.loader)}
        self.notify("on_optimization_start", seed_candidate=self.seed_candidate, **sizes, config=config)
        if self.run_dir is None or not os.path.exists(os.path.join(self.run_dir, "gepa_state.bin")):
            return False
        self.confirm_seed(ValsetEvaluation[Any, Any]({}, {}, None))
        self.generations = _generations(self.state.parent_program_for_candidate)
        self.version = len(self.state.program_candidates) - 1
        return True

    def confirm_seed(self, evaluation: ValsetEvaluation[Any, Any]) -> None:
        """Put the validated seed, or the checkpoint's candidates, where the provisional state was.

        The state stays the same object, since callbacks may hold it; what steps have already done to it stays.
        """
        early = self.state
        real: State = initialize_gepa_state(
            run_dir=self.run_dir,
            logger=self.logger,
            seed_candidate=self.seed_candidate,
            seed_valset_evaluation=self._writable(evaluation),
            track_best_outputs=self.track_best_outputs,
            frontier_type=self.frontier_type,
            evaluation_cache=self._initial_evaluation_cache,
        )
        if early.full_program_trace:
            real.i = early.i
            real.full_program_trace = early.full_program_trace
            real.named_predictor_id_to_update_next_for_program_candidate = (
                early.named_predictor_id_to_update_next_for_program_candidate
            )
        early.__dict__.update(real.__dict__)
        self._sync_state_to_adapter(early)
        self.speculative.confirm(self._seed_key)
        self.seed_confirmed = True
        self._report_seed()
        early.add_budget_hook(self._on_calls)

    def save(self, *, force: bool = False) -> None:
        """Write gepa's checkpoint, unless the last one is fresh enough."""
        if not self.seed_confirmed or (not force and time.monotonic() - self._saved_at < self._checkpoint_seconds):
            return
        self._sync_adapter_state_to_state(self.state)
        counted = self.state.total_num_evals
        # What live steps have spent is spent, even if the run is killed before they end.
        self.state.total_num_evals = max(counted, self._calls_made())
        try:
            self._write_checkpoint()
        finally:
            self.state.total_num_evals = counted
            if self.run_dir is not None:
                make_private(self.run_dir)
        self._saved_at = time.monotonic()

    def _write_checkpoint(self) -> None:
        """As gepa does; outputs that cannot be pickled are written as the journal has them.

        That of a predictor whose signature was made from a string is one.
        """
        state = self.state
        best, cache = state.best_outputs_valset, state.evaluation_cache
        try:
            state.save(self.run_dir, use_cloudpickle=self.use_cloudpickle)
        except OSError:
            raise
        except Exception:
            if best is not None:
                state.best_outputs_valset = {
                    i: [(one, kept(output, pickle.dumps)) for one, output in of] for i, of in best.items()
                }
            if cache is not None:
                known = cache._cache  # pyright: ignore[reportPrivateUsage]
                entries = {key: replace(one, output=kept(one.output, pickle.dumps)) for key, one in known.items()}
                state.evaluation_cache = EvaluationCache(entries)
            state.save(self.run_dir, use_cloudpickle=self.use_cloudpickle)
        finally:
            state.best_outputs_valset, state.evaluation_cache = best, cache

    def begin_step(self, step: Step) -> dict[str, Any]:
        """Advance the iteration; returns the step's entry of the run log. One that goes on may have one already."""
        if self.seed_confirmed and time.monotonic() - self._saved_at >= self._checkpoint_seconds:
            self.save()
            self.notify("on_state_saved", iteration=self.state.i + 1, run_dir=self.run_dir)
        self.state.i = max(self.state.i, step.number)
        trace = self.log_entry(step)
        self._begun.add(step.number)
        self.notify("on_iteration_start", iteration=step.number + 1, state=self.state, trainset_loader=self.trainset)
        return trace

    def end_step(self, step: Step, accepted: bool, counts: bool = True) -> bool:
        """Report a step's end and ask the stoppers; True when one of them says stop.

        Args:
            counts: the step is an iteration to stoppers that count those without improvement.
        """
        self._begun.discard(step.number)
        self.notify("on_iteration_end", iteration=step.number + 1, state=self.state, proposal_accepted=accepted)
        self.keep_strategies()
        with self.parts.stopper.without_counters(not counts):
            return self.should_stop()

    def should_stop(self) -> bool:
        """Ask the stoppers; before the seed is confirmed there is nothing to ask them about."""
        return self.seed_confirmed and self._should_stop(self.state)

    def keep_strategies(self) -> None:
        """Let the journal know where the strategies stand."""
        if self.journal is not None:
            self.journal.journal.keep(
                "strategies", strategies_of(self.parts, self.adapter, self.state, self.shares_randomness, id_text)
            )

    def count_calls(self) -> None:
        """Bring gepa's count of metric calls to what was made by now."""
        if (calls := self._uncounted()) > 0:
            self.state.increment_evals(calls)

    def _uncounted(self) -> int:
        return max(0, self._calls_made() - self.state.total_num_evals) if self.seed_confirmed else 0

    def add(
        self, step: Step, proposal: CandidateProposal[Any], evaluation: ValsetEvaluation[Any, Any], calls: int
    ) -> Commit:
        """Add a validated candidate, whose validation cost ``calls`` at most; resume.py adds an interrupted run's."""
        with self.acting_for(step):
            index, best = self._add_evaluated_program(
                new_program=proposal.candidate,
                state=self.state,
                parent_program_idx=proposal.parent_program_ids,
                valset_evaluation=self._writable(evaluation),
                num_actual_evals=min(calls, self._uncounted()),
            )
        self.version += 1
        self.generations.append(1 + max(self.generations[parent] for parent in proposal.parent_program_ids))
        score = self.val_evaluation_policy.get_valset_score
        return Commit(
            index,
            self.version,
            score(index, self.state),
            score(best, self.state),
            self.generations[index],
            tuple(proposal.parent_program_ids),
        )

    def commits_since(self, version: int) -> list[PastCommit]:
        """What was committed after ``version``, oldest first."""
        state, found = self.state, list[PastCommit]()
        first = len(state.program_candidates) - (self.version - version)
        for index in range(max(1, first), len(state.program_candidates)):
            parents = [one for one in state.parent_program_for_candidate[index] if one is not None]
            parent = max(parents, key=self.score_of)
            texts, before = state.program_candidates[index], state.program_candidates[parent]
            names = [name for name in texts if texts[name] != before[name]]
            found.append(
                PastCommit(
                    {name: texts[name] for name in names},
                    {name: before[name] for name in names},
                    self.score_of(index) - self.score_of(parent),
                )
            )
        return found

    def log_proposal(self, step: Step, proposal: CandidateProposal[Any], candidate: int) -> None:
        """Log a proposal's LM calls; ``candidate`` is -1 for a rejected one."""
        self._log_proposal_lm_calls(step.number + 1, proposal, candidate_idx=candidate)

    def reject(
        self, step: Step, proposal: CandidateProposal[Any], *, passed: bool = False, reason: str | None = None
    ) -> None:
        """Report a proposal that goes no further."""
        self._report_rejected_proposal(
            proposal, step.number + 1, self.state, dropped_by_selection=passed, reason_override=reason
        )

    def score_of(self, candidate: int) -> float:
        """A candidate's aggregate validation score; gepa's list of all of them costs a pass over the whole pool."""
        return self.state.get_program_average_val_subset(candidate)[0]

    def best_score(self) -> float | None:
        """The best aggregate validation score; None before the seed is confirmed."""
        if not self.seed_confirmed:
            return None
        policy = self.val_evaluation_policy
        return policy.get_valset_score(policy.get_best_program(self.state), self.state)

    def finish(self) -> None:
        """Save and tell the callbacks: the run came to its end."""
        self._end_iterations()  # a stop came while a step was selecting
        self.count_calls()  # the late part of a minibatch may end after its step
        if self.seed_confirmed:
            self.save(force=True)
            self._report_end()

    def fail(self, error: BaseException) -> None:
        """Save and tell the callbacks: the run ended by ``error``, and with it the steps that were on their way."""
        if isinstance(error, Exception):
            self.notify("on_error", iteration=self.state.i + 1, exception=error, will_continue=False)
        self._end_iterations()
        self.state.total_num_evals = max(self.state.total_num_evals, self._calls_made())
        self.save(force=True)

    def _end_iterations(self) -> None:
        """Tell the callbacks that what they heard begin, and no step brought to an end, is over."""
        for number in sorted(self._begun):
            self.notify("on_iteration_end", iteration=number + 1, state=self.state, proposal_accepted=False)
        self._begun.clear()

    def log_entry(self, step: Step) -> dict[str, Any]:
        """The step's entry of gepa's run log, made where there is none."""
        log = self.state.full_program_trace
        entry = next((one for one in reversed(log) if one["i"] == step.number), None)
        if entry is None:
            entry = {"i": step.number}
            log.append(entry)
        return entry

    @contextmanager
    def acting_for(self, step: Step) -> Generator[None, None, None]:
        """Let gepa's code, which reads the iteration and the newest log entry from the state, act for ``step``."""
        state = self.state
        newest, log = state.i, state.full_program_trace
        state.i, state.full_program_trace = step.number, [self.log_entry(step)]
        try:
            yield
        finally:
            state.i, state.full_program_trace = newest, log

    def _writable(self, evaluation: ValsetEvaluation[Any, Any]) -> ValsetEvaluation[Any, Any]:
        """The same; gepa writes outputs into the run directory, and ends the run where JSON does not have one."""
        if self.run_dir is None:
            return evaluation
        write = partial(json.dumps, default=json_default)
        outputs = {i: kept(output, write) for i, output in evaluation.outputs_by_val_id.items()}
        return replace(evaluation, outputs_by_val_id=outputs)

    def _report_seed(self) -> None:
        """What gepa logs of the seed (gepa 0.1.4, ``GEPAEngine.run``)."""
        state, tracker = self.state, self.experiment_tracker
        average, coverage = state.get_program_average_val_subset(0)
        front = list(state.pareto_front_valset.values())
        tracker.log_config(self._config())
        tracker.log_metrics(
            {
                "val_program_average": average,
                "best_score_on_valset": average,
                "val_evaluated_count_new_program": coverage,
                "val_total_count": len(self.loader),
                "total_metric_calls": state.total_num_evals,
                "valset_pareto_front_agg": sum(front) / len(front) if front else average,
                "new_program_idx": 0,
                "linear_pareto_front_program_idx": 0,
                "best_program_as_per_agg_score_valset": 0,
            },
            step=0,
        )
        self.logger.log(f"Base program full valset score: {average} over {coverage} / {len(self.loader)} examples")
        self.notify(
            "on_valset_evaluated",
            iteration=0,
            candidate_idx=0,
            candidate=self.seed_candidate,
            scores_by_val_id=dict(state.prog_candidate_val_subscores[0]),
            average_score=average,
            num_examples_evaluated=coverage,
            total_valset_size=len(self.loader),
            parent_ids=[],
            is_best_program=True,
            outputs_by_val_id=None,
        )

    def _report_end(self) -> None:
        """What gepa tells the callbacks and logs at the end of a run."""
        state, policy = self.state, self.val_evaluation_policy
        best = policy.get_best_program(state)
        self.notify(
            "on_optimization_end",
            best_candidate_idx=best,
            total_iterations=state.i,
            total_metric_calls=state.total_num_evals,
            final_state=state,
        )
        summary: dict[str, Any] = {
            "best_candidate_idx": best,
            "best_valset_score": policy.get_valset_score(best, state),
            "total_iterations": state.i,
            "total_candidates": len(state.program_candidates),
        }
        for name in sorted(self.seed_candidate):
            summary[f"seed/{name}"] = self.seed_candidate[name]
            summary[f"best/{name}"] = state.program_candidates[best][name]
        self.experiment_tracker.log_summary(summary)

    def _config(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "perfect_score": self.perfect_score,
            "frontier_type": self.frontier_type,
            "track_best_outputs": self.track_best_outputs,
            "use_cloudpickle": self.use_cloudpickle,
            "raise_on_exception": self.raise_on_exception,
            "trainset_size": len(self.trainset),
            "valset_size": len(self.loader),
            "seed_candidate_components": sorted(self.seed_candidate),
            "val_evaluation_policy": type(self.val_evaluation_policy).__name__,
            "has_merge_proposer": self.merge_proposer is not None,
            "run_dir": self.run_dir,
        }

    def _log_candidate_tree(self, state: State) -> None:
        """gepa draws the whole tree at every commit; only where somebody gets to see it."""
        if self.run_dir is not None or self.options.use_wandb or self.options.use_mlflow:
            super()._log_candidate_tree(state)

    def _provisional_state(self) -> State:
        """A state in which the seed has no scores yet: steps may start, nothing can be compared."""
        state: State = GEPAState(self.seed_candidate, ValsetEvaluation[Any, Any]({}, {}, None))
        state.num_full_ds_evals = state.total_num_evals = 0
        state.evaluation_cache = self._initial_evaluation_cache
        return state

    def _on_calls(self, total: int, delta: int) -> None:
        remaining = self._get_remaining_budget(self.state)
        self.notify(
            "on_budget_updated",
            iteration=self.state.i + 1,
            metric_calls_used=total,
            metric_calls_delta=delta,
            metric_calls_remaining=remaining,
        )


def _generations(parents: list[list[int | None]]) -> list[int]:
    """Steps from the seed along the longest line of parents, for each candidate."""
    steps: list[int] = []
    for line in parents:
        known = [steps[parent] for parent in line if parent is not None]
        steps.append(1 + max(known) if known else 0)
    return steps


class BestResult:
    """gepa's result as of the last candidate that was better than all before it.

    A gepa callback, the first one: it is told of every validated candidate in the pool's writer, where the state may
    be read, and copies what it needs. ``result`` is replaced, never changed, so any thread may read it at any time and
    waits for nobody: not for the writer, which may be inside a callback that waits in turn.

    Args:
        state: the pool's.
        run_dir, seed: what gepa's result carries.
    """

    def __init__(self, state: Callable[[], GEPAState[Any, Any]], run_dir: str | None, seed: int | None) -> None:
        self._state = state
        self._run_dir = run_dir
        self._seed = seed
        self._best = float("-inf")
        self.result: GEPAResult[Any, Any] | None = None
        """None before the seed is validated."""

    def on_valset_evaluated(self, event: Any) -> None:
        """Called by gepa's code for each new candidate, and once for the seed or a checkpoint's candidates."""
        state = self._state()
        score = state.get_program_average_val_subset(event["candidate_idx"])[0]
        if self.result is None or score > self._best:  # as gepa's result decides between equals: the first
            self.result = GEPAResult[Any, Any].from_state(state, run_dir=self._run_dir, seed=self._seed)
            self._best = self.result.val_aggregate_scores[self.result.best_idx]

    @property
    def score(self) -> float | None:
        """The best aggregate validation score; None before the seed is validated."""
        return None if self.result is None else self._best


def write_commits(
    journal: RunJournal,
    step: int | None,
    first: int,
    version: int,
    work: Sequence[tuple[Candidate, Sequence[int | None], ValsetEvaluation[Any, Any]]],
) -> None:
    """Write candidates that are about to enter gepa's pool, and wait until that is safe. Runs in the pool's writer.

    Args:
        step: that made them; None for another program's.
        first: the first one's index in the pool.
        version: the pool's, before them.

    Raises:
        JournalError: it is not.
    """
    for offset, (candidate, parents, evaluation) in enumerate(work):
        objectives = evaluation.objective_scores_by_val_id
        journal.committed(
            step,
            first + offset,
            version + offset + 1,
            candidate,
            parents,
            {id_text(one): score for one, score in evaluation.scores_by_val_id.items()},
            more=None if objectives is None else {id_text(i): dict(o) for i, o in objectives.items()},
        )
    journal.journal.flush_here()
