// Tokens into dense pages: a copy of rows, 16 bytes a thread; V may be rotated on its way. ROW (bytes of a head's token), FRAME (bytes of a
// frame), N (frames of a dense page), LANES (threads that share a block of V's rotation; 0: V goes as it is), HALF (fp16, else bf16: what is
// rotated) and SCALE (of the rotation) are compile-time options.

typedef unsigned int uint;
typedef unsigned short ushort;

constexpr int CHUNKS = ROW / 16, TOKENS = 32, THREADS = 256;
constexpr int ALL = 2 * TOKENS * CHUNKS, EACH = (ALL + THREADS - 1) / THREADS;

__device__ __forceinline__ float number(uint bits) {
    float x;
    if (HALF) asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((ushort)bits));
    else x = __uint_as_float(bits << 16);
    return x;
}

__device__ __forceinline__ uint pair(float low, float high) {
    uint bits;
    if (HALF) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

// Eight channels of a block of 8 * LANES, spread over as many threads side by side, times the Hadamard matrix: by sums and differences.
__device__ __forceinline__ uint4 rotated(uint4 data) {
    uint* words = (uint*)&data;
    float x[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[2 * i] = number(words[i] & 0xFFFF), x[2 * i + 1] = number(words[i] >> 16);
#pragma unroll
    for (int step = 1; step < 8; step *= 2)
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (!(i & step)) {
                float a = x[i], b = x[i + step];
                x[i] = a + b, x[i + step] = a - b;
            }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float other = __shfl_xor_sync(0xFFFFFFFFu, x[i], step);
            x[i] = threadIdx.x & step ? other - x[i] : x[i] + other;
        }
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pair(x[2 * i] * SCALE, x[2 * i + 1] * SCALE);
    return data;
}

// A block takes K and V of 32 tokens of one KV head. k, v [tokens, H, D] with strides in bytes, frames int32 [tokens, N] of each token's
// page, inside int32 [tokens] (0 to 31).
extern "C" __global__ void __launch_bounds__(THREADS) write_dense(
    const char* k, const char* v, char* arena, const int* frames, const int* inside, int stride_kt, int stride_kh, int stride_vt,
    int stride_vh, int stride_frame, int stride_head, int heads, int tokens) {
    int head = blockIdx.x % heads, first = blockIdx.x / heads * TOKENS;
    k += (long)head * stride_kh;
    v += (long)head * stride_vh;
    arena += (long)head * stride_head;
    uint4 data[EACH];
    char* to[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int at = i * THREADS + threadIdx.x, chunk = at % CHUNKS, token = first + at / CHUNKS % TOKENS;
        bool is_v = at >= TOKENS * CHUNKS;
        to[i] = 0;
        data[i] = make_uint4(0, 0, 0, 0);
        if (at >= ALL || token >= tokens) continue;
        data[i] = *(const uint4*)((is_v ? v + (long)token * stride_vt : k + (long)token * stride_kt) + chunk * 16);
        int byte = inside[token] * ROW + chunk * 16 + (is_v ? 32 * ROW : 0);
        to[i] = arena + (long)frames[(long)token * N + byte / FRAME] * stride_frame + byte % FRAME;
    }
    // a warp has rows of K or of V alone: 32 tokens take whole warps
    if (LANES)
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (i * THREADS + threadIdx.x >= TOKENS * CHUNKS) data[i] = rotated(data[i]);
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (to[i]) *(uint4*)to[i] = data[i];
}
