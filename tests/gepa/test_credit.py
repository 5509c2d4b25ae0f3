"""Credit assignment: what changes are worth by all rollouts at once, and the head and the variants that follow."""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_flashevolve.engine.store import hash_of
from dspy_flashevolve.gepa.credit import Credit, Evidence
from dspy_flashevolve.gepa.edits import Edit, EditedText
from tests.fakes import hashed
from tests.gepa.test_edits import edit

SEED = {"answer": "Answer the question."}
NOISE = 0.2


def rule(number: int) -> str:
    return f"- rule {number}"


def add(text: str) -> Edit:
    """At the end of a text."""
    return edit("add", 999, text)


def take(
    credit: Credit, step: int, parent: dict[str, str], *edits: Edit, split: str = "train", component: str = "answer",
    scores: Any = None,
) -> bool:  # fmt: skip
    """Have a credit take in a child that edits make of its parent."""
    child = {**parent, component: str(EditedText.of(parent[component], edits))}
    return credit.take(step, parent, child, {component: edits}, split, scores or {})


def numbers_in(candidate: dict[str, str]) -> set[int]:
    lines = "\n".join(candidate.values()).splitlines()
    return {int(line.removeprefix("- rule ")) for line in lines if line.startswith("- rule ")}


class Task:
    """Scores that are a sum: an example's own level, the effects of the rules in the candidate, noise."""

    def __init__(self, effects: Sequence[float], examples: int = 20, seed: int = 0) -> None:
        self.effects, self.examples, self.rng = list(effects), examples, random.Random(seed)
        self.levels = [self.rng.gauss(0.5, 0.2) for _ in range(examples)]
        self.credit = Credit(SEED, 1.0)

    def score(self, candidate: dict[str, str], example: int) -> float:
        gain = sum(self.effects[number] for number in numbers_in(candidate))
        return self.levels[example] + gain + self.rng.gauss(0, NOISE)

    def runs(self, candidate: dict[str, str], split: str = "train", count: int = 3) -> dict[Hashable, float]:
        scores = {str(one): self.score(candidate, one) for one in self.rng.sample(range(self.examples), count)}
        for example, score in scores.items():
            self.credit.record_score(hash_of(candidate), split, example, score)
        return scores

    def add(self, number: int, split: str = "train") -> None:
        """A child of the seed that adds a rule beats it, with nothing known of its scores."""
        assert take(self.credit, number, SEED, add(rule(number)), split=split)

    def steps(self, count: int) -> None:
        """Rollouts of as many variants."""
        for _ in range(count):
            self.runs(self.credit.variant(self.rng))


def estimates(task: Task) -> dict[int, tuple[float, float]]:
    """Rule -> estimated effect, its standard error."""
    return {one.step: (one.effect, one.error) for one in task.credit.records()}


# Estimates


def test_effects_are_estimated_within_their_errors() -> None:
    off: list[float] = []
    for seed in range(10):
        rng = random.Random(seed)
        task = Task([rng.gauss(0.02, 0.06) for _ in range(12)], seed=seed)
        for number in range(12):
            task.add(number)
        task.steps(150)
        off += [(found - task.effects[number]) / error for number, (found, error) in estimates(task).items()]
        assert max(error for _, error in estimates(task).values()) < 0.1
    assert len(off) == 120
    assert sum(abs(one) > 3 for one in off) <= 2, "standard errors; the design is adaptive, the noise normal"
    assert math.sqrt(sum(one * one for one in off) / 120) < 1.2


def test_examples_that_are_easy_are_not_taken_for_changes_that_help() -> None:
    """Each change is seen on examples of its own: a mean of scores would say that the first one is worth .8."""
    evidence = Evidence()
    for example in range(10):
        for composition, level in ((frozenset({0}), 0.9), (frozenset({1}), 0.1)):
            for repeat in range(4):
                evidence.add((level, example), composition, level + 0.01 * (repeat % 2))
                evidence.add((level, example), frozenset(), level + 0.01 * (repeat % 2))
    effects = evidence.effects([0, 1], 1.0)
    assert max(map(abs, effects.mean)) < 0.02


def test_harmful_changes_leave_the_head_and_the_others_stay() -> None:
    task = Task([0.08] * 8 + [-0.15] * 4)
    for number in range(12):
        task.add(number)
    assert len(numbers_in(task.credit.head().candidate)) == 12, "nothing is known: all are trusted"
    task.steps(150)
    head = task.credit.head()
    assert numbers_in(head.candidate) >= set(range(8))
    assert not numbers_in(head.candidate) & set(range(8, 12))
    assert task.credit.records()[8].effect < 0
    tried = [numbers_in(task.credit.variant(task.rng)) for _ in range(100)]
    assert sum(8 in one for one in tried) < 20, "what harms is hardly tried any more"
    assert sum(0 in one for one in tried) > 80, "and what helps is in nearly all"


