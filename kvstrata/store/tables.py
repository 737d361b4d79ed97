"""Page tables of a batch, as attention reads them. Knows nothing of why a page has its tier."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvstrata.ops.table import PageTable, Segment
from kvstrata.store.gathered import picked_bits
from kvstrata.store.page import FULL, Page, Sequence
from kvstrata.types import Tier

Rows = dict[Tier, tuple[np.ndarray, np.ndarray]]
"""By tier: frames int32 [N, n] and live masks uint32 [N, layers, KV heads] of one sequence's pages; [N, 1, 1] where all are alike."""


def _rows(pages: list[Page]) -> Rows:
    by_tier: dict[Tier, list[Page]] = {}
    for page in pages:
        if page.frames and page.live:
            by_tier.setdefault(page.tier, []).append(page)
    return {
        tier: (np.array([p.frames for p in group], dtype=np.int32), np.array([p.live for p in group], dtype=np.uint32)[:, None, None])
        for tier, group in by_tier.items()
    }


def _settled_rows(s: Sequence) -> Rows:
    """Rows of settled pages and anchors; an anchor's bit is cleared where it came from."""
    rows = _rows(s.pages[: s.settled])
    if not s.anchors:
        return rows
    picked = picked_bits(s.anchors, s.settled)
    for tier in list(rows):
        of = [p for p, page in enumerate(s.pages[: s.settled]) if page.tier is tier and page.frames and page.live]
        frames, live = rows[tier]
        alone = s.plan.anchors is not None and s.plan.anchors.alone and tier is not Tier.BF16
        rows[tier] = (frames, np.zeros_like(picked[of]) if alone else live & ~picked[of])
    for page in s.anchors:
        added = {page.tier: (np.array([page.frames], dtype=np.int32), page.live[None])}
        _extend(rows, added)
    return rows


def _extend(rows: Rows, more: Rows) -> None:
    for tier, (frames, live) in more.items():
        if tier in rows:
            old_frames, old = rows[tier]
            shape = np.maximum(old.shape[1:], live.shape[1:])
            old, live = (np.broadcast_to(x, (len(x), *shape)) for x in (old, live))
            frames, live = np.concatenate([old_frames, frames]), np.concatenate([old, live])
        rows[tier] = (frames, live)


class LayerTables:
    """Page tables of a batch, one a layer. They differ in their live masks alone, and only where layers hold different tokens."""

    def __init__(self, segments: list[tuple[Segment, Tensor | None]], batch: int) -> None:
        """segments: with their live masks int32 [layers or 1, B, N, KV heads or 1], None where all tokens live."""
        self._segments, self._batch = segments, batch
        self._built: dict[int, PageTable] = {}
        self._alike = all(live is None or len(live) == 1 for _, live in segments)

    def __getitem__(self, layer: int) -> PageTable:
        key = 0 if self._alike else layer
        if key not in self._built:
            self._built[key] = PageTable(tuple(self._of(segment, live, key) for segment, live in self._segments), self._batch)
        return self._built[key]

    @staticmethod
    def _of(segment: Segment, live: Tensor | None, layer: int) -> Segment:
        return segment if live is None else replace(segment, live=live[layer if len(live) > 1 else 0])


class TableBuilder:
    """Builds page tables; remembers the rows of settled pages, which change only when a sequence's version does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._settled: dict[int, tuple[int, Rows]] = {}

    def forget(self, sequence_id: int) -> None:
        self._settled.pop(sequence_id, None)

    def build(self, sequences: list[Sequence]) -> LayerTables:
        """Tables of all stored tokens of `sequences`, in their order."""
        rows = [self._sequence_rows(s) for s in sequences]
        return LayerTables([self._segment(tier, rows) for tier in sorted({t for r in rows for t in r})], len(sequences))

    def _sequence_rows(self, s: Sequence) -> Rows:
        version, settled = self._settled.get(s.id, (-1, {}))
        if version != s.version:
            settled = _settled_rows(s)
            self._settled[s.id] = (s.version, settled)
        rows = dict(settled)
        _extend(rows, _rows(s.pages[s.settled :]))
        return rows

    def _segment(self, tier: Tier, rows: list[Rows]) -> tuple[Segment, Tensor | None]:
        present = [r[tier] for r in rows if tier in r]
        counts = np.array([len(r[tier][0]) if tier in r else 0 for r in rows], dtype=np.int32)
        frames = np.zeros((len(rows), counts.max(), present[0][0].shape[1]), dtype=np.int32)
        layers, heads = np.max([live.shape[1:] for _, live in present], axis=0)
        masks = np.zeros((layers, len(rows), counts.max(), heads), dtype=np.uint32)
        for b, r in enumerate(rows):
            if tier in r:
                frames[b, : counts[b]] = r[tier][0]
                masks[:, b, : counts[b]] = r[tier][1].transpose(1, 0, 2)
        segment = Segment(tier, torch.from_numpy(frames).to(self._device), torch.from_numpy(counts).to(self._device))
        if all((live == FULL).all() for _, live in present):
            return segment, None
        return segment, torch.from_numpy(masks.view(np.int32)).to(self._device)
