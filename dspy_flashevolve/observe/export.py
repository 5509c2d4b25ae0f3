"""A candidate of a run as a file that ``program.load`` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.observe.history import Candidate, History

PREDICTOR = "predictor '"
"""How the name of a predictor's fingerprint begins in the journal; see programs/fingerprints.py."""


def program_state(history: History, candidate: Candidate, base: str | Path | None = None) -> dict[str, Any]:
    """Return the student's state with a candidate's texts in it.

    The journal holds the texts of candidates, and of a harness all there is. Demos, field descriptions and LMs of
    predictors belong to the student. Without ``base`` the state has none of them: the program that loads it keeps its
    own, except an LM that is set on a predictor.

    Args:
        base: the file that ``student.save("student.json")`` wrote. Default: the smallest state that ``load`` takes.

    Raises:
        ConfigurationError: ``base`` is no such file, or of another program, or it is needed and missing.
    """
    if not candidate.texts:
        raise ConfigurationError(f"{history.directory}: the texts of candidate {candidate.index} are not there.")
    if history.optimizer == "AsyncMetaHarness":
        memory = candidate.more["candidate"].get("memory")
        return _complete({"module_src": candidate.texts["source"], "memory": memory, "lm": None})
    state = {} if base is None else _read_state(Path(base))
    fingerprints = history.sessions[-1].fingerprints if history.sessions else {}
    predictors = {name[len(PREDICTOR) : -1] for name in fingerprints if name.startswith(PREDICTOR)}
    missing = sorted(predictors - candidate.texts.keys() - state.keys())
    unknown = sorted(candidate.texts.keys() - state.keys()) if base is not None else []
    if missing or unknown:
        raise ConfigurationError(
            f"{base or history.directory}: it says nothing of {', '.join(missing or unknown)}. Give what "
            'student.save("student.json") wrote for the program that was optimized, by --program student.json.'
        )
    for name, text in candidate.texts.items():
        part = state.setdefault(name, {"lm": None})  # load reads this key of every predictor
        if not isinstance(part, dict) or not isinstance(part.get("signature", {}), dict):
            raise ConfigurationError(f"{base}: {name} is no predictor's state, expected what student.save wrote.")
        if "module_src" in part or (name not in predictors and predictors):  # a dspy.Flex
            part["module_src"] = text
        else:
            part.setdefault("signature", {"fields": []})["instructions"] = text
    return _complete(state)


def _complete(state: dict[str, Any]) -> dict[str, Any]:
    """Add the metadata without which ``load`` refuses a state."""
    return {**state, "metadata": state.get("metadata", {"dependency_versions": {}})}


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f'{path} cannot be read ({error.strerror}), expected what student.save("student.json") wrote.'
        ) from error
    except ValueError as error:
        raise ConfigurationError(
            f'{path} is no JSON ({error}), expected what student.save("student.json") wrote.'
        ) from error
    if not isinstance(state, dict) or "metadata" not in state:
        raise ConfigurationError(f'{path} holds no program, expected what student.save("student.json") wrote.')
    return state
