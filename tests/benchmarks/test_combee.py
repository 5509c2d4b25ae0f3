"""Combee: how records are dealt, what is called how often, and that dspy.GEPA takes it."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from typing import Any

import anyio
import dspy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.combee import CombeeReflection, MergeProposals
from benchmarks.models.fallible import FallibleModel
from dspy_flashevolve.sim.backend import H100_QWEN3_8B
from dspy_flashevolve.sim.prompts import parse_chat_request
from dspy_flashevolve.sim.replies import reply_to
from dspy_flashevolve.sim.words import WORDS, Rule, rules_in
from tests.fakes import Chain, digits, examples, fake_lm, hashed, reply_for, task_lm

pytestmark = pytest.mark.anyio
CANDIDATE = {"p": "current p", "q": "current q"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def records(count: int) -> list[dict[str, Any]]:
    return [{"Inputs": f"record <{number}>", "Feedback": f"feedback <{number}>"} for number in range(count)]


class Model:
    """Answers maps and reduces by their prompts, and counts both."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.maps: list[str] = []
        self.reduces: list[str] = []

    def __call__(self, prompt: str) -> str:
        reduces = "proposed_instructions" in prompt
        with self.lock:
            (self.reduces if reduces else self.maps).append(prompt)
        if reduces:
            return reply_for(prompt, new_instruction=f"reduced {hashed(prompt) % 10**6}")
        return reply_for(prompt, new_instruction=f"mapped {hashed(prompt) % 10**6}")


def dealt(prompt: str) -> Counter[str]:
    """How often each record stands in a map's prompt."""
    return Counter(part.split(">")[0] for part in prompt.split("record <")[1:])


async def proposed(asynchronous: bool, model: Any, count: int, components: list[str], **options: Any) -> dict[str, str]:
    proposer = CombeeReflection(**options)
    dataset = {"p": records(count), "q": records(count)}
    with dspy.context(lm=fake_lm(model)):
        if asynchronous:
            return await proposer.acall(CANDIDATE, dataset, components)
        return proposer(CANDIDATE, dataset, components)


@given(st.integers(1, 40), st.integers(1, 3), st.none() | st.integers(1, 50))
def test_each_record_is_dealt_as_often_as_asked_over_groups_of_about_equal_size(
    count: int, copies: int, groups: int | None
) -> None:
    dealt_out = CombeeReflection(copies=copies, groups=groups)._deal(records(count))  # type: ignore[arg-type]
    groups = groups or math.isqrt(count)
    times = copies if groups > 1 else 1
    assert Counter(str(record) for group in dealt_out for record in group) == {str(r): times for r in records(count)}
    assert len(dealt_out) == min(count * times, groups)
    sizes = {len(group) for group in dealt_out}
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_one_map_a_group_and_one_reduce_a_component(asynchronous: bool) -> None:
    model = Model()
    texts = await proposed(asynchronous, model, 16, ["p", "q"])
    assert set(texts) == {"p", "q"}
    assert all(text.startswith("reduced") for text in texts.values())
    assert (len(model.maps), len(model.reduces)) == (8, 2)
    prompts_on_p = [prompt for prompt in model.maps if "current p" in prompt]
    assert sum((dealt(prompt) for prompt in prompts_on_p), Counter()) == {str(number): 2 for number in range(16)}


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_the_reduce_reads_every_proposal(asynchronous: bool) -> None:
    model = Model()
    await proposed(asynchronous, model, 9, ["p"])
    assert [f"### Proposal {number}\nmapped" in model.reduces[0] for number in (1, 2, 3, 4)] == [True] * 3 + [False]
    assert "current p" in model.reduces[0]


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_three_records_are_reflected_on_once_without_a_reduce(asynchronous: bool) -> None:
    model = Model()
    assert (await proposed(asynchronous, model, 3, ["p"]))["p"].startswith("mapped")
    assert (len(model.maps), len(model.reduces)) == (1, 0)
    assert dealt(model.maps[0]) == {"0": 1, "1": 1, "2": 1}


def test_the_reduce_is_combees_own_and_not_the_repair_of_stale_children() -> None:
    assert set(MergeProposals.input_fields) == {"current_instruction", "proposed_instructions"}
    assert set(MergeProposals.output_fields) == {"new_instruction"}


