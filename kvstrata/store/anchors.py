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
from kvstrata.ops.score import NUM_QUERIES, column_scores
from kvstrata.ops.write import write_pages
from kvstrata.store.gathered import EMPTY, Gathered
from kvstrata.store.page import Page, Sequence
from kvstrata.types import PAGE_SIZE, Anchors, Tier

if TYPE_CHECKING:
    from kvstrata.store.store import Store


def eligible(pages: list[Page]) -> NDArray[np.bool_]:
    """bool [32 * pages]: live tokens of quantized pages."""
    live = np.array([page.live if page.tier.k_planes else 0 for page in pages], dtype=np.uint32)
    return ((live[:, None] >> np.arange(PAGE_SIZE, dtype=np.uint32)) & 1).astype(bool).ravel()


def is_due(s: Sequence, anchors: Anchors, num_tokens: int) -> bool:
    """Whether a step that settles pages, at the end of which there are `num_tokens`, chooses anew."""
    if not s.anchors:
        return True
    return bool(anchors.refresh) and num_tokens - s.chosen_at >= anchors.refresh


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
        live = np.array([pages[p].live for p in mine], dtype=np.uint32)
        page, token = np.nonzero((live[:, None] >> np.arange(PAGE_SIZE, dtype=np.uint32)) & 1)
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
        self._eligible = torch.from_numpy(eligible(pages[:settled]))
        c = store.config
        self._positions = np.full((c.num_layers, c.num_kv_heads, len(frames) * PAGE_SIZE), EMPTY, np.int32)
        self.promoted = 0
        # where the step finds what is stored: full precision in BF16 pages and anchors, planes elsewhere
        self._old = [_Stored.of(tier, s.pages, store.arena.buffer.device) for tier in sorted({p.tier for p in s.pages if p.frames})]

    @staticmethod
    def num_pages(anchors: Anchors, pages: list[Page], settled: int) -> int:
        """Anchor pages that a job needs."""
        return -(-min(anchors.count, int(eligible(pages[:settled]).sum())) // PAGE_SIZE)

    def choose(self, layer: int, arena: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        """Choose one layer's anchors and write them. q [T, Hq, D] the newest queries, the chunk's k, v [N, H, D] as they are stored."""
        keys, values, exact, there = self._contents(layer, arena, k, v)
        score = column_scores(q, keys, scale, self._anchors.score, there)[:, : len(self._eligible)]
        score.masked_fill_(~self._eligible.to(score.device), -torch.inf)
        count = min(self._anchors.count, int(self._eligible.sum()))
        best = score.topk(count, dim=1).indices  # [H, count]
        slots = len(self.frames) * PAGE_SIZE
        index = best.T[:, :, None].expand(-1, -1, keys.shape[-1])
        # a head's empty slots repeat its first anchor, so that they widen no group's range
        picked = [
            torch.cat([x, x[:1].expand(slots - count, -1, -1)]).unflatten(0, (-1, PAGE_SIZE))
            for x in (keys.gather(0, index), values.gather(0, index))
        ]
        frames = torch.tensor(self.frames, dtype=torch.int32, device=arena.device)
        tier = self._anchors.tier
        if tier is Tier.BF16:
            arena[frames.long()] = dense.to_frames(picked[0], picked[1], arena.shape[-1])
        else:
            write_pages(arena, frames, picked[0], picked[1], tier, encode=self._store.layout.encode)
        self._positions[layer, :, :count] = best.cpu().numpy()
        self.promoted += int((~exact.T.gather(1, best)).sum())

    def _contents(self, layer: int, arena: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All tokens' K and V [n, H, D] in the pages' dtype, which of them [n, H] are in full precision, and which are there at all."""
        s, (_, h, d) = self.sequence, k.shape
        keys, values = (x.new_zeros(self.num_tokens, h, d) for x in (k, v))
        exact = torch.zeros(self.num_tokens, h, dtype=torch.bool, device=k.device)
        there = torch.zeros_like(exact)
        for old in self._old:
            for out, x in zip((keys, values), self._store.read_pages(arena, old.frames, old.tier), strict=True):
                out[old.positions] = x.flatten(0, 1)[old.tokens].to(out.dtype)
            exact[old.positions], there[old.positions] = old.tier is Tier.BF16, True
        for page in s.anchors:
            self._overlay(layer, arena, page, keys, values, exact)
        new = slice(s.num_tokens, self.num_tokens)
        keys[new], values[new], exact[new], there[new] = k[self._rows], v[self._rows], True, True
        return keys, values, exact, there

    def _overlay(self, layer: int, arena: Tensor, page: Gathered, keys: Tensor, values: Tensor, exact: Tensor) -> None:
        """What an anchor page holds of its tokens is nearer to the truth than their planes."""
        frames = torch.tensor([page.frames], dtype=torch.int32, device=arena.device)
        head, slot = np.nonzero(page.positions[layer] != EMPTY)
        heads, slots = (torch.from_numpy(x).to(keys.device) for x in (head, slot))
        at = torch.from_numpy(page.positions[layer][head, slot].astype(np.int64)).to(keys.device)
        for out, x in zip((keys, values), self._store.read_pages(arena, frames, page.tier), strict=True):
            out[at, heads] = x[0][slots, heads].to(out.dtype)
        exact[at, heads] = page.tier is Tier.BF16

    def finish(self) -> list[Gathered]:
        """The anchor pages, once every layer has chosen."""
        at = [slice(i * PAGE_SIZE, (i + 1) * PAGE_SIZE) for i in range(len(self.frames))]
        return [Gathered(self._anchors.tier, f, self._positions[:, :, i].copy()) for f, i in zip(self.frames, at, strict=True)]


def newest_queries(s: Sequence, layer: int, q: Tensor) -> Tensor:
    """The newest queries of a layer, those of the chunk, q [T, Hq, D], included."""
    old = s.queries.get(layer)
    q = q[-NUM_QUERIES:]
    return (q if old is None or len(q) == NUM_QUERIES else torch.cat([old.to(q.device), q])[-NUM_QUERIES:]).detach().clone()
