// The products of decoding with weights in blocks of GGUF, for more rows than matmul/decode_mma.cu has at a time. The
// bits are the same: those of matmul/decode_order.cuh.
//
//   linear_decode_gguf: weights in blocks, unpacked once for up to 32 rows. out = [residual +] [gelu] (x W^T + bias)
//   qkv_decode_gguf: linear_decode_gguf, with k and v into the KV cache. q goes to an array; without residual and GELU
//
// Unpacking bounds such products: matmul/decode_mma.cu does it for each 16 rows or fewer. A row of x is long, so that a
// block has one split of K in shared memory, and all of its rows:
//
//   warp     16 columns, all rows: a split of K after the other, whose weights wait in registers
//   block    LM_WARPS warps, which bring a split of x as terms
//   cluster  GGUF_CLUSTER blocks with the same columns and a split each; 1: a block has all splits, one after the other
//
// Blocks of a cluster leave the sums of their split in shared memory, where block r adds up those of rows r,
// r + GGUF_CLUSTER, ... in the order of the splits.
//
// grid (GGUF_CLUSTER * ceil(N / (16 * LM_WARPS)), ceil(M / LM_ROWS)), block (32 * LM_WARPS). `geometry` of the Python
// module `_linear_gguf` computes the dynamic shared memory. Types begin at multiples of a block's columns.
#ifndef WEIGHT_GGUF
#define WEIGHT_GGUF
#endif
#define LM_ALONE 1
#define LM_NORM 0
#define LM_COLUMNS 16
#ifndef GGUF_CLUSTER
#define GGUF_CLUSTER 1
#endif
#include "lib/storage.cuh"
#include "lib/sm80.cuh"
#include "lib/cluster.cuh"
#include "lib/overlap.cuh"
#include "matmul/decode_gguf.cuh"
#include "matmul/decode_ends.cuh"

constexpr int ACROSS = LM_COLUMNS * LM_WARPS;  // columns of a block
static_assert(GGUF_CLUSTER == 1 || GGUF_CLUSTER == SPLITS, "a block has a split or all of them");
static_assert(GGUF_FROM_1 % ACROSS == 0 && GGUF_FROM_2 % ACROSS == 0, "a block has columns of one type");

// One value of a row, added to what End needs.
template <typename End>
__device__ __forceinline__ void finish(const End& end, int m, int n, float sum, const float* bias) {
    const float v = order::finished(sum, 1.0f, 1.0f, bias ? bias[n] : 0.0f);
    const typename End::Late late = end.late(m, n);
    end.store(m, n, end.value(v, late), late);
}

// The sums of all blocks of a cluster, each with a split, for the rows of this block.
template <typename End>
__device__ __forceinline__ void add_splits(float* plane, int rank, const End& end, const float* bias, int first_row,
                                           int M, int start, int N) {
    release_to_cluster();
    acquire_from_cluster();
    constexpr int PLANE_PITCH = ACROSS + 8;
    constexpr int OWN = (LM_ROWS + GGUF_CLUSTER - 1) / GGUF_CLUSTER * ACROSS;
#pragma unroll 1
    for (int i = threadIdx.x; i < OWN; i += THREADS) {
        const int row = i / ACROSS * GGUF_CLUSTER + rank, column = i % ACROSS, m = first_row + row, n = start + column;
        if (row >= LM_ROWS || m >= M || n >= N) continue;
        float each[GGUF_CLUSTER];
#pragma unroll
        for (int s = 0; s < GGUF_CLUSTER; ++s) each[s] = in_block_of_cluster(plane, s)[row * PLANE_PITCH + column];
        float total = 0.0f;
#pragma unroll
        for (int s = 0; s < GGUF_CLUSTER; ++s) total += each[s];
        finish(end, m, n, total, bias);
    }
    sync_cluster();  // the others have read this block's sums
}

