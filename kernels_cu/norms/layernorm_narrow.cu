// LayerNorm whose result is the input of a tensor-core product.
//
//   out = (x - mean) * rstd * gamma + beta,   rstd = 1 / sqrt(var + eps)   over each row of C channels
//
//   layernorm_narrow, layernorm_narrow_float, layernorm_narrow_split: for tensor cores: float32 gamma and beta, out in
//       16 bits or hi/lo, a few rows per team of threads, overlapping launches. In layernorm_narrow, x and out have
//       type T; in layernorm_narrow_float, x is float and out has type T; in layernorm_narrow_split, x is float and out
//       is hi/lo (lib/hi_lo.cuh): two arrays of __half, with one scale for all rows
//
// As in kernel 6 (norms/layernorm_rows.cu), a team of LN_THREADS neighbouring threads keeps a row in registers and
// computes the variance around the mean (lib/rows.cuh). The differences:
//
//   - A team processes LN_EACH rows. The loads of all these rows are issued before the first value is used. gamma and
//     beta (8 bytes per channel; x and out together 4 bytes) are loaded once for all of these rows.
//   - The launch may overlap the previous kernel (lib/overlap.cuh): gamma and beta are loaded before the wait.
//   - out is stored with plain stores and stays in the L2 cache, from which the product reads it.
//
//   block   gamma, beta -> registers | wait | rows 0 ... LN_EACH - 1 -> registers | means | deviations | out
//
// The order of a row's additions depends only on C and LN_WIDTH, so a row has the same bits for any N and LN_EACH.
//
// Measured: docs/performance.md#layernorm
//
// grid (ceil(N / (LN_ROWS * LN_EACH))), block (LN_THREADS * LN_ROWS).
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"
#include "lib/rows.cuh"
#include "lib/hi_lo.cuh"

#ifndef LN_WIDTH  // elements per vector: a power of two that divides C, at most 16 bytes of T. Each
#define LN_WIDTH 4  // array is aligned to its vectors, or to 16 bytes if a vector of floats is longer
#endif
#ifndef LN_THREADS  // threads per row: a power of two up to 32, or a multiple of 32
#define LN_THREADS 32
#endif
#ifndef LN_VECTORS  // vectors per thread: ceil(C / (LN_THREADS * LN_WIDTH))
#define LN_VECTORS 6
#endif
#ifndef LN_ROWS  // teams of LN_THREADS threads per block
#define LN_ROWS 4
#endif
#ifndef LN_EACH  // rows that a team processes one after the other
#define LN_EACH 1
#endif

constexpr int STEP = LN_THREADS * LN_WIDTH;          // channels from a thread's vector to its next one
constexpr int CHAINS = LN_WIDTH < 4 ? LN_WIDTH : 4;  // independent partial sums per thread

typedef Team<LN_THREADS, LN_ROWS> Row;

// A thread's part of a row in its storage type, which takes the fewest registers. It is widened for each use.
template <typename E>
struct Kept {
    static constexpr int LOAD = LN_WIDTH * sizeof(E) <= 16 ? LN_WIDTH : 16 / sizeof(E), LOADS = LN_WIDTH / LOAD;
    Vec<E, LOAD> raw[LN_VECTORS][LOADS];

    // Loads the thread's vectors. left: channels from the thread's first one to the end of the row. Only the last
    // vector can lie beyond the end.
    template <typename Get>
    __device__ __forceinline__ void load(const E* from, int left, Get get) {
#pragma unroll
        for (int i = 0; i < LN_VECTORS; ++i) {
            if (i == LN_VECTORS - 1 && i * STEP >= left) break;
#pragma unroll
            for (int k = 0; k < LOADS; ++k) raw[i][k] = get(from + i * STEP + k * LOAD);
        }
    }

    // Makes the compiler forget previously widened values. Otherwise it would keep them, in twice as many registers.
    __device__ __forceinline__ void forget() {
#ifdef __CUDA_ARCH__
        if constexpr (sizeof(E) < 4 && LN_WIDTH > 1) {
#pragma unroll
            for (int word = 0; word < (int)sizeof(raw) / 4; ++word) {
                asm volatile("" : "+r"(reinterpret_cast<unsigned*>(raw)[word]));
            }
        }
#endif
    }

    __device__ __forceinline__ void get(int i, float (&v)[LN_WIDTH]) const {
#pragma unroll
        for (int k = 0; k < LOADS; ++k) {
            float part[LOAD];
            raw[i][k].unpack(part);
#pragma unroll
            for (int j = 0; j < LOAD; ++j) v[k * LOAD + j] = part[j];
        }
    }
};

// Loads values of gamma or beta. Inline assembly keeps these loads before the wait; the compiler moves other loads
// after it.
struct Parameter {
    typedef Vec<float, Kept<float>::LOAD> Vector;

    __device__ __forceinline__ Vector operator()(const float* from) const {
#ifdef __CUDA_ARCH__
        if constexpr (sizeof(Vector) == 16) {
            Vector v;
            unsigned* words = reinterpret_cast<unsigned*>(&v.raw);
            asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                         : "l"(from));
            return v;
        }
#endif
        return Vector::load(from);
    }
};

