"""Choosing a sequence's anchors during a step, layer by layer, while what settles is still at hand in full precision.

Knows which tokens may become anchors and where their K and V come from; nothing of attention's reading of them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstrata.ops import dense
from kvstrata.ops.score import column_scores
from kvstrata.ops.write import write_pages
from kvstrata.store.gathered import EMPTY, Gathered
from kvstrata.store.page import Page, Sequence
from kvstrata.types import PAGE_SIZE, Anchors, Tier

if TYPE_CHECKING:
    from kvstrata.store.store import Store


def eligible(pages: list[Page]) -> NDArray[np.bool_]:
    """bool [32 * pages]: live tokens of quantized pages."""
    return _tokens([page.live if page.tier.k_planes else 0 for page in pages]).ravel()


def _tokens(masks: list[int]) -> NDArray[np.bool_]:
    """bool [masks, 32]: live tokens."""
    return ((np.array(masks, dtype=np.uint32)[:, None] >> np.arange(PAGE_SIZE, dtype=np.uint32)) & 1).astype(bool)


def is_due(s: Sequence, anchors: Anchors, new: int, settles: bool, interval: int) -> bool:
    """Whether a step of `new` tokens chooses anchors anew. settles: whether pages leave the window in it, as they do every `interval`
    tokens. No more than anchors.refresh tokens ever pass between choices, and a turn, a step of several tokens, begins with one."""
    if not anchors.count:
        return False
    if not s.anchors:
        return settles or new > 1
    if not anchors.refresh:
        return False
    since = s.num_tokens + new - s.chosen_at
    # what settles is whole for the last time: a choice that would fall due before pages settle again is made now
    return new > 1 or since >= anchors.refresh or (settles and since + interval > anchors.refresh)


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
        page, token = np.nonzero(_tokens([pages[p].live for p in mine]))
        return cls(
            tier, torch.tensor([pages[p].frames for p in mine], dtype=torch.int32, device=device),
            torch.from_numpy(np.array(mine)[page] * PAGE_SIZE + token).to(device), torch.from_numpy(page * PAGE_SIZE + token).to(device),
        )  # fmt: skip


class AnchorJob:
    """The anchors that a step chooses for one sequence. frames: of each anchor page; pages: the sequence's as they will be, of which the
    first `settled` are out of the window; rows: where the sequence's new tokens lie in the step's chunk."""

    def __init__(
        self, store: "Store", s: Sequence, anchors: Anchors, pages: list[Page], settled: int, rows: slice, frames: list[tuple[int, ...]]
    ) -> None:
        self._store, self.sequence, self._anchors, self._rows, self.frames = store, s, anchors, rows, frames
        self.num_tokens = s.num_tokens + rows.stop - rows.start
        device, candidates = store.arena.buffer.device, eligible(pages[:settled])
        self._count = min(anchors.count, int(candidates.sum()))
        self._barred = torch.from_numpy(~candidates).to(device)
        self._frames = torch.tensor(frames, dtype=torch.int32, device=device)
        # by layer: positions int64 and whether they were whole, bool, [H, count] each; fetched from the device once, at the end
        self._chosen: dict[int, tuple[Tensor, Tensor]] = {}
        # where the step finds what is stored: full precision in BF16 pages and anchors, planes elsewhere
        self._old = [_Stored.of(tier, s.pages, device) for tier in sorted({p.tier for p in s.pages if p.frames})]

    @staticmethod
    def num_pages(anchors: Anchors, pages: list[Page], settled: int) -> int:
        """Anchor pages that a job needs."""
        return -(-min(anchors.count, int(eligible(pages[:settled]).sum())) // PAGE_SIZE)

    def choose(self, layer: int, arena: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        """Choose one layer's anchors and write them. q [T, Hq, D] the newest queries, the chunk's k, v [N, H, D] as they are stored."""
        keys, values, whole, there = self._contents(layer, arena, k, v)
        score = column_scores(q, keys, scale, self._anchors.score, there)[:, : len(self._barred)]
        best = score.masked_fill_(self._barred, -torch.inf).topk(self._count, dim=1).indices  # [H, count]
        slots = len(self.frames) * PAGE_SIZE
        index = best.T[:, :, None].expand(-1, -1, keys.shape[-1])
        # empty slots, all in the last page, repeat that page's first anchor, so that they widen no group's range
        first = slots - PAGE_SIZE
        k, v = (
            torch.cat([x, x[first : first + 1].expand(slots - self._count, -1, -1)]).unflatten(0, (-1, PAGE_SIZE))
            for x in (keys.gather(0, index), values.gather(0, index))
        )
        tier = self._anchors.tier
        if tier is Tier.BF16:
            arena[self._frames.long()] = dense.to_frames(k, v, arena.shape[-1])
        else:
            write_pages(arena, self._frames, k, v, tier, encode=self._store.layout.encode)
        self._chosen[layer] = best, whole.T.gather(1, best)

    def _contents(self, layer: int, arena: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All tokens' K and V [n, H, D] in the pages' dtype, which of them [n, H] never were in planes, and which are there at all."""
        s, (_, h, d) = self.sequence, k.shape
        keys, values = (x.new_zeros(self.num_tokens, h, d) for x in (k, v))
        whole = torch.zeros(self.num_tokens, h, dtype=torch.bool, device=k.device)
        there = torch.zeros_like(whole)
        for old in self._old:
            for out, x in zip((keys, values), self._store.read_pages(arena, old.frames, old.tier), strict=True):
                out[old.positions] = x.flatten(0, 1)[old.tokens].to(out.dtype)
            whole[old.positions], there[old.positions] = old.tier is Tier.BF16, True
        if s.anchors:
            at, heads, kept = overlay(self._store, layer, arena, s.anchors, keys, values)
            whole[at, heads] = kept
        new = slice(s.num_tokens, self.num_tokens)
        keys[new], values[new], whole[new], there[new] = k[self._rows], v[self._rows], True, True
        return keys, values, whole, there

    def finish(self) -> list[Gathered]:
        """The anchor pages, once every layer has chosen."""
        c, slots = self._store.config, len(self.frames) * PAGE_SIZE
        positions = np.full((c.num_layers, c.num_kv_heads, slots), EMPTY, np.int32)
        whole = np.zeros(positions.shape, np.bool_)
        for out, i in ((positions, 0), (whole, 1)):
            out[:, :, : self._count] = torch.stack([self._chosen[layer][i] for layer in range(c.num_layers)]).cpu().numpy()
        at = [slice(i * PAGE_SIZE, (i + 1) * PAGE_SIZE) for i in range(len(self.frames))]
        pages = zip(self.frames, at, strict=True)
        return [Gathered(self._anchors.tier, f, positions[:, :, i].copy(), whole[:, :, i].copy()) for f, i in pages]


def overlay(
    store: "Store", layer: int, arena: Tensor, pages: list[Gathered], keys: Tensor, values: Tensor, first: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Put what anchor pages hold over keys, values [n, H, D] of the positions from `first` on: it is nearer to the truth than planes.
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
