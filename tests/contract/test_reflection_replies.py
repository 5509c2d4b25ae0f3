"""How replies of a reflection LM are read: what a reply closes counts, thoughts are not read, and none holds a run up.

The LM is a fake behind ``dspy.LM``: each rule that stands in a prompt makes the task model better. Where the size of a
request matters it is a server of OpenAI's form.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import dspy
import json_repair
import pytest
from dspy import lm15

from dspy_flashevolve import AsyncACE, AsyncGEPA, Reflective, RunAbortedError
from tests.broken_server import BrokenServer
from tests.contract.surface import Heard, check_ends, evolved, text_of
from tests.contract.test_replies import field, reply, rules_in, task_lm
from tests.fakes import CUT_OFF, Chain, examples, fake_lm

TRAIN, VAL = examples("t", 8), examples("v", 6)
HALF = "Leave out the e"
Raw = Callable[[str, int], str]


def score(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
    return dspy.Prediction(score=float(pred.answer), feedback=f"{gold.question} needs rules.")


class Run:
    """A run whose reflections are answered by ``raw(prompt, number)``, and what came of it.

    Other requests of the reflection LM, as to write a text anew or to repair a child, are answered by ``others``.
    """

    def __init__(
        self, raw: Raw, others: Raw = lambda prompt, number: "", calls: int = 60, lm: Any = None,
        metric: Any = score, **options: Any,
    ) -> None:  # fmt: skip
        numbers, heard = itertools.count(1), Heard()
        self.prompts: list[str] = []

        def answer(prompt: str) -> str:
            self.prompts.append(prompt)
            reflects = "current_instruction" in prompt
            return (raw if reflects else others)(prompt, next(numbers))

        optimizer = AsyncGEPA(
            metric, max_metric_calls=calls, reflection_lm=lm or fake_lm(answer), num_threads=4, track_stats=True,
            gepa_kwargs={"callbacks": [heard]}, **options,
        )  # fmt: skip

        program = evolved(optimizer, Chain(1), TRAIN, VAL, {"lm": task_lm(0), "adapter": dspy.ChatAdapter()})
        self.stats, details = program.async_stats, program.detailed_results
        check_ends(self.stats)
        self.gain = max(details.val_aggregate_scores) - details.val_aggregate_scores[0]
        self.validated = [text_of(candidate) for candidate in details.candidates]
        proposed = [event["new_instructions"].values() for event in heard.of("on_proposal_end")]
        self.texts = [*self.validated, *itertools.chain(*proposed)]
        """Every text that a reflection wrote, or that was validated."""


def edit(text: str) -> dict[str, Any]:
    return {"action": "add", "part": 1, "text": text, "reason": "it needs rules"}


def edits(number: int) -> str:
    return json.dumps({"edits": [edit(f"- rule {number}"), edit(f"- rule {number + 100}")]})


def whole(prompt: str, number: int) -> str:
    return json.dumps({"new_instruction": f"{field(prompt, 'current_instruction')}\n- rule {number}"})


# Cut off

CUT: dict[str, Raw] = {
    "in JSON": lambda prompt, number: edits(number)[:-2] + f', {{"action": "add", "part": 1, "text": "{HALF}',
    "in a fence": lambda prompt, number: f'```json\n{edits(number)[:-2]}, {{"part": 1, "text": "{HALF}',
    "in tags": lambda prompt, number: f'<add part="1">- rule {number}</add>\n<add part="1">{HALF}',
    "at the longest length": lambda prompt, number: edits(number)[:-2] + f', {{"text": "{HALF}{CUT_OFF}',
}


@pytest.mark.parametrize("cut", CUT)
def test_an_edit_that_the_reply_does_not_close_is_none_and_those_that_it_closes_count(cut: str) -> None:
    made = Run(CUT[cut])
    assert made.gain > 0
    assert not [text for text in made.texts if HALF in text]
    assert not [prompt for prompt in made.prompts if "`new_instruction`" in prompt], "none is asked for as a whole text"


@pytest.mark.parametrize("search", ["edits", "pareto"])
@pytest.mark.parametrize("end", ["", " en", '\\"en\\', "\\n```json\\n{"])
def test_a_whole_text_that_the_reply_does_not_close_is_none(search: Any, end: str) -> None:
    made = Run(lambda prompt, number: '{"new_instruction": "- rule 1. ' + HALF + end, search=search)
    assert set(made.texts) == set(made.validated[:1]), "nothing but the seed"
    assert any("reflection failed" in reason for reason in made.stats.end_reasons)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("search", ["edits", "pareto"])
def test_where_every_reply_is_cut_in_its_first_text_the_run_ends_and_the_error_says_what_to_do(
    search: Any, asynchronous: bool
) -> None:
    lm = fake_lm(lambda prompt: f'{{"new_instruction": "{HALF}{CUT_OFF}', asynchronous=asynchronous)
    with pytest.raises(ValueError, match=r"was cut off at its longest length\. Give that LM more max_tokens"):
        Run(lambda prompt, number: "", lm=lm, search=search, calls=300)


@pytest.mark.parametrize("form", ["{}", "[[ ## consolidated ## ]]\n{}", "<consolidated>\n{}"])
def test_a_prompt_written_anew_that_was_cut_off_is_not_validated(form: str) -> None:
    texts: list[str] = []

    def anew(prompt: str, number: int) -> str:
        texts.append(field(prompt, "instruction"))
        cut = f"Anew.\n{texts[-1]}\n```json\n{HALF}"
        return form.format(json.dumps({"consolidated": cut})[:-2] if form == "{}" else cut)

    made = Run(lambda prompt, number: edits(number), anew)
    assert texts
    assert made.gain > 0
    assert not [text for text in made.texts if HALF in text]


@pytest.mark.parametrize("search", ["edits", "pareto"])
def test_wherever_a_reply_is_cut_each_line_of_a_prompt_is_one_that_it_would_have_had_whole(search: Any) -> None:
    written = set[str]()

    def raw(prompt: str, number: int) -> str:
        lines = [f'- rule {number}: say "so \\ {{so}}", and [so].', f"- rule {number + 100} is so."]
        written.update(lines)
        if "`edits`" in prompt:
            text = json.dumps({"edits": [*map(edit, lines)]})
        else:
            text = json.dumps({"new_instruction": "\n".join([field(prompt, "current_instruction"), *lines])})
        return text[: number * 7 % (len(text) + 7)]

    made = Run(raw, search=search, calls=200)
    assert made.gain > 0
    seed = set(made.validated[0].splitlines())
    assert {line for text in made.texts for line in text.splitlines()} <= written | seed


# Degenerate

ENDLESS = {
    "open tags": '<add part="1">',
    "open brackets": "[",
    "open braces": "{",
    "open strings in lists": '["',
    "open strings in objects": '{"',
    "open objects": '{"a":',
    "open edits": '{"edits": [{"action": "add", ',
    "quotes": '"',
    "escaped quotes": '\\"',
    "open thoughts": "<think>",
    "ended thoughts": "</think>\n",
    "headers": "[[ ## new_text ## ]]\n",
    "fences": "```\n",
    "verdicts": "child 1 ",
}
LENGTHS = (40_000, 100_000, 1_000_000)


@pytest.fixture
def repaired(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The lengths of what dspy has repaired: it takes time that grows with their square."""
    lengths, loads = list[int](), json_repair.loads

    def recorded(text: str, *more: Any, **options: Any) -> Any:
        lengths.append(len(text))
        return loads(text[:1000], *more, **options)

    monkeypatch.setattr(json_repair, "loads", recorded)
    yield lengths
    assert max(lengths, default=0) < 1000


