"""The pool and its one writer.

Everything that reads or changes gepa's state, and every callback, selector and stopper, runs in one thread,
one call at a time, in the order in which the calls were made (docs/architecture.md).
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import quote

import cloudpickle
from gepa.core.data_loader import DataLoader
from gepa.core.state import EvaluationCache, GEPAState, ValsetEvaluation, initialize_gepa_state
from gepa.gepa_utils import json_default

from dspy_flashevolve.engine.loop import Threads
from dspy_flashevolve.engine.run import EvolutionRun
from dspy_flashevolve.engine.staleness import PastCommit, Texts
from dspy_flashevolve.engine.store import id_text, write_private
from dspy_flashevolve.gepa.options import Parts, strategies_of
from dspy_flashevolve.gepa.published import SpeculativeCandidates
from dspy_flashevolve.gepa.reports import Reports, State, score_of
from dspy_flashevolve.gepa.search import Search
from dspy_flashevolve.gepa.settings import GepaSettings
from dspy_flashevolve.programs.checkpoint import CHECKPOINT
from dspy_flashevolve.programs.records import as_writable

A = ParamSpec("A")
T = TypeVar("T")


class Pool:
    """gepa's state, its version, the speculative candidates, and the thread that writes them.

    All but :meth:`write`, :attr:`version` and :meth:`close` runs in the writer's thread.

    Args:
        search: says how often checkpoints are written, and where randomness comes from.
        trainset, valset: gepa's loaders; equal where there is one set of examples.
        best: a gepa callback that hears of candidates before all others.
        checkpoint: gepa's state, as an earlier run on the directory has left it; None where there was none.
    """

    def __init__(
        self,
        run: EvolutionRun,
        settings: GepaSettings,
        search: Search,
        parts: Parts,
        adapter: Any,
        seed_candidate: Texts,
        trainset: DataLoader[Any, Any],
        valset: DataLoader[Any, Any],
        logger: Any,
        best: Any,
        checkpoint: State | None = None,
    ) -> None:
        self.settings, self.parts, self.adapter, self.seed_candidate = settings, parts, adapter, seed_candidate
        self.best, self.logger, self._checkpoint = best, logger, checkpoint
        self.callbacks: list[Any] = [best, *(parts.callbacks or [])]
        self.trainset = trainset
        self.loader: DataLoader[Any, Any] = valset
        self.seed_confirmed = False
        self.grown: dict[int, list[str]] = {}
        """Candidate -> its components that join what several children added: of equals, one without is returned."""
        self.speculative = SpeculativeCandidates()
        # The seed has no scores yet: steps may start, nothing can be compared.
        self.state: State = GEPAState(seed_candidate, ValsetEvaluation[Any, Any]({}, {}, None))
        self.state.num_full_ds_evals = self.state.total_num_evals = 0
        self.state.evaluation_cache = parts.cache
        self._files = None if settings.log_dir is None else RunFiles(Path(settings.log_dir), settings.use_cloudpickle)
        self._shares_randomness = not search.overlaps
        self._checkpoint_seconds, self._saved_at = search.checkpoint_seconds, float("-inf")
        self.reports = Reports(self.state, self.callbacks, logger, parts.tracker, trainset, valset)
        """Tells callbacks, log and tracker."""
        self.store, self._budget = run.store, run.budget
        self._writer = Threads(1, "pool")

    async def write(self, call: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
        """Run ``call`` in the writer's thread, after all calls made before."""
        return await self._writer.run(call, *args, **kwargs)

    @property
    def version(self) -> int:
        """The count of commits."""
        return len(self.state.program_candidates) - 1

    def close(self) -> None:
        """End the writer's thread, after the calls made before."""
        self._writer.close()

    # Beginning and end.

    def start(self) -> bool:
        """Begin the run; True when it goes on from a checkpoint, so that the seed is confirmed."""
        settings = self.settings
        self.reports.notify(
            "on_optimization_start", seed_candidate=self.seed_candidate, trainset_size=len(self.trainset),
            valset_size=len(self.loader),
            config={name: getattr(settings, name) for name in ("perfect_score", "seed", "track_best_outputs")},
        )  # fmt: skip
        if self._checkpoint is None:
            return False
        self.confirm_seed(ValsetEvaluation[Any, Any]({}, {}, None))
        return True

    def confirm_seed(self, evaluation: ValsetEvaluation[Any, Any]) -> None:
        """Put the validated seed, or the checkpoint's candidates, where the provisional state was.

        The state stays the same object, since callbacks may hold it; what steps have already done to it stays.
        """
        early, settings = self.state, self.settings
        if (real := self._checkpoint) is None:
            real = initialize_gepa_state(
                run_dir=None,
                logger=self.logger,
                seed_candidate=self.seed_candidate,
                seed_valset_evaluation=evaluation,
                track_best_outputs=settings.track_best_outputs,
                frontier_type=settings.frontier_type,
                evaluation_cache=self.parts.cache,
            )
        elif self.parts.cache is None or real.evaluation_cache is None:
            real.evaluation_cache = self.parts.cache
        if early.full_program_trace:
            real.i = early.i
            real.full_program_trace = early.full_program_trace
            real.named_predictor_id_to_update_next_for_program_candidate = (
                early.named_predictor_id_to_update_next_for_program_candidate
            )
        early.__dict__.update(real.__dict__)
        if (restore := getattr(self.adapter, "set_adapter_state", None)) is not None:
            restore(early.adapter_state)
        self.seed_confirmed = True
        names = "seed", "perfect_score", "frontier_type", "track_best_outputs", "use_cloudpickle"
        config = {name: getattr(settings, name) for name in names} | {
            "raise_on_exception": True, "trainset_size": len(self.trainset), "valset_size": len(self.loader),
            "seed_candidate_components": sorted(self.seed_candidate), "run_dir": settings.log_dir,
            "val_evaluation_policy": type(self.parts.val_evaluation_policy).__name__,
            "has_merge_proposer": self.parts.merge is not None,
        }  # fmt: skip
        self.reports.seed_validated(config)
        early.add_budget_hook(self._on_calls)
        if self._files is not None:
            for example, output in evaluation.outputs_by_val_id.items():
                self._files.write_output(example, 0, 0, output)

    def _on_calls(self, total: int, delta: int) -> None:
        limits = [getattr(stopper, "max_metric_calls", None) for stopper in self.parts.stopper.stoppers]
        limit = next((most for most in limits if isinstance(most, int)), None)
        self.reports.notify(
            "on_budget_updated", self.state.i + 1, metric_calls_used=total, metric_calls_delta=delta,
            metric_calls_remaining=None if limit is None else max(0, limit - self.state.total_num_evals),
        )  # fmt: skip

    def finish(self) -> None:
        """Write the checkpoint and report that the run came to its end."""
        self.reports.end_steps()  # a stop came while a step was selecting
        self.count_calls()
        if self.seed_confirmed:
            self.save(force=True)
            best = self.best_index
            self.reports.run_ended(best, self.parts.val_evaluation_policy.get_valset_score(best, self.state))

    def fail(self, error: BaseException) -> None:
        """Write the checkpoint and report that ``error`` ended the run, and with it the steps on their way."""
        if isinstance(error, Exception):
            self.reports.notify("on_error", self.state.i + 1, exception=error, will_continue=False)
        self.reports.end_steps()
        self.state.total_num_evals = max(self.state.total_num_evals, self._budget.spent)
        self.save(force=True)

    def save(self, *, force: bool = False) -> bool:
        """Write gepa's checkpoint, unless the last one is fresh enough; whether it was written."""
        if not self.seed_confirmed or (not force and time.monotonic() - self._saved_at < self._checkpoint_seconds):
            return False
        if (state_of := getattr(self.adapter, "get_adapter_state", None)) is not None:
            self.state.adapter_state = dict(state_of())
        if self._files is not None:
            self._files.write_checkpoint(self.state, self._budget.spent)
        self._saved_at = time.monotonic()
        return True

    def write_best_outputs(self) -> None:
        """Write the outputs of the newest candidate that are better than all before, as gepa does."""
        for example, outputs in (self.state.best_outputs_valset or {}).items():
            if self._files is not None and outputs[0][0] == self.version:
                self._files.write_output(example, self.state.i + 1, self.version, outputs[0][1])

    def should_stop(self, counts: bool = True) -> bool:
        """Ask the stoppers; before the seed is confirmed there is nothing to ask them about.

        Args:
            counts: those are asked, too, that count iterations without improvement.
        """
        return self.seed_confirmed and self.parts.stopper(self.state, counts)

    def keep_strategies(self) -> None:
        """Write down where the strategies stand."""
        self.store.set_state(
            "gepa strategies",
            lambda: strategies_of(self.parts, self.adapter, self.state, self._shares_randomness, id_text),
        )

    def count_calls(self) -> None:
        """Bring gepa's count of metric calls to what was made by now."""
        if (calls := self.uncounted) > 0:
            self.state.increment_evals(calls)

    @property
    def uncounted(self) -> int:
        """Metric calls that were made and that gepa's state does not know of."""
        return max(0, self._budget.spent - self.state.total_num_evals) if self.seed_confirmed else 0

    # Candidates.

    def mark_grown(self, names: Sequence[list[str]]) -> None:
        """Take note which components of the candidates that are committed next have grown."""
        first = len(self.state.program_candidates)
        self.grown = {index: grown for index, grown in self.grown.items() if index < first}  # a kill may leave more
        self.grown |= {index: grown for index, grown in enumerate(names, start=first) if grown}
        self.store.set_state("grown", lambda: self.grown)

    def commits_since(self, version: int) -> list[PastCommit]:
        """List what was committed after ``version``, oldest first."""
        state, commits = self.state, list[PastCommit]()
        for index in range(version + 1, len(state.program_candidates)):
            parents = [parent for parent in state.parent_program_for_candidate[index] if parent is not None]
            parent = max(parents, key=self.score_of)
            texts, before = state.program_candidates[index], state.program_candidates[parent]
            new = {name: text for name, text in texts.items() if text != before[name]}
            gain = self.score_of(index) - self.score_of(parent)
            commits.append(PastCommit(new, {name: before[name] for name in new}, gain))
        return commits

    def score_of(self, candidate: int) -> float:
        """A candidate's aggregate validation score."""
        return score_of(self.state, candidate)

    @property
    def best_index(self) -> int:
        """Index of the best candidate; the seed's before it is confirmed."""
        if not self.seed_confirmed:
            return 0
        return self.preferred(self.parts.val_evaluation_policy.get_best_program(self.state))

    def preferred(self, best: int) -> int:
        """Choose between candidates that score as ``best`` does: the first that has not grown, else ``best``."""
        if best not in self.grown:
            return best
        score = self.state.get_program_average_val_subset
        indices = range(len(self.state.program_candidates))
        return next((index for index in indices if index not in self.grown and score(index) == score(best)), best)

    @property
    def best_score(self) -> float | None:
        """The best aggregate validation score; None before the seed is confirmed."""
        if not self.seed_confirmed:
            return None
        return self.parts.val_evaluation_policy.get_valset_score(self.best_index, self.state)


