// LayerNorm and GELU in one kernel: y = GELU((x - mean) * rsqrt(var + eps) * gamma + beta) over each row of x, GELU(v)
// = 0.5 v (1 + tanh(sqrt(2/pi) (v + 0.044715 v^3))).
//
// x is read once and y written once. Two separate kernels would store the normalised rows and read them again.
//
//   layernorm_gelu_baseline: one thread per element, each thread sums its whole row
//   layernorm_gelu_optimized: one block per row, sum and sum of squares in one pass, tree over shared memory. A second
//       pass normalises and applies GELU. var = E[x^2] - E[x]^2, clamped to at least 0
//   layernorm_gelu_rows: rows in registers, 16-byte loads, shuffles and at most one barrier; gamma and beta. A thread
//       issues all its loads at once. GELU takes one exp2 and one division. gamma and beta are optional
#include "lib/common.cuh"

#ifndef LG_HIDDEN  // values per row. All these constants configure layernorm_gelu_rows
#define LG_HIDDEN 768
#endif
#ifndef LG_WIDTH  // values per load: 4, or 1 if rows are not aligned to 16 bytes
#define LG_WIDTH 4
#endif
#ifndef LG_THREADS  // threads that share a row: a power of two up to 32, or a multiple of 32
#define LG_THREADS 192
#endif
#ifndef LG_ROWS  // rows per block; must be 1 if a row has more than one warp
#define LG_ROWS 1
#endif
#ifndef LG_AFFINE  // 0 if there is neither gamma nor beta
#define LG_AFFINE 1
#endif

// --- layernorm_gelu_baseline and layernorm_gelu_optimized: float32, without gamma and beta -----------------------

__device__ float gelu(float v) {
    return 0.5f * v * (1.0f + tanhf(0.7978845608028654f * (v + 0.044715f * v * v * v)));
}

// launch: grid=ceil(batch_size * hidden_dim / block) block=256
extern "C" __global__ void layernorm_gelu_baseline(
    const float* __restrict__ input,  // (batch_size, hidden_dim)
    float* __restrict__ output,       // (batch_size, hidden_dim)
    int batch_size, int hidden_dim, float eps) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (long long)batch_size * hidden_dim) return;
    const float* row = input + i / hidden_dim * hidden_dim;

    float sum = 0.0f;
    for (int c = 0; c < hidden_dim; ++c) sum += row[c];
    const float mean = sum / hidden_dim;
    float squares = 0.0f;
    for (int c = 0; c < hidden_dim; ++c) squares += (row[c] - mean) * (row[c] - mean);
    output[i] = gelu((input[i] - mean) * rsqrtf(squares / hidden_dim + eps));
}

// Any block of a power of two threads.
// launch: grid=batch_size block=256 shared=2 * 4 * block
extern "C" __global__ void layernorm_gelu_optimized(
    const float* __restrict__ input,  // (batch_size, hidden_dim)
    float* __restrict__ output,       // (batch_size, hidden_dim)
    int batch_size, int hidden_dim, float eps) {
    extern __shared__ float shared[];  // (2, blockDim.x)
    float* sums = shared;
    float* squares = shared + blockDim.x;
    const int tid = threadIdx.x;
    if (blockIdx.x >= batch_size) return;
    const float* x = input + (long long)blockIdx.x * hidden_dim;
    float* y = output + (long long)blockIdx.x * hidden_dim;

    float sum = 0.0f, square = 0.0f;
    for (int c = tid; c < hidden_dim; c += blockDim.x) {
        sum += x[c];
        square += x[c] * x[c];
    }
    sums[tid] = sum;
    squares[tid] = square;
    __syncthreads();
    for (int stride = blockDim.x / 2; stride > 0; stride /= 2) {
        if (tid < stride) {
            sums[tid] += sums[tid + stride];
            squares[tid] += squares[tid + stride];
        }
        __syncthreads();
    }
    const float mean = sums[0] / hidden_dim;
    // Rounding can make the difference of two large numbers negative; its square root would be NaN.
    const float rstd = rsqrtf(fmaxf(squares[0] / hidden_dim - __fmul_rn(mean, mean), 0.0f) + eps);
    for (int c = tid; c < hidden_dim; c += blockDim.x) y[c] = gelu((x[c] - mean) * rstd);
}

// --- layernorm_gelu_rows: one pass over memory -------------------------------------------------------------------

constexpr int WARPS = (LG_THREADS + 31) / 32;                // warps that share a row
constexpr int LANES = WARPS > 1 ? 32 : LG_THREADS;           // lanes of a warp that share a row
constexpr int PACKS = LG_HIDDEN / LG_WIDTH;                  // packs of LG_WIDTH values per row
constexpr int HELD = (PACKS + LG_THREADS - 1) / LG_THREADS;  // packs that a thread keeps in registers
static_assert(LG_HIDDEN % LG_WIDTH == 0, "a row is a whole number of loads: LG_HIDDEN % LG_WIDTH == 0");
static_assert(LG_THREADS % 32 == 0 || 32 % LG_THREADS == 0, "a row has a part of a warp, or whole warps");
static_assert(LG_ROWS == 1 || WARPS == 1, "rows that share a block must not need its barrier");
static_assert(HELD * LG_WIDTH <= 32 && LG_THREADS <= 512, "a row must fit in registers");

