"""The planes codec: successive refinement on a 4-bit grid (K per channel, V rotated and per token, 8-bit metadata).

A group's 4-bit code is q = round((x - lo) / s). Its base plane holds the high two bits h, its refinement plane the low two:

    base alone        lo + s * (4 h + 1.5)            the middle of the cell
    both              lo + s * q
    with the residual lo + s * (q + (r - 7.5) / 16)   r: 4 more bits inside the cell (INT8)

K's groups are one channel x the page's 32 tokens, V's one token x all channels of a head after a Hadamard rotation. `s` is an
unsigned float of 4 exponent and 4 mantissa bits, `lo` a signed float of 3 exponent and 4 mantissa bits in units of s. The codes
cover [lo - s/2, lo + 15.5 s], 16 steps, for that is what rounds to them and what the base plane's cells span: `s` is the smallest
for which a group lies inside, so no element is off by more than s/2 at 4 bits. Knows nothing of pages' owners or of where frames lie.
"""

import functools
import math
import warnings
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from kvstrata.ops import frame
from kvstrata.types import PAGE_SIZE, Tier

_ENCODE_PAGES = 64
K_UNIT, V_UNIT = 64.0, 8.0
"""What the stored scale is multiplied by: the largest scale is 124 (K) or 15.5 (V), the smallest 2**-12 or 2**-15."""
_LARGEST_SCALE = 1.9375
_OFFSET_UNIT = 2.0**16
_MAX_OFFSET = 496.0
"""Largest offset, in steps; the smallest is 1/4."""


class NonFiniteError(ValueError):
    """K or V holds NaN or Inf. `where` is (tensor name, page, token, head) of the first one."""

    def __init__(self, message: str, where: tuple[str, int, int, int]) -> None:
        super().__init__(message)
        self.where = where


def all_finite(x: Tensor) -> bool:
    """Whether x holds neither NaN nor Inf, in one pass without a temporary of its size."""
    return not x.numel() or all(bool(torch.isfinite(end)) for end in torch.aminmax(x))


def check_finite(k: Tensor, v: Tensor) -> None:
    """k, v [P, 32, H, D]. Raises NonFiniteError naming the first page, token and head that holds NaN or Inf."""
    for name, x in (("K", k), ("V", v)):
        if all_finite(x):
            continue
        page, token, head, channel = (~torch.isfinite(x)).nonzero()[0].tolist()
        value = x[page, token, head, channel].item()
        raise NonFiniteError(f"{name} is {value} at page {page}, token {token}, KV head {head}, channel {channel}; "
                             "keys and values must be finite", (name, page, token, head))  # fmt: skip


def check_pages(k: Tensor, v: Tensor) -> None:
    """Raises ValueError unless k and v are finite whole pages, [P, 32, H, D], of a head_dim that is supported."""
    if k.shape != v.shape or k.ndim != 4 or k.shape[1] != PAGE_SIZE:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must both be [pages, {PAGE_SIZE}, KV heads, head_dim]")
    frame.check_head_dim(k.shape[-1])
    check_finite(k, v)


