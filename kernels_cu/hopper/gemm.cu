// GEMM for Hopper: TMA, wgmma, warp specialisation, a persistent grid.
//
//   out = [residual +] [gelu](a w^T + bias)     a (M, K), w (N, K), out and residual (M, N), bias (N)
//
// a and w are __half or __nv_bfloat16, sums float, out the same as a or float. A block has three warpgroups. One thread
// of the first asks the copy engine for slices of 64 of K, of a tile's rows of a and w, into a ring in shared memory;
// the other two multiply:
//
//   ring     [a | w] [a | w] [a | w] [a | w]       full: the slice has arrived    empty: both have done with it
//   group 1  tile 0 multiply | epilogue | tile 2 multiply ...
//   group 2                    tile 1 multiply | epilogue | tile 3 multiply ...
//
// Each group has tiles of its own, in turn, so that one's epilogue (bias, GELU, residual, rounding, storing) runs while
// the other multiplies. Where there is no more than a tile for a block, both share it: GEMM_GROUP_M x GEMM_GROUP_N is
// a group's part. The K of an output are added up in the same order whatever the tile, so a row has the same bits in any
// batch. The exception is GEMM_SPLITS > 1, for few rows and a long K: the blocks of a cluster share a tile's K, tell each
// other their sums through shared memory, and each finishes a part of the columns.
//
// a, w, out, residual come as tensor maps: boxes (GEMM_M, 64), (GEMM_N, 64), (64, GEMM_CHUNK).
// grid: a block for every tile, or as many as fit at once; times GEMM_SPLITS, a cluster for every tile. block (384).
#include "storage.cuh"
#include "gelu_fast.cuh"
#include "hopper/wgmma.cuh"

#ifndef GEMM_M  // tile
#define GEMM_M 128
#endif
#ifndef GEMM_N
#define GEMM_N 192
#endif
#ifndef GEMM_GROUP_M  // what one warpgroup has of a tile: all of it, or half
#define GEMM_GROUP_M 128
#endif
#ifndef GEMM_GROUP_N
#define GEMM_GROUP_N 192
#endif
#ifndef GEMM_STAGES
#define GEMM_STAGES 4
#endif
#ifndef GEMM_SPLITS  // of K, each in a block of its own; at most as many as there are slices
#define GEMM_SPLITS 1
#endif
#ifndef GEMM_SHARES  // blocks of a cluster with tiles below each other: each loads a part of w's rows for all
#define GEMM_SHARES 1
#endif
#ifndef GEMM_CHUNK  // columns that are stored at once: 16, 32 or 64, dividing GEMM_GROUP_N / GEMM_SPLITS
#define GEMM_CHUNK 64
#endif
#ifndef GEMM_GELU
#define GEMM_GELU 0
#endif
#ifndef GEMM_RESIDUAL
#define GEMM_RESIDUAL 0
#endif
#ifndef GEMM_FLOAT_OUT  // out and residual are float
#define GEMM_FLOAT_OUT 0
#endif

constexpr int SLICE = 64, ROW_BYTES = 128;  // of K
constexpr int GROUPS = GEMM_M / GEMM_GROUP_M * (GEMM_N / GEMM_GROUP_N);  // that share a tile
constexpr int CONSUMERS = 2, GROUP = 128, THREADS = (1 + CONSUMERS) * GROUP;
constexpr int BLOCKS_M = GEMM_GROUP_M / 64;  // wgmmas below each other
constexpr int A_BYTES = GEMM_M * ROW_BYTES, W_BYTES = GEMM_N * ROW_BYTES, STAGE_BYTES = A_BYTES + W_BYTES;
constexpr int CLUSTER = GEMM_SPLITS * GEMM_SHARES;
constexpr int PART_N = GEMM_GROUP_N / GEMM_SPLITS;  // columns that a group finishes
constexpr int CHUNKS = PART_N / GEMM_CHUNK, CHUNK_BYTES = 64 * GEMM_CHUNK * 2;
constexpr int SWIZZLE = GEMM_CHUNK / 8 - 1;
constexpr int BUFFERS = 2;  // chunks of a group on their way out

