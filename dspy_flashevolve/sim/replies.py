"""The simulated model: how well it obeys, reflects and integrates, and the replies that follow from it.

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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dspy_flashevolve.sim.profiles import Profile
from dspy_flashevolve.sim.prompts import ChatRequest, OutputField
from dspy_flashevolve.sim.words import (
    FILLER_CLOSING,
    FILLER_OPENING,
    FILLER_SENTENCES,
    HARMFUL_SENTENCES,
    RECURRING_HARM,
    USELESS_SENTENCES,
    WORDINGS,
    Choices,
    Rule,
    harmful_sentences,
    instructed_words,
    rules_in,
    useless_sentences,
    without_rules,
)

FLAWS = 0.5
"""Probability that a step is written with a flaw. Not measured: large, so that a workflow of three steps has some."""
_STEP = re.compile(r"^Step (\w+) = (\w+)\((.*)\)$", re.MULTILINE)
_COMPLAINT = re.compile(r"^(?:check: )?node '(\w+)'[,:] (?!\{|\[)", re.MULTILINE)


def workflow_fields(inputs: Mapping[str, str], names: list[str], choices: Choices) -> dict[str, Any] | None:
    """Return the output fields of a reply to a prompt of Evoflux; None for other prompts.

    Args:
        inputs: the prompt's fields.
        names: of the output fields.
        choices: random choices of this request.
    """
    if "plan" in names and "tools" in inputs:
        named = set(_COMPLAINT.findall(inputs.get("feedback", "")))
        written = {line.split(" = ")[0]: line for line in inputs.get("workflow", "").splitlines()}
        steps = _STEP.findall("\n".join(inputs.values()))
        kept = written if named else {}
        lines = [
            _line(id, tool, arguments, choices) if id in named or id not in kept else kept[id]
            for id, tool, arguments in steps
        ]
        return {"plan": "\n".join(lines)}
    if "citations" in names and "evidence" in inputs:
        lines = [line.split(" | ") for line in inputs["evidence"].splitlines()]
        cited = [parts[0] for parts in lines if len(parts) > 2 and not parts[2].startswith("DID NOT RUN")]
        told = "; ".join(f"{parts[0]}: {parts[2]}" for parts in lines if parts[0] in cited)
        return {name: cited if name == "citations" else told for name in names}
    return None


def _line(id: str, tool: str, arguments: str, choices: Choices) -> str:
    """Write one step, with the name of its tool or its first parameter's wrong where it has a flaw."""
    if choices.uniform(f"flaw {id}") < FLAWS:
        if choices.uniform(f"kind {id}") < 0.5 or not arguments:
            tool = f"{tool}s"
        else:
            arguments = arguments.replace("=", "_=", 1)
    return f"{id} = {tool}({arguments})"


