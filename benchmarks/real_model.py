"""A real task model with a scripted, imperfect reflection LM: `python -m benchmarks.real_model`, in a checkout.

dspy.GEPA, Combee and AsyncGEPA look for a hidden house style (`benchmarks.workloads.house_style`) at an equal number of
metric calls, and at equal seconds. A server with OpenAI's API answers the rollouts, so that obedience, interference of
constraints, dilution by length and noise are real; reflections and integrations are the simulated model's
(`benchmarks.scripted_reflection`). The score is the one on requests that neither training nor validation saw. An
interrupted command goes on where it stopped. `--alone` measures how often each constraint holds by itself instead.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import dspy

from benchmarks.measure import Bench, Figures
from benchmarks.methods import Limits, Method, Optimizer, Workload, method
from benchmarks.results import RESULTS, Result, commit, middle, read_results, shown, table, write_result
from benchmarks.runs import score_spread
from benchmarks.scripted_reflection import ScriptedReflection
from benchmarks.trajectory import Point, Recorder
from benchmarks.workloads.definition import Size
from benchmarks.workloads.house_style import INSTRUCTION, STYLE, Constraint, Metric, Writer, examples
from dspy_flashevolve.sim.profiles import PROFILES
from dspy_flashevolve.sim.reply_model import DEFAULT_MODEL, REPLY_MODELS, reply_model_named

METHODS = ("gepa", "combee-9", "async")
COLUMNS = (
    "method", "seeds", "true score (min-max)", "gain", "validated", "task tokens", "reflection tokens", "reflections",
    "proposals", "metric calls", "seconds",
)  # fmt: skip
ALONE_COLUMNS = ("constraint", "kind", "without it", "with it alone", "with all")


@dataclass(frozen=True)
class Setting:
    """What the runs of a command have in common.

    Attributes:
        api_base: The server.
        model: The task model's name there.
        size: Examples; the test examples are those of the true score.
        samples: Texts for each test example.
        max_tokens: Longest text.
        temperature: Of the texts.
        reflector: The simulated model that reflects and integrates.
        reflection_profile: The simulated backend whose lengths of replies and speed it has.
        reflection_pace: What the seconds of its replies are multiplied by; 0 for replies at once.
    """

    api_base: str = "http://127.0.0.1:8111/v1"
    model: str = "qwen05"
    size: Size = field(default_factory=lambda: Size(16, 16, 48))
    samples: int = 2
    max_tokens: int = 40
    temperature: float = 0.7
    reflector: str = DEFAULT_MODEL
    reflection_profile: str = "h100-qwen3-8b"
    reflection_pace: float = 1.0

    @property
    def words(self) -> str:
        """What tells its runs apart, for the results."""
        size = self.size
        return (
            f"{self.reflector} reflections at {self.reflection_pace:g} x the seconds of {self.reflection_profile}, "
            f"{size.train} + {size.val} examples, true score on {size.test} x {self.samples} texts "
            f"of up to {self.max_tokens} tokens at temperature {self.temperature:g}"
        )

    def lm(self) -> CountedLM:
        """The task model, without a cache."""
        return CountedLM(
            f"openai/{self.model}",
            api_base=self.api_base,
            api_key="none",
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            cache=False,
        )


@dataclass
class Tally:
    """What an LM and its copies were asked; a lost update of two threads would be one answer's tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Tally:
        return self

    def add(self, usage: Mapping[str, Any]) -> None:
        """Count an answer."""
        self.requests += 1
        self.prompt_tokens += usage.get("prompt_tokens") or 0
        self.completion_tokens += usage.get("completion_tokens") or 0


