"""AsyncMetaHarness: an optimizer that evolves the code around a language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dspy
from dspy.teleprompt.teleprompt import Teleprompter

from dspy_flashevolve.engine.errors import RunDirectoryError
from dspy_flashevolve.engine.store import FILE
from dspy_flashevolve.harness.archive import Evaluated, Failed
from dspy_flashevolve.harness.evaluating import HarnessSettings, task_of, texts_of
from dspy_flashevolve.harness.program import Harness
from dspy_flashevolve.harness.run import HarnessRun
from dspy_flashevolve.observe.statistics import RunStats
from dspy_flashevolve.programs.fingerprints import fingerprints_of, open_store
from dspy_flashevolve.programs.run import DspyRun, with_compile_events
from dspy_flashevolve.programs.settings import RunSettings, settings_of
from dspy_flashevolve.sandbox.sandbox import Sandbox


@dataclass(frozen=True)
class MetaHarnessResult:
    """The result of a run of `AsyncMetaHarness`.

    Args:
        candidates: every evaluated candidate; the first is the student.
        failed: every candidate that failed its check or its evaluation, with the reason.
        front: numbers of the candidates on the Pareto front of score against cost, best score first.
        best: number of the candidate that was returned.
        missing_protection: layers of the sandbox that the machine does not give (docs/meta-harness.md).
        stats: statistics of the run.
    """

    candidates: tuple[Evaluated, ...]
    failed: tuple[Failed, ...]
    front: tuple[int, ...]
    best: int
    missing_protection: tuple[str, ...]
    stats: RunStats


class AsyncMetaHarness(HarnessSettings, Teleprompter):
    """Meta-Harness on an asynchronous engine: a search for a better implementation of a program, as source code.

    A candidate is the source of one ``dspy.Module`` subclass, with memory in JSON. Proposers are agents that read the
    archive of earlier candidates (sources, scores, traces) with tools, run drafts in the sandbox on training examples,
    and submit k new ones at a time, each proposer in a direction of its own. A candidate is checked (parsed, and run on
    three training examples). It learns from the training set where it has ``learn(batch)``. Then it is evaluated on the
    whole validation set and admitted to the archive. Candidate code never runs in this process; docs/meta-harness.md
    says what its sandbox protects from.

    Source: Meta-Harness (arXiv 2603.28052), where one agent writes at a time; asynchronous stages after FlashEvolve
    (arXiv 2605.08520).

    Args:
        metric: a function (example, prediction, trace=None, ...), sync or coroutine, that returns a score, or a
            ``dspy.Prediction`` with ``score`` and ``feedback``. It runs in this process, on what comes back from the
            sandbox.
        proposer_lm: the ``dspy.LM`` that writes candidates: the strongest at hand.
        iterations: number of proposals, each of ``k`` candidates. Default 20.
        k: candidates in a proposal. Default 2.
        proposers: agents that write at once; one in lockstep. Default 2.
        cost: a function from the `Outcome` of one run on one example to its cost; its mean over the validation set is
            the second axis of the Pareto front. Default: the tokens of its prompts.
        limits: the `Limits` of one run of a candidate. Default ``Limits()``.
        log_dir: directory for every candidate, with scores and traces, and for the run's journal, from which
            ``compile`` goes on where a run was interrupted. Default None: nothing is written.
        num_threads: most requests in flight, over all stages. Default None: found out, as in `AsyncGEPA`.
        schedule: "async" (default), or "lockstep": one proposal at a time, from its writing to its admission, in the
            same slots.
        directions: what proposers look into, in turn.
        proposer: a function from a list of tools, coroutine functions that return text, to the ``dspy.Module`` that
            makes one proposal: it is called with the inputs of ``ProposeHarness`` and returns ``modules``. It keeps the
            tools in its attribute ``tools``, as ``dspy.ReAct`` does. Default None: a ``dspy.ReAct``.
        proposer_steps: most tool calls of the default agent for one proposal. Default 12.
        proposer_runs: most runs of drafts on a training example, for one proposal. Default 6.
        proposer_tokens: after so many tokens of one proposal its tools only ask it to finish. Default None: no limit.
        learn_batch: training examples in a batch of ``learn``. Default 16.
        failure_score: score of an example on which a candidate or the metric raises. Default 0.0.
        max_seconds: no proposal starts after this many seconds. Default None: no limit.
        max_outage_seconds: a provider that answers nothing for so long ends the run. Default 60; None: never.
        sandbox: where candidates run: "process" (default, Linux), or a `CodeSandbox`.
        accept_missing_protection: layers of the process sandbox ("user", "namespaces", "landlock", "seccomp") that this
            machine may lack. Default: none, so that ``compile`` refuses before any request where one is missing.
        seed: seed of the choice of examples. Default 0.

    Raises:
        ConfigurationError: an argument that cannot work, with the reason.

    Example:
        >>> import dspy
        >>> from dspy_flashevolve import AsyncMetaHarness
        >>> def metric(gold, pred, trace=None):
        ...     return float(gold.answer == pred.answer)
        >>> optimizer = AsyncMetaHarness(metric, proposer_lm=dspy.LM("openai/gpt-5"), iterations=10, num_threads=32)
        >>> # harness = optimizer.compile(program, trainset=trainset, valset=valset)
    """

    def compile(  # pyright: ignore[reportIncompatibleMethodOverride] # as in dspy.GEPA, with the teacher left out
        self,
        student: dspy.Module,
        *,
        trainset: Sequence[dspy.Example],
        valset: Sequence[dspy.Example] | None = None,
    ) -> Harness:
        """Search, and return the candidate with the best score.

        Args:
            student: a ``dspy.Predict``, a ``dspy.ChainOfThought``, a ``dspy.Flex`` or a `Harness`; it is the
                first candidate, and is not changed.
            trainset: examples whose answers and feedback proposers may read, and candidates may learn from.
            valset: examples that candidates are scored on; nothing but the metric sees their labels. Default None: the
                trainset. ``learn`` then gets no examples, since a candidate may not learn from what it is scored on.

        Returns:
            A program whose ``detailed_results`` is a `MetaHarnessResult`.

        Raises:
            ConfigurationError: the student or the data cannot be used, or the machine has no sandbox.
            RunAbortedError: the provider refused for good; ``best_program`` is the best so far.
        """
        search = self._search(student, trainset, valset)
        search.run.run_sync(search.search)
        return self._result(search)

    @with_compile_events
    async def acompile(
        self,
        student: dspy.Module,
        *,
        trainset: Sequence[dspy.Example],
        valset: Sequence[dspy.Example] | None = None,
    ) -> Harness:
        """Do what `compile` does on the caller's event loop."""
        search = self._search(student, trainset, valset)
        await search.run.run_async(search.search)
        return self._result(search)

    def _search(self, student: Any, trainset: Any, valset: Any) -> HarnessRun:
        task, sandbox = task_of(student, trainset, valset), self.sandbox
        if isinstance(sandbox, str):
            sandbox = Sandbox(self.limits, accept_missing_protection=self.accept_missing_protection)
        if self.log_dir is not None and not Path(self.log_dir, FILE).exists():
            existing = [name for name in ("candidates", "failed") if Path(self.log_dir, name).exists()]
            if existing:  # candidates of two runs would mix
                raise RunDirectoryError(
                    f"log_dir {str(self.log_dir)!r} holds another run ({', '.join(existing)}), and no journal to go on "
                    "from: name a new one."
                )
        data = task.trainset, task.valset
        seed = {**texts_of(task.seed, task.memory), "task": task.signature.instructions}
        parts = fingerprints_of(dspy.Predict(task.signature), seed, *data, self.metric)
        parts["cost"] = getattr(self.cost, "__qualname__", type(self.cost).__qualname__)
        name, lms = type(self).__qualname__, [self.proposer_lm, task.lm, dspy.settings.lm]
        with open_store(self.log_dir, name, vars(self), parts, lms) as store:
            run = DspyRun(
                name="AsyncMetaHarness",
                stages={"propose": [self.proposer_lm], "check": [task.lm], "evaluate": [task.lm]},
                settings=settings_of(RunSettings, self),
                store=store,
            )
            return HarnessRun(self, run, task, sandbox)

    def _result(self, search: HarnessRun) -> Harness:
        archive, program = search.archive, search.best_program()
        program.detailed_results = MetaHarnessResult(
            candidates=tuple(archive.candidates),
            failed=tuple(archive.failed),
            front=archive.front,
            best=archive.best,
            missing_protection=search.missing_protection,
            stats=search.run.statistics(),
        )
        return program
