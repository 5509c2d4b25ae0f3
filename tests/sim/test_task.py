"""House rules: the data, the metric and the known optimum; no server is needed."""

from __future__ import annotations

from typing import Any

import dspy
import pytest

from dspy_flashevolve.sim import HouseRules, ReplyModel
from dspy_flashevolve.sim.words import Rule, rules_in

RULES = [Rule(1, "amber"), Rule(2, "plum"), Rule(3, "zebra")]
GOLD = dspy.Example(question="Why?", required=RULES).with_inputs("question")


def instructions(program: dspy.Module) -> dict[str, str]:
    return {name: predictor.signature.instructions for name, predictor in program.named_predictors()}


def test_the_same_seed_gives_the_same_task_and_another_seed_another_one() -> None:
    def data(seed: int) -> list[tuple[str, list[Rule]]]:
        return [(example.question, example.required) for example in HouseRules(seed=seed).trainset(20)]

    assert data(0) == data(0) != data(1)


def test_a_longer_set_begins_with_the_shorter_one() -> None:
    task = HouseRules()
    assert task.trainset(30)[:10] == task.trainset(10)
    assert task.valset(30)[:10] == task.valset(10)


def test_train_and_validation_share_no_question() -> None:
    task = HouseRules()
    train, val = ({example.question for example in data} for data in (task.trainset(60), task.valset(60)))
    assert len(train) == len(val) == 60
    assert not train & val


def test_the_rules_are_no_input_and_no_question_tells_them() -> None:
    task = HouseRules()
    words = {rule.word for rule in task.all_rules()}
    for example in task.trainset(96):
        assert set(example.inputs().keys()) == {"question"}
        assert len(example.required) == 6
        assert not words & set(example.question.lower().replace("?", "").split())


def test_the_score_is_the_share_of_required_words_and_the_feedback_names_the_missed_rules() -> None:
    result = HouseRules().metric(GOLD, dspy.Prediction(answer="An AMBER light, and plums."))
    assert result.score == pytest.approx(1 / 3)
    assert result.feedback == 'Missed: Rule 02: mention the word "plum". Rule 03: mention the word "zebra".'
    assert HouseRules().metric(GOLD, dspy.Prediction(answer="amber plum zebra")).score == 1


def test_with_three_predictors_each_has_rules_and_feedback_of_its_own() -> None:
    metric = HouseRules().metric
    pred = dspy.Prediction(outline="zebra amber plum", draft="", answer="")
    assert metric(GOLD, pred).score == pytest.approx(1 / 3)
    for name, missed in (("answer", [RULES[0]]), ("draft", [RULES[1]]), ("outline", [])):
        result = metric(GOLD, pred, None, name, None)
        assert (result.score, rules_in(result.feedback)) == (pytest.approx(1 / 3), missed)


def test_an_output_that_could_not_be_parsed_scores_nothing() -> None:
    result = HouseRules().metric(GOLD, dspy.Prediction(), None, "answer", None)
    assert (result.score, rules_in(result.feedback)) == (0, RULES)


def test_the_seed_program_holds_two_rules_and_the_optimal_instruction_all() -> None:
    task = HouseRules()
    assert rules_in(instructions(task.program())["answer"]) == task.all_rules()[:2]
    assert rules_in(task.optimal_instruction()) == task.all_rules()


def test_a_chain_of_three_shares_the_rules_out_and_feeds_each_step_the_last() -> None:
    program = HouseRules(seed_rules=24).program(3)
    shares = {name: len(rules_in(text)) for name, text in instructions(program).items()}
    assert shares == {"outline": 8, "draft": 8, "answer": 8}
    inputs = {name: list(p.signature.input_fields) for name, p in program.named_predictors()}
    assert inputs == {"outline": ["question"], "draft": ["question", "outline"], "answer": ["question", "draft"]}


def test_the_optimum_is_the_models_obedience_under_all_rules() -> None:
    assert HouseRules().optimum == 0.9
    assert HouseRules(rules=10, reply_model=ReplyModel(obedience=1)).optimum == 1


def test_the_true_score_of_several_predictors_goes_by_whose_rule_it_is() -> None:
    task = HouseRules(reply_model=ReplyModel(obedience=1))
    odd = "\n".join(map(str, task.all_rules()[::2]))
    assert task.true_score([odd, ""]) == pytest.approx(0.5)
    assert task.true_score(["", odd]) == 0


@pytest.mark.parametrize(
    "bad", [{"rules": 0}, {"rules": 1000}, {"rules_per_example": 25}, {"seed_rules": -1}, {"prompts": []}]
)
def test_counts_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        HouseRules(**bad)
