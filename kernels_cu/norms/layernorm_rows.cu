// LayerNorm forward, kernel 6:
//
//   out = (x - mean) * rstd * gamma + beta,   rstd = 1 / sqrt(var + eps)   over each row of C channels
//
//   layernorm_forward_kernel6: rows in registers, 16-byte loads, x read once; float32, float16 and bfloat16. LN_THREADS
//       neighbouring threads share a row. Each thread issues all its loads before it uses the first value. Unlike in
//       kernel 5, x is read from memory only once. The variance is computed around the mean, which is accurate for any
//       mean and costs a few shuffles instead of a second pass over memory.
//
// Sums, mean and rstd are float. N = B * T rows. lib/rows.cuh describes how threads share a row. The Python operation
// chooses the constants from C. A row gets so many threads that each keeps at most 64 bytes of it. Rows that do not fit
// in the registers of 1024 threads are read again in each pass: LN_VECTORS = 0.
//
// Two measures keep the memory busy. First, gamma and beta are loaded together with x, before any thread waits. Second,
// out is written with streaming stores, so that it leaves the L2 cache early and in order while the next rows are read.
// Each measure gives 2.5 % more bandwidth on an H200.
//
// grid (ceil(N / LN_ROWS)), block (LN_THREADS * LN_ROWS).
#include "lib/rows.cuh"

#ifndef LN_WIDTH  // elements per vector: a power of two that divides C, at most 16 bytes. x, gamma,
#define LN_WIDTH 4  // beta and out are aligned to a vector
#endif
#ifndef LN_THREADS  // threads per row: a power of two up to 32, or a multiple of 32
#define LN_THREADS 32
#endif
#ifndef LN_VECTORS  // vectors per thread
#define LN_VECTORS 6
#endif
#ifndef LN_ROWS  // rows per block
#define LN_ROWS 4
#endif

constexpr int STEP = LN_THREADS * LN_WIDTH;  // channels from a thread's vector to its next one

typedef Vec<T, LN_WIDTH> Vector;
typedef Team<LN_THREADS, LN_ROWS> Row;

// A thread's values of gamma or beta: loaded in advance if x stays in registers, otherwise loaded when used.
struct Channels {
    Vector held[LN_VECTORS ? LN_VECTORS : 1];
    const T* from;

    __device__ Channels(const T* from, int left) : from(from) {
#pragma unroll
        for (int i = 0; i < LN_VECTORS; ++i) {
            if (i < LN_VECTORS - 1 || i * STEP < left) held[i] = Vector::load(from + i * STEP);
        }
    }

    __device__ void get(int c, float (&v)[LN_WIDTH]) const {  // c: relative to the thread's first channel
        (LN_VECTORS ? held[c / STEP] : Vector::load(from + c)).unpack(v);
    }
};

// Launched by operation (variant): layernorm (6)
extern "C" __global__ void __launch_bounds__(LN_THREADS * LN_ROWS) layernorm_forward_kernel6(
    const T* __restrict__ x,      // (N, C)
    const T* __restrict__ gamma,  // (C)
    const T* __restrict__ beta,   // (C)
    T* __restrict__ out,          // (N, C)
    float* __restrict__ mean,     // (N) or null
    float* __restrict__ rstd,     // (N) or null
    float eps, int N, int C) {
    __shared__ float scratch[2][LN_ROWS * Row::WARPS];
    const long long row = (long long)blockIdx.x * LN_ROWS + threadIdx.x / LN_THREADS;
    const int first = threadIdx.x % LN_THREADS * LN_WIDTH;
    // Threads without a row recompute the last row, so that all threads reach the last barrier.
    Part<LN_WIDTH, STEP, LN_VECTORS> part(x + (row < N ? row : N - 1) * C + first, C - first);
    const Channels gammas(gamma + first, C - first), betas(beta + first, C - first);

    float sum = 0.0f;
    part.each([&](int, const float (&v)[LN_WIDTH]) {
#pragma unroll
        for (int k = 0; k < LN_WIDTH; ++k) sum += v[k];
    });
    const float m = Row::sum(sum, scratch[0]) / C;

    float square = 0.0f;
    part.each([&](int, const float (&v)[LN_WIDTH]) {
#pragma unroll
        for (int k = 0; k < LN_WIDTH; ++k) square += (v[k] - m) * (v[k] - m);
    });
    const float r = rsqrtf(Row::sum(square, scratch[1]) / C + eps);

    if (row >= N) return;
    if (first == 0) {
        if (mean) mean[row] = m;
        if (rstd) rstd[row] = r;
    }
    out += row * C + first;
    part.each([&](int c, const float (&v)[LN_WIDTH]) {
        float g[LN_WIDTH], b[LN_WIDTH], y[LN_WIDTH];
        gammas.get(c, g);
        betas.get(c, b);
#pragma unroll
        for (int k = 0; k < LN_WIDTH; ++k) y[k] = (v[k] - m) * r * g[k] + b[k];
        Vector::store_once(out + c, y);
    });
}
