// Decode attention straight from stored pages (CUDA C++ for Hopper), in one launch. Knows nothing of stores or policies.
//
// A KV head's pages of all sequences, tier after tier, form a line of costs that is cut into equal parts, one a block: a block may end
// one sequence and begin the next. Within a block the warps take pages in turn. What blocks have of a sequence is merged by the one that
// arrives last. Macros: HEAD_DIM 64 or 128, Q_BF16 and DENSE_BF16 (0: fp16), and those below.

#ifndef WARPS
#define WARPS 4
#endif
#ifndef BLOCKS  // a multiprocessor
#define BLOCKS 4
#endif
#ifndef RING  // bytes of pages a warp
#define RING 12800
#endif
// what a page costs, relative to the others
#ifndef COSTS
#define COSTS {48, 48, 27, 22, 20}
#endif

#include "decode_ptx.cuh"
#include "decode_state.cuh"
#include "decode_planes.cuh"
#include "decode_dense.cuh"
#include "decode_merge.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int TIERS = 5;  // BF16, INT8, INT4, INT3, INT2: the order in which a sequence's pages lie on the line
constexpr u32 COST[TIERS] = COSTS;

struct Tier {
    const int* frames;  // [B, rows, n]
    const int* counts;  // [B]
    const u32* live;    // [B, rows, heads]
    int rows, heads;    // rows 0: no such tier; heads 0: all tokens live
};

struct Line {
    u32 begin, end;          // this block's share of its KV head's line
    u32 total, used;         // the line's cost, and the blocks that share it
    int first, last;         // sequences with a part in the share
};

INLINE u32 cost_of(const Tier (&tiers)[TIERS], int b) {
    u32 cost = 0;
#pragma unroll
    for (int i = 0; i < TIERS; i++)
        if (tiers[i].rows) cost += (u32)__ldg(tiers[i].counts + b) * COST[i];
    return cost;
}

INLINE u32 start_of(const Line& line, u32 block) {
    return line.total / line.used * block + line.total % line.used * block / line.used;
}

// The block in whose share `cost` lies
INLINE u32 block_of(const Line& line, u32 cost) { return (u32)((((u64)cost + 1) * line.used - 1) / line.total); }

// Cuts the line. starts: [B + 1] in shared memory, where each sequence's costs begin. All threads return the same.
INLINE Line cut(const Tier (&tiers)[TIERS], u32* starts, u32* scratch, int batch, int least) {
    const int thread = threadIdx.x, lane = thread % 32;
    u32 before = 0;
    for (int base = 0; base < batch; base += THREADS) {
        const int b = base + thread;
        u32 sum = b < batch ? cost_of(tiers, b) : 0;
#pragma unroll
        for (int i = 1; i < 32; i *= 2) {
            const u32 other = __shfl_up_sync(ALL_LANES, sum, i);
            if (lane >= i) sum += other;
        }
        if (lane == 31) scratch[thread / 32] = sum;
        __syncthreads();
        for (int w = 0; w < WARPS; w++) {
            if (w < thread / 32) sum += scratch[w];
        }
        if (b < batch) starts[b + 1] = before + sum;
        for (int w = 0; w < WARPS; w++) before += scratch[w];
        __syncthreads();
    }
    if (thread == 0) starts[0] = 0;
    Line line;
    line.total = before;
    line.used = min((u32)gridDim.y, (before + least - 1) / least);
    line.begin = line.end = 0;
    if (blockIdx.y < line.used) line.begin = start_of(line, blockIdx.y), line.end = start_of(line, blockIdx.y + 1);
    __syncthreads();
    for (int b = thread; b < batch; b += THREADS) {
        if (starts[b] <= line.begin && line.begin < starts[b + 1]) scratch[0] = b;
        if (starts[b] < line.end && line.end <= starts[b + 1]) scratch[1] = b;
    }
    __syncthreads();
    line.first = scratch[0], line.last = scratch[1];
    return line;
}

