"""StaleCandidateReflection: one language model call a component that integrates stale children into the head.

Source: FlashEvolve (arXiv 2605.08520) section 3.2, reflective repair; several children at once are this project's.
"""

from __future__ import annotations

import ast
import asyncio
import difflib
import logging
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Literal

import dspy
from dspy.clients.errors import LMError
from pydantic import BaseModel, Field

logger = logging.getLogger(__name__)

NAMED = 50
"""Children that are not shown are named up to here."""
ATTEMPTS = 2
"""A reply that cannot be read is asked for once more."""


class ChildVerdict(BaseModel):
    """How one child stands to the head and to the other children."""

    child: int = Field(description="The child's number.")
    verdict: Literal["orthogonal", "subsumed", "conflicting"] = Field(
        description="orthogonal: its change is new and fits, so it is in new_text. subsumed: the head or another child "
        "already has it. conflicting: it contradicts the head or another child, so it is left out."
    )
    reason: str = Field(default="", description="One sentence.")


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
        bounds = {"max_children": max_children, "max_commits": max_commits, "max_characters": max_characters}
        for name, value in bounds.items():
            if value < 1:
                raise ValueError(f"StaleCandidateReflection: {name} is {value}, expected at least 1.")
        self.max_children = max_children
        self.max_commits = max_commits
        self.max_characters = max_characters
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
            children: records with the fields of ``engine.integration.StaleChild``.
            commits: records with the fields of ``engine.integration.PastCommit``.
            code_components: components that hold Python source (``dspy.Flex``).

        Returns:
            ``texts``: component -> new text, for those that changed; ``verdicts``: list of :class:`ChildVerdict`, one a
            child and component; ``failed``: component -> why no reply of two could be read.
        """
        return _gathered([self._one(*job) for job in self._jobs(head, children, commits, code_components)])

    async def aforward(
        self,
        head: dict[str, str],
        children: Sequence[Any],
        commits: Sequence[Any] = (),
        code_components: Sequence[str] = (),
    ) -> dspy.Prediction:
        """The awaitable twin of :meth:`forward`; components are integrated side by side."""
        jobs = self._jobs(head, children, commits, code_components)
        return _gathered(await asyncio.gather(*(self._aone(*job) for job in jobs)))

    def _jobs(
        self, head: dict[str, str], children: Sequence[Any], commits: Sequence[Any], code: Sequence[str]
    ) -> list[tuple[dict[str, str], set[int], bool]]:
        """The inputs of one call a changed component, the children it concerns, and whether the text is code."""
        jobs: list[tuple[dict[str, str], set[int], bool]] = []
        for component in dict.fromkeys(name for child in children for name in child.texts):
            concerned = [child for child in children if component in child.texts]
            inputs = {
                "component": component,
                "kind": "Python source" if component in code else "an instruction",
                "head_text": head[component],
                "children": self._shown_children(component, concerned),
                "commits": self._shown_commits(component, commits),
            }
            jobs.append((inputs, {child.number for child in concerned}, component in code))
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
        lines += ["What it changed:", self._cut(changes(child.parent_texts[component], child.texts[component]))]
        if child.feedback:
            lines += ["Feedback on its parent:", self._cut("\n".join(f"- {text}" for text in child.feedback))]
        return "\n".join(lines)

    def _shown_commits(self, component: str, commits: Sequence[Any]) -> str:
        mine = [commit for commit in commits if component in commit.texts]
        ranked = sorted(mine, key=lambda commit: -abs(commit.score_change))
        shown = [
            f"Score {commit.score_change:+.3f}:\n"
            + self._cut(changes(commit.parent_texts[component], commit.texts[component]))
            for commit in ranked[: self.max_commits]
        ]
        if len(ranked) > self.max_commits:
            shown.append(f"({len(ranked) - self.max_commits} more, which changed the score less.)")
        return "\n\n".join(shown) or "None."

    def _cut(self, text: str) -> str:
        if len(text) <= self.max_characters:
            return text
        return f"{text[: self.max_characters]}\n({len(text) - self.max_characters} more characters.)"

    def _one(self, inputs: dict[str, str], numbers: set[int], code: bool) -> _Answer:
        problem = ""
        for attempt in range(ATTEMPTS):
            try:
                return _read(self.integrate(**inputs, **_again(attempt)), inputs, numbers, code)
            except LMError:
                raise
            except Exception as error:
                problem = _problem(error)
                if (salvaged := _salvaged(error, inputs, numbers, code)) is not None:
                    return salvaged
        return _Answer(inputs["component"], problem=problem)

    async def _aone(self, inputs: dict[str, str], numbers: set[int], code: bool) -> _Answer:
        problem = ""
        for attempt in range(ATTEMPTS):
            try:
                return _read(await self.integrate.acall(**inputs, **_again(attempt)), inputs, numbers, code)
            except LMError:
                raise
            except Exception as error:
                problem = _problem(error)
                if (salvaged := _salvaged(error, inputs, numbers, code)) is not None:
                    return salvaged
        return _Answer(inputs["component"], problem=problem)


class _Answer:
    """What one component's call gave."""

    def __init__(
        self, component: str, text: str | None = None, verdicts: list[ChildVerdict] | None = None, problem: str = ""
    ) -> None:
        self.component = component
        self.text = text
        self.verdicts = verdicts or []
        self.problem = problem


