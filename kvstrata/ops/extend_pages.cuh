// The producer: four warps that fill a ring of tiles of 128 keys, each warp one page of 32 tokens (or 32 keys of the chunk).
// Codes become fp16 numbers here, see quant_kernel.py for how; nothing else in the kernel knows of planes.
constexpr int KEYS = 128, STAGES = 2;
constexpr int C = D / 8, HALVES = D / 64;  // words of a token in a plane; panels of 64 channels
constexpr int FRAME = 2 * (4 * D + (D + 32) / 2);  // bytes
constexpr int DENSE_FRAMES = (128 * D + FRAME - 1) / FRAME;  // of a page in floating point
constexpr int TILE = KEYS * D * 2;  // bytes of K or of V
constexpr int PANEL = KEYS * 128;  // bytes of 64 channels of a tile whose rows are keys
constexpr int V_PANEL = D * 128;  // bytes of 64 keys of a tile whose rows are channels

// Shared memory from a base aligned to 1024: K tiles, V tiles, Q, then what is small.
struct Ring {
    u32 base;
    DEVICE u32 k(int i) const { return base + (i % STAGES) * TILE; }
    DEVICE u32 v(int i) const { return base + (STAGES + i % STAGES) * TILE; }
    DEVICE u32 q() const { return base + 2 * STAGES * TILE; }
    DEVICE u32 alive(int i) const { return base + 2 * STAGES * TILE + 128 * D * 2 + (i % STAGES) * 16; }
    DEVICE u32 bar(int i) const { return base + 2 * STAGES * TILE + 128 * D * 2 + 64 + i * 8; }
    DEVICE u32 table(int warp) const { return base + 2 * STAGES * TILE + 128 * D * 2 + 128 + warp * (4 * D + 128); }
    DEVICE u32 k_full(int i) const { return bar(i % STAGES); }
    DEVICE u32 v_full(int i) const { return bar(STAGES + i % STAGES); }
    DEVICE u32 k_free(int i) const { return bar(2 * STAGES + i % STAGES); }
    DEVICE u32 v_free(int i) const { return bar(3 * STAGES + i % STAGES); }
    DEVICE static u32 parity(int i) { return i / STAGES & 1; }
};

// The pages of one tier that a sequence has, and the tiles of four that this program attends.
struct Pages {
    const int* frames;  // of the first page
    const int* live;  // of the first page, or null
    int count, live_stride, begin, end;
};

DEVICE u32 mul2(u32 a, u32 b) {
    u32 x;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
    return x;
}
constexpr DEVICE u32 both(u32 half) { return half * 0x10001u; }

// Eight words of a plane, or of a plane and its refinement interleaved: x holds fields 0 to 3, y fields 4 to 7.
template <int PLANES>
struct Codes {
    u32 x[4], y[4], xs[4], ys[4];
    DEVICE Codes(uint4 base, uint4 fine) {
        const u32 b[4] = {base.x, base.y, base.z, base.w}, f[4] = {fine.x, fine.y, fine.z, fine.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = y[i] = b[i];
            if constexpr (PLANES > 1) {
                asm("lop3.b32 %0, %1, %2, 0xcccccccc, 0xE4;" : "=r"(x[i]) : "r"(b[i]), "r"(f[i]));
                asm("lop3.b32 %0, %1, %2, 0x33333333, 0xE4;" : "=r"(y[i]) : "r"(b[i]), "r"(f[i]));
            }
            xs[i] = __byte_perm(x[i], 0, 0x2301);
            ys[i] = PLANES > 1 ? __byte_perm(y[i], 0, 0x2301) : xs[i];
        }
    }
    // Pair i of `field`: code * 2**-9 (4 * base + refinement)
    DEVICE u32 steps(int field, int i) const {
        constexpr u32 masks[2][4] = {{0x000C, 0x00C0, 0x0030, 0x0300}, {0x000F, 0x00F0, 0x003C, 0x03C0}};
        // 2**15 over the field's weight: 1, 16, 4, 64
        constexpr u32 units[4] = {0x7800, 0x6800, 0x7000, 0x6000};
        const int kind = field / 4 * 2 + field % 2;
        const u32 word = field < 2 ? x[i] : field < 4 ? xs[i] : field < 6 ? y[i] : ys[i];
        return mul2(word & both(masks[PLANES > 1][kind]), both(units[kind]));
    }
};

