"""What a run that goes on takes up: unfinished steps with what was paid for them, heads, counts; and with whom."""

from __future__ import annotations

import json
import math
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import LMAuthError
from pydantic import BaseModel, ConfigDict, Field

from dspy_flashevolve import AsyncGEPA, Edits, Full, Guarded, Reflective, RunAbortedError
from tests.contract.surface import ENDLESS, Scored, Sum, check_ends, command, facts, journal_of, problems, raising, sql
from tests.fakes import Chain, digits, examples, hashed

TRAIN, VAL = examples("t", 7), examples("v", 8)


def run(
    log_dir: Path | None, calls: int = 90, seed: int = 1, predictors: int = 2, task_at: int | None = None,
    reflection_at: int | None = None, metric: Any = digits, kind: Any = AsyncGEPA, student: Any = None,
    trainset: Any = TRAIN, valset: Any = VAL, **options: Any,
) -> Any:  # fmt: skip
    task, reflection = (
        raising(lambda number, at=at: LMAuthError("the key is rejected") if number >= (at or ENDLESS) else None, 0)
        for at in (task_at, reflection_at)
    )
    with dspy.context(lm=task):
        optimizer = kind(
            metric, max_metric_calls=calls, reflection_lm=reflection, track_stats=True, seed=seed,
            log_dir=None if log_dir is None else str(log_dir), **options,
        )  # fmt: skip
        return optimizer.compile(student or Chain(predictors), trainset=trainset, valset=valset).detailed_results


@pytest.mark.parametrize("reflection_at", [1, 5])
def test_lockstep_aborted_in_a_reflection_goes_on_as_if_it_had_not_been(tmp_path: Path, reflection_at: int) -> None:
    calls = 70
    whole = run(None, calls, schedule="lockstep")
    with pytest.raises(RunAbortedError):
        run(tmp_path, calls, schedule="lockstep", reflection_at=reflection_at)
    assert facts(run(tmp_path, calls, schedule="lockstep")) == facts(whole)
    assert problems(tmp_path) == []


@pytest.mark.parametrize(("predictors", "seed"), [(1, 0), (2, 1)])
def test_lockstep_stopped_at_every_step_has_the_candidates_of_a_run_that_was_not(
    tmp_path: Path, predictors: int, seed: int
) -> None:
    """Merges included: with two predictors gepa merges."""
    options: dict[str, Any] = {"seed": seed, "predictors": predictors, "schedule": "lockstep"}
    whole = run(None, 100, **options)
    calls, sessions, stopped = 0, 0, None
    while calls < whole.total_metric_calls:
        steps = iter((False,))  # a stopper is asked once before the first step
        stop = {"stop_callbacks": [lambda state, steps=steps: next(steps, True)]}
        stopped = run(tmp_path, 100, gepa_kwargs=stop, **options)
        calls, sessions = stopped.total_metric_calls, sessions + 1
        assert sessions < 200
    assert sessions > 5
    assert facts(stopped) == facts(whole)


@pytest.mark.long
def test_lockstep_aborted_again_and_again_in_rollouts_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """The task LM refuses at its 11th call in each session: sessions end in the middle of validations and screens."""
    calls = 60
    whole = run(None, calls, schedule="lockstep", num_threads=1)
    for sessions in range(200):  # noqa: B007
        try:
            details = run(tmp_path, calls, schedule="lockstep", num_threads=1, task_at=11)
            break
        except RunAbortedError:
            continue
    else:
        raise AssertionError("the run came to no end")
    assert facts(details) == facts(whole)
    assert sessions > 8
    assert problems(tmp_path) == []


def test_the_seeds_validation_goes_on_where_it_was_and_is_not_paid_twice(tmp_path: Path) -> None:
    metric = Scored()
    with pytest.raises(RunAbortedError):
        run(tmp_path, schedule="lockstep", num_threads=1, predictors=1, task_at=5, metric=metric, calls=8)
    assert not (tmp_path / "gepa_state.bin").exists()
    assert len(metric.questions) == 4
    details = run(tmp_path, schedule="lockstep", num_threads=1, predictors=1, metric=metric, calls=8)
    assert sorted(metric.questions) == sorted(example.question for example in VAL)
    assert details.total_metric_calls == 8


