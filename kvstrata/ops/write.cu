// Quantizing and packing pages: one warp takes K or V of one page and KV head. The page passes through shared memory (16 bytes a thread
// in, pairs of channels out), and a thread holds all eight fields of the words that it makes, so that nothing is summed across lanes.
//
// D, HALF (fp16, else bf16), SETTLE (from dense pages, else from tensors), K_PLANES, V_PLANES, WARPS (even), MIN_BLOCKS (of a
// multiprocessor) and SHARED (bytes of two warps) are compile-time options.

#include "write_codec.cuh"

constexpr int C = D / 8;                                      // words of a plane a token
constexpr int ROW = 2 * D, CHUNK = 2 * C, TENSOR = 32 * ROW;  // bytes of a token, of one field of it, of K or V of a page
constexpr int FRAME = 8 * D + D + 32;                         // bytes of a frame: plane, then metadata
// a lane takes channels 2 * pair and 2 * pair + 1 of every field of its token group's tokens
constexpr int PAIRS = C / 2, GROUPS = 32 / PAIRS, TOKENS = PAIRS;
constexpr int N = K_PLANES + V_PLANES;
constexpr int N_SRC = (2 * TENSOR + FRAME - 1) / FRAME;
constexpr int OWN = 8 / GROUPS;  // fields whose channels' grids a lane finds, of K
static_assert(WARPS % 2 == 0 && GROUPS <= 8 && OWN >= 1 && N_SRC <= 32 && ROW <= 512, "head_dim 64, 128, 256");

// What two warps need, one for K and one for V: the tensor, and its groups' grids.
struct Page {
    alignas(ROW) char k[TENSOR];
    float4 k_head_tail[D / 2];  // heads and tails of channels c and c + 1, [pair][field]
    float2 k_offset[D / 2];
    alignas(ROW) char v[TENSOR];
    float4 v_grid[32];  // head, tail and offset of a token
};
static_assert(sizeof(Page) == SHARED, "as the host counts it");

__device__ __forceinline__ uint shared_address(const void* p) {
    return (uint)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ uint load_shared(uint address) {
    uint x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address));
    return x;
}

__device__ __forceinline__ void copy16(uint to, const char* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}

// Where channel or token i of n lies in the stored order of metadata (inverse of frame.lane_order).
__device__ __forceinline__ int lane_at(int i, int n) { return i % 8 / 2 * (n / 4) + i / 8 * 2 + i % 2; }

// ---- loading ------------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_tensor(uint to, const char* rows, long stride, int lane) {
    constexpr int LANES = ROW / 16, STEP_ROWS = 32 / LANES;
    rows += lane / LANES * stride + lane % LANES * 16;
#pragma unroll
    for (int i = 0; i < TENSOR / 512; ++i) {
        copy16(to + i * 512 + lane * 16, rows);
        rows += STEP_ROWS * stride;
    }
}

// From dense pages: bytes of K, then of V, cut into frames as they come.
__device__ __forceinline__ void load_dense(uint to, const char* arena, const int* frames, long stride, int first, int lane) {
    int id = lane < N_SRC ? frames[lane] : 0;
#pragma unroll
    for (int i = 0; i < TENSOR / 512; ++i) {
        int byte = first + i * 512 + lane * 16;
        copy16(to + i * 512 + lane * 16, arena + __shfl_sync(~0u, id, byte / FRAME) * stride + byte % FRAME);
    }
}

__device__ __forceinline__ void wait_loaded() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
}

// ---- K: a group is a channel --------------------------------------------------------------------------------------------------

