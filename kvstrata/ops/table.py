"""The pages that a batch attends, grouped by tier. Knows nothing of how they were chosen."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.types import PAGE_SIZE, Tier

ALL_LIVE = -1
"""A live mask with all 32 bits set, as int32."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Pages of one tier.

    frames: int32 [B, N, n]: the n frames of each page, in the order of ops/frame.py; rows past counts[b] are 0 (the dead slot).
    counts: int32 [B]: pages of each sequence, <= N.
    live: int32 [B, N, 1 or H] or None: bit j = token j of the page lives (for that KV head); None = all live.
    """

    tier: Tier
    frames: Tensor
    counts: Tensor
    live: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """Segments of a ragged batch of B sequences, one a tier at most. Their order and that of the pages is of no consequence:
    positions are in the keys already."""

    segments: tuple[Segment, ...]
    batch: int


def live_tokens(segment: Segment, num_kv_heads: int) -> Tensor:
    """bool [B, N, H, 32]: tokens to attend."""
    b, n, _ = segment.frames.shape
    bits = torch.arange(PAGE_SIZE, device=segment.frames.device, dtype=torch.int32)
    present = torch.arange(n, device=segment.frames.device)[None, :] < segment.counts[:, None]
    if segment.live is None:
        return present[:, :, None, None].expand(b, n, num_kv_heads, PAGE_SIZE)
    live = (segment.live[..., None] >> bits) & 1 == 1
    return (live & present[:, :, None, None]).expand(b, n, num_kv_heads, PAGE_SIZE)
