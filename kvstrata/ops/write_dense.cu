// Tokens into dense pages: a copy of rows, 16 bytes a thread. ROW (bytes of a head's token), FRAME (bytes of a frame), N (frames of a dense
// page) are compile-time options.

typedef unsigned int uint;

constexpr int CHUNKS = ROW / 16, TOKENS = 32, THREADS = 256;
constexpr int ALL = 2 * TOKENS * CHUNKS, EACH = (ALL + THREADS - 1) / THREADS;

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
        if (at >= ALL || token >= tokens) continue;
        data[i] = *(const uint4*)((is_v ? v + (long)token * stride_vt : k + (long)token * stride_kt) + chunk * 16);
        int byte = inside[token] * ROW + chunk * 16 + (is_v ? 32 * ROW : 0);
        to[i] = arena + (long)frames[(long)token * N + byte / FRAME] * stride_frame + byte % FRAME;
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (to[i]) *(uint4*)to[i] = data[i];
}
