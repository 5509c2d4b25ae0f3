"""The dspy modules by which an LM writes a whole text anew: repair of a stale child (:class:`StaleCandidateReflection`,
FlashEvolve, arXiv 2605.08520, section 3.2), which gepa/repair.py asks for, and :class:`Consolidation` of a prompt that
has grown by separate edits: gepa/heads.py says when, and of what text."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, get_args

import dspy
from dspy.clients.errors import LMError
from pydantic import BaseModel, Field

from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.modules.reading import ATTEMPTS, asked, past_cache, result_of

logger = logger_named(__name__)

Verdict = Literal["orthogonal", "subsumed", "conflicting"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


class ChildVerdict(BaseModel):
    """How a late child stands to the head."""

    child: int = Field(description="The child's number.")
    verdict: Verdict = Field(
        description="orthogonal: it teaches something new that fits. subsumed: the head teaches it already. "
        "conflicting: its advice contradicts the head's."
    )
    reason: str = Field(default="", description="One sentence.")

    @classmethod
    def in_text(cls, answer: str) -> list[ChildVerdict]:
        """Read verdicts in plain lines, as small models write them: of several for one child the first.

        >>> [verdict.verdict for verdict in ChildVerdict.in_text("Child 1: Orthogonal, it adds a rule")]
        ['orthogonal']
        """
        found: dict[int, ChildVerdict] = {}
        for number, word, reason in _PLAIN.findall(answer):
            verdict: Any = word.lower()
            found.setdefault(int(number), cls(child=int(number), verdict=verdict, reason=reason.strip()[:300]))
        return list(found.values())


_PLAIN = re.compile(
    r"child\W{0,4}(\d{1,9})\W{1,8}(?:(?:is|verdict)\W{1,6})?(orthogonal|subsumed|conflicting)\b[ \t]*[-:,.]?([^\n]*)",
    re.IGNORECASE,
)


class RepairChild(dspy.Signature):
    """While one rewrite of a text of an AI program, the child, was made from an older version, other rewrites were
    committed. Judge what the child has to add to the newest version, the head, and repair it: nothing that it learnt
    may be lost, and nothing that the head says may be undone without evidence.

    Say orthogonal where the child teaches something that the head lacks and that fits it: the new text is the head with
    that lesson worked in. Say subsumed where the head teaches the same, perhaps in other words: leave new_text empty.
    Say conflicting where their advice cannot be followed at once. If you can tell when each of the two holds, the new
    text is the head with that distinction worked in; if you cannot, leave new_text empty.

    Take over principles that transfer to inputs nobody has seen: ways to proceed, distinctions, checks, conventions.
    Do not take over what fits single examples alone: their answers, their names and numbers, or formulas that solve one
    task. Where such a detail stands for something general, write the general rule. Where the text is Python source,
    return the whole source, working, with the same classes, methods and field names."""

    component: str = dspy.InputField(desc="The text's name in the program.")
    kind: str = dspy.InputField(desc="What the text is: an instruction, or Python source.")
    head_text: str = dspy.InputField(desc="The newest version.")
    children: str = dspy.InputField(desc="The rewrite: number, score of its parent, what changed, feedback.")
    commits: str = dspy.InputField(desc="What was committed since the child was begun, and what it brought.")
    verdicts: list[ChildVerdict] = dspy.OutputField(desc="One, for the child.", default=[])
    new_text: str = dspy.OutputField(
        desc="The whole new text, and nothing else; empty where nothing is taken over.", default=""
    )


class StaleCandidateReflection(dspy.Module):
    """Repairs a child that was begun from an older version of a program, for the newest one, the head.

    One LM call a component reads the head, what the child changed, and what was committed meanwhile. It says whether
    the child's change is new, there already, or contradicts the head, and writes the new text.

    Replace it by any module whose ``forward`` (and ``aforward``, if it is to run on the loop) takes the same
    arguments and returns the same fields; optimize it like any other DSPy program.

    Args:
        max_commits: commits that are shown, those that changed the score most first.
        max_characters: of each change that is shown; longer ones are cut.

    Raises:
        ValueError: a bound under 1.
    """

    def __init__(self, max_commits: int = 8, max_characters: int = 4000) -> None:
        super().__init__()
        self.max_commits, self.max_characters = max_commits, max_characters
        for name in ("max_commits", "max_characters"):
            if getattr(self, name) < 1:
                raise ValueError(f"StaleCandidateReflection: {name} is {getattr(self, name)}, expected at least 1.")
        self.integrate = dspy.Predict(RepairChild)

    def forward(
        self,
        head: dict[str, str],
        children: Sequence[Any],
        commits: Sequence[Any] = (),
        code_components: Sequence[str] = (),
    ) -> dspy.Prediction:
        """Take what ``children`` learnt over into ``head``.

        Args:
            head: component -> text of the candidate that the result stands on.
            children: records with the fields of ``engine.staleness.StaleChild``; a run gives one.
            commits: records with the fields of ``engine.staleness.PastCommit``.
            code_components: components that hold Python source (``dspy.Flex``).

        Returns:
            ``texts``: component -> new text, for those that changed; ``verdicts``: list of :class:`ChildVerdict`, one a
            child and component; ``failed``: component -> why no reply of two could be read.
        """
        return result_of(self._repaired(head, children, commits, code_components, is_sync=True))

    async def aforward(
        self,
        head: dict[str, str],
        children: Sequence[Any],
        commits: Sequence[Any] = (),
        code_components: Sequence[str] = (),
    ) -> dspy.Prediction:
        """As :meth:`forward`, awaitable."""
        return await self._repaired(head, children, commits, code_components, is_sync=False)

    async def _repaired(
        self, head: dict[str, str], children: Sequence[Any], commits: Sequence[Any], code: Sequence[str], is_sync: bool
    ) -> dspy.Prediction:
        answer = dspy.Prediction(texts={}, verdicts=[], failed={})
        for component in dict.fromkeys(name for child in children for name in child.texts):
            concerned = [child for child in children if component in child.texts]
            inputs = {
                "component": component,
                "kind": "Python source" if component in code else "an instruction",
                "head_text": head[component],
                "children": "\n\n".join(self._shown_child(component, child) for child in concerned),
                "commits": self._shown_commits(component, commits),
            }
            for attempt in range(ATTEMPTS):
                try:
                    reply = await asked(self.integrate, inputs | past_cache(attempt), is_sync)
                    text, verdicts = _read_reply(reply, {child.number for child in concerned}, component in code)
                except LMError:  # the provider's: the whole module is asked again by the run
                    raise
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
                    logger.info("A reply could not be read: %.1000s", problem)
                    answer.failed[component] = problem[:300]
                else:
                    answer.failed.pop(component, None)
                    answer.texts |= {component: text} if text else {}
                    answer.verdicts += verdicts
                    break
        return answer

    def _shown_child(self, component: str, child: Any) -> str:
        scores = f"Score of its parent {child.score_before:.3f}, of the child not screened."
        lines = [f"### Child {child.number}", scores, "What it changed:"]
        lines += [self._cut(changed_lines(child.parent_texts[component], child.texts[component]))]
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


def changed_lines(before: str, after: str) -> str:
    """Return the lines that were taken out and put in, marked by - and +.

    >>> print(changed_lines("a\\nb", "a\\nc"))
    - b
    + c
    """
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""))[2:]
    return "\n".join(f"{line[0]} {line[1:]}" for line in lines if not line.startswith("@@")) or "(nothing)"


_FENCES = re.compile(r"```[\w-]*\n(.*?)\n```", re.DOTALL)


def _read_reply(reply: Any, numbers: Collection[int], is_code: bool) -> tuple[str, list[ChildVerdict]]:
    """Read the text of a reply, empty where nothing is taken over, and the verdicts on the children with ``numbers``.

    Raises:
        ValueError: there is no text, and no verdict by which there need not be one.
        SyntaxError: it is to be Python, and is not.
    """
    text = str(reply.new_text or "").strip()
    by_child = {verdict.child: verdict for verdict in reply.verdicts if verdict.child in numbers}
    verdicts = list(by_child.values())  # of several for one child the last counts
    if not text and verdicts and all(verdict.verdict != "orthogonal" for verdict in verdicts):
        return "", verdicts
    if not text or text == "{new_text}":
        raise ValueError("the new text is empty, or was cut off")
    return _python_source(text) if is_code else text, verdicts


def _python_source(text: str) -> str:
    """Return the Python source in a text: all of it, or the only block that is fenced.

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


