"""Pages and sequences: which frames hold which tokens. Knows nothing of bytes or of what tensors hold."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvstrata.store.gathered import EMPTY, Gathered
from kvstrata.store.memory import QueryMemory
from kvstrata.store.queries import NONE
from kvstrata.types import PAGE_SIZE, Plan, Role, Span, Tier

FULL = (1 << PAGE_SIZE) - 1
"""A live mask with all tokens alive."""
REPLY = (Role.ASSISTANT, Role.REASONING, Role.TOOL_CALL)
"""Roles of what a model writes itself."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a sequence: its tier, its frames (shared by whoever counts a reference), its live tokens (bit j = token j)."""

    tier: Tier
    frames: tuple[int, ...]
    live: int = FULL

    @property
    def live_tokens(self) -> int:
        return self.live.bit_count()


@dataclass(slots=True)
class Sequence:
    """What a session owns in the store. pages[:settled] have left the recent window; the rest is the window and the tail."""

    id: int
    token_ids: list[int] = field(default_factory=list)
    pages: list[Page] = field(default_factory=list)
    settled: int = 0
    plan: Plan = field(default_factory=lambda: Plan(()))
    keys: list[bytes] = field(default_factory=list)
    """Chained prefix keys of the leading settled pages, as far as they are known."""
    salt: bytes = b""
    """Distinguishes what was computed after an eviction; empty before the first."""
    shareable: bool = True
    version: int = 0
    """Changes whenever a settled page or an anchor does."""
    anchors: list[Gathered] = field(default_factory=list)
    """Pages of tokens that are attended here and not where they came from."""
    survivors: list[Gathered] = field(default_factory=list)
    """Pages of what lives on of pages that were thinned; those are evicted."""
    chosen_at: int = 0
    """Tokens that there were when the anchors were chosen."""
    ring: int = NONE
    """Where the newest queries of a sequence that chooses anchors lie (store/queries.py)."""
    queries_from: int = 0
    """First position whose query is in the ring; from there on all are."""
    memory: QueryMemory = field(default_factory=QueryMemory)
    """Of the session's asks, where the plan thins by them."""
    received: Tensor | None = None
    """Attention that each token got so far, float32 [layers, KV heads, tokens], where the plan thins by it."""
    weights: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """What each page was worth to the queries, float64 [pages]: the leading ones that were weighed (store/weigh.py)."""
    weighed_at: int = 0
    """Tokens that there were when pages were weighed."""
    worth: Tensor | None = None
    """What a residual head told of each token when it was stored, float16 [layers, KV heads, tokens], NaN where nothing is known."""
    told_by: bytes = b""
    """Digest of the head that told it: to another one the numbers say nothing."""
    scale: float = 1.0
    """Of q·k, as the model has it."""
    thinned: int = 0
    """Tokens that were thinned away, a layer and KV head."""
    peak_frames: int = 0
    """Most frames that were held at once, those of a step that was open included."""
    peak_tokens: int = 0
    """Most tokens that a layer and KV head held at once, where the plan thins."""
    demoted_pages: int = 0
    """Settled pages that were made coarser so far."""
    evicted_pages: int = 0
    """Settled pages that were evicted so far, all of their tokens or but for survivors."""

    def replace_page(self, p: int, page: Page) -> None:
        """Put what became of settled page p in its place, and count it."""
        self.evicted_pages += page.tier is Tier.EVICTED < self.pages[p].tier
        self.demoted_pages += Tier.EVICTED < page.tier < self.pages[p].tier
        self.pages[p] = page

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def held_tokens(self) -> int:
        """Tokens that live, in the layer and KV head that holds most."""
        survivors = sum(((page.positions != EMPTY).sum(-1) for page in self.survivors), np.zeros((1, 1), np.int64))
        return sum(page.live_tokens for page in self.pages) + int(survivors.max())

    def found(self, spans: Iterable[Span], common: int) -> int:
        """How many of the `common` first tokens that a request of `spans` shares with it are found again: all, unless the plan renumbers
        what it thinned. A reply belongs to the request before it."""
        thinning = self.plan.thinning
        if thinning is not None and thinning.renumber and any(s.role not in REPLY for s in spans if s.end > common):
            for p, page in enumerate(self.pages):
                if gone := FULL & ~page.live:
                    return min(p * PAGE_SIZE + (gone & -gone).bit_length() - 1, common)
        return common

    @property
    def held(self) -> list[tuple[int, ...]]:
        """Frames of each page, anchor page and page of survivors."""
        return [page.frames for page in self.pages] + [page.frames for page in (*self.anchors, *self.survivors)]

    @property
    def frames(self) -> int:
        return sum(map(len, self.held))
