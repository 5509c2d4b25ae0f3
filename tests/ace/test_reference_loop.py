"""Lockstep beside a loop that is written after ACE's reference code: the same calls, in the same order, told the same.

Source: github.com/ace-agent/ace, commit ba78d34, `ACE._train_single_sample` and `_offline_train`. `reference` below
does what they do with texts that stand for an LM's replies, which follow from what the LM is shown. Left out is the
attempt after the curator, which measures training accuracy and changes nothing.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import dspy
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_flashevolve import AsyncACE
from dspy_flashevolve.sim.virtual import run
from tests.fakes import Chain, fake_lm, hashed, reply_for

Call = tuple[Any, ...]
"""Who is asked, and what it is shown."""
SECTION = "other"


@dataclass
class Bullet:
    """A line of the reference's playbook."""

    id: str
    content: str
    helpful: int = 0
    harmful: int = 0

    def __str__(self) -> str:
        return f"[{self.id}] helpful={self.helpful} harmful={self.harmful} {self.content}"


@dataclass(frozen=True)
class Case:
    """The arguments of a run, and a seed of all replies."""

    seed: int = 0
    samples: int = 4
    epochs: int = 1
    max_rounds: int = 2
    curator_frequency: int = 1
    no_ground_truth: bool = False

    def draw(self, *shown: object) -> int:
        return hashed(self.seed, *shown) % 1000


# What LMs reply: functions of what they are shown.


def answer_to(case: Case, question: str, bullets: list[str], reflection: str) -> tuple[str, list[str]]:
    """The answer, right in one of three cases, and the ids of the bullets that are cited."""
    number = case.draw("answer", question, bullets, reflection)
    cited = [line[1 : line.index("]")] for line in bullets if case.draw("cite", number, line) % 2]
    return ("right" if number % 3 == 0 else f"wrong {number}"), cited


def reflection_on(case: Case, question: str, answer: str, truth: str, cited: list[str]) -> tuple[str, dict[str, str]]:
    """The insight, and a tag for each bullet that was cited."""
    number = case.draw("reflect", question, answer, truth, cited)
    words = ("helpful", "harmful", "neutral")
    tags = {line[1 : line.index("]")]: words[case.draw("tag", number, line) % 3] for line in cited}
    return f"Insight: insight {number}", tags


def addition_for(case: Case, bullets: list[str], reflection: str) -> str | None:
    """The bullet that a curator adds; None for none."""
    number = case.draw("curate", bullets, reflection)
    return None if number % 4 == 0 else f"Lesson {spelled(number)}."


def spelled(number: int) -> str:
    """A number in letters: bullets with different digits never count as near-duplicates."""
    return str(number).translate(str.maketrans("0123456789", "abcdefghij"))


# The reference's loop.


@dataclass
class Reference:
    """The loop's state: its playbook, the next number of an id, and every call that was made."""

    case: Case
    bullets: list[Bullet] = field(default_factory=list[Bullet])
    number: int = 1
    calls: list[Call] = field(default_factory=list[Call])

    @property
    def lines(self) -> list[str]:
        return [str(bullet) for bullet in self.bullets]

    def generate(self, question: str, reflection: str) -> tuple[str, list[str]]:
        self.calls.append(("generate", question, self.lines, reflection))
        return answer_to(self.case, question, self.lines, reflection)

    def reflect(self, question: str, answer: str, cited: list[str]) -> str:
        truth = "" if self.case.no_ground_truth else "right"
        used = [str(bullet) for name in cited for bullet in self.bullets if bullet.id == name]
        self.calls.append(("reflect", question, answer, truth, answer == "right", used))
        insight, tags = reflection_on(self.case, question, answer, truth, used)
        for bullet in self.bullets:
            bullet.helpful += tags.get(bullet.id) == "helpful"
            bullet.harmful += tags.get(bullet.id) == "harmful"
        return insight

    def curate(self, step: int, question: str, reflection: str) -> None:
        self.calls.append(("curate", step, self.case.samples, question, self.lines, reflection))
        content = addition_for(self.case, self.lines, reflection)
        if content is not None and content not in [bullet.content for bullet in self.bullets]:
            self.bullets.append(Bullet(f"oth-{self.number}", content))
            self.number += 1
        elif content is not None:  # the one difference: what a bullet says already is no second bullet, but praise
            next(bullet for bullet in self.bullets if bullet.content == content).helpful += 1

    def sample(self, step: int, question: str) -> None:
        answer, cited = self.generate(question, "")
        reflection = ""
        if answer == "right":
            reflection = self.reflect(question, answer, cited)
        else:
            for _ in range(self.case.max_rounds):
                reflection = self.reflect(question, answer, cited)
                answer, cited = self.generate(question, reflection)
                if answer == "right":
                    break
        if step % self.case.curator_frequency == 0:
            self.curate(step, question, reflection)


def reference(case: Case) -> Reference:
    loop = Reference(case)
    for _ in range(case.epochs):
        for step in range(1, case.samples + 1):
            loop.sample(step, f"q{step}")
    return loop


