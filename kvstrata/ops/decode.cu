// Decode attention straight from stored pages (CUDA C++ for Hopper), in one launch. Knows nothing of stores or policies.
//
// A KV head's pages of all sequences, tier after tier, form a line of costs that is cut into equal parts, one a block: a block may end
// one sequence and begin the next. Within a block the warps take pages in turn. What blocks have of a sequence is merged by the one that
// arrives last. Macros: HEAD_DIM 64 or 128, DENSE_BF16 (0: fp16), and those below.

#ifndef WARPS
#define WARPS 6
#endif
#ifndef BLOCKS  // a multiprocessor
#define BLOCKS 2
#endif
#ifndef RING  // bytes of pages a warp
#define RING 17664
#endif
// what a page costs, relative to the others
#ifndef COSTS
#define COSTS {64, 48, 30, 24, 20}
#endif

#include "ptx.cuh"
#include "decode_ptx.cuh"
#include "decode_state.cuh"
#include "decode_planes.cuh"
#include "decode_dense.cuh"
#include "decode_merge.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int TIERS = 5;  // BF16, INT8, INT4, INT3, INT2: the order in which a sequence's pages lie on the line
constexpr u32 COST[TIERS] = COSTS;
constexpr int WORDS[TIERS] = {DENSE_FRAMES, 8, 4, 3, 2};  // frames of a page
constexpr int AT_ONCE[TIERS] = {1, pages_at_once<8>(), pages_at_once<4>(), pages_at_once<3>(), pages_at_once<2>()};

struct Tier {
    const u32* frames;  // [B, rows, n]
    const int* counts;  // [B]
    const u32* live;    // [B, rows, heads]
    int rows, heads;    // rows 0: no such tier; heads 0: all tokens live
};

struct Line {
    u32 begin, end;   // this block's share of its KV head's line
    u32 share;        // of every block but the last
    u32 stride, one;  // where all sequences are equal: what each takes up of the line, and its cost; else 0
    int first;        // sequence in which the share begins
    u32 start;        // where that sequence begins
};

// x / y for a quotient of less than 2**20
INLINE u32 quotient(u32 x, u32 y) {
    u32 q = (u32)((float)x * reciprocal((float)y));
    if (q * y > x) q--;
    if ((q + 1) * y <= x) q++;
    return q;
}

// At least x / y, by less than a millionth too much
INLINE u32 at_least(u32 x, u32 y) { return (u32)((float)x * reciprocal((float)y) * 1.0000005f) + 1; }

INLINE u32 cost_of(const Tier (&tiers)[TIERS], int b) {
    u32 count[TIERS], cost = 0;
    // counts are readable where there is no tier: all loads are under way at once
#pragma unroll
    for (int i = 0; i < TIERS; i++) count[i] = (u32)__ldg(tiers[i].counts + b);
#pragma unroll
    for (int i = 0; i < TIERS; i++) cost += tiers[i].rows ? count[i] * COST[i] : 0;
    return cost;
}

// Costs of sequences base + lane, and where they end
INLINE u32 scan(u32& cost, const Tier (&tiers)[TIERS], u32 before, int base, int batch, int lane) {
    cost = base + lane < batch ? cost_of(tiers, base + lane) : 0;
    u32 sum = cost;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        const u32 other = __shfl_up_sync(ALL_LANES, sum, i);
        if (lane >= i) sum += other;
    }
    return before + sum;
}

