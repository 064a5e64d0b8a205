"""Cutting a chain into consecutive groups of nearly equal weight. Plain Python: units are numbers here.

Exact, not a heuristic: models have at most some hundred units, so trying every last cut is cheap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Shared", "balance"]

Shared = Iterable[tuple[int, int, float]]
"""Costs that two units have in common, as ``(earlier unit, later unit, cost)``: a group that holds both counts it once. What
three units share is two such pairs, each with the next."""


def balance(
    costs: Sequence[float],
    groups: int,
    shared: Shared = (),
    *,
    speeds: Sequence[float] | None = None,
    sizes: Sequence[float] | None = None,
    shared_sizes: Shared = (),
    limits: Sequence[float] | None = None,
) -> list[int] | None:
    """Cut a chain of units into consecutive groups whose heaviest is as light as possible.

    Among all such cuts the most even one is taken: first the least sum of squared weights, then the least sum of squared
    counts (which spreads units that cost nothing), then the one whose earlier groups are longer.

    Args:
        costs: what each unit costs, none below 0.
        groups: number of groups, none of them empty.
        shared: of the costs.
        speeds: what the weight of each group is divided by. Default: all are equally fast.
        sizes: what each unit takes of the room of its group. Default: nothing.
        shared_sizes: of the sizes.
        limits: the room of each group. Default: without end.

    Returns:
        Number of units in each group; None if there is no cut that keeps within the limits.
    """
    units = len(costs)
    if not 1 <= groups <= units:
        raise ValueError(f"{units} units can't be cut into {groups} groups")
    twins, size_twins = _twins(units, shared), _twins(units, shared_sizes)
    room = math.inf if limits is None or sizes is None else max(limits)

    def last_groups(end: int) -> Iterator[tuple[int, list[float]]]:
        """Where a group that ends at ``end`` may start, from the shortest to the longest, and what it then weighs as the
        first group, as the second, and so on: infinitely much where there is no room for it."""
        weight: float = 0  # of ints the sums stay exact
        size: float = 0
        for start in range(end - 1, -1, -1):
            weight += costs[start] - sum(cost for later, cost in twins[start] if later < end)
            if sizes is not None:
                size += sizes[start] - sum(part for later, part in size_twins[start] if later < end)
                if size > room:
                    return
            weights = [weight] * groups if speeds is None else [weight / speed for speed in speeds]
            if limits is not None:
                weights = [one if size <= limit else math.inf for one, limit in zip(weights, limits, strict=True)]
            yield start, weights

    # Two passes, since "the lightest heaviest group, then the most even" can't be built up from prefixes in one: a prefix
    # may well be heavier than it must be, if a later group is heavier still.
    heaviest: list[list[float]] = [[0] + [math.inf] * units] + [[math.inf] * (units + 1) for _ in range(groups)]
    for end in range(1, units + 1):
        for start, weights in last_groups(end):
            for group in range(1, groups + 1):
                heaviest[group][end] = min(heaviest[group][end], max(heaviest[group - 1][start], weights[group - 1]))
    limit = heaviest[groups][units]
    if limit == math.inf:
        return None

    never = (math.inf, math.inf)
    uneven: list[list[tuple[float, float]]] = [[(0, 0)] + [never] * units] + [[never] * (units + 1) for _ in range(groups)]
    cuts = [[0] * (units + 1) for _ in range(groups + 1)]
    for end in range(1, units + 1):
        for start, weights in last_groups(end):
            for group, weight in enumerate(weights, 1):
                if weight > limit:
                    continue
                squares, counts = uneven[group - 1][start]
                candidate = (squares + weight**2, counts + (end - start) ** 2)
                if candidate < uneven[group][end]:  # so of equal ones the first, whose last group is the shortest
                    uneven[group][end], cuts[group][end] = candidate, start

    lengths: list[int] = []
    end = units
    for group in range(groups, 0, -1):
        lengths.append(end - cuts[group][end])
        end = cuts[group][end]
    return lengths[::-1]


def _twins(units: int, shared: Shared) -> list[list[tuple[int, float]]]:
    twins: list[list[tuple[int, float]]] = [[] for _ in range(units)]
    for earlier, later, cost in shared:
        twins[earlier].append((later, cost))
    return twins
