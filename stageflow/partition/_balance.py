"""Cutting a chain into consecutive groups of nearly equal weight. Plain Python: units are numbers here.

Exact, not a heuristic: models have at most some hundred units, so trying every last cut is cheap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

__all__ = ["balance"]


def balance(costs: Sequence[float], groups: int, shared: Iterable[tuple[int, int, float]] = ()) -> list[int]:
    """Cut a chain of units into consecutive groups whose heaviest is as light as possible.

    Among all such cuts the most even one is taken: first the least sum of squared weights, then the least sum of squared
    counts (which spreads units that cost nothing), then the one whose earlier groups are longer.

    Args:
        costs: what each unit costs, none below 0.
        groups: number of groups, none of them empty.
        shared: costs that two units have in common, as ``(earlier unit, later unit, cost)``: a group that holds both
            counts it once. What three units share is two such pairs, each with the next.

    Returns:
        Number of units in each group.
    """
    units = len(costs)
    if not 1 <= groups <= units:
        raise ValueError(f"{units} units can't be cut into {groups} groups")
    twins: list[list[tuple[int, float]]] = [[] for _ in costs]
    for earlier, later, cost in shared:
        twins[earlier].append((later, cost))

    def last_groups(end: int) -> Iterator[tuple[int, float]]:
        """Where a group that ends at ``end`` may start, and its weight then: from the shortest to the longest."""
        weight: float = 0  # of ints the sums stay exact
        for start in range(end - 1, -1, -1):
            weight += costs[start] - sum(cost for later, cost in twins[start] if later < end)
            yield start, weight

    # Two passes, since "the lightest heaviest group, then the most even" can't be built up from prefixes in one: a prefix
    # may well be heavier than it must be, if a later group is heavier still.
    heaviest: list[list[float]] = [[0] + [math.inf] * units] + [[math.inf] * (units + 1) for _ in range(groups)]
    for end in range(1, units + 1):
        for start, weight in last_groups(end):
            for group in range(1, groups + 1):
                heaviest[group][end] = min(heaviest[group][end], max(heaviest[group - 1][start], weight))
    limit = heaviest[groups][units]

    never = (math.inf, math.inf)
    uneven: list[list[tuple[float, float]]] = [[(0, 0)] + [never] * units] + [[never] * (units + 1) for _ in range(groups)]
    cuts = [[0] * (units + 1) for _ in range(groups + 1)]
    for end in range(1, units + 1):
        for start, weight in last_groups(end):
            if weight > limit:
                break
            for group in range(1, groups + 1):
                squares, counts = uneven[group - 1][start]
                candidate = (squares + weight**2, counts + (end - start) ** 2)
                if candidate < uneven[group][end]:  # so of equal ones the first, whose last group is the shortest
                    uneven[group][end], cuts[group][end] = candidate, start

    sizes: list[int] = []
    end = units
    for group in range(groups, 0, -1):
        sizes.append(end - cuts[group][end])
        end = cuts[group][end]
    return sizes[::-1]
