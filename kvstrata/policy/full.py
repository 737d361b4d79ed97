"""Everything at BF16: the reference that all else is compared with."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.policy.budget import Budget, Signals, num_pages
from kvstrata.types import Plan, Span, Tier


@dataclass(frozen=True, slots=True)
class Full:
    name = "full"

    def plan(self, spans: Sequence[Span], num_tokens: int, signals: Signals, budget: Budget | None = None) -> Plan:
        """Raises ValueError where the budget is below BF16: this policy has nothing to give up."""
        tiers = (Tier.BF16,) * num_pages(num_tokens, budget)
        if budget is not None:
            budget.check(tiers, self.name)
        return Plan(tiers, Tier.BF16)
