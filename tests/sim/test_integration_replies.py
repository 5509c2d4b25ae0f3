"""Integrations by the simulated model, and rules that contradict each other."""

from __future__ import annotations

import json
from statistics import mean
from typing import Any

import dspy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.staleness import StaleChild
from dspy_flashevolve.modules.rewriting import StaleCandidateReflection
from dspy_flashevolve.sim import HouseRules, ReplyModel
from dspy_flashevolve.sim.profiles import H100_QWEN3_8B
from dspy_flashevolve.sim.prompts import parse_chat_request
from dspy_flashevolve.sim.replies import reply_to
from dspy_flashevolve.sim.words import WORDS, Choices, Rule, rules_in, words_present
from tests.fakes import fake_lm

RULES = [Rule(number, word) for number, word in enumerate(WORDS[:20], start=1)]
FAITHFUL = ReplyModel(forgets=0, overload=0, rivals=True, spots_conflicts=1)
HEADING = "Answer the question."


def text_of(rules: list[Rule]) -> str:
    return "\n".join([HEADING, *map(str, rules)])


def shown(children: dict[int, list[Rule]]) -> str:
    """Children as StaleCandidateReflection shows them; each wants its rules in and another one out."""
    blocks = []
    for number, rules in children.items():
        lines = [f"### Child {number}", "Score of its parent 0.500, of the child not screened.", "What it changed:"]
        blocks.append("\n".join([*lines, f"- {RULES[-1]}", *(f"+ {rule}" for rule in rules)]))
    return "\n\n".join(blocks)


def verdicts_of(
    head: list[Rule], children: dict[int, list[Rule]], model: ReplyModel = FAITHFUL
) -> tuple[dict[Any, Any], list[Rule]]:
    verdicts, text = model.integrate(text_of(head), shown(children), Choices(0, "x"))
    assert [verdict["child"] for verdict in verdicts] == list(children)
    return {verdict["child"]: verdict["verdict"] for verdict in verdicts}, rules_in(text)


def test_a_new_rule_is_orthogonal_a_known_one_subsumed_and_a_contradicting_one_conflicting() -> None:
    children = {4: [RULES[4]], 7: [RULES[0]], 9: [RULES[1]], 11: [RULES[4]], 12: []}
    verdicts, rules = verdicts_of([RULES[0], RULES[2]], children)
    assert verdicts == {4: "orthogonal", 7: "subsumed", 9: "conflicting", 11: "subsumed", 12: "subsumed"}
    assert rules == [RULES[0], RULES[2], RULES[4]]


def test_an_integration_of_no_children_is_the_head() -> None:
    for children in ("", "None.", "Child 3, in a format of somebody else's"):
        assert FAITHFUL.integrate(text_of(RULES[:2]), children, Choices(0, "x")) == ([], text_of(RULES[:2]))


def test_of_two_children_that_contradict_each_other_the_first_is_in() -> None:
    verdicts, rules = verdicts_of([], {1: [RULES[0]], 2: [RULES[1]]})
    assert verdicts == {1: "orthogonal", 2: "conflicting"}
    assert rules == [RULES[0]]


def test_what_a_conflicting_child_brings_besides_is_left_out_with_it() -> None:
    verdicts, rules = verdicts_of([RULES[0]], {1: [RULES[1], RULES[6]]})
    assert (verdicts, rules) == ({1: "conflicting"}, [RULES[0]])


def test_without_rivals_nothing_conflicts() -> None:
    verdicts, rules = verdicts_of([RULES[0]], {1: [RULES[1]]}, ReplyModel(forgets=0, overload=0, spots_conflicts=1))
    assert (verdicts, rules) == ({1: "orthogonal"}, RULES[:2])


def test_a_model_that_spots_no_conflict_takes_both() -> None:
    blind = ReplyModel(forgets=0, overload=0, rivals=True, spots_conflicts=0)
    assert verdicts_of([RULES[0]], {1: [RULES[1]]}, blind) == ({1: "orthogonal"}, RULES[:2])