@given(st.randoms(use_true_random=False), st.integers(0, 99))
@settings(max_examples=25)
def test_estimates_do_not_depend_on_the_order_in_which_rollouts_end(shuffler: random.Random, seed: int) -> None:
    """Invariant 4."""
    rng = random.Random(seed)
    rows = [(rng.randrange(6), frozenset(n for n in range(5) if rng.random() < 0.5), rng.random()) for _ in range(60)]
    first, second = Evidence(), Evidence()
    for row in rows:
        first.add(*row)
    shuffler.shuffle(rows)
    for row in rows:
        second.add(*row)
    one, other = first.effects(range(5), 1.0), second.effects(range(5), 1.0)
    assert one.mean == pytest.approx(other.mean, abs=1e-9)
    assert one.error == pytest.approx(other.error, abs=1e-9)
    assert one.prior == pytest.approx(other.prior, abs=1e-9)


# Trust


@pytest.mark.parametrize("effect", [0.1, -0.1])
def test_where_all_changes_are_alike_the_next_one_is_expected_to_be_like_them(effect: float) -> None:
    task = Task([effect] * 20)
    task.add(19)
    [(first, _)] = estimates(task).values()
    assert first > 0, "before anything is known a change is expected to help"
    for number in range(10):
        task.add(number)
    task.steps(80)
    for number in range(10, 15):
        task.add(number)
    new = {one.step: one.effect for one in task.credit.records()}[12]
    assert new > first if effect > 0 else new < 0
    head = numbers_in(task.credit.head().candidate)
    assert head & set(range(10, 15)) == (set(range(10, 15)) if effect > 0 else set()), "trusted where others helped"


# What is a child, and what stands for itself


def test_a_child_of_a_stranger_stands_for_itself() -> None:
    credit = Credit(SEED, 1.0)
    assert not take(credit, 1, {"answer": "Unknown."}, add("- rule 1"), scores={"0": 1.0})
    assert credit.records() == []
    assert credit.head().candidate == SEED


def test_changes_are_of_no_use_where_most_of_the_last_children_are_whole_texts() -> None:
    credit = Credit(SEED, 1.0)
    assert credit.outlook.joins is None
    credit.record_children(0, [True])
    assert credit.outlook.joins is False
    for step in (1, 1, 2):
        credit.record_children(step, [False, False])  # a step that runs again after a kill counts once
    assert credit.to_json()["children"] == [(0, True), *[(1, False)] * 2, *[(2, False)] * 2]
    again = Credit(SEED, 1.0)
    again.restore(json.loads(json.dumps(credit.to_json())), [])
    assert credit.outlook.joins is again.outlook.joins is True
    for step in range(3, 8):
        credit.record_children(step, [True])
    assert credit.outlook.joins is False


def test_the_same_change_from_many_children_is_one_change() -> None:
    credit = Credit(SEED, 1.0)
    for step, text in enumerate(["- rule 1", "* Rule 1", "1. rule  1\n"]):
        assert take(credit, step, SEED, add(text), scores={str(step): 1.0})
    [one] = credit.records()
    assert (one.step, one.component, one.part, one.replaces) == (0, "answer", "- rule 1", "")


def test_standing_on_a_rewrite_forgets_the_changes_of_what_it_wrote_anew_and_keeps_the_others() -> None:
    seed = {"one": "Answer.", "two": "Check."}
    credit = Credit(seed, 1.0)
    assert take(credit, 0, seed, add("- rule 0"), component="one")
    assert take(credit, 1, seed, add("- rule 1"), component="two")
    rewritten = {"one": "Everything is different.", "two": "Check."}
    credit.stand_on(rewritten, 7)
    assert [record.component for record in credit.records()] == ["one", "two"], "the record keeps what is gone"
    assert len(credit.to_json()["patches"]) == 1
    again = Credit(seed, 1.0)
    again.restore(credit.to_json(), [])
    assert again.records() == credit.records()
    assert credit.parent == 7
    assert credit.head().candidate == {"one": "Everything is different.", "two": "Check.\n- rule 1"}
    assert credit.composition_of(rewritten) == frozenset()
    assert credit.composition_of(seed) is None
    assert not take(again, 2, seed, add("- rule 2"), component="one"), "its parent is of the time before"
    assert take(credit, 3, rewritten, add("- rule 3"), component="one")


