"""Modules that integrate several texts into one: StaleCandidateReflection, and CombeeReflection on top of it.

Source: FlashEvolve (arXiv 2605.08520) section 3.2, reflective repair; several children at once are this project's.
"""

from __future__ import annotations

import ast
import asyncio
import difflib
import json
import logging
import math
import random
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import dspy
from dspy.clients.errors import LMError
from dspy.teleprompt.gepa.instruction_proposal import ProposeInstruction
from pydantic import BaseModel, Field

from dspy_flashevolve.engine.staleness import StaleChild

logger = logging.getLogger(__name__)

NAMED = 50
"""Children that are not shown are named up to here."""
ATTEMPTS = 2
"""A reply that cannot be read is asked for once more."""


Verdict = Literal["orthogonal", "subsumed", "conflicting"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


class ChildVerdict(BaseModel):
    """How one child stands to the head and to the other children."""

    child: int = Field(description="The child's number.")
    verdict: Verdict = Field(
        description="orthogonal: its change is new and fits, so it is in new_text. subsumed: the head or another child "
        "already has it. conflicting: it contradicts the head or another child, so it is left out."
    )
    reason: str = Field(default="", description="One sentence.")


class Integration(BaseModel):
    """The outcome of one integration.

    Args:
        texts: new texts of the components that changed; empty when nothing is worth a change.
        verdicts: one a child.
        failed: why no reply could be read: the texts are empty and the verdicts mean nothing.
    """

    texts: dict[str, str] = {}
    verdicts: list[ChildVerdict] = []
    failed: str = ""


class IntegrateChildren(dspy.Signature):
    """Several rewrites of one text of an AI program were made at the same time, each from an older version of it and
    from a few examples of its own. Integrate them into the newest version, the head, so that nothing learnt is lost.

    Judge every child. A change that is new and fits is orthogonal: put what it adds into the new text, in full detail.
    A change that the head or another child already makes is subsumed: add nothing for it. A change that contradicts
    the head or another child is conflicting: keep the one with the better evidence in scores and feedback, and leave
    the other out; never average the two. Keep what the head says unless a child has evidence against it. Add nothing
    that is in none of them. Where the text is Python source, return the whole source, working, with the same classes,
    methods and field names."""

    component: str = dspy.InputField(desc="The text's name in the program.")
    kind: str = dspy.InputField(desc="What the text is: an instruction, or Python source.")
    head_text: str = dspy.InputField(desc="The newest version.")
    children: str = dspy.InputField(desc="The rewrites: number, scores before and after, what changed, feedback.")
    commits: str = dspy.InputField(desc="What was committed since the children were begun, and what it brought.")
    verdicts: list[ChildVerdict] = dspy.OutputField(desc="One for each child.")
    new_text: str = dspy.OutputField(desc="The whole new text, and nothing else.")


class StaleCandidateReflection(dspy.Module):
    """Reads stale children and the head; says how they stand to each other and writes the new texts.

    Replace it by any module whose ``forward`` (and ``aforward``, if it is to run on the loop) takes the same
    arguments and returns the same fields; optimize it like any other DSPy program.

    Args:
        max_children: children whose changes are shown in full, the most informative first; the rest are counted.
        max_commits: commits that are shown, those that changed the score most first.
        max_characters: of each change that is shown; longer ones are cut.

    Raises:
        ValueError: a bound under 1.
    """

    def __init__(self, max_children: int = 24, max_commits: int = 8, max_characters: int = 4000) -> None:
        super().__init__()
        self.max_children, self.max_commits, self.max_characters = max_children, max_commits, max_characters
        for name in ("max_children", "max_commits", "max_characters"):
            if getattr(self, name) < 1:
                raise ValueError(f"StaleCandidateReflection: {name} is {getattr(self, name)}, expected at least 1.")
        self.integrate = dspy.Predict(IntegrateChildren)

    def forward(
        self,
        head: dict[str, str],
        children: Sequence[Any],
        commits: Sequence[Any] = (),
        code_components: Sequence[str] = (),
    ) -> dspy.Prediction:
        """Integrate ``children`` into ``head``.

        Args:
            head: component -> text of the candidate that the result stands on.
            children: records with the fields of ``engine.staleness.StaleChild``.
            commits: records with the fields of ``engine.staleness.PastCommit``.
            code_components: components that hold Python source (``dspy.Flex``).

        Returns:
            ``texts``: component -> new text, for those that changed; ``verdicts``: list of :class:`ChildVerdict`, one a
            child and component; ``failed``: component -> why no reply of two could be read.
        """
        return _gathered([self._one(job) for job in self._jobs(head, children, commits, code_components)])

    async def aforward(
        self,
        head: dict[str, str],
        children: Sequence[Any],
        commits: Sequence[Any] = (),
        code_components: Sequence[str] = (),
    ) -> dspy.Prediction:
        """As :meth:`forward`, awaitable; components are integrated side by side."""
        jobs = self._jobs(head, children, commits, code_components)
        return _gathered(await asyncio.gather(*(self._aone(job) for job in jobs)))

    def _jobs(
        self, head: dict[str, str], children: Sequence[Any], commits: Sequence[Any], code: Sequence[str]
    ) -> list[_Job]:
        jobs: list[_Job] = []
        for component in dict.fromkeys(name for child in children for name in child.texts):
            concerned = [child for child in children if component in child.texts]
            inputs = {
                "component": component,
                "kind": "Python source" if component in code else "an instruction",
                "head_text": head[component],
                "children": self._shown_children(component, concerned),
                "commits": self._shown_commits(component, commits),
            }
            jobs.append(_Job(inputs, {child.number for child in concerned}, component in code))
        return jobs

    def _shown_children(self, component: str, children: Sequence[Any]) -> str:
        ranked = sorted(children, key=lambda child: (-_gain(child), child.number))
        shown = [self._shown_child(component, child) for child in ranked[: self.max_children]]
        rest = ranked[self.max_children :]
        if rest:
            numbers = ", ".join(str(child.number) for child in rest[:NAMED]) + (", ..." if len(rest) > NAMED else "")
            shown.append(f"({len(rest)} more children are not shown: {numbers}. Leave them out of the verdicts.)")
        return "\n\n".join(shown)

    def _shown_child(self, component: str, child: Any) -> str:
        after = "not screened" if child.score_after is None else f"{child.score_after:.3f}"
        lines = [f"### Child {child.number}", f"Score of its parent {child.score_before:.3f}, of the child {after}."]
        lines += ["What it changed:", self._cut(changed_lines(child.parent_texts[component], child.texts[component]))]
        if child.feedback:
            lines += ["Feedback on its parent:", self._cut("\n".join(f"- {text}" for text in child.feedback))]
        return "\n".join(lines)

    def _shown_commits(self, component: str, commits: Sequence[Any]) -> str:
        mine = [commit for commit in commits if component in commit.texts]
        ranked = sorted(mine, key=lambda commit: -abs(commit.score_change))
        shown = [
            f"Score {commit.score_change:+.3f}:\n"
            + self._cut(changed_lines(commit.parent_texts[component], commit.texts[component]))
            for commit in ranked[: self.max_commits]
        ]
        if len(ranked) > self.max_commits:
            shown.append(f"({len(ranked) - self.max_commits} more, which changed the score less.)")
        return "\n\n".join(shown) or "None."

    def _cut(self, text: str) -> str:
        rest = len(text) - self.max_characters
        return text if rest <= 0 else f"{text[: self.max_characters]}\n({rest} more characters.)"

    def _one(self, job: _Job) -> _Answer:
        answer = _Answer(job.inputs["component"])
        for attempt in range(ATTEMPTS):
            try:
                reply: Any = self.integrate(**job.inputs, **again(attempt))
            except LMError:
                raise
            except Exception as error:
                reply = error
            if (answer := _read(job, reply)).text is not None:
                break
        return answer

    async def _aone(self, job: _Job) -> _Answer:
        answer = _Answer(job.inputs["component"])
        for attempt in range(ATTEMPTS):
            try:
                reply: Any = await self.integrate.acall(**job.inputs, **again(attempt))
            except LMError:
                raise
            except Exception as error:
                reply = error
            if (answer := _read(job, reply)).text is not None:
                break
        return answer


@dataclass(frozen=True)
class _Job:
    """One call for one component: its inputs, the numbers of the children that change it, and whether it is code."""

    inputs: dict[str, str]
    numbers: set[int]
    is_code: bool


@dataclass(frozen=True)
class _Answer:
    """What became of a component: its text and verdicts, or why the last reply could not be read."""

    component: str
    text: str | None = None
    verdicts: tuple[ChildVerdict, ...] = ()
    problem: str = ""


def changed_lines(before: str, after: str) -> str:
    """The lines that were taken out and put in, marked by - and +; the whole text when that is no longer.

    >>> print(changed_lines("a\\nb", "a\\nc"))
    - b
    + c
    """
    old, new = before.splitlines(), after.splitlines()
    lines: list[str] = []
    for kind, start, end, new_start, new_end in difflib.SequenceMatcher(None, old, new).get_opcodes():
        if kind != "equal":
            lines += [f"- {line}" for line in old[start:end]] + [f"+ {line}" for line in new[new_start:new_end]]
    return "\n".join(lines) or "(nothing)"


def _gain(child: Any) -> float:
    """How much a child is known to bring; an unscreened one may bring what its parent lacks."""
    return (1 - child.score_before) if child.score_after is None else child.score_after - child.score_before


def again(attempt: int) -> dict[str, Any]:
    """A second attempt must not be answered from dspy's cache."""
    return {"config": {"rollout_id": attempt}} if attempt else {}


_PLAIN = re.compile(
    r"child\W{0,4}(\d{1,9})\W{1,8}(?:(?:is|verdict)\W{1,6})?(orthogonal|subsumed|conflicting)\b[ \t]*[-:,.]?([^\n]*)",
    re.IGNORECASE,
)
_TEXT_FIELD = re.compile(r"\[\[\s*##\s*new_text\s*##\s*\]\](.*?)(?=\[\[\s*##|\Z)", re.DOTALL)
_TEXT_TAG = re.compile(r"<new_text>(.*?)</new_text>", re.DOTALL)
_FENCED = re.compile(r"\A\s*```[\w-]*\n(.*?)\n?```\s*\Z", re.DOTALL)
_FENCES = re.compile(r"```[\w-]*\n(.*?)\n```", re.DOTALL)


def _read(job: _Job, reply: Any) -> _Answer:
    """A reply as an answer. The new text decides; verdicts are a bonus, as far as they can be read."""
    component, is_error = job.inputs["component"], isinstance(reply, Exception)
    said, verdicts = _found_in(reply) if is_error else (str(reply.new_text or ""), _listed(reply.verdicts))
    text = _FENCED.sub(lambda found: found[1], said).strip()
    try:
        if not text or text == "{new_text}":
            raise reply if is_error else ValueError("the new text is empty")
        if job.is_code:
            text = _source(text)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        logger.info("An integration's reply could not be read: %s", problem)
        return _Answer(component, problem=problem[:300])
    return _Answer(component, text, tuple(one for number, one in verdicts.items() if number in job.numbers))


def _listed(verdicts: Any) -> dict[int, ChildVerdict]:
    """Child's number -> its verdict; of several for one child the last counts."""
    listed: list[Any] = list(verdicts) if isinstance(verdicts, list | tuple) else [verdicts]
    return {one.child: one for one in listed if isinstance(one, ChildVerdict)}


def _found_in(error: Any) -> tuple[str, dict[int, ChildVerdict]]:
    """The text, and verdicts in plain lines ("Child 1: orthogonal"), of a reply that dspy's adapter could not read.

    Small models leave the verdicts out, write them in a form of their own, or write some. Of several verdicts for one
    child the first counts.
    """
    reply = getattr(error, "lm_response", None)
    if not isinstance(reply, str):
        return "", {}
    fields = _TEXT_FIELD.findall(reply) or _TEXT_TAG.findall(reply) or [_json_field(reply)]
    text: str = fields[-1]
    verdicts: dict[int, ChildVerdict] = {}
    for number, word, reason in _PLAIN.findall(reply.replace(text, "")):
        verdict: Any = word.lower()
        verdicts.setdefault(int(number), ChildVerdict(child=int(number), verdict=verdict, reason=reason.strip()[:300]))
    return text, verdicts


def _json_field(reply: str) -> str:
    """The text of a reply that is a JSON object, whatever stands around it; empty where there is none."""
    start = reply.find("{")
    try:
        found: Any = json.JSONDecoder(strict=False).raw_decode(reply, start)[0] if start >= 0 else None
    except (ValueError, RecursionError):
        return ""
    text = found.get("new_text") if isinstance(found, dict) else None
    return text if isinstance(text, str) else ""


def _source(text: str) -> str:
    """Python source: the text, or the one block in it that is fenced.

    Raises:
        SyntaxError: neither is Python.
    """
    blocks: list[str] = _FENCES.findall(text)
    try:
        ast.parse(text)
    except SyntaxError:
        if len(blocks) != 1:
            raise
        ast.parse(blocks[0])
        return blocks[0]
    return text


def _gathered(answers: Sequence[_Answer]) -> dspy.Prediction:
    return dspy.Prediction(
        texts={one.component: one.text for one in answers if one.text is not None},
        verdicts=[verdict for one in answers for verdict in one.verdicts],
        failed={one.component: one.problem for one in answers if one.text is None},
    )


Records = Sequence[Mapping[str, Any]]


class CombeeReflection:
    """Combee: reflects on groups of records side by side, and integrates what they propose.

    An instruction proposer for ``dspy.GEPA`` and ``AsyncGEPA``. It is synchronous: a step reflects on one large
    minibatch. Source: Combee's map and reduce over about sqrt(n) groups with shuffled copies of the records, as
    FlashEvolve (arXiv 2605.08520) compares itself with.

    Pass it as ``instruction_proposer`` together with ``reflection_minibatch_size=n``.

    Args:
        copies: how often each record is dealt, in shuffled order.
        groups: reflections a component; None for about sqrt(n).
        reduce: integrates the proposals; default :class:`StaleCandidateReflection`.
        seed: of the shuffling.

    Raises:
        ValueError: copies or groups under 1.
    """

    def __init__(
        self, copies: int = 2, groups: int | None = None, reduce: dspy.Module | None = None, seed: int = 0
    ) -> None:
        if copies < 1 or (groups is not None and groups < 1):
            raise ValueError(f"CombeeReflection: copies={copies} and groups={groups}, expected at least 1 of each.")
        self.copies = copies
        self.groups = groups
        self.map = dspy.Predict(ProposeInstruction)
        self.reduce = reduce or StaleCandidateReflection()
        self._rng = random.Random(seed)

    def __call__(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Records],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """A new instruction for each component, from threads; dspy's ``ProposalFn``."""
        texts: dict[str, str] = {}
        for name in self._known(candidate, reflective_dataset, components_to_update):
            text, groups = candidate[name], self._deal(list(reflective_dataset[name]))
            with ThreadPoolExecutor(len(groups)) as threads:
                maps = [partial(self.map, current_instruction=text, examples_with_feedback=group) for group in groups]
                jobs = [threads.submit(copy_context().run, one) for one in maps]
                proposals = [str(job.result().new_instruction) for job in jobs]
            answer = self.reduce(**_integration(candidate, name, proposals))
            texts[name] = _text(answer, name, proposals)
        return texts

    async def acall(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Records],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """As :meth:`__call__`, awaitable."""
        texts: dict[str, str] = {}
        for name in self._known(candidate, reflective_dataset, components_to_update):
            text, groups = candidate[name], self._deal(list(reflective_dataset[name]))
            maps = [self.map.acall(current_instruction=text, examples_with_feedback=group) for group in groups]
            proposals = [str(one.new_instruction) for one in await asyncio.gather(*maps)]
            answer = await self.reduce.acall(**_integration(candidate, name, proposals))
            texts[name] = _text(answer, name, proposals)
        return texts

    @staticmethod
    def _known(candidate: dict[str, str], dataset: Mapping[str, Records], components: list[str]) -> list[str]:
        return [name for name in components if name in candidate and dataset.get(name)]

    def _deal(self, records: list[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
        """The records, and shuffled copies of them, over the groups in turn."""
        dealt = [dict(record) for _ in range(self.copies) for record in self._rng.sample(records, len(records))]
        size = self.groups or max(1, round(math.sqrt(len(records))))
        return [group for group in (dealt[start::size] for start in range(size)) if group]


def _integration(candidate: dict[str, str], name: str, proposals: Sequence[str]) -> dict[str, Any]:
    children = [
        StaleChild(number, {name: text}, {name: candidate[name]}, score_before=0.0)
        for number, text in enumerate(proposals, start=1)
    ]
    return {"head": dict(candidate), "children": children}


def _text(answer: Any, name: str, proposals: Sequence[str]) -> str:
    """The reduced text; the first proposal where the reduction could not be read."""
    return str(answer.texts.get(name) or proposals[0])