def changes(before: str, after: str) -> str:
    """The lines that were taken out and put in, marked by - and +; the whole text when that is no longer.

    >>> print(changes("a\\nb", "a\\nc"))
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


def _again(attempt: int) -> dict[str, Any]:
    """A second attempt must not be answered from dspy's cache."""
    return {"config": {"rollout_id": attempt}} if attempt else {}


def _problem(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    logger.info("An integration's reply could not be read: %s", text)
    return text[:300]


def _read(prediction: Any, inputs: dict[str, str], numbers: set[int], code: bool) -> _Answer:
    text = _unfenced(str(prediction.new_text or "")).strip()
    if not text:
        raise ValueError("the new text is empty")
    if code:
        ast.parse(text)
    verdicts = [one for one in prediction.verdicts or [] if one.child in numbers]
    return _Answer(inputs["component"], text, list({one.child: one for one in verdicts}.values()))


_PLAIN = re.compile(
    r"child\W{0,4}(\d{1,9})\W{1,8}(?:is\s+)?(orthogonal|subsumed|conflicting)\b[ \t]*[-:,.]?([^\n]*)", re.IGNORECASE
)


def _salvaged(error: Exception, inputs: dict[str, str], numbers: set[int], code: bool) -> _Answer | None:
    """What a reply says whose verdicts are plain lines ("Child 1: orthogonal") instead of JSON, as small models write.

    Of several verdicts for one child the first counts. None where there is no verdict or no text.
    """
    reply = getattr(error, "lm_response", None)
    if not isinstance(reply, str):
        return None
    head, marker, text = reply.rpartition("[[ ## new_text ## ]]")
    text = text.partition("[[ ##")[0]
    found: dict[int, ChildVerdict] = {}
    for number, word, reason in _PLAIN.findall(head):
        verdict: Any = word.lower()
        found.setdefault(int(number), ChildVerdict(child=int(number), verdict=verdict, reason=reason.strip()[:300]))
    if not marker or not numbers & found.keys():
        return None
    try:
        return _read(SimpleNamespace(new_text=text, verdicts=list(found.values())), inputs, numbers, code)
    except (ValueError, SyntaxError):
        return None


def _unfenced(text: str) -> str:
    found = re.fullmatch(r"\s*```[\w-]*\n(.*?)\n?```\s*", text, flags=re.DOTALL)
    return found[1] if found else text


def _gathered(answers: Sequence[_Answer]) -> dspy.Prediction:
    return dspy.Prediction(
        texts={one.component: one.text for one in answers if one.text is not None},
        verdicts=[verdict for one in answers for verdict in one.verdicts],
        failed={one.component: one.problem for one in answers if one.text is None},
    )
