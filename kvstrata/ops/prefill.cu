// Causal attention of a prompt over itself: 8-bit codes of most keys, 16 bits of vertical lines and of the newest, one online softmax.
//
// A program takes 128 tokens of one query head: two consumer warp groups of 64 rows each, and a producer warp group that brings tiles of
// 32 KB into a ring: codes of 128 keys (K as rows of keys, V as rows of channels), or 64 whole keys. The body's products of codes are
// summed tile by tile in fp32, for the matrix units add 8-bit products with some 14 bits only.
// Compiled with -DINT8=0 or 1: codes of Q and K are int8 or e4m3; V's and the probabilities' are e4m3. head_dim 128, bf16.
#include "ptx.cuh"
#include "extend_mma.cuh"
#include "prefill_mma.cuh"
#include "prefill_load.cuh"

constexpr int CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;
constexpr float NEGATIVE = -1e30f;
// log2 448: the largest probability becomes e4m3's largest number
constexpr float HEADROOM = 8.807354922f;
// An integer x added to these bits is the float 1.5 * 2**23 + x: the products of codes need no conversion.
constexpr float MAGIC = INT8 ? 12582912.0f : 0.0f;
constexpr int MAGIC_BITS = 0x4B400000;

// A thread's two rows, r and r + 8 of its warp's 16: o as matrix units leave it, in units of `unit`; m base 2.
struct Rows {
    float o[64], m[2], total[2], unit;
};

template <bool> struct ScoreOf { using type = float; };
template <> struct ScoreOf<true> { using type = int; };
using Score = ScoreOf<INT8>::type;  // what matrix units leave of products of codes

DEVICE float bits(int x) { return __int_as_float(x); }
DEVICE float bits(float x) { return x; }
DEVICE void assign(int& x, float y) { x = __float_as_int(y); }
DEVICE void assign(float& x, float y) { x = y; }

DEVICE float load_float(u32 at) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
    return x;
}

DEVICE float4 load_scales(u32 at) {
    const uint4 x = load16(at);
    return make_float4(__int_as_float(x.x), __int_as_float(x.y), 0, 0);
}

// S = Q K' of codes, not waited for.
template <class S>
DEVICE void code_scores(S (&s)[64], u32 q, u32 k) {
    if constexpr (INT8)
#pragma unroll
        for (int i = 0; i < 64; i++) s[i] = MAGIC_BITS;
    wgmma_fence();
    const u64 a = describe_k_major(q), b = describe_k_major(k);
#pragma unroll
    for (int i = 0; i < D / 32; i++) wgmma_codes(s, a + 2 * i, b + 2 * i, i > 0);
    wgmma_commit();
}

DEVICE void code_sums(float (&sums)[64], const u32 (&p)[16], u32 v) {
    const u64 b = describe_k_major(v);
#pragma unroll
    for (int i = 0; i < KEYS / 32; i++) wgmma_values(sums, p + 4 * i, b + 2 * i, i > 0);
    wgmma_commit();
}

DEVICE void whole_scores(float (&s)[32], u32 q, u32 k) {
    const u64 a = describe_k_major(q), b = describe_k_major(k);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; i++) wgmma_whole(s, a + (i / 4 * PANEL + i % 4 * 32) / 16, b + (i / 4 * PANEL + i % 4 * 32) / 16, i > 0);
    wgmma_commit();
}

DEVICE void whole_sums(float (&o)[64], const u32 (&p)[16], u32 v) {
    const u64 b = describe_n_major(v, PANEL);
#pragma unroll
    for (int i = 0; i < WHOLE_KEYS / 16; i++) wgmma_rs<true, true>(o, p + 4 * i, b + i * 2048 / 16);
    wgmma_commit();
}

// Raw scores become probabilities, scaled by 2**HEADROOM; a raw score less `zero`, times factor, is a logit base 2. Returns what earlier
// sums are worth now.
template <int N, class S>
DEVICE float2 softmax(S (&s)[N], Rows& rows, float2 factor, float zero) {
    float alpha[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float f = r ? factor.y : factor.x;
        float m = bits(s[2 * r]);
#pragma unroll
        for (int j = 0; j < N / 4; j++) m = fmaxf(m, fmaxf(bits(s[4 * j + 2 * r]), bits(s[4 * j + 2 * r + 1])));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
        m = fmaxf((m - zero) * f, rows.m[r]);
        alpha[r] = exp2_fast(rows.m[r] - m);
        rows.m[r] = m;
        const float shift = fmaf(-zero, f, HEADROOM - m);
        float sum = 0;
#pragma unroll
        for (int j = 0; j < N / 4; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float x = exp2_fast(fmaf(bits(s[4 * j + 2 * r + e]), f, shift));
                sum += x;
                assign(s[4 * j + 2 * r + e], x);
            }
        rows.total[r] = rows.total[r] * alpha[r] + sum;
    }
    return make_float2(alpha[0], alpha[1]);
}

