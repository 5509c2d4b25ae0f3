"""What stages and slots did, and FlashEvolve's rule by which slots move between stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """How a stage's requests stand.

    Args:
        waiting, running: requests in its queue, and in slots, now.
        served_seconds: time that its requests have spent in slots, summed over requests.
    """

    waiting: int
    running: int
    served_seconds: float


@dataclass(frozen=True, slots=True)
class SlotStatistics:
    """How the slots were used so far.

    Args:
        limit: slots that there are, over all endpoints.
        peak: slots that were held at once at most.
        limit_seconds: the number of slots, integrated over the time since the first request. Where a limit falls below
            what is in flight, requests keep their slots, which count as long as they are held.
        stages: stage -> its requests.
    """

    limit: int
    peak: int
    limit_seconds: float
    stages: dict[str, StageStatistics]

    @property
    def busy(self) -> int:
        """Slots held now."""
        return sum(stage.running for stage in self.stages.values())

    @property
    def busy_seconds(self) -> float:
        """Time for which slots were held, summed over slots."""
        return sum(stage.served_seconds for stage in self.stages.values())


@dataclass(frozen=True, slots=True)
class StageVisit:
    """A step's time in one stage: its requests there, from the first that came to the last that left.

    Args:
        queued, began, ended: when the first request came, when the first had a slot, and when the last left; seconds.
    """

    step: int
    stage: str
    queued: float
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class StageWindow:
    """What a stage did in the last window.

    Args:
        finished: steps whose requests it has finished.
        waiting, running: its requests now.
        share: slots that it may have.
    """

    finished: int
    waiting: int
    running: int
    share: int


Workers = Mapping[str, int | tuple[int, int]]
"""Stage -> its worker pool (FlashEvolve's K_i): the requests that it may have in flight, or the fewest and the most."""


def median_shares(windows: Mapping[str, StageWindow], bounds: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return the slots that each stage may have next, by FlashEvolve's rule (arXiv 2605.08520, section 3.4).

    The median of finished steps is taken over the stages that had work. A stage that finished less than half of it, has
    requests waiting and all of its share in use, gets a slot more; one that finished more than twice the median gets a
    slot fewer; each within its bounds.

    Args:
        windows: stage -> what it did.
        bounds: stage -> the fewest and the most slots.

    >>> slow, even, fast = StageWindow(2, 9, 4, 4), StageWindow(6, 0, 1, 8), StageWindow(13, 0, 4, 8)
    >>> windows = {"propose": slow, "screen": even, "rollout": fast}
    >>> median_shares(windows, dict.fromkeys(windows, (1, 8)))
    {'propose': 5, 'screen': 8, 'rollout': 7}
    """
    finished = [window.finished for window in windows.values() if window.finished or window.running or window.waiting]
    middle = median(finished) if finished else 0
    shares: dict[str, int] = {}
    for stage, window in windows.items():
        is_starved = 2 * window.finished < middle and window.waiting > 0 and window.running >= window.share
        change = 1 if is_starved else -1 if window.finished > 2 * middle else 0
        least, most = bounds[stage]
        shares[stage] = max(least, min(most, window.share + change))
    return shares
