"""Every kernel that steps will launch, launched once on pages of nobody: so that none is compiled while a request waits, nor while a CUDA
graph is captured. Knows nothing of any engine."""

from itertools import count, islice

import torch

from kvstrata.adapters.vllm.attention import LayerAttention, StepPlanner
from kvstrata.adapters.vllm.delta import NewPage, RequestDelta, StepDelta
from kvstrata.adapters.vllm.rows import DecodeRows
from kvstrata.adapters.vllm.tables import Tables
from kvstrata.ops.decode_cuda import Workspace
from kvstrata.types import PAGE_SIZE, Tier

NAME = "rehearsal"


def rehearse(
    layer: LayerAttention, like: Tables, heads: int, kv_heads: int, frame_bytes: int, dtype: torch.dtype, workspace: Workspace | None
) -> None:
    """One request whose groups have each tier of `like` in turn, twice: the first time they settle inside a chunk, the second time out of
    the ring. frame_bytes: of a frame and KV head. dtype: of q, k and v."""
    frames = {t: x.shape[2] for t, x in like.frames.items()}
    tiers = [Tier.BF16, *(t for t in frames if t is not Tier.BF16)]
    group_pages, device = like.group_pages, like.device
    tables = Tables(1, dict.fromkeys(frames, 2 * group_pages), frames, like.group, device)
    planner = StepPlanner(tables, DecodeRows(tables, workspace))
    ids = count(1)
    ring = tuple(islice(ids, group_pages * tables.dense_frames))
    pages = [NewPage(int(t), tuple(islice(ids, frames[t]))) for t in 2 * tiers for _ in range(group_pages)]
    arena = torch.zeros(next(ids), kv_heads, frame_bytes, dtype=torch.uint8, device=device)
    taken = len(tiers) * group_pages
    # a chunk, then the first token after each group
    steps = [(0, taken * PAGE_SIZE + 1, 0, taken)]
    steps += [(end * PAGE_SIZE, 1, end - group_pages, end) for end in range(taken + group_pages, len(pages) + 1, group_pages)]
    for computed, new, first, last in steps:
        delta = RequestDelta(computed, first, tuple(pages[first:last]), None if computed else ring)
        layer.prepare(arena, planner.before(tables.apply(StepDelta({NAME: delta}))))
        q, k, v = (torch.zeros(new, h, layer.head_dim, dtype=dtype, device=device) for h in (heads, kv_heads, kv_heads))
        layer.forward(arena, planner.plan([(NAME, computed, new)]), q, k, v, torch.empty_like(q))
