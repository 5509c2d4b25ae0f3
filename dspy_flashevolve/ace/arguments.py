"""AsyncACE's arguments: what their names mean, and whether they can work."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from typing import Any

from dspy.primitives.module import Module

from dspy_flashevolve.ace.playbook import Playbook
from dspy_flashevolve.ace.similarity import Embedder, EmbeddingDuplicates
from dspy_flashevolve.engine.errors import ConfigurationError, DataError
from dspy_flashevolve.engine.staleness import Full, Guarded, Reflective, StalenessPolicy
from dspy_flashevolve.programs.run import check_counts, check_run

POLICIES: dict[str, StalenessPolicy] = {
    "full": Full(looks=("before_commit",)),
    "guarded": Guarded(max_gap=64, looks=("before_commit",)),
}
"""What the names of ``staleness`` stand for."""
EMBEDDING_MODEL = "all-MiniLM-L6-v2"
"""The sentence-transformers model that embeds bullets, unless an embedder is given."""
COUNTS = ("max_rounds", "epochs", "token_budget", "eval_every", "validations_at_once")
"""Arguments that are whole numbers of at least 1."""


def check_arguments(optimizer: Any) -> None:
    """Raise ConfigurationError for an argument of AsyncACE that cannot work."""
    if not callable(optimizer.metric):
        raise ConfigurationError(f"metric is {optimizer.metric!r}, expected a function (example, prediction, ...).")
    for name in COUNTS:
        if getattr(optimizer, name) is None:
            raise ConfigurationError(f"{name} is None, expected a whole number of at least 1.")
    check_counts(optimizer, *COUNTS, "max_metric_calls")
    check_run(optimizer)
    if optimizer.log_dir is not None and not isinstance(optimizer.log_dir, str | os.PathLike):
        raise ConfigurationError(f"log_dir is {optimizer.log_dir!r}, expected a path, or None.")
    for name in ("perfect_score", "failure_score"):
        value = getattr(optimizer, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigurationError(f"{name} is {value!r}, expected a number.")
    attach = optimizer.attach
    if attach != "all" and (isinstance(attach, str) or not isinstance(attach, list | tuple) or not attach):
        raise ConfigurationError(f"attach is {attach!r}, expected 'all' or a list of predictor names.")
    for name in ("reflector", "curator"):
        if not isinstance(getattr(optimizer, name), Module):
            raise ConfigurationError(f"{name} is {getattr(optimizer, name)!r}, expected a dspy.Module.")
    if not callable(optimizer.count_tokens):
        raise ConfigurationError(f"count_tokens is {optimizer.count_tokens!r}, expected a function (text) -> tokens.")
    if not isinstance(optimizer.metric_lock, bool):
        raise ConfigurationError(f"metric_lock is {optimizer.metric_lock!r}, expected True or False.")
    policy_of(optimizer)
    _check_deduplication(optimizer)


def policy_of(optimizer: Any) -> StalenessPolicy:
    """The staleness policy.

    Raises:
        ConfigurationError: no such name, and no policy.
    """
    staleness = optimizer.staleness
    if isinstance(staleness, str) and staleness in POLICIES:
        return POLICIES[staleness]
    if isinstance(staleness, str | type | Reflective) or not callable(getattr(staleness, "decide", None)):
        raise ConfigurationError(
            f"staleness is {staleness!r}, expected 'full', 'guarded', or a policy: an object with "
            "decide(look, history) that admits or discards. In place of 'reflective' and Reflective use 'guarded'."
        )
    return staleness


def duplicates_of(optimizer: Any) -> EmbeddingDuplicates | None:
    """What tells by embeddings whether two bullets say the same; None where that is off."""
    if optimizer.deduplicate is None:
        return None
    return EmbeddingDuplicates(optimizer.embedder or sentence_transformer(), optimizer.deduplicate)


def sentence_transformer() -> Embedder:
    """The default embedder; imported when it is used, since it takes seconds and is optional."""
    module: Any = importlib.import_module("sentence_transformers")
    model = module.SentenceTransformer(EMBEDDING_MODEL)
    return lambda texts: model.encode(texts).tolist()


def _check_deduplication(optimizer: Any) -> None:
    threshold, embedder = optimizer.deduplicate, optimizer.embedder
    if threshold is None and embedder is None:
        return
    if threshold is None:
        raise ConfigurationError("embedder is given, but deduplicate is None: give a threshold, such as 0.9.")
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold <= 1:
        raise ConfigurationError(f"deduplicate is {threshold!r}, expected a cosine above 0 and up to 1, or None.")
    if embedder is None and importlib.util.find_spec("sentence_transformers") is None:
        raise ConfigurationError(
            f"deduplicate is {threshold!r}, which needs an embedder: pass embedder=..., or "
            "pip install 'dspy-flashevolve[ace]' for sentence-transformers."
        )


def check_student(student: Any, attach: Any) -> list[str]:
    """The names of the predictors that get the playbook.

    Raises:
        DataError: no dspy.Module.
        ConfigurationError: a name that no predictor has, or no predictor at all.
    """
    if not isinstance(student, Module):
        raise DataError(f"student is {student!r}, expected a dspy.Module.")
    known = [name for name, _ in student.named_predictors()]
    wanted = known if attach == "all" else list(attach)
    if not wanted or any(name not in known for name in wanted):
        raise ConfigurationError(f"attach is {attach!r}, but the program's predictors are {known}.")
    return [name for name in known if name in wanted]


def first_playbook(optimizer: Any, student: Any, names: list[str], given: Any) -> Playbook:
    """What a run begins with: what it is given, else the student's, else an empty one.

    The student's is the one in its instructions: as its attribute, where that is the same text, which has counters too.

    Raises:
        ConfigurationError: something else than a playbook, or one above the token budget.
    """
    first: Any = _held(optimizer, student, names) if given is None else given
    if not isinstance(first, Playbook):
        raise ConfigurationError(f"playbook is {first!r:.80}, expected a Playbook: Playbook.load(path) reads one.")
    tokens = first.tokens(optimizer.count_tokens)
    if tokens > optimizer.token_budget:
        raise ConfigurationError(
            f"The playbook to begin with has {tokens} tokens, above token_budget={optimizer.token_budget}. Raise the "
            "budget, or leave bullets out."
        )
    return first


def _held(optimizer: Any, student: Any, names: list[str]) -> Playbook:
    texts: list[str] = [one.signature.instructions for name, one in student.named_predictors() if name in names]
    found = (Playbook.from_instructions(text, optimizer.sections) for text in texts)
    held = next((one for one in found if one is not None), None)
    own: Any = getattr(student, attribute_of(student), None)
    if isinstance(own, Playbook) and own.render() == ("" if held is None else held.render()):
        return own
    return Playbook(sections=optimizer.sections) if held is None else held


def attribute_of(program: Any) -> str:
    """The attribute of a program that has its playbook: ``playbook``, unless the program has another use for that."""
    return "playbook" if isinstance(getattr(program, "playbook", None), Playbook | None) else "ace_playbook"


def check_budget(optimizer: Any, validation: int) -> None:
    """Raise ConfigurationError where metric calls cannot pay what a run needs at least.

    Args:
        validation: examples of the validation set; 0 where there is none.
    """
    sample, limit = 1 + optimizer.max_rounds, optimizer.max_metric_calls
    if limit is not None and limit < 2 * validation + sample:
        raise ConfigurationError(
            f"max_metric_calls is {limit}, expected at least {2 * validation + sample}: {sample} for a sample"
            + (f", and {validation} each for the first and the last playbook's validation." if validation else ".")
        )
