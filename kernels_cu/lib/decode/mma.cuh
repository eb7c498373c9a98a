// The constants of matmul/decode/mma.cu, and loads of rows of x into shared memory, where each value is stored as the
// sum of two terms (lib/operands.cuh).
#pragma once
#include "lib/chunk_sums.cuh"
#include "lib/common.cuh"
#include "lib/fresh.cuh"
#include "lib/layernorm.cuh"
#include "lib/decode/experts.cuh"
#include "lib/decode/order.cuh"
#include "lib/split_sums.cuh"

#ifndef DECODE_K
#define DECODE_K 768
#endif
#ifndef DECODE_NORM  // norm of x: 0: none, 1: LayerNorm, 2: RMSNorm with the bits of norms/rmsnorm_stream.cu
#define DECODE_NORM 1
#endif
#ifndef DECODE_SUMS  // number of split sums (sums over ranges of K) to add to x, or without DECODE_NORM to the residual
#define DECODE_SUMS 0
#endif
#ifndef DECODE_QK_NORM  // 1: heads of q and k are normalised, and DECODE_CLUSTER blocks compute one head
#define DECODE_QK_NORM 0
#endif
#ifndef DECODE_ROWS  // rows of x per block: a power of two, up to 16
#define DECODE_ROWS 1
#endif
#ifndef DECODE_COLUMNS  // output columns per block; with DECODE_LOOP per warp
#define DECODE_COLUMNS 18
#endif
#ifndef DECODE_FLIGHT  // units of 128 values of K whose loads are in flight per lane
#define DECODE_FLIGHT 1
#endif
#ifndef DECODE_LOOP
#define DECODE_LOOP 0
#endif
#ifndef DECODE_WARPS  // warps per block, with DECODE_LOOP or DECODE_ALONE; otherwise one warp per split (range of K)
#define DECODE_WARPS 8
#endif
#ifndef DECODE_BLOCKS  // minimum blocks per SM (__launch_bounds__)
#define DECODE_BLOCKS 1
#endif
#ifndef DECODE_ALONE  // 1: shared memory holds x for only one split (range of K) at a time
#define DECODE_ALONE 0
#endif

constexpr int SPLITS = order::splits(DECODE_K), UNITS = order::split_units(DECODE_K);  // UNITS: units per split
constexpr int LENGTH = order::split_length(DECODE_K);                          // values of K per split
constexpr int WARPS = DECODE_LOOP || DECODE_ALONE ? DECODE_WARPS : SPLITS, THREADS = 32 * WARPS;
constexpr int UNIT_CHUNKS = order::UNIT / order::CHUNK;
constexpr int ROW_GROUPS = (DECODE_COLUMNS + 7) / 8, TILES = (ROW_GROUPS + order::TILE_GROUPS - 1) / order::TILE_GROUPS;
constexpr int VECTORS = TILES * order::TILE_VECTORS;  // 16-byte vectors of w that a lane loads per chunk
constexpr int HALF = (DECODE_COLUMNS + 1) / 2;  // with DECODE_ROPE, columns HALF and later are second channels of pairs
constexpr int ROW_TILES = (DECODE_ROWS + order::TILE_ROWS - 1) / order::TILE_ROWS;
// Bytes of shared memory per row of x and split (range of K): TERM for the high or the low terms, TERMS_BYTES for all
// terms. PADDING puts neighbouring rows, and the high and low terms of a row, into different banks. A lane reads 16
// bytes at a time, or 32 with FP8.
constexpr int PADDING = order::WIDTH == 16 ? 16 : 64, TERM = 2 * LENGTH + PADDING;
constexpr int TERMS_BYTES = order::FLOATS || (DECODE_NORM == 1 && order::TERMS == 1) ? 4 * LENGTH : order::TERMS * TERM;
constexpr int CHUNK_SUMS = order::BLOCKS ? 16 * UNITS : 0;  // bytes of chunk sums per split and term (GGUF weights)
constexpr int SPLIT_BYTES = TERMS_BYTES + order::TERMS * CHUNK_SUMS;
constexpr int KEPT = DECODE_ALONE ? 1 : SPLITS;  // splits of x that shared memory holds at a time
constexpr int PITCH = (KEPT * SPLIT_BYTES + 127) / 128 * 128 + PADDING;
constexpr int LOADS = (DECODE_K + 127) / 128;   // loads of 4 values per lane if a warp loads a whole row
constexpr bool IN_REGISTERS = DECODE_K <= 2048;  // whether a warp keeps a whole row in registers
// Number of rows that a warp loads at once, so that their latencies overlap: MEASURED rows to compute LayerNorm
// statistics, BROUGHT rows to store terms.
constexpr int MAX_MEASURED = order::FLOATS || DECODE_ROWS <= 2 * WARPS ? 2 : 3;
constexpr int MEASURED = IN_REGISTERS && LOADS <= 8 && DECODE_ROWS > WARPS ? MAX_MEASURED : 1;
constexpr int IN_FLIGHT = (order::TILE_GROUPS == 1 ? 12 : 24) / UNITS;
constexpr int BROUGHT = IN_FLIGHT < 1 ? 1 : IN_FLIGHT < DECODE_ROWS ? IN_FLIGHT : DECODE_ROWS;
constexpr bool EARLY = !DECODE_LOOP && (UNITS <= 2 || DECODE_NORM == 2);  // gamma, beta are loaded before the wait
typedef Vec<float, 4> Four;
static_assert(!DECODE_OPERAND || !(DECODE_NORM || order::FLOATS), "terms have 16 bits, and x has no LayerNorm");
static_assert(DECODE_K * sizeof(W) % 16 == 0, "the rows of w are aligned to 16 bytes");
static_assert(DECODE_NORM != 2 || (!DECODE_LOOP && (UNITS == 1 || DECODE_K == 8 * LENGTH)), "as rmsnorm_stream");
static_assert(!DECODE_ROPE || (!DECODE_LOOP && DECODE_COLUMNS % 2 == 0), "a block has pairs");
static_assert(!DECODE_QK_NORM || DECODE_ROPE == DECODE_COLUMNS * DECODE_CLUSTER, "a cluster has one head");
static_assert(!DECODE_QK_NORM || ((HALF & (HALF - 1)) == 0 && DECODE_CLUSTER <= 8), "a block has 8, 16 or 32 columns");
static_assert(!DECODE_SUMS || DECODE_NORM != 1, "x of a LayerNorm is complete");

