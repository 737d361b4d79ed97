"""Pages in floating point: bytes of K, then of V, cut into frames as they come. Knows nothing of codecs."""

import torch
from torch import Tensor

from kvstrata.types import PAGE_SIZE


def num_frames(head_dim: int, itemsize: int, frame_bytes: int) -> int:
    """Frames of a page whose elements are kept whole (14 at head_dim 128 in bfloat16 with the planes codec's frames)."""
    return -(-2 * PAGE_SIZE * head_dim * itemsize // frame_bytes)


def to_frames(k: Tensor, v: Tensor, frame_bytes: int) -> Tensor:
    """k, v [P, 32, H, D] of one dtype -> uint8 [P, n, H, frame_bytes]."""
    p, _, h, d = k.shape
    raw = torch.stack([k, v], 1).permute(0, 3, 1, 2, 4).contiguous().view(torch.uint8).reshape(p, h, 2 * PAGE_SIZE * d * k.element_size())
    n = num_frames(d, k.element_size(), frame_bytes)
    raw = torch.nn.functional.pad(raw, (0, n * frame_bytes - raw.shape[-1]))
    return raw.view(p, h, n, frame_bytes).transpose(1, 2)


def from_frames(frames: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """uint8 [P, n, H, frame_bytes] -> k, v [P, 32, H, D] of `dtype`."""
    p, n, h, frame_bytes = frames.shape
    raw = frames.transpose(1, 2).reshape(p, h, n * frame_bytes)[..., : 2 * PAGE_SIZE * head_dim * dtype.itemsize].contiguous()
    k, v = raw.view(dtype).view(p, h, 2, PAGE_SIZE, head_dim).permute(2, 0, 3, 1, 4)
    return k, v
