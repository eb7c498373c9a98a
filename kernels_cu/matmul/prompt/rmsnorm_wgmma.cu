// The products after an RMSNorm in Llama, for Hopper. n (M, K) is the normalised x, computed by norms/rmsnorm.cu, or
// for a model's prompt by norms/rmsnorm_stream.cu:
//
//   rmsnorm_matmul_wgmma: the product by TMA and wgmma, which fetches weights while rmsnorm runs; RoPE in its
//       epilogue. out = n w, then RoPE on each head (head_dim columns); w (K, N), or (N, K) with NORM_W_NK 1
//   rmsnorm_ffn_wgmma: the products by TMA and wgmma, which fetch weights while rmsnorm runs; columns of W1 and W3
//       next to each other. out = silu(n w1) (n w3); w1 and w3 have the shape of w
//
// n, w and out are __half or __nv_bfloat16, sums are float. lib/matmul/wgmma.cuh and lib/matmul/wgmma_tile.cuh have the
// product. This file adds:
//
//   (K, N)    w (K, N), the layout of kernl's Llama kernels, is loaded as boxes of 64 columns: 128 bytes for each k
//   RoPE      one thread holds both columns of a pair (neighbouring columns). The frequency of a pair is computed once
//             for all rows of a tile
//   two w     half of a tile's columns are from w1, half from w3. A thread holds both sums of an output
//
// The first slices of weights are loaded before the previous kernel has ended (lib/overlap.cuh). Tiles are ordered
// column by column, so that w is read only once from memory.
//
// Measured: docs/performance.md#rmsnorm_matmul
//
// Any M; N and K are multiples of 8; all arrays are aligned to 16 bytes. Row m has position start + m % seq_len.
//
// Boxes of the tensor maps: (1, GEMM_A_ROWS, 64) for n; (1, 64, GEMM_CHUNK) for out; (1, 64 / GEMM_SHARES, 64) for w as
// (K, N); (1, columns / GEMM_SHARES, 64) for w as (N, K), where columns is GEMM_N, or GEMM_GROUP_N / 2 with two weight
// matrices. For grid and block see lib/matmul/wgmma.cuh.
//
// architecture: sm_90a
#if !defined(STORAGE_BF16) && !defined(STORAGE_FP16)
#define STORAGE_FP16
#endif
#ifndef GEMM_N
#define GEMM_N 128
#endif
#ifndef GEMM_GROUP_N
#define GEMM_GROUP_N 128
#endif
#define GEMM_DOWN 1
#include "lib/rotation.cuh"
#include "lib/gate.cuh"
#include "lib/matmul/wgmma_tile.cuh"

#ifndef NORM_W_NK
#define NORM_W_NK 0
#endif
#ifndef NORM_TURNS  // 1: the kernel applies RoPE
#define NORM_TURNS 1
#endif

struct Rest {  // shared memory after the ring, the chunks and the received sums
    Pair frequencies[CONSUMERS][PART_N / 2];  // RoPE frequencies of each group's pairs
    Barriers barriers;
};

// BESIDE: number of consecutive columns of a tile that are from one weight matrix. POSSIBLE: whether a tile of this
// shape can be loaded and stored in whole boxes.
template <int MATRICES>
struct Columns {
    static constexpr int BESIDE = MATRICES == 1 ? GEMM_N : GEMM_GROUP_N / 2;
    static constexpr int OUT = PART_N / MATRICES;  // columns of out that a group computes
    static constexpr bool POSSIBLE = BESIDE % (NORM_W_NK ? 8 * GEMM_SHARES : 64) == 0 && OUT % GEMM_CHUNK == 0 &&
                                     (MATRICES == 1 || GEMM_SPLITS == 1);
};

template <int MATRICES>
__device__ __forceinline__ void load_columns(const Work& at, int slice, int column, char* to, Barrier& full,
                                             const TensorMap* const (&w)[MATRICES]) {
    constexpr int BESIDE = Columns<MATRICES>::BESIDE, ROWS = NORM_W_NK ? BESIDE : SLICE;
    const int first = GEMM_SHARES > 1 ? at.rank * (ROWS / GEMM_SHARES) : 0;  // first row in a box that this block loads
    column /= MATRICES;
    for (int n = 0; n < GEMM_N; n += MATRICES * BESIDE, column += BESIDE) {
#pragma unroll
        for (int i = 0; i < MATRICES; ++i, to += BESIDE * ROW_BYTES) {
            if constexpr (NORM_W_NK) {
                load_w_box(to + first * ROW_BYTES, *w[i], full, slice * SLICE, column + first, 0);
            } else {
                for (int box = 0; box < BESIDE / 64; ++box) {
                    load_w_box(to + box * BOX_BYTES + first * ROW_BYTES, *w[i], full, column + 64 * box,
                               slice * SLICE + first, 0);
                }
            }
        }
    }
}

struct Turn {  // RoPE: positions of rows; step of the exponent of theta (lib/rotation.cuh)
    int seq_len, head_dim, start;
    float step, step_low;
};

#ifdef GATE_GELU
__device__ __forceinline__ float activated(float v) { return gate_of(v); }
#else  // SiLU, faster than gate_of()
__device__ __forceinline__ float activated(float v) { return __fdividef(v, 1.0f + __expf(-v)); }
#endif