__device__ __forceinline__ unsigned bits(float v) { return (unsigned)__float_as_int(v); }

// The terms of one row of x in a split of COUNT units (128 values of K each), for GGUF weights. In each chunk of 32
// values, the pairs of values that lane 4 g + t reads, at 2 t, 2 t + 8, 2 t + 16 and 2 t + 24, are neighbours in
// memory. sums: the chunk sums.
//
//   word in memory   0    1    2      3      4    5      6      7      8    ...   15
//   values           0,1  8,9  16,17  24,25  2,3  10,11  18,19  26,27  4,5  ...   30,31
//   lane             t = 0                   t = 1                     t = 2
template <int COUNT>
struct BlockOperand {
    char *values, *sums;

    // Stores the high terms (`term` 0) or low terms (1) of a unit, four values per lane.
    __device__ __forceinline__ void put(uint2 four, int unit, int term) const {
        constexpr int TERM_BYTES = 2 * COUNT * order::UNIT + PADDING;
        const int lane = threadIdx.x % 32, chunk = lane / 8, t = lane % 2 * 2, of_lane = lane % 8 / 2;
        char* to = values + term * TERM_BYTES + 2 * (unit * order::UNIT + chunk * order::CHUNK) + 16 * t;
        *reinterpret_cast<unsigned*>(to + 4 * of_lane) = four.x;
        *reinterpret_cast<unsigned*>(to + 16 + 4 * of_lane) = four.y;
    }

    // Stores the terms of a unit and the sum of each chunk, which is distributed over eight lanes.
    __device__ __forceinline__ void store(uint2 four, int unit, int term) const {
        const int lane = threadIdx.x % 32;
        put(four, unit, term);
        const float sum = lanes_sum<8>(sum_of(four.x) + sum_of(four.y));
        if (lane % 8 == 0) *chunk_sum(unit, term, lane / 8) = split_sum(sum);
    }

    // Returns the place of the sum of a chunk: sums (TERMS, COUNT, 4), one word for each chunk of 32 values.
    __device__ __forceinline__ unsigned* chunk_sum(int unit, int term, int chunk) const {
        return reinterpret_cast<unsigned*>(sums + term * 16 * COUNT + unit * 16) + chunk;
    }

    // Returns the sum, in the format of split_sum(), of the terms in chunk t of unit `unit` that lane 4 g + t
    // multiplies: high terms if g is even or x has one term, otherwise low terms.
    __device__ __forceinline__ unsigned own_sum(int unit) const {
        return *chunk_sum(unit, threadIdx.x % 32 / 4 % order::TERMS, threadIdx.x % 4);
    }
};

