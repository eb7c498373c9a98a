// Matrix products of decoding without tensor cores, for more rows than a block of decode_cores can keep:
//
//   decode_cores_tiles: more rows, with the same bits as decode_cores: a block computes a tile of outputs and reads
//       its weights once.
//       out = [residual +] [gelu] (x W^T * scale + bias)
//   decode_cores_tiles (qkv_matvec_tiles): stores q in an array, k and v in the KV cache. EPILOGUE is EPILOGUE_APPEND
//       (lib/decode/epilogues.cuh)
//
// x (M, K) is float, W (N, K) has any type. decode_cores defines the order of additions: DECODE_SPLIT warps divide K,
// and a warp adds the sums of its 32 lanes, here called leaves, in a tree, for each chunk of K. Here, a thread computes
// SIDE x SPAN outputs, and LANES threads share the leaves of these outputs: thread q adds leaves q, q + LANES, ... one
// after the other, in the order of the tree, so that it keeps one sum per output and level of the tree. Shuffles add
// the last levels.
//
//   all threads   [ load stage 0 | for each stage: load the next stage into registers, multiply, store the next stage
//                   in shared memory, barrier | epilogue ]
//
// A stage is STAGE values of K of each row and column of the tile. Shared memory holds two stages of floats: row by
// row, 4 values of each of the LANES threads side by side. A thread's loads of a leaf are its vectors of DECODE_WIDTH
// weights, or parts of a vector.
//
// Any M, N, K; DECODE_WIDTH is a multiple of 4 and divides K; x and w are aligned to 16 bytes or to a vector.
//
// grid (ceil(N / DECODE_COLUMNS), ceil(M / DECODE_ROWS)), block (THREADS). `shared_bytes` of
// gpt2block/ops/engines/linear_matvec_tiles.py computes the dynamic shared memory.
#include "lib/decode/epilogues.cuh"
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"
#include "lib/stream.cuh"

#ifndef DECODE_WIDTH
#define DECODE_WIDTH 4
#endif
#ifndef DECODE_SPLIT
#define DECODE_SPLIT 3
#endif
#ifndef DECODE_STEPS
#define DECODE_STEPS 2
#endif
#ifndef DECODE_ROWS
#define DECODE_ROWS 64
#endif
#ifndef DECODE_COLUMNS
#define DECODE_COLUMNS 32
#endif
#ifndef DECODE_SIDE
#define DECODE_SIDE 8
#endif
#ifndef DECODE_LANES
#define DECODE_LANES 4
#endif
#ifndef DECODE_STAGE
#define DECODE_STAGE 64
#endif
constexpr int WIDTH = DECODE_WIDTH, SPLIT = DECODE_SPLIT, STEPS = DECODE_STEPS;
constexpr int ROWS = DECODE_ROWS, COLUMNS = DECODE_COLUMNS, SIDE = DECODE_SIDE, SPAN = 4;
constexpr int LANES = DECODE_LANES, STAGE = DECODE_STAGE;
constexpr int DOWN = ROWS / SIDE, ACROSS = COLUMNS / SPAN;  // threads along the rows and columns of the tile
constexpr int THREADS = DOWN * ACROSS * LANES;
constexpr int UNIT = 32 * WIDTH, STEP = UNIT * SPLIT, CHUNK = STEP * STEPS;  // as in cores.cuh
constexpr int LEAVES = 32 / LANES;                                          // leaves per thread
constexpr int LEVELS = LEAVES == 8 ? 3 : LEAVES == 4 ? 2 : LEAVES == 2 ? 1 : 0;
constexpr int LOAD = WIDTH * LANES > STAGE ? STAGE / LANES : WIDTH;  // weights per load
constexpr int LOADS = STAGE / (LOAD * LANES);                        // loads of a thread's leaves per stage and column
constexpr int OF_LEAF = STEPS * WIDTH / LOAD;                        // loads per leaf
constexpr int STAGES = LEAVES * OF_LEAF / LOADS;                     // stages per chunk of a warp
constexpr int PITCH = STAGE + 16;                                    // floats per row in shared memory
constexpr int BUFFER = (ROWS + COLUMNS) * PITCH;
constexpr int VALUES = SIDE * SPAN, KEPT = VALUES / LANES;  // sums per thread, before and after the shuffles
constexpr int X_FETCHES = ROWS * STAGE / 4 / THREADS;
constexpr int OF_COLUMN = STAGE / LOAD;  // loads per stage and column
constexpr int W_FETCHES = (COLUMNS * OF_COLUMN + THREADS - 1) / THREADS;
typedef Vec<W, LOAD> Weights;
static_assert(LEAVES * OF_LEAF % LOADS == 0, "a chunk is made of whole stages");
static_assert(ROWS * STAGE / 4 % THREADS == 0 && THREADS % (STAGE / 4) == 0, "a thread loads the same part of rows");
static_assert(THREADS % 32 == 0 && DOWN % 2 == 0 && ACROSS % 2 == 0, "neighbouring lanes share rows or columns");

