// Chosen tokens of stored pages into dense pages. D, HALF (fp16, else bf16, of the dense pages), K_PLANES, V_PLANES (0 and 0: the sources
// are dense) and WARPS are compile-time options.
//
// Sources of planes are taken page by page: a token's V lies in a sector of its own for each pair of channels, so a slot that fetched
// its token alone would read the page's whole V for it. First each token of a source page is told who wants it (`link`), then a warp
// takes one page of one KV head through shared memory and writes the rows of all that do.

#include "write_codec.cuh"

constexpr int C = D / 8, ROW = 2 * D, TENSOR = 32 * ROW, PLANE = 8 * D, META = D + 32, FRAME = PLANE + META;
constexpr int DENSE = (2 * TENSOR + FRAME - 1) / FRAME;

#if K_PLANES

__device__ __forceinline__ uint pack2(float a, float b) {
    uint d;
    if (HALF) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(b), "f"(a));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(b), "f"(a));
    return d;
}

// ---- words to numbers ---------------------------------------------------------------------------------------------------------

// Words of two channels of a base and a refinement plane -> nibbles of fields 0 to 3 (upper false) or 4 to 7.
__device__ __forceinline__ uint nibbles(uint base, uint fine, bool upper) {
    if (!upper) return (base & 0xCCCCCCCCu) | (fine & 0x33333333u);
    uint y = (base & 0x33333333u) | (fine & 0xCCCCCCCCu);
    return (y >> 2 & 0x3FFF3FFFu) | (y << 14 & 0xC000C000u);
}

template <int UNIT>
__device__ __forceinline__ float scale_of(uint word) { return number16((word & 0xFF) << 6) * UNIT; }

// Offset in steps.
__device__ __forceinline__ float offset_of(uint word) { return number16((word >> 2 & 0x1FC0) | (word & 0x8000)) * OFFSET_UNIT; }

// scale * (offset + middle): what a code of zero stands for. Exact, as everything here is.
template <int UNIT, int PLANES>
__device__ __forceinline__ float start_of(uint word) {
    return scale_of<UNIT>(word) * (offset_of(word) + (PLANES == 1 ? 1.5f : PLANES == 2 ? 0.f : -7.5f / 16));
}

// A nibble's number: the nibble at `bit` of a word.
__device__ __forceinline__ float nibble(uint word, int bit) { return __uint_as_float((word >> bit & 15u) | 0x4B000000u) - 8388608.f; }

// Number of field f (of four) in the low (or high) half of a word of codes, and of residuals.
template <int PLANES>
__device__ __forceinline__ float number(uint q, uint rest, int f, int half, float scale, float start) {
    float x = fmaf(nibble(q, 4 * f + 16 * half), scale, start);
    return PLANES == 4 ? fmaf(nibble(rest, 4 * f + 16 * half), scale * 0.0625f, x) : x;
}

// ---- pages --------------------------------------------------------------------------------------------------------------------

constexpr int N = K_PLANES + V_PLANES;
constexpr int PIECES = D / 8;          // 16-byte pieces of a row: a lane writes one of them
constexpr int AT_ONCE = 32 / PIECES;   // tokens
constexpr int EIGHTS = C / 8;          // pieces of a field
constexpr int WANTED = N * PLANE + 2 * META;  // byte of a warp's shared memory at which the list of wanted tokens lies

__device__ __forceinline__ uint load2(const char* from) { return *(const ushort*)from; }

// Where piece `piece` of a slot's row of K (or V) lies. slot: 32 * page + slot
__device__ __forceinline__ char* row_piece(char* arena, const int* frames, int stride_frame, int slot, bool is_v, int piece) {
    uint byte = is_v * TENSOR + slot % 32 * ROW + piece * 16, at = byte / FRAME;
    return arena + (long)__ldg(frames + (long)(slot / 32) * DENSE + at) * stride_frame + (byte - at * FRAME);
}

// picks int32 [M, 32, H]: 32 * page + token of the source, or -1 for zeros, which are written here. first int32 [P, H, 32], zeros before:
// 1 + the place in picks of one that wants the token; next int32 [M, 32, H]: of another one, or 0.
extern "C" __global__ void link(const int* picks, int* first, int* next, char* arena, const int* frames, int stride_frame, int stride_head,
                                int heads, int count) {
    int i = blockIdx.x * (32 * WARPS) + threadIdx.x;
    if (i >= count) return;
    int pick = picks[i], head = i % heads;
    if (pick >= 0) {
        next[i] = atomicExch(first + ((long)(pick / 32) * heads + head) * 32 + pick % 32, i + 1);
        return;
    }
    arena += (long)head * stride_head;
    for (int piece = 0; piece < 2 * PIECES; ++piece)
        *(uint4*)row_piece(arena, frames, stride_frame, i / heads, piece >= PIECES, piece % PIECES) =
            make_uint4(0, 0, 0, 0);
}

