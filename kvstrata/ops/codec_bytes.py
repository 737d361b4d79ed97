"""Bytes of the papers' codecs: how many make a frame, and how codes and metadata become them.

A page of one KV head is a run of bytes (K codes, V codes, metadata) cut into frames; the last frame is filled up with zeros.
Knows nothing of how codes are chosen: that is a subclass's two methods.
"""

import abc
import functools

import torch
from torch import Tensor

from kvstrata.ops import frame, quant
from kvstrata.types import PAGE_SIZE, Tier

MAX_FILL = 0.01
"""Largest share by which a page of any tier may exceed its own bytes, so that all tiers are made of equal frames."""


@functools.cache
def fit_frame(sizes: tuple[int, ...]) -> int:
    """Bytes of the largest frame, a multiple of 4, in which pages of all `sizes` (bytes) are at most MAX_FILL too long.

    Among frames that give the same counts the shortest is taken: sizes with a common divisor waste nothing.
    """
    for size_ in range(min(sizes) // 4 * 4 + 4, 3, -4):
        counts = [-(-size // size_) for size in sizes]
        if all(count * size_ <= size * (1 + MAX_FILL) for count, size in zip(counts, sizes, strict=True)):
            return max(-(-size // (4 * count)) * 4 for count, size in zip(counts, sizes, strict=True))
    raise AssertionError(f"no frame fits {sizes}")


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [..., N] of 2, 4 or 8 bits -> uint8 [..., N * bits / 8], the first code lowest."""
    per_byte = 8 // bits
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (codes.unflatten(-1, (-1, per_byte)) << shifts).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """Inverse of pack_bits."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def to_bytes(values: Tensor) -> Tensor:
    """Any dtype [P, H, ...] -> uint8 [P, H, bytes]."""
    return values.flatten(2).contiguous().view(torch.uint8)


class PackedCodec(abc.ABC):
    """What the papers' codecs share: frames that fit all their tiers, and the checks at the boundary."""

    name: str
    rotates_v: bool = False
    tiers: tuple[Tier, ...]
    residual_tier: Tier | None = None

    @abc.abstractmethod
    def _sizes(self, tier: Tier, head_dim: int) -> list[int]:
        """Bytes of each run of a page of one KV head."""

    @abc.abstractmethod
    def _encode(self, k: Tensor, v: Tensor, tier: Tier) -> list[Tensor]:
        """k, v float32 [P, H, 32, D] -> runs uint8 [P, H, bytes], as long as _sizes says."""

    @abc.abstractmethod
    def _decode(self, runs: list[Tensor], tier: Tier, head_dim: int) -> tuple[Tensor, Tensor]:
        """Inverse of _encode: k, v float32 [P, H, 32, D]."""

    def page_bytes(self, tier: Tier, head_dim: int) -> int:
        """Bytes of a page of one KV head before it is cut into frames."""
        return sum(self._sizes(self._check_tier(tier), head_dim))

    def frame_bytes(self, head_dim: int) -> int:
        """Bytes of one frame for one KV head, equal for all tiers; pages of 16-bit numbers fit it too."""
        frame.check_head_dim(head_dim)
        return fit_frame((*(self.page_bytes(t, head_dim) for t in self.tiers), 2 * PAGE_SIZE * head_dim * 2))

    def num_frames(self, tier: Tier, head_dim: int, dense_itemsize: int = 2) -> int:
        """Frames of a page; a BF16 page holds numbers of `dense_itemsize` bytes."""
        if tier is Tier.EVICTED:
            return 0
        size = 2 * PAGE_SIZE * head_dim * dense_itemsize if tier is Tier.BF16 else self.page_bytes(tier, head_dim)
        return -(-size // self.frame_bytes(head_dim))

    def encode(self, k: Tensor, v: Tensor, tier: Tier) -> Tensor:
        """k, v [P, 32, H, D] of any float dtype -> uint8 [P, n, H, frame_bytes].

        Raises ValueError for a tier that the codec has not or a wrong shape, NonFiniteError for NaN or Inf.
        """
        self._check_tier(tier)
        quant.check_pages(k, v)
        runs = self._encode(k.float().transpose(1, 2), v.float().transpose(1, 2), tier)
        size, count = self.frame_bytes(k.shape[-1]), self.num_frames(tier, k.shape[-1])
        page = torch.cat(runs, -1)
        page = torch.nn.functional.pad(page, (0, count * size - page.shape[-1]))
        return page.unflatten(-1, (count, size)).transpose(1, 2).contiguous()

    def decode(self, frames: Tensor, tier: Tier, head_dim: int) -> tuple[Tensor, Tensor]:
        """uint8 [P, n, H, frame_bytes] -> k, v float32 [P, 32, H, D]. Raises ValueError for a wrong shape or tier."""
        count, size = self.num_frames(self._check_tier(tier), head_dim), self.frame_bytes(head_dim)
        if frames.ndim != 4 or frames.shape[1] != count or frames.shape[3] != size:
            raise ValueError(f"frames {tuple(frames.shape)} must be [pages, {count}, KV heads, {size}] for {self.name} at {tier.name}")
        sizes = self._sizes(tier, head_dim)
        page = frames.transpose(1, 2).flatten(2)[..., : sum(sizes)]
        k, v = self._decode([run.contiguous() for run in page.split(sizes, -1)], tier, head_dim)
        return k.transpose(1, 2), v.transpose(1, 2)

    def _check_tier(self, tier: Tier) -> Tier:
        if tier not in self.tiers:
            raise ValueError(f"codec {self.name!r} has no tier {tier.name}; accepted: {', '.join(t.name for t in self.tiers)}")
        return tier
