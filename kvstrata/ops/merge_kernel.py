"""Merging the parts of decode_kernel.py by log-sum-exp, and rotating the output back (Triton). Knows nothing of pages."""

import triton
import triton.language as tl

from kvstrata.ops.attend_kernel import P_BITS


@triton.jit
def rotate_rows(x, BLOCK: tl.constexpr):
    """x [R, N] float32 times the block-wise Hadamard matrix, unscaled: each round takes sums and differences over the lowest index
    bit and makes it the highest of its block, so that after log2(BLOCK) rounds every bit is back in its place."""
    R: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    x = tl.reshape(x, [R * N // BLOCK, BLOCK])
    for i in tl.static_range(10):
        if 2**i < BLOCK:
            a, b = tl.split(tl.reshape(x, [R * N // BLOCK, BLOCK // 2, 2]))
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [R * N // BLOCK, BLOCK])
    return tl.reshape(x, [R, N])


@triton.jit(do_not_specialize=["batch", "group", "slots"])
def merge_kernel(part_ptr, stat_ptr, plan_ptr, out_ptr, lse_ptr, batch, group, slots, S: tl.constexpr,
                 D: tl.constexpr, DB: tl.constexpr, ROTATION: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """grid (B, Hq). Parts of decode_kernel -> out [B, Hq, D], rotated back in blocks of ROTATION channels (0: not), lse [B, Hq]."""
    b = tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // group
    g = head % group
    start = tl.load(plan_ptr + b)
    parts = tl.load(plan_ptr + batch + b) * S
    offs_d = tl.arange(0, DB)
    offs_s = tl.arange(0, STEP)
    m = -float("inf")
    total = 0.0
    acc = tl.zeros([DB], tl.float32)
    for i in range(0, parts, STEP):
        ok = i + offs_s < parts
        row = ((kv_head * slots + start) * S + i + offs_s).to(tl.int64)
        ms = tl.load(stat_ptr + row * 32 + g, mask=ok, other=-float("inf"))
        ls = tl.load(stat_ptr + row * 32 + 16 + g, mask=ok, other=0.0)
        # a part without pages of a tier has written no sum
        x = tl.load(part_ptr + (row * group + g)[:, None] * D + offs_d[None, :], mask=(ls > 0)[:, None] & (offs_d < D)[None, :], other=0.0)
        m_new = tl.maximum(m, tl.max(ms, 0))
        w = tl.exp2(ms - m_new)
        alpha = tl.exp2(m - m_new)
        total = total * alpha + tl.sum(w * ls, 0)
        acc = acc * alpha + tl.sum(x * w[:, None], 0)
        m = m_new
    # a sequence without a live token gives 0 and -inf
    acc = tl.where(total > 0, acc / tl.maximum(total, 1e-30), 0.0)
    lse = tl.where(total > 0, (m - P_BITS + tl.log2(tl.maximum(total, 1e-30))) * 0.6931471805599453, -float("inf"))
    if ROTATION > 0:
        acc = tl.reshape(rotate_rows(tl.reshape(acc, [1, DB]), ROTATION), [DB]) * (1.0 / ROTATION**0.5)
    at = (b * tl.num_programs(1) + head).to(tl.int64)
    tl.store(out_ptr + at * D + offs_d, acc.to(out_ptr.dtype.element_ty), mask=offs_d < D)
    tl.store(lse_ptr + at, lse)
