"""The simulated model: it obeys and reflects, and the replies that follow from that.

The task is "house rules": an instruction may hold sentences such as `Rule 07: mention the word "amber".`
(a keyword constraint, as in IFEval, Zhou et al., arXiv 2311.07911), and a reply obeys each of them with a known
probability. A reflection prompt yields the current instruction with some of the rules that the feedback says were
missed, and sometimes with less than before. So prompts improve step by step towards a known optimum. Models that
imitate how real ones fall short are in the repository's `benchmarks/models`.

Every random choice is a hash of (seed, content, what is decided), so that replies do not depend on the order of the
requests. Equal requests get equal replies, unless the model resamples (`Repeats`).
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dspy_flashevolve.sim.backend import Profile
from dspy_flashevolve.sim.prompts import ChatRequest, OutputField
from dspy_flashevolve.sim.words import (
    FILLER_CLOSING,
    FILLER_OPENING,
    FILLER_SENTENCES,
    USELESS_SENTENCES,
    Choices,
    Rule,
    instructed_words,
    rules_in,
    useless_sentences,
    without_rules,
)


@dataclass(frozen=True)
class ReplyModel:
    """How well the simulated model obeys and reflects. A subclass may fall short in more ways.

    Attributes:
        obedience: Probability that a reply follows a rule of its instruction, drawn for each rule and request.
        rules_added: The most rules that one reflection adds, equally likely from 1 to this many; `None` for all that
            the feedback names.
        forgets: Probability that a reflection, or an integration, drops one of the rules it had.
        useless: Share of the reflections that add no rule, only a sentence that does nothing.
        resamples: True when a request that comes again is answered anew, as at a temperature above 0; else equal
            requests get equal replies.

    Raises:
        ValueError: If a probability is outside [0, 1], or `rules_added` is below 1.
    """

    obedience: float = 0.9
    rules_added: int | None = 2
    forgets: float = 0.1
    useless: float = 0.15
    resamples: bool = False

    def __post_init__(self) -> None:
        for name in ("obedience", "forgets", "useless"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)!r}")
        if self.rules_added is not None and self.rules_added < 1:
            raise ValueError(f"rules_added must be at least 1 or None, got {self.rules_added!r}")

    def obeyed(self, instruction: str) -> dict[str, float]:
        """Return, for each word of an instruction in order, the probability that a reply to it holds the word."""
        return dict.fromkeys(instructed_words(instruction), self.obedience)

    def feedback(self, missed: Sequence[Rule], choices: Choices) -> str:
        """Return the metric's feedback on the rules that an answer missed."""
        return " ".join(["Missed:", *map(str, missed)]) if missed else "All rules were kept."

    def sentence(self, choices: Choices) -> str | None:
        """Return the sentence that a reflection writes instead of rules; None where it writes rules."""
        return useless_sentence(choices) if choices.uniform("useless") < self.useless else None

    def sentences(self, text: str) -> list[str]:
        """Return the sentences of a text that reflections write instead of rules."""
        return useless_sentences(text)

    def read(self, named: Sequence[Rule], choices: Choices) -> list[Rule]:
        """Return the rules that a reflection writes, of those that its feedback names."""
        rules = sorted(named, key=lambda rule: choices.uniform(f"add {rule.word}"))
        return rules if self.rules_added is None else rules[: 1 + choices.index("how many", self.rules_added)]

    def write(self, request: ChatRequest, choices: Choices, seed: int) -> str:
        """Return the text of the reply to a request, with its random choices; `seed` is the server's."""
        inputs, names = request.inputs, [field.name for field in request.output_fields]
        if request.kind == "integration":
            verdicts, text = self.integrate(inputs["head_text"], inputs["children"], choices)
            return written(request, integration_values(request, verdicts, text))
        if request.kind == "consolidation":
            return self.format(request, self.consolidated(inputs["instruction"], choices))
        if request.kind == "reflection":
            current, feedback = inputs["current_instruction"], inputs["examples_with_feedback"]
            if "edits" in names:
                return written_edits(request, self.edits(numbered_parts(current), feedback, choices))
            return self.format(request, self.new_instruction(current, feedback, choices))
        return self.format(request, self.answer(request.instruction, choices))

    def own_tokens(self, request: ChatRequest, text: str) -> int | None:
        """Return the length of a reply; None where the profile's law gives it, whatever the text."""
        return None

    def is_quick(self, request: ChatRequest) -> bool:
        """Return whether a reply is as short as those to a task."""
        return request.kind in ("task", "other")

    def format(self, request: ChatRequest, body: str) -> str:
        """Return a body in the format that the request asks for; unknown prompts get it plain."""
        if not request.output_fields:
            return json.dumps({"reply": body}) if request.json_reply else body
        return written(request, self.values(request, body))

    def values(self, request: ChatRequest, body: str) -> dict[str, object]:
        """Return the output fields of a reply whose text is a body."""
        return {field.name: _value(field, body) for field in request.output_fields}

    def answer(self, instruction: str, choices: Choices) -> str:
        """Return a task reply: filler sentences around those instructed words that the model obeys this time."""
        likely = self.obeyed(instruction).items()
        obeyed = [word for word, share in likely if choices.uniform(f"obey {word}") < share]
        sentences = [FILLER_SENTENCES[i % len(FILLER_SENTENCES)].format(word=word) for i, word in enumerate(obeyed)]
        return " ".join([FILLER_OPENING, *sentences, FILLER_CLOSING])

    def new_instruction(self, current: str, feedback: str, choices: Choices) -> str:
        """Return a reflection's instruction: the current one with rules that the text of the feedback names."""
        rules, base = rules_in(current), without_rules(current)
        learnt = self.learnt(current, feedback, choices)
        added = rules_in("\n".join(learnt))
        if not added and learnt[0] not in base:
            base = f"{base}\n{learnt[0]}"
        self._forget_one(rules, choices)
        return "\n".join([base, *map(str, sorted([*rules, *added]))]).strip()

    def learnt(self, current: str, feedback: str, choices: Choices) -> list[str]:
        """Return what a reflection adds: rules that the feedback names and the instruction lacks, or a sentence."""
        words = {rule.word for rule in rules_in(current)}
        missed = [rule for rule in rules_in(feedback) if rule.word not in words]
        sentence = self.sentence(choices)
        added = [] if sentence else self.read(missed, choices)
        return list(map(str, added)) or [sentence or useless_sentence(choices)]

    def edits(self, parts: Sequence[str], feedback: str, choices: Choices) -> list[object]:
        """Return what a reflection would change, as edits of an instruction's numbered parts."""
        after = self.new_instruction("\n".join(parts), feedback, choices).splitlines()
        lines = [line for part in parts for line in part.splitlines()]
        removed = [
            number for number, part in enumerate(parts, 1) if not all(line in after for line in part.splitlines())
        ]
        return [
            *(edit("remove", number, reason="not needed") for number in removed),
            *(edit("add", len(parts), line, "the feedback says so") for line in after if line not in lines),
        ]

    def consolidated(self, text: str, choices: Choices) -> str:
        """Return an instruction written anew: an integration of no children."""
        return self.integrate(text, "", choices)[1]

    def integrate(self, head: str, children: str, choices: Choices) -> tuple[list[dict[str, object]], str]:
        """Return a verdict for each child, whose changes `StaleCandidateReflection` shows, and the new text: the head
        with the rules and sentences that the children add."""
        rules = rules_in(head)
        words, held = {rule.word for rule in rules}, set(self.sentences(head))
        added: list[Rule] = []
        sentences: list[str] = []
        verdicts: list[dict[str, object]] = []
        marks = list(_CHILD.finditer(children))
        for mark, end in zip(marks, [*(mark.start() for mark in marks[1:]), len(children)], strict=False):
            lines = children[mark.end() : end].splitlines()
            put_in = "\n".join(line[2:] for line in lines if line.startswith("+ "))
            fresh = [rule for rule in rules_in(put_in) if rule.word not in words]
            copied = [sentence for sentence in self.sentences(put_in) if sentence not in held]
            verdict = "orthogonal" if fresh or copied else "subsumed"
            verdicts.append({"child": int(mark[1]), "verdict": verdict, "reason": f"Adds {len(fresh)} rules."})
            added += fresh
            sentences += copied
            words |= {rule.word for rule in fresh}
            held.update(copied)
        self._forget_one(rules, choices)
        return verdicts, self.merged(head, rules, added, sentences, choices)

    def merged(self, head: str, rules: list[Rule], added: list[Rule], sentences: list[str], choices: Choices) -> str:
        """Return a head after an integration: `rules` are its own that stay, `added` and `sentences` the children's."""
        return "\n".join([without_rules(head), *sentences, *map(str, sorted([*rules, *added]))]).strip()

    def _forget_one(self, rules: list[Rule], choices: Choices) -> None:
        if rules and choices.uniform("forget") < self.forgets:
            del rules[choices.index("forget which", len(rules))]