class RunFiles:
    """Writes the files of gepa's in a run's directory, for their owner alone: gepa's own are readable by everybody."""

    def __init__(self, directory: Path, use_cloudpickle: bool) -> None:
        self._directory, self._dumps = directory, cloudpickle.dumps if use_cloudpickle else pickle.dumps

    def write_checkpoint(self, state: State, spent: int) -> None:
        """Write what ``GEPAState.save`` writes; ``spent``: metric calls, those of live steps included.

        Outputs that cannot be pickled are written as the journal has them: those of a predictor whose signature was
        made from a string, say.
        """
        left_out = state._EXCLUDED_FROM_SERIALIZATION  # pyright: ignore[reportPrivateUsage]
        held = {name: value for name, value in vars(state).items() if name not in left_out}
        # What live steps have spent is spent, even if the run is killed before they end.
        held["total_num_evals"] = max(state.total_num_evals, spent)
        try:
            content = self._dumps(held)
        except Exception:
            written: Callable[[Any], Any] = partial(as_writable, write=pickle.dumps)
            if (best := state.best_outputs_valset) is not None:
                held["best_outputs_valset"] = {
                    example: [(index, written(output)) for index, output in outputs]
                    for example, outputs in best.items()
                }
            if (cache := state.evaluation_cache) is not None:
                cached: Mapping[Any, Any] = cache._cache  # pyright: ignore[reportPrivateUsage]
                entries = {key: replace(entry, output=written(entry.output)) for key, entry in cached.items()}
                held["evaluation_cache"] = EvaluationCache(entries)
            content = self._dumps(held)
        write_private(self._directory / CHECKPOINT, content)
        if state.full_program_trace:
            write_private(self._directory / "run_log.json", _json(state.full_program_trace))
        write_private(self._directory / "candidates.json", _json(state.program_candidates))

    def write_output(self, example: Any, iteration: int, candidate: int, output: Any) -> None:
        """Write the output of a candidate on a validation example."""
        folder = self._directory / "generated_best_outputs_valset" / f"task_{quote(str(example), safe='')}"
        write_private(folder / f"iter_{iteration}_prog_{candidate}.json", _json(as_writable(output, _json)))


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, default=json_default)
