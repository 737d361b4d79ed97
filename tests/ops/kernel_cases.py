"""What the kernels' tests share: arenas of poison with pages scattered over them, and attention in float64."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.ops import dense, frame, quant
from kvstrata.ops.table import PageTable, Segment, live_tokens
from kvstrata.types import PAGE_SIZE, Tier

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Case:
    """A ragged batch of stored sequences, and their tokens as the codec returns them: k, v float32 [32 * pages, H, D], live bool
    [32 * pages, H], a list of B each (v as stored)."""

    arena: Tensor
    table: PageTable
    k: list[Tensor]
    v: list[Tensor]
    live: list[Tensor]


def make_case(counts: dict[Tier, list[int]], heads: int, head_dim: int, *, live: dict[Tier, int] | None = None,
              dtype: torch.dtype = torch.bfloat16, seed: int = 0, spare_rows: int = 1) -> Case:  # fmt: skip
    """counts: pages of each sequence by tier. live: tiers with live masks, for 1 head or for each of `heads`."""
    gen = torch.Generator().manual_seed(seed)
    live = live or {}
    frame_bytes = frame.frame_bytes(head_dim)
    batch = len(next(iter(counts.values())))
    per_page = {t: t.value if t.k_planes else dense.num_frames(head_dim, 2, frame_bytes) for t in counts}
    total = sum(sum(c) * per_page[t] for t, c in counts.items())
    ids = (torch.randperm(total + 5, generator=gen) + 1)[:total].int()
    arena = torch.full((total + 6, heads, frame_bytes), 0xFF, dtype=torch.uint8)
    keys, values, alive = ([[] for _ in range(batch)] for _ in range(3))
    segments = []
    for tier, pages in counts.items():
        n = per_page[tier]
        rows = max(pages) + spare_rows
        frames = torch.zeros(batch, rows, n, dtype=torch.int32)
        for b, count in enumerate(pages):
            own, ids = ids[: count * n].view(count, n), ids[count * n :]
            frames[b, :count] = own
            shape = (count, PAGE_SIZE, heads, head_dim)
            # channels of unlike size and mean, as keys have
            spread = torch.linspace(0.2, 3, head_dim)
            k = torch.randn(shape, generator=gen) * spread + torch.randn(1, 1, heads, head_dim, generator=gen) * 2
            v = torch.randn(shape, generator=gen)
            if tier.k_planes:
                data = quant.encode(k, v, tier)
                k, v = quant.decode(data, tier, head_dim)
            else:
                data = dense.to_frames(k.to(dtype), v.to(dtype), frame_bytes)
                k, v = (x.float() for x in dense.from_frames(data, head_dim, dtype))
            arena[own.flatten().long()] = data.flatten(0, 1)
            keys[b].append(k.reshape(-1, heads, head_dim))
            values[b].append(v.reshape(-1, heads, head_dim))
        mask = None
        if tier in live:
            mask = torch.randint(-(1 << 31), 1 << 31, (batch, rows, live[tier]), generator=gen).int()
        segment = Segment(tier, frames, torch.tensor(pages, dtype=torch.int32), mask)
        for b, count in enumerate(pages):
            alive[b].append(live_tokens(segment, heads)[b, :count].transpose(1, 2).reshape(-1, heads))
        segments.append(segment)
    table = PageTable(tuple(move(s) for s in segments), batch)
    cat = lambda parts: [torch.cat(p).to(DEVICE) for p in parts]  # noqa: E731
    return Case(arena.to(DEVICE), table, cat(keys), cat(values), cat(alive))


def move(s: Segment) -> Segment:
    return Segment(s.tier, s.frames.to(DEVICE), s.counts.to(DEVICE), None if s.live is None else s.live.to(DEVICE))


def attention64(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [T, Hq, D], k, v [S, H, D], mask bool [T, S, H] (tokens to see) -> out [T, Hq, D], lse [T, Hq], float64."""
    group = q.shape[1] // k.shape[1]
    k, v, mask = (x.repeat_interleave(group, -2 if x.ndim == 3 and x.dtype != torch.bool else -1) for x in (k, v, mask))
    s = torch.einsum("thd,shd->tsh", q.double(), k.double()) * scale
    s = s.masked_fill(~mask, -math.inf)
    lse = torch.logsumexp(s, 1)
    p = torch.exp(s - torch.where(torch.isinf(lse), 0.0, lse)[:, None])
    return torch.einsum("tsh,shd->thd", p, v.double()), lse


def rotate64(x: Tensor) -> Tensor:
    return x @ quant.hadamard(x.shape[-1]).double().to(x.device)


def relative_error(out: Tensor, ref: Tensor) -> float:
    """Norm of the difference over the norm; NaN in `out` gives NaN, which passes no bound."""
    return ((out.double() - ref).norm() / ref.norm().clamp_min(1e-30)).item()
