// A warp's walk over pages of planes of one tier. The layout is that of frame.py, the numbers those of quant_kernel.py:
//     codes      a masked 16-bit word is an fp16 subnormal, a code * weight * 2**-24: one AND for two
//     queries    q * 2**14 / (weight * factor), times K's scales page by page
//     offsets    of K: a product with eight equal rows, steps * weight / 128; of V: rows of the product that sums p
// Codes go from memory to shared memory page by page, several pages ahead, and from there to registers once. The metadata of a page
// is decoded once, two or three words a lane, and shared out through shared memory in the order of the operands.

constexpr int PLANE = 8 * D;            // bytes of a plane of one KV head
constexpr int META = D + 32;            // bytes of metadata in a base frame
constexpr int FRAME = PLANE + META;     // bytes of a frame of one KV head
constexpr int DECODED = 4 * D + 128;    // bytes of a page's decoded metadata: K's scales, K's steps, V's scales and offsets
constexpr int MOST_STAGES = 6;

template <int N>
constexpr int stage_bytes() {
    return N * PLANE + 2 * META;
}

template <int N>
constexpr int stages() {
    return RING / stage_bytes<N>() < MOST_STAGES ? RING / stage_bytes<N>() : MOST_STAGES;
}

struct Warp {
    u32 ring;  // address of its RING bytes, which DECODED bytes follow
    int index, lane;
};

// ---- loading -------------------------------------------------------------------------------------------------------------------

// Where this lane's copies of frame 0 of this KV head begin: 16 bytes of its codes, and of a base frame's metadata (lanes below
// META / 16 the first frame's, as many others the second's).
struct Sources {
    const u8 *codes, *metadata;

    INLINE Sources(const u8* arena, int lane)
        : codes(fixed(arena + lane * 16)), metadata(fixed(arena + PLANE + lane * 16 - (lane < META / 16 ? 0 : META))) {}
};

// Starts the copies of a page to a stage: N planes, then the metadata of the first two frames. to: plus 16 bytes a lane
template <int N>
INLINE void fetch(u32 to, const Sources& from, u32 stride, const u32 (&frames)[N], int lane) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        const u8* codes = from.codes + (u64)frames[i] * stride;
#pragma unroll
        for (int j = 0; j < PLANE / 512; j++) copy16(to + i * PLANE + j * 512, codes + j * 512);
    }
    if (lane < META / 8) copy16(to + N * PLANE, from.metadata + (u64)(lane < META / 16 ? frames[0] : frames[1]) * stride);
}

template <int N>
INLINE void look_up(u32 (&frames)[N], const int* row) {
#pragma unroll
    for (int i = 0; i < N; i++) frames[i] = (u32)__ldg(row + i);
}

// ---- metadata ------------------------------------------------------------------------------------------------------------------

// Two metadata words -> their scales in fp16, in the codec's units
INLINE u32 scales_of(u32 w) { return (w & 0x00FF00FFu) << 6; }

// Two metadata words -> unit * steps + middle in fp16; unit 2**16 is steps themselves
INLINE u32 steps_of(u32 w, u32 unit, u32 middle) { return fma2((w >> 2 & 0x1FC01FC0u) | (w & 0x80008000u), unit, middle); }

// middle of a cell, in steps: what a code stands for beyond its number
constexpr float middle_of(int planes) { return planes == 1 ? 1.5f : planes == 2 ? 0.0f : -7.5f / 16.0f; }

INLINE u32 twice(float x) { return pack<false>(x, x); }

// Where this lane finds its words of metadata, from the start of a stage's, and where it puts them, decoded, in the order of the
// products' operands. Slot e of a quad lane's D / 8 words of queries (and so of K's scales and steps) is one field of one of its
// words; four slots are an operand a of steps: its rows g serve slots 0 and 2 of the queries, its rows g + 8 slots 1 and 3.
struct Places {
    u32 k_from, v_from, k_to, v_to;
    u32 k_unit, k_middle;  // of the field that its channels belong to

    INLINE Places(u32 decoded, int lane, int k_planes) {
        // stored: lane t of a quad, eight channels j, pair
        const int t = D == 128 ? lane / 16 * 2 : lane / 8, j = D == 128 ? lane % 16 : lane % 8;
        const int field = D == 128 ? j / 2 : j;
        k_from = fixed(t / 2 * META + t % 2 * (D / 2) + j * 4);
        const int to_t = D == 128 ? j % 2 * 2 + t / 2 : t, slot = D == 128 ? field * 2 : field / 4 * 4 + field / 2 % 2 + field % 2 * 2;
        k_to = fixed(decoded + slot / 4 * 64 + to_t * 16 + slot % 4 * 4);
        const float w = (float)weight(field);
        k_unit = fixed(twice(512.0f * w));
        k_middle = fixed(twice(middle_of(k_planes) * w / 128.0f));
        const int s = lane % 16 / 4, i = lane % 4;
        v_from = fixed(s / 2 * META + D + s % 2 * 16 + i * 4);
        v_to = fixed(decoded + 4 * D + s / 2 * 64 + i * 16 + s % 2 * 8);
    }
};

