// GEMM of hi/lo matrices for Hopper:
//
//   out = [residual +] [gelu](a w^T + bias)     a (M, K), w (N, K), out and residual (M, N), bias (N)
//
//   gemm_split_wgmma: float32 accuracy by TMA and wgmma: sums of high parts are added to floats during other products
//
// The parts hi and lo of a and w (lib/hi_lo.cuh) are multiplied as follows:
//
//   (a w^T)[m, n] = (sum hi hi + sum (hi lo + lo hi) / 2048) scale_a[m] scale_w[n]
//
// matmul/prompt/mma_hi_lo.cu describes the promotion of sums (the addition to separate floats, with rounding), the
// output with GEMM_SPLIT_OUT, and the effects of infinity and NaN. The sum of hi hi is promoted every 128 values along
// K, while the products of hi lo and lo hi are running. The sums need three registers per output, so tiles are smaller
// than in matmul/prompt/wgmma.cu.
//
// Measured: docs/performance.md#gemm
//
// Any M; N and K are multiples of 8; all arrays are aligned to 16 bytes. residual may be out.
//
// lib/matmul/wgmma.cuh describes the organisation of a block.
//
// architecture: sm_90a
#define STORAGE_FP16 1
#ifndef GEMM_PARTS
#define GEMM_PARTS 2
#endif
#ifndef GEMM_N
#define GEMM_N 128
#endif
#ifndef GEMM_GROUP_M
#define GEMM_GROUP_M 64
#endif
#ifndef GEMM_GROUP_N
#define GEMM_GROUP_N 128
#endif
#ifndef GEMM_STAGES
#define GEMM_STAGES 3
#endif
#ifndef GEMM_CHUNK
#define GEMM_CHUNK 32
#endif
#include "lib/storage.cuh"
#include "lib/fast.cuh"
#include "lib/hi_lo.cuh"
#include "lib/matmul/wgmma.cuh"

#ifndef GEMM_SPLIT_OUT
#define GEMM_SPLIT_OUT 0
#endif

static_assert(BLOCKS_M == 1 && GEMM_SPLITS == 1, "there are registers for one wgmma's outputs");
static_assert(!GEMM_SPLIT_OUT || !GEMM_RESIDUAL, "a residual goes into an out of float");

struct Rest {  // shared memory after the ring and the chunks of output
    float bias[CONSUMERS][PART_N], scale[CONSUMERS][PART_N];
    Barriers barriers;
};

struct Total {  // sums of a thread's outputs
    float high[PART_N / 2], sums[PART_N / 2], cross[PART_N / 2];  // high: not yet in `sums`

    __device__ __forceinline__ float get(int i) const { return sum_of(sums[i], cross[i]); }
};

// Issues the products of the high parts of a slice. adds: whether they are added to total.high or replace it.
__device__ __forceinline__ void multiply_high(Total& total, const char* from, const Group& group, bool adds) {
    const Matrix a = matrix_at(from + group.row * ROW_BYTES);
    const Matrix w = matrix_at(from + 2 * A_BYTES + group.column * ROW_BYTES);
#pragma unroll
    for (int step = 0; step < SLICE / 16; ++step) {
        multiply(total.high, further(a, 32 * step), further(w, 32 * step), adds || step > 0);
    }
}

// Issues the products of high parts and low parts of a slice.
__device__ __forceinline__ void multiply_cross(Total& total, const char* from, const Group& group) {
    const Matrix a = matrix_at(from + group.row * ROW_BYTES);
    const Matrix w = matrix_at(from + 2 * A_BYTES + group.column * ROW_BYTES);
#pragma unroll
    for (int step = 0; step < SLICE / 16; ++step) {
        multiply(total.cross, further(a, 32 * step), further(w, W_BYTES + 32 * step), true);
        multiply(total.cross, further(a, A_BYTES + 32 * step), further(w, 32 * step), true);
    }
}

