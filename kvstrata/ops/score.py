"""What stored keys get of the newest queries' attention, key by key: HyQuant's vertical lines. Knows nothing of pages or policies."""

import torch
from torch import Tensor

from kvstrata.ops import backend
from kvstrata.types import check_score

NUM_QUERIES = 64
"""Newest queries that a score is taken from (HyQuant, Ding et al. 2026, Algorithm 1: one reduction for each 64 tokens)."""


def column_scores(q: Tensor, k: Tensor, scale: float, score: str = "mass", visible: Tensor | None = None) -> Tensor:
    """Score of each key, for each KV head.

    q [T, Hq, D]: the last T queries of a sequence of n tokens; k [n, H, D], both after RoPE; query head i reads KV head i // (Hq / H);
    scale multiplies q·k. visible: bool [n, H] or None, keys that are there at all; others score 0 (mass) or -inf (linear).
    -> float32 [H, n].

    mass: sum over queries and the group's heads of softmax(scale q·k), causal: query t of T sees the first n - T + t + 1 keys.
    linear: scale * (mean of q over queries, summed over the group's heads)·k (Algorithm 1). Raises ValueError for an unknown score.
    """
    check_score(score)
    if score == "mass" and backend.use_triton(k) and q.dtype == k.dtype and k.dtype in (torch.bfloat16, torch.float16):
        from kvstrata.ops.score_kernel import mass_triton

        return mass_triton(q, k, scale, visible)
    return column_scores_ref(q, k, scale, score, visible)


def column_scores_ref(q: Tensor, k: Tensor, scale: float, score: str = "mass", visible: Tensor | None = None) -> Tensor:
    """The mathematics of `column_scores`, on any device."""
    t, hq, d = q.shape
    n, h, _ = k.shape
    grouped = q.float().view(t, h, hq // h, d)
    if score == "linear":
        out = torch.einsum("hd,nhd->hn", grouped.mean(0).sum(1) * scale, k.float())
        return out if visible is None else out.masked_fill(~visible.T, -torch.inf)
    hidden = torch.arange(n, device=k.device)[None, :] > torch.arange(n - t, n, device=k.device)[:, None]
    out = torch.empty(h, n, device=k.device)
    # a head at a time: [T, G, n] is the largest that is held
    for head in range(h):
        logits = (grouped[:, head] * scale) @ k[:, head].float().T
        logits.masked_fill_(hidden[:, None, :], -torch.inf)
        if visible is not None:
            logits.masked_fill_(~visible[:, head], -torch.inf)
        out[head] = torch.softmax(logits, -1).nan_to_num_(0.0).sum((0, 1))
    return out


def query_scores(q: Tensor, weights: Tensor, k: Tensor, scale: float, visible: Tensor, pool: str = "max") -> Tensor:
    """Attention that remembered queries pay to each key, for each KV head, whatever the order of queries and keys.

    q [E, Hq, D] and k [n, H, D] after RoPE; weights float32 [E]; visible: bool [n, H], keys that are there. -> float32 [H, n]: the largest
    (pool max) or the sum (sum), over queries and the group's heads, of weight * softmax(scale q·k).
    """
    e, hq, d = q.shape
    n, h, _ = k.shape
    grouped = q.float().view(e, h, hq // h, d)
    out = torch.empty(h, n, device=k.device)
    for head in range(h):
        logits = (grouped[:, head] * scale) @ k[:, head].float().T
        logits.masked_fill_(~visible[:, head], -torch.inf)
        paid = torch.softmax(logits, -1).nan_to_num_(0.0) * weights.to(q.device)[:, None, None]
        out[head] = paid.amax((0, 1)) if pool == "max" else paid.sum((0, 1))
    return out


def linear_score(q: Tensor, weights: Tensor, k: Tensor, scale: float) -> Tensor:
    """Weighted mean of remembered queries, summed over the group's heads, times each key: q [E, Hq, D], weights [E], k [n, H, D] ->
    float32 [H, n]."""
    mean = (q.float() * weights[:, None, None]).sum(0) / weights.sum().clamp(min=1e-9)
    return torch.einsum("hd,nhd->hn", mean.unflatten(0, (k.shape[1], -1)).sum(1) * scale, k.float())
