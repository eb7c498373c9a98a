// Chapter 7, exercise 3: softmax, one block per row, which stays in registers; its warps merge at one barrier
//
// Each thread loads up to HELD values before it uses the first one. A warp computes the maximum
// m of its values, exp(value - m) of each value, and the sum s of these. The warps write (m, s)
// to shared memory. Every thread merges all pairs and multiplies its values by exp(m of its
// warp - m of the row). Longer rows are read twice, as in exercise 2.
//   gpt2block kernels softmax --mine my.cu
//   gpt2block kernels softmax --mine my.cu --shape B=1,NH=1,T=1030
//
// launch: grid=rows block=128
#include "lib/common.cuh"  // lanes_max and lanes_sum: five shuffles each

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int HELD = 8;  // values per thread: for rows of up to HELD * THREADS = 1024 values

struct Online {
    float m, s;  // the largest value, the sum of exp(value - m)
};

// Return the number to subtract before exp: m, or 0 if m is -inf, since exp(-inf - 0) is 0.
__device__ float reference(float m) { return m == -INFINITY ? 0.0f : m; }

__device__ Online merged(Online a, Online b) {
    const float m = fmaxf(a.m, b.m), point = reference(m);
    return {m, a.s * expf(a.m - point) + b.s * expf(b.m - point)};
}

// Return (m, s) of the block, merged from (m, s) of each warp. parts: shared memory, (WARPS).
__device__ Online merged_over_warps(Online of_warp, Online* parts) {
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = of_warp;
    __syncthreads();
    Online all = parts[0];
    for (int w = 1; w < WARPS; ++w) all = merged(all, parts[w]);
    return all;
}

__device__ void in_registers(const float* x_row, float* y_row, int n, Online* parts) {
    float held[HELD], m = -INFINITY, s = 0.0f;
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        const int i = threadIdx.x + k * THREADS;
        held[k] = i < n ? x_row[i] : -INFINITY;
        m = fmaxf(m, held[k]);
    }
    m = lanes_max<32>(m);
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        held[k] = expf(held[k] - reference(m));
        s += held[k];
    }
    const Online all = merged_over_warps({m, lanes_sum<32>(s)}, parts);

    const float scale = expf(m - reference(all.m)) / all.s;  // 0 if all values of the warp are -inf
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        const int i = threadIdx.x + k * THREADS;
        if (i < n) y_row[i] = held[k] * scale;
    }
}

__device__ void from_memory(const float* x_row, float* y_row, int n, Online* parts) {
    Online own = {-INFINITY, 0.0f};
    for (int i = threadIdx.x; i < n; i += THREADS) own = merged(own, {x_row[i], 1.0f});
    const float m = lanes_max<32>(own.m);
    const float s = lanes_sum<32>(own.s * expf(own.m - reference(m)));
    const Online all = merged_over_warps({m, s}, parts);
    for (int i = threadIdx.x; i < n; i += THREADS) y_row[i] = expf(x_row[i] - reference(all.m)) / all.s;
}

extern "C" __global__ void my_softmax(
    const float* x,  // (rows, n)
    float* y,        // (rows, n)
    int n) {
    __shared__ Online parts[WARPS];
    const float* x_row = x + (long long)blockIdx.x * n;
    float* y_row = y + (long long)blockIdx.x * n;
    if (n <= HELD * THREADS) {
        in_registers(x_row, y_row, n, parts);
    } else {
        from_memory(x_row, y_row, n, parts);
    }
}
