// Chapter 3, exercise 2: LayerNorm, one block per row, which stays in registers
//
// Each thread loads its part of the row, at most HELD float4, before it uses the first
// value. `held` has a constant size and all loops over it are unrolled, so that the
// compiler gives each element a register. Rows that do not fit, or whose length is no
// multiple of 4, are read from memory three times, as in chapter 2.
//   gpt2block kernels layernorm --mine my.cu
//   gpt2block kernels layernorm --mine my.cu --shape C=2048
//   gpt2block kernels layernorm --mine my.cu --shape C=2052
//
// launch: grid=N block=256
#include "lib/common.cuh"  // block_reduce_sum: the tree of chapter 2

#define THREADS 256
#define HELD 2  // float4 per thread: for rows of up to 4 * HELD * THREADS = 2048 channels

__device__ float normalized(float x, float mean, float rstd, float gamma, float beta) {
    return (x - mean) * rstd * gamma + beta;
}

// x_row and out_row begin at multiples of 16 bytes; C is a multiple of 4 and at most 4 *
// HELD * THREADS.
__device__ void in_registers(
    const float* x_row, const float* gamma, const float* beta, float* out_row, float eps, int C, float* partial) {
    float4 held[HELD];
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        const int i = threadIdx.x + k * THREADS;
        held[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < C / 4) held[k] = reinterpret_cast<const float4*>(x_row)[i];
        sum += held[k].x + held[k].y + held[k].z + held[k].w;
    }
    const float mean = block_reduce_sum<THREADS>(sum, partial) / C;

    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        if (threadIdx.x + k * THREADS >= C / 4) continue;  // a zero that is not in the row would add mean^2
        const float x = held[k].x - mean, y = held[k].y - mean, z = held[k].z - mean, w = held[k].w - mean;
        squares += x * x + y * y + z * z + w * w;
    }
    const float rstd = rsqrtf(block_reduce_sum<THREADS>(squares, partial) / C + eps);

#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        const int i = threadIdx.x + k * THREADS;
        if (i >= C / 4) continue;
        const float4 g = reinterpret_cast<const float4*>(gamma)[i], b = reinterpret_cast<const float4*>(beta)[i];
        reinterpret_cast<float4*>(out_row)[i] = make_float4(
            normalized(held[k].x, mean, rstd, g.x, b.x), normalized(held[k].y, mean, rstd, g.y, b.y),
            normalized(held[k].z, mean, rstd, g.z, b.z), normalized(held[k].w, mean, rstd, g.w, b.w));
    }
}

__device__ void from_memory(
    const float* x_row, const float* gamma, const float* beta, float* out_row, float eps, int C, float* partial) {
    float sum = 0.0f;
    for (int c = threadIdx.x; c < C; c += THREADS) sum += x_row[c];
    const float mean = block_reduce_sum<THREADS>(sum, partial) / C;

    float squares = 0.0f;
    for (int c = threadIdx.x; c < C; c += THREADS) squares += (x_row[c] - mean) * (x_row[c] - mean);
    const float rstd = rsqrtf(block_reduce_sum<THREADS>(squares, partial) / C + eps);

    for (int c = threadIdx.x; c < C; c += THREADS) out_row[c] = normalized(x_row[c], mean, rstd, gamma[c], beta[c]);
}

extern "C" __global__ void my_layernorm(
    const float* x,      // (N, C)
    const float* gamma,  // (C)
    const float* beta,   // (C)
    float* out,          // (N, C)
    float eps, int C) {
    __shared__ float partial[THREADS];
    const float* x_row = x + (long long)blockIdx.x * C;
    float* out_row = out + (long long)blockIdx.x * C;
    if (C % 4 == 0 && C <= 4 * HELD * THREADS) {
        in_registers(x_row, gamma, beta, out_row, eps, C, partial);
    } else {
        from_memory(x_row, gamma, beta, out_row, eps, C, partial);
    }
}
