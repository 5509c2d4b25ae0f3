"""Whatever a reflection LM replies, to a reflection or to an integration, the run is no worse for it than a search.

The LM is a fake behind ``dspy.LM``: rules that it writes into a prompt make the task model better.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from statistics import median
from typing import Any

import dspy
import pytest
from dspy.teleprompt.gepa import InstructionProposer

from dspy_flashevolve import AsyncGEPA, Reflective
from dspy_flashevolve.sim.virtual import run
from tests.contract.surface import check_ends, check_winner
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


def reflection_lm(writes: Writes, seed: int = 0, integrates: Said | None = None, raw: Said | None = None) -> dspy.LM:
    """Reflects by ``writes``; answers integrations by ``integrates``, and reflections by ``raw`` where it is given."""

    def answer(prompt: str) -> str:
        if "head_text" in prompt:
            assert integrates is not None
            numbers = [int(one) for one in re.findall(r"### Child (\d+)", prompt)]
            return integrates(prompt, field(prompt, "head_text"), numbers)
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

    async def compile_it() -> Any:
        with dspy.context(lm=task_lm(seed), adapter=ADAPTERS[adapter]()):
            return await optimizer.acompile(Chain(predictors), trainset=TRAIN, valset=VAL)

    return run(compile_it)


def in_forms(replies: dict[str, Said], by_form: Iterable[str]) -> list[tuple[str, str]]:
    """Each reply in the form of the chat adapter, and in the others where the form makes a difference."""
    return [(name, "chat") for name in replies] + [(name, other) for name in by_form for other in ("json", "xml")]


# Replies to integrations


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
"""What an LM replies to an integration, of the prompt, the head's text and the children's numbers."""


BY_FORM = ("no verdicts", "one verdict for all", "in code fences", "cut at max_tokens")
"""What the adapter reads differently by its form; where it can read nothing, nothing depends on it."""


def check_no_child_is_lost(stats: Any) -> None:
    """What passed its screen is committed, in a candidate that is, or in the head; all else has a score's reason."""
    check_ends(stats)
    steps = {commit.step for commit in stats.commits}
    for reason in stats.end_reasons:
        within = re.fullmatch(r"in the candidate of step (\d+)", reason)
        assert (
            (within and int(within[1]) in steps)
            or reason.startswith(("its changes are in the head", "its edits are in the head"))
            or any(word in reason for word in ("screen", "perfect", "its rollouts tested", "budget", "changed nothing"))
        ), reason


@pytest.mark.parametrize(("said", "adapter"), in_forms(SAID, BY_FORM))
def test_no_reply_to_an_integration_loses_a_child(said: str, adapter: str) -> None:
    staleness = Reflective(batch=3, min_gap=0, changes=False)
    lm = reflection_lm(rewritten, integrates=SAID[said])
    program = compiled(lm, adapter=adapter, staleness=staleness)
    stats, details = program.async_stats, program.detailed_results
    assert stats.integration_calls > 0
    assert stats.metric_calls <= CALLS
    check_no_child_is_lost(stats)
    check_winner(details, len(VAL))
    assert max(details.val_aggregate_scores) > details.val_aggregate_scores[0], "'full' finds better than the seed"


def test_the_run_of_full_beside_which_the_others_stand_finds_better_than_the_seed() -> None:
    details = compiled(reflection_lm(rewritten), staleness="full").detailed_results
    assert max(details.val_aggregate_scores) > details.val_aggregate_scores[0]


@pytest.mark.parametrize("said", ["empty", "the head unchanged", "a worse text"])
def test_a_run_whose_integrations_come_to_nothing_asks_for_no_more(said: str, caplog: pytest.LogCaptureFixture) -> None:
    lm = reflection_lm(rewritten, integrates=SAID[said])
    stats = compiled(lm, 500, staleness=Reflective(batch=1, min_gap=0, changes=False)).async_stats
    assert len(stats.integrations) < 20
    assert "integrations in a row came to nothing" in caplog.text
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
    for staleness in ("full", "reflective"):
        lm = reflection_lm(added, raw=WRITTEN[written], integrates=SAID["empty"])
        program = compiled(lm, adapter=adapter, staleness=staleness)
        details, stats = program.detailed_results, program.async_stats
        check_ends(stats)
        check_winner(details, len(VAL))
        best[staleness] = max(details.val_aggregate_scores) - details.val_aggregate_scores[0]
    assert best["reflective"] > 0 or best["full"] == 0, best


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


@pytest.mark.parametrize("calls", [120, pytest.param(300, marks=pytest.mark.slow)])
def test_with_an_lm_that_refuses_four_reflections_of_five_the_default_does_as_well_as_dspy_gepa(calls: int) -> None:
    scores = {
        kind: [
            best(
                kind,
                reflection_lm(added, seed, SAID["empty"], WRITTEN["one of five is good"]),
                seed, calls, Chain(), task_lm(seed),
            )
            for seed in range(5)
        ]
        for kind in (dspy.GEPA, AsyncGEPA)
    }  # fmt: skip
    assert median(scores[AsyncGEPA]) >= median(scores[dspy.GEPA]), scores


class Whole(InstructionProposer):
    """A proposer of the user's own: it is asked for whole texts, not for edits."""


@cache
def best_of_rewrites(staleness: str, said: str) -> float:
    """The median over three seeds; ``full`` asks for no integrations."""
    more = {"instruction_proposer": Whole()} | ({"staleness": staleness} if staleness == "full" else {})
    return median(
        best(AsyncGEPA, reflection_lm(rewritten, seed, SAID[said]), seed, 300, Chain(), task_lm(seed), **more)
        for seed in range(3)
    )


@pytest.mark.parametrize("said", ["empty", "a worse text"])
def test_where_each_reflection_rewrites_the_whole_text_a_small_budget_goes_into_depth_as_with_full(said: str) -> None:
    """Nothing joins the children of steps that ran at once: each of them would take a validation for itself."""
    assert best_of_rewrites("default", said) >= best_of_rewrites("full", "empty") > 0.7


def test_where_children_are_rewrites_a_run_ends_when_no_validation_can_be_paid_and_says_so() -> None:
    stats = compiled(
        reflection_lm(rewritten, integrates=SAID["empty"]), instruction_proposer=Whole()
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


@pytest.mark.parametrize(
    "predictors", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_with_predictors_of_which_one_decides_a_small_budget_does_as_well_as_dspy_gepa(predictors: int) -> None:
    scores = {
        kind: [
            best(
                kind,
                reflection_lm(added, seed, integrates=SAID["empty"]), seed, 120, OneDecides(predictors), noting(seed),
            )
            for seed in range(5)
        ]
        for kind in (dspy.GEPA, AsyncGEPA)
    }  # fmt: skip
    assert median(scores[AsyncGEPA]) >= median(scores[dspy.GEPA]), scores
