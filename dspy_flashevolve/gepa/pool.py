"""The pool and its one writer.

Everything that reads or changes gepa's state, and every callback, selector, stopper and tracker, runs in
one thread, one call at a time, in the order in which the calls were made (DESIGN section 4, invariant 1).
The pool is gepa's engine without its loop: how a candidate is added, reported and logged is gepa's code.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

from gepa.core.callbacks import notify_callbacks
from gepa.core.data_loader import DataLoader
from gepa.core.engine import GEPAEngine
from gepa.core.state import GEPAState, ValsetEvaluation, initialize_gepa_state
from gepa.proposer.base import CandidateProposal

from dspy_flashevolve.engine.integration import PastCommit
from dspy_flashevolve.engine.item import Ticket
from dspy_flashevolve.engine.threads import Threads
from dspy_flashevolve.gepa.options import GepaOptions
from dspy_flashevolve.gepa.parts import Parts
from dspy_flashevolve.gepa.payloads import Candidate, Commit
from dspy_flashevolve.gepa.run_journal import RunJournal, id_text
from dspy_flashevolve.gepa.speculative import SpeculativeCandidates
from dspy_flashevolve.gepa.standing import Standing
from dspy_flashevolve.gepa.strategies import strategies_of
from dspy_flashevolve.gepa.summaries import report_end, report_seed

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
        checkpoint_seconds: with a run directory, the least time between two checkpoints; 0 saves at every ticket.
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
    ) -> None:
        self.standing = Standing(lambda: self.state, options.run_dir, options.seed)
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
            callbacks=[self.standing, *(parts.callbacks or [])],  # pyright: ignore[reportArgumentType]  # gepa asks hasattr
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
        self.calls_made: Callable[[], int] | None = None
        """Metric calls made so far, those of live tickets included; a checkpoint records them."""
        self.journal: RunJournal | None = None
        """Gets what is about to enter the pool, first."""
        self.shares_randomness = False
        """Tickets draw from the strategies' randomness, not from their own."""
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

        The state stays the same object, since callbacks may hold it; what tickets have already done to it stays.
        """
        early = self.state
        real: State = initialize_gepa_state(
            run_dir=self.run_dir,
            logger=self.logger,
            seed_candidate=self.seed_candidate,
            seed_valset_evaluation=evaluation,
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
        early_calls = early.total_num_evals
        early.__dict__.update(real.__dict__)
        early.total_num_evals = real.total_num_evals + early_calls
        self._sync_state_to_adapter(early)
        self.speculative.confirm(self._seed_key)
        self.seed_confirmed = True
        report_seed(self)
        early.add_budget_hook(self._on_calls)

    def save(self, *, force: bool = False) -> None:
        """Write gepa's checkpoint, unless the last one is fresh enough."""
        if not self.seed_confirmed or (not force and time.monotonic() - self._saved_at < self._checkpoint_seconds):
            return
        self._sync_adapter_state_to_state(self.state)
        counted = self.state.total_num_evals
        if self.calls_made is not None:
            # What live tickets have spent is spent, even if the run is killed before they end.
            self.state.total_num_evals = max(counted, self.calls_made())
        try:
            self.state.save(self.run_dir, use_cloudpickle=self.use_cloudpickle)
        finally:
            self.state.total_num_evals = counted
        self._saved_at = time.monotonic()

    def begin_ticket(self, ticket: Ticket) -> dict[str, Any]:
        """Advance the iteration; returns the ticket's entry of the run log. One that goes on may have one already."""
        if self.seed_confirmed and time.monotonic() - self._saved_at >= self._checkpoint_seconds:
            self.save()
            self.notify("on_state_saved", iteration=self.state.i + 1, run_dir=self.run_dir)
        self.state.i = max(self.state.i, ticket.number)
        log = self.state.full_program_trace
        trace: dict[str, Any] = next((entry for entry in reversed(log) if entry["i"] == ticket.number), {})
        if not trace:
            trace["i"] = ticket.number
            log.append(trace)
        self.notify("on_iteration_start", iteration=ticket.number + 1, state=self.state, trainset_loader=self.trainset)
        return trace

    def end_ticket(self, ticket: Ticket, accepted: bool) -> bool:
        """Report a ticket's end and ask the stoppers; True when one of them says stop."""
        self.notify("on_iteration_end", iteration=ticket.number + 1, state=self.state, proposal_accepted=accepted)
        self.keep_strategies()
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

    def count_calls(self, calls: int) -> None:
        """Add metric calls to gepa's count."""
        self.state.increment_evals(calls)

    def add(
        self, ticket: Ticket, proposal: CandidateProposal[Any], evaluation: ValsetEvaluation[Any, Any], calls: int
    ) -> Commit:
        """Add a validated candidate: the only place where the pool grows."""
        with self.acting_for(ticket):
            index, best = self._add_evaluated_program(
                new_program=proposal.candidate,
                state=self.state,
                parent_program_idx=proposal.parent_program_ids,
                valset_evaluation=evaluation,
                num_actual_evals=calls,
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

    def log_proposal(self, ticket: Ticket, proposal: CandidateProposal[Any], candidate: int) -> None:
        """Log a proposal's LM calls; ``candidate`` is -1 for a rejected one."""
        self._log_proposal_lm_calls(ticket.number + 1, proposal, candidate_idx=candidate)

    def reject(
        self, ticket: Ticket, proposal: CandidateProposal[Any], *, passed: bool = False, reason: str | None = None
    ) -> None:
        """Report a proposal that goes no further."""
        self._report_rejected_proposal(
            proposal, ticket.number + 1, self.state, dropped_by_selection=passed, reason_override=reason
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
        if self.seed_confirmed:
            self.save(force=True)
            report_end(self)

    def fail(self, error: BaseException, live: list[int]) -> None:
        """Save and tell the callbacks: the run ended by ``error`` while the tickets ``live`` were on their way."""
        if isinstance(error, Exception):
            self.notify("on_error", iteration=self.state.i + 1, exception=error, will_continue=False)
        begun = {entry["i"] for entry in self.state.full_program_trace}
        for number in begun.intersection(live):
            self.notify("on_iteration_end", iteration=number + 1, state=self.state, proposal_accepted=False)
        if self.calls_made is not None:
            self.state.total_num_evals = max(self.state.total_num_evals, self.calls_made())
        self.save(force=True)

    @contextmanager
    def acting_for(self, ticket: Ticket) -> Generator[None, None, None]:
        """Let gepa's code, which reads the iteration and the newest log entry from the state, act for ``ticket``."""
        state = self.state
        newest, log = state.i, state.full_program_trace
        entry = next(entry for entry in reversed(log) if entry["i"] == ticket.number)
        state.i, state.full_program_trace = ticket.number, [entry]
        try:
            yield
        finally:
            state.i, state.full_program_trace = newest, log

    def _log_candidate_tree(self, state: State) -> None:
        """gepa draws the whole tree at every commit; only where somebody gets to see it."""
        if self.run_dir is not None or self.options.use_wandb or self.options.use_mlflow:
            super()._log_candidate_tree(state)

    def _provisional_state(self) -> State:
        """A state in which the seed has no scores yet: tickets may start, nothing can be compared."""
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
