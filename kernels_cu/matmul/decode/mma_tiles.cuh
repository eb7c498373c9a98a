// The loop over K of matmul/decode/mma_tiles.cu: constants, copies of slices (DECODE_CHUNKS chunks of K) to shared
// memory, and products of slices. The including file defines DECODE_CLUSTER and includes lib/sm80.cuh.
#pragma once
#include "lib/storage.cuh"
#include "lib/decode/order.cuh"

#ifndef DECODE_ROWS  // rows of x per tile
#define DECODE_ROWS 64
#endif
#ifndef DECODE_COLUMNS
#define DECODE_COLUMNS 32
#endif
#ifndef DECODE_WARPS_M  // warps along the rows of a tile
#define DECODE_WARPS_M 4
#endif
#ifndef DECODE_WARPS_N
#define DECODE_WARPS_N 1
#endif
#ifndef DECODE_CHUNKS  // chunks of K per slice; a chunk is 64 bytes of a row of w
#define DECODE_CHUNKS 1
#endif
#ifndef DECODE_STAGES
#define DECODE_STAGES 3
#endif
#ifndef DECODE_BLOCKS  // minimum blocks per SM (__launch_bounds__)
#define DECODE_BLOCKS 1
#endif
#ifndef DECODE_UP  // 1: in a tile, 32 columns of w alternate with the same columns of a second matrix, `up`
#define DECODE_UP 0
#endif
#ifndef DECODE_GROUPS  // groups of warps that divide the K of a tile, without clusters
#define DECODE_GROUPS 1
#endif

constexpr int GROUP = 32 * DECODE_WARPS_M * DECODE_WARPS_N, THREADS = DECODE_GROUPS * GROUP;  // GROUP: threads
constexpr int WARP_ROWS = DECODE_ROWS / DECODE_WARPS_M, WARP_COLUMNS = DECODE_COLUMNS / DECODE_WARPS_N;
constexpr int TILES_M = WARP_ROWS / 8, TILES_N = WARP_COLUMNS / 8;  // 8-row and 8-column tiles per warp
constexpr int SLICE = DECODE_CHUNKS * order::CHUNK;                  // values of K
constexpr int X_UNITS = SLICE / 4;                                     // 16-byte units of x per row of a slice
constexpr int PART_UNITS = SLICE * sizeof(W) / 16, W_UNITS = order::PARTS * PART_UNITS;
constexpr int X_EACH = order::WIDTH / 4;                               // units of x per lane and chunk
constexpr int X_PITCH = 16 * X_UNITS, W_PITCH = 16 * W_UNITS;          // bytes per row of a slice
constexpr int X_BYTES = DECODE_ROWS * X_PITCH, STAGE = X_BYTES + DECODE_COLUMNS * W_PITCH;
constexpr int OWN_ROWS = (DECODE_ROWS + DECODE_CLUSTER - 1) / DECODE_CLUSTER;  // rows that a block stores
constexpr int PITCH = DECODE_COLUMNS + 16;                             // floats per row of sums: no bank conflicts
constexpr int WARPS = THREADS / 32, ACROSS = DECODE_COLUMNS / 32;      // ACROSS: sums per lane and row
static_assert(TILES_M * 8 * DECODE_WARPS_M == DECODE_ROWS, "a warp has whole tiles of 8 rows");
static_assert(TILES_N % 2 == 0 && TILES_N * 8 * DECODE_WARPS_N == DECODE_COLUMNS, "a warp has groups of 16 columns");
static_assert(GROUP % (2 * X_UNITS) == 0 && GROUP % (16 * W_UNITS) == 0, "the threads copy whole groups of rows");
static_assert(WARPS <= 32 && STAGE % 128 == 0, "a block has up to 1024 threads; a stage begins with the first bank");
constexpr int OUTPUTS = ACROSS / (1 + DECODE_UP);                      // outputs per lane and row
static_assert(DECODE_COLUMNS == 32 * (1 + DECODE_UP) * OUTPUTS, "a warp stores a row");
static_assert(!(DECODE_OPERAND || DECODE_OUT_OPERAND) || !order::FLOATS, "terms have 16 bits");
static_assert(DECODE_STAGES >= 2, "one slice is copied while another one is multiplied");

// Returns the byte offset of 16-byte unit `unit` in row `row` of x in shared memory. Eight lanes load at a time, four
// units of a row and four of the next row: these units are in different banks. Rows of 64 bytes need no permutation.
//
//   position               0 1 2 3 4 5 6 7
//   unit, X_EACH 1, odd    4 5 6 7 0 1 2 3     even rows of X_EACH 1 and 2: 0 to 7
//   unit, X_EACH 2, odd    1 0 3 2 5 4 7 6
__device__ __forceinline__ int x_unit(int row, int unit) {
    const int odd = row & 1;
    if (X_UNITS == 4) return 16 * unit;
    return 16 * (X_EACH == 1 ? unit ^ odd << 2 : X_EACH == 2 ? unit ^ odd : unit ^ odd ^ (unit >> 2 & 2));
}