static_assert(GROUPS == 1 || GROUPS == CONSUMERS, "a tile is for one group or for both");
static_assert(PART_N % GEMM_CHUNK == 0 && GEMM_CHUNK % 16 == 0 && GEMM_GROUP_N % GEMM_SPLITS == 0, "whole chunks");
static_assert(GEMM_SPLITS == 1 || GEMM_SHARES == 1, "a cluster has one use");
static_assert(GEMM_SPLITS == 1 || GROUPS == CONSUMERS, "a split tile is for both groups");
static_assert(GEMM_SPLITS == 1 || GEMM_M * GEMM_N * 4 <= GEMM_STAGES * STAGE_BYTES, "the ring has room for all sums");

struct Rest {  // of shared memory, behind the ring and the chunks
    float bias[CONSUMERS][GEMM_GROUP_N];
    Barrier full[GEMM_STAGES], empty[GEMM_STAGES];
    Barrier residual[CONSUMERS][BUFFERS];
    Barrier turn[CONSUMERS];  // of a group to multiply
    Barrier sums[CONSUMERS];  // of the other splits
};

// Where a block is in its work: slices of the tiles it multiplies, one after the other.
struct Work {
    const int rank, tiles_n, tiles, first, last;  // slices of each tile from `first` to before `last`
    int tile, slice;

    __device__ Work(int M, int N, int K, int rank)
        : rank(rank), tiles_n((N + GEMM_N - 1) / GEMM_N), tiles((M + GEMM_SHARES * GEMM_M - 1) / (GEMM_SHARES * GEMM_M) * tiles_n),
          first(GEMM_SPLITS > 1 ? (K + SLICE - 1) / SLICE * rank / GEMM_SPLITS : 0),
          last(GEMM_SPLITS > 1 ? (K + SLICE - 1) / SLICE * (rank + 1) / GEMM_SPLITS : (K + SLICE - 1) / SLICE),
          tile(blockIdx.x / CLUSTER), slice(first) {}

    __device__ bool left() const { return tile < tiles; }
    __device__ void next_tile() { tile += gridDim.x / CLUSTER; }
    __device__ void next() {
        if (++slice == last) slice = first, next_tile();
    }
    __device__ int row() const { return (tile / tiles_n * GEMM_SHARES + (GEMM_SHARES > 1 ? rank : 0)) * GEMM_M; }
    __device__ int column() const { return tile % tiles_n * GEMM_N; }
};

__device__ __forceinline__ void produce(char* ring, Rest& rest, const TensorMap& a, const TensorMap& w, const Work& work) {
    const auto load_w = [&](const Work& at, int stage) {
        arrive_and_expect(rest.full[stage], STAGE_BYTES);
        char* to = ring + stage * STAGE_BYTES + A_BYTES;
        if (GEMM_SHARES > 1) {
            const int part = at.rank * (GEMM_N / GEMM_SHARES);
            load_box_for((1 << GEMM_SHARES) - 1, to + part * ROW_BYTES, w, rest.full[stage], at.slice * SLICE,
                         at.column() + part);
        } else {
            load_box(to, w, rest.full[stage], at.slice * SLICE, at.column());
        }
    };
    Work ahead = work;  // weights were there before the kernel whose end is waited for
    for (int stage = 0; stage < GEMM_STAGES && ahead.left(); ++stage, ahead.next()) load_w(ahead, stage);
    wait_for_previous();
    unsigned count = 0;
    for (Work at = work; at.left(); at.next(), ++count) {
        const int stage = count % GEMM_STAGES;
        if (count >= GEMM_STAGES) {
            wait(rest.empty[stage], (count / GEMM_STAGES - 1) & 1, "empty");
            load_w(at, stage);
        }
        load_box(ring + stage * STAGE_BYTES, a, rest.full[stage], at.slice * SLICE, at.row());
    }
}

