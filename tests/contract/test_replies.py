"""Whatever a reflection LM replies, to a reflection or to a repair, the run is no worse for it than a search.

The LM is a fake behind ``dspy.LM``: rules that it writes into a prompt make the task model better.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from statistics import mean, median
from typing import Any

import dspy
import pytest
from dspy.teleprompt.gepa import InstructionProposer

from dspy_flashevolve import AsyncGEPA, Reflective
from dspy_flashevolve.sim.virtual import run
from tests.contract.surface import check_ends, check_winner, evolved
from tests.fakes import Chain, examples, fake_lm, hashed

ADAPTERS: dict[str, Any] = {"chat": dspy.ChatAdapter, "json": dspy.JSONAdapter, "xml": dspy.XMLAdapter}
TRAIN, VAL = examples("t", 8), examples("v", 10)
RULES = 30
CALLS = 80
"""Metric calls: eight validations' worth."""


def rules_in(text: str) -> set[str]:
    return set(re.findall(r"rule \d+", text))


def field(prompt: str, name: str) -> str:
    """What an input of a prompt says, as an adapter of dspy's writes it."""
    found = re.findall(
        rf"\[\[ ## {name} ## \]\]\n(.*?)(?=\n\n\[\[ ##|\Z)|<{name}>\n(.*?)\n</{name}>", prompt, re.DOTALL
    )
    return next(one or other for one, other in reversed(found))


def reply(prompt: str, **fields: Any) -> str:
    """A reply in the form that the prompt asks for."""
    said = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    if "Outputs will be a JSON object" in prompt:
        return json.dumps(fields)
    if "[[ ##" in prompt:
        return "\n\n".join([*(f"[[ ## {n} ## ]]\n{v}" for n, v in said.items()), "[[ ## completed ## ]]"])
    return "\n".join(f"<{n}>\n{v}\n</{n}>" for n, v in said.items())


def task_lm(seed: int) -> dspy.LM:
    """Says how good its answer is: by the question, and by the rules in its prompt."""

    def answer(prompt: str) -> str:
        rules, question = rules_in(prompt), field(prompt, "question")
        return reply(prompt, answer=str(min(1.0, hashed(seed, question) % 100 / 400 + 0.05 * len(rules))))

    return fake_lm(answer)


def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
    return dspy.Prediction(score=float(pred.answer), feedback=f"{gold.question} is {pred.answer}")


def added(text: str, seed: int) -> str:
    """The instruction with a rule that it has not."""
    there = rules_in(text)
    first = hashed(seed, text) % RULES
    return text + "\n- " + next(r for s in range(RULES) if (r := f"rule {(first + s) % RULES}") not in there)


def rewritten(text: str, seed: int) -> str:
    """The same in other words: nothing in it can be told from what it was."""
    rules = ", ".join(sorted(rules_in(added(text, seed))))
    return f"Version {hashed(text, seed) % 10_000} of what was asked for: {rules}"


Writes = Callable[[str, int], str]
Said = Callable[[str, str, list[int]], str]


def reflection_lm(writes: Writes, seed: int = 0, repairs: Said | None = None, raw: Said | None = None) -> dspy.LM:
    """Reflects by ``writes``; answers repairs by ``repairs``, and reflections by ``raw`` where it is given."""

    def answer(prompt: str) -> str:
        if "head_text" in prompt:
            assert repairs is not None
            numbers = [int(one) for one in re.findall(r"### Child (\d+)", prompt)]
            return repairs(prompt, field(prompt, "head_text"), numbers)
        text = field(prompt, "current_instruction")
        if raw is not None:
            return raw(prompt, writes(text, hashed(seed, prompt)), [])
        return reply(prompt, new_instruction=writes(text, hashed(seed, prompt)))

    return fake_lm(answer)


def compiled(
    lm: dspy.LM, calls: int = CALLS, seed: int = 0, adapter: str = "chat", predictors: int = 1, **more: Any
) -> Any:
    """In virtual time."""
    optimizer = AsyncGEPA(
        metric, max_metric_calls=calls, reflection_lm=lm, seed=seed, num_threads=8, track_stats=True, **more
    )

    return evolved(optimizer, Chain(predictors), TRAIN, VAL, {"lm": task_lm(seed), "adapter": ADAPTERS[adapter]()})


def in_forms(replies: dict[str, Said], by_form: Iterable[str]) -> list[tuple[str, str]]:
    """Each reply in the form of the chat adapter, and in the others where the form makes a difference."""
    return [(name, "chat") for name in replies] + [(name, other) for name in by_form for other in ("json", "xml")]


