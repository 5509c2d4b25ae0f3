"""What the simulated model answers: a pure function of the request's content and the server's seed.

The task is "house rules": an instruction may hold sentences such as `Rule 07: mention the word "amber".`
(a keyword constraint, as in IFEval, Zhou et al., arXiv 2311.07911), and a reply obeys each of them with a known
probability. A reflection prompt yields the current instruction with some of the rules that the feedback says were
missed, and sometimes with less than before. So prompts improve step by step towards a known optimum.

Every random choice is a hash of (seed, content, what is decided): equal requests get equal replies in any order.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dspy_flashevolve.sim.profiles import Profile
from dspy_flashevolve.sim.prompts import ChatRequest, OutputField
from dspy_flashevolve.sim.words import (
    FILLER_CLOSING,
    FILLER_OPENING,
    FILLER_SENTENCES,
    Rule,
    instructed_words,
    rules_in,
    without_rules,
)

_USELESS_ADDITIONS = (
    "Read the question with care before you start.",
    "Keep the tone friendly and clear.",
    "Check the reply once more at the end.",
    "Prefer short sentences.",
)


@dataclass(frozen=True)
class ReplyModel:
    """How well the simulated model obeys and how well it reflects. All probabilities are between 0 and 1.

    Attributes:
        obedience: Probability that a reply follows a rule of its instruction, drawn for each rule and request.
        crowding: How obedience falls with the number of rules n in an instruction: it is multiplied by
            exp(-crowding * n). 0 means never.
        rules_added: The most rules that one reflection adds; it adds 1 to this many, equally likely.
        forgets: Probability that a reflection drops one of the rules it had.
        useless: Probability that a reflection adds no rule, only a general sentence.

    Raises:
        ValueError: If a probability is outside [0, 1], `crowding` is negative or `rules_added` is below 1.

    Example:
        >>> ReplyModel().obedience_with(24)
        0.9
        >>> round(ReplyModel(crowding=0.01).obedience_with(24), 3)
        0.708
    """

    obedience: float = 0.9
    crowding: float = 0.0
    rules_added: int = 2
    forgets: float = 0.1
    useless: float = 0.15

    def __post_init__(self) -> None:
        for name in ("obedience", "forgets", "useless"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)!r}")
        if not self.crowding >= 0:
            raise ValueError(f"crowding must not be negative, got {self.crowding!r}")
        if self.rules_added < 1:
            raise ValueError(f"rules_added must be at least 1, got {self.rules_added!r}")

    def obedience_with(self, rules: int) -> float:
        """Probability that a rule is followed when the instruction holds `rules` rules."""
        return self.obedience * math.exp(-self.crowding * rules)


@dataclass(frozen=True)
class Reply:
    """A reply and what it costs.

    Attributes:
        text: The message's content.
        completion_tokens: Its simulated length, from the profile's law; not the length of `text`.
        finish_reason: "length" when a limit cut the simulated length, else "stop"; `text` is whole either way.
    """

    text: str
    completion_tokens: int
    finish_reason: Literal["stop", "length"]


class Choices:
    """Random choices that depend on a seed, a content and the name of the choice only.

    Example:
        >>> Choices(0, "abc").uniform("x") == Choices(0, "abc").uniform("x")
        True
    """

    def __init__(self, seed: int, content: str) -> None:
        text = f"{seed}\0{content}".encode("utf-8", "surrogatepass")
        self._state = hashlib.blake2b(text, digest_size=16).digest()

    def uniform(self, name: str) -> float:
        """A number strictly between 0 and 1."""
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), key=self._state, digest_size=8).digest()
        # 52 bits and a half fit a float's 53 exactly, so that 0 and 1 cannot come out by rounding.
        return ((int.from_bytes(digest, "big") >> 12) + 0.5) / 2.0**52

    def index(self, name: str, size: int) -> int:
        """A whole number from 0 to size - 1; `size` is at least 1."""
        return min(size - 1, int(self.uniform(name) * size))


def reply_to(request: ChatRequest, profile: Profile, model: ReplyModel, seed: int) -> Reply:
    """The simulated model's reply.

    Args:
        request: What `parse_chat_request` read.
        profile: Gives the law of the output lengths.
        model: How well the simulated model obeys and reflects.
        seed: The server's seed.
    """
    choices = Choices(seed, request.content)
    law = profile.reflection_length if request.kind == "reflection" else profile.task_length
    wanted = law.tokens(choices.uniform("length"))
    limit = min(request.max_tokens or profile.max_output_tokens, profile.max_output_tokens)
    return Reply(
        text=_format(request, _body(request, model, choices)),
        completion_tokens=min(wanted, limit),
        finish_reason="length" if wanted > limit else "stop",
    )


def _body(request: ChatRequest, model: ReplyModel, choices: Choices) -> str:
    if request.kind == "reflection":
        inputs = request.inputs
        return new_instruction(inputs["current_instruction"], inputs["examples_with_feedback"], model, choices)
    return answer(request.instruction, model, choices)


def answer(instruction: str, model: ReplyModel, choices: Choices) -> str:
    """A task reply: filler sentences around those instructed words that the model obeys this time."""
    words = instructed_words(instruction)
    obedience = model.obedience_with(len(words))
    obeyed = [word for word in words if choices.uniform(f"obey {word}") < obedience]
    sentences = [FILLER_SENTENCES[i % len(FILLER_SENTENCES)].format(word=word) for i, word in enumerate(obeyed)]
    return " ".join([FILLER_OPENING, *sentences, FILLER_CLOSING])


def new_instruction(current: str, feedback: str, model: ReplyModel, choices: Choices) -> str:
    """A reflection's instruction: the current one, plus rules that the feedback names, minus what it forgets.

    Args:
        current: The current instruction.
        feedback: The text of the examples with their feedback.
        model: How well the model reflects.
        choices: The random choices of this request.
    """
    rules, base = rules_in(current), without_rules(current)
    known = {rule.word for rule in rules}
    missed = [rule for rule in rules_in(feedback) if rule.word not in known]
    if not missed or choices.uniform("useless") < model.useless:
        base = _with_useless_addition(base, choices)
        added: list[Rule] = []
    else:
        missed.sort(key=lambda rule: choices.uniform(f"add {rule.word}"))
        added = missed[: 1 + choices.index("how many", model.rules_added)]
    if rules and choices.uniform("forget") < model.forgets:
        del rules[choices.index("forget which", len(rules))]
    return "\n".join([base, *map(str, sorted([*rules, *added]))]).strip()


def _with_useless_addition(base: str, choices: Choices) -> str:
    sentence = _USELESS_ADDITIONS[choices.index("useless which", len(_USELESS_ADDITIONS))]
    return base if sentence in base else f"{base}\n{sentence}".strip()


def _format(request: ChatRequest, body: str) -> str:
    """The body in the format that the request asks for; unknown prompts get it plain."""
    if not request.output_fields:
        return json.dumps({"reply": body}) if request.json_reply else body
    values = {field.name: _value(field, body) for field in request.output_fields}
    if request.json_reply:
        return json.dumps(values, indent=2)
    sections = [f"[[ ## {name} ## ]]\n{_chat_text(value)}" for name, value in values.items()]
    return "\n\n".join([*sections, "[[ ## completed ## ]]"])


def _chat_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _value(field: OutputField, body: str) -> object:
    """A value of the field's type: the body for text (but a chain of thought gets filler), else a plain default."""
    if field.name == "reasoning":
        return FILLER_OPENING
    type_name = field.type_name.strip()
    if type_name.startswith("Literal["):
        return _first_literal(type_name)
    defaults: Sequence[tuple[str, object]] = (
        ("bool", True),
        ("int", 0),
        ("float", 0.0),
        ("list", []),
        ("set", []),
        ("tuple", []),
        ("dict", {}),
        ("None", None),
    )
    return next((default for prefix, default in defaults if type_name.startswith(prefix)), body)


def _first_literal(type_name: str) -> object:
    try:
        options = ast.literal_eval(f"[{type_name[len('Literal[') : -1]}]")
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ""
    first = options[0] if options else ""
    return first if isinstance(first, str | int | bool) or first is None else ""
