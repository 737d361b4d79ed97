"""How many pages of anchors a plan has: tokens that each layer and KV head keeps a finer copy of, paid for out of the same bytes as tiers.

Knows bytes, losses and shares; which tokens they are is chosen during a step (store/anchors.py).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvstrata.policy.budget import Budget, Signals
from kvstrata.policy.knapsack import SOLVERS
from kvstrata.types import Tier

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
GAINS: Mapping[Tier, tuple[tuple[float, float], ...]] = {
    Tier.INT2: ((0.01, 0.75), (0.02, 0.58), (0.05, 0.354), (0.10, 0.273)),
    Tier.INT3: ((0.02, 0.60), (0.05, 0.44)),
    Tier.INT4: ((0.02, 0.658), (0.05, 0.56)),
}
"""(share of the body's tokens that are anchors, KL with them over KL without), by the tier that everything else has: qwen05, anchors at
BF16, which INT8 equals within a few percent. INT2 with 5 and 10% and INT4 with 2% are means of two conversations
(docs/results/hyquant.json). The other five are preliminary, of no file of results: that file has them on one conversation, where anchors
gain more (docs/planner.md)."""
POWER = 1.85
"""What a ratio of KLs is believed of as a ratio of losses: its root of this degree. With the ratio itself plans bought anchors for more
planes than they were worth (docs/planner.md)."""
CLASSES = 512
"""Pages beyond which a share is decided on classes of pages alike, not page by page."""


def pages_of(share: float, body: int) -> int:
    """Pages of anchors that are a share of `body` pages: a share of something is never nothing."""
    return math.ceil(round(share * body, 9))


def factors(share: float, tiers: tuple[Tier, ...], tier: Tier) -> Floats:
    """What a share of anchors at `tier` leaves of a page's loss when it is gone, which is all of it, and at each of `tiers`: float64
    [1 + tiers]. Straight in the logarithm between what was measured, the last of it beyond; no gain from the anchors' tier on."""
    out = np.ones(1 + len(tiers))
    for i, t in enumerate(tiers):
        if t in GAINS and t < tier:
            at, kept = zip((0.0, 1.0), *GAINS[t], strict=True)
            out[1 + i] = np.exp(np.interp(share, at, np.log(kept)) / POWER)
    return out


@dataclass(frozen=True, slots=True)
class Anchored:
    """pages: of anchors that a plan has; budget: what they leave for everything else; factors: of losses, as `factors` has them."""

    pages: int
    budget: Budget
    factors: Floats


def buy(
    shares: tuple[float, ...], tier: Tier, tiers: tuple[Tier, ...], losses: Floats, most: Ints, signals: Signals, budget: Budget,
    solver: str,
) -> Anchored:  # fmt: skip
    """Of `shares` the one with which pages lose least in sum, or as much of one as leaves every page the lowest tier.

    losses [pages, 1 + tiers] of the body's pages gone, and at each tier; most [pages]: bits of the highest tier that each can have, 0 where
    it is gone. What is held stays, for a share that went up and down would cost planes each time that it went up: it is no choice where no
    step follows that chooses, and a choice never takes fewer. No anchors where anything is gone, or not all fits without them, and none for
    a quality: what a loss means there was measured without."""
    body, price = len(losses), budget.tier_bytes
    unit = price[tier] if not signals.anchor_pages else max(price[tier], price[signals.anchor_tier])
    dense = (budget.num_pages - body) * price[Tier.BF16]
    room = budget.limit - dense - body * price[tiers[0]]
    none = Anchored(0, budget, factors(0.0, tiers, tier))
    if budget.quality is not None or signals.survivor_pages or not body or not most.all() or room < unit or not any(shares):
        return none
    fit = room // unit
    kept = min(signals.anchor_pages, fit, pages_of(max(shares), body))
    options = sorted({min(max(pages_of(share, body), kept), fit) for share in shares}) if signals.choosing else [kept]

    def of(pages: int) -> Anchored:
        # until they are chosen anew those that are held take what they take
        taken = max(pages * price[tier], min(pages, signals.anchor_pages) * unit)
        rest = replace(budget, bits=None, bytes=budget.limit - taken) if pages else budget
        return Anchored(pages, rest, factors(pages / body, tiers, tier))

    offers = [of(pages) for pages in options]
    if len(offers) == 1:
        return offers[0]
    cost, loss, barred = _classes(np.array([price[t] for t in tiers], np.int64), losses[:, 1:], most[:, None] < np.array(tiers))
    newest = -np.arange(len(cost), dtype=np.float64)
    worst = 2 * loss.max() + 1
    totals = []
    for offer in offers:
        left = np.where(barred, worst, loss * offer.factors[1:])
        chosen = SOLVERS[solver if body <= CLASSES else "greedy"](cost, left, offer.budget.limit - dense, newest)
        totals.append(float(left[np.arange(len(cost)), chosen].sum()))
    return offers[int(np.argmin(totals))]


def _classes(price: Ints, losses: Floats, barred: NDArray[np.bool_]) -> tuple[Ints, Floats, NDArray[np.bool_]]:
    """Pages alike as one item: cost, loss [classes, tiers] in sum, and the tiers that none of a class can have. Up to CLASSES pages each is
    a class of its own."""
    barred = barred.copy()
    barred[:, 0] = False
    if len(losses) <= CLASSES:
        order, starts = np.arange(len(losses)), np.arange(len(losses))
    else:
        free = barred.sum(1)
        order = np.lexsort((losses[:, 0], free))
        ends = np.flatnonzero(np.diff(free[order])) + 1
        starts = np.union1d(np.arange(0, len(losses), -(-len(losses) // CLASSES)), ends)
    sizes = np.diff(np.append(starts, len(losses)))
    barred = barred[order][starts]
    # a tier that a page may not have costs as little as the lowest, and loses more than any
    cost = np.where(barred, price[0], price) * sizes[:, None]
    return cost, np.add.reduceat(losses[order], starts), barred
