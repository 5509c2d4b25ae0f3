"""The module that repairs stale children: what it asks, what it reads, and what it never raises; the loop's side."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import anyio
import dspy
import pytest
from dspy import lm15
from dspy.clients.errors import LMError
from dspy.utils.exceptions import LMAuthError, LMRateLimitError
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_flashevolve.engine.provider import RetryPolicy
from dspy_flashevolve.engine.staleness import PastCommit, StaleChild
from dspy_flashevolve.gepa.repair import Repair, read_answer
from dspy_flashevolve.modules.rewriting import StaleCandidateReflection
from dspy_flashevolve.programs.records import ModuleReply
from dspy_flashevolve.programs.run import DspyRun
from dspy_flashevolve.programs.settings import RunSettings
from tests.engine.stepped import Asker
from tests.fakes import fake_lm, reply_for

pytestmark = pytest.mark.anyio
HEAD = {"p": "head of p", "q": "head of q"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def one_format() -> Any:
    """dspy asks once more in JSON where a chat reply cannot be read; without that, calls can be counted."""
    with dspy.context(adapter=dspy.ChatAdapter(use_json_adapter_fallback=False)):
        yield


class Scripted:
    """Answers from a list, the last one for ever; keeps the prompts."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer(prompt) if callable(answer) else answer


def child(number: int, text: str = "new", before: float = 0.5, **options: Any) -> StaleChild:
    texts = options.pop("texts", {"p": text})
    return StaleChild(number, texts, {name: HEAD.get(name, "old") for name in texts}, before, **options)


def reply(text: str, **verdicts: str) -> str:
    """A reply; verdicts are named c1, c2, ..."""
    listed = [{"child": int(name[1:]), "verdict": verdict, "reason": "r"} for name, verdict in verdicts.items()]
    return reply_for("", verdicts=json.dumps(listed), new_text=text)


async def integrated(script: Scripted, children: list[StaleChild], asynchronous: bool = True, **options: Any) -> Any:
    module = StaleCandidateReflection(**options.pop("bounds", {}))
    with dspy.context(lm=fake_lm(script)):
        if asynchronous:
            return await module.acall(head=HEAD, children=children, **options)
        return module(head=HEAD, children=children, **options)


def plain(answer: Any) -> Any:
    return answer.texts, [verdict.model_dump() for verdict in answer.verdicts], answer.failed


async def test_one_call_a_changed_component() -> None:
    script = Scripted(lambda prompt: reply("P" if "head of p" in prompt else "Q", c1="orthogonal"))
    children = [child(1, texts={"p": "x", "q": "y"}), child(2, texts={"p": "z"})]
    answer = await integrated(script, children)
    assert answer.texts == {"p": "P", "q": "Q"}
    assert len(script.prompts) == 2
    assert ["### Child 2" in prompt for prompt in sorted(script.prompts, key=lambda prompt: "head of q" in prompt)] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    "bad",
    [
        "nonsense",
        "",
        reply("", c1="orthogonal"),
        reply("   \n ", c1="orthogonal"),
        reply("```\n\n```", c1="orthogonal"),
        reply("{new_text}", c1="orthogonal"),
        '{"verdicts": [], "new_text": ',
        '{"verdicts": [], "new_text": 7}',
        '[[ ## verdicts ## ]]\n[{"child": 1, "verdict": "orthogonal"}]',
    ],
)
async def test_a_reply_that_cannot_be_read_is_asked_for_once_more_and_then_reported(bad: str) -> None:
    script = Scripted(bad)
    answer = await integrated(script, [child(1)])
    assert len(script.prompts) == 2
    assert (answer.texts, answer.verdicts, list(answer.failed)) == ({}, [], ["p"])
    assert 0 < len(answer.failed["p"]) <= 300


@pytest.mark.parametrize(
    ("error", "seen"), [(lm15.RateLimitError("slow"), LMRateLimitError), (lm15.AuthError("who?"), LMAuthError)]
)
async def test_the_providers_errors_are_raised_and_not_asked_again(error: Exception, seen: type[LMError]) -> None:
    script = Scripted(error)
    with pytest.raises(seen):
        await integrated(script, [child(1)])
    assert len(script.prompts) == 1


@pytest.mark.parametrize("text", ["def f(:", "if True:\npass", "x = '"])
async def test_code_that_is_no_python_counts_as_unreadable(text: str) -> None:
    script = Scripted(reply(text, c1="orthogonal"))
    answer = await integrated(script, [child(1)], code_components=["p"])
    assert (answer.texts, list(answer.failed), len(script.prompts)) == ({}, ["p"], 2)
    assert "Python source" in script.prompts[0]
    assert (await integrated(script, [child(1)])).texts == {"p": text}, "as an instruction it is fine"


