// A warp's walk over pages in floating point: K, then V, [32 tokens, D] numbers of 16 bits each, cut into frames as they come.
// A page comes in four pieces of 16 tokens (K, K, V, V) through the warp's ring, chunks of 16 bytes swizzled by token.

constexpr int PIECE = 32 * D;
constexpr int PIECES = RING / PIECE < 4 ? RING / PIECE : 4;
constexpr int FRAME_CHUNKS = FRAME / 16;
constexpr int DENSE_FRAMES = (128 * D + FRAME - 1) / FRAME;
constexpr int ROW_CHUNKS = D / 8;  // 16-byte chunks of a token

static_assert(PIECES >= 2 && DENSE_FRAMES <= 32, "RING holds no two pieces of a dense page");

INLINE u32 swizzled(u32 row, u32 chunk) { return row * (2 * D) + ((chunk ^ (row & 7)) * 16); }

// Starts the copies of a piece. frames: of the page, one a lane
template <int PART>
INLINE void fetch_piece(u32 slot, const u8* arena, u32 stride, u32 frames, int lane) {
#pragma unroll
    for (int j = 0; j < PIECE / 512; j++) {
        const u32 in_piece = j * 32 + lane, chunk = PART * (PIECE / 16) + in_piece;
        const u32 frame = chunk / FRAME_CHUNKS;
        const u32 id = __shfl_sync(ALL_LANES, frames, frame);
        copy16(slot + swizzled(in_piece / ROW_CHUNKS, in_piece % ROW_CHUNKS), arena + (u64)id * stride + (chunk - frame * FRAME_CHUNKS) * 16);
    }
}

// Queries as operand b of the product over channels, in the pages' type: channels 16 f + 2t, .. and 16 f + 8 + 2t, ..
template <bool OTHER, bool BF16>
INLINE void load_dense_query(Query& q, const u16* from, int group, float qk_scale, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
        u32 x = g < group ? __ldg((const u32*)(from + g * D + i * 8 + 2 * t)) : 0;
        if constexpr (OTHER != BF16) x = pack<BF16>(unpack<OTHER>(x & 0xFFFF), unpack<OTHER>(x >> 16));
        q.x[i] = qk_scale < 0.0f ? x ^ 0x80008000u : x;
    }
    // a unit is positive, for a maximum is taken before it is applied
    q.unit[0] = q.unit[1] = fmaxf(fabsf(qk_scale), 1e-30f);
}

// A token that was never written may hold NaN, which a probability of 0 does not undo
INLINE void clear_dead(u32 slot, u32 dead, int lane) {
    for (; dead; dead &= dead - 1) {
        const u32 row = (__ffs(dead) - 1) * (2 * D);
        if constexpr (D == 128) {
            store(slot + row + lane * 8, 0, 0);
        } else {
            store(slot + row + lane * 4, 0);
        }
    }
    __syncwarp();
}

template <bool BF16>
INLINE void dense_scores(float (&s)[4], const Query& q, u32 slot, int lane) {
    const u32 row = lane % 16, half = lane / 16;
#pragma unroll
    for (int f = 0; f < D / 16; f++) {
        u32 k[4];
        load_matrices<false>(k, slot + swizzled(row, 2 * f + half));
        mma<BF16>(s, k[0], k[1], k[2], k[3], q.x[2 * f], q.x[2 * f + 1]);
    }
}

template <bool BF16>
INLINE void dense_weigh(Sums& a, u32 p0, u32 p1, u32 slot, int lane) {
    const u32 row = lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
#pragma unroll
    for (int f = 0; f < D / 16; f++) {
        u32 v[4];
        load_matrices<true>(v, slot + swizzled(row, 2 * f + half));
        mma<BF16>(a.o[f], v[0], v[1], v[2], v[3], p0, p1);
    }
    constexpr u32 one = BF16 ? 0x3F803F80u : 0x3C003C00u;
    mma<BF16>(a.p, one, 0, one, 0, p0, p1);
}

// Pages first, first + WARPS, ... of `count`, as attend_planes. The sums' units are those of the numbers.
template <bool BF16>
INLINE void attend_dense(Sums& a, const Query& q, const Warp& warp, const u8* arena, u32 stride, const int* frames, const u32* live,
                         int live_stride, int first, int count) {
    constexpr int AHEAD = PIECES - 1;
    const int lane = warp.lane;
    Masks masks{live + (i64)first * live_stride, WARPS * live_stride, live ? count : 0};
    const int* row = frames + (i64)first * DENSE_FRAMES + min(lane, DENSE_FRAMES - 1);
    const auto ids = [&](int k) { return (u32)__ldg(row + (i64)min(k, count - 1) * (WARPS * DENSE_FRAMES)); };
    const u8* from = fixed(arena);
    const u32 ring = fixed(warp.ring);
    u32 now = ids(0), next = ids(1), alive = masks.next(), slot = 0, free = AHEAD * PIECE;
    const auto advance = [&]() {
        free = slot;
        slot = slot == AHEAD * PIECE ? 0 : slot + PIECE;
    };
    __syncwarp();
    if constexpr (AHEAD > 0) fetch_piece<0>(ring, from, stride, now, lane), copies_commit();
    if constexpr (AHEAD > 1) fetch_piece<1>(ring + PIECE, from, stride, now, lane), copies_commit();
    if constexpr (AHEAD > 2) fetch_piece<2>(ring + 2 * PIECE, from, stride, now, lane), copies_commit();
#pragma unroll 1
    for (int k = 0; k < count; k++) {
        const u32 bits = alive;
        alive = masks.next();
        float s[2][4] = {};
        u32 p[4];
        // waits for piece j of the page, and starts piece j + AHEAD
        const auto step = [&](auto part) {
            constexpr int ahead = decltype(part)::value + AHEAD;
            copies_wait<AHEAD - 1>();
            __syncwarp();
            if (ahead < 4 || k + 1 < count) fetch_piece<ahead % 4>(ring + free, from, stride, ahead < 4 ? now : next, lane);
            copies_commit();
        };
        step(Index<0>{});
        dense_scores<BF16>(s[0], q, ring + slot, lane);
        advance();
        step(Index<1>{});
        dense_scores<BF16>(s[1], q, ring + slot, lane);
        advance();
        if (bits != ALL_LANES) keep<8>(s, bits >> (lane / 4));
        probabilities<BF16>(p, a, s, q.unit, 0.0f, 0.0f);
        step(Index<2>{});
        if (bits != ALL_LANES) clear_dead(ring + slot, ~bits & 0xFFFF, lane);
        dense_weigh<BF16>(a, p[0], p[1], ring + slot, lane);
        advance();
        step(Index<3>{});
        if (bits != ALL_LANES) clear_dead(ring + slot, ~bits >> 16, lane);
        dense_weigh<BF16>(a, p[2], p[3], ring + slot, lane);
        advance();
        now = next;
        next = ids(k + 2);
    }
}