// Cuts the line, each warp for itself. each: blocks a sequence where all are equal, or 0; nobody(b) is told of sequences without pages
template <typename Nobody>
INLINE Line cut(const Tier (&tiers)[TIERS], int batch, u32 each, u32 least, int lane, const Nobody& nobody) {
    Line line;
    u32 cost = 0, end = 0, total = 0;
#pragma unroll 1
    for (int base = 0; base < batch; base += 32) {
        end = scan(cost, tiers, total, base, batch, lane);
        total = __shfl_sync(ALL_LANES, end, 31);
        for (u32 none = __ballot_sync(ALL_LANES, base + lane < batch && !cost); none; none &= none - 1) nobody(base + __ffs(none) - 1);
    }
    line.one = __shfl_sync(ALL_LANES, cost, 0);
    line.stride = 0;
    if (each && __all_sync(ALL_LANES, lane >= batch || cost == line.one)) {
        line.share = max(at_least(line.one, each), least);
        line.stride = line.share * each;
        total = line.one ? line.stride * batch : 0;
    } else {
        line.share = max(at_least(total, gridDim.y), least);
    }
    line.begin = min(line.share * blockIdx.y, total);
    line.end = min(line.begin + line.share, total);
    line.first = line.start = 0;
    if (line.stride) {
        line.first = quotient(line.begin, line.stride);
        line.start = line.stride * line.first;
        return line;
    }
    u32 before = 0;
#pragma unroll 1
    for (int base = 0; base < batch && line.begin < line.end; base += 32) {
        if (batch > 32) end = scan(cost, tiers, before, base, batch, lane);
        // the first that ends beyond
        const u32 found = __ballot_sync(ALL_LANES, end > line.begin);
        if (found) {
            const int at = __ffs(found) - 1;
            line.first = base + at;
            line.start = __shfl_sync(ALL_LANES, end - cost, at);
            break;
        }
        before = __shfl_sync(ALL_LANES, end, 31);
    }
    return line;
}

// Queries of the planes -> the block's shared memory, a share of the slots each warp: relative to their head's largest element, rounded
// up to a power of two, and short of their field's weight. unit: base-2 logits of one unit of the product, of heads 2t and 2t + 1
INLINE void load_query(float (&unit)[2], const Warp& warp, const u16* from, bool bf16, int group, float qk_scale) {
    const int g = warp.lane / 4, t = warp.lane % 4;
    constexpr int STEP = D / 64;  // 32-bit words of a field and lane
    const auto word = [&](int e) {
        const int channel = slot_field(e) * (D / 8) + (t * STEP + e % STEP) * 2;
        return g < group ? __ldg((const u32*)(from + g * D + channel)) : 0;
    };
    // numbers without their sign are in the order of their bits
    u32 top = 0;
#pragma unroll
    for (int e = 0; e < D / 8; e++) top = max_unsigned2(top, word(e) & 0x7FFF7FFFu);
    top = max_unsigned2(top, __shfl_xor_sync(ALL_LANES, top, 1));
    top = max_unsigned2(top, __shfl_xor_sync(ALL_LANES, top, 2));
    const float peak = fmaxf(fmaxf(unpack(top & 0xFFFF, bf16), unpack(top >> 16, bf16)) * fabsf(qk_scale), 1e-30f);
    const float factor = __uint_as_float((__float_as_uint(peak) + 0x7FFFFFu) & 0x7F800000u);
    // 2**14 / factor, by its exponent
    const float scale = qk_scale * __uint_as_float((127 + 127 + 14 << 23) - __float_as_uint(factor));
#pragma unroll 1
    for (int e = warp.index * 4; e < D / 8; e += WARPS * 4) {
        u32 x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float unit = scale / (float)weight(slot_field(e + j));
            x[j] = pack<false>(unpack(word(e + j) & 0xFFFF, bf16) * unit, unpack(word(e + j) >> 16, bf16) * unit);
        }
        store(warp.queries + e * 128 + warp.lane * 16, x[0], x[1], x[2], x[3]);
    }
    unit[0] = __shfl_sync(ALL_LANES, factor, 8 * t) * 65536.0f;
    unit[1] = __shfl_sync(ALL_LANES, factor, 8 * t + 4) * 65536.0f;
    __syncthreads();
}

// The pages of one tier that start in this block's share: [lo, hi) of its count; before: costs of the line ahead of them
template <int TIER>
INLINE void run_of(int& lo, int& hi, const Line& line, u32 before, int count) {
    constexpr u32 cost = COST[TIER];
    lo = min((int)((max(line.begin, before) - before + cost - 1) / cost), count);
    hi = min((int)((max(line.end, before) - before + cost - 1) / cost), count);
}

