// Hopper products whose weights are converted to float16 in registers, which are wgmma's first operand (A). Included by
// matmul/prompt/wgmma_fp8.cu and matmul/prompt/wgmma_gguf.cu, which load the weights.
//
//   out = [residual +] [gelu](a w^T w_scale + bias)     a (M, K), w (N, K), out and residual (M, N), w_scale, bias (N)
//
// a is __half, sums are float, out is __half or float. w_scale is used with GEMM_SCALED.
//
// Only wgmma's first operand can come from registers. Therefore w and a are exchanged with respect to
// lib/matmul/wgmma.cuh: the product is w (N, K) times a^T (K, M). A group's part of a tile has GEMM_GROUP_M rows of w
// and GEMM_GROUP_N rows of a, and the epilogue transposes the sums. lib/matmul/wgmma.cuh describes the other parts.
//
// The products along K are added in the same order for every tile, as in matmul/prompt/wgmma.cu. A row therefore has
// the same bits in any batch, and the same bits as with w stored in 16 bits.
//
// Any M; N is a multiple of 8; all arrays are aligned to 16 bytes. residual may be out: TMA reads an
// element before it writes it. The boxes of the tensor maps are (1, GEMM_N / GEMM_SHARES, 64) of a and (1, GEMM_CHUNK,
// 64) of the output.
#pragma once
#define STORAGE_FP16 1
#ifndef GEMM_M  // rows of w per tile
#define GEMM_M 128
#endif
#ifndef GEMM_DOWN
#define GEMM_DOWN 1
#endif
#include "lib/fast.cuh"
#include "lib/storage.cuh"
#include "lib/matmul/wgmma_chunks.cuh"

static_assert(GEMM_SPLITS == 1, "a block has all of K");
static_assert(GEMM_GROUP_M <= GROUP, "a thread has the bias of a row of w");

typedef float Sums[BLOCKS_M][GEMM_GROUP_N / 2];  // a thread's sums

struct Rest {  // shared memory after the ring, the chunks and `weights`
    float bias[CONSUMERS][(1 + GEMM_SCALED) * GEMM_GROUP_M];  // per group: bias, then w_scale
    Barriers barriers;
};

// Bias and scale for a lane's two rows of w, which are 8 apart, in 64-row block `block` of the group. volatile keeps
// the compiler from holding the values of all blocks in registers.
struct Row {
    float bias[2], scale[2];

    __device__ __forceinline__ Row(const volatile float* own_bias, const Group& group, int block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const volatile float* at = own_bias + block * 64 + group.warp * 16 + half * 8 + group.lane / 4;
            bias[half] = *at;
            scale[half] = GEMM_SCALED ? at[GEMM_GROUP_M] : 1.0f;
        }
    }

    __device__ __forceinline__ float finished(float sum, int half) const {
        if (GEMM_SCALED) sum *= scale[half];
        sum += bias[half];
        return GEMM_GELU ? gelu_fast(sum) : sum;
    }
};