template <typename Weights, typename End>
__device__ __forceinline__ void multiply(const W* w, const float* bias, const Input& input, const End& end, int N) {
    const int rank = blockIdx.x % GGUF_CLUSTER, block = blockIdx.x / GGUF_CLUSTER * ACROSS;
    const int start = block + (int)threadIdx.x / 32 * LM_COLUMNS;
    constexpr int OF_BLOCK = GGUF_CLUSTER == 1 ? SPLITS : 1;
    Weights weights(w, N);
#pragma unroll
    for (int i = 0; i < LM_FLIGHT; ++i) weights.fetch(i, rank * UNITS + i, start);
    let_next_start();
    wait_for_previous();

    Totals totals = {};
#pragma unroll 1
    for (int i = 0; i < OF_BLOCK; ++i) {
        const int split = rank + i;
        if (i > 0) __syncthreads();
        input.bring_split(split);
        __syncthreads();
        Sums sums = {};
#pragma unroll 1
        for (int first = 0; first < UNITS; first += LM_FLIGHT) {
#pragma unroll
            for (int slot = 0; slot < LM_FLIGHT; ++slot) {
                const int unit = first + slot, at = split * UNITS + unit;
                if (UNITS % LM_FLIGHT && unit >= UNITS) break;
                weights.use(slot, at, input, sums);
                if (unit + LM_FLIGHT < UNITS) weights.fetch(slot, at + LM_FLIGHT, start);
            }
        }
        if (i + 1 < OF_BLOCK) {
#pragma unroll
            for (int slot = 0; slot < LM_FLIGHT; ++slot) weights.fetch(slot, (split + 1) * UNITS + slot, start);
        }
        sums.add_to(totals);
    }
    if constexpr (GGUF_CLUSTER == 1) {
        each(totals, [&](int column, int row, float sum) {
            const int n = start + column, m = input.first + row;
            if (n < N && m < input.M) finish(end, m, n, sum, bias);
        });
    } else {
        constexpr int PLANE_PITCH = ACROSS + 8;  // as in add_splits
        float* plane = reinterpret_cast<float*>(input.shared + Input::BYTES);
        each(totals, [&](int column, int row, float sum) {
            plane[row * PLANE_PITCH + start - block + column] = sum;
        });
        add_splits(plane, rank, end, bias, input.first, input.M, block, N);
    }
}

template <typename End>
__device__ __forceinline__ void run(const float* x, int M, const W* w, const float* bias, const End& end, int N) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    extern __shared__ float4 shared[];
    char* const rows = reinterpret_cast<char*>(shared);
    const Input input{x, nullptr, nullptr, 0.0f, M, (int)blockIdx.y * LM_ROWS, rows, 1.0f, nullptr, nullptr, {}};
    const int n = blockIdx.x / GGUF_CLUSTER * ACROSS;
    if (GGUF_RANGES > 2 && n >= GGUF_FROM_2) multiply<Blocks<2>>(w, bias, input, end, N);
    else if (GGUF_RANGES > 1 && n >= GGUF_FROM_1) multiply<Blocks<1>>(w, bias, input, end, N);
    else multiply<Blocks<0>>(w, bias, input, end, N);
#else
    asm("trap;");
#endif
}

extern "C" __global__ void __cluster_dims__(GGUF_CLUSTER) __launch_bounds__(THREADS, LM_BLOCKS) linear_decode_gguf(
    const float* x,                  // (M, K)
    const W* __restrict__ w,         // (N, K) in blocks
    const float* __restrict__ bias,  // (N) or null
    const float* residual,           // (M, N) or null; may be out
    float* out,                      // (M, N)
    int M, int N, int gelu) {
    run(x, M, w, bias, Add{residual, out, N, gelu}, N);
}

// Row m is the next token of sequence row[m], at position[m] of its cache. Tokens outside the cache are not stored.
extern "C" __global__ void __cluster_dims__(GGUF_CLUSTER) __launch_bounds__(THREADS, LM_BLOCKS) qkv_decode_gguf(
    const float* x,                  // (M, K)
    const W* __restrict__ w,         // (3C, K) in blocks
    const float* __restrict__ bias,  // (3C) or null
    const int* row,                  // (M)
    const int* position,             // (M)
    float* q,                        // (M, C)
    KV* k_cache,                     // (B, n_ctx, C)
    KV* v_cache,                     // (B, n_ctx, C)
    int M, int C, int B, int n_ctx) {
    run(x, M, w, bias, Append{q, k_cache, v_cache, row, position, C, B, n_ctx}, 3 * C);
}
