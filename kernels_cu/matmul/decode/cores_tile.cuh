// The tile of matmul/decode/cores.cu: a block computes DECODE_ROWS x DECODE_COLUMNS outputs and reads its weights once.
//
// The order of additions is the order without a tile: DECODE_SPLIT warps divide K, and a warp adds the sums of its 32
// lanes, here called leaves, in a tree, for each chunk of K. Here, a thread computes SIDE x SPAN outputs, and LANES
// threads share the leaves of these outputs: thread q adds leaves q, q + LANES, ... one after the other, in the order
// of the tree, so that it keeps one sum per output and level of the tree. Shuffles add the last levels.
//
//   all threads   [ load the first stages | for each stage: multiply it, store the next stage in shared memory, load
//                   stages of x and w behind it into registers, barrier | epilogue ]
//
// A stage is STAGE values of K of each row and column of the tile. Shared memory holds two stages: row by row, 4 values
// of each of the LANES threads side by side. x is in floats. Weights of 16 bits are converted when they are multiplied,
// because loads from shared memory take most of the time; FP8 weights are converted before they are stored. A thread's
// loads of a leaf are its vectors of DECODE_WIDTH weights, or parts of a vector.
//
// DECODE_WIDTH is a multiple of 4. grid (ceil(N / DECODE_COLUMNS) * ceil(M / DECODE_ROWS)), block (THREADS).
#pragma once
#include "matmul/decode/cores.cuh"
#include "lib/overlap.cuh"
#include "lib/stream.cuh"

namespace tile {

constexpr int ROWS = DECODE_ROWS, COLUMNS = DECODE_COLUMNS, SIDE = DECODE_SIDE, SPAN = DECODE_SPAN;
constexpr int LANES = DECODE_LANES, STAGE = DECODE_STAGE, WIDTH = DECODE_WIDTH;
constexpr int DOWN = ROWS / SIDE, ACROSS = COLUMNS / SPAN;  // threads along the rows and columns of the tile
constexpr int THREADS = DOWN * ACROSS * LANES;
constexpr int LEAVES = 32 / LANES;  // leaves per thread
constexpr int LEVELS = LEAVES == 8 ? 3 : LEAVES == 4 ? 2 : 1;
constexpr int LOAD = WIDTH * LANES > STAGE ? STAGE / LANES : WIDTH;  // weights per load
constexpr int LOADS = STAGE / (LOAD * LANES);                        // loads of a thread's leaves per stage and column
constexpr int OF_LEAF = DECODE_STEPS * WIDTH / LOAD;                 // loads per leaf
constexpr int STAGES = LEAVES * OF_LEAF / LOADS;                     // stages per chunk of a warp
constexpr int PITCH = STAGE + 16;                                    // values per row in shared memory
template <int BYTES> struct InShared { typedef float type; };
template <> struct InShared<2> { typedef W type; };
typedef InShared<sizeof(W)>::type S;  // type of weights in shared memory
constexpr int X_BYTES = 4 * ROWS * PITCH, BUFFER = X_BYTES + sizeof(S) * COLUMNS * PITCH;  // bytes of a stage
constexpr int VALUES = SIDE * SPAN, KEPT = VALUES / LANES;  // sums per thread, before and after the shuffles
constexpr int X_FETCHES = ROWS * STAGE / 4 / THREADS;
constexpr int OF_COLUMN = STAGE / LOAD;  // loads per stage and column
constexpr int W_FETCHES = (COLUMNS * OF_COLUMN + THREADS - 1) / THREADS;
constexpr int FLIGHT = 2;  // stages of weights in registers
typedef Vec<W, LOAD> Weights;
static_assert(LEAVES * OF_LEAF % (2 * LOADS) == 0, "a chunk is made of pairs of stages");
static_assert(ROWS * STAGE / 4 % THREADS == 0 && THREADS % (STAGE / 4) == 0, "a thread loads the same part of rows");
static_assert(LEAVES == 1 << LEVELS && LEAVES > 1, "2, 4 or 8 leaves per thread");
static_assert(THREADS % 32 == 0 && DOWN % 2 == 0 && ACROSS % 2 == 0, "neighbouring lanes share rows or columns");

// Returns the index along K of load i of thread q in a stage of a chunk, from the chunk's first value of a warp on.
// Leaves are in the order of the tree: their bits are reversed.
__device__ __forceinline__ int place_along(int stage, int i, int q) {
    const int load = stage * LOADS + i, leaf = load / OF_LEAF, of_leaf = load % OF_LEAF;
    const int turned = __brev(leaf) >> (32 - LEVELS);
    return (q + LANES * turned) * WIDTH + of_leaf / (WIDTH / LOAD) * STEP + of_leaf % (WIDTH / LOAD) * LOAD;
}

// Returns the index along K of the first value of chunk i: of the chunks of all warps, one warp after the other.
__device__ __forceinline__ int first_of(int i) {
    return i < DECODE_SPLIT * CHUNKS ? i / CHUNKS * UNIT + i % CHUNKS * CHUNK : 0;
}

// Stores four weights in shared memory.
template <typename E>
__device__ __forceinline__ void keep(const Vec<W, 4>& four, E* to) {
    if constexpr (sizeof(E) == sizeof(W)) {
        *reinterpret_cast<Vec<W, 4>*>(to) = four;
    } else {
        float v[4];
        four.unpack(v);
        Vec<E, 4>::store(to, v);
    }
}

// A thread's share of the stages, on the way from global to shared memory.
struct Share {
    static constexpr int X_APART = THREADS / (STAGE / 4), W_APART = THREADS / OF_COLUMN;  // rows between fetches
    const float* from_x;  // address of the thread's first row
    const W* from_w;
    int x_left, w_left;  // number of rows from there on
    Vec<float, 4> x[X_FETCHES];
    Weights w[FLIGHT][W_FETCHES];