// Stores floats directly to memory: eight lanes store 32 bytes of a row. Several residuals are loaded before the
// stores, because the compiler does not move a load before a store that might write to the same address.
__device__ __forceinline__ void store_float(const Sums& sums, const Group& group, const float* own_bias,
                                            const float* residual, float* out, int row, int column, int M, int N) {
    constexpr int FOURS = BLOCKS_M * GEMM_GROUP_N / 8;  // groups of four sums: 2 neighbouring rows by 2 columns 8 apart
    constexpr int AT_ONCE = BLOCKS_M * GEMM_GROUP_N > 256 ? 1 : 4;  // limited by the number of free registers
    const int lane_row = row + group.lane % 4 * 2, lane_column = column + group.warp * 16 + group.lane / 4;
    const int columns_left = N - lane_column;
    int rows_left = M - lane_row;
    long long at = (long long)lane_row * N + lane_column;
#pragma unroll
    for (int first = 0; first < FOURS; first += AT_ONCE) {
        asm volatile("" : "+l"(at), "+r"(rows_left));  // prevents computing later addresses early
        float r[AT_ONCE * 4];
#pragma unroll
        for (int i = 0; i < AT_ONCE * 4 && GEMM_RESIDUAL; ++i) {
            const int four = first + i / 4, below = (four / BLOCKS_M - first / BLOCKS_M) * 8 + i % 2;
            const int right = four % BLOCKS_M * 64 + i % 4 / 2 * 8;
            const bool there = below < rows_left && right < columns_left;
            r[i] = there ? __ldcg(residual + at + (below * N + right)) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE * 4; ++i) {
            const int four = first + i / 4, below = (four / BLOCKS_M - first / BLOCKS_M) * 8 + i % 2;
            const int right = four % BLOCKS_M * 64 + i % 4 / 2 * 8;
            const Row lines(own_bias, group, four % BLOCKS_M);
            float y = lines.finished(sums[four % BLOCKS_M][four / BLOCKS_M * 4 + i % 4], i % 4 / 2);
            if (GEMM_RESIDUAL) y += r[i];
            if (below < rows_left && right < columns_left) out[at + (below * N + right)] = y;
        }
        const int further = ((first + AT_ONCE) / BLOCKS_M - first / BLOCKS_M) * 8;
        at += (long long)further * N, rows_left -= further;
    }
    group.sync();  // all reads of biases and scales are done
}

// Sums that one cluster passes to the next (GEMM_STREAM). Layout of `memory`: FLAGS flags, one for each group of a
// block, all 0 before and after a launch; then an array of float4 (blocks, GEMM_GROUP_N / 8, threads of both groups).
// The group with the first slices of a tile stores its sums; the group with the other slices starts from these sums.
struct Handed {
    float* const memory;  // null without GEMM_STREAM
    const Group& group;

    static constexpr int FLAGS = 1024, THREADS_OF_BOTH = CONSUMERS * GROUP;

    __device__ __forceinline__ int* flag(int block) const {
        return reinterpret_cast<int*>(memory) + block * CONSUMERS + group.index;
    }
    __device__ __forceinline__ float4* of_block(int block) const {
        const int thread = group.index * GROUP + group.thread;
        return reinterpret_cast<float4*>(memory + FLAGS) + block * (GEMM_GROUP_N / 8 * THREADS_OF_BOTH) + thread;
    }

    __device__ __forceinline__ void give(const Sums& sums) const {
        float4* const to = of_block(blockIdx.x);
#pragma unroll
        for (int i = 0; i < GEMM_GROUP_N / 8; ++i) {
            const float* from = sums[0] + 4 * i;
            __stcg(to + i * THREADS_OF_BOTH, float4{from[0], from[1], from[2], from[3]});
        }
        __threadfence();
        group.sync();
        if (group.thread == 0) asm volatile("st.release.gpu.s32 [%0], 1;" ::"l"(flag(blockIdx.x)) : "memory");
    }

    // Loads the initial sums of a tile: the previous cluster's sums if `there`, otherwise zeros. The loads are
    // predicated: with a branch around them, the compiler would serialise the wgmma products.
    __device__ __forceinline__ void take(Sums& sums, bool there) const {
        const int block = blockIdx.x - CLUSTER;
        if (there) {
            int given = group.thread > 0;
            while (!given) asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(given) : "l"(flag(block)) : "memory");
            group.sync();
            if (group.thread == 0) *flag(block) = 0;
        }
        const float4* const from = of_block(block);
#pragma unroll
        for (int i = 0; i < GEMM_GROUP_N / 8; ++i) {
            float* to = sums[0] + 4 * i;
            to[0] = to[1] = to[2] = to[3] = 0.0f;
            asm volatile(
                "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n@p ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
                : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3])
                : "l"(from + i * THREADS_OF_BOTH), "r"((int)there)
                : "memory");
        }
    }
};

struct Product {
    const TensorMap& a;         // (1, M, K)
    const TensorMap& residual;  // (1, M, N), with GEMM_RESIDUAL
    const TensorMap& out;       // (1, M, N)
    const float* w_scale;       // (N), with GEMM_SCALED
    const float* bias;          // (N) or null
    const float* residual_float;  // (M, N); with GEMM_FLOAT_OUT, used instead of the map
    float* out_float;             // (M, N)
    float* handed;                // memory of Handed, with GEMM_STREAM
    int M, N, K;

