"""Codecs by name: ours (planes) and those of the papers it is compared with, each at the bytes it really takes."""

from typing import Protocol

from torch import Tensor

from kvstrata.ops import frame, quant
from kvstrata.ops.codec_grouped import Kivi, TriAxial
from kvstrata.ops.codec_scaled import Fp8, HyQuant, HyQuantFloat, Int8
from kvstrata.types import PAGE_SIZE, Tier


class Codec(Protocol):
    """How a page becomes frames. A page is [32, H, D] of K and of V; frames are uint8 [n, H, frame_bytes].

    name: under which CODECS has it.
    rotates_v: the store rotates V by the Hadamard matrix before it is encoded, and what is decoded is still rotated.
    tiers: the quantized tiers, ascending.
    residual_tier: tier of a page of fewer than 32 tokens outside the window; None: it stays dense.
    """

    name: str
    rotates_v: bool
    tiers: tuple[Tier, ...]
    residual_tier: Tier | None

    def frame_bytes(self, head_dim: int) -> int:
        """Bytes of one frame for one KV head, equal for all tiers."""
        ...

    def num_frames(self, tier: Tier, head_dim: int, dense_itemsize: int = 2) -> int:
        """Frames of a page: 0 for EVICTED; a BF16 page holds numbers of `dense_itemsize` bytes. ValueError: not a tier of the codec."""
        ...

    def encode(self, k: Tensor, v: Tensor, tier: Tier) -> Tensor:
        """k, v [P, 32, H, D] -> uint8 [P, n, H, frame_bytes]. Raises ValueError, and NonFiniteError for NaN or Inf."""
        ...

    def decode(self, frames: Tensor, tier: Tier, head_dim: int) -> tuple[Tensor, Tensor]:
        """uint8 [P, n, H, frame_bytes] -> k, v float32 [P, 32, H, D]."""
        ...


class Planes:
    """The planes codec (quant.py): a page of fewer planes is a prefix of the frames of one of more."""

    name = "planes"
    rotates_v = True
    tiers: tuple[Tier, ...] = (Tier.INT2, Tier.INT3, Tier.INT4, Tier.INT8)
    residual_tier: Tier | None = None

    def frame_bytes(self, head_dim: int) -> int:
        return frame.frame_bytes(frame.check_head_dim(head_dim))

    def num_frames(self, tier: Tier, head_dim: int, dense_itemsize: int = 2) -> int:
        size = self.frame_bytes(head_dim)
        return -(-2 * PAGE_SIZE * head_dim * dense_itemsize // size) if tier is Tier.BF16 else tier.value

    def encode(self, k: Tensor, v: Tensor, tier: Tier) -> Tensor:
        return quant.encode(k, v, tier)

    def decode(self, frames: Tensor, tier: Tier, head_dim: int) -> tuple[Tensor, Tensor]:
        return quant.decode(frames, tier, head_dim)


CODECS: dict[str, type[Codec]] = {
    "planes": Planes,
    "kivi": Kivi,
    "triaxial": TriAxial,
    "hyquant": HyQuant,
    "hyquant-fp": HyQuantFloat,
    "fp8": Fp8,
    "int8": Int8,
}


def make_codec(name: str) -> Codec:
    """The codec of that name. Raises ValueError naming the accepted ones."""
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}; accepted: {', '.join(CODECS)}")
    return CODECS[name]()
