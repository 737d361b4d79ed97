"""Pages and sequences: which frames hold which tokens. Knows nothing of bytes or of what tensors hold."""

from dataclasses import dataclass, field

from kvstrata.store.gathered import Gathered
from kvstrata.store.queries import NONE
from kvstrata.types import PAGE_SIZE, Plan, Tier

FULL = (1 << PAGE_SIZE) - 1
"""A live mask with all tokens alive."""


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
    chosen_at: int = 0
    """Tokens that there were when the anchors were chosen."""
    ring: int = NONE
    """Where the newest queries of a sequence that chooses anchors lie (store/queries.py)."""
    queries_from: int = 0
    """First position whose query is in the ring; from there on all are."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def held(self) -> list[tuple[int, ...]]:
        """Frames of each page and anchor page."""
        return [page.frames for page in self.pages] + [page.frames for page in self.anchors]

    @property
    def frames(self) -> int:
        return sum(map(len, self.held))
