"""The pages that a batch attends, grouped by tier. Knows nothing of how they were chosen."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.types import PAGE_SIZE, Tier

ALL_LIVE = -1
"""A live mask with all 32 bits set, as int32."""


def described(x: Tensor) -> str:
    """Dtype, shape and device, for messages."""
    return f"{x.dtype} {list(x.shape)} on {x.device}"


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

    def __post_init__(self) -> None:
        """Raises ValueError for what kernels would read past or as other numbers. Values are not looked at: they are on the device."""
        frames, counts, live = self.frames, self.counts, self.live
        if self.tier is Tier.EVICTED:
            raise ValueError("a segment of tier EVICTED: such pages have no frames; accepted: BF16, INT8, INT4, INT3, INT2")
        if frames.dtype != torch.int32 or frames.ndim != 3:
            raise ValueError(
                f"frames of {self.tier.name} are {frames.dtype} {list(frames.shape)}; accepted: int32 [B, N, frames of a page]"
            )
        b, n, _ = frames.shape
        if counts.dtype != torch.int32 or counts.shape != (b,) or counts.device != frames.device:
            raise ValueError(f"counts of {self.tier.name} are {described(counts)}; accepted: int32 [{b}] on {frames.device}")
        if live is None:
            return
        if live.dtype != torch.int32 or live.ndim != 3 or live.shape[:2] != (b, n) or live.device != frames.device:
            raise ValueError(
                f"live masks of {self.tier.name} are {described(live)}; accepted: int32 [{b}, {n}, 1 or KV heads] on {frames.device}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """Segments of a ragged batch of B sequences, one a tier at most. Their order and that of the pages is of no consequence:
    positions are in the keys already."""

    segments: tuple[Segment, ...]
    batch: int

    def __post_init__(self) -> None:
        tiers = [s.tier for s in self.segments]
        if len(set(tiers)) < len(tiers):
            raise ValueError(f"segments of tiers {', '.join(t.name for t in tiers)}; accepted: one of a tier at most")
        for s in self.segments:
            if len(s.frames) != self.batch:
                raise ValueError(f"the segment of {s.tier.name} has {len(s.frames)} sequences, the table {self.batch}; they must be equal")


def live_tokens(segment: Segment, num_kv_heads: int) -> Tensor:
    """bool [B, N, H, 32]: tokens to attend."""
    b, n, _ = segment.frames.shape
    bits = torch.arange(PAGE_SIZE, device=segment.frames.device, dtype=torch.int32)
    present = torch.arange(n, device=segment.frames.device)[None, :] < segment.counts[:, None]
    if segment.live is None:
        return present[:, :, None, None].expand(b, n, num_kv_heads, PAGE_SIZE)
    live = (segment.live[..., None] >> bits) & 1 == 1
    return (live & present[:, :, None, None]).expand(b, n, num_kv_heads, PAGE_SIZE)
