// The common parts of the Hopper products: tiles, the ring in shared memory, the roles of the warpgroups. Included by
// matmul/prompt/wgmma.cu, lib/matmul/wgmma_registers.cuh, matmul/prompt/wgmma_hi_lo.cu and
// matmul/prompt/rmsnorm_wgmma.cu, which may set the constants below to other values.
//
// The products are a w^T. A block has three warpgroups. One thread of the first warpgroup requests slices (64 along K)
// of a tile's rows of a and w from TMA, into a ring buffer in shared memory. The other two warpgroups,
// called groups, multiply:
//
//   ring     [a | w] [a | w] [a | w] [a | w]       barriers: full: slice has arrived; empty: slice has been read
//   group 1  tile 0 multiply | epilogue | tile 2 multiply ...
//   group 2                    tile 1 multiply | epilogue | tile 3 multiply ...
//
// The groups process alternate tiles, so that one group's epilogue runs while the other group multiplies. If there is
// at most one tile per block, both groups share it: GEMM_GROUP_M x GEMM_GROUP_N is a group's part. Clusters have one of
// two uses. With GEMM_SHARES > 1, the blocks of a cluster have tiles below each other, which use the same rows of w:
// each block loads a part of these rows for all blocks, which reduces the load on the L2 cache. With GEMM_SPLITS > 1
// (not in matmul/prompt/wgmma_hi_lo.cu), the blocks of a cluster divide the K of one tile. With GEMM_STREAM, the
// slices of all tiles are divided equally among clusters. If two clusters share a tile, the cluster with the later
// slices starts from the sums of the other cluster. A cluster begins with its last tile, so that these sums are
// complete when they are needed:
//
//   cluster 0   [ first part of tile 1 | tile 0 ........................... ]
//   cluster 1   [ first part of tile 2 .............. | last part of tile 1 ]
//   cluster 2   [ tile 3 ........................... | last part of tile 2 ]
//
// a and w are arrays (GEMM_PARTS, rows, K), with two parts for hi/lo numbers. The boxes of the tensor maps are (1,
// GEMM_A_ROWS, 64) for a, (1, GEMM_N / GEMM_SHARES, 64) for w, and (1, 64, GEMM_CHUNK) for the output. Grid: one
// cluster per tile or, without GEMM_SPLITS, at most as many clusters as fit on the GPU at once. Block (THREADS).
// Dynamic shared memory, aligned to 1024 bytes: the ring, chunks of output, received sums, the kernel's struct Rest;
// the Python operation computes its size.
#pragma once

#include "lib/sm90_wgmma.cuh"

#ifndef GEMM_PARTS
#define GEMM_PARTS 1
#endif
#ifndef GEMM_M  // rows of a per tile
#define GEMM_M 128
#endif
#ifndef GEMM_A_ROWS  // rows of a that are loaded per tile; less than GEMM_M if a has fewer rows
#define GEMM_A_ROWS GEMM_M
#endif
#ifndef GEMM_A_ITEM  // bytes per element of a
#define GEMM_A_ITEM 2
#endif
#ifndef GEMM_N
#define GEMM_N 192
#endif
#ifndef GEMM_GROUP_M  // rows of one warpgroup's part of a tile
#define GEMM_GROUP_M 128
#endif
#ifndef GEMM_GROUP_N
#define GEMM_GROUP_N 192
#endif
#ifndef GEMM_STAGES
#define GEMM_STAGES 4
#endif
#ifndef GEMM_SPLITS  // blocks of a cluster that divide K; at most the number of slices
#define GEMM_SPLITS 1
#endif
#ifndef GEMM_SHARES
#define GEMM_SHARES 1
#endif
#ifndef GEMM_STREAM  // 1: clusters divide the slices of all tiles equally; only in lib/matmul/wgmma_registers.cuh
#define GEMM_STREAM 0
#endif
#ifndef GEMM_CHUNK  // columns of out stored at once: 16, 32 or 64, a divisor of GEMM_GROUP_N / GEMM_SPLITS
#define GEMM_CHUNK 64
#endif
#ifndef GEMM_DOWN  // 1: tiles are numbered column by column; 0: row by row
#define GEMM_DOWN 0
#endif
#ifndef GEMM_EARLY  // 1: w is loaded before the previous kernel has ended, which must not write w
#define GEMM_EARLY 1
#endif
#ifndef GEMM_GELU
#define GEMM_GELU 0
#endif
#ifndef GEMM_RESIDUAL
#define GEMM_RESIDUAL 0
#endif
#ifndef GEMM_FLOAT_OUT  // 1: out and residual are float; not in matmul/prompt/rmsnorm_wgmma.cu
#define GEMM_FLOAT_OUT 0
#endif
#ifndef GEMM_SCALED  // 1: sums are multiplied by w_scale; as GEMM_FLOAT_OUT
#define GEMM_SCALED 0
#endif

