"""Optimizers side by side on real rows, judged on a test set that no search sees: `python -m benchmarks.run`.

    python -m benchmarks.run ifbench --task-model openai/gpt-4o-mini --reflection-model openai/gpt-5 \\
        --methods gepa combee async

A run ends after `--calls` metric calls, after `--seconds`, or else with the budget that `dspy.GEPA` has for
`auto="light"`. Any name of a model that litellm knows will do, with its key in the environment; `--task-base` and
`--reflection-base` name a server with OpenAI's API. `--task-model text-student` is a model that knows only what its
prompt says (`benchmarks.text_student`), and `--reflection-model file:FOLDER` one whose replies are files
(`benchmarks.file_lm`). Each run appends a line to `--out`, with the validated candidates whole; a command that was
interrupted goes on with the runs that the file lacks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import dspy
from dspy.teleprompt.gepa.gepa import AUTO_RUN_SETTINGS
from dspy.teleprompt.gepa.instruction_proposal import InstructionProposer

from benchmarks.backends import NO_KEY
from benchmarks.file_lm import FileModel
from benchmarks.local_http import serving
from benchmarks.measure import silence
from benchmarks.methods import Limits, Method, Workload, gepa_arguments, method
from benchmarks.results import RESULTS, append_json_lines, commit, shown, table
from benchmarks.text_student import TextStudent, all_examples
from benchmarks.trajectory import Recorder
from benchmarks.workloads import symptom2disease_coded
from benchmarks.workloads.definition import Definition, NamedWorkload
from benchmarks.workloads.registry import definition_named, workload_names
from benchmarks.workloads.rows import RowsMissing

METHODS = ("gepa", "gepa-independent-5", "combee-9", "async")
ALIASES = {"combee": "combee-9"}
"""Short names of methods, as they are typed; rows have the full ones."""
EDITS = "gepa-edits"
"""dspy.GEPA with AsyncGEPA's proposer, which asks for edits."""
PLAYBOOKS = {"ace": "async", "ace-lockstep": "lockstep"}
"""AsyncACE, and ACE's reference loop: the reflection model is its reflector and its curator."""
STUDENT = "text-student"
FILE = "file:"
COLUMNS = (
    "method", "runs", "test (standard error)", "mean", "validated", "metric calls", "seconds", "reflections",
    "task tokens", "reflection tokens", "reflection characters", "dollars",
)  # fmt: skip
COUNTED = ("calls", "seconds", "reflections")
READ_AND_WRITTEN = ("task_tokens", "reflection_tokens", "reflection")
"""Figures of which a row has two: NAME_read and NAME_written."""


@dataclass(frozen=True)
class Setting:
    """What the runs of a command have in common.

    Attributes:
        workload: Its name in `benchmarks.workloads.registry`.
        task_model, reflection_model: litellm's names, or this module's own.
        task_base, reflection_base: Servers with OpenAI's API; None where litellm knows the address.
        task_tokens, reflection_tokens: Longest replies.
        temperature: Of the task model.
        reply_seconds: Of the text student, about.
        slots: Requests in flight at most.
        calls, seconds: Limits of a run, in metric calls and in seconds; None for no limit. Without both, a run has the
            calls that `dspy.GEPA` has for `auto="light"`.
        train, val, test: Sizes; None for the workload's own.
    """

    workload: str
    task_model: str
    reflection_model: str
    task_base: str | None = None
    reflection_base: str | None = None
    task_tokens: int = 1024
    reflection_tokens: int = 32000
    temperature: float = 0.0
    reply_seconds: float = 1.0
    slots: int = 16
    calls: int | None = None
    seconds: float | None = None
    train: int | None = None
    val: int | None = None
    test: int | None = None

    @property
    def words(self) -> str:
        """What tells its runs apart, for the results."""
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items() if value is not None)


@dataclass
class Tally:
    """What a model was asked by a run, in whatever thread.

    Attributes:
        requests: How many.
        read, written: Characters.
        tokens_read, tokens_written: By the usage that replies report; those without one count nothing.
        dollars: By litellm's prices.
    """

    requests: int = 0
    read: int = 0
    written: int = 0
    tokens_read: int = 0
    tokens_written: int = 0
    dollars: float = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Tally:
        return self


