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
    """Stored pages of one tier: frames int32 [P, n]; the live tokens' positions in the sequence and, where not all of these pages' are
    live, among these pages, int64 [N] each."""

    tier: Tier
    frames: Tensor
    positions: Tensor
    tokens: Tensor | None

    @classmethod
    def of(cls, tier: Tier, pages: list[Page], device: torch.device) -> "_Stored":
        mine = [p for p, page in enumerate(pages) if page.frames and page.tier is tier]
        page, token = np.nonzero(tokens_of([pages[p].live for p in mine]))
        tokens = torch.from_numpy(page * PAGE_SIZE + token).to(device) if len(page) < PAGE_SIZE * len(mine) else None
        return cls(
            tier, torch.tensor([pages[p].frames for p in mine], dtype=torch.int32, device=device),
            torch.from_numpy(np.array(mine)[page] * PAGE_SIZE + token).to(device), tokens,
        )  # fmt: skip


class Contents:
    """Where each live token of a sequence lies, as it is now: in a page, in a page of survivors, and, better than there, as an anchor.

    num_tokens: positions that are asked for, the sequence's or more. What does not depend on a layer's numbers is on the device before the
    first layer."""

    def __init__(self, store: "Store", s: Sequence, num_tokens: int) -> None:
        device, c = store.arena.buffer.device, store.config
        self._store, self._gathered = store, Overlay(store, [*s.survivors, *s.anchors])
        self._old = [_Stored.of(tier, s.pages, device) for tier in sorted({p.tier for p in s.pages if p.frames})]
        # a row more: see Overlay
        self._rows = num_tokens + 1
        whole, there = (torch.zeros(c.num_layers, self._rows, c.num_kv_heads, dtype=torch.bool, device=device) for _ in range(2))
        for old in self._old:
            there[:, old.positions] = True
            if old.tier is Tier.BF16:
                whole[:, old.positions] = True
        self._gathered.mark(whole, there)
        self._whole, self._there = whole[:, :-1], there[:, :-1]

    def read(self, layer: int, arena: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """K and V [num_tokens, H, D] in the pages' dtype, zeros where nothing is; which tokens never were in planes, and which are there
        at all, bool [num_tokens, H] each: a caller who adds tokens marks them there. arena: the layer's."""
        c = self._store.config
        keys, values = torch.zeros(2, self._rows, c.num_kv_heads, c.head_dim, dtype=self._store.dense_dtype, device=arena.device)
        for old in self._old:
            for out, x in zip((keys, values), self._store.read_pages(arena, old.frames, old.tier), strict=True):
                x = x.flatten(0, 1)
                out[old.positions] = (x if old.tokens is None else x[old.tokens]).to(out.dtype)
        self._gathered.put(layer, arena, keys, values)
        return keys[:-1], values[:-1], self._whole[layer], self._there[layer]


class Overlay:
    """What gathered pages hold, to be put over other numbers position by position. Where everything goes is on the device before the first
    layer, and what does not belong goes to the last row, which is nobody's: nothing waits for the device.

    first, count: positions [first, first + count) alone; all from 0 on by default."""

    def __init__(self, store: "Store", pages: list[Gathered], first: int = 0, count: int | None = None) -> None:
        device = store.arena.buffer.device
        self._store = store
        self._heads = torch.arange(store.config.num_kv_heads, device=device)
        # of each tier: frames int32 [P, n]; rows int64 (-1: the last) and wholeness bool [layers, P, 32, H]
        self._tiers: list[tuple[Tier, Tensor, Tensor, Tensor]] = []
        for tier in sorted({page.tier for page in pages}):
            mine = [page for page in pages if page.tier is tier]
            frames = torch.tensor([page.frames for page in mine], dtype=torch.int32, device=device)
            positions, whole = (np.stack([getattr(p, x) for p in mine]).transpose(1, 0, 3, 2) for x in ("positions", "whole"))
            inside = (positions >= first) & (True if count is None else positions < first + count)
            rows = np.where(inside, positions - first, -1).astype(np.int64)
            self._tiers.append((tier, frames, torch.from_numpy(rows).to(device), torch.from_numpy(np.ascontiguousarray(whole)).to(device)))

    def mark(self, whole: Tensor, there: Tensor) -> None:
        """In bool [layers, n + 1, H]: what is there, and of it what never was in planes."""
        layers = torch.arange(len(whole), device=whole.device)[:, None, None, None]
        for _, _, rows, kept in self._tiers:
            whole[layers, rows, self._heads], there[layers, rows, self._heads] = kept, True

    def put(self, layer: int, arena: Tensor, keys: Tensor, values: Tensor) -> None:
        """Over keys, values [n + 1, H, D]."""
        for tier, frames, rows, _ in self._tiers:
            for to, x in zip((keys, values), self._store.read_pages(arena, frames, tier), strict=True):
                to[rows[layer], self._heads] = x.to(to.dtype)

    def over(self, layer: int, arena: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """One page's K and V [1, 32, H, D] with what gathered pages hold of it."""
        k, v = (torch.cat([x[0], x[0, :1]]) for x in (k, v))
        self.put(layer, arena, k, v)
        return k[None, :-1], v[None, :-1]
