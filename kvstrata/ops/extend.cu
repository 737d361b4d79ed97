// Attention of a chunk of new tokens over stored pages and, causally, over the chunk itself, in one launch.
//
// A program takes 128 rows (new tokens times the query heads of one KV head) of one sequence: two consumer warp groups of 64 rows each,
// and a producer warp group that turns pages into fp16 tiles of 128 keys in shared memory, two tiles ahead. Consumers see tiles only:
// dense pages, then planes, tier by tier, then one Hadamard transform of the sum in registers, then the chunk.
// Compiled with -DD=64 or 128 (head_dim) and -DBF16=0 or 1 (type of q, k, v, out and dense pages; planes are always fp16).
#include "ptx.cuh"
#include "extend_mma.cuh"
#include "extend_pages.cuh"

// a thread; two groups of consumers and one of producers share 65,536. Fewer spill, and no other split of them was faster.
constexpr int CONSUMER_REGISTERS = 192, PRODUCER_REGISTERS = 120;
constexpr int ROWS = 128, GROUP_ROWS = 64;
constexpr int Q_PANEL = GROUP_ROWS * 128;  // bytes of 64 channels of a warp group's rows
constexpr float NEGATIVE = -1e30f;
// probabilities times 2**14 stay normal in fp16
constexpr float HEADROOM = 14.0f;

// What a thread keeps of its two rows, r and r + 8 of its warp's 16: columns 8 * j + 2 * (lane % 4) + {0, 1} in o[4 * j + {0, 1}] and
// o[4 * j + {2, 3}].
struct Rows {
    float o[D / 2], m[2], total[2];
};

// Keys of the chunk that a thread's rows may see, and the first row of its warp.
struct Limits {
    int own[2], first;
};

// Read again where it is needed: kept, it would cost a register all through the loops.
DEVICE int lane_id() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// S = Q K' of 64 rows and a tile, not waited for.
template <bool BF>
DEVICE void scores(float (&s)[64], u32 q, u32 k) {
    const u64 a = describe_k_major(q), b = describe_k_major(k);
#pragma unroll
    for (int i = 0; i < D / 16; i++)
        wgmma_ss<BF>(s, a + (i / 4 * Q_PANEL + i % 4 * 32) / 16, b + (i / 4 * PANEL + i % 4 * 32) / 16, i > 0);
    wgmma_commit();
}

// O += P V, not waited for. KEY_ROWS: rows of the tile are keys (numbers as they were), else channels (planes).
template <bool BF, bool KEY_ROWS>
DEVICE void accumulate(float (&o)[D / 2], const u32 (&p)[32], u32 v) {
    const u64 b = KEY_ROWS ? describe_n_major(v, PANEL) : describe_k_major(v);
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        wgmma_rs<BF, KEY_ROWS>(o, p + 4 * i, b + (KEY_ROWS ? i * 2048 : i / 4 * V_PANEL + i % 4 * 32) / 16);
    wgmma_commit();
}

// Scores of dead tokens and, in the chunk, of the future become -inf; nearly all tiles have none. `seen`: keys of the chunk before this
// tile.
template <bool CHUNK>
DEVICE void mask(float (&s)[64], u32 alive_at, const Limits& limits, int seen, int lane) {
    const uint4 alive = load16(alive_at);
    if ((alive.x & alive.y & alive.z & alive.w) == ~0u && (!CHUNK || limits.first - seen >= KEYS)) return;
    const u32 words[4] = {alive.x >> (lane % 4 * 2), alive.y >> (lane % 4 * 2), alive.z >> (lane % 4 * 2), alive.w >> (lane % 4 * 2)};
#pragma unroll
    for (int i = 0; i < 64; i++) {
        const int key = i / 4 * 8 + i % 2;
        bool lives = words[i / 16] >> (key % 32) & 1;
        if constexpr (CHUNK) lives = lives && key < limits.own[i / 2 % 2] - seen - lane % 4 * 2;
        if (!lives) s[i] = -__int_as_float(0x7F800000);
    }
}

// Scores become probabilities; returns what earlier sums are worth now.
DEVICE float2 softmax(float (&s)[64], Rows& rows, float scale) {
    float alpha[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float m = rows.m[r];
#pragma unroll
        for (int j = 0; j < 16; j++) m = fmaxf(m, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
        alpha[r] = exp2_fast((rows.m[r] - m) * scale);
        rows.m[r] = m;
        const float shift = HEADROOM - m * scale;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < 16; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float& x = s[4 * j + 2 * r + e];
                x = exp2_fast(fmaf(x, scale, shift));
                sum += x;
            }
        rows.total[r] = rows.total[r] * alpha[r] + sum;
    }
    return make_float2(alpha[0], alpha[1]);
}

