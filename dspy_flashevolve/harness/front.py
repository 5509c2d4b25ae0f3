"""The Pareto front of score against cost."""

from __future__ import annotations

from collections.abc import Mapping

Point = tuple[float, float]
"""(score, cost): a higher score and a lower cost are better."""


def dominates(one: Point, other: Point) -> bool:
    """At least as good in both, and better in one.

    >>> dominates((0.9, 10), (0.9, 20)), dominates((0.9, 10), (0.9, 10)), dominates((0.9, 30), (0.5, 20))
    (True, False, False)
    """
    return one[0] >= other[0] and one[1] <= other[1] and one != other


def pareto_front(points: Mapping[int, Point]) -> tuple[int, ...]:
    """The numbers of the points that no other dominates, best score first; of equal points the lowest number.

    >>> pareto_front({0: (0.5, 10), 1: (0.9, 30), 2: (0.4, 20), 3: (0.9, 30)})
    (1, 0)
    """
    front: list[int] = []
    cheapest = float("inf")
    for number in sorted(points, key=lambda one: (-points[one][0], points[one][1], one)):
        if points[number][1] < cheapest:
            front.append(number)
            cheapest = points[number][1]
    return tuple(front)
