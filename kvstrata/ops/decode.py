"""Attention over stored pages: tier by tier, tile by tile, merged by log-sum-exp. Knows nothing of stores or sequences."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvstrata.ops import arguments, backend, decode_cuda, dense, quant
from kvstrata.ops.merge import merge
from kvstrata.ops.table import PageTable, Segment, live_tokens
from kvstrata.types import PAGE_SIZE, Tier

TILE_PAGES, TILE_PAGES_MANY = 128, 32
"""Pages that are in floating point at a time, for few queries and for many: what bounds the reference's extra memory."""

DecodePages = Callable[[Tensor, Tier, int], tuple[Tensor, Tensor]]
"""Codec: (frames uint8 [P, n, H, FB], tier, head_dim) -> k, v float32 [P, 32, H, D]."""


def has_kernel(q: Tensor, dense_dtype: torch.dtype, decode_pages: DecodePages) -> bool:
    """Whether attention of q runs as a kernel: its numbers have 16 bits, so a float32 model takes the reference."""
    return backend.use_triton(q) and decode_pages is quant.decode and q.dtype.itemsize == dense_dtype.itemsize == 2


def decode(q: Tensor, arena: Tensor, table: PageTable, scale: float, *, dense_dtype: torch.dtype, rotated: bool = True,
           decode_pages: DecodePages = quant.decode, out: Tensor | None = None,
           workspace: decode_cuda.Workspace | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One query token a sequence against its stored pages.

    q [B, Hq, D]; arena uint8 [F, H, frame_bytes] of one layer; query head i reads KV head i // (Hq / H); scale multiplies q·k;
    dense_dtype: what BF16 pages hold; rotated: whether V is stored rotated (the output is rotated back).
    out: where the result goes; workspace: what the CUDA kernel writes to, so that nothing is allocated (others do without).
    -> out [B, Hq, D] in q's dtype, lse float32 [B, Hq] (natural log; -inf and out 0 where a sequence has no live token).
    Raises ValueError for shapes, dtypes and devices other than these.
    """
    planes = decode_pages is quant.decode
    arguments.check_attention(q, arena, table, dense_dtype, planes=planes)
    if len(q) != table.batch:
        raise ValueError(f"{len(q)} queries for {table.batch} sequences; accepted: one a sequence")
    if planes and backend.use_cuda(q) and decode_cuda.supports(q, arena.shape[1], dense_dtype):
        return decode_cuda.decode_cuda(q, arena, table, scale, dense_dtype=dense_dtype, rotated=rotated, workspace=workspace, out=out)
    if has_kernel(q, dense_dtype, decode_pages):
        from kvstrata.ops.decode_kernel import decode_triton

        result, lse = decode_triton(q, arena, table, scale, dense_dtype=dense_dtype, rotated=rotated)
    else:
        result, lse = decode_ref(q, arena, table, scale, dense_dtype=dense_dtype, rotated=rotated, decode_pages=decode_pages)
    return (result if out is None else out.copy_(result)), lse


def decode_ref(q: Tensor, arena: Tensor, table: PageTable, scale: float, *, dense_dtype: torch.dtype, rotated: bool = True,
               decode_pages: DecodePages = quant.decode) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The mathematics of `decode`, on any device."""
    out, lse = attend_pages(q[:, None], arena, table, scale, dense_dtype=dense_dtype, decode_pages=decode_pages)
    out = quant.rotate(out) if rotated else out
    return out[:, 0].to(q.dtype), lse[:, 0]


Half = Tensor | quant.Unpacked
"""K or V of a tile: float32 [P, H, 32, D], or unpacked planes, whose channels are in word order."""


def tiles(
    segment: Segment, arena: Tensor, head_dim: int, dense_dtype: torch.dtype, decode_pages: DecodePages, tile_pages: int
) -> Iterator[tuple[int, Half, Half, Tensor | None]]:
    """Pages of one sequence, a tile at a time: (b, k, v, live bool [P, H, 32] or None)."""
    live = None if segment.live is None else live_tokens(segment, arena.shape[1])
    for b, count in enumerate(segment.counts.tolist()):
        for start in range(0, count, tile_pages):
            end = min(start + tile_pages, count)
            ids = segment.frames[b, start:end]
            frames = arena.index_select(0, ids.flatten()).view(*ids.shape, *arena.shape[1:])
            k: Half
            v: Half
            if segment.tier is Tier.BF16:
                k, v = (x.float().transpose(1, 2) for x in dense.from_frames(frames, head_dim, dense_dtype))
            elif decode_pages is quant.decode:
                k, v = quant.unpack(frames, segment.tier, head_dim)
            else:
                k, v = (x.transpose(1, 2) for x in decode_pages(frames, segment.tier, head_dim))
            yield b, k, v, None if live is None else live[b, start:end]


def attend_pages(q: Tensor, arena: Tensor, table: PageTable, scale: float, *, dense_dtype: torch.dtype,
                 decode_pages: DecodePages) -> tuple[Tensor, Tensor]:  # fmt: skip
    """All T queries of each sequence see all of its live stored tokens. q [B, T, Hq, D] -> out float32 [B, T, Hq, D] (V as stored),
    lse float32 [B, T, Hq]."""
    b, t, hq, d = q.shape
    h = arena.shape[1]
    rows = hq // h * t
    # grouped-query heads are folded into the query axis: [H, G * T, D] against [H, S, D]; K and V are never expanded
    folded = (q.float() * scale).view(b, t, h, hq // h, d).permute(0, 2, 3, 1, 4).reshape(b, h, rows, d)
    out = torch.zeros(b, h, rows, d, device=q.device)
    lse = torch.full((b, h, rows), -torch.inf, device=q.device)
    order = quant.word_order(d).to(q.device)
    in_words = folded[..., order]
    tile_pages = TILE_PAGES if rows <= PAGE_SIZE else TILE_PAGES_MANY
    for segment in table.segments:
        for i, k, v, live in tiles(segment, arena, d, dense_dtype, decode_pages, tile_pages):
            words = isinstance(k, quant.Unpacked)
            part, part_lse = _attend_tile(in_words[i] if words else folded[i], k, v, live)
            if words:
                part = torch.empty_like(part).index_copy_(-1, order, part)
            out[i], lse[i] = merge(torch.stack([out[i], part]), torch.stack([lse[i], part_lse]))
    return (
        out.view(b, h, hq // h, t, d).permute(0, 3, 1, 2, 4).reshape(b, t, hq, d),
        lse.view(b, h, hq // h, t).permute(0, 3, 1, 2).reshape(b, t, hq),
    )


def _attend_tile(q: Tensor, k: Half, v: Half, live: Tensor | None) -> tuple[Tensor, Tensor]:
    """q [H, R, D] against a tile, live bool [P, H, 32] or None -> out [H, R, D], lse [H, R]."""
    if q.shape[1] > PAGE_SIZE:
        # many queries: to dequantize the tile costs less than to scale every query by it, and one product a head pays for a move
        k, v = (x.dequantize() if isinstance(x, quant.Unpacked) else x for x in (k, v))
        k, v = (x.transpose(0, 1).reshape(1, x.shape[1], -1, x.shape[3]) for x in (k, v))
        live = None if live is None else live.transpose(0, 1).reshape(1, q.shape[0], -1)
    if isinstance(k, quant.Unpacked):
        scores = (q * k.scale) @ k.steps.transpose(2, 3) + (q * k.lo).sum(-1, keepdim=True)
    else:
        scores = q @ k.transpose(2, 3)  # [P, H, R, 32] or [1, H, R, S]
    if live is not None:
        scores = scores.masked_fill(~live[:, :, None, :], -torch.inf)
    # a tile without a live token has maximum -inf: subtract 0 instead
    top = scores.amax((0, 3), keepdim=True)
    p = torch.exp(scores - torch.where(torch.isinf(top), 0.0, top))
    total = p.sum((0, 3))
    if isinstance(v, quant.Unpacked):
        weighed = (p * v.scale.transpose(2, 3)) @ v.steps + (p @ v.lo)
    else:
        weighed = p @ v
    return weighed.sum(0) / torch.where(total == 0, 1.0, total)[..., None], torch.log(total) + top[0, :, :, 0]
