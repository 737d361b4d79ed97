"""Attention of a chunk of new tokens over stored pages and over the chunk itself, in one launch (Triton).

A program takes a run of new tokens of one sequence, all query heads of one KV head, as the rows of its products. It first walks the
stored pages, tier by tier: planes become fp16 numbers in registers (nothing dequantized is written to memory), in an order of
channels that suits the unpacking: c * 8 + f for channel f * C + c. One product with the Hadamard matrix then brings the sum back to
the ordinary channels, and the loop over the chunk goes on with the same running maximum. Knows nothing of stores.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvstrata.ops import arguments, backend, dense, extend_tiles
from kvstrata.ops.quant_kernel import OFFSET_UNIT, fields, fma2, mul2, offset_of, pin, scale_of, weight_of
from kvstrata.ops.table import PageTable
from kvstrata.ops.write_kernel import lane_at

BLOCK_ROWS, NUM_WARPS, NUM_STAGES, KEYS = 128, 8, 1, 128


@triton.jit
def joined(x, TRANSPOSED: tl.constexpr):
    """Eight fields [A, B] -> [A, 8 * B] with column b * 8 + f; TRANSPOSED: [8 * A, B] with row a * 8 + f."""
    A: tl.constexpr = x[0].shape[0]
    B: tl.constexpr = x[0].shape[1]
    y = tl.join(tl.join(tl.join(x[0], x[4]), tl.join(x[2], x[6])), tl.join(tl.join(x[1], x[5]), tl.join(x[3], x[7])))
    if TRANSPOSED:
        y = tl.reshape(tl.permute(y, (0, 2, 3, 4, 1)), [8 * A, B])
    else:
        y = tl.reshape(y, [A, 8 * B])
    return y


@triton.jit
def numbers(words, fine, res, res_fine, unit, scale, offset, PLANES: tl.constexpr, TRANSPOSED: tl.constexpr, ASM: tl.constexpr):
    """Words of a tile's planes -> fp16 numbers code * scale + offset. unit: 2**15 over the weight of the field; scale counts 2**-9."""
    x = joined(fields(words, fine, 2 if PLANES > 1 else 1, ASM), TRANSPOSED)
    unit = tl.broadcast_to(unit, x.shape)
    x = mul2(x, unit, ASM)
    if PLANES == 4:
        r = mul2(joined(fields(res, res_fine, 2, ASM), TRANSPOSED), unit, ASM)
        x = fma2(r, tl.full(x.shape, 0.0625, tl.float16), x, ASM)
    return fma2(x, tl.broadcast_to(scale, x.shape), tl.broadcast_to(offset, x.shape), ASM)


@triton.jit
def metadata(words, UNIT: tl.constexpr, MIDDLE: tl.constexpr, ASM: tl.constexpr):
    """Metadata words [N] -> scale * UNIT * 2**9 and scale * UNIT * (steps + MIDDLE), fp16."""
    s = scale_of(words, ASM)
    z = fma2(offset_of(words, ASM), tl.full(s.shape, OFFSET_UNIT, tl.float16), tl.full(s.shape, MIDDLE, tl.float16), ASM)
    z = mul2(mul2(s, tl.full(s.shape, UNIT, tl.float16), ASM), z, ASM)
    return pin(mul2(s, tl.full(s.shape, UNIT * 512.0, tl.float16), ASM)), pin(z)