// A stage's metadata -> decoded: K's scales and steps [D / 8 words a quad lane each], V's scales and offsets [4 pairs a quad lane]
template <int V_PLANES>
INLINE void decode_metadata(u32 metadata, const Places& at, int lane) {
    if constexpr (D == 128) {
        const u32 w0 = load(metadata + at.k_from), w1 = load(metadata + at.k_from + D / 2);
        store(at.k_to, scales_of(w0), scales_of(w1));
        store(at.k_to + 2 * D, steps_of(w0, at.k_unit, at.k_middle), steps_of(w1, at.k_unit, at.k_middle));
    } else {
        const u32 w = load(metadata + at.k_from);
        store(at.k_to, scales_of(w));
        store(at.k_to + 2 * D, steps_of(w, at.k_unit, at.k_middle));
    }
    if (lane < 16) {
        const u32 w = load(metadata + at.v_from), s = scales_of(w);
        store(at.v_to, s, mul2(s, steps_of(w, 0x78007800u, twice(middle_of(V_PLANES) / 2))));  // 0x7800: 2**15
    }
}

// ---- codes ---------------------------------------------------------------------------------------------------------------------

// Words of a base and a refinement plane -> words in which fields 2 * PAIR and 2 * PAIR + 1 can be masked
template <int PLANES, int PAIR, int N>
INLINE void bring_down(u32 (&out)[N], const u32 (&base)[N], const u32 (&fine)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        u32 w = base[i];
        if constexpr (PLANES == 2) {
            constexpr u32 mask = PAIR < 2 ? 0xCCCCCCCCu : 0x33333333u;
            w = (base[i] & mask) | (fine[i] & ~mask);
        }
        out[i] = PAIR % 2 ? swap_bytes(w) : w;
    }
}

template <int PLANES, int FIELD>
constexpr u32 mask_of() {
    constexpr u32 mask = PLANES == 1 ? (FIELD < 4 ? (FIELD % 2 ? 0x00C0 : 0x000C) : (FIELD % 2 ? 0x0300 : 0x0030))
                                     : (FIELD < 4 ? (FIELD % 2 ? 0x00F0 : 0x000F) : (FIELD % 2 ? 0x03C0 : 0x003C));
    return mask * 0x10001u;
}

constexpr int K_WORDS = D / 16;  // 32-bit words of a page's plane that a lane holds: 4 tokens
constexpr int V_WORDS = D / 16;  // and of V: 8 tokens of one or two channels a field

// s += the fields of a pair times queries. words: of token block r in [r * D / 64 ..]
template <int PLANES, int PAIR>
INLINE void scores_of(float (&s)[2][4], const u32 (&base)[K_WORDS], const u32 (&fine)[K_WORDS], const u32 (&q)[D / 8]) {
    u32 w[K_WORDS];
    bring_down<PLANES, PAIR>(w, base, fine);
    constexpr u32 m0 = mask_of<PLANES, 2 * PAIR>(), m1 = mask_of<PLANES, 2 * PAIR + 1>();
    constexpr int LANE_WORDS = D / 64;
#pragma unroll
    for (int i = 0; i < LANE_WORDS; i++) {
        constexpr int STEP = PAIR * LANE_WORDS;
        const int slot = (STEP + i) / 2 * 4 + (STEP + i) % 2;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const u32 w0 = w[2 * m * LANE_WORDS + i], w1 = w[(2 * m + 1) * LANE_WORDS + i];
            mma<false>(s[m], w0 & m0, w1 & m0, w0 & m1, w1 & m1, q[slot], q[slot + 2]);
        }
    }
}

// sums += the fields of a pair times probabilities p, blocks of 8 tokens. words: channel row g in [0, 4), g + 8 of the field in [4, 8)
template <int PLANES, int PAIR>
INLINE void weigh(Sums& a, const u32 (&base)[V_WORDS], const u32 (&fine)[V_WORDS], const u32 (&p)[4]) {
    u32 w[V_WORDS];
    bring_down<PLANES, PAIR>(w, base, fine);
    constexpr u32 m0 = mask_of<PLANES, 2 * PAIR>(), m1 = mask_of<PLANES, 2 * PAIR + 1>();
#pragma unroll
    for (int s = 0; s < 4; s += 2) {
        if constexpr (D == 128) {
            mma<false>(a.o[2 * PAIR], w[s] & m0, w[s + 4] & m0, w[s + 1] & m0, w[s + 5] & m0, p[s], p[s + 1]);
            mma<false>(a.o[2 * PAIR + 1], w[s] & m1, w[s + 4] & m1, w[s + 1] & m1, w[s + 5] & m1, p[s], p[s + 1]);
        } else {
            mma<false>(a.o[PAIR], w[s] & m0, w[s] & m1, w[s + 1] & m0, w[s + 1] & m1, p[s], p[s + 1]);
        }
    }
}

