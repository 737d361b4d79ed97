"""Reading stored pages whole, as numbers. Knows nothing of who owns the frames."""

import torch
from torch import Tensor

from kvstrata.ops import arguments, backend, quant
from kvstrata.ops.write import read_dense
from kvstrata.types import Tier


def read_pages(arena: Tensor, frames: Tensor, tier: Tier, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Pages of one tier of the planes codec, or BF16 pages of any. arena uint8 [F, H, frame_bytes], frames int32 [P, n] -> k, v
    [P, 32, H, D] of `dtype`, that of the BF16 pages; v as stored: rotated. Raises ValueError for other shapes, dtypes and devices."""
    if tier is Tier.EVICTED:
        raise ValueError("pages of tier EVICTED have no frames; accepted: INT2, INT3, INT4, INT8, BF16")
    if tier.k_planes:
        arguments.check_planes_arena(arena, head_dim)
    arguments.check_frames("frames", frames, len(frames), arguments.frames_of(tier, head_dim, dtype.itemsize, arena.shape[2]), arena)
    if tier is Tier.BF16:
        return read_dense(arena, frames, head_dim, dtype)
    if backend.use_triton(arena) and dtype in (torch.bfloat16, torch.float16):
        from kvstrata.ops.read_kernel import read_pages_triton

        return read_pages_triton(arena, frames, tier, head_dim, dtype)
    return read_pages_ref(arena, frames, tier, head_dim, dtype)


def read_pages_ref(arena: Tensor, frames: Tensor, tier: Tier, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The mathematics of `read_pages` of planes, on any device."""
    k, v = quant.decode(arena[frames.long()], tier, head_dim)
    return k.to(dtype), v.to(dtype)