// Lanes differ in the order of fields (the j-th is j ^ group), so that groups, whole rows apart, read from different banks.
__device__ __forceinline__ void find_k(Page& w, uint page, int pair, int group, char* k_frame, char* v_frame) {
    uint lowest[8], highest[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        uint at = page + (group * (ROW + CHUNK) + pair * 4 ^ j * CHUNK);
        lowest[j] = highest[j] = load_shared(at);
#pragma unroll
        for (int i = 1; i < TOKENS; ++i) {
            uint x = load_shared(at + i * GROUPS * ROW);
            lowest[j] = min2(lowest[j], x);
            highest[j] = max2(highest[j], x);
        }
    }
    // each step halves the fields that a lane is left with: the other's j ^ bit is this one's j
#pragma unroll
    for (int bit = 1; bit < GROUPS; bit *= 2)
#pragma unroll
        for (int j = 0; j < 8; j += 2 * bit) {
            lowest[j] = min2(lowest[j], __shfl_xor_sync(~0u, lowest[j + bit], bit));
            highest[j] = max2(highest[j], __shfl_xor_sync(~0u, highest[j + bit], bit));
        }
    float lo[2 * OWN], hi[2 * OWN];
    uint s_byte[2 * OWN], z_byte[2 * OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        lo[2 * i] = low(lowest[i * GROUPS]), lo[2 * i + 1] = high(lowest[i * GROUPS]);
        hi[2 * i] = low(highest[i * GROUPS]), hi[2 * i + 1] = high(highest[i * GROUPS]);
    }
    find_grids<(int)K_UNIT>(lo, hi, s_byte, z_byte);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        int field = i * GROUPS ^ group;
        Grid a = make_grid<(int)K_UNIT>(s_byte[2 * i], z_byte[2 * i]);
        Grid b = make_grid<(int)K_UNIT>(s_byte[2 * i + 1], z_byte[2 * i + 1]);
        w.k_head_tail[pair * 8 + field] = make_float4(a.head, b.head, a.tail, b.tail);
        w.k_offset[pair * 8 + field] = make_float2(a.offset, b.offset);
        int at = lane_at(field * C + pair * 2, D);
        char* base = at < D / 2 ? k_frame : v_frame - D;
        *(uint*)(base + 8 * D + 2 * at) = s_byte[2 * i] | z_byte[2 * i] << 8 | s_byte[2 * i + 1] << 16 | z_byte[2 * i + 1] << 24;
    }
    __syncwarp();
}

// Nibbles of four of the eight fields (j from `first`), codes and residuals.
__device__ __forceinline__ void pack_k(const Page& w, uint page, int pair, int group, int first, uint (&q)[TOKENS], uint (&fine)[TOKENS]) {
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) q[i] = fine[i] = 0;
#pragma unroll 1
    for (int j = first; j < first + 4; ++j) {
        int field = j ^ group;
        float4 h = w.k_head_tail[pair * 8 + field];
        float2 o = w.k_offset[pair * 8 + field];
        uint weight = 1u << field % 4 * 4, at = page + group * ROW + pair * 4 + field * CHUNK;
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            uint rest = 0;
            q[i] += weight * codes<K_PLANES>(load_shared(at + i * GROUPS * ROW), {h.x, h.z, o.x}, {h.y, h.w, o.y}, rest);
            if (K_PLANES == 4) fine[i] += weight * rest;
        }
    }
}

__device__ __forceinline__ void write_k(Page& w, uint page, int lane, char* arena, const int* frames, long stride) {
    int pair = lane / GROUPS, group = lane % GROUPS;
    char* k_frame = arena + frames[0] * stride;
    find_k(w, page, pair, group, k_frame, arena + frames[1] * stride);
    uint a[TOKENS], b[TOKENS], fine_a[TOKENS], fine_b[TOKENS];
    pack_k(w, page, pair, group, 0, a, fine_a);
    pack_k(w, page, pair, group, 4, b, fine_b);
    // with eight groups, the upper four met the upper fields first
    bool swap = group >= 4;
    char* out[K_PLANES];
#pragma unroll
    for (int plane = 0; plane < K_PLANES; ++plane)
        out[plane] = (plane ? arena + frames[2 * plane] * stride : k_frame) + group * CHUNK + pair * 4;
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        constexpr int ROWS = GROUPS * CHUNK;
        uint x = GROUPS > 4 && swap ? b[i] : a[i], y = GROUPS > 4 && swap ? a[i] : b[i];
        *(uint*)(out[0] + i * ROWS) = plane_word<false>(x, y);
        if (K_PLANES > 1) *(uint*)(out[1] + i * ROWS) = plane_word<true>(x, y);
        if (K_PLANES == 4) {
            x = GROUPS > 4 && swap ? fine_b[i] : fine_a[i], y = GROUPS > 4 && swap ? fine_a[i] : fine_b[i];
            *(uint*)(out[K_PLANES - 2] + i * ROWS) = plane_word<false>(x, y);
            *(uint*)(out[K_PLANES - 1] + i * ROWS) = plane_word<true>(x, y);
        }
    }
}