// Returns the byte offset of 16-byte unit `unit` in row `row` of w in shared memory. With eight or more units per row:
// 
//   position         0 1 2 3 4 5 6 7
//   unit, even row   0 1 2 3 4 5 6 7
//   unit, odd row    4 5 6 7 0 1 2 3
__device__ __forceinline__ int w_unit(int row, int unit) { return 16 * (W_UNITS == 4 ? unit : unit ^ (row & 1) << 2); }

// Returns the column of w that shared memory holds at position q of a group of 16 columns. The sums of lane t in two
// 8-column tiles, at positions 2 t, 2 t + 1 and 8 + 2 t, 9 + 2 t, are thus of the neighbouring columns 4 t to 4 t + 3.
//
//   position q   0 1 2 3 4 5  6  7  8 9 10 11 12 13 14 15
//   column       0 1 4 5 8 9 12 13  2 3  6  7 10 11 14 15
__device__ __forceinline__ int column_at(int q) { return (q & 6) * 2 + (q >> 2 & 2) + (q & 1); }

// Returns the index of the thread's group of warps, of DECODE_GROUPS groups, and below the thread's index in the group.
__device__ __forceinline__ int group() { return DECODE_GROUPS > 1 ? threadIdx.x / GROUP : 0; }
__device__ __forceinline__ int thread_of_group() { return DECODE_GROUPS > 1 ? threadIdx.x % GROUP : threadIdx.x; }

// A barrier for the threads of a group.
__device__ __forceinline__ void sync_group() {
    if (DECODE_GROUPS == 1) __syncthreads();
    else asm volatile("bar.sync %0, %1;" ::"r"(1 + group()), "n"(GROUP) : "memory");
}

// The part of the product that a block, or a group of its warps, computes: its tile of outputs and its range of K.
struct Share {
    int row, column, rank;  // first row and first output of the tile; rank in the cluster
    int first, last;        // splits (ranges of K): first .. last - 1
    int k, K;               // values of K in these splits: k .. K - 1

    __device__ __forceinline__ Share(int M, int N, int K) {
        constexpr int SIZE = DECODE_CLUSTER * DECODE_GROUPS;
        const int tile = blockIdx.x / DECODE_CLUSTER, tiles_m = (M - 1) / DECODE_ROWS + 1;
        const int splits = order::splits(K), each = (splits + SIZE - 1) / SIZE;
        row = tile % tiles_m * DECODE_ROWS;
        column = tile / tiles_m * 32 * OUTPUTS;
        rank = blockIdx.x % DECODE_CLUSTER;
        first = min((rank + group()) * each, splits), last = min(first + each, splits);
        k = first * order::split_length(K);
        this->K = min(last * order::split_length(K), K);
    }

    // Returns the number of slices along K.
    __device__ __forceinline__ int slices() const { return (K - k + SLICE - 1) / SLICE; }
};

// A thread's copies of slices of x. In each slice, a thread copies one 16-byte unit of several rows.
struct CopiesOfX {
    static constexpr int STEP = GROUP / X_UNITS, PASSES = (DECODE_ROWS + STEP - 1) / STEP;  // PASSES of STEP rows
    static constexpr int AT_ONCE = order::HI_LO ? 2 : PASSES;  // unrolled passes, limited by registers
    Copy16 started[PASSES];
    const float* from;  // address in the next slice
    int k, K, row, left, at, stride;  // left: rows from `row` on; at: offset in a stage; stride: floats per row

    __device__ __forceinline__ CopiesOfX(const float* x, const Share& share, int M, int K_) {
        const int unit = thread_of_group() % X_UNITS;
        row = thread_of_group() / X_UNITS;
        k = share.k + 4 * unit, K = share.K, left = M - share.row - row;
        at = row * X_PITCH + x_unit(row, unit);
        from = x + (long long)(share.row + row) * K_ + k;
        stride = K_;
    }

    // Returns whether the thread copies a row in pass i: row `row` + i STEP of the tile.
    __device__ __forceinline__ bool has(int i) const { return DECODE_ROWS % STEP == 0 || row + i * STEP < DECODE_ROWS; }

