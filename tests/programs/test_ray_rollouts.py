"""Rollouts in actors of Ray, on a local cluster. Every test has actors of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dspy
import pytest

from dspy_flashevolve import AsyncACE, AsyncGEPA, ConfigurationError, DspyRun, RunAbortedError
from dspy_flashevolve.engine.requests import Rollout
from dspy_flashevolve.engine.steps import End, EndKind, LiveSteps, Step
from dspy_flashevolve.programs.ray_rollouts import RayRollouts
from dspy_flashevolve.programs.settings import RunSettings
from tests.broken_server import BrokenServer
from tests.contract.surface import facts, problems, sql
from tests.fakes import Chain, digits, examples, fake_lm, reflection_lm, task_lm

pytest.importorskip("ray")
import ray

pytestmark = pytest.mark.ray

TRAIN, VAL = examples("t", 6), examples("v", 4)
ONE, TWO = RayRollouts(actors=1), RayRollouts(actors=2)
SECRET = "sk-verysecret0123456789"


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A local cluster; the folder of its logs."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    context = ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        logging_level="ERROR",
    )
    yield str(context.address_info["session_dir"])
    ray.shutdown()


def compiled(rollouts: RayRollouts | None, metric: Any = digits, program: Any = None, **options: Any) -> Any:
    settings: dict[str, Any] = {"max_metric_calls": 40, "num_threads": 4, "track_stats": True} | options
    settings.setdefault("reflection_lm", reflection_lm())
    optimizer = AsyncGEPA(metric, rollouts=rollouts, **settings)
    return optimizer.compile(program or Chain(), trainset=TRAIN, valset=VAL)


def made(count: int = 4, **options: Any) -> DspyRun:
    """A run with this number of slots, whose rollouts are made in one actor unless ``options`` say otherwise."""
    settings = RunSettings(**{"num_threads": count, "max_metric_calls": 99, "rollouts": ONE, **options})
    return DspyRun(name="a loop", stages={"work": [None]}, settings=settings)


def rolled(one: DspyRun, metric: Any, program: Any = None, data: Any = TRAIN) -> list[Rollout]:
    """The program as it is on each example, in one step."""
    runner, found = one.runner(program or Chain(), metric), list[Rollout]()

    async def step(step: Step) -> End:
        one.begin(step, 0)
        found.extend(await one.evaluate("work", step, runner, {}, data, traced=True))
        one.stop("all is done", "finished")
        return End(EndKind.COMMITTED)

    one.run_sync(lambda: one.evolve(step, LiveSteps(1, strict=True), calls_per_step=len(data)))
    return found


def is_gone(pid: int) -> bool:
    """Whether a process has ended, or does so soon."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