class TalliedLM(dspy.LM):
    """A dspy.LM that counts its requests, the characters and tokens read and written, and their price."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tally = Tally()

    def update_history(self, entry: dict[str, Any]) -> None:
        """Count a request; dspy tells each of them here."""
        tally, messages = self.tally, entry.get("messages") or [{"content": entry.get("prompt") or ""}]
        tally.requests += 1
        tally.read += sum(len(str(message.get("content") or "")) for message in messages)
        tally.written += sum(len(str(output)) for output in entry.get("outputs") or ())
        usage = entry.get("usage") or {}
        tally.tokens_read += usage.get("prompt_tokens") or 0
        tally.tokens_written += usage.get("completion_tokens") or 0
        tally.dollars += entry.get("cost") or 0.0
        super().update_history(entry)


@dataclass(frozen=True)
class Candidate:
    """A candidate that was validated."""

    validated: float
    test: float | None
    texts: dict[str, str]


@dataclass(frozen=True)
class Run:
    """What a run leaves.

    Attributes:
        setting: See `Setting.words`.
        test, test_error: Mean score of the returned program on the test set, and its standard error.
        validated: Of the returned program.
        calls, seconds: Spent by the search, as are tokens and dollars; what the test costs is not counted.
        reflections, reflection_read, reflection_written: Requests of the reflection model, and their characters.
        task_tokens_read, task_tokens_written: Of the task model, by the usage that its replies report.
        reflection_tokens_read, reflection_tokens_written: Of the reflection model, likewise.
        dollars: Of both models, by litellm's prices; 0 for models without one.
        candidates: The validated ones in their order; the seed is the first.
        returned: The texts of the returned program.
        summary: AsyncGEPA's own.
    """

    setting: str
    workload: str
    method: str
    seed: int
    test: float = math.nan
    test_error: float = math.nan
    validated: float = math.nan
    calls: int = 0
    seconds: float = 0.0
    reflections: int = 0
    reflection_read: int = 0
    reflection_written: int = 0
    task_tokens_read: int = 0
    task_tokens_written: int = 0
    reflection_tokens_read: int = 0
    reflection_tokens_written: int = 0
    dollars: float = 0.0
    candidates: list[Candidate] = field(default_factory=list[Candidate])
    returned: dict[str, str] = field(default_factory=dict[str, str])
    summary: str = ""
    error: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        """What the run was to be."""
        return self.setting, self.method, self.seed


def definition_of(setting: Setting, name: str, seed: int) -> Definition:
    """The workload; where it has codes, each method and seed has its own.

    So whoever answers the reflections of several runs learns nothing from one for another.
    """
    if setting.workload == "symptom2disease-coded":
        return symptom2disease_coded.definition(f"{name} {seed}")
    return definition_named(setting.workload)


def chosen(name: str) -> Method:
    """The method of that name, `gepa-edits` and ACE's among them; raises `ValueError` for a name that is none."""
    if name in PLAYBOOKS:
        return Method(name, partial(_playbooks, PLAYBOOKS[name]))
    if name != EDITS:
        return method(name)

    def build(workload: Workload, limits: Limits, recorder: Recorder) -> Any:
        from dspy_flashevolve.gepa.propose import EditProposer

        proposer = EditProposer(InstructionProposer())
        return dspy.GEPA(**gepa_arguments(workload, limits, recorder), instruction_proposer=proposer)

    return Method(EDITS, build)


def _playbooks(schedule: Any, workload: Workload, limits: Limits, recorder: Recorder) -> Any:
    from benchmarks.ace_runs import EPOCHS
    from dspy_flashevolve import AsyncACE

    return AsyncACE(
        workload.metric,
        reflector_lm=workload.reflection_lm,
        curator_lm=workload.reflection_lm,
        epochs=EPOCHS,
        num_threads=limits.slots,
        schedule=schedule,
        max_metric_calls=limits.metric_calls,
        max_seconds=limits.wall_seconds,
        seed=limits.seed,
    )


