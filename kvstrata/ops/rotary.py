"""Rotary position embedding of what was rotated already: as if it stood elsewhere. Knows nothing of models."""

import torch
from torch import Tensor


def moved(x: Tensor, by: Tensor, inv_freq: Tensor) -> Tensor:
    """x [N, H, D] after RoPE -> as it would be `by` [N] positions later (negative: earlier), in float32.

    inv_freq float [R / 2]: rotations of the first R channels, whose halves are pairs (channel i with R/2 + i), as Llama and Qwen have them;
    channels beyond are as they are. Rotations add up, so what the position was need not be known.
    """
    half = len(inv_freq)
    angle = by.float()[:, None, None] * inv_freq.float()
    cos, sin = angle.cos(), angle.sin()
    x = x.float()
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)
