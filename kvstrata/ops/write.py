"""Writing pages into an arena: dense tokens, whole pages in planes. Knows nothing of who owns the frames."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvstrata.ops import arguments, backend, dense, quant, write_cuda
from kvstrata.ops.table import described
from kvstrata.types import PAGE_SIZE, Tier

EncodePages = Callable[[Tensor, Tensor, Tier], Tensor]
"""Codec: (k, v [P, 32, H, D], tier) -> uint8 [P, n, H, FB]."""


def write_pages(arena: Tensor, frames: Tensor, k: Tensor, v: Tensor, tier: Tier, *, encode: EncodePages = quant.encode) -> None:
    """Quantize and pack pages into the arena. arena uint8 [F, H, frame_bytes], frames int32 [P, n], k, v [P, 32, H, D] (v as stored:
    rotated). Raises NonFiniteError before anything is written, and ValueError for other shapes, dtypes and devices."""
    planes = encode is quant.encode
    arguments.check_tokens(k, v, arena, (len(k), PAGE_SIZE))
    if planes:
        _check_planes(tier)
        arguments.check_planes_arena(arena, k.shape[-1])
    arguments.check_frames("frames", frames, len(k), tier.value if planes else None, arena)
    if encode is quant.encode and backend.use_cuda(arena) and k.dtype == v.dtype and write_cuda.accepts_pages(arena, k.shape[-1], k.dtype):
        return write_cuda.write_pages_cuda(arena, frames, k, v, tier)
    if backend.use_triton(arena) and encode is quant.encode:
        from kvstrata.ops.write_kernel import write_pages_triton

        return write_pages_triton(arena, frames, k, v, tier)
    arena[frames.flatten().long()] = encode(k, v, tier).flatten(0, 1)


def write_dense(arena: Tensor, frames: Tensor, tokens: Tensor, k: Tensor, v: Tensor, *, rotate: bool = False) -> None:
    """Put tokens into BF16 pages. frames int32 [N, n] of each token's page, tokens int32 [N] (0 to 31 inside the page), k, v [N, H, D]
    in the dtype of the store's dense pages, v as stored (rotated); with `rotate`, v as it is: it is rotated on its way.
    Raises ValueError for other shapes, dtypes and devices."""
    arguments.check_tokens(k, v, arena, (len(k),))
    if k.dtype != v.dtype:
        raise ValueError(f"k is {k.dtype} and v {v.dtype}; accepted: one dtype for both, that of the dense pages")
    arguments.check_frames("frames", frames, len(k), dense.num_frames(k.shape[-1], k.element_size(), arena.shape[2]), arena)
    if tokens.shape != (len(k),) or tokens.dtype not in (torch.int32, torch.int64) or tokens.device != arena.device:
        raise ValueError(f"tokens are {described(tokens)}; accepted: int32 [{len(k)}] on {arena.device}")
    if backend.use_cuda(arena) and write_cuda.accepts_tokens(arena, k, v):
        in_kernel = rotate and write_cuda.accepts_rotation(k)
        return write_cuda.write_dense_cuda(arena, frames, tokens, k, quant.rotate(v) if rotate and not in_kernel else v, rotate=in_kernel)
    v = quant.rotate(v) if rotate else v
    if backend.use_triton(arena):
        from kvstrata.ops.write_kernel import write_dense_triton

        return write_dense_triton(arena, frames, tokens, k, v)
    write_dense_ref(arena, frames, tokens, k, v)


def write_dense_ref(arena: Tensor, frames: Tensor, tokens: Tensor, k: Tensor, v: Tensor) -> None:
    """The mathematics of `write_dense`, on any device."""
    n, h, d = k.shape
    frame_bytes, row = arena.shape[-1], d * k.element_size()
    for x, first in ((k, 0), (v, 32 * row)):
        offset = first + tokens.long()[:, None] * row + torch.arange(row, device=arena.device)
        frame = frames.long().gather(1, offset // frame_bytes)
        raw = x.contiguous().view(torch.uint8).view(n, h, row)
        head = torch.arange(h, device=arena.device)[None, :, None]
        arena[frame[:, None, :], head, (offset % frame_bytes)[:, None, :]] = raw


def read_dense(arena: Tensor, frames: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """BF16 pages: frames int32 [P, n] -> k, v [P, 32, H, D] of `dtype`, v as stored."""
    return dense.from_frames(arena[frames.long()], head_dim, dtype)


def settle_pages(arena: Tensor, src_frames: Tensor, dst_frames: Tensor, tier: Tier, head_dim: int, dense_dtype: torch.dtype, *,
                 encode: EncodePages = quant.encode) -> None:  # fmt: skip
    """BF16 pages of the arena to planes in other frames of it: src_frames int32 [P, n of a dense page], dst_frames int32 [P, tier.value],
    none of them shared. The source is left as it is. Raises ValueError for other shapes, dtypes and devices."""
    planes = encode is quant.encode
    arguments.check_arena(arena)
    if planes:
        _check_planes(tier)
        arguments.check_planes_arena(arena, head_dim)
    per_page = dense.num_frames(head_dim, dense_dtype.itemsize, arena.shape[2])
    arguments.check_frames("source frames", src_frames, len(src_frames), per_page, arena)
    arguments.check_frames("frames", dst_frames, len(src_frames), tier.value if planes else None, arena)
    if encode is quant.encode and backend.use_cuda(arena) and write_cuda.accepts_pages(arena, head_dim, dense_dtype):
        return write_cuda.settle_pages_cuda(arena, src_frames, dst_frames, tier, head_dim, dense_dtype)
    if backend.use_triton(arena) and encode is quant.encode and dense_dtype.itemsize == 2:
        from kvstrata.ops.write_kernel import settle_pages_triton

        return settle_pages_triton(arena, src_frames, dst_frames, tier, head_dim, dense_dtype)
    write_pages(arena, dst_frames, *read_dense(arena, src_frames, head_dim, dense_dtype), tier, encode=encode)


def _check_planes(tier: Tier) -> None:
    if not tier.k_planes:
        raise ValueError(f"tier {tier.name} has no planes; accepted: INT2, INT3, INT4, INT8")
