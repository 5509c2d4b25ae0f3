"""What holds for every search: the ones of the package, the one of docs/staleness.md, and others of a user's own."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
from gepa.core.state import GEPAState, ValsetEvaluation

from dspy_flashevolve import FLASHEVOLVE, AsyncGEPA, ConfigurationError, Workflow
from dspy_flashevolve.gepa import Observation, Search, Start
from dspy_flashevolve.gepa.credit import Credit
from dspy_flashevolve.gepa.edit_search import EditSearch
from dspy_flashevolve.gepa.lockstep import Lockstep
from dspy_flashevolve.gepa.published import Published
from tests.contract.surface import check_ends, check_winner, compiled
from tests.contract.worlds import Rules, World, play
from tests.docs.run_page import blocks

SEED = {"p": "seed"}
PAGE = Path(__file__).parents[2] / "docs" / "staleness.md"


class Mixture(Search):
    """Every child joins, and what the best one had on its screen is validated last."""

    def __init__(self) -> None:
        self.best: tuple[float, Any] = (float("-inf"), None)
        self.seen: list[Observation] = []
        self.threads: set[str] = set()

    def learn(self, observation: Observation) -> None:
        self.seen.append(observation)
        self.threads.add(threading.current_thread().name.rpartition("_")[0])

    def select(self, state: Any, rng: random.Random) -> Start:
        self.threads.add(threading.current_thread().name.rpartition("_")[0])
        return Start(0, {name: f"{text} " for name, text in state.program_candidates[0].items()})

    def joins(self, step: int, child: Any, scores: Any) -> bool:
        self.best = max(self.best, (sum(scores.values()), child.candidate), key=lambda pair: pair[0])
        return True

    def last(self) -> Any:
        return self.best[1]


def of_the_page() -> Search:
    """The search that docs/staleness.md writes."""
    [source] = [text for _, text in blocks(PAGE) if "class UpperBound" in text]
    names: dict[str, Any] = {}
    exec(source[: source.index("optimizer =")], names)
    assert len(source.splitlines()) < 60
    return names["UpperBound"]()


SEARCHES = {
    "pareto": Search,
    "edits": lambda: EditSearch(Credit(SEED, 1.0), 0.25, "train"),
    "lockstep": Lockstep,
    "published": lambda: Published(Workflow(validate=0.5), 1.0, 0),
    "of the page": of_the_page,
    "mixture": Mixture,
}


def state_of(*scores: float) -> Any:
    """gepa's, with a candidate for each score; none is validated without scores."""
    state: Any = GEPAState(SEED, ValsetEvaluation({}, {0: scores[0]} if scores else {}, None))
    for number, score in enumerate(scores[1:], 1):
        evaluation: Any = ValsetEvaluation({0: None}, {0: score}, None)
        state.update_state_with_new_program([0], {"p": f"text {number}"}, evaluation, None, number)
    return state


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("scores", [(), (0.5,), (0.5, 0.75, 0.25)], ids=["no scores", "the seed", "several"])
def test_a_start_is_one_of_the_pool_with_the_components_of_the_seed_and_follows_from_the_randomness(
    name: str, scores: tuple[float, ...]
) -> None:
    starts: list[Start | None] = []
    for _ in range(2):
        search, state = SEARCHES[name](), state_of(*scores)
        for number in range(3):
            search.observe(Observation(SEED, "seed", "train", str(number), 0.5))
        search.catch_up()
        starts.append(search.select(state, random.Random(7)))
        assert state.program_candidates[0] == SEED, "the state is only read"
    assert starts[0] == starts[1]
    if starts[0] is not None:
        assert 0 <= starts[0].candidate < max(1, len(scores))
        assert starts[0].texts is None or starts[0].texts.keys() == SEED.keys()


@pytest.mark.parametrize("name", SEARCHES)
def test_before_anything_was_run_nothing_is_validated_last(name: str) -> None:
    search = SEARCHES[name]()
    search.catch_up()
    assert search.last() is None
    assert 0 <= search.frontier_share <= 1


RUNS: dict[str, dict[str, Any]] = {
    "pareto": {"search": "pareto"},
    "edits": {"search": "edits"},
    "lockstep": {"schedule": "lockstep"},
    "published": FLASHEVOLVE,
    "of the page": {"search": of_the_page()},
    "mixture": {"search": Mixture()},
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("world", [World(seed=2), Rules(train=12, val=10)], ids=["whole texts", "edits"])
def test_a_run_keeps_its_budget_ends_each_step_once_and_validates_its_winner(name: str, world: World) -> None:
    program = play(world, 160, **RUNS[name])
    details, stats = program.detailed_results, program.async_stats
    assert stats.metric_calls <= 160 + (name == "lockstep") * (world.val + 6)
    check_ends(stats)
    check_winner(details, world.val)


def test_what_joins_costs_no_validation_and_the_last_candidate_is_validated() -> None:
    world, own = World(seed=2), Mixture()
    optimizer = AsyncGEPA(world.metric, max_metric_calls=160, instruction_proposer=world, search=own)
    assert optimizer.search is own
    program = play(world, 160, search=own)
    details, stats = program.detailed_results, program.async_stats
    assert stats.ended["joined"] > 2
    assert len(details.candidates) == 2
    assert own.seen == [], "a run works on a copy"


def copies(monkeypatch: pytest.MonkeyPatch) -> list[Mixture]:
    """The copies on which runs will work."""
    used: list[Mixture] = []

    def copied(self: Mixture, memo: Any) -> Mixture:
        used.append(Mixture())
        return used[-1]

    monkeypatch.setattr(Mixture, "__deepcopy__", copied, raising=False)
    return used


def test_a_search_is_called_in_the_writer_and_learns_from_what_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    used = copies(monkeypatch)
    program = compiled(100, 2, num_threads=16, search=Mixture())
    [search] = used
    assert search.threads == {"flashevolve-pool"}
    assert 12 < len(search.seen) <= program.async_stats.metric_calls
    assert {one.split for one in search.seen} == {"train", "val"}


def test_a_run_that_goes_on_learns_what_its_earlier_sessions_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = copies(monkeypatch)
    for calls in (100, 160):
        play(World(seed=2), calls, search=Mixture(), log_dir=str(tmp_path))
    first, second = used
    assert {one.example for one in first.seen} <= {one.example for one in second.seen}
    assert len(second.seen) > len(first.seen) > 12


def test_what_is_no_search_and_what_does_not_go_with_one_is_refused() -> None:
    for search in (Mixture, "widest", 3):
        with pytest.raises(ConfigurationError, match="a Search, or None"):
            AsyncGEPA(World().metric, max_metric_calls=9, instruction_proposer=World(), search=search)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"Workflow\(validate=, workers=, median_seconds=\)"):
        play(World(), 99, search=Mixture(), workflow=Workflow(validate=0.5))


class Wrong(Search):
    def __init__(self, start: Start | None = None, last: Any = None) -> None:
        self.start, self.named = start, last

    def select(self, state: Any, rng: random.Random) -> Start | None:
        return self.start

    def last(self) -> Any:
        return self.named


@pytest.mark.parametrize(
    ("search", "message"),
    [
        (Wrong(Start(99)), "Wrong.select gave candidate 99, expected 0 to"),
        (Wrong(Start(0, {"nope": "text"})), "Wrong.select gave {'nope': 'text'}, expected a str for each of"),
        (Wrong(last={}), "Wrong.last gave {}, expected a str for each of"),
    ],
    ids=["index", "component", "last"],
)
def test_what_a_search_of_the_users_may_not_give_is_named(search: Search, message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        play(Rules(), 60, search=search)
    assert message in str(raised.value)
