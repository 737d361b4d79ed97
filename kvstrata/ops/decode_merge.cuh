// Merging by log-sum-exp: the warps of a block through shared memory, then the blocks of a sequence through global memory, by the block
// that arrives last. The output is rotated back by sums and differences on its way out. A warp takes one query head at a time, its
// lanes D / 32 channels each.

constexpr int LANE_CHANNELS = D / 32;
constexpr int HEAD_FLOATS = D + 4;                // of a head's sums in shared memory: the pad keeps banks apart
constexpr int STATS = 8 * HEAD_FLOATS * 4;        // byte at which a warp's m [8] and total [8] follow its sums

struct Output {
    void* out;
    float* lse;
    float* part;   // [H, rows, group, D]
    float* stat;   // [H, rows, 2, 8]: m and total of each head
    int* arrived;  // [B, H], 0 between launches
    bool bf16, rotated;
};

struct Merged {
    float x[LANE_CHANNELS];
    float m, total;
};

// A warp's sums -> its ring, in units of the values
INLINE void hand_in(const Sums& a, const Warp& warp) {
    const int g = warp.lane / 4, t = warp.lane % 4;
    copies_wait<0>();
    __syncwarp();
#pragma unroll
    for (int f = 0; f < D / 16; f++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float unit = VALUE_OF_CODE / (float)weight(field_of(f, i / 2));
            const float x = fmaf(a.o[f][i], unit, a.p[2 + i % 2] * 16.0f);
            store(warp.ring + ((2 * t + i % 2) * HEAD_FLOATS + f * 16 + i / 2 * 8 + g) * 4, __float_as_uint(x));
        }
    if (g == 0) {
        store(warp.ring + STATS + t * 8, __float_as_uint(a.m[0]), __float_as_uint(a.m[1]));
        store(warp.ring + STATS + 32 + t * 8, __float_as_uint(a.p[0]), __float_as_uint(a.p[1]));
    }
}

INLINE float load_float(u32 from) { return __uint_as_float(load(from)); }

// One head of the sums that all warps of the block have handed in, to rings ring_bytes apart
INLINE Merged merge_warps(u32 rings, u32 ring_bytes, int head, int lane) {
    Merged a = {};
    a.m = NOTHING;
#pragma unroll
    for (int w = 0; w < WARPS; w++) a.m = fmaxf(a.m, load_float(rings + w * ring_bytes + STATS + head * 4));
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const u32 ring = rings + w * ring_bytes;
        const float share = exp2_fast(load_float(ring + STATS + head * 4) - a.m);
        a.total = fmaf(share, load_float(ring + STATS + 32 + head * 4), a.total);
        const u32 from = ring + (head * HEAD_FLOATS + lane * LANE_CHANNELS) * 4;
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i += 2) {
            const uint2 x = load2(from + i * 4);
            a.x[i] = fmaf(share, __uint_as_float(x.x), a.x[i]), a.x[i + 1] = fmaf(share, __uint_as_float(x.y), a.x[i + 1]);
        }
    }
    return a;
}

// Past the L1 cache: another block wrote it
template <int N>
INLINE void load_row(float (&x)[N], const float* row) {
    if constexpr (N == 4) {
        const float4 y = __ldcg((const float4*)row);
        x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
    } else {
        const float2 y = __ldcg((const float2*)row);
        x[0] = y.x, x[1] = y.y;
    }
}

// One head of `count` rows of parts; part and stat point to the first row
INLINE Merged merge_rows(const float* part, const float* stat, int count, int group, int head, int lane) {
    constexpr int ROWS = 8;  // at a time
    Merged a = {};
    a.m = NOTHING;
#pragma unroll 1
    for (int base = 0; base < count; base += ROWS) {
        const int rows = min(ROWS, count - base);
        const float m = lane < rows ? __ldcg(stat + (base + lane) * 16 + head) : NOTHING;
        const float total = lane < rows ? __ldcg(stat + (base + lane) * 16 + 8 + head) : 0.0f;
        float x[ROWS][LANE_CHANNELS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) load_row(x[r], part + ((i64)(base + min(r, rows - 1)) * group + head) * D + lane * LANE_CHANNELS);
        float best = m;
#pragma unroll
        for (int i = ROWS / 2; i; i /= 2) best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, i));
        best = fmaxf(a.m, __shfl_sync(ALL_LANES, best, 0));
        const float alpha = exp2_fast(a.m - best), share = lane < rows ? exp2_fast(m - best) : 0.0f;
        a.m = best;
        a.total *= alpha;
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) a.x[i] *= alpha;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float w = __shfl_sync(ALL_LANES, share, r);
            a.total = fmaf(w, __shfl_sync(ALL_LANES, total, r), a.total);
#pragma unroll
            for (int i = 0; i < LANE_CHANNELS; i++) a.x[i] = fmaf(w, x[r][i], a.x[i]);
        }
    }
    return a;
}

// x times the Hadamard matrix, D / 32 channels a lane
INLINE void rotate(float (&x)[LANE_CHANNELS], int lane) {
#pragma unroll
    for (int bit = 1; bit < LANE_CHANNELS; bit *= 2)
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++)
            if (!(i & bit)) {
                const float a = x[i], b = x[i | bit];
                x[i] = a + b, x[i | bit] = a - b;
            }
    // rolled: code that runs once costs its way from memory
#pragma unroll 1
    for (int bit = 1; bit < 32; bit *= 2)
#pragma unroll
        for (int i = 0; i < LANE_CHANNELS; i++) {
            const float other = __shfl_xor_sync(ALL_LANES, x[i], bit);
            x[i] = lane & bit ? other - x[i] : x[i] + other;
        }
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) x[i] *= D == 128 ? 0.08838834764831845f : 0.125f;
}

// A head's merged sums -> out and lse. row: b * query heads + head; without a live token 0 and -inf
INLINE void write_head(Merged a, const Output& to, i64 row, int lane) {
    const float inverse = a.total > 0.0f ? reciprocal(a.total) : 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) a.x[i] *= inverse;
    if (to.rotated) rotate(a.x, lane);
    u32* out = (u32*)to.out + (row * D + lane * LANE_CHANNELS) / 2;
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS / 2; i++) out[i] = pack(a.x[2 * i], a.x[2 * i + 1], to.bf16);
    if (lane == 0) to.lse[row] = a.total > 0.0f ? (a.m - P_BITS + log2_fast(a.total)) * 0.6931471805599453f : __uint_as_float(0xFF800000u);
}

INLINE void write_part(const Merged& a, float* part, float* stat, int head, int lane) {
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i += 2) *(float2*)(part + head * D + lane * LANE_CHANNELS + i) = make_float2(a.x[i], a.x[i + 1]);
    if (lane == 0) stat[head] = a.m, stat[8 + head] = a.total;
}