struct alignas(4 * LG_WIDTH) Pack {
    float v[LG_WIDTH];
};

__device__ bool in_row(unsigned pack) { return PACKS % LG_THREADS == 0 || pack < PACKS; }

// With tanh(u) = 1 - 2 / (1 + exp(2u)), GELU is v / (1 + exp(-2u)). This form has no cancellation, and takes two
// special-function instructions instead of the two branches of tanhf. -2u log2(e) = v (-2.3022082 - 0.1029432 v^2).
__device__ float gelu_by_exp2(float v) {
    return __fdividef(v, 1.0f + exp2f(v * (-2.3022082f - 0.10294324f * (v * v))));
}

__device__ constexpr int values_of(unsigned warp) {  // number of values of a row that a warp holds
    if (WARPS == 1) return LG_HIDDEN;
    if (PACKS % LG_THREADS == 0) return LG_HIDDEN / WARPS;
    int packs = 0;
    for (int i = 0; i < HELD; ++i) {
        const int left = PACKS - i * LG_THREADS - (int)warp * 32;
        packs += left < 0 ? 0 : left < 32 ? left : 32;
    }
    return packs * LG_WIDTH;
}

// Each warp computes the mean of its values and their sum of squared deviations. The results of the warps are combined:
//   sum (x - mean)^2 = sum over the warps of (sum (x - mean_w)^2 + n_w (mean_w - mean)^2),
// which needs one barrier. Two barriers would be needed to compute the mean of the row first and then the variance
// around this mean. The result is as accurate for a large mean, because nothing is squared before a mean is subtracted.
//
// grid (ceil(rows / LG_ROWS)), block (LG_THREADS * LG_ROWS). y may be x: a row is read before it is written.
extern "C" __global__ void __launch_bounds__(LG_THREADS* LG_ROWS) layernorm_gelu_rows(
    const float* x,                   // (rows, LG_HIDDEN)
    float* y,                         // (rows, LG_HIDDEN)
    const float* __restrict__ gamma,  // (LG_HIDDEN) or null
    const float* __restrict__ beta,   // (LG_HIDDEN) or null
    long long rows, float eps) {
    unsigned thread = threadIdx.x;
    long long row = blockIdx.x;
    bool inside = true;
    if (LG_ROWS > 1) {
        thread %= LG_THREADS;
        row = row * LG_ROWS + threadIdx.x / LG_THREADS;
        inside = row < rows;  // lanes without a row take part in the shuffles
    }
    const unsigned warp = thread / 32;
    const Pack* in = reinterpret_cast<const Pack*>(x) + row * PACKS;
    Pack* out = reinterpret_cast<Pack*>(y) + row * PACKS;

    Pack held[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const unsigned p = thread + i * LG_THREADS;
        held[i] = inside && in_row(p) ? in[p] : Pack{};
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        float part = held[i].v[0];  // sum each pack separately: shorter chains of dependent additions
#pragma unroll
        for (int j = 1; j < LG_WIDTH; ++j) part += held[i].v[j];
        sum += part;
    }
    const int n = values_of(warp);
    float mean = lanes_sum<LANES>(sum) * (n ? 1.0f / n : 0.0f);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        float part = 0.0f;
#pragma unroll
        for (int j = 0; j < LG_WIDTH; ++j) part += (held[i].v[j] - mean) * (held[i].v[j] - mean);
        if (in_row(thread + i * LG_THREADS)) squares += part;
    }
    squares = lanes_sum<LANES>(squares);

#if LG_THREADS > 32
    __shared__ float2 parts[WARPS];  // the mean of each warp, and its sum of squared deviations
    if (thread % 32 == 0) parts[warp] = make_float2(mean, squares);
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += parts[w].x * values_of(w);
    mean = total * (1.0f / LG_HIDDEN);
    squares = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const float d = parts[w].x - mean;
        squares += parts[w].y + d * d * values_of(w);
    }
#endif
    const float rstd = rsqrtf(squares * (1.0f / LG_HIDDEN) + eps);

    if (!inside) return;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const unsigned p = thread + i * LG_THREADS;
        if (!in_row(p)) break;
        Pack scale, shift;
#pragma unroll
        for (int j = 0; j < LG_WIDTH; ++j) scale.v[j] = 1.0f, shift.v[j] = 0.0f;
        if (LG_AFFINE && gamma) scale = reinterpret_cast<const Pack*>(gamma)[p];
        if (LG_AFFINE && beta) shift = reinterpret_cast<const Pack*>(beta)[p];
#pragma unroll
        for (int j = 0; j < LG_WIDTH; ++j) {
            held[i].v[j] = gelu_by_exp2((held[i].v[j] - mean) * rstd * scale.v[j] + shift.v[j]);
        }
        out[p] = held[i];
    }
}