// Queries of the planes: relative to their head's largest element, rounded up to a power of two, and short of their field's weight
template <bool BF16>
INLINE void load_query(Query& q, const u16* from, int group, float qk_scale, int lane) {
    const int g = lane / 4, t = lane % 4;
    constexpr int STEP = D / 64;  // 32-bit words of a field and lane
    float peak = 1e-30f;
    u32 raw[D / 8];
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
        const int channel = slot_field(i) * (D / 8) + (t * STEP + i % STEP) * 2;
        raw[i] = g < group ? __ldg((const u32*)(from + g * D + channel)) : 0;
        peak = fmaxf(peak, fmaxf(fabsf(unpack<BF16>(raw[i] & 0xFFFF)), fabsf(unpack<BF16>(raw[i] >> 16))) * fabsf(qk_scale));
    }
    peak = fmaxf(peak, __shfl_xor_sync(ALL_LANES, peak, 1));
    peak = fmaxf(peak, __shfl_xor_sync(ALL_LANES, peak, 2));
    const float factor = __uint_as_float((__float_as_uint(peak) + 0x7FFFFFu) & 0x7F800000u);
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
        const float x = qk_scale * (16384.0f / (float)weight(slot_field(i)) / factor);
        q.x[i] = pack<false>(unpack<BF16>(raw[i] & 0xFFFF) * x, unpack<BF16>(raw[i] >> 16) * x);
    }
    q.unit[0] = __shfl_sync(ALL_LANES, factor, 8 * t) * 65536.0f;
    q.unit[1] = __shfl_sync(ALL_LANES, factor, 8 * t + 4) * 65536.0f;
}

// The pages of one tier that start in this block's share: [lo, hi) of its count; before: costs of the line ahead of them
template <int TIER>
INLINE void run_of(int& lo, int& hi, const Line& line, u32 before, int count) {
    constexpr u32 cost = COST[TIER];
    lo = min((int)((max(line.begin, before) - before + cost - 1) / cost), count);
    hi = min((int)((max(line.end, before) - before + cost - 1) / cost), count);
}

// One warp's turns in the pages of sequence b that start in the block's share
INLINE void attend(Sums& a, const Tier (&tiers)[TIERS], const Line& line, u32 before, int b, const Warp& warp, const u16* q_from, const u8* arena,
                   u32 stride, int group, float qk_scale) {
    const int head = blockIdx.x;
    Query q;
    bool ready = false;
    int turn = 0;
    const auto tier = [&](auto index, const auto& walk) {
        constexpr int TIER = decltype(index)::value;
        const Tier& t = tiers[TIER];
        if (!t.rows) return;
        const int count = __ldg(t.counts + b);
        int lo, hi;
        run_of<TIER>(lo, hi, line, before, count);
        before += count * COST[TIER];
        // page lo is the turn of warp `turn`
        const int first = lo + (warp.index - turn + WARPS) % WARPS;
        turn = (turn + hi - lo) % WARPS;
        if (first >= hi) return;
        if (TIER && !ready) load_query<Q_BF16>(q, q_from, group, qk_scale, warp.lane), ready = true;
        constexpr int n = TIER == 0 ? DENSE_FRAMES : TIER == 1 ? 8 : TIER == 2 ? 4 : TIER == 3 ? 3 : 2;
        const i64 row = (i64)b * t.rows;
        walk(t.frames + row * n, t.heads ? t.live + row * t.heads + head % t.heads : nullptr, t.heads, first, (hi - first + WARPS - 1) / WARPS);
    };
    tier(Index<0>{}, [&](const int* frames, const u32* live, int heads, int first, int count) {
        load_dense_query<Q_BF16, DENSE_BF16>(q, q_from, group, qk_scale, warp.lane);
        attend_dense<DENSE_BF16>(a, q, warp, arena, stride, frames, live, heads, first, count);
        to_codes(a);
    });
    tier(Index<1>{}, [&](const int* frames, const u32* live, int heads, int first, int count) {
        attend_planes<4, 4>(a, q, warp, arena, stride, frames, live, heads, first, count);
    });
    tier(Index<2>{}, [&](const int* frames, const u32* live, int heads, int first, int count) {
        attend_planes<2, 2>(a, q, warp, arena, stride, frames, live, heads, first, count);
    });
    tier(Index<3>{}, [&](const int* frames, const u32* live, int heads, int first, int count) {
        attend_planes<2, 1>(a, q, warp, arena, stride, frames, live, heads, first, count);
    });
    tier(Index<4>{}, [&](const int* frames, const u32* live, int heads, int first, int count) {
        attend_planes<1, 1>(a, q, warp, arena, stride, frames, live, heads, first, count);
    });
}