DEVICE void rescale(float (&o)[D / 2], float2 alpha) {
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[i] *= i / 2 % 2 ? alpha.y : alpha.x;
}

template <bool BF>
DEVICE void operand(u32 (&p)[32], const float (&s)[64]) {
#pragma unroll
    for (int i = 0; i < 32; i++) p[i] = pair<BF>(s[2 * i], s[2 * i + 1]);
}

// `tiles` tiles from the ring: the scores of one are computed beside the sum over the one before.
template <bool BF, bool KEY_ROWS, bool CHUNK>
DEVICE void walk(Rows& rows, const Ring& ring, int& i, int tiles, u32 q, float scale, const Limits& limits, int seen, int lane) {
    if (tiles == 0) return;
    float s[64];
    u32 p[32];
    barrier_wait(ring.k_full(i), ring.parity(i));
    wgmma_fence();
    scores<BF>(s, q, ring.k(i));
    wgmma_wait<0>();
    pin(s);
    mask<CHUNK>(s, ring.alive(i), limits, seen, lane);
    if (lane == 0) barrier_arrive(ring.k_free(i));
    rescale(rows.o, softmax(s, rows, scale));
    operand<BF>(p, s);
#pragma unroll 1
    for (int end = i + tiles - 1; i < end; i++) {
        seen += KEYS;
        barrier_wait(ring.k_full(i + 1), ring.parity(i + 1));
        wgmma_fence();
        scores<BF>(s, q, ring.k(i + 1));
        barrier_wait(ring.v_full(i), ring.parity(i));
        wgmma_fence();
        accumulate<BF, KEY_ROWS>(rows.o, p, ring.v(i));
        wgmma_wait<1>();
        pin(s);
        mask<CHUNK>(s, ring.alive(i + 1), limits, seen, lane);
        if (lane == 0) barrier_arrive(ring.k_free(i + 1));
        const float2 alpha = softmax(s, rows, scale);
        wgmma_wait<0>();
        pin(rows.o);
        if (lane == 0) barrier_arrive(ring.v_free(i));
        // late in a long walk the largest score seldom changes
        if (__any_sync(~0u, alpha.x != 1.0f || alpha.y != 1.0f)) rescale(rows.o, alpha);
        operand<BF>(p, s);
    }
    barrier_wait(ring.v_full(i), ring.parity(i));
    wgmma_fence();
    accumulate<BF, KEY_ROWS>(rows.o, p, ring.v(i));
    wgmma_wait<0>();
    pin(rows.o);
    if (lane == 0) barrier_arrive(ring.v_free(i));
    i++;
}

// 64 rows of q to shared memory, as fp16 if the products are (planes).
template <bool TO_FP16>
DEVICE void load_q(u32 to, const char* q, u64 stride, int group, int first, int rows_left, int barrier) {
    group_sync(barrier);  // nobody reads the last ones any more
#pragma unroll 2
    for (int n = threadIdx.x % 128; n < GROUP_ROWS * C; n += 128) {
        const int row = n / C, chunk = n % C;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (row < rows_left) {
            const int token = (first + row) / group, head = (first + row) % group;
            x = __ldg(reinterpret_cast<const uint4*>(q + (token * stride + head * D) * 2) + chunk);
        }
        if constexpr (TO_FP16) {
            u32* w = &x.x;
#pragma unroll
            for (int j = 0; j < 4; j++) w[j] = pair<false>(__int_as_float(w[j] << 16), __int_as_float(w[j] & 0xFFFF0000));
        }
        store16(to + chunk / 8 * Q_PANEL + row * 128 + ((chunk % 8) ^ (row % 8)) * 16, x.x, x.y, x.z, x.w);
    }
    fence_async();
    group_sync(barrier);
}

// The Hadamard transform of a thread's two rows over D channels: bits 1 and 2 of a channel are the lane's.
DEVICE void rotate(float (&o)[D / 2], int lane) {
    const float norm = D == 128 ? 0.08838834764831845f : 0.125f;
#pragma unroll
    for (int bit = 1; bit <= D / 16; bit *= 2)  // bits of j, channel 8 * j + ...
#pragma unroll
        for (int i = 0; i < D / 2; i++)
            if ((i / 4 & bit) == 0) {
                const float a = o[i], b = o[i + 4 * bit];
                o[i] = a + b;
                o[i + 4 * bit] = a - b;
            }
#pragma unroll
    for (int i = 0; i < D / 2; i += 2) {
        const float a = o[i], b = o[i + 1];
        o[i] = (a + b) * norm;
        o[i + 1] = (a - b) * norm;
    }
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
        for (int i = 0; i < D / 2; i++) {
            const float other = __shfl_xor_sync(~0u, o[i], bit);
            o[i] = lane & bit ? other - o[i] : other + o[i];
        }
}

