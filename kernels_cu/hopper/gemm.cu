// GEMM for Hopper: TMA, wgmma, warp specialisation, a persistent grid.
//
//   out = [residual +] [gelu](a w^T + bias)     a (M, K), w (N, K), out and residual (M, N), bias (N)
//
// a and w are __half or __nv_bfloat16, sums float, out the same as a or float. gemm.cuh says how a block is organised.
// The K of an output are added up in the same order whatever the tile, so a row has the same bits in any batch. The
// exception is GEMM_SPLITS > 1, for few rows and a long K: the blocks of a cluster share a tile's K, tell each other
// their sums through shared memory, and each finishes a part of the columns.
#if !defined(STORAGE_BF16) && !defined(STORAGE_FP16)
#define STORAGE_BF16
#endif
#include "storage.cuh"
#include "gelu_fast.cuh"
#include "hopper/gemm.cuh"

#ifndef GEMM_FLOAT_OUT  // out and residual are float
#define GEMM_FLOAT_OUT 0
#endif

static_assert(GEMM_SPLITS == 1 || GROUPS == CONSUMERS, "a split tile is for both groups");
static_assert(GEMM_SPLITS == 1 || GEMM_M * GEMM_N * 4 <= GEMM_STAGES * STAGE_BYTES, "the ring has room for all sums");

struct Rest {  // of shared memory, behind the ring and the chunks
    float bias[CONSUMERS][PART_N];
    Barriers barriers;
};

typedef float Sums[BLOCKS_M][GEMM_GROUP_N / 2];   // of a thread
typedef float Finals[BLOCKS_M][PART_N / 2];

// The sums of a tile, from the ring's slices from `count` on.
__device__ __forceinline__ void multiply_tile(Sums& sums, const char* ring, Barriers& barriers, const Group& group,
                                              unsigned count, int slices) {
    for (int k = 0; k < slices; ++k, ++count) {
        const char* from = arrived(ring, barriers, count);
        if (k == slices - 1) give_turn(barriers, group);
        const Matrix a = matrix_at(from + group.row * ROW_BYTES);
        const Matrix w = matrix_at(from + A_BYTES + group.column * ROW_BYTES);
#pragma unroll
        for (int m = 0; m < BLOCKS_M; ++m) pin(sums[m]);
        fence_sums();
#pragma unroll
        for (int step = 0; step < SLICE / 16; ++step) {
#pragma unroll
            for (int m = 0; m < BLOCKS_M; ++m) {
                multiply(sums[m], further(a, m * 64 * ROW_BYTES + 32 * step), further(w, 32 * step), k > 0 || step > 0);
            }
        }
        end_products();
#pragma unroll
        for (int m = 0; m < BLOCKS_M; ++m) pin(sums[m]);
        if (k > 0) {
            wait_for_products<1>();
            release(barriers, group, count - 1);
        }
    }
    wait_for_products<0>();
#pragma unroll
    for (int m = 0; m < BLOCKS_M; ++m) pin(sums[m]);
    release(barriers, group, count - 1);
}

// The sums of all splits, in their order, for this block's part of the columns. They meet in the rings, which nobody
// needs any more.
__device__ __forceinline__ void combine(const Sums& sums, Finals& finals, char* ring, Barrier& arrived,
                                        const Group& group, int rank) {
    constexpr int FOURS = PART_N / 8;  // of a thread, below each other BLOCKS_M times
    const auto place = [&](int split, int m, int i) {
        const int four = ((split * CONSUMERS + group.index) * BLOCKS_M + m) * FOURS + i;
        return reinterpret_cast<float*>(ring) + 4 * (four * GROUP + group.thread);
    };
    if (group.thread == 0) arrive_and_expect(arrived, (GEMM_SPLITS - 1) * FOURS * BLOCKS_M * GROUP * 16);
    sync_cluster();
#pragma unroll
    for (int owner = 0; owner < GEMM_SPLITS; ++owner) {
        if (owner == rank) continue;
#pragma unroll
        for (int i = 0; i < FOURS * BLOCKS_M; ++i) {
            const float* v = sums[i / FOURS] + owner * PART_N / 2 + i % FOURS * 4;
            store_at(owner, place(rank, i / FOURS, i % FOURS), arrived, v[0], v[1], v[2], v[3]);
        }
    }
    wait(arrived, 0, "sums");
#pragma unroll
    for (int split = 0; split < GEMM_SPLITS; ++split) {
#pragma unroll
        for (int i = 0; i < FOURS * BLOCKS_M; ++i) {
            float v[4];
            if (split == rank) {
#pragma unroll
                for (int owner = 0; owner < GEMM_SPLITS; ++owner) {
                    if (owner != split) continue;
#pragma unroll
                    for (int k = 0; k < 4; ++k) v[k] = sums[i / FOURS][owner * PART_N / 2 + i % FOURS * 4 + k];
                }
            } else {
                *reinterpret_cast<float4*>(v) = *reinterpret_cast<const float4*>(place(split, i / FOURS, i % FOURS));
            }
            float* to = finals[i / FOURS] + i % FOURS * 4;
#pragma unroll
            for (int k = 0; k < 4; ++k) to[k] = split == 0 ? v[k] : to[k] + v[k];
        }
    }
}

