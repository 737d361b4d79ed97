"""What a plan may cost, and what policies may look at. Knows no store: whoever asks for a plan says what a page costs at each tier."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstrata.types import PAGE_SIZE, Tier

MOST_BITS = 1024
"""More than any page takes: a budget of more is one of so many."""


class BudgetTooSmallError(ValueError):
    """No plan of the policy fits. floor: bytes of its cheapest plan."""

    def __init__(self, message: str, floor: int) -> None:
        super().__init__(message)
        self.floor = floor


@dataclass(frozen=True, slots=True)
class Signals:
    """current_turn: the newest user turn. mass: what the leading pages were worth to the newest queries, if that was
    measured (store/weigh.py), one number a page, any scale; 0 where it was not.
    held: tiers of the pages that are stored already, from the first on; none of them can rise, so bytes for that are better spent.
    window_pages: pages at the end that are BF16 whatever the plan says; a budget says so too.
    alive: of the leading pages that were thinned, the share of their tokens that lives on, over layers and KV heads; 0 of others.
    survivor_pages, survivor_tier: how many pages those fill, at which tier.
    anchor_pages, anchor_tier: how many pages of anchors are held, at which tier at most. choosing: whether a step follows that chooses
    anchors anew; until then a plan has no others than those."""

    current_turn: int = 0
    mass: tuple[float, ...] = ()
    held: tuple[Tier, ...] = ()
    window_pages: int = 0
    alive: tuple[float, ...] = ()
    survivor_pages: int = 0
    survivor_tier: Tier = Tier.BF16
    anchor_pages: int = 0
    anchor_tier: Tier = Tier.BF16
    choosing: bool = True


@dataclass(frozen=True, slots=True)
class Budget:
    """A ceiling on a sequence's bytes, everything counted: metadata, sinks, the recent window, and the padding of the last page.

    Exactly one of bits (real bits a KV element, averaged over the sequence), bytes, and quality is given: nats a token that the
    plan is predicted to lose at most, at the fewest bytes, which is no ceiling on them.
    tier_bytes: bytes of one page, over all layers, at each tier that the codec has, BF16 included; EVICTED costs 0.
    page_elements: K and V elements of one page of PAGE_SIZE tokens, over all layers and KV heads.
    window_pages: pages at the end that are BF16 whatever the plan says.
    """

    tier_bytes: Mapping[Tier, int]
    num_tokens: int
    page_elements: int
    bits: float | None = None
    bytes: int | None = None
    window_pages: int = 0
    quality: float | None = None

    def __post_init__(self) -> None:
        given = [x for x in (self.bits, self.bytes, self.quality) if x is not None]
        if len(given) != 1:
            raise ValueError(
                f"budget has bits {self.bits}, bytes {self.bytes} and quality {self.quality}; exactly one of them must be given"
            )
        if not 0 < given[0] < math.inf:
            raise ValueError(f"budget is {given[0]}; it must be above 0, and finite")
        if Tier.BF16 not in self.tier_bytes:
            raise ValueError(f"tier_bytes has {', '.join(t.name for t in self.tier_bytes)}; BF16 must be among them, for sinks and window")
        for name in ("num_tokens", "window_pages"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.page_elements < 1:
            raise ValueError(f"page_elements is {self.page_elements}; it must be at least 1")

    @property
    def num_pages(self) -> int:
        return -(-self.num_tokens // PAGE_SIZE)

    @property
    def limit(self) -> int:
        """Bytes that the sequence may take."""
        if self.bytes is not None:
            return self.bytes
        if self.bits is None:
            return self.num_pages * max(self.tier_bytes.values())
        return int(min(self.bits, MOST_BITS) * self.num_tokens * self.page_elements / PAGE_SIZE / 8)

    def body(self, sinks: int) -> range:
        """Pages whose tier a policy can choose: neither sinks nor in the window."""
        start = min(sinks, self.num_pages)
        return range(start, max(start, self.num_pages - self.window_pages))

    def page_bytes(self, page: int, tier: Tier) -> int:
        """What `page` costs at `tier`: a page of the window is BF16 until it leaves it."""
        if page >= self.num_pages - self.window_pages:
            return self.tier_bytes[Tier.BF16]
        return 0 if tier is Tier.EVICTED else self.tier_bytes[tier]

    def cost(self, tiers: Sequence[Tier]) -> int:
        """Bytes of a plan."""
        stored = tuple(tiers[: max(0, self.num_pages - self.window_pages)])
        dense = (len(tiers) - len(stored)) * self.tier_bytes[Tier.BF16]
        return dense + sum(stored.count(t) * self.tier_bytes[t] for t in Tier if t and t in stored)

    def real_bits(self, num_bytes: int) -> float:
        """Real bits an element of `num_bytes` in this sequence."""
        return num_bytes * 8 * PAGE_SIZE / max(1, self.num_tokens * self.page_elements)

    def check(self, tiers: Sequence[Tier], policy: str) -> None:
        """Raise BudgetTooSmallError, naming the floor, unless a policy's cheapest plan fits."""
        floor = self.cost(tiers)
        if floor > self.limit:
            value = f"{self.bits} bits" if self.bits is not None else f"{self.bytes} bytes"
            raise BudgetTooSmallError(
                f"budget of {value} ({self.limit} bytes) for {self.num_tokens} tokens is below the floor of policy {policy!r}: "
                f"{self.real_bits(floor):.2f} bits an element, {floor} bytes",
                floor,
            )


QUANTIZED = (Tier.INT2, Tier.INT3, Tier.INT4, Tier.INT8)


def check_tiers(tiers: Sequence[Tier | str | int]) -> tuple[Tier, ...]:
    """The quantized tiers that a codec has, ascending. Raises ValueError where there is none, or one that is not quantized."""
    parsed = tuple(sorted({Tier.parse(t) for t in tiers}))
    if not parsed or not set(parsed) <= set(QUANTIZED):
        raise ValueError(f"tiers is {tuple(tiers)!r}; accepted: one or more of {', '.join(t.name for t in QUANTIZED)}")
    return parsed


def check_tier(tier: Tier, accepted: Sequence[Tier]) -> None:
    if tier not in accepted:
        raise ValueError(f"tier {tier.name} is none of the codec's; accepted: {', '.join(t.name for t in accepted)}")


def check_sinks(sinks: int) -> None:
    if isinstance(sinks, bool) or not isinstance(sinks, int) or sinks < 0:
        raise ValueError(f"sinks is {sinks!r}; accepted: 0 or more pages")


def num_pages(num_tokens: int, budget: Budget | None) -> int:
    """Pages of a sequence. Raises ValueError where the budget speaks of another sequence."""
    if num_tokens < 0:
        raise ValueError(f"num_tokens is {num_tokens}; it must be 0 or more")
    if budget is not None and budget.num_tokens != num_tokens:
        raise ValueError(f"the budget is for {budget.num_tokens} tokens, the sequence has {num_tokens}")
    return -(-num_tokens // PAGE_SIZE)
