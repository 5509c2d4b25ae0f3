"""Simulated models that imitate how real ones reflect; the package has an obliging one alone.

They fall short (`fallible`), write structured texts as measured in public runs (`structured`, after the laws of
`lineage`), reply in forms that were not asked for (`sloppy`), and answer the prompts of playbooks and of harnesses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from benchmarks.models.fallible import FallibleModel, read_request
from benchmarks.models.harness_replies import harness_fields, is_tool_call
from benchmarks.models.lineage import GPT_CLASS, QWEN3_8B, Lineage
from benchmarks.models.playbook_replies import CITATIONS, citations, curate, reflect
from benchmarks.models.sloppy import formed, formed_reply, formed_verdicts, sloppy_form
from benchmarks.models.structured import consolidated, edits, patched, rewritten, statements
from dspy_flashevolve.sim.prompts import ChatRequest
from dspy_flashevolve.sim.replies import integration_values, numbered_parts, written, written_edits
from dspy_flashevolve.sim.words import FILLER_OPENING, Choices, Rule

__all__ = ["DEFAULT_MODEL", "REPLY_MODELS", "ImitatingModel", "reply_model_named"]

CHARACTERS_A_TOKEN = 4
_WRITTEN = ("reflection", "integration", "consolidation")
"""Kinds of prompts whose replies are texts for a prompt, as long as the model writes them where it has a lineage."""
_PLAYBOOK_REPLIES = {"sample_reflection": reflect, "curation": curate}
"""Kind of prompt -> the function that writes the fields of its reply."""


@dataclass(frozen=True)
class ImitatingModel(FallibleModel):
    """A model that is also sloppy, writes structured texts, and answers prompts of playbooks and harnesses.

    Attributes:
        sloppy: Probability that a reply to a reflection or an integration is in a form that was not asked for.
        lineage: How a reflection writes structured texts and edits: what it keeps, rewords and drops follows from that,
            and `forgets` counts for edits and integrations alone. None for a text of single lines.
    """

    sloppy: float = 0.0
    lineage: Lineage | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.sloppy <= 1:
            raise ValueError(f"sloppy must be between 0 and 1, got {self.sloppy!r}")

    def write(self, request: ChatRequest, choices: Choices, seed: int) -> str:
        request = read_request(request)
        inputs, names = request.inputs, [field.name for field in request.output_fields]
        if request.kind == "harness":
            fields = harness_fields(
                request, lambda number: Choices(seed, f"{number} {request.content}"), self.new_instruction
            )
            return written(request, fields)
        if request.kind in _PLAYBOOK_REPLIES:
            values = _PLAYBOOK_REPLIES[request.kind](inputs, self, choices)
            return written(request, {name: values.get(name, FILLER_OPENING) for name in names})
        is_integration = request.kind == "integration"
        form = (
            sloppy_form(self.sloppy, choices, is_integration)
            if is_integration or request.kind == "reflection"
            else None
        )
        if form is None:
            return super().write(request, choices, seed)
        if is_integration:
            head = inputs["head_text"]
            verdicts, text = self.integrate(head, inputs["children"], choices)
            values = integration_values(request, formed_verdicts(form, verdicts), formed(form, text, head))
            return formed_reply(form, written(request, values))
        current, feedback = inputs["current_instruction"], inputs["examples_with_feedback"]
        if "edits" in names:
            changes = self.edits(numbered_parts(current), feedback, choices)
            whole = written_edits(request, [] if form == "unchanged" else changes)
            return formed_reply(form, formed(form, whole, whole))
        text = formed(form, self.new_instruction(current, feedback, choices), current)
        return formed_reply(form, self.format(request, text))

    def own_tokens(self, request: ChatRequest, text: str) -> int | None:
        is_own = self.lineage is not None and request.kind in _WRITTEN
        return max(1, len(text) // CHARACTERS_A_TOKEN) if is_own else None

    def is_quick(self, request: ChatRequest) -> bool:
        return super().is_quick(request) or is_tool_call(request)

    def values(self, request: ChatRequest, body: str) -> dict[str, object]:
        values = super().values(request, body)
        return values | {CITATIONS: citations(request.instruction, body)} if CITATIONS in values else values

    def new_instruction(self, current: str, feedback: str, choices: Choices) -> str:
        if self.lineage is None:
            return super().new_instruction(current, feedback, choices)
        return rewritten(current, self.learnt(current, feedback, choices), self.lineage, choices)

    def edits(self, parts: Sequence[str], feedback: str, choices: Choices) -> list[object]:
        if self.lineage is None:
            return super().edits(parts, feedback, choices)
        learnt = self.learnt("\n".join(parts), feedback, choices)
        forgets = choices.uniform("forget") < self.forgets
        return edits(parts, learnt, forgets, self.lineage, choices)

    def consolidated(self, text: str, choices: Choices) -> str:
        if self.lineage is None:
            return super().consolidated(text, choices)
        return consolidated(patched(text, (), (), self.lineage, choices), self.lineage, choices)

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
        if self.lineage is None:
            return super().patched(head, base, rules, added, copied, dropped, choices)
        stays = {*statements("\n".join(map(str, rules)))} | {*self.sentences(base)}
        gone = ({*statements(head)} - stays) | {*dropped}
        return patched(head, gone, [*copied, *map(str, sorted(added))], self.lineage, choices)


DEFAULT_MODEL = "plain"
_PLAIN = ImitatingModel(
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
    sloppy=0.05,
)
_HARSH = replace(
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
    sloppy=0.1,
)
REPLY_MODELS: dict[str, ImitatingModel] = {
    "obliging": ImitatingModel(),
    "plain": _PLAIN,
    "harsh": _HARSH,
    "vague": replace(_PLAIN, vague=0.7, useless=0.5, harmful=0.15),
    "sloppy": replace(_PLAIN, sloppy=0.5, rewords=0.3),
    "rewriting": replace(_PLAIN, rewrites=1.0),
    "strong": replace(_PLAIN, lineage=GPT_CLASS),
    "strong-small": replace(_HARSH, lineage=QWEN3_8B),
}
"""The named models.

obliging    writes good rules only, obeys all alike, integrates nearly without loss: what a search finds easy
plain       the default: a third of its reflections do harm, rules are obeyed unevenly, length costs, parts get lost
harsh       more harm than help, a good part of the rules never obeyed, length costs more, more gets lost
vague       as plain, but feedback seldom says what was missed, and most reflections do nothing
sloppy      as plain, but every second reflection and integration comes in a form that was not asked for
rewriting   as plain, but every reflection puts the whole instruction in other words
strong      learns as plain, and writes structured texts, or edits, as GPT-class models do (`lineage`)
strong-small  learns as harsh, and writes as Qwen3-8B does

All but obliging are sloppy now and then.
"""


def reply_model_named(name: str) -> ImitatingModel:
    """Return the model with a name.

    Raises:
        ValueError: If there is none; the message has the names.
    """
    if name not in REPLY_MODELS:
        raise ValueError(f"unknown model {name!r}: choose one of {', '.join(REPLY_MODELS)}")
    return REPLY_MODELS[name]
