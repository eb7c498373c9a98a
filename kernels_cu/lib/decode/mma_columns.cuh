// The columns of a warp of matmul/decode/mma.cu and matmul/decode/mma_gguf.cu, and their sums.
#pragma once
#include "lib/decode/mma.cuh"

#ifndef LM_UP  // whether each eight of columns of w is next to one of another matrix: silu(x w) (x up), of blocks
#define LM_UP 0
#endif

constexpr int PAIRED = order::BLOCKS ? 16 : LM_COLUMNS;  // columns of which halves belong together, with LM_ROPE, LM_UP

// A column by its number among those of all blocks: its row of w, of N, and whether there is one.
struct Column {
    int n;
    bool there;

    __device__ __forceinline__ Column(int at, int N) : n(min(at, N - 1)), there(at < N) {
        const int pair = at / PAIRED * (PAIRED / 2) + at % PAIRED % (PAIRED / 2);
        if constexpr (LM_ROPE) {
            constexpr int D = LM_ROPE ? LM_ROPE : 2;
            const int kept = min(pair, N / 2 - 1);
            n = kept / (D / 2) * D + kept % (D / 2) + (at % PAIRED < PAIRED / 2 ? 0 : D / 2);
            there = pair < N / 2;
        }
        if constexpr (LM_UP) n = min(pair, N - 1), there = pair < N;
    }
};

constexpr int LANE_ROWS = 2 / order::TERMS;  // rows of a tile of which a lane has sums: LANE_ROWS * t and the next ones

typedef float Totals[TILES][ROW_TILES][order::TILE_OCTETS * LANE_ROWS];  // of column g of each eight

// The sums of a split of a lane: of both terms of these rows.
struct Sums {
    float of[TILES][ROW_TILES][2 * order::TILE_OCTETS];

    // Adds the split to the totals.
    __device__ __forceinline__ void add_to(Totals& totals) const {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
                for (int i = 0; i < order::TILE_OCTETS * LANE_ROWS; ++i) {
                    const float(&sum)[2 * order::TILE_OCTETS] = of[tile][r];
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
        for (int i = 0; i < ROW_TILES * order::TILE_OCTETS * LANE_ROWS; ++i) {
            (&to[tile][0][0])[i] += (&from[tile][0][0])[i];
        }
    }
}

// Calls use(column, row, total) for each of a lane; the columns are those of the warp.
template <typename Use>
__device__ __forceinline__ void each(const Totals& totals, Use use) {
#pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet) {
#pragma unroll
        for (int i = 0; i < ROW_TILES * LANE_ROWS; ++i) {
            const int r = i / LANE_ROWS, column = 8 * octet + threadIdx.x % 32 / 4;
            const int row = order::TILE_ROWS * r + threadIdx.x % 4 * LANE_ROWS + i % LANE_ROWS;
            const int at = octet % order::TILE_OCTETS * LANE_ROWS + i % LANE_ROWS;
            const float total = totals[octet / order::TILE_OCTETS][r][at];
            if (column < LM_COLUMNS && row < LM_ROWS) use(column, row, total);
        }
    }
}