// Keys from `left` on do not exist.
template <class S>
DEVICE void cut(S (&s)[64], int left, int lane) {
    if (left >= KEYS) return;
#pragma unroll
    for (int i = 0; i < 64; i++)
        if (i / 4 * 8 + i % 2 + lane % 4 * 2 >= left) assign(s[i], -__int_as_float(0x7F800000));
}

template <class S>
DEVICE void code_operand(u32 (&p)[16], const S (&s)[64]) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int at = i / 4 * 16 + i / 2 % 2 * 8 + i % 2 * 2;
        p[i] = four_fp8(bits(s[at]), bits(s[at + 1]), bits(s[at + 4]), bits(s[at + 5]));
    }
}

DEVICE void add_sums(float (&o)[64], float2 alpha, const float (&sums)[64]) {
#pragma unroll
    for (int i = 0; i < 64; i++) o[i] = fmaf(o[i], i / 2 % 2 ? alpha.y : alpha.x, sums[i]);
}

DEVICE float2 operator*(float2 a, float b) { return make_float2(a.x * b, a.y * b); }

// `count` keys in tiles of codes: the scores of one are computed beside the sums over the one before. factor: of the rows, without K's.
DEVICE void walk_codes(Rows& rows, const Shared& shared, int& i, int count, u32 q, float2 factor, int lane) {
    if (count == 0) return;
    Score s[64];
    u32 p[16];
    float sums[64];
    barrier_wait(shared.full(i), shared.parity(i));
    code_scores(s, q, shared.tile(i));
    float4 scale = load_scales(shared.scales(i));
    wgmma_wait<0>();
    pin(s);
    cut(s, count, lane);
    // nothing is summed yet
    softmax(s, rows, factor * scale.x, MAGIC);
    float2 alpha = make_float2(0, 0);
    rows.unit = scale.y;
    code_operand(p, s);
#pragma unroll 1
    for (count -= KEYS; count > 0; count -= KEYS, i++) {
        barrier_wait(shared.full(i + 1), shared.parity(i + 1));
        code_scores(s, q, shared.tile(i + 1));
        code_sums(sums, p, shared.tile(i) + HALF);
        scale = load_scales(shared.scales(i + 1));
        wgmma_wait<1>();
        pin(s);
        cut(s, count, lane);
        const float2 next = softmax(s, rows, factor * scale.x, MAGIC);
        wgmma_wait<0>();
        pin(sums);
        if (lane == 0) barrier_arrive(shared.free(i));
        add_sums(rows.o, alpha, sums);
        alpha = next * __fdividef(rows.unit, scale.y);
        rows.unit = scale.y;
        code_operand(p, s);
    }
    wgmma_fence();
    code_sums(sums, p, shared.tile(i) + HALF);
    wgmma_wait<0>();
    pin(sums);
    if (lane == 0) barrier_arrive(shared.free(i));
    i++;
    add_sums(rows.o, alpha, sums);
}

// Lines, then the window. Limits of a tile's keys: lines end at `lines`; key `first` + n of the window is seen from row `first` + n on.
struct Limits {
    int lines, tiles_of_lines, seen;  // seen: keys of the window that the thread's first row sees
};

DEVICE void cut_whole(float (&s)[32], const Limits& limits, int tile, int lane) {
    const bool recent = tile >= limits.tiles_of_lines;
    const int left = recent ? limits.seen - (tile - limits.tiles_of_lines) * WHOLE_KEYS : limits.lines - tile * WHOLE_KEYS;
    if (__all_sync(~0u, left >= WHOLE_KEYS)) return;
#pragma unroll
    for (int i = 0; i < 32; i++)
        if (i / 4 * 8 + i % 2 + lane % 4 * 2 >= left + (recent ? i / 2 % 2 * 8 : 0)) s[i] = -__int_as_float(0x7F800000);
}

DEVICE void whole_operand(u32 (&p)[16], const float (&s)[32]) {
#pragma unroll
    for (int i = 0; i < 16; i++) p[i] = pair<true>(s[2 * i], s[2 * i + 1]);
}

DEVICE void rescale(float (&o)[64], float2 alpha) {
#pragma unroll
    for (int i = 0; i < 64; i++) o[i] *= i / 2 % 2 ? alpha.y : alpha.x;
}

DEVICE void walk_whole(Rows& rows, const Shared& shared, int& i, int tiles, u32 q, float scale, const Limits& limits, int lane) {
    float s[32];
    u32 p[16];
    const float2 factor = make_float2(scale, scale);
    barrier_wait(shared.full(i), shared.parity(i));
    whole_scores(s, q, shared.tile(i));
    wgmma_wait<0>();
    pin(s);
    cut_whole(s, limits, 0, lane);
    // sums so far lose their unit with the first factor
    rescale(rows.o, softmax(s, rows, factor, 0.0f) * rows.unit);
    whole_operand(p, s);
#pragma unroll 1
    for (int tile = 1; tile < tiles; tile++, i++) {
        barrier_wait(shared.full(i + 1), shared.parity(i + 1));
        whole_scores(s, q, shared.tile(i + 1));
        wgmma_fence();
        whole_sums(rows.o, p, shared.tile(i) + HALF);
        wgmma_wait<1>();
        pin(s);
        cut_whole(s, limits, tile, lane);
        const float2 alpha = softmax(s, rows, factor, 0.0f);
        wgmma_wait<0>();
        pin(rows.o);
        if (lane == 0) barrier_arrive(shared.free(i));
        if (__any_sync(~0u, alpha.x != 1.0f || alpha.y != 1.0f)) rescale(rows.o, alpha);
        whole_operand(p, s);
    }
    wgmma_fence();
    whole_sums(rows.o, p, shared.tile(i) + HALF);
    wgmma_wait<0>();
    pin(rows.o);
    if (lane == 0) barrier_arrive(shared.free(i));
    i++;
}

