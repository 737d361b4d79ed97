"""Where each bit of a frame lies. Knows nothing of how codes are chosen (quant.py) or of who owns a frame (store/).

A frame is one 2-bit plane of a page's K or V, for each KV head `frame_bytes` bytes, read as little-endian 16-bit words:

    word                frame 0: K base        frame 1: V base          frame 2 ...: refinement planes
    [0, 4D)             K plane                V plane                  plane
    [4D, 4D + D/2)      K metadata [0, D/2)    K metadata [D/2, D)      unused
    [4D + D/2, + 16)    V metadata [0, 16)     V metadata [16, 32)      unused

    K plane word [token 32][c]: its eight fields are channels c, C + c, ..., 7C + c of that token     C = D / 8
    V plane word [c][token 32]: the same eight channels, tokens side by side

The order is chosen for tensor cores: a masked word is an fp16 subnormal, so a code is weighted, never shifted, and the field
positions let base and refinement interleave to nibbles by a bit select. Metadata words hold a scale (low byte) and an offset
in steps (high byte), in the order in which the four lanes of an mma quad need them.

A page's frames, in order: K base, V base, K refinement, V refinement, then for INT8 K and V residual high, K and V residual low.
A prefix of the list is a coarser page: that is what demotion relies on.
"""

import functools

import torch
from torch import Tensor

from kvstrata.types import PAGE_SIZE

NUM_FIELDS = 8
BASE_BITS = (2, 6, 10, 14, 4, 8, 12, 0)
"""Lowest bit of each field of a base plane's word."""
REFINE_BITS = (0, 4, 8, 12, 2, 6, 10, 14)
"""Lowest bit of each field of a refinement plane's word."""

HEAD_DIMS = (64, 80, 96, 128, 256)


def check_head_dim(head_dim: int) -> int:
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim {head_dim} is not supported; accepted: {', '.join(map(str, HEAD_DIMS))}")
    return head_dim


def plane_words(head_dim: int) -> int:
    """16-bit words of one plane of one KV head."""
    return PAGE_SIZE * head_dim // NUM_FIELDS


def metadata_words(head_dim: int) -> int:
    """16-bit words of metadata in each frame of one KV head: half of K's (a channel each) and V's (a token each)."""
    return (head_dim + PAGE_SIZE) // 2


def frame_bytes(head_dim: int) -> int:
    """Bytes of one frame for one KV head: 1184 at head_dim 128, 608 at 64."""
    return 2 * (plane_words(head_dim) + metadata_words(head_dim))


@functools.cache
def lane_order(num: int) -> Tensor:
    """int64 [num]: element i of the stored metadata is channel (or token) lane_order[i]."""
    return torch.arange(num).view(num // 8, 4, 2).transpose(0, 1).flatten()


@functools.cache
def _inverse_lane_order(num: int) -> Tensor:
    return torch.argsort(lane_order(num))


def pack(codes: Tensor, bits: tuple[int, ...]) -> Tensor:
    """2-bit codes [..., 8, N], int16 or wider -> words [..., N] of the same dtype; in int16 the highest field is the sign's."""
    words = codes[..., 0, :] << bits[0]
    for field, bit in enumerate(bits[1:], 1):
        words |= codes[..., field, :] << bit
    return words


@functools.cache
def table(bits: tuple[int, ...], scale: float, offset: float) -> Tensor:
    """float32 [65536, 8]: scale * code + offset of the eight fields of every word."""
    word = torch.arange(1 << 16, dtype=torch.int32)[:, None]
    return ((word >> torch.tensor(bits, dtype=torch.int32)) & 3).float() * scale + offset


def words(frames: Tensor) -> Tensor:
    """uint8 [..., frame_bytes] -> int32 [..., frame_bytes / 2], each in [0, 65536)."""
    return frames.view(torch.uint16).int()


def k_plane(codes: Tensor, bits: tuple[int, ...]) -> Tensor:
    """2-bit codes [P, H, 32, D] -> words [P, H, 4D]."""
    p, h, t, d = codes.shape
    return pack(codes.view(p, h, t, NUM_FIELDS, d // NUM_FIELDS), bits).flatten(2)


def v_plane(codes: Tensor, bits: tuple[int, ...]) -> Tensor:
    """2-bit codes [P, H, 32, D] -> words [P, H, 4D]."""
    p, h, t, d = codes.shape
    return pack(codes.transpose(2, 3).reshape(p, h, NUM_FIELDS, d // NUM_FIELDS * t), bits)


def k_words(frame: Tensor, head_dim: int) -> Tensor:
    """Words [P, H, W] of a K frame -> plane words [P, H, 32, C]."""
    return frame[..., : plane_words(head_dim)].unflatten(-1, (PAGE_SIZE, head_dim // NUM_FIELDS))


def v_words(frame: Tensor, head_dim: int) -> Tensor:
    """Words [P, H, W] of a V frame -> plane words [P, H, 32, C]."""
    return frame[..., : plane_words(head_dim)].unflatten(-1, (head_dim // NUM_FIELDS, PAGE_SIZE)).transpose(2, 3)


def join_metadata(k_meta: Tensor, v_meta: Tensor) -> tuple[Tensor, Tensor]:
    """Metadata words of K [P, H, D] and V [P, H, 32] -> the words of frame 0 and of frame 1, [P, H, M] each."""
    d = k_meta.shape[-1]
    k_meta = k_meta[..., lane_order(d).to(k_meta.device)]
    v_meta = v_meta[..., lane_order(PAGE_SIZE).to(v_meta.device)]
    k, v = k_meta.chunk(2, -1), v_meta.chunk(2, -1)
    return torch.cat([k[0], v[0]], -1), torch.cat([k[1], v[1]], -1)


def split_metadata(k_frame: Tensor, v_frame: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Inverse of join_metadata, from the words [P, H, W] of frames 0 and 1."""
    start = plane_words(head_dim)
    middle = start + head_dim // 2
    k_meta = torch.cat([k_frame[..., start:middle], v_frame[..., start:middle]], -1)
    v_meta = torch.cat([k_frame[..., middle:], v_frame[..., middle:]], -1)
    return (
        k_meta[..., _inverse_lane_order(head_dim).to(k_meta.device)],
        v_meta[..., _inverse_lane_order(PAGE_SIZE).to(v_meta.device)],
    )
