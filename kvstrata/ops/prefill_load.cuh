// How the prefill kernel's operands come into shared memory: the ring of tiles, and a warp group's queries. Knows nothing of products.
constexpr int D = 128, ROWS = 128, GROUP_ROWS = 64, KEYS = 128, WHOLE_KEYS = 64;
constexpr int STAGES = 5, TILE = 32768, HALF = TILE / 2, PANEL = 8192;

struct Shared {
    u32 base;
    DEVICE u32 tile(int i) const { return base + i % STAGES * TILE; }
    DEVICE u32 q(int group) const { return base + STAGES * TILE + group * GROUP_ROWS * D * 2; }
    DEVICE u32 q_codes(int group) const { return base + STAGES * TILE + ROWS * D * 2 + group * GROUP_ROWS * D; }
    DEVICE u32 rows(int group) const { return base + STAGES * TILE + ROWS * D * 3 + group * GROUP_ROWS * 8; }
    DEVICE u32 scales(int i) const { return base + STAGES * TILE + ROWS * D * 3 + ROWS * 8 + i % STAGES * 16; }
    DEVICE u32 full(int i) const { return base + STAGES * TILE + ROWS * D * 3 + ROWS * 8 + STAGES * 16 + i % STAGES * 16; }
    DEVICE u32 free(int i) const { return full(i) + 8; }
    DEVICE u32 parity(int i) const { return i / STAGES & 1; }
};

// 64 rows of q, two threads a row: as they are, as codes, and of each row its scale and its product with K's mean.
DEVICE void load_q(const Shared& shared, int group, const char* q, u64 stride, int rows_left, const float* mean) {
    const int thread = threadIdx.x % 128, row = thread / 2, half = thread % 2;
    uint4 x[8];
    float top = 0, product = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        x[j] = make_uint4(0, 0, 0, 0);
        if (row < rows_left) x[j] = __ldg(reinterpret_cast<const uint4*>(q + row * stride) + half * 8 + j);
        const u32* w = &x[j].x;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            top = fmaxf(top, fmaxf(fabsf(low_half(w[e])), fabsf(high_half(w[e]))));
            if (mean) {
                const float2 c = __ldg(reinterpret_cast<const float2*>(mean) + half * 32 + j * 4 + e);
                product += low_half(w[e]) * c.x + high_half(w[e]) * c.y;
            }
        }
        store16(shared.q(group) + half * PANEL + row * 128 + ((j ^ row % 8) * 16), x[j].x, x[j].y, x[j].z, x[j].w);
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    product += __shfl_xor_sync(~0u, product, 1);
    const float scale = fmaxf(top, 1e-20f) / (INT8 ? 127.0f : 448.0f), inverse = 1.0f / scale;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        u32 w[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const u32 a = (&x[j + e / 2].x)[e % 2 * 2], b = (&x[j + e / 2].x)[e % 2 * 2 + 1];
            const float y[4] = {quotient(low_half(a), scale, inverse), quotient(high_half(a), scale, inverse),
                                quotient(low_half(b), scale, inverse), quotient(high_half(b), scale, inverse)};
            w[e] = INT8 ? four_int8(y[0], y[1], y[2], y[3]) : four_fp8(y[0], y[1], y[2], y[3]);
        }
        store16(shared.q_codes(group) + row * 128 + (((half * 4 + j / 2) ^ row % 8) * 16), w[0], w[1], w[2], w[3]);
    }
    if (half == 0) {
        store4(shared.rows(group) + row * 8, __float_as_int(scale));
        store4(shared.rows(group) + row * 8 + 4, __float_as_int(product));
    }
    fence_async();
    group_sync(1 + group);
}

DEVICE void take_turn(const Shared& shared, int i) { barrier_wait(shared.free(i), shared.parity(i) ^ 1); }

// Tiles [0, tiles) as they lie, a quarter a warp.
DEVICE void produce_tiles(const Shared& shared, int& i, const char* from, const float4* scales, int tiles, int warp, int lane) {
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile++, i++) {
        take_turn(shared, i);
        if (lane == 0) {
            const bool extra = scales && warp == 0;
            barrier_expect(shared.full(i), TILE / 4 + (extra ? 16 : 0));
            bulk_copy(shared.tile(i) + warp * (TILE / 4), from + u64(tile) * TILE + warp * (TILE / 4), TILE / 4, shared.full(i));
            if (extra) bulk_copy(shared.scales(i), scales + tile, 16, shared.full(i));
        }
    }
}

DEVICE void hand_over(u32 bar, int lane) {
    fence_async();
    __syncwarp();
    if (lane == 0) barrier_arrive(bar);
}

// Keys [first, end) of k and v as they are, 64 a tile, 16 rows a warp, one tile on its way while the next is asked for; strides in bytes.
DEVICE void produce_rows(const Shared& shared, int& i, const char* k, const char* v, u64 stride_k, u64 stride_v, int first, int end,
                         int warp, int lane) {
    const int begin = first;
#pragma unroll 1
    for (; first < end; first += WHOLE_KEYS, i++) {
        take_turn(shared, i);
#pragma unroll 4
        for (int n = 0; n < 8; n++) {
            const int row = warp * 16 + n * 2 + lane / 16, chunk = lane % 16;
            const u32 to = shared.tile(i) + chunk / 8 * PANEL + row * 128 + ((chunk % 8 ^ row % 8) * 16);
            const int key = min(first + row, end - 1);
            copy16(to, k + key * stride_k + chunk * 16, first + row < end);
            copy16(to + HALF, v + key * stride_v + chunk * 16, first + row < end);
        }
        copies_commit();
        if (first > begin) {
            copies_wait<1>();
            hand_over(shared.full(i - 1), lane);
        }
    }
    copies_wait<0>();
    hand_over(shared.full(i - 1), lane);
}