// rows int32 [P, N]: the source pages' frames; frames int32 [M, DENSE]; first and next: what `link` has left. Strides in bytes. Tasks:
// (source page, head), the last fastest.
extern "C" __global__ void __launch_bounds__(32 * WARPS) gather_planes(char* arena, const int* rows, const int* first, const int* next,
                                                                      const int* frames, int stride_frame, int stride_head, int heads,
                                                                      int tasks) {
    extern __shared__ __align__(16) char shared[];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int task = blockIdx.x * WARPS + warp;
    if (task >= tasks) return;
    int wants = first[(long)task * 32 + lane];
    if (!__any_sync(~0u, wants)) return;
    arena += (long)(task % heads) * stride_head;
    char* page = shared + warp * (WANTED + 256);
    int2* wanted = (int2*)(page + WANTED);
    int id = lane < N ? rows[(long)(task / heads) * N + lane] : 0;
    // sources are not written by this launch
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const char* from = arena + (long)__shfl_sync(~0u, id, i) * stride_frame;
#pragma unroll
        for (int at = lane * 16; at < PLANE; at += 512) *(uint4*)(page + i * PLANE + at) = __ldg((const uint4*)(from + at));
        if (i < 2 && lane < META / 16) *(uint4*)(page + N * PLANE + i * META + lane * 16) = __ldg((const uint4*)(from + PLANE + lane * 16));
    }
    const char* meta = page + N * PLANE;
    int piece = lane % PIECES, field = piece / EIGHTS, eighth = piece % EIGHTS;
    bool upper = field >= 4;
    field %= 4;
    __syncwarp();
    // K's grids of the eight channels of this lane's piece
    float scale[8], start[8];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        uint m = *(const uint*)(meta + pair / 2 * META + pair % 2 * (D / 2) + 4 * piece);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            scale[2 * pair + half] = scale_of<(int)K_UNIT>(m >> 16 * half);
            start[2 * pair + half] = start_of<(int)K_UNIT, K_PLANES>(m >> 16 * half);
        }
    }
    while (true) {
        int another = wants ? next[wants - 1] : 0;
        uint mask = __ballot_sync(~0u, wants != 0);
        if (!mask) return;
        if (wants) wanted[__popc(mask & (1u << lane) - 1)] = make_int2(lane, (wants - 1) / heads);
        __syncwarp();
        for (int k = lane / PIECES; k < __popc(mask); k += AT_ONCE) {
            int token = wanted[k].x, slot = wanted[k].y;
            uint out[4];
            uint4 words[K_PLANES];
#pragma unroll
            for (int p = 0; p < K_PLANES; ++p) words[p] = *(const uint4*)(page + 2 * p * PLANE + token * 2 * C + 16 * eighth);
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const auto word = [&](int p) { return pair == 0 ? words[p].x : pair == 1 ? words[p].y : pair == 2 ? words[p].z : words[p].w; };
                uint q = nibbles(word(0), K_PLANES > 1 ? word(1 % K_PLANES) : 0, upper);
                uint rest = K_PLANES == 4 ? nibbles(word(2 % K_PLANES), word(3 % K_PLANES), upper) : 0;
                if (K_PLANES == 1) q &= 0xCCCCCCCCu;
                out[pair] = pack2(number<K_PLANES>(q, rest, field, 0, scale[2 * pair], start[2 * pair]),
                                  number<K_PLANES>(q, rest, field, 1, scale[2 * pair + 1], start[2 * pair + 1]));
            }
            *(uint4*)row_piece(arena, frames, stride_frame, slot, false, piece) = make_uint4(out[0], out[1], out[2], out[3]);
            // inverse of frame.lane_order, of 32 tokens
            int at = token % 8 / 2 * 8 + token / 8 * 2 + token % 2;
            uint m = load2(meta + at / 16 * META + D + 2 * (at % 16));
            float v_scale = scale_of<(int)V_UNIT>(m), v_start = start_of<(int)V_UNIT, V_PLANES>(m);
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const auto word = [&](int p) {
                    const char* from = page + (2 * p + 1) * PLANE + (8 * eighth + 2 * pair) * 64 + token * 2;
                    return load2(from) | load2(from + 64) << 16;
                };
                uint q = nibbles(word(0), V_PLANES > 1 ? word(1 % V_PLANES) : 0, upper);
                uint rest = V_PLANES == 4 ? nibbles(word(2 % V_PLANES), word(3 % V_PLANES), upper) : 0;
                if (V_PLANES == 1) q &= 0xCCCCCCCCu;
                out[pair] = pack2(number<V_PLANES>(q, rest, field, 0, v_scale, v_start), number<V_PLANES>(q, rest, field, 1, v_scale, v_start));
            }
            *(uint4*)row_piece(arena, frames, stride_frame, slot, true, piece) = make_uint4(out[0], out[1], out[2], out[3]);
        }
        __syncwarp();
        wants = another;
    }
}

#else

// rows int32 [P, DENSE]: the source pages' frames; picks int32 [M, 32, H]: 32 * page + token, or -1 for zeros; frames int32 [M, DENSE].
// Strides in bytes. One warp takes K or V of one page and KV head. Tasks: (page, head, K or V), the last fastest.
extern "C" __global__ void __launch_bounds__(32 * WARPS) gather_dense(char* arena, const int* rows, const int* picks, const int* frames,
                                                                     int stride_frame, int stride_head, int heads, int tasks) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int task = blockIdx.x * WARPS + warp;
    if (task >= tasks) return;
    bool is_v = task & 1;
    int head = task / 2 % heads;
    long page = task / 2 / heads;
    arena += (long)head * stride_head;
    int pick = picks[(page * 32 + lane) * heads + head];
    int id = lane < DENSE ? frames[page * DENSE + lane] : 0;
#pragma unroll 4
    for (int i = 0; i < TENSOR / 512; ++i) {
        int byte = i * 512 + lane * 16, slot = byte / ROW, piece = byte % ROW / 16, to = byte + is_v * TENSOR;
        int from = __shfl_sync(~0u, pick, slot);
        uint4 data = make_uint4(0, 0, 0, 0);
        int at = from % 32 * ROW + piece * 16 + is_v * TENSOR;
        if (from >= 0) data = __ldg((const uint4*)(arena + (long)rows[(long)(from / 32) * DENSE + at / FRAME] * stride_frame + at % FRAME));
        *(uint4*)(arena + (long)__shfl_sync(~0u, id, to / FRAME) * stride_frame + to % FRAME) = data;
    }
}

#endif
