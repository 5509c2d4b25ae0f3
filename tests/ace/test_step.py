"""A sample's way, from its first attempt to the playbook, with a program and modules that say what they are told to."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import anyio
import dspy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_flashevolve import AsyncACE, Full, Guarded, Playbook
from dspy_flashevolve.observe.statistics import AceStats
from dspy_flashevolve.sim.virtual import run
from tests.ace.books import book_of
from tests.fakes import Chain, fake_lm, reply_for

BOOK = book_of([("other", "Mind units."), ("other", "Round late.")])
GUARDED = Guarded(max_gap=2, looks=("before_commit",))
Operations = list[dict[str, Any]]


def add(content: str, section: str = "other") -> dict[str, Any]:
    return {"type": "ADD", "section": section, "content": content}


def update(bullet: str, content: str) -> dict[str, Any]:
    return {"type": "UPDATE", "id": bullet, "content": content}


@dataclass
class Script:
    """What is said of one sample, and after how many seconds.

    Args:
        scores: of its attempts, in order; the last one for ever.
        insight, tags, operations: of each reflection, and of the curator.
        before, curating: seconds that its first reflection, and its curator, take.
    """

    scores: tuple[float, ...] = (0.0,)
    insight: str = "an insight"
    tags: dict[str, str] = field(default_factory=dict)
    operations: Operations = field(default_factory=list)
    before: float = 0.0
    curating: float = 0.0


@dataclass
class Learnt:
    """What came of it: the newest playbook, statistics, who was asked what, in order, and what the program was told."""

    program: Any
    asked: list[tuple[str, ...]]
    prompts: list[str]

    @property
    def stats(self) -> AceStats:
        return self.program.async_stats

    @property
    def texts(self) -> list[str]:
        return [one.content for one in self.program.playbook.bullets]

    def way(self, sample: int = 0) -> list[str]:
        return [one[0] for one in self.asked if one[1] == f"question: {sample}"]


def learnt(
    *scripts: Script,
    playbook: Playbook = BOOK,
    **options: Any,
) -> Learnt:
    """A stream of one window, a sample a script, all at once in virtual time."""
    asked: list[tuple[str, ...]] = []
    prompts: list[str] = []
    attempts = [0] * len(scripts)

    def metric(gold: Any, pred: Any) -> dspy.Prediction:
        sample = int(gold.question)
        scores, number = scripts[sample].scores, attempts[sample]
        attempts[sample] += 1
        asked.append(("attempt", f"question: {sample}"))
        return dspy.Prediction(score=scores[min(number, len(scores) - 1)], feedback="feedback")

    def of(task: str) -> Script:
        return scripts[int(task.removeprefix("question: "))]

    class Reflects(dspy.Module):
        async def aforward(self, task: str, **inputs: Any) -> Any:
            script, first = of(task), ("reflect", task) not in asked
            asked.append(("reflect", task))
            await anyio.sleep(script.before if first else 0)
            return dspy.Prediction(insight=script.insight, bullet_tags=json.dumps({**script.tags, "x": "splendid"}))

    class Curates(dspy.Module):
        async def aforward(self, task: str, **inputs: Any) -> Any:
            asked.append(("curate", task))
            await anyio.sleep(of(task).curating)
            return dspy.Prediction(operations=[*of(task).operations, {"type": "HUG"}])

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return reply_for(prompt, answer="1", cited_bullets="oth-1, oth-2, oth-9")

    modules = {"reflector": Reflects(), "curator": Curates()}
    optimizer = AsyncACE(metric, **{"num_threads": 16, "token_budget": 10_000, **modules, **options})
    stream = [dspy.Example(question=str(number)).with_inputs("question") for number in range(len(scripts))]

    async def main() -> Any:
        with dspy.context(lm=fake_lm(answer)):
            return await optimizer.aadapt(Chain(), stream, window=len(stream), playbook=playbook)

    return Learnt(run(main), asked, prompts)


RIGHT = (1.0,)


def test_a_right_answer_is_reflected_on_once_and_not_tried_again() -> None:
    one = learnt(Script(RIGHT))
    assert one.way() == ["attempt", "reflect", "curate"]
    assert (one.stats.right_at_once, one.stats.corrected) == (1, 0)


def test_a_wrong_answer_is_tried_again_with_the_reflection_until_it_is_right() -> None:
    one = learnt(Script((0.0, 0.0, 1.0)))
    assert one.way() == ["attempt", "reflect", "attempt", "reflect", "attempt", "curate"]
    advised = ["What was learnt from an earlier attempt at this task:" in prompt for prompt in one.prompts]
    assert advised == [False, True, True]
    assert all(("Insight: an insight" in prompt) == told for prompt, told in zip(one.prompts, advised, strict=True))
    assert (one.stats.right_at_once, one.stats.corrected) == (0, 1)
    assert one.stats.windows[0].scored == 1


@settings(max_examples=5)
@given(st.integers(1, 5))
def test_no_sample_has_more_rounds_than_it_may(max_rounds: int) -> None:
    way = learnt(Script(), max_rounds=max_rounds).way()
    assert way.count("reflect") == max_rounds
    assert way.count("attempt") == 1 + max_rounds


def test_a_reflection_that_says_nothing_ends_the_rounds_and_its_tags_still_count() -> None:
    one = learnt(Script(insight="", tags={"oth-1": "harmful"}))
    assert one.way() == ["attempt", "reflect"]
    assert one.stats.ended["rejected"] == 1
    assert one.stats.problems["empty reflection"] == 1
    assert one.program.playbook.bullets[0].harmful == 1


def test_tags_count_once_a_sample_leave_the_version_and_pass_by_what_was_not_cited() -> None:
    one = learnt(Script(tags={"oth-1": "helpful", "oth-9": "harmful"}))
    assert one.program.playbook.bullets[0].helpful == 1, "three reflections, one sample"
    assert (one.program.playbook.version, one.stats.ended["rejected"]) == (BOOK.version, 1)
    assert one.stats.problems["tag of an uncited bullet"] == 3


def test_tags_of_what_went_meanwhile_count_nothing() -> None:
    late = Script(RIGHT, tags={"oth-1": "helpful"}, curating=10)
    one = learnt(late, Script(RIGHT, operations=[{"type": "REMOVE", "id": "oth-1"}]))
    assert one.stats.problems["tag of a gone bullet"] == 1
    assert one.stats.tags == {}


def test_operations_are_applied_and_what_is_wrong_with_some_does_not_stop_the_others() -> None:
    removes = [{"type": "REMOVE", "id": "oth-9"}, update("oth-1", "a"), {"type": "REMOVE", "id": "oth-1"}]
    one = learnt(Script(RIGHT, operations=[add("Sum first."), add("x", "nowhere"), *removes]))
    assert one.stats.ended["committed"] == 1
    assert one.texts == ["a", "Round late.", "Sum first."]
    assert one.stats.operations == {"add": 1, "update": 1}
    found = {kind: count for kind, count in one.stats.problems.items() if kind not in ("unknown tag",)}
    assert found == {"unknown operation": 1, "unknown section": 1, "unknown id": 1, "contradiction": 1}


def test_texts_are_made_ready_for_comparison_before_they_are_applied() -> None:
    embedded: list[str] = []

    def embedder(texts: list[str]) -> list[list[float]]:
        embedded.extend(texts)
        return [[1.0, float(len(embedded) + place)] for place in range(len(texts))]

    learnt(Script(RIGHT, operations=[add("Sum first.")]), deduplicate=1.0, embedder=embedder)
    assert sorted(embedded) == ["Mind units.", "Round late.", "Sum first."]


# Staleness


NEAR, NEW = "Always check the sign of each of the terms", "Convert percentages"


def others(*contents: str, first: float = 1.0) -> list[Script]:
    """Samples that add a bullet each, one after the other, in a version of its own."""
    return [Script(RIGHT, operations=[add(one)], before=first + place) for place, one in enumerate(contents)]


def stale(policy: Any, content: str, *contents: str) -> Learnt:
    """A sample whose ADD is curated while others add bullets."""
    operations = [add(content), update("oth-1", "Mind all units.")]
    late = Script(RIGHT, tags={"oth-2": "helpful"}, operations=operations, curating=100)
    return learnt(late, *others(*contents), staleness=policy)


def test_full_admits_stale_additions_as_they_are() -> None:
    one = stale("full", f"{NEAR} first.", f"{NEAR}.")
    assert one.texts[2:] == [f"{NEAR}.", f"{NEAR} first."]
    assert one.stats.additions == {"admitted": 1, "merged": 0}


def test_guarded_merges_an_addition_into_the_newer_bullet_that_nearly_says_it() -> None:
    one = stale(GUARDED, f"{NEAR} first.", f"{NEAR}.")
    assert one.texts[2:] == [f"{NEAR}."]
    assert one.program.playbook.bullets[2].helpful == 1
    assert one.stats.additions["merged"] == 1
    assert one.stats.problems["repeats a newer bullet"] == 1


def test_guarded_admits_what_is_new_and_not_too_late() -> None:
    one = stale(GUARDED, NEW, NEAR, "b")
    assert NEW in one.texts
    assert one.stats.additions["admitted"] == 1


def test_guarded_drops_what_is_too_late_and_only_additions() -> None:
    one = stale(GUARDED, NEW, "a", "b", "c")
    assert NEW not in one.texts
    assert one.texts[0] == "Mind all units."
    assert one.stats.additions["dropped"] == 1
    assert one.stats.problems["stale addition"] == 1
    assert one.stats.looks == {"discard": 1}
    assert one.stats.gaps["before_commit"] == {0: 3, 3: 1}


@pytest.mark.parametrize("policy", [Full(), GUARDED])
def test_an_addition_that_nobody_overtook_is_no_business_of_the_policy(policy: Any) -> None:
    one = stale(policy, NEW)
    assert (NEW in one.texts, one.way()[-1], one.stats.looks, one.stats.additions) == (True, "curate", {}, {})


def test_an_update_of_what_others_changed_meanwhile_does_not_overwrite_it() -> None:
    late = Script(RIGHT, operations=[update("oth-1", "late")], curating=10)
    one = learnt(late, Script(RIGHT, operations=[update("oth-1", "early")]))
    assert one.texts[0] == "early"
    assert one.stats.problems["overtaken"] == 1


@pytest.mark.parametrize("budget", [60, 100])
def test_the_token_budget_holds_after_every_sample(budget: int) -> None:
    scripts = others(*(f"Insight number {number} of many." for number in range(30)))
    one = learnt(*scripts, playbook=Playbook(), token_budget=budget, num_threads=30)
    assert one.program.playbook.tokens() <= budget
    assert one.stats.evicted > 0
    assert one.texts