class Looking(dspy.Module):
    """A program whose traces hold what JSON does not: pictures, and what pydantic's JSON changes."""

    class Place(BaseModel):
        model_config = ConfigDict(frozen=True)
        name: str = Field(alias="placeName")
        certainty: float = math.inf
        source: str = Field(default="", exclude=True)

    class Signature(dspy.Signature):
        question: str = dspy.InputField()
        picture: dspy.Image = dspy.InputField()
        sound: dspy.Audio = dspy.InputField()
        answer: str = dspy.OutputField()

    def __init__(self) -> None:
        super().__init__()
        self.steps = [dspy.Predict(Looking.Signature)]

    def forward(self, question: str, picture: dspy.Image, sound: dspy.Audio) -> dspy.Prediction:
        answer = self.steps[0](question=question, picture=picture, sound=sound).answer
        return dspy.Prediction(answer=answer, picture=picture, place=Looking.Place(placeName=question, source="map"))


def looking(directory: Path, reflection_at: int | None = None) -> tuple[Any, list[str]]:
    """What a lockstep run over pictures found, and the questions that its metric has scored."""
    picture, sound = dspy.Image("data:image/png;base64,aGVsbG8="), dspy.Audio(data="aGVsbG8=", audio_format="wav")
    more, inputs = {"picture": picture, "sound": sound}, ("question", "picture", "sound")
    sets = {
        name: [dspy.Example(question=f"{name} {number}", **more).with_inputs(*inputs) for number in range(4)]
        for name in ("trainset", "valset")
    }
    metric, options = Scored(), {"schedule": "lockstep", "student": Looking(), **sets}
    with suppress(RunAbortedError):
        return run(directory, 40, metric=metric, reflection_at=reflection_at, **options), metric.questions
    return None, metric.questions


def test_a_run_whose_traces_hold_pictures_and_sounds_goes_on_and_pays_nothing_twice(tmp_path: Path) -> None:
    whole, paid = looking(tmp_path / "whole")
    again: list[str] = []
    for _ in range(3):  # each ends where the minibatch is to be reflected on
        details, scored = looking(tmp_path / "interrupted", reflection_at=1)
        assert details is None
        again += scored
    details, scored = looking(tmp_path / "interrupted")
    assert sorted(again + scored) == sorted(paid)
    assert facts(details) == facts(whole)
    assert problems(tmp_path / "interrupted") == []


class Opaque:
    """It is of no kind that a journal can hold."""


def test_a_trace_that_cannot_be_kept_is_made_anew_and_not_called_paid_twice(tmp_path: Path) -> None:
    class Holding(Chain):
        def forward(self, question: str) -> dspy.Prediction:
            return dspy.Prediction(answer=super().forward(question).answer, held=Opaque())

        async def aforward(self, question: str) -> dspy.Prediction:
            return dspy.Prediction(answer=(await super().aforward(question)).answer, held=Opaque())

    for _ in range(2):
        with pytest.raises(RunAbortedError):
            run(tmp_path, 60, schedule="lockstep", reflection_at=1, student=Holding())
    assert run(tmp_path, 60, schedule="lockstep", student=Holding()).total_metric_calls >= 60
    assert problems(tmp_path) == []
    assert "rollouts with a trace that JSON cannot hold" in command("check", str(tmp_path))[1]


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
@pytest.mark.parametrize(("first", "second"), [(4, 3), (2, 5)])
def test_a_run_goes_on_with_minibatches_of_another_size(tmp_path: Path, schedule: Any, first: int, second: int) -> None:
    """The default size follows from the budget, which may change."""
    for size, calls in ((first, 60), (second, 140)):
        details = run(tmp_path, calls, schedule=schedule, reflection_minibatch_size=size)
        assert details.async_stats.outcome == "finished"
    assert details.async_stats.metric_calls > 60
    assert problems(tmp_path) == []


