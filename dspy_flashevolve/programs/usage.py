"""What LM calls have used: tokens and dollars, each call counted once, whatever thread makes it.

dspy tells the usage of a call to the tracker in its settings, and loses it on two ways. ``dspy.Parallel`` (and with it
``Module.batch``) gives each of its threads a deep copy of the tracker, and drops the copies. A thread that a program
starts itself has none of its caller's settings. So a :class:`Usage` is its own deep copy, and a call of an LM that the
run paces is counted at the call (:func:`counted_call`), beside whatever tracker the program has put around it.

.. code-block:: text

    a rollout's LM calls         -> the Usage of the rollout        -> RolloutFinished
    a reflection's               -> the Usage of the reflection     -> RequestFinished
    all others (feedback, threads that know no run or have
    outlived their rollout)      -> the Usage of the run            -> LmCallCounted
"""

from __future__ import annotations

import json
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, SupportsIndex

import dspy
from dspy.utils.usage_tracker import UsageTracker

from dspy_flashevolve.engine.scheduler import SLOT_SETTING, Slot, current_slot


@lru_cache(maxsize=256)
def rates_of(model: str) -> tuple[float, float] | None:
    """Return the dollars of a prompt token and of a completion token; None where litellm's cost map lacks the model.

    Where nobody has imported litellm, which takes seconds and asks the network, the map is read from its files.
    """
    costs: Mapping[str, Any] = getattr(sys.modules.get("litellm"), "model_cost", None) or _shipped_costs()
    entry = costs.get(model) or costs.get(model.partition("/")[2]) or {}
    prompt, completion = entry.get("input_cost_per_token"), entry.get("output_cost_per_token")
    if prompt is not None and completion is not None:
        return float(prompt), float(completion)
    litellm: Any = sys.modules.get("litellm")
    if litellm is None:
        return None
    quiet, litellm.suppress_debug_info = litellm.suppress_debug_info, True  # else it prints its list of providers
    try:  # it has rules for fine-tuned models, and for prices by size
        prompt, completion = litellm.cost_per_token(model, prompt_tokens=1_000_000, completion_tokens=1_000_000)
    except Exception:  # a plain one for models that it does not know
        return None
    finally:
        litellm.suppress_debug_info = quiet
    return prompt / 1e6, completion / 1e6


@cache
def _shipped_costs() -> dict[str, Any]:
    """Map each model to its entry in the cost map that litellm ships; empty where that is not found."""
    package = find_spec("litellm")
    for folder in () if package is None else package.submodule_search_locations or ():
        with suppress(OSError, ValueError):
            return json.loads((Path(folder) / "model_prices_and_context_window_backup.json").read_text("utf-8"))
    return {}


Entry = dict[str, Any]
"""Of one LM call: ``prompt_tokens``, ``completion_tokens``, ``total_tokens`` and what else the provider reports."""
Place = tuple[int, str]
"""Number of a step, and its stage."""
CountLate = Callable[[Place | None, str, Entry], None]
"""Counts an entry for a place (None: not known), with the model's name."""
COUNTED_BY = "flashevolve_usage"
"""The setting of dspy's with the innermost :class:`Usage`: it reaches the threads that dspy starts."""


class _Counted(Entry):
    """An entry that a :class:`Usage` has counted, for the trackers around it: another Usage does not count it again."""


class _Entries(list[Entry]):
    """The entries of one model in a :class:`Usage`; ``dspy.track_usage`` extends the list of the tracker around it."""

    def __init__(self, add: Callable[[Iterable[Entry]], None]) -> None:
        super().__init__()
        self._add = add

    def append(self, entry: Entry, /) -> None:
        self._add([entry])

    def extend(self, entries: Iterable[Entry], /) -> None:
        self._add(entries)

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> Any:
        return list, (list(self),)


class _EntriesByModel(defaultdict[str, list[Entry]]):
    """Model -> its entries."""

    def __init__(self, add: Callable[[str, Iterable[Entry]], None]) -> None:
        super().__init__()
        self._add = add

    def __missing__(self, model: str) -> list[Entry]:
        return self.setdefault(model, _Entries(partial(self._add, model)))