@contextmanager
def models(setting: Setting, definition: Definition, name: str, seed: int) -> Iterator[tuple[TalliedLM, TalliedLM]]:
    """The task model and the reflection model of one run."""
    with ExitStack() as stack:
        task, task_base = setting.task_model, setting.task_base
        if task == STUDENT:
            student = TextStudent(all_examples(definition.pools()), setting.reply_seconds)
            task, task_base = "openai/text-student", stack.enter_context(serving(student.reply))
        reflection, reflection_base = setting.reflection_model, setting.reflection_base
        if reflection.startswith(FILE):
            budget = f"{setting.calls or 0}c{setting.seconds or 0:g}s"
            folder = Path(reflection.removeprefix(FILE)) / f"{setting.workload}-{name}-{seed}-{budget}"
            reflection, reflection_base = "openai/file", stack.enter_context(serving(FileModel(folder).reply))
        where: dict[str, Any] = {"cache": False}
        task_lm = TalliedLM(
            task, temperature=setting.temperature, max_tokens=setting.task_tokens, **where, **_endpoint(task_base)
        )
        reflection_lm = TalliedLM(
            reflection, temperature=1.0, max_tokens=setting.reflection_tokens, timeout=7200, **where,
            **_endpoint(reflection_base),
        )  # fmt: skip
        yield task_lm, reflection_lm


def _endpoint(base: str | None) -> dict[str, str]:
    return {} if base is None else {"api_base": base, "api_key": os.environ.get("OPENAI_API_KEY", NO_KEY)}


def run(setting: Setting, name: str, seed: int) -> Run:
    """Make a run, and judge its program on the test set."""
    blank = Run(setting.words, setting.workload, name, seed)
    definition = definition_of(setting, name, seed)
    sizes = (setting.train, setting.val, setting.test)
    own = definition.size
    size = type(own)(
        *(given if given is not None else usual for given, usual in zip(sizes, vars(own).values(), strict=True))
    )
    drawn = definition.drawn(size, seed)
    with models(setting, definition, name, seed) as (task_lm, reflection_lm):
        workload = drawn.served(task_lm, reflection_lm)
        calls = setting.calls
        if calls is None and setting.seconds is None:
            calls = light_budget(drawn, reflection_lm)
        limits = Limits(setting.slots, seed, setting.seconds, calls)
        recorder = Recorder()
        began = time.monotonic()
        try:
            optimizer = chosen(name).build(workload, limits, recorder)
            with silence(), dspy.context(lm=task_lm):
                program = optimizer.compile(workload.program(), trainset=workload.trainset, valset=workload.valset)
        except Exception as error:
            return _with(blank, seconds=time.monotonic() - began, error=f"{type(error).__name__}: {error}")
        seconds = time.monotonic() - began
        answered, asked = replace(task_lm.tally), replace(reflection_lm.tally)  # as they are before the test
        judge = partial(judged, drawn.testset, drawn.metric, task_lm, setting.slots)
        returned = texts_of(program)
        candidates = validated(program, judge if setting.task_model == STUDENT else None)
        test = judge(program)
        stats = getattr(program, "async_stats", None)
        return _with(
            blank,
            test=sum(test) / len(test),
            test_error=standard_error(test),
            validated=max(candidate.validated for candidate in candidates),
            calls=stats.metric_calls if name in PLAYBOOKS else recorder.trajectory.end.metric_calls,
            seconds=seconds,
            reflections=asked.requests,
            reflection_read=asked.read,
            reflection_written=asked.written,
            task_tokens_read=answered.tokens_read,
            task_tokens_written=answered.tokens_written,
            reflection_tokens_read=asked.tokens_read,
            reflection_tokens_written=asked.tokens_written,
            dollars=answered.dollars + asked.dollars,
            candidates=candidates,
            returned=returned,
            summary="" if stats is None else str(stats),
        )


def validated(program: Any, judge: Callable[[Any], list[float]] | None) -> list[Candidate]:
    """The validated candidates of a run; a validated playbook of ACE without its texts, which are not kept."""
    if not hasattr(program, "detailed_results"):
        return [Candidate(snapshot.score, None, {}) for snapshot in program.async_stats.snapshots]
    results = program.detailed_results
    return [
        Candidate(score, mean(judge(candidate)) if judge is not None else None, texts_of(candidate))
        for candidate, score in zip(results.candidates, results.val_aggregate_scores, strict=True)
    ]


