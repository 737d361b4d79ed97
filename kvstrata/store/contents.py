"""What a sequence holds, position by position, in floating point, one layer at a time. Knows nothing of who asks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstrata.store.gathered import Gathered
from kvstrata.store.page import Page, Sequence
from kvstrata.types import PAGE_SIZE, Tier

if TYPE_CHECKING:
    from kvstrata.store.store import Store


def tokens_of(masks: list[int]) -> NDArray[np.bool_]:
    """bool [masks, 32]: live tokens."""
    return ((np.array(masks, dtype=np.uint32)[:, None] >> np.arange(PAGE_SIZE, dtype=np.uint32)) & 1).astype(bool)


@dataclass(frozen=True, slots=True)
class _Stored:
    """Stored pages of one tier: frames int32 [P, n]; the live tokens' positions in the sequence and among these pages, int64 [N] each."""

    tier: Tier
    frames: Tensor
    positions: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, tier: Tier, pages: list[Page], device: torch.device) -> "_Stored":
        mine = [p for p, page in enumerate(pages) if page.frames and page.tier is tier]
        page, token = np.nonzero(tokens_of([pages[p].live for p in mine]))
        return cls(
            tier, torch.tensor([pages[p].frames for p in mine], dtype=torch.int32, device=device),
            torch.from_numpy(np.array(mine)[page] * PAGE_SIZE + token).to(device), torch.from_numpy(page * PAGE_SIZE + token).to(device),
        )  # fmt: skip


class Contents:
    """Where each live token of a sequence lies, as it is now: in a page, in a page of survivors, and, better than there, as an anchor."""

    def __init__(self, store: "Store", s: Sequence) -> None:
        device = store.arena.buffer.device
        self._store, self._gathered = store, [*s.survivors, *s.anchors]
        self._old = [_Stored.of(tier, s.pages, device) for tier in sorted({p.tier for p in s.pages if p.frames})]

    def read(self, layer: int, arena: Tensor, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """K and V [num_tokens, H, D] in the pages' dtype, zeros where nothing is; which tokens never were in planes, and which are there
        at all, bool [num_tokens, H] each. arena: the layer's."""
        c, device = self._store.config, arena.device
        keys, values = (torch.zeros(num_tokens, c.num_kv_heads, c.head_dim, dtype=self._store.dense_dtype, device=device) for _ in "kv")
        whole = torch.zeros(num_tokens, c.num_kv_heads, dtype=torch.bool, device=device)
        there = torch.zeros_like(whole)
        for old in self._old:
            for out, x in zip((keys, values), self._store.read_pages(arena, old.frames, old.tier), strict=True):
                out[old.positions] = x.flatten(0, 1)[old.tokens].to(out.dtype)
            whole[old.positions], there[old.positions] = old.tier is Tier.BF16, True
        if self._gathered:
            at, heads, kept = overlay(self._store, layer, arena, self._gathered, keys, values)
            whole[at, heads], there[at, heads] = kept, True
        return keys, values, whole, there


def overlay(
    store: "Store", layer: int, arena: Tensor, pages: list[Gathered], keys: Tensor, values: Tensor, first: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Put what gathered pages hold over keys, values [n, H, D] of the positions from `first` on.
    -> rows and KV heads, int64, of what was put there, and which of it never was in planes."""
    put = []
    for tier in sorted({page.tier for page in pages}):
        mine = [page for page in pages if page.tier is tier]
        positions, whole = (np.stack([getattr(page, name)[layer] for page in mine]) for name in ("positions", "whole"))
        page, head, slot = np.nonzero((positions >= first) & (positions < first + len(keys)))
        # one copy to the device, for all pages of a tier
        of = np.stack([positions[page, head, slot].astype(np.int64) - first, head, page, slot, whole[page, head, slot]])
        rows, heads, at, slots, kept = torch.from_numpy(of).to(keys.device)
        frames = torch.tensor([p.frames for p in mine], dtype=torch.int32, device=arena.device)
        for out, x in zip((keys, values), store.read_pages(arena, frames, tier), strict=True):
            out[rows, heads] = x[at, slots, heads].to(out.dtype)
        put.append((rows, heads, kept.bool()))
    rows, heads, kept = (torch.cat(parts) for parts in zip(*put, strict=True))
    return rows, heads, kept
