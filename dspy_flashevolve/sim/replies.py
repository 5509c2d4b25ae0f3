"""The replies of the simulated model: a pure function of the request's content and the server's seed.

The task is "house rules": an instruction may hold sentences such as `Rule 07: mention the word "amber".`
(a keyword constraint, as in IFEval, Zhou et al., arXiv 2311.07911), and a reply obeys each of them with a known
probability. A reflection prompt yields the current instruction with some of the rules that the feedback says were
missed, and sometimes with less than before, or with a sentence that does harm. So prompts improve step by step towards
a known optimum.

Every random choice is a hash of (seed, content, what is decided), so that replies do not depend on the order of the
requests. Equal requests get equal replies, unless the model resamples (`Repeats`).
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dspy_flashevolve.sim.harness_replies import harness_fields, is_tool_call
from dspy_flashevolve.sim.playbook_replies import CITATIONS, citations, curate, merge, reflect
from dspy_flashevolve.sim.profiles import Profile
from dspy_flashevolve.sim.prompts import ChatRequest, OutputField
from dspy_flashevolve.sim.reply_model import Choices, ReplyModel, useless_sentence
from dspy_flashevolve.sim.sloppy import formed, formed_reply, formed_verdicts, sloppy_form
from dspy_flashevolve.sim.structured import consolidated, edits, patched, rewritten, statements
from dspy_flashevolve.sim.words import (
    FILLER_CLOSING,
    FILLER_OPENING,
    FILLER_SENTENCES,
    WORDINGS,
    Rule,
    harmful_sentences,
    rules_in,
    useless_sentences,
    without_rules,
)
from dspy_flashevolve.sim.workflow_replies import workflow_fields

CHARACTERS_A_TOKEN = 4
_WRITTEN = ("reflection", "integration", "consolidation")
"""Kinds of prompts whose replies are texts for a prompt, as long as the model writes them where it has a lineage."""
_PLAYBOOK_REPLIES = {"sample_reflection": reflect, "curation": curate, "merging": merge}
"""Kind of prompt -> the function that writes the fields of its reply."""


@dataclass(frozen=True)
class Reply:
    """A reply and its length.

    Attributes:
        text: The message's content.
        completion_tokens: Its simulated length: from the profile's law, whatever the length of `text`; of a new text by
            a model with a lineage, a quarter of its characters.
        finish_reason: "length" when a limit cut the simulated length, else "stop"; `text` is whole either way.
    """

    text: str
    completion_tokens: int
    finish_reason: Literal["stop", "length"]


def reply_to(request: ChatRequest, profile: Profile, model: ReplyModel, seed: int, repeat: int = 0) -> Reply:
    """Return the simulated model's reply to a request.

    Args:
        request: What `parse_chat_request` read.
        profile: Gives the law of the output lengths.
        model: How well the simulated model obeys and reflects.
        seed: The server's seed.
        repeat: How often the same request came before; counts where the model resamples.
    """
    if repeat and model.resamples:
        request = replace(request, content=f"{repeat} {request.content}")
    choices = Choices(seed, request.content)
    quick = request.kind in ("task", "other") or is_tool_call(request)
    law = profile.task_length if quick else profile.reflection_length
    text = _text(request, model, choices, seed)
    if model.lineage is not None and request.kind in _WRITTEN:
        wanted = max(1, len(text) // CHARACTERS_A_TOKEN)
    else:
        wanted = law.tokens(choices.uniform("length"))
    limit = min(request.max_tokens or profile.max_output_tokens, profile.max_output_tokens)
    return Reply(
        text=text,
        completion_tokens=min(wanted, limit),
        finish_reason="length" if wanted > limit else "stop",
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


def _text(request: ChatRequest, model: ReplyModel, choices: Choices, seed: int) -> str:
    if request.kind == "integration":
        return _integration(request, model, choices)
    if request.kind == "consolidation":
        return _format(request, _consolidated(request.inputs["instruction"], model, choices))
    if request.kind == "harness":
        fields = harness_fields(
            request,
            lambda number: Choices(seed, f"{number} {request.content}"),
            lambda current, feedback, own: new_instruction(current, feedback, model, own),
        )
        return _written(request, fields)
    if request.kind in _PLAYBOOK_REPLIES:
        values = _PLAYBOOK_REPLIES[request.kind](request.inputs, model, choices)
        return _written(
            request, {field.name: values.get(field.name, FILLER_OPENING) for field in request.output_fields}
        )
    if request.kind == "reflection":
        return _reflection(request, model, choices)
    planned = workflow_fields(request.inputs, [field.name for field in request.output_fields], choices)
    if planned is not None:
        return _written(request, planned)
    return _format(request, answer(request.instruction, model, choices))


def _reflection(request: ChatRequest, model: ReplyModel, choices: Choices) -> str:
    current, feedback = request.inputs["current_instruction"], request.inputs["examples_with_feedback"]
    if any(field.name == "edits" for field in request.output_fields):
        return _edits(request, current, feedback, model, choices)
    text, form = new_instruction(current, feedback, model, choices), sloppy_form(model, choices, verdicts=False)
    if form is None:
        return _format(request, text)
    return formed_reply(form, _format(request, formed(form, text, current)))


def _consolidated(text: str, model: ReplyModel, choices: Choices) -> str:
    """Write an instruction anew: without a lineage as an integration of no children."""
    if model.lineage is None:
        return integrate(text, "", model, choices)[1]
    return consolidated(patched(text, (), (), model.lineage, choices), model.lineage, choices)


_NUMBERED = re.compile(r"^\[\d{1,4}\] ?", re.MULTILINE)


def _edits(request: ChatRequest, current: str, feedback: str, model: ReplyModel, choices: Choices) -> str:
    """Write what a reflection would change as edits of the numbered parts."""
    before = [_NUMBERED.sub("", part) for part in re.split(r"\n(?=\[\d{1,4}\] )", current)]
    if model.lineage is not None:
        learnt = _learnt("\n".join(before), feedback, model, choices)
        forgets = choices.uniform("forget") < model.forgets
        return _edits_written(request, edits(before, learnt, forgets, model.lineage, choices), model, choices)
    text = new_instruction("\n".join(before), feedback, model, choices)
    after, changes = text.splitlines(), list[object]()
    lines = [line for part in before for line in part.splitlines()]
    if choices.uniform("rewrite") < model.rewrites:
        changes = [{"action": "replace", "part": 1, "text": text, "reason": ""}]
        changes += [
            {"action": "remove", "part": number, "text": "", "reason": ""} for number in range(2, len(before) + 1)
        ]
    else:
        for number, part in enumerate(before, start=1):
            if not all(line in after for line in part.splitlines()):
                changes.append({"action": "remove", "part": number, "text": "", "reason": "not needed"})
        for line in after:
            if line not in lines:
                changes.append({"action": "add", "part": len(before), "text": line, "reason": "the feedback says so"})
    return _edits_written(request, changes, model, choices)


def _edits_written(request: ChatRequest, changes: Sequence[object], model: ReplyModel, choices: Choices) -> str:
    form = sloppy_form(model, choices, verdicts=False)
    values = {"edits": [] if form == "unchanged" else changes}
    written = json.dumps(values) if request.json_reply else _written(request, values)
    return written if form is None else formed_reply(form, formed(form, written, written))


def answer(instruction: str, model: ReplyModel, choices: Choices) -> str:
    """Return a task reply: filler sentences around those instructed words that the model obeys this time."""
    ignored = _ignored_rivals(instruction, choices) if model.rivals else set[str]()
    likely = model.obeyed(instruction).items()
    obeyed = [word for word, share in likely if word not in ignored and choices.uniform(f"obey {word}") < share]
    sentences = [FILLER_SENTENCES[i % len(FILLER_SENTENCES)].format(word=word) for i, word in enumerate(obeyed)]
    return " ".join([FILLER_OPENING, *sentences, FILLER_CLOSING])


def _ignored_rivals(instruction: str, choices: Choices) -> set[str]:
    """Return the word of one rule of each pair of rules that contradict each other."""
    pairs: dict[int, list[Rule]] = {}
    for rule in rules_in(instruction):
        pairs.setdefault((rule.number + 1) // 2, []).append(rule)
    return {pair[choices.index(f"rival {number}", 2)].word for number, pair in sorted(pairs.items()) if len(pair) == 2}


_CHILD = re.compile(r"^### Child (\d{1,9})$", re.MULTILINE)
_PROPOSAL = re.compile(r"### Proposal(?= \d{1,9}$)")


def integrate(head: str, children: str, model: ReplyModel, choices: Choices) -> tuple[list[dict[str, object]], str]:
    """Integrate children: the head with the rules and sentences that they add, without those that get lost.

    Args:
        head: The newest text.
        children: The children's changes, as `StaleCandidateReflection` shows them.
        model: How well it integrates.
        choices: The random choices of this request.

    Returns:
        A verdict for each child, and the new text.
    """
    head = _listed(head)
    rules, base = rules_in(head), without_rules(head)
    known = {rule.word for rule in rules}
    pairs = {(rule.number + 1) // 2 for rule in rules}
    held = set(_sentences(head))
    added: list[Rule] = []
    sentences: list[str] = []
    verdicts: list[dict[str, object]] = []
    marks = list(_CHILD.finditer(children))
    for mark, end in zip(marks, [*(mark.start() for mark in marks[1:]), len(children)], strict=False):
        number, text = int(mark[1]), children[mark.end() : end]
        put_in = _listed("\n".join(line[2:] for line in text.splitlines() if line.startswith("+ ")))
        fresh = [rule for rule in rules_in(put_in) if rule.word not in known]
        rivals = [rule for rule in fresh if model.rivals and (rule.number + 1) // 2 in pairs]
        if rivals and choices.uniform(f"conflict {number}") < model.spots_conflicts:
            verdicts.append({"child": number, "verdict": "conflicting", "reason": f"Contradicts: {rivals[0]}"})
            continue
        copied = [sentence for sentence in _sentences(put_in) if sentence not in held]
        held.update(copied)
        sentences += copied
        verdict = "orthogonal" if fresh or copied else "subsumed"
        verdicts.append({"child": number, "verdict": verdict, "reason": f"Adds {len(fresh)} rules."})
        added += fresh
        known |= {rule.word for rule in fresh}
        pairs |= {(rule.number + 1) // 2 for rule in fresh}
    lost = 1 - math.exp(-model.overload * len(added))
    kept = [rule for rule in added if choices.uniform(f"lose {rule.word}") >= lost]
    kept = [rule for rule in kept if choices.uniform(f"put in {rule.word}") < model.keeps]
    copied = [sentence for sentence in sentences if choices.uniform(f"put in {sentence}") < model.keeps]
    if rules and choices.uniform("forget") < model.forgets:
        del rules[choices.index("forget which", len(rules))]
    rules = [rule for rule in rules if choices.uniform(f"drop {rule.word}") >= model.loses]
    dropped = {sentence for sentence in _sentences(base) if choices.uniform(f"drop {sentence}") < model.loses}
    if model.lineage is not None:
        gone = {*statements(head)} - {*statements("\n".join(map(str, rules)))} - {*_sentences(base)} | dropped
        return verdicts, patched(head, gone, [*copied, *map(str, sorted(kept))], model.lineage, choices)
    base = "\n".join(line for line in base.splitlines() if line.strip() not in dropped)
    whole = [_reworded(rule, model, choices) for rule in (*rules, *kept)]
    return verdicts, "\n".join([base, *copied, *map(str, sorted(whole))]).strip()


def _sentences(text: str) -> list[str]:
    return [*useless_sentences(text), *harmful_sentences(text)]


def _reworded(rule: Rule, model: ReplyModel, choices: Choices) -> Rule:
    if choices.uniform(f"reword {rule.word}") >= model.rewords:
        return rule
    return rule.reworded(1 + choices.index(f"reword {rule.word} how", WORDINGS - 1))


def _integration(request: ChatRequest, model: ReplyModel, choices: Choices) -> str:
    inputs = request.inputs
    if "proposed_instructions" in inputs:  # Combee's: whole texts, of which every line is taken for a change
        head, lines = inputs["current_instruction"], inputs["proposed_instructions"].splitlines()
        children = "\n".join(
            _PROPOSAL.sub("### Child", line) if _PROPOSAL.match(line) else f"+ {line}" for line in lines
        )
    else:
        head, children = inputs["head_text"], inputs["children"]
    verdicts, text = integrate(head, children, model, choices)
    form = sloppy_form(model, choices, verdicts=True) or ""
    judged, text = formed_verdicts(form, verdicts), formed(form, text, head)
    values: dict[str, object] = {}
    for field in request.output_fields:
        is_list = field.type_name.strip().startswith("list")
        value = judged if is_list else FILLER_OPENING if field.name == "reasoning" else text
        if value is not None:
            values[field.name] = value
    return formed_reply(form, _written(request, values))


def new_instruction(current: str, feedback: str, model: ReplyModel, choices: Choices) -> str:
    """Return a reflection's instruction: the current one with rules that the feedback names, without forgotten ones.

    Args:
        current: The current instruction.
        feedback: The text of the examples with their feedback.
        model: How well the model reflects.
        choices: The random choices of this request.
    """
    if model.lineage is not None:
        return rewritten(current, _learnt(current, feedback, model, choices), model.lineage, choices)
    current = _listed(current)
    rules, base = rules_in(current), without_rules(current)
    learnt = _learnt(current, feedback, model, choices)
    added = rules_in("\n".join(learnt))
    if not added:
        base = _with(base, learnt[0])
    if rules and choices.uniform("forget") < model.forgets:
        del rules[choices.index("forget which", len(rules))]
    rules = sorted([*rules, *added])
    if choices.uniform("rewrite") >= model.rewrites:
        return "\n".join([base, *map(str, rules)]).strip()
    rules.sort(key=lambda rule: choices.uniform(f"rewrite {rule.word}"))
    other = [rule.reworded(1 + choices.index(f"rewrite {rule.word} how", WORDINGS - 1)) for rule in rules]
    return _LINKS[choices.index("rewrite how", len(_LINKS))].join([*base.splitlines(), *map(str, other)]).strip()


def _learnt(current: str, feedback: str, model: ReplyModel, choices: Choices) -> list[str]:
    """What a reflection adds: rules that the feedback names and the instruction has not, or a sentence."""
    known = {rule.word for rule in rules_in(current)}
    missed = [rule for rule in rules_in(feedback) if rule.word not in known]
    sentence = model.sentence(choices)
    added = [] if sentence else model.read(missed, choices)
    return list(map(str, added)) or [sentence or useless_sentence(choices)]


_LINKS = ("; ", "; then: ", "; and mind this: ", "; what is more: ")
"""Phrases between the rules of a rewritten instruction, which is one paragraph."""
_LINK = re.compile("|".join(map(re.escape, sorted(_LINKS, key=len, reverse=True))))


def _listed(text: str) -> str:
    """Return a rewritten instruction, which is one paragraph, as lines."""
    return _LINK.sub("\n", text)


def _with(base: str, sentence: str) -> str:
    return base if sentence in base else f"{base}\n{sentence}".strip()


def _format(request: ChatRequest, body: str) -> str:
    """Return the body in the format that the request asks for; unknown prompts get it plain."""
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
    """Return a value of the field's type: the body for text (filler for a chain of thought), else a plain default."""
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
