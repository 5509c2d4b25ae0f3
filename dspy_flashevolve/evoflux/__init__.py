"""Evoflux: workflows of tool calls that are planned, checked, run and repaired while a question is answered.

>>> from dspy_flashevolve.evoflux import Evoflux

The servers of :class:`DirectoryWorld` need the extra ``evoflux``.
"""

from dspy_flashevolve.evoflux.execution import EvofluxStats, Execution, NodeRun, World
from dspy_flashevolve.evoflux.mcp import DirectoryWorld
from dspy_flashevolve.evoflux.program import Evoflux
from dspy_flashevolve.evoflux.tools import ToolSpec
from dspy_flashevolve.evoflux.workflow import Complaint, Node, Reference, Workflow

__all__ = [
    "Complaint",
    "DirectoryWorld",
    "Evoflux",
    "EvofluxStats",
    "Execution",
    "Node",
    "NodeRun",
    "Reference",
    "ToolSpec",
    "Workflow",
    "World",
]
