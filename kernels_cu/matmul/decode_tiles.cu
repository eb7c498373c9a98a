// The products of decoding for many rows, on tensor cores, with the order of additions of matmul/decode_order.cuh:
//
//   linear_decode_tiles out = [residual +] [gelu] (x W^T * scale + bias)
//   qkv_decode_tiles    the same product without residual and GELU: q goes to an array, k and v to the KV cache
//
// x (M, K) is float, W (N, K) of any type. A block computes DT_ROWS rows by DT_COLUMNS columns of the output, or with
// DT_CLUSTER the share of K of such a tile that belongs to its place in a cluster: at 64 rows a product of GPT-2 has so
// few tiles that a third of the GPU would do all the work, and each block would load three times as much.
//
//   all threads   [ weights of the first slices | wait | x of the first slices | slices ... | sums | epilogue ]
//
// A slice is a part of the order of additions: 64 of K, or 32 of float weights. DT_STAGES slices are in shared memory;
// while one is multiplied the later ones are being copied. Both operands are copied as they are. A warp converts its
// fragments of x to two terms, and FP8 weights to bfloat16, when it loads them from shared memory; the conversions take
// fewer instructions the more columns the warp multiplies with them.
//
// At the end of each split its sums go to shared memory, in the order of rows, from which the epilogue stores whole rows:
//
//   DT_CLUSTER 1   added to the sums of the splits before
//   otherwise      row r to the block r % DT_CLUSTER of the cluster, which waits for the sums of all splits and adds
//                  them in order. They arrive at a barrier: no block waits for another one except for its data
//
// In a group of 32 columns, the row of W at position q of shared memory is 4 (q % 8) + q / 8. Thus a lane's sums for a
// row of x are those of 4 neighbouring columns.
//
// Any M and N; 16 bytes divide a row of W; arrays are aligned to 16 bytes.
//
// grid (DT_CLUSTER * ceil(M / DT_ROWS) * ceil(N / DT_COLUMNS)), block (32 * DT_WARPS_M * DT_WARPS_N). `shared_bytes` of
// gpt2block/ops/_linear_mma_tiles.py computes the dynamic shared memory.
#include "lib/storage.cuh"
#include "lib/sm80.cuh"
#include "lib/overlap.cuh"
#include "matmul/decode_ends.cuh"
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
#ifndef DT_STAGES
#define DT_STAGES 3
#endif
#ifndef DT_CLUSTER  // blocks that share the K of a tile; more than 1: sm_90 and newer
#define DT_CLUSTER 1
#endif
#ifndef DT_BLOCKS  // that an SM has registers for
#define DT_BLOCKS 1
#endif

#if DT_CLUSTER > 1
#include "lib/sm90.cuh"
#else  // older GPUs do not know clusters
#undef __cluster_dims__
#define __cluster_dims__(size)
#endif

constexpr int THREADS = 32 * DT_WARPS_M * DT_WARPS_N;
constexpr int WARP_ROWS = DT_ROWS / DT_WARPS_M, WARP_COLUMNS = DT_COLUMNS / DT_WARPS_N;
constexpr int TILES_M = WARP_ROWS / 8, TILES_N = WARP_COLUMNS / 16;      // of a warp: rows and columns of mma
constexpr int W_UNITS = order::PART * sizeof(W) / 16, X_UNITS = order::PART / 4;  // of 16 bytes, in a row of a slice
constexpr int X_EACH = order::WIDTH / 4;                                 // of a lane, in a chunk of x
constexpr int X_BYTES = 16 * DT_ROWS * X_UNITS, STAGE = X_BYTES + 16 * DT_COLUMNS * W_UNITS;
constexpr int OWN_ROWS = (DT_ROWS + DT_CLUSTER - 1) / DT_CLUSTER;        // that a block stores
constexpr int PITCH = DT_COLUMNS + 4;                                    // of the sums: no bank conflicts
constexpr int ENDS = (OWN_ROWS * DT_COLUMNS + THREADS - 1) / THREADS;    // outputs of a thread
constexpr int AHEAD = ENDS < 8 ? ENDS : 8;                               // of them prepared before the sums are known
static_assert(TILES_M * 8 * DT_WARPS_M == DT_ROWS, "a warp has whole tiles of 8 rows");
static_assert(TILES_N % 2 == 0 && TILES_N * 16 * DT_WARPS_N == DT_COLUMNS, "a warp has whole groups of 32 columns");
static_assert(THREADS % X_UNITS == 0 && THREADS % W_UNITS == 0, "threads copy whole rows");
static_assert(DT_STAGES >= 2, "one slice is copied while another one is multiplied");

