"""Every verifier, by instruction id: IFBench's 58 kinds and IFEval's 25."""

from __future__ import annotations

from benchmarks.workloads.ifbench import counting, custom, format, ifeval_kinds, repeat, sentences, words
from benchmarks.workloads.ifbench.verifier import VERIFIERS, Verifier

__all__ = ["APPROXIMATE", "MODULES", "VERIFIERS", "Verifier"]

# The modules whose import fills the registry.
MODULES = (counting, words, sentences, format, repeat, custom, ifeval_kinds)

APPROXIMATE: dict[str, str] = {kind: rule.approximate for kind, rule in VERIFIERS.items() if rule.approximate}
"""In what a verdict may differ from the official evaluator's, by instruction id."""
