"""The prompt that a run returns is one that a person would ship: one rule is one line, whoever found it and how often.

The LMs are fakes behind ``dspy.LM``. Each message has a sign, and a task model that has read the sign's code answers
with it; the reflection LM finds the codes in its examples, and adds them in words and under headings of its own, so
that reflections which run at once find the same rule.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import dspy
import pytest

from dspy_flashevolve import AsyncGEPA
from tests.contract.surface import Heard, check_ends, check_winner, command, evolved, on, sql
from tests.contract.test_replies import field, reply
from tests.fakes import AsyncFakeEngine, Chain, FakeEngine, fake_lm, hashed

SIGNS = ("amber", "basalt", "cobalt", "denim", "ember", "fjord", "garnet", "hazel")
CODES = {sign: f"K{11 + 7 * number}" for number, sign in enumerate(SIGNS)}
WORDINGS = (
    "- If the message mentions {sign}, answer {code}.",
    "- {sign}: the code is {code}.",
    "- Messages on {sign} get the code {code}, whatever else they say.",
)
HEADINGS = ("## Rules", "## Codes", "## What signs mean")
PERFECT = "the best candidate has the perfect score on every validation example"
GROWN = "was not written anew"


def stated(text: str) -> dict[str, list[str]]:
    """Sign -> lines of a text that state its code."""
    lines = text.splitlines()
    found = {sign: [line for line in lines if sign in line and CODES[sign] in line] for sign in SIGNS}
    return {sign: where for sign, where in found.items() if where}


def repeated_rules(text: str) -> list[list[str]]:
    return [lines for lines in stated(text).values() if len(lines) > 1]


def repeated_lines(text: str) -> list[str]:
    """Lines of more than three words that stand in a text twice, however they are marked and punctuated."""
    lines = [re.sub(r"^\s*(?:[-*]|\d+[.)])\s+", "", line).strip(" .").lower() for line in text.splitlines()]
    return [line for line, count in Counter(lines).items() if count > 1 and len(line.split()) > 3]


def messages(name: str, count: int, signs: Sequence[str] = SIGNS) -> list[dspy.Example]:
    return [
        dspy.Example(question=f"{name} message {number} on {sign}", answer=CODES.get(sign, "?")).with_inputs("question")
        for number, sign in enumerate(itertools.islice(itertools.cycle(signs), count))
    ]


def begun_with(text: str) -> Chain:
    """A program of one predictor with this instruction."""
    program: Any = Chain(1)
    program.steps[0].signature = program.steps[0].signature.with_instructions(text)
    return program


def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
    answers = pred.answer.split()
    score = 0.1 + 0.9 * sum(answer == gold.answer for answer in answers) / len(answers)  # gepa's merge needs some score
    return dspy.Prediction(score=score, feedback="right" if score == 1 else f"{gold.question} is {gold.answer}")


def answer_of(prompt: str) -> str:
    """The task model's reply."""
    question = field(prompt, "question")
    known = [sign for sign in stated(prompt.replace(question, "")) if sign in question]
    return reply(prompt, answer=CODES[known[0]] if known else "none")


def tidy(text: str) -> str:
    """A text written anew: each code once."""
    return "Answer with the code.\n\n## All codes\n" + "\n".join(f"- {sign}: {CODES[sign]}" for sign in stated(text))


class Reflection:
    """Adds what its examples teach, and writes texts anew by ``consolidates``.

    Args:
        wordings: of the lines that it adds, one of which it chooses each time.
    """

    def __init__(
        self, seed: int = 0, consolidates: Callable[[str], str] = tidy, wordings: tuple[str, ...] = WORDINGS
    ) -> None:
        self._seed, self._consolidates, self._wordings, self._number = seed, consolidates, wordings, itertools.count()
        self.reflections = 0
        self.consolidated: list[str] = []

    def __call__(self, prompt: str) -> str:
        if "`consolidated`" in prompt:
            self.consolidated.append(field(prompt, "instruction"))
            return reply(prompt, consolidated=self._consolidates(self.consolidated[-1]))
        self.reflections += 1
        text, examples = field(prompt, "current_instruction"), field(prompt, "examples_with_feedback")
        draw = hashed(self._seed, next(self._number))
        rules = [
            self._wordings[hashed(draw, sign) % len(self._wordings)].format(sign=sign, code=CODES[sign])
            for sign in SIGNS
            if f"on {sign} is" in examples and sign not in stated(text)
        ] or ["- Read the message twice."]
        if draw % 3 and not any(heading in text for heading in HEADINGS):
            rules = ["\n".join([HEADINGS[draw % len(HEADINGS)], *rules])]
        last = text.count("\n[") + 1
        return reply(prompt, edits=[{"action": "add", "part": last, "text": rule, "reason": ""} for rule in rules])


