"""Which search a run has, what joins in it, and which of several predictors a step reflects on.

With dspy's proposer the reflection LM writes edits, and those that help join. Whole texts, of a proposer of the user's
own, of an LM that does not write edits, or of code, stand for themselves as in GEPA.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import dspy
import pytest

from dspy_flashevolve import AsyncGEPA, EditedText
from tests.contract.surface import Interpreter, check_ends, code_lm, evolved, facts, listening
from tests.contract.test_edits import Reflection, score, text_of, tidy
from tests.contract.test_replies import field, reply, rules_in
from tests.contract.worlds import Rules, play
from tests.fakes import Chain, digits, examples, fake_lm, hashed, reply_for

TRAIN, VAL = examples("t", 24), examples("v", 10)


def asked(lm: dspy.LM, student: dspy.Module, calls: int, tasks: Callable[[str], str], **options: Any) -> Any:
    """What AsyncGEPA makes of a student in virtual time; the score is the answer, the number of rules in the prompt."""
    optimizer = AsyncGEPA(score, max_metric_calls=calls, reflection_lm=lm, num_threads=8, track_stats=True, **options)
    program = evolved(optimizer, student, TRAIN, VAL, {"lm": fake_lm(tasks)})
    check_ends(program.async_stats)
    return program


def by_rules(prompt: str) -> str:
    """The more rules stand in the prompt the better."""
    noise = hashed(field(prompt, "question")) % 10 / 40
    return reply(prompt, answer=str(min(1.0, 0.05 * len(rules_in(prompt)) + noise)))


# A proposer of the user's own


class Proposer(Rules):
    """Adds a rule to a text of at most four lines, as a whole text or as an edit, and remembers what it returned."""

    def __init__(self, writes_edits: bool = False) -> None:
        super().__init__(helps=0.08, train=30, val=20)
        self.returned, self._writes_edits = {"0.3 seed 0"}, writes_edits

    async def acall(self, candidate: Any, reflective_dataset: Any, components_to_update: list[str]) -> Any:
        made: dict[str, str] = await super().acall(candidate, reflective_dataset, components_to_update)
        made = {name: text if self._writes_edits else str(text) for name, text in made.items()}
        made = {name: text for name, text in made.items() if len(text.splitlines()) <= 4}
        self.returned.update(made.values())
        return made

    @property
    def ran(self) -> set[str]:
        return {text for text, _ in self.scored}


@pytest.mark.parametrize("search", [None, "edits", "pareto"])
def test_every_text_that_runs_was_returned_by_the_proposer_of_the_users_own_or_is_the_seed(search: Any) -> None:
    """Whole texts are never joined; so a limit on their lines, or a locked phrase, holds in every prompt."""
    world = Proposer()
    stats = play(world, 300, search=search).async_stats
    assert world.ran <= world.returned
    assert len(world.ran) > 5
    assert stats.ended["committed"] > 1
    assert not stats.changes


def test_with_a_proposer_of_the_users_own_the_search_is_pareto() -> None:
    default, pareto = (play(Proposer(), 200, search=search).detailed_results for search in (None, "pareto"))
    assert facts(default) == facts(pareto)


def test_edits_of_a_proposer_of_the_users_own_are_joined_where_the_user_asks_for_it() -> None:
    for search, joins in (("edits", True), (None, False)):
        world = Proposer(writes_edits=True)
        stats = play(world, 300, search=search).async_stats
        assert bool(world.ran - world.returned) == joins
        assert bool(stats.changes) == joins


# An LM that answers whole texts though it is asked for edits


def whole(prompt: str) -> str:
    """The text in other words, with a rule more."""
    text = field(prompt, "current_instruction")
    rules = sorted({*rules_in(text), f"rule {hashed(prompt) % 30}"})
    return f"Wording {hashed(prompt) % 10_000} of what was asked for, in which there is: {', '.join(rules)}"


def as_whole_text(prompt: str) -> str:
    return json.dumps({"new_instruction": whole(prompt)})


def as_edits_of_all_parts(prompt: str) -> str:
    if "`edits`" not in prompt:
        return as_whole_text(prompt)
    parts = field(prompt, "current_instruction").count("\n[") + 1
    gone = [{"action": "remove", "part": part, "text": "", "reason": ""} for part in range(2, parts + 1)]
    return reply(prompt, edits=[{"action": "replace", "part": 1, "text": whole(prompt), "reason": ""}, *gone])


@pytest.mark.parametrize("answer", [as_whole_text, as_edits_of_all_parts])
def test_whole_texts_in_the_place_of_edits_stand_for_themselves_and_the_whole_budget_is_searched_with(
    answer: Callable[[str], str],
) -> None:
    written = {"Given the fields `question`, produce the fields `answer`."}

    def writes(prompt: str) -> str:
        said = answer(prompt)
        found = re.search(r"Wording [^\"]*rule \d+", said)
        assert found is not None
        written.add(found[0])
        return said

    program = asked(fake_lm(writes), Chain(1), 150, by_rules)
    stats, texts = program.async_stats, set(map(text_of, program.detailed_results.candidates))
    assert texts <= written
    assert len(texts) > 3
    assert not stats.changes
    assert not stats.ended.get("joined", 0)
    assert stats.metric_calls > 150 - (10 + 2 * 12), "what is left pays no step with its validation"
    assert max(commit.generation for commit in stats.commits) > 1, "children of children"


# Code


@pytest.mark.parametrize("search", [None, "edits"])
def test_where_all_that_evolves_is_code_the_search_is_pareto_from_its_first_step_on(search: Any) -> None:
    results: list[Any] = []
    for chosen in (search, "pareto"):
        optimizer = AsyncGEPA(
            digits, max_metric_calls=26, num_threads=4, reflection_lm=code_lm(), track_stats=True, search=chosen,
            gepa_kwargs={"acceptance_criterion": "improvement_or_equal"},
        )  # fmt: skip
        student = dspy.Flex("question -> answer", interpreter_factory=Interpreter)
        lm = fake_lm(lambda prompt: reply_for(prompt, answer="3"))
        results.append(evolved(optimizer, student, TRAIN[:6], VAL[:2], {"lm": lm}).detailed_results.to_dict())
    assert results[0] == results[1]
    assert len(results[0]["candidates"]) > 2


# A long seed


def test_the_edits_of_a_seed_of_five_hundred_lines_join() -> None:
    seed = "Answer.\n" + "\n".join(f"- Article {number} of the code names case {number}." for number in range(500))
    student = Chain(1)
    predictor: Any = student.steps[0]
    predictor.signature = predictor.signature.with_instructions(seed)
    program = asked(fake_lm(Reflection(tidy)), student, 79, by_rules)
    assert len(program.async_stats.changes) > 3
    assert program.async_stats.ended["joined"] > 3
    assert len(rules_in(text_of(program))) > 3, "the edits of several children are in one text"


# Predictors that a minibatch does not call


class Toolbox(dspy.Module):
    """Fourteen predictors, of which each question needs one; only some are needed at all.

    Args:
        needed: how many are; 0 for a program that builds a predictor of its own in ``forward``.
    """

    def __init__(self, needed: int = 4) -> None:
        super().__init__()
        self.needed = needed
        self.tools = [dspy.Predict(dspy.Signature("question -> answer", f"Tool {number}.")) for number in range(14)]

    async def aforward(self, question: str) -> dspy.Prediction:
        if not self.needed:
            return await dspy.Predict(dspy.Signature("question -> answer", "Made on the way.")).acall(question=question)
        return await self.tools[3 * (hashed(question) % self.needed) + 1].acall(question=question)


class Notes:
    """A reflection LM that writes edits, and notes which tool's instruction each request is about."""

    def __init__(self) -> None:
        self.about = Counter[str]()
        self._writes = Reflection(tidy)

    def __call__(self, prompt: str) -> str:
        if "`edits`" in prompt:
            self.about[field(prompt, "current_instruction").partition(".")[0]] += 1
        return self._writes(prompt)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a run logs, of this package and where dspy.GEPA logs."""
    told: list[str] = []
    for name in ("dspy", "dspy_flashevolve"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.INFO)
    with listening(lambda record: told.append(record.getMessage()), "dspy", "dspy_flashevolve"):
        yield told


@pytest.mark.parametrize("search", ["edits", "pareto"])
def test_a_step_whose_component_no_rollout_called_reflects_on_the_next_that_was_called(
    search: Any, lines: list[str]
) -> None:
    notes = Notes()
    lm = fake_lm(lambda prompt: notes(prompt) if "`edits`" in prompt else as_more(prompt, notes))
    stats = asked(lm, Toolbox(), 150, by_rules, search=search, reflection_minibatch_size=3).async_stats
    assert stats.proposals > 5
    assert stats.ended["failed"] == 0
    assert len(notes.about) > 2, "all that are needed have their turn"
    told = [line for line in lines if "No rollout of the minibatch called" in line]
    assert 0 < len(told) <= 14, "once of each"
    assert not [line for line in lines if "Traceback" in line or "No valid reflective examples" in line]


def as_more(prompt: str, notes: Notes) -> str:
    """A whole text with a rule more."""
    text = field(prompt, "current_instruction")
    notes.about[text.partition(".")[0]] += 1
    return reply(prompt, new_instruction=f"{text}\n- rule {hashed(prompt) % 30}")


def test_in_lockstep_such_a_step_ends_as_in_dspy_gepa() -> None:
    results: list[Any] = []
    for kind, options in ((dspy.GEPA, {}), (AsyncGEPA, {"schedule": "lockstep"})):
        notes = Notes()
        optimizer = kind(
            score, max_metric_calls=80, num_threads=4, track_stats=True, seed=1,
            reflection_lm=fake_lm(lambda prompt, notes=notes: as_more(prompt, notes)), **options,
        )  # fmt: skip
        with dspy.context(lm=fake_lm(by_rules)):
            program = optimizer.compile(SyncToolbox(), trainset=TRAIN[:8], valset=VAL[:5])
        results.append((program.detailed_results.to_dict(), notes.about))
    assert results[0] == results[1]


class SyncToolbox(Toolbox):
    """The same, in threads, as dspy.GEPA runs it."""

    def forward(self, question: str) -> dspy.Prediction:
        return self.tools[3 * (hashed(question) % self.needed) + 1](question=question)


def test_a_predictor_that_is_built_in_forward_ends_the_run_after_eight_minibatches_with_the_cause(
    lines: list[str],
) -> None:
    with pytest.raises(RuntimeError, match=r"built in forward .* build it in __init__") as raised:
        asked(fake_lm(Reflection(tidy)), Toolbox(needed=0), 600, by_rules)
    assert "tools[0], tools[1]" in str(raised.value), "its own predictors are named"
    assert [line for line in lines if "All of the first 8 minibatches" in line]
    assert not [line for line in lines if "Traceback" in line]
    best: Any = raised.value
    assert best.best_program is not None


# What a proposer returns


async def coroutine(texts: dict[str, str]) -> dict[str, str]:
    return texts


def proposer_of(answer: Callable[[dict[str, str]], Any], awaits: bool) -> Any:
    """A proposer that answers so, with an awaitable ``acall`` or a call alone."""

    class Proposing:
        def __call__(self, candidate: Any, reflective_dataset: Any, components_to_update: list[str]) -> Any:
            number = hashed(candidate, str(reflective_dataset)) % 1000
            return answer({name: f"{candidate[name]}\n- rule {number}" for name in components_to_update})

    class Awaitable(Proposing):
        async def acall(self, **arguments: Any) -> Any:
            return self(**arguments)

    return Awaitable() if awaits else Proposing()


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
@pytest.mark.parametrize("awaits", [True, False])
@pytest.mark.parametrize(
    ("answer", "shown"),
    [(lambda texts: None, "None"), (lambda texts: list(texts.values()), r"\['Given the fields")],
    ids=["none", "list"],
)
def test_a_proposer_that_returns_no_dict_is_named_with_what_it_returned_and_what_is_expected(
    answer: Any, shown: str, awaits: bool, schedule: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(TypeError, match="expected a dict from component to its new text") as raised:
        asked(
            fake_lm(by_rules), Chain(1), 600, by_rules, schedule=schedule,
            instruction_proposer=proposer_of(answer, awaits),
        )  # fmt: skip
    assert re.search(
        rf"instruction_proposer \S*{'Awaitable' if awaits else 'Proposing'} returned {shown}", str(raised.value)
    )
    assert "None of the first 4 reflections was of use" in caplog.text


def test_a_text_that_is_none_is_named_with_its_component() -> None:
    with pytest.raises(TypeError, match=r"the proposal for 'steps\[0\]' is \['Given .*, expected a text"):
        asked(
            fake_lm(by_rules), Chain(1), 600, by_rules,
            instruction_proposer=proposer_of(lambda texts: {name: [text] for name, text in texts.items()}, False),
        )  # fmt: skip


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_a_coroutine_that_a_proposer_returns_is_awaited(schedule: Any) -> None:
    options = {"schedule": schedule, "instruction_proposer": proposer_of(coroutine, False)}
    program = asked(fake_lm(by_rules), Chain(1), 100, by_rules, **options)
    assert program.async_stats.proposals > 3
    assert "- rule" in text_of(program)


def test_an_edited_text_is_its_text_to_whoever_reads_it() -> None:
    text = EditedText.of("Answer.\n1. One.", [{"action": "add", "part": 2, "text": "2. Two."}])
    assert text == "Answer.\n1. One.\n2. Two."
    assert [one.text for one in text.edits] == ["2. Two."]
    assert json.loads(json.dumps(text)) == text
