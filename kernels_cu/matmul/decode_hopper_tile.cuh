// A tile of the products of decoding by wgmma: the sums of its splits, from one block or from a cluster, and the call
// of an epilogue (matmul/decode_pairs.cuh) with each output. The including file selects T and W (lib/storage.cuh).
#pragma once
#include "lib/storage.cuh"
#include "lib/gate.cuh"
#include "lib/sm80.cuh"
#include "matmul/decode_hopper.cuh"
#include "matmul/decode_pairs.cuh"

#ifndef DH_OUT_TERMS  // whether out has terms, for another of these products
#define DH_OUT_TERMS 0
#endif

constexpr int OWN = (WARPS * TILES + DH_SPLITS - 1) / DH_SPLITS;  // tiles that a block finishes
constexpr int OF_WARP = (TILES + DH_SPLITS - 1) / DH_SPLITS;      // and a warp of it, at most
constexpr int AHEAD = OF_WARP < 4 ? OF_WARP : 4;                  // at a time
constexpr int ROW_SETS = DH_ROWS > 32 ? 2 : 1;                    // of 32 rows
// With TERM_COUNT 1, columns of B are rows, and a lane has sums of rows 2t and 2t + 1 of each eight. It writes them to
// the places of two lanes, 16 bytes, unless these are in tiles for different blocks.
constexpr bool IN_PAIRS = TERM_COUNT == 1 && (DH_SPLITS == 1 || TILES == 1);
constexpr int FOUND = IN_PAIRS ? TERMS / 2 : 2 * TILES;  // sums of a lane, in the order in which it writes them
// Blocks of GGUF: whether a block has one half of the splits, or both, and keeps sums of halves in shared memory.
constexpr bool IN_HALVES = order::BLOCKS && DH_SPLITS <= 2;
constexpr bool OF_HALVES = IN_HALVES && DH_SPLITS == 2;  // whether those are exchanged, instead of sums of splits

// Sums of a tile that a block receives. Its own one of a half stays where it was added up.
__device__ __forceinline__ int messages(int splits) { return OF_HALVES ? 1 : splits; }

static_assert(order::BLOCKS || DH_SPLITS > 1 || TILES <= 8 * DH_STAGES, "W of a warp has room for its sums");
static_assert(WARPS * TILES >= DH_SPLITS, "every block finishes a tile");

// The sums of a lane's two rows of A, for all tiles of 4 rows of its warp. Those of the splits of a cluster's blocks
// are exchanged: (messages, OWN, 32) pairs in shared memory. Tile i is for block i % DH_SPLITS, which adds them. Those
// of a block alone are kept where the warp's rows of W were, once it has multiplied all of them. Of blocks of GGUF, one
// or two blocks keep the sums of a half of the splits while they add it up: they have no registers for that. What two
// blocks then exchange is what the other one finishes.
struct Totals {
    const Ring& ring;
    float2* pairs;
    Barrier& arrived;
    int part, warp;
    float2* halves;  // with IN_HALVES

    static constexpr int HALF = TWO ? 1024 : 2048, BYTES = 32 * sizeof(float2);  // of the warp in W, and of a tile
    static constexpr int IN_STAGE = 2048 / BYTES;                                // tiles

    __device__ __forceinline__ float2* kept(int tile, int lane) const {
        if (IN_HALVES) return halves + (warp * (TERMS / 4) + tile) * 32 + lane;
        const int at = tile % IN_STAGE * BYTES;
        char* const of_warp = ring.stage(tile / IN_STAGE) + HALF * warp;
        return reinterpret_cast<float2*>(of_warp + (at < HALF ? at : W_BYTES / 2 + at - HALF)) + lane;
    }

