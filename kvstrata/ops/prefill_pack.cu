// Keys and values of a prompt as the prefill kernel reads them: tiles of 128 keys in 8 bits and tiles of 64 keys as they are, each 32 KB
// in the order of the matrix units' operands, so that one bulk copy brings a tile.
// Compiled with -DINT8=0 or 1: codes of K are int8 or e4m3. V's are e4m3. head_dim 128, bf16.
#include "extend_mma.cuh"
#include "prefill_mma.cuh"

constexpr int D = 128, KEYS = 128, WHOLE_KEYS = 64, TILE_BYTES = 32768;
constexpr int V_STRIDE = 132;  // bytes of a channel's row while V is turned over: keeps its stores apart in banks

// Lines before `position`: lines ascend.
DEVICE int lines_before(const int* lines, int count, int position) {
    int low = 0, high = count;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (__ldg(lines + middle) < position) low = middle + 1;
        else high = middle;
    }
    return low;
}

// Position of the r-th token that is no line: r plus the lines before it, of which line j has lines[j] - j such tokens before.
DEVICE int body_position(const int* lines, int count, int r) {
    int low = 0, high = count;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (__ldg(lines + middle) - middle <= r) low = middle + 1;
        else high = middle;
    }
    return r + low;
}

// Where byte `at` of row `row` of a panel of 128-byte rows lies.
DEVICE u32 swizzled(int row, int at) { return row * 128 + ((at / 16 ^ row % 8) * 16) + at % 16; }

DEVICE float block_max(float x, float* room) {
#pragma unroll
    for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    float all = room[0];
    for (int i = 1; i < 8; i++) all = fmaxf(all, room[i]);
    return all;
}

// grid (body tiles + line tiles + 1, KV heads), 256 threads. k, v bf16 [T, H, D], strides in elements. mean float32 [H, D] or null;
// lines int32 [H, count]. -> codes [H, body tiles, 32 KB] (K's rows are keys; V's are channels, its keys in the order in which a thread
// has probabilities), scales float32 [H, body tiles, 4] (K's, V's), whole [H, line tiles, 32 KB], before int32 [H, query tiles]: lines
// before the window of each tile of queries.
extern "C" __global__ void __launch_bounds__(256)
pack(const char* k, const char* v, const float* mean, const int* all_lines, char* codes, float* scales, char* whole, int* before,
     int tokens, int count, int body_tiles, int line_tiles, int query_tiles, int window, int stride_kt, int stride_kh, int stride_vt,
     int stride_vh) {
    __shared__ int positions[KEYS];
    __shared__ float room[8];
    __shared__ unsigned turned[D * V_STRIDE / 4];
    const int head = blockIdx.y, tile = blockIdx.x, thread = threadIdx.x, column = thread % 16 * 8;
    const int* lines = all_lines + u64(head) * count;
    const char* own_k = k + u64(head) * stride_kh * 2 + column * 2;
    const char* own_v = v + u64(head) * stride_vh * 2 + column * 2;
    if (tile == body_tiles + line_tiles) {
        for (int i = thread; i < query_tiles; i += 256)
            before[u64(head) * query_tiles + i] = lines_before(lines, count, max(0, i * KEYS - window));
        return;
    }
    if (tile >= body_tiles) {
        const int first = (tile - body_tiles) * WHOLE_KEYS;
        char* to = whole + (u64(head) * line_tiles + tile - body_tiles) * TILE_BYTES;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int row = thread / 16 + 16 * j;
            uint4 x = make_uint4(0, 0, 0, 0), y = x;
            if (first + row < count) {
                const int position = __ldg(lines + first + row);
                x = __ldg(reinterpret_cast<const uint4*>(own_k + u64(position) * stride_kt * 2));
                y = __ldg(reinterpret_cast<const uint4*>(own_v + u64(position) * stride_vt * 2));
            }
            const u32 at = column / 64 * (WHOLE_KEYS * 128) + swizzled(row, column % 64 * 2);
            *reinterpret_cast<uint4*>(to + at) = x;
            *reinterpret_cast<uint4*>(to + TILE_BYTES / 2 + at) = y;
        }
        return;
    }
    if (thread < KEYS) {
        const int r = tile * KEYS + thread;
        positions[thread] = r < tokens - count ? body_position(lines, count, r) : -1;
    }
    __syncthreads();
    char* to = codes + (u64(head) * body_tiles + tile) * TILE_BYTES;
    float shift[8] = {};
    if (mean)
#pragma unroll
        for (int e = 0; e < 8; e++) shift[e] = __ldg(mean + head * D + column + e);
#pragma unroll 1
    for (int is_v = 0; is_v < 2; is_v++) {
        uint4 x[8];
        float top = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int position = positions[thread / 16 + 16 * j];
            x[j] = make_uint4(0, 0, 0, 0);
            if (position < 0) continue;
            x[j] = __ldg(reinterpret_cast<const uint4*>(is_v ? own_v + u64(position) * stride_vt * 2 : own_k + u64(position) * stride_kt * 2));
            const u32* w = &x[j].x;
#pragma unroll
            for (int e = 0; e < 4; e++)
                top = fmaxf(top, fmaxf(fabsf(low_half(w[e]) - shift[2 * e]), fabsf(high_half(w[e]) - shift[2 * e + 1])));
        }
        const float largest = INT8 && !is_v ? 127.0f : 448.0f;
        const float scale = fmaxf(block_max(top, room), 1e-20f) / largest, inverse = 1.0f / scale;
        if (thread == 0) scales[(u64(head) * body_tiles + tile) * 4 + is_v] = scale;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int row = thread / 16 + 16 * j;
            const bool lives = positions[row] >= 0;
            const u32* w = &x[j].x;
            float y[8];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                y[2 * e] = lives ? quotient(low_half(w[e]) - shift[2 * e], scale, inverse) : 0.0f;
                y[2 * e + 1] = lives ? quotient(high_half(w[e]) - shift[2 * e + 1], scale, inverse) : 0.0f;
            }
            u32 low, high;
            if (INT8 && !is_v) low = four_int8(y[0], y[1], y[2], y[3]), high = four_int8(y[4], y[5], y[6], y[7]);
            else low = four_fp8(y[0], y[1], y[2], y[3]), high = four_fp8(y[4], y[5], y[6], y[7]);
            if (!is_v) {
                *reinterpret_cast<uint2*>(to + swizzled(row, column)) = make_uint2(low, high);
            } else {
                // of 32 keys, a thread of four has 2t, 2t + 1, 8 + 2t, 8 + 2t + 1 in one word of its operand
                const int slot = row / 16 * 16 + row % 8 / 2 * 4 + row % 16 / 8 * 2 + row % 2;
                char* at = reinterpret_cast<char*>(turned) + column * V_STRIDE + slot;
#pragma unroll
                for (int e = 0; e < 8; e++) at[e * V_STRIDE] = (e < 4 ? low >> 8 * e : high >> 8 * (e - 4)) & 255;
            }
        }
#pragma unroll
        for (int e = 0; e < 8; e++) shift[e] = 0;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int channel = (thread + 256 * j) / 8, chunk = thread % 8;
        const unsigned* from = turned + channel * (V_STRIDE / 4) + chunk * 4;
        *reinterpret_cast<uint4*>(to + TILE_BYTES / 2 + swizzled(channel, chunk * 16)) = make_uint4(from[0], from[1], from[2], from[3]);
    }
}
