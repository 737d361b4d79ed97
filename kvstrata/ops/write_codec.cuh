// The planes codec's arithmetic (quant.py), operation by operation in float32, so that both give the same bytes.

typedef unsigned int uint;
typedef unsigned short ushort;

constexpr float LARGEST_SCALE = 1.9375f, MAX_OFFSET = 496.f, OFFSET_UNIT = 65536.f;
constexpr float K_UNIT = 64.f, V_UNIT = 8.f;
// 1.5 * 2**23: adding it rounds to the nearest integer, ties to even, and leaves that in the lowest bits
constexpr float MAGIC = 12582912.f;
constexpr int ROUNDS = 8;

// ---- 16-bit numbers -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint bits16(float x) {
    ushort h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}

__device__ __forceinline__ float number16(uint bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((ushort)bits));
    return x;
}

// Low and high element of a pair of bf16 (or, with HALF, fp16) numbers.
__device__ __forceinline__ float low(uint pair) { return HALF ? number16(pair & 0xFFFF) : __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint pair) { return HALF ? number16(pair >> 16) : __uint_as_float(pair & 0xFFFF0000u); }

__device__ __forceinline__ uint min2(uint a, uint b) {
    uint d;
    if (HALF) asm("min.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    else asm("min.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ uint max2(uint a, uint b) {
    uint d;
    if (HALF) asm("max.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    else asm("max.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// ---- the grid of a group (quant._grid) ----------------------------------------------------------------------------------------

// 1 / s, correctly rounded (s is a scale: five bits of mantissa keep it far from the middle between two floats).
__device__ __forceinline__ float reciprocal(float s) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(s));
    return fmaf(fmaf(-s, r, 1.f), r, r);
}

// x / s, correctly rounded, given r = 1 / s correctly rounded (Markstein).
__device__ __forceinline__ float divided(float x, float s, float r) {
    float q = x * r;
    return fmaf(fmaf(-q, s, x), r, q);
}

template <int UNIT>
__device__ __forceinline__ float scale_value(uint byte) { return number16(byte << 6) * UNIT; }

// Smallest code whose value is at least s.
template <int UNIT>
__device__ __forceinline__ uint scale_byte(float s) {
    uint byte = (bits16(fminf(s * (1.f / UNIT), LARGEST_SCALE)) + 63) >> 6;
    byte = min(max(byte, 1u), 255u);
    return min(scale_value<UNIT>(byte) < s ? byte + 1 : byte, 255u);
}

__device__ __forceinline__ float offset_value(uint byte) {
    float magnitude = number16((byte & 0x7F) << 6) * OFFSET_UNIT;
    return byte >= 128 ? -magnitude : magnitude;
}

// Largest code whose value is at most z.
__device__ __forceinline__ uint offset_byte(float z) {
    uint bits = bits16(fminf(fabsf(z), MAX_OFFSET) * (1.f / OFFSET_UNIT));
    bool negative = z < 0;
    uint byte = negative ? (bits + 63) >> 6 | 0x80 : bits >> 6;
    bool over = offset_value(byte) > z;
    if (negative) return over ? min(byte + 1, 0xFFu) : byte;
    return over && byte ? byte - 1 : byte;
}

// N groups at once, so that their chains of operations overlap: smallest and largest values -> scale and offset bytes. Whole warps only.
template <int UNIT, int N>
__device__ __forceinline__ void find_grids(float (&lo)[N], const float (&hi)[N], uint (&s_byte)[N], uint (&z_byte)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        lo[i] = hi[i] - lo[i] > 16 * LARGEST_SCALE * UNIT ? fmaxf(lo[i], -8 * LARGEST_SCALE * UNIT) : lo[i];
        s_byte[i] = scale_byte<UNIT>(fmaxf((hi[i] - lo[i]) * 0.0625f, divided(fabsf(lo[i]), MAX_OFFSET, 1.f / MAX_OFFSET)));
    }
    for (int round = 0;; ++round) {
        bool again = false;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float s = scale_value<UNIT>(s_byte[i]);
            z_byte[i] = offset_byte(divided(lo[i], s, reciprocal(s)) + 0.5f);
            float z = offset_value(z_byte[i]);
            // rounding the offset down uncovers the top of the range: widen the step until both ends are inside
            if ((z + 15.5f) * s < hi[i] && s_byte[i] < 255 && round < ROUNDS) {
                uint wider = max(s_byte[i] + 1, scale_byte<UNIT>(divided(hi[i] - z * s, 15.5f, 1.f / 15.5f)));
                s_byte[i] = min(wider, 255u);
                again = true;
            }
        }
        // a group that is wide enough stays as it is; after the last round all offsets are found once more, for the last steps
        if (!__any_sync(~0u, again)) return;
    }
}