    // Keeps the sums of all splits.
    __device__ __forceinline__ void keep(const float (&found)[FOUND]) const {
        const int lane = threadIdx.x % 32, t = lane % 4;
        if constexpr (IN_PAIRS) {
#pragma unroll
            for (int i = 0; i < FOUND; i += 4) {
                const int tile = i / 2 + t / 2;
                const float4 two = {found[i], found[i + 1], found[i + 2], found[i + 3]};
                if (tile < TILES) *reinterpret_cast<float4*>(kept(tile, lane - t + t % 2 * 2)) = two;
            }
            __syncwarp();
        } else {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) *kept(tile, lane) = {found[2 * tile], found[2 * tile + 1]};
        }
    }

    // With IN_HALVES: a lane's own place for four sums of a half.
    __device__ __forceinline__ float4& of_half(int half, int i) const {
        return reinterpret_cast<float4*>(halves)[((half * WARPS + warp) * (TERMS / 8) + i / 4) * 32 + threadIdx.x % 32];
    }

    // Adds the sums of a split to those of its half. first: of the half.
    __device__ __forceinline__ void add(const float (&sums)[TERMS / 2], int half, bool first) const {
#pragma unroll
        for (int i = 0; i < TERMS / 2; i += 4) {
            float4 v = first ? float4{} : of_half(half, i);
            v.x += sums[i], v.y += sums[i + 1], v.z += sums[i + 2], v.w += sums[i + 3];
            of_half(half, i) = v;
        }
    }

    // The sums of the halves that the block has, whose places can be used again.
    __device__ __forceinline__ void get_halves(float (&sums)[TERMS / 2], int count) const {
#pragma unroll
        for (int i = 0; i < TERMS / 2; i += 4) {
            float4 v = of_half(0, i);
            if (count > 1) {
                const float4 more = of_half(1, i);
                v.x += more.x, v.y += more.y, v.z += more.z, v.w += more.w;
            }
            sums[i] = v.x, sums[i + 1] = v.y, sums[i + 2] = v.z, sums[i + 3] = v.w;
        }
        __syncwarp();
    }

    // Sends those of a split, or of a half of them.
    __device__ __forceinline__ void send(int split, const float (&found)[FOUND]) const {
        const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const int i = warp * TILES + tile, rank = i % DH_SPLITS, block = rank * DH_SHARES + part;
            if (OF_HALVES && rank == split) continue;  // kept
            float2* to = pairs + ((OF_HALVES ? 0 : split) * OWN + i / DH_SPLITS) * 32 + lane;
            if constexpr (!IN_PAIRS) store_at(block, to, arrived, found[2 * tile], found[2 * tile + 1]);
            else if (t < 2) store_at(block, to + t, arrived, found[0], found[1], found[2], found[3]);
        }
    }

    // Those of tiles first, first + DH_SPLITS, ...
    __device__ __forceinline__ void get(float2 (&totals)[AHEAD], int first, int splits) const {
        const int own = (warp * TILES + first) / DH_SPLITS, lane = threadIdx.x % 32;
        if (DH_SPLITS == 1 || OF_HALVES) {
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                totals[i] = *kept(first + i * DH_SPLITS, lane);
                if (!OF_HALVES) continue;
                const float2 more = pairs[(own + i) * 32 + lane];
                totals[i].x += more.x, totals[i].y += more.y;
            }
            return;
        }
        constexpr int AT_ONCE = order::HALF_SPLITS;  // messages that are added to each other first
        const int count = messages(splits);
#pragma unroll 1
        for (int message = 0; message < count;) {
            float2 sums[AHEAD];
            const int begin = message, end = min(begin + AT_ONCE, count);
#pragma unroll 1
            for (; message < end; ++message) {
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) {
                    const float2 more = pairs[(message * OWN + min(own + i, OWN - 1)) * 32 + lane];
                    sums[i].x = message > begin ? sums[i].x + more.x : more.x;
                    sums[i].y = message > begin ? sums[i].y + more.y : more.y;
                }
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                totals[i].x = begin ? totals[i].x + sums[i].x : sums[i].x;
                totals[i].y = begin ? totals[i].y + sums[i].y : sums[i].y;
            }
        }
    }
};

// Of two values, the second one of a lane and the first one of the lane DISTANCE further change places.
template <int DISTANCE>
__device__ __forceinline__ void swap(float& first, float& second) {
    const bool further = threadIdx.x & DISTANCE;
    const float received = __shfl_xor_sync(0xffffffffu, further ? first : second, DISTANCE);
    (further ? first : second) = received;
}

// A lane's sums of rows g and g + 8 of A: of row t of x of each tile of 4 or, IN_PAIRS, of two neighbouring rows. With
// TERM_COUNT 1 and tiles for different blocks, lanes exchange them: were one to send what it has, 8 bytes of a lane to
// one of two blocks would be 32 messages for a warp, and qkv of GPT-2 small take 12.3 us with 64 rows, not 5.4.
__device__ __forceinline__ void by_tile(const float (&sums)[TERMS / 2], float (&found)[FOUND]) {
    if constexpr (TERM_COUNT == 2) {
#pragma unroll
        for (int i = 0; i < FOUND; ++i) found[i] = sums[2 * i] + sums[2 * i + 1];
    } else if constexpr (IN_PAIRS) {
#pragma unroll
        for (int i = 0; i < FOUND; ++i) found[i] = sums[i / 4 * 4 + i % 2 * 2 + i % 4 / 2];
    } else {
#pragma unroll
        for (int i = 0; i < TILES; ++i) {  // of rows g of two tiles, then of rows g + 8
            float first = sums[2 * i], second = sums[2 * i + 1];
            swap<1>(first, second);
            swap<2>(first, second);
            found[i / 2 * 4 + i % 2] = first, found[i / 2 * 4 + 2 + i % 2] = second;
        }
    }
}