@dataclass(frozen=True)
class ReplyModel:
    """How well the simulated model obeys, reflects and integrates; `ReplyModel()` is the obliging one.

    All are probabilities, between 0 and 1, where nothing else is said.

    Attributes:
        obedience: Probability that a reply follows a rule of its instruction, drawn for each rule and request.
        unevenness: How obedience differs from rule to rule: that of a rule is multiplied by u to this power, u being
            drawn once for the rule's word, evenly between 0 and 1. 0 means not at all; at 1 it is half on average.
        ignored: Share of the rules that are never obeyed.
        crowding: How obedience falls with the length n of an instruction, in rules and in sentences that a reflection
            has added: it is multiplied by exp(-crowding * n). 0 means never.
        rules_added: The most rules that one reflection adds, equally likely from 1 to this many; `None` for all that
            it reads.
        reads: Probability that a reflection writes a rule that the feedback names.
        vague: Probability that the feedback does not name a rule that was missed (`HouseRules` writes the feedback).
        forgets: Probability that a reflection, or an integration, drops one of the rules it had.
        useless: Share of the reflections that add no rule, only a sentence that does nothing.
        harmful: Share of the reflections that add no rule, only a sentence that does harm. One that reads no rule in
            its feedback adds a sentence that does nothing.
        harm: What each harmful sentence of an instruction multiplies the obedience to every rule by.
        recurring: Share of the harmful sentences that are one of a few that come again and again; others are rare.
        rivals: True when rules 1 and 2, 3 and 4, ... contradict each other: of two that an instruction holds both, a
            reply follows one at most, either as likely.
        spots_conflicts: Probability that an integration sees that a child contradicts the head or another child.
        overload: How integrations lose in a crowd: of n rules to be added each is lost with probability
            1 - exp(-overload * n).
        keeps: Probability that an integration puts in a rule or sentence that a child adds.
        loses: Probability that an integration drops a rule or added sentence of the head.
        rewords: Probability that an integration puts a rule in other words, which mean the same.
        rewrites: Probability that a reflection puts all that it writes in other words, in one paragraph.
        resamples: True when a request that comes again is answered anew, as at a temperature above 0; else equal
            requests get equal replies.

    Raises:
        ValueError: If a probability is outside [0, 1], `useless` and `harmful` are more than 1 together, `crowding`,
            `overload` or `unevenness` is negative, or `rules_added` is below 1.

    Examples:
        >>> ReplyModel().obedience_with(24)
        0.9
        >>> round(ReplyModel(crowding=0.01).obedience_with(24), 3)
        0.708
    """

    obedience: float = 0.9
    unevenness: float = 0.0
    ignored: float = 0.0
    crowding: float = 0.0
    rules_added: int | None = 2
    reads: float = 1.0
    vague: float = 0.0
    forgets: float = 0.1
    useless: float = 0.15
    harmful: float = 0.0
    harm: float = 0.9
    recurring: float = 0.25
    rivals: bool = False
    spots_conflicts: float = 0.8
    overload: float = 0.01
    keeps: float = 1.0
    loses: float = 0.0
    rewords: float = 0.0
    rewrites: float = 0.0
    resamples: bool = False

    def __post_init__(self) -> None:
        for name in _PROBABILITIES:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)!r}")
        if self.useless + self.harmful > 1:
            raise ValueError(
                f"useless and harmful must be at most 1 together, got {self.useless!r} and {self.harmful!r}"
            )
        for name in ("crowding", "overload", "unevenness"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)!r}")
        if self.rules_added is not None and self.rules_added < 1:
            raise ValueError(f"rules_added must be at least 1 or None, got {self.rules_added!r}")

    def obedience_with(self, length: int) -> float:
        """Return the probability that a rule is followed in an instruction of that length, if all are obeyed alike."""
        return self.obedience * math.exp(-self.crowding * length)

    def obedience_to(self, word: str) -> float:
        """Return the factor by which obedience to the rule of this word differs from the usual one."""
        luck = Choices(0, word)
        if luck.uniform("ignored") < self.ignored:
            return 0.0
        return luck.uniform("obeyed") ** self.unevenness

    def obeyed(self, instruction: str) -> dict[str, float]:
        """Return, for each word of an instruction in order, the probability that a reply to it holds the word.

        For two rules that contradict each other, each probability is that without the other rule.
        """
        words, harmful = instructed_words(instruction), harmful_sentences(instruction)
        length = len(words) + len(harmful) + len(useless_sentences(instruction))
        usual = self.obedience_with(length) * self.harm ** len(harmful)
        return {word: usual * self.obedience_to(word) for word in words}

    def sentence(self, choices: Choices) -> str | None:
        """Return the sentence that a reflection writes instead of rules; None where it writes rules."""
        drawn = choices.uniform("useless")
        if drawn < self.useless:
            return useless_sentence(choices)
        if drawn >= self.useless + self.harmful:
            return None
        pool = RECURRING_HARM if choices.uniform("recurring") < self.recurring else HARMFUL_SENTENCES
        return pool[choices.index("harmful which", len(pool))]

    def read(self, named: Sequence[Rule], choices: Choices) -> list[Rule]:
        """Return the rules that a reflection writes, of those that its feedback names."""
        read_rules = [rule for rule in named if choices.uniform(f"read {rule.word}") < self.reads]
        read_rules.sort(key=lambda rule: choices.uniform(f"add {rule.word}"))
        return read_rules if self.rules_added is None else read_rules[: 1 + choices.index("how many", self.rules_added)]

    # The replies; a subclass may write others.

    def write(self, request: ChatRequest, choices: Choices, seed: int) -> str:
        """Return the text of the reply to a request.

        Args:
            request: What `parse_chat_request` read.
            choices: The random choices of this request.
            seed: The server's seed.
        """
        inputs, names = request.inputs, [field.name for field in request.output_fields]
        if request.kind == "integration":
            return written(request, integration_values(request, *self.integrate(*integration_inputs(inputs), choices)))
        if request.kind == "consolidation":
            return self.format(request, self.consolidated(inputs["instruction"], choices))
        if request.kind == "reflection":
            current, feedback = inputs["current_instruction"], inputs["examples_with_feedback"]
            if "edits" in names:
                return written_edits(request, self.edits(numbered_parts(current), feedback, choices))
            return self.format(request, self.new_instruction(current, feedback, choices))
        planned = workflow_fields(inputs, names, choices)
        return written(request, planned) if planned else self.format(request, self.answer(request.instruction, choices))

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
        ignored = _ignored_rivals(instruction, choices) if self.rivals else set[str]()
        likely = self.obeyed(instruction).items()
        obeyed = [word for word, share in likely if word not in ignored and choices.uniform(f"obey {word}") < share]
        sentences = [FILLER_SENTENCES[i % len(FILLER_SENTENCES)].format(word=word) for i, word in enumerate(obeyed)]
        return " ".join([FILLER_OPENING, *sentences, FILLER_CLOSING])

    def new_instruction(self, current: str, feedback: str, choices: Choices) -> str:
        """Return a reflection's instruction: the current one with rules that the feedback names.

        Args:
            current: The current instruction.
            feedback: The text of the examples with their feedback.
            choices: The random choices of this request.
        """
        current = listed(current)
        rules, base = rules_in(current), without_rules(current)
        learnt = self.learnt(current, feedback, choices)
        added = rules_in("\n".join(learnt))
        if not added:
            base = _with(base, learnt[0])
        if rules and choices.uniform("forget") < self.forgets:
            del rules[choices.index("forget which", len(rules))]
        rules = sorted([*rules, *added])
        if choices.uniform("rewrite") >= self.rewrites:
            return "\n".join([base, *map(str, rules)]).strip()
        rules.sort(key=lambda rule: choices.uniform(f"rewrite {rule.word}"))
        other = [rule.reworded(1 + choices.index(f"rewrite {rule.word} how", WORDINGS - 1)) for rule in rules]
        return _LINKS[choices.index("rewrite how", len(_LINKS))].join([*base.splitlines(), *map(str, other)]).strip()

    def learnt(self, current: str, feedback: str, choices: Choices) -> list[str]:
        """Return what a reflection adds: rules that the feedback names and the instruction lacks, or a sentence."""
        known = {rule.word for rule in rules_in(current)}
        missed = [rule for rule in rules_in(feedback) if rule.word not in known]
        sentence = self.sentence(choices)
        added = [] if sentence else self.read(missed, choices)
        return list(map(str, added)) or [sentence or useless_sentence(choices)]

    def edits(self, parts: Sequence[str], feedback: str, choices: Choices) -> list[object]:
        """Return what a reflection would change, as edits of an instruction's numbered parts."""
        text = self.new_instruction("\n".join(parts), feedback, choices)
        if choices.uniform("rewrite") < self.rewrites:
            return [_edit("replace", 1, text), *(_edit("remove", number) for number in range(2, len(parts) + 1))]
        after, lines = text.splitlines(), [line for part in parts for line in part.splitlines()]
        removed = [
            number for number, part in enumerate(parts, 1) if not all(line in after for line in part.splitlines())
        ]
        return [
            *(_edit("remove", number, reason="not needed") for number in removed),
            *(_edit("add", len(parts), line, "the feedback says so") for line in after if line not in lines),
        ]

    def consolidated(self, text: str, choices: Choices) -> str:
        """Return an instruction written anew: an integration of no children."""
        return self.integrate(text, "", choices)[1]

    def integrate(self, head: str, children: str, choices: Choices) -> tuple[list[dict[str, object]], str]:
        """Integrate children: the head with the rules and sentences that they add, without those that get lost.

        Args:
            head: The newest text.
            children: The children's changes, as `StaleCandidateReflection` shows them.
            choices: The random choices of this request.

        Returns:
            A verdict for each child, and the new text.
        """
        head = listed(head)
        rules, base = rules_in(head), without_rules(head)
        known = {rule.word for rule in rules}
        pairs = {(rule.number + 1) // 2 for rule in rules}
        held = set(sentences_in(head))
        added: list[Rule] = []
        sentences: list[str] = []
        verdicts: list[dict[str, object]] = []
        marks = list(_CHILD.finditer(children))
        for mark, end in zip(marks, [*(mark.start() for mark in marks[1:]), len(children)], strict=False):
            number, text = int(mark[1]), children[mark.end() : end]
            put_in = listed("\n".join(line[2:] for line in text.splitlines() if line.startswith("+ ")))
            fresh = [rule for rule in rules_in(put_in) if rule.word not in known]
            rivals = [rule for rule in fresh if self.rivals and (rule.number + 1) // 2 in pairs]
            if rivals and choices.uniform(f"conflict {number}") < self.spots_conflicts:
                verdicts.append({"child": number, "verdict": "conflicting", "reason": f"Contradicts: {rivals[0]}"})
                continue
            copied = [sentence for sentence in sentences_in(put_in) if sentence not in held]
            held.update(copied)
            sentences += copied
            verdict = "orthogonal" if fresh or copied else "subsumed"
            verdicts.append({"child": number, "verdict": verdict, "reason": f"Adds {len(fresh)} rules."})
            added += fresh
            known |= {rule.word for rule in fresh}
            pairs |= {(rule.number + 1) // 2 for rule in fresh}
        lost = 1 - math.exp(-self.overload * len(added))
        kept = [rule for rule in added if choices.uniform(f"lose {rule.word}") >= lost]
        kept = [rule for rule in kept if choices.uniform(f"put in {rule.word}") < self.keeps]
        copied = [sentence for sentence in sentences if choices.uniform(f"put in {sentence}") < self.keeps]
        if rules and choices.uniform("forget") < self.forgets:
            del rules[choices.index("forget which", len(rules))]
        rules = [rule for rule in rules if choices.uniform(f"drop {rule.word}") >= self.loses]
        dropped = {sentence for sentence in sentences_in(base) if choices.uniform(f"drop {sentence}") < self.loses}
        return verdicts, self.patched(head, base, rules, kept, copied, dropped, choices)

    def patched(
        self,
        head: str,
        base: str,
        rules: Sequence[Rule],
        added: Sequence[Rule],
        copied: Sequence[str],
        dropped: Collection[str],
        choices: Choices,
    ) -> str:
        """Return a head after an integration.

        Args:
            head: The head before.
            base: The head without its rules.
            rules: Those of its rules that stay.
            added: The rules that are put in.
            copied: The sentences that are put in.
            dropped: The sentences that are taken out.
            choices: The random choices of this request.
        """
        base = "\n".join(line for line in base.splitlines() if line.strip() not in dropped)
        whole = [self._reworded(rule, choices) for rule in (*rules, *added)]
        return "\n".join([base, *copied, *map(str, sorted(whole))]).strip()

    def _reworded(self, rule: Rule, choices: Choices) -> Rule:
        if choices.uniform(f"reword {rule.word}") >= self.rewords:
            return rule
        return rule.reworded(1 + choices.index(f"reword {rule.word} how", WORDINGS - 1))


_PROBABILITIES = (
    "obedience", "ignored", "reads", "vague", "forgets", "useless", "harmful", "harm", "recurring", "spots_conflicts",
    "keeps", "loses", "rewords", "rewrites",
)  # fmt: skip

_PLAIN = ReplyModel(
    obedience=0.98,
    unevenness=0.25,
    ignored=0.05,
    crowding=0.02,
    rules_added=None,
    reads=0.3,
    vague=0.4,
    useless=0.15,
    harmful=0.3,
    keeps=0.8,
    loses=0.03,
    rewords=0.1,
    resamples=True,
)
REPLY_MODELS: dict[str, ReplyModel] = {
    "obliging": ReplyModel(),
    "plain": _PLAIN,
    "harsh": replace(
        _PLAIN,
        obedience=0.95,
        unevenness=0.4,
        ignored=0.15,
        crowding=0.03,
        reads=0.2,
        vague=0.5,
        useless=0.2,
        harmful=0.45,
        harm=0.88,
        keeps=0.7,
        loses=0.05,
        rewords=0.2,
    ),
    "vague": replace(_PLAIN, vague=0.7, useless=0.5, harmful=0.15),
    "rewriting": replace(_PLAIN, rewrites=1.0),
}
"""The named models.

obliging    writes good rules only, obeys all alike, integrates without loss: what a search finds easy
plain       the default: a third of its reflections do harm, rules are obeyed unevenly, length costs, parts get lost
harsh       more harm than help, a good part of the rules never obeyed, length costs more, more gets lost
vague       as plain, but feedback seldom says what was missed, and most reflections do nothing
rewriting   as plain, but every reflection puts the whole instruction in other words
"""


def reply_model_named(name: str) -> ReplyModel:
    """Return the model with a name.

    Raises:
        ValueError: If there is none; the message has the names.

    Examples:
        >>> reply_model_named("obliging") == ReplyModel()
        True
    """
    if name not in REPLY_MODELS:
        raise ValueError(f"unknown model {name!r}: choose one of {', '.join(REPLY_MODELS)}")
    return REPLY_MODELS[name]


DEFAULT_MODEL = "plain"
"""Its numbers come from measurements of real models: docs/simulated-server.md, "Where the numbers come from"."""


def default_reply_model() -> ReplyModel:
    """Return the model of servers, tasks and runs that name none."""
    return REPLY_MODELS[DEFAULT_MODEL]


def useless_sentence(choices: Choices) -> str:
    """Return a sentence that has no effect on answers."""
    return USELESS_SENTENCES[choices.index("useless which", len(USELESS_SENTENCES))]


def _ignored_rivals(instruction: str, choices: Choices) -> set[str]:
    """Return the word of one rule of each pair of rules that contradict each other."""
    pairs: dict[int, list[Rule]] = {}
    for rule in rules_in(instruction):
        pairs.setdefault((rule.number + 1) // 2, []).append(rule)
    return {pair[choices.index(f"rival {number}", 2)].word for number, pair in sorted(pairs.items()) if len(pair) == 2}


_CHILD = re.compile(r"^### Child (\d{1,9})$", re.MULTILINE)
_PROPOSAL = re.compile(r"### Proposal(?= \d{1,9}$)")
_LINKS = ("; ", "; then: ", "; and mind this: ", "; what is more: ")
"""Phrases between the rules of a rewritten instruction, which is one paragraph."""
_LINK = re.compile("|".join(map(re.escape, sorted(_LINKS, key=len, reverse=True))))
_NUMBERED = re.compile(r"^\[\d{1,4}\] ?", re.MULTILINE)


def sentences_in(text: str) -> list[str]:
    """Return the useless and the harmful sentences of a text."""
    return [*useless_sentences(text), *harmful_sentences(text)]


def listed(text: str) -> str:
    """Return a rewritten instruction, which is one paragraph, as lines."""
    return _LINK.sub("\n", text)


def _with(base: str, sentence: str) -> str:
    return base if sentence in base else f"{base}\n{sentence}".strip()


def numbered_parts(current: str) -> list[str]:
    """Return the parts of an instruction that is shown with their numbers."""
    return [_NUMBERED.sub("", part) for part in re.split(r"\n(?=\[\d{1,4}\] )", current)]


def _edit(action: str, part: int, text: str = "", reason: str = "") -> dict[str, object]:
    return {"action": action, "part": part, "text": text, "reason": reason}


def written_edits(request: ChatRequest, edits: Sequence[object]) -> str:
    """Return the reply that holds edits."""
    return json.dumps({"edits": edits}) if request.json_reply else written(request, {"edits": edits})


def integration_inputs(inputs: Mapping[str, str]) -> tuple[str, str]:
    """Return the head and the children of a request to integrate."""
    if "proposed_instructions" not in inputs:
        return inputs["head_text"], inputs["children"]
    # Combee's request shows whole texts, of which every line is taken for a change.
    lines = inputs["proposed_instructions"].splitlines()
    children = (_PROPOSAL.sub("### Child", line) if _PROPOSAL.match(line) else f"+ {line}" for line in lines)
    return inputs["current_instruction"], "\n".join(children)


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


@dataclass(frozen=True)
class Reply:
    """A reply and its length.

    Attributes:
        text: The message's content.
        completion_tokens: Its simulated length: from the profile's law, whatever the length of `text`, unless the
            model says otherwise (`ReplyModel.own_tokens`).
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
