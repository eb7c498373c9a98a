// The constants of matmul/decode/cores.cu, and its loads of x. With LM_NORM, x is replaced by its LayerNorm: first the
// mean, then the variance around the mean.
//
// Rows are kept in shared memory, except that each thread loads its part of a single short row without LayerNorm
// directly into registers.
#pragma once
#include "lib/common.cuh"
#include "lib/fresh.cuh"
#include "lib/storage.cuh"
#include "lib/layernorm.cuh"

#ifndef LM_K
#define LM_K 768
#endif
#ifndef LM_NORM
#define LM_NORM 1
#endif
#ifndef LM_ROWS
#define LM_ROWS 1
#endif
#ifndef LM_TOGETHER  // rows of x multiplied at a time: 2 is a compromise of fewer conversions and short code
#define LM_TOGETHER (LM_ROWS > 1 ? 2 : 1)
#endif
#ifndef LM_WIDTH  // weights per load
#define LM_WIDTH 4
#endif
#ifndef LM_SPLIT
#define LM_SPLIT 3
#endif
#ifndef LM_STEPS
#define LM_STEPS 2
#endif
#ifndef LM_COLUMNS
#define LM_COLUMNS 6
#endif
#ifndef LM_GROUPS
#define LM_GROUPS 3
#endif
#ifndef LM_LOOP
#define LM_LOOP 0
#endif
#ifndef LM_BLOCKS  // minimum blocks per SM (__launch_bounds__), including blocks of the next kernel
#define LM_BLOCKS 1
#endif
#ifndef LM_X  // values per load of x, gamma and beta
#define LM_X 4
#endif
constexpr int WARPS = LM_GROUPS * LM_SPLIT;
constexpr int THREADS = 32 * WARPS;
constexpr int UNIT = 32 * LM_WIDTH;
constexpr int STEP = UNIT * LM_SPLIT;
constexpr int CHUNK = STEP * LM_STEPS;           // values of K in flight at once
constexpr int CHUNKS = (LM_K + CHUNK - 1) / CHUNK;
constexpr int PADDED = CHUNKS * CHUNK;           // floats per row in shared memory; zeros after K
constexpr int OWN = CHUNKS * LM_STEPS;           // vectors of a row that a thread multiplies
constexpr int COLUMNS = LM_GROUPS * LM_COLUMNS;  // output columns per block
constexpr int VALUES = LM_TOGETHER * LM_COLUMNS; // sums per thread at a time
constexpr int SHARES = (LM_K + THREADS * LM_X - 1) / (THREADS * LM_X);  // vectors of x that a thread loads per row
constexpr bool FITS = LM_ROWS == 1 && OWN * LM_WIDTH <= 32;             // the row fits in the threads' registers
constexpr int PIECE = LM_WIDTH < 4 ? LM_WIDTH : 4;                      // contiguous values that a lane reads at a time
typedef Vec<W, LM_WIDTH> Weights;
typedef Vec<float, LM_X> Values;
static_assert(LM_K % LM_WIDTH == 0 && LM_K % LM_X == 0, "vectors do not cross the end of a row");
static_assert(LM_ROWS % LM_TOGETHER == 0, "rows go together");

// Returns the position of element k of a row in shared memory. A lane reads LM_WIDTH values as several float4. Float4
// number i of all lanes are stored next to each other, which avoids bank conflicts.
__device__ __forceinline__ int place(int k) {
    if (LM_WIDTH <= 4) return k;
    const int within = k % UNIT, lane = within / LM_WIDTH, e = within % LM_WIDTH;
    return k - within + e / 4 * 128 + lane * 4 + e % 4;
}

template <int N>
__device__ __forceinline__ void write(const float (&v)[N], float* to) {
    if constexpr (N == 4) {
        *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
#pragma unroll
        for (int e = 0; e < N; ++e) to[e] = v[e];
    }
}

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

__device__ __forceinline__ int share(int i) { return (i * THREADS + threadIdx.x) * LM_X; }  // index in a row of load i

// A thread multiplies several vectors of a row. own_at(i) returns the index in the row of the thread's vector i,
// own_place(i) the index in shared memory.
__device__ __forceinline__ int own_at(int i) {
    return i * STEP + threadIdx.x / 32 % LM_SPLIT * UNIT + threadIdx.x % 32 * LM_WIDTH;
}
__device__ __forceinline__ int own_place(int i) {
    return i * STEP + threadIdx.x / 32 % LM_SPLIT * UNIT + threadIdx.x % 32 * PIECE;
}

__device__ __forceinline__ void read_own(float (&v)[LM_WIDTH], int i, const float* row) {
#pragma unroll
    for (int e = 0; e < LM_WIDTH; e += PIECE) {
        float piece[PIECE];
        read(piece, row + own_place(i) + e / 4 * 128);
#pragma unroll
        for (int j = 0; j < PIECE; ++j) v[e + j] = piece[j];
    }
}

__device__ __forceinline__ void zeros_behind(float* row) {  // each thread writes some of the zeros
    if constexpr (PADDED > LM_K) {
        for (int k = LM_K + threadIdx.x; k < PADDED; k += THREADS) row[place(k)] = 0.0f;
    }
}

