"""Page tables of the running requests on a worker's device: updated by splices, read by row. Knows nothing of any engine.

Each request has a slot. By tier, `frames[slot, i]` are the frames of its i-th page of that tier, in page order, so the pages that a query
sees are a prefix of each row and only counts differ. Tensors are as large as they will ever be and stay where they are: a step sends the
device what is new. Rows of one token are rows.py's; rows of chunks are made here, anew in each step.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvstrata.adapters.vllm.delta import RequestDelta, StepDelta
from kvstrata.adapters.vllm.geometry import settled_pages
from kvstrata.ops.table import ALL_LIVE, PageTable, Segment
from kvstrata.types import PAGE_SIZE, Tier


@dataclass(slots=True)
class Held:
    """Pages of one request: numbers of its pages by tier, ascending, and frames of all of them."""

    slot: int
    ring: tuple[int, ...]
    by_tier: dict[Tier, list[int]] = field(default_factory=dict)
    tiers: list[Tier] = field(default_factory=list)
    frames: list[tuple[int, ...]] = field(default_factory=list)

    def count(self, tier: Tier, pages: int) -> int:
        """Pages of this tier among the first `pages`."""
        return bisect_left(self.by_tier.get(tier, ()), pages)


@dataclass(frozen=True, slots=True)
class Settle:
    """A dense page in the ring whose group has ended: frames to take it from, and to write it to at `tier`."""

    tier: Tier
    src: tuple[int, ...]
    dst: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Before:
    """What is written before a step's forward pass. rings: frames of requests that begin. They hold what others left, which may not even be
    a number; a dead token's weight is 0, and 0 times NaN is none: they are cleared."""

    settles: tuple[Settle, ...]
    rings: tuple[int, ...]


class Tables:
    def __init__(self, num_slots: int, num_pages: dict[Tier, int], frames: dict[Tier, int], group: int, device: torch.device) -> None:
        """num_pages: of a request at most, by tier. frames: of a page, by tier."""
        self.group, self.group_pages, self.dense_frames = group, group // PAGE_SIZE, frames[Tier.BF16]
        self.device, self.num_slots = device, num_slots
        self._held: dict[str, Held] = {}
        self._free = list(range(num_slots))[::-1]
        # the ring's pages come first in a request's dense row
        rows = {t: n + (self.group_pages if t is Tier.BF16 else 0) for t, n in num_pages.items()}
        rows.setdefault(Tier.BF16, self.group_pages)
        self.frames = {t: torch.zeros(num_slots, n, frames[t], dtype=torch.int32, device=device) for t, n in rows.items()}
        # on the host, of each slot: entries of its rows, int32 [tiers, slots], and frames of its ring, int32 [slots, pages of a group, n]
        self.counts = np.zeros((len(rows), num_slots), np.int32)
        self.rings = np.zeros((num_slots, self.group_pages, self.dense_frames), np.int32)
        self._index = {t: i for i, t in enumerate(self.frames)}

    def __len__(self) -> int:
        return len(self._held)

    def held(self, request_id: str) -> Held:
        return self._held[request_id]

    def release(self, request_id: str) -> None:
        held = self._held.pop(request_id, None)
        if held is not None:
            self._free.append(held.slot)

    def apply(self, delta: StepDelta) -> Before:
        """Take over a step's new pages."""
        for request_id in delta.preempted:
            self.release(request_id)
        settles: list[Settle] = []
        rings: list[int] = []
        splices: dict[Tier, list[tuple[int, int, tuple[int, ...]]]] = {}
        for request_id, request in delta.requests.items():
            begins = request.ring is not None
            if begins:
                self._begin(request_id, request, splices)
                rings += request.ring or ()
            held = self._held[request_id]
            assert request.first == len(held.tiers), (request_id, request.first, len(held.tiers))
            for number, page in enumerate(request.pages, request.first):
                self._append(held, number, Tier(page.tier), page.frames, splices)
                if not begins and number < settled_pages(request.computed, self.group):
                    settles.append(Settle(Tier(page.tier), self.ring_frames(held, number), page.frames))
        for tier, rows in splices.items():
            slots, places, frames = zip(*rows, strict=True)
            at = self.on_device([slots, places]).long()
            self.frames[tier][at[0], at[1]] = self.on_device(frames)
        return Before(tuple(settles), tuple(rings))

    def ring_frames(self, held: Held, page: int) -> tuple[int, ...]:
        """Frames of the ring's slot for `page`."""
        start = page % self.group_pages * self.dense_frames
        return held.ring[start : start + self.dense_frames]

    def _begin(self, request_id: str, request: RequestDelta, splices: dict[Tier, list[tuple[int, int, tuple[int, ...]]]]) -> None:
        assert request.ring is not None
        self.release(request_id)
        held = self._held[request_id] = Held(self._free.pop(), request.ring)
        self.rings[held.slot] = np.reshape(request.ring, self.rings.shape[1:])
        self.counts[:, held.slot] = 0
        self.counts[self._index[Tier.BF16], held.slot] = self.group_pages
        for i in range(self.group_pages):
            splices.setdefault(Tier.BF16, []).append((held.slot, i, self.ring_frames(held, i)))

    def _append(
        self, held: Held, number: int, tier: Tier, frames: tuple[int, ...], splices: dict[Tier, list[tuple[int, int, tuple[int, ...]]]]
    ) -> None:
        numbers = held.by_tier.setdefault(tier, [])
        place = len(numbers) + (self.group_pages if tier is Tier.BF16 else 0)
        assert place < self.frames[tier].shape[1], (tier, number, self.frames[tier].shape)
        splices.setdefault(tier, []).append((held.slot, place, frames))
        numbers.append(number)
        self.counts[self._index[tier], held.slot] = place + 1
        held.tiers.append(tier)
        held.frames.append(frames)

    def on_device(self, values: object) -> Tensor:
        host = torch.from_numpy(np.array(values, np.int32))
        return host if self.device.type == "cpu" else host.pin_memory().to(self.device, non_blocking=True)

    def view(self, requests: list[Held], pages: list[int], ring_tokens: list[int]) -> PageTable:
        """The table of rows of which each is a request, as a query sees it that has `pages` settled pages before its group and
        `ring_tokens` tokens of its group in the ring. A request may have several rows."""
        slots = self.on_device([held.slot for held in requests]).long()
        segments = []
        for tier, all_frames in self.frames.items():
            dense = tier is Tier.BF16
            counts = [held.count(tier, n) for held, n in zip(requests, pages, strict=True)]
            if dense:
                counts = [n + self.group_pages for n in counts]
            width = max(counts, default=0)
            if not width or (dense and width == self.group_pages and not any(ring_tokens)):
                continue
            frames = all_frames[:, :width].index_select(0, slots)
            live = self._live(self.on_device(ring_tokens), width) if dense else None
            segments.append(Segment(tier, frames, self.on_device(counts), live))
        return PageTable(tuple(segments), len(requests))

    def _live(self, ring_tokens: Tensor, width: int) -> Tensor:
        """Live masks int32 [rows, width, 1] of dense rows: the ring's pages hold so many tokens, the others are whole."""
        first = torch.arange(self.group_pages, device=self.device) * PAGE_SIZE
        tokens = (ring_tokens.long()[:, None] - first).clamp(0, PAGE_SIZE)
        live = torch.full((len(ring_tokens), width), ALL_LIVE, dtype=torch.int32, device=self.device)
        # shifted in 64 bits: a whole page's mask is -1 in 32
        live[:, : self.group_pages] = ((1 << tokens) - 1).to(torch.int32)
        return live[..., None]
