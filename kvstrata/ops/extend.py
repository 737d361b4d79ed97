"""Attention of a chunk of new tokens: over the stored pages and, causally, over the chunk itself. Knows nothing of stores."""

import itertools

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvstrata.ops import arguments, backend, extend_cuda, quant
from kvstrata.ops.decode import DecodePages, attend_pages, has_kernel
from kvstrata.ops.merge import merge
from kvstrata.ops.table import PageTable, Segment

TILE_QUERIES = 1024
"""Query tokens that are scored at a time."""


def extend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: list[int], arena: Tensor, table: PageTable, scale: float, *,
           dense_dtype: torch.dtype, rotated: bool = True, decode_pages: DecodePages = quant.decode) -> Tensor:  # fmt: skip
    """New tokens of a ragged batch, packed: sequence b owns rows cu_seqlens[b] : cu_seqlens[b + 1] (B + 1 host integers).

    q [N, Hq, D], k, v [N, H, D] (v not rotated) of the chunk; arena uint8 [F, H, frame_bytes]; the pages of `table` all lie before
    the chunk. -> out [N, Hq, D] in q's dtype. Without pages this is plain causal attention. Raises ValueError for shapes, dtypes and
    devices other than these.
    """
    planes = decode_pages is quant.decode
    arguments.check_attention(q, arena, table, dense_dtype, planes=planes)
    arguments.check_chunk(q, k, v, cu_seqlens, arena, table.batch)
    if planes and backend.use_cuda(q) and extend_cuda.accepts(q, arena, dense_dtype):
        return extend_cuda.extend_cuda(q, k, v, cu_seqlens, arena, table, scale, dense_dtype=dense_dtype, rotated=rotated)
    if has_kernel(q, dense_dtype, decode_pages):
        from kvstrata.ops.extend_kernel import extend_triton

        return extend_triton(q, k, v, cu_seqlens, arena, table, scale, dense_dtype=dense_dtype, rotated=rotated)
    return extend_ref(q, k, v, cu_seqlens, arena, table, scale, dense_dtype=dense_dtype, rotated=rotated, decode_pages=decode_pages)


def extend_ref(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: list[int], arena: Tensor, table: PageTable, scale: float, *,
               dense_dtype: torch.dtype, rotated: bool = True, decode_pages: DecodePages = quant.decode) -> Tensor:  # fmt: skip
    """The mathematics of `extend`, on any device."""
    out = torch.empty_like(q)
    for b, (start, end) in enumerate(itertools.pairwise(cu_seqlens)):
        if start == end:
            continue
        chunk = slice(start, end)
        own = one_sequence(table, b)
        if not own.segments:
            out[chunk] = causal(q[chunk], k[chunk], v[chunk], scale)
            continue
        own_out, own_lse = causal_with_lse(q[chunk], k[chunk], v[chunk], scale)
        for i in range(0, end - start, TILE_QUERIES):
            rows = slice(start + i, min(start + i + TILE_QUERIES, end))
            part, lse = attend_pages(q[None, rows], arena, own, scale, dense_dtype=dense_dtype, decode_pages=decode_pages)
            part = quant.rotate(part) if rotated else part
            tile = slice(i, i + TILE_QUERIES)
            merged, _ = merge(torch.stack([part[0], own_out[tile].float()]), torch.stack([lse[0], own_lse[tile]]))
            out[rows] = merged.to(q.dtype)
    return out


def one_sequence(table: PageTable, b: int) -> PageTable:
    """The table of sequence b alone, without empty segments."""
    rows = slice(b, b + 1)
    return PageTable(
        tuple(
            Segment(s.tier, s.frames[rows], s.counts[rows], None if s.live is None else s.live[rows])
            for s in table.segments
            if int(s.counts[b])
        ),
        1,
    )


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [T, Hq, D], k, v [T, H, D] -> out [T, Hq, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def causal_with_lse(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`causal`, with lse float32 [T, Hq]. Memory: a tile of queries against the chunk."""
    t, hq, d = q.shape
    h = k.shape[1]
    out = torch.empty(t, hq, d, device=q.device)
    lse = torch.empty(t, hq, device=q.device)
    k, v = (x.float().transpose(0, 1) for x in (k, v))
    for i in range(0, t, TILE_QUERIES // 4):
        rows = slice(i, min(i + TILE_QUERIES // 4, t))
        n = rows.stop - i
        folded = (q[rows].float() * scale).view(n, h, hq // h, d).permute(1, 2, 0, 3)
        scores = folded @ k[:, None, : rows.stop].transpose(2, 3)
        future = torch.arange(rows.stop, device=q.device) > torch.arange(i, rows.stop, device=q.device)[:, None]
        scores = scores.masked_fill(future, -torch.inf)
        part_lse = torch.logsumexp(scores, -1)
        part = torch.exp(scores - part_lse[..., None]) @ v[:, None, : rows.stop]
        out[rows] = part.permute(2, 0, 1, 3).reshape(n, hq, d)
        lse[rows] = part_lse.permute(2, 0, 1).reshape(n, hq)
    return out, lse
