"""Files of a run directory that somebody else wrote, or may read: nothing in them runs, and each error is ours."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import pickle
import random
import shutil
import sqlite3
import stat
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import dspy
import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, RootModel

from dspy_flashevolve import AsyncGEPA, ConfigurationError, FlashEvolveError, RunAbortedError
from tests.contract.surface import command, problems
from tests.contract.test_meta_harness import search
from tests.contract.test_run_directory import compiled
from tests.fakes import Chain, digits, fake_lm, hashed, reflection_lm, reply_for, task_lm


def same_file(examples: int) -> Any:
    """A property whose examples write the same file, one after the other."""
    return settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def reflection_lm_that(writes: Callable[[int], str]) -> dspy.LM:
    """Writes a text of a number that depends on the whole prompt."""
    return fake_lm(lambda prompt: reply_for(prompt, new_instruction=writes(hashed(prompt) % 100_000)))


# A checkpoint of gepa's, which is a pickle


CALLED: list[str] = []
"""Names of what a pickle has called; nothing is ever called."""


def called(*arguments: Any, **options: Any) -> Any:
    CALLED.append("a function")


def noted(name: str, result: Any = None) -> Any:
    """A method that notes that it was called."""

    def method(*arguments: Any, **options: Any) -> Any:
        CALLED.append(name)
        return result

    return method


class Watching(type):
    """A class that notes it when it is called, written to or subscribed."""

    __call__ = noted("()")
    __setattr__ = noted("=")
    __class_getitem__ = noted("[]")


class Watched:
    """Every special method that a pickle could reach."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        CALLED.append(f"{cls.__name__}.__new__")
        return object.__new__(cls)

    __init__ = noted("__init__")
    __class_getitem__ = noted("__class_getitem__")
    __setattr__ = noted("__setattr__")
    __setstate__ = noted("__setstate__")
    __hash__ = noted("__hash__", 1)
    __del__ = noted("__del__")
    append = extend = add = update = __setitem__ = noted("append")


@dataclass(init=False, unsafe_hash=False)
class WatchedData(Watched, metaclass=Watching):
    field: Any = None


@dataclass
class Guarded:
    """Plain data, whose construction is code."""

    field: Any = None
    __post_init__ = noted("__post_init__")
    __hash__ = noted("__hash__", 1)
    append = extend = add = update = __setitem__ = noted("append")


class GuardedModel(BaseModel):
    field: Any = None
    model_post_init = noted("model_post_init")
    __class_getitem__ = noted("__class_getitem__")
    __hash__ = noted("__hash__", 1)


class GuardedExample(dspy.Example):
    __init__ = noted("__init__")


class GuardedPair(NamedTuple("Pair", [("left", Any), ("right", Any)])):
    def __new__(cls, *arguments: Any) -> Any:
        CALLED.append("__new__")
        return tuple.__new__(cls, arguments)

    __hash__ = noted("__hash__", 1)


class GuardedChoice(Enum):
    ONE = "one"

    @classmethod
    def _missing_(cls, value: Any) -> Any:
        CALLED.append("_missing_")


HERE = __name__
NAMES = [
    *((HERE, name) for name in ("called", "Watched", "WatchedData", "Guarded", "GuardedModel", "GuardedExample",
                                "GuardedPair", "GuardedChoice", "Watched.append", "CALLED.append")),
    ("dspy", "Signature"), ("dspy", "Example"), ("dspy.signatures.signature", "Signature"), ("pydantic", "RootModel"),
    ("pydantic.root_model", "RootModel.__class_getitem__"), ("pydantic", "BaseModel.model_validate"),
    ("builtins", "exec"), ("builtins", "getattr"), ("builtins", "set"), ("builtins", "list"), ("builtins", "bytearray"),
    ("_operator", "getitem"), ("operator", "attrgetter"), ("functools", "partial"), ("copyreg", "_reconstructor"),
    ("collections", "defaultdict"), ("collections", "Counter"), ("collections", "OrderedDict"),
    ("collections", "deque"), ("datetime", "date"), ("datetime", "datetime"), ("datetime", "timedelta"),
    ("fractions", "Fraction"), ("decimal", "Decimal"), ("uuid", "UUID"), ("numpy", "dtype"), ("numpy", "ndarray"),
    ("numpy._core.multiarray", "scalar"), ("numpy._core.multiarray", "_reconstruct"),
    ("gepa.core.state", "EvaluationCache"), ("dspy.primitives.prediction", "Prediction"),
    ("dspy.primitives.prediction", "Completions"),
]  # fmt: skip
"""What crafted pickles name: what must not be called, the known ways in, and what genuine checkpoints name."""


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def by_stack(name: tuple[str, str]) -> bytes:
    return text(name[0]) + text(name[1]) + b"\x93"