# A prompt that has grown by separate edits, written anew.


class ConsolidateInstruction(dspy.Signature):
    """An assistant performs a task with the instruction below. It has grown by separate edits of many authors, who did
    not see each other's. Write it anew as one clean text that a person would be glad to maintain.

    Say all about one subject in one place, what is typical of it first, and once. Where statements contradict each
    other, keep the one with the larger estimated effect; where nothing is known of that, the more specific one. Where
    two subjects share a sign, let the entry of each say what tells it apart. Keep every other rule and fact, and names,
    labels and formats word for word. Order the text: the task, the form of the answer, then rules and facts, under
    headings where there are many. Keep lists flat, and let each item name what it is about, so that others can edit it
    on its own. Leave out what can only help with one single input, such as the words of one example, that one thing is
    never another with which it is hardly ever confused, and doubts of the authors. Add nothing. Read the result once
    more: no rule may exclude what another one includes, or name what is explained nowhere."""

    evidence: str = dspy.InputField(
        desc="What some edits are estimated to add to the assistant's score, with the standard error; of the others "
        "nothing is known."
    )
    instruction: str = dspy.InputField(desc="The instruction as it has grown.")
    limit: str = dspy.InputField(desc="How long the new text may be.")
    consolidated: str = dspy.OutputField(desc="The whole new instruction, and nothing else.")


