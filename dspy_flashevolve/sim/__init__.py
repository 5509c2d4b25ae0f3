"""A simulated LLM server and a task whose optimum is known, to try optimizers without a GPU or an API key.

SimServer       the server in a process of its own, for a `with` block
HouseRules      the task: data, program, metric and optimum (needs dspy, imported on first use)
Profile         what a backend can do; PROFILES holds two
LengthLaw       lognormal output lengths
ReplyModel      how well the simulated model obeys and reflects
Faults          what goes wrong on purpose, and how often
ServerStats     what the server counted, with KindStats for each kind of prompt
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dspy_flashevolve.sim.backend import PROFILES, LengthLaw, Profile
from dspy_flashevolve.sim.counters import KindStats, ServerStats
from dspy_flashevolve.sim.faults import Faults
from dspy_flashevolve.sim.process import SimServer
from dspy_flashevolve.sim.replies import ReplyModel

if TYPE_CHECKING:
    from dspy_flashevolve.sim.task import HouseRules

__all__ = [
    "PROFILES",
    "Faults",
    "HouseRules",
    "KindStats",
    "LengthLaw",
    "Profile",
    "ReplyModel",
    "ServerStats",
    "SimServer",
]


def __getattr__(name: str) -> Any:
    # dspy takes a second to import, and the server needs none of it.
    if name == "HouseRules":
        from dspy_flashevolve.sim.task import HouseRules

        return HouseRules
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
