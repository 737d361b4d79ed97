// Instructions that every kernel's arithmetic uses, one function each.
__device__ __forceinline__ float exp2_fast(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

__device__ __forceinline__ float log2_fast(float x) {
    float out;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

__device__ __forceinline__ float reciprocal(float x) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// Pairs of fp16.
__device__ __forceinline__ unsigned fma2(unsigned a, unsigned b, unsigned c) {
    unsigned out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}