async def test_long_proposals_are_read_to_their_ends() -> None:
    reduces: list[str] = []

    def answer(prompt: str) -> str:
        if "proposed_instructions" in prompt:
            reduces.append(prompt)
        text = "reduced" if "proposed_instructions" in prompt else "rule " * 3000 + "the last one"
        return reply_for(prompt, new_instruction=text)

    assert await proposed(True, answer, 4, ["p"]) == {"p": "reduced"}
    assert reduces[0].count("the last one") == 2


@pytest.mark.long
@given(st.integers(1, 12), st.integers(1, 2), st.integers(0, 3))
def test_the_awaited_twin_does_the_same(count: int, copies: int, seed: int) -> None:
    async def both() -> list[Any]:
        seen: list[Any] = []
        for asynchronous in (True, False):
            model = Model()
            texts = await proposed(asynchronous, model, count, ["p"], copies=copies, seed=seed)
            seen.append((texts, sorted(model.maps), model.reduces))
        return seen

    first, second = anyio.run(both)
    assert first == second


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_the_first_proposal_counts_where_the_reduction_cannot_be_read(asynchronous: bool) -> None:
    def answer(prompt: str) -> str:
        return "nonsense" if "proposed_instructions" in prompt else reply_for(prompt, new_instruction="mapped")

    assert await proposed(asynchronous, answer, 4, ["p"]) == {"p": "mapped"}


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_components_without_records_or_that_do_not_exist_are_left_alone(asynchronous: bool) -> None:
    proposer, model = CombeeReflection(), Model()
    arguments: Any = (CANDIDATE, {"p": [], "z": records(3)}, ["p", "q", "z"])
    with dspy.context(lm=fake_lm(model)):
        assert (await proposer.acall(*arguments) if asynchronous else proposer(*arguments)) == {}
    assert model.maps == model.reduces == []


@pytest.mark.parametrize("bad", [{"copies": 0}, {"copies": -1}, {"groups": 0}])
def test_bad_arguments_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected at least 1 of each"):
        CombeeReflection(**bad)  # type: ignore[arg-type]


async def test_a_reduction_of_the_users_own_is_used() -> None:
    class Shouted(dspy.Module):
        def forward(self, current_instruction: str, proposed_instructions: str) -> dspy.Prediction:
            assert current_instruction == CANDIDATE["p"]
            return dspy.Prediction(new_instruction=proposed_instructions + "!")

    model = Model()
    texts = await proposed(False, model, 4, ["p"], reduce=Shouted())
    assert texts["p"].startswith("### Proposal 1\nmapped")
    assert texts["p"].endswith("!")
    assert model.reduces == []


def test_dspy_gepa_takes_it_as_its_instruction_proposer() -> None:
    model = Model()
    optimizer = dspy.GEPA(
        metric=digits,
        max_metric_calls=40,
        reflection_minibatch_size=4,
        instruction_proposer=CombeeReflection(),
        reflection_lm=fake_lm(model),
        num_threads=1,
        seed=0,
    )
    with dspy.context(lm=task_lm()):
        best = optimizer.compile(Chain(), trainset=examples("train", 6), valset=examples("val", 4))
    assert isinstance(best, Chain)
    assert len(model.reduces) >= 1
    assert len(model.maps) == 2 * len(model.reduces)
    assert json.dumps(best.dump_state())


def test_the_simulated_model_merges_proposals() -> None:
    rules = [Rule(number, word) for number, word in enumerate(WORDS[:5], start=1)]

    def text_of(held: list[Rule]) -> str:
        return "\n".join(["Answer the question.", *map(str, held)])

    def simulated(prompt: str) -> str:
        system, _, user = prompt.rpartition("\n[[ ## current_instruction ## ]]")
        user = f"[[ ## current_instruction ## ]]{user}"
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        request = parse_chat_request(json.dumps({"messages": messages}).encode())
        assert request.kind == "integration"
        return reply_to(request, H100_QWEN3_8B, FallibleModel(forgets=0, overload=0, useless=0), 0).text

    proposals = [text_of([rules[0], rules[4]]), text_of([rules[0], rules[2]])]
    shown = "\n\n".join(f"### Proposal {number}\n{text}" for number, text in enumerate(proposals, start=1))
    with dspy.context(lm=fake_lm(simulated)):
        merged = dspy.Predict(MergeProposals)(current_instruction=text_of([rules[0]]), proposed_instructions=shown)
    assert rules_in(merged.new_instruction) == [rules[0], rules[2], rules[4]]
