"""GEPA on the engine. A search of the user's own needs :class:`Search`, and what its methods take and return."""

from dspy_flashevolve.gepa.search import Observation, Search, Start

__all__ = ["Observation", "Search", "Start"]
