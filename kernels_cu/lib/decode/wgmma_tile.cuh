// Computes a tile of outputs for decoding with wgmma: computes sums of products over each split (a range of K), adds
// the sums of all splits by lib/decode/wgmma_sums.cuh, and calls an epilogue (lib/decode/wgmma_epilogues.cuh) with each
// output. The including file selects the types of activations, T, and weights, W (lib/storage.cuh).
#pragma once
#include "lib/storage.cuh"
#include "lib/gate.cuh"
#include "lib/sm80.cuh"
#include "lib/chunk_sums.cuh"
#include "lib/decode/wgmma_sums.cuh"
#include "lib/decode/wgmma_epilogues.cuh"

constexpr int ROW_SETS = DECODE_ROWS > 32 ? 2 : 1;  // sets of 32 rows of x per tile

// Scales and bias of the rows of W. up: with DECODE_GATED or RoPE, scales of the second row of each output; rows of U
// have no bias.
struct Scales {
    const float* w;
    const float* up;
    const float* bias;
};

// Loads the constants for a lane's sums before the previous kernel has ended: scale and bias of row g of A, then of row
// g + 8. The four lanes 4 g + t share these constants. Shared memory holds them, because the products need the
// registers.
__device__ __forceinline__ void load_constants(float4* of_warp, int n, int N, const Scales& scales) {
    const int row = first_row(n);
    const float* const second_scale = TWO ? scales.up : scales.w ? scales.w + 1 : nullptr;
    const bool first = n < N, second = TWO ? first : n + 1 < N, has_bias = scales.bias && (DECODE_ROPE || !TWO);
    float4 found = {1.0f, 0.0f, 1.0f, 0.0f};
    if (first && scales.w) found.x = constant(scales.w + row);
    if (first && scales.bias) found.y = constant(scales.bias + row);
    if (second && second_scale) found.z = constant(second_scale + row);
    if (second && has_bias) found.w = constant(scales.bias + row + (TWO ? HALF_HEAD : 1));
    if (threadIdx.x % 4 == 0) of_warp[threadIdx.x % 32 / 4] = found;
    __syncwarp();
}

// The first row and column of a block's tile, kept in shared memory because the products need the registers.
struct Corner {
    int row, column;

    // Returns the number of rows of x in the tile, and below the first output column of this lane.
    __device__ __forceinline__ int rows(int M) const { return min((int)OPERAND_ROWS, M - row); }
    __device__ __forceinline__ int own_column() const { return column + (TWO ? 8 : 16) * own_warp() + own_row(); }
};

// With OPERAND_SUMS, the sums of a warpgroup's outputs over groups of four columns, for all rows of the tile. A warp
// has two groups of four columns, a warpgroup the eight groups of a chunk of 32 columns (lib/chunk_sums.cuh).
typedef float Fours[OPERAND_SUMS ? DECODE_ROWS : 1][8];
static_assert(!OPERAND_SUMS || (DECODE_GATED && DECODE_OUT_OPERAND && OPERAND_TERMS == 1), "sums of a rounded gate");
static_assert(!OPERAND_SUMS || TILES % DECODE_SPLITS == 0, "a block finishes the same rows in all warps");

// Adds up the sums of a warpgroup's chunk of columns, one row per thread, and stores them after the terms in end.out.
// column: the first column of the chunk. limit: end of the columns of this GGUF type.
template <typename End>
__device__ __forceinline__ void store_sums(const End& end, const Fours& fours, const Corner& corner, int rank,
                                           int column, int limit, int M) {
    const int row = threadIdx.x % 128;
    sync_threads(DECODE_GROUPS > 1 ? 2 + own_warp() / 4 : 2, 128);  // barrier 1 is for the sets of warps
    if (row >= corner.rows(M) || row / 4 % DECODE_SPLITS != rank || column >= limit) return;
    float sums[4];  // the order of additions of lanes_sum<8>
#pragma unroll
    for (int l = 0; l < 4; ++l) sums[l] = fours[row][l] + fours[row][l + 4];
    const float sum = (sums[0] + sums[2]) + (sums[1] + sums[3]);
    store_sum(end.out + (long long)M * end.N / 2, sum, corner.row + row, column, M, end.N);
}

// The outputs of a lane for a row of x: output n, from the lane's two rows of A, or with TWO false outputs n and n + 1.
struct Outputs {
    int n;
    float4 by;     // scale and bias of the first row of A, then of the second
    float* fours;  // with OPERAND_SUMS: place in `Fours` of this lane's group of columns, for the first row of the tile

    // Stores the sum over the lane's group of four outputs of row m, given the terms of the lanes' outputs.
    __device__ __forceinline__ void keep(float terms, int m) const {
        float sum = sum_of((unsigned)__float_as_int(terms));
        sum += __shfl_xor_sync(0xffffffffu, sum, 2 * NEXT_ROW);
        if (threadIdx.x % 16 < 4) fours[8 * (m % (unsigned)DECODE_ROWS)] = sum;
    }