@triton.jit
def step(q, k, v, keep, m, total, acc, qk_scale):
    """Online softmax: q [M, C], k [N, C], v [N, C'], keep bool [M or 1, N] -> m (before scaling), total [M] and acc [M, C']."""
    s = tl.where(keep, tl.dot(q, tl.trans(k)), -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    alpha = tl.exp2((m - m_new) * qk_scale)
    p = tl.exp2(s * qk_scale - (m_new * qk_scale)[:, None])
    total = total * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return m_new, total, acc


@triton.jit
def walk_planes(q, arena_ptr, frames_ptr, live_ptr, count, m, total, acc, qk_scale, stride_frame, stride_live,
                K_PLANES: tl.constexpr, V_PLANES: tl.constexpr, LIVE: tl.constexpr, D: tl.constexpr, CB: tl.constexpr, KEYS: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """KEYS / 32 pages a step. q [M, 8 * CB] fp16 in the order of `joined`."""
    C: tl.constexpr = D // 8
    N: tl.constexpr = K_PLANES + V_PLANES
    K_MIDDLE: tl.constexpr = 1.5 if K_PLANES == 1 else (0.0 if K_PLANES == 2 else -7.5 / 16)
    V_MIDDLE: tl.constexpr = 1.5 if V_PLANES == 1 else (0.0 if V_PLANES == 2 else -7.5 / 16)
    offs_n = tl.arange(0, KEYS)
    offs_c = tl.arange(0, CB)
    offs_i = tl.arange(0, 8 * CB)
    t = offs_n % 32
    k_word = t[:, None] * C + offs_c[None, :]
    v_word = offs_c[:, None] * 32 + t[None, :]
    k_ok = (offs_c < C)[None, :] & (offs_n >= 0)[:, None]
    v_ok = (offs_c < C)[:, None] & (offs_n >= 0)[None, :]
    # K's metadata of the step's pages, [KEYS / 32 * 8 * CB]; V's, [KEYS]
    offs_j = tl.arange(0, KEYS // 4 * CB)
    c = offs_j % (8 * CB) // 8
    at = lane_at(offs_j % 8 * C + c, D)
    k_back = at // (D // 2)
    k_at = 4 * D + at - k_back * (D // 2)
    m_ok = c < C
    at = lane_at(t, 32)
    v_back = at // 16
    v_at = 4 * D + D // 2 + at - v_back * 16
    unit = (32768.0 / weight_of(offs_i % 8)).to(tl.float16)
    at = lane_at(t, 32)
    v_back = at // 16
    v_at = 4 * D + D // 2 + at - v_back * 16
    for i in range(0, count, KEYS // 32):
        page = tl.minimum(i + offs_n // 32, count - 1)
        row_ptr = frames_ptr + page * N
        k_id = tl.load(row_ptr).to(tl.int64)
        v_id = tl.load(row_ptr + 1).to(tl.int64)
        k0 = tl.load(arena_ptr + (k_id * stride_frame)[:, None] + k_word, mask=k_ok, other=0)
        v0 = tl.load(arena_ptr + (v_id * stride_frame)[None, :] + v_word, mask=v_ok, other=0)
        k1 = k0
        k2 = k0
        k3 = k0
        v1 = v0
        v2 = v0
        v3 = v0
        if K_PLANES > 1:
            k1 = tl.load(arena_ptr + (tl.load(row_ptr + 2).to(tl.int64) * stride_frame)[:, None] + k_word, mask=k_ok, other=0)
        if V_PLANES > 1:
            v1 = tl.load(arena_ptr + (tl.load(row_ptr + 3).to(tl.int64) * stride_frame)[None, :] + v_word, mask=v_ok, other=0)
        if K_PLANES > 2:
            k2 = tl.load(arena_ptr + (tl.load(row_ptr + 4).to(tl.int64) * stride_frame)[:, None] + k_word, mask=k_ok, other=0)
            v2 = tl.load(arena_ptr + (tl.load(row_ptr + 5).to(tl.int64) * stride_frame)[None, :] + v_word, mask=v_ok, other=0)
            k3 = tl.load(arena_ptr + (tl.load(row_ptr + 6).to(tl.int64) * stride_frame)[:, None] + k_word, mask=k_ok, other=0)
            v3 = tl.load(arena_ptr + (tl.load(row_ptr + 7).to(tl.int64) * stride_frame)[None, :] + v_word, mask=v_ok, other=0)
        ids = tl.load(frames_ptr + tl.minimum(i + offs_j // (8 * CB), count - 1) * N + k_back).to(tl.int64)
        scale, offset = metadata(tl.load(arena_ptr + ids * stride_frame + k_at, mask=m_ok, other=0), 64.0, K_MIDDLE, ASM)
        scale = tl.reshape(tl.broadcast_to(tl.reshape(scale, [KEYS // 32, 1, 8 * CB]), [KEYS // 32, 32, 8 * CB]), [KEYS, 8 * CB])
        offset = tl.reshape(tl.broadcast_to(tl.reshape(offset, [KEYS // 32, 1, 8 * CB]), [KEYS // 32, 32, 8 * CB]), [KEYS, 8 * CB])
        k = numbers(k0, k1, k2, k3, unit[None, :], scale, offset, K_PLANES, False, ASM)
        scale, offset = metadata(tl.load(arena_ptr + tl.load(row_ptr + v_back).to(tl.int64) * stride_frame + v_at), 8.0, V_MIDDLE, ASM)
        v = numbers(v0, v1, v2, v3, unit[:, None], scale[None, :], offset[None, :], V_PLANES, True, ASM)
        keep = i + offs_n // 32 < count
        if LIVE:
            keep &= ((tl.load(live_ptr + page * stride_live) >> t) & 1) != 0
        m, total, acc = step(q, k, tl.trans(v), keep[None, :], m, total, acc, qk_scale)
    return m, total, acc


@triton.jit
def walk_dense(q, arena_ptr, frames_ptr, live_ptr, count, m, total, acc, qk_scale, stride_frame, stride_live,
               N: tl.constexpr, NUMBERS: tl.constexpr, LIVE: tl.constexpr, D: tl.constexpr, CB: tl.constexpr):  # fmt: skip
    """Pages in floating point, two a step. q [M, 8 * CB] of their type, in the order of `joined`."""
    C: tl.constexpr = D // 8
    offs_n = tl.arange(0, 64)
    offs_i = tl.arange(0, 8 * CB)
    t = offs_n % 32
    number = t[:, None] * D + (offs_i % 8 * C + offs_i // 8)[None, :]
    for i in tl.range(0, count, 2, num_stages=1):
        page = tl.minimum(i + offs_n // 32, count - 1)
        keep = i + offs_n // 32 < count
        if LIVE:
            keep &= ((tl.load(live_ptr + page * stride_live) >> t) & 1) != 0
        ok = (offs_i // 8 < C)[None, :] & keep[:, None]
        row_ptr = frames_ptr + (page * N)[:, None]
        id = tl.load(row_ptr + number // NUMBERS, mask=ok, other=0).to(tl.int64)
        k = tl.load(arena_ptr + id * stride_frame + number % NUMBERS, mask=ok, other=0.0)
        id = tl.load(row_ptr + (number + 32 * D) // NUMBERS, mask=ok, other=0).to(tl.int64)
        v = tl.load(arena_ptr + id * stride_frame + (number + 32 * D) % NUMBERS, mask=ok, other=0.0)
        m, total, acc = step(q, k, v, keep[None, :], m, total, acc, qk_scale)
    return m, total, acc


@triton.jit
def back(D: tl.constexpr, CB: tl.constexpr, DB: tl.constexpr, ROTATION: tl.constexpr):
    """fp16 [8 * CB, DB]: from the order of `joined` to channels, times the block-wise Hadamard matrix of ROTATION channels (0: none)."""
    i = tl.arange(0, 8 * CB)
    channel = (i % 8 * (D // 8) + i // 8)[:, None]
    d = tl.arange(0, DB)[None, :]
    inside = (i // 8 < D // 8)[:, None] & (d < D)
    if ROTATION == 0:
        return tl.where(inside & (channel == d), 1.0, 0.0).to(tl.float16)
    x = channel % ROTATION & d % ROTATION
    x ^= x >> 4
    x ^= x >> 2
    x ^= x >> 1
    sign = (1 - 2 * (x & 1)).to(tl.float32) * (1.0 / ROTATION**0.5)
    return tl.where(inside & (channel // ROTATION == d // ROTATION), sign, 0.0).to(tl.float16)


@triton.jit(do_not_specialize=["group", "rows16", "rows8", "rows4", "rows3", "rows2"])
def extend_kernel(q_ptr, k_ptr, v_ptr, out_ptr, tiles_ptr, arena_ptr, dense_ptr,
                  frames16_ptr, counts16_ptr, live16_ptr, rows16, heads16,
                  frames8_ptr, counts8_ptr, live8_ptr, rows8, heads8,
                  frames4_ptr, counts4_ptr, live4_ptr, rows4, heads4,
                  frames3_ptr, counts3_ptr, live3_ptr, rows3, heads3,
                  frames2_ptr, counts2_ptr, live2_ptr, rows2, heads2,
                  group, qk_scale, stride_frame, stride_head, stride_qt, stride_kt, stride_kh, stride_vt, stride_vh,
                  HAS16: tl.constexpr, HAS8: tl.constexpr, HAS4: tl.constexpr, HAS3: tl.constexpr, HAS2: tl.constexpr,
                  LIVE16: tl.constexpr, LIVE8: tl.constexpr, LIVE4: tl.constexpr, LIVE3: tl.constexpr, LIVE2: tl.constexpr,
                  N16: tl.constexpr, NUMBERS: tl.constexpr, ROTATION: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
                  CB: tl.constexpr, DB: tl.constexpr, KEYS: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """grid (tiles, H). q, out [N, Hq, D]; k, v [N, H, D]; tiles int32 [.., 4]: sequence, its first row, its tokens, first token of the
    tile. Row r of the tile is token r // G, query head r % G of the KV head's group."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    b = tl.load(tiles_ptr + 4 * tile)
    first_row = tl.load(tiles_ptr + 4 * tile + 1).to(tl.int64)
    tokens = tl.load(tiles_ptr + 4 * tile + 2)
    start = tl.load(tiles_ptr + 4 * tile + 3)
    offs_m = tl.arange(0, M)
    offs_d = tl.arange(0, DB)
    offs_i = tl.arange(0, 8 * CB)
    token = start + offs_m // G
    row_ok = (token < tokens) & (offs_m % G < group)
    q_row = (first_row + token) * stride_qt + (head * group + offs_m % G) * D
    C: tl.constexpr = D // 8
    m = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DB], tl.float32)
    if HAS16 or HAS8 or HAS4 or HAS3 or HAS2:
        channel = offs_i % 8 * C + offs_i // 8
        q = tl.load(q_ptr + q_row[:, None] + channel[None, :], mask=row_ok[:, None] & (offs_i // 8 < C)[None, :], other=0.0)
        part = tl.zeros([M, 8 * CB], tl.float32)
        arena_ptr += head * stride_head
        dense_ptr += head * stride_head
        row = b.to(tl.int64)
        if HAS16:
            m, total, part = walk_dense(q.to(dense_ptr.dtype.element_ty), dense_ptr, frames16_ptr + row * rows16 * N16, live16_ptr + row * rows16 * heads16 + head % heads16,
                                        tl.load(counts16_ptr + b), m, total, part, qk_scale, stride_frame, heads16, N16, NUMBERS, LIVE16, D, CB)  # fmt: skip
        q = q.to(tl.float16)
        if HAS8:
            m, total, part = walk_planes(q, arena_ptr, frames8_ptr + row * rows8 * 8, live8_ptr + row * rows8 * heads8 + head % heads8,
                                         tl.load(counts8_ptr + b), m, total, part, qk_scale, stride_frame, heads8, 4, 4, LIVE8, D, CB, KEYS, ASM)  # fmt: skip
        if HAS4:
            m, total, part = walk_planes(q, arena_ptr, frames4_ptr + row * rows4 * 4, live4_ptr + row * rows4 * heads4 + head % heads4,
                                         tl.load(counts4_ptr + b), m, total, part, qk_scale, stride_frame, heads4, 2, 2, LIVE4, D, CB, KEYS, ASM)  # fmt: skip
        if HAS3:
            m, total, part = walk_planes(q, arena_ptr, frames3_ptr + row * rows3 * 3, live3_ptr + row * rows3 * heads3 + head % heads3,
                                         tl.load(counts3_ptr + b), m, total, part, qk_scale, stride_frame, heads3, 2, 1, LIVE3, D, CB, KEYS, ASM)  # fmt: skip
        if HAS2:
            m, total, part = walk_planes(q, arena_ptr, frames2_ptr + row * rows2 * 2, live2_ptr + row * rows2 * heads2 + head % heads2,
                                         tl.load(counts2_ptr + b), m, total, part, qk_scale, stride_frame, heads2, 1, 1, LIVE2, D, CB, KEYS, ASM)  # fmt: skip
        # normalized, so that it fits fp16 whatever the number of tokens
        weight = tl.maximum(total, 1e-30)
        part = (part / weight[:, None]).to(tl.float16)
        acc = tl.dot(part, back(D, CB, DB, ROTATION)) * weight[:, None]

    # the chunk itself, causal
    q = tl.load(q_ptr + q_row[:, None] + offs_d[None, :], mask=row_ok[:, None] & (offs_d < D)[None, :], other=0.0)
    k_ptr += first_row * stride_kt + head * stride_kh
    v_ptr += first_row * stride_vt + head * stride_vh
    offs_n = tl.arange(0, 64)
    end = tl.minimum(tokens, start + M // G)
    for i in tl.range(0, end, 64, num_stages=1):
        n = i + offs_n
        ok = (n < tokens)[:, None] & (offs_d < D)[None, :]
        k = tl.load(k_ptr + n[:, None].to(tl.int64) * stride_kt + offs_d[None, :], mask=ok, other=0.0)
        v = tl.load(v_ptr + n[:, None].to(tl.int64) * stride_vt + offs_d[None, :], mask=ok, other=0.0)
        keep = (n[None, :] <= token[:, None]) & (n < tokens)[None, :]
        m, total, acc = step(q, k, v, keep, m, total, acc, qk_scale)
    out = acc / tl.maximum(total, 1e-30)[:, None]
    out_row = (first_row + token) * (tl.num_programs(1) * group * D) + (head * group + offs_m % G) * D
    tl.store(out_ptr + out_row[:, None] + offs_d[None, :], out.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & (offs_d < D)[None, :])


def extend_triton(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: list[int], arena: Tensor, table: PageTable, scale: float, *,
                  dense_dtype: torch.dtype, rotated: bool = True) -> Tensor:  # fmt: skip
    """`extend` by Triton. Raises ValueError for what the kernel does not do."""
    n, hq, d = q.shape
    h = k.shape[1]
    group = hq // h
    arguments.check(q, h, arena, dense_dtype)
    q, scale = arguments.ascending(q, scale)
    if backend.interpreting() and torch.bfloat16 in (q.dtype, dense_dtype):
        raise ValueError(f"queries {q.dtype} and dense pages {dense_dtype} in Triton's interpreter, whose products take the bits of bfloat16 "
                         "for integers; accepted there: torch.float16")  # fmt: skip
    frame_bytes = arena.shape[2]
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k.to(q.dtype), v.to(q.dtype)))
    q = q if q.stride(1) == d else q.contiguous()
    padded = triton.next_power_of_2(group)
    # with 256 channels, half the rows fit
    rows = BLOCK_ROWS if d <= 128 else BLOCK_ROWS // 2
    per_tile = rows // padded
    tiles = extend_tiles.tiles(cu_seqlens, per_tile)
    out = torch.empty(n, hq, d, dtype=q.dtype, device=q.device)
    if not tiles:
        return out
    args = arguments.of_tiers(table, out, 1)
    has, live = [n > 0 for n in args[3::5]], [mask is not out for mask in args[2::5]]
    words, numbers_ = arena.view(torch.uint16), arena.view(dense_dtype)
    extend_kernel[(len(tiles), h)](
        q, k, v, out, torch.tensor(tiles, dtype=torch.int32).to(q.device, non_blocking=True), words, numbers_, *args, group,
        scale * math.log2(math.e), words.stride(0), words.stride(1), q.stride(0), *k.stride()[:2], *v.stride()[:2], *has, *live,
        N16=dense.num_frames(d, 2, frame_bytes), NUMBERS=frame_bytes // 2, ROTATION=d & -d if rotated else 0, G=padded, M=rows, D=d,
        CB=max(2, triton.next_power_of_2(d // 8)), DB=triton.next_power_of_2(d), KEYS=KEYS if d <= 128 else 64, ASM=not backend.interpreting(), num_warps=NUM_WARPS,
        num_stages=NUM_STAGES if d <= 128 else 1,
    )  # fmt: skip
    return out