    __device__ __forceinline__ Share(const float* x, const W* w, int x_rows, int w_rows) {
        const int x_row = threadIdx.x / (STAGE / 4), w_row = threadIdx.x / OF_COLUMN;
        from_x = x + (long long)x_row * DECODE_K, from_w = w + (long long)w_row * DECODE_K;
        x_left = x_rows - x_row, w_left = w_rows - w_row;
    }

    // Loads the thread's weights of a stage: one load of each W_APART-th column. first: first value of the chunk.
    __device__ __forceinline__ void fetch_w(int stage, int first) {
        const int k = first + place_along(stage % STAGES, threadIdx.x % OF_COLUMN / LANES, threadIdx.x % LANES);
#pragma unroll
        for (int i = 0; i < W_FETCHES; ++i) {
            Weights& to = w[stage % FLIGHT][i];
            to = {};
            if (inside(k) && i * W_APART < w_left) to = stream_in<Weights>(from_w + k + i * W_APART * DECODE_K);
        }
    }

    // Loads the thread's values of x of a stage: four values of each X_APART-th row.
    __device__ __forceinline__ void fetch_x(int stage, int first) {
        const int four = threadIdx.x % (STAGE / 4), of_load = four / LANES % (LOAD / 4);
        const int k = first + place_along(stage % STAGES, four / (LANES * (LOAD / 4)), four % LANES) + 4 * of_load;
#pragma unroll
        for (int i = 0; i < X_FETCHES; ++i) {
            x[i] = {};
            if (inside(k) && i * X_APART < x_left) x[i] = load_fresh<float, 4>(from_x + k + i * X_APART * DECODE_K);
        }
    }

    static __device__ __forceinline__ bool inside(int k) { return PADDED == DECODE_K || k < DECODE_K; }

    // Stores the loads of a stage in shared memory: (ROWS, PITCH) floats of x, then (COLUMNS, PITCH) values of w.
    __device__ __forceinline__ void put(int stage, char* buffer) const {
        buffer += stage % 2 * BUFFER;
#pragma unroll
        for (int i = 0; i < X_FETCHES; ++i) {
            const int flat = i * THREADS + threadIdx.x, at = flat / (STAGE / 4) * PITCH + flat % (STAGE / 4) * 4;
            *reinterpret_cast<Vec<float, 4>*>(buffer + 4 * at) = x[i];
        }
#pragma unroll
        for (int i = 0; i < W_FETCHES; ++i) {
            const int flat = i * THREADS + threadIdx.x, column = flat / OF_COLUMN, load = flat % OF_COLUMN;
            if (COLUMNS * OF_COLUMN % THREADS != 0 && column >= COLUMNS) break;
            S* to = reinterpret_cast<S*>(buffer + X_BYTES) + column * PITCH;
            to += load / LANES * LANES * LOAD + load % LANES * 4;
            const Vec<W, 4>* fours = reinterpret_cast<const Vec<W, 4>*>(&w[stage % FLIGHT][i]);
#pragma unroll
            for (int e = 0; e < LOAD; e += 4) {
                keep(fours[e / 4], to + e * LANES);
            }
        }
    }
};

// The sums of a thread: of the current leaf, and of a subtree of each level.
struct Tree {
    float sum[VALUES], level[LEVELS][VALUES];

    // Adds the products of load i of a stage. x, w: the thread's first values in shared memory.
    __device__ __forceinline__ void multiply(int i, const float* x, const S* w) {
#pragma unroll
        for (int e = 0; e < LOAD; e += 4) {
            const int at = (i * LOAD + e) * LANES;
            float column[SPAN][4];
#pragma unroll
            for (int c = 0; c < SPAN; ++c) {
                reinterpret_cast<const Vec<S, 4>*>(w + c * ACROSS * PITCH + at)->unpack(column[c]);
            }
#pragma unroll
            for (int r = 0; r < SIDE; ++r) {
                float row[4];
                reinterpret_cast<const Vec<float, 4>*>(x + r * DOWN * PITCH + at)->unpack(row);
#pragma unroll
                for (int c = 0; c < SPAN; ++c) {
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        sum[r * SPAN + c] = fmaf(column[c][k], row[k], sum[r * SPAN + c]);
                    }
                }
            }
        }
    }