// Calls use(i, values) for each of the thread's vectors of a row.
template <typename E, typename Use>
__device__ __forceinline__ void each(const Kept<E>& row, int left, Use use) {
#pragma unroll
    for (int i = 0; i < LN_VECTORS; ++i) {
        if (i == LN_VECTORS - 1 && i * STEP >= left) break;
        float v[LN_WIDTH];
        row.get(i, v);
        use(i, v);
    }
}

// Returns the sum of term(v) over a thread's values.
template <typename E, typename Term>
__device__ __forceinline__ float part_sum(const Kept<E>& row, int left, Term term) {
    float sums[CHAINS] = {};
    each(row, left, [&](int, const float (&v)[LN_WIDTH]) {
#pragma unroll
        for (int k = 0; k < LN_WIDTH; ++k) sums[k % CHAINS] += term(v[k]);
    });
#pragma unroll
    for (int k = 1; k < CHAINS; ++k) sums[0] += sums[k];
    return sums[0];
}

template <bool SPLIT, typename E>
__device__ __forceinline__ void normalize(const E* x, const float* gamma, const float* beta, T* out, float eps, int N,
                                          int C, float per_scale = 1.0f) {
    __shared__ float scratch[2][LN_EACH][LN_ROWS * Row::WARPS];
    const int first = threadIdx.x % LN_THREADS * LN_WIDTH, left = C - first;
    const long long row = (long long)blockIdx.x * (LN_ROWS * LN_EACH) + threadIdx.x / LN_THREADS;

    Kept<float> gammas, betas;
    gammas.load(gamma + first, left, Parameter());
    betas.load(beta + first, left, Parameter());
    wait_for_previous();

    Kept<E> rows[LN_EACH];  // teams without a row recompute the last row: all threads must reach the barriers
#pragma unroll
    for (int e = 0; e < LN_EACH; ++e) {
        const long long mine = row + e * LN_ROWS;
        rows[e].load(x + (mine < N ? mine : N - 1) * C + first, left,
                     [](const E* from) { return load_fresh<E, Kept<E>::LOAD>(from); });
    }

    let_next_start();
    float mean[LN_EACH], rstd[LN_EACH];
#pragma unroll
    for (int e = 0; e < LN_EACH; ++e) mean[e] = part_sum(rows[e], left, [](float v) { return v; });
#pragma unroll
    for (int e = 0; e < LN_EACH; ++e) mean[e] = Row::sum(mean[e], scratch[0][e]) / C;
#pragma unroll
    for (int e = 0; e < LN_EACH; ++e) {
        rows[e].forget();
        rstd[e] = part_sum(rows[e], left, [&](float v) { return (v - mean[e]) * (v - mean[e]); });
    }
#pragma unroll
    for (int e = 0; e < LN_EACH; ++e) rstd[e] = rsqrtf(Row::sum(rstd[e], scratch[1][e]) / C + eps);

#pragma unroll
    for (int e = 0; e < LN_EACH; ++e) {
        if (row + e * LN_ROWS >= N) return;
        rows[e].forget();
        T* to = out + (row + e * LN_ROWS) * C + first;
        each(rows[e], left, [&](int i, const float (&v)[LN_WIDTH]) {
            float g[LN_WIDTH], b[LN_WIDTH], y[LN_WIDTH];
            gammas.get(i, g);
            betas.get(i, b);
#pragma unroll
            for (int k = 0; k < LN_WIDTH; ++k) y[k] = (v[k] - mean[e]) * rstd[e] * g[k] + b[k];
            if constexpr (SPLIT) {
                float low[LN_WIDTH];
#pragma unroll
                for (int k = 0; k < LN_WIDTH; ++k) y[k] *= per_scale;
                low_parts(y, low);
                Vec<T, LN_WIDTH>::store(to + (long long)N * C + i * STEP, low);
            }
            Vec<T, LN_WIDTH>::store(to + i * STEP, y);
        });
    }
}

// Launched by operation (variant): layernorm (narrow)
extern "C" __global__ void __launch_bounds__(LN_THREADS * LN_ROWS) layernorm_narrow(
    const T* x,                       // (N, C)
    const float* __restrict__ gamma,  // (C)
    const float* __restrict__ beta,   // (C)
    T* out,                           // (N, C)
    float eps, int N, int C) {
    normalize<false>(x, gamma, beta, out, eps, N, C);
}

// Launched by operation (variant): layernorm (narrow)
extern "C" __global__ void __launch_bounds__(LN_THREADS * LN_ROWS) layernorm_narrow_float(
    const float* x,                   // (N, C)
    const float* __restrict__ gamma,  // (C)
    const float* __restrict__ beta,   // (C)
    T* out,                           // (N, C)
    float eps, int N, int C) {
    normalize<false>(x, gamma, beta, out, eps, N, C);
}

// Launched by operation (variant): layernorm (narrow)
extern "C" __global__ void __launch_bounds__(LN_THREADS * LN_ROWS) layernorm_narrow_split(
    const float* x,                   // (N, C)
    const float* __restrict__ gamma,  // (C)
    const float* __restrict__ beta,   // (C)
    T* out,                           // (2, N, C): hi, lo
    float per_scale,                  // 1 / scale of the rows of out
    float eps, int N, int C) {
    normalize<true>(x, gamma, beta, out, eps, N, C, per_scale);
}
