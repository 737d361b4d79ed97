"""Attention of one layer during a step: what is stored, merged with the new tokens. Knows nothing of models."""

import itertools
from typing import Any

import torch
from torch import Tensor

from kvstrata.ops.decode import decode
from kvstrata.ops.extend import extend
from kvstrata.ops.merge import merge
from kvstrata.store.step import Step
from kvstrata.store.store import Store


def attend(store: Store, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [N, Hq, D], k, v [N, H, D] of the step's new tokens (k and q after RoPE), packed as step.cu_seqlens says -> out [N, Hq, D].

    Each new token attends all stored live tokens of its sequence and, causally, the new ones up to itself, which are in floating
    point: what they will lose, they lose when they are written.
    """
    arena, layout = store.arena.buffer[layer], store.layout
    counts = [b - a for a, b in itertools.pairwise(step.cu_seqlens)]
    how: dict[str, Any] = {"dense_dtype": store.dense_dtype, "rotated": layout.codec.rotates_v, "decode_pages": layout.decode}
    if any(n != 1 for n in counts):
        return extend(q, k, v, step.cu_seqlens, arena, step.table[layer], scale, **how)
    stored, lse = decode(q, arena, step.table[layer], scale, **how)
    group = q.shape[1] // k.shape[1]
    own_lse = torch.einsum("bhgd,bhd->bhg", q.unflatten(1, (-1, group)).float(), k.float()).flatten(1) * scale
    own = v.repeat_interleave(group, 1)
    return merge(torch.stack([stored, own.to(stored.dtype)]), torch.stack([lse, own_lse]))[0]
