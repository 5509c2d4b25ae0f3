"""What a token of a model costs, by litellm's cost map."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@lru_cache(maxsize=256)
def rates_of(model: str) -> tuple[float, float] | None:
    """Return the dollars of a prompt token and of a completion token; None where litellm's cost map lacks the model.

    Where nobody has imported litellm, which takes seconds and asks the network, the map is read from its files.
    """
    if "litellm" not in sys.modules and (shipped := _shipped_rates()):
        names = (model, model.partition("/")[2])
        entry = next((shipped[name] for name in names if name in shipped), {})
        rates = entry.get("input_cost_per_token"), entry.get("output_cost_per_token")
        return None if rates[0] is None or rates[1] is None else (float(rates[0]), float(rates[1]))
    import litellm

    quiet = litellm.suppress_debug_info
    litellm.suppress_debug_info = True  # else it prints its list of providers for a model that it does not know
    try:
        prompt, completion = litellm.cost_per_token(model, prompt_tokens=1_000_000, completion_tokens=1_000_000)
    except Exception:  # litellm raises a plain Exception for models that it does not know
        return None
    finally:
        litellm.suppress_debug_info = quiet
    return prompt / 1e6, completion / 1e6


@cache
def _shipped_rates() -> dict[str, Any]:
    """Map each model to its entry in the cost map that litellm ships; empty where that is not found."""
    package = find_spec("litellm")
    for folder in () if package is None else package.submodule_search_locations or ():
        with suppress(OSError, ValueError):
            return json.loads((Path(folder) / "model_prices_and_context_window_backup.json").read_text("utf-8"))
    return {}