    // Requests copies of the next slice: rows `row`, `row` + STEP, ... of x, to `stage` (DECODE_ROWS, X_PITCH bytes).
    __device__ __forceinline__ void next(char* stage) {
        const int rows = k < K ? left : 0;
        const float* x = from;
#pragma unroll HAS_BF16 ? AT_ONCE : PASSES
        for (int pass = 0; pass < PASSES; ++pass) {
            if (has(pass)) started[pass].start(stage + at + pass * STEP * X_PITCH, x, pass * STEP < rows);
            x += (long long)STEP * stride;
        }
        from += SLICE, k += SLICE;
    }

    // Replaces the floats that this thread has copied by terms, so that a lane can load its terms of a step at once.
    __device__ __forceinline__ void convert(char* stage, float inverse) const {
        if constexpr (!DECODE_OPERAND && !order::FLOATS) {
#pragma unroll AT_ONCE
            for (int pass = 0; pass < PASSES; ++pass) {
                if (!has(pass)) continue;
                char* unit = stage + at + pass * STEP * X_PITCH;
                const float4 v = *reinterpret_cast<float4*>(unit);
                uint4 terms;
                split_pair<order::KIND>(v.x, v.y, inverse, terms.x, terms.y);
                split_pair<order::KIND>(v.z, v.w, inverse, terms.z, terms.w);
                *reinterpret_cast<uint4*>(unit) = terms;
            }
        }
    }
};

// A thread's copies of slices of w. In each slice, a thread copies one 16-byte unit of several rows of w. In shared
// memory, the high parts of a row of hi/lo weights precede its low parts.
struct CopiesOfW {
    static constexpr int STEP = GROUP / W_UNITS, PASSES = (DECODE_COLUMNS + STEP - 1) / STEP, WIDE = 16 / sizeof(W);
    Copy16 started[PASSES];
    const W* from;  // address in the next slice
    const W* from_up;
    int k, K, row, left, at, stride;

    __device__ __forceinline__ CopiesOfW(const W* w, const W* up, const Share& share, int N, int K_) {
        const int unit = thread_of_group() % W_UNITS;
        row = thread_of_group() / W_UNITS;
        const int of_matrix = DECODE_UP ? row / 64 * 32 + row % 32 : row;
        const int n = share.column + of_matrix / 16 * 16 + column_at(row % 16);
        k = share.k + WIDE * (unit % PART_UNITS), K = share.K, left = N - n;
        at = X_BYTES + row * W_PITCH + w_unit(row, unit);
        const long long offset = ((long long)(unit / PART_UNITS) * N + n) * K_ + k;
        from = (DECODE_UP && STEP > 32 && row / 32 % 2 ? up : w) + offset;
        if constexpr (DECODE_UP && STEP <= 32) from_up = up + offset;
        stride = K_;
    }

    // Requests the copies of the next slice: (DECODE_COLUMNS, W_PITCH bytes) at X_BYTES in `stage`. With DECODE_UP, 32
    // rows of w and 32 rows of up alternate.
    __device__ __forceinline__ void next(char* stage) {
        const int rows = k < K ? left : 0;
        const W* w = from;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            if constexpr (DECODE_UP) {
                static_assert(!DECODE_UP || DECODE_COLUMNS % STEP == 0, "all threads copy equally many rows");
                const int first = pass * STEP, n = first / 64 * 32 + first % 32;  // first row of the pass; output
                const W* const matrix = STEP <= 32 && first / 32 % 2 ? from_up : from;
                started[pass].start(stage + at + first * W_PITCH, matrix + (long long)n * stride, n < rows);
                continue;
            }
            if (DECODE_COLUMNS % STEP == 0 || row + pass * STEP < DECODE_COLUMNS) {
                started[pass].start(stage + at + pass * STEP * W_PITCH, w, pass * STEP < rows);
            }
            w += (long long)STEP * stride;
        }
        from += SLICE, k += SLICE;
        if constexpr (DECODE_UP && STEP <= 32) from_up += SLICE;
    }
};

// A warp's place in the tile of outputs (DECODE_ROWS, DECODE_COLUMNS): DECODE_WARPS_N warps divide the columns.
struct Warp {
    int row, column, g, t;  // first row and column in the tile; lane number: 4 g + t

    __device__ __forceinline__ Warp()
        : row(thread_of_group() / 32 / DECODE_WARPS_N * WARP_ROWS),
          column(thread_of_group() / 32 % DECODE_WARPS_N * WARP_COLUMNS),
          g(threadIdx.x % 32 / 4), t(threadIdx.x % 4) {}
};

// The sums of lane 4 g + t for each 8x8 tile: for row g and columns 2t and 2t + 1, first two sums for the high terms of
// x, then two sums for the low terms.
typedef float Sums[TILES_M][TILES_N][4];

// A lane's values of 8 rows of x, with both terms, as operand A. They cover one step or, for weights with two terms,
// all steps of a chunk.
struct RowTile {
    static constexpr int STEPS = order::TILE_GROUPS == 1 ? order::STEPS : 1;
    unsigned value[STEPS][4];

