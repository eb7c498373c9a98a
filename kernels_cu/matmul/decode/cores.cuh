// The constants of matmul/decode/cores.cu, and its loads of x. With DECODE_NORM, x is replaced by its LayerNorm: first
// the mean, then the variance around the mean.
//
// Rows are kept in shared memory, except that each thread loads its part of a single short row without LayerNorm
// directly into registers.
#pragma once
#include "lib/common.cuh"
#include "lib/fresh.cuh"
#include "lib/storage.cuh"
#include "lib/layernorm.cuh"

#ifndef DECODE_K
#define DECODE_K 768
#endif
#ifndef DECODE_NORM
#define DECODE_NORM 1
#endif
#ifndef DECODE_ROWS
#define DECODE_ROWS 1
#endif
#ifndef DECODE_TOGETHER  // rows of x multiplied at a time: 2 is a compromise of fewer conversions and short code
#define DECODE_TOGETHER (DECODE_ROWS > 1 ? 2 : 1)
#endif
#ifndef DECODE_WIDTH  // weights per load
#define DECODE_WIDTH 4
#endif
#ifndef DECODE_SPLIT
#define DECODE_SPLIT 3
#endif
#ifndef DECODE_STEPS
#define DECODE_STEPS 2
#endif
#ifndef DECODE_COLUMNS
#define DECODE_COLUMNS 6
#endif
#ifndef DECODE_GROUPS
#define DECODE_GROUPS 3
#endif
#ifndef DECODE_LOOP
#define DECODE_LOOP 0
#endif
#ifndef DECODE_BLOCKS  // minimum blocks per SM (__launch_bounds__), including blocks of the next kernel
#define DECODE_BLOCKS 1
#endif
#ifndef DECODE_X  // values per load of x, gamma and beta
#define DECODE_X 4
#endif
constexpr int WARPS = DECODE_GROUPS * DECODE_SPLIT;
constexpr int THREADS = 32 * WARPS;
constexpr int UNIT = 32 * DECODE_WIDTH;
constexpr int STEP = UNIT * DECODE_SPLIT;
constexpr int CHUNK = STEP * DECODE_STEPS;       // values of K in flight at once
constexpr int CHUNKS = (DECODE_K + CHUNK - 1) / CHUNK;
constexpr int PADDED = CHUNKS * CHUNK;           // floats per row in shared memory; zeros after K
constexpr int OWN = CHUNKS * DECODE_STEPS;       // vectors of a row that a thread multiplies
constexpr int COLUMNS = DECODE_GROUPS * DECODE_COLUMNS;  // output columns per block
constexpr int VALUES = DECODE_TOGETHER * DECODE_COLUMNS; // sums per thread at a time
constexpr int SHARES = (DECODE_K + THREADS * DECODE_X - 1) / (THREADS * DECODE_X);  // vectors of x per thread and row
constexpr bool FITS = DECODE_ROWS == 1 && OWN * DECODE_WIDTH <= 32;     // registers hold a row
constexpr int PIECE = DECODE_WIDTH < 4 ? DECODE_WIDTH : 4;              // neighbouring values per load
typedef Vec<W, DECODE_WIDTH> Weights;
typedef Vec<float, DECODE_X> Values;
static_assert(DECODE_K % DECODE_WIDTH == 0 && DECODE_K % DECODE_X == 0, "vectors do not cross the end of a row");
static_assert(DECODE_ROWS % DECODE_TOGETHER == 0, "rows go together");

// Returns the position of element k of a row in shared memory. A lane reads DECODE_WIDTH values as several float4.
// Float4 number i of all lanes are stored next to each other, which avoids bank conflicts. With DECODE_WIDTH 8:
//
//   k       0 1 2 3   4   5   6   7   8 9 10 11  12  13  14  15  16 ...
//   place   0 1 2 3 128 129 130 131   4 5  6  7 132 133 134 135   8 ...
//   lane    0                         1                           2
__device__ __forceinline__ int place(int k) {
    if (DECODE_WIDTH <= 4) return k;
    const int within = k % UNIT, lane = within / DECODE_WIDTH, e = within % DECODE_WIDTH;
    return k - within + e / 4 * 128 + lane * 4 + e % 4;
}