struct Group {  // of consumers
    const int index = uniform(threadIdx.x / GROUP) - 1, thread = threadIdx.x % GROUP, warp = thread / 32, lane = threadIdx.x % 32;
    // Of the tile, where both share it.
    const int row = GROUPS > 1 ? index % (GEMM_M / GEMM_GROUP_M) * GEMM_GROUP_M : 0;
    const int column = GROUPS > 1 ? index / (GEMM_M / GEMM_GROUP_M) * GEMM_GROUP_N : 0;

    __device__ void sync() const { sync_threads(1 + index, GROUP); }
};

typedef float Sums[BLOCKS_M][GEMM_GROUP_N / 2];   // of a thread
typedef float Finals[BLOCKS_M][PART_N / 2];

// The sums of a tile, from the ring's slices from `count` on.
__device__ __forceinline__ void multiply_tile(Sums& sums, const char* ring, Rest& rest, const Group& group,
                                              unsigned count, int slices, int tile) {
    // A barrier tells two phases from each other, no more: before a group looks at the ring it has to know that the
    // other's slices have come.
    if (GROUPS == 1 && tile > 0) wait(rest.turn[group.index], (tile - 1) / CONSUMERS & 1, "turn");
    const auto release = [&](unsigned done) {
        Barrier& empty = rest.empty[done % GEMM_STAGES];
        if (GEMM_SHARES > 1) {
            if (group.lane < GEMM_SHARES) arrive_at(empty, group.lane);
        } else {
            if (group.lane == 0) arrive(empty);
        }
    };
    for (int k = 0; k < slices; ++k, ++count) {
        const int stage = count % GEMM_STAGES;
        wait(rest.full[stage], count / GEMM_STAGES & 1, "full");
        if (GROUPS == 1 && k == slices - 1 && group.thread == 0) arrive(rest.turn[1 - group.index]);
        const char* from = ring + stage * STAGE_BYTES;
        const Matrix a = matrix_at(from + group.row * ROW_BYTES), w = matrix_at(from + A_BYTES + group.column * ROW_BYTES);
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
            release(count - 1);
        }
    }
    wait_for_products<0>();
#pragma unroll
    for (int m = 0; m < BLOCKS_M; ++m) pin(sums[m]);
    release(count - 1);
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

