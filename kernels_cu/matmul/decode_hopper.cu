// The products of decoding on Hopper, by wgmma, for weights that stream from memory: 64 rows read them once.
//
//   linear_decode_hopper  out = [residual +] [gelu] (x W^T * scale + bias), or with DH_GATED, of two matrices
//                         out = silu(x W^T * scale) (x U^T * up_scale)
//   qkv_decode_hopper     the first without residual and GELU: q goes to an array, k and v to the KV cache
//
// The order of additions is that of matmul/decode_order.cuh. W (N, K), of 16 bits or FP8, is the A of the products and
// goes through registers, where FP8 is converted. x (M, K) is B: its terms (lib/terms.cuh), two columns for each row,
// which the kernel before has stored in the order in which wgmma reads them.
//
//   block        64 DH_GROUPS columns of the output, of up to DH_ROWS rows; with DH_SPLITS a share of K
//   last warp    requests slices of K, 128 bytes of each row of W: W through a tensor map, x as one piece of memory. It
//                requests W before the previous kernel has ended, as much as there is room for
//   warpgroup    64 columns. A warp has 16 rows of A; with DH_GATED, these are 8 of W and the same 8 of U
//
//   ring   [W | x] [W | x] [W | x] ...   full: a slice has arrived    empty: all warps are done with it
//
// With two blocks on a multiprocessor, one copies while the other begins, ends or waits. A cluster has DH_SHARES
// neighbouring tiles of columns, which read the same x: each block copies a part of a slice to all of them. Otherwise
// as much of x as of W would be read from the L2 cache. It has DH_SPLITS blocks for each tile, which exchange the sums
// of their splits: tile i of 16 columns by 4 rows is for block i % DH_SPLITS, which adds the splits in order.
//
// Any M and N; K is a multiple of 128. grid (DH_SHARES DH_SPLITS ceil(M / TERM_ROWS) ceil(N / (columns DH_SHARES))),
// block (128 DH_GROUPS + 32). gpt2block/ops/_linear_hopper.py computes the dynamic shared memory.
//
// On an NVIDIA H200, float16 weights of Llama 7B, in microseconds, in brackets at the rate of a copy and for matmul/
// decode_mma.cu and decode_tiles.cu (1, 16 and 64 rows):
//
//   4096 -> 12288         23.8   26.1   31.5   (23.8; 27.5, 65.3, 79.3)
//   4096 -> 2 x 11008     45.0   44.6   63.4   (42.7; 53.5, 120, 162, with silu_mul)
//   11008 -> 4096         26.2   27.7   32.8   (21.3; 23.3, 138, 108)
//
// architecture: sm_90a
#if !defined(STORAGE_BF16) && !defined(STORAGE_FP16) && !defined(WEIGHT_E5M2) && !defined(WEIGHT_E4M3)
#define STORAGE_BF16
#endif
#include "lib/storage.cuh"
#include "lib/sm80.cuh"
#include "matmul/decode_ends.cuh"
#include "matmul/decode_hopper.cuh"

#ifndef DH_OUT_TERMS  // whether out has terms, for another of these products
#define DH_OUT_TERMS 0
#endif

constexpr int OWN = (WARPS * TILES + DH_SPLITS - 1) / DH_SPLITS;  // tiles that a block finishes
constexpr int EACH = DH_SPLITS > 1 ? (OWN + WARPS - 1) / WARPS : TILES;  // of a warp

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

struct Scales {
    const float* w;
    const float* up;
    const float* bias;
};

// A column of the output, of a lane.
struct Column {
    int n;
    bool there;
    float scale, up_scale, bias;

    __device__ __forceinline__ void prepare(int n_, int N, const Scales& scales) {
        n = n_, there = n < N;
        scale = there && scales.w ? constant(scales.w + n) : 1.0f;
        up_scale = DH_GATED && there && scales.up ? constant(scales.up + n) : 1.0f;
        bias = there && scales.bias ? constant(scales.bias + n) : 0.0f;
    }
};

