// The loop of matmul/decode_tiles.cu over K: its constants, copies of slices to shared memory, and their products. The
// including file defines DT_CLUSTER and includes lib/sm80.cuh.
#pragma once
#include "lib/storage.cuh"
#include "matmul/decode_order.cuh"

#ifndef DT_ROWS  // size of a tile
#define DT_ROWS 64
#endif
#ifndef DT_COLUMNS
#define DT_COLUMNS 64
#endif
#ifndef DT_WARPS_M  // warps along its rows and columns
#define DT_WARPS_M 2
#endif
#ifndef DT_WARPS_N
#define DT_WARPS_N 2
#endif
#ifndef DT_CHUNKS  // in a slice of K: 64 bytes of a row of w
#define DT_CHUNKS 1
#endif
#ifndef DT_STAGES
#define DT_STAGES 3
#endif
#ifndef DT_BLOCKS  // that an SM has registers for
#define DT_BLOCKS 1
#endif

constexpr int THREADS = 32 * DT_WARPS_M * DT_WARPS_N;
constexpr int WARP_ROWS = DT_ROWS / DT_WARPS_M, WARP_COLUMNS = DT_COLUMNS / DT_WARPS_N;
constexpr int TILES_M = WARP_ROWS / 16, TILES_N = WARP_COLUMNS / 8;  // of a warp: rows and columns of mma
constexpr int SLICE = DT_CHUNKS * order::CHUNK;                       // of K
constexpr int X_UNITS = SLICE / 4, W_UNITS = SLICE * sizeof(W) / 16;  // of 16 bytes, in a row of a slice
constexpr int X_EACH = order::WIDTH / 4;                                 // units of x that a lane has in a chunk
constexpr int X_PITCH = 16 * X_UNITS, W_PITCH = 16 * W_UNITS;            // bytes
constexpr int HALF = 8 * X_PITCH;                                        // to the second row of a pair
constexpr int THIRD = DT_ROWS * X_PITCH;                                 // the third terms
constexpr int X_BYTES = THIRD + (order::TERMS == 3 ? THIRD / 2 : 0), STAGE = X_BYTES + DT_COLUMNS * W_PITCH;
constexpr int OWN_ROWS = (DT_ROWS + DT_CLUSTER - 1) / DT_CLUSTER;        // that a block stores
constexpr int PITCH = DT_COLUMNS + 16;                                   // of the sums: no bank conflicts
constexpr int WARPS = THREADS / 32, ACROSS = DT_COLUMNS / 32;            // outputs of a lane in a row
static_assert(TILES_M * 16 * DT_WARPS_M == DT_ROWS, "a warp has whole tiles of 16 rows");
static_assert(TILES_N % 2 == 0 && TILES_N * 8 * DT_WARPS_N == DT_COLUMNS, "a warp has whole groups of 16 columns");
static_assert(THREADS % (8 * X_UNITS) == 0 && THREADS % (16 * W_UNITS) == 0, "the threads copy whole groups of rows");
static_assert(WARPS <= 32 && STAGE % 128 == 0, "a block has up to 1024 threads; a stage begins with the first bank");
static_assert(DT_COLUMNS == 32 * ACROSS, "a warp stores a row");
static_assert(DT_STAGES >= 2, "one slice is copied while another one is multiplied");

// The byte at which a unit is in a row of shared memory: the units that 8 lanes load at a time, 4 of a row and 4 of the
// next one, are in different banks. Rows of 64 bytes need no permutation.
__device__ __forceinline__ int x_unit(int row, int unit) {
    const int odd = row & 1;
    if (X_UNITS == 4) return 16 * unit;
    return 16 * (X_EACH == 1 ? unit ^ odd << 2 : X_EACH == 2 ? unit ^ odd : unit ^ odd ^ (unit >> 2 & 2));
}

__device__ __forceinline__ int w_unit(int row, int unit) { return 16 * (W_UNITS == 4 ? unit : unit ^ (row & 1) << 2); }

// The column, in its group of 16, at position q.
__device__ __forceinline__ int column_at(int q) { return (q & 6) * 2 + (q >> 2 & 2) + (q & 1); }

// What a block multiplies: its tile, and its share of K.
struct Share {
    int row, column, rank;  // first row and column; place in the cluster
    int first, last;        // splits
    int k, K;               // start and end of the splits