    // Requests slice `slice` of a tile's rows of a.
    __device__ __forceinline__ void load(char* ring, Barriers& barriers, int rank, int slice, int column,
                                         int stage) const {
        const int first = GEMM_SHARES > 1 ? rank * (GEMM_N / GEMM_SHARES) : 0;
        char* to = ring + stage * STAGE_BYTES + A_BYTES + first * ROW_BYTES;
        load_w_box(to, a, barriers.full[stage], slice * SLICE, column + first, 0);
    }
};

// The body of a kernel. `weights` loads and converts w. It uses BYTES bytes of shared memory, and has these functions:
//
//   place(own), start()                                  prepare its shared memory; start() is called by one thread
//   produce(product, ring, barriers, at)                 requests all slices; called by the first warpgroup
//   multiply(sums, ring, barriers, group, count, at)     computes the sums of a tile, from slice `count` of the ring on
//   skip(K, row)                                         skips a tile that the other group processes
template <typename Weights>
__device__ __forceinline__ void run(const Product& p, Weights weights) {
    extern __shared__ char unaligned[];
    char* const ring = align_1024(unaligned);
    char* const buffers = ring + GEMM_STAGES * STAGE_BYTES;
    char* const own = buffers + (GEMM_FLOAT_OUT ? 0 : CONSUMERS * BUFFERS * CHUNK_BYTES);
    Rest& rest = *reinterpret_cast<Rest*>(own + Weights::BYTES);
    Barriers& barriers = rest.barriers;
    weights.place(own);
    start_block(barriers, [&] { prefetch(p.a), weights.start(); });

    Work at(p.N, p.M, p.K, CLUSTER > 1 ? rank_in_cluster() : 0);
    if (uniform(threadIdx.x / GROUP) == 0) {
        give_registers<Weights::PRODUCER_REGISTERS>();
        weights.produce(p, ring, barriers, at);
        __syncwarp();
        return;
    }
    take_registers<Weights::CONSUMER_REGISTERS>();
    const Group group;
    float* const own_bias = rest.bias[group.index];
    const Handed handed{p.handed, group};
    Chunks<true> chunks{buffers + group.index * BUFFERS * CHUNK_BYTES, barriers.residual[group.index], group};
    wait_before_copies();
    unsigned count = 0;
    for (int i = 0; at.left(); count += at.last - at.first, at.next(), ++i) {
        if (GROUPS == 1 && i % CONSUMERS != group.index) {
            weights.skip(p.K, at.row());
            continue;
        }
        const int row = at.column() + group.column, column = at.row() + group.row;  // the group's first output
        if (GEMM_RESIDUAL && !GEMM_FLOAT_OUT && at.ends()) chunks.ask(p.residual, 0, BUFFERS, row, column);
        if (group.thread < GEMM_GROUP_M) {
            const int n = column + group.thread;
            own_bias[group.thread] = p.bias && n < p.N ? p.bias[n] : 0.0f;
            if (GEMM_SCALED) own_bias[GEMM_GROUP_M + group.thread] = n < p.N ? p.w_scale[n] : 0.0f;
        }
        Sums sums;
        wait_for_turn(barriers, group, i);
        if (GEMM_STREAM) handed.take(sums, at.continues());
        weights.multiply(sums, ring, barriers, group, count, at);
        if (!at.ends()) {
            handed.give(sums);
            continue;
        }
        group.sync();  // all biases and scales are stored
        if (GEMM_FLOAT_OUT) {
            store_float(sums, group, own_bias, p.residual_float, p.out_float, row, column, p.M, p.N);
        } else {
            const auto values_of = [&](int m) {
                return [&, m, lines = Row(own_bias, group, m)](int block, int half, float (&v)[2]) {
                    const float* sum = sums[m] + 4 * block + 2 * half;
                    v[0] = lines.finished(sum[0], half), v[1] = lines.finished(sum[1], half);
                };
            };
            chunks.store<PART_N>(values_of, p.residual, p.out, row, column);
        }
    }
    if (group.thread == 0) wait_for_reads<0>();  // a block must not end while copies read its shared memory
}
