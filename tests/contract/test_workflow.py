"""The validation prefix (FlashEvolve section 3.3) and worker pools: `Workflow`."""

from __future__ import annotations

from typing import Any

import pytest

from dspy_flashevolve import ConfigurationError, Workflow
from tests.contract.surface import check_ends, check_winner
from tests.contract.worlds import World, play


def test_worker_pools_bound_what_the_stages_of_a_run_have_in_flight() -> None:
    stages = "rollout", "propose", "integrate", "screen", "prefix", "validate"
    pools = Workflow(workers=dict.fromkeys(stages, 1))
    narrow, wide = (
        play(World(), 200, num_threads=16, workflow=workflow).detailed_results for workflow in (pools, Workflow())
    )
    for details in (narrow, wide):
        check_ends(details.async_stats)
        check_winner(details, 12)
    assert narrow.async_stats.peak_slots <= len(stages) < wide.async_stats.peak_slots


@pytest.mark.parametrize("arguments", [{"validate": 0.0}, {"validate": 1.5}, {"validate": -1.0}, {"rounds": 0}])
def test_a_share_that_is_none_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(arguments))):
        play(World(), 60, workflow=Workflow(**arguments))
