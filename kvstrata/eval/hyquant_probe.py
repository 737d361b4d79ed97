"""What anchors are worth, from one forward pass: how much attention few tokens take, what attention's output loses, what bytes it costs.

After HyQuant's Table 1, Figures 2, 5 and 6, and Table 14. Knows nothing of sessions or files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstrata.config import StoreConfig
from kvstrata.ops.codecs import Codec
from kvstrata.ops.quant import rotate
from kvstrata.ops.score import NUM_QUERIES, column_scores
from kvstrata.store.layout import Layout
from kvstrata.store.queries import ring_bytes
from kvstrata.types import PAGE_SIZE, Tier

SHARES = (0.01, 0.05)
WINDOW = 128
SAMPLED = 256
"""Queries of a conversation whose attention is looked at."""


def attention(q: Tensor, k: Tensor, positions: Tensor, scale: float) -> Tensor:
    """q [Hq, T, D] at `positions` [T], k [H, n, D] -> causal softmax probabilities float32 [H, G, T, n]."""
    grouped = q.float().unflatten(0, (k.shape[0], -1))
    logits = (grouped * scale) @ k.float()[:, None].transpose(2, 3)
    logits.masked_fill_(torch.arange(k.shape[1])[None, :] > positions[:, None], -torch.inf)
    return torch.softmax(logits, -1)


def coverage(q: Tensor, k: Tensor, scale: float) -> dict[str, float]:
    """Share of attention's mass, of queries spread over the second half of a conversation, that few keys take: one layer, mean over heads.

    q [Hq, n, D], k [H, n, D]. "top 1%" and "top 5%": the keys of most mass over these queries, a choice for each KV head;
    "window": the newest WINDOW keys of each query; "sinks": the first page.
    """
    n = k.shape[1]
    positions = torch.linspace(n // 2, n - 1, SAMPLED).long().unique()
    p = attention(q[:, positions], k, positions, scale)
    recent = positions[:, None] - torch.arange(n)[None, :] < WINDOW
    out = {"window": float((p * recent).sum(-1).mean()), "sinks": float(p[..., :PAGE_SIZE].sum(-1).mean())}
    mass = p.sum((1, 2))
    for share in SHARES:
        top = torch.zeros(k.shape[0], n, dtype=torch.bool)
        top.scatter_(1, mass.topk(max(1, round(share * n)), dim=1).indices, True)
        name = f"top {share:.0%}"
        out[name] = float((p * top[:, None, None]).sum(-1).mean())
        out[f"{name} + window"] = float((p * (top[:, None, None] | recent)).sum(-1).mean())
    return out


@dataclass(frozen=True)
class Kept:
    """What stays whole besides a coarsened body: the first page, the window of recent tokens, a share of anchors; these in full precision
    or, in pages of their own, as `anchors` has them at Tier.INT8."""

    label: str
    codec: Codec
    tier: Tier
    sinks: bool = False
    window: int = 0
    rho: float = 0.0
    anchors: Codec | None = None


@torch.no_grad()
def output_error(q: Tensor, k: Tensor, v: Tensor, scale: float, length: int, kept: Kept) -> float:
    """Relative squared error of attention's output for the NUM_QUERIES queries after a prefix of `length` tokens, which is stored as
    `kept` says: mean over query heads of (mean squared error / mean square of the output). The queries see each other whole.

    q [Hq, n, D], k, v [H, n, D], n >= length + NUM_QUERIES. Anchors are the keys of most mass for the last NUM_QUERIES queries of the
    prefix, as a session chooses them: those of the error come later.
    """
    end = length + NUM_QUERIES
    k, v, codec = k[:, :end].float(), v[:, :end].float(), kept.codec
    if codec.rotates_v:
        v = rotate(v)
    first = PAGE_SIZE if kept.sinks else 0
    last = (length - kept.window) // PAGE_SIZE * PAGE_SIZE
    body = slice(first, max(first, last))
    pages = [x[:, body].transpose(0, 1).unflatten(0, (-1, PAGE_SIZE)) for x in (k, v)]
    coarse = [x.flatten(0, 1).transpose(0, 1) for x in codec.decode(codec.encode(pages[0], pages[1], kept.tier), kept.tier, k.shape[2])]
    stored = [x.clone() for x in (k, v)]
    for out, x in zip(stored, coarse, strict=True):
        out[:, body] = x
    if kept.rho:
        score = column_scores(q[:, length - NUM_QUERIES : length].transpose(0, 1), k[:, :length].transpose(0, 1), scale)[:, body]
        best = (body.start + score.topk(round(kept.rho * score.shape[1]), dim=1).indices)[..., None].expand(-1, -1, k.shape[2])
        whole = [x.gather(1, best) for x in (k, v)]
        for out, x in zip(stored, whole if kept.anchors is None else through(kept.anchors, *whole), strict=True):
            out.scatter_(1, best, x)
    positions = torch.arange(length, end)
    full, got = (attention(q[:, length:end], a, positions, scale) @ b[:, None] for a, b in ((k, v), (stored[0], stored[1])))
    return float(((got - full).square().mean((2, 3)) / full.square().mean((2, 3)).clamp(min=1e-20)).mean())


def through(codec: Codec, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k, v [H, n, D], the most wanted first, as they come back from pages of 32 at INT8. A last page that is not full repeats its first."""
    n, pages = k.shape[1], []
    for x in (k, v):
        first = n // PAGE_SIZE * PAGE_SIZE
        x = torch.cat([x, x[:, first : first + 1].expand(-1, -n % PAGE_SIZE, -1)], 1)
        pages.append(x.transpose(0, 1).unflatten(0, (-1, PAGE_SIZE)))
    back = codec.decode(codec.encode(pages[0], pages[1], Tier.INT8), Tier.INT8, k.shape[2])
    return back[0].flatten(0, 1).transpose(0, 1)[:, :n], back[1].flatten(0, 1).transpose(0, 1)[:, :n]