__device__ __forceinline__ float2 pair_at(const float* from, int i) { return *reinterpret_cast<const float2*>(from + i); }

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
            load_box(buffer(count + c - from), residual, barrier, column + c % CHUNKS * GEMM_CHUNK, row + c / CHUNKS * 64);
        }
    }

    __device__ void store(const Finals& sums, const float* bias, const TensorMap& residual, const TensorMap& out, int row,
                          int column) {
        const int lane = group.lane;
        const int place = (group.warp * 16 + lane % 16) * GEMM_CHUNK * 2 + lane / 16 * 16;  // of the lane's 8 values
#pragma unroll
        for (int c = 0; c < CHUNKS * BLOCKS_M; ++c, ++count) {
            const float* from = sums[c / CHUNKS] + c % CHUNKS * GEMM_CHUNK / 2;
            int to = shared_address(buffer(count)) + place;
            asm volatile("" : "+r"(to));  // the compiler would keep the places of all chunks in registers
            if (GEMM_RESIDUAL) {
                wait(arrived[count % BUFFERS], count / BUFFERS & 1, "residual");
            } else {
                if (group.thread == 0) wait_for_reads<BUFFERS - 1>();
                group.sync();
            }
#pragma unroll
            for (int j = 0; j < GEMM_CHUNK / 8; j += 2) {  // 16 columns
                unsigned r[4], y[4];
                const int at = swizzled<SWIZZLE>(to + 16 * j);
                if (GEMM_RESIDUAL) load_matrices(r[0], r[1], r[2], r[3], at);
#pragma unroll
                for (int i = 0; i < 4; ++i) {  // i % 2: the lower rows; i / 2: the right columns
                    const float2 b = pair_at(bias, c % CHUNKS * GEMM_CHUNK + 8 * (j + i / 2) + 2 * (lane % 4));
                    const float* sum = from + 4 * (j + i / 2) + i % 2 * 2;
                    float v[2] = {finished(sum[0], b.x), finished(sum[1], b.y)};
                    if (GEMM_RESIDUAL) {
                        float old[2];
                        Vec<T, 2>{r[i]}.unpack(old);
                        v[0] += old[0], v[1] += old[1];
                    }
                    y[i] = Vec<T, 2>::pack(v).raw;
                }
                __syncwarp();
                store_matrices(at, y[0], y[1], y[2], y[3]);
            }
            show_writes();
            group.sync();
            if (group.thread == 0) {
                store_box(out, buffer(count), column + c % CHUNKS * GEMM_CHUNK, row + c / CHUNKS * 64);
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
    const __grid_constant__ TensorMap a,         // (M, K)
    const __grid_constant__ TensorMap w,         // (N, K)
    const __grid_constant__ TensorMap residual,  // (M, N), with GEMM_RESIDUAL
    const __grid_constant__ TensorMap out,       // (M, N)
    const float* __restrict__ bias,              // (N) or null
    const float* residual_float,                 // (M, N); with GEMM_FLOAT_OUT these instead of the maps
    float* out_float,                            // (M, N)
    int M, int N, int K) {
    extern __shared__ char unaligned[];
    char* const ring = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    char* const buffers = ring + GEMM_STAGES * STAGE_BYTES;
    Rest& rest = *reinterpret_cast<Rest*>(buffers + (GEMM_FLOAT_OUT ? 0 : CONSUMERS * BUFFERS * CHUNK_BYTES));

    let_next_start();
    if (threadIdx.x == 0) {
        prefetch(a), prefetch(w);
        for (int i = 0; i < GEMM_STAGES; ++i) {
            init(rest.full[i], 1);
            init(rest.empty[i], GEMM_SHARES * GROUPS * (GROUP / 32));
        }
        for (int i = 0; i < CONSUMERS; ++i) {
            for (int j = 0; j < BUFFERS; ++j) init(rest.residual[i][j], 1);
            init(rest.turn[i], 1);
            init(rest.sums[i], 1);
        }
        fence_inits();
    }
    __syncthreads();
    if (GEMM_SHARES > 1) sync_cluster();

    const int rank = CLUSTER > 1 ? rank_in_cluster() : 0;
    Work at(M, N, K, rank);
    if (uniform(threadIdx.x / GROUP) == 0) {
        give_registers<24>();
        if (threadIdx.x / 32 == 0 && elect_one()) produce(ring, rest, a, w, at);
        __syncwarp();
        if (GEMM_SHARES > 1) sync_cluster();
        return;
    }
    take_registers<240>();
    const Group group;
    float* const own_bias = rest.bias[group.index];
    Chunks chunks{buffers + group.index * BUFFERS * CHUNK_BYTES, rest.residual[group.index], group};
    wait_for_previous();
    unsigned count = 0;
    for (int i = 0; at.left(); at.next_tile(), ++i, count += at.last - at.first) {
        if (GROUPS == 1 && i % CONSUMERS != group.index) continue;
        const int row = at.row() + group.row, column = at.column() + group.column + (GEMM_SPLITS > 1 ? rank * PART_N : 0);
        if (GEMM_RESIDUAL && !GEMM_FLOAT_OUT) chunks.ask(residual, 0, BUFFERS, row, column);
        for (int c = group.thread; c < PART_N; c += GROUP) own_bias[c] = bias && column + c < N ? bias[column + c] : 0.0f;
        Sums sums;
        multiply_tile(sums, ring, rest, group, count, at.last - at.first, i);
        group.sync();  // the biases are there
#if GEMM_SPLITS == 1
        const Finals& finals = sums;
#else
        Finals finals;
        combine(sums, finals, ring, rest.sums[group.index], group, rank);
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