// Two metadata words -> scale * UNIT * 2**9 and scale * UNIT * (steps + MIDDLE) of both. UNIT: exponent bits of the codec's unit.
template <int PLANES, bool K>
DEVICE void metadata(u32 w, u32& scale, u32& offset) {
    constexpr u32 middle = both(PLANES == 1 ? 0x3E00 : PLANES == 2 ? 0x0000 : 0xB780);  // 1.5, 0, -7.5 / 16
    const u32 s = mul2((w & 0x00FF00FF) << 6, both(K ? 0x5400 : 0x4800));  // 64, 8
    const u32 z = mul2((w >> 2 & 0x1FC01FC0) | (w & 0x80008000), both(0x5800));
    scale = mul2(s, both(0x6000));
    offset = mul2(s, fma2(z, both(0x6000), middle));
}

// What a thread reads of a page's K or V for one half of its stores: eight words of each plane.
template <int PLANES>
struct Words {
    uint4 plane[PLANES];
};

template <int KP, int VP>
struct Unpack {
    static constexpr int N = KP + VP;
    int ids[N];
    u32 alive;

    DEVICE static const char* at(const char* arena, u64 stride_frame, int id) { return arena + u64(id) * stride_frame; }

    // frames of page `i` (the last one stands in beyond the end) and its live tokens
    DEVICE void look_up(const Pages& pages, int i) {
        const int page = min(i, pages.count - 1);
#pragma unroll
        for (int n = 0; n < N; n++) ids[n] = __ldg(pages.frames + page * N + n);
        alive = i >= pages.count ? 0u : pages.live ? u32(__ldg(pages.live + page * pages.live_stride)) : ~0u;
    }

    // a lane is a token: half h holds words 8 * h to 8 * h + 7 of each plane
    DEVICE void load_k(Words<KP>& w, const char* arena, u64 stride_frame, int lane, int h) const {
#pragma unroll
        for (int p = 0; p < KP; p++)
            w.plane[p] = __ldg(reinterpret_cast<const uint4*>(at(arena, stride_frame, ids[2 * p]) + lane * (2 * C)) + h);
    }

    // a lane is eight tokens: half h holds one c
    DEVICE void load_v(Words<VP>& w, const char* arena, u64 stride_frame, int lane, int h) const {
#pragma unroll
        for (int p = 0; p < VP; p++)
            w.plane[p] =
                __ldg(reinterpret_cast<const uint4*>(at(arena, stride_frame, ids[2 * p + 1]) + (lane % 8 + 8 * h) * 64) + lane / 8);
    }

    // D / 32 words of K's metadata a lane, one of V's
    DEVICE uint2 load_k_meta(const char* arena, u64 stride_frame, int lane) const {
        const char* from = at(arena, stride_frame, lane < 16 ? ids[0] : ids[1]) + 8 * D + lane % 16 * (D / 16);
        if constexpr (D == 128) return __ldg(reinterpret_cast<const uint2*>(from));
        else return make_uint2(__ldg(reinterpret_cast<const u32*>(from)), 0);
    }
    DEVICE u32 load_v_meta(const char* arena, u64 stride_frame, int lane) const {
        return __ldg(reinterpret_cast<const unsigned short*>(at(arena, stride_frame, lane < 16 ? ids[0] : ids[1]) + 9 * D) + lane % 16);
    }

    template <int PLANES>
    DEVICE static u32 number(const Codes<PLANES>& codes, const Codes<PLANES>& rest, int field, int i, u32 scale, u32 offset) {
        u32 x = codes.steps(field, i);
        if constexpr (PLANES == 4) x = fma2(rest.steps(field, i), both(0x2C00), x);  // sixteenths
        return fma2(x, scale, offset);
    }

    // metadata to the order of channels: 16 * (lane % 8) + 2 * (lane / 8) and eight on (D = 128), 8 * (lane % 8) + ... (D = 64)
    DEVICE static void decode_k_meta(uint2 meta, u32 table, int lane) {
        u32 scale, offset;
        const u32 own = table + (D / 8 * (lane % 8) + lane / 8 * 2) * 2;
        metadata<KP, true>(meta.x, scale, offset);
        store4(own, scale);
        store4(own + 2 * D, offset);
        if constexpr (D == 128) {
            metadata<KP, true>(meta.y, scale, offset);
            store4(own + 16, scale);
            store4(own + 2 * D + 16, offset);
        }
        __syncwarp();
    }
    DEVICE static void decode_v_meta(u32 meta, u32 table, int lane) {
        u32 scale, offset;
        metadata<VP, false>(meta, scale, offset);
        const u32 own = table + 4 * D + (lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2) * 2;
        store2(own, scale);
        store2(own + 64, offset);
        __syncwarp();
    }