template <int PLANES>
INLINE void all_scores(float (&s)[2][4], const u32 (&base)[K_WORDS], const u32 (&fine)[K_WORDS], const u32 (&q)[D / 8]) {
    scores_of<PLANES, 0>(s, base, fine, q);
    scores_of<PLANES, 2>(s, base, fine, q);
    scores_of<PLANES, 1>(s, base, fine, q);
    scores_of<PLANES, 3>(s, base, fine, q);
}

template <int PLANES>
INLINE void all_weigh(Sums& a, const u32 (&base)[V_WORDS], const u32 (&fine)[V_WORDS], const u32 (&p)[4]) {
    weigh<PLANES, 0>(a, base, fine, p);
    weigh<PLANES, 2>(a, base, fine, p);
    weigh<PLANES, 1>(a, base, fine, p);
    weigh<PLANES, 3>(a, base, fine, p);
}

// A lane's words of a plane of K: tokens 8 * (g / 2) + 2 r + g % 2 of the blocks r, for that is where the probabilities are needed
INLINE void k_words(u32 (&w)[K_WORDS], u32 from) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
        if constexpr (D == 128) {
            const uint2 x = load2(from + r * (D / 2));
            w[2 * r] = x.x, w[2 * r + 1] = x.y;
        } else {
            w[r] = load(from + r * (D / 2));
        }
    }
}

// N words, four and four, `step` bytes apart
template <int N>
INLINE void quads(u32 (&w)[N], u32 from, u32 step) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const uint4 x = load4(from + i * step);
        w[4 * i] = x.x, w[4 * i + 1] = x.y, w[4 * i + 2] = x.z, w[4 * i + 3] = x.w;
    }
}

// ---- a page --------------------------------------------------------------------------------------------------------------------

// Addresses of this lane's words: of K and of V from the start of a plane, and of a quad lane's decoded metadata.
struct Readers {
    u32 k, v, decoded;
    int token;  // of block 0; block r: 2 r further

    INLINE Readers(u32 decoded, int lane)
        : k(fixed((lane / 8 * 8 + lane / 4 % 2) * (D / 4) + lane % 4 * (D / 16))), v(fixed(lane * 16)), decoded(fixed(decoded + lane % 4 * 16)),
          token(fixed(lane / 8 * 8 + lane / 4 % 2)) {}
};

template <int K_PLANES, int V_PLANES>
INLINE void attend_page(Sums& a, const Query& q, u32 stage, const Places& places, const Readers& from, u32 live, int lane) {
    constexpr int N = K_PLANES + V_PLANES;
    decode_metadata<V_PLANES>(stage + N * PLANE, places, lane);
    const u32 k = stage + from.k, v = stage + from.v + PLANE;
    u32 base[K_WORDS], fine[K_WORDS];
    k_words(base, k);
    if constexpr (K_PLANES > 1) k_words(fine, k + 2 * PLANE);
    __syncwarp();
    float s[2][4] = {}, offset[2][4] = {};
    u32 scaled[D / 8];
#pragma unroll
    for (int i = 0; i < D / 8; i += 4) {
        u32 scale[4], steps[4];
        quads(scale, from.decoded + i * 16, 0);
        quads(steps, from.decoded + 2 * D + i * 16, 0);
#pragma unroll
        for (int j = 0; j < 4; j++) scaled[i + j] = mul2(scale[j], q.x[i + j]);
#pragma unroll
        for (int j = 0; j < 2; j++) mma<false>(offset[j], steps[0], steps[1], steps[2], steps[3], scaled[i + j], scaled[i + j + 2]);
    }
    if constexpr (K_PLANES == 4) {
        u32 high[K_WORDS], low[K_WORDS];
        k_words(high, k + 4 * PLANE);
        k_words(low, k + 6 * PLANE);
        all_scores<2>(s, high, low, scaled);
#pragma unroll
        for (int i = 0; i < 8; i++) s[i / 4][i % 4] *= 0.0625f;
    }
    all_scores<(K_PLANES > 1 ? 2 : 1)>(s, base, fine, scaled);
    if (live != ALL_LANES) keep<2>(s, live >> from.token);
    u32 p[4], scaled_p[4], rows[8];
    // 2**-17: steps are in units of 128, codes in units of 2**-24
    probabilities<false>(p, a, s, q.unit, (offset[0][0] + offset[1][2]) * (q.unit[0] * 0x1p-17f), (offset[0][1] + offset[1][3]) * (q.unit[1] * 0x1p-17f));
    quads(rows, from.decoded + 4 * D, 64);
    constexpr u32 one = 0x3C003C00u;
#pragma unroll
    for (int r = 0; r < 4; r++) scaled_p[r] = mul2(p[r], rows[2 * r]);
    mma<false>(a.p, one, rows[1], one, rows[3], p[0], p[1]);
    mma<false>(a.p, one, rows[5], one, rows[7], p[2], p[3]);
    u32 v_base[V_WORDS], v_fine[V_WORDS];
    quads(v_base, v, 512);
    if constexpr (V_PLANES > 1) quads(v_fine, v + 2 * PLANE, 512);
    all_weigh<(V_PLANES > 1 ? 2 : 1)>(a, v_base, v_fine, scaled_p);
    if constexpr (V_PLANES == 4) {
        quads(v_base, v + 4 * PLANE, 512);
        quads(v_fine, v + 6 * PLANE, 512);
#pragma unroll
        for (int r = 0; r < 4; r++) scaled_p[r] = mul2(scaled_p[r], 0x2C002C00u);  // 1 / 16
        all_weigh<2>(a, v_base, v_fine, scaled_p);
    }
}

