"""TriAxialKV (arXiv 2605.17170): tiers by what coarsening a tag was measured to cost, within a budget.

The paper chooses 2 or 4 bits a tag by rho_k = (D_k(2) - D_k(4)) / 2 N_k. Here the same rule, gain for each byte on the lower convex
hull, chooses among all tiers, for each page: a page's loss is the sum of its tokens'. `unit="tag", tiers=(2, 4), nominal=2.7` is the
paper's. Looks at tags and positions only; attention is not seen, but for the profile that was measured before.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvstrata.policy.budget import QUANTIZED, Budget, Signals, check_sinks, num_pages
from kvstrata.policy.knapsack import SOLVERS
from kvstrata.policy.profile import AXES, MEASURES, distance_bins, load_profile
from kvstrata.policy.tags import ROLES, page_tags
from kvstrata.policy.uniform import spread
from kvstrata.types import PAGE_SIZE, Plan, Role, Span, Tier

ALL_AXES = (*AXES, "distance")
"""The paper's three, and the distance to the window: how far back a page lies, within whatever tag."""
UNITS = ("page", "tag")
TIERS = (Tier.EVICTED, *QUANTIZED, Tier.BF16)
IS_INST = np.arange(56) % len(ROLES) == ROLES.index(Role.INST)


@cache
def token_losses(profile: str, tiers: tuple[Tier, ...], axes: tuple[str, ...] = AXES, measure: str = "relative") -> NDArray[np.float64]:
    """Loss of a token of each tag at each of `tiers`, float64 [56, tiers]."""
    loaded = load_profile(profile)
    return loaded.at(tiers, loaded.per_token(axes, measure))