// grid query tiles * query heads, 384 threads; KV heads one after another, the longest tiles of each first. q, out bf16 [T, Hq, D], k, v
// bf16 [T, H, D], strides in elements; the rest as `pack` wrote it; scale: of the softmax, times log2 e.
extern "C" __global__ void __launch_bounds__(384, 1)
prefill(const char* q, const char* k, const char* v, const float* mean, const char* codes, const float4* scales, const char* whole,
        const int* before, char* out, int tokens, int body_tiles, int line_tiles, int query_tiles, int window, int group, float scale,
        int stride_qt, int stride_kt, int stride_kh, int stride_vt, int stride_vh) {
    extern __shared__ char memory[];
    const Shared shared{(shared_address(memory) + 1023) & ~1023u};
    const int member = blockIdx.x % group, tile = query_tiles - 1 - blockIdx.x / group % query_tiles, head = blockIdx.x / group / query_tiles;
    const int lane = threadIdx.x % 32, warp_group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
    const int first_row = tile * ROWS, end = min(tokens, first_row + ROWS), first_key = max(0, first_row - window);
    const int lines = __ldg(before + u64(head) * query_tiles + tile), body = first_key - lines;
    const int tiles_of_lines = (lines + WHOLE_KEYS - 1) / WHOLE_KEYS, tiles_of_window = (end - first_key + WHOLE_KEYS - 1) / WHOLE_KEYS;

    if (threadIdx.x == 0)
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.full(i), 4);
            barrier_init(shared.free(i), 8);
        }
    fence_async();
    __syncthreads();

    int i = 0;
    if (warp_group == 0) {
        fewer_registers<PRODUCER_REGISTERS>();
        produce_tiles(shared, i, codes + u64(head) * body_tiles * TILE, scales + u64(head) * body_tiles, (body + KEYS - 1) / KEYS, warp, lane);
        produce_tiles(shared, i, whole + u64(head) * line_tiles * TILE, nullptr, tiles_of_lines, warp, lane);
        produce_rows(shared, i, k + u64(head) * stride_kh * 2, v + u64(head) * stride_vh * 2, u64(stride_kt) * 2, u64(stride_vt) * 2,
                     first_key, end, warp, lane);
    } else {
        more_registers<CONSUMER_REGISTERS>();
        const int own = warp_group - 1, own_first = first_row + own * GROUP_ROWS, query_head = head * group + member;
        load_q(shared, own, q + (u64(own_first) * stride_qt + query_head * D) * 2, u64(stride_qt) * 2, tokens - own_first,
               mean ? mean + head * D : nullptr);
        const int row = warp * 16 + lane / 4;
        Rows rows;
#pragma unroll
        for (int j = 0; j < 64; j++) rows.o[j] = 0;
        rows.m[0] = rows.m[1] = NEGATIVE;
        rows.total[0] = rows.total[1] = 0;
        rows.unit = 1;
        const u32 own_rows = shared.rows(own) + row * 8;
        walk_codes(rows, shared, i, body, shared.q_codes(own), make_float2(load_float(own_rows), load_float(own_rows + 64)) * scale, lane);
        // the mean's share of each row's logits is back for what is whole
        rows.m[0] += load_float(own_rows + 4) * scale;
        rows.m[1] += load_float(own_rows + 68) * scale;
        const Limits limits{lines, tiles_of_lines, own_first + row - first_key + 1};
        // the first group's rows end before the tile's last keys
        const int seen_tiles = min(tiles_of_window, (own_first + GROUP_ROWS - first_key + WHOLE_KEYS - 1) / WHOLE_KEYS);
        walk_whole(rows, shared, i, tiles_of_lines + seen_tiles, shared.q(own), scale, limits, lane);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float total = rows.total[r];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            const float weight = reciprocal(total);
            if (own_first + row + 8 * r >= tokens) continue;
            u32* to = reinterpret_cast<u32*>(out + ((u64(own_first) + row + 8 * r) * (gridDim.x / query_tiles) + query_head) * (D * 2)) + lane % 4;
#pragma unroll
            for (int j = 0; j < D / 8; j++) to[4 * j] = pair<true>(rows.o[4 * j + 2 * r] * weight, rows.o[4 * j + 2 * r + 1] * weight);
        }
    }
}
