"""Validations that meet each other, strategies that change the order of children, and heads that go meanwhile."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from gepa.core.state import ValsetEvaluation
from gepa.strategies.proposal_sampling import IndependentSampling, ProposalTask
from gepa.strategies.proposal_selection import TopKImprovements
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve import Reflective, Speculation
from dspy_flashevolve.engine.events import Committed, EventBus, HeadEnded, HeadLanded, Speculated, SpeculationEnded
from dspy_flashevolve.gepa.evaluations import as_batch
from dspy_flashevolve.gepa.heads import Heads
from dspy_flashevolve.gepa.payloads import Child
from dspy_flashevolve.gepa.riding import parent_of
from dspy_flashevolve.gepa.train_reports import in_order, joined
from dspy_flashevolve.gepa.validating import Validating
from tests.gepa.test_order import EXAMPLES, evaluation
from tests.gepa.test_selection import part, started
from tests.gepa.test_speculation import Slow, early, nearest_confirmed
from tests.gepa.worlds import Outcome, World, chance, play

# Taking candidates back


def test_candidates_that_go_at_the_same_moment_as_their_parents_go_once_and_each_is_told_of() -> None:
    pool, bus, events = started(), EventBus(), list[Any]()
    bus.subscribe(events.append)
    parent = pool.speculative.add({"p": "parent"}, (), (0,), 1, evaluation=part({0: 1.0})).key
    child = pool.speculative.add({"p": "child"}, (parent,), (), 2, evaluation=part({0: 1.0})).key
    services: Any = SimpleNamespace(pool=pool, bus=bus, clock=lambda: 0.0)
    validating = Validating(services, None)
    writer_is_free = threading.Event()

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(pool.write, writer_is_free.wait)
            await checkpoint()
            group.start_soon(validating.withdraw, 1, [parent, None], "one")
            group.start_soon(validating.withdraw, 2, [child], "other")
            for _ in range(10):
                await checkpoint()
            writer_is_free.set()

    anyio.run(main)
    assert len(pool.speculative) == 0
    assert [(event.ticket, event.key, event.end) for event in events] == [
        (1, parent, "removed: one"),
        (2, child, "removed: other"),
    ]
    pool.close()


def test_only_heads_are_told_of_as_heads_when_a_head_goes_with_what_stands_on_it() -> None:
    pool = started()
    heads = Heads(pool, margin=0.0)
    begun = heads.begin({"p": "head"}, heads.newest(visible=False), ())
    assert begun is not None
    head = begun[0]
    ordinary = pool.speculative.add({"p": "ordinary"}, (head,), (), 2, evaluation=part({0: 1.0})).key
    assert heads.drop(head) == (head,)
    assert ordinary not in pool.speculative
    assert ordinary in pool.speculative.fallen
    pool.close()


@pytest.mark.parametrize("seed", [1, 2])
def test_in_whole_runs_too(seed: int) -> None:
    staleness = Reflective(batch=2, untaken="alone", frontier_share=0.3)
    world = World(seed=seed, seconds=Slow.long_validations)
    outcome = play(world, 900, staleness=staleness, speculation=Speculation(validate=0.1), num_threads=48)
    outcome.check_budget()
    assert {event.head for event in outcome.of(HeadEnded)} <= {event.head for event in outcome.of(HeadLanded)}
    assert outcome.of(SpeculationEnded)


def test_a_head_that_goes_while_its_own_end_is_on_its_way_ends_its_ticket_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the question whether it is there and its removal, in the writer's thread, another may take it along."""
    drop, twice = Heads.drop, list[int]()

    def taken_along(heads: Heads, key: int) -> tuple[int, ...]:
        removed = drop(heads, key)
        if removed and key not in twice:
            twice.append(key)
            return ()
        return removed

    monkeypatch.setattr(Heads, "drop", taken_along)
    world = World(score=lambda t, q: chance(t, q) * (0.2 if q.startswith("v") and "child" not in t else 1.0))
    world.score = lambda t, q: 0.5 if t.endswith("seed") else (0.9 if q.startswith("t") else 0.0)
    outcome = play(world, 300, staleness=Reflective(batch=2), num_threads=48)
    outcome.check_budget()
    assert twice
    assert any("is validated no further" in reason for reason in outcome.stats.end_reasons)


# Who is whose parent


def test_a_selection_strategy_that_changes_the_order_keeps_children_with_their_parents() -> None:
    gepa_kwargs = {"sampling_strategy": IndependentSampling(4), "selection_strategy": TopKImprovements(4)}
    outcome, texts = early(gepa_kwargs=gepa_kwargs, candidate_selection_strategy="pareto", max_live_tickets=6)
    outcome.check_budget()
    assert texts
    for index in range(1, len(outcome.texts)):
        assert outcome.details.parents[index] == [nearest_confirmed(outcome, index)]


def child(base: int | None, parent: int) -> Child:
    task: Any = ProposalTask(parent, {"p": "parent"}, [], [])
    return Child(0, task, {"p": "child"}, as_batch([])[0], {}, base=base)


def test_the_parent_of_a_rider_is_itself_once_it_is_confirmed() -> None:
    pool = started()
    waiting = pool.speculative
    under = waiting.add({"p": "under"}, (), (0,), 1).key
    base = waiting.add({"p": "base"}, (under,), (), 2).key
    assert parent_of(child(None, 5), waiting) == 5
    assert parent_of(child(base, 0), waiting) == 0
    waiting.confirm_late(under, 3)
    assert parent_of(child(base, 0), waiting) == 3
    waiting.confirm_late(base, 4)
    assert parent_of(child(base, 0), waiting) == 4
    pool.close()