# Told before anything is paid.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"actors": 0}, "actors is 0, expected a whole number"),
        ({"actors": 1.5}, "actors is 1.5"),
        ({"actors": True}, "actors is True"),
        ({"cpus": -1}, "cpus is -1"),
    ],
)
def test_arguments_that_cannot_work_are_told(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        RayRollouts(**arguments)


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspy_flashevolve.programs.ray_rollouts.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'dspy-flashevolve\[ray\]'"):
        RayRollouts()


def test_only_ray_rollouts_make_rollouts() -> None:
    options: Any = {"rollouts": 3, "max_metric_calls": 9}
    with pytest.raises(ConfigurationError, match="rollouts is 3, expected a RayRollouts"):
        AsyncGEPA(digits, reflection_lm=reflection_lm(), **options)
    with pytest.raises(ConfigurationError, match="rollouts is 3, expected a RayRollouts"):
        AsyncACE(digits, **options)


def test_importing_the_package_does_not_import_ray() -> None:
    code = "import sys; from dspy_flashevolve.programs.ray_rollouts import RayRollouts; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Retrieving(Chain):
    """Holds a connection."""

    def __init__(self) -> None:
        super().__init__()
        self.retriever = {"client": threading.Lock()}


def locked_metric() -> Any:
    turn = threading.Lock()

    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> float:
        with turn:
            return 1.0

    return metric


@pytest.mark.parametrize(
    ("program", "metric", "said"),
    [
        (Retrieving(), digits, r"student\.retriever\.client cannot be pickled"),
        (Chain(), locked_metric(), r"metric\.turn cannot be pickled"),
    ],
)
def test_what_cannot_be_pickled_is_named_before_the_first_call(program: Any, metric: Any, said: str) -> None:
    asked: list[str] = []
    with (
        dspy.context(lm=fake_lm(lambda prompt: asked.append(prompt) or "")),
        pytest.raises(ConfigurationError, match=said),
    ):
        compiled(ONE, metric, program)
    assert not asked


def test_more_cpus_than_there_are_would_be_waited_for_for_ever(cluster: str) -> None:
    with pytest.raises(ConfigurationError, match="actors=3 with cpus=1 each, but there are 2 CPUs"):
        compiled(RayRollouts(actors=3))


class Gone(Chain):
    """Cannot be made again elsewhere."""

    def __setstate__(self, state: Any) -> None:
        raise ImportError("no module named 'users_module'")


def test_a_program_that_actors_cannot_load_is_told(cluster: str) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot load the program.*no module named 'users_module'"):
        compiled(ONE, program=Gone())


# The same as without.


def test_lockstep_through_ray_equals_lockstep_without(cluster: str) -> None:
    """Traces come back, or the proposals would not be the same; and so do tokens."""
    runs = [compiled(one, program=Chain(2), schedule="lockstep", max_metric_calls=70) for one in (None, TWO)]
    assert facts(runs[0].detailed_results) == facts(runs[1].detailed_results)
    assert len(runs[0].detailed_results.candidates) > 1
    assert runs[0].async_stats.tokens_by_stage == runs[1].async_stats.tokens_by_stage


def test_settings_traces_usage_and_outputs_are_those_of_the_caller(cluster: str) -> None:
    class Odd(Chain):
        async def aforward(self, question: str) -> dspy.Prediction:
            found = await super().aforward(question)
            return dspy.Prediction(answer=found.answer, held=threading.Lock())

    def metric(gold: Any, pred: Any, trace: Any) -> dspy.Prediction:
        adapter = type(dspy.settings.adapter).__name__
        return dspy.Prediction(score=1.0, feedback=f"{adapter} {dspy.settings.mine} {os.getpid()}")

    with dspy.context(adapter=dspy.JSONAdapter(), mine="a setting", lm=task_lm()):
        one = made()
        rollout = rolled(one, metric, Odd(), TRAIN[:1])[0]
    trace = rollout.trajectory["trace"]
    adapter, _, _, pid = rollout.trajectory["score"].feedback.split()
    assert (adapter, rollout.trajectory["example"] is TRAIN[0]) == ("JSONAdapter", True)
    assert int(pid) != os.getpid()
    assert [step[0].signature.instructions for step in trace] == [Chain().steps[0].signature.instructions]
    assert (trace[0][1], rollout.tokens) == ({"question": "t 0"}, 7)
    assert rollout.output.answer == trace[0][2].answer
    assert "lock object" in rollout.output.held  # it cannot be pickled
    assert one.budget.spent == 1


def test_ace_runs_its_rollouts_there_too(cluster: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def metric(gold: Any, pred: Any) -> float:
        with pids.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return 0.5

    optimizer = AsyncACE(metric, reflector_lm=task_lm(), curator_lm=task_lm(), num_threads=4, rollouts=ONE)
    optimizer.compile(Chain(), trainset=TRAIN[:2], valset=VAL[:2])
    found = pids.read_text().split()
    assert len(set(found)) == 1
    assert str(os.getpid()) not in found


# Faults.


def flagged(path: Path, question: str, act: Callable[[], None], times: int = 1) -> Any:
    """A metric that does something for one example, so many times over all processes."""

    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        if gold.question == question and pred_name is None:
            done = len(path.read_text()) if path.exists() else 0
            if done < times:
                with path.open("a") as file:
                    file.write("x")
                act()
        return digits(gold, pred)

    return metric


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_dies_costs_nothing_and_scores_nothing(cluster: str, tmp_path: Path) -> None:
    plain = rolled(made(rollouts=None), digits)
    one = made()
    found = rolled(one, flagged(tmp_path / "died", "t 2", die, times=2))
    assert [rollout.score for rollout in found] == [rollout.score for rollout in plain]
    assert (one.budget.spent, (tmp_path / "died").read_text()) == (len(TRAIN), "xx")


def test_a_metric_that_kills_its_process_three_times_is_a_failure_with_a_name(
    cluster: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = rolled(made(rollouts=None), digits)
    one = made()
    found = rolled(one, flagged(tmp_path / "died", "t 2", die, times=99))
    assert (tmp_path / "died").read_text() == "xxx"
    assert "ProcessDiedError: the process that ran the program and its metric has died 3 times" in found[2].error
    assert caplog.text.count("Example scored as a failure: ProcessDiedError") == 1
    others = [(rollout.score, plain[index].score) for index, rollout in enumerate(found) if index != 2]
    assert all(mine == theirs for mine, theirs in others)  # those that were beside it are no failures
    assert one.budget.spent == len(TRAIN)


def test_a_run_directory_counts_each_call_once_though_a_process_died(cluster: str, tmp_path: Path) -> None:
    metric = flagged(tmp_path / "died", "v 1", die)
    details = compiled(TWO, metric, log_dir=str(tmp_path / "run")).detailed_results
    assert not problems(tmp_path / "run")
    [(calls,)] = sql(tmp_path / "run", "SELECT SUM(calls) FROM calls")
    assert calls == details.total_metric_calls <= 40
    assert (tmp_path / "died").read_text() == "x"


def test_a_rate_limit_in_an_actor_frees_the_slot_and_is_counted_by_the_run(cluster: str) -> None:
    asked: list[str] = []

    def choose(prompt: str) -> str:
        asked.append(next(one.question for one in TRAIN if one.question in prompt))
        return "429" if asked.count("t 0") == 1 and asked[-1] == "t 0" else "good"

    with BrokenServer(choose) as server, dspy.context(lm=server.lm("chosen")):
        one = made(num_threads=None, max_concurrency=4)
        one.providers.chance = lambda: 1.0  # the longest backoff
        found = rolled(one, lambda gold, pred: float(pred.answer), data=TRAIN[:3])
    assert [rollout.score for rollout in found] == [5.0, 5.0, 5.0]
    assert asked.count("t 0") == 2
    assert asked[-1] == "t 0"  # others went on meanwhile
    assert one.providers.retried == 1


def test_a_refusal_for_good_ends_the_run_and_no_key_is_told(cluster: str, caplog: pytest.LogCaptureFixture) -> None:
    with (
        BrokenServer() as server,
        dspy.context(lm=server.lm(f"401-{SECRET}", api_key=SECRET)),
        pytest.raises(RunAbortedError, match="The LM provider refused") as refused,
    ):
        rolled(made(), digits)
    assert SECRET not in f"{refused.value} {caplog.text}"
    logs = [path for path in Path(cluster, "logs").rglob("*") if path.is_file()]
    assert logs
    assert not [path for path in logs if SECRET in path.read_text("utf-8", errors="ignore")]


def test_a_mistake_in_the_metric_ends_the_run_with_its_error(cluster: str) -> None:
    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> float:
        return gold.no_such_field

    with pytest.raises(AttributeError, match="no_such_field"):
        compiled(ONE, metric)

    def text(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        return "good"

    with pytest.raises(TypeError, match=r"metric .*text returned 'good' for the example"):
        compiled(ONE, text)


# Ends.


class Hanging(Chain):
    """Waits for ever on one example, once, and writes down what becomes of it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.began, self.ended = folder / "began", folder / "ended"

    async def aforward(self, question: str) -> dspy.Prediction:
        if question == "t 1" and not self.began.exists():
            self.began.write_text(str(os.getpid()))
            try:
                await asyncio.sleep(10**6)
            finally:
                self.ended.write_text("")
        return await super().aforward(question)


def until_there(path: Path) -> str:
    """The text of a file that is written by another process."""
    while not path.exists() or not path.read_text():
        time.sleep(0.05)
    return path.read_text()


def test_a_rollout_that_takes_too_long_is_ended_in_its_actor_and_not_paid(cluster: str, tmp_path: Path) -> None:
    one = made(rollout_timeout_seconds=3.0)
    found = rolled(one, digits, Hanging(tmp_path))
    assert [rollout.error for rollout in found] == [""] * len(TRAIN)
    assert (tmp_path / "ended").exists()
    assert one.requests.timed_out >= 1
    assert one.budget.spent == len(TRAIN)


class Blocking(Hanging):
    """Keeps its process from hearing anything, on one example, once."""

    async def aforward(self, question: str) -> dspy.Prediction:
        if question == "t 1" and not self.began.exists():
            self.began.write_text(str(os.getpid()))
            time.sleep(10**6)  # noqa: ASYNC251
        return await super().aforward(question)


def test_an_actor_that_does_not_hear_of_a_cancellation_is_ended(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspy_flashevolve.programs.ray_rollouts.CANCEL_SECONDS", 0.5)
    one = made(rollout_timeout_seconds=3.0)
    found = rolled(one, digits, Blocking(tmp_path))
    assert [rollout.error for rollout in found] == [""] * len(TRAIN)
    assert is_gone(int((tmp_path / "began").read_text()))
    assert one.budget.spent == len(TRAIN)


def test_a_ray_that_the_run_has_started_ends_with_it(tmp_path: Path) -> None:
    code = f"""
import dspy, ray
from pathlib import Path
from dspy_flashevolve import AsyncGEPA
from dspy_flashevolve.programs.ray_rollouts import RayRollouts
from dspy_flashevolve.programs.settings import RunSettings
from tests.programs.test_ray_rollouts import Hanging, TRAIN, digits, reflection_lm, task_lm
dspy.configure(lm=task_lm())
optimizer = AsyncGEPA(digits, max_metric_calls=30, reflection_lm=reflection_lm(), rollouts=RayRollouts(actors=1))
try:
    optimizer.compile(Hanging(Path({str(tmp_path)!r})), trainset=TRAIN)
finally:
    print("initialized:", ray.is_initialized())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    pid = int(until_there(tmp_path / "began"))
    for _ in range(2):  # as a terminal does: to the whole group of processes
        assert Path(f"/proc/{pid}").exists()
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(1)
    said, complaint = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in complaint
    assert "initialized: False" in said
    assert is_gone(pid)


NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}
"""Ray's client sends one only where it is told to."""


@pytest.fixture
def head() -> Iterator[str]:
    """A cluster of processes of its own, as clients from outside reach it."""
    pytest.importorskip("grpc", reason="needs ray[client]")
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # pytest's own is too long a path for Ray's sockets
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            ports = {"--port": one.getsockname()[1], "--ray-client-server-port": other.getsockname()[1]}
        command = [
            str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=2",
            "--object-store-memory=100000000", "--include-dashboard=false", "--node-ip-address=127.0.0.1",
            f"--temp-dir={folder}", *(f"{name}={port}" for name, port in ports.items()),
        ]  # fmt: skip
        with (Path(folder) / "said").open("w") as said:
            env = os.environ | NO_TOKEN | {"PYTHONPATH": str(Path(__file__).parents[2])}
            process = subprocess.Popen(command, env=env, stdout=said, stderr=said, start_new_session=True)
        try:
            while "Ray runtime started" not in (Path(folder) / "said").read_text():
                assert process.poll() is None, (Path(folder) / "said").read_text()
                time.sleep(0.1)
            yield f"ray://127.0.0.1:{ports['--ray-client-server-port']}"
        finally:
            process.terminate()
            process.wait()


def test_a_run_reaches_a_cluster_from_outside_and_leaves_no_actor_there(head: str, tmp_path: Path) -> None:
    code = f"""
import dspy, os
from dspy_flashevolve import AsyncGEPA
from dspy_flashevolve.programs.ray_rollouts import RayRollouts
from dspy_flashevolve.programs.settings import RunSettings
from tests.programs.test_ray_rollouts import Chain, TRAIN, VAL, digits, reflection_lm, task_lm
def metric(example, prediction, *rest):
    open({str(tmp_path)!r} + f"/{{os.getpid()}}", "w").close()
    return digits(example, prediction, *rest)
optimizer = AsyncGEPA(metric, max_metric_calls=60, num_threads=4, track_stats=True, log_dir={str(tmp_path / "run")!r},
                      reflection_lm=reflection_lm(), rollouts=RayRollouts({head!r}, actors=2))
with dspy.context(lm=task_lm()):
    stats = optimizer.compile(Chain(), trainset=TRAIN, valset=VAL).async_stats
print(stats.outcome, stats.metric_calls, os.getpid())
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env=os.environ | NO_TOKEN,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ERROR" not in ran.stderr
    outcome, calls, pid = ran.stdout.split()
    assert (outcome, problems(tmp_path / "run")) == ("finished", [])
    assert sql(tmp_path / "run", "SELECT sum(calls) FROM calls") == [(int(calls),)]
    assert len(pids := {one.name for one in tmp_path.iterdir() if one.name.isdigit()} - {pid}) == 2
    assert all(is_gone(int(one)) for one in pids)


@pytest.mark.slow
def test_a_node_that_is_killed_in_the_middle_costs_no_budget_and_no_score(tmp_path: Path) -> None:
    """A cluster of two nodes, in a process of its own: this one may have another."""
    out = tmp_path / "found.jsonl"
    command = [sys.executable, *f"-m benchmarks.ray_rollouts --parts nodes --budget 120 --out {out}".split()]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], timeout=600)
    found = json.loads(out.read_text())
    assert found["nodes"] == [2, 1]
    assert 0 < found["calls_when_killed"] < found["rows"]
    assert (found["twice"], found["wrong"]) == (0, 0)
    assert found["rows"] == found["paid"] == found["spent"] <= 120