// Stores N neighbouring floats, four of them by one instruction.
template <int N>
__device__ __forceinline__ void write(const float (&v)[N], float* to) {
    if constexpr (N == 4) {
        *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
#pragma unroll
        for (int e = 0; e < N; ++e) to[e] = v[e];
    }
}

// Loads N neighbouring floats, four of them by one instruction.
template <int N>
__device__ __forceinline__ void read(float (&v)[N], const float* from) {
    if constexpr (N == 4) {
        const float4 four = *reinterpret_cast<const float4*>(from);
        v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
    } else {
#pragma unroll
        for (int e = 0; e < N; ++e) v[e] = from[e];
    }
}

__device__ __forceinline__ int share(int i) { return (i * THREADS + threadIdx.x) * DECODE_X; }  // place of load i

// A thread multiplies several vectors of a row. own_at(i) returns the index in the row of the thread's vector i,
// own_place(i) the index in shared memory.
__device__ __forceinline__ int own_at(int i) {
    return i * STEP + threadIdx.x / 32 % DECODE_SPLIT * UNIT + threadIdx.x % 32 * DECODE_WIDTH;
}
__device__ __forceinline__ int own_place(int i) {
    return i * STEP + threadIdx.x / 32 % DECODE_SPLIT * UNIT + threadIdx.x % 32 * PIECE;
}

// Reads the thread's vector i of a row in shared memory: DECODE_WIDTH values from own_at(i) on.
__device__ __forceinline__ void read_own(float (&v)[DECODE_WIDTH], int i, const float* row) {
#pragma unroll
    for (int e = 0; e < DECODE_WIDTH; e += PIECE) {
        float piece[PIECE];
        read(piece, row + own_place(i) + e / 4 * 128);
#pragma unroll
        for (int j = 0; j < PIECE; ++j) v[e + j] = piece[j];
    }
}

// Writes zeros at the positions K to PADDED - 1 of a row in shared memory.
__device__ __forceinline__ void zeros_behind(float* row) {
    if constexpr (PADDED > DECODE_K) {
        for (int k = DECODE_K + threadIdx.x; k < PADDED; k += THREADS) row[place(k)] = 0.0f;
    }
}

// A block's rows of x (M, K). With DECODE_NORM, rows are replaced by their LayerNorm.
struct Rows {
    static constexpr bool HELD = FITS && !DECODE_NORM;
    static constexpr int FLOATS = HELD ? 0 : (DECODE_ROWS + 2 * DECODE_NORM) * PADDED;  // floats of shared memory
    static constexpr int EARLY = DECODE_NORM ? (SHARES < 2 ? SHARES : 2) : 1;  // vectors of gamma and beta loaded early
    const float* x;
    const float* gamma;
    const float* beta;
    float eps;
    int M, first;
    Values early[2][EARLY];

    // Issues loads of gamma and beta, which no kernel writes, before the wait for the previous kernel.
    __device__ __forceinline__ void prefetch() {
#pragma unroll
        for (int i = 0; i < (DECODE_NORM ? EARLY : 0); ++i) {
            const int k = min(share(i), DECODE_K - DECODE_X);
            early[0][i] = Values::load(gamma + k), early[1][i] = Values::load(beta + k);
        }
    }

    // Stores gamma and beta in shared memory, after the rows.
    __device__ __forceinline__ void put_gamma_beta(float* x_s) const {
        float *gamma_s = x_s + DECODE_ROWS * PADDED, *beta_s = gamma_s + PADDED;
#pragma unroll
        for (int i = 0; i < SHARES; ++i) {
            const int k = share(i);
            if (k >= DECODE_K) break;
            float g[DECODE_X], b[DECODE_X];
            (i < EARLY ? early[0][i < EARLY ? i : 0] : Values::load(gamma + k)).unpack(g);
            (i < EARLY ? early[1][i < EARLY ? i : 0] : Values::load(beta + k)).unpack(b);
            write(g, gamma_s + place(k)), write(b, beta_s + place(k));
        }
        zeros_behind(gamma_s), zeros_behind(beta_s);
    }