    __device__ __forceinline__ Share(int M, int N, int K) {
        constexpr int SIZE = DT_CLUSTER;
        const int tile = blockIdx.x / SIZE, tiles_m = (M - 1) / DT_ROWS + 1;
        const int splits = order::splits(K), each = (splits + SIZE - 1) / SIZE;
        row = tile % tiles_m * DT_ROWS;
        column = tile / tiles_m * DT_COLUMNS;
        rank = blockIdx.x % SIZE;
        first = min(rank * each, splits), last = min(first + each, splits);
        k = first * order::split_length(K);
        this->K = min(last * order::split_length(K), K);
    }

    __device__ __forceinline__ int slices() const { return (K - k + SLICE - 1) / SLICE; }
};

// A thread's share of the slices of x: a unit in pairs of rows, 8 apart.
struct CopiesOfX {
    static constexpr int STEP = THREADS / X_UNITS * 2, PASSES = (DT_ROWS + STEP - 1) / STEP;  // rows
    const float* from;  // of the next slice
    int k, K, row, left;      // left: rows of x from `row` on
    int at, third;            // bytes in a stage
    int stride;               // of the rows

    __device__ __forceinline__ CopiesOfX(const float* x, const Share& share, int M, int K_) {
        const int pair = threadIdx.x / X_UNITS, unit = threadIdx.x % X_UNITS;
        row = pair / 8 * 16 + pair % 8;
        k = share.k + 4 * unit, K = share.K, left = M - share.row - row;
        at = row * X_PITCH + x_unit(row, unit), third = THIRD + pair * X_PITCH + x_unit(row, unit);
        from = x + (long long)(share.row + row) * K_ + k;
        stride = K_;
    }

    __device__ __forceinline__ bool has(int pass) const { return DT_ROWS % STEP == 0 || row + pass * STEP < DT_ROWS; }

    __device__ __forceinline__ void next(char* stage) {
        const int rows = k < K ? left : 0;
        const float* x = from;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            if (has(pass)) {
                char* to = stage + at + pass * STEP * X_PITCH;
                copy16(to, x, pass * STEP < rows);
                copy16(to + HALF, x + 8ll * stride, pass * STEP + 8 < rows);
            }
            x += (long long)STEP * stride;
        }
        from += SLICE, k += SLICE;
    }

    // Replaces the values, when they have arrived, by what a lane loads at once: of rows r and r + 8 alternately, a
    // term, or the floats of a step.
    __device__ __forceinline__ void convert(char* stage) const {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            if (!has(pass)) continue;
            char* pair = stage + at + pass * STEP * X_PITCH;
            uint4 *upper = reinterpret_cast<uint4*>(pair), *lower = reinterpret_cast<uint4*>(pair + HALF);
            if constexpr (order::FLOATS) {
                const uint4 a = *upper, b = *lower;
                *upper = {a.x, b.x, a.y, b.y}, *lower = {a.z, b.z, a.w, b.w};
            } else {
                const float4 a = *reinterpret_cast<float4*>(upper), b = *reinterpret_cast<float4*>(lower);
                unsigned x[order::TERMS], y[order::TERMS], z[order::TERMS], w[order::TERMS];
                order::split_pair(a.x, a.y, x);
                order::split_pair(b.x, b.y, y);
                order::split_pair(a.z, a.w, z);
                order::split_pair(b.z, b.w, w);
                *upper = {x[0], y[0], z[0], w[0]}, *lower = {x[1], y[1], z[1], w[1]};
                if constexpr (order::TERMS == 3) {
                    *reinterpret_cast<uint4*>(stage + third + pass * STEP / 2 * X_PITCH) = {x[2], y[2], z[2], w[2]};
                }
            }
        }
    }
};

// A thread's share of the slices of w: a unit of several rows of w.
struct CopiesOfW {
    static constexpr int STEP = THREADS / W_UNITS, PASSES = (DT_COLUMNS + STEP - 1) / STEP, WIDE = 16 / sizeof(W);
    const W* from;  // of the next slice
    int k, K, row, left, at, stride;

    __device__ __forceinline__ CopiesOfW(const W* w, const Share& share, int N, int K_) {
        const int unit = threadIdx.x % W_UNITS;
        row = threadIdx.x / W_UNITS;
        const int n = share.column + row / 16 * 16 + column_at(row % 16);
        k = share.k + WIDE * unit, K = share.K, left = N - n;
        at = X_BYTES + row * W_PITCH + w_unit(row, unit);
        from = w + (long long)n * K_ + k;
        stride = K_;
    }

    __device__ __forceinline__ void next(char* stage) {
        const int rows = k < K ? left : 0;
        const W* w = from;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            if (DT_COLUMNS % STEP == 0 || row + pass * STEP < DT_COLUMNS) {
                copy16(stage + at + pass * STEP * W_PITCH, w, pass * STEP < rows);
            }
            w += (long long)STEP * stride;
        }
        from += SLICE, k += SLICE;
    }
};