def whole(gold: Any, pred: Any, *rest: Any) -> Any:
    return digits(gold, pred, *rest)


def halved(gold: Any, pred: Any, *rest: Any) -> Any:
    return digits(gold, pred, *rest) / 2


class Metric:
    def __call__(self, gold: Any, pred: Any, *rest: Any) -> Any:
        return self.scaled(digits(gold, pred, *rest))

    @staticmethod
    def scaled(judgement: Any) -> Any:
        return judgement


class Halved(Metric):
    @staticmethod
    def scaled(judgement: Any) -> Any:
        return judgement / 2


halved.__qualname__, Halved.__qualname__ = whole.__qualname__, Metric.__qualname__


@pytest.mark.parametrize(("before", "after"), [(whole, halved), (Metric(), Halved())], ids=["function", "method"])
def test_a_run_that_goes_on_with_another_text_of_its_metric_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: Any, after: Any
) -> None:
    for calls in (50, 60):
        run(tmp_path, calls, metric=before)
    assert "source of the" not in caplog.text
    run(tmp_path, 70, metric=after)
    assert "the source of the metric has changed since the last session" in caplog.text
    assert "Give another log_dir if it scores otherwise now" in caplog.text


def test_a_finished_run_that_is_taken_up_again_pays_nothing(tmp_path: Path) -> None:
    first = run(tmp_path, 90)
    again = run(tmp_path, 90, task_at=1, reflection_at=1)  # any call would end it
    assert facts(again) == facts(first)


def test_a_reflection_that_was_paid_before_the_interruption_is_used_after_it(tmp_path: Path) -> None:
    reflected: list[str] = []

    def proposer(candidate: Any, reflective_dataset: Any, components_to_update: list[str]) -> dict[str, str]:
        reflected.append(str(sorted(record["Inputs"]["question"] for record in reflective_dataset["steps[0]"])))
        return {name: f"Instruction {hashed(len(reflected))}" for name in components_to_update}

    options = {"schedule": "lockstep", "num_threads": 1, "predictors": 1, "instruction_proposer": proposer}
    with pytest.raises(RunAbortedError):
        run(tmp_path, task_at=8 + 3 + 2, **options)  # in the first screen
    assert len(reflected) == 1
    stats = run(tmp_path, calls=8 + 6 + 1, **options).async_stats
    assert len(reflected) == len(set(reflected)), "no minibatch was reflected on twice"
    assert stats.reflection_calls == len(reflected) - 1, "that of the session before is not counted again"


@pytest.mark.parametrize("search", ["edits", "pareto"])
def test_a_repair_that_was_paid_before_the_interruption_is_used_after_it(tmp_path: Path, search: Any) -> None:
    """The child, what it is patched onto and the patch are those of the session before."""
    asked: list[Any] = []

    class Asked(Sum):
        async def aforward(self, head: Any, children: Any, **more: Any) -> Any:
            asked.append([child.texts for child in children])
            return await super().aforward(head, children, **more)

    def proposer(candidate: Any, reflective_dataset: Any, components_to_update: list[str]) -> dict[str, str]:
        rows = sorted(record["Inputs"]["question"] for record in reflective_dataset["steps[0]"])
        return {name: f"Instruction {hashed(rows, candidate)}" for name in components_to_update}

    options: dict[str, Any] = {
        "num_threads": 1, "predictors": 1, "instruction_proposer": proposer, "stale_candidate_reflection": Asked(),
        "search": search, "staleness": Reflective(min_gap=0),
    }  # fmt: skip
    with pytest.raises(RunAbortedError):
        run(tmp_path, task_at=8 + 3 + 2, **options)  # in the first screen
    before = list(asked)
    assert before
    [told] = sql(tmp_path, "SELECT COUNT(*) FROM replies WHERE stage = 'integrate'")
    assert told[0] == len(before)
    details = run(tmp_path, **options)
    assert len(asked) > len(before)
    assert not [children for children in asked[len(before) :] if children in before], "none was asked for twice"
    assert details.async_stats.integration_calls == len(asked) - len(before), "those before are not counted again"
    check_ends(details.async_stats)
    assert problems(tmp_path) == []


