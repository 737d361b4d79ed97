// What a warp holds of a sequence and KV head while it walks pages: queries, sums, and the softmax between the two products.
//
// Tokens (then channels) lie on the M axis of both products and query heads on the N axis, 8 of them: a lane 4 g + t holds heads 2t and
// 2t + 1 of every sum. The largest logit is not followed page by page: a reference `m` is raised only when a probability reaches
// 2**(P_BITS + 8) of it, so that most pages need neither shuffles nor a rescaling of the sums.

// probabilities are relative to 2**m, times 2**P_BITS: small ones stay normal numbers in fp16, and 2**15 times a scale of V fits
constexpr float P_BITS = 7.0f;
constexpr float NOTHING = -1e30f;
// what a code counts in the sums: 2**24, for it is a subnormal, times the unit of V's scales
constexpr float VALUE_OF_CODE = 134217728.0f;

struct Sums {
    float o[D / 16][4];  // channels 16 f + g and 16 f + 8 + g: sum of p * v
    float p[4];          // sum of p of heads 2t and 2t + 1; half of the sum of p * offset
    float m[2];
};

// what a field counts too much once it is isolated: 1, 16, 1, 16, 4, 64, 4, 64
constexpr int weight(int field) { return (field % 2 ? 16 : 1) * (field >= 4 ? 4 : 1); }

// fields that the rows g and g + 8 of tile f of the sums belong to
constexpr int field_of(int tile, int half) { return D == 128 ? tile : 2 * tile + half; }

// The field that slot e of a quad lane's queries belongs to. D 128: each field has two slots, a word each; 64: fields 0, 2, 1, 3, 4, ...
constexpr int slot_field(int e) { return D == 128 ? e / 2 : e / 4 * 4 + e % 2 * 2 + e / 2 % 2; }

INLINE void clear(Sums& a) {
#pragma unroll
    for (int f = 0; f < D / 16; f++)
#pragma unroll
        for (int i = 0; i < 4; i++) a.o[f][i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) a.p[i] = 0.0f;
    a.m[0] = a.m[1] = NOTHING;
}

// sums of values -> sums in the units of codes, which hand_in (decode_merge.cuh) undoes
INLINE void to_codes(Sums& a) {
#pragma unroll
    for (int f = 0; f < D / 16; f++)
#pragma unroll
        for (int i = 0; i < 4; i++) a.o[f][i] *= (float)weight(field_of(f, i / 2)) * (1.0f / VALUE_OF_CODE);
}

template <bool BF16, int PAGES>
INLINE void exponentials(u32 (&p)[PAGES][4], const float (&s)[PAGES][2][4], const float (&unit)[2], const float (&start)[PAGES][2],
                         const Sums& a) {
#pragma unroll
    for (int i = 0; i < PAGES; i++) {
        const float base0 = start[i][0] + (P_BITS - a.m[0]), base1 = start[i][1] + (P_BITS - a.m[1]);
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const float x = exp2_fast(fmaf(s[i][r / 2][r % 2 * 2], unit[0], base0));
            const float y = exp2_fast(fmaf(s[i][r / 2][r % 2 * 2 + 1], unit[1], base1));
            p[i][r] = pack<BF16>(x, y);
        }
    }
}

// largest over the eight lanes of equal t
INLINE float max_of_rows(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 4));
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 8));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 16));
}

// Logits unit * s + start of the 32 tokens of each page -> probabilities, as operands b of the product over tokens; raises the
// reference, and rescales the sums, where one is too large. s: block r of eight rows in s[..][r / 2][r % 2 * 2 ..].
template <bool BF16, int PAGES>
INLINE void probabilities(u32 (&p)[PAGES][4], Sums& a, const float (&s)[PAGES][2][4], const float (&unit)[2],
                          const float (&start)[PAGES][2]) {
    exponentials<BF16>(p, s, unit, start, a);
    // they are not negative, so that their bits are in order; 2**15 and more, up to infinity and NaN, set the highest bit
    constexpr u32 bias = BF16 ? 0x39003900u : 0x08000800u;
    u32 top = 0;
#pragma unroll
    for (int i = 0; i < PAGES; i++)
        top = max_unsigned2(top, max_unsigned2(max_unsigned2(p[i][0], p[i][1]), max_unsigned2(p[i][2], p[i][3])));
    if (__any_sync(ALL_LANES, (top + bias & 0x80008000u) != 0)) {
        float alpha[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float m = a.m[j];
#pragma unroll
            for (int i = 0; i < PAGES; i++)
                m = fmaxf(m, fmaf(fmaxf(fmaxf(s[i][0][j], s[i][0][j + 2]), fmaxf(s[i][1][j], s[i][1][j + 2])), unit[j], start[i][j]));
            m = max_of_rows(m);
            alpha[j] = exp2_fast(a.m[j] - m);
            a.m[j] = m;
        }
#pragma unroll
        for (int f = 0; f < D / 16; f++)
#pragma unroll
            for (int i = 0; i < 4; i++) a.o[f][i] *= alpha[i % 2];
#pragma unroll
        for (int i = 0; i < 4; i++) a.p[i] *= alpha[i % 2];
        exponentials<BF16>(p, s, unit, start, a);
    }
#pragma unroll
    for (int i = 0; i < PAGES; i++)
#pragma unroll
        for (int r = 0; r < 4; r++) p[i][r] = transpose8(p[i][r]);
}

// -inf where a token's bit is cleared. live: shifted so that bit STEP * r is the token of this lane's row in block r
template <int STEP>
INLINE void keep(float (&s)[2][4], u32 live) {
#pragma unroll
    for (int r = 0; r < 4; r++)
        if (!(live >> (STEP * r) & 1)) s[r / 2][r % 2 * 2] = s[r / 2][r % 2 * 2 + 1] = __uint_as_float(0xFF800000u);
}
