"""What a page in a prefix cache is worth, plane by plane, and what it gives up first. Knows nothing of any engine.

A page's frames come in an order in which a prefix of them is a coarser page (ops/frame.py): giving up the last ones moves nothing. What
that costs is the profile's loss by tag, age and tier, for each frame; what losing the page costs is its loss at EVICTED. A page that
nobody asks for is worth half as much with each HALF_LIFE of the pool that new pages took, so that long-forgotten pages go before the planes
of what was used just now. Prices are logarithms to base 2: a halving takes 1 away.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstrata.adapters.vllm.settings import EngineSettings
from kvstrata.policy.profile import load_profile
from kvstrata.policy.tags import NUM_TAGS
from kvstrata.store.layout import Layout
from kvstrata.types import PAGE_SIZE, Age, Tier

OLDEST = int(Age.OLDER)
HALF_LIFE = 0.25
"""Share of the pool's frames. A longer one finds more of what comes back late; a shorter one keeps more planes of what comes back soon."""
Losses = tuple[tuple[float, ...], ...]
"""Of a page, by age and tier (Worth.tiers)."""
_SMALLEST = 1e-30
Page = TypeVar("Page")


@dataclass(frozen=True, slots=True)
class Step:
    """A page's next step down: log2 of the loss for each frame it frees; the tier it leads to."""

    price: float
    tier: Tier


class Worth:
    """Of pages under these settings, whose `ageing` names the lowest tier that they are demoted to."""

    def __init__(self, settings: EngineSettings, layout: Layout) -> None:
        assert settings.ageing is not None
        self.tiers = (Tier.EVICTED, *settings.aged_tiers, Tier.BF16)
        self.floor = settings.ageing
        self._frames = tuple(layout.frames(t) if t else 0 for t in self.tiers)
        self._at = {t: i for i, t in enumerate(self.tiers)}
        profile = load_profile(settings.profile)
        table = profile.at(self.tiers, profile.per_token())
        # tags are written down as of the current turn, which is the first of the ages
        self._by_age = table.reshape(len(Age), NUM_TAGS // len(Age), len(self.tiers))
        self._mean = profile.tokens.reshape(len(Age), -1).sum(0) / profile.tokens.sum() * PAGE_SIZE

    def losses(self, counts: NDArray[np.int64] | None) -> Losses:
        """Of a page with so many tokens of each tag, int64 [56], of the current turn; None: of a mean page."""
        tokens = self._mean if counts is None else counts[: self._by_age.shape[1]]
        return tuple(tuple(row) for row in np.einsum("g,agt->at", tokens, self._by_age).tolist())

    def step(self, losses: Losses, age: int, tier: Tier) -> Step | None:
        """The cheapest demotion of a page of this tier; None where it has no plane to give up."""
        if tier is Tier.BF16:
            return None
        at, row = self._at[tier], losses[age]
        lower = [i for i in range(1, at) if self.tiers[i] >= self.floor]
        steps = [Step(_log((row[i] - row[at]) / (self._frames[at] - self._frames[i])), self.tiers[i]) for i in lower]
        return min(steps, key=lambda s: (s.price, -s.tier), default=None)

    def whole(self, losses: Losses, age: int, tier: Tier) -> float:
        """log2 of what is lost for each frame when the page is."""
        row, at = losses[age], self._at[tier]
        return _log((row[0] - row[at]) / self._frames[at])


def _log(loss: float) -> float:
    return math.log2(max(loss, _SMALLEST))


class Queue(Generic[Page]):
    """Pages by what their next step down is worth, the cheapest first; of equal ones the first to come. A page that comes again, or that
    goes, leaves its old entry behind, which is passed over."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Page, Tier]] = []
        self._newest: dict[Page, int] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._newest)

    def __iter__(self) -> Iterator[Page]:
        return iter(self._newest)

    def add(self, page: Page, worth: float, tier: Tier) -> None:
        self._serial += 1
        self._newest[page] = self._serial
        heapq.heappush(self._heap, (worth, self._serial, page, tier))
        if len(self._heap) > 2 * len(self._newest) + 64:
            self._heap = [entry for entry in self._heap if self._newest.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def remove(self, page: Page) -> None:
        self._newest.pop(page, None)

    def first(self) -> tuple[float, Page, Tier] | None:
        """What the next step is worth, whose it is, and where it leads."""
        while self._heap:
            worth, serial, page, tier = self._heap[0]
            if self._newest.get(page) == serial:
                return worth, page, tier
            heapq.heappop(self._heap)
        return None

    def clear(self) -> None:
        self._heap.clear()
        self._newest.clear()