    // row: address of the lane's row in a stage. unit: index of the lane's first 16-byte unit. With float weights, one
    // unit is for two steps.
    __device__ __forceinline__ RowTile(const char* row, int unit, int g) {
        if constexpr (order::FLOATS) {
            const uint4 v = *reinterpret_cast<const uint4*>(row + x_unit(g, unit));
            const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                unsigned* const to = value[i / 2] + i % 2 * 2;
                order::split_tf32(__int_as_float((int)words[i]), to[0], to[1]);
            }
        } else {
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const uint4 v = *reinterpret_cast<const uint4*>(row + x_unit(g, unit + s));
                value[s][0] = v.x, value[s][1] = v.y, value[s][2] = v.z, value[s][3] = v.w;
            }
        }
    }
};

// A lane's values of a chunk of 8 columns of w as operand B.
struct ColumnTile {
    unsigned high[order::STEPS][2], low[order::STEPS][2];  // low: only for float and hi/lo weights

    // unit: index in row `row` of the lane's 16-byte unit; with hi/lo weights, of the unit with high parts.
    __device__ __forceinline__ void take(const char* row, int unit, int g) {
        const uint4 v = *reinterpret_cast<const uint4*>(row + w_unit(g, unit));
        const unsigned words[4] = {v.x, v.y, v.z, v.w};
        if constexpr (order::HI_LO) {
            const uint4 second = *reinterpret_cast<const uint4*>(row + w_unit(g, unit + PART_UNITS));
            low[0][0] = second.x, low[0][1] = second.y, low[1][0] = second.z, low[1][1] = second.w;
        }
#pragma unroll
        for (int s = 0; s < order::STEPS; ++s) {
            if constexpr (order::FLOATS) {
                order::split_tf32(__int_as_float((int)words[2 * s]), high[s][0], low[s][0]);
                order::split_tf32(__int_as_float((int)words[2 * s + 1]), high[s][1], low[s][1]);
            } else if constexpr (sizeof(W) == 1) {
                order::convert_fp8(words[s], high[s][0], high[s][1]);
            } else {
                high[s][0] = order::two_weights(words[2 * s]), high[s][1] = order::two_weights(words[2 * s + 1]);
            }
        }
    }
};

// Adds the products of one mma to c: x is operand A (8 rows with two terms each), w operand B (8 columns).
__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&x)[4], const unsigned (&w)[2]) {
    if constexpr (order::FLOATS) mma_tf32(c, x, w);
    else if constexpr (order::BRAIN) mma_bf16(c, x, w);
    else mma_fp16(c, x, w);
}

// Adds the products of a chunk for 8 rows of x to the sums of the split. For weights with two terms, the tensor cores
// first compute sums over the chunk, which are then added to the sums of the split by float additions.
__device__ __forceinline__ void add_chunk(float (&sums)[TILES_N][4], const char* x, int unit, int g,
                                          const ColumnTile* columns) {
    if constexpr (order::TILE_GROUPS == 1) {
        const RowTile rows(x, unit, g);
#pragma unroll
        for (int n = 0; n < TILES_N; ++n) {
            float low[4] = {}, high[4] = {};
#pragma unroll
            for (int s = 0; s < order::STEPS; ++s) {
                multiply(low, rows.value[s], columns[n].low[s]);
                multiply(high, rows.value[s], columns[n].high[s]);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[n][e] += order::joined(high[e], low[e]);
        }
    } else {
#pragma unroll
        for (int s = 0; s < order::STEPS; ++s) {
            const RowTile rows(x, unit + s, g);
#pragma unroll
            for (int n = 0; n < TILES_N; ++n) multiply(sums[n], rows.value[0], columns[n].high[s]);
        }
    }
}

// Adds the products of a slice to `sums`, the sums of the split that contains the slice.
__device__ __forceinline__ void multiply(Sums& sums, const char* stage, const Warp& warp) {
    const char* x = stage + (warp.row + warp.g) * X_PITCH;
    const char* w = stage + X_BYTES + (warp.column + warp.g) * W_PITCH;
#pragma unroll 1  // unrolling needs too many registers
    for (int chunk = 0; chunk < DECODE_CHUNKS; ++chunk) {
        const int unit = 4 * chunk + warp.t;
        ColumnTile columns[TILES_N];
#pragma unroll
        for (int n = 0; n < TILES_N; ++n) {
            columns[n].take(w + 8 * n * W_PITCH, unit, warp.g);
        }
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) {
            add_chunk(sums[m], x + 8 * m * X_PITCH, unit * X_EACH, warp.g, columns);
        }
    }
}
