"""What ops and kernels ask of their arguments, and a page table as kernels take it. Knows nothing of any one kernel.

Shapes, dtypes and devices only, so that no check waits for the device: frame ids, counts and positions are the caller's to keep in range.
"""

import itertools
import math

import torch
from torch import Tensor

from kvstrata.ops import dense, frame
from kvstrata.ops.table import PageTable, described
from kvstrata.types import PAGE_SIZE, Tier

TIERS = (Tier.BF16, Tier.INT8, Tier.INT4, Tier.INT3, Tier.INT2)
"""The order in which kernels take a sequence's tiers."""


# ---- what every implementation asks -------------------------------------------------------------------------------------------


def check_arena(arena: Tensor) -> int:
    """KV heads of an arena. Raises ValueError unless it is uint8 [F, H, frame_bytes]."""
    if arena.dtype != torch.uint8 or arena.ndim != 3 or not arena.shape[1]:
        raise ValueError(f"arena is {described(arena)}; accepted: uint8 [frames, KV heads, frame_bytes]")
    return arena.shape[1]


def check_planes_arena(arena: Tensor, head_dim: int) -> None:
    """Raises ValueError unless the arena's frames are the planes codec's for this head_dim."""
    check_arena(arena)
    frame_bytes = frame.frame_bytes(frame.check_head_dim(head_dim))
    if arena.shape[2] != frame_bytes:
        raise ValueError(f"arena {list(arena.shape)}; accepted at head_dim {head_dim}: {frame_bytes} bytes a frame and KV head")


def frames_of(tier: Tier, head_dim: int, itemsize: int, frame_bytes: int) -> int:
    """Frames of a page: its planes, or what its elements of `itemsize` bytes fill."""
    return tier.value if tier.k_planes else dense.num_frames(head_dim, itemsize, frame_bytes)


def check_attention(q: Tensor, arena: Tensor, table: PageTable, dense_dtype: torch.dtype, *, planes: bool) -> None:
    """Raises ValueError for what no attention op does. q [..., Hq, D]; planes: the codec is the planes codec."""
    h = check_arena(arena)
    if q.ndim != 3 or not q.is_floating_point() or not q.shape[1] or q.shape[1] % h or q.device != arena.device:
        raise ValueError(f"queries are {described(q)}; accepted: floats [N, query heads, head_dim] on {arena.device}, "
                         f"a multiple of {h} query heads, as the arena has {h} KV heads")  # fmt: skip
    if not dense_dtype.is_floating_point:
        raise ValueError(f"dense pages are {dense_dtype}; accepted: floats")
    d = q.shape[2]
    if planes:
        check_planes_arena(arena, d)
    for s in table.segments:
        per_page = frames_of(s.tier, d, dense_dtype.itemsize, arena.shape[2])
        if s.frames.device != arena.device or ((planes or not s.tier.k_planes) and s.frames.shape[2] != per_page):
            raise ValueError(f"frames of {s.tier.name} are {described(s.frames)}; accepted: {per_page} a page, on {arena.device}")
        if s.live is not None and s.live.shape[2] not in (1, h):
            raise ValueError(f"live masks of {s.tier.name} are for {s.live.shape[2]} KV heads; accepted: 1 or {h}")


def check_chunk(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: list[int], arena: Tensor, batch: int) -> None:
    """Raises ValueError unless k and v are tokens of q [N, Hq, D] and cu_seqlens cuts all N of them into `batch` sequences."""
    expected = (len(q), arena.shape[1], q.shape[2])
    for name, x in (("k", k), ("v", v)):
        if x.shape != expected or not x.is_floating_point() or x.device != q.device:
            raise ValueError(f"{name} is {described(x)}; accepted: floats {list(expected)} on {q.device}")
    ascending = all(a <= b for a, b in itertools.pairwise(cu_seqlens))
    if len(cu_seqlens) != batch + 1 or not ascending or cu_seqlens[0] != 0 or cu_seqlens[-1] != len(q):
        shown = str(list(cu_seqlens)) if len(cu_seqlens) < 16 else f"{len(cu_seqlens)} numbers from {cu_seqlens[0]} to {cu_seqlens[-1]}"
        raise ValueError(f"cu_seqlens {shown}; accepted: {batch + 1} numbers, ascending, from 0 to the chunk's {len(q)} tokens")