    // Computes the outputs of AHEAD rows, m, m + 4 DECODE_SPLITS, ..., and stores the outputs for which `here` is true.
    // All lanes of a warp must call this function.
    template <typename End, typename Late>
    __device__ __forceinline__ void store(const End& end, int m, const bool (&here)[AHEAD],
                                          const float2 (&total)[AHEAD], const Late (&late)[AHEAD]) const {
        float v[2 * AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            v[2 * i] = fmaf(total[i].x, by.x, by.y);
            v[2 * i + 1] = DECODE_GATED ? total[i].y * by.z : fmaf(total[i].y, by.z, by.w);
        }
        if constexpr (!TWO) end.activate(v);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i, m += 4 * DECODE_SPLITS) {
            const float first = v[2 * i], second = v[2 * i + 1];
            if constexpr (DECODE_GATED) {
                float one = end.added(gate_of(first) * second, late[i]);
                if (DECODE_OUT_OPERAND) one = term_of<order::KIND, NEXT_ROW>(one);
                if (OPERAND_SUMS) keep(one, m);
                if (here[i]) end.store(m, n, one, late[i]);
            } else if (here[i]) {
                if constexpr (DECODE_ROPE) end.store_pair(m, n, first, second, late[i]);
                else end.store_two(m, n, end.added_two(first, second, late[i]), late[i]);
            }
        }
    }
};

template <typename End>
__device__ __forceinline__ auto late_of(const End& end, int m, int n) {
    if constexpr (TWO) return end.late(m, n);
    else return end.late_two(m, n);
}

// Data that the epilogue needs for the rows of a tile besides the sums. If the data is the same for all columns
// (BY_ROW), it is loaded once, one row per lane.
template <typename End, bool BY_ROW = End::BY_ROW>
struct Rows {
    __device__ __forceinline__ void load(const End&, const Corner&, int) {}
    __device__ __forceinline__ auto late(const End& end, int m, int n, int, bool here) const {
        return here ? late_of(end, m, n) : decltype(late_of(end, m, n)){};
    }
};

template <typename End>
struct Rows<End, true> {
    typename End::Late of_lane[ROW_SETS];

    __device__ __forceinline__ void load(const End& end, const Corner& corner, int M) {
#pragma unroll
        for (int i = 0; i < ROW_SETS; ++i) {
            const int row = threadIdx.x % 32 + 32 * i;
            of_lane[i] = row < corner.rows(M) ? end.late(corner.row + row, 0) : typename End::Late{};
        }
    }

    // Returns the epilogue's data for row `row` of the tile. All lanes of a warp must call this function.
    __device__ __forceinline__ typename End::Late late(const End&, int, int, int row, bool) const {
        return __shfl_sync(0xffffffffu, row < 32 ? of_lane[0] : of_lane[ROW_SETS - 1], row % 32);
    }
};

template <typename End>
__device__ __forceinline__ void consume(const Ring& ring, const Share& share, const Corner& corner, const Totals& all,
                                        const Scales& scales, const End& end, int M, int N, int K) {
    const int warp = all.warp, set = own_set(), t = threadIdx.x % 4, splits = order::splits(K);
    const int each = order::split_length(K) / SLICE;
    __shared__ float4 constants[8 * FINISHERS];
    if (DECODE_DEPTH == 1 || set == 0) load_constants(constants + 8 * warp, corner.own_column(), N, scales);
    [[maybe_unused]] float totals[FOUND] = {};
    Consumer consumer(ring, share);
    if (CLUSTER > 1) wait_for_cluster();  // the barriers of the other blocks are initialised
    wait_for_previous();
    Rows<End> rows;
    if (DECODE_GROUPS == 1) rows.load(end, corner, M);  // with more groups, no registers are free for it yet
    int split = share.first;
#pragma unroll 1
    for (int left = share.slices; left > 0; left -= each, ++split) {
        float sums[TERMS / 2];
        const int units = min(each, left) * SLICE / order::UNIT;
        consumer.multiply_split(sums, split * order::split_units(K), units, first_row(share.column));
        if constexpr (IN_HALVES) {
            const int place = set ? 1 + split - share.first : DECODE_SPLITS > 1 ? 0 : split / order::HALF_SPLITS;
            all.add(sums, place, set || split % order::HALF_SPLITS == 0);
            continue;
        }
        float found[FOUND];
        by_tile(sums, found);
        if constexpr (DECODE_SPLITS > 1) {
            all.send(split, found);
        } else {
#pragma unroll
            for (int i = 0; i < FOUND; ++i) totals[i] += found[i];
        }
    }
    if constexpr (DECODE_SPLITS == 1 && !IN_HALVES) all.keep(totals);
    if constexpr (IN_HALVES) {
        float sums[TERMS / 2];
        int count = DECODE_SPLITS > 1 || splits <= order::HALF_SPLITS ? 1 : 2;
        if constexpr (DECODE_DEPTH > 1) {
            sync_threads(1, 32 * CONSUMERS);
            if (set > 0) return;
            count = min(order::HALF_SPLITS, splits - share.rank * order::HALF_SPLITS) - order::HALF_SPLITS / 2 + 1;
        }
        all.get_halves(sums, count);
        by_tile(sums, totals);
        all.keep(totals);
        if constexpr (OF_HALVES) all.send(share.rank, totals);
    }

    if (DECODE_GROUPS > 1) rows.load(end, corner, M);
    const int top = corner.row, count = corner.rows(M), n = corner.own_column();
    const int rows_begin = DECODE_TEAMS > 1 ? 4 * TILES * set : 0;
    const int rows_end = DECODE_TEAMS > 1 ? min(count, rows_begin + 4 * TILES) : count;
    __shared__ Fours fours[DECODE_GROUPS];
    float* const of_lane = fours[warp / 4][0] + 2 * (warp % 4) + threadIdx.x % 32 / 16;
    const Outputs outputs{n, constants[8 * warp + threadIdx.x % 32 / 4], of_lane};
    // This loop over tiles is not unrolled: its instructions are fetched once and executed several times.
    const int begin = (share.rank + DECODE_SPLITS - warp * TILES % DECODE_SPLITS) % DECODE_SPLITS;
#pragma unroll 1
    for (int first = begin; first < TILES; first += AHEAD * DECODE_SPLITS) {
        decltype(rows.late(end, 0, 0, 0, true)) late[AHEAD];
        bool here[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int row = rows_begin + (first + i * DECODE_SPLITS) * 4 + t;
            here[i] = row < rows_end && n < N;
            late[i] = rows.late(end, top + row, n, row % DECODE_ROWS, here[i]);
        }
        if (DECODE_SPLITS > 1 && first == begin) wait<true>(all.arrived, 0, "sums");
        float2 total[AHEAD];
        all.get(total, first, splits);
        outputs.store(end, top + rows_begin + first * 4 + t, here, total, late);
    }
    if constexpr (OPERAND_SUMS) {
        store_sums(end, fours[warp / 4], corner, share.rank, corner.column + 8 * (warp - warp % 4), N, M);
    }
}