def useless_sentence(choices: Choices) -> str:
    """Return a sentence that has no effect on answers."""
    return USELESS_SENTENCES[choices.index("useless which", len(USELESS_SENTENCES))]


_CHILD = re.compile(r"^### Child (\d{1,9})$", re.MULTILINE)
_NUMBERED = re.compile(r"^\[\d{1,4}\] ?", re.MULTILINE)


def numbered_parts(current: str) -> list[str]:
    """Return the parts of an instruction that is shown with their numbers."""
    return [_NUMBERED.sub("", part) for part in re.split(r"\n(?=\[\d{1,4}\] )", current)]


def edit(action: str, part: int, text: str = "", reason: str = "") -> dict[str, object]:
    """Return an edit of a numbered part, as `EditInstruction` asks for."""
    return {"action": action, "part": part, "text": text, "reason": reason}


def written_edits(request: ChatRequest, edits: Sequence[object]) -> str:
    """Return the reply that holds edits."""
    return json.dumps({"edits": edits}) if request.json_reply else written(request, {"edits": edits})


def integration_values(request: ChatRequest, verdicts: object, text: str) -> dict[str, object]:
    """Return the fields of the reply to a request to integrate; verdicts of None are left out."""
    values: dict[str, object] = {}
    for field in request.output_fields:
        is_list = field.type_name.strip().startswith("list")
        value = verdicts if is_list else FILLER_OPENING if field.name == "reasoning" else text
        if value is not None:
            values[field.name] = value
    return values


