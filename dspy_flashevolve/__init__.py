"""dspy-flashevolve: DSPy optimizers on an asynchronous engine.

>>> from dspy_flashevolve import AsyncGEPA

Names are loaded when they are first used: the command line and the simulated server do without dspy, which takes
seconds to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspy_flashevolve.ace.playbook import Bullet, Playbook
    from dspy_flashevolve.async_ace import AsyncACE
    from dspy_flashevolve.async_gepa import AsyncGEPA
    from dspy_flashevolve.async_meta_harness import AsyncMetaHarness, MetaHarnessResult
    from dspy_flashevolve.engine.admission import GapBound, LiveTickets
    from dspy_flashevolve.engine.claims import DeepestFirst
    from dspy_flashevolve.engine.control import Backlog, Fixed, MedianRate, WorkflowController
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
    from dspy_flashevolve.engine.orders import ValueFirst
    from dspy_flashevolve.engine.speculation import Speculation
    from dspy_flashevolve.engine.staleness import Full, Guarded, Reflective, StalenessPolicy
    from dspy_flashevolve.engine.stragglers import Duplicates
    from dspy_flashevolve.harness.archive import context_tokens
    from dspy_flashevolve.harness.program import Harness, HarnessError
    from dspy_flashevolve.modules.integrate import CombeeReflection, StaleCandidateReflection
    from dspy_flashevolve.modules.playbook import AdditionReconciliation, PlaybookCuration, SampleReflection
    from dspy_flashevolve.observe.statistics import (
        AceStats,
        AsyncStats,
        ChangeRecord,
        CommitRecord,
        HeadRecord,
        IntegrationRecord,
        RunStats,
        StageRecord,
    )
    from dspy_flashevolve.results import AsyncGEPAResult
    from dspy_flashevolve.sandbox.contract import Limits
    from dspy_flashevolve.workbench import Workbench

__all__ = [
    "AceStats",
    "AdditionReconciliation",
    "AsyncACE",
    "AsyncGEPA",
    "AsyncGEPAResult",
    "AsyncMetaHarness",
    "AsyncStats",
    "Backlog",
    "BudgetError",
    "Bullet",
    "ChangeRecord",
    "CombeeReflection",
    "CommitRecord",
    "ConfigurationError",
    "DataError",
    "DeepestFirst",
    "Duplicates",
    "Fixed",
    "FlashEvolveError",
    "Full",
    "GapBound",
    "Guarded",
    "Harness",
    "HarnessError",
    "HeadRecord",
    "IntegrationRecord",
    "Limits",
    "LiveTickets",
    "MedianRate",
    "MetaHarnessResult",
    "Playbook",
    "PlaybookCuration",
    "QueueClosedError",
    "Reflective",
    "RolloutUnresolvedError",
    "RunAbortedError",
    "RunStats",
    "SampleReflection",
    "Speculation",
    "StageRecord",
    "StaleCandidateReflection",
    "StalenessPolicy",
    "TransientError",
    "ValueFirst",
    "Workbench",
    "WorkflowController",
    "context_tokens",
]

_HOMES = {
    "AceStats": "observe.statistics",
    "AdditionReconciliation": "modules.playbook",
    "AsyncACE": "async_ace",
    "Bullet": "ace.playbook",
    "Playbook": "ace.playbook",
    "PlaybookCuration": "modules.playbook",
    "SampleReflection": "modules.playbook",
    "ChangeRecord": "observe.statistics",
    "StageRecord": "observe.statistics",
    "Duplicates": "engine.stragglers",
    "WorkflowController": "engine.control",
    "MedianRate": "engine.control",
    "Fixed": "engine.control",
    "Backlog": "engine.control",
    "Speculation": "engine.speculation",
    "DeepestFirst": "engine.claims",
    "ValueFirst": "engine.orders",
    "LiveTickets": "engine.admission",
    "GapBound": "engine.admission",
    "AsyncGEPA": "async_gepa",
    "AsyncGEPAResult": "results",
    "AsyncMetaHarness": "async_meta_harness",
    "MetaHarnessResult": "async_meta_harness",
    "Limits": "sandbox.contract",
    "Harness": "harness.program",
    "HarnessError": "harness.program",
    "context_tokens": "harness.archive",
    "AsyncStats": "observe.statistics",
    "CombeeReflection": "modules.integrate",
    "CommitRecord": "observe.statistics",
    "Full": "engine.staleness",
    "Guarded": "engine.staleness",
    "HeadRecord": "observe.statistics",
    "IntegrationRecord": "observe.statistics",
    "Reflective": "engine.staleness",
    "RunStats": "observe.statistics",
    "StaleCandidateReflection": "modules.integrate",
    "StalenessPolicy": "engine.staleness",
    "Workbench": "workbench",
}
"""Public name -> its module; all others are errors."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'engine.errors')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
