// Softmax over rows: y = exp(x - max) / sum of exp(x - max), in place if y is x.
//
//   x, y (rows, n). With SOFTMAX_CAUSAL the rows form squares (n, n): row t of a square sees its columns 0..t. The
//   other columns are never read and are set to 0. A value of -inf has weight 0. If a row contains only -inf, or any
//   NaN or +inf, all columns that the row sees become NaN.
//
// The kernels have the names of llm.c's softmax kernels. Each variant changes one thing compared with the previous one:
//
//   softmax_forward_kernel1: one block per row: maximum, sum, quotient, three passes over x
//   softmax_forward_kernel2: one warp per row: maximum and sum in one pass. This online pass rescales the sum whenever
//       the maximum grows. x is read twice, and there is no barrier
//   softmax_forward_kernel3: one block per row, 16-byte loads: rows of any length. Each thread makes an online pass,
//       for long rows such as logits of a vocabulary
//   softmax_forward_kernel4: rows in registers: x is read once. The row must fit in the registers; exp is computed once
//       per value
//
//      online, each lane                m = -inf, s = 0
//        for each x:                    m' = max(m, x);  s = s exp(m - m') + exp(x - m');  m = m'
//      combine lanes                    m = max m_i;     s = sum s_i exp(m_i - m)
#include "lib/common.cuh"

#ifndef SOFTMAX_CAUSAL
#define SOFTMAX_CAUSAL 0
#endif
#ifndef SOFTMAX_BLOCK  // block size of kernel 1: a power of two
#define SOFTMAX_BLOCK 256
#endif
#ifndef SOFTMAX_WIDTH  // kernels 3 and 4: values per load, 4, or 1 if rows are not aligned to 16 bytes
#define SOFTMAX_WIDTH 4
#endif
#ifndef SOFTMAX_THREADS  // kernel 4: threads that share a row, a power of two up to 32 or a multiple of 32
#define SOFTMAX_THREADS 128
#endif
#ifndef SOFTMAX_HELD  // kernel 4: loads that a thread keeps in registers
#define SOFTMAX_HELD 2
#endif
#ifndef SOFTMAX_ROWS  // kernel 4: rows per block; must be 1 if a row has more than one warp
#define SOFTMAX_ROWS 1
#endif

constexpr int WARPS = (SOFTMAX_THREADS + 31) / 32;  // warps that share a row in kernel 4
static_assert(SOFTMAX_THREADS % 32 == 0 || 32 % SOFTMAX_THREADS == 0, "a part of a warp, or whole warps");
static_assert(SOFTMAX_ROWS == 1 || WARPS == 1, "rows that share a block must not need its barrier");
static_assert(SOFTMAX_HELD * SOFTMAX_WIDTH <= 32 && SOFTMAX_THREADS <= 512, "a row must fit in registers");

struct alignas(4 * SOFTMAX_WIDTH) Pack {
    float v[SOFTMAX_WIDTH];
};

__device__ int visible_columns(int row, int n) { return SOFTMAX_CAUSAL ? row % n + 1 : n; }

// The value subtracted before exp: the maximum, or 0 if only -inf has been seen. exp(-inf - 0) is 0, but exp(-inf +
// inf) would be NaN.
__device__ float reference_point(float max) { return max == -INFINITY ? 0.0f : max; }

// Loads columns first .. first + SOFTMAX_WIDTH - 1 of a row. Columns that the row does not see are set to -inf without
// a load.
__device__ Pack load(const float* x, int first, int visible) {
    if (first + SOFTMAX_WIDTH <= visible) return *reinterpret_cast<const Pack*>(x + first);
    Pack pack;
#pragma unroll
    for (int j = 0; j < SOFTMAX_WIDTH; ++j) {
        pack.v[j] = SOFTMAX_CAUSAL && first + j < visible ? x[first + j] : -INFINITY;  // not causal: after the row
    }
    return pack;
}

struct Online {
    float max, sum;
};

// Combines a lane's maximum and sum with the maxima and sums of the other lanes of its warp.
__device__ Online combine_warp(Online own) {
    const float max = lanes_max<32>(own.max);
    return {max, lanes_sum<32>(own.sum * expf(own.max - reference_point(max)))};
}

// launch: grid=rows block=256
extern "C" __global__ void __launch_bounds__(SOFTMAX_BLOCK) softmax_forward_kernel1(
    const float* x,  // (rows, n)
    float* y,        // (rows, n)
    int rows, int n) {
    __shared__ float scratch[SOFTMAX_BLOCK];
    const int row = blockIdx.x;
    if (row >= rows) return;
    const int visible = visible_columns(row, n);
    x += (long long)row * n;
    y += (long long)row * n;

    float max = -INFINITY;
    for (int c = threadIdx.x; c < visible; c += SOFTMAX_BLOCK) max = fmaxf(max, x[c]);
    max = block_reduce_max<SOFTMAX_BLOCK>(max, scratch);

    float sum = 0.0f;
    for (int c = threadIdx.x; c < visible; c += SOFTMAX_BLOCK) sum += expf(x[c] - max);
    sum = block_reduce_sum<SOFTMAX_BLOCK>(sum, scratch);

    for (int c = threadIdx.x; c < n; c += SOFTMAX_BLOCK) y[c] = c < visible ? expf(x[c] - max) / sum : 0.0f;
}

