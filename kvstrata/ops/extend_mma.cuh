// What Hopper's matrix units ask for, as inline PTX: shared-memory descriptors, wgmma, barriers. Knows nothing of attention.
using u32 = unsigned;
using u64 = unsigned long long;

#define DEVICE __device__ __forceinline__

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// ---- barriers: a phase ends when `count` threads have arrived; `parity` names the phase waited for
DEVICE void barrier_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count)); }

DEVICE void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }

DEVICE void barrier_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(bar),
        "r"(parity)
        : "memory");
}

// threads of one warp group
DEVICE void group_sync(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }

// ordinary stores before, matrix units' reads after
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int REGISTERS>
DEVICE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
DEVICE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

// ---- shared memory
DEVICE void store16(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void store4(u32 at, u32 a) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(a) : "memory"); }
DEVICE void store2(u32 at, u32 a) { asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"(static_cast<unsigned short>(a)) : "memory"); }
DEVICE uint4 load16(u32 at) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at) : "memory");
    return x;
}
// 16 bytes from global memory on their way, zeros unless `keep`
DEVICE void copy16(u32 at, const void* from, bool keep) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(__cvta_generic_to_global(from)), "r"(keep ? 16 : 0)
                 : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// ---- wgmma. Operand tiles lie in panels of rows of 128 bytes, 16-byte chunks swizzled by the row (chunk ^ row % 8)
// a row is one M or N, 64 K to a panel: 1024 bytes lead to the next eight rows
DEVICE u64 describe_k_major(u32 at) { return u64((at & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62); }
// a row is one K, 64 columns to a panel: `panel` bytes lead to the next 64 columns, 1024 to the next eight K
DEVICE u64 describe_n_major(u32 at, u32 panel) {
    return u64((at & 0x3FFFF) >> 4) | (u64(panel >> 4) << 16) | (64ull << 32) | (1ull << 62);
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
// keeps reads of accumulators behind the wait that precedes it
template <int N>
DEVICE void pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#define REGISTERS_64 \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#define REGISTERS_32 \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define INOUT_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define INOUT_16(d, i) INOUT_4(d, i), INOUT_4(d, i + 4), INOUT_4(d, i + 8), INOUT_4(d, i + 12)
#define INOUT_32(d) INOUT_16(d, 0), INOUT_16(d, 16)
#define INOUT_64(d) INOUT_16(d, 0), INOUT_16(d, 16), INOUT_16(d, 32), INOUT_16(d, 48)

// d [64, 128] (+)= a [64, 16] b [128, 16]', both in shared memory; d is overwritten unless `add`
#define WGMMA_SS(TYPE)                                                                                                              \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE             \
                 " " REGISTERS_64 ", %64, %65, p, 1, 1, 0, 0;\n}"                                                                   \
                 : INOUT_64(d)                                                                                                      \
                 : "l"(a), "l"(b), "r"(int(add)))
template <bool BF16_>
DEVICE void wgmma_ss(float (&d)[64], u64 a, u64 b, bool add) {
    if constexpr (BF16_) WGMMA_SS("bf16");
    else WGMMA_SS("f16");
}

// d [64, N] += a [64, 16] b; a in registers; b by its descriptor, N-major if ROWS
#define WGMMA_RS(TYPE, N, D, REGISTERS, A0, A1, A2, A3, B, T)                                                                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE              \
                 " " REGISTERS ", {" A0 ", " A1 ", " A2 ", " A3 "}, " B ", p, 1, 1, " T ";\n}"                                       \
                 : D(d)                                                                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(ROWS)))
#define WGMMA_RS_64(TYPE) WGMMA_RS(TYPE, "128", INOUT_64, REGISTERS_64, "%64", "%65", "%66", "%67", "%68", "%69")
#define WGMMA_RS_32(TYPE) WGMMA_RS(TYPE, "64", INOUT_32, REGISTERS_32, "%32", "%33", "%34", "%35", "%36", "%37")
template <bool BF16_, bool ROWS>
DEVICE void wgmma_rs(float (&d)[64], const u32* a, u64 b) {
    if constexpr (BF16_) WGMMA_RS_64("bf16");
    else WGMMA_RS_64("f16");
}
template <bool BF16_, bool ROWS>
DEVICE void wgmma_rs(float (&d)[32], const u32* a, u64 b) {
    if constexpr (BF16_) WGMMA_RS_32("bf16");
    else WGMMA_RS_32("f16");
}

// two floats as a pair of 16-bit numbers, `a` low
template <bool BF16_>
DEVICE u32 pair(float a, float b) {
    u32 x;
    if constexpr (BF16_) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(b), "f"(a));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(b), "f"(a));
    return x;
}
