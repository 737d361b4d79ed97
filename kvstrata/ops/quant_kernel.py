"""The planes codec inside a kernel: how a word of a plane becomes numbers, without a conversion. Knows nothing of pages or attention.

A masked 16-bit word is an fp16 subnormal, so a field at bit b is its code times 2**b * 2**-24, exactly: an AND for two codes. A byte
swap brings the upper fields down, and a bit select interleaves base and refinement to nibbles. What is left of the position is a
power of two a field, WEIGHT, which the caller undoes where it costs nothing. ASM picks inline assembly on pairs; its twin is for
Triton's interpreter.
"""

import triton
import triton.language as tl

OFFSET_UNIT = tl.constexpr(512.0)
"""Steps in one unit of `offset_of`."""


@triton.constexpr_function
def weight(field: int) -> int:
    """What a field counts too much once it is isolated: 1, 16, 1, 16, 4, 64, 4, 64."""
    return (16 if field % 2 else 1) * (4 if field >= 4 else 1)


@triton.jit
def weight_of(field):
    """`weight` of a tensor of fields, float32."""
    return (1 << (field % 2 * 4 + field // 4 * 2)).to(tl.float32)


@triton.jit
def mask2(w, MASK: tl.constexpr, ASM: tl.constexpr):
    """The masked bits of each word, read as fp16: the integer times 2**-24."""
    if ASM:
        mask = tl.full(w.shape, MASK, tl.uint16)
        return tl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [w, mask], dtype=tl.float16, is_pure=True, pack=2)
    return (w & MASK).to(tl.float16) * 5.9604644775390625e-08


@triton.jit
def swap_bytes(w, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $1, 0x2301;", "=r,r", [w], dtype=tl.uint16, is_pure=True, pack=2)
    return (w >> 8) | (w << 8)


@triton.jit
def select(a, b, FIRST: tl.constexpr, ASM: tl.constexpr):
    """(a & mask) | (b & ~mask), with the mask 0xCCCC if FIRST, else 0x3333."""
    if ASM:
        if FIRST:
            return tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, $2, 0xcccccccc, 0xE4;", "=r,r,r", [a, b], dtype=tl.uint16, is_pure=True, pack=2
            )
        return tl.inline_asm_elementwise("lop3.b32 $0, $1, $2, 0x33333333, 0xE4;", "=r,r,r", [a, b], dtype=tl.uint16, is_pure=True, pack=2)
    if FIRST:
        return (a & 0xCCCC) | (b & 0x3333)
    return (a & 0x3333) | (b & 0xCCCC)


@triton.jit
def fields(base, fine, PLANES: tl.constexpr, ASM: tl.constexpr):
    """Words of a base and a refinement plane -> eight fp16 tensors, one a field: WEIGHT * code * 2**-24, where the code is
    4 * base + refinement, or 4 * base with PLANES 1 (`fine` is not read)."""
    if PLANES == 1:
        s = swap_bytes(base, ASM)
        return (mask2(base, 0x000C, ASM), mask2(base, 0x00C0, ASM), mask2(s, 0x000C, ASM), mask2(s, 0x00C0, ASM),
                mask2(base, 0x0030, ASM), mask2(base, 0x0300, ASM), mask2(s, 0x0030, ASM), mask2(s, 0x0300, ASM))  # fmt: skip
    x = select(base, fine, True, ASM)
    y = select(base, fine, False, ASM)
    xs = swap_bytes(x, ASM)
    ys = swap_bytes(y, ASM)
    return (mask2(x, 0x000F, ASM), mask2(x, 0x00F0, ASM), mask2(xs, 0x000F, ASM), mask2(xs, 0x00F0, ASM),
            mask2(y, 0x003C, ASM), mask2(y, 0x03C0, ASM), mask2(ys, 0x003C, ASM), mask2(ys, 0x03C0, ASM))  # fmt: skip


@triton.jit
def mul2(a, b, ASM: tl.constexpr):
    """fp16 product in pairs: left to itself the compiler multiplies one at a time."""
    if ASM:
        return tl.inline_asm_elementwise("mul.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2)
    return a * b


@triton.jit
def fma2(a, b, c, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.float16, is_pure=True, pack=2)
    return (a.to(tl.float32) * b.to(tl.float32) + c.to(tl.float32)).to(tl.float16)


@triton.jit
def scale_of(w, ASM: tl.constexpr):
    """Low byte of a metadata word, an unsigned float of 4 exponent and 4 mantissa bits, in the codec's units."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{.reg .b32 t; and.b32 t, $1, 0x00ff00ff; shl.b32 $0, t, 6;}", "=r,r", [w], dtype=tl.float16, is_pure=True, pack=2
        )
    return ((w & 0xFF) << 6).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def offset_of(w, ASM: tl.constexpr):
    """High byte of a metadata word: sign, 3 exponent and 4 mantissa bits, in units of OFFSET_UNIT steps."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{.reg .b32 t, c; shr.b32 t, $1, 2; and.b32 t, t, 0x1fc01fc0; lop3.b32 t, $1, 0x80008000, t, 0xEA; mov.b32 c, 0x58005800; mul.f16x2 $0, t, c;}",
            "=r,r",
            [w],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    return (((w >> 2) & 0x1FC0) | (w & 0x8000)).to(tl.uint16).to(tl.float16, bitcast=True) * 128.0


@triton.jit
def pair_scales(w):
    """Two metadata words in 32 bits -> `scale_of` both, in 32 bits."""
    return (w & 0x00FF00FF) << 6


@triton.jit
def pair_offsets(w, MIDDLE: tl.constexpr, ASM: tl.constexpr):
    """Two metadata words in 32 bits -> scale * (steps + MIDDLE) of both as fp16, in 32 bits."""
    if ASM:
        unit = tl.full(w.shape, OFFSET_UNIT, tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32) * 0x10001
        middle = tl.full(w.shape, MIDDLE, tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32) * 0x10001
        return tl.inline_asm_elementwise(
            "{.reg .b32 s, z, t; and.b32 s, $1, 0x00ff00ff; shl.b32 s, s, 6; shr.b32 z, $1, 2; and.b32 z, z, 0x1fc01fc0; "
            "lop3.b32 z, $1, 0x80008000, z, 0xEA; mov.b32 t, 0x58005800; mul.f16x2 z, z, t; fma.rn.f16x2 z, z, $2, $3; mul.f16x2 $0, s, z;}",
            "=r,r,r,r", [w, unit, middle], dtype=tl.uint32, is_pure=True, pack=1)  # fmt: skip
    out = tl.zeros_like(w)
    for i in tl.static_range(2):
        word = (w >> (16 * i)) & 0xFFFF
        z = (offset_of(word, False).to(tl.float32) * OFFSET_UNIT + MIDDLE).to(tl.float16)
        out += (scale_of(word, False) * z).to(tl.uint16, bitcast=True).to(tl.uint32) << (16 * i)
    return out


@triton.jit
def first(a, b):
    return a


@triton.jit
def pin(x):
    """The identity on a vector. A scan keeps the compiler from moving what comes before it into the layout of what comes after it:
    each thread decodes its own words and shares them out, instead of eight threads decoding the same words."""
    return tl.reshape(tl.associative_scan(tl.reshape(x, [x.shape[0], 1]), 1, first), [x.shape[0]])
