// A warp's walk over pages of planes of one tier. The layout is that of frame.py, the numbers those of quant_kernel.py:
//     codes      a masked 16-bit word is an fp16 subnormal, a code * weight * 2**-24: one AND for two
//     queries    q * 2**14 / (weight * factor), times K's scales page by page
//     offsets    of K: a product with eight equal rows, steps * weight / 128; of V: rows of the product that sums p
// Codes go from memory to shared memory, pages ahead of their use, and from there to registers once. The metadata of a page is decoded
// once, a few words a lane, and shared out through shared memory in the order of the operands. Two pages are attended at a time where
// they fit: their chains of products do not wait for one another.

constexpr int PLANE = 8 * D;            // bytes of a plane of one KV head
constexpr int META = D + 32;            // bytes of metadata in a base frame
constexpr int FRAME = PLANE + META;     // bytes of a frame of one KV head
constexpr int DECODED = 4 * D + 128;    // bytes of one page's decoded metadata: K's scales, K's steps, V's scales and offsets

constexpr int MOST_STAGES = 6;

template <int N>
constexpr int page_bytes() {
    return N * PLANE + 2 * META;
}

// Pages attended at a time: two where two stages of them fit
template <int N>
constexpr int pages_at_once() {
    return RING / page_bytes<N>() >= 4 ? 2 : 1;
}

template <int N>
constexpr int stages() {
    constexpr int fit = RING / (pages_at_once<N>() * page_bytes<N>());
    return fit < MOST_STAGES ? fit : MOST_STAGES;
}

struct Warp {
    u32 ring;     // address of its RING bytes, which 2 * DECODED bytes follow
    u32 queries;  // of the block's queries, 16 D bytes: a quad of slots at a time, 16 bytes a lane
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

// Starts the copies of a page: N planes, then the metadata of the first two frames. to: plus 16 bytes a lane
template <int N>
INLINE void fetch(u32 to, const Sources& from, u32 stride, const u32* frames, int lane) {
    to = fixed(to);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const u8* codes = from.codes + (u64)frames[i] * stride;
#pragma unroll
        for (int j = 0; j < PLANE / 512; j++) copy16(to + i * PLANE + j * 512, codes + j * 512);
    }
    if (lane < META / 8) copy16(to + N * PLANE, from.metadata + (u64)(lane < META / 16 ? frames[0] : frames[1]) * stride);
}

// What a table says of a warp's pages, N words a page, looked up by the lanes together and far ahead: two batches of 32 / N pages.
// The warp's pages are PAGES in a row, then those of the other warps, and so on.
template <int N, int PAGES>
struct Table {
    static constexpr int BATCH = 32 / N;
    const u32* row;  // of this lane's next look-up, and how many more pages there are from it on
    int left, step;
    u32 now, next, at;

    // row: of the first page; `words` lie between one page and the next; without pages all words are ones
    INLINE Table(const u32* row, int words, int count, int lane)
        : row(row + (i64)(lane / N / PAGES * PAGES * WARPS + lane / N % PAGES) * words + lane % N),
          left(lane < BATCH * N ? count - lane / N : 0), step(BATCH * WARPS * words), at(0) {
        static_assert(BATCH % PAGES == 0, "a batch holds no half of what is taken at a time");
        now = look_up();
        next = look_up();
    }

    INLINE u32 look_up() {
        const u32 word = left > 0 ? __ldg(row) : ALL_LANES;
        row += step;
        left -= BATCH;
        return word;
    }

    INLINE void take(u32 (&words)[N * PAGES]) {
        if (at == BATCH * N) {
            now = next;
            next = look_up();
            at = 0;
        }
#pragma unroll
        for (int i = 0; i < N * PAGES; i++) words[i] = __shfl_sync(ALL_LANES, now, at + i);
        at += N * PAGES;
    }
};

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

    INLINE Places(u32 decoded, int lane, int k_planes, int page_bytes) {
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
        // lanes from 16 on: of the second page
        v_from = fixed(s / 2 * META + D + s % 2 * 16 + i * 4 + lane / 16 * page_bytes);
        v_to = fixed(decoded + 4 * D + s / 2 * 64 + i * 16 + s % 2 * 8 + lane / 16 * DECODED);
    }
};