constexpr int SLICE = 64, ROW_BYTES = 128;  // SLICE: values along K
constexpr int GROUPS = GEMM_M / GEMM_GROUP_M * (GEMM_N / GEMM_GROUP_N);  // warpgroups that share a tile
constexpr int CONSUMERS = 2, GROUP = 128, THREADS = (1 + CONSUMERS) * GROUP, CLUSTER = GEMM_SPLITS * GEMM_SHARES;
constexpr bool SHARED_RING = GEMM_SHARES > 1;  // other blocks of the cluster write to this block's ring
constexpr int BLOCKS_M = GEMM_GROUP_M / 64;  // wgmmas along M per warpgroup
constexpr int A_ROW_BYTES = SLICE * GEMM_A_ITEM, A_BYTES = GEMM_M * A_ROW_BYTES, W_BYTES = GEMM_N * ROW_BYTES;
constexpr int STAGE_BYTES = GEMM_PARTS * (A_BYTES + W_BYTES);  // high (and low) part of a, then of w
constexpr int PART_N = GEMM_GROUP_N / GEMM_SPLITS;  // output columns that a warpgroup finishes
constexpr int CHUNKS = PART_N / GEMM_CHUNK, CHUNK_BYTES = 64 * GEMM_CHUNK * 2;
constexpr int SWIZZLE = GEMM_CHUNK / 8 - 1;
constexpr int BUFFERS = 2;  // chunks of output in flight per warpgroup
constexpr int RECEIVED_BYTES = (GEMM_SPLITS - 1) * GEMM_M * (GEMM_N / GEMM_SPLITS) * 4;  // sums from other blocks

static_assert(GROUPS == 1 || GROUPS == CONSUMERS, "a tile is for one group or for both");
static_assert(GEMM_CHUNK == 16 || GEMM_CHUNK == 32 || GEMM_CHUNK == 64, "TMA swizzles 32, 64 or 128 bytes");
static_assert(PART_N % GEMM_CHUNK == 0 && GEMM_GROUP_N % GEMM_SPLITS == 0, "whole chunks");
static_assert(GEMM_GROUP_M % 64 == 0 && GEMM_A_ROWS % 8 == 0 && GEMM_A_ROWS <= GEMM_M, "whole wgmmas, whole swizzles");
static_assert(GEMM_N % (8 * GEMM_SHARES) == 0, "each block's part of w starts on 1024 bytes");
static_assert(GEMM_SPLITS == 1 || GEMM_SHARES == 1, "a cluster has one use");
static_assert(!GEMM_STREAM || (GEMM_SPLITS == 1 && GEMM_PARTS == 1 && GROUPS == CONSUMERS), "sums of a whole tile");

struct Barriers {
    Barrier full[GEMM_STAGES], empty[GEMM_STAGES];
    Barrier residual[CONSUMERS][BUFFERS];
    Barrier turn[CONSUMERS];  // start of a group's turn to multiply
    Barrier sums[CONSUMERS];  // sums of the other splits (ranges of K) have arrived

    __device__ void start() {  // called by one thread
        for (int i = 0; i < GEMM_STAGES; ++i) {
            init(full[i], 1);
            init(empty[i], GEMM_SHARES * GROUPS * (GROUP / 32));
        }
        for (int i = 0; i < CONSUMERS; ++i) {
            for (int j = 0; j < BUFFERS; ++j) init(residual[i][j], 1);
            init(turn[i], GROUP / 32);
            init(sums[i], 1);
        }
        fence_inits();
    }
};

// The sequence of tiles that a block multiplies, and the slices of the current tile.
struct Work {
    const int rank, tiles_n, tiles;
    int first, last;  // slices of the current tile: first .. last - 1
    int tile;

    __device__ Work(int M, int N, int K, int rank)
        : rank(rank), tiles_n((N + GEMM_N - 1) / GEMM_N),
          tiles((M + GEMM_SHARES * GEMM_M - 1) / (GEMM_SHARES * GEMM_M) * tiles_n),
          first(GEMM_SPLITS > 1 ? slices(K, rank) : 0),
          last(GEMM_SPLITS > 1 ? slices(K, rank + 1) : slices(K, GEMM_SPLITS)), tile(blockIdx.x / CLUSTER) {
#if GEMM_STREAM
        divide(K);
#endif
    }

