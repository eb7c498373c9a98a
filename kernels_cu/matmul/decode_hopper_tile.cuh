// A tile of the products of decoding by wgmma: the sums of its splits, from one block or from a cluster, and the call
// of an epilogue (matmul/decode_ends.cuh) with each output. The including file selects T and W (lib/storage.cuh).
#pragma once
#include "lib/storage.cuh"
#include "lib/sm80.cuh"
#include "matmul/decode_ends.cuh"
#include "matmul/decode_hopper.cuh"

#ifndef DH_OUT_TERMS  // whether out has terms, for another of these products
#define DH_OUT_TERMS 0
#endif

constexpr int OWN = (WARPS * TILES + DH_SPLITS - 1) / DH_SPLITS;  // tiles that a block finishes
constexpr int EACH = DH_SPLITS > 1 ? (OWN + WARPS - 1) / WARPS : TILES;  // of a warp
constexpr int MOST_AHEAD = MOVES_REGISTERS ? 4 : 8, AHEAD = EACH < MOST_AHEAD ? EACH : MOST_AHEAD;  // loaded at once

__device__ __forceinline__ float silu(float v) { return v / (1.0f + expf(-v)); }

// The sums of the splits of a cluster's blocks: (splits, OWN, 32) pairs in shared memory.
struct Exchange {
    float2* pairs;
    Barrier& arrived;
    int part;

    __device__ __forceinline__ void send(int split, int tile, float a, float b) const {
        float2* to = pairs + (split * OWN + tile / DH_SPLITS) * 32 + threadIdx.x % 32;
        store_at(tile % DH_SPLITS * DH_SHARES + part, to, arrived, a, b);
    }

    __device__ __forceinline__ float2 get(int own, int splits) const {
        float2 total = pairs[own * 32 + threadIdx.x % 32];
        for (int split = 1; split < splits; ++split) {
            const float2 more = pairs[(split * OWN + own) * 32 + threadIdx.x % 32];
            total.x += more.x, total.y += more.y;
        }
        return total;
    }
};

// Of the rows of W; `up`: of those that are second in an output, which have no bias where they are of U.
struct Scales {
    const float* w;
    const float* up;
    const float* bias;
};

// A column of the output, of a lane.
struct Column {
    int n;
    bool there;
    float scale, up_scale, bias, up_bias;

    __device__ __forceinline__ void prepare(int n_, int N, const Scales& scales) {
        n = n_, there = n < N;
        const int row = first_row(n);
        scale = there && scales.w ? constant(scales.w + row) : 1.0f;
        up_scale = TWO && there && scales.up ? constant(scales.up + row) : 1.0f;
        bias = there && scales.bias ? constant(scales.bias + row) : 0.0f;
        up_bias = DH_ROPE && there && scales.bias ? constant(scales.bias + row + HALF_HEAD) : 0.0f;
    }
};

template <typename End>
__device__ __forceinline__ void consume(const Ring& ring, const Share& share, const Exchange& exchange,
                                        const Scales& scales, const End& end, int M, int N, int K) {
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4, splits = order::splits(K);
    const int each = order::split_length(K) / SLICE;
    float totals[TILES][2] = {};
    Consumer consumer(ring, share.rank);
    if (CLUSTER > 1) wait_for_cluster();  // the other blocks run, so that their barriers can be arrived at
    wait_for_previous();
    int split = share.first;
#pragma unroll 1
    for (int left = share.slices; left > 0; left -= each, ++split) {
        float sums[TERMS / 2];
        consumer.multiply_split(sums, min(each, left) * SLICE / order::UNIT);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const float a = sums[4 * tile] + sums[4 * tile + 1], b = sums[4 * tile + 2] + sums[4 * tile + 3];
            if (DH_SPLITS > 1) exchange.send(split, warp * TILES + tile, a, b);
            else totals[tile][0] += a, totals[tile][1] += b;
        }
    }

#pragma unroll
    for (int first = 0; first < EACH; first += AHEAD) {
        typename End::Late late[AHEAD][OUTPUTS] = {};
        Column columns[AHEAD][OUTPUTS];
        int m[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int own = warp + WARPS * (first + i);
            const int tile = DH_SPLITS > 1 ? own * DH_SPLITS + share.rank : warp * TILES + first + i;
            const int row = share.row + tile % TILES * 4 + t;
            m[i] = tile < WARPS * TILES && row < M ? row : -1;
#pragma unroll
            for (int j = 0; j < OUTPUTS; ++j) {
                Column& column = columns[i][j];
                column.prepare(share.column + (tile / TILES * OUTPUTS + j) * 8 + own_row(), m[i] >= 0 ? N : 0, scales);
                if (column.there) late[i][j] = end.late(m[i], column.n);
            }
        }
        if (DH_SPLITS > 1 && first == 0) wait<true>(exchange.arrived, 0, "sums");
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (first + i >= EACH) continue;
            float2 total;
            if (DH_SPLITS > 1) total = exchange.get(min(warp + WARPS * (first + i), OWN - 1), splits);
            else total = {totals[first + i][0], totals[first + i][1]};
#pragma unroll
            for (int j = 0; j < OUTPUTS; ++j) {
                const Column& column = columns[i][j];
                float v = fmaf(j ? total.y : total.x, column.scale, column.bias);
                if constexpr (DH_ROPE) {
                    const float second = fmaf(total.y, column.up_scale, column.up_bias);
                    if (column.there) end.store_pair(m[i], column.n, v, second, late[i][j]);
                } else {
                    if (DH_GATED) v = silu(v) * (total.y * column.up_scale);
                    v = end.value(v, late[i][j]);
                    if (DH_OUT_TERMS) v = term_of<order::KIND, 8>(v);
                    if (column.there) end.store(m[i], column.n, v, late[i][j]);
                }
            }
        }
    }
}

template <typename End>
__device__ __forceinline__ void run(const float* x, const TensorMap& w, const TensorMap& up, const Scales& scales,
                                    const End& end, int M, int N, int K) {
    extern __shared__ char unaligned[];
    __shared__ Barrier full[DH_STAGES], empty[DH_STAGES], arrived;
    char* const stages = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    const Ring ring{stages, full, empty};
    const Share share(M, K);
    const Exchange exchange{reinterpret_cast<float2*>(stages + DH_STAGES * STAGE), arrived, share.part};
    if (threadIdx.x == 32 * WARPS) {
        prefetch(w);
        for (int i = 0; i < DH_STAGES; ++i) init(full[i], 1), init(empty[i], DH_SHARES * WARPS);
        init(arrived, 1);
        fence_inits();
        const int tiles = (WARPS * TILES - share.rank + DH_SPLITS - 1) / DH_SPLITS;
        if (DH_SPLITS > 1) arrive_and_expect(arrived, tiles * order::splits(K) * 32 * (int)sizeof(float2));
    }
    __syncthreads();
    let_next_start();
    if (CLUSTER > 1) arrive_in_cluster();
    if (threadIdx.x >= 32 * WARPS) {
        if constexpr (MOVES_REGISTERS) give_registers<FEW_REGISTERS>();
        if (threadIdx.x / 32 == WARPS) produce(ring, share, w, up, x, K);
        return;
    }
    if constexpr (MOVES_REGISTERS) take_registers<MANY_REGISTERS>();
    consume(ring, share, exchange, scales, end, M, N, K);
}
