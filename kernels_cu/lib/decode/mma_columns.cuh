// The columns of the output that a warp computes in matmul/decode/mma.cu and matmul/decode/mma_gguf.cu, and their sums.
#pragma once
#include "lib/decode/mma.cuh"

#ifndef DECODE_UP  // 1: silu(x w) (x up): PAIRED / 2 columns of w alternate with as many of matrix `up`
#define DECODE_UP 0
#endif

constexpr int PAIRED = order::BLOCKS ? 16 : DECODE_COLUMNS;  // with RoPE or up: columns c, c + PAIRED / 2 are a pair

// Column number `at`, counted over the columns that all blocks process. n: row of w (of N rows) for this column. there:
// whether the column exists.
struct Column {
    int n;
    bool there;

    __device__ __forceinline__ Column(int at, int N) : n(min(at, N - 1)), there(at < N) {
        const int pair = at / PAIRED * (PAIRED / 2) + at % PAIRED % (PAIRED / 2);
        if constexpr (DECODE_ROPE) {
            constexpr int D = DECODE_ROPE ? DECODE_ROPE : 2;
            const int kept = min(pair, N / 2 - 1);
            n = kept / (D / 2) * D + kept % (D / 2) + (at % PAIRED < PAIRED / 2 ? 0 : D / 2);
            there = pair < N / 2;
        }
        if constexpr (DECODE_UP) n = min(pair, N - 1), there = pair < N;
    }
};

constexpr int LANE_ROWS = 2 / order::TERMS;  // rows per tile whose sums lane 4 g + t has; the first is LANE_ROWS * t

typedef float Totals[TILES][ROW_TILES][order::TILE_GROUPS * LANE_ROWS];  // lane 4 g + t: sums of every 8th column

// A lane's sums over one split (range of K), for the rows and columns of `Totals`. With two terms of x, each output has
// two sums, one for the high terms and one for the low terms.
struct Sums {
    float of[TILES][ROW_TILES][2 * order::TILE_GROUPS];

    // Adds the sums of this split to `totals`, the sums over all splits (ranges of K).
    __device__ __forceinline__ void add_to(Totals& totals) const {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
                for (int i = 0; i < order::TILE_GROUPS * LANE_ROWS; ++i) {
                    const float(&sum)[2 * order::TILE_GROUPS] = of[tile][r];
                    totals[tile][r][i] += LANE_ROWS == 2 ? sum[i] : order::joined(sum[2 * i], sum[2 * i + 1]);
                }
            }
        }
    }
};

__device__ __forceinline__ void add(Totals& to, const Totals& from) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < ROW_TILES * order::TILE_GROUPS * LANE_ROWS; ++i) {
            (&to[tile][0][0])[i] += (&from[tile][0][0])[i];
        }
    }
}

// Calls use(column, row, total) for each of this lane's totals. `column`, `row`: indices among the columns of the warp
// and the rows of the block.
template <typename Use>
__device__ __forceinline__ void each(const Totals& totals, Use use) {
#pragma unroll
    for (int row_group = 0; row_group < ROW_GROUPS; ++row_group) {
#pragma unroll
        for (int i = 0; i < ROW_TILES * LANE_ROWS; ++i) {
            const int r = i / LANE_ROWS, column = 8 * row_group + threadIdx.x % 32 / 4;
            const int row = order::TILE_ROWS * r + threadIdx.x % 4 * LANE_ROWS + i % LANE_ROWS;
            const int at = row_group % order::TILE_GROUPS * LANE_ROWS + i % LANE_ROWS;
            const float total = totals[row_group / order::TILE_GROUPS][r][at];
            if (column < DECODE_COLUMNS && row < DECODE_ROWS) use(column, row, total);
        }
    }
}