struct Warp {
    int row, column, g, t;  // first ones in the tile; the lane is 4 g + t

    __device__ __forceinline__ Warp()
        : row(threadIdx.x / 32 / DT_WARPS_N * WARP_ROWS), column(threadIdx.x / 32 % DT_WARPS_N * WARP_COLUMNS),
          g(threadIdx.x % 32 / 4), t(threadIdx.x % 4) {}
};

typedef float Sums[TILES_M][TILES_N][4];

// A lane's part of a chunk of 16 rows of x: a term.
struct RowTile {
    unsigned value[order::STEPS][4];

    // x: the stage; row: the first one; unit: the lane's first one in the chunk.
    __device__ __forceinline__ RowTile(const char* x, int row, int g, int unit, int term) {
#pragma unroll
        for (int s = 0; s < order::STEPS; ++s) {
            const int plane = order::FLOATS ? s : term;
            const char* pair = x + (plane == 2 ? THIRD + (row / 2 + g) * X_PITCH : (row + g) * X_PITCH + plane * HALF);
            const uint4 v = *reinterpret_cast<const uint4*>(pair + x_unit(g, order::FLOATS ? unit : unit + s));
            const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                unsigned low;
                value[s][i] = words[i];
                if constexpr (order::FLOATS) {
                    order::split_tf32(__int_as_float((int)words[i]), value[s][i], low);
                    if (term == 0) value[s][i] = low;
                }
            }
        }
    }
};

// A lane's part of a chunk of 8 columns of w.
struct ColumnTile {
    unsigned high[order::STEPS][2], low[order::STEPS][2];  // low: of float weights

    __device__ __forceinline__ void take(const uint4& v) {
        const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int s = 0; s < order::STEPS; ++s) {
            if constexpr (order::FLOATS) {
                order::split_tf32(__int_as_float((int)words[2 * s]), high[s][0], low[s][0]);
                order::split_tf32(__int_as_float((int)words[2 * s + 1]), high[s][1], low[s][1]);
            } else if constexpr (sizeof(W) == 1) {
                order::convert_fp8(words[s], high[s][0], high[s][1]);
            } else {
                high[s][0] = words[2 * s], high[s][1] = words[2 * s + 1];
            }
        }
    }
};

typedef float Part[TILES_N][4];  // of a row of tiles

// A product of terms over the steps of a chunk. The mma of a step follow each other: none waits for the one before it.
template <bool LOW>
__device__ __forceinline__ void multiply(Part& part, const RowTile& rows, const ColumnTile* columns) {
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) part[n][e] = 0.0f;
    }
#pragma unroll
    for (int s = 0; s < order::STEPS; ++s) {
#pragma unroll
        for (int n = 0; n < TILES_N; ++n) {
            const unsigned(&w)[2] = LOW ? columns[n].low[s] : columns[n].high[s];
            if constexpr (order::FLOATS) mma_tf32(part[n], rows.value[s], w);
            else if constexpr (order::TERMS == 3) mma_bf16(part[n], rows.value[s], w);
            else mma_fp16(part[n], rows.value[s], w);
        }
    }
}

__device__ __forceinline__ void add(Part& to, const Part& part) {
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) to[n][e] += part[n][e];
    }
}

// Adds the products of a slice.
__device__ __forceinline__ void multiply(Sums& sums, const char* stage, const Warp& warp) {
    const char* w = stage + X_BYTES + (warp.column + warp.g) * W_PITCH;
#pragma unroll 1  // two at once would not fit in 128 registers
    for (int chunk = 0; chunk < DT_CHUNKS; ++chunk) {  // a part of the order of additions
        const int unit = 4 * chunk + warp.t;
        ColumnTile columns[TILES_N];
#pragma unroll
        for (int n = 0; n < TILES_N; ++n) {
            columns[n].take(*reinterpret_cast<const uint4*>(w + 8 * n * W_PITCH + w_unit(warp.g, unit)));
        }
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) {
            const auto rows = [&](int term) {
                return RowTile(stage, warp.row + 16 * m, warp.g, unit * X_EACH, term);
            };
            Part part, term;
            if constexpr (order::FLOATS) multiply<true>(part, rows(1), columns);
            else multiply<false>(part, rows(0), columns);
#pragma unroll
            for (int i = order::FLOATS ? 0 : 1; i < order::TERMS; ++i) {
                multiply<false>(term, rows(i), columns);
                add(part, term);
            }
            add(sums[m], part);
        }
    }
}