def by_line(name: tuple[str, str]) -> bytes:
    return b"c" + f"{name[0]}\n{name[1]}\n".encode()


def by_instance(name: tuple[str, str]) -> bytes:
    return b"(" + text("x") + b"i" + f"{name[0]}\n{name[1]}\n".encode()


LITERALS = [
    b"N", b"\x88", b"K\x03", b"K\xff", b"J\xff\xff\xff\x7f", b"G" + struct.pack(">d", 0.5), text("x"), text("field"),
    text("a: str -> b"), text("f8"), text("O"), text("1e99999999"), b"C\x04\x07\xe4\x01\x01", b"C\x08" + bytes(8), b")",
    b"]", b"}", b"\x8f", b"(", b"0", b"2", b"h\x00", b"h\x01", b"\x94",
]  # fmt: skip
COMBINING = [
    b"a", b"(K\x01K\x02e", b"s", b"u", b"\x90", b"\x91", b"t", b"\x85", b"\x86", b"\x87", b"l", b"d", b"1", b"R",
    b"\x81", b"\x92", b"b", b"o", b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00", b"Q", b"P1\n", b"\x97",
    b"\x98", b"p7\n", b"q\x05", b"r\x05\x00\x00\x00", b"\x96" + struct.pack("<Q", 1 << 40),
]  # fmt: skip
"""What puts values on the stack, and what takes them from there; by number, since some have no name in `pickle`."""
forms = st.sampled_from([by_stack, by_line, by_instance])
named = st.builds(lambda form, name: form(name), forms, st.sampled_from(NAMES))
plain = st.sampled_from(LITERALS)
arguments = st.lists(plain, max_size=3).map(lambda parts: b"(" + b"".join(parts) + b"t")
attempts = st.one_of(
    st.builds(lambda name, given: by_stack(name) + given + b"R", st.sampled_from(NAMES), arguments),
    st.builds(lambda name, given: by_stack(name) + given + b"\x81", st.sampled_from(NAMES), arguments),
    st.builds(lambda name, given: by_stack(name) + given + b"}\x92", st.sampled_from(NAMES), arguments),
    st.builds(lambda name, given: b"(" + by_stack(name) + given + b"o", st.sampled_from(NAMES), arguments),
    st.builds(
        lambda name, ends, state: by_stack(name) + ends + state + b"b",
        st.sampled_from(NAMES), st.sampled_from([b"", b")\x81", b")R"]),
        st.sampled_from([b"}" + text("field") + b"K\x01s", b"N}" + text("field") + b"K\x01s\x86", b"}", b"]", b"N"]),
    ),
    st.builds(lambda name, end: by_stack(name) + b")\x81" + end, st.sampled_from(NAMES),
              st.sampled_from([b"K\x01a", b"K\x01K\x02s", b"(K\x01\x90", b"(K\x01e", b"K\x01\x86", b"}0"])),
)  # fmt: skip
"""Each way in which an instruction could call what a pickle names."""
STATE: dict[str, Any] = {
    "program_candidates": [{"steps[0]": "seed"}],
    "prog_candidate_val_subscores": [{0: 0.5}],
    "parent_program_for_candidate": [[None]],
    "num_metric_calls_by_discovery": [1],
    "total_num_evals": 1,
}
"""As much of gepa's state as the commands show."""


def with_inside(program: bytes) -> bytes:
    """A checkpoint that holds, in a list, whatever a program leaves on the stack; written as gepa writes it."""
    without_frame = pickle.dumps(STATE, 4)[11:-1]
    return b"\x80\x04" + without_frame + text("x") + program + b"s."


