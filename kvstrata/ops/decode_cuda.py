"""`decode` by CUDA C++ for Hopper (decode.cu, compiled at run time), in one launch. Knows nothing of stores or policies."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.ops import cuda, frame
from kvstrata.ops.arguments import TIERS, of_tiers
from kvstrata.ops.table import PageTable, described
from kvstrata.types import Tier

HEAD_DIMS = (64, 128)
MAX_GROUP = 8
"""Query heads to a KV head: the columns of a product."""
DTYPES = (torch.bfloat16, torch.float16)
COSTS = {Tier.BF16: 64, Tier.INT8: 48, Tier.INT4: 30, Tier.INT3: 24, Tier.INT2: 20}
"""What a page costs a block, relative to the others."""
WARPS, BLOCKS = 6, 2
"""Warps a block, and blocks that a multiprocessor runs at once: 168 registers a thread."""
RING = 17664
"""Bytes of pages under way, a warp."""
LEAST = 8 * COSTS[Tier.INT2]
"""A block's smallest share: two pages a warp."""
MAX_BATCH = 4096


@functools.cache
def options(head_dim: int, dense_dtype: torch.dtype) -> tuple[str, ...]:
    """Compiler's options of the variant for this shape and type."""
    values = {
        "HEAD_DIM": head_dim,
        "DENSE_BF16": int(dense_dtype is torch.bfloat16),
        "WARPS": WARPS,
        "BLOCKS": BLOCKS,
        "RING": RING,
        "COSTS": "{" + ",".join(str(COSTS[t]) for t in TIERS) + "}",
    }
    return ("--device-as-default-execution-space", *(f"-D{name}={value}" for name, value in values.items()))


def shared_bytes(head_dim: int) -> int:
    """Shared memory of a block: a ring and decoded metadata for each warp, and the queries."""
    return WARPS * (RING + 2 * (4 * head_dim + 128)) + 16 * head_dim


def supports(q: Tensor, num_kv_heads: int, dense_dtype: torch.dtype) -> bool:
    """Whether the kernel has a variant for queries q [B, Hq, D]."""
    b, hq, d = q.shape
    fits = hq % num_kv_heads == 0 and hq // num_kv_heads <= MAX_GROUP and b <= MAX_BATCH
    return fits and d in HEAD_DIMS and q.dtype in DTYPES and dense_dtype in DTYPES


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """What a call of `decode_cuda` writes. part float32 [H, rows, Hq / H, D], stat float32 [H, rows, 2, 8], rows the blocks of a KV head
    and the batch; arrived int32 [B, H], 0 between calls; out [B, Hq, D], lse float32 [B, Hq]. A call with a workspace allocates nothing;
    its results are the workspace's out and lse. It serves batches of fewer sequences too. Calls that share one must not overlap."""

    part: Tensor
    stat: Tensor
    arrived: Tensor
    out: Tensor
    lse: Tensor

    @property
    def blocks(self) -> int:
        """Of a KV head."""
        return self.part.shape[1] - len(self.arrived)


@functools.cache
def _blocks(index: int) -> int:
    """Blocks that a GPU runs at once."""
    return torch.cuda.get_device_properties(index).multi_processor_count * BLOCKS


def make_workspace(q: Tensor, num_kv_heads: int, blocks: int | None = None) -> Workspace:
    """Room for calls with queries like q [B, Hq, D], whatever the counts. blocks: of a KV head (default: one wave of the GPU)."""
    b, hq, d = q.shape
    if blocks is None:
        blocks = max(1, _blocks(q.device.index or 0) // num_kv_heads)
    rows = blocks + b
    new = functools.partial(torch.empty, device=q.device)
    return Workspace(new(num_kv_heads, rows, hq // num_kv_heads, d), new(num_kv_heads, rows, 2, 8),
                     torch.zeros(b, num_kv_heads, dtype=torch.int32, device=q.device),
                     new(b, hq, d, dtype=q.dtype), new(b, hq))  # fmt: skip


def arguments(q: Tensor, arena: Tensor, table: PageTable, scale: float, rotated: bool, w: Workspace,
              out: Tensor) -> Sequence[Tensor | int | float]:  # fmt: skip
    """What the kernel takes, in order."""
    (b, hq, _), h = q.shape, arena.shape[1]
    tiers = of_tiers(table, w.arrived, 0)
    pages = tiers[3::5]
    # whole blocks for each of equal sequences, unless that leaves many idle. Of several tiers, whose costs are estimates, only one block,
    # and none of dense pages: all blocks would be at those together
    blocks = w.blocks
    each = blocks // b if 0 < b <= 32 and blocks % b * 16 <= blocks else 0
    if sum(n != 0 for n in pages) != 1 and (each != 1 or pages[TIERS.index(Tier.BF16)] != 0):
        each = 0
    return [q.contiguous(), arena, out, w.lse, w.part, w.stat, w.arrived, *tiers, b, hq // h, scale * math.log2(math.e),
            arena.stride(0), each, LEAST, int(q.dtype is torch.bfloat16), int(rotated)]  # fmt: skip


def decode_cuda(q: Tensor, arena: Tensor, table: PageTable, scale: float, *, dense_dtype: torch.dtype, rotated: bool = True,
                workspace: Workspace | None = None, out: Tensor | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`decode` by CUDA C++. Nothing is read back from the device and, with a workspace, nothing allocated: a CUDA graph may hold it, and
    the table's tensors may change between replays. out: where the result goes, in place of the workspace's.
    Raises ValueError for what the kernel does not do."""
    (b, _, d), h = q.shape, arena.shape[1]
    if not supports(q, h, dense_dtype):
        raise ValueError(
            f"queries {tuple(q.shape)} of {q.dtype} on {h} KV heads with dense pages of {dense_dtype}; the kernel accepts torch.bfloat16 "
            f"and torch.float16, head_dim {' and '.join(map(str, HEAD_DIMS))}, 1 to {MAX_GROUP} query heads to a KV head and {MAX_BATCH} "
            "sequences"
        )
    frame_bytes = frame.frame_bytes(d)
    if arena.shape[2] != frame_bytes or not arena.is_contiguous() or arena.data_ptr() % 16:
        raise ValueError(
            f"arena {tuple(arena.shape)} must be contiguous, aligned to 16 bytes, with {frame_bytes} bytes a frame and KV head"
        )
    w = workspace or make_workspace(q, h)
    if w.arrived.shape[1] != h or len(w.arrived) < b or w.part.shape[2:] != (q.shape[1] // h, d):
        raise ValueError(
            f"queries {tuple(q.shape)} on {h} KV heads in a workspace for {tuple(w.out.shape)}; accepted: {len(w.arrived)} at most"
        )
    out = w.out[:b] if out is None else out
    if out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out is {described(out)}; accepted: contiguous {described(q)}")
    if not b:
        return out, w.lse[:b]
    kernel = cuda.kernel("decode", "decode", options(d, dense_dtype), shared_bytes(d), q.device.index or 0)
    kernel((h, w.blocks), 32 * WARPS, arguments(q, arena, table, scale, rotated, w, out))
    return out, w.lse[:b]