class Usage(UsageTracker):
    """A usage tracker that counts each LM call once, in any thread. It is its own deep copy, see the module.

    Args:
        count: takes what comes after :meth:`close`. None for the one of the run around it, with the step and stage in
            which this Usage was made. One that has its own is a run's: what it counts, a run around it counts, too.
    """

    def __init__(self, count: CountLate | None = None) -> None:
        super().__init__()
        self.usage_data: defaultdict[str, list[Entry]] = _EntriesByModel(self.add)
        self._is_of_run, self._place = count is not None, _place_here()
        self._around: Usage | None = dspy.settings.get(COUNTED_BY)
        tracker: UsageTracker | None = dspy.settings.usage_tracker
        self._tracker = None if tracker is self._around else tracker
        self._count = self._around._count if count is None and self._around is not None else count
        self._closing, self._is_closed = threading.Lock(), False

    def __deepcopy__(self, memo: dict[int, Any]) -> Usage:
        return self

    def close(self) -> None:
        """Say that its counts are read now; what comes from here on is late, and goes to the run."""
        with self._closing:
            self._is_closed = True

    def tell_run(self) -> None:
        """Hand its counts to the run, unless they have been read: no event will sum them up."""
        with self._closing:
            is_read, self._is_closed = self._is_closed, True
        if self._count is not None and not is_read:
            for model, entry in _entries(self):
                self._count(self._place, model, entry)

    def add(self, model: str, entries: Iterable[Entry]) -> None:
        """Count entries of a model, but for those that are counted already."""
        fresh = [entry for entry in entries if not isinstance(entry, _Counted)]
        with self._closing:
            is_late = self._is_closed
            if fresh and not is_late:
                list[Entry].extend(self.usage_data[model], fresh)
        if is_late and self._count is not None:
            place = _place_here() if self._is_of_run else self._place
            for entry in fresh:
                self._count(place, model, entry)
        self._pass_on(model, fresh)

    def _pass_on(self, model: str, fresh: list[Entry]) -> None:
        """Add to the trackers around it, at once: a thread's calls may come when their blocks have ended."""
        if self._tracker is not None and fresh:
            self._tracker.usage_data[model].extend(map(_Counted, fresh))
        if self._around is not None:
            tell = self._around.add if self._is_of_run else self._around._pass_on
            tell(model, fresh)


def slot_here() -> Slot | None:
    """Return the slot in which this code runs, also in a thread of ``dspy.Parallel``; None outside of any."""
    return current_slot() or dspy.settings.get(SLOT_SETTING)


def _place_here() -> Place | None:
    slot = slot_here()
    return None if slot is None else slot.step_and_stage


@contextmanager
def counting_usage() -> Generator[Usage, None, None]:
    """Count what the LM calls inside use, in whatever thread they are made.

    What threads that outlive the block use is told to the run, for the step and stage of the block; so is all of it
    where the block raises, unless it was closed, and told otherwise, before.
    """
    usage = Usage()
    with dspy.context(usage_tracker=usage, **{COUNTED_BY: usage, SLOT_SETTING: slot_here()}):
        try:
            yield usage
        except BaseException:
            usage.tell_run()
            raise
        finally:
            usage.close()


@contextmanager
def counting_for_run() -> Generator[None, None, None]:
    """Report to the run at once what each LM call inside uses, for the step and stage of the block."""
    with counting_usage() as usage:
        usage.close()
        yield


def usage_settings(count: CountLate) -> dict[str, Any]:
    """Return the settings of dspy's by which LM calls that nobody else counts are given to ``count``."""
    usage = Usage(count)
    usage.close()
    return {"usage_tracker": usage, COUNTED_BY: usage, SLOT_SETTING: None}


@contextmanager
def counted_call(others: Sequence[CountLate] = ()) -> Generator[None, None, None]:
    """Count one LM call at the call, beside the tracker that the program may have around it."""
    by: Usage | None = dspy.settings.get(COUNTED_BY)
    tracker: UsageTracker | None = dspy.settings.usage_tracker
    call = UsageTracker()
    try:
        with dspy.context(usage_tracker=call):
            yield
    finally:
        for model, entries in call.usage_data.items():
            if by is not None:
                by.add(model, entries)
            else:
                for count, entry in product(others, entries):
                    count(None, model, entry)
            if tracker is not None and tracker is not by:
                tracker.usage_data[model].extend(entries if by is None else map(_Counted, entries))


def tokens_of(tracker: UsageTracker) -> int:
    """Sum the prompt and completion tokens that the LMs reported."""
    return sum(tokens_of_call(entry) for _, entry in _entries(tracker))


def tokens_of_call(entry: Entry) -> int:
    """Sum the tokens of one call."""
    return _count(entry, "total_tokens") or _count(entry, "prompt_tokens") + _count(entry, "completion_tokens")


def calls_of(tracker: UsageTracker) -> int:
    """Count the LM calls that reported their usage."""
    return sum(1 for _ in _entries(tracker))


def cost_of(tracker: UsageTracker) -> float:
    """Sum the dollars of the calls, by litellm's cost map; a model that is not in it counts as 0."""
    return sum(cost_of_call(model, entry) for model, entry in _entries(tracker))


def cost_of_call(model: str, entry: Entry) -> float:
    """Return the dollars of one call."""
    prompt, completion = rates_of(model) or (0.0, 0.0)
    return prompt * _count(entry, "prompt_tokens") + completion * _count(entry, "completion_tokens")


def completion_tokens_of(used: Mapping[str, Sequence[dict[str, Any]]]) -> int:
    """Sum the completion tokens of what a tracker has, its ``usage_data``."""
    return sum(_count(entry, "completion_tokens") for entries in used.values() for entry in entries)


def _entries(tracker: UsageTracker) -> Iterator[tuple[str, dict[str, Any]]]:
    for model, entries in tracker.usage_data.items():
        for entry in entries:
            yield model, entry


def _count(entry: dict[str, Any], name: str) -> int:
    value = entry.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
