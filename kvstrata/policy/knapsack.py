"""One choice for each item, least total loss within a total cost: the multiple-choice knapsack behind a plan.

greedy climbs each item's lower convex hull of (cost, loss) by marginal gain; exact is dynamic programming, where it is cheap. Knows
nothing of tiers or pages.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MOST_STATES = 20_000_000
"""Items x costs that `exact` takes on; beyond, greedy stands in, whose distance from the optimum is at most one step of one item."""


def hull(cost: Ints, loss: Floats) -> list[int]:
    """Choices of one item on the lower convex hull, ascending in cost from the cheapest one: each has less loss than the one before,
    and the gain for each unit of cost falls."""
    path = hulls(cost[None], loss[None])[0]
    return [int(c) for c in path if c >= 0]


def hulls(cost: Ints, loss: Floats) -> Ints:
    """hull of each item: cost, loss [items, choices] -> choices int64 [items, choices], -1 where a hull has ended."""
    # choices first: a reduction over them is then one over whole rows
    cost, loss = np.ascontiguousarray(cost.T), np.ascontiguousarray(loss.T)
    choices, items = cost.shape
    paths = np.full((choices, items), -1, np.int64)
    rows = np.arange(items)
    # the cheapest choice, of equally cheap ones the one that loses least
    at = np.where(cost == cost.min(0), loss, np.inf).argmin(0)
    for step in range(choices):
        paths[step, rows] = at
        here = np.arange(len(rows))
        price, saved = cost - cost[at, here], loss[at, here] - loss
        gain = np.where((price > 0) & (saved > 0), saved / np.maximum(price, 1), 0.0)
        best = gain.max(0)
        more = np.flatnonzero(best)
        if not len(more):
            break
        if len(more) < len(rows):
            rows, cost, loss, gain, price, best = rows[more], cost[:, more], loss[:, more], gain[:, more], price[:, more], best[more]
        # of choices on one line the last: those between are no corners
        at = np.where(gain == best, price, -1).argmax(0)
    return paths.T


def _steps(cost: Ints, loss: Floats) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """The items' hulls, and each step up one of them: the item, how many steps lie below, and the choices that it leads from and to."""
    paths = hulls(cost, loss)
    item, step = np.nonzero(paths[:, 1:] >= 0)
    return paths, item, step, paths[item, step], paths[item, step + 1]


def greedy(cost: Ints, loss: Floats, limit: int, preference: Floats) -> Ints:
    """cost, loss [items, choices], limit: of the sum -> a choice for each item, int64 [items]; the cheapest ones where nothing fits.

    preference [items]: among equal gains, the lowest goes first. A step that does not fit is left out, and cheaper ones may follow.
    """
    if not len(cost):
        return np.zeros(0, np.int64)
    by_preference = np.argsort(preference, kind="stable")
    cost, loss = cost[by_preference], loss[by_preference]
    paths, item, step, before, after = _steps(cost, loss)
    price = cost[item, after] - cost[item, before]
    # a hull's gains fall, so an item's steps keep their order
    order = np.argsort((loss[item, after] - loss[item, before]) / price, kind="stable")
    price = price[order]
    left = limit - int(cost[np.arange(len(cost)), paths[:, 0]].sum())
    fits = int(np.searchsorted(np.cumsum(price), left, side="right"))
    taken = np.bincount(item[order[:fits]], minlength=len(cost))
    left -= int(price[:fits].sum())
    # past the first step that is too dear, those that still fit
    for i in fits + np.flatnonzero(price[fits:] <= left):
        if price[i] <= left and taken[item[order[i]]] == step[order[i]]:
            taken[item[order[i]]] += 1
            left -= int(price[i])
            if not left:
                break
    chosen = np.empty(len(cost), np.int64)
    chosen[by_preference] = paths[np.arange(len(cost)), taken]
    return chosen


def cover(cost: Ints, loss: Floats, most: float, preference: Floats) -> Ints:
    """As greedy, but of least cost, as far as one step of one item is, whose losses are `most` at most in sum; where that is out of reach,
    the choices that lose least."""
    if not len(cost):
        return np.zeros(0, np.int64)
    by_preference = np.argsort(preference, kind="stable")
    cost, loss = cost[by_preference], loss[by_preference]
    paths, item, step, before, after = _steps(cost, loss)
    gain = loss[item, before] - loss[item, after]
    order = np.argsort(-gain / (cost[item, after] - cost[item, before]), kind="stable")
    left = float(loss[np.arange(len(cost)), paths[:, 0]].sum()) - np.concatenate([[0.0], np.cumsum(gain[order])])
    enough = left <= most
    steps = int(enough.argmax()) if enough.any() else len(order)
    taken = np.bincount(item[order[:steps]], minlength=len(cost))
    chosen = np.empty(len(cost), np.int64)
    chosen[by_preference] = paths[np.arange(len(cost)), taken]
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
