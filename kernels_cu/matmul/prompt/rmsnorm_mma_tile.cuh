// A tile of (x gamma) w on tensor cores, for rmsnorm_matmul_mma and rmsnorm_ffn_mma (matmul/prompt/rmsnorm_mma.cu). The
// including file selects T and W (lib/storage.cuh) and may set:
//
//   MMA_ROWS, MMA_COLUMNS                     size of a block's tile; two weight matrices have half of the columns each
//   MMA_WARPS_M, MMA_WARPS_N, MMA_WARPS_K     warps along the rows, the columns and K; warps along K divide each slice,
//                                             and their sums are added at the end, in order
//   MMA_SLICE                                 length of a slice along K
//   MMA_STAGES                                number of slices in flight
//   MMA_BLOCKS                                minimum blocks per SM (__launch_bounds__)
//   MMA_W_NK                                  1: weights are (N, K); 0: weights are (K, N)
//   MMA_NORM                                  1: RMSNorm; 0: no norm, only the product
//   MMA_RESIDUAL                              1: x is replaced by x + residual
//
// Every matrix in shared memory has a pitch of an odd number of 16-byte chunks. Eight consecutive rows therefore start
// in eight different groups of four banks: ldmatrix has no bank conflicts, and all its offsets are constants. (With FP8
// weights (N, K), x has an even pitch: a lane then reads eight bytes, which has no conflicts either.)
//
// FP8 weights are copied as bytes. ldmatrix treats two neighbouring bytes as one value, so lane 4 g + t receives
//
//   (K, N)  k = 2t, 2t + 1 of two columns: the even columns of 16 form one operand, the odd columns the other operand
//   (N, K)  k = 4t .. 4t + 3 of one column: x must have the same order of K, so a lane reads 8 bytes of x
#pragma once

#ifndef MMA_ROWS
#define MMA_ROWS 64
#endif
#ifndef MMA_COLUMNS
#define MMA_COLUMNS 128
#endif
#ifndef MMA_WARPS_M
#define MMA_WARPS_M 2
#endif
#ifndef MMA_WARPS_N
#define MMA_WARPS_N 2
#endif
#ifndef MMA_WARPS_K
#define MMA_WARPS_K 2
#endif
#ifndef MMA_SLICE
#define MMA_SLICE 64
#endif
#ifndef MMA_STAGES
#define MMA_STAGES 4
#endif
#ifndef MMA_BLOCKS
#define MMA_BLOCKS 1
#endif
#ifndef MMA_W_NK
#define MMA_W_NK 0
#endif
#ifndef MMA_NORM
#define MMA_NORM 1
#endif
#ifndef MMA_RESIDUAL
#define MMA_RESIDUAL 0
#endif

constexpr int THREADS = 32 * MMA_WARPS_M * MMA_WARPS_N * MMA_WARPS_K;
constexpr int WARP_ROWS = MMA_ROWS / MMA_WARPS_M, WARP_COLUMNS = MMA_COLUMNS / MMA_WARPS_N;
constexpr int FRAGS_M = WARP_ROWS / 16, FRAGS_N = WARP_COLUMNS / 8;
constexpr int STEPS = MMA_SLICE / 16 / MMA_WARPS_K;  // steps of 16 values along K that a warp computes per slice
constexpr bool FP8 = sizeof(W) == 1;
constexpr bool QUADS = FP8 && MMA_W_NK;
static_assert(FRAGS_M * MMA_WARPS_M * 16 == MMA_ROWS && STEPS * MMA_WARPS_K * 16 == MMA_SLICE, "whole fragments");
static_assert(FRAGS_N * MMA_WARPS_N * 8 == MMA_COLUMNS && (FRAGS_N % 2 == 0 || !FP8), "whole fragments, of FP8 pairs");
static_assert(MMA_STAGES >= 2, "one slice travels while another is multiplied");

