"""One planner: tiers of pages, eviction among them, under one budget in bytes.

A page's loss at a tier is what its tags were measured to lose there (TriAxialKV's profile) times what the newest queries make of the
page, and the planner climbs the lower convex hulls of (bytes, loss) of all pages at once. Looks at tags, positions and Signals.mass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvstrata.policy.budget import QUANTIZED, Budget, Signals, check_sinks, check_tiers, num_pages
from kvstrata.policy.knapsack import SOLVERS
from kvstrata.policy.profile import distance_bins, load_profile
from kvstrata.policy.tags import page_tags
from kvstrata.policy.triaxial import IS_INST, token_losses
from kvstrata.types import Plan, Span, Tier, Weighing

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Strata:
    """profile: as for `triaxial`. tiers: what the codec has; pages may be evicted too, but only where not all fit at the lowest of them,
    instructions never. sinks: pages at the start that are BF16.
    trust: how much of a page's loss is said by the newest queries, 0 to 1, the rest by its tags: what was looked at just now is not all
    that will be. contrast: the power of a page's loss that is believed, 0 to 1; 0 takes all pages for alike. What is lost most dearly is
    what nobody looked at yet, so a page that seems to matter little is not as cheap as it seems (docs/planner.md).
    staging: tier at which pages settle before they are weighed; None: they never are. refresh, decay: as Weighing has them.
    solver: greedy or exact."""

    name: ClassVar[str] = "strata"
    WINDOW: ClassVar[int] = 0

    profile: str = "default"
    tiers: tuple[Tier, ...] = QUANTIZED
    sinks: int = 1
    trust: float = 0.4
    contrast: float = 0.4
    staging: Tier | None = Tier.INT4
    refresh: int = 64
    decay: float = 0.5
    solver: str = "greedy"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiers", check_tiers(self.tiers))
        check_sinks(self.sinks)
        for name in ("trust", "contrast"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ValueError(f"{name} is {value!r}; accepted: 0 to 1")
        if self.staging is not None:
            staging = Tier.parse(self.staging)
            # a codec without it has one nearest to it
            object.__setattr__(self, "staging", max((t for t in self.tiers if t <= staging), default=self.tiers[0]))
        if self.solver not in SOLVERS:
            raise ValueError(f"solver is {self.solver!r}; accepted: {', '.join(SOLVERS)}")
        Weighing(Tier.INT4, self.refresh, self.decay)
        load_profile(self.profile)

    def plan(self, spans: Sequence[Span], num_tokens: int, signals: Signals, budget: Budget | None = None) -> Plan:
        """Without a budget: everything at the tier nearest to INT4. Raises BudgetTooSmallError where sinks, window and instructions at the
        lowest tier cost more than a budget."""
        pages, default = num_pages(num_tokens, budget), max((t for t in self.tiers if t <= Tier.INT4), default=self.tiers[0])
        weighing = None if self.staging is None else Weighing(self.staging, self.refresh, self.decay)
        sinks = min(self.sinks, pages)
        if budget is None:
            return Plan((Tier.BF16,) * sinks + (default,) * (pages - sinks), default, weighing=weighing)
        body = budget.body(self.sinks)
        counts = page_tags(spans, num_tokens, signals.current_turn)[body.start : body.stop]
        held = np.full(len(body), int(Tier.BF16))
        stored = np.array(signals.held[body.start : body.stop], dtype=int)
        held[: len(stored)] = stored
        if len(stored) and self.staging is not None:
            # what is yet to be weighed takes no planes from what is stored before it is: it is staged, and planned anew as its step ends
            held[len(stored) :] = int(self.tiers[0])
        chosen = self._choose(self._losses(counts, signals.mass[body.start : body.stop]), self._kept(counts, body, budget), held, budget)
        # past the window's start a tier is a promise for later; the newest pages keep the default at least
        tiers = (Tier.BF16,) * sinks + tuple(chosen) + (default,) * (pages - body.stop)
        if budget.cost(tiers) > budget.limit:
            budget.check(tiers, self.name)
        return Plan(tiers, default, weighing=weighing)

    @property
    def _columns(self) -> tuple[Tier, ...]:
        return (Tier.EVICTED, *self.tiers)

    def _kept(self, counts: NDArray[np.int32], body: range, budget: Budget) -> NDArray[np.bool_]:
        """Pages that are never evicted: instructions, and one page of a sequence that would keep nothing."""
        kept = np.array((counts[:, IS_INST] > 0).any(1), np.bool_)
        if len(kept) and not body.start and not budget.window_pages and not kept.any():
            kept[-1] = True
        return kept

    def _losses(self, counts: NDArray[np.int32], mass: Sequence[float]) -> Floats:
        """Loss of each page at each of the columns, float64 [pages, columns]."""
        table = token_losses(self.profile, self._columns)
        prior: Floats = (counts @ table) * load_profile(self.profile).decay[distance_bins(len(counts))][:, None]
        weighed = np.flatnonzero(np.array(mass))
        # in logarithms of the loss at the lowest tier
        tags = np.log(np.maximum(prior[:, 1], 1e-30))
        believed = tags.copy()
        if len(weighed):
            # both of one mean over the pages that were weighed: of the others the tags say all
            told = np.log(np.array(mass)[weighed])
            believed[weighed] += self.trust * (told - told.mean() - tags[weighed] + tags[weighed].mean())
        mean = believed.mean() if len(believed) else 0.0
        return prior * np.exp(mean + self.contrast * (believed - mean) - tags)[:, None]

    def _choose(self, losses: Floats, kept: NDArray[np.bool_], held: Ints, budget: Budget) -> list[Tier]:
        """Tiers of the body's pages: none rises above what it holds, and where not all fit at the lowest tier some are evicted."""
        price = np.array([budget.tier_bytes[t] if t else 0 for t in self._columns], np.int64)
        limit = budget.limit - (budget.num_pages - len(losses)) * budget.tier_bytes[Tier.BF16]
        there = held > Tier.EVICTED
        # a page that lost planes cannot win them back
        most = np.where(there, np.maximum(held, int(self.tiers[0])), int(Tier.EVICTED))
        barred = np.array(self._columns)[None, :] > most[:, None]
        barred[:, 0] = there & (kept | bool(there.sum() * price[1] <= limit))
        # what a page may not have costs more than all else, and loses more
        cost = np.where(barred, price.max() + 1, price)
        losses = np.where(barred, 2 * losses.max(initial=0) + 1, losses)
        # of equals the newest first
        chosen = SOLVERS[self.solver](cost, losses, limit, -np.arange(len(losses), dtype=np.float64))
        return [self._columns[c] for c in chosen.tolist()]
