"""What an integration looks like on a real model: `python -m benchmarks.integration_example`.

One run of AsyncGEPA that integrates what is stale, on an OpenAI-compatible server, with IFEval prompts; every
integration is printed: what it stands on, what the children changed, what was committed meanwhile, the verdicts and the
new text.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import dspy

from benchmarks.workloads import ifeval
from dspy_flashevolve import AsyncGEPA, Reflective, StaleCandidateReflection, Workflow
from dspy_flashevolve.modules.integrate import changed_lines

INTEGRATIONS: list[tuple[dict[str, Any], dspy.Prediction]] = []
"""Inputs and answers, in order; outside the module, since each integration runs a copy of it."""


class Recorded(StaleCandidateReflection):
    """The default module, which remembers what it read and what it said."""

    async def aforward(self, head: Any, children: Any, commits: Any = (), code_components: Any = ()) -> dspy.Prediction:
        """See the base class."""
        answer = await super().aforward(head, children, commits, code_components)
        INTEGRATIONS.append(({"head": head, "children": children, "commits": commits}, answer))
        return answer


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.integration_example", description=__doc__)
    parser.add_argument("--api-base", default="http://127.0.0.1:8111/v1")
    parser.add_argument("--model", default="qwen05", help="the model's name on the server")
    parser.add_argument("--calls", type=int, default=80, help="metric calls")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--examples", type=int, default=10, help="training and validation examples, as many of each")
    parser.add_argument("--batch", type=int, default=4, help="children an integration reads")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def shown(inputs: dict[str, Any], answer: dspy.Prediction) -> str:
    """One integration as text."""
    lines: list[str] = []
    for name, text in inputs["head"].items():
        lines += [f"head, {name}:", text]
    for child in inputs["children"]:
        for name, text in child.texts.items():
            lines += [f"child {child.number}, {child.behind} commits behind, {name}:"]
            lines += [changed_lines(child.parent_texts[name], text)]
    for commit in inputs["commits"]:
        for name, text in commit.texts.items():
            lines += [f"committed meanwhile ({commit.score_change:+.3f}), {name}:"]
            lines += [changed_lines(commit.parent_texts[name], text)]
    lines += [f"child {one.child}: {one.verdict}. {one.reason}" for one in answer.verdicts]
    for name, text in answer.texts.items():
        lines += [f"integrated text, {name}:", text]
    lines += [f"could not be read, {name}: {why}" for name, why in answer.failed.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and print every integration and every change."""
    options = parse(arguments)
    count = options.examples
    trainset, valset = ifeval.examples(count, count, options.seed, 64, "ifeval")
    served = {"api_base": options.api_base, "api_key": "none", "cache": False}
    task_lm = dspy.LM(f"openai/{options.model}", max_tokens=64, temperature=0.0, **served)
    optimizer = AsyncGEPA(
        ifeval.metric,
        max_metric_calls=options.calls,
        num_threads=options.slots,
        reflection_lm=dspy.LM(f"openai/{options.model}", max_tokens=512, temperature=1.0, **served),
        staleness=Reflective(batch=options.batch, changes=False),
        stale_candidate_reflection=Recorded(),
        workflow=Workflow(live_steps=2 * options.batch),
        track_stats=True,
        seed=options.seed,
    )
    with dspy.context(lm=task_lm, adapter=dspy.ChatAdapter(use_json_adapter_fallback=False)):
        program: Any = optimizer.compile(ifeval.program(), trainset=trainset, valset=valset)
    for number, (inputs, answer) in enumerate(INTEGRATIONS, start=1):
        print(f"==== integration {number}\n{shown(inputs, answer)}\n")
    stats = program.async_stats
    print("changes:", *stats.changes, sep="\n  ")
    print(f"verdicts {stats.verdicts}, ended {stats.ended}, {stats.metric_calls} metric calls")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