// Splits four values into their high terms and their low terms, two pairs each. inverse: 1 / scale, for hi/lo terms.
__device__ __forceinline__ void split_four(const float (&v)[4], float inverse, uint2& high, uint2& low) {
    split_pair<order::KIND>(v[0], v[1], inverse, high.x, low.x);
    split_pair<order::KIND>(v[2], v[3], inverse, high.y, low.y);
}

// A block's rows of x (M, K), normalised with DECODE_NORM. A row has PITCH bytes of shared memory, SPLIT_BYTES for each
// split (range of K). With DECODE_NORM the SPLIT_BYTES first hold the values as floats. Finally they hold all high
// terms of the split, followed by the low terms, or with float weights the values as floats.
struct Input {
    const float* x;
    const float* gamma;
    const float* beta;
    float eps;
    int M, first;
    char* shared;            // DECODE_ROWS rows, then the norm's statistics of each row
    float inverse;           // 1 / scale of x, with hi/lo weights
    const float* sums;       // (DECODE_SUMS, M, K): split sums to add to x for RMSNorm
    const float* sum_scale;  // (K) or null: scales of `sums`
    Four early[2][EARLY ? UNITS : 1];

    // Bytes of shared memory: the rows, then for each row the mean and rstd (LayerNorm), or one sum of squares per
    // split of K (RMSNorm), as floats.
    static constexpr int BYTES = DECODE_ROWS * (PITCH + (DECODE_NORM == 2 ? 4 * SPLITS : DECODE_NORM ? 8 : 0));

    // Returns row r of the block in x; the last row of x in place of rows after it.
    __device__ __forceinline__ const float* row(int r) const { return x + x_row(min(first + r, M - 1)) * DECODE_K; }
    // Returns the place in shared memory of row r's values or terms in a split.
    __device__ __forceinline__ char* values(int r, int split) const {
        return shared + r * PITCH + (DECODE_ALONE ? 0 : split) * SPLIT_BYTES;
    }
    // Returns the place of values k to k + 3 of row r, while shared memory holds floats.
    __device__ __forceinline__ float4* floats(int r, int k) const {
        return reinterpret_cast<float4*>(values(r, k / LENGTH)) + k % LENGTH / 4;
    }
    // Returns the place of the mean and rstd of row r (LayerNorm).
    __device__ __forceinline__ float2* statistics(int r) const {
        return reinterpret_cast<float2*>(shared + DECODE_ROWS * PITCH) + r;
    }

    // A lane loads four values of a unit (128 values of K). Returns the position in the row of the first of the four,
    // for a unit of split `split`.
    __device__ __forceinline__ static int at(int split, int unit) {
        return split * LENGTH + unit * order::UNIT + threadIdx.x % 32 * 4;
    }

    // Returns the position in the row of load `load` of a thread for RMSNorm. A warp loads a whole unit.
    __device__ __forceinline__ static int of_load(int load) { return 4 * (load * THREADS + (int)threadIdx.x); }