def one_of_a_pair(pairs: list[tuple[int, bool]]) -> list[Rule]:
    """At most one rule of each pair."""
    return [RULES[2 * pair + second] for pair, second in dict(pairs).items()]


HOLDINGS = st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=5).map(one_of_a_pair)


@given(HOLDINGS, st.lists(HOLDINGS, min_size=1, max_size=6))
def test_a_faithful_integration_holds_the_head_and_what_is_new_less_rivals(
    head: list[Rule], holdings: list[list[Rule]]
) -> None:
    expected, verdicts = set(head), {}
    for number, rules in enumerate(holdings, start=1):
        fresh = [rule for rule in rules if rule not in expected]
        if any((rule.number + 1) // 2 == (known.number + 1) // 2 for rule in fresh for known in expected):
            verdicts[number] = "conflicting"
            continue
        verdicts[number] = "orthogonal" if fresh else "subsumed"
        expected |= set(fresh)
    seen, rules = verdicts_of(head, dict(enumerate(holdings, start=1)))
    assert seen == verdicts
    assert rules == sorted(expected)


@given(HOLDINGS, st.lists(HOLDINGS, min_size=1, max_size=6), st.integers(0, 99))
def test_no_integration_makes_rules_up_or_drops_more_than_one_of_the_heads(
    head: list[Rule], holdings: list[list[Rule]], seed: int
) -> None:
    model = ReplyModel(rivals=True, forgets=0.5, overload=0.2, spots_conflicts=0.5)
    _, text = model.integrate(text_of(head), shown(dict(enumerate(holdings))), Choices(seed, "y"))
    assert set(rules_in(text)) <= {*head, *(rule for rules in holdings for rule in rules)}
    assert len(set(head) - set(rules_in(text))) <= 1
    assert text.startswith(HEADING)


def test_a_crowd_is_integrated_worse_than_a_few() -> None:
    model = ReplyModel(forgets=0, overload=0.05)

    def kept(count: int) -> float:
        children = shown({number: [RULES[number]] for number in range(count)})
        texts = [model.integrate(HEADING, children, Choices(seed, "z"))[1] for seed in range(300)]
        return mean(len(rules_in(text)) / count for text in texts)

    assert kept(1) == pytest.approx(0.951, abs=0.04)
    assert kept(16) == pytest.approx(0.449, abs=0.04)


def test_conflicts_are_spotted_as_often_as_the_model_says() -> None:
    model = ReplyModel(rivals=True)
    seen = [
        model.integrate(text_of(RULES[:1]), shown({1: [RULES[1]]}), Choices(seed, "z"))[0][0]["verdict"]
        for seed in range(600)
    ]
    assert mean(verdict == "conflicting" for verdict in seen) == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize("adapter", [dspy.ChatAdapter(), dspy.JSONAdapter()])
def test_the_default_module_reads_what_the_simulated_model_writes(adapter: Any) -> None:
    def simulated(prompt: str) -> str:
        system, _, user = prompt.rpartition("\n[[ ## component ## ]]")
        messages = [{"role": "system", "content": system}, {"role": "user", "content": f"[[ ## component ## ]]{user}"}]
        request = parse_chat_request(json.dumps({"messages": messages}).encode())
        assert request.kind == "integration"
        return reply_to(request, H100_QWEN3_8B, FAITHFUL, 0).text

    head = {"p": text_of(RULES[:1])}
    children = [
        StaleChild(number, {"p": text_of([rule])}, {"p": HEADING}, 0.5)
        for number, rule in ((1, RULES[1]), (2, RULES[4]), (3, RULES[0]))
    ]
    with dspy.context(lm=fake_lm(simulated), adapter=adapter):
        seen = StaleCandidateReflection()(head=head, children=children)
    assert {verdict.child: verdict.verdict for verdict in seen.verdicts} == {
        1: "conflicting",
        2: "orthogonal",
        3: "subsumed",
    }
    assert rules_in(seen.texts["p"]) == [RULES[0], RULES[4]]


# Rivals


@given(st.lists(st.sampled_from(RULES), unique=True, max_size=12), st.integers(0, 500))
def test_of_two_rules_that_contradict_each_other_an_answer_follows_one_at_most(held: list[Rule], seed: int) -> None:
    reply = ReplyModel(obedience=1, rivals=True).answer(text_of(held), Choices(seed, "question"))
    followed = [rule for rule in held if words_present(reply, [rule.word])]
    pairs = [(rule.number + 1) // 2 for rule in followed]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == {(rule.number + 1) // 2 for rule in held}, "and one at least, where it always obeys"


def test_of_two_that_contradict_each_other_either_is_followed_as_often() -> None:
    model = ReplyModel(obedience=1, rivals=True)
    texts = [model.answer(text_of(RULES[:2]), Choices(seed, "question")) for seed in range(600)]
    assert mean(bool(words_present(text, [RULES[0].word])) for text in texts) == pytest.approx(0.5, abs=0.06)


def test_without_rivals_both_are_followed() -> None:
    reply = ReplyModel(obedience=1).answer(text_of(RULES[:2]), Choices(0, "question"))
    assert len(words_present(reply, WORDS)) == 2


def score(task: HouseRules, instruction: str, count: int = 1500) -> float:
    scores = []
    for index, gold in enumerate(task.valset(count)):
        reply = task.reply_model.answer(instruction, Choices(0, f"{index} {gold.question}"))
        scores.append(task.metric(gold, dspy.Prediction(answer=reply)).score)
    return mean(scores)


@pytest.mark.parametrize(
    ("favoured", "options"), [(0.75, {}), (1.0, {}), (0.5, {"obedience": 1.0}), (0.8, {"crowding": 0.02})]
)
def test_the_optimum_of_rivals_is_what_the_best_instruction_scores(favoured: float, options: dict[str, float]) -> None:
    task = HouseRules(favoured=favoured, reply_model=ReplyModel(rivals=True, **options))  # type: ignore[arg-type]
    assert score(task, task.optimal_instruction()) == pytest.approx(task.optimum, abs=0.015)


def test_holding_both_of_each_pair_or_the_other_one_scores_less_than_the_optimum() -> None:
    task = HouseRules(reply_model=ReplyModel(rivals=True))
    for rules in (task.all_rules(), task.all_rules()[1::2], task.all_rules()[:12]):
        assert score(task, text_of(rules), 400) < task.optimum - 0.1


def test_the_best_instruction_holds_the_favoured_rule_of_each_pair() -> None:
    task = HouseRules(reply_model=ReplyModel(rivals=True))
    assert [rule.number for rule in rules_in(task.optimal_instruction())] == list(range(1, 25, 2))


def test_no_example_asks_for_both_of_a_pair_and_the_favoured_one_is_asked_as_often_as_said() -> None:
    task = HouseRules(favoured=0.75, reply_model=ReplyModel(rivals=True))
    asked = [gold.required for gold in (*task.trainset(300), *task.valset(300))]
    assert all(len({(rule.number + 1) // 2 for rule in rules}) == len(rules) == 6 for rules in asked)
    assert mean(rule.number % 2 for rules in asked for rule in rules) == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"rules": 23, "rules_per_example": 5}, "rules must be even"),
        ({"rules": 10, "rules_per_example": 6}, "at most half of it, got 10 and 6"),
        ({"favoured": 0.4}, "favoured must be between 0.5 and 1, got 0.4"),
        ({"favoured": 1.1}, "favoured must be between 0.5 and 1, got 1.1"),
    ],
)
def test_impossible_tasks_with_rivals_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HouseRules(reply_model=ReplyModel(rivals=True), **bad)


@pytest.mark.parametrize("bad", [{"spots_conflicts": 1.2}, {"spots_conflicts": -0.1}, {"overload": -1}])
def test_a_reply_model_refuses_impossible_integrations(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        ReplyModel(**bad)  # type: ignore[arg-type]
