// The loop over K of matmul/decode/wgmma.cu: constants, the ring buffer of slices (64 or 128 values of K), the producer
// warp, which requests slices, and the consumer warps, which multiply them. The including file includes lib/sm80.cuh.
#pragma once
#include "lib/sm90_wgmma.cuh"
#include "lib/decode/order.cuh"
#if defined(WEIGHT_GGUF)
#include "lib/gguf_ranges.cuh"
#endif

#ifndef DECODE_ROWS  // rows of x per block: 4, 8, 16, 32 or 64, at least min(M, 64)
#define DECODE_ROWS 8
#endif
#ifndef DECODE_GROUPS
#define DECODE_GROUPS 1
#endif
#ifndef DECODE_SPLITS  // blocks of a cluster among which the splits (ranges of K) are divided
#define DECODE_SPLITS 1
#endif
#ifndef DECODE_SHARES  // blocks of a cluster that share the loads of x
#define DECODE_SHARES 1
#endif
#ifndef DECODE_STAGES
#define DECODE_STAGES 12
#endif
#ifndef DECODE_GATED
#define DECODE_GATED 0
#endif
#ifndef DECODE_DEPTH  // 2: two sets of warps per block, with separate rings, divide the block's half of the splits
#define DECODE_DEPTH 1
#endif
#ifndef DECODE_TEAMS  // 2: two sets of warps per block divide the rows of x; if DECODE_SPLITS > 1, without GGUF
#define DECODE_TEAMS 1
#endif
#ifndef DECODE_BLOCKS  // minimum blocks per SM (__launch_bounds__)
#define DECODE_BLOCKS 2
#endif

constexpr int CLUSTER = DECODE_SHARES * DECODE_SPLITS;
#if DECODE_SHARES * DECODE_SPLITS == 1
#undef __cluster_dims__
#define __cluster_dims__(...)
#endif
constexpr int WARPS = 4 * DECODE_GROUPS, SETS = DECODE_DEPTH * DECODE_TEAMS;  // consumer warps per set; sets of warps
constexpr int CONSUMERS = SETS * WARPS;                           // consumer warps per block
constexpr int FINISHERS = DECODE_TEAMS * WARPS;                   // consumer warps per block that complete outputs
// Three consumer warpgroups need more registers than each warp of a block of 13 warps can have. Therefore the producer
// becomes a fourth warpgroup, which gives most of its registers to the consumers.
constexpr bool MOVES_REGISTERS = DECODE_GROUPS == 3;
constexpr int PRODUCER_REGISTERS = 32, CONSUMER_REGISTERS = 160;  // per thread: PRODUCER: producer; CONSUMER: consumer
constexpr int THREADS = 32 * CONSUMERS + (MOVES_REGISTERS ? 128 : 32 * DECODE_DEPTH);
constexpr int ALL_TERMS = DECODE_ROWS > 4 ? OPERAND_TERMS * DECODE_ROWS : 8;  // columns of B: at least 8
constexpr int TERMS = ALL_TERMS / DECODE_TEAMS;              // columns of B per warp
constexpr int TILES = DECODE_ROWS / 4 / DECODE_TEAMS;        // tiles of 4 rows of x, per warp
constexpr bool TWO = DECODE_GATED || DECODE_ROPE;            // an output combines two rows of A
constexpr int OUTPUTS = TWO ? 1 : 2;                         // output columns per lane
constexpr int COLUMNS = 32 * OUTPUTS * DECODE_GROUPS;        // output columns per block
constexpr int SLICE = 128 / sizeof(W), CHUNKS = SLICE / order::CHUNK;
constexpr int W_BYTES = 64 * DECODE_GROUPS * 128, X_BYTES = 2 * SLICE * ALL_TERMS;
constexpr int BOX = 64, BOX_BYTES = 2 * BOX * ALL_TERMS;  // box of x: length in values of K; bytes in shared memory
#if defined(WEIGHT_GGUF)
constexpr int STAGE = (X_BYTES + 16 * TERMS + 1023) / 1024 * 1024;  // bytes of x per stage; W has a separate ring
#else
constexpr int STAGE = W_BYTES + X_BYTES;
#endif
constexpr int HALF_HEAD = DECODE_ROPE ? DECODE_ROPE / 2 : 1, ROPE_BOX = 32;  // pairs per head; rows of W per box
static_assert(!order::FLOATS, "terms are of 16 bits");
static_assert(DECODE_DEPTH == 1 || (order::BLOCKS && DECODE_SPLITS == 2 && DECODE_SHARES == 1), "sets share a half");
static_assert(DECODE_TEAMS == 1 || (DECODE_SPLITS > 1 && !order::BLOCKS && !MOVES_REGISTERS), "teams share a ring");
static_assert(TERMS % 8 == 0, "wgmma multiplies groups of 8 columns");
static_assert(HALF_HEAD % ROPE_BOX == 0 || !DECODE_ROPE, "a box is of one half of a head");

