"""A candidate of a run as the file that `program.load` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.observe.history import Candidate, History

PREDICTOR = "predictor '"


def program_state(history: History, candidate: Candidate, base: str | Path | None = None) -> dict[str, Any]:
    """The state of the student with a candidate's texts.

    The journal holds a candidate's texts, and what belongs to a harness. Demos, field descriptions and LMs of
    predictors are the student's: without ``base`` the file has none of them, and the program that loads it keeps its
    own, but for an LM that is set on a predictor.

    Args:
        base: what ``student.save("student.json")`` wrote; default: the smallest state that ``load`` takes.

    Raises:
        ConfigurationError: ``base`` is no such file or of another program, or it is needed.
    """
    if not candidate.texts:
        raise ConfigurationError(f"{history.directory}: the texts of candidate {candidate.index} are not there.")
    if history.optimizer == "AsyncMetaHarness":
        memory = candidate.more["candidate"].get("memory")
        return _complete({"module_src": candidate.texts["source"], "memory": memory, "lm": None})
    state = {} if base is None else _read(Path(base))
    prints = history.sessions[-1].fingerprints if history.sessions else {}
    all_names = {name[len(PREDICTOR) : -1] for name in prints if name.startswith(PREDICTOR)}
    missing = sorted(all_names - candidate.texts.keys() - state.keys())
    unknown = sorted(candidate.texts.keys() - state.keys()) if base is not None else []
    if missing or unknown:
        raise ConfigurationError(
            f"{base or history.directory}: it says nothing of {', '.join(missing or unknown)}. Give what "
            'student.save("student.json") wrote for the program that was optimized, by --program student.json.'
        )
    for name, text in candidate.texts.items():
        part = state.setdefault(name, {"lm": None})
        if not isinstance(part, dict) or not isinstance(part.get("signature", {}), dict):
            raise ConfigurationError(f"{base}: {name} is no predictor's state, expected what student.save wrote.")
        if "module_src" in part or (name not in all_names and all_names):  # a dspy.Flex
            part["module_src"] = text
        else:
            part.setdefault("signature", {"fields": []})["instructions"] = text
    return _complete(state)


def _complete(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "metadata": state.get("metadata", {"dependency_versions": {}})}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigurationError(
            f'{path} is no JSON ({error}), expected what student.save("student.json") wrote.'
        ) from error
    if not isinstance(found, dict) or "metadata" not in found:
        raise ConfigurationError(f'{path} holds no program, expected what student.save("student.json") wrote.')
    return found