def reading(directory: Path, content: bytes) -> int:
    """The status of a command that reads the checkpoint, which has called nothing and has ended in one line."""
    (directory / "gepa_state.bin").write_bytes(content)
    CALLED.clear()
    status, _, complaint = command("lineage", str(directory))
    assert CALLED == []
    assert status in (0, 3), complaint
    assert len(complaint.splitlines()) == bool(status)
    return status


def test_the_checkpoint_that_the_others_are_made_of_is_read(tmp_path: Path) -> None:
    assert reading(tmp_path, with_inside(text("y"))) == 0
    assert reading(tmp_path, with_inside(b"]" + by_stack((HERE, "called")) + b")Ra")) == 3


mixes = st.lists(named | plain | st.sampled_from(COMBINING) | attempts, max_size=12).map(b"".join)


@same_file(60)
@given(attempts)
def test_no_instruction_of_a_pickle_calls_what_it_names(tmp_path: Path, attempt: bytes) -> None:
    reading(tmp_path, with_inside(attempt))


@same_file(30)
@given(mixes)
def test_no_mix_of_instructions_calls_anything_or_ends_in_an_error_of_another_kind(
    tmp_path: Path, program: bytes
) -> None:
    reading(tmp_path, with_inside(program))
    reading(tmp_path, b"\x80\x04" + program + b".")


@pytest.mark.long
@same_file(3000)
@given(attempts | mixes)
def test_no_long_search_finds_a_pickle_that_calls_anything(tmp_path: Path, program: bytes) -> None:
    reading(tmp_path, with_inside(program))


WAYS_IN = {
    "a class made by calling one": by_stack(("dspy", "Signature")) + text("a: str -> b") + b"\x85R",
    "a generic class made by subscribing one":
        by_stack(("pydantic", "RootModel")) + b"0" + by_stack(("pydantic.root_model", "RootModel.__class_getitem__"))
        + by_stack(("builtins", "int")) + b"\x85R",
    "an attribute of a class": by_stack((HERE, "Guarded")) + b"N}" + text("append") + b"K\x01s\x86b",
    "the attributes of a class": by_stack((HERE, "Guarded")) + b"}" + text("append") + b"K\x01sb",
    "an array": pickle.dumps(numpy.arange(3), 4)[11:-1],
    "an array of objects": pickle.dumps(numpy.array([None], dtype=object), 4)[11:-1],
    "a number of a forged type": pickle.dumps(numpy.float64(1), 4)[11:-1].replace(b"f8", b"O8"),
    "a number of more bytes than it has": pickle.dumps(numpy.float64(1), 4)[11:-1].replace(b"f8", b"f2"),
    "a key so deep that hashing it overflows the stack": b"}(" + b")" + b"\x85" * 300_000 + b"K\x01u",
    "a member of a set as deep": b"\x8f(" + b")" + b"\x85" * 300_000 + b"\x90",
    "a place in the memory beyond all others": b"Nr\xff\xff\xff\x7f",
    "a text of more characters than the file has": b"\x8d" + struct.pack("<Q", 1 << 62),
    "an instruction that no pickle has": b"\xff",
    "a number of more digits than Python writes": b"\x8b" + struct.pack("<i", 4000) + b"\x7f" * 4000,
}  # fmt: skip
"""Ways to run code or to end the interpreter, one by one."""
READ_ALL = """
import sys
from pathlib import Path
from tests.contract.test_foreign_files import STATE, WAYS_IN, reading, with_inside

for name, program in WAYS_IN.items():
    print(name, reading(Path(sys.argv[1]), with_inside(program)), flush=True)
"""


def test_no_known_way_in_is_open_and_none_ends_the_interpreter(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(tmp_path)], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    statuses = dict(line.rsplit(" ", 1) for line in ended.stdout.splitlines())
    harmless = "a number of more digits than Python writes"
    assert statuses == {name: "0" if name == harmless else "3" for name in WAYS_IN}


class Place(BaseModel):
    name: str
    near: list[Place] = []


class Names(RootModel[list[str]]):
    pass


@dataclass(frozen=True)
class Point:
    x: float
    y: float = 0.0


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Any


