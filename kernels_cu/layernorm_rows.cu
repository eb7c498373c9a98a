// LayerNorm forward, kernel 6: rows kept in registers, one pass over memory.
//
//   out = (x - mean) * rstd * gamma + beta,   rstd = 1 / sqrt(var + eps)   over each row of C channels
//
//   6  layernorm_forward_kernel6   LN_THREADS neighbouring threads share a row. Each loads its part with 16-byte
//                                  loads, all of them before it uses the first, and keeps it. So x crosses the
//                                  bus once, out once, and the variance can be taken around the mean, safe for
//                                  any mean, at the price of a few shuffles instead of a second pass.
//
// Storage is float, __half or __nv_bfloat16 (x, gamma, beta, out); sums, mean and rstd are float. N = B * T rows.
// Vector v of a row belongs to thread v % LN_THREADS, so neighbours read neighbours:
//
//   row   [ 0 1 2 ... 31 | 0 1 2 ... 31 | ... ]   LN_THREADS = 32, LN_VECTORS such groups; the last may be short
//
// The op picks the constants from C: a row takes as many threads as keep 32 elements each at most in registers.
// Longer rows than 1024 threads can keep (24 elements each) are read again for each pass: LN_VECTORS = 0.
//
// grid (ceil(N / LN_ROWS)), block (LN_THREADS * LN_ROWS).
#include "common.cuh"
#include "storage.cuh"

#ifndef LN_WIDTH  // elements of a vector, a power of two of at most 16 bytes that divides C; x, gamma, beta, out
#define LN_WIDTH 4  // are aligned to it
#endif
#ifndef LN_THREADS  // of a row: a power of two up to 32, or a multiple of 32
#define LN_THREADS 32
#endif
#ifndef LN_VECTORS  // of a thread
#define LN_VECTORS 6
#endif
#ifndef LN_ROWS  // of a block
#define LN_ROWS 4
#endif

constexpr int LANES = LN_THREADS < 32 ? LN_THREADS : 32;  // of a warp that share a row
constexpr int WARPS = LN_THREADS / LANES;                 // that share a row
constexpr int STEP = LN_THREADS * LN_WIDTH;               // channels from a thread's vector to its next one
static_assert((LANES & (LANES - 1)) == 0 && LN_THREADS % LANES == 0, "LN_THREADS: 1, 2, 4, 8, 16 or a multiple of 32");
static_assert(LN_THREADS * LN_ROWS % 32 == 0, "a block is whole warps");

typedef Vec<T, LN_WIDTH> Vector;

__device__ void load(const T* from, float (&v)[LN_WIDTH]) { Vector::load(from).unpack(v); }

// The sum over the threads of a row, for all of them. scratch: a float a warp of the block, used once. Every
// thread of the block must call it, those without a row too.
__device__ float row_sum(float value, float* scratch) {
    value = lanes_sum<LANES>(value);
    if constexpr (WARPS > 1) {
        const int lane = threadIdx.x % 32, row = threadIdx.x / LN_THREADS;
        if (lane == 0) scratch[threadIdx.x / 32] = value;
        __syncthreads();
        value = lanes_sum<32>(lane < WARPS ? scratch[row * WARPS + lane] : 0.0f);
    }
    return value;
}

// A thread's part of a row, from its first channel on: the vectors at 0, STEP, 2 STEP, ... below `channels`.
// each(use) calls use(offset, vector) for all of them.
template <int VECTORS>
struct Part {  // kept in registers; all loads are issued here, before the first value is used
    float v[VECTORS][LN_WIDTH];
    const int channels;

    __device__ Part(const T* x, int channels) : channels(channels) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (inside(i)) Vector::load_once(x + i * STEP).unpack(v[i]);  // what stays in the cache is out
        }
    }

    template <typename Use>
    __device__ void each(Use use) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (inside(i)) use(i * STEP, v[i]);
        }
    }

    // Only the last vector can lie beyond the row: LN_VECTORS is no larger than it must be.
    __device__ bool inside(int i) const { return i < VECTORS - 1 || i * STEP < channels; }
};

template <>
struct Part<0> {  // read again each time
    const T* x;
    const int channels;

    __device__ Part(const T* x, int channels) : x(x), channels(channels) {}

    template <typename Use>
    __device__ void each(Use use) {
        float v[LN_WIDTH];
#pragma unroll 2  // more does not fit in the registers of 1024 threads
        for (int c = 0; c < channels; c += STEP) {
            load(x + c, v);
            use(c, v);
        }
    }
};

extern "C" __global__ void __launch_bounds__(LN_THREADS * LN_ROWS) layernorm_forward_kernel6(
    const T* __restrict__ x,      // (N, C)
    const T* __restrict__ gamma,  // (C)
    const T* __restrict__ beta,   // (C)
    T* __restrict__ out,          // (N, C)
    float* __restrict__ mean,     // (N) or null
    float* __restrict__ rstd,     // (N) or null
    float eps, int N, int C) {
    __shared__ float scratch[2][LN_ROWS * WARPS];
    const long long row = (long long)blockIdx.x * LN_ROWS + threadIdx.x / LN_THREADS;
    const int first = threadIdx.x % LN_THREADS * LN_WIDTH;
    // Threads without a row go along with the last one, as far as the last barrier.
    Part<LN_VECTORS> part(x + (row < N ? row : N - 1) * C + first, C - first);

    float sum = 0.0f;
    part.each([&](int, const float (&v)[LN_WIDTH]) {
#pragma unroll
        for (int k = 0; k < LN_WIDTH; ++k) sum += v[k];
    });
    const float m = row_sum(sum, scratch[0]) / C;

    float square = 0.0f;
    part.each([&](int, const float (&v)[LN_WIDTH]) {
#pragma unroll
        for (int k = 0; k < LN_WIDTH; ++k) square += (v[k] - m) * (v[k] - m);
    });
    const float r = rsqrtf(row_sum(square, scratch[1]) / C + eps);

    if (row >= N) return;
    if (first == 0) {
        if (mean) mean[row] = m;
        if (rstd) rstd[row] = r;
    }
    gamma += first;
    beta += first;
    out += row * C + first;
    part.each([&](int c, const float (&v)[LN_WIDTH]) {
        float g[LN_WIDTH], b[LN_WIDTH], y[LN_WIDTH];
        load(gamma + c, g);
        load(beta + c, b);
#pragma unroll
        for (int k = 0; k < LN_WIDTH; ++k) y[k] = (v[k] - m) * r * g[k] + b[k];
        Vector::store(out + c, y);
    });
}
