"""Writing pages (Triton): dense tokens, planes from tokens or from dense pages, and survivors gathered into dense pages.

A program handles one page and KV head: it reads the page once, finds each group's grid, and stores packed words. The arithmetic is
the reference's (quant.py), operation by operation in float32, so that both give the same bytes. Nothing is checked for NaN or Inf:
that would need an answer from the device before the call returns (quant.check_finite is there for callers who can wait).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvstrata.ops import backend, dense, frame, quant
from kvstrata.ops.quant_kernel import pin
from kvstrata.types import PAGE_SIZE, Tier

LARGEST_SCALE = tl.constexpr(quant._LARGEST_SCALE)
MAX_OFFSET = tl.constexpr(quant._MAX_OFFSET)
OFFSET_UNIT = tl.constexpr(quant._OFFSET_UNIT)
K_UNIT = tl.constexpr(quant.K_UNIT)
V_UNIT = tl.constexpr(quant.V_UNIT)


# ---- the grid of a group (quant._grid) ----------------------------------------------------------------------------------------


@triton.jit
def bits16(x):
    return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def number16(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scale_value(byte, UNIT: tl.constexpr):
    return number16(byte << 6) * UNIT


@triton.jit
def scale_byte(s, UNIT: tl.constexpr):
    byte = (bits16(tl.minimum(s * (1.0 / UNIT), LARGEST_SCALE)) + 63) >> 6
    byte = tl.minimum(tl.maximum(byte, 1), 255)
    return tl.minimum(tl.where(scale_value(byte, UNIT) < s, byte + 1, byte), 255)


@triton.jit
def offset_value(byte):
    magnitude = number16((byte & 0x7F) << 6) * OFFSET_UNIT
    return tl.where(byte >= 128, -magnitude, magnitude)


@triton.jit
def offset_byte(z):
    bits = bits16(tl.minimum(tl.abs(z), MAX_OFFSET) * (1.0 / OFFSET_UNIT))
    down = bits >> 6
    up = (bits + 63) >> 6
    byte = tl.where(z < 0, up | 0x80, down)
    over = offset_value(byte) > z
    return tl.where(over & (z < 0), tl.minimum(byte + 1, 0xFF), tl.where(over & (byte > 0), byte - 1, byte))


@triton.jit
def grid_of(lo, hi, UNIT: tl.constexpr):
    """Smallest and largest value of each group (float32) -> scale byte, offset byte."""
    lo = tl.where(hi - lo > 16.0 * LARGEST_SCALE * UNIT, tl.maximum(lo, -8.0 * LARGEST_SCALE * UNIT), lo)
    s_byte = scale_byte(tl.maximum((hi - lo) * 0.0625, tl.div_rn(tl.abs(lo), lo * 0 + MAX_OFFSET)), UNIT)
    for _ in range(8):
        s = scale_value(s_byte, UNIT)
        z = offset_value(offset_byte(tl.div_rn(lo, s) + 0.5))
        wider = tl.maximum(s_byte + 1, scale_byte(tl.div_rn(hi - z * s, s * 0 + 15.5), UNIT))
        s_byte = tl.minimum(tl.where((z + 15.5) * s < hi, wider, s_byte), 255)
    return s_byte, offset_byte(tl.div_rn(lo, scale_value(s_byte, UNIT)) + 0.5)


@triton.jit
def divided(x, s, FMA: tl.constexpr):
    """x / s, correctly rounded: by a correctly rounded reciprocal and two corrections (Markstein; the mantissa of a scale has 5 bits), or
    where fused products are not to be had (the interpreter) by division."""
    if FMA:
        r = tl.div_rn(s * 0 + 1.0, s)
        r = tl.broadcast_to(r, x.shape)
        s = tl.broadcast_to(s, x.shape)
        q = x * r
        q = tl.fma(tl.fma(-q, s, x), r, q)
    else:
        q = tl.div_rn(x, tl.broadcast_to(s, x.shape))
    return q


@triton.jit
def nearest(x):
    """Nearest integer to x, ties to even, kept in 0 to 15: (float32, int32). Adding 1.5 * 2**23 leaves it in the lowest bits."""
    x = tl.minimum(tl.maximum(x, 0.0), 15.0) + 12582912.0
    return x - 12582912.0, x.to(tl.int32, bitcast=True) & 15


@triton.jit
def plane_codes(steps, PLANE: tl.constexpr):
    """2-bit codes (int32) of a plane: base, refinement, residual high, residual low."""
    q, code = nearest(steps)
    if PLANE > 1:
        q, code = nearest((steps - q) * 16.0 + 7.5)
    return code >> 2 if PLANE % 2 == 0 else code & 3


@triton.jit
def field_bit(f, PLANE: tl.constexpr):
    """Lowest bit of field f (frame.BASE_BITS, frame.REFINE_BITS)."""
    if PLANE % 2 == 0:
        return tl.where(f < 4, 2 + 4 * f, (4 * (f - 3)) % 16)
    return tl.where(f < 4, 4 * f, 4 * (f - 4) + 2)


@triton.jit
def packed(steps, PLANE: tl.constexpr):
    """Steps [32, 8 fields, CB] -> words uint16 [32, CB] of a plane."""
    bit = field_bit(tl.arange(0, 8), PLANE)
    return tl.sum(plane_codes(steps, PLANE) << bit[None, :, None], 1).to(tl.uint16)


@triton.jit
def lane_at(i, N: tl.constexpr):
    """Where channel or token i of N lies in the stored order of metadata (inverse of frame.lane_order)."""
    return i % 8 // 2 * (N // 4) + i // 8 * 2 + i % 2


# ---- pages --------------------------------------------------------------------------------------------------------------------


@triton.jit
def dense_pointers(arena_ptr, row_ptr, stride_frame, number, ok, NUMBERS: tl.constexpr):
    """Where a dense page's numbers lie: NUMBERS to a frame, frames in row_ptr. arena_ptr points to numbers of one KV head."""
    id = tl.load(row_ptr + number // NUMBERS, mask=ok, other=0).to(tl.int64)
    return arena_ptr + id * stride_frame + number % NUMBERS


@triton.jit(do_not_specialize=["stride_frame"])
def write_pages_kernel(k_ptr, v_ptr, src_ptr, rows_ptr, arena_ptr, frames_ptr, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh,
                       stride_frame, stride_head, heads, N_SRC: tl.constexpr, SETTLE: tl.constexpr, K_PLANES: tl.constexpr, V_PLANES: tl.constexpr,
                       D: tl.constexpr, CB: tl.constexpr, FMA: tl.constexpr):  # fmt: skip
    """grid (pages * KV heads,). k, v [P, 32, H, D], or with SETTLE the dense pages of rows [P, N_SRC]; frames [P, N]. Strides of frames
    and heads count 16-bit words."""
    C: tl.constexpr = D // 8
    N: tl.constexpr = K_PLANES + V_PLANES
    WORDS: tl.constexpr = 4 * D + (D + 32) // 2
    page = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    offs_t = tl.arange(0, 32)
    offs_f = tl.arange(0, 8)
    offs_c = tl.arange(0, CB)
    channel = offs_f[:, None] * C + offs_c[None, :]  # [8, CB]
    ok = (offs_c < C)[None, :] & (offs_f >= 0)[:, None]
    ok3 = ok[None] & (offs_t >= 0)[:, None, None]
    if SETTLE:
        number = offs_t[:, None, None] * D + channel[None]
        row_ptr = rows_ptr + page * N_SRC
        k = tl.load(dense_pointers(src_ptr + head * stride_head, row_ptr, stride_frame, number, ok3, WORDS), mask=ok3, other=0.0).to(
            tl.float32
        )
        v = tl.load(
            dense_pointers(src_ptr + head * stride_head, row_ptr, stride_frame, number + 32 * D, ok3, WORDS), mask=ok3, other=0.0
        ).to(tl.float32)
    else:
        k_at = page * stride_kp + head * stride_kh + offs_t[:, None, None] * stride_kt + channel[None]
        v_at = page * stride_vp + head * stride_vh + offs_t[:, None, None] * stride_vt + channel[None]
        k = tl.load(k_ptr + k_at, mask=ok3, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + v_at, mask=ok3, other=0.0).to(tl.float32)
    arena_ptr += head * stride_head
    frames_ptr += page * N
    k_frame = arena_ptr + tl.load(frames_ptr).to(tl.int64) * stride_frame
    v_frame = arena_ptr + tl.load(frames_ptr + 1).to(tl.int64) * stride_frame

    # K: a group is a channel
    lo = tl.reshape(tl.min(k, 0), [8 * CB])
    hi = tl.reshape(tl.max(k, 0), [8 * CB])
    # pinned: each thread works on its own groups, not on those that its tokens belong to
    s_byte, z_byte = grid_of(pin(lo), pin(hi), K_UNIT)
    s_byte = tl.reshape(s_byte, [8, CB])
    z_byte = tl.reshape(z_byte, [8, CB])
    at = lane_at(channel, D)
    meta_ptr = tl.where(at < D // 2, k_frame, v_frame - D // 2) + 4 * D + at
    tl.store(meta_ptr, (s_byte | (z_byte << 8)).to(tl.uint16), mask=ok)
    steps = divided(k, scale_value(s_byte, K_UNIT)[None], FMA) - offset_value(z_byte)[None]
    word = offs_t[:, None] * C + offs_c[None, :]
    ok2 = (offs_c < C)[None, :] & (offs_t >= 0)[:, None]
    offs_m = tl.arange(0, 256)
    for i in tl.static_range(K_PLANES):
        base = arena_ptr + tl.load(frames_ptr + 2 * i).to(tl.int64) * stride_frame
        tl.store(base + word, packed(tl.where(ok3, steps, 0.0), i), mask=ok2)
        if i > 0:
            tl.store(base + 4 * D + offs_m, tl.zeros([256], tl.uint16), mask=offs_m < WORDS - 4 * D)

    # V: a group is a token
    lo = tl.min(tl.min(tl.where(ok3, v, float("inf")), 2), 1)
    hi = tl.max(tl.max(tl.where(ok3, v, -float("inf")), 2), 1)
    s_byte, z_byte = grid_of(pin(lo), pin(hi), V_UNIT)  # [32]
    at = lane_at(offs_t, 32)
    meta_ptr = tl.where(at < 16, k_frame, v_frame - 16) + (4 * D + D // 2) + at
    tl.store(meta_ptr, (s_byte | (z_byte << 8)).to(tl.uint16))
    steps = divided(v, scale_value(s_byte, V_UNIT)[:, None, None], FMA) - offset_value(z_byte)[:, None, None]
    word = offs_c[None, :] * 32 + offs_t[:, None]
    for i in tl.static_range(V_PLANES):
        base = arena_ptr + tl.load(frames_ptr + 2 * i + 1).to(tl.int64) * stride_frame
        tl.store(base + word, packed(tl.where(ok3, steps, 0.0), i), mask=ok2)
        if i > 0:
            tl.store(base + 4 * D + offs_m, tl.zeros([256], tl.uint16), mask=offs_m < WORDS - 4 * D)


@triton.jit
def write_dense_kernel(k_ptr, v_ptr, arena_ptr, frames_ptr, tokens_ptr, stride_kt, stride_kh, stride_vt, stride_vh, stride_frame, stride_head, heads,
                       N: tl.constexpr, NUMBERS: tl.constexpr, D: tl.constexpr, DB: tl.constexpr):  # fmt: skip
    """grid (tokens * KV heads,). k, v [T, H, D]; frames [T, N] of each token's page, tokens [T] inside it. Strides of frames and heads
    count numbers."""
    t = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    offs_d = tl.arange(0, DB)
    ok = offs_d < D
    number = tl.load(tokens_ptr + t) * D + offs_d
    arena_ptr += head * stride_head
    k = tl.load(k_ptr + t * stride_kt + head * stride_kh + offs_d, mask=ok)
    v = tl.load(v_ptr + t * stride_vt + head * stride_vh + offs_d, mask=ok)
    tl.store(dense_pointers(arena_ptr, frames_ptr + t * N, stride_frame, number, ok, NUMBERS), k, mask=ok)
    tl.store(dense_pointers(arena_ptr, frames_ptr + t * N, stride_frame, number + 32 * D, ok, NUMBERS), v, mask=ok)


@triton.jit
def gathered_steps(arena_ptr, row_ptr, stride_frame, word, ok, FIRST: tl.constexpr, PLANES: tl.constexpr):
    """Steps of the eight fields of gathered words: word [32, CB], row_ptr [32, 1] of each token's page -> float32 [32, 8, CB]."""
    f = tl.arange(0, 8)
    out = tl.zeros([word.shape[0], 8, word.shape[1]], tl.float32) + (1.5 if PLANES == 1 else (0.0 if PLANES == 2 else -7.5 / 16))
    for i in tl.static_range(PLANES):
        id = tl.load(row_ptr + FIRST + 2 * i).to(tl.int64)
        w = tl.load(arena_ptr + id * stride_frame + word, mask=ok, other=0).to(tl.int32)
        out += ((w[:, None, :] >> field_bit(f, i)[None, :, None]) & 3).to(tl.float32) * (4.0 / 4**i)
    return out


@triton.jit
def gather_kernel(arena_ptr, dense_ptr, src_ptr, picks_ptr, dst_ptr, stride_frame, stride_head, heads,
                  N: tl.constexpr, N_DENSE: tl.constexpr, K_PLANES: tl.constexpr, V_PLANES: tl.constexpr, D: tl.constexpr, CB: tl.constexpr):  # fmt: skip
    """grid (dense pages * KV heads,). picks [M, 32, H]: token 32 * page + t of the source pages src [P, N], or -1 for nothing; dst
    [M, N_DENSE]. K_PLANES 0: the source pages are dense too."""
    C: tl.constexpr = D // 8
    WORDS: tl.constexpr = 4 * D + (D + 32) // 2
    page = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    offs_t = tl.arange(0, 32)
    offs_f = tl.arange(0, 8)
    offs_c = tl.arange(0, CB)
    pick = tl.load(picks_ptr + (page * 32 + offs_t) * heads + head)
    filled = pick >= 0
    pick = tl.maximum(pick, 0)
    row_ptr = src_ptr + (pick // 32).to(tl.int64) * N  # [32]
    t = pick % 32
    channel = offs_f[:, None] * C + offs_c[None, :]
    ok3 = ((offs_c < C)[None, :] & (offs_f >= 0)[:, None])[None] & filled[:, None, None]
    ok2 = (offs_c < C)[None, :] & filled[:, None]
    arena_ptr += head * stride_head
    dense_ptr += head * stride_head
    if K_PLANES == 0:
        number = t[:, None, None] * D + channel[None]
        k = tl.load(dense_pointers(dense_ptr, row_ptr[:, None, None], stride_frame, number, ok3, WORDS), mask=ok3, other=0.0)
        v = tl.load(dense_pointers(dense_ptr, row_ptr[:, None, None], stride_frame, number + 32 * D, ok3, WORDS), mask=ok3, other=0.0)
    else:
        k_base = arena_ptr + tl.load(row_ptr).to(tl.int64) * stride_frame  # [32]
        v_base = arena_ptr + tl.load(row_ptr + 1).to(tl.int64) * stride_frame
        at = lane_at(channel, D)[None]
        meta = tl.load(tl.where(at < D // 2, k_base[:, None, None], v_base[:, None, None] - D // 2) + 4 * D + at, mask=ok3, other=0).to(
            tl.int32
        )
        k = gathered_steps(arena_ptr, row_ptr[:, None], stride_frame, t[:, None] * C + offs_c[None, :], ok2, 0, K_PLANES)
        k = ((k + offset_value(meta >> 8)) * scale_value(meta & 0xFF, K_UNIT)).to(dense_ptr.dtype.element_ty)
        at = lane_at(t, 32)
        meta = tl.load(tl.where(at < 16, k_base, v_base - 16) + (4 * D + D // 2) + at).to(tl.int32)[:, None, None]
        v = gathered_steps(arena_ptr, row_ptr[:, None], stride_frame, offs_c[None, :] * 32 + t[:, None], ok2, 1, V_PLANES)
        v = ((v + offset_value(meta >> 8)) * scale_value(meta & 0xFF, V_UNIT)).to(dense_ptr.dtype.element_ty)
        k = tl.where(ok3, k, 0.0)
        v = tl.where(ok3, v, 0.0)
    number = offs_t[:, None, None] * D + channel[None]
    ok3 = ((offs_c < C)[None, :] & (offs_f >= 0)[:, None])[None] & (offs_t >= 0)[:, None, None]
    dst_ptr += page * N_DENSE
    tl.store(dense_pointers(dense_ptr, dst_ptr, stride_frame, number, ok3, WORDS), k, mask=ok3)
    tl.store(dense_pointers(dense_ptr, dst_ptr, stride_frame, number + 32 * D, ok3, WORDS), v, mask=ok3)


# ---- the ops ------------------------------------------------------------------------------------------------------------------


def _checked_head_dim(arena: Tensor, head_dim: int) -> int:
    """head_dim, if the arena's frames are those of the planes codec for it."""
    if arena.shape[2] != frame.frame_bytes(frame.check_head_dim(head_dim)) or not arena.is_contiguous():
        raise ValueError(f"arena {tuple(arena.shape)} must be contiguous with {frame.frame_bytes(head_dim)} bytes a frame and KV head")
    return head_dim


def _block(head_dim: int) -> int:
    return triton.next_power_of_2(head_dim // 8)


def write_pages_triton(arena: Tensor, frames: Tensor, k: Tensor, v: Tensor, tier: Tier) -> None:
    """`write_pages` by Triton, without its check for NaN and Inf."""
    if not tier.k_planes:
        raise ValueError(f"tier {tier.name} has no planes; accepted: INT2, INT3, INT4, INT8")
    if k.shape != v.shape or k.ndim != 4 or k.shape[1] != PAGE_SIZE:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must both be [pages, {PAGE_SIZE}, KV heads, head_dim]")
    p, _, h, d = k.shape
    _checked_head_dim(arena, d)
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    words = arena.view(torch.uint16)
    if p:
        write_pages_kernel[(p * h,)](
            k, v, words, frames.contiguous(), words, frames.contiguous(), *k.stride()[:3], *v.stride()[:3], words.stride(0), words.stride(1), h, N_SRC=1, SETTLE=False,
            K_PLANES=tier.k_planes, V_PLANES=tier.v_planes, D=d, CB=_block(d), FMA=not backend.interpreting(),
            num_warps=4,
        )  # fmt: skip


def settle_pages_triton(arena: Tensor, src_frames: Tensor, dst_frames: Tensor, tier: Tier, head_dim: int, dense_dtype: torch.dtype) -> None:
    """`settle_pages` by Triton: one pass from dense pages to planes."""
    if not tier.k_planes or dense_dtype.itemsize != 2:
        raise ValueError(f"pages of {dense_dtype} to tier {tier.name}; accepted: 16-bit pages to INT2, INT3, INT4, INT8")
    _checked_head_dim(arena, head_dim)
    words, numbers = arena.view(torch.uint16), arena.view(dense_dtype)
    if len(src_frames):
        write_pages_kernel[(len(src_frames) * arena.shape[1],)](
            numbers, numbers, numbers, src_frames.contiguous(), words, dst_frames.contiguous(), 0, 0, 0, 0, 0, 0, words.stride(0), words.stride(1), arena.shape[1],
            N_SRC=src_frames.shape[1], SETTLE=True, K_PLANES=tier.k_planes, V_PLANES=tier.v_planes, D=head_dim, CB=_block(head_dim),
            FMA=not backend.interpreting(), num_warps=4,
        )  # fmt: skip


def write_dense_triton(arena: Tensor, frames: Tensor, tokens: Tensor, k: Tensor, v: Tensor) -> None:
    """`write_dense` by Triton; k and v of any float type of the pages' size."""
    n, h, d = k.shape
    numbers = arena.view(k.dtype)
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    if n:
        write_dense_kernel[(n * h,)](
            k, v, numbers, frames.contiguous(), tokens.contiguous(), *k.stride()[:2], *v.stride()[:2], numbers.stride(0), numbers.stride(1), h,
            N=frames.shape[1], NUMBERS=numbers.shape[2], D=d, DB=triton.next_power_of_2(d), num_warps=1,
        )  # fmt: skip


def gather_pages_triton(arena: Tensor, src_frames: Tensor, tier: Tier, picks: Tensor, dst_frames: Tensor, head_dim: int,
                        dense_dtype: torch.dtype) -> None:  # fmt: skip
    """`gather_pages` by Triton."""
    if dense_dtype.itemsize != 2:
        raise ValueError(f"dense pages of {dense_dtype}; the kernel accepts torch.bfloat16 and torch.float16")
    _checked_head_dim(arena, head_dim)
    words, numbers = arena.view(torch.uint16), arena.view(dense_dtype)
    if len(picks):
        gather_kernel[(len(picks) * arena.shape[1],)](
            words, numbers, src_frames.contiguous(), picks.contiguous(), dst_frames.contiguous(), words.stride(0), words.stride(1), arena.shape[1],
            N=src_frames.shape[1], N_DENSE=dense.num_frames(head_dim, 2, arena.shape[2]), K_PLANES=tier.k_planes, V_PLANES=tier.v_planes,
            D=head_dim, CB=_block(head_dim), num_warps=4,
        )  # fmt: skip
