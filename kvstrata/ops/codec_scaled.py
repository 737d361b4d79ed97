"""Codecs of one scale and no zero point: HyQuant's tiles (integer and float), fp8, and int8 per token and head.

A code is the number x / scale in a small format, where scale = max |x| / the format's largest number: 127 and 7 for integers
(symmetric: -128 and -8 are not used), 448 for FP8 e4m3, 6 for FP4 e2m1. Scales are float32, since there are so few of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.ops.codec_bytes import PackedCodec, pack_bits, to_bytes, unpack_bits
from kvstrata.types import PAGE_SIZE, Tier

SMALLEST = torch.finfo(torch.float32).tiny
"""What a tile of zeros gets for a scale, and the least that a tile of denormal numbers gets."""
_LARGEST = torch.finfo(torch.float32).max
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def fp4_codes(x: Tensor) -> Tensor:
    """Nearest FP4 e2m1 number, ties to the even code, beyond 6 saturating: float32 -> uint8 in [0, 16), bit 3 the sign."""
    middles = torch.tensor(_FP4_MIDDLES, device=x.device)
    size = x.abs().contiguous()
    below, above = torch.bucketize(size, middles), torch.bucketize(size, middles, right=True)
    return (torch.where(below % 2 == 0, below, above) + 8 * torch.signbit(x)).to(torch.uint8)


def fp8_codes(x: Tensor) -> Tensor:
    """Nearest FP8 e4m3 number, beyond 448 saturating: float32 -> uint8."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Format:
    bits: int
    largest: float
    is_float: bool

    def codes(self, x: Tensor) -> Tensor:
        """x in [-largest, largest] -> uint8 codes."""
        if self.is_float:
            return fp8_codes(x) if self.bits == 8 else fp4_codes(x)
        return x.round().clamp(-self.largest, self.largest).to(torch.int8).view(torch.uint8) & ((1 << self.bits) - 1)

    def values(self, codes: Tensor) -> Tensor:
        """uint8 codes -> float32."""
        if self.is_float and self.bits == 8:
            return codes.view(torch.float8_e4m3fn).float()
        if self.is_float:
            numbers = torch.tensor((*FP4_VALUES, *(-x for x in FP4_VALUES)), device=codes.device)
            return numbers[codes.long()]
        # two's complement of `bits` bits
        sign = 1 << (self.bits - 1)
        return ((codes.int() ^ sign) - sign).float()


INT8, INT4 = Format(8, 127.0, False), Format(4, 7.0, False)
FP8, FP4 = Format(8, 448.0, True), Format(4, 6.0, True)


class HyQuant(PackedCodec):
    """One scale a tile, which is one page of one head's K or V."""

    name = "hyquant"
    tiers: tuple[Tier, ...] = (Tier.INT4, Tier.INT8)
    formats: tuple[Format, ...] = (INT4, INT8)
    scale_dims: tuple[int, ...] | None = (2, 3)
    """Dimensions of [P, H, 32, D] that share a scale; None: no scale at all."""

    def _format(self, tier: Tier) -> Format:
        return self.formats[self.tiers.index(tier)]

    def _num_scales(self) -> int:
        return 0 if self.scale_dims is None else 1 if self.scale_dims == (2, 3) else PAGE_SIZE

    def _sizes(self, tier: Tier, head_dim: int) -> list[int]:
        codes, scales = PAGE_SIZE * head_dim * self._format(tier).bits // 8, 4 * self._num_scales()
        return [codes, codes, scales, scales]

    def _encode(self, k: Tensor, v: Tensor, tier: Tier) -> list[Tensor]:
        form, codes, scales = self._format(tier), [], []
        for x in (k, v):
            if self.scale_dims is None:
                scales.append(x.new_empty(*x.shape[:2], 0, dtype=torch.uint8))
            else:
                scale = (x.abs().amax(self.scale_dims, keepdim=True) / form.largest).clamp(min=SMALLEST)
                scales.append(to_bytes(scale))
                x = x / scale
            codes.append(pack_bits(form.codes(x).flatten(2), form.bits))
        return [*codes, *scales]

    def _decode(self, runs: list[Tensor], tier: Tier, head_dim: int) -> tuple[Tensor, Tensor]:
        form, out = self._format(tier), []
        for packed, scales in ((runs[0], runs[2]), (runs[1], runs[3])):
            x = form.values(unpack_bits(packed, form.bits)).unflatten(-1, (PAGE_SIZE, head_dim))
            if self.scale_dims is not None:
                # the largest float, divided and multiplied again, may round to infinity
                x = (x * scales.view(torch.float32)[..., None]).clamp(-_LARGEST, _LARGEST)
            out.append(x)
        return out[0], out[1]


class HyQuantFloat(HyQuant):
    """HyQuant's tiles in FP4 e2m1 and FP8 e4m3."""

    name = "hyquant-fp"
    formats: tuple[Format, ...] = (FP4, FP8)


class Int8(HyQuant):
    """One scale for each token and head, of K and of V."""

    name = "int8"
    tiers: tuple[Tier, ...] = (Tier.INT8,)
    formats: tuple[Format, ...] = (INT8,)
    scale_dims: tuple[int, ...] | None = (3,)


class Fp8(HyQuant):
    """A plain saturating cast to FP8 e4m3, without a scale."""

    name = "fp8"
    tiers: tuple[Tier, ...] = (Tier.INT8,)
    formats: tuple[Format, ...] = (FP8,)
    scale_dims: tuple[int, ...] | None = None