    // keys are the rows of the tile: a thread stores eight channels at a time
    DEVICE static void store_k(const Words<KP>& w, u32 tile, u32 table, int warp, int lane, int h) {
        const u32 row = tile + (warp * 32 + lane) * 128 + (lane % 8) * 16;
        const Codes<KP> codes(w.plane[0], w.plane[KP > 1 ? 1 : 0]);
        const Codes<KP> rest = KP == 4 ? Codes<KP>(w.plane[KP - 2], w.plane[KP - 1]) : codes;
        // the next field's metadata are asked for before this field's numbers are stored
        uint4 s = load16(table + h * 16), o = load16(table + 2 * D + h * 16);
#pragma unroll
        for (int f = 0; f < 8; f++) {
            const int chunk = f * HALVES + h, following = min(f + 1, 7) * HALVES + h;
            const uint4 s_next = load16(table + following * 16), o_next = load16(table + 2 * D + following * 16);
            store16((row ^ (chunk % 8 * 16)) + chunk / 8 * PANEL, number<KP>(codes, rest, f, 0, s.x, o.x),
                    number<KP>(codes, rest, f, 1, s.y, o.y), number<KP>(codes, rest, f, 2, s.z, o.z),
                    number<KP>(codes, rest, f, 3, s.w, o.w));
            s = s_next;
            o = o_next;
        }
    }

    // channels are the rows of the tile: a thread stores eight keys at a time
    DEVICE static void store_v(const Words<VP>& w, u32 tile, u32 table, int warp, int lane, int h) {
        const uint4 s = load16(table + 4 * D + lane / 8 * 16), o = load16(table + 4 * D + 64 + lane / 8 * 16);
        const u32 column = tile + warp / 2 * V_PANEL + (lane % 8) * 128 + ((warp % 2 * 4 + lane / 8) ^ (lane % 8)) * 16;
        const Codes<VP> codes(w.plane[0], w.plane[VP > 1 ? 1 : 0]);
        const Codes<VP> rest = VP == 4 ? Codes<VP>(w.plane[VP - 2], w.plane[VP - 1]) : codes;
#pragma unroll
        for (int f = 0; f < 8; f++)
            store16(column + (f * C + 8 * h) * 128, number<VP>(codes, rest, f, 0, s.x, o.x), number<VP>(codes, rest, f, 1, s.y, o.y),
                    number<VP>(codes, rest, f, 2, s.z, o.z), number<VP>(codes, rest, f, 3, s.w, o.w));
    }
};

// A warp's part of a tile is written: on to the consumers.
DEVICE void hand_over(u32 bar, int lane) {
    fence_async();
    __syncwarp();
    if (lane == 0) barrier_arrive(bar);
}

// All pages of one tier; `i` counts tiles over all of them.
template <int KP, int VP>
DEVICE void produce_planes(const Ring& ring, int& i, const Pages& pages, const char* arena, u64 stride_frame, int warp, int lane) {
    if (pages.begin == pages.end) return;
    const u32 table = ring.table(warp);
    Unpack<KP, VP> ids;
    Words<KP> k[2];
    Words<VP> v[2];
    ids.look_up(pages, pages.begin * 4 + warp);
    u32 alive = ids.alive;
    uint2 k_meta = ids.load_k_meta(arena, stride_frame, lane);
    // words are asked for a tile ahead of their use; of eight planes half as many fit in registers
    constexpr bool WHOLE = KP + VP <= 4;
    ids.load_k(k[0], arena, stride_frame, lane, 0);
    if constexpr (WHOLE && HALVES == 2) ids.load_k(k[1], arena, stride_frame, lane, 1);
#pragma unroll 1
    for (int page = pages.begin * 4 + warp; page < pages.end * 4; page += 4, i++) {
        const u32 v_meta = ids.load_v_meta(arena, stride_frame, lane);
        if constexpr (WHOLE) {
            for (int h = 0; h < HALVES; h++) ids.load_v(v[h], arena, stride_frame, lane, h);
            ids.look_up(pages, page + 4);
        }
        ids.decode_k_meta(k_meta, table, lane);
        barrier_wait(ring.k_free(i), ring.parity(i) ^ 1);
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            if constexpr (!WHOLE) {
                if (h + 1 < HALVES) ids.load_k(k[1], arena, stride_frame, lane, 1);
                else ids.load_v(v[0], arena, stride_frame, lane, 0);
            }
            ids.store_k(k[h], ring.k(i), table, warp, lane, h);
        }
        if (lane == 0) store4(ring.alive(i) + warp * 4, alive);
        hand_over(ring.k_full(i), lane);
        if constexpr (!WHOLE) {
            if constexpr (HALVES == 2) ids.load_v(v[1], arena, stride_frame, lane, 1);
            ids.look_up(pages, page + 4);
        }
        alive = ids.alive;
        if constexpr (WHOLE) {
            k_meta = ids.load_k_meta(arena, stride_frame, lane);
            for (int h = 0; h < HALVES; h++) ids.load_k(k[h], arena, stride_frame, lane, h);
        }
        ids.decode_v_meta(v_meta, table, lane);
        barrier_wait(ring.v_free(i), ring.parity(i) ^ 1);
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            if (!WHOLE && h + 1 == HALVES) {
                k_meta = ids.load_k_meta(arena, stride_frame, lane);
                ids.load_k(k[0], arena, stride_frame, lane, 0);
            }
            ids.store_v(v[h], ring.v(i), table, warp, lane, h);
        }
        hand_over(ring.v_full(i), lane);
    }
}