@pytest.mark.long
def test_a_run_that_goes_on_with_another_search_or_policy_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sessions: list[tuple[dict[str, Any], str]] = [
        ({"search": "pareto", "staleness": "guarded"}, ""),
        ({"search": "pareto", "staleness": "guarded"}, ""),
        ({"search": "pareto"}, "was last run with staleness='guarded'; it goes on with staleness='full'."),
        ({}, "was last run with search='pareto'; it goes on with search='edits'."),
        ({"search": Edits(), "staleness": Full()}, ""),
        ({"search": Edits(0.5)},
         "was last run with search='Edits(frontier_share=0.25)'; it goes on with search='Edits(frontier_share=0.5)'."),
        ({"search": Edits(0.5), "staleness": Guarded(8)}, "was last run with staleness='full'; it goes on with "
         "staleness=\"Guarded(max_gap=8, looks=('after_propose',))\"."),
        ({"search": Edits(0.5), "staleness": "guarded"}, ""),
        ({"search": Edits(0.5), "staleness": Guarded(2)}, "was last run with staleness='guarded'; it goes on with "
         "staleness=\"Guarded(max_gap=2, looks=('after_propose',))\"."),
    ]  # fmt: skip
    for number, (options, message) in enumerate(sessions):
        caplog.clear()
        details = run(tmp_path, 45 + 15 * number, **options)
        assert [record.getMessage().partition(repr(str(tmp_path)))[2].strip() for record in caplog.records
                if "was last run with" in record.getMessage()] == ([message] if message else [])  # fmt: skip
        assert details.total_metric_calls <= 45 + 15 * number


def test_a_run_of_an_earlier_version_with_its_names_goes_on_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = run(tmp_path, 60, search="pareto").total_metric_calls
    with sqlite3.connect(journal_of(tmp_path)) as connection:  # it had search in staleness, and a name of its own
        [(settings,)] = connection.execute("SELECT settings FROM sessions").fetchall()
        earlier = {name: value for name, value in json.loads(settings).items() if name != "search"}
        connection.execute("UPDATE sessions SET settings = ?", (json.dumps(earlier | {"staleness": "patch"}),))
    details = run(tmp_path, 100)
    assert "last run with no search= and staleness='patch'; it goes on with search='edits' and staleness='full'." in (
        caplog.text
    )
    assert known < details.total_metric_calls <= 100
    assert problems(tmp_path) == []


@pytest.mark.parametrize("search", ["edits", "pareto"])
@pytest.mark.parametrize("task_at", [60, 105])
def test_an_asynchronous_run_goes_on_and_pays_no_finished_rollout_twice(
    tmp_path: Path, task_at: int, search: Any
) -> None:
    metric = Scored()
    options: dict[str, Any] = {
        "stale_candidate_reflection": Sum(), "num_threads": 8, "predictors": 1, "metric": metric, "search": search,
        "staleness": Reflective(min_gap=0),
    }  # fmt: skip
    with suppress(RunAbortedError):
        run(tmp_path, 130, task_at=task_at, **options)
    known = json.loads((tmp_path / "candidates.json").read_text()) if (tmp_path / "candidates.json").exists() else []
    details = run(tmp_path, 130, **options)
    assert facts(details)[0][: len(known)] == known
    assert len(metric.questions) == details.total_metric_calls <= 130
    check_ends(details.async_stats)
    assert problems(tmp_path) == []


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_gepa_itself_goes_on_and_then_this_engine_again(tmp_path: Path, schedule: Any) -> None:
    """AsyncGEPA, then dspy.GEPA on the same directory, then AsyncGEPA: nothing is lost, and all is counted."""
    first = run(tmp_path, 60, schedule=schedule)
    second = run(tmp_path, 100, kind=dspy.GEPA)
    third = run(tmp_path, second.total_metric_calls + 40, schedule=schedule)
    earlier, later = facts(second)[0], facts(third)[0]
    assert facts(first)[0] == earlier[: len(first.candidates)]
    assert earlier == later[: len(earlier)]
    assert len(second.candidates) > len(first.candidates)
    assert third.total_metric_calls > second.total_metric_calls
    assert problems(tmp_path) == []


