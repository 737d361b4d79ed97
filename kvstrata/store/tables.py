"""Page tables of a batch, as attention reads them. Knows nothing of why a page has its tier."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from kvstrata.ops.table import PageTable, Segment
from kvstrata.store.gathered import picked_bits
from kvstrata.store.page import FULL, Page, Sequence
from kvstrata.types import Plan, Tier

Rows = dict[Tier, tuple[np.ndarray, np.ndarray]]
"""By tier: frames int32 [N, n] and live masks uint32 [N, layers, KV heads] of one sequence's pages; [N, 1, 1] where all are alike."""


def _rows(pages: list[Page], picked: NDArray[np.uint32] | None = None) -> Rows:
    """picked: bits [pages, layers, KV heads] of tokens that are attended elsewhere."""
    by_tier: dict[Tier, list[int]] = {}
    for p, page in enumerate(pages):
        if page.frames and page.live:
            by_tier.setdefault(page.tier, []).append(p)
    rows: Rows = {}
    for tier, of in by_tier.items():
        live = np.array([pages[p].live for p in of], dtype=np.uint32)[:, None, None]
        rows[tier] = (np.array([pages[p].frames for p in of], dtype=np.int32), live if picked is None else live & ~picked[of])
    return rows


def alone(plan: Plan) -> bool:
    """Whether nothing but the anchors is attended of quantized pages."""
    return plan.anchors is not None and plan.anchors.alone


def _settled_rows(s: Sequence) -> Rows:
    """Rows of settled pages, anchors and survivors; an anchor's bit is cleared where it came from."""
    rows = _rows(s.pages[: s.settled], picked_bits(s.anchors, s.settled) if s.anchors else None)
    if alone(s.plan):
        rows |= {tier: (frames, np.zeros_like(live)) for tier, (frames, live) in rows.items() if tier is not Tier.BF16}
    for page in (*s.anchors, *s.survivors):
        _extend(rows, {page.tier: (np.array([page.frames], dtype=np.int32), page.live[None])})
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


@dataclass(frozen=True, slots=True)
class _Base:
    """Settled pages and anchors of a batch at one tier, on the device: frames int32 [B, N, n]; live masks int32 [layers or 1, B, N, KV
    heads or 1], or None where all tokens live; counts [B], on the host, and as a segment has them."""

    frames: Tensor
    live: Tensor | None
    counts: NDArray[np.int32]
    segment: Segment

    @classmethod
    def of(cls, tier: Tier, rows: list[Rows], device: torch.device) -> "_Base":
        present = [r[tier] for r in rows if tier in r]
        counts = np.array([len(r[tier][0]) if tier in r else 0 for r in rows], dtype=np.int32)
        frames = np.zeros((len(rows), counts.max(), present[0][0].shape[1]), dtype=np.int32)
        layers, heads = np.max([live.shape[1:] for _, live in present], axis=0)
        masks = np.zeros((layers, len(rows), counts.max(), heads), dtype=np.uint32)
        for b, r in enumerate(rows):
            if tier in r:
                frames[b, : counts[b]] = r[tier][0]
                masks[:, b, : counts[b]] = r[tier][1].transpose(1, 0, 2)
        on_device, all_live = torch.from_numpy(frames).to(device), all((live == FULL).all() for _, live in present)
        live = None if all_live else torch.from_numpy(masks.view(np.int32)).to(device)
        return cls(on_device, live, counts, Segment(tier, on_device, torch.from_numpy(counts).to(device)))

    def extended(self, rows: list[Rows]) -> tuple[Segment, Tensor | None]:
        """With more pages of each sequence behind those that are here."""
        tier, device = self.segment.tier, self.frames.device
        new = [len(r[tier][0]) if tier in r else 0 for r in rows]
        counts = self.counts + np.array(new, dtype=np.int32)
        more = int(counts.max()) - self.frames.shape[1]
        batch, page = np.nonzero(np.arange(max(new))[None, :] < np.array(new)[:, None])
        at = torch.from_numpy(np.stack([batch, self.counts[batch] + page])).to(device)
        added = np.concatenate([r[tier][0] for r in rows if tier in r])
        wider = (0, 0, 0, max(0, more))
        # out of place: what is here serves later steps
        frames = pad(self.frames, wider).index_put((at[0], at[1]), torch.from_numpy(added).to(device))
        segment = Segment(tier, frames, torch.from_numpy(counts).to(device))
        lives = np.concatenate([r[tier][1][:, 0, 0] for r in rows if tier in r])
        if self.live is None and (lives == FULL).all():
            return segment, None
        live = self.live
        if live is None:
            live = -(torch.arange(self.frames.shape[1], device=device) < self.segment.counts[:, None]).int()[None, :, :, None]
        value = torch.from_numpy(lives.view(np.int32)).to(device)[:, None, None]
        live = pad(live, wider).permute(1, 2, 0, 3).index_put((at[0], at[1]), value)
        return segment, live.permute(2, 0, 1, 3).contiguous()


class TableBuilder:
    """Builds page tables. Settled pages and anchors change only when a sequence's version does: their rows are remembered, and for the last
    batch their tables too, so that a step of decoding sends the device no more than the pages of the window."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._settled: dict[int, tuple[int, Rows]] = {}
        self._key: list[tuple[int, int]] = []
        self._base: dict[Tier, _Base] = {}

    def forget(self, sequence_id: int) -> None:
        self._settled.pop(sequence_id, None)

    def build(self, sequences: list[Sequence]) -> LayerTables:
        """Tables of all stored tokens of `sequences`, in their order."""
        key = [(s.id, s.version) for s in sequences]
        if key != self._key:
            rows = [self._settled_of(s) for s in sequences]
            self._base = {tier: _Base.of(tier, rows, self._device) for tier in sorted({t for r in rows for t in r})}
            self._key = key
        window = [_rows(s.pages[s.settled :]) for s in sequences]
        fresh = {tier for r in window for tier in r}
        segments: list[tuple[Segment, Tensor | None]] = []
        for tier in sorted({*self._base, *fresh}):
            base = self._base.get(tier)
            if base is None:
                base = _Base.of(tier, window, self._device)
            elif tier in fresh:
                segments.append(base.extended(window))
                continue
            segments.append((base.segment, base.live))
        return LayerTables(segments, len(sequences))

    def _settled_of(self, s: Sequence) -> Rows:
        version, settled = self._settled.get(s.id, (-1, {}))
        if version != s.version:
            settled = _settled_rows(s)
            self._settled[s.id] = (s.version, settled)
        return settled
