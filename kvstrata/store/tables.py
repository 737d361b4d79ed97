"""Page tables of a batch, as attention reads them. Knows nothing of why a page has its tier."""

import numpy as np
import torch

from kvstrata.ops.table import PageTable, Segment
from kvstrata.store.page import FULL, Page, Sequence
from kvstrata.types import Tier

Rows = dict[Tier, tuple[np.ndarray, np.ndarray]]
"""By tier: frames int32 [N, n] and live masks int32 [N] of one sequence's pages."""


def _rows(pages: list[Page]) -> Rows:
    by_tier: dict[Tier, list[Page]] = {}
    for page in pages:
        if page.frames and page.live:
            by_tier.setdefault(page.tier, []).append(page)
    return {
        tier: (np.array([p.frames for p in group], dtype=np.int32), np.array([p.live for p in group], dtype=np.uint32).view(np.int32))
        for tier, group in by_tier.items()
    }


class TableBuilder:
    """Builds page tables; remembers the rows of settled pages, which change only when a sequence's version does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._settled: dict[int, tuple[int, Rows]] = {}

    def forget(self, sequence_id: int) -> None:
        self._settled.pop(sequence_id, None)

    def build(self, sequences: list[Sequence]) -> PageTable:
        """Table of all stored tokens of `sequences`, in their order."""
        rows = [self._sequence_rows(s) for s in sequences]
        return PageTable(tuple(self._segment(tier, rows) for tier in sorted({t for r in rows for t in r})), len(sequences))

    def _sequence_rows(self, s: Sequence) -> Rows:
        version, settled = self._settled.get(s.id, (-1, {}))
        if version != s.version:
            settled = _rows(s.pages[: s.settled])
            self._settled[s.id] = (s.version, settled)
        rows = dict(settled)
        for tier, (frames, live) in _rows(s.pages[s.settled :]).items():
            if tier in rows:
                frames, live = np.concatenate([rows[tier][0], frames]), np.concatenate([rows[tier][1], live])
            rows[tier] = (frames, live)
        return rows

    def _segment(self, tier: Tier, rows: list[Rows]) -> Segment:
        present = [r[tier] for r in rows if tier in r]
        counts = np.array([len(r[tier][0]) if tier in r else 0 for r in rows], dtype=np.int32)
        frames = np.zeros((len(rows), counts.max(), present[0][0].shape[1]), dtype=np.int32)
        live = np.zeros((len(rows), counts.max(), 1), dtype=np.int32)
        for b, r in enumerate(rows):
            if tier in r:
                frames[b, : counts[b]] = r[tier][0]
                live[b, : counts[b], 0] = r[tier][1]
        all_live = all((r[1].view(np.uint32) == FULL).all() for r in present)
        masks = None if all_live else torch.from_numpy(live).to(self._device)
        return Segment(tier, torch.from_numpy(frames).to(self._device), torch.from_numpy(counts).to(self._device), masks)