def written(request: ChatRequest, values: Mapping[str, object]) -> str:
    """Return a reply with these output fields, in the format that the request asks for."""
    if request.json_reply:
        return json.dumps(values, indent=2)
    sections = [f"[[ ## {name} ## ]]\n{_chat_text(value)}" for name, value in values.items()]
    return "\n\n".join([*sections, "[[ ## completed ## ]]"])


def _chat_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _value(field: OutputField, body: str) -> object:
    """Return a value of the field's type: the body for text (filler for a chain of thought), else a plain default."""
    if field.name == "reasoning":
        return FILLER_OPENING
    type_name = field.type_name.strip()
    if type_name.startswith("Literal["):
        return _first_literal(type_name)
    defaults: dict[str, object] = {"bool": True, "int": 0, "float": 0.0, "list": [], "dict": {}, "None": None}
    defaults |= {"set": [], "tuple": []}
    return next((default for prefix, default in defaults.items() if type_name.startswith(prefix)), body)


def _first_literal(type_name: str) -> object:
    try:
        options = ast.literal_eval(f"[{type_name[len('Literal[') : -1]}]")
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ""
    first = options[0] if options else ""
    return first if isinstance(first, str | int | bool) or first is None else ""


@dataclass(frozen=True)
class Reply:
    """A reply, with the length that the profile's law or the model (`ReplyModel.own_tokens`) gives it, whatever that of
    `text`; its end is "length" when a limit cut that length, and `text` is whole either way."""

    text: str
    completion_tokens: int
    finish_reason: Literal["stop", "length"]


def reply_to(request: ChatRequest, profile: Profile, model: ReplyModel, seed: int, repeat: int = 0) -> Reply:
    """Return the model's reply to a request, which came `repeat` times before; that counts where it resamples."""
    if repeat and model.resamples:
        request = replace(request, content=f"{repeat} {request.content}")
    choices = Choices(seed, request.content)
    law = profile.task_length if model.is_quick(request) else profile.reflection_length
    text = model.write(request, choices, seed)
    tokens = model.own_tokens(request, text) or law.tokens(choices.uniform("length"))
    limit = min(request.max_tokens or profile.max_output_tokens, profile.max_output_tokens)
    return Reply(
        text=text,
        completion_tokens=min(tokens, limit),
        finish_reason="length" if tokens > limit else "stop",
    )


class Repeats:
    """Counts how often each request has come."""

    def __init__(self) -> None:
        self._seen: Counter[bytes] = Counter()

    def count(self, request: ChatRequest) -> int:
        """Count a request, and return how often the same one came before."""
        content = hashlib.blake2b(request.content.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        self._seen[content] += 1
        return self._seen[content] - 1