// Of the rows of W; `up`: of those that are second in an output, which have no bias where they are of U.
struct Scales {
    const float* w;
    const float* up;
    const float* bias;
};

// What a lane's sums are finished with, loaded before the previous kernel has ended: scale and bias of row g, then of
// row g + 8 of A. Four lanes share them; they are in shared memory while the registers are needed for products.
__device__ __forceinline__ void load_constants(float4* of_warp, int n, int N, const Scales& scales) {
    const int row = first_row(n);
    const float* const second_scale = TWO ? scales.up : scales.w ? scales.w + 1 : nullptr;
    const bool first = n < N, second = TWO ? first : n + 1 < N, has_bias = scales.bias && (DH_ROPE || !TWO);
    float4 found = {1.0f, 0.0f, 1.0f, 0.0f};
    if (first && scales.w) found.x = constant(scales.w + row);
    if (first && scales.bias) found.y = constant(scales.bias + row);
    if (second && second_scale) found.z = constant(second_scale + row);
    if (second && has_bias) found.w = constant(scales.bias + row + (TWO ? HALF_HEAD : 1));
    if (threadIdx.x % 4 == 0) of_warp[threadIdx.x % 32 / 4] = found;
    __syncwarp();
}

// The output of a lane's two rows of A, or the first one of its two outputs.
struct Outputs {
    int n;
    float4 by;  // scales and biases

