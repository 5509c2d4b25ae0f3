"""What the simulated model answers: a pure function of the request's content and the server's seed.

The task is "house rules": an instruction may hold sentences such as `Rule 07: mention the word "amber".`
(a keyword constraint, as in IFEval, Zhou et al., arXiv 2311.07911), and a reply obeys each of them with a known
probability. A reflection prompt yields the current instruction with some of the rules that the feedback says were
missed, and sometimes with less than before. So prompts improve step by step towards a known optimum.

Every random choice is a hash of (seed, content, what is decided): equal requests get equal replies in any order.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dspy_flashevolve.sim.harness_replies import harness_fields, is_tool_call
from dspy_flashevolve.sim.playbook_replies import CITATIONS, citations, curate, reflect
from dspy_flashevolve.sim.profiles import Profile
from dspy_flashevolve.sim.prompts import ChatRequest, OutputField
from dspy_flashevolve.sim.reply_model import Choices, ReplyModel
from dspy_flashevolve.sim.words import (
    FILLER_CLOSING,
    FILLER_OPENING,
    FILLER_SENTENCES,
    USELESS_SENTENCES,
    Rule,
    instructed_words,
    rules_in,
    without_rules,
)

_PLAYBOOK_REPLIES = {"sample_reflection": reflect, "curation": curate}
"""Kind of prompt -> what writes the fields of its reply."""


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


def reply_to(request: ChatRequest, profile: Profile, model: ReplyModel, seed: int) -> Reply:
    """The simulated model's reply.

    Args:
        request: What `parse_chat_request` read.
        profile: Gives the law of the output lengths.
        model: How well the simulated model obeys and reflects.
        seed: The server's seed.
    """
    choices = Choices(seed, request.content)
    quick = request.kind in ("task", "other") or is_tool_call(request)
    law = profile.task_length if quick else profile.reflection_length
    wanted = law.tokens(choices.uniform("length"))
    limit = min(request.max_tokens or profile.max_output_tokens, profile.max_output_tokens)
    return Reply(
        text=_text(request, model, choices, seed),
        completion_tokens=min(wanted, limit),
        finish_reason="length" if wanted > limit else "stop",
    )


def _text(request: ChatRequest, model: ReplyModel, choices: Choices, seed: int) -> str:
    if request.kind == "integration":
        return _integration(request, model, choices)
    if request.kind == "harness":
        fields = harness_fields(
            request,
            lambda number: Choices(seed, f"{number} {request.content}"),
            lambda current, feedback, own: new_instruction(current, feedback, model, own),
        )
        return _written(request, fields)
    if request.kind in _PLAYBOOK_REPLIES:
        values = _PLAYBOOK_REPLIES[request.kind](request.inputs, model, choices)
        return _written(request, {one.name: values.get(one.name, FILLER_OPENING) for one in request.output_fields})
    return _format(request, _body(request, model, choices))


def _body(request: ChatRequest, model: ReplyModel, choices: Choices) -> str:
    if request.kind == "reflection":
        inputs = request.inputs
        return new_instruction(inputs["current_instruction"], inputs["examples_with_feedback"], model, choices)
    return answer(request.instruction, model, choices)


def answer(instruction: str, model: ReplyModel, choices: Choices) -> str:
    """A task reply: filler sentences around those instructed words that the model obeys this time."""
    words = instructed_words(instruction)
    obedience = model.obedience_with(len(words))
    ignored = _ignored_rivals(instruction, choices) if model.rivals else set[str]()
    obeyed = [word for word in words if word not in ignored and choices.uniform(f"obey {word}") < obedience]
    sentences = [FILLER_SENTENCES[i % len(FILLER_SENTENCES)].format(word=word) for i, word in enumerate(obeyed)]
    return " ".join([FILLER_OPENING, *sentences, FILLER_CLOSING])


def _ignored_rivals(instruction: str, choices: Choices) -> set[str]:
    """Of each pair of rules that contradict each other, the word of one."""
    pairs: dict[int, list[Rule]] = {}
    for rule in rules_in(instruction):
        pairs.setdefault((rule.number + 1) // 2, []).append(rule)
    return {pair[choices.index(f"rival {number}", 2)].word for number, pair in sorted(pairs.items()) if len(pair) == 2}


_CHILD = re.compile(r"^### Child (\d{1,9})$", re.MULTILINE)


def integrate(head: str, children: str, model: ReplyModel, choices: Choices) -> tuple[list[dict[str, object]], str]:
    """An integration: the head with the rules that the children add, minus what it overlooks.

    Args:
        head: The newest text.
        children: The children's changes, as `StaleCandidateReflection` shows them.
        model: How well it integrates.
        choices: The random choices of this request.

    Returns:
        A verdict for each child, and the new text.
    """
    rules, base = rules_in(head), without_rules(head)
    known = {rule.word for rule in rules}
    pairs = {(rule.number + 1) // 2 for rule in rules}
    added: list[Rule] = []
    verdicts: list[dict[str, object]] = []
    marks = list(_CHILD.finditer(children))
    for mark, end in zip(marks, [*(one.start() for one in marks[1:]), len(children)], strict=False):
        number, text = int(mark[1]), children[mark.end() : end]
        put_in = "\n".join(line[2:] for line in text.splitlines() if line.startswith("+ "))
        fresh = [rule for rule in rules_in(put_in) if rule.word not in known]
        rivals = [rule for rule in fresh if model.rivals and (rule.number + 1) // 2 in pairs]
        if rivals and choices.uniform(f"conflict {number}") < model.spots_conflicts:
            verdicts.append({"child": number, "verdict": "conflicting", "reason": f"Contradicts: {rivals[0]}"})
            continue
        verdict = "orthogonal" if fresh else "subsumed"
        verdicts.append({"child": number, "verdict": verdict, "reason": f"Adds {len(fresh)} rules."})
        added += fresh
        known |= {rule.word for rule in fresh}
        pairs |= {(rule.number + 1) // 2 for rule in fresh}
    lost = 1 - math.exp(-model.overload * len(added))
    kept = [rule for rule in added if choices.uniform(f"lose {rule.word}") >= lost]
    if rules and choices.uniform("forget") < model.forgets:
        del rules[choices.index("forget which", len(rules))]
    return verdicts, "\n".join([base, *map(str, sorted([*rules, *kept]))]).strip()


def _integration(request: ChatRequest, model: ReplyModel, choices: Choices) -> str:
    verdicts, text = integrate(request.inputs["head_text"], request.inputs["children"], model, choices)
    values: dict[str, object] = {}
    for field in request.output_fields:
        is_list = field.type_name.strip().startswith("list")
        values[field.name] = verdicts if is_list else FILLER_OPENING if field.name == "reasoning" else text
    return _written(request, values)


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
    sentence = USELESS_SENTENCES[choices.index("useless which", len(USELESS_SENTENCES))]
    return base if sentence in base else f"{base}\n{sentence}".strip()


def _format(request: ChatRequest, body: str) -> str:
    """The body in the format that the request asks for; unknown prompts get it plain."""
    if not request.output_fields:
        return json.dumps({"reply": body}) if request.json_reply else body
    values = {field.name: _value(field, body) for field in request.output_fields}
    if CITATIONS in values:
        values[CITATIONS] = citations(request.instruction, body)
    return _written(request, values)


def _written(request: ChatRequest, values: Mapping[str, object]) -> str:
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
