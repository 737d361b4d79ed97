// Chosen tokens of stored pages into dense pages: one warp takes K or V of one page and KV head, a lane one slot of it. Tokens pass
// through shared memory, so that what is stored are whole rows.
//
// D, HALF (fp16, else bf16, of the dense pages), K_PLANES, V_PLANES (0 and 0: the sources are dense) and WARPS are compile-time options.

#include "write_codec.cuh"

constexpr int C = D / 8, ROW = 2 * D, TENSOR = 32 * ROW, FRAME = 8 * D + D + 32;
constexpr int EIGHTS = C / 8;  // 16-byte pieces of a field
constexpr int DENSE = (2 * TENSOR + FRAME - 1) / FRAME;
constexpr int N = K_PLANES ? K_PLANES + V_PLANES : DENSE;

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

// ---- one slot -----------------------------------------------------------------------------------------------------------------

// Frames of a source page as the lane needs them: planes of K (or V), and both metadata rooms.
template <int PLANES>
struct Source {
    const char* plane[PLANES];
    const char *k_meta, *v_meta;
};

template <int PLANES>
__device__ __forceinline__ Source<PLANES> source_of(const char* arena, const int* row, long stride, bool is_v) {
    Source<PLANES> s;
#pragma unroll
    for (int i = 0; i < PLANES; ++i) s.plane[i] = arena + row[2 * i + is_v] * stride;
    s.k_meta = arena + row[0] * stride + 8 * D;
    s.v_meta = arena + row[1] * stride + 8 * D;
    return s;
}

// Sources are not written by this launch, so their loads may run ahead of its stores.
__device__ __forceinline__ uint4 load16(const char* from) { return __ldg((const uint4*)from); }
__device__ __forceinline__ uint load2(const char* from) { return __ldg((const ushort*)from); }

// Where piece `piece` (8 channels) of a slot's row lies: pieces trade places, so that 8 lanes write to different banks.
__device__ __forceinline__ char* piece_at(char* page, int slot, int piece) { return page + slot * ROW + (piece ^ slot & 7) * 16; }

template <int PLANES>
__device__ __forceinline__ void gather_k(char* page, const Source<PLANES>& s, int token, int slot) {
    uint word[PLANES][C / 2];  // the token's words, pairs of channels
#pragma unroll
    for (int i = 0; i < PLANES; ++i)
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) *(uint4*)&word[i][4 * e] = load16(s.plane[i] + token * 2 * C + 16 * e);
#pragma unroll
    for (int block = 0; block < D / 32; ++block) {
        // metadata of pieces 4 * block to 4 * block + 3, by pair of channels within a piece
        uint meta[4][4];
#pragma unroll
        for (int pair = 0; pair < 4; ++pair)
            *(uint4*)meta[pair] = load16((pair < 2 ? s.k_meta : s.v_meta) + pair % 2 * (D / 2) + 16 * block);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int piece = 4 * block + i, field = piece / EIGHTS, eighth = piece % EIGHTS;
            uint out[4];
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                int at = 4 * eighth + pair;
                uint q = nibbles(word[0][at], PLANES > 1 ? word[1 % PLANES][at] : 0, field >= 4);
                uint rest = PLANES == 4 ? nibbles(word[2 % PLANES][at], word[3 % PLANES][at], field >= 4) : 0;
                uint m = meta[pair][i];
                if (PLANES == 1) q &= 0xCCCCCCCCu;
                float a = number<PLANES>(q, rest, field % 4, 0, scale_of<(int)K_UNIT>(m), start_of<(int)K_UNIT, PLANES>(m));
                float b = number<PLANES>(q, rest, field % 4, 1, scale_of<(int)K_UNIT>(m >> 16), start_of<(int)K_UNIT, PLANES>(m >> 16));
                out[pair] = pack2(a, b);
            }
            *(uint4*)piece_at(page, slot, piece) = make_uint4(out[0], out[1], out[2], out[3]);
        }
    }
}

template <int PLANES>
__device__ __forceinline__ void gather_v(char* page, const Source<PLANES>& s, int token, int slot) {
    // inverse of frame.lane_order, of 32 tokens
    int at = token % 8 / 2 * 8 + token / 8 * 2 + token % 2;
    uint m = load2((at < 16 ? s.k_meta : s.v_meta - 32) + D + 2 * at);
    uint word[PLANES][C / 2];
#pragma unroll
    for (int i = 0; i < PLANES; ++i)
#pragma unroll
        for (int pair = 0; pair < C / 2; ++pair) {
            const char* from = s.plane[i] + pair * 128 + token * 2;
            word[i][pair] = load2(from) | load2(from + 64) << 16;
        }
    float scale = scale_of<(int)V_UNIT>(m), start = start_of<(int)V_UNIT, PLANES>(m);
#pragma unroll
    for (int eighth = 0; eighth < EIGHTS; ++eighth) {
#pragma unroll
        for (int field = 0; field < 8; ++field) {
            uint out[4];
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                int at = 4 * eighth + pair;
                uint q = nibbles(word[0][at], PLANES > 1 ? word[1 % PLANES][at] : 0, field >= 4);
                uint rest = PLANES == 4 ? nibbles(word[2 % PLANES][at], word[3 % PLANES][at], field >= 4) : 0;
                if (PLANES == 1) q &= 0xCCCCCCCCu;
                float a = number<PLANES>(q, rest, field % 4, 0, scale, start), b = number<PLANES>(q, rest, field % 4, 1, scale, start);
                out[pair] = pack2(a, b);
            }
            *(uint4*)piece_at(page, slot, field * EIGHTS + eighth) = make_uint4(out[0], out[1], out[2], out[3]);
        }
    }
}

#endif  // K_PLANES

// ---- the kernel ---------------------------------------------------------------------------------------------------------------

// rows int32 [P, N]: the source pages' frames; picks int32 [M, 32, H]: 32 * page + token, or -1 for zeros; frames int32 [M, DENSE]. Strides
// in bytes. Tasks: (page, head, K or V), the last fastest.
extern "C" __global__ void __launch_bounds__(32 * WARPS) gather_pages(char* arena, const int* rows, const int* picks, const int* frames,
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
#if K_PLANES
    extern __shared__ __align__(512) char shared[];
    char* staged = shared + warp * TENSOR;
    // an empty slot reads what the first source page holds, and stores zeros
    const int* row = rows + (long)(pick < 0 ? 0 : pick / 32) * N;
    if (is_v) gather_v<V_PLANES>(staged, source_of<V_PLANES>(arena, row, stride_frame, true), pick & 31, lane);
    else gather_k<K_PLANES>(staged, source_of<K_PLANES>(arena, row, stride_frame, false), pick & 31, lane);
    __syncwarp();
#endif
#pragma unroll 4
    for (int i = 0; i < TENSOR / 512; ++i) {
        int byte = i * 512 + lane * 16, slot = byte / ROW, piece = byte % ROW / 16, to = byte + is_v * TENSOR;
        int from = __shfl_sync(~0u, pick, slot);
        uint4 data = make_uint4(0, 0, 0, 0);
#if K_PLANES
        if (from >= 0) data = *(const uint4*)piece_at(staged, slot, piece);
#else
        int at = from % 32 * ROW + piece * 16 + is_v * TENSOR;
        if (from >= 0) data = __ldg((const uint4*)(arena + (long)rows[(long)(from / 32) * N + at / FRAME] * stride_frame + at % FRAME));
#endif
        *(uint4*)(arena + (long)__shfl_sync(~0u, id, to / FRAME) * stride_frame + to % FRAME) = data;
    }
}
