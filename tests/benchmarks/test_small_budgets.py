"""`python -m benchmarks.small_budgets`: a row for each budget and number of predictors."""

from __future__ import annotations

import pytest

from benchmarks import small_budgets
from benchmarks.small_budgets_task import STYLES, Style, Task


def test_a_row_holds_both_scores_their_difference_and_how_many_seeds_were_better_and_worse(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert small_budgets.main(["--calls", "30", "--predictors", "1", "2", "--seeds", "2"]) == 0
    rows = [
        line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("30  1") or "plain" in line
    ]
    for calls, predictors, model, ours, theirs, apart, better, _, worse in rows:
        assert (calls, model) == ("30", "plain")
        assert predictors in ("1", "2")
        assert 0 <= float(ours) <= 1
        assert 0 <= float(theirs) <= 1
        assert -1 <= float(apart) <= 1
        assert 0 <= int(better) + int(worse) <= 2
    assert len(rows) == 4, "each as it is made, and in the table"


def test_the_budgets_of_tutorials_are_compared_with_dspy_gepa_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """A budget that pays no two steps is spent alike: equal scores, equal calls, in every style of reflection."""
    assert small_budgets.main(["--tutorials", "max_full_evals=1", "--seeds", "2"]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines() if line.startswith("max_full_evals=1  ")]
    assert len(rows) == 12, "each as it is made, and in the table"
    for _, _, ours, our_calls, theirs, their_calls in ([cell.strip() for cell in row if cell.strip()] for row in rows):
        assert (ours, our_calls) == (theirs, their_calls)
        assert int(our_calls) > 20


@pytest.mark.parametrize("strong", [True, False])
@pytest.mark.parametrize("style", STYLES)
def test_a_small_budget_is_spent_down_to_less_than_a_step_costs(style: Style, strong: bool) -> None:
    """Two minibatches of three: no head is validated that leaves calls for neither a step nor its validation."""
    task = Task(0, 10, 10, 2, style, 4 if strong else 12, strong)
    _, calls = small_budgets.learnt(task, {"max_metric_calls": 60}, theirs=False)
    assert 60 - 6 < calls <= 60


@pytest.mark.parametrize("budget", [100, 110, 160])
def test_what_was_kept_for_a_second_validation_pays_steps_where_there_is_no_second_text(budget: int) -> None:
    """The reflection model of the task writes no text anew."""
    _, calls = small_budgets.learnt(Task(0, 10, 10, 1, "documents"), {"max_metric_calls": budget}, theirs=False)
    assert budget - calls < 6 + 10, "a step and a validation"
