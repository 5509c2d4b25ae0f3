"""Steps overlap: reflection on a part, selection before validation, variants of the head; and it is true."""

from __future__ import annotations

from typing import Any

import pytest
from gepa.utils import CompositeStopper, NoImprovementStopper

from dspy_flashevolve import ConfigurationError, Edits, Workflow
from dspy_flashevolve.engine.staleness import Admit, Discard, Integrate
from tests.contract.surface import Heard, check_ends
from tests.contract.worlds import Rules, World, chance, play


class Kept(World):
    """Keeps who was made from whom; one rollout in three takes long."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.parent: dict[str, str] = {}

    def seconds(self, text: str, question: str) -> float:
        return 40.0 if question.endswith(("2", "5", "8")) else 1.0 + chance("t", text, question)

    async def acall(self, candidate: Any, reflective_dataset: Any, components_to_update: list[str]) -> dict[str, str]:
        made = await super().acall(candidate, reflective_dataset, components_to_update)
        self.parent |= {text: candidate[name] for name, text in made.items()}
        return made


def heard(world: World, calls: int = 240, **options: Any) -> tuple[Any, Heard]:
    events = Heard()
    gepa_kwargs = {"callbacks": [events]} | options.pop("gepa_kwargs", {})
    return play(world, calls, gepa_kwargs=gepa_kwargs, **options), events


def texts(program: Any) -> list[str]:
    return [one.steps[0].signature.instructions for one in program.detailed_results.candidates]


def only(candidate: Any) -> str:
    return next(iter(candidate.values()))


# Selection before validation


GREEDY = {"candidate_selection_strategy": "current_best"}


@pytest.mark.parametrize(("share", "early"), [(0.25, True), (1.0, False)])
def test_a_child_may_be_selected_before_its_validation_is_done_where_the_prefix_may_tell(
    share: float, early: bool
) -> None:
    ahead = 0
    for seed in (0, 3, 7):  # not every run has one, and which do is another matter on another Python
        _, events = heard(Kept(seed=seed), 300, search="pareto", workflow=Workflow(validate=share), **GREEDY)
        validated = {"0.3 seed 0"}
        for name, event in events.events:
            if name == "on_valset_evaluated":
                validated.add(only(event["candidate"]))
            elif name == "on_candidate_selected":
                ahead += only(event["candidate"]) not in validated
        if ahead:
            break
    assert bool(ahead) == early


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_parents_are_true_whatever_became_of_them_meanwhile(seed: int) -> None:
    world = Kept(seed=seed)
    program, _ = heard(world, 600, search="pareto", workflow=Workflow(validate=0.25), use_merge=False, **GREEDY)
    there = texts(program)
    index = {text: number for number, text in enumerate(there)}
    for number, parents in enumerate(program.detailed_results.parents[1:], start=1):
        made_from = world.parent[there[number]]
        while made_from not in index:
            made_from = world.parent[made_from]
        assert parents == [index[made_from]]


# Variants of the head


def test_steps_start_from_variants_of_the_head_and_the_pool_holds_only_what_was_validated() -> None:
    program, events = heard(Rules(), 600, search=Edits(frontier_share=0.25), use_merge=False)
    validated, ahead, after = {"0.3 seed 0"}, 0, 0
    for name, event in events.events:
        if name == "on_valset_evaluated":
            validated.add(only(event["candidate"]))
        elif name == "on_candidate_selected":
            ahead += only(event["candidate"]) not in validated
            after += only(event["candidate"]) in validated
    assert ahead > after > 0
    assert all(len(scores) == 12 for scores in program.detailed_results.val_subscores)
    assert len(program.async_stats.changes) > 5


# The policy


class Asked:
    """Discards at one place every other time; admits else."""

    def __init__(self, place: Any) -> None:
        self.looks: tuple[Any, ...] = (place,)
        self.seen: list[Any] = []

    def decide(self, look: Any, history: Any) -> Any:
        self.seen.append(look.place)
        return Discard("enough") if len(self.seen) % 2 else Admit()


@pytest.mark.parametrize("place", ["before_propose", "after_propose", "after_screen", "before_commit"])
def test_a_policy_is_asked_where_it_says_and_a_discard_ends_the_step_there(place: Any) -> None:
    policy = Asked(place)
    program, _ = heard(Kept(), 300, search="pareto", staleness=policy, use_merge=False)
    stats = program.async_stats
    assert set(policy.seen) == {place}
    assert stats.end_reasons["stale: enough"] == stats.ended["discarded"] == -(-len(policy.seen) // 2)
    check_ends(stats)


class Repairing:
    """A policy of the user's own that wants a repair at a place."""

    def __init__(self, place: Any) -> None:
        self.looks: tuple[Any, ...] = (place,)

    def decide(self, look: Any, history: Any) -> Any:
        return Integrate()


@pytest.mark.parametrize("place", ["before_propose", "after_screen", "before_commit"])
def test_a_policy_that_wants_a_repair_elsewhere_ends_the_run_by_name(place: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"Integrate\(\) {place}: children are repaired after_propose"):
        play(World(), 120, search="pareto", staleness=Repairing(place))


# Stoppers that count iterations


class Counted(NoImprovementStopper):
    """Counts how often it is asked, and never says stop."""

    def __init__(self) -> None:
        super().__init__(10**9)
        self.asked = 0

    def __call__(self, gepa_state: Any) -> bool:
        self.asked += 1
        return super().__call__(gepa_state)


@pytest.mark.parametrize("composite", [False, True])
@pytest.mark.parametrize("search", ["edits", "pareto"])
def test_a_stopper_that_counts_iterations_counts_those_that_came_one_after_the_other(
    search: Any, composite: bool
) -> None:
    """Sixteen steps that overlap are as many iterations as came after one another, and each commit is one."""
    stopper = Counted()
    asked = CompositeStopper(CompositeStopper(stopper), mode="all") if composite else stopper
    options = {"workflow": Workflow(live_steps=16), "gepa_kwargs": {"stop_callbacks": asked}}
    stats = play(World(), 300, search=search, **options).async_stats
    commits, steps = len(stats.commits), sum(stats.ended.values())
    assert commits <= stopper.asked < commits + (steps - commits) / 2