class SlowEngine(AsyncFakeEngine):
    """Takes a second for each reply."""

    async def complete(self, request: Any) -> Any:
        await anyio.sleep(1)
        return await super().complete(request)


def compiled(
    reflection: Callable[[str], str], calls: int, validation: int, predictors: int = 1, riddles: bool = False,
    seconds: float | None = None, made: list[Any] | None = None, student: Chain | None = None,
    answers_with: Callable[[str], str] = answer_of, **options: Any,
) -> Any:  # fmt: skip
    """In virtual time, on so many validation examples.

    Args:
        riddles: one message in nine has a code that nobody finds, so that no program is perfect.
        seconds: most that the run may take, in which each rollout takes one; without it nothing takes time.
        made: gets the optimizer.
        student: default: with so many predictors that know nothing.
        answers_with: makes the task model's replies.
    """
    signs = (*SIGNS, "riddles") if riddles else SIGNS
    optimizer = AsyncGEPA(
        metric, max_metric_calls=calls, max_seconds=seconds, reflection_lm=fake_lm(reflection), num_threads=8,
        track_stats=True, **options,
    )  # fmt: skip
    if made is not None:
        made.append(optimizer)
    answers = fake_lm(answers_with)
    if seconds is not None:
        answers = dspy.LM("fake/slow", engine=FakeEngine(answer_of), async_engine=SlowEngine(FakeEngine(answer_of)))
        answers.cache, answers.num_retries = False, 0

    train, val = messages("train", 24, signs), messages("val", validation, signs)
    program = evolved(optimizer, student or Chain(predictors), train, val, {"lm": answers})
    check_ends(program.async_stats)
    check_winner(program.detailed_results, validation)
    assert program.async_stats.metric_calls <= calls
    return program


def texts_of(program: Any) -> list[str]:
    return [predictor.signature.instructions for predictor in program.predictors()]


def leave_if_perfect(event: Any) -> None:
    if event["average_score"] == 1.0:
        raise SystemExit


def paid_until_perfect(directory: Path) -> int:
    """Leave a run in the moment in which a text has the perfect score; returns the metric calls that it has made."""
    with pytest.raises(SystemExit):
        compiled(Reflection(), 300, 20, log_dir=str(directory), gepa_kwargs=on("on_valset_evaluated", leave_if_perfect))
    [(calls,)] = sql(directory, "SELECT SUM(calls) FROM calls")
    return calls


SIZES = [(1, 4, 120), (1, 10, 240), (1, 20, 300), (2, 8, 300), (2, 16, 600)]
"""Predictors, validation examples, metric calls."""


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("predictors", "validation", "calls"), SIZES)
def test_a_run_that_ends_with_a_perfect_grown_text_returns_it_written_anew(
    predictors: int, validation: int, calls: int, seed: int
) -> None:
    reflection = Reflection(seed)
    program = compiled(reflection, calls, validation, predictors, seed=seed)
    assert program.async_stats.stop_reason.startswith(PERFECT)
    assert program.async_stats.best_score == 1.0
    assert [repeated_rules(text) for text in texts_of(program)] == [[]] * predictors
    assert len(reflection.consolidated) <= predictors, "each text is written anew once"
    assert not program.async_stats.unconsolidated


def test_a_perfect_text_is_kept_where_the_same_written_anew_is_worse_and_the_summary_says_so() -> None:
    reflection = Reflection(consolidates=lambda text: tidy(text).rpartition("\n")[0])
    program = compiled(reflection, 300, 20)
    assert program.async_stats.best_score == 1.0
    assert len(reflection.consolidated) == 1
    assert repeated_rules(*texts_of(program))
    assert GROWN in str(program.async_stats)
    assert "is worse" in program.async_stats.unconsolidated


@pytest.mark.parametrize("consolidates", [lambda text: "", lambda text: text, lambda text: "word " * 9999])
def test_a_reply_of_no_use_ends_the_run_with_the_text_that_has_grown(consolidates: Callable[[str], str]) -> None:
    reflection = Reflection(consolidates=consolidates)
    program = compiled(reflection, 300, 20)
    assert program.async_stats.stop_reason.startswith(PERFECT)
    assert len(reflection.consolidated) == 1
    assert len(stated(*texts_of(program))) == len(SIGNS)
    assert GROWN in str(program.async_stats)


def test_where_the_calls_left_do_not_pay_another_validation_none_is_spent_and_the_summary_says_so(
    tmp_path: Path,
) -> None:
    spent = paid_until_perfect(tmp_path)
    program = compiled(Reflection(), spent + 19, 20, log_dir=str(tmp_path))
    assert program.async_stats.metric_calls == spent
    assert program.async_stats.stop_reason.startswith(PERFECT)
    assert program.async_stats.unconsolidated == "the 19 metric calls left do not pay its validation"
    assert GROWN in str(program.async_stats)
    assert compiled(Reflection(), spent + 20, 20, log_dir=str(tmp_path)).async_stats.unconsolidated == ""