// For the slices of x (A) and of the weights (B): number of 16-byte chunks per row, and bytes between rows.
constexpr int A_CHUNKS = MMA_SLICE / 8, A_PITCH = 16 * (A_CHUNKS + (QUADS ? 2 : 1));
constexpr int B_ROWS = MMA_W_NK ? MMA_COLUMNS : MMA_SLICE;
constexpr int B_CHUNKS = (MMA_W_NK ? MMA_SLICE : MMA_COLUMNS) * (int)sizeof(W) / 16, B_PITCH = 16 * (B_CHUNKS | 1);
constexpr int A_BYTES = MMA_ROWS * A_PITCH, B_BYTES = B_ROWS * B_PITCH;

// Layout of a stage in shared memory: x, gamma, residual, weights.
constexpr int GAMMA = A_BYTES, RESIDUAL = GAMMA + (MMA_NORM ? 2 * MMA_SLICE : 0);
constexpr int WEIGHTS = RESIDUAL + (MMA_RESIDUAL ? A_BYTES : 0), STAGE = WEIGHTS + B_BYTES;

// Layout of shared memory after the last slice: the output sums of each warp along K, then partial sums of squares, as
// floats.
constexpr int SUMS_PITCH = MMA_COLUMNS + 8;  // floats per row; + 8 avoids bank conflicts
constexpr int SUMS = MMA_WARPS_K * MMA_ROWS * SUMS_PITCH, PARTS = MMA_WARPS_K * MMA_WARPS_N;

struct Tile {
    int row, column, index_n, tiles_n;  // first row, first column; tile index along N; tiles along N
};

// Returns the block's tile. Tiles are ordered in bands of 8 rows of tiles, so that concurrent blocks share rows of x
// and columns of weights.
__device__ __forceinline__ Tile choose_tile(int M, int N, int columns) {
    constexpr int BAND = 8;
    const int tiles_m = (M - 1) / MMA_ROWS + 1, tiles_n = (N - 1) / columns + 1;
    const int first = blockIdx.x / (BAND * tiles_n) * BAND, index = blockIdx.x - first * tiles_n;
    const int height = min(BAND, tiles_m - first);
    return {(first + index % height) * MMA_ROWS, index / height * columns, index / height, tiles_n};
}

#include "matmul/prompt/rmsnorm_mma_copies.cuh"
#include "matmul/prompt/rmsnorm_mma_fragments.cuh"

// Computes the warp's part of the tile's sums over K, and partial sums of squares of x. Calls meanwhile() while slices
// load.
template <int MATRICES, typename Meanwhile>
__device__ __forceinline__ void multiply_tile(const Inputs& in, const Tile& tile, char* shared, const Warp& warp,
                                              Meanwhile meanwhile, float (&sums)[FRAGS_M][FRAGS_N][4],
                                              float (&squares)[FRAGS_M][2]) {
    const Places places(warp);
    Copies<MATRICES> copies(in, tile);
#pragma unroll 1
    for (int s = 0; s < MMA_STAGES; ++s) copies.next(shared + s * STAGE);
    meanwhile();
    wait_for_groups<MMA_STAGES - 1>();
    copies.add_residual(shared, 0);
    __syncthreads();
    Rows rows;
    Columns now, next;
#pragma unroll
    for (int m = 0; m < FRAGS_M; ++m) places.load(rows, m, shared, 0);
    places.load(now, shared, 0);
    char* stage = shared;
#pragma unroll 1
    for (int k = 0; k < in.K; k += MMA_SLICE) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int then = (step + 1) % STEPS;
            char* done = stage;
            if (then == 0) {
                stage = stage == shared + (MMA_STAGES - 1) * STAGE ? shared : stage + STAGE;
                wait_for_groups<MMA_STAGES - 2>();
                copies.add_residual(stage, k + MMA_SLICE);
                __syncthreads();  // the next slice has arrived
            }
            places.load(next, stage, then);
            unsigned b[FRAGS_N][2];
#pragma unroll
            for (int n = 0; n < FRAGS_N; ++n) now.get(n, b[n]);
            const bool add_squares = (k / (16 * MMA_WARPS_K) + step + warp.k) % MMA_WARPS_N == warp.n;
#pragma unroll
            for (int m = 0; m < FRAGS_M; ++m) {
                multiply(sums[m], squares[m], rows.a[m], b, now.gamma, add_squares);
                places.load(rows, m, stage, then);  // the next step's x, into the same registers
                // At the barrier, all warps had loaded the rest of the current slice, so its stage is free.
                if (then == 0 && m == 0) copies.next(done);
            }
            now = next;
        }
    }
    wait_for_groups<0>();
    __syncthreads();
}