// ---- V: a group is a token ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void find_v(Page& w, uint at, int pair, int group, char* k_frame, char* v_frame) {
    uint ends[TOKENS];  // smallest, and negated largest, of each token
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        uint lowest = load_shared(at + i * ROW), highest = lowest;
#pragma unroll
        for (int j = 1; j < 8; ++j) {
            uint x = load_shared((at ^ j * CHUNK) + i * ROW);
            lowest = min2(lowest, x);
            highest = max2(highest, x);
        }
        highest ^= 0x80008000u;
        ends[i] = min2(__byte_perm(lowest, highest, 0x5410), __byte_perm(lowest, highest, 0x7632));
    }
    // each step halves the tokens that a lane is left with; the last is token `pair` of its group
#pragma unroll
    for (int step = 2; step <= TOKENS; step *= 2) {
        const int half = TOKENS / step;
        bool upper = pair & half;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            uint mine = upper ? ends[i + half] : ends[i], other = upper ? ends[i] : ends[i + half];
            ends[i] = min2(mine, __shfl_xor_sync(~0u, other, half * GROUPS));
        }
    }
    float lo[1] = {low(ends[0])}, hi[1] = {-high(ends[0])};
    uint s_byte[1], z_byte[1];
    find_grids<(int)V_UNIT>(lo, hi, s_byte, z_byte);
    Grid g = make_grid<(int)V_UNIT>(s_byte[0], z_byte[0]);
    int token = group * TOKENS + pair, to = lane_at(token, 32);
    w.v_grid[token] = make_float4(g.head, g.tail, g.offset, 0.f);
    *(ushort*)((to < 16 ? k_frame : v_frame - 32) + 9 * D + 2 * to) = s_byte[0] | z_byte[0] << 8;
    __syncwarp();
}

// Words of channels c and c + 1 of one plane, a pair of tokens at a time -> each channel's tokens side by side.
struct Rows {
    uint word[2][TOKENS / 2];

    // Shifted in, not indexed, so that the loop over tokens need not be unrolled.
    __device__ __forceinline__ void push(uint even, uint odd) {
#pragma unroll
        for (int i = 0; i + 1 < TOKENS / 2; ++i) word[0][i] = word[0][i + 1], word[1][i] = word[1][i + 1];
        word[0][TOKENS / 2 - 1] = __byte_perm(even, odd, 0x5410);
        word[1][TOKENS / 2 - 1] = __byte_perm(even, odd, 0x7632);
    }

    __device__ __forceinline__ void store(char* to) const {
#pragma unroll
        for (int c = 0; c < 2; ++c)
#pragma unroll
            for (int i = 0; i < TOKENS / 2; i += 4) {
                if constexpr (TOKENS == 4) *(uint2*)(to + 64 * c) = make_uint2(word[c][0], word[c][1]);
                else *(uint4*)(to + 64 * c + 4 * i) = make_uint4(word[c][i], word[c][i + 1], word[c][i + 2], word[c][i + 3]);
            }
    }
};