def test_where_max_seconds_leave_no_time_the_summary_says_so() -> None:
    program = compiled(Reflection(), 10_000, 20, riddles=True, seconds=15)
    assert repeated_rules(*texts_of(program))
    assert program.async_stats.unconsolidated == "max_seconds=15 leave no time for it"


def test_a_run_that_ends_by_its_time_returns_its_text_written_anew_in_time() -> None:
    program = compiled(Reflection(), 10_000, 20, riddles=True, seconds=60)
    assert program.async_stats.stop_reason.startswith("max_seconds=60")
    assert program.async_stats.seconds <= 60
    assert not repeated_rules(*texts_of(program))
    assert program.async_stats.unconsolidated == ""


def test_where_no_further_reflection_is_allowed_the_summary_names_the_limit() -> None:
    asked = Reflection()
    compiled(asked, 300, 20)
    program = compiled(Reflection(), 300, 20, max_reflection_calls=asked.reflections)
    assert program.async_stats.best_score == 1.0
    assert program.async_stats.unconsolidated.startswith(f"max_reflection_calls={asked.reflections} is spent")


def test_once_a_text_is_perfect_nothing_is_paid_but_its_consolidation_and_one_validation() -> None:
    reflection, heard = Reflection(), Heard()
    reached: list[int] = []

    def look(event: Any) -> None:
        if event["average_score"] == 1.0:
            reached.append(reflection.reflections)

    options = on("on_valset_evaluated", look)
    options["callbacks"].append(heard)
    compiled(reflection, 300, 20, gepa_kwargs=options)
    assert reached[0] == reflection.reflections, "no other step asks for a reflection any more"
    assert sum(event["average_score"] == 1.0 for event in heard.of("on_valset_evaluated")) == 2


def test_a_seed_that_is_perfect_is_never_written_anew() -> None:
    rules = "\n".join(f"- {sign}: {code}" for sign, code in CODES.items())
    reflection, text = Reflection(), f"Answer.\n{rules}\n{rules}"
    assert texts_of(compiled(reflection, 200, 8, student=begun_with(text))) == [text]
    assert not reflection.consolidated


@pytest.mark.parametrize("leaves", ["while it is written anew", "after its validation"])
def test_a_run_that_was_left_with_a_perfect_grown_text_writes_it_anew_once_when_it_goes_on(
    tmp_path: Path, leaves: str
) -> None:
    def leave(text: str) -> str:
        raise SystemExit

    left = on("on_valset_evaluated", leave_if_perfect) if leaves == "after its validation" else {}
    first = Reflection(consolidates=leave)
    with pytest.raises(SystemExit):
        compiled(first, 300, 20, log_dir=str(tmp_path), gepa_kwargs=left)
    second = Reflection()
    program = compiled(second, 300, 20, log_dir=str(tmp_path))
    assert second.reflections == 0
    assert len(second.consolidated) == 1
    assert not repeated_rules(*texts_of(program))


def test_a_run_that_has_ended_asks_for_nothing_when_it_is_compiled_again_and_returns_the_same(tmp_path: Path) -> None:
    for consolidates in (tidy, lambda text: "Answer.", lambda text: ""):
        directory = str(tmp_path / str(id(consolidates)))
        first = compiled(Reflection(consolidates=consolidates), 300, 20, log_dir=directory)
        again = Reflection(consolidates=consolidates)
        second = compiled(again, 300, 20, log_dir=directory)
        assert texts_of(second) == texts_of(first)
        assert again.reflections == len(again.consolidated) == 0


# On a tie.


@pytest.mark.parametrize(
    "options", [{"riddles": True}, {"skip_perfect_score": False}], ids=["riddles", "a search that goes on when perfect"]
)
@pytest.mark.parametrize("predictors", [1, 2])
@pytest.mark.parametrize("seed", [2, 5])  # in others the first of the best has not grown
def test_of_equals_in_the_whole_pool_the_first_that_has_not_grown_is_returned_everywhere(
    tmp_path: Path, seed: int, predictors: int, options: dict[str, Any]
) -> None:
    """dspy.GEPA returns the first of equals, which is a text that has grown here."""
    kept, told = list[Any](), list[int]()
    gepa_kwargs = on("on_optimization_end", lambda event: told.append(event["best_candidate_idx"]))
    options = {**options, "seed": seed, "log_dir": str(tmp_path), "gepa_kwargs": gepa_kwargs}
    program = compiled(Reflection(seed), 300, 18, predictors, made=kept, **options)
    details, returned = program.detailed_results, texts_of(program)
    scores = details.val_aggregate_scores
    assert repeated_rules("".join(texts_of(details.candidates[scores.index(max(scores))])))
    assert not any(repeated_rules(text) for text in returned)
    assert details.best_idx > scores.index(max(scores))
    assert texts_of(details.best_candidate) == returned
    assert details.to_dict()["best_idx"] == details.best_idx
    assert texts_of(kept[0].best_so_far()) == returned
    assert told == [details.best_idx]
    assert all(f"+{line}" in program.async_stats.prompt_change for text in returned for line in text.splitlines()[1:])
    exported = Chain(predictors)
    assert command("export", str(tmp_path), str(tmp_path / "best.json"), "--best")[0] == 0
    exported.load(str(tmp_path / "best.json"))
    assert texts_of(exported) == returned
    assert texts_of(compiled(Reflection(seed), 300, 18, predictors, **options)) == returned, "so does a resumed run"