@dataclass(slots=True)
class Open:
    x: Any


class Pair(NamedTuple):
    left: Any
    right: Any


class Colour(Enum):
    RED = "red"


DATA: list[Any] = [
    None, True, 1, 2**70, -1.5, "text", b"bytes", [1, [2]], (1, (2,)), {"a": {1: 2}}, {1, 2}, frozenset({(1, "a")}),
    date(2020, 1, 2), datetime(2020, 1, 2, 3, tzinfo=timezone(timedelta(hours=1))), time(3, 4), timedelta(days=-1),
    Decimal("1.50"), Fraction(1, 3), UUID(int=5), OrderedDict(a=1), defaultdict(list, a=[1]), Counter("aab"),
    deque([1, 2], 3), numpy.float64(0.5), numpy.float32(0.25), numpy.int64(7), numpy.bool_(True), Colour.RED,
    Place(name="a", near=[Place(name="b")]), Names(["a"]), Point(1.0), Slotted([1]), Open((1,)), Pair(1, Point(2.0)),
    {Colour.RED: 1, (1, date(2020, 1, 1)): 2}, dspy.Example(question="q").with_inputs("question"),
    dspy.Prediction.from_completions([{"answer": "a"}, {"answer": "b"}]), dspy.Image("data:image/png;base64,aGVsbG8="),
    dspy.History(messages=[{"role": "user"}]),
]  # fmt: skip
"""What outputs of programs are made of."""


class Answering(Chain):
    """Returns something beside its answer."""

    def __init__(self, more: Any) -> None:
        super().__init__()
        self.more = more

    def forward(self, question: str) -> dspy.Prediction:
        return dspy.Prediction(answer=super().forward(question).answer, more=self.more)

    async def aforward(self, question: str) -> dspy.Prediction:
        return dspy.Prediction(answer=(await super().aforward(question)).answer, more=self.more)


