"""HyQuant (Ding et al. 2026): a low-bit body, with the tokens of most attention, its vertical lines, and the recent window whole.

The share of anchors is the plan's; which tokens they are, each layer and KV head chooses by the newest queries (ops/score.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from kvstrata.policy.anchored import pages_of
from kvstrata.policy.budget import QUANTIZED, Budget, Signals, num_pages
from kvstrata.policy.uniform import Uniform
from kvstrata.types import PAGE_SIZE, Anchors, Plan, Span, Tier


@dataclass(frozen=True, slots=True)
class HyQuant:
    """rho: share of the body's tokens that are anchors (the paper: 0.05), in whole pages. tier: of the body; without meaning under a
    budget, which pays for anchors first. anchor_tier: BF16, or INT8 for half the bytes. score: mass (softmax) or linear (the paper's
    proxy). refresh: tokens after which anchors are chosen anew, as they are when a turn begins; 0 keeps the first choice (Algorithm 4).
    alone: the rest of the body is not attended, the paper's ablation. prefill: "int8" or "fp8": the first prompt attends itself in 8 bits
    (Algorithm 2). sinks, tiers: as for `uniform`."""

    name = "hyquant"
    WINDOW: ClassVar[int] = 128
    """The paper's W: the newest 128 to 255 tokens stay whole."""

    rho: float = 0.05
    tier: Tier = Tier.INT4
    anchor_tier: Tier = Tier.BF16
    score: str = "mass"
    refresh: int = 64
    alone: bool = False
    prefill: str | None = None
    sinks: int = 1
    tiers: tuple[Tier, ...] = QUANTIZED

    def __post_init__(self) -> None:
        body = Uniform(self.tier, self.sinks, self.tiers)
        object.__setattr__(self, "tier", body.tier)
        object.__setattr__(self, "tiers", body.tiers)
        object.__setattr__(self, "anchor_tier", Tier.parse(self.anchor_tier))
        if body.tier is Tier.BF16:
            raise ValueError("tier BF16 leaves nothing for anchors to improve; accepted: a quantized tier")
        if not isinstance(self.rho, int | float) or isinstance(self.rho, bool) or not 0 <= self.rho <= 1:
            raise ValueError(f"rho is {self.rho!r}; accepted: a share from 0 to 1")
        if self.anchor_tier not in (*body.tiers, Tier.BF16) or self.anchor_tier < Tier.INT4:
            raise ValueError(f"anchor_tier is {self.anchor_tier.name}; accepted: INT4 and above, if the codec has it, or BF16")
        Anchors(0, self.anchor_tier, self.score, self.refresh, self.alone, self.prefill)

    def plan(self, spans: Sequence[Span], num_tokens: int, signals: Signals, budget: Budget | None = None) -> Plan:
        """Under a budget: anchors for their share of the body, then `uniform` with what is left."""
        pages = num_pages(num_tokens, budget)
        body = max(0, pages - self.sinks - (signals.window_pages if budget is None else budget.window_pages))
        # what a page has room for beyond the share is paid for with it
        count = pages_of(self.rho, body) * PAGE_SIZE
        anchors = Anchors(count, self.anchor_tier, self.score, self.refresh, self.alone, self.prefill)
        inner = Uniform(self.tier, self.sinks, self.tiers)
        if budget is None:
            return replace(inner.plan(spans, num_tokens, signals), anchors=anchors)
        cheapest = [Tier.BF16] * min(self.sinks, pages) + [self.tiers[0]] * (pages - min(self.sinks, pages))
        budget.check(cheapest, self.name)
        price = budget.tier_bytes[self.anchor_tier]
        wanted = -(-anchors.count // PAGE_SIZE)
        # a budget too small for all of them pays for as many as leave room for the body's lowest tier
        paid = max(0, min(wanted, (budget.limit - budget.cost(cheapest)) // price))
        rest = replace(budget, bits=None, bytes=max(1, budget.limit - paid * price))
        return replace(inner.plan(spans, num_tokens, signals, rest), anchors=replace(anchors, count=min(anchors.count, paid * PAGE_SIZE)))