template <typename End>
__device__ __forceinline__ void run(const float* x, const Sources& from, const Scales& scales, const End& end, int M,
                                    int N, int K) {
    extern __shared__ char unaligned[];
    __shared__ Barrier full[DECODE_DEPTH * DECODE_STAGES], empty[DECODE_DEPTH * DECODE_STAGES], arrived;
    const int warp = threadIdx.x / 32, set = warp < CONSUMERS ? own_set() : (warp - CONSUMERS) % DECODE_DEPTH;
    char* const stages = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
#if defined(WEIGHT_GGUF)
    __shared__ Barrier tile_full[DECODE_DEPTH * DECODE_TILES], tile_empty[DECODE_DEPTH * DECODE_TILES];
    const Ring all{stages, full, empty, stages + DECODE_DEPTH * DECODE_STAGES * STAGE, tile_full, tile_empty};
    const int stage = set * DECODE_STAGES, tile = set * DECODE_TILES;  // first ones of this set of warps
    const Ring ring{all.stage(stage), full + stage, empty + stage, all.tile(tile), tile_full + tile, tile_empty + tile};
    char* const after = all.tile(DECODE_DEPTH * DECODE_TILES);
#else
    const Ring ring{stages, full, empty};
    char* const after = stages + DECODE_STAGES * STAGE;
#endif
    const Share share(M, N, K, set);
    float2* const pairs = reinterpret_cast<float2*>(after);
    float2* const halves = pairs + (OF_HALVES ? OWN * 32 : 0);
    const Totals totals{ring, pairs, arrived, share.part, DECODE_TEAMS > 1 ? warp : own_warp(), halves};
    __shared__ Corner corner;
    if (threadIdx.x == 32 * CONSUMERS) {
        corner = {share.row, share.column};
#if defined(WEIGHT_GGUF)
        for (int i = 0; i < DECODE_DEPTH * DECODE_TILES; ++i) init(tile_full[i], 1), init(tile_empty[i], 32 * WARPS);
#else
        prefetch(from.w);
#endif
        constexpr int ARRIVALS = (order::BLOCKS ? 32 : 1) * DECODE_SHARES * FINISHERS;
        for (int i = 0; i < DECODE_DEPTH * DECODE_STAGES; ++i) init(full[i], 1), init(empty[i], ARRIVALS);
        init(arrived, 1);
        fence_inits();
        const int tiles = (FINISHERS * TILES - share.rank + DECODE_SPLITS - 1) / DECODE_SPLITS;
        const int bytes = tiles * messages(order::splits(K)) * 32 * (int)sizeof(float2);
        if (DECODE_SPLITS > 1) arrive_and_expect(arrived, bytes);
    }
    __syncthreads();
    let_next_start();
    if (CLUSTER > 1) arrive_in_cluster();
    if (threadIdx.x >= 32 * CONSUMERS) {
        if constexpr (MOVES_REGISTERS) give_registers<PRODUCER_REGISTERS>();
        if (DECODE_DEPTH > 1 || warp == CONSUMERS) produce(ring, share, from, x, share.limit, K);
        return;
    }
    if constexpr (MOVES_REGISTERS) take_registers<CONSUMER_REGISTERS>();
    consume(ring, share, corner, totals, scales, end, M, share.limit, K);
}