def endless(number: int) -> str:
    unit, length = list(ENDLESS.values())[number % len(ENDLESS)], LENGTHS[number % len(LENGTHS)]
    return unit * (length // len(unit))


@pytest.mark.parametrize("search", ["edits", "pareto"])
def test_replies_without_end_to_reflections_are_not_repaired_and_long_ones_are_told_of(
    search: Any, repaired: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    made = Run(lambda prompt, number: endless(number), search=search)
    assert set(made.texts) == set(made.validated[:1]), "nothing but the seed"
    assert "characters, of which at most 200,000 are read" in caplog.text


def test_replies_without_end_to_repairs_and_consolidations_are_not_repaired(repaired: list[int]) -> None:
    made = Run(
        lambda prompt, number: edits(number), lambda prompt, number: endless(number),
        staleness=Reflective(min_gap=0), calls=80,
    )  # fmt: skip
    assert made.gain > 0
    assert made.stats.integration_calls > 0
    assert any("`consolidated`" in prompt for prompt in made.prompts)


def test_replies_without_end_in_ace_are_not_repaired(repaired: list[int]) -> None:
    numbers = itertools.count(1)
    lm = fake_lm(lambda prompt: endless(next(numbers)))
    optimizer = AsyncACE(score, reflector_lm=lm, curator_lm=lm, num_threads=4)

    assert evolved(optimizer, Chain(1), TRAIN[:2], None, {"lm": task_lm(0)}).async_stats.outcome == "finished"


# Thoughts

DRAFT = json.dumps({"edits": [edit("- draft rule 999")], "new_instruction": "Draft rule 999."})
THOUGHTS = {
    "closed": f"<think>\nSay {{x}}? Or {DRAFT}? {{ No.\n</think>\n\n{{}}",
    "closed without an opening": f"Say {{x}}? Or {DRAFT}? {{ No.\n</think>\n\n{{}}",
    "two of them": f"<think>{DRAFT}</think>\n<think>{{ And {DRAFT}</think>{{}}",
    "a draft before": f"First I thought of this:\n{DRAFT}\nBut it is better so:\n```json\n{{}}\n```",
}


def thinking(form: str, text: str) -> str:
    before, _, after = THOUGHTS[form].rpartition("{}")
    return before + text + after


@pytest.mark.parametrize("search", ["edits", "pareto"])
@pytest.mark.parametrize("form", THOUGHTS)
def test_thoughts_before_a_reflection_are_not_read(form: str, search: Any) -> None:
    def raw(prompt: str, number: int) -> str:
        return thinking(form, edits(number) if search == "edits" else whole(prompt, number))

    made = Run(raw, search=search)
    assert made.gain > 0
    assert not [text for text in made.texts if "999" in text]


@pytest.mark.parametrize("form", ["closed", "closed without an opening", "two of them"])
def test_thoughts_before_a_text_written_anew_are_not_read(form: str) -> None:
    """It is better than the grown text, since a rule stands in it that no reflection wrote."""

    def anew(prompt: str, number: int) -> str:
        rules = [*sorted(rules_in(field(prompt, "instruction"))), "rule 777"]
        return thinking(form, reply(prompt, consolidated="Anew:\n" + "\n".join(f"- {rule}" for rule in rules)))

    made = Run(lambda prompt, number: edits(number), anew)
    assert [text for text in made.validated if "Anew:\n- rule" in text]
    assert not [text for text in made.texts if "999" in text or "think" in text]


def test_a_reply_that_ends_in_its_thoughts_was_cut_off() -> None:
    made = Run(lambda prompt, number: f"<think>I could say {DRAFT}")
    assert set(made.texts) == set(made.validated[:1]), "nothing but the seed"


def test_a_text_may_speak_of_thoughts() -> None:
    said = "- rule {}: write your thoughts between <think> and </think> , then </think> ends them."
    made = Run(lambda prompt, number: json.dumps({"edits": [edit(said.format(number))]}))
    assert made.gain > 0


# Too long for the context

LONG = 1000
"""Characters of the feedback on an example."""
OPENAI = {"message": "This model's maximum context length is 8192 tokens.", "code": "context_length_exceeded"}
VLLM = {"message": "This model's maximum context length is 4096 tokens. However, you requested 9000.", "code": 400}
LLAMA = {"message": "the request exceeds the available context size", "type": "exceed_context_size_error"}


class SmallContext(BrokenServer):
    """A server whose model has a context of so many characters; answers requests for edits, and notes how many examples
    each one shows.

    Args:
        error: what it says, with the status 400, of longer prompts.
    """

    def __init__(self, characters: int, error: dict[str, Any]) -> None:
        super().__init__(self._answers)
        self.asked, self.refused = list[int](), 0
        self._characters, self._error = characters, error

    def _answers(self, request: str) -> str:
        prompt = "\n".join(message["content"] for message in json.loads(request)["messages"])
        self.asked.append(prompt.count("needs rules."))
        if len(prompt) <= self._characters:
            return edits(len(self.asked))
        self.refused += 1
        return json.dumps({"error": {"type": "invalid_request_error", **self._error}})


def wordy(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
    return dspy.Prediction(score=float(pred.answer), feedback="needs rules." + "x" * LONG)


def over_http(server: SmallContext, calls: int = 150, **options: Any) -> Any:
    lm = server.lm("chosen", "auto")
    optimizer = AsyncGEPA(
        wordy, max_metric_calls=calls, reflection_lm=lm, num_threads=1, track_stats=True, reflection_minibatch_size=8,
        **options,
    )  # fmt: skip
    with dspy.context(lm=task_lm(0)):
        return optimizer.compile(Chain(1), trainset=TRAIN, valset=VAL)


@pytest.mark.parametrize("error", [OPENAI, VLLM, LLAMA], ids=["OpenAI", "vLLM", "llama.cpp"])
def test_a_reflection_that_does_not_fit_is_asked_for_with_half_of_the_examples_and_later_ones_begin_there(
    error: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A prompt has some 3,500 characters beside its examples."""
    with SmallContext(3500 + 5 * LONG, error) as server:
        program = over_http(server, max_seconds=60)
    stats = program.async_stats
    check_ends(stats)
    assert max(program.detailed_results.val_aggregate_scores) > program.detailed_results.val_aggregate_scores[0]
    reflections = [count for count in server.asked if count]
    assert server.refused <= 4, "no more is refused once it has learnt"
    assert 4 <= max(reflections[len(reflections) // 2 :]) <= 5
    [told] = [entry.getMessage() for entry in caplog.records if "context window" in entry.getMessage()]
    assert "reflection_minibatch_size" in told
    assert error["message"] in told


def test_a_run_in_which_no_single_example_fits_ends_with_one_error_that_says_so() -> None:
    with SmallContext(3000, OPENAI) as server, pytest.raises(RunAbortedError, match="single example") as raised:
        over_http(server, calls=3000)
    assert "reflection_lm" in str(raised.value)
    assert server.refused == len(server.asked) < 50
    assert text_of(raised.value.best_program)  # pyright: ignore[reportAttributeAccessIssue]


def test_an_example_that_never_fits_costs_its_steps_no_more_than_that_example() -> None:
    def feedback(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        return dspy.Prediction(
            score=float(pred.answer), feedback="endless" * 99 if gold.question == "t 3" else "Rules."
        )

    def refuses(prompt: str, number: int) -> str:
        if "endless" in prompt:
            raise lm15.ContextLengthError("too long")
        return edits(number)

    made = Run(refuses, calls=80, metric=feedback)
    assert made.gain > 0
    assert not [reason for reason in made.stats.end_reasons if "reflection failed" in reason]


class Own:
    """A proposer of the user's own, which raises as its LM does."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __call__(self, candidate: Any, reflective_dataset: Any, components_to_update: Sequence[str]) -> Any:
        [name] = components_to_update
        self.read.append(len(reflective_dataset[name]))
        if self.read[-1] > 2:
            raise dspy.ContextWindowExceededError(model="m")
        return {name: f"{candidate[name]}\n- rule {len(self.read)}"}


def test_a_proposer_of_the_users_own_is_given_half_of_the_examples_too() -> None:
    own = Own()
    made = Run(lambda prompt, number: "", instruction_proposer=own, reflection_minibatch_size=4)
    assert made.gain > 0
    assert (set(own.read), own.read[-1]) == ({4, 2}, 2), own.read


def test_a_refusal_for_another_reason_is_not_asked_for_with_fewer_examples() -> None:
    shown: list[int] = []

    def refuses(prompt: str) -> str:
        shown.append(prompt.count("needs rules."))
        raise lm15.InvalidRequestError("messages: at least one message is required", status=400)

    with pytest.raises(Exception, match="at least one message"):
        Run(lambda prompt, number: "", lm=fake_lm(refuses), calls=300, reflection_minibatch_size=4)
    assert set(shown) == {4}