# Replies to repairs


def joined(prompt: str) -> str:
    """A good text: all rules of the head and the children."""
    return "Joined: " + ", ".join(sorted(rules_in(field(prompt, "head_text") + field(prompt, "children"))))


def verdicts(word: str, numbers: list[int]) -> list[dict[str, Any]]:
    return [{"child": number, "verdict": word, "reason": "so"} for number in numbers]


SAID: dict[str, Said] = {
    "empty": lambda p, head, numbers: "",
    "a refusal": lambda p, head, numbers: "I'm sorry, but I can't help with that.",
    "prose alone": lambda p, head, numbers: "Both children have a point. I would keep the shorter one.",
    "no verdicts": lambda p, head, numbers: reply(p, new_text=joined(p)),
    "misnumbered verdicts": lambda p, head, numbers: reply(
        p, verdicts=verdicts("conflicting", [one + 100 for one in numbers]), new_text=joined(p)
    ),
    "unknown verdicts": lambda p, head, numbers: reply(p, verdicts=verdicts("excellent", numbers), new_text=joined(p)),
    "one verdict for all": lambda p, head, numbers: reply(
        p, verdicts={"child": numbers[0], "verdict": "orthogonal", "reason": "all"}, new_text=joined(p)
    ),
    "all subsumed": lambda p, head, numbers: reply(p, verdicts=verdicts("subsumed", numbers), new_text=head),
    "all conflicting": lambda p, head, numbers: reply(p, verdicts=verdicts("conflicting", numbers), new_text=head),
    "all conflicting, and a text": lambda p, head, numbers: reply(
        p, verdicts=verdicts("conflicting", numbers), new_text=joined(p)
    ),
    "all but one conflicting": lambda p, head, numbers: reply(
        p, verdicts=verdicts("orthogonal", numbers[:1]) + verdicts("conflicting", numbers[1:]), new_text=joined(p)
    ),
    "in code fences": lambda p, head, numbers: reply(
        p, verdicts=verdicts("orthogonal", numbers), new_text=f"```text\n{joined(p)}\n```"
    ),
    "the head unchanged": lambda p, head, numbers: reply(p, verdicts=verdicts("orthogonal", numbers), new_text=head),
    "far too long": lambda p, head, numbers: reply(
        p, verdicts=verdicts("orthogonal", numbers), new_text="and so on, " * 5000
    ),
    "a worse text": lambda p, head, numbers: reply(
        p, verdicts=verdicts("orthogonal", numbers), new_text="Do what you like."
    ),
    "cut at max_tokens": lambda p, head, numbers: (
        whole := reply(p, verdicts=verdicts("orthogonal", numbers), new_text=joined(p))
    )[: len(whole) * 2 // 3],
}  # fmt: skip
"""What an LM replies to a repair, of the prompt, the head's text and the children's numbers."""


BY_FORM = ("no verdicts", "one verdict for all", "in code fences", "cut at max_tokens")
"""What the adapter reads differently by its form; where it can read nothing, nothing depends on it."""


def check_no_child_is_lost(stats: Any) -> None:
    """What is not committed, or in the head, has a score's reason."""
    check_ends(stats)
    for reason in stats.end_reasons:
        assert reason.startswith(("its changes are in the head", "its edits are in the head")) or any(
            word in reason for word in ("screen", "perfect", "its rollouts tested", "budget", "changed nothing")
        ), reason


DROPS = {
    "all subsumed": "stale: subsumed by what was committed meanwhile",
    "all conflicting": "stale: in conflict with what was committed meanwhile",
}
"""Of these replies: those that drop the child, as they are to, and the reason that its step has."""
UNUSABLE = ("empty", "a refusal", "prose alone", "the head unchanged", "far too long")
"""Of these replies: those that no child can be made of."""


@pytest.mark.parametrize("search", ["edits", "pareto"])
@pytest.mark.parametrize(("said", "adapter"), in_forms(SAID, BY_FORM))
def test_no_reply_to_a_repair_loses_a_child_but_those_that_say_so(said: str, adapter: str, search: Any) -> None:
    lm = reflection_lm(rewritten, repairs=SAID[said])
    program = compiled(lm, adapter=adapter, search=search, staleness=Reflective(min_gap=0))
    stats, details = program.async_stats, program.detailed_results
    assert stats.integration_calls > 0
    assert stats.metric_calls <= CALLS
    check_winner(details, len(VAL))
    if said in DROPS:
        assert set(stats.end_reasons) & set(DROPS.values()) == {DROPS[said]}
        return
    check_no_child_is_lost(stats)
    if said in UNUSABLE:
        assert all(record.failed for record in stats.integrations), "each of them is counted"
    if said != "a worse text":  # which costs its child, once: see test_staleness.py
        assert max(details.val_aggregate_scores) > details.val_aggregate_scores[0], "'full' finds better than the seed"


def test_a_run_most_of_whose_children_are_dropped_says_so(caplog: pytest.LogCaptureFixture) -> None:
    lm = reflection_lm(rewritten, repairs=SAID["all subsumed"])
    compiled(lm, 200, staleness=Reflective(min_gap=0))
    assert "discarded 100% of the children that it looked at" in caplog.text


def test_the_run_of_full_beside_which_the_others_stand_finds_better_than_the_seed() -> None:
    details = compiled(reflection_lm(rewritten), search="pareto").detailed_results
    assert max(details.val_aggregate_scores) > details.val_aggregate_scores[0]


@pytest.mark.parametrize("said", ["empty", "the head unchanged", "a worse text"])
def test_a_run_whose_repairs_are_of_no_use_asks_for_no_more(said: str, caplog: pytest.LogCaptureFixture) -> None:
    lm = reflection_lm(rewritten, repairs=SAID[said])
    stats = compiled(lm, 500, search="pareto", staleness=Reflective(min_gap=0)).async_stats
    assert 8 <= len(stats.integrations) < 20
    assert "repairs of stale candidates in a row could not be used" in caplog.text
    assert stats.ended["committed"] > 3


# Replies to reflections

WRITTEN: dict[str, Said] = {
    "empty": lambda p, text, _: "",
    "a refusal": lambda p, text, _: "I'm sorry, but I can't help with that.",
    "an empty instruction": lambda p, text, _: reply(p, new_instruction=""),
    "the same instruction": lambda p, text, _: reply(p, new_instruction=text.rpartition("\n- ")[0] or text),
    "every other one is good": lambda p, text, _: (
        reply(p, new_instruction=text) if hashed(p) % 2 else "I'm sorry, but I can't help with that."
    ),
    "one of five is good": lambda p, text, _: (
        "I'm sorry, but I can't help with that." if hashed(p) % 5 else reply(p, new_instruction=text)
    ),
    "in code fences": lambda p, text, _: reply(p, new_instruction=f"```\n{text}\n```"),
    "far too long": lambda p, text, _: reply(p, new_instruction=text + "\n" + "And so on. " * 3000),
    "cut at max_tokens": lambda p, text, _: reply(p, new_instruction=text + "\n- rule")[:-9],
}


@pytest.mark.parametrize(
    ("written", "adapter"), in_forms(WRITTEN, ("an empty instruction", "in code fences", "cut at max_tokens"))
)
def test_no_reply_to_a_reflection_makes_the_default_end_with_the_seed_where_full_finds_better(
    written: str, adapter: str
) -> None:
    best: dict[str, float] = {}
    for search in ("pareto", "edits"):
        lm = reflection_lm(added, raw=WRITTEN[written], repairs=SAID["empty"])
        program = compiled(lm, adapter=adapter, search=search)
        details, stats = program.detailed_results, program.async_stats
        check_ends(stats)
        check_winner(details, len(VAL))
        best[search] = max(details.val_aggregate_scores) - details.val_aggregate_scores[0]
    assert best["edits"] > 0 or best["pareto"] == 0, best


@pytest.mark.parametrize(("search", "asked_for"), [("edits", "edits"), ("pareto", "new_instruction")])
def test_our_search_asks_for_edits_and_gepas_for_whole_texts(search: str, asked_for: str) -> None:
    asked: list[str] = []

    def raw(prompt: str, text: str, numbers: list[int]) -> str:
        asked.append(prompt)
        return reply(prompt, new_instruction=text)

    compiled(reflection_lm(added, raw=raw), search=search)
    assert f"1. `{asked_for}` (" in asked[0]


# Beside dspy.GEPA


def best(kind: type, lm: dspy.LM, seed: int, calls: int, program: dspy.Module, tasks: dspy.LM, **more: Any) -> float:
    """The best score that an optimizer comes to; ours in virtual time, eight slots wide."""
    options: dict[str, Any] = {"max_metric_calls": calls, "reflection_lm": lm, "seed": seed, "track_stats": True}
    sets: dict[str, Any] = {"trainset": TRAIN, "valset": VAL}
    with dspy.context(lm=tasks, adapter=dspy.ChatAdapter()):
        if kind is AsyncGEPA:
            one = AsyncGEPA(metric, num_threads=8, **options, **more)
            made = run(lambda: one.acompile(program, **sets))
        else:
            made = dspy.GEPA(metric, num_threads=1, **options).compile(program, **sets)
    return max(made.detailed_results.val_aggregate_scores)


def seldom(seed: int) -> Said:
    """One reply of five is good: the last line as an edit where edits are asked for, else the whole text."""
    asked = itertools.count()

    def said(prompt: str, text: str, numbers: list[int]) -> str:
        if hashed(seed, next(asked)) % 5:
            return "I'm sorry, but I can't help with that."
        if "`edits`" not in prompt:
            return reply(prompt, new_instruction=text)
        line = text.splitlines()[-1]
        return reply(prompt, edits=[{"action": "add", "part": 99, "text": line, "reason": ""}])

    return said


@pytest.mark.long
@pytest.mark.parametrize("calls", [120, pytest.param(300, marks=pytest.mark.slow)])
def test_with_an_lm_that_refuses_four_reflections_of_five_the_default_does_as_well_as_dspy_gepa(calls: int) -> None:
    """The mean of sixteen seeds: one good reflection more or less is most of what a run of 120 calls gains."""
    theirs, ours = (
        mean(
            best(kind, reflection_lm(added, seed, SAID["empty"], seldom(seed)), seed, calls, Chain(), task_lm(seed))
            for seed in range(16)
        )
        for kind in (dspy.GEPA, AsyncGEPA)
    )
    assert ours >= theirs


class Whole(InstructionProposer):
    """A proposer of the user's own: it is asked for whole texts, not for edits."""


@cache
def best_of_rewrites(search: str) -> float:
    """The median over three seeds."""
    more = {"instruction_proposer": Whole(), "search": search}
    return median(
        best(AsyncGEPA, reflection_lm(rewritten, seed), seed, 300, Chain(), task_lm(seed), **more) for seed in range(3)
    )


@pytest.mark.long
def test_where_each_reflection_rewrites_the_whole_text_a_small_budget_goes_into_depth_as_with_gepas_search() -> None:
    """Nothing joins the children of steps that ran at once: each of them would take a validation for itself."""
    assert best_of_rewrites("edits") >= best_of_rewrites("pareto") > 0.7


def test_where_children_are_rewrites_a_run_ends_when_no_validation_can_be_paid_and_says_so() -> None:
    stats = compiled(
        reflection_lm(rewritten, repairs=SAID["empty"]), instruction_proposer=Whole()
    ).detailed_results.async_stats
    assert stats.stop_reason.endswith("calls left cannot pay a step, which may cost 16")
    assert not any("no budget is left" in reason for reason in stats.end_reasons)


class OneDecides(dspy.Module):
    """The first predictor's answer counts; the others' are thrown away."""

    def __init__(self, predictors: int) -> None:
        super().__init__()
        self.deciding = dspy.Predict("question -> answer")
        self.idle = [dspy.Predict("question, draft -> note") for _ in range(predictors - 1)]

    def forward(self, question: str) -> dspy.Prediction:
        answer = self.deciding(question=question).answer
        for predictor in self.idle:
            predictor(question=question, draft=answer)
        return dspy.Prediction(answer=answer)

    async def aforward(self, question: str) -> dspy.Prediction:
        answer = (await self.deciding.acall(question=question)).answer
        for predictor in self.idle:
            await predictor.acall(question=question, draft=answer)
        return dspy.Prediction(answer=answer)


def noting(seed: int) -> dspy.LM:
    """A task model that answers the deciding predictor, and notes something for the others."""
    answer: Any = task_lm(seed).engine
    return fake_lm(lambda prompt: reply(prompt, note="noted") if "draft" in prompt else answer.answer(prompt))


@pytest.mark.long
@pytest.mark.parametrize(
    "predictors", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_with_predictors_of_which_one_decides_a_small_budget_does_as_well_as_dspy_gepa(predictors: int) -> None:
    theirs, ours = (
        mean(
            best(kind, reflection_lm(added, seed, SAID["empty"]), seed, 120, OneDecides(predictors), noting(seed))
            for seed in range(16)
        )
        for kind in (dspy.GEPA, AsyncGEPA)
    )
    assert ours >= theirs