Effects = Sequence[tuple[str, float, float]]
"""Of edits in a text: the part that one puts in, its estimated effect on the score, its standard error."""


class Consolidation(dspy.Module):
    """Writes the texts of a candidate anew, one request a component.

    Example:
        >>> Consolidation()(texts={}, effects={}).texts
        {}
    """

    def __init__(self) -> None:
        super().__init__()
        self.consolidate = dspy.Predict(ConsolidateInstruction)

    def forward(self, texts: Mapping[str, str], effects: Mapping[str, Effects]) -> dspy.Prediction:
        """Consolidate texts.

        Args:
            texts: component -> text as it has grown.
            effects: component -> what is known of the edits in it.

        Returns:
            ``texts``: component -> new text; without those whose reply was empty.
        """
        return result_of(self._consolidated(texts, effects, is_sync=True))

    async def aforward(self, texts: Mapping[str, str], effects: Mapping[str, Effects]) -> dspy.Prediction:
        """As :meth:`forward`, awaitable."""
        return await self._consolidated(texts, effects, is_sync=False)

    async def _consolidated(self, texts: Any, effects: Any, is_sync: bool) -> dspy.Prediction:
        clean: dict[str, str] = {}
        for name, text in texts.items():
            if written := (await asked(self.consolidate, inputs(text, effects.get(name, ())), is_sync)).consolidated:
                clean[name] = written
        return dspy.Prediction(texts=clean)


def inputs(text: str, effects: Effects) -> dict[str, str]:
    """Return what the reflection LM reads of one text: the edits in it whose effect exceeds its standard error, the
    largest first (what is not told apart would only repeat the text).

    >>> inputs("- A\\n- B", [("- A", 0.05, 0.02), ("- B", 0.01, 0.02)])["evidence"]
    '+0.050 (0.020): - A'
    """
    rows = sorted((row for row in effects if abs(row[1]) > row[2]), key=lambda row: -row[1])
    evidence = "\n".join(f"{effect:+.3f} ({error:.3f}): {part.strip()}" for part, effect, error in rows)
    return {"evidence": evidence or "None.", "instruction": text, "limit": f"At most {len(text)} characters."}