@functools.cache
def hadamard(head_dim: int) -> Tensor:
    """float32 [D, D], orthonormal and symmetric: a Hadamard matrix, block-wise where D is no power of two."""
    block = head_dim & -head_dim
    # it is kept: a tensor made in inference mode could not serve a training step later
    with torch.inference_mode(False):
        h = torch.ones(1, 1)
        while h.shape[0] < block:
            h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
        return torch.block_diag(*[h / math.sqrt(block)] * (head_dim // block))


@functools.cache
def _hadamard_on(head_dim: int, device: torch.device) -> Tensor:
    # kept there: a copy from the host would wait for the device, and no CUDA graph could hold it
    with torch.inference_mode(False):
        return hadamard(head_dim).to(device)


def rotate(x: Tensor) -> Tensor:
    """x [..., D] times the Hadamard matrix, in x's dtype. Its own inverse."""
    return (x.float() @ _hadamard_on(x.shape[-1], x.device)).to(x.dtype)


def _bits16(x: Tensor) -> Tensor:
    return x.half().view(torch.int16).int() & 0xFFFF


def _scale_value(byte: Tensor, unit: float) -> Tensor:
    return (byte << 6).to(torch.int16).view(torch.float16).float() * unit


def _scale_byte(s: Tensor, unit: float) -> Tensor:
    """Smallest code whose value is at least s (float32, >= 0)."""
    byte = ((_bits16((s / unit).clamp(max=_LARGEST_SCALE)) + 63) >> 6).clamp(1, 255)
    return torch.where(_scale_value(byte, unit) < s, byte + 1, byte).clamp(max=255)


def _offset_value(byte: Tensor) -> Tensor:
    magnitude = ((byte & 0x7F) << 6).to(torch.int16).view(torch.float16).float() * _OFFSET_UNIT
    return torch.where(byte >= 128, -magnitude, magnitude)


def _offset_byte(z: Tensor) -> Tensor:
    """Largest code whose value is at most z (float32, at least -_MAX_OFFSET)."""
    bits = _bits16(z.abs().clamp(max=_MAX_OFFSET) / _OFFSET_UNIT)
    down, up = bits >> 6, (bits + 63) >> 6
    negative = z < 0
    byte = torch.where(negative, up | 0x80, down)
    over = _offset_value(byte) > z
    return torch.where(over & negative, (byte + 1).clamp(max=0xFF), torch.where(over & (byte > 0), byte - 1, byte))


def _grid(x: Tensor, dim: int, unit: float) -> tuple[Tensor, Tensor, Tensor]:
    """Groups of x (float32) along dim -> scale byte, offset byte (dim kept, size 1), and (x - lo) / s."""
    lo, hi = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    # a group wider than the largest scale can cover saturates, keeping its signs
    reach = 16 * _LARGEST_SCALE * unit
    if ((hi - lo > reach) | (lo.abs() > _MAX_OFFSET * _LARGEST_SCALE * unit)).any():
        warnings.warn(
            f"a group of keys or values spans more than {reach:g}: more than the planes codec can hold; it saturates", stacklevel=3
        )
    lo = torch.where(hi - lo > reach, lo.clamp(min=-reach / 2), lo)
    s_byte = _scale_byte(torch.maximum((hi - lo) / 16, lo.abs() / _MAX_OFFSET), unit)
    # rounding the offset down uncovers the top of the range: widen the step until both ends are inside
    for _ in range(8):
        s = _scale_value(s_byte, unit)
        z = _offset_value(_offset_byte(lo / s + 0.5))
        short = (z + 15.5) * s < hi
        if not short.any():
            break
        wider = torch.maximum(s_byte + 1, _scale_byte((hi - z * s) / 15.5, unit))
        s_byte = torch.where(short, wider, s_byte).clamp(max=255)
    s = _scale_value(s_byte, unit)
    z_byte = _offset_byte(lo / s + 0.5)
    return s_byte, z_byte, x / s - _offset_value(z_byte)


def _codes(steps: Tensor, planes: int) -> list[Tensor]:
    """Steps from lo -> 2-bit codes, one a plane: base, refinement, residual high, residual low."""
    rounded = steps.round().clamp_(0, 15)
    q = rounded.short()
    out = [q >> 2, q & 3]
    if planes == 4:
        r = ((steps - rounded) * 16 + 7.5).round().clamp(0, 15).short()
        out += [r >> 2, r & 3]
    return out[:planes]


def encode(k: Tensor, v: Tensor, tier: Tier) -> Tensor:
    """Quantize and pack pages.

    k, v: [P, 32, H, D] float32, bfloat16 or float16; v already rotated. -> uint8 [P, tier.value, H, frame_bytes].
    Raises ValueError for a tier without planes or a wrong shape, NonFiniteError for NaN or Inf.
    """
    if not tier.k_planes:
        raise ValueError(f"tier {tier.name} has no planes; accepted: INT2, INT3, INT4, INT8")
    check_pages(k, v)
    # a few pages at a time stay in a core's cache
    return torch.cat([_encode(*pages, tier) for pages in zip(k.split(_ENCODE_PAGES), v.split(_ENCODE_PAGES), strict=True)])


def _encode(k: Tensor, v: Tensor, tier: Tier) -> Tensor:
    k, v = (x.float().transpose(1, 2).contiguous() for x in (k, v))
    k_scale, k_offset, k_steps = _grid(k, 2, K_UNIT)
    v_scale, v_offset, v_steps = _grid(v, 3, V_UNIT)
    k_codes, v_codes = _codes(k_steps, tier.k_planes), _codes(v_steps, tier.v_planes)
    words = ((k_scale | k_offset << 8).squeeze(2).short(), (v_scale | v_offset << 8).squeeze(3).short())
    metadata = frame.join_metadata(*words)
    nothing = torch.zeros_like(metadata[0])
    out = []
    for i in range(tier.k_planes):
        bits = (frame.BASE_BITS, frame.REFINE_BITS)[i % 2]
        out.append(torch.cat([frame.k_plane(k_codes[i], bits), metadata[0] if i == 0 else nothing], -1))
        if i < tier.v_planes:
            out.append(torch.cat([frame.v_plane(v_codes[i], bits), metadata[1] if i == 0 else nothing], -1))
    return torch.stack(out, 1).view(torch.uint8)


def _planes_of(tier: Tier) -> tuple[list[int], list[int]]:
    """Indices, within a page's frames, of K's planes and of V's planes."""
    k: list[int] = []
    v: list[int] = []
    n = 0
    for i in range(tier.k_planes):
        k.append(n)
        n += 1
        if i < tier.v_planes:
            v.append(n)
            n += 1
    return k, v


def _steps(planes: list[Tensor]) -> Tensor:
    """Plane words [P, H, 32, C] each -> steps from lo, float32 [P, H, 32, C, 8] (word order)."""
    n = len(planes)
    base, refine = frame.BASE_BITS, frame.REFINE_BITS
    tables = [frame.table(base, 4.0, 1.5 if n == 1 else 0.0 if n == 2 else -7.5 / 16)]
    tables += [frame.table(refine, 1.0, 0.0), frame.table(base, 0.25, 0.0), frame.table(refine, 0.0625, 0.0)]
    out = embedding(planes[0], tables[0].to(planes[0].device))
    for words, values in zip(planes[1:], tables[1:], strict=False):
        out += embedding(words, values.to(words.device))
    return out


@functools.cache
def _metadata_table(unit: float) -> Tensor:
    """float32 [65536, 2]: scale and lo of every metadata word."""
    word = torch.arange(1 << 16, dtype=torch.int32)
    scale = _scale_value(word & 0xFF, unit)
    return torch.stack([scale, _offset_value(word >> 8) * scale], -1)


@functools.cache
def word_order(head_dim: int) -> Tensor:
    """int64 [D]: element i of a row in word order is channel word_order[i]."""
    return torch.arange(head_dim).view(frame.NUM_FIELDS, -1).T.flatten()


class Unpacked(NamedTuple):
    """One of K and V of some pages, unpacked but not dequantized: lo + scale * steps. Channels are in word order.

    steps float32 [P, H, 32, D]; scale, lo float32 [P, H, 1, D] (K) or [P, H, 32, 1] (V).
    """

    steps: Tensor
    scale: Tensor
    lo: Tensor

    def dequantize(self) -> Tensor:
        return torch.addcmul(self.lo, self.steps, self.scale)


def unpack(frames: Tensor, tier: Tier, head_dim: int) -> tuple[Unpacked, Unpacked]:
    """uint8 [P, n, H, frame_bytes] -> K and V, v still rotated: `decode` without moving or multiplying what it unpacks."""
    if not tier.k_planes or frames.ndim != 4 or frames.shape[1] < tier.value or frames.shape[3] != frame.frame_bytes(head_dim):
        raise ValueError(f"frames {list(frames.shape)} of tier {tier.name}; accepted at head_dim {head_dim}: [pages, at least "
                         f"the planes of INT2, INT3, INT4 or INT8, KV heads, {frame.frame_bytes(head_dim)}]")  # fmt: skip
    w = frame.words(frames).unbind(1)
    k_index, v_index = _planes_of(tier)
    k_meta, v_meta = frame.split_metadata(w[0], w[1], head_dim)
    k_meta = k_meta[..., word_order(head_dim).to(k_meta.device)]
    k_scale, k_lo = embedding(k_meta, _metadata_table(K_UNIT).to(k_meta.device))[:, :, None].unbind(-1)
    v_scale, v_lo = embedding(v_meta, _metadata_table(V_UNIT).to(v_meta.device))[..., None, :].unbind(-1)
    k = _steps([frame.k_words(w[i], head_dim) for i in k_index]).flatten(3)
    v = _steps([frame.v_words(w[i], head_dim) for i in v_index]).flatten(3)
    return Unpacked(k, k_scale, k_lo), Unpacked(v, v_scale, v_lo)


def decode(frames: Tensor, tier: Tier, head_dim: int) -> tuple[Tensor, Tensor]:
    """Unpack and dequantize pages: uint8 [P, n, H, frame_bytes], n >= tier.value -> k, v float32 [P, 32, H, D], v still rotated."""
    words = (x.dequantize() for x in unpack(frames, tier, head_dim))
    k, v = (x.unflatten(3, (-1, frame.NUM_FIELDS)).transpose(3, 4).flatten(3).transpose(1, 2) for x in words)
    return k, v
