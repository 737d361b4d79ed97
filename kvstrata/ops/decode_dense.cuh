// A warp's walk over pages in floating point: K, then V, [32 tokens, D] numbers of 16 bits each, cut into frames as they come.
// A page comes in four pieces of 16 tokens (K, K, V, V) through the warp's ring, chunks of 16 bytes swizzled by token.

constexpr int PIECE = 32 * D;
constexpr int PIECES = (RING - 240) / PIECE < 4 ? (RING - 240) / PIECE : 4;
constexpr int FRAME_CHUNKS = FRAME / 16;
constexpr int DENSE_FRAMES = (128 * D + FRAME - 1) / FRAME;
constexpr int ROW_CHUNKS = D / 8;  // 16-byte chunks of a token

static_assert(PIECES >= 2 && PIECES <= 4 && DENSE_FRAMES <= 32, "RING holds no two pieces of a dense page");

// Chunk `chunk` of token `row` lies at swizzled(row, chunk); chunks further by an even number 2 n (a row being whole): at its xor 32 n
INLINE u32 swizzled(u32 row, u32 chunk) { return row * (2 * D) + ((chunk ^ (row & 7)) * 16); }

// Starts the copies of a piece. frames: of the page, one a lane; to: plus swizzled(lane / ROW_CHUNKS, lane % ROW_CHUNKS); from: of frame 0,
// plus 16 bytes a lane
template <int PART>
INLINE void fetch_piece(u32 to, const u8* from, u32 stride, u32 frames, int lane) {
    to = fixed(to);
#pragma unroll
    for (int j = 0; j < PIECE / 512; j++) {
        // 32 chunks, which lie in one frame or in two
        const int chunk = PART * (PIECE / 16) + j * 32, frame = chunk / FRAME_CHUNKS, at = chunk % FRAME_CHUNKS;
        const bool beyond = at + 31 >= FRAME_CHUNKS && at + lane >= FRAME_CHUNKS;
        const u32 id = __shfl_sync(ALL_LANES, frames, frame + beyond);
        const u8* source = from + (at * 16 - (beyond ? FRAME : 0)) + (u64)id * stride;
        const u32 rows = j * (32 / ROW_CHUNKS);
        copy16((to ^ (rows % 8 * 16)) + j * 512, source);
    }
}

// Queries as operand b of the product over channels, in the pages' type: channels 16 f + 2t, .. and 16 f + 8 + 2t, ..
template <bool BF16>
INLINE void load_dense_query(u32 (&q)[D / 8], const u16* from, bool bf16, int group, bool negative, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
        u32 x = g < group ? __ldg((const u32*)(from + g * D + i * 8 + 2 * t)) : 0;
        if (bf16 != BF16) x = pack<BF16>(unpack(x & 0xFFFF, bf16), unpack(x >> 16, bf16));
        q[i] = negative ? x ^ 0x80008000u : x;
    }
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
INLINE void dense_scores(float (&s)[4], const u32 (&q)[D / 8], u32 from) {
#pragma unroll
    for (int f = 0; f < D / 16; f++) {
        u32 k[4];
        load_matrices<false>(k, from ^ (f * 32));
        mma<BF16>(s, k[0], k[1], k[2], k[3], q[2 * f], q[2 * f + 1]);
    }
}

template <bool BF16>
INLINE void dense_weigh(Sums& a, u32 p0, u32 p1, u32 from) {
#pragma unroll
    for (int f = 0; f < D / 16; f++) {
        u32 v[4];
        load_matrices<true>(v, from ^ (f * 32));
        mma<BF16>(a.o[f], v[0], v[1], v[2], v[3], p0, p1);
    }
    constexpr u32 one = BF16 ? 0x3F803F80u : 0x3C003C00u;
    mma<BF16>(a.p, one, 0, one, 0, p0, p1);
}

// Pages first, first + WARPS, ... of `count`, as attend_planes; q_from: queries [group, D]. The sums' units are those of the numbers.
template <bool BF16>
INLINE void attend_dense(Sums& a, const u16* q_from, bool q_bf16, int group, float qk_scale, const Warp& warp, const u8* arena, u32 stride,
                         const u32* frames, const u32* live, int live_stride, int first, int count) {
    constexpr int AHEAD = PIECES - 1;
    const int lane = warp.lane;
    const u32* row = frames + (i64)first * DENSE_FRAMES + min(lane, DENSE_FRAMES - 1);
    const auto look_up = [&](int k) { return __ldg(row + (i64)min(k, count - 1) * (WARPS * DENSE_FRAMES)); };
    u32 now = look_up(0), next = look_up(1), alive[1], slot = 0, free = AHEAD * PIECE, p[1][4], q[D / 8];
    Table<1, 1> masks(live + (i64)first * live_stride, live_stride, live_stride ? count : 0, lane);
    load_dense_query<BF16>(q, q_from, q_bf16, group, qk_scale < 0.0f, lane);
    // a unit is positive, for a maximum is taken before it is applied
    const float unit = fmaxf(fabsf(qk_scale), 1e-30f), units[2] = {unit, unit};
    const u8* from = fixed(arena + lane * 16);
    // the swizzle takes addresses that are aligned
    const u32 ring = (warp.ring + 255) / 256 * 256;
    const u32 to = fixed(ring + swizzled(lane / ROW_CHUNKS, lane % ROW_CHUNKS)), k_from = fixed(ring + swizzled(lane % 16, lane / 16)),
              v_from = fixed(ring + swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2));
    __syncwarp();
    fetch_piece<0>(to, from, stride, now, lane), copies_commit();
    if constexpr (AHEAD > 1) fetch_piece<1>(to + PIECE, from, stride, now, lane), copies_commit();
    if constexpr (AHEAD > 2) fetch_piece<2>(to + 2 * PIECE, from, stride, now, lane), copies_commit();
#pragma unroll 1
    for (int k = 0; k < count; k++) {
        masks.take(alive);
        const u32 dead = ~alive[0];
        float s[1][2][4] = {};
        // waits for piece j of the page, starts piece j + AHEAD, and says where piece j lies in the ring
        const auto step = [&](auto part) {
            constexpr int ahead = decltype(part)::value + AHEAD;
            copies_wait<AHEAD - 1>();
            __syncwarp();
            if (ahead < 4 || k + 1 < count) fetch_piece<ahead % 4>(to + free, from, stride, ahead < 4 ? now : next, lane);
            copies_commit();
            free = slot;
            slot = slot == AHEAD * PIECE ? 0 : slot + PIECE;
            return free;
        };
        dense_scores<BF16>(s[0][0], q, k_from + step(Index<0>{}));
        dense_scores<BF16>(s[0][1], q, k_from + step(Index<1>{}));
        if (dead) keep<8>(s[0], ~dead >> (lane / 4));
        const float none[1][2] = {};
        probabilities<BF16>(p, a, s, units, none);
        const u32 lower = step(Index<2>{});
        if (dead) clear_dead(ring + lower, dead & 0xFFFF, lane);
        dense_weigh<BF16>(a, p[0][0], p[0][1], v_from + lower);
        const u32 upper = step(Index<3>{});
        if (dead) clear_dead(ring + upper, dead >> 16, lane);
        dense_weigh<BF16>(a, p[0][2], p[0][3], v_from + upper);
        now = next;
        next = look_up(k + 2);
    }
}
