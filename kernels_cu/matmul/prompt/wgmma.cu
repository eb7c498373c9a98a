// GEMM for Hopper:
//
//   out = [residual +] [gelu](a w^T w_scale + bias)     a (M, K), w (N, K), out and residual (M, N), w_scale, bias (N)
//
//   gemm_wgmma: TMA and wgmma: one warpgroup loads, two multiply in turn, which hides the epilogues
//
// a and w are __half or __nv_bfloat16, sums are float, out has the type of a or is float. w_scale is used with
// GEMM_SCALED. lib/matmul/wgmma.cuh describes the organisation of a block. The products along K are added in the same
// order for every tile, so a row has the same bits in any batch. GEMM_SPLITS > 1 is the exception, for few rows and a
// long K: the blocks of a cluster share a tile's K and exchange their sums through shared memory. Each block then
// finishes a part of the columns.
//
// Each of these choices reduces the time of M = 8192, K = 768, N = 3072:
//
//   each warpgroup has its own tiles: one's epilogue runs while the other multiplies
//   two blocks load their common rows of w together (GEMM_SHARES 2)
//   the address of a tile is computed once per tile, not once per slice loaded
//
// Measured: docs/experiments.md#gemm_wgmma
//
// Any M; N and K are multiples of 8; all arrays are aligned to 16 bytes. residual may be out: TMA reads an
// element before it writes it.
//
// architecture: sm_90a
#if !defined(STORAGE_BF16) && !defined(STORAGE_FP16)
#define STORAGE_BF16
#endif
#include "lib/fast.cuh"
#include "lib/matmul/wgmma_tile.cuh"

struct Rest {  // shared memory after the ring, the chunks of output and the received sums
    float bias[CONSUMERS][(1 + GEMM_SCALED) * PART_N];  // per group: bias, then w_scale
    Barriers barriers;
};

// Computes two neighbouring outputs from their sums. column: index in `bias`.
__device__ __forceinline__ float2 finished(const float* sums, const float* bias, int column) {
    const float2 b = pair_at(bias, column);
    float2 v = {sums[0], sums[1]};
    if (GEMM_SCALED) {
        const float2 scale = pair_at(bias, PART_N + column);
        v.x *= scale.x, v.y *= scale.y;
    }
    v.x += b.x, v.y += b.y;
    return GEMM_GELU ? float2{gelu_fast(v.x), gelu_fast(v.y)} : v;
}

// Stores floats directly to memory: a lane stores pairs of columns, 4 lanes store 32 bytes of a row. Several residuals
// are loaded before the stores, because the compiler does not move loads before stores to addresses that may be the
// same.
__device__ __forceinline__ void store_float(const Finals& sums, const Group& group, const float* bias,
                                            const float* residual, float* out, int first_row, int first_column, int M,
                                            int N) {
    constexpr int BLOCKS = PART_N / 8, HALVES = 2 * BLOCKS_M;
    // AT_ONCE is limited by the number of free registers.
    constexpr int AT_ONCE = BLOCKS_M > 1 ? (PART_N <= 128 ? 4 : 1) : PART_N <= 96 ? BLOCKS : 8;
    const int lane_column = first_column + 2 * (group.lane % 4);
    const int lane_row = first_row + group.warp * 16 + group.lane / 4;
#pragma unroll
    for (int first = 0; first < BLOCKS; first += AT_ONCE) {
        float2 r[AT_ONCE][HALVES];
        if (GEMM_RESIDUAL) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
                for (int half = 0; half < HALVES; ++half) {
                    const int column = lane_column + 8 * (first + i), row = lane_row + half / 2 * 64 + half % 2 * 8;
                    const bool there = first + i < BLOCKS && column < N && row < M;
                    const float2* at = reinterpret_cast<const float2*>(residual + (long long)row * N + column);
                    r[i][half] = there ? __ldcg(at) : float2{0.0f, 0.0f};
                }
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (first + i >= BLOCKS) break;
            const int column = lane_column + 8 * (first + i);
            if (column >= N) continue;
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                const int row = lane_row + half / 2 * 64 + half % 2 * 8;
                if (row >= M) continue;
                const float* sum = sums[half / 2] + 4 * (first + i) + half % 2 * 2;
                float2 y = finished(sum, bias, 8 * (first + i) + 2 * (group.lane % 4));
                if (GEMM_RESIDUAL) y.x += r[i][half].x, y.y += r[i][half].y;
                *reinterpret_cast<float2*>(out + (long long)row * N + column) = y;
            }
        }
    }
    group.sync();  // all reads of biases and scales are done
}