class Meanwhile(str):
    """A candidate's hash; something happens while it is looked up."""

    __slots__ = ("happens",)

    def __hash__(self) -> int:
        self.happens()
        return super().__hash__()


def test_a_score_that_comes_in_while_changes_get_another_base_is_no_evidence_on_other_changes() -> None:
    """Rollouts end on the run's loop, the writer is another thread."""
    credit, rewritten = Credit(SEED, 1.0), {"answer": "Everything is different."}
    for number in range(3):
        take(credit, number, SEED, add(rule(number)))
    name = Meanwhile(hash_of(credit.head().candidate))
    name.happens = lambda: credit.stand_on(rewritten, 1)
    credit.record_score(name, "train", "0", 0.5)
    assert take(credit, 9, rewritten, add("- rule 9"), scores={str(number): 0.5 for number in range(30)})
    assert credit.head().candidate == {"answer": "Everything is different.\n- rule 9"}


def test_what_is_kept_as_json_makes_the_same_head_again() -> None:
    task, told = Task([0.08] * 4 + [-0.2] * 2), list[tuple[str, str, str, float]]()
    for number in range(6):
        task.add(number)
    for _ in range(80):
        candidate = task.credit.variant(task.rng)
        told += [(hash_of(candidate), "train", str(e), s) for e, s in task.runs(candidate).items()]
    again = Credit(SEED, 1.0)
    again.restore(json.loads(json.dumps(task.credit.to_json())), told)
    assert again.head().candidate == task.credit.head().candidate
    assert [one.part for one in again.records()] == [one.part for one in task.credit.records()]


# Evidence that is much, or says little, or is nonsense


def finite(credit: Credit) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head, variant = credit.head(), credit.variant(random.Random(0))
        records = credit.records()
    assert math.isfinite(head.gain)
    assert all(math.isfinite(one.effect) and math.isfinite(one.error) and one.error >= 0 for one in records)
    assert set(head.candidate) == set(variant) == set(SEED)


ODD: dict[str, Any] = {
    "constant": lambda example, number: 0.5,
    "zero": lambda example, number: 0.0,
    "its example alone": lambda example, number: example / 20,
    "far above the perfect score": lambda example, number: 100.0 * (example + number % 3),
    "negative": lambda example, number: -5.0 * number,
    "huge": lambda example, number: 1e300 * (-1) ** number,
    "tiny": lambda example, number: 1e-300 * number,
    "infinite now and then": lambda example, number: math.inf if number % 7 == 0 else 0.5,
    "not a number now and then": lambda example, number: math.nan if number % 7 == 0 else 0.5,
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("examples", [1, 20])
@pytest.mark.parametrize("changes", [0, 1, 9])
def test_whatever_the_scores_are_the_estimates_are_finite(name: str, examples: int, changes: int) -> None:
    task = Task([0.0] * changes)
    for number in range(changes):
        task.add(number)
    for number in range(60):
        candidate = task.credit.variant(task.rng)
        score = ODD[name](hashed(number) % examples, number)
        task.credit.record_score(hash_of(candidate), "train", str(hashed(number) % examples), score)
        if number % 6 == 0:
            finite(task.credit)
    finite(task.credit)


# What a child takes out, rivals, and changes that do little


@pytest.mark.parametrize("adds", [True, False])
def test_what_a_child_takes_out_of_the_base_is_a_change_and_leaves_where_it_harms(adds: bool) -> None:
    base = {"answer": "Answer the question.\nBe polite.\nAlways answer in one word.\nCheck the facts."}
    credit, rng = Credit(base, 1.0), random.Random(0)
    assert take(credit, 0, base, edit("remove", 3), *[add("- rule 1")] * adds)
    for _ in range(60):
        variant = credit.variant(rng)
        for example in rng.sample(range(20), 3):
            score = (0.2 if "one word" in variant["answer"] else 0.8) + rng.gauss(0, NOISE)
            credit.record_score(hash_of(variant), "train", example, score)
    assert "one word" not in credit.head().candidate["answer"]


def test_of_changes_that_go_in_for_the_same_part_one_is_in_a_text() -> None:
    base = {"answer": "Answer the question.\nUse at most five plain short words here.\nBe polite."}
    credit, rng = Credit(base, 1.0), random.Random(0)
    for number, words in enumerate(("Use at most six plain short words.", "Use no more than five plain short words.")):
        assert take(credit, number, base, edit("replace", 2, words))
    texts = [credit.variant(rng)["answer"] for _ in range(40)] + [credit.head().candidate["answer"]]
    assert all(sum("plain short words" in line for line in text.splitlines()) == 1 for text in texts)
    assert len(set(texts)) == 3