@pytest.mark.parametrize("fenced", ["```python\n{}\n```", "```\n{}\n```", "\n ```py\n{}\n```  \n", "{}"])
async def test_fences_around_the_whole_text_are_stripped(fenced: str) -> None:
    code = "def f():\n    return 1"
    answer = await integrated(Scripted(reply(fenced.format(code), c1="orthogonal")), [child(1)], code_components=["p"])
    assert answer.texts == {"p": code}


LONG = 50_000


def long_text(seed: int) -> str:
    return (f"line {seed} of a text that has no end; " * (LONG // 20))[:LONG]


async def test_the_prompt_stays_bounded_however_much_there_is_to_show() -> None:
    script = Scripted(reply("t"))
    stale = child(1, long_text(1), feedback=(long_text(2), long_text(3)), behind=500)
    commits = [PastCommit({"p": long_text(n)}, {"p": "x"}, n / 1000) for n in range(500)]
    assert (await integrated(script, [stale], commits=commits)).texts == {"p": "t"}
    prompt = script.prompts[0]
    assert len(prompt) < 2 * 4_100 + 8 * 4_100 + 10_000
    assert "(492 more, which changed the score less.)" in prompt
    assert "more characters.)" in prompt


@pytest.mark.parametrize("word", ["subsumed", "conflicting"])
async def test_a_verdict_by_which_nothing_is_taken_over_needs_no_text_and_is_asked_for_once(word: str) -> None:
    script = Scripted(reply("", c1=word))
    answer = await integrated(script, [child(1)])
    assert (answer.texts, [verdict.verdict for verdict in answer.verdicts], answer.failed) == ({}, [word], {})
    assert len(script.prompts) == 1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["nonsense", reply("a", c1="orthogonal"), reply("", c2="subsumed")]), min_size=1))
def test_the_awaited_twin_does_the_same(answers: list[str]) -> None:
    children = [child(1, "one"), child(2, "two")]
    seen = []
    for asynchronous in (True, False):
        script = Scripted(*answers)

        async def run(script: Scripted = script, asynchronous: bool = asynchronous) -> Any:
            return await integrated(script, children, asynchronous)

        seen.append((plain(anyio.run(run)), script.prompts))
    assert seen[0] == seen[1]


def test_it_is_a_program_like_any_other_and_can_be_optimized_and_saved(tmp_path: Path) -> None:
    module = StaleCandidateReflection(max_commits=3)
    assert [name for name, _ in module.named_predictors()] == ["integrate"]
    module.integrate.signature = module.integrate.signature.with_instructions("Do it better.")
    fresh = StaleCandidateReflection()
    fresh.load_state(module.dump_state())
    assert fresh.integrate.signature.instructions == "Do it better."
    module.save(tmp_path / "module.json")
    again = StaleCandidateReflection()
    again.load(tmp_path / "module.json")
    assert again.integrate.signature.instructions == "Do it better."
    assert again.deepcopy().max_commits == 8


@pytest.mark.parametrize("name", ["max_commits", "max_characters"])
def test_a_bound_under_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0, expected at least 1"):
        StaleCandidateReflection(**{name: 0})


# The loop's side


class Own(dspy.Module):
    """A user's module: forward only."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer
        self.threads: list[str] = []

    def forward(self, head: Any, children: Any, commits: Any = (), code_components: Any = ()) -> Any:
        NAMES.append(threading.current_thread().name)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


NAMES: list[str] = []


def reply_with(texts: dict[str, str], failed: dict[str, str] | None = None, **verdicts: str) -> dspy.Prediction:
    listed = [dspy.Prediction(child=int(n[1:]), verdict=v, reason="r") for n, v in verdicts.items()]
    return dspy.Prediction(texts=texts, verdicts=listed, failed=failed or {})


async def integration(module: dspy.Module, children: list[StaleChild], lm: Any = None) -> ModuleReply[Repair]:
    """What a run makes of a module's answer."""
    made = DspyRun(
        name="Own", stages={"integrate": [lm]}, settings=RunSettings(num_threads=1), retry=RetryPolicy(attempts=1)
    )
    inputs = {"head": dict(HEAD), "children": children, "commits": [], "code_components": []}
    return await made.run_async(
        lambda: made.call_module(
            "integrate", Asker(0), module, inputs, lm=lm, read=lambda answer: read_answer(answer, children[0], 0)
        )
    )


async def integrated_by(module: dspy.Module, *children: StaleChild) -> Repair:
    answer = (await integration(module, list(children))).answer
    assert answer is not None
    return answer


async def test_a_module_of_the_users_own_without_an_awaitable_twin_runs_in_a_thread() -> None:
    NAMES.clear()
    seen = await integrated_by(Own(reply_with({"p": "mine"}, c1="orthogonal", c5="subsumed")), child(1))
    assert (seen.texts, seen.failed) == ({"p": "mine"}, "")
    assert [(verdict.child, verdict.verdict) for verdict in seen.verdicts] == [(1, "orthogonal")]
    assert len(NAMES) == 1
    assert NAMES[0].startswith("flashevolve-work")