    // Returns the number of slices in the first `parts` splits (ranges of K). For hi/lo numbers, the number is
    // rounded up to an even number; a slice after the end of K is zeros.
    static __device__ int slices(int K, int parts) {
        const int all = (K + GEMM_PARTS * SLICE - 1) / (GEMM_PARTS * SLICE) * GEMM_PARTS;
        return GEMM_SPLITS > 1 ? all * parts / GEMM_SPLITS : parts ? all : 0;
    }

#if GEMM_STREAM
    static constexpr int UNIT = 4;  // slices per unit of work (256 values of K), which one cluster processes

    int all, begin, end;  // all: slices per tile; begin, end: this cluster's units, counted over all tiles

    __device__ void divide(int K) {
        all = slices(K, 1);
        const int clusters = gridDim.x / CLUSTER, cluster = blockIdx.x / CLUSTER, units = tiles * units_of_tile();
        begin = (long long)units * cluster / clusters, end = (long long)units * (cluster + 1) / clusters;
        tile = (end - 1) / units_of_tile();
        share();
    }

    __device__ int units_of_tile() const { return (all + UNIT - 1) / UNIT; }
    __device__ void share() {
        const int before = tile * units_of_tile();
        first = max(0, begin - before) * UNIT, last = min(all, (end - before) * UNIT);
    }
    __device__ bool left() const { return (tile + 1) * units_of_tile() > begin; }
    __device__ void next() { --tile, share(); }
    __device__ bool continues() const { return first > 0; }
    __device__ bool ends() const { return last == all; }
#else
    __device__ bool left() const { return tile < tiles; }
    __device__ void next() { tile += gridDim.x / CLUSTER; }
    __device__ bool continues() const { return false; }
    __device__ bool ends() const { return true; }
#endif
    __device__ int row() const {
        const int below = GEMM_DOWN ? tile % (tiles / tiles_n) : tile / tiles_n;
        return (below * GEMM_SHARES + (GEMM_SHARES > 1 ? rank : 0)) * GEMM_M;
    }
    __device__ int column() const { return (GEMM_DOWN ? tile / (tiles / tiles_n) : tile % tiles_n) * GEMM_N; }
};

// Loads a box of w for this block, or with GEMM_SHARES for all blocks of its cluster.
__device__ __forceinline__ void load_w_box(char* to, const TensorMap& w, Barrier& full, int x, int y, int z) {
    if (GEMM_SHARES > 1) {
        load_box_for((1 << GEMM_SHARES) - 1, to, w, full, x, y, z);
    } else {
        load_box(to, w, full, x, y, z);
    }
}

// Requests all slices of the block's tiles as stages of the ring become free. Called by one thread. early(slice, row,
// column, stage) requests the slice's data that does not depend on the previous kernel, later(slice, row, column,
// stage) the other data. The loop over slices is time-critical: with a division in it, an iteration took 250 ns, longer
// than the products of a slice of a small tile.
template <typename Early, typename Later>
__device__ __forceinline__ void produce_slices(Barriers& barriers, const Work& work, const Early& early,
                                               const Later& later) {
    const auto begin_slice = [&](int slice, int row, int column, int stage) {
        arrive_and_expect(barriers.full[stage], STAGE_BYTES - GEMM_PARTS * (GEMM_M - GEMM_A_ROWS) * A_ROW_BYTES);
        early(slice, row, column, stage);
    };
    if (!GEMM_EARLY) wait_before_copies();
    int stage = 0;
    for (Work at = work; at.left() && stage < GEMM_STAGES; at.next()) {
        const int row = at.row(), column = at.column();
        for (int slice = at.first; slice < at.last && stage < GEMM_STAGES; ++slice) {
            begin_slice(slice, row, column, stage++);
        }
    }
    int row = work.row(), column = work.column();
    wait_before_copies();
    unsigned round = stage = 0;
    for (Work at = work; at.left(); at.next(), row = at.row(), column = at.column()) {
        for (int slice = at.first; slice < at.last; ++slice) {
            if (round > 0) {
                wait(barriers.empty[stage], (round - 1) & 1, "empty");
                begin_slice(slice, row, column, stage);
            }
            later(slice, row, column, stage);
            if (++stage == GEMM_STAGES) stage = 0, ++round;
        }
    }
    // Other blocks of the cluster arrive at this block's `empty` barriers, so this block must not exit before their
    // last arrivals.
#pragma unroll 1
    for (int i = 0; SHARED_RING && i < GEMM_STAGES; ++i) {
        if (round > 0) wait(barriers.empty[stage], (round - 1) & 1, "empty at the end");
        if (++stage == GEMM_STAGES) stage = 0, ++round;
    }
}

