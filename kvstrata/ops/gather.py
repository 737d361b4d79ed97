"""Survivors of thinned pages, gathered into dense pages. Knows nothing of how they were chosen."""

import torch
from torch import Tensor

from kvstrata.ops import arguments, backend, dense, quant, write_cuda
from kvstrata.types import PAGE_SIZE, Tier


def gather_pages(arena: Tensor, src_frames: Tensor, tier: Tier, picks: Tensor, dst_frames: Tensor, head_dim: int,
                 dense_dtype: torch.dtype) -> None:  # fmt: skip
    """Copy chosen tokens of pages of one tier into dense pages, each KV head its own choice.

    arena uint8 [F, H, frame_bytes]; src_frames int32 [P, n]; picks int32 [M, 32, H]: token `32 * page + t` of the source pages for
    each slot and KV head, or -1 for nothing (zeros are written; the caller's live mask must clear it); dst_frames int32 [M, n of a
    dense page]. Positions travel inside K (RoPE is already applied). Raises ValueError for other shapes, dtypes and devices.
    """
    if tier is Tier.EVICTED:
        raise ValueError("pages of tier EVICTED have no frames; accepted: INT2, INT3, INT4, INT8, BF16")
    arguments.check_planes_arena(arena, head_dim)
    arguments.check_picks(picks, len(src_frames), arena)
    per_page = (arguments.frames_of(t, head_dim, dense_dtype.itemsize, arena.shape[2]) for t in (tier, Tier.BF16))
    arguments.check_frames("source frames", src_frames, len(src_frames), next(per_page), arena)
    arguments.check_frames("frames", dst_frames, len(picks), next(per_page), arena)
    if backend.use_cuda(arena) and write_cuda.accepts_pages(arena, head_dim, dense_dtype):
        return write_cuda.gather_pages_cuda(arena, src_frames, tier, picks, dst_frames, head_dim, dense_dtype)
    if backend.use_triton(arena) and dense_dtype.itemsize == 2:
        from kvstrata.ops.write_kernel import gather_pages_triton

        return gather_pages_triton(arena, src_frames, tier, picks, dst_frames, head_dim, dense_dtype)
    return gather_pages_ref(arena, src_frames, tier, picks, dst_frames, head_dim, dense_dtype)


def gather_pages_ref(arena: Tensor, src_frames: Tensor, tier: Tier, picks: Tensor, dst_frames: Tensor, head_dim: int,
                     dense_dtype: torch.dtype) -> None:  # fmt: skip
    """The mathematics of `gather_pages`, on any device."""
    frames = arena[src_frames.long()]
    if tier is Tier.BF16:
        pages = dense.from_frames(frames, head_dim, dense_dtype)
    else:
        pages = quant.decode(frames, tier, head_dim)
    m, _, h = picks.shape
    out = []
    for x in pages:
        tokens = x.reshape(-1, h, head_dim)
        index = picks.clamp(min=0).long().view(-1, h, 1).expand(-1, -1, head_dim)
        chosen = torch.where(picks.view(-1, h, 1) >= 0, tokens.gather(0, index), torch.zeros_like(tokens[:1]))
        out.append(chosen.to(dense_dtype).view(m, PAGE_SIZE, h, head_dim))
    arena[dst_frames.flatten().long()] = dense.to_frames(out[0], out[1], arena.shape[2]).flatten(0, 1)
