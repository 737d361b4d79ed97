"""One choice for each item, least total loss within a total cost: the multiple-choice knapsack behind a plan.

greedy climbs each item's lower convex hull of (cost, loss) by marginal gain; exact is dynamic programming, where it is cheap. Knows
nothing of tiers or pages.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MOST_STATES = 20_000_000
"""Items x costs that `exact` takes on; beyond, greedy stands in, whose distance from the optimum is at most one step of one item."""


def hull(cost: Ints, loss: Floats) -> list[int]:
    """Choices of one item on the lower convex hull, ascending in cost from the cheapest one: each has less loss than the one before,
    and the gain for each unit of cost falls."""
    order = sorted(range(len(cost)), key=lambda c: (cost[c], loss[c]))
    kept: list[int] = []
    for c in order:
        if kept and loss[c] >= loss[kept[-1]]:
            continue
        while len(kept) > 1 and _gain(cost, loss, kept[-1], c) >= _gain(cost, loss, kept[-2], kept[-1]):
            kept.pop()
        if kept and cost[c] == cost[kept[-1]]:
            kept.pop()
        kept.append(c)
    return kept


def _gain(cost: Ints, loss: Floats, a: int, b: int) -> float:
    step = int(cost[b] - cost[a])
    return float(loss[a] - loss[b]) / step if step else float("inf")


def greedy(cost: Ints, loss: Floats, limit: int, preference: Floats) -> Ints:
    """cost, loss [items, choices], limit: of the sum -> a choice for each item, int64 [items]; the cheapest ones where nothing fits.

    preference [items]: among equal gains, the lowest goes first. A step that does not fit is left out, and cheaper ones may follow.
    """
    items = len(cost)
    paths: dict[bytes, list[int]] = {}
    steps: list[tuple[float, float, int, int, int]] = []
    chosen = np.zeros(items, np.int64)
    for i in range(items):
        # pages of one kind are many: one hull serves them all
        key = cost[i].tobytes() + loss[i].tobytes()
        if key not in paths:
            paths[key] = hull(cost[i], loss[i])
        path = paths[key]
        chosen[i] = path[0]
        steps += [(-_gain(cost[i], loss[i], a, b), float(preference[i]), i, a, b) for a, b in pairwise(path)]
    left = limit - int(cost[np.arange(items), chosen].sum())
    for _, _, i, a, b in sorted(steps):
        price = int(cost[i, b] - cost[i, a])
        if chosen[i] == a and price <= left:
            chosen[i], left = b, left - price
    return chosen


def exact(cost: Ints, loss: Floats, limit: int, preference: Floats) -> Ints:
    """As greedy, with the least possible loss; greedy itself where there are more than MOST_STATES states."""
    items = len(cost)
    floor = cost.min(1, initial=0) if not items else cost.min(1)
    extra = cost - floor[:, None]
    unit = int(np.gcd.reduce(extra, axis=None)) if items else 0
    spare = limit - int(floor.sum())
    if spare < 0 or not unit:
        return greedy(cost, loss, limit, preference)
    extra = extra // unit
    room = min(spare // unit, int(extra.max(1).sum()))
    if items * (room + 1) > MOST_STATES:
        return greedy(cost, loss, limit, preference)
    best = np.zeros(room + 1)
    taken = np.zeros((items, room + 1), np.int8)
    for i in range(items):
        after = np.full(room + 1, np.inf)
        for c in range(cost.shape[1]):
            step = int(extra[i, c])
            if step > room:
                continue
            total = np.full(room + 1, np.inf)
            total[step:] = best[: room + 1 - step] + loss[i, c]
            better = total < after
            after[better], taken[i, better] = total[better], c
        best = after
    chosen = np.zeros(items, np.int64)
    at = room
    for i in range(items - 1, -1, -1):
        chosen[i] = taken[i, at]
        at -= int(extra[i, chosen[i]])
    return chosen


SOLVERS = {"greedy": greedy, "exact": exact}