// Returns the row of W for output column n. With RoPE, column n is a pair of channels: returns the row of its first
// channel; the row of the second channel is HALF_HEAD rows after it.
__device__ __forceinline__ int first_row(int n) {
    return DECODE_ROPE ? n / HALF_HEAD * DECODE_ROPE + n % HALF_HEAD : n;
}

// own_set() returns the index of the set of warps that contains this consumer warp (see DECODE_DEPTH and DECODE_TEAMS),
// own_warp() the warp's index in the set.
__device__ __forceinline__ int own_set() { return SETS > 1 ? threadIdx.x / 32 / WARPS : 0; }
__device__ __forceinline__ int own_warp() { return threadIdx.x / 32 - WARPS * own_set(); }

// Shared memory of a block: stages, each with a slice of W and then of x, and their barriers; with GGUF, tiles of W.
struct Ring {
    char* stages;
    Barrier* full;
    Barrier* empty;
#if defined(WEIGHT_GGUF)
    char* tiles;
    Barrier* tile_full;
    Barrier* tile_empty;

    __device__ __forceinline__ char* tile(int i) const { return tiles + i * 8 * DECODE_GROUPS * gguf::largest_tile(); }
#endif

    __device__ __forceinline__ char* stage(int i) const { return stages + i * STAGE; }
};

// A block's share of the product: its tile of outputs and its range of K.
struct Share {
    int row, rows, column;  // first row and number of rows of x; first output column
    int limit;              // end of the matrix's columns, or of the columns with this GGUF type
    int rank, part;         // rank: index among the blocks that divide K; part: among the blocks that share x
    int first;              // first split (range of K)
    int k, slices;

    __device__ __forceinline__ Share(int M, int N, int K, int set) {
        const int tile = blockIdx.x / CLUSTER, tiles_m = (M - 1) / (int)OPERAND_ROWS + 1;
        const int splits = order::splits(K);
        const int even = (splits + DECODE_SPLITS - 1) / DECODE_SPLITS;
        const int each = order::BLOCKS && DECODE_SPLITS == 2 ? order::HALF_SPLITS : even;
        part = blockIdx.x % DECODE_SHARES, rank = blockIdx.x % CLUSTER / DECODE_SHARES;
        row = tile % tiles_m * (int)OPERAND_ROWS;
        rows = min((int)OPERAND_ROWS, M - row);
        const int group = tile / tiles_m * DECODE_SHARES + part;
#if defined(WEIGHT_GGUF)
        place(group, N);
#else
        column = group * COLUMNS, limit = N;
#endif
        first = min(rank * each, splits);
        int last = min(first + each, splits);
        if (DECODE_DEPTH > 1) (set ? first : last) = min(first + order::HALF_SPLITS / 2, last);
        k = first * order::split_length(K);
        slices = (min(last * order::split_length(K), order::units(K) * order::UNIT) - k) / SLICE;
    }

#if defined(WEIGHT_GGUF)
   private:
    // Sets `column` and `limit` for group `group` of COLUMNS columns. Groups are counted from the first column of each
    // range with one GGUF type, so all columns of a group have the same type.
    template <int RANGE = 0>
    __device__ __forceinline__ void place(int group, int N) {
        typedef gguf::OfRange<RANGE> OfRange;
        constexpr int ROWS = DECODE_ROPE ? 2 : 1, FROM = OfRange::FROM / ROWS, NEXT = OfRange::NEXT / ROWS;
        if constexpr (!OfRange::LAST) {
            constexpr int GROUPS = (NEXT - FROM + COLUMNS - 1) / COLUMNS;
            if (group >= GROUPS) return place<RANGE + 1>(group - GROUPS, N);
        }
        column = FROM + group * COLUMNS, limit = OfRange::LAST ? N : NEXT;
    }
#endif
};

#if defined(WEIGHT_GGUF)
#include "lib/decode/wgmma_gguf.cuh"
#else
// The weights of a product: tensor maps of W and, with DECODE_GATED, of the second matrix U.
struct Sources {
    const TensorMap& w;
    const TensorMap& up;
};