// The body of rmsnorm_matmul_wgmma and rmsnorm_ffn_wgmma.
template <int MATRICES>
__device__ __forceinline__ void run(const TensorMap& n, const TensorMap* const (&w)[MATRICES], const TensorMap& out,
                                    int M, int N, int K, const Turn& turn) {
    constexpr bool TURNS = NORM_TURNS && MATRICES == 1;
    extern __shared__ char unaligned[];
    char* const ring = align_1024(unaligned);
    char* const buffers = ring + GEMM_STAGES * STAGE_BYTES;
    char* const received = buffers + CONSUMERS * BUFFERS * CHUNK_BYTES;
    Rest& rest = *reinterpret_cast<Rest*>(received + RECEIVED_BYTES);
    Barriers& barriers = rest.barriers;
    start_block(barriers, [&] {
        prefetch(n);
        for (const TensorMap* map : w) prefetch(*map);
    });

    Work at(M, MATRICES * N, K, CLUSTER > 1 ? rank_in_cluster() : 0);
    if (uniform(threadIdx.x / GROUP) == 0) {
        run_producer([&] {
            produce(ring, barriers, n, at, [&](int slice, int column, char* to, Barrier& full) {
                load_columns<MATRICES>(at, slice, column, to, full, w);
            });
        });
        return;
    }
    take_registers<240>();
    const Group group;
    Pair* const frequencies = rest.frequencies[group.index];
    Chunks<false> chunks{buffers + group.index * BUFFERS * CHUNK_BYTES, barriers.residual[group.index], group};
    unsigned count = 0;
    for (int i = 0; at.left(); at.next(), ++i, count += at.last - at.first) {
        if (GROUPS == 1 && i % CONSUMERS != group.index) continue;
        const int row = at.row() + group.row;
        const int column = (at.column() + group.column) / MATRICES + (GEMM_SPLITS > 1 ? at.rank * PART_N : 0);
        for (int c = group.thread; MATRICES == 1 && c < PART_N / 2; c += GROUP) {
            const int pair = TURNS ? (column + 2 * c) % turn.head_dim / 2 : 0;
            frequencies[c] = TURNS ? frequency(pair, turn.step, turn.step_low) : Pair{-0.0f, -0.0f};
        }
        if (i < CONSUMERS) wait_before_copies();
        Sums sums;
        wait_for_turn(barriers, group, i);
        multiply_tile<!NORM_W_NK>(sums, ring, barriers, group, count, at.last - at.first);
        group.sync();  // all frequencies are stored
#if GEMM_SPLITS == 1
        const Finals& finals = sums;
#else
        Finals finals;
        combine(sums, finals, received, barriers.sums[group.index], group, at.rank);
#endif
        int positions[BLOCKS_M][2];
#pragma unroll
        for (int j = 0; TURNS && j < 2 * BLOCKS_M; ++j) {
            const int m = row + j / 2 * 64 + group.warp * 16 + j % 2 * 8 + group.lane / 4;
            positions[j / 2][j % 2] = turn.start + m % turn.seq_len;
        }
        const auto values_of = [&](int m) {
            return [&, m](int block, int half, float (&v)[2]) {
                const float* first = finals[m] + 4 * block + 2 * half;
                if (MATRICES == 2) {
                    const float* second = first + Columns<2>::BESIDE / 2;
                    v[0] = activated(first[0]) * second[0], v[1] = activated(first[1]) * second[1];
                    return;
                }
                const Pair by = frequencies[4 * block + group.lane % 4];
                if (TURNS) {
                    const Rotation r = rotation(half_turns(positions[m][half]), by);
                    v[0] = first[0] * r.cos - first[1] * r.sin, v[1] = first[0] * r.sin + first[1] * r.cos;
                } else {  // v = sum + -0: without an addition, the compiler would serialise wgmma
                    v[0] = first[0] + by.high, v[1] = first[1] + by.low;
                }
            };
        };
        chunks.store<Columns<MATRICES>::OUT>(values_of, out, out, row, column);
        if (MATRICES == 1) group.sync();  // all reads of the frequencies are done
    }
    if (group.thread == 0) wait_for_reads<0>();
}

// Launched by operation (variant): rmsnorm_matmul (wgmma)
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) rmsnorm_matmul_wgmma(
    const __grid_constant__ TensorMap n,    // (1, M, K)
    const __grid_constant__ TensorMap w,    // (1, K, N), or (1, N, K) with NORM_W_NK 1
    const __grid_constant__ TensorMap out,  // (1, M, N)
    int M, int N, int K, int seq_len,
    int head_dim,  // even; not read with NORM_TURNS 0
    int start, float step, float step_low) {
    if constexpr (Columns<1>::POSSIBLE) {
        const TensorMap* const one[1] = {&w};
        run<1>(n, one, out, M, N, K, {seq_len, head_dim, start, step, step_low});
    } else {
        asm("trap;");
    }
}

// Launched by operation (variant): rmsnorm_ffn (wgmma)
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) rmsnorm_ffn_wgmma(
    const __grid_constant__ TensorMap n,    // (1, M, K)
    const __grid_constant__ TensorMap w1,   // (1, K, N), or (1, N, K) with NORM_W_NK 1
    const __grid_constant__ TensorMap w3,   // same shape as w1
    const __grid_constant__ TensorMap out,  // (1, M, N)
    int M, int N, int K) {
    if constexpr (Columns<2>::POSSIBLE) {
        const TensorMap* const both[2] = {&w1, &w3};
        run<2>(n, both, out, M, N, K, {});
    } else {
        asm("trap;");
    }
}