def overhead(
    *, num_layers: int = 36, num_kv_heads: int = 8, group: int = 4, head_dim: int = 128, tokens: Sequence[int] = (8192, 16384, 32768),
    rho: float = 0.05, window: int = WINDOW,
) -> list[dict[str, Any]]:  # fmt: skip
    """Bytes against strict INT4, all of it arithmetic of Layout, geometry of Qwen3-8B: HyQuant's Table 14.

    Strict INT4 is every page at INT4 of the same codec; "codes" are its 4 bits alone, without metadata. The window is at its widest.
    """
    layout = Layout.of(StoreConfig(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, num_frames=2, window=window))
    queries = ring_bytes(num_layers, num_kv_heads * group, head_dim)
    rows = []
    for n in tokens:
        pages = n // PAGE_SIZE
        recent = 2 * window // PAGE_SIZE
        body = pages - recent - 1
        for tier in (Tier.INT4, Tier.INT3, Tier.INT2):
            for anchors in (Tier.BF16, Tier.INT8):
                anchor_pages = -(-int(np.ceil(rho * body * PAGE_SIZE)) // PAGE_SIZE)
                parts = {
                    "body": body * layout.page_bytes(tier), "anchors_bytes": anchor_pages * layout.page_bytes(anchors),
                    "window and sinks": (recent + 1) * layout.page_bytes(Tier.BF16), "queries": queries,
                }  # fmt: skip
                total, strict = sum(parts.values()), pages * layout.page_bytes(Tier.INT4)
                rows.append(
                    {"tokens": n, "tier": tier.name, "anchors": anchors.name, "bits": 8 * total / layout.elements(n), **parts}
                    | {"over_strict": total / strict - 1, "over_codes": 8 * total / layout.elements(n) / 4 - 1}
                )
    return rows


def page_mass(queries: Sequence[Tensor], keys: Sequence[Tensor], scale: float) -> NDArray[np.float64]:
    """Attention mass of each whole page, summed over layers and heads. A layer each: queries [Hq, T, D] the newest, keys [H, n, D]."""
    total = np.zeros(keys[0].shape[1] // PAGE_SIZE)
    for q, k in zip(queries, keys, strict=True):
        score = column_scores(q.transpose(0, 1), k.transpose(0, 1), scale).sum(0)
        total += score[: len(total) * PAGE_SIZE].view(-1, PAGE_SIZE).sum(1).double().numpy()
    return total