// Computes a tile. Each thread then processes 8 columns of some rows: begin(column) is called once per tile, to prepare
// values that depend only on these columns. end(row, column, values, factor) is called for each row: `values` are the
// sums for each weight matrix, `factor` is their common factor.
template <int MATRICES, typename Begin, typename End>
__device__ __forceinline__ void compute_tile(const Inputs& in, const Tile& tile, char* shared, float eps, Begin begin,
                                             End end) {
    constexpr int COLUMNS = MMA_COLUMNS / MATRICES;
    constexpr bool SMALL = FRAGS_M * FRAGS_N <= 16;  // enough registers are free to hold values prepared by begin()
    const Warp warp;
    const Share<COLUMNS / 8, MMA_ROWS> share;
    float sums[FRAGS_M][FRAGS_N][4] = {}, squares[FRAGS_M][2] = {};
    multiply_tile<MATRICES>(
        in, tile, shared, warp,
        [&] {
            if (SMALL) begin(8 * share.part);
        },
        sums, squares);

    float* sums_s = reinterpret_cast<float*>(shared);  // [MMA_WARPS_K][MMA_ROWS][SUMS_PITCH]
    float* squares_s = sums_s + SUMS;                  // [PARTS][MMA_ROWS]
#pragma unroll
    for (int m = 0; m < FRAGS_M; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = warp.m * WARP_ROWS + 16 * m + 8 * i + warp.g;
            if (MMA_NORM) {
                const float square = lanes_sum<4>(squares[m][i]);
                if (warp.t == 0) squares_s[(warp.k * MMA_WARPS_N + warp.n) * MMA_ROWS + row] = square;
            }
            float* to = sums_s + (warp.k * MMA_ROWS + row) * SUMS_PITCH + warp.n * WARP_COLUMNS;
#pragma unroll
            for (int n = 0; n < FRAGS_N; ++n) {
                const float v0 = sums[m][n][2 * i], v1 = sums[m][n][2 * i + 1];
                if (FP8 && !MMA_W_NK) {  // sums of columns 4t, 4t + 2 of 16 (n odd: 4t + 1, 4t + 3)
                    float* of = to + n / 2 * 16 + 4 * warp.t + n % 2;
                    of[0] = v0, of[2] = v1;
                } else {
                    *reinterpret_cast<float2*>(to + 8 * n + 2 * warp.t) = make_float2(v0, v1);
                }
            }
        }
    }
    __syncthreads();

    if (!share.has(0)) return;
    if (!SMALL) begin(8 * share.part);
#pragma unroll 1
    for (int row = share.row; row < min(MMA_ROWS, in.M - tile.row); row += share.STEP) {
        float v[MATRICES][8], factor = WEIGHT_FACTOR;
#pragma unroll
        for (int i = 0; i < 2 * MATRICES; ++i) {
            const float* from = sums_s + row * SUMS_PITCH + i / 2 * COLUMNS + 8 * share.part + i % 2 * 4;
            float4 sum = *reinterpret_cast<const float4*>(from);
#pragma unroll
            for (int k = 1; k < MMA_WARPS_K; ++k) {
                const float4 more = *reinterpret_cast<const float4*>(from + k * MMA_ROWS * SUMS_PITCH);
                sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
            }
            float* to = v[i / 2] + i % 2 * 4;
            to[0] = sum.x, to[1] = sum.y, to[2] = sum.z, to[3] = sum.w;
        }
        if (MMA_NORM) {
            float square = 0.0f;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) square += squares_s[part * MMA_ROWS + row];
            factor *= rsqrtf(square / (float)in.K + eps);
        }
        end(row, 8 * share.part, v, factor);
    }
}