// Requests all slices of W and x that the block multiplies; called by one warp.
__device__ __forceinline__ void produce(const Ring& ring, const Share& share, const Sources& from, const float* x, int,
                                        int K) {
    const int of_rows = 2 * OPERAND_TERMS * share.rows;  // bytes of all rows of x per value of K
    const auto load_w = [&](int slice, int stage) {
        char* to = ring.stage(stage);
        const auto load = [&](const TensorMap& map, int at, int row) {
            load_box(to + at, map, ring.full[stage], share.k + slice * SLICE, row, 0);
        };
        arrive_and_expect(ring.full[stage], W_BYTES + SLICE * of_rows);
        if (!DECODE_ROPE) load(from.w, 0, share.column);
        if (DECODE_GATED) load(from.up, W_BYTES / 2, share.column);
#pragma unroll
        for (int box = 0; DECODE_ROPE && box < DECODE_GROUPS; ++box) {
            const int row = first_row(share.column + ROPE_BOX * box), at = 128 * ROPE_BOX * box;
            load(from.w, at, row), load(from.w, W_BYTES / 2 + at, row + HALF_HEAD);
        }
    };
    const long long first = (long long)share.row * K + (long long)share.k * share.rows;  // index of first value in x
    const char* of_tile = reinterpret_cast<const char*>(x) + 2 * OPERAND_TERMS * first;
    // The last box of x. If K ends in the middle of a unit, TMA fills the rest of W with zeros, and this
    // box is loaded again: for finite x, its products with the zeros are 0.
    const int last = (K - share.k) / BOX - 1;
    const auto load_x = [&](int slice, int stage) {
        const int box = BOX * of_rows, own = box / DECODE_SHARES, at = share.part * own;
        const unsigned short all = ((1 << DECODE_SHARES) - 1) << share.rank * DECODE_SHARES;
        char* to = ring.stage(stage) + W_BYTES + at;
#pragma unroll
        for (int i = 0; i < SLICE / BOX; ++i) {
            const char* of_x = of_tile + (long long)min(slice * (SLICE / BOX) + i, last) * box + at;
            if (DECODE_SHARES > 1) load_bytes_for(all, to + i * BOX_BYTES, of_x, own, ring.full[stage]);
            else load_bytes(to + i * BOX_BYTES, of_x, own, ring.full[stage]);
        }
    };
    const bool one = threadIdx.x % 32 == 0;
    const int early = min(DECODE_STAGES, share.slices);
    for (int i = 0; one && i < early; ++i) load_w(i, i);
    __syncwarp();
    if (CLUSTER > 1) wait_for_cluster();  // the barriers of the other blocks are initialised
    if (!one) return;
    wait_before_copies();
    for (int i = 0; i < early; ++i) load_x(i, i);
    int stage = 0;
    unsigned phase = 0;
    const auto next = [&] {
        if (++stage == DECODE_STAGES) stage = 0, phase ^= 1;
    };
    for (int slice = early; slice < share.slices; ++slice, next()) {
        wait(ring.empty[stage], phase, "empty");
        load_w(slice, stage), load_x(slice, stage);
    }
    // Other blocks arrive at this block's `empty` barriers, so the block must not exit before their last arrivals.
    for (int i = 0; DECODE_SHARES > 1 && i < early; ++i, next()) wait(ring.empty[stage], phase, "empty at the end");
}

// A piece is 64 values along K: a slice with 16-bit weights, half a slice with FP8. Piece holds a lane's values of W,
// as operand A, and the descriptor of x in shared memory.
constexpr int PIECE_STEPS = 4, PIECES = CHUNKS * order::STEPS / PIECE_STEPS;

struct Piece {
    unsigned w[PIECE_STEPS][4];
    Matrix x;
};

// Returns the row of W, among the rows of this warp, that lane 4 g + t has as row g of A. The lane's row g + 8 of A is
// the next row of W; with DECODE_GATED, the same row of U; with RoPE, the row of W half a head later. Eight lanes load
// at a time, from rows that are 4 apart, so that their swizzled units are in different banks.
//
//   row g of A            0 1 2 3 4  5  6  7
//   row of W with TWO     0 4 1 5 2  6  3  7     its row g + 8 of A: a row of U, or of the other half of the head
//   row of W otherwise    0 4 2 6 8 12 10 14     its row g + 8 of A: the next row of W
__device__ __forceinline__ int own_row() {
    const int lane = threadIdx.x % 32, pair = lane / 8;
    return TWO ? lane % 8 / 4 * 4 + pair : pair % 2 * 2 + lane % 8 / 4 * 4 + pair / 2 * 8;
}
constexpr int NEXT_ROW = 8;  // with TWO: distance of the lanes that hold rows 2 i and 2 i + 1 of W

