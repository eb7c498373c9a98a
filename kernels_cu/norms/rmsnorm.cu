// RMSNorm: scales every row to a root mean square of 1, then multiplies each channel by a weight.
//
//   out = x * r * weight,   r = 1 / sqrt(mean(x^2) + eps)   over each row of C channels
//   with RMS_RESIDUAL 1: first x = x + residual, rounded to T and stored in `sum`
//
//   rmsnorm_rows: rows in registers, x read once, the weight loaded together with x; at most one barrier. RMS_THREADS
//       neighbouring threads share a row. A single row is latency-bound, so all loads are issued before the first value
//       is used.
//
// The operation is the RMSNorm of kernl's Llama kernels. x, weight and out are float, __half or __nv_bfloat16; the sum
// of squares and r are float. x may be some columns of a wider matrix: row m begins at m * x_stride. lib/rows.cuh
// describes how threads share a row. The Python operation chooses the constants from M and C: many threads per row if
// there are few rows. Rows that do not fit in the registers are read twice: RMS_VECTORS = 0.
//
// The kernel lets the next kernel start early (lib/overlap.cuh) but does not wait for the previous one: it must be
// launched normally.
//
// grid (ceil(M / RMS_ROWS)), block (RMS_THREADS * RMS_ROWS).
#include "lib/overlap.cuh"
#include "lib/rows.cuh"

#ifndef RMS_C
#define RMS_C 4096
#endif
#ifndef RMS_WIDTH  // elements per vector: a power of two, at most 16 bytes, that divides C and x_stride; x,
#define RMS_WIDTH 4  // weight and out are aligned to a vector
#endif
#ifndef RMS_THREADS  // threads per row: a power of two up to 32, or a multiple of 32
#define RMS_THREADS 256
#endif
#ifndef RMS_VECTORS  // vectors per thread
#define RMS_VECTORS 4
#endif
#ifndef RMS_ROWS  // rows per block
#define RMS_ROWS 1
#endif
#ifndef RMS_RESIDUAL
#define RMS_RESIDUAL 0
#endif

constexpr int STEP = RMS_THREADS * RMS_WIDTH;  // channels from a thread's vector to its next one
constexpr bool WHOLE = RMS_C == STEP * RMS_VECTORS;
constexpr int SUMS = RMS_WIDTH < 4 ? RMS_WIDTH : 4;  // independent partial sums per thread
static_assert(RMS_C % RMS_WIDTH == 0, "a row is whole vectors");
static_assert(RMS_VECTORS == 0 || ((RMS_VECTORS - 1) * STEP < RMS_C && RMS_C <= RMS_VECTORS * STEP),
              "a row fits in its threads' vectors, and needs all of them");

typedef Vec<T, RMS_WIDTH> Vector;
typedef Team<RMS_THREADS, RMS_ROWS> Row;

// The weights or residuals of a thread's part of a row. The constructor issues the loads.
template <int VECTORS>
struct Weights {
    Vector raw[VECTORS];
    const int left;

    __device__ Weights(const T* weight, int left) : left(left) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (WHOLE || i * STEP < left) raw[i] = Vector::load(weight + i * STEP);
        }
    }

    __device__ Vector at(int c) const { return raw[c / STEP]; }

    // Returns zero, even if the weights are NaN. A sum of squares that starts with this zero depends on the weights, so
    // the compiler must load them first. Otherwise it would load the weights after x has arrived, to save registers.
    __device__ float zero(int sum) const {
        float total = 0.0f;
#pragma unroll
        for (int i = sum; i < VECTORS; i += SUMS) {
            float v[RMS_WIDTH];
            raw[i].unpack(v);
            if (WHOLE || i * STEP < left) total += fminf(fabsf(v[0]), 0.0f);
        }
        return total;
    }
};

template <>
struct Weights<0> {  // weights are loaded when they are used
    const T* weight;

    __device__ Weights(const T* weight, int) : weight(weight) {}
    __device__ Vector at(int c) const { return Vector::load(weight + c); }
    __device__ float zero(int) const { return 0.0f; }
};

// Launched by operation (variant): rmsnorm (rows)
extern "C" __global__ void __launch_bounds__(RMS_THREADS * RMS_ROWS) rmsnorm_rows(
    const T* __restrict__ x,         // (M, C), rows x_stride apart
    const T* __restrict__ residual,  // (M, C); not read with RMS_RESIDUAL 0
    const T* __restrict__ weight,    // (C)
    T* __restrict__ sum,             // (M, C): x + residual; not written with RMS_RESIDUAL 0
    T* __restrict__ out,             // (M, C)
    long long x_stride, float eps, int M) {
    let_next_start();
    __shared__ float scratch[RMS_ROWS * Row::WARPS];
    const int first = threadIdx.x % RMS_THREADS * RMS_WIDTH;
    long long row = blockIdx.x;
    bool inside = true;
    if (RMS_ROWS > 1) {
        row = row * RMS_ROWS + threadIdx.x / RMS_THREADS;
        inside = row < M;
        if (!inside) row = M - 1;  // threads without a row recompute the last row, to reach the last barrier
    }
    Part<RMS_WIDTH, STEP, RMS_VECTORS, WHOLE> part(x + row * x_stride + first, RMS_C - first);
    const Weights<RMS_VECTORS> weights(weight + first, RMS_C - first);
    const long long begin = row * RMS_C + first;
    const Weights<RMS_RESIDUAL ? RMS_VECTORS : 0> residuals(residual + (RMS_RESIDUAL ? begin : 0), RMS_C - first);
    const auto add = [&](int c, float (&v)[RMS_WIDTH]) {
        float old[RMS_WIDTH];
        residuals.at(c).unpack(old);
#pragma unroll
        for (int k = 0; k < RMS_WIDTH; ++k) v[k] = widen(narrow(v[k] + old[k]));
    };
    const auto scale = [&](int c, float (&v)[RMS_WIDTH]) {
        float w[RMS_WIDTH];
        weights.at(c).unpack(w);
#pragma unroll
        for (int k = 0; k < RMS_WIDTH; ++k) v[k] *= w[k];
    };

    float squares[SUMS];
#pragma unroll
    for (int k = 0; k < SUMS; ++k) squares[k] = weights.zero(k);
    part.each([&](int c, float (&v)[RMS_WIDTH]) {
        if (RMS_RESIDUAL) {
            add(c, v);
            if (inside) Vector::store(sum + begin + c, v);
        }
#pragma unroll
        for (int k = 0; k < RMS_WIDTH; ++k) squares[k % SUMS] += v[k] * v[k];
        if (RMS_VECTORS > 0) scale(c, v);  // if x is in registers, scale before the barrier
    });
    float square = squares[0];
#pragma unroll
    for (int k = 1; k < SUMS; ++k) square += squares[k];
    const float r = rsqrtf(Row::sum(square, scratch) * (1.0f / RMS_C) + eps);

    if (!inside) return;
    out += begin;
    part.each([&](int c, float (&v)[RMS_WIDTH]) {
        if (RMS_RESIDUAL && RMS_VECTORS == 0) add(c, v);
        if (RMS_VECTORS == 0) scale(c, v);
        float y[RMS_WIDTH];
#pragma unroll
        for (int k = 0; k < RMS_WIDTH; ++k) y[k] = v[k] * r;
        Vector::store(out + c, y);
    });
}
