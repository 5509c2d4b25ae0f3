"""dspy-flashevolve: DSPy optimizers on an asynchronous engine.

>>> from dspy_flashevolve import AsyncGEPA
"""

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