// The unit's place in a row of shared memory: the units that 8 lanes load at a time, 4 of a row and 4 of the next one,
// are in different banks. Rows of 64 bytes need no permutation.
__device__ __forceinline__ int w_place(int row, int unit) {
    return row * W_UNITS + (W_UNITS == 4 ? unit : unit ^ (row & 1) << 2);
}

__device__ __forceinline__ int x_place(int row, int unit) {
    const int odd = row & 1;
    return row * X_UNITS + (X_EACH == 1 ? unit ^ odd << 2 : X_EACH == 2 ? unit ^ odd : unit ^ odd ^ (unit >> 2 & 2));
}

__device__ __forceinline__ int column_at(int q) { return (q & ~31) + 4 * (q & 7) + (q >> 3 & 3); }

// What a block multiplies: its tile, and its share of K.
struct Share {
    int row, column, rank;      // first row and column; place in the cluster
    int first, last;            // splits
    int k, K;                   // start and end of the splits

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

    __device__ __forceinline__ int slices() const { return (K - k + order::PART - 1) / order::PART; }
};

// Copies the slices of the block's operands, with zeros outside the matrices.
struct Copies {
    const float* x;  // (M, K)
    const W* w;      // (N, K)
    const Share& share;
    int M, N, K;

    __device__ __forceinline__ void next_w(char* stage, int slice) const {
        constexpr int ROWS = THREADS / W_UNITS, WIDE = 16 / sizeof(W);
        const int unit = threadIdx.x % W_UNITS, k = share.k + slice * order::PART + unit * WIDE;
        uint4* to = reinterpret_cast<uint4*>(stage + X_BYTES);
#pragma unroll
        for (int q = threadIdx.x / W_UNITS, i = 0; i < (DT_COLUMNS + ROWS - 1) / ROWS; ++i, q += ROWS) {
            if (DT_COLUMNS % ROWS && q >= DT_COLUMNS) break;
            const int n = share.column + column_at(q);
            copy16(to + w_place(q, unit), w + (long long)n * K + k, n < N && k < share.K);
        }
    }

    __device__ __forceinline__ void next_x(char* stage, int slice) const {
        constexpr int ROWS = THREADS / X_UNITS;
        const int unit = threadIdx.x % X_UNITS, k = share.k + slice * order::PART + unit * 4;
        uint4* to = reinterpret_cast<uint4*>(stage);
#pragma unroll
        for (int r = threadIdx.x / X_UNITS, i = 0; i < (DT_ROWS + ROWS - 1) / ROWS; ++i, r += ROWS) {
            if (DT_ROWS % ROWS && r >= DT_ROWS) break;
            const int m = share.row + r;
            copy16(to + x_place(r, unit), x + (long long)m * K + k, m < M && k < share.K);
        }
    }
};

struct Warp {
    int row, column, g, t;  // first ones in the tile; the lane is 4 g + t

    __device__ __forceinline__ Warp()
        : row(threadIdx.x / 32 / DT_WARPS_N * WARP_ROWS), column(threadIdx.x / 32 % DT_WARPS_N * WARP_COLUMNS),
          g(threadIdx.x % 32 / 4), t(threadIdx.x % 4) {}
};

typedef float Sums[TILES_N][TILES_M][4];

// A lane's part of a chunk of 8 rows of x, in two terms.
__device__ __forceinline__ void load_rows(order::Rows8& rows, const uint4* x, int row, int chunk, int t) {
#pragma unroll
    for (int i = 0; i < X_EACH; ++i) {
        const uint4* from = x + x_place(row, (4 * chunk + t) * X_EACH + i);
        if constexpr (order::FLOATS) {
            rows.load(reinterpret_cast<const float*>(from));
        } else {
            const float4 v = *reinterpret_cast<const float4*>(from);
            order::split_pair(v.x, v.y, rows.high[i][0], rows.low[i][0]);
            order::split_pair(v.z, v.w, rows.high[i][1], rows.low[i][1]);
        }
    }
}

// The products of a slice, from 0 on. The terms of a step are added to all rows of a tile in turn, so that no mma waits
// for the one before it.
__device__ __forceinline__ void multiply(Sums& sums, const char* stage, const Warp& warp) {
    const uint4 *x = reinterpret_cast<const uint4*>(stage), *w = reinterpret_cast<const uint4*>(stage + X_BYTES);
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[n][m][e] = 0.0f;
        }
    }