    // Stores those of some rows, from m on and 4 DH_SPLITS apart, where they are `here`; all lanes of a warp call this.
    template <typename End, typename Late>
    __device__ __forceinline__ void store(const End& end, int m, const bool (&here)[AHEAD],
                                          const float2 (&total)[AHEAD], const Late (&late)[AHEAD]) const {
        float v[2 * AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            v[2 * i] = fmaf(total[i].x, by.x, by.y);
            v[2 * i + 1] = DH_GATED ? total[i].y * by.z : fmaf(total[i].y, by.z, by.w);
        }
        if constexpr (!TWO) end.activate(v);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i, m += 4 * DH_SPLITS) {
            const float first = v[2 * i], second = v[2 * i + 1];
            if constexpr (DH_GATED) {
                float one = end.added(gate_of(first) * second, late[i]);
                if (DH_OUT_TERMS) one = term_of<order::KIND, NEXT_ROW>(one);
                if (here[i]) end.store(m, n, one, late[i]);
            } else if (here[i]) {
                if constexpr (DH_ROPE) end.store_pair(m, n, first, second, late[i]);
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

// The first row and column of a block. They are in shared memory while the registers are needed for products.
struct Corner {
    int row, column;

    __device__ __forceinline__ int rows(int M) const { return min((int)TERM_ROWS, M - row); }
    __device__ __forceinline__ int own_column() const {
        return column + (TWO ? 8 : 16) * ((int)threadIdx.x / 32) + own_row();
    }
};

// What the epilogue needs of the rows of a tile, a row for each lane, where it is the same for all columns.
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

    // row: in the tile. All lanes of a warp call this.
    __device__ __forceinline__ typename End::Late late(const End&, int, int, int row, bool) const {
        return __shfl_sync(0xffffffffu, row < 32 ? of_lane[0] : of_lane[ROW_SETS - 1], row % 32);
    }
};

template <typename End>
__device__ __forceinline__ void consume(const Ring& ring, const Share& share, const Corner& corner, const Totals& all,
                                        const Scales& scales, const End& end, int M, int N, int K) {
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4, splits = order::splits(K);
    const int each = order::split_length(K) / SLICE;
    __shared__ float4 constants[8 * WARPS];
    load_constants(constants + 8 * warp, corner.own_column(), N, scales);
    [[maybe_unused]] float totals[FOUND] = {};
    Consumer consumer(ring, share);
    if (CLUSTER > 1) wait_for_cluster();  // the other blocks run, so that their barriers can be arrived at
    wait_for_previous();
    Rows<End> rows;
    if (DH_GROUPS == 1) rows.load(end, corner, M);  // else there are no registers to hold it in
    int split = share.first;
#pragma unroll 1
    for (int left = share.slices; left > 0; left -= each, ++split) {
        float sums[TERMS / 2];
        const int units = min(each, left) * SLICE / order::UNIT;
        consumer.multiply_split(sums, split * order::split_units(K), units, first_row(share.column));
        if constexpr (IN_HALVES) {
            all.add(sums, DH_SPLITS > 1 ? 0 : split / order::HALF_SPLITS, split % order::HALF_SPLITS == 0);
            continue;
        }
        float found[FOUND];
        by_tile(sums, found);
        if constexpr (DH_SPLITS > 1) {
            all.send(split, found);
        } else {
#pragma unroll
            for (int i = 0; i < FOUND; ++i) totals[i] += found[i];
        }
    }
    if constexpr (DH_SPLITS == 1 && !IN_HALVES) all.keep(totals);
    if constexpr (IN_HALVES) {
        float sums[TERMS / 2];
        all.get_halves(sums, DH_SPLITS > 1 || splits <= order::HALF_SPLITS ? 1 : 2);
        by_tile(sums, totals);
        all.keep(totals);
        if constexpr (OF_HALVES) all.send(share.rank, totals);
    }

    if (DH_GROUPS > 1) rows.load(end, corner, M);
    const int top = corner.row, count = corner.rows(M), n = corner.own_column();
    const Outputs outputs{n, constants[8 * warp + threadIdx.x % 32 / 4]};
    // One loop over tiles: a block runs each of its instructions several times, which it has to fetch.
    const int begin = DH_SPLITS > 1 ? (share.rank + DH_SPLITS - warp * TILES % DH_SPLITS) % DH_SPLITS : 0;
#pragma unroll 1
    for (int first = begin; first < TILES; first += AHEAD * DH_SPLITS) {
        decltype(rows.late(end, 0, 0, 0, true)) late[AHEAD];
        bool here[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int row = (first + i * DH_SPLITS) * 4 + t;
            here[i] = row < count && n < N;
            late[i] = rows.late(end, top + row, n, row % DH_ROWS, here[i]);
        }
        if (DH_SPLITS > 1 && first == begin) wait<true>(all.arrived, 0, "sums");
        float2 total[AHEAD];
        all.get(total, first, splits);
        outputs.store(end, top + first * 4 + t, here, total, late);
    }
}

template <typename End>
__device__ __forceinline__ void run(const float* x, const Sources& from, const Scales& scales, const End& end, int M,
                                    int N, int K) {
    extern __shared__ char unaligned[];
    __shared__ Barrier full[DH_STAGES], empty[DH_STAGES], arrived;
    char* const stages = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
#if defined(WEIGHT_GGUF)
    __shared__ Barrier tile_full[DH_TILES], tile_empty[DH_TILES];
    const Ring ring{stages, full, empty, stages + DH_STAGES * STAGE, tile_full, tile_empty};
    char* const after = ring.tile(DH_TILES);
#else
    const Ring ring{stages, full, empty};
    char* const after = stages + DH_STAGES * STAGE;
#endif
    const Share share(M, N, K);
    float2* const pairs = reinterpret_cast<float2*>(after);
    float2* const halves = pairs + (OF_HALVES ? OWN * 32 : 0);
    const Totals totals{ring, pairs, arrived, share.part, (int)threadIdx.x / 32, halves};
    __shared__ Corner corner;
    if (threadIdx.x == 32 * WARPS) {
        corner = {share.row, share.column};
#if defined(WEIGHT_GGUF)
        for (int i = 0; i < DH_TILES; ++i) init(tile_full[i], 1), init(tile_empty[i], 32 * WARPS);
#else
        prefetch(from.w);
#endif
        constexpr int EACH = order::BLOCKS ? 32 : 1;  // arrivals of a warp
        for (int i = 0; i < DH_STAGES; ++i) init(full[i], 1), init(empty[i], EACH * DH_SHARES * WARPS);
        init(arrived, 1);
        fence_inits();
        const int tiles = (WARPS * TILES - share.rank + DH_SPLITS - 1) / DH_SPLITS;
        if (DH_SPLITS > 1) arrive_and_expect(arrived, tiles * messages(order::splits(K)) * 32 * (int)sizeof(float2));
    }
    __syncthreads();
    let_next_start();
    if (CLUSTER > 1) arrive_in_cluster();
    if (threadIdx.x >= 32 * WARPS) {
        if constexpr (MOVES_REGISTERS) give_registers<FEW_REGISTERS>();
        if (threadIdx.x / 32 == WARPS) produce(ring, share, from, x, share.limit, K);
        return;
    }
    if constexpr (MOVES_REGISTERS) take_registers<MANY_REGISTERS>();
    consume(ring, share, corner, totals, scales, end, M, share.limit, K);
}
