"""What a session's plans may cost or lose: bits, bytes or nats, as its user gave them. Knows nothing of conversations."""

from dataclasses import dataclass

from kvstrata.policy import POLICIES, Budget, BudgetTooSmallError, Policy, Signals
from kvstrata.policy.budget import MOST_BITS
from kvstrata.store.store import Store
from kvstrata.types import PAGE_SIZE, Tier

BUDGET_HORIZON = 2048
"""A budget in bits counts at least this many tokens: what a young conversation loses it would never gain back when it has grown."""
ENDLESS = 1 << 20
"""Tokens of a conversation on which sinks and window cost nothing."""
MOST_BYTES, MOST_NATS = 1 << 62, 1e3
"""More than any conversation takes or loses: a budget of more is one of so many."""


def check_capacity(tokens: int | None) -> None:
    """Raise ValueError for what is no number of tokens to make a store for."""
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 < tokens < 1 << 40):
        raise ValueError(f"capacity_tokens is {tokens!r}; accepted: a whole number of tokens, 1 or more, or None")


@dataclass(frozen=True, slots=True)
class Allowance:
    """At most one of bits (real bits a K and V element), num_bytes and quality (predicted nats of KL a token); none: no budget."""

    store: Store
    bits: float | None = None
    num_bytes: int | None = None
    quality: float | None = None

    def check(self, policy: Policy) -> None:
        """Raise ValueError for what is no budget, or one that the policy cannot plan by, BudgetTooSmallError where even an endless
        conversation would not fit."""
        given = {"budget_bits": self.bits, "budget_bytes": self.num_bytes, "quality": self.quality}
        named = [f"{name} {value}" for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} exclude each other; give one")
        n = self.num_bytes
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
            raise ValueError(f"budget_bytes is {n!r}; accepted: a whole number of bytes, 1 or more, or None")
        for name, value, accepted in (("budget_bits", self.bits, "a number above 0"), ("quality", self.quality, "nats a token, above 0")):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"{name} is {value!r}; accepted: {accepted}, or None")
        if self.quality is not None and not getattr(policy, "PREDICTS", False):
            able = [name for name, cls in POLICIES.items() if getattr(cls, "PREDICTS", False)]
            raise ValueError(
                f"policy {policy.name!r} predicts no KL, so it has no plan of quality {self.quality}; accepted: {', '.join(able)}"
            )
        if self.bits is None and self.quality is None:
            return
        endless = self._made(ENDLESS, bits=self.bits, quality=self.quality)
        try:
            policy.plan((), ENDLESS, Signals(), endless)
        except BudgetTooSmallError as error:
            layout = self.store.layout
            raise BudgetTooSmallError(
                f"budget_bits {self.bits:g} is below the floor of policy {policy.name!r} with codec {layout.codec.name!r}: "
                f"{8 * error.floor / layout.elements(ENDLESS):.2f} bits an element, however long the conversation",
                error.floor,
            ) from None

    def budget(self, num_tokens: int, outside: int = 0) -> Budget | None:
        """Of a plan for so many tokens; None where nothing was asked for. outside: bytes that the conversation takes beside its frames,
        which a ceiling in bytes is for too."""
        if self.quality is not None:
            return self._made(num_tokens, quality=self.quality)
        if self.bits is None and self.num_bytes is None:
            return None
        beside = outside if self.num_bytes is not None else 0
        return self._made(num_tokens, num_bytes=max(self._limit(num_tokens) - beside, 1))

    def _made(
        self, num_tokens: int, *, bits: float | None = None, num_bytes: int | None = None, quality: float | None = None
    ) -> Budget:  # fmt: skip
        most = None if quality is None else min(quality, MOST_NATS)
        layout, window = self.store.layout, -(-num_tokens // PAGE_SIZE) - self.store.first_window_page(num_tokens)
        return Budget(layout.tier_bytes(), num_tokens, layout.elements(PAGE_SIZE), bits, num_bytes, window, most)

    def _limit(self, num_tokens: int) -> int:
        """Bytes that a plan may take: the budget's, less what the window still grows by before its next group settles. Without that reserve
        older pages would pay for the window where it is widest with planes that they cannot win back where it is narrow again."""
        pages = -(-num_tokens // PAGE_SIZE)
        to_come = self.store.widest_window_pages - (pages - self.store.first_window_page(num_tokens))
        # a page costs the window all of its bytes with its first token
        moments = [(0, num_tokens), *((i + 1, (pages + i) * PAGE_SIZE + 1) for i in range(to_come))]
        dense = self.store.layout.tier_bytes()[Tier.BF16]
        return min(self._allowed(n) - new * dense for new, n in moments)

    def _allowed(self, num_tokens: int) -> int:
        """Bytes that a conversation of so many tokens may take."""
        if self.num_bytes is not None:
            return min(self.num_bytes, MOST_BYTES)
        assert self.bits is not None
        return int(min(self.bits, MOST_BITS) * self.store.layout.elements(max(num_tokens, BUDGET_HORIZON)) / 8)
