"""`prefill` as one warp-specialised CUDA C++ kernel (prefill.cu) on a Hopper GPU, after a pass that quantizes (prefill_pack.cu)."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.ops import arguments, cuda

HEAD_DIM, TILE, WHOLE, TILE_BYTES = 128, 128, 64, 32768
"""Queries of a tile and keys of one of codes, keys of a whole tile, bytes of either."""
STAGES, THREADS, PACK_THREADS = 5, 384, 256
SHARED_BYTES = STAGES * (TILE_BYTES + 32) + TILE * (3 * HEAD_DIM + 8) + 1024
"""The ring with scales and barriers; q, its codes, a scale and a constant a row; room to align to 1024."""


@functools.cache
def options(scores: str) -> tuple[str, ...]:
    """What the sources are compiled with; see their heads."""
    return (f"-DINT8={int(scores == 'int8')}",)


def accepts(q: Tensor, window: int, values: str) -> bool:
    """Whether this kernel does the shape: head_dim 128, bf16, P·V in fp8, a window, so that the newest keys are whole."""
    return q.dtype == torch.bfloat16 and q.shape[2] == HEAD_DIM and window > 0 and values == "fp8"


@dataclass(frozen=True)
class Packed:
    """A prompt's keys and values as the kernel reads them; see `pack` in prefill_pack.cu."""

    mean: Tensor | None
    codes: Tensor
    scales: Tensor
    whole: Tensor
    before: Tensor


def pack(k: Tensor, v: Tensor, lines: Tensor, *, window: int, scores: str, smooth: bool) -> Packed:
    """k, v bf16 [T, H, D], rows of 16 bytes; lines int32 [H, L], ascending."""
    t, h, d = k.shape
    count = lines.shape[1]
    body_tiles, line_tiles, query_tiles = -(-(t - count) // TILE), -(-count // WHOLE), -(-t // TILE)
    device = k.device
    out = Packed(
        k.mean(0, dtype=torch.float32) if smooth else None,
        torch.empty(h, body_tiles, TILE_BYTES, dtype=torch.uint8, device=device),
        torch.empty(h, body_tiles, 4, dtype=torch.float32, device=device),
        torch.empty(h, line_tiles, TILE_BYTES, dtype=torch.uint8, device=device),
        torch.empty(h, query_tiles, dtype=torch.int32, device=device),
    )
    kernel = cuda.kernel("prefill_pack", "pack", options(scores), 0, device.index or 0)
    nothing = torch.empty(0, device=device)
    kernel((body_tiles + line_tiles + 1, h), PACK_THREADS, [
        k, v, nothing if out.mean is None else out.mean, lines.contiguous(), out.codes, out.scales, out.whole, out.before,
        t, count, body_tiles, line_tiles, query_tiles, window, *k.stride()[:2], *v.stride()[:2],
    ])  # fmt: skip
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float, *, window: int, scores: str) -> Tensor:
    """q bf16 [T, Hq, D], heads adjoining; k, v as they were packed -> out [T, Hq, D]."""
    t, hq, d = q.shape
    h = k.shape[1]
    q, scale = arguments.ascending(q, scale)
    out = torch.empty(t, hq, d, dtype=q.dtype, device=q.device)
    query_tiles = packed.before.shape[1]
    nothing = torch.empty(0, device=q.device)
    kernel = cuda.kernel("prefill", "prefill", options(scores), SHARED_BYTES, q.device.index or 0)
    kernel((query_tiles * hq,), THREADS, [
        q, k, v, nothing if packed.mean is None else packed.mean, packed.codes, packed.scales, packed.whole, packed.before, out,
        t, packed.codes.shape[1], packed.whole.shape[1], query_tiles, window, hq // h, float(scale * math.log2(math.e)),
        q.stride(0), *k.stride()[:2], *v.stride()[:2],
    ])  # fmt: skip
    return out


def prefill_cuda(q: Tensor, k: Tensor, v: Tensor, lines: Tensor, scale: float, *, window: int = 128, scores: str = "int8",
                 smooth: bool = True) -> Tensor:  # fmt: skip
    """`prefill` in CUDA C++. Raises ValueError for what the kernel does not do."""
    if not accepts(q, window, "fp8"):
        raise ValueError(
            f"queries {q.dtype}, head_dim {q.shape[2]}, window {window}: this kernel accepts bf16, head_dim 128 and a window of 1 or more"
        )
    q, k, v = (cuda.readable(x) for x in (q if q.stride(1) == q.shape[2] else q.contiguous(), k.to(q.dtype), v.to(q.dtype)))
    with torch.cuda.device(q.device):
        packed = pack(k, v, lines, window=window, scores=scores, smooth=smooth)
        return attend(q, k, v, packed, scale, window=window, scores=scores)