#pragma unroll
    for (int chunk = 0; chunk < order::PART_CHUNKS; ++chunk) {
        order::Rows8 rows[TILES_M];
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) load_rows(rows[m], x, warp.row + 8 * m + warp.g, chunk, warp.t);
#pragma unroll
        for (int n = 0; n < TILES_N; ++n) {
            const int lower = warp.column + 16 * n + warp.g, unit = 4 * chunk + warp.t;
            const order::Columns columns(w[w_place(lower, unit)], w[w_place(lower + 8, unit)]);
#pragma unroll
            for (int s = 0; s < order::STEPS; ++s) {
                if constexpr (order::FLOATS) {
#pragma unroll
                    for (int m = 0; m < TILES_M; ++m) mma_tf32(sums[n][m], columns.low[s], rows[m].high[s]);
#pragma unroll
                    for (int m = 0; m < TILES_M; ++m) mma_tf32(sums[n][m], columns.high[s], rows[m].low[s]);
#pragma unroll
                    for (int m = 0; m < TILES_M; ++m) mma_tf32(sums[n][m], columns.high[s], rows[m].high[s]);
                } else {
#pragma unroll
                    for (int m = 0; m < TILES_M; ++m) mma(sums[n][m], columns.high[s], rows[m].low[s]);
#pragma unroll
                    for (int m = 0; m < TILES_M; ++m) mma(sums[n][m], columns.high[s], rows[m].high[s]);
                }
            }
        }
    }
}

// The sums of all splits, in shared memory: a plane for each split, or with DT_CLUSTER 1 a single one.
struct Total {
    float* planes;

    static __device__ __forceinline__ int bytes(int splits) {  // of shared memory: whole lines of the banks
        const int planes = DT_CLUSTER > 1 ? splits : 1;
        return (planes * OWN_ROWS * PITCH * (int)sizeof(float) + 127) / 128 * 128;
    }

#if DT_CLUSTER > 1
    static constexpr int PLANE = OWN_ROWS * PITCH;
    Barrier& arrived;

    // Called by all threads. The barrier ends when the sums of `rows` rows of all splits have arrived.
    __device__ __forceinline__ Total(float* planes, Barrier& arrived, int rows, int splits)
        : planes(planes), arrived(arrived) {
        if (threadIdx.x == 0) {
            init(arrived, 1);
            fence_inits();
            arrive_and_expect(arrived, rows * splits * DT_COLUMNS * (int)sizeof(float));
        }
        __syncthreads();
        arrive_in_cluster();
    }

    __device__ __forceinline__ void open() const { wait_for_cluster(); }  // before the first add

    __device__ __forceinline__ void add4(int split, int row, int column, float a, float b, float c, float d) const {
        store_at(row % DT_CLUSTER, planes + split * PLANE + row / DT_CLUSTER * PITCH + column, arrived, a, b, c, d);
    }

    __device__ __forceinline__ void close() const { wait(arrived, 0, "sums"); }

    __device__ __forceinline__ float get(int at, int splits) const {
        float total = planes[at];
        for (int split = 1; split < splits; ++split) total += planes[split * PLANE + at];
        return total;
    }
#else
    __device__ __forceinline__ void open() const {}

    __device__ __forceinline__ void add4(int split, int row, int column, float a, float b, float c, float d) const {
        float4* to = reinterpret_cast<float4*>(planes + row * PITCH + column);
        const float4 before = split ? *to : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        *to = split ? make_float4(before.x + a, before.y + b, before.z + c, before.w + d) : make_float4(a, b, c, d);
    }

    __device__ __forceinline__ void close() const { __syncthreads(); }

    __device__ __forceinline__ float get(int at, int) const { return planes[at]; }
#endif

    __device__ __forceinline__ void add(int split, const Sums& sums, const Warp& warp, int rows) const {
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int row = warp.row + 8 * m + 2 * warp.t + e;
                if (row >= rows) continue;
#pragma unroll
                for (int n = 0; n < TILES_N; n += 2) {
                    add4(split, row, warp.column + 16 * n + 4 * warp.g, sums[n][m][e], sums[n][m][2 + e],
                         sums[n + 1][m][e], sums[n + 1][m][2 + e]);
                }
            }
        }
    }
};

// An output of this thread, and what it needs next to the sum.
template <typename Late>
struct Output {
    int at, m, n;
    bool there;
    float scale, bias;
    Late late;
};