    // Loads gamma and beta. This may precede the wait for the previous kernel, because no kernel writes them.
    __device__ __forceinline__ void prefetch() {
        if constexpr (DECODE_NORM && EARLY) {
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) {
                const int k = min(DECODE_NORM == 2 ? of_load(unit) : at(threadIdx.x / 32, unit), DECODE_K - 4);
                early[0][unit] = Four::load(gamma + k);
                if (DECODE_NORM == 1) early[1][unit] = Four::load(beta + k);
            }
        }
    }

    // Loads the block's rows of x into shared memory. Each warp loads the splits (ranges of K) that it multiplies. With
    // DECODE_LOOP each warp multiplies all splits, so the caller must then use a barrier.
    __device__ __forceinline__ void bring() {
        const int warp = threadIdx.x / 32;
        if constexpr (DECODE_NORM == 2) return bring_rms();
        if constexpr (DECODE_NORM) {
#pragma unroll 1
            for (int r = warp; r < DECODE_ROWS; r += WARPS * MEASURED) measure(r);
            __syncthreads();
        }
#pragma unroll 1
        for (int split = warp; split < SPLITS; split += WARPS) {
#pragma unroll BROUGHT
            for (int r = 0; r < DECODE_ROWS; ++r) put(r, split);
        }
        __syncwarp();
    }

    // Loads one split (range of K) of the block's rows, with all warps of the block. Barriers must precede and follow
    // this call.
    __device__ __forceinline__ void bring_split(int split) const {
#pragma unroll 1
        for (int first = threadIdx.x / 32; first < DECODE_ROWS; first += WARPS * BROUGHT) {
#pragma unroll
            for (int i = 0; i < BROUGHT; ++i) {
                if (first + i * WARPS < DECODE_ROWS) put(first + i * WARPS, split);
            }
        }
    }

    // Returns values k .. k + 3 of row r, after adding an earlier product's sums over all splits.
    __device__ __forceinline__ float4 complete(int r, int k) const {
        float v[4];
        load_fresh<float, 4>(row(r) + k).unpack(v);
        if constexpr (DECODE_SUMS) {
            SplitSums<DECODE_SUMS, 4> added;
            added.load(sums + (row(r) - x) + k, (long long)M * DECODE_K, sum_scale ? sum_scale + k : nullptr);
#pragma unroll
            for (int e = 0; e < 4; ++e) v[e] = added.added_to(v[e], e);
        }
        return {v[0], v[1], v[2], v[3]};
    }

    // Loads all rows and stores their RMSNorm. Squares are added as in norms/rmsnorm_stream.cu: over the loads of each
    // thread, then over the lanes of its warp, then over the warps.
    __device__ __forceinline__ void bring_rms() const {
        constexpr int SUMS = SPLITS > 4 ? 8 : SPLITS > 2 ? 4 : 2;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        float* squares = reinterpret_cast<float*>(shared + DECODE_ROWS * PITCH);  // (DECODE_ROWS, SPLITS)
        float4 v[DECODE_ROWS][UNITS];
#pragma unroll
        for (int i = 0; i < DECODE_ROWS * UNITS; ++i) {
            const int k = of_load(i % UNITS);
            v[i / UNITS][i % UNITS] = k < DECODE_K ? complete(i / UNITS, k) : float4{};
        }
#pragma unroll
        for (int r = 0; r < DECODE_ROWS; ++r) {
            float square = 0.0f;
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                square += v[r][u].x * v[r][u].x, square += v[r][u].y * v[r][u].y;
                square += v[r][u].z * v[r][u].z, square += v[r][u].w * v[r][u].w;
            }
            square = lanes_sum<32>(square);
            if (lane == 0) squares[r * SPLITS + warp] = square;
        }
        __syncthreads();
        float g[UNITS][4] = {};
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            if (of_load(u) < DECODE_K) early[0][u].unpack(g[u]);
        }
