"""Formats that need no package: NVFP4, FP8 and INT4, INT8 by token and head, as engines store them, and BF16. No window, no sinks.

Knows nothing of models.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvstrata.eval.peers.session import Cache
from kvstrata.eval.peers.stored import Kept, StoredCache
from kvstrata.ops.codec_bytes import pack_bits, unpack_bits
from kvstrata.ops.codec_scaled import FP4_VALUES, fp4_codes, fp8_codes

NVFP4_GROUP = 16
FP4_LARGEST, FP8_LARGEST = 6.0, 448.0


def encode_nvfp4(x: Tensor) -> list[Tensor]:
    """Groups of 16 channels in FP4 e2m1, a scale in FP8 e4m3 each, one float32 scale for all. -> codes, scales, scale."""
    groups = x.float().unflatten(-1, (-1, NVFP4_GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    whole = (largest.max() / (FP4_LARGEST * FP8_LARGEST)).clamp(min=torch.finfo(torch.float32).tiny)
    scales = fp8_codes(largest / FP4_LARGEST / whole)
    step = (scales.view(torch.float8_e4m3fn).float() * whole).clamp(min=torch.finfo(torch.float32).tiny)
    return [pack_bits(fp4_codes(groups / step).flatten(-2), 4), scales, whole]


def decode_nvfp4(parts: list[Tensor]) -> Tensor:
    codes, scales, whole = parts
    values = torch.tensor(FP4_VALUES, device=codes.device)
    n = unpack_bits(codes, 4).int()
    x = values[n & 7] * (1 - 2 * (n >> 3).float())
    return (x.unflatten(-1, (-1, NVFP4_GROUP)) * scales.view(torch.float8_e4m3fn).float() * whole).flatten(-2)


def encode_fp8(x: Tensor) -> list[Tensor]:
    """FP8 e4m3 with one float32 scale for all: the largest number is the format's."""
    scale = (x.float().abs().max() / FP8_LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return [fp8_codes(x.float() / scale), scale]


def decode_fp8(parts: list[Tensor]) -> Tensor:
    return parts[0].view(torch.float8_e4m3fn).float() * parts[1]


def encode_by_token(x: Tensor, bits: int) -> list[Tensor]:
    """Integers between a token and head's least and largest number. -> codes, fp16 scale and least number."""
    top = (1 << bits) - 1
    low = x.float().amin(-1, keepdim=True).half()
    scale = ((x.float().amax(-1, keepdim=True) - low.float()) / top).clamp(min=2.0**-24).half()
    codes = ((x.float() - low.float()) / scale.float()).round().clamp(0, top).to(torch.uint8)
    return [pack_bits(codes, bits), scale, low]


def decode_by_token(parts: list[Tensor], bits: int) -> Tensor:
    codes, scale, low = parts
    return unpack_bits(codes, bits) * scale.float() + low.float()


class FormatQuantizer:
    """Keys and values in one of FORMATS."""

    def __init__(self, form: str) -> None:
        self.form, self.dtype = form, torch.float32
        self.layers: list[tuple[list[Tensor], list[Tensor]]] = []

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        assert layer == len(self.layers)
        self.dtype = keys.dtype
        k, v = (self._encode(x) for x in (keys, values))
        self.layers.append((k, v))

    def _encode(self, x: Tensor) -> list[Tensor]:
        if self.form == "bf16":
            return [x.bfloat16()]
        if self.form == "nvfp4":
            return encode_nvfp4(x)
        return encode_fp8(x) if self.form == "fp8" else encode_by_token(x, FORMATS[self.form])

    def _decode(self, parts: list[Tensor]) -> Tensor:
        if self.form == "bf16":
            return parts[0].float()
        if self.form == "nvfp4":
            return decode_nvfp4(parts)
        return decode_fp8(parts) if self.form == "fp8" else decode_by_token(parts, FORMATS[self.form])

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        k, v = (self._decode(parts).to(self.dtype) for parts in self.layers[layer])
        return k, v

    def held(self) -> list[Any]:
        return list(self.layers)


FORMATS = {"nvfp4": 4, "fp8": 8, "int4": 4, "int8": 8, "bf16": 16}
"""Bits of a code."""


@dataclass(frozen=True)
class Format:
    """form: one of FORMATS."""

    form: str
    masked = 0.0
    protocols = ("oneshot",)

    def __post_init__(self) -> None:
        if self.form not in FORMATS:
            raise ValueError(f"unknown format {self.form!r}; accepted: {', '.join(FORMATS)}")

    def open(self, model: PreTrainedModel, protocol: str) -> Cache:
        return StoredCache(model, FormatQuantizer(self.form), Kept(), once=True)