@dataclass(frozen=True, slots=True)
class TriAxial:
    """profile: a file that `kvstrata calibrate` wrote, or the name of a shipped one; "default" is of several models.
    tiers: that a page may have; EVICTED and BF16 only where named. sinks: pages at the start that are BF16.
    nominal: mean bits of the stored pages, counted as the paper does, by codes alone; without meaning under a budget.
    solver: greedy or exact. unit: what gets a tier of its own, each page or each tag; a page of many tags then takes their mean's.
    frozen: a page keeps the tier it was stored at, as under a published port's prefix caching, as long as new pages fit beside it at the
    lowest tier; by default, and beyond that, pages age.
    axes: what the losses may depend on; measure: relative (errors over the size of each head's output) or mse (the paper's).
    """

    name = "triaxial"
    WINDOW: ClassVar[int] = 0
    """None: four BF16 pages cost as much as a plane for half of a context of 4,000 tokens, and the profile weighs new pages itself."""

    profile: str = "default"
    tiers: tuple[Tier, ...] = QUANTIZED
    sinks: int = 1
    nominal: float = 2.7
    solver: str = "greedy"
    unit: str = "page"
    axes: tuple[str, ...] = ALL_AXES
    measure: str = "relative"
    frozen: bool = False

    def __post_init__(self) -> None:
        tiers = tuple(sorted({Tier.parse(t) for t in self.tiers}))
        if not set(tiers) & set(QUANTIZED):
            raise ValueError(f"tiers is {tuple(self.tiers)!r}; accepted: {', '.join(t.name for t in TIERS)}, a quantized one among them")
        object.__setattr__(self, "tiers", tiers)
        object.__setattr__(self, "axes", tuple(self.axes))
        check_sinks(self.sinks)
        if not 0 < self.nominal < math.inf:
            raise ValueError(f"nominal is {self.nominal}; accepted: bits above 0")
        if not isinstance(self.frozen, bool):
            raise ValueError(f"frozen is {self.frozen!r}; accepted: True, False")
        for name, value, accepted in (
            ("solver", {self.solver}, SOLVERS), ("unit", {self.unit}, UNITS), ("measure", {self.measure}, MEASURES),
            ("axes", set(self.axes), ALL_AXES),
        ):  # fmt: skip
            if not value <= set(accepted):
                raise ValueError(f"{name} is {getattr(self, name)!r}; accepted: {', '.join(accepted)}")
        load_profile(self.profile)

    def plan(self, spans: Sequence[Span], num_tokens: int, signals: Signals, budget: Budget | None = None) -> Plan:
        """Raises ValueError, naming the floor, where not even the lowest tier fits a budget everywhere; `nominal` bits below the lowest
        tier's give that tier. Instructions are never evicted."""
        pages = num_pages(num_tokens, budget)
        body = range(min(self.sinks, pages), pages) if budget is None else budget.body(self.sinks)
        tiers = [Tier.BF16] * min(self.sinks, pages) + [self.tiers[0]] * (pages - min(self.sinks, pages))
        default = max((t for t in self.tiers if t <= Tier.INT4), default=self.tiers[0])
        counts = page_tags(spans, num_tokens, signals.current_turn)[body.start : body.stop]
        lowest = self._lowest(counts, anything_else=bool(self.sinks or (budget is not None and budget.window_pages)))
        held = [signals.held[page] if page < len(signals.held) else Tier.BF16 for page in body]
        if self.frozen:
            kept = [held[i] if page < len(signals.held) else low for i, (page, low) in enumerate(zip(body, lowest, strict=True))]
            if budget is None or self._fits(kept, body, tiers, budget):
                lowest = kept
        for page, low in zip(body, lowest, strict=True):
            tiers[page] = low
        if budget is None:
            price = {t: int(t) * PAGE_SIZE for t in self.tiers}
            limit = int(self.nominal * PAGE_SIZE * len(body))
        else:
            for tier in self.tiers:
                if tier and tier not in budget.tier_bytes:
                    raise ValueError(f"tier {tier.name} is none of the codec's; accepted: {', '.join(t.name for t in budget.tier_bytes)}")
            budget.check(tiers, self.name)
            price = {t: budget.tier_bytes[t] if t else 0 for t in self.tiers}
            limit = budget.limit - budget.cost(tiers) + sum(price[tiers[page]] for page in body)
        loss = self._losses(len(body))
        solved = self._by_page if self.unit == "page" else self._by_tag
        for page, tier in zip(body, solved(counts, loss, price, limit, lowest, held), strict=True):
            tiers[page] = tier
        # past the window's start a tier is a promise for later; the newest pages keep what the table gives the current turn
        for page in range(body.stop, pages):
            tiers[page] = max(tiers[page], default)
        return Plan(tuple(tiers), default)

    @staticmethod
    def _fits(kept: list[Tier], body: range, tiers: list[Tier], budget: Budget) -> bool:
        """Whether the pages of `body` at `kept`, the others at `tiers`, are within the budget."""
        return budget.cost([*tiers[: body.start], *kept, *tiers[body.stop :]]) <= budget.limit

    def _losses(self, pages: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Loss of a token of each tag at each of `tiers`, float64 [56, tiers]; and the factor of each page's distance, [pages]."""
        table = token_losses(self.profile, self.tiers, self.axes, self.measure)
        return table, load_profile(self.profile).decay[distance_bins(pages)] if "distance" in self.axes else np.ones(pages)

    def _lowest(self, counts: NDArray[np.int32], anything_else: bool) -> list[Tier]:
        """The lowest tier that each page may have: instructions stay, and so does one page of a sequence that would keep nothing."""
        if self.tiers[0] is not Tier.EVICTED:
            return [self.tiers[0]] * len(counts)
        kept = (counts * IS_INST).any(1)
        if len(kept) and not anything_else and not kept.any():
            kept[-1] = True
        return [self.tiers[1] if keep else Tier.EVICTED for keep in kept]

    def _by_page(
        self, counts: NDArray[np.int32], loss: tuple[NDArray[np.float64], NDArray[np.float64]], price: dict[Tier, int], limit: int,
        lowest: list[Tier], held: list[Tier],
    ) -> list[Tier]:  # fmt: skip
        table, decay = loss
        losses = (counts @ table) * decay[:, None]
        cost = np.tile(np.array([price[t] for t in self.tiers], np.int64), (len(counts), 1))
        barred = np.array(self.tiers)[None, :] < np.array(lowest, dtype=int).reshape(-1, 1)
        # a page that has lost a plane cannot win it back
        barred |= np.array(self.tiers)[None, :] > np.maximum(np.array(held, dtype=int), np.array(lowest, dtype=int)).reshape(-1, 1)
        # a tier that a page may not have costs more than any other, and loses more
        cost = np.where(barred, cost.max(initial=0) + 1, cost)
        losses = np.where(barred, 1 + losses.max(initial=0) * 2, losses)
        # equal pages: the newest first, or evenly where distance is not to be known
        order = -np.arange(len(counts)) if "distance" in self.axes else np.array([spread(i) for i in range(len(counts))])
        chosen = SOLVERS[self.solver](cost, losses, limit, order.astype(np.float64))
        return [self.tiers[c] for c in chosen]

    def _by_tag(
        self, counts: NDArray[np.int32], loss: tuple[NDArray[np.float64], NDArray[np.float64]], price: dict[Tier, int], limit: int,
        lowest: list[Tier], held: list[Tier],
    ) -> list[Tier]:  # fmt: skip
        table, _ = loss
        total = counts.sum(0).astype(np.int64)
        tags = np.flatnonzero(total)
        cost = total[tags, None] * np.array([price[t] for t in self.tiers], np.int64)
        chosen = SOLVERS[self.solver](cost, total[tags, None] * table[tags], limit * PAGE_SIZE, -total[tags].astype(np.float64))
        bits = np.zeros(len(total))
        bits[tags] = [self.tiers[c] for c in chosen]
        wish = counts @ bits / np.maximum(counts.sum(1), 1)
        nearest = [min(self.tiers, key=lambda t: (abs(t - w), t)) for w in wish]
        tiers = [max(min(t, h), low) for t, h, low in zip(nearest, held, lowest, strict=True)]
        # pages of many tags round up and down; what was gained too much is taken from the pages whose mean was furthest below
        excess = sum(price[t] for t in tiers) - limit
        for page in np.argsort(wish - np.array(tiers, dtype=float), kind="stable"):
            while excess > 0 and tiers[page] > lowest[page]:
                lower = self.tiers[self.tiers.index(tiers[page]) - 1]
                excess -= price[tiers[page]] - price[lower]
                tiers[page] = lower
        return tiers
