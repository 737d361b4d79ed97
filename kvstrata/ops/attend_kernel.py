"""Attention of one warp over a run of stored pages of one tier, sequence and KV head (Triton device functions of decode_kernel.py).

Tokens lie on the M axis of both products and query heads on the N axis, 8 or 16 of them. Of the products' operands
    K codes    [tokens, channels]   go from memory to registers and are masked there: no conversion, no movement
    q          [channels, heads]    carries K's scales (page by page) and undoes the weights of the fields
    p          [heads, tokens]      is the first product's output, transposed in registers; it carries V's scales
    V codes    [channels, tokens]   as K
K's offsets, V's offsets and the sum of p are products with rows that are all equal. Knows nothing of who attends what.
"""

import triton
import triton.language as tl

from kvstrata.ops.quant_kernel import (
    OFFSET_UNIT,
    fields,
    fma2,
    mul2,
    offset_of,
    pair_offsets,
    pair_scales,
    pin,
    scale_of,
    weight,
    weight_of,
)

P_BITS = tl.constexpr(14.0)
"""Probabilities are relative to the largest so far, times 2**14: small ones stay normal numbers in fp16."""


# ---- pieces of one page -------------------------------------------------------------------------------------------------------


@triton.jit
def transpose8(x, ASM: tl.constexpr):
    """[T, G] 16-bit -> [G, T], in registers: 8 x 8 tiles of an mma accumulator become tiles of an mma operand."""
    T: tl.constexpr = x.shape[0]
    G: tl.constexpr = x.shape[1]
    if ASM:
        x = tl.inline_asm_elementwise("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2)
        x = tl.permute(tl.reshape(x, [T // 8, 8, G // 8, 8]), (2, 1, 0, 3))
    else:
        x = tl.permute(tl.reshape(x, [T // 8, 8, G // 8, 8]), (2, 3, 0, 1))
    return tl.reshape(x, [G, T])


@triton.jit
def split8(x):
    """[R, 8 * CB] -> eight [R, CB]."""
    R: tl.constexpr = x.shape[0]
    CB: tl.constexpr = x.shape[1] // 8
    x = tl.permute(tl.reshape(x, [R, 2, 2, 2, CB]), (0, 4, 1, 2, 3))
    e, o = tl.split(x)
    e0, e1 = tl.split(e)
    o0, o1 = tl.split(o)
    x0, x4 = tl.split(e0)
    x2, x6 = tl.split(e1)
    x1, x5 = tl.split(o0)
    x3, x7 = tl.split(o1)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def top(x, G: tl.constexpr):
    """The first G rows of [16, N]: a renaming of registers."""
    if G == 16:
        lo = x
    else:
        lo, hi = tl.split(tl.permute(tl.reshape(x, [2, 8, x.shape[1]]), (1, 2, 0)))
    return lo


@triton.jit
def frame_ids(row_ptr, N: tl.constexpr):
    ids = ()
    for i in tl.static_range(N):
        ids = ids + (tl.load(row_ptr + i).to(tl.int64),)
    return ids


@triton.jit
def plane_words(base, offs, mask, FULL: tl.constexpr):
    if FULL:
        return tl.load(base + offs)
    return tl.load(base + offs, mask=mask, other=0)


@triton.jit
def load_page(arena_ptr, ids, stride_frame, K_PLANES: tl.constexpr, V_PLANES: tl.constexpr, D: tl.constexpr, CB: tl.constexpr):
    """K_PLANES times words [32, CB], V_PLANES times words [CB, 32], metadata of K [8 * CB] and of V [16] (two words of 16 bits each)."""
    C: tl.constexpr = D // 8
    FULL: tl.constexpr = CB == C
    offs_t = tl.arange(0, 32)
    offs_c = tl.arange(0, CB)
    k_mask = (offs_c < C)[None, :]
    v_mask = (offs_c < C)[:, None]
    k_base = arena_ptr + ids[0] * stride_frame
    v_base = arena_ptr + ids[1] * stride_frame
    k = (plane_words(k_base, offs_t[:, None] * C + offs_c[None, :], k_mask, FULL),)
    v = (plane_words(v_base, offs_c[:, None] * 32 + offs_t[None, :], v_mask, FULL),)
    for i in tl.static_range(1, K_PLANES):
        k = k + (plane_words(arena_ptr + ids[2 * i] * stride_frame, offs_t[:, None] * C + offs_c[None, :], k_mask, FULL),)
    for i in tl.static_range(1, V_PLANES):
        v = v + (plane_words(arena_ptr + ids[2 * i + 1] * stride_frame, offs_c[:, None] * 32 + offs_t[None, :], v_mask, FULL),)
    # half of the metadata is in K's frame and half in V's: by arithmetic, for a choice between pointers upsets the compiler's layouts
    apart = (ids[1] - ids[0]) * stride_frame
    # element of the stored order: lane of a quad, field, half, pair
    offs_m = tl.arange(0, 8 * CB)
    if FULL:
        at = offs_m
        ok = offs_m >= 0
    else:
        c = offs_m % (CB // 4) // 2 * 8 + offs_m // (2 * CB) * 2 + offs_m % 2
        channel = offs_m % (2 * CB) // (CB // 4) * C + c
        at = channel % 8 // 2 * (D // 4) + channel // 8 * 2 + channel % 2
        ok = c < C
    k_meta_ptr = k_base + (4 * D + at - at // (D // 2) * (D // 2)) + at // (D // 2) * apart
    if FULL:
        k_meta = tl.load(k_meta_ptr)
    else:
        k_meta = tl.load(k_meta_ptr, mask=ok, other=0)
    offs_w = tl.arange(0, 16)
    v_meta_ptr = k_base + (4 * D + D // 2 + offs_w % 8 * 2) + offs_w // 8 * apart
    v_meta = tl.load(v_meta_ptr.to(tl.pointer_type(tl.uint32)))
    # flat: the interpreter returns no tuple inside a tuple
    return k + v + (k_meta, v_meta)


@triton.jit
def in_order(x):
    """Metadata as loaded, a quad lane's values side by side, [4 * J * 2] of two pages interleaved -> [8 * J, 2] in order of channels or tokens."""
    J: tl.constexpr = x.shape[0] // 16
    return tl.reshape(tl.permute(tl.reshape(x, [4, J, 2, 2]), (1, 0, 2, 3)), [8 * J, 2])


@triton.jit
def halves(x):
    """[N, 2] -> [16, N]: x[:, 0] in rows 0 to 7, x[:, 1] in rows 8 to 15."""
    N: tl.constexpr = x.shape[0]
    return tl.reshape(tl.broadcast_to(tl.permute(x, (1, 0))[:, None, :], [2, 8, N]), [16, N])


@triton.jit
def eight_rows(x, SECOND: tl.constexpr):
    """[16, G], rows equal in each half -> [32, G] of one half's rows."""
    G: tl.constexpr = x.shape[1]
    lo, hi = tl.split(tl.permute(tl.reshape(x, [2, 8, G]), (1, 2, 0)))
    half = hi if SECOND else lo
    pair = tl.join(half, half)
    return tl.reshape(tl.permute(tl.join(pair, pair), (2, 3, 0, 1)), [32, G])


@triton.jit
def k_metadata(words, words2, weights, PLANES: tl.constexpr, ASM: tl.constexpr):
    """Of the channels of two pages, fp16 [8 * CB, 2]: scales, and offsets (scale * steps * weight of the field / 2)."""
    middle: tl.constexpr = 1.5 if PLANES == 1 else (0.0 if PLANES == 2 else -7.5 / 16)
    words = tl.reshape(tl.join(words, words2), [2 * words.shape[0]])
    s = scale_of(words, ASM)
    z = fma2(offset_of(words, ASM), (weights * (OFFSET_UNIT * 0.5)).to(tl.float16), (weights * (middle * 0.5)).to(tl.float16), ASM)
    return in_order(pin(s)), in_order(pin(mul2(s, z, ASM)))


@triton.jit
def v_metadata(pairs, PLANES: tl.constexpr, ASM: tl.constexpr):
    """Of a page's tokens, fp16 [32]: scales, and offsets (scale * steps). pairs [16] hold two words each."""
    middle: tl.constexpr = 1.5 if PLANES == 1 else (0.0 if PLANES == 2 else -7.5 / 16)
    return tokens(pair_scales(pairs)), tokens(pair_offsets(pairs, middle, ASM))


@triton.jit
def tokens(x):
    """Pairs of fp16 in 32 bits, [4 lanes * 4], as loaded -> [32] in order of tokens."""
    lo = (x & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    hi = (x >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    x = tl.reshape(pin(tl.reshape(tl.join(lo, hi), [32])), [4, 4, 2])
    return tl.reshape(tl.permute(x, (1, 0, 2)), [32])


@triton.jit
def scores(q, page, scale, start, PLANES: tl.constexpr, ASM: tl.constexpr):
    """start + [32 tokens, G heads] logits times 2**-16 / head factor. q: eight [G, CB]; page: of load_page; scale [8 * CB]."""
    G: tl.constexpr = q[0].shape[0]
    s = split8(tl.broadcast_to(scale[None, :], [G, scale.shape[0]]))
    qs = ()
    for f in tl.static_range(8):
        qs = qs + (tl.trans(mul2(q[f], s[f], ASM)),)
    if PLANES == 4:
        fine = fields(page[2], page[3], 2, ASM)
        res = tl.zeros([32, G], tl.float32)
        for f in tl.static_range(8):
            res = tl.dot(fine[f], qs[f], res)
        start += res * 0.0625
    code = fields(page[0], page[1 if PLANES > 1 else 0], 2 if PLANES > 1 else 1, ASM)
    for f in tl.static_range(8):
        start = tl.dot(code[f], qs[f], start)
    return start


@triton.jit
def weigh(p, page, scale, offset, sums, K_PLANES: tl.constexpr, PLANES: tl.constexpr, ASM: tl.constexpr):
    """Adds a page. p [32, G] fp16; scale, offset [32]; sums: eight [CB, G] of p * scale * code, and one [16, G] with the sum of p in
    rows 0 to 7 and that of p * offset in rows 8 to 15."""
    p = transpose8(p, ASM)
    ps = tl.trans(mul2(p, tl.broadcast_to(scale[None, :], [p.shape[0], 32]), ASM))
    acc = sums
    if PLANES == 4:
        fine = fields(page[K_PLANES + 2], page[K_PLANES + 3], 2, ASM)
        pr = mul2(ps, tl.full(ps.shape, 0.0625, tl.float16), ASM)
        acc = ()
        for f in tl.static_range(8):
            acc = acc + (tl.dot(fine[f], pr, sums[f]),)
    code = fields(page[K_PLANES], page[K_PLANES + 1 if PLANES > 1 else K_PLANES], 2 if PLANES > 1 else 1, ASM)
    out = ()
    for f in tl.static_range(8):
        out = out + (tl.dot(code[f], ps, acc[f]),)
    return out + (
        tl.dot(tl.full([16, 32], 1.0, tl.float16), tl.trans(p), sums[8]),
        tl.dot(tl.broadcast_to(offset[None, :], [16, 32]), tl.trans(p), sums[9]),
    )


@triton.jit
def keep(s, live):
    """-inf where a token's bit is cleared. s [32, G], live a scalar of 32 bits."""
    bit = (live >> tl.arange(0, 32)) & 1
    return tl.where((bit != 0)[:, None], s, -float("inf"))


# ---- a run of pages -----------------------------------------------------------------------------------------------------------


@triton.jit
def load_q(q_ptr, group, qk_scale, f, C: tl.constexpr, CB: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    """Channels of field f, float32 [16, CB] in units of log2 e / sqrt(D) and the like; 0 past the group."""
    offs_g = tl.arange(0, 16)
    offs_c = tl.arange(0, CB)
    ok = (offs_g < group)[:, None] & (offs_c < C)[None, :]
    return tl.load(q_ptr + offs_g[:, None] * D + f * C + offs_c[None, :], mask=ok, other=0.0).to(tl.float32) * qk_scale


@triton.jit
def attend_planes(q_ptr, arena_ptr, frames_ptr, live_ptr, part_ptr, stat_ptr, lo, hi, group, qk_scale, stride_frame, stride_live,
                  K_PLANES: tl.constexpr, V_PLANES: tl.constexpr, LIVE: tl.constexpr, G: tl.constexpr,
                  D: tl.constexpr, CB: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Pages [lo, hi) of planes of one sequence and KV head, two a step."""
    C: tl.constexpr = D // 8
    N: tl.constexpr = K_PLANES + V_PLANES
    offs_16 = tl.arange(0, 16)
    offs_c = tl.arange(0, CB)
    offs_g = tl.arange(0, G)
    # q is held relative to its head's largest element, rounded up to a power of two
    peak = tl.zeros([16], tl.float32)
    for f in tl.static_range(8):
        peak = tl.maximum(peak, tl.max(tl.abs(load_q(q_ptr, group, qk_scale, f, C, CB, G, D)), 1))
    factor = tl.exp2(tl.ceil(tl.log2(tl.maximum(peak, 1e-30))))
    # a product with the identity puts q into the layout of an accumulator, which is that of an operand once it is transposed
    # (arithmetic, not tl.where: a condition upstream of a product makes the compiler choose layouts for 1-bit operands)
    eye = (1 - tl.minimum(tl.abs(offs_c[:, None] - offs_c[None, :]), 1)).to(tl.float16)
    q = ()
    for f in tl.static_range(8):
        x = load_q(q_ptr, group, qk_scale, f, C, CB, G, D) * ((64.0 * 256.0 / weight(f)) / factor)[:, None]
        q = q + (top(tl.dot(x.to(tl.float16), eye).to(tl.float16), G),)
    unit = (
        tl.max(factor[:, None] * (1 - tl.minimum(tl.abs(offs_16[:, None] - offs_g[None, :]), 1)), 0) * 65536.0
    )  # [G]: base-2 logits of one unit of `scores`
    weights = weight_of(tl.arange(0, 16 * CB) // 2 % (2 * CB) // (CB // 4))
    m = tl.full([G], -1e30, tl.float32)
    sums = ()
    for f in tl.static_range(8):
        sums = sums + (tl.zeros([CB, G], tl.float32),)
    sums = sums + (tl.zeros([16, G], tl.float32), tl.zeros([16, G], tl.float32))
    AT: tl.constexpr = K_PLANES + V_PLANES
    # frames are looked up one step before they are read
    ids = frame_ids(frames_ptr + lo * N, N)
    ids2 = frame_ids(frames_ptr + tl.minimum(lo + 1, hi - 1) * N, N)
    for i in range(lo, hi, 2):
        page = load_page(arena_ptr, ids, stride_frame, K_PLANES, V_PLANES, D, CB)
        page2 = load_page(arena_ptr, ids2, stride_frame, K_PLANES, V_PLANES, D, CB)
        ids = frame_ids(frames_ptr + tl.minimum(i + 2, hi - 1) * N, N)
        ids2 = frame_ids(frames_ptr + tl.minimum(i + 3, hi - 1) * N, N)
        scale, offset = k_metadata(page[AT], page2[AT], weights, K_PLANES, ASM)
        scale, scale2 = tl.split(scale)
        z = split8(halves(offset))
        start = tl.zeros([16, G], tl.float32)
        for f in tl.static_range(8):
            start = tl.dot(z[f], tl.trans(q[f]), start)
        start *= 1.1920928955078125e-07  # 2**-23
        s = scores(q, page, scale, eight_rows(start, False), K_PLANES, ASM)
        s2 = scores(q, page2, scale2, eight_rows(start, True), K_PLANES, ASM)
        if LIVE:
            s = keep(s, tl.load(live_ptr + i * stride_live))
            s2 = keep(s2, tl.where(i + 1 < hi, tl.load(live_ptr + tl.minimum(i + 1, hi - 1) * stride_live), 0))
        else:
            s2 += tl.where(i + 1 < hi, 0.0, -float("inf"))
        m_new = tl.maximum(m, tl.max(tl.maximum(s, s2), 0) * unit)
        alpha = tl.exp2(m - m_new)
        m = m_new
        base = (-m_new + P_BITS)[None, :]
        out = ()
        for f in tl.static_range(10):
            out = out + (sums[f] * alpha[None, :],)
        scale, offset = v_metadata(page[AT + 1], V_PLANES, ASM)
        scale2, offset2 = v_metadata(page2[AT + 1], V_PLANES, ASM)
        p = tl.exp2(s * unit[None, :] + base).to(tl.float16)
        sums = weigh(p, page, scale, offset, out, K_PLANES, V_PLANES, ASM)
        p = tl.exp2(s2 * unit[None, :] + base).to(tl.float16)
        sums = weigh(p, page2, scale2, offset2, sums, K_PLANES, V_PLANES, ASM)
    total = tl.max(sums[8], 0)
    shift = tl.max(sums[9], 0)
    ok = (offs_c < C)[:, None] & (offs_g < group)[None, :]
    for f in tl.static_range(8):
        # 8: the unit of V's scales
        x = sums[f] * (8.0 * 16777216.0 / weight(f)) + shift[None, :] * 8.0
        tl.store(part_ptr + offs_g[None, :] * D + f * C + offs_c[:, None], x, mask=ok)
    tl.store(stat_ptr + offs_g, m, mask=offs_g < group)
    tl.store(stat_ptr + 16 + offs_g, total, mask=offs_g < group)


@triton.jit
def dense_ids(row_ptr, chunk, ok, CHUNKS: tl.constexpr):
    """Frames of a dense page's 16-byte chunks, CHUNKS to a frame."""
    return tl.load(row_ptr + chunk // CHUNKS, mask=ok, other=0)


@triton.jit
def dense_tile(arena_ptr, ids, chunk, ok, stride_frame, CHUNKS: tl.constexpr, DB: tl.constexpr):
    """[32, DB] 16-bit numbers of a dense page; 0 where not ok [32, DB / 8]."""
    at = arena_ptr + (ids.to(tl.int64) * stride_frame + chunk % CHUNKS * 8)
    at = at[:, :, None] + tl.arange(0, 8)[None, None, :]
    return tl.reshape(tl.load(at, mask=ok[:, :, None] & (tl.arange(0, 8) >= 0)[None, None, :], other=0.0), [32, DB])


@triton.jit
def attend_dense(q_ptr, arena_ptr, frames_ptr, live_ptr, part_ptr, stat_ptr, lo, hi, group, qk_scale, stride_frame, stride_live,
                 N: tl.constexpr, CHUNKS: tl.constexpr, LIVE: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DB: tl.constexpr,
                 ASM: tl.constexpr):  # fmt: skip
    """Pages [lo, hi) in floating point of one sequence and KV head. arena_ptr points to numbers of the pages' type."""
    offs_g = tl.arange(0, G)
    offs_d = tl.arange(0, DB)
    offs_t = tl.arange(0, 32)
    q = tl.load(q_ptr + offs_g[None, :] * D + offs_d[:, None], mask=(offs_d < D)[:, None] & (offs_g < group)[None, :], other=0.0)
    q = q.to(arena_ptr.dtype.element_ty)
    m = tl.full([G], -1e30, tl.float32)
    total = tl.zeros([G], tl.float32)
    acc = tl.zeros([DB, G], tl.float32)
    chunk = offs_t[:, None] * (D // 8) + tl.arange(0, DB // 8)[None, :]
    inside = (tl.arange(0, DB // 8) < D // 8)[None, :] & (offs_t >= 0)[:, None]
    # frames and live masks are looked up one page before they are needed
    k_ids = dense_ids(frames_ptr + lo * N, chunk, inside, CHUNKS)
    v_ids = dense_ids(frames_ptr + lo * N, chunk + 4 * D, inside, CHUNKS)
    live = 0
    if LIVE:
        live = tl.load(live_ptr + lo * stride_live)
    # two stages: with three, the buffers would keep the eighth program off a multiprocessor
    for i in tl.range(lo, hi, num_stages=2):
        ok = inside
        if LIVE:
            # a token that was never written may hold NaN
            ok = inside & (((live >> offs_t) & 1) != 0)[:, None]
        k = dense_tile(arena_ptr, k_ids, chunk, ok, stride_frame, CHUNKS, DB)
        v = dense_tile(arena_ptr, v_ids, chunk + 4 * D, ok, stride_frame, CHUNKS, DB)
        s = tl.dot(k, q) * qk_scale
        if LIVE:
            s = keep(s, live)
        j = tl.minimum(i + 1, hi - 1)
        k_ids = dense_ids(frames_ptr + j * N, chunk, inside, CHUNKS)
        v_ids = dense_ids(frames_ptr + j * N, chunk + 4 * D, inside, CHUNKS)
        if LIVE:
            live = tl.load(live_ptr + j * stride_live)
        m_new = tl.maximum(m, tl.max(s, 0))
        alpha = tl.exp2(m - m_new)
        m = m_new
        p = tl.exp2(s - m[None, :] + P_BITS)
        total = total * alpha + tl.sum(p, 0)
        p = tl.trans(transpose8(p.to(v.dtype), ASM))
        acc = tl.dot(tl.trans(v), p, acc * alpha[None, :])
    ok = (offs_d < D)[:, None] & (offs_g < group)[None, :]
    tl.store(part_ptr + offs_g[None, :] * D + offs_d[:, None], acc, mask=ok)
    tl.store(stat_ptr + offs_g, m, mask=offs_g < group)
    tl.store(stat_ptr + 16 + offs_g, total, mask=offs_g < group)
