"""Counting the tokens and the cost of one rollout, one reflection or one integration.

``dspy.track_usage`` gives each its own tracker and rolls the counts up into the caller's.
"""

from __future__ import annotations

from functools import lru_cache
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


def calls_of(tracker: UsageTracker) -> int:
    """LM calls that reported their usage."""
    return sum(len(entries) for entries in tracker.usage_data.values())


def cost_of(tracker: UsageTracker) -> float:
    """Dollars of the calls, by litellm's cost map; a model that is not in it counts as 0."""
    return sum(
        price_of(model, _count(entry, "prompt_tokens"), _count(entry, "completion_tokens")) or 0.0
        for model, entries in tracker.usage_data.items()
        for entry in entries
    )


@lru_cache(maxsize=256)
def rates_of(model: str) -> tuple[float, float] | None:
    """Dollars a prompt token and a completion token, by litellm's cost map; None where the model is not in it."""
    import litellm  # seconds to import, and only runs with a limit in dollars need it

    quiet = litellm.suppress_debug_info
    litellm.suppress_debug_info = True  # else it prints its list of providers for a model that it does not know
    try:
        prompt, completion = litellm.cost_per_token(model, prompt_tokens=1_000_000, completion_tokens=1_000_000)
    except Exception:  # litellm raises a plain Exception for models that it does not know
        return None
    finally:
        litellm.suppress_debug_info = quiet
    return prompt / 1e6, completion / 1e6


def price_of(model: str, prompt_tokens: int, completion_tokens: int) -> float | None:
    """Dollars of one call; None where the model's price is not known.

    >>> price_of("no-such-model", 10, 10) is None
    True
    """
    rates = rates_of(model)
    return None if rates is None else rates[0] * prompt_tokens + rates[1] * completion_tokens


def _tokens(entry: dict[str, Any]) -> int:
    return _count(entry, "total_tokens") or _count(entry, "prompt_tokens") + _count(entry, "completion_tokens")


def _count(entry: dict[str, Any], name: str) -> int:
    value = entry.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