// Metadata of PAGES pages, page_bytes apart -> decoded, DECODED bytes apart: K's scales and steps [D / 8 words a quad lane each], V's
// scales and offsets [4 pairs a quad lane]
template <int V_PLANES, int PAGES>
INLINE void decode_metadata(u32 metadata, const Places& at, int page_bytes, int lane) {
#pragma unroll
    for (int i = 0; i < PAGES; i++) {
        const u32 from = metadata + at.k_from + i * page_bytes, to = at.k_to + i * DECODED;
        if constexpr (D == 128) {
            const u32 w0 = load(from), w1 = load(from + D / 2);
            store(to, scales_of(w0), scales_of(w1));
            store(to + 2 * D, steps_of(w0, at.k_unit, at.k_middle), steps_of(w1, at.k_unit, at.k_middle));
        } else {
            const u32 w = load(from);
            store(to, scales_of(w));
            store(to + 2 * D, steps_of(w, at.k_unit, at.k_middle));
        }
    }
    if (PAGES == 2 || lane < 16) {
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

template <int PLANES, int PAGES>
INLINE void all_scores(float (&s)[PAGES][2][4], const u32 (&base)[PAGES][K_WORDS], const u32 (&fine)[PAGES][K_WORDS],
                       const u32 (&q)[PAGES][D / 8]) {
#pragma unroll
    for (int i = 0; i < PAGES; i++) scores_of<PLANES, 0>(s[i], base[i], fine[i], q[i]);
#pragma unroll
    for (int i = 0; i < PAGES; i++) scores_of<PLANES, 2>(s[i], base[i], fine[i], q[i]);
#pragma unroll
    for (int i = 0; i < PAGES; i++) scores_of<PLANES, 1>(s[i], base[i], fine[i], q[i]);
#pragma unroll
    for (int i = 0; i < PAGES; i++) scores_of<PLANES, 3>(s[i], base[i], fine[i], q[i]);
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

// ---- pages ---------------------------------------------------------------------------------------------------------------------

// Addresses of this lane's words: of K and of V from the start of a plane, and of a quad lane's decoded metadata.
struct Readers {
    u32 k, v, decoded, queries;
    u32 token;  // of block 0; block r: 2 r further

    INLINE Readers(u32 decoded, u32 queries, int lane)
        : k(fixed((lane / 8 * 8 + lane / 4 % 2) * (D / 4) + lane % 4 * (D / 16))), v(fixed(lane * 16)),
          decoded(fixed(decoded + lane % 4 * 16)), queries(fixed(queries + lane * 16)), token(fixed(lane / 8 * 8 + lane / 4 % 2)) {}
};

// live: masks of the pages; unit: base-2 logits of one unit of the first product, of heads 2t and 2t + 1
template <int K_PLANES, int V_PLANES, int PAGES>
INLINE void attend_pages(Sums& a, const float (&unit)[2], u32 stage, const Places& places, const Readers& from, const u32 (&live)[PAGES],
                         int lane) {
    constexpr int N = K_PLANES + V_PLANES, PAGE = page_bytes<N>();
    decode_metadata<V_PLANES, PAGES>(stage + N * PLANE, places, PAGE, lane);
    const u32 k = stage + from.k, v = stage + from.v + PLANE;
    u32 base[PAGES][K_WORDS], fine[PAGES][K_WORDS], scaled[PAGES][D / 8], p[PAGES][4];
#pragma unroll
    for (int i = 0; i < PAGES; i++) {
        k_words(base[i], k + i * PAGE);
        if constexpr (K_PLANES > 1) k_words(fine[i], k + i * PAGE + 2 * PLANE);
    }
    __syncwarp();
    float s[PAGES][2][4] = {}, offset[PAGES][2][4] = {}, start[PAGES][2];
#pragma unroll
    for (int e = 0; e < D / 8; e += 4) {
        u32 q[4];
        quads(q, from.queries + e * 128, 0);
#pragma unroll
        for (int i = 0; i < PAGES; i++) {
            u32 scale[4], steps[4];
            quads(scale, from.decoded + i * DECODED + e * 16, 0);
            quads(steps, from.decoded + i * DECODED + 2 * D + e * 16, 0);
#pragma unroll
            for (int j = 0; j < 4; j++) scaled[i][e + j] = mul2(scale[j], q[j]);
#pragma unroll
            for (int j = 0; j < 2; j++)
                mma<false>(offset[i][j], steps[0], steps[1], steps[2], steps[3], scaled[i][e + j], scaled[i][e + j + 2]);
        }
    }
    if constexpr (K_PLANES == 4) {
        u32 high[PAGES][K_WORDS], low[PAGES][K_WORDS];
#pragma unroll
        for (int i = 0; i < PAGES; i++) k_words(high[i], k + i * PAGE + 4 * PLANE), k_words(low[i], k + i * PAGE + 6 * PLANE);
        all_scores<2>(s, high, low, scaled);
#pragma unroll
        for (int i = 0; i < 8 * PAGES; i++) s[i / 8][i / 4 % 2][i % 4] *= 0.0625f;
    }
    all_scores<(K_PLANES > 1 ? 2 : 1)>(s, base, fine, scaled);
#pragma unroll
    for (int i = 0; i < PAGES; i++) {
        if (live[i] != ALL_LANES) keep<2>(s[i], live[i] >> from.token);
        // 2**-17: steps are in units of 128, codes in units of 2**-24
#pragma unroll
        for (int j = 0; j < 2; j++) start[i][j] = (offset[i][0][j] + offset[i][1][j + 2]) * (unit[j] * 0x1p-17f);
    }
    probabilities<false>(p, a, s, unit, start);
#pragma unroll
    for (int i = 0; i < PAGES; i++) {
        u32 rows[8], scaled_p[4], v_base[V_WORDS], v_fine[V_WORDS];
        quads(rows, from.decoded + i * DECODED + 4 * D, 64);
        constexpr u32 one = 0x3C003C00u;
#pragma unroll
        for (int r = 0; r < 4; r++) scaled_p[r] = mul2(p[i][r], rows[2 * r]);
        mma<false>(a.p, one, rows[1], one, rows[3], p[i][0], p[i][1]);
        mma<false>(a.p, one, rows[5], one, rows[7], p[i][2], p[i][3]);
        quads(v_base, v + i * PAGE, 512);
        if constexpr (V_PLANES > 1) quads(v_fine, v + i * PAGE + 2 * PLANE, 512);
        all_weigh<(V_PLANES > 1 ? 2 : 1)>(a, v_base, v_fine, scaled_p);
        if constexpr (V_PLANES == 4) {
            quads(v_base, v + i * PAGE + 4 * PLANE, 512);
            quads(v_fine, v + i * PAGE + 6 * PLANE, 512);
#pragma unroll
            for (int r = 0; r < 4; r++) scaled_p[r] = mul2(scaled_p[r], 0x2C002C00u);  // 1 / 16
            all_weigh<2>(a, v_base, v_fine, scaled_p);
        }
    }
}

// `count` pages of one sequence, pages_at_once in a row from `first` on, then as many WARPS - 1 times further, ... frames: of its page 0,
// K_PLANES + V_PLANES a page; live: its masks for this KV head, live_stride words apart, or 0: all live.
template <int K_PLANES, int V_PLANES>
INLINE void attend_planes(Sums& a, const float (&unit)[2], const Warp& warp, const u8* arena, u32 stride, const u32* frames,
                          const u32* live, int live_stride, int first, int count) {
    constexpr int N = K_PLANES + V_PLANES, PAGES = pages_at_once<N>(), STAGE = PAGES * page_bytes<N>(), STAGES = stages<N>();
    constexpr int AHEAD = STAGES - 1;
    static_assert(STAGES >= 2, "RING holds no two stages");
    Table<N, PAGES> table(frames + (i64)first * N, N, count, warp.lane);
    Table<1, PAGES> masks(live + (i64)first * live_stride, live_stride, live_stride ? count : 0, warp.lane);
    const Places places(warp.ring + RING, warp.lane, K_PLANES, page_bytes<N>());
    const Readers readers(warp.ring + RING, warp.queries, warp.lane);
    const Sources sources(arena, warp.lane);
    const u32 to = fixed(warp.ring + warp.lane * 16);
    u32 stage = STAGE, free = 0;
    __syncwarp();
    // page that is attended; the first AHEAD rounds only fetch
#pragma unroll 1
    for (int page = -AHEAD * PAGES; page < count; page += PAGES) {
        copies_wait<AHEAD - 1>();
        // every lane's copies have arrived, and every lane is done with the stage before
        __syncwarp();
        const int left = count - (page + AHEAD * PAGES);
        if (left > 0) {
            u32 ids[N * PAGES];
            table.take(ids);
            fetch<N>(to + free, sources, stride, ids, warp.lane);
            if (PAGES > 1 && left > 1) fetch<N>(to + free + page_bytes<N>(), sources, stride, ids + N, warp.lane);
        }
        copies_commit();
        if (page >= 0) {
            u32 alive[PAGES];
            masks.take(alive);
            // the last page may be alone
            if (PAGES > 1 && page + 1 == count) alive[PAGES - 1] = 0;
            attend_pages<K_PLANES, V_PLANES, PAGES>(a, unit, warp.ring + stage, places, readers, alive, warp.lane);
        }
        free = stage;
        stage = stage == AHEAD * STAGE ? 0 : stage + STAGE;
    }
}