def test_a_run_of_gepas_goes_on_without_a_journal_from_before(tmp_path: Path) -> None:
    theirs = run(tmp_path, 80, kind=dspy.GEPA)
    ours = run(tmp_path, theirs.total_metric_calls + 60)
    assert facts(ours)[0][: len(theirs.candidates)] == facts(theirs)[0]
    assert problems(tmp_path) == []


@pytest.mark.long
def test_a_commit_that_gepas_checkpoint_missed_is_made_again_from_the_journal(tmp_path: Path) -> None:
    """Killed between the two: the journal has it, the checkpoint of one candidate less is what is found."""
    import pickle

    whole = run(tmp_path, 110, schedule="lockstep")
    path = tmp_path / "gepa_state.bin"
    state = pickle.loads(path.read_bytes())
    last = len(state["program_candidates"]) - 1
    assert last >= 2
    before = tmp_path.parent / "shorter"
    stop = {"stop_callbacks": [lambda state: len(state.program_candidates) >= last]}
    run(before, 110, schedule="lockstep", gepa_kwargs=stop)
    path.write_bytes((before / "gepa_state.bin").read_bytes())
    (tmp_path / "candidates.json").write_text((before / "candidates.json").read_text())
    again = run(tmp_path, 110, schedule="lockstep", task_at=1, reflection_at=1)
    assert facts(again)[:4] == facts(whole)[:4]
    assert problems(tmp_path) == []


def test_without_its_journal_a_run_goes_on_from_gepas_checkpoint_and_what_was_spent_counts(tmp_path: Path) -> None:
    whole = run(tmp_path, 80)
    journal_of(tmp_path).rename(tmp_path / "journal.old")
    again = run(tmp_path, 80)
    before = facts(whole)[0]
    assert facts(again)[0][: len(before)] == before, "what is left of the budget may pay a further one"
    assert whole.total_metric_calls <= again.total_metric_calls <= 80
    (tmp_path / "gepa_state.bin").unlink()
    journal_of(tmp_path).unlink()
    anew = run(tmp_path, 45)
    assert 0 < anew.total_metric_calls <= 45 < whole.total_metric_calls, "without both it begins anew"


def test_a_file_gepa_stop_that_was_left_ends_each_session_at_once(tmp_path: Path) -> None:
    first = run(tmp_path, 60)
    stop = tmp_path / "gepa.stop"
    stop.touch()
    stopped = run(tmp_path, 120)
    assert (stopped.async_stats.outcome, stopped.async_stats.steps) == ("stopped", 0)
    assert stopped.total_metric_calls == first.total_metric_calls
    stop.unlink()
    assert run(tmp_path, 120).total_metric_calls > first.total_metric_calls


def test_what_was_spent_on_reflections_before_counts(tmp_path: Path) -> None:
    first = run(tmp_path, 500, max_reflection_calls=4, schedule="lockstep")
    assert first.async_stats.reflection_calls == 4
    again = run(tmp_path, 500, max_reflection_calls=4, schedule="lockstep")
    assert again.async_stats.reflection_calls == 0
    assert again.async_stats.stop_reason == "max_reflection_calls=4 is spent"
    more = run(tmp_path, 500, max_reflection_calls=6, schedule="lockstep")
    assert more.async_stats.reflection_calls == 2
