"""What the benchmark of rollouts in actors makes of its figures."""

from __future__ import annotations

from benchmarks.ray_rollouts import Pace, report


def test_a_pace_is_told_beside_this_process_and_what_one_process_can_hand_out_bounds_many_cores() -> None:
    paces = [Pace("work", 0, 100, 10.0, 9.0), Pace("work", 1, 100, 10.0, 0.5), Pace("work", 2, 100, 5.0, 0.5)]
    said = report(paces)
    assert "2 actors" in said
    assert "2.00" in said
    assert "16 cores: min(15 x 10, 200) = 150" in said
    assert "64 cores: min(63 x 10, 200) = 200" in said
