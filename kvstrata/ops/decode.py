"""Attention over stored pages: tier by tier, tile by tile, merged by log-sum-exp. Knows nothing of stores or sequences."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvstrata.ops import backend, dense, quant
from kvstrata.ops.merge import merge
from kvstrata.ops.table import PageTable, Segment, live_tokens
from kvstrata.types import Tier

TILE_PAGES = 32
"""Pages that are in floating point at a time: what bounds the reference's extra memory."""

DecodePages = Callable[[Tensor, Tier, int], tuple[Tensor, Tensor]]
"""Codec: (frames uint8 [P, n, H, FB], tier, head_dim) -> k, v float32 [P, 32, H, D]."""


def decode(q: Tensor, arena: Tensor, table: PageTable, scale: float, *, dense_dtype: torch.dtype, rotated: bool = True,
           decode_pages: DecodePages = quant.decode) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One query token a sequence against its stored pages.

    q [B, Hq, D]; arena uint8 [F, H, frame_bytes] of one layer; query head i reads KV head i // (Hq / H); scale multiplies q·k;
    dense_dtype: what BF16 pages hold; rotated: whether V is stored rotated (the output is rotated back).
    -> out [B, Hq, D] in q's dtype, lse float32 [B, Hq] (natural log; -inf and out 0 where a sequence has no live token).
    """
    if backend.use_triton(q) and decode_pages is quant.decode:
        from kvstrata.ops.decode_kernel import decode_triton

        return decode_triton(q, arena, table, scale, dense_dtype=dense_dtype, rotated=rotated)
    return decode_ref(q, arena, table, scale, dense_dtype=dense_dtype, rotated=rotated, decode_pages=decode_pages)


def decode_ref(q: Tensor, arena: Tensor, table: PageTable, scale: float, *, dense_dtype: torch.dtype, rotated: bool = True,
               decode_pages: DecodePages = quant.decode) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The mathematics of `decode`, on any device."""
    out, lse = attend_pages(q[:, None], arena, table, scale, dense_dtype=dense_dtype, decode_pages=decode_pages)
    out = quant.rotate(out) if rotated else out
    return out[:, 0].to(q.dtype), lse[:, 0]


def tiles(segment: Segment, arena: Tensor, head_dim: int, dense_dtype: torch.dtype, decode_pages: DecodePages) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:  # fmt: skip
    """Pages in floating point, a tile of one sequence at a time: (b, k [S, H, D], v [S, H, D], live bool [S, H]), S a multiple of 32."""
    h = arena.shape[1]
    live = live_tokens(segment, h)
    for b, count in enumerate(segment.counts.tolist()):
        for start in range(0, count, TILE_PAGES):
            ids = segment.frames[b, start : min(start + TILE_PAGES, count)]
            frames = arena[ids.flatten().long()].view(*ids.shape, *arena.shape[1:])
            if segment.tier is Tier.BF16:
                k, v = (x.float() for x in dense.from_frames(frames, head_dim, dense_dtype))
            else:
                k, v = decode_pages(frames, segment.tier, head_dim)
            mask = live[b, start : start + len(ids)].transpose(1, 2).reshape(-1, h)
            yield b, k.reshape(-1, h, head_dim), v.reshape(-1, h, head_dim), mask


def attend_pages(q: Tensor, arena: Tensor, table: PageTable, scale: float, *, dense_dtype: torch.dtype,
                 decode_pages: DecodePages) -> tuple[Tensor, Tensor]:  # fmt: skip
    """All T queries of each sequence see all of its live stored tokens. q [B, T, Hq, D] -> out float32 [B, T, Hq, D] (V as stored),
    lse float32 [B, T, Hq]."""
    b, t, hq, d = q.shape
    h = arena.shape[1]
    out = torch.zeros(b, t, hq, d, device=q.device)
    lse = torch.full((b, t, hq), -torch.inf, device=q.device)
    # grouped-query heads are folded into the query axis: [H, G * T, D] against [H, S, D]; K and V are never expanded
    folded = (q.float() * scale).view(b, t, h, hq // h, d).permute(0, 2, 3, 1, 4).reshape(b, h, -1, d)
    for segment in table.segments:
        for i, k, v, live in tiles(segment, arena, d, dense_dtype, decode_pages):
            scores = folded[i] @ k.permute(1, 2, 0)
            if not live.all():
                scores = scores.masked_fill(~live.T[:, None, :], -torch.inf)
            part_lse = torch.logsumexp(scores, -1)
            p = torch.exp(scores - torch.where(torch.isinf(part_lse), 0.0, part_lse)[..., None])
            part = p @ v.transpose(0, 1)
            part = part.view(h, hq // h, t, d).permute(2, 0, 1, 3).reshape(t, hq, d)
            part_lse = part_lse.view(h, hq // h, t).permute(2, 0, 1).reshape(t, hq)
            out[i], lse[i] = merge(torch.stack([out[i], part]), torch.stack([lse[i], part_lse]))
    return out, lse


