"""By how much attention's output would change without a key: its share in what the newest queries see. Knows nothing of pages."""

import torch
from torch import Tensor

MOST_SHARE = 0.99
"""Beyond this attention to one key what the output would be without it is lost in rounding; then it counts as nothing."""


def output_shares(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None = None) -> Tensor:
    """Squared change of attention's output without each key, over the mean square of its head's outputs.

    q [T, Hq, D]: the last T queries of a sequence of n tokens; k, v [n, H, D], q and k after RoPE; query head i reads KV head
    i // (Hq / H); scale multiplies q·k. visible: bool [n, H] or None, keys that are there at all; others have no share.
    -> float32 [H, n], the sum over a KV head's query heads, the mean over the queries that see the key: the newest are seen by few.

    Without key i the output o becomes o - p_i (v_i - o) / (1 - p_i), p_i being its attention.
    """
    t, hq, d = q.shape
    n, h, _ = k.shape
    grouped = q.float().view(t, h, hq // h, d)
    hidden = torch.arange(n, device=k.device)[None, :] > torch.arange(n - t, n, device=k.device)[:, None]
    seen_by = (~hidden).sum(0)
    out = torch.empty(h, n, device=k.device)
    # a head at a time: [T, G, n] is the largest that is held
    for head in range(h):
        keys, values = k[:, head].float(), v[:, head].float()
        logits = (grouped[:, head] * scale) @ keys.T
        logits.masked_fill_(hidden[:, None, :], -torch.inf)
        if visible is not None:
            logits.masked_fill_(~visible[:, head], -torch.inf)
        p = torch.softmax(logits, -1).nan_to_num_(0.0)
        o = p @ values  # [T, G, D]
        own = values.square().sum(-1)
        distance = (o.square().sum(-1, keepdim=True) - 2 * o @ values.T + own).clamp(min=0)
        change = torch.where(p > MOST_SHARE, own, distance / (1 - p).clamp(min=1 - MOST_SHARE).square()) * p.square()
        power = o.square().mean((0, 2)).clamp(min=1e-20) * d
        out[head] = (change / power[:, None]).sum((0, 1)) / seen_by
    return out