template <typename End>
__device__ __forceinline__ void multiply_all(const float* x, const W* w, const float* scale, const float* bias,
                                             const End& end, int M, int N, int K) {
    extern __shared__ __align__(128) char shared[];
    const Share share(M, N, K);
    const Copies copies{x, w, share, M, N, K};
    const Warp warp;
    const int slices = share.slices(), rows = min(DT_ROWS, M - share.row), splits = order::splits(K);

    char* stages = shared + Total::bytes(splits);
    const int early = min(DT_STAGES - 1, slices);
    for (int slice = 0; slice < early; ++slice) copies.next_w(stages + slice * STAGE, slice);
    let_next_start();
#if DT_CLUSTER > 1
    __shared__ Barrier arrived;
    const int own = (rows - share.rank + DT_CLUSTER - 1) / DT_CLUSTER;  // rows that this block stores
    const Total total(reinterpret_cast<float*>(shared), arrived, own, splits);
#else
    const int own = rows;
    const Total total{reinterpret_cast<float*>(shared)};
#endif
    wait_for_previous();
    for (int slice = 0; slice < DT_STAGES - 1; ++slice) {
        if (slice < early) copies.next_x(stages + slice * STAGE, slice);
        end_group();
    }
    total.open();

    Sums sums = {}, part;
    const int each = order::split_length(K) / order::PART;  // slices of a split
    for (int slice = 0, split = share.first, left = each, stage = 0; slice < slices; ++slice) {
        wait_for_groups<DT_STAGES - 2>();
        __syncthreads();
        const int later = slice + DT_STAGES - 1;
        if (later < slices) {
            char* to = stages + (stage ? stage - 1 : DT_STAGES - 1) * STAGE;
            copies.next_w(to, later), copies.next_x(to, later);
        }
        end_group();
        multiply(part, stages + stage * STAGE, warp);
        stage = stage + 1 == DT_STAGES ? 0 : stage + 1;
#pragma unroll
        for (int n = 0; n < TILES_N; ++n) {
#pragma unroll
            for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[n][m][e] += part[n][m][e];
            }
        }
        if (--left == 0 || slice + 1 == slices) {
            total.add(split++, sums, warp, rows);
            left = each;
#pragma unroll
            for (int n = 0; n < TILES_N; ++n) {
#pragma unroll
                for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) sums[n][m][e] = 0.0f;
                }
            }
        }
    }

    for (int first = 0; first < ENDS; first += AHEAD) {
        Output<typename End::Late> outputs[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int flat = (first + i) * THREADS + threadIdx.x, slot = flat / DT_COLUMNS, column = flat % DT_COLUMNS;
            Output<typename End::Late>& output = outputs[i];
            output.at = slot * PITCH + column;
            output.m = share.row + share.rank + slot * DT_CLUSTER, output.n = share.column + column;
            output.there = slot < own && output.n < N;
            if (output.there) {
                output.scale = scale ? constant(scale + output.n) : 1.0f;
                output.bias = bias ? constant(bias + output.n) : 0.0f;
                output.late = end.late(output.m, output.n);
            }
        }
        if (first == 0) total.close();
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const Output<typename End::Late>& output = outputs[i];
            if (!output.there) continue;
            const float sum = total.get(output.at, splits);
            end(output.m, output.n, fmaf(sum, output.scale, output.bias), output.late);
        }
    }
}

extern "C" __global__ void __cluster_dims__(DT_CLUSTER) __launch_bounds__(THREADS, DT_BLOCKS) linear_decode_tiles(
    const float* x,                   // (M, K)
    const W* __restrict__ w,          // (N, K)
    const float* __restrict__ scale,  // (N) or null
    const float* __restrict__ bias,   // (N) or null
    const float* residual,            // (M, N) or null; may be out
    float* out,                       // (M, N)
    int M, int N, int K, int gelu) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    multiply_all(x, w, scale, bias, Add{residual, out, N, gelu}, M, N, K);
#else
    asm("trap;");
#endif
}

// Row m is the next token of sequence row[m], at position[m] of its cache. Tokens outside the cache are not stored.
extern "C" __global__ void __cluster_dims__(DT_CLUSTER) __launch_bounds__(THREADS, DT_BLOCKS) qkv_decode_tiles(
    const float* x,                   // (M, K)
    const W* __restrict__ w,          // (3C, K)
    const float* __restrict__ scale,  // (3C) or null
    const float* __restrict__ bias,   // (3C) or null
    const int* row,                   // (M)
    const int* position,              // (M)
    float* q,                         // (M, C)
    T* k_cache,                       // (B, n_ctx, C)
    T* v_cache,                       // (B, n_ctx, C)
    int M, int K, int C, int B, int n_ctx) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    multiply_all(x, w, scale, bias, Append{q, k_cache, v_cache, row, position, C, B, n_ctx}, M, 3 * C, K);
#else
    asm("trap;");
#endif
}
