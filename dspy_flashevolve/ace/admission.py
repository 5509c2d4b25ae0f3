"""How many samples may be under way at once, beside validations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dspy_flashevolve.engine.admission import Load

LEARNING_SHARE = 0.75
"""Of the slots, what samples may take while a playbook is validated."""


@dataclass(frozen=True)
class SharedWidth:
    """As many live samples as there are slots, each of which has one request in flight at most; fewer, by a share,
    while a playbook is validated: a request of a sample goes before one of a validation, which would wait for ever.

    Args:
        limit: slots at most.
        is_validating: whether a validation is under way.
        share: of the slots that there are now, what samples may take beside a validation; above 0, up to 1.
    """

    limit: int
    is_validating: Callable[[], bool]
    share: float = LEARNING_SHARE

    def admits(self, load: Load) -> bool:
        """See :class:`~dspy_flashevolve.engine.admission.Admission`."""
        slots = self.limit if load.slots is None else min(self.limit, load.slots)
        return load.live < (max(1, math.ceil(self.share * slots)) if self.is_validating() else slots)

    def is_narrowed(self, load: Load) -> bool:
        """See :class:`~dspy_flashevolve.engine.admission.Admission`: never, the budget bounds tickets one by one."""
        del load
        return False
