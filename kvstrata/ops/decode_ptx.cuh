// Instructions that C++ has no name for, and what every part of decode.cu shares. Knows nothing of pages.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

constexpr int D = HEAD_DIM;
constexpr u32 ALL_LANES = 0xFFFFFFFFu;

#define INLINE __device__ __forceinline__

template <int N>
struct Index {
    static constexpr int value = N;
};

// ---- products ------------------------------------------------------------------------------------------------------------------

// c [16, 8] += a [16, 16] * b [16, 8]: of a lane 4 g + t, c holds rows g and g + 8, columns 2t and 2t + 1; a (row g, columns 2t, 2t + 1),
// (row g + 8, same), (row g, columns 2t + 8, 2t + 9), (row g + 8, same); b column g, rows 2t, 2t + 1 and 2t + 8, 2t + 9
template <bool BF16>
INLINE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if constexpr (BF16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}

// 8 x 8 numbers of 16 bits, a pair a lane: row g, columns 2t and 2t + 1 -> column g, rows 2t and 2t + 1
INLINE u32 transpose8(u32 x) {
    u32 out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(x));
    return out;
}

// ---- numbers in pairs ----------------------------------------------------------------------------------------------------------

template <bool BF16>
INLINE u32 pack(float lo, float hi) {
    u32 out;
    if constexpr (BF16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
    }
    return out;
}

INLINE u32 pack(float lo, float hi, bool bf16) { return bf16 ? pack<true>(lo, hi) : pack<false>(lo, hi); }

INLINE float unpack(u16 x, bool bf16) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x));
    return bf16 ? __uint_as_float((u32)x << 16) : out;
}

INLINE u32 mul2(u32 a, u32 b) {
    u32 out;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

INLINE u32 max_unsigned2(u32 a, u32 b) {
    u32 out;
    asm("max.u16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

INLINE u32 swap_bytes(u32 w) { return __byte_perm(w, w, 0x2301); }

// asks for `bytes` (whole 16 bytes) to be in the L2 cache
INLINE void prefetch_l2(const u8* x, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(x), "r"(bytes));
}

INLINE void prefetch_l2(const u8* x) { asm volatile("prefetch.global.L2 [%0];" ::"l"(x)); }

// The same value, which the compiler cannot compute anew where it is needed: it stays in a register. All lanes call it together.
INLINE u32 fixed(u32 x) {
    asm volatile("{.reg .u32 lane; mov.u32 lane, %%laneid; shfl.sync.idx.b32 %0, %0, lane, 31, -1;}" : "+r"(x));
    return x;
}

INLINE const u8* fixed(const u8* x) {
    const u64 y = (u64)x;
    return (const u8*)((u64)fixed((u32)(y >> 32)) << 32 | fixed((u32)y));
}

// ---- shared memory, by address -------------------------------------------------------------------------------------------------

INLINE u32 load(u32 from) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from));
    return x;
}

INLINE uint2 load2(u32 from) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from));
    return x;
}

INLINE uint4 load4(u32 from) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from));
    return x;
}

INLINE void store(u32 to, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory"); }

INLINE void store(u32 to, u32 x, u32 y) { asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(to), "r"(x), "r"(y) : "memory"); }

INLINE void store(u32 to, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// 16 bytes from global to shared memory, past the L1 cache, and first to leave L2: they are read once. `to` must not be a sum of a register
// and one of a warp, for which NVRTC 13.0 makes an illegal instruction where there is a policy (a test looks for it): see fixed
INLINE void copy16(u32 to, const u8* from) {
    asm volatile("{.reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
                 "cp.async.cg.shared.global.L2::cache_hint.L2::64B [%0], [%1], 16, policy;}" ::"r"(to), "l"(from) : "memory");
}

INLINE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// waits until all but the newest N groups of this lane's copies have arrived
template <int N>
INLINE void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// four 8 x 8 matrices of 16-bit numbers, lane i naming row i % 8 of matrix i / 8
template <bool TRANSPOSED>
INLINE void load_matrices(u32 (&x)[4], u32 row) {
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row));
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row));
    }
}
