"""AsyncACE: an optimizer that learns a playbook of lessons from many samples at once."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Sequence
from typing import Any

import dspy
from dspy.primitives import Example, Module
from dspy.teleprompt.teleprompt import Teleprompter

from dspy_flashevolve.ace.learner import AceSettings, playbook_in
from dspy_flashevolve.ace.playbook import Playbook, attached
from dspy_flashevolve.ace.run import AceRun
from dspy_flashevolve.engine.errors import ConfigurationError, DataError
from dspy_flashevolve.observe.statistics import AceStats
from dspy_flashevolve.programs.fingerprints import fingerprints_of, open_store
from dspy_flashevolve.programs.run import with_compile_events
from dspy_flashevolve.programs.settings import check_data


class AsyncACE(AceSettings, Teleprompter):
    """Agentic context engineering (ACE) on an asynchronous engine.

    A playbook of bullets is added to the instructions of a program. Each training sample is tried with it, reflected
    on, and turned into a few operations on the playbook, which one writer applies. Samples overlap, and playbooks are
    validated beside them. The best validated playbook is returned with the program.

    Source: ACE (arXiv 2510.04618); asynchronous stages after FlashEvolve (arXiv 2605.08520).

    Args:
        metric: a function (example, prediction, trace=None, ...), sync or coroutine, that returns a score, or a
            ``dspy.Prediction`` with ``score`` and ``feedback``. Where it gives no feedback, the reflector is shown the
            example's labels.
        reflector_lm: the ``dspy.LM`` that reflects on samples. Default None: the configured LM.
        curator_lm: the ``dspy.LM`` that writes operations. Default None: the configured LM.
        max_rounds: most reflections on a sample. Each reflection on a wrong attempt is followed by another attempt, so
            that a sample costs up to ``1 + max_rounds`` metric calls. Default 3.
        epochs: how often each training example is taken. Default 1.
        curator_frequency: the curator is asked about every so many samples of an epoch or stream; of the others only
            the tags count. Default 1.
        no_ground_truth: True keeps the examples' labels from the reflector: it has the score and the metric's
            feedback, which should then tell what an execution showed and not the right answer. Default False.
        token_budget: most tokens of the rendered playbook. Beyond it, the bullets of least worth are dropped. Default
            8,192.
        eval_every: samples between two snapshots that are validated. Default 10.
        attach: names of the predictors that get the playbook, as ``named_predictors`` has them, or "all" (default).
        num_threads: most requests in flight, over all stages. Default None: found out while the run goes on.
        max_concurrency: most requests in flight when ``num_threads`` is None. Default None: 256.
        schedule: "async" (default), or "lockstep": the calls of ACE's reference loop, in its order: one sample at a
            time, in the order of the training set, and no sample during a validation (docs/ace.md has what differs).
        max_metric_calls: metric calls, validations included; never exceeded. Default None: no limit.
        max_seconds: no sample starts after this many seconds; samples that run are finished, and the last playbook is
            validated. Default None: no limit.
        sections: names of the sections of a new playbook.
        perfect_score: score from which an attempt counts as right. Default 1.0.
        failure_score: score of an example on which the program or the metric raises. Default 0.0.
        reflector, curator: modules in place of `SampleReflection` and `PlaybookCuration`.
        count_tokens: a function from a text to its number of tokens. Default: one token for every four bytes.
        rollout_timeout_seconds: a rollout that takes longer is given up and asked for again. Default None: never.
        max_outage_seconds: a provider that answers nothing for so long ends the run. Default 60; None: never.
        metric_lock: True for a metric that is not thread-safe: it is called once at a time. Default False.
        rollouts: a `RayRollouts`, to run program and metric in other processes. Default None: in this process.
        seed: seed of the order of the samples, unless in lockstep. Default 0.
        log_dir: directory for the run's journal, from which ``compile`` goes on after a crash or a stop, or with a
            larger budget (docs/journal.md). Default None: no journal.

    Raises:
        ConfigurationError: an argument that cannot work, with the reason.

    Example:
        >>> import dspy
        >>> from dspy_flashevolve import AsyncACE
        >>> def metric(gold, pred, trace=None):
        ...     feedback = f"The right answer is {gold.answer!r}."
        ...     return dspy.Prediction(score=float(gold.answer == pred.answer), feedback=feedback)
        >>> optimizer = AsyncACE(metric, epochs=2, num_threads=32, max_metric_calls=2000)
        >>> # optimized = optimizer.compile(program, trainset=trainset, valset=valset)
        >>> # optimized.playbook.save("playbook.json")
    """

    _run: AceRun | None = None
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other  # an optimizer is no value, as its settings alone would be

    def compile(  # pyright: ignore[reportIncompatibleMethodOverride]  # dspy's has a teacher, which ACE has no use for
        self,
        student: Module,
        *,
        trainset: Sequence[Example],
        valset: Sequence[Example] | None = None,
        playbook: Playbook | None = None,
    ) -> Module:
        """Learn a playbook from a training set.

        Args:
            student: the program; it is not changed.
            trainset: the training examples, at least one.
            valset: examples that playbooks are scored on. Default None: the training set.
            playbook: the playbook to begin with. Default None: what the student's instructions hold, else an empty
                one.

        Returns:
            A program of the student's class with the best validated playbook in the instructions of the predictors that
            ``attach`` names, so that ``save`` and ``load`` keep it; with the attributes ``playbook`` (a
            `Playbook`; ``ace_playbook`` where the program uses that name) and ``async_stats`` (an
            `AceStats`).

        Raises:
            ConfigurationError: data, a playbook or a budget that cannot be used.
            RunDirectoryError: ``log_dir`` cannot be written, is in use, or holds another run.
            RunAbortedError: the provider refused for good, or code of yours raised; ``best_program`` is the best so
                far.
        """
        run = self._offline_run(student, trainset, valset, playbook)
        return run.run_sync()

    @with_compile_events
    async def acompile(
        self,
        student: Module,
        *,
        trainset: Sequence[Example],
        valset: Sequence[Example] | None = None,
        playbook: Playbook | None = None,
    ) -> Module:
        """Do what `compile` does on the caller's event loop."""
        run = self._offline_run(student, trainset, valset, playbook)
        return await run.run_async()

    def adapt(
        self,
        student: Module,
        stream: Iterable[Example] | AsyncIterable[Example],
        *,
        window: int = 16,
        playbook: Playbook | None = None,
    ) -> Module:
        """Learn from a stream while it is served: each window is scored before anything is learnt from it.

        The examples of a window are tried with the playbook as it was when the window began; that is its score. Then
        they are reflected on as in `compile`. The next window begins when that is done.

        Args:
            student: the program; it is not changed.
            stream: examples with inputs and whatever the metric needs, as they come; it is read a window at a time.
                What was read of a window that had not begun at a stop is lost.
            window: examples of a window, at least 1; the last window may have fewer.
            playbook: the playbook to begin with; see `compile`. With ``Playbook.save`` it is the way to go on.

        Returns:
            The program with the newest playbook; ``async_stats.windows`` has the scores.

        Raises:
            ConfigurationError: a window or a playbook that cannot be used, or a ``log_dir``: no stream is read twice.
            RunAbortedError: the provider refused for good, or the stream raised; ``best_program`` has what was learnt
                so far.
        """
        run = self._online_run(student, stream, window, playbook)
        return run.run_sync()

    async def aadapt(
        self,
        student: Module,
        stream: Iterable[Example] | AsyncIterable[Example],
        *,
        window: int = 16,
        playbook: Playbook | None = None,
    ) -> Module:
        """Do what `adapt` does on the caller's event loop."""
        run = self._online_run(student, stream, window, playbook)
        return await run.run_async()

    def best_so_far(self) -> Module | None:
        """Return the program that the newest run would return if it ended now. Any thread may call this.

        None before the first playbook is validated; while adapting to a stream, None before the run has begun.
        """
        return None if self._run is None or not self._run.has_result else self._run.program()

    def stats_so_far(self) -> AceStats | None:
        """Return the statistics of the newest run; None before it has begun. Any thread may call this."""
        return None if self._run is None or not self._run.has_begun else self._run.statistics()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the run out of copies: it belongs to the optimizer that began it."""
        return {**self.__dict__, "_run": None}

    def _offline_run(self, student: Module, trainset: Any, valset: Any, playbook: Playbook | None) -> AceRun:
        check_data(student, trainset, None, valset)
        scored_on = list(trainset if valset is None else valset)
        names, first = self._starting_point(student, playbook, len(scored_on))
        predictors: list[tuple[str, Any]] = student.named_predictors()
        texts = {name: predictor.signature.instructions for name, predictor in predictors}
        texts |= {name: attached(texts[name], first.render()) for name in names}
        parts = fingerprints_of(student, texts, list(trainset), scored_on, self.metric)
        order = "as given" if self.schedule == "lockstep" else "shuffled"
        parts |= {"attach": repr(names), "seed": repr(self.seed), "order of the samples (by schedule)": order}
        lms = [dspy.settings.lm, self.reflector_lm, self.curator_lm, *(predictor.lm for _, predictor in predictors)]
        with open_store(self.log_dir, type(self).__qualname__, vars(self), parts, lms) as store:
            self._run = AceRun(self, student, names, first, list(trainset), scored_on, store=store)
        return self._run

    def _online_run(self, student: Module, stream: Any, window: int, playbook: Playbook | None) -> AceRun:
        names, first = self._starting_point(student, playbook, validation=0)
        if not isinstance(window, int) or isinstance(window, bool) or window < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"window is {window!r}, expected a whole number of at least 1.")
        if not hasattr(stream, "__iter__") and not hasattr(stream, "__aiter__"):
            raise DataError(f"stream is {stream!r}, expected an iterable or async iterable of dspy.Example.")
        if self.log_dir is not None:
            raise ConfigurationError(
                f"log_dir is {str(self.log_dir)!r}, but a stream cannot be read again: leave it out, keep what is "
                "learnt with Playbook.save, and go on from playbook=Playbook.load(...)."
            )
        self._run = AceRun(self, student, names, first, None, None, stream=stream, window=window)
        return self._run

    def _starting_point(self, student: Any, playbook: Any, validation: int) -> tuple[list[str], Playbook]:
        """Return the names of the predictors that get the playbook, and the playbook to begin with.

        Args:
            playbook: the argument of the user; None for the student's own.
            validation: number of examples in the validation set; 0 where there is none.

        Raises:
            ConfigurationError: a student, a playbook or a budget that cannot be used, with the reason.
        """
        if not isinstance(student, Module):
            raise DataError(f"student is {student!r}, expected a dspy.Module.")
        predictors = [name for name, _ in student.named_predictors()]
        attached_to = predictors if self.attach == "all" else list(self.attach)
        if not attached_to or any(name not in predictors for name in attached_to):
            raise ConfigurationError(f"attach is {self.attach!r}, but the program's predictors are {predictors}.")
        names = [name for name in predictors if name in attached_to]
        first = playbook_in(student, names, self.sections) if playbook is None else playbook
        if not isinstance(first, Playbook):
            raise ConfigurationError(f"playbook is {first!r:.80}, expected a Playbook: Playbook.load(path) reads one.")
        tokens = first.tokens(self.count_tokens)
        if tokens > self.token_budget:
            raise ConfigurationError(
                f"The playbook to begin with has {tokens} tokens, above token_budget={self.token_budget}. Raise the "
                "budget, or leave bullets out."
            )
        sample, limit = 1 + self.max_rounds, self.max_metric_calls
        if limit is not None and limit < 2 * validation + sample:
            raise ConfigurationError(
                f"max_metric_calls is {limit}, expected at least {2 * validation + sample}: {sample} for a sample"
                + (f", and {validation} each for the first and the last playbook's validation." if validation else ".")
            )
        return names, first