def check_frames(name: str, frames: Tensor, pages: int, per_page: int | None, arena: Tensor) -> None:
    """Raises ValueError unless frames are int32 [pages, per_page] beside the arena; per_page None: any number."""
    right = frames.ndim == 2 and len(frames) == pages and per_page in (None, frames.shape[1])
    if not right or frames.dtype != torch.int32 or frames.device != arena.device:
        each = "frames of a page" if per_page is None else per_page
        raise ValueError(f"{name} are {described(frames)}; accepted: int32 [{pages}, {each}] on {arena.device}")


def check_tokens(k: Tensor, v: Tensor, arena: Tensor, lead: tuple[int, ...]) -> None:
    """Raises ValueError unless k and v are floats [*lead, H, D] beside the arena, H its KV heads."""
    h = check_arena(arena)
    for name, x in (("k", k), ("v", v)):
        if x.shape != (*lead, h, k.shape[-1]) or not x.is_floating_point() or x.device != arena.device:
            shape = ", ".join(map(str, (*lead, h, "head_dim")))
            raise ValueError(f"{name} is {described(x)}; accepted: floats [{shape}], both alike, on {arena.device}")


def check_picks(picks: Tensor, num_sources: int, arena: Tensor) -> None:
    """Raises ValueError unless picks are int32 [M, 32, H] beside the arena, with pages to pick from."""
    h = check_arena(arena)
    if picks.dtype != torch.int32 or picks.ndim != 3 or picks.shape[1:] != (PAGE_SIZE, h) or picks.device != arena.device:
        raise ValueError(f"picks are {described(picks)}; accepted: int32 [pages, {PAGE_SIZE}, {h}] on {arena.device}")
    if len(picks) and not num_sources:
        raise ValueError(f"{len(picks)} pages of picks from no source page; accepted: 1 source page or more")


# ---- what kernels ask -----------------------------------------------------------------------------------------------------------


def check(q: Tensor, num_kv_heads: int, arena: Tensor, dense_dtype: torch.dtype) -> None:
    """Raises ValueError for what no kernel does. q [..., Hq, D], arena uint8 [F, H, frame_bytes]."""
    hq, d = q.shape[-2:]
    group = hq // num_kv_heads
    if q.dtype not in (torch.bfloat16, torch.float16) or dense_dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"queries are {q.dtype} and dense pages {dense_dtype}; the kernel accepts torch.bfloat16 and torch.float16")
    if group * num_kv_heads != hq or not 1 <= group <= 16:
        raise ValueError(f"{hq} query heads on {num_kv_heads} KV heads; the kernel accepts 1 to 16 query heads to a KV head")
    frame_bytes = frame.frame_bytes(frame.check_head_dim(d))
    if arena.shape[2] != frame_bytes or not arena.is_contiguous():
        raise ValueError(f"arena {tuple(arena.shape)} must be contiguous, with {frame_bytes} bytes a frame and KV head at head_dim {d}")


def ascending(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """q and a scale above 0 whose logits are those of q and `scale`, for kernels that mask and compare scores before they scale them.
    Raises ValueError for a scale that is no number."""
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; accepted: finite numbers")
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)


def of_tiers(table: PageTable, nothing: Tensor, all_live: int) -> list[Tensor | int]:
    """Five arguments for each tier of TIERS: frames, counts, live masks, pages of a row (0: no pages), KV heads of the masks.

    nothing: stands in for tensors that are not there; all_live: for the heads of masks that are not there."""
    segments = {s.tier: s for s in table.segments}
    out: list[Tensor | int] = []
    for tier in TIERS:
        s = segments.get(tier)
        if s is None:
            out += [nothing, nothing, nothing, 0, all_live]
        else:
            live, heads = (nothing, all_live) if s.live is None else (s.live.contiguous(), s.live.shape[2])
            out += [s.frames.contiguous(), s.counts.contiguous(), live, s.frames.shape[1], heads]
    return out