__device__ __forceinline__ float finished(float sum, float bias) {
    return GEMM_GELU ? gelu_fast(sum + bias) : sum + bias;
}

// float: pairs of columns, 32 bytes of a row by 4 lanes, straight to memory.
__device__ __forceinline__ void store_float(const Finals& sums, const Group& group, const float* bias,
                                            const float* residual, float* out, int first_row, int first_column, int M,
                                            int N) {
#pragma unroll
    for (int j = 0; j < PART_N / 8; ++j) {
        const int column = first_column + 8 * j + 2 * (group.lane % 4);
        if (column >= N) continue;
        const float2 b = pair_at(bias, 8 * j + 2 * (group.lane % 4));
#pragma unroll
        for (int half = 0; half < 2 * BLOCKS_M; ++half) {
            const int row = first_row + half / 2 * 64 + group.warp * 16 + half % 2 * 8 + group.lane / 4;
            if (row >= M) continue;
            const float* sum = sums[half / 2] + 4 * j + half % 2 * 2;
            float2 y = {finished(sum[0], b.x), finished(sum[1], b.y)};
            const long long at = (long long)row * N + column;
            if (GEMM_RESIDUAL) {
                const float2 r = __ldcg(reinterpret_cast<const float2*>(residual + at));
                y.x += r.x, y.y += r.y;
            }
            *reinterpret_cast<float2*>(out + at) = y;
        }
    }
    group.sync();  // the biases are done with
}

// 16 bits: chunks of 64 rows through shared memory and the copy engine, which brings the residual there, too.
struct Chunks {
    char* const buffers;  // two of them
    Barrier* const arrived;
    const Group& group;
    unsigned count = 0;  // chunks so far: they take turns

    __device__ char* buffer(unsigned chunk) const { return buffers + chunk % BUFFERS * CHUNK_BYTES; }

    // The residual of the tile's chunks `from` to `to`, where buffers are, or are about to be, free.
    __device__ void ask(const TensorMap& residual, int from, int to, int row, int column) const {
        if (group.thread != 0) return;
        wait_for_reads<0>();
        for (int c = from; c < to && c < CHUNKS * BLOCKS_M; ++c) {
            Barrier& barrier = arrived[(count + c - from) % BUFFERS];
            arrive_and_expect(barrier, CHUNK_BYTES);
            load_box(buffer(count + c - from), residual, barrier, column + c % CHUNKS * GEMM_CHUNK,
                     row + c / CHUNKS * 64, 0);
        }
    }