class CountedLM(dspy.LM):
    """An LM that counts; runs side by side on one server cannot be told apart by the server's counters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tally = Tally()

    def update_history(self, entry: dict[str, Any]) -> None:
        """dspy tells every answer here."""
        self.tally.add(entry["usage"])
        super().update_history(entry)


@dataclass
class CallMeter:
    """Reads what the two models were asked."""

    task: Tally
    reflection: ScriptedReflection

    def reset(self) -> None:
        """Nothing to set: a run has models of its own."""

    def read(self) -> Figures:
        """What was counted."""
        return Figures(**asdict(self.task), reflections=self.reflection.calls, reflection_tokens=self.reflection.tokens)


@dataclass
class Watched:
    """An optimizer whose validated texts and result are kept.

    Attributes:
        texts: Score on the whole validation set -> the first candidate's texts that had it.
        stats: AsyncGEPA's own, after the run.
    """

    texts: dict[float, dict[str, str]] = field(default_factory=dict[float, dict[str, str]])
    stats: Any = None
    _optimizer: Any = None

    def of(self, chosen: Method) -> Method:
        """The method, watched."""

        def build(workload: Workload, limits: Limits, recorder: Recorder) -> Optimizer:
            self._optimizer = chosen.build(workload, limits, recorder)
            self._optimizer.gepa_kwargs["callbacks"].append(self)
            return self

        return Method(chosen.name, build)

    def compile(self, student: dspy.Module, *, trainset: list[Any], valset: list[Any]) -> dspy.Module:
        """As the optimizer's."""
        program = self._optimizer.compile(student, trainset=trainset, valset=valset)
        self.stats = getattr(program, "async_stats", None)
        return program

    def on_valset_evaluated(self, event: Any) -> None:
        """gepa's callback."""
        if event["num_examples_evaluated"] == event["total_valset_size"]:
            self.texts.setdefault(float(event["average_score"]), dict(event["candidate"]))


@dataclass(frozen=True)
class Job:
    """A run to be made.

    Attributes:
        seed_true_score: The seed program's.
        details: A file that gets a line with the best texts, and AsyncGEPA's changes and integrations; `None` for none.
    """

    setting: Setting
    limits: Limits
    method: str
    seed_true_score: float | None = None
    details: Path | None = None

    @property
    def blank(self) -> Result:
        """The result without its figures."""
        limits = self.limits
        name = "real_model" if limits.seconds is None else f"real_model-{limits.seconds:g}s"
        return Result(name, self.method, self.setting.model, limits.seed, limits.slots, 0.0, 0.0,
                      call_limit=limits.metric_calls, settings=self.setting.words)  # fmt: skip

    def run(self) -> Result:
        """Make the run."""
        setting, limits, blank = self.setting, self.limits, self.blank
        model, task_lm, watched = reply_model_named(setting.reflector), setting.lm(), Watched()
        reflection = ScriptedReflection(model, setting.reflection_profile, limits.seed, setting.reflection_pace)
        bench = Bench(blank.benchmark, setting.model, CallMeter(task_lm.tally, reflection), setting.words)
        train, val, test = examples(setting.size, limits.seed)
        workload = Workload(Writer, train, val, Metric(model), task_lm, reflection.lm())
        result = bench.run(watched.of(method(self.method)), workload, limits)
        score = best_within_budget(result)
        result = replace(result, best_score=score, seed_true_score=self.seed_true_score)
        if score is None or result.error:
            return result
        texts = watched.texts[score]
        if score == result.seed_score:
            return replace(result, true_score=self.seed_true_score)
        if self.details is not None:
            self._write_details(self.details, result, texts, watched.stats)
        return replace(result, true_score=true_score(setting, texts["write"], test, limits.slots))

    def _write_details(self, path: Path, result: Result, texts: Mapping[str, str], stats: Any) -> None:
        own = {} if stats is None else {key: stats.to_dict()[key] for key in ("changes", "integrations", "end_reasons")}
        line = {"key": result.key, "texts": dict(texts), "trajectory": result.trajectory, **own}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def best_within_budget(result: Result) -> float | None:
    """The best fully validated score; with a budget, of the candidates that it paid for: an overshoot buys nothing."""
    if result.call_limit is None:
        return result.best_score
    points = [Point(*row) for row in result.trajectory]  # pyright: ignore[reportArgumentType]
    scores = [p.best_score for p in points if p.metric_calls <= result.call_limit and p.best_score is not None]
    return max(scores, default=result.seed_score)


