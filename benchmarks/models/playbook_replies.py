"""The house rules for ACE: the replies of the simulated reflector and curator of a playbook.

The reflector names the rules that the feedback says were missed. The curator adds some of those that the playbook has
not, sometimes a general sentence instead, and sometimes removes a bullet. Similar bullets are merged into one that has
the texts of all. A reply that obeys a bullet's rule cites it. So playbooks grow step by step towards the same optimum
as instructions do.

The inputs are those of `dspy_flashevolve.modules.playbook`; nothing here imports dspy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.models.fallible import FallibleModel, harmful_sentences
from dspy_flashevolve.sim.replies import useless_sentence
from dspy_flashevolve.sim.words import Choices, instructed_words, rules_in, words_present

CITATIONS = "cited_bullets"
"""The output field in which a program in training names the bullets that it used."""
_BULLET = re.compile(r"^\[([a-z]{1,3}-\d{1,9})\] helpful=\d+ harmful=\d+ (.*)$", re.MULTILINE)


def citations(instruction: str, body: str) -> str:
    """Return the ids of the bullets whose words occur in a reply.

    Examples:
        >>> citations('[str-1] helpful=0 harmful=0 Rule 07: mention the word "amber".', "One more point is amber.")
        'str-1'
    """
    bullets = _BULLET.findall(instruction)
    return ", ".join(name for name, text in bullets if words_present(body, instructed_words(text)))


def reflect(inputs: Mapping[str, str], model: FallibleModel, choices: Choices) -> dict[str, str]:
    """Return a reflection on a sample: the rules that it missed, and a tag for each bullet that it cited."""
    missed = rules_in(inputs["feedback"])
    sentence = model.sentence(choices)
    named = [] if sentence else [rule for rule in missed if choices.uniform(f"read {rule.word}") < model.reads]
    tags = {name: "helpful" for name, _ in _BULLET.findall(inputs["cited_bullets"])}
    return {
        "what_went_wrong": "Something was left out." if missed else "",
        "right_approach": "Follow each of the house rules.",
        "insight": (
            "An answer has to keep these: " + " ".join(map(str, named))
            if named
            else sentence or useless_sentence(choices)
        ),
        "bullet_tags": json.dumps(tags),
    }


def curate(inputs: Mapping[str, str], model: FallibleModel, choices: Choices) -> dict[str, str]:
    """Return operations that add the rules of the reflection that the playbook has not."""
    bullets = [(name, rule) for name, text in _BULLET.findall(inputs["playbook"]) for rule in rules_in(text)]
    known = {rule.word for _, rule in bullets}
    missed = [rule for rule in rules_in(inputs["reflection"]) if rule.word not in known]
    section = inputs["sections"].partition(",")[0].strip()
    added = [str(rule) for rule in replace(model, reads=1).read(missed, choices)]
    if not rules_in(inputs["reflection"]):
        harmful = harmful_sentences(inputs["reflection"])
        added = harmful or [useless_sentence(choices)]
    operations: list[dict[str, Any]] = [{"type": "ADD", "section": section, "content": content} for content in added]
    if bullets and choices.uniform("forget") < model.forgets:
        operations.append({"type": "REMOVE", "id": bullets[choices.index("forget which", len(bullets))][0]})
    return {"operations": json.dumps(operations)}