// Launched by operation (variant): gemm (wgmma)
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) gemm_wgmma(
    const __grid_constant__ TensorMap a,         // (1, M, K)
    const __grid_constant__ TensorMap w,         // (1, N, K)
    const __grid_constant__ TensorMap residual,  // (1, M, N), with GEMM_RESIDUAL
    const __grid_constant__ TensorMap out,       // (1, M, N)
    const float* __restrict__ w_scale,           // (N), with GEMM_SCALED
    const float* __restrict__ bias,              // (N) or null
    const float* residual_float,                 // (M, N); with GEMM_FLOAT_OUT, used instead of the map
    float* out_float,                            // (M, N)
    int M, int N, int K) {
    extern __shared__ char unaligned[];
    char* const ring = align_1024(unaligned);
    char* const buffers = ring + GEMM_STAGES * STAGE_BYTES;
    char* const received = buffers + (GEMM_FLOAT_OUT ? 0 : CONSUMERS * BUFFERS * CHUNK_BYTES);
    Rest& rest = *reinterpret_cast<Rest*>(received + RECEIVED_BYTES);
    Barriers& barriers = rest.barriers;
    start_block(barriers, [&] { prefetch(a), prefetch(w); });

    Work at(M, N, K, CLUSTER > 1 ? rank_in_cluster() : 0);
    if (uniform(threadIdx.x / GROUP) == 0) {
        run_producer([&] { produce(ring, barriers, a, w, at); });
        return;
    }
    take_registers<240>();
    const Group group;
    float* const own_bias = rest.bias[group.index];
    Chunks<false> chunks{buffers + group.index * BUFFERS * CHUNK_BYTES, barriers.residual[group.index], group};
    wait_before_copies();
    unsigned count = 0;
    for (int i = 0; at.left(); at.next(), ++i, count += at.last - at.first) {
        if (GROUPS == 1 && i % CONSUMERS != group.index) continue;
        const int row = at.row() + group.row;
        const int column = at.column() + group.column + (GEMM_SPLITS > 1 ? at.rank * PART_N : 0);
        if (GEMM_RESIDUAL && !GEMM_FLOAT_OUT) chunks.ask(residual, 0, BUFFERS, row, column);
        for (int c = group.thread; c < PART_N; c += GROUP) {
            own_bias[c] = bias && column + c < N ? bias[column + c] : 0.0f;
            if (GEMM_SCALED) own_bias[PART_N + c] = column + c < N ? w_scale[column + c] : 0.0f;
        }
        Sums sums;
        wait_for_turn(barriers, group, i);
        multiply_tile(sums, ring, barriers, group, count, at.last - at.first);
        group.sync();  // all biases and scales are stored
#if GEMM_SPLITS == 1
        const Finals& finals = sums;
#else
        Finals finals;
        combine(sums, finals, received, barriers.sums[group.index], group, at.rank);
#endif
        if (GEMM_FLOAT_OUT) {
            store_float(finals, group, own_bias, residual_float, out_float, row, column, M, N);
        } else {
            const auto values_of = [&](int m) {
                return [&, m](int block, int half, float (&v)[2]) {
                    const float* sums = finals[m] + 4 * block + 2 * half;
                    const float2 y = finished(sums, own_bias, 8 * block + 2 * (group.lane % 4));
                    v[0] = y.x, v[1] = y.y;
                };
            };
            chunks.store<PART_N>(values_of, residual, out, row, column);
        }
    }
    if (group.thread == 0) wait_for_reads<0>();
}
