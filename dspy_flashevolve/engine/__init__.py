"""The engine of every evolution loop: one scheduler, one run. It knows neither dspy nor gepa.

Here are the types that a loop, an admission rule or a staleness policy of your own needs; docs/adding-an-algorithm.md
writes a loop with them, docs/staleness.md a policy.
"""

from dspy_flashevolve.engine.errors import (
    BudgetError,
    JournalError,
    RolloutUnresolvedError,
    RunDirectoryError,
    TransientError,
)
from dspy_flashevolve.engine.provider import RetryPolicy
from dspy_flashevolve.engine.requests import Rollout, gather
from dspy_flashevolve.engine.run import Observer
from dspy_flashevolve.engine.staleness import Admit, Discard, History, Integrate, Look, StalenessPolicy
from dspy_flashevolve.engine.steps import Admission, End, EndKind, LiveSteps, Load, NothingToDoError, Step, StepEnded

__all__ = [
    "Admission",
    "Admit",
    "BudgetError",
    "Discard",
    "End",
    "EndKind",
    "History",
    "Integrate",
    "JournalError",
    "LiveSteps",
    "Load",
    "Look",
    "NothingToDoError",
    "Observer",
    "RetryPolicy",
    "Rollout",
    "RolloutUnresolvedError",
    "RunDirectoryError",
    "StalenessPolicy",
    "Step",
    "StepEnded",
    "TransientError",
    "gather",
]