// Where chunk `n` of 16 bytes of a warp's 32 keys goes: rows are keys.
DEVICE u32 chunk_at(u32 tile, int warp, int n) {
    const int row = warp * 32 + n / C, chunk = n % C;
    return tile + chunk / 8 * PANEL + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
}

// Tiles of numbers that are copied as they are, one copy under way while the next is asked for. `copy(tile index, is V, address)` asks
// for a warp's part and returns the tokens that live.
template <class Copy>
DEVICE void produce_numbers(const Ring& ring, int& i, int begin, int end, int warp, int lane, Copy copy) {
    if (begin == end) return;
#pragma unroll 1
    for (int tile = begin; tile < end; tile++, i++) {
        barrier_wait(ring.k_free(i), ring.parity(i) ^ 1);
        const u32 alive = copy(tile, false, ring.k(i));
        copies_commit();
        if (lane == 0) store4(ring.alive(i) + warp * 4, alive);
        if (tile > begin) {
            copies_wait<1>();
            hand_over(ring.v_full(i - 1), lane);
        }
        barrier_wait(ring.v_free(i), ring.parity(i) ^ 1);
        copy(tile, true, ring.v(i));
        copies_commit();
        copies_wait<1>();
        hand_over(ring.k_full(i), lane);
    }
    copies_wait<0>();
    hand_over(ring.v_full(i - 1), lane);
}

// Pages in floating point: K's numbers, then V's, over 2 * 32 * D * 2 / FRAME frames.
DEVICE void produce_dense(const Ring& ring, int& i, const Pages& pages, const char* arena, u64 stride_frame, int warp, int lane) {
    constexpr int N = DENSE_FRAMES, PIECES = FRAME / 16;
    int id = 0;
    u32 alive = 0;
    produce_numbers(ring, i, pages.begin, pages.end, warp, lane, [&](int tile, bool is_v, u32 to) {
        if (!is_v) {
            const int page = min(tile * 4 + warp, pages.count - 1);
            id = __ldg(pages.frames + page * N + min(lane, N - 1));
            alive = tile * 4 + warp >= pages.count ? 0u : pages.live ? u32(__ldg(pages.live + page * pages.live_stride)) : ~0u;
        }
#pragma unroll 4
        for (int n = lane; n < 32 * C; n += 32) {
            const int piece = n + (is_v ? 32 * C : 0);
            const char* from = arena + u64(__shfl_sync(~0u, id, piece / PIECES)) * stride_frame + piece % PIECES * 16;
            copy16(chunk_at(to, warp, n), from, alive >> (n / C) & 1);
        }
        return alive;
    });
}

// The chunk itself: tiles [begin, end) of `tokens` keys, rows of k and v (16-bit numbers) `stride` elements apart.
DEVICE void produce_chunk(const Ring& ring, int& i, int begin, int end, int tokens, const char* k, const char* v, u64 k_stride,
                          u64 v_stride, int warp, int lane) {
    produce_numbers(ring, i, begin, end, warp, lane, [&](int tile, bool is_v, u32 to) {
        const int first = tile * KEYS + warp * 32, left = tokens - first;
#pragma unroll 4
        for (int n = lane; n < 32 * C; n += 32) {
            const int row = min(first + n / C, tokens - 1);
            const char* from = (is_v ? v + u64(row) * v_stride * 2 : k + u64(row) * k_stride * 2) + n % C * 16;
            copy16(chunk_at(to, warp, n), from, n / C < left);
        }
        return left >= 32 ? ~0u : left <= 0 ? 0u : (1u << left) - 1;
    });
}