// A block's rows of x (M, K). With LM_NORM, rows are replaced by their LayerNorm.
struct Rows {
    static constexpr bool HELD = FITS && !LM_NORM;
    static constexpr int FLOATS = HELD ? 0 : (LM_ROWS + 2 * LM_NORM) * PADDED;  // floats of shared memory
    static constexpr int EARLY = LM_NORM ? (SHARES < 2 ? SHARES : 2) : 1;  // vectors of gamma and beta loaded early
    const float* x;
    const float* gamma;
    const float* beta;
    float eps;
    int M, first;
    Values early[2][EARLY];

    // Issues loads of gamma and beta, which no kernel writes, before the wait for the previous kernel.
    __device__ __forceinline__ void prefetch() {
#pragma unroll
        for (int i = 0; i < (LM_NORM ? EARLY : 0); ++i) {
            const int k = min(share(i), LM_K - LM_X);
            early[0][i] = Values::load(gamma + k), early[1][i] = Values::load(beta + k);
        }
    }

    // Stores gamma and beta in shared memory, after the rows.
    __device__ __forceinline__ void put_gamma_beta(float* x_s) const {
        float *gamma_s = x_s + LM_ROWS * PADDED, *beta_s = gamma_s + PADDED;
#pragma unroll
        for (int i = 0; i < SHARES; ++i) {
            const int k = share(i);
            if (k >= LM_K) break;
            float g[LM_X], b[LM_X];
            (i < EARLY ? early[0][i < EARLY ? i : 0] : Values::load(gamma + k)).unpack(g);
            (i < EARLY ? early[1][i < EARLY ? i : 0] : Values::load(beta + k)).unpack(b);
            write(g, gamma_s + place(k)), write(b, beta_s + place(k));
        }
        zeros_behind(gamma_s), zeros_behind(beta_s);
    }

    __device__ __forceinline__ void bring(float* x_s, float (&held)[OWN][LM_WIDTH]) const {
        if constexpr (HELD) {
            straight(held);
        } else {
            LM_NORM ? normalised(x_s) : plain(x_s);
            __syncthreads();
        }
    }

    __device__ __forceinline__ const float* row(int r) const { return x + (long long)min(first + r, M - 1) * LM_K; }

    __device__ __forceinline__ void straight(float (&held)[OWN][LM_WIDTH]) const {
        constexpr int PART = LM_X < PIECE ? LM_X : PIECE;
        typedef Vec<float, PART> Some;
        Some loaded[OWN][LM_WIDTH / PART];
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
#pragma unroll
            for (int e = 0; e < LM_WIDTH / PART; ++e) {
                loaded[i][e] = {};
                const float* from = row(0) + own_at(i) + e * PART;
                if (PADDED == LM_K || own_at(i) < LM_K) {
                    loaded[i][e] = load_fresh<float, PART>(from);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
#pragma unroll
            for (int e = 0; e < LM_WIDTH / PART; ++e) {
                float v[PART];
                loaded[i][e].unpack(v);
#pragma unroll
                for (int j = 0; j < PART; ++j) held[i][e * PART + j] = v[j];
            }
        }
    }

    // Loads all rows into shared memory, with all threads of the block and several loads per thread in flight.
    __device__ __forceinline__ void plain(float* x_s) const {
        constexpr int LOADS = SHARES * LM_ROWS, BATCH = LOADS < 8 ? LOADS : 8;
#pragma unroll 1
        for (int at = 0; at < LOADS; at += BATCH) {
            Values v[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int k = share((at + i) / LM_ROWS), r = (at + i) % LM_ROWS;
                if (k < LM_K && at + i < LOADS) v[i] = load_fresh<float, LM_X>(row(r) + k);
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int k = share((at + i) / LM_ROWS), r = (at + i) % LM_ROWS;
                float values[LM_X];
                v[i].unpack(values);
                if (k < LM_K && at + i < LOADS) write(values, x_s + r * PADDED + place(k));
            }
        }
        for (int r = 0; r < LM_ROWS; ++r) zeros_behind(x_s + r * PADDED);
    }

    // Each warp loads a row and computes its LayerNorm. A lane accesses only values that it has loaded: no barrier is
    // needed.
    __device__ __forceinline__ void normalised(float* x_s) const {
        const float *gamma_s = x_s + LM_ROWS * PADDED, *beta_s = gamma_s + PADDED;
#pragma unroll 1
        for (int r = threadIdx.x / 32; r < (LM_ROWS + WARPS - 1) / WARPS * WARPS; r += WARPS) {
            const float* from = row(r);
            float* to = x_s + r * PADDED;
            if (r < LM_ROWS) {
                each_of_lane<LM_K, LM_X>([&](int, int k) {
                    float v[LM_X];
                    load_fresh<float, LM_X>(from + k).unpack(v);
                    write(v, to + place(k));
                });
            }
            if (r < WARPS) {
                put_gamma_beta(x_s);
                __syncthreads();
            }
            if (r >= LM_ROWS) break;
            const Statistics<LM_K, LM_X> of(eps, [&](int, int k, float (&v)[LM_X]) { read(v, to + place(k)); });
            each_of_lane<LM_K, LM_X>([&](int, int k) {
                float v[LM_X], g[LM_X], b[LM_X];
                read(v, to + place(k)), read(g, gamma_s + place(k)), read(b, beta_s + place(k));
#pragma unroll
                for (int e = 0; e < LM_X; ++e) v[e] = of.of(v[e], g[e], b[e]);
                write(v, to + place(k));
            });
            if constexpr (PADDED > LM_K) {
                for (int k = LM_K + threadIdx.x % 32; k < PADDED; k += 32) to[place(k)] = 0.0f;
            }
        }
    }
};