// The block's sums of sequence b -> out, or a row of parts, and the merge of the rows if this is the last of them
INLINE void finish(const Line& line, u32 start, u32 end, int b, const Warp& warp, u32 rings, u32 ring_bytes, const Output& to, int batch,
                   int group, u32* scratch) {
    const int head = blockIdx.x, heads = gridDim.x;
    const int first = block_of(line, start), parts = block_of(line, end - 1) - first + 1;
    const i64 rows = (i64)head * (gridDim.y + batch);
    const i64 row = ((i64)b * heads + head) * group;
    __syncthreads();
    for (int g = warp.index; g < group; g += WARPS) {
        const Merged a = merge_warps(rings, ring_bytes, g, warp.lane);
        // block + sequence grows along the line, so that no two pairs share a row
        const i64 part = rows + blockIdx.y + b;
        if (parts == 1) {
            write_head<Q_BF16>(a, to, row + g, warp.lane);
        } else {
            write_part(a, to.part + part * group * D, to.stat + part * 16, g, warp.lane);
        }
    }
    if (parts > 1) {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) scratch[0] = atomicAdd(to.arrived + b * heads + head, 1) == parts - 1;
        __syncthreads();
        if (scratch[0]) {
            __threadfence();
            const i64 part = rows + first + b;
            for (int g = warp.index; g < group; g += WARPS) {
                write_head<Q_BF16>(merge_rows(to.part + part * group * D, to.stat + part * 16, parts, group, g, warp.lane), to, row + g, warp.lane);
            }
            if (threadIdx.x == 0) to.arrived[b * heads + head] = 0;
        }
    }
    __syncthreads();
}

#define TIER(T) const int *frames##T, const int *counts##T, const u32 *live##T, int rows##T, int heads##T

// grid (H, blocks a KV head). q, out [B, Hq, D], lse [B, Hq]; arena [F, H, FRAME] bytes, stride between frames; see Tier and Output.
// least: a block's smallest cost
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void decode(const u16* q, const u8* arena, void* out, float* lse, float* part, float* stat,
        int* arrived, TIER(16), TIER(8), TIER(4), TIER(3), TIER(2), int batch, int group, float qk_scale, int stride, int least, int rotated) {
    extern __shared__ uint4 shared[];
    constexpr u32 RING_BYTES = RING + DECODED;
    u32* const starts = (u32*)shared;
    u32* const scratch = starts + WARPS * RING_BYTES / 4;
    const u32 rings = (u32)__cvta_generic_to_shared(shared);
    const Tier tiers[TIERS] = {{frames16, counts16, live16, rows16, heads16}, {frames8, counts8, live8, rows8, heads8},
                               {frames4, counts4, live4, rows4, heads4}, {frames3, counts3, live3, rows3, heads3},
                               {frames2, counts2, live2, rows2, heads2}};
    const Output to = {out, lse, part, stat, arrived, rotated != 0};
    const Warp warp = {fixed(rings + threadIdx.x / 32 * RING_BYTES), (int)threadIdx.x / 32, (int)threadIdx.x % 32};
    const int head = blockIdx.x, heads = gridDim.x;
    const Line line = cut(tiers, starts, scratch, batch, least);
    if (blockIdx.y == 0) {
        // nobody attends a sequence without pages
        for (int b = 0; b < batch; b++)
            if (starts[b] == starts[b + 1])
                for (int g = warp.index; g < group; g += WARPS) write_head<Q_BF16>(Merged{}, to, ((i64)b * heads + head) * group + g, warp.lane);
    }
    if (line.begin == line.end) return;
    u32 start = starts[line.first];
    __syncthreads();
    for (int b = line.first; b <= line.last; b++) {
        const u32 end = start + cost_of(tiers, b);
        if (start == end) continue;
        Sums a;
        clear(a);
        attend(a, tiers, line, start, b, warp, q + ((i64)b * heads + head) * group * D, arena + head * FRAME, stride, group, qk_scale);
        hand_in(a, warp);
        finish(line, start, end, b, warp, rings, RING_BYTES, to, batch, group, scratch);
        start = end;
    }
}