    // Loads the rows into shared memory (DECODE_ROWS, PADDED), see place(), or with HELD into the registers `held`.
    __device__ __forceinline__ void bring(float* x_s, float (&held)[OWN][DECODE_WIDTH]) const {
        if constexpr (HELD) {
            straight(held);
        } else {
            DECODE_NORM ? normalised(x_s) : plain(x_s);
            __syncthreads();
        }
    }

    // Returns row r of the block in x; the last row of x in place of rows after it.
    __device__ __forceinline__ const float* row(int r) const { return x + (long long)min(first + r, M - 1) * DECODE_K; }

    // Loads the thread's vectors of the only row: held[i] has DECODE_WIDTH values from own_at(i) on.
    __device__ __forceinline__ void straight(float (&held)[OWN][DECODE_WIDTH]) const {
        constexpr int PART = DECODE_X < PIECE ? DECODE_X : PIECE;
        typedef Vec<float, PART> Some;
        Some loaded[OWN][DECODE_WIDTH / PART];
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
#pragma unroll
            for (int e = 0; e < DECODE_WIDTH / PART; ++e) {
                loaded[i][e] = {};
                const float* from = row(0) + own_at(i) + e * PART;
                if (PADDED == DECODE_K || own_at(i) < DECODE_K) {
                    loaded[i][e] = load_fresh<float, PART>(from);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
#pragma unroll
            for (int e = 0; e < DECODE_WIDTH / PART; ++e) {
                float v[PART];
                loaded[i][e].unpack(v);
#pragma unroll
                for (int j = 0; j < PART; ++j) held[i][e * PART + j] = v[j];
            }
        }
    }

    // Loads all rows into shared memory, with all threads of the block and several loads per thread in flight.
    __device__ __forceinline__ void plain(float* x_s) const {
        constexpr int LOADS = SHARES * DECODE_ROWS, BATCH = LOADS < 8 ? LOADS : 8;
#pragma unroll 1
        for (int at = 0; at < LOADS; at += BATCH) {
            Values v[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int k = share((at + i) / DECODE_ROWS), r = (at + i) % DECODE_ROWS;
                if (k < DECODE_K && at + i < LOADS) v[i] = load_fresh<float, DECODE_X>(row(r) + k);
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int k = share((at + i) / DECODE_ROWS), r = (at + i) % DECODE_ROWS;
                float values[DECODE_X];
                v[i].unpack(values);
                if (k < DECODE_K && at + i < LOADS) write(values, x_s + r * PADDED + place(k));
            }
        }
        for (int r = 0; r < DECODE_ROWS; ++r) zeros_behind(x_s + r * PADDED);
    }

    // Each warp loads a row and computes its LayerNorm. A lane accesses only values that it has loaded: no barrier is
    // needed.
    __device__ __forceinline__ void normalised(float* x_s) const {
        const float *gamma_s = x_s + DECODE_ROWS * PADDED, *beta_s = gamma_s + PADDED;
#pragma unroll 1
        for (int r = threadIdx.x / 32; r < (DECODE_ROWS + WARPS - 1) / WARPS * WARPS; r += WARPS) {
            const float* from = row(r);
            float* to = x_s + r * PADDED;
            if (r < DECODE_ROWS) {
                each_of_lane<DECODE_K, DECODE_X>([&](int, int k) {
                    float v[DECODE_X];
                    load_fresh<float, DECODE_X>(from + k).unpack(v);
                    write(v, to + place(k));
                });
            }
            if (r < WARPS) {
                put_gamma_beta(x_s);
                __syncthreads();
            }
            if (r >= DECODE_ROWS) break;
            const auto load = [&](int, int k, float (&v)[DECODE_X]) { read(v, to + place(k)); };
            const Statistics<DECODE_K, DECODE_X> of(eps, load);
            each_of_lane<DECODE_K, DECODE_X>([&](int, int k) {
                float v[DECODE_X], g[DECODE_X], b[DECODE_X];
                read(v, to + place(k)), read(g, gamma_s + place(k)), read(b, beta_s + place(k));
#pragma unroll
                for (int e = 0; e < DECODE_X; ++e) v[e] = of.of(v[e], g[e], b[e]);
                write(v, to + place(k));
            });
            if constexpr (PADDED > DECODE_K) {
                for (int k = DECODE_K + threadIdx.x % 32; k < PADDED; k += 32) to[place(k)] = 0.0f;
            }
        }
    }
};
