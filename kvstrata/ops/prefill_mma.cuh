// Matrix products of the prefill kernel, as inline PTX: 8-bit operands for codes, bf16 for what is whole. Knows nothing of attention.

#define INTEGERS_4(d, i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define INTEGERS_16(d, i) INTEGERS_4(d, i), INTEGERS_4(d, i + 4), INTEGERS_4(d, i + 8), INTEGERS_4(d, i + 12)
#define INTEGERS_64(d) INTEGERS_16(d, 0), INTEGERS_16(d, 16), INTEGERS_16(d, 32), INTEGERS_16(d, 48)

// d [64, 128] += a [64, 32] b [128, 32]', both in shared memory, int8
DEVICE void wgmma_codes(int (&d)[64], u64 a, u64 b, bool) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 " REGISTERS_64
                 ", %64, %65, p;\n}"
                 : INTEGERS_64(d)
                 : "l"(a), "l"(b));
}
// the same in e4m3; d is overwritten unless `add`
DEVICE void wgmma_codes(float (&d)[64], u64 a, u64 b, bool add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " REGISTERS_64
                 ", %64, %65, p, 1, 1;\n}"
                 : INOUT_64(d)
                 : "l"(a), "l"(b), "r"(int(add)));
}

// d [64, 128] (+)= a [64, 32] b [128, 32]', e4m3, a in registers
DEVICE void wgmma_values(float (&d)[64], const u32* a, u64 b, bool add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " REGISTERS_64
                 ", {%64, %65, %66, %67}, %68, p, 1, 1;\n}"
                 : INOUT_64(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
}

// d [64, 64] (+)= a [64, 16] b [64, 16]', bf16, both in shared memory
DEVICE void wgmma_whole(float (&d)[32], u64 a, u64 b, bool add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " REGISTERS_32
                 ", %32, %33, p, 1, 1, 0, 0;\n}"
                 : INOUT_32(d)
                 : "l"(a), "l"(b), "r"(int(add)));
}

template <int N>
DEVICE void pin(int (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(d[i])::"memory");
}

// ---- copies that a barrier counts by their bytes
DEVICE void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void bulk_copy(u32 to, const void* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(bar)
                 : "memory");
}

// four floats as e4m3, `a` lowest
DEVICE u32 four_fp8(float a, float b, float c, float d) {
    unsigned short low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return u32(low) | u32(high) << 16;
}
DEVICE u32 four_int8(float a, float b, float c, float d) {
    return (u32(__float2int_rn(a)) & 255) | (u32(__float2int_rn(b)) & 255) << 8 | (u32(__float2int_rn(c)) & 255) << 16 |
           u32(__float2int_rn(d)) << 24;
}

// x / y, nearest: a tie between two codes falls as it does everywhere. inverse: 1 / y
DEVICE float quotient(float x, float y, float inverse) {
    const float near = x * inverse;
    return fmaf(fmaf(-near, y, x), inverse, near);
}
DEVICE float low_half(u32 x) { return __int_as_float(x << 16); }
DEVICE float high_half(u32 x) { return __int_as_float(x & 0xFFFF0000); }