def test_the_best_program_of_an_error_is_the_one_that_has_not_grown() -> None:
    def stops(state: Any) -> bool:
        if any(text.startswith("Answer with") for made in state.program_candidates for text in made.values()):
            raise RuntimeError("a stopper of the user's fails")
        return False

    with pytest.raises(RuntimeError) as raised:
        compiled(Reflection(), 300, 18, riddles=True, gepa_kwargs={"stop_callbacks": stops})
    error: Any = raised.value
    assert not repeated_rules(*texts_of(error.best_program))


def test_a_better_text_is_returned_though_it_has_grown() -> None:
    program = compiled(Reflection(consolidates=lambda text: "Answer."), 300, 18, riddles=True)
    assert repeated_rules(*texts_of(program))
    assert GROWN in str(program.async_stats)


def test_where_the_last_head_is_worse_than_an_older_text_the_calls_left_have_that_one_written_anew() -> None:
    """On validation a prompt with all codes is confused about three of them; it is of no use written anew, either."""

    def confused(prompt: str) -> str:
        question = field(prompt, "question")
        is_hard = question.startswith("val") and any(sign in question for sign in SIGNS[:3])
        is_confused = is_hard and len(stated(prompt.replace(question, ""))) == len(SIGNS)
        return reply(prompt, answer="none") if is_confused else answer_of(prompt)

    reflection = Reflection(consolidates=lambda text: "" if len(stated(text)) == len(SIGNS) else tidy(text))
    program = compiled(reflection, 260, 18, 2, answers_with=confused, seed=0)
    scores = program.detailed_results.val_aggregate_scores
    assert scores[-1] == max(scores[:-2]) > scores[-2], "the last head is worse than an older text"
    assert program.detailed_results.best_idx == len(scores) - 1
    assert not any(repeated_rules(text) for text in texts_of(program))


# Equal lines.


@pytest.mark.parametrize("predictors", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_no_candidate_has_a_line_twice_whichever_child_has_it_and_under_whichever_heading(
    predictors: int, seed: int
) -> None:
    """Reflections have one wording for each rule, marked and punctuated in three ways."""
    same = ("- If the message mentions {sign}, answer {code}.", "* if the  message mentions {sign}, answer {code}")
    reflection = Reflection(seed, lambda text: text, (*same, "If the message mentions {sign}, answer {code}."))
    program = compiled(reflection, 300, 18, predictors, riddles=True, seed=seed)
    candidates = [text for candidate in program.detailed_results.candidates for text in texts_of(candidate)]
    assert any(heading in text for heading in HEADINGS for text in candidates)
    assert [repeated_lines(text) for text in candidates] == [[]] * len(candidates)
    assert max(program.detailed_results.val_aggregate_scores) > 0.7, "nothing that was learnt is lost"


def test_a_heading_whose_lines_all_stand_elsewhere_is_left_out() -> None:
    program = compiled(Reflection(1, lambda text: text, WORDINGS[:1]), 300, 18, riddles=True)
    for text in (text for made in program.detailed_results.candidates for text in texts_of(made)):
        lines = [line for line in text.splitlines() if line]
        below = dict(zip(lines, [*lines[1:], "## End"], strict=True))
        assert not [line for line in lines if line.startswith("##") and below[line].startswith("##")], text


def test_an_edit_that_says_what_the_prompt_says_already_changes_nothing() -> None:
    """Such as a line that the user has written, under another heading and with other marks."""
    rules = "\n".join(f"- If the message mentions {sign}, answer {CODES[sign]}." for sign in SIGNS[:4])

    def reflect(prompt: str) -> str:
        text = f"## Rules\n{rules.replace('- ', '* ').replace('.', '')}"
        return reply(prompt, edits=[{"action": "add", "part": 1, "text": text, "reason": ""}])

    program = compiled(reflect, 200, 8, student=begun_with(f"Answer.\n\n## Codes\n{rules}"))
    assert len(program.detailed_results.candidates) == 1
    assert program.async_stats.end_reasons["the reflection changed nothing"] > 0
