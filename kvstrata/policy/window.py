"""StreamingLLM (arXiv:2309.17453): the first page and the most recent tokens stay, everything between is evicted."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.policy.budget import QUANTIZED, Budget, Signals, check_sinks, check_tier, check_tiers, num_pages
from kvstrata.types import PAGE_SIZE, Plan, Span, Tier


@dataclass(frozen=True, slots=True)
class Window:
    """recent: tokens that stay, rounded up to whole pages; without meaning under a budget. tier: of what stays, the sinks aside."""

    name = "window"

    recent: int = 1024
    tier: Tier = Tier.BF16
    sinks: int = 1
    tiers: tuple[Tier, ...] = QUANTIZED

    def __post_init__(self) -> None:
        object.__setattr__(self, "tier", Tier.parse(self.tier))
        object.__setattr__(self, "tiers", check_tiers(self.tiers))
        check_sinks(self.sinks)
        if self.recent < 1:
            raise ValueError(f"recent is {self.recent}; accepted: 1 or more tokens")
        check_tier(self.tier, (*self.tiers, Tier.BF16))

    def plan(self, spans: Sequence[Span], num_tokens: int, signals: Signals, budget: Budget | None = None) -> Plan:
        """Under a budget as many recent pages stay as fit. Raises ValueError where not even sinks and the dense window do."""
        pages = num_pages(num_tokens, budget)
        sinks = min(self.sinks, pages)
        if budget is None:
            kept = pages - max(0, num_tokens - self.recent) // PAGE_SIZE
        else:
            # a sequence always keeps one living page
            kept = max(budget.window_pages, int(sinks == 0 and pages > 0))
            budget.check(self._tiers(pages, sinks, kept), self.name)
            left = budget.limit - budget.cost(self._tiers(pages, sinks, kept))
            kept += left // budget.tier_bytes[self.tier]
        return Plan(self._tiers(pages, sinks, kept), self.tier)

    def _tiers(self, pages: int, sinks: int, kept: int) -> tuple[Tier, ...]:
        kept = min(kept, pages - sinks)
        return (Tier.BF16,) * sinks + (Tier.EVICTED,) * (pages - sinks - kept) + (self.tier,) * kept