#pragma unroll
        for (int r = 0; r < DECODE_ROWS; ++r) {
            const int part = lane % SUMS;
            const float sum = lanes_sum<SUMS>(part < SPLITS ? squares[r * SPLITS + part] : 0.0f);
            const float factor = rsqrtf(sum * (1.0f / DECODE_K) + eps);
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                const int unit = u * WARPS + warp;
                float n[4] = {v[r][u].x, v[r][u].y, v[r][u].z, v[r][u].w};
#pragma unroll
                for (int e = 0; e < 4; ++e) n[e] *= factor * g[u][e];
                store(n, r, unit / UNITS, unit % UNITS);
            }
        }
        if constexpr (UNITS > 1) __syncthreads();
        else __syncwarp();
    }

    // Loads MEASURED rows (`first` and every WARPS-th row after it) into shared memory, and computes their mean and
    // rstd.
    __device__ __forceinline__ void measure(int first) const {
        float v[MEASURED][IN_REGISTERS ? LOADS : 1][4];
#pragma unroll
        for (int i = 0; i < MEASURED; ++i) {
            const float* from = row(first + i * WARPS);
            each_of_lane<DECODE_K, 4>([&](int load, int k) {
                float (&to)[4] = v[i][IN_REGISTERS ? load : 0];
                load_fresh<float, 4>(from + k).unpack(to);
                if (!IN_REGISTERS) *floats(first, k) = {to[0], to[1], to[2], to[3]};
            });
        }
#pragma unroll
        for (int i = 0; i < MEASURED; ++i) {
            const int r = first + i * WARPS;
            if (r >= DECODE_ROWS) break;
            const Statistics<DECODE_K, 4> of(eps, [&](int load, int k, float (&to)[4]) {
                const float4 kept = IN_REGISTERS ? float4{} : *floats(r, k);
                to[0] = IN_REGISTERS ? v[i][load][0] : kept.x, to[1] = IN_REGISTERS ? v[i][load][1] : kept.y;
                to[2] = IN_REGISTERS ? v[i][load][2] : kept.z, to[3] = IN_REGISTERS ? v[i][load][3] : kept.w;
            });
            if (threadIdx.x % 32 == 0) *statistics(r) = {of.mean, of.rstd};
            if (IN_REGISTERS) {
                each_of_lane<DECODE_K, 4>([&](int load, int k) {
                    const float (&from)[4] = v[i][load];
                    *floats(r, k) = {from[0], from[1], from[2], from[3]};
                });
            }
        }
    }

    // Stores the 16-bit terms of one split (range of K) of row r in shared memory. With DECODE_NORM, values are first
    // normalised (LayerNorm).
    __device__ __forceinline__ void put(int r, int split) const {
        float v[UNITS][4];
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            const int k = at(split, unit);
            float (&to)[4] = v[unit];
            to[0] = to[1] = to[2] = to[3] = 0.0f;
            if (is_missing(r, M - first) || (SPLITS * LENGTH > DECODE_K && k >= DECODE_K)) continue;
            if constexpr (DECODE_NORM) {
                const float4 kept = *floats(r, k);
                to[0] = kept.x, to[1] = kept.y, to[2] = kept.z, to[3] = kept.w;
            } else {
                load_fresh<float, 4>(row(r) + k).unpack(to);
            }
        }
        if constexpr (DECODE_NORM) {
            normalise(v, r, split);
            __syncwarp();  // all lanes have read the floats that the terms overwrite
        }
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) store(v[unit], r, split, unit);
    }

    // Stores `from`, the lane's values of row r and a unit of one split, in shared memory: as terms, or with float
    // weights as floats.
    __device__ __forceinline__ void store(const float (&from)[4], int r, int split, int unit) const {
        if constexpr (order::FLOATS) {
            *floats(r, at(split, unit)) = {from[0], from[1], from[2], from[3]};
        } else {
            uint2 high, low;
            if constexpr (DECODE_OPERAND) {
                high = {bits(from[0]), bits(from[2])}, low = {bits(from[1]), bits(from[3])};
            } else {
                split_four(from, inverse, high, low);
            }
            if constexpr (order::BLOCKS) {
                blocks(r, split).store(high, unit, 0);
                if (order::TERMS == 2) blocks(r, split).store(low, unit, 1);
            } else {
                char* to = values(r, split) + 2 * (at(split, unit) - split * LENGTH);
                *reinterpret_cast<uint2*>(to) = high;
                if (order::TERMS == 2) *reinterpret_cast<uint2*>(to + TERM) = low;
            }
        }
    }

    // Replaces the lane's values of a split of row r, v[unit] from at(split, unit) on, by their LayerNorm.
    __device__ __forceinline__ void normalise(float (&v)[UNITS][4], int r, int split) const {
        const Statistics<DECODE_K, 4> of(statistics(r)->x, statistics(r)->y);
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            const int k = at(split, unit);
            if (SPLITS * LENGTH > DECODE_K && k >= DECODE_K) continue;
            float g[4], b[4];
            (EARLY ? early[0][EARLY ? unit : 0] : Four::load(gamma + k)).unpack(g);
            (EARLY ? early[1][EARLY ? unit : 0] : Four::load(beta + k)).unpack(b);
#pragma unroll
            for (int e = 0; e < 4; ++e) v[unit][e] = of.of(v[unit][e], g[e], b[e]);
        }
    }

    // A tile has order::TILE_ROWS rows of x. Returns the row, among the block's rows, that lane 4 g + t holds in tile
    // i. In a tile that extends beyond the last row, lanes repeat other rows.
    __device__ __forceinline__ static int row_of(int i) {
        const int row = order::TILE_ROWS * i + threadIdx.x % 32 / 4 / order::TERMS;
        return DECODE_ROWS % order::TILE_ROWS ? row % DECODE_ROWS : row;
    }

    // Loads the lane's values of chunk `chunk` of a unit (128 values of K), in the row of tile i that the lane holds.
    // unit: index of the unit in split `split`.
    __device__ __forceinline__ void get(order::Rows& to, int i, int split, int unit, int chunk) const {
        const int k = unit * order::UNIT + chunk * order::CHUNK + threadIdx.x % 4 * order::WIDTH;
        const char* from = values(row_of(i), split);
        if constexpr (order::FLOATS) to.load(reinterpret_cast<const float*>(from) + k);
        else to.load(from + 2 * k, TERM);
    }

    // Loads the lane's values of a chunk. unit: index, in all of K, of the unit that contains the chunk.
    __device__ __forceinline__ void get(order::Rows& to, int i, int unit, int chunk) const {
        get(to, i, unit / UNITS, unit % UNITS, chunk);
    }

    // Returns the places of row r's terms and chunk sums in a split.
    __device__ __forceinline__ BlockOperand<UNITS> blocks(int r, int split) const {
        return {values(r, split), values(r, split) + TERMS_BYTES};
    }

    // Returns the sum over chunk t of a unit, for the row of x and the term (high or low) that lane 4 g + t holds in
    // tile i.
    __device__ __forceinline__ unsigned chunk_sums(int i, int split, int unit) const {
        return blocks(row_of(i), split).own_sum(unit);
    }
};
