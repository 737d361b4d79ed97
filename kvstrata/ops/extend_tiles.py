"""What both kernels of `extend` ask of their arguments, and how a ragged chunk is cut into tiles. Knows nothing of either kernel."""

import itertools

import torch
from torch import Tensor

from kvstrata.ops import frame


def check(q: Tensor, k: Tensor, arena: Tensor, dense_dtype: torch.dtype) -> None:
    """Raises ValueError for what no kernel does."""
    d, heads, group = q.shape[2], k.shape[1], q.shape[1] // k.shape[1]
    if q.dtype not in (torch.bfloat16, torch.float16) or dense_dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"queries are {q.dtype} and dense pages {dense_dtype}; the kernel accepts torch.bfloat16 and torch.float16")
    if group * heads != q.shape[1] or not 1 <= group <= 16:
        raise ValueError(f"{q.shape[1]} query heads on {heads} KV heads; the kernel accepts 1 to 16 query heads to a KV head")
    frame_bytes = frame.frame_bytes(frame.check_head_dim(d))
    if arena.shape[2] != frame_bytes or not arena.is_contiguous():
        raise ValueError(f"arena {tuple(arena.shape)} must be contiguous, with {frame_bytes} bytes a frame and KV head at head_dim {d}")


def tiles(cu_seqlens: list[int], per_tile: int, rows_per_token: int = 1) -> list[tuple[int, int, int, int]]:
    """(sequence, its first token, its tokens, first row of the tile) of tiles of `per_tile` rows, the longest first: the last rows of a
    chunk see most of it."""
    out = [
        (b, start, end - start, first)
        for b, (start, end) in enumerate(itertools.pairwise(cu_seqlens))
        for first in range(0, (end - start) * rows_per_token, per_tile)
    ]
    return sorted(out, key=lambda tile: -tile[3])
