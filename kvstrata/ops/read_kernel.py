"""Stored pages as numbers (Triton): what `quant.decode` gives, rounded to 16 bits. Knows nothing of who owns the frames."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvstrata.ops.write_kernel import K_UNIT, V_UNIT, gathered_steps, lane_at, offset_value, scale_value
from kvstrata.types import PAGE_SIZE, Tier


@triton.jit
def read_kernel(arena_ptr, frames_ptr, k_ptr, v_ptr, stride_frame, stride_head, heads, N: tl.constexpr, K_PLANES: tl.constexpr,
                V_PLANES: tl.constexpr, D: tl.constexpr, CB: tl.constexpr):  # fmt: skip
    """grid (pages * KV heads,). frames [P, N] -> k, v [P, 32, H, D]. Strides count 16-bit words."""
    C: tl.constexpr = D // 8
    page = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    offs_t = tl.arange(0, 32)
    offs_c = tl.arange(0, CB)
    channel = tl.arange(0, 8)[:, None] * C + offs_c[None, :]  # [8, CB]
    ok = (offs_c < C)[None, :] & (offs_t >= 0)[:, None]
    ok3 = (channel >= 0)[None] & ok[:, None, :]  # [32, 8, CB]
    arena_ptr += head * stride_head
    row_ptr = frames_ptr + page * N
    k_base = arena_ptr + tl.load(row_ptr).to(tl.int64) * stride_frame
    v_base = arena_ptr + tl.load(row_ptr + 1).to(tl.int64) * stride_frame
    rows_ptr = row_ptr + offs_t[:, None] * 0
    to = (page * 32 + offs_t)[:, None, None] * (heads * D) + head * D + channel[None]

    at = lane_at(channel, D)
    meta = tl.load(tl.where(at < D // 2, k_base, v_base - D // 2) + 4 * D + at, mask=(offs_c < C)[None, :], other=0).to(tl.int32)[None]
    k = gathered_steps(arena_ptr, rows_ptr, stride_frame, offs_t[:, None] * C + offs_c[None, :], ok, 0, K_PLANES)
    k = (k + offset_value(meta >> 8)) * scale_value(meta & 0xFF, K_UNIT)
    tl.store(k_ptr + to, k.to(k_ptr.dtype.element_ty), mask=ok3)

    at = lane_at(offs_t, 32)
    meta = tl.load(tl.where(at < 16, k_base, v_base - 16) + (4 * D + D // 2) + at).to(tl.int32)[:, None, None]
    v = gathered_steps(arena_ptr, rows_ptr, stride_frame, offs_c[None, :] * 32 + offs_t[:, None], ok, 1, V_PLANES)
    v = (v + offset_value(meta >> 8)) * scale_value(meta & 0xFF, V_UNIT)
    tl.store(v_ptr + to, v.to(v_ptr.dtype.element_ty), mask=ok3)


def read_pages_triton(arena: Tensor, frames: Tensor, tier: Tier, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Pages of planes: frames int32 [P, n] -> k, v [P, 32, H, D] of a 16-bit dtype, v still rotated."""
    p, heads, words = len(frames), arena.shape[1], arena.view(torch.uint16)
    k, v = (torch.empty(p, PAGE_SIZE, heads, head_dim, dtype=dtype, device=arena.device) for _ in "kv")
    if p:
        read_kernel[(p * heads,)](
            words, frames.contiguous(), k, v, words.stride(0), words.stride(1), heads, N=frames.shape[1], K_PLANES=tier.k_planes,
            V_PLANES=tier.v_planes, D=head_dim, CB=triton.next_power_of_2(head_dim // 8), num_warps=4,
        )  # fmt: skip
    return k, v