// Frames of pages in turn, and their masks, one page ahead of where they are needed. left: how many pages may still be looked up
template <int N>
struct Table {
    const int* row;
    u32 frames[N];
    int left;

    INLINE void next() {
        if (left-- > 0) {
            look_up<N>(frames, row);
            row += WARPS * N;
        }
    }
};

struct Masks {
    const u32* at;
    int stride, left;

    INLINE u32 next() {
        u32 mask = ALL_LANES;
        if (left-- > 0) {
            mask = __ldg(at);
            at += stride;
        }
        return mask;
    }
};

// Pages first, first + WARPS, ... of `count` of one sequence. frames: of its page 0, K_PLANES + V_PLANES a page; live: its masks for
// this KV head, live_stride words apart, or nullptr.
template <int K_PLANES, int V_PLANES>
INLINE void attend_planes(Sums& a, const Query& q, const Warp& warp, const u8* arena, u32 stride, const int* frames, const u32* live,
                          int live_stride, int first, int count) {
    constexpr int N = K_PLANES + V_PLANES, STAGE = stage_bytes<N>(), STAGES = stages<N>();
    static_assert(STAGES >= 1, "RING holds no page");
    const Places places(warp.ring + RING, warp.lane, K_PLANES);
    const Readers readers(warp.ring + RING, warp.lane);
    const Sources sources(arena, warp.lane);
    Table<N> table{frames + (i64)first * N, {}, count};
    Masks masks{live + (i64)first * live_stride, WARPS * live_stride, live ? count : 0};
    u32 alive = masks.next();
    __syncwarp();
    if constexpr (STAGES == 1) {
#pragma unroll 1
        for (int k = 0; k < count; k++) {
            table.next();
            fetch<N>(warp.ring + warp.lane * 16, sources, stride, table.frames, warp.lane);
            copies_commit();
            copies_wait<0>();
            __syncwarp();
            const u32 now = alive;
            alive = masks.next();
            attend_page<K_PLANES, V_PLANES>(a, q, warp.ring, places, readers, now, warp.lane);
            __syncwarp();
        }
    } else {
        constexpr int AHEAD = STAGES - 1;
        u32 early[AHEAD][N];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            table.next();
#pragma unroll
            for (int i = 0; i < N; i++) early[k][i] = table.frames[i];
        }
        table.next();
        const u32 ring = fixed(warp.ring), to = fixed(warp.ring + warp.lane * 16);
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (k < count) fetch<N>(to + k * STAGE, sources, stride, early[k], warp.lane);
            copies_commit();
        }
        u32 stage = 0, free = AHEAD * STAGE;
#pragma unroll 1
        for (int k = count; k > 0; k--) {
            copies_wait<STAGES - 2>();
            // every lane's copies have arrived, and every lane is done with the stage before
            __syncwarp();
            if (k > AHEAD) fetch<N>(to + free, sources, stride, table.frames, warp.lane);
            copies_commit();
            table.next();
            const u32 now = alive;
            alive = masks.next();
            attend_page<K_PLANES, V_PLANES>(a, q, ring + stage, places, readers, now, warp.lane);
            free = stage;
            stage = stage == AHEAD * STAGE ? 0 : stage + STAGE;
        }
    }
}