// Asks for the pages of this warp's first turn to be in the L2 cache, if they are of the sequence's first tier: they come while the queries
// are loaded
INLINE void prefetch_turn(const Tier (&tiers)[TIERS], const Line& line, u32 before, int b, const Warp& warp, const u8* arena, u32 stride) {
    u32 n = 0, pages = 0, cost = 1, rows = 0;
    const u32* frames = nullptr;
    const int* counts = nullptr;
#pragma unroll
    for (int i = TIERS - 1; i >= 0; i--) {
        const Tier& t = tiers[i];
        if (t.rows) frames = t.frames, counts = t.counts, rows = t.rows, n = WORDS[i], pages = AT_ONCE[i], cost = COST[i];
    }
    const u32 ahead = max(line.begin, before) - before, first = quotient(ahead + cost - 1, cost) + warp.index * pages;
    const u32 at = first * n + warp.lane;
    if (warp.lane < n * pages && at < (u32)__ldg(counts + b) * n)
        prefetch_l2(arena + (u64)__ldg(frames + (u64)b * rows * n + at) * stride, n == DENSE_FRAMES || warp.lane % n < 2 ? FRAME : PLANE);
}

// One warp's turns in the pages of sequence b that start in the block's share
INLINE void attend(Sums& a, const Tier (&tiers)[TIERS], const Line& line, u32 before, int b, const Warp& warp, const u16* q_from,
                   bool q_bf16, const u8* arena, u32 stride, int group, float qk_scale) {
    const int head = blockIdx.x;
    // where a block begins nothing is under way; at a later sequence it cost more than it saved
    if (b == line.first) prefetch_turn(tiers, line, before, b, warp, arena, stride);
    float unit[2];
    load_query(unit, warp, q_from, q_bf16, group, qk_scale);
    int turn = 0;
    const auto tier = [&](auto index, const auto& walk) {
        constexpr int TIER = decltype(index)::value, PAGES = AT_ONCE[TIER];
        const Tier& t = tiers[TIER];
        if (!t.rows) return;
        const int count = __ldg(t.counts + b);
        int lo, hi;
        run_of<TIER>(lo, hi, line, before, count);
        before += count * COST[TIER];
        // pages lo to lo + PAGES - 1 are the turn of warp `turn`, the next ones that of the next
        const int turns = (hi - lo + PAGES - 1) / PAGES, own = (warp.index - turn + WARPS) % WARPS;
        turn = (turn + turns) % WARPS;
        if (own >= turns) return;
        const int rounds = (turns - own + WARPS - 1) / WARPS, first = lo + own * PAGES;
        const int pages = min(rounds * PAGES, hi - first - (rounds - 1) * PAGES * (WARPS - 1));
        const i64 row = (i64)b * t.rows;
        walk(t.frames + row * WORDS[TIER], t.heads ? t.live + row * t.heads + head % t.heads : nullptr, t.heads, first, pages);
    };
    tier(Index<0>{}, [&](auto... pages) {
        attend_dense<DENSE_BF16>(a, q_from, q_bf16, group, qk_scale, warp, arena, stride, pages...);
        to_codes(a);
    });
    tier(Index<1>{}, [&](auto... pages) { attend_planes<4, 4>(a, unit, warp, arena, stride, pages...); });
    tier(Index<2>{}, [&](auto... pages) { attend_planes<2, 2>(a, unit, warp, arena, stride, pages...); });
    tier(Index<3>{}, [&](auto... pages) { attend_planes<2, 1>(a, unit, warp, arena, stride, pages...); });
    tier(Index<4>{}, [&](auto... pages) { attend_planes<1, 1>(a, unit, warp, arena, stride, pages...); });
}

// The block's sums of sequence b -> out, or a row of parts, and the merge of the rows if this is the last of them
INLINE void finish(const Line& line, u32 start, u32 cost, int b, const Warp& warp, u32 rings, u32 ring_bytes, const Output& to, int batch,
                   int group) {
    const int head = blockIdx.x, heads = gridDim.x;
    const int first = quotient(start, line.share), parts = quotient(start + cost - 1, line.share) - first + 1;
    // block + sequence grows along the line, so that no two pairs share a row
    const i64 rows = (i64)head * (gridDim.y + batch) + b, row = ((i64)b * heads + head) * group;
    float *const part = to.part + rows * group * D, *const stat = to.stat + rows * 16;
    __syncthreads();
#pragma unroll 1
    for (int round = 0; round < 2; round++) {
#pragma unroll 1
        for (int g = warp.index; g < group; g += WARPS) {
            const Merged a = round ? merge_rows(part + (i64)first * group * D, stat + first * 16, parts, group, g, warp.lane)
                                   : merge_warps(rings, ring_bytes, g, warp.lane);
            if (round == 0 && parts > 1) {
                write_part(a, part + (i64)blockIdx.y * group * D, stat + blockIdx.y * 16, g, warp.lane);
            } else {
                write_head(a, to, row + g, warp.lane);
            }
        }
        __syncthreads();
        if (round || parts == 1) return;
        // where the first warp's metadata was: nobody writes there before the next sequence's queries are loaded
        const u32 verdict = rings + RING;
        if (threadIdx.x == 0) {
            int* arrived = to.arrived + b * heads + head;
            __threadfence();
            const bool last = atomicAdd(arrived, 1) == parts - 1;
            __threadfence();
            if (last) *arrived = 0;
            store(verdict, last);
        }
        __syncthreads();
        if (!load(verdict)) return;
    }
}

