"""Writing pages in CUDA C++ on a Hopper GPU: write.cu, write_dense.cu, write_gather.cu. Knows nothing of who owns the frames.

Each op says by `accepts_*` whether it does the shape; the others are Triton's (write_kernel.py). The bytes are the reference's.
"""

import functools
import math

import torch
from torch import Tensor

from kvstrata.ops import cuda, dense, frame
from kvstrata.ops.table import described
from kvstrata.types import PAGE_SIZE, Tier

HEAD_DIMS = (64, 128, 256)
"""A lane takes a pair of channels of each field, so pairs a field must divide 32."""
WARPS = 4
"""Warps of a block; each works for itself, one on K, the next on V."""
GATHER_WARPS = 8
_SHARED_BYTES, _BLOCK_RESERVE, _REGISTERS = 227 << 10, 1 << 10, 1 << 16


def _aligned_arena(arena: Tensor) -> bool:
    """Whether each head's part of a frame can be read and written 16 bytes at a time."""
    return arena.stride(2) == 1 and all(n % 16 == 0 for n in (arena.data_ptr(), arena.shape[2], *arena.stride()[:2]))


def accepts_pages(arena: Tensor, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the ops on whole pages do the shape: 16-bit numbers, head_dim of HEAD_DIMS, the planes codec's frames."""
    return (dtype in (torch.bfloat16, torch.float16) and head_dim in HEAD_DIMS and arena.shape[2] == frame.frame_bytes(head_dim)
            and _aligned_arena(arena))  # fmt: skip


def accepts_tokens(arena: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `write_dense` does the shape: rows of whole 16 bytes, any codec's frames."""
    row = k.shape[-1] * k.element_size()
    return _aligned_arena(arena) and row % 16 == 0 and row <= 1024 and k.dtype == v.dtype


def _rows(frames: Tensor, num: int) -> Tensor:
    """The first `num` frames of each page, side by side. Raises ValueError where a page has fewer."""
    if frames.ndim != 2 or frames.shape[1] < num:
        raise ValueError(f"frames {tuple(frames.shape)}: pages of this tier have {num} each")
    return frames[:, :num].contiguous()


def _byte_strides(x: Tensor) -> list[int]:
    """Strides in bytes of all axes but the last."""
    return [s * x.element_size() for s in x.stride()[:-1]]


# ---- pages --------------------------------------------------------------------------------------------------------------------


@functools.cache
def page_options(head_dim: int, dtype: torch.dtype, tier: Tier, settle: bool) -> tuple[str, ...]:
    """What write.cu is compiled with. Bits are the reference's only if products and sums stay apart (fmad)."""
    return ("--fmad=false", f"-DD={head_dim}", f"-DHALF={int(dtype is torch.float16)}", f"-DSETTLE={int(settle)}",
            f"-DK_PLANES={tier.k_planes}", f"-DV_PLANES={tier.v_planes}", f"-DWARPS={WARPS}", f"-DMIN_BLOCKS={min_blocks(head_dim)}",
            f"-DSHARED={2 * page_shared_bytes(head_dim) // WARPS}")  # fmt: skip


def page_shared_bytes(head_dim: int) -> int:
    """K and V of a page and their groups' grids (12 bytes a channel, 16 a token) for each pair of warps."""
    pair = 2 * (2 * PAGE_SIZE * head_dim) + 12 * head_dim + 16 * PAGE_SIZE
    return WARPS // 2 * pair


def min_blocks(head_dim: int) -> int:
    """Blocks to a multiprocessor that registers are capped for: as many as shared memory holds, at 64 registers a thread or more."""
    return min(_SHARED_BYTES // (page_shared_bytes(head_dim) + _BLOCK_RESERVE), _REGISTERS // (32 * WARPS * 64))


def write_pages_cuda(arena: Tensor, frames: Tensor, k: Tensor, v: Tensor, tier: Tier) -> None:
    """`write_pages` in CUDA C++, without its check for NaN and Inf."""
    _check_planes(tier)
    if k.shape != v.shape or k.dtype != v.dtype or k.ndim != 4 or k.shape[1] != PAGE_SIZE:
        raise ValueError(
            f"k {tuple(k.shape)} {k.dtype} and v {tuple(v.shape)} {v.dtype}: both must be [pages, {PAGE_SIZE}, heads, head_dim]"
        )
    k, v = cuda.readable(k), cuda.readable(v)
    _launch_pages(arena, frames, tier, k, v, frames, [*_byte_strides(k), *_byte_strides(v)], k.shape[3], k.dtype, settle=False)


def settle_pages_cuda(arena: Tensor, src_frames: Tensor, dst_frames: Tensor, tier: Tier, head_dim: int, dense_dtype: torch.dtype) -> None:
    """`settle_pages` in CUDA C++: one pass from dense pages to planes."""
    _check_planes(tier)
    rows = _rows(src_frames, dense.num_frames(head_dim, 2, arena.shape[2]))
    _launch_pages(arena, dst_frames, tier, arena, arena, rows, [0] * 6, head_dim, dense_dtype, settle=True)


def _check_planes(tier: Tier) -> None:
    if not tier.k_planes:
        raise ValueError(f"tier {tier.name} has no planes; accepted: INT2, INT3, INT4, INT8")


def _launch_pages(arena: Tensor, frames: Tensor, tier: Tier, k: Tensor, v: Tensor, rows: Tensor, strides: list[int], head_dim: int,
                  dtype: torch.dtype, *, settle: bool) -> None:  # fmt: skip
    if not len(frames):
        return
    frames = _rows(frames, tier.value)
    heads = arena.shape[1]
    tasks = len(frames) * heads * 2
    shared = page_shared_bytes(head_dim)
    kernel = cuda.kernel("write", "write_pages", page_options(head_dim, dtype, tier, settle), shared, arena.device.index or 0)
    arguments: list[Tensor | int | float] = [
        k, v, rows, arena, frames, *strides, arena.stride(0), arena.stride(1), heads, tasks]  # fmt: skip
    kernel((-(-tasks // WARPS),), 32 * WARPS, arguments)


# ---- tokens -------------------------------------------------------------------------------------------------------------------

TOKENS, DENSE_THREADS = 32, 256
"""Tokens and threads of a block of write_dense.cu."""


@functools.cache
def dense_options(row_bytes: int, frame_bytes: int, num_frames: int, rotated: torch.dtype | None = None) -> tuple[str, ...]:
    """What write_dense.cu is compiled with. rotated: type of V, where it is rotated: 16 bits."""
    head_dim = row_bytes // 2
    block = head_dim & -head_dim
    lanes, scale = (0, 1.0) if rotated is None else (block // 8, 1 / math.sqrt(block))
    return (f"-DROW={row_bytes}", f"-DFRAME={frame_bytes}", f"-DN={num_frames}", f"-DLANES={lanes}",
            f"-DHALF={int(rotated is torch.float16)}", f"-DSCALE={scale!r}f")  # fmt: skip


def accepts_rotation(k: Tensor) -> bool:
    """Whether `write_dense_cuda` can rotate tokens like these."""
    return k.dtype in (torch.bfloat16, torch.float16) and k.shape[-1] in frame.HEAD_DIMS


def write_dense_cuda(arena: Tensor, frames: Tensor, tokens: Tensor, k: Tensor, v: Tensor, *, rotate: bool = False) -> None:
    """`write_dense` in CUDA C++. Rotation by sums and differences in float32: up to its rounding the reference's."""
    n, heads, d = k.shape
    if rotate and not accepts_rotation(k):
        raise ValueError(
            f"k is {described(k)}; accepted where v is rotated: torch.bfloat16 and torch.float16, head_dim of {frame.HEAD_DIMS}"
        )
    if not n:
        return
    k, v = cuda.readable(k), cuda.readable(v)
    options = dense_options(d * k.element_size(), arena.shape[2], frames.shape[1], v.dtype if rotate else None)
    kernel = cuda.kernel("write_dense", "write_dense", options, 0, arena.device.index or 0)
    arguments: list[Tensor | int | float] = [
        k, v, arena, frames.contiguous(), tokens.int().contiguous(), *_byte_strides(k), *_byte_strides(v), arena.stride(0), arena.stride(1),
        heads, n]  # fmt: skip
    kernel((-(-n // TOKENS) * heads,), DENSE_THREADS, arguments)


# ---- survivors ----------------------------------------------------------------------------------------------------------------


@functools.cache
def gather_options(head_dim: int, dtype: torch.dtype, tier: Tier) -> tuple[str, ...]:
    """What write_gather.cu is compiled with."""
    return ("--fmad=false", f"-DD={head_dim}", f"-DHALF={int(dtype is torch.float16)}", f"-DK_PLANES={tier.k_planes}",
            f"-DV_PLANES={tier.v_planes}", f"-DWARPS={GATHER_WARPS}")  # fmt: skip


def gather_shared_bytes(head_dim: int, tier: Tier) -> int:
    """A source page of one KV head, and which of its tokens are wanted, for each warp."""
    page = 2 * frame.plane_words(head_dim) * tier.value + 4 * frame.metadata_words(head_dim)
    return GATHER_WARPS * (page + 8 * PAGE_SIZE)


def gather_pages_cuda(arena: Tensor, src_frames: Tensor, tier: Tier, picks: Tensor, dst_frames: Tensor, head_dim: int,
                      dense_dtype: torch.dtype) -> None:  # fmt: skip
    """`gather_pages` in CUDA C++."""
    if not len(picks):
        return
    num_dense = dense.num_frames(head_dim, 2, arena.shape[2])
    src, dst = _rows(src_frames, tier.value if tier.k_planes else num_dense), _rows(dst_frames, num_dense)
    heads, picks, options = arena.shape[1], picks.contiguous(), gather_options(head_dim, dense_dtype, tier)
    strides = [arena.stride(0), arena.stride(1), heads]

    def launch(function: str, shared: int, units: int, per_block: int, arguments: list[Tensor | int | float]) -> None:
        kernel = cuda.kernel("write_gather", function, options, shared, arena.device.index or 0)
        kernel((-(-units // per_block),), 32 * GATHER_WARPS, [*arguments, *strides, units])

    if not tier.k_planes:
        return launch("gather_dense", 0, len(picks) * heads * 2, GATHER_WARPS, [arena, src, picks, dst])
    first = torch.zeros(len(src), heads, PAGE_SIZE, dtype=torch.int32, device=arena.device)
    following = torch.empty_like(picks)
    launch("link", 0, picks.numel(), 32 * GATHER_WARPS, [picks, first, following, arena, dst])
    launch("gather_planes", gather_shared_bytes(head_dim, tier), len(src) * heads, GATHER_WARPS, [arena, src, first, following, dst])
