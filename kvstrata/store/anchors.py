"""Choosing a sequence's anchors during a step, layer by layer, while what settles is still at hand in full precision.

Knows which tokens may become anchors and where their K and V come from; nothing of attention's reading of them.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstrata.ops import dense
from kvstrata.ops.score import column_scores
from kvstrata.ops.write import write_pages
from kvstrata.store.contents import Contents, tokens_of
from kvstrata.store.gathered import EMPTY, Gathered
from kvstrata.store.page import Page, Sequence
from kvstrata.types import PAGE_SIZE, Anchors, Tier

if TYPE_CHECKING:
    from kvstrata.store.store import Store


def eligible(pages: list[Page]) -> NDArray[np.bool_]:
    """bool [32 * pages]: live tokens of quantized pages."""
    return tokens_of([page.live if page.tier.k_planes else 0 for page in pages]).ravel()


def is_due(s: Sequence, anchors: Anchors, new: int, settles: bool, interval: int) -> bool:
    """Whether a step of `new` tokens chooses anchors anew. settles: whether pages leave the window in it, as they do every `interval`
    tokens. No more than anchors.refresh tokens ever pass between choices, and a turn, a step of several tokens, begins with one."""
    return anchors.count > 0 and _falls_due(s, anchors.refresh, new, settles, interval)


def _falls_due(s: Sequence, refresh: int, new: int, settles: bool, interval: int) -> bool:
    if not s.anchors:
        return settles or new > 1
    if not refresh:
        return False
    since = s.num_tokens + new - s.chosen_at
    # what settles is whole for the last time: a choice that would fall due before pages settle again is made now
    return new > 1 or since >= refresh or (settles and since + interval > refresh)


def interval(store: "Store") -> int:
    """Tokens after which pages settle."""
    return store.config.window or PAGE_SIZE


def holding(store: "Store", s: Sequence, num_tokens: int) -> tuple[int, Tier, bool]:
    """Pages of anchors that are held, their highest tier, and whether a step to `num_tokens` tokens chooses others, if the plan has any."""
    new, settles = num_tokens - s.num_tokens, store.first_window_page(num_tokens) > s.settled
    refresh = 0 if s.plan.anchors is None else s.plan.anchors.refresh
    due = new > 0 and _falls_due(s, refresh, new, settles, interval(store))
    return len(s.anchors), max((page.tier for page in s.anchors), default=Tier.BF16), due


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
        self._stored = Contents(store, s, self.num_tokens)

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
        s = self.sequence
        keys, values, whole, there = self._stored.read(layer, arena)
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
