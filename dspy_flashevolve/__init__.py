"""dspy-flashevolve: DSPy optimizers on an asynchronous engine.

>>> from dspy_flashevolve import AsyncGEPA

Names are loaded when they are first used: the command line and the simulated server do without dspy, which takes
seconds to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspy_flashevolve.async_gepa import AsyncGEPA
    from dspy_flashevolve.compilation import AsyncGEPAResult
    from dspy_flashevolve.engine.errors import (
        BudgetError,
        ConfigurationError,
        DataError,
        FlashEvolveError,
        QueueClosedError,
        RolloutUnresolvedError,
        RunAbortedError,
        TransientError,
    )
    from dspy_flashevolve.observe.statistics import AsyncStats, CommitRecord

__all__ = [
    "AsyncGEPA",
    "AsyncGEPAResult",
    "AsyncStats",
    "BudgetError",
    "CommitRecord",
    "ConfigurationError",
    "DataError",
    "FlashEvolveError",
    "QueueClosedError",
    "RolloutUnresolvedError",
    "RunAbortedError",
    "TransientError",
]

_HOMES = {
    "AsyncGEPA": "async_gepa",
    "AsyncGEPAResult": "compilation",
    "AsyncStats": "observe.statistics",
    "CommitRecord": "observe.statistics",
}
"""Public name -> its module; all others are errors."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'engine.errors')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
