"""The random runs under trouble: a case is its seed, sound runs pass, and what is broken is reported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import dspy
import pytest

from benchmarks import stress
from benchmarks.stress import Found, behind, examine
from benchmarks.stress_cases import Case, Trouble, Watch, student

TROUBLE = Trouble(failing=0.1, hanging=0.01, slow=0.1, empty=0.02, garbled=0.5, bursts=((20.0, 50.0),))
SMALL = Case(seed=7, program="both", rules=8, train=5, val=5, calls=60, slots=8)


def test_a_seed_always_gives_the_same_case() -> None:
    assert Case.drawn(5) == Case.drawn(5)
    assert Case.drawn(5) != Case.drawn(6)


@pytest.mark.parametrize("program", ["tool", "async tool"])
def test_a_sound_run_under_trouble_passes(program: str) -> None:
    found = examine(replace(SMALL, program=program, predictors=2, trouble=TROUBLE))
    assert found.problems == []
    assert found.counts["retried requests"] > 0
    assert found.counts["metric calls"] > SMALL.val
    assert found.true_score is not None
    assert found.rival is not None


def test_a_cancelled_run_goes_on_and_passes() -> None:
    found = examine(replace(SMALL, ending="cancelled", at_call=20), compare=False)
    assert found.problems == []
    assert found.counts["metric calls"] > 20


def test_a_killed_run_goes_on_and_passes_with_what_was_counted_in_the_process_that_was_killed() -> None:
    found = examine(replace(SMALL, ending="SIGKILL", at_call=20), compare=False)
    assert found.problems == []
    assert 20 < found.counts["metric calls"] <= SMALL.calls


def test_a_run_over_http_under_faults_and_a_restart_passes() -> None:
    found = examine(replace(SMALL, http=True, trouble=Trouble(failing=0.2), at_call=30), compare=False)
    assert found.problems == []
    assert found.counts["retried requests"] > 0


@pytest.mark.parametrize("program", ["mixed", "sync"])
def test_a_lone_request_outlasts_a_burst_of_rate_limits(program: str) -> None:
    """One slot: nobody else is answered or turned away while a request is told to come back too soon."""
    trouble = Trouble(bursts=((15.0, 60.0),), retry_after="too soon")
    found = examine(replace(SMALL, program=program, slots=1, trouble=trouble), compare=False)
    assert found.problems == []
    assert found.counts["retried requests"] > 9
    assert found.counts["unanswered examples"] == 0


def test_metric_calls_that_nobody_paid_for_are_reported() -> None:
    class Twice(Watch):
        def metric(self, *args: Any, **kwargs: Any) -> Any:
            super().metric(*args, **kwargs)
            return super().metric(*args, **kwargs)

    found = examine(SMALL, watch=Twice(SMALL), compare=False)
    assert [problem.split()[0] for problem in found.problems] == ["spent"]
    assert "counted" in found.problems[0]


def test_a_program_that_answers_differently_each_time_and_one_that_is_changed_are_reported() -> None:
    def forgetful(case: Case, watch: Watch) -> dspy.Module:
        program: Any = student(case, watch)
        kind: type[Any] = type(program)
        calls: list[int] = []

        class Forgetful(kind):  # pyright: ignore[reportUntypedBaseClass]
            async def aforward(self, question: str) -> Any:
                calls.append(1)
                program.notes.append(question)
                return dspy.Prediction(answer="") if len(calls) % 2 else await super().aforward(question)

        program.__class__ = Forgetful
        return program

    problems = " ".join(examine(SMALL, forgetful, compare=False).problems)
    assert "wrong scores" in problems
    assert "the student has changed" in problems


def test_cases_that_are_worse_than_gepa_by_more_than_their_spread_fail() -> None:
    def found(*apart: float) -> list[Found]:
        return [Found(SMALL, true_score=0.5 + one, rival=0.5) for one in apart]

    assert behind(found(-0.1, -0.11, -0.09, -0.1))[1]
    assert not behind(found(-0.1, 0.3, -0.2, 0.2))[1]


def test_the_command_reports_a_failed_case_with_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stress, "examine", lambda case: Found(case, ["it is broken"]))
    assert stress.main(["--case", "3"]) == 1
    assert "--case 3: it is broken" in capsys.readouterr().out