@pytest.mark.parametrize("answer", [ZeroDivisionError("boom"), None, "text", dspy.Prediction(texts=None, verdicts=[])])
async def test_a_module_that_raises_or_returns_something_else_has_failed_and_nothing_is_raised(answer: Any) -> None:
    seen = await integration(Own(answer), [child(1)])
    assert seen.answer is None
    assert seen.error is not None
    assert seen.spent.error


async def test_calls_and_tokens_are_counted_second_attempts_included() -> None:
    script = Scripted("nonsense", reply("better", c1="orthogonal"))
    seen = await integration(StaleCandidateReflection(), [child(1)], fake_lm(script))
    assert seen.answer is not None
    assert (seen.answer.texts, seen.calls, seen.spent.tokens) == ({"p": "better"}, 2, 14)


PLAIN_LINES = """[[ ## verdicts ## ]]
Child 1: Orthogonal, it adds a rule

child 2: Subsumed - the head has it
Child 2: conflicting

[[ ## new_text ## ]]
the new text

[[ ## completed ## ]]"""


async def test_verdicts_in_plain_lines_are_read_as_a_small_model_writes_them() -> None:
    script = Scripted(PLAIN_LINES)
    answer = await integrated(script, [child(1), child(2), child(3)])
    assert answer.texts == {"p": "the new text"}
    assert [(verdict.child, verdict.verdict) for verdict in answer.verdicts] == [(1, "orthogonal"), (2, "subsumed")]
    assert len(script.prompts) == 1


FIELD, DONE = "[[ ## new_text ## ]]\nthe new text", "[[ ## completed ## ]]"
ONE = '{"child": 1, "verdict": "orthogonal", "reason": "r"}'


@pytest.mark.parametrize(
    ("text", "judged"),
    [
        (f"[[ ## verdicts ## ]]\n[]\n\n{FIELD}\n\n{DONE}", []),
        (f"{FIELD}\n\n{DONE}", []),
        (FIELD, []),
        (f"[[ ## verdicts ## ]]\n\n{FIELD}", []),
        (f'[[ ## verdicts ## ]]\n[{{"child": 7, "verdict": "orthogonal"}}]\n\n{FIELD}', []),
        (f'[[ ## verdicts ## ]]\n[{{"child": 1, "verdict": "maybe"}}]\n\n{FIELD}', []),
        (f'[[ ## verdicts ## ]]\n[{ONE}, {{"child": 2, "verdict": "maybe"}}]\n\n{FIELD}', [1]),
        (f'[[ ## verdicts ## ]]\n[{ONE}, {{"child": 2, "ver\n\n{FIELD}', [1]),
        (f"[[ ## verdicts ## ]]\nsoon\n\n{FIELD}\n\n{DONE}", []),
        (f"[[ ## verdicts ## ]]\nAll of them are orthogonal.\n\n{FIELD}\n\n{DONE}", []),
        (f'[[ ## verdicts ## ]]\n{{"verdict": "orthogonal"}}\n\n{FIELD}\n\n{DONE}', []),
        ("[[ ## verdicts ## ]]\n\n[[ ## new_text ## ]]\n```text\nthe new text\n```\n\n" + DONE, []),
        (f"Of course. Here is what I made of it.\n\n[[## new_text ##]]\nthe new text\n\n{DONE}\n\nDone!", []),
        (f"{FIELD}\n\n[[ ## verdicts ## ]]\nChild 2 is subsumed.", [2]),
        (f"{FIELD.replace('the new', 'an old')}\n\nNo, rather:\n\n{FIELD}", []),
        ('Here you are: {"new_text": "the new text"} And no more.', []),
        ('{"verdicts": "orthogonal", "new_text": "```\\nthe new text\\n```"}', []),
        ("<new_text>\nthe new text\n</new_text>", []),
    ],
)
async def test_a_good_text_is_used_whatever_the_verdicts(text: str, judged: list[int]) -> None:
    script = Scripted(text)
    answer = await integrated(script, [child(1), child(2)])
    assert (answer.texts, answer.failed) == ({"p": "the new text"}, {})
    assert [verdict.child for verdict in answer.verdicts] == judged
    assert len(script.prompts) == 1


async def test_the_fenced_source_in_prose_is_what_counts_of_code() -> None:
    code = "def f():\n    return 1"
    text = f"{FIELD.partition('the')[0]}Here is the code:\n```python\n{code}\n```\nIt works."
    assert (await integrated(Scripted(text), [child(1)], code_components=["p"])).texts == {"p": code}
    two = text + "\n```\ndef g(): ...\n```"
    assert list((await integrated(Scripted(two), [child(1)], code_components=["p"])).failed) == ["p"]