// launch: grid=ceil(rows / (block / 32)) block=256
extern "C" __global__ void softmax_forward_kernel2(
    const float* x,  // (rows, n)
    float* y,        // (rows, n)
    int rows, int n) {
    const int lane = threadIdx.x % 32;
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const int visible = visible_columns(row, n);
    x += (long long)row * n;
    y += (long long)row * n;

    Online own = {-INFINITY, 0.0f};
    for (int c = lane; c < visible; c += 32) {
        const float max = fmaxf(own.max, x[c]), point = reference_point(max);
        own = {max, own.sum * expf(own.max - point) + expf(x[c] - point)};
    }
    const Online all = combine_warp(own);

    const float point = reference_point(all.max), scale = 1.0f / all.sum;
    for (int c = lane; c < n; c += 32) y[c] = c < visible ? expf(x[c] - point) * scale : 0.0f;
}

// Any block of a multiple of 32 threads; n is a multiple of SOFTMAX_WIDTH.
// launch: grid=rows block=256
extern "C" __global__ void softmax_forward_kernel3(
    const float* x,  // (rows, n)
    float* y,        // (rows, n)
    int rows, int n) {
    __shared__ Online parts[32];  // maximum and sum of each warp
    const int warps = blockDim.x / 32, step = blockDim.x * SOFTMAX_WIDTH;
    const int row = blockIdx.x;
    if (row >= rows) return;
    const int visible = visible_columns(row, n);
    x += (long long)row * n;
    y += (long long)row * n;

    Online own = {-INFINITY, 0.0f};
    for (int c = threadIdx.x * SOFTMAX_WIDTH; c < visible; c += step) {
        const Pack pack = load(x, c, visible);
        float max = own.max;
#pragma unroll
        for (int j = 0; j < SOFTMAX_WIDTH; ++j) max = fmaxf(max, pack.v[j]);
        const float point = reference_point(max);
        float sum = own.sum * expf(own.max - point);  // one expf per load, not per value
#pragma unroll
        for (int j = 0; j < SOFTMAX_WIDTH; ++j) sum += expf(pack.v[j] - point);
        own = {max, sum};
    }
    own = combine_warp(own);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = own;
    __syncthreads();
    float max = -INFINITY, sum = 0.0f;
    for (int w = 0; w < warps; ++w) max = fmaxf(max, parts[w].max);
    const float point = reference_point(max);
    for (int w = 0; w < warps; ++w) sum += parts[w].sum * expf(parts[w].max - point);
    const float scale = 1.0f / sum;

    for (int c = threadIdx.x * SOFTMAX_WIDTH; c < n; c += step) {
        Pack pack = load(x, c, visible);
#pragma unroll
        for (int j = 0; j < SOFTMAX_WIDTH; ++j) pack.v[j] = c + j < visible ? expf(pack.v[j] - point) * scale : 0.0f;
        *reinterpret_cast<Pack*>(y + c) = pack;
    }
}

// Each warp computes exp relative to its own maximum. The maxima and sums of the warps are combined at one barrier.
// n <= SOFTMAX_THREADS * SOFTMAX_HELD * SOFTMAX_WIDTH, a multiple of SOFTMAX_WIDTH.
// grid (ceil(rows / SOFTMAX_ROWS)), block (SOFTMAX_THREADS * SOFTMAX_ROWS)
extern "C" __global__ void __launch_bounds__(SOFTMAX_THREADS* SOFTMAX_ROWS) softmax_forward_kernel4(
    const float* x,  // (rows, n)
    float* y,        // (rows, n)
    int rows, int n) {
    unsigned thread = threadIdx.x;
    int row = blockIdx.x;
    bool inside = true;
    if (SOFTMAX_ROWS > 1) {
        thread %= SOFTMAX_THREADS;
        row = row * SOFTMAX_ROWS + threadIdx.x / SOFTMAX_THREADS;
        inside = row < rows;
    }
    // Threads beyond the last row read nothing, but they must take part in the shuffles.
    const int visible = inside ? visible_columns(row, n) : 0;
    x += (long long)row * n;
    y += (long long)row * n;

    Pack held[SOFTMAX_HELD];
#pragma unroll
    for (int i = 0; i < SOFTMAX_HELD; ++i) {
        held[i] = load(x, (thread + i * SOFTMAX_THREADS) * SOFTMAX_WIDTH, visible);
    }
    float max = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < SOFTMAX_HELD; ++i) {
#pragma unroll
        for (int j = 0; j < SOFTMAX_WIDTH; ++j) max = fmaxf(max, held[i].v[j]);
    }
    constexpr int LANES = WARPS > 1 ? 32 : SOFTMAX_THREADS;
    max = lanes_max<LANES>(max);
    float point = reference_point(max);
#pragma unroll
    for (int i = 0; i < SOFTMAX_HELD; ++i) {
#pragma unroll
        for (int j = 0; j < SOFTMAX_WIDTH; ++j) {
            held[i].v[j] = expf(held[i].v[j] - point);
            sum += held[i].v[j];
        }
    }
    sum = lanes_sum<LANES>(sum);
    float scale = 1.0f;

#if SOFTMAX_THREADS > 32
    __shared__ Online parts[WARPS];
    if (thread % 32 == 0) parts[thread / 32] = {max, sum};
    __syncthreads();
    const float own_max = max;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) max = fmaxf(max, parts[w].max);
    point = reference_point(max);
    sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += parts[w].sum * expf(parts[w].max - point);
    scale = expf(own_max - point);
#endif
    scale /= sum;

    if (!inside) return;
#pragma unroll
    for (int i = 0; i < SOFTMAX_HELD; ++i) {
        const int c = (thread + i * SOFTMAX_THREADS) * SOFTMAX_WIDTH;
        if (c >= n) break;
#pragma unroll
        for (int j = 0; j < SOFTMAX_WIDTH; ++j) held[i].v[j] = c + j < visible ? held[i].v[j] * scale : 0.0f;
        *reinterpret_cast<Pack*>(y + c) = held[i];
    }
}