@pytest.mark.parametrize(
    "staleness", [Reflective(batch=1, min_gap=0), Reflective(batch=3, min_gap=2, frontier_share=1.0)], ids=str
)
def test_integrated_candidates_name_the_parents_of_their_children_that_were_speculative_once(staleness: Any) -> None:
    once_speculative = 0
    for seed in range(3):
        outcome, early_texts = early(Slow(seed=seed), staleness=staleness)
        outcome.check_budget()
        assert len(set(outcome.texts)) == len(outcome.texts)
        index = {text: number for number, text in enumerate(outcome.texts)}
        committed = {event.candidate: event.seconds for event in outcome.of(Committed)}
        for number, parents in enumerate(outcome.details.parents[1:], start=1):
            assert parents
            assert all(0 <= parent < number for parent in parents)
            if outcome.texts[number] not in outcome.world.integrated:
                continue
            seconds, _, theirs = outcome.world.integrated[outcome.texts[number]]
            for text in theirs:
                if text in index and committed.get(index[text], -1.0) < seconds:
                    assert index[text] in parents
                    once_speculative += text in early_texts
    assert once_speculative, "no parent had been speculative: these runs show nothing"


# Heads


def heads(world: World, speculation: Speculation, **options: Any) -> Outcome:
    settings: dict[str, Any] = {"staleness": Reflective(batch=3), "num_threads": 48, "speculation": speculation}
    outcome = play(world, 500, **(settings | options))
    outcome.check_budget()
    return outcome


def test_a_head_that_leads_on_a_part_of_its_screen_is_there_before_the_screen_has_ended() -> None:
    world = Slow(seconds=lambda text, question: 1 + 60 * chance(text, question) ** 4)
    outcome = heads(world, Speculation(screen=0.34))
    landed = {event.head: event for event in outcome.of(HeadLanded)}
    shown = {event.key: event for event in outcome.of(Speculated) if event.key in landed}
    assert shown
    assert all(event.seconds <= landed[key].seconds for key, event in shown.items())
    assert any(event.seconds < landed[key].seconds for key, event in shown.items())
    assert all(event.score > event.best for event in shown.values())
    whole = heads(Slow(seconds=world.seconds), Speculation(screen=1.0))
    assert not {event.key for event in whole.of(Speculated)} & {event.head for event in whole.of(HeadLanded)}


def test_a_head_that_led_and_fails_its_screen_goes_with_what_stands_on_it() -> None:
    """Integrated texts are perfect on what is quick, and worth nothing on what is slow."""

    def fading(text: str, question: str) -> float:
        slow = int(question.split()[1]) % 3 == 2
        return 0.5 if "child" in text or text.endswith("seed") else float(not slow) * 0.7

    def seconds(text: str, question: str) -> float:
        return 80.0 if int(question.split()[1]) % 3 == 2 else 1.0

    outcome = heads(Slow(score=fading, seconds=seconds), Speculation(screen=0.34))
    shown = {event.key for event in outcome.of(Speculated)}
    failed = {event.head for event in outcome.of(HeadLanded) if not event.passed}
    assert shown & failed
    assert len(outcome.run.pool.speculative) == 0
    assert failed <= outcome.run.pool.speculative.fallen


class Worthless(Slow):
    """Integrated texts are good on minibatches and worth nothing on the validation set."""

    highest = 1.0

    def __init__(self) -> None:
        super().__init__(score=self.only_in_training)

    def only_in_training(self, text: str, question: str) -> float:
        if question == "v 0" and text.endswith("seed"):
            return self.highest
        integrated = "child" not in text and not text.endswith("seed")
        return 0.0 if integrated and question.startswith("v") else 0.5 + 0.4 * integrated


@pytest.mark.parametrize("highest", [1.0, 1.5])
def test_a_head_that_cannot_pass_its_prefix_gives_up_the_rest_of_it_unless_scores_are_above_the_perfect_one(
    highest: float,
) -> None:
    world = Worthless()
    world.highest = highest
    outcome = heads(world, Speculation(validate=0.75), max_live_tickets=4)
    rolled = [reason for reason in outcome.stats.end_reasons if "rolled back:" in reason]
    assert rolled
    assert any("rolled back: - on its prefix" in reason for reason in rolled) == (highest == 1.0)
    run = [sum(t == text and q.startswith("v") for t, q in world.scored) for text in world.integrated]
    assert (0 < min(count for count in run if count) < 9) == (highest == 1.0)
    assert [event.end for event in outcome.of(HeadEnded)] == ["rolled back"] * len(outcome.of(HeadEnded))


# Parts of a validation


PARTS = st.dictionaries(st.integers(0, 9), st.tuples(st.floats(0, 1), st.booleans()), min_size=1)


@given(PARTS, st.sets(st.integers(0, 9)), st.permutations(range(10)))
def test_two_parts_are_the_whole_in_whatever_order_they_were_run(
    whole: dict[int, tuple[float, bool]], first: set[int], order: list[int]
) -> None:
    def of(ids: list[int]) -> ValsetEvaluation[Any, Any]:
        told = {i: ({"one": whole[i][0]} if whole[i][1] else {}) for i in ids}
        return ValsetEvaluation(
            {i: f"output {i}" for i in ids}, {i: whole[i][0] for i in ids}, told if any(told.values()) else None
        )

    ran = [i for i in order if i in whole]
    parts = [of([i for i in ran if (i in first) == wanted]) for wanted in (True, False)]
    ids = sorted(whole)
    assert in_order(joined(*parts), ids) == of(ids)
    assert list(in_order(joined(*parts), ids).scores_by_val_id) == ids
    assert evaluation([0.5] * EXAMPLES).objective_scores_by_val_id is None