    // Adds the complete sums of a leaf to the tree. After the last leaf, `sum` has the sums of all leaves.
    template <int LEVEL = 0>
    __device__ __forceinline__ void add(int leaf) {
        if constexpr (LEVEL < LEVELS) {
            if (leaf >> LEVEL & 1) {
#pragma unroll
                for (int i = 0; i < VALUES; ++i) sum[i] = level[LEVEL][i] + sum[i];
                add<LEVEL + 1>(leaf);
            } else {
#pragma unroll
                for (int i = 0; i < VALUES; ++i) level[LEVEL][i] = sum[i];
                clear();
            }
        }
    }

    // Adds over the LANES threads. Afterwards thread q has KEPT sums, from number q * KEPT on.
    template <int DISTANCE = LANES / 2>
    __device__ __forceinline__ void fold(int q) {
        if constexpr (DISTANCE > 0) {
            constexpr int HALF = KEPT * DISTANCE;
            const bool upper = q & DISTANCE;
#pragma unroll
            for (int i = 0; i < HALF; ++i) {
                const float low = sum[i], high = sum[i + HALF];
                sum[i] = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, 4 * DISTANCE);
            }
            fold<DISTANCE / 2>(q);
        }
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < VALUES; ++i) sum[i] = 0.0f;
    }
};

template <typename End>
__device__ __forceinline__ void multiply(const float* x, const W* w, const float* scale, const float* bias,
                                         const End& end, int M, int N) {
    extern __shared__ float4 shared[];
    char* buffer = reinterpret_cast<char*>(shared);      // [2][BUFFER]
    float* outputs = reinterpret_cast<float*>(shared);  // in the end (ROWS, COLUMNS)
    const int down = (M + ROWS - 1) / ROWS;  // neighbouring blocks read the same weights
    const int m = blockIdx.x % down * ROWS, n = blockIdx.x / down * COLUMNS;
    // Lanes that differ in bit 0 share rows of x, lanes that differ in bit 1 share columns of w: fewer accesses.
    const int thread = threadIdx.x, q = thread / 4 % LANES, team = thread / (4 * LANES);
    const int row = thread / 2 % 2 + 2 * (team % (DOWN / 2)), column = thread % 2 + 2 * (team / (DOWN / 2));
    Share share(x + (long long)m * DECODE_K, w + (long long)n * DECODE_K, min(ROWS, M - m), min(COLUMNS, N - n));
#pragma unroll
    for (int stage = 0; stage < FLIGHT; ++stage) share.fetch_w(stage, first_of(stage / STAGES));
    let_next_start();
    wait_for_previous();
    share.fetch_x(0, 0);
    share.put(0, buffer);
    share.fetch_w(FLIGHT, first_of(FLIGHT / STAGES));
    share.fetch_x(1, first_of(1 / STAGES));
    __syncthreads();

    float part[KEPT], total[KEPT] = {};  // sums of the chunks of a warp; sums of the warps
#pragma unroll 1
    for (int i = 0; i < DECODE_SPLIT * CHUNKS; ++i) {
        Tree tree;
        tree.clear();
        const int chunk = i % CHUNKS;
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            const char* now = buffer + stage % 2 * BUFFER;
            const float* x_now = reinterpret_cast<const float*>(now) + row * PITCH + 4 * q;
            const S* w_now = reinterpret_cast<const S*>(now + X_BYTES) + column * PITCH + 4 * q;
#pragma unroll
            for (int load = 0; load < LOADS; ++load) {
                tree.multiply(load, x_now, w_now);
                const int complete = stage * LOADS + load + 1;
                if (complete % OF_LEAF == 0) tree.add(complete / OF_LEAF - 1);
            }
            share.put(stage + 1, buffer);
            share.fetch_w(stage + 1 + FLIGHT, first_of(i + (stage + 1 + FLIGHT) / STAGES));
            share.fetch_x(stage + 2, first_of(i + (stage + 2) / STAGES));
            __syncthreads();
        }
        tree.fold(q);
#pragma unroll
        for (int v = 0; v < KEPT; ++v) {
            part[v] = chunk == 0 ? tree.sum[v] : part[v] + tree.sum[v];
            if (chunk + 1 == CHUNKS) total[v] += part[v];
        }
    }

#pragma unroll
    for (int v = 0; v < KEPT; ++v) {
        const int flat = q * KEPT + v;
        outputs[(row + flat / SPAN * DOWN) * COLUMNS + column + flat % SPAN * ACROSS] = total[v];
    }
    __syncthreads();
    for (int i = thread; i < ROWS * COLUMNS; i += THREADS) {
        const int at_m = m + i / COLUMNS, at_n = n + i % COLUMNS;
        if (at_m >= M || at_n >= N) continue;
        const auto late = end.late(at_m, at_n);
        const float sum = fmaf(outputs[i], scale ? scale[at_n] : 1.0f, bias ? bias[at_n] : 0.0f);
        end.store(at_m, at_n, end.value(sum, late), late);
    }
}

}  // namespace tile