// ---- codes of elements --------------------------------------------------------------------------------------------------------

// What turns an element into steps from lo: x / s = x * head + x * tail, correctly rounded. `head` keeps 13 bits of 1 / s, so that its
// product with a 16-bit number's mantissa is exact; head + tail is 1 / s to 35 bits, and x / s, a quotient of an 11-bit and a 5-bit
// mantissa, lies at least 2**-31 of itself from where rounding changes.
struct Grid {
    float head, tail, offset;
};

// Steps are counted in sixteenths of themselves: saturation to [0, 1] then clamps them for nothing.
constexpr float STEP = 0.0625f;

template <int UNIT>
__device__ __forceinline__ Grid make_grid(uint s_byte, uint z_byte) {
    float s = scale_value<UNIT>(s_byte), r = reciprocal(s);
    float head = __uint_as_float(__float_as_uint(r) & 0xFFFFF800u);
    float tail = fmaf(-s, head, 1.f) * r;
    return {head * STEP, tail * STEP, -offset_value(z_byte) * STEP};
}

// The 4-bit code of x in the lowest bits, and with four planes that of its residual. Either may be 16: pairs of them are clamped.
template <int PLANES>
__device__ __forceinline__ uint code(float x, const Grid& g, uint& fine) {
    float steps = fmaf(x, g.tail, __fmul_rn(x, g.head));
    float rounded = fmaf(__saturatef(__fadd_rn(steps, g.offset)), 16.f, MAGIC);
    if (PLANES == 4) {
        rounded = fminf(rounded, MAGIC + 15.f);
        float rest = fmaf(__fsub_rn(rounded, MAGIC), -STEP, __fadd_rn(steps, g.offset));
        fine = __float_as_uint(fmaf(__saturatef(fmaf(rest, 16.f, 7.5f / 16)), 16.f, MAGIC));
    }
    return __float_as_uint(rounded);
}

__device__ __forceinline__ uint min_codes(uint q) {
    asm("min.u16x2 %0, %0, %1;" : "+r"(q) : "r"(0x000F000Fu));
    return q;
}

// Codes of two neighbouring channels in the halves of a word.
template <int PLANES>
__device__ __forceinline__ uint codes(uint pair, const Grid& a, const Grid& b, uint& fine) {
    uint fine_a = 0, fine_b = 0;
    uint code_a = code<PLANES>(low(pair), a, fine_a), code_b = code<PLANES>(high(pair), b, fine_b);
    uint q = __byte_perm(code_a, code_b, 0x5410);
    if (PLANES < 4) return min_codes(q);
    fine = min_codes(__byte_perm(fine_a, fine_b, 0x5410));
    return q;
}

// Nibbles of fields 0 to 3 and 4 to 7 of two words -> the base (FINE false) or refinement plane's words (frame.py's order of bits).
template <bool FINE>
__device__ __forceinline__ uint plane_word(uint low_fields, uint high_fields) {
    uint y = (high_fields << 2 & 0xFFFCFFFCu) | (high_fields >> 14 & 0x00030003u);
    return FINE ? (low_fields & 0x33333333u) | (y & 0xCCCCCCCCu) : (low_fields & 0xCCCCCCCCu) | (y & 0x33333333u);
}
