"""Counting the tokens of one rollout or one reflection.

``dspy.track_usage`` gives each its own tracker and rolls the counts up into the caller's.
"""

from __future__ import annotations

from typing import Any

from dspy.utils.usage_tracker import UsageTracker


def tokens_of(tracker: UsageTracker) -> int:
    """Prompt and completion tokens that the LMs reported.

    >>> tracker = UsageTracker()
    >>> tracker.add_usage("lm", {"prompt_tokens": 3, "completion_tokens": 4})
    >>> tokens_of(tracker)
    7
    """
    return sum(_tokens(entry) for entries in tracker.usage_data.values() for entry in entries)


def _tokens(entry: dict[str, Any]) -> int:
    return _count(entry, "total_tokens") or _count(entry, "prompt_tokens") + _count(entry, "completion_tokens")


def _count(entry: dict[str, Any], name: str) -> int:
    value = entry.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