def test_a_checkpoint_with_every_kind_of_data_is_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read once, by nothing that runs what is in a pickle."""
    student = Answering(DATA)
    options: dict[str, Any] = {"track_best_outputs": True, "gepa_kwargs": {"cache_evaluation": True}}
    compiled(tmp_path, student=student, **options)
    (tmp_path / "journal.sqlite").unlink()
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, called)
    CALLED.clear()
    details = compiled(tmp_path, 120, student=student, **options).detailed_results
    assert CALLED == []
    for outputs in details.best_outputs_valset.values():
        for more, expected in zip(outputs[0][1].more, DATA, strict=True):
            assert (type(more), repr(more)) == (type(expected), repr(expected))


def test_outputs_that_json_does_not_have_end_no_run(tmp_path: Path) -> None:
    """gepa writes the best outputs into the directory, those of the seed before anything else."""
    student, calls = Answering({(1, 2): "keys that are no text"}), [40, 150]
    first, again = (
        compiled(tmp_path, number, student=student, track_best_outputs=True).detailed_results for number in calls
    )
    assert again.total_metric_calls > first.total_metric_calls
    assert all(found[0][1].answer for found in again.best_outputs_valset.values())
    assert problems(tmp_path) == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (numpy.arange(3), "numpy"),
        (called, "called, which is no class for data"),
        (Watched, "Watched, which is no class for data"),
        ({Guarded(1)}, "has a Guarded where data has a str"),
    ],
)
def test_what_is_no_data_in_a_genuine_checkpoint_is_refused_with_what_to_do(
    tmp_path: Path, more: Any, message: str
) -> None:
    options: dict[str, Any] = {"student": Answering([more]), "track_best_outputs": True}
    compiled(tmp_path, **options)
    with pytest.raises(ConfigurationError, match=rf"{message}.* if you trust the file, .*use_cloudpickle"):
        compiled(tmp_path, 60, **options)
    assert compiled(tmp_path, 60, **options, gepa_kwargs={"use_cloudpickle": True}).detailed_results


@pytest.mark.parametrize(
    "change",
    [
        {"program_candidates": [{"steps[0]": 3}]},
        {"program_candidates": [{"another": "text"}]},
        {"prog_candidate_val_subscores": [{0: "high"}]},
        {"parent_program_for_candidate": [[0]]},
        {"program_at_pareto_front_valset": {0: {7}}},
        {"full_program_trace": None},
        {"full_program_trace": [{"step": 1}]},
        {"adapter_state": {"rng_state": (3, (1, 2), None)}},
        {"total_num_evals": "many"},
        {"validation_schema_version": "new"},
        {"adapter_state": []},
    ],
)
def test_a_checkpoint_that_is_data_and_no_state_of_gepas_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    compiled(tmp_path)
    path = tmp_path / "gepa_state.bin"
    path.write_bytes(pickle.dumps({**pickle.loads(path.read_bytes()), **change}))
    with pytest.raises(ConfigurationError, match=r"gepa_state.bin"):
        compiled(tmp_path, 60)


# Files that a run writes, and files that it finds


def modes_in(directory: Path) -> dict[str, int]:
    """Path -> mode of every file that is a file, and not a link to one."""
    paths = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(directory)): stat.S_IMODE(path.stat().st_mode) for path in paths}


@pytest.fixture
def open_mask() -> Iterator[None]:
    """Whatever a process makes, everybody may read and write, unless it says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_files_that_were_there_and_files_behind_links_stay_as_they_were(tmp_path: Path, open_mask: None) -> None:
    """The folder of a project, in which a run writes: its programs go on working."""
    outside, run = tmp_path / "outside", tmp_path / "project"
    for folder in (outside, run / "bin", run / "generated_best_outputs_valset"):
        folder.mkdir(parents=True)
    for path, mode in ((outside / "python", 0o755), (outside / "notes", 0o644), (run / "bin" / "run.sh", 0o755)):
        path.write_text(path.name)
        path.chmod(mode)
    (run / "bin" / "python").symlink_to(outside / "python")
    (run / "linked").symlink_to(outside)
    for name in ("candidates.json", "run_log.json.tmp", "gepa_state.bin.tmp", "journal.new", "candidate_tree.html"):
        (run / name).symlink_to(outside / "notes")
    before = {path: (path.read_text(), path.stat().st_mode) for path in (*outside.iterdir(), run / "bin" / "run.sh")}
    assert len(compiled(run, 80, track_best_outputs=True).detailed_results.candidates) > 1
    assert {path: (path.read_text(), path.stat().st_mode) for path in before} == before
    assert set(outside.iterdir()) == {path for path in before if path.parent == outside}
    ours = {name: mode for name, mode in modes_in(run).items() if not name.startswith("bin")}
    assert set(ours.values()) == {0o600}, ours
    assert {"candidates.json", "gepa_state.bin", "run_log.json", "candidate_tree.html", "journal.sqlite"} <= set(ours)


def test_a_link_in_the_place_of_a_lock_is_refused_and_what_is_behind_it_left(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "notes").chmod(0o644)
    (tmp_path / "journal.lock").symlink_to(tmp_path / "notes")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        compiled(tmp_path)
    assert (tmp_path / "notes").read_text() == "mine"
    assert modes_in(tmp_path) == {"notes": 0o644}


def test_no_file_of_a_run_is_ever_open_to_others_in_a_folder_that_is(tmp_path: Path, open_mask: None) -> None:
    """Not even between two checkpoints, and not SQLite's files either."""
    seen: dict[str, set[int]] = {}

    def look(*arguments: Any) -> Any:
        for name, mode in modes_in(tmp_path).items():
            seen.setdefault(name.split("/")[0], set()).add(mode)
        return digits(*arguments)

    compiled(tmp_path, 80, metric=look, track_best_outputs=True, schedule="lockstep")
    assert {"journal.sqlite-wal", "journal.sqlite-shm", "gepa_state.bin", "generated_best_outputs_valset"} <= set(seen)
    assert {name: modes for name, modes in seen.items() if modes != {0o600}} == {}


def test_sources_scores_and_traces_of_harnesses_are_open_to_nobody(tmp_path: Path, open_mask: None) -> None:
    search(log_dir=tmp_path, iterations=2)
    modes = modes_in(tmp_path)
    assert {"candidates/0000/source.py", "candidates/0000/scores.txt", "candidates/0000/traces/0.txt"} <= set(modes)
    assert set(modes.values()) == {0o600}