// Requests all slices of a and w; slices of w already before the previous kernel has ended. load_w(slice, column, to,
// full) requests a slice of w.
template <typename LoadW>
__device__ __forceinline__ void produce(char* ring, Barriers& barriers, const TensorMap& a, const Work& work,
                                        const LoadW& load_w) {
    const auto early = [&](int slice, int, int column, int stage) {
        load_w(slice, column, ring + stage * STAGE_BYTES + GEMM_PARTS * A_BYTES, barriers.full[stage]);
    };
    produce_slices(barriers, work, early, [&](int slice, int row, int, int stage) {
        for (int part = 0; part < GEMM_PARTS; ++part) {
            char* to = ring + stage * STAGE_BYTES + part * A_BYTES;
            load_box(to, a, barriers.full[stage], slice * SLICE, row, part);
        }
    });
}

__device__ __forceinline__ void produce(char* ring, Barriers& barriers, const TensorMap& a, const TensorMap& w,
                                        const Work& work) {
    produce(ring, barriers, a, work, [&](int slice, int column, char* to, Barrier& full) {
        const int first = GEMM_SHARES > 1 ? work.rank * (GEMM_N / GEMM_SHARES) : 0;
        for (int part = 0; part < GEMM_PARTS; ++part) {
            load_w_box(to + part * W_BYTES + first * ROW_BYTES, w, full, slice * SLICE, column + first, part);
        }
    });
}

// Starts a block. prepare(), called by one thread, prefetches tensor maps.
template <typename Prepare>
__device__ __forceinline__ void start_block(Barriers& barriers, Prepare prepare) {
    let_next_start();
    if (threadIdx.x == 0) {
        prepare();
        barriers.start();
    }
    __syncthreads();
    if (CLUSTER > 1) arrive_in_cluster();
    if (GEMM_SHARES > 1) wait_for_cluster();  // with GEMM_SPLITS, the wait is before sums are sent
}

// The body of the first warpgroup: gives registers to the groups, and calls `produce` in one thread.
template <typename Produce>
__device__ __forceinline__ void run_producer(const Produce& produce) {
    give_registers<24>();
    if (threadIdx.x / 32 == 0 && elect_one()) produce();
    __syncwarp();
    if (GEMM_SPLITS > 1) wait_for_cluster();  // every thread that arrives must also wait
}

struct Group {  // a consumer warpgroup and its part of a tile
    const int index = uniform(threadIdx.x / GROUP) - 1, thread = threadIdx.x % GROUP;
    const int warp = thread / 32, lane = thread % 32;
    // The group's position within the tile, if both groups share the tile.
    const int row = GROUPS > 1 ? index % (GEMM_M / GEMM_GROUP_M) * GEMM_GROUP_M : 0;
    const int column = GROUPS > 1 ? index / (GEMM_M / GEMM_GROUP_M) * GEMM_GROUP_N : 0;

    __device__ void sync() const { sync_threads(1 + index, GROUP); }
};

// Waits until slice number `count`, counted over all of the block's tiles, has arrived. Returns the address of the
// slice of a; the slice of w follows.
__device__ __forceinline__ const char* arrived(const char* ring, const Barriers& barriers, unsigned count) {
    const int stage = count % GEMM_STAGES;
    wait<SHARED_RING>(barriers.full[stage], count / GEMM_STAGES & 1, "full");
    return ring + stage * STAGE_BYTES;
}

// Marks slice number `count` as read by this warp. Each warp calls this function after its last read of the slice.
__device__ __forceinline__ void release(Barriers& barriers, const Group& group, unsigned count) {
    Barrier& empty = barriers.empty[count % GEMM_STAGES];
    if (GEMM_SHARES > 1) {
        if (group.lane < GEMM_SHARES) arrive_at(empty, group.lane);
    } else {
        if (group.lane == 0) arrive(empty);
    }
}

// If the groups alternate tiles: waits until the other group has received all slices of the previous tile. Otherwise
// this group could wait for a slice more than one phase ahead, which an mbarrier cannot distinguish. tile: number of
// this group's tile, counted over the tiles of both groups.
__device__ __forceinline__ void wait_for_turn(const Barriers& barriers, const Group& group, int tile) {
    if (GROUPS == 1 && tile > 0) wait(barriers.turn[group.index], (tile - 1) / CONSUMERS & 1, "turn");
}

__device__ __forceinline__ void give_turn(Barriers& barriers, const Group& group) {
    if (GROUPS == 1 && group.lane == 0) arrive(barriers.turn[1 - group.index]);
}

__device__ __forceinline__ float2 pair_at(const float* from, int i) {
    return *reinterpret_cast<const float2*>(from + i);
}

__device__ __forceinline__ char* align_1024(char* p) { return p + (1024 - shared_address(p) % 1024) % 1024; }