// The part [lo, hi) of a line of tiles that is this program's: `at` is where a section of the line begins, and is moved to its end.
struct Part {
    int lo, hi, at;
    DEVICE int2 take(int tiles) {
        const int2 own = make_int2(min(max(lo - at, 0), tiles), min(max(hi - at, 0), tiles));
        at += tiles;
        return own;
    }
};

DEVICE Pages pages_of(const int* frames, const int* counts, const int* live, int rows, int heads, int per_page, int sequence, int head,
                      Part& part) {
    Pages p{nullptr, nullptr, 0, heads, 0, 0};
    if (rows == 0) return p;
    const u64 row = u64(sequence) * rows;
    p.frames = frames + row * per_page;
    p.live = heads ? live + row * heads + head % heads : nullptr;
    p.count = __ldg(counts + sequence);
    const int2 own = part.take((p.count + 3) / 4);
    p.begin = own.x;
    p.end = own.y;
    return p;
}

DEVICE int tiles_of(int rows, const int* counts, int sequence) { return rows ? (__ldg(counts + sequence) + 3) / 4 : 0; }

#define PAGES(T, PER_PAGE) pages_of(frames##T, counts##T, live##T, rows##T, heads##T, PER_PAGE, sequence, head, part)

// grid tiles * splits * KV heads (the last varies fastest), 384 threads. q, out [N, Hq, D]; k, v [N, H, D]; tiles int32 [.., 4]: sequence,
// first row of q of the sequence, its tokens, first row (token * group + head) of the tile. Strides in elements, of the arena in bytes.
// framesT int32 [B, rowsT, n] and countsT int32 [B] of tier T (rowsT 0: none), liveT int32 [B, rowsT, headsT] (headsT 0: all live). Each of
// `splits` programs attends its share of a tile's keys; more than one write parts float32 [splits, N, Hq, D] and lses [splits, N, Hq]
// (base 2) instead of out.
extern "C" __global__ void __launch_bounds__(384, 1)
extend(const char* q, const char* k, const char* v, char* out, float* parts, float* lses, const int4* tiles, const char* arena,
       const int* frames16, const int* counts16, const int* live16, int rows16, int heads16,
       const int* frames8, const int* counts8, const int* live8, int rows8, int heads8,
       const int* frames4, const int* counts4, const int* live4, int rows4, int heads4,
       const int* frames3, const int* counts3, const int* live3, int rows3, int heads3,
       const int* frames2, const int* counts2, const int* live2, int rows2, int heads2,
       int tokens_of_all, int splits, int heads, int group, float scale, int stride_frame, int stride_qt, int stride_kt, int stride_kh,
       int stride_vt, int stride_vh, int rotated) {
    extern __shared__ char shared[];
    const Ring ring{(shared_address(shared) + 1023) & ~1023u};
    const int head = blockIdx.x % heads, lane = threadIdx.x % 32;
    const int warp_group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
    const int split = blockIdx.x / heads % splits;
    const int4 tile = tiles[blockIdx.x / heads / splits];
    const int sequence = tile.x, tokens = tile.z, first = tile.w, rows_left = min(ROWS, tokens * group - first);
    const u64 first_row = tile.y;
    const int chunk_tiles = ((first + rows_left - 1) / group + KEYS) / KEYS;  // as far as the last row sees
    const int dense_tiles = tiles_of(rows16, counts16, sequence);
    const int plane_tiles = tiles_of(rows8, counts8, sequence) + tiles_of(rows4, counts4, sequence) + tiles_of(rows3, counts3, sequence) +
                            tiles_of(rows2, counts2, sequence);
    const int all_tiles = dense_tiles + plane_tiles + chunk_tiles;
    Part part{all_tiles * split / splits, all_tiles * (split + 1) / splits, 0};

    if (threadIdx.x == 0)
        for (int i = 0; i < STAGES; i++) {
            barrier_init(ring.k_full(i), 4);
            barrier_init(ring.v_full(i), 4);
            barrier_init(ring.k_free(i), 8);
            barrier_init(ring.v_free(i), 8);
        }
    __syncthreads();

    int i = 0;
    if (warp_group == 0) {
        fewer_registers<PRODUCER_REGISTERS>();
        const char* own = arena + u64(head) * FRAME;
        produce_dense(ring, i, PAGES(16, DENSE_FRAMES), own, stride_frame, warp, lane);
        produce_planes<4, 4>(ring, i, PAGES(8, 8), own, stride_frame, warp, lane);
        produce_planes<2, 2>(ring, i, PAGES(4, 4), own, stride_frame, warp, lane);
        produce_planes<2, 1>(ring, i, PAGES(3, 3), own, stride_frame, warp, lane);
        produce_planes<1, 1>(ring, i, PAGES(2, 2), own, stride_frame, warp, lane);
        const int2 chunk = part.take(chunk_tiles);
        produce_chunk(ring, i, chunk.x, chunk.y, tokens, k + (first_row * stride_kt + u64(head) * stride_kh) * 2,
                      v + (first_row * stride_vt + u64(head) * stride_vh) * 2, stride_kt, stride_vt, warp, lane);
    } else {
        more_registers<CONSUMER_REGISTERS>();
        const int own_first = first + (warp_group - 1) * GROUP_ROWS, own_left = rows_left - (warp_group - 1) * GROUP_ROWS;
        const u32 q_tile = ring.q() + (warp_group - 1) * HALVES * Q_PANEL;
        const char* own_q = q + (first_row * stride_qt + u64(head) * group * D) * 2;
        const int2 dense = part.take(dense_tiles), planes = part.take(plane_tiles), chunk = part.take(chunk_tiles);
        Rows rows;
#pragma unroll
        for (int j = 0; j < D / 2; j++) rows.o[j] = 0;
        rows.m[0] = rows.m[1] = NEGATIVE;
        rows.total[0] = rows.total[1] = 0;
        load_q<false>(q_tile, own_q, stride_qt, group, own_first, own_left, warp_group);
        walk<BF16, true, false>(rows, ring, i, dense.y - dense.x, q_tile, scale, Limits{}, 0, lane);
        if (planes.y > planes.x) {
            if constexpr (BF16) load_q<true>(q_tile, own_q, stride_qt, group, own_first, own_left, warp_group);
            walk<false, false, false>(rows, ring, i, planes.y - planes.x, q_tile, scale, Limits{}, 0, lane);
            if constexpr (BF16) load_q<false>(q_tile, own_q, stride_qt, group, own_first, own_left, warp_group);
        }
        if (rotated) rotate(rows.o, lane);
        const int row = warp * 16 + lane_id() / 4;
        const Limits limits{{(own_first + row) / group + 1, (own_first + row + 8) / group + 1}, (own_first + warp * 16) / group + 1};
        walk<BF16, true, true>(rows, ring, i, chunk.y - chunk.x, q_tile, scale, limits, chunk.x * KEYS, lane);

#pragma unroll
        for (int r = 0; r < 2; r++) {
            float total = rows.total[r];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            const float weight = reciprocal(fmaxf(total, 1e-30f));
            const int own_row = warp * 16 + lane_id() / 4 + 8 * r;
            if (own_row >= own_left) continue;
            const int token = (own_first + own_row) / group, query_head = head * group + (own_first + own_row) % group;
            const u64 at = (first_row + token) * heads * group + query_head;
            if (splits == 1) {
                u32* to = reinterpret_cast<u32*>(out + at * (D * 2)) + lane % 4;
#pragma unroll
                for (int j = 0; j < D / 8; j++) to[4 * j] = pair<BF16>(rows.o[4 * j + 2 * r] * weight, rows.o[4 * j + 2 * r + 1] * weight);
            } else {
                const u64 own = u64(split) * tokens_of_all * heads * group + at;
                float2* to = reinterpret_cast<float2*>(parts + own * D) + lane % 4;
#pragma unroll
                for (int j = 0; j < D / 8; j++) to[4 * j] = make_float2(rows.o[4 * j + 2 * r] * weight, rows.o[4 * j + 2 * r + 1] * weight);
                // a row that saw no key has sum 0: its part counts for nothing
                if (lane % 4 == 0) lses[own] = total > 0 ? rows.m[r] * scale + log2_fast(total) : NEGATIVE;
            }
        }
    }
}

// grid rows / 4 (rounded up), 128 threads: a warp a row of out [rows, D], from parts float32 [splits, rows, D] and lses [splits, rows].
extern "C" __global__ void __launch_bounds__(128)
merge(const float* parts, const float* lses, char* out, int rows, int splits) {
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    float m = NEGATIVE;
    for (int s = 0; s < splits; s++) m = fmaxf(m, __ldg(lses + u64(s) * rows + row));
    float sum[D / 32] = {}, total = 0;
    for (int s = 0; s < splits; s++) {
        const u64 at = u64(s) * rows + row;
        const float weight = exp2_fast(__ldg(lses + at) - m);
        total += weight;
#pragma unroll
        for (int j = 0; j < D / 64; j++) {
            const float2 x = __ldg(reinterpret_cast<const float2*>(parts + at * D) + j * 32 + lane);
            sum[2 * j] += weight * x.x;
            sum[2 * j + 1] += weight * x.y;
        }
    }
    u32* to = reinterpret_cast<u32*>(out + u64(row) * (D * 2)) + lane;
#pragma unroll
    for (int j = 0; j < D / 64; j++) to[j * 32] = pair<BF16>(sum[2 * j] * reciprocal(total), sum[2 * j + 1] * reciprocal(total));
}
