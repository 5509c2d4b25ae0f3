"""dspy-flashevolve: DSPy optimizers on an asynchronous engine.

>>> from dspy_flashevolve import AsyncGEPA

What a loop, an admission rule or a staleness policy of your own needs beside these is in
:mod:`dspy_flashevolve.engine`. Names are loaded when they are first used: the command line and the simulated server do
without dspy, which takes seconds to import.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspy_flashevolve.ace.playbook import Playbook
    from dspy_flashevolve.async_ace import AsyncACE
    from dspy_flashevolve.async_gepa import AsyncGEPA
    from dspy_flashevolve.async_meta_harness import AsyncMetaHarness
    from dspy_flashevolve.engine.errors import ConfigurationError, DataError, FlashEvolveError, RunAbortedError
    from dspy_flashevolve.engine.staleness import Full, Guarded, Reflective
    from dspy_flashevolve.gepa.compilation import AsyncGEPAResult
    from dspy_flashevolve.gepa.edits import EditedText
    from dspy_flashevolve.gepa.settings import FLASHEVOLVE, Edits, Workflow
    from dspy_flashevolve.harness.program import Harness, HarnessError
    from dspy_flashevolve.modules.rewriting import StaleCandidateReflection
    from dspy_flashevolve.observe.statistics import AsyncStats
    from dspy_flashevolve.programs.run import DspyRun
    from dspy_flashevolve.sandbox.contract import Limits

__all__ = [
    "FLASHEVOLVE",
    "AsyncACE",
    "AsyncGEPA",
    "AsyncGEPAResult",
    "AsyncMetaHarness",
    "AsyncStats",
    "ConfigurationError",
    "DataError",
    "DspyRun",
    "EditedText",
    "Edits",
    "FlashEvolveError",
    "Full",
    "Guarded",
    "Harness",
    "HarnessError",
    "Limits",
    "Playbook",
    "Reflective",
    "RunAbortedError",
    "StaleCandidateReflection",
    "Workflow",
]

_HOMES = {
    "AsyncACE": "async_ace",
    "AsyncGEPA": "async_gepa",
    "AsyncGEPAResult": "gepa.compilation",
    "AsyncMetaHarness": "async_meta_harness",
    "AsyncStats": "observe.statistics",
    "DspyRun": "programs.run",
    "EditedText": "gepa.edits",
    "Edits": "gepa.settings",
    "FLASHEVOLVE": "gepa.settings",
    "Full": "engine.staleness",
    "Guarded": "engine.staleness",
    "Harness": "harness.program",
    "HarnessError": "harness.program",
    "Limits": "sandbox.contract",
    "Playbook": "ace.playbook",
    "Reflective": "engine.staleness",
    "StaleCandidateReflection": "modules.rewriting",
    "Workflow": "gepa.settings",
}
"""Public name -> its module; all others are errors."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("dspy-flashevolve")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'engine.errors')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