// A stage along K: number `stage` of chunk `chunk` of warp `part` in decode_cores.
struct Place {
    int stage = 0, chunk = 0, part = 0;

    __device__ __forceinline__ void advance(int chunks) {
        if (++stage < STAGES) return;
        stage = 0;
        if (++chunk == chunks) chunk = 0, ++part;
    }

    // Returns the index along K of load i of thread q. Leaves are in the order of the tree: bits are reversed.
    __device__ __forceinline__ int at(int i, int q) const {
        const int load = stage * LOADS + i, leaf = load / OF_LEAF, of_leaf = load % OF_LEAF;
        int turned = 0;
#pragma unroll
        for (int level = 0; level < LEVELS; ++level) turned |= (leaf >> level & 1) << (LEVELS - 1 - level);
        return chunk * CHUNK + part * UNIT + (q + LANES * turned) * WIDTH + of_leaf / (WIDTH / LOAD) * STEP +
               of_leaf % (WIDTH / LOAD) * LOAD;
    }
};

// A thread's share of a stage, on the way from global to shared memory.
struct Fetched {
    Vec<float, 4> x[X_FETCHES];
    Weights w[W_FETCHES];

    __device__ __forceinline__ void fetch_w(const W* from, const Place& place, int K, int last) {
#pragma unroll
        for (int i = 0; i < W_FETCHES; ++i) {
            const int flat = i * THREADS + threadIdx.x, column = flat / OF_COLUMN, load = flat % OF_COLUMN;
            const int k = place.at(load / LANES, load % LANES);
            w[i] = {};
            if (k < K && column < COLUMNS) w[i] = stream_in<Weights>(from + (long long)min(column, last) * K + k);
        }
    }

    __device__ __forceinline__ void fetch_x(const float* from, const Place& place, int K, int last) {
        const int four = threadIdx.x % (STAGE / 4), q = four % LANES, of_load = four / LANES % (LOAD / 4);
        const int k = place.at(four / (LANES * (LOAD / 4)), q) + 4 * of_load;
#pragma unroll
        for (int i = 0; i < X_FETCHES; ++i) {
            const int row = (i * THREADS + threadIdx.x) / (STAGE / 4);
            x[i] = {};
            if (k < K) x[i] = load_fresh<float, 4>(from + (long long)min(row, last) * K + k);
        }
    }

    __device__ __forceinline__ void put(float* buffer) const {
#pragma unroll
        for (int i = 0; i < X_FETCHES; ++i) {
            const int flat = i * THREADS + threadIdx.x;
            *reinterpret_cast<uint4*>(buffer + flat / (STAGE / 4) * PITCH + flat % (STAGE / 4) * 4) = x[i].raw;
        }
#pragma unroll
        for (int i = 0; i < W_FETCHES; ++i) {
            const int flat = i * THREADS + threadIdx.x, column = flat / OF_COLUMN, load = flat % OF_COLUMN;
            if (COLUMNS * OF_COLUMN % THREADS != 0 && column >= COLUMNS) break;
            float v[LOAD];
            w[i].unpack(v);
            float* to = buffer + (ROWS + column) * PITCH + load / LANES * LANES * LOAD + load % LANES * 4;
#pragma unroll
            for (int e = 0; e < LOAD; e += 4) {
                *reinterpret_cast<float4*>(to + e * LANES) = make_float4(v[e], v[e + 1], v[e + 2], v[e + 3]);
            }
        }
    }
};

// The sums of a thread: of the current leaf, and of a subtree of each level.
struct Tree {
    float sum[VALUES], level[LEVELS][VALUES];

