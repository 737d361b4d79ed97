"""One tier for all pages: the uninformed baseline. Looks at no tag and no signal."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.policy.budget import QUANTIZED, Budget, Signals, check_sinks, check_tier, check_tiers, num_pages
from kvstrata.types import Plan, Span, Tier


def spread(page: int) -> float:
    """Multiples of the golden ratio: any number of the lowest is spread evenly, and is among the lowest of a longer sequence. So a
    later plan raises pages that an earlier one raised, where others have lost the plane for good."""
    return page * 0.6180339887498949 % 1


@dataclass(frozen=True, slots=True)
class Uniform:
    """tier: of all pages but the `sinks` first ones, which are BF16; without meaning under a budget. tiers: what the codec has."""

    name = "uniform"

    tier: Tier = Tier.INT4
    sinks: int = 1
    tiers: tuple[Tier, ...] = QUANTIZED

    def __post_init__(self) -> None:
        object.__setattr__(self, "tier", Tier.parse(self.tier))
        object.__setattr__(self, "tiers", check_tiers(self.tiers))
        check_sinks(self.sinks)
        check_tier(self.tier, (*self.tiers, Tier.BF16))

    def plan(self, spans: Sequence[Span], num_tokens: int, signals: Signals, budget: Budget | None = None) -> Plan:
        """Under a budget: the highest tier that fits everywhere, and one tier higher on evenly spread pages for the rest."""
        pages = num_pages(num_tokens, budget)
        if budget is None:
            return Plan(self._with_sinks([self.tier] * pages), self.tier)
        ladder = (*self.tiers, Tier.BF16)
        budget.check(self._with_sinks([ladder[0]] * pages), self.name)
        tier = max(t for t in ladder if budget.cost(self._with_sinks([t] * pages)) <= budget.limit)
        tiers = list(self._with_sinks([tier] * pages))
        held = dict(enumerate(signals.held))
        body = [page for page in budget.body(self.sinks) if held.get(page, Tier.BF16) > tier]
        if tier is not Tier.BF16 and body:
            higher = ladder[ladder.index(tier) + 1]
            step = budget.tier_bytes[higher] - budget.tier_bytes[tier]
            paid = [min(t, held.get(page, t)) for page, t in enumerate(tiers)]
            raised = min((budget.limit - budget.cost(paid)) // step, len(body))
            for page in sorted(body, key=spread)[:raised]:
                tiers[page] = higher
        return Plan(tuple(tiers), tier)

    def _with_sinks(self, tiers: Sequence[Tier]) -> tuple[Tier, ...]:
        return (Tier.BF16,) * min(self.sinks, len(tiers)) + tuple(tiers[self.sinks :])