    __device__ void store(const Finals& sums, const float* bias, const TensorMap& residual, const TensorMap& out,
                          int row, int column) {
        const int lane = group.lane;
        const int place = (group.warp * 16 + lane % 16) * GEMM_CHUNK * 2 + lane / 16 * 16;  // of the lane's 8 values
#pragma unroll
        for (int c = 0; c < CHUNKS * BLOCKS_M; ++c, ++count) {
            const float* from = sums[c / CHUNKS] + c % CHUNKS * GEMM_CHUNK / 2;
            int to = shared_address(buffer(count)) + place;
            asm volatile("" : "+r"(to));  // the compiler would keep the places of all chunks in registers
            unsigned y[GEMM_CHUNK / 16][4];  // of 16 columns: i % 2: the lower rows; i / 2: the right columns
            if (GEMM_RESIDUAL) {
                wait(arrived[count % BUFFERS], count / BUFFERS & 1, "residual");
#pragma unroll
                for (int j = 0; j < GEMM_CHUNK / 16; ++j) {
                    load_matrices(y[j][0], y[j][1], y[j][2], y[j][3], swizzled<SWIZZLE>(to + 32 * j));
                }
            }
#pragma unroll
            for (int k = 0; k < GEMM_CHUNK / 4; ++k) {
                const int j = k / 4, i = k % 4, block = 2 * j + i / 2;
                const float2 b = pair_at(bias, c % CHUNKS * GEMM_CHUNK + 8 * block + 2 * (lane % 4));
                const float* sum = from + 4 * block + i % 2 * 2;
                float v[2] = {finished(sum[0], b.x), finished(sum[1], b.y)};
                if (GEMM_RESIDUAL) {
                    float old[2];
                    Vec<T, 2>{y[j][i]}.unpack(old);
                    v[0] += old[0], v[1] += old[1];
                }
                y[j][i] = Vec<T, 2>::pack(v).raw;
            }
            if (GEMM_RESIDUAL) {
                __syncwarp();
            } else {
                if (group.thread == 0) wait_for_reads<BUFFERS - 1>();
                group.sync();
            }
#pragma unroll
            for (int j = 0; j < GEMM_CHUNK / 16; ++j) {
                store_matrices(swizzled<SWIZZLE>(to + 32 * j), y[j][0], y[j][1], y[j][2], y[j][3]);
            }
            show_writes();
            group.sync();
            if (group.thread == 0) {
                store_box(out, buffer(count), column + c % CHUNKS * GEMM_CHUNK, row + c / CHUNKS * 64, 0);
                end_stores();
            }
            if (GEMM_RESIDUAL && c + BUFFERS < CHUNKS * BLOCKS_M) {  // into this buffer, when it has been read
                count += BUFFERS;
                ask(residual, c + BUFFERS, c + BUFFERS + 1, row, column);
                count -= BUFFERS;
            }
        }
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) gemm_hopper(
    const __grid_constant__ TensorMap a,         // (1, M, K)
    const __grid_constant__ TensorMap w,         // (1, N, K)
    const __grid_constant__ TensorMap residual,  // (1, M, N), with GEMM_RESIDUAL
    const __grid_constant__ TensorMap out,       // (1, M, N)
    const float* __restrict__ bias,              // (N) or null
    const float* residual_float,                 // (M, N); with GEMM_FLOAT_OUT these instead of the maps
    float* out_float,                            // (M, N)
    int M, int N, int K) {
    extern __shared__ char unaligned[];
    char* const ring = align_1024(unaligned);
    char* const buffers = ring + GEMM_STAGES * STAGE_BYTES;
    Rest& rest = *reinterpret_cast<Rest*>(buffers + (GEMM_FLOAT_OUT ? 0 : CONSUMERS * BUFFERS * CHUNK_BYTES));
    Barriers& barriers = rest.barriers;

    let_next_start();
    if (threadIdx.x == 0) {
        prefetch(a), prefetch(w);
        barriers.start();
    }
    __syncthreads();
    if (GEMM_SHARES > 1) sync_cluster();

    const int rank = CLUSTER > 1 ? rank_in_cluster() : 0;
    Work at(M, N, K, rank);
    if (uniform(threadIdx.x / GROUP) == 0) {
        give_registers<24>();
        if (threadIdx.x / 32 == 0 && elect_one()) produce(ring, barriers, a, w, at);
        __syncwarp();
        if (GEMM_SHARES > 1) sync_cluster();
        return;
    }
    take_registers<240>();
    const Group group;
    float* const own_bias = rest.bias[group.index];
    Chunks chunks{buffers + group.index * BUFFERS * CHUNK_BYTES, barriers.residual[group.index], group};
    wait_for_previous();
    unsigned count = 0;
    for (int i = 0; at.left(); at.next_tile(), ++i, count += at.last - at.first) {
        if (GROUPS == 1 && i % CONSUMERS != group.index) continue;
        const int row = at.row() + group.row;
        const int column = at.column() + group.column + (GEMM_SPLITS > 1 ? rank * PART_N : 0);
        if (GEMM_RESIDUAL && !GEMM_FLOAT_OUT) chunks.ask(residual, 0, BUFFERS, row, column);
        for (int c = group.thread; c < PART_N; c += GROUP) {
            own_bias[c] = bias && column + c < N ? bias[column + c] : 0.0f;
        }
        Sums sums;
        wait_for_turn(barriers, group, i);
        multiply_tile(sums, ring, barriers, group, count, at.last - at.first);
        group.sync();  // the biases are there
#if GEMM_SPLITS == 1
        const Finals& finals = sums;
#else
        Finals finals;
        combine(sums, finals, ring, barriers.sums[group.index], group, rank);
#endif
        if (GEMM_FLOAT_OUT) {
            store_float(finals, group, own_bias, residual_float, out_float, row, column, M, N);
        } else {
            chunks.store(finals, own_bias, residual, out, row, column);
        }
    }
    if (group.thread == 0) wait_for_reads<0>();
    __syncwarp();
    if (GEMM_SHARES > 1) sync_cluster();  // others may still write into this block's shared memory
}
