"""What pages can be bought at: whole at a tier, or some of their tokens, gathered, at the tier of survivors; and what is bought.

Knows bytes and losses; nothing of tags, attention or conversations.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvstrata.policy.budget import Budget, Signals
from kvstrata.policy.knapsack import SOLVERS, cover
from kvstrata.policy.thinned import FILL
from kvstrata.types import PAGE_SIZE, Tier

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SHARES = (1 / 4, 1 / 2, 3 / 4)
"""Shares of a page's tokens that can be bought."""
KEPT_POWER = 0.4
"""Of the attention that later turns pay, what a share f of the tokens gets, chosen for each layer and KV head by what asked before, is
f ** 0.4: 0.44, 0.60 and 0.81 were measured at 1/8, 1/4 and 1/2 (intent/heads/qwen05.json, `mass_kept` of the rule)."""
SLACK = 64
"""Tokens that may gather before survivors are chosen anew."""
GATHERING = -(-SLACK // PAGE_SIZE)
"""Pages that those take."""
FEW = 256
"""Pages beyond which a few that are not full do not count."""
_OF_BITS = {int(t): t for t in Tier}


@dataclass(frozen=True, slots=True)
class Chosen:
    """tiers: of the body's pages. thinned: which of them give tokens up. survivors: pages that what lives on of them takes. cost: bytes,
    loss: the sum, of all."""

    tiers: list[Tier]
    thinned: NDArray[np.bool_]
    survivors: int
    cost: int
    loss: float


@dataclass(frozen=True, slots=True)
class Market:
    """What each page of the body can be bought at: cost, loss [pages, choices], out of EVICTED, each tier, and SHARES of its tokens at
    `tier`, that of survivors. there: pages that hold tokens of their own; held: their tiers. limit: bytes for all; unit: of a page of
    survivors."""

    tiers: tuple[Tier, ...]
    tier: Tier
    cost: Ints
    loss: Floats
    there: NDArray[np.bool_]
    held: Ints
    limit: int
    unit: int

    @classmethod
    def of(
        cls, tiers: tuple[Tier, ...], thin: bool, losses: Floats, kept: NDArray[np.bool_], held: Ints, alive: Floats, signals: Signals,
        budget: Budget,
    ) -> "Market":  # fmt: skip
        """losses [pages, 1 + tiers]: of pages that are gone, and at each tier. kept: pages that lose no token. held: bits of each page's
        tier, 0 where it is gone. alive: shares of such pages' tokens that live on. thin: whether single tokens go."""
        n = len(losses)
        price = np.array([0, *(budget.tier_bytes[t] for t in tiers)], np.int64)
        limit = budget.limit - (budget.num_pages - n) * budget.tier_bytes[Tier.BF16]
        there = held > Tier.EVICTED
        taken = signals.survivor_pages * budget.tier_bytes[signals.survivor_tier] if signals.survivor_pages else 0
        short = bool(there.sum() * price[1] + taken > limit) and budget.quality is None
        gone = ~there & (alive > 0) & short
        # what lives on at a tier stays there
        tier = signals.survivor_tier if signals.survivor_pages else _survivors_tier(tiers, losses, price, limit, held[there & ~kept])
        unit = budget.tier_bytes[tier]
        # a page that lost planes cannot win them back
        most = np.where(there, np.maximum(held, int(tiers[0])), int(Tier.EVICTED))
        barred = np.array([0, *tiers])[None, :] > most[:, None]
        barred[:, 0] = there & (kept | (not short))
        thinnable = (there & ~kept & thin & (held >= int(tier))) | gone if short else np.zeros(n, np.bool_)
        cost, loss = np.broadcast_to(price, (n, len(price))), losses
        if thinnable.any():
            shares = np.minimum(np.array(SHARES)[None, :], np.where(there, 1.0, alive)[:, None])
            lost, at = 1 - shares**KEPT_POWER, 1 + tiers.index(tier)
            cost = np.hstack([cost, np.ceil(shares * unit / FILL).astype(np.int64)])
            loss = np.hstack([losses, losses[:, :1] * lost + losses[:, at : at + 1] * (1 - lost)])
            barred = np.hstack([barred, np.broadcast_to(~thinnable[:, None], shares.shape)])
        # what a page may not have costs more than all else, and loses more; in whole pages, for `exact` counts in what all costs share
        cost = np.where(barred, price.max() + unit, cost)
        loss = np.where(barred, 2 * loss.max(initial=0) + 1, loss)
        return cls(tiers, tier, cost, loss, there, held, limit - (0 if short else taken), unit)

    def solve(self, solver: str, most: float | None) -> Chosen:
        """The best of what can be bought. most: loss that is allowed, at the least cost; None: the least loss within the limit."""
        whole = len(self.tiers) + 1
        if self.cost.shape[1] > whole:
            thinned = self._bought(self.cost, self.loss, self.limit - (GATHERING + 1) * self.unit, solver, most)
            if len(self.cost) > FEW and thinned.cost <= self.limit:
                return thinned
            # gathering takes pages that are not full: where there are few, whole ones may be worth more
            best = self._bought(self.cost[:, :whole], self.loss[:, :whole], self.limit, solver, most)
            return min(thinned, best, key=lambda c: c.loss) if thinned.cost <= self.limit else best
        return self._bought(self.cost, self.loss, self.limit, solver, most)

    def holding(self, chosen: Chosen, stored: int) -> Chosen:
        """The same, but that of the first `stored` pages those that have a tier stay at it."""
        bits, grid = np.array([int(t) for t in chosen.tiers], int), np.array([0, *self.tiers])
        kept = self.there & ~chosen.thinned & np.isin(self.held, self.tiers)
        kept[stored:] = False
        rows, was, now = np.flatnonzero(kept), np.searchsorted(grid, bits[kept]), np.searchsorted(grid, self.held[kept])
        bits[kept] = self.held[kept]
        more = int((self.cost[rows, now] - self.cost[rows, was]).sum()), float((self.loss[rows, now] - self.loss[rows, was]).sum())
        return replace(chosen, tiers=[_OF_BITS[b] for b in bits.tolist()], cost=chosen.cost + more[0], loss=chosen.loss + more[1])

    def _bought(self, cost: Ints, loss: Floats, limit: int, solver: str, most: float | None) -> Chosen:
        # of equals the newest first
        items, preference = np.arange(len(cost)), -np.arange(len(cost), dtype=np.float64)
        if most is not None:
            chosen = cover(cost, loss, most, preference)
        else:
            chosen = SOLVERS[solver](cost, loss, limit, preference)
        paid, shared = cost[items, chosen], chosen > len(self.tiers)
        survivors = -(-int(paid[shared].sum()) // self.unit) + GATHERING if shared.any() else 0
        stored = np.array([0, *self.tiers], np.int64)[np.where(shared, 0, chosen)]
        # a page that is to be thinned keeps its planes until its survivors have been read
        waits = np.where(self.held < Tier.BF16, self.held, int(self.tier))
        bits = np.where(shared & self.there, waits, stored)
        total = int(paid[~shared].sum()) + survivors * self.unit
        return Chosen([_OF_BITS[b] for b in bits.tolist()], shared, survivors, total, float(loss[items, chosen].sum()))


def _survivors_tier(tiers: tuple[Tier, ...], losses: Floats, price: Ints, limit: int, held: Ints) -> Tier:
    """At which tier tokens live on: what loses least where every page is the mean page. None above what pages hold already."""
    mean, each = losses.sum(0), limit / max(1, len(losses))
    choices = [(t, i + 1) for i, t in enumerate(tiers) if not len(held) or t <= held.min()] or [(tiers[0], 1)]
    shares = {t: min(1.0, max(0.0, each * FILL / price[i])) ** KEPT_POWER for t, i in choices}
    return min(choices, key=lambda c: mean[0] * (1 - shares[c[0]]) + mean[c[1]] * shares[c[0]])[0]