    // Adds the products of load i of a stage. x, w: the thread's first values in shared memory.
    __device__ __forceinline__ void multiply(int i, const float* x, const float* w) {
#pragma unroll
        for (int e = 0; e < LOAD; e += 4) {
            const int at = (i * LOAD + e) * LANES;
            float4 column[SPAN];
#pragma unroll
            for (int c = 0; c < SPAN; ++c) column[c] = *reinterpret_cast<const float4*>(w + c * ACROSS * PITCH + at);
#pragma unroll
            for (int r = 0; r < SIDE; ++r) {
                const float4 row = *reinterpret_cast<const float4*>(x + r * DOWN * PITCH + at);
#pragma unroll
                for (int c = 0; c < SPAN; ++c) {
                    float& of = sum[r * SPAN + c];
                    of = fmaf(column[c].x, row.x, of);
                    of = fmaf(column[c].y, row.y, of);
                    of = fmaf(column[c].z, row.z, of);
                    of = fmaf(column[c].w, row.w, of);
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
                                         const End& end, int M, int N, int K) {
    extern __shared__ float4 shared[];
    float* buffer = reinterpret_cast<float*>(shared);  // [2][BUFFER], later (ROWS, COLUMNS)
    const int m = blockIdx.y * ROWS, n = blockIdx.x * COLUMNS;
    // Lanes that differ in bit 0 share rows of x, lanes that differ in bit 1 share columns of w: fewer accesses.
    const int thread = threadIdx.x, q = thread / 4 % LANES, team = thread / (4 * LANES);
    const int row = thread / 2 % 2 + 2 * (team % (DOWN / 2)), column = thread % 2 + 2 * (team / (DOWN / 2));
    const int chunks = (K + CHUNK - 1) / CHUNK, stages = SPLIT * chunks * STAGES;
    x += (long long)m * K, w += (long long)n * K;

    Place place, next;
    Fetched fetched;
    fetched.fetch_w(w, next, K, N - 1 - n);
    let_next_start();
    wait_for_previous();
    fetched.fetch_x(x, next, K, M - 1 - m);
    fetched.put(buffer);
    __syncthreads();

    Tree tree;
    tree.clear();
    float part[KEPT], total[KEPT] = {};  // sums of the chunks of a part; sums of the parts
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
        next.advance(chunks);
        const bool more = i + 1 < stages;
        if (more) fetched.fetch_w(w, next, K, N - 1 - n), fetched.fetch_x(x, next, K, M - 1 - m);
        const float* now = buffer + i % 2 * BUFFER + 4 * q;
#pragma unroll
        for (int load = 0; load < LOADS; ++load) {
            tree.multiply(load, now + row * PITCH, now + (ROWS + column) * PITCH);
            const int complete = place.stage * LOADS + load + 1;
            if (complete % OF_LEAF == 0) tree.add(complete / OF_LEAF - 1);
        }
        if (place.stage + 1 == STAGES) {
            tree.fold(q);
#pragma unroll
            for (int v = 0; v < KEPT; ++v) part[v] = place.chunk == 0 ? tree.sum[v] : part[v] + tree.sum[v];
#pragma unroll
            for (int v = 0; v < KEPT; ++v) {
                if (place.chunk + 1 == chunks) total[v] += part[v];
            }
            tree.clear();
        }
        place = next;
        if (more) fetched.put(buffer + (i + 1) % 2 * BUFFER);
        __syncthreads();
    }

#pragma unroll
    for (int v = 0; v < KEPT; ++v) {
        const int flat = q * KEPT + v;
        buffer[(row + flat / SPAN * DOWN) * COLUMNS + column + flat % SPAN * ACROSS] = total[v];
    }
    __syncthreads();
    for (int i = thread; i < ROWS * COLUMNS; i += THREADS) {
        const int at_m = m + i / COLUMNS, at_n = n + i % COLUMNS;
        if (at_m >= M || at_n >= N) continue;
        const auto late = end.late(at_m, at_n);
        const float sum = fmaf(buffer[i], scale ? scale[at_n] : 1.0f, bias ? bias[at_n] : 0.0f);
        end.store(at_m, at_n, end.value(sum, late), late);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) decode_cores_tiles(
    const float* x,                   // (M, K)
    const W* __restrict__ w,          // (N, K)
    const float* __restrict__ scale,  // (N) or null
    const float* __restrict__ bias,   // (N) or null
    const float* residual,            // (M, N) or null; may be out
    float* out,                       // (M, N); with EPILOGUE_APPEND (M, C), q
    const int* row,                   // (M), with EPILOGUE_APPEND
    const int* position,              // (M), with EPILOGUE_APPEND
    KV* k_cache,                      // (B, n_ctx, C), with EPILOGUE_APPEND
    KV* v_cache,                      // (B, n_ctx, C), with EPILOGUE_APPEND
    int M, int N, int K, int gelu, int C, int B, int n_ctx) {
#if EPILOGUE == EPILOGUE_APPEND
    const Append end{out, k_cache, v_cache, row, position, C, B, n_ctx};
#else
    const Add end{residual, out, N, gelu};
#endif
    multiply(x, w, scale, bias, end, M, N, K);
}