// Computes the sums of a tile from slices of the ring, starting with slice `count`; two slices (128 along K) at a time.
__device__ __forceinline__ void multiply_tile(Total& total, const char* ring, Barriers& barriers, const Group& group,
                                              unsigned count, int slices) {
#pragma unroll
    for (int i = 0; i < PART_N / 2; ++i) total.sums[i] = total.cross[i] = 0.0f;
    for (int k = 0; k < slices; k += 2, count += 2) {
        const char* first = arrived(ring, barriers, count);
        pin(total.high), pin(total.cross);
        fence_sums();
        multiply_high(total, first, group, false);
        multiply_cross(total, first, group);
        end_products();
        if (k > 0) {
            wait_for_products<1>();
            release(barriers, group, count - 1);
        }
        const char* second = arrived(ring, barriers, count + 1);
        if (k == slices - 2) give_turn(barriers, group);
        fence_sums();
        multiply_high(total, second, group, true);
        end_products();
        multiply_cross(total, second, group);
        end_products();
        wait_for_products<2>();
        release(barriers, group, count);
        wait_for_products<1>();
        pin(total.high);
#pragma unroll
        for (int i = 0; i < PART_N / 2; ++i) total.sums[i] += total.high[i];
    }
    wait_for_products<0>();
    pin(total.cross);
    release(barriers, group, count - 1);
}

struct Output {
    const float *w_scale, *bias;  // for the group's columns, in shared memory
    const float* residual;
    float* out;
    float per_scale;  // 1 / scale of out_parts
    int M, N;
};

// Returns output i of a thread: the sum after applying scales, bias and GELU.
__device__ __forceinline__ float finished(const Total& total, int i, float a_scale, float w_scale, float bias) {
    const float v = scaled(total.get(i), a_scale, w_scale) + bias;
    return GEMM_GELU ? gelu_fast(v) : v;
}

// Stores floats directly to memory: a lane stores pairs of columns, 4 lanes store 32 bytes of a row. Eight residuals
// are loaded before the stores, because the compiler does not move loads before stores to addresses that may be the
// same.
__device__ __forceinline__ void store_float(const Total& total, const Group& group, const float (&a_scale)[2],
                                            const Output& to, int first_row, int first_column) {
    constexpr int BLOCKS = PART_N / 8, AT_ONCE = 4;
    const int lane_row = first_row + group.warp * 16 + group.lane / 4, lane_column = 2 * (group.lane % 4);
#pragma unroll
    for (int first = 0; first < BLOCKS; first += AT_ONCE) {
        float2 r[2 * AT_ONCE] = {};
#pragma unroll
        for (int i = 0; i < 2 * AT_ONCE; ++i) {
            const int block = first + i / 2, row = lane_row + i % 2 * 8;
            const int column = first_column + lane_column + 8 * block;
            if (!GEMM_RESIDUAL || block >= BLOCKS || row >= to.M || column >= to.N) continue;
            r[i] = __ldcg(reinterpret_cast<const float2*>(to.residual + (long long)row * to.N + column));
        }
#pragma unroll
        for (int i = 0; i < 2 * AT_ONCE; ++i) {
            const int block = first + i / 2, half = i % 2, row = lane_row + half * 8;
            const int column = first_column + lane_column + 8 * block;
            if (block >= BLOCKS || row >= to.M || column >= to.N) continue;
            const float2 scale = pair_at(to.w_scale, lane_column + 8 * block);
            const float2 bias = pair_at(to.bias, lane_column + 8 * block);
            const int at = 4 * block + 2 * half;
            const float2 y = {finished(total, at, a_scale[half], scale.x, bias.x) + r[i].x,
                              finished(total, at + 1, a_scale[half], scale.y, bias.y) + r[i].y};
            *reinterpret_cast<float2*>(to.out + (long long)row * to.N + column) = y;
        }
    }
    group.sync();  // all reads of scales and biases are done
}