// A token's words of each plane, of channels c and c + 1.
__device__ __forceinline__ void pack_v(uint at, const float4& grid, bool swap, const uint (&weight)[4], uint (&words)[V_PLANES]) {
    Grid g{grid.x, grid.y, grid.z};
    uint q[2] = {}, fine[2] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        uint rest = 0;
        q[j / 4] += weight[j % 4] * codes<V_PLANES>(load_shared(at ^ j * CHUNK), g, g, rest);
        if (V_PLANES == 4) fine[j / 4] += weight[j % 4] * rest;
    }
    uint x = swap ? q[1] : q[0], y = swap ? q[0] : q[1];
    words[0] = plane_word<false>(x, y);
    if (V_PLANES > 1) words[1 % V_PLANES] = plane_word<true>(x, y);
    if (V_PLANES == 4) {
        x = swap ? fine[1] : fine[0], y = swap ? fine[0] : fine[1];
        words[2 % V_PLANES] = plane_word<false>(x, y);
        words[3 % V_PLANES] = plane_word<true>(x, y);
    }
}

__device__ __forceinline__ void write_v(Page& w, uint page, int lane, char* arena, const int* frames, long stride) {
    int pair = lane / GROUPS, group = lane % GROUPS;
    uint at = page + group * (TOKENS * ROW + CHUNK) + pair * 4;
    char* v_frame = arena + frames[1] * stride;
    find_v(w, at, pair, group, arena + frames[0] * stride, v_frame);
    Rows rows[V_PLANES];
    uint weight[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) weight[j] = 1u << (j ^ group) % 4 * 4;
    // with eight groups, the upper four meet the upper fields first
    bool swap = GROUPS > 4 && group >= 4;
#pragma unroll 1
    for (int i = 0; i < TOKENS; i += 2) {
        uint even[V_PLANES], odd[V_PLANES];
        pack_v(at + i * ROW, w.v_grid[group * TOKENS + i], swap, weight, even);
        pack_v(at + (i + 1) * ROW, w.v_grid[group * TOKENS + i + 1], swap, weight, odd);
#pragma unroll
        for (int plane = 0; plane < V_PLANES; ++plane) rows[plane].push(even[plane], odd[plane]);
    }
#pragma unroll
    for (int plane = 0; plane < V_PLANES; ++plane)
        rows[plane].store((plane ? arena + frames[2 * plane + 1] * stride : v_frame) + pair * 128 + group * TOKENS * 2);
}

// ---- the kernel ---------------------------------------------------------------------------------------------------------------

// k, v: [P, 32, H, D] with strides in bytes; with SETTLE, k is the arena of the dense pages and rows int32 [P, N_SRC] their frames.
// frames int32 [P, N]; strides of the arena in bytes. Tasks: (page, head, K or V), the last fastest.
extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS) write_pages(
    const char* k, const char* v, const int* rows, char* arena, const int* frames, int stride_kp, int stride_kt, int stride_kh,
    int stride_vp, int stride_vt, int stride_vh, int stride_frame, int stride_head, int heads, int tasks) {
    extern __shared__ __align__(512) Page shared[];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int task = blockIdx.x * WARPS + warp;
    if (task >= tasks) return;
    bool is_v = task & 1;
    Page& w = shared[warp / 2];
    uint to = shared_address(is_v ? w.v : w.k);
    int head = task / 2 % heads;
    long page = task / 2 / heads;
    arena += (long)head * stride_head;
    frames += page * N;
    if (SETTLE) load_dense(to, k + (long)head * stride_head, rows + page * N_SRC, stride_frame, is_v ? TENSOR : 0, lane);
    else if (is_v) load_tensor(to, v + page * stride_vp + (long)head * stride_vh, stride_vt, lane);
    else load_tensor(to, k + page * stride_kp + (long)head * stride_kh, stride_kt, lane);
    // metadata's room in refinement frames holds zeros
#pragma unroll
    for (int plane = 1; plane < (K_PLANES > V_PLANES ? K_PLANES : V_PLANES); ++plane)
        if (lane < (FRAME - 8 * D) / 16 && plane < (is_v ? V_PLANES : K_PLANES))
            *(uint4*)(arena + frames[2 * plane + is_v] * (long)stride_frame + 8 * D + lane * 16) = make_uint4(0, 0, 0, 0);
    wait_loaded();
    if (is_v) write_v(w, to, lane, arena, frames, stride_frame);
    else write_k(w, to, lane, arena, frames, stride_frame);
}
