"""What every attention kernel asks of its arguments, and a page table as kernels take it. Knows nothing of any one kernel."""

import torch
from torch import Tensor

from kvstrata.ops import frame
from kvstrata.ops.table import PageTable
from kvstrata.types import Tier

TIERS = (Tier.BF16, Tier.INT8, Tier.INT4, Tier.INT3, Tier.INT2)
"""The order in which kernels take a sequence's tiers."""


def check(q: Tensor, num_kv_heads: int, arena: Tensor, dense_dtype: torch.dtype) -> None:
    """Raises ValueError for what no kernel does. q [..., Hq, D], arena uint8 [F, H, frame_bytes]."""
    hq, d = q.shape[-2:]
    group = hq // num_kv_heads
    if q.dtype not in (torch.bfloat16, torch.float16) or dense_dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"queries are {q.dtype} and dense pages {dense_dtype}; the kernel accepts torch.bfloat16 and torch.float16")
    if group * num_kv_heads != hq or not 1 <= group <= 16:
        raise ValueError(f"{hq} query heads on {num_kv_heads} KV heads; the kernel accepts 1 to 16 query heads to a KV head")
    frame_bytes = frame.frame_bytes(frame.check_head_dim(d))
    if arena.shape[2] != frame_bytes or not arena.is_contiguous():
        raise ValueError(f"arena {tuple(arena.shape)} must be contiguous, with {frame_bytes} bytes a frame and KV head at head_dim {d}")


def of_tiers(table: PageTable, nothing: Tensor, all_live: int) -> list[Tensor | int]:
    """Five arguments for each tier of TIERS: frames, counts, live masks, pages of a row (0: no pages), KV heads of the masks.

    nothing: stands in for tensors that are not there; all_live: for the heads of masks that are not there."""
    segments = {s.tier: s for s in table.segments}
    out: list[Tensor | int] = []
    for tier in TIERS:
        s = segments.get(tier)
        if s is None:
            out += [nothing, nothing, nothing, 0, all_live]
        else:
            live, heads = (nothing, all_live) if s.live is None else (s.live.contiguous(), s.live.shape[2])
            out += [s.frames.contiguous(), s.counts.contiguous(), live, s.frames.shape[1], heads]
    return out