// Asks for `bytes` from `from` to be in the L2 cache, 128 a thread of the grid: what a block reads first waits for counts, and it for that
INLINE void prefetch(const void* from, u64 bytes) {
    const u64 at = (u64)((blockIdx.y * gridDim.x + blockIdx.x) * THREADS + threadIdx.x) * 128;
    if (at < bytes) prefetch_l2((const u8*)from + at);
}

#define TIER(T) const u32 *frames##T, const int *counts##T, const u32 *live##T, int rows##T, int heads##T

// grid (H, blocks a KV head). q, out [B, Hq, D], lse [B, Hq]; arena [F, H, FRAME] bytes, stride between frames; see Tier and Output.
// each: blocks a sequence where all are equal, or 0; least: a block's smallest cost
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void decode(const u16* q, const u8* arena, void* out, float* lse, float* part,
        float* stat, int* arrived, TIER(16), TIER(8), TIER(4), TIER(3), TIER(2), int batch, int group, float qk_scale, int stride, int each,
        int least, int q_bf16, int rotated) {

    extern __shared__ uint4 shared[];
    constexpr u32 RING_BYTES = RING + 2 * DECODED;
    const u32 rings = (u32)__cvta_generic_to_shared(shared);
    const Tier tiers[TIERS] = {{frames16, counts16, live16, rows16, heads16}, {frames8, counts8, live8, rows8, heads8},
                               {frames4, counts4, live4, rows4, heads4}, {frames3, counts3, live3, rows3, heads3},
                               {frames2, counts2, live2, rows2, heads2}};
    const Output to = {out, lse, part, stat, arrived, q_bf16 != 0, rotated != 0};
    const int index = __shfl_sync(ALL_LANES, (int)threadIdx.x / 32, 0);
    const Warp warp = {rings + index * RING_BYTES, rings + WARPS * RING_BYTES, index, (int)threadIdx.x % 32};
    const int head = blockIdx.x, heads = gridDim.x;
    prefetch(q, (u64)batch * heads * group * D * 2);
#pragma unroll
    for (int i = 0; i < TIERS; i++) {
        prefetch(tiers[i].frames, (u64)batch * tiers[i].rows * WORDS[i] * 4);
    }
    const auto nobody = [&](int b) {
        if (blockIdx.y || index) return;
        const i64 row = ((i64)b * heads + head) * group;
        for (int i = warp.lane; i < group * D; i += 32) ((u16*)out)[row * D + i] = 0;
        if (warp.lane < group) lse[row + warp.lane] = __uint_as_float(0xFF800000u);
    };
    const Line line = cut(tiers, batch, each, least, warp.lane, nobody);
    if (line.begin == line.end) return;
    u32 start = line.start;
#pragma unroll 1
    for (int b = line.first; start < line.end; b++) {
        const u32 cost = line.stride ? line.one : cost_of(tiers, b);
        if (!cost) continue;
        // a share may lie behind the sequence that it belongs to
        if (line.begin >= start + cost) return;
        Sums a;
        clear(a);
        const u16* own = q + ((i64)b * heads + head) * group * D;
        attend(a, tiers, line, start, b, warp, own, q_bf16 != 0, arena + head * FRAME, stride, group, qk_scale);
        hand_in(a, warp);
        finish(line, start, cost, b, warp, rings, RING_BYTES, to, batch, group);
        start += line.stride ? line.stride : cost;
    }
}
