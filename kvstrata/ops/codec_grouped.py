"""Codecs of asymmetric groups of 32 with fp16 scale and zero point: KIVI (arXiv 2402.02750) and TriAxialKV (arXiv 2605.17170).

A group's code is round((x - zero) / scale), `zero` its minimum and `scale` its range over 2**bits - 1. Metadata is fp16, as
published: values beyond +-65504 saturate. Where head_dim is no multiple of 32 the last group of a token is shorter.
"""

import torch
from torch import Tensor

from kvstrata.ops.codec_bytes import PackedCodec, pack_bits, to_bytes, unpack_bits
from kvstrata.types import PAGE_SIZE, Tier

GROUP = 32
"""Channels of a token in one group, and tokens of a channel (a page of them)."""
SMALLEST = 2.0**-24
"""Smallest scale that fp16 can hold: what a group of equal values gets."""


def _num_groups(head_dim: int, per_token: bool) -> int:
    """Groups of K or of V in one page of one head."""
    return PAGE_SIZE * -(-head_dim // GROUP) if per_token else head_dim


def _spread(meta: Tensor, per_token: bool, head_dim: int) -> Tensor:
    """Values of the groups [P, H, groups] -> of the elements, broadcastable to [P, H, 32, D]."""
    if not per_token:
        return meta[:, :, None, :]
    return meta.unflatten(2, (PAGE_SIZE, -1)).repeat_interleave(GROUP, -1)[..., :head_dim]


def _ends(x: Tensor, per_token: bool) -> tuple[Tensor, Tensor]:
    """x [P, H, 32, D] -> minimum and maximum of each group, [P, H, groups]."""
    if not per_token:
        return x.amin(2), x.amax(2)
    # a shorter last group is filled up with its own last value, which moves neither end
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % GROUP, 0, 0), mode="replicate").unflatten(-1, (-1, GROUP))
    return x.amin(-1).flatten(2), x.amax(-1).flatten(2)


def _quantize(x: Tensor, bits: int, per_token: bool) -> tuple[Tensor, Tensor]:
    """x float32 [P, H, 32, D] -> codes uint8 of the same shape, metadata float16 [P, H, groups, 2] (scale, zero)."""
    top, limit = (1 << bits) - 1, torch.finfo(torch.float16).max
    x = x.clamp(-limit, limit)
    low, high = _ends(x, per_token)
    zero = low.half()
    scale = ((high - zero.float()) / top).clamp(min=SMALLEST).half()
    s, z = (_spread(m.float(), per_token, x.shape[-1]) for m in (scale, zero))
    return ((x - z) / s).round().clamp(0, top).to(torch.uint8), torch.stack([scale, zero], -1)


class Kivi(PackedCodec):
    """K per channel over the page's 32 tokens, V per token in groups of 32 channels."""

    name = "kivi"
    tiers: tuple[Tier, ...] = (Tier.INT2, Tier.INT4)
    k_per_token: tuple[Tier, ...] = ()
    """Tiers at which K is grouped like V, by token."""

    def _sizes(self, tier: Tier, head_dim: int) -> list[int]:
        codes = PAGE_SIZE * head_dim * tier.value // 8
        return [codes, codes, 4 * _num_groups(head_dim, tier in self.k_per_token), 4 * _num_groups(head_dim, True)]

    def _encode(self, k: Tensor, v: Tensor, tier: Tier) -> list[Tensor]:
        codes, metadata = [], []
        for x, per_token in ((k, tier in self.k_per_token), (v, True)):
            code, meta = _quantize(x, tier.value, per_token)
            codes.append(pack_bits(code.flatten(2), tier.value))
            metadata.append(to_bytes(meta))
        return [*codes, *metadata]

    def _decode(self, runs: list[Tensor], tier: Tier, head_dim: int) -> tuple[Tensor, Tensor]:
        out = []
        for packed, raw, per_token in ((runs[0], runs[2], tier in self.k_per_token), (runs[1], runs[3], True)):
            codes = unpack_bits(packed, tier.value).unflatten(-1, (PAGE_SIZE, head_dim))
            scale, zero = raw.view(torch.float16).float().unflatten(-1, (-1, 2)).unbind(-1)
            out.append(codes * _spread(scale, per_token, head_dim) + _spread(zero, per_token, head_dim))
        return out[0], out[1]


class TriAxial(Kivi):
    """INT2 as KIVI's; INT4 per token for K too, which is also where a page of fewer than 32 tokens goes."""

    name = "triaxial"
    residual_tier: Tier | None = Tier.INT4
    k_per_token: tuple[Tier, ...] = (Tier.INT4,)
