"""Attention of one layer during a step: what is stored, merged with the new tokens. Knows nothing of models."""

import itertools
from typing import Any

import torch
from torch import Tensor

from kvstrata.ops.decode import decode
from kvstrata.ops.extend import extend
from kvstrata.ops.merge import merge
from kvstrata.ops.prefill import TILE, Precision, prefill
from kvstrata.ops.score import NUM_QUERIES, column_scores
from kvstrata.store.page import Sequence
from kvstrata.store.step import Step
from kvstrata.store.store import Store


def attend(store: Store, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [N, Hq, D], k, v [N, H, D] of the step's new tokens (k and q after RoPE), packed as step.cu_seqlens says -> out [N, Hq, D].

    Each new token attends all stored live tokens of its sequence and, causally, the new ones up to itself, which are in floating
    point: what they will lose, they lose when they are written. But where all sequences of the step are new, and their plans say so, they
    attend themselves in 8 bits.
    """
    arena, layout = store.arena.buffer[layer], store.layout
    counts = [b - a for a, b in itertools.pairwise(step.cu_seqlens)]
    how: dict[str, Any] = {"dense_dtype": store.dense_dtype, "rotated": layout.codec.rotates_v, "decode_pages": layout.decode}
    if counts and all(map(_in_eight_bits, step.sequences, counts, itertools.repeat(store.config.window))):
        parts = itertools.pairwise(step.cu_seqlens)
        return torch.cat(
            [first_prompt(s, store.config.window, q[a:b], k[a:b], v[a:b], scale) for s, (a, b) in zip(step.sequences, parts, strict=True)]
        )
    if any(n != 1 for n in counts):
        return extend(q, k, v, step.cu_seqlens, arena, step.table[layer], scale, **how)
    stored, lse = decode(q, arena, step.table[layer], scale, **how)
    group = q.shape[1] // k.shape[1]
    own_lse = torch.einsum("bhgd,bhd->bhg", q.unflatten(1, (-1, group)).float(), k.float()).flatten(1) * scale
    own = v.repeat_interleave(group, 1)
    return merge(torch.stack([stored, own.to(stored.dtype)]), torch.stack([lse, own_lse]))[0]


def _in_eight_bits(s: Sequence, tokens: int, window: int) -> bool:
    """Whether a step's first `tokens` tokens of a sequence attend themselves in 8 bits: its plan says so, and there is a body at all."""
    return s.num_tokens == 0 and tokens > window + TILE and window > 0 and s.plan.anchors is not None and s.plan.anchors.prefill is not None


def first_prompt(s: Sequence, window: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """A new sequence's tokens over themselves, in 8 bits but for the lines and the window (ops/prefill.py).

    Lines are what the plan's anchors are: the keys outside the window with most of the newest queries' attention."""
    anchors = s.plan.anchors
    assert anchors is not None and anchors.prefill is not None
    scores = column_scores(q[-NUM_QUERIES:], k, scale, anchors.score)[:, : len(k) - window]
    lines = scores.topk(min(anchors.count, scores.shape[1]), dim=1).indices.sort(dim=1).values.int()
    return prefill(q, k, v, lines, scale, window=window, precision=Precision(anchors.prefill))