def answers(setting: Setting, instruction: str, asked: Sequence[Any], threads: int) -> list[str]:
    """What the task model writes under an instruction."""
    logging.getLogger("dspy").setLevel(logging.CRITICAL)
    with dspy.context(lm=setting.lm()):
        evaluate = dspy.Evaluate(devset=list(asked), metric=lambda gold, pred: 0.0, num_threads=threads, max_errors=1)
        return [pred.text for _, pred, _ in evaluate(Writer(instruction)).results]


def true_score(setting: Setting, instruction: str, test: Sequence[Any], threads: int) -> float:
    """The mean share of constraints that hold over the test examples, each with several texts."""
    given = answers(setting, instruction, [one for one in test for _ in range(setting.samples)], threads)
    return sum(one.met(answer) for one in STYLE for answer in given) / (len(STYLE) * len(given))


def alone(setting: Setting, threads: int) -> list[list[str]]:
    """How often each constraint holds without an instruction, with its own only, and with those of all."""
    asked = [one for one in examples(setting.size, 0)[2] for _ in range(setting.samples)]
    wordings = [one.wordings[0] for one in STYLE]
    instructions = ["\n".join([INSTRUCTION, *lines]) for lines in ([], wordings, *([one] for one in wordings))]
    with ThreadPoolExecutor(max(1, threads // len(asked))) as pool:
        without, among_all, *own = pool.map(lambda text: answers(setting, text, asked, len(asked)), instructions)

    def share(constraint: Constraint, given: Sequence[str]) -> str:
        return f"{sum(map(constraint.met, given)) / len(given):.2f}"

    return [
        [one.wordings[0], one.kind, share(one, without), share(one, mine), share(one, among_all)]
        for one, mine in zip(STYLE, own, strict=True)
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_model", description=__doc__)
    usual = Setting()
    parser.add_argument("--api-base", default=usual.api_base, help="a server with OpenAI's API")
    parser.add_argument("--model", default=usual.model, help="the task model's name on the server")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="benchmarks/README.md names them")
    parser.add_argument("--calls", type=int, default=400, help="the equal number of metric calls; 0 to skip")
    parser.add_argument("--seconds", type=float, default=300.0, help="the equal seconds; 0 to skip")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them, to share them between servers")
    parser.add_argument("--slots", type=int, default=32, help="requests in flight at most")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side at equal calls; at equal seconds one")
    parser.add_argument("--train", type=int, default=usual.size.train, help="training examples")
    parser.add_argument("--val", type=int, default=usual.size.val, help="validation examples")
    parser.add_argument("--test", type=int, default=usual.size.test, help="examples of the true score")
    parser.add_argument("--samples", type=int, default=usual.samples, help="texts for each of these")
    parser.add_argument("--max-tokens", type=int, default=usual.max_tokens, help="longest text in tokens")
    parser.add_argument("--temperature", type=float, default=usual.temperature)
    parser.add_argument("--reflector", choices=list(REPLY_MODELS), default=usual.reflector, help="who reflects")
    parser.add_argument("--reflection-profile", choices=list(PROFILES), default=usual.reflection_profile,
                        help="the backend whose speed it has")  # fmt: skip
    parser.add_argument("--reflection-pace", type=float, default=usual.reflection_pace,
                        help="what its seconds are multiplied by; 0 for replies at once")  # fmt: skip
    parser.add_argument("--alone", action="store_true", help="measure each constraint by itself; no runs")
    parser.add_argument("--details", type=Path, help="a file that gets the best texts and AsyncGEPA's changes")
    parser.add_argument("--fresh", action="store_true", help="run again what the file has")
    parser.add_argument("--report", type=Path, help="print the tables of an earlier file; run nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "real_model.jsonl")
    options = parser.parse_args(arguments)
    try:
        for name in options.methods:
            method(name)
        options.setting = Setting(
            options.api_base, options.model, Size(options.train, options.val, options.test), options.samples,
            options.max_tokens, options.temperature, options.reflector, options.reflection_profile,
            options.reflection_pace,
        )  # fmt: skip
        examples(options.setting.size, 0)
    except ValueError as error:
        parser.error(str(error))
    return options


def planned(options: argparse.Namespace) -> list[Job]:
    """Every run; the methods take turns, so that what else the machine does meets all of them."""
    first = options.first_seed
    ends: list[tuple[float | None, int | None]] = [(None, options.calls)] if options.calls else []
    ends += [(options.seconds, None)] if options.seconds else []
    return [
        Job(options.setting, Limits(options.slots, seed, seconds, calls), name, details=options.details)
        for seconds, calls in ends
        for seed in range(first, first + options.seeds)
        for name in options.methods
    ]


def cells(results: Sequence[Result]) -> list[list[str]]:
    """A line a method: medians over the seeds."""
    lines: list[list[str]] = []
    for name in dict.fromkeys(result.method for result in results):
        mine = [result for result in results if result.method == name and not result.error]
        median = partial(middle, mine)
        lines.append([
            name,
            str(len(mine)),
            score_spread(mine),
            shown(median(lambda result: result.gain), "+.3f"),
            shown(median(lambda result: result.best_score), ".3f"),
            shown(median(lambda result: result.prompt_tokens + result.completion_tokens), ".0f"),
            shown(median(lambda result: result.reflection_tokens), ".0f"),
            shown(median(lambda result: result.reflections), ".0f"),
            shown(median(lambda result: result.proposals), ".0f"),
            shown(median(lambda result: result.metric_calls), ".0f"),
            shown(median(lambda result: result.seconds), ".0f"),
        ])  # fmt: skip
    return lines


def report(results: Sequence[Result]) -> str:
    """A table for each number of calls and of seconds."""
    tables: list[str] = []
    for setting in dict.fromkeys(result.setting for result in results):
        mine = [result for result in results if result.setting == setting]
        seed = middle(mine, lambda result: result.seed_true_score)
        limit = f"{setting.call_limit} metric calls" if setting.call_limit else setting.benchmark
        title = f"{limit} on {setting.backend}, {setting.slots} slots, {setting.settings}; seed {shown(seed, '.3f')}"
        tables.append(f"{title}\n{table(COLUMNS, cells(mine))}")
    return "\n\n".join(tables)


def made(jobs: Sequence[Job], side_by_side: int, out: Path) -> list[Result]:
    """Make the runs, and write down each as soon as it is there; runs at equal seconds one after the other."""
    alike = [job for job in jobs if side_by_side > 1 and job.limits.seconds is None]
    results: list[Result] = []

    def take(result: Result) -> None:
        write_result(out, result)
        results.append(result)
        print(f"{result.benchmark}, seed {result.seed}: {result.method}: {shown(result.score, '.3f')} {result.error}",
              flush=True)  # fmt: skip

    if alike:
        with ProcessPoolExecutor(side_by_side, mp_context=get_context("spawn")) as pool:
            for ended in as_completed([pool.submit(job.run) for job in alike]):
                take(ended.result())
    for job in jobs:
        if job not in alike:
            take(job.run())
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a run ended in an error."""
    options = parse(arguments)
    os.environ.setdefault("TQDM_DISABLE", "1")
    setting: Setting = options.setting
    if options.report is not None:
        print(report(read_results(options.report)))
        return 0
    if options.alone:
        print(table(ALONE_COLUMNS, alone(setting, options.slots)))
        return 0
    commit()  # before the code changes under a long run
    recorded = read_results(options.out) if options.out.is_file() else []
    there = {one.key: one for one in recorded if not one.error and not options.fresh}
    jobs = planned(options)
    left = [job for job in jobs if job.blank.key not in there]
    if left:
        known = (one.seed_true_score for one in recorded if one.settings == setting.words)
        seed = next((score for score in known if score is not None), None)
        if seed is None:
            seed = true_score(setting, INSTRUCTION, examples(setting.size, 0)[2], options.slots)
        left = [replace(job, seed_true_score=seed) for job in left]
    fresh = {one.key: one for one in made(left, options.jobs, options.out)}
    every = [(there | fresh)[job.blank.key] for job in jobs]
    problems = [f"{one.method}, seed {one.seed}: {one.error}" for one in every if one.error]
    print("\n".join(["", report(every), *problems]))
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