template <typename End>
__device__ __forceinline__ void consume(const Ring& ring, const Share& share, const Exchange& exchange,
                                        const Scales& scales, const End& end, int N, int K) {
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4, splits = order::splits(K);
    const int each = order::split_length(K) / SLICE;
    float totals[TILES][2] = {};
    Column columns[OUTPUTS];
    const auto prepare_columns = [&](int of_warp) {
#pragma unroll
        for (int j = 0; j < OUTPUTS; ++j) {
            columns[j].prepare(share.column + (of_warp * OUTPUTS + j) * 8 + own_row(), N, scales);
        }
    };
    Consumer consumer(ring, share.rank);
    if (CLUSTER > 1) wait_for_cluster();  // the other blocks run, so that their barriers can be arrived at
    wait_for_previous();
    int left = share.slices;
#pragma unroll 1
    for (int split = share.first; split < share.last; ++split, left -= each) {
        float sums[TERMS / 2];
        consumer.multiply_split(sums, min(each, left) * SLICE / order::UNIT);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const float a = sums[4 * tile] + sums[4 * tile + 1], b = sums[4 * tile + 2] + sums[4 * tile + 3];
            if (DH_SPLITS > 1) exchange.send(split, warp * TILES + tile, a, b);
            else totals[tile][0] += a, totals[tile][1] += b;
        }
    }

    if (DH_SPLITS == 1) prepare_columns(warp);
    constexpr int AHEAD = DH_SPLITS > 1 || EACH < 4 ? 1 : 4;  // tiles whose residuals are loaded at once
#pragma unroll
    for (int first = 0; first < EACH; first += AHEAD) {
        typename End::Late late[AHEAD][OUTPUTS] = {};
        int m[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int own = warp + WARPS * (first + i), mine = warp * TILES + first + i;
            const int tile = DH_SPLITS > 1 ? own * DH_SPLITS + share.rank : mine;
            if (DH_SPLITS > 1) prepare_columns(tile / TILES);
            const int row = tile % TILES * 4 + t;
            m[i] = tile < WARPS * TILES && row < share.rows ? share.row + row : -1;
#pragma unroll
            for (int j = 0; j < OUTPUTS; ++j) {
                if (m[i] >= 0 && columns[j].there) late[i][j] = end.late(m[i], columns[j].n);
            }
        }
        if (DH_SPLITS > 1 && first == 0) wait<true>(exchange.arrived, 0, "sums");
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            float2 total;
            if (DH_SPLITS > 1) total = exchange.get(min(warp + WARPS * (first + i), OWN - 1), splits);
            else total = {totals[first + i][0], totals[first + i][1]};
#pragma unroll
            for (int j = 0; j < OUTPUTS; ++j) {
                const Column& column = columns[j];
                float v = fmaf(j ? total.y : total.x, column.scale, column.bias);
                if (DH_GATED) v = silu(v) * (total.y * column.up_scale);
                v = end.value(v, late[i][j]);
                if (DH_OUT_TERMS) v = term_of<order::BRAIN, 8>(v);
                if (m[i] >= 0 && column.there) end.store(m[i], column.n, v, late[i][j]);
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
    if (threadIdx.x == THREADS - 32) {
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
    if (threadIdx.x / 32 == WARPS) return produce(ring, share, w, up, x, K);
    consume(ring, share, exchange, scales, end, N, K);
}

// As `Add`, with the terms of out in the order of the next product.
struct AddTerms : Add {
    int M;

    __device__ void store(int m, int n, float v, Late) const { out[term_place<order::WIDTH>(m, n, M, N)] = v; }
};

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, DH_BLOCKS) linear_decode_hopper(
    const float* x,                        // (M, K), terms
    const __grid_constant__ TensorMap w,   // (1, N, K)
    const __grid_constant__ TensorMap up,  // (1, N, K), with DH_GATED
    const float* __restrict__ scale,       // (N) or null
    const float* __restrict__ up_scale,    // (N) or null
    const float* __restrict__ bias,        // (N) or null
    const float* residual,                 // (M, N) or null; may be out
    float* out,                            // (M, N), with DH_OUT_TERMS terms
    int M, int N, int K, int gelu) {
    const Scales scales{scale, up_scale, bias};
#if DH_OUT_TERMS
    run(x, w, up, scales, AddTerms{{residual, out, N, gelu}, M}, M, N, K);
#else
    run(x, w, up, scales, Add{residual, out, N, gelu}, M, N, K);
#endif
}

// Row m is the next token of sequence row[m], at position[m] of its cache. Tokens outside the cache are not stored.
extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, DH_BLOCKS) qkv_decode_hopper(
    const float* x,                       // (M, K), terms
    const __grid_constant__ TensorMap w,  // (1, 3C, K)
    const float* __restrict__ scale,      // (3C) or null
    const float* __restrict__ bias,       // (3C) or null
    const int* row,                       // (M)
    const int* position,                  // (M)
    float* q,                             // (M, C)
    KV* k_cache,                          // (B, n_ctx, C)
    KV* v_cache,                          // (B, n_ctx, C)
    int M, int K, int C, int B, int n_ctx) {
    const Append end{q, k_cache, v_cache, row, position, C, B, n_ctx};
    run(x, w, w, Scales{scale, nullptr, bias}, end, M, 3 * C, K);
}