// A consumer warp's position in the ring, and the offsets of its rows of W in a stage. Each unit of 128 values of K is
// a pair of pieces: HALF is 0 for the first piece and 1 for the second piece.
struct Consumer {
    const Ring& ring;
    const int rank;
    int stage = 0;  // index of the next stage
    unsigned phase = 0;
    int own[2];  // offsets in a stage: the lane's first 16 bytes of rows g and g + 8 of A

    __device__ __forceinline__ Consumer(const Ring& ring, const Share& share) : ring(ring), rank(share.rank) {
        const int of_warp = (TWO ? 1024 : 2048) * own_warp();
        const int first = 128 * own_row() + threadIdx.x % 4 * 16;
        own[0] = of_warp + swizzled(first);
        own[1] = TWO ? own[0] + W_BYTES / 2 : of_warp + swizzled(first + 128);
    }

    template <int HALF>
    __device__ __forceinline__ Piece load() {
        if (HALF == 0 || PIECES == 1) wait<(DECODE_SHARES > 1)>(ring.full[stage], phase, "full");
        const char* w = ring.stage(stage);
        constexpr int EACH = CHUNKS / PIECES, FIRST = PIECES > 1 ? HALF * EACH : 0;  // chunks per piece, first chunk
        Piece piece;
#pragma unroll
        for (int chunk = 0; chunk < EACH; ++chunk) {
            const auto vector = [&](int row) {
                return *reinterpret_cast<const uint4*>(w + (own[row] ^ 64 * (FIRST + chunk)));
            };
            const order::Columns columns(vector(0), vector(1));
#pragma unroll
            for (int s = 0; s < order::STEPS; ++s) {
#pragma unroll
                for (int i = 0; i < 4; ++i) piece.w[chunk * order::STEPS + s][i] = columns.value[s][i];
            }
        }
        piece.x = matrix_at(w + W_BYTES + (PIECES > 1 ? HALF * BOX_BYTES : 0) + own_set() * TERMS * 128);
        if ((HALF == 1 || PIECES == 1) && ++stage == DECODE_STAGES) stage = 0, phase ^= 1;
        return piece;
    }

    // Starts the products of a piece. adds: whether the products are added to `sums`; otherwise they replace `sums`.
    __device__ __forceinline__ void start(float (&sums)[TERMS / 2], const Piece& piece, bool adds) const {
        fence_sums();
#pragma unroll
        for (int s = 0; s < PIECE_STEPS; ++s) multiply(sums, piece.w[s], further(piece.x, 32 * s), s > 0 || adds);
        end_products();
    }

    // Marks the stage of a piece (64 values along K) as empty once the stage's products are complete. LATER: whether
    // the next piece is already loaded.
    template <int HALF, bool LATER = true>
    __device__ __forceinline__ void release() {
        if (HALF == 0 && PIECES > 1) return;
        const int lane = threadIdx.x % 32;
        int freed = stage - (LATER && PIECES == 1 ? 2 : 1);
        if (freed < 0) freed += DECODE_STAGES;
        __syncwarp();
        if (DECODE_SHARES > 1 && lane < DECODE_SHARES) arrive_at(ring.empty[freed], rank * DECODE_SHARES + lane);
        if (DECODE_SHARES == 1 && lane == 0) arrive(ring.empty[freed]);
    }

    // Computes the sums of a split (range of K) that has `pairs` units, each of two pieces of 64 values. While one
    // piece is multiplied, the next piece is loaded into registers.
    __device__ __forceinline__ void multiply_split(float (&sums)[TERMS / 2], int, int pairs, int) {
        Piece a = load<0>(), b;
        start(sums, a, false);
#pragma unroll 1
        for (int i = 1; i < pairs; ++i) {
            b = load<1>();
            start(sums, b, true);
            wait_for_products<1>();
            release<0>();
            a = load<0>();
            start(sums, a, true);
            wait_for_products<1>();
            release<1>();
        }
        b = load<1>();
        start(sums, b, true);
        wait_for_products<1>();
        release<0>();
        wait_for_products<0>();
        release<1, false>();
        pin(sums);
    }
};
#endif