// Stores outputs as hi and lo parts: 64 rows through shared memory, one chunk of GEMM_CHUNK columns at a time.
__device__ __forceinline__ void store_parts(const Total& total, const Group& group, const float (&a_scale)[2],
                                            const Output& to, char* buffers, const TensorMap& parts, int row,
                                            int column) {
    const int lane = group.lane, place = (group.warp * 16 + lane % 16) * GEMM_CHUNK * 2 + lane / 16 * 16;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        int at_chunk = shared_address(buffers) + place;
        asm volatile("" : "+r"(at_chunk));  // prevents computing the addresses of all chunks early
        if (group.thread == 0) wait_for_reads<0>();
        group.sync();
#pragma unroll
        for (int j = 0; j < GEMM_CHUNK / 8; j += 2) {  // 16 columns per step
            unsigned hi[4], lo[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // 8 rows from 8 (i % 2), 8 columns from 8 (i / 2)
                const int at = c * GEMM_CHUNK + 8 * (j + i / 2) + 2 * (lane % 4);
                const float2 scale = pair_at(to.w_scale, at), bias = pair_at(to.bias, at);
                const int first = c * GEMM_CHUNK / 2 + 4 * (j + i / 2) + i % 2 * 2;
                float v[2] = {finished(total, first, a_scale[i % 2], scale.x, bias.x) * to.per_scale,
                              finished(total, first + 1, a_scale[i % 2], scale.y, bias.y) * to.per_scale};
                float low[2];
                low_parts(v, low);
                hi[i] = Vec<T, 2>::pack(v).raw;
                lo[i] = Vec<T, 2>::pack(low).raw;
            }
            const int at = swizzled<SWIZZLE>(at_chunk + 16 * j);
            store_matrices(at, hi[0], hi[1], hi[2], hi[3]);
            store_matrices(at + CHUNK_BYTES, lo[0], lo[1], lo[2], lo[3]);
        }
        show_writes();
        group.sync();
        if (group.thread == 0) {
            store_box(parts, buffers, column + c * GEMM_CHUNK, row, 0);
            store_box(parts, buffers + CHUNK_BYTES, column + c * GEMM_CHUNK, row, 1);
            end_stores();
        }
    }
}

// Launched by operation (variant): gemm (split wgmma)
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) gemm_split_wgmma(
    const __grid_constant__ TensorMap a,          // (2, M, K): hi, lo
    const __grid_constant__ TensorMap w,          // (2, N, K)
    const __grid_constant__ TensorMap out_parts,  // (2, M, N), used instead of out with GEMM_SPLIT_OUT 1
    const float* a_scale,                         // (M)
    const float* __restrict__ w_scale,            // (N)
    const float* __restrict__ bias,               // (N) or null
    const float* residual,                        // (M, N), with GEMM_RESIDUAL 1
    float* out,                                   // (M, N)
    float per_scale,                              // 1 / scale of the rows of out_parts
    int M, int N, int K) {
    extern __shared__ char unaligned[];
    char* const ring = align_1024(unaligned);
    char* const buffers = ring + GEMM_STAGES * STAGE_BYTES;
    Rest& rest = *reinterpret_cast<Rest*>(buffers + (GEMM_SPLIT_OUT ? CONSUMERS * 2 * CHUNK_BYTES : 0));
    Barriers& barriers = rest.barriers;
    start_block(barriers, [&] { prefetch(a), prefetch(w); });

    Work at(M, N, K, CLUSTER > 1 ? rank_in_cluster() : 0);
    if (uniform(threadIdx.x / GROUP) == 0) {
        run_producer([&] { produce(ring, barriers, a, w, at); });
        return;
    }
    take_registers<240>();
    const Group group;
    float *const own_bias = rest.bias[group.index], *const own_scale = rest.scale[group.index];
    const Output to = {own_scale, own_bias, residual, out, per_scale, M, N};
    wait_before_copies();
    unsigned count = 0;
    for (int i = 0; at.left(); at.next(), ++i, count += at.last - at.first) {
        if (GROUPS == 1 && i % CONSUMERS != group.index) continue;
        const int row = at.row() + group.row, column = at.column() + group.column;
        for (int c = group.thread; c < PART_N; c += GROUP) {
            own_bias[c] = bias && column + c < N ? bias[column + c] : 0.0f;
            own_scale[c] = column + c < N ? w_scale[column + c] : 0.0f;
        }
        float scales[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int own = row + group.warp * 16 + half * 8 + group.lane / 4;
            scales[half] = own < M ? __ldcg(a_scale + own) : 0.0f;
        }
        Total total;
        wait_for_turn(barriers, group, i);
        multiply_tile(total, ring, barriers, group, count, at.last - at.first);
        group.sync();  // all scales and biases are stored
        if (GEMM_SPLIT_OUT) {
            store_parts(total, group, scales, to, buffers + group.index * 2 * CHUNK_BYTES, out_parts, row, column);
        } else {
            store_float(total, group, scales, to, row, column);
        }
    }
    if (group.thread == 0) wait_for_reads<0>();
}