# AsyncACE in lockstep, with the same replies.


def lines_in(text: str) -> list[str]:
    """The bullets in a text, in order."""
    return re.findall(r"^ *(\[oth-\d+\] helpful=\d+ harmful=\d+ .*)$", text, re.MULTILINE)


def section(prompt: str, name: str) -> str:
    """The newest value of an input field in a prompt."""
    return prompt.rsplit(f"[[ ## {name} ## ]]\n", 1)[1].split("\n\n[[ ## ")[0].split("\n\nRespond")[0].strip()


@dataclass
class Recorder:
    """Plays the LM of all roles, and keeps what each is shown."""

    case: Case
    calls: list[Call] = field(default_factory=list[Call])

    def __call__(self, prompt: str) -> str:
        if "[[ ## cited_bullets ## ]]" in prompt and "[[ ## attempt ## ]]" in prompt:
            return self.reflected(prompt)
        if "[[ ## operations ## ]]" in prompt:
            return self.curated(prompt)
        bullets, question = lines_in(prompt), section(prompt, "question")
        _, _, advice = prompt.partition("What was learnt from an earlier attempt at this task:\n")
        reflection = advice.split("\n")[0].strip()
        self.calls.append(("generate", question, bullets, reflection))
        answer, cited = answer_to(self.case, question, bullets, reflection)
        return reply_for("", answer=answer, cited_bullets=", ".join(cited))

    def reflected(self, prompt: str) -> str:
        question = section(prompt, "task").removeprefix("question: ")
        answer = section(prompt, "attempt").partition("answer: ")[2]
        score, _, expected = section(prompt, "feedback").partition(" Expected:\n")
        truth, cited = expected.removeprefix("answer: "), lines_in(section(prompt, "cited_bullets"))
        self.calls.append(("reflect", question, answer, truth, score == "Score: 1.", cited))
        insight, tags = reflection_on(self.case, question, answer, truth, cited)
        own = {"what_went_wrong": "", "right_approach": "", "insight": insight.removeprefix("Insight: ")}
        return reply_for("", **own, bullet_tags=json.dumps(tags))

    def curated(self, prompt: str) -> str:
        question, bullets = section(prompt, "task").removeprefix("question: "), lines_in(section(prompt, "playbook"))
        reflection = section(prompt, "reflection")
        step, total = map(int, re.findall(r"Sample (\d+) of (\d+)", section(prompt, "progress"))[0])
        self.calls.append(("curate", step, total, question, bullets, reflection))
        content = addition_for(self.case, bullets, reflection)
        operations = [] if content is None else [{"type": "ADD", "section": SECTION, "content": content}]
        return reply_for("", operations=json.dumps(operations))


def lockstep(case: Case) -> tuple[list[Call], list[str]]:
    """The calls of AsyncACE in lockstep on the same samples, and the lines of its last playbook, as it is validated."""
    recorder = Recorder(case)

    questions = [f"q{step}" for step in range(1, case.samples + 1)]
    trainset = [dspy.Example(question=question, answer="right").with_inputs("question") for question in questions]
    optimizer = AsyncACE(
        lambda gold, pred: float(pred.answer == gold.answer),
        schedule="lockstep",
        max_rounds=case.max_rounds,
        epochs=case.epochs,
        curator_frequency=case.curator_frequency,
        no_ground_truth=case.no_ground_truth,
        token_budget=10**6,
        eval_every=10**6,
    )
    validation = [dspy.Example(question="validation", answer="right").with_inputs("question")]

    async def main() -> None:
        with dspy.context(lm=fake_lm(recorder)):
            await optimizer.acompile(Chain(), trainset=trainset, valset=validation)

    run(main)
    *_, (_, _, last, _) = [call for call in recorder.calls if call[1] == "validation"]
    return [call for call in recorder.calls if call[1] != "validation"], last


CASES = st.builds(
    Case,
    seed=st.integers(0, 10**6),
    samples=st.integers(1, 6),
    epochs=st.integers(1, 3),
    max_rounds=st.integers(1, 3),
    curator_frequency=st.integers(1, 4),
    no_ground_truth=st.booleans(),
)


@settings(max_examples=12, deadline=None)
@given(CASES)
def test_lockstep_makes_the_calls_of_the_reference_loop_and_comes_to_its_playbook(case: Case) -> None:
    loop, (calls, last) = reference(case), lockstep(case)
    assert calls == loop.calls
    assert last == loop.lines


def test_the_cases_cover_corrected_samples_moved_counters_and_skipped_curators() -> None:
    loop = reference(Case(samples=30, epochs=2, max_rounds=3, curator_frequency=2))
    kinds = [call[0] for call in loop.calls]
    assert all(kinds.count(kind) > 5 for kind in ("generate", "reflect", "curate"))
    assert kinds.count("curate") == 30
    assert {True, False} == {call[4] for call in loop.calls if call[0] == "reflect"}
    assert any(bullet.helpful and bullet.harmful for bullet in loop.bullets)
