"""`extend` as one warp-specialised CUDA C++ kernel (extend.cu) on a Hopper GPU. Knows nothing of stores."""

import functools
import itertools
import math

import torch
from torch import Tensor

from kvstrata.ops import arguments, cuda, extend_tiles
from kvstrata.ops.table import PageTable
from kvstrata.types import PAGE_SIZE

HEAD_DIMS = (64, 128)
ROWS, THREADS, KEYS = 128, 384, 128
"""Rows (tokens times query heads of a KV head) and threads of a program, keys of a tile."""
MAX_SPLITS = 16


@functools.cache
def options(head_dim: int, dtype: torch.dtype) -> tuple[str, ...]:
    """What the source is compiled with; see its head."""
    return (f"-DD={head_dim}", f"-DBF16={int(dtype == torch.bfloat16)}")


def shared_bytes(head_dim: int) -> int:
    """Two tiles of 128 keys of K and of V, 128 rows of q, barriers, decoded metadata a warp, and room to align to 1024."""
    return 2 * (2 * 2 * KEYS + ROWS) * head_dim + 128 + 4 * (4 * head_dim + 128) + 1024


def accepts(q: Tensor, arena: Tensor, dense_dtype: torch.dtype) -> bool:
    """Whether this kernel does the shape: head_dim 64 or 128, 16-bit numbers, dense pages in q's dtype, an arena aligned to 16 bytes."""
    sixteen_bits = q.dtype in (torch.bfloat16, torch.float16)
    return sixteen_bits and q.shape[2] in HEAD_DIMS and dense_dtype == q.dtype and arena.data_ptr() % 16 == 0


def extend_cuda(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: list[int], arena: Tensor, table: PageTable, scale: float, *,
                dense_dtype: torch.dtype, rotated: bool = True) -> Tensor:  # fmt: skip
    """`extend` in CUDA C++. Raises ValueError for what the kernel does not do."""
    arguments.check(q, k.shape[1], arena, dense_dtype)
    if not accepts(q, arena, dense_dtype):
        raise ValueError(f"head_dim {q.shape[2]}, queries {q.dtype}, dense pages {dense_dtype}: this kernel accepts head_dim "
                         f"{HEAD_DIMS}, one dtype for both, and an arena aligned to 16 bytes")  # fmt: skip
    n, num_qo_heads, d = q.shape
    heads = k.shape[1]
    group = num_qo_heads // heads
    q, scale = arguments.ascending(q, scale)
    # q's heads adjoin
    q, k, v = (cuda.readable(x) for x in (q if q.stride(1) == d else q.contiguous(), k.to(q.dtype), v.to(q.dtype)))
    out = torch.empty(n, num_qo_heads, d, dtype=q.dtype, device=q.device)
    tiles = extend_tiles.tiles(cu_seqlens, ROWS, group)
    if not tiles:
        return out
    splits = _splits(len(tiles) * heads, _keys(cu_seqlens, table) // KEYS, _multiprocessors(q.device))
    shape = (splits if splits > 1 else 0, n, num_qo_heads)
    parts, lses = (torch.empty(s, dtype=torch.float32, device=q.device) for s in ((*shape, d), shape))
    device = q.device.index or 0
    kernel = cuda.kernel("extend", "extend", options(d, q.dtype), shared_bytes(d), device)
    values: list[Tensor | int | float] = [
        q, k, v, out, parts, lses, torch.tensor(tiles, dtype=torch.int32).to(q.device, non_blocking=True), arena,
        *arguments.of_tiers(table, out, 0), n, splits, heads, group, float(scale * math.log2(math.e)), arena.stride(0), q.stride(0),
        *k.stride()[:2], *v.stride()[:2], int(rotated),
    ]  # fmt: skip
    kernel((len(tiles) * splits * heads,), THREADS, values)
    if splits > 1:
        rows = n * num_qo_heads
        merge = cuda.kernel("extend", "merge", options(d, q.dtype), 0, device)
        merge((-(-rows // 4),), 128, [parts, lses, out, rows, splits])
    return out


def _keys(cu_seqlens: list[int], table: PageTable) -> int:
    """At most as many keys as the longest sequence has; how many pages it has is known to the device alone."""
    chunk = max(end - start for start, end in itertools.pairwise(cu_seqlens))
    return chunk + PAGE_SIZE * sum(s.frames.shape[1] for s in table.segments)


def _splits(programs: int, tiles: int, multiprocessors: int) -> int:
    """Parts into which each program's `tiles` tiles of keys are cut, so that few programs, or a last few, keep all multiprocessors busy."""

    def tiles_in_a_row(splits: int) -> float:
        # a program starts and writes its part in the time of some four tiles, a merge takes that of five
        return -(-programs * splits // multiprocessors) * (tiles / splits + 4) + (5 if splits > 1 else 0)

    return min(range(1, max(1, min(MAX_SPLITS, tiles // 8)) + 1), key=tiles_in_a_row)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
