"""Policies that keep so many tokens and evict the rest; they differ in who is spared and in what ranks the others.

`IntentKV` is Li, Lou and Li 2026; beside it, in the same store, what it is compared with: StreamingLLM (Xiao et al. 2023), H2O (Zhang et
al. 2023), SnapKV (Li et al. 2024), the newest tokens alone, and chance. Which tokens they are is chosen where their keys lie
(store/thin.py); here it is said how many, and from which pages.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from kvstrata.policy.budget import QUANTIZED, Budget, Signals, check_sinks, check_tier, check_tiers, num_pages
from kvstrata.policy.tags import ROLES, page_tags, tags_by_token
from kvstrata.types import PAGE_SIZE, Age, Ask, Plan, Role, Span, Thinning, Tier

ASKS = (Role.USER, Role.TOOL_CALL)
"""Roles whose tokens say what a session is after: requests, calls and what they search for."""
FILL = 7 / 8
"""Share of quantized survivors' slots that are used: what dies in a page leaves a hole there, and only pages with many holes are gathered
anew, for that quantizes their tokens again."""


@dataclass(frozen=True, slots=True)
class Thinned:
    """kept: tokens that stay, a number of them or a share (0 to 1] of the conversation, all that is never evicted included; without meaning
    under a budget. tier: of settled pages and survivors, the sinks aside. spare: roles whose pages are never evicted. turns: of the newest
    user turns whose pages are not either, as far as they take no more than half of what may be kept. per_head: each layer and KV head keeps
    tokens of its own choice. repack: False masks tokens where they are, with per_head False alone. renumber: as Thinning has it, for
    comparison: prefixes are lost. slack: tokens beyond what is kept that
    may gather before the next choice. sinks, tiers: as for `uniform`.
    """

    name: ClassVar[str]
    SCORE: ClassVar[str] = "recent"

    kept: float = 0.25
    tier: Tier = Tier.BF16
    spare: tuple[Role, ...] = ()
    turns: int = 0
    per_head: bool = True
    repack: bool = True
    renumber: bool = False
    slack: int = 64
    sinks: int = 1
    tiers: tuple[Tier, ...] = QUANTIZED

    def __post_init__(self) -> None:
        object.__setattr__(self, "tier", Tier.parse(self.tier))
        object.__setattr__(self, "tiers", check_tiers(self.tiers))
        check_sinks(self.sinks)
        check_tier(self.tier, (*self.tiers, Tier.BF16))
        if isinstance(self.kept, bool) or not 0 < self.kept < math.inf or (self.kept > 1 and self.kept != int(self.kept)):
            raise ValueError(f"kept is {self.kept!r}; accepted: a share above 0, up to 1, or a whole number of tokens")
        if isinstance(self.spare, str) or not set(self.spare) <= set(Role):
            raise ValueError(f"spare is {self.spare!r}; accepted: roles out of {', '.join(Role)}")
        object.__setattr__(self, "spare", tuple(Role(role) for role in self.spare))
        for name in ("turns", "slack"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is {value!r}; accepted: 0 or more")
        for name in ("per_head", "repack", "renumber"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; accepted: True, False")
        Thinning(0, 0, per_head=self.per_head, repack=self.repack)

    def plan(self, spans: Sequence[Span], num_tokens: int, signals: Signals, budget: Budget | None = None) -> Plan:
        """Under a budget what it can pay for stays. Raises BudgetTooSmallError where sinks, window and spared roles cost more."""
        pages = num_pages(num_tokens, budget)
        window = signals.window_pages if budget is None else budget.window_pages
        body = range(min(self.sinks, pages), max(min(self.sinks, pages), pages - window))
        if budget is not None and not self.repack:
            raise ValueError("repack is False under a budget: masked tokens free no bytes; accepted: True")
        staging, waiting = self._staged
        tiers = [Tier.BF16] * body.start + [self.tier] * (pages - body.start)
        never, newest = self._spared(spans, num_tokens, signals.current_turn, body)
        fixed = [*range(body.start), *never]
        if budget is None:
            wanted = int(self.kept) if self.kept > 1 else math.ceil(self.kept * num_tokens)
            room = (wanted - len(fixed) * PAGE_SIZE - (num_tokens - body.stop * PAGE_SIZE)) // PAGE_SIZE
        else:
            floor = [Tier.EVICTED] * pages
            for page in fixed:
                floor[page] = tiers[page]
            room = (budget.limit - budget.cost(floor)) // budget.tier_bytes[self.tier]
            if pages and not fixed and not window:
                floor[-1] = self.tier
            budget.check(floor, self.name)
        # a sequence always keeps one living page
        room = max(room, int(not fixed and not window), 0)
        dear = 1 if budget is None else budget.tier_bytes[waiting] / budget.tier_bytes[self.tier]
        newest = newest[len(newest) - min(len(newest), int(room // 2 / dear)) :]
        room -= math.ceil(len(newest) * dear)
        fill = 1.0 if self.tier is Tier.BF16 else FILL
        slots = room * PAGE_SIZE
        if budget is None:
            # so many tokens were asked for; holes come on top
            count, most = slots, math.ceil((slots + self.slack) / fill / PAGE_SIZE)
        else:
            count, most = max(0, int(slots * fill) - self.slack), room
        for p in newest:
            tiers[p] = waiting
        thinning = replace(self._thinning(count, most, frozenset([*fixed, *newest]), spans), staging=staging)
        return Plan(tuple(tiers), self.tier, thinning=thinning)

    @property
    def _staged(self) -> tuple[Tier | None, Tier]:
        """What pages have until they are thinned, for what is gathered is quantized again (None: their own tier), and those of the newest
        turns for as long as they are that: only INT2 is worth the bytes."""
        if self.tier not in self.tiers or not self.repack:
            return None, self.tier
        waiting = min((t for t in self.tiers if t >= Tier.INT4), default=self.tier) if self.tier is Tier.INT2 else self.tier
        return self.tiers[-1], waiting

    def _spared(self, spans: Sequence[Span], num_tokens: int, current_turn: int, body: range) -> tuple[list[int], list[int]]:
        """Pages of the body that are never evicted, and those of the newest turns, ascending."""
        counts = page_tags(spans, num_tokens, current_turn)[body.start : body.stop]
        roles = np.isin(np.arange(counts.shape[1]) % len(ROLES), [ROLES.index(r) for r in self.spare])
        ages = np.arange(counts.shape[1]) // (counts.shape[1] // len(Age)) < min(self.turns, len(Age))
        never = (counts * roles).any(1)
        newest = (counts * ages).any(1) & ~never
        return [body.start + int(i) for i in np.flatnonzero(never)], [body.start + int(i) for i in np.flatnonzero(newest)]

    def _thinning(self, count: int, pages: int, spared: frozenset[int], spans: Sequence[Span]) -> Thinning:
        return Thinning(count, pages, self.tier, spared, self.SCORE, self.per_head, self.repack, self.slack, renumber=self.renumber)


@dataclass(frozen=True, slots=True)
class IntentKV(Thinned):
    """IntentKV: the attention that the session's remembered asks would pay ranks tokens; instructions and the newest turn stay.

    decay: lambda a turn. memory: False remembers the newest turn's asks alone, an ablation. rope, pool: as Thinning has them. residual:
    a shipped head's name (qwen05), or the file of a trained one (`kvstrata train-intent`), whose correction is added.
    """

    SCORE: ClassVar[str] = "intent"
    name: ClassVar[str] = "intentkv"

    spare: tuple[Role, ...] = (Role.INST,)
    turns: int = 1
    decay: float = 0.1
    memory: bool = True
    rope: str = "moved"
    pool: str = "max"
    residual: str | None = None

    def __post_init__(self) -> None:
        # slots=True makes another class, which a bare super() does not know
        Thinned.__post_init__(self)
        if isinstance(self.decay, bool) or not 0 <= self.decay < math.inf:
            raise ValueError(f"decay is {self.decay!r}; accepted: 0 or more a turn")
        if not isinstance(self.memory, bool):
            raise ValueError(f"memory is {self.memory!r}; accepted: True, False")
        Thinning(0, 0, rope=self.rope, pool=self.pool)

    def _thinning(self, count: int, pages: int, spared: frozenset[int], spans: Sequence[Span]) -> Thinning:
        asks = tuple(Ask(s.start, s.end, s.turn) for s in spans if s.role in ASKS)
        decay = self.decay if self.memory else 1e3
        return replace(
            Thinned._thinning(self, count, pages, spared, spans), asks=asks, decay=decay, rope=self.rope, pool=self.pool,
            residual=None if self.residual is None else str(self.residual), tags=b"" if self.residual is None else _tags(spans),
        )  # fmt: skip


def _tags(spans: Sequence[Span]) -> bytes:
    tags = tags_by_token(spans, spans[-1].end if spans else 0)
    return (tags.role * len(Age) + tags.age).tobytes()


@dataclass(frozen=True, slots=True)
class Streaming(Thinned):
    """StreamingLLM: the first page and the newest tokens."""

    name: ClassVar[str] = "streaming"


@dataclass(frozen=True, slots=True)
class Recent(Thinned):
    """The newest tokens alone."""

    name: ClassVar[str] = "recent"

    sinks: int = 0


@dataclass(frozen=True, slots=True)
class SnapKV(Thinned):
    """SnapKV: the attention of the newest 64 queries, averaged over 7 neighbours, at each choice."""

    SCORE: ClassVar[str] = "newest"
    name: ClassVar[str] = "snapkv"


@dataclass(frozen=True, slots=True)
class H2O(Thinned):
    """H2O: the attention that a token got so far, from all queries."""

    SCORE: ClassVar[str] = "received"
    name: ClassVar[str] = "h2o"


@dataclass(frozen=True, slots=True)
class Chance(Thinned):
    """Any tokens, the same each time."""

    SCORE: ClassVar[str] = "random"
    name: ClassVar[str] = "random"