# Texts of others, where they are shown

MARKUP = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \N{LEFT-TO-RIGHT MARK}"
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\N{RIGHT-TO-LEFT OVERRIDE}"


def test_no_text_of_a_prompt_is_markup_in_a_page_of_the_run(tmp_path: Path) -> None:
    """gepa's page holds texts in a script; ours holds them in HTML."""
    compiled(tmp_path, 80, reflection_lm=reflection_lm_that(lambda number: f"{number} {MARKUP}"))
    assert command("report", str(tmp_path), "-o", str(tmp_path / "report.html"))[0] == 0
    for name in ("candidate_tree.html", "report.html"):
        page = (tmp_path / name).read_text()
        assert "alert(1)" in page
        assert "<img" not in page
        assert "<script>alert" not in page
    tree = (tmp_path / "candidate_tree.html").read_text()
    nodes = json.loads(tree.partition("const NODES = ")[2].partition(";\nconst DOT")[0])
    texts = json.loads((tmp_path / "candidates.json").read_text())
    assert [node["components"] for node in nodes] == texts
    assert MARKUP in texts[1]["steps[0]"]


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_no_text_of_others_moves_the_cursor_of_a_log(
    tmp_path: Path, schedule: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of metrics and programs, and texts that a reflection has written."""

    def metric(gold: Any, pred: Any, *rest: Any) -> Any:
        if gold.question.endswith("1"):
            raise ValueError(f"no score {ESCAPES}")
        return digits(gold, pred, *rest)

    monkeypatch.setattr(logging.getLogger("dspy"), "propagate", True)
    reflecting = reflection_lm_that(lambda number: f"{number} {ESCAPES}")
    with caplog.at_level(logging.DEBUG, "dspy.teleprompt.gepa.gepa"):
        compiled(tmp_path, 60, metric=metric, schedule=schedule, reflection_lm=reflecting)
    assert "no score" in caplog.text
    assert "Proposed new text" in caplog.text
    assert [line for line in caplog.messages if set(line) & set("\x1b\x07\x9b\r\N{RIGHT-TO-LEFT OVERRIDE}")] == []


QUOTED = 'pass"word\\with-7\tquotes-é'


def test_no_secret_stands_in_a_journal_however_json_spells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the environment, of LMs and of the optimizer; in a text, in JSON as a tool's arguments are, in JSON within
    JSON, with and without escapes of other letters."""
    monkeypatch.setenv("SOME_PASSWORD", QUOTED)
    spellings = [QUOTED]
    for ascii_only in (True, False, True):
        spellings.append(json.dumps({"value": spellings[-1]}, ensure_ascii=ascii_only))
    reflecting, more = reflection_lm(), ["wandb-0123456789abcdef", "sk-lm-0123456789abcdef"]
    reflecting.kwargs["api_key"] = more[1]

    def leaking(gold: Any, pred: Any, *rest: Any) -> Any:
        told = [*spellings, *more, "Authorization: Bearer abcdef123456"]
        return dspy.Prediction(score=digits(gold, pred).score, feedback=" ".join(told))

    compiled(tmp_path, metric=leaking, reflection_lm=reflecting, wandb_api_key=more[0])
    written = b"".join(path.read_bytes() for path in tmp_path.glob("journal.sqlite*"))
    assert b"[redacted]" in written
    for part in (b"quotes-", b"with-7", b'pass"', b"pass\\", b"wandb-0", b"sk-lm-0", b"abcdef123456"):
        assert part not in written
    assert problems(tmp_path) == []


# A journal that is damaged

JUNK = (
    "{", "[]", "{}", '""', "null", "x", -1, 10**18, 9e999, b"\xff\xfe", "[[1]]", '{"a": 1}', "[null]", "3", 0, '"z"',
)  # fmt: skip
COMMANDS = (
    ["check"], ["report", "-o", "OUT"], ["watch", "--once"], ["lineage", "--prompts"],
    ["export", "OUT"], ["compare"],
)  # fmt: skip


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was stopped in the middle of a step."""
    directory, count = tmp_path_factory.mktemp("interrupted"), itertools.count(1)

    def metric(*arguments: Any) -> Any:
        if next(count) >= 45:  # the first may count as Ctrl-C, after which steps that run are finished
            raise KeyboardInterrupt
        return digits(*arguments)

    metric.__qualname__ = digits.__qualname__
    with pytest.raises(KeyboardInterrupt):
        compiled(directory, 80, metric=metric, num_threads=2)
    return directory


def damage(path: Path, draw: random.Random) -> str:
    """Change bytes, a value, all values of a column, or take rows away; return what was done."""
    kind = draw.choice(["bytes", "value", "value", "column", "rows"])
    if kind == "bytes":
        content = bytearray(path.read_bytes())
        for _ in range(draw.choice([1, 3, 20])):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(content)
        return kind
    with contextlib.closing(sqlite3.connect(path)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        table = draw.choice(tables)
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        rows = [row for (row,) in connection.execute(f"SELECT rowid FROM {table}")] or [0]
        some = [draw.choice(rows)] if kind == "value" or draw.random() < 0.5 else rows
        which = f"{table} WHERE rowid IN ({', '.join(map(str, some))})"
        if kind == "rows":
            statement, values = f"DELETE FROM {which}", ()
        else:
            set_value = f"SET {draw.choice(columns)} = ? WHERE"
            statement, values = f"UPDATE OR IGNORE {which.replace('WHERE', set_value)}", (draw.choice(JUNK),)
        with contextlib.suppress(sqlite3.IntegrityError):
            connection.execute(statement, values)
        connection.commit()
    return f"{statement} {values}"


def test_what_a_journal_cannot_tell_any_more_is_said_to_be_damaged(interrupted: Path, tmp_path: Path) -> None:
    changes = [
        "DELETE FROM candidates",
        "UPDATE candidates SET texts = '-1'",
        "UPDATE sessions SET settings = '{'",
        "UPDATE sessions SET fingerprints = '3'",
        "UPDATE state SET value = 'x'",
        "UPDATE state SET value = '0' WHERE name = 'gepa strategies'",
        "UPDATE steps SET selection = '{}'",
        "UPDATE steps SET version = '\"\"'",
    ]
    for number, statement in enumerate(changes):
        run = tmp_path / str(number)
        shutil.copytree(interrupted, run)
        with contextlib.closing(sqlite3.connect(run / "journal.sqlite")) as connection:
            connection.execute(statement)
            connection.commit()
        with pytest.raises(
            ConfigurationError, match=r"journal.sqlite cannot be read .* It is damaged: put a copy back"
        ):
            compiled(run, 90, num_threads=2)


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 100), marks=pytest.mark.long)], ids=["few", "many"])
def test_no_damage_of_a_journal_ends_in_an_error_of_another_kind(
    interrupted: Path, tmp_path: Path, seeds: range
) -> None:
    run, out = tmp_path / "run", str(tmp_path / "out")
    for seed in seeds:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(interrupted, run)
        what = f"{seed}: {damage(run / 'journal.sqlite', random.Random(seed))}"
        for name, *more in COMMANDS:
            status, _, complaint = command(name, str(run), *(word.replace("OUT", out) for word in more))
            assert status in ((0, 1, 3) if name == "check" else (0, 2, 3)), what
            assert len(complaint.splitlines()) == (status in (2, 3)), what
        with contextlib.suppress(FlashEvolveError):
            compiled(run, 90, num_threads=2)


@pytest.mark.parametrize("name", ["gepa_state.bin", "candidates.json", "generated_best_outputs_valset"])
def test_a_file_that_cannot_be_written_ends_the_run_with_its_name_and_nothing_is_lost(
    tmp_path: Path, name: str
) -> None:
    """As on a full disk; what was paid for is in the journal, and the best program so far in the error."""
    hindrance = tmp_path / (name if name == "generated_best_outputs_valset" else f"{name}.tmp")
    hindrance.touch() if hindrance.name == name else hindrance.mkdir()
    with pytest.raises(RunAbortedError, match=f"{name}.* cannot be written .*log_dir") as caught:
        compiled(tmp_path, 80, track_best_outputs=True)
    assert "cloudpickle" not in str(caught.value)
    assert isinstance(caught.value.best_program, Chain)
    assert problems(tmp_path) == []
    hindrance.unlink() if hindrance.name == name else hindrance.rmdir()
    assert compiled(tmp_path, 80, track_best_outputs=True).async_stats.outcome == "finished"
    assert problems(tmp_path) == []


# A run of thousands of candidates, each made from the one before


def chain(directory: Path, candidates: int) -> Path:
    """A run of gepa's, whose prompts have thirty lines, one of them changed from each to the next."""
    directory.mkdir()
    texts = [{"steps[0]": "\n".join(f"Rule {max(k, n - (n - k) % 30)}" for k in range(30))} for n in range(candidates)]
    state = {
        "program_candidates": texts,
        "prog_candidate_val_subscores": [dict.fromkeys(range(3), n / candidates) for n in range(candidates)],
        "parent_program_for_candidate": [[n - 1 if n else None] for n in range(candidates)],
        "num_metric_calls_by_discovery": list(range(candidates)),
        "total_num_evals": candidates,
    }
    (directory / "gepa_state.bin").write_bytes(pickle.dumps(state))
    return directory


def calls_of(*arguments: str) -> tuple[int, int]:
    """How many functions a command calls, and how much it prints or writes."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        status, out, _ = command(*arguments)
    finally:
        sys.setprofile(None)
    assert status == 0
    return calls, len(out)


@pytest.mark.parametrize("words", [["compare"], ["watch", "--once"], ["lineage", "--prompts"], ["report", "-o", "OUT"]])
def test_what_a_command_does_and_prints_grows_with_the_run_and_no_faster(tmp_path: Path, words: list[str]) -> None:
    name, *more = [word.replace("OUT", str(tmp_path / "page")) for word in words]
    command(name, str(chain(tmp_path / "first", 2)), *more)  # what is imported and compiled once
    (few, little), (many, much) = (calls_of(name, str(chain(tmp_path / str(n), n)), *more) for n in (150, 600))
    assert many < 5 * few
    assert much <= 5 * max(little, 100)


# Examples whose text may be another one in each process


class Tagged(BaseModel):
    tags: set[str]
    about: dict[str, frozenset[str]] = {}


@dataclass
class Noted:
    words: frozenset[str]
    within: Any = None


class Shown:
    """It shows a set."""

    def __init__(self, words: set[str]) -> None:
        self.words = words

    def __repr__(self) -> str:
        return f"Shown({self.words})"


class Silent:
    """It shows where it lies, and no more."""


def tagged_examples(number: int = 8) -> list[dspy.Example]:
    words = {f"word {place}" for place in range(number)}
    circle: list[Any] = [1]
    circle.append(circle)
    held = {
        "model": Tagged(tags=words, about={"a": frozenset(words)}), "noted": [Noted(frozenset(words), {"a": (words,)})],
        "keys": {frozenset(words): 1}, "shown": Shown(words), "silent": Silent(), "circle": circle, "function": digits,
        "example": dspy.Example(words=words), "models": [[Noted(frozenset(), Tagged(tags=words))]],
    }  # fmt: skip
    return [dspy.Example(question=f"q {place}", **held).with_inputs("question") for place in range(6)]


def tagged_run(directory: Path, calls: int, number: int = 8) -> Any:
    with dspy.context(lm=task_lm()):
        optimizer = AsyncGEPA(digits, max_metric_calls=calls, reflection_lm=reflection_lm(), log_dir=str(directory))
        return optimizer.compile(Chain(), trainset=tagged_examples(number), valset=tagged_examples(number))


RUN = """
import sys
from pathlib import Path
from tests.contract.test_foreign_files import tagged_run

tagged_run(Path(sys.argv[1]), 12)
"""


def test_sets_in_examples_do_not_keep_another_process_from_going_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Text, at any depth and in any class; what has no text of its own is warned of once, and another set refused."""
    other = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    ended = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)], env=other, cwd=Path(__file__).parents[2], capture_output=True,
        text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stderr.count("hold objects of Silent, whose text") == 1
    tagged_run(tmp_path, 20)
    with pytest.raises(ConfigurationError, match="trainset was 6 examples"):
        tagged_run(tmp_path, 20, number=9)