def light_budget(workload: NamedWorkload, reflection_lm: dspy.LM) -> int:
    """The metric calls that `dspy.GEPA` has for `auto="light"`, so that every method has as many."""
    optimizer = dspy.GEPA(workload.metric, auto="light", reflection_lm=reflection_lm)
    return optimizer.auto_budget(len(workload.outputs), AUTO_RUN_SETTINGS["light"]["n"], len(workload.valset))


def _with(blank: Run, **figures: Any) -> Run:
    return Run(blank.setting, blank.workload, blank.method, blank.seed, **figures)


def texts_of(program: Any) -> dict[str, str]:
    """Predictor -> instruction."""
    return {name: predictor.signature.instructions for name, predictor in program.named_predictors()}


def judged(
    examples: Sequence[dspy.Example], metric: Callable[..., Any], lm: dspy.LM, slots: int, program: dspy.Module
) -> list[float]:
    """A program's scores on test examples."""
    with silence(), dspy.context(lm=lm.copy()):
        evaluate = dspy.Evaluate(devset=list(examples), metric=metric, num_threads=slots, max_errors=len(examples))
        return [float(getattr(score, "score", score)) for _, _, score in evaluate(program).results]


def mean(scores: Sequence[float] | None) -> float | None:
    """The mean of some scores; None for none."""
    return sum(scores) / len(scores) if scores else None


def made(setting: Setting, missing: Sequence[tuple[str, int]], jobs: int) -> Iterator[Run]:
    """Make the runs of these methods and seeds, each as it ends; `jobs` of them side by side, in processes."""
    if jobs == 1:
        yield from (run(setting, name, seed) for name, seed in missing)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run, setting, name, seed) for name, seed in missing]):
            yield future.result()


def standard_error(scores: Sequence[float]) -> float:
    """Of the mean of some scores."""
    centre = sum(scores) / len(scores)
    variance = sum((score - centre) ** 2 for score in scores) / max(1, len(scores) - 1)
    return math.sqrt(variance / len(scores))


def told(result: Run) -> str:
    """A run in a line."""
    if result.error:
        return f"{result.method}, seed {result.seed}: {result.error}"
    read, written = result.task_tokens_read, result.task_tokens_written
    return (
        f"{result.method}, seed {result.seed}: test {result.test:.3f} (standard error {result.test_error:.3f}), "
        f"validated {result.validated:.3f}, {result.calls} calls, {result.seconds:.0f} s, "
        f"task tokens {read}/{written} (read/written), {result.reflections} reflections with tokens "
        f"{result.reflection_tokens_read}/{result.reflection_tokens_written}, ${result.dollars:.4f}"
    )


def cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A line a method; a dash where its rows lack a figure, as those of older commits lack tokens."""
    lines: list[list[str]] = []
    for name in dict.fromkeys(row["method"] for row in rows):
        mine = sorted((row for row in rows if row["method"] == name and not row["error"]), key=lambda row: row["seed"])

        def average(key: str, mine: Sequence[Mapping[str, Any]] = mine) -> float | None:
            return mean([row[key] for row in mine if key in row])

        def both(key: str, average: Callable[[str], float | None] = average) -> str:
            return f"{shown(average(f'{key}_read'), '.0f')}/{shown(average(f'{key}_written'), '.0f')}"

        lines.append([
            name,
            str(len(mine)),
            " ".join(f"{row['test']:.3f} ({row['test_error']:.3f})" for row in mine),
            shown(average("test"), ".3f"),
            shown(average("validated"), ".3f"),
            *(shown(average(key), ".0f") for key in COUNTED),
            *map(both, READ_AND_WRITTEN),
            shown(average("dollars"), ".4f"),
        ])  # fmt: skip
    return lines


LABELS = {
    "ace": "AsyncACE", "ace-lockstep": "ACE", "gepa-independent-5": "five at once", "gepa": "dspy.GEPA",
    "combee-9": "Combee", "async": "AsyncGEPA",
}  # fmt: skip


def picture(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the test score of each run, a column a method with its mean; the ending of the path says the format."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 2.6), layout="constrained")
    axes = figure.subplots()
    names = [name for name in LABELS if any(row["method"] == name for row in rows)]
    for place, name in enumerate(names):
        scores = [row["test"] for row in rows if row["method"] == name and not row["error"]]
        color = "#1f6f43" if name == "async" else "#8a8a8a"
        axes.scatter(scores, [place] * len(scores), color=color, alpha=0.5, s=28)
        axes.plot([mean(scores)] * 2, [place - 0.3, place + 0.3], color=color, linewidth=3)
        axes.annotate(f"{mean(scores):.2f}", (mean(scores) or 0.0, place + 0.34), ha="center", fontsize=10, color=color)
    axes.set_yticks(range(len(names)), [LABELS[name] for name in names])
    axes.set_ylim(-0.6, len(names) - 0.2)
    axes.set_xlim(left=0)
    axes.set_xlabel("test accuracy of each run; the bar is the mean")
    axes.spines[["top", "right"]].set_visible(False)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "runs"}):  # words stay words; equal rows, equal file
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=workload_names())
    parser.add_argument("--task-model", default=STUDENT, help="litellm's name, or text-student")
    parser.add_argument("--task-base", help="the task model's server, as in http://127.0.0.1:8000/v1")
    parser.add_argument("--reflection-model", required=True, help="litellm's name, or file:FOLDER")
    parser.add_argument("--reflection-base", help="the reflection model's server")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=list(METHODS),
        help=f"benchmarks/README.md names them; {EDITS}; combee is combee-9",
    )
    parser.add_argument(
        "--calls", type=int, help="budget of metric calls of a run; without --seconds, GEPA's 'light' one"
    )
    parser.add_argument("--seconds", type=float, help="time limit of a run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="the seeds themselves")
    parser.add_argument("--slots", type=int, default=16, help="requests in flight at most")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side; their seconds say nothing then")
    for name in ("train", "val", "test"):
        parser.add_argument(f"--{name}", type=int, help="examples; default the workload's own number")
    parser.add_argument("--task-tokens", type=int, default=1024, help="longest reply of the task model")
    parser.add_argument("--reflection-tokens", type=int, default=32000, help="longest reply of the reflection model")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the task model")
    parser.add_argument("--reply-seconds", type=float, default=1.0, help="of the text student")
    parser.add_argument("--out", type=Path, default=RESULTS / "run.jsonl")
    parser.add_argument("--report", action="store_true", help="print the table of what the file has; run nothing")
    parser.add_argument("--picture", type=Path, help="with --report: draw the test scores into this file (.svg, .png)")
    options = parser.parse_args(arguments)
    options.methods = list(dict.fromkeys(ALIASES.get(name, name) for name in options.methods))
    if options.task_model == STUDENT and options.workload != "symptom2disease-coded":
        parser.error("the text student knows the workload symptom2disease-coded alone")
    try:
        for name in options.methods:
            chosen(name)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; 1 when a run ended in an error or rows are missing."""
    options = parse(arguments)
    os.environ.setdefault("TQDM_DISABLE", "1")
    names = Setting.__dataclass_fields__
    setting = Setting(**{name: value for name, value in vars(options).items() if name in names})
    commit()  # before the code changes under a long run
    lines = options.out.read_text(encoding="utf-8").splitlines() if options.out.is_file() else []
    rows = [json.loads(line) for line in lines]
    mine = [row for row in rows if row["setting"] == setting.words]
    there = {(row["method"], row["seed"]) for row in mine if not row["error"]}
    missing = [pair[::-1] for pair in product(options.seeds, options.methods) if pair[::-1] not in there]
    if options.report:
        missing = []
    failed = False
    try:
        for result in made(setting, missing, options.jobs):
            append_json_lines(options.out, [asdict(result)])
            mine.append(asdict(result))
            failed |= bool(result.error)
            print(told(result), flush=True)
    except (RowsMissing, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.picture is not None:
        picture([row for row in mine if row["seed"] in options.seeds], options.picture)
    print(
        f"\n{setting.words}\n{table(COLUMNS, cells(mine))}\nTokens and characters: read/written, by the search alone."
    )
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
